//! The logical units that a disk has used, as recorded between sessions, and the check of a unit that a new session finds.
//!
//! A target may map another unit to a LUN while no session to the old one exists. Without the record, the first session of a
//! new process would use that unit, and writes would reach another disk.

use std::fmt;

use crate::unit_identity::{Evidence, UnitIdentity};

/// Maximum number of recorded units. There are several only if their names are assigned by several targets.
const UNITS_MAX: usize = 16;

/// Units that a disk has used, each with the name of the target that led to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownUnits {
    units: Vec<(String, UnitIdentity)>,
    /// Hint about the acceptance of another unit, for error messages.
    pub remedy: String,
}

impl KnownUnits {
    /// Creates the record of a device of this machine from its names.
    pub fn of_device(names: Vec<String>) -> KnownUnits {
        let mut device = KnownUnits::default();
        if !names.is_empty() {
            device.add("", &UnitIdentity::of_names(names));
        }
        device
    }

    /// Creates the record of a SCSI device of this machine.
    pub fn of_scsi_device(identity: &UnitIdentity) -> KnownUnits {
        let mut device = KnownUnits::default();
        device.add("", identity);
        device
    }

    /// Returns true if a disk on `found` is another one than the recorded.
    pub fn excludes(&self, found: &KnownUnits) -> bool {
        let is_other = |(target, unit): &(String, UnitIdentity)| {
            self.compare(target, unit) == Evidence::Different
        };
        !self.is_empty() && (found.is_empty() || found.units.iter().any(is_other))
    }

    /// Returns true if no unit is recorded.
    pub fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// Compares a unit that was reached through a target with the recorded ones.
    pub(crate) fn compare(&self, target: &str, found: &UnitIdentity) -> Evidence {
        let mut evidence = Evidence::None;
        for (known_target, known) in &self.units {
            match found.compare(known, target.eq_ignore_ascii_case(known_target)) {
                Evidence::Same => return Evidence::Same,
                Evidence::Different => evidence = Evidence::Different,
                Evidence::None => {}
            }
        }
        evidence
    }

    /// Records a unit, unless it is recorded already or has no names that distinguish it from other units.
    pub(crate) fn add(&mut self, target: &str, found: &UnitIdentity) {
        let is_named = found.compare(found, true) == Evidence::Same;
        if is_named && self.compare(target, found) == Evidence::None {
            if self.units.len() == UNITS_MAX {
                self.units.remove(0);
            }
            self.units.push((target.to_owned(), found.clone()));
        }
    }

    /// Encodes the units as lines `KEY=VALUE`. A line `target=` starts a unit.
    pub fn encode(&self) -> Vec<u8> {
        let mut text = String::new();
        for (target, unit) in &self.units {
            for (key, value) in std::iter::once(("target", target.as_str())).chain(unit.fields()) {
                text.push_str(&format!("{key}={value}\n"));
            }
        }
        text.into_bytes()
    }

    /// Parses the output of [`KnownUnits::encode`]. Returns `None` for other bytes.
    pub fn decode(bytes: &[u8]) -> Option<KnownUnits> {
        let mut units: Vec<(String, UnitIdentity)> = Vec::new();
        for line in std::str::from_utf8(bytes).ok()?.split_terminator('\n') {
            match line.split_once('=')? {
                ("target", target) => units.push((target.to_owned(), UnitIdentity::default())),
                (key, value) => units.last_mut()?.1.set_field(key, value)?,
            }
        }
        Some(KnownUnits {
            units,
            remedy: String::new(),
        })
    }
}

impl fmt::Display for KnownUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (_, unit)) in self.units.iter().enumerate() {
            let separator = if index > 0 { " or " } else { "" };
            write!(f, "{separator}{unit}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TARGET: &str = "iqn.2026-11.org.example:t0";
    const OTHER: &str = "iqn.2026-11.org.example:t1";

    /// Returns a unit with this NAA designator in VPD page 83h.
    fn naa(bytes: &[u8]) -> UnitIdentity {
        let length = bytes.len() as u8;
        let page = [&[0, 0x83, 0, length + 4, 1, 3, 0, length], bytes].concat();
        UnitIdentity::new(("EXAMPLE", "Unit"), None, &page)
    }

    fn known(units: &[(&str, &UnitIdentity)]) -> KnownUnits {
        let mut known = KnownUnits::default();
        for (target, unit) in units {
            known.add(target, unit);
        }
        known
    }

    #[test]
    fn unit_of_a_world_wide_name_is_known_behind_each_target() {
        let unit = naa(&[0x50, 0x01, 0x40, 0x5a, 0, 0, 0, 1]);
        let other = naa(&[0x50, 0x01, 0x40, 0x5a, 0, 0, 0, 2]);
        let mut known = known(&[(TARGET, &unit)]);
        for target in [TARGET, OTHER] {
            assert_eq!(known.compare(target, &unit), Evidence::Same);
            assert_eq!(known.compare(target, &other), Evidence::Different);
            let unnamed = UnitIdentity::new(("EXAMPLE", "Unit"), None, &[]);
            assert_eq!(known.compare(target, &unnamed), Evidence::Different);
        }
        let before = known.clone();
        known.add(OTHER, &unit);
        known.add(OTHER, &other);
        assert_eq!(known, before);
    }

    #[test]
    fn locally_assigned_name_is_known_behind_its_target() {
        let [unit, other] = [1, 2].map(|last| naa(&[0x30, 0, 0, 1, 0, 0, 0, last]));
        let mut known = known(&[(TARGET, &unit)]);
        assert_eq!(known.compare(&TARGET.to_uppercase(), &unit), Evidence::Same);
        assert_eq!(known.compare(TARGET, &other), Evidence::Different);
        assert_eq!(known.compare(OTHER, &other), Evidence::None);
        known.add(OTHER, &other);
        assert_eq!(known.compare(OTHER, &other), Evidence::Same);
        assert_eq!(known.compare(OTHER, &unit), Evidence::Different);
        assert_eq!(known.compare(TARGET, &unit), Evidence::Same);
    }

    #[test]
    fn unit_without_distinguishing_names_is_not_recorded() {
        let unnamed = UnitIdentity::new(("EXAMPLE", "Unit"), Some("0000"), &[]);
        assert!(known(&[(TARGET, &unnamed)]).is_empty());
    }

    #[test]
    fn device_is_known_by_any_of_its_names() {
        let device = |names: &[&str]| {
            KnownUnits::of_device(names.iter().map(|name| (*name).to_owned()).collect())
        };
        let known = device(&["wwid naa.5000c500a1b2c3d4", "serial A1"]);
        assert!(!known.excludes(&known));
        assert!(!known.excludes(&device(&["serial A1"])));
        assert!(known.excludes(&device(&["wwid naa.5000c500a1b2c3d5"])));
        assert!(known.excludes(&device(&[])));
        assert!(!device(&[]).excludes(&known));
        assert_eq!(KnownUnits::decode(&known.encode()), Some(known));
    }

    #[test]
    fn record_is_text() {
        let unit = naa(&[0x50, 0x01, 0x40, 0x5a, 0, 0, 0, 1]);
        let known = known(&[(TARGET, &unit)]);
        let text =
            "target=iqn.2026-11.org.example:t0\nmodel=EXAMPLE Unit\nname=naa.5001405a00000001\n";
        assert_eq!(String::from_utf8(known.encode()).unwrap(), text);
        assert_eq!(KnownUnits::decode(text.as_bytes()), Some(known));
        for damaged in ["model=a\n", "target=a\ncolour=red\n", "target=a\nx\n"] {
            assert_eq!(KnownUnits::decode(damaged.as_bytes()), None, "{damaged}");
        }
    }

    proptest! {
        #[test]
        fn any_unit_is_recorded_and_read(
            vendor: Vec<u8>, serial: Vec<u8>, page in prop::collection::vec(any::<u8>(), 0..200), again in any::<Vec<u8>>(),
        ) {
            let [vendor, serial] = [vendor, serial].map(|text| crate::unit::printable(&text));
            let unit = UnitIdentity::new((&vendor, "Unit"), Some(&serial), &page);
            let known = known(&[(TARGET, &unit)]);
            prop_assert_eq!(KnownUnits::decode(&known.encode()), Some(known));
            KnownUnits::decode(&again);
        }
    }
}
