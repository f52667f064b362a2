//! `guest-bench files`: file system workloads as in studies of virtual disks: files created, read and written by several threads, and a
//! mail server.
//!
//! `create`: files of 1 MiB, written in 64 KiB pieces, synced, and removed when the thread's share of the file system is full. `seqread`:
//! 64 KiB reads of a large file per thread, with direct I/O. `randread`, `randwrite`: 4 KiB, with direct I/O; one sync per 64 writes.
//! `mail`: four of seven operations read a whole message, two write and sync a message of 1 to 64 KiB, and one removes a message.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, create_dir_all, remove_file};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use serde_json::{Value, json};

/// The value differs between processor architectures.
const O_DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits() as i32;
const ALIGNMENT: usize = 4096;
const PIECE: usize = 64 << 10;
const BLOCK: usize = 4096;
const CREATED: u64 = 1 << 20;
const MESSAGE_MAX: u64 = 64 << 10;
/// Number of writes per sync in `randwrite`.
const TOGETHER: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Preset {
    Create,
    SequentialRead,
    RandomRead,
    RandomWrite,
    Mail,
}

/// Workloads by name.
const PRESETS: [(&str, Preset); 5] = [
    ("create", Preset::Create),
    ("seqread", Preset::SequentialRead),
    ("randread", Preset::RandomRead),
    ("randwrite", Preset::RandomWrite),
    ("mail", Preset::Mail),
];

/// Runs `PRESET FOLDER THREADS MILLISECONDS BYTES` and prints the result in fio's format. BYTES is the limit for all files together.
pub fn run(words: &[String]) -> Result<()> {
    let [preset, folder, threads, time, bytes] = words else {
        bail!("usage: guest-bench files PRESET FOLDER THREADS MILLISECONDS BYTES");
    };
    let known = PRESETS.iter().find(|(word, _)| word == preset);
    let (_, preset) =
        known.with_context(|| format!("{preset}: create, seqread, randread, randwrite or mail"))?;
    let threads: u64 = threads.parse().context("THREADS is not a number")?;
    let time = Duration::from_millis(time.parse().context("MILLISECONDS is not a number")?);
    let bytes: u64 = bytes.parse().context("BYTES is not a number")?;
    ensure!((1..=256).contains(&threads), "THREADS: 1 to 256");
    let share = bytes / threads / CREATED * CREATED;
    ensure!(
        share >= 2 * CREATED,
        "{bytes} bytes are too few for {threads} threads: each needs 2 MiB"
    );
    let folder = Path::new(folder).join("files");
    create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let made = work(*preset, &folder, threads, share, time);
    std::fs::remove_dir_all(&folder).ok();
    let (reads, writes, elapsed) = made?;
    let document = json!({"jobs": [{"jobname": "files", "error": 0,
        "read": reads.json(elapsed), "write": writes.json(elapsed)}]});
    writeln!(std::io::stdout(), "{document}").context("cannot write the result")
}

/// Runs the threads. They begin at the same time, after each has created its files.
fn work(
    preset: Preset,
    folder: &Path,
    threads: u64,
    share: u64,
    time: Duration,
) -> Result<(Times, Times, Duration)> {
    let ready = Barrier::new(threads as usize + 1);
    std::thread::scope(|scope| {
        let ready = &ready;
        let workers: Vec<_> = (0..threads)
            .map(|number| {
                let folder = folder.join(format!("thread{number}"));
                scope.spawn(move || {
                    let prepared = Worker::new(preset, folder, number, share);
                    ready.wait();
                    let mut worker = prepared?;
                    let end = Instant::now() + time;
                    while Instant::now() < end {
                        worker.step()?;
                    }
                    worker.end()?;
                    Ok::<_, anyhow::Error>((worker.reads, worker.writes))
                })
            })
            .collect();
        ready.wait();
        let begin = Instant::now();
        let (mut reads, mut writes) = (Times::default(), Times::default());
        for worker in workers {
            let done = worker.join();
            let (more_reads, more_writes) =
                done.map_err(|_| anyhow::anyhow!("a thread of the workload panicked"))??;
            reads.add(&more_reads);
            writes.add(&more_writes);
        }
        Ok((reads, writes, begin.elapsed()))
    })
}

/// A thread with its files.
struct Worker {
    preset: Preset,
    folder: PathBuf,
    random: Rng,
    share: u64,
    /// Large file, in workloads that use one.
    file: Option<File>,
    /// Memory that contains an aligned buffer for O_DIRECT.
    memory: Vec<u8>,
    aligned: usize,
    at: u64,
    unsynced: u64,
    /// Small files with their sizes, oldest first.
    files: std::collections::VecDeque<(u64, u64)>,
    next: u64,
    used: u64,
    reads: Times,
    writes: Times,
}

impl Worker {
    fn new(preset: Preset, folder: PathBuf, number: u64, share: u64) -> Result<Worker> {
        create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut memory = vec![0; PIECE + ALIGNMENT];
        let mut random = Rng::with_seed(number + 1);
        random.fill(&mut memory);
        let aligned = memory.as_ptr().align_offset(ALIGNMENT);
        let mut worker = Worker {
            preset,
            folder,
            random,
            share,
            file: None,
            memory,
            aligned,
            at: 0,
            unsynced: 0,
            files: Default::default(),
            next: 0,
            used: 0,
            reads: Times::default(),
            writes: Times::default(),
        };
        worker.prepare()?;
        Ok(worker)
    }

    fn prepare(&mut self) -> Result<()> {
        match self.preset {
            Preset::Create => Ok(()),
            Preset::Mail => {
                while self.used + MESSAGE_MAX < self.share / 2 {
                    self.write_message(false)?;
                }
                Ok(())
            }
            Preset::SequentialRead | Preset::RandomRead | Preset::RandomWrite => {
                let path = self.folder.join("large");
                let mut file = File::create(&path)?;
                for _ in 0..self.share / PIECE as u64 {
                    file.write_all(&self.memory[self.aligned..self.aligned + PIECE])?;
                }
                file.sync_all()?;
                let opened = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .custom_flags(O_DIRECT)
                    .open(&path);
                let opened =
                    opened.with_context(|| format!("{}: no direct I/O", path.display()))?;
                self.file = Some(opened);
                Ok(())
            }
        }
    }

    fn step(&mut self) -> Result<()> {
        match self.preset {
            Preset::Create => self.create(),
            Preset::SequentialRead => {
                let at = self.at;
                self.at = (at + PIECE as u64) % self.share;
                self.read_at(at, PIECE)
            }
            Preset::RandomRead => {
                let at = self.random.u64(..self.share / BLOCK as u64) * BLOCK as u64;
                self.read_at(at, BLOCK)
            }
            Preset::RandomWrite => self.write_somewhere(),
            Preset::Mail => match self.random.u8(..7) {
                0..4 => self.read_message(),
                4..6 if self.used + MESSAGE_MAX <= self.share => self.write_message(true),
                _ => self.remove_message(),
            },
        }
    }

    /// Syncs the remaining writes.
    fn end(&mut self) -> Result<()> {
        match (&self.file, self.unsynced) {
            (Some(file), 1..) => Ok(file.sync_data()?),
            _ => Ok(()),
        }
    }

    fn read_at(&mut self, at: u64, length: usize) -> Result<()> {
        let begin = Instant::now();
        let place = self.aligned..self.aligned + length;
        let file = self.file.as_ref().context("a thread has no file")?;
        file.read_exact_at(&mut self.memory[place], at)?;
        self.reads.note(begin.elapsed(), length as u64);
        Ok(())
    }

    fn write_somewhere(&mut self) -> Result<()> {
        let at = self.random.u64(..self.share / BLOCK as u64) * BLOCK as u64;
        let begin = Instant::now();
        let place = self.aligned..self.aligned + BLOCK;
        let file = self.file.as_ref().context("a thread has no file")?;
        file.write_all_at(&self.memory[place], at)?;
        self.unsynced += 1;
        if self.unsynced == TOGETHER {
            file.sync_data()?;
            self.unsynced = 0;
        }
        self.writes.note(begin.elapsed(), BLOCK as u64);
        Ok(())
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("file{number}"))
    }

    fn create(&mut self) -> Result<()> {
        let begin = Instant::now();
        let mut file = File::create(self.path(self.next))?;
        for _ in 0..CREATED / PIECE as u64 {
            file.write_all(&self.memory[self.aligned..self.aligned + PIECE])?;
        }
        file.sync_all()?;
        self.writes.note(begin.elapsed(), CREATED);
        self.files.push_back((self.next, CREATED));
        self.next += 1;
        if self.files.len() as u64 * CREATED >= self.share
            && let Some((oldest, _)) = self.files.pop_front()
        {
            remove_file(self.path(oldest))?;
        }
        Ok(())
    }

    fn write_message(&mut self, counts: bool) -> Result<()> {
        let length = 1024 * (1 + self.random.u64(..MESSAGE_MAX / 1024));
        let begin = Instant::now();
        let mut file = File::create(self.path(self.next))?;
        file.write_all(&self.memory[..length as usize])?;
        if counts {
            file.sync_all()?;
            self.writes.note(begin.elapsed(), length);
        }
        self.files.push_back((self.next, length));
        self.next += 1;
        self.used += length;
        Ok(())
    }

    fn read_message(&mut self) -> Result<()> {
        let Some(at) = (self.files.len() as u64).checked_sub(1) else {
            return self.write_message(true);
        };
        let at = self.random.u64(..=at) as usize;
        let (number, length) = self.files[at];
        let begin = Instant::now();
        let mut file = File::open(self.path(number))?;
        file.read_exact(&mut self.memory[..length as usize])?;
        self.reads.note(begin.elapsed(), length);
        Ok(())
    }

    fn remove_message(&mut self) -> Result<()> {
        let Some((number, length)) = self.files.pop_front() else {
            return self.write_message(true);
        };
        let begin = Instant::now();
        remove_file(self.path(number))?;
        self.writes.note(begin.elapsed(), 0);
        self.used -= length;
        Ok(())
    }
}

/// Durations of operations.
#[derive(Default)]
struct Times {
    bins: BTreeMap<u64, u64>,
    count: u64,
    sum_ns: u64,
    bytes: u64,
}

impl Times {
    fn note(&mut self, time: Duration, bytes: u64) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1);
        // Six significant bits: bins of 3 %.
        let shift = (64 - nanos.leading_zeros()).saturating_sub(6);
        *self.bins.entry(nanos >> shift << shift).or_insert(0) += 1;
        self.count += 1;
        self.sum_ns += nanos;
        self.bytes += bytes;
    }

    fn add(&mut self, other: &Times) {
        for (nanos, count) in &other.bins {
            *self.bins.entry(*nanos).or_insert(0) += count;
        }
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        self.bytes += other.bytes;
    }

    /// Returns the result in fio's format.
    fn json(&self, elapsed: Duration) -> Value {
        let seconds = elapsed.as_secs_f64();
        let bins: BTreeMap<String, u64> = self
            .bins
            .iter()
            .map(|(nanos, count)| (nanos.to_string(), *count))
            .collect();
        let mean = self.sum_ns as f64 / self.count.max(1) as f64;
        json!({"total_ios": self.count, "iops": self.count as f64 / seconds, "io_bytes": self.bytes,
            "bw_bytes": (self.bytes as f64 / seconds) as u64,
            "lat_ns": {"mean": mean}, "clat_ns": {"mean": mean, "bins": bins}})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_does_its_operations_and_leaves_nothing() {
        for (word, preset) in PRESETS {
            let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
            let place = folder.path().join("files");
            create_dir_all(&place).unwrap();
            let done = work(preset, &place, 2, 4 * CREATED, Duration::from_millis(60));
            let (reads, writes, _) = done.unwrap_or_else(|error| panic!("{word}: {error:#}"));
            let has_reads = !matches!(preset, Preset::Create | Preset::RandomWrite);
            let has_writes = !matches!(preset, Preset::SequentialRead | Preset::RandomRead);
            assert_eq!(reads.count > 0, has_reads, "{word}");
            assert_eq!(writes.count > 0, has_writes, "{word}");
            let document = reads.json(Duration::from_secs(1));
            assert_eq!(document["total_ios"], reads.count);
        }
    }

    #[test]
    fn bins_hold_every_operation_within_three_per_cent() {
        let mut times = Times::default();
        times.note(Duration::from_nanos(100_003), 1);
        times.note(Duration::from_nanos(40), 1);
        let bins: Vec<u64> = times.bins.keys().copied().collect();
        assert_eq!(bins[0], 40);
        assert!(bins[1] <= 100_003 && bins[1] > 97_000, "{bins:?}");
        assert_eq!((times.count, times.sum_ns, times.bytes), (2, 100_043, 2));
    }
}
