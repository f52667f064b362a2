//! A driver moves between two back ends with requests in flight, as in a live migration (vhost-user protocol, "Migration"). A copy of its
//! memory receives only pages that the driver or the dirty log names. It must be equal to the memory when the queue has stopped.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use support::{Rig, Watched, eventually, ram};
use vhost_frontend::{
    Area, FrontEnd, InflightMemory, LogMemory, Options, Queue, QueueOptions, kind, status,
};

const PAGE: u64 = 4096;
const MEMORY: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);
const SLOTS: usize = 24;
const SLOT: usize = 4 * 4096;
/// Offset of the status pages in a slot.
const STATUS: usize = 3 * 4096;
/// Bytes of the disk that a slot uses. Slots share none, so that the order of their requests does not matter.
const EXTENT: usize = 16 << 10;
const HEADER: usize = 64;
const MIGRATIONS: usize = 12;

#[derive(Clone, Copy, Debug)]
struct Case {
    packed: bool,
    indirect: bool,
    size: u16,
    is_tracked: bool,
    /// Cloud Hypervisor's messages: a ring is disabled instead of stopped, and starts at the available index. The source is closed.
    disables: bool,
    seed: u64,
}

/// A request in flight.
struct Request {
    data: Area,
    status: Area,
    /// Expected data of a read.
    read: Option<Vec<u8>>,
}

/// A migration in progress.
struct Copy {
    log: LogMemory,
    memory: Vec<u8>,
}

struct Driver<'a> {
    case: Case,
    rigs: &'a [Rig; 2],
    options: Options,
    ends: [FrontEnd; 2],
    /// Back end that serves the queue.
    here: usize,
    inflight: Option<InflightMemory>,
    device: Arc<Watched>,
    queue: Queue,
    headers: Area,
    data: Area,
    disk: Vec<u8>,
    requests: BTreeMap<u64, Request>,
    /// Pages that the driver has written since the last copy.
    written: BTreeSet<u64>,
    random: fastrand::Rng,
}

impl Driver<'_> {
    fn new<'a>(rigs: &'a [Rig; 2], device: &Arc<Watched>, case: Case) -> Driver<'a> {
        let options = Options {
            packed: case.packed,
            event_idx: case.indirect,
            memory: MEMORY,
            ..Options::default()
        };
        let connect = |rig: &Rig| FrontEnd::connect(&rig.socket("d"), &options).unwrap();
        let mut ends = [connect(&rigs[0]), connect(&rigs[1])];
        // Polled: the driver writes to its memory only in `submit`.
        let queue_options = QueueOptions {
            size: case.size,
            indirect: case.indirect.then_some(8),
            polled: true,
        };
        let queue = ends[0].place_queue(0, &queue_options).unwrap();
        let mut driver = Driver {
            headers: ends[0].allocate(HEADER * SLOTS, PAGE).unwrap(),
            data: ends[0].allocate(SLOT * SLOTS, PAGE).unwrap(),
            disk: vec![0; EXTENT * SLOTS],
            random: fastrand::Rng::with_seed(case.seed),
            device: device.clone(),
            case,
            rigs,
            options,
            ends,
            here: 0,
            inflight: None,
            queue,
            requests: BTreeMap::new(),
            written: BTreeSet::new(),
        };
        device.set_delay(Duration::ZERO);
        driver.start(driver.queue.base(), true);
        driver
    }

    /// Starts the queue in the present back end.
    fn start(&mut self, base: u32, is_new: bool) {
        let end = &self.ends[self.here];
        if self.case.is_tracked {
            if is_new {
                self.inflight = Some(end.new_inflight(1, self.case.size).unwrap());
            }
            end.give_inflight(self.inflight.as_ref().unwrap()).unwrap();
        }
        end.begin_queue(&self.queue, base).unwrap();
    }

    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY];
        let region = &self.ends[self.here].memory().regions()[0];
        region.area().read(0, &mut bytes);
        bytes
    }

    fn note_written(&mut self, address: u64, length: usize) {
        let last = address + length as u64 - 1;
        self.written.extend(address / PAGE..=last / PAGE);
    }

    /// Submits a read or a write of the slot's part of the disk.
    fn submit(&mut self, slot: u64) {
        let random = &mut self.random;
        let sectors = random.usize(1..=16);
        let (length, first) = (512 * sectors, random.usize(0..EXTENT / 512 - sectors));
        let slot_area = self.data.part(slot as usize * SLOT, SLOT);
        let data = slot_area.part(random.usize(0..STATUS - length), length);
        let status = slot_area.part(STATUS + random.usize(0..4096), 1);
        let mut bytes = vec![0; length];
        random.fill(&mut bytes);
        data.write(0, &bytes);
        status.write(0, &[0xff]);
        let cut = random.usize(1..length);
        let pieces = [data.part(0, cut), data.part(cut, length - cut)].map(|area| area.element());
        let offset = slot as usize * EXTENT + 512 * first;
        let extent = &mut self.disk[offset..offset + length];
        let (kind, read) = match random.bool() {
            true => (kind::IN, Some(extent.to_vec())),
            false => (kind::OUT, None),
        };
        let header = self.headers.part(slot as usize * HEADER, 16);
        header.write(
            0,
            &[u64::from(kind), offset as u64 / 512]
                .map(u64::to_le_bytes)
                .concat(),
        );
        let (mut readable, mut writable) = (vec![header.element()], vec![status.element()]);
        match read {
            Some(_) => drop(writable.splice(0..0, pieces)),
            None => {
                readable.extend(pieces);
                extent.copy_from_slice(&bytes);
            }
        }
        assert!(self.queue.add(&readable, &writable, slot));
        let layout = *self.queue.layout();
        self.note_written(layout.descriptor_area, 16 * usize::from(layout.size));
        if !self.case.packed {
            self.note_written(layout.driver_area, 6 + 2 * usize::from(layout.size));
        }
        // Indirect tables are between ring and headers.
        self.written
            .extend(layout.end.div_ceil(PAGE)..self.data.address / PAGE);
        self.note_written(slot_area.address, SLOT);
        let request = Request { data, status, read };
        assert!(self.requests.insert(slot, request).is_none());
    }

    /// Takes the completed requests and checks them.
    fn reap(&mut self) {
        while let Some(used) = self.queue.pop_used() {
            let request = self.requests.remove(&used.token).expect("in flight");
            let mut bytes = [0xff];
            request.status.read(0, &mut bytes);
            assert_eq!(bytes, [status::OK]);
            let Some(expected) = request.read else {
                assert_eq!(used.written, 1);
                continue;
            };
            assert_eq!(used.written as usize, 1 + expected.len());
            let mut bytes = vec![0; expected.len()];
            request.data.read(0, &mut bytes);
            assert!(bytes == expected, "{:?}: other data", self.case);
        }
    }

    /// Submits requests, waits or takes completed requests.
    fn step(&mut self) {
        match self.random.u8(0..4) {
            0 | 1 => {
                // A request needs at most four descriptors.
                let room = usize::from(self.case.size) / 4 - self.requests.len();
                let free: Vec<u64> = (0..SLOTS as u64)
                    .filter(|slot| !self.requests.contains_key(slot))
                    .collect();
                let count = self.random.usize(0..=8).min(room).min(free.len());
                // Different delays change the order of completion.
                let delay = self.random.u64(0..=2) * 150;
                self.device.set_delay(Duration::from_micros(delay));
                free[..count].iter().for_each(|slot| self.submit(*slot));
                self.queue.publish();
            }
            2 => std::thread::sleep(Duration::from_micros(self.random.u64(0..300))),
            _ => self.reap(),
        }
    }

    /// Starts to log and copies all memory.
    fn start_copy(&mut self) -> Copy {
        let end = &self.ends[self.here];
        let region = &end.memory().regions()[0];
        let log = LogMemory::below(region.spec.guest_address + MEMORY as u64).unwrap();
        end.set_log(&log).unwrap();
        end.log_data(true).unwrap();
        end.log_ring(0, self.queue.layout(), true).unwrap();
        self.written.clear();
        let memory = self.memory();
        Copy { log, memory }
    }

    fn stop_log(&self) {
        let end = &self.ends[self.here];
        end.log_data(false).unwrap();
        end.log_ring(0, self.queue.layout(), false).unwrap();
    }

    /// Copies written pages. The device uses another log from then on, so the old one is complete.
    fn copy_written(&mut self, copy: &mut Copy) {
        let end = &self.ends[self.here];
        let start = end.memory().regions()[0].spec.guest_address;
        let log = LogMemory::below(start + MEMORY as u64).unwrap();
        end.set_log(&log).unwrap();
        let old = std::mem::replace(&mut copy.log, log);
        self.written.extend(old.pages());
        let memory = self.ends[self.here].memory().regions()[0].area();
        for page in std::mem::take(&mut self.written) {
            let at = (page * PAGE - start) as usize;
            memory.read(at, &mut copy.memory[at..at + PAGE as usize]);
        }
    }

    /// Stops or disables the queue. Returns its base.
    fn stop(&self) -> u32 {
        let end = &self.ends[self.here];
        if !self.case.disables {
            return end.stop_queue(0).unwrap();
        }
        end.enable(0, false).unwrap();
        let region = &end.memory().regions()[0];
        let available = self.queue.layout().driver_area + 2 - region.spec.guest_address;
        let mut index = [0; 2];
        region.area().read(available as usize, &mut index);
        u16::from_le_bytes(index).into()
    }

    /// Moves the queue, or stops it and continues in the same back end.
    fn migrate(&mut self) {
        let mut copy = self.start_copy();
        for _ in 0..self.random.u8(0..6) {
            self.step();
            match self.random.u8(0..6) {
                0..=3 => self.copy_written(&mut copy),
                4 => {
                    self.stop_log();
                    self.step();
                    copy = self.start_copy();
                }
                _ => {}
            }
        }
        let base = self.stop();
        self.copy_written(&mut copy);
        let memory = self.memory();
        let pages = memory
            .chunks(PAGE as usize)
            .zip(copy.memory.chunks(PAGE as usize));
        let differ: Vec<usize> = (0..)
            .zip(pages)
            .filter_map(|(page, (memory, copy))| (memory != copy).then_some(page))
            .collect();
        assert!(
            differ.is_empty(),
            "{:?}: pages {differ:?} differ",
            self.case
        );
        if self.case.packed {
            assert_eq!(base & 0xffff, base >> 16, "all requests were answered");
        }
        self.stop_log();
        let moves = self.random.u8(0..4) > 0;
        if self.case.disables && !moves {
            return self.ends[self.here].enable(0, true).unwrap();
        }
        if moves {
            let [first, second] = &mut self.ends;
            std::mem::swap(first.memory_mut(), second.memory_mut());
            self.here = 1 - self.here;
            self.ends[self.here].send_memory().unwrap();
        }
        self.start(base, moves);
        if self.case.disables {
            let there = 1 - self.here;
            let stream = self.ends[there].channel().stream();
            stream.shutdown(std::net::Shutdown::Both).unwrap();
            eventually("the session ends", || !self.rigs[there].is_connected("d"));
            let socket = self.rigs[there].socket("d");
            self.ends[there] = FrontEnd::connect(&socket, &self.options).unwrap();
        }
    }

    fn drain(&mut self) {
        while !self.requests.is_empty() {
            self.queue.wait(LIMIT).unwrap();
            self.reap();
        }
    }
}

#[test]
fn memory_is_complete_after_each_migration_and_each_request_ends_once() {
    let seed = fastrand::u64(..);
    let bits = |case: u8| [1, 2, 4, 8].map(|bit| case & bit != 0);
    for (number, [packed, indirect, is_tracked, disables]) in (0..16).map(bits).enumerate() {
        // Cloud Hypervisor has no packed rings.
        if packed && disables {
            continue;
        }
        // The device area of the largest ring is not in the page of the descriptors. Packed rings may have any size.
        for size in [16, 256, if packed { 13 } else { 32 }] {
            let case = Case {
                packed,
                indirect,
                size,
                is_tracked,
                disables,
                seed: seed.wrapping_add(number as u64),
            };
            println!("{case:?}");
            let rigs = [Rig::new(1), Rig::new(1)];
            let device = Watched::new(ram((EXTENT * SLOTS) as u64), Duration::ZERO);
            for rig in &rigs {
                rig.serve("d", device.clone(), 1);
            }
            let mut driver = Driver::new(&rigs, &device, case);
            for _ in 0..MIGRATIONS {
                for _ in 0..driver.random.u8(0..6) {
                    driver.step();
                }
                driver.migrate();
            }
            driver.drain();
        }
    }
}
