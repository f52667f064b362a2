//! Objects at run time: disks, exports and logical units that are added, changed and removed while others do I/O.
//!
//! ```text
//!   API, reload ── Manager ──▶ Owner: Change -> Config wanted next -> relations -> Plan -> carry out ──▶ workers, transports
//!                  one thread          │                                             │
//!                                      ▼ Live: read by others                        ▼ StateStore: survives a restart
//! ```
//!
//! This code is not on the request path. Workers receive changes as messages between their iterations.

mod apply;
pub mod bodies;
mod changes;
mod closing;
mod configs;
mod draining;
mod events;
mod following;
mod identity;
mod inherited_sockets;
mod listeners;
mod open_disks;
mod open_exports;
mod opening;
mod overlay;
mod owner;
mod placing;
mod plan;
mod refusal;
mod relations;
mod replacing;
mod resizes;
mod saved_state;
mod servers;
mod sizes;
mod state_store;
mod waiting;

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

pub use changes::{Change, users, users_of_all};
pub(crate) use closing::ToClose;
pub use draining::Work;
pub use events::EventBus;
pub use listeners::LISTENER_KINDS;
pub use overlay::{Overlay, lun_bodies};
pub use owner::{ChangeOptions, ChangeResult, Live, Owner};
pub use placing::served;
pub use plan::Plan;
pub use refusal::{Fault, Refusal};
pub(crate) use relations::{absolute, check as check_start};
pub use replacing::NewDevice;
pub use servers::{Servers, Transports, iscsi_session, nbd_session, vhost_session};
pub use state_store::StateStore;
pub(crate) use waiting::START_PATIENCE;

type Message = Box<dyn FnOnce(&mut Owner) + Send>;

/// Receiver of an owner's messages, read by its thread or, during the start, by the owner.
pub type Inbox = mpsc::Receiver<Message>;

/// Sends work to the owner of all objects, which runs one message after the other.
#[derive(Clone)]
pub struct Manager {
    messages: mpsc::Sender<Message>,
    looking: Arc<sizes::Looking>,
}

/// Thread of the owner. Dropping it ends the thread after the current message.
pub struct ManagerThread {
    manager: Manager,
    thread: Option<JoinHandle<()>>,
}

impl Manager {
    /// Runs an owner on a thread of its own.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(mut owner: Owner, inbox: Inbox) -> std::io::Result<ManagerThread> {
        let messages = owner.messages.clone();
        let thread = std::thread::Builder::new()
            .name("objects".to_owned())
            .spawn(move || {
                while let Some(message) = next_message(&inbox, &mut owner) {
                    message(&mut owner);
                    if owner.ending {
                        break;
                    }
                }
                owner.drains.join();
            })?;
        Ok(ManagerThread {
            manager: Manager::of(messages),
            thread: Some(thread),
        })
    }

    /// Returns a manager without an owner, which refuses all work.
    pub fn idle() -> Manager {
        let (messages, _) = mpsc::channel();
        Manager::of(messages)
    }

    fn of(messages: mpsc::Sender<Message>) -> Manager {
        Manager {
            messages,
            looking: Arc::default(),
        }
    }

    /// Runs work on the owner and awaits the result.
    ///
    /// # Errors
    /// The owner's refusal, or [`Refusal::Ending`] without an owner.
    pub async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Owner) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        let message: Message = Box::new(move |owner| {
            // The caller may be gone.
            reply.send(work(owner)).ok();
        });
        self.messages.send(message).map_err(|_| Refusal::Ending)?;
        answer.await.map_err(|_| Refusal::Ending)?
    }

    /// Begins a change and returns a future of its result, which is ready when requests to removed objects have ended. Draining objects are
    /// visible at once ([`owner::Live::draining`]). The change continues if the future is dropped.
    ///
    /// # Errors
    /// [`Refusal::Ending`] without an owner.
    pub async fn begin(
        &self,
        work: Work,
        options: ChangeOptions,
    ) -> Result<impl Future<Output = Result<ChangeResult, Refusal>> + use<>, Refusal> {
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (reply, answer) = tokio::sync::oneshot::channel();
        let message: Message = Box::new(move |owner| {
            // The caller may be gone.
            let reply = Box::new(|result| drop(reply.send(result)));
            owner.begin_change(work, options, reply);
            begun.send(()).ok();
        });
        self.messages.send(message).map_err(|_| Refusal::Ending)?;
        has_begun.await.map_err(|_| Refusal::Ending)?;
        Ok(async move { answer.await.map_err(|_| Refusal::Ending)? })
    }

    /// Makes a change and blocks until it is complete.
    ///
    /// # Errors
    /// The owner's refusal, or [`Refusal::Ending`] without an owner.
    pub fn change_blocking(
        &self,
        work: Work,
        options: ChangeOptions,
    ) -> Result<ChangeResult, Refusal> {
        let (reply, answer) = mpsc::sync_channel(1);
        let message: Message = Box::new(move |owner| {
            let reply = Box::new(move |result| drop(reply.send(result)));
            owner.begin_change(work, options, reply);
        });
        self.messages.send(message).map_err(|_| Refusal::Ending)?;
        answer.recv().map_err(|_| Refusal::Ending)?
    }

    /// Runs work on the owner and blocks until the result is there.
    ///
    /// # Errors
    /// The owner's refusal, or [`Refusal::Ending`] without an owner.
    pub fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Owner) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, answer) = mpsc::sync_channel(1);
        let message: Message = Box::new(move |owner| {
            reply.send(work(owner)).ok();
        });
        self.messages.send(message).map_err(|_| Refusal::Ending)?;
        answer.recv().map_err(|_| Refusal::Ending)?
    }
}

/// Returns the next message. Meanwhile retries listeners and disks, and announces draining objects.
fn next_message(inbox: &mpsc::Receiver<Message>, owner: &mut Owner) -> Option<Message> {
    loop {
        let due = [
            owner.next_try(),
            owner.drains.next_announcement(),
            owner.disks.next_record(),
        ];
        let Some(due) = due.into_iter().flatten().min() else {
            return inbox.recv().ok();
        };
        match inbox.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Ok(message) => return Some(message),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                owner.announce_draining();
                owner.listeners.retry();
                owner.try_waiting_disks();
                owner.disks.record_units();
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return None,
        }
    }
}

impl ManagerThread {
    /// Returns the manager.
    pub fn manager(&self) -> Manager {
        self.manager.clone()
    }
}

impl Drop for ManagerThread {
    fn drop(&mut self) {
        let end: Message = Box::new(|owner| owner.ending = true);
        // The thread may have panicked, which was logged.
        self.manager.messages.send(end).ok();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the objects' thread panicked");
        }
    }
}
