//! Disks with a SCSI device that executes clients' commands: local devices, and units of iSCSI targets if configured.

use block::PassedReservations;
use serde_json::json;

use super::devices::{BlockDeviceConfig, DeviceKind};
use super::diagnostics::{Mistake, MistakeKind};
use super::disk_draft::{DiskDraft, DiskKey};
use super::key::{Kind, RunTime};
use super::model::DiskConfig;
use super::setting::{Choice, Setting, key};
use super::value::Reader;

fn reservations(disk: &DiskConfig) -> Option<PassedReservations> {
    match &disk.backend {
        BlockDeviceConfig::Iscsi(remote) => remote.passthrough,
        BlockDeviceConfig::ScsiGeneric { reservations, .. } => Some(*reservations),
        _ => None,
    }
}

pub const PASSTHROUGH: DiskKey = key! {
    "passthrough": Kind::Boolean; "`false`"; RunTime::AddAnew, of &["iscsi"];
    "forwards commands of SCSI clients and responses of the unit unchanged: see [passthrough](remote-disks.md#passthrough)";
    set passthrough.is_on; get |disk| match &disk.backend {
        BlockDeviceConfig::Iscsi(remote) => remote.passthrough.map(|_| json!(true)),
        _ => None,
    }
};

pub const RESERVATIONS_KEY: DiskKey = key! {
    "pr": PassedReservations::KIND; "`refuse`"; RunTime::AddAnew, of &["scsi_generic", "iscsi"];
    "reservations of a passed-through disk. `refuse`: not available. `emulate`: valid among the clients of this daemon. \
        `forward`: those of the device, valid among hosts; all clients of this daemon are one registrant";
    set passthrough.reservations; get |disk| reservations(disk)?.value_unless(&PassedReservations::default())
};

/// Refuses `pr` without `passthrough`: other units have reservations of this daemon.
pub(crate) fn relate(reader: &mut Reader<'_, '_>, draft: &DiskDraft, device: Option<DeviceKind>) {
    if let (Some(DeviceKind::Iscsi), false, Some(at)) = (
        device,
        draft.passthrough.is_on,
        &draft.passthrough.reservations,
    ) {
        let mistake = Mistake::new(
            MistakeKind::Relation,
            &at.location,
            "`pr` needs `passthrough`",
        );
        let help = "add `passthrough = true`, or remove `pr`";
        reader.diagnostics().push(mistake.help(help));
    }
}
