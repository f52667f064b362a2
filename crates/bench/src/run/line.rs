//! Round-trip time of a cache line between two CPUs.
//!
//! Driver and device exchange a few cache lines per request, so rates and latencies of a fast device depend on this time. A host may run
//! a virtual machine's CPUs on one core, on two that share a cache, or on two that share none, and may migrate them during a measurement.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use super::machine::pin;

#[derive(Default)]
struct Exchange {
    line: Line,
    /// One side has ended.
    ended: AtomicBool,
}

/// The exchanged counter: odd values are requests, even values are responses.
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU32);

/// Round trips per sample and number of samples; the median counts.
const TRIPS: u32 = 50;
const SAMPLES: usize = 31;
/// Timeout for all samples; a CPU with other load takes longer.
const PATIENCE: Duration = Duration::from_millis(5);

/// Returns nanoseconds of a round trip between two CPUs; `None` if they are the same, or if other load left no time for a sample.
pub(super) fn round_trip(cpus: (usize, usize)) -> Result<Option<f64>> {
    if cpus.0 == cpus.1 {
        return Ok(None);
    }
    let exchange = Exchange::default();
    std::thread::scope(|scope| {
        let answering = scope.spawn(|| answer(cpus.1, &exchange));
        let asking = scope.spawn(|| ask(cpus.0, &exchange));
        let panicked = |_| anyhow!("a measuring thread panicked");
        let asked = asking.join().map_err(panicked)?;
        answering.join().map_err(panicked)??;
        let mut samples = asked?;
        samples.sort_by(f64::total_cmp);
        Ok(samples.get(samples.len() / 2).copied())
    })
}

/// Ends the other side when this side ends.
struct Ending<'a>(&'a Exchange);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
    }
}

fn answer(cpu: usize, exchange: &Exchange) -> Result<()> {
    let _ending = Ending(exchange);
    pin(cpu)?;
    while !exchange.ended.load(Ordering::Relaxed) {
        let asked = exchange.line.0.load(Ordering::Acquire);
        if asked % 2 == 1 {
            exchange.line.0.store(asked + 1, Ordering::Release);
        }
    }
    Ok(())
}

/// Returns nanoseconds per round trip for each completed sample.
fn ask(cpu: usize, exchange: &Exchange) -> Result<Vec<f64>> {
    let _ending = Ending(exchange);
    pin(cpu)?;
    let mut samples = Vec::with_capacity(SAMPLES);
    let begin = Instant::now();
    let mut answer = 0;
    // The first sample includes the start of the other thread.
    for sample in 0..=SAMPLES {
        let from = Instant::now();
        for _ in 0..TRIPS {
            exchange.line.0.store(answer + 1, Ordering::Release);
            answer += 2;
            while exchange.line.0.load(Ordering::Acquire) != answer {
                ensure!(
                    !exchange.ended.load(Ordering::Relaxed),
                    "no thread responds"
                );
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
                error
                    .to_string()
                    .contains("threads are not allowed to run on CPU 1023"),
                "{error}"
            );
        }
    }
}
