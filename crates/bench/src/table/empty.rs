//! Cost of kick and interrupt alone: one request at a time on a device that sleeps until a kick and only interrupts. It is a lower bound
//! for the CPU time of devices that sleep between requests.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::drive::cpu_time;
use crate::run::{pin, spread};

/// One exchange.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// Duration in seconds.
    pub time: f64,
    /// CPU seconds of the device.
    pub cpu: f64,
}

const ONE: [u8; 8] = 1u64.to_ne_bytes();
/// Timeout for an interrupt.
const PATIENCE: Duration = Duration::from_secs(10);

struct Wires {
    /// The device ends after the next kick.
    end: AtomicBool,
    kick: OwnedFd,
    call: OwnedFd,
}

/// Returns the medians of `turns` turns, with the driver on the first CPU and the device on the second one.
pub fn exchanges(cpus: (usize, usize), turns: u32, turn: Duration) -> Result<Exchange> {
    // Checks both CPUs first, so that neither thread waits for one that cannot start.
    let pinned = std::thread::spawn(move || pin(cpus.0).and_then(|()| pin(cpus.1)));
    pinned
        .join()
        .map_err(|_| anyhow!("a measuring thread panicked"))??;
    let each = |_| exchange(cpus, turn);
    let all = (0..turns).map(each).collect::<Result<Vec<_>>>()?;
    let median = |of: fn(&Exchange) -> f64| {
        let values: Vec<f64> = all.iter().map(of).collect();
        spread(&values).median
    };
    Ok(Exchange {
        time: median(|one| one.time),
        cpu: median(|one| one.cpu),
    })
}

fn exchange(cpus: (usize, usize), turn: Duration) -> Result<Exchange> {
    let wires = Wires {
        end: AtomicBool::new(false),
        kick: eventfd(0, EventfdFlags::CLOEXEC)?,
        call: eventfd(0, EventfdFlags::CLOEXEC)?,
    };
    std::thread::scope(|scope| {
        let device = scope.spawn(|| device(cpus.1, &wires));
        let driver = scope.spawn(|| drive(cpus.0, &wires, turn));
        let join = || anyhow!("a measuring thread panicked");
        let driven = driver.join().map_err(|_| join())?;
        let cpu = device.join().map_err(|_| join())??;
        let (exchanges, time) = driven?;
        let each = |nanos: f64| nanos / 1e9 / exchanges as f64;
        Ok(Exchange {
            time: each(time.as_nanos() as f64),
            cpu: each(cpu as f64),
        })
    })
}

/// Answers kicks until `end` is set. Returns its CPU time in nanoseconds, from the first kick to the last.
fn device(cpu: usize, wires: &Wires) -> Result<u64> {
    pin(cpu)?;
    let mut first = None;
    loop {
        rustix::io::read(&wires.kick, &mut [0; 8])?;
        let now = cpu_time();
        let used = now - *first.get_or_insert(now);
        let end = wires.end.load(Ordering::Acquire);
        rustix::io::write(&wires.call, &ONE)?;
        if end {
            return Ok(used);
        }
    }
}

/// Kicks for the time `turn` and ends the device with the last request. Returns the number of exchanges and their duration, which
/// contains the device's CPU time.
fn drive(cpu: usize, wires: &Wires, turn: Duration) -> Result<(u64, Duration)> {
    let asked = ask(cpu, wires, turn);
    if asked.is_err() {
        wires.end.store(true, Ordering::Release);
        rustix::io::write(&wires.kick, &ONE)?;
    }
    asked
}

fn ask(cpu: usize, wires: &Wires, turn: Duration) -> Result<(u64, Duration)> {
    pin(cpu)?;
    let patience = Timespec::try_from(PATIENCE)?;
    let (mut exchanges, begin) = (0, Instant::now());
    loop {
        exchanges += 1;
        let last = begin.elapsed() >= turn;
        wires.end.store(last, Ordering::Release);
        rustix::io::write(&wires.kick, &ONE)?;
        let called = loop {
            match poll(
                &mut [PollFd::new(&wires.call, PollFlags::IN)],
                Some(&patience),
            ) {
                Err(Errno::INTR) => {}
                called => break called?,
            }
        };
        ensure!(called > 0, "no interrupt within {} s", PATIENCE.as_secs());
        rustix::io::read(&wires.call, &mut [0; 8])?;
        if last {
            return Ok((exchanges, begin.elapsed()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_answers_and_ends() {
        let one = exchanges((0, 0), 2, Duration::from_millis(5)).unwrap();
        assert!(0.0 < one.cpu && one.cpu < one.time, "{one:?}");
    }

    #[test]
    fn a_cpu_that_is_not_there_is_said() {
        let error = exchanges((0, 1023), 1, Duration::from_millis(1)).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("threads are not allowed to run on CPU 1023"),
            "{error}"
        );
    }
}
