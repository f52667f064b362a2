//! A disk that is a logical unit of an iSCSI target: one session of one or more connections for all workers, a channel of its own for
//! each.
//!
//! A thread keeps the session ([`iscsi_initiator::ReconnectingUnit`]); workers give it commands and never wait. While the target is
//! away I/O waits, up to `replacement_timeout`; then it fails as offline, and the disk's `on_error` decides. Size, discards and
//! the like are the unit's. Tests: `tests/tests/remote_disks.rs`.

mod medium;

use std::sync::Arc;

use block::PassedReservations;
use iscsi_initiator::{
    CommandSink, ReconnectSettings, ReconnectingUnit, ReservedIsid, UnitCommand, UnitEvent,
    installation,
};

use crate::OpenError;
use crate::scsi::{CommandUnit, ScsiDisk, ScsiDiskParts, Watch};

/// What to open, and how.
#[derive(Clone, Debug)]
pub struct IscsiOptions {
    /// The unit and its session. The default ISID is always the same for this installation, disk and unit.
    pub unit: ReconnectSettings,
    /// The disk's name, from which the ISID follows; `None`: it is a random one.
    pub disk: Option<String>,
    /// Nothing may be written.
    pub read_only: bool,
    /// It is passed through, with these reservations.
    pub passthrough: Option<PassedReservations>,
    /// Bytes per logical block; otherwise the unit's own.
    pub block_size: Option<u32>,
}

/// A unit and the ISID that is reserved for it until its session has ended.
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
    /// Logs in to a target and asks what its unit is.
    ///
    /// # Errors
    /// What cannot be reached or used, why, and what to do about it. May take as long as the session's time-out.
    pub fn open_iscsi(options: &IscsiOptions) -> Result<ScsiDisk, OpenError> {
        let watch = Arc::new(Watch::default());
        let address = options.unit.address.clone();
        let failed = |what: String| OpenError::Unit {
            unit: address.to_string(),
            what,
        };
        let observer = {
            let watch = Arc::clone(&watch);
            Box::new(move |event: UnitEvent<'_>| watch.hear(event))
        };
        let mut settings = options.unit.clone();
        let mut reserved = None;
        if let (None, Some(disk)) = (settings.session.isid, &options.disk) {
            // A daemon that replaces one that was killed has to use its ISID: the target then ends the tasks of that session before
            // it starts another (RFC 7143, 6.3.5), and no write of the dead daemon is done after one that repeats it.
            let own = installation().map_err(failed)?;
            let isid = own.reserve_isid(&[disk, &address.to_string()]);
            settings.session.isid = Some(isid.isid());
            reserved = Some(isid);
        }
        let opened = ReconnectingUnit::open(settings, observer);
        let (unit, info) = opened.map_err(|error| failed(error.to_string()))?;
        let parts = ScsiDiskParts {
            kind: "iscsi",
            unit: Box::new(Reserved {
                unit,
                _isid: reserved,
            }),
            medium: medium::of(&address, &info),
            info,
            watch,
            read_only: options.read_only,
            passthrough: options.passthrough,
            block_size: options.block_size,
        };
        ScsiDisk::new(parts, failed)
    }
}
