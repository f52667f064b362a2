//! Disks with a SCSI device that executes clients' commands: local devices, and units of iSCSI targets if configured.

use block::PassedReservations;
use serde_json::{Value, json};

use super::device_keys::{DiskKey, device_key};
use super::devices::BlockDeviceConfig;
use super::key::{Kind, RunTime};
use super::setting::{Choice, Setting, key};
use super::value::Reader;

type Passthrough = Option<PassedReservations>;

fn read_passthrough(key: &DiskKey, reader: &mut Reader<'_, '_>) -> Option<Passthrough> {
    let is_on = reader.boolean(key.name)?.value;
    Some(is_on.then(PassedReservations::default))
}

/// Refuses `pr` without `passthrough`: other units have reservations of this daemon.
pub(crate) fn relate(reader: &mut Reader<'_, '_>, backend: &BlockDeviceConfig) {
    if let BlockDeviceConfig::Iscsi(remote) = backend
        && remote.passthrough.is_none()
        && let Some(location) = reader.valid("pr")
    {
        let help = "add `passthrough = true`, or remove `pr`";
        let message = "`pr` needs `passthrough`";
        reader.diagnostics.conflict(location, message, help);
    }
}

/// Keys of passed-through disks.
pub static PASSTHROUGH_KEYS: &[DiskKey] = &[
    device_key! {
        "passthrough": Kind::Boolean; "`false`";
        "forwards commands of SCSI clients and responses of the unit unchanged: see [passthrough](remote-disks.md#passthrough)";
        [Iscsi] (passthrough) by (read_passthrough, |on: &Passthrough| -> Option<Value> { on.map(|_| json!(true)) })
    },
    key! {
        "pr": PassedReservations::KIND; "`refuse`"; RunTime::ADD_AGAIN, of &["scsi_generic", "iscsi"];
        "reservations of a passed-through disk. `refuse`: not available. `emulate`: valid among the clients of this daemon. \
            `forward`: those of the device, valid among hosts; all clients of this daemon are one registrant";
        read |key, reader, disk| key.set_in(reader, match &mut disk.backend {
            BlockDeviceConfig::Iscsi(remote) => remote.passthrough.as_mut(),
            BlockDeviceConfig::ScsiGeneric { reservations, .. } => Some(reservations),
            _ => None,
        });
        get |disk| match &disk.backend {
            BlockDeviceConfig::Iscsi(remote) => remote.passthrough.as_ref(),
            BlockDeviceConfig::ScsiGeneric { reservations, .. } => Some(reservations),
            _ => None,
        }?.value_unless(&PassedReservations::default())
    },
];
