//! The signals that a daemon listens to.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::iterator;

use crate::handover::Ending;

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
    /// Several may come at once.
    came: VecDeque<Signal>,
}

impl Signals {
    /// Listens from now on; the signals' own actions no longer happen.
    pub fn listen() -> io::Result<Signals> {
        // A file that may not be that large is an error of whoever writes to it (EFBIG), not the end of the process.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(Signals {
            signals: iterator::Signals::new([SIGTERM, SIGINT, SIGUSR1, SIGHUP])?,
            came: VecDeque::new(),
        })
    }

    /// How another thread ends the daemon.
    pub fn ending(&self) -> Ending {
        Ending::new(self.signals.handle())
    }

    /// Sleeps until the next one.
    pub fn wait(&mut self) -> Signal {
        loop {
            if let Some(signal) = self.next() {
                return signal;
            }
            self.came.extend(self.signals.wait().filter_map(meaning));
            if self.signals.is_closed() {
                return Signal::End;
            }
        }
    }

    /// One that has come already.
    pub fn poll(&mut self) -> Option<Signal> {
        if self.signals.is_closed() {
            return Some(Signal::End);
        }
        self.came.extend(self.signals.pending().filter_map(meaning));
        self.next()
    }

    /// Of those that have come: who is to end does nothing else before.
    fn next(&mut self) -> Option<Signal> {
        match self.came.contains(&Signal::End) {
            true => Some(Signal::End),
            false => self.came.pop_front(),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn none_of_several_that_come_at_once_is_lost() {
        let mut signals = Signals::listen().unwrap();
        signal_hook::low_level::raise(SIGXFSZ).unwrap();
        for number in [SIGUSR1, SIGHUP] {
            signal_hook::low_level::raise(number).unwrap();
        }
        let first = signals.wait();
        let mut both = [first, signals.poll().unwrap()];
        both.sort_by_key(|signal| *signal == Signal::Reload);
        assert_eq!(both, [Signal::Print, Signal::Reload]);
        assert_eq!(signals.poll(), None);
        for number in [SIGUSR1, SIGTERM, SIGHUP] {
            signal_hook::low_level::raise(number).unwrap();
        }
        assert_eq!(signals.wait(), Signal::End);
        assert_eq!(signals.poll(), Some(Signal::End), "and nothing else");
    }
}
