//! Sends R2T, Data-In and SCSI Response PDUs.

use zerocopy::big_endian::U32;

use super::data_out::Fault;
use super::full_feature::{FullFeature, Io};
use super::retransmission::{AnsweredCommand, SentData};
use super::steps::{Completion, NoSuchTask, Step, Then, Transfer, residual};
use super::tasks::{Command, Pending, TaskId};
use crate::pdu::encode::{encode_header, encode_padding, encode_trailer};
use crate::pdu::{Bhs, DataIn, Digests, FINAL, NO_TAG, ReadyToTransfer, ScsiResponse, encode};

const CHECK_CONDITION: u8 = 0x02;

/// Read data to send.
#[derive(Clone, Copy)]
pub(super) enum Content<'a> {
    /// Available bytes.
    Seen(&'a [u8]),
    /// Length of data that stays in the caller's buffer, because no digest is needed.
    Unseen(usize),
}

impl<'a> Content<'a> {
    fn len(self) -> usize {
        match self {
            Content::Seen(data) => data.len(),
            Content::Unseen(length) => length,
        }
    }

    fn piece(self, at: usize, length: usize) -> Option<&'a [u8]> {
        match self {
            Content::Seen(data) => Some(&data[at..at + length]),
            Content::Unseen(_) => None,
        }
    }
}

impl FullFeature {
    /// Returns ExpCmdSN and MaxCmdSN for a header.
    pub fn window(&self) -> (U32, U32) {
        (
            U32::new(self.session.window.exp_cmd_sn()),
            U32::new(self.session.window.max_cmd_sn()),
        )
    }

    /// Allocates the StatSN of the next response.
    pub fn take_stat_sn(&mut self) -> U32 {
        let stat_sn = self.numbers.stat_sn;
        self.numbers.stat_sn = stat_sn.wrapping_add(1);
        U32::new(stat_sn)
    }

    /// Allocates a Target Transfer Tag.
    pub fn take_ttt(&mut self) -> u32 {
        let ttt = self.numbers.next_ttt;
        self.numbers.next_ttt = match ttt.wrapping_add(1) {
            NO_TAG => 0,
            next => next,
        };
        ttt
    }

    /// Queues R2Ts up to the limit.
    pub fn send_r2ts(&mut self, io: &mut Io, id: TaskId) {
        let (exp_cmd_sn, max_cmd_sn) = self.window();
        let digests = self.digests();
        loop {
            let ttt = self.numbers.next_ttt;
            let Some(task) = self.tasks.get_mut(id) else {
                return;
            };
            let r2t_sn = task.data_sn;
            let Some((offset, length)) = task.data.next_r2t(ttt, r2t_sn, &self.rules) else {
                return;
            };
            let header = ReadyToTransfer {
                lun: task.command.lun,
                itt: U32::new(task.command.itt),
                ttt: U32::new(ttt),
                stat_sn: U32::new(self.numbers.stat_sn),
                exp_cmd_sn,
                max_cmd_sn,
                r2t_sn: U32::new(r2t_sn),
                buffer_offset: U32::new(offset),
                desired_length: U32::new(length),
                ..ReadyToTransfer::blank()
            };
            task.data_sn = task.data_sn.wrapping_add(1);
            self.take_ttt();
            io.out
                .bytes(|out| encode(out, header.to_bhs(), &[], &[], digests));
        }
    }

    /// Queues read data, split by MaxRecvDataSegmentLength and MaxBurstLength. Copies the data if `buffer` is `None`.
    pub fn data_in(
        &mut self,
        io: &mut Io,
        id: TaskId,
        buffer: Option<u64>,
        offset: u32,
        content: Content<'_>,
        then: Then,
    ) -> Result<(), NoSuchTask> {
        let max_send = self.max_send();
        let max_burst = self.rules.max_burst;
        let digests = self.digests();
        let task = self
            .tasks
            .get(id)
            .filter(|task| task.delivered && task.pending.is_none())
            .ok_or(NoSuchTask)?;
        let (expected, skip) = (task.command.read_length(), task.skip_data);
        let room = expected.saturating_sub(offset) as usize;
        let length = content.len().min(room);
        // The last Data-In PDU may carry the status if there is no sense data (11.7.3).
        let rides = match then {
            Then::Status { status, transfer }
                if !task.command.write && length > 0 && self.retransmission.is_none() =>
            {
                Some((status, transfer))
            }
            _ => None,
        };
        let mut sent_data = self.take_sent_data(id);
        let mut done = 0;
        while done < length {
            let Some(task) = self.tasks.get_mut(id) else {
                return Err(NoSuchTask);
            };
            let take = (length - done).min(max_send).min(task.burst_left as usize);
            let piece = content.piece(done, take);
            let at = offset + done as u32;
            done += take;
            let last = done == length;
            task.burst_left -= take as u32;
            let ends = task.burst_left == 0 || (last && then != Then::More);
            let data_sn = task.data_sn;
            task.data_sn = data_sn.wrapping_add(1);
            if ends {
                task.burst_left = max_burst;
            }
            let mut header = DataIn {
                flags: if ends { FINAL } else { 0 },
                itt: U32::new(task.command.itt),
                ttt: U32::new(NO_TAG),
                data_sn: U32::new(data_sn),
                buffer_offset: U32::new(at),
                ..DataIn::blank()
            };
            header.lengths.set_data(take);
            if let (true, Some((status, transfer))) = (last, rides) {
                self.ride(
                    &mut header,
                    id,
                    status,
                    residual(expected, transfer.data_in),
                );
            }
            (header.exp_cmd_sn, header.max_cmd_sn) = self.window();
            let header = header.to_bhs();
            if let (Some(sent_data), Some(piece)) = (&mut sent_data, piece) {
                self.store_data(sent_data, header, piece);
                if data_sn < skip {
                    continue;
                }
            }
            queue_data_in(io, &header, digests, buffer, (at, take as u32), piece);
        }
        self.put_sent_data(id, sent_data);
        match then {
            Then::Status { status, transfer } if rides.is_none() => self.respond(
                io,
                id,
                &Completion {
                    status,
                    transfer,
                    ..Completion::default()
                },
            ),
            _ => Ok(()),
        }
    }

    /// Takes the retransmission store of the task, if retransmission is enabled.
    fn take_sent_data(&mut self, id: TaskId) -> Option<Box<SentData>> {
        self.retransmission.as_ref()?;
        let task = self.tasks.get_mut(id)?;
        Some(task.sent_data.take().unwrap_or_default())
    }

    fn put_sent_data(&mut self, id: TaskId, sent_data: Option<Box<SentData>>) {
        if sent_data.is_some()
            && let Some(task) = self.tasks.get_mut(id)
        {
            task.sent_data = sent_data;
        }
    }

    /// Puts the status into the last Data-In PDU and ends the task (11.7.3).
    #[inline]
    fn ride(&mut self, header: &mut DataIn, id: TaskId, status: u8, residual: (u32, bool, bool)) {
        let (count, over, under) = residual;
        header.flags |= DataIn::STATUS;
        header.flags |=
            if over { DataIn::OVERFLOW } else { 0 } | if under { DataIn::UNDERFLOW } else { 0 };
        header.status = status;
        header.residual = U32::new(count);
        header.stat_sn = self.take_stat_sn();
        if let Some(task) = self.tasks.remove(id) {
            self.finished(&task);
        }
    }

    /// Ends a task, now or after the initiator has sent the requested data.
    pub fn respond(
        &mut self,
        io: &mut Io,
        id: TaskId,
        completion: &Completion<'_>,
    ) -> Result<(), NoSuchTask> {
        let task = self
            .tasks
            .get_mut(id)
            .filter(|task| task.delivered)
            .ok_or(NoSuchTask)?;
        if task.pending.is_some() {
            return Err(NoSuchTask);
        }
        let pending = Pending::new(completion);
        if task.data.is_drained() {
            self.send_pending(io, id, &pending);
        } else {
            // MUST wait for the last Data-Out PDUs with the F bit (11.4.2, 11.17.1).
            task.pending = Some(Box::new(pending));
        }
        Ok(())
    }

    /// Queues the SCSI Response and removes the task.
    pub fn send_pending(&mut self, io: &mut Io, id: TaskId, pending: &Pending) {
        let Some(task) = self.tasks.remove(id) else {
            return;
        };
        self.finished(&task);
        let mut header = ScsiResponse {
            response: pending.response,
            status: pending.status,
            itt: U32::new(task.command.itt),
            stat_sn: self.take_stat_sn(),
            // Counts Data-In PDUs only: R2Ts share the counter but do not count if nothing is read (11.4.8).
            exp_data_sn: U32::new(if task.command.read { task.data_sn } else { 0 }),
            ..ScsiResponse::blank()
        };
        set_residuals(&mut header, &task.command, pending.transfer);
        (header.exp_cmd_sn, header.max_cmd_sn) = self.window();
        let mut segment: smallvec::SmallVec<[u8; 64]> = smallvec::SmallVec::new();
        // SenseLength has 16 bits, and the segment must not exceed the initiator's limit.
        let room = self.max_send().saturating_sub(2).min(usize::from(u16::MAX));
        let sense = &pending.sense[..pending.sense.len().min(room)];
        if !sense.is_empty() {
            segment.extend_from_slice(&(sense.len() as u16).to_be_bytes());
            segment.extend_from_slice(sense);
        }
        let digests = self.digests();
        let header = header.to_bhs();
        io.out
            .bytes(|out| encode(out, header, &[], &segment, digests));
        if self.retransmission.is_some() {
            let answered = AnsweredCommand {
                command: task.command,
                outcome: pending.clone(),
                data: task.sent_data,
            };
            self.store_response(header, &segment, Some(answered));
        }
    }

    /// Ends a task with faulty data, with the sense data of 11.4.7.2.
    pub fn fail(&mut self, io: &mut Io, id: TaskId, fault: Fault) {
        let seen = self.tasks.get(id).is_some_and(|task| task.seen);
        let sense = fault.sense();
        let completion = Completion {
            status: CHECK_CONDITION,
            sense: &sense,
            ..Completion::default()
        };
        self.send_pending(io, id, &Pending::new(&completion));
        if seen {
            io.steps.push_back(Step::Abandoned(id));
        }
    }
}

/// Queues one Data-In PDU with a range of the buffer (offset and length), or with a copy of the piece.
#[inline]
fn queue_data_in(
    io: &mut Io,
    header: &Bhs,
    digests: Digests,
    buffer: Option<u64>,
    (at, length): (u32, u32),
    piece: Option<&[u8]>,
) {
    io.out.bytes(|out| encode_header(out, header, &[], digests));
    match (buffer, piece) {
        (Some(buffer), _) => io.out.data(buffer, at, length),
        (None, piece) => io
            .out
            .bytes(|out| out.extend_from_slice(piece.unwrap_or_default())),
    }
    io.out.bytes(|out| match piece {
        Some(piece) => encode_trailer(out, piece, digests),
        None => encode_padding(out, length as usize),
    });
}

/// Sets the residual counts (11.4.5): bytes of the command compared with the initiator's expectation.
fn set_residuals(header: &mut ScsiResponse, command: &Command, transfer: Transfer) {
    let flag = |header: &mut ScsiResponse, set: bool, bit: u8| {
        if set {
            header.flags |= bit;
        }
    };
    if command.read && command.write {
        let (count, over, under) = residual(command.read_length(), transfer.data_in);
        header.bidirectional_residual = U32::new(count);
        flag(header, over, ScsiResponse::BIDIRECTIONAL_OVERFLOW);
        flag(header, under, ScsiResponse::BIDIRECTIONAL_UNDERFLOW);
    }
    let moves = match (command.read, command.write) {
        (_, true) => transfer.data_out,
        (true, false) => transfer.data_in,
        (false, false) => transfer.data_in.max(transfer.data_out),
    };
    let expected = if command.read || command.write {
        command.expected_length
    } else {
        0
    };
    let (count, over, under) = residual(expected, moves);
    header.residual = U32::new(count);
    flag(header, over, ScsiResponse::OVERFLOW);
    flag(header, under, ScsiResponse::UNDERFLOW);
}
