//! Payloads of messages.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::WireError;

/// Parses a payload of fixed size.
pub(crate) fn fixed<T: FromBytes>(payload: &[u8]) -> Result<T, WireError> {
    T::read_from_bytes(payload).map_err(|_| WireError::Size(payload.len()))
}

/// Vring state description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Index of the vring.
    pub index: u32,
    /// Size, base or state, by request.
    pub num: u32,
}

/// Vring address description. Addresses are user addresses of the front end, except for `log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    /// Index of the vring.
    pub index: u32,
    /// [`VringAddr::F_LOG`].
    pub flags: u32,
    /// Descriptor area.
    pub descriptor: u64,
    /// Device area (used ring).
    pub used: u64,
    /// Driver area (available ring).
    pub available: u64,
    /// Guest address of the used ring, for the dirty log.
    pub log: u64,
}

impl VringAddr {
    /// VHOST_VRING_F_LOG: writes to the used ring are logged.
    pub const F_LOG: u32 = 1;

    pub(crate) fn checked(self) -> Result<VringAddr, WireError> {
        if self.flags & !VringAddr::F_LOG != 0 {
            return Err(WireError::Field("vring flags"));
        }
        if self.descriptor & 15 != 0 || self.available & 1 != 0 || self.used & 3 != 0 {
            return Err(WireError::Field("alignment of a vring"));
        }
        Ok(self)
    }
}

/// Memory region description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryRegion {
    /// Guest address.
    pub guest_address: u64,
    /// Size in bytes.
    pub size: u64,
    /// User address of the front end.
    pub user_address: u64,
    /// Offset in the region's file.
    pub mmap_offset: u64,
}

/// Single memory region description.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct SingleRegion {
    padding: u64,
    pub region: MemoryRegion,
}

impl From<MemoryRegion> for SingleRegion {
    fn from(region: MemoryRegion) -> SingleRegion {
        SingleRegion { padding: 0, region }
    }
}

/// Log description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Log {
    /// Size in bytes.
    pub mmap_size: u64,
    /// Offset in the log's file.
    pub mmap_offset: u64,
}

impl Log {
    /// Reply to a refused `SET_LOG_BASE`. Front ends that read a log find one that no memory can hold; others find a number that is not 0.
    pub const REFUSED: Log = Log {
        mmap_size: 1,
        mmap_offset: u64::MAX,
    };

    pub(crate) fn checked(self) -> Result<Log, WireError> {
        match self.mmap_offset.checked_add(self.mmap_size) {
            Some(_) if self.mmap_size != 0 => Ok(self),
            _ => Err(WireError::Field("size of the dirty log")),
        }
    }
}

/// Inflight description.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Inflight {
    /// Size of the region in bytes.
    pub mmap_size: u64,
    /// Offset in the region's file.
    pub mmap_offset: u64,
    /// Number of vrings.
    pub num_queues: u16,
    /// Size of each vring.
    pub queue_size: u16,
    /// Padding, which front ends send.
    pub padding: u32,
}

impl Inflight {
    pub(crate) fn checked(self) -> Result<Inflight, WireError> {
        match self.num_queues == 0 || self.queue_size == 0 {
            true => Err(WireError::Field("number or size of queues")),
            false => Ok(self),
        }
    }
}

/// Virtio device config space. Its size field is the length of `region`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Offset in the configuration space.
    pub offset: u32,
    /// 0: written by the driver; 1: also fields that are read-only for it; 2: live migration.
    pub flags: u32,
    /// Contents. A request to read has as many bytes as its reply.
    pub region: Vec<u8>,
}

impl Config {
    /// Size of a configuration space.
    const SPACE: u32 = 4096;
    const FLAGS: u32 = 3;
    /// Size of offset, size and flags.
    const FIELDS: usize = 12;

    pub(crate) fn parse(payload: &[u8]) -> Result<Config, WireError> {
        let invalid = WireError::Size(payload.len());
        let Ok(([offset, size, flags], region)) = <[u32; 3]>::read_from_prefix(payload) else {
            return Err(invalid);
        };
        match size as usize == region.len() {
            true => Ok(Config {
                offset,
                flags,
                region: region.to_vec(),
            }),
            false => Err(invalid),
        }
    }

    pub(crate) fn checked(self) -> Result<Config, WireError> {
        let end = self.offset.saturating_add(self.region.len() as u32);
        match end > Config::SPACE || self.region.is_empty() || self.flags & !Config::FLAGS != 0 {
            true => Err(WireError::Field("range or flags of a configuration access")),
            false => Ok(self),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let fields = [self.offset, self.region.len() as u32, self.flags];
        let mut payload = Vec::with_capacity(Config::FIELDS + self.region.len());
        payload.extend(fields.as_bytes());
        payload.extend(&self.region);
        payload
    }
}
