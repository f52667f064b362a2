//! Driver of virtio-scsi (virtio 1.3, 5.6.6), and the commands that it shares with initiators (SBC-4).

use std::sync::Arc;

use reactor::Worker;
use scsi::cdb::{self, FUA, UNMAP_BIT, cdb10, cdb16};
use scsi::{Cdb, opcode};
use virtio_scsi::ScsiDevice;

use super::blk::failed;
use super::guest::GuestQueue;
use super::{ABORTED, Client, Done, Kind, Outcome, Request};
use crate::model::BLOCK;
use crate::random::Random;

/// Returns the CDB of a request, its data-out, and the length of its data-in.
pub fn command(request: &Request) -> (Cdb, Vec<u8>, usize) {
    let (lba, blocks) = (request.lba, request.blocks as u32);
    let ten = |code| cdb10(code, lba as u32, blocks as u16);
    match request.kind {
        Kind::Read => (
            ten(opcode::READ_10),
            Vec::new(),
            request.blocks as usize * BLOCK,
        ),
        Kind::Write { durable } => {
            let mut cdb = ten(opcode::WRITE_10);
            cdb[1] = if durable { FUA } else { 0 };
            (cdb, request.data.clone(), 0)
        }
        Kind::Flush => (cdb10(opcode::SYNCHRONIZE_CACHE_10, 0, 0), Vec::new(), 0),
        Kind::Zero { unmap } => {
            let mut cdb = cdb16(opcode::WRITE_SAME_16, lba, blocks);
            cdb[1] = if unmap { UNMAP_BIT } else { 0 };
            (cdb, vec![0; BLOCK], 0)
        }
        Kind::Discard => {
            let (cdb, list) = cdb::unmap(lba, blocks);
            (cdb, list.to_vec(), 0)
        }
        Kind::CompareAndWrite => {
            let cdb = cdb::compare_and_write(lba, blocks as u8);
            (cdb, request.data.clone(), 0)
        }
        Kind::Reserve(service_action) => {
            let (action, kind) = service_action.codes();
            let length = request.data.len() as u16;
            let code = opcode::PERSISTENT_RESERVE_OUT;
            let cdb = cdb::persistent_reserve(code, action, kind, length);
            (cdb, request.data.clone(), 0)
        }
    }
}

/// Decodes status and sense data.
pub fn outcome(status: u8, sense: &[u8]) -> Outcome {
    let key = sense.get(2).copied().unwrap_or(0) & 0xf;
    let codes = sense.get(12..14).unwrap_or(&[0, 0]);
    match (status, key) {
        (0x00, _) => Outcome::Good,
        (0x18, _) => Outcome::Conflict,
        (0x08 | 0x28, _) => Outcome::NotNow(format!("status {status:#04x}")),
        // Unit attention.
        (0x02, 6) => Outcome::NotNow(format!("unit attention {codes:02x?}")),
        (0x02, 0xe) => Outcome::Miscompare,
        _ => Outcome::Failed(format!(
            "status {status:#04x}, sense key {key:#x}, codes {codes:02x?}"
        )),
    }
}

/// Size of a response: fixed fields and 96 bytes of sense data.
const RESPONSE: usize = 108;

/// Number of targets of the controller, and of logical units of the iSCSI target.
pub const DISKS: u64 = 4;
/// Control queue index and task management functions (virtio 1.3, 5.6.6.2).
const CONTROL: u16 = 0;
const ABORT_TASK: u32 = 0;
const ABORT_TASK_SET: u32 = 1;
const I_T_NEXUS_RESET: u32 = 4;
const LOGICAL_UNIT_RESET: u32 = 5;
/// Index of the first request queue. Its driver also uses the control queue.
const FIRST: u16 = 2;
/// Response codes.
const OK: u8 = 0;
const S_ABORTED: u8 = 2;
const S_RESET: u8 = 4;
const S_BUSY: u8 = 5;

pub struct Scsi {
    device: Option<Arc<ScsiDevice>>,
    queue: GuestQueue,
    control: Option<GuestQueue>,
    worker: usize,
    index: u16,
}

impl Scsi {
    pub fn new(
        device: Arc<ScsiDevice>,
        worker: usize,
        index: u16,
        packed: bool,
        is_tracked: bool,
    ) -> Scsi {
        Scsi {
            device: Some(device),
            queue: GuestQueue::new(index, packed, is_tracked),
            control: None,
            worker,
            index,
        }
    }

    /// Sends a task management function (virtio 1.3, 5.6.6.2).
    fn manage(&mut self, function: u32, disk: u8, token: u64) -> Option<()> {
        let control = self.control.as_mut().filter(|queue| !queue.is_broken())?;
        let slot = control.take(token)?;
        let mut request = [0; 24];
        request[4..8].copy_from_slice(&function.to_le_bytes());
        request[8..12].copy_from_slice(&[1, disk, 0x40, 0]);
        request[16..24].copy_from_slice(&token.to_le_bytes());
        control.add(slot, &request, &[], 1, 0, true);
        Some(())
    }

    /// Restarts the guest.
    pub fn renew(&mut self, packed: bool) {
        self.queue = GuestQueue::new(self.index, packed, self.queue.is_tracked());
    }

    /// Attaches the driver to the device of another life.
    pub fn set_device(&mut self, device: Arc<ScsiDevice>) {
        self.device = Some(device);
    }
}

impl Client for Scsi {
    fn name(&self) -> String {
        format!("virtio-scsi queue {}", self.index)
    }

    fn can(&self, _kind: Kind) -> bool {
        true
    }

    fn submit(&mut self, request: &Request) -> bool {
        let Some(slot) = self.queue.take(request.token) else {
            return false;
        };
        let (cdb, out, into) = command(request);
        let mut header = [0; 51];
        header[..4].copy_from_slice(&[1, request.disk as u8, 0x40, 0]);
        header[8..16].copy_from_slice(&request.token.to_le_bytes());
        header[19..35].copy_from_slice(&cdb);
        self.queue
            .add(slot, &header, &out, RESPONSE as u32, into, true);
        true
    }

    fn abort(&mut self, seed: u64) -> Option<String> {
        let mut random = Random::new(seed);
        let tokens = self.queue.tokens();
        let token = *tokens.get(random.below(tokens.len().max(1) as u64) as usize)?;
        let (function, disk, subject) = match random.one_in(3) {
            true => {
                let disk = random.below(DISKS) as u8;
                (ABORT_TASK_SET, disk, format!("tasks of d{disk}"))
            }
            // The disk may be the wrong one; then nothing is aborted.
            false => (
                ABORT_TASK,
                random.below(DISKS) as u8,
                format!("request {token}"),
            ),
        };
        self.manage(function, disk, token)?;
        Some(subject)
    }

    fn reset(&mut self, seed: u64) -> Option<(String, Vec<usize>)> {
        let mut random = Random::new(seed);
        let disk = random.below(DISKS) as u8;
        match random.one_in(3) {
            // Affects this nexus only.
            true => {
                self.manage(I_T_NEXUS_RESET, disk, 0)?;
                Some(("the nexus".to_owned(), Vec::new()))
            }
            false => {
                self.manage(LOGICAL_UNIT_RESET, disk, 0)?;
                Some((format!("d{disk}"), vec![disk.into()]))
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        if let Some(control) = &mut self.control {
            while let Some((_, answer, _)) = control.answered(1) {
                assert_eq!(answer, [OK], "a task management function fails");
            }
        }
        while let Some((token, answer, data)) = self.queue.answered(RESPONSE) {
            let sense_length = u32::from_le_bytes([answer[0], answer[1], answer[2], answer[3]]);
            let (status, response) = (answer[10], answer[11]);
            let sense = &answer[12..12 + (sense_length as usize).min(96)];
            let outcome = match response {
                OK => outcome(status, sense),
                S_ABORTED | S_RESET => Outcome::Failed(ABORTED.to_owned()),
                S_BUSY => Outcome::NotNow("busy".to_owned()),
                other => Outcome::Failed(format!("response {other}")),
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

    fn detach(&mut self) {
        self.device = None;
        self.control = None;
    }

    fn attach(&mut self, worker: &mut Worker) {
        if let Some(device) = &self.device {
            self.queue.attach(device.as_ref(), worker);
            if self.index == FIRST {
                let control = GuestQueue::new(CONTROL, false, false);
                control.attach(device.as_ref(), worker);
                self.control = Some(control);
            }
        }
    }
}
