//! The dirty log of a live migration (vhost-user protocol, "Migration") contains every page that the device writes, and no page outside
//! of rings and buffers. Each test compares the log with all changed bytes of guest memory.

mod support;

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bdev::{File, FileOptions};
use rustix::event::{EventfdFlags, eventfd};
use support::{Rig, Watched, eventually, ram, start_blk};
use vhost_frontend::{
    Area, Error, FrontEnd, LogMemory, Options, Queue, QueueOptions, kind, request, status,
};
use virtio_scsi::Event;

const PAGE: u64 = 4096;
const MEMORY: usize = 2 << 20;
const DISK: u64 = 1 << 20;
const DATA: usize = 64 * 4096;
const LIMIT: Duration = Duration::from_secs(30);
/// Chains per round, and their headers.
const CHAINS: usize = 8;
const HEADER: usize = 512;

/// Descriptors of a chain: the device-readable ones, then the device-writable ones.
#[derive(Clone, Debug)]
struct Elements {
    readable: Vec<(u64, u32)>,
    writable: Vec<(u64, u32)>,
}

/// A driver that compares memory with the log.
struct Driver {
    front_end: FrontEnd,
    queue: Queue,
    headers: Area,
    data: Area,
    log: LogMemory,
    random: fastrand::Rng,
}

fn pages(elements: &[(u64, u32)]) -> impl Iterator<Item = u64> {
    elements.iter().flat_map(|(address, length)| {
        let last = address.saturating_add(u64::from(*length).max(1) - 1);
        address / PAGE..=last / PAGE
    })
}

impl Driver {
    fn new(socket: &Path, index: u16, packed: bool, indirect: bool) -> Driver {
        let options = Options {
            packed,
            event_idx: indirect,
            memory: MEMORY,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(socket, &options).unwrap();
        // Polled: the driver writes nothing while it waits.
        let options = QueueOptions {
            size: 128,
            indirect: indirect.then_some(16),
            polled: true,
        };
        let queue = front_end.start_queue(index, &options).unwrap();
        let headers = front_end.allocate(HEADER * CHAINS, PAGE).unwrap();
        let data = front_end.allocate(DATA, PAGE).unwrap();
        let end = front_end.memory().regions()[0].spec.guest_address + MEMORY as u64;
        Driver {
            log: LogMemory::below(end).unwrap(),
            random: fastrand::Rng::with_seed(7),
            front_end,
            queue,
            headers,
            data,
        }
    }

    /// Starts to log as QEMU does.
    fn start_log(&self) {
        self.front_end.set_log(&self.log).unwrap();
        self.front_end.log_data(true).unwrap();
        self.log_ring(true).unwrap();
    }

    fn log_ring(&self, is_logged: bool) -> vhost_frontend::Result<()> {
        let queue = &self.queue;
        self.front_end
            .log_ring(queue.index(), queue.layout(), is_logged)
    }

    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY];
        self.front_end.memory().regions()[0]
            .area()
            .read(0, &mut bytes);
        bytes
    }

    /// Returns the pages that differ from an earlier state.
    fn changed(&self, before: &[u8]) -> BTreeSet<u64> {
        let after = self.memory();
        let first = self.front_end.memory().regions()[0].spec.guest_address / PAGE;
        let pages = before
            .chunks(PAGE as usize)
            .zip(after.chunks(PAGE as usize));
        let changed = (first..)
            .zip(pages)
            .filter(|(_, (before, after))| before != after);
        changed.map(|(page, _)| page).collect()
    }

    fn ring_pages(&self) -> BTreeSet<u64> {
        let layout = self.queue.layout();
        (layout.descriptor_area / PAGE..=(layout.end - 1) / PAGE).collect()
    }

    /// Offers chains to a queue that does not take them yet.
    fn offer(&mut self, chains: &[Elements]) -> Vec<u8> {
        self.front_end.enable(self.queue.index(), false).unwrap();
        for (nth, chain) in chains.iter().enumerate() {
            assert!(self.queue.add(&chain.readable, &chain.writable, nth as u64));
        }
        self.queue.publish();
        self.log.clear();
        self.memory()
    }

    fn enable(&self) {
        self.front_end.enable(self.queue.index(), true).unwrap();
    }

    /// Waits for completed chains and stops the queue.
    fn collect(&mut self, count: usize) -> u32 {
        for _ in 0..count {
            self.queue.wait(LIMIT).unwrap();
            self.queue.pop_used().unwrap();
        }
        self.front_end.stop_queue(self.queue.index()).unwrap()
    }

    /// Starts the queue again after [`Driver::collect`].
    fn restart(&self, base: u32) {
        self.front_end.begin_queue(&self.queue, base).unwrap();
        self.log_ring(true).unwrap();
    }

    fn check(&self, before: &[u8], chains: &[Elements], case: &str) {
        let marked: BTreeSet<u64> = self.log.pages().into_iter().collect();
        let changed = self.changed(before);
        assert!(
            changed.is_subset(&marked),
            "{case}: pages {:x?} have changed and are not marked; {chains:x?}",
            changed.difference(&marked)
        );
        let mut allowed = self.ring_pages();
        allowed.extend(chains.iter().flat_map(|chain| pages(&chain.writable)));
        assert!(
            marked.is_subset(&allowed),
            "{case}: pages {:x?} are marked and are in no buffer; {chains:x?}",
            marked.difference(&allowed)
        );
    }

    /// Executes chains with a log and checks it.
    fn round(&mut self, chains: &[Elements], case: &str) {
        let before = self.offer(chains);
        self.enable();
        let base = self.collect(chains.len());
        self.check(&before, chains, case);
        self.restart(base);
    }

    /// Divides `length` bytes into pieces at random addresses. Aligned pieces suit O_DIRECT.
    fn pieces(&mut self, mut length: u32) -> Vec<(u64, u32)> {
        let is_aligned = self.random.bool();
        let mut pieces = Vec::new();
        while length > 0 {
            let piece = match is_aligned || pieces.len() == 3 {
                true => length,
                false => self.random.u32(1..=length),
            };
            let most = DATA as u64 - u64::from(piece);
            let at = self.random.u64(0..=most);
            let at = if is_aligned { at & !(PAGE - 1) } else { at };
            pieces.push((self.data.address + at, piece));
            length -= piece;
        }
        pieces
    }

    /// Fills the data area, so that each write of the device changes it.
    fn fill_memory_randomly(&mut self) {
        let mut bytes = vec![0; DATA];
        self.random.fill(&mut bytes);
        self.data.write(0, &bytes);
    }

    fn header(&self, nth: usize, bytes: &[u8]) -> (u64, u32) {
        let header = self.headers.part(nth * HEADER, bytes.len());
        header.write(0, bytes);
        header.element()
    }

    /// Returns a random virtio-blk request, also invalid ones.
    fn blk_chain(&mut self, nth: usize) -> Elements {
        let sectors = self.random.u32(1..=24);
        let sector = self.random.u64(0..DISK / 512 - 24);
        let beyond = DISK / 512 - 1;
        let (kind, sector, out, into) = match self.random.u8(0..8) {
            0 | 1 => (kind::IN, sector, 0, sectors * 512),
            2 | 3 => (kind::OUT, sector, sectors * 512, 0),
            4 => (kind::GET_ID, 0, 0, 20),
            5 => (kind::FLUSH, 0, 0, 0),
            6 => (kind::IN, beyond, 0, 1024),
            _ => (99, 0, 0, self.random.u32(0..5000)),
        };
        let header = [u64::from(kind), sector].map(u64::to_le_bytes).concat();
        let mut readable = vec![self.header(nth, &header)];
        readable.extend(self.pieces(out));
        let mut writable = self.pieces(into);
        // Refused: the buffer is not in memory.
        if self.random.u8(0..10) == 0 {
            writable.push((1 << 40, 512));
        }
        writable.extend(self.pieces(1));
        Elements { readable, writable }
    }

    /// Returns a random SCSI command, also invalid ones.
    fn scsi_chain(&mut self, nth: usize) -> Elements {
        let blocks = self.random.u8(1..=16);
        let block = self.random.u8(0..200);
        let target = if self.random.u8(0..10) == 0 { 77 } else { 0 };
        let bytes = u32::from(blocks) * 512;
        let (cdb, out, into): (Vec<u8>, u32, u32) = match self.random.u8(0..8) {
            0 | 1 => (vec![0x28, 0, 0, 0, 0, block, 0, 0, blocks, 0], 0, bytes),
            2 | 3 => (vec![0x2a, 0, 0, 0, 0, block, 0, 0, blocks, 0], bytes, 0),
            // INQUIRY, MODE SENSE(6), an unknown command, READ(10) beyond the end.
            4 => (vec![0x12, 0, 0, 0, 96, 0], 0, 96),
            5 => (vec![0x1a, 0, 0x3f, 0, 200, 0], 0, 200),
            6 => (vec![0xff; 6], 0, 64),
            _ => (vec![0x28, 0, 0xff, 0, 0, 0, 0, 0, blocks, 0], 0, bytes),
        };
        let mut header = [0; 51];
        header[..4].copy_from_slice(&[1, target, 0x40, 0]);
        header[8] = nth as u8;
        header[19..19 + cdb.len()].copy_from_slice(&cdb);
        let mut readable = vec![self.header(nth, &header)];
        readable.extend(self.pieces(out));
        let mut writable = self.pieces(108);
        writable.extend(self.pieces(into));
        Elements { readable, writable }
    }
}

fn rings() -> impl Iterator<Item = (bool, bool)> {
    [(false, false), (false, true), (true, false), (true, true)].into_iter()
}

#[test]
fn blk_requests_mark_every_page_that_they_change() {
    let rig = Rig::new(2);
    let mut file = FileOptions::new(rig.directory.path().join("disk.raw"));
    file.size = Some(DISK);
    let disks = [
        rig.serve("ram", ram(DISK), 1),
        rig.serve("file", Arc::new(File::open(file).unwrap()), 1),
        rig.serve(
            "late",
            Watched::new(ram(DISK), Duration::from_micros(300)),
            1,
        ),
    ];
    for socket in &disks {
        for (packed, indirect) in rings() {
            let mut driver = Driver::new(socket, 0, packed, indirect);
            driver.start_log();
            for round in 0..12 {
                driver.fill_memory_randomly();
                let chains: Vec<_> = (0..CHAINS).map(|nth| driver.blk_chain(nth)).collect();
                let case = format!("{socket:?} packed {packed} indirect {indirect} {round}");
                driver.round(&chains, &case);
            }
        }
    }
}

#[test]
fn scsi_commands_mark_every_page_that_they_change() {
    const REQUESTS: u16 = 2;
    let rig = Rig::new(2);
    for delay in [Duration::ZERO, Duration::from_micros(300)] {
        let socket = rig.serve_controller(delay);
        for (packed, indirect) in rings() {
            let mut driver = Driver::new(&socket, REQUESTS, packed, indirect);
            driver.start_log();
            for round in 0..12 {
                driver.fill_memory_randomly();
                let chains: Vec<_> = (0..CHAINS).map(|nth| driver.scsi_chain(nth)).collect();
                let case = format!("delay {delay:?} packed {packed} indirect {indirect} {round}");
                driver.round(&chains, &case);
            }
        }
        rig.server.remove("c");
    }
}

#[test]
fn task_management_and_events_mark_every_page_that_they_change() {
    let rig = Rig::new(1);
    let (socket, _, controller) = rig.serve_watched_controller(Duration::ZERO);
    for (packed, indirect) in rings() {
        let mut driver = Driver::new(&socket, 0, packed, indirect);
        driver.start_log();
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
        driver.round(&chains, "task management");
        drop(driver);

        let mut driver = Driver::new(&socket, 1, packed, indirect);
        driver.start_log();
        driver.fill_memory_randomly();
        let chains: Vec<_> = (0..CHAINS)
            .map(|_| Elements {
                readable: Vec::new(),
                writable: driver.pieces(16),
            })
            .collect();
        let before = driver.offer(&chains);
        driver.enable();
        for lun in 0..4 {
            controller.post(Event::Added, 0, lun);
        }
        driver.collect(4);
        driver.check(&before, &chains, "events");
        drop(driver);
        eventually("the end of the session", || !rig.is_connected("c"));
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
        let mut driver = Driver::new(&socket, 0, packed, indirect);
        let start = |driver: &mut Driver| {
            driver.fill_memory_randomly();
            let header = [0; 16];
            let mut writable = driver.pieces(8192);
            writable.extend(driver.pieces(1));
            let readable = vec![driver.header(0, &header)];
            let chains = [Elements { readable, writable }];
            let before = driver.offer(&chains);
            driver.enable();
            (chains, before)
        };
        let (chains, before) = start(&mut driver);
        driver.start_log();
        let base = driver.collect(1);
        driver.check(&before, &chains, "set");
        driver.restart(base);

        let (chains, before) = start(&mut driver);
        let end = driver.log.file().metadata().unwrap().len();
        driver.log = LogMemory::of_bytes(end + 1).unwrap();
        driver.front_end.set_log(&driver.log).unwrap();
        let base = driver.collect(1);
        driver.check(&before, &chains, "replaced");
        driver.restart(base);

        let (chains, before) = start(&mut driver);
        driver.log_ring(false).unwrap();
        driver.log.clear();
        let base = driver.collect(1);
        let marked: BTreeSet<u64> = driver.log.pages().into_iter().collect();
        let buffers: BTreeSet<u64> = pages(&chains[0].writable).collect();
        assert_eq!(marked, buffers, "data without rings");
        let rings = driver.ring_pages();
        let mut changed = driver.changed(&before);
        changed.retain(|page| !rings.contains(page));
        assert!(changed.is_subset(&marked));
        driver.restart(base);

        let (chains, before) = start(&mut driver);
        for session in rigs[0].server.hand_over_sessions() {
            rigs[1].server.take_over_session(session).unwrap();
        }
        driver.collect(1);
        driver.check(&before, &chains, "handed over");
        for session in rigs[1].server.hand_over_sessions() {
            rigs[0].server.take_over_session(session).unwrap();
        }
        driver.restart(driver.queue.base());
        drop(driver);
        eventually("the end of the session", || !rigs[0].is_connected("d"));
    }
}

#[test]
fn nothing_is_marked_without_the_feature() {
    let rig = Rig::new(1);
    let socket = rig.serve("d", ram(DISK), 1);
    let mut driver = Driver::new(&socket, 0, false, false);
    driver.start_log();
    driver.front_end.log_data(false).unwrap();
    let chains = [driver.blk_chain(0)];
    driver.offer(&chains);
    driver.enable();
    driver.collect(1);
    assert!(driver.log.pages().is_empty());
}

#[test]
fn eventfd_of_the_log_is_written_after_marks() {
    let rig = Rig::new(1);
    let socket = rig.serve("d", ram(DISK), 1);
    let mut driver = Driver::new(&socket, 0, false, false);
    driver.start_log();
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let front_end = &driver.front_end;
    front_end
        .acknowledged(request::SET_LOG_FD, &[], &[event.as_fd()])
        .unwrap();
    let file = driver.log.file().as_fd();
    let refused = front_end.acknowledged(request::SET_LOG_FD, &[], &[file]);
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    let chains = [driver.blk_chain(0)];
    driver.round(&chains, "with an eventfd");
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
            let mut driver = Driver::new(&socket, 0, packed, false);
            driver.start_log();
            let chains = [driver.blk_chain(0)];
            driver.offer(&chains);
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
    let driver = Driver::new(&socket, 0, false, false);
    driver.start_log();
    driver.log.file().set_len(0).unwrap();
    // Marks the ring.
    driver.log_ring(false).ok();
    driver.log_ring(true).ok();
    assert!(driver.front_end.stop_queue(0).is_err());
}
