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
use nbd::handshake::Session;
use nbd::request::Rules;
use reactor::{Addressed, DiskHandle, Io, RateLimit, Source};
use request_engine::{
    BatchTransport, BufferPool, Link, Measurement, StreamTransport, Transport, token,
};
use uring::Completion;

use crate::encryption::Encryption;
use crate::export::Export;
use crate::output::Output;
use crate::receive::Input;
use crate::shared::{Admitted, ConnectionHandle, SharedServer};
use crate::slots::{Slots, Stage};

// A client may open many connections at once, and each is worth a log line. Any peer may reconnect endlessly.
static SESSION_LOG: RateLimit = RateLimit::with_burst(Duration::from_millis(50), 64);

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

pub(crate) struct Connection {
    pub(crate) handle: ConnectionHandle,
    pub(crate) shared: Arc<SharedServer>,
    pub(crate) export: Arc<Export>,
    pub(crate) client: String,
    /// Counts the client until the connection has drained.
    admitted: Option<Admitted>,
    pub(crate) rules: Rules,
    /// IDs of the selected metadata contexts.
    pub(crate) contexts: Vec<u32>,
    pub(crate) disk: DiskHandle,
    /// Size of the disk.
    pub(crate) capacity: Arc<Capacity>,
    pub(crate) link: Link,
    /// State of TLS; `None`: the connection is not encrypted.
    pub(crate) encryption: Option<Encryption>,
    pub(crate) input: Input,
    pub(crate) output: Output,
    pub(crate) pool: BufferPool,
    /// Bytes that requests of the batch will take from the pool.
    pub(crate) reserved: usize,
    pub(crate) slots: Slots,
    /// Slots with a request that can be submitted.
    pub(crate) batch: Vec<u32>,
    /// Slots with a finished request.
    pub(crate) done: Vec<u32>,
    /// The client has requested the end: requests in flight are answered, then the connection ends.
    pub(crate) leaving: bool,
    pub(crate) ended: bool,
    /// Dropped when the connection has drained, for the control plane that waits for it.
    drained: Vec<mpsc::Sender<()>>,
    /// Number of transfers when the running timer was started.
    timer: Option<u64>,
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
        if let Some(suppressed) = SESSION_LOG.pass() {
            tracing::info!(
                export = export.options.name,
                client,
                suppressed,
                "NBD client connected"
            );
        }
        Connection {
            rules: Rules {
                style: session.style,
                flags: session.info.flags,
                minimum_block: session.info.block_sizes.minimum,
                has_contexts: !session.contexts.is_empty(),
            },
            contexts: session.contexts,
            disk: io.open(&export.disk),
            capacity: export.disk.device().capacity().clone(),
            link: Link::new(io, handle.source, socket),
            encryption: encryption.map(Encryption::from),
            input: Input::new(&input),
            output: Output::default(),
            pool: BufferPool::default(),
            reserved: 0,
            slots: Slots::default(),
            batch: Vec::new(),
            done: Vec::new(),
            leaving: false,
            ended: false,
            drained: Vec::new(),
            timer: None,
            measurement: Measurement::new(labels, TIMELINE_DEPTH, probe_id_base),
            handle,
            shared,
            export,
            client,
            admitted: Some(admitted),
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
        self.ended || self.leaving
    }

    /// Ends the connection on the server's initiative, after requests in flight. `drained` is dropped when none is in flight.
    pub fn dismiss(&mut self, io: &mut Io, reason: &str, drained: mpsc::Sender<()>) {
        self.drained.push(drained);
        self.end(io, reason);
    }

    /// Ends the connection: nothing more is received or sent. I/O in flight drains.
    pub fn end(&mut self, io: &mut Io, reason: &str) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        if let Some(suppressed) = SESSION_LOG.pass() {
            tracing::info!(
                export = self.export.options.name,
                client = self.client,
                suppressed,
                "NBD connection ended: {reason}"
            );
        }
        // Completes receives and sends in flight. A socket that is already disconnected has none.
        self.link.socket.shut_down();
        if self.timer.is_some() {
            io.ring().cancel(self.link.owner, token::TIMER);
        }
        self.batch.clear();
        self.done.clear();
        for index in self.slots.used() {
            match self.slots.get(index).stage {
                // Released when the I/O has ended.
                Stage::Submitted | Stage::Flushing => {}
                Stage::Free | Stage::Receiving | Stage::Ready | Stage::Done(_) => {
                    self.release(index);
                }
            }
        }
        // Also ends I/Os that wait to be retried after an error of the disk.
        io.cancel_waiting(self.handle.source, |_| true);
        self.shared.ended(self.number());
        self.handle.stop();
    }

    /// Sends queued output. Ends the connection after the last reply if the client has requested that.
    fn flush(&mut self, io: &mut Io) {
        let message = match &mut self.encryption {
            None => self.output.next(&mut self.pool),
            Some(encryption) => match self.output.next_encrypted(&mut self.pool, encryption) {
                Ok(message) => message,
                Err(error) => return self.end(io, &format!("TLS failed, {error}")),
            },
        };
        if let Some(message) = message {
            let output_max = self.shared.limits.output_bytes;
            self.send_message(io, message, self.leaving, output_max);
        }
        if self.leaving && self.slots.busy() == 0 && self.output.unsent() == 0 {
            self.end(io, "closed by the client");
        }
    }

    /// Returns true if the client has to read output, or to send the rest of a request.
    fn is_owed(&self) -> bool {
        self.output.queue.is_sending() || self.input.is_within_request()
    }

    /// Starts the timer that ends the connection if the client does not continue.
    fn watch_progress(&mut self, io: &mut Io) {
        if self.timer.is_none() && self.is_owed() {
            self.timer = Some(self.link.moved);
            self.link.operations += 1;
            let time = self.shared.limits.silent_time;
            io.ring().timer(self.link.owner, token::TIMER, time);
        }
    }

    fn timer_fired(&mut self, io: &mut Io) {
        let before = self.timer.take();
        if !self.ended && self.is_owed() && before == Some(self.link.moved) {
            self.end(io, "no response from the client within the time limit");
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
            self.shared.violated(&self.client, &violation);
            self.end(io, "protocol violation");
        }
    }

    fn answer(&mut self, _io: &mut Io) -> bool {
        if !self.ended {
            self.answer_all();
        }
        true
    }

    fn notify(&mut self, io: &mut Io, _is_needed: bool) -> bool {
        if !self.ended {
            self.flush(io);
        }
        if !self.ended {
            self.receive_more(io);
            self.continue_parsing();
            self.watch_progress(io);
        }
        true
    }
}

impl Source for Connection {
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
        self.ended = true;
        self.link.socket.shut_down();
    }

    fn close_disk(&mut self, io: &mut Io, disk: &Arc<Disk>) {
        if io.is_of(self.disk, disk) {
            io.close(std::mem::take(&mut self.disk));
        }
    }

    fn closed(&mut self, io: &mut Io) {
        io.close(std::mem::take(&mut self.disk));
        self.unwatch(io);
        io.disown(self.link.owner);
        self.admitted = None;
        self.drained.clear();
    }

    fn set_recording(&mut self, recording: bool) {
        self.measurement.timeline.set_recording(recording);
    }

    fn record(&self) -> Option<Arc<QueueRecord>> {
        Some(self.record_of_requests())
    }
}
