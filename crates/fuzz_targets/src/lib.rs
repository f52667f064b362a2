//! Bodies of the fuzz targets: functions that accept arbitrary bytes and panic on a rule violation.
//!
//! Two drivers call them. libFuzzer (`fuzz/fuzz_targets`, `make fuzz`) needs a nightly compiler and is guided by coverage. The test
//! `fuzzing` of this crate runs with every `make test`: it replays the corpus (`fuzz/corpus`) and mutates it.
#![forbid(unsafe_code)]

pub mod cdb;
pub mod chain;
#[path = "../../scsi/tests/common/mod.rs"]
mod common;
pub mod extended_copy;
#[path = "../../qcow2/tests/common/mod.rs"]
mod images;
mod input;
pub mod iscsi_initiator;
pub mod iscsi_login;
pub mod iscsi_pdu;
pub mod iscsi_text;
pub mod nbd;
pub mod persistent_reserve_out;
pub mod qcow2_image;
pub mod shared_reservations;
pub mod vhost_user_messages;
pub mod virtio_blk_request;

/// Name and body of a target.
pub type Target = (&'static str, fn(&[u8]));

/// All targets. Each has a file in `fuzz/fuzz_targets` and a folder in `fuzz/corpus`.
pub const TARGETS: [Target; 13] = [
    ("cdb", cdb::run),
    ("chain", chain::run),
    ("extended_copy", extended_copy::run),
    ("iscsi_initiator", iscsi_initiator::run),
    ("iscsi_login", iscsi_login::run),
    ("iscsi_pdu", iscsi_pdu::run),
    ("iscsi_text", iscsi_text::run),
    ("nbd", nbd::run),
    ("persistent_reserve_out", persistent_reserve_out::run),
    ("qcow2_image", qcow2_image::run),
    ("shared_reservations", shared_reservations::run),
    ("vhost_user_messages", vhost_user_messages::run),
    ("virtio_blk_request", virtio_blk_request::run),
];
