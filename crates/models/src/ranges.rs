//! Models of range locks and of a closed disk.

use std::sync::Arc;
use std::sync::atomic::AtomicU64 as UnmodelledCount;

use block::{IoFlags, IoRequest};
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use crate::conditions::{Condition, Conditions};
use crate::explore;
use crate::range_lock::{Admission, Barrier, Participant, RangeLocks};

/// The data of a disk: a number, which each write increases by a load and a store without ordering. One of two overlapping writes is
/// lost, and so is a write that is not visible to the next one.
#[derive(Default)]
struct Data {
    number: AtomicU64,
    writes: UnmodelledCount,
}

impl Data {
    fn write(&self) {
        let number = self.number.load(Ordering::Relaxed);
        self.number.store(number + 1, Ordering::Relaxed);
        self.writes.fetch_add(1, Ordering::Relaxed);
    }

    fn check(&self) {
        let writes = self.writes.load(Ordering::Relaxed);
        assert_eq!(self.number.load(Ordering::Relaxed), writes, "writes");
    }
}

/// A worker that executes its I/O at once. Messages wait until the I/O has ended, as in a mailbox.
#[derive(Default)]
struct ModelWorker {
    messages: Mutex<Vec<Barrier>>,
}

impl Participant for ModelWorker {
    fn drain(&self, barrier: Barrier) {
        self.messages.lock().unwrap().push(barrier);
    }

    fn reopened(&self) {}
}

struct Disk {
    conditions: Arc<Conditions>,
    locks: Arc<RangeLocks>,
    data: Arc<Data>,
}

impl Disk {
    fn new() -> Disk {
        let conditions = Arc::<Conditions>::default();
        Disk {
            locks: Arc::new(RangeLocks::new(Arc::clone(&conditions))),
            conditions,
            data: Arc::default(),
        }
    }

    /// Starts a worker with `count` writes. It skips a write if the disk has the condition.
    fn worker(&self, count: usize, condition: Condition) -> thread::JoinHandle<()> {
        let worker = Arc::<ModelWorker>::default();
        let membership = self.locks.join(worker.clone());
        let (conditions, data) = (self.conditions.clone(), self.data.clone());
        thread::spawn(move || {
            for _ in 0..count {
                if !conditions.has(condition) {
                    data.write();
                }
                let barriers = std::mem::take(&mut *worker.messages.lock().unwrap());
                drop(barriers);
            }
            drop(membership);
            let barriers = std::mem::take(&mut *worker.messages.lock().unwrap());
            drop(barriers);
        })
    }
}

/// Two workers write while no range is held. A holder writes when its range is granted, on whichever thread that happens.
pub fn held_range_is_its_holders_alone() {
    explore(2, || {
        let disk = Disk::new();
        let workers = [
            disk.worker(2, Condition::Locked),
            disk.worker(0, Condition::Locked),
        ];
        let data = disk.data.clone();
        disk.locks.acquire(0, 512, move |held| {
            data.write();
            drop(held);
        });
        for worker in workers {
            worker.join().unwrap();
        }
        assert!(disk.conditions.is_clear(), "a range is still held");
        disk.data.check();
    });
}

/// A worker writes while the disk is open. The closer writes as soon as the disk admits its I/O.
pub fn closed_disk_is_its_closers_alone() {
    explore(3, || {
        let disk = Disk::new();
        let worker = disk.worker(2, Condition::Closed);
        disk.locks.close();
        let closer = IoRequest::write(0, 512).flagged(IoFlags::CLOSER);
        while disk.locks.admit_closed(&closer) != Admission::Proceed {
            thread::yield_now();
        }
        disk.data.write();
        disk.locks.reopen();
        worker.join().unwrap();
        disk.data.check();
    });
}
