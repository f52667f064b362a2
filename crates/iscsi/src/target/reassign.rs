//! Tasks of lost connections, until the initiator reassigns them to another one (RFC 7143, 7.2.2; error recovery
//! level 2).
//!
//! Each task is executed once:
//!
//! - A task that has not started, or only reads the medium, restarts on the other connection ([`TaskState::Restart`]).
//! - A task with submitted I/O continues, and its response is stored for the other connection ([`TaskState::Running`],
//!   [`TaskState::Ended`]).
//! - An unacknowledged response is sent again, from the store of [`super::retransmission`].
//!
//! An undelivered command is dropped. ExpCmdSN shows that to the initiator, which sends the command again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::data_out::WriteData;
use super::full_feature::{FullFeature, Io};
use super::responses::Content;
use super::steps::{Completion, NoSuchTask, Step, Then};
use super::tasks::{Command, Pending, Task, TaskId};
use crate::pdu::{TaskFunctionResponse, TaskManagementRequest};
use crate::session::ConnectionKey;

/// Maximum number of waiting tasks per session: more than a window and the unacknowledged responses of a few connections.
const TASKS_MAX: usize = 4096;

/// READ (6), (10), (12), (16).
const MEDIA_READS: [u8; 4] = [0x08, 0x28, 0xa8, 0x88];

impl Command {
    /// Returns true if the command only reads the medium, so that it may be executed twice.
    pub fn is_media_read(&self) -> bool {
        let opcode = self.cdb.first();
        self.read && !self.write && opcode.is_some_and(|opcode| MEDIA_READS.contains(opcode))
    }
}

/// Progress of a task.
#[derive(Debug)]
pub(crate) enum TaskState {
    Restart,
    Running,
    /// Outcome and read data.
    Ended(Pending, Vec<u8>),
}

/// A task without a connection.
#[derive(Debug)]
pub(crate) struct Reassignable {
    /// The lost connection.
    pub connection: ConnectionKey,
    pub command: Command,
    /// MaxCmdSN was not advanced for this task yet.
    pub holds_window: bool,
    pub state: TaskState,
}

/// Tasks of a session without a connection. Control plane: used only after a connection was lost.
#[derive(Debug, Default)]
pub struct ReassignableTasks {
    tasks: Mutex<Vec<Reassignable>>,
    /// Number of tasks, readable without the lock.
    count: AtomicUsize,
}

/// State of a task at the loss of its connection.
#[derive(Clone, Copy, Debug)]
pub enum DetachedState<'a> {
    /// The task had no effect yet and restarts.
    ToRestart,
    /// The task continues; [`ReassignableTasks::ended`] follows.
    Running,
    /// The task has ended.
    Ended(&'a Completion<'a>),
}

impl ReassignableTasks {
    fn lock(&self) -> MutexGuard<'_, Vec<Reassignable>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a task. Returns true if it evicted another task and the window must advance.
    #[must_use]
    pub(crate) fn add(&self, task: Reassignable) -> bool {
        let mut tasks = self.lock();
        let mut window = false;
        if tasks.len() >= TASKS_MAX {
            let ended = |task: &Reassignable| !matches!(task.state, TaskState::Running);
            if let Some(oldest) = tasks.iter().position(ended) {
                window = tasks.remove(oldest).holds_window;
            }
        }
        tasks.push(task);
        self.count.store(tasks.len(), Ordering::Release);
        window
    }

    /// Records the end of a running task. `data` is its read data.
    pub fn ended(&self, itt: u32, completion: &Completion<'_>, data: Vec<u8>) {
        let mut tasks = self.lock();
        let mut running = tasks.iter_mut();
        let is_it = |task: &&mut Reassignable| {
            task.command.itt == itt && matches!(task.state, TaskState::Running)
        };
        if let Some(task) = running.find(is_it) {
            task.state = TaskState::Ended(Pending::new(completion), data);
        }
    }

    /// Returns true if any task belongs to a connection with this CID.
    pub fn has_any_of(&self, cid: u16) -> bool {
        self.lock().iter().any(|task| task.connection.cid == cid)
    }

    /// Number of tasks.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns true if there are no tasks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes the tasks that `is_meant` selects by ITT and connection and sends no response. Running tasks are skipped,
    /// because they end on their own. Returns the required advance of the window.
    pub(crate) fn forget(&self, is_meant: impl Fn(u32, ConnectionKey) -> bool) -> usize {
        let mut window = 0;
        let mut tasks = self.lock();
        tasks.retain(|task| {
            let goes = is_meant(task.command.itt, task.connection)
                && !matches!(task.state, TaskState::Running);
            window += usize::from(goes && task.holds_window);
            !goes
        });
        self.count.store(tasks.len(), Ordering::Release);
        window
    }

    /// Removes a running task and sends no response. Returns true if the window must advance for it.
    pub(crate) fn end_running(&self, itt: u32) -> bool {
        let mut tasks = self.lock();
        let mut all = tasks.iter();
        let is_it = |task: &Reassignable| {
            task.command.itt == itt && matches!(task.state, TaskState::Running)
        };
        let Some(at) = all.position(is_it) else {
            return false;
        };
        let task = tasks.swap_remove(at);
        self.count.store(tasks.len(), Ordering::Release);
        task.holds_window
    }

    /// Removes and returns the task for reassignment, or returns the response code that explains the refusal.
    fn take(&self, itt: u32, lun: [u8; 8]) -> Result<Reassignable, TaskFunctionResponse> {
        let mut tasks = self.lock();
        let mut all = tasks.iter();
        let at = all.position(|task| task.command.itt == itt && task.command.lun == lun);
        let at = at.ok_or(TaskFunctionResponse::TaskDoesNotExist)?;
        match tasks[at].state {
            // The old connection of the task has not ended.
            TaskState::Running => Err(TaskFunctionResponse::TaskStillAllegiant),
            TaskState::Restart | TaskState::Ended(..) => {
                let task = tasks.swap_remove(at);
                self.count.store(tasks.len(), Ordering::Release);
                Ok(task)
            }
        }
    }
}

impl FullFeature {
    /// Returns true if tasks survive the loss of the connection.
    pub fn recovers(&self) -> bool {
        let agreed = &self.session.parameters;
        agreed.error_recovery_level == 2 && agreed.time_to_retain > 0 && !self.session.is_closed()
    }

    /// Detaches a task from the lost connection. An undelivered task is dropped.
    pub fn detach_task(&mut self, id: TaskId, left: DetachedState<'_>) -> Result<u32, NoSuchTask> {
        let task = self.tasks.remove(id).filter(|task| task.delivered);
        let task = task.ok_or(NoSuchTask)?;
        let state = match left {
            DetachedState::ToRestart => TaskState::Restart,
            DetachedState::Running => TaskState::Running,
            DetachedState::Ended(completion) => {
                TaskState::Ended(Pending::new(completion), Vec::new())
            }
        };
        let itt = task.command.itt;
        self.store_detached_task(task, state);
        Ok(itt)
    }

    fn store_detached_task(&mut self, task: Task, state: TaskState) {
        self.immediate_commands -= u32::from(task.command.immediate);
        self.session.add_reassignable(Reassignable {
            connection: self.key,
            holds_window: !task.command.immediate,
            command: task.command,
            state,
        });
    }

    /// Makes the remaining tasks and the unacknowledged responses of the connection available for reassignment. Tasks whose
    /// CmdSN was not reached are dropped.
    pub fn detach_all_tasks(&mut self) {
        let open: Vec<TaskId> = self.tasks.iter().map(|(id, _)| id).collect();
        for id in open {
            let Some(mut task) = self.tasks.remove(id).filter(|task| task.delivered) else {
                continue;
            };
            let state = match task.pending.take() {
                // The response was waiting for data that can no longer arrive.
                Some(pending) => TaskState::Ended(*pending, Vec::new()),
                None => TaskState::Restart,
            };
            self.store_detached_task(task, state);
        }
        self.save_for_reassignment();
    }

    /// Handles TASK REASSIGN (11.5.1): sends the function response, then continues the task on this connection.
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
        // The connection's own commands and reassigned commands together fit the table; see `holds_window`.
        let taken = taken.and_then(|task| match self.tasks.has_room() {
            true => Ok(task),
            false => {
                self.session.add_reassignable(task);
                Err(TaskFunctionResponse::Rejected)
            }
        });
        let answer = taken.as_ref().err().copied();
        let answer = answer.unwrap_or(TaskFunctionResponse::Complete);
        // Cannot fail: the tag was just recorded.
        self.task_management_response(io, tag, answer)
            .unwrap_or_default();
        if let Ok(task) = taken {
            self.continue_task(io, task, request.exp_data_sn.get());
        }
    }

    /// Continues a task on this connection. For a read, the initiator has all Data-In PDUs before `exp_data_sn`, as
    /// numbered by this connection.
    fn continue_task(&mut self, io: &mut Io, lost: Reassignable, exp_data_sn: u32) {
        let mut command = lost.command;
        // A command that no longer occupies the window counts as immediate.
        command.immediate |= !lost.holds_window;
        self.immediate_commands += u32::from(command.immediate);
        let data = match &lost.state {
            TaskState::Restart => WriteData::begin(command.write_length(), 0, true, &self.rules),
            _ => WriteData::none(),
        };
        let mut task = Task::new(command, data, self.rules.max_burst);
        (task.seen, task.delivered) = (true, true);
        task.skip_data = exp_data_sn;
        let Some(id) = self.tasks.insert(task) else {
            return;
        };
        match lost.state {
            TaskState::Ended(outcome, data) if !data.is_empty() => {
                // Copied, because the data has no caller buffer.
                let content = Content::Seen(&data);
                self.data_in_copied(io, id, content);
                self.send_pending(io, id, &outcome);
            }
            TaskState::Ended(outcome, _) => self.send_pending(io, id, &outcome),
            TaskState::Restart | TaskState::Running => io.steps.push_back(Step::Command(id)),
        }
    }

    fn data_in_copied(&mut self, io: &mut Io, id: TaskId, content: Content<'_>) {
        // Cannot fail: the task was just created.
        self.data_in(io, id, None, 0, content, Then::Response)
            .unwrap_or_default();
    }
}
