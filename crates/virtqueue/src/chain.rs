//! A popped descriptor chain: its memory and its two halves. Also the chain rules common to split and packed rings.
//!
//! The caller owns the chain and reuses it for each request. Its content has been checked.

use guest_memory::{Appender, Filler, GuestView, IoBuffer, TableFiller};

use crate::layout::{DESCRIPTOR_SIZE, Descriptor, INDIRECT, NEXT, WRITE};
use crate::{QueueConfig, QueueError};

/// One request of the driver: device-readable bytes, then device-writable bytes.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    /// Index of the head (split) or buffer ID (packed), below the queue size. Required by `push`.
    pub id: u16,
    /// Number of its descriptors in the ring. Required by `push`.
    pub descriptors: u16,
    /// Length of the device-readable part, at the start of the buffer.
    pub readable: u32,
    /// Length of the device-writable part, the rest of the buffer.
    pub writable: u32,
    /// Memory of all elements. The window covers all of it.
    pub buffer: IoBuffer,
}

impl Chain {
    /// Empties the chain and releases its memory. Keeps its heap allocation.
    #[inline]
    pub fn clear(&mut self) {
        (self.id, self.descriptors, self.readable, self.writable) = (0, 0, 0, 0);
        self.buffer.clear();
    }

    /// Empties the chain for another request. Keeps its heap allocation and, if `view` is the same, its pin.
    #[inline]
    pub fn recycle(&mut self, view: &GuestView) {
        self.buffer.recycle(view);
    }
}

/// Limits of a chain. Indirect tables are accepted without negotiation, as in all other devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    bytes: u32,
    pub indirect_descriptors: u16,
    pub table: Table,
}

/// Maximum number of additional pieces of elements that span regions: the maximum number of memory regions of a client.
const PIECES: usize = 512;

impl Limits {
    pub fn new(config: &QueueConfig) -> Limits {
        Limits {
            bytes: config.max_chain_bytes,
            indirect_descriptors: config.max_chain_descriptors,
            table: match config.packed {
                true => Table::InOrder,
                false => Table::Linked,
            },
        }
    }

    /// Returns the length of a chain, if it is within the limit.
    #[inline(always)]
    fn total(&self, readable: u64, writable: u64) -> Option<usize> {
        let total = readable + writable;
        (total <= u64::from(self.bytes)).then_some(total as usize)
    }
}

/// Layout of an indirect table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Table {
    /// Table of a split ring: linked by `next`, with all flags (clause 2.7.5.3).
    Linked,
    /// Table of a packed ring: descriptors in order, with WRITE as the only flag (clause 2.8.7).
    InOrder,
}

/// Fast path for valid chains in recently used memory, if they fit into the buffer. In all other cases it returns `None`. A [`Collector`]
/// then reads the chain again and determines the error. A test checks that both agree.
pub(crate) struct FastPath<'a> {
    view: &'a GuestView,
    buffer: &'a mut IoBuffer,
    limits: Limits,
}

impl<'a> FastPath<'a> {
    #[inline(always)]
    pub fn new(view: &'a GuestView, buffer: &'a mut IoBuffer, limits: Limits) -> FastPath<'a> {
        FastPath {
            view,
            buffer,
            limits,
        }
    }

    /// Reads a chain of at most `limit` direct descriptors. Returns its readable and writable bytes and the number of descriptors.
    #[inline(always)]
    pub fn direct(
        self,
        first: Descriptor,
        limit: u16,
        next: impl Fn(u16) -> Option<Descriptor>,
    ) -> Option<(u32, u32, u16)> {
        let filler = self.view.filler(self.buffer, usize::from(limit));
        let mut walk = DirectWalk {
            filler,
            next,
            descriptor: first,
        };
        let (readable, more) = walk.read_half(0)?;
        let middle = walk.filler.count();
        let writable = if more { walk.read_half(WRITE)?.0 } else { 0 };
        let total = self.limits.total(readable, writable)?;
        // At most `limit`, which is a u16.
        let count = walk.filler.finish(total, middle) as u16;
        // The limit is a u32, so both fit.
        Some((readable as u32, writable as u32, count))
    }

    /// Reads a chain that consists of one indirect table with the elements in order, as in Linux.
    #[inline(always)]
    pub fn indirect(self, table: u64, length: u32, kind: Table) -> Option<(u32, u32)> {
        let limit = self.limits.indirect_descriptors;
        let filler = self.view.filler(self.buffer, usize::from(limit));
        let mut entries = filler.table::<Descriptor>(table, length)?;
        let first = entries.entry()?;
        let (readable, more) = read_table_half(&mut entries, kind, first, 0)?;
        let middle = entries.count();
        let writable = match more {
            Some(first) => read_table_half(&mut entries, kind, first, WRITE)?.0,
            None => 0,
        };
        let total = self.limits.total(readable, writable)?;
        entries.finish(total, middle);
        // The limit is a u32, so both fit.
        Some((readable as u32, writable as u32))
    }
}

/// Walk along a chain of direct descriptors.
struct DirectWalk<'a, N> {
    filler: Filler<'a>,
    next: N,
    /// The next element.
    descriptor: Descriptor,
}

impl<N: Fn(u16) -> Option<Descriptor>> DirectWalk<'_, N> {
    /// Reads the elements of the readable or writable half. Returns their bytes, and whether more descriptors follow.
    #[inline(always)]
    fn read_half(&mut self, half: u16) -> Option<(u64, bool)> {
        let mut bytes = 0;
        loop {
            let (length, flags) = (self.descriptor.length.get(), self.descriptor.flags.get());
            if flags & (INDIRECT | WRITE) != half {
                // Only the readable half may end here. In the writable half, such a descriptor leaves the fast path.
                return (half == 0).then_some((bytes, true));
            }
            // The filler has room for the longest chain.
            if length == 0 || !self.filler.append(self.descriptor.address.get(), length) {
                return None;
            }
            bytes += u64::from(length);
            if flags & NEXT == 0 {
                return Some((bytes, false));
            }
            self.descriptor = (self.next)(self.descriptor.next.get())?;
        }
    }
}

/// Like [`DirectWalk::read_half`] for a table, beginning with `descriptor`. Returns the bytes and the first element after the half.
#[inline(always)]
fn read_table_half(
    entries: &mut TableFiller<'_, Descriptor>,
    kind: Table,
    mut descriptor: Descriptor,
    half: u16,
) -> Option<(u64, Option<Descriptor>)> {
    let mut bytes = 0;
    loop {
        let (length, flags) = (descriptor.length.get(), kind.flags(&descriptor));
        if flags & (INDIRECT | WRITE) != half {
            return (half == 0).then_some((bytes, Some(descriptor)));
        }
        if length == 0 || !entries.append(descriptor.address.get(), length) {
            return None;
        }
        bytes += u64::from(length);
        match kind {
            Table::Linked if flags & NEXT == 0 => return Some((bytes, None)),
            Table::Linked if usize::from(descriptor.next.get()) != entries.count() => return None,
            Table::InOrder if entries.is_complete() => return Some((bytes, None)),
            Table::Linked | Table::InOrder => {}
        }
        descriptor = entries.entry()?;
    }
}

/// Receives the descriptors of a chain in order.
pub(crate) trait Visitor {
    fn element(&mut self, address: u64, length: u32, flags: u16) -> Result<(), QueueError>;

    /// Handles an indirect table after `before` direct descriptors; `linked`: the standard forbids it here.
    fn table(
        &mut self,
        table: u64,
        length: u32,
        before: u16,
        linked: bool,
    ) -> Result<(), QueueError>;
}

/// General path: adds elements to a chain.
pub(crate) struct Collector<'a> {
    appender: Appender<'a>,
    limits: Limits,
    /// The chain's first descriptor, for error messages.
    head: u16,
    total: u64,
    readable: u64,
    /// A writable element was added.
    in_writable_half: bool,
}

impl<'a> Collector<'a> {
    pub fn new(
        view: &'a GuestView,
        buffer: &'a mut IoBuffer,
        limits: Limits,
        head: u16,
    ) -> Collector<'a> {
        Collector {
            appender: view.appender(buffer),
            limits,
            head,
            total: 0,
            readable: 0,
            in_writable_half: false,
        }
    }

    #[cold]
    fn too_many(&self) -> QueueError {
        QueueError::TooManyDescriptors {
            head: self.head,
            limit: self.limits.indirect_descriptors,
        }
    }

    /// Returns the readable and writable bytes of the whole chain.
    pub fn finish(mut self) -> Result<(u32, u32), QueueError> {
        if self.total > u64::from(self.limits.bytes) {
            return Err(QueueError::TooLong {
                length: self.total,
                limit: self.limits.bytes,
            });
        }
        if !self.in_writable_half {
            self.appender.begin_second_half();
        }
        self.appender.finish();
        // The limit is a u32, so both fit.
        Ok((self.readable as u32, (self.total - self.readable) as u32))
    }
}

impl Visitor for Collector<'_> {
    fn element(&mut self, address: u64, length: u32, flags: u16) -> Result<(), QueueError> {
        // An empty element is unusual but harmless.
        if length == 0 {
            return Ok(());
        }
        if flags & WRITE != 0 {
            if !self.in_writable_half {
                self.appender.begin_second_half();
            }
            self.in_writable_half = true;
        } else if self.in_writable_half {
            return Err(QueueError::ReadableAfterWritable { address });
        } else {
            self.readable += u64::from(length);
        }
        // Cannot overflow: fewer than 2^16 elements of fewer than 2^32 bytes.
        self.total += u64::from(length);
        if self.appender.append(address, length).is_err() {
            return Err(QueueError::NotMapped {
                address,
                length: u64::from(length),
            });
        }
        if self.appender.count() > usize::from(self.limits.indirect_descriptors) + PIECES {
            return Err(self.too_many());
        }
        Ok(())
    }

    fn table(
        &mut self,
        table: u64,
        length: u32,
        before: u16,
        linked: bool,
    ) -> Result<(), QueueError> {
        if linked {
            return Err(QueueError::IndirectLinked { table });
        }
        let kind = self.limits.table;
        let size = DESCRIPTOR_SIZE as u32;
        if length == 0 || !length.is_multiple_of(size) {
            return Err(QueueError::IndirectLength { table, length });
        }
        let count = length / size;
        let mut left = self.limits.indirect_descriptors.saturating_sub(before);
        let mut index = 0;
        loop {
            if left == 0 {
                return Err(self.too_many());
            }
            left -= 1;
            let not_mapped = QueueError::NotMapped {
                address: table,
                length: u64::from(length),
            };
            // The table may reach the end of the address space and wrap.
            let Some(at) = table.checked_add(u64::from(index * size)) else {
                return Err(not_mapped);
            };
            let Ok(descriptor) = self.appender.read::<Descriptor>(at) else {
                return Err(not_mapped);
            };
            let flags = kind.flags(&descriptor);
            if flags & INDIRECT != 0 {
                return Err(QueueError::IndirectInIndirect { table });
            }
            self.element(descriptor.address.get(), descriptor.length.get(), flags)?;
            index = match kind {
                Table::Linked if flags & NEXT == 0 => return Ok(()),
                Table::Linked => u32::from(descriptor.next.get()),
                Table::InOrder if index + 1 == count => return Ok(()),
                Table::InOrder => index + 1,
            };
            if index >= count {
                return Err(QueueError::Next {
                    next: descriptor.next.get(),
                    length: count,
                });
            }
        }
    }
}

impl Table {
    /// Returns the relevant flags of a descriptor. Packed descriptors have them in the place of `next`.
    #[inline(always)]
    pub fn flags(self, descriptor: &Descriptor) -> u16 {
        match self {
            Table::Linked => descriptor.flags.get(),
            Table::InOrder => descriptor.next.get() & WRITE,
        }
    }
}
