//! The signals that a daemon listens to.

use std::io;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator;

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM or SIGINT: end, quickly and cleanly.
    End,
    /// SIGHUP: read the configuration file anew.
    Reload,
    /// SIGUSR1: print the latency tables.
    Print,
}

/// The signals as they come. Made before anything is started, so that none is lost.
#[derive(Debug)]
pub struct Signals {
    signals: iterator::Signals,
}

impl Signals {
    /// Listens from now on; the signals' own actions no longer happen.
    pub fn listen() -> io::Result<Signals> {
        Ok(Signals {
            signals: iterator::Signals::new([SIGTERM, SIGINT, SIGUSR1, SIGHUP])?,
        })
    }

    /// Sleeps until the next one.
    pub fn wait(&mut self) -> Signal {
        loop {
            if let Some(signal) = self.signals.wait().find_map(meaning) {
                return signal;
            }
        }
    }

    /// One that has come already.
    pub fn poll(&mut self) -> Option<Signal> {
        self.signals.pending().find_map(meaning)
    }
}

fn meaning(number: i32) -> Option<Signal> {
    match number {
        SIGTERM | SIGINT => Some(Signal::End),
        SIGUSR1 => Some(Signal::Print),
        SIGHUP => Some(Signal::Reload),
        _ => None,
    }
}
