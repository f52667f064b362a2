//! The backing image of an open image, until the image leaves it.
//!
//! An image leaves its backing image in two steps. First the header no longer names it, and each worker closes its channel to it
//! ([`BackingLink::leave`]). When no worker has such a channel, the owner closes its own and the device is dropped
//! ([`BackingLink::is_unused`]). Until then the owner allocates and zeroes clusters as before: a worker may still read clusters that the
//! image has not allocated from the backing image.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::owner::Answer;
use crate::BlockDevice;
use crate::inbox::Inbox;

/// Token of an answer that only wakes a worker. Commands have tokens from 1 on.
pub(super) const WAKE: u64 = 0;

/// Link from an image to its backing image, shared by the owner and all workers.
#[derive(Default)]
pub(super) struct BackingLink {
    /// Bytes of the backing image when the image was opened; 0 if there is none.
    bytes: u64,
    state: Mutex<LinkState>,
}

#[derive(Default)]
struct LinkState {
    /// `None` once the image has left it.
    device: Option<Arc<dyn BlockDevice>>,
    /// Workers with a channel to the backing image.
    users: Vec<Weak<BackingUser>>,
}

/// One worker's use of the backing image: exists as long as the worker's channel to it.
pub(super) struct BackingUser(Arc<Inbox<Answer>>);

impl BackingLink {
    pub fn new(device: Option<Arc<dyn BlockDevice>>) -> BackingLink {
        let bytes = device
            .as_ref()
            .map_or(0, |device| device.info().geometry.capacity_bytes());
        let state = LinkState {
            device,
            users: Vec::new(),
        };
        BackingLink {
            bytes,
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of the backing image when the image was opened.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the backing image, unless there is none or the image has left it.
    pub fn device(&self) -> Option<Arc<dyn BlockDevice>> {
        self.state().device.clone()
    }

    /// Returns the backing image for a worker that attaches to it. The worker is woken when the image leaves it.
    pub fn join(
        &self,
        inbox: &Arc<Inbox<Answer>>,
    ) -> Option<(Arc<dyn BlockDevice>, Arc<BackingUser>)> {
        let mut state = self.state();
        let device = state.device.clone()?;
        let user = Arc::new(BackingUser(Arc::clone(inbox)));
        state.users.retain(|user| user.strong_count() > 0);
        state.users.push(Arc::downgrade(&user));
        Some((device, user))
    }

    /// Gives the backing image to the owner and wakes all workers that have a channel to it. `None`: there is none.
    pub fn leave(&self) -> Option<Arc<dyn BlockDevice>> {
        let mut state = self.state();
        let device = state.device.take();
        for user in state.users.iter().filter_map(Weak::upgrade) {
            user.0.put(WAKE, Ok(Vec::new()));
        }
        device
    }

    /// Returns true if the image has left its backing image.
    pub fn is_left(&self) -> bool {
        self.state().device.is_none()
    }

    /// Returns true if no worker has a channel to the backing image.
    pub fn is_unused(&self) -> bool {
        let mut state = self.state();
        state.users.retain(|user| user.strong_count() > 0);
        state.users.is_empty()
    }

    /// Takes the backing image of an image that is dropped.
    pub fn take(&mut self) -> Option<Arc<dyn BlockDevice>> {
        let state = self.state.get_mut();
        state.unwrap_or_else(PoisonError::into_inner).device.take()
    }
}
