//! Detects two hosts with one initiator name and ISID: each login ends the session of the other host (RFC 7143, 6.3.5).

use std::net::IpAddr;

/// This many takeovers from another address within the time below are a contest.
const TAKEOVERS: u32 = 3;
const SECONDS: u64 = 60;

/// Takeovers of a session identity from other addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contest {
    /// Address of the initiator that has the session.
    pub address: IpAddr,
    takeovers: u32,
    /// Second of the first counted takeover.
    since: u64,
}

impl Contest {
    /// Begins with the first session.
    pub fn new(address: IpAddr, now: u64) -> Contest {
        Contest {
            address: address.to_canonical(),
            takeovers: 0,
            since: now,
        }
    }

    /// Counts a login that takes the session over; true: warn.
    pub fn take_over(&mut self, address: IpAddr, now: u64) -> bool {
        let address = address.to_canonical();
        if address == self.address {
            return false;
        }
        self.address = address;
        if now.saturating_sub(self.since) > SECONDS {
            (self.takeovers, self.since) = (0, now);
        }
        self.takeovers += 1;
        if self.takeovers < TAKEOVERS {
            return false;
        }
        (self.takeovers, self.since) = (0, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_takeovers_from_another_address_are_a_contest() {
        let (one, other): (IpAddr, IpAddr) =
            ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        let mut contest = Contest::new(one, 0);
        // A host that logs in again, or that moves to another address once.
        for now in 0..100 {
            assert!(!contest.take_over("::ffff:192.0.2.1".parse().unwrap(), now));
        }
        assert!(!contest.take_over(other, 100));
        assert!(!contest.take_over(other, 101));
        // Two hosts that take the session from each other, slowly and then fast.
        assert!(!contest.take_over(one, 200) && !contest.take_over(other, 300));
        assert!(!contest.take_over(one, 310) && contest.take_over(other, 320));
        assert!(!contest.take_over(one, 321) && !contest.take_over(other, 322));
        assert!(contest.take_over(one, 323));
    }
}
