//! What the commands of a client hold of this process' memory is bounded, however many it sends and however large: those that need
//! their data there, or that read and write by way of it. A command that finds no room is answered TASK SET FULL (SAM-5, 5.3.1),
//! and its driver sends it again when others have ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use scsi::TRANSFER_MAX;

/// The memory of a client: of a virtio-scsi controller, or of an iSCSI session.
#[derive(Debug)]
pub struct WorkMemory {
    most: usize,
    held: AtomicUsize,
}

impl WorkMemory {
    /// So many bytes for all commands together; one that needs more has them alone.
    pub fn new(most: usize) -> Arc<WorkMemory> {
        Arc::new(WorkMemory {
            most,
            held: AtomicUsize::new(0),
        })
    }

    /// So many bytes more for a command that has `own`.
    fn take(&self, own: usize, bytes: usize) -> bool {
        let more = |held: usize| {
            let all = held.checked_add(bytes)?;
            (held == own || all <= self.most).then_some(all)
        };
        let taken = self
            .held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok()
    }
}

/// What a command holds of it.
#[derive(Debug, Default)]
pub(crate) struct Held {
    memory: Option<Arc<WorkMemory>>,
    bytes: usize,
    /// What it works on is counted.
    works: bool,
}

impl Held {
    /// Is there room for a task that works on `scratch` bytes, or has it begun to? `data_in`: what its client has room for.
    pub fn take_for_work(
        &mut self,
        memory: &Arc<WorkMemory>,
        scratch: usize,
        data_in: u32,
    ) -> bool {
        if !self.works {
            // As much again is under way to the disk or from it, and what was read is kept until it is all there.
            let read = u64::from(data_in).min(TRANSFER_MAX) as usize;
            self.works = self.extend(memory, 2 * scratch + read);
        }
        self.works
    }

    /// So many bytes more; false: there are not so many.
    pub fn extend(&mut self, memory: &Arc<WorkMemory>, bytes: usize) -> bool {
        let taken = memory.take(self.bytes, bytes);
        if taken {
            self.memory = Some(memory.clone());
            self.bytes += bytes;
        }
        taken
    }

    /// All of it: the command is over.
    #[inline]
    pub fn give_back(&mut self) {
        if let Some(memory) = self.memory.take() {
            memory.held.fetch_sub(self.bytes, Ordering::Relaxed);
            (self.bytes, self.works) = (0, false);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_given_back_and_never_more_than_there_is() {
        let memory = WorkMemory::new(128);
        let (mut one, mut two) = (Held::default(), Held::default());
        assert!(one.extend(&memory, 64) && one.extend(&memory, 32));
        assert!(!two.extend(&memory, 64) && !two.extend(&memory, usize::MAX));
        assert!(two.extend(&memory, 32));
        assert!(!one.extend(&memory, 1));
        drop(one);
        assert!(two.extend(&memory, 96));
        drop(two);
        assert_eq!(memory.held.load(Ordering::Relaxed), 0);
    }

    /// It would be answered TASK SET FULL for ever.
    #[test]
    fn a_command_that_needs_more_than_there_is_has_it_alone() {
        let memory = WorkMemory::new(128);
        let (mut large, mut small) = (Held::default(), Held::default());
        assert!(small.extend(&memory, 1) && !large.extend(&memory, 200));
        drop(small);
        assert!(large.extend(&memory, 200));
        assert!(!Held::default().extend(&memory, 1));
        // First for its data, then for what it works on.
        assert!(large.extend(&memory, 50));
        drop(large);
        assert!(Held::default().extend(&memory, 128));
    }
}
