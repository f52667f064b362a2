//! An initiator of iSCSI: a session, with one connection or two on different workers, over sockets that may break.

use std::collections::HashMap;
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
use super::scsi::{command, outcome};
use super::{ABORTED, Client, Done, Kind, LOST, Outcome, Request};
use crate::random::Random;

pub const TARGET: &str = "iqn.2026-11.org.example:sim";
const AT: &str = "127.0.0.1:3260";

/// Responses to task management functions.
const FUNCTION_COMPLETE: u8 = 0;
const TASK_DOES_NOT_EXIST: u8 = 1;

/// Requests at a time.
const REQUESTS: usize = 8;

pub struct IscsiClient {
    server: Option<Rc<SimulatedServer>>,
    session: Initiator,
    sockets: Vec<Option<UnixStream>>,
    number: u8,
    worker: usize,
    connections: usize,
    random: Random,
    /// By initiator task tag: token and disk.
    requests: HashMap<u32, (u64, usize)>,
    /// Task management functions by their tags, and the tasks that they abort.
    aborting: HashMap<u32, Vec<u32>>,
    /// Of a session before: the target may do them until it answers something in the next one (RFC 7143, 6.3.5).
    lost: Vec<u64>,
    /// A NOP-Out is to tell that it has come to that.
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
            requests: HashMap::new(),
            aborting: HashMap::new(),
            lost: Vec::new(),
            asks: false,
            is_gone: true,
        }
    }

    pub fn set_server(&mut self, server: Rc<SimulatedServer>) {
        self.server = Some(server);
        self.disconnect();
    }

    /// The daemon of before is gone, and its requests are nobody's any more.
    pub fn forget(&mut self) {
        self.disconnect();
        self.lost.clear();
    }

    pub fn number(&self) -> u8 {
        self.number
    }

    /// One connection more, on this worker.
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

    /// Whether a worker has to serve another connection of the session.
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
        // Sometimes a part of it: a PDU comes in pieces.
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

impl IscsiClient {
    /// A task management function is answered (RFC 7143, 11.6.1).
    fn aborted(&mut self, itt: u32, response: u8, done: &mut Vec<Done>) {
        let tasks = self.aborting.remove(&itt).unwrap_or_default();
        match response {
            FUNCTION_COMPLETE => {
                for task in tasks {
                    if let Some((token, _)) = self.requests.remove(&task) {
                        self.session.forget(task);
                        done.push(failed(token, ABORTED));
                    }
                }
            }
            // Its answer comes, or has come.
            TASK_DOES_NOT_EXIST => {}
            other => panic!(
                "iSCSI initiator {}: response {other} to a task management function",
                self.number
            ),
        }
    }
}

/// The second initiator takes and gives data in small pieces, and sends none before the target requests it.
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
                self.requests.insert(itt, (request.token, request.disk));
                true
            }
            Err(_) => false,
        }
    }

    fn abort(&mut self, seed: u64) -> Option<String> {
        let mut random = Random::new(seed);
        let mut tasks: Vec<u32> = self.requests.keys().copied().collect();
        tasks.sort_unstable();
        // What has no number yet is not known to the target.
        if self.is_gone || tasks.is_empty() || self.session.waiting_len() > 0 {
            return None;
        }
        let task = tasks[random.below(tasks.len() as u64) as usize];
        let (token, disk) = self.requests[&task];
        let cid = random.below(self.sockets.len() as u64) as u16;
        let (function, referenced, said) = match random.one_in(3) {
            true => (
                TaskFunction::AbortTaskSet,
                None,
                format!("tasks of d{disk}"),
            ),
            false => (
                TaskFunction::AbortTask,
                Some(task),
                format!("request {token}"),
            ),
        };
        let fields = TaskManagementRequestFields {
            function,
            lun: ((disk as u64) << 48).to_be_bytes(),
            referenced,
        };
        let itt = self.session.task_management(cid, fields).ok()?;
        if referenced.is_some() {
            tasks.retain(|one| *one == task);
        }
        tasks.retain(|task| self.requests[task].1 == disk);
        self.aborting.insert(itt, tasks);
        Some(said)
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
            if let Some((token, _)) = self.requests.remove(&one.itt) {
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
        let mut lost: Vec<u64> = self.requests.drain().map(|(_, (token, _))| token).collect();
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

    /// Logs in anew.
    fn attach(&mut self, worker: &mut Worker) {
        self.session = session(self.number);
        self.sockets.clear();
        (self.is_gone, self.asks) = (false, false);
        self.connect(worker);
    }
}
