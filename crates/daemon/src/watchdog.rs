//! Reports to the service manager that the daemon is alive while its workers make progress.
//!
//! Each round sends every worker a message, which it runs between two iterations. When all have run theirs, the service manager is notified
//! and the next round begins. A stuck worker stops the notifications, and the service manager restarts the daemon.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use reactor::Pool;

use crate::notify::Notifier;

/// Rounds per interval of the service manager, so that a late round is still in time.
const ROUNDS: u32 = 3;

/// One message to every running worker, including dedicated ones.
struct Round {
    answered: Vec<(reactor::WorkerHandle, Arc<AtomicBool>)>,
}

impl Round {
    fn begin(pool: &Pool) -> Round {
        let ask = |worker: &reactor::WorkerHandle| {
            let answered = Arc::new(AtomicBool::new(false));
            let answer = answered.clone();
            worker.send(move |_| answer.store(true, Ordering::Release));
            (worker.clone(), answered)
        };
        Round {
            answered: pool.workers().iter().map(ask).collect(),
        }
    }

    /// Returns the workers without an iteration since the round began, except ended ones.
    fn missing(&self) -> Vec<u32> {
        let missing = self.answered.iter();
        missing
            .filter(|(worker, answered)| !answered.load(Ordering::Acquire) && !worker.has_ended())
            .map(|(worker, _)| worker.index())
            .collect()
    }
}

/// Interval between looks at the workers' replies.
const LOOK: Duration = Duration::from_millis(5);

/// Waits until every worker has run an iteration, for at most `patience`.
pub(crate) fn all_make_progress(pool: &Pool, patience: Duration) -> bool {
    let round = Round::begin(pool);
    let end = Instant::now() + patience;
    while !round.missing().is_empty() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

/// Watchdog thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct Watchdog {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Notifies `notifier` at least every `time` while the workers of `pool` make progress.
    pub(crate) fn start(
        pool: Arc<Pool>,
        notifier: Arc<Notifier>,
        time: Duration,
    ) -> std::io::Result<Watchdog> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("watchdog".to_owned())
            .spawn(move || {
                let mut round = Round::begin(&pool);
                let mut warned = false;
                while stopped.recv_timeout(time / ROUNDS) == Err(RecvTimeoutError::Timeout) {
                    let missing = round.missing();
                    if missing.is_empty() {
                        notifier.alive();
                        round = Round::begin(&pool);
                        warned = false;
                    } else if !std::mem::replace(&mut warned, true) {
                        tracing::error!(workers = ?missing, "workers make no progress, watchdog pings stopped");
                    }
                }
            })?;
        Ok(Watchdog {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("watchdog thread panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use reactor::{PollLimit, WorkerOptions};

    use super::*;

    fn pool() -> Arc<Pool> {
        let options = WorkerOptions {
            count: 2,
            cpus: Vec::new(),
            poll: PollLimit::Never.into(),
        };
        Arc::new(Pool::start(&options).unwrap())
    }

    #[test]
    fn stuck_worker_is_reported_until_it_continues() {
        let pool = pool();
        let workers = pool.workers();
        let (release, held) = mpsc::channel::<()>();
        workers[1].send(move |_| held.recv().unwrap_or_default());
        let round = Round::begin(&pool);
        workers[0].call(|_| ()).unwrap();
        assert_eq!(round.missing(), [1]);
        assert!(!all_make_progress(&pool, Duration::from_millis(20)));
        drop(release);
        workers[1].call(|_| ()).unwrap();
        assert_eq!(round.missing(), [0u32; 0]);
        assert!(all_make_progress(&pool, Duration::from_secs(60)));
    }

    #[test]
    fn stuck_worker_suspends_the_watchdog_pings() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let heard = || {
            let mut bytes = [0; 64];
            manager
                .recv(&mut bytes)
                .map(|length| bytes[..length].to_vec())
        };
        let notifier = Arc::new(Notifier::new(path.as_os_str()).unwrap());
        let pool = pool();
        let watchdog = Watchdog::start(pool.clone(), notifier, Duration::from_millis(30)).unwrap();
        assert_eq!(heard().unwrap(), b"WATCHDOG=1");

        let worker = pool.workers()[0].clone();
        let (stuck, is_stuck) = mpsc::channel::<()>();
        let (release, held) = mpsc::channel::<()>();
        worker.send(move |_| {
            drop(stuck);
            held.recv().unwrap_or_default();
        });
        assert!(is_stuck.recv().is_err(), "it is stuck from now on");
        // A notification of an earlier round may still arrive. Silence must follow.
        manager.set_nonblocking(true).unwrap();
        let (mut silent, mut looks) = (0, 0);
        while silent < 5 {
            std::thread::sleep(Duration::from_millis(20));
            silent = if heard().is_ok() { 0 } else { silent + 1 };
            looks += 1;
            assert!(looks < 500, "a stuck daemon pings on");
        }
        manager.set_nonblocking(false).unwrap();
        drop(release);
        assert_eq!(heard().unwrap(), b"WATCHDOG=1");
        drop(watchdog);
    }
}
