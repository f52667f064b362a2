//! Sense data: the reason for the end of a command (SPC-5, 4.4). A small `Copy` value, encoded last.
//!
//! The format (fixed 70h or descriptor 72h) depends on D_SENSE in the logical unit's control mode page, so it is part of the value.
//! [`SenseCode`] lists every additional sense code in use.

use block::{DeviceSense, IoError, IoErrorKind};

/// Sense key (SPC-5, table 48).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum SenseKey {
    NoSense = 0x0,
    RecoveredError = 0x1,
    NotReady = 0x2,
    MediumError = 0x3,
    HardwareError = 0x4,
    IllegalRequest = 0x5,
    UnitAttention = 0x6,
    DataProtect = 0x7,
    CopyAborted = 0xa,
    AbortedCommand = 0xb,
    Miscompare = 0xe,
    Completed = 0xf,
}

impl SenseKey {
    /// Returns a device's sense key; `None` if block devices do not use it (blank check, vendor specific, volume overflow, reserved).
    pub const fn from_byte(byte: u8) -> Option<SenseKey> {
        Some(match byte {
            0x0 => SenseKey::NoSense,
            0x1 => SenseKey::RecoveredError,
            0x2 => SenseKey::NotReady,
            0x3 => SenseKey::MediumError,
            0x4 => SenseKey::HardwareError,
            0x5 => SenseKey::IllegalRequest,
            0x6 => SenseKey::UnitAttention,
            0x7 => SenseKey::DataProtect,
            0xa => SenseKey::CopyAborted,
            0xb => SenseKey::AbortedCommand,
            0xe => SenseKey::Miscompare,
            0xf => SenseKey::Completed,
            _ => return None,
        })
    }
}

/// Additional sense code and its qualifier: `0xCCQQ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SenseCode(pub u16);

#[allow(missing_docs)]
impl SenseCode {
    pub const NONE: SenseCode = SenseCode(0x0000);
    pub const SANITIZE_IN_PROGRESS_INFO: SenseCode = SenseCode(0x0016);
    pub const LOGICAL_UNIT_NOT_READY: SenseCode = SenseCode(0x0400);
    pub const BECOMING_READY: SenseCode = SenseCode(0x0401);
    pub const INITIALIZING_COMMAND_REQUIRED: SenseCode = SenseCode(0x0402);
    pub const FORMAT_IN_PROGRESS: SenseCode = SenseCode(0x0404);
    pub const ASYMMETRIC_TRANSITION: SenseCode = SenseCode(0x040a);
    pub const PORT_STANDBY: SenseCode = SenseCode(0x040b);
    pub const PORT_UNAVAILABLE: SenseCode = SenseCode(0x040c);
    pub const SANITIZE_IN_PROGRESS: SenseCode = SenseCode(0x041b);
    pub const COMMUNICATION_FAILURE: SenseCode = SenseCode(0x0800);
    pub const UNREACHABLE_COPY_TARGET: SenseCode = SenseCode(0x0804);
    pub const WRITE_ERROR: SenseCode = SenseCode(0x0c00);
    pub const INSUFFICIENT_RESOURCES_COPY: SenseCode = SenseCode(0x5503);
    pub const COPY_TARGET_NOT_REACHABLE: SenseCode = SenseCode(0x0d02);
    pub const INVALID_FIELD_IN_INFORMATION_UNIT: SenseCode = SenseCode(0x0e03);
    pub const UNRECOVERED_READ_ERROR: SenseCode = SenseCode(0x1100);
    pub const PARAMETER_LIST_LENGTH_ERROR: SenseCode = SenseCode(0x1a00);
    pub const DEFECT_LIST_NOT_FOUND: SenseCode = SenseCode(0x1c00);
    pub const MISCOMPARE_DURING_VERIFY: SenseCode = SenseCode(0x1d00);
    pub const INVALID_OPCODE: SenseCode = SenseCode(0x2000);
    pub const LBA_OUT_OF_RANGE: SenseCode = SenseCode(0x2100);
    pub const INVALID_FIELD_IN_CDB: SenseCode = SenseCode(0x2400);
    pub const LOGICAL_UNIT_NOT_SUPPORTED: SenseCode = SenseCode(0x2500);
    pub const INVALID_FIELD_IN_PARAMETER_LIST: SenseCode = SenseCode(0x2600);
    pub const PARAMETER_VALUE_INVALID: SenseCode = SenseCode(0x2602);
    pub const INVALID_RELEASE_OF_RESERVATION: SenseCode = SenseCode(0x2604);
    pub const TOO_MANY_TARGET_DESCRIPTORS: SenseCode = SenseCode(0x2606);
    pub const UNSUPPORTED_TARGET_DESCRIPTOR: SenseCode = SenseCode(0x2607);
    pub const TOO_MANY_SEGMENT_DESCRIPTORS: SenseCode = SenseCode(0x2608);
    pub const UNSUPPORTED_SEGMENT_DESCRIPTOR: SenseCode = SenseCode(0x2609);
    pub const INLINE_DATA_LENGTH_EXCEEDED: SenseCode = SenseCode(0x260b);
    pub const INVALID_COPY_OPERATION: SenseCode = SenseCode(0x260c);
    pub const WRITE_PROTECTED: SenseCode = SenseCode(0x2700);
    pub const SPACE_ALLOCATION_FAILED: SenseCode = SenseCode(0x2707);
    /// COMMAND TIMEOUT DURING PROCESSING.
    pub const COMMAND_TIMEOUT: SenseCode = SenseCode(0x2e02);
    pub const MEDIUM_MAY_HAVE_CHANGED: SenseCode = SenseCode(0x2800);
    pub const POWER_ON: SenseCode = SenseCode(0x2900);
    pub const BUS_DEVICE_RESET: SenseCode = SenseCode(0x2903);
    pub const I_T_NEXUS_LOSS: SenseCode = SenseCode(0x2907);
    pub const MODE_PARAMETERS_CHANGED: SenseCode = SenseCode(0x2a01);
    pub const RESERVATIONS_PREEMPTED: SenseCode = SenseCode(0x2a03);
    pub const RESERVATIONS_RELEASED: SenseCode = SenseCode(0x2a04);
    pub const REGISTRATIONS_PREEMPTED: SenseCode = SenseCode(0x2a05);
    pub const ASYMMETRIC_STATE_CHANGED: SenseCode = SenseCode(0x2a06);
    pub const CAPACITY_CHANGED: SenseCode = SenseCode(0x2a09);
    pub const COMMAND_SEQUENCE_ERROR: SenseCode = SenseCode(0x2c00);
    pub const MEDIUM_FORMAT_CORRUPTED: SenseCode = SenseCode(0x3100);
    pub const FORMAT_COMMAND_FAILED: SenseCode = SenseCode(0x3101);
    pub const SANITIZE_FAILED: SenseCode = SenseCode(0x3103);
    pub const SAVING_NOT_SUPPORTED: SenseCode = SenseCode(0x3900);
    pub const MEDIUM_NOT_PRESENT: SenseCode = SenseCode(0x3a00);
    pub const INQUIRY_DATA_CHANGED: SenseCode = SenseCode(0x3f03);
    pub const LUNS_CHANGED: SenseCode = SenseCode(0x3f0e);
    pub const INTERNAL_TARGET_FAILURE: SenseCode = SenseCode(0x4400);
    pub const MEDIUM_REMOVAL_PREVENTED: SenseCode = SenseCode(0x5302);
    pub const INSUFFICIENT_REGISTRATION_RESOURCES: SenseCode = SenseCode(0x5504);
    pub const INVALID_MESSAGE: SenseCode = SenseCode(0x4900);
    pub const DATA_PHASE_ERROR: SenseCode = SenseCode(0x4b00);
}

/// Sense-key specific bytes (SPC-5, 4.4.2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SenseSpecific {
    /// Byte (and bit) at fault in the CDB or the parameter list.
    Field {
        /// The field is in the CDB, otherwise in the parameter list.
        in_cdb: bool,
        /// Byte at fault.
        byte: u16,
        /// Highest bit at fault, if the field is smaller than its byte.
        bit: Option<u8>,
    },
    /// Progress of a background operation, in 65,536ths.
    Progress(u16),
    /// Segment and byte at fault in an EXTENDED COPY parameter list.
    Segment {
        /// The pointer is relative to the segment descriptor, not to the list.
        descriptor: bool,
        /// Byte at fault.
        byte: u16,
    },
}

/// Sense data as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// Sense key.
    pub key: SenseKey,
    /// Additional sense code and qualifier.
    pub code: SenseCode,
    /// The INFORMATION field: an LBA, or the byte of a miscompare.
    pub information: Option<u64>,
    /// Sense-key specific field.
    pub specific: Option<SenseSpecific>,
    /// Encoded in descriptor format.
    pub descriptor_format: bool,
}

/// Maximum length of the result of [`Sense::encode`], in bytes.
pub const SENSE_LENGTH_MAX: usize = 28;

/// Encoded sense data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenseBytes {
    bytes: [u8; SENSE_LENGTH_MAX],
    length: usize,
}

impl std::ops::Deref for SenseBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or(&self.bytes)
    }
}

impl Sense {
    /// Creates sense data with key and code only.
    pub const fn new(key: SenseKey, code: SenseCode) -> Sense {
        Sense {
            key,
            code,
            information: None,
            specific: None,
            descriptor_format: false,
        }
    }

    /// Creates sense data with ILLEGAL REQUEST and a code.
    pub const fn illegal_request(code: SenseCode) -> Sense {
        Sense::new(SenseKey::IllegalRequest, code)
    }

    /// Creates INVALID FIELD IN CDB with a pointer to a byte.
    pub const fn cdb_field(byte: u16) -> Sense {
        Sense::field(SenseCode::INVALID_FIELD_IN_CDB, true, byte, None)
    }

    /// Creates INVALID FIELD IN CDB with a pointer to the highest bit of a field within a byte.
    pub const fn cdb_bit(byte: u16, bit: u8) -> Sense {
        Sense::field(SenseCode::INVALID_FIELD_IN_CDB, true, byte, Some(bit))
    }

    /// Creates INVALID FIELD IN PARAMETER LIST with a pointer to a byte.
    pub const fn parameter_field(byte: u16) -> Sense {
        Sense::field(
            SenseCode::INVALID_FIELD_IN_PARAMETER_LIST,
            false,
            byte,
            None,
        )
    }

    /// Creates INVALID FIELD IN PARAMETER LIST with a pointer to the highest bit of a field within a byte.
    pub const fn parameter_bit(byte: u16, bit: u8) -> Sense {
        Sense::field(
            SenseCode::INVALID_FIELD_IN_PARAMETER_LIST,
            false,
            byte,
            Some(bit),
        )
    }

    const fn field(code: SenseCode, in_cdb: bool, byte: u16, bit: Option<u8>) -> Sense {
        let mut sense = Sense::illegal_request(code);
        sense.specific = Some(SenseSpecific::Field { in_cdb, byte, bit });
        sense
    }

    /// Adds an INFORMATION field.
    #[must_use]
    pub const fn with_information(mut self, information: u64) -> Sense {
        self.information = Some(information);
        self
    }

    /// Adds sense-key specific bytes.
    #[must_use]
    pub const fn with_specific(mut self, specific: SenseSpecific) -> Sense {
        self.specific = Some(specific);
        self
    }

    /// Maps a failed I/O to sense data; the only place that does so. Sense data of a SCSI device is passed through.
    pub const fn of_io_error(error: IoError) -> Sense {
        if let Some(DeviceSense {
            key,
            code,
            qualifier,
        }) = error.sense
            && let Some(key) = SenseKey::from_byte(key)
        {
            return Sense::new(key, SenseCode(u16::from_be_bytes([code, qualifier])));
        }
        let (key, code) = match error.kind {
            IoErrorKind::OutOfRange => (SenseKey::IllegalRequest, SenseCode::LBA_OUT_OF_RANGE),
            IoErrorKind::ReadOnly => (SenseKey::DataProtect, SenseCode::WRITE_PROTECTED),
            IoErrorKind::Unsupported => (SenseKey::IllegalRequest, SenseCode::INVALID_OPCODE),
            IoErrorKind::NoSpace => (SenseKey::DataProtect, SenseCode::SPACE_ALLOCATION_FAILED),
            IoErrorKind::ReadMedium => (SenseKey::MediumError, SenseCode::UNRECOVERED_READ_ERROR),
            IoErrorKind::WriteMedium => (SenseKey::MediumError, SenseCode::WRITE_ERROR),
            IoErrorKind::ClientMemory => (SenseKey::AbortedCommand, SenseCode::DATA_PHASE_ERROR),
            IoErrorKind::Offline => (SenseKey::NotReady, SenseCode::LOGICAL_UNIT_NOT_READY),
            IoErrorKind::Closed => (SenseKey::NotReady, SenseCode::SANITIZE_IN_PROGRESS),
            IoErrorKind::Cancelled => (SenseKey::AbortedCommand, SenseCode::NONE),
            IoErrorKind::Miscompare => (SenseKey::Miscompare, SenseCode::MISCOMPARE_DURING_VERIFY),
            IoErrorKind::TimedOut => (SenseKey::AbortedCommand, SenseCode::COMMAND_TIMEOUT),
        };
        Sense::new(key, code)
    }

    /// Encodes the sense data in its format.
    pub fn encode(&self) -> SenseBytes {
        if self.descriptor_format {
            self.encode_descriptor()
        } else {
            self.encode_fixed()
        }
    }

    /// Encodes fixed format, 70h, 18 bytes (SPC-5, 4.4.3).
    fn encode_fixed(&self) -> SenseBytes {
        let mut bytes = [0; SENSE_LENGTH_MAX];
        bytes[0] = 0x70;
        bytes[2] = self.key as u8;
        if let Some(information) = self.information
            && let Ok(information) = u32::try_from(information)
        {
            bytes[0] |= 0x80;
            bytes[3..7].copy_from_slice(&information.to_be_bytes());
        }
        bytes[7] = 10;
        bytes[12..14].copy_from_slice(&self.code.0.to_be_bytes());
        if let Some(specific) = self.specific {
            bytes[15..18].copy_from_slice(&specific.encode());
        }
        SenseBytes { bytes, length: 18 }
    }

    /// Encodes descriptor format, 72h, with an information and a sense-key specific descriptor (SPC-5, 4.4.2).
    fn encode_descriptor(&self) -> SenseBytes {
        let mut bytes = [0; SENSE_LENGTH_MAX];
        bytes[0] = 0x72;
        bytes[1] = self.key as u8;
        bytes[2..4].copy_from_slice(&self.code.0.to_be_bytes());
        let mut length = 8;
        if let Some(information) = self.information {
            bytes[8..12].copy_from_slice(&[0x00, 0x0a, 0x80, 0x00]);
            bytes[12..20].copy_from_slice(&information.to_be_bytes());
            length = 20;
        }
        if let Some(specific) = self.specific {
            let mut descriptor = [0x02, 0x06, 0, 0, 0, 0, 0, 0];
            descriptor[4..7].copy_from_slice(&specific.encode());
            bytes[length..length + 8].copy_from_slice(&descriptor);
            length += 8;
        }
        bytes[7] = (length - 8) as u8;
        SenseBytes { bytes, length }
    }
}

impl SenseSpecific {
    fn encode(self) -> [u8; 3] {
        let (flags, value) = match self {
            SenseSpecific::Field { in_cdb, byte, bit } => {
                let bit = bit.map_or(0, |bit| 0x08 | (bit & 0x07));
                (if in_cdb { 0x40 } else { 0 } | bit, byte)
            }
            SenseSpecific::Progress(progress) => (0, progress),
            SenseSpecific::Segment { descriptor, byte } => {
                (if descriptor { 0x20 } else { 0 }, byte)
            }
        };
        let [high, low] = value.to_be_bytes();
        [0x80 | flags, high, low]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_field_in_cdb_in_fixed_format_points_to_byte_and_bit() {
        assert_eq!(
            *Sense::cdb_bit(1, 7).encode(),
            [
                0x70, 0, 0x05, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0x00, 0, 0xcf, 0x00, 0x01
            ]
        );
        assert_eq!(
            *Sense::parameter_field(4).encode(),
            [
                0x70, 0, 0x05, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x26, 0x00, 0, 0x80, 0x00, 0x04
            ]
        );
    }

    #[test]
    fn descriptor_format_carries_information_and_specific_descriptors() {
        let mut sense = Sense::cdb_field(2).with_information(0x1_0000_0000);
        sense.descriptor_format = true;
        assert_eq!(
            *sense.encode(),
            [
                0x72, 0x05, 0x24, 0x00, 0, 0, 0, 20, // header
                0x00, 0x0a, 0x80, 0x00, 0, 0, 0, 1, 0, 0, 0, 0, // information
                0x02, 0x06, 0, 0, 0xc0, 0x00, 0x02, 0, // sense-key specific
            ]
        );
    }

    #[test]
    fn information_beyond_four_bytes_leaves_valid_clear_in_fixed_format() {
        let sense = Sense::new(SenseKey::Miscompare, SenseCode::MISCOMPARE_DURING_VERIFY);
        let small = sense.with_information(512).encode();
        assert_eq!(small[..7], [0xf0, 0, 0x0e, 0, 0, 2, 0]);
        let large = sense.with_information(1 << 32).encode();
        assert_eq!(large[..7], [0x70, 0, 0x0e, 0, 0, 0, 0]);
    }

    #[test]
    fn io_errors_have_the_sense_of_the_standard() {
        let wire = |kind: IoErrorKind| {
            let bytes = Sense::of_io_error(kind.into()).encode();
            (bytes[2], bytes[12], bytes[13])
        };
        assert_eq!(wire(IoErrorKind::OutOfRange), (0x05, 0x21, 0x00));
        assert_eq!(wire(IoErrorKind::ReadOnly), (0x07, 0x27, 0x00));
        assert_eq!(wire(IoErrorKind::NoSpace), (0x07, 0x27, 0x07));
        assert_eq!(wire(IoErrorKind::ReadMedium), (0x03, 0x11, 0x00));
        assert_eq!(wire(IoErrorKind::WriteMedium), (0x03, 0x0c, 0x00));
        assert_eq!(wire(IoErrorKind::Offline), (0x02, 0x04, 0x00));
        assert_eq!(wire(IoErrorKind::Closed), (0x02, 0x04, 0x1b));
        assert_eq!(wire(IoErrorKind::TimedOut), (0x0b, 0x2e, 0x02));
    }

    #[test]
    fn device_sense_is_passed_on_if_its_key_is_a_block_devices() {
        let wire = |key| {
            let sense = DeviceSense {
                key,
                code: 0x44,
                qualifier: 0x0b,
            };
            let error = IoError::with_sense(IoErrorKind::ReadMedium, sense, 0);
            let bytes = Sense::of_io_error(error).encode();
            (bytes[2], bytes[12], bytes[13])
        };
        for key in (0..16).filter(|key| ![0x8, 0x9, 0xc, 0xd].contains(key)) {
            assert_eq!(wire(key), (key, 0x44, 0x0b));
        }
        assert_eq!(wire(0x8), (0x03, 0x11, 0x00));
        assert_eq!(wire(0x1f), (0x03, 0x11, 0x00));
    }
}
