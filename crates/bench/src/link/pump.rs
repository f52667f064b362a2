//! Thread that forwards packets between the two ends.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::MTU;
use super::direction::{Direction, LinkOptions};

/// Maximum number of packets taken from one end before the other is polled.
const BATCH: usize = 64;
/// Maximum delay until a stop is noticed.
const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// Handle of the thread; drop stops it.
pub struct Pump {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    pub fn start(near: File, far: File, options: LinkOptions) -> Result<Pump> {
        let ends = Arc::new(AtomicBool::new(false));
        let has_ended = Arc::clone(&ends);
        let mut carrier = Carrier {
            begin: Instant::now(),
            ends: [near, far],
            lines: [Direction::new(options, 1), Direction::new(options, 2)],
            spare: Vec::new(),
        };
        let thread = std::thread::Builder::new()
            .name("link".to_owned())
            .spawn(move || {
                while !has_ended.load(Ordering::Relaxed) {
                    carrier.turn();
                }
            })
            .context("cannot start the thread of the simulated link")?;
        Ok(Pump {
            ends,
            thread: Some(thread),
        })
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

struct Carrier {
    begin: Instant,
    ends: [File; 2],
    /// Lines from each end to the other.
    lines: [Direction<Vec<u8>>; 2],
    /// Reusable packet buffers.
    spare: Vec<Vec<u8>>,
}

impl Carrier {
    /// Delivers arrived packets, waits, and accepts new packets.
    fn turn(&mut self) {
        let now = self.begin.elapsed();
        for (from, line) in self.lines.iter_mut().enumerate() {
            while let Some(packet) = line.receive(now) {
                // A full receive queue drops the packet, like a network card.
                self.ends[1 - from].write_all(&packet).ok();
                self.spare.push(packet);
            }
        }
        self.wait();
        for from in 0..self.ends.len() {
            self.take(from);
        }
    }

    fn wait(&self) {
        let now = self.begin.elapsed();
        let next = self.lines.iter().filter_map(Direction::next).min();
        let wait = next.map_or(LONGEST_WAIT, |at| at.saturating_sub(now).min(LONGEST_WAIT));
        let [near, far] = &self.ends;
        let mut ends = [near, far].map(|end| PollFd::from_borrowed_fd(end.as_fd(), PollFlags::IN));
        let wait = Timespec {
            tv_sec: 0,
            tv_nsec: wait.as_nanos().min(999_999_999) as _,
        };
        // A signal ends the wait, like a packet.
        poll(&mut ends, Some(&wait)).ok();
    }

    fn take(&mut self, from: usize) {
        for _ in 0..BATCH {
            let mut packet = self.spare.pop().unwrap_or_default();
            packet.resize(MTU + 64, 0);
            match self.ends[from].read(&mut packet) {
                Ok(length) => {
                    packet.truncate(length);
                    let now = self.begin.elapsed();
                    let lost = self.lines[from].send(now, length, packet);
                    self.spare.extend(lost);
                }
                Err(error) => {
                    self.spare.push(packet);
                    if error.kind() != ErrorKind::Interrupted {
                        return;
                    }
                }
            }
        }
    }
}
