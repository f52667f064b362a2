//! Reads and writes on a request queue of either device.

use std::time::Duration;

use vhost_frontend::{
    BlkDone, BlkQueue, FrontEnd, Layout, Queue, QueueOptions, ScsiDone, ScsiQueue, ScsiRequest,
    kind, status,
};

use crate::target::{Device, Target};
use crate::{Verdict, equal, failed};

/// Unit of the tests: a multiple of every common block size.
pub(crate) const BLOCK: usize = 4096;
/// Maximum length of a request.
pub(crate) const MAX_IO: usize = 4 * BLOCK;
/// Requests in flight.
pub(crate) const DEPTH: u16 = 8;
/// Time limit of one request.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// A request queue.
pub(crate) struct Io {
    pub device: IoDevice,
    /// Chains so far, which is a split ring's position.
    chains: u32,
}

/// The queue's driver.
pub(crate) enum IoDevice {
    Blk(BlkQueue),
    Scsi(ScsiUnit),
}

/// A request queue of a controller, with one logical unit.
pub(crate) struct ScsiUnit {
    pub queue: ScsiQueue,
    target: u8,
    lun: u16,
    /// Bytes per logical block.
    block: u32,
    /// Session of the queue, if it has no other owner.
    _session: Option<FrontEnd>,
}

impl Io {
    /// Starts request queue `nth`.
    pub fn start(
        target: &Target,
        front_end: &mut FrontEnd,
        nth: u16,
        options: &QueueOptions,
        layout: Layout,
    ) -> Verdict<Io> {
        let index = target.first_queue() + nth;
        match target.device {
            Device::Blk => {
                let queue = BlkQueue::start(front_end, index, options, DEPTH, MAX_IO, layout)?;
                Ok(Io {
                    device: IoDevice::Blk(queue),
                    chains: 0,
                })
            }
            Device::Scsi(number, lun) => {
                let queue = ScsiQueue::start(front_end, index, options, DEPTH, MAX_IO, layout)?;
                let mut unit = ScsiUnit::new(queue, number, lun);
                let chains = unit.ready()?;
                Ok(Io {
                    device: IoDevice::Scsi(unit),
                    chains,
                })
            }
        }
    }

    pub fn queue(&mut self) -> &mut Queue {
        match &mut self.device {
            IoDevice::Blk(queue) => queue.queue(),
            IoDevice::Scsi(unit) => unit.queue.queue(),
        }
    }

    /// Returns the number of chains since the start of the ring.
    pub fn chains(&self) -> u32 {
        self.chains
    }

    /// Runs a request without data: a flush or TEST UNIT READY. Any status is right.
    pub fn ping(&mut self) -> Verdict {
        self.submit_ping()?;
        self.reap_ping()
    }

    /// Submits a request without data.
    pub fn submit_ping(&mut self) -> Verdict {
        self.chains += 1;
        let submitted = match &mut self.device {
            IoDevice::Blk(queue) => queue.take().filter(|slot| {
                let is_added = queue.submit(*slot, kind::FLUSH, 0, 0, 0);
                queue.publish();
                is_added
            }),
            IoDevice::Scsi(unit) => unit.queue.take().filter(|slot| {
                let is_added = unit.queue.submit(*slot, &unit.request(&[0; 6]), 0, 0);
                unit.queue.publish();
                is_added
            }),
        };
        match submitted {
            Some(_) => Ok(()),
            None => failed("the ring has no room"),
        }
    }

    /// Waits for the only request in flight.
    pub fn reap_ping(&mut self) -> Verdict {
        self.queue().wait(LIMIT)?;
        let is_completed = self.reap()?;
        equal("a request completed", is_completed, true)
    }

    /// Takes a completed request. Returns false if there is none.
    pub fn reap(&mut self) -> Verdict<bool> {
        let is_written = match &mut self.device {
            IoDevice::Blk(queue) => queue.reap().map(|done| {
                queue.release(done.slot);
                done.status != status::NONE
            }),
            IoDevice::Scsi(unit) => unit.queue.reap().map(|done| {
                unit.queue.release(done.slot);
                done.response != 0xff
            }),
        };
        match is_written {
            Some(false) => failed("the completed request has no status"),
            completed => Ok(completed.is_some()),
        }
    }

    /// Reads from a byte offset, in multiples of [`BLOCK`].
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Verdict {
        self.chains += 1;
        match &mut self.device {
            IoDevice::Blk(queue) => {
                let done = run_blk(queue, kind::IN, offset / 512, &[], into)?;
                equal("status of the read", done.status, status::OK)
            }
            IoDevice::Scsi(unit) => {
                let cdb = unit.cdb(0x28, offset, into.len());
                good("READ(10)", &unit.run(&cdb, &[], into)?)
            }
        }
    }

    /// Writes to a byte offset, in multiples of [`BLOCK`].
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Verdict {
        self.chains += 1;
        match &mut self.device {
            IoDevice::Blk(queue) => {
                let done = run_blk(queue, kind::OUT, offset / 512, from, &mut [])?;
                equal("status of the write", done.status, status::OK)
            }
            IoDevice::Scsi(unit) => {
                let cdb = unit.cdb(0x2a, offset, from.len());
                good("WRITE(10)", &unit.run(&cdb, from, &mut [])?)
            }
        }
    }
}

impl ScsiUnit {
    pub fn new(queue: ScsiQueue, target: u8, lun: u16) -> ScsiUnit {
        ScsiUnit {
            queue,
            target,
            lun,
            block: 512,
            _session: None,
        }
    }

    /// Keeps the session open as long as the queue.
    pub fn with_session(self, front_end: FrontEnd) -> ScsiUnit {
        ScsiUnit {
            _session: Some(front_end),
            ..self
        }
    }

    /// Consumes unit attentions and reads the block size. Returns the number of commands.
    fn ready(&mut self) -> Verdict<u32> {
        let mut commands = 0;
        for _ in 0..8 {
            commands += 1;
            if self.run(&[0; 6], &[], &mut [])?.status == 0 {
                break;
            }
        }
        // READ CAPACITY(10).
        let mut capacity = [0; 8];
        let done = self.run(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], &mut capacity)?;
        if (done.response, done.status) == (0, 0) {
            let [.., a, b, c, d] = capacity;
            self.block = u32::from_be_bytes([a, b, c, d]).clamp(1, BLOCK as u32);
        }
        Ok(commands + 1)
    }

    fn request<'a>(&self, cdb: &'a [u8]) -> ScsiRequest<'a> {
        ScsiRequest {
            target: self.target,
            lun: self.lun,
            tag: 7,
            cdb,
        }
    }

    /// Builds a READ(10) or WRITE(10).
    pub fn cdb(&self, opcode: u8, offset: u64, length: usize) -> [u8; 10] {
        let block = u64::from(self.block);
        let [a, b, c, d] = ((offset / block) as u32).to_be_bytes();
        let [high, low] = ((length as u64 / block) as u16).to_be_bytes();
        [opcode, 0, a, b, c, d, 0, high, low, 0]
    }

    /// Runs one command on the unit.
    pub fn run(&mut self, cdb: &[u8], out: &[u8], into: &mut [u8]) -> Verdict<ScsiDone> {
        let (target, lun) = (self.target, self.lun);
        self.run_on(target, lun, cdb, out, into)
    }

    /// Runs one command on any unit.
    pub fn run_on(
        &mut self,
        target: u8,
        lun: u16,
        cdb: &[u8],
        out: &[u8],
        into: &mut [u8],
    ) -> Verdict<ScsiDone> {
        let request = ScsiRequest {
            target,
            lun,
            tag: 7,
            cdb,
        };
        Ok(self.queue.run(&request, out, into)?)
    }
}

/// Fails unless a command ended with GOOD.
pub(crate) fn good(command: &str, done: &ScsiDone) -> Verdict {
    equal(
        &format!("response and status of {command}"),
        (done.response, done.status),
        (0, 0),
    )
}

/// Runs a virtio-blk request. Does not check its status and its used length.
pub(crate) fn run_blk(
    queue: &mut BlkQueue,
    kind: u32,
    sector: u64,
    out: &[u8],
    into: &mut [u8],
) -> Verdict<BlkDone> {
    let Some(slot) = queue.take() else {
        return failed("a request of an earlier step is still in flight");
    };
    let data = queue.data(slot);
    // Bytes that the device does not write keep their value.
    data.write(0, into);
    data.write(0, out);
    if !queue.submit(slot, kind, sector, out.len(), into.len()) {
        return failed("the test's chain does not fit in the ring");
    }
    queue.publish();
    let done = queue.wait_for(LIMIT)?;
    equal("completed slot", done.slot, slot)?;
    data.read(0, into);
    queue.release(slot);
    Ok(done)
}
