//! A virtio-scsi controller: its keys.

use super::export_keys::{DEDICATED, ExportKey, ExportKind, VHOST_SOCKET, WORKERS, name};
use super::key::{Item, Kind, NONE, REQUIRED, RunTime, schema_of};
use super::lun::{LUN_COMMAND, LUN_KEYS, luns_value, read_luns};
use super::model::{SCSI_QUEUES_MAX, Transport};
use super::readers::NAME;
use super::setting::key;
use super::socket_rights::{SOCKET_GROUP, SOCKET_MODE, SOCKET_OWNER};

const LUN_EXAMPLE: &str = "tables such as { target = 0, lun = 0, disk = \"d0\" }";

/// A virtio-scsi controller.
pub static VHOST_SCSI: ExportKind = ExportKind {
    transport: Transport::VhostScsi,
    word: "vhost-scsi",
    table: "vhost_scsi",
    form: "NAME:SOCKET, then ,queues=N and ,nexus=NAME as needed: c0:/run/lunette/c0.sock",
    example: "tables with the header [[vhost_scsi]]",
    schema: "VhostScsi",
    summary: "A virtio-scsi controller on one vhost-user socket.",
    keys: &[("virtio-scsi exports", VHOST_SCSI_KEYS)],
    queues: SCSI_QUEUES_MAX,
    relate: |_, _| {},
    elsewhere: |key| match key {
        "disk" => Some(format!(
            "vhost_scsi: list a controller's disks in `lun`: {LUN_EXAMPLE}"
        )),
        _ => None,
    },
};

/// All keys of a vhost-scsi controller.
pub static VHOST_SCSI_KEYS: &[ExportKey] = &[
    name(REQUIRED),
    VHOST_SOCKET,
    SOCKET_MODE,
    SOCKET_OWNER,
    SOCKET_GROUP,
    key! { "queues": Kind::Number("", 1..=SCSI_QUEUES_MAX as u64); "`254`"; RunTime::ENDS_SESSION;
        "maximum number of request queues, without the control and event queues"; both queues
    },
    key! { "nexus": NAME; "the export's name"; RunTime::ENDS_SESSION;
        "name of the SCSI initiator to which persistent reservations belong; exports with the same value act as one initiator: use it for the two exports of a guest that [migrates](migration.md)";
        both nexus
    },
    WORKERS,
    DEDICATED,
    key! { "lun": Kind::List("list of tables", LUN_EXAMPLE,
            Item::Table { fields: &["target", "lun", "disk"], schema: || schema_of(LUN_KEYS) });
        NONE; LUN_COMMAND;
        "logical units: `{ target = 0, lun = 0, disk = \"d0\" }`. Flag `--lun NAME/TARGET:LUN=DISK`";
        read |key, reader, export| export.luns.extend(read_luns(key.name, LUN_KEYS, LUN_EXAMPLE, reader));
        get |export| Some(luns_value(&export.luns))
    },
];
