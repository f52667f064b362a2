//! One TCP connection, owned by one worker: its parts, its start and its end.
//!
//! Stages: a receive completes (**noticed**), its bytes are split into PDUs (**popped**), commands are planned (**parsed**), **submitted**
//! and **reaped**. `publish` queues the responses (**answered**) and sends them as one message (**notified**). Nothing here blocks. A peer
//! that breaks the rules, is too slow or never reads loses its own connection only.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bdev::Disk;
use block::IoOutcome;
use guest_memory::IoBuffer;
use iscsi::login::{LoggedIn, Visitor};
use iscsi::session::SessionKind;
use latency::{Labels, QueueRecord, Stamp, Stamps};
use reactor::{Addressed, DiskHandle, Io, RateLimit, Source};
use request_engine::{BatchTransport, Link, Measurement, Pace, StreamTransport, Transport};
use scsi::{DiskId, Lun, Managed, NexusId, TaskManagementFunction};
use scsi_exec::{DiskHandles, Hold};
use uring::Completion;

use crate::lifecycle::{Attached, Drain, Lifecycle, Login, LoginStage};
use crate::management::{After, Management, hold, runner};
use crate::memory::{ConnectionMemory, MEMORY_CHECK, SessionMemory};
use crate::output::Output;
use crate::receive::Input;
use crate::shared::{ConnectionHandle, SharedServer};
use crate::slots::{SlotId, Slots};

// A host logs in and out with all its sessions at once, and each session is worth a log line. Any peer may reconnect endlessly.
static COMING_LOG: RateLimit = RateLimit::with_burst(Duration::from_millis(50), 64);
static LEAVING_LOG: RateLimit = RateLimit::with_burst(Duration::from_millis(50), 64);

/// Time limit of a requested logout in seconds.
const LOGOUT_SECONDS: u16 = 2;

/// Initial capacity of the timeline in requests in flight.
const TIMELINE_DEPTH: usize = 128;

/// Commands of a connection that do not wait for an I/O.
#[derive(Default)]
pub(crate) struct Schedule {
    /// Slots with a step that can be executed.
    pub batch: Vec<SlotId>,
    /// Slots with a complete response.
    pub done: Vec<SlotId>,
    /// Slots that wait for memory, with the bytes needed.
    pub starved: VecDeque<(SlotId, usize)>,
    /// Slots that have executed many steps in this iteration and yield to others.
    pub resting: Vec<SlotId>,
    /// Counts only I/O on scratch memory.
    pub pace: Pace,
}

/// A TCP connection, from its accept until its I/O has drained.
pub(crate) struct Connection {
    pub(crate) handle: ConnectionHandle,
    pub(crate) shared: Arc<SharedServer>,
    pub(crate) iscsi: iscsi::target::Connection,
    pub(crate) link: Link,
    pub(crate) input: Input,
    pub(crate) output: Output,
    pub(crate) memory: ConnectionMemory,
    pub(crate) slots: Slots,
    pub(crate) schedule: Schedule,
    pub(crate) disks: DiskHandles,
    pub(crate) login: Login,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) management: Management,
    pub(crate) drain: Drain,
    /// Records nothing until the login to a target.
    pub(crate) measurement: Measurement,
}

impl Connection {
    /// Creates the state of a connection that was just accepted.
    pub fn new(
        io: &mut Io,
        handle: ConnectionHandle,
        shared: Arc<SharedServer>,
        socket: OwnedFd,
        addresses: (SocketAddr, SocketAddr),
    ) -> Connection {
        let (initiator, portal) = addresses;
        let visitor = Visitor {
            address: initiator.to_string(),
            portal: portal.to_string(),
            ..Visitor::default()
        };
        let protocol = shared.limits.protocol.clone();
        let probe_id_base = probes::queue(handle.worker.index(), handle.source.index());
        let mut measurement = Measurement::new(Labels::default(), 0, probe_id_base);
        measurement.timeline.set_recording(false);
        let mut link = Link::new(io, handle.source, socket);
        link.moved = shared.seconds();
        let memory = SessionMemory::new(&shared.limits, Arc::default());
        Connection {
            iscsi: iscsi::target::Connection::new(shared.clone(), visitor, protocol),
            link,
            input: Input::new(),
            output: Output::default(),
            memory: ConnectionMemory::new(memory),
            slots: Slots::default(),
            schedule: Schedule::default(),
            disks: DiskHandles::default(),
            login: Login::new(shared.seconds()),
            lifecycle: Lifecycle::Open,
            management: Management::default(),
            drain: Drain::default(),
            measurement,
            handle,
            shared,
        }
    }

    pub fn number(&self) -> u64 {
        self.handle.number
    }

    pub fn shared(&self) -> &Arc<SharedServer> {
        &self.shared
    }

    /// Returns this connection's handle of a unit's disk.
    pub fn disk(&mut self, io: &mut Io, id: DiskId) -> Option<DiskHandle> {
        self.disks.get(io, &self.shared.units, id)
    }

    pub fn is_over(&self) -> bool {
        self.lifecycle.is_over()
    }

    pub fn nexus_id(&self) -> Option<NexusId> {
        self.login.session().map(|session| session.nexus.id())
    }

    pub fn logged_in(&mut self, io: &mut Io, login: &LoggedIn) {
        let key = login.connection;
        if !self.shared.logged_in(self.number(), login) {
            return self.end(io, "replaced during login");
        }
        self.login.stage = LoginStage::Discovery(key);
        let idle_time = self.shared.limits.idle_time.as_secs();
        self.shared.schedule_check(self.number(), idle_time);
        self.slots.set_tasks(self.iscsi.task_slots());
        self.login.recovers = self.iscsi.recovers();
        self.input.enlarge();
        // I/O of the replaced connections must finish before this connection's I/O, and before the initiator sees that the session is new
        // (RFC 7143, 6.3.5): the initiator may then let other hosts continue.
        let wait = hold(&self.handle, After::Login);
        self.login.waits = true;
        for old in &login.displaced {
            self.shared.drop_connection(*old, Some(wait.clone()));
        }
        let identity = &login.session.identity;
        if let Some(suppressed) = COMING_LOG.pass() {
            tracing::info!(
                target = identity.target_name.as_deref().unwrap_or("(discovery)"),
                initiator = identity.initiator_name,
                address = self.iscsi.visitor().address,
                connection = key.cid,
                suppressed,
                "logged in"
            );
        }
        if identity.kind == SessionKind::Discovery {
            return;
        }
        let Some(found) = self.shared.nexus(key.tsih) else {
            return self.end(io, "session has ended");
        };
        let (in_flight, older) = self.shared.begins(&found, key.tsih, self.handle.clone());
        for old in older {
            old.keep(wait.clone());
        }
        self.drain.in_flight = Some(in_flight);
        let labels = Labels {
            export: found.target.options.name.clone(),
            disk: crate::shared::lock(&found.target.label).clone(),
            // Statistics show all connections of a target on one worker as one queue.
            queue: self.handle.worker.index(),
            worker: self.handle.worker.index(),
        };
        let runners = self.shared.units.runners();
        self.drain.registration = Some(runners.register(runner(self.handle.clone())));
        let probe_id_base = self.measurement.probe_id_base;
        let mut measurement = Measurement::new(labels, TIMELINE_DEPTH, probe_id_base);
        measurement.noticed = self.measurement.noticed;
        measurement.timeline.set_recording(io.is_recording());
        let record = measurement.timeline.record().clone();
        self.measurement = measurement;
        io.register(record.clone());
        self.shared
            .tallies
            .connected(key.tsih, self.number(), record);
        self.memory.count_in(found.memory);
        let session = Attached {
            view: found.target.scsi.view(),
            target: found.target,
            order: self.shared.units.order(&found.nexus),
            nexus: found.nexus,
            read_only: found.read_only,
        };
        self.login.stage = LoginStage::Target(key, session);
    }

    fn log_end(&self, why: &str) {
        let visitor = self.iscsi.visitor();
        let Some(key) = self.login.key() else {
            tracing::debug!(address = visitor.address, "connection ended: {why}");
            return;
        };
        if let Some(suppressed) = LEAVING_LOG.pass() {
            tracing::info!(
                target = visitor.target_name.as_deref().unwrap_or("(discovery)"),
                initiator = visitor.initiator_name,
                address = visitor.address,
                connection = key.cid,
                suppressed,
                "connection ended: {why}"
            );
        }
    }

    /// Returns true if a unit attention is pending.
    pub fn waiting_attention(&self, lun: Lun) -> bool {
        self.login.session().is_some_and(|session| {
            let waiting = session.view.query_asynchronous_event(&session.nexus, lun);
            waiting.is_some()
        })
    }

    /// Passes a task management function to the core.
    pub fn managed(&mut self, lun: Lun, function: TaskManagementFunction) -> Option<Managed> {
        let session = self.login.session_mut()?;
        session.view.refresh();
        Some(session.view.manage(&session.nexus, lun, function))
    }

    /// TARGET COLD RESET ends every session of the target (RFC 7143, 11.5.1). This session ends after its response was sent.
    pub fn drop_target_sessions(&mut self) {
        let Some(session) = self.login.session() else {
            return;
        };
        let name = &session.target.options.name;
        let own = self.login.key().map(|key| key.tsih);
        for other in self.shared.sessions.sessions() {
            if other.identity.target_name.as_ref() == Some(name) && Some(other.tsih) != own {
                for key in other.connections() {
                    self.shared.dismiss_connection(key, None);
                }
            }
        }
        self.iscsi.mark_dismissed();
        self.lifecycle.close();
    }

    /// Asks the initiator to log out (RFC 7143, 11.9.1, event 1), and serves it until then. Drops it after a time-out or at the second
    /// call.
    pub fn request_logout(&mut self, io: &mut Io) {
        if self.is_over() {
            return;
        }
        if self.lifecycle != Lifecycle::Open || self.iscsi.request_logout(LOGOUT_SECONDS).is_err() {
            return self.dismiss(io, "session closed by the target");
        }
        // The coarse clock may tick immediately, so one second is added.
        let leaves_in = u64::from(LOGOUT_SECONDS) + 1;
        let until = self.shared.seconds() + leaves_in;
        self.lifecycle = Lifecycle::LogoutRequested { until };
        self.shared.schedule_check(self.number(), leaves_in);
    }

    /// Ends the connection on the target's initiative. Announces this to an initiator that reads its data.
    pub fn dismiss(&mut self, io: &mut Io, why: &str) {
        if self.lifecycle.is_closing() {
            return;
        }
        self.iscsi.mark_dismissed();
        // A message in flight might never be received. The connection does not wait for it.
        if self.lifecycle.is_ended()
            || self.output.queue.is_sending()
            || self.iscsi.announce_drop().is_err()
        {
            return self.end(io, why);
        }
        self.lifecycle.close();
    }

    /// Ends the connection; another one of the session takes its tasks.
    pub fn end_for_recovery(&mut self, io: &mut Io) {
        self.end(io, "removed for recovery");
    }

    /// Ends the connection; another one of the session has logged it out.
    pub fn end_logged_out(&mut self, io: &mut Io) {
        self.iscsi.mark_logged_out();
        self.end(io, "logged out by another connection");
    }

    /// Ends the connection: nothing more is received or sent. I/O in flight drains.
    pub fn end(&mut self, io: &mut Io, why: &str) {
        if !self.lifecycle.end() {
            return;
        }
        self.log_end(why);
        // Nothing is sent on this connection any more.
        self.management.fences.clear();
        // Completes receives and sends in flight. A socket that is already disconnected has none.
        self.link.socket.shut_down();
        if self.iscsi.recovers() {
            self.detach_commands(io);
        } else {
            let used: Vec<u32> = self.slots.used().collect();
            for index in used {
                self.abort_slot(io, index, None);
            }
        }
        let key = self.login.key();
        if let Some(key) = key {
            self.shared.tallies.disconnected(key.tsih, self.number());
        }
        // Done before the session is removed, so that the next session finds the entry.
        if let Some(in_flight) = &self.drain.in_flight {
            in_flight.ended();
        }
        let closed = self.iscsi.close();
        // An initiator that has requested the end of the session is not notified.
        let asked_for = self.iscsi.logout_reason().is_some();
        for key in closed.drop {
            if asked_for {
                self.shared.drop_connection(key, None);
            } else {
                self.shared.dismiss_connection(key, None);
            }
        }
        if let Some(key) = key {
            for cid in closed.wake {
                self.shared.wake(key.tsih, cid);
            }
        }
        self.shared.forget(self.number(), key);
        self.handle.stop();
    }

    /// Handles an expired deadline: pings or ends an idle connection, and sets the next deadline.
    pub fn check_deadlines(&mut self, io: &mut Io) {
        if self.lifecycle.is_ended() {
            return;
        }
        let limits = &self.shared.limits;
        let [login_time, idle_time, silent_time] =
            [limits.login_time, limits.idle_time, limits.silent_time].map(|time| time.as_secs());
        let now = self.shared.seconds();
        if let LoginStage::Before { accepted } = self.login.stage {
            let logs_in_for = now.saturating_sub(accepted);
            if logs_in_for >= login_time {
                return self.end(io, "login timed out");
            }
            return self
                .shared
                .schedule_check(self.number(), login_time - logs_in_for);
        }
        if let Lifecycle::LogoutRequested { until } = self.lifecycle
            && now >= until
        {
            let address = &self.iscsi.visitor().address;
            tracing::info!(address, "initiator did not log out as requested");
            self.dismiss(io, "logout timed out");
        }
        let quiet = now.saturating_sub(self.link.moved);
        let mut next = idle_time.saturating_sub(quiet);
        if self.owes() {
            if quiet >= silent_time {
                return self.end(io, "no response from the initiator within the time limit");
            }
            // The initiator may catch up at any time, and is idle from then on.
            next = idle_time.min(silent_time - quiet);
        } else if quiet >= idle_time {
            self.iscsi.ping();
            self.memory.buffers.trim();
            next = idle_time.min(silent_time.saturating_sub(quiet));
        }
        if let Lifecycle::LogoutRequested { until } = self.lifecycle {
            next = next.min(until.saturating_sub(now));
        }
        if self.memory.buffers.is_waiting() {
            // Tries again after this message.
            next = next.min(MEMORY_CHECK);
        }
        self.shared.schedule_check(self.number(), next);
    }

    /// Returns true if the initiator has to read output or answer a ping.
    fn owes(&self) -> bool {
        self.iscsi.pings_outstanding() > 0 || self.output.queue.is_sending()
    }

    /// Ends a connection that is not logged in to a target, in favour of newer ones. Discovery sessions count as not logged in: every peer
    /// can open one.
    pub fn end_unless_logged_in(&mut self, io: &mut Io) {
        if self.login.session().is_none() {
            self.end(io, "closed: too many connections have not logged in");
        }
    }

    /// Ends a login to a target that is being removed. A new target of that name may require another authentication.
    pub fn end_login_to(&mut self, io: &mut Io, target: &str, hold: Hold) {
        let wanted = self.iscsi.visitor().target_name.as_deref();
        let is_this = wanted.is_some_and(|wanted| iscsi_name::is_same(wanted, target));
        if self.login.session().is_none() && is_this {
            self.drain.holds.push(hold);
            self.end(io, "target was removed during login");
        }
    }

    /// Sends queued output. Ends a closing connection when all is sent.
    fn flush(&mut self, io: &mut Io) {
        if !self.login.waits
            && let Some(message) = self
                .output
                .next(self.iscsi.outgoing(), &mut self.memory.buffers)
        {
            let is_urgent = self.lifecycle.is_closing()
                || !self.schedule.starved.is_empty()
                || !self.output.has_no_waiters();
            let output_max = self.shared.limits.output_bytes;
            self.send_message(io, message, is_urgent, output_max);
        }
        if self.lifecycle.is_closing() && !self.output.queue.is_sending() {
            self.end(io, "over");
        }
    }
}

impl Addressed for Connection {
    fn handle(&self) -> &ConnectionHandle {
        &self.handle
    }
}

impl Transport for Connection {
    #[inline(always)]
    fn measurement(&mut self) -> &mut Measurement {
        &mut self.measurement
    }

    fn requests(&self) -> usize {
        self.slots.busy()
    }

    fn parse(&mut self, io: &mut Io) {
        self.consume(io);
    }

    fn submit(&mut self, io: &mut Io, stamps: Stamps) {
        self.submit_batch(io, Some(stamps));
    }

    fn answer(&mut self, io: &mut Io) -> bool {
        if !self.lifecycle.is_ended() {
            self.answer_all(io);
        }
        true
    }

    fn notify(&mut self, io: &mut Io, _is_needed: bool) -> bool {
        if !self.lifecycle.is_ended() {
            self.flush(io);
            self.receive_more(io);
        }
        true
    }
}

impl Source for Connection {
    fn is_polled(&self) -> bool {
        false
    }

    fn completed(&mut self, io: &mut Io, completion: Completion, noticed: Stamp) {
        self.measurement.noticed = noticed;
        if let Some(completion) = self.stream_completed(io, completion, noticed) {
            self.received_data(io, completion, noticed);
        }
    }

    fn finish(
        &mut self,
        io: &mut Io,
        slot: u32,
        buffer: IoBuffer,
        outcome: IoOutcome,
        reaped: Stamp,
    ) {
        self.measurement.reaped = reaped;
        self.io_done(io, slot, buffer, outcome);
    }

    fn publish(&mut self, io: &mut Io) {
        self.schedule.pace = Pace::default();
        self.publish_responses(io);
    }

    fn return_borrowed(&mut self, io: &mut Io, held: &[Range<usize>]) -> bool {
        self.copy_borrowed(io, held)
    }

    fn in_flight(&self) -> usize {
        self.link.operations + self.slots.busy() + self.schedule.resting.len()
    }

    fn stop(&mut self) {
        self.lifecycle.end();
        self.link.socket.shut_down();
    }

    fn close_disk(&mut self, io: &mut Io, disk: &Arc<Disk>) {
        self.disks.close_disk(io, disk);
    }

    fn closed(&mut self, io: &mut Io) {
        // Ends commands that wait for an event of this connection.
        let used: Vec<u32> = self.slots.used().collect();
        used.into_iter().for_each(|index| self.lose_answer(index));
        self.disks.close(io);
        self.unwatch(io);
        io.disown(self.link.owner);
        self.drain = Drain::default();
    }

    fn record(&self) -> Option<Arc<QueueRecord>> {
        let is_registered = self.login.session().is_some();
        is_registered.then(|| self.measurement.timeline.record().clone())
    }
}
