//! Reads arbitrary bytes as the reservations object that daemons share. Rules: no panic while reading record and state, and a
//! consistent unit after it adopted them.

use crate::common::{Bed, SharedState, info};
use crate::input::Input;
use bdev::SharedRecord;
use scsi::Status;
use std::sync::Arc;

/// Adopts the record in `data` as two versions.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let (first, second, bytes) = (input.be64(), input.be64(), input.0);
    if let Some(record) = SharedRecord::decode(bytes) {
        assert_eq!(record.encode().as_deref(), Some(bytes));
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
        if unit.adopt_reservations(version, bytes).is_err() {
            return;
        }
        shared.set(version, bytes);
    }
    // Adopted reservations can be reported and changed.
    unit.reservations();
    unit.reservations_after_power_on(bytes);
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
}
