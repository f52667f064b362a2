//! A guest's console: what it prints goes to all who look on, what they type goes to it, and the last of it is remembered.

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

/// Bytes that are remembered.
const REMEMBERED: usize = 64 << 10;
/// Bytes that may wait for one who looks on; who is slower is sent away.
const WAITING_MAX: usize = 1 << 20;
/// Ctrl-], as telnet and `virsh console` have it.
const ESCAPE: u8 = 0x1d;
const LINES_SHOWN: usize = 40;

/// The supervisor's end.
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
    /// A console whose guest comes later; `copy` gets all that it prints.
    pub fn new(copy: Option<File>) -> Console {
        let console = Console::default();
        console.lock().copy = copy;
        console
    }

    /// The guest's end.
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

    /// Takes clients until the listener fails.
    pub fn serve(&self, listener: UnixListener) {
        let console = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let console = console.clone();
                std::thread::spawn(move || console.serve_client(stream));
            }
        });
    }

    /// The last lines, with a heading.
    pub fn tail(&self, name: &str) -> String {
        let state = self.lock();
        let bytes: Vec<u8> = state.remembered.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes).replace('\r', "");
        let lines: Vec<&str> = text.lines().collect();
        if lines.is_empty() {
            return format!("--- guest {name} has printed nothing on its console ---");
        }
        let last = &lines[lines.len().saturating_sub(LINES_SHOWN)..];
        format!(
            "--- the end of guest {name}'s console ---\n{}\n--- end ---",
            last.join("\n")
        )
    }

    /// The guest has ended: all who look on are sent away, with what they have not seen.
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
            // A full disk is no reason to end a guest.
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
            // Without the lock: a guest may be slow to read.
            if let Some(mut guest) = guest {
                guest.write_all(&buffer[..count]).unwrap_or(());
            }
        }
        // Who only writes, as a pipe does, still reads what comes of it: the outbox ends with the connection.
    }
}

/// Why a user no longer looks at a console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    /// Ctrl-] was typed.
    Left,
    /// The other side has ended.
    Ended,
}

/// A terminal that passes every key on, until this is dropped.
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
        // Of what other threads print, lines still begin at the left.
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

/// Joins stdin and stdout to a console's socket, or a monitor's, until either ends.
pub fn attach(socket: &Path) -> Result<Attached> {
    let stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    let terminal = RawTerminal::new()?;
    let is_terminal = terminal.0.is_some();
    let has_left = Arc::new(AtomicBool::new(false));
    let writer = stream.try_clone()?;
    let leaving = Arc::clone(&has_left);
    // Not waited for: a read from a terminal ends when somebody types.
    std::thread::spawn(move || type_in(writer, is_terminal, &leaving));
    let mut reader = stream;
    let mut stdout = std::io::stdout();
    let mut buffer = [0; 4096];
    while let Some(count) = reader.read(&mut buffer).ok().filter(|count| *count > 0) {
        let written = stdout.write_all(&buffer[..count]);
        if written.and_then(|()| stdout.flush()).is_err() {
            return Ok(Attached::Left);
        }
    }
    Ok(match has_left.load(Ordering::Relaxed) {
        true => Attached::Left,
        false => Attached::Ended,
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
