//! A session with several connections (MC/S) as a queue, on the initiator of remote disks, with a slot per request.
//!
//! A command uses the connection with the fewest commands in flight. Data read replaces the data of the slot.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use iscsi::initiator::Request;
use iscsi_initiator::{CommandDone, Portal, Session, SessionOptions};
use scsi::cdb;

use super::{LOOK_UP, UnitAddress};
use crate::driver::{Demand, Done, IoKind, scsi_cdb};

/// Maximum number of unit attentions at the start of a session.
const ATTEMPTS: usize = 4;

/// Login keys from the subject; `None`: the initiator's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionKeys {
    /// Connections per session; `None`: the single-connection driver.
    pub connections: Option<u16>,
    /// MaxBurstLength.
    pub max_burst: Option<u32>,
    /// FirstBurstLength.
    pub first_burst: Option<u32>,
    /// MaxRecvDataSegmentLength.
    pub max_segment: Option<u32>,
    /// ImmediateData.
    pub immediate_data: Option<bool>,
    /// InitialR2T.
    pub initial_r2t: Option<bool>,
}

impl SessionKeys {
    /// Sets a key. Returns false if the key is unknown or the value is invalid.
    pub fn take(&mut self, key: &str, value: &str) -> bool {
        // Lengths have 24 bits (RFC 7143, 13.12 to 13.14).
        let length = value.parse().ok().filter(|n| (512..1 << 24).contains(n));
        let flag = match value {
            "0" => Some(false),
            "1" => Some(true),
            _ => None,
        };
        match key {
            "connections" => {
                self.connections = value.parse().ok().filter(|n| (1..=16).contains(n));
                self.connections.is_some()
            }
            "max_burst" => put(&mut self.max_burst, length),
            "first_burst" => put(&mut self.first_burst, length),
            "max_segment" => put(&mut self.max_segment, length),
            "immediate_data" => put(&mut self.immediate_data, flag),
            "initial_r2t" => put(&mut self.initial_r2t, flag),
            _ => false,
        }
    }

    /// Returns true if keys are set without `connections`; they would have no effect.
    pub fn is_idle(&self) -> bool {
        self.connections.is_none() && *self != SessionKeys::default()
    }

    fn options(&self, connections: u16, digests: bool) -> SessionOptions {
        let mut options = SessionOptions {
            connections,
            ..SessionOptions::default()
        };
        let offer = &mut options.offer;
        if digests {
            offer.header_digest = iscsi_initiator::DigestOffer::Crc32c;
            offer.data_digest = iscsi_initiator::DigestOffer::Crc32c;
        }
        if let Some(bytes) = self.max_segment {
            offer.max_recv_data_segment_length = bytes;
        }
        let session = &mut offer.session;
        session.max_burst_length = self.max_burst.unwrap_or(session.max_burst_length);
        session.first_burst_length = self.first_burst.unwrap_or(session.first_burst_length);
        // The first burst must not exceed the maximum burst (13.14).
        session.first_burst_length = session.first_burst_length.min(session.max_burst_length);
        session.immediate_data = self.immediate_data.unwrap_or(session.immediate_data);
        session.initial_r2t = self.initial_r2t.unwrap_or(session.initial_r2t);
        options
    }
}

fn put<T>(key: &mut Option<T>, value: Option<T>) -> bool {
    *key = value;
    key.is_some()
}

struct Slot {
    data: Vec<u8>,
    ask: IoKind,
    length: usize,
}

/// A session with all its connections.
pub struct MultiQueue {
    session: Session,
    lun: [u8; 8],
    block_size: u32,
    slots: Vec<Slot>,
    by_tag: HashMap<u32, u16>,
    /// Error of a failed send, returned by the next fallible call.
    failed: Option<anyhow::Error>,
    ended: Vec<CommandDone>,
}

impl MultiQueue {
    pub(super) fn open(
        place: &UnitAddress,
        keys: SessionKeys,
        digests: bool,
        block_size: u32,
        demand: Demand,
    ) -> Result<MultiQueue> {
        let wanted = keys.connections.unwrap_or(1);
        let portal: Portal = place.portal().parse().map_err(anyhow::Error::msg)?;
        let options = keys.options(wanted, digests);
        let mut session = Session::login(&portal, &place.target, &options)?;
        ensure!(
            session.connections() == usize::from(wanted),
            "connections={wanted}: {} at {portal} allows {}; hint: set connections={0}, or raise MaxConnections of the target",
            place.target,
            session.connections()
        );
        let lun = place.lun();
        for attempt in 1.. {
            let done = session.run(Request {
                lun,
                cdb: vec![0; 6],
                ..Request::default()
            })?;
            if done.status == 0 {
                break;
            }
            ensure!(
                attempt < ATTEMPTS,
                "TEST UNIT READY ends with status {:02x}h",
                done.status
            );
        }
        let mut noise = Rng::with_seed(u64::from(demand.slots));
        let slots = (0..demand.slots).map(|_| {
            let mut data = vec![0; demand.largest as usize];
            if !demand.zeroes {
                noise.fill(&mut data);
            }
            Slot {
                data,
                ask: IoKind::Flush,
                length: 0,
            }
        });
        Ok(MultiQueue {
            session,
            lun,
            block_size,
            slots: slots.collect(),
            by_tag: HashMap::new(),
            failed: None,
            ended: Vec::new(),
        })
    }

    /// Sends a request.
    pub fn submit(&mut self, index: u16, ask: IoKind, offset: u64, length: u32) {
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return;
        };
        let block = offset / u64::from(self.block_size);
        let blocks = length / self.block_size;
        (slot.ask, slot.length) = (ask, length as usize);
        let mut request = Request {
            lun: self.lun,
            cdb: scsi_cdb(ask, true, block, blocks).to_vec(),
            ..Request::default()
        };
        match ask {
            IoKind::Read => request.read_length = Some(length),
            IoKind::Write => {
                // The buffer returns with the response.
                request.write = Some(match slot.data.len() == slot.length {
                    true => std::mem::take(&mut slot.data),
                    false => slot.data[..slot.length].to_vec(),
                });
            }
            IoKind::Flush => {}
            IoKind::Trim => request.write = Some(cdb::unmap(block, blocks).1.to_vec()),
        }
        match self.session.queue(request) {
            Ok(tag) => {
                self.by_tag.insert(tag, index);
            }
            Err(error) => self.failed = Some(error.into()),
        }
    }

    /// Sends queued requests.
    pub fn publish(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)?;
        Ok(self.session.send_queued()?)
    }

    /// Collects completions.
    pub fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        self.publish()?;
        while let Some(ended) = self.session.poll(Duration::ZERO)? {
            self.ended.push(ended);
        }
        for ended in self.ended.drain(..) {
            let index = self.by_tag.remove(&ended.itt);
            let index = index.context("a response to an unknown request")?;
            let slot = &mut self.slots[usize::from(index)];
            let mut ok = ended.response == 0 && ended.status == 0;
            if slot.ask == IoKind::Read {
                ok &= ended.data.len() == slot.length;
                match ok && slot.data.len() == slot.length {
                    true => slot.data = ended.data,
                    false if ok => slot.data[..slot.length].copy_from_slice(&ended.data),
                    false => {}
                }
            } else if slot.data.is_empty() {
                slot.data = ended.written;
            }
            done.push(Done { slot: index, ok });
        }
        Ok(())
    }

    /// Waits for the sockets.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        let ended = self.session.poll(limit.min(LOOK_UP))?;
        self.ended.extend(ended);
        Ok(())
    }

    /// Writes the data of a slot.
    pub fn write_data(&mut self, slot: u16, data: &[u8]) {
        if let Some(slot) = self.slots.get_mut(usize::from(slot)) {
            slot.data[..data.len()].copy_from_slice(data);
        }
    }

    /// Reads the data of a slot.
    pub fn read_data(&self, slot: u16, into: &mut [u8]) {
        if let Some(slot) = self.slots.get(usize::from(slot)) {
            into.copy_from_slice(&slot.data[..into.len()]);
        }
    }
}
