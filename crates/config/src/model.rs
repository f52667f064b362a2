//! Object model of a validated configuration, from a file, flags or both.
//!
//! The names are the same in the file, in the flags and on the control socket.

use std::net::SocketAddr;
use std::path::PathBuf;

use block::{DiscardMode, ErrorPolicy, ExportPlacement, PollLimit, PollLimits, PollMode};
use iscsi::access::{AclEntry, Announced, DemoMode, Portal};
use iscsi::negotiation::LoginBounds;
use scsi::{AccessStates, StateSetters};

use super::devices::BlockDeviceConfig;

/// Maximum number of workers of a daemon.
pub const WORKERS_MAX: usize = 128;
/// Maximum number of request queues of a vhost-blk export.
pub const BLK_QUEUES_MAX: u16 = 256;
/// Maximum number of request queues of a vhost-scsi controller; control and event queue are the other two.
pub const SCSI_QUEUES_MAX: u16 = 254;
/// Maximum number of targets of a vhost-scsi controller.
pub const TARGETS_MAX: u16 = 256;
/// Maximum number of logical units of one target (SAM-5, 4.7.7.3: flat space addressing has 14 bits).
pub const LUNS_MAX: u16 = 16_384;
/// Maximum length of the name of a disk or an export.
pub const NAME_MAX: usize = 64;
/// Maximum length of a serial number: virtio-blk's GET_ID returns 20 bytes (virtio 1.3, 5.2.6).
pub const SERIAL_MAX: usize = 20;
/// Maximum length of a Unix socket's path: `sun_path` without its final NUL.
pub const SOCKET_PATH_MAX: usize = 107;
/// Maximum polling limit, in microseconds; `always` exceeds it.
pub const POLL_MICROS_MAX: u32 = 1_000_000;

/// Configuration of one daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Path of the control socket; `None`: the default.
    pub control: Option<PathBuf>,
    /// Access to the control socket and the API.
    pub access: AccessConfig,
    /// Directory of state that must survive a restart; `None`: the default.
    pub state: Option<PathBuf>,
    /// TCP address for metrics; `None`: on the control socket only.
    pub metrics_listen: Option<SocketAddr>,
    /// Sandbox mode of the process and its threads.
    pub sandbox: sandbox::Mode,
    /// Folders and files that the daemon may open in addition to those of the configuration.
    pub sandbox_paths: Vec<PathBuf>,
    /// Worker threads.
    pub workers: WorkersConfig,
    /// Named block devices.
    pub disks: Vec<DiskConfig>,
    /// Exports, in the order of their kinds.
    pub exports: Vec<ExportConfig>,
    /// File with the CHAP users of discovery sessions; `None`: discovery needs no authentication.
    pub discovery_auth: Option<PathBuf>,
    /// Limits on the resources of iSCSI initiators.
    pub iscsi_limits: IscsiLimits,
    /// Certificate for the API, metrics and NBD exports.
    pub tls: TlsConfig,
}

impl Config {
    /// Returns the disk with this name.
    pub fn disk(&self, name: &str) -> Option<&DiskConfig> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// Returns a copy without disks and exports.
    pub fn without_objects(&self) -> Config {
        Config {
            disks: Vec::new(),
            exports: Vec::new(),
            ..self.clone()
        }
    }

    /// Returns the daemon's own keys of this configuration with the disks and exports of another.
    pub fn with_objects_of(&self, other: &Config) -> Config {
        Config {
            disks: other.disks.clone(),
            exports: other.exports.clone(),
            ..self.clone()
        }
    }

    /// Replaces the disk with the same name, or appends it.
    pub fn put_disk(&mut self, disk: DiskConfig) {
        match self.disks.iter_mut().find(|known| known.name == disk.name) {
            Some(known) => *known = disk,
            None => self.disks.push(disk),
        }
    }
}

/// Access besides root and the daemon's own user: on the control socket by group, over TCP by token. No access by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessConfig {
    /// Group with permission to change everything, with files in `allow_paths`.
    pub control_group: Option<String>,
    /// Group with read-only access.
    pub control_readers: Option<String>,
    /// TCP address of the API; `None`: not served.
    pub api_listen: Option<SocketAddr>,
    /// File with the token for the permissions of `control_group` over TCP.
    pub token_file: Option<PathBuf>,
    /// File with the token for the permissions of `control_readers` over TCP.
    pub readers_token_file: Option<PathBuf>,
    /// Names, in addition to `localhost` and IP addresses, that browsers may use for the API.
    pub api_names: Vec<String>,
    /// Folders and files that requests of the control group and of token holders may name. Empty: those in the configuration.
    pub allow_paths: Vec<PathBuf>,
    /// Authorities of client certificates, which clients of the API and of metrics over TCP then need.
    pub api_client_ca: Option<PathBuf>,
}

/// Certificate of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsConfig {
    /// File with the certificate and those of intermediate authorities; `None`: no TLS.
    pub certificate: Option<PathBuf>,
    /// File with the private key.
    pub key: Option<PathBuf>,
    /// Authorities of client certificates, which clients of NBD exports with TLS then need.
    pub nbd_client_ca: Option<PathBuf>,
}

impl AccessConfig {
    /// Returns true if any group is set.
    pub fn has_groups(&self) -> bool {
        self.control_group.is_some() || self.control_readers.is_some()
    }
}

/// Number, placement and polling of the workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkersConfig {
    /// Number of workers, and their CPUs if they are pinned.
    pub placement: Placement,
    /// Polling of each kind without a limit of its own.
    pub poll: PollMode,
    /// Polling limit of a worker that serves guests' rings.
    pub ring_poll: Option<PollLimit>,
    /// Polling limit of a worker with connections only.
    pub network_poll: Option<PollLimit>,
    /// Polling limit of a worker that waits for a disk.
    pub disk_poll: Option<PollLimit>,
}

impl WorkersConfig {
    /// Returns the polling limit of each kind.
    pub fn poll_limits(&self) -> PollLimits {
        let of_mode = PollLimits::from(self.poll);
        PollLimits {
            rings: self.ring_poll.unwrap_or(of_mode.rings),
            network: self.network_poll.unwrap_or(of_mode.network),
            disk: self.disk_poll.unwrap_or(of_mode.disk),
        }
    }
}

/// CPU placement of the workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Number of workers, placed by the kernel.
    Count(usize),
    /// One worker pinned to each of these CPUs.
    Cpus(Vec<usize>),
}

impl Default for Placement {
    fn default() -> Self {
        Placement::Count(1)
    }
}

impl Placement {
    /// Returns the number of workers.
    pub fn count(&self) -> usize {
        match self {
            Placement::Count(count) => *count,
            Placement::Cpus(cpus) => cpus.len(),
        }
    }
}

/// A named block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskConfig {
    /// Name for references by exports.
    pub name: String,
    /// Block device of the disk.
    pub backend: BlockDeviceConfig,
    /// Effect of a discard.
    pub discard: DiscardMode,
    /// Logical block size in bytes, 512 or 4096; `None`: 512, or that of the block device.
    pub block_size: Option<u32>,
    /// The disk refuses writes.
    pub read_only: bool,
    /// The daemon does not start without it.
    pub require: bool,
    /// Serial number for clients; `None`: from the disk's identity.
    pub serial: Option<String>,
    /// Other properties visible to clients.
    pub shown: ShownConfig,
    /// Rate limits for all its clients together.
    pub limits: LimitsConfig,
    /// Handling of I/Os that fail or take too long.
    pub errors: ErrorPolicy,
}

/// Rate limits of a disk; `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitsConfig {
    /// Requests per second.
    pub iops: Option<u64>,
    /// Burst in requests after a pause; `None`: a twentieth of `iops`.
    pub iops_burst: Option<u64>,
    /// Bytes read and written per second.
    pub bandwidth: Option<u64>,
    /// Burst in bytes after a pause; `None`: a twentieth of `bandwidth`.
    pub bandwidth_burst: Option<u64>,
}

/// Properties of a disk visible to clients, besides size, blocks and serial number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShownConfig {
    /// NAA identifier; `None`: from the disk's identity.
    pub wwn: Option<u64>,
    /// Physical block size in bytes; `None`: that of the back end.
    pub physical_block_size: Option<u32>,
    /// SCSI initiators may eject and load the medium.
    pub removable: bool,
    /// The disk may be read and written by EXTENDED COPY through targets that do not have it.
    pub copy_across_targets: bool,
}

/// Transport of an export. A configuration has its exports in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transport {
    /// One disk as virtio-blk on one vhost-user socket.
    #[default]
    VhostBlk,
    /// A virtio-scsi controller on one vhost-user socket.
    VhostScsi,
    /// An iSCSI target.
    Iscsi,
    /// One disk over NBD.
    Nbd,
}

/// An export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportConfig {
    /// Transport of its clients.
    pub transport: Transport,
    /// Name; that of the disk by default.
    pub name: String,
    /// Name of the disk; `None`: the export has a list of logical units.
    pub disk: Option<String>,
    /// Logical units. The target number of those of iSCSI targets is always 0.
    pub luns: Vec<LunConfig>,
    /// Path of its Unix socket, which several NBD exports may share.
    pub socket: Option<PathBuf>,
    /// Mode, owner and group of the socket.
    pub rights: SocketRights,
    /// Maximum number of request queues of a client, besides control and event queue; 0: the transport has none.
    pub queues: u16,
    /// I_T nexus of a vhost-scsi controller; `None`: the name of the export.
    pub nexus: Option<String>,
    /// Workers that serve it.
    pub placement: ExportPlacement,
    /// Options of an iSCSI target.
    pub iscsi: IscsiConfig,
    /// Options of an NBD export.
    pub nbd: NbdConfig,
}

/// One logical unit of a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LunConfig {
    /// Target, 0 to 255.
    pub target: u8,
    /// Logical unit number, 0 to 16383.
    pub lun: u16,
    /// Name of the disk.
    pub disk: String,
}

/// Options of an iSCSI target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IscsiConfig {
    /// Name for users.
    pub alias: Option<String>,
    /// Portals.
    pub portals: Vec<Portal>,
    /// Addresses reported to initiators instead of the portals of the same group.
    pub announce: Vec<Announced>,
    /// Permissions of initiators that no other entry admits.
    pub demo_mode: DemoMode,
    /// File with the CHAP users.
    pub chap_users: Option<PathBuf>,
    /// Initiators that may log in.
    pub acl: Vec<AclEntry>,
    /// Limits of login negotiation.
    pub bounds: LoginBounds,
    /// Access states (ALUA) of its portal groups, except for active/optimized.
    pub access_states: AccessStates,
    /// Initiators that may change these states.
    pub state_setters: StateSetters,
}

/// Mode, owner and group of a socket. The kernel chooses those that are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketRights {
    /// Permission bits.
    pub mode: Option<u16>,
    /// Name or number of a user.
    pub owner: Option<String>,
    /// Name or number of a group.
    pub group: Option<String>,
}

impl SocketRights {
    /// Returns true if none is given.
    pub fn is_default(&self) -> bool {
        *self == SocketRights::default()
    }

    /// Returns true if each right of `before` is given here, too. Otherwise the socket must be created again.
    pub(super) fn covers(&self, before: &SocketRights) -> bool {
        (self.mode.is_some() || before.mode.is_none())
            && (self.owner.is_some() || before.owner.is_none())
            && (self.group.is_some() || before.group.is_none())
    }
}

/// Limits on the resources of initiators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IscsiLimits {
    /// Maximum number of TCP connections; further ones are closed at once.
    pub connections: u64,
    /// Maximum number of connections before login, included in `connections`; a further one ends the oldest.
    pub half_open: u64,
    /// Maximum number of sessions; further ones are refused at login.
    pub sessions: u64,
    /// Maximum number of connections per session: the offered MaxConnections.
    pub connections_per_session: u64,
    /// Maximum number of commands in progress per session: its command window.
    pub commands_per_session: u64,
    /// Time limit for a login, in seconds.
    pub login_s: u64,
    /// Maximum command data held by all connections of a session, in bytes; the next command waits.
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
            memory: 32 << 20,
        }
    }
}

/// Options of an NBD export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NbdConfig {
    /// TCP address, which several NBD exports may share.
    pub listen: Option<SocketAddr>,
    /// Name for clients; `None`: the name of the export.
    pub export_name: Option<String>,
    /// Description for clients.
    pub description: Option<String>,
    /// Clients may not write.
    pub read_only: bool,
    /// Clients must use TLS.
    pub tls: bool,
}
