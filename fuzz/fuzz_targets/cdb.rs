//! Any CDBs, one after the other, with any data, from two initiators: no panic, and nothing beyond the disk or a buffer.
//!
//! `cargo fuzz run cdb`. The disks and the executor are those of the tests of `scsi`, which assert what must hold.

#![no_main]

#[path = "../../crates/scsi/tests/common/mod.rs"]
mod common;

use common::{Bed, info};
use std::sync::Arc;

libfuzzer_sys::fuzz_target!(|commands: Vec<(u8, Vec<u8>, Vec<u8>, u16)>| {
    let mut bed = Bed::new(512, 64);
    bed.add(1, info(4096, 16, 1), true);
    let nexuses = [Arc::clone(&bed.nexus), bed.other_nexus(2)];
    for (choice, cdb, data_out, data_in) in commands.iter().take(16) {
        let data_in = usize::from(*data_in);
        let nexus = &nexuses[usize::from(choice & 1)];
        let answer = bed.run_as(nexus, u16::from(choice >> 1 & 3), cdb, data_out, data_in);
        assert!(answer.data.len() <= data_in);
    }
    for (disk, request) in &bed.disks.log {
        let capacity = bed.disks.bytes[disk.0 as usize].len() as u64;
        assert!(request.length <= capacity && request.offset <= capacity - request.length);
    }
});
