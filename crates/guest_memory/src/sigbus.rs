//! Keeps the daemon alive when a client truncates its memory file.
//!
//! Access to a page beyond the end of a shared file raises SIGBUS. The handler looks up the address in a fixed table of watched
//! mappings, maps zeroes there, and marks the mapping as poisoned. The access then continues, and the worker ends the session at
//! its next check. For any other address the handler restores the default action, so that a real bus error still ends the process.
//! It makes only async-signal-safe calls.

mod slot;

use crate::sync::{AtomicU32, AtomicUsize, Ordering};
use slot::{FREE, POISONED, Slot};

/// Maximum number of watched mappings. Each front end maps a handful of regions.
const SLOTS: usize = 16_384;

impl Slot {
    const fn new() -> Slot {
        Slot {
            word: AtomicU32::new(FREE),
            start: AtomicUsize::new(0),
            length: AtomicUsize::new(0),
        }
    }
}

static TABLE: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];

/// Slots from this index on were never used; the handler skips them.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Number of SIGBUS signals in watched mappings. Workers compare it with the last value once per event loop iteration.
static SIGNALS: AtomicU32 = AtomicU32::new(0);

/// Number of accesses to truncated client memory since start; one relaxed load.
#[inline]
pub fn signal_count() -> u32 {
    SIGNALS.load(Ordering::Relaxed)
}

/// Watches one mapping during its lifetime.
pub(crate) struct Watch {
    slot: usize,
}

impl Watch {
    /// Returns `None` if the table is full. A mapping without a watch must not be used.
    pub(crate) fn new(start: usize, length: usize) -> Option<Watch> {
        for (index, slot) in TABLE.iter().enumerate() {
            if slot.claim() {
                USED.fetch_max(index + 1, Ordering::AcqRel);
                slot.watch(start, length);
                return Some(Watch { slot: index });
            }
        }
        None
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        TABLE[self.slot].state() == POISONED
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        TABLE[self.slot].set_state(FREE);
    }
}

/// Installs the handler for the whole process. Further calls have no effect.
///
/// # Errors
/// The error of sigaction, which does not occur for SIGBUS on Linux.
pub fn install() -> std::io::Result<()> {
    static ONCE: std::sync::OnceLock<i32> = std::sync::OnceLock::new();
    let errno = *ONCE.get_or_init(|| {
        // SAFETY: a zeroed sigaction is a valid value; it is filled before use.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        // SAFETY: `action` is a valid sigaction whose handler is async-signal-safe (see `on_sigbus`).
        let result = unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
        if result == 0 {
            0
        } else {
            std::io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EINVAL)
        }
    });
    if errno == 0 {
        Ok(())
    } else {
        Err(std::io::Error::from_raw_os_error(errno))
    }
}

extern "C" fn on_sigbus(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler; for SIGBUS si_addr is set.
    let address = unsafe { (*info).si_addr() } as usize;
    let used = USED.load(Ordering::Acquire).min(SLOTS);
    for slot in &TABLE[..used] {
        // The faulting mapping is in use, so its slot does not change. Other slots may change.
        let Some((start, length)) = slot.range() else {
            continue;
        };
        if address < start || address - start >= length {
            continue;
        }
        // The truncation removed everything from the faulting page to the end of the mapping. It may have removed earlier pages
        // too; each raises its own signal.
        let page = address & !4095;
        // A part of a huge page cannot be replaced. In that case the whole mapping is replaced.
        if !replace(page, start + length - page) && !replace(start, length) {
            break;
        }
        slot.set_state(POISONED);
        SIGNALS.fetch_add(1, Ordering::Release);
        return;
    }
    // Not a watched mapping: restore the default action. The access is retried and ends the process.
    // SAFETY: signal() with SIG_DFL is async-signal-safe.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}

/// Maps private zeroes over a part of a watched mapping.
fn replace(start: usize, length: usize) -> bool {
    // SAFETY: MAP_FIXED replaces only addresses of the watched mapping, which stays mapped as long as the slot is in use. mmap is a
    // bare system call, safe in a handler.
    let mapped = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;

    #[test]
    fn range_of_a_slot_in_use_is_never_mixed_from_two_mappings() {
        let slot = Slot::new();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for range in 1..2_000_000 {
                    assert!(slot.claim());
                    slot.watch(range, range);
                    slot.set_state(FREE);
                }
            });
            while !writer.is_finished() {
                if let Some((start, length)) = slot.range() {
                    assert_eq!(start, length);
                }
            }
        });
        assert_eq!(slot.range(), None);
    }

    #[test]
    fn truncated_memory_poisons_the_mapping_and_reads_zero() {
        install().unwrap();
        let (mapping, file) = Mapping::memfd("t", 1 << 20).unwrap();
        mapping.fill(0, 1 << 20, 7);
        file.set_len(4096).unwrap();
        let before = signal_count();
        let mut read = [1; 4];
        mapping.read(8192, &mut read);
        assert_eq!(read, [0; 4]);
        assert!(mapping.is_poisoned());
        assert!(signal_count() > before);
        mapping.read(0, &mut read);
        assert_eq!(read, [7; 4], "the part before the truncation is unchanged");
    }
}
