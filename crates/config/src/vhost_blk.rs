//! One disk as virtio-blk: its keys.

use super::export_keys::{DEDICATED, ExportKey, ExportKind, ONE_DISK, VHOST_SOCKET, WORKERS, name};
use super::key::{Kind, RunTime};
use super::model::{BLK_QUEUES_MAX, Transport};
use super::setting::key;
use super::socket_rights::{SOCKET_GROUP, SOCKET_MODE, SOCKET_OWNER};

/// One disk as virtio-blk.
pub static VHOST_BLK: ExportKind = ExportKind {
    transport: Transport::VhostBlk,
    word: "vhost-blk",
    table: "vhost_blk",
    form: "DISK:SOCKET, then ,name=NAME or ,queues=N as needed: d0:/run/lunette/d0.sock",
    example: "tables with the header [[vhost_blk]]",
    schema: "VhostBlk",
    summary: "One disk as virtio-blk on one vhost-user socket.",
    keys: &[("virtio-blk exports", VHOST_BLK_KEYS)],
    queues: BLK_QUEUES_MAX,
    relate: |_, _| {},
    elsewhere: |key| match key {
        "read_only" => Some("vhost_blk: `read_only` is a key of the disk".to_owned()),
        _ => None,
    },
};

/// All keys of a vhost-blk export.
pub static VHOST_BLK_KEYS: &[ExportKey] = &[
    name("the disk's name"),
    ONE_DISK,
    VHOST_SOCKET,
    SOCKET_MODE,
    SOCKET_OWNER,
    SOCKET_GROUP,
    key! { "queues": Kind::Number("", 1..=BLK_QUEUES_MAX as u64); "`256`"; RunTime::ENDS_SESSION;
        "maximum number of request queues per client"; both queues
    },
    WORKERS,
    DEDICATED,
];
