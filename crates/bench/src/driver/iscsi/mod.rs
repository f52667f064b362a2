//! iSCSI initiator as a driver: each queue is a session with one connection, as with common initiators.
//!
//! This file contains the address, the login and the initial commands; `queue` drives. The login offers the same keys as open-iscsi and
//! libiscsi, so that targets behave as in production. No authentication.

mod multi;
mod queue;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use iscsi::login::{InitiatorLogin, LoginProgress, LoginRequestSettings, LoginResult};
use iscsi::negotiation::{DigestOffer, Offer, SessionParameters, TaskReporting};
use iscsi::pdu::{Decoder, Digests, LoginResponse, Progress, encode};
use iscsi_initiator::random_isid;
use scsi::cdb;

use super::{Demand, DeviceInfo, Subject, process};
pub use multi::{MultiQueue, SessionKeys};
pub use queue::IscsiQueue;

/// Syntax of an iSCSI unit.
const FORM: &str = "iscsi://HOST[:PORT]/TARGET/LUN";
const PORT: u16 = 3260;
/// Limit for sessions, one per queue: more than any thread configuration needs.
const QUEUES_MAX: u16 = 256;
/// Timeout for each step of a login.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval at which a waiting thread checks for a stop request.
const LOOK_UP: Duration = Duration::from_millis(50);
/// Maximum data segment of a Login Response (RFC 7143, 13.12).
const LOGIN_SEGMENT_MAX: u32 = 8192;
/// InitiatorName, which a target's access list must admit.
const INITIATOR: &str = "iqn.2026-11.org.example:lunette-bench";
/// Largest data segment and unsolicited burst: the usual defaults of initiators.
const SEGMENT_BYTES: u32 = 256 << 10;
const BURST_BYTES: u32 = (16 << 20) - 512;

/// Address of a logical unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitAddress {
    /// Portal as written.
    host: String,
    port: u16,
    /// Target name.
    pub target: String,
    lun: u16,
}

impl UnitAddress {
    /// Parses the part after `iscsi://`.
    pub fn parse(text: &str) -> Result<UnitAddress> {
        let wrong = || anyhow!("`iscsi://{text}` is not of the form {FORM}");
        let mut parts = text.splitn(3, '/');
        let (Some(portal), Some(target), Some(lun)) = (parts.next(), parts.next(), parts.next())
        else {
            return Err(wrong());
        };
        let (host, port) = match portal.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().map_err(|_| wrong())?)
            }
            _ => (portal, PORT),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let lun = lun.parse().ok().filter(|lun| *lun < 16_384);
        ensure!(
            !host.contains('@'),
            "`iscsi://{target}`: CHAP is not supported here; hint: omit the user, and admit the initiator without CHAP by the target's access list or demo mode"
        );
        ensure!(!host.is_empty() && !target.is_empty(), wrong());
        Ok(UnitAddress {
            host: host.to_owned(),
            port,
            target: target.to_owned(),
            lun: lun.ok_or_else(wrong)?,
        })
    }

    /// Returns the LUN in wire format: flat addressing from 256 on (SAM-5, 4.7.7).
    fn lun(&self) -> [u8; 8] {
        let [high, low] = self.lun.to_be_bytes();
        let method = if self.lun < 256 { 0 } else { 0x40 };
        [method | high, low, 0, 0, 0, 0, 0, 0]
    }

    fn portal(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    fn address(&self) -> Result<SocketAddr> {
        let host = self.host.as_str();
        let found = (host, self.port).to_socket_addrs();
        let mut found = found.with_context(|| format!("cannot find the address of {host}"))?;
        let first = found.next();
        first.with_context(|| format!("{host} has no address"))
    }
}

/// A logical unit that was found.
pub struct IscsiSession {
    place: UnitAddress,
    digests: bool,
    keys: SessionKeys,
    info: DeviceInfo,
    /// Process ID of the target, if it is on this machine.
    pid: Option<u32>,
}

impl IscsiSession {
    /// Logs in once and queries the unit.
    pub fn open(subject: &Subject) -> Result<IscsiSession> {
        let place = UnitAddress::parse(&subject.path.to_string_lossy())?;
        let mut session = IscsiSession {
            place,
            digests: subject.digests,
            keys: subject.keys,
            info: DeviceInfo {
                capacity: 0,
                block_size: 512,
                queues: QUEUES_MAX,
                read_only: false,
                discard_max: u64::MAX,
            },
            pid: None,
        };
        let demand = Demand {
            slots: 1,
            largest: 512,
            zeroes: true,
        };
        let mut probe = session.connect(demand)?;
        session.pid = process::at_other_end(probe.stream());
        let capacity = probe.ask(&cdb::read_capacity_16(), 32)?;
        let (Some(last), Some(block)) = (capacity.first_chunk::<8>(), capacity.get(8..12)) else {
            bail!("READ CAPACITY returned {} bytes", capacity.len());
        };
        let block = block.try_into().map_or(0, u32::from_be_bytes);
        ensure!(
            block.is_power_of_two(),
            "unsupported block size, {block} bytes"
        );
        session.info.block_size = block;
        session.info.capacity = u64::from_be_bytes(*last)
            .saturating_add(1)
            .saturating_mul(block.into());
        // WP bit of the device-specific parameter (SBC-3, 6.4.1).
        let mode = probe
            .ask(&cdb::mode_sense_6(0x3f, 192), 192)
            .unwrap_or_default();
        session.info.read_only = mode.get(2).is_some_and(|byte| byte & 0x80 != 0);
        Ok(session)
    }

    /// Returns the properties of the unit.
    pub fn info(&self) -> DeviceInfo {
        self.info
    }

    /// Returns the process ID of the target, if known.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Opens another session.
    pub fn queue(&mut self, demand: Demand) -> Result<Box<IscsiQueue>> {
        self.connect(demand).map(Box::new)
    }

    /// Opens another session with several connections, if the subject has the key `connections`.
    pub fn multi(&mut self, demand: Demand) -> Option<Result<Box<MultiQueue>>> {
        self.keys.connections?;
        let block_size = self.info.block_size;
        let queue = MultiQueue::open(&self.place, self.keys, self.digests, block_size, demand);
        Some(queue.map(Box::new))
    }

    fn connect(&mut self, demand: Demand) -> Result<IscsiQueue> {
        let address = self.place.address()?;
        let stream = TcpStream::connect_timeout(&address, PATIENCE)
            .with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        let login = login(&stream, self.settings()).with_context(|| {
            let target = &self.place.target;
            format!("cannot log in to {target} at {address} as {INITIATOR}")
        })?;
        stream.set_nonblocking(true)?;
        let lun = self.place.lun();
        let mut queue = IscsiQueue::new(stream, &login, lun, self.info.block_size, demand)?;
        // TEST UNIT READY clears the unit attentions of the new session.
        let ready = queue.ask(&[0; 6], 0);
        ready.with_context(|| {
            let UnitAddress { target, lun, .. } = &self.place;
            format!("LUN {lun} of {target} at {address} is not ready")
        })?;
        Ok(queue)
    }

    fn settings(&self) -> LoginRequestSettings {
        let digest = match self.digests {
            true => DigestOffer::Crc32c,
            false => DigestOffer::None,
        };
        LoginRequestSettings {
            initiator_name: INITIATOR.to_owned(),
            target_name: Some(self.place.target.clone()),
            // A random ISID, so that concurrent runs (also in containers) do not reinstate each other's sessions.
            isid: random_isid(),
            tsih: 0,
            cid: 0,
            cmd_sn: 1,
            offer: Offer {
                header_digest: digest,
                data_digest: digest,
                max_recv_data_segment_length: SEGMENT_BYTES,
                session: SessionParameters {
                    initial_r2t: false,
                    immediate_data: true,
                    max_burst_length: BURST_BYTES,
                    first_burst_length: SEGMENT_BYTES,
                    task_reporting: TaskReporting::Rfc3720,
                    ..SessionParameters::default()
                },
            },
            credentials: None,
        }
    }
}

fn login(stream: &TcpStream, settings: LoginRequestSettings) -> Result<Box<LoginResult>> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut login = InitiatorLogin::new(settings);
    let (mut request, mut text) = login.start();
    let mut decoder = Decoder::new(0, LOGIN_SEGMENT_MAX);
    loop {
        let mut out = Vec::new();
        encode(&mut out, request.to_bhs(), &[], &text, Digests::default());
        (&mut &*stream).write_all(&out)?;
        let (header, segment) = answer(stream, &mut decoder)?;
        match login.handle(&header, &segment)? {
            LoginProgress::Send(next, more) => (request, text) = (next, more),
            LoginProgress::Done(result) => return Ok(result),
        }
    }
}

/// Reads one Login Response and no bytes beyond it.
fn answer(mut stream: &TcpStream, decoder: &mut Decoder) -> Result<(LoginResponse, Vec<u8>)> {
    let mut segment = Vec::new();
    let mut piece = Vec::new();
    loop {
        let (_, progress) = decoder.push(&piece)?;
        piece.clear();
        match progress {
            Progress::NeedMore(bytes) => {
                piece.resize(bytes, 0);
                stream.read_exact(&mut piece)?;
            }
            Progress::Header => {}
            Progress::Data(bytes) => {
                let before = segment.len();
                segment.resize(before + bytes as usize, 0);
                stream.read_exact(&mut segment[before..])?;
                decoder.take_data(&segment[before..]);
            }
            Progress::End { .. } => return Ok((LoginResponse::from_bhs(&decoder.bhs()), segment)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_other_initiators_write_them() {
        let place = UnitAddress::parse("127.0.0.1:3261/iqn.2026-11.org.example:t0/3").unwrap();
        assert_eq!((place.host.as_str(), place.port), ("127.0.0.1", 3261));
        assert_eq!(
            (place.target.as_str(), place.lun),
            ("iqn.2026-11.org.example:t0", 3)
        );
        assert_eq!(UnitAddress::parse("[::1]/iqn.a:b/0").unwrap().host, "::1");
        assert_eq!(UnitAddress::parse("[::1]:77/iqn.a:b/0").unwrap().port, 77);
        assert_eq!(
            UnitAddress::parse("h/iqn.a:b/300").unwrap().lun(),
            [0x41, 0x2c, 0, 0, 0, 0, 0, 0]
        );
        for wrong in ["", "h", "h/t", "h/t/x", "h/t/99999", "h:x/t/0", "/t/0"] {
            assert!(UnitAddress::parse(wrong).is_err(), "{wrong}");
        }
    }
}
