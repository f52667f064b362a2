//! Limits the memory that the commands of a client hold in this process, regardless of their number and size. Counted are commands that
//! need their data-out in memory, and commands that use scratch memory. A command that finds no room is answered TASK SET FULL (SAM-5,
//! 5.3.1); its driver sends it again when other commands have ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use scsi::TRANSFER_MAX;

/// Memory budget of a client: a virtio-scsi controller or an iSCSI session.
#[derive(Debug)]
pub struct WorkMemory {
    most: usize,
    held: AtomicUsize,
}

impl WorkMemory {
    /// Creates a budget of `most` bytes for all commands together. A command that needs more gets it if no other command holds memory.
    pub fn new(most: usize) -> Arc<WorkMemory> {
        Arc::new(WorkMemory {
            most,
            held: AtomicUsize::new(0),
        })
    }

    /// Takes `bytes` more for a command that holds `own` bytes.
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

/// Part of the budget that one command holds.
#[derive(Debug, Default)]
pub(crate) struct Held {
    memory: Option<Arc<WorkMemory>>,
    bytes: usize,
    /// The scratch memory is counted.
    works: bool,
}

impl Held {
    /// Returns true if the scratch memory of a task is counted already or there is room for it. `data_in`: size of the client's data-in
    /// buffer, in bytes.
    pub fn take_for_work(
        &mut self,
        memory: &Arc<WorkMemory>,
        scratch: usize,
        data_in: u32,
    ) -> bool {
        if !self.works {
            // Twice the scratch size, because the I/O uses a copy. Data that were read are kept until they are complete.
            let read = u64::from(data_in).min(TRANSFER_MAX) as usize;
            self.works = self.extend(memory, 2 * scratch + read);
        }
        self.works
    }

    /// Takes `bytes` more. Returns false if the budget does not allow it.
    pub fn extend(&mut self, memory: &Arc<WorkMemory>, bytes: usize) -> bool {
        let taken = memory.take(self.bytes, bytes);
        if taken {
            self.memory = Some(memory.clone());
            self.bytes += bytes;
        }
        taken
    }

    /// Returns all memory to the budget at the end of the command.
    #[inline]
    pub fn release(&mut self) {
        if let Some(memory) = self.memory.take() {
            memory.held.fetch_sub(self.bytes, Ordering::Relaxed);
            (self.bytes, self.works) = (0, false);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_returned_and_never_overcommitted() {
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

    /// Otherwise it would be answered TASK SET FULL every time.
    #[test]
    fn oversized_command_gets_all_memory_alone() {
        let memory = WorkMemory::new(128);
        let (mut large, mut small) = (Held::default(), Held::default());
        assert!(small.extend(&memory, 1) && !large.extend(&memory, 200));
        drop(small);
        assert!(large.extend(&memory, 200));
        assert!(!Held::default().extend(&memory, 1));
        // First for its data, then for scratch memory.
        assert!(large.extend(&memory, 50));
        drop(large);
        assert!(Held::default().extend(&memory, 128));
    }
}
