//! Host side of the command port of a guest; `crates/guest_agent/src/agent.rs` describes the messages.

use crate::interrupt::interrupted;
use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum length of a script: the input queue of a serial port in the guest holds 4096 bytes.
const SCRIPT_MAX: usize = 3500;

/// Interval at which a wait checks for an interruption.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Time limit for the last messages of a QEMU that has ended.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Result of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Exit code, 128 + n after signal n.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// A running script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Running {
    id: u64,
    boot: u32,
}

/// Connection to the agent of one guest.
pub struct Agent {
    stream: UnixStream,
    next_id: u64,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    boots: u32,
    results: HashMap<u64, Output>,
    closed: Option<String>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until `condition` returns a value. Returns an error if the port closes or the limit expires.
    fn wait<T>(
        &self,
        limit: Duration,
        operation: &str,
        mut condition: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        let end = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if let Some(value) = condition(&mut state) {
                return Ok(value);
            }
            if let Some(reason) = &state.closed {
                bail!("{operation}: the guest has ended: {reason}");
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || interrupted() {
                bail!("{operation}: no response within {limit:?}");
            }
            state = self
                .changed
                .wait_timeout(state, left.min(POLL_INTERVAL))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Agent {
    /// Creates the connection; `stream` leads to the guest's second serial port.
    pub fn new(stream: UnixStream) -> Result<Agent> {
        let shared = Arc::new(Shared::default());
        let reader = stream.try_clone()?;
        std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let reason = match receive(BufReader::new(reader), &shared) {
                    Ok(()) => "its port closed".to_owned(),
                    Err(error) => format!("{error:#}"),
                };
                shared.change(|state| state.closed = Some(reason));
            }
        });
        Ok(Agent {
            stream,
            next_id: 1,
            shared,
        })
    }

    /// Adopts the script numbers and results of the agent's previous connection, after a migration of the guest. The previous QEMU has
    /// ended.
    pub fn continue_from(&mut self, before: &Agent) {
        self.next_id = before.next_id;
        let mut old = before.shared.lock();
        let end = Instant::now() + CLOSE_LIMIT;
        while old.closed.is_none() && Instant::now() < end {
            let waited = before.shared.changed.wait_timeout(old, POLL_INTERVAL);
            old = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let (boots, results) = (old.boots, std::mem::take(&mut old.results));
        drop(old);
        self.shared.change(|state| {
            state.boots += boots;
            state.results.extend(results);
        });
    }

    /// Returns the number of starts of the guest's agent.
    pub fn boots(&self) -> u32 {
        self.shared.lock().boots
    }

    /// Waits until the agent has started `boots` times.
    pub fn wait_for_boot(&self, boots: u32, limit: Duration) -> Result<()> {
        self.shared
            .wait(limit, "waiting for the guest's agent", |state| {
                (state.boots >= boots).then_some(())
            })
    }

    /// Starts a script.
    pub fn start(&mut self, script: &str) -> Result<Running> {
        if script.len() > SCRIPT_MAX {
            bail!(
                "a script of {} bytes is too long for the serial port, the maximum is {SCRIPT_MAX}",
                script.len()
            );
        }
        let id = self.next_id;
        self.next_id += 1;
        self.stream
            .write_all(format!("RUN {id} {}\n{script}", script.len()).as_bytes())
            .context("cannot write to the guest's port")?;
        Ok(Running {
            id,
            boot: self.boots(),
        })
    }

    /// Waits for the end of a script. Returns an error if the guest reboots meanwhile.
    pub fn wait(&self, running: Running, limit: Duration) -> Result<Output> {
        self.shared
            .wait(limit, "waiting for a script's end", |state| {
                match state.results.remove(&running.id) {
                    Some(output) => Some(Ok(output)),
                    None if state.boots > running.boot => Some(Err(anyhow::anyhow!(
                        "the guest rebooted while a script ran in it"
                    ))),
                    None => None,
                }
            })?
    }

    /// Returns the result of a script, `None` while it runs.
    pub fn poll(&self, running: Running) -> Option<Output> {
        self.shared.lock().results.remove(&running.id)
    }
}

fn receive(mut port: impl BufRead, shared: &Shared) -> Result<()> {
    let mut line = Vec::new();
    loop {
        line.clear();
        if port.read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&line);
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[..] {
            ["READY"] => shared.change(|state| state.boots += 1),
            ["END", id, code, stdout, stderr] => {
                let stdout = take(&mut port, stdout.parse()?)?;
                let stderr = take(&mut port, stderr.parse()?)?;
                let (id, code) = (id.parse()?, code.parse()?);
                shared.change(|state| {
                    state.results.insert(
                        id,
                        Output {
                            code,
                            stdout,
                            stderr,
                        },
                    );
                });
            }
            // A port that is reset with the machine may send a few stray bytes before the next READY.
            _ if text.trim_end().ends_with("READY") => shared.change(|state| state.boots += 1),
            _ => {}
        }
    }
}

fn take(port: &mut impl BufRead, length: usize) -> Result<String> {
    let mut bytes = vec![0; length];
    port.read_exact(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn pair() -> (Agent, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Agent::new(ours).unwrap(), theirs)
    }

    #[test]
    fn scripts_end_in_any_order() {
        let (mut agent, mut guest) = pair();
        guest.write_all(b"READY\n").unwrap();
        agent.wait_for_boot(1, SOON).unwrap();
        let (first, second) = (
            agent.start("sleep 1").unwrap(),
            agent.start("true").unwrap(),
        );
        guest.write_all(b"END 2 0 3 0\nEND").unwrap();
        guest.write_all(b"END 1 7 0 4\nlate").unwrap();
        assert_eq!(agent.wait(second, SOON).unwrap().stdout, "END");
        assert_eq!(
            agent.wait(first, SOON).unwrap(),
            Output {
                code: 7,
                stdout: String::new(),
                stderr: "late".into()
            }
        );
    }

    #[test]
    fn a_reboot_ends_the_wait_for_a_script() {
        let (mut agent, mut guest) = pair();
        let running = agent.start("sleep 1000").unwrap();
        guest.write_all(b"\0READY\n").unwrap();
        assert!(
            agent
                .wait(running, SOON)
                .unwrap_err()
                .to_string()
                .contains("rebooted")
        );
    }

    #[test]
    fn a_closed_port_ends_the_wait() {
        let (agent, guest) = pair();
        drop(guest);
        assert!(
            agent
                .wait_for_boot(1, SOON)
                .unwrap_err()
                .to_string()
                .contains("ended")
        );
    }
}
