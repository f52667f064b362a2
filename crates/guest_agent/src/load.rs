//! A timed workload: `--depth` threads with one I/O each in flight.

use crate::args::Args;
use crate::block_file::{self, Buffer};
use crate::random::Random;
use crate::summary::{Samples, Summary};
use serde::Serialize;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[derive(Serialize)]
struct Report {
    rw: String,
    block_size: u64,
    depth: u64,
    seconds: f64,
    read: Summary,
    write: Summary,
}

struct Workload {
    random: bool,
    read_percent: u64,
    block_size: u64,
    blocks: u64,
    runtime: Duration,
    next_block: AtomicU64,
}

/// Runs the workload of the options and prints the report.
pub fn run(args: &Args) -> Result<bool, String> {
    let rw = args.text("rw")?.to_owned();
    let (random, read_percent) = match rw.as_str() {
        "read" => (false, 100),
        "write" => (false, 0),
        "randread" => (true, 100),
        "randwrite" => (true, 0),
        "randrw" => (true, args.number("mix", 50)?),
        _ => {
            return Err(format!(
                "--rw {rw}: allowed are read, write, randread, randwrite, randrw"
            ));
        }
    };
    let file = block_file::open(args, read_percent < 100)?;
    let block_size = args.number("bs", 4096)?.max(1);
    let blocks = block_file::size(args, &file)? / block_size;
    if blocks == 0 {
        return Err(format!("not even one block of {block_size} bytes fits"));
    }
    let workload = Workload {
        random,
        read_percent,
        block_size,
        blocks,
        runtime: Duration::from_secs(args.number("runtime", 3)?),
        next_block: AtomicU64::new(0),
    };
    let depth = args.number("depth", 1)?.max(1);
    let seed = args.number("seed", 1)?;
    let started = Instant::now();
    let (mut read, mut write) = (Samples::default(), Samples::default());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..depth)
            .map(|index| {
                let (file, workload) = (&file, &workload);
                scope.spawn(move || {
                    workload.one_thread(file, seed.wrapping_mul(1009).wrapping_add(index))
                })
            })
            .collect();
        for thread in threads {
            let (reads, writes) = thread.join().expect("a load thread panicked");
            read.merge(reads);
            write.merge(writes);
        }
    });
    let elapsed = started.elapsed();
    let good = !read.failed() && !write.failed();
    let report = Report {
        rw,
        block_size,
        depth,
        seconds: elapsed.as_secs_f64(),
        read: read.summary(block_size, elapsed),
        write: write.summary(block_size, elapsed),
    };
    println!(
        "{}",
        serde_json::to_string(&report).expect("figures are JSON")
    );
    Ok(good)
}

impl Workload {
    fn one_thread(&self, file: &File, seed: u64) -> (Samples, Samples) {
        let mut random = Random::new(seed);
        let mut buffer = Buffer::new(self.block_size as usize);
        buffer.bytes_mut().chunks_mut(8).for_each(|chunk| {
            let word = random.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        });
        let (mut reads, mut writes) = (Samples::default(), Samples::default());
        let end = Instant::now() + self.runtime;
        let mut before = Instant::now();
        while before < end {
            let block = if self.random {
                random.below(self.blocks)
            } else {
                self.next_block.fetch_add(1, Ordering::Relaxed) % self.blocks
            };
            let offset = block * self.block_size;
            let is_read = random.below(100) < self.read_percent;
            let outcome = if is_read {
                file.read_exact_at(buffer.bytes_mut(), offset)
            } else {
                file.write_all_at(buffer.bytes(), offset)
            };
            let after = Instant::now();
            let samples = if is_read { &mut reads } else { &mut writes };
            match outcome {
                Ok(()) => samples.record(after - before),
                Err(error) => samples.fail(format!("at offset {offset}: {error}")),
            }
            before = after;
        }
        (reads, writes)
    }
}
