//! Replacement of a disk under a LUN while a virtio-scsi driver uses it: the events, and that no command for the old disk reaches the new
//! one.

mod support;

use std::sync::Arc;
use std::time::Duration;

use bdev::{Disk, Ram, RamOptions};
use block::IoKind;
use support::{Rig, Watched};
use vhost_frontend::{FrontEnd, Layout, Options, QueueOptions, ScsiDone, ScsiQueue, ScsiRequest};

const EVENTS: u16 = 1;
const REQUESTS: u16 = 2;
const LIMIT: Duration = Duration::from_secs(30);
const READY: [u8; 6] = [0; 6];
const READ_CAPACITY: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// LBA 80, 8 blocks: byte 40,960 with blocks of 512 bytes, 327,680 with blocks of 4,096.
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 80, 0, 0, 8, 0];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 80, 0, 0, 8, 0];

fn run(queue: &mut ScsiQueue, cdb: &[u8], out: &[u8], into: &mut [u8]) -> ScsiDone {
    let request = ScsiRequest {
        target: 0,
        lun: 0,
        tag: 7,
        cdb,
    };
    let done = queue.run(&request, out, into).unwrap();
    assert_eq!(done.response, 0);
    done
}

/// Returns status, sense key, and additional sense code with its qualifier.
fn code(done: &ScsiDone) -> (u8, u8, u8, u8) {
    match &done.sense[..] {
        [] => (done.status, 0, 0, 0),
        sense => (done.status, sense[2] & 0xf, sense[12], sense[13]),
    }
}

fn attentions(queue: &mut ScsiQueue) -> Vec<(u8, u8)> {
    let codes = std::iter::from_fn(|| {
        let (_, key, asc, ascq) = code(&run(queue, &READY, &[], &mut []));
        (key == 0x06).then_some((asc, ascq))
    });
    codes.collect()
}

#[test]
fn replaced_disk_of_a_lun_gets_no_write_meant_for_the_old() {
    let rig = Rig::new(1);
    let (socket, _, controller) = rig.serve_watched_controller(Duration::ZERO);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(
        &mut front_end,
        REQUESTS,
        &options,
        4,
        4096,
        Layout::Separate,
    )
    .unwrap();
    let mut events = front_end.start_queue(EVENTS, &options).unwrap();
    let room = front_end.allocate(4096, 4096).unwrap();
    assert!(!attentions(&mut queue).is_empty(), "a new nexus");
    let mut capacity = [0; 8];
    run(&mut queue, &READ_CAPACITY, &[], &mut capacity);
    assert_eq!(capacity[4..], [0, 0, 2, 0], "512 bytes");
    assert_eq!(
        code(&run(&mut queue, &WRITE, &[1; 4096], &mut [])),
        (0, 0, 0, 0)
    );

    let larger = Ram::create(RamOptions {
        size: 8 << 20,
        block_size: 4096,
        ..RamOptions::default()
    });
    let watched = Watched::new(Arc::new(larger.unwrap()), Duration::ZERO);
    let disk = Disk::new("other", None, watched.clone()).unwrap();
    assert!(controller.remove_lun(0, 0));
    controller.add_luns(&[(0, 0, Arc::new(disk))]).unwrap();

    // VIRTIO_SCSI_T_TRANSPORT_RESET with VIRTIO_SCSI_EVT_RESET_REMOVED, then with VIRTIO_SCSI_EVT_RESET_RESCAN.
    for reason in [2, 1] {
        assert!(events.add(&[], &[room.part(0, 16).element()], 0));
        events.publish();
        while events.pop_used().is_none() {
            events.wait(LIMIT).unwrap();
        }
        let mut event = [0; 16];
        room.read(0, &mut event);
        let expected = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, reason, 0, 0, 0];
        assert_eq!(
            (event[..6].to_vec(), event[12..].to_vec()),
            (expected[..6].to_vec(), expected[12..].to_vec())
        );
    }
    // A driver without event buffers is notified by unit attentions.
    let expected = [(0x29, 0x00), (0x3f, 0x0e), (0x3f, 0x03)];
    assert_eq!(attentions(&mut queue), expected);
    let unit_not_supported = (2, 0x05, 0x25, 0x00);
    assert_eq!(
        code(&run(&mut queue, &WRITE, &[2; 4096], &mut [])),
        unit_not_supported
    );
    assert_eq!(
        code(&run(&mut queue, &READ, &[], &mut [0; 4096])),
        unit_not_supported
    );
    run(&mut queue, &READ_CAPACITY, &[], &mut capacity);
    assert_eq!(capacity, [0, 0, 7, 0xff, 0, 0, 0x10, 0]);
    // Counted in blocks of the old size: 8 of the new ones are 32,768 bytes.
    assert_eq!(run(&mut queue, &WRITE, &[2; 4096], &mut []).status, 2);
    let changed = |kind| matches!(kind, IoKind::Write | IoKind::WriteZeroes | IoKind::Discard);
    assert!(!watched.seen().iter().any(|io| changed(io.kind)));
    let one = [0x2a, 0, 0, 0, 0, 10, 0, 0, 1, 0];
    assert_eq!(
        code(&run(&mut queue, &one, &[3; 4096], &mut [])),
        (0, 0, 0, 0)
    );
    let written = watched
        .seen()
        .iter()
        .filter(|io| changed(io.kind))
        .map(|io| io.offset)
        .collect::<Vec<_>>();
    assert_eq!(written, [40_960]);
}
