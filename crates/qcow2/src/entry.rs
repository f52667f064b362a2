//! Entries of L1 and L2 tables ("Cluster mapping" in QEMU's docs/interop/qcow2.txt). In memory they are numbers of the host's byte order.

/// The cluster belongs to this table alone: its reference count is one, and it may be written in place.
pub(crate) const COPIED: u64 = 1 << 63;
/// The data are compressed.
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes, whatever lies in it (version 3).
pub(crate) const ZERO: u64 = 1;
/// Where the cluster lies.
pub(crate) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bits that have to be zero: of a standard descriptor, and of an entry of an L1 table.
pub(crate) const RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET | ZERO);
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

/// What entries of an image can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryFormat {
    /// log2 of the bytes of a cluster.
    pub cluster_bits: u32,
    /// An entry may say that its cluster reads as zeroes.
    pub has_zeroes: bool,
    /// Data lie in a file of their own: nothing is compressed or shared there, and a cluster may lie at 0.
    pub has_data_file: bool,
}

impl EntryFormat {
    /// Reads an entry, or the first word of one.
    pub fn decode(self, entry: u64) -> L2Entry {
        if entry & COMPRESSED != 0 {
            return match self.has_data_file {
                true => L2Entry::Bad,
                false => compressed(entry, self.cluster_bits),
            };
        }
        let host = entry & OFFSET;
        let is_bad = entry & RESERVED != 0 || !host.is_multiple_of(1 << self.cluster_bits);
        let (is_zero, copied) = (entry & ZERO != 0, entry & COPIED != 0);
        let is_allocated = host != 0 || (self.has_data_file && copied);
        match (is_bad, is_zero) {
            (true, _) => L2Entry::Bad,
            (_, true) if !self.has_zeroes => L2Entry::Bad,
            (_, true) => L2Entry::Zero {
                kept: is_allocated.then_some(host),
                copied,
            },
            (_, false) if !is_allocated => L2Entry::Unallocated,
            (_, false) => L2Entry::Data {
                host,
                copied: copied || self.has_data_file,
            },
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
        let format = EntryFormat {
            cluster_bits: 16,
            has_zeroes: true,
            has_data_file: false,
        };
        let decode = |entry| format.decode(entry);
        assert_eq!(decode(0), L2Entry::Unallocated);
        let host = 0x5_0000;
        let data = |copied| L2Entry::Data { host, copied };
        assert_eq!(decode(0x8000_0000_0005_0000), data(true));
        assert_eq!(decode(0x0000_0000_0005_0000), data(false));
        let zero = |kept, copied| L2Entry::Zero { kept, copied };
        assert_eq!(decode(1), zero(None, false));
        assert_eq!(decode(0x8000_0000_0005_0001), zero(Some(host), true));
        let has_zeroes = false;
        let old = EntryFormat {
            has_zeroes,
            ..format
        };
        assert_eq!(old.decode(1), L2Entry::Bad);
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
    #[test]
    fn in_a_data_file_a_cluster_may_lie_at_zero_and_none_is_compressed() {
        let format = EntryFormat {
            cluster_bits: 16,
            has_zeroes: true,
            has_data_file: true,
        };
        let decode = |entry| format.decode(entry);
        let data = |host| L2Entry::Data { host, copied: true };
        let zero = |kept, copied| L2Entry::Zero { kept, copied };
        assert_eq!(decode(0), L2Entry::Unallocated);
        assert_eq!(decode(0x8000_0000_0000_0000), data(0));
        assert_eq!(decode(0x8000_0000_0005_0000), data(0x5_0000));
        assert_eq!(decode(1), zero(None, false));
        assert_eq!(decode(0x8000_0000_0000_0001), zero(Some(0), true));
        assert_eq!(decode(0x4000_0000_0005_0123), L2Entry::Bad);
    }
}
