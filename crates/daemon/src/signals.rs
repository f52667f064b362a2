//! Signals that the daemon handles.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::iterator;

use crate::handover::Ending;

/// Meaning of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM or SIGINT: end quickly and cleanly.
    End,
    /// SIGHUP: reload the configuration file.
    Reload,
    /// SIGUSR1: print the latency tables.
    Print,
}

/// Receiver of signals. Must be created first, so that no signal is lost.
#[derive(Debug)]
pub struct Signals {
    signals: iterator::Signals,
    /// Received signals. Several may arrive at once.
    came: VecDeque<Signal>,
}

impl Signals {
    /// Starts to listen. The default actions of the signals no longer apply.
    pub fn listen() -> io::Result<Signals> {
        // With a handler, a write beyond the file size limit fails with EFBIG.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(Signals {
            signals: iterator::Signals::new([SIGTERM, SIGINT, SIGUSR1, SIGHUP])?,
            came: VecDeque::new(),
        })
    }

    /// Returns a handle that ends the daemon from another thread.
    pub fn ending(&self) -> Ending {
        Ending::new(self.signals.handle())
    }

    /// Blocks until the next signal.
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

    /// Returns a signal that has arrived already.
    pub fn poll(&mut self) -> Option<Signal> {
        if self.signals.is_closed() {
            return Some(Signal::End);
        }
        self.came.extend(self.signals.pending().filter_map(meaning));
        self.next()
    }

    /// Returns the next received signal. The end signal precedes all others.
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
    fn concurrent_signals_are_all_delivered() {
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
