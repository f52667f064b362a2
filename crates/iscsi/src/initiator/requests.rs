//! Sends requests: commands with their data, task management, text, NOP, logout.

use smallvec::SmallVec;
use zerocopy::big_endian::{U16, U32};

use super::session::{Initiator, Link, NotReady, Phase};
use crate::pdu::{
    AdditionalHeaders, Bhs, CONTINUE, DataOut, FINAL, IMMEDIATE, LogoutReason, LogoutRequest,
    NO_TAG, NopOut, ScsiCommand, TaskFunction, TaskManagementRequest, TextRequest, encode,
};

/// A SCSI command to send.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Logical unit, as on the wire.
    pub lun: [u8; 8],
    /// The CDB.
    pub cdb: Vec<u8>,
    /// Task attribute.
    pub attribute: u8,
    /// Immediate delivery.
    pub immediate: bool,
    /// Write data.
    pub write: Option<Vec<u8>>,
    /// Expected read length in bytes.
    pub read_length: Option<u32>,
}

/// A task management function to send.
#[derive(Clone, Copy, Debug)]
pub struct TaskManagementRequestFields {
    /// The function.
    pub function: TaskFunction,
    /// Logical unit, as on the wire.
    pub lun: [u8; 8],
    /// ITT of the task for ABORT TASK and QUERY TASK.
    pub referenced: Option<u32>,
}

pub(super) enum Kind {
    Command(Box<CommandTask>),
    TaskManagement,
    Text {
        text: Vec<u8>,
    },
    Nop,
    /// Requests the target's ExpCmdSN, after a lost connection was restored or before another one takes over its tasks.
    Probe {
        tasks_of: u16,
    },
    /// TASK REASSIGN for this task.
    Reassign {
        referenced: u32,
    },
    /// Logout of this connection, or of the whole session.
    Logout {
        closes: Option<u16>,
    },
}

pub(super) struct Task {
    pub cid: u16,
    pub kind: Kind,
    /// CmdSN as sent.
    pub cmd_sn: u32,
    /// The request was sent with a CmdSN of its own (not immediate).
    pub numbered: bool,
    pub lun: [u8; 8],
}

pub(super) struct CommandTask {
    pub write: Vec<u8>,
    /// Number of bytes of `write` that were sent or queued.
    pub sent: usize,
    pub data: Vec<u8>,
    pub read_length: u32,
    /// Number of received Data-In and R2T PDUs.
    pub data_sn: u32,
    /// The request as sent, for retransmission at error recovery levels 1 and 2.
    pub request: Option<Box<Waiting>>,
    /// The task was reassigned: its R2TSNs continue from a number of the target.
    pub takes_any_r2t: bool,
    /// Number of requests for data from `data_sn` on, at error recovery levels 1 and 2.
    pub snacks: u32,
    /// Number of retransmissions on the same connection; the target may have received an earlier one.
    pub repeats: u32,
    /// Response that arrived before its data.
    pub held: Option<(Bhs, Vec<u8>)>,
}

impl CommandTask {
    fn new(write: Vec<u8>, read_length: u32) -> CommandTask {
        CommandTask {
            write,
            sent: 0,
            data: Vec::new(),
            read_length,
            data_sn: 0,
            request: None,
            takes_any_r2t: false,
            snacks: 0,
            repeats: 0,
            held: None,
        }
    }
}

/// A request that was not sent yet.
#[derive(Clone)]
pub(super) struct Waiting {
    pub cid: u16,
    pub header: Bhs,
    pub ahs: Vec<u8>,
    /// Empty for a command; its data is stored in the task.
    pub segment: Vec<u8>,
}

impl Initiator {
    fn ready(&self, cid: u16) -> Result<(), NotReady> {
        if self.is_ready(cid) {
            Ok(())
        } else {
            Err(NotReady)
        }
    }

    /// Sends a command on a connection and returns its ITT. If the connection is being recovered, the command waits.
    pub fn command(&mut self, cid: u16, request: Request) -> Result<u32, NotReady> {
        let link = self.links.get(usize::from(cid));
        if !link.is_some_and(|link| link.recovers) {
            self.ready(cid)?;
        }
        let itt = self.take_itt();
        let write = request.write.unwrap_or_default();
        let is_write = !write.is_empty();
        let mut header = ScsiCommand::blank();
        header.flags |= request.attribute & ScsiCommand::ATTRIBUTE;
        header.opcode |= if request.immediate { IMMEDIATE } else { 0 };
        header.lun = request.lun;
        header.itt = U32::new(itt);
        let mut additional = AdditionalHeaders::default();
        let (short, long) = request.cdb.split_at(request.cdb.len().min(16));
        header.cdb[..short.len()].copy_from_slice(short);
        additional.extended_cdb = SmallVec::from_slice(long);
        if request.read_length.is_some() {
            header.flags |= ScsiCommand::READ;
            header.expected_length = U32::new(request.read_length.unwrap_or(0));
        }
        if is_write {
            header.flags |= ScsiCommand::WRITE;
            header.expected_length = U32::new(write.len() as u32);
            additional.bidirectional_read_length = request.read_length;
        }
        let read_length = request.read_length.unwrap_or(0);
        let kind = Kind::Command(Box::new(CommandTask::new(write, read_length)));
        let lun = request.lun;
        self.tasks.insert(
            itt,
            Task {
                cid,
                kind,
                cmd_sn: 0,
                numbered: false,
                lun,
            },
        );
        self.submit(Waiting {
            cid,
            header: header.to_bhs(),
            ahs: additional.to_bytes(),
            segment: Vec::new(),
        });
        Ok(itt)
    }

    /// Queues a request with the next CmdSN, followed by the unsolicited data of a command.
    pub(super) fn send(&mut self, waiting: Waiting) {
        let is_immediate = waiting.header.is_immediate();
        self.send_as(waiting, self.cmd_sn);
        if !is_immediate {
            self.cmd_sn = self.cmd_sn.wrapping_add(1);
        }
    }

    /// As `send`, with the given CmdSN.
    pub(super) fn send_as(&mut self, waiting: Waiting, cmd_sn: u32) {
        let again = self.recovers_digests().then(|| Box::new(waiting.clone()));
        let Waiting {
            cid,
            mut header,
            ahs,
            segment,
        } = waiting;
        let Some(link) = self.links.get_mut(usize::from(cid)) else {
            return;
        };
        // CmdSN and ExpStatSN have the same offsets in all requests.
        let mut fields = NopOut::from_bhs(&header);
        let itt = fields.itt.get();
        // The parameters of the sending connection determine the immediate and unsolicited data.
        let (mut immediate, mut burst) = (0, 0);
        if let Some(Kind::Command(command)) = self.tasks.get(&itt).map(|task| &task.kind) {
            let agreed = &self.parameters;
            burst = command.write.len().min(agreed.first_burst_length as usize);
            immediate = match agreed.immediate_data {
                true => burst.min(link.max_send),
                false => 0,
            };
            if immediate < burst && !agreed.initial_r2t {
                header.flags &= !FINAL;
                fields.flags &= !FINAL;
            }
        }
        fields.cmd_sn = U32::new(cmd_sn);
        fields.exp_stat_sn = U32::new(link.exp_stat_sn);
        let segment = match self.tasks.get(&itt).map(|task| &task.kind) {
            Some(Kind::Command(command)) => &command.write[..immediate],
            _ => &segment,
        };
        encode(&mut link.out, fields.to_bhs(), &ahs, segment, link.digests);
        if let Some(task) = self.tasks.get_mut(&itt) {
            task.cmd_sn = cmd_sn;
            task.numbered = header.opcode & IMMEDIATE == 0;
            if let Kind::Command(command) = &mut task.kind {
                (command.request, command.sent) = (again, immediate);
            }
            if let (Kind::Command(command), false) = (&mut task.kind, header.is_final()) {
                send_data(
                    link,
                    itt,
                    NO_TAG,
                    [0; 8],
                    immediate,
                    &command.write[immediate..burst],
                );
                command.sent = burst;
            }
        }
    }

    /// Sends a task management function for immediate delivery.
    pub fn task_management(
        &mut self,
        cid: u16,
        fields: TaskManagementRequestFields,
    ) -> Result<u32, NotReady> {
        self.ready(cid)?;
        let itt = self.take_itt();
        let mut header = TaskManagementRequest::blank();
        header.opcode |= IMMEDIATE;
        header.flags |= fields.function.wire();
        header.lun = fields.lun;
        header.itt = U32::new(itt);
        header.referenced_task_tag = U32::new(fields.referenced.unwrap_or(NO_TAG));
        let referenced = fields.referenced.and_then(|tag| self.tasks.get(&tag));
        header.ref_cmd_sn = U32::new(referenced.map_or(0, |task| task.cmd_sn));
        self.control(cid, itt, Kind::TaskManagement, header.to_bhs(), Vec::new());
        Ok(itt)
    }

    /// Sends text for immediate delivery, split over several PDUs if necessary.
    pub fn text(&mut self, cid: u16, text: &[u8]) -> Result<u32, NotReady> {
        self.ready(cid)?;
        let itt = self.take_itt();
        let link = &self.links[usize::from(cid)];
        let (first, rest) = text.split_at(text.len().min(link.max_send));
        let mut header = TextRequest::blank();
        header.opcode |= IMMEDIATE;
        header.itt = U32::new(itt);
        header.ttt = U32::new(NO_TAG);
        if !rest.is_empty() {
            header.flags = CONTINUE;
        }
        let first = first.to_vec();
        let kind = Kind::Text { text: Vec::new() };
        self.unsent_text.insert(itt, rest.to_vec());
        self.control(cid, itt, kind, header.to_bhs(), first);
        Ok(itt)
    }

    /// Sends the next Text Request of an exchange, with the target's tag.
    pub(super) fn continue_text(&mut self, cid: u16, itt: u32, ttt: u32) {
        let Some(link) = self.links.get(usize::from(cid)) else {
            return;
        };
        let unsent = self.unsent_text.remove(&itt).unwrap_or_default();
        let (piece, rest) = unsent.split_at(unsent.len().min(link.max_send));
        let mut header = TextRequest::blank();
        header.opcode |= IMMEDIATE;
        header.itt = U32::new(itt);
        header.ttt = U32::new(ttt);
        if !rest.is_empty() {
            header.flags = CONTINUE;
            self.unsent_text.insert(itt, rest.to_vec());
        }
        let segment = piece.to_vec();
        self.submit(Waiting {
            cid,
            header: header.to_bhs(),
            ahs: Vec::new(),
            segment,
        });
    }

    /// Sends a NOP-Out that requests an echo of its data.
    pub fn nop_out(&mut self, cid: u16, data: Vec<u8>, immediate: bool) -> Result<u32, NotReady> {
        self.ready(cid)?;
        let itt = self.take_itt();
        let mut header = NopOut::idle();
        header.opcode |= if immediate { IMMEDIATE } else { 0 };
        header.itt = U32::new(itt);
        self.control(cid, itt, Kind::Nop, header.to_bhs(), data);
        Ok(itt)
    }

    /// Logs out the session, or the connection with this CID.
    pub fn logout(
        &mut self,
        cid: u16,
        reason: LogoutReason,
        concerned: u16,
    ) -> Result<u32, NotReady> {
        self.ready(cid)?;
        let itt = self.take_itt();
        let mut header = LogoutRequest::blank();
        header.opcode |= IMMEDIATE;
        header.flags |= reason.wire();
        header.itt = U32::new(itt);
        header.cid = U16::new(concerned);
        let closes = (reason != LogoutReason::CloseSession).then_some(concerned);
        self.control(
            cid,
            itt,
            Kind::Logout { closes },
            header.to_bhs(),
            Vec::new(),
        );
        Ok(itt)
    }

    pub(super) fn control(
        &mut self,
        cid: u16,
        itt: u32,
        kind: Kind,
        header: Bhs,
        segment: Vec<u8>,
    ) {
        self.tasks.insert(
            itt,
            Task {
                cid,
                kind,
                cmd_sn: 0,
                numbered: false,
                lun: [0; 8],
            },
        );
        self.submit(Waiting {
            cid,
            header,
            ahs: Vec::new(),
            segment,
        });
    }

    /// Removes a command that the target no longer has, and returns its write data.
    pub fn forget(&mut self, itt: u32) -> Vec<u8> {
        match self.tasks.remove(&itt).map(|task| task.kind) {
            Some(Kind::Command(command)) => command.write,
            _ => Vec::new(),
        }
    }

    /// Removes a command that was not sent yet. Returns false for any other command.
    pub fn withdraw(&mut self, itt: u32) -> bool {
        let mut waiting = self.waiting.iter();
        let Some(at) = waiting.position(|waiting| waiting.header.itt.get() == itt) else {
            return false;
        };
        self.waiting.remove(at);
        self.tasks.remove(&itt);
        true
    }

    /// Removes all commands of an ended session and returns them with their write data.
    pub fn take_commands(&mut self) -> Vec<(u32, Vec<u8>)> {
        self.waiting.clear();
        let tasks = self.tasks.drain();
        let commands = tasks.filter_map(|(itt, task)| match task.kind {
            Kind::Command(command) => Some((itt, command.write)),
            _ => None,
        });
        commands.collect()
    }

    /// Marks a connection as closed. Returns the ITTs of its tasks, which have ended without a response.
    pub fn lost(&mut self, cid: u16) -> Vec<u32> {
        if let Some(link) = self.links.get_mut(usize::from(cid)) {
            link.phase = Phase::Over;
        }
        self.waiting.retain(|waiting| waiting.cid != cid);
        let lost: Vec<u32> = self
            .tasks
            .iter()
            .filter(|(_, task)| task.cid == cid)
            .map(|(itt, _)| *itt)
            .collect();
        for itt in &lost {
            self.tasks.remove(itt);
        }
        lost
    }
}

/// Queues a sequence of Data-Out PDUs; the last has the F bit.
pub(super) fn send_data(
    link: &mut Link,
    itt: u32,
    ttt: u32,
    lun: [u8; 8],
    offset: usize,
    data: &[u8],
) {
    let mut at = 0;
    let mut data_sn = 0;
    while at < data.len() {
        let take = (data.len() - at).min(link.max_send);
        let header = DataOut {
            flags: if at + take == data.len() { FINAL } else { 0 },
            lun,
            itt: U32::new(itt),
            ttt: U32::new(ttt),
            exp_stat_sn: U32::new(link.exp_stat_sn),
            data_sn: U32::new(data_sn),
            buffer_offset: U32::new((offset + at) as u32),
            ..DataOut::blank()
        };
        encode(
            &mut link.out,
            header.to_bhs(),
            &[],
            &data[at..at + take],
            link.digests,
        );
        at += take;
        data_sn += 1;
    }
}
