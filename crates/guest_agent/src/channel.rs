//! Guest side of `crates/guest_channel`: commands that the host starts in parallel through a virtio-serial port.
//!
//! One thread only reads the port, so that the two directions cannot block each other. Each command has a thread for its end and one per
//! stream. The host is trusted: a protocol violation ends the agent, and its parent restarts it.

mod command;

use crate::args::Args;
use command::{Channel, run};
use guest_channel::{Decoder, Frame, Hunter, SCRIPT_MAX, Stream, Violation, lead_in};
use signal_hook::consts::{SIGINT, SIGQUIT};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Name of the port on QEMU's command line.
const PORT: &str = "lunette.agent";
const PORTS: &str = "/sys/class/virtio-ports";
/// Attempts to find the port, which appears shortly after its module is loaded.
const LOOKS: u32 = 100;
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Writer of the port, and the running commands.
pub struct Agent {
    port: Mutex<File>,
    channels: Mutex<HashMap<u32, Arc<Channel>>>,
}

/// Locks a mutex. A poisoned lock is used anyway, because its data is still valid.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Agent {
    /// Sends a frame of a command, unless its last frame has been sent. A failure of the port cannot be reported.
    pub fn send(&self, id: u32, channel: &Channel, frame: &Frame) {
        let mut port = lock(&self.port);
        if channel.ended.load(Ordering::Relaxed) {
            return;
        }
        if matches!(frame, Frame::Exit(_) | Frame::Failed(_)) {
            channel.ended.store(true, Ordering::Relaxed);
            lock(&self.channels).remove(&id);
        }
        port.write_all(&frame.bytes(id)).unwrap_or(());
    }
}

/// Gives commands the default action of the terminal's signals. A shell starts the agent in the background with these signals ignored,
/// which children inherit. A signal with a handler has its default action after `exec`.
fn reset_signals_of_commands() -> std::io::Result<()> {
    for signal in [SIGINT, SIGQUIT] {
        signal_hook::flag::register(signal, Arc::default())?;
    }
    Ok(())
}

/// Serves until the port fails.
pub fn serve(_args: &Args) -> Result<bool, String> {
    reset_signals_of_commands().map_err(|error| format!("cannot handle signals: {error}"))?;
    let path = find_port()?;
    let port = OpenOptions::new().read(true).write(true).open(&path);
    let mut port = port.map_err(|error| format!("cannot open {}: {error}", path.display()))?;
    let with_path = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut number = [0; 16];
    let random = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut number));
    random.map_err(|error| format!("cannot read /dev/urandom: {error}"))?;
    let agent = Arc::new(Agent {
        port: Mutex::new(port.try_clone().map_err(with_path)?),
        channels: Mutex::default(),
    });
    let mut greeting = lead_in();
    Frame::Hello(number).encode(0, &mut greeting);
    lock(&agent.port).write_all(&greeting).map_err(with_path)?;

    let mut hunter = Some(Hunter::for_welcome(number));
    let mut decoder = Decoder::default();
    let mut scripts = HashMap::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = port.read(&mut buffer).map_err(with_path)?;
        if count == 0 {
            // The host side is not connected at the moment.
            std::thread::sleep(LOOK_AGAIN);
            continue;
        }
        let mut bytes = &buffer[..count];
        if let Some(hunt) = &mut hunter {
            let Some((_, rest)) = hunt.feed(bytes) else {
                continue;
            };
            (hunter, bytes) = (None, rest);
        }
        let taken = decoder.feed(bytes, |id, frame| take(&agent, &mut scripts, id, frame));
        taken.map_err(|violation| format!("the host sent {violation}"))?;
    }
}

fn find_port() -> Result<PathBuf, String> {
    for _ in 0..LOOKS {
        let ports = std::fs::read_dir(PORTS).into_iter().flatten().flatten();
        for entry in ports {
            let name = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            if name.trim() == PORT {
                return Ok(PathBuf::from("/dev").join(entry.file_name()));
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Err(format!("no port {PORT} in {PORTS}"))
}

/// Partially received scripts; `None` for a script that is too long.
type Scripts = HashMap<u32, Option<Vec<u8>>>;

fn take(agent: &Arc<Agent>, scripts: &mut Scripts, id: u32, frame: Frame) -> Result<(), Violation> {
    let channel = lock(&agent.channels).get(&id).cloned();
    match (frame, channel) {
        (Frame::Script(piece), None) => {
            let script = scripts.entry(id).or_insert_with(|| Some(Vec::new()));
            *script = script
                .take()
                .filter(|text| text.len() + piece.len() <= SCRIPT_MAX)
                .map(|mut text| {
                    text.extend(piece);
                    text
                });
        }
        (Frame::Start, None) => {
            let script = scripts.remove(&id).unwrap_or_else(|| Some(Vec::new()));
            let channel = Arc::new(Channel::default());
            lock(&agent.channels).insert(id, Arc::clone(&channel));
            let agent = Arc::clone(agent);
            std::thread::spawn(move || run(&agent, id, &channel, script));
        }
        (Frame::Input(data), Some(channel)) => channel.input(Some(data)),
        (Frame::InputEnd, Some(channel)) => channel.input(None),
        (Frame::Credit(Stream::Output, count), Some(channel)) => channel.output.grant(count)?,
        (Frame::Credit(Stream::Errors, count), Some(channel)) => channel.errors.grant(count)?,
        (Frame::Signal(number), Some(channel)) => channel.signal(number),
        // For a command that has just ended.
        (Frame::Input(_) | Frame::InputEnd | Frame::Credit(..) | Frame::Signal(_), None) => {
            scripts.remove(&id);
        }
        (frame, _) => {
            return Err(Violation(format!("unexpected {frame:?} on channel {id}")));
        }
    }
    Ok(())
}
