//! What becomes of an I/O that fails: it is reported to the client, or waits until somebody resumes the disk.
//!
//! Set by the control plane at any time, read by workers when an I/O is submitted while the disk's [`Conditions`] are not clear and
//! when one fails. A disk that reports all errors pays nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use block::{IoError, IoErrorKind};

use crate::conditions::{Condition, Conditions};

/// The policy of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum OnError {
    /// The client gets the error.
    #[default]
    Report,
    /// The I/O waits, whatever the device says.
    Stop,
    /// The I/O waits if the device is full; other errors are reported.
    Enospc,
}

impl OnError {
    /// All of them, by the words of the configuration.
    pub const WORDS: [(&'static str, OnError); 3] = [
        ("report", OnError::Report),
        ("stop", OnError::Stop),
        ("enospc", OnError::Enospc),
    ];

    /// The word of the configuration.
    pub const fn word(self) -> &'static str {
        OnError::WORDS[self as usize].0
    }

    /// Does an I/O that fails like this wait? What the client itself got wrong, or has aborted, never does.
    pub const fn holds(self, error: IoError) -> bool {
        match self {
            OnError::Report => false,
            OnError::Enospc => matches!(error.kind, IoErrorKind::NoSpace),
            OnError::Stop => matches!(
                error.kind,
                IoErrorKind::NoSpace
                    | IoErrorKind::ReadMedium
                    | IoErrorKind::WriteMedium
                    | IoErrorKind::Offline
            ),
        }
    }
}

/// The policy of one disk, as its workers read it.
#[derive(Debug)]
pub(crate) struct OnErrorCell {
    conditions: Arc<Conditions>,
    now: AtomicU8,
}

impl OnErrorCell {
    /// The disk's conditions say whether there is anything to read here.
    pub fn new(conditions: Arc<Conditions>) -> OnErrorCell {
        OnErrorCell {
            conditions,
            now: AtomicU8::new(OnError::Report as u8),
        }
    }

    pub fn set(&self, on_error: OnError) {
        self.now.store(on_error as u8, Ordering::Release);
        let tracked = on_error != OnError::Report;
        self.conditions.set(Condition::Tracked, tracked);
    }

    pub fn get(&self) -> OnError {
        match self.now.load(Ordering::Acquire) {
            1 => OnError::Stop,
            2 => OnError::Enospc,
            _ => OnError::Report,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_device_says_waits_and_with_enospc_only_a_full_device() {
        use IoErrorKind as K;
        let of_device = [K::NoSpace, K::ReadMedium, K::WriteMedium, K::Offline];
        for kind in K::ALL {
            let error = IoError::from(kind);
            assert!(!OnError::Report.holds(error), "{kind:?}");
            assert_eq!(OnError::Stop.holds(error), of_device.contains(&kind));
            assert_eq!(OnError::Enospc.holds(error), kind == K::NoSpace);
        }
    }

    #[test]
    fn conditions_of_the_disk_say_whether_errors_may_be_held() {
        let conditions = Arc::<Conditions>::default();
        let cell = OnErrorCell::new(conditions.clone());
        assert!(cell.get() == OnError::Report && conditions.is_clear());
        for (_, on_error) in OnError::WORDS {
            cell.set(on_error);
            let tracked = on_error != OnError::Report;
            assert_eq!(cell.get(), on_error);
            assert_eq!(conditions.has(Condition::Tracked), tracked);
        }
        cell.set(OnError::Report);
        assert!(conditions.is_clear());
    }
}
