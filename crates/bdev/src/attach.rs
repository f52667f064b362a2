//! Resources of a worker for attaching to a device: the ring, and owners for operations on it.
//!
//! A layer takes its own owner and passes the same `Attach` down. Each layer receives its completions by its owner, and uses no bits of
//! others' tokens.

use std::io;

use uring::{Owner, Ring};

/// A worker that attaches to a device.
pub struct Attach<'a> {
    ring: &'a mut Ring,
    next_owner: &'a mut dyn FnMut() -> Owner,
}

impl<'a> Attach<'a> {
    /// `next_owner` returns unused owners. The worker takes all back when the channel has closed or attaching has failed.
    pub fn new(ring: &'a mut Ring, next_owner: &'a mut dyn FnMut() -> Owner) -> Attach<'a> {
        Attach { ring, next_owner }
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
        })?;
        Ok((attached, owners))
    }

    /// Returns the worker's ring, for registering or watching descriptors.
    pub fn ring(&mut self) -> &mut Ring {
        self.ring
    }
}
