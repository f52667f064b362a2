//! State of one connection. Messages change it and its vrings.
//!
//! Checks everything that depends on the device or the session: indices, features, sizes, addresses. `dispatch` answers a refused message,
//! or ends the session if the front end waits for no answer. At every end its vrings are drained first, so that no request is left half done.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use guest_memory::{DirtyLog, LogFault, MemoryTable, RegionSpec};
use reactor::{Pool, RateLimit, WorkerHandle};
use rustix::net::{AddressFamily, SocketType, sockopt};
use vhost_user_wire::{
    Config, Inflight, Log, MemoryRegion, Message, Reply, VringAddr, VringState, protocol_feature,
};
use virtio_device::{LogSetup, OnBroken, QueueChange, VirtioDevice};
use virtqueue::PACKED_START;

use crate::dispatch::Error;
use crate::inflight::{InflightRegion, RegionId};
use crate::queue_times::{QueueTime, QueueTimes};
use crate::resume::ResumeCheck;
use crate::vring::{Context, UserAddresses, Vring, check_event, clone_fd};

/// Feature bits of the transport and the rings, equal for all devices.
const F_LOG_ALL: u64 = 1 << 26;

const F_ANY_LAYOUT: u64 = 1 << 27;
const F_INDIRECT_DESC: u64 = 1 << 28;
const F_EVENT_IDX: u64 = 1 << 29;
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;
const F_RING_PACKED: u64 = 1 << 34;

/// Time limit for the requests of a ring that is disabled while writes are logged. Less than an upgrade waits for a session.
const DISABLE_LIMIT: Duration = Duration::from_secs(4);

/// Maximum queue size for front ends (virtio 1.3, 2.7: at most 32768; drivers use 128 to 1024).
const MAX_QUEUE_SIZE: u32 = 1024;
/// Maximum number of queues of any device type: virtio-scsi has 2 besides its 254 request queues.
const MAX_QUEUES: u16 = 256;
/// Maximum number of memory regions that are added one by one. QEMU's own limit is 512.
const MAX_MEMORY_REGIONS: u64 = 512;
/// Maximum number of completely replaced memory tables that requests in flight use. Each is fully mapped.
const MAX_REPLACED_TABLES: usize = 32;
/// Maximum number of tables that differ from their successor by one region: enough for a front end that fills its slots.
const MAX_CHANGED_TABLES: usize = MAX_MEMORY_REGIONS as usize;
/// Maximum number of mappings that only old tables have. Mappings of all front ends together are limited, too.
const MAX_OLD_MAPPINGS: usize = 1024;
/// Bytes of the configuration space beyond the device's own length read as zero up to here.
const CONFIG_SPACE: usize = 256;

/// Rate limit of the log line, because front ends repeat their features at each reconnection.
static LOST_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));

/// The front end's socket for back-end requests, once it has sent one.
pub(crate) type Channel = Arc<Mutex<Option<UnixStream>>>;

pub(crate) struct Session {
    device: Arc<dyn VirtioDevice>,
    pool: Arc<Pool>,
    on_broken: OnBroken,
    times: Arc<QueueTimes>,
    memory: Arc<MemoryTable>,
    /// Previous tables. Requests in flight use the table of their start.
    replaced: Vec<(Weak<MemoryTable>, Change)>,
    features: u64,
    vrings: Vec<Vring>,
    inflight: Option<InflightRegion>,
    /// Region that was created last for this front end.
    created: Option<RegionId>,
    log: MigrationLog,
    channel: Channel,
    resume: ResumeCheck,
    has_run: bool,
    /// The front end has hung up.
    pub(crate) has_left: bool,
}

/// Dirty log of a live migration. Used while the features include [`F_LOG_ALL`].
#[derive(Default)]
struct MigrationLog {
    pages: Option<Arc<DirtyLog>>,
    /// Eventfd that is written after pages were marked.
    call: Option<OwnedFd>,
}

impl MigrationLog {
    /// Returns the reason why the log is incomplete, if it is.
    fn fault(&self) -> Option<LogFault> {
        self.pages.as_ref().and_then(|pages| pages.fault())
    }
}

/// Difference between a memory table and its predecessor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Table,
    Region,
}

impl Change {
    fn states_max(self) -> usize {
        match self {
            Change::Table => MAX_REPLACED_TABLES,
            Change::Region => MAX_CHANGED_TABLES,
        }
    }
}

type Result<T> = std::result::Result<T, Error>;

fn refuse<T>(why: impl Into<String>) -> Result<T> {
    Err(Error::Refused(why.into()))
}

/// Converts an error of a vring to a refusal.
fn checked(index: u32, result: std::result::Result<(), String>) -> Result<()> {
    result.or_else(|why| refuse(format!("queue {index}: {why}")))
}

impl Session {
    pub(crate) fn new(
        device: Arc<dyn VirtioDevice>,
        pool: Arc<Pool>,
        on_broken: OnBroken,
        times: Arc<QueueTimes>,
        channel: Channel,
    ) -> Session {
        device.reset();
        let mut vrings = Vec::new();
        vrings.resize_with(usize::from(device.queue_count()), Vring::default);
        Session {
            resume: ResumeCheck::new(&*device),
            device,
            pool,
            on_broken,
            times,
            memory: Arc::new(MemoryTable::default()),
            replaced: Vec::new(),
            features: 0,
            vrings,
            inflight: None,
            created: None,
            log: MigrationLog::default(),
            channel,
            has_run: false,
            has_left: false,
        }
    }

    fn offered(&self) -> u64 {
        let packed = if self.device.packed() {
            F_RING_PACKED
        } else {
            0
        };
        self.device.features()
            | F_VERSION_1
            | F_PROTOCOL_FEATURES
            | F_LOG_ALL
            // For legacy drivers: QEMU allows them to accept it even if it is not offered here.
            | F_ANY_LAYOUT
            | F_EVENT_IDX
            | F_INDIRECT_DESC
            | packed
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        let count = self.vrings.len();
        if index as usize >= count {
            return refuse(format!(
                "there is no queue {index}: the device has {count} queues"
            ));
        }
        Ok(&mut self.vrings[index as usize])
    }

    /// Adds queues up to `count` for a driver that was offered more of them by an earlier device.
    fn allow_queues(&mut self, count: u16) {
        let count = usize::from(count.min(MAX_QUEUES));
        if count > self.vrings.len() {
            self.vrings.resize_with(count, Vring::default);
        }
    }

    /// Allows all queues that an earlier process may have offered: its session continues here.
    pub(crate) fn allow_earlier_queues(&mut self) {
        self.allow_queues(MAX_QUEUES);
    }

    /// Checks an in-flight region for a device of `count` queues.
    fn check_inflight(requested: Inflight, count: usize) -> Result<()> {
        let (queues, size) = (requested.num_queues, requested.queue_size);
        if usize::from(queues) > count || u32::from(size) > MAX_QUEUE_SIZE {
            return refuse(format!(
                "the in-flight region has {queues} queues of size {size}; the device has {count}, of at most {MAX_QUEUE_SIZE}"
            ));
        }
        Ok(())
    }

    fn worker(&self, index: u16) -> WorkerHandle {
        let export = self.device.name();
        match self.device.carries_data(index) {
            true => self.pool.select_worker_for(export),
            false => self.pool.control_for(export),
        }
    }

    fn start(&mut self, index: u32, kick: Option<OwnedFd>) -> Result<()> {
        let number = index as u16;
        let worker = self.worker(number);
        // Without protocol features there is no message to enable a ring: it is always enabled.
        let always_enabled = self.features & F_PROTOCOL_FEATURES == 0;
        let packed = self.is_packed();
        let region = self.inflight.as_ref();
        let inflight = match region.map_or(Ok(None), |region| region.part(number, packed)) {
            Ok(part) => part,
            Err(why) => return refuse(why),
        };
        let log = match self.log_of(index) {
            Ok(log) => log,
            Err(why) => return checked(index, Err(why)),
        };
        let context = Context {
            inflight,
            log,
            device: &self.device,
            features: self.features,
            memory: &self.memory,
            on_broken: &self.on_broken,
        };
        let vring = &mut self.vrings[index as usize];
        let resumes = || match region {
            // A front end keeps the region for a driver that continues. With a new region, the position and the descriptors of the ring
            // come from a driver that did not wait for the start of the ring, or from a virtual machine that has migrated to this socket.
            Some(region) if Some(region.id) == self.created => false,
            Some(region) => {
                vring.is_mid_ring(initial_base(packed))
                    || vring.is_used(&self.memory)
                    || region.has_requests(packed)
            }
            None => vring.is_mid_ring(initial_base(packed)) || vring.is_used(&self.memory),
        };
        if let Err(why) = self.resume.start(number, &*self.device, resumes) {
            return refuse(why);
        }
        vring.enabled |= always_enabled;
        let start = Instant::now();
        let started = vring.start(number, kick, &worker, context);
        if started.is_ok() {
            self.times.record(QueueTime::Start, start.elapsed());
        }
        self.has_run = true;
        checked(index, started)
    }

    /// Answers all requests of a ring before a message disables it, if writes are logged. Cloud Hypervisor then copies the last pages, and
    /// its destination starts the ring at the available index. Call only if the front end waits for the reply: QEMU sends
    /// `GET_VRING_BASE` next.
    ///
    /// # Errors
    /// Refuses the message if requests do not end in time, for example while `on_error=stop` holds them: the ring stays enabled. Ends the
    /// session if the log is incomplete.
    pub(crate) fn drain_before(&self, message: &Message) -> Result<()> {
        let Message::SetVringEnable(VringState { index, num: 0 }) = message else {
            return Ok(());
        };
        if self.features & F_LOG_ALL == 0 {
            return Ok(());
        }
        // An index that does not exist is refused later.
        let Some(vring) = self.vrings.get(*index as usize) else {
            return Ok(());
        };
        match vring.disable_when_idle(DISABLE_LIMIT) {
            Ok(true) => match self.log.fault() {
                // The front end would send its last pages without those that are not marked.
                Some(fault) => Err(Error::Failed(format!("queue {index}: {fault}"))),
                None => Ok(()),
            },
            Ok(false) => refuse(format!(
                "queue {index}: requests have not ended within {} s, the queue stays enabled",
                DISABLE_LIMIT.as_secs()
            )),
            Err(why) => checked(*index, Err(why)),
        }
    }

    /// Returns the dirty log of queue `index`, if writes are logged now.
    fn log_of(&self, index: u32) -> std::result::Result<Option<LogSetup>, String> {
        let is_logged = self.features & F_LOG_ALL != 0;
        let Some(pages) = self.log.pages.as_ref().filter(|_| is_logged) else {
            return Ok(None);
        };
        let vring = self.vrings.get(index as usize);
        Ok(Some(LogSetup {
            pages: pages.clone(),
            ring: vring.and_then(|vring| vring.log_address),
            call: clone_fd(self.log.call.as_ref())?,
        }))
    }

    /// Applies the log to a queue that runs. Its writes are marked from then on.
    fn apply_log(&mut self, index: u32) -> Result<()> {
        let applied = self.log_of(index).and_then(|log| {
            let vring = self.vrings.get(index as usize);
            vring.map_or(Ok(()), |vring| vring.change(QueueChange::Log(log)))
        });
        checked(index, applied)
    }

    /// Applies the log to all queues that run.
    fn apply_logs(&mut self) -> Result<()> {
        (0..self.vrings.len() as u32).try_for_each(|index| self.apply_log(index))
    }

    fn set_log_fd(&mut self, fd: OwnedFd) -> Result<()> {
        if let Err(why) = check_event("dirty log", Some(&fd)) {
            return refuse(why);
        }
        self.log.call = Some(fd);
        self.apply_logs()
    }

    fn is_packed(&self) -> bool {
        self.features & F_RING_PACKED != 0
    }

    /// Stops a ring that the front end sets up again without GET_VRING_BASE, for example after RESET_OWNER. Requests in flight are
    /// answered. The next SET_VRING_KICK starts the new ring.
    fn stop_for_setup(&mut self, index: u32) -> Result<()> {
        let (device, times) = (self.device.clone(), self.times.clone());
        let vring = self.vring(index)?;
        if vring.stop(index as u16, &device, &times).is_some() {
            self.reset_unused(index as u16);
        }
        Ok(())
    }

    /// Resets the in-flight part of a stopped queue: the front end has its position or sends a new one, and may change the ring layout.
    fn reset_unused(&self, index: u16) {
        if let Some(region) = &self.inflight {
            region.reset_unused(index, self.is_packed());
        }
    }

    fn replace_memory(&mut self, memory: MemoryTable, change: Change) -> Result<()> {
        self.replaced.retain(|(table, _)| table.strong_count() > 0);
        let same_kind = self.replaced.iter().filter(|(_, other)| *other == change);
        let (count, limit) = (same_kind.count(), change.states_max());
        if count == limit {
            return refuse(format!(
                "cannot change the memory: requests in flight use {limit} earlier memory tables"
            ));
        }
        let mappings = self.old_mappings(&memory);
        if mappings > MAX_OLD_MAPPINGS {
            return refuse(format!(
                "cannot change the memory: requests in flight use {mappings} replaced regions"
            ));
        }
        // Kept until no queue uses it: unmapping a large guest takes long and must not happen on a worker.
        let old = std::mem::replace(&mut self.memory, Arc::new(memory));
        self.replaced.push((Arc::downgrade(&old), change));
        for index in 0..self.vrings.len() {
            let changed = self.vrings[index].change(QueueChange::Memory(self.memory.clone()));
            // Other queues already use the new memory, so the change cannot be undone.
            checked(index as u32, changed).map_err(|error| Error::Failed(error.to_string()))?;
        }
        Ok(())
    }

    /// Returns the number of mappings of old tables that `memory` does not have.
    fn old_mappings(&self, memory: &MemoryTable) -> usize {
        if self.replaced.is_empty() {
            return 0;
        }
        let mut old = HashSet::new();
        for table in self
            .replaced
            .iter()
            .filter_map(|(table, _)| table.upgrade())
        {
            old.extend(table.mappings());
        }
        for mapping in memory.mappings() {
            old.remove(&mapping);
        }
        old.len()
    }

    pub(crate) fn runs(&self) -> bool {
        self.vrings.iter().any(Vring::is_running)
    }

    /// Stops all rings for another process. Returns the positions of the rings that have run. Failed requests stay in the in-flight region,
    /// if there is one.
    pub(crate) fn hand_over(&mut self) -> BTreeMap<u32, u32> {
        let mut bases = BTreeMap::new();
        let retains_failed = self.inflight.is_some();
        for (index, vring) in self.vrings.iter_mut().enumerate() {
            let number = index as u16;
            vring.stop_for_handover(number, &self.device, &self.times, retains_failed);
            bases.extend(vring.base.map(|base| (index as u32, base)));
        }
        bases
    }

    pub(crate) fn stop_vrings(&mut self) {
        for (index, vring) in self.vrings.iter_mut().enumerate() {
            vring.stop(index as u16, &self.device, &self.times);
        }
    }

    /// Stops and disables the rings. Keeps data that the front end sends once per connection: memory, channel, descriptors. Also keeps the
    /// features, for front ends that do not send them again.
    fn reset(&mut self) {
        self.stop_vrings();
        if let Some(region) = &self.inflight {
            let queues = 0..self.vrings.len() as u16;
            queues.for_each(|index| region.empty(index, self.is_packed()));
        }
        self.vrings.iter_mut().for_each(Vring::reset);
        self.device.reset();
        self.device.forget_driver();
    }
}

/// At every end of a session, also by a panic, its requests are drained and its queues removed.
impl Drop for Session {
    fn drop(&mut self) {
        let driver_is_gone = self.has_left && self.has_run && !self.runs();
        for (index, vring) in self.vrings.iter_mut().enumerate() {
            vring.stop_retaining_failed(index as u16, &self.device, &self.times);
        }
        // Releases the front end's state, for example reservations of its nexus.
        self.device.reset();
        if driver_is_gone {
            self.device.forget_driver();
            self.device.forget_config();
        }
    }
}

/// Returns the start position of an unused ring.
fn initial_base(packed: bool) -> u32 {
    match packed {
        true => PACKED_START,
        false => 0,
    }
}

fn region(region: &MemoryRegion) -> RegionSpec {
    RegionSpec {
        guest_address: region.guest_address,
        size: region.size,
        user_address: region.user_address,
        file_offset: region.mmap_offset,
    }
}

/// Duplicates a descriptor of a message: the message stays in the record.
fn clone(fd: &OwnedFd) -> Result<OwnedFd> {
    fd.try_clone()
        .or_else(|error| refuse(format!("cannot duplicate a descriptor: {error}")))
}

/// Messages of the front end.
impl Session {
    /// Executes a message. Returns its reply, if it has one of its own.
    ///
    /// # Errors
    /// Fails if the message is refused or the session has to end.
    pub(crate) fn handle(&mut self, message: &Message) -> Result<Option<Reply>> {
        Ok(Some(match message {
            Message::GetFeatures => Reply::U64(self.offered()),
            Message::GetProtocolFeatures => Reply::U64(self.offered_protocol_features()),
            Message::GetQueueNum => Reply::U64(self.vrings.len() as u64),
            Message::GetMaxMemSlots => Reply::U64(MAX_MEMORY_REGIONS),
            Message::GetVringBase(state) => Reply::VringState(self.get_vring_base(state.index)?),
            Message::GetConfig(config) => Reply::Config(self.get_config(config)?),
            Message::GetInflightFd(inflight) => self.get_inflight_fd(*inflight)?,
            Message::SetLogBase(log, fd) => {
                self.set_log_base(log, fd)?;
                Reply::Log(*log)
            }
            message => {
                self.set(message)?;
                return Ok(None);
            }
        }))
    }

    /// Executes a message without a reply.
    fn set(&mut self, message: &Message) -> Result<()> {
        let fd = |fd: &Option<OwnedFd>| fd.as_ref().map(clone).transpose();
        match message {
            // "It is recommended that back-ends either ignore this message, or use it to disable all rings". Front ends expect one or the
            // other; dropping the connection's state would break both.
            Message::ResetOwner | Message::SetOwner => Ok(()),
            Message::ResetDevice => {
                self.reset();
                Ok(())
            }
            Message::SetFeatures(features) => self.set_features(*features),
            Message::SetProtocolFeatures(features) => {
                match features & !self.offered_protocol_features() {
                    0 => Ok(()),
                    unknown => refuse(format!(
                        "protocol feature bits {unknown:#x} were never offered"
                    )),
                }
            }
            Message::SetMemTable(regions) => self.set_mem_table(regions),
            Message::AddMemReg(region, fd) => self.add_mem_reg(region, fd),
            Message::RemMemReg(region) => self.rem_mem_reg(region),
            Message::SetLogFd(fd) => self.set_log_fd(clone(fd)?),
            Message::SetVringNum(state) => self.set_vring_num(state.index, state.num),
            Message::SetVringAddr(addresses) => self.set_vring_addr(addresses),
            Message::SetVringBase(state) => self.set_vring_base(state.index, state.num),
            Message::SetVringKick(index, kick) => self.set_vring_kick(*index, fd(kick)?),
            Message::SetVringCall(index, call) => {
                let (index, call) = (u32::from(*index), fd(call)?);
                checked(index, self.vring(index)?.set_call(call))
            }
            Message::SetVringErr(index, error) => {
                let (index, error) = (u32::from(*index), fd(error)?);
                checked(index, self.vring(index)?.set_error(error))
            }
            // The number is a truth value, and no feature is required.
            Message::SetVringEnable(VringState { index, num }) => {
                checked(*index, self.vring(*index)?.set_enabled(*num != 0))
            }
            Message::SetBackendReqFd(fd) => self.set_backend_req_fd(fd),
            Message::SetConfig(config) => {
                let written = self.device.write_config(config.offset, &config.region);
                written.or_else(|error| refuse(error.to_string()))
            }
            Message::SetInflightFd(inflight, fd) => self.set_inflight_fd(*inflight, fd),
            // Answered by `handle`.
            Message::GetFeatures
            | Message::GetProtocolFeatures
            | Message::GetQueueNum
            | Message::GetMaxMemSlots
            | Message::GetVringBase(_)
            | Message::GetConfig(_)
            | Message::GetInflightFd(_)
            | Message::SetLogBase(..) => Ok(()),
        }
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let lost = features & !self.offered();
        let unknown = lost & !self.device.known_features();
        if unknown != 0 {
            return refuse(format!("feature bits {unknown:#x} were never offered"));
        }
        if lost != 0
            && let Some(suppressed) = LOST_LOG.pass()
        {
            let export = self.device.name();
            let features = format_args!("{lost:#x}");
            tracing::warn!(
                export,
                features,
                suppressed,
                "driver negotiated features that the device no longer offers, requests that need them fail"
            );
        }
        let changed = self.features ^ features;
        self.features = features;
        self.allow_queues(self.device.queue_limit(features));
        // QEMU changes this feature of running queues at the start and at the end of a migration.
        match changed & F_LOG_ALL {
            0 => Ok(()),
            _ => self.apply_logs(),
        }
    }

    fn set_mem_table(&mut self, regions: &[(MemoryRegion, OwnedFd)]) -> Result<()> {
        let mut table = MemoryTable::default();
        for (spec, file) in regions {
            table = match table.with_region(region(spec), file.as_fd()) {
                Ok(table) => table,
                Err(error) => return refuse(error.to_string()),
            };
        }
        self.replace_memory(table, Change::Table)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        if num == 0 || num > MAX_QUEUE_SIZE {
            return refuse(format!(
                "queue {index}: size {num} is not from 1 to {MAX_QUEUE_SIZE}"
            ));
        }
        self.vring(index)?.size = num as u16;
        Ok(())
    }

    fn set_vring_addr(&mut self, message: &VringAddr) -> Result<()> {
        let index = message.index;
        let addresses = UserAddresses {
            descriptor: message.descriptor,
            available: message.available,
            used: message.used,
        };
        if self.vring(index)?.addresses != Some(addresses) {
            self.stop_for_setup(index)?;
        }
        let is_logged = message.flags & VringAddr::F_LOG != 0;
        let log_address = is_logged.then_some(message.log);
        let vring = self.vring(index)?;
        vring.addresses = Some(addresses);
        match std::mem::replace(&mut vring.log_address, log_address) == log_address {
            true => Ok(()),
            false => self.apply_log(index),
        }
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.stop_for_setup(index)?;
        self.vring(index)?.base = Some(base);
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VringState> {
        let (device, times) = (self.device.clone(), self.times.clone());
        let start = initial_base(self.is_packed());
        let vring = self.vring(index)?;
        // A ring that never ran is at its configured start.
        let base = vring
            .stop(index as u16, &device, &times)
            .or(vring.base)
            .unwrap_or(start);
        self.reset_unused(index as u16);
        let is_logged = self.features & F_LOG_ALL != 0;
        if let Some(fault) = self.log.fault()
            && is_logged
        {
            // The front end would send its last pages without those that are not marked.
            return refuse(format!("queue {index}: {fault}"));
        }
        Ok(VringState { index, num: base })
    }

    fn set_vring_kick(&mut self, index: u8, kick: Option<OwnedFd>) -> Result<()> {
        let index = u32::from(index);
        if self.vring(index)?.is_running() {
            let set = self.vrings[index as usize].set_kick(kick);
            return checked(index, set);
        }
        self.start(index, kick)
    }

    fn offered_protocol_features(&self) -> u64 {
        let mut offered = protocol_feature::MQ
            | protocol_feature::LOG_SHMFD
            | protocol_feature::REPLY_ACK
            | protocol_feature::BACKEND_REQ
            | protocol_feature::CONFIGURE_MEM_SLOTS
            | protocol_feature::RESET_DEVICE
            | protocol_feature::INFLIGHT_SHMFD;
        // A device without a configuration space leaves it to the front end.
        if !self.device.config().is_empty() {
            offered |= protocol_feature::CONFIG;
        }
        offered
    }

    /// Reads the configuration space. The reply to a range outside of it has no bytes; the session continues.
    fn get_config(&self, config: &Config) -> Result<Config> {
        let mut space = self.device.config();
        if space.is_empty() {
            return refuse("the device has no configuration space");
        }
        space.resize(CONFIG_SPACE.max(space.len()), 0);
        let start = config.offset as usize;
        let bytes = space.get(start..start.saturating_add(config.region.len()));
        Ok(Config {
            region: bytes.unwrap_or_default().to_vec(),
            ..*config
        })
    }

    /// Replaces the channel for requests of the back end.
    fn set_backend_req_fd(&mut self, fd: &OwnedFd) -> Result<()> {
        if sockopt::socket_domain(fd) != Ok(AddressFamily::UNIX)
            || sockopt::socket_type(fd) != Ok(SocketType::STREAM)
        {
            return refuse("its channel is not a Unix stream socket");
        }
        let channel = UnixStream::from(clone(fd)?);
        let mut current = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        let previous = current.replace(channel);
        // Closing the old channel may take long; other threads need the lock.
        drop(current);
        drop(previous);
        Ok(())
    }

    fn set_log_base(&mut self, log: &Log, file: &OwnedFd) -> Result<()> {
        let (offset, bytes) = (log.mmap_offset, log.mmap_size);
        let pages = match DirtyLog::map(file.as_fd(), offset, bytes) {
            Ok(pages) => Arc::new(pages),
            Err(error) => {
                return refuse(format!(
                    "cannot map the dirty log of {bytes} bytes at file offset {offset}: {error}"
                ));
            }
        };
        // Kept until no queue uses it: unmapping may take long and must not happen on a worker.
        let _old = self.log.pages.replace(pages);
        self.apply_logs()
    }

    fn get_inflight_fd(&mut self, requested: Inflight) -> Result<Reply> {
        Session::check_inflight(requested, self.vrings.len())?;
        let created = InflightRegion::create(requested.num_queues, requested.queue_size)
            .and_then(|(created, file)| Ok((created, RegionId::of(&file)?, file)));
        let (inflight, id, file) = created.or_else(refuse)?;
        self.created = Some(id);
        Ok(Reply::Inflight(inflight, Some(file)))
    }

    fn set_inflight_fd(&mut self, requested: Inflight, file: &OwnedFd) -> Result<()> {
        Session::check_inflight(requested, usize::from(MAX_QUEUES))?;
        if self.runs() {
            return refuse("the in-flight region changed while queues run");
        }
        let region = InflightRegion::map(&requested, file).or_else(refuse)?;
        self.inflight = Some(region);
        // An earlier device created the region for all its queues.
        self.allow_queues(requested.num_queues);
        Ok(())
    }

    fn add_mem_reg(&mut self, spec: &MemoryRegion, file: &OwnedFd) -> Result<()> {
        if self.memory.region_count() as u64 >= MAX_MEMORY_REGIONS {
            return refuse(format!("more than {MAX_MEMORY_REGIONS} memory regions"));
        }
        match self.memory.with_region(region(spec), file.as_fd()) {
            Ok(table) => self.replace_memory(table, Change::Region),
            Err(error) => refuse(error.to_string()),
        }
    }

    fn rem_mem_reg(&mut self, spec: &MemoryRegion) -> Result<()> {
        let (guest, user) = (spec.guest_address, spec.user_address);
        match self.memory.without_region(guest, user, spec.size) {
            Ok(table) => self.replace_memory(table, Change::Region),
            Err(error) => refuse(error.to_string()),
        }
    }
}
