//! Kinds of values of several keys, and readers for lists.

use std::str::FromStr;

use super::diagnostics::{Mistake, MistakeKind};
use super::key::{Key, Kind, allow};
use super::location::Located;
use super::model::{NAME_MAX, SOCKET_PATH_MAX, WORKERS_MAX};
use super::value::{Raw, Reader, number_of};

pub const NAME_ALLOWED: &str =
    "1 to 64 letters, digits, `.`, `_` and `-`, the first a letter or a digit";
pub const ISCSI_NAME_ALLOWED: &str = "an iSCSI name, such as iqn.2026-11.org.example:t0";
pub const SOCKET_ALLOWED: &str = "a path of at most 107 bytes, such as \"/run/lunette/d0.sock\"";
pub const ADDRESS_ALLOWED: &str =
    "an IP address and a port, such as \"127.0.0.1:9752\" or \"[::1]:9752\"";
pub const DISK_ALLOWED: &str = "the name of a disk";
pub const FOLDER_ALLOWED: &str = "the path of a folder, such as /var/lib/lunette";
pub const PEM_ALLOWED: &str = "the path of a file, such as /etc/lunette/tls.pem";
pub const PATHS_ALLOWED: &str = "a list of paths, such as [\"/srv/disks\"]";
pub const NAMES_ALLOWED: &str = "a list of host names, such as [\"storage1.example\"]";
pub const CPUS_ALLOWED: &str = "a list of CPU numbers, such as 2,3 (in a file: [2, 3])";

/// Name of a disk or an export.
pub const NAME: Kind = Kind::Checked("a name", NAME_ALLOWED, |name| {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let starts_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    allow(name.len() <= NAME_MAX && starts_well && name.chars().all(is_allowed))
});

/// iSCSI name of a target or an initiator.
pub const ISCSI_NAME: Kind =
    Kind::Checked(
        "an iSCSI name",
        ISCSI_NAME_ALLOWED,
        |name| match iscsi_name::is_iscsi_name(name) {
            true => Ok(()),
            false => Err(format!("{name:?} is not an iSCSI name")),
        },
    );

/// Reference to a disk.
pub const DISK: Kind = Kind::Text("name of a disk", DISK_ALLOWED);

/// Path of a Unix socket. A name that begins with `@` means an abstract socket to other programs, and is refused.
pub const SOCKET: Kind = Kind::Checked(
    "path of a socket, at most 107 bytes",
    SOCKET_ALLOWED,
    |path| {
        if path.starts_with('@') {
            return Err(format!(
                "abstract sockets such as `{path}` are not supported; hint: give a path, or ./{path} for a file of that name"
            ));
        }
        match path.len() {
            0..=SOCKET_PATH_MAX => Ok(()),
            bytes => Err(format!(
                "a path of {bytes} bytes is too long for a Unix socket"
            )),
        }
    },
);

/// Address to listen on, with its port.
pub const ADDRESS: Kind = Kind::Text("IP address and port", ADDRESS_ALLOWED);

/// File with a secret, which is read later.
pub const SECRET_FILE: Kind = Kind::Text(
    "path of a file of mode 600",
    "the path of a file, such as /etc/lunette/token",
);

/// File with certificates, which is read later.
pub const PEM_FILE: Kind = Kind::Text("path of a PEM file", PEM_ALLOWED);

/// Reads a list of texts that are neither empty nor contain a NUL.
pub fn read_texts<D, T, V: From<String>>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Vec<V> {
    let is_allowed = |text: &&str| !text.is_empty() && !text.contains('\0');
    let text = |raw| Raw::text(raw).filter(is_allowed);
    let texts = reader.list(key.name, &key.kind.allowed(), text);
    let texts = texts.into_iter().map(|at| at.value.to_owned().into());
    texts.collect()
}

/// Reads the CPUs that workers are pinned to.
pub fn read_cpus(
    reader: &mut Reader<'_, '_>,
    key: &'static str,
) -> Option<Located<Vec<Located<usize>>>> {
    let value = reader.raw(key)?;
    let items = match &value.value {
        Raw::List(items) if (1..=WORKERS_MAX).contains(&items.len()) => items,
        _ => {
            reader.refuse(key, value, CPUS_ALLOWED);
            return None;
        }
    };
    let mut cpus = Vec::new();
    for item in items {
        let cpu = number_of(key, item, 0..=u64::from(u16::MAX), reader.diagnostics)?;
        cpus.push(Located::new(cpu.value as usize, cpu.location));
    }
    Some(Located::new(cpus, value.location.clone()))
}

/// Reads a list of texts.
pub fn read_list(
    reader: &mut Reader<'_, '_>,
    key: &'static str,
    allowed: &str,
) -> Vec<Located<String>> {
    reader.list(key, allowed, |raw| raw.text().map(str::to_owned))
}

/// Parses a text, or reports a mistake.
pub fn parsed<T: FromStr<Err = String>>(
    reader: &mut Reader<'_, '_>,
    key: &str,
    text: &Located<String>,
) -> Option<T> {
    let parsed = text.value.parse();
    let report = |reason| {
        let message = format!("`{key}`: {reason}");
        let mistake = Mistake::new(MistakeKind::Value, &text.location, message);
        reader.diagnostics.push(mistake);
    };
    parsed.map_err(report).ok()
}
