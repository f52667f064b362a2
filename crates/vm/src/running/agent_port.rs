//! Shares the port of a guest's agent between clients. Each client runs one command at a time over its own socket.
//!
//! The guest is untrusted: a protocol violation ends the session and all commands. Memory is bounded: a client's queue by its windows,
//! the port's queue by [`PORT_QUEUE_MAX`], and clients by [`CLIENTS_MAX`].

use super::outbox::Outbox;
use anyhow::{Context, Result};
use guest_channel::{Allowance, Budget, Decoder, Frame, Hunter, PAYLOAD_MAX, Stream, Violation};
use rustix::process::Signal;
use std::collections::HashMap;
use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum number of concurrent commands.
const CLIENTS_MAX: usize = 64;
/// Time that a new command waits for the end of a migration.
const MIGRATION_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 2000 });
/// Reason for the refusal of a command. Its frames would be held back until the end of the migration.
pub const IS_MIGRATING: &str =
    "the guest is being migrated; hint: wait for lunette vm migrate, or cancel it with Ctrl-C";
/// Maximum number of bytes queued for a guest that does not read: more than all clients' windows and scripts together.
const PORT_QUEUE_MAX: usize = 32 << 20;

/// The agent's port and its clients.
#[derive(Clone, Debug)]
pub struct AgentPort {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    port: Arc<Outbox>,
    state: Mutex<Sessions>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Sessions {
    /// Number of sessions that the guest's agent has begun.
    boots: u32,
    has_session: bool,
    next_id: u32,
    channels: HashMap<u32, Channel>,
    last_problem: Option<String>,
    /// Stream after the end of the present one, for a guest that has migrated.
    next: Option<UnixStream>,
    is_migrating: bool,
}

#[derive(Debug)]
struct Channel {
    client: Arc<Outbox>,
    output: Allowance,
    errors: Allowance,
    input: Budget,
    /// The client has disconnected; further output is dropped.
    is_abandoned: bool,
}

impl AgentPort {
    /// Starts the port; `stream` leads to the agent.
    pub fn start(stream: UnixStream) -> Result<AgentPort> {
        let reader = stream.try_clone()?;
        let shared = Arc::new(Shared {
            port: Outbox::to(stream),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let port = AgentPort { shared };
        let own = port.clone();
        std::thread::spawn(move || own.read_port(reader));
        Ok(port)
    }

    /// Returns the number of greetings from the guest's agent.
    pub fn boots(&self) -> u32 {
        self.lock().boots
    }

    /// Returns the reason for an abnormal end of the last session.
    #[cfg(test)]
    pub fn last_problem(&self) -> Option<String> {
        self.lock().last_problem.clone()
    }

    /// Waits up to `moment` for a change. Returns the number of greetings.
    pub fn wait(&self, moment: Duration) -> u32 {
        let state = self.lock();
        let waited = self.shared.changed.wait_timeout(state, moment);
        waited.unwrap_or_else(PoisonError::into_inner).0.boots
    }

    /// Accepts clients until the listener fails.
    pub fn serve(&self, listener: UnixListener) {
        let port = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let port = port.clone();
                std::thread::spawn(move || port.serve_client(stream));
            }
        });
    }

    /// Ends all commands and the port.
    pub fn close(&self, reason: &str) {
        self.lock().end_session(reason);
        self.shared.port.close();
    }

    /// Holds back frames for the guest during a migration: QEMU would lose those that the guest has not received at the switch.
    pub fn pause(&self) {
        self.lock().is_migrating = true;
        self.shared.port.pause();
    }

    /// Sends the frames that were held back after a failed migration.
    pub fn resume(&self) {
        self.shared.port.resume(None);
        self.migration_ended();
    }

    /// Continues on another stream. Commands continue. The present stream is read to its end first.
    pub fn move_to(&self, stream: UnixStream) -> Result<()> {
        let next = stream.try_clone().inspect_err(|_| self.migration_ended())?;
        self.lock().next = Some(next);
        self.shared.port.resume(Some(stream));
        self.migration_ended();
        Ok(())
    }

    fn migration_ended(&self) {
        self.lock().is_migrating = false;
        self.shared.changed.notify_all();
    }

    /// Returns the state when no migration runs. A long one is an error.
    fn lock_between_migrations(&self) -> Result<MutexGuard<'_, Sessions>, Violation> {
        let (changed, state) = (&self.shared.changed, self.lock());
        let waited =
            changed.wait_timeout_while(state, MIGRATION_PATIENCE, |state| state.is_migrating);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.is_migrating {
            true => Err(Violation(IS_MIGRATING.to_owned())),
            false => Ok(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Sessions> {
        let state = &self.shared.state;
        state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_port(&self, mut stream: UnixStream) {
        let mut hunter = Some(Hunter::for_hello());
        let mut decoder = Decoder::default();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let Some(count) = stream.read(&mut buffer).ok().filter(|count| *count > 0) else {
                let Some(next) = self.lock().next.take() else {
                    return self.close("the guest has ended");
                };
                stream = next;
                continue;
            };
            let mut bytes = &buffer[..count];
            // Every iteration except the last removes a greeting from the front.
            loop {
                if let Some(hunt) = &mut hunter {
                    let Some((number, rest)) = hunt.feed(bytes) else {
                        break;
                    };
                    self.greeted(number);
                    (hunter, bytes, decoder) = (None, rest, Decoder::default());
                }
                let Err(violation) = decoder.feed(bytes, |id, frame| self.take(id, frame)) else {
                    break;
                };
                self.lock().end_session(&violation.to_string());
                hunter = Some(Hunter::for_hello());
            }
        }
    }

    fn greeted(&self, number: [u8; 16]) {
        let mut state = self.lock();
        state.end_session("the guest's agent was started again");
        state.has_session = true;
        state.boots += 1;
        state.last_problem = None;
        self.shared.port.append(|bytes| {
            // Drops frames of the previous session.
            bytes.clear();
            Frame::Welcome(number).encode(0, bytes);
        });
        self.shared.changed.notify_all();
    }

    /// Handles a frame from the guest.
    fn take(&self, id: u32, frame: Frame) -> Result<(), Violation> {
        let mut state = self.lock();
        let Some(channel) = state.channels.get_mut(&id) else {
            return Err(Violation(format!("a frame for the unknown channel {id}")));
        };
        let answer = match &frame {
            Frame::Output(data) => {
                channel.output.receive(data.len())?;
                channel.drop_output(Stream::Output)
            }
            Frame::Errors(data) => {
                channel.errors.receive(data.len())?;
                channel.drop_output(Stream::Errors)
            }
            Frame::Credit(Stream::Input, count) => {
                channel.input.grant(*count)?;
                None
            }
            Frame::Exit(_) | Frame::Failed(_) => None,
            frame => {
                return Err(Violation(format!(
                    "a frame with the wrong direction (host to guest): {frame:?}"
                )));
            }
        };
        if !channel.is_abandoned {
            channel.client.append(|bytes| frame.encode(0, bytes));
        }
        if let Frame::Exit(_) | Frame::Failed(_) = frame {
            channel.client.close();
            state.channels.remove(&id);
        }
        match answer {
            Some(answer) => self.send(id, &answer),
            None => Ok(()),
        }
    }

    /// Sends a frame to the guest.
    fn send(&self, id: u32, frame: &Frame) -> Result<(), Violation> {
        if self.shared.port.waiting() > PORT_QUEUE_MAX {
            let text = format!("it does not read its port: {PORT_QUEUE_MAX} bytes are waiting");
            return Err(Violation(text));
        }
        self.shared.port.append(|bytes| frame.encode(id, bytes));
        Ok(())
    }

    fn serve_client(&self, stream: UnixStream) {
        let Ok(mut reader) = stream.try_clone() else {
            return;
        };
        let outbox = Outbox::to(stream);
        let mut client = Client {
            port: self,
            outbox,
            id: None,
        };
        let mut decoder = Decoder::default();
        let mut buffer = vec![0; 2 * PAYLOAD_MAX];
        while let Some(count) = reader.read(&mut buffer).ok().filter(|count| *count > 0) {
            let fed = decoder.feed(&buffer[..count], |_, frame| client.take(frame));
            if let Err(violation) = fed {
                client.refuse(&violation.to_string());
                break;
            }
        }
        client.leave();
    }
}

impl Sessions {
    fn end_session(&mut self, reason: &str) {
        if !self.has_session && self.channels.is_empty() {
            return;
        }
        self.has_session = false;
        self.last_problem = Some(reason.to_owned());
        for (_, channel) in self.channels.drain() {
            let frame = Frame::Failed(reason.to_owned());
            channel.client.append(|bytes| frame.encode(0, bytes));
            channel.client.close();
        }
    }

    fn open(&mut self, client: &Arc<Outbox>) -> Result<u32, Violation> {
        if !self.has_session {
            let text = match &self.last_problem {
                Some(problem) => format!("the guest's agent does not respond: {problem}"),
                None => "the guest's agent has not started; hint: see the guest's state with `lunette vm list`".to_owned(),
            };
            return Err(Violation(text));
        }
        if self.channels.len() >= CLIENTS_MAX {
            let text = format!("{CLIENTS_MAX} commands already run in the guest, the maximum");
            return Err(Violation(text));
        }
        self.next_id += 1;
        let channel = Channel {
            client: Arc::clone(client),
            output: Allowance::default(),
            errors: Allowance::default(),
            input: Budget::default(),
            is_abandoned: false,
        };
        self.channels.insert(self.next_id, channel);
        Ok(self.next_id)
    }
}

impl Channel {
    /// Returns the window update for output that is dropped.
    fn drop_output(&mut self, stream: Stream) -> Option<Frame> {
        let allowance = match stream {
            Stream::Output => &mut self.output,
            _ => &mut self.errors,
        };
        let given = self.is_abandoned.then(|| allowance.refill()).flatten()?;
        Some(Frame::Credit(stream, given))
    }
}

struct Client<'a> {
    port: &'a AgentPort,
    outbox: Arc<Outbox>,
    id: Option<u32>,
}

impl Client<'_> {
    /// Handles a frame from the client. Clients run as the same user; their frames are validated anyway.
    fn take(&mut self, frame: Frame) -> Result<(), Violation> {
        let (mut state, id) = match self.id {
            Some(id) => (self.port.lock(), id),
            None => {
                let mut state = self.port.lock_between_migrations()?;
                let id = state.open(&self.outbox)?;
                (state, *self.id.insert(id))
            }
        };
        let Some(channel) = state.channels.get_mut(&id) else {
            // The command has ended; the client will receive that.
            return Ok(());
        };
        match &frame {
            Frame::Script(_) | Frame::Start | Frame::InputEnd | Frame::Signal(_) => {}
            Frame::Input(data) => {
                let count = data.len() as u32;
                if count > channel.input.left() {
                    return Err(Violation("more input than the window allows".to_owned()));
                }
                channel.input.spend(count);
            }
            Frame::Credit(Stream::Output, count) => channel.output.give(*count),
            Frame::Credit(Stream::Errors, count) => channel.errors.give(*count),
            frame => {
                return Err(Violation(format!(
                    "a frame with the wrong direction (guest to host): {frame:?}"
                )));
            }
        }
        self.port.send(id, &frame)
    }

    fn refuse(&self, reason: &str) {
        let frame = Frame::Failed(reason.to_owned());
        self.outbox.append(|bytes| frame.encode(0, bytes));
    }

    /// Kills the command if it still runs.
    fn leave(&self) {
        self.outbox.close();
        let mut state = self.port.lock();
        let Some(id) = self.id else { return };
        let Some(channel) = state.channels.get_mut(&id) else {
            return;
        };
        channel.is_abandoned = true;
        let mut frames = vec![Frame::Signal(Signal::KILL.as_raw() as u8), Frame::InputEnd];
        for stream in [Stream::Output, Stream::Errors] {
            frames.extend(channel.drop_output(stream));
        }
        for frame in frames {
            if let Err(violation) = self.port.send(id, &frame) {
                return state.end_session(&violation.to_string());
            }
        }
    }
}

/// Waits until QEMU connects to a port's listener. `check` fails if QEMU has ended.
pub fn accept(
    listener: &UnixListener,
    limit: Duration,
    mut check: impl FnMut() -> Result<()>,
) -> Result<UnixStream> {
    listener.set_nonblocking(true)?;
    let accepted = crate::process::wait_until(limit, || match listener.accept() {
        Ok((stream, _)) => Some(Ok(stream)),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => check().err().map(Err),
        Err(error) => Some(Err(error.into())),
    });
    let stream = accepted.context("QEMU has not connected to its ports")??;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[cfg(test)]
mod tests;
