//! Ctrl-C: every wait in this crate ends early, so that owners are dropped in order and stop their processes.

use anyhow::Result;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Number of the last signal, or 0.
static SIGNAL: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Installs handlers that record SIGINT, SIGTERM and SIGHUP instead of ending the process.
pub fn watch() -> Result<()> {
    let recorded = SIGNAL.get_or_init(Arc::default);
    for signal in SIGNALS {
        signal_hook::flag::register_usize(signal, Arc::clone(recorded), signal as usize)?;
    }
    Ok(())
}

/// Does the same as [`watch`], and ends the process at the second signal.
pub fn watch_until_second() -> Result<()> {
    let has_one = Arc::new(AtomicBool::new(false));
    for signal in SIGNALS {
        // Registered before the flag is set, so that it takes effect from the second signal on.
        signal_hook::flag::register_conditional_shutdown(
            signal,
            128 + signal,
            Arc::clone(&has_one),
        )?;
        signal_hook::flag::register(signal, Arc::clone(&has_one))?;
    }
    watch()
}

/// Ends every wait, like a signal.
pub fn interrupt() {
    let recorded = SIGNAL.get_or_init(Arc::default);
    recorded.store(SIGINT as usize, Ordering::Relaxed);
}

/// Returns true after an interruption.
pub fn interrupted() -> bool {
    signal().is_some()
}

/// Returns the number of the signal that interrupted the process.
pub fn signal() -> Option<i32> {
    let number = SIGNAL.get()?.load(Ordering::Relaxed);
    i32::try_from(number).ok().filter(|number| *number > 0)
}
