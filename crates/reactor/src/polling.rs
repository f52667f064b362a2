//! Decides how long an idle worker polls before it sleeps.
//!
//! The window adapts: it doubles after work that arrived late in the window, or during a sleep shorter than the limit. It
//! halves, and finally closes, after a longer sleep. A busy client avoids kicks and wake-ups, with an occasional delay, and
//! an idle one costs nothing.

pub use block::PollLimit;
use latency::{Clock, Stamp};

/// Returns a limit in ticks; 0 if it is not a time.
fn limit_ticks(limit: PollLimit, clock: &Clock) -> u64 {
    match limit {
        PollLimit::Micros(us) => clock.ticks(std::time::Duration::from_micros(u64::from(us))),
        PollLimit::Never | PollLimit::Always => 0,
    }
}

/// Limits of a worker, by the next expected source of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollLimits {
    /// Limit while the worker serves rings in guest memory. Polling avoids the guest's kick and two wake-ups.
    pub rings: PollLimit,
    /// Limit while all clients are connections. Their data arrives through the kernel, so polling avoids only a wake-up, which is short
    /// compared with a network round trip.
    pub network: PollLimit,
    /// Limit while only disk I/O is outstanding.
    pub disk: PollLimit,
}

impl From<PollLimit> for PollLimits {
    /// Uses the same limit for all.
    fn from(limit: PollLimit) -> PollLimits {
        PollLimits {
            rings: limit,
            network: limit,
            disk: limit,
        }
    }
}

/// First window after polling was off, in nanoseconds: about the cost of a wake-up.
const FIRST_NS: u64 = 4_000;

/// Polling time before the worker sleeps for a disk, in nanoseconds. A client that received a response, or is sending
/// several requests, sends the next one within this time.
const LOOK_NS: u64 = 2_000;

/// Cost of a sleep, in nanoseconds. With several I/Os in flight the sleep delays none of them beyond the others, so longer
/// polling gains nothing.
const SLEEP_NS: u64 = 5_000;

/// The polling window, in ticks.
struct Window {
    first: u64,
    max: u64,
    now: u64,
}

impl Window {
    fn new(limit: PollLimit, clock: &Clock) -> Window {
        let max = limit_ticks(limit, clock);
        let first = clock.ticks(std::time::Duration::from_nanos(FIRST_NS));
        Window {
            first: first.min(max),
            max,
            now: max,
        }
    }

    fn learn(&mut self, idle: u64) {
        self.now = if idle > self.max {
            match self.now / 2 {
                short if short < self.first => 0,
                half => half,
            }
        } else if idle > self.now / 2 {
            (self.now * 2).clamp(self.first, self.max)
        } else {
            self.now
        };
    }
}

pub(crate) struct Polling {
    always: bool,
    look: u64,
    sleep: u64,
    disk_max: u64,
    rings: Window,
    network: Window,
    /// The worker serves rings, as set by [`Polling::serves`].
    serves_rings: bool,
    idle_since: Option<Stamp>,
    slept_at: Option<Stamp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Idle {
    Poll,
    Sleep,
}

impl Polling {
    pub(crate) fn new(limits: PollLimits, clock: &Clock) -> Polling {
        let PollLimits {
            rings,
            network,
            disk,
        } = limits;
        let ticks = |ns: u64| clock.ticks(std::time::Duration::from_nanos(ns));
        Polling {
            always: [rings, network, disk].contains(&PollLimit::Always),
            look: ticks(LOOK_NS),
            sleep: ticks(SLEEP_NS),
            disk_max: limit_ticks(disk, clock),
            rings: Window::new(rings, clock),
            network: Window::new(network, clock),
            serves_rings: false,
            idle_since: None,
            slept_at: None,
        }
    }

    /// Selects the limit for rings or for connections.
    #[inline]
    pub(crate) fn serves(&mut self, rings: bool) {
        self.serves_rings = rings;
    }

    #[inline]
    fn window(&self) -> &Window {
        if self.serves_rings {
            &self.rings
        } else {
            &self.network
        }
    }

    #[inline]
    fn learn(&mut self, idle: u64) {
        if self.serves_rings {
            self.rings.learn(idle);
        } else {
            self.network.learn(idle);
        }
    }

    #[inline]
    pub(crate) fn worked(&mut self, noticed: Stamp) {
        if let Some(since) = self.idle_since.take() {
            self.learn(noticed.since(since));
        }
    }

    /// Returns true if the worker polls after work.
    pub(crate) fn is_on(&self) -> bool {
        self.always || self.window().now > 0
    }

    /// Chooses between polling and sleeping when disks owe `pending` completions. The next one is expected to take
    /// `expected` in total; `waited` of that has passed. A wait within the limit is polled; before a longer one the worker
    /// polls briefly for requests. The client window is neither used as the limit nor adapted.
    #[inline]
    pub(crate) fn waits_for_disk(&self, pending: usize, expected: u64, waited: u64) -> Idle {
        let max = match pending {
            1 => self.disk_max,
            _ => self.disk_max.min(self.sleep),
        };
        let bound = if expected > max {
            self.look.min(self.window().max)
        } else {
            max
        };
        if self.always || waited < bound {
            Idle::Poll
        } else {
            Idle::Sleep
        }
    }

    /// Chooses between polling and sleeping after an iteration without work.
    pub(crate) fn idle(&mut self, now: Stamp) -> Idle {
        if self.always {
            return Idle::Poll;
        }
        let window = self.window().now;
        if window == 0 {
            return Idle::Sleep;
        }
        let since = *self.idle_since.get_or_insert(now);
        if now.since(since) < window {
            Idle::Poll
        } else {
            Idle::Sleep
        }
    }

    pub(crate) fn sleeping(&mut self, now: Stamp) {
        self.slept_at = Some(self.idle_since.take().unwrap_or(now));
    }

    /// Returns true if the worker is waking from a sleep.
    pub(crate) fn slept(&self) -> bool {
        self.slept_at.is_some()
    }

    /// Records a wake-up and adapts the window to the idle time.
    pub(crate) fn woke(&mut self, now: Stamp) {
        let Some(slept_at) = self.slept_at.take() else {
            return;
        };
        self.learn(now.since(slept_at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn polling(limit: PollLimit) -> Polling {
        let (clock, _) = Clock::simulated();
        Polling::new(limit.into(), &clock)
    }

    fn sleep(p: &mut Polling, at: u64, woke: u64) {
        p.sleeping(Stamp(at));
        p.woke(Stamp(woke));
    }

    fn close(p: &mut Polling) {
        for _ in 0..4 {
            sleep(p, 0, 1_000_000);
        }
    }

    #[test]
    fn short_sleeps_widen_the_polling_window_long_ones_close_it() {
        let mut p = polling(PollLimit::Micros(50));
        for want in [25_000, 12_500, 6_250, 0, 0] {
            sleep(&mut p, 0, 1_000_000);
            assert_eq!(p.network.now, want);
        }
        assert_eq!(p.idle(Stamp(0)), Idle::Sleep, "polling has ended");
        for want in [4_000, 8_000, 16_000, 32_000, 50_000] {
            sleep(&mut p, 0, 49_000);
            assert_eq!(p.network.now, want);
        }
        sleep(&mut p, 0, 40_000);
        assert_eq!(p.network.now, 50_000, "it is as wide as may be");
    }

    #[test]
    fn late_work_widens_the_polling_window_and_early_does_not() {
        let mut p = polling(PollLimit::Micros(50));
        sleep(&mut p, 0, 60_000);
        let mut find = |idle: u64| {
            assert_eq!(p.idle(Stamp(0)), Idle::Poll);
            p.worked(Stamp(idle));
            p.network.now
        };
        assert_eq!(find(12_500), 25_000);
        assert_eq!(find(12_501), 50_000);
        assert_eq!(find(1), 50_000);
    }

    #[test]
    fn worker_polls_within_the_window_and_then_sleeps() {
        let mut p = polling(PollLimit::Micros(50));
        assert_eq!(p.idle(Stamp(1_000)), Idle::Poll);
        assert_eq!(p.idle(Stamp(50_000)), Idle::Poll);
        assert_eq!(p.idle(Stamp(51_000)), Idle::Sleep);
        p.worked(Stamp(52_000));
        assert_eq!(
            p.idle(Stamp(60_000)),
            Idle::Poll,
            "work starts a new window"
        );
    }

    #[test]
    fn never_and_always_are_exact() {
        assert_eq!(polling(PollLimit::Never).idle(Stamp(0)), Idle::Sleep);
        let mut always = polling(PollLimit::Always);
        assert_eq!(always.idle(Stamp(0)), Idle::Poll);
        assert_eq!(always.idle(Stamp(u64::MAX)), Idle::Poll);
        assert_eq!(always.waits_for_disk(1, u64::MAX, u64::MAX), Idle::Poll);
        let never = polling(PollLimit::Never);
        assert_eq!(never.waits_for_disk(1, 0, 0), Idle::Sleep);
    }

    #[test]
    fn single_io_is_polled_longer_than_several() {
        let mut p = polling(PollLimit::Micros(50));
        let waits = |p: &Polling, pending, expected, ns| {
            p.waits_for_disk(pending, expected, ns) == Idle::Poll
        };
        assert!(waits(&p, 1, 0, 49_999), "it is not known as yet");
        assert!(waits(&p, 1, 50_000, 49_999));
        assert!(!waits(&p, 1, 50_000, 50_000));
        assert!(waits(&p, 1, 50_001, 1_999), "it looks for requests");
        assert!(!waits(&p, 1, 50_001, 2_000));
        assert!(waits(&p, 2, 5_000, 4_999));
        assert!(!waits(&p, 2, 5_000, 5_000));
        assert!(!waits(&p, 2, 5_001, 2_000));
        close(&mut p);
        assert!(waits(&p, 1, 20_000, 19_999), "for all kinds of clients");
        let (clock, _) = Clock::simulated();
        let quiet = PollLimits {
            disk: PollLimit::Never,
            ..PollLimit::Micros(50).into()
        };
        let p = Polling::new(quiet, &clock);
        assert!(waits(&p, 1, 1, 1_999) && !waits(&p, 1, 1, 2_000));
    }

    #[test]
    fn rings_are_polled_and_connections_slept_for_independently() {
        let (clock, _) = Clock::simulated();
        let limits = PollLimits {
            rings: PollLimit::Micros(50),
            network: PollLimit::Never,
            disk: PollLimit::Never,
        };
        let mut p = Polling::new(limits, &clock);
        assert!(!p.is_on());
        assert_eq!(p.idle(Stamp(0)), Idle::Sleep);
        sleep(&mut p, 0, 10_000);
        assert!(
            !p.is_on(),
            "a short sleep changes nothing where none is allowed"
        );
        p.serves(true);
        assert!(p.is_on());
        assert_eq!(p.idle(Stamp(1_000)), Idle::Poll);
        assert_eq!(p.idle(Stamp(50_999)), Idle::Poll);
        assert_eq!(p.idle(Stamp(51_000)), Idle::Sleep);
        close(&mut p);
        assert!(!p.is_on(), "the rings were silent for long");
        let always = PollLimits {
            rings: PollLimit::Never,
            network: PollLimit::Always,
            disk: PollLimit::Never,
        };
        assert_eq!(Polling::new(always, &clock).idle(Stamp(0)), Idle::Poll);
    }
}
