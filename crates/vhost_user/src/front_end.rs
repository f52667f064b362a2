//! One connected front end: the thread that reads its messages, and what others may ask of the connection.
//!
//! The thread sleeps but for messages. It hands each to the [`Session`], and ends with it.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use reactor::{Pool, RateLimit};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::SendFlags;
use vhost::vhost_user::Error;
use virtio_device::{Breach, OnBroken, VirtioDevice};

use crate::relay::{Handled, Relay};
use crate::session::Session;
use crate::whole_message;

/// A front end that stops in the middle of a message is given up after this.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(3);

/// A hostile front end that comes again and again must not fill the log.
static ENDED_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));
static REFUSED_LOG: RateLimit = RateLimit::new(Duration::from_secs(1));
// A virtual machine comes and goes with all its disks at once, and each is worth a line.
static COMING_LOG: RateLimit = RateLimit::with_burst(Duration::from_millis(50), 64);
static LEAVING_LOG: RateLimit = RateLimit::with_burst(Duration::from_millis(50), 64);

/// A front end that says nothing for so long may be replaced by another.
const SILENCE: Duration = Duration::from_secs(1);

/// What others may ask of a running session.
pub(crate) struct SessionHandle {
    stream: UnixStream,
    spoke: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
    since: Instant,
    channel: Channel,
}

/// The front end's socket for messages of ours, once it has given one.
type Channel = Arc<Mutex<Option<UnixStream>>>;

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, without a payload.
const CONFIG_CHANGE: [u8; 12] = [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

impl SessionHandle {
    /// Ends the session: its thread reads the end of the stream. The front end must not see an end before everything in
    /// flight has been answered, or it takes for lost what is answered yet: so only our side is shut.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        // It fails only when the stream has ended already.
        self.stream.shutdown(std::net::Shutdown::Read).ok();
    }

    /// Tells the front end that the configuration space has changed; false when it has given no channel for that, or
    /// does not listen.
    pub fn config_changed(&self) -> bool {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = channel.as_ref().map(|channel| {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            rustix::net::send(channel, &CONFIG_CHANGE, flags)
        });
        matches!(sent, Some(Ok(12)))
    }

    /// Has the front end hung up? Its session then drains and ends by itself.
    pub fn is_leaving(&self) -> bool {
        let mut hung_up = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        poll(&mut hung_up, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// Has the front end been silent for longer than one that means it takes?
    pub fn is_silent(&self) -> bool {
        !self.spoke.load(Ordering::Relaxed) && self.since.elapsed() > SILENCE
    }
}

/// Serves one front end until it leaves; call on a thread of its own. `started` is given the session's handle;
/// `held_up` is called when the front end made a worker wait.
pub(crate) fn serve(
    stream: UnixStream,
    device: Arc<dyn VirtioDevice>,
    pool: Arc<Pool>,
    started: impl FnOnce(SessionHandle),
    held_up: impl Fn() + Send + Sync + 'static,
) -> io::Result<()> {
    stream.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
    stream.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
    let watch = stream.try_clone()?;
    let spoke = Arc::new(AtomicBool::new(false));
    let ended = Arc::new(AtomicBool::new(false));
    let channel = Channel::default();
    started(SessionHandle {
        channel: channel.clone(),
        stream: stream.try_clone()?,
        spoke: spoke.clone(),
        ended: ended.clone(),
        since: Instant::now(),
    });
    let name = device.name().to_owned();
    let breaker = stream.try_clone()?;
    let on_broken: OnBroken = Arc::new(move |breach, _why| {
        if breach == Breach::HeldUp {
            held_up();
        }
        breaker.shutdown(std::net::Shutdown::Read).ok();
    });
    let session = Arc::new(Mutex::new(Session::new(device, pool, on_broken)));
    let mut relay = Relay::new(stream, session.clone())?;
    if let Some(suppressed) = COMING_LOG.pass() {
        tracing::info!(export = name, suppressed, "front end connected");
    }
    let end = loop {
        // Wait without a limit for a message to begin, and with one for it to end.
        match poll(&mut [PollFd::new(&watch, PollFlags::IN)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => break Error::SocketBroken(errno.into()),
        }
        spoke.store(true, Ordering::Relaxed);
        match whole_message::wait(&watch, MESSAGE_TIMEOUT) {
            Ok(None) => {}
            Ok(Some(given)) => {
                let mut channel = channel.lock().unwrap_or_else(PoisonError::into_inner);
                let before = channel.replace(UnixStream::from(given));
                // To close it may take long, and others want to tell something.
                drop(channel);
                drop(before);
            }
            Err(error) => break Error::SocketError(error),
        }
        if let Err(error) = room_to_answer(&watch) {
            break Error::SocketError(error);
        }
        match relay.handle() {
            Ok(Handled::Done) => {}
            Ok(Handled::Refused(why)) => {
                if let Some(suppressed) = REFUSED_LOG.pass() {
                    tracing::warn!(export = name, suppressed, "message refused: {why}");
                }
            }
            Err(error) => break error,
        }
    };
    let hung_up = matches!(end, Error::Disconnected) && !ended.load(Ordering::Relaxed);
    let why = session.lock().map(|mut session| {
        session.has_left = hung_up;
        session.refusal.take()
    });
    let why = why.unwrap_or_default();
    log_end(&name, &end, why);
    Ok(())
}

/// Waits until an answer can be sent without waiting: a stream takes more when most of its buffer is free. The crate `vhost`
/// would try for ever to send to a front end that asks and does not read.
fn room_to_answer(stream: &UnixStream) -> io::Result<()> {
    let limit = Timespec::try_from(MESSAGE_TIMEOUT).map_err(io::Error::other)?;
    let mut wait = [PollFd::new(stream, PollFlags::OUT)];
    retry_on_intr(|| poll(&mut wait, Some(&limit)))?;
    match wait[0].revents().contains(PollFlags::OUT) {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "it does not read answers",
        )),
    }
}

fn log_end(export: &str, end: &Error, why: Option<String>) {
    if let (Error::Disconnected, None) = (end, &why) {
        if let Some(suppressed) = LEAVING_LOG.pass() {
            tracing::info!(export, suppressed, "front end left");
        }
    } else if let Some(suppressed) = ENDED_LOG.pass() {
        let why = why.unwrap_or_else(|| end.to_string());
        tracing::warn!(
            export,
            suppressed,
            "front end refused, its session ends: {why}"
        );
    }
}
