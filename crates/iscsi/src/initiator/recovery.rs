//! Connection recovery, error recovery level 2 (RFC 7143, 7.1.5 and 7.2.2): the tasks of a lost connection continue on the
//! same connection after a new login, or on another one.
//!
//! A NOP-Out is sent first. Its answer shows ExpCmdSN after the target has finished with the old connection. A command at
//! or after ExpCmdSN was not received and is sent again with its CmdSN. An earlier one is taken over with TASK REASSIGN. If
//! the target does not have the task, it was answered or refused, and it ends as [`Event::Lost`]. If the target has the
//! task and refuses to reassign it, the session ends.

use zerocopy::big_endian::{U16, U32};

use super::events::{Event, InitiatorError};
use super::requests::Kind;
use super::session::{Initiator, NotReady, Phase};
use crate::pdu::{
    IMMEDIATE, LogoutReason, LogoutRequest, NO_TAG, NopOut, TaskFunction, TaskManagementRequest,
    encode,
};
use crate::serial::before;

/// Function complete, and task does not exist (11.6.1).
const COMPLETE: u8 = 0;
const NO_SUCH_TASK: u8 = 1;

impl Initiator {
    /// Returns true if the session survives the loss of a connection.
    pub fn recovers(&self) -> bool {
        self.tsih != 0 && self.parameters.error_recovery_level == 2
    }

    /// Stops all traffic on a lost connection. Its tasks stay; the caller must call [`Initiator::recover`] or
    /// [`Initiator::reassign`]. Returns other lost connections with tasks that were moving to this one; the same applies to
    /// them.
    ///
    /// # Panics
    /// If the connection never existed.
    pub fn suspend(&mut self, cid: u16) -> Vec<u16> {
        let link = &mut self.links[usize::from(cid)];
        link.phase = Phase::Over;
        link.recovers = true;
        link.out.clear();
        let mut again = Vec::new();
        let links = &self.links;
        self.tasks.retain(|_, task| {
            let of = match task.kind {
                Kind::Probe { tasks_of } => tasks_of,
                Kind::Logout {
                    closes: Some(closes),
                } => closes,
                Kind::Reassign { .. } => cid,
                _ => return true,
            };
            let recovers = links.get(usize::from(of)).is_some_and(|link| link.recovers);
            if task.cid != cid || !recovers {
                return true;
            }
            if of != cid {
                again.push(of);
            }
            false
        });
        again
    }

    /// Starts the login of a lost connection with its old CID. After the login its tasks continue there, reported as
    /// [`Event::Recovered`].
    ///
    /// # Panics
    /// If the connection never existed.
    pub fn recover(&mut self, cid: u16) {
        let mut link = self.login_link(cid);
        link.recovers = true;
        self.links[usize::from(cid)] = link;
    }

    /// Moves the tasks of a lost connection to another one, which sends a logout for recovery.
    ///
    /// # Errors
    /// If the other connection is not ready.
    pub fn reassign(&mut self, lost: u16, to: u16) -> Result<(), NotReady> {
        if lost == to || !self.is_ready(to) {
            return Err(NotReady);
        }
        let itt = self.take_itt();
        let mut header = LogoutRequest::blank();
        header.opcode |= IMMEDIATE;
        header.flags |= LogoutReason::RemoveForRecovery.wire();
        header.itt = U32::new(itt);
        header.cid = U16::new(lost);
        let kind = Kind::Logout { closes: Some(lost) };
        self.control(to, itt, kind, header.to_bhs(), Vec::new());
        Ok(())
    }

    /// Requests ExpCmdSN with a NOP-Out.
    pub(super) fn probe(&mut self, cid: u16, tasks_of: u16) {
        let itt = self.take_itt();
        let mut header = NopOut::idle();
        header.opcode |= IMMEDIATE;
        header.itt = U32::new(itt);
        self.control(
            cid,
            itt,
            Kind::Probe { tasks_of },
            header.to_bhs(),
            Vec::new(),
        );
    }

    /// Continues the tasks of a lost connection on `to`, after ExpCmdSN is known.
    pub(super) fn continue_tasks(
        &mut self,
        tasks_of: u16,
        to: u16,
        events: &mut Vec<Event>,
    ) -> Result<(), InitiatorError> {
        let waits: Vec<u32> = self
            .waiting
            .iter()
            .map(|waiting| waiting.header.itt.get())
            .collect();
        let mine = self.tasks.iter().filter(|(itt, task)| {
            let asks = matches!(task.kind, Kind::Probe { .. } | Kind::Reassign { .. });
            task.cid == tasks_of && !asks && !waits.contains(itt)
        });
        let mut mine: Vec<(u32, u32)> = mine.map(|(itt, task)| (task.cmd_sn, *itt)).collect();
        // Sorted in the order of sending; the window is less than half of the number space.
        let first = self.exp_cmd_sn.wrapping_sub(1 << 30);
        mine.sort_by_key(|(cmd_sn, _)| cmd_sn.wrapping_sub(first));
        for (cmd_sn, itt) in mine {
            self.continue_task(itt, cmd_sn, to, events);
        }
        self.link(to)?.recovers = false;
        events.push(Event::Recovered { cid: tasks_of, to });
        self.send_waiting();
        Ok(())
    }

    fn continue_task(&mut self, itt: u32, cmd_sn: u32, to: u16, events: &mut Vec<Event>) {
        let exp_cmd_sn = self.exp_cmd_sn;
        let Some(task) = self.tasks.get_mut(&itt) else {
            return;
        };
        let never_came = task.numbered && !before(cmd_sn, exp_cmd_sn);
        let lun = task.lun;
        let Kind::Command(command) = &mut task.kind else {
            self.tasks.remove(&itt);
            if never_came {
                self.fill(to, cmd_sn);
            }
            let written = Vec::new();
            return events.push(Event::Lost { itt, written });
        };
        command.data.clear();
        (command.data_sn, command.sent, command.snacks) = (0, 0, 0);
        command.held = None;
        task.cid = to;
        match command.request.clone().filter(|_| never_came) {
            Some(mut request) => {
                request.cid = to;
                self.send_as(*request, cmd_sn);
            }
            None => {
                command.takes_any_r2t = true;
                self.send_reassign(to, itt, lun);
            }
        }
    }

    fn send_reassign(&mut self, to: u16, referenced: u32, lun: [u8; 8]) {
        let itt = self.take_itt();
        let mut header = TaskManagementRequest::blank();
        header.opcode |= IMMEDIATE;
        header.flags |= TaskFunction::TaskReassign.wire();
        header.lun = lun;
        header.itt = U32::new(itt);
        header.referenced_task_tag = U32::new(referenced);
        // Reserved, except with ABORT TASK.
        header.ref_cmd_sn = U32::new(0);
        let kind = Kind::Reassign { referenced };
        self.control(to, itt, kind, header.to_bhs(), Vec::new());
    }

    /// Replaces a request that was never received with a NOP-Out.
    fn fill(&mut self, cid: u16, cmd_sn: u32) {
        let Some(link) = self.links.get_mut(usize::from(cid)) else {
            return;
        };
        let mut header = NopOut::idle();
        header.itt = U32::new(NO_TAG);
        header.cmd_sn = U32::new(cmd_sn);
        header.exp_stat_sn = U32::new(link.exp_stat_sn);
        encode(&mut link.out, header.to_bhs(), &[], &[], link.digests);
    }

    /// Handles the response to TASK REASSIGN. A task that the target has but does not hand over could be executed after its
    /// repetition. Only the end of the session prevents that.
    pub(super) fn reassigned(
        &mut self,
        referenced: u32,
        response: u8,
    ) -> Result<Option<Event>, InitiatorError> {
        match response {
            COMPLETE => return Ok(None),
            NO_SUCH_TASK => {}
            _ => return Err(InitiatorError::Protocol("a task is not reassigned")),
        }
        // The task may have ended in the meantime.
        let Some(task) = self.tasks.remove(&referenced) else {
            return Ok(None);
        };
        let written = match task.kind {
            Kind::Command(command) => command.write,
            _ => Vec::new(),
        };
        Ok(Some(Event::Lost {
            itt: referenced,
            written,
        }))
    }
}
