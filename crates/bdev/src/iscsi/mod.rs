//! A disk on a logical unit of an iSCSI target: one session of one or more connections for all workers, one channel per worker.
//!
//! A thread maintains the session ([`iscsi_initiator::ReconnectingUnit`]); workers submit commands and never wait. While the target is away
//! I/O waits up to `replacement_timeout`, then fails as offline, and the disk's `on_error` applies. Properties such as size and discard are
//! those of the unit. Tests: `tests/tests/remote_disks.rs`.

mod medium;

use std::sync::Arc;

use block::PassedReservations;
use iscsi_initiator::{
    CommandSink, ReconnectSettings, ReconnectingUnit, ReservedIsid, UnitCommand, UnitEvent,
    installation,
};

use crate::OpenError;
use crate::scsi::{CommandUnit, ScsiDisk, ScsiDiskParts, Watch};

/// Options for opening a unit.
#[derive(Clone, Debug)]
pub struct IscsiOptions {
    /// Unit and session. The default ISID is constant per installation, disk and unit.
    pub unit: ReconnectSettings,
    /// Name of the disk, an input to its ISID; `None`: random ISID.
    pub disk: Option<String>,
    /// Refuse writes.
    pub read_only: bool,
    /// Pass commands of clients through, with this handling of reservations.
    pub passthrough: Option<PassedReservations>,
    /// Bytes per logical block; by default the unit's own.
    pub block_size: Option<u32>,
}

/// A unit, and its ISID, reserved until the session has ended.
struct Reserved {
    // Dropped in this order.
    unit: ReconnectingUnit,
    _isid: Option<ReservedIsid>,
}

impl CommandUnit for Reserved {
    fn submit(&self, command: UnitCommand, sink: Arc<dyn CommandSink>, token: u64) {
        self.unit.submit(command, sink, token);
    }

    fn abort(&self, sink: &Arc<dyn CommandSink>, token: u64) {
        self.unit.abort(sink, token);
    }
}

impl ScsiDisk {
    /// Logs in and queries the unit; may take the session's time-out.
    ///
    /// # Errors
    /// The unit cannot be reached or used; with a hint.
    pub fn open_iscsi(options: &IscsiOptions) -> Result<ScsiDisk, OpenError> {
        let watch = Arc::new(Watch::default());
        let address = options.unit.address.clone();
        let failed = |reason: String| OpenError::Unit {
            unit: address.to_string(),
            reason,
        };
        let observer = {
            let watch = Arc::clone(&watch);
            Box::new(move |event: UnitEvent<'_>| watch.on_event(event))
        };
        let mut settings = options.unit.clone();
        let mut reserved = None;
        if let (None, Some(disk)) = (settings.session.isid, &options.disk) {
            // A daemon that replaces a killed one must use its ISID: the target then ends the tasks of the old session before it starts
            // another (RFC 7143, 6.3.5), so that no old write is executed after its repetition.
            let own = installation().map_err(failed)?;
            let isid = own.reserve_isid(&[disk, &address.to_string()]);
            settings.session.isid = Some(isid.isid());
            reserved = Some(isid);
        }
        let opened = ReconnectingUnit::open(settings, observer);
        let (unit, info) = opened.map_err(|error| failed(error.to_string()))?;
        let medium = medium::of(&address, &info).with_units(unit.known().clone());
        let parts = ScsiDiskParts {
            kind: "iscsi",
            unit: Box::new(Reserved {
                unit,
                _isid: reserved,
            }),
            medium,
            info,
            watch,
            read_only: options.read_only,
            passthrough: options.passthrough,
            block_size: options.block_size,
        };
        ScsiDisk::new(parts, failed)
    }
}
