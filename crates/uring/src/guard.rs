//! System calls that a peer can block, and a guard thread that interrupts them.
//!
//! An eventfd made by a peer shares its O_NONBLOCK flag with the peer. The peer can clear the flag between any check and
//! the write, and no Linux call writes without waiting at the cost of a plain write. Each thread therefore marks such
//! calls with two stores to a counter, and one guard thread per process polls these counters while they change. A call
//! that lasts longer than the guard's poll interval is interrupted and returns EINTR, which only a blocked call does.
//!
//! The guard thread starts with the first guarded thread and lives as long as the process. Without calls it sleeps
//! without a timeout, so that an idle process never wakes up. The next call wakes it: a fence orders the caller's
//! counter before its look at `asleep`, and another one orders `asleep` before the guard's last look at the counters.

use std::cell::OnceCell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

/// Poll interval of the guard while calls are made. A blocked call is interrupted after one to two intervals, never earlier.
const PAUSE: Duration = Duration::from_millis(25);

/// Polls without calls before the guard sleeps: a system call of a caller wakes it, at most once in this time.
const IDLE_POLLS: u32 = 8;

/// Signal that interrupts a call. Its default action is to ignore it, so a late signal has no effect.
const INTERRUPT: libc::c_int = libc::SIGURG;

struct Guarded {
    /// Odd while the thread is in a call. Written only by the thread.
    calls: AtomicU64,
    /// `pthread_t`: an integer or a pointer, depending on the C library.
    thread: usize,
}

#[derive(Default)]
struct Guard {
    /// Each thread and the last value of its counter.
    threads: Mutex<Vec<(Arc<Guarded>, u64)>>,
    /// The guard thread sleeps without a timeout, or is about to.
    asleep: AtomicBool,
    /// The guard thread, set before a thread is guarded.
    running: OnceLock<Thread>,
}

static GUARD: OnceLock<Result<Arc<Guard>, i32>> = OnceLock::new();

/// A thread's own entry, removed from the guard's list before the thread ends.
struct Own {
    guarded: Arc<Guarded>,
    guard: Arc<Guard>,
}

thread_local! {
    static OWN: OnceCell<Own> = const { OnceCell::new() };
}

/// Guards calls of [`brief`] on the calling thread until it ends.
///
/// # Errors
/// When the kernel cannot create the guard thread.
pub fn guard_this_thread() -> io::Result<()> {
    let guard = GUARD.get_or_init(|| start().map_err(|error| error.raw_os_error().unwrap_or(0)));
    let guard = guard
        .as_ref()
        .map_err(|errno| io::Error::from_raw_os_error(*errno))?;
    OWN.with(|own| {
        own.get_or_init(|| {
            let guarded = Arc::new(Guarded {
                calls: AtomicU64::new(0),
                // SAFETY: has no preconditions.
                thread: unsafe { libc::pthread_self() } as usize,
            });
            guard.lock().push((guarded.clone(), 0));
            Own {
                guarded,
                guard: guard.clone(),
            }
        });
    });
    Ok(())
}

/// Runs a system call that should not wait but that a peer can block. On a guarded thread it returns EINTR if it blocks.
#[inline]
pub fn brief<R>(call: impl FnOnce() -> R) -> R {
    OWN.with(|own| {
        let Some(own) = own.get() else {
            return call();
        };
        let calls = &own.guarded.calls;
        let inside = calls.load(Ordering::Relaxed) + 1;
        calls.store(inside, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if own.guard.asleep.load(Ordering::Relaxed) {
            own.guard.wake();
        }
        let result = call();
        calls.store(inside + 1, Ordering::Relaxed);
        result
    })
}

impl Drop for Own {
    fn drop(&mut self) {
        let ours = |other: &(Arc<Guarded>, u64)| Arc::ptr_eq(&other.0, &self.guarded);
        self.guard.lock().retain(|other| !ours(other));
    }
}

impl Guard {
    fn lock(&self) -> MutexGuard<'_, Vec<(Arc<Guarded>, u64)>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cold]
    fn wake(&self) {
        if self.asleep.swap(false, Ordering::Relaxed)
            && let Some(running) = self.running.get()
        {
            running.unpark();
        }
    }

    fn run(&self) {
        let mut idle_polls = 0;
        loop {
            // A pause of fixed length precedes each interruption. `park_timeout` can return early, because a late `wake` leaves its token.
            thread::sleep(PAUSE);
            idle_polls = match interrupt_blocked(&mut self.lock()) {
                true => 0,
                false => idle_polls + 1,
            };
            if idle_polls == IDLE_POLLS {
                self.sleep();
                idle_polls = 0;
            }
        }
    }

    /// Sleeps until the next call, unless one has begun.
    fn sleep(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if interrupt_blocked(&mut self.lock()) {
            self.asleep.store(false, Ordering::Relaxed);
            return;
        }
        // Other wake-ups of `park` are not excluded.
        while self.asleep.load(Ordering::Relaxed) {
            thread::park();
        }
    }
}

/// Interrupts threads that are still in the call of the last poll. Returns true if there were calls.
fn interrupt_blocked(threads: &mut [(Arc<Guarded>, u64)]) -> bool {
    let mut any = false;
    for (guarded, seen) in threads {
        let calls = guarded.calls.load(Ordering::Relaxed);
        let inside = calls % 2 == 1;
        any |= inside || calls != *seen;
        if inside && calls == *seen {
            // SAFETY: the thread is on the list, whose lock is held, and leaves it before it ends.
            unsafe { libc::pthread_kill(guarded.thread as libc::pthread_t, INTERRUPT) };
        }
        *seen = calls;
    }
    any
}

fn start() -> io::Result<Arc<Guard>> {
    extern "C" fn nothing(_signal: libc::c_int) {}
    // SAFETY: a zeroed sigaction is a valid value: an empty mask, and no SA_RESTART, so that calls return EINTR.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as usize;
    // SAFETY: `action` is a valid sigaction whose handler does nothing.
    if unsafe { libc::sigaction(INTERRUPT, &action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let guard = Arc::new(Guard::default());
    let running = guard.clone();
    let thread = thread::Builder::new()
        .name("guard".into())
        .stack_size(64 << 10)
        .spawn(move || running.run())?;
    // Set once: this is the only caller.
    guard.running.get_or_init(|| thread.thread().clone());
    Ok(guard)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::event::{EventfdFlags, Timespec, eventfd, poll};
    use rustix::io::{Errno, write};

    use super::*;

    #[test]
    fn blocked_call_ends_and_later_ones_continue() {
        guard_this_thread().unwrap();
        let full = eventfd(0, EventfdFlags::empty()).unwrap();
        write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..3 {
            let held_up = brief(|| write(&full, &1u64.to_ne_bytes()));
            assert_eq!(held_up, Err(Errno::INTR));
            let free = eventfd(0, EventfdFlags::empty()).unwrap();
            assert_eq!(brief(|| write(&free, &1u64.to_ne_bytes())), Ok(8));
        }
    }

    #[test]
    fn call_that_blocks_wakes_the_sleeping_guard() {
        guard_this_thread().unwrap();
        let Some(Ok(guard)) = GUARD.get() else {
            panic!("there is no guard")
        };
        let full = eventfd(0, EventfdFlags::empty()).unwrap();
        write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        while !guard.asleep.load(Ordering::Relaxed) {
            thread::sleep(PAUSE);
        }
        let held_up = brief(|| write(&full, &1u64.to_ne_bytes()));
        assert_eq!(held_up, Err(Errno::INTR));
    }

    #[test]
    fn call_shorter_than_the_poll_interval_is_not_interrupted() {
        guard_this_thread().unwrap();
        let Some(Ok(guard)) = GUARD.get() else {
            panic!("there is no guard")
        };
        let short = Timespec::try_from(PAUSE / 2).unwrap();
        let waker = thread::spawn(|| {
            for _ in 0..50 {
                guard.running.get().unwrap().unpark();
                thread::sleep(PAUSE / 25);
            }
        });
        for _ in 0..4 {
            // A busy machine can make a call longer than the interval.
            let begun = Instant::now();
            let waited = brief(|| poll(&mut [], Some(&short)));
            assert!(waited == Ok(0) || begun.elapsed() >= PAUSE, "{waited:?}");
        }
        waker.join().unwrap();
    }

    #[test]
    fn threads_that_have_ended_are_forgotten() {
        let guarded = || {
            guard_this_thread().unwrap();
            brief(|| ());
            OWN.with(|own| Arc::downgrade(&own.get().unwrap().guarded))
        };
        let threads: Vec<_> = (0..8).map(|_| thread::spawn(guarded)).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap().strong_count(), 0);
        }
    }
}
