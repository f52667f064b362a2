//! A virtio-scsi controller: its keys, and the values given for them.

use std::path::PathBuf;

use block::ExportPlacement;

use super::diagnostics::Diagnostics;
use super::export::ExportObject;
use super::export_draft::{
    ENDS_SESSION, ExportDraft, ExportKind, dedicated, name, socket, workers,
};
use super::key::{Item, Key, KeyValue, Kind, NONE, REQUIRED, key_values, read_all, schema_of};
use super::lun::{LUN_COMMAND, LUN_KEYS, luns_value, read_lun};
use super::model::{ExportConfig, LunConfig, SCSI_QUEUES_MAX, SocketRights, VhostScsiConfig};
use super::setting::key;
use super::socket_rights::{socket_group, socket_mode, socket_owner};
use super::value::{Fields, Reader};

const LUN_EXAMPLE: &str = "tables such as { target = 0, lun = 0, disk = \"d0\" }";

/// A virtio-scsi controller.
pub static VHOST_SCSI: ExportKind = ExportKind {
    word: "vhost-scsi",
    table: "vhost_scsi",
    example: "tables with the header [[vhost_scsi]]",
    schema: "VhostScsi",
    summary: "A virtio-scsi controller on one vhost-user socket.",
    properties: || schema_of(VHOST_SCSI_KEYS),
    read: read_vhost_scsi,
};

impl ExportObject for VhostScsiConfig {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        VHOST_SCSI.word
    }

    fn fill(&mut self, name: String, _disk: Option<String>, socket: Option<PathBuf>) -> Option<()> {
        (self.name, self.socket) = (name, socket?);
        Some(())
    }

    fn values(&self) -> Vec<KeyValue> {
        key_values(VHOST_SCSI_KEYS, self)
    }

    fn placement(&self) -> &ExportPlacement {
        &self.placement
    }

    fn placement_mut(&mut self) -> &mut ExportPlacement {
        &mut self.placement
    }

    fn socket(&self) -> Option<&PathBuf> {
        Some(&self.socket)
    }

    fn socket_rights(&self) -> Option<&SocketRights> {
        Some(&self.rights)
    }

    fn socket_rights_mut(&mut self) -> Option<&mut SocketRights> {
        Some(&mut self.rights)
    }

    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        Some(&mut self.socket)
    }

    fn queues(&self) -> u16 {
        self.queues
    }

    fn luns(&self) -> Option<&[LunConfig]> {
        Some(&self.luns)
    }

    fn luns_mut(&mut self) -> Option<&mut Vec<LunConfig>> {
        Some(&mut self.luns)
    }
}

/// All keys of a vhost-scsi controller.
pub static VHOST_SCSI_KEYS: &[Key<ExportDraft<VhostScsiConfig>, VhostScsiConfig>] = &[
    name(REQUIRED),
    socket(),
    socket_mode(),
    socket_owner(),
    socket_group(),
    key! { "queues": Kind::Number("", 1..=SCSI_QUEUES_MAX as u64); "`254`"; ENDS_SESSION;
        "maximum number of request queues, without the control and event queues"; both queues
    },
    workers(),
    dedicated("start a worker for this export alone"),
    key! { "lun": Kind::List("list of tables", LUN_EXAMPLE,
            Item::Table { fields: &["target", "lun", "disk"], schema: || schema_of(LUN_KEYS) });
        NONE; LUN_COMMAND;
        "logical units: `{ target = 0, lun = 0, disk = \"d0\" }`. Flag `--lun NAME/TARGET:LUN=DISK`";
        read |key, reader, draft| {
            for fields in reader.objects(key.name, LUN_EXAMPLE) {
                draft.luns.push(read_lun(LUN_KEYS, fields, reader.diagnostics()));
            }
        };
        get |controller| Some(luns_value(&controller.luns))
    },
];

/// Reads a vhost-scsi controller.
pub fn read_vhost_scsi(fields: &Fields, diagnostics: &mut Diagnostics) -> ExportDraft {
    let mut reader = Reader::new(fields, "vhost_scsi", diagnostics);
    let mut draft = ExportDraft::<VhostScsiConfig>::default();
    draft.config.queues = SCSI_QUEUES_MAX;
    read_all(VHOST_SCSI_KEYS, &mut reader, &mut draft);
    draft.placement.relate(&mut reader);
    reader.finish(|key| match key {
        "disk" => Some(format!(
            "vhost_scsi: list a controller's disks in `lun`: {LUN_EXAMPLE}"
        )),
        _ => None,
    });
    draft.of_any_kind(ExportConfig::VhostScsi)
}
