//! The dirty log of a live migration (vhost-user protocol, "Migration") contains every page that the device writes, and no page outside
//! of rings and buffers. Each test compares the log with all changed bytes of guest memory. The crate `conformance` has the tests of requests.

mod support;

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use conformance::dirty_log::{CHAINS, Elements, LogDriver, pages};
use conformance::{Device, Target};
use rustix::event::{EventfdFlags, eventfd};
use support::{Rig, Watched, eventually, ram, start_blk};
use vhost_frontend::{Error, LogMemory, request, status};
use virtio_scsi::Event;

const DISK: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);

fn connect_driver(socket: &Path, index: u16, packed: bool, indirect: bool) -> LogDriver {
    let device = if index == 0 {
        Device::Blk
    } else {
        Device::Scsi(0, 0)
    };
    LogDriver::new(&Target::strict(socket, device), index, packed, indirect).unwrap()
}

fn rings() -> impl Iterator<Item = (bool, bool)> {
    [(false, false), (false, true), (true, false), (true, true)].into_iter()
}

#[test]
fn task_management_and_events_mark_every_page_that_they_change() {
    let rig = Rig::new(1);
    let (socket, _, controller) = rig.serve_watched_controller(Duration::ZERO);
    for (packed, indirect) in rings() {
        let mut driver = connect_driver(&socket, 0, packed, indirect);
        driver.start_log().unwrap();
        // VIRTIO_SCSI_T_TMF with each subtype.
        let chains: Vec<_> = (0..CHAINS)
            .map(|nth| {
                driver.fill_memory_randomly();
                let mut header = [0; 24];
                (header[4], header[8], header[10]) = (nth as u8, 1, 0x40);
                Elements {
                    readable: vec![driver.header(nth, &header)],
                    writable: driver.pieces(1),
                }
            })
            .collect();
        driver.round(&chains, "task management").unwrap();
        drop(driver);

        let mut driver = connect_driver(&socket, 1, packed, indirect);
        driver.start_log().unwrap();
        driver.fill_memory_randomly();
        let chains: Vec<_> = (0..CHAINS)
            .map(|_| Elements {
                readable: Vec::new(),
                writable: driver.pieces(16),
            })
            .collect();
        let before = driver.offer(&chains).unwrap();
        driver.enable().unwrap();
        for lun in 0..4 {
            controller.post(Event::Added, 0, lun);
        }
        driver.collect(4).unwrap();
        driver.check(&before, &chains, "events").unwrap();
        drop(driver);
        eventually("the end of the session", || !rig.is_connected("c"));
    }
}

/// The comparison finds each changed page without a mark: one byte at the end of a segment, the status byte, the used ring.
#[test]
fn check_of_the_log_finds_one_byte_without_a_mark() {
    const PAGE: u64 = 4096;
    let rig = Rig::new(1);
    let socket = rig.serve("d", ram(DISK), 1);
    for (packed, indirect) in rings() {
        let mut driver = connect_driver(&socket, 0, packed, indirect);
        driver.start_log().unwrap();
        let area = driver.front_end.allocate(3 * PAGE as usize, PAGE).unwrap();
        area.write(0, &[0xff; 3 * PAGE as usize]);
        // VIRTIO_BLK_T_IN, sector 0: zeroes. The last byte is the first one of the second page.
        let (data, status) = (area.address + PAGE - 511, area.address + 2 * PAGE);
        let chains = [Elements {
            readable: vec![driver.header(0, &[0; 16])],
            writable: vec![(data, 512), (status, 1)],
        }];
        let before = driver.offer(&chains).unwrap();
        driver.enable().unwrap();
        driver.collect(1).unwrap();
        driver.check(&before, &chains, "marked").unwrap();
        let layout = driver.queue.layout();
        let used = match packed {
            true => layout.descriptor_area,
            false => layout.device_area,
        };
        for address in [data + 511, status, used] {
            let page = address / PAGE;
            let (file, mut byte) = (driver.log.file(), [0]);
            file.read_exact_at(&mut byte, page / 8).unwrap();
            let unmarked = [byte[0] & !(1 << (page % 8))];
            file.write_all_at(&unmarked, page / 8).unwrap();
            let found = driver.check(&before, &chains, "unmarked");
            let found = format!("{:?}", found.unwrap_err());
            let expected = format!("pages [{page:x}] have changed and are not marked");
            assert!(found.contains(&expected), "{found}");
            file.write_all_at(&byte, page / 8).unwrap();
        }
        drop(driver);
        eventually("the end of the session", || !rig.is_connected("d"));
    }
}

/// A read that is in flight when the log is set, replaced or handed over is in the log when it ends.
#[test]
fn log_is_adopted_by_running_queues_and_loses_no_request_in_flight() {
    let device = Watched::new(ram(DISK), Duration::from_millis(30));
    let rigs = [Rig::new(1), Rig::new(1)];
    let socket = rigs[0].serve("d", device.clone(), 1);
    rigs[1].serve("d", device, 1);
    for (packed, indirect) in rings() {
        let mut driver = connect_driver(&socket, 0, packed, indirect);
        let start = |driver: &mut LogDriver| {
            driver.fill_memory_randomly();
            let header = [0; 16];
            let mut writable = driver.pieces(8192);
            writable.extend(driver.pieces(1));
            let readable = vec![driver.header(0, &header)];
            let chains = [Elements { readable, writable }];
            let before = driver.offer(&chains).unwrap();
            driver.enable().unwrap();
            (chains, before)
        };
        let (chains, before) = start(&mut driver);
        driver.start_log().unwrap();
        let base = driver.collect(1).unwrap();
        driver.check(&before, &chains, "set").unwrap();
        driver.restart(base).unwrap();

        let (chains, before) = start(&mut driver);
        let end = driver.log.file().metadata().unwrap().len();
        driver.log = LogMemory::of_bytes(end + 1).unwrap();
        driver.front_end.set_log(&driver.log).unwrap();
        let base = driver.collect(1).unwrap();
        driver.check(&before, &chains, "replaced").unwrap();
        driver.restart(base).unwrap();

        let (chains, before) = start(&mut driver);
        driver.log_ring(false).unwrap();
        driver.log.clear();
        let base = driver.collect(1).unwrap();
        let marked: BTreeSet<u64> = driver.log.pages().into_iter().collect();
        let buffers: BTreeSet<u64> = pages(&chains[0].writable).collect();
        assert_eq!(marked, buffers, "data without rings");
        let rings = driver.ring_pages();
        let mut changed = driver.changed(&before);
        changed.retain(|page| !rings.contains(page));
        assert!(changed.is_subset(&marked));
        driver.restart(base).unwrap();

        let (chains, before) = start(&mut driver);
        for session in rigs[0].server.hand_over_sessions() {
            rigs[1].server.take_over_session(session).unwrap();
        }
        driver.collect(1).unwrap();
        driver.check(&before, &chains, "handed over").unwrap();
        for session in rigs[1].server.hand_over_sessions() {
            rigs[0].server.take_over_session(session).unwrap();
        }
        driver.restart(driver.queue.base()).unwrap();
        drop(driver);
        eventually("the end of the session", || !rigs[0].is_connected("d"));
    }
}

#[test]
fn nothing_is_marked_without_the_feature() {
    let rig = Rig::new(1);
    let socket = rig.serve("d", ram(DISK), 1);
    let mut driver = connect_driver(&socket, 0, false, false);
    driver.start_log().unwrap();
    driver.front_end.log_data(false).unwrap();
    let chains = [driver.blk_chain(0)];
    driver.offer(&chains).unwrap();
    driver.enable().unwrap();
    driver.collect(1).unwrap();
    assert!(driver.log.pages().is_empty());
}

#[test]
fn eventfd_of_the_log_is_written_after_marks() {
    let rig = Rig::new(1);
    let socket = rig.serve("d", ram(DISK), 1);
    let mut driver = connect_driver(&socket, 0, false, false);
    driver.start_log().unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let front_end = &driver.front_end;
    front_end
        .acknowledged(request::SET_LOG_FD, &[], &[event.as_fd()])
        .unwrap();
    let file = driver.log.file().as_fd();
    let refused = front_end.acknowledged(request::SET_LOG_FD, &[], &[file]);
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    let chains = [driver.blk_chain(0)];
    driver.round(&chains, "with an eventfd").unwrap();
    assert_eq!(rustix::io::read(&event, &mut [0u8; 8]), Ok(8));
}

#[test]
fn log_that_cannot_be_mapped_is_refused() {
    let rig = Rig::new(1);
    let socket = rig.serve("d", ram(DISK), 1);
    let mut front_end = support::connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    let log = LogMemory::of_bytes(4096).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for (bytes, offset, file) in [
        (0, 0, log.file().as_fd()),
        (8192, 0, log.file().as_fd()),
        (1, 8192, log.file().as_fd()),
        (u64::MAX, 0, log.file().as_fd()),
        (8, u64::MAX - 7, log.file().as_fd()),
        (1 << 62, 1 << 62, log.file().as_fd()),
        (4096, 0, event.as_fd()),
    ] {
        let payload = [bytes, offset].map(u64::to_ne_bytes).concat();
        let sent = front_end.acknowledged(request::SET_LOG_BASE, &payload, &[file]);
        assert!(
            matches!(sent, Err(Error::Refused(_))),
            "{bytes} bytes at {offset}: {sent:?}"
        );
        assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
    }
    front_end
        .set_log_part(1000, 96, log.file().as_fd())
        .unwrap();
}

/// A log without a written page ends the session: the front end would resume a guest with stale memory.
#[test]
fn log_that_misses_pages_ends_its_session_only() {
    let rig = Rig::new(1);
    let device = Watched::new(ram(DISK), Duration::from_millis(20));
    let socket = rig.serve("d", device, 1);
    let other = rig.serve_ram("other", 1);
    let mut bystander = support::connect(&other);
    let mut bystander = start_blk(&mut bystander, 0);
    for packed in [false, true] {
        for case in ["small", "small ring", "truncated", "truncated in flight"] {
            let mut driver = connect_driver(&socket, 0, packed, false);
            driver.start_log().unwrap();
            let chains = [driver.blk_chain(0)];
            driver.offer(&chains).unwrap();
            let small = LogMemory::of_bytes(8).unwrap();
            match case {
                "small" => {
                    driver.log_ring(false).unwrap();
                    driver.front_end.set_log(&small).unwrap();
                }
                "small ring" => driver.front_end.set_log(&small).unwrap(),
                "truncated" => driver.log.file().set_len(0).unwrap(),
                _ => {}
            }
            // Fails if the session has already ended.
            driver.front_end.enable(0, true).ok();
            if case == "truncated in flight" {
                driver.log.file().set_len(0).unwrap();
            }
            let closed = driver.front_end.channel().wait_closed(LIMIT);
            assert!(closed.is_ok(), "{case}: {closed:?}");
            eventually("the end of the session", || !rig.is_connected("d"));
            assert_eq!(bystander.write(0, &[1; 512]).unwrap(), status::OK);
        }
    }
    assert_eq!(rig.queues_running(), 1);
}

/// GET_VRING_BASE is not answered with a position if the log is incomplete.
#[test]
fn queue_does_not_stop_cleanly_with_an_incomplete_log() {
    let rig = Rig::new(1);
    let socket = rig.serve("d", ram(DISK), 1);
    let driver = connect_driver(&socket, 0, false, false);
    driver.start_log().unwrap();
    driver.log.file().set_len(0).unwrap();
    // Marks the ring.
    driver.log_ring(false).ok();
    driver.log_ring(true).ok();
    assert!(driver.front_end.stop_queue(0).is_err());
}
