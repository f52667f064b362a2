//! Requests other than SCSI commands: NOP, task management, logout. Also sends Reject and Asynchronous Message.

use zerocopy::big_endian::{U16, U32};

use super::full_feature::{FullFeature, Io};
use super::steps::{CloseReason, Logout, LogoutScope, NoSuchTask, Step, TaskManagement};
use crate::pdu::{
    AsyncEvent, AsyncMessage, Bhs, LogoutReason, LogoutRequest, LogoutResponse, LogoutResponseCode,
    NO_TAG, NopIn, NopOut, Opcode, Reject, RejectReason, TaskFunction, TaskFunctionResponse,
    TaskManagementRequest, TaskManagementResponse, TextRequest, encode,
};
use crate::serial::{before, within};
use crate::session::SessionKind;

impl FullFeature {
    /// Executes a control PDU in CmdSN order.
    pub fn control(&mut self, io: &mut Io, bhs: &Bhs, data: &[u8]) {
        match bhs.kind() {
            Some(Opcode::NopOut) => self.nop_out(io, &NopOut::from_bhs(bhs), data),
            Some(Opcode::TaskManagementRequest) => self.task_management(io, bhs),
            Some(Opcode::TextRequest) => self.text_request(io, &TextRequest::from_bhs(bhs), data),
            Some(Opcode::LogoutRequest) => self.logout(io, bhs),
            _ => self.reject(io, bhs, RejectReason::ProtocolError),
        }
    }

    fn nop_out(&mut self, io: &mut Io, request: &NopOut, data: &[u8]) {
        let ttt = request.ttt.get();
        self.unanswered.pings.retain(|ping| *ping != ttt);
        if request.itt.get() == NO_TAG {
            return;
        }
        let (exp_cmd_sn, max_cmd_sn) = self.window();
        let header = NopIn {
            itt: request.itt,
            ttt: U32::new(NO_TAG),
            stat_sn: self.take_stat_sn(),
            exp_cmd_sn,
            max_cmd_sn,
            ..NopIn::blank()
        };
        let data = &data[..data.len().min(self.max_send())];
        self.send_numbered(io, header.to_bhs(), data);
    }

    /// Queues a NOP-In without a StatSN of its own.
    fn send_nop_in(&self, io: &mut Io, mut header: NopIn) {
        (header.exp_cmd_sn, header.max_cmd_sn) = self.window();
        io.out
            .bytes(|out| encode(out, header.to_bhs(), &[], &[], self.digests()));
    }

    /// Sends a NOP-In that requests an answer and returns its TTT.
    pub fn ping(&mut self, io: &mut Io) -> Option<u32> {
        if self.unanswered.pings.len() >= self.limits.outstanding_pings {
            return None;
        }
        let ttt = self.take_ttt();
        self.unanswered.pings.push(ttt);
        // StatSN is not advanced, because the ITT is the reserved value (11.19.1).
        self.send_nop_in(
            io,
            NopIn {
                itt: U32::new(NO_TAG),
                ttt: U32::new(ttt),
                stat_sn: U32::new(self.numbers.stat_sn),
                ..NopIn::blank()
            },
        );
        Some(ttt)
    }

    /// Sends a NOP-In that requests no answer, to transmit ExpCmdSN and MaxCmdSN (11.4.10).
    pub fn send_window(&self, io: &mut Io) {
        let nobody = U32::new(NO_TAG);
        let header = NopIn {
            itt: nobody,
            ttt: nobody,
            stat_sn: U32::new(self.numbers.stat_sn),
            ..NopIn::blank()
        };
        self.send_nop_in(io, header);
    }

    fn task_management(&mut self, io: &mut Io, bhs: &Bhs) {
        let request = TaskManagementRequest::from_bhs(bhs);
        let tag = request.itt.get();
        if tag == NO_TAG {
            return self.reject(io, bhs, RejectReason::InvalidPduField);
        }
        if self.unanswered.functions.contains(&tag) || self.tasks.find(tag).is_some() {
            return self.reject(io, bhs, RejectReason::TaskInProgress);
        }
        if self.session.identity.kind == SessionKind::Discovery {
            return self.reject(io, bhs, RejectReason::ProtocolError);
        }
        if self.unanswered.functions.len() >= self.limits.task_management_functions {
            return self.reject(io, bhs, RejectReason::TooManyImmediateCommands);
        }
        self.unanswered.functions.push(tag);
        if TaskFunction::from_wire(request.flags & 0x7f) == Some(TaskFunction::TaskReassign) {
            return self.reassign(io, tag, &request);
        }
        let answer = match TaskFunction::from_wire(request.flags & 0x7f) {
            None => Err(TaskFunctionResponse::NotSupported),
            // The functions of RFC 7144 require iSCSIProtocolLevel 2.
            Some(function) if function.wire() > 8 && self.session.parameters.protocol_level < 2 => {
                Err(TaskFunctionResponse::NotSupported)
            }
            Some(function @ (TaskFunction::AbortTask | TaskFunction::QueryTask)) => {
                match self.referenced(io, function, &request) {
                    Ok(task) => Ok((function, Some(task))),
                    Err(TaskFunctionResponse::TaskDoesNotExist)
                        if function == TaskFunction::AbortTask =>
                    {
                        Ok((function, None))
                    }
                    Err(response) => Err(response),
                }
            }
            Some(function) => Ok((function, None)),
        };
        match answer {
            Ok((function, referenced)) => {
                let lun = request.lun;
                io.steps.push_back(Step::TaskManagement(TaskManagement {
                    tag,
                    function,
                    lun,
                    referenced,
                    referenced_tag: request.referenced_task_tag.get(),
                    cmd_sn: request.cmd_sn.get(),
                }));
            }
            // Cannot fail: the tag was just recorded.
            Err(response) => self
                .task_management_response(io, tag, response)
                .unwrap_or_default(),
        }
    }

    /// Returns the task to abort or query, or the response if SCSI has nothing to do (11.5.1, 11.6.1).
    fn referenced(
        &mut self,
        io: &mut Io,
        function: TaskFunction,
        request: &TaskManagementRequest,
    ) -> Result<super::TaskId, TaskFunctionResponse> {
        let aborts = function == TaskFunction::AbortTask;
        if let Some(id) = self.tasks.find(request.referenced_task_tag.get()) {
            let Some(task) = self.tasks.get(id) else {
                return Err(TaskFunctionResponse::TaskDoesNotExist);
            };
            if task.command.lun != request.lun {
                return Err(TaskFunctionResponse::TaskDoesNotExist);
            }
            if task.delivered {
                return Ok(id);
            }
            if !aborts {
                return Err(TaskFunctionResponse::Succeeded);
            }
            // The command was received but not delivered, and never will be.
            let (seen, number) = (task.seen, task.command.cmd_sn);
            if self.unpark_task(id) {
                self.skip(io, number);
            }
            if self.abort(id).is_ok() && seen {
                io.steps.push_back(Step::Abandoned(id));
            }
            return Err(TaskFunctionResponse::Complete);
        }
        if aborts && self.abort_reassignable(request) {
            io.steps
                .push_back(Step::Forgotten(request.referenced_task_tag.get()));
            return Err(TaskFunctionResponse::Complete);
        }
        let (number, own) = (request.ref_cmd_sn.get(), request.cmd_sn.get());
        let window = &self.session.window;
        let pending =
            within(number, window.exp_cmd_sn(), window.max_cmd_sn()) && before(number, own);
        if aborts && pending {
            // The command was not received: the target MUST consider the CmdSN received.
            self.skip(io, number);
            return Err(TaskFunctionResponse::Complete);
        }
        Err(if aborts {
            TaskFunctionResponse::TaskDoesNotExist
        } else {
            TaskFunctionResponse::Complete
        })
    }

    /// Answers a task management function.
    pub fn task_management_response(
        &mut self,
        io: &mut Io,
        tag: u32,
        response: TaskFunctionResponse,
    ) -> Result<(), NoSuchTask> {
        let place = self
            .unanswered
            .functions
            .iter()
            .position(|other| *other == tag)
            .ok_or(NoSuchTask)?;
        self.unanswered.functions.swap_remove(place);
        let (exp_cmd_sn, max_cmd_sn) = self.window();
        let header = TaskManagementResponse {
            response: response.wire(),
            itt: U32::new(tag),
            stat_sn: self.take_stat_sn(),
            exp_cmd_sn,
            max_cmd_sn,
            ..TaskManagementResponse::blank()
        };
        self.send_numbered(io, header.to_bhs(), &[]);
        Ok(())
    }

    fn logout(&mut self, io: &mut Io, bhs: &Bhs) {
        let request = LogoutRequest::from_bhs(bhs);
        let (tag, cid) = (request.itt.get(), request.cid.get());
        let scope = match LogoutReason::from_wire(request.flags & 0x7f) {
            Some(LogoutReason::CloseSession) => Ok(LogoutScope::Session),
            Some(LogoutReason::CloseConnection) if cid == self.key.cid => {
                Ok(LogoutScope::Connection)
            }
            Some(LogoutReason::CloseConnection) => match self.session.connection(cid) {
                Some(other) => Ok(LogoutScope::Other(other)),
                None => Err(LogoutResponseCode::CidNotFound),
            },
            Some(LogoutReason::RemoveForRecovery) => self.remove_for_recovery(cid),
            None => return self.reject(io, bhs, RejectReason::InvalidPduField),
        };
        match scope {
            Err(code) => self.send_logout_response(io, tag, code),
            Ok(_)
                if self
                    .unanswered
                    .logouts
                    .iter()
                    .any(|logout| logout.tag == tag) =>
            {
                self.reject(io, bhs, RejectReason::TaskInProgress);
            }
            Ok(_) if self.unanswered.logouts.len() >= self.limits.task_management_functions => {
                self.reject(io, bhs, RejectReason::TooManyImmediateCommands);
            }
            Ok(scope) => {
                let logout = Logout { tag, scope };
                self.unanswered.logouts.push(logout);
                if scope.is_own() {
                    let wake = self.abandon_parked();
                    self.wake(io, wake);
                }
                io.steps.push_back(Step::Logout(logout));
            }
        }
    }

    /// Handles a logout that closes another connection and leaves its tasks for reassignment (11.14, reason 2).
    fn remove_for_recovery(&self, cid: u16) -> Result<LogoutScope, LogoutResponseCode> {
        if !self.recovers() || cid == self.key.cid {
            return Err(LogoutResponseCode::RecoveryNotSupported);
        }
        let connection = self.session.connection(cid);
        match connection.is_some() || self.session.reassignable.has_any_of(cid) {
            true => Ok(LogoutScope::ForRecovery(connection)),
            false => Err(LogoutResponseCode::CidNotFound),
        }
    }

    /// Executes ABORT TASK for a task without a connection.
    fn abort_reassignable(&self, request: &TaskManagementRequest) -> bool {
        let itt = request.referenced_task_tag.get();
        let before = self.session.reassignable.len();
        self.session.forget_reassignable(|of, _| of == itt);
        self.session.reassignable.len() < before
    }

    /// Returns true if this connection was logged out by its own request. Later PDUs are then ignored (11.14).
    pub fn is_leaving(&self) -> bool {
        self.unanswered
            .logouts
            .iter()
            .any(|logout| logout.scope.is_own())
    }

    /// Answers a logout after its cleanup.
    pub fn logout_response(&mut self, io: &mut Io, tag: u32) -> Result<(), NoSuchTask> {
        let mut logouts = self.unanswered.logouts.iter();
        let place = logouts.position(|logout| logout.tag == tag);
        let logout = self
            .unanswered
            .logouts
            .swap_remove(place.ok_or(NoSuchTask)?);
        if logout.scope.is_own() {
            self.closing = Some(CloseReason::LoggedOut {
                whole_session: logout.scope == LogoutScope::Session,
            });
        }
        self.send_logout_response(io, tag, LogoutResponseCode::Success);
        Ok(())
    }

    fn send_logout_response(&mut self, io: &mut Io, tag: u32, code: LogoutResponseCode) {
        let (exp_cmd_sn, max_cmd_sn) = self.window();
        let header = LogoutResponse {
            response: code.wire(),
            itt: U32::new(tag),
            stat_sn: self.take_stat_sn(),
            exp_cmd_sn,
            max_cmd_sn,
            time_to_wait: U16::new(self.session.parameters.time_to_wait),
            time_to_retain: U16::new(self.session.parameters.time_to_retain),
            ..LogoutResponse::blank()
        };
        self.send_numbered(io, header.to_bhs(), &[]);
    }

    /// Queues a Reject with the rejected header.
    pub fn reject(&mut self, io: &mut Io, bhs: &Bhs, reason: RejectReason) {
        let (exp_cmd_sn, max_cmd_sn) = self.window();
        let header = Reject {
            reason: reason.wire(),
            itt: U32::new(NO_TAG),
            stat_sn: self.take_stat_sn(),
            exp_cmd_sn,
            max_cmd_sn,
            ..Reject::blank()
        };
        self.send_numbered(io, header.to_bhs(), bhs.bytes());
    }

    /// Queues an Asynchronous Message.
    pub fn async_message(
        &mut self,
        io: &mut Io,
        event: AsyncEvent,
        lun: [u8; 8],
        parameters: [u16; 3],
        data: &[u8],
    ) {
        let [first, second, third] = parameters.map(U16::new);
        let (exp_cmd_sn, max_cmd_sn) = self.window();
        let header = AsyncMessage {
            lun,
            itt: U32::new(NO_TAG),
            stat_sn: self.take_stat_sn(),
            exp_cmd_sn,
            max_cmd_sn,
            event: event.wire(),
            parameter_1: first,
            parameter_2: second,
            parameter_3: third,
            ..AsyncMessage::blank()
        };
        let data = &data[..data.len().min(self.max_send())];
        self.send_numbered(io, header.to_bhs(), data);
    }
}
