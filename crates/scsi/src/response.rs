//! The end of a command: status, sense, data and residual.

use crate::sense::{Sense, SenseBytes, SenseCode, SenseKey};
use crate::task_management::AbortScope;

/// SCSI status (SAM-5, table 43).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Status {
    Good = 0x00,
    CheckCondition = 0x02,
    ConditionMet = 0x04,
    Busy = 0x08,
    ReservationConflict = 0x18,
    TaskSetFull = 0x28,
    AcaActive = 0x30,
    TaskAborted = 0x40,
}

impl Status {
    /// Returns a device's status; `None` if the byte is obsolete or reserved.
    pub const fn from_byte(byte: u8) -> Option<Status> {
        Some(match byte {
            0x00 => Status::Good,
            0x02 => Status::CheckCondition,
            0x04 => Status::ConditionMet,
            0x08 => Status::Busy,
            0x18 => Status::ReservationConflict,
            0x28 => Status::TaskSetFull,
            0x30 => Status::AcaActive,
            0x40 => Status::TaskAborted,
            _ => return None,
        })
    }
}

/// Difference between the transfer length of a command and the initiator's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// No difference.
    None,
    /// Bytes of the initiator's buffer that were not used.
    Underflow(u64),
    /// Bytes that did not fit into the initiator's buffer.
    Overflow(u64),
}

impl Residual {
    /// Compares the command's transfer length with the length that the initiator expects.
    #[inline]
    pub const fn between(wanted: u64, expected: u64) -> Residual {
        if wanted == expected {
            Residual::None
        } else if wanted < expected {
            Residual::Underflow(expected - wanted)
        } else {
            Residual::Overflow(wanted - expected)
        }
    }
}

/// Sense data for transmission.
#[derive(Clone, Debug)]
pub enum SenseData<'a> {
    /// Sense data that this target created.
    Own(SenseBytes),
    /// Sense data from the device, or empty.
    Device(&'a [u8]),
}

impl std::ops::Deref for SenseData<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            SenseData::Own(bytes) => bytes,
            SenseData::Device(bytes) => bytes,
        }
    }
}

/// Response to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Status byte.
    pub status: Status,
    /// Sense data. Set with every CHECK CONDITION, unless it comes from the device.
    pub sense: Option<Sense>,
    /// Sense data from the unit's device; empty if none.
    pub device_sense: Box<[u8]>,
    /// Data-in, already cut to the allocation length and to the initiator's buffer.
    pub data: Vec<u8>,
    /// Value for the transport's residual fields.
    pub residual: Residual,
    /// Tasks to abort, on every worker, before this response may leave (PREEMPT AND ABORT).
    pub abort: Option<Box<AbortScope>>,
}

impl Response {
    /// Returns the sense data for transmission; may be empty.
    pub fn sense_data(&self) -> SenseData<'_> {
        match &self.sense {
            Some(sense) => SenseData::Own(sense.encode()),
            None => SenseData::Device(&self.device_sense),
        }
    }

    /// Returns true if the response is to be counted as an error. A unit attention is none, and neither is the refusal of a command, field
    /// or unit that is not there: initiators find out by such commands which ones are.
    pub fn is_error(&self) -> bool {
        match self.status {
            Status::Good | Status::ConditionMet => false,
            Status::CheckCondition => self.sense.is_none_or(|sense| {
                let is_refusal = sense.key == SenseKey::IllegalRequest
                    && matches!(
                        sense.code,
                        SenseCode::INVALID_OPCODE
                            | SenseCode::INVALID_FIELD_IN_CDB
                            | SenseCode::LOGICAL_UNIT_NOT_SUPPORTED
                            | SenseCode::SAVING_NOT_SUPPORTED
                    );
                !is_refusal && sense.key != SenseKey::UnitAttention
            }),
            _ => true,
        }
    }

    /// Creates GOOD without data.
    pub fn good() -> Response {
        Response::status(Status::Good)
    }

    /// Creates a response with a status only.
    pub fn status(status: Status) -> Response {
        Response {
            status,
            sense: None,
            device_sense: Box::default(),
            data: Vec::new(),
            residual: Residual::None,
            abort: None,
        }
    }

    /// Creates GOOD with data-in, cut to the CDB's allocation length (SPC-5, 4.2.5.6).
    pub fn data(mut data: Vec<u8>, allocation_length: usize) -> Response {
        data.truncate(allocation_length);
        Response {
            data,
            ..Response::good()
        }
    }

    /// Creates CHECK CONDITION with sense data.
    pub fn check(sense: Sense) -> Response {
        Response {
            status: Status::CheckCondition,
            sense: Some(sense),
            device_sense: Box::default(),
            data: Vec::new(),
            residual: Residual::None,
            abort: None,
        }
    }

    /// Creates ABORTED COMMAND without a reason, for a plan that the caller could not execute.
    pub fn aborted() -> Response {
        Response::check(Sense::new(SenseKey::AbortedCommand, SenseCode::NONE))
    }

    /// Cuts data to the initiator's buffer and sets the residual if it is not set yet.
    pub(crate) fn fit(mut self, wanted_out: u64, expected_in: u64, expected_out: u64) -> Response {
        if self.residual == Residual::None {
            let ends_well = matches!(self.status, Status::Good | Status::ConditionMet);
            let wanted_out = if ends_well { wanted_out } else { 0 };
            let wanted = wanted_out.max(self.data.len() as u64);
            self.residual = Residual::between(wanted, expected_in.max(expected_out));
        }
        self.data
            .truncate(usize::try_from(expected_in).unwrap_or(usize::MAX));
        self
    }
}

impl From<Sense> for Response {
    fn from(sense: Sense) -> Response {
        Response::check(sense)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_by_which_initiators_find_out_are_no_errors() {
        let is_error = |key, code| Response::check(Sense::new(key, code)).is_error();
        let illegal = SenseKey::IllegalRequest;
        assert!(!Response::good().is_error());
        assert!(!Response::status(Status::ConditionMet).is_error());
        assert!(!is_error(SenseKey::UnitAttention, SenseCode::POWER_ON));
        assert!(!is_error(illegal, SenseCode::INVALID_OPCODE));
        assert!(!is_error(illegal, SenseCode::INVALID_FIELD_IN_CDB));
        assert!(!is_error(illegal, SenseCode::LOGICAL_UNIT_NOT_SUPPORTED));
        assert!(is_error(illegal, SenseCode::LBA_OUT_OF_RANGE));
        assert!(is_error(SenseKey::MediumError, SenseCode::WRITE_ERROR));
        assert!(is_error(SenseKey::DataProtect, SenseCode::WRITE_PROTECTED));
        assert!(is_error(SenseKey::NotReady, SenseCode::MEDIUM_NOT_PRESENT));
        assert!(Response::status(Status::ReservationConflict).is_error());
        assert!(Response::status(Status::Busy).is_error());
    }
}
