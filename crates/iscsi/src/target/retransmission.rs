//! Retransmission buffer for error recovery levels 1 and 2 (RFC 7143, 7.1.4 and 11.16): unacknowledged responses and the
//! read data that belongs to them.
//!
//! The buffer is bounded: the number of responses is limited, and so is the data of each. Read data beyond
//! [`crate::Limits::retransmission_bytes`] is not stored, and a SNACK for it is rejected. The initiator then ends the task or
//! reassigns it to another connection.

use std::collections::VecDeque;
use std::ops::Range;

use zerocopy::big_endian::U32;

use super::full_feature::{FullFeature, Io};
use super::reassign::{Reassignable, TaskState};
use super::tasks::{Command, Pending};
use crate::pdu::{
    Bhs, NO_TAG, NopIn, ReadyToTransfer, RejectReason, SnackRequest, SnackType, encode,
};
use crate::serial::before;

/// Maximum stored data segment of a response in bytes, larger than any sense data. The initiator controls the size of ping
/// and text responses.
const SEGMENT_BYTES_MAX: usize = 4096;

/// Read data of a command, as sent.
#[derive(Debug, Default)]
pub(crate) struct SentData {
    bytes: Vec<u8>,
    /// Data-In PDUs by DataSN.
    pdus: Vec<(Bhs, Range<usize>)>,
    /// The data exceeded the limit and is incomplete.
    is_cut: bool,
}

impl SentData {
    /// Returns the data if it is complete.
    pub fn whole(&self) -> Option<&[u8]> {
        (!self.is_cut).then_some(&self.bytes)
    }
}

/// An unacknowledged response.
#[derive(Debug)]
struct UnacknowledgedResponse {
    stat_sn: u32,
    header: Bhs,
    segment: Box<[u8]>,
    /// Set for a SCSI command.
    command: Option<Box<AnsweredCommand>>,
}

/// A command with a sent response.
#[derive(Debug)]
pub(crate) struct AnsweredCommand {
    pub command: Command,
    pub outcome: Pending,
    pub data: Option<Box<SentData>>,
}

/// Stored responses and data of a connection.
#[derive(Debug, Default)]
pub(crate) struct RetransmissionBuffer {
    responses: VecDeque<UnacknowledgedResponse>,
    bytes: usize,
}

impl RetransmissionBuffer {
    /// Drops all responses before `exp_stat_sn`.
    fn acknowledge(&mut self, exp_stat_sn: u32) {
        while let Some(first) = self.responses.front()
            && before(first.stat_sn, exp_stat_sn)
        {
            self.drop_first();
        }
    }

    fn drop_first(&mut self) {
        let gone = self.responses.pop_front();
        let data = gone.and_then(|gone| gone.command?.data);
        self.bytes -= data.map_or(0, |data| data.bytes.len());
    }

    fn push(&mut self, response: UnacknowledgedResponse, most: usize) {
        self.responses.push_back(response);
        if self.responses.len() > most {
            self.drop_first();
        }
    }

    fn data_of(&self, itt: u32) -> Option<&SentData> {
        let commands = self.responses.iter().rev();
        let mut commands = commands.filter_map(|response| response.command.as_deref());
        let found = commands.find(|answered| answered.command.itt == itt)?;
        found.data.as_deref()
    }

    /// Removes all responses and returns their commands.
    fn take_commands(&mut self) -> impl Iterator<Item = AnsweredCommand> + '_ {
        self.bytes = 0;
        let responses = self.responses.drain(..);
        responses.filter_map(|response| response.command.map(|command| *command))
    }
}

/// Returns the header with the current command window. ExpCmdSN and MaxCmdSN have the same offset in all responses.
fn with_window(header: &Bhs, (exp_cmd_sn, max_cmd_sn): (U32, U32)) -> Bhs {
    let mut fields = NopIn::from_bhs(header);
    (fields.exp_cmd_sn, fields.max_cmd_sn) = (exp_cmd_sn, max_cmd_sn);
    fields.to_bhs()
}

/// Returns true if `number` is in the run. A run of length 0 is unbounded.
fn is_in_run(number: u32, begin: u32, length: u32) -> bool {
    !before(number, begin) && (length == 0 || before(number, begin.wrapping_add(length)))
}

impl FullFeature {
    /// Queues a response that consumes a StatSN.
    pub fn send_numbered(&mut self, io: &mut Io, header: Bhs, segment: &[u8]) {
        let digests = self.digests();
        io.out
            .bytes(|out| encode(out, header, &[], segment, digests));
        self.store_response(header, segment, None);
    }

    /// Stores a queued response for retransmission.
    pub fn store_response(
        &mut self,
        header: Bhs,
        segment: &[u8],
        command: Option<AnsweredCommand>,
    ) {
        // An initiator acknowledges with every PDU. At this limit it does not acknowledge, and responses are dropped.
        let most = 4 * self.tasks.size();
        let Some(buffer) = self
            .retransmission
            .as_mut()
            .filter(|_| segment.len() <= SEGMENT_BYTES_MAX)
        else {
            return;
        };
        let response = UnacknowledgedResponse {
            stat_sn: NopIn::from_bhs(&header).stat_sn.get(),
            header,
            segment: segment.into(),
            command: command.map(Box::new),
        };
        buffer.push(response, most);
    }

    /// Stores a Data-In PDU of a task; `piece` is its data.
    pub fn store_data(&mut self, data: &mut SentData, header: Bhs, piece: &[u8]) {
        let Some(buffer) = &mut self.retransmission else {
            return;
        };
        if buffer.bytes + piece.len() > self.limits.retransmission_bytes {
            data.is_cut = true;
        }
        if !data.is_cut {
            buffer.bytes += piece.len();
            let from = data.bytes.len();
            data.bytes.extend_from_slice(piece);
            data.pdus.push((header, from..data.bytes.len()));
        }
    }

    /// Releases the space of `data` when a task ends without a response.
    pub fn release_data(&mut self, data: Option<Box<SentData>>) {
        if let (Some(buffer), Some(data)) = (&mut self.retransmission, data) {
            buffer.bytes -= data.bytes.len();
        }
    }

    /// Drops the responses that a request acknowledges (4.2.2.2).
    pub fn acknowledged(&mut self, bhs: &Bhs) {
        if let Some(buffer) = &mut self.retransmission {
            // ExpStatSN has the same offset in all requests.
            let exp_stat_sn = SnackRequest::from_bhs(bhs).exp_stat_sn.get();
            // Ignores an ExpStatSN beyond the last one sent.
            if !before(self.numbers.stat_sn, exp_stat_sn) {
                buffer.acknowledge(exp_stat_sn);
            }
        }
    }

    /// Handles a SNACK Request (11.16).
    pub fn snack(&mut self, io: &mut Io, bhs: &Bhs) {
        let request = SnackRequest::from_bhs(bhs);
        let is_served = match SnackType::from_wire(request.flags & SnackRequest::TYPE) {
            _ if self.retransmission.is_none() => false,
            // A short SNACK can request much data, so the output queue is limited to the size of the store.
            _ if io.out.len() > self.limits.retransmission_bytes as u64 => false,
            Some(SnackType::Data) => self.send_data_again(io, &request),
            Some(SnackType::Status) => self.send_responses_again(io, &request),
            // The target requests no DataACK, and MaxRecvDataSegmentLength does not change.
            Some(SnackType::DataAck | SnackType::ResegmentedData) | None => false,
        };
        if !is_served {
            self.reject(io, bhs, RejectReason::SnackReject);
        }
    }

    /// Sends read data or unfulfilled R2Ts again. Returns false if that is not possible.
    fn send_data_again(&mut self, io: &mut Io, request: &SnackRequest) -> bool {
        let (itt, begin, length) = (
            request.itt.get(),
            request.begin_run.get(),
            request.run_length.get(),
        );
        let window = self.window();
        let digests = self.digests();
        let task = self.tasks.find(itt).and_then(|id| self.tasks.get(id));
        if let Some(task) = task.filter(|task| task.command.write) {
            for (r2t_sn, ttt, offset, desired) in task.data.open_r2ts() {
                if is_in_run(r2t_sn, begin, length) {
                    let header = r2t(
                        &task.command,
                        ttt,
                        self.numbers.stat_sn,
                        r2t_sn,
                        offset,
                        desired,
                    );
                    let header = with_window(&header, window);
                    io.out.bytes(|out| encode(out, header, &[], &[], digests));
                }
            }
            // Fulfilled R2Ts are not repeated.
            return true;
        }
        let buffer = self.retransmission.as_ref();
        let open = task.and_then(|task| task.sent_data.as_deref());
        let data = open.or_else(|| buffer.and_then(|buffer| buffer.data_of(itt)));
        let Some(data) = data.filter(|data| !data.is_cut) else {
            return false;
        };
        let last = begin.checked_add(length).map(|end| end as usize);
        if begin as usize > data.pdus.len() || last.is_none_or(|last| last > data.pdus.len()) {
            return false;
        }
        for (header, range) in &data.pdus {
            let data_sn = ReadyToTransfer::from_bhs(header).r2t_sn.get();
            if is_in_run(data_sn, begin, length) {
                let header = with_window(header, window);
                let piece = &data.bytes[range.clone()];
                io.out.bytes(|out| encode(out, header, &[], piece, digests));
            }
        }
        true
    }

    fn send_responses_again(&mut self, io: &mut Io, request: &SnackRequest) -> bool {
        let (begin, length) = (request.begin_run.get(), request.run_length.get());
        if request.itt.get() != NO_TAG {
            return false;
        }
        let window = self.window();
        let digests = self.digests();
        let mut left = length;
        for response in self
            .retransmission
            .iter()
            .flat_map(|buffer| &buffer.responses)
        {
            // BegRun 0 with RunLength 0 requests all unacknowledged responses.
            if (begin, length) == (0, 0) || is_in_run(response.stat_sn, begin, length) {
                left = left.saturating_sub(1);
                let header = with_window(&response.header, window);
                io.out
                    .bytes(|out| encode(out, header, &[], &response.segment, digests));
            }
        }
        left == 0
    }

    /// Makes the commands with unacknowledged responses available for reassignment to another connection.
    pub fn save_for_reassignment(&mut self) {
        let Some(buffer) = &mut self.retransmission else {
            return;
        };
        let (session, key) = (&self.session, self.key);
        for answered in buffer.take_commands() {
            let data = match &answered.data {
                None => Some(Vec::new()),
                Some(data) => data.whole().map(<[u8]>::to_vec),
            };
            let state = match data.filter(|data| data.len() <= SEGMENT_BYTES_MAX) {
                // Medium reads are repeated, so an initiator cannot accumulate stored data by losing connections.
                _ if answered.command.is_media_read() => TaskState::Restart,
                Some(data) => TaskState::Ended(answered.outcome, data),
                // The response data is no longer available.
                None => continue,
            };
            session.add_reassignable(Reassignable {
                connection: key,
                command: answered.command,
                holds_window: false,
                state,
            });
        }
    }
}

/// Builds an R2T without ExpCmdSN and MaxCmdSN.
pub(super) fn r2t(
    command: &Command,
    ttt: u32,
    stat_sn: u32,
    r2t_sn: u32,
    offset: u32,
    length: u32,
) -> Bhs {
    let header = ReadyToTransfer {
        lun: command.lun,
        itt: U32::new(command.itt),
        ttt: U32::new(ttt),
        stat_sn: U32::new(stat_sn),
        r2t_sn: U32::new(r2t_sn),
        buffer_offset: U32::new(offset),
        desired_length: U32::new(length),
        ..ReadyToTransfer::blank()
    };
    header.to_bhs()
}
