//! Objects from their keys and values: each on its own, before they are held against each other.
//!
//! A draft keeps what could be read, so that one bad value does not make every reference to it a mistake.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::Diagnostics;
use super::diagnostics::{Mistake, MistakeKind};
use super::disk::{DiskDraft, read_disk};
use super::iscsi::{IscsiDraft, read_iscsi};
use super::iscsi_limits::{IscsiLimits, read_iscsi_limits};
use super::model::{
    AccessConfig, BLK_QUEUES_MAX, LUNS_MAX, LunConfig, NAME_MAX, POLL_MICROS_MAX, PollLimit,
    SCSI_QUEUES_MAX, SOCKET_PATH_MAX, TARGETS_MAX, WORKERS_MAX,
};
use super::place::At;
use super::placement::{PlacementDraft, read_placement};
use super::value::{Fields, Raw, Reader, number_of, wrong};

pub const NAME_ALLOWED: &str =
    "1 to 64 letters, digits, `.`, `_` and `-`, the first a letter or a digit";
const SOCKET_ALLOWED: &str = "a path of at most 107 bytes, such as \"/run/lunette/d0.sock\"";
const GROUP_ALLOWED: &str = "the name of a group of this machine";
const ADDRESS_ALLOWED: &str =
    "an IP address and a port, such as \"127.0.0.1:9752\" or \"[::1]:9752\"";
const LUN_EXAMPLE: &str = "tables such as { target = 0, lun = 0, disk = \"d0\" }";
/// What the bounds on polling are called: for guests' rings, for connections, and for disks.
pub const POLL_KEY: &str = "poll_us";
pub const NETWORK_POLL_KEY: &str = "network_poll_us";
pub const DISK_POLL_KEY: &str = "disk_poll_us";
const POLL_ALLOWED: &str = "0 (never poll), microseconds up to 1000000, or \"always\"";
const CPUS_ALLOWED: &str = "a list of CPU numbers, such as 2,3 (in a file: [2, 3])";

/// What was said about workers.
#[derive(Default)]
pub struct WorkersDraft {
    pub count: Option<At<usize>>,
    pub cpus: Option<At<Vec<At<usize>>>>,
}

/// What was said about a vhost-blk export.
pub struct VhostBlkDraft {
    pub name: Option<At<String>>,
    pub disk: Option<At<String>>,
    pub socket: Option<At<PathBuf>>,
    pub queues: u16,
    pub placement: PlacementDraft,
}

/// What was said about a vhost-scsi controller.
pub struct VhostScsiDraft {
    pub name: Option<At<String>>,
    pub socket: Option<At<PathBuf>>,
    pub queues: u16,
    pub placement: PlacementDraft,
    pub luns: Vec<LunDraft>,
}

/// What was said about a logical unit.
pub struct LunDraft {
    pub target: Option<At<u8>>,
    pub lun: Option<At<u16>>,
    pub disk: Option<At<String>>,
}

impl LunDraft {
    /// The logical unit, if nothing is missing.
    pub fn complete(&self) -> Option<LunConfig> {
        Some(LunConfig {
            target: self.target.as_ref()?.value,
            lun: self.lun.as_ref()?.value,
            disk: self.disk.as_ref()?.value.clone(),
        })
    }
}

/// All that a file said.
#[derive(Default)]
pub struct Draft {
    pub control: Option<At<PathBuf>>,
    pub access: AccessConfig,
    pub api_listen: Option<At<SocketAddr>>,
    pub token_file: Option<At<PathBuf>>,
    pub readers_token_file: Option<At<PathBuf>>,
    /// Where state is kept.
    pub state: Option<At<PathBuf>>,
    /// Where metrics are served over TCP.
    pub metrics_listen: Option<At<SocketAddr>>,
    pub sandbox: Option<At<sandbox::Mode>>,
    pub sandbox_paths: Option<At<Vec<PathBuf>>>,
    pub workers: WorkersDraft,
    pub poll: Option<At<PollLimit>>,
    pub network_poll: Option<At<PollLimit>>,
    pub disk_poll: Option<At<PollLimit>>,
    pub disks: Vec<DiskDraft>,
    pub vhost_blk: Vec<VhostBlkDraft>,
    pub vhost_scsi: Vec<VhostScsiDraft>,
    pub iscsi: Vec<IscsiDraft>,
    /// The file with the CHAP users of discovery sessions.
    pub discovery_auth: Option<At<PathBuf>>,
    pub iscsi_limits: Option<IscsiLimits>,
    /// Logical units from flags, with their controller's name.
    pub luns: Vec<(At<String>, LunDraft)>,
    /// Those of them whose controller there is not; their disks are looked up all the same.
    pub astray: Vec<LunDraft>,
}

/// A file's top-level table.
pub fn read_file(fields: &Fields, diagnostics: &mut Diagnostics) -> Draft {
    let mut reader = Reader::new(fields, "configuration", diagnostics);
    let control = read_socket(&mut reader, "control");
    let access = AccessConfig {
        control_group: reader
            .text("control_group", GROUP_ALLOWED)
            .map(|at| at.value),
        control_readers: reader
            .text("control_readers", GROUP_ALLOWED)
            .map(|at| at.value),
        ..AccessConfig::default()
    };
    let api_listen = read_address(&mut reader, "api_listen");
    let token_file = read_file_name(&mut reader, "token_file");
    let readers_token_file = read_file_name(&mut reader, "readers_token_file");
    let state = read_folder(&mut reader, "state");
    let metrics_listen = read_address(&mut reader, "metrics_listen");
    let sandbox = read_sandbox(&mut reader, "sandbox");
    let sandbox_paths = read_paths(&mut reader, "sandbox_paths");
    let discovery_auth = read_file_name(&mut reader, "discovery_auth");
    let count = reader.raw("workers");
    let cpus = reader.raw("cpus");
    let poll = reader.raw(POLL_KEY);
    let network_poll = reader.raw(NETWORK_POLL_KEY);
    let disk_poll = reader.raw(DISK_POLL_KEY);
    let disks = reader.objects("disk", "tables, each headed [[disk]]");
    let vhost_blk = reader.objects("vhost_blk", "tables, each headed [[vhost_blk]]");
    let vhost_scsi = reader.objects("vhost_scsi", "tables, each headed [[vhost_scsi]]");
    let iscsi = reader.objects("iscsi", "tables, each headed [[iscsi]]");
    let iscsi_limits = reader.table("iscsi_limits", "a table, headed [iscsi_limits]");
    reader.finish(|key| match key {
        "disks" => Some("each disk has a table of its own, headed [[disk]]".to_owned()),
        _ => None,
    });
    Draft {
        control,
        access,
        api_listen,
        token_file,
        readers_token_file,
        state,
        metrics_listen,
        sandbox,
        sandbox_paths,
        workers: WorkersDraft {
            count: count.and_then(|value| read_workers(value, diagnostics)),
            cpus: cpus.and_then(|value| read_cpus(value, diagnostics)),
        },
        poll: poll.and_then(|value| read_poll(POLL_KEY, value, diagnostics)),
        network_poll: network_poll
            .and_then(|value| read_poll(NETWORK_POLL_KEY, value, diagnostics)),
        disk_poll: disk_poll.and_then(|value| read_poll(DISK_POLL_KEY, value, diagnostics)),
        disks: disks.iter().map(|f| read_disk(f, diagnostics)).collect(),
        vhost_blk: vhost_blk
            .iter()
            .map(|fields| read_vhost_blk(fields, diagnostics))
            .collect(),
        vhost_scsi: vhost_scsi
            .iter()
            .map(|fields| read_vhost_scsi(fields, diagnostics))
            .collect(),
        iscsi: iscsi.iter().map(|f| read_iscsi(f, diagnostics)).collect(),
        discovery_auth,
        iscsi_limits: iscsi_limits.map(|fields| read_iscsi_limits(fields, diagnostics)),
        luns: Vec::new(),
        astray: Vec::new(),
    }
}

/// What the sandbox does.
pub fn read_sandbox(reader: &mut Reader, key: &'static str) -> Option<At<sandbox::Mode>> {
    reader.choice(key, &sandbox::Mode::WORDS)
}

/// Paths, as a list of texts; in a flag one path.
pub fn read_paths(reader: &mut Reader, key: &'static str) -> Option<At<Vec<PathBuf>>> {
    const ALLOWED: &str = "a list of paths, such as [\"/srv/disks\"]";
    let value = reader.raw(key)?;
    let items = match &value.value {
        Raw::List(items) => items.as_slice(),
        Raw::Word(_) => std::slice::from_ref(value),
        _ => {
            reader
                .diagnostics()
                .push(wrong(key, value).allowed(ALLOWED));
            return None;
        }
    };
    let mut paths = Vec::new();
    for item in items {
        match &item.value {
            Raw::Text(text) | Raw::Word(text) if !text.is_empty() && !text.contains('\0') => {
                paths.push(PathBuf::from(text));
            }
            _ => reader.diagnostics().push(wrong(key, item).allowed(ALLOWED)),
        }
    }
    Some(At::new(paths, value.place.clone()))
}

/// An address to listen on, with its port.
pub fn read_address(reader: &mut Reader, key: &'static str) -> Option<At<SocketAddr>> {
    let text = reader.text(key, ADDRESS_ALLOWED)?;
    match text.value.parse() {
        Ok(address) => Some(At::new(address, text.place)),
        Err(_) => {
            let message = format!("`{key}`: {:?} is no address with a port", text.value);
            let mistake = Mistake::new(MistakeKind::Value, &text.place, message);
            reader.diagnostics().push(mistake.allowed(ADDRESS_ALLOWED));
            None
        }
    }
}

/// How many workers.
pub fn read_workers(value: &At<Raw>, diagnostics: &mut Diagnostics) -> Option<At<usize>> {
    let count = number_of("workers", value, 1..=WORKERS_MAX as u64, diagnostics)?;
    Some(At::new(count.value as usize, count.place))
}

/// The CPUs that workers are pinned to.
pub fn read_cpus(value: &At<Raw>, diagnostics: &mut Diagnostics) -> Option<At<Vec<At<usize>>>> {
    let items = match &value.value {
        Raw::List(items) if (1..=WORKERS_MAX).contains(&items.len()) => items,
        _ => {
            diagnostics.push(wrong("cpus", value).allowed(CPUS_ALLOWED));
            return None;
        }
    };
    let mut cpus = Vec::new();
    for item in items {
        let cpu = number_of("cpus", item, 0..=u64::from(u16::MAX), diagnostics)?;
        cpus.push(At::new(cpu.value as usize, cpu.place));
    }
    Some(At::new(cpus, value.place.clone()))
}

/// A bound on polling.
pub fn read_poll(
    key: &'static str,
    value: &At<Raw>,
    diagnostics: &mut Diagnostics,
) -> Option<At<PollLimit>> {
    let micros = match &value.value {
        Raw::Text(text) | Raw::Word(text) if text == "always" => {
            return Some(At::new(PollLimit::Always, value.place.clone()));
        }
        Raw::Word(text) => text.parse().ok(),
        Raw::Integer(number) => u32::try_from(*number).ok(),
        _ => None,
    };
    match micros {
        Some(0) => Some(At::new(PollLimit::Never, value.place.clone())),
        Some(micros) if micros <= POLL_MICROS_MAX => {
            Some(At::new(PollLimit::Micros(micros), value.place.clone()))
        }
        _ => {
            diagnostics.push(wrong(key, value).allowed(POLL_ALLOWED));
            None
        }
    }
}

/// The path of a socket.
pub fn read_socket(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<At<PathBuf>> {
    let path = reader.text(key, SOCKET_ALLOWED)?;
    if path.value.len() > SOCKET_PATH_MAX || path.value.contains('\0') {
        let message = format!(
            "`{key}`: a path of {} bytes is too long for a Unix socket",
            path.value.len()
        );
        let mistake = Mistake::new(MistakeKind::Value, &path.place, message);
        reader.diagnostics().push(mistake.allowed(SOCKET_ALLOWED));
        return None;
    }
    Some(At::new(PathBuf::from(path.value), path.place))
}

/// A folder; it need not exist yet.
pub fn read_folder(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<At<PathBuf>> {
    const ALLOWED: &str = "the path of a folder, such as /var/lib/lunette";
    let path = reader.text(key, ALLOWED)?;
    if path.value.is_empty() || path.value.contains('\0') {
        let message = format!("`{key}`: not the path of a folder");
        let mistake = Mistake::new(MistakeKind::Value, &path.place, message);
        reader.diagnostics().push(mistake.allowed(ALLOWED));
        return None;
    }
    Some(At::new(PathBuf::from(path.value), path.place))
}

/// A file with a secret, which is read later.
pub fn read_file_name(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<At<PathBuf>> {
    const ALLOWED: &str = "the path of a file, such as /etc/lunette/token";
    let path = reader.text(key, ALLOWED)?;
    if path.value.is_empty() || path.value.contains('\0') {
        let message = format!("`{key}`: not the path of a file");
        let mistake = Mistake::new(MistakeKind::Value, &path.place, message);
        reader.diagnostics().push(mistake.allowed(ALLOWED));
        return None;
    }
    Some(At::new(PathBuf::from(path.value), path.place))
}

/// A name; kept even when it is not allowed, so that references to it are not mistakes too.
pub fn read_name(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<At<String>> {
    let name = reader.text(key, NAME_ALLOWED)?;
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let first = name.value.chars().next().unwrap_or('-');
    if name.value.len() > NAME_MAX
        || !first.is_ascii_alphanumeric()
        || !name.value.chars().all(allowed)
    {
        let message = format!("`{key}`: found {:?}", name.value);
        let mistake = Mistake::new(MistakeKind::Value, &name.place, message);
        reader.diagnostics().push(mistake.allowed(NAME_ALLOWED));
    }
    Some(name)
}

/// Request queues; when nothing is said as many as a client may want.
fn read_queues(reader: &mut Reader<'_, '_>, most: u16) -> u16 {
    reader
        .number("queues", 1..=u64::from(most))
        .map_or(most, |queues| queues.value as u16)
}

/// A vhost-blk export.
pub fn read_vhost_blk(fields: &Fields, diagnostics: &mut Diagnostics) -> VhostBlkDraft {
    let mut reader = Reader::new(fields, "vhost_blk", diagnostics);
    reader.require("disk", "the name of a disk");
    reader.require("socket", SOCKET_ALLOWED);
    let disk = reader.text("disk", "the name of a disk");
    let socket = read_socket(&mut reader, "socket");
    let name = read_name(&mut reader, "name").or_else(|| disk.clone());
    let queues = read_queues(&mut reader, BLK_QUEUES_MAX);
    let placement = read_placement(&mut reader);
    reader.finish(|key| match key {
        "read_only" => Some("vhost_blk: `read_only` belongs to the disk".to_owned()),
        _ => None,
    });
    VhostBlkDraft {
        name,
        disk,
        socket,
        queues,
        placement,
    }
}

/// A vhost-scsi controller.
pub fn read_vhost_scsi(fields: &Fields, diagnostics: &mut Diagnostics) -> VhostScsiDraft {
    let mut reader = Reader::new(fields, "vhost_scsi", diagnostics);
    reader.require("name", NAME_ALLOWED);
    reader.require("socket", SOCKET_ALLOWED);
    let name = read_name(&mut reader, "name");
    let socket = read_socket(&mut reader, "socket");
    let queues = read_queues(&mut reader, SCSI_QUEUES_MAX);
    let placement = read_placement(&mut reader);
    let luns = reader.objects("lun", LUN_EXAMPLE);
    reader.finish(|key| match key {
        "disk" => Some(format!(
            "vhost_scsi: a controller's disks are its `lun`: {LUN_EXAMPLE}"
        )),
        _ => None,
    });
    let luns = luns.iter().map(|f| read_lun(f, diagnostics)).collect();
    VhostScsiDraft {
        name,
        socket,
        queues,
        placement,
        luns,
    }
}

/// A logical unit.
pub fn read_lun(fields: &Fields, diagnostics: &mut Diagnostics) -> LunDraft {
    let mut reader = Reader::new(fields, "lun", diagnostics);
    reader.require("target", "0 to 255");
    reader.require("lun", "0 to 16383");
    reader.require("disk", "the name of a disk");
    let target = reader.number("target", 0..=u64::from(TARGETS_MAX - 1));
    let lun = reader.number("lun", 0..=u64::from(LUNS_MAX - 1));
    let disk = reader.text("disk", "the name of a disk");
    reader.finish(|_| None);
    LunDraft {
        target: target.map(|at| At::new(at.value as u8, at.place)),
        lun: lun.map(|at| At::new(at.value as u16, at.place)),
        disk,
    }
}
