//! What a device gets from a worker that attaches to it: the worker's ring, and owners for operations on it.
//!
//! A device that stands on another takes an owner for itself and hands the same `Attach` down: every layer hears of its own
//! completions by its own owner, and none borrows bits of another's tokens.

use std::io;

use uring::{Owner, Ring};

/// A worker that attaches to a device.
pub struct Attach<'a> {
    ring: &'a mut Ring,
    next_owner: &'a mut dyn FnMut() -> Owner,
}

impl<'a> Attach<'a> {
    /// `next_owner` gives an owner that nobody else has. The worker takes all of them back when the channel has closed, or when
    /// attaching has failed.
    pub fn new(ring: &'a mut Ring, next_owner: &'a mut dyn FnMut() -> Owner) -> Attach<'a> {
        Attach { ring, next_owner }
    }

    /// An owner of this layer's own.
    pub fn owner(&mut self) -> Owner {
        (self.next_owner)()
    }

    /// Attaches to a device below, and tells its owners from those of others.
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

    /// The worker's ring, to register descriptors with or to watch them.
    pub fn ring(&mut self) -> &mut Ring {
        self.ring
    }
}
