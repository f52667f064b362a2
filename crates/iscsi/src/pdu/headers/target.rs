//! Headers that targets send (RFC 7143, 11.4, 11.6 to 11.9, 11.11, 11.13, 11.15, 11.17, 11.19).

use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Bhs, FINAL, Lengths};
use crate::pdu::{BHS_LENGTH, Opcode};

header! {
    /// NOP-In (11.19).
    NopIn (Opcode::NopIn) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit, for a ping from the target.
        lun: [u8; 8],
        /// Initiator Task Tag of the answered NOP-Out, or [`crate::pdu::NO_TAG`].
        itt: U32,
        /// Target Transfer Tag if an answer is requested, or [`crate::pdu::NO_TAG`].
        ttt: U32,
        /// StatSN.
        stat_sn: U32,
        /// ExpCmdSN.
        exp_cmd_sn: U32,
        /// MaxCmdSN.
        max_cmd_sn: U32,
        /// Reserved.
        reserved_36: [u8; 12],
    }
}

header! {
    /// SCSI Response (11.4).
    ScsiResponse (Opcode::ScsiResponse) {
        /// iSCSI service response: 0 command completed at target, 1 target failure.
        response: u8,
        /// SCSI status.
        status: u8,
        /// Lengths of the segments.
        lengths: Lengths,
        /// Reserved.
        reserved_8: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// SNACK Tag.
        snack_tag: U32,
        /// StatSN.
        stat_sn: U32,
        /// ExpCmdSN.
        exp_cmd_sn: U32,
        /// MaxCmdSN.
        max_cmd_sn: U32,
        /// Number of Data-In and R2T PDUs sent for the command.
        exp_data_sn: U32,
        /// Residual count of the read part of a bidirectional command.
        bidirectional_residual: U32,
        /// Residual count.
        residual: U32,
    }
}

impl ScsiResponse {
    /// o: the read part of a bidirectional command overflowed.
    pub const BIDIRECTIONAL_OVERFLOW: u8 = 0x10;
    /// u: the read part of a bidirectional command underflowed.
    pub const BIDIRECTIONAL_UNDERFLOW: u8 = 0x08;
    /// O: overflow.
    pub const OVERFLOW: u8 = 0x04;
    /// U: underflow.
    pub const UNDERFLOW: u8 = 0x02;
}

header! {
    /// Task Management Function Response (11.6).
    TaskManagementResponse (Opcode::TaskManagementResponse) {
        /// Outcome.
        response: u8,
        /// Reserved.
        reserved_3: u8,
        /// Lengths of the segments.
        lengths: Lengths,
        /// Reserved.
        reserved_8: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Reserved.
        reserved_20: U32,
        /// StatSN.
        stat_sn: U32,
        /// ExpCmdSN.
        exp_cmd_sn: U32,
        /// MaxCmdSN.
        max_cmd_sn: U32,
        /// Reserved.
        reserved_36: [u8; 12],
    }
}

header! {
    /// SCSI Data-In (11.7).
    DataIn (Opcode::DataIn) {
        /// Reserved.
        reserved_2: u8,
        /// SCSI status, when the S bit is set.
        status: u8,
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit, when the A bit is set.
        lun: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Target Transfer Tag, when the A bit is set.
        ttt: U32,
        /// StatSN, when the S bit is set.
        stat_sn: U32,
        /// ExpCmdSN.
        exp_cmd_sn: U32,
        /// MaxCmdSN.
        max_cmd_sn: U32,
        /// DataSN.
        data_sn: U32,
        /// Buffer Offset.
        buffer_offset: U32,
        /// Residual count, when the S bit is set.
        residual: U32,
    }
}

impl DataIn {
    /// A: acknowledge.
    pub const ACKNOWLEDGE: u8 = 0x40;
    /// O: overflow.
    pub const OVERFLOW: u8 = 0x04;
    /// U: underflow.
    pub const UNDERFLOW: u8 = 0x02;
    /// S: the PDU carries the status.
    pub const STATUS: u8 = 0x01;
}

header! {
    /// Ready To Transfer (11.8).
    ReadyToTransfer (Opcode::ReadyToTransfer) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit.
        lun: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Target Transfer Tag.
        ttt: U32,
        /// StatSN: the next one, not advanced.
        stat_sn: U32,
        /// ExpCmdSN.
        exp_cmd_sn: U32,
        /// MaxCmdSN.
        max_cmd_sn: U32,
        /// R2TSN.
        r2t_sn: U32,
        /// Buffer Offset.
        buffer_offset: U32,
        /// Desired Data Transfer Length.
        desired_length: U32,
    }
}

header! {
    /// Asynchronous Message (11.9).
    AsyncMessage (Opcode::AsyncMessage) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit, for SCSI events.
        lun: [u8; 8],
        /// Always [`crate::pdu::NO_TAG`].
        itt: U32,
        /// Reserved.
        reserved_20: U32,
        /// StatSN.
        stat_sn: U32,
        /// ExpCmdSN.
        exp_cmd_sn: U32,
        /// MaxCmdSN.
        max_cmd_sn: U32,
        /// AsyncEvent.
        event: u8,
        /// AsyncVCode.
        vendor_code: u8,
        /// Parameter1.
        parameter_1: U16,
        /// Parameter2.
        parameter_2: U16,
        /// Parameter3.
        parameter_3: U16,
        /// Reserved.
        reserved_44: U32,
    }
}

header! {
    /// Text Response (11.11).
    TextResponse (Opcode::TextResponse) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit.
        lun: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Target Transfer Tag; [`crate::pdu::NO_TAG`] in the last response of a sequence.
        ttt: U32,
        /// StatSN.
        stat_sn: U32,
        /// ExpCmdSN.
        exp_cmd_sn: U32,
        /// MaxCmdSN.
        max_cmd_sn: U32,
        /// Reserved.
        reserved_36: [u8; 12],
    }
}

header! {
    /// Login Response (11.13).
    LoginResponse (Opcode::LoginResponse) {
        /// Version-max.
        version_max: u8,
        /// Version-active.
        version_active: u8,
        /// Lengths of the segments.
        lengths: Lengths,
        /// ISID, copied from the request.
        isid: [u8; 6],
        /// TSIH of the session, set in the last response.
        tsih: U16,
        /// Initiator Task Tag.
        itt: U32,
        /// Reserved.
        reserved_20: U32,
        /// StatSN.
        stat_sn: U32,
        /// ExpCmdSN.
        exp_cmd_sn: U32,
        /// MaxCmdSN.
        max_cmd_sn: U32,
        /// Status-Class and Status-Detail.
        status: U16,
        /// Reserved.
        reserved_38: [u8; 10],
    }
}

header! {
    /// Logout Response (11.15).
    LogoutResponse (Opcode::LogoutResponse) {
        /// Outcome.
        response: u8,
        /// Reserved.
        reserved_3: u8,
        /// Lengths of the segments.
        lengths: Lengths,
        /// Reserved.
        reserved_8: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Reserved.
        reserved_20: U32,
        /// StatSN.
        stat_sn: U32,
        /// ExpCmdSN.
        exp_cmd_sn: U32,
        /// MaxCmdSN.
        max_cmd_sn: U32,
        /// Reserved.
        reserved_36: U32,
        /// Time2Wait in seconds.
        time_to_wait: U16,
        /// Time2Retain in seconds.
        time_to_retain: U16,
        /// Reserved.
        reserved_44: U32,
    }
}

header! {
    /// Reject (11.17).
    Reject (Opcode::Reject) {
        /// Reason.
        reason: u8,
        /// Reserved.
        reserved_3: u8,
        /// Lengths of the segments.
        lengths: Lengths,
        /// Reserved.
        reserved_8: [u8; 8],
        /// Always [`crate::pdu::NO_TAG`].
        itt: U32,
        /// Reserved.
        reserved_20: U32,
        /// StatSN.
        stat_sn: U32,
        /// ExpCmdSN.
        exp_cmd_sn: U32,
        /// MaxCmdSN.
        max_cmd_sn: U32,
        /// DataSN or R2TSN.
        data_sn: U32,
        /// Reserved.
        reserved_40: [u8; 8],
    }
}
