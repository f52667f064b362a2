//! The memory of one I/O: segments, and the pin that keeps them mapped.
//!
//! A buffer is owned by the request's slot, by the block device while the I/O runs, then by the slot again; it never
//! leaves its worker. The *window* selects the data part of a descriptor chain: one buffer with one pin carries header,
//! data and status of a request. Refilling a used buffer does not allocate. Offsets are asserted, because they are
//! computed by the daemon and never taken from a peer.

use std::alloc::Layout;
use std::cell::{Cell, OnceCell};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::{DirtyLog, GuestView, Mapping, MappingView, Registration};

mod bytes;
mod contiguous;
mod window;

pub(crate) use contiguous::{prefetch_line, prefetch_line_to_write};

/// A contiguous piece of memory, with the layout of `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    base: *mut u8,
    length: usize,
}

impl Segment {
    pub(crate) fn new(base: *mut u8, length: usize) -> Segment {
        Segment { base, length }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns true if the segment has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Address, for the kernel. It is valid while the buffer is held.
    pub fn base(&self) -> *mut u8 {
        self.base
    }
}

/// Page-aligned memory of the daemon: bounce buffers, scratch memory of multi-step commands.
struct Owned {
    base: NonNull<u8>,
    layout: Layout,
    /// Number of I/Os with this memory before its registration.
    io_count: Cell<u32>,
    registration: OnceCell<Registration>,
}

const PAGE: usize = 4096;

/// I/Os before memory is registered. Registration costs as much as it saves in a few I/Os.
const IOS_BEFORE_REGISTRATION: u32 = 8;

impl Owned {
    fn new(length: usize) -> Rc<Owned> {
        let size = length.max(1).checked_next_multiple_of(PAGE);
        let layout = size.and_then(|size| Layout::from_size_align(size, PAGE).ok());
        let layout = layout.expect("length below isize::MAX");
        // SAFETY: the layout's size is not zero.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else {
            std::alloc::handle_alloc_error(layout)
        };
        Rc::new(Owned {
            base,
            layout,
            io_count: Cell::new(0),
            registration: OnceCell::new(),
        })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`, freed once.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// Owner of the segments' memory.
#[derive(Clone, Default)]
enum Pin {
    #[default]
    Unpinned,
    Guest(GuestView),
    Owned(Rc<Owned>),
    Mapping(Arc<Mapping>),
    // Held only for its drop.
    View(#[expect(dead_code)] MappingView),
}

/// Memory of one I/O, and the pin that keeps it mapped.
#[derive(Clone, Default)]
pub struct IoBuffer {
    segments: Vec<Segment>,
    /// Segments of the window: `first..end`. `u32` suffices: a segment takes 16 bytes, so there are fewer than 2^32.
    first: u32,
    end: u32,
    /// First segment of the chain's second half, which the device writes.
    middle: u32,
    /// Bytes in the window.
    window: usize,
    /// Bytes in all segments.
    total: usize,
    pin: Pin,
}

impl IoBuffer {
    /// Allocates zeroed, page-aligned memory.
    pub fn owned(length: usize) -> IoBuffer {
        let memory = Owned::new(length);
        let mut buffer = IoBuffer::default();
        buffer.push(Segment::new(memory.base.as_ptr(), length));
        buffer.pin = Pin::Owned(memory);
        buffer
    }

    /// Creates a buffer over a range of a mapping.
    ///
    /// # Panics
    /// When the range lies outside of the mapping.
    pub fn of_mapping(mapping: &Arc<Mapping>, offset: usize, length: usize) -> IoBuffer {
        let mut buffer = IoBuffer::default();
        buffer.push(Segment::new(mapping.checked(offset, length), length));
        buffer.pin = Pin::Mapping(mapping.clone());
        buffer
    }

    /// Replaces the contents by a read-only reference to a range of a mapping. Keeps its heap space.
    ///
    /// # Panics
    /// When the range lies outside of the mapping.
    #[inline]
    pub fn point_at(&mut self, view: &MappingView, offset: usize, length: usize) {
        self.clear();
        self.push(Segment::new(view.checked(offset, length), length));
        self.pin = Pin::View(view.clone());
    }

    /// Returns true if the memory was allocated by [`IoBuffer::owned`].
    #[inline]
    pub fn is_owned(&self) -> bool {
        matches!(self.pin, Pin::Owned(_))
    }

    /// Registration of the memory with a ring, if any.
    #[inline]
    pub fn registration(&self) -> Option<&Registration> {
        match &self.pin {
            Pin::Owned(memory) => memory.registration.get(),
            _ => None,
        }
    }

    /// Returns the memory to register, if it is owned, unregistered and used often. Call once per I/O. Returns it after
    /// `IOS_BEFORE_REGISTRATION` calls and again each time that their number has doubled.
    #[inline]
    pub fn to_register(&self) -> Option<Segment> {
        let Pin::Owned(memory) = &self.pin else {
            return None;
        };
        if memory.registration.get().is_some() {
            return None;
        }
        let io_count = memory.io_count.get().saturating_add(1);
        memory.io_count.set(io_count);
        let due = io_count >= IOS_BEFORE_REGISTRATION && io_count.is_power_of_two();
        due.then(|| Segment::new(memory.base.as_ptr(), memory.layout.size()))
    }

    /// Records the registration of the memory returned by [`IoBuffer::to_register`].
    pub fn registered(&self, registration: Registration) {
        if let Pin::Owned(memory) = &self.pin {
            // A second registration is dropped, which vacates its index.
            drop(memory.registration.set(registration));
        }
    }

    /// Address range, for comparison, if the buffer was [pointed](IoBuffer::point_at) at a mapping.
    pub fn view(&self) -> Option<std::ops::Range<usize>> {
        match self.segments() {
            [one] if self.is_view() => Some(one.base as usize..one.base as usize + one.length),
            _ => None,
        }
    }

    /// Empties the buffer and drops its pin. Keeps its heap space.
    #[inline]
    pub fn clear(&mut self) {
        self.segments.clear();
        (self.first, self.end, self.middle) = (0, 0, 0);
        (self.window, self.total) = (0, 0);
        self.pin = Pin::Unpinned;
    }

    /// Prepares for reuse by an appender. Keeps the heap space and, if it is on `view`, the pin.
    #[inline]
    pub fn recycle(&mut self, view: &GuestView) {
        // Contents of this view may stay until the buffer is filled again.
        if !matches!(&self.pin, Pin::Guest(held) if held.is_same(view)) {
            self.clear();
        }
    }

    /// Empties the buffer and pins `view`, at the start of a chain.
    #[inline(always)]
    pub(crate) fn start(&mut self, view: &GuestView) {
        self.segments.clear();
        (self.first, self.end, self.middle) = (0, 0, 0);
        (self.window, self.total) = (0, 0);
        if !matches!(&self.pin, Pin::Guest(held) if held.is_same(view)) {
            self.pin = Pin::Guest(view.clone());
        }
    }

    /// Same as [`IoBuffer::start`], for a filler, which sets the other fields when it finishes.
    #[inline(always)]
    pub(crate) fn refill(&mut self, view: &GuestView) {
        self.segments.clear();
        if !matches!(&self.pin, Pin::Guest(held) if held.is_same(view)) {
            self.start(view);
        }
    }

    /// Appends a segment without widening the window; [`IoBuffer::open`] does that once for many segments.
    #[inline(always)]
    pub(crate) fn extend(&mut self, segment: Segment) {
        self.segments.push(segment);
        self.total += segment.length;
    }

    /// Segments of the whole buffer.
    pub(crate) fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// Storage for segments, to be completed by [`IoBuffer::filled`].
    #[inline(always)]
    pub(crate) fn segments_mut(&mut self) -> &mut Vec<Segment> {
        &mut self.segments
    }

    /// Completes the buffer: all segments with `total` bytes are present, and the second half begins with segment
    /// `middle`. The window becomes the whole buffer.
    #[inline(always)]
    pub(crate) fn filled(&mut self, total: usize, middle: usize) {
        self.total = total;
        self.middle = middle as u32;
        self.open();
    }

    /// Marks the end of the first half.
    #[inline]
    pub(crate) fn begin_second_half(&mut self) {
        self.middle = self.segments.len() as u32;
    }

    /// Widens the window to the whole buffer.
    #[inline(always)]
    pub(crate) fn open(&mut self) {
        (self.first, self.end, self.window) = (0, self.segments.len() as u32, self.total);
    }

    #[inline]
    pub(crate) fn pin_guest(&mut self, view: &GuestView) {
        match &self.pin {
            Pin::Guest(held) if held.is_same(view) => {}
            Pin::Unpinned if self.segments.is_empty() => self.pin = Pin::Guest(view.clone()),
            _ => panic!("buffer already holds other memory"),
        }
    }

    /// Appends a segment and widens the window to the whole buffer. The caller has set the pin.
    #[inline]
    pub(crate) fn push(&mut self, segment: Segment) {
        self.extend(segment);
        self.open();
    }

    /// Bytes in the window.
    #[inline]
    pub fn len(&self) -> usize {
        self.window
    }

    /// Returns true if the window is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.window == 0
    }

    /// Bytes in the whole buffer, including outside of the window.
    #[inline]
    pub fn total_len(&self) -> usize {
        self.total
    }

    /// Segments of the window.
    #[inline]
    pub fn segments(&self) -> &[Segment] {
        &self.segments[self.range()]
    }

    #[inline(always)]
    fn range(&self) -> std::ops::Range<usize> {
        self.first as usize..self.end as usize
    }

    /// Creates a buffer over a part of the window, with its own pin on the memory.
    ///
    /// # Panics
    /// When the range lies outside of the window.
    pub fn slice(&self, offset: usize, length: usize) -> IoBuffer {
        let mut part = IoBuffer::default();
        self.slice_into(offset, length, &mut part);
        part
    }

    /// Same as [`IoBuffer::slice`], but reuses the heap space of `part`.
    ///
    /// # Panics
    /// When the range lies outside of the window.
    #[inline]
    pub fn slice_into(&self, offset: usize, length: usize, part: &mut IoBuffer) {
        assert!(
            length <= self.window && offset <= self.window - length,
            "slice outside of window"
        );
        part.clear();
        self.walk(self.range(), offset, length, |segment, _| {
            part.push(segment)
        });
        part.pin = self.pin.clone();
    }

    /// Calls `each` for the pieces of `length` bytes from byte `offset` of some segments, with each piece and the number
    /// of bytes before it.
    #[inline(always)]
    fn walk(
        &self,
        segments: std::ops::Range<usize>,
        mut offset: usize,
        length: usize,
        mut each: impl FnMut(Segment, usize),
    ) {
        let mut done = 0;
        for segment in &self.segments[segments] {
            if done == length {
                return;
            }
            if offset >= segment.length {
                offset -= segment.length;
                continue;
            }
            let piece = (segment.length - offset).min(length - done);
            // SAFETY: `offset` is below the segment's length.
            each(
                Segment::new(unsafe { segment.base.add(offset) }, piece),
                done,
            );
            done += piece;
            offset = 0;
        }
        assert!(done == length, "access outside of buffer");
    }

    /// Marks the pages of the second half, which the device writes, in a dirty log. Covers all writes to a chain, also those of an I/O
    /// that failed half-way.
    pub fn mark_writable(&self, log: &DirtyLog) {
        if let Pin::Guest(view) = &self.pin {
            let written = self.segments.get(self.middle as usize..);
            view.table().mark(written.unwrap_or_default(), log);
        }
    }

    /// Returns true if all segments of the window are aligned, in address and length, to `alignment` bytes (a power of
    /// two).
    pub fn is_aligned(&self, alignment: usize) -> bool {
        self.segments()
            .iter()
            .all(|s| (s.base as usize | s.length) & (alignment - 1) == 0)
    }
}

impl std::fmt::Debug for IoBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IoBuffer")
            .field("window", &self.window)
            .field("segments", &self.segments())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(in crate::buffer) fn buffer_of(lengths: &[usize]) -> IoBuffer {
        let total: usize = lengths.iter().sum();
        let mapping = Mapping::anonymous(total.max(1)).unwrap();
        for i in 0..total {
            mapping.write(i, &[i as u8]);
        }
        let mut buffer = IoBuffer {
            pin: Pin::Mapping(mapping.clone()),
            ..IoBuffer::default()
        };
        let mut at = 0;
        for &length in lengths {
            buffer.push(Segment::new(mapping.checked(at, length), length));
            at += length;
        }
        buffer
    }

    #[test]
    #[should_panic(expected = "length below isize::MAX")]
    fn owned_buffer_whose_size_overflows_is_refused() {
        IoBuffer::owned(usize::MAX);
    }

    #[test]
    #[should_panic(expected = "a disk is read into itself")]
    fn range_of_a_mapping_is_not_filled_from_the_same_mapping() {
        let mapping = Mapping::anonymous(8192).unwrap();
        IoBuffer::of_mapping(&mapping, 100, 4096).fill_from(&mapping, 0);
    }

    #[test]
    #[should_panic(expected = "access outside of buffer")]
    fn read_past_the_window_panics() {
        buffer_of(&[4, 4]).read_at(6, &mut [0; 3]);
    }

    #[test]
    fn used_buffer_is_refilled_without_its_old_pin() {
        let mapping = Mapping::anonymous(4096).unwrap();
        let mut buffer = IoBuffer::of_mapping(&mapping, 0, 10);
        assert_eq!(Arc::strong_count(&mapping), 2);
        buffer.clear();
        assert_eq!(Arc::strong_count(&mapping), 1);
        assert!(buffer.is_empty() && buffer.segments().is_empty());
    }

    #[test]
    fn alignment_covers_address_and_length() {
        let buffer = IoBuffer::owned(8192);
        assert!(buffer.is_aligned(4096));
        assert!(!buffer.slice(512, 4096).is_aligned(4096));
        assert!(buffer.slice(512, 4096).is_aligned(512));
        assert!(!buffer.slice(0, 100).is_aligned(512));
    }
}
