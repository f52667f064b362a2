//! How far two CPUs are from each other: the time that a cache line takes from one to the other and back.
//!
//! Driver and device hand each other a few lines per request, so that no rate and no latency of a quick device says anything
//! without it. A host may run a virtual machine's CPUs on one core, on two that share a cache, or on two that share none, and
//! move them while a table is being made.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use super::machine::pin;

#[derive(Default)]
struct Way {
    line: Line,
    /// One of the sides has ended.
    ended: AtomicBool,
}

/// What goes to and fro: odd numbers ask, even ones answer.
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU32);

/// Round trips that are timed as one, and how many such: their median counts.
const TRIPS: u32 = 50;
const SAMPLES: usize = 31;
/// For all of them; a CPU that has other work takes longer.
const PATIENCE: Duration = Duration::from_millis(5);

/// Nanoseconds of a round trip between two CPUs; `None` when both are one, or other work left no time for one.
pub(super) fn round_trip(cpus: (usize, usize)) -> Result<Option<f64>> {
    if cpus.0 == cpus.1 {
        return Ok(None);
    }
    let way = Way::default();
    std::thread::scope(|scope| {
        let answering = scope.spawn(|| answer(cpus.1, &way));
        let asking = scope.spawn(|| ask(cpus.0, &way));
        let panicked = |_| anyhow!("a thread panicked");
        let asked = asking.join().map_err(panicked)?;
        answering.join().map_err(panicked)??;
        let mut samples = asked?;
        samples.sort_by(f64::total_cmp);
        Ok(samples.get(samples.len() / 2).copied())
    })
}

/// However one side ends, the other one does, too.
struct Ending<'a>(&'a Way);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
    }
}

fn answer(cpu: usize, way: &Way) -> Result<()> {
    let _ending = Ending(way);
    pin(cpu)?;
    while !way.ended.load(Ordering::Relaxed) {
        let asked = way.line.0.load(Ordering::Acquire);
        if asked % 2 == 1 {
            way.line.0.store(asked + 1, Ordering::Release);
        }
    }
    Ok(())
}

/// Nanoseconds of a round trip, of each sample for which there was time.
fn ask(cpu: usize, way: &Way) -> Result<Vec<f64>> {
    let _ending = Ending(way);
    pin(cpu)?;
    let mut samples = Vec::with_capacity(SAMPLES);
    let begin = Instant::now();
    let mut answer = 0;
    // The first sample waits for the other thread to begin.
    for sample in 0..=SAMPLES {
        let from = Instant::now();
        for _ in 0..TRIPS {
            way.line.0.store(answer + 1, Ordering::Release);
            answer += 2;
            while way.line.0.load(Ordering::Acquire) != answer {
                ensure!(!way.ended.load(Ordering::Relaxed), "nobody answers");
            }
        }
        if sample > 0 {
            samples.push(from.elapsed().as_nanos() as f64 / f64::from(TRIPS));
        }
        if begin.elapsed() > PATIENCE {
            break;
        }
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_back() {
        let several = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
        let time = round_trip((0, usize::from(several))).unwrap();
        assert!(time.is_none_or(|time| time > 1.0), "{time:?}");
    }

    #[test]
    fn one_cpu_has_no_way_to_itself() {
        assert_eq!(round_trip((0, 0)).unwrap(), None);
    }

    #[test]
    fn a_cpu_that_is_not_there_ends_both_sides() {
        for cpus in [(0, 1023), (1023, 0)] {
            let error = round_trip(cpus).unwrap_err();
            assert!(
                error.to_string().contains("no thread may run on CPU 1023"),
                "{error}"
            );
        }
    }
}
