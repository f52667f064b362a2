//! Sessions at error recovery level 2 whose connections were lost: until the time is over their tasks wait for another connection
//! (RFC 7143, 7.2.2 and 7.4). Control plane.
//!
//! What becomes of each task is the protocol's (`iscsi::target::ReassignableTasks`). Here is what the core knows them by: tasks that have
//! yet to begin anew are aborted, and waited for, as those that run are.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use iscsi::serial::before;
use iscsi::session::{ConnectionKey, Session};
use latency::UnitAddress;
use scsi::TaskTag;
use scsi_exec::{Call, Effect, Hold, Known, Registration, Runner, Runners, Task};

use crate::shared::lock;

/// A task that is to begin anew.
pub(crate) struct RetainedTask {
    pub connection: ConnectionKey,
    pub cmd_sn: u32,
    /// What the core knows it by, if it has been with it.
    pub tag: Option<TaskTag>,
    /// Who waits for its end.
    pub holds: Vec<Hold>,
}

/// By ITT.
type RetainedTasks = Arc<Mutex<HashMap<u32, RetainedTask>>>;

struct RetainedSession {
    session: Arc<Session>,
    tasks: RetainedTasks,
    /// Connections that were lost, with the second in which their tasks end.
    lost: Vec<(ConnectionKey, u64)>,
    /// While its tasks can be aborted.
    _registration: Registration,
}

#[derive(Default)]
pub(crate) struct Retained {
    /// By TSIH.
    sessions: Mutex<HashMap<u16, RetainedSession>>,
    /// Their number, to be read without the lock.
    count: AtomicUsize,
}

/// How calls reach the tasks of a session that have no connection.
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
                begun: true,
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
    /// A connection of a session was lost; `until`: the second in which its tasks end.
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

    /// A task of a connection that was lost is to begin anew.
    pub fn add(&self, itt: u32, task: RetainedTask) {
        if let Some(entry) = lock(&self.sessions).get(&task.connection.tsih) {
            lock(&entry.tasks).insert(itt, task);
        }
    }

    /// It begins anew; gives who waits for its end.
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

    /// The session is over.
    pub fn end(&self, tsih: u16) {
        let mut all = lock(&self.sessions);
        let gone = all.remove(&tsih);
        self.count.store(all.len(), Ordering::Release);
        drop(all);
        // Whoever waits for its tasks is told.
        drop(gone);
    }

    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Ends the tasks whose time is over; gives the sessions for which none wait any more.
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
