//! A point in time of a device that clients continue to write to, by copy-before-write.
//!
//! ```text
//!   clients ──▶ CopyBeforeWrite (layer under the disk) ──────▶ source
//!                 │ old data, before the first write of a unit   ▲
//!                 ▼                                              │ unchanged units
//!               scratch ◀──────────────── PointInTimeReader ─────┘
//!                           changed units   (read-only device: backups, NBD exports)
//! ```
//!
//! The point in time is the moment at which the layer is put under the disk. The caller holds the disk then: no write is in flight.
//! [`tracker::Tracker`] decides; `writes` and `reads` do the I/O. If old data cannot be saved, the point in time is lost, its readers fail,
//! and clients continue without delay. Tests: `tracker`, and `tests/point_in_time.rs`.

mod reads;
mod tracker;
mod writes;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::BlockDevice;
use crate::inbox::Inbox;

pub use tracker::PointInTimeError;
use tracker::{SettledUnits, Tracker};

/// A write that waits for a copy by another channel: the channel's inbox and its slot.
struct Waiter {
    inbox: Arc<Inbox<()>>,
    slot: u64,
}

/// Parts of a point in time.
struct SharedPoint {
    source: Arc<dyn BlockDevice>,
    scratch: Arc<dyn BlockDevice>,
    settled: Arc<SettledUnits>,
    tracker: Mutex<Tracker<Waiter>>,
}

impl SharedPoint {
    fn lock(&self) -> MutexGuard<'_, Tracker<Waiter>> {
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the point in time and wakes all writes that wait for copies.
    #[cold]
    fn fail(&self, error: PointInTimeError) {
        let waiting = self.lock().fail(error);
        wake(waiting);
    }
}

fn wake(waiting: Vec<Waiter>) {
    for Waiter { inbox, slot } in waiting {
        inbox.put(slot, ());
    }
}

/// The point in time of a device.
pub struct PointInTime {
    shared: Arc<SharedPoint>,
}

impl PointInTime {
    /// Prepares a point in time of `source`. Old data go to `scratch`, a device of at least the same size that reads as zeroes, and take at
    /// most `scratch_limit` bytes there.
    pub fn new(
        source: Arc<dyn BlockDevice>,
        scratch: Arc<dyn BlockDevice>,
        scratch_limit: u64,
    ) -> PointInTime {
        let tracker = Tracker::new(source.capacity().bytes(), scratch_limit);
        PointInTime {
            shared: Arc::new(SharedPoint {
                source,
                scratch,
                settled: Arc::clone(tracker.settled()),
                tracker: Mutex::new(tracker),
            }),
        }
    }

    /// Returns the device for clients. The point in time is the moment when it replaces the source.
    pub fn layer(&self) -> Arc<dyn BlockDevice> {
        Arc::new(writes::CopyBeforeWrite::new(Arc::clone(&self.shared)))
    }

    /// Returns a read-only device with the content of the point in time.
    pub fn reader(&self) -> Arc<dyn BlockDevice> {
        Arc::new(reads::PointInTimeReader::new(Arc::clone(&self.shared)))
    }

    /// Returns the reason why the point in time is lost.
    pub fn error(&self) -> Option<PointInTimeError> {
        self.shared.lock().failure()
    }

    /// Returns the number of bytes in the scratch device.
    pub fn scratch_used(&self) -> u64 {
        self.shared.lock().scratch_used()
    }

    /// Releases the bytes before `end`: reads of them fail, and writes to them need no copy.
    pub fn release(&self, end: u64) {
        self.shared.lock().release(end);
    }

    /// Ends the point in time: reads fail, and writes need no copy. Waiting writes start.
    pub fn end(&self) {
        self.shared.fail(PointInTimeError::Ended);
    }
}
