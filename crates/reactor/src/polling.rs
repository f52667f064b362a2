//! Decides how long an idle worker polls before it sleeps.
//!
//! ```text
//!              idle time ends                        run delay of the thread
//!                    │                                          │
//!                    ▼                                          ▼
//!   clients:  Window (rings), Window (network) ─┐        CpuDemand: permitted,
//!                                               ├─ min ─ or suspended: 0 ─▶ polling time
//!   disks:    DiskWaits: expected wait ─────────┘              │
//!                                                   Budget: time left for polling without a result
//! ```
//!
//! The window for clients grows while polling finds work and shrinks while it does not ([`Window`]). A disk is polled while
//! its expected wait is within the limit and clients send the next request soon ([`DiskWaits`]). All polling is limited by
//! [`Budget`] and suspended by [`CpuDemand`]. A busy client avoids kicks and wake-ups, and an idle one costs nothing.
//!
//! All parts are pure: time goes in, a decision comes out.

mod budget;
mod cpu_demand;
mod window;

use std::time::Duration;

pub use block::{PollLimit, PollLimits, PollMode};
use latency::{Clock, Stamp};
use uring::RunDelay;

use self::budget::Budget;
use self::cpu_demand::CpuDemand;
use self::window::Window;
use crate::disk_waits::DiskWaits;

/// Returns a limit in ticks; 0 if it is not a time.
fn limit_ticks(limit: PollLimit, clock: &Clock) -> u64 {
    match limit {
        PollLimit::Micros(us) => clock.ticks(Duration::from_micros(u64::from(us))),
        PollLimit::Never | PollLimit::Always => 0,
    }
}

/// First window after polling was off, in nanoseconds: about the cost of a wake-up.
const FIRST_NS: u64 = 4_000;

/// Polling time before the worker sleeps for a disk, in nanoseconds. A client that received a response, or is sending
/// several requests, sends the next one within this time.
const LOOK_NS: u64 = 2_000;

/// Cost of a sleep, in nanoseconds.
const SLEEP_NS: u64 = 5_000;

/// Number of I/Os in flight up to which a disk is polled for longer than a sleep costs. With more I/Os in flight, a sleep
/// delays none of them beyond the others.
const POLLED_IN_FLIGHT: usize = 16;

/// Largest time that a worker may poll without a result at once, in nanoseconds, if the limits are not larger.
const BUDGET_NS: u64 = 1_000_000;

/// Polling that has begun: its start, and its longest duration in ticks.
#[derive(Clone, Copy)]
struct Poll {
    since: Stamp,
    most: u64,
}

pub(crate) struct Polling {
    always: bool,
    /// Minimum budget for the start of a poll.
    enough: u64,
    look: u64,
    sleep: u64,
    disk_max: u64,
    rings: Window,
    network: Window,
    disk_waits: DiskWaits,
    budget: Budget,
    cpu_demand: CpuDemand,
    /// The worker serves rings, as set by [`Polling::serves`].
    serves_rings: bool,
    polls: Option<Poll>,
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
        let ticks = |ns: u64| clock.ticks(Duration::from_nanos(ns));
        let first = ticks(FIRST_NS);
        let [rings_max, network_max, disk_max] =
            [rings, network, disk].map(|limit| limit_ticks(limit, clock));
        let (budget, longest) = (ticks(BUDGET_NS), rings_max.max(network_max).max(disk_max));
        Polling {
            always: [rings, network, disk].contains(&PollLimit::Always),
            enough: longest.min(budget / 2),
            look: ticks(LOOK_NS),
            sleep: ticks(SLEEP_NS),
            disk_max,
            rings: Window::new(rings_max, first),
            network: Window::new(network_max, first),
            disk_waits: DiskWaits::new(clock),
            budget: Budget::new(budget.max(longest)),
            cpu_demand: CpuDemand::new(clock),
            serves_rings: false,
            polls: None,
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
        self.disk_waits.idled(idle);
        if self.serves_rings {
            self.rings.learn(idle);
        } else {
            self.network.learn(idle);
        }
    }

    /// Records an iteration with work that began at `noticed`.
    #[inline]
    pub(crate) fn worked(&mut self, noticed: Stamp) {
        if let Some(poll) = self.polls.take() {
            self.budget.found(noticed.since(poll.since));
        }
        if let Some(since) = self.idle_since.take() {
            self.learn(noticed.since(since));
        }
        self.disk_waits.worked(noticed);
    }

    /// Records an iteration with work that began at `at` and left I/O of disks in flight.
    #[inline]
    pub(crate) fn submits(&mut self, at: Stamp) {
        self.disk_waits.submits(at);
    }

    /// Restarts polling for a disk at the next call of [`Polling::waits_for_disk`].
    #[inline]
    pub(crate) fn begin_later(&mut self) {
        self.polls = None;
        self.disk_waits.begin_later();
    }

    /// Returns true if the worker polls after work.
    pub(crate) fn is_on(&self) -> bool {
        self.always || (self.window().now() > 0 && !self.cpu_demand.is_suspended())
    }

    /// Starts to poll for at most `wanted`, or continues.
    ///
    /// A poll starts only if the budget suffices for the longest one. Otherwise a poll that ends too early, or a short poll for
    /// a disk, would use up each refill, and no poll would be long enough to find work.
    #[inline]
    fn poll(&mut self, now: Stamp, wanted: u64) -> Idle {
        let poll = match self.polls {
            Some(poll) => poll,
            None => {
                if wanted == 0 || !self.cpu_demand.permits(now) {
                    return Idle::Sleep;
                }
                let left = self.budget.left(now.0);
                if left < self.enough {
                    return Idle::Sleep;
                }
                let most = wanted.min(left);
                *self.polls.insert(Poll { since: now, most })
            }
        };
        if now.since(poll.since) < poll.most {
            Idle::Poll
        } else {
            Idle::Sleep
        }
    }

    /// Chooses between polling and sleeping when disks owe `pending` completions; 0: all I/Os wait for limits. An expected
    /// wait for a disk within the limit is polled; before a longer one, and before a wait for limits, the worker polls briefly
    /// for requests. The client window is neither used as the limit nor adapted.
    #[inline]
    pub(crate) fn waits_for_disk(&mut self, pending: usize, now: Stamp) -> Idle {
        if self.always {
            return Idle::Poll;
        }
        let waited = self.disk_waits.waited(now);
        let wanted = self.disk_limit(pending);
        if waited >= wanted {
            return Idle::Sleep;
        }
        self.poll(now, wanted)
    }

    #[inline]
    fn disk_limit(&self, pending: usize) -> u64 {
        let look = self.look.min(self.window().max());
        let max = match pending {
            0 => return look,
            ..=POLLED_IN_FLIGHT if self.disk_waits.limit_clients() => self.disk_max,
            _ => self.disk_max.min(self.sleep),
        };
        if self.disk_waits.expected() > max {
            look
        } else {
            max
        }
    }

    /// Chooses between polling and sleeping after an iteration without work.
    #[inline]
    pub(crate) fn idle(&mut self, now: Stamp) -> Idle {
        if self.always {
            return Idle::Poll;
        }
        self.idle_since.get_or_insert(now);
        let window = self.window().now();
        self.poll(now, window)
    }

    /// Returns true if the worker, which polls, must read its run delay for [`Polling::read_run_delay`].
    #[inline]
    pub(crate) fn is_reading_due(&self, now: Stamp) -> bool {
        !self.always && self.cpu_demand.is_reading_due(now)
    }

    /// Records the worker's run delay. Returns true if another thread wants the CPU, which suspends polling.
    pub(crate) fn read_run_delay(&mut self, now: Stamp, delay: RunDelay) -> bool {
        let suspends = self.cpu_demand.read(now, delay);
        if suspends && let Some(poll) = &mut self.polls {
            poll.most = 0;
        }
        suspends
    }

    /// Records that the worker sleeps for a disk.
    #[inline]
    pub(crate) fn sleeping_for_disk(&mut self, now: Stamp) {
        if let Some(poll) = self.polls.take() {
            self.budget.wasted(now.since(poll.since));
        }
    }

    /// Records that the worker sleeps until any event.
    pub(crate) fn sleeping(&mut self, now: Stamp) {
        self.sleeping_for_disk(now);
        self.slept_at = Some(self.idle_since.take().unwrap_or(now));
    }

    /// Returns true if the worker is waking from a sleep without I/O in flight.
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
mod tests;
