//! A command as received from a transport, and accessors for CDB fields.

use std::sync::Arc;

use crate::lun::Lun;
use crate::nexus::Nexus;

/// Task attribute (SAM-5, 8.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TaskAttribute {
    #[default]
    Simple,
    Ordered,
    HeadOfQueue,
    Aca,
}

/// One SCSI command.
#[derive(Clone, Copy, Debug)]
pub struct Command<'a> {
    /// I_T nexus of the command: its initiator and target port.
    pub nexus: &'a Arc<Nexus>,
    /// Addressed logical unit.
    pub lun: Lun,
    /// Command descriptor block. Bytes beyond the command's length are ignored; too few are an error.
    pub cdb: &'a [u8],
    /// Order relative to other tasks.
    pub attribute: TaskAttribute,
    /// Length of the initiator's data-out, in bytes.
    pub data_out_length: u64,
    /// Size of the initiator's data-in buffer, in bytes.
    pub data_in_length: u64,
}

/// A CDB of up to 16 bytes, padded with zeroes.
pub type Cdb = [u8; 16];

/// Returns the CDB length for an operation code's group (SPC-5, 4.2.5.1), or 0 if the group has no fixed length.
pub(crate) const fn cdb_length(opcode: u8) -> usize {
    const LENGTHS: [u8; 8] = [6, 10, 10, 0, 16, 12, 0, 0];
    LENGTHS[(opcode >> 5) as usize] as usize
}

pub(crate) const fn be16(cdb: &Cdb, at: usize) -> u16 {
    u16::from_be_bytes([cdb[at], cdb[at + 1]])
}

pub(crate) const fn be24(cdb: &Cdb, at: usize) -> u32 {
    u32::from_be_bytes([0, cdb[at], cdb[at + 1], cdb[at + 2]])
}

pub(crate) const fn be32(cdb: &Cdb, at: usize) -> u32 {
    u32::from_be_bytes([cdb[at], cdb[at + 1], cdb[at + 2], cdb[at + 3]])
}

pub(crate) const fn be64(cdb: &Cdb, at: usize) -> u64 {
    (be32(cdb, at) as u64) << 32 | be32(cdb, at + 4) as u64
}

/// Operation codes (SPC-5, annex F).
#[allow(missing_docs)]
pub mod opcode {
    pub const TEST_UNIT_READY: u8 = 0x00;
    pub const REQUEST_SENSE: u8 = 0x03;
    pub const FORMAT_UNIT: u8 = 0x04;
    pub const READ_6: u8 = 0x08;
    pub const WRITE_6: u8 = 0x0a;
    pub const INQUIRY: u8 = 0x12;
    pub const MODE_SELECT_6: u8 = 0x15;
    pub const RESERVE_6: u8 = 0x16;
    pub const RELEASE_6: u8 = 0x17;
    pub const MODE_SENSE_6: u8 = 0x1a;
    pub const START_STOP_UNIT: u8 = 0x1b;
    pub const SEND_DIAGNOSTIC: u8 = 0x1d;
    pub const PREVENT_ALLOW: u8 = 0x1e;
    pub const READ_CAPACITY_10: u8 = 0x25;
    pub const READ_10: u8 = 0x28;
    pub const WRITE_10: u8 = 0x2a;
    pub const WRITE_AND_VERIFY_10: u8 = 0x2e;
    pub const VERIFY_10: u8 = 0x2f;
    pub const PRE_FETCH_10: u8 = 0x34;
    pub const SYNCHRONIZE_CACHE_10: u8 = 0x35;
    pub const READ_DEFECT_DATA_10: u8 = 0x37;
    pub const WRITE_SAME_10: u8 = 0x41;
    pub const UNMAP: u8 = 0x42;
    pub const SANITIZE: u8 = 0x48;
    pub const LOG_SENSE: u8 = 0x4d;
    pub const MODE_SELECT_10: u8 = 0x55;
    pub const RESERVE_10: u8 = 0x56;
    pub const RELEASE_10: u8 = 0x57;
    pub const MODE_SENSE_10: u8 = 0x5a;
    pub const PERSISTENT_RESERVE_IN: u8 = 0x5e;
    pub const PERSISTENT_RESERVE_OUT: u8 = 0x5f;
    pub const EXTENDED_COPY: u8 = 0x83;
    pub const RECEIVE_COPY_RESULTS: u8 = 0x84;
    pub const READ_16: u8 = 0x88;
    pub const COMPARE_AND_WRITE: u8 = 0x89;
    pub const WRITE_16: u8 = 0x8a;
    pub const ORWRITE_16: u8 = 0x8b;
    pub const WRITE_AND_VERIFY_16: u8 = 0x8e;
    pub const VERIFY_16: u8 = 0x8f;
    pub const PRE_FETCH_16: u8 = 0x90;
    pub const SYNCHRONIZE_CACHE_16: u8 = 0x91;
    pub const WRITE_SAME_16: u8 = 0x93;
    pub const WRITE_ATOMIC_16: u8 = 0x9c;
    pub const SERVICE_ACTION_IN_16: u8 = 0x9e;
    pub const REPORT_LUNS: u8 = 0xa0;
    pub const MAINTENANCE_IN: u8 = 0xa3;
    pub const MAINTENANCE_OUT: u8 = 0xa4;
    pub const READ_12: u8 = 0xa8;
    pub const WRITE_12: u8 = 0xaa;
    pub const WRITE_AND_VERIFY_12: u8 = 0xae;
    pub const VERIFY_12: u8 = 0xaf;
    pub const READ_DEFECT_DATA_12: u8 = 0xb7;
}
