//! Entries of L1 and L2 tables ("Cluster mapping" in QEMU's docs/interop/qcow2.txt), held in host byte order in memory.

/// The cluster has a reference count of one and may be written in place.
pub(crate) const COPIED: u64 = 1 << 63;
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes regardless of its content (version 3).
pub(crate) const ZERO: u64 = 1;
/// Mask of the cluster's offset.
pub(crate) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bits that must be zero in a standard cluster descriptor and in an L1 entry.
pub(crate) const RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET | ZERO);
/// Unit of the length of compressed data, in bytes.
const SECTOR_BYTES: u64 = 512;

/// Decoded L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum L2Entry {
    /// Not allocated: reads as the backing image, or as zeroes.
    Unallocated,
    /// Reads as zeroes; `kept` is a preallocated cluster for later data.
    Zero { kept: Option<u64>, copied: bool },
    /// Data in a cluster.
    Data { host: u64, copied: bool },
    /// Compressed data: start offset and maximum length in bytes.
    Compressed { host: u64, bytes: u64 },
    /// Invalid entry.
    Bad,
}

/// Entry variants that an image permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryFormat {
    /// log2 of the cluster size in bytes.
    pub cluster_bits: u32,
    /// The zero flag is permitted.
    pub has_zeroes: bool,
    /// Data is in an external data file: no cluster is compressed or shared, and offset 0 is valid.
    pub has_data_file: bool,
}

impl EntryFormat {
    /// Decodes an entry, or the first word of an extended entry.
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

/// Returns the entry for a data cluster with a reference count of one.
pub(crate) fn data(host: u64) -> u64 {
    host | COPIED
}

/// Returns the offset of the L2 table of an L1 entry, or `None` if there is no table. An invalid entry is an error.
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
    fn entries_are_decoded_as_specified() {
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
        // 64 KiB clusters: 54 offset bits, three additional sectors
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
