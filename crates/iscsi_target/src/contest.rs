//! Detects two hosts with one initiator name and ISID: each login ends the session of the other host (RFC 7143, 6.3.5).

use std::net::IpAddr;

/// Number of takeovers from another address within [`SECONDS`] that make a contest.
const MOVES: u32 = 3;
/// Number of takeovers of sessions with connections within [`SECONDS`] that make a contest, also from one address: containers share the
/// address of their host. An initiator that has lost its connections may log in several times before the target notices the loss.
const DISPLACED: u32 = 8;
const SECONDS: u64 = 60;

/// Takeovers of a session identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contest {
    /// Address of the initiator that owns the session.
    pub address: IpAddr,
    moves: u32,
    displaced: u32,
    /// Second of the first counted takeover.
    since: u64,
}

impl Contest {
    /// Starts counting with the first session.
    pub fn new(address: IpAddr, now: u64) -> Contest {
        Contest {
            address: address.to_canonical(),
            moves: 0,
            displaced: 0,
            since: now,
        }
    }

    /// Counts a login that takes over the session. Returns true if a warning is due.
    pub fn take_over(&mut self, address: IpAddr, has_displaced: bool, now: u64) -> bool {
        let address = address.to_canonical();
        if now.saturating_sub(self.since) > SECONDS {
            *self = Contest::new(self.address, now);
        }
        self.moves += u32::from(address != self.address);
        self.displaced += u32::from(has_displaced);
        self.address = address;
        if self.moves < MOVES && self.displaced < DISPLACED {
            return false;
        }
        *self = Contest::new(address, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn repeated_takeovers_from_another_address_are_a_contest() {
        let (one, other) = (address("192.0.2.1"), address("192.0.2.2"));
        let mut contest = Contest::new(one, 0);
        let mut take_over = |from, now| contest.take_over(from, false, now);
        // A host that logs in again, or that moves to another address once.
        for now in 0..100 {
            assert!(!take_over(address("::ffff:192.0.2.1"), now));
        }
        assert!(!take_over(other, 150) && !take_over(other, 151));
        // Two hosts that take the session from each other, slowly and then fast.
        assert!(!take_over(one, 250) && !take_over(other, 350));
        assert!(!take_over(one, 360) && take_over(other, 370));
        assert!(!take_over(one, 371) && !take_over(other, 372));
        assert!(take_over(one, 373));
    }

    #[test]
    fn sessions_displaced_again_and_again_are_a_contest() {
        let host = address("192.0.2.1");
        let mut contest = Contest::new(host, 0);
        assert!((0..7).all(|now| !contest.take_over(host, true, now)));
        assert!(contest.take_over(host, true, 8));
        // The connection of an initiator breaks every ten seconds.
        assert!((0..100).all(|times| !contest.take_over(host, true, 10 + 10 * times)));
    }
}
