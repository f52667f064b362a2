//! A server in this process, and an initiator over TCP.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::{BlockDevice, Disk, Ram, RamOptions};
use fastrand::Rng;
use iscsi::initiator::{CommandDone, Event, Initiator, InitiatorSettings, Request};
use iscsi::negotiation::Offer;
use iscsi_target::{DemoMode, Server, ServerLimits, TargetOptions};
use reactor::{PollLimit, Pool, WorkerOptions};
use scsi::MemoryStore;
use scsi::cdb::cdb10;
use scsi_exec::Units;

pub const TARGET: &str = "iqn.2026-11.org.example:t0";
pub const BLOCK: usize = 512;
/// Far above the duration of any test.
const LIMIT: Duration = Duration::from_secs(60);

pub struct Rig {
    pub server: Server,
    pub portal: SocketAddr,
    pub units: Arc<Units>,
    pub pool: Arc<Pool>,
}

pub fn ram(mebibytes: u64) -> Arc<dyn BlockDevice> {
    let options = RamOptions {
        size: mebibytes << 20,
        huge_pages: false,
        ..RamOptions::default()
    };
    Arc::new(Ram::create(options).unwrap())
}

pub fn target() -> TargetOptions {
    TargetOptions {
        name: TARGET.to_owned(),
        portals: vec!["127.0.0.1:0".parse().unwrap()],
        demo_mode: DemoMode::ReadWrite,
        ..TargetOptions::default()
    }
}

impl Rig {
    pub fn open(device: Arc<dyn BlockDevice>, options: TargetOptions, limits: ServerLimits) -> Rig {
        Rig::with_disks(&[device], options, limits)
    }

    /// Creates a server with one disk per LUN, from 0 on.
    pub fn with_disks(
        devices: &[Arc<dyn BlockDevice>],
        options: TargetOptions,
        limits: ServerLimits,
    ) -> Rig {
        let workers = WorkerOptions {
            count: 2,
            cpus: Vec::new(),
            poll: PollLimit::Micros(20).into(),
        };
        let pool = Arc::new(Pool::start(&workers).unwrap());
        let units = Units::new(Box::new(MemoryStore::default()));
        let server = Server::start(pool.clone(), units.clone(), limits).unwrap();
        let disk = |(lun, device): (usize, &Arc<dyn BlockDevice>)| {
            let disk = Disk::new(&format!("d{lun}"), None, device.clone());
            (lun as u16, Arc::new(disk.unwrap()))
        };
        let disks: Vec<_> = devices.iter().enumerate().map(disk).collect();
        let portals = server.add_target(options, &disks).unwrap();
        Rig {
            server,
            portal: portals[0],
            units,
            pool,
        }
    }

    pub fn ram() -> Rig {
        Rig::open(ram(16), target(), ServerLimits::default())
    }

    pub fn connect(&self) -> TcpStream {
        TcpStream::connect(self.portal).unwrap()
    }

    /// Waits until at most `most` connections are left.
    pub fn wait_for_connections(&self, most: usize) {
        let started = Instant::now();
        while self.server.connections() > most {
            assert!(started.elapsed() < LIMIT, "connections stay");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub fn settings(number: u8, offer: Offer) -> InitiatorSettings {
    InitiatorSettings {
        initiator_name: format!("iqn.2026-11.org.example:i{number}"),
        target_name: Some(TARGET.to_owned()),
        isid: [0x80, 0, 0, 0, 0, number],
        offer,
        credentials: None,
        first_cmd_sn: 0xffff_ffe0,
        text_limit: 1 << 16,
    }
}

/// An initiator's session.
pub struct Client {
    pub initiator: Initiator,
    streams: Vec<Option<TcpStream>>,
    unsent: Vec<Vec<u8>>,
    pub events: Vec<(u16, Event)>,
    portal: SocketAddr,
}

impl Client {
    pub fn new(portal: SocketAddr, settings: InitiatorSettings) -> Client {
        Client {
            initiator: Initiator::new(settings),
            streams: Vec::new(),
            unsent: Vec::new(),
            events: Vec::new(),
            portal,
        }
    }

    pub fn login(portal: SocketAddr, settings: InitiatorSettings, connections: usize) -> Client {
        let mut client = Client::new(portal, settings);
        for _ in 0..connections {
            let cid = client.connect();
            client.until(|client| client.initiator.is_ready(cid));
        }
        client.events.clear();
        client
    }

    pub fn connect(&mut self) -> u16 {
        let cid = self.initiator.connect();
        let stream = TcpStream::connect(self.portal).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        self.streams.push(Some(stream));
        self.unsent.push(Vec::new());
        cid
    }

    /// Loses a connection and begins a new login with its CID. Returns the lost tasks and the old stream, which the caller may keep open.
    pub fn reinstate(&mut self, cid: u16) -> (Vec<u32>, Option<TcpStream>) {
        let stream = TcpStream::connect(self.portal).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        let old = self.streams[usize::from(cid)].replace(stream);
        self.unsent[usize::from(cid)].clear();
        (self.initiator.reinstate(cid), old)
    }

    /// Loses a connection of a session that outlives it, and begins to recover it with its commands.
    pub fn recover(&mut self, cid: u16) {
        let stream = TcpStream::connect(self.portal).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        self.streams[usize::from(cid)] = Some(stream);
        self.unsent[usize::from(cid)].clear();
        self.initiator.suspend(cid);
        self.initiator.recover(cid);
    }

    /// Closes a connection without a logout.
    pub fn hang_up(&mut self, cid: u16) {
        self.streams[usize::from(cid)] = None;
    }

    /// Returns true if the target has closed a connection.
    pub fn is_closed(&self, cid: u16) -> bool {
        self.streams[usize::from(cid)].is_none()
    }

    /// Sends and receives without blocking. Returns false if nothing was transferred.
    pub fn pump(&mut self) -> bool {
        let connections = 0..self.streams.len();
        connections.fold(false, |moved, cid| self.pump_one(cid as u16) | moved)
    }

    /// Like [`Client::pump`] on one connection.
    pub fn pump_one(&mut self, number: u16) -> bool {
        let cid = usize::from(number);
        let fresh = std::mem::take(self.initiator.outgoing(number));
        self.unsent[cid].extend(fresh);
        let Some(stream) = &mut self.streams[cid] else {
            return false;
        };
        let (mut moved, mut gone) = (false, false);
        if !self.unsent[cid].is_empty() {
            match stream.write(&self.unsent[cid]) {
                Ok(length) => {
                    self.unsent[cid].drain(..length);
                    moved = true;
                }
                Err(error) => gone |= error.kind() != ErrorKind::WouldBlock,
            }
        }
        let mut bytes = vec![0; 64 << 10];
        match stream.read(&mut bytes) {
            Ok(0) => gone = true,
            Ok(length) => {
                moved = true;
                match self.initiator.receive(number, &bytes[..length]) {
                    Ok(events) => {
                        let events = events.into_iter().map(|event| (number, event));
                        self.events.extend(events);
                    }
                    Err(error) => panic!("connection {cid}: {error}"),
                }
            }
            Err(error) => gone |= error.kind() != ErrorKind::WouldBlock,
        }
        if gone {
            self.streams[cid] = None;
        }
        moved
    }

    /// Sends without blocking, and receives nothing.
    pub fn push(&mut self) {
        for cid in 0..self.streams.len() {
            let fresh = std::mem::take(self.initiator.outgoing(cid as u16));
            self.unsent[cid].extend(fresh);
            if let Some(stream) = &mut self.streams[cid]
                && let Ok(length) = stream.write(&self.unsent[cid])
            {
                self.unsent[cid].drain(..length);
            }
        }
    }

    /// Like [`Client::push`] on one connection, in pieces that arrive separately.
    pub fn push_in_pieces(&mut self, cid: u16, piece: usize) {
        let cid = usize::from(cid);
        let fresh = std::mem::take(self.initiator.outgoing(cid as u16));
        self.unsent[cid].extend(fresh);
        let bytes = std::mem::take(&mut self.unsent[cid]);
        let stream = self.streams[cid].as_mut().unwrap();
        for piece in bytes.chunks(piece) {
            stream.write_all(piece).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn until(&mut self, mut done: impl FnMut(&mut Client) -> bool) {
        let started = Instant::now();
        while !done(self) {
            if !self.pump() {
                std::thread::sleep(Duration::from_micros(100));
            }
            assert!(
                started.elapsed() < LIMIT,
                "nothing comes: {} tasks, {} wait, {:?}",
                self.initiator.tasks_len(),
                self.initiator.waiting_len(),
                self.events
            );
        }
    }

    pub fn run(&mut self, cid: u16, request: Request) -> CommandDone {
        let itt = self.initiator.command(cid, request).unwrap();
        let mut found = None;
        self.until(|client| {
            let at = client
                .events
                .iter()
                .position(|(_, event)| matches!(event, Event::Command(done) if done.itt == itt));
            if let Some(at) = at
                && let (_, Event::Command(done)) = client.events.remove(at)
            {
                found = Some(done);
            }
            found.is_some()
        });
        found.unwrap()
    }

    /// Consumes the unit attentions of a new nexus.
    pub fn settle(&mut self) {
        for _ in 0..4 {
            let ready = Request {
                cdb: vec![0; 6],
                ..Initiator::read(0, &[0; 6], 0)
            };
            if self.run(0, ready).status == 0 {
                return;
            }
        }
        panic!("unit stays not ready");
    }

    pub fn write(&mut self, cid: u16, lba: u32, data: Vec<u8>) -> CommandDone {
        let cdb = cdb10(0x2a, lba, (data.len() / BLOCK) as u16);
        self.run(cid, Initiator::write(0, &cdb, data))
    }

    pub fn read(&mut self, cid: u16, lba: u32, blocks: u16) -> CommandDone {
        let cdb = cdb10(0x28, lba, blocks);
        self.run(
            cid,
            Initiator::read(0, &cdb, u32::from(blocks) * BLOCK as u32),
        )
    }
}

/// Writes and reads over all connections with many commands in flight. Checks that each read returns the last written data.
pub fn verify(client: &mut Client, connections: u16, rounds: usize, seed: u64) {
    verify_image(client, connections, rounds, seed, &mut image());
}

/// Returns the image of an empty disk for [`verify_image`].
pub fn image() -> Vec<u8> {
    vec![0; 16 * REGION as usize * BLOCK]
}

const REGION: u64 = 2048;

/// Like [`verify`], on a disk that contains `image`.
pub fn verify_image(
    client: &mut Client,
    connections: u16,
    rounds: usize,
    seed: u64,
    image: &mut [u8],
) {
    let mut random = Rng::with_seed(seed);
    for round in 0..rounds {
        // Regions do not overlap, so concurrent commands do not.
        let mut reads = Vec::new();
        for region in 0..16u64 {
            let blocks = 1 + random.u64(0..if region % 4 == 0 { 700 } else { 9 });
            let lba = region * REGION + random.u64(..REGION - blocks);
            let cid = random.u16(..connections);
            let (from, to) = (lba as usize * BLOCK, (lba + blocks) as usize * BLOCK);
            if random.bool() {
                for byte in &mut image[from..to] {
                    *byte = random.u8(..);
                }
                let cdb = cdb10(0x2a, lba as u32, blocks as u16);
                let write = Initiator::write(0, &cdb, image[from..to].to_vec());
                client.initiator.command(cid, write).unwrap();
            } else {
                let cdb = cdb10(0x28, lba as u32, blocks as u16);
                let read = Initiator::read(0, &cdb, (to - from) as u32);
                let itt = client.initiator.command(cid, read).unwrap();
                reads.push((itt, from, to));
            }
        }
        let mut done = Vec::new();
        client.until(|client| {
            for (_, event) in std::mem::take(&mut client.events) {
                match event {
                    Event::Command(one) => done.push(one),
                    Event::Nop { .. } => {}
                    other => panic!("round {round}: {other:?}"),
                }
            }
            done.len() == 16
        });
        for one in done {
            assert_eq!((one.response, one.status), (0, 0), "round {round}: {one:?}");
            if let Some((_, from, to)) = reads.iter().find(|(itt, ..)| *itt == one.itt) {
                assert!(one.data == image[*from..*to], "round {round}: data differs");
            }
        }
    }
}
