//! A message to send: buffers, and ranges of them in stream order.
//!
//! Owned by a connection, by the ring during a send, then by the connection again. Boxed, because the kernel reads it by
//! address. Reuse does not allocate.

use guest_memory::IoBuffer;

/// Maximum ranges per system call (`UIO_MAXIOV`).
const RANGES_MAX: usize = 1024;

/// A vectored message.
pub struct Message {
    buffers: Vec<IoBuffer>,
    ranges: Vec<libc::iovec>,
    /// First unsent range.
    first: usize,
    left: u64,
    header: libc::msghdr,
}

impl Default for Message {
    fn default() -> Message {
        Message {
            buffers: Vec::new(),
            ranges: Vec::new(),
            first: 0,
            left: 0,
            // SAFETY: a structure of integers and pointers, for which all zeroes is a valid, empty value.
            header: unsafe { std::mem::zeroed() },
        }
    }
}

impl Message {
    /// Keeps a buffer until [`Message::take_buffers`]. Returns its number.
    pub fn keep(&mut self, buffer: IoBuffer) -> usize {
        self.buffers.push(buffer);
        self.buffers.len() - 1
    }

    /// Appends a range of a kept buffer's window to the message.
    ///
    /// # Panics
    /// When there is no such buffer, or the range lies outside of its window.
    pub fn add(&mut self, buffer: usize, mut offset: usize, length: usize) {
        let mut left = length;
        for segment in self.buffers[buffer].segments() {
            if left == 0 {
                break;
            }
            if offset >= segment.len() {
                offset -= segment.len();
                continue;
            }
            let here = left.min(segment.len() - offset);
            self.ranges.push(libc::iovec {
                iov_base: segment.base().wrapping_add(offset).cast(),
                iov_len: here,
            });
            left -= here;
            offset = 0;
        }
        assert!(left == 0, "range outside of buffer");
        self.left += length as u64;
    }

    /// Number of unsent bytes.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Returns true if one system call can send the rest.
    pub(crate) fn is_one_header(&self) -> bool {
        self.ranges.len() - self.first <= RANGES_MAX && self.left <= u64::from(u32::MAX >> 1)
    }

    /// Marks `bytes` more bytes as sent.
    ///
    /// # Panics
    /// When `bytes` exceeds the unsent bytes.
    pub fn sent(&mut self, bytes: u32) {
        self.left = self
            .left
            .checked_sub(bytes.into())
            .expect("no more is sent than was left");
        let mut bytes = bytes as usize;
        while bytes > 0 {
            let range = &mut self.ranges[self.first];
            let here = bytes.min(range.iov_len);
            range.iov_base = range.iov_base.cast::<u8>().wrapping_add(here).cast();
            range.iov_len -= here;
            bytes -= here;
            if range.iov_len == 0 {
                self.first += 1;
            }
        }
    }

    /// Replaces unsent ranges of buffers that were [pointed at](IoBuffer::point_at) a mapping by copies. `copy` returns the
    /// copy of a buffer, one segment that is at least as long, or `None` to leave it.
    pub fn replace_views(&mut self, mut copy: impl FnMut(&IoBuffer) -> Option<IoBuffer>) {
        for at in 0..self.buffers.len() {
            let view = &self.buffers[at];
            let Some((seen, own)) = view.view().zip(copy(view)) else {
                continue;
            };
            let into = own.segments()[0];
            assert!(into.len() >= seen.len(), "copy is shorter");
            // If views overlap, the copy of either has the bytes.
            for range in &mut self.ranges[self.first..] {
                let from = (range.iov_base as usize).wrapping_sub(seen.start);
                if from <= seen.len() && range.iov_len <= seen.len() - from {
                    range.iov_base = into.base().wrapping_add(from).cast();
                }
            }
            self.buffers[at] = own;
        }
    }

    /// Empties the message and returns its buffers.
    pub fn take_buffers(&mut self) -> std::vec::Drain<'_, IoBuffer> {
        self.ranges.clear();
        (self.first, self.left) = (0, 0);
        self.buffers.drain(..)
    }

    /// Returns the header for the kernel. It points into this message, which must not move or change before the send ends.
    pub(crate) fn header(&mut self) -> *const libc::msghdr {
        let ranges = &mut self.ranges[self.first..];
        self.header.msg_iov = ranges.as_mut_ptr();
        self.header.msg_iovlen = ranges.len().min(RANGES_MAX) as _;
        std::ptr::from_ref(&self.header)
    }
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Message")
            .field("left", &self.left)
            .field("ranges", &(self.ranges.len() - self.first))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use guest_memory::{Mapping, MappingView};

    use super::*;

    fn left(message: &Message) -> Vec<u8> {
        let mut bytes = Vec::new();
        for range in &message.ranges[message.first..] {
            // SAFETY: the message keeps the memory of its ranges.
            let range =
                unsafe { std::slice::from_raw_parts(range.iov_base.cast::<u8>(), range.iov_len) };
            bytes.extend_from_slice(range);
        }
        bytes
    }

    #[test]
    fn rest_of_borrowed_views_is_sent_from_copies() {
        let disk = Mapping::anonymous(4096).unwrap();
        let view = MappingView::new(&disk);
        for at in 0..4096 {
            disk.write(at, &[(at % 251) as u8]);
        }
        let mut message = Message::default();
        let header = message.keep(IoBuffer::owned(48));
        // The second range overlaps the first, the third is separate.
        for (from, length) in [(0, 1000), (500, 1000), (3000, 500)] {
            let mut buffer = IoBuffer::default();
            buffer.point_at(&view, from, length);
            let number = message.keep(buffer);
            message.add(header, 0, 48);
            message.add(number, 0, 300);
            message.add(number, 300, length - 300);
        }
        message.sent(48 + 310);
        let before = left(&message);
        message.replace_views(|view| {
            let length = view.len();
            let own = IoBuffer::owned(4096);
            view.copy_part(0, &own, 0, length);
            (length == 1000).then_some(own)
        });
        assert_eq!(left(&message), before);
        disk.fill(0, 3000, 0);
        assert_eq!(left(&message), before);
        disk.fill(3000, 500, 0);
        assert!(left(&message).ends_with(&[0; 500]), "it was not replaced");
    }
}
