//! Verified I/O on a thread, to detect effects of another front end's behaviour.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::block::BlkQueue;
use crate::layout::Layout;
use crate::queue::QueueOptions;
use crate::session::{FrontEnd, Options};
use crate::verify::Verifier;
use crate::{Error, Result};

/// Pause between two batches, which leaves CPU time for the observed processes.
const PAUSE: Duration = Duration::from_micros(500);
const BLOCKS: usize = 256;
const DEPTH: u16 = 4;

#[derive(Default)]
struct Progress {
    verified: AtomicU64,
    /// Duration of the slowest batch in microseconds since the last query.
    slowest_batch: AtomicU64,
}

/// A running, well-behaved front end of a virtio-blk device.
pub struct VerifiedLoad {
    stop: Arc<AtomicBool>,
    progress: Arc<Progress>,
    thread: Option<JoinHandle<Result<u64>>>,
}

impl VerifiedLoad {
    /// Connects, and writes and verifies the first MiB of the disk until [`VerifiedLoad::finish`].
    pub fn start(socket: &Path) -> Result<VerifiedLoad> {
        VerifiedLoad::start_with(socket, &Options::default())
    }

    /// As [`VerifiedLoad::start`], with these front-end options.
    ///
    /// # Errors
    /// As [`VerifiedLoad::start`].
    pub fn start_with(socket: &Path, options: &Options) -> Result<VerifiedLoad> {
        let mut front_end = FrontEnd::connect(socket, options)?;
        let queue = QueueOptions::default();
        let queue = BlkQueue::start(&mut front_end, 0, &queue, DEPTH, 4096, Layout::Separate)?;
        let (stop, progress) = (Arc::<AtomicBool>::default(), Arc::<Progress>::default());
        let (ending, seen) = (stop.clone(), progress.clone());
        let thread = std::thread::spawn(move || {
            let worked = work(queue, &ending, &seen);
            // The session must outlive the work on its queue.
            drop(front_end);
            worked
        });
        Ok(VerifiedLoad {
            stop,
            progress,
            thread: Some(thread),
        })
    }

    /// Returns the number of verified requests.
    pub fn verified(&self) -> u64 {
        self.progress.verified.load(Ordering::Relaxed)
    }

    /// Returns the duration of the slowest batch since the previous call.
    pub fn slowest_batch(&self) -> Duration {
        Duration::from_micros(self.progress.slowest_batch.swap(0, Ordering::Relaxed))
    }

    /// Waits for progress.
    ///
    /// # Errors
    /// The load has ended or makes no progress.
    pub fn expect_progress(&self, limit: Duration) -> Result<()> {
        let (before, until) = (self.verified(), Instant::now() + limit);
        while self.verified() == before {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                return Err(Error::Wrong("the verified load has ended".into()));
            }
            if Instant::now() > until {
                return Err(Error::Timeout(limit));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Ends the load. Returns the number of verified requests.
    ///
    /// # Errors
    /// The first failure of a request.
    pub fn finish(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(worked)) => worked,
            Some(Err(_)) | None => Err(Error::Wrong("the verified load panicked".into())),
        }
    }
}

fn work(mut queue: BlkQueue, ending: &AtomicBool, progress: &Progress) -> Result<u64> {
    let mut verifier = Verifier::new(0, BLOCKS, 99);
    while !ending.load(Ordering::Relaxed) {
        let before = Instant::now();
        verifier.round(&mut queue, DEPTH)?;
        let elapsed = u64::try_from(before.elapsed().as_micros()).unwrap_or(u64::MAX);
        progress.slowest_batch.fetch_max(elapsed, Ordering::Relaxed);
        let verified = verifier.requests();
        progress.verified.store(verified, Ordering::Relaxed);
        std::thread::sleep(PAUSE);
    }
    verifier.check_all(&mut queue)?;
    Ok(verifier.requests())
}
