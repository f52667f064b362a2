//! A disk that is a logical unit of an iSCSI target: one session of one or more connections for all workers, a channel of its own for
//! each.
//!
//! A thread keeps the session ([`iscsi_initiator::ReconnectingUnit`]); workers give it commands and never wait. While the target is
//! away I/O waits, up to `replacement_timeout`; then it fails as offline, and the disk's `on_error` decides. Size, discards and
//! the like are the unit's. Tests: `tests/tests/remote_disks.rs`.

mod medium;

use std::sync::Arc;

use block::PassedReservations;
use iscsi_initiator::{CommandSink, ReconnectSettings, ReconnectingUnit, UnitCommand, UnitEvent};
use sha2::{Digest, Sha256};

use crate::OpenError;
use crate::scsi::{CommandUnit, ScsiDisk, ScsiDiskParts, Watch};

/// What to open, and how.
#[derive(Clone, Debug)]
pub struct IscsiOptions {
    /// Which unit, as whom. Without an ISID it gets one that is always the same for this host, disk and unit.
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

impl CommandUnit for ReconnectingUnit {
    fn submit(&self, command: UnitCommand, sink: Arc<dyn CommandSink>, token: u64) {
        ReconnectingUnit::submit(self, command, sink, token);
    }

    fn abort(&self, sink: &Arc<dyn CommandSink>, token: u64) {
        ReconnectingUnit::abort(self, sink, token);
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
        let host = host_name();
        if let (None, Some(disk)) = (settings.session.isid, &options.disk) {
            settings.session.isid = Some(isid(&[&host, disk, &address.to_string()]));
        }
        let opened = ReconnectingUnit::open(settings, observer);
        let (unit, info) = opened.map_err(|error| failed(error.to_string()))?;
        let parts = ScsiDiskParts {
            kind: "iscsi",
            unit: Box::new(unit),
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

/// What tells this host from others that may have the same initiator name.
fn host_name() -> String {
    let id = std::fs::read_to_string("/etc/machine-id");
    id.unwrap_or_else(|_| {
        let name = rustix::system::uname();
        name.nodename().to_string_lossy().into_owned()
    })
}

/// A daemon that comes after one that was killed has to use its ISID: then the target ends the tasks of that session before there is
/// another (RFC 7143, 6.3.5), and no write of the dead daemon comes after one that this one repeats. In the random format (10.4.1).
fn isid(of: &[&str]) -> [u8; 6] {
    let digest = Sha256::digest(of.join("\n"));
    let mut isid = [0x80; 6];
    isid[1..].copy_from_slice(&digest[..5]);
    isid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isid_is_of_the_random_format_and_the_same_for_the_same_disk() {
        let one = isid(&["host", "d0", "iscsi://h/t/0"]);
        assert_eq!(one, isid(&["host", "d0", "iscsi://h/t/0"]));
        assert_eq!(one[0] >> 6, 2);
        assert_ne!(one, isid(&["host", "d1", "iscsi://h/t/0"]));
        assert_ne!(one, isid(&["other", "d0", "iscsi://h/t/0"]));
    }
}
