//! How much of a stream may be on its way: the sender's account and the receiver's.

use crate::frame::Violation;

/// Bytes that may be on their way on one stream.
pub const WINDOW: u32 = 256 << 10;

/// The sender's account: what may still be sent.
#[derive(Debug)]
pub struct Budget(u32);

impl Default for Budget {
    fn default() -> Self {
        Budget(WINDOW)
    }
}

impl Budget {
    /// Bytes that may be sent.
    pub fn left(&self) -> u32 {
        self.0
    }

    /// Counts bytes that are sent. More than are left is a mistake of ours.
    pub fn spend(&mut self, count: u32) {
        assert!(
            count <= self.0,
            "{count} bytes sent where {} are allowed",
            self.0
        );
        self.0 -= count;
    }

    /// The receiver gives more.
    ///
    /// # Errors
    /// When it gives what it has not received.
    pub fn grant(&mut self, count: u32) -> Result<(), Violation> {
        if count > WINDOW - self.0 {
            return Err(Violation(format!(
                "{count} bytes more may be sent where {} of {WINDOW} already may",
                self.0
            )));
        }
        self.0 += count;
        Ok(())
    }
}

/// The receiver's account: what the sender may send, and what has been used up and not yet given back.
#[derive(Debug)]
pub struct Allowance {
    open: u32,
    used: u32,
}

impl Default for Allowance {
    fn default() -> Self {
        Allowance {
            open: WINDOW,
            used: 0,
        }
    }
}

impl Allowance {
    /// Counts bytes that have come.
    ///
    /// # Errors
    /// When they are more than were allowed.
    pub fn receive(&mut self, count: usize) -> Result<(), Violation> {
        let allowed = self.open;
        let count = u32::try_from(count).ok().filter(|count| *count <= allowed);
        let count = count.ok_or_else(|| {
            Violation(format!(
                "more bytes on a stream than the {allowed} that may come"
            ))
        })?;
        self.open -= count;
        Ok(())
    }

    /// Counts bytes that have been used. Gives the credit to send, now and then, so that credit is no flood of its own.
    pub fn consume(&mut self, count: u32) -> Option<u32> {
        self.used += count;
        if self.used < WINDOW / 4 {
            return None;
        }
        let given = std::mem::take(&mut self.used);
        self.give(given);
        Some(given)
    }

    /// All that has come is used up: gives what to tell the sender.
    pub fn refill(&mut self) -> Option<u32> {
        let given = WINDOW - self.open;
        (self.open, self.used) = (WINDOW, 0);
        (given > 0).then_some(given)
    }

    /// Raises by a number of bytes what may come.
    pub fn give(&mut self, count: u32) {
        self.open = self.open.saturating_add(count).min(WINDOW);
    }
}
