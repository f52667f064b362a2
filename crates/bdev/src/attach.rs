//! Resources of a worker for attaching to a device: the ring, and owners for operations on it.
//!
//! A layer takes its own owner and passes the same `Attach` down. Each layer receives its completions by its owner, and uses no bits of
//! others' tokens.

use std::io;
use std::sync::Arc;

use uring::{Owner, Ring};

use crate::turn_lock::{InUse, LockWait, TurnLocks};

/// Callback that makes a worker attach again. Called on any thread; must be quick.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Locks that a worker waits for, of one device with all its layers. Kept from one attempt to attach to the next.
pub struct LockWaits {
    wake: Wake,
    waits: Vec<LockWait>,
    is_pending: bool,
}

impl LockWaits {
    /// Creates the waits of a device. `wake` is called when an attempt to take a lock has ended.
    pub fn new(wake: Wake) -> LockWaits {
        LockWaits {
            wake,
            waits: Vec::new(),
            is_pending: false,
        }
    }

    /// Returns true if the last attempt to attach failed because locks are being taken.
    pub fn is_pending(&self) -> bool {
        self.is_pending
    }

    /// Ends the waits, after success or failure.
    pub fn clear(&mut self) {
        self.waits.clear();
        self.is_pending = false;
    }

    fn begin_use(&mut self, device: Arc<dyn TurnLocks>) -> io::Result<InUse> {
        if !self.waits.iter().any(|wait| wait.is_of(&device)) {
            match LockWait::begin(&device, &self.wake) {
                Some(wait) => self.waits.push(wait),
                None => return InUse::begin(device),
            }
        }
        let known = self.waits.iter().find(|wait| wait.is_of(&device));
        match known.map(LockWait::result).transpose()?.flatten() {
            Some(in_use) => Ok(in_use),
            None => {
                self.is_pending = true;
                let (object, service) = (device.object(), device.lock_service());
                Err(io::Error::new(
                    io::ErrorKind::WouldBlock,
                    format!(
                        "{object}: the request for the lock is not answered; hint: check {service}"
                    ),
                ))
            }
        }
    }
}

/// A worker that attaches to a device.
pub struct Attach<'a> {
    ring: &'a mut Ring,
    next_owner: &'a mut dyn FnMut() -> Owner,
    /// `None`: the thread may wait for locks.
    waits: Option<&'a mut LockWaits>,
}

impl<'a> Attach<'a> {
    /// `next_owner` returns unused owners. The worker takes all back when the channel has closed or attaching has failed.
    pub fn new(ring: &'a mut Ring, next_owner: &'a mut dyn FnMut() -> Owner) -> Attach<'a> {
        Attach {
            ring,
            next_owner,
            waits: None,
        }
    }

    /// Makes attaching fail with [`io::ErrorKind::WouldBlock`] while locks are being taken, for a thread that must not wait. The locks stay
    /// taken for the next attempt with the same `waits`.
    #[must_use]
    pub fn without_waiting(self, waits: &'a mut LockWaits) -> Attach<'a> {
        waits.is_pending = false;
        Attach {
            waits: Some(waits),
            ..self
        }
    }

    /// Begins a use of a device.
    pub(crate) fn begin_use(&mut self, device: Arc<dyn TurnLocks>) -> io::Result<InUse> {
        match &mut self.waits {
            Some(waits) => waits.begin_use(device),
            None => InUse::begin(device),
        }
    }

    /// Returns a new owner for this layer.
    pub fn owner(&mut self) -> Owner {
        (self.next_owner)()
    }

    /// Attaches to a device below; returns the owners that it took.
    pub(crate) fn below<T>(
        &mut self,
        attach: impl FnOnce(&mut Attach<'_>) -> io::Result<T>,
    ) -> io::Result<(T, Vec<Owner>)> {
        let mut owners = Vec::new();
        let next = &mut self.next_owner;
        let mut next_owner = || {
            let owner = next();
            owners.push(owner);
            owner
        };
        let attached = attach(&mut Attach {
            ring: self.ring,
            next_owner: &mut next_owner,
            waits: self.waits.as_deref_mut(),
        })?;
        Ok((attached, owners))
    }

    /// Returns the worker's ring, for registering or watching descriptors.
    pub fn ring(&mut self) -> &mut Ring {
        self.ring
    }
}
