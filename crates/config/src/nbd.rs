//! An NBD export: its keys, and the values given for them.

use std::path::PathBuf;

use block::ExportPlacement;

use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::export::ExportObject;
use super::export_draft::{ENDS_SESSION, ExportDraft, ExportKind, dedicated, name, workers};
use super::key::{Key, KeyValue, Kind, NONE, REQUIRED, key_values, read_all, schema_of};
use super::model::{ExportConfig, NbdConfig, SocketRights};
use super::readers::{ADDRESS, ADDRESS_ALLOWED, DISK, SOCKET, SOCKET_ALLOWED};
use super::setting::{Setting, key};
use super::socket_rights::{socket_group, socket_mode, socket_owner};
use super::value::{Fields, Reader};

/// Name or description for clients. It is limited, so that lists of exports stay short.
const CLIENT_TEXT: Kind = Kind::ShortText(
    "at most 255 bytes",
    "a text of at most 255 bytes",
    255,
    |c| c != '\0',
);

/// One disk over NBD.
pub static NBD: ExportKind = ExportKind {
    word: "nbd",
    table: "nbd",
    example: "tables with the header [[nbd]]",
    schema: "Nbd",
    summary: "One disk over NBD, on a Unix socket, a TCP address or both.",
    properties: || schema_of(NBD_KEYS),
    read: read_nbd,
};

impl ExportObject for NbdConfig {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        NBD.word
    }

    fn fill(&mut self, name: String, disk: Option<String>, socket: Option<PathBuf>) -> Option<()> {
        self.socket = socket;
        if self.socket.is_none() && self.listen.is_none() {
            return None;
        }
        (self.name, self.disk) = (name, disk?);
        Some(())
    }

    fn values(&self) -> Vec<KeyValue> {
        key_values(NBD_KEYS, self)
    }

    fn placement(&self) -> &ExportPlacement {
        &self.placement
    }

    fn placement_mut(&mut self) -> &mut ExportPlacement {
        &mut self.placement
    }

    fn socket(&self) -> Option<&PathBuf> {
        self.socket.as_ref()
    }

    fn shares_socket(&self) -> bool {
        true
    }

    fn socket_rights(&self) -> Option<&SocketRights> {
        Some(&self.rights)
    }

    fn socket_rights_mut(&mut self) -> Option<&mut SocketRights> {
        Some(&mut self.rights)
    }

    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        self.socket.as_mut()
    }

    fn disk(&self) -> Option<&str> {
        Some(&self.disk)
    }
}

/// A key of an NBD export.
type NbdKey = Key<ExportDraft<NbdConfig>, NbdConfig>;

/// All keys of an NBD export.
pub static NBD_KEYS: &[NbdKey] = &[
    name("the disk's name"),
    key! { "disk": DISK; REQUIRED; ENDS_SESSION; "the disk"; both disk },
    key! { "socket": SOCKET; NONE; ENDS_SESSION;
        "Unix socket. Several NBD exports may have the same. An export needs `socket` or `listen`";
        set socket; get |export| export.socket.value()
    },
    key! { "listen": ADDRESS; NONE; ENDS_SESSION;
        "TCP address. Several NBD exports may have the same. The port of NBD is 10809"; both listen
    },
    socket_mode(),
    socket_owner(),
    socket_group(),
    key! { "export_name": CLIENT_TEXT; "the export's name"; ENDS_SESSION;
        "name for clients, unique at the socket or address. A client that gives no name gets the only export there"; both export_name
    },
    key! { "description": CLIENT_TEXT; NONE; ENDS_SESSION;
        "description for clients that list the exports"; both description
    },
    key! { "read_only": Kind::Boolean; "`false`"; ENDS_SESSION; "clients may not write through this export"; both read_only },
    key! { "tls": Kind::Boolean; "`false`"; ENDS_SESSION;
        "clients must use TLS ([NBD_OPT_STARTTLS](nbd.md#tls)); needs `tls_certificate`. Equal for all NBD exports of a socket or address"; both tls
    },
    workers(),
    dedicated("start a worker for this export alone"),
];

/// Reads an NBD export.
pub fn read_nbd(fields: &Fields, diagnostics: &mut Diagnostics) -> ExportDraft {
    let mut reader = Reader::new(fields, "nbd", diagnostics);
    let mut draft = ExportDraft::<NbdConfig>::default();
    read_all(NBD_KEYS, &mut reader, &mut draft);
    draft.name = draft.name.or(draft.disk.clone());
    draft.placement.relate(&mut reader);
    let has = |key: &str| fields.entries.iter().any(|field| field.key.value == key);
    if !has("socket") && !has("listen") {
        let message = "nbd: `socket` or `listen` is missing".to_owned();
        let mistake = Mistake::new(MistakeKind::Relation, &fields.location, message);
        reader.diagnostics().push(mistake.allowed(format!(
            "`socket`: {SOCKET_ALLOWED}; `listen`: {ADDRESS_ALLOWED}"
        )));
    }
    if !has("socket") && !draft.rights.is_default() {
        let message = "nbd: socket_mode, socket_owner and socket_group need `socket`".to_owned();
        let mistake = Mistake::new(MistakeKind::Relation, &fields.location, message);
        reader.diagnostics().push(mistake);
    }
    reader.finish(|_| None);
    draft.of_any_kind(ExportConfig::Nbd)
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Flags, Surroundings, parse, render};
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
        let nbd: Vec<_> = config.nbd().collect();
        let [first, second] = nbd.as_slice() else {
            panic!("{nbd:?}");
        };
        assert_eq!(first.socket, Some(PathBuf::from("/run/nbd.sock")));
        assert!((first.listen, first.export_name()) == (None, "d0") && first.read_only);
        assert_eq!(second.listen, Some("127.0.0.1:10809".parse().unwrap()));
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
