//! List of the kinds of exports, for code that reads, writes or describes configurations. Each kind has its own file.

use super::export_draft::ExportKind;
pub use super::iscsi::ISCSI;
pub use super::nbd::NBD;
pub use super::vhost_blk::VHOST_BLK;
pub use super::vhost_scsi::VHOST_SCSI;

/// All kinds.
pub static EXPORT_KINDS: [&ExportKind; 4] = [&VHOST_BLK, &VHOST_SCSI, &ISCSI, &NBD];
