//! The basic header segments, field by field (RFC 7143, 11.2 to 11.19).
//!
//! Every struct is 48 bytes, unaligned and without padding, so any 48 bytes are one and a struct is its bytes.

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{BHS_LENGTH, Opcode};

/// The immediate delivery bit of byte 0.
pub const IMMEDIATE: u8 = 0x40;
/// The final bit of byte 1 (transit in Login PDUs).
pub const FINAL: u8 = 0x80;
/// The continue bit of Text and Login PDUs.
pub const CONTINUE: u8 = 0x40;

macro_rules! header {
    ($(#[$doc:meta])* $name:ident ($opcode:expr) { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name {
            /// Immediate bit and opcode.
            pub opcode: u8,
            /// Final bit and flags.
            pub flags: u8,
            $($(#[$field_doc])* pub $field: $kind,)+
        }

        const _: () = assert!(size_of::<$name>() == BHS_LENGTH);

        impl $name {
            /// The opcode that this header carries.
            pub const OPCODE: Opcode = $opcode;

            /// All zero but the opcode and the final bit.
            pub fn blank() -> Self {
                let mut header: Self = zerocopy::FromZeros::new_zeroed();
                header.opcode = $opcode.wire();
                header.flags = FINAL;
                header
            }

            /// The header that these bytes are; the opcode is the caller's to check.
            pub fn from_bhs(bhs: &Bhs) -> Self {
                zerocopy::transmute!(*bhs)
            }

            /// The header as the common form.
            pub fn to_bhs(&self) -> Bhs {
                zerocopy::transmute!(*self)
            }
        }
    };
}

mod initiator;
mod target;

pub use initiator::*;
pub use target::*;

/// The common form of every header (11.2.1).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Bhs {
    /// Immediate bit and opcode.
    pub opcode: u8,
    /// Final bit and flags.
    pub flags: u8,
    /// By opcode.
    pub specific: [u8; 2],
    /// TotalAHSLength in words of four bytes, DataSegmentLength in bytes.
    pub lengths: Lengths,
    /// LUN or by opcode.
    pub lun: [u8; 8],
    /// Initiator Task Tag.
    pub itt: U32,
    /// By opcode.
    pub rest: [u8; 28],
}

const _: () = assert!(size_of::<Bhs>() == BHS_LENGTH);

impl Bhs {
    /// What kind of PDU; `None` for a code that the standard does not give.
    pub fn kind(&self) -> Option<Opcode> {
        // bit 7 is reserved: ignored on receipt
        Opcode::from_wire(self.opcode & 0x3f)
    }

    /// Is the immediate delivery bit set?
    pub fn is_immediate(&self) -> bool {
        self.opcode & IMMEDIATE != 0
    }

    /// Is the final bit set?
    pub fn is_final(&self) -> bool {
        self.flags & FINAL != 0
    }

    /// The bytes of the header.
    pub fn bytes(&self) -> &[u8; BHS_LENGTH] {
        zerocopy::transmute_ref!(self)
    }
}

/// TotalAHSLength and DataSegmentLength (11.2.1.5, 11.2.1.6).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct Lengths {
    /// Length of all additional header segments in words of four bytes.
    pub ahs_words: u8,
    /// Length of the data segment in bytes, 24 bits.
    pub data: [u8; 3],
}

impl Lengths {
    /// Bytes of additional header segments.
    pub fn ahs(&self) -> usize {
        usize::from(self.ahs_words) * 4
    }

    /// Bytes of the data segment, without padding.
    pub fn data(&self) -> u32 {
        u32::from_be_bytes([0, self.data[0], self.data[1], self.data[2]])
    }

    /// Sets the length of the data segment.
    ///
    /// # Panics
    /// When it needs more than 24 bits: whoever builds a PDU has split the data.
    pub fn set_data(&mut self, length: usize) {
        assert!(
            length <= super::DATA_SEGMENT_MAX as usize,
            "data segment of {length} bytes"
        );
        let [_, high, middle, low] = (length as u32).to_be_bytes();
        self.data = [high, middle, low];
    }
}
