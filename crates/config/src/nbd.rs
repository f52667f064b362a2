//! An NBD export: its keys, and the values given for them.

use super::diagnostics::{Mistake, MistakeKind};
use super::export_keys::{DEDICATED, ExportKey, ExportKind, ONE_DISK, WORKERS, name};
use super::key::{Kind, NONE, RunTime};
use super::model::{ExportConfig, Transport};
use super::readers::{ADDRESS, ADDRESS_ALLOWED, SOCKET, SOCKET_ALLOWED};
use super::setting::key;
use super::socket_rights::{SOCKET_GROUP, SOCKET_MODE, SOCKET_OWNER};
use super::value::Reader;

/// Name or description for clients. It is limited, so that lists of exports stay short.
const CLIENT_TEXT: Kind = Kind::ShortText(
    "at most 255 bytes",
    "a text of at most 255 bytes",
    255,
    |c| c != '\0',
);

/// One disk over NBD.
pub static NBD: ExportKind = ExportKind {
    transport: Transport::Nbd,
    word: "nbd",
    table: "nbd",
    form: "DISK:SOCKET or DISK:ADDRESS:PORT, then ,KEY=VALUE as needed: d0:/run/lunette/nbd.sock",
    example: "tables with the header [[nbd]]",
    schema: "Nbd",
    summary: "One disk over NBD, on a Unix socket, a TCP address or both.",
    keys: &[("NBD exports", NBD_KEYS)],
    queues: 0,
    relate,
    elsewhere: |_| None,
};

/// All keys of an NBD export.
pub static NBD_KEYS: &[ExportKey] = &[
    name("the disk's name"),
    ONE_DISK,
    key! { "socket": SOCKET; NONE; RunTime::ENDS_SESSION;
        "Unix socket. Several NBD exports may have the same. An export needs `socket` or `listen`";
        both socket
    },
    key! { "listen": ADDRESS; NONE; RunTime::ENDS_SESSION;
        "TCP address. Several NBD exports may have the same. The port of NBD is 10809"; both nbd.listen
    },
    SOCKET_MODE,
    SOCKET_OWNER,
    SOCKET_GROUP,
    key! { "export_name": CLIENT_TEXT; "the export's name"; RunTime::ENDS_SESSION;
        "name for clients, unique at the socket or address. A client that gives no name gets the only export there"; both nbd.export_name
    },
    key! { "description": CLIENT_TEXT; NONE; RunTime::ENDS_SESSION;
        "description for clients that list the exports"; both nbd.description
    },
    key! { "read_only": Kind::Boolean; "`false`"; RunTime::ENDS_SESSION; "clients may not write through this export"; both nbd.read_only },
    key! { "tls": Kind::Boolean; "`false`"; RunTime::ENDS_SESSION;
        "clients must use TLS ([NBD_OPT_STARTTLS](nbd.md#tls)); needs `tls_certificate`. Equal for all NBD exports of a socket or address"; both nbd.tls
    },
    WORKERS,
    DEDICATED,
];

/// Reports missing listeners, and rights without a socket.
fn relate(reader: &mut Reader<'_, '_>, export: &ExportConfig) {
    let [socket, listen] = ["socket", "listen"].map(|key| reader.location(key));
    let location = &reader.fields.location;
    if socket.is_none() && listen.is_none() {
        let message = "nbd: `socket` or `listen` is missing";
        let mistake = Mistake::new(MistakeKind::Relation, location, message);
        let allowed = format!("`socket`: {SOCKET_ALLOWED}; `listen`: {ADDRESS_ALLOWED}");
        reader.diagnostics.push(mistake.allowed(allowed));
    }
    if socket.is_none() && !export.rights.is_default() {
        let message = "nbd: socket_mode, socket_owner and socket_group need `socket`";
        let mistake = Mistake::new(MistakeKind::Relation, location, message);
        reader.diagnostics.push(mistake);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Diagnostics, Flags, Surroundings, parse, render};
    use super::*;

    fn read(nbd: &[&str]) -> Result<Config, Diagnostics> {
        let flags = Flags {
            disk: vec!["d0=ram:1M".to_owned(), "d1=ram:1M".to_owned()],
            nbd: nbd.iter().map(|one| (*one).to_owned()).collect(),
            ..Flags::default()
        };
        parse(None, &flags, &Surroundings::of_another_process())
    }

    #[test]
    fn flag_has_a_socket_or_an_address() {
        let config = read(&[
            "d0:/run/nbd.sock,ro",
            "d1:127.0.0.1:10809,name=n,export-name=root",
        ]);
        let config = config.unwrap();
        let nbd: Vec<_> = config.exports_over(Transport::Nbd).collect();
        let [first, second] = nbd.as_slice() else {
            panic!("{nbd:?}");
        };
        assert_eq!(first.socket, Some("/run/nbd.sock".into()));
        assert!((first.nbd.listen, first.export_name()) == (None, "d0") && first.nbd.read_only);
        assert_eq!(second.nbd.listen, Some("127.0.0.1:10809".parse().unwrap()));
        assert_eq!((second.name.as_str(), second.export_name()), ("n", "root"));
        let text = render(&config);
        let again = parse(
            Some(("lunette.toml", &text)),
            &Flags::default(),
            &Surroundings::of_another_process(),
        );
        assert_eq!(again.unwrap().exports, config.exports);
    }

    #[test]
    fn address_without_an_ip_address_is_no_name_of_a_socket() {
        for (given, hint) in [
            ("d0:5401", "hint: d0:127.0.0.1:5401, or d0:./5401"),
            (
                "d0:localhost:5401,ro",
                "hint: d0:127.0.0.1:5401, or d0:./localhost:5401",
            ),
            ("d0:127.0.0.1:99999", "is not an IP address with a port"),
            ("d0:::1:5401", "is not an IP address with a port"),
        ] {
            let error = read(&[given]).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
        for given in ["d0:./5401", "d0:n.sock", "d0:[::1]:5401", "d0:/run/n:1"] {
            let error = read(&[given]).err().map(|error| error.to_string());
            assert_eq!(error, None, "{given}");
        }
    }

    #[test]
    fn exports_share_a_listener_under_different_names() {
        assert!(read(&["d0:/run/nbd.sock", "d1:/run/nbd.sock"]).is_ok());
        for (exports, reason) in [
            (
                ["d0:/run/nbd.sock", "d1:/run/nbd.sock,export_name=d0"],
                "already has an export \"d0\"",
            ),
            (
                ["d0:/run/nbd.sock", "d1:/run/nbd.sock,socket_mode=0600"],
                "another mode, owner or group",
            ),
            (
                ["d0:/run/nbd.sock", "d1:/run/nbd.sock,tls"],
                "another value of tls",
            ),
            (["d0:/run/nbd.sock", "d1:"], "socket"),
        ] {
            let error = read(&exports).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn export_needs_a_place() {
        let text =
            "[[disk]]\nname = \"d0\"\nbackend = \"ram\"\nsize = \"1M\"\n[[nbd]]\ndisk = \"d0\"\n";
        let surroundings = Surroundings::of_another_process();
        let read = parse(Some(("t", text)), &Flags::default(), &surroundings);
        let error = read.unwrap_err().to_string();
        assert!(error.contains("`socket` or `listen` is missing"), "{error}");
    }
}
