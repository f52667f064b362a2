//! Basic header segments (RFC 7143, 11.2 to 11.19).
//!
//! Every struct has 48 bytes, alignment 1 and no padding, so any 48 bytes are a valid value.

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
            /// The opcode of this header.
            pub const OPCODE: Opcode = $opcode;

            /// Returns a header with the opcode and the final bit set; all other fields are zero.
            pub fn blank() -> Self {
                let mut header: Self = zerocopy::FromZeros::new_zeroed();
                header.opcode = $opcode.wire();
                header.flags = FINAL;
                header
            }

            /// Converts from the common form. The caller checks the opcode.
            pub fn from_bhs(bhs: &Bhs) -> Self {
                zerocopy::transmute!(*bhs)
            }

            /// Converts to the common form.
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

/// Common form of all headers (11.2.1).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Bhs {
    /// Immediate bit and opcode.
    pub opcode: u8,
    /// Final bit and flags.
    pub flags: u8,
    /// Opcode-specific.
    pub specific: [u8; 2],
    /// TotalAHSLength in words of four bytes, DataSegmentLength in bytes.
    pub lengths: Lengths,
    /// LUN, or opcode-specific.
    pub lun: [u8; 8],
    /// Initiator Task Tag.
    pub itt: U32,
    /// Opcode-specific.
    pub rest: [u8; 28],
}

const _: () = assert!(size_of::<Bhs>() == BHS_LENGTH);

impl Bhs {
    /// Returns the opcode; `None` if it is undefined.
    pub fn kind(&self) -> Option<Opcode> {
        // Bit 7 is reserved and ignored on receipt.
        Opcode::from_wire(self.opcode & 0x3f)
    }

    /// Returns true if the immediate delivery bit is set.
    pub fn is_immediate(&self) -> bool {
        self.opcode & IMMEDIATE != 0
    }

    /// Returns true if the final bit is set.
    pub fn is_final(&self) -> bool {
        self.flags & FINAL != 0
    }

    /// Returns the header as bytes.
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
    /// TotalAHSLength in words of four bytes.
    pub ahs_words: u8,
    /// DataSegmentLength in bytes, 24 bits.
    pub data: [u8; 3],
}

impl Lengths {
    /// Returns the length of the additional header segments in bytes.
    pub fn ahs(&self) -> usize {
        usize::from(self.ahs_words) * 4
    }

    /// Returns the length of the data segment in bytes, without padding.
    pub fn data(&self) -> u32 {
        u32::from_be_bytes([0, self.data[0], self.data[1], self.data[2]])
    }

    /// Sets the length of the data segment.
    ///
    /// # Panics
    /// If the length exceeds 24 bits. The builder of a PDU must split the data.
    pub fn set_data(&mut self, length: usize) {
        assert!(
            length <= super::DATA_SEGMENT_MAX as usize,
            "data segment of {length} bytes"
        );
        let [_, high, middle, low] = (length as u32).to_be_bytes();
        self.data = [high, middle, low];
    }
}
