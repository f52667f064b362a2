//! State of a run: disks with their models, clients with requests in flight, and successive lives of the daemon.

macro_rules! log_step {
    ($world:expr, $($text:tt)*) => {
        if let Some(trace) = &mut $world.trace {
            let at = $world.clock.elapsed();
            trace.push(format!("{:>9} us  {}", at.as_micros(), format_args!($($text)*)));
        }
    };
}

mod backups;
mod copying;
mod disks;
mod exchange;
mod moves;
mod pulls;
mod requests;
mod reserving;
mod restarts;
mod snapshots;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use bdev::{CacheMode, RateLimits};
use latency::{Clock, SimulatedTime};
use uring::simulated::{Faults, Files};
use virtqueue::simulated::{Crashed, crash_after};

use crate::clients::blk::Blk;
use crate::clients::initiator::IscsiClient;
use crate::clients::scsi::Scsi;
use crate::clients::{ABORTED, Client, Done, Kind, LOST, Outcome, Request};
use crate::files;
use crate::life::{BLK_QUEUES, DiskPlan, Lies, Life, WORKERS};
use crate::model::{BLOCK, Model, Value, value_of};
use crate::random::Random;
use crate::schedule::{Action, ScheduleStep};
use reserving::Reserved;

const GROW_MAX: u64 = 400;
const INITIATORS: u64 = 2;

struct Pending {
    client: usize,
    request: Request,
    begin: u64,
    /// Value that COMPARE AND WRITE expects.
    expected: Value,
    /// The request began before a kill of the daemon.
    survived: bool,
    /// Change counter of the disk's reservations at the start of the request.
    reservations: u64,
}

/// An internal snapshot of an image with its expected content.
struct Snapshot {
    path: PathBuf,
    /// Content of unallocated clusters of the image.
    below: Vec<u8>,
    name: String,
    model: Model,
}

enum SimClient {
    Blk(Blk),
    Scsi(Scsi),
    Iscsi(IscsiClient),
}

impl SimClient {
    fn client(&mut self) -> &mut dyn Client {
        match self {
            SimClient::Blk(one) => one,
            SimClient::Scsi(one) => one,
            SimClient::Iscsi(one) => one,
        }
    }
}

pub struct World {
    random: Random,
    clock: Clock,
    time: SimulatedTime,
    folder: tempfile::TempDir,
    plans: Vec<DiskPlan>,
    models: Vec<Model>,
    life: Option<Life>,
    clients: Vec<SimClient>,
    pending: BTreeMap<u64, Pending>,
    /// Event counter, used as the clock.
    now: u64,
    next_value: Value,
    /// The daemon has ended in the middle of an iteration.
    has_ended: bool,
    /// Faults were injected in this life: requests may fail.
    is_troubled: bool,
    /// A sync has failed, so the page cache may lose any data.
    has_lost_pages: bool,
    /// Step to execute when the remaining calls are used up.
    cut: Option<Action>,
    snapshots: Vec<Snapshot>,
    /// A request, and whether it completed successfully.
    watched: Option<(u64, bool)>,
    reservations: Vec<Reserved>,
    /// Last backups of disks since a power cut.
    checkpoints: BTreeMap<usize, copying::Checkpoint>,
    /// Time at which the dirty bitmaps of each disk were set.
    recorded: Vec<u64>,
    trace: Option<Vec<String>>,
    /// Digest of the events. Equal runs have equal digests.
    digest: u64,
    corruption: Faults,
}

impl World {
    /// `corruption`: additional faults of the disks, outside the schedule, for tests that expect the simulator to detect them.
    pub fn new(seed: u64, traced: bool, corruption: Faults) -> World {
        let mut random = Random::new(seed);
        Files::begin(random.next());
        crash_after(None);
        bdev::stepped::kill_image_owners();
        let in_memory = std::path::Path::new("/dev/shm");
        let folder = tempfile::Builder::new()
            .prefix("sim-")
            .tempdir_in(in_memory);
        let folder = folder.or_else(|_| tempfile::tempdir()).expect("a folder");
        let (plans, models) = disks::plan(folder.path(), &mut random);
        for path in plans.iter().flat_map(DiskPlan::files) {
            Files::add_file(&files::open(path)).expect("a file of the simulation");
        }
        let (clock, time) = Clock::simulated();
        let mut world = World {
            random,
            clock,
            time,
            folder,
            recorded: vec![0; plans.len()],
            plans,
            models,
            life: None,
            clients: Vec::new(),
            pending: BTreeMap::new(),
            now: 1,
            next_value: 1,
            has_ended: false,
            is_troubled: false,
            has_lost_pages: false,
            cut: None,
            snapshots: Vec::new(),
            watched: None,
            reservations: (0..4).map(|_| Reserved::default()).collect(),
            checkpoints: BTreeMap::new(),
            trace: traced.then(Vec::new),
            digest: seed,
            corruption,
        };
        Files::set_faults(corruption);
        world.begin_life();
        world
    }

    pub fn take_trace(&mut self) -> Vec<String> {
        self.trace.take().unwrap_or_default()
    }

    fn note(&mut self, event: u64) {
        self.digest = (self.digest ^ event)
            .wrapping_mul(0x0100_0000_01b3)
            .rotate_left(17);
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    fn life(&mut self) -> &mut Life {
        self.life.as_mut().expect("the daemon lives")
    }

    fn begin_life(&mut self) {
        self.has_ended = false;
        self.is_troubled = false;
        self.has_lost_pages = false;
        Files::reopen_all();
        let life = Life::begin(&self.plans, &self.clock, &mut self.random);
        log_step!(self, "the daemon starts");
        for (disk, checkpoint) in &self.checkpoints {
            let changed = vec![Arc::clone(&checkpoint.changed)];
            life.disks[*disk].recorder().record_in(changed);
        }
        self.recorded.fill(self.now);
        let mut clients = std::mem::take(&mut self.clients);
        if clients.is_empty() {
            clients = self.new_clients(&life);
        }
        for one in &mut clients {
            match one {
                SimClient::Blk(one) => one.set_device(life.blk[one.disk()].clone()),
                SimClient::Scsi(one) => one.set_device(life.scsi.clone()),
                SimClient::Iscsi(one) => one.set_server(life.server.clone()),
            }
        }
        self.clients = clients;
        self.life = Some(life);
        for index in 0..self.clients.len() {
            self.attach(index);
        }
    }

    fn new_clients(&mut self, life: &Life) -> Vec<SimClient> {
        let mut clients = Vec::new();
        for (disk, device) in life.blk.iter().enumerate() {
            for queue in 0..BLK_QUEUES {
                let is_hostile = queue == BLK_QUEUES - 1;
                let packed = !is_hostile && self.random.one_in(2);
                let tracked = !is_hostile && self.random.one_in(2);
                let worker = usize::from(queue) % WORKERS;
                let mut blk = Blk::new(device.clone(), disk, worker, queue, packed, tracked);
                blk.is_hostile = is_hostile;
                clients.push(SimClient::Blk(blk));
            }
        }
        for queue in 0..WORKERS {
            let (packed, tracked) = (self.random.one_in(2), self.random.one_in(2));
            let device = life.scsi.clone();
            let index = 2 + queue as u16;
            clients.push(SimClient::Scsi(Scsi::new(
                device, queue, index, packed, tracked,
            )));
        }
        for number in 0..INITIATORS as usize {
            let seed = self.random.next();
            let one = IscsiClient::new(
                life.server.clone(),
                number as u8 + 1,
                number,
                1 + number,
                seed,
            );
            clients.push(SimClient::Iscsi(one));
        }
        clients
    }

    fn attach(&mut self, index: usize) {
        let client = self.clients[index].client();
        let worker = client.worker();
        let life = self.life.as_mut().expect("the daemon lives");
        client.attach(&mut life.workers[worker]);
    }

    fn poll(&mut self, index: usize) {
        let mut done = Vec::new();
        self.clients[index].client().poll(&mut done);
        for one in done {
            self.ended(one);
        }
        if let SimClient::Iscsi(one) = &mut self.clients[index] {
            if one.wants_connection() {
                let worker = 1 - one.worker();
                let life = self.life.as_mut().expect("the daemon lives");
                one.add_connection(&mut life.workers[worker]);
            }
            if one.is_gone() && self.random.one_in(3) {
                self.attach(index);
            }
        }
    }

    fn ended(&mut self, done: Done) {
        let now = self.tick();
        self.note(done.token);
        let pending = self.pending.remove(&done.token);
        let pending = pending.expect("a request ends once");
        let request = &pending.request;
        let (disk, kind) = (request.disk, request.kind);
        let name = self.clients[pending.client].client().name();
        log_step!(
            self,
            "{name}: request {} ends: {:?}",
            done.token,
            done.outcome
        );
        let is_hostile =
            matches!(&self.clients[pending.client], SimClient::Blk(one) if one.is_hostile);
        if is_hostile {
            return;
        }
        if let Outcome::Failed(why) = &done.outcome
            && !matches!(kind, Kind::Reserve(_))
        {
            let is_wanted = [LOST, ABORTED].contains(&why.as_str());
            assert!(
                self.is_troubled || is_wanted || pending.survived,
                "request {} of {name} ({kind:?} of d{disk}, {} blocks at {}) failed without an injected fault: {why}",
                done.token,
                request.blocks,
                request.lba
            );
        }
        self.check_reservations(&pending, &done.outcome);
        let good = done.outcome == Outcome::Good;
        if let Some((token, ended)) = &mut self.watched
            && *token == done.token
        {
            *ended = good;
        }
        match kind {
            Kind::Reserve(service_action) => self.reserved(&pending, service_action, &done.outcome),
            Kind::Read if good => self.check_read(&pending, &done.data),
            Kind::Read => {}
            Kind::Flush if good => self.models[disk].flushed(pending.begin),
            Kind::Flush => {}
            _ if done.outcome == Outcome::Conflict && !pending.survived => {
                for at in 0..request.blocks {
                    self.models[disk].refused(request.lba + at, pending.begin);
                }
            }
            _ => {
                if kind == Kind::CompareAndWrite && good {
                    self.check_compared(&pending);
                }
                if good {
                    self.check_recorded(&pending);
                }
                let through = self.plans[disk].cache == CacheMode::Writethrough;
                let durable = through
                    || matches!(kind, Kind::Write { durable: true })
                        && !matches!(&self.clients[pending.client], SimClient::Blk(_));
                // It may have completed before the kill and been lost with the memory.
                let good = good && !(pending.survived && self.plans[disk].lies == Lies::Ram);
                for at in 0..request.blocks {
                    let lba = request.lba + at;
                    self.models[disk].end(lba, pending.begin, now, good, durable);
                }
            }
        }
        let reads = self.pending.values().filter(|one| one.request.disk == disk);
        let oldest = reads.map(|one| one.begin).min().unwrap_or(now);
        for at in 0..request.blocks {
            self.models[disk].prune(request.lba + at, oldest);
        }
    }

    fn check_read(&self, pending: &Pending, data: &[u8]) {
        let request = &pending.request;
        // The content of a memory disk is lost with the process.
        if pending.survived && self.plans[request.disk].lies == Lies::Ram {
            return;
        }
        for at in 0..request.blocks {
            let lba = request.lba + at;
            let block = &data[at as usize * BLOCK..][..BLOCK];
            let found = value_of(block, lba)
                .and_then(|value| self.models[request.disk].check(lba, value, pending.begin));
            if let Err(reason) = found {
                panic!(
                    "request {} reads block {lba} of d{}: {reason}",
                    request.token, request.disk
                );
            }
        }
    }

    fn check_compared(&self, pending: &Pending) {
        let request = &pending.request;
        if pending.survived {
            return;
        }
        let found = self.models[request.disk].check(request.lba, pending.expected, pending.begin);
        if let Err(reason) = found {
            panic!(
                "request {} compared block {} of d{} successfully with value {}, but {reason}",
                request.token, request.lba, request.disk, pending.expected
            );
        }
    }

    fn iterate(&mut self, worker: usize) {
        if self.has_ended {
            return;
        }
        let worker = &mut self.life.as_mut().expect("the daemon lives").workers[worker];
        let iteration = catch_unwind(AssertUnwindSafe(|| worker.iterate_once()));
        match iteration {
            Ok(_) => {}
            Err(ended) if ended.is::<Crashed>() => self.has_ended = true,
            Err(panic) => resume_unwind(panic),
        }
        self.check_faults();
    }

    fn check_faults(&mut self) {
        for fault in Files::take_happened() {
            self.is_troubled = true;
            self.has_lost_pages |= fault.starts_with("a sync");
            log_step!(self, "{fault}");
        }
    }

    fn set_faults(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        let mut rate = |share| match random.one_in(share) {
            true => 3 + random.below(40) as u32,
            false => 0,
        };
        let faults = Faults {
            short: rate(2),
            read: rate(4),
            write: rate(4),
            full: rate(4),
            sync: rate(8),
            slow: rate(2),
            stuck: rate(6),
            ..self.corruption
        };
        log_step!(self, "faults: {faults:?}");
        Files::set_faults(faults);
    }

    fn limit(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        let disk = random.below(self.plans.len() as u64) as usize;
        let limits = match random.one_in(2) {
            true => RateLimits::default(),
            false => RateLimits {
                iops: 1000,
                iops_burst: 4,
                bandwidth: 0,
                bandwidth_burst: 0,
            },
        };
        log_step!(self, "d{disk} is limited to {} IOPS", limits.iops);
        self.life().disks[disk].set_limits(limits);
    }

    fn grow(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        let disk = 2 + random.below(2) as usize;
        if self.plans[disk].lies != Lies::Image {
            return;
        }
        // A failed resize may have made the disk larger.
        let now = self.life().disks[disk].device().capacity().bytes() / BLOCK as u64;
        let blocks = now.max(self.models[disk].len()) + 1 + random.below(40);
        if blocks > GROW_MAX {
            return;
        }
        log_step!(self, "d{disk}: resize to {blocks} blocks");
        let disk_of = self.life().disks[disk].clone();
        let grown = disk_of.resize(blocks * BLOCK as u64);
        self.check_faults();
        match grown {
            Ok(()) => {
                let life = self.life();
                life.blk[disk].resized();
                life.notify_resized(&disk_of);
                self.models[disk].resize(blocks);
                // Drivers use the new space once they are notified of it.
                for round in 0..24 * WORKERS {
                    self.iterate(round % WORKERS);
                }
            }
            Err(error) => {
                log_step!(self, "cannot grow the disk: {error}");
                assert!(
                    self.is_troubled || Files::is_cut(),
                    "growing failed: {error}"
                );
                // The disk may be larger or not: no client is notified of a new size.
            }
        }
    }

    pub fn step(&mut self, step: ScheduleStep) {
        let ScheduleStep { action, detail } = step;
        let mut random = Random::new(detail);
        match action {
            Action::Submit => self.submit(detail),
            Action::Iterate => self.iterate(random.below(WORKERS as u64) as usize),
            Action::Own => {
                bdev::stepped::step_image_owners();
                self.check_faults();
            }
            Action::Poll => {
                let index = random.below(self.clients.len() as u64) as usize;
                self.poll(index);
                // A login takes many steps.
                for index in self.clients.len() - INITIATORS as usize..self.clients.len() {
                    self.poll(index);
                }
            }
            Action::Wait => self.wait(random.below(2_000_000)),
            Action::Faults => self.set_faults(detail),
            Action::NoFaults => Files::set_faults(Faults::default()),
            Action::Disconnect => {
                let index = self.clients.len() - 1 - random.below(INITIATORS) as usize;
                log_step!(self, "a connection breaks");
                self.clients[index].client().disconnect();
            }
            Action::Abort => {
                let index = self.any_scsi(&mut random);
                let client = self.clients[index].client();
                let (name, aborted) = (client.name(), client.abort(random.next()));
                if let Some(subject) = aborted {
                    log_step!(self, "{name} aborts {subject}");
                }
            }
            Action::Reset => {
                let index = self.any_scsi(&mut random);
                self.reset(index, random.next());
            }
            Action::Misbehave => {
                let disk = random.below(self.plans.len() as u64) as usize;
                let index = disk * usize::from(BLK_QUEUES) + usize::from(BLK_QUEUES) - 1;
                self.clients[index].client().misbehave(detail);
            }
            Action::Limit => self.limit(detail),
            Action::Reserve => self.reserve(detail),
            Action::Grow => self.grow(detail),
            Action::Snapshot => self.snapshot(detail),
            Action::Mirror => self.mirror(detail),
            Action::Commit => self.commit(detail),
            Action::BackUp => self.back_up(detail),
            Action::Pull => self.pull(detail),
            Action::Stream => self.stream(detail),
            Action::Restart => self.restart(),
            Action::Kill | Action::CutPower if self.cut.is_none() => {
                self.cut = Some(action);
                match random.one_in(2) {
                    true => Files::cut_after(Some(random.below(30))),
                    false => crash_after(Some(random.below(100) as u32)),
                }
            }
            Action::Kill | Action::CutPower => {}
        }
        if self.cut.is_some() && (Files::is_cut() || self.has_ended) {
            let power = self.cut.take() == Some(Action::CutPower);
            self.crash(power);
        }
    }

    /// Returns the index of a random SCSI client.
    fn any_scsi(&self, random: &mut Random) -> usize {
        self.clients.len() - 1 - random.below(INITIATORS + WORKERS as u64) as usize
    }

    fn reset(&mut self, index: usize, seed: u64) {
        let client = self.clients[index].client();
        let (name, done) = (client.name(), client.reset(seed));
        let Some((subject, disks)) = done else {
            return;
        };
        log_step!(self, "{name} resets {subject}");
        for disk in disks {
            for other in (0..self.clients.len()).filter(|other| *other != index) {
                self.clients[other].client().may_lose(disk);
            }
        }
    }

    fn wait(&mut self, nanoseconds: u64) {
        let before = self.clock.elapsed().as_secs();
        self.time.advance(nanoseconds);
        if self.clock.elapsed().as_secs() > before
            && let Some(life) = &self.life
        {
            life.server.second_passed();
        }
    }

    /// Advances the clock and runs everything except the clients.
    fn round(&mut self, nanoseconds: u64) {
        self.wait(nanoseconds);
        for worker in 0..WORKERS {
            self.iterate(worker);
        }
        bdev::stepped::step_image_owners();
    }

    /// Runs one round of a wait. Stuck I/O completes after a minute.
    fn round_of_wait(&mut self, round: usize) {
        self.round(match round % 64 {
            63 => 2_000_000_000,
            _ => 300_000,
        });
    }

    /// Ends all faults and waits until no request is in flight.
    pub fn settle(&mut self) {
        Files::set_faults(self.corruption);
        Files::cut_after(None);
        crash_after(None);
        self.cut = None;
        for disk in &self.life().disks {
            disk.set_limits(RateLimits::default());
        }
        for round in 0..20_000 {
            if self.pending.is_empty() {
                return;
            }
            self.round_of_wait(round);
            for index in 0..self.clients.len() {
                self.poll(index);
            }
        }
        let (_, first) = self.pending.first_key_value().expect("one at least");
        let client = first.client;
        let request = &first.request;
        let description = format!(
            "{:?} of d{}, {} blocks at {}",
            request.kind, request.disk, request.blocks, request.lba
        );
        panic!(
            "{} requests do not complete; the first is {} of {}: {description}",
            self.pending.len(),
            self.pending
                .first_key_value()
                .map_or(0, |(token, _)| *token),
            self.clients[client].client().name(),
        );
    }

    /// Ends the run: reads all data, stops the daemon and checks the images.
    pub fn finish(&mut self) -> (u64, Vec<String>) {
        self.settle();
        if !self.is_troubled {
            self.verify();
        }
        self.stop();
        self.check_images(true);
        self.check_snapshots();
        Files::end();
        let trace = self.take_trace();
        (self.digest, trace)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        bdev::stepped::kill_image_owners();
        self.clients.clear();
        self.life = None;
        bdev::stepped::kill_image_owners();
        Files::end();
    }
}
