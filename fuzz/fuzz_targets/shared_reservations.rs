//! The object beside an image that daemons share, with any bytes: record and state are read without a panic, and what a unit adopts of them
//! is whole.
//!
//! `cargo fuzz run shared_reservations`.

#![no_main]

#[path = "../../crates/scsi/tests/common/mod.rs"]
mod common;

use bdev::SharedRecord;
use common::{Bed, SharedState, info};
use scsi::Status;
use std::sync::Arc;

libfuzzer_sys::fuzz_target!(|input: (u64, u64, Vec<u8>)| {
    let (first, second, bytes) = input;
    if let Some(record) = SharedRecord::decode(&bytes) {
        assert_eq!(record.encode().as_deref(), Some(&bytes[..]));
    }
    let disk = block::DiskInfo {
        shared: true,
        ..info(512, 64, 0)
    };
    let mut bed = Bed::with(disk, false);
    let shared = Arc::new(SharedState::default());
    shared.join(&mut bed, 1);
    let unit = bed.unit(0);
    for version in [first, second] {
        if unit.adopt_reservations(version, &bytes).is_err() {
            return;
        }
        shared.set(version, &bytes);
    }
    // What was adopted can be shown and changed.
    unit.reservations();
    unit.reservations_after_power_on(&bytes);
    for action in 0..4 {
        let cdb = [0x5e, action, 0, 0, 0, 0, 0, 0xff, 0xff, 0];
        let mut answer = bed.run(0, &cdb, &[], 0xffff);
        while answer.status == Status::CheckCondition && answer.code().0 == 6 {
            answer = bed.run(0, &cdb, &[], 0xffff);
        }
        assert_eq!(answer.status, Status::Good);
    }
    let mut list = [0; 24];
    list[15] = 7;
    let cdb = [0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0];
    let status = bed.run(0, &cdb, &list, 0).status;
    assert!(matches!(status, Status::Good | Status::CheckCondition));
});
