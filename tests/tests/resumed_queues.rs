//! Front ends that reconnect by themselves, to a virtio-blk export that has another disk meanwhile.
#![forbid(unsafe_code)]

use control::{Client, Method};
use end_to_end::{Result, Rig, ensure};
use serde_json::json;
use std::net::Shutdown;
use std::path::Path;
use std::time::Duration;
use vhost_frontend::{BlkQueue, Cuts, FrontEnd, Options, QueueOptions, status};

const MIB: usize = 1 << 20;
const SOON: Duration = Duration::from_secs(30);
const BLOCK: usize = 4096;

/// What a virtual machine has: memory, and a driver with its queue in it.
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
        let mut front_end = FrontEnd::connect(socket, &options)?;
        let queue = QueueOptions::default();
        let queue = BlkQueue::start(&mut front_end, index, &queue, 4, BLOCK, Cuts::Usual)?;
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

    /// Puts a write of block 0 into the queue, which nobody serves.
    fn leave_write(&mut self, byte: u8) -> Result<()> {
        let Some(slot) = self.queue.take() else {
            end_to_end::bail!("all requests are in flight");
        };
        self.queue.data(slot).write(0, &[byte; BLOCK]);
        ensure!(self.queue.submit(slot, 1, 0, BLOCK, 0));
        self.queue.publish();
        Ok(())
    }

    /// Connects again with the same memory, as a VMM does whose guest goes on. `others`: queues that the driver has not used yet.
    fn reconnect(&mut self, socket: &Path, base: u32, others: &[u16]) -> Result<()> {
        // It fails where the session has ended already.
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

/// Where the queue stands after so many requests of three descriptors, and less than a round.
fn base_after(requests: u32, packed: bool) -> u32 {
    const PACKED_START: u32 = 0x8000_8000;
    match packed {
        true => PACKED_START + requests * 3 * 0x1_0001,
        false => requests,
    }
}

#[test]
fn queue_that_resumes_on_another_disk_is_refused_until_its_driver_starts_anew() -> Result<()> {
    for packed in [false, true] {
        let mut rig = two_disks()?;
        let socket = rig.socket("d");
        give_disk(&rig, "d")?;
        let mut old = Machine::start(&socket, 1, packed)?;
        old.write(1)?;
        give_disk(&rig, "e")?;
        old.front_end.channel().wait_closed(SOON)?;

        // Where it stood; where a ring stands that has come round; beside a queue that was never used.
        old.leave_write(2)?;
        let (stood, start) = (base_after(1, packed), base_after(0, packed));
        for (base, others) in [(stood, &[][..]), (start, &[]), (stood, &[0]), (stood, &[])] {
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
        let log = rig.daemon.process().log();
        ensure!(
            log.contains("another disk since its driver started; hint: "),
            "{log}"
        );

        // The guest was reset: its driver knows the disk now, also after a restart of the daemon.
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

        // The old disk again: to this driver it is another one.
        give_disk(&rig, "d")?;
        new.front_end.channel().wait_closed(SOON)?;
        new.leave_write(5)?;
        let served = new.reconnect(&socket, base_after(2, packed), &[]);
        ensure!(served.is_err(), "packed {packed}");
        ensure!(first_block(&rig, "d.raw")? == [1; BLOCK]);
    }
    Ok(())
}
