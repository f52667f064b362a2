//! Driver of virtio-blk (virtio 1.3, 5.2.6).

use std::sync::Arc;

use reactor::Worker;
use virtio_blk::BlkDevice;

use super::guest::GuestQueue;
use super::{Client, Done, Kind, Outcome, Request};
use crate::model::BLOCK;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

pub struct Blk {
    device: Option<Arc<BlkDevice>>,
    queue: GuestQueue,
    disk: usize,
    worker: usize,
    index: u16,
    /// The driver may violate the specification. It sends only reads, and their results are not checked.
    pub is_hostile: bool,
    /// The driver has violated the specification, and the device no longer polls its ring.
    has_broken_rules: bool,
}

impl Blk {
    pub fn new(
        device: Arc<BlkDevice>,
        disk: usize,
        worker: usize,
        index: u16,
        packed: bool,
        is_tracked: bool,
    ) -> Blk {
        Blk {
            device: Some(device),
            queue: GuestQueue::new(index, packed, is_tracked),
            disk,
            worker,
            index,
            is_hostile: false,
            has_broken_rules: false,
        }
    }

    /// Restarts the guest.
    pub fn renew(&mut self, packed: bool) {
        self.queue = GuestQueue::new(self.index, packed, self.queue.is_tracked());
        self.has_broken_rules = false;
    }

    /// Attaches the driver to the device of another life.
    pub fn set_device(&mut self, device: Arc<BlkDevice>) {
        self.device = Some(device);
    }

    pub fn disk(&self) -> usize {
        self.disk
    }
}

impl Client for Blk {
    fn name(&self) -> String {
        format!("virtio-blk d{} queue {}", self.disk, self.index)
    }

    fn can(&self, kind: Kind) -> bool {
        match self.is_hostile {
            true => kind == Kind::Read,
            false => !matches!(kind, Kind::CompareAndWrite | Kind::Reserve(_)),
        }
    }

    fn submit(&mut self, request: &Request) -> bool {
        if request.disk != self.disk || self.has_broken_rules {
            return false;
        }
        let Some(slot) = self.queue.take(request.token) else {
            return false;
        };
        let (kind, unmap) = match request.kind {
            Kind::Read => (IN, false),
            Kind::Write { .. } | Kind::CompareAndWrite => (OUT, false),
            Kind::Flush | Kind::Reserve(_) => (FLUSH, false),
            Kind::Zero { unmap } => (WRITE_ZEROES, unmap),
            Kind::Discard => (DISCARD, false),
        };
        let is_range = matches!(request.kind, Kind::Zero { .. } | Kind::Discard);
        let sector = if is_range { 0 } else { request.lba };
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        let mut range = [0; 16];
        range[..8].copy_from_slice(&request.lba.to_le_bytes());
        range[8..12].copy_from_slice(&(request.blocks as u32).to_le_bytes());
        range[12] = unmap.into();
        let out: &[u8] = if is_range { &range } else { &request.data };
        let into = match request.kind {
            Kind::Read => request.blocks as usize * BLOCK,
            _ => 0,
        };
        self.queue.add(slot, &header, out, 1, into, false);
        true
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        if self.has_broken_rules {
            let left = self.queue.forget();
            done.extend(left.into_iter().map(|token| failed(token, "unused")));
            return;
        }
        while let Some((token, status, data)) = self.queue.answered(1) {
            let outcome = match status[0] {
                0 => Outcome::Good,
                1 => Outcome::Failed("VIRTIO_BLK_S_IOERR".to_owned()),
                2 => Outcome::Failed("VIRTIO_BLK_S_UNSUPP".to_owned()),
                other => panic!("the status of a virtio-blk request is {other:#x}"),
            };
            done.push(Done {
                token,
                outcome,
                data,
            });
        }
        if self.queue.is_broken() {
            for token in self.queue.forget() {
                done.push(failed(token, "the queue has ended"));
            }
        }
    }

    fn worker(&self) -> usize {
        self.worker
    }

    fn is_gone(&self) -> bool {
        self.queue.is_broken()
    }

    fn survives(&self) -> bool {
        self.queue.is_tracked()
    }

    fn misbehave(&mut self, seed: u64) {
        self.has_broken_rules = true;
        crate::hostile::misbehave(&mut self.queue, seed);
    }

    fn detach(&mut self) {
        self.device = None;
    }

    fn attach(&mut self, worker: &mut Worker) {
        if let Some(device) = &self.device {
            self.queue.attach(device.as_ref(), worker);
        }
    }
}

pub fn failed(token: u64, why: &str) -> Done {
    Done {
        token,
        outcome: Outcome::Failed(why.to_owned()),
        data: Vec::new(),
    }
}
