//! End of the daemon at the request of an API client.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::iterator::Handle;

/// Ends the daemon from another thread, with a handover to the daemon that listens at a socket.
#[derive(Clone)]
pub struct Ending {
    signals: Handle,
    to: Arc<Mutex<Option<PathBuf>>>,
}

impl Ending {
    pub(crate) fn new(signals: Handle) -> Ending {
        Ending {
            signals,
            to: Arc::default(),
        }
    }

    /// Ends the daemon. Returns false if it is already ending.
    pub fn begin(&self, to: PathBuf) -> bool {
        let mut slot = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        if self.signals.is_closed() {
            return false;
        }
        *slot = Some(to);
        // Wakes the thread that waits for signals.
        self.signals.close();
        true
    }

    /// Returns the socket of the daemon that takes over.
    pub fn receiver(&self) -> Option<PathBuf> {
        let slot = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        slot.clone()
    }
}
