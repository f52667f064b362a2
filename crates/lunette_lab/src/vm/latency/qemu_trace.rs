//! Latencies of QEMU's own devices, from its trace events, which its log contains with timestamps.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use vm::Qmp;

/// Events for the arrival of a request, the completion of its I/O, and the interrupt.
const EVENTS: [&str; 7] = [
    "virtio_blk_handle_read",
    "virtio_blk_handle_write",
    "virtio_blk_rw_complete",
    "virtio_scsi_cmd_req",
    "virtio_scsi_cmd_resp",
    "virtio_notify",
    "virtio_notify_irqfd",
];

/// Step of the one request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    There,
    Done,
    Notified,
}

/// Latencies of requests in QEMU in nanoseconds: until their I/O completed, and until the interrupt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spans {
    pub io: Vec<u64>,
    pub whole: Vec<u64>,
}

/// Log of a traced QEMU.
pub struct QemuTrace {
    log: PathBuf,
}

impl QemuTrace {
    /// Uses a log in `folder`.
    pub fn new(folder: &Path) -> QemuTrace {
        QemuTrace {
            log: folder.join("qemu-trace.log"),
        }
    }

    /// Options of `lunette vm run` that enable the log.
    pub fn options(&self) -> Vec<String> {
        let log = self.log.display().to_string();
        let words = ["-msg", "timestamp=on", "-D", &log];
        words.map(|word| format!("--qemu-arg={word}")).to_vec()
    }

    /// Traces while `run` runs.
    pub fn around<T>(&self, monitor: &Path, run: impl FnOnce() -> Result<T>) -> Result<(T, Spans)> {
        let mut qmp = Qmp::connect(monitor)?;
        let mut set = |is_on: bool| -> Result<()> {
            for event in EVENTS {
                let state = json!({"name": event, "enable": is_on, "ignore-unavailable": true});
                qmp.command("trace-event-set-state", state)
                    .context("this QEMU has no trace events")?;
            }
            Ok(())
        };
        let begin = fs::metadata(&self.log).map_or(0, |log| log.len());
        set(true)?;
        let done = run();
        set(false)?;
        let mut text = Vec::new();
        let mut log = fs::File::open(&self.log)
            .with_context(|| format!("cannot read {}", self.log.display()))?;
        log.seek(SeekFrom::Start(begin))?;
        log.read_to_end(&mut text)?;
        Ok((done?, spans(&String::from_utf8_lossy(&text))))
    }

    pub fn remove(&self) {
        fs::remove_file(&self.log).ok();
    }
}

/// Returns the latencies in a log; other lines are ignored. Timestamps are the time of day, which may be set back.
fn spans(text: &str) -> Spans {
    let mut spans = Spans::default();
    let (mut there, mut done) = (None, false);
    for (step, at) in text.lines().filter_map(line) {
        match (step, there) {
            (Step::There, _) => (there, done) = (Some(at), false),
            (Step::Done, Some(begin)) if !done => {
                spans.io.push(at.saturating_sub(begin));
                done = true;
            }
            (Step::Notified, Some(begin)) if done => {
                spans.whole.push(at.saturating_sub(begin));
                there = None;
            }
            _ => {}
        }
    }
    spans
}

/// Parses `4242@1700000000.123456:virtio_blk_rw_complete vdev 0x5 req 0x7 ret 0`; the time is in nanoseconds.
fn line(line: &str) -> Option<(Step, u64)> {
    let (_, rest) = line.split_once('@')?;
    let (time, event) = rest.split_once(':')?;
    let (seconds, micros) = time.split_once('.')?;
    let step = match event.split_whitespace().next()? {
        "virtio_blk_handle_read" | "virtio_blk_handle_write" | "virtio_scsi_cmd_req" => Step::There,
        "virtio_blk_rw_complete" | "virtio_scsi_cmd_resp" => Step::Done,
        "virtio_notify" | "virtio_notify_irqfd" => Step::Notified,
        _ => return None,
    };
    let seconds: u64 = seconds.parse().ok()?;
    let micros: u64 = micros.parse().ok().filter(|micros| *micros < 1_000_000)?;
    let at = seconds.checked_mul(1_000_000)?.checked_add(micros)?;
    Some((step, at.checked_mul(1000)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Log of QEMU 7.2.
    const LOG: &str = "\
4242@1700000000.000100:virtio_notify vdev 0x1 vq 0x2
4242@1700000000.000200:virtio_blk_handle_read vdev 0x5 req 0x7 sector 0 nsectors 8
4242@1700000000.000250:virtio_notify vdev 0x1 vq 0x2
qemu-system-x86_64: warning: something else
4242@1700000000.000300:virtio_blk_rw_complete vdev 0x5 req 0x7 ret 0
4242@1700000000.000320:virtio_notify_irqfd vdev 0x5 vq 0x9
4242@1700000001.999900:virtio_scsi_cmd_req virtio_scsi_cmd_req target=0 lun=0 tag=0x1 cmd=0x28
4242@1700000002.000100:virtio_scsi_cmd_resp virtio_scsi_cmd_resp target=0 lun=0 tag=0x1 response=0 status=0
4242@1700000002.000150:virtio_notify vdev 0x5 vq 0x9
";

    #[test]
    fn a_request_ends_with_the_first_interrupt_behind_its_io() {
        let expected = Spans {
            io: vec![100_000, 200_000],
            whole: vec![120_000, 250_000],
        };
        assert_eq!(spans(LOG), expected);
        assert_eq!(
            spans("1@2.x:virtio_notify\n@:\n1@2.1234567:virtio_notify\n"),
            Spans::default()
        );
    }
}
