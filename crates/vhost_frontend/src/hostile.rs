//! Front ends that violate the protocol, one case each, for tests of a daemon's robustness.
//!
//! A case connects to a socket, commits one violation and expects its session to be closed. For hostile but permitted behaviour it just
//! disconnects. The caller checks that other sessions are not affected: see `tests/` of the crate `vhost_user`.

mod descriptors;
mod messages;
mod setup;

use std::path::Path;
use std::time::Duration;

use crate::{Error, FrontEnd, Options, Queue, QueueOptions, Result, request};

/// One violation.
#[derive(Clone, Copy)]
pub struct Case {
    /// Description.
    pub name: &'static str,
    /// The case waits for a timeout of the back end.
    pub slow: bool,
    run: fn(&Path) -> Result<()>,
}

impl Case {
    /// Runs the case with the back end at `socket`, a virtio-blk device with at least one queue.
    ///
    /// # Errors
    /// The session was not closed as expected.
    pub fn run(&self, socket: &Path) -> Result<()> {
        // A case that truncates a file also truncates its own mapping.
        guest_memory::sigbus::install()?;
        (self.run)(socket)
    }
}

const fn case(name: &'static str, run: fn(&Path) -> Result<()>) -> Case {
    Case {
        name,
        slow: false,
        run,
    }
}

/// Returns all cases.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    let all = [messages::CASES, setup::CASES, descriptors::CASES];
    all.into_iter().flatten()
}

/// Timeout for the end of a session. The back end waits 3 s for the rest of a message.
const LIMIT: Duration = Duration::from_secs(25);

fn options(packed: bool) -> Options {
    Options {
        packed,
        memory: 4 << 20,
        ..Options::default()
    }
}

fn connect(socket: &Path) -> Result<FrontEnd> {
    FrontEnd::connect(socket, &options(false))
}

fn started(socket: &Path, packed: bool) -> Result<(FrontEnd, Queue)> {
    let mut front_end = FrontEnd::connect(socket, &options(packed))?;
    let queue = front_end.start_queue(0, &QueueOptions::default())?;
    Ok((front_end, queue))
}

/// Expects the session to be closed, regardless of earlier replies.
fn ends(front_end: &FrontEnd) -> Result<()> {
    front_end.channel().wait_closed(LIMIT)
}

/// Expects the request to be refused, with the session either intact or closed.
fn refused(front_end: &FrontEnd, result: Result<()>) -> Result<()> {
    match result {
        Ok(()) => Err(Error::Wrong("it was accepted".into())),
        other => accept_refusal(front_end, other),
    }
}

/// Accepts success or refusal of the request. A missing reply is valid only if the session is closed.
fn accept_refusal(front_end: &FrontEnd, result: Result<()>) -> Result<()> {
    match result {
        Ok(()) | Err(Error::Refused(_)) => {
            let asked = front_end.channel().call(request::GET_FEATURES, &[], &[]);
            asked.map(drop)
        }
        Err(Error::Closed) => ends(front_end),
        Err(other) => Err(other),
    }
}

/// Returns the payload of a vring state description.
fn state(index: u16, num: u32) -> [u8; 8] {
    (u64::from(index) | u64::from(num) << 32).to_le_bytes()
}
