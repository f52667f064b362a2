//! Tasks whose connection was lost, until the initiator takes them to another one (RFC 7143, 7.2.2; error recovery level 2).
//!
//! Each is done once, whatever is lost:
//!
//! - What has not begun, or only reads the medium, begins anew on the other connection ([`State::Restart`]).
//! - What has reached a disk goes on, and its answer is kept for the other connection ([`State::Running`], [`State::Ended`]).
//! - What was answered and is not acknowledged is answered again, from what [`super::kept`] has.
//!
//! A command that is not in its turn by CmdSN is forgotten instead: ExpCmdSN tells the initiator so, and it sends it again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::data_out::WriteData;
use super::full_feature::{FullFeature, Io};
use super::responses::Content;
use super::steps::{Completion, NoSuchTask, Step, Then};
use super::tasks::{Command, Pending, Task, TaskId};
use crate::pdu::{TaskFunctionResponse, TaskManagementRequest};
use crate::session::ConnectionKey;

/// Tasks of one session that wait: more than a window, and what was answered on a few connections.
const TASKS_MAX: usize = 4096;

/// READ (6), (10), (12), (16).
const MEDIA_READS: [u8; 4] = [0x08, 0x28, 0xa8, 0x88];

impl Command {
    /// Does it read the medium and do nothing else? Then it may be done twice.
    pub fn is_media_read(&self) -> bool {
        let opcode = self.cdb.first();
        self.read && !self.write && opcode.is_some_and(|opcode| MEDIA_READS.contains(opcode))
    }
}

/// How far a task has come.
#[derive(Debug)]
pub(crate) enum State {
    Restart,
    Running,
    /// With what it read.
    Ended(Pending, Vec<u8>),
}

/// A task without a connection.
#[derive(Debug)]
pub(crate) struct Reassignable {
    /// Whose it was.
    pub connection: ConnectionKey,
    pub command: Command,
    /// MaxCmdSN has not moved on for it.
    pub holds_window: bool,
    pub state: State,
}

/// The tasks of a session that have no connection; control plane: touched when a connection is lost, and after that.
#[derive(Debug, Default)]
pub struct ReassignableTasks {
    tasks: Mutex<Vec<Reassignable>>,
    /// Their number, to be read without the lock.
    count: AtomicUsize,
}

/// What becomes of a task when its connection is lost.
#[derive(Clone, Copy, Debug)]
pub enum Left<'a> {
    /// Nothing was done that counts: it begins anew.
    ToRestart,
    /// It goes on; [`ReassignableTasks::ended`] follows.
    Running,
    /// It is over.
    Ended(&'a Completion<'a>),
}

impl ReassignableTasks {
    fn lock(&self) -> MutexGuard<'_, Vec<Reassignable>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a task in; true: one that was there before has gone for it, for which the window has to move on.
    #[must_use]
    pub(crate) fn add(&self, task: Reassignable) -> bool {
        let mut tasks = self.lock();
        let mut window = false;
        if tasks.len() >= TASKS_MAX {
            let ended = |task: &Reassignable| !matches!(task.state, State::Running);
            if let Some(oldest) = tasks.iter().position(ended) {
                window = tasks.remove(oldest).holds_window;
            }
        }
        tasks.push(task);
        self.count.store(tasks.len(), Ordering::Release);
        window
    }

    /// A task that went on has ended; `data`: what it tells beside its status.
    pub fn ended(&self, itt: u32, completion: &Completion<'_>, data: Vec<u8>) {
        let mut tasks = self.lock();
        let mut running = tasks.iter_mut();
        let is_it = |task: &&mut Reassignable| {
            task.command.itt == itt && matches!(task.state, State::Running)
        };
        if let Some(task) = running.find(is_it) {
            task.state = State::Ended(Pending::new(completion), data);
        }
    }

    /// Is there a task of a connection with this CID?
    pub fn has_any_of(&self, cid: u16) -> bool {
        self.lock().iter().any(|task| task.connection.cid == cid)
    }

    /// Number of tasks.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Is there none?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ends the tasks that `is_meant` picks by ITT and connection, without an answer, but for those that run: they end by
    /// themselves. Gives how far the window has to move on for them.
    pub(crate) fn forget(&self, is_meant: impl Fn(u32, ConnectionKey) -> bool) -> usize {
        let mut window = 0;
        let mut tasks = self.lock();
        tasks.retain(|task| {
            let goes = is_meant(task.command.itt, task.connection)
                && !matches!(task.state, State::Running);
            window += usize::from(goes && task.holds_window);
            !goes
        });
        self.count.store(tasks.len(), Ordering::Release);
        window
    }

    /// A task that goes on ends without an answer; true: the window has to move on for it.
    pub(crate) fn end_running(&self, itt: u32) -> bool {
        let mut tasks = self.lock();
        let mut all = tasks.iter();
        let is_it =
            |task: &Reassignable| task.command.itt == itt && matches!(task.state, State::Running);
        let Some(at) = all.position(is_it) else {
            return false;
        };
        let task = tasks.swap_remove(at);
        self.count.store(tasks.len(), Ordering::Release);
        task.holds_window
    }

    /// The task is taken to another connection, or the answer why not.
    fn take(&self, itt: u32, lun: [u8; 8]) -> Result<Reassignable, TaskFunctionResponse> {
        let mut tasks = self.lock();
        let mut all = tasks.iter();
        let at = all.position(|task| task.command.itt == itt && task.command.lun == lun);
        let at = at.ok_or(TaskFunctionResponse::TaskDoesNotExist)?;
        match tasks[at].state {
            // Its connection has not come to its end.
            State::Running => Err(TaskFunctionResponse::TaskStillAllegiant),
            State::Restart | State::Ended(..) => {
                let task = tasks.swap_remove(at);
                self.count.store(tasks.len(), Ordering::Release);
                Ok(task)
            }
        }
    }
}

impl FullFeature {
    /// Are the tasks kept when the connection is lost?
    pub fn recovers(&self) -> bool {
        let agreed = &self.session.parameters;
        agreed.error_recovery_level == 2 && agreed.time_to_retain > 0 && !self.session.is_closed()
    }

    /// The connection is lost, and the task with it. What has not had its turn is forgotten.
    pub fn leave_behind(&mut self, id: TaskId, left: Left<'_>) -> Result<u32, NoSuchTask> {
        let task = self.tasks.remove(id).filter(|task| task.delivered);
        let task = task.ok_or(NoSuchTask)?;
        let state = match left {
            Left::ToRestart => State::Restart,
            Left::Running => State::Running,
            Left::Ended(completion) => State::Ended(Pending::new(completion), Vec::new()),
        };
        let itt = task.command.itt;
        self.leave_task(task, state);
        Ok(itt)
    }

    fn leave_task(&mut self, task: Task, state: State) {
        self.immediate_commands -= u32::from(task.command.immediate);
        self.session.add_reassignable(Reassignable {
            connection: self.key,
            holds_window: !task.command.immediate,
            command: task.command,
            state,
        });
    }

    /// What is left of the connection's tasks, and what it has answered, waits for another one. What has not had its turn is
    /// forgotten.
    pub fn leave_all_behind(&mut self) {
        let open: Vec<TaskId> = self.tasks.iter().map(|(id, _)| id).collect();
        for id in open {
            let Some(mut task) = self.tasks.remove(id).filter(|task| task.delivered) else {
                continue;
            };
            let state = match task.pending.take() {
                // Its answer waits for data that will not come any more.
                Some(pending) => State::Ended(*pending, Vec::new()),
                None => State::Restart,
            };
            self.leave_task(task, state);
        }
        self.keep_for_reassignment();
    }

    /// TASK REASSIGN (11.5.1): the task goes on here, behind the answer to the function.
    pub fn reassign(&mut self, io: &mut Io, tag: u32, request: &TaskManagementRequest) {
        let taken = match self.session.parameters.error_recovery_level {
            2 => {
                let itt = request.referenced_task_tag.get();
                match self.tasks.find(itt) {
                    Some(_) => Err(TaskFunctionResponse::TaskStillAllegiant),
                    None => self.session.reassignable.take(itt, request.lun),
                }
            }
            _ => Err(TaskFunctionResponse::ReassignmentNotSupported),
        };
        // Its own command and those of others that were reassigned are no more than the table has room for; see `holds_window`.
        let taken = taken.and_then(|task| match self.tasks.has_room() {
            true => Ok(task),
            false => {
                self.session.add_reassignable(task);
                Err(TaskFunctionResponse::Rejected)
            }
        });
        let answer = taken.as_ref().err().copied();
        let answer = answer.unwrap_or(TaskFunctionResponse::Complete);
        // Cannot fail: the tag was just noted.
        self.task_management_response(io, tag, answer)
            .unwrap_or_default();
        if let Ok(task) = taken {
            self.take_over(io, task, request.exp_data_sn.get());
        }
    }

    /// `exp_data_sn`: of a read the initiator has everything before this DataSN, counted as this connection would send it.
    fn take_over(&mut self, io: &mut Io, lost: Reassignable, exp_data_sn: u32) {
        let mut command = lost.command;
        // What the window has moved on for counts beside it.
        command.immediate |= !lost.holds_window;
        self.immediate_commands += u32::from(command.immediate);
        let data = match &lost.state {
            State::Restart => WriteData::begin(command.write_length(), 0, true, &self.rules),
            _ => WriteData::none(),
        };
        let mut task = Task::new(command, data, self.rules.max_burst);
        (task.seen, task.delivered) = (true, true);
        task.skip_data = exp_data_sn;
        let Some(id) = self.tasks.insert(task) else {
            return;
        };
        match lost.state {
            State::Ended(outcome, data) if !data.is_empty() => {
                // From a buffer of its own, which is copied.
                let content = Content::Seen(&data);
                self.data_in_copied(io, id, content);
                self.send_pending(io, id, &outcome);
            }
            State::Ended(outcome, _) => self.send_pending(io, id, &outcome),
            State::Restart | State::Running => io.steps.push_back(Step::Command(id)),
        }
    }

    fn data_in_copied(&mut self, io: &mut Io, id: TaskId, content: Content<'_>) {
        // Cannot fail: the task was just made.
        self.data_in(io, id, None, 0, content, Then::Response)
            .unwrap_or_default();
    }
}
