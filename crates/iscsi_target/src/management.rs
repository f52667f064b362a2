//! Task management (RFC 7143, 11.5) across a target's connections, and everything else that waits for tasks of others.
//!
//! Tasks run on the workers of their connections. A function marks those that it means, on every one of them, and
//! waits until none of them can touch a disk any more. A [`Hold`] is kept by every message and every such task:
//! when the last one lets go, whoever waits is told.

use std::sync::Arc;

use iscsi::pdu::{TaskFunction, TaskFunctionResponse};
use iscsi::serial::before;
use iscsi::session::ConnectionKey;
use iscsi::target::{Logout, LogoutScope, TaskManagement};
use latency::UnitAddress;
use reactor::Io;
use scsi::{AbortScope, Lun, LunAddress, Managed, TaskManagementFunction};
use scsi_exec::{Call, Effect, Exempt, Hold, Known, Runner, Tasks, Want};

use crate::connection::Connection;
use crate::shared::Place;

/// What goes on when a wait is over.
#[derive(Clone, Copy, Debug)]
pub(crate) enum After {
    /// A login is answered, and the stream looked at again.
    Login,
    /// A task management function is answered.
    Function { tag: u32 },
    /// As before; then every connection of the target is dropped.
    ColdReset { tag: u32 },
    /// A logout is answered.
    Logout { tag: u32 },
}

/// A hold after whose last clone the connection at `place` goes on.
pub(crate) fn hold(place: &Place, after: After) -> Hold {
    let place = place.clone();
    Hold::new(move || place.send(move |connection, io| connection.wait_is_over(io, after)))
}

/// How calls reach a connection.
pub(crate) fn runner(place: Place) -> Runner {
    Arc::new(move |call: &Call, hold: Hold| {
        let call = call.clone();
        place.send(move |connection, io| {
            // Of its own calls that has been done.
            let mut own = connection.own_aborts.iter();
            match own.position(|own| call.scope().is_some_and(|scope| Arc::ptr_eq(own, scope))) {
                Some(own) => drop(connection.own_aborts.swap_remove(own)),
                None => connection.heed_other(io, &call, &hold),
            }
        });
    })
}

/// The address in a LUN field, if it is one of a unit.
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
            // it was found, or this would not be asked
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
                self.abort_everywhere(io, scope, Want::of(function), number, after);
            }
        }
    }

    /// An initiator that may only read must not end what others have begun, nor the RESERVE of one.
    fn may_not(&self, function: TaskFunction) -> bool {
        use TaskFunction::*;
        let resets = matches!(
            function,
            LogicalUnitReset | TargetWarmReset | TargetColdReset
        );
        resets
            && self
                .session
                .as_ref()
                .is_some_and(|session| session.read_only)
    }

    fn abort_one(&mut self, io: &mut Io, request: &TaskManagement) {
        let Some(task) = request.referenced else {
            return self.abort_one_again(request);
        };
        let hold = hold(self.place(), After::Function { tag: request.tag });
        match self.slots.find(task) {
            Some(slot) => self.abort_slot(io, slot.index, Some(&hold)),
            // it has no slot: nothing of it was begun
            None => self.iscsi.abort(task).unwrap_or_default(),
        }
    }

    /// ABORT TASK of what has ended for the initiator: a reset by others, or another ABORT TASK, may have done so, and its I/O be in flight.
    /// It would overtake what the initiator sends after the answer.
    fn abort_one_again(&mut self, request: &TaskManagement) {
        let Some(slot) = self.slots.aborted(request.referenced_tag, request.lun) else {
            return self.function_done(request.tag, TaskFunctionResponse::TaskDoesNotExist);
        };
        let hold = hold(&self.place, After::Function { tag: request.tag });
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
        let call = Call::new(Tasks::Set(unit, Some(nexus)), Want::Find);
        let (place, asked) = (self.place().clone(), call.clone());
        let hold = Hold::new(move || {
            let answer = match asked.has_found() {
                true => TaskFunctionResponse::Succeeded,
                false => TaskFunctionResponse::Complete,
            };
            place.send(move |connection, _| connection.function_done(tag, answer));
        });
        for place in self.shared().connections() {
            let (call, hold) = (call.clone(), hold.clone());
            place.send(move |connection, io| connection.heed_other(io, &call, &hold));
        }
    }

    /// Aborts the tasks of a scope through every transport, this connection's at once. Of its own session's tasks those are meant
    /// that are older than CmdSN `number`, of whatever connection (RFC 7143, 4.2.2.3.4).
    pub(crate) fn abort_everywhere(
        &mut self,
        io: &mut Io,
        scope: AbortScope,
        want: Want,
        number: u32,
        after: After,
    ) {
        let hold = hold(self.place(), after);
        let call = Call::of_scope(scope, want).except(self.sent_later(number));
        self.heed(io, &call, &hold);
        // The runner of this connection is told as well.
        self.own_aborts.extend(call.scope().cloned());
        let runners = self.shared().units.runners().clone();
        runners.call(&call, move || drop(hold));
    }

    /// The tasks of this session that are sent from CmdSN `number` on.
    pub(crate) fn sent_later(&self, number: u32) -> Option<Exempt> {
        let nexus = self.nexus_id()?;
        Some(Exempt {
            nexus,
            from: number,
        })
    }

    /// The CmdSN of a command.
    pub(crate) fn cmd_sn(&self, index: u32) -> Option<u32> {
        let command = self.iscsi.command(self.slots.task(index)?)?;
        Some(command.cmd_sn)
    }

    /// Does what any connection or queue wants of tasks.
    pub(crate) fn heed_other(&mut self, io: &mut Io, call: &Call, hold: &Hold) {
        if self.heed(io, call, hold) {
            self.iscsi.tell_window();
        }
        self.fence(call, hold);
    }

    /// Response Fence (RFC 7143, 4.2.2.3.4): a function of this session on another of its connections, or its PREEMPT AND ABORT, is answered
    /// when the initiator has all that was sent here before. Answers alone would not do: it may not know of an R2T of a task that is aborted.
    fn fence(&mut self, call: &Call, hold: &Hold) {
        let own = self.nexus_id();
        if !self.ended && call.exempt.is_some_and(|exempt| Some(exempt.nexus) == own) {
            let ping = self.iscsi.ping();
            self.fences.push((ping, hold.clone()));
        }
    }

    /// The initiator may have answered what functions wait for. Those for which there was no room yet have theirs sent.
    pub(crate) fn lift_fences(&mut self) {
        if self.fences.is_empty() {
            return;
        }
        let iscsi = &self.iscsi;
        self.fences
            .retain(|(ping, _)| ping.is_none_or(|ping| !iscsi.is_answered(ping)));
        if self.fences.iter().any(|(ping, _)| ping.is_none()) {
            let ping = self.iscsi.ping();
            let waiting = self.fences.iter_mut().filter(|(ping, _)| ping.is_none());
            waiting.for_each(|(waiting, _)| *waiting = ping);
        }
    }

    /// The same; were any aborted?
    fn heed(&mut self, io: &mut Io, call: &Call, hold: &Hold) -> bool {
        let mut any = false;
        let used: Vec<u32> = self.slots.used().collect();
        for index in used {
            let later = self.is_exempt(index, call);
            let slot = self.slots.get(index);
            // What waits for its turn in the order of CmdSN is told that its unit is gone when it is there.
            let has_come = slot.begun || slot.tag.is_some();
            let known = Known {
                task: &slot.task,
                tag: slot.tag,
                unit: unit_address(slot.lun).filter(|_| has_come),
                id: 0,
                begun: slot.begun && (slot.iscsi.is_some() || slot.aborted || slot.lost.is_some()),
                later,
                open: slot.iscsi.is_some(),
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
        if let (Want::End, Some(scope)) = (call.want, call.scope()) {
            self.output.wait_for_owed(scope, hold);
        }
        any
    }

    fn is_exempt(&mut self, index: u32, call: &Call) -> bool {
        let slot = self.slots.get(index);
        let (Some(exempt), Some(tag), Some(task)) = (call.exempt, slot.tag, slot.iscsi) else {
            return false;
        };
        self.iscsi.command(task).is_some_and(|command| {
            let older = before(command.cmd_sn, exempt.from);
            // An immediate command has the number of the one after it.
            let beside = command.immediate && command.cmd_sn == exempt.from;
            tag.nexus == exempt.nexus && !older && !beside
        })
    }

    /// Does what is wanted of the tasks of units that are taken away from the target.
    pub(crate) fn end_tasks(&mut self, io: &mut Io, target: &str, call: &Call, hold: &Hold) {
        let session = self.session.as_mut();
        if let Some(session) = session.filter(|session| session.target.options.name == target) {
            // No command reaches them from here on.
            session.view.refresh();
            self.heed_other(io, call, hold);
        }
    }

    /// Goes on after a wait.
    pub(crate) fn wait_is_over(&mut self, io: &mut Io, after: After) {
        match after {
            After::Login => {
                self.login_waits = false;
                self.look_again(io);
            }
            After::Function { tag } => self.function_done(tag, TaskFunctionResponse::Complete),
            After::ColdReset { tag } => {
                self.function_done(tag, TaskFunctionResponse::Complete);
                self.drop_target_sessions();
            }
            After::Logout { tag } => {
                self.iscsi.logout_response(tag).ok();
                self.look_again(io);
            }
        }
    }

    /// Takes back what a logout ends; it is answered when nothing of that can touch a disk any more (RFC 7143, 11.15).
    pub(crate) fn log_out(&mut self, io: &mut Io, logout: Logout) {
        let hold = hold(self.place(), After::Logout { tag: logout.tag });
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

    /// Closes another connection, whose tasks stay; the answer waits until nothing of it can touch a disk any more.
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
        // Its connection may be in its last iteration.
        self.iscsi.task_management_response(tag, answer).ok();
    }
}
