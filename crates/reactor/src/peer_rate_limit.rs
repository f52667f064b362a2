//! Limits log lines about events that many peers can cause: a noisy peer does not suppress the lines about others.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::RateLimit;

/// Maximum number of remembered peers.
const PEERS_MAX: usize = 64;

/// Selects the events to log: a limit for each IP address, one for all Unix sockets, and one for all peers together.
#[derive(Debug)]
pub struct PeerRateLimit {
    interval: Duration,
    burst: u32,
    all: RateLimit,
    /// The least recent first.
    peers: Mutex<Vec<Peer>>,
}

#[derive(Debug)]
struct Peer {
    address: Option<IpAddr>,
    limit: RateLimit,
    /// Suppressed events that no line has counted.
    suppressed: u64,
}

impl PeerRateLimit {
    /// Allows one event of a peer per `interval`; unused ones accumulate up to `burst`. `all`: limit of all peers together.
    pub const fn new(interval: Duration, burst: u32, all: RateLimit) -> PeerRateLimit {
        PeerRateLimit {
            interval,
            burst,
            all,
            peers: Mutex::new(Vec::new()),
        }
    }

    /// Counts an event. Returns `Some(n)` if it is to be logged, where `n` is the number of suppressed events of this peer before it. `peer`
    /// is an IP address, with or without a port. All other peers count as one.
    pub fn pass(&self, peer: &str) -> Option<u64> {
        let address = peer.parse::<SocketAddr>().map(|address| address.ip());
        let address = address.or_else(|_| peer.parse()).ok();
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let known = peers.iter().position(|one| one.address == address);
        let mut peer = match known {
            Some(index) => peers.remove(index),
            None => Peer {
                address,
                limit: RateLimit::with_burst(self.interval, self.burst),
                suppressed: 0,
            },
        };
        if peers.len() >= PEERS_MAX {
            peers.remove(0);
        }
        let passed = peer.limit.pass().is_some() && self.all.pass().is_some();
        let suppressed = match passed {
            true => Some(std::mem::take(&mut peer.suppressed)),
            false => {
                peer.suppressed += 1;
                None
            }
        };
        peers.push(peer);
        suppressed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_noisy_peer_suppresses_its_own_lines_only() {
        let limit = PeerRateLimit::new(HOUR, 2, RateLimit::with_burst(HOUR, 5));
        let noisy: Vec<_> = (0..100u16)
            .map(|port| limit.pass(&format!("192.0.2.1:{port}")))
            .collect();
        assert_eq!(noisy.iter().flatten().count(), 2);
        assert_eq!(limit.pass("[2001:db8::1]:9"), Some(0));
        assert_eq!(limit.pass("unix:pid=1"), Some(0));
        assert_eq!(limit.pass("unix:pid=2"), Some(0));
        assert_eq!(limit.pass("192.0.2.7"), None, "all together");
        assert_eq!(limit.peers.lock().unwrap()[0].suppressed, 98);
    }

    #[test]
    fn memory_is_bounded() {
        let limit = PeerRateLimit::new(HOUR, 1, RateLimit::with_burst(HOUR, 1000));
        for last in 0..200 {
            assert_eq!(limit.pass(&format!("192.0.2.{last}")), Some(0));
        }
        assert_eq!(limit.peers.lock().unwrap().len(), PEERS_MAX);
    }
}
