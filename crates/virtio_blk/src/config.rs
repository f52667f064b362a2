//! The configuration space and feature bits (virtio 1.3, 5.2.3 and 5.2.4).

use block::DiskInfo;

/// Maximum size of any single segment is in `size_max`.
pub const F_SIZE_MAX: u64 = 1 << 1;
/// Maximum number of segments in a request is in `seg_max`.
pub const F_SEG_MAX: u64 = 1 << 2;
/// Device is read-only.
pub const F_RO: u64 = 1 << 5;
/// Block size of the disk is in `blk_size`.
pub const F_BLK_SIZE: u64 = 1 << 6;
/// Cache flush command support.
pub const F_FLUSH: u64 = 1 << 9;
/// Device exports information on optimal I/O alignment.
pub const F_TOPOLOGY: u64 = 1 << 10;
/// Device can toggle its cache between writeback and writethrough modes.
pub const F_CONFIG_WCE: u64 = 1 << 11;
/// Device supports multiqueue.
pub const F_MQ: u64 = 1 << 12;
/// Device can support discard command.
pub const F_DISCARD: u64 = 1 << 13;
/// Device can support write zeroes command.
pub const F_WRITE_ZEROES: u64 = 1 << 14;

/// Advertised data segments of one request: with header and status they fit into the smallest common queue of 128. Longer
/// requests are served too, because some drivers ignore the limit (viostor, UEFI) or did not accept the feature.
pub const SEG_MAX: u32 = 126;
/// Maximum length of a data segment in bytes.
pub const SIZE_MAX: u32 = 256 << 10;
/// Maximum transfer of one I/O in bytes, the same as for a SCSI command. Longer requests are split, because `size_max` and
/// `seg_max` bind only drivers that accepted them; UEFI reads a whole file at once.
pub const TRANSFER_MAX: u32 = 32 << 20;
const _: () = assert!(SEG_MAX * SIZE_MAX <= TRANSFER_MAX);
/// Length of such a piece in bytes: a RAM disk copies it in about a millisecond, so that other requests do not wait for the
/// whole transfer.
pub const PIECE: u32 = 4 << 20;
/// Maximum number of segments in one discard or write-zeroes request.
pub const MAX_RANGES: u32 = 32;
/// Maximum discard range in 512-byte sectors: 4 GiB.
pub const MAX_DISCARD_SECTORS: u32 = 1 << 23;
/// Maximum write-zeroes range in 512-byte sectors: 1 GiB.
pub const MAX_WRITE_ZEROES_SECTORS: u32 = 1 << 21;

/// Offset of the only driver-writable field.
pub const WRITEBACK_OFFSET: u32 = 32;

/// Maximum number of queues of a device.
pub const QUEUES_MAX: u16 = 256;

/// All feature bits that [`features`] can offer.
pub const KNOWN_FEATURES: u64 = F_SIZE_MAX
    | F_SEG_MAX
    | F_RO
    | F_BLK_SIZE
    | F_FLUSH
    | F_TOPOLOGY
    | F_CONFIG_WCE
    | F_MQ
    | F_DISCARD
    | F_WRITE_ZEROES;

/// Returns the feature bits of a disk.
pub fn features(info: &DiskInfo, queues: u16) -> u64 {
    let mut features = F_SIZE_MAX | F_SEG_MAX | F_BLK_SIZE | F_TOPOLOGY | F_FLUSH;
    let mut offer = |yes: bool, bit: u64| features |= if yes { bit } else { 0 };
    offer(info.read_only, F_RO);
    offer(!info.read_only, F_CONFIG_WCE);
    offer(queues > 1, F_MQ);
    offer(
        !info.read_only && info.discard_granularity.is_some(),
        F_DISCARD,
    );
    offer(!info.read_only && info.write_zeroes, F_WRITE_ZEROES);
    features
}

/// Returns the configuration space up to and including `write_zeroes_may_unmap`.
pub fn space(info: &DiskInfo, queues: u16, writeback: bool) -> Vec<u8> {
    let block_size = info.geometry.block_size();
    let physical = info.physical_block_size.max(block_size);
    let blocks = |bytes: u32| bytes / block_size;
    let discard_alignment = info
        .discard_granularity
        .unwrap_or(block_size)
        .max(block_size)
        / 512;
    let mut space = Vec::with_capacity(60);
    space.extend((info.geometry.capacity_bytes() / 512).to_le_bytes());
    space.extend(SIZE_MAX.to_le_bytes());
    space.extend(SEG_MAX.to_le_bytes());
    space.extend([0; 4]); // geometry: not offered
    space.extend(block_size.to_le_bytes());
    space.push((physical / block_size).trailing_zeros() as u8);
    space.push(0); // alignment_offset
    space.extend((blocks(physical).min(u32::from(u16::MAX)) as u16).to_le_bytes());
    space.extend(blocks(info.optimal_io_size).to_le_bytes());
    space.push(u8::from(writeback));
    space.push(0);
    space.extend(queues.to_le_bytes());
    space.extend(MAX_DISCARD_SECTORS.to_le_bytes());
    space.extend(MAX_RANGES.to_le_bytes());
    space.extend(discard_alignment.to_le_bytes());
    space.extend(MAX_WRITE_ZEROES_SECTORS.to_le_bytes());
    space.extend(MAX_RANGES.to_le_bytes());
    space.push(1); // write_zeroes_may_unmap
    space.extend([0; 3]);
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> DiskInfo {
        DiskInfo {
            geometry: block::Geometry::new(512, 1 << 30),
            physical_block_size: 4096,
            io_alignment: 512,
            optimal_io_size: 65536,
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
            serial: "d0".into(),
            naa: 0x3000_0000_0000_0001,
        }
    }

    #[test]
    fn fields_lie_where_5_2_4_puts_them() {
        let space = space(&info(), 4, true);
        assert_eq!(space.len(), 60);
        assert_eq!(
            space[0..8],
            [0, 0, 0x20, 0, 0, 0, 0, 0],
            "capacity: 2^21 sectors"
        );
        assert_eq!(space[8..12], [0, 0, 4, 0], "size_max");
        assert_eq!(space[12..16], [126, 0, 0, 0], "seg_max");
        assert_eq!(space[20..24], [0, 2, 0, 0], "blk_size 512");
        assert_eq!(
            space[24..26],
            [3, 0],
            "physical_block_exp, alignment_offset"
        );
        assert_eq!(space[26..28], [8, 0], "min_io_size in blocks");
        assert_eq!(space[28..32], [128, 0, 0, 0], "opt_io_size in blocks");
        assert_eq!(space[32], 1, "writeback");
        assert_eq!(space[34..36], [4, 0], "num_queues");
        assert_eq!(space[36..40], [0, 0, 0x80, 0], "max_discard_sectors");
        assert_eq!(space[40..44], [32, 0, 0, 0], "max_discard_seg");
        assert_eq!(space[44..48], [8, 0, 0, 0], "discard_sector_alignment");
        assert_eq!(space[48..52], [0, 0, 0x20, 0], "max_write_zeroes_sectors");
        assert_eq!(space[52..56], [32, 0, 0, 0], "max_write_zeroes_seg");
        assert_eq!(space[56], 1, "write_zeroes_may_unmap");
    }

    #[test]
    fn read_only_disk_offers_nothing_that_writes() {
        let info = DiskInfo {
            read_only: true,
            ..info()
        };
        let features = features(&info, 1);
        assert_eq!(features & F_RO, 0x20);
        assert_eq!(
            features & (F_DISCARD | F_WRITE_ZEROES | F_CONFIG_WCE | F_MQ),
            0
        );
    }
}
