//! One connected front end: the thread that reads its messages, and a handle for other threads.
//!
//! The thread sleeps between messages. It passes each to the [`Dispatcher`] and ends with its session.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use reactor::{Pool, RateLimit};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::SendFlags;
use sys::Peer;
use vhost_user_wire::{BACKEND_CONFIG_CHANGE_MSG, Message, encode};
use virtio_device::{Breach, OnBroken, VirtioDevice};

use crate::dispatch::{Dispatcher, Error};
use crate::queue_times::QueueTimes;
use crate::record::SessionHandover;
use crate::session::{Channel, Session};

/// Time limit for the rest of a message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(3);

/// A hostile front end that reconnects endlessly must not fill the log.
static ENDED_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));
static REFUSED_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));
// A virtual machine connects and disconnects with all its disks at once, and each disk is worth a log line.
static CONNECTED_LOG: RateLimit = RateLimit::with_burst(Duration::from_millis(50), 64);
static DISCONNECTED_LOG: RateLimit = RateLimit::with_burst(Duration::from_millis(50), 64);

/// Time without messages after which another front end may replace this one.
const SILENCE: Duration = Duration::from_secs(1);

/// Control of a running session by other threads.
pub(crate) struct SessionHandle {
    stream: UnixStream,
    has_sent: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
    since: Instant,
    channel: Channel,
    handover: Arc<Handover>,
}

/// Request to pause a session between two messages, before it may continue in another process.
struct Handover {
    /// Receiver of the paused session.
    request: Mutex<Option<Sender<PausedSession>>>,
    /// Wakes the session's thread.
    wake: OwnedFd,
    /// The connection belongs to another process. This process must not end it.
    is_over: AtomicBool,
}

impl Handover {
    fn set(&self, request: Sender<PausedSession>) {
        let mut slot = self.request.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = Some(request);
        drop(slot);
        // Fails only if the thread is already awake.
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
    }

    /// Takes the request after a wake-up.
    fn take(&self) -> Option<Sender<PausedSession>> {
        // Fails only if there was no wake-up.
        rustix::io::read(&self.wake, &mut [0; 8]).ok();
        self.take_request()
    }

    fn take_request(&self) -> Option<Sender<PausedSession>> {
        let mut slot = self.request.lock().unwrap_or_else(PoisonError::into_inner);
        slot.take()
    }
}

/// A session with running rings and a thread that waits between two messages. Dropping it resumes the thread.
pub(crate) struct PausedSession {
    proceed: Sender<Sender<SessionHandover>>,
}

impl PausedSession {
    /// Stops the rings and sends the session's state to `to`, to continue in another process. Sends nothing if this fails.
    pub fn hand_over(self, to: Sender<SessionHandover>) {
        // Fails only if the thread has panicked.
        self.proceed.send(to).ok();
    }
}

/// A session from the previous process.
pub(crate) struct TakenOverSession {
    messages: Vec<Message>,
    channel: Option<UnixStream>,
}

impl TakenOverSession {
    /// Parses the state of a session.
    ///
    /// # Errors
    /// Fails if the state is invalid.
    pub fn parse(
        mut handover_state: SessionHandover,
    ) -> io::Result<(UnixStream, TakenOverSession)> {
        let messages = handover_state.take_messages()?;
        let channel = handover_state.channel.map(UnixStream::from);
        Ok((
            UnixStream::from(handover_state.stream),
            TakenOverSession { messages, channel },
        ))
    }
}

impl SessionHandle {
    /// Ends the session: its thread reads the end of the stream. Only the receiving side is shut down. The front end must not see an end
    /// before all requests in flight were answered, or it would take them for lost.
    pub fn end(&self) {
        if self.handover.is_over.load(Ordering::Acquire) {
            return;
        }
        self.ended.store(true, Ordering::Relaxed);
        // Fails only if the stream has ended already.
        self.stream.shutdown(std::net::Shutdown::Read).ok();
    }

    /// Pauses the session's thread before the next message and sends the paused session to `to`. A session that ends first sends nothing.
    pub fn pause(&self, to: Sender<PausedSession>) {
        self.handover.set(to);
    }

    /// Withdraws the request to pause. Returns false if the session has received it, or if there was none.
    pub fn withdraw_pause(&self) -> bool {
        self.handover.take_request().is_some()
    }

    /// Notifies the front end of a changed configuration space. Returns false if it has no channel for this or does not read.
    pub fn config_changed(&self) -> bool {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        channel.as_ref().is_some_and(|channel| {
            let message = encode(BACKEND_CONFIG_CHANGE_MSG, 0, &[]);
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            rustix::net::send(channel, &message, flags) == Ok(message.len())
        })
    }

    /// Returns the process of the front end.
    pub fn peer(&self) -> Option<Peer> {
        sys::peer_of(&self.stream).ok()
    }

    /// Returns true if the front end has hung up. The session then drains and ends.
    pub fn is_leaving(&self) -> bool {
        let mut hung_up = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        poll(&mut hung_up, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// Returns true if the front end has sent no message for longer than a serious one needs.
    pub fn is_silent(&self) -> bool {
        !self.has_sent.load(Ordering::Relaxed) && self.since.elapsed() > SILENCE
    }
}

/// Serves one front end until it leaves. Call on a thread of its own. `started` receives the session's handle; `on_blocked` is called if the
/// front end blocks a worker.
pub(crate) fn serve(
    stream: UnixStream,
    device: Arc<dyn VirtioDevice>,
    pool: Arc<Pool>,
    started: impl FnOnce(SessionHandle),
    on_blocked: impl Fn() + Send + Sync + 'static,
    times: Arc<QueueTimes>,
    taken_over: Option<TakenOverSession>,
) -> io::Result<()> {
    stream.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
    let has_sent = Arc::new(AtomicBool::new(false));
    let ended = Arc::new(AtomicBool::new(false));
    let (previous, channel_fd) = match taken_over {
        Some(taken_over) => (taken_over.messages, taken_over.channel),
        None => (Vec::new(), None),
    };
    let channel: Channel = Arc::new(Mutex::new(channel_fd));
    let handover = Arc::new(Handover {
        request: Mutex::new(None),
        wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        is_over: AtomicBool::new(false),
    });
    started(SessionHandle {
        handover: handover.clone(),
        channel: channel.clone(),
        stream: stream.try_clone()?,
        has_sent: has_sent.clone(),
        ended: ended.clone(),
        since: Instant::now(),
    });
    let name = device.name().to_owned();
    let breaker = stream.try_clone()?;
    let on_broken: OnBroken = Arc::new(move |breach, _why| {
        if breach == Breach::Blocked {
            on_blocked();
        }
        breaker.shutdown(std::net::Shutdown::Read).ok();
    });
    let session = Session::new(device, pool, on_broken, times, channel.clone());
    let mut conversation = Conversation {
        dispatcher: Dispatcher::new(stream, session),
        name,
        channel,
        handover,
        has_sent,
    };
    let Some(end) = conversation.run(previous) else {
        return Ok(());
    };
    let hung_up = matches!(end, Error::Closed) && !ended.load(Ordering::Relaxed);
    conversation.dispatcher.session.has_left = hung_up;
    log_end(&conversation.name, &end);
    Ok(())
}

/// State of a session's thread.
struct Conversation {
    dispatcher: Dispatcher,
    /// Export name.
    name: String,
    channel: Channel,
    handover: Arc<Handover>,
    has_sent: Arc<AtomicBool>,
}

impl Conversation {
    /// Runs until the front end leaves or is refused. Returns `None` if the session continues in another process. `previous`: the front end's
    /// messages to the previous process.
    fn run(&mut self, previous: Vec<Message>) -> Option<Error> {
        if !previous.is_empty() {
            self.has_sent.store(true, Ordering::Relaxed);
            self.dispatcher.session.allow_earlier_queues();
            for message in previous {
                if let Err(error) = self.dispatcher.execute(message) {
                    return Some(error);
                }
            }
            let export = &self.name;
            tracing::info!(
                export,
                "front end session taken over from the previous process"
            );
        } else if let Some(suppressed) = CONNECTED_LOG.pass() {
            tracing::info!(export = self.name, suppressed, "front end connected");
        }
        loop {
            // A message may begin at any time, but must end within a limit.
            let mut waits = [
                PollFd::new(&self.dispatcher.stream, PollFlags::IN),
                PollFd::new(&self.handover.wake, PollFlags::IN),
            ];
            match poll(&mut waits, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Some(Error::Io(errno.into())),
            }
            let [is_readable, is_woken] = waits.map(|wait| !wait.revents().is_empty());
            if is_woken
                && let Some(request) = self.handover.take()
                && let Some(to) = self.pause(request)
            {
                return self.hand_over(&to).err().map(Error::Io);
            }
            if is_readable && let Err(error) = self.handle_message() {
                return Some(error);
            }
        }
    }

    /// Handles a message that has begun.
    fn handle_message(&mut self) -> Result<(), Error> {
        self.has_sent.store(true, Ordering::Relaxed);
        if let Some(why) = self.dispatcher.handle_next(MESSAGE_TIMEOUT)?
            && let Some(suppressed) = REFUSED_LOG.pass()
        {
            tracing::warn!(export = self.name, suppressed, "message rejected: {why}");
        }
        Ok(())
    }

    /// Waits between two messages. Returns the receiver of the session's state; `None` if the session continues here.
    fn pause(&self, request: Sender<PausedSession>) -> Option<Sender<SessionHandover>> {
        let (proceed, decision) = mpsc::channel();
        // Fails if the receiver no longer waits for this session.
        request.send(PausedSession { proceed }).ok()?;
        // The receiver waits until all senders are dropped.
        drop(request);
        decision.recv().ok()
    }

    /// Last operation of this process for a front end. Takes place between two messages, so that the other process reads the next one.
    fn hand_over(&mut self, to: &Sender<SessionHandover>) -> io::Result<()> {
        let bases = self.dispatcher.session.hand_over();
        let messages = self.dispatcher.take_record().messages(&bases);
        let channel = self.channel.lock();
        let channel = channel.unwrap_or_else(PoisonError::into_inner).take();
        let handover_state = SessionHandover::new(
            &self.name,
            self.dispatcher.stream.try_clone()?.into(),
            channel.map(OwnedFd::from),
            messages,
        );
        tracing::info!(export = self.name, "front end session handed over");
        // Set before other threads are notified: this process may be about to end all sessions.
        self.handover.is_over.store(true, Ordering::Release);
        // Fails if the receiver no longer waits; the session then ends.
        to.send(handover_state).ok();
        Ok(())
    }
}

fn log_end(export: &str, end: &Error) {
    if matches!(end, Error::Closed) {
        if let Some(suppressed) = DISCONNECTED_LOG.pass() {
            tracing::info!(export, suppressed, "front end disconnected");
        }
    } else if let Some(suppressed) = ENDED_LOG.pass() {
        tracing::warn!(export, suppressed, "front end session ended: {end}");
    }
}
