//! A session served by a thread: sends and receives for many commands, pings silent connections, and can be woken by other
//! threads.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use iscsi::initiator::{CommandDone, Event, Request, TaskManagementRequestFields};
use iscsi::pdu::TaskFunction;

use crate::session::{Session, SessionError};

/// Silence after which a connection is pinged; after the same time again it counts as lost.
pub(crate) const PING_AFTER: Duration = Duration::from_secs(5);

type Result<T> = std::result::Result<T, SessionError>;

impl Session {
    /// Sends and receives until data arrives, `wake` is readable, or `limit` has passed.
    ///
    /// # Errors
    /// If the session has ended.
    pub(crate) fn attend(&mut self, wake: BorrowedFd<'_>, limit: Duration) -> Result<()> {
        let next = self.keep_alive()?;
        self.move_bytes_until(Some(wake), limit.min(next))?;
        self.other
            .retain(|event| matches!(event, Event::TaskManagement { .. }));
        Ok(())
    }

    /// Pings silent connections. Returns the time until the next check.
    fn keep_alive(&mut self) -> Result<Duration> {
        let mut next = PING_AFTER;
        for cid in 0..self.links.len() {
            let link = &self.links[cid];
            let silent = link.last_received.elapsed();
            let since_ping = link.pinged.map(|at| at.elapsed());
            let left = match since_ping {
                // Lost and recovering connections have timeouts of their own.
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

    /// Returns a completed command.
    pub(crate) fn take_done(&mut self) -> Option<CommandDone> {
        self.done.pop_front()
    }

    /// Queues a command without sending it; see [`Session::send_queued`].
    ///
    /// # Errors
    /// If the session has ended.
    pub fn queue(&mut self, request: Request) -> Result<u32> {
        Ok(self.enqueue(request)?.0)
    }

    /// Sends queued commands as far as the sockets accept them.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn send_queued(&mut self) -> Result<()> {
        (0..self.links.len() as u16).try_for_each(|cid| self.send(cid))
    }

    /// Queues ABORT TASK for a command on the command's connection.
    pub(crate) fn abort(&mut self, itt: u32, lun: u64) -> Result<u32> {
        let cid = self.in_flight.get(&itt).copied().unwrap_or(0);
        let fields = TaskManagementRequestFields {
            function: TaskFunction::AbortTask,
            lun: lun.to_be_bytes(),
            referenced: Some(itt),
        };
        Ok(self.initiator.task_management(cid, fields)?)
    }

    /// Returns ITT and response of a completed task management function.
    pub(crate) fn take_managed(&mut self) -> Option<(u32, u8)> {
        match self.other.pop_front()? {
            Event::TaskManagement { itt, response } => Some((itt, response)),
            _ => None,
        }
    }

    /// Removes a command that the target no longer has, and returns its write data.
    pub(crate) fn forget(&mut self, itt: u32) -> Vec<u8> {
        self.not_in_flight(itt);
        self.initiator.forget(itt)
    }

    /// Removes a command that was not sent yet. Returns false for any other command.
    pub(crate) fn withdraw(&mut self, itt: u32) -> bool {
        let is_unsent = self.initiator.withdraw(itt);
        if is_unsent {
            self.not_in_flight(itt);
        }
        is_unsent
    }

    /// Returns true if a response may still arrive after later ones of its connection: the target sends it again.
    pub(crate) fn may_send_again(&self) -> bool {
        self.parameters().error_recovery_level > 0
    }

    fn not_in_flight(&mut self, itt: u32) {
        if let Some(cid) = self.in_flight.remove(&itt)
            && let Some(link) = self.links.get_mut(usize::from(cid))
        {
            link.commands -= 1;
        }
    }

    /// Removes the unanswered commands of an ended session and returns them with their write data.
    pub(crate) fn take_commands(&mut self) -> Vec<(u32, Vec<u8>)> {
        self.in_flight.clear();
        self.recovery.lost.clear();
        let mut commands = self.initiator.take_commands();
        commands.extend(self.rejected.take());
        commands
    }
}
