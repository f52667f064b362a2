//! Limits on resources and waiting times for iSCSI initiators: one table for all targets, `[iscsi_limits]`.

use std::ops::RangeInclusive;

use super::diagnostics::Diagnostics;
use super::key::{Key, KeyValue, Kind, RunTime, key_values, read_all};
use super::model::IscsiLimits;
use super::setting::key;
use super::value::{Fields, Reader};

const MIB: u64 = 1 << 20;
const CONNECTIONS: RangeInclusive<u64> = 1..=65_536;
/// TSIH has 16 bits, and 0 means none (RFC 7143, 11.13.4).
const SESSIONS: RangeInclusive<u64> = 1..=65_535;
const PER_SESSION: RangeInclusive<u64> = 1..=16;
const COMMANDS: RangeInclusive<u64> = 1..=1024;
const LOGIN_SECONDS: RangeInclusive<u64> = 1..=3600;
const MEMORY: RangeInclusive<u64> = MIB..=1 << 30;

/// A key of the limits.
pub type LimitKey = Key<IscsiLimits>;

/// Declares a key for a limit.
macro_rules! limit {
    ($name:literal: $kind:expr; $default:expr; $help:expr; $field:ident) => {
        key! { $name: $kind; $default; RunTime::RESTART; $help; both $field }
    };
}

/// All keys of the limits.
pub static ISCSI_LIMIT_KEYS: &[LimitKey] = &[
    limit! { "connections": Kind::Number("", CONNECTIONS); "`1024`"; "maximum number of TCP connections"; connections },
    limit! { "half_open": Kind::Number("", CONNECTIONS); "`128`";
        "maximum number of connections without a login to a target"; half_open
    },
    limit! { "sessions": Kind::Number("", SESSIONS); "`512`"; "maximum number of sessions"; sessions },
    limit! { "connections_per_session": Kind::Number("", PER_SESSION); "`16`"; "MaxConnections"; connections_per_session },
    limit! { "commands_per_session": Kind::Number("", COMMANDS); "`128`";
        "maximum commands in progress per session (command window)"; commands_per_session
    },
    limit! { "login_s": Kind::Number("seconds", LOGIN_SECONDS); "`15`"; "time limit of a login"; login_s },
    limit! { "memory": Kind::Size(", 1048576 to 1073741824", MEMORY); "`\"32M\"`";
        "maximum memory for command data per session"; memory
    },
];

impl IscsiLimits {
    /// Returns all limits, in the order of the keys.
    pub fn values(&self) -> Vec<KeyValue> {
        key_values(ISCSI_LIMIT_KEYS, self)
    }
}

/// Reads a table or a flag; missing keys have their defaults.
pub fn read_iscsi_limits(fields: &Fields, diagnostics: &mut Diagnostics) -> IscsiLimits {
    let mut reader = Reader::new(fields, "iscsi_limits", diagnostics);
    let mut limits = IscsiLimits::default();
    read_all(ISCSI_LIMIT_KEYS, &mut reader, &mut limits);
    reader.finish(|_| None);
    limits
}

#[cfg(test)]
mod tests {
    use crate::{Config, Diagnostics, Flags, IscsiLimits, Surroundings, parse, render};

    fn read(file: &str, flag: Option<&str>) -> Result<Config, Diagnostics> {
        let flags = flag.map_or_else(Flags::default, |text| {
            Flags::default().with("iscsi-limits", text)
        });
        let file = Some(("a.toml", file)).filter(|(_, text)| !text.is_empty());
        parse(file, &flags, &Surroundings::of_this_process())
    }

    #[test]
    fn table_and_flag_are_equivalent_and_round_trip() {
        let expected = IscsiLimits {
            connections: 2000,
            login_s: 3,
            memory: 4 << 20,
            ..IscsiLimits::default()
        };
        let table = "[iscsi_limits]\nconnections = 2000\nlogin_s = 3\nmemory = \"4M\"\n";
        let from_file = read(table, None).unwrap();
        let from_flag = read("", Some("connections=2000,login_s=3,memory=4M")).unwrap();
        assert_eq!(from_file.iscsi_limits, expected);
        assert_eq!(from_flag.iscsi_limits, expected);
        assert_eq!(read(&render(&from_file), None).unwrap(), from_file);
        // The flag replaces the whole table.
        let both = read(table, Some("sessions=7")).unwrap();
        let only_flag = IscsiLimits {
            sessions: 7,
            ..IscsiLimits::default()
        };
        assert_eq!(both.iscsi_limits, only_flag);
        assert_eq!(read("", None).unwrap().iscsi_limits, IscsiLimits::default());
    }

    #[test]
    fn mistakes_name_the_allowed_values() {
        for (text, expected_message) in [
            ("connections=0", "a whole number from 1 to 65536"),
            ("connections_per_session=17", "a whole number from 1 to 16"),
            ("memory=1K", "1M to 1G"),
            ("moons=1", "no key `moons`"),
        ] {
            let mistakes = read("", Some(text)).unwrap_err().to_string();
            assert!(mistakes.contains(expected_message), "{mistakes}");
        }
        let mistakes = read("iscsi_limits = 3\n", None).unwrap_err().to_string();
        assert!(mistakes.contains("[iscsi_limits]"), "{mistakes}");
    }
}
