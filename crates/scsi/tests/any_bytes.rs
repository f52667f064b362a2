//! No CDB, with any bytes and buffers, panics or reaches beyond the disk.

mod common;

use block::IoErrorKind;
use common::*;
use proptest::prelude::*;
use scsi::*;
use std::sync::Arc;

/// Prefers small numbers, so that ranges hit the disk and its end.
fn byte() -> impl Strategy<Value = u8> {
    prop_oneof![3 => Just(0u8), 2 => 0u8..16, 1 => any::<u8>()]
}

fn cdb() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop_oneof![
        3 => prop::sample::select(OPCODES),
        1 => any::<u8>(),
    ];
    (opcode, prop::collection::vec(byte(), 0..259), any::<bool>()).prop_map(
        |(opcode, rest, cut)| {
            let mut cdb = vec![opcode];
            cdb.extend(rest);
            if cut {
                cdb.truncate(16);
            }
            cdb
        },
    )
}

/// A parameter list: some significant bytes, then repetitions of one byte.
fn data_out() -> impl Strategy<Value = Vec<u8>> {
    (prop::collection::vec(byte(), 0..48), byte(), 0usize..2048).prop_map(
        |(mut bytes, filler, length)| {
            bytes.resize(length, filler);
            bytes
        },
    )
}

const OPCODES: &[u8] = &[
    0x00, 0x03, 0x04, 0x08, 0x0a, 0x12, 0x15, 0x16, 0x17, 0x1a, 0x1b, 0x1d, 0x1e, 0x25, 0x28, 0x2a,
    0x2e, 0x2f, 0x34, 0x35, 0x37, 0x41, 0x42, 0x48, 0x4d, 0x55, 0x56, 0x57, 0x5a, 0x5e, 0x5f, 0x83,
    0x84, 0x88, 0x89, 0x8a, 0x8b, 0x8e, 0x8f, 0x90, 0x91, 0x93, 0x9c, 0x9e, 0xa0, 0xa3, 0xa4, 0xa8,
    0xaa, 0xae, 0xaf, 0xb7,
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_command_panics_or_reaches_beyond_the_disk(
        commands in prop::collection::vec(
            (cdb(), data_out(), 0usize..4096, 0u16..3),
            1..8,
        ),
    ) {
        let mut bed = Bed::new(512, 64);
        bed.add(1, info(4096, 16, 1), true);
        for (cdb, data_out, data_in, lun) in commands {
            let answer = bed.run(lun, &cdb, &data_out, data_in);
            prop_assert!(answer.data.len() <= data_in);
        }
        for (disk, request) in &bed.disks.log {
            let capacity = bed.disks.bytes[disk.0 as usize].len() as u64;
            prop_assert!(request.length <= capacity && request.offset <= capacity - request.length);
        }
    }

    #[test]
    fn arbitrary_parameter_lists_never_panic(cdb in prop::collection::vec(any::<u8>(), 0..260), lun in any::<[u8; 8]>()) {
        let mut bed = Bed::new(512, 64);
        let nexus = std::sync::Arc::clone(&bed.nexus);
        bed.run_lun(&nexus, Lun(lun), &cdb, &[], 512);
    }
}

/// Plain reads and writes, or with one unusual field.
fn near_plain() -> impl Strategy<Value = (Vec<u8>, usize)> {
    let opcode = prop::sample::select(vec![0x28u8, 0x2a, 0x88, 0x8a]);
    let byte1 = prop_oneof![4 => Just(0u8), 1 => Just(0x08), 1 => Just(0x10), 1 => any::<u8>()];
    let rare = || prop_oneof![5 => Just(0u8), 1 => Just(0x04), 1 => any::<u8>()];
    let (control, group) = (rare(), rare());
    let spare = prop_oneof![4 => Just(0i64), 1 => -600i64..600];
    // The last values overflow when a length is added.
    let lba = prop_oneof![9 => 0u64..70, 1 => u64::MAX - 9..=u64::MAX];
    (opcode, byte1, group, control, lba, 0u16..10, spare).prop_map(
        |(opcode, byte1, group, control, lba, blocks, spare)| {
            let mut cdb = vec![opcode, byte1];
            if opcode < 0x80 {
                cdb.extend((lba as u32).to_be_bytes());
                cdb.push(group);
                cdb.extend(blocks.to_be_bytes());
            } else {
                cdb.extend(lba.to_be_bytes());
                cdb.extend(u32::from(blocks).to_be_bytes());
                cdb.push(group);
            }
            cdb.push(control);
            (cdb, (i64::from(blocks) * 512 + spare).max(0) as usize)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// A pending unit attention for another unit with the same filter bit forces the general path. Its response must equal that of the fast
    /// path.
    #[test]
    fn fast_path_and_general_path_agree((cdb, length) in near_plain()) {
        let mut short = Bed::new(512, 64);
        let mut general = Bed::new(512, 64);
        let unit = general.unit(0);
        while unit.id().shares_filter_bit_with(general.add(1, info(512, 8, 1), false).id()).then_some(()).is_none() {
            general.target.detach_unit(1);
        }
        general.run(0, &[0; 6], &[], 0); // LUNs changed
        let data = vec![7; length];
        prop_assert_eq!(short.run(0, &cdb, &data, length), general.run(0, &cdb, &data, length));
        prop_assert_eq!(short.disks.log, general.disks.log);
    }

    /// A kept `PlainUnit` plans the same as a lookup per command, or leaves the command to the lookup.
    #[test]
    fn cached_unit_and_lookup_agree(
        (cdb, length) in near_plain(),
        before in prop::sample::select(vec![
            &[0x00u8; 6][..],                           // nothing
            &[0x16, 0, 0, 0, 0, 0],                     // RESERVE
            &[0x1b, 0, 0, 0, 0x02, 0],                  // eject
        ]),
        (attention, is_reported, change, fails) in any::<(bool, bool, bool, bool)>(),
    ) {
        let mut bed = Bed::with(info(512, 64, 0), true);
        let nexus = Arc::clone(&bed.nexus);
        let mut view = bed.target.view();
        let found_unit = view.plain_unit(&nexus, Lun::unit(0)).unwrap();
        let first = found_unit.plain_parameters().unwrap();
        prop_assert!(found_unit.is_still(&first));
        bed.run(0, before, &[], 0);
        if attention {
            bed.unit(0).update(info(512, 60, 0));
        }
        if attention && is_reported {
            bed.run(0, &[0x00; 6], &[], 0); // CAPACITY DATA HAS CHANGED
        }
        prop_assert_eq!(found_unit.is_still(&first), found_unit.plain_parameters() == Some(first));
        if change {
            bed.target.detach_unit(0);
        }
        let mut whole = [0; 16];
        whole[..cdb.len()].copy_from_slice(&cdb);
        let way = found_unit.plain_parameters();
        prop_assert_eq!(found_unit.is_still(&first), way == Some(first));
        let attention = attention && !is_reported;
        let plain = way.and_then(|way| way.begin(&whole, length as u64, length as u64));
        prop_assert!(PlainParameters::CLOSED.begin(&whole, length as u64, length as u64).is_none());
        prop_assert_eq!(found_unit.is_current(), !change);
        prop_assert!(plain.is_none() || !(change || attention || before[0] != 0));
        view.refresh();
        let command = Command {
            nexus: &nexus,
            lun: Lun::unit(0),
            cdb: &whole,
            attribute: TaskAttribute::Simple,
            data_out_length: length as u64,
            data_in_length: length as u64,
        };
        let usual = before[0] == 0 && !attention && !change;
        let looked_up = usual.then(|| view.begin_direct(&command)).flatten();
        prop_assert_eq!(plain.is_some(), looked_up.is_some());
        if let (Some(plain), Some(looked_up)) = (plain, looked_up) {
            prop_assert_eq!(plain.request, looked_up.request);
            let outcome = if fails { Err(IoErrorKind::ReadMedium.into()) } else { Ok(()) };
            prop_assert_eq!(plain.end.finish(outcome), looked_up.finish(outcome));
        }
    }
}
