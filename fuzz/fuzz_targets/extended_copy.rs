//! EXTENDED COPY with any parameter list, of both kinds, among three disks: no panic, nothing beyond a disk, and nothing
//! written but by a copy that was accepted.
//!
//! `cargo fuzz run extended_copy`. Descriptors are made well-formed often enough that copies begin.

#![no_main]

#[path = "../../crates/scsi/tests/common/mod.rs"]
mod common;

use block::IoKind;
use common::{Bed, info};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use scsi::Status;

#[derive(Arbitrary, Debug)]
struct Copy {
    long_identifier: bool,
    list_identifier: u8,
    flags: u8,
    targets: Vec<Target>,
    segments: Vec<Segment>,
    /// Replaces bytes of the list.
    damage: Vec<(u16, u8)>,
    cut: Option<u16>,
}

#[derive(Arbitrary, Debug)]
enum Target {
    /// One of the disks, by its NAA identifier.
    Known(u8),
    Any([u8; 32]),
}

#[derive(Arbitrary, Debug)]
enum Segment {
    /// Block to block: from, to, blocks, two LBAs.
    Blocks(u8, u8, u8, u8, u8),
    Any(u8, Vec<u8>),
}

fn target(target: &Target) -> [u8; 32] {
    match target {
        Target::Any(bytes) => *bytes,
        Target::Known(number) => {
            // identification descriptor: NAA, 8 bytes; block size 512
            let mut descriptor = [0; 32];
            descriptor[0] = 0xe4;
            descriptor[4] = 0x01;
            descriptor[5] = 0x03;
            descriptor[7] = 8;
            let naa = 0x3000_0000_0000_0000 | u64::from(number % 3);
            descriptor[8..16].copy_from_slice(&naa.to_be_bytes());
            descriptor[30] = 0x02;
            descriptor
        }
    }
}

fn segment(segment: &Segment) -> Vec<u8> {
    match segment {
        Segment::Any(kind, bytes) => {
            let mut descriptor = vec![*kind, 0, 0, bytes.len() as u8];
            descriptor.extend(bytes.iter().take(255));
            descriptor
        }
        Segment::Blocks(from, to, blocks, source, destination) => {
            let mut descriptor = vec![0x02, 0, 0, 24, 0, from % 4, 0, to % 4, 0, 0, 0, *blocks];
            descriptor.extend([0, 0, 0, 0, 0, 0, 0, source % 70]);
            descriptor.extend([0, 0, 0, 0, 0, 0, 0, destination % 70]);
            descriptor
        }
    }
}

fn parameter_list(copy: &Copy) -> Vec<u8> {
    let targets: Vec<u8> = copy.targets.iter().take(8).flat_map(target).collect();
    let segments: Vec<u8> = copy.segments.iter().take(8).flat_map(segment).collect();
    let mut list = Vec::new();
    if copy.long_identifier {
        list.resize(48, 0);
        list[0] = 0x01;
        list[1] = copy.flags;
        list[3] = 0x20;
        list[23] = copy.list_identifier;
        list[42..44].copy_from_slice(&(targets.len() as u16).to_be_bytes());
        list[44..46].copy_from_slice(&(segments.len() as u16).to_be_bytes());
    } else {
        list.resize(16, 0);
        list[0] = copy.list_identifier;
        list[1] = copy.flags;
        list[2..4].copy_from_slice(&(targets.len() as u16).to_be_bytes());
        list[8..12].copy_from_slice(&(segments.len() as u32).to_be_bytes());
    }
    list.extend(targets);
    list.extend(segments);
    for (at, byte) in &copy.damage {
        let at = usize::from(*at) % list.len();
        list[at] = *byte;
    }
    if let Some(cut) = copy.cut {
        list.truncate(usize::from(cut));
    }
    list
}

libfuzzer_sys::fuzz_target!(|copies: Vec<Copy>| {
    let mut bed = Bed::new(512, 64);
    for number in 1..3 {
        bed.add(number, info(512, 64, number.into()), false);
        bed.run(number, &[0; 6], &[], 0);
    }
    for copy in copies.iter().take(8) {
        let list = parameter_list(copy);
        let mut cdb = [0; 16];
        cdb[0] = 0x83;
        cdb[1] = u8::from(copy.long_identifier);
        cdb[10..14].copy_from_slice(&(list.len() as u32).to_be_bytes());
        bed.disks.log.clear();
        let answer = bed.run(0, &cdb, &list, 0);
        for (disk, request) in &bed.disks.log {
            let capacity = bed.disks.bytes[disk.0 as usize].len() as u64;
            assert!(request.length <= capacity && request.offset <= capacity - request.length);
        }
        let wrote = bed.disks.log.iter().any(|(_, io)| io.kind == IoKind::Write);
        let refused = answer.status != Status::Good && answer.code().0 == 0x05;
        assert!(!(wrote && refused && copy.segments.len() == 1));
        let mut results = [0; 16];
        results[0] = 0x84;
        results[2] = copy.list_identifier;
        results[12] = 0xff;
        bed.run(0, &results, &[], 0xff00);
    }
});
