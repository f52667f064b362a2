//! Task management (RFC 7143, 11.5) across a target's connections, and other operations that wait for tasks of other connections.
//!
//! Tasks run on the workers of their connections. A function is sent to all of them; each marks its matching tasks. The function completes
//! when none of these tasks can access a disk. Every message and every such task has a clone of a [`Hold`]. Dropping the last clone runs
//! the completion.

use std::sync::Arc;

use iscsi::pdu::{TaskFunction, TaskFunctionResponse};
use iscsi::serial::before;
use iscsi::session::ConnectionKey;
use iscsi::target::{Logout, LogoutScope, TaskManagement};
use latency::UnitAddress;
use reactor::Io;
use scsi::{AbortScope, Lun, LunAddress, Managed, TaskManagementFunction};
use scsi_exec::{Call, Effect, Exempt, Hold, Known, Runner, TaskOperation, Tasks};

use crate::connection::Connection;
use crate::shared::ConnectionHandle;
use crate::slots::Client;

/// Operation that continues after a wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum After {
    /// Send the login response and continue parsing.
    Login,
    /// Answer a task management function.
    Function { tag: u32 },
    /// Answer the function, then drop all connections of the target.
    ColdReset { tag: u32 },
    /// Answer a logout.
    Logout { tag: u32 },
}

/// Task management of a connection that has not completed.
#[derive(Default)]
pub(crate) struct Management {
    /// Aborts that this connection requested and has already applied to itself.
    own_aborts: Vec<Arc<AbortScope>>,
    /// Functions of other connections of the session that wait for the answer to a ping on this one.
    pub fences: Vec<(Option<u32>, Hold)>,
}

/// Creates a hold that continues the connection at `handle` when its last clone is dropped.
pub(crate) fn hold(handle: &ConnectionHandle, after: After) -> Hold {
    let handle = handle.clone();
    Hold::new(move || handle.send(move |connection, io| connection.end_wait(io, after)))
}

/// Creates the function that delivers task management calls to a connection.
pub(crate) fn runner(handle: ConnectionHandle) -> Runner {
    Arc::new(move |call: &Call, hold: Hold| {
        let call = call.clone();
        handle.send(move |connection, io| {
            // The connection has already applied its own calls.
            let mut own = connection.management.own_aborts.iter();
            match own.position(|own| call.scope().is_some_and(|scope| Arc::ptr_eq(own, scope))) {
                Some(own) => drop(connection.management.own_aborts.swap_remove(own)),
                None => connection.apply_call(io, &call, &hold),
            }
        });
    })
}

/// Returns the address in a LUN field, if it is a unit's address.
fn unit_address(lun: [u8; 8]) -> Option<UnitAddress> {
    match Lun(lun).address() {
        LunAddress::Unit(lun) => Some(UnitAddress { target: 0, lun }),
        _ => None,
    }
}

impl Connection {
    /// Begins a task management function.
    pub(crate) fn manage(&mut self, io: &mut Io, request: &TaskManagement) {
        use TaskFunctionResponse as Answer;
        let lun = Lun(request.lun);
        if self.may_not(request.function) {
            return self.function_done(request.tag, Answer::AuthorizationFailed);
        }
        let function = match request.function {
            TaskFunction::AbortTask => return self.abort_one(io, request),
            // A missing task was answered by the protocol.
            TaskFunction::QueryTask => return self.function_done(request.tag, Answer::Succeeded),
            TaskFunction::QueryTaskSet => return self.query_task_set(request),
            TaskFunction::QueryAsynchronousEvent => {
                let answer = match self.waiting_attention(lun) {
                    true => Answer::Succeeded,
                    false => Answer::Complete,
                };
                return self.function_done(request.tag, answer);
            }
            TaskFunction::ClearAca => return self.function_done(request.tag, Answer::NotSupported),
            TaskFunction::TaskReassign => {
                return self.function_done(request.tag, Answer::ReassignmentNotSupported);
            }
            TaskFunction::AbortTaskSet => TaskManagementFunction::AbortTaskSet,
            TaskFunction::ClearTaskSet => TaskManagementFunction::ClearTaskSet,
            TaskFunction::LogicalUnitReset => TaskManagementFunction::LogicalUnitReset,
            TaskFunction::TargetWarmReset | TaskFunction::TargetColdReset => {
                TaskManagementFunction::TargetReset
            }
            TaskFunction::ItNexusReset => TaskManagementFunction::NexusReset,
        };
        let Some(managed) = self.managed(lun, function) else {
            return self.function_done(request.tag, Answer::Rejected);
        };
        match managed {
            Managed::IncorrectLun => self.function_done(request.tag, Answer::LunDoesNotExist),
            Managed::Abort(scope) => {
                let (tag, number) = (request.tag, request.cmd_sn);
                let after = match request.function {
                    TaskFunction::TargetColdReset => After::ColdReset { tag },
                    _ => After::Function { tag },
                };
                self.abort_everywhere(io, scope, TaskOperation::of(function), number, after);
            }
        }
    }

    /// Returns true if the function is not allowed: a read-only initiator must not end tasks or the RESERVE of other initiators.
    fn may_not(&self, function: TaskFunction) -> bool {
        use TaskFunction::*;
        let resets = matches!(
            function,
            LogicalUnitReset | TargetWarmReset | TargetColdReset
        );
        resets
            && self
                .login
                .session()
                .is_some_and(|session| session.read_only)
    }

    fn abort_one(&mut self, io: &mut Io, request: &TaskManagement) {
        let Some(task) = request.referenced else {
            return self.abort_one_again(request);
        };
        let hold = hold(&self.handle, After::Function { tag: request.tag });
        match self.slots.find(task) {
            Some(slot) => self.abort_slot(io, slot.index, Some(&hold)),
            // A task without a slot was not begun.
            None => self.iscsi.abort(task).unwrap_or_default(),
        }
    }

    /// ABORT TASK for a task that a reset or an earlier ABORT TASK has ended, while its I/O may be in flight. The response waits for that
    /// I/O, which could otherwise overtake the initiator's next commands.
    fn abort_one_again(&mut self, request: &TaskManagement) {
        let Some(slot) = self.slots.aborted(request.referenced_tag, request.lun) else {
            return self.function_done(request.tag, TaskFunctionResponse::TaskDoesNotExist);
        };
        let hold = hold(&self.handle, After::Function { tag: request.tag });
        slot.task.hold(&hold);
    }

    fn query_task_set(&mut self, request: &TaskManagement) {
        let tag = request.tag;
        let Some(nexus) = self.nexus_id() else {
            return self.function_done(tag, TaskFunctionResponse::Rejected);
        };
        let Some(unit) = unit_address(request.lun) else {
            return self.function_done(tag, TaskFunctionResponse::Complete);
        };
        let call = Call::new(Tasks::Set(unit, Some(nexus)), TaskOperation::Find);
        let (handle, asked) = (self.handle.clone(), call.clone());
        let hold = Hold::new(move || {
            let answer = match asked.has_found() {
                true => TaskFunctionResponse::Succeeded,
                false => TaskFunctionResponse::Complete,
            };
            handle.send(move |connection, _| connection.function_done(tag, answer));
        });
        for handle in self.shared().connections() {
            let (call, hold) = (call.clone(), hold.clone());
            handle.send(move |connection, io| connection.apply_call(io, &call, &hold));
        }
    }

    /// Aborts the tasks of a scope in all transports, and in this connection immediately. In this session, only tasks with a CmdSN before
    /// `number` are aborted, on all connections (RFC 7143, 4.2.2.3.4).
    pub(crate) fn abort_everywhere(
        &mut self,
        io: &mut Io,
        scope: AbortScope,
        operation: TaskOperation,
        number: u32,
        after: After,
    ) {
        let hold = hold(&self.handle, after);
        let call = Call::of_scope(scope, operation).except(self.sent_later(number));
        self.apply_to_slots(io, &call, &hold);
        // The call also reaches the runner of this connection.
        self.management.own_aborts.extend(call.scope().cloned());
        let runners = self.shared().units.runners().clone();
        runners.call(&call, move || drop(hold));
    }

    /// Returns the exemption for tasks of this session with CmdSN `number` or later.
    pub(crate) fn sent_later(&self, number: u32) -> Option<Exempt> {
        let nexus = self.nexus_id()?;
        Some(Exempt {
            nexus,
            from: number,
        })
    }

    pub(crate) fn cmd_sn(&self, index: u32) -> Option<u32> {
        let command = self.iscsi.command(self.slots.task(index)?)?;
        Some(command.cmd_sn)
    }

    /// Applies a call from any connection or queue.
    pub(crate) fn apply_call(&mut self, io: &mut Io, call: &Call, hold: &Hold) {
        if self.apply_to_slots(io, call, hold) {
            self.iscsi.send_window();
        }
        self.fence(call, hold);
    }

    /// Response Fence (RFC 7143, 4.2.2.3.4): delays the answer to a function, or to PREEMPT AND ABORT, on another connection of this
    /// session until the initiator has received all earlier output of this connection. Fencing the responses only would not suffice: the
    /// initiator may not have received an R2T of an aborted task.
    fn fence(&mut self, call: &Call, hold: &Hold) {
        let own = self.nexus_id();
        let in_session = call.exempt.is_some_and(|exempt| Some(exempt.nexus) == own);
        if in_session && !self.lifecycle.is_ended() {
            let ping = self.iscsi.ping();
            self.management.fences.push((ping, hold.clone()));
        }
    }

    /// Removes fences with an answered ping. Sends the ping of fences that had no room for it.
    pub(crate) fn lift_fences(&mut self) {
        if self.management.fences.is_empty() {
            return;
        }
        let iscsi = &self.iscsi;
        self.management
            .fences
            .retain(|(ping, _)| ping.is_none_or(|ping| !iscsi.is_answered(ping)));
        if self
            .management
            .fences
            .iter()
            .any(|(ping, _)| ping.is_none())
        {
            let ping = self.iscsi.ping();
            let waiting = self
                .management
                .fences
                .iter_mut()
                .filter(|(ping, _)| ping.is_none());
            waiting.for_each(|(waiting, _)| *waiting = ping);
        }
    }

    /// Applies a call to all slots. Returns true if it aborted any.
    fn apply_to_slots(&mut self, io: &mut Io, call: &Call, hold: &Hold) -> bool {
        let mut any = false;
        let used: Vec<u32> = self.slots.used().collect();
        for index in used {
            let later = self.is_exempt(index, call);
            let slot = self.slots.get(index);
            // A command that waits for its CmdSN turn gets the error for a missing unit at its turn.
            let has_arrived = slot.is_started() || slot.tag.is_some();
            let runs_here = !matches!(slot.client, Client::None | Client::Background(_));
            let known = Known {
                task: &slot.task,
                tag: slot.tag,
                unit: unit_address(slot.lun).filter(|_| has_arrived),
                id: 0,
                started: slot.is_started() && runs_here,
                later,
                open: slot.iscsi().is_some(),
            };
            match call.effect(&known) {
                Some(Effect::Abort) => {
                    self.abort_slot(io, index, Some(hold));
                    any = true;
                }
                Some(Effect::Wait) => slot.task.hold(hold),
                None => {}
            }
        }
        if let (TaskOperation::End, Some(scope)) = (call.operation, call.scope()) {
            self.output.wait_for_owed(scope, hold);
        }
        any
    }

    fn is_exempt(&mut self, index: u32, call: &Call) -> bool {
        let slot = self.slots.get(index);
        let (Some(exempt), Some(tag), Some(task)) = (call.exempt, slot.tag, slot.iscsi()) else {
            return false;
        };
        self.iscsi.command(task).is_some_and(|command| {
            let older = before(command.cmd_sn, exempt.from);
            // An immediate command has the CmdSN of its successor.
            let beside = command.immediate && command.cmd_sn == exempt.from;
            tag.nexus == exempt.nexus && !older && !beside
        })
    }

    /// Applies a call to tasks of units that are being removed from the target.
    pub(crate) fn end_tasks(&mut self, io: &mut Io, target: &str, call: &Call, hold: &Hold) {
        let session = self.login.session_mut();
        if let Some(session) = session.filter(|session| session.target.options.name == target) {
            // From here on, no new command reaches these units.
            session.view.refresh();
            self.apply_call(io, call, hold);
        }
    }

    pub(crate) fn end_wait(&mut self, io: &mut Io, after: After) {
        match after {
            After::Login => {
                self.login.waits = false;
                self.resume_parsing(io);
            }
            After::Function { tag } => self.function_done(tag, TaskFunctionResponse::Complete),
            After::ColdReset { tag } => {
                self.function_done(tag, TaskFunctionResponse::Complete);
                self.drop_target_sessions();
            }
            After::Logout { tag } => {
                self.iscsi.logout_response(tag).ok();
                self.resume_parsing(io);
            }
        }
    }

    /// Aborts the tasks that a logout ends. The response waits until none of them can access a disk (RFC 7143, 11.15).
    pub(crate) fn log_out(&mut self, io: &mut Io, logout: Logout) {
        let hold = hold(&self.handle, After::Logout { tag: logout.tag });
        let own = self.iscsi.key();
        let others = match logout.scope {
            LogoutScope::ForRecovery(lost) => {
                return self.remove_for_recovery(lost, &hold);
            }
            LogoutScope::Connection => Vec::new(),
            LogoutScope::Other(key) => vec![key],
            LogoutScope::Session => {
                let session = self.iscsi.session();
                session.map_or(Vec::new(), |session| session.connections())
            }
        };
        for other in others.into_iter().filter(|key| Some(*key) != own) {
            self.shared().log_out_connection(other, hold.clone());
        }
        if matches!(logout.scope, LogoutScope::Session | LogoutScope::Connection) {
            let used: Vec<u32> = self.slots.used().collect();
            for index in used {
                self.abort_slot(io, index, Some(&hold));
            }
        }
    }

    /// Closes another connection but retains its tasks. The response waits until none of its I/O can access a disk.
    fn remove_for_recovery(&mut self, lost: Option<ConnectionKey>, hold: &Hold) {
        if let Some(key) = lost {
            self.shared().remove_for_recovery(key, hold.clone());
        }
        let Some(own) = self.iscsi.key() else { return };
        if let Some(nexus) = self.shared().nexus(own.tsih) {
            self.shared().keep_until_drained(&nexus, own.tsih, hold);
        }
    }

    fn function_done(&mut self, tag: u32, answer: TaskFunctionResponse) {
        // Fails if the connection is in its last iteration.
        self.iscsi.task_management_response(tag, answer).ok();
    }
}
