//! How a command ends: status, sense, data and what was not transferred.

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
    /// A device's status byte; `None`: obsolete or reserved.
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

/// The difference between what a command had to transfer and what its initiator has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// They are the same.
    None,
    /// So many bytes of the initiator's buffer were not used.
    Underflow(u64),
    /// So many bytes more would have been transferred.
    Overflow(u64),
}

impl Residual {
    /// Compares what the command wants to move with what the initiator expects.
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

/// Sense data as they are sent.
#[derive(Clone, Debug)]
pub enum SenseData<'a> {
    /// Made here.
    Own(SenseBytes),
    /// The device's, or none.
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

/// The answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Status byte.
    pub status: Status,
    /// Sense data, with CHECK CONDITION always, but where they are the device's.
    pub sense: Option<Sense>,
    /// Sense data as the device of the unit has sent them; empty: none.
    pub device_sense: Box<[u8]>,
    /// Data-in, already cut to the allocation length and to the initiator's buffer.
    pub data: Vec<u8>,
    /// For the transport's residual fields.
    pub residual: Residual,
    /// Tasks that have to be aborted, on every worker, before this answer may leave (PREEMPT AND ABORT).
    pub abort: Option<Box<AbortScope>>,
}

impl Response {
    /// Sense data as they are sent; may be empty.
    pub fn sense_data(&self) -> SenseData<'_> {
        match &self.sense {
            Some(sense) => SenseData::Own(sense.encode()),
            None => SenseData::Device(&self.device_sense),
        }
    }

    /// GOOD without data.
    pub fn good() -> Response {
        Response::status(Status::Good)
    }

    /// A bare status.
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

    /// GOOD with data-in, cut to the CDB's allocation length (SPC-5, 4.2.5.6).
    pub fn data(mut data: Vec<u8>, allocation_length: usize) -> Response {
        data.truncate(allocation_length);
        Response {
            data,
            ..Response::good()
        }
    }

    /// CHECK CONDITION with sense.
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

    /// ABORTED COMMAND without a reason, for what the caller could not carry out.
    pub fn aborted() -> Response {
        Response::check(Sense::new(SenseKey::AbortedCommand, SenseCode::NONE))
    }

    /// Cuts data to the initiator's buffer and fills in the residual where it is not set yet.
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
