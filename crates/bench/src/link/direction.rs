//! What one direction of a line does with packets: pure, on a time that is given.

use std::collections::VecDeque;
use std::time::Duration;

use crate::workload::Random;

/// What a line does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkOptions {
    /// How long a packet is under way, in one direction.
    pub delay: Duration,
    /// Bits per second; 0: as many as come.
    pub rate: u64,
    /// The part of packets that are lost.
    pub loss: f64,
}

/// A line that nothing limits has room for so much all the same.
const BUFFER_LEAST: Duration = Duration::from_millis(10);

/// Packets that are under way.
pub struct Direction<P> {
    options: LinkOptions,
    random: Random,
    /// With the time at which each arrives, in this order.
    under_way: VecDeque<(Duration, P)>,
    /// When the line has sent what it has.
    free_at: Duration,
    /// Packets that were lost, on purpose or because the buffer was full.
    pub lost: u64,
}

impl<P> Direction<P> {
    /// An empty one.
    pub fn new(options: LinkOptions, seed: u64) -> Direction<P> {
        Direction {
            options,
            random: Random::new(seed),
            under_way: VecDeque::new(),
            free_at: Duration::ZERO,
            lost: 0,
        }
    }

    /// Takes a packet of `bytes`, and gives it back if it is lost.
    pub fn send(&mut self, now: Duration, bytes: usize, packet: P) -> Option<P> {
        let buffer = (2 * self.options.delay).max(BUFFER_LEAST);
        let begins = self.free_at.max(now);
        if begins - now > buffer || self.random.unit() < self.options.loss {
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

    /// The next packet that has arrived.
    pub fn receive(&mut self, now: Duration) -> Option<P> {
        let (at, _) = self.under_way.front()?;
        if *at > now {
            return None;
        }
        self.under_way.pop_front().map(|(_, packet)| packet)
    }

    /// When the next one arrives.
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
        // 9000 bytes at 72 Mbit/s take a millisecond.
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
        // One round trip of 10 ms is in line, and one that has begun.
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
