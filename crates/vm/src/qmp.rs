//! Client for the QEMU Machine Protocol: one command, one response; events in between are skipped.

use crate::process::wait_until;
use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// An open QMP connection.
pub struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    deleted: Vec<String>,
    /// An event about the guest or its migration has arrived since the last [`Qmp::wait_for_change`].
    has_changed: bool,
}

impl Qmp {
    /// Connects and leaves the negotiation mode.
    pub fn connect(path: &Path) -> Result<Qmp> {
        let writer = UnixStream::connect(path)
            .with_context(|| format!("cannot connect to {}", path.display()))?;
        writer.set_read_timeout(Some(Duration::from_secs(120)))?;
        let mut qmp = Qmp {
            reader: BufReader::new(writer.try_clone()?),
            writer,
            deleted: Vec::new(),
            has_changed: false,
        };
        qmp.message()?;
        qmp.command("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command. Returns its `return` value.
    pub fn command(&mut self, name: &str, arguments: Value) -> Result<Value> {
        let request = json!({ "execute": name, "arguments": arguments });
        writeln!(self.writer, "{request}")?;
        loop {
            let mut answer = self.message()?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU refused {name}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    /// Returns true if the guest runs.
    pub fn is_running(&mut self) -> Result<bool> {
        let state = self.command("query-status", json!({}))?;
        Ok(state["running"] == true)
    }

    /// Waits until the guest runs. Fails if its QEMU ends.
    pub fn wait_until_running(&mut self, limit: Duration) -> Result<()> {
        let runs = wait_until(limit, || match self.is_running() {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(error) => Some(Err(error)),
        });
        runs.context("the guest does not run")?
    }

    /// Waits for an event. Returns its data.
    pub fn wait_for_event(&mut self, name: &str) -> Result<Value> {
        loop {
            let mut message = self
                .message()
                .with_context(|| format!("waiting for the event {name}"))?;
            if message.get("event").and_then(Value::as_str) == Some(name) {
                return Ok(message.get_mut("data").map(Value::take).unwrap_or_default());
            }
        }
    }

    /// Waits until the guest has stopped or continued, or its migration has another state, since the last call. Returns at the limit and after
    /// a signal, too. Migrations have events with the capability `events` only.
    pub fn wait_for_change(&mut self, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        while !std::mem::take(&mut self.has_changed) {
            let left = end.saturating_duration_since(Instant::now());
            match self.is_readable(left) {
                Ok(true) => self.message()?,
                Ok(false) | Err(Errno::INTR) => break,
                Err(error) => return Err(error.into()),
            };
        }
        Ok(())
    }

    /// Waits until a device is deleted. Returns `false` after the limit.
    pub fn wait_for_deletion(&mut self, id: &str, limit: Duration) -> Result<bool> {
        let end = Instant::now() + limit;
        loop {
            if self.deleted.iter().any(|deleted| deleted == id) {
                self.deleted.retain(|deleted| deleted != id);
                return Ok(true);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.is_readable(left)? {
                return Ok(false);
            }
            self.message()?;
        }
    }

    fn is_readable(&self, limit: Duration) -> Result<bool, Errno> {
        if !self.reader.buffer().is_empty() {
            return Ok(true);
        }
        let mut polled = [PollFd::new(&self.writer, PollFlags::IN)];
        let limit = Timespec::try_from(limit).map_err(|_| Errno::INVAL)?;
        Ok(poll(&mut polled, Some(&limit))? > 0)
    }

    fn message(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self
            .reader
            .read_line(&mut line)
            .context("no response from QEMU's monitor")?
            == 0
        {
            bail!("QEMU closed its monitor");
        }
        let message: Value = serde_json::from_str(&line)?;
        // An event may precede the response of the command that caused it.
        match message["event"].as_str() {
            Some("DEVICE_DELETED") => {
                let id = message["data"]["device"].as_str();
                self.deleted.extend(id.map(str::to_owned));
            }
            Some("MIGRATION" | "STOP" | "RESUME") => self.has_changed = true,
            _ => {}
        }
        Ok(message)
    }
}
