//! What iSCSI initiators may make the daemon hold or wait for: one table for all targets, `[iscsi_limits]`.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::value::{Fields, Reader};

/// How they are said in a flag.
pub const ISCSI_LIMITS_FORM: &str = "KEY=VALUE,...: connections=1024,half_open=128,sessions=512,\
    connections_per_session=16,commands_per_session=128,login_s=15,memory=32M";

const MIB: u64 = 1 << 20;
const CONNECTIONS: RangeInclusive<u64> = 1..=65_536;
/// TSIH has 16 bits, and 0 is none (RFC 7143, 11.13.4).
const SESSIONS: RangeInclusive<u64> = 1..=65_535;
const PER_SESSION: RangeInclusive<u64> = 1..=16;
const COMMANDS: RangeInclusive<u64> = 1..=1024;
const LOGIN_SECONDS: RangeInclusive<u64> = 1..=3600;
const MEMORY: RangeInclusive<u64> = MIB..=1 << 30;

/// Bounds on what initiators may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IscsiLimits {
    /// TCP connections at a time; more are closed at once.
    pub connections: u64,
    /// Of these, connections that have not logged in; one more ends the oldest of them.
    pub half_open: u64,
    /// Sessions at a time; more are refused at login.
    pub sessions: u64,
    /// Connections of one session: the MaxConnections that is offered.
    pub connections_per_session: u64,
    /// Commands in progress in one session: its window.
    pub commands_per_session: u64,
    /// Seconds to log in.
    pub login_s: u64,
    /// Bytes of command data that the connections of one session may hold together; the next command waits.
    pub memory: u64,
}

impl Default for IscsiLimits {
    fn default() -> Self {
        IscsiLimits {
            connections: 1024,
            half_open: 128,
            sessions: 512,
            connections_per_session: 16,
            commands_per_session: 128,
            login_s: 15,
            memory: 32 * MIB,
        }
    }
}

impl IscsiLimits {
    /// The same, for the server.
    pub fn server(&self) -> iscsi_target::ServerLimits {
        let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let usual = iscsi_target::ServerLimits::default();
        iscsi_target::ServerLimits {
            connections: count(self.connections),
            half_open: count(self.half_open),
            sessions: count(self.sessions),
            connections_per_session: self.connections_per_session.try_into().unwrap_or(u16::MAX),
            login_time: Duration::from_secs(self.login_s),
            data_bytes: count(self.memory),
            protocol: iscsi_target::ProtocolLimits {
                commands_per_session: self.commands_per_session.try_into().unwrap_or(u32::MAX),
                ..usual.protocol.clone()
            },
            ..usual
        }
    }
}

/// What a table or a flag says; what it does not say is as usual.
pub fn read_iscsi_limits(fields: &Fields, diagnostics: &mut Diagnostics) -> IscsiLimits {
    let mut reader = Reader::new(fields, "iscsi_limits", diagnostics);
    let usual = IscsiLimits::default();
    let mut number = |key, range, usual| {
        let said = reader.number(key, range);
        said.map_or(usual, |at| at.value)
    };
    let limits = IscsiLimits {
        connections: number("connections", CONNECTIONS, usual.connections),
        half_open: number("half_open", CONNECTIONS, usual.half_open),
        sessions: number("sessions", SESSIONS, usual.sessions),
        connections_per_session: number(
            "connections_per_session",
            PER_SESSION,
            usual.connections_per_session,
        ),
        commands_per_session: number("commands_per_session", COMMANDS, usual.commands_per_session),
        login_s: number("login_s", LOGIN_SECONDS, usual.login_s),
        memory: usual.memory,
    };
    let memory = reader.size("memory");
    if let Some(at) = &memory
        && !MEMORY.contains(&at.value)
    {
        let message = format!("`memory`: found {} bytes", at.value);
        let mistake = Mistake::new(MistakeKind::Value, &at.place, message);
        reader.diagnostics().push(mistake.allowed("1M to 1G"));
    }
    reader.finish(|_| None);
    IscsiLimits {
        memory: memory.map_or(limits.memory, |at| at.value),
        ..limits
    }
}

#[cfg(test)]
mod tests {
    use crate::{Config, Diagnostics, Flags, IscsiLimits, Surroundings, parse, render};

    fn read(file: &str, flag: Option<&str>) -> Result<Config, Diagnostics> {
        let flags = Flags {
            iscsi_limits: flag.map(str::to_owned),
            ..Flags::default()
        };
        let file = Some(("a.toml", file)).filter(|(_, text)| !text.is_empty());
        parse(file, &flags, &Surroundings::of_this_process())
    }

    #[test]
    fn a_table_and_a_flag_say_the_same_and_read_back() {
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
        // the flag counts, all of it
        let both = read(table, Some("sessions=7")).unwrap();
        let only_flag = IscsiLimits {
            sessions: 7,
            ..IscsiLimits::default()
        };
        assert_eq!(both.iscsi_limits, only_flag);
        let limits = both.iscsi_limits.server();
        assert_eq!((limits.sessions, limits.connections), (7, 1024));
        assert_eq!(read("", None).unwrap().iscsi_limits, IscsiLimits::default());
    }

    #[test]
    fn the_usual_limits_are_those_of_the_server() {
        let (ours, theirs) = (
            IscsiLimits::default().server(),
            iscsi_target::ServerLimits::default(),
        );
        assert_eq!(format!("{ours:?}"), format!("{theirs:?}"));
    }

    #[test]
    fn mistakes_are_told_with_what_is_allowed() {
        for (text, told) in [
            ("connections=0", "a whole number from 1 to 65536"),
            ("connections_per_session=17", "a whole number from 1 to 16"),
            ("memory=1K", "1M to 1G"),
            ("moons=1", "no key `moons`"),
        ] {
            let mistakes = read("", Some(text)).unwrap_err().to_string();
            assert!(mistakes.contains(told), "{mistakes}");
        }
        let mistakes = read("iscsi_limits = 3\n", None).unwrap_err().to_string();
        assert!(mistakes.contains("[iscsi_limits]"), "{mistakes}");
    }
}
