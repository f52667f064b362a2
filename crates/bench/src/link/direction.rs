//! One direction of a simulated line: a pure model with an explicit clock.

use std::collections::VecDeque;
use std::time::Duration;

use fastrand::Rng;

/// Properties of a line.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkOptions {
    /// One-way delay of a packet.
    pub delay: Duration,
    /// Bits per second; 0: unlimited.
    pub rate: u64,
    /// Fraction of packets that are lost.
    pub loss: f64,
}

/// Minimum buffer of a line, as a time.
const BUFFER_LEAST: Duration = Duration::from_millis(10);

/// Packets in transit.
pub struct Direction<P> {
    options: LinkOptions,
    random: Rng,
    /// Packets with their arrival times, in order.
    under_way: VecDeque<(Duration, P)>,
    /// Time at which the line has sent all queued packets.
    free_at: Duration,
    /// Number of lost packets, by chance or because the buffer was full.
    pub lost: u64,
}

impl<P> Direction<P> {
    /// Creates an empty line.
    pub fn new(options: LinkOptions, seed: u64) -> Direction<P> {
        Direction {
            options,
            random: Rng::with_seed(seed),
            under_way: VecDeque::new(),
            free_at: Duration::ZERO,
            lost: 0,
        }
    }

    /// Accepts a packet of `bytes`. Returns it if it is lost.
    pub fn send(&mut self, now: Duration, bytes: usize, packet: P) -> Option<P> {
        let buffer = (2 * self.options.delay).max(BUFFER_LEAST);
        let begins = self.free_at.max(now);
        if begins - now > buffer || self.random.f64() < self.options.loss {
            self.lost += 1;
            return Some(packet);
        }
        let takes = match self.options.rate {
            0 => Duration::ZERO,
            rate => Duration::from_nanos((bytes as u64 * 8_000_000_000) / rate),
        };
        self.free_at = begins + takes;
        self.under_way
            .push_back((self.free_at + self.options.delay, packet));
        None
    }

    /// Returns the next packet that has arrived.
    pub fn receive(&mut self, now: Duration) -> Option<P> {
        let (at, _) = self.under_way.front()?;
        if *at > now {
            return None;
        }
        self.under_way.pop_front().map(|(_, packet)| packet)
    }

    /// Returns the arrival time of the next packet.
    pub fn next(&self) -> Option<Duration> {
        self.under_way.front().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn options(rate: u64, loss: f64) -> LinkOptions {
        LinkOptions {
            delay: 5 * MS,
            rate,
            loss,
        }
    }

    #[test]
    fn a_packet_arrives_after_its_sending_and_the_delay() {
        // 9000 bytes at 72 Mbit/s take one millisecond.
        let mut line = Direction::new(options(72_000_000, 0.0), 1);
        assert!(line.send(Duration::ZERO, 9000, 'a').is_none());
        assert!(line.send(Duration::ZERO, 9000, 'b').is_none());
        assert_eq!(line.next(), Some(6 * MS));
        assert_eq!(line.receive(5 * MS), None);
        assert_eq!(line.receive(6 * MS), Some('a'));
        assert_eq!(line.receive(6 * MS), None);
        assert_eq!(line.receive(7 * MS), Some('b'));
        assert_eq!(line.next(), None);
    }

    #[test]
    fn a_full_buffer_loses_what_comes() {
        let mut line = Direction::new(options(72_000_000, 0.0), 1);
        let lost = (0..20).filter(|at| line.send(Duration::ZERO, 9000, *at).is_some());
        // The buffer holds one round trip of 10 ms, plus one packet being sent.
        assert_eq!(lost.count(), 9);
        assert_eq!(line.lost, 9);
    }

    #[test]
    fn as_many_are_lost_as_are_to_be() {
        let mut line = Direction::new(options(0, 0.01), 7);
        for at in 0..100_000 {
            line.send(Duration::ZERO, 9000, at);
        }
        assert!((800..1200).contains(&line.lost), "{}", line.lost);
    }
}
