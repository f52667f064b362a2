//! The workers of a process: shared workers, started together and optionally pinned, and dedicated workers, each of which
//! starts and ends with one export.
//!
//! The lock serves the control plane: placing queues and connections, starting and ending workers, reading counters.
//! Workers never take it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use latency::{Clock, QueueSnapshot, SparseHistogram};
use rustix::thread::{CpuSet, sched_setaffinity};
use uring::{Event, Ring};

pub use block::ExportPlacement;

use crate::ledger::Ledger;
use crate::mailbox::{Mailbox, WorkerHandle};
use crate::{
    Activity, DiskCounters, FailureCounters, PollLimit, PollLimits, Worker, WorkerCounters,
};

/// Start options of the shared workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerOptions {
    /// Number of workers.
    pub count: u32,
    /// CPU of each worker, in order; workers beyond the list are placed by the kernel.
    pub cpus: Vec<u32>,
    /// Polling limits of each worker.
    pub poll: PollLimits,
}

/// A failure to start or assign workers.
#[derive(Debug)]
pub enum PoolError {
    /// A worker's thread or io_uring could not be created.
    Start {
        /// The worker's number.
        worker: u32,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// An export names a worker that does not exist.
    Unknown {
        /// The number in the configuration.
        worker: u32,
        /// Number of shared workers.
        shared: u32,
    },
    /// A worker could not be pinned to its CPU.
    Pin {
        /// The worker's number.
        worker: u32,
        /// The requested CPU.
        cpu: u32,
        /// Error of the kernel.
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
                        "; hint: check that io_uring is enabled (sysctl kernel.io_uring_disabled)",
                    )?;
                }
                Ok(())
            }
            PoolError::Unknown { worker, shared } => write!(
                f,
                "there is no worker {worker}: the workers are 0 to {}",
                shared.saturating_sub(1)
            ),
            PoolError::Pin {
                worker,
                cpu,
                source,
            } => write!(
                f,
                "cannot pin worker {worker} to CPU {cpu}: {source}; hint: check that the CPU is online and in the cpuset of this process"
            ),
        }
    }
}

impl std::error::Error for PoolError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            PoolError::Start { source, .. } | PoolError::Pin { source, .. } => Some(source),
            PoolError::Unknown { .. } => None,
        }
    }
}

/// Submission queue entries per worker; larger batches are submitted in parts.
const RING_ENTRIES: u32 = 1024;

/// The placement of an export that is not shared.
#[derive(Clone, Debug)]
enum Placement {
    Workers(Vec<u32>),
    /// Number of the dedicated worker.
    Dedicated(u32),
}

/// A queue and its worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedQueue {
    /// The export's name.
    pub export: String,
    /// The queue's index in its device.
    pub queue: u32,
    /// The worker's number.
    pub worker: u32,
    /// Requests in progress.
    pub in_flight: u64,
}

struct WorkerSlot {
    handle: WorkerHandle,
    thread: Option<JoinHandle<()>>,
    /// Outlives the worker: the next worker with this number continues its counters.
    ledger: Arc<Ledger>,
}

impl WorkerSlot {
    fn runs(&self) -> bool {
        !self.handle.has_ended()
    }
}

#[derive(Default)]
struct PoolState {
    /// Workers, indexed by number: first the shared workers, then the dedicated ones, which may have ended.
    slots: Vec<WorkerSlot>,
    /// Placement of exports, by name. Exports without an entry use the shared workers.
    placements: HashMap<String, Placement>,
}

/// The running workers. Dropping the pool ends them and drops their remaining sources.
pub struct Pool {
    state: Mutex<PoolState>,
    shared: usize,
    poll: PollLimits,
    clock: Clock,
    recording: AtomicBool,
    next: AtomicU32,
    activity: Arc<Activity>,
}

impl Pool {
    /// Starts the shared workers. Returns when each has its io_uring and its CPU.
    ///
    /// # Errors
    /// If a worker cannot be started or pinned; the started ones are ended.
    pub fn start(options: &WorkerOptions) -> Result<Pool, PoolError> {
        let pool = Pool {
            state: Mutex::default(),
            shared: options.count as usize,
            poll: options.poll,
            clock: Clock::new(),
            recording: AtomicBool::new(true),
            next: AtomicU32::new(0),
            activity: Arc::default(),
        };
        for index in 0..options.count {
            let cpu = options.cpus.get(index as usize).copied();
            let ledger = Ledger::reporting_to(pool.clock.clone(), pool.activity.clone());
            let slot = start_worker(index, cpu, options.poll, ledger)?;
            pool.lock().slots.push(slot);
        }
        Ok(pool)
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the running workers in the order of their numbers.
    pub fn workers(&self) -> Vec<WorkerHandle> {
        let state = self.lock();
        let running = state.slots.iter().filter(|slot| slot.runs());
        running.map(|slot| slot.handle.clone()).collect()
    }

    /// Returns the number of running workers, including dedicated ones.
    pub fn count(&self) -> usize {
        self.lock().slots.iter().filter(|slot| slot.runs()).count()
    }

    /// Selects the worker for a new source without an export: the shared worker with the fewest sources, in rotation among
    /// equals.
    pub fn select_worker(&self) -> WorkerHandle {
        self.emptiest(&self.lock().slots[..self.shared])
    }

    /// Selects the worker for a new queue or connection of an export.
    pub fn select_worker_for(&self, export: &str) -> WorkerHandle {
        let state = self.lock();
        match state.placements.get(export) {
            None => self.emptiest(&state.slots[..self.shared]),
            Some(Placement::Dedicated(worker)) => state.slots[*worker as usize].handle.clone(),
            Some(Placement::Workers(workers)) => {
                let slots = workers.iter().map(|worker| &state.slots[*worker as usize]);
                self.emptiest(slots)
            }
        }
    }

    /// Selects the worker for the queues of an export that carry no data.
    pub fn control_for(&self, export: &str) -> WorkerHandle {
        let state = self.lock();
        let worker = match state.placements.get(export) {
            None => 0,
            Some(Placement::Dedicated(worker)) => *worker,
            Some(Placement::Workers(workers)) => workers.first().copied().unwrap_or(0),
        };
        state.slots[worker as usize].handle.clone()
    }

    fn emptiest<'a>(&self, slots: impl IntoIterator<Item = &'a WorkerSlot>) -> WorkerHandle {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) as usize;
        let slots: Vec<&WorkerSlot> = slots.into_iter().collect();
        let counts: Vec<usize> = slots
            .iter()
            .map(|slot| slot.handle.mailbox.sources.load(Ordering::Relaxed))
            .collect();
        slots[fewest(&counts, turn)].handle.clone()
    }

    /// Returns true if any export has a placement. Otherwise the export of a new connection is irrelevant for placement.
    pub fn has_placements(&self) -> bool {
        !self.lock().placements.is_empty()
    }

    /// Sets the placement of an export's new queues and connections; existing ones stay. A worker that is no longer
    /// dedicated to the export ends with its last queue or connection.
    ///
    /// # Errors
    /// If the worker does not exist, or a dedicated one cannot be started; the placement then stays unchanged.
    pub fn assign(&self, export: &str, placement: &ExportPlacement) -> Result<(), PoolError> {
        let mut state = self.lock();
        let placements = match placement {
            ExportPlacement::Shared => None,
            ExportPlacement::Workers(workers) => {
                let shared = self.shared as u32;
                if let Some(&worker) = workers.iter().find(|worker| **worker >= shared) {
                    return Err(PoolError::Unknown { worker, shared });
                }
                // An empty list offers no choice and means shared.
                (!workers.is_empty()).then(|| Placement::Workers(workers.clone()))
            }
            ExportPlacement::Dedicated => match state.placements.get(export) {
                Some(Placement::Dedicated(_)) => return Ok(()),
                _ => Some(Placement::Dedicated(self.start_dedicated(&mut state)?)),
            },
        };
        let before = match placements {
            Some(placements) => state.placements.insert(export.to_owned(), placements),
            None => state.placements.remove(export),
        };
        if let Some(Placement::Dedicated(worker)) = before {
            let handle = &state.slots[worker as usize].handle;
            tracing::info!(export, worker, "dedicated worker ended");
            handle.send(Worker::retire);
        }
        if let Some(Placement::Dedicated(worker)) = state.placements.get(export) {
            tracing::info!(export, worker, "dedicated worker started");
        }
        Ok(())
    }

    /// Starts a worker with the first free number.
    fn start_dedicated(&self, state: &mut PoolState) -> Result<u32, PoolError> {
        let dedicated = state.slots.iter_mut().enumerate().skip(self.shared);
        let ended = { dedicated }.find(|(_, slot)| !slot.runs());
        let (index, ledger) = match ended {
            Some((index, slot)) => {
                if let Some(thread) = slot.thread.take() {
                    // The thread has closed its mailbox and is about to end.
                    drop(thread.join());
                }
                (index, slot.ledger.clone())
            }
            None => (
                state.slots.len(),
                Ledger::reporting_to(self.clock.clone(), self.activity.clone()),
            ),
        };
        let worker = index as u32;
        let slot = start_worker(worker, None, self.poll, ledger)?;
        let recording = self.recording.load(Ordering::Relaxed);
        slot.handle
            .send(move |worker| worker.set_recording(recording));
        match state.slots.get_mut(index) {
            Some(place) => *place = slot,
            None => state.slots.push(slot),
        }
        Ok(worker)
    }

    /// Sets whether sources record the stages of their requests; the default is true. False serves to measure the cost of
    /// stamps.
    pub fn set_recording(&self, recording: bool) {
        self.recording.store(recording, Ordering::Relaxed);
        for worker in self.workers() {
            worker.send(move |worker| worker.set_recording(recording));
        }
    }

    fn ledgers(&self) -> Vec<Arc<Ledger>> {
        let state = self.lock();
        state.slots.iter().map(|slot| slot.ledger.clone()).collect()
    }

    /// Returns latencies and counters of every source of every worker. Only reads memory: it neither wakes workers nor
    /// waits for them, so it also works with a stuck worker.
    pub fn snapshots(&self) -> Vec<QueueSnapshot> {
        let ledgers = self.ledgers();
        ledgers.iter().flat_map(|one| one.snapshots()).collect()
    }

    /// Returns the total times of the requests of all current queues, by disk. Requests for disks without separate measurements are left out.
    pub fn totals(&self) -> BTreeMap<String, SparseHistogram> {
        let mut totals = BTreeMap::new();
        for ledger in self.ledgers() {
            ledger.add_totals(&mut totals);
        }
        totals
    }

    /// Returns the failures of each queue, by export and queue, including removed queues. Leaves out queues without failures.
    pub fn failures(&self) -> BTreeMap<(String, u32), FailureCounters> {
        let mut sums = BTreeMap::new();
        for ledger in self.ledgers() {
            ledger.add_failures(&mut sums);
        }
        sums
    }

    /// Returns the waiting place that all workers report to when they wake up for a client or a disk.
    pub fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    /// Returns true if workers always poll, so that they never wake up.
    pub fn always_polls(&self) -> bool {
        let PollLimits {
            rings,
            network,
            disk,
        } = self.poll;
        [rings, network, disk].contains(&PollLimit::Always)
    }

    /// Returns the current queues with their workers.
    pub fn queues(&self) -> Vec<OwnedQueue> {
        let ledgers = self.ledgers();
        let live = ledgers.iter().flat_map(|ledger| ledger.live());
        live.map(|(labels, in_flight)| OwnedQueue {
            export: labels.export,
            queue: labels.queue,
            worker: labels.worker,
            in_flight,
        })
        .collect()
    }

    /// Returns the counters of each running worker, with its number.
    pub fn counters(&self) -> Vec<(u32, WorkerCounters)> {
        let state = self.lock();
        let running = state.slots.iter().filter(|slot| slot.runs());
        running
            .map(|slot| (slot.handle.index, slot.ledger.counters()))
            .collect()
    }

    /// Returns the export of each dedicated worker.
    pub fn dedicated(&self) -> BTreeMap<u32, String> {
        let state = self.lock();
        let placements = state.placements.iter();
        let dedicated = placements.filter_map(|(export, placements)| match placements {
            Placement::Dedicated(worker) => Some((*worker, export.clone())),
            Placement::Workers(_) => None,
        });
        dedicated.collect()
    }

    /// Drops the measurements of a removed export's queues.
    pub fn forget(&self, export: &str) {
        for slot in &self.lock().slots {
            slot.ledger.forget(export);
            // Repeated by the worker, because a queue that is still ending adds measurements.
            let name = export.to_owned();
            slot.handle.send(move |worker| worker.forget(&name));
        }
    }

    /// Returns the I/O counters of each disk over all workers, by the disk's name. Unused disks are absent.
    pub fn disks(&self) -> BTreeMap<String, DiskCounters> {
        let mut sums = BTreeMap::new();
        for ledger in self.ledgers() {
            ledger.add_disks(&mut sums);
        }
        sums
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.lock();
        for slot in &state.slots {
            slot.handle.send(Worker::end);
        }
        for slot in &mut state.slots {
            if let Some(thread) = slot.thread.take() {
                // A panic of a worker has already ended the process.
                drop(thread.join());
            }
        }
    }
}

/// Ends the process when a worker panics, because its clients could neither continue nor notice.
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
) -> Result<WorkerSlot, PoolError> {
    let start_error = |source| PoolError::Start {
        worker: index,
        source,
    };
    let mailbox = Mailbox::new(Event::new().map_err(start_error)?);
    let handle = WorkerHandle {
        mailbox: mailbox.clone(),
        index,
    };
    let counted = ledger.clone();
    let (ready, started) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::Builder::new()
        .name(format!("worker-{index}"))
        .stack_size(bdev::STACK_BYTES)
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
            // A ring must be created on the thread that uses it.
            let ring = Ring::new(RING_ENTRIES);
            let worker = ring.and_then(|ring| Worker::new(mailbox, index, poll, ring, ledger));
            // From here on the thread opens no paths.
            let confined = worker.and_then(|worker| {
                sandbox::confine(sandbox::Thread::Worker)?;
                Ok(worker)
            });
            match confined {
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
        Ok(Ok(())) => Ok(WorkerSlot {
            handle,
            thread: Some(thread),
            ledger: counted,
        }),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(start_error(std::io::Error::other(
            "the worker's thread ended",
        ))),
    }
}

/// Returns the index of the smallest count; among equal ones the next from `turn` on, cyclically.
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
        // Every second source ends at once, as when a driver probes a disk before use.
        let mut counts = [0; 2];
        for turn in (0..16).step_by(2) {
            counts[fewest(&counts, turn + 1)] += 1;
        }
        assert_eq!(counts, [4, 4]);
    }

    #[test]
    fn messages_run_in_order_on_the_worker_asked() {
        let pool = Pool::start(&options(2)).unwrap();
        for (index, worker) in pool.workers().iter().enumerate() {
            assert_eq!(worker.call(|w| w.handle().index()), Ok(index as u32));
        }
        let worker = pool.select_worker();
        for _ in 0..100 {
            worker.send(|_| {});
        }
        assert!(worker.call(|w| w.counters().messages).unwrap() >= 100);
    }

    #[test]
    fn call_to_an_ended_worker_is_an_error() {
        let pool = Pool::start(&options(1)).unwrap();
        let worker = pool.select_worker();
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
            error.to_string().contains("worker 0 to CPU 1000"),
            "{error}"
        );
    }

    fn wait_for(condition: impl Fn() -> bool) {
        while !condition() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn export_is_served_only_by_its_chosen_workers() {
        let pool = Pool::start(&options(3)).unwrap();
        pool.assign("e", &ExportPlacement::Workers(vec![2, 1]))
            .unwrap();
        let mut chosen: Vec<u32> = (0..8)
            .map(|_| pool.select_worker_for("e").index())
            .collect();
        chosen.sort_unstable();
        chosen.dedup();
        assert_eq!(chosen, [1, 2]);
        assert_eq!(pool.control_for("e").index(), 2);
        assert_eq!(pool.control_for("other").index(), 0);
        pool.assign("e", &ExportPlacement::Shared).unwrap();
        assert!(!pool.has_placements());
    }

    #[test]
    fn worker_that_does_not_exist_is_named_and_nothing_changes() {
        let pool = Pool::start(&options(2)).unwrap();
        pool.assign("e", &ExportPlacement::Workers(vec![1]))
            .unwrap();
        let error = pool.assign("e", &ExportPlacement::Workers(vec![0, 2]));
        assert_eq!(
            error.unwrap_err().to_string(),
            "there is no worker 2: the workers are 0 to 1"
        );
        assert_eq!(pool.select_worker_for("e").index(), 1);
    }

    #[test]
    fn dedicated_worker_serves_one_export_and_ends_with_it() {
        let pool = Pool::start(&options(1)).unwrap();
        pool.assign("e", &ExportPlacement::Dedicated).unwrap();
        pool.assign("f", &ExportPlacement::Dedicated).unwrap();
        assert_eq!(pool.count(), 3);
        assert_eq!(pool.select_worker_for("e").index(), 1);
        assert_eq!(pool.control_for("f").index(), 2);
        assert!((0..4).all(|_| pool.select_worker().index() == 0));
        let own = pool.select_worker_for("e");
        assert_eq!(own.call(|worker| worker.handle().index()), Ok(1));
        assert_eq!(pool.dedicated()[&2], "f");

        pool.assign("e", &ExportPlacement::Shared).unwrap();
        wait_for(|| own.call(|_| ()).is_err());
        assert_eq!(pool.select_worker_for("e").index(), 0);
        let numbers: Vec<u32> = pool.counters().iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [0, 2]);
        // The next worker reuses the free number and continues its counters.
        pool.assign("g", &ExportPlacement::Dedicated).unwrap();
        assert_eq!(pool.select_worker_for("g").index(), 1);
    }
}
