//! Violations during setup: shared memory, rings and their descriptors.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use guest_memory::{Mapping, RegionSpec};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};

use vhost_frontend::{BlkQueue, Error, FrontEnd, Layout, Queue, QueueOptions, kind, request};

use super::{accept_refusal, connect, ended_or_served, ends, refused, started, state};
use crate::{Target, Test, Verdict};

const fn case(title: &'static str, run: fn(&Target) -> Verdict) -> Test {
    super::case(title, "vhost-user: memory regions and rings", run)
}

pub const CASES: &[Test] = &[
    case("a ring in unmapped memory", |target| {
        bad_addresses(target, |_, _| [0x1000, 0x2000, 0x3000])
    }),
    case("a used ring in unmapped memory", |target| {
        bad_addresses(target, |[d, _, a], _| [d, u64::MAX - 4096, a])
    }),
    case("a ring that ends beyond its region", |target| {
        bad_addresses(target, |[_, u, a], end| [end - 64, u, a])
    }),
    case("a ring that is not aligned", |target| {
        bad_addresses(target, |[d, u, a], _| [d + 1, u, a])
    }),
    case("a ring without addresses", |target| {
        let front_end = connect(target)?;
        let file = File::open("/dev/null")?;
        front_end.acknowledged(request::SET_VRING_NUM, &state(0, 128), &[])?;
        let set = front_end.set_kick(0, Some(file.as_fd()));
        refused(target, &front_end, set)
    }),
    case("a ring of 0 entries", |target| bad_size(target, 0)),
    case("a ring of 100 entries", |target| bad_size(target, 100)),
    case("a ring of 32768 entries", |target| bad_size(target, 32768)),
    case("a ring of 2^32 - 1 entries", |target| {
        bad_size(target, u32::MAX)
    }),
    case("a packed ring that begins beyond its end", |target| {
        let mut front_end = target.connect(&super::options(true))?;
        let queue = front_end.place_queue(0, &QueueOptions::default())?;
        let begun = front_end.begin_queue(&queue, 0x7fff_7fff);
        refused(target, &front_end, begun)
    }),
    case("a size for a queue that does not exist", |target| {
        bad_index(target, request::SET_VRING_NUM, &state(4096, 128))
    }),
    case("a base for a queue that does not exist", |target| {
        bad_index(target, request::SET_VRING_BASE, &state(4096, 0))
    }),
    case("addresses for a queue that does not exist", |target| {
        bad_index(target, request::SET_VRING_ADDR, &[0xff; 40])
    }),
    case("a queue that does not exist is enabled", |target| {
        bad_index(target, request::SET_VRING_ENABLE, &state(u16::MAX, 1))
    }),
    case("a kick for a queue that does not exist", |target| {
        bad_index(target, request::SET_VRING_KICK, &0x1ffu64.to_ne_bytes())
    }),
    case("an interrupt for a queue that does not exist", |target| {
        bad_index(target, request::SET_VRING_CALL, &0x1ffu64.to_ne_bytes())
    }),
    case(
        "an error descriptor for a queue that does not exist",
        |target| bad_index(target, request::SET_VRING_ERR, &0x1ffu64.to_ne_bytes()),
    ),
    case("a queue that does not exist is stopped", |target| {
        let front_end = connect(target)?;
        match front_end.stop_queue(4096) {
            Ok(_) => target.tolerated("it was answered"),
            Err(_) => ends(target, &front_end),
        }
    }),
    case("addresses change while the ring runs", |target| {
        let (front_end, _queue) = started(target, false)?;
        let set = front_end.set_addresses(0, [0x1000, 0x2000, 0x3000]);
        accept_refusal(target, &front_end, set)
    }),
    case("the base changes while the ring runs", |target| {
        let (front_end, _queue) = started(target, false)?;
        let set = front_end.acknowledged(request::SET_VRING_BASE, &state(0, 77), &[]);
        accept_refusal(target, &front_end, set)
    }),
    case("the ring's memory is removed while it runs", |target| {
        let (mut front_end, queue) = started(target, false)?;
        let region = front_end.memory().regions()[0].spec.guest_address;
        let removed = front_end.remove_region(region);
        drop(queue);
        refused(target, &front_end, removed)
    }),
    case("a memory region of 2^62 bytes", |target| {
        bad_region(target, |spec| spec.size = 1 << 62)
    }),
    case("a memory region of no bytes", |target| {
        bad_region(target, |spec| spec.size = 0)
    }),
    case("a memory region longer than its file", |target| {
        bad_region(target, |spec| spec.size *= 2)
    }),
    case("a memory region that begins beyond its file", |target| {
        bad_region(target, |spec| spec.file_offset = 1 << 40)
    }),
    case("a memory region with an overflowing offset", |target| {
        bad_region(target, |spec| spec.file_offset = u64::MAX - 4095)
    }),
    case("a memory region that wraps around", |target| {
        bad_region(target, |spec| spec.guest_address = u64::MAX - 4095)
    }),
    case(
        "a memory region with a user address that wraps around",
        |target| bad_region(target, |spec| spec.user_address = u64::MAX - 4095),
    ),
    case("a memory region that overlaps another", |target| {
        bad_region(target, |spec| spec.guest_address = 0x10_1000)
    }),
    case("a memory region of no file", |target| {
        let front_end = connect(target)?;
        let (stream, _other) = UnixStream::pair()?;
        let sent = front_end.acknowledged(request::ADD_MEM_REG, &region(&SPEC), &[stream.as_fd()]);
        refused(target, &front_end, sent)
    }),
    case("a memory region that is not there is removed", |target| {
        let front_end = connect(target)?;
        let sent = front_end.acknowledged(request::REM_MEM_REG, &region(&SPEC), &[]);
        refused(target, &front_end, sent)
    }),
    case("more memory regions than there may be", |target| {
        let mut front_end = connect(target)?;
        loop {
            if let Err(error) = front_end.add_region(4096) {
                return refused(target, &front_end, Err(error));
            }
        }
    }),
    case("the ring's memory file is truncated", |target| {
        truncated(target, |front_end, _| {
            front_end.memory().regions()[0].file.try_clone()
        })
    }),
    case("the data's memory file is truncated", |target| {
        truncated(target, |_, other| other.try_clone())
    }),
    case(
        "a memory file is truncated before the ring starts",
        |target| {
            let mut front_end = connect(target)?;
            let queue = front_end.place_queue(0, &QueueOptions::default())?;
            front_end.memory().regions()[0].file.set_len(0)?;
            match front_end.begin_queue(&queue, 0) {
                // The session ends when the ring is read.
                Ok(()) => ends(target, &front_end),
                other => accept_refusal(target, &front_end, other),
            }
        },
    ),
    case("a kick that is a file", |target| {
        let (mapping, file) = Mapping::memfd("no-eventfd", 4096)?;
        drop(mapping);
        served_with_kick(target, OwnedFd::from(file))
    }),
    case("a kick that is /dev/zero", |target| {
        served_with_kick(target, OwnedFd::from(File::open("/dev/zero")?))
    }),
    case("a kick that has hung up", |target| {
        let (reader, writer) = std::io::pipe()?;
        drop(writer);
        served_with_kick(target, OwnedFd::from(reader))
    }),
    case("a kick that hangs up later", |target| {
        let (reader, writer) = std::io::pipe()?;
        let (front_end, queue) = started(target, false)?;
        front_end.set_kick(0, Some(reader.as_fd()))?;
        drop((reader, writer));
        linger(&front_end, queue)
    }),
    case("an interrupt that is full and blocks", |target| {
        // Maximum of the counter: a further write blocks, because there is no reader.
        let full = eventfd(0, EventfdFlags::CLOEXEC)?;
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes())?;
        interrupted(target, full)
    }),
    case("an interrupt that is a pipe without a reader", |target| {
        let (reader, mut writer) = std::io::pipe()?;
        fcntl_setfl(&writer, OFlags::NONBLOCK)?;
        while writer.write(&[0; 4096]).is_ok() {}
        fcntl_setfl(&writer, OFlags::empty())?;
        interrupted(target, OwnedFd::from(writer))?;
        drop(reader);
        Ok(())
    }),
    case("an error descriptor that blocks", |target| {
        let full = eventfd(0, EventfdFlags::CLOEXEC)?;
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes())?;
        let (front_end, mut queue) = started(target, false)?;
        front_end.set_error(0, Some(full.as_fd()))?;
        queue.raw().set_available_index(5000);
        queue.kick();
        ends(target, &front_end)
    }),
];

/// A region that differs from those of all front ends here.
const SPEC: RegionSpec = RegionSpec {
    guest_address: 1 << 40,
    size: 4096,
    user_address: 1 << 41,
    file_offset: 0,
};

fn region(spec: &RegionSpec) -> Vec<u8> {
    let words = [
        0,
        spec.guest_address,
        spec.size,
        spec.user_address,
        spec.file_offset,
    ];
    words.map(u64::to_ne_bytes).concat()
}

fn bad_region(target: &Target, change: fn(&mut RegionSpec)) -> Verdict {
    let front_end = connect(target)?;
    let (_mapping, file) = Mapping::memfd("region", 8192)?;
    let mut spec = RegionSpec { size: 8192, ..SPEC };
    change(&mut spec);
    let sent = front_end.acknowledged(request::ADD_MEM_REG, &region(&spec), &[file.as_fd()]);
    refused(target, &front_end, sent)
}

/// Starts a ring with addresses computed from the valid ones and the end of the memory region.
fn bad_addresses(target: &Target, change: fn([u64; 3], u64) -> [u64; 3]) -> Verdict {
    let mut front_end = connect(target)?;
    let queue = front_end.place_queue(0, &QueueOptions::default())?;
    front_end.describe_queue(&queue, 0)?;
    let layout = *queue.layout();
    let right = [
        layout.descriptor_area,
        layout.device_area,
        layout.driver_area,
    ]
    .map(|address| front_end.user_address(address));
    let spec = front_end.memory().regions()[0].spec;
    let end = spec.user_address + spec.size;
    let started = front_end
        .set_addresses(0, change(right, end))
        .and_then(|()| front_end.set_kick(0, Some(queue.kick_fd().as_fd())));
    refused(target, &front_end, started)
}

fn bad_size(target: &Target, size: u32) -> Verdict {
    let mut front_end = connect(target)?;
    let queue = front_end.place_queue(0, &QueueOptions::default())?;
    front_end.describe_queue(&queue, 0)?;
    let started = front_end
        .acknowledged(request::SET_VRING_NUM, &state(0, size), &[])
        .and_then(|()| front_end.set_kick(0, Some(queue.kick_fd().as_fd())));
    refused(target, &front_end, started)
}

/// `payload` names queue 255 if the index has 8 bits, otherwise a queue index beyond any device.
fn bad_index(target: &Target, request: u32, payload: &[u8]) -> Verdict {
    let front_end = connect(target)?;
    let has_8_bits = [
        request::SET_VRING_KICK,
        request::SET_VRING_CALL,
        request::SET_VRING_ERR,
    ];
    if has_8_bits.contains(&request) && front_end.queue_count() > 255 {
        return Ok(());
    }
    let sent = front_end.acknowledged(request, payload, &[]);
    refused(target, &front_end, sent)
}

/// Writes from a second region and truncates one of the two regions.
fn truncated(target: &Target, file_of: fn(&FrontEnd, &File) -> std::io::Result<File>) -> Verdict {
    let (mut front_end, mut queue) = started(target, false)?;
    let data = front_end.add_region(1 << 20)?;
    let header = front_end.allocate(4096, 4096)?;
    header.write(0, &[1, 0, 0, 0]);
    let second = &front_end.memory().regions()[1].file;
    file_of(&front_end, second)?.set_len(0)?;
    let readable = [header.part(0, 16).element(), data.element()];
    // The mapping of a truncated ring is lost in this process too: its SIGBUS handler has mapped zeroes.
    queue.add(&readable, &[header.part(64, 1).element()], 0);
    queue.publish();
    queue.kick();
    ended_or_served(target, &front_end, &mut queue)
}

/// Starts a ring with an unusual kick descriptor. The back end may refuse it; otherwise its worker must tolerate it.
fn served_with_kick(target: &Target, kick: OwnedFd) -> Verdict {
    let mut front_end = connect(target)?;
    let queue = front_end.place_queue(0, &QueueOptions::default())?;
    front_end.describe_queue(&queue, 0)?;
    front_end.enable(0, true)?;
    match front_end.set_kick(0, Some(kick.as_fd())) {
        Ok(()) => linger(&front_end, queue),
        other => accept_refusal(target, &front_end, other),
    }
}

/// Waits briefly, so that a failure of the worker becomes visible.
fn linger(front_end: &FrontEnd, queue: Queue) -> Verdict {
    let closed = front_end
        .channel()
        .wait_closed(std::time::Duration::from_millis(300));
    drop(queue);
    match closed {
        Ok(()) | Err(Error::Timeout(_)) => Ok(()),
        Err(other) => Err(other.into()),
    }
}

/// Runs requests with an interrupt descriptor that blocks on write.
fn interrupted(target: &Target, call: OwnedFd) -> Verdict {
    let (mut front_end, queue) = started(target, false)?;
    match front_end.set_call(0, Some(call.as_fd())) {
        Ok(()) => flush_often(&mut front_end, queue),
        other => accept_refusal(target, &front_end, other),
    }
}

fn flush_often(front_end: &mut FrontEnd, queue: Queue) -> Verdict {
    let mut queue = BlkQueue::with_queue(front_end, queue, 8, 512, Layout::Separate)?;
    for _ in 0..8 {
        let Some(slot) = queue.take() else { break };
        queue.submit(slot, kind::FLUSH, 0, 0, 0);
        queue.queue().driver().enable_interrupts();
        queue.publish();
        queue.queue().kick();
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    Ok(())
}
