//! The workers of a process: started together, pinned where asked, stopped together.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

use latency::{Clock, QueueSnapshot};
use rustix::thread::{CpuSet, sched_setaffinity};
use uring::{Event, Ring};

use crate::ledger::Ledger;
use crate::mailbox::{Mailbox, WorkerHandle};
use crate::{DiskCounters, PollLimits, Worker, WorkerCounters};

/// How workers are started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerOptions {
    /// How many.
    pub count: u32,
    /// CPU of each worker, from the first on; workers beyond the list run where the kernel puts them.
    pub cpus: Vec<u32>,
    /// How long each may poll.
    pub poll: PollLimits,
}

/// Why workers could not be started.
#[derive(Debug)]
pub enum PoolError {
    /// A worker's thread or io_uring could not be made.
    Start {
        /// The worker's number.
        worker: u32,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// A worker could not be put on its CPU.
    Pin {
        /// The worker's number.
        worker: u32,
        /// The CPU asked for.
        cpu: u32,
        /// What the kernel said.
        source: std::io::Error,
    },
}

impl std::fmt::Display for PoolError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PoolError::Start { worker, source } => {
                write!(f, "cannot start worker {worker}: {source}")?;
                if source.kind() == std::io::ErrorKind::PermissionDenied {
                    f.write_str(
                        " (io_uring may be disabled: see sysctl kernel.io_uring_disabled)",
                    )?;
                }
                Ok(())
            }
            PoolError::Pin {
                worker,
                cpu,
                source,
            } => write!(
                f,
                "cannot put worker {worker} on CPU {cpu}: {source} (is it online, and in this process' cpuset?)"
            ),
        }
    }
}

impl std::error::Error for PoolError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            PoolError::Start { source, .. } | PoolError::Pin { source, .. } => Some(source),
        }
    }
}

/// Submission queue entries per worker; more are submitted in several goes.
const RING_ENTRIES: u32 = 1024;

/// The running workers. Dropping it ends them: sources that are still there are dropped with their worker.
pub struct Pool {
    workers: Vec<(WorkerHandle, Option<JoinHandle<()>>)>,
    /// Each worker's, in order.
    ledgers: Vec<Arc<Ledger>>,
    next: AtomicU32,
}

impl Pool {
    /// Starts the workers; returns when each has its io_uring and its CPU.
    ///
    /// # Errors
    /// When one cannot be started or pinned; those that started are ended.
    pub fn start(options: &WorkerOptions) -> Result<Pool, PoolError> {
        let mut pool = Pool {
            workers: Vec::new(),
            ledgers: Vec::new(),
            next: AtomicU32::new(0),
        };
        let clock = Clock::new();
        for index in 0..options.count {
            let cpu = options.cpus.get(index as usize).copied();
            let ledger = Ledger::new(clock.clone());
            pool.ledgers.push(ledger.clone());
            pool.workers
                .push(start_worker(index, cpu, options.poll, ledger)?);
        }
        Ok(pool)
    }

    /// The workers, in order.
    pub fn workers(&self) -> impl Iterator<Item = &WorkerHandle> {
        self.workers.iter().map(|(handle, _)| handle)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.workers.len()
    }

    /// The worker for a new source: the one with the fewest; among equals each in its turn.
    pub fn place(&self) -> WorkerHandle {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) as usize;
        let counts: Vec<usize> = self
            .workers()
            .map(|worker| worker.mailbox.sources.load(Ordering::Relaxed))
            .collect();
        self.workers[fewest(&counts, turn)].0.clone()
    }

    /// Whether sources from now on record what their requests' stages take; they do unless told. Without is what the
    /// cost of stamps is measured against.
    pub fn set_recording(&self, recording: bool) {
        for worker in self.workers() {
            worker.send(move |worker| worker.set_recording(recording));
        }
    }

    /// Latencies and counters of every source of every worker. Like all that looks on, it only reads: no worker is
    /// woken or waited for, and a stuck one can be seen.
    pub fn snapshots(&self) -> Vec<QueueSnapshot> {
        self.ledgers
            .iter()
            .flat_map(|ledger| ledger.snapshots())
            .collect()
    }

    /// Each worker's counters.
    pub fn counters(&self) -> Vec<WorkerCounters> {
        self.ledgers
            .iter()
            .map(|ledger| ledger.counters())
            .collect()
    }

    /// What was asked of each disk by all workers, by the disk's name. One that was never used is absent.
    pub fn disks(&self) -> BTreeMap<String, DiskCounters> {
        let mut sums = BTreeMap::new();
        for ledger in &self.ledgers {
            ledger.add_disks(&mut sums);
        }
        sums
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for (handle, _) in &self.workers {
            handle.send(Worker::end);
        }
        for (_, thread) in &mut self.workers {
            if let Some(thread) = thread.take() {
                // A worker that panicked has ended the process already.
                drop(thread.join());
            }
        }
    }
}

/// Ends the process when a worker panics: its clients could neither go on nor notice.
struct EndProcessOnPanic(u32);

impl Drop for EndProcessOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(
                worker = self.0,
                "worker panicked: a defect of Lunette; ending the process"
            );
            std::process::abort();
        }
    }
}

fn start_worker(
    index: u32,
    cpu: Option<u32>,
    poll: PollLimits,
    ledger: Arc<Ledger>,
) -> Result<(WorkerHandle, Option<JoinHandle<()>>), PoolError> {
    let start_error = |source| PoolError::Start {
        worker: index,
        source,
    };
    let mailbox = Mailbox::new(Event::new().map_err(start_error)?);
    let handle = WorkerHandle {
        mailbox: mailbox.clone(),
        index,
    };
    let (ready, started) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::Builder::new()
        .name(format!("worker-{index}"))
        .spawn(move || {
            if let Some(cpu) = cpu {
                let mut set = CpuSet::new();
                set.set(cpu as usize);
                if let Err(errno) = sched_setaffinity(None, &set) {
                    let error = PoolError::Pin {
                        worker: index,
                        cpu,
                        source: errno.into(),
                    };
                    drop(ready.send(Err(error)));
                    return;
                }
            }
            // The ring belongs to the thread that makes it.
            let ring = Ring::new(RING_ENTRIES);
            match ring.and_then(|ring| Worker::new(mailbox, index, poll, ring, ledger)) {
                Ok(worker) => {
                    drop(ready.send(Ok(())));
                    let _end = EndProcessOnPanic(index);
                    worker.run();
                }
                Err(source) => drop(ready.send(Err(PoolError::Start {
                    worker: index,
                    source,
                }))),
            }
        })
        .map_err(start_error)?;
    match started.recv() {
        Ok(Ok(())) => Ok((handle, Some(thread))),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(start_error(std::io::Error::other(
            "the worker's thread ended",
        ))),
    }
}

/// Which of these counts is the least; of equal ones the next from `turn` on, round the circle.
fn fewest(counts: &[usize], turn: usize) -> usize {
    let workers = counts.len().max(1);
    let first = turn % workers;
    let each = counts.iter().enumerate();
    each.min_by_key(|(index, count)| (**count, (index + workers - first) % workers))
        .map_or(0, |(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(count: u32) -> WorkerOptions {
        WorkerOptions {
            count,
            cpus: Vec::new(),
            poll: crate::PollLimit::Micros(10).into(),
        }
    }

    #[test]
    fn a_new_source_goes_where_there_are_fewest() {
        for turn in 0..6 {
            assert_eq!(fewest(&[0, 0, 0], turn), turn % 3);
            assert_eq!(fewest(&[2, 1, 2], turn), 1);
            assert_eq!(fewest(&[7], turn), 0);
        }
        // Every second one ends at once, as where a driver asks a disk before it uses it.
        let mut counts = [0; 2];
        for turn in (0..16).step_by(2) {
            counts[fewest(&counts, turn + 1)] += 1;
        }
        assert_eq!(counts, [4, 4]);
    }

    #[test]
    fn messages_run_in_order_on_the_worker_asked() {
        let pool = Pool::start(&options(2)).unwrap();
        for (index, worker) in pool.workers().enumerate() {
            assert_eq!(worker.call(|w| w.handle().index()), Ok(index as u32));
        }
        let worker = pool.place();
        for _ in 0..100 {
            worker.send(|_| {});
        }
        assert!(worker.call(|w| w.counters().messages).unwrap() >= 100);
    }

    #[test]
    fn call_to_an_ended_worker_says_so() {
        let pool = Pool::start(&options(1)).unwrap();
        let worker = pool.place();
        drop(pool);
        assert_eq!(worker.call(|_| ()), Err(crate::WorkerGone));
    }

    #[test]
    fn cpu_that_does_not_exist_is_named() {
        let pin = WorkerOptions {
            cpus: vec![1000],
            ..options(1)
        };
        let Err(error) = Pool::start(&pin) else {
            panic!("worker started on CPU 1000")
        };
        assert!(
            error.to_string().contains("worker 0 on CPU 1000"),
            "{error}"
        );
    }
}
