//! Reads one request (virtio 1.3, 5.2.6) from its chain and checks it against the disk. No I/O, no state.
//!
//! Only the byte counts checked by the ring are trusted. A header is the first 16 readable bytes and the status the last
//! writable byte, independent of the driver's descriptor layout (2.7.4).

use block::{DiskInfo, IoFlags, IoRequest};

/// Length of a request's header in bytes.
pub const HEADER_SIZE: usize = 16;
/// Length of one range of a discard or write-zeroes request in bytes.
pub const RANGE_SIZE: usize = 16;
/// Length of the serial number for `GET_ID` in bytes.
pub const ID_SIZE: usize = 20;

/// VIRTIO_BLK_S_OK.
pub const S_OK: u8 = 0;
/// VIRTIO_BLK_S_IOERR.
pub const S_IOERR: u8 = 1;
/// VIRTIO_BLK_S_UNSUPP.
pub const S_UNSUPP: u8 = 2;

const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;

/// Flag of a write-zeroes range: its space may be freed.
const RANGE_UNMAP: u32 = 1;

/// A parsed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// One I/O with data, or a flush.
    Io(IoRequest),
    /// A transfer of 0 bytes.
    Nothing(Transfer),
    /// One I/O per range.
    Ranges {
        /// Discard or write-zeroes.
        kind: RangeKind,
        /// Number of ranges.
        count: u32,
    },
    /// Return the serial number.
    GetId,
}

/// Direction of a request's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Data to the driver.
    In,
    /// Data from the driver, or no data.
    Out,
}

/// Operation on a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeKind {
    /// VIRTIO_BLK_T_DISCARD.
    Discard,
    /// VIRTIO_BLK_T_WRITE_ZEROES.
    WriteZeroes,
}

/// Limits for checking reads and writes, copied from the disk's info.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    sectors: u64,
    read_only: bool,
}

impl Limits {
    /// Returns the limits of a disk.
    pub fn of(info: &DiskInfo) -> Limits {
        Limits {
            sectors: info.geometry.capacity_bytes() >> 9,
            read_only: info.read_only,
        }
    }
}

/// Parses a plain transfer of common length into direction, offset and length. Fast path of [`parse`], which handles and
/// refuses all other requests; a test checks that both agree.
#[inline(always)]
pub fn parse_plain(
    header: &[u8; HEADER_SIZE],
    readable: u32,
    writable: u32,
    limits: &Limits,
) -> Option<(Transfer, u64, u32)> {
    let words = u128::from_le_bytes(*header);
    let (kind, sector) = (words as u32, (words >> 64) as u64);
    let (way, length) = match kind {
        T_IN => (Transfer::In, writable),
        T_OUT if !limits.read_only => (Transfer::Out, readable),
        _ => return None,
    };
    let bytes = u64::from(length);
    // Checks by subtraction, so that nothing overflows; a disk's size in bytes fits into 64 bits. A length of 0 wraps and
    // exceeds the maximum.
    if length.wrapping_sub(1) >= crate::config::TRANSFER_MAX
        || sector > limits.sectors
        || bytes > (limits.sectors - sector) << 9
    {
        return None;
    }
    (length & (block::SECTOR_BYTES - 1) == 0).then_some((way, sector << 9, length))
}

/// Parses a request. `readable` and `writable` are bytes of data, without header and status.
///
/// # Errors
/// The status for the driver: IOERR for a range outside the disk or a write to a read-only disk (5.2.6.2), UNSUPP for an
/// unknown request type.
#[inline]
pub fn parse(
    header: &[u8; HEADER_SIZE],
    readable: u32,
    writable: u32,
    info: &DiskInfo,
) -> Result<Request, u8> {
    let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let mut sector = [0; 8];
    sector.copy_from_slice(&header[8..16]);
    let sector = u64::from_le_bytes(sector);
    match kind {
        T_IN => transfer(sector, writable, info, Transfer::In),
        T_OUT if info.read_only => Err(S_IOERR),
        T_OUT => transfer(sector, readable, info, Transfer::Out),
        T_FLUSH => Ok(Request::Io(IoRequest::flush())),
        T_GET_ID => Ok(Request::GetId),
        T_DISCARD => ranges(
            RangeKind::Discard,
            info.discard_granularity.is_some(),
            readable,
            info,
        ),
        T_WRITE_ZEROES => ranges(RangeKind::WriteZeroes, info.write_zeroes, readable, info),
        _ => Err(S_UNSUPP),
    }
}

#[inline]
fn transfer(sector: u64, length: u32, info: &DiskInfo, way: Transfer) -> Result<Request, u8> {
    let (offset, length) = info
        .geometry
        .check_sectors(sector, u64::from(length))
        .map_err(|_| S_IOERR)?;
    Ok(match way {
        _ if length == 0 => Request::Nothing(way),
        Transfer::In => Request::Io(IoRequest::read(offset, length)),
        Transfer::Out => Request::Io(IoRequest::write(offset, length)),
    })
}

fn ranges(kind: RangeKind, offered: bool, length: u32, info: &DiskInfo) -> Result<Request, u8> {
    if info.read_only {
        return Err(S_IOERR);
    }
    if !offered {
        return Err(S_UNSUPP);
    }
    let count = length / RANGE_SIZE as u32;
    if length == 0 || !length.is_multiple_of(RANGE_SIZE as u32) || count > crate::config::MAX_RANGES
    {
        return Err(S_IOERR);
    }
    Ok(Request::Ranges { kind, count })
}

/// Parses one range of a discard or write-zeroes request; `None` if it has no sectors.
///
/// # Errors
/// UNSUPP for a flag that is invalid for this kind (5.2.6.2), IOERR for a range outside the disk.
pub fn parse_range(
    kind: RangeKind,
    range: &[u8; RANGE_SIZE],
    info: &DiskInfo,
) -> Result<Option<IoRequest>, u8> {
    let word =
        |at: usize| u32::from_le_bytes([range[at], range[at + 1], range[at + 2], range[at + 3]]);
    let sector = u64::from(word(0)) | u64::from(word(4)) << 32;
    let (sectors, flags) = (word(8), word(12));
    let (limit, known_flags) = match kind {
        RangeKind::Discard => (crate::config::MAX_DISCARD_SECTORS, 0),
        RangeKind::WriteZeroes => (crate::config::MAX_WRITE_ZEROES_SECTORS, RANGE_UNMAP),
    };
    if flags & !known_flags != 0 {
        return Err(S_UNSUPP);
    }
    if sectors > limit {
        return Err(S_IOERR);
    }
    let (offset, length) = info
        .geometry
        .check_sectors(sector, u64::from(sectors) << 9)
        .map_err(|_| S_IOERR)?;
    if length == 0 {
        return Ok(None);
    }
    let unmap = if flags & RANGE_UNMAP != 0 {
        IoFlags::UNMAP
    } else {
        IoFlags::NONE
    };
    Ok(Some(match kind {
        RangeKind::Discard => IoRequest::discard(offset, length),
        RangeKind::WriteZeroes => IoRequest::write_zeroes(offset, length).flagged(unmap),
    }))
}

#[cfg(test)]
mod tests {
    use block::Geometry;
    use proptest::prelude::*;

    use super::*;

    fn info(block_size: u32) -> DiskInfo {
        DiskInfo {
            geometry: Geometry::new(block_size, 1 << 20),
            physical_block_size: 4096,
            io_alignment: block_size,
            optimal_io_size: 0,
            read_only: false,
            write_cache: true,
            discard_granularity: Some(4096),
            discard_zeroes: true,
            write_zeroes: true,
            anchors: false,
            atomic_writes: None,
            compare_and_write: Some(block::CompareAndWrite::Emulated),
            shared: false,
            rotational: false,
            passthrough: None,
            identity: block::Identity::UNSET,
            serial: String::new(),
            naa: 0,
        }
    }

    fn header(kind: u32, sector: u64) -> [u8; 16] {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        header
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
        let mut range = [0; 16];
        range[..8].copy_from_slice(&sector.to_le_bytes());
        range[8..12].copy_from_slice(&sectors.to_le_bytes());
        range[12..].copy_from_slice(&flags.to_le_bytes());
        range
    }

    #[test]
    fn in_and_out_are_read_and_write_in_sectors_of_512() {
        let got = parse(
            &[0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0],
            0,
            4096,
            &info(512),
        );
        assert_eq!(got, Ok(Request::Io(IoRequest::read(4096, 4096))));
        let got = parse(
            &[1, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0],
            1024,
            0,
            &info(512),
        );
        assert_eq!(got, Ok(Request::Io(IoRequest::write(4096, 1024))));
    }

    #[test]
    fn range_that_the_disk_does_not_have_is_ioerr() {
        for (sector, length) in [
            (2048, 512),
            (2047, 1024),
            (u64::MAX, 512),
            (0, 513),
            (0, u32::MAX),
        ] {
            assert_eq!(
                parse(&header(0, sector), 0, length, &info(512)),
                Err(1),
                "{sector} {length}"
            );
            assert_eq!(
                parse(&header(1, sector), length, 0, &info(512)),
                Err(1),
                "{sector} {length}"
            );
        }
    }

    #[test]
    fn requests_consist_of_sectors_for_every_block_size() {
        let read = |sector, length| parse(&header(0, sector), 0, length, &info(4096));
        assert_eq!(read(0, 512), Ok(Request::Io(IoRequest::read(0, 512))));
        assert_eq!(read(1, 4096), Ok(Request::Io(IoRequest::read(512, 4096))));
        assert_eq!(read(0, 513), Err(1));
    }

    #[test]
    fn write_to_a_read_only_disk_is_ioerr_and_a_read_is_not() {
        let info = DiskInfo {
            read_only: true,
            ..info(512)
        };
        assert_eq!(parse(&header(1, 0), 512, 0, &info), Err(1));
        assert_eq!(parse(&header(11, 0), 16, 0, &info), Err(1));
        assert!(parse(&header(0, 0), 0, 512, &info).is_ok());
    }

    #[test]
    fn unknown_type_is_unsupp() {
        for kind in [2, 3, 5, 10, 14, 15, u32::MAX] {
            assert_eq!(
                parse(&header(kind, 0), 512, 512, &info(512)),
                Err(2),
                "type {kind}"
            );
        }
    }

    #[test]
    fn discard_with_unmap_and_unknown_flags_are_unsupp() {
        assert_eq!(
            parse_range(RangeKind::Discard, &range(0, 8, 1), &info(512)),
            Err(2)
        );
        assert_eq!(
            parse_range(RangeKind::WriteZeroes, &range(0, 8, 2), &info(512)),
            Err(2)
        );
        let zeroes = parse_range(RangeKind::WriteZeroes, &range(8, 8, 1), &info(512));
        assert_eq!(
            zeroes,
            Ok(Some(
                IoRequest::write_zeroes(4096, 4096).flagged(IoFlags::UNMAP)
            ))
        );
    }

    #[test]
    fn ranges_come_in_whole_segments_and_not_too_many() {
        for length in [0, 15, 17, 33 * 16] {
            assert_eq!(
                parse(&header(11, 0), length, 0, &info(512)),
                Err(1),
                "{length}"
            );
        }
        let want = Request::Ranges {
            kind: RangeKind::Discard,
            count: 32,
        };
        assert_eq!(parse(&header(11, 0), 512, 0, &info(512)), Ok(want));
    }

    #[test]
    fn transfer_of_more_than_32_mib_is_read_the_general_way() {
        let large = DiskInfo {
            geometry: block::Geometry::new(512, 1 << 40),
            ..info(512)
        };
        for (length, plain) in [
            (32 << 20, true),
            ((32 << 20) + 512, false),
            (1 << 30, false),
            (0xffff_fe00, false),
        ] {
            let limits = Limits::of(&large);
            let (read, write) = (header(0, 0), header(1, 0));
            let general = [
                (
                    parse(&read, 0, length, &large),
                    IoRequest::read(0, length.into()),
                ),
                (
                    parse(&write, length, 0, &large),
                    IoRequest::write(0, length.into()),
                ),
            ];
            for (got, want) in general {
                assert_eq!(got, Ok(Request::Io(want)), "{length}");
            }
            let short = [
                parse_plain(&read, 0, length, &limits),
                parse_plain(&write, length, 0, &limits),
            ];
            assert_eq!(short.map(|got| got.is_some()), [plain; 2], "{length}");
        }
    }

    proptest! {
        #[test]
        fn fast_path_and_general_path_agree(
            kind in prop_oneof![Just(0u32), Just(1), 0u32..16],
            sector in prop_oneof![0u64..2100, any::<u64>()],
            (readable, writable) in prop_oneof![
                (0u32..20, 0u32..20).prop_map(|(r, w)| (r * 512, w * 512)),
                any::<(u32, u32)>(),
                (0u32..1 << 23, 0u32..1 << 23).prop_map(|(r, w)| (r * 512, w * 512)),
            ],
            big: bool,
            long: bool,
            read_only: bool,
        ) {
            let mut info = DiskInfo { read_only, ..info(if big { 4096 } else { 512 }) };
            if long {
                // Longer than the maximum transfer of one request.
                info.geometry = block::Geometry::new(info.geometry.block_size(), 1 << 40);
            }
            let bytes = header(kind, sector);
            let general = parse(&bytes, readable, writable, &info);
            let plain = match parse_plain(&bytes, readable, writable, &Limits::of(&info)) {
                Some((Transfer::In, offset, length)) => Some(IoRequest::read(offset, length.into())),
                Some((Transfer::Out, offset, length)) => Some(IoRequest::write(offset, length.into())),
                None => None,
            };
            match (plain, general) {
                (Some(plain), general) => prop_assert_eq!(Ok(Request::Io(plain)), general),
                (None, Ok(Request::Io(io))) => {
                    let long = io.length > u64::from(crate::config::TRANSFER_MAX);
                    prop_assert!(long || !io.moves_data());
                }
                (None, _) => {}
            }
        }

        #[test]
        fn no_request_reaches_beyond_the_disk(
            bytes: [u8; 16], readable: u32, writable: u32, big in any::<bool>()
        ) {
            let info = info(if big { 4096 } else { 512 });
            if let Ok(Request::Io(io)) = parse(&bytes, readable, writable, &info) {
                prop_assert!(io.offset + io.length <= 1 << 20);
            }
            for kind in [RangeKind::Discard, RangeKind::WriteZeroes] {
                if let Ok(Some(io)) = parse_range(kind, &bytes, &info) {
                    prop_assert!(io.offset + io.length <= 1 << 20);
                }
            }
        }
    }
}
