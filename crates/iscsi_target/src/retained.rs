//! Sessions at error recovery level 2 with lost connections. Until a timeout, their tasks wait for another connection (RFC 7143, 7.2.2 and
//! 7.4). Control plane.
//!
//! The protocol decides about each task (`iscsi::target::ReassignableTasks`). This file connects tasks that will restart with the SCSI
//! core: task management aborts them and waits for them like running tasks.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use iscsi::serial::before;
use iscsi::session::{ConnectionKey, Session};
use latency::UnitAddress;
use scsi::TaskTag;
use scsi_exec::{Call, Effect, Hold, Known, Registration, Runner, Runners, Task};

use crate::shared::lock;

/// A task that will restart.
pub(crate) struct RetainedTask {
    pub connection: ConnectionKey,
    pub cmd_sn: u32,
    /// Tag in the SCSI core, if the task reached it.
    pub tag: Option<TaskTag>,
    /// Operations that wait for its end.
    pub holds: Vec<Hold>,
}

/// Tasks by ITT.
type RetainedTasks = Arc<Mutex<HashMap<u32, RetainedTask>>>;

struct RetainedSession {
    session: Arc<Session>,
    tasks: RetainedTasks,
    /// Lost connections, with the second at which their tasks expire.
    lost: Vec<(ConnectionKey, u64)>,
    /// Registration for task management.
    _registration: Registration,
}

#[derive(Default)]
pub(crate) struct Retained {
    /// Sessions by TSIH.
    sessions: Mutex<HashMap<u16, RetainedSession>>,
    /// Number of sessions, readable without the lock.
    count: AtomicUsize,
}

/// Creates the function that applies task management calls to the tasks of a session.
fn runner(session: Arc<Session>, tasks: RetainedTasks) -> Runner {
    Arc::new(move |call: &Call, hold: Hold| {
        let idle = Task::default();
        lock(&tasks).retain(|itt, task| {
            let later = call.exempt.is_some_and(|exempt| {
                let is_its = task.tag.is_some_and(|tag| tag.nexus == exempt.nexus);
                is_its && !before(task.cmd_sn, exempt.from)
            });
            let known = Known {
                task: &idle,
                tag: task.tag,
                unit: None::<UnitAddress>,
                id: 0,
                started: true,
                later,
                open: true,
            };
            match call.effect(&known) {
                Some(Effect::Abort) => {
                    session.forget_reassignable(|of, _| of == *itt);
                    false
                }
                Some(Effect::Wait) => {
                    task.holds.push(hold.clone());
                    true
                }
                None => true,
            }
        });
    })
}

impl Retained {
    /// Records the loss of a connection. `until`: the second at which its tasks expire.
    pub fn lose(
        &self,
        session: &Arc<Session>,
        runners: &Arc<Runners>,
        key: ConnectionKey,
        until: u64,
    ) {
        let mut all = lock(&self.sessions);
        let entry = all.entry(key.tsih).or_insert_with(|| {
            let tasks = RetainedTasks::default();
            RetainedSession {
                session: session.clone(),
                _registration: runners.register(runner(session.clone(), tasks.clone())),
                tasks,
                lost: Vec::new(),
            }
        });
        entry.lost.push((key, until));
        self.count.store(all.len(), Ordering::Release);
    }

    /// Adds a task of a lost connection that will restart.
    pub fn add(&self, itt: u32, task: RetainedTask) {
        if let Some(entry) = lock(&self.sessions).get(&task.connection.tsih) {
            lock(&entry.tasks).insert(itt, task);
        }
    }

    /// Removes a task that restarts. Returns the holds that wait for its end.
    pub fn take(&self, tsih: u16, itt: u32) -> Vec<Hold> {
        if self.is_empty() {
            return Vec::new();
        }
        let all = lock(&self.sessions);
        let task = all
            .get(&tsih)
            .and_then(|entry| lock(&entry.tasks).remove(&itt));
        task.map_or(Vec::new(), |task| task.holds)
    }

    /// Removes an ended session.
    pub fn end(&self, tsih: u16) {
        let mut all = lock(&self.sessions);
        let gone = all.remove(&tsih);
        self.count.store(all.len(), Ordering::Release);
        drop(all);
        // Dropping the holds completes the operations that wait for its tasks.
        drop(gone);
    }

    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Expires tasks. Returns the sessions without remaining lost connections.
    pub fn expire(&self, now: u64) -> Vec<Arc<Session>> {
        let mut over = Vec::new();
        let mut all = lock(&self.sessions);
        all.retain(|_, entry| {
            entry.lost.retain(|(key, until)| {
                let stays = now < *until;
                if !stays {
                    entry.session.forget_reassignable(|_, of| of == *key);
                    lock(&entry.tasks).retain(|_, task| task.connection != *key);
                }
                stays
            });
            if entry.lost.is_empty() {
                over.push(entry.session.clone());
            }
            !entry.lost.is_empty()
        });
        self.count.store(all.len(), Ordering::Release);
        over
    }
}
