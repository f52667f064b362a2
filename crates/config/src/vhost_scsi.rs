//! A virtio-scsi controller: its keys, and the values given for them.

use std::path::PathBuf;

use block::ExportPlacement;

use super::diagnostics::Diagnostics;
use super::export::{ExportConfig, ExportObject, KeyValue, key_values};
use super::export_draft::{
    ExportDraft, ExportKind, Placed, Vhost, VhostDraft, dedicated, name, queues, socket, workers,
};
use super::key::{Item, Key, Kind, NONE, REQUIRED, read_all, schema_of};
use super::location::Located;
use super::lun::{LUN_COMMAND, LUN_KEYS, LunDraft, luns_value, read_lun};
use super::model::{LunConfig, SCSI_QUEUES_MAX, SocketRights, VhostScsiConfig};
use super::placement::PlacementDraft;
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

/// Values given for a vhost-scsi controller.
#[derive(Default)]
pub struct VhostScsiDraft {
    vhost: VhostDraft,
    placement: PlacementDraft,
    luns: Vec<LunDraft>,
}

/// All keys of a vhost-scsi controller.
pub static VHOST_SCSI_KEYS: &[Key<VhostScsiDraft, VhostScsiConfig>] = &[
    name(REQUIRED),
    socket(),
    socket_mode(),
    socket_owner(),
    socket_group(),
    queues(
        SCSI_QUEUES_MAX,
        "`254`",
        "maximum number of request queues, without the control and event queues",
    ),
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
pub fn read_vhost_scsi(fields: &Fields, diagnostics: &mut Diagnostics) -> Box<dyn ExportDraft> {
    let mut reader = Reader::new(fields, "vhost_scsi", diagnostics);
    let mut draft = VhostScsiDraft::default();
    read_all(VHOST_SCSI_KEYS, &mut reader, &mut draft);
    draft.placement.relate(&mut reader);
    reader.finish(|key| match key {
        "disk" => Some(format!(
            "vhost_scsi: list a controller's disks in `lun`: {LUN_EXAMPLE}"
        )),
        _ => None,
    });
    Box::new(draft)
}

impl Vhost for VhostScsiDraft {
    fn vhost(&mut self) -> &mut VhostDraft {
        &mut self.vhost
    }
}

impl Placed for VhostScsiDraft {
    fn placement_mut(&mut self) -> &mut PlacementDraft {
        &mut self.placement
    }
}

impl ExportDraft for VhostScsiDraft {
    fn name(&self) -> Option<&Located<String>> {
        self.vhost.name.as_ref()
    }

    fn socket(&self) -> Option<&Located<PathBuf>> {
        self.vhost.socket.as_ref()
    }

    fn luns(&self) -> &[LunDraft] {
        &self.luns
    }

    fn luns_by_flags(&mut self) -> Option<&mut Vec<LunDraft>> {
        Some(&mut self.luns)
    }

    fn placement(&self) -> &PlacementDraft {
        &self.placement
    }

    fn complete(&self) -> Option<ExportConfig> {
        let luns: Option<Vec<LunConfig>> = self.luns.iter().map(LunDraft::complete).collect();
        Some(ExportConfig::VhostScsi(VhostScsiConfig {
            name: self.name()?.value.clone(),
            socket: self.socket()?.value.clone(),
            rights: self.vhost.rights.clone(),
            queues: self.vhost.queues.unwrap_or(SCSI_QUEUES_MAX),
            placement: self.placement.placement(),
            luns: luns?,
        }))
    }
}
