//! Ctrl-C: every wait in this crate ends early, so that owners are dropped in order and stop their processes.

use anyhow::Result;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Installs handlers that record SIGINT, SIGTERM and SIGHUP instead of ending the process.
pub fn watch() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag))?;
    }
    Ok(())
}

/// Does the same as [`watch`], and ends the process at the second signal.
pub fn watch_until_second() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // Registered before the flag is set, so that it takes effect from the second signal on.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(flag))?;
    }
    watch()
}

/// Ends every wait, like a signal.
pub fn interrupt() {
    INTERRUPTED
        .get_or_init(Arc::default)
        .store(true, Ordering::Relaxed);
}

/// Returns true after an interruption.
pub fn interrupted() -> bool {
    INTERRUPTED
        .get()
        .is_some_and(|flag| flag.load(Ordering::Relaxed))
}
