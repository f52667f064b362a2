//! A worker's end of an [`Inbox`]: the watch on its event, and memory for the answers that it takes.

use std::io;
use std::sync::Arc;

use uring::{Owner, Ring, WatchId};

use crate::inbox::Inbox;

pub(crate) struct WatchedInbox<T> {
    inbox: Arc<Inbox<T>>,
    /// Owner and token of the watch's completions.
    owner: Owner,
    token: u64,
    /// `None` once the channel closes.
    watch: Option<WatchId>,
    /// Reusable memory for answers.
    answers: Vec<(u64, T)>,
}

impl<T> WatchedInbox<T> {
    /// Creates an inbox and watches its event.
    pub fn new(ring: &mut Ring, owner: Owner, token: u64) -> io::Result<WatchedInbox<T>> {
        let inbox = Arc::new(Inbox::new(ring.event()?));
        WatchedInbox::of(inbox, ring, owner, token)
    }

    /// Watches the event of an inbox.
    pub fn of(
        inbox: Arc<Inbox<T>>,
        ring: &mut Ring,
        owner: Owner,
        token: u64,
    ) -> io::Result<WatchedInbox<T>> {
        let watch = ring.watch_event(owner, token, &inbox.event)?;
        Ok(WatchedInbox {
            inbox,
            owner,
            token,
            watch: Some(watch),
            answers: Vec::new(),
        })
    }

    /// Returns the inbox, for the threads that answer.
    pub fn inbox(&self) -> &Arc<Inbox<T>> {
        &self.inbox
    }

    /// Takes all answers after a completion of the watch. `more`: the kernel has not ended the watch. Call [`WatchedInbox::reuse`] with the
    /// empty list.
    pub fn take(&mut self, ring: &mut Ring, more: bool) -> Vec<(u64, T)> {
        if !more {
            self.watch_again(ring);
        }
        let mut answers = std::mem::take(&mut self.answers);
        self.inbox.take(&mut answers);
        answers
    }

    /// Keeps the memory of an empty list for later answers.
    pub fn reuse(&mut self, answers: Vec<(u64, T)>) {
        self.answers = answers;
    }

    /// Watches the event again after the kernel has ended the watch, possibly for lack of memory.
    #[cold]
    fn watch_again(&mut self, ring: &mut Ring) {
        if self.watch.is_none() {
            return;
        }
        match ring.watch_event(self.owner, self.token, &self.inbox.event) {
            Ok(again) => self.watch = Some(again),
            Err(error) => tracing::error!("cannot watch for completions of a disk: {error}"),
        }
    }

    /// Ends the watch.
    pub fn close(&mut self, ring: &mut Ring) {
        if let Some(watch) = self.watch.take() {
            ring.unwatch(watch);
        }
    }

    pub fn is_closed(&self) -> bool {
        self.watch.is_none()
    }
}

#[cfg(test)]
mod tests {
    use uring::Wait;

    use super::*;

    #[test]
    fn watch_that_the_kernel_has_ended_keeps_owner_and_token() {
        let mut ring = Ring::new(4).unwrap();
        let mut watched = WatchedInbox::new(&mut ring, Owner(5), 3).unwrap();
        // The first watch ends here: only the second one can complete.
        ring.unwatch(watched.watch.unwrap());
        assert!(watched.take(&mut ring, false).is_empty());
        watched.inbox().put(7, 'a');
        let mut completions = Vec::new();
        while completions.is_empty() {
            ring.enter(Wait::Until(None), &mut completions).unwrap();
        }
        let ids = completions.iter().map(|one| (one.owner, one.token));
        assert_eq!(ids.collect::<Vec<_>>(), [(Owner(5), 3)]);
        assert_eq!(watched.take(&mut ring, true), [(7, 'a')]);
        watched.close(&mut ring);
        assert!(watched.is_closed());
        assert!(watched.take(&mut ring, false).is_empty() && watched.is_closed());
    }
}
