//! A test bench without sockets: our target over a RAM disk, our initiator, and a pipe that splits streams anywhere.
#![allow(dead_code, reason = "each test binary uses a part")]

pub mod raw;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fastrand::Rng;
use iscsi::Limits;
use iscsi::chap::{Algorithm, Secret};
use iscsi::initiator::{CommandDone, Event, Initiator, InitiatorError, InitiatorSettings};
use iscsi::login::{
    Admission, ChapUser, Refusal, SendTargets, TargetPolicy, TargetRecord, Visitor,
};
use iscsi::negotiation::{DigestOffer, Offer};
use iscsi::pdu::{LoginStatus, TaskFunctionResponse};
use iscsi::session::{Attachment, Claim, ConnectionKey, Leaving, Session, SessionTable};
use iscsi::target::{
    CloseReason, Completion, Connection, LogoutScope, Piece, Received, Step, TaskId,
    TaskManagement, Then, Transfer,
};

pub const TARGET: &str = "iqn.2026-11.org.example:t0";
pub const INITIATOR: &str = "iqn.2026-11.org.example:i0";
pub const BLOCK: u32 = 512;

pub struct Policy {
    pub table: SessionTable,
    pub offer: Offer,
    pub chap: Vec<Algorithm>,
    /// CHAP is optional: used only if the initiator offers no other method.
    pub chap_is_optional: bool,
    pub users: HashMap<String, ChapUser>,
    pub targets: Vec<TargetRecord>,
}

impl Policy {
    pub fn open(offer: Offer) -> Self {
        let addresses = vec![
            "192.0.2.1:3260,1".to_owned(),
            "[2001:db8::1]:3260,1".to_owned(),
        ];
        Policy {
            table: SessionTable::new(16, Limits::default().commands_per_session),
            offer,
            chap: Vec::new(),
            chap_is_optional: false,
            users: HashMap::new(),
            targets: vec![TargetRecord {
                name: TARGET.to_owned(),
                addresses,
            }],
        }
    }
}

impl TargetPolicy for Policy {
    fn admit(&self, visitor: &Visitor) -> Result<Admission, Refusal> {
        match visitor.target_name.as_deref() {
            Some("iqn.2026-11.org.example:moved") => {
                let address = Some("192.0.2.9:3260".to_owned());
                return Err(Refusal {
                    status: LoginStatus::MovedTemporarily,
                    address,
                });
            }
            Some(name) if name != TARGET => return Err(LoginStatus::NotFound.into()),
            _ => {}
        }
        if visitor.initiator_name.ends_with(":stranger") {
            return Err(LoginStatus::AuthorizationFailure.into());
        }
        Ok(Admission {
            chap: self.chap.clone(),
            must_authenticate: !self.chap.is_empty() && !self.chap_is_optional,
            portal_group_tag: 1,
            target_alias: Some("the disk".to_owned()),
            offer: self.offer.clone(),
        })
    }

    fn chap_users(&self, _: &Visitor, name: &str) -> Vec<ChapUser> {
        self.users.get(name).cloned().into_iter().collect()
    }

    fn is_secret_of_target(&self, secret: &Secret) -> bool {
        let mut proofs = self.users.values().filter_map(|user| user.mutual.as_ref());
        proofs.any(|(_, proof)| proof.matches(secret))
    }

    fn session(&self, tsih: u16) -> Option<Arc<Session>> {
        self.table.session(tsih)
    }

    fn attach(&self, _: &Visitor, claim: Claim) -> Result<Attachment, LoginStatus> {
        self.table.attach(claim)
    }

    fn detach(&self, connection: ConnectionKey, leaving: Leaving) -> Vec<ConnectionKey> {
        self.table.detach(connection, leaving)
    }

    fn targets(&self, _: &Visitor, which: SendTargets<'_>) -> Vec<TargetRecord> {
        let wanted = |target: &&TargetRecord| match which {
            SendTargets::All => true,
            SendTargets::Named(name) => target.name == name,
        };
        self.targets.iter().filter(wanted).cloned().collect()
    }
}

pub fn user(secret: &str, mutual: Option<(&str, &str)>) -> ChapUser {
    ChapUser {
        secret: Secret::new(secret),
        mutual: mutual.map(|(name, secret)| (name.to_owned(), Secret::new(secret))),
    }
}

/// Returns the offer of the tests.
pub fn small_offer() -> Offer {
    let mut offer = Offer {
        max_recv_data_segment_length: 1024,
        ..Offer::default()
    };
    offer.header_digest = DigestOffer::PreferNone;
    offer.session.max_burst_length = 4096;
    offer.session.first_burst_length = 2048;
    offer
}

pub fn settings(offer: Offer) -> InitiatorSettings {
    InitiatorSettings {
        initiator_name: INITIATOR.to_owned(),
        target_name: Some(TARGET.to_owned()),
        isid: [0x80, 0, 0, 0, 0, 1],
        offer,
        credentials: None,
        first_cmd_sn: 0xffff_fff0,
        text_limit: 1 << 20,
    }
}

pub fn cdb10(opcode: u8, lba: u32, blocks: u16) -> Vec<u8> {
    let mut cdb = vec![opcode, 0];
    cdb.extend_from_slice(&lba.to_be_bytes());
    cdb.push(0);
    cdb.extend_from_slice(&blocks.to_be_bytes());
    cdb.push(0);
    cdb
}

pub fn read10(lba: u32, blocks: u16) -> Vec<u8> {
    cdb10(0x28, lba, blocks)
}

pub fn write10(lba: u32, blocks: u16) -> Vec<u8> {
    cdb10(0x2a, lba, blocks)
}

/// The target's side of one connection, with the state that its caller holds.
pub struct TargetEnd {
    pub connection: Connection,
    pub buffers: HashMap<TaskId, Vec<u8>>,
    /// Read data by the buffer identifier passed to `data_in`.
    pub sending: HashMap<u64, Vec<u8>>,
    pub closed: Option<CloseReason>,
    pub abandoned: usize,
    /// Commands that stay unanswered: opcode 0xff.
    pub held: Vec<TaskId>,
    /// Answers logouts at once.
    pub answers_logouts: bool,
    next_buffer: u64,
}

/// Messages of a connection to the others of its session.
#[derive(Default)]
pub struct Messages {
    pub wake: Vec<u16>,
    pub drop: Vec<ConnectionKey>,
    /// CmdSNs of the started commands, in order.
    pub begun: Vec<u32>,
    /// CmdSN of the last command started on any thread.
    pub last_begun: Option<Arc<AtomicU32>>,
    pub functions: Vec<TaskManagement>,
}

impl TargetEnd {
    pub fn new(policy: Arc<Policy>, limits: Limits) -> Self {
        let visitor = Visitor {
            address: "192.0.2.7".to_owned(),
            ..Visitor::default()
        };
        TargetEnd {
            connection: Connection::new(policy, visitor, limits),
            buffers: HashMap::new(),
            sending: HashMap::new(),
            closed: None,
            abandoned: 0,
            held: Vec::new(),
            answers_logouts: true,
            next_buffer: 0,
        }
    }

    pub fn feed(&mut self, mut input: &[u8], disk: &mut [u8], messages: &mut Messages) {
        loop {
            let Received { used, step } = self.connection.receive(input);
            input = &input[used..];
            match step {
                Step::More => return,
                Step::Close(reason) => {
                    self.closed = Some(reason);
                    return;
                }
                Step::Data(placement) => {
                    if input.is_empty() {
                        return;
                    }
                    let take = input.len().min(placement.length as usize);
                    let expected = self
                        .connection
                        .command(placement.task)
                        .unwrap()
                        .expected_length as usize;
                    let buffer = self
                        .buffers
                        .entry(placement.task)
                        .or_insert_with(|| vec![0; expected]);
                    let at = placement.offset as usize;
                    buffer[at..at + take].copy_from_slice(&input[..take]);
                    self.connection.data_stored(&input[..take]);
                    input = &input[take..];
                }
                Step::LoggedIn(logged_in) => messages.drop.extend(logged_in.displaced),
                Step::Command(task) => self.begin(task, disk, messages),
                Step::DataComplete(task) => self.finish_write(task, disk),
                Step::Abandoned(task) => {
                    self.buffers.remove(&task);
                    self.abandoned += 1;
                }
                Step::TaskManagement(function) => {
                    let is_known = function.referenced.is_some();
                    let done = match function.function {
                        iscsi::pdu::TaskFunction::AbortTask if !is_known => {
                            TaskFunctionResponse::TaskDoesNotExist
                        }
                        _ => TaskFunctionResponse::Complete,
                    };
                    if let Some(task) = function.referenced {
                        self.connection.abort(task).unwrap();
                        self.buffers.remove(&task);
                        self.held.retain(|held| *held != task);
                    }
                    messages.functions.push(function);
                    self.connection
                        .task_management_response(function.tag, done)
                        .unwrap();
                }
                Step::Wake(cid) => messages.wake.push(cid),
                Step::Forgotten(_) => {}
                Step::Logout(logout) => {
                    if let LogoutScope::Other(key) | LogoutScope::ForRecovery(Some(key)) =
                        logout.scope
                    {
                        messages.drop.push(key);
                    }
                    if self.answers_logouts {
                        self.connection.logout_response(logout.tag).unwrap();
                    }
                }
            }
        }
    }

    fn begin(&mut self, task: TaskId, disk: &mut [u8], messages: &mut Messages) {
        let command = self.connection.command(task).unwrap().clone();
        messages.begun.push(command.cmd_sn);
        if let Some(last) = &messages.last_begun {
            assert_eq!(
                last.swap(command.cmd_sn, Ordering::SeqCst).wrapping_add(1),
                command.cmd_sn,
                "out of order"
            );
        }
        let lba = u32::from_be_bytes([
            command.cdb[2],
            command.cdb[3],
            command.cdb[4],
            command.cdb[5],
        ]);
        let length = u32::from(u16::from_be_bytes([command.cdb[7], command.cdb[8]])) * BLOCK;
        let start = (lba as usize).wrapping_mul(BLOCK as usize);
        let inside = start
            .checked_add(length as usize)
            .is_some_and(|end| end <= disk.len());
        match command.cdb[0] {
            0x00 => self
                .connection
                .respond(task, &Completion::default())
                .unwrap(),
            0x28 if inside => {
                let data = disk[start..start + length as usize].to_vec();
                let transfer = Transfer {
                    data_in: data.len() as u64,
                    data_out: 0,
                };
                let buffer = self.next_buffer;
                self.next_buffer += 1;
                // Two pieces with an odd boundary, so that bursts and pieces do not align.
                let cut = (data.len() / 3).min(command.read_length() as usize);
                let status = Then::Status {
                    status: 0,
                    transfer,
                };
                self.connection
                    .data_in(task, buffer, 0, &data[..cut], Then::More)
                    .unwrap();
                self.connection
                    .data_in(task, buffer, cut as u32, &data[cut..], status)
                    .unwrap();
                self.sending.insert(buffer, data);
            }
            0x2a if inside => {
                self.buffers
                    .entry(task)
                    .or_insert_with(|| vec![0; command.expected_length as usize]);
                if self.connection.solicit(task, length).unwrap() {
                    self.finish_write(task, disk);
                }
            }
            0xff => self.held.push(task),
            _ => {
                let sense = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0];
                let completion = Completion {
                    status: 2,
                    sense: &sense,
                    ..Completion::default()
                };
                self.connection.respond(task, &completion).unwrap();
            }
        }
    }

    fn finish_write(&mut self, task: TaskId, disk: &mut [u8]) {
        let command = self.connection.command(task).unwrap().clone();
        let buffer = self.buffers.remove(&task).unwrap();
        let lba = u32::from_be_bytes([
            command.cdb[2],
            command.cdb[3],
            command.cdb[4],
            command.cdb[5],
        ]);
        let length = u32::from(u16::from_be_bytes([command.cdb[7], command.cdb[8]])) * BLOCK;
        let start = (lba as usize).wrapping_mul(BLOCK as usize);
        let usable = buffer.len().min(length as usize);
        disk[start..start + usable].copy_from_slice(&buffer[..usable]);
        let transfer = Transfer {
            data_in: 0,
            data_out: length.into(),
        };
        self.connection
            .respond(
                task,
                &Completion {
                    transfer,
                    ..Completion::default()
                },
            )
            .unwrap();
    }

    /// Returns the queued output as bytes.
    pub fn take_bytes(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for piece in self.connection.outgoing().pieces() {
            match piece {
                Piece::Bytes(piece) => bytes.extend_from_slice(piece),
                Piece::Data {
                    buffer,
                    offset,
                    length,
                } => {
                    bytes.extend_from_slice(
                        &self.sending[&buffer][offset as usize..(offset + length) as usize],
                    );
                }
            }
        }
        assert_eq!(bytes.len() as u64, self.connection.outgoing().len());
        self.connection.outgoing().clear();
        bytes
    }
}

/// A session over pipes.
pub struct Pipes {
    pub initiator: Initiator,
    pub target_ends: Vec<TargetEnd>,
    pub disk: Vec<u8>,
    pub policy: Arc<Policy>,
    pub messages: Messages,
    pub events: Vec<(u16, Event)>,
    pub error: Option<InitiatorError>,
    to_target: Vec<Vec<u8>>,
    to_initiator: Vec<Vec<u8>>,
    random: Rng,
    /// Maximum number of bytes that a pipe moves at a time.
    pub piece: usize,
}

impl Pipes {
    pub fn new(policy: Policy, settings: InitiatorSettings, seed: u64) -> Self {
        Pipes {
            initiator: Initiator::new(settings),
            target_ends: Vec::new(),
            disk: (0..256 * BLOCK).map(|n| (n / 7) as u8).collect(),
            policy: Arc::new(policy),
            messages: Messages::default(),
            events: Vec::new(),
            error: None,
            to_target: Vec::new(),
            to_initiator: Vec::new(),
            random: Rng::with_seed(seed),
            piece: 4000,
        }
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random.usize(..below.max(1))
    }

    pub fn connect(&mut self) -> u16 {
        let cid = self.initiator.connect();
        self.target_ends
            .push(TargetEnd::new(self.policy.clone(), Limits::default()));
        self.to_target.push(Vec::new());
        self.to_initiator.push(Vec::new());
        self.run();
        cid
    }

    pub fn ready(
        policy: Policy,
        settings: InitiatorSettings,
        connections: usize,
        seed: u64,
    ) -> Self {
        let mut pipes = Pipes::new(policy, settings, seed);
        for _ in 0..connections {
            let cid = pipes.connect();
            assert!(
                pipes.initiator.is_ready(cid),
                "login of {cid}: {:?} {:?}",
                pipes.error,
                pipes.target_ends[0].closed
            );
        }
        pipes.events.clear();
        pipes
    }

    /// Moves random pieces over random connections until all pipes are idle.
    pub fn run(&mut self) {
        loop {
            let mut moved = false;
            for cid in 0..self.target_ends.len() {
                let fresh = std::mem::take(self.initiator.outgoing(cid as u16));
                self.to_target[cid].extend(fresh);
                let bytes = self.target_ends[cid].take_bytes();
                self.to_initiator[cid].extend(bytes);
                moved |= !self.to_target[cid].is_empty() || !self.to_initiator[cid].is_empty();
            }
            if !moved || self.error.is_some() {
                return;
            }
            let cid = self.draw(self.target_ends.len());
            let cut = self.to_target[cid].len().min(1 + self.draw(self.piece));
            let piece: Vec<u8> = self.to_target[cid].drain(..cut).collect();
            if self.target_ends[cid].closed.is_none() {
                self.target_ends[cid].feed(&piece, &mut self.disk, &mut self.messages);
            }
            while let Some(other) = self.messages.wake.pop() {
                self.target_ends[usize::from(other)].feed(&[], &mut self.disk, &mut self.messages);
            }
            let cut = self.to_initiator[cid].len().min(1 + self.draw(self.piece));
            let piece: Vec<u8> = self.to_initiator[cid].drain(..cut).collect();
            match self.initiator.receive(cid as u16, &piece) {
                Ok(events) => self
                    .events
                    .extend(events.into_iter().map(|event| (cid as u16, event))),
                Err(error) => self.error = Some(error),
            }
        }
    }

    pub fn commands_done(&mut self) -> Vec<CommandDone> {
        let taken = std::mem::take(&mut self.events);
        let (commands, others): (Vec<_>, Vec<_>) = taken
            .into_iter()
            .partition(|(_, event)| matches!(event, Event::Command(_)));
        self.events = others;
        let command = |(_, event)| match event {
            Event::Command(done) => done,
            _ => unreachable!("partitioned"),
        };
        commands.into_iter().map(command).collect()
    }
}
