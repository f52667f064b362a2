//! Progress line on the terminal, and optional heartbeats.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::bar::Bar;
use crate::drive::Shared;
use crate::report::{per_second, rate};

/// First words of the lines of progress that a load generator in a guest prints on stderr.
pub const PROGRESS_MARK: &str = "progress: ";

/// Line that a load generator in a guest prints on stderr after its first completed request.
pub const STARTED_MARK: &str = "started: the first request has completed";

/// Rates since the last heartbeat.
#[derive(Clone, Copy, Debug)]
pub struct Beat {
    /// Duration of the phase so far.
    pub elapsed: Duration,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bandwidth: f64,
    /// Remaining time, if the jobs limit it.
    pub left: Option<Duration>,
}

impl fmt::Display for Beat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (elapsed, iops) = (self.elapsed.as_secs_f64(), rate(self.iops));
        let bandwidth = per_second(self.bandwidth);
        write!(f, "{elapsed:.0} s, {iops} IOPS, {bandwidth}")?;
        match self.left {
            Some(left) => write!(f, ", {:.0} s left", left.as_secs_f64()),
            None => Ok(()),
        }
    }
}

/// Output of a heartbeat.
type PrintBeat = Box<dyn Fn(&Beat) + Send + Sync>;

/// Action after the first completed request.
type OnStart = Box<dyn FnOnce() + Send>;

/// Progress output on stderr.
pub struct Progress {
    bar: Bar,
    /// Alternative output of heartbeats.
    beat: Option<PrintBeat>,
    heartbeat: Option<Duration>,
    /// Action after the first completed request, until it was called.
    on_start: Mutex<Option<OnStart>>,
    last: Mutex<(Duration, u64, u64)>,
    notes: AtomicU32,
}

impl Progress {
    /// Creates a progress line if stderr is a terminal; `heartbeat` adds periodic lines on any output.
    pub fn new(heartbeat: Option<Duration>) -> Progress {
        Progress {
            bar: Bar::on_stderr(),
            heartbeat,
            ..Progress::silent()
        }
    }

    /// Creates heartbeats only, printed by `beat`.
    pub fn heartbeats(every: Duration, beat: impl Fn(&Beat) + Send + Sync + 'static) -> Progress {
        let mut progress = Progress::silent();
        progress.beat = Some(Box::new(beat));
        progress.heartbeat = Some(every);
        progress
    }

    /// Creates a progress without output that calls `action` after the first completed request.
    pub fn on_start(action: impl FnOnce() + Send + 'static) -> Progress {
        let mut progress = Progress::silent();
        progress.on_start = Mutex::new(Some(Box::new(action)));
        progress
    }

    /// Creates a progress without output.
    pub fn silent() -> Progress {
        Progress {
            bar: Bar::hidden(),
            beat: None,
            heartbeat: None,
            on_start: Mutex::default(),
            last: Mutex::default(),
            notes: AtomicU32::new(0),
        }
    }

    /// Shows the progress of one phase.
    pub fn show(&self, title: &str, elapsed: Duration, longest: Option<Duration>, shared: &Shared) {
        let (ios, bytes) = (
            shared.ios.load(Ordering::Relaxed),
            shared.bytes.load(Ordering::Relaxed),
        );
        if ios > 0 {
            let action = self.on_start.lock().ok();
            if let Some(action) = action.and_then(|mut action| action.take()) {
                action();
            }
        }
        let Ok(mut last) = self.last.lock() else {
            return;
        };
        if elapsed < last.0 {
            *last = (Duration::ZERO, 0, 0);
        }
        let span = elapsed.saturating_sub(last.0).as_secs_f64();
        let every = self.heartbeat.map_or(0.5, |every| every.as_secs_f64());
        if span < every {
            self.bar.tick();
            return;
        }
        let (iops, bandwidth) = (
            ios.saturating_sub(last.1) as f64 / span,
            bytes.saturating_sub(last.2) as f64 / span,
        );
        *last = (elapsed, ios, bytes);
        let beat = Beat {
            elapsed,
            iops,
            bandwidth,
            left: longest.map(|longest| longest.saturating_sub(elapsed)),
        };
        if let Some(print) = &self.beat {
            return print(&beat);
        }
        let line = format!("{title}: {beat}");
        if self.heartbeat.is_some() {
            self.print(&line);
        } else {
            self.bar.show(&line);
        }
    }

    /// Prints a line about a disturbance; only the first few are printed.
    pub fn note(&self, line: &str) {
        const PRINTED_MAX: u32 = 4;
        let notes = self.notes.fetch_add(1, Ordering::Relaxed);
        if notes < PRINTED_MAX {
            self.print(line);
        } else if notes == PRINTED_MAX {
            self.print("further disturbances are only counted");
        }
    }

    /// Prints a line on stderr.
    pub fn print(&self, line: &str) {
        self.bar.print(line);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn the_start_is_reported_once_after_the_first_request() {
        let count = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&count);
        let progress = Progress::on_start(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        let shared = Shared::default();
        let show = || progress.show("job", Duration::from_secs(1), None, &shared);
        show();
        assert_eq!(count.load(Ordering::Relaxed), 0);
        shared.ios.store(1, Ordering::Relaxed);
        show();
        show();
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
