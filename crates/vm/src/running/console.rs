//! Console of a guest: output goes to all watchers, their input goes to the guest, and recent output is stored.

use super::outbox::Outbox;
use anyhow::{Context, Result};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Size of the stored output in bytes.
const REMEMBERED: usize = 64 << 10;
/// Maximum bytes queued for a watcher; a slower one is disconnected.
const WAITING_MAX: usize = 1 << 20;
/// Ctrl-], as in telnet and `virsh console`.
const ESCAPE: u8 = 0x1d;
const LINES_SHOWN: usize = 40;

/// Supervisor side of a console.
#[derive(Clone, Debug, Default)]
pub struct Console {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    remembered: VecDeque<u8>,
    watchers: Vec<Arc<Outbox>>,
    guest: Option<UnixStream>,
    copy: Option<File>,
    is_closed: bool,
}

impl Console {
    /// Creates a console without a guest; all output is also written to `copy`.
    pub fn new(copy: Option<File>) -> Console {
        let console = Console::default();
        console.lock().copy = copy;
        console
    }

    /// Connects the guest's port.
    pub fn connect(&self, stream: UnixStream) -> Result<()> {
        let mut reader = stream.try_clone()?;
        self.lock().guest = Some(stream);
        let console = self.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Some(count) = reader.read(&mut buffer).ok().filter(|count| *count > 0) {
                console.printed(&buffer[..count]);
            }
        });
        Ok(())
    }

    /// Accepts clients until the listener fails.
    pub fn serve(&self, listener: UnixListener) {
        let console = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let console = console.clone();
                std::thread::spawn(move || console.serve_client(stream));
            }
        });
    }

    /// Returns the last lines, with a heading.
    pub fn tail(&self, name: &str) -> String {
        let state = self.lock();
        let bytes: Vec<u8> = state.remembered.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes).replace('\r', "");
        let lines: Vec<&str> = text.lines().collect();
        if lines.is_empty() {
            return format!("--- guest {name} has no console output ---");
        }
        let last = &lines[lines.len().saturating_sub(LINES_SHOWN)..];
        format!(
            "--- last console output of guest {name} ---\n{}\n--- end ---",
            last.join("\n")
        )
    }

    /// Disconnects all watchers after their pending output, because the guest has ended.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.watchers.drain(..).for_each(|watcher| watcher.close());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn printed(&self, bytes: &[u8]) {
        let mut state = self.lock();
        state.remembered.extend(bytes);
        let surplus = state.remembered.len().saturating_sub(REMEMBERED);
        state.remembered.drain(..surplus);
        if let Some(copy) = &mut state.copy
            && copy.write_all(bytes).is_err()
        {
            // A full disk must not end a guest.
            state.copy = None;
        }
        state.watchers.retain(|watcher| {
            watcher.append(|queue| queue.extend_from_slice(bytes));
            let is_slow = watcher.waiting() > WAITING_MAX;
            if is_slow {
                watcher.close();
            }
            !is_slow
        });
    }

    fn serve_client(&self, stream: UnixStream) {
        let Ok(mut reader) = stream.try_clone() else {
            return;
        };
        let outbox = Outbox::to(stream);
        {
            let mut state = self.lock();
            let remembered = &state.remembered;
            outbox.append(|queue| queue.extend(remembered));
            match state.is_closed {
                true => return outbox.close(),
                false => state.watchers.push(Arc::clone(&outbox)),
            }
        }
        let mut buffer = [0; 4096];
        while let Some(count) = reader.read(&mut buffer).ok().filter(|count| *count > 0) {
            let guest = self
                .lock()
                .guest
                .as_ref()
                .and_then(|guest| guest.try_clone().ok());
            // Outside the lock, because a guest may read slowly.
            if let Some(mut guest) = guest {
                guest.write_all(&buffer[..count]).unwrap_or(());
            }
        }
        // A client that only writes, like a pipe, still receives output until the connection ends.
    }
}

/// Reason why a user leaves a console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsoleEnd {
    /// Ctrl-] was typed.
    Detached,
    /// The other side closed the connection.
    GuestEnded,
}

/// Raw terminal mode until drop.
struct RawTerminal(Option<Termios>);

impl RawTerminal {
    fn new() -> Result<RawTerminal> {
        let stdin = std::io::stdin();
        if !isatty(&stdin) {
            return Ok(RawTerminal(None));
        }
        let before = tcgetattr(&stdin).context("cannot read the terminal's settings")?;
        let mut raw = before.clone();
        raw.make_raw();
        // Output processing stays enabled, so that lines of other threads begin at the left margin.
        raw.output_modes = before.output_modes;
        tcsetattr(&stdin, OptionalActions::Now, &raw).context("cannot set the terminal")?;
        Ok(RawTerminal(Some(before)))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // The terminal may be gone.
            tcsetattr(std::io::stdin(), OptionalActions::Now, before).unwrap_or(());
        }
    }
}

/// Connects stdin and stdout to a console's or monitor's socket until either ends.
pub fn attach(socket: &Path) -> Result<ConsoleEnd> {
    let stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    let terminal = RawTerminal::new()?;
    let is_terminal = terminal.0.is_some();
    let has_left = Arc::new(AtomicBool::new(false));
    let writer = stream.try_clone()?;
    let leaving = Arc::clone(&has_left);
    // The thread is detached: a read from a terminal ends only with user input.
    std::thread::spawn(move || type_in(writer, is_terminal, &leaving));
    let mut reader = stream;
    let mut stdout = std::io::stdout();
    let mut buffer = [0; 4096];
    while let Some(count) = reader.read(&mut buffer).ok().filter(|count| *count > 0) {
        let written = stdout.write_all(&buffer[..count]);
        if written.and_then(|()| stdout.flush()).is_err() {
            return Ok(ConsoleEnd::Detached);
        }
    }
    Ok(match has_left.load(Ordering::Relaxed) {
        true => ConsoleEnd::Detached,
        false => ConsoleEnd::GuestEnded,
    })
}

fn type_in(mut writer: UnixStream, is_terminal: bool, leaving: &AtomicBool) {
    let mut stdin = std::io::stdin();
    let mut buffer = [0; 4096];
    while let Some(count) = stdin.read(&mut buffer).ok().filter(|count| *count > 0) {
        let typed = &buffer[..count];
        let escape = typed.iter().position(|byte| is_terminal && *byte == ESCAPE);
        let typed = &typed[..escape.unwrap_or(count)];
        if writer.write_all(typed).is_err() {
            return;
        }
        if escape.is_some() {
            leaving.store(true, Ordering::Relaxed);
            writer.shutdown(std::net::Shutdown::Both).unwrap_or(());
            return;
        }
    }
}
