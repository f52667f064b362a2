//! Parses flags into keys and values with their locations: the short form of a file.
//!
//! Options after the first part are `key=value`, separated by commas; a comma in a path is doubled. `-` and `_` are equivalent in keys, and
//! some keys have short forms.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use nbd::address::ExportAddress;

use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::location::{Located, Location, Source};
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

/// Syntax of a disk in a flag.
pub const DISK_FORM: &str = "NAME=ram:SIZE, NAME=null:SIZE, NAME=delay:TIME,size=SIZE, NAME=file:PATH, NAME=image:PATH, NAME=rbd:POOL/IMAGE, NAME=iscsi://HOST/TARGET/LUN, NAME=nbd://HOST/EXPORT or NAME=scsi_generic:/dev/sgN, then ,KEY=VALUE as needed: \
    d0=ram:512M or d1=file:vm.raw,size=10G,cache=none,ro";
/// Syntax of a vhost-blk export in a flag.
pub const VHOST_BLK_FORM: &str =
    "DISK:SOCKET, then ,name=NAME or ,queues=N as needed: d0:/run/lunette/d0.sock";
/// Syntax of a vhost-scsi controller in a flag.
pub const VHOST_SCSI_FORM: &str = "NAME:SOCKET, then ,queues=N as needed: c0:/run/lunette/c0.sock";
/// Syntax of an NBD export in a flag.
pub const NBD_FORM: &str =
    "DISK:SOCKET or DISK:ADDRESS:PORT, then ,KEY=VALUE as needed: d0:/run/lunette/nbd.sock";
/// Syntax of a logical unit in a flag.
pub const LUN_FORM: &str = "CONTROLLER/TARGET:LUN=DISK, such as c0/0:1=d0";

/// A part of a flag's value: its text with doubled commas reduced, and its location.
pub(super) struct Part<'a> {
    source: &'a Arc<Source>,
    pub(super) text: String,
    span: Range<usize>,
}

impl Part<'_> {
    pub(super) fn location(&self) -> Location {
        Location::new(self.source, self.span.clone())
    }

    pub(super) fn word(&self) -> Located<Raw> {
        Located::new(Raw::Word(self.text.clone()), self.location())
    }

    pub(super) fn field(&self, key: &str) -> Field {
        Field {
            key: Located::new(key.to_owned(), self.location()),
            value: self.word(),
        }
    }

    /// Splits at the first `separator`. Doubled commas occur in paths only, which come last, so that spans before them are exact.
    pub(super) fn split(&self, separator: char) -> Option<(Part<'_>, Part<'_>)> {
        let at = self.text.find(separator)?;
        let (before, after) = (self.text.get(..at)?, self.text.get(at + 1..)?);
        let middle = (self.span.start + at).min(self.span.end);
        let before = Part {
            source: self.source,
            text: before.to_owned(),
            span: self.span.start..middle,
        };
        let after = Part {
            source: self.source,
            text: after.to_owned(),
            span: (middle + 1).min(self.span.end)..self.span.end,
        };
        Some((before, after))
    }
}

/// Splits a value at single commas.
pub(super) fn parts(source: &Arc<Source>) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let mut start = 0;
    let mut text = String::new();
    let mut characters = source.text.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        if character != ',' {
            text.push(character);
        } else if characters.next_if(|(_, next)| *next == ',').is_some() {
            text.push(',');
        } else {
            parts.push(Part {
                source,
                text: std::mem::take(&mut text),
                span: start..at,
            });
            start = at + 1;
        }
    }
    parts.push(Part {
        source,
        text,
        span: start..source.text.len(),
    });
    parts
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
pub(super) fn options<'a>(parts: impl IntoIterator<Item = &'a Part<'a>>) -> Vec<Field> {
    parts
        .into_iter()
        .filter(|part| !part.text.is_empty())
        .map(|part| match part.split('=') {
            Some((key, value)) => Field {
                key: Located::new(canonical(&key.text), key.location()),
                value: value.word(),
            },
            None => Field {
                key: Located::new(canonical(&part.text), part.location()),
                value: Located::new(Raw::Word("on".to_owned()), part.location()),
            },
        })
        .collect()
}

fn malformed(source: &Arc<Source>, form: &str) -> Mistake {
    let message = format!("found {:?}", source.text);
    Mistake::new(MistakeKind::Value, &Location::whole(source), message).allowed(form)
}

/// Returns the fields of a flag that consists of `KEY=VALUE,...`.
pub fn options_flag(source: &Arc<Source>) -> Fields {
    Fields {
        location: Location::whole(source),
        entries: options(&parts(source)),
    }
}

/// Returns a disk's fields from the value of `--disk`.
pub fn disk_flag(source: &Arc<Source>, diagnostics: &mut Diagnostics) -> Option<Fields> {
    let parts = parts(source);
    let (first, rest) = parts.split_first()?;
    let Some((name, device)) = first.split('=') else {
        diagnostics.push(malformed(source, DISK_FORM));
        return None;
    };
    let mut entries = vec![name.field("name")];
    // The scheme of an address names the transport, too: nbd+unix.
    let is_address = |text: &str| ExportAddress::looks_like_one(text) || text.starts_with("nbd:");
    if is_address(&device.text) {
        let value = Located::new(Raw::Word("nbd".to_owned()), device.location());
        entries.push(Field {
            key: Located::new("backend".to_owned(), device.location()),
            value,
        });
        entries.push(device.field("uri"));
        entries.extend(options(rest));
        return Some(Fields {
            location: Location::whole(source),
            entries,
        });
    }
    match device.split(':') {
        None => entries.push(device.field("backend")),
        Some((backend, argument)) => {
            entries.push(backend.field("backend"));
            match backend.text.as_str() {
                "file" | "image" | "scsi_generic" => entries.push(argument.field("path")),
                "ram" | "null" => entries.push(argument.field("size")),
                "delay" => entries.push(argument.field("time")),
                "rbd" => entries.push(argument.field("image")),
                "iscsi" => entries.push(argument.field("unit")),
                // The backend's name is reported; its argument has no meaning.
                _ => {}
            }
        }
    }
    entries.extend(options(rest));
    gather(&mut entries, "option");
    Some(Fields {
        location: Location::whole(source),
        entries,
    })
}

/// Moves all fields with keys that begin with `TABLE.` into one table, as in a file.
pub(super) fn gather(entries: &mut Vec<Field>, table: &str) {
    let mut inside = Vec::new();
    entries.retain_mut(|field| {
        let key = field.key.value.strip_prefix(table);
        let Some(key) = key.and_then(|rest| rest.strip_prefix('.')) else {
            return true;
        };
        let key = Located::new(key.to_owned(), field.key.location.clone());
        inside.push(Field {
            key,
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
    entries.push(Field {
        key: Located::new(table.to_owned(), location.clone()),
        value: Located::new(Raw::Table(fields), location),
    });
}

/// Returns an export's fields from `FIRST:SOCKET[,KEY=VALUE...]`. An NBD export may have an address instead of a socket.
pub fn export_flag(
    source: &Arc<Source>,
    first_key: &str,
    form: &str,
    diagnostics: &mut Diagnostics,
) -> Option<Fields> {
    let parts = parts(source);
    let (first, rest) = parts.split_first()?;
    let Some((name, socket)) = first.split(':') else {
        diagnostics.push(malformed(source, form));
        return None;
    };
    let place = match (form, socket.text.parse::<SocketAddr>()) {
        (NBD_FORM, Ok(_)) => "listen",
        _ => "socket",
    };
    let mut entries = vec![name.field(first_key), socket.field(place)];
    entries.extend(options(rest));
    Some(Fields {
        location: Location::whole(source),
        entries,
    })
}

/// Returns a logical unit's controller and fields from `CONTROLLER/TARGET:LUN=DISK`.
pub fn lun_flag(
    source: &Arc<Source>,
    diagnostics: &mut Diagnostics,
) -> Option<(Located<String>, Fields)> {
    let whole = Part {
        source,
        text: source.text.clone(),
        span: 0..source.text.len(),
    };
    let taken_apart = || {
        let (controller, rest) = whole.split('/')?;
        let (address, disk) = rest.split('=')?;
        let (target, lun) = address.split(':')?;
        let entries = vec![target.field("target"), lun.field("lun"), disk.field("disk")];
        Some((
            Located::new(controller.text.clone(), controller.location()),
            entries,
        ))
    };
    let Some((controller, entries)) = taken_apart() else {
        diagnostics.push(malformed(source, LUN_FORM));
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
