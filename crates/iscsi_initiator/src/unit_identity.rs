//! Identity of a logical unit: its reported names, and the comparison of two sets of names.
//!
//! Pure functions. Pages come from the unit and may be short or wrong.

use std::fmt;

use crate::unit::printable;

/// Designator types of VPD page 83h (SPC-5, 7.7.6.1).
const T10: u8 = 1;
const EUI_64: u8 = 2;
pub(crate) const NAA: u8 = 3;
const NAME_STRING: u8 = 8;
const UUID: u8 = 10;

/// Length of the vendor identification at the start of a T10 vendor ID based designator, in bytes.
const T10_VENDOR_BYTES: usize = 8;
/// A vendor-specific identifier of this length is regarded as random, even if the unit has a locally assigned NAA
/// identifier.
const RANDOM_TEXT: usize = 32;

/// Names of a logical unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitIdentity {
    /// Worldwide unique names: NAA types 2, 5 and 6, EUI-64, SCSI name strings, UUIDs.
    world_wide: Vec<String>,
    /// Locally assigned identifier (NAA type 3, or without a company ID), unique within its target only.
    local: Option<String>,
    /// T10 vendor ID based designator that identifies a single unit of its vendor.
    t10: Option<String>,
    /// Vendor and product identification.
    model: String,
    /// Unit serial number.
    serial: Option<String>,
}

/// Result of comparing the names of two units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// The names belong to one unit.
    Same,
    /// The names belong to different units.
    Different,
    /// The names are not comparable.
    None,
}

/// A designation descriptor (SPC-5, 7.7.6.1).
pub(crate) struct Designator<'a> {
    /// 0: logical unit, 1: target port.
    pub association: u8,
    /// 3: NAA, 5: target port group.
    pub kind: u8,
    pub bytes: &'a [u8],
}

/// Returns the designators of VPD page 83h, up to the first truncated one.
pub(crate) fn designators(page: &[u8]) -> impl Iterator<Item = Designator<'_>> {
    let mut rest = page.get(4..).unwrap_or_default();
    std::iter::from_fn(move || {
        let (head, after) = rest.split_first_chunk::<4>()?;
        let (bytes, next) = after.split_at_checked(head[3].into())?;
        rest = next;
        Some(Designator {
            association: head[1] >> 4 & 3,
            kind: head[1] & 0x0f,
            bytes,
        })
    })
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A name of a unit, and its scope.
enum Name {
    WorldWide(String),
    Local(String),
}

/// Returns the name in an NAA identifier; `None` if its type or length is unknown, or the identifier is empty.
fn naa(bytes: &[u8]) -> Option<Name> {
    let (first, rest) = bytes.split_first()?;
    let name = format!("naa.{}", hexadecimal(bytes));
    if first & 0x0f == 0 && rest.iter().all(|byte| *byte == 0) {
        return None;
    }
    let company = match (first >> 4, bytes) {
        (2, [_, _, company @ .., _, _, _]) if company.len() == 3 => {
            company.iter().any(|byte| *byte != 0)
        }
        (5, [a, b, c, d, ..]) if bytes.len() == 8 => (a & 0x0f | b | c | d >> 4) != 0,
        (6, [a, b, c, d, ..]) if bytes.len() == 16 => (a & 0x0f | b | c | d >> 4) != 0,
        (3, _) if bytes.len() == 8 => false,
        _ => return None,
    };
    // An identifier without a company ID is not registered: tgt derives type 6 from target and LUN number.
    Some(match company {
        true => Name::WorldWide(name),
        false => Name::Local(name),
    })
}

/// Returns the name in a SCSI name string (SPC-5, 7.7.6.11).
fn name_string(bytes: &[u8]) -> Option<Name> {
    let text = printable(bytes);
    let (prefix, rest) = (text.get(..4)?.to_ascii_lowercase(), text.get(4..)?);
    let is_hexadecimal = !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
    let name = format!("{prefix}{}", rest.to_ascii_lowercase());
    match prefix.as_str() {
        "iqn." if !rest.is_empty() => Some(Name::WorldWide(name)),
        "eui." if is_hexadecimal => Some(Name::WorldWide(name)),
        "naa." if is_hexadecimal => {
            let digits = rest.as_bytes().chunks(2);
            let bytes =
                digits.map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok());
            naa(&bytes.collect::<Option<Vec<u8>>>()?)
        }
        _ => None,
    }
}

/// Returns the identifier in a text, unless it is a placeholder: empty, or one repeated character.
fn identifier(text: &str) -> Option<&str> {
    let text = text.trim_matches([' ', '\0']);
    let first = text.chars().next()?;
    (text.len() == 1 && first != '0' || text.chars().any(|one| one != first)).then_some(text)
}

impl UnitIdentity {
    /// Creates the identity of a unit from its INQUIRY data and its VPD page 83h, which may be empty.
    pub(crate) fn new(
        (vendor, product): (&str, &str),
        serial: Option<&str>,
        page: &[u8],
    ) -> UnitIdentity {
        let mut identity = UnitIdentity {
            model: format!("{vendor} {product}"),
            serial: serial.and_then(identifier).map(str::to_owned),
            ..UnitIdentity::default()
        };
        let mut t10 = None;
        for one in designators(page).filter(|one| one.association == 0) {
            let name = match (one.kind, one.bytes) {
                (NAA, bytes) => naa(bytes),
                (NAME_STRING, bytes) => name_string(bytes),
                (EUI_64, bytes) if matches!(bytes.len(), 8 | 12 | 16) => {
                    let is_empty = bytes.iter().all(|byte| *byte == 0);
                    (!is_empty).then(|| Name::WorldWide(format!("eui.{}", hexadecimal(bytes))))
                }
                (UUID, [0x10, 0, uuid @ ..]) if uuid.len() == 16 => {
                    let is_empty = uuid.iter().all(|byte| *byte == 0);
                    (!is_empty).then(|| Name::WorldWide(format!("uuid.{}", hexadecimal(uuid))))
                }
                (T10, bytes) => {
                    t10 = t10.or(bytes.split_at_checked(T10_VENDOR_BYTES));
                    None
                }
                _ => None,
            };
            match name {
                Some(Name::WorldWide(name)) if !identity.world_wide.contains(&name) => {
                    identity.world_wide.push(name);
                }
                Some(Name::Local(name)) if identity.local.is_none() => identity.local = Some(name),
                _ => {}
            }
        }
        if let Some((vendor, specific)) = t10 {
            let specific = printable(specific);
            if identity.is_of_one_unit(product, &specific) {
                identity.t10 = Some(format!("t10.{} {specific}", printable(vendor)));
            }
        }
        identity
    }

    /// Returns true if a vendor-specific identifier is specific to a single unit. Some targets use only the product, or a
    /// number derived from the LUN (tgt).
    fn is_of_one_unit(&self, product: &str, specific: &str) -> bool {
        let own = specific.strip_prefix(product).unwrap_or(specific);
        let Some(own) = identifier(own) else {
            return false;
        };
        let has_serial = self
            .serial
            .as_ref()
            .is_some_and(|serial| own.contains(serial.as_str()));
        let has_product = own.len() < specific.len() && !product.is_empty();
        own.len() >= RANDOM_TEXT || self.local.is_none() && (has_serial || has_product)
    }

    /// Creates the identity of a device from names that Linux reports for it.
    pub(crate) fn of_names(names: Vec<String>) -> UnitIdentity {
        UnitIdentity {
            world_wide: names,
            ..UnitIdentity::default()
        }
    }

    /// Returns the names as pairs of key and value, for a record.
    pub(crate) fn fields(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let optional = [
            ("serial", &self.serial),
            ("local", &self.local),
            ("t10", &self.t10),
        ];
        let optional = optional
            .into_iter()
            .filter_map(|(key, value)| Some((key, value.as_deref()?)));
        let names = self.world_wide.iter();
        std::iter::once(("model", self.model.as_str()))
            .chain(optional)
            .chain(names.map(|name| ("name", name.as_str())))
    }

    /// Sets a field of [`UnitIdentity::fields`]. Returns `None` for an unknown key.
    pub(crate) fn set_field(&mut self, key: &str, value: &str) -> Option<()> {
        let value = value.to_owned();
        match key {
            "model" => self.model = value,
            "serial" => self.serial = Some(value),
            "local" => self.local = Some(value),
            "t10" => self.t10 = Some(value),
            "name" => self.world_wide.push(value),
            _ => return None,
        }
        Some(())
    }

    /// Returns the name that is unique beyond the target.
    pub fn world_wide_name(&self) -> Option<&str> {
        let is_naa = |name: &&String| name.starts_with("naa.");
        let names = &self.world_wide;
        let name = names.iter().find(is_naa).or(names.first());
        // With a locally assigned name, an accepted T10 designator is random; see `is_of_one_unit`.
        let random = self.t10.as_ref().filter(|_| self.local.is_some());
        name.or(random).map(String::as_str)
    }

    /// Returns the name that is unique within the target.
    pub fn local_name(&self) -> Option<&str> {
        self.local.as_deref()
    }

    /// Compares the names of two units. `same_target` means that both were reached through targets of one name, where
    /// locally assigned identifiers are unique.
    pub fn compare(&self, other: &UnitIdentity, same_target: bool) -> Evidence {
        let verdict = |is_same: bool| match is_same {
            true => Evidence::Same,
            false => Evidence::Different,
        };
        if !(self.world_wide.is_empty() && other.world_wide.is_empty()) {
            let mut names = self.world_wide.iter();
            return verdict(names.any(|name| other.world_wide.contains(name)));
        }
        // Firmware may change vendor and product of a unit with a worldwide name.
        if self.model != other.model {
            return Evidence::Different;
        }
        if self.t10.is_some() && other.t10.is_some() {
            return verdict(self.t10 == other.t10);
        }
        let is_local = self.local.is_some() || other.local.is_some();
        match (is_local, same_target) {
            (true, true) => verdict(self.local == other.local && self.serial == other.serial),
            // A target that assigns identifiers itself may derive its serial numbers in the same way (tgt).
            (true, false) => Evidence::None,
            (false, _) if self.serial.is_none() && other.serial.is_none() => Evidence::None,
            (false, _) => verdict(self.serial == other.serial),
        }
    }
}

impl fmt::Display for UnitIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.world_wide_name().or(self.local_name()), &self.serial) {
            (Some(name), _) => f.write_str(name),
            (None, Some(serial)) => write!(f, "{} {serial}", self.model),
            (None, None) => f.write_str(&self.model),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds VPD page 83h with these designators: code set, association and type, identifier.
    fn page(designators: &[(u8, u8, &[u8])]) -> Vec<u8> {
        let mut page = vec![0, 0x83, 0, 0];
        for (code_set, kind, bytes) in designators {
            page.extend([*code_set, *kind, 0, bytes.len() as u8]);
            page.extend_from_slice(bytes);
        }
        page
    }

    fn unit(serial: Option<&str>, designators: &[(u8, u8, &[u8])]) -> UnitIdentity {
        UnitIdentity::new(("EXAMPLE", "Unit"), serial, &page(designators))
    }

    const NAA_3: &[u8] = &[0x30, 0, 0, 1, 0, 0, 0, 1];
    const NAA_5: &[u8] = &[0x50, 0x01, 0x40, 0x5a, 0, 0, 0, 1];
    const NAA_6: &[u8] = &[0x60, 0x01, 0x40, 0x5a, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2];

    /// Returns the evidence for two paths to units with these names: through one target, and through two.
    fn evidence(one: &UnitIdentity, other: &UnitIdentity) -> [Evidence; 2] {
        [true, false].map(|same_target| one.compare(other, same_target))
    }

    #[test]
    fn world_wide_names_prove_that_units_are_the_same() {
        let uuid = [&[0x10, 0][..], &[7; 16]].concat();
        for designator in [
            (1, 3, NAA_5),
            (1, 3, &[0x20, 0, 0, 1, 0, 0, 0, 1]),
            (1, 3, NAA_6),
            (1, 2, &[0, 0x80, 0xe5, 0, 0, 0, 0, 1]),
            (3, 8, b"iqn.2026-11.org.example:unit1\0\0\0"),
            (3, 8, b"eui.0080E50000000001\0\0\0\0"),
            (3, 8, b"naa.5001405000000001\0\0\0\0"),
            (1, 10, uuid.as_slice()),
        ] {
            let one = unit(None, &[designator]);
            assert_eq!(evidence(&one, &one), [Evidence::Same; 2], "{designator:?}");
            let unnamed = unit(Some("S1"), &[]);
            assert_eq!(evidence(&one, &unnamed), [Evidence::Different; 2]);
            assert!(one.world_wide_name().is_some());
        }
        let (one, other) = (unit(None, &[(1, 3, NAA_5)]), unit(None, &[(1, 3, NAA_6)]));
        assert_eq!(evidence(&one, &other), [Evidence::Different; 2]);
        // One common name is sufficient; binary and text forms are equal.
        let both = unit(
            None,
            &[(1, 3, NAA_6), (3, 8, b"naa.5001405a00000001\0\0\0\0")],
        );
        assert_eq!(evidence(&one, &both), [Evidence::Same; 2]);
        let renamed = UnitIdentity::new(("OTHER", "Unit 2"), None, &page(&[(1, 3, NAA_5)]));
        assert_eq!(
            evidence(&one, &renamed),
            [Evidence::Same; 2],
            "new firmware"
        );
    }

    #[test]
    fn identifiers_without_a_value_or_of_another_length_are_no_names() {
        for designator in [
            (1, 3, &[0x50, 0, 0, 0, 0, 0, 0, 0][..]),
            (1, 3, &[0x50, 1, 0x40, 0x5a]),
            (1, 3, &[0x40, 0, 0, 1, 0, 0, 0, 1]),
            (1, 2, &[0; 8]),
            (1, 2, &[1; 7]),
            (3, 8, b"unit1\0\0\0"),
            (3, 8, b"eui.\0\0\0\0"),
            (1, 10, &[0x10, 0, 1]),
            (2, 0, b"vendor specific"),
            (1, 1, b"EXAMPLE Unit"),
            // Designators of the port and of the device.
            (1, 0x93, NAA_5),
            (1, 0xa3, NAA_5),
        ] {
            let one = unit(None, &[designator]);
            assert_eq!(evidence(&one, &one), [Evidence::None; 2], "{designator:?}");
        }
        for serial in ["", "   ", "0", "0000", "----"] {
            let one = unit(Some(serial), &[]);
            assert_eq!(evidence(&one, &one), [Evidence::None; 2], "{serial:?}");
        }
        let whole = page(&[(1, 3, NAA_6), (2, 1, b"EXAMPLE Unit"), (1, 2, &[1; 8])]);
        for cut in 0..whole.len() {
            UnitIdentity::new(("EXAMPLE", "Unit"), None, &whole[..cut]);
        }
        UnitIdentity::new(("", ""), None, &[0, 0x83, 0, 4, 1, 3, 0, 255]);
    }

    #[test]
    fn locally_assigned_identifier_proves_nothing_across_targets() {
        // The names that tgt gives the first LUN of its first target on every host.
        let tgt = [
            (
                1,
                3,
                &[0x60, 0, 0, 0, 0, 0, 0, 0, 0x0e, 0, 0, 0, 0, 1, 0, 1][..],
            ),
            (1, 3, NAA_3),
            (2, 1, b"IET     00010001"),
        ];
        let one = UnitIdentity::new(("IET", "VIRTUAL-DISK"), Some("beaf11"), &page(&tgt));
        assert_eq!(evidence(&one, &one), [Evidence::Same, Evidence::None]);
        assert_eq!(one.world_wide_name(), None);
        assert_eq!(
            one.local_name(),
            Some("naa.60000000000000000e00000000010001")
        );
        let other = unit(None, &[(1, 3, &[0x30, 0, 0, 1, 0, 0, 0, 2])]);
        let one = unit(None, &[(1, 3, NAA_3)]);
        assert_eq!(
            evidence(&one, &other),
            [Evidence::Different, Evidence::None]
        );
        let text = unit(None, &[(3, 8, b"naa.3000000100000001\0\0\0\0")]);
        assert_eq!(evidence(&one, &text), [Evidence::Same, Evidence::None]);
    }

    #[test]
    fn random_t10_designator_counts_beside_a_locally_assigned_identifier() {
        // The names of Lunette's disks.
        let t10 = |digits: &str| format!("LUNETTE {digits}").into_bytes();
        let (one, other) = (
            t10(&"6f9619ff8b864011".repeat(2)),
            t10(&"00c04fc964ff4011".repeat(2)),
        );
        let named = |t10: &[u8]| unit(Some("6f9619ff"), &[(1, 3, NAA_3), (2, 1, t10)]);
        let (one, other) = (named(&one), named(&other));
        assert_eq!(evidence(&one, &one), [Evidence::Same; 2]);
        assert_eq!(evidence(&one, &other), [Evidence::Different; 2]);
        assert_ne!(one.world_wide_name(), other.world_wide_name());
    }

    #[test]
    fn serial_numbers_count_for_one_vendor_and_product() {
        let serial = |text| unit(Some(text), &[]);
        assert_eq!(evidence(&serial("S1"), &serial("S1")), [Evidence::Same; 2]);
        for other in [serial("S2"), unit(None, &[])] {
            assert_eq!(evidence(&serial("S1"), &other), [Evidence::Different; 2]);
        }
        let other = UnitIdentity::new(("EXAMPLE", "Other"), Some("S1"), &[]);
        assert_eq!(evidence(&serial("S1"), &other), [Evidence::Different; 2]);
        // The serial number is in the T10 designator, with and without page 80h.
        let t10 = |text: &[u8], serial| unit(serial, &[(2, 1, text)]);
        let one = t10(b"EXAMPLE S1", Some("S1"));
        assert_eq!(evidence(&one, &one), [Evidence::Same; 2]);
        let one = t10(b"EXAMPLE Unit            S1", None);
        assert_eq!(evidence(&one, &one), [Evidence::Same; 2]);
        let other = t10(b"EXAMPLE Unit            S2", None);
        assert_eq!(evidence(&one, &other), [Evidence::Different; 2]);
        assert_eq!(one.world_wide_name(), None);
    }

    #[test]
    fn unnamed_units_are_distinguished_by_vendor_and_product() {
        let unnamed = unit(None, &[]);
        assert_eq!(evidence(&unnamed, &unnamed), [Evidence::None; 2]);
        let other = UnitIdentity::new(("OTHER", "Unit"), None, &[]);
        assert_eq!(evidence(&unnamed, &other), [Evidence::Different; 2]);
    }
}
