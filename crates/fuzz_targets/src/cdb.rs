//! Executes arbitrary CDBs with arbitrary data, in sequence, from two initiators. Rules: no panic, and no access beyond the disk or
//! a buffer.
//!
//! Format of a record: a byte that selects nexus and LUN, a byte with the CDB's length, two 16-bit lengths of data-out and of the
//! data-in buffer, the CDB, data-out. Disks and executor are those of the tests of `scsi`.

use std::sync::Arc;

use crate::common::{Bed, info};
use crate::input::Input;

/// Executes the commands in `data`.
pub fn run(data: &[u8]) {
    let mut bed = Bed::new(512, 64);
    bed.add(1, info(4096, 16, 1), true);
    let nexuses = [Arc::clone(&bed.nexus), bed.other_nexus(2)];
    let mut input = Input(data);
    for _ in 0..16 {
        if input.is_empty() {
            break;
        }
        let (choice, cdb_length) = (input.byte(), input.byte());
        let (out_length, data_in) = (usize::from(input.be16()), usize::from(input.be16()));
        let cdb = input.bytes(usize::from(cdb_length));
        let data_out = input.bytes(out_length);
        let nexus = &nexuses[usize::from(choice & 1)];
        let answer = bed.run_as(nexus, u16::from(choice >> 1 & 3), cdb, data_out, data_in);
        assert!(answer.data.len() <= data_in);
    }
    for (disk, request) in &bed.disks.log {
        let capacity = bed.disks.bytes[disk.0 as usize].len() as u64;
        assert!(request.length <= capacity && request.offset <= capacity - request.length);
    }
}
