//! iSCSI initiator: one session with one or two connections on different workers, over sockets that may break.

use std::collections::{BTreeMap, HashMap};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use iscsi::initiator::{Event, Initiator, InitiatorSettings, TaskManagementRequestFields};
use iscsi::negotiation::{DigestOffer, Offer};
use iscsi::pdu::TaskFunction;
use iscsi_target::SimulatedServer;
use reactor::Worker;

use super::blk::failed;
use super::scsi::{DISKS, command, outcome};
use super::{ABORTED, Client, Done, Kind, LOST, Outcome, Request};
use crate::random::Random;

pub const TARGET: &str = "iqn.2026-11.org.example:sim";
const AT: &str = "127.0.0.1:3260";

/// Responses to task management functions.
const FUNCTION_COMPLETE: u8 = 0;
const TASK_DOES_NOT_EXIST: u8 = 1;

/// Maximum number of requests in flight.
const REQUESTS: usize = 8;
/// Number of polls after which a response that may be lost is no longer expected.
const PATIENCE: u32 = 6;

/// A request in flight.
struct Sent {
    token: u64,
    disk: usize,
    cid: u16,
    /// Number of polls since the response was possibly lost.
    looks: u32,
}

pub struct IscsiClient {
    server: Option<Rc<SimulatedServer>>,
    session: Initiator,
    sockets: Vec<Option<UnixStream>>,
    number: u8,
    worker: usize,
    connections: usize,
    random: Random,
    /// Requests by initiator task tag.
    requests: BTreeMap<u32, Sent>,
    /// Task management functions by tag, with the tasks that they abort.
    aborting: HashMap<u32, Vec<u32>>,
    /// Disks that other initiators have reset.
    may_lose: Vec<usize>,
    /// Requests of the previous session. The target may execute them until it answers in the next session (RFC 7143, 6.3.5).
    lost: Vec<u64>,
    /// A NOP-Out was sent. Its response ends the uncertainty about `lost`.
    asks: bool,
    is_gone: bool,
}

impl IscsiClient {
    pub fn new(
        server: Rc<SimulatedServer>,
        number: u8,
        worker: usize,
        connections: usize,
        seed: u64,
    ) -> IscsiClient {
        IscsiClient {
            server: Some(server),
            session: session(number),
            sockets: Vec::new(),
            number,
            worker,
            connections,
            random: Random::new(seed),
            requests: BTreeMap::new(),
            aborting: HashMap::new(),
            may_lose: Vec::new(),
            lost: Vec::new(),
            asks: false,
            is_gone: true,
        }
    }

    pub fn set_server(&mut self, server: Rc<SimulatedServer>) {
        self.server = Some(server);
        self.disconnect();
    }

    /// Drops the session and all requests of an ended daemon.
    pub fn forget(&mut self) {
        self.disconnect();
        self.lost.clear();
    }

    pub fn number(&self) -> u8 {
        self.number
    }

    /// Opens another connection on this worker.
    fn connect(&mut self, worker: &mut Worker) {
        let Some(server) = &self.server else {
            return;
        };
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        ours.set_nonblocking(true).expect("a socket");
        let peer = format!("127.0.0.1:{}", 1000 + u16::from(self.number));
        let (peer, at) = (peer.parse(), AT.parse());
        let addresses = (peer.expect("an address"), at.expect("an address"));
        server.accept(worker, OwnedFd::from(theirs), addresses.0, addresses.1);
        let cid = self.session.connect();
        debug_assert_eq!(usize::from(cid), self.sockets.len());
        self.sockets.push(Some(ours));
    }

    /// Returns true if the session needs another connection.
    pub fn wants_connection(&self) -> bool {
        !self.is_gone && self.sockets.len() < self.connections && self.session.is_ready(0)
    }

    pub fn add_connection(&mut self, worker: &mut Worker) {
        self.connect(worker);
    }

    fn exchange(&mut self, cid: usize, events: &mut Vec<Event>) -> Result<(), String> {
        let Some(Some(socket)) = self.sockets.get_mut(cid) else {
            return Ok(());
        };
        let out = self.session.outgoing(cid as u16);
        // Sends sometimes only a part, so that PDUs arrive in pieces.
        let most = match self.random.one_in(4) {
            true => 1 + self.random.below(100) as usize,
            false => usize::MAX,
        };
        let part = out.len().min(most);
        match socket.write(&out[..part]) {
            Ok(sent) => drop(out.drain(..sent)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.to_string()),
        }
        let mut bytes = [0; 16 << 10];
        loop {
            match socket.read(&mut bytes) {
                Ok(0) => return Err("the target has closed the connection".to_owned()),
                Ok(read) => self
                    .session
                    .receive_into(cid as u16, &bytes[..read], events)
                    .unwrap_or_else(|error| panic!("iSCSI initiator {}: {error}", self.number)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

impl Sent {
    fn is_missed(&self) -> bool {
        self.looks >= PATIENCE
    }
}

impl IscsiClient {
    /// Ends a task without a response.
    fn lose(&mut self, task: u32, done: &mut Vec<Done>) {
        if let Some(sent) = self.requests.remove(&task) {
            self.session.forget(task);
            done.push(failed(sent.token, ABORTED));
        }
    }

    /// Aborts tasks with an overdue response that may be lost, as initiators do.
    fn abort_missed(&mut self) {
        let mut missed = Vec::new();
        for (task, sent) in &mut self.requests {
            if self.may_lose.contains(&sent.disk) && !sent.is_missed() {
                sent.looks += 1;
                if sent.is_missed() {
                    missed.push((*task, sent.disk, sent.cid));
                }
            }
        }
        for (task, disk, cid) in missed {
            let one = (TaskFunction::AbortTask, Some(task));
            if self.manage(cid, one, disk, vec![task]).is_none()
                && let Some(sent) = self.requests.get_mut(&task)
            {
                sent.looks = 0;
            }
        }
    }

    /// Returns the tasks of a disk.
    fn of(&self, disk: usize) -> Vec<u32> {
        let of = self.requests.iter().filter(|(_, sent)| sent.disk == disk);
        of.map(|(task, _)| *task).collect()
    }

    /// Sends a task management function for these tasks.
    fn manage(
        &mut self,
        cid: u16,
        (function, referenced): (TaskFunction, Option<u32>),
        disk: usize,
        tasks: Vec<u32>,
    ) -> Option<()> {
        // Commands without a CmdSN have not been sent to the target.
        if self.is_gone || self.session.waiting_len() > 0 {
            return None;
        }
        let fields = TaskManagementRequestFields {
            function,
            lun: ((disk as u64) << 48).to_be_bytes(),
            referenced,
        };
        let itt = self.session.task_management(cid, fields).ok()?;
        self.aborting.insert(itt, tasks);
        Some(())
    }

    /// Handles a task management response (RFC 7143, 11.6.1).
    fn aborted(&mut self, itt: u32, response: u8, done: &mut Vec<Done>) {
        let tasks = self.aborting.remove(&itt).unwrap_or_default();
        match response {
            FUNCTION_COMPLETE => {
                for task in tasks {
                    self.lose(task, done);
                }
            }
            // A response to the task would have arrived before this one, so an overdue task is lost.
            TASK_DOES_NOT_EXIST => {
                for task in tasks {
                    if self.requests.get(&task).is_some_and(Sent::is_missed) {
                        self.lose(task, done);
                    }
                }
            }
            other => panic!(
                "iSCSI initiator {}: response {other} to a task management function",
                self.number
            ),
        }
    }
}

/// The second initiator uses small data segments and sends no unsolicited data.
fn offer(number: u8) -> Offer {
    let mut offer = Offer::default();
    if number > 1 {
        offer.max_recv_data_segment_length = 1024;
        offer.header_digest = DigestOffer::PreferCrc32c;
        offer.data_digest = DigestOffer::PreferCrc32c;
        offer.session.initial_r2t = true;
        offer.session.immediate_data = false;
        offer.session.max_burst_length = 2048;
        offer.session.first_burst_length = 512;
        offer.session.max_outstanding_r2t = 2;
    }
    offer
}

fn session(number: u8) -> Initiator {
    Initiator::new(InitiatorSettings {
        initiator_name: format!("iqn.2026-11.org.example:initiator{number}"),
        target_name: Some(TARGET.to_owned()),
        isid: [0x80, 0, 0, 0, 0, number],
        offer: offer(number),
        credentials: None,
        first_cmd_sn: u32::MAX - 3,
        text_limit: 8192,
    })
}

impl Client for IscsiClient {
    fn name(&self) -> String {
        format!("iSCSI initiator {}", self.number)
    }

    fn can(&self, _kind: Kind) -> bool {
        true
    }

    fn submit(&mut self, request: &Request) -> bool {
        let ready: Vec<u16> = (0..self.sockets.len() as u16)
            .filter(|cid| self.session.is_ready(*cid))
            .collect();
        if self.is_gone || ready.is_empty() || self.requests.len() >= REQUESTS {
            return false;
        }
        let cid = ready[self.random.below(ready.len() as u64) as usize];
        let (cdb, out, into) = command(request);
        let lun = (request.disk as u64) << 48;
        let sent = match (out.is_empty(), into) {
            (false, _) => Initiator::write(lun, &cdb, out),
            (true, into) => Initiator::read(lun, &cdb, into as u32),
        };
        match self.session.command(cid, sent) {
            Ok(itt) => {
                let sent = Sent {
                    token: request.token,
                    disk: request.disk,
                    cid,
                    looks: 0,
                };
                self.requests.insert(itt, sent);
                true
            }
            Err(_) => false,
        }
    }

    fn abort(&mut self, seed: u64) -> Option<String> {
        let mut random = Random::new(seed);
        let tasks: Vec<u32> = self.requests.keys().copied().collect();
        let task = *tasks.get(random.below(tasks.len().max(1) as u64) as usize)?;
        let Sent { token, disk, .. } = self.requests[&task];
        let cid = random.below(self.sockets.len().max(1) as u64) as u16;
        if random.one_in(3) {
            self.manage(cid, (TaskFunction::AbortTaskSet, None), disk, self.of(disk))?;
            return Some(format!("tasks of d{disk}"));
        }
        let one = (TaskFunction::AbortTask, Some(task));
        // On a connection other than its own the task does not exist (RFC 7143, 11.5.1).
        let of = self.requests[&task].cid;
        let meant = if cid == of { vec![task] } else { Vec::new() };
        self.manage(cid, one, disk, meant)?;
        Some(format!("request {token}"))
    }

    fn reset(&mut self, seed: u64) -> Option<(String, Vec<usize>)> {
        let mut random = Random::new(seed);
        let disk = random.below(DISKS) as usize;
        let cid = random.below(self.sockets.len().max(1) as u64) as u16;
        if random.one_in(3) {
            let all = self.requests.keys().copied().collect();
            self.manage(cid, (TaskFunction::TargetWarmReset, None), 0, all)?;
            return Some(("the target".to_owned(), (0..DISKS as usize).collect()));
        }
        let unit = (TaskFunction::LogicalUnitReset, None);
        self.manage(cid, unit, disk, self.of(disk))?;
        Some((format!("d{disk}"), vec![disk]))
    }

    fn may_lose(&mut self, disk: usize) {
        self.may_lose.push(disk);
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        if self.is_gone {
            return;
        }
        let mut events = Vec::new();
        let mut broken = None;
        for cid in 0..self.sockets.len() {
            if let Err(why) = self.exchange(cid, &mut events) {
                broken = Some(why);
            }
        }
        for event in events {
            let one = match event {
                Event::Command(one) => one,
                Event::Nop { .. } => {
                    let lost = self.lost.drain(..);
                    done.extend(lost.map(|token| failed(token, LOST)));
                    continue;
                }
                Event::TaskManagement { itt, response } => {
                    self.aborted(itt, response, done);
                    continue;
                }
                _ => continue,
            };
            if let Some(Sent { token, .. }) = self.requests.remove(&one.itt) {
                let outcome = match one.response {
                    0 => outcome(one.status, &one.sense),
                    other => Outcome::Failed(format!("iSCSI response {other:#x}")),
                };
                done.push(Done {
                    token,
                    outcome,
                    data: one.data,
                });
            }
        }
        self.abort_missed();
        if broken.is_some() {
            self.disconnect();
        } else if self.session.is_ready(0) && !self.lost.is_empty() && !self.asks {
            self.asks = self.session.nop_out(0, Vec::new(), false).is_ok();
        }
    }

    fn worker(&self) -> usize {
        self.worker
    }

    fn disconnect(&mut self) {
        self.sockets.clear();
        self.aborting.clear();
        self.may_lose.clear();
        let sent = std::mem::take(&mut self.requests).into_values();
        let mut lost: Vec<u64> = sent.map(|sent| sent.token).collect();
        lost.sort_unstable();
        self.lost.extend(lost);
        self.is_gone = true;
    }

    fn is_gone(&self) -> bool {
        self.is_gone
    }

    fn detach(&mut self) {
        self.disconnect();
        self.server = None;
    }

    /// Logs in again.
    fn attach(&mut self, worker: &mut Worker) {
        self.session = session(self.number);
        self.sockets.clear();
        (self.is_gone, self.asks) = (false, false);
        self.connect(worker);
    }
}
