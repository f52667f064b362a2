//! Readers for values of several keys: names, paths, addresses, polling limits.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use block::PollLimit;

use super::diagnostics::{Mistake, MistakeKind};
use super::location::Located;
use super::model::{NAME_MAX, POLL_MICROS_MAX, SOCKET_PATH_MAX, WORKERS_MAX};
use super::value::{Raw, Reader, number_of, text_of};

pub const NAME_ALLOWED: &str =
    "1 to 64 letters, digits, `.`, `_` and `-`, the first a letter or a digit";
pub const ISCSI_NAME_ALLOWED: &str = "an iSCSI name, such as iqn.2026-11.org.example:t0";
pub const DISK_ALLOWED: &str = "the name of a disk";
pub const SOCKET_ALLOWED: &str = "a path of at most 107 bytes, such as \"/run/lunette/d0.sock\"";
pub const ADDRESS_ALLOWED: &str =
    "an IP address and a port, such as \"127.0.0.1:9752\" or \"[::1]:9752\"";
pub const FILE_ALLOWED: &str = "the path of a file, such as /etc/lunette/token";
pub const PEM_ALLOWED: &str = "the path of a file, such as /etc/lunette/tls.pem";
pub const FOLDER_ALLOWED: &str = "the path of a folder, such as /var/lib/lunette";
pub const PATHS_ALLOWED: &str = "a list of paths, such as [\"/srv/disks\"]";
/// Allowed values of a list of host names.
pub const NAMES_ALLOWED: &str = "a list of host names, such as [\"storage1.example\"]";
pub const POLL_ALLOWED: &str = "0 (never poll), microseconds up to 1000000, or \"always\"";
pub const CPUS_ALLOWED: &str = "a list of CPU numbers, such as 2,3 (in a file: [2, 3])";

/// Reads a name. An invalid one is kept, so that references to it are not reported too.
pub fn read_name(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<Located<String>> {
    let name = reader.text(key, NAME_ALLOWED)?;
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let first = name.value.chars().next().unwrap_or('-');
    if name.value.len() > NAME_MAX
        || !first.is_ascii_alphanumeric()
        || !name.value.chars().all(allowed)
    {
        let message = format!("`{key}`: found {:?}", name.value);
        let mistake = Mistake::new(MistakeKind::Value, &name.location, message);
        reader.diagnostics().push(mistake.allowed(NAME_ALLOWED));
    }
    Some(name)
}

/// Reads the path of a socket. A name that begins with `@` means an abstract socket to other programs, and is refused.
pub fn read_socket(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<Located<PathBuf>> {
    let path = reader.text(key, SOCKET_ALLOWED)?;
    if path.value.starts_with('@') {
        let message = format!(
            "`{key}`: abstract sockets such as `{0}` are not supported; hint: give a path, or ./{0} for a file of that name",
            path.value
        );
        let mistake = Mistake::new(MistakeKind::Value, &path.location, message);
        reader.diagnostics().push(mistake.allowed(SOCKET_ALLOWED));
        return None;
    }
    if path.value.len() > SOCKET_PATH_MAX || path.value.contains('\0') {
        let message = format!(
            "`{key}`: a path of {} bytes is too long for a Unix socket",
            path.value.len()
        );
        let mistake = Mistake::new(MistakeKind::Value, &path.location, message);
        reader.diagnostics().push(mistake.allowed(SOCKET_ALLOWED));
        return None;
    }
    Some(Located::new(PathBuf::from(path.value), path.location))
}

/// Reads a folder, which need not exist yet.
pub fn read_folder(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<PathBuf> {
    read_path(reader, key, "folder", FOLDER_ALLOWED).map(|path| path.value)
}

/// Reads the path of a file with a secret, which is read later.
pub fn read_file_name(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<PathBuf> {
    read_path(reader, key, "file", FILE_ALLOWED).map(|path| path.value)
}

/// Reads the path of a file with certificates or a key, which is read later.
pub fn read_pem_name(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<Located<PathBuf>> {
    read_path(reader, key, "file", PEM_ALLOWED)
}

fn read_path(
    reader: &mut Reader<'_, '_>,
    key: &'static str,
    kind: &str,
    allowed: &str,
) -> Option<Located<PathBuf>> {
    let path = reader.text(key, allowed)?;
    if path.value.contains('\0') {
        let message = format!("`{key}`: not the path of a {kind}");
        let mistake = Mistake::new(MistakeKind::Value, &path.location, message);
        reader.diagnostics().push(mistake.allowed(allowed));
        return None;
    }
    Some(Located::new(PathBuf::from(path.value), path.location))
}

/// Reads a list of texts that are neither empty nor contain a NUL; a flag has one of them. `allowed` describes the list in errors.
pub fn read_texts(
    reader: &mut Reader<'_, '_>,
    key: &'static str,
    allowed: &'static str,
) -> Option<Vec<String>> {
    let value = reader.raw(key)?;
    let items = match &value.value {
        Raw::List(items) => items.as_slice(),
        Raw::Word(_) => std::slice::from_ref(value),
        _ => {
            reader.refuse(key, value, allowed);
            return None;
        }
    };
    let mut texts = Vec::new();
    for item in items {
        match &item.value {
            Raw::Text(text) | Raw::Word(text) if !text.is_empty() && !text.contains('\0') => {
                texts.push(text.clone());
            }
            _ => reader.refuse(key, item, allowed),
        }
    }
    Some(texts)
}

/// Reads an address to listen on, with its port.
pub fn read_address(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<Located<SocketAddr>> {
    let text = reader.text(key, ADDRESS_ALLOWED)?;
    match text.value.parse() {
        Ok(address) => Some(Located::new(address, text.location)),
        Err(_) => {
            let message = format!("`{key}`: {:?} is not an address with a port", text.value);
            let mistake = Mistake::new(MistakeKind::Value, &text.location, message);
            reader.diagnostics().push(mistake.allowed(ADDRESS_ALLOWED));
            None
        }
    }
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
        let cpu = number_of(key, item, 0..=u64::from(u16::MAX), reader.diagnostics())?;
        cpus.push(Located::new(cpu.value as usize, cpu.location));
    }
    Some(Located::new(cpus, value.location.clone()))
}

/// Reads a polling limit.
pub fn read_poll(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<Located<PollLimit>> {
    let value = reader.raw(key)?;
    let at = |limit| Some(Located::new(limit, value.location.clone()));
    let micros = match &value.value {
        Raw::Text(text) | Raw::Word(text) if text == "always" => return at(PollLimit::Always),
        Raw::Word(text) => text.parse().ok(),
        Raw::Integer(number) => u32::try_from(*number).ok(),
        _ => None,
    };
    match micros {
        Some(0) => at(PollLimit::Never),
        Some(micros) if micros <= POLL_MICROS_MAX => at(PollLimit::Micros(micros)),
        _ => {
            reader.refuse(key, value, POLL_ALLOWED);
            None
        }
    }
}

/// Reads a list of texts.
pub fn read_list(
    reader: &mut Reader<'_, '_>,
    key: &'static str,
    allowed: &str,
) -> Vec<Located<String>> {
    let Some(value) = reader.raw(key) else {
        return Vec::new();
    };
    let Raw::List(items) = &value.value else {
        reader.refuse(key, value, allowed);
        return Vec::new();
    };
    let text = |item| text_of(key, item, allowed, reader.diagnostics());
    items.iter().filter_map(text).collect()
}

/// Parses a text, or reports a mistake.
pub fn parsed<T: FromStr<Err = String>>(
    reader: &mut Reader<'_, '_>,
    key: &str,
    text: &Located<String>,
) -> Option<T> {
    match text.value.parse() {
        Ok(value) => Some(value),
        Err(reason) => {
            let mistake = Mistake::new(
                MistakeKind::Value,
                &text.location,
                format!("`{key}`: {reason}"),
            );
            reader.diagnostics().push(mistake);
            None
        }
    }
}
