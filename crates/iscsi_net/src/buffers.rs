//! Page-aligned memory for command data: a pool per connection, bounded.
//!
//! Buffers are kept by size class and used again without being zeroed: what is sent of one is only what was put there
//! for that command. Kept as well: shells, which point at memory of others, for their heap space.

use guest_memory::IoBuffer;

/// Sizes that are kept.
const CLASSES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Bytes kept while nobody uses them.
const KEPT_MAX: usize = 16 << 20;
/// Shells kept: as many as commands of a full window, and what is being sent of them.
const SHELLS_MAX: usize = 256;

pub(crate) struct Buffers {
    free: [Vec<IoBuffer>; CLASSES.len()],
    shells: Vec<IoBuffer>,
    kept: usize,
    in_use: usize,
    limit: usize,
}

fn class(length: usize) -> Option<usize> {
    CLASSES.iter().position(|size| length <= *size)
}

fn size(length: usize) -> usize {
    class(length).map_or(length, |class| CLASSES[class])
}

impl Buffers {
    pub fn new(limit: usize) -> Buffers {
        Buffers {
            free: Default::default(),
            shells: Vec::new(),
            kept: 0,
            in_use: 0,
            limit,
        }
    }

    /// A buffer of at least so many bytes, unless too much is in use. One that is larger than the limit gets its memory when
    /// nothing else has any.
    #[inline]
    pub fn take(&mut self, length: usize) -> Option<IoBuffer> {
        let size = size(length);
        if self.in_use > 0 && size > self.limit.saturating_sub(self.in_use) {
            return None;
        }
        Some(self.take_anyway(length))
    }

    /// As [`Buffers::take`], whatever is in use: for what is bounded elsewhere.
    #[inline]
    pub fn take_anyway(&mut self, length: usize) -> IoBuffer {
        let class = class(length);
        self.in_use += size(length);
        match class.and_then(|class| self.free[class].pop()) {
            Some(buffer) => {
                self.kept -= buffer.total_len();
                buffer
            }
            None => IoBuffer::owned(size(length)),
        }
    }

    /// An empty buffer to point at memory of others; to be given back by [`Buffers::give_shell`].
    #[inline]
    pub fn take_shell(&mut self) -> IoBuffer {
        self.shells.pop().unwrap_or_default()
    }

    /// Takes a shell back, and with it its pin.
    #[inline]
    pub fn give_shell(&mut self, mut shell: IoBuffer) {
        if self.shells.len() < SHELLS_MAX {
            shell.clear();
            self.shells.push(shell);
        }
    }

    /// Takes a buffer back, or a shell that points at a disk.
    #[inline]
    pub fn give(&mut self, buffer: IoBuffer) {
        if !buffer.is_owned() {
            return self.give_shell(buffer);
        }
        let size = buffer.total_len();
        self.in_use -= size;
        if let Some(class) = CLASSES.iter().position(|class| *class == size)
            && self.kept + size <= KEPT_MAX
        {
            self.kept += size;
            self.free[class].push(buffer);
        }
    }

    /// A buffer that somebody else may still write to is gone.
    pub fn lose(&mut self, buffer: &IoBuffer) {
        self.in_use -= buffer.total_len();
    }

    /// Bytes in use.
    pub fn in_use(&self) -> usize {
        self.in_use
    }

    /// Lets go of what is kept.
    pub fn trim(&mut self) {
        self.free.iter_mut().for_each(|free| *free = Vec::new());
        self.shells = Vec::new();
        self.kept = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_in_use_is_bounded_but_one_large_buffer_gets_through() {
        let mut buffers = Buffers::new(64 << 10);
        let large = buffers.take(1 << 20).unwrap();
        assert!(buffers.take(1).is_none());
        buffers.give(large);
        let held: Vec<_> = (0..16).map(|_| buffers.take(4096).unwrap()).collect();
        assert!(buffers.take(1).is_none());
        assert_eq!(buffers.take_anyway(1).total_len(), 4096);
        held.into_iter().for_each(|buffer| buffers.give(buffer));
        assert!(buffers.take(1).is_some());
    }

    #[test]
    fn buffers_are_used_again_and_let_go_of() {
        let mut buffers = Buffers::new(1 << 20);
        let buffer = buffers.take(5000).unwrap();
        buffer.write_at(0, b"moon");
        buffers.give(buffer);
        let mut bytes = [0; 4];
        let again = buffers.take(16 << 10).unwrap();
        again.read_at(0, &mut bytes);
        assert_eq!(&bytes, b"moon");
        buffers.give(again);
        buffers.trim();
        assert_eq!(buffers.kept, 0);
        assert!(buffers.free.iter().all(Vec::is_empty));
    }
}
