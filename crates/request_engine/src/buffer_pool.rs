//! Page-aligned memory for the data of one connection.
//!
//! Free buffers are kept by size class and reused without being zeroed: only bytes that were written for the current request are sent. Empty
//! shells, which point at memory of a disk, are kept too, for their heap allocation. The caller limits the memory in use.

use std::ops::Range;

use guest_memory::IoBuffer;

const CLASSES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Maximum bytes of free buffers that are kept.
const KEPT_MAX: usize = 16 << 20;
/// Maximum number of free shells: one for each request of a full window and for each response that is being sent.
const SHELLS_MAX: usize = 256;

/// Buffers of one connection.
#[derive(Default)]
pub struct BufferPool {
    free: [Vec<IoBuffer>; CLASSES.len()],
    shells: Vec<IoBuffer>,
    kept: usize,
    in_use: usize,
}

fn class(length: usize) -> Option<usize> {
    CLASSES.iter().position(|size| length <= *size)
}

/// Returns the size of a buffer for `length` bytes.
#[inline]
pub fn buffer_size(length: usize) -> usize {
    class(length).map_or(length, |class| CLASSES[class])
}

impl BufferPool {
    /// Returns the bytes of all buffers that were taken and not given back.
    #[inline]
    pub fn in_use(&self) -> usize {
        self.in_use
    }

    /// Returns the bytes of all buffers: in use, and free.
    #[inline]
    pub fn held(&self) -> usize {
        self.in_use + self.kept
    }

    /// Returns the bytes held after `more` bytes are taken. Assumes that free buffers are reused, unless `more` exceeds the largest size class.
    #[inline]
    pub fn held_with(&self, more: usize) -> usize {
        match more <= self.kept && more <= CLASSES[CLASSES.len() - 1] {
            true => self.held(),
            false => self.held() + more,
        }
    }

    /// Frees all unused buffers. Returns false if there are none.
    #[cold]
    pub fn free_unused(&mut self) -> bool {
        self.free.iter_mut().for_each(|free| *free = Vec::new());
        std::mem::take(&mut self.kept) > 0
    }

    /// Takes a buffer of at least `length` bytes.
    #[inline]
    pub fn take(&mut self, length: usize) -> IoBuffer {
        let class = class(length);
        self.in_use += buffer_size(length);
        match class.and_then(|class| self.free[class].pop()) {
            Some(buffer) => {
                self.kept -= buffer.total_len();
                buffer
            }
            None => IoBuffer::owned(buffer_size(length)),
        }
    }

    /// Takes an empty buffer that can point at memory of a disk, or at a part of another buffer.
    #[inline]
    pub fn take_shell(&mut self) -> IoBuffer {
        self.shells.pop().unwrap_or_default()
    }

    /// Gives a shell back and releases its pin.
    #[inline]
    pub fn give_shell(&mut self, mut shell: IoBuffer) {
        if self.shells.len() < SHELLS_MAX {
            shell.clear();
            self.shells.push(shell);
        }
    }

    /// Gives a buffer or a shell back.
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

    /// Stops counting a buffer that the kernel may still write to. It is not reused.
    pub fn lose(&mut self, buffer: &IoBuffer) {
        self.in_use -= buffer.total_len();
    }

    /// Copies the data of a shell that overlaps one of these address ranges.
    pub fn copy_held(&mut self, shell: &IoBuffer, held: &[Range<usize>]) -> Option<IoBuffer> {
        let view = shell.view()?;
        let overlaps = |range: &Range<usize>| view.start < range.end && range.start < view.end;
        if !held.iter().any(overlaps) {
            return None;
        }
        let own = self.take(view.len());
        shell.copy_part(0, &own, 0, view.len());
        Some(own)
    }

    /// Frees all unused buffers and shells.
    pub fn trim(&mut self) {
        self.free_unused();
        self.shells = Vec::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_and_freed() {
        let mut pool = BufferPool::default();
        let buffer = pool.take(5000);
        assert_eq!(pool.in_use(), 16 << 10);
        buffer.write_at(0, b"moon");
        pool.give(buffer);
        assert_eq!(pool.in_use(), 0);
        let mut bytes = [0; 4];
        let again = pool.take(16 << 10);
        again.read_at(0, &mut bytes);
        assert_eq!(&bytes, b"moon");
        pool.give(again);
        pool.trim();
        assert_eq!(pool.kept, 0);
        assert!(pool.free.iter().all(Vec::is_empty));
    }
}
