//! A request queue: executes commands through the SCSI core and writes responses.
//!
//! Owned by one worker. Targets are found by index. The map of targets is reloaded when its generation changes, with one load per batch.
//! Disks are opened at first use on this worker. A plain READ or WRITE to a recently used unit takes the fast path, `Known`, without
//! look-ups; a test compares its plans with the general path. State that may change concurrently is checked once per batch in `Ready`: all
//! commands of the batch were there before.

mod slot;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::Disk;
use block::{IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use latency::{DiskNumber, Operation, UnitAddress};
use reactor::{DiskHandle, Io, Tag, WorkerHandle};
use scsi::{
    Command, DiskId, Nexus, PlainParameters, PlainUnit, TargetView, TaskAttribute, TaskTag,
};
use scsi_exec::{
    DiskHandles, Granted, Hold, TaskOrder, continue_in_background, execute, may_start, operation_of,
};
use virtio_device::{Answer, Job, Malformed, ParsedRequest, Protocol, Request, Step};
use virtqueue::ResponseSpace;

use crate::device::ControllerState;
use crate::pending::{Pending, Plain, SlowPath};
use crate::request::{self, Address, Header, PLAIN_SIZE, REQUEST_SIZE, RESPONSE_SIZE};
use crate::response::{answer_any, refuse};
use slot::CommandSlot;

/// A target in this queue's view.
struct Seen {
    view: TargetView,
    nexus: Arc<Nexus>,
    order: Arc<TaskOrder>,
}

/// A unit for plain commands, with all results of its look-up.
struct Known {
    /// The request's LUN field, as in memory.
    field: [u8; 8],
    unit: PlainUnit,
    order: Arc<TaskOrder>,
    disk: DiskHandle,
    number: DiskNumber,
}

/// Unit of the plain commands in this batch, and the plan for them.
struct Ready {
    field: [u8; 8],
    parameters: PlainParameters,
    disk: DiskHandle,
    number: DiskNumber,
}

impl Ready {
    /// A driver may send this LUN field, but the way is closed.
    const NO_UNIT: Ready = Ready {
        field: [0; 8],
        parameters: PlainParameters::CLOSED,
        disk: DiskHandle::NONE,
        number: DiskNumber::NONE,
    };

    #[inline(always)]
    fn job(&self, io: IoRequest) -> Job {
        let disk = self.disk;
        Job { disk, io }
    }
}

/// Number of cached units. With more units, some stay cached and the others are looked up each time.
const KNOWN: usize = 16;

/// Returns the cache index of a unit, from its target and the lower byte of its LUN.
#[inline(always)]
fn handle(field: &[u8; 8]) -> usize {
    usize::from(field[1] ^ field[3]) % KNOWN
}

/// The [`Protocol`] of a request queue.
pub(crate) struct RequestQueue {
    shared: Arc<ControllerState>,
    worker: WorkerHandle,
    generation: u64,
    targets: Vec<Option<Seen>>,
    known: [Option<Known>; KNOWN],
    /// Cache index of the last plain command's unit.
    last: usize,
    /// That unit, until the batch ends or a command that is not plain might change it.
    ready: Ready,
    /// Number of commands for units that are not cached (wraps).
    unknown: u8,
    disks: DiskHandles,
    /// Disk of the last parsed request, and whether it differs from the previous request's.
    last_disk: DiskNumber,
    disk_changed: bool,
    stopping: bool,
    /// Holds of task management functions that wait until the driver has seen responses.
    held_until_published: Vec<Hold>,
    /// Number of waits so far: for the turn of a command, the end of others, or a range.
    waits: u64,
}

impl RequestQueue {
    pub(crate) fn new(shared: Arc<ControllerState>, worker: WorkerHandle) -> RequestQueue {
        RequestQueue {
            shared,
            worker,
            generation: 0,
            targets: Vec::new(),
            known: [const { None }; KNOWN],
            last: 0,
            ready: Ready::NO_UNIT,
            unknown: 0,
            disks: DiskHandles::default(),
            last_disk: DiskNumber::NONE,
            disk_changed: false,
            stopping: false,
            held_until_published: Vec::new(),
            waits: 0,
        }
    }

    #[cold]
    fn release_holds(&mut self) {
        self.held_until_published.clear();
    }

    #[inline]
    fn target(&mut self, number: u8) -> Option<&mut Seen> {
        if self.shared.generation.load(Ordering::Acquire) != self.generation {
            self.refresh_targets();
        }
        self.targets.get_mut(usize::from(number))?.as_mut()
    }

    #[cold]
    fn refresh_targets(&mut self) {
        let (generation, targets) = self.shared.targets();
        self.generation = generation;
        self.forget();
        let units = self.shared.units.clone();
        self.targets.clear();
        self.targets.extend(targets.into_iter().map(|seen| {
            seen.map(|(target, nexus)| Seen {
                view: target.view(),
                order: units.order(&nexus),
                nexus,
            })
        }));
    }

    fn forget(&mut self) {
        self.known = [const { None }; KNOWN];
        self.ready = Ready::NO_UNIT;
    }

    /// Returns the SCSI core's tag of a request.
    pub(crate) fn task_tag(&self, key: Option<(u8, u16)>) -> Option<TaskTag> {
        let (target, lun) = key?;
        let seen = self.targets.get(usize::from(target))?.as_ref()?;
        let unit = seen.view.map().get(lun)?.id();
        Some(TaskTag {
            nexus: seen.nexus.id(),
            unit,
        })
    }

    /// Executes a request's steps until one has to wait.
    #[inline]
    fn execute(&mut self, io: &mut Io, request: &mut Request<Pending>) -> Step {
        execute(
            &mut CommandSlot {
                queue: self,
                request,
            },
            io,
        )
    }

    /// Continues a request that has waited, with the granted resource.
    fn grant(&mut self, io: &mut Io, request: &mut Request<Pending>, granted: Granted) -> Step {
        request.state.slow_path.task.grant(granted);
        match request.state.slow_path.parked.take() {
            Some(header) => {
                self.begin_command(io, request, &Header::parse(&header))
                    .step
            }
            None => self.execute(io, request),
        }
    }
}

/// Ends a command that does not reach the core.
fn end_with(pending: &mut Pending, code: u8) -> ParsedRequest {
    pending.slow_path.code = code;
    ParsedRequest {
        step: Step::Answer,
        operation: Operation::Other,
        bytes: 0,
    }
}

impl Protocol for RequestQueue {
    type State = Pending;

    const MULTIPLE_DISKS: bool = true;
    const SEPARATE_RESPONSE: bool = true;

    fn disk_number(&self, request: &Request<Pending>) -> DiskNumber {
        request.state.disk
    }

    #[inline(always)]
    fn disk_changed(&mut self) -> bool {
        std::mem::take(&mut self.disk_changed)
    }

    fn forget_disk(&mut self) {
        self.disk_changed = true;
    }

    fn disk_name(&self, number: DiskNumber) -> Option<String> {
        let disk = self.shared.units.disk(DiskId(number.0))?;
        Some(disk.name().to_owned())
    }

    #[inline(always)]
    fn parse(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        tag: Tag,
    ) -> Result<ParsedRequest, Malformed> {
        match self.parse_plain(request) {
            Some(start) => Ok(start),
            None => self.parse_general(io, request, tag),
        }
    }

    #[inline(always)]
    fn refresh(&mut self) {
        if self.shared.generation.load(Ordering::Acquire) != self.generation {
            self.refresh_targets();
        }
        self.refresh_ready_unit();
    }

    #[inline(never)]
    fn resume(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        outcome: IoOutcome,
        scratch: Option<IoBuffer>,
    ) -> Step {
        let pending = &mut request.state;
        if outcome.is_ok()
            && pending.slow_path.aborted.is_none()
            && (pending.end_plain() || pending.slow_path.task.end_direct())
        {
            return Step::Answer;
        }
        self.resume_slow_path(io, request, outcome, scratch)
    }

    #[inline(always)]
    fn resume_data(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        outcome: IoOutcome,
    ) -> Step {
        let pending = &mut request.state;
        if outcome.is_ok() && pending.end_plain() {
            return Step::Answer;
        }
        self.resume(io, request, outcome, None)
    }

    fn detach(&mut self, request: &mut Request<Pending>) {
        let mut task = request.state.slow_path.task.detach();
        task.continue_detached();
        continue_in_background(&self.worker, &self.shared.units, task);
    }

    fn unit(&self, request: &Request<Self::State>) -> Option<UnitAddress> {
        let (target, lun) = request.state.key()?;
        Some(UnitAddress { target, lun })
    }

    fn stop(&mut self) {
        self.stopping = true;
    }

    #[inline(always)]
    fn answer(&mut self, request: &mut Request<Pending>) -> Answer {
        let (chain, pending) = (&request.chain, &mut request.state);
        if pending.take_good() {
            const HEADER: usize = request::RESPONSE_HEADER_SIZE;
            chain
                .buffer
                .clear_second_half::<HEADER>(chain.readable as usize);
            return Answer {
                written: RESPONSE_SIZE as u32 + pending.data_in,
                good: true,
            };
        }
        answer_any(chain, pending, &mut self.held_until_published)
    }

    fn refuse(&mut self, request: &mut Request<Pending>, space: ResponseSpace) -> u32 {
        refuse(&request.chain, space)
    }

    #[inline(always)]
    fn answers_published(&mut self) {
        if !self.held_until_published.is_empty() {
            self.release_holds();
        }
    }

    fn close_disk(&mut self, io: &mut Io, disk: &Arc<Disk>) {
        self.forget();
        self.disks.close_disk(io, disk);
    }

    fn close(&mut self, io: &mut Io) {
        self.forget();
        self.disks.close(io);
    }
}

impl RequestQueue {
    /// Begins a plain READ or WRITE to a cached unit. Returns `None` for other commands, which it leaves unchanged.
    #[inline(always)]
    fn parse_plain(&mut self, request: &mut Request<Pending>) -> Option<ParsedRequest> {
        let (chain, pending) = (&mut request.chain, &mut request.state);
        if !matches!(pending.plain, Plain::Free) {
            return None;
        }
        let data_out = chain.readable.checked_sub(REQUEST_SIZE as u32)?;
        let data_in = chain.writable.checked_sub(RESPONSE_SIZE as u32)?;
        let bytes = chain.buffer.contiguous_front::<PLAIN_SIZE>()?;
        let header = request::PlainHeader::parse(&bytes)?;
        // Stored immediately to save a register. Other commands set it again.
        (pending.field, pending.id) = (header.lun, header.id);
        if header.lun != self.ready.field && !self.turn_to(header.lun) {
            return None;
        }
        let ready = &self.ready;
        let io = ready
            .parameters
            .begin(header.cdb, data_in.into(), data_out.into())?;
        // A transfer is far below 4 GiB, and the buffer has the same length.
        let bytes = io.request.length as u32;
        let (buffer, length) = (&mut chain.buffer, bytes as usize);
        // Each branch is complete, to save registers for common values.
        let operation = if io.request.kind == IoKind::Read {
            if chain.readable != REQUEST_SIZE as u32 {
                return None;
            }
            pending.start_plain(ready.number, io.end, bytes);
            request.job = ready.job(io.request);
            if !buffer.window_in_second_half(RESPONSE_SIZE, length) {
                buffer.set_window(chain.readable as usize + RESPONSE_SIZE, length);
            }
            Operation::Read
        } else {
            if chain.writable != RESPONSE_SIZE as u32 {
                return None;
            }
            pending.start_plain(ready.number, io.end, 0);
            request.job = ready.job(io.request);
            if !buffer.window_in_first_half(REQUEST_SIZE, length) {
                buffer.set_window(REQUEST_SIZE, length);
            }
            Operation::Write
        };
        Some(ParsedRequest {
            step: Step::Data,
            operation,
            bytes,
        })
    }

    /// Checks whether the unit of the last plain command has changed. Usually it has not.
    #[inline(always)]
    fn refresh_ready_unit(&mut self) {
        let same = self.open().is_some_and(|known| {
            known.field == self.ready.field && known.unit.is_still(&self.ready.parameters)
        });
        if !same {
            self.rebuild_ready_unit();
        }
    }

    #[inline(never)]
    fn rebuild_ready_unit(&mut self) {
        let ready = self.open().and_then(|known| {
            Some(Ready {
                field: known.field,
                parameters: known.unit.plain_parameters()?,
                disk: known.disk,
                number: known.number,
            })
        });
        self.ready = ready.unwrap_or(Ready::NO_UNIT);
    }

    /// Returns the unit of the last plain command, unless another disk or a task order intervenes.
    #[inline(always)]
    fn open(&self) -> Option<&Known> {
        let known = self.known[self.last % KNOWN].as_ref()?;
        let open = known.number == self.last_disk && known.order.is_free(TaskAttribute::Simple);
        open.then_some(known)
    }

    /// Selects another unit. Returns false if it is not cached or has no plain commands now. Takes `field` by value: a reference would
    /// force the header into memory.
    #[inline(never)]
    fn turn_to(&mut self, field: [u8; 8]) -> bool {
        self.last = handle(&field);
        let known = self.known[self.last].as_ref();
        let Some(known) = known.filter(|known| known.field == field) else {
            return false;
        };
        if known.number != self.last_disk {
            (self.last_disk, self.disk_changed) = (known.number, true);
        }
        self.refresh_ready_unit();
        self.ready.field == field
    }

    /// Begins any command. Reads its header from guest memory once; only this copy counts, whenever the command starts.
    #[inline(never)]
    fn parse_general(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        tag: Tag,
    ) -> Result<ParsedRequest, Malformed> {
        self.ready = Ready::NO_UNIT;
        let chain = &request.chain;
        if (chain.readable as usize) < REQUEST_SIZE {
            return Err(Malformed("incomplete request header"));
        }
        if (chain.writable as usize) < RESPONSE_SIZE {
            return Err(Malformed("no room for the response"));
        }
        Ok(self.parse_request(io, request, tag))
    }

    fn parse_request(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        tag: Tag,
    ) -> ParsedRequest {
        let (chain, pending) = (&mut request.chain, &mut request.state);
        let bytes = chain.buffer.front::<REQUEST_SIZE>();
        let header = Header::parse(&bytes);
        pending.plain = Plain::No;
        pending.field = *header.lun;
        pending.id = header.id;
        pending.slow_path.tag = Some(tag);
        (
            pending.slow_path.code,
            pending.data_in,
            pending.slow_path.aborted,
        ) = (request::S_OK, 0, None);
        pending.slow_path.data_in_room = chain.writable - RESPONSE_SIZE as u32;
        pending.disk = match header.address {
            Some(address) => self.number_at(&address),
            None => DiskNumber::NONE,
        };
        if pending.disk != self.last_disk {
            (self.last_disk, self.disk_changed) = (pending.disk, true);
        }
        // Bidirectional transfers need VIRTIO_SCSI_F_INOUT, which is not offered (5.6.6.1).
        if chain.readable > REQUEST_SIZE as u32 && pending.slow_path.data_in_room > 0 {
            return end_with(pending, request::S_FAILURE);
        }
        let seen = match header.address {
            Some(address) => self.target(address.target).map(|seen| (address, seen)),
            None => None,
        };
        let Some((address, seen)) = seen else {
            return end_with(pending, request::S_BAD_TARGET);
        };
        if !seen.order.is_free(header.attribute) {
            seen.view.refresh();
            let unit = seen.view.unit(address.lun).map(|unit| unit.id());
            let order = seen.order.clone();
            let command = &mut CommandSlot {
                queue: self,
                request,
            };
            // A command for a missing unit is in no task set.
            if unit.is_some_and(|unit| !may_start(command, &order, unit, header.attribute)) {
                request.state.slow_path.parked = Some(Box::new(bytes));
                return ParsedRequest {
                    step: Step::Wait,
                    operation: Operation::Other,
                    bytes: 0,
                };
            }
        }
        self.begin_command(io, request, &header)
    }

    /// Begins a command when its turn has come.
    fn begin_command(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        header: &Header<'_>,
    ) -> ParsedRequest {
        let (chain, pending) = (&request.chain, &mut request.state);
        let seen = match header.address {
            Some(address) => self.target(address.target).map(|seen| (address, seen)),
            None => None,
        };
        // The target may have been removed while the command waited.
        let Some((address, seen)) = seen else {
            return end_with(pending, request::S_BAD_TARGET);
        };
        seen.view.refresh();
        pending.slow_path.task.start(seen.view.begin(&Command {
            nexus: &seen.nexus,
            lun: address.lun,
            cdb: header.cdb,
            attribute: header.attribute,
            data_out_length: u64::from(chain.readable) - REQUEST_SIZE as u64,
            data_in_length: u64::from(pending.slow_path.data_in_room),
        }));
        let direct = pending.slow_path.task.next_io();
        let operation = operation_of(header.cdb[0], direct.as_ref().map(|(_, io)| io));
        let step = self.execute(io, request);
        let mut bytes = 0;
        if let Some((disk, asked)) = direct
            && asked.moves_data()
        {
            // A transfer is far below 4 GiB.
            bytes = asked.length as u32;
            if matches!(step, Step::Data) {
                self.cache_unit(header.lun, &address, request.job.disk, DiskNumber(disk.0));
            }
        }
        ParsedRequest {
            step,
            operation,
            bytes,
        }
    }

    fn number_at(&mut self, address: &Address) -> DiskNumber {
        let Some(seen) = self.target(address.target) else {
            return DiskNumber::NONE;
        };
        seen.view.refresh();
        let unit = seen.view.unit(address.lun);
        unit.map_or(DiskNumber::NONE, |unit| DiskNumber(unit.disk().0))
    }

    /// Caches the unit, so that its next plain command takes the fast path, if there is a free entry.
    fn cache_unit(
        &mut self,
        field: &[u8; 8],
        address: &Address,
        disk: DiskHandle,
        number: DiskNumber,
    ) {
        let known = &mut self.known[handle(field)];
        self.unknown = self.unknown.wrapping_add(1);
        let keep = known.as_ref().is_some_and(|known| known.unit.is_current());
        if keep && !self.unknown.is_multiple_of(KNOWN as u8) {
            return;
        }
        let seen = self.targets.get(usize::from(address.target));
        let Some(Some(seen)) = seen else { return };
        *known = seen
            .view
            .plain_unit(&seen.nexus, address.lun)
            .map(|unit| Known {
                field: *field,
                unit,
                order: seen.order.clone(),
                disk,
                number,
            });
    }

    #[inline(never)]
    fn resume_slow_path(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        outcome: IoOutcome,
        scratch: Option<IoBuffer>,
    ) -> Step {
        let pending = &mut request.state;
        pending.leave_fast_path();
        let slow_path = &mut *pending.slow_path;
        if (slow_path.aborted.is_some() || self.stopping) && slow_path.task.survives_abort() {
            return self.detach_task(slow_path, outcome);
        }
        if slow_path.aborted.is_some() {
            slow_path.task.abandon();
            return Step::Answer;
        }
        slow_path.task.resume(outcome, scratch);
        self.execute(io, request)
    }

    /// Detaches a task that cannot be aborted. It continues in the background; its command is answered as aborted.
    #[cold]
    fn detach_task(&mut self, slow_path: &mut SlowPath, outcome: IoOutcome) -> Step {
        let mut task = slow_path.task.detach();
        task.resume(outcome, None);
        continue_in_background(&self.worker, &self.shared.units, task);
        slow_path.aborted.get_or_insert(request::S_ABORTED);
        Step::Answer
    }
}
