//! Address of a logical unit: `iscsi://[USER@]HOST[:PORT]/TARGET/LUN`, the form of other initiators.

use std::fmt;
use std::str::FromStr;

/// The iSCSI port (RFC 7143, 4.2.7.1).
const PORT: u16 = 3260;
/// Flat space addressing has 14 bits (SAM-5, 4.7.7.3).
const LUN_MAX: u16 = 16_383;
/// Address method of flat space addressing, in the first two bytes of a LUN field.
const FLAT_SPACE: u16 = 0x4000;

/// A network portal: host name or address, and TCP port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Portal {
    host: String,
    port: u16,
}

impl Portal {
    /// Returns the host name or address.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the TCP port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for Portal {
    type Err = String;

    /// Parses `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`. Targets may append `,GROUP`.
    fn from_str(text: &str) -> Result<Portal, String> {
        let malformed = || format!("{text:?} is not HOST[:PORT], such as 192.0.2.1:3260 or [::1]");
        let place = text.split(',').next().unwrap_or_default();
        let (host, port) = match place.strip_prefix('[') {
            Some(rest) => {
                let (host, rest) = rest.split_once(']').ok_or_else(malformed)?;
                (
                    host,
                    rest.strip_prefix(':')
                        .or_else(|| rest.is_empty().then_some("")),
                )
            }
            None => match place.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (place, Some("")),
            },
        };
        let port = match port.ok_or_else(malformed)? {
            "" if !place.ends_with(':') => PORT,
            port => port.parse().map_err(|_| malformed())?,
        };
        if host.is_empty() || host.contains(['/', '@', ' ']) {
            return Err(malformed());
        }
        Ok(Portal {
            host: host.to_owned(),
            port,
        })
    }
}

impl fmt::Display for Portal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// Error of an address with a secret. It must not contain the address.
pub const SECRET_REFUSED: &str =
    "a secret in the address is not accepted; use --chap-file (chap_file for a disk)";

/// Returns true if the text contains `iscsi://USER%SECRET@`, the form of other initiators. Such a text must not be printed.
pub fn has_secret(text: &str) -> bool {
    let mut addresses = text.split("iscsi://").skip(1);
    addresses.any(|rest| {
        let user = rest.rsplit_once('@').map(|(user, _)| user);
        user.is_some_and(|user| user.contains('%'))
    })
}

/// A logical unit of a target at a portal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitAddress {
    /// CHAP user.
    pub user: Option<String>,
    /// The portal.
    pub portal: Portal,
    /// The target's iSCSI name.
    pub target: String,
    /// The logical unit number.
    pub lun: Lun,
}

/// A logical unit number in an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lun {
    /// A number, encoded in the format that the target reports.
    Number(u16),
    /// The eight bytes of the LUN field, for units with a format without a number.
    Field(u64),
}

impl Lun {
    /// Number of hexadecimal digits of a LUN field.
    const FIELD_DIGITS: usize = 16;

    /// Returns the field of a number by SAM-5, 4.7.7.2 and 4.7.7.3: peripheral device addressing below 256, flat space
    /// addressing above.
    pub fn standard_field(self) -> u64 {
        match self {
            Lun::Number(number) if number < 256 => u64::from(number) << 48,
            Lun::Number(number) => u64::from(FLAT_SPACE | number) << 48,
            Lun::Field(field) => field,
        }
    }

    /// Returns the number in a single-level field with flat space addressing or peripheral device addressing. LIO uses the
    /// latter for numbers of up to 14 bits.
    pub fn number_of(field: u64) -> Option<u16> {
        let first = (field >> 48) as u16;
        let is_numbered = matches!(first & 0xc000, 0 | FLAT_SPACE);
        (field << 16 == 0 && is_numbered).then_some(first & LUN_MAX)
    }

    /// Selects the field of this unit from the fields that a target reports; the default is the standard field.
    pub fn field_among(self, reported: &[u64]) -> u64 {
        let standard = self.standard_field();
        let Lun::Number(number) = self else {
            return standard;
        };
        let mut others = reported.iter().copied();
        match reported.contains(&standard) {
            true => standard,
            false => others
                .find(|field| Lun::number_of(*field) == Some(number))
                .unwrap_or(standard),
        }
    }
}

impl fmt::Display for Lun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lun::Number(number) => number.fmt(f),
            Lun::Field(field) => f.pad(&format!("{field:#018x}")),
        }
    }
}

impl FromStr for Lun {
    type Err = ();

    /// Parses a decimal number, or `0x` and the 16 hexadecimal digits of a LUN field.
    fn from_str(text: &str) -> Result<Lun, ()> {
        if let Some(digits) = text.strip_prefix("0x") {
            let is_field = digits.len() == Lun::FIELD_DIGITS
                && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            let field = u64::from_str_radix(digits, 16).map_err(drop)?;
            return is_field.then_some(Lun::Field(field)).ok_or(());
        }
        let number = text.parse().map_err(drop)?;
        (number <= LUN_MAX).then_some(Lun::Number(number)).ok_or(())
    }
}

impl UnitAddress {
    /// Parses another path to the same unit: `HOST[:PORT]` with this address's target and LUN, or a whole address with the
    /// same user.
    ///
    /// # Errors
    /// The problem with the text.
    pub fn path(&self, text: &str) -> Result<UnitAddress, String> {
        if !UnitAddress::looks_like_one(text) {
            let portal = text.parse()?;
            return Ok(UnitAddress {
                portal,
                ..self.clone()
            });
        }
        let mut path: UnitAddress = text.parse()?;
        if path.user.is_some() && path.user != self.user {
            return Err(format!("{text:?} names another CHAP user than the unit"));
        }
        path.user.clone_from(&self.user);
        Ok(path)
    }

    /// Syntax of an address.
    pub const FORM: &'static str = "iscsi://[USER@]HOST[:PORT]/TARGET/LUN";

    /// Returns true if the text has the prefix of an address.
    pub fn looks_like_one(text: &str) -> bool {
        text.starts_with("iscsi://")
    }

    /// Parses a target without a logical unit: `iscsi://[USER@]HOST[:PORT]/TARGET`.
    ///
    /// # Errors
    /// The problem with the text.
    pub fn target(text: &str) -> Result<(Option<String>, Portal, String), String> {
        if has_secret(text) {
            return Err(SECRET_REFUSED.to_owned());
        }
        let malformed = || format!("{text:?} is not {}", UnitAddress::FORM);
        let rest = text.strip_prefix("iscsi://").ok_or_else(malformed)?;
        let (place, target) = rest.split_once('/').ok_or_else(malformed)?;
        let (user, portal) = match place.rsplit_once('@') {
            Some((user, portal)) => (Some(user.to_owned()), portal),
            None => (None, place),
        };
        if target.is_empty() || target.contains('/') || user.as_deref() == Some("") {
            return Err(malformed());
        }
        Ok((user, portal.parse()?, target.to_owned()))
    }

    /// Returns true if both addresses name the same target. Target names are unique worldwide (RFC 7143, 4.2.7.1).
    pub fn has_same_target(&self, other: &UnitAddress) -> bool {
        self.target.eq_ignore_ascii_case(&other.target)
    }
}

impl fmt::Display for UnitAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("iscsi://")?;
        if let Some(user) = &self.user {
            write!(f, "{user}@")?;
        }
        write!(f, "{}/{}/{}", self.portal, self.target, self.lun)
    }
}

impl FromStr for UnitAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<UnitAddress, String> {
        if has_secret(text) {
            return Err(SECRET_REFUSED.to_owned());
        }
        let malformed = || format!("{text:?} is not {}", UnitAddress::FORM);
        let (whole, lun) = text.rsplit_once('/').ok_or_else(malformed)?;
        let (user, portal, target) = UnitAddress::target(whole).map_err(|_| malformed())?;
        let lun = lun.parse().ok();
        Ok(UnitAddress {
            user,
            portal,
            target,
            lun: lun.ok_or_else(malformed)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_of_an_address_is_refused_and_not_repeated() {
        for text in [
            "iscsi://alice%pa55word@192.0.2.1/iqn.2026-11.org.example:t/0",
            "iscsi://alice%pa55/wo@rd@192.0.2.1/iqn.2026-11.org.example:t/0",
            "iscsi://alice%pa55word@192.0.2.1/x",
            "iscsi://alice%pa55word@",
        ] {
            assert!(has_secret(&format!("d=x,paths={text}")), "{text}");
            let whole = text.parse::<UnitAddress>().unwrap_err();
            let target = UnitAddress::target(text).unwrap_err();
            assert!(
                !whole.contains("pa55") && !target.contains("pa55"),
                "{whole} {target}"
            );
            assert!(whole.contains("--chap-file"), "{whole}");
        }
        for text in [
            "iscsi://iqn.1993-08.org.debian:01:a@[fe80::1%25eth0]/iqn.2026-11.org.example:t/0",
            "/vm/a%b@c",
        ] {
            assert!(!has_secret(text), "{text}");
        }
    }

    #[test]
    fn portals_are_names_and_addresses_with_or_without_a_port() {
        for (text, shown) in [
            ("san", "san:3260"),
            ("san.example.org:77", "san.example.org:77"),
            ("192.0.2.1:3260,1", "192.0.2.1:3260"),
            ("[2001:db8::1]", "[2001:db8::1]:3260"),
            ("[::1]:3261,2", "[::1]:3261"),
        ] {
            assert_eq!(text.parse::<Portal>().unwrap().to_string(), shown);
        }
        for text in [
            "",
            ":3260",
            "san:",
            "san:x",
            "san:70000",
            "[::1",
            "[::1]x",
            "::1",
            "a/b",
        ] {
            assert!(text.parse::<Portal>().is_err(), "{text}");
        }
    }

    #[test]
    fn units_are_written_as_other_initiators_write_them() {
        let unit: UnitAddress = "iscsi://ann@[::1]:3261/iqn.2026-11.org.example:t0/300"
            .parse()
            .unwrap();
        assert_eq!(unit.user.as_deref(), Some("ann"));
        assert_eq!(unit.portal.to_string(), "[::1]:3261");
        assert_eq!(unit.target, "iqn.2026-11.org.example:t0");
        assert_eq!(
            unit.lun.standard_field().to_be_bytes(),
            [0x41, 0x2c, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(
            Lun::Number(3).standard_field().to_be_bytes(),
            [0, 3, 0, 0, 0, 0, 0, 0]
        );
        for text in [
            "san/t/0",
            "iscsi://san",
            "iscsi://san/t",
            "iscsi://san/t/x",
            "iscsi://san/t/16384",
            "iscsi://san/t/0x",
            "iscsi://san/t/0x012c",
            "iscsi://san/t/0x012c00000000000000",
            "iscsi://san/t/0x+12c000000000000",
            "iscsi://san//0",
            "iscsi://@san/t/0",
            "iscsi:///t/0",
        ] {
            assert!(text.parse::<UnitAddress>().is_err(), "{text}");
        }
        let text = "iscsi://san:3260/t/0x812c000000000000";
        let exact: UnitAddress = text.parse().unwrap();
        assert_eq!(exact.lun, Lun::Field(0x812c << 48));
        assert_eq!(exact.to_string(), text);
    }

    #[test]
    fn luns_are_sent_back_in_the_format_in_which_they_are_reported() {
        let field = |bytes: [u8; 2]| u64::from(u16::from_be_bytes(bytes)) << 48;
        for (reported, lun, expected) in [
            // LIO: 300 without flat space addressing.
            (vec![[0, 0], [0x01, 0x2c]], 300, [0x01, 0x2c]),
            (vec![[0x41, 0x2c]], 300, [0x41, 0x2c]),
            (vec![[0x01, 0x2c], [0x41, 0x2c]], 300, [0x41, 0x2c]),
            // Flat space addressing below 256.
            (vec![[0x40, 0x05]], 5, [0x40, 0x05]),
            // Units that are not reported.
            (vec![[0, 1], [0x80, 0x05]], 5, [0, 5]),
            (vec![], 300, [0x41, 0x2c]),
        ] {
            let reported: Vec<u64> = reported.into_iter().map(field).collect();
            let found = Lun::Number(lun).field_among(&reported);
            assert_eq!(found, field(expected), "{lun} {reported:x?}");
        }
    }
}
