//! Writes with verifiable content. `fill` and `check` share only a seed, so verification works across remounts, reboots and restarts of
//! the daemon; `soak` writes and verifies at the same time.
//!
//! Thread `t` of `n` owns the blocks with number `t` modulo `n`, so that the last writer of each block is known.

use crate::args::Args;
use crate::block_file::{self, Buffer};
use crate::pattern::Origin;
use crate::random::Random;
use serde::Serialize;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Once;
use std::time::{Duration, Instant};

#[derive(Default, Serialize)]
struct Report {
    writes: u64,
    reads: u64,
    errors: u64,
    mismatches: u64,
    longest_us: f64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
}

/// Maximum number of described problems.
const PROBLEMS_SHOWN: usize = 5;

impl Report {
    fn problem(&mut self, text: String) {
        if self.problems.len() < PROBLEMS_SHOWN {
            self.problems.push(text);
        }
    }

    fn merge(&mut self, other: Report) {
        self.writes += other.writes;
        self.reads += other.reads;
        self.errors += other.errors;
        self.mismatches += other.mismatches;
        self.longest_us = self.longest_us.max(other.longest_us);
        other
            .problems
            .into_iter()
            .for_each(|text| self.problem(text));
    }
}

/// Options of all passes.
struct Plan {
    file: File,
    seed: u64,
    block_size: u64,
    blocks: u64,
    threads: u64,
}

impl Plan {
    fn new(args: &Args, write: bool) -> Result<Plan, String> {
        let file = block_file::open(args, write)?;
        let block_size = args.number("bs", 4096)?;
        if block_size < 512 || block_size % 8 != 0 {
            return Err(format!(
                "--bs {block_size} is not a multiple of 8 from 512 up"
            ));
        }
        let blocks = block_file::size(args, &file)? / block_size;
        let threads = args.number("depth", 4)?.max(1);
        if blocks < threads {
            return Err(format!("{blocks} blocks are too few for {threads} threads"));
        }
        Ok(Plan {
            file,
            seed: args.number("seed", 1)?,
            block_size,
            blocks,
            threads,
        })
    }

    /// Returns the number of blocks that thread `index` owns.
    fn owned(&self, index: u64) -> u64 {
        (self.blocks - index).div_ceil(self.threads)
    }

    /// Runs `work` on each thread and prints the sum of the reports. Returns true if no problem was found.
    fn run(&self, work: impl Fn(Lane) -> Report + Sync) -> bool {
        let mut report = Report::default();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|index| {
                    scope.spawn({
                        let work = &work;
                        move || work(Lane::new(self, index))
                    })
                })
                .collect();
            for thread in threads {
                report.merge(thread.join().expect("a verifying thread panicked"));
            }
        });
        println!(
            "{}",
            serde_json::to_string(&report).expect("figures are JSON")
        );
        report.errors == 0 && report.mismatches == 0
    }
}

/// State of one thread: blocks, random numbers, buffers.
struct Lane<'a> {
    plan: &'a Plan,
    index: u64,
    random: Random,
    buffer: Buffer,
    scratch: Vec<u8>,
    report: Report,
}

impl<'a> Lane<'a> {
    fn new(plan: &'a Plan, index: u64) -> Self {
        Lane {
            plan,
            index,
            random: Random::new(plan.seed.wrapping_mul(0x1_0001).wrapping_add(index)),
            buffer: Buffer::new(plan.block_size as usize),
            scratch: vec![0; plan.block_size as usize],
            report: Report::default(),
        }
    }

    fn origin(&self, own: u64, sequence: u64) -> Origin {
        let block = own * self.plan.threads + self.index;
        Origin {
            seed: self.plan.seed,
            offset: block * self.plan.block_size,
            sequence,
        }
    }

    fn write(&mut self, own: u64, sequence: u64) -> bool {
        let origin = self.origin(own, sequence);
        origin.write(self.buffer.bytes_mut());
        let before = Instant::now();
        let outcome = self
            .plan
            .file
            .write_all_at(self.buffer.bytes(), origin.offset);
        self.account(before.elapsed());
        self.report.writes += 1;
        if let Err(error) = &outcome {
            self.report.errors += 1;
            self.report
                .problem(format!("write at offset {}: {error}", origin.offset));
        }
        outcome.is_ok()
    }

    fn verify(&mut self, own: u64, sequence: u64) {
        let origin = self.origin(own, sequence);
        let before = Instant::now();
        let outcome = self
            .plan
            .file
            .read_exact_at(self.buffer.bytes_mut(), origin.offset);
        self.account(before.elapsed());
        self.report.reads += 1;
        if let Err(error) = outcome {
            self.report.errors += 1;
            self.report
                .problem(format!("read at offset {}: {error}", origin.offset));
        } else if let Some(difference) = origin.difference(self.buffer.bytes(), &mut self.scratch) {
            self.report.mismatches += 1;
            self.report.problem(difference);
        }
    }

    fn account(&mut self, latency: Duration) {
        self.report.longest_us = self.report.longest_us.max(latency.as_secs_f64() * 1e6);
    }
}

/// Replays the writes of a lane: the n-th write, counted from 1, goes to a random block of the lane.
fn replay(lane: &mut Lane<'_>, writes: u64, mut each: impl FnMut(&mut Lane<'_>, u64, u64)) {
    let owned = lane.plan.owned(lane.index);
    for sequence in 1..=writes {
        let own = lane.random.below(owned);
        each(lane, own, sequence);
    }
}

/// Writes random blocks with content that `check` can verify, then flushes.
pub fn fill(args: &Args) -> Result<bool, String> {
    let plan = Plan::new(args, true)?;
    let writes = args.number("writes", 1000)?.div_ceil(plan.threads);
    let good = plan.run(|mut lane| {
        replay(&mut lane, writes, |lane, own, sequence| {
            lane.write(own, sequence);
        });
        lane.report
    });
    plan.file
        .sync_all()
        .map_err(|error| format!("flush: {error}"))?;
    Ok(good)
}

/// Reads back every block written by a `fill` with the same options.
pub fn check(args: &Args) -> Result<bool, String> {
    let plan = Plan::new(args, false)?;
    let writes = args.number("writes", 1000)?.div_ceil(plan.threads);
    Ok(plan.run(|mut lane| {
        let mut last = vec![0u64; plan.owned(lane.index) as usize];
        replay(&mut lane, writes, |_, own, sequence| {
            last[own as usize] = sequence
        });
        for (own, &sequence) in last
            .iter()
            .enumerate()
            .filter(|(_, sequence)| **sequence > 0)
        {
            lane.verify(own as u64, sequence);
        }
        lane.report
    }))
}

/// File that a soak creates after its first I/O. The soak ends when the file is removed.
struct Switch {
    file: Option<PathBuf>,
    created: Once,
}

impl Switch {
    /// Creates the file at the first call. Returns false after the file was removed.
    fn is_on(&self) -> bool {
        let Some(file) = &self.file else { return true };
        self.created
            .call_once(|| File::create(file).map_or((), drop));
        file.exists()
    }
}

/// For `--runtime` seconds, writes random blocks and verifies random earlier ones; finally verifies all of them. With `--while FILE`, creates
/// the file after the first I/O and ends when the file is removed.
pub fn soak(args: &Args) -> Result<bool, String> {
    let plan = Plan::new(args, true)?;
    let switch = Switch {
        file: args.text("while").ok().map(PathBuf::from),
        created: Once::new(),
    };
    let runtime = if switch.file.is_some() { 3600 } else { 5 };
    let end = Instant::now() + Duration::from_secs(args.number("runtime", runtime)?);
    let pause = Duration::from_millis(args.number("pause", 0)?);
    Ok(plan.run(|mut lane| {
        let mut last = vec![0u64; plan.owned(lane.index) as usize];
        let mut sequence = 0;
        while Instant::now() < end {
            let own = lane.random.below(last.len() as u64);
            let known = last[own as usize];
            if known > 0 && lane.random.below(2) == 0 {
                lane.verify(own, known);
            } else {
                sequence += 1;
                // After a failed write the content is undefined until the next write.
                last[own as usize] = if lane.write(own, sequence) {
                    sequence
                } else {
                    0
                };
            }
            if !switch.is_on() {
                break;
            }
            std::thread::sleep(pause);
        }
        for (own, &sequence) in last
            .iter()
            .enumerate()
            .filter(|(_, sequence)| **sequence > 0)
        {
            lane.verify(own as u64, sequence);
        }
        lane.report
    }))
}
