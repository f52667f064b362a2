//! Logical unit numbers in their eight-byte wire format (SAM-5, 4.7).
//!
//! Supports single-level peripheral (00b) and flat space (01b) addressing, and the well-known logical unit REPORT LUNS. All other forms
//! address no logical unit here.

/// An eight-byte LUN, as in REPORT LUNS data, an iSCSI header, or after the target number of virtio-scsi.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lun(pub [u8; 8]);

/// Object that a [`Lun`] addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LunAddress {
    /// A logical unit by number, 16,383 or less.
    Unit(u16),
    /// The well-known logical unit REPORT LUNS (SPC-5, 8.2).
    ReportLuns,
    /// An unsupported form of addressing.
    Unknown,
}

impl Lun {
    /// The well-known logical unit REPORT LUNS, C101h.
    pub const REPORT_LUNS: Lun = Lun([0xc1, 0x01, 0, 0, 0, 0, 0, 0]);

    /// Returns the LUN of a unit number: peripheral addressing below 256, flat space addressing from 256.
    ///
    /// # Panics
    /// If `number` needs more than the 14 bits of flat space addressing.
    pub const fn unit(number: u16) -> Lun {
        assert!(number < MAX_UNITS, "a LUN is below 16384");
        let [high, low] = number.to_be_bytes();
        let method = if high == 0 { 0x00 } else { 0x40 };
        Lun([method | high, low, 0, 0, 0, 0, 0, 0])
    }

    /// Returns a single-level LUN from its two bytes, as in bytes 2 and 3 of virtio-scsi's address.
    pub const fn single_level(bytes: [u8; 2]) -> Lun {
        Lun([bytes[0], bytes[1], 0, 0, 0, 0, 0, 0])
    }

    /// Returns the addressed object.
    #[inline]
    pub const fn address(self) -> LunAddress {
        let word = u64::from_be_bytes(self.0);
        if word << 16 != 0 {
            return LunAddress::Unknown;
        }
        let first = (word >> 48) as u16;
        match first >> 14 {
            0b00 if first < 0x0100 => LunAddress::Unit(first),
            0b01 => LunAddress::Unit(first & 0x3fff),
            0b11 if first == 0xc101 => LunAddress::ReportLuns,
            _ => LunAddress::Unknown,
        }
    }
}

/// Maximum number of logical units per target: flat space addressing has 14 bits.
pub const MAX_UNITS: u16 = 0x4000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peripheral_and_flat_addressing_name_the_same_unit() {
        assert_eq!(Lun([0, 5, 0, 0, 0, 0, 0, 0]).address(), LunAddress::Unit(5));
        assert_eq!(
            Lun([0x40, 5, 0, 0, 0, 0, 0, 0]).address(),
            LunAddress::Unit(5)
        );
        assert_eq!(
            Lun([0x7f, 0xff, 0, 0, 0, 0, 0, 0]).address(),
            LunAddress::Unit(16383)
        );
    }

    #[test]
    fn bus_numbers_lower_levels_and_other_methods_name_nothing() {
        for bytes in [
            [0x01, 5, 0, 0, 0, 0, 0, 0],
            [0x00, 5, 0, 1, 0, 0, 0, 0],
            [0x00, 5, 0, 0, 0, 0, 0, 1],
            [0x80, 5, 0, 0, 0, 0, 0, 0],
            [0xc1, 2, 0, 0, 0, 0, 0, 0],
        ] {
            assert_eq!(Lun(bytes).address(), LunAddress::Unknown, "{bytes:02x?}");
        }
    }

    #[test]
    fn units_up_to_255_are_reported_with_peripheral_addressing() {
        assert_eq!(Lun::unit(255).0, [0x00, 0xff, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Lun::unit(256).0, [0x41, 0x00, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Lun::REPORT_LUNS.address(), LunAddress::ReportLuns);
        for number in 0..MAX_UNITS {
            assert_eq!(Lun::unit(number).address(), LunAddress::Unit(number));
        }
    }
}
