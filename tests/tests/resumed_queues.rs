//! Front ends that continue on a virtio-blk export after its disk was replaced.
#![forbid(unsafe_code)]

use control::{Client, Method};
use end_to_end::{Result, Rig, ensure};
use serde_json::json;
use std::net::Shutdown;
use std::path::Path;
use std::time::Duration;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, kind, status};

const MIB: usize = 1 << 20;
const SOON: Duration = Duration::from_secs(30);
const BLOCK: usize = 4096;

/// Parts of a virtual machine: memory, and a driver with its queue.
struct Machine {
    front_end: FrontEnd,
    queue: BlkQueue,
    options: Options,
}

impl Machine {
    fn start(socket: &Path, index: u16, packed: bool) -> Result<Machine> {
        let options = Options {
            packed,
            ..Options::default()
        };
        Machine::over(FrontEnd::connect(socket, &options)?, index, options)
    }

    fn over(mut front_end: FrontEnd, index: u16, options: Options) -> Result<Machine> {
        let queue = QueueOptions::default();
        let queue = BlkQueue::start(&mut front_end, index, &queue, 4, BLOCK, Layout::Separate)?;
        Ok(Machine {
            front_end,
            queue,
            options,
        })
    }

    fn write(&mut self, byte: u8) -> Result<()> {
        let done = self.queue.write(0, &[byte; BLOCK])?;
        ensure!(done == status::OK, "status {done}");
        Ok(())
    }

    /// Reconnects with the same memory, like a VMM whose guest continues. `others`: queues that the driver has not used yet.
    fn reconnect(&mut self, socket: &Path, base: u32, others: &[u16]) -> Result<()> {
        // Fails if the session has already ended.
        self.front_end
            .channel()
            .stream()
            .shutdown(Shutdown::Both)
            .ok();
        let mut again = FrontEnd::connect(socket, &self.options)?;
        std::mem::swap(again.memory_mut(), self.front_end.memory_mut());
        again.send_memory()?;
        self.front_end = again;
        for index in others {
            self.front_end
                .start_queue(*index, &QueueOptions::default())?;
        }
        let queue = self.queue.queue();
        Ok(self.front_end.begin_queue(queue, base)?)
    }
}

/// Submits a write of block 0 to a queue without a back end.
fn leave_write(queue: &mut BlkQueue, byte: u8) -> Result<()> {
    let Some(slot) = queue.take() else {
        end_to_end::bail!("all requests are in flight");
    };
    queue.data(slot).write(0, &[byte; BLOCK]);
    ensure!(queue.submit(slot, kind::OUT, 0, BLOCK, 0));
    queue.publish();
    Ok(())
}

fn give_disk(rig: &Rig, disk: &str) -> Result<()> {
    let body = json!({"kind": "vhost-blk", "disk": disk, "socket": rig.socket("d"), "queues": 2});
    let client = Client::new(&rig.daemon.control()).patient(Duration::from_secs(60));
    client.change(Method::PUT, "/v1/exports/d?force=true", Some(&body))?;
    Ok(())
}

fn first_block(rig: &Rig, file: &str) -> Result<Vec<u8>> {
    Ok(std::fs::read(rig.scratch.file(file))?[..BLOCK].to_vec())
}

fn two_disks() -> Result<Rig> {
    Rig::prepared(|scratch, daemon| {
        for file in ["d.raw", "e.raw"] {
            std::fs::write(scratch.file(file), vec![0; MIB])?;
        }
        let disks = daemon.disk("d=file:d.raw").disk("e=file:e.raw");
        Ok(disks.vhost_blk("d"))
    })
}

/// Ring position after `requests` requests of three descriptors, within the first round.
fn base_after(requests: u32, packed: bool) -> u32 {
    const PACKED_START: u32 = 0x8000_8000;
    match packed {
        true => PACKED_START + requests * 3 * 0x1_0001,
        false => requests,
    }
}

#[test]
fn queue_resumed_on_another_disk_is_refused_until_a_reset() -> Result<()> {
    for packed in [false, true] {
        let mut rig = two_disks()?;
        let socket = rig.socket("d");
        give_disk(&rig, "d")?;
        let mut old = Machine::start(&socket, 1, packed)?;
        old.write(1)?;
        give_disk(&rig, "e")?;
        old.front_end.channel().wait_closed(SOON)?;

        // Resumes at the last position, at the start as after a full round, and together with an unused queue.
        leave_write(&mut old.queue, 2)?;
        let (reached, start) = (base_after(1, packed), base_after(0, packed));
        for (base, others) in [
            (reached, &[][..]),
            (start, &[]),
            (reached, &[0]),
            (reached, &[]),
        ] {
            let served = old.reconnect(&socket, base, others);
            ensure!(
                served.is_err(),
                "packed {packed}, base {base:#x}, others {others:?}"
            );
        }
        ensure!(
            first_block(&rig, "e.raw")? == [0; BLOCK],
            "written by the old driver"
        );
        rig.daemon
            .logs("was replaced after its driver started; hint: ")?;

        // After a guest reset the new driver is bound to the new disk, also through a daemon restart.
        drop(old);
        let mut new = Machine::start(&socket, 1, packed)?;
        new.write(3)?;
        rig.daemon.kill()?;
        rig.daemon.start_again()?;
        new.front_end.channel().wait_closed(SOON)?;
        new.reconnect(&socket, base_after(1, packed), &[])?;
        new.write(4)?;
        ensure!(first_block(&rig, "e.raw")? == [4; BLOCK]);
        ensure!(first_block(&rig, "d.raw")? == [1; BLOCK]);

        // For this driver the original disk is also a different disk.
        give_disk(&rig, "d")?;
        new.front_end.channel().wait_closed(SOON)?;
        leave_write(&mut new.queue, 5)?;
        let served = new.reconnect(&socket, base_after(2, packed), &[]);
        ensure!(served.is_err(), "packed {packed}");
        ensure!(first_block(&rig, "d.raw")? == [1; BLOCK]);
    }
    Ok(())
}

/// Returns queues that each contain a write, not yet seen by a back end.
fn queues_with_writes(front_end: &mut FrontEnd, byte: u8) -> Result<[BlkQueue; 2]> {
    let mut queue = |index| -> Result<BlkQueue> {
        let queue = front_end.place_queue(index, &QueueOptions::default())?;
        let mut queue = BlkQueue::with_queue(front_end, queue, 4, BLOCK, Layout::Separate)?;
        leave_write(&mut queue, byte)?;
        Ok(queue)
    };
    Ok([queue(0)?, queue(1)?])
}

fn begin(front_end: &FrontEnd, queues: &mut [BlkQueue]) -> Result<()> {
    for queue in queues {
        let queue = queue.queue();
        front_end.begin_queue(queue, queue.base())?;
    }
    Ok(())
}

/// A VMM does not wait until a ring has started, so its guest may submit before the daemon reads the ring. The in-flight region
/// distinguishes such a driver from one that resumes: a VMM preserves it for a driver that continues and otherwise requests a new one.
#[test]
fn driver_that_submits_before_its_queues_start_is_served() -> Result<()> {
    let size = QueueOptions::default().size;
    for packed in [false, true] {
        let rig = two_disks()?;
        let socket = rig.socket("d");
        let options = Options {
            packed,
            ..Options::default()
        };
        give_disk(&rig, "d")?;
        let old = FrontEnd::connect(&socket, &options)?;
        let kept = old.new_inflight(2, size)?;
        old.give_inflight(&kept)?;
        let mut driver = Machine::over(old, 0, options)?;
        driver.write(1)?;
        give_disk(&rig, "e")?;
        driver.front_end.channel().wait_closed(SOON)?;

        // The old driver, with queues that it had not used before.
        let mut resumed = FrontEnd::connect(&socket, &options)?;
        resumed.give_inflight(&kept)?;
        let mut queues = queues_with_writes(&mut resumed, 2)?;
        ensure!(begin(&resumed, &mut queues).is_err(), "packed {packed}");
        ensure!(first_block(&rig, "e.raw")? == [0; BLOCK]);
        drop(resumed);

        // Requesting a region and then sending the preserved one also means resuming.
        let mut resumed = FrontEnd::connect(&socket, &options)?;
        resumed.new_inflight(2, size)?;
        resumed.give_inflight(&kept)?;
        let mut queues = queues_with_writes(&mut resumed, 2)?;
        ensure!(begin(&resumed, &mut queues).is_err(), "packed {packed}");
        ensure!(first_block(&rig, "e.raw")? == [0; BLOCK]);
        drop(resumed);

        let mut fresh = FrontEnd::connect(&socket, &options)?;
        let region = fresh.new_inflight(2, size)?;
        fresh.give_inflight(&region)?;
        let mut queues = queues_with_writes(&mut fresh, 3)?;
        begin(&fresh, &mut queues)?;
        for queue in &mut queues {
            let done = queue.wait()?;
            ensure!(done.status == status::OK, "packed {packed}: {done:?}");
        }
        ensure!(first_block(&rig, "e.raw")? == [3; BLOCK]);
    }
    Ok(())
}

/// The destination of a live migration is a new front end with a new in-flight region. The export's record of the last driver belongs to
/// another virtual machine.
#[test]
fn migrated_driver_is_served_by_an_export_whose_disk_was_replaced() -> Result<()> {
    let size = QueueOptions::default().size;
    for packed in [false, true] {
        let rig = two_disks()?;
        let socket = rig.socket("d");
        let options = Options {
            packed,
            ..Options::default()
        };
        give_disk(&rig, "d")?;
        let mut machine = Machine::start(&socket, 0, packed)?;
        machine.write(1)?;
        give_disk(&rig, "e")?;
        machine.front_end.channel().wait_closed(SOON)?;

        leave_write(&mut machine.queue, 2)?;
        let mut destination = FrontEnd::connect(&socket, &options)?;
        std::mem::swap(destination.memory_mut(), machine.front_end.memory_mut());
        destination.send_memory()?;
        let region = destination.new_inflight(2, size)?;
        destination.give_inflight(&region)?;
        destination.begin_queue(machine.queue.queue(), base_after(1, packed))?;
        let done = machine.queue.wait()?;
        ensure!(done.status == status::OK, "packed {packed}: {done:?}");
        ensure!(first_block(&rig, "e.raw")? == [2; BLOCK]);
        ensure!(first_block(&rig, "d.raw")? == [1; BLOCK]);
    }
    Ok(())
}
