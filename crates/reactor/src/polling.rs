//! How long a worker that ran out of work looks for more before it sleeps.
//!
//! The window tunes itself: work that polling met late in it, or would have met within the limit, doubles it; a sleep that was
//! longer than the limit halves it, and closes it in the end. So a busy client pays neither kicks nor wake-ups, though it may
//! be late now and then, and an idle one costs nothing.

use latency::{Clock, Stamp};

/// The bound on polling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollLimit {
    /// Sleep as soon as there is nothing to do.
    Never,
    /// Poll for at most so many microseconds, fewer when that does not pay.
    Micros(u32),
    /// Never sleep: one CPU per worker, always.
    Always,
}

impl PollLimit {
    /// The bound in ticks, where there is one.
    fn ticks(self, clock: &Clock) -> u64 {
        match self {
            PollLimit::Micros(us) => clock.ticks(std::time::Duration::from_micros(u64::from(us))),
            PollLimit::Never | PollLimit::Always => 0,
        }
    }
}

/// The bounds of a worker, by who may bring work next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollLimits {
    /// While it serves rings in a guest's memory: seeing work there spares the guest's kick, and two wake-ups.
    pub rings: PollLimit,
    /// While all its clients are connections, whose work the kernel brings anyway: polling spares a wake-up only, and
    /// a network's round trip is long beside that.
    pub network: PollLimit,
    /// While a disk owes it an answer and there is nothing else to do.
    pub disk: PollLimit,
}

impl From<PollLimit> for PollLimits {
    /// The same for all.
    fn from(limit: PollLimit) -> PollLimits {
        PollLimits {
            rings: limit,
            network: limit,
            disk: limit,
        }
    }
}

/// First window after polling was off, in nanoseconds: about what a wake-up costs.
const FIRST_NS: u64 = 4_000;

/// So long requests are looked for before a worker sleeps for a disk, in nanoseconds: a client that was answered, or is
/// sending several requests, sends the next within less.
const LOOK_NS: u64 = 2_000;

/// What sleeping costs, in nanoseconds. With several I/Os under way it makes none of them later than the others make it, so
/// that polling for longer gains nothing.
const SLEEP_NS: u64 = 5_000;

/// How long to look for work, in ticks.
struct Window {
    first: u64,
    max: u64,
    now: u64,
}

impl Window {
    fn new(limit: PollLimit, clock: &Clock) -> Window {
        let max = limit.ticks(clock);
        let first = clock.ticks(std::time::Duration::from_nanos(FIRST_NS));
        Window {
            first: first.min(max),
            max,
            now: max,
        }
    }

    /// The worker was idle for so long.
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
    /// Are rings served, as far as is known since [`Polling::serves`]?
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
            disk_max: disk.ticks(clock),
            rings: Window::new(rings, clock),
            network: Window::new(network, clock),
            serves_rings: false,
            idle_since: None,
            slept_at: None,
        }
    }

    /// Whose bound counts from now on.
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

    /// There was work in this iteration.
    #[inline]
    pub(crate) fn worked(&mut self, noticed: Stamp) {
        if let Some(since) = self.idle_since.take() {
            self.learn(noticed.since(since));
        }
    }

    /// After work, is there polling at all?
    pub(crate) fn is_on(&self) -> bool {
        self.always || self.window().now > 0
    }

    /// There was none, but disks owe `pending` answers, of which the next is expected to take so long in all: poll or sleep, after
    /// so long? A wait within the bound is polled through; before a longer one requests are looked for for a moment. The
    /// window is for clients, and neither counts nor learns here.
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

    /// There was none: go on polling, or sleep?
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

    /// The worker goes to sleep.
    pub(crate) fn sleeping(&mut self, now: Stamp) {
        self.slept_at = Some(self.idle_since.take().unwrap_or(now));
    }

    /// Is the worker about to wake from a sleep?
    pub(crate) fn slept(&self) -> bool {
        self.slept_at.is_some()
    }

    /// The worker woke up: was the idle time one that polling would have covered?
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
    fn never_and_always_mean_it() {
        assert_eq!(polling(PollLimit::Never).idle(Stamp(0)), Idle::Sleep);
        let mut always = polling(PollLimit::Always);
        assert_eq!(always.idle(Stamp(0)), Idle::Poll);
        assert_eq!(always.idle(Stamp(u64::MAX)), Idle::Poll);
        assert_eq!(always.waits_for_disk(1, u64::MAX, u64::MAX), Idle::Poll);
        let never = polling(PollLimit::Never);
        assert_eq!(never.waits_for_disk(1, 0, 0), Idle::Sleep);
    }

    #[test]
    fn one_io_is_polled_for_to_the_bound_several_for_a_sleep() {
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
        assert!(waits(&p, 1, 20_000, 19_999), "whatever the clients do");
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
