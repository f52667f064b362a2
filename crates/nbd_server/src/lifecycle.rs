//! Life of a connection in the transmission phase.

use std::sync::mpsc;

/// Stage of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Open,
    /// The client has requested the end: requests in flight are answered, then the connection ends.
    Leaving,
    /// Nothing more is received or sent. I/O in flight drains.
    Ended,
}

#[derive(Default)]
pub(crate) struct Lifecycle {
    stage: Stage,
    /// Dropped when the connection has drained, for the control plane that waits for it.
    drained: Vec<mpsc::Sender<()>>,
}

impl Lifecycle {
    /// Returns true if nothing more is received.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.stage != Stage::Open
    }

    #[inline]
    pub fn is_leaving(&self) -> bool {
        self.stage == Stage::Leaving
    }

    #[inline]
    pub fn is_ended(&self) -> bool {
        self.stage == Stage::Ended
    }

    /// Records that the client has requested the end.
    pub fn leave(&mut self) {
        if self.stage == Stage::Open {
            self.stage = Stage::Leaving;
        }
    }

    /// Ends the connection. Returns false if it has ended before.
    pub fn end(&mut self) -> bool {
        std::mem::replace(&mut self.stage, Stage::Ended) != Stage::Ended
    }

    /// Keeps `drained` until the connection has drained.
    pub fn notify_drained(&mut self, drained: mpsc::Sender<()>) {
        self.drained.push(drained);
    }

    /// No I/O is in flight any more.
    pub fn drained(&mut self) {
        self.drained.clear();
    }
}
