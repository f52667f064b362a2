//! Slots of the operations in flight, at stable addresses.
//!
//! The kernel may read a slot's segment array and time until the operation completes. Slots live in boxed
//! chunks: growth adds a chunk and moves no slot. A slot's number is the operation's `user_data`.

use guest_memory::IoBuffer;
use io_uring::types::Timespec;

use crate::Owner;
use crate::fd::RingFd;
use crate::message::Message;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Unused, on the free list.
    Free,
    /// An operation with one completion and no buffer.
    Plain,
    /// An operation with one completion that returns its buffer.
    Buffered,
    /// A read or write; also returns its buffer.
    Transfer,
    /// A send; returns its message.
    Message,
    /// A send without a completion if the socket accepts all bytes at once.
    Quiet,
    /// A multishot poll.
    Watch,
    /// A multishot poll with discarded completions.
    Silenced,
}

/// Data that an operation needs until it completes.
pub(crate) struct SlabSlot {
    pub(crate) used: Use,
    pub(crate) owner: Owner,
    /// Distinguishes this use of the slot from earlier ones.
    pub(crate) generation: u32,
    pub(crate) token: u64,
    pub(crate) buffer: IoBuffer,
    pub(crate) message: Option<Box<Message>>,
    pub(crate) fd: Option<RingFd>,
    pub(crate) time: Timespec,
}

const CHUNK: usize = 64;

/// Grows by chunks, never shrinks.
#[derive(Default)]
pub(crate) struct Slab {
    chunks: Vec<Box<[SlabSlot]>>,
    free: Vec<u32>,
}

impl Slab {
    pub(crate) fn take(&mut self) -> u32 {
        if let Some(index) = self.free.pop() {
            return index;
        }
        let first = self.capacity() as u32;
        let chunk = (0..CHUNK).map(|_| SlabSlot {
            used: Use::Free,
            owner: Owner(0),
            generation: 0,
            token: 0,
            buffer: IoBuffer::default(),
            message: None,
            fd: None,
            time: Timespec::new(),
        });
        self.chunks.push(chunk.collect());
        self.free.reserve(self.chunks.len() * CHUNK);
        self.free.extend((first + 1..first + CHUNK as u32).rev());
        first
    }

    pub(crate) fn release(&mut self, index: u32) {
        let slot = self.slot(index);
        slot.used = Use::Free;
        slot.fd = None;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
    }

    pub(crate) fn slot(&mut self, index: u32) -> &mut SlabSlot {
        let index = index as usize;
        &mut self.chunks[index / CHUNK][index % CHUNK]
    }

    fn capacity(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Number of slots in use.
    pub(crate) fn used(&self) -> usize {
        self.capacity() - self.free.len()
    }

    pub(crate) fn in_use(&self) -> impl Iterator<Item = u32> {
        self.numbers(|slot| slot.used != Use::Free)
    }

    /// Numbers of the slots with a pending completion for an owner, with one token or any.
    pub(crate) fn in_use_by(&self, owner: Owner, token: Option<u64>) -> impl Iterator<Item = u32> {
        self.numbers(move |slot| {
            !matches!(slot.used, Use::Free | Use::Silenced)
                && slot.owner == owner
                && token.is_none_or(|token| slot.token == token)
        })
    }

    fn numbers(&self, wanted: impl Fn(&SlabSlot) -> bool) -> impl Iterator<Item = u32> {
        let slots = self.chunks.iter().flat_map(|chunk| chunk.iter());
        let numbered = slots.enumerate();
        numbered
            .filter(move |(_, slot)| wanted(slot))
            .map(|(index, _)| index as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_do_not_move_when_the_slab_grows() {
        let mut slab = Slab::default();
        let first = slab.take();
        let address = std::ptr::from_mut(slab.slot(first));
        let taken: Vec<u32> = (0..10 * CHUNK).map(|_| slab.take()).collect();
        assert_eq!(address, std::ptr::from_mut(slab.slot(first)));
        assert_eq!(slab.used(), 10 * CHUNK + 1);
        taken.into_iter().for_each(|index| slab.release(index));
        assert_eq!(slab.used(), 1);
    }

    #[test]
    fn slot_given_back_is_another_generation() {
        let mut slab = Slab::default();
        let index = slab.take();
        let before = slab.slot(index).generation;
        slab.release(index);
        assert_eq!(slab.take(), index);
        assert_ne!(slab.slot(index).generation, before);
    }
}
