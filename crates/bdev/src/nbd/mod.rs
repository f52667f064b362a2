//! A disk on an export of an NBD server.
//!
//! ```text
//!   worker     NbdChannel    own connection on the worker's ring    (the server permits several connections)
//!   worker     RelayChannel ──▶ Relay: a thread with the connection of all workers    (otherwise)
//!   connector  a thread per disk: connects, runs handshakes, checks that the export is the same
//! ```
//!
//! The channel sends requests of one iteration as one message and receives many replies at once. A lost connection is replaced: requests in
//! flight are sent again, others wait up to `replacement_timeout`, then fail as offline, and the disk's `on_error` applies. Every byte of the
//! server is checked by the crate `nbd`. Tests: `crates/bdev/tests/nbd.rs`, `tests/tests/nbd_client.rs`.

mod channel;
mod connector;
mod encryption;
mod extents;
mod link;
mod relay;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ::nbd::address::ExportAddress;
use ::nbd::client::Session;
use ::nbd::wire::{BASE_ALLOCATION, PAYLOAD_MAX, transmission};
use block::{Capacity, CompareAndWrite, DiskInfo, Geometry, SECTOR_BYTES};

use self::channel::NbdChannel;
use self::connector::{Connector, connect, no_further, reconnect};
use self::relay::Relay;
use crate::error::{SIZE_MAX, check_block_size, check_size};
use crate::file::Durability;
use crate::network_medium::NetworkMedium;
use crate::remote_state::RemoteState;
use crate::{Attach, BlockDevice, Capabilities, DiskState, IoChannel, OpenError, RemoteDevice};

/// Options for opening an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdOptions {
    /// Server and name of the export.
    pub address: ExportAddress,
    /// Each worker has its own connection, if the server permits several.
    pub multi_conn: bool,
    /// Maximum number of requests in flight of a connection.
    pub queue_depth: usize,
    /// Time that I/O waits for a lost connection; zero means unlimited.
    pub replacement_timeout: Duration,
    /// Time without a reply to requests in flight after which a connection is regarded as lost; zero means unlimited.
    pub response_timeout: Duration,
    /// Refuse writes; implied by an export that is read-only.
    pub read_only: bool,
    /// Each write is durable when it completes.
    pub writethrough: bool,
    /// Bytes per logical block; by default 512, or a larger minimum of the server.
    pub block_size: Option<u32>,
}

impl NbdOptions {
    /// Returns the default options for an export.
    pub fn new(address: ExportAddress) -> NbdOptions {
        NbdOptions {
            address,
            multi_conn: true,
            queue_depth: 128,
            replacement_timeout: Duration::from_secs(120),
            response_timeout: Duration::from_secs(60),
            read_only: false,
            writethrough: false,
            block_size: None,
        }
    }
}

/// A disk on an export.
pub struct Nbd {
    export: Arc<Export>,
    /// The connection of all workers, unless each worker has one.
    relay: Option<Arc<Relay>>,
    /// Bytes at the end of the export that are not accessible.
    tail: u64,
}

/// State shared by the disk and its channels.
pub(super) struct Export {
    core: Arc<Core>,
    connector: Connector,
}

/// State shared with the connector.
pub(super) struct Core {
    options: NbdOptions,
    info: DiskInfo,
    capacity: Arc<Capacity>,
    /// Properties that every later connection must have.
    promises: Promises,
    medium: NetworkMedium,
    state: RemoteState,
    durability: Durability,
}

/// Properties of an export that the disk has reported to its users.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Promises {
    /// Transmission flags that the disk uses.
    flags: u16,
    is_read_only: bool,
    /// Alignment of requests in bytes.
    alignment: u32,
    /// Canonical name of the export, if the server reports one.
    name: Option<String>,
    has_allocation: bool,
}

/// Transmission flags with an effect on the disk.
const USED_FLAGS: u16 = transmission::SEND_FLUSH
    | transmission::SEND_FUA
    | transmission::SEND_TRIM
    | transmission::SEND_WRITE_ZEROES
    | transmission::CAN_MULTI_CONN;

impl Promises {
    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Returns true if a flush on one connection covers the completed writes of all connections.
    fn has_multi_conn(&self) -> bool {
        self.has(transmission::CAN_MULTI_CONN)
    }

    /// Checks that a new connection leads to the same export, with at least the same properties. `size`: the disk's present size.
    fn check(&self, session: &Session, size: u64) -> Result<(), String> {
        let differs = |reason: String| {
            Err(format!(
                "{reason}; hint: restore the export, or remove the disk and add it again"
            ))
        };
        if let (Some(was), Some(is)) = (&self.name, &session.name)
            && was != is
        {
            return differs(format!(
                "the server now calls the export {is:?}, it was {was:?}"
            ));
        }
        if session.size < size {
            return differs(format!(
                "the export has shrunk from {size} to {} bytes",
                session.size
            ));
        }
        if session.size > SIZE_MAX {
            return differs(format!("the export has grown to {} bytes", session.size));
        }
        if !self.is_read_only && session.flags & transmission::READ_ONLY != 0 {
            return differs("the export is now read-only".to_owned());
        }
        let missing = self.flags & !session.flags;
        if missing != 0 {
            let names = FLAG_NAMES.iter().filter(|(flag, _)| missing & flag != 0);
            let names: Vec<&str> = names.map(|(_, name)| *name).collect();
            return differs(format!("the export no longer has {}", names.join(", ")));
        }
        if self.has_allocation && allocation_of(session).is_none() {
            return differs("the server no longer reports allocated extents".to_owned());
        }
        if session.block_sizes.minimum > self.alignment || payload_max(session, self.alignment) == 0
        {
            return differs("the server now requires other block sizes".to_owned());
        }
        Ok(())
    }
}

const FLAG_NAMES: [(u16, &str); 5] = [
    (transmission::SEND_FLUSH, "FLUSH"),
    (transmission::SEND_FUA, "FUA"),
    (transmission::SEND_TRIM, "TRIM"),
    (transmission::SEND_WRITE_ZEROES, "WRITE_ZEROES"),
    (transmission::CAN_MULTI_CONN, "MULTI_CONN"),
];

/// Returns the maximum length of a read or write in bytes, a multiple of the alignment.
fn payload_max(session: &Session, alignment: u32) -> u32 {
    let most = session.block_sizes.maximum_payload.min(PAYLOAD_MAX);
    most - most % alignment
}

/// Returns the ID of the context of allocation.
fn allocation_of(session: &Session) -> Option<u32> {
    let mut contexts = session.contexts.iter();
    contexts
        .find(|(_, name)| name == BASE_ALLOCATION)
        .map(|(id, _)| *id)
}

/// Maximum physical block size in bytes.
const PHYSICAL_MAX: u32 = 65_536;

impl Nbd {
    /// Connects and opens the export. May take some seconds.
    ///
    /// # Errors
    /// The server cannot be reached, or the export cannot be used; with a hint.
    pub fn open(options: &NbdOptions) -> Result<Nbd, OpenError> {
        let failed = |reason: String| OpenError::Export {
            export: options.address.to_string(),
            reason,
        };
        let connection = connect(&options.address).map_err(failed)?;
        let size = connection.session.size;
        let core = Arc::new(Core::new(options, &connection.session)?);
        let tail = size.saturating_sub(core.capacity.bytes());
        if tail > 0 {
            tracing::warn!(
                export = %options.address,
                size,
                tail,
                "the end of the export is not accessible, because its size is not a multiple of the block size"
            );
        }
        let is_direct = options.multi_conn && core.promises.has_multi_conn();
        let no_thread = |error: io::Error| failed(format!("cannot start a thread: {error}"));
        let connector = Connector::start(Arc::clone(&core), connection).map_err(no_thread)?;
        let export = Arc::new(Export { core, connector });
        let relay = match is_direct {
            true => None,
            false => Some(Relay::start(Arc::clone(&export)).map_err(no_thread)?),
        };
        Ok(Nbd {
            export,
            relay,
            tail,
        })
    }

    /// Refuses an export with an end that is not accessible: a copy would not be complete.
    ///
    /// # Errors
    /// There is such an end.
    pub(crate) fn check_is_whole(&self) -> Result<(), OpenError> {
        match self.tail {
            0 => Ok(()),
            tail => Err(OpenError::Export {
                export: self.export.core.options.address.to_string(),
                reason: format!(
                    "its last {tail} bytes are not a whole block and would be missing; hint: copy it with nbdcopy or qemu-img"
                ),
            }),
        }
    }
}

impl Core {
    fn new(options: &NbdOptions, session: &Session) -> Result<Core, OpenError> {
        let failed = |reason: String| OpenError::Export {
            export: options.address.to_string(),
            reason,
        };
        let sizes = session.block_sizes;
        let block_size = options
            .block_size
            .unwrap_or(sizes.minimum.clamp(SECTOR_BYTES, 4096));
        let block_size = check_block_size(block_size)?;
        let alignment = sizes.minimum.max(SECTOR_BYTES);
        if payload_max(session, alignment) == 0 {
            return Err(failed(format!(
                "the server's maximum payload, {} bytes, is smaller than a block of {alignment} bytes",
                sizes.maximum_payload
            )));
        }
        let read_only = options.read_only || session.flags & transmission::READ_ONLY != 0;
        let promises = Promises {
            flags: match read_only {
                true => session.flags & USED_FLAGS & transmission::CAN_MULTI_CONN,
                false => session.flags & USED_FLAGS,
            },
            is_read_only: read_only,
            alignment,
            name: session.name.clone(),
            has_allocation: allocation_of(session).is_some(),
        };
        let has_flush = promises.has(transmission::SEND_FLUSH);
        if !read_only && !has_flush && !promises.has(transmission::SEND_FUA) {
            return Err(failed(
                "the server has neither FLUSH nor FUA, so that no write can be made durable; hint: set read_only=true, or use a server with one of them"
                    .to_owned(),
            ));
        }
        let geometry = Geometry::new(
            block_size,
            session.size / u64::from(alignment) * u64::from(alignment),
        );
        check_size(geometry.capacity_bytes(), block_size)?;
        let physical_block_size = sizes
            .preferred
            .max(alignment)
            .clamp(block_size, PHYSICAL_MAX);
        let has = |flag| promises.has(flag);
        let info = DiskInfo {
            geometry,
            physical_block_size,
            io_alignment: alignment,
            optimal_io_size: match sizes.preferred > physical_block_size {
                true => sizes.preferred,
                false => 0,
            },
            read_only,
            // Without FLUSH, every write has FUA.
            write_cache: has_flush && !options.writethrough,
            discard_granularity: has(transmission::SEND_TRIM).then_some(alignment.max(block_size)),
            discard_zeroes: false,
            write_zeroes: has(transmission::SEND_WRITE_ZEROES),
            anchors: false,
            atomic_writes: None,
            // The administrator excludes other writers: NBD has no locks.
            compare_and_write: Some(CompareAndWrite::Emulated),
            shared: false,
            rotational: session.flags & transmission::ROTATIONAL != 0,
            passthrough: None,
            identity: block::Identity::UNSET,
            serial: String::new(),
            naa: 0,
        };
        Ok(Core {
            capacity: Arc::new(Capacity::new(geometry.capacity_bytes())),
            info,
            promises,
            medium: NetworkMedium::of_this_host(options.address.to_string()),
            state: RemoteState::default(),
            durability: Durability::default(),
            options: options.clone(),
        })
    }

    /// Adopts the size that a new connection has reported. It is not smaller than before.
    fn adopt_size(&self, size: u64) {
        let unit = u64::from(self.info.io_alignment);
        let geometry = self.info.geometry.resized(size / unit * unit);
        let (size, before) = (geometry.capacity_bytes(), self.capacity.bytes());
        if size > before {
            tracing::info!(export = %self.options.address, before, size, "size of NBD export changed");
            self.capacity.set(size);
        }
    }
}

impl BlockDevice for Nbd {
    fn info(&self) -> DiskInfo {
        let core = &self.export.core;
        core.info.resized(core.capacity.bytes())
    }

    fn capacity(&self) -> &Arc<Capacity> {
        &self.export.core.capacity
    }

    fn set_size(&self, _bytes: u64) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "an NBD export is resized at its server, and the disk adopts a larger size when it connects again",
        ))
    }

    fn kind(&self) -> &'static str {
        "nbd"
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            medium: Some(&self.export.core.medium),
            remote: Some(self),
            ..Capabilities::NONE
        }
    }

    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        Ok(match &self.relay {
            Some(relay) => Box::new(relay.attach(attach)?),
            None => Box::new(NbdChannel::new(Arc::clone(&self.export), attach)?),
        })
    }
}

impl RemoteDevice for Nbd {
    fn state(&self) -> DiskState {
        self.export.core.state.get()
    }

    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        self.export.core.state.on_change(changed);
    }

    /// The protocol has no notification. A new connection has the present size.
    fn read_size(&self) -> io::Result<()> {
        let core = &self.export.core;
        let is_connected = core.state.get() == DiskState::Ready;
        let connection = reconnect(core).map_err(|reason| {
            io::Error::other(match is_connected {
                true => no_further(reason),
                false => reason,
            })
        })?;
        core.adopt_size(connection.session.size);
        core.state.notify_change();
        Ok(())
    }

    /// Without `CAN_MULTI_CONN`, a flush covers only its own connection. Writes of a lost connection are known: see `Durability`.
    fn needs_flush_before_close(&self) -> bool {
        let core = &self.export.core;
        let may_have_unflushed = core.info.write_cache && !core.promises.has_multi_conn();
        let is_connected = core.state.get() == DiskState::Ready;
        may_have_unflushed && (is_connected || core.durability.lost().is_some())
    }
}
