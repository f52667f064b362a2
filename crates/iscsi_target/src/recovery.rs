//! Commands of a lost connection at error recovery level 2 (RFC 7143, 7.2.2).

use iscsi::target::{Completion, DetachedState, TaskId};
use latency::Operation;
use reactor::Io;
use scsi::Response;
use scsi_exec::Task;

use crate::connection::Connection;
use crate::responses::transfer;
use crate::retained::RetainedTask;
use crate::slots::Client;

impl Connection {
    /// Hands every command to the session: to restart, still running, or with its response.
    #[cold]
    pub(crate) fn detach_commands(&mut self, io: &mut Io) {
        let (Some(key), Some(session)) = (self.iscsi.key(), self.iscsi.session().cloned()) else {
            return;
        };
        let agreed = &session.parameters;
        let seconds = u64::from(agreed.time_to_wait) + u64::from(agreed.time_to_retain) + 1;
        let shared = self.shared().clone();
        let until = shared.seconds() + seconds;
        shared
            .retained
            .lose(&session, shared.units.runners(), key, until);
        // Completed commands are answered, and their responses retained.
        let done = std::mem::take(&mut self.schedule.done);
        for id in done {
            self.answer(id);
        }
        let used: Vec<u32> = self.slots.used().collect();
        for index in used {
            self.detach_command(io, index);
        }
    }

    fn detach_command(&mut self, io: &mut Io, index: u32) {
        let Some(task) = self.slots.task(index) else {
            return self.abort_slot(io, index, None);
        };
        let Some(command) = self.iscsi.command(task) else {
            return self.abort_slot(io, index, None);
        };
        let (itt, cmd_sn) = (command.itt, command.cmd_sn);
        let is_read = command.is_media_read();
        // Other task attributes fix a position in the task order, which the task loses.
        let is_simple = command.attribute <= 1;
        let slot = self.slots.get(index);
        let medium = matches!(
            slot.operation,
            Some(Operation::Read | Operation::Write | Operation::Flush | Operation::Discard)
        );
        let (started, touched, busy) = (slot.is_started(), slot.touched, slot.is_busy());
        // An I/O that waits for a retry after a disk error can be restarted on another connection.
        let source = self.handle.source;
        let waits = busy && medium && io.cancel_waiting(source, |slot| slot == index);
        let restarts = is_simple && (!started || is_read || waits || (medium && !touched));
        let slot = self.slots.get(index);
        if restarts {
            let tag = slot.tag;
            if self
                .iscsi
                .detach_task(task, DetachedState::ToRestart)
                .is_ok()
                && let Some(connection) = self.iscsi.key()
            {
                let retained = RetainedTask {
                    connection,
                    cmd_sn,
                    tag,
                    holds: Vec::new(),
                };
                self.shared().retained.add(itt, retained);
            }
        } else if slot.is_busy() && !slot.task.survives_abort() {
            if self.iscsi.detach_task(task, DetachedState::Running).is_ok() {
                self.slots.part(index);
                self.slots.get(index).client = Client::Session(itt);
                return;
            }
        } else {
            // The progress of the command is unknown, and the command must not be executed twice.
            let response = Response::aborted();
            let sense = response.sense_data();
            let completion = Completion {
                status: response.status as u8,
                sense: &sense,
                ..Completion::default()
            };
            self.iscsi
                .detach_task(task, DetachedState::Ended(&completion))
                .ok();
        }
        self.abort_slot(io, index, None);
    }

    /// Retains the response of a command that ended after the loss of its connection.
    #[cold]
    pub(crate) fn keep_answer(&mut self, index: u32, itt: u32, detaches: bool) {
        let slot = self.slots.get(index);
        slot.client = Client::None;
        let mut response = slot.task.take_response();
        let transfer = transfer(slot.read_length, slot.write_length, response.residual);
        let data = std::mem::take(&mut response.data);
        let sense = response.sense_data();
        let completion = Completion {
            response: 0,
            status: response.status as u8,
            sense: &sense,
            transfer,
        };
        if let Some(session) = self.iscsi.session() {
            session.reassignable.ended(itt, &completion, data);
        }
        if detaches {
            self.detach(index, Task::continue_detached);
        }
    }

    /// Ends commands without a connection when their session is over.
    pub(crate) fn abort_detached(&mut self, io: &mut Io) {
        let used: Vec<u32> = self.slots.used().collect();
        for index in used {
            self.abort_slot(io, index, None);
        }
    }

    /// Ends a command without a connection and without a response: it was aborted or cannot end.
    pub(crate) fn lose_answer(&mut self, index: u32) {
        let slot = self.slots.get(index);
        if let Client::Session(itt) = slot.client {
            slot.client = Client::None;
            if let Some(session) = self.iscsi.session() {
                session.end_running(itt);
            }
        }
    }

    /// Takes over a task of a lost connection, with the holds that wait for its end.
    #[cold]
    pub(crate) fn take_over(&mut self, index: u32, task: TaskId) {
        let (Some(key), Some(command)) = (self.iscsi.key(), self.iscsi.command(task)) else {
            return;
        };
        let holds = self.shared().retained.take(key.tsih, command.itt);
        for hold in &holds {
            self.slots.get(index).task.hold(hold);
        }
    }
}
