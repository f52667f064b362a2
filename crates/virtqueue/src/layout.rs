//! Memory layout of rings: structures, flags, sizes and alignments (virtio 1.3, clauses 2.7 and 2.8).
//!
//! Definitions only. All fields are little-endian and no structure has padding, so they are read and written as they are.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The chain continues in another descriptor.
pub const NEXT: u16 = 1;
/// The element is device-writable, otherwise device-readable.
pub const WRITE: u16 = 2;
/// The element is a table of descriptors.
pub const INDIRECT: u16 = 4;
/// Packed: equal to the driver's wrap counter when made available.
pub const AVAIL: u16 = 1 << 7;
/// Packed: equal to the device's wrap counter when used.
pub const USED: u16 = 1 << 15;

/// Split, `flags` of the available ring: the driver wants no notification.
pub const NO_INTERRUPT: u16 = 1;
/// Split, `flags` of the used ring: the device wants no notification.
pub const NO_NOTIFY: u16 = 1;

/// Packed, event suppression: notify always.
pub const EVENTS_ENABLE: u16 = 0;
/// Packed, event suppression: notify never.
pub const EVENTS_DISABLE: u16 = 1;
/// Packed, event suppression: notify for one descriptor, with `VIRTIO_F_EVENT_IDX`.
pub const EVENTS_DESCRIPTOR: u16 = 2;

/// Length of a descriptor, in every kind of table.
pub const DESCRIPTOR_SIZE: usize = 16;
/// Length of an element of the used ring.
pub const USED_ELEMENT_SIZE: usize = 8;
/// Length of a packed ring's event suppression structure.
pub const EVENT_SUPPRESSION_SIZE: usize = 4;
/// Maximum number of entries of a queue.
pub const MAX_SIZE: u16 = 1 << 15;

/// Offset of `idx` in the available and used rings, after `flags`.
pub const INDEX: usize = 2;
/// Offset of the first element in the available and used rings.
pub const RING: usize = 4;
/// Offset of `flags` in a packed descriptor.
pub const PACKED_FLAGS: usize = 14;

/// `struct virtq_desc`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Descriptor {
    /// Guest-physical address of the element.
    pub address: U64,
    /// Length of the element.
    pub length: U32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`].
    pub flags: U16,
    /// Index of the next descriptor, with [`NEXT`].
    pub next: U16,
}

/// `struct virtq_used_elem`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct UsedElement {
    /// Index of the chain's head.
    pub id: U32,
    /// Bytes written to the chain.
    pub length: U32,
}

/// `struct pvirtq_desc`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct PackedDescriptor {
    /// Guest-physical address of the element; unused in used descriptors.
    pub address: U64,
    /// Length of the element, or bytes written.
    pub length: U32,
    /// Buffer ID, in the last descriptor of a chain.
    pub id: U16,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`], [`AVAIL`], [`USED`].
    pub flags: U16,
}

/// Returns the length of a descriptor table or a packed descriptor ring.
pub const fn descriptor_area_size(size: u16) -> usize {
    DESCRIPTOR_SIZE * size as usize
}

/// Returns the length of a split queue's available ring, including `used_event`.
pub const fn available_ring_size(size: u16) -> usize {
    RING + 2 * size as usize + 2
}

/// Returns the length of a split queue's used ring, including `avail_event`.
pub const fn used_ring_size(size: u16) -> usize {
    RING + USED_ELEMENT_SIZE * size as usize + 2
}

/// Returns the offset of `used_event` in the available ring.
pub const fn used_event(size: u16) -> usize {
    RING + 2 * size as usize
}

/// Returns the offset of `avail_event` in the used ring.
pub const fn available_event(size: u16) -> usize {
    RING + USED_ELEMENT_SIZE * size as usize
}

/// Returns true if moving an index from `old` to `new` passes `event`, so that a notification is due. Split rings, clauses 2.7.7 and
/// 2.7.10; indices wrap at 65536.
#[inline]
pub const fn passes_event(event: u16, old: u16, new: u16) -> bool {
    event.wrapping_sub(old) < new.wrapping_sub(old)
}

/// A position in a packed ring: descriptor and wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPosition {
    /// Index of the descriptor.
    pub index: u16,
    /// Wrap counter at this position.
    pub wrap: bool,
}

impl RingPosition {
    /// Start position of both sides of a new packed queue.
    pub const START: RingPosition = RingPosition {
        index: 0,
        wrap: true,
    };

    /// Decodes the 16-bit form used in event suppression structures and vhost-user messages.
    pub const fn from_bits(bits: u16) -> RingPosition {
        RingPosition {
            index: bits & 0x7fff,
            wrap: bits & 0x8000 != 0,
        }
    }

    /// Encodes the position in 16 bits: index, and the wrap counter as the top bit.
    pub const fn to_bits(self) -> u16 {
        self.index | (self.wrap as u16) << 15
    }

    /// Returns the position `count` descriptors (at most `size`) later in a ring of `size`.
    #[inline]
    #[must_use]
    pub const fn advance(self, count: u16, size: u16) -> RingPosition {
        let index = self.index as u32 + count as u32;
        if index >= size as u32 {
            RingPosition {
                index: (index - size as u32) as u16,
                wrap: !self.wrap,
            }
        } else {
            RingPosition {
                index: index as u16,
                wrap: self.wrap,
            }
        }
    }

    /// Returns [`AVAIL`] and [`USED`] of a descriptor that is made available here.
    #[inline]
    pub const fn available_flags(self) -> u16 {
        if self.wrap { AVAIL } else { USED }
    }

    /// Returns [`AVAIL`] and [`USED`] of a descriptor that is used here.
    #[inline]
    pub const fn used_flags(self) -> u16 {
        if self.wrap { AVAIL | USED } else { 0 }
    }

    /// Returns the descriptors from `old` to here, on the circle of two rounds that the wrap counter distinguishes.
    const fn distance_from(self, old: RingPosition, size: u16) -> u32 {
        let round = 2 * size as u32;
        let here = self.index as u32 + if self.wrap { 0 } else { size as u32 };
        let there = old.index as u32 + if old.wrap { 0 } else { size as u32 };
        (here + round - there) % round
    }

    /// Returns true if moving from `old` to here passes the descriptor at `event`. Packed rings, clause 2.8.10.
    #[inline]
    pub const fn passes_event(self, event: RingPosition, old: RingPosition, size: u16) -> bool {
        // An event outside of the ring is never reached.
        event.index < size && event.distance_from(old, size) < self.distance_from(old, size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_is_le64_address_le32_length_le16_flags_le16_next() {
        let bytes = [
            0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xdd, 0xcc, 0xbb, 0xaa, 0x03, 0x00,
            0x34, 0x12,
        ];
        let d = Descriptor::read_from_bytes(&bytes).unwrap();
        assert_eq!(d.address.get(), 0x1122_3344_5566_7788);
        assert_eq!(d.length.get(), 0xaabb_ccdd);
        assert_eq!(d.flags.get(), NEXT | WRITE);
        assert_eq!(d.next.get(), 0x1234);
        assert_eq!(d.as_bytes(), bytes);
        assert_eq!((NEXT, WRITE, INDIRECT), (1, 2, 4));
    }

    #[test]
    fn packed_descriptor_is_le64_address_le32_length_le16_id_le16_flags() {
        let bytes = [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0x82, 0x80];
        let d = PackedDescriptor::read_from_bytes(&bytes).unwrap();
        assert_eq!((d.address.get(), d.length.get(), d.id.get()), (1, 2, 3));
        assert_eq!(d.flags.get(), AVAIL | USED | WRITE);
    }

    #[test]
    fn used_element_is_le32_id_le32_length() {
        let bytes = [0x0d, 0x0c, 0x0b, 0x0a, 4, 3, 2, 1];
        let e = UsedElement::read_from_bytes(&bytes).unwrap();
        assert_eq!((e.id.get(), e.length.get()), (0x0a0b_0c0d, 0x0102_0304));
    }

    #[test]
    fn areas_have_the_sizes_of_clause_2_7() {
        assert_eq!(descriptor_area_size(256), 4096);
        assert_eq!(available_ring_size(256), 6 + 2 * 256);
        assert_eq!(used_ring_size(256), 6 + 8 * 256);
    }

    #[test]
    fn event_is_passed_from_the_entry_after_old_to_new_also_across_65536() {
        assert!(passes_event(5, 5, 6));
        assert!(!passes_event(6, 5, 6));
        assert!(!passes_event(4, 5, 6));
        assert!(passes_event(65535, 65530, 2));
        assert!(passes_event(1, 65530, 2));
        assert!(!passes_event(2, 65530, 2));
        assert!(!passes_event(7, 7, 7));
    }

    #[test]
    fn packed_event_is_passed_across_the_wrap() {
        let position = |index, wrap| RingPosition { index, wrap };
        let size = 8;
        assert_eq!(position(6, true).advance(3, size), position(1, false));
        let new = position(1, false);
        let old = position(6, true);
        assert!(new.passes_event(position(6, true), old, size));
        assert!(new.passes_event(position(7, true), old, size));
        assert!(new.passes_event(position(0, false), old, size));
        assert!(!new.passes_event(position(1, false), old, size));
        assert!(!new.passes_event(position(0, true), old, size));
        assert!(!new.passes_event(position(6, false), old, size));
        assert!(!new.passes_event(position(0x7fff, false), old, size));
        assert_eq!(RingPosition::from_bits(0x8001), position(1, true));
        assert_eq!(position(1, true).to_bits(), 0x8001);
    }
}
