//! Flow control of a stream: accounts of the sender and of the receiver.

use crate::frame::Violation;

/// Maximum number of bytes in flight on one stream.
pub const WINDOW: u32 = 256 << 10;

/// Account of the sender: bytes that it may send.
#[derive(Debug)]
pub struct Budget(u32);

impl Default for Budget {
    fn default() -> Self {
        Budget(WINDOW)
    }
}

impl Budget {
    /// Returns the number of bytes that may be sent.
    pub fn left(&self) -> u32 {
        self.0
    }

    /// Counts sent bytes. More than [`Budget::left`] is a bug of the caller.
    pub fn spend(&mut self, count: u32) {
        assert!(count <= self.0, "{count} bytes sent, allowed {}", self.0);
        self.0 -= count;
    }

    /// Adds credit from the receiver.
    ///
    /// # Errors
    /// The credit exceeds the received bytes.
    pub fn grant(&mut self, count: u32) -> Result<(), Violation> {
        if count > WINDOW - self.0 {
            return Err(Violation(format!(
                "window update of {count} bytes exceeds the window: {} of {WINDOW} are open",
                self.0
            )));
        }
        self.0 += count;
        Ok(())
    }
}

/// Account of the receiver: bytes that the sender may send, and consumed bytes that are not credited yet.
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
    /// Counts received bytes.
    ///
    /// # Errors
    /// The bytes exceed the window.
    pub fn receive(&mut self, count: usize) -> Result<(), Violation> {
        let allowed = self.open;
        let count = u32::try_from(count).ok().filter(|count| *count <= allowed);
        let count = count.ok_or_else(|| {
            Violation(format!(
                "received more than the {allowed} bytes allowed on a stream"
            ))
        })?;
        self.open -= count;
        Ok(())
    }

    /// Counts consumed bytes. Returns the credit to send, at intervals, to limit the number of credit frames.
    pub fn consume(&mut self, count: u32) -> Option<u32> {
        self.used += count;
        if self.used < WINDOW / 4 {
            return None;
        }
        let given = std::mem::take(&mut self.used);
        self.give(given);
        Some(given)
    }

    /// Marks all received bytes as consumed. Returns the credit to send.
    pub fn refill(&mut self) -> Option<u32> {
        let given = WINDOW - self.open;
        (self.open, self.used) = (WINDOW, 0);
        (given > 0).then_some(given)
    }

    /// Raises the window by `count` bytes.
    pub fn give(&mut self, count: u32) {
        self.open = self.open.saturating_add(count).min(WINDOW);
    }
}
