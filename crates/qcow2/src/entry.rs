//! Entries of L1 and L2 tables ("Cluster mapping" in QEMU's docs/interop/qcow2.txt). In memory they are numbers of the host's byte order.

/// The cluster belongs to this table alone: its reference count is one, and it may be written in place.
pub(crate) const COPIED: u64 = 1 << 63;
/// The data are compressed.
const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes, whatever lies in it (version 3).
pub(crate) const ZERO: u64 = 1;
/// Where the cluster lies.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bits that have to be zero: of a standard descriptor, and of an entry of an L1 table.
const RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET | ZERO);
/// Compressed data are counted in sectors of this many bytes.
const SECTOR_BYTES: u64 = 512;

/// What an entry of an L2 table says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum L2Entry {
    /// Nothing here: the backing image shows, or zeroes.
    Unallocated,
    /// Zeroes; the cluster that may be kept for later data.
    Zero { kept: Option<u64>, copied: bool },
    /// Data, in a cluster.
    Data { host: u64, copied: bool },
    /// Compressed data: where they begin, and the most bytes that they take.
    Compressed { host: u64, bytes: u64 },
    /// No entry that there may be.
    Bad,
}

impl L2Entry {
    /// Reads an entry of an image of this version and cluster size.
    pub fn decode(entry: u64, cluster_bits: u32, has_zero_flag: bool) -> L2Entry {
        if entry & COMPRESSED != 0 {
            return compressed(entry, cluster_bits);
        }
        let host = entry & OFFSET;
        let is_bad = entry & RESERVED != 0 || !host.is_multiple_of(1 << cluster_bits);
        let (is_zero, copied) = (entry & ZERO != 0, entry & COPIED != 0);
        match (is_bad, is_zero, host) {
            (true, ..) => L2Entry::Bad,
            (_, true, _) if !has_zero_flag => L2Entry::Bad,
            (_, true, 0) => L2Entry::Zero { kept: None, copied },
            (_, true, host) => L2Entry::Zero {
                kept: Some(host),
                copied,
            },
            (_, false, 0) => L2Entry::Unallocated,
            (_, false, host) => L2Entry::Data { host, copied },
        }
    }
}

fn compressed(entry: u64, cluster_bits: u32) -> L2Entry {
    let offset_bits = 62 - (cluster_bits - 8);
    let host = entry & ((1 << offset_bits) - 1);
    let more_sectors = (entry & !(COPIED | COMPRESSED)) >> offset_bits;
    if entry & COPIED != 0 {
        return L2Entry::Bad;
    }
    let bytes = (more_sectors + 1) * SECTOR_BYTES - host % SECTOR_BYTES;
    L2Entry::Compressed { host, bytes }
}

/// The entry of a cluster with data that belongs to this table alone.
pub(crate) fn data(host: u64) -> u64 {
    host | COPIED
}

/// Where the L2 table of an L1 entry lies; `None`: there is none. An entry that cannot be is an error.
pub(crate) fn l2_table(entry: u64, cluster_bits: u32) -> Result<Option<u64>, ()> {
    let host = entry & OFFSET;
    match host {
        _ if entry & !(COPIED | OFFSET) != 0 || !host.is_multiple_of(1 << cluster_bits) => Err(()),
        0 => Ok(None),
        host => Ok(Some(host)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_mean_what_the_format_says() {
        let decode = |entry| L2Entry::decode(entry, 16, true);
        assert_eq!(decode(0), L2Entry::Unallocated);
        let host = 0x5_0000;
        let data = |copied| L2Entry::Data { host, copied };
        assert_eq!(decode(0x8000_0000_0005_0000), data(true));
        assert_eq!(decode(0x0000_0000_0005_0000), data(false));
        let zero = |kept, copied| L2Entry::Zero { kept, copied };
        assert_eq!(decode(1), zero(None, false));
        assert_eq!(decode(0x8000_0000_0005_0001), zero(Some(host), true));
        assert_eq!(L2Entry::decode(1, 16, false), L2Entry::Bad);
        // 64 KiB clusters: the offset has 54 bits; three more sectors
        let entry = 0x4000_0000_0005_0123 | 3 << 54;
        let found = L2Entry::Compressed {
            host: 0x5_0123,
            bytes: 4 * 512 - 0x123,
        };
        assert_eq!(decode(entry), found);
        for bad in [
            0x5_0200,
            0x0100_0000_0005_0000,
            0x5_0002,
            0xc000_0000_0005_0000,
        ] {
            assert_eq!(decode(bad), L2Entry::Bad, "{bad:#x}");
        }
        assert_eq!(l2_table(0x8000_0000_0003_0000, 16), Ok(Some(0x3_0000)));
        assert_eq!(l2_table(0, 16), Ok(None));
        assert_eq!(l2_table(0x3_0001, 16), Err(()));
    }
}
