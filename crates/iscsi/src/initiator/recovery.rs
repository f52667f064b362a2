//! Connection recovery, error recovery level 2 (RFC 7143, 7.1.5 and 7.2.2): a connection was lost, and its tasks go on, on the same
//! connection logged in anew, or on another one.
//!
//! A NOP-Out is sent first: its answer says what ExpCmdSN is when the target has done with the old connection. A command from there on
//! never came, and is sent again with its CmdSN; one before it is taken over with TASK REASSIGN. What the target then does not know
//! was answered or refused, and ends as [`Event::Lost`]; what it knows and does not hand over ends the session.

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
    /// Does the session go on when a connection is lost?
    pub fn recovers(&self) -> bool {
        self.tsih != 0 && self.parameters.error_recovery_level == 2
    }

    /// A connection was lost: nothing more is sent or taken there. Its tasks stay; [`Initiator::recover`] or
    /// [`Initiator::reassign`] is to follow. Gives other connections that were lost, and whose tasks were about to go on on this one:
    /// the same is to follow for them.
    ///
    /// # Panics
    /// When there never was such a connection.
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

    /// Begins the login of a connection that was lost, with its CID; when it is through, its tasks go on there:
    /// [`Event::Recovered`] tells.
    ///
    /// # Panics
    /// When there never was such a connection.
    pub fn recover(&mut self, cid: u16) {
        let mut link = self.login_link(cid);
        link.recovers = true;
        self.links[usize::from(cid)] = link;
    }

    /// The tasks of a connection that was lost go on on another one: it is logged out there, for recovery.
    ///
    /// # Errors
    /// When the other one is not ready.
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

    /// Asks for ExpCmdSN.
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

    /// ExpCmdSN is known: the tasks of a connection that was lost go on on `to`.
    pub(super) fn go_on(
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
        // In the order in which they were sent; the window is less than half of all numbers.
        let first = self.exp_cmd_sn.wrapping_sub(1 << 30);
        mine.sort_by_key(|(cmd_sn, _)| cmd_sn.wrapping_sub(first));
        for (cmd_sn, itt) in mine {
            self.go_on_with(itt, cmd_sn, to, events);
        }
        self.link(to)?.recovers = false;
        events.push(Event::Recovered { cid: tasks_of, to });
        self.send_waiting();
        Ok(())
    }

    fn go_on_with(&mut self, itt: u32, cmd_sn: u32, to: u16, events: &mut Vec<Event>) {
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
        // Reserved with any other function than ABORT TASK.
        header.ref_cmd_sn = U32::new(0);
        let kind = Kind::Reassign { referenced };
        self.control(to, itt, kind, header.to_bhs(), Vec::new());
    }

    /// A NOP-Out takes the place of a request that never came.
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

    /// TASK REASSIGN was answered. A task that the target still has, and does not hand over, could be done after one that repeats it: only
    /// the end of the session ends it.
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
        // It may have ended meanwhile.
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
