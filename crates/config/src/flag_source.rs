//! Parses flags into keys and values with their locations: the short form of a file.
//!
//! Options after the first part are `key=value`, separated by commas; a comma in a path is doubled. `-` and `_` are equivalent in keys, and
//! some keys have short forms.

use std::net::SocketAddr;
use std::sync::Arc;

use nbd::address::ExportAddress;

use super::devices::{DEVICE_KINDS, DeviceKind};
use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::export_keys::ExportKind;
use super::location::{Located, Location, Source};
use super::model::Transport;
use super::value::{Field, Fields, Raw};

/// Values of the flags, as given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// `--disk NAME=BACKEND:SIZE|PATH[,KEY=VALUE...]`
    pub disk: Vec<String>,
    /// `--vhost-blk DISK:SOCKET[,KEY=VALUE...]`
    pub vhost_blk: Vec<String>,
    /// `--vhost-scsi NAME:SOCKET[,KEY=VALUE...]`
    pub vhost_scsi: Vec<String>,
    /// `--lun CONTROLLER/TARGET:LUN=DISK`
    pub lun: Vec<String>,
    /// `--iscsi IQN=DISK,...`
    pub iscsi: Vec<String>,
    /// `--nbd DISK:SOCKET|ADDRESS:PORT[,KEY=VALUE...]`
    pub nbd: Vec<String>,
    /// `--portal ADDRESS[:PORT][,GROUP]`
    pub portal: Vec<String>,
    /// `--announce ADDRESS[:PORT][,GROUP]`
    pub announce: Vec<String>,
    /// `--demo-mode none|ro|rw`
    pub demo_mode: Option<String>,
    /// `--chap-user FILE`
    pub chap_user: Option<String>,
    /// The daemon's own flags by name, as listed in [`DAEMON_KEYS`](super::DAEMON_KEYS).
    pub daemon: Vec<(&'static str, String)>,
}

impl Flags {
    /// Adds a flag of the daemon.
    #[must_use]
    pub fn with(mut self, name: &'static str, text: &str) -> Flags {
        self.daemon.push((name, text.to_owned()));
        self
    }
}

/// Returns the syntax of a disk in a flag.
fn disk_form() -> String {
    let forms = DEVICE_KINDS.map(|(_, kind)| format!("NAME={}", kind.flag().1));
    format!(
        "{}, then ,KEY=VALUE as needed: d0=ram:512M or d1=file:vm.raw,size=10G,cache=none,ro",
        forms.join(", ")
    )
}

/// Syntax of a logical unit in a flag.
const LUN_FORM: &str = "CONTROLLER/TARGET:LUN=DISK, such as c0/0:1=d0";

/// A part of a flag's value. Doubled commas are reduced in its text.
pub(super) type Part = Located<String>;

impl Part {
    pub(super) fn word(&self) -> Located<Raw> {
        Located::new(Raw::Word(self.value.clone()), self.location.clone())
    }

    pub(super) fn field(&self, key: &str) -> Field {
        Field::new(key, self.word())
    }

    /// Splits at the first `separator`. Doubled commas occur in paths only, which come last, so that spans before them are exact.
    pub(super) fn split(&self, separator: char) -> Option<(Part, Part)> {
        let (before, after) = self.value.split_once(separator)?;
        let Location { source, span } = &self.location;
        let middle = (span.start + before.len()).min(span.end);
        let before_it = Location::new(source, span.start..middle);
        let after_it = Location::new(source, middle + 1..span.end);
        Some((
            Located::new(before.to_owned(), before_it),
            Located::new(after.to_owned(), after_it),
        ))
    }
}

/// Splits a value at single commas.
pub(super) fn parts(source: &Arc<Source>) -> Vec<Part> {
    let mut commas = source.text.match_indices(',').map(|(at, _)| at).peekable();
    let mut ends = Vec::new();
    while let Some(at) = commas.next() {
        if commas.next_if_eq(&(at + 1)).is_none() {
            ends.push(at);
        }
    }
    ends.push(source.text.len());
    let mut start = 0;
    let part = |end| {
        let text = source.text.get(start..end).unwrap_or_default();
        let location = Location::new(source, start..end);
        start = end + 1;
        Located::new(text.replace(",,", ","), location)
    };
    ends.into_iter().map(part).collect()
}

/// Returns the model's name of an option key.
fn canonical(key: &str) -> String {
    let key = key.replace('-', "_");
    match key.as_str() {
        "ro" | "readonly" => "read_only".to_owned(),
        "num_queues" => "queues".to_owned(),
        _ => key,
    }
}

/// Returns the options after the first part. A key without a value means `on`.
pub(super) fn options<'a>(parts: impl IntoIterator<Item = &'a Part>) -> Vec<Field> {
    let option = |part: &Part| match part.split('=') {
        Some((key, value)) => Field {
            key: Located::new(canonical(&key.value), key.location),
            value: value.word(),
        },
        None => {
            let on = Located::new(Raw::Word("on".to_owned()), part.location.clone());
            Field::new(&canonical(&part.value), on)
        }
    };
    let parts = parts.into_iter().filter(|part| !part.value.is_empty());
    parts.map(option).collect()
}

fn malformed(source: &Arc<Source>, form: &str, diagnostics: &mut Diagnostics) {
    let message = format!("found {:?}", source.text);
    diagnostics.refuse(&Location::whole(source), message, form);
}

/// Returns the fields of a flag that consists of `KEY=VALUE,...`.
pub fn options_flag(source: &Arc<Source>) -> Fields {
    object(source, Vec::new(), &parts(source))
}

/// Returns an object with these entries and options.
fn object(source: &Arc<Source>, mut entries: Vec<Field>, rest: &[Part]) -> Fields {
    entries.extend(options(rest));
    Fields {
        location: Location::whole(source),
        entries,
    }
}

/// Returns a disk's fields from the value of `--disk`.
pub fn disk_flag(source: &Arc<Source>, diagnostics: &mut Diagnostics) -> Option<Fields> {
    let parts = parts(source);
    let (first, rest) = parts.split_first()?;
    let Some((name, device)) = first.split('=') else {
        malformed(source, &disk_form(), diagnostics);
        return None;
    };
    let mut entries = vec![name.field("name")];
    // The scheme of an address names the transport, too: nbd+unix.
    if ExportAddress::looks_like_one(&device.value) || device.value.starts_with("nbd:") {
        let nbd = Raw::Word(DeviceKind::Nbd.word().to_owned());
        let nbd = Located::new(nbd, device.location.clone());
        entries.extend([Field::new("backend", nbd), device.field("uri")]);
    } else if let Some((backend, argument)) = device.split(':') {
        entries.push(backend.field("backend"));
        // An unknown back end is reported; its argument has no meaning.
        let kind = DeviceKind::named(&backend.value);
        entries.extend(kind.map(|kind| argument.field(kind.flag().0)));
    } else if device.value.contains('/') {
        let path = &device.value;
        let mistake = Mistake::new(
            MistakeKind::Value,
            &device.location,
            format!("{path:?} has no back end"),
        );
        let help = format!("did you mean file:{path} or image:{path}?");
        diagnostics.push(mistake.allowed(disk_form()).help(help));
        return None;
    } else {
        entries.push(device.field("backend"));
    }
    let mut disk = object(source, entries, rest);
    gather(&mut disk.entries, "option");
    Some(disk)
}

/// Moves all fields with keys that begin with `TABLE.` into one table, as in a file.
pub(super) fn gather(entries: &mut Vec<Field>, table: &str) {
    let mut inside = Vec::new();
    entries.retain_mut(|field| {
        let key = field.key.value.strip_prefix(table);
        let Some(key) = key.and_then(|rest| rest.strip_prefix('.')) else {
            return true;
        };
        inside.push(Field {
            key: Located::new(key.to_owned(), field.key.location.clone()),
            value: field.value.clone(),
        });
        false
    });
    let Some(location) = inside.first().map(|field| field.key.location.clone()) else {
        return;
    };
    let fields = Fields {
        location: location.clone(),
        entries: inside,
    };
    let value = Located::new(Raw::Table(fields), location);
    entries.push(Field::new(table, value));
}

/// Returns an export's fields from `FIRST:SOCKET[,KEY=VALUE...]`. An NBD export may have an address instead of a socket.
pub fn export_flag(
    source: &Arc<Source>,
    kind: &ExportKind,
    diagnostics: &mut Diagnostics,
) -> Option<Fields> {
    let parts = parts(source);
    let (first, rest) = parts.split_first()?;
    let Some((name, socket)) = first.split(':') else {
        malformed(source, kind.form, diagnostics);
        return None;
    };
    let first_key = match kind.transport {
        Transport::VhostScsi | Transport::Iscsi => "name",
        Transport::VhostBlk | Transport::Nbd => "disk",
    };
    let is_nbd = kind.transport == Transport::Nbd;
    let place = match socket.value.parse::<SocketAddr>() {
        Ok(_) if is_nbd => "listen",
        Err(_) if is_nbd && looks_like_an_address(&socket.value) => {
            let reason = not_an_address(&name.value, &socket.value);
            diagnostics.refuse(&socket.location, reason, kind.form);
            return None;
        }
        _ => "socket",
    };
    let entries = vec![name.field(first_key), socket.field(place)];
    Some(object(source, entries, rest))
}

/// Returns true for a port, and for a host with a port, which are unlikely names of sockets.
fn looks_like_an_address(text: &str) -> bool {
    let port = text.rsplit_once(':').map_or(text, |(_, port)| port);
    !text.contains('/') && !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit())
}

fn not_an_address(disk: &str, text: &str) -> String {
    let port = text.rsplit_once(':').map_or(text, |(_, port)| port);
    format!(
        "{text:?} is not an IP address with a port; hint: {disk}:127.0.0.1:{port}, or {disk}:./{text} for a socket of that name"
    )
}

/// Returns a logical unit's controller and fields from `CONTROLLER/TARGET:LUN=DISK`.
pub fn lun_flag(
    source: &Arc<Source>,
    diagnostics: &mut Diagnostics,
) -> Option<(Located<String>, Fields)> {
    let whole = Located::new(source.text.clone(), Location::whole(source));
    let taken_apart = || {
        let (controller, rest) = whole.split('/')?;
        let (address, disk) = rest.split('=')?;
        let (target, lun) = address.split(':')?;
        let entries = vec![target.field("target"), lun.field("lun"), disk.field("disk")];
        Some((controller, entries))
    };
    let Some((controller, entries)) = taken_apart() else {
        malformed(source, LUN_FORM, diagnostics);
        return None;
    };
    let location = Location::whole(source);
    Some((controller, Fields { location, entries }))
}

/// Returns the value of a flag without parts.
pub fn word_flag(source: &Arc<Source>) -> Located<Raw> {
    Located::new(Raw::Word(source.text.clone()), Location::whole(source))
}

/// Returns the values of a flag that is a list.
pub fn list_flag(source: &Arc<Source>) -> Located<Raw> {
    let items = parts(source).iter().map(Part::word).collect();
    Located::new(Raw::List(items), Location::whole(source))
}
