//! A session that a thread attends to: it sends and receives for many commands, pings connections that are silent, and is woken by
//! others.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use iscsi::initiator::{CommandDone, Event, Request, TaskManagementRequestFields};
use iscsi::pdu::TaskFunction;

use crate::session::{Session, SessionError};

/// A connection that is silent for so long is pinged, and is lost when it is silent for as long again.
pub(crate) const PING_AFTER: Duration = Duration::from_secs(5);

type Result<T> = std::result::Result<T, SessionError>;

impl Session {
    /// Sends and receives until something comes, `wake` can be read, or `limit` is over.
    ///
    /// # Errors
    /// When the session is over.
    pub(crate) fn attend(&mut self, wake: BorrowedFd<'_>, limit: Duration) -> Result<()> {
        let next = self.keep_alive()?;
        self.move_bytes_until(Some(wake), limit.min(next))?;
        self.other
            .retain(|event| matches!(event, Event::TaskManagement { .. }));
        Ok(())
    }

    /// Pings connections that are silent; gives the time after which this is to be done again.
    fn keep_alive(&mut self) -> Result<Duration> {
        let mut next = PING_AFTER;
        for cid in 0..self.links.len() {
            let link = &self.links[cid];
            let silent = link.heard.elapsed();
            let since_ping = link.pinged.map(|at| at.elapsed());
            let left = match since_ping {
                // What is lost, or comes back, has a time of its own.
                _ if !self.initiator.is_ready(cid as u16) => PING_AFTER,
                Some(waited) if waited >= PING_AFTER => {
                    let silent = SessionError::Silent {
                        portal: self.portal().clone(),
                        waited: silent,
                    };
                    self.or_recover(cid as u16, Err(silent))?;
                    PING_AFTER
                }
                Some(waited) => PING_AFTER - waited,
                None if silent >= PING_AFTER => {
                    self.initiator.nop_out(cid as u16, Vec::new(), true)?;
                    self.links[cid].pinged = Some(Instant::now());
                    PING_AFTER
                }
                None => PING_AFTER - silent,
            };
            next = next.min(left);
        }
        Ok(next)
    }

    /// Takes a command that has ended.
    pub(crate) fn take_done(&mut self) -> Option<CommandDone> {
        self.done.pop_front()
    }

    /// Starts a command without sending it yet: see [`Session::send_queued`].
    ///
    /// # Errors
    /// When the session is over.
    pub fn queue(&mut self, request: Request) -> Result<u32> {
        Ok(self.enqueue(request)?.0)
    }

    /// Sends what was queued, as much as the sockets take.
    ///
    /// # Errors
    /// When the session is over.
    pub fn send_queued(&mut self) -> Result<()> {
        (0..self.links.len() as u16).try_for_each(|cid| self.send(cid))
    }

    /// Queues ABORT TASK for a command, on the command's connection.
    pub(crate) fn abort(&mut self, itt: u32, lun: u64) -> Result<u32> {
        let cid = self.in_flight.get(&itt).copied().unwrap_or(0);
        let fields = TaskManagementRequestFields {
            function: TaskFunction::AbortTask,
            lun: lun.to_be_bytes(),
            referenced: Some(itt),
        };
        Ok(self.initiator.task_management(cid, fields)?)
    }

    /// Takes the answer to a task management function: its ITT and response.
    pub(crate) fn take_managed(&mut self) -> Option<(u32, u8)> {
        match self.other.pop_front()? {
            Event::TaskManagement { itt, response } => Some((itt, response)),
            _ => None,
        }
    }

    /// A command that the target has aborted is over without an answer.
    pub(crate) fn forget(&mut self, itt: u32) {
        self.initiator.forget(itt);
        if let Some(cid) = self.in_flight.remove(&itt)
            && let Some(link) = self.links.get_mut(usize::from(cid))
        {
            link.commands -= 1;
        }
    }

    /// The session is over: its commands that were not answered, with what they were to write.
    pub(crate) fn take_commands(&mut self) -> Vec<(u32, Vec<u8>)> {
        self.in_flight.clear();
        self.recovery.lost.clear();
        let mut commands = self.initiator.take_commands();
        commands.extend(self.rejected.take());
        commands
    }
}
