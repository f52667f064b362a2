//! Properties of a unit from INQUIRY, READ CAPACITY and MODE SENSE.
//!
//! All values are checked before use.

use scsi::cdb;

use crate::properties::UnitProperties;
use crate::unit::{CommandError, answer, printable};
use crate::unit_identity::{Evidence, NAA, UnitIdentity, designators, hexadecimal};

/// Function that executes a command: its name, its CDB, and the maximum data-in length in bytes. Unit attentions are
/// already handled.
pub type ExecuteCommand<'a> =
    dyn FnMut(&'static str, &[u8], u32) -> Result<Vec<u8>, CommandError> + 'a;

/// Peripheral device types (SPC-5, 6.7.2).
const DISK: u8 = 0x00;
const CD_DVD: u8 = 0x05;
const OPTICAL: u8 = 0x07;

/// Result of comparing two descriptions of units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sameness {
    /// The names of the units prove that they are the same.
    Proven,
    /// There is no proof for or against it.
    Possible,
    /// The units are different, or the unit has changed and cannot be used as before.
    Different,
}

/// Properties of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitInfo {
    /// Peripheral device type; 0 is a disk.
    pub device_type: u8,
    /// T10 vendor identification.
    pub vendor: String,
    /// Product identification.
    pub product: String,
    /// Product revision level.
    pub revision: String,
    /// Unit serial number (VPD page 80h).
    pub serial: Option<String>,
    /// NAA identifier in hexadecimal (VPD page 83h).
    pub naa: Option<String>,
    /// All names for comparison with other units.
    pub identity: UnitIdentity,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Number of logical blocks.
    pub blocks: u64,
    /// Write-protected (WP of MODE SENSE).
    pub read_only: bool,
    /// The unit can unmap blocks (LBPME).
    pub thin: bool,
    /// Unmapped blocks read as zeroes (LBPME and LBPRZ). Otherwise their content is unknown.
    pub zeroes: bool,
    /// Maximum number of blocks of one read or write; `None` if not reported.
    pub transfer_max: Option<u32>,
    /// Further properties for optimal use.
    pub properties: UnitProperties,
}

impl UnitInfo {
    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_size)
    }

    /// Compares the unit with an earlier one. `same_target` means that both were reached through targets of one name.
    pub fn compare(&self, other: &UnitInfo, same_target: bool) -> Sameness {
        // An optical unit without a medium has no blocks.
        let is_empty = self.block_size == 0 || other.block_size == 0;
        if self.device_type != other.device_type || !is_empty && self.block_size != other.block_size
        {
            return Sameness::Different;
        }
        match self.identity.compare(&other.identity, same_target) {
            Evidence::Same => Sameness::Proven,
            Evidence::None => Sameness::Possible,
            Evidence::Different => Sameness::Different,
        }
    }

    /// Returns true if the unit may have a write cache, and had none before. It may have data of writes that ended before this was
    /// known.
    pub fn gains_write_cache(&self, before: &UnitInfo) -> bool {
        let had_none = before.properties.write_cache == Some(false);
        had_none && self.properties.write_cache != Some(false)
    }

    /// Returns true if the unit has randomly readable and writable blocks, which includes optical units.
    pub fn is_disk(&self) -> bool {
        matches!(self.device_type, DISK | CD_DVD | OPTICAL)
    }

    /// Returns true for an MMC unit, which supports only the shorter commands.
    pub fn is_optical(&self) -> bool {
        self.device_type == CD_DVD
    }

    /// Reads INQUIRY data and the supported pages of vital product data.
    ///
    /// # Errors
    /// If the unit does not answer or does not exist.
    pub fn take_identity(&mut self, ask: &mut ExecuteCommand<'_>) -> Result<(), CommandError> {
        let mut inquiry = |page| ask("INQUIRY", &cdb::inquiry(page, 1024), 1024);
        let data = inquiry(None)?;
        let text = |data: &[u8], from: usize, to: usize| {
            let bytes = data.get(from..to.min(data.len())).unwrap_or_default();
            printable(bytes)
        };
        let first = data.first().copied().unwrap_or(0x7f);
        if first >> 5 != 0 {
            return Err(answer("INQUIRY", "no such logical unit"));
        }
        self.device_type = first & 0x1f;
        self.vendor = text(&data, 8, 16);
        self.product = text(&data, 16, 32);
        self.revision = text(&data, 32, 36);
        let pages = inquiry(Some(0)).unwrap_or_default();
        let has = |page: u8| pages.get(4..).is_some_and(|list| list.contains(&page));
        if has(0x80) {
            let page = inquiry(Some(0x80))?;
            self.serial = Some(text(&page, 4, page.len())).filter(|serial| !serial.is_empty());
        }
        let mut identification = Vec::new();
        if has(0x83) {
            identification = inquiry(Some(0x83))?;
            self.naa = naa_of(&identification);
        }
        let model = (self.vendor.as_str(), self.product.as_str());
        self.identity = UnitIdentity::new(model, self.serial.as_deref(), &identification);
        if has(0xb0) {
            // Maximum transfer length of the block limits page (SBC-4, 6.6.4).
            let page = inquiry(Some(0xb0))?;
            let most = page.get(8..12).and_then(|bytes| bytes.try_into().ok());
            let most = most.map(u32::from_be_bytes);
            self.transfer_max = most.filter(|most| *most > 0);
            self.properties.take_block_limits(&page);
        }
        if has(0xb1) {
            let page = inquiry(Some(0xb1))?;
            self.properties.take_characteristics(&page);
        }
        if has(0xb2) {
            let page = inquiry(Some(0xb2))?;
            self.properties.take_provisioning(&page);
        }
        Ok(())
    }

    /// Reads the size with READ CAPACITY (16), and the write protection with MODE SENSE (6).
    fn measure(&mut self, ask: &mut ExecuteCommand<'_>) -> Result<(), CommandError> {
        const NAME: &str = "READ CAPACITY(16)";
        let data = ask(NAME, &cdb::read_capacity_16(), 32)?;
        let Some((last, rest)) = data.split_first_chunk::<8>() else {
            return Err(answer(
                NAME,
                format!("the response of the unit has only {} bytes", data.len()),
            ));
        };
        let block_size = rest
            .first_chunk::<4>()
            .map_or(0, |bytes| u32::from_be_bytes(*bytes));
        let blocks = u64::from_be_bytes(*last).checked_add(1);
        let fits = blocks.and_then(|blocks| blocks.checked_mul(block_size.into()));
        let (Some(blocks), Some(_)) = (blocks, fits.filter(|bytes| *bytes < 1 << 63)) else {
            return Err(answer(NAME, "the unit has more than 2^63 bytes"));
        };
        if !block_size.is_power_of_two() || !(512..=65_536).contains(&block_size) {
            return Err(answer(
                NAME,
                format!("unsupported block size, {block_size} bytes"),
            ));
        }
        let provisioning = data.get(14).copied().unwrap_or(0);
        self.block_size = block_size;
        self.blocks = blocks;
        self.properties.physical_exponent = data.get(13).copied().unwrap_or(0) & 0x0f;
        self.thin = provisioning & 0x80 != 0;
        // LBPRZ is valid only together with LBPME (SBC-4, 5.22.2).
        let zeroes = provisioning & 0xc0 == 0xc0;
        self.zeroes = zeroes && !self.properties.unmapped_pattern;
        // A unit without mode pages refuses the command; the write protection is then unknown.
        let mode = ask("MODE SENSE(6)", &cdb::mode_sense_6(0x3f, 192), 192);
        if let Ok(mode) = mode {
            self.read_only = mode.get(2).is_some_and(|byte| byte & 0x80 != 0);
            self.properties.take_mode(&mode);
        }
        Ok(())
    }

    /// Reads the size of an optical unit with READ CAPACITY (10). Without a medium it has no blocks.
    fn measure_optical(&mut self, ask: &mut ExecuteCommand<'_>) -> Result<(), CommandError> {
        const NAME: &str = "READ CAPACITY(10)";
        (self.block_size, self.blocks, self.read_only) = (0, 0, true);
        let data = match ask(NAME, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8) {
            Err(CommandError::Refused { .. }) => return Ok(()),
            other => other?,
        };
        let number = |from: usize| {
            let bytes = data
                .get(from..from + 4)
                .and_then(|four| four.try_into().ok());
            bytes.map(u32::from_be_bytes)
        };
        let (Some(last), Some(block_size)) = (number(0), number(4)) else {
            return Err(answer(
                NAME,
                format!("the response of the unit has only {} bytes", data.len()),
            ));
        };
        if !block_size.is_power_of_two() || !(512..=65_536).contains(&block_size) {
            return Err(answer(
                NAME,
                format!("unsupported block size, {block_size} bytes"),
            ));
        }
        (self.block_size, self.blocks) = (block_size, u64::from(last) + 1);
        Ok(())
    }

    /// Reads size and write protection; units other than disks have none.
    ///
    /// # Errors
    /// If the unit does not answer, or the response is invalid.
    pub fn take_size(&mut self, ask: &mut ExecuteCommand<'_>) -> Result<(), CommandError> {
        match self.device_type {
            DISK | OPTICAL => self.measure(ask),
            CD_DVD => self.measure_optical(ask),
            _ => Ok(()),
        }
    }
}

/// Returns the first NAA designator of the logical unit in VPD page 83h (SPC-5, 7.7.6.6), in hexadecimal.
fn naa_of(page: &[u8]) -> Option<String> {
    let naa = designators(page).find(|one| (one.association, one.kind) == (0, NAA))?;
    Some(hexadecimal(naa.bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_units_own_naa_designator_is_found_behind_others() {
        // T10 vendor designator, then the NAA of a port, then the NAA of the unit.
        let mut page = vec![0, 0x83, 0, 0];
        page.extend([0x02, 0x01, 0, 2, b'x', b'y']);
        page.extend([0x01, 0x93, 0, 2, 0x30, 0x01]);
        page.extend([0x01, 0x03, 0, 8, 0x3a, 0x5b, 0, 0, 0, 0, 0, 1]);
        assert_eq!(naa_of(&page).as_deref(), Some("3a5b000000000001"));
        // Wrong lengths give no NAA and do not panic.
        for cut in 0..page.len() {
            naa_of(&page[..cut]);
        }
        assert_eq!(naa_of(&[0, 0x83, 0, 4, 1, 3, 0, 255]), None);
    }

    #[test]
    fn unknown_write_cache_counts_as_gained() {
        let unit = |write_cache| UnitInfo {
            properties: UnitProperties {
                write_cache,
                ..UnitProperties::default()
            },
            ..UnitInfo::default()
        };
        let gains = |before, now| unit(now).gains_write_cache(&unit(before));
        assert!(gains(Some(false), Some(true)) && gains(Some(false), None));
        for (before, now) in [
            (Some(false), Some(false)),
            (Some(true), None),
            (None, Some(true)),
        ] {
            assert!(!gains(before, now), "{before:?} {now:?}");
        }
    }

    #[test]
    fn optical_unit_is_measured_by_its_shorter_command() {
        let mut unit = UnitInfo {
            device_type: 5,
            ..UnitInfo::default()
        };
        let mut answers = vec![vec![0, 0, 0x0f, 0xff, 0, 0, 8, 0], vec![0; 3]];
        let mut ask = |name, cdb: &[u8], length| {
            assert_eq!((name, cdb.len(), length), ("READ CAPACITY(10)", 10, 8));
            Ok(answers.remove(0))
        };
        unit.take_size(&mut ask).unwrap();
        assert_eq!((unit.block_size, unit.blocks), (2048, 4096));
        assert!(unit.take_size(&mut ask).is_err(), "3 bytes");
        let mut no_medium = |name, _: &[u8], _| {
            Err(CommandError::Refused {
                command: name,
                status: 2,
                sense: None,
            })
        };
        unit.take_size(&mut no_medium).unwrap();
        assert_eq!(unit.bytes(), 0);
    }
}
