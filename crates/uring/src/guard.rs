//! System calls that a peer can hold up, and the guard that ends them.
//!
//! An eventfd that a peer has made shares its O_NONBLOCK with the peer: whatever is asked before a write, the peer can
//! make it wait, and nothing in Linux writes to one without waiting at the price of a plain write. So a thread says when
//! it is in such a call, with two plain stores, and one guard for the process looks at these words while they move. A
//! call that lasts longer than the guard's pause is interrupted: it then ends with EINTR, which only one that waited
//! does. The guard's thread begins with the first that is guarded and lasts as long as the process.

use std::cell::OnceCell;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How often the guard looks while calls are made: one that waits is interrupted after one to two of these.
const PAUSE: Duration = Duration::from_millis(25);

/// It looks less and less often while there are none, down to this: an idle process uses no CPU to speak of.
const IDLE_PAUSE: Duration = Duration::from_millis(250);

/// What interrupts a call. Its own action is to do nothing, so one that comes late does no harm.
const INTERRUPT: libc::c_int = libc::SIGURG;

struct Guarded {
    /// Odd while the thread is in a call. Only the thread itself writes it.
    calls: AtomicU64,
    /// A number or a pointer, as the C library has it.
    thread: usize,
}

#[derive(Default)]
struct Guard {
    /// Each thread, with its word as last seen.
    threads: Mutex<Vec<(Arc<Guarded>, u64)>>,
    came: Condvar,
}

static GUARD: OnceLock<Result<Arc<Guard>, i32>> = OnceLock::new();

/// A thread's own entry, taken off the guard's list before the thread ends.
struct Own {
    guarded: Arc<Guarded>,
    guard: Arc<Guard>,
}

thread_local! {
    static OWN: OnceCell<Own> = const { OnceCell::new() };
}

/// Guards the calling thread's calls of [`brief`] as long as it lives.
///
/// # Errors
/// When the kernel gives no thread for the guard.
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
            guard.came.notify_one();
            Own {
                guarded,
                guard: guard.clone(),
            }
        });
    });
    Ok(())
}

/// Makes a system call that should not wait but which a peer can hold up. On a guarded thread it ends with EINTR if it
/// waits.
#[inline]
pub fn brief<R>(call: impl FnOnce() -> R) -> R {
    OWN.with(|own| {
        let Some(own) = own.get() else {
            return call();
        };
        let calls = &own.guarded.calls;
        let inside = calls.load(Ordering::Relaxed) + 1;
        calls.store(inside, Ordering::Relaxed);
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

    fn run(&self) {
        let mut threads = self.lock();
        let mut pause = PAUSE;
        loop {
            threads = if threads.is_empty() {
                let came = self.came.wait(threads);
                came.unwrap_or_else(PoisonError::into_inner)
            } else {
                let waited = self.came.wait_timeout(threads, pause);
                waited.unwrap_or_else(PoisonError::into_inner).0
            };
            pause = if look(&mut threads) {
                PAUSE
            } else {
                (pause * 2).min(IDLE_PAUSE)
            };
        }
    }
}

/// Interrupts whoever is in the same call as at the last look. Are there calls?
fn look(threads: &mut [(Arc<Guarded>, u64)]) -> bool {
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
    // SAFETY: a zeroed sigaction is a valid value: an empty mask, and no SA_RESTART, so that calls end with EINTR.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as usize;
    // SAFETY: `action` is a valid sigaction whose handler does nothing.
    if unsafe { libc::sigaction(INTERRUPT, &action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let guard = Arc::new(Guard::default());
    let running = guard.clone();
    std::thread::Builder::new()
        .name("guard".into())
        .stack_size(64 << 10)
        .spawn(move || running.run())?;
    Ok(guard)
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{Errno, write};

    use super::*;

    #[test]
    fn call_that_waits_ends_and_the_next_ones_go_on() {
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
    fn threads_that_have_ended_are_forgotten() {
        let threads: Vec<_> = (0..8)
            .map(|_| std::thread::spawn(|| guard_this_thread().map(|()| brief(|| ()))))
            .collect();
        for thread in threads {
            thread.join().unwrap().unwrap();
        }
        // Whoever else is on the list is a test of this process that still runs.
        let Some(Ok(guard)) = GUARD.get() else {
            panic!("there is no guard")
        };
        assert!(guard.lock().len() <= 1);
    }
}
