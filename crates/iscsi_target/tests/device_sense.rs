//! The initiator receives sense and residual of a disk that is a SCSI device itself.

mod common;

use std::sync::Arc;

use bdev::{Fault, FaultAction, FaultPlan, Faulty};
use block::{DeviceSense, IoError, IoErrorKind, IoKind};
use common::{Client, Rig, ram, settings, target};
use iscsi::negotiation::{DigestOffer, Offer};
use iscsi_target::ServerLimits;

#[test]
fn sense_and_residual_of_a_scsi_device_reach_the_initiator() {
    let disk = Arc::new(Faulty::new(ram(1), FaultPlan::default()));
    let rig = Rig::open(disk.clone(), target(), ServerLimits::default());
    let digests = Offer {
        header_digest: DigestOffer::Crc32c,
        data_digest: DigestOffer::Crc32c,
        ..Offer::default()
    };
    for (number, offer) in [(1, Offer::default()), (2, digests)] {
        let mut client = Client::login(rig.portal, settings(number, offer), 1);
        client.settle();
        for bytes in [0, 512, 2048] {
            for kind in [IoKind::Write, IoKind::Read] {
                // HARDWARE ERROR, LOGICAL UNIT COMMUNICATION TIME-OUT.
                let sense = DeviceSense {
                    key: 0x4,
                    code: 0x08,
                    qualifier: 0x01,
                };
                let error = IoError::with_sense(IoErrorKind::WriteMedium, sense, bytes);
                disk.inject(Fault {
                    kind,
                    skip: 0,
                    times: 1,
                    action: FaultAction::Undone(error),
                });
                let (done, data) = match kind {
                    IoKind::Read => (client.read(0, 3, 4), vec![7; bytes as usize]),
                    _ => (client.write(0, 3, vec![7; 2048]), Vec::new()),
                };
                assert_eq!((done.response, done.status), (0, 0x02), "{kind:?}");
                let sense = &done.sense;
                let seen = (sense[0], sense[2], sense[12], sense[13]);
                assert_eq!(seen, (0x70, 0x04, 0x08, 0x01));
                assert_eq!(done.residual, i64::from(bytes) - 2048);
                assert_eq!(done.data, data);
            }
        }
    }
}
