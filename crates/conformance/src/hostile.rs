//! Front ends that violate the protocol, one violation each.
//!
//! The standards do not define the response. With [`Target::is_strict`] a test expects the response of this project's server
//! (`docs/adr/0003-a-broken-queue-ends-its-session.md`): the session ends, the message is refused, or the chain is answered. Otherwise each
//! response is right, and the runner checks that the back end serves the next front end. `tests/` of the crate `vhost_user` checks that
//! other sessions are not affected.

mod descriptors;
mod messages;
mod setup;

use std::time::{Duration, Instant};

use vhost_frontend::{Channel, Error, FrontEnd, Options, Queue, QueueOptions, feature, request};

use crate::{Devices, Target, Test, Verdict, failed, needs};

const fn case(title: &'static str, clause: &'static str, run: fn(&Target) -> Verdict) -> Test {
    Test::new("hostile", Devices::Any, title, clause, run)
}

/// Returns all tests.
pub fn cases() -> impl Iterator<Item = &'static Test> {
    let all = [messages::CASES, setup::CASES, descriptors::CASES];
    all.into_iter().flatten()
}

/// Timeout for the end of a session. Lunette waits 3 s for the rest of a message.
const LIMIT: Duration = Duration::from_secs(25);
/// Time for the response to a violation if any response is right.
const MOMENT: Duration = Duration::from_millis(100);

impl Target {
    /// Time to wait for the response to a violation.
    fn patience(&self) -> Duration {
        if self.is_strict { LIMIT } else { MOMENT }
    }

    /// Fails in strict mode.
    fn tolerated(&self, reason: &str) -> Verdict {
        match self.is_strict {
            true => failed(reason),
            false => Ok(()),
        }
    }
}

fn options(packed: bool) -> Options {
    Options {
        packed,
        memory: 4 << 20,
        ..Options::default()
    }
}

fn connect(target: &Target) -> Verdict<FrontEnd> {
    Ok(target.connect(&options(false))?)
}

fn started(target: &Target, packed: bool) -> Verdict<(FrontEnd, Queue)> {
    let mut front_end = target.connect(&options(packed))?;
    let is_packed = front_end.has(feature::RING_PACKED);
    needs(!packed || is_packed, "VIRTIO_F_RING_PACKED")?;
    let queue = front_end.start_queue(0, &QueueOptions::default())?;
    Ok((front_end, queue))
}

/// Expects the session to be closed, regardless of earlier replies.
fn ends(target: &Target, front_end: &FrontEnd) -> Verdict {
    closed(target, front_end.channel())
}

fn closed(target: &Target, channel: &Channel) -> Verdict {
    match channel.wait_closed(target.patience()) {
        Err(Error::Timeout(_)) if !target.is_strict => Ok(()),
        other => Ok(other?),
    }
}

/// Expects the request to be refused, with the session either intact or closed.
fn refused(target: &Target, front_end: &FrontEnd, result: vhost_frontend::Result<()>) -> Verdict {
    match result {
        Ok(()) => target.tolerated("it was accepted"),
        other => accept_refusal(target, front_end, other),
    }
}

/// Accepts success or refusal of the request. A missing reply is valid only if the session is closed.
fn accept_refusal(
    target: &Target,
    front_end: &FrontEnd,
    result: vhost_frontend::Result<()>,
) -> Verdict {
    match result {
        _ if !target.is_strict => Ok(()),
        Ok(()) | Err(Error::Refused(_)) => {
            front_end.channel().call(request::GET_FEATURES, &[], &[])?;
            Ok(())
        }
        Err(Error::Closed) => ends(target, front_end),
        Err(other) => Err(other.into()),
    }
}

/// Accepts the end of the session and an answered chain: a queue that handles one request at a time may have answered the first one, and a
/// file system reports an error for lost memory.
fn ended_or_served(target: &Target, front_end: &FrontEnd, queue: &mut Queue) -> Verdict {
    let until = Instant::now() + target.patience();
    while !queue.driver().has_used() && !front_end.channel().is_closed() {
        if Instant::now() > until {
            return target.tolerated("the chain is not answered, and the session is open");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Returns the payload of a vring state description.
fn state(index: u16, num: u32) -> [u8; 8] {
    (u64::from(index) | u64::from(num) << 32).to_le_bytes()
}
