//! The basic header segments, field by field (RFC 7143, 11.2 to 11.19).
//!
//! Every struct is 48 bytes, unaligned and without padding, so any 48 bytes are one and a struct is its bytes.

use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{BHS_LENGTH, NO_TAG, Opcode};

/// The immediate delivery bit of byte 0.
pub const IMMEDIATE: u8 = 0x40;
/// The final bit of byte 1 (transit in Login PDUs).
pub const FINAL: u8 = 0x80;
/// The continue bit of Text and Login PDUs.
pub const CONTINUE: u8 = 0x40;

macro_rules! header {
    ($(#[$doc:meta])* $name:ident ($opcode:expr) { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name {
            /// Immediate bit and opcode.
            pub opcode: u8,
            /// Final bit and flags.
            pub flags: u8,
            $($(#[$field_doc])* pub $field: $kind,)+
        }

        const _: () = assert!(size_of::<$name>() == BHS_LENGTH);

        impl $name {
            /// The opcode that this header carries.
            pub const OPCODE: Opcode = $opcode;

            /// All zero but the opcode and the final bit.
            pub fn blank() -> Self {
                let mut header: Self = zerocopy::FromZeros::new_zeroed();
                header.opcode = $opcode.wire();
                header.flags = FINAL;
                header
            }

            /// The header that these bytes are; the opcode is the caller's to check.
            pub fn from_bhs(bhs: &Bhs) -> Self {
                zerocopy::transmute!(*bhs)
            }

            /// The header as the common form.
            pub fn to_bhs(&self) -> Bhs {
                zerocopy::transmute!(*self)
            }
        }
    };
}

/// The common form of every header (11.2.1).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Bhs {
    /// Immediate bit and opcode.
    pub opcode: u8,
    /// Final bit and flags.
    pub flags: u8,
    /// By opcode.
    pub specific: [u8; 2],
    /// TotalAHSLength in words of four bytes, DataSegmentLength in bytes.
    pub lengths: Lengths,
    /// LUN or by opcode.
    pub lun: [u8; 8],
    /// Initiator Task Tag.
    pub itt: U32,
    /// By opcode.
    pub rest: [u8; 28],
}

const _: () = assert!(size_of::<Bhs>() == BHS_LENGTH);

impl Bhs {
    /// What kind of PDU; `None` for a code that the standard does not give.
    pub fn kind(&self) -> Option<Opcode> {
        // bit 7 is reserved: ignored on receipt
        Opcode::from_wire(self.opcode & 0x3f)
    }

    /// Is the immediate delivery bit set?
    pub fn is_immediate(&self) -> bool {
        self.opcode & IMMEDIATE != 0
    }

    /// Is the final bit set?
    pub fn is_final(&self) -> bool {
        self.flags & FINAL != 0
    }

    /// The bytes of the header.
    pub fn bytes(&self) -> &[u8; BHS_LENGTH] {
        zerocopy::transmute_ref!(self)
    }
}

/// TotalAHSLength and DataSegmentLength (11.2.1.5, 11.2.1.6).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct Lengths {
    /// Length of all additional header segments in words of four bytes.
    pub ahs_words: u8,
    /// Length of the data segment in bytes, 24 bits.
    pub data: [u8; 3],
}

impl Lengths {
    /// Bytes of additional header segments.
    pub fn ahs(&self) -> usize {
        usize::from(self.ahs_words) * 4
    }

    /// Bytes of the data segment, without padding.
    pub fn data(&self) -> u32 {
        u32::from_be_bytes([0, self.data[0], self.data[1], self.data[2]])
    }

    /// Sets the length of the data segment.
    ///
    /// # Panics
    /// When it needs more than 24 bits: whoever builds a PDU has split the data.
    pub fn set_data(&mut self, length: usize) {
        assert!(
            length <= super::DATA_SEGMENT_MAX as usize,
            "data segment of {length} bytes"
        );
        let [_, high, middle, low] = (length as u32).to_be_bytes();
        self.data = [high, middle, low];
    }
}

header! {
    /// NOP-Out (11.18).
    NopOut (Opcode::NopOut) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit, copied from the NOP-In that is answered.
        lun: [u8; 8],
        /// Initiator Task Tag, [`NO_TAG`] when no answer is wanted.
        itt: U32,
        /// Target Transfer Tag of the NOP-In that is answered, else [`NO_TAG`].
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
    /// NOP-In (11.19).
    NopIn (Opcode::NopIn) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit, for a ping from the target.
        lun: [u8; 8],
        /// Initiator Task Tag of the NOP-Out that is answered, else [`NO_TAG`].
        itt: U32,
        /// Target Transfer Tag when an answer is wanted, else [`NO_TAG`].
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
        /// Expected Data Transfer Length in bytes: of the write when the command is bidirectional.
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
    /// R: the command expects data in.
    pub const READ: u8 = 0x40;
    /// W: the command expects data out.
    pub const WRITE: u8 = 0x20;
    /// Where the task attribute is.
    pub const ATTRIBUTE: u8 = 0x07;
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
        /// Data-In and R2T PDUs that were sent for the command.
        exp_data_sn: U32,
        /// Residual count of the read of a bidirectional command.
        bidirectional_residual: U32,
        /// Residual count.
        residual: U32,
    }
}

impl ScsiResponse {
    /// o: the read of a bidirectional command overflowed.
    pub const BIDIRECTIONAL_OVERFLOW: u8 = 0x10;
    /// u: the read of a bidirectional command underflowed.
    pub const BIDIRECTIONAL_UNDERFLOW: u8 = 0x08;
    /// O: overflow.
    pub const OVERFLOW: u8 = 0x04;
    /// U: underflow.
    pub const UNDERFLOW: u8 = 0x02;
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
        /// Always [`NO_TAG`].
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
    /// Text Request (11.10).
    TextRequest (Opcode::TextRequest) {
        /// Reserved.
        reserved_2: [u8; 2],
        /// Lengths of the segments.
        lengths: Lengths,
        /// Logical unit, copied from the Text Response that is continued.
        lun: [u8; 8],
        /// Initiator Task Tag.
        itt: U32,
        /// Target Transfer Tag, [`NO_TAG`] in the first of a sequence.
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
        /// Target Transfer Tag, [`NO_TAG`] in the last of a sequence.
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
    /// The raw CSG field.
    pub fn current_stage(&self) -> u8 {
        (self.flags >> 2) & 3
    }

    /// The raw NSG field.
    pub fn next_stage(&self) -> u8 {
        self.flags & 3
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
        /// TSIH: the session's, in the last response.
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
        /// Always [`NO_TAG`].
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

impl NopOut {
    /// A NOP-Out that answers nothing and wants no answer.
    pub fn idle() -> Self {
        NopOut {
            itt: U32::new(NO_TAG),
            ttt: U32::new(NO_TAG),
            ..NopOut::blank()
        }
    }
}
