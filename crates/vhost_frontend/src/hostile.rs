//! Front ends that break the rules, one case each: what a daemon has to survive.
//!
//! A case connects to a socket, does one wrong thing, and sees its session closed, or, where the thing is not
//! forbidden but mean, leaves. Whoever runs it looks after everybody else: see `tests/` of the crate `vhost_user`.

mod descriptors;
mod messages;
mod setup;

use std::path::Path;
use std::time::Duration;

use crate::{Error, FrontEnd, Options, Queue, QueueOptions, Result, request};

/// One way to break the rules.
#[derive(Clone, Copy)]
pub struct Case {
    /// What it does.
    pub name: &'static str,
    /// It waits for a time-out of the back end.
    pub slow: bool,
    run: fn(&Path) -> Result<()>,
}

impl Case {
    /// Does it to the back end at `socket`, a virtio-blk device with one queue or more.
    ///
    /// # Errors
    /// When the session was not closed as it should be.
    pub fn run(&self, socket: &Path) -> Result<()> {
        // A case that truncates a file truncates its own mapping too.
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

/// All cases.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    let all = [messages::CASES, setup::CASES, descriptors::CASES];
    all.into_iter().flatten()
}

/// A session is closed within this, unless the back end waits for the rest of a message: 3 s.
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

/// The session has to be closed, whatever was answered before.
fn ends(front_end: &FrontEnd) -> Result<()> {
    front_end.channel().wait_closed(LIMIT)
}

/// The request has to be refused: the session goes on, as the front end was told, or is closed.
fn refused(front_end: &FrontEnd, result: Result<()>) -> Result<()> {
    match result {
        Ok(()) => Err(Error::Wrong("it was accepted".into())),
        other => borne(front_end, other),
    }
}

/// The request may be refused or not; only a session that is over may be silent.
fn borne(front_end: &FrontEnd, result: Result<()>) -> Result<()> {
    match result {
        Ok(()) | Err(Error::Refused(_)) => {
            let asked = front_end.channel().call(request::GET_FEATURES, &[], &[]);
            asked.map(drop)
        }
        Err(Error::Closed) => ends(front_end),
        Err(other) => Err(other),
    }
}
