//! Every bit of every supported CDB is honoured, ignored for a reason, or refused with a pointer to it.
//!
//! The table is written from SPC-4, SPC-5, SBC-3 and SBC-4, not from the code. REPORT SUPPORTED OPERATION CODES must report the same
//! honoured bits.

mod common;

use std::collections::BTreeSet;

use common::*;
use scsi::*;

/// LUN of SCSI-2, which SCSI-2 initiators put into byte 1 of every CDB, and Linux into that of INQUIRY until it has read the unit's
/// version. Without meaning since SPC.
const LUN: (usize, u8) = (1, 0xe0);

/// GROUP NUMBER in CDBs of 10, 12 and 16 bytes, for grouped statistics (SBC-3, 4.22). GROUP_SUP is 0, so there are none; no other server
/// refuses the number.
const GROUP_10: (usize, u8) = (6, 0x3f);
const GROUP_12: (usize, u8) = (10, 0x3f);
const GROUP_16: (usize, u8) = (14, 0x3f);

/// A field of several bits that is refused as one: first byte, last byte, bits within one byte or all.
type Field = (usize, usize, u8);

/// RDPROTECT, WRPROTECT, VRPROTECT or ORPROTECT; SELF-TEST CODE; PARAMETER DATA FORMAT.
const TOP: Field = (1, 1, 0xe0);

struct Command {
    /// Operation code and service action, then the bits that are honoured.
    usage: &'static [u8],
    has_action: bool,
    ignored: &'static [(usize, u8)],
    fields: &'static [Field],
}

const fn plain(
    usage: &'static [u8],
    ignored: &'static [(usize, u8)],
    fields: &'static [Field],
) -> Command {
    Command {
        usage,
        has_action: false,
        ignored,
        fields,
    }
}

const fn action(usage: &'static [u8], fields: &'static [Field]) -> Command {
    Command {
        usage,
        has_action: true,
        ignored: &[],
        fields,
    }
}

const X: u8 = 0xff;

#[rustfmt::skip]
const COMMANDS: &[Command] = &[
    // TEST UNIT READY
    plain(&[0x00, 0, 0, 0, 0, 0], &[LUN], &[]),
    // REQUEST SENSE: DESC
    plain(&[0x03, 0x01, 0, 0, X, 0], &[LUN], &[]),
    // FORMAT UNIT: LONGLIST, FMTDATA, CMPLST; no FMTPINFO, DEFECT LIST FORMAT 000b; not the obsolete interleave and FFMT.
    plain(&[0x04, 0x38, 0, 0, 0, 0], &[], &[(1, 1, 0xc0), (1, 1, 0x07)]),
    // READ(6), WRITE(6): 21 bits of LBA
    plain(&[0x08, 0x1f, X, X, X, 0], &[LUN], &[]),
    plain(&[0x0a, 0x1f, X, X, X, 0], &[LUN], &[]),
    // INQUIRY: EVPD; CMDDT is obsolete
    plain(&[0x12, 0x01, X, X, X, 0], &[LUN], &[]),
    // MODE SELECT(6): PF, SP; not RTD
    plain(&[0x15, 0x11, 0, 0, X, 0], &[LUN], &[]),
    // RESERVE(6), RELEASE(6): whole units, no third parties
    plain(&[0x16, 0, 0, 0, 0, 0], &[LUN], &[]),
    plain(&[0x17, 0, 0, 0, 0, 0], &[LUN], &[]),
    // MODE SENSE(6): DBD
    plain(&[0x1a, 0x08, X, X, X, 0], &[LUN], &[]),
    // START STOP UNIT: IMMED, POWER CONDITION MODIFIER, POWER CONDITION, NO_FLUSH, LOEJ, START
    plain(&[0x1b, 0x01, 0, 0x0f, 0xf7, 0], &[LUN], &[]),
    // SEND DIAGNOSTIC: PF, SELFTEST, DEVOFFL, UNITOFFL; no SELF-TEST CODE, no parameter list
    plain(&[0x1d, 0x17, 0, 0, 0, 0], &[], &[TOP, (3, 4, X)]),
    // PREVENT ALLOW MEDIUM REMOVAL: PREVENT 00b and 01b
    plain(&[0x1e, 0, 0, 0, 0x01, 0], &[LUN], &[]),
    // READ CAPACITY(10): LBA and PMI, obsolete, as in SBC-2.
    plain(&[0x25, 0, X, X, X, X, 0, 0, 0x01, 0], &[LUN], &[]),
    // READ(10), WRITE(10): DPO, FUA, FUA_NV
    plain(&[0x28, 0x1a, X, X, X, X, 0, X, X, 0], &[GROUP_10], &[TOP]),
    plain(&[0x2a, 0x1a, X, X, X, X, 0, X, X, 0], &[GROUP_10], &[TOP]),
    // WRITE AND VERIFY(10), VERIFY(10): DPO, BYTCHK
    plain(&[0x2e, 0x16, X, X, X, X, 0, X, X, 0], &[GROUP_10], &[TOP]),
    plain(&[0x2f, 0x16, X, X, X, X, 0, X, X, 0], &[GROUP_10], &[TOP]),
    // PRE-FETCH(10): IMMED
    plain(&[0x34, 0x02, X, X, X, X, 0, X, X, 0], &[LUN, GROUP_10], &[]),
    // SYNCHRONIZE CACHE(10): SYNC_NV, IMMED
    plain(&[0x35, 0x06, X, X, X, X, 0, X, X, 0], &[LUN, GROUP_10], &[]),
    // READ DEFECT DATA(10): REQ_PLIST, REQ_GLIST, DEFECT LIST FORMAT
    plain(&[0x37, 0, 0x1f, 0, 0, 0, 0, X, X, 0], &[LUN], &[]),
    // WRITE SAME(10): ANCHOR, UNMAP; not PBDATA and LBDATA, which change the written data.
    plain(&[0x41, 0x18, X, X, X, X, 0, X, X, 0], &[GROUP_10], &[TOP]),
    // UNMAP: ANCHOR
    plain(&[0x42, 0x01, 0, 0, 0, 0, 0, X, X, 0], &[GROUP_10], &[]),
    // SANITIZE: IMMED, AUSE; not ZNR; a parameter list with OVERWRITE only
    action(&[0x48, 0xa1, 0, 0, 0, 0, 0, X, X, 0], &[]),
    action(&[0x48, 0xa2, 0, 0, 0, 0, 0, 0, 0, 0], &[(7, 8, X)]),
    action(&[0x48, 0xa3, 0, 0, 0, 0, 0, 0, 0, 0], &[(7, 8, X)]),
    action(&[0x48, 0xbf, 0, 0, 0, 0, 0, 0, 0, 0], &[(7, 8, X)]),
    // LOG SENSE: neither PPC nor SP
    plain(&[0x4d, 0, X, X, 0, X, X, X, X, 0], &[LUN], &[]),
    plain(&[0x55, 0x11, 0, 0, 0, 0, 0, X, X, 0], &[LUN], &[]),
    plain(&[0x56, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[LUN], &[]),
    plain(&[0x57, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[LUN], &[]),
    // MODE SENSE(10): LLBAA, DBD
    plain(&[0x5a, 0x18, X, X, 0, 0, 0, X, X, 0], &[LUN], &[]),
    // PERSISTENT RESERVE IN
    action(&[0x5e, 0x00, 0, 0, 0, 0, 0, X, X, 0], &[]),
    action(&[0x5e, 0x01, 0, 0, 0, 0, 0, X, X, 0], &[]),
    action(&[0x5e, 0x02, 0, 0, 0, 0, 0, X, X, 0], &[]),
    action(&[0x5e, 0x03, 0, 0, 0, 0, 0, X, X, 0], &[]),
    // PERSISTENT RESERVE OUT: SCOPE and TYPE; the standard makes some services ignore them.
    action(&[0x5f, 0x00, X, 0, 0, X, X, X, X, 0], &[]),
    action(&[0x5f, 0x01, X, 0, 0, X, X, X, X, 0], &[]),
    action(&[0x5f, 0x02, X, 0, 0, X, X, X, X, 0], &[]),
    action(&[0x5f, 0x03, X, 0, 0, X, X, X, X, 0], &[]),
    action(&[0x5f, 0x04, X, 0, 0, X, X, X, X, 0], &[]),
    action(&[0x5f, 0x05, X, 0, 0, X, X, X, X, 0], &[]),
    action(&[0x5f, 0x06, X, 0, 0, X, X, X, X, 0], &[]),
    action(&[0x5f, 0x07, X, 0, 0, X, X, X, X, 0], &[]),
    // EXTENDED COPY(LID1) and (LID4)
    action(&[0x83, 0x00, 0, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0], &[]),
    action(&[0x83, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0], &[]),
    // RECEIVE COPY RESULTS: LIST IDENTIFIER
    action(&[0x84, 0x00, X, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0], &[]),
    action(&[0x84, 0x03, X, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0], &[]),
    action(&[0x84, 0x04, X, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0], &[]),
    action(&[0x84, 0x05, X, X, X, X, 0, 0, 0, 0, X, X, X, X, 0, 0], &[]),
    plain(&[0x88, 0x1a, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_16], &[TOP]),
    // COMPARE AND WRITE
    plain(&[0x89, 0x1a, X, X, X, X, X, X, X, X, 0, 0, 0, X, 0, 0], &[GROUP_16], &[TOP]),
    plain(&[0x8a, 0x1a, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_16], &[TOP]),
    // ORWRITE(16)
    plain(&[0x8b, 0x1a, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_16], &[TOP]),
    plain(&[0x8e, 0x16, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_16], &[TOP]),
    plain(&[0x8f, 0x16, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_16], &[TOP]),
    plain(&[0x90, 0x02, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_16], &[]),
    plain(&[0x91, 0x06, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_16], &[]),
    // WRITE SAME(16): also NDOB.
    plain(&[0x93, 0x19, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_16], &[TOP]),
    // WRITE ATOMIC(16): no ATOMIC BOUNDARY
    plain(&[0x9c, 0x18, X, X, X, X, X, X, X, X, 0, 0, X, X, 0, 0], &[GROUP_16], &[TOP, (10, 11, X)]),
    // READ CAPACITY(16), GET LBA STATUS
    action(&[0x9e, 0x10, X, X, X, X, X, X, X, X, X, X, X, X, 0x01, 0], &[]),
    action(&[0x9e, 0x12, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0], &[]),
    // REPORT LUNS
    plain(&[0xa0, 0, X, 0, 0, 0, X, X, X, X, 0, 0], &[], &[]),
    // REPORT TARGET PORT GROUPS: PARAMETER DATA FORMAT 000b and 001b
    action(&[0xa3, 0x2a, 0, 0, 0, 0, X, X, X, X, 0, 0], &[TOP]),
    // REPORT SUPPORTED OPERATION CODES: RCTD, REPORTING OPTIONS
    action(&[0xa3, 0x0c, 0x87, X, X, X, X, X, X, X, 0, 0], &[TOP]),
    // REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS: REPD
    action(&[0xa3, 0x0d, 0x80, 0, 0, 0, X, X, X, X, 0, 0], &[TOP]),
    // SET TARGET PORT GROUPS
    action(&[0xa4, 0x0a, 0, 0, 0, 0, X, X, X, X, 0, 0], &[]),
    plain(&[0xa8, 0x1a, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_12], &[TOP]),
    plain(&[0xaa, 0x1a, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_12], &[TOP]),
    plain(&[0xae, 0x16, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_12], &[TOP]),
    plain(&[0xaf, 0x16, X, X, X, X, X, X, X, X, 0, 0], &[GROUP_12], &[TOP]),
    // READ DEFECT DATA(12): no ADDRESS DESCRIPTOR INDEX
    plain(&[0xb7, 0x1f, 0, 0, 0, 0, X, X, X, X, 0, 0], &[], &[(2, 5, X)]),
];

impl Command {
    fn action(&self) -> Option<u8> {
        self.has_action.then(|| self.usage[1] & 0x1f)
    }

    /// Returns a CDB with operation code and service action only.
    fn base(&self) -> Vec<u8> {
        let mut cdb = vec![0; self.usage.len()];
        cdb[0] = self.usage[0];
        cdb[1] = self.action().unwrap_or(0);
        cdb
    }

    fn is_ignored(&self, at: usize, bit: u8) -> bool {
        let mut ignored = self.ignored.iter();
        ignored.any(|&(byte, mask)| byte == at && mask >> bit & 1 == 1)
    }

    /// Returns the bits that are neither honoured nor ignored.
    fn refused(&self) -> Vec<(usize, u8)> {
        let bits = (1..self.usage.len()).flat_map(|at| (0..8).map(move |bit| (at, bit)));
        let is_action = |at, bit| at == 1 && bit < 5 && self.has_action;
        bits.filter(|&(at, bit)| {
            self.usage[at] >> bit & 1 == 0 && !is_action(at, bit) && !self.is_ignored(at, bit)
        })
        .collect()
    }

    /// Returns the sense-key specific bytes for a pointer to a bit (SPC-5, 4.4.2.4.2): SKSV, C/D, BPV, then bit and byte.
    fn pointer(&self, at: usize, bit: u8) -> [u8; 3] {
        let field = self
            .fields
            .iter()
            .find(|(first, last, mask)| (first..=last).contains(&&at) && mask >> bit & 1 == 1);
        match field {
            Some(&(first, _, X)) => [0xc0, 0, first as u8],
            Some(&(first, _, mask)) => [0xc8 | (7 - mask.leading_zeros() as u8), 0, first as u8],
            None => [0xc8 | bit, 0, at as u8],
        }
    }
}

/// A unit that supports every command.
fn bed() -> Bed {
    let atomic_writes = Some(block::AtomicWrites {
        unit: 4096,
        bytes_max: 65536,
    });
    let info = block::DiskInfo {
        atomic_writes,
        ..info(512, 2048, 0)
    };
    Bed::with(info, false)
}

#[test]
fn every_supported_command_reports_the_bits_it_honours() {
    let mut bed = bed();
    let all = bed.run(0, &[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0], &[], 8192);
    let reported: BTreeSet<_> = all.data[4..]
        .chunks(8)
        .map(|row| (row[0], (row[5] & 0x01 != 0).then_some(row[3])))
        .collect();
    let known: BTreeSet<_> = COMMANDS
        .iter()
        .map(|command| (command.usage[0], command.action()))
        .collect();
    assert_eq!(reported, known);
    for command in COMMANDS {
        let (options, action) = match command.action() {
            Some(action) => (0x02, action),
            None => (0x01, 0),
        };
        let cdb = [
            0xa3,
            0x0c,
            options,
            command.usage[0],
            0,
            action,
            0,
            0,
            1,
            0,
            0,
            0,
        ];
        let one = bed.run(0, &cdb, &[], 256).data;
        assert_eq!(&one[4..], command.usage, "{:02x?}", command.usage);
    }
}

#[test]
fn every_bit_that_is_not_honoured_is_refused_with_a_pointer_to_it() {
    let mut bed = bed();
    for command in COMMANDS {
        for (at, bit) in command.refused() {
            let mut cdb = command.base();
            cdb[at] |= 1 << bit;
            let answer = bed.run(0, &cdb, &[0; 4096], 4096);
            assert_eq!(answer.code(), (0x05, 0x24, 0x00), "{cdb:02x?}");
            let pointer = command.pointer(at, bit);
            assert_eq!(answer.sense[15..18], pointer, "{cdb:02x?}");
        }
    }
    assert_eq!(bed.disks.log, []);
}

/// If two bits are refused, the pointer is to the first.
#[test]
fn naca_and_the_control_byte_are_refused_last() {
    let mut bed = bed();
    // SAM-5, 5.2: vendor specific, reserved, NACA, obsolete FLAG and LINK.
    for (control, bit) in [
        (0x80, 7),
        (0x40, 6),
        (0x20, 5),
        (0x04, 2),
        (0x02, 1),
        (0x01, 0),
    ] {
        let sense = bed.run(0, &[0, 0, 0, 0, 0, control], &[], 0).sense;
        assert_eq!(sense[12..18], [0x24, 0x00, 0, 0xc8 | bit, 0x00, 0x05]);
        let sense = bed.run(0, &[0, 0, 0x10, 0, 0, control], &[], 0).sense;
        assert_eq!(sense[15..18], [0xcc, 0x00, 0x02]);
    }
}

#[test]
fn bits_that_are_ignored_change_nothing() {
    for command in COMMANDS {
        let run = |cdb: &[u8]| {
            let mut bed = bed();
            let answer = bed.run(0, cdb, &[0; 4096], 4096);
            (answer, bed.disks.log)
        };
        let without = run(&command.base());
        for &(at, mask) in command.ignored {
            for bit in (0..8).filter(|bit| mask >> bit & 1 == 1) {
                let mut cdb = command.base();
                cdb[at] |= 1 << bit;
                assert_eq!(run(&cdb), without, "{cdb:02x?}");
            }
        }
    }
}

/// The fast path accepts no plain read or write that the general path refuses.
#[test]
fn reads_and_writes_that_are_plain_otherwise_are_refused_all_the_same() {
    let mut bed = bed();
    for command in COMMANDS {
        let length_at = match command.usage[0] {
            0x28 | 0x2a => 8,
            0x88 | 0x8a => 13,
            _ => continue,
        };
        let mut plain = command.base();
        plain[length_at] = 1;
        assert_eq!(bed.run(0, &plain, &[0; 512], 512).status, Status::Good);
        for (at, bit) in command.refused() {
            let mut cdb = plain.clone();
            cdb[at] |= 1 << bit;
            let answer = bed.run(0, &cdb, &[0; 512], 512);
            assert_eq!(answer.code(), (0x05, 0x24, 0x00), "{cdb:02x?}");
            assert_eq!(answer.sense[15..18], command.pointer(at, bit), "{cdb:02x?}");
        }
        for &(at, mask) in command.ignored {
            let mut cdb = plain.clone();
            cdb[at] |= mask;
            assert_eq!(bed.run(0, &cdb, &[0; 512], 512).status, Status::Good);
        }
    }
}

/// A missing unit refuses all commands except a few. Bits are checked for the well-known unit, and for INQUIRY of a missing one.
#[test]
fn commands_served_without_a_unit_are_refused_for_their_bits() {
    let mut bed = bed();
    assert_eq!(
        bed.run(7, &[0x28, 0, 0, 0, 0, 0, 0xc0, 0, 1, 4], &[], 512)
            .code(),
        (0x05, 0x25, 0x00)
    );
    assert_eq!(
        bed.run(7, &[0x12, 0x02, 0, 0, 96, 0], &[], 96).code(),
        (0x05, 0x24, 0x00)
    );
    // Linux probes LUN 7 with this CDB.
    assert_eq!(
        bed.run(7, &[0x12, 0xe0, 0, 0, 96, 0], &[], 96).status,
        Status::Good
    );
    let nexus = std::sync::Arc::clone(&bed.nexus);
    let sense = bed
        .run_lun(&nexus, Lun::REPORT_LUNS, &[0x00, 0, 0, 0, 0, 0x04], &[], 0)
        .sense;
    assert_eq!(sense[12..18], [0x24, 0x00, 0, 0xca, 0x00, 0x05]);
}

/// FUA_NV equals FUA here: data on the medium is in non-volatile memory.
#[test]
fn fua_nv_is_honoured_as_fua() {
    let mut bed = bed();
    bed.run(0, &[0x2a, 0x02, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512], 0);
    let write = block::IoRequest::write(0, 512).flagged(block::IoFlags::FUA);
    assert_eq!(bed.disks.log[0].1, write);
}

/// Without PMI the LBA of READ CAPACITY must be zero (SBC-2, 5.10).
#[test]
fn read_capacity_of_a_block_needs_pmi() {
    let mut bed = bed();
    for (cdb, pmi_at) in [
        (&[0x25, 0, 0, 0, 0, 1, 0, 0, 0, 0][..], 8),
        (&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 32, 0, 0], 14),
    ] {
        let answer = bed.run(0, cdb, &[], 32);
        assert_eq!(answer.code(), (0x05, 0x24, 0x00));
        assert_eq!(answer.sense[15..18], [0xc0, 0x00, 0x02]);
        let mut cdb = cdb.to_vec();
        cdb[pmi_at] = 0x01;
        assert_eq!(bed.run(0, &cdb, &[], 32).status, Status::Good);
    }
}
