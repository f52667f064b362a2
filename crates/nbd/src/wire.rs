//! Constants and headers of the protocol, in network byte order.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `NBDMAGIC`, the first bytes from a server.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, before the handshake flags and before each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Before each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// `NBD_REQUEST_MAGIC`.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// `NBD_EXTENDED_REQUEST_MAGIC`.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// `NBD_SIMPLE_REPLY_MAGIC`.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// `NBD_STRUCTURED_REPLY_MAGIC`.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// `NBD_EXTENDED_REPLY_MAGIC`.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Maximum length of a string: names, descriptions, queries and messages.
pub const STRING_MAX: usize = 4096;
/// Maximum payload that every peer accepts, and the default of `NBD_INFO_BLOCK_SIZE`.
pub const PAYLOAD_MAX: u32 = 1 << 25;
/// Zeroes at the end of a reply to `NBD_OPT_EXPORT_NAME`.
pub const ZEROES: usize = 124;

/// Handshake flags of servers; clients use the same bits.
pub mod handshake_flag {
    /// `NBD_FLAG_FIXED_NEWSTYLE`
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// `NBD_FLAG_NO_ZEROES`
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options (`NBD_OPT_*`).
pub mod option {
    #![allow(missing_docs, reason = "the names of the protocol document")]
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options (`NBD_REP_*`).
pub mod option_reply {
    #![allow(missing_docs, reason = "the names of the protocol document")]
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    /// Bit of all errors.
    pub const ERROR: u32 = 1 << 31;
    pub const ERR_UNSUP: u32 = ERROR + 1;
    pub const ERR_POLICY: u32 = ERROR + 2;
    pub const ERR_INVALID: u32 = ERROR + 3;
    pub const ERR_TLS_REQD: u32 = ERROR + 5;
    pub const ERR_UNKNOWN: u32 = ERROR + 6;
    pub const ERR_TOO_BIG: u32 = ERROR + 9;
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR + 10;
}

/// Information about an export (`NBD_INFO_*`).
pub mod info {
    #![allow(missing_docs, reason = "the names of the protocol document")]
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags (`NBD_FLAG_*`).
pub mod transmission {
    #![allow(missing_docs, reason = "the names of the protocol document")]
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const ROTATIONAL: u16 = 1 << 4;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands (`NBD_CMD_*`).
pub mod command {
    #![allow(missing_docs, reason = "the names of the protocol document")]
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands (`NBD_CMD_FLAG_*`).
pub mod command_flag {
    #![allow(missing_docs, reason = "the names of the protocol document")]
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of structured and extended chunks (`NBD_REPLY_TYPE_*`).
pub mod chunk {
    #![allow(missing_docs, reason = "the names of the protocol document")]
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Bit of all errors.
    pub const ERROR_BIT: u16 = 1 << 15;
    pub const ERROR: u16 = ERROR_BIT + 1;
    pub const ERROR_OFFSET: u16 = ERROR_BIT + 2;
    /// Flag of the last chunk of a reply (`NBD_REPLY_FLAG_DONE`).
    pub const DONE: u16 = 1 << 0;
}

/// Flags of an extent in the context `base:allocation`.
pub mod allocation {
    /// `NBD_STATE_HOLE`: not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// `NBD_STATE_ZERO`: reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// Name of the context of the standard.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Name of QEMU's context for the layers of an image: 0 is not allocated, 1 is in the image, 2 in its backing image, and so on.
pub const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";

/// Namespace and first part of the names of QEMU's contexts for dirty bitmaps.
pub const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// Flag of a range that has changed, in a context for a dirty bitmap.
pub const DIRTY: u32 = 1;

macro_rules! header {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name {
            $(
                $(#[$field_doc])*
                pub $field: $type,
            )*
        }

        impl $name {
            /// Length in bytes.
            pub const LENGTH: usize = size_of::<$name>();
        }
    };
}

header! {
    /// Header of an option.
    OptionHeader {
        /// [`OPTION_MAGIC`].
        magic: U64,
        /// The option.
        option: U32,
        /// Length of the data.
        length: U32,
    }
}

header! {
    /// Header of a reply to an option.
    OptionReplyHeader {
        /// [`OPTION_REPLY_MAGIC`].
        magic: U64,
        /// The option of the request.
        option: U32,
        /// Type of the reply.
        kind: U32,
        /// Length of the data.
        length: U32,
    }
}

header! {
    /// Compact request.
    CompactRequest {
        /// [`REQUEST_MAGIC`].
        magic: U32,
        /// Command flags.
        flags: U16,
        /// Command.
        command: U16,
        /// The client's identifier of the request.
        cookie: U64,
        /// First byte.
        offset: U64,
        /// Length in bytes.
        length: U32,
    }
}

header! {
    /// Extended request.
    ExtendedRequest {
        /// [`EXTENDED_REQUEST_MAGIC`].
        magic: U32,
        /// Command flags.
        flags: U16,
        /// Command.
        command: U16,
        /// The client's identifier of the request.
        cookie: U64,
        /// First byte.
        offset: U64,
        /// Length in bytes: of the payload if the flag `PAYLOAD_LEN` is set, else of the range.
        length: U64,
    }
}

header! {
    /// Simple reply.
    SimpleReply {
        /// [`SIMPLE_REPLY_MAGIC`].
        magic: U32,
        /// Error, or 0.
        error: U32,
        /// Cookie of the request.
        cookie: U64,
    }
}

header! {
    /// Chunk of a structured reply.
    StructuredReply {
        /// [`STRUCTURED_REPLY_MAGIC`].
        magic: U32,
        /// Flags of the chunk.
        flags: U16,
        /// Type of the chunk.
        kind: U16,
        /// Cookie of the request.
        cookie: U64,
        /// Length of the payload.
        length: U32,
    }
}

header! {
    /// Chunk of an extended reply.
    ExtendedReply {
        /// [`EXTENDED_REPLY_MAGIC`].
        magic: U32,
        /// Flags of the chunk.
        flags: U16,
        /// Type of the chunk.
        kind: U16,
        /// Cookie of the request.
        cookie: U64,
        /// Offset of the request.
        offset: U64,
        /// Length of the payload.
        length: U64,
    }
}
