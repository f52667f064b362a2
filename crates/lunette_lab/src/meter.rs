//! Progress of a transfer, on stderr if it is a terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_millis(250);

/// Progress and rate of a transfer.
pub struct Meter {
    begun: Instant,
    shown: Instant,
    total: Option<u64>,
    done: u64,
    is_shown: bool,
}

impl Meter {
    /// Starts a meter for `total` bytes, if known.
    pub fn new(total: Option<u64>, quiet: bool) -> Meter {
        let now = Instant::now();
        Meter {
            begun: now,
            shown: now,
            total,
            done: 0,
            is_shown: !quiet && std::io::stderr().is_terminal(),
        }
    }

    pub fn add(&mut self, bytes: u64) {
        self.done += bytes;
        if !self.is_shown || self.shown.elapsed() < INTERVAL {
            return;
        }
        self.shown = Instant::now();
        let share = match self.total {
            Some(total) if total > 0 => {
                format!("{:5.1} %", self.done as f64 * 100.0 / total as f64)
            }
            _ => format!("{} MiB", self.done >> 20),
        };
        let mut stderr = cli_common::stderr();
        stderr.control("\r").ok();
        write!(stderr, "{share}  {:8.1} MB/s ", self.rate()).ok();
    }

    fn rate(&self) -> f64 {
        self.done as f64 / 1e6 / self.begun.elapsed().as_secs_f64().max(1e-9)
    }

    /// Returns the summary: bytes, time and rate.
    pub fn end(&self) -> String {
        if self.is_shown {
            cli_common::stderr().control("\r\x1b[K").ok();
        }
        let seconds = self.begun.elapsed().as_secs_f64();
        format!(
            "{} bytes in {seconds:.2} s, {:.1} MB/s",
            self.done,
            self.rate()
        )
    }
}
