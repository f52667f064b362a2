//! Sends EXTENDED COPY with arbitrary parameter lists of both kinds, for three disks. Rules: no panic, no access beyond a disk, and
//! no write without an accepted copy.
//!
//! Many descriptors are well-formed, so that copies start.

use block::IoKind;
use scsi::Status;

use crate::common::{Bed, info};
use crate::input::Input;

/// Reads a target descriptor: an even byte and the number of a disk, or an odd byte and any 32 bytes.
fn target(input: &mut Input<'_>) -> [u8; 32] {
    if input.byte() & 1 == 1 {
        return input.array();
    }
    // Identification descriptor: NAA, 8 bytes; block size 512.
    let mut descriptor = [0; 32];
    descriptor[0] = 0xe4;
    descriptor[4] = 0x01;
    descriptor[5] = 0x03;
    descriptor[7] = 8;
    let naa = 0x3000_0000_0000_0000 | u64::from(input.byte() % 3);
    descriptor[8..16].copy_from_slice(&naa.to_be_bytes());
    descriptor[30] = 0x02;
    descriptor
}

/// Reads a segment descriptor: an even byte, then targets, blocks and LBAs of a copy from block to block; or an odd byte, then any type,
/// length and bytes.
fn segment(input: &mut Input<'_>) -> Vec<u8> {
    if input.byte() & 1 == 1 {
        let [kind, length] = input.array();
        let mut descriptor = vec![kind, 0, 0, length];
        descriptor.extend(input.bytes(usize::from(length)));
        return descriptor;
    }
    let [from, to, blocks, source, destination] = input.array();
    let mut descriptor = vec![0x02, 0, 0, 24, 0, from % 4, 0, to % 4, 0, 0, 0, blocks];
    descriptor.extend([0, 0, 0, 0, 0, 0, 0, source % 70]);
    descriptor.extend([0, 0, 0, 0, 0, 0, 0, destination % 70]);
    descriptor
}

struct Copy {
    long_identifier: bool,
    list_identifier: u8,
    segments: usize,
    list: Vec<u8>,
}

/// Reads a parameter list: kind, list identifier, flags, and the numbers of targets, segments and damaged bytes, followed by the
/// targets, segments and damage.
fn copy(input: &mut Input<'_>) -> Copy {
    let [kind, list_identifier, flags, targets, segments, damage] = input.array();
    let (long_identifier, is_cut) = (kind & 1 != 0, kind & 2 != 0);
    let count = usize::from(segments % 9);
    let targets: Vec<u8> = (0..targets % 9).flat_map(|_| target(input)).collect();
    let segments: Vec<u8> = (0..count).flat_map(|_| segment(input)).collect();
    let mut list = Vec::new();
    if long_identifier {
        list.resize(48, 0);
        list[0] = 0x01;
        list[1] = flags;
        list[3] = 0x20;
        list[23] = list_identifier;
        list[42..44].copy_from_slice(&(targets.len() as u16).to_be_bytes());
        list[44..46].copy_from_slice(&(segments.len() as u16).to_be_bytes());
    } else {
        list.resize(16, 0);
        list[0] = list_identifier;
        list[1] = flags;
        list[2..4].copy_from_slice(&(targets.len() as u16).to_be_bytes());
        list[8..12].copy_from_slice(&(segments.len() as u32).to_be_bytes());
    }
    list.extend(targets);
    list.extend(segments);
    for _ in 0..damage % 8 {
        let at = usize::from(input.be16()) % list.len();
        list[at] = input.byte();
    }
    if is_cut {
        list.truncate(usize::from(input.be16()));
    }
    Copy {
        long_identifier,
        list_identifier,
        segments: count,
        list,
    }
}

/// Executes the copies in `data`.
pub fn run(data: &[u8]) {
    let mut bed = Bed::new(512, 64);
    for number in 1..3 {
        bed.add(number, info(512, 64, number.into()), false);
        bed.run(number, &[0; 6], &[], 0);
    }
    let mut input = Input(data);
    for _ in 0..8 {
        if input.is_empty() {
            break;
        }
        let copy = copy(&mut input);
        let list = &copy.list;
        let mut cdb = [0; 16];
        cdb[0] = 0x83;
        cdb[1] = u8::from(copy.long_identifier);
        cdb[10..14].copy_from_slice(&(list.len() as u32).to_be_bytes());
        bed.disks.log.clear();
        let answer = bed.run(0, &cdb, list, 0);
        for (disk, request) in &bed.disks.log {
            let capacity = bed.disks.bytes[disk.0 as usize].len() as u64;
            assert!(request.length <= capacity && request.offset <= capacity - request.length);
        }
        let wrote = bed.disks.log.iter().any(|(_, io)| io.kind == IoKind::Write);
        let refused = answer.status != Status::Good && answer.code().0 == 0x05;
        assert!(!(wrote && refused && copy.segments == 1));
        let mut results = [0; 16];
        results[0] = 0x84;
        results[2] = copy.list_identifier;
        results[12] = 0xff;
        bed.run(0, &results, &[], 0xff00);
    }
}
