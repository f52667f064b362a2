//! Properties of a disk from vital product data and mode pages (SBC-4, 6.6 and 6.5).
//!
//! Pure functions. Pages come from the unit and may be short or wrong.

/// Properties of a SCSI disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitProperties {
    /// Written data may be in a volatile cache until SYNCHRONIZE CACHE; `None` if not reported.
    pub write_cache: Option<bool>,
    /// The unit supports the FUA bit (DPOFUA).
    pub fua: bool,
    /// log2 of the number of logical blocks per physical block.
    pub physical_exponent: u8,
    /// Rotational medium.
    pub rotational: bool,
    /// Unmapped blocks do not read as zeroes but, for example, as a provisioning initialization pattern (LBPRZ of page
    /// B2h).
    pub unmapped_pattern: bool,
    /// The unit supports UNMAP (LBPU).
    pub unmap: bool,
    /// The unit supports WRITE SAME (16) with the UNMAP bit (LBPWS).
    pub unmap_by_write_same: bool,
    /// Maximum number of blocks of one UNMAP; `None` if not reported.
    pub unmap_max: Option<u32>,
    /// Optimal unmap granularity in blocks.
    pub unmap_granularity: u32,
    /// Maximum number of blocks of one WRITE SAME; `None` if not reported.
    pub write_same_max: Option<u64>,
    /// Maximum number of blocks of COMPARE AND WRITE; 0 if unsupported.
    pub compare_and_write_max: u8,
    /// Optimal transfer length in blocks; 0 if not reported.
    pub optimal_transfer: u32,
}

/// Returns the number in `bytes` bytes at `at`; 0 if the page is too short.
fn number(page: &[u8], at: usize, bytes: usize) -> u64 {
    let field = page.get(at..at + bytes).unwrap_or_default();
    field
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn nonzero<T: TryFrom<u64>>(number: u64) -> Option<T> {
    T::try_from(number).ok().filter(|_| number > 0)
}

impl UnitProperties {
    /// Parses the block limits page (B0h).
    pub(crate) fn take_block_limits(&mut self, page: &[u8]) {
        self.compare_and_write_max = number(page, 5, 1) as u8;
        self.optimal_transfer = number(page, 12, 4) as u32;
        self.unmap_max = nonzero(number(page, 20, 4));
        self.unmap_granularity = number(page, 28, 4) as u32;
        self.write_same_max = nonzero(number(page, 36, 8));
    }

    /// Parses the block device characteristics page (B1h): 0 is not reported, 1 is non-rotating.
    pub(crate) fn take_characteristics(&mut self, page: &[u8]) {
        self.rotational = number(page, 4, 2) > 1;
    }

    /// Parses the logical block provisioning page (B2h).
    pub(crate) fn take_provisioning(&mut self, page: &[u8]) {
        let flags = number(page, 5, 1);
        self.unmap = flags & 0x80 != 0;
        self.unmap_by_write_same = flags & 0x40 != 0;
        // xx1b: zeroes, 000b: not reported (SBC-4, 6.6.6).
        let zeroes = (flags >> 2 & 0x07) as u8;
        self.unmapped_pattern = zeroes != 0 && zeroes & 1 == 0;
    }

    /// Parses all mode pages in MODE SENSE (6) data.
    pub(crate) fn take_mode(&mut self, data: &[u8]) {
        self.fua = number(data, 2, 1) & 0x10 != 0;
        let mut rest = data
            .get(4 + number(data, 3, 1) as usize..)
            .unwrap_or_default();
        while let [code, length, ..] = *rest {
            const SUBPAGE: u8 = 0x40;
            const CACHING: u8 = 0x08;
            let (head, length) = match code & SUBPAGE {
                0 => (2, usize::from(length)),
                _ => (4, number(rest, 2, 2) as usize),
            };
            if code & 0x7f == CACHING {
                self.write_cache = rest.get(2).map(|flags| flags & 0x04 != 0);
                return;
            }
            rest = rest.get(head + length..).unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_where_the_standard_has_them() {
        let mut page = [0u8; 64];
        page[5] = 8;
        page[12..16].copy_from_slice(&[0, 0, 8, 0]);
        page[20..24].copy_from_slice(&[0, 1, 0, 0]);
        page[28..32].copy_from_slice(&[0, 0, 0, 8]);
        page[36..44].copy_from_slice(&[0, 0, 0, 0, 0, 2, 0, 0]);
        let mut unit = UnitProperties::default();
        unit.take_block_limits(&page);
        unit.take_characteristics(&[0, 0xb1, 0, 0x3c, 0x1c, 0x20]);
        unit.take_provisioning(&[0, 0xb2, 0, 4, 0, 0xc0]);
        let expected = UnitProperties {
            rotational: true,
            unmap: true,
            unmap_by_write_same: true,
            unmap_max: Some(0x1_0000),
            unmap_granularity: 8,
            write_same_max: Some(0x2_0000),
            compare_and_write_max: 8,
            optimal_transfer: 0x800,
            ..UnitProperties::default()
        };
        assert_eq!(unit, expected);
        unit.take_characteristics(&[0, 0xb1, 0, 0x3c, 0, 1]);
        assert!(!unit.rotational);
    }

    #[test]
    fn pattern_of_unmapped_blocks_is_not_zeroes() {
        for (code, is_pattern) in [(0, false), (1, false), (2, true), (5, false), (6, true)] {
            let mut unit = UnitProperties::default();
            unit.take_provisioning(&[0, 0xb2, 0, 4, 0, 0xe0 | code << 2, 2, 0]);
            assert_eq!(unit.unmapped_pattern, is_pattern, "{code:03b}b");
        }
    }

    #[test]
    fn the_caching_page_is_found_behind_others_and_may_not_be_there() {
        // Header with DPOFUA, read-write error recovery page, then the caching page with and without WCE.
        let mode = |flags| {
            let mut data = vec![0, 0, 0x10, 0, 0x01, 0x0a];
            data.extend([0; 10]);
            data.extend([0x88, 0x12, flags]);
            data.extend([0; 17]);
            data
        };
        let taken = |data: &[u8]| {
            let mut unit = UnitProperties::default();
            unit.take_mode(data);
            (unit.write_cache, unit.fua)
        };
        assert_eq!(taken(&mode(0)), (Some(false), true));
        assert_eq!(taken(&mode(4)), (Some(true), true));
        assert_eq!(taken(&[3, 0, 0, 0]), (None, false));
        for cut in 0..mode(0).len() {
            taken(&mode(0)[..cut]);
        }
        // A page length beyond the data, and a block descriptor length beyond the data.
        assert_eq!(taken(&[9, 0, 0, 0, 0x01, 0xff, 0]).0, None);
        assert_eq!(taken(&[9, 0, 0, 0xff, 0x08, 0x12, 0]).0, None);
    }
}
