//! Entries of fio's log files: one per request, or one per interval and direction.

use std::time::Duration;

use latency::{Clock, Stamp};

use crate::driver::IoKind;

/// One line of a log file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Milliseconds since the start.
    pub millis: u64,
    /// 0 reads, 1 writes, 2 flushes, 3 discards.
    pub direction: u8,
    /// Number of requests.
    pub ios: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Mean latency in nanoseconds.
    pub latency_ns: u64,
    /// Disk offset of a single request.
    pub offset: u64,
    /// Length of the interval in nanoseconds.
    pub span_ns: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    ios: u64,
    bytes: u64,
    ticks: u64,
}

/// Collector of log entries.
#[derive(Debug)]
pub struct Logger {
    clock: Clock,
    since: Stamp,
    /// Ticks per line; 0: a line per request.
    span: u64,
    next: u64,
    sums: [Sum; 4],
    entries: Vec<LogEntry>,
}

impl Logger {
    /// Creates a logger with one line per `average`, or one line per request.
    pub fn new(average: Option<Duration>, clock: &Clock) -> Logger {
        Logger {
            clock: clock.clone(),
            since: Stamp(0),
            span: average.map_or(0, |time| clock.ticks(time)),
            next: 0,
            sums: [Sum::default(); 4],
            entries: Vec::with_capacity(1 << 16),
        }
    }

    /// Clears all entries and starts the time at `now`.
    pub fn begin(&mut self, now: Stamp) {
        self.since = now;
        self.next = now.0 + self.span;
        self.sums = Default::default();
        self.entries.clear();
    }

    /// Records a request.
    pub fn record(&mut self, now: Stamp, ask: IoKind, offset: u64, length: u32, ticks: u64) {
        if self.span == 0 {
            let nanos = self.clock.nanos(ticks);
            self.entries.push(LogEntry {
                millis: self.clock.nanos(now.since(self.since)) / 1_000_000,
                direction: ask as u8,
                ios: 1,
                bytes: u64::from(length),
                latency_ns: nanos,
                offset,
                span_ns: nanos,
            });
            return;
        }
        while now.0 >= self.next {
            self.close(Stamp(self.next), self.span);
            self.next += self.span;
        }
        let sum = &mut self.sums[ask as usize];
        sum.ios += 1;
        sum.bytes += u64::from(length);
        sum.ticks += ticks;
    }

    fn close(&mut self, at: Stamp, span: u64) {
        for (sum, direction) in self.sums.iter_mut().zip(0u8..) {
            let sum = std::mem::take(sum);
            if sum.ios > 0 {
                self.entries.push(LogEntry {
                    millis: self.clock.nanos(at.since(self.since)) / 1_000_000,
                    direction,
                    ios: sum.ios,
                    bytes: sum.bytes,
                    latency_ns: self.clock.nanos(sum.ticks / sum.ios),
                    offset: 0,
                    span_ns: self.clock.nanos(span),
                });
            }
        }
    }

    /// Returns all entries.
    pub fn finish(mut self) -> Vec<LogEntry> {
        if self.span > 0 {
            self.close(Stamp(self.next), self.span);
        }
        self.entries
    }
}
