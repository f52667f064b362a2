//! Driver for an export of an NBD server: `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`.
//!
//! A queue is a connection, owned by one thread. Requests of a turn are sent with one `writev`; replies are received with one `readv`, large
//! data directly into its slot. Nothing is allocated per request. A violation of the protocol by the server ends the run.

use std::fs::File;
use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use nbd::Style;
use nbd::address::{ExportAddress, ServerAddress};
use nbd::client::{Event, Handshake, Session, Step, Transmission, Wanted};
use nbd::request::Request;
use nbd::wire::{command, transmission};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::outgoing::Outgoing;
use super::{Demand, DeviceInfo, Done, IoKind, Subject, process};

/// Time limit of the handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(20);
/// Size of the receive buffer for everything except direct data.
const STAGE_BYTES: usize = 256 << 10;
/// Minimum remaining length of data for a direct receive.
const DIRECT_BYTES_MIN: u64 = 4096;
/// Longest wait: a stop request does not wake the thread.
const WAIT_MAX: Duration = Duration::from_millis(20);
/// More queues than any thread configuration needs.
const QUEUES_MAX: u16 = u16::MAX;

/// Parses an address that this driver supports.
pub fn parse_address(text: &str) -> Result<ExportAddress> {
    let address: ExportAddress = text.parse().map_err(anyhow::Error::msg)?;
    ensure!(
        address.tls.is_none(),
        "`{text}`: this driver has no TLS; hint: nbd://"
    );
    Ok(address)
}

/// An export that was found.
pub struct NbdSession {
    address: ExportAddress,
    info: DeviceInfo,
    payload_max: u32,
    /// Process ID of the server, if it is on this machine.
    pid: Option<u32>,
}

impl NbdSession {
    /// Opens the export once and reads its properties.
    pub fn open(subject: &Subject) -> Result<NbdSession> {
        let address = parse_address(&subject.path.to_string_lossy())?;
        let connection = Connection::open(&address)?;
        let session = &connection.session;
        let has = |flag: u16| session.flags & flag != 0;
        Ok(NbdSession {
            info: DeviceInfo {
                capacity: session.size,
                block_size: session.block_sizes.minimum.max(512),
                queues: match has(transmission::CAN_MULTI_CONN) {
                    true => QUEUES_MAX,
                    false => 1,
                },
                read_only: has(transmission::READ_ONLY),
                discard_max: match has(transmission::SEND_TRIM) {
                    true => u32::MAX.into(),
                    false => 0,
                },
            },
            payload_max: session.block_sizes.maximum_payload,
            pid: connection.pid,
            address,
        })
    }

    /// Returns the properties of the export.
    pub fn info(&self) -> DeviceInfo {
        self.info
    }

    /// Returns the process ID of the server, if known.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Opens another connection.
    pub fn queue(&self, demand: Demand) -> Result<Box<NbdQueue>> {
        ensure!(
            demand.largest <= self.payload_max,
            "requests of {} bytes are larger than this server's maximum of {}",
            demand.largest,
            self.payload_max
        );
        let connection = Connection::open(&self.address)?;
        Ok(Box::new(NbdQueue::new(connection, demand)?))
    }
}

/// A connection after the handshake.
struct Connection {
    socket: File,
    session: Session,
    pid: Option<u32>,
}

impl Connection {
    fn open(address: &ExportAddress) -> Result<Connection> {
        let failed = || format!("cannot connect to {address}");
        let (socket, pid) = match &address.server {
            ServerAddress::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).with_context(failed)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(HANDSHAKE_LIMIT))?;
                let pid = process::at_other_end(&stream);
                (OwnedFd::from(stream), pid)
            }
            ServerAddress::Unix(path) => {
                let stream = UnixStream::connect(path).with_context(failed)?;
                stream.set_read_timeout(Some(HANDSHAKE_LIMIT))?;
                let peer = rustix::net::sockopt::socket_peercred(&stream)?;
                let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).ok();
                (OwnedFd::from(stream), pid)
            }
        };
        let mut socket = File::from(socket);
        let session = handshake(&mut socket, &address.export)
            .with_context(|| format!("cannot open {address}"))?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Connection {
            socket,
            session,
            pid,
        })
    }
}

/// Opens the export with simple replies.
fn handshake(socket: &mut File, export: &str) -> Result<Session> {
    let mut state = Handshake::new(Wanted {
        export: export.to_owned(),
        style: Style::Simple,
        contexts: Vec::new(),
    });
    let (mut input, mut output) = (Vec::new(), Vec::new());
    loop {
        let (used, step) = state.receive(&input, &mut output)?;
        input.drain(..used);
        if let Step::Open(session) = step {
            // The server has no request to answer yet.
            ensure!(input.is_empty(), "the server sends without a request");
            return Ok(*session);
        }
        socket.write_all(&output)?;
        output.clear();
        let mut bytes = [0; 4096];
        let got = socket.read(&mut bytes)?;
        ensure!(got > 0, "the server has closed the connection");
        input.extend_from_slice(&bytes[..got]);
    }
}

/// One connection, with a slot per request.
pub struct NbdQueue {
    socket: File,
    state: Transmission,
    slots: Vec<Box<[u8]>>,
    outgoing: Outgoing,
    stage: Box<[u8]>,
    done: Vec<Done>,
}

impl NbdQueue {
    fn new(connection: Connection, demand: Demand) -> Result<NbdQueue> {
        let mut noise = Rng::with_seed(u64::from(demand.slots));
        let slots = (0..demand.slots).map(|_| {
            let mut data = vec![0; demand.largest as usize].into_boxed_slice();
            if !demand.zeroes {
                noise.fill(&mut data);
            }
            data
        });
        Ok(NbdQueue {
            socket: connection.socket,
            state: Transmission::new(connection.session.style, None),
            slots: slots.collect(),
            outgoing: Outgoing::default(),
            stage: vec![0; STAGE_BYTES].into(),
            done: Vec::with_capacity(demand.slots.into()),
        })
    }

    /// Queues a request.
    #[inline]
    pub fn submit(&mut self, slot: u16, ask: IoKind, offset: u64, length: u32) {
        let (command, offset, length) = match ask {
            IoKind::Read => (command::READ, offset, length),
            IoKind::Write => (command::WRITE, offset, length),
            IoKind::Trim => (command::TRIM, offset, length),
            IoKind::Flush => (command::FLUSH, 0, 0),
        };
        let request = Request {
            flags: 0,
            command,
            cookie: 0,
            offset,
            length: length.into(),
        };
        let state = &mut self.state;
        self.outgoing
            .headers(|bytes| state.begin(slot.into(), request, bytes));
        if ask == IoKind::Write {
            self.outgoing.data(slot, 0, length);
        }
    }

    /// Sends queued requests until the socket blocks.
    #[inline]
    pub fn publish(&mut self) -> Result<()> {
        let slots = &self.slots;
        self.outgoing
            .send(&self.socket, |slot| &slots[usize::from(slot)])
    }

    /// Collects completions.
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        if !self.outgoing.is_empty() {
            self.publish()?;
        }
        self.receive()?;
        done.append(&mut self.done);
        Ok(())
    }

    /// Receives available replies.
    fn receive(&mut self) -> Result<()> {
        let expected = self.state.expected_data();
        let direct = expected.filter(|(_, _, left)| *left >= DIRECT_BYTES_MIN);
        let got = match direct {
            Some((slot, at, left)) => {
                let data = &mut self.slots[slot as usize][at as usize..][..left as usize];
                let mut slices = [IoSliceMut::new(data), IoSliceMut::new(&mut self.stage)];
                self.socket.read_vectored(&mut slices)
            }
            None => self.socket.read(&mut self.stage),
        };
        let bytes = match got {
            Ok(0) => bail!("the server has closed the connection"),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error).context("the connection is lost"),
        };
        let here = direct.map_or(0, |(_, _, left)| bytes.min(left as usize));
        self.state.received(here as u64);
        let mut rest = &self.stage[..bytes - here];
        loop {
            match self.state.next(&mut rest)? {
                Event::More => return Ok(()),
                Event::Data { slot, at, length } => {
                    let (data, after) = rest.split_at(length);
                    self.slots[slot as usize][at as usize..][..length].copy_from_slice(data);
                    rest = after;
                }
                Event::Zeroes { slot, at, length } => {
                    self.slots[slot as usize][at as usize..][..length as usize].fill(0);
                }
                Event::Status { .. } => bail!("the server sends a status that was not requested"),
                Event::Done { slot, result } => self.done.push(Done {
                    slot: slot as u16,
                    ok: result.is_ok(),
                }),
            }
        }
    }

    /// Waits for the socket.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        let mut wanted = PollFlags::IN;
        if !self.outgoing.is_empty() {
            wanted |= PollFlags::OUT;
        }
        let mut waits = [PollFd::new(&self.socket, wanted)];
        let limit = Timespec::try_from(limit.min(WAIT_MAX)).ok();
        match poll(&mut waits, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error).context("cannot wait for the server"),
        }
    }

    /// Writes the data of a slot.
    pub fn write_data(&mut self, slot: u16, data: &[u8]) {
        self.slots[usize::from(slot)][..data.len()].copy_from_slice(data);
    }

    /// Reads the data of a slot.
    pub fn read_data(&self, slot: u16, into: &mut [u8]) {
        let length = into.len();
        into.copy_from_slice(&self.slots[usize::from(slot)][..length]);
    }
}
