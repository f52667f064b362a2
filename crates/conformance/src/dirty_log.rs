//! The dirty log of a live migration (vhost-user, "Migration") contains every page that the device writes. Each test compares the log with
//! all changed bytes of guest memory.

use std::collections::BTreeSet;
use std::os::fd::AsFd;

use vhost_frontend::{
    Area, FrontEnd, LogMemory, Options, Queue, QueueOptions, feature, kind, protocol_feature,
};

use crate::io::LIMIT;
use crate::scsi::ABSENT_TARGET;
use crate::{Device, Devices, Target, Test, Verdict, failed, needs};

const fn test(title: &'static str, clause: &'static str, run: fn(&Target) -> Verdict) -> Test {
    Test::new("dirty_log", Devices::Any, title, clause, run).writing()
}

const CLAUSE: &str = "vhost-user: Migration";

pub(crate) const TESTS: &[Test] = &[
    test(
        "requests of a split ring mark each page",
        CLAUSE,
        |target| check(target, false, false),
    ),
    test(
        "requests in tables of a split ring mark each page",
        CLAUSE,
        |target| check(target, false, true),
    ),
    test(
        "requests of a packed ring mark each page",
        CLAUSE,
        |target| check(target, true, false),
    ),
    test(
        "requests in tables of a packed ring mark each page",
        CLAUSE,
        |target| check(target, true, true),
    ),
];

fn check(target: &Target, packed: bool, indirect: bool) -> Verdict {
    let mut driver = LogDriver::new(target, target.first_queue(), packed, indirect)?;
    driver.start_log()?;
    for round in 0..12 {
        driver.fill_memory_randomly();
        let chains: Vec<_> = (0..CHAINS)
            .map(|nth| match target.device {
                Device::Blk => driver.blk_chain(nth),
                Device::Scsi(..) => driver.scsi_chain(nth),
            })
            .collect();
        driver.round(&chains, &format!("round {round}"))?;
    }
    Ok(())
}

const PAGE: u64 = 4096;
const MEMORY: usize = 2 << 20;
/// Bytes of the disk that the chains use.
const DISK: u64 = 1 << 20;
const DATA: usize = 64 * 4096;
/// Chains per round, and their headers.
pub const CHAINS: usize = 8;
const HEADER: usize = 512;

/// Descriptors of a chain: the device-readable ones, then the device-writable ones.
#[derive(Clone, Debug)]
pub struct Elements {
    /// Device-readable descriptors.
    pub readable: Vec<(u64, u32)>,
    /// Device-writable descriptors.
    pub writable: Vec<(u64, u32)>,
}

/// A driver that compares memory with the log.
pub struct LogDriver {
    /// Session.
    pub front_end: FrontEnd,
    /// Queue.
    pub queue: Queue,
    headers: Area,
    data: Area,
    /// Log.
    pub log: LogMemory,
    device: Device,
    /// Chains may have buffers outside of memory, and no other page may be marked.
    is_strict: bool,
    random: fastrand::Rng,
}

/// Returns the pages of buffers.
pub fn pages(elements: &[(u64, u32)]) -> impl Iterator<Item = u64> {
    elements.iter().flat_map(|(address, length)| {
        let last = address.saturating_add(u64::from(*length).max(1) - 1);
        address / PAGE..=last / PAGE
    })
}

impl LogDriver {
    /// Starts queue `index`. The test is skipped if the back end has no log.
    pub fn new(target: &Target, index: u16, packed: bool, indirect: bool) -> Verdict<LogDriver> {
        let defaults = Options::default();
        let options = Options {
            event_idx: indirect,
            memory: MEMORY,
            protocol_features: defaults.protocol_features | protocol_feature::LOG_SHMFD,
            ..defaults
        };
        let mut front_end = target.connect_ring(packed, &options)?;
        let has_log = front_end.has_protocol(protocol_feature::LOG_SHMFD);
        needs(has_log, "VHOST_USER_PROTOCOL_F_LOG_SHMFD")?;
        let has_log = front_end.offered() & feature::LOG_ALL != 0;
        needs(has_log, "VHOST_F_LOG_ALL")?;
        // Polled: the driver writes nothing while it waits.
        let options = QueueOptions {
            size: 128,
            indirect: indirect.then_some(16),
            polled: true,
        };
        let queue = front_end.start_queue(index, &options)?;
        let headers = front_end.allocate(HEADER * CHAINS, PAGE)?;
        let data = front_end.allocate(DATA, PAGE)?;
        let end = front_end.memory().regions()[0].spec.guest_address + MEMORY as u64;
        Ok(LogDriver {
            log: LogMemory::below(end)?,
            random: fastrand::Rng::with_seed(7),
            front_end,
            queue,
            headers,
            data,
            device: target.device,
            is_strict: target.is_strict,
        })
    }

    /// Starts to log as QEMU does.
    pub fn start_log(&self) -> Verdict {
        self.front_end.set_log(&self.log)?;
        self.front_end.log_data(true)?;
        Ok(self.log_ring(true)?)
    }

    /// Starts or ends the logging of the used ring.
    pub fn log_ring(&self, is_logged: bool) -> vhost_frontend::Result<()> {
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
    pub fn changed(&self, before: &[u8]) -> BTreeSet<u64> {
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

    /// Returns the pages of the ring.
    pub fn ring_pages(&self) -> BTreeSet<u64> {
        let layout = self.queue.layout();
        (layout.descriptor_area / PAGE..=(layout.end - 1) / PAGE).collect()
    }

    /// Offers chains to a queue that does not take them yet. Returns the memory.
    pub fn offer(&mut self, chains: &[Elements]) -> Verdict<Vec<u8>> {
        self.front_end.enable(self.queue.index(), false)?;
        self.publish(chains)
    }

    /// Makes chains available, and clears the log. Returns the memory.
    fn publish(&mut self, chains: &[Elements]) -> Verdict<Vec<u8>> {
        for (nth, chain) in chains.iter().enumerate() {
            if !self.queue.add(&chain.readable, &chain.writable, nth as u64) {
                return failed("the test's chain does not fit in the ring");
            }
        }
        self.queue.publish();
        self.log.clear();
        Ok(self.memory())
    }

    /// Lets the queue take the offered chains.
    pub fn enable(&self) -> vhost_frontend::Result<()> {
        self.front_end.enable(self.queue.index(), true)
    }

    /// Waits for completed chains and stops the queue. Returns its base.
    pub fn collect(&mut self, count: usize) -> Verdict<u32> {
        for _ in 0..count {
            self.queue.wait(LIMIT)?;
            self.queue.pop_used();
        }
        Ok(self.front_end.stop_queue(self.queue.index())?)
    }

    /// Starts the queue again after [`LogDriver::collect`].
    pub fn restart(&self, base: u32) -> Verdict {
        self.front_end.begin_queue(&self.queue, base)?;
        Ok(self.log_ring(true)?)
    }

    /// Compares the log with the changes of memory.
    pub fn check(&self, before: &[u8], chains: &[Elements], case: &str) -> Verdict {
        let marked: BTreeSet<u64> = self.log.pages().into_iter().collect();
        let changed = self.changed(before);
        let missing: Vec<_> = changed.difference(&marked).collect();
        if !missing.is_empty() {
            return failed(format!(
                "{case}: pages {missing:x?} have changed and are not marked; {chains:x?}"
            ));
        }
        let mut allowed = self.ring_pages();
        allowed.extend(chains.iter().flat_map(|chain| pages(&chain.writable)));
        let more: Vec<_> = marked.difference(&allowed).collect();
        match self.is_strict && !more.is_empty() {
            true => failed(format!(
                "{case}: pages {more:x?} are marked and are in no buffer; {chains:x?}"
            )),
            false => Ok(()),
        }
    }

    /// Executes chains with a log and checks it. The queue is stopped until the chains are available.
    pub fn round(&mut self, chains: &[Elements], case: &str) -> Verdict {
        let index = self.queue.index();
        let base = self.front_end.stop_queue(index)?;
        let before = self.publish(chains)?;
        self.front_end.describe_queue(&self.queue, base)?;
        self.log_ring(true)?;
        let (call, kick) = (self.queue.call().as_fd(), self.queue.kick_fd().as_fd());
        self.front_end.set_call(index, Some(call))?;
        self.front_end.set_kick(index, Some(kick))?;
        self.enable()?;
        self.queue.kick();
        let base = self.collect(chains.len())?;
        self.check(&before, chains, case)?;
        self.restart(base)
    }

    /// Divides `length` bytes into pieces at random addresses. Aligned pieces suit O_DIRECT.
    pub fn pieces(&mut self, mut length: u32) -> Vec<(u64, u32)> {
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
    pub fn fill_memory_randomly(&mut self) {
        let mut bytes = vec![0; DATA];
        self.random.fill(&mut bytes);
        self.data.write(0, &bytes);
    }

    /// Writes the header of a chain. Returns its descriptor.
    pub fn header(&self, nth: usize, bytes: &[u8]) -> (u64, u32) {
        let header = self.headers.part(nth * HEADER, bytes.len());
        header.write(0, bytes);
        header.element()
    }

    /// Returns a random virtio-blk request, also invalid ones.
    pub fn blk_chain(&mut self, nth: usize) -> Elements {
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
        if self.is_strict && self.random.u8(0..10) == 0 {
            writable.push((1 << 40, 512));
        }
        writable.extend(self.pieces(1));
        Elements { readable, writable }
    }

    /// Returns a random SCSI command, also invalid ones.
    fn scsi_chain(&mut self, nth: usize) -> Elements {
        let blocks = self.random.u8(1..=16);
        let block = self.random.u8(0..200);
        let (target, lun) = match self.device {
            Device::Scsi(target, lun) => (target, lun.to_be_bytes()),
            Device::Blk => (0, [0; 2]),
        };
        let is_absent = self.random.u8(0..10) == 0;
        let target = if is_absent { ABSENT_TARGET } else { target };
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
        header[..4].copy_from_slice(&[1, target, 0x40 | lun[0], lun[1]]);
        header[8] = nth as u8;
        header[19..19 + cdb.len()].copy_from_slice(&cdb);
        let mut readable = vec![self.header(nth, &header)];
        readable.extend(self.pieces(out));
        let mut writable = self.pieces(108);
        writable.extend(self.pieces(into));
        Elements { readable, writable }
    }
}
