//! Time that the calling thread was ready to run while other threads used its CPU, as the kernel's scheduler counts it.
//!
//! A thread needs no privilege to read its own counters. The time includes waits for the CPU quota of a control group.

use std::fs::File;

/// Run delay that is assumed for each involuntary context switch if the kernel does not measure it, in nanoseconds: a time slice.
const DELAY_OF_SWITCH_NS: u64 = 3_000_000;

/// Counters since the thread started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunDelay {
    /// Time on a run queue without running, in nanoseconds.
    pub waited_ns: u64,
    /// Number of times that the thread began to run.
    pub runs: u64,
}

/// Reads the run delay of the thread that opened it.
#[derive(Debug)]
pub struct RunDelayReader {
    /// `schedstat` of the thread. `None`: the kernel does not provide it.
    schedstat: Option<File>,
}

impl RunDelayReader {
    /// Opens the counters of the calling thread. Must be called before the thread is confined.
    pub fn open() -> RunDelayReader {
        RunDelayReader {
            schedstat: File::open("/proc/thread-self/schedstat").ok(),
        }
    }

    /// Reads the counters with one system call. Without `schedstat`, estimates the delay from involuntary context switches.
    pub fn read(&self) -> RunDelay {
        let Some(file) = &self.schedstat else {
            return estimated();
        };
        let mut text = [0; 80];
        let length = rustix::io::pread(file, &mut text, 0).unwrap_or(0);
        parse(&text[..length.min(text.len())]).unwrap_or_default()
    }
}

/// Parses "time running, run delay, number of runs".
fn parse(text: &[u8]) -> Option<RunDelay> {
    let mut numbers = std::str::from_utf8(text).ok()?.split_ascii_whitespace();
    let waited_ns = numbers.nth(1)?.parse().ok()?;
    let runs = numbers.next()?.parse().ok()?;
    Some(RunDelay { waited_ns, runs })
}

fn estimated() -> RunDelay {
    // SAFETY: all bytes zero is a valid value of this C structure, which consists of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is writable and outlives the call.
    if unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) } != 0 {
        return RunDelay::default();
    }
    RunDelay {
        waited_ns: u64::try_from(usage.ru_nivcsw)
            .map_or(0, |switches| switches * DELAY_OF_SWITCH_NS),
        runs: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedstat_has_run_delay_and_runs() {
        let parsed = parse(b"1002003 50274 17\n");
        let expected = RunDelay {
            waited_ns: 50_274,
            runs: 17,
        };
        assert_eq!(parsed, Some(expected));
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"1 x 3"), None);
    }

    #[test]
    fn run_delay_of_this_thread_never_decreases() {
        for reader in [RunDelayReader::open(), RunDelayReader { schedstat: None }] {
            let before = reader.read();
            for _ in 0..100 {
                std::thread::yield_now();
            }
            let after = reader.read();
            assert!(after.waited_ns >= before.waited_ns && after.runs >= before.runs);
        }
    }
}
