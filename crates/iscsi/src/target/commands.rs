//! Reception of SCSI Command and Data-Out PDUs.

use smallvec::SmallVec;

use super::data_out::{DataOutFields, Incoming, WriteData};
use super::full_feature::{Destination, FullFeature, Io, Verdict, cmd_sn};
use super::steps::{NoSuchTask, Step};
use super::tasks::{Command, Task, TaskId};
use crate::pdu::{Bhs, DataOut, FINAL, NO_TAG, RejectReason, ScsiCommand, additional_headers};
use crate::serial::within;
use crate::session::SessionKind;

impl FullFeature {
    /// Checks a command's header and creates its task.
    pub fn command_header(
        &mut self,
        io: &mut Io,
        bhs: &Bhs,
        ahs: &[u8],
        length: u32,
    ) -> (Verdict, Destination) {
        let nowhere = |verdict| (verdict, Destination::Discard);
        if !bhs.is_immediate() {
            let window = &self.session.window;
            // Outside the window or a duplicate: ignored silently (4.2.2.1).
            if !within(cmd_sn(bhs), window.exp_cmd_sn(), window.max_cmd_sn()) {
                return nowhere(Verdict::Ignore);
            }
        }
        let refusal = self.refuse_command(bhs);
        if self.retransmission.is_some() && !self.session.reassignable.is_empty() {
            // The initiator reuses the tag, so it has received the response of the earlier task.
            let itt = bhs.itt.get();
            self.session.forget_reassignable(|of, _| of == itt);
        }
        if refusal == Some(RejectReason::TaskInProgress) && self.waits_already(bhs) {
            return nowhere(Verdict::Ignore);
        }
        let additional = additional_headers(ahs);
        let (None, Ok(additional)) = (refusal, additional) else {
            self.count_as_received(io, bhs);
            return nowhere(Verdict::Reject(
                refusal.unwrap_or(RejectReason::InvalidPduField),
            ));
        };
        let header = ScsiCommand::from_bhs(bhs);
        let mut cdb = SmallVec::from_slice(&header.cdb);
        cdb.extend_from_slice(&additional.extended_cdb);
        let command = Command {
            lun: header.lun,
            cdb,
            itt: header.itt.get(),
            cmd_sn: header.cmd_sn.get(),
            attribute: header.flags & ScsiCommand::ATTRIBUTE,
            read: header.flags & ScsiCommand::READ != 0,
            write: header.flags & ScsiCommand::WRITE != 0,
            immediate: bhs.is_immediate(),
            expected_length: header.expected_length.get(),
            bidirectional_read_length: additional.bidirectional_read_length,
        };
        let is_final = header.flags & FINAL != 0 || !command.write;
        let data = WriteData::begin(command.write_length(), length, is_final, &self.rules);
        let place = length > 0 && data.fault().is_none();
        let immediate = command.immediate;
        let mut task = Task::new(command, data, self.rules.max_burst);
        task.seen = place;
        let Some(id) = self.tasks.insert(task) else {
            self.count_as_received(io, bhs);
            return nowhere(Verdict::Reject(RejectReason::LongOperation));
        };
        self.immediate_commands += u32::from(immediate);
        let destination = if place {
            Destination::TaskBuffer {
                task: id,
                offset: 0,
            }
        } else {
            Destination::Discard
        };
        (Verdict::Command(id), destination)
    }

    fn refuse_command(&self, bhs: &Bhs) -> Option<RejectReason> {
        let itt = bhs.itt.get();
        if self.session.identity.kind == SessionKind::Discovery {
            Some(RejectReason::ProtocolError)
        } else if itt == NO_TAG {
            Some(RejectReason::InvalidPduField)
        } else if self.tasks.find(itt).is_some() || self.unanswered.functions.contains(&itt) {
            Some(RejectReason::TaskInProgress)
        } else if bhs.is_immediate() && self.immediate_commands >= self.limits.immediate_commands {
            Some(RejectReason::TooManyImmediateCommands)
        } else {
            None
        }
    }

    /// Returns true if the command is a duplicate of one that waits for its turn.
    #[cold]
    fn waits_already(&self, bhs: &Bhs) -> bool {
        let task = self.tasks.find(bhs.itt.get());
        let task = task.and_then(|id| self.tasks.get(id));
        !bhs.is_immediate()
            && task.is_some_and(|task| {
                let waits = !task.delivered && !task.command.immediate;
                waits && task.command.cmd_sn == cmd_sn(bhs)
            })
    }

    /// Ends a command PDU after its immediate data is placed.
    pub fn command_end(&mut self, io: &mut Io, bhs: &Bhs, id: TaskId, digest_ok: bool) {
        // The task was aborted during reception of its data.
        let Some(task) = self.tasks.get_mut(id) else {
            return self.count_as_received(io, bhs);
        };
        if !digest_ok {
            let length = bhs.lengths.data();
            task.data.digest_failed(0, length, &self.rules);
        }
        // If the task fails, the Reject is sent first. Otherwise it follows the delivery, so that its ExpCmdSN includes
        // the command.
        let fails = task.data.fault().is_some();
        if !digest_ok && fails {
            self.reject(io, bhs, RejectReason::DataDigestError);
        }
        match bhs.is_immediate() {
            true => self.deliver(io, id),
            false => self.take_turn(io, id, cmd_sn(bhs)),
        }
        if !digest_ok && !fails {
            self.reject(io, bhs, RejectReason::DataDigestError);
        }
    }

    /// Delivers a command in its turn.
    pub fn deliver(&mut self, io: &mut Io, id: TaskId) {
        let Some(task) = self.tasks.get_mut(id) else {
            // Aborted while it waited for its turn: only its CmdSN is consumed.
            return self.session.window.finished();
        };
        task.delivered = true;
        if task.data.fault().is_some() {
            return self.progress(io, id);
        }
        task.seen = true;
        io.steps.push_back(Step::Command(id));
    }

    /// Removes a command after another one used its CmdSN.
    pub fn forget_task(&mut self, io: &mut Io, id: TaskId) {
        if let Some(task) = self.tasks.remove(id) {
            self.immediate_commands -= u32::from(task.command.immediate);
            if task.seen {
                io.steps.push_back(Step::Abandoned(id));
            }
        }
    }

    /// Checks a Data-Out header against the open sequences.
    pub fn data_out_header(&mut self, bhs: &Bhs, length: u32) -> (Verdict, Destination) {
        let nowhere = |verdict| (verdict, Destination::Discard);
        let header = DataOut::from_bhs(bhs);
        let itt = header.itt.get();
        let Some((id, task)) = self
            .tasks
            .find(itt)
            .and_then(|id| self.tasks.get_mut(id).map(|task| (id, task)))
        else {
            // The data was sent before its task was aborted.
            let late = self.tasks.was_aborted(itt);
            return nowhere(if late {
                Verdict::Ignore
            } else {
                Verdict::Reject(RejectReason::ProtocolError)
            });
        };
        let fields = DataOutFields {
            ttt: header.ttt.get(),
            data_sn: header.data_sn.get(),
            offset: header.buffer_offset.get(),
            length,
            is_final: bhs.is_final(),
        };
        match task.data.incoming(&fields, &self.rules) {
            Incoming::Unknown => nowhere(Verdict::Reject(RejectReason::ProtocolError)),
            Incoming::Discard => nowhere(Verdict::DataOut(id)),
            // The response is already determined, so further data is ignored.
            Incoming::TaskBuffer if task.pending.is_some() => nowhere(Verdict::DataOut(id)),
            Incoming::TaskBuffer => {
                task.seen |= length > 0;
                (
                    Verdict::DataOut(id),
                    Destination::TaskBuffer {
                        task: id,
                        offset: fields.offset,
                    },
                )
            }
        }
    }

    /// Ends a Data-Out PDU after its data is placed.
    pub fn data_out_end(&mut self, io: &mut Io, bhs: &Bhs, id: TaskId, digest_ok: bool) {
        if let Some(task) = self.tasks.get_mut(id) {
            task.data.received();
            if !digest_ok {
                let (from, length) = (
                    DataOut::from_bhs(bhs).buffer_offset.get(),
                    bhs.lengths.data(),
                );
                task.data.digest_failed(from, length, &self.rules);
            }
        }
        if !digest_ok {
            self.reject(io, bhs, RejectReason::DataDigestError);
        }
        self.progress(io, id);
    }

    /// Requests the data of a write for the caller.
    pub fn solicit(&mut self, io: &mut Io, id: TaskId, wanted: u32) -> Result<bool, NoSuchTask> {
        let task = self.tasks.get_mut(id).ok_or(NoSuchTask)?;
        task.data.set_wanted(wanted);
        if task.data.is_complete() {
            task.data.report_complete();
            return Ok(true);
        }
        self.progress(io, id);
        Ok(false)
    }

    /// Takes the next action for a task's data: requests more, reports completion, or ends a failed task.
    pub fn progress(&mut self, io: &mut Io, id: TaskId) {
        let Some(task) = self.tasks.get_mut(id) else {
            return;
        };
        if !task.delivered {
            return;
        }
        if task.data.is_drained() {
            if let Some(pending) = task.pending.take() {
                return self.send_pending(io, id, &pending);
            }
            if let Some(fault) = task.data.fault() {
                return self.fail(io, id, fault);
            }
        }
        if task.pending.is_some() {
            return;
        }
        self.send_r2ts(io, id);
        let Some(task) = self.tasks.get_mut(id) else {
            return;
        };
        if task.data.is_complete() && task.data.report_complete() {
            io.steps.push_back(Step::DataComplete(id));
        }
    }

    /// Ends a task without a response.
    pub fn abort(&mut self, id: TaskId) -> Result<Task, NoSuchTask> {
        let task = self.tasks.get(id).ok_or(NoSuchTask)?;
        let (itt, delivered) = (task.command.itt, task.delivered);
        if !task.data.is_drained() {
            self.tasks.remember_aborted(itt);
        }
        let mut task = self.tasks.remove(id).ok_or(NoSuchTask)?;
        self.release_data(task.sent_data.take());
        if delivered {
            self.finished(&task);
        } else {
            self.immediate_commands -= u32::from(task.command.immediate);
        }
        Ok(task)
    }

    /// Updates the counters after a delivered task has left the table.
    pub fn finished(&mut self, task: &Task) {
        if task.command.immediate {
            self.immediate_commands -= 1;
        } else {
            self.session.window.finished();
        }
    }
}
