//! One connection in the transmission phase, owned by one worker: its parts, its start and its end.
//!
//! Stages: a receive completes (**noticed**), its bytes are split into requests (**popped**), these are checked (**parsed**), **submitted**
//! and **reaped**. `publish` queues the replies (**answered**) and sends them as one message (**notified**). Nothing here blocks.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bdev::Disk;
use block::{Capacity, IoOutcome};
use guest_memory::IoBuffer;
use latency::{Labels, QueueRecord, Stamp, Stamps};
use nbd::Violation;
use nbd::handshake::Session;
use nbd::request::Rules;
use reactor::{Addressed, DiskHandle, Io, PeerRateLimit, RateLimit, Source};
use request_engine::{
    BatchTransport, Buffers, Link, Measurement, StreamTransport, Transport, token,
};
use uring::Completion;

use crate::encryption::Encryption;
use crate::export::Export;
use crate::lifecycle::Lifecycle;
use crate::output::Output;
use crate::progress::{Progress, Slow};
use crate::receive::Input;
use crate::shared::{Admitted, ConnectionHandle, SharedServer, peer_log};
use crate::slots::{Slots, Stage};

// A client may open many connections at once, and each is worth a log line. Any peer may reconnect endlessly.
static SESSION_LOG: PeerRateLimit = PeerRateLimit::new(
    Duration::from_millis(100),
    64,
    RateLimit::with_burst(Duration::from_millis(50), 256),
);

/// Limit of log lines about clients that are dropped because others need their memory.
static SHORTAGE_LOG: PeerRateLimit = peer_log();

/// Initial capacity of the timeline in requests in flight.
const TIMELINE_DEPTH: usize = 128;

/// Parts of a connection that begins.
pub(crate) struct Parts {
    pub handle: ConnectionHandle,
    pub shared: Arc<SharedServer>,
    pub socket: OwnedFd,
    /// Address of the client.
    pub client: String,
    pub admitted: Admitted,
    pub encryption: Option<tls::Session>,
    pub session: Session<Arc<Export>>,
    /// Bytes that arrived after the handshake.
    pub input: Vec<u8>,
}

/// The client and the export that it has opened.
pub(crate) struct Peer {
    pub shared: Arc<SharedServer>,
    pub export: Arc<Export>,
    /// Address of the client.
    pub client: String,
    /// Counts the client until the connection has drained.
    admitted: Option<Admitted>,
    pub rules: Rules,
    /// IDs of the selected metadata contexts.
    pub contexts: Vec<u32>,
}

/// The disk of the export, as opened on the worker.
pub(crate) struct OpenDisk {
    pub handle: DiskHandle,
    /// Size of the disk.
    pub capacity: Arc<Capacity>,
}

/// Requests that do not wait for an I/O.
#[derive(Default)]
pub(crate) struct Schedule {
    /// Slots with a request that can be submitted.
    pub batch: Vec<u32>,
    /// Slots with a finished request.
    pub done: Vec<u32>,
    /// Slots with a block status that waits for a later iteration.
    pub resting: Vec<u32>,
    /// A block status was submitted in this iteration.
    pub has_examined: bool,
}

pub(crate) struct Connection {
    pub(crate) handle: ConnectionHandle,
    pub(crate) peer: Peer,
    pub(crate) disk: OpenDisk,
    pub(crate) link: Link,
    /// State of TLS; `None`: the connection is not encrypted.
    pub(crate) encryption: Option<Encryption>,
    pub(crate) input: Input,
    pub(crate) output: Output,
    pub(crate) buffers: Buffers<Connection>,
    pub(crate) slots: Slots,
    pub(crate) schedule: Schedule,
    pub(crate) lifecycle: Lifecycle,
    progress: Progress,
    pub(crate) measurement: Measurement,
}

impl Connection {
    pub fn new(io: &mut Io, parts: Parts) -> Connection {
        let Parts {
            handle,
            shared,
            socket,
            client,
            admitted,
            encryption,
            session,
            input,
        } = parts;
        let export = session.export;
        let worker = handle.worker.index();
        let labels = Labels {
            export: export.options.name.clone(),
            disk: export.disk.name().to_owned(),
            // Statistics show all connections of an export on one worker as one queue.
            queue: worker,
            worker,
        };
        let probe_id_base = probes::queue(worker, handle.source.index());
        if let Some(suppressed) = SESSION_LOG.pass(&client) {
            tracing::info!(
                export = export.options.name,
                client,
                suppressed,
                "NBD client connected"
            );
        }
        Connection {
            disk: OpenDisk {
                handle: io.open(&export.disk),
                capacity: export.disk.device().capacity().clone(),
            },
            link: Link::new(io, handle.source, socket),
            encryption: encryption.map(Encryption::from),
            input: Input::new(&input),
            output: Output::default(),
            buffers: Buffers::new(export.memory.clone()),
            slots: Slots::default(),
            schedule: Schedule::default(),
            lifecycle: Lifecycle::default(),
            progress: Progress::default(),
            measurement: Measurement::new(labels, TIMELINE_DEPTH, probe_id_base),
            handle,
            peer: Peer {
                rules: Rules {
                    style: session.style,
                    flags: session.info.flags,
                    minimum_block: session.info.block_sizes.minimum,
                    has_contexts: !session.contexts.is_empty(),
                },
                contexts: session.contexts,
                shared,
                export,
                client,
                admitted: Some(admitted),
            },
        }
    }

    pub fn number(&self) -> u64 {
        self.handle.number
    }

    pub fn record_of_requests(&self) -> Arc<QueueRecord> {
        self.measurement.timeline.record().clone()
    }

    /// Returns true if nothing more is received.
    pub fn is_over(&self) -> bool {
        self.lifecycle.is_over()
    }

    /// Ends the connection on the server's initiative, after requests in flight. `drained` is dropped when none is in flight.
    pub fn dismiss(&mut self, io: &mut Io, reason: &str, drained: mpsc::Sender<()>) {
        self.lifecycle.notify_drained(drained);
        self.end(io, reason);
    }

    /// Counts a violation of the protocol. The caller ends the connection.
    pub fn violated(&mut self, violation: &Violation) {
        self.measurement.timeline.counters().malformed.add(1);
        self.peer.shared.violated(&self.peer.client, violation);
    }

    /// Ends the connection: nothing more is received or sent. I/O in flight drains.
    pub fn end(&mut self, io: &mut Io, reason: &str) {
        if !self.lifecycle.end() {
            return;
        }
        if let Some(suppressed) = SESSION_LOG.pass(&self.peer.client) {
            tracing::info!(
                export = self.peer.export.options.name,
                client = self.peer.client,
                suppressed,
                "NBD connection ended: {reason}"
            );
        }
        // Completes receives and sends in flight. A socket that is already disconnected has none.
        self.link.socket.shut_down();
        if self.progress.has_timer {
            io.ring().cancel(self.link.owner, token::TIMER);
        }
        self.schedule.batch.clear();
        self.schedule.done.clear();
        self.schedule.resting.clear();
        for index in self.slots.used() {
            match self.slots.get(index).stage {
                // Released when the I/O has ended.
                Stage::Submitted | Stage::Flushing => {}
                Stage::Free | Stage::Receiving | Stage::Ready | Stage::Done(_) => {
                    self.release(index);
                }
            }
        }
        self.buffers.give_up();
        // Also ends I/Os that wait to be retried after an error of the disk.
        io.cancel_waiting(self.handle.source, |_| true);
        self.peer.shared.ended(self.number());
        self.handle.stop();
    }

    /// Sends queued output. Ends the connection after the last reply if the client has requested that.
    fn flush(&mut self, io: &mut Io) {
        let message = match &mut self.encryption {
            None => self.output.next(&mut self.buffers),
            Some(encryption) => match self.output.next_encrypted(&mut self.buffers, encryption) {
                Ok(message) => message,
                Err(error) => return self.end(io, &format!("TLS failed, {error}")),
            },
        };
        if let Some(message) = message {
            let output_max = self.peer.shared.limits.output_bytes;
            self.send_message(io, message, self.lifecycle.is_leaving(), output_max);
        }
        if self.lifecycle.is_leaving() && self.slots.busy() == 0 && self.output.unsent() == 0 {
            self.end(io, "closed by the client");
        }
    }

    /// Returns true if the client has to read output or to send the rest of a request, or if the connection waits for memory.
    fn needs_timer(&self) -> bool {
        self.output.queue.is_sending()
            || self.input.is_within_request()
            || self.input.waits_for_memory()
    }

    /// Starts the timer that ends the connection if the client does not continue.
    fn watch_progress(&mut self, io: &mut Io) {
        if !self.progress.has_timer && self.needs_timer() {
            self.progress.has_timer = true;
            self.link.operations += 1;
            let interval = Progress::interval(&self.peer.shared.limits);
            io.ring().timer(self.link.owner, token::TIMER, interval);
        }
    }

    fn timer_fired(&mut self, io: &mut Io) {
        let delays_others = self.buffers.delays_others();
        // The rest of a request is not received while the client does not read.
        let input = self.input.position().filter(|_| self.has_output_room());
        let transfers = [input, self.output.position()];
        let limits = &self.peer.shared.limits;
        let slow = self.progress.tick(limits, transfers, delays_others);
        if self.lifecycle.is_ended() {
            return;
        }
        if let Some(slow) = slow {
            self.measurement.timeline.counters().malformed.add(1);
            self.peer.too_slow(slow);
            return self.end(io, slow.reason());
        }
        if self.buffers.is_waiting() {
            self.peer.shared.reclaim_memory();
        }
    }
}

impl Peer {
    /// Logs a client that is dropped because it is too slow.
    fn too_slow(&self, slow: Slow) {
        if slow == Slow::Shortage
            && let Some(suppressed) = SHORTAGE_LOG.pass(&self.client)
        {
            tracing::warn!(
                export = self.export.options.name,
                client = self.client,
                suppressed,
                "NBD client disconnected: {}",
                slow.reason()
            );
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

    fn parse(&mut self, _io: &mut Io) {
        if !self.is_over() {
            self.input.violation = self.parse_requests().err();
        }
    }

    fn submit(&mut self, io: &mut Io, stamps: Stamps) {
        self.submit_batch(io, Some(stamps));
        if let Some(violation) = self.input.violation.take() {
            self.violated(&violation);
            self.end(io, "protocol violation");
        }
    }

    fn answer(&mut self, _io: &mut Io) -> bool {
        if !self.lifecycle.is_ended() {
            self.answer_all();
        }
        self.schedule.has_examined = !self.schedule.resting.is_empty();
        true
    }

    fn notify(&mut self, io: &mut Io, _is_needed: bool) -> bool {
        if !self.lifecycle.is_ended() {
            self.flush(io);
        }
        if !self.lifecycle.is_ended() {
            self.receive_more(io);
            self.continue_parsing();
            self.watch_progress(io);
        }
        true
    }
}

impl Source for Connection {
    fn is_polled(&self) -> bool {
        false
    }

    fn completed(&mut self, io: &mut Io, completion: Completion, noticed: Stamp) {
        match self.stream_completed(io, completion, noticed) {
            Some(completion) if completion.token == token::RECEIVE_DATA => {
                self.received_data(io, &completion, noticed);
            }
            Some(_) => self.timer_fired(io),
            None => {}
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
        self.publish_responses(io);
    }

    fn return_borrowed(&mut self, io: &mut Io, held: &[Range<usize>]) -> bool {
        self.copy_borrowed(io, held)
    }

    fn in_flight(&self) -> usize {
        self.link.operations + self.slots.busy()
    }

    fn stop(&mut self) {
        self.lifecycle.end();
        self.link.socket.shut_down();
    }

    fn close_disk(&mut self, io: &mut Io, disk: &Arc<Disk>) {
        if io.is_of(self.disk.handle, disk) {
            io.close(std::mem::take(&mut self.disk.handle));
        }
    }

    fn closed(&mut self, io: &mut Io) {
        io.close(std::mem::take(&mut self.disk.handle));
        self.unwatch(io);
        io.disown(self.link.owner);
        self.peer.admitted = None;
        self.lifecycle.drained();
    }

    fn set_recording(&mut self, recording: bool) {
        self.measurement.timeline.set_recording(recording);
    }

    fn record(&self) -> Option<Arc<QueueRecord>> {
        Some(self.record_of_requests())
    }
}
