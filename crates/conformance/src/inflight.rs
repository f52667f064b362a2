//! Requests in flight when a connection is lost.

use vhost_frontend::{Layout, Memory, Options, QueueOptions, protocol_feature};

use crate::io::{DEPTH, Io, LIMIT};
use crate::{Devices, Target, Test, Verdict, equal, needs};

const fn test(title: &'static str, clause: &'static str, run: fn(&Target) -> Verdict) -> Test {
    Test::new("inflight", Devices::Any, title, clause, run)
}

pub(crate) const TESTS: &[Test] = &[
    test(
        "requests complete after a reconnect with a region",
        "vhost-user: Inflight I/O tracking",
        |target| resumes(target, true),
    ),
    test(
        "requests complete after a reconnect without a region",
        "vhost-user: Communication",
        |target| resumes(target, false),
    ),
];

/// Loses the connection after the submission of requests. Each request completes once, before or after that.
fn resumes(target: &Target, with_region: bool) -> Verdict {
    let mut options = Options::default();
    options.protocol_features |= protocol_feature::INFLIGHT_SHMFD;
    let mut front_end = target.connect(&options)?;
    let is_offered = front_end.has_protocol(protocol_feature::INFLIGHT_SHMFD);
    needs(
        !with_region || is_offered,
        "VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD",
    )?;
    let queue = QueueOptions::default();
    let mut region = None;
    if with_region {
        region = Some(front_end.new_inflight(target.first_queue() + 1, queue.size)?);
    }
    if let Some(region) = &region {
        front_end.give_inflight(region)?;
    }
    let mut io = Io::start(target, &mut front_end, 0, &queue, Layout::Separate)?;
    for _ in 0..10 {
        for _ in 0..DEPTH {
            io.submit_ping()?;
        }
        let memory = std::mem::replace(front_end.memory_mut(), Memory::new(1 << 20, false)?);
        drop(front_end);
        front_end = target.connect(&options)?;
        *front_end.memory_mut() = memory;
        front_end.send_memory()?;
        if let Some(region) = &region {
            front_end.give_inflight(region)?;
        }
        let mut completed = 0;
        while io.reap()? {
            completed += 1;
        }
        let base = (io.chains() - u32::from(DEPTH - completed)) & 0xffff;
        front_end.begin_queue(io.queue(), base)?;
        io.queue().kick();
        while completed < DEPTH {
            io.queue().wait(LIMIT)?;
            completed += u16::from(io.reap()?);
        }
    }
    // A request that completed twice would be taken for this one.
    io.ping()?;
    equal("another completion", io.reap()?, false)
}
