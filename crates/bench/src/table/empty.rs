//! What an interrupt costs by itself: one request at a time between a driver that waits for its interrupt and a device that does
//! nothing but send it. No device that interrupts can be quicker, nor take less CPU time.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::drive::cpu_time;
use crate::run::spread;

/// How the device learns of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learns {
    /// It looks at memory again and again.
    Polling,
    /// It sleeps until it is kicked.
    Kicked,
}

/// One exchange.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// Seconds that it takes.
    pub time: f64,
    /// CPU seconds of the device.
    pub cpu: f64,
}

/// The word that tells the device to end.
const END: u64 = u64::MAX;
const ONE: [u8; 8] = 1u64.to_ne_bytes();
/// An interrupt that has not come by then does not come.
const PATIENCE: Duration = Duration::from_secs(10);

struct Wires {
    /// Requests so far.
    word: AtomicU64,
    kick: OwnedFd,
    call: OwnedFd,
}

/// Medians of so many turns, of one of either kind after the other: polling, then kicked.
pub fn exchanges(cpus: (usize, usize), turns: u32, turn: Duration) -> Result<[Exchange; 2]> {
    // Before one thread waits for another that cannot begin.
    let pinned = std::thread::spawn(move || pin(cpus.0).and_then(|()| pin(cpus.1)));
    pinned.join().map_err(|_| anyhow!("a thread panicked"))??;
    let mut all = [Vec::new(), Vec::new()];
    for _ in 0..turns {
        for (kind, all) in [Learns::Polling, Learns::Kicked].into_iter().zip(&mut all) {
            all.push(exchange(kind, cpus, turn)?);
        }
    }
    Ok(all.map(|turns| {
        let median = |of: fn(&Exchange) -> f64| {
            let values: Vec<f64> = turns.iter().map(of).collect();
            spread(&values).median
        };
        Exchange {
            time: median(|one| one.time),
            cpu: median(|one| one.cpu),
        }
    }))
}

/// One turn, with the driver on the first CPU and the device on the second one.
fn exchange(kind: Learns, cpus: (usize, usize), turn: Duration) -> Result<Exchange> {
    let wires = Wires {
        word: AtomicU64::new(0),
        kick: eventfd(0, EventfdFlags::CLOEXEC)?,
        call: eventfd(0, EventfdFlags::CLOEXEC)?,
    };
    std::thread::scope(|scope| {
        let device = scope.spawn(|| device(kind, cpus.1, &wires));
        let driver = scope.spawn(|| drive(kind, cpus.0, &wires, turn));
        let join = || anyhow!("a thread panicked");
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

fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("there is no CPU {cpu}"))
}

/// Answers until it is told to end; gives its CPU time in nanoseconds.
fn device(kind: Learns, cpu: usize, wires: &Wires) -> Result<u64> {
    pin(cpu)?;
    let (mut seen, before) = (0, cpu_time());
    loop {
        if kind == Learns::Kicked {
            rustix::io::read(&wires.kick, &mut [0; 8])?;
        }
        let word = loop {
            let word = wires.word.load(Ordering::Acquire);
            if word != seen {
                break word;
            }
            std::hint::spin_loop();
        };
        if word == END {
            return Ok(cpu_time() - before);
        }
        seen = word;
        rustix::io::write(&wires.call, &ONE)?;
    }
}

/// Asks for so long, and ends the device; gives the number of exchanges and their time.
fn drive(kind: Learns, cpu: usize, wires: &Wires, turn: Duration) -> Result<(u64, Duration)> {
    let asked = ask(kind, cpu, wires, turn);
    wires.word.store(END, Ordering::Release);
    rustix::io::write(&wires.kick, &ONE)?;
    asked
}

fn ask(kind: Learns, cpu: usize, wires: &Wires, turn: Duration) -> Result<(u64, Duration)> {
    pin(cpu)?;
    let patience = Timespec::try_from(PATIENCE)?;
    let (mut exchanges, begin) = (0, Instant::now());
    while begin.elapsed() < turn {
        exchanges += 1;
        wires.word.store(exchanges, Ordering::Release);
        if kind == Learns::Kicked {
            rustix::io::write(&wires.kick, &ONE)?;
        }
        let mut call = [PollFd::new(&wires.call, PollFlags::IN)];
        while let Err(Errno::INTR) = poll(&mut call, Some(&patience)) {}
        if call[0].revents().is_empty() {
            return Err(anyhow!("no interrupt within {} s", PATIENCE.as_secs()));
        }
        rustix::io::read(&wires.call, &mut [0; 8])?;
    }
    Ok((exchanges, begin.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_kind_of_device_answers_and_ends() {
        let turn = Duration::from_millis(5);
        for one in exchanges((0, 0), 2, turn).unwrap() {
            assert!(one.time > 0.0 && one.cpu > 0.0, "{one:?}");
        }
    }

    #[test]
    fn a_cpu_that_is_not_there_is_said() {
        let error = exchanges((0, 1023), 1, Duration::from_millis(1)).unwrap_err();
        assert!(
            error.to_string().contains("there is no CPU 1023"),
            "{error}"
        );
    }
}
