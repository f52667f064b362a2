//! Error recovery levels 1 and 2 (RFC 7143, 7): both ends over pipes that lose, delay and corrupt data, driven by a seed.
//!
//! The model counts how often each write reaches the disk. It must be once, and every command must end with its status.

mod common;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use common::{BLOCK, Policy, read10, settings, small_offer, write10};
use fastrand::Rng;
use iscsi::Limits;
use iscsi::initiator::{Event, Initiator, InitiatorError};
use iscsi::login::Visitor;
use iscsi::negotiation::{DigestOffer, Offer};
use iscsi::pdu::TaskFunctionResponse;
use iscsi::session::{ConnectionKey, Session};
use iscsi::target::{
    Completion, Connection, DetachedState, LogoutScope, Piece, Received, Step, TaskId, Then,
    Transfer,
};
use proptest::prelude::*;

const BLOCKS: u32 = 1024;

fn offer(level: u8) -> Offer {
    let mut offer = small_offer();
    offer.header_digest = DigestOffer::Crc32c;
    offer.data_digest = DigestOffer::Crc32c;
    offer.session.error_recovery_level = level;
    offer.session.max_connections = 4;
    offer.session.initial_r2t = false;
    offer.session.max_outstanding_r2t = 2;
    offer
}

/// A write with running I/O.
struct Running {
    /// The connection that started it.
    end: u64,
    task: TaskId,
    session: Arc<Session>,
    itt: u32,
    lba: u32,
    data: Vec<u8>,
}

struct End {
    number: u64,
    connection: Connection,
    buffers: HashMap<TaskId, Vec<u8>>,
    sending: Vec<Vec<u8>>,
    is_closed: bool,
    /// Logouts that wait for the end of another connection.
    logouts: Vec<(u32, Option<ConnectionKey>)>,
}

struct Target {
    disk: Vec<u8>,
    /// Number of times that each write reached the disk, by its first bytes.
    applied: HashMap<u32, u32>,
    running: Vec<Running>,
}

fn position(cdb: &[u8]) -> (u32, u32) {
    let lba = u32::from_be_bytes([cdb[2], cdb[3], cdb[4], cdb[5]]);
    let blocks = u16::from_be_bytes([cdb[7], cdb[8]]);
    (lba, u32::from(blocks) * BLOCK)
}

impl Target {
    fn apply(&mut self, lba: u32, data: &[u8]) {
        let at = (lba * BLOCK) as usize;
        self.disk[at..at + data.len()].copy_from_slice(data);
        let id = u32::from_be_bytes([data[0], data[1], data[2], data[3]]);
        *self.applied.entry(id).or_default() += 1;
    }

    fn begin(&mut self, end: &mut End, task: TaskId) {
        let command = end.connection.command(task).unwrap().clone();
        let (lba, length) = position(&command.cdb);
        if command.read {
            let at = (lba * BLOCK) as usize;
            let data = self.disk[at..at + length as usize].to_vec();
            let transfer = Transfer {
                data_in: u64::from(length),
                data_out: 0,
            };
            let name = end.sending.len() as u64;
            let then = Then::Status {
                status: 0,
                transfer,
            };
            end.connection.data_in(task, name, 0, &data, then).unwrap();
            end.sending.push(data);
        } else if end.connection.solicit(task, length).unwrap() {
            self.write(end, task);
        }
    }

    /// Starts the I/O of a write with complete data.
    fn write(&mut self, end: &mut End, task: TaskId) {
        let command = end.connection.command(task).unwrap().clone();
        self.running.push(Running {
            end: end.number,
            task,
            session: end.connection.session().unwrap().clone(),
            itt: command.itt,
            lba: position(&command.cdb).0,
            data: end.buffers.remove(&task).unwrap(),
        });
    }

    /// Completes an I/O; its connection may be closed.
    fn finish(&mut self, ends: &mut [&mut End], at: usize) {
        let done = self.running.swap_remove(at);
        self.apply(done.lba, &done.data);
        let transfer = Transfer {
            data_in: 0,
            data_out: done.data.len() as u64,
        };
        let completion = Completion {
            transfer,
            ..Completion::default()
        };
        let alive = ends
            .iter_mut()
            .find(|end| end.number == done.end && !end.is_closed);
        match alive {
            Some(end) => end.connection.respond(done.task, &completion).unwrap(),
            None => done
                .session
                .reassignable
                .ended(done.itt, &completion, Vec::new()),
        }
    }
}

impl End {
    fn new(policy: Arc<Policy>, number: u64) -> End {
        End {
            number,
            connection: Connection::new(policy, Visitor::default(), Limits::default()),
            buffers: HashMap::new(),
            sending: Vec::new(),
            is_closed: false,
            logouts: Vec::new(),
        }
    }

    fn close(&mut self, target: &Target) -> Vec<u16> {
        if std::mem::replace(&mut self.is_closed, true) {
            return Vec::new();
        }
        if self.connection.recovers() {
            let tasks: Vec<TaskId> = self.connection.tasks().collect();
            for task in tasks {
                let mut running = target.running.iter();
                let runs = running.any(|one| one.end == self.number && one.task == task);
                let left = match runs {
                    true => DetachedState::Running,
                    false => DetachedState::ToRestart,
                };
                self.connection.detach_task(task, left).ok();
            }
        }
        self.connection.close().wake
    }

    fn take_bytes(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for piece in self.connection.outgoing().pieces() {
            match piece {
                Piece::Bytes(piece) => bytes.extend_from_slice(piece),
                Piece::Data {
                    buffer,
                    offset,
                    length,
                } => bytes.extend_from_slice(
                    &self.sending[buffer as usize][offset as usize..(offset + length) as usize],
                ),
            }
        }
        self.connection.outgoing().clear();
        bytes
    }
}

struct Simulation {
    initiator: Initiator,
    policy: Arc<Policy>,
    /// Connections by CID.
    ends: Vec<End>,
    /// Connections that the initiator has lost and the target has not closed yet.
    dying: Vec<End>,
    to_target: Vec<Vec<u8>>,
    to_initiator: Vec<Vec<u8>>,
    target: Target,
    random: Rng,
    numbers: u64,
    level: u8,
    /// Commands in flight, with the expected data of reads.
    wanted: HashMap<u32, Option<Vec<u8>>>,
    done: usize,
    recovered: usize,
    /// Connections with tasks that are being reassigned.
    gone: HashSet<usize>,
}

impl Simulation {
    fn new(level: u8, connections: usize, seed: u64) -> Simulation {
        let mut simulation = Simulation {
            initiator: Initiator::new(settings(offer(level))),
            policy: Arc::new(Policy::open(offer(level))),
            ends: Vec::new(),
            dying: Vec::new(),
            to_target: Vec::new(),
            to_initiator: Vec::new(),
            target: Target {
                disk: vec![0; (BLOCKS * BLOCK) as usize],
                applied: HashMap::new(),
                running: Vec::new(),
            },
            random: Rng::with_seed(seed),
            numbers: 0,
            level,
            wanted: HashMap::new(),
            done: 0,
            recovered: 0,
            gone: HashSet::new(),
        };
        for cid in 0..connections {
            assert_eq!(usize::from(simulation.initiator.connect()), cid);
            simulation.open(cid);
            while !simulation.initiator.is_ready(cid as u16) {
                simulation.carry(cid, 0);
            }
        }
        simulation
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random.usize(..below.max(1))
    }

    fn open(&mut self, cid: usize) {
        self.numbers += 1;
        let end = End::new(self.policy.clone(), self.numbers);
        if cid == self.ends.len() {
            self.ends.push(end);
            self.to_target.push(Vec::new());
            self.to_initiator.push(Vec::new());
        } else {
            self.gone.remove(&cid);
            let old = std::mem::replace(&mut self.ends[cid], end);
            self.dying.push(old);
            self.to_target[cid].clear();
            self.to_initiator[cid].clear();
        }
    }

    /// Closes connections at the target.
    fn close(&mut self, which: impl Fn(&End) -> bool) {
        let mut woken = Vec::new();
        for end in self.dying.iter_mut().chain(&mut self.ends) {
            if which(end) {
                woken.extend(end.close(&self.target));
            }
        }
        self.dying.retain(|end| !end.is_closed);
        for cid in woken {
            self.feed(usize::from(cid), &[]);
        }
    }

    /// Closes a connection. The target continues only when no I/O of closed connections is in flight.
    fn close_and_drain(&mut self, key: Option<ConnectionKey>) {
        self.close(|end| key.is_some() && end.connection.key() == key);
        let all = self.dying.iter().chain(&self.ends);
        let open: HashSet<u64> = all
            .filter(|end| !end.is_closed)
            .map(|end| end.number)
            .collect();
        while let Some(at) = (self.target.running.iter()).position(|one| !open.contains(&one.end)) {
            self.finish(at);
        }
    }

    fn finish(&mut self, at: usize) {
        let mut ends: Vec<&mut End> = self.ends.iter_mut().chain(&mut self.dying).collect();
        self.target.finish(&mut ends, at);
    }

    fn feed(&mut self, cid: usize, mut input: &[u8]) {
        while !self.ends[cid].is_closed {
            let end = &mut self.ends[cid];
            let Received { used, step } = end.connection.receive(input);
            input = &input[used..];
            match step {
                Step::More => return,
                Step::Close(_) => {
                    let number = end.number;
                    self.close(|end| end.number == number);
                }
                Step::Data(placement) => {
                    if input.is_empty() {
                        return;
                    }
                    let take = input.len().min(placement.length as usize);
                    let command = end.connection.command(placement.task).unwrap();
                    let expected = command.expected_length as usize;
                    let buffers = end.buffers.entry(placement.task);
                    let at = placement.offset as usize;
                    buffers.or_insert_with(|| vec![0; expected])[at..at + take]
                        .copy_from_slice(&input[..take]);
                    end.connection.data_stored(&input[..take]);
                    input = &input[take..];
                }
                Step::LoggedIn(login) => {
                    for old in login.displaced {
                        self.close_and_drain(Some(old));
                    }
                    self.close_and_drain(None);
                }
                Step::Command(task) => self.target.begin(end, task),
                Step::DataComplete(task) => self.target.write(end, task),
                Step::Abandoned(task) => panic!("{task:?} is abandoned"),
                Step::TaskManagement(function) => end
                    .connection
                    .task_management_response(function.tag, TaskFunctionResponse::Rejected)
                    .unwrap(),
                Step::Wake(other) => self.feed(usize::from(other), &[]),
                Step::Forgotten(itt) => panic!("no connection aborts task {itt}"),
                Step::Logout(logout) => {
                    if let LogoutScope::ForRecovery(key) = logout.scope {
                        end.logouts.push((logout.tag, key));
                    }
                    let logouts = std::mem::take(&mut self.ends[cid].logouts);
                    for (tag, key) in logouts {
                        self.close_and_drain(key);
                        self.ends[cid].connection.logout_response(tag).unwrap();
                    }
                }
            }
        }
    }

    /// The initiator loses a connection; the target notices later.
    fn lose(&mut self, cid: usize) {
        let others: Vec<u16> = (0..self.ends.len() as u16)
            .filter(|other| usize::from(*other) != cid && self.initiator.is_ready(*other))
            .collect();
        for other in self.initiator.suspend(cid as u16) {
            self.initiator.recover(other);
            self.open(usize::from(other));
        }
        self.to_target[cid].clear();
        self.to_initiator[cid].clear();
        if !others.is_empty() && self.draw(2) == 0 {
            let to = others[self.draw(others.len())];
            self.initiator.reassign(cid as u16, to).unwrap();
            self.gone.insert(cid);
            return;
        }
        self.initiator.recover(cid as u16);
        self.open(cid);
    }

    fn carry(&mut self, cid: usize, falsify: usize) {
        if self.gone.contains(&cid) {
            return;
        }
        let mut fresh = std::mem::take(self.initiator.outgoing(cid as u16));
        let mut back = self.ends[cid].take_bytes();
        if falsify > 0 && self.initiator.is_ready(cid as u16) {
            if self.draw(falsify) == 0 {
                self.falsify_data(&mut fresh);
            }
            if self.draw(falsify) == 0 {
                self.falsify_data(&mut back);
            }
            if self.level == 2 && !back.is_empty() && self.draw(falsify) == 0 {
                let at = self.draw(back.len());
                back[at] ^= 0x10;
            }
            if self.level == 2 && !fresh.is_empty() && self.draw(falsify) == 0 {
                let at = self.draw(fresh.len());
                fresh[at] ^= 0x10;
            }
        }
        self.to_target[cid].extend(fresh);
        self.to_initiator[cid].extend(back);
        let cut = self.draw(self.to_target[cid].len() + 1).max(1);
        let cut = cut.min(self.to_target[cid].len());
        let piece: Vec<u8> = self.to_target[cid].drain(..cut).collect();
        self.feed(cid, &piece);
        let cut = self.draw(self.to_initiator[cid].len() + 1).max(1);
        let cut = cut.min(self.to_initiator[cid].len());
        let piece: Vec<u8> = self.to_initiator[cid].drain(..cut).collect();
        let mut events = Vec::new();
        let received = self.initiator.receive_into(cid as u16, &piece, &mut events);
        for event in events {
            self.take(event);
        }
        match received {
            Ok(()) if self.ends[cid].is_closed && self.to_initiator[cid].is_empty() => {
                assert_eq!(self.level, 2, "the target closes a connection");
                self.lose(cid);
            }
            Ok(()) => {}
            Err(InitiatorError::Format(_) | InitiatorError::DataDigest) if self.level == 2 => {
                self.lose(cid);
            }
            Err(error) => panic!("connection {cid}: {error}"),
        }
    }

    /// Corrupts a byte of a data segment.
    fn falsify_data(&mut self, bytes: &mut [u8]) {
        let mut segments = Vec::new();
        let mut at = 0;
        while at + 48 <= bytes.len() {
            let length = u32::from_be_bytes([0, bytes[at + 5], bytes[at + 6], bytes[at + 7]]);
            let (length, header) = (length as usize, 48 + usize::from(bytes[at + 4]) * 4 + 4);
            if length > 0 {
                segments.push(at + header..at + header + length);
            }
            at += header + length.next_multiple_of(4) + if length > 0 { 4 } else { 0 };
        }
        if let Some(segment) = segments.get(self.draw(segments.len())).cloned() {
            let at = segment.start + self.draw(segment.len());
            bytes[at] ^= 0x01;
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Command(done) => {
                let wanted = self.wanted.remove(&done.itt).expect("it ends once");
                assert_eq!((done.status, done.residual), (0, 0), "{:02x?}", done.sense);
                if let Some(wanted) = wanted {
                    assert_eq!(done.data, wanted);
                }
                self.done += 1;
            }
            Event::Recovered { cid, .. } => {
                self.recovered += 1;
                // The connection's tasks were reassigned, so it returns without tasks.
                if !self.initiator.is_ready(cid) {
                    self.initiator.recover(cid);
                    self.open(usize::from(cid));
                }
            }
            Event::LoggedIn(_) => {}
            Event::Lost { itt, .. } => panic!("task {itt} is lost"),
            other => panic!("{other:?}"),
        }
    }

    /// Starts a command on a range of its own: a read, or the write with this number.
    fn begin(&mut self, cid: u16, place: u32, number: u32, model: &mut [u8]) -> u32 {
        let (lba, blocks) = (place * 16, 1 + self.draw(15) as u16);
        let length = u32::from(blocks) * BLOCK;
        let range = (lba * BLOCK) as usize..(lba * BLOCK + length) as usize;
        let (request, wanted) = if self.draw(2) == 0 {
            let mut data: Vec<u8> = (0..length).map(|n| (n ^ number) as u8).collect();
            data[..4].copy_from_slice(&number.to_be_bytes());
            model[range].copy_from_slice(&data);
            (Initiator::write(0, &write10(lba, blocks), data), None)
        } else {
            let read = Initiator::read(0, &read10(lba, blocks), length);
            (read, Some(model[range].to_vec()))
        };
        let itt = self.initiator.command(cid, request).unwrap();
        self.wanted.insert(itt, wanted);
        itt
    }

    /// Runs `commands` reads and writes on disjoint ranges, with at most `faults` faults.
    fn run(&mut self, commands: u32, mut faults: u32) {
        let mut model = self.target.disk.clone();
        let mut begun = 0;
        let mut free: VecDeque<u32> = (0..BLOCKS / 16).collect();
        let mut places: HashMap<u32, u32> = HashMap::new();
        let mut steps = 0u32;
        while self.done < commands as usize {
            steps += 1;
            assert!(
                steps < 60_000,
                "hangs with {} of {commands} done: {:?}, waiting {}, running {}, dying {}, gone {:?}, {:?}",
                self.done,
                self.initiator,
                self.initiator.waiting_len(),
                self.target.running.len(),
                self.dying.len(),
                self.gone,
                self.ends
                    .iter()
                    .map(|end| &end.connection)
                    .collect::<Vec<_>>()
            );
            places.retain(|itt, place| {
                let open = self.wanted.contains_key(itt);
                if !open {
                    free.push_back(*place);
                }
                open
            });
            let cid = self.draw(self.ends.len());
            // Lost connections are included: the command waits there.
            if begun < commands
                && self.draw(3) == 0
                && let Some(place) = free.pop_front()
            {
                begun += 1;
                let itt = self.begin(cid as u16, place, begun, &mut model);
                places.insert(itt, place);
            }
            let falsify = if faults > 0 { 40 } else { 0 };
            self.carry(cid, falsify);
            if self.draw(4) == 0 && !self.target.running.is_empty() {
                let at = self.draw(self.target.running.len());
                self.finish(at);
            }
            if faults > 0 && self.draw(60) == 0 {
                faults -= 1;
                let cid = self.draw(self.ends.len());
                if self.level == 2 && self.initiator.is_ready(cid as u16) {
                    self.lose(cid);
                }
            }
            if !self.dying.is_empty() && self.draw(20) == 0 {
                let number = self.dying[0].number;
                self.close(|end| end.number == number);
            }
        }
        assert_eq!(self.target.disk, model, "every block is as written last");
        assert!(self.target.applied.values().all(|times| *times == 1));
        assert_eq!(self.initiator.waiting_len(), 0);
        let session = self.policy.table.sessions().remove(0);
        // The remaining tasks were answered, and their acknowledgement was lost.
        session.forget_reassignable(|_, _| true);
        assert!(session.reassignable.is_empty(), "nothing runs");
        let window = session
            .window
            .max_cmd_sn()
            .wrapping_sub(session.window.exp_cmd_sn());
        assert_eq!(
            window.wrapping_add(1),
            session.window.size(),
            "the window is whole"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn lost_connections_lose_and_double_nothing_at_level_2(seed in any::<u64>(), connections in 1usize..5) {
        Simulation::new(2, connections, seed).run(120, 40);
    }

    #[test]
    fn corrupted_data_are_retransmitted_at_level_1(seed in any::<u64>(), connections in 1usize..4) {
        Simulation::new(1, connections, seed).run(120, 40);
    }
}

#[test]
fn simulation_reestablishes_connections() {
    let mut simulation = Simulation::new(2, 3, 0x1234_5678_9abc_def1);
    simulation.run(400, 60);
    assert!(simulation.recovered >= 20, "{}", simulation.recovered);
}
