//! Every bit of a parameter list is honoured, ignored for a reason, or refused with a pointer to it. Written from SPC-4 and SBC-3.

mod common;

use common::*;
use scsi::*;

/// A list and its permitted bits. Bytes with all bits permitted are values, which are tested elsewhere.
struct List {
    name: &'static str,
    cdb: &'static [u8],
    list: Vec<u8>,
    /// By byte: bits that are honoured, or ignored for a stated reason.
    may: &'static [(usize, u8)],
    /// Fields of several bits that are refused as one.
    fields: &'static [(usize, u8)],
}

const X: u8 = 0xff;

fn zeroes(length: usize, set: &[(usize, u8)]) -> Vec<u8> {
    let mut list = vec![0; length];
    for &(at, value) in set {
        list[at] = value;
    }
    list
}

#[allow(clippy::too_many_lines, reason = "a table of cases")]
fn lists() -> Vec<List> {
    vec![
        List {
            name: "UNMAP: lengths, LBA, blocks",
            cdb: &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0],
            list: zeroes(24, &[(1, 22), (3, 16)]),
            may: &[
                (0, X),
                (1, X),
                (2, X),
                (3, X),
                (8, X),
                (9, X),
                (10, X),
                (11, X),
                (12, X),
                (13, X),
                (14, X),
                (15, X),
                (16, X),
                (17, X),
                (18, X),
                (19, X),
            ],
            fields: &[],
        },
        List {
            name: "SANITIZE OVERWRITE: INVERT, OVERWRITE COUNT, pattern; not TEST",
            cdb: &[0x48, 0x01, 0, 0, 0, 0, 0, 0, 5, 0],
            list: zeroes(5, &[(0, 1), (3, 1)]),
            may: &[(0, 0x9f), (2, X), (3, X), (4, X)],
            fields: &[(0, 0x60)],
        },
        List {
            // FOV alone: no option is valid without it.
            name: "FORMAT UNIT, short header: FOV, IMMED",
            cdb: &[0x04, 0x10, 0, 0, 0, 0],
            list: zeroes(4, &[]),
            may: &[(1, 0x82), (2, X), (3, X)],
            fields: &[(0, 0x07)],
        },
        List {
            name: "FORMAT UNIT, long header: FOV, DPRY, DCRT, STPF, IP, IMMED; IP MODIFIER and SI are not honoured",
            cdb: &[0x04, 0x30, 0, 0, 0, 0],
            list: zeroes(13, &[(1, 0x88), (9, 1), (11, 1)]),
            may: &[
                (1, 0xfa),
                (4, X),
                (5, X),
                (6, X),
                (7, X),
                (9, X),
                (10, X),
                (11, X),
                (12, X),
            ],
            fields: &[(0, 0x07), (3, 0xf0), (3, 0x0f), (8, 0xc0)],
        },
        List {
            // MODE DATA LENGTH and the device specific parameter are returned as received from MODE SENSE, including PS.
            name: "MODE SELECT(6): a control page",
            cdb: &[0x15, 0x10, 0, 0, 16, 0],
            list: zeroes(16, &[(4, 0x0a), (5, 0x0a), (6, 0x20), (7, 0x10)]),
            may: &[
                (0, X),
                (2, X),
                (3, X),
                (4, X),
                (5, X),
                (6, X),
                (7, X),
                (8, X),
                (9, X),
                (10, X),
                (11, X),
                (12, X),
                (13, X),
                (14, X),
                (15, X),
            ],
            fields: &[],
        },
        List {
            name: "MODE SELECT(10): LONGLBA",
            cdb: &[0x55, 0x10, 0, 0, 0, 0, 0, 0, 20, 0],
            list: zeroes(20, &[(8, 0x0a), (9, 0x0a), (10, 0x20), (11, 0x10)]),
            may: &[
                (0, X),
                (1, X),
                (3, X),
                (4, 0x01),
                (6, X),
                (7, X),
                (8, X),
                (9, X),
                (10, X),
                (11, X),
                (12, X),
                (13, X),
                (14, X),
                (15, X),
                (16, X),
                (17, X),
                (18, X),
                (19, X),
            ],
            fields: &[],
        },
        List {
            // ALL_TG_PT and APTPL; SPEC_I_PT changes the length.
            name: "PERSISTENT RESERVE OUT, REGISTER",
            cdb: &[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0],
            list: zeroes(24, &[]),
            may: &[
                (0, X),
                (1, X),
                (2, X),
                (3, X),
                (4, X),
                (5, X),
                (6, X),
                (7, X),
                (8, X),
                (9, X),
                (10, X),
                (11, X),
                (12, X),
                (13, X),
                (14, X),
                (15, X),
                (20, 0x0d),
            ],
            fields: &[],
        },
        List {
            name: "PERSISTENT RESERVE OUT, REGISTER AND MOVE: UNREG, APTPL",
            cdb: &[0x5f, 7, 0, 0, 0, 0, 0, 0, 24, 0],
            list: zeroes(24, &[]),
            may: &[
                (0, X),
                (1, X),
                (2, X),
                (3, X),
                (4, X),
                (5, X),
                (6, X),
                (7, X),
                (8, X),
                (9, X),
                (10, X),
                (11, X),
                (12, X),
                (13, X),
                (14, X),
                (15, X),
                (17, 0x03),
                (18, X),
                (19, X),
                (20, X),
                (21, X),
                (22, X),
                (23, X),
            ],
            fields: &[],
        },
        List {
            name: "SET TARGET PORT GROUPS: access state, group",
            cdb: &[0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0],
            list: zeroes(8, &[(7, 1)]),
            may: &[(4, 0x0f), (6, X), (7, X)],
            fields: &[],
        },
        List {
            name: "EXTENDED COPY(LID1): STR, LIST ID USAGE, PRIORITY",
            cdb: &[0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0],
            list: zeroes(16, &[]),
            may: &[
                (0, X),
                (1, 0x3f),
                (2, X),
                (3, X),
                (8, X),
                (9, X),
                (10, X),
                (11, X),
                (12, X),
                (13, X),
                (14, X),
                (15, X),
            ],
            fields: &[],
        },
        List {
            name: "EXTENDED COPY(LID4): the same; neither IMMED nor G_SENSE",
            cdb: &[0x83, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 48, 0, 0],
            list: zeroes(48, &[(0, 1), (3, 0x20), (16, X)]),
            may: &[
                (0, X),
                (1, 0x3f),
                (2, X),
                (3, X),
                (16, X),
                (20, X),
                (21, X),
                (22, X),
                (23, X),
                (42, X),
                (43, X),
                (44, X),
                (45, X),
                (46, X),
                (47, X),
            ],
            fields: &[],
        },
        // In descriptors, LU ID TYPE, the initiator port, PAD and CAT have no meaning here; DC is honoured. Byte offsets are refused as
        // numbers: see below.
        List {
            name: "EXTENDED COPY(LID1): block to block",
            cdb: &[0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 76, 0, 0],
            list: zeroes(
                76,
                &[
                    (3, 32),
                    (11, 28),
                    (16, 0xe4),
                    (20, 1),
                    (21, 3),
                    (23, 8),
                    (24, 0x30),
                    (46, 2),
                    (48, 0x02),
                    (51, 24),
                    (59, 1),
                    (75, 1),
                ],
            ),
            may: &[
                (0, X),
                (1, 0x3f),
                (2, X),
                (3, X),
                (8, X),
                (9, X),
                (10, X),
                (11, X),
                (12, X),
                (13, X),
                (14, X),
                (15, X),
                (16, X),
                (17, 0xdf),
                (18, X),
                (19, X),
                (20, 0x0f),
                (21, 0x3f),
                (23, X),
                (24, X),
                (25, X),
                (26, X),
                (27, X),
                (28, X),
                (29, X),
                (30, X),
                (31, X),
                (44, 0x04),
                (45, X),
                (46, X),
                (47, X),
                (48, X),
                (49, 0x03),
                (50, X),
                (51, X),
                (52, X),
                (53, X),
                (54, X),
                (55, X),
                (58, X),
                (59, X),
                (60, X),
                (61, X),
                (62, X),
                (63, X),
                (64, X),
                (65, X),
                (66, X),
                (67, X),
                (68, X),
                (69, X),
                (70, X),
                (71, X),
                (72, X),
                (73, X),
                (74, X),
                (75, X),
            ],
            fields: &[],
        },
        List {
            name: "EXTENDED COPY(LID4): block to block with offset",
            cdb: &[0x83, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 112, 0, 0],
            list: zeroes(
                112,
                &[
                    (0, 1),
                    (3, 0x20),
                    (16, X),
                    (43, 32),
                    (45, 32),
                    (48, 0xe4),
                    (52, 1),
                    (53, 3),
                    (55, 8),
                    (56, 0x30),
                    (78, 2),
                    (80, 0x0a),
                    (83, 28),
                    (90, 2),
                    (107, 1),
                ],
            ),
            may: &[
                (0, X),
                (1, 0x3f),
                (2, X),
                (3, X),
                (16, X),
                (20, X),
                (21, X),
                (22, X),
                (23, X),
                (42, X),
                (43, X),
                (44, X),
                (45, X),
                (46, X),
                (47, X),
                (48, X),
                (49, 0xdf),
                (50, X),
                (51, X),
                (52, 0x0f),
                (53, 0x3f),
                (55, X),
                (56, X),
                (57, X),
                (58, X),
                (59, X),
                (60, X),
                (61, X),
                (62, X),
                (63, X),
                (76, 0x04),
                (77, X),
                (78, X),
                (79, X),
                (80, X),
                (81, 0x01),
                (82, X),
                (83, X),
                (84, X),
                (85, X),
                (86, X),
                (87, X),
                (88, X),
                (89, X),
                (90, X),
                (91, X),
                (92, X),
                (93, X),
                (94, X),
                (95, X),
                (96, X),
                (97, X),
                (98, X),
                (99, X),
                (100, X),
                (101, X),
                (102, X),
                (103, X),
                (104, X),
                (105, X),
                (106, X),
                (107, X),
                (108, X),
                (109, X),
                (110, X),
                (111, X),
            ],
            fields: &[],
        },
    ]
}

#[test]
fn unhonoured_bits_of_lists_are_refused_with_a_pointer() {
    for list in lists() {
        let mut refused = 0;
        for at in 0..list.list.len() {
            let may = list.may.iter().find(|(byte, _)| *byte == at);
            let may = may.map_or(0, |(_, mask)| *mask);
            for bit in (0..8u8).filter(|bit| may >> bit & 1 == 0) {
                let mut bed = Bed::new(512, 2048);
                let mut bytes = list.list.clone();
                bytes[at] |= 1 << bit;
                let answer = bed.run(0, list.cdb, &bytes, 0);
                let name = format!("{}: byte {at}, bit {bit}", list.name);
                assert_eq!(answer.code(), (0x05, 0x26, 0x00), "{name}");
                let field = list
                    .fields
                    .iter()
                    .find(|(byte, mask)| *byte == at && mask >> bit & 1 == 1);
                let first = field.map_or(bit, |(_, mask)| 7 - mask.leading_zeros() as u8);
                assert_eq!(answer.sense[15..18], [0x88 | first, 0, at as u8], "{name}");
                assert_eq!(bed.disks.log, [], "{name}");
                refused += 1;
            }
        }
        assert!(refused > 0, "{}", list.name);
    }
}

/// The complete lists of the table are valid without the tested bit.
#[test]
fn the_lists_themselves_are_served() {
    for list in lists() {
        if list.name.contains("REGISTER AND MOVE") {
            continue; // it needs a reservation to move
        }
        let mut bed = Bed::new(512, 2048);
        let answer = bed.run(0, list.cdb, &list.list, 0);
        assert_eq!(answer.status, Status::Good, "{}", list.name);
    }
}

/// Each case has a byte of the last list of the table, an invalid value for it, and the byte that the field pointer must name.
#[test]
fn numbers_of_copy_descriptors_that_are_not_honoured_are_pointed_to() {
    let mut lists = lists();
    let list = lists.pop().unwrap();
    assert!(list.name.contains("with offset"));
    for (at, value, pointer) in [
        (48 + 7, 21, 48 + 7),   // a designator longer than its field
        (48 + 30, 4, 48 + 29),  // DISK BLOCK LENGTH 1024
        (80 + 3, 24, 80 + 2),   // DESCRIPTOR LENGTH
        (80 + 8, 0x80, 80 + 8), // NUMBER OF BYTES: 2 GiB
        (80 + 28, 1, 80 + 28),  // SOURCE BLOCK DEVICE BYTE OFFSET
        (80 + 29, 1, 80 + 28),
        (80 + 31, 1, 80 + 30), // DESTINATION BLOCK DEVICE BYTE OFFSET
    ] {
        let mut bed = Bed::new(512, 2048);
        let mut bytes = list.list.clone();
        bytes[at] = value;
        let answer = bed.run(0, list.cdb, &bytes, 0);
        assert_eq!(answer.code(), (0x05, 0x26, 0x00), "byte {at}");
        assert_eq!(answer.sense[15..18], [0x80, 0, pointer], "byte {at}");
        assert_eq!(bed.disks.log, [], "byte {at}");
    }
}

/// Every bit of every mode page that MODE SENSE does not report as changeable is refused if it changes.
#[test]
fn bits_of_mode_pages_that_are_not_changeable_are_refused() {
    let mut bed = Bed::new(512, 2048);
    let sense = |bed: &mut Bed, control: u8| {
        let cdb = [0x1a, 0x08, control << 6 | 0x3f, 0, 255, 0];
        bed.run(0, &cdb, &[], 255).data[4..].to_vec()
    };
    let (mut current, mut changeable) = (&sense(&mut bed, 0)[..], &sense(&mut bed, 1)[..]);
    let mut pages = 0;
    while !current.is_empty() {
        let length = usize::from(current[1]) + 2;
        let (page, may) = (&current[..length], &changeable[..length]);
        for at in 2..length {
            for bit in (0..8).filter(|bit| may[at] >> bit & 1 == 0) {
                let mut list = [&[0, 0, 0, 0][..], page].concat();
                list[4] &= 0x7f;
                list[4 + at] ^= 1 << bit;
                let cdb = [0x15, 0x10, 0, 0, list.len() as u8, 0];
                let answer = bed.run(0, &cdb, &list, 0);
                assert_eq!(answer.code(), (0x05, 0x26, 0x00), "{list:02x?}");
                assert_eq!(answer.sense[15..18], [0x80, 0, 4 + at as u8]);
            }
        }
        (current, changeable) = (&current[length..], &changeable[length..]);
        pages += 1;
    }
    assert_eq!(pages, 4);
    // MRIE 7h and above are not defined (SPC-4, table 443).
    for (mrie, status) in [
        (6, Status::Good),
        (7, Status::CheckCondition),
        (15, Status::CheckCondition),
    ] {
        let list = [0, 0, 0, 0, 0x1c, 0x0a, 0, mrie, 0, 0, 0, 0, 0, 0, 0, 0];
        let answer = bed.run(0, &[0x15, 0x10, 0, 0, 16, 0], &list, 0);
        assert_eq!(answer.status, status, "MRIE {mrie}");
    }
}
