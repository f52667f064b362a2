//! One disk as virtio-blk: its keys, and the values given for them.

use std::path::PathBuf;

use block::ExportPlacement;

use super::diagnostics::Diagnostics;
use super::export::ExportObject;
use super::export_draft::{
    ENDS_SESSION, ExportDraft, ExportKind, dedicated, name, socket, workers,
};
use super::key::{Key, KeyValue, Kind, REQUIRED, key_values, read_all, schema_of};
use super::model::{BLK_QUEUES_MAX, ExportConfig, SocketRights, VhostBlkConfig};
use super::readers::DISK;
use super::setting::key;
use super::socket_rights::{socket_group, socket_mode, socket_owner};
use super::value::{Fields, Reader};

/// One disk as virtio-blk.
pub static VHOST_BLK: ExportKind = ExportKind {
    word: "vhost-blk",
    table: "vhost_blk",
    example: "tables with the header [[vhost_blk]]",
    schema: "VhostBlk",
    summary: "One disk as virtio-blk on one vhost-user socket.",
    properties: || schema_of(VHOST_BLK_KEYS),
    read: read_vhost_blk,
};

impl ExportObject for VhostBlkConfig {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        VHOST_BLK.word
    }

    fn fill(&mut self, name: String, disk: Option<String>, socket: Option<PathBuf>) -> Option<()> {
        (self.name, self.disk, self.socket) = (name, disk?, socket?);
        Some(())
    }

    fn values(&self) -> Vec<KeyValue> {
        key_values(VHOST_BLK_KEYS, self)
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

    fn disk(&self) -> Option<&str> {
        Some(&self.disk)
    }
}

/// All keys of a vhost-blk export.
pub static VHOST_BLK_KEYS: &[Key<ExportDraft<VhostBlkConfig>, VhostBlkConfig>] = &[
    name("the disk's name"),
    key! { "disk": DISK; REQUIRED; ENDS_SESSION; "the disk"; both disk },
    socket(),
    socket_mode(),
    socket_owner(),
    socket_group(),
    key! { "queues": Kind::Number("", 1..=BLK_QUEUES_MAX as u64); "`256`"; ENDS_SESSION;
        "maximum number of request queues per client"; both queues
    },
    workers(),
    dedicated("start a worker for this export alone"),
];

/// Reads a vhost-blk export.
pub fn read_vhost_blk(fields: &Fields, diagnostics: &mut Diagnostics) -> ExportDraft {
    let mut reader = Reader::new(fields, "vhost_blk", diagnostics);
    let mut draft = ExportDraft::<VhostBlkConfig>::default();
    draft.config.queues = BLK_QUEUES_MAX;
    read_all(VHOST_BLK_KEYS, &mut reader, &mut draft);
    draft.name = draft.name.or(draft.disk.clone());
    draft.placement.relate(&mut reader);
    reader.finish(|key| match key {
        "read_only" => Some("vhost_blk: `read_only` is a key of the disk".to_owned()),
        _ => None,
    });
    draft.of_any_kind(ExportConfig::VhostBlk)
}
