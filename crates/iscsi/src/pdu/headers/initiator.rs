//! Headers that initiators send (RFC 7143, 11.3, 11.5, 11.7, 11.10, 11.12, 11.14, 11.16, 11.18).

use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Bhs, FINAL, Lengths};
use crate::pdu::{BHS_LENGTH, NO_TAG, Opcode};

header! {
    /// NOP-Out (11.18).
    NopOut (Opcode::NopOut) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit, copied from the answered NOP-In.
        lun: [u8; 8],
        /// Initiator Task Tag; [`NO_TAG`] requests no answer.
        itt: U32,
        /// Target Transfer Tag of the answered NOP-In, or [`NO_TAG`].
        ttt: U32,
        /// CmdSN.
        cmd_sn: U32,
        /// ExpStatSN.
        exp_stat_sn: U32,
        /// Reserved.
        reserved_32: [u8; 16],
    }
}

impl NopOut {
    /// Creates a NOP-Out that neither answers a NOP-In nor requests an answer.
    pub fn idle() -> Self {
        NopOut {
            itt: U32::new(NO_TAG),
            ttt: U32::new(NO_TAG),
            ..NopOut::blank()
        }
    }
}

header! {
    /// SCSI Command (11.3).
    ScsiCommand (Opcode::ScsiCommand) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit.
        lun: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Expected Data Transfer Length in bytes; the write length of a bidirectional command.
        expected_length: U32,
        /// CmdSN.
        cmd_sn: U32,
        /// ExpStatSN.
        exp_stat_sn: U32,
        /// The first 16 bytes of the CDB.
        cdb: [u8; 16],
    }
}

impl ScsiCommand {
    /// R: the command reads data.
    pub const READ: u8 = 0x40;
    /// W: the command writes data.
    pub const WRITE: u8 = 0x20;
    /// Mask of the task attribute.
    pub const ATTRIBUTE: u8 = 0x07;
}

header! {
    /// Task Management Function Request (11.5).
    TaskManagementRequest (Opcode::TaskManagementRequest) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit.
        lun: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Referenced Task Tag.
        referenced_task_tag: U32,
        /// CmdSN.
        cmd_sn: U32,
        /// ExpStatSN.
        exp_stat_sn: U32,
        /// CmdSN of the referenced task.
        ref_cmd_sn: U32,
        /// ExpDataSN, for TASK REASSIGN.
        exp_data_sn: U32,
        /// Reserved.
        reserved_40: [u8; 8],
    }
}

header! {
    /// SCSI Data-Out (11.7).
    DataOut (Opcode::DataOut) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit, for solicited data.
        lun: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Target Transfer Tag of the R2T, [`NO_TAG`] for unsolicited data.
        ttt: U32,
        /// Reserved.
        reserved_24: U32,
        /// ExpStatSN.
        exp_stat_sn: U32,
        /// Reserved.
        reserved_32: U32,
        /// DataSN.
        data_sn: U32,
        /// Buffer Offset.
        buffer_offset: U32,
        /// Reserved.
        reserved_44: U32,
    }
}

header! {
    /// Text Request (11.10).
    TextRequest (Opcode::TextRequest) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit, copied from the continued Text Response.
        lun: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Target Transfer Tag; [`NO_TAG`] in the first request of a sequence.
        ttt: U32,
        /// CmdSN.
        cmd_sn: U32,
        /// ExpStatSN.
        exp_stat_sn: U32,
        /// Reserved.
        reserved_32: [u8; 16],
    }
}

header! {
    /// Login Request (11.12).
    LoginRequest (Opcode::LoginRequest) {
        /// Version-max.
        version_max: u8,
        /// Version-min.
        version_min: u8,
        /// Lengths of the segments.
        lengths: Lengths,
        /// ISID: the initiator's part of the session identifier.
        isid: [u8; 6],
        /// TSIH: 0 for a new session.
        tsih: U16,
        /// Initiator Task Tag.
        itt: U32,
        /// Connection identifier.
        cid: U16,
        /// Reserved.
        reserved_22: U16,
        /// CmdSN.
        cmd_sn: U32,
        /// ExpStatSN.
        exp_stat_sn: U32,
        /// Reserved.
        reserved_32: [u8; 16],
    }
}

impl LoginRequest {
    /// Returns the raw CSG field.
    pub fn current_stage(&self) -> u8 {
        (self.flags >> 2) & 3
    }

    /// Returns the raw NSG field.
    pub fn next_stage(&self) -> u8 {
        self.flags & 3
    }
}

header! {
    /// Logout Request (11.14).
    LogoutRequest (Opcode::LogoutRequest) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Reserved.
        reserved_8: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Connection identifier.
        cid: U16,
        /// Reserved.
        reserved_22: U16,
        /// CmdSN.
        cmd_sn: U32,
        /// ExpStatSN.
        exp_stat_sn: U32,
        /// Reserved.
        reserved_32: [u8; 16],
    }
}

header! {
    /// SNACK Request (11.16).
    SnackRequest (Opcode::SnackRequest) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit.
        lun: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Target Transfer Tag or SNACK Tag.
        ttt: U32,
        /// Reserved.
        reserved_24: U32,
        /// ExpStatSN.
        exp_stat_sn: U32,
        /// Reserved.
        reserved_32: [u8; 8],
        /// BegRun.
        begin_run: U32,
        /// RunLength.
        run_length: U32,
    }
}

impl SnackRequest {
    /// Mask of the Type field.
    pub const TYPE: u8 = 0x0f;
}
