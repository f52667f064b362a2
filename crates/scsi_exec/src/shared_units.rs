//! Logical units on disks that share their state with other daemons. State changes reported by the device are passed to the unit. Aborts
//! that follow from them reach all runners of this process.
//!
//! Control plane: called on threads of the device. Tests: `tests/tests/rbd_reservations.rs`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bdev::{Disk, StateMembership, StateObserver};
use block::Identity;
use latency::Clock;
use scsi::{LogicalUnit, Store, Unusable};

use crate::runners::{Call, TaskOperation};
use crate::{Runners, Units};

const _: () = assert!(bdev::STATE_MAX == scsi::SHARED_STATE_MAX);

/// Key of the daemon's number in the store.
pub(crate) const DAEMON: &str = "daemon";

/// Number that identifies this daemon to other daemons.
struct Number {
    number: u128,
    /// The store has the number or can save it.
    may_be_saved: bool,
}

/// Returns the number of this daemon, created once and saved.
///
/// If the saved number cannot be used, a random one serves this process and the damaged file stays. Registrations of the saved number still
/// fence, and belong to no initiator of this process.
fn daemon(store: &dyn Store) -> Number {
    let saved = store.load(DAEMON).and_then(|bytes| {
        let Some(bytes) = bytes else { return Ok(None) };
        let number = bytes.try_into().ok().map(u128::from_be_bytes);
        let malformed = || Unusable(format!("{DAEMON}: unknown format"));
        number
            .filter(|number| *number != 0)
            .ok_or_else(malformed)
            .map(Some)
    });
    let random = || Identity::random().bits();
    match saved {
        Ok(Some(number)) => Number {
            number,
            may_be_saved: true,
        },
        Ok(None) => {
            let number = random();
            // If the number cannot be saved, initiators must register again after a restart. The store logs the error.
            store.save(DAEMON, &number.to_be_bytes()).ok();
            Number {
                number,
                may_be_saved: true,
            }
        }
        Err(error) => {
            tracing::error!(
                "cannot read the number of this daemon, initiators lose their registrations on shared images: {error}"
            );
            Number {
                number: random(),
                may_be_saved: false,
            }
        }
    }
}

/// Joins the state that the disk's device shares with other daemons, until the result is dropped. Returns `None` if it shares none.
pub(crate) fn join(
    units: &Weak<Units>,
    disk: &Disk,
    unit: &Arc<LogicalUnit>,
    store: &dyn Store,
    runners: &Arc<Runners>,
) -> Option<StateMembership> {
    let device = disk.device();
    let state = device.capabilities().shared_state?;
    let Number {
        number: daemon,
        may_be_saved,
    } = daemon(store);
    // The clock is read for each command of such a unit; its device is a cluster image.
    unit.share_reservations(daemon, || Clock::shared().elapsed());
    let observer = Observer {
        units: units.clone(),
        unit: Arc::downgrade(unit),
        daemon,
        may_be_saved,
        runners: Arc::clone(runners),
        aborting: Arc::default(),
    };
    Some(state.join(Arc::new(observer)))
}

struct Observer {
    units: Weak<Units>,
    unit: Weak<LogicalUnit>,
    daemon: u128,
    /// The saved number is not damaged, and may be saved again.
    may_be_saved: bool,
    runners: Arc<Runners>,
    /// Number of aborts that have not completed.
    aborting: Arc<AtomicUsize>,
}

impl StateObserver for Observer {
    fn changed(&self, version: u64, state: &[u8]) -> Result<(), String> {
        let Some(unit) = self.unit.upgrade() else {
            return Ok(());
        };
        if self.may_be_saved
            && let Some(units) = self.units.upgrade()
            && units.has_unsaved_ports()
        {
            // Registrations refer to ports by numbers that must be the same after a restart.
            units.store().save(DAEMON, &self.daemon.to_be_bytes()).ok();
        }
        if let Some(scope) = unit.adopt_reservations(version, state)? {
            self.aborting.fetch_add(1, Ordering::AcqRel);
            let aborting = Arc::clone(&self.aborting);
            let call = Call::of_scope(scope, TaskOperation::Abort);
            self.runners.call(&call, move || {
                aborting.fetch_sub(1, Ordering::AcqRel);
            });
        }
        Ok(())
    }

    fn is_settled(&self) -> bool {
        self.aborting.load(Ordering::Acquire) == 0
    }

    fn set_current(&self, current: bool) {
        if let Some(unit) = self.unit.upgrade() {
            unit.set_reservations_current(current);
        }
    }

    fn set_valid_until(&self, until: Duration) {
        if let Some(unit) = self.unit.upgrade() {
            unit.set_reservations_valid_until(until);
        }
    }

    fn after_power_on(&self, _version: u64, state: &[u8]) -> Option<Vec<u8>> {
        self.unit.upgrade()?.reservations_after_power_on(state)
    }
}

#[cfg(test)]
mod tests {
    use scsi::MemoryStore;

    use super::*;

    #[test]
    fn number_of_a_daemon_is_made_once_for_its_store() {
        let (store, other) = (MemoryStore::default(), MemoryStore::default());
        let number = daemon(&store).number;
        assert!(number != 0 && number == daemon(&store).number);
        assert_ne!(number, daemon(&other).number);
        store.save(DAEMON, b"short").unwrap();
        let damaged = daemon(&store);
        assert!(damaged.number != number && !damaged.may_be_saved);
        assert_eq!(store.load(DAEMON), Ok(Some(b"short".to_vec())), "it stays");
    }
}
