//! Objects at run time: disks, exports and logical units that come, change and go while others do I/O.
//!
//! ```text
//!   API, reload ── Manager ──▶ Owner: Change -> Config wanted next -> relations -> Plan -> carry out ──▶ workers, transports
//!                  one thread          │                                             │
//!                                      ▼ Live: what others see                       ▼ StateStore: what comes back
//! ```
//!
//! Nothing here is on a request's way: workers hear of changes between their iterations.

mod apply;
pub mod bodies;
mod changes;
mod clients;
mod draining;
mod events;
mod failed_io;
mod following;
mod handed_over;
mod identity;
mod listeners;
mod opening;
mod overlay;
mod owner;
mod placing;
mod plan;
mod refusal;
mod relations;
mod replacing;
mod saved_state;
mod servers;
mod sizes;
mod state_store;
mod waiting;

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

pub use changes::{Change, users, users_of_all};
pub use draining::{Draining, Work};
pub use events::EventBus;
pub use listeners::LISTENER_KINDS;
pub use overlay::{Overlay, lun_bodies};
pub use owner::{How, Live, Made, Owner};
pub use placing::served;
pub use plan::Plan;
pub use refusal::{Fault, Refusal};
pub(crate) use relations::absolute;
pub use replacing::NewDevice;
pub use servers::{Servers, Transports, iscsi_session, vhost_session};
pub use state_store::StateStore;
pub use waiting::WaitingDisks;

type Message = Box<dyn FnOnce(&mut Owner) + Send>;

/// Where an owner's messages come in: read by its thread, and while it starts by itself.
pub type Inbox = mpsc::Receiver<Message>;

/// Sends work to the owner of all objects, which does it piece by piece.
#[derive(Clone)]
pub struct Manager {
    messages: mpsc::Sender<Message>,
    looking: Arc<sizes::Looking>,
}

/// The manager's thread. Dropping it ends the thread, once it has done what it is doing.
pub struct ManagerThread {
    manager: Manager,
    thread: Option<JoinHandle<()>>,
}

impl Manager {
    /// Puts an owner on a thread of its own.
    ///
    /// # Errors
    /// When the kernel gives no thread.
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

    /// A manager of nothing: it refuses everything.
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

    /// Has the owner do something, and waits for it without blocking the thread.
    ///
    /// # Errors
    /// What the owner says, or that it is gone.
    pub async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Owner) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        let message: Message = Box::new(move |owner| {
            // Whoever asked may have left.
            reply.send(work(owner)).ok();
        });
        self.messages.send(message).map_err(|_| Refusal::Ending)?;
        answer.await.map_err(|_| Refusal::Ending)?
    }

    /// Begins a change, and returns what it will give: at once, or when clients of what it takes away have ended their requests. What
    /// waits for them is seen from then on ([`owner::Live::draining`]). The change goes on also when nobody waits for its result.
    ///
    /// # Errors
    /// That the owner is gone.
    pub async fn begin(
        &self,
        work: Work,
        how: How,
    ) -> Result<impl Future<Output = Result<Made, Refusal>> + use<>, Refusal> {
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (reply, answer) = tokio::sync::oneshot::channel();
        let message: Message = Box::new(move |owner| {
            // Whoever asked may have left.
            let reply = Box::new(|made| drop(reply.send(made)));
            owner.begin_change(work, how, reply);
            begun.send(()).ok();
        });
        self.messages.send(message).map_err(|_| Refusal::Ending)?;
        has_begun.await.map_err(|_| Refusal::Ending)?;
        Ok(async move { answer.await.map_err(|_| Refusal::Ending)? })
    }

    /// Makes a change and blocks until it is made.
    ///
    /// # Errors
    /// What the owner says, or that it is gone.
    pub fn change_blocking(&self, work: Work, how: How) -> Result<Made, Refusal> {
        let (reply, answer) = mpsc::sync_channel(1);
        let message: Message = Box::new(move |owner| {
            let reply = Box::new(move |made| drop(reply.send(made)));
            owner.begin_change(work, how, reply);
        });
        self.messages.send(message).map_err(|_| Refusal::Ending)?;
        answer.recv().map_err(|_| Refusal::Ending)?
    }

    /// Has the owner do something, and waits for it.
    ///
    /// # Errors
    /// What the owner says, or that it is gone.
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

/// Returns the next message. Meanwhile retries waiting listeners and disks, and announces draining objects.
fn next_message(inbox: &mpsc::Receiver<Message>, owner: &mut Owner) -> Option<Message> {
    loop {
        let due = [owner.next_try(), owner.drains.next_announcement()];
        let Some(due) = due.into_iter().flatten().min() else {
            return inbox.recv().ok();
        };
        match inbox.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Ok(message) => return Some(message),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                owner.announce_draining();
                owner.retry_listeners();
                owner.try_waiting_disks();
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return None,
        }
    }
}

impl ManagerThread {
    /// The manager.
    pub fn manager(&self) -> Manager {
        self.manager.clone()
    }
}

impl Drop for ManagerThread {
    fn drop(&mut self) {
        let end: Message = Box::new(|owner| owner.ending = true);
        // It may have ended by a panic, which has been told.
        self.manager.messages.send(end).ok();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the objects' thread panicked");
        }
    }
}
