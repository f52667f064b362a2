//! List of the kinds of exports, for code that reads, writes or describes configurations. Each kind has its own file.

use serde_json::Value;

use super::Diagnostics;
use super::export_draft::ExportDraft;
use super::iscsi::{ISCSI_KEYS, read_iscsi};
use super::key::schema_of;
use super::target_keys::TARGET_KEYS;
use super::value::Fields;
use super::vhost_blk::{VHOST_BLK_KEYS, read_vhost_blk};
use super::vhost_scsi::{VHOST_SCSI_KEYS, read_vhost_scsi};

/// A kind of export.
pub struct ExportKind {
    /// Word in the API.
    pub word: &'static str,
    /// Name of its tables in a file.
    pub table: &'static str,
    /// Description of the allowed value.
    pub example: &'static str,
    /// Name of its schema.
    pub schema: &'static str,
    /// Description.
    pub summary: &'static str,
    /// Returns its keys as a JSON schema.
    pub properties: fn() -> Value,
    /// Reads an export.
    pub(crate) read: fn(&Fields, &mut Diagnostics) -> Box<dyn ExportDraft>,
}

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

/// An iSCSI target.
pub static ISCSI: ExportKind = ExportKind {
    word: "iscsi",
    table: "iscsi",
    example: "tables with the header [[iscsi]]",
    schema: "Iscsi",
    summary: "An iSCSI target.",
    properties: || {
        let mut schema = schema_of(ISCSI_KEYS);
        let bounds = schema_of(TARGET_KEYS);
        if let (Some(all), Some(more)) = (
            schema["properties"].as_object_mut(),
            bounds["properties"].as_object(),
        ) {
            all.extend(more.clone());
        }
        schema
    },
    read: read_iscsi,
};

/// All kinds.
pub static EXPORT_KINDS: [&ExportKind; 3] = [&VHOST_BLK, &VHOST_SCSI, &ISCSI];
