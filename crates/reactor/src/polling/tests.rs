//! Windows, limits and pauses together, with simulated clients and disks.

use proptest::prelude::*;

use super::*;

fn polling(limits: impl Into<PollLimits>) -> Polling {
    let (clock, _) = Clock::simulated();
    Polling::new(limits.into(), &clock)
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
    let mut always = polling(PollMode::Always);
    assert_eq!(always.idle(Stamp(0)), Idle::Poll);
    assert_eq!(always.idle(Stamp(u64::MAX)), Idle::Poll);
    assert_eq!(always.waits_for_disk(1, Stamp(0)), Idle::Poll);
    assert_eq!(always.waits_for_disk(1, Stamp(u64::MAX)), Idle::Poll);
    assert!(!always.is_reading_due(Stamp(0)));
    let mut never = polling(PollMode::Off);
    assert_eq!(never.waits_for_disk(1, Stamp(0)), Idle::Sleep);
    assert!(!never.is_on());
}

/// Returns the time that the worker polls for a disk with waits of `ns`.
fn polled(p: &mut Polling, pending: usize, ns: u64) -> u64 {
    for wait in 0..2_000u64 {
        p.waits_for_disk(pending, Stamp(wait * 1_000_000));
        p.worked(Stamp(wait * 1_000_000 + ns));
    }
    let start = 10_000_000_000;
    let mut now = start;
    while p.waits_for_disk(pending, Stamp(now)) == Idle::Poll {
        now += 1_000;
    }
    p.sleeping_for_disk(Stamp(now));
    p.worked(Stamp(now));
    now - start
}

#[test]
fn disk_is_polled_while_its_expected_wait_is_within_the_limit() {
    let auto = || polling(PollMode::Auto);
    assert_eq!(polled(&mut auto(), 1, 45_000), 100_000);
    assert_eq!(polled(&mut auto(), 16, 45_000), 100_000);
    assert_eq!(
        polled(&mut auto(), 1, 150_000),
        2_000,
        "it looks for requests"
    );
    assert_eq!(polled(&mut auto(), 17, 4_000), 5_000);
    assert_eq!(polled(&mut auto(), 17, 45_000), 2_000);
    let mut p = auto();
    close(&mut p);
    assert_eq!(
        polled(&mut p, 1, 45_000),
        100_000,
        "for all kinds of clients"
    );
    let quiet = PollLimits {
        disk: PollLimit::Never,
        ..PollLimit::Micros(50).into()
    };
    assert_eq!(polled(&mut polling(quiet), 1, 45_000), 2_000);
    assert_eq!(polled(&mut polling(PollMode::Off), 1, 45_000), 0);
}

#[test]
fn rings_are_polled_and_connections_slept_for_independently() {
    let limits = PollLimits {
        rings: PollLimit::Micros(50),
        network: PollLimit::Never,
        disk: PollLimit::Never,
    };
    let mut p = polling(limits);
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
        network: PollLimit::Always,
        ..PollLimit::Never.into()
    };
    assert_eq!(polling(always).idle(Stamp(0)), Idle::Poll);
}

/// Duration of an iteration without work.
const STEP_NS: u64 = 250;

/// A worker on a CPU of its own, or with another thread on it.
struct Load {
    polling: Polling,
    now: u64,
    /// Time from a wake-up to the first request.
    wake_ns: u64,
    /// Run delay so far.
    delay: RunDelay,
    found: u64,
    wasted: u64,
    /// Number of polls without a result.
    polls: u64,
    readings: u64,
}

impl Load {
    fn new() -> Load {
        Load {
            polling: polling(PollMode::Auto),
            now: 1_000_000,
            wake_ns: 5_000,
            delay: RunDelay::default(),
            found: 0,
            wasted: 0,
            polls: 0,
            readings: 0,
        }
    }

    fn polled(&self) -> u64 {
        self.found + self.wasted
    }

    /// Serves a request, and waits until the next one, which arrives after `gap` or is completed by a disk. Returns true if
    /// polling found it.
    fn request(&mut self, gap: u64, of_disk: bool) -> bool {
        self.polling.serves(true);
        self.polling.worked(Stamp(self.now));
        self.now += 2_000;
        let (start, next) = (self.now, self.now + gap);
        loop {
            let now = Stamp(self.now);
            let idle = match of_disk {
                true => self.polling.waits_for_disk(1, now),
                false => self.polling.idle(now),
            };
            if idle == Idle::Sleep {
                self.wasted += self.now - start;
                self.polls += 1;
                match of_disk {
                    true => self.polling.sleeping_for_disk(now),
                    false => self.polling.sleeping(now),
                }
                self.now = self.now.max(next) + self.wake_ns;
                self.polling.woke(Stamp(self.now));
                return false;
            }
            if self.polling.is_reading_due(now) {
                self.readings += 1;
                self.polling.read_run_delay(now, self.delay);
            }
            if self.now >= next {
                self.found += self.now - start;
                return true;
            }
            self.now += STEP_NS;
        }
    }

    fn bound(&self, start: u64) -> u64 {
        // Each poll ends up to one step after its limit.
        1_000_000 + self.polls * STEP_NS + (self.now - start) / 64 + self.found / 2
    }
}

#[test]
fn idle_worker_sleeps_at_once() {
    let mut load = Load::new();
    for _ in 0..4 {
        load.request(1_000_000, false);
    }
    let (polled, readings) = (load.polled(), load.readings);
    assert!(polled < 100_000, "{polled}");
    for gap in 100..1_000 {
        assert!(!load.request(gap * 1_000_000, false));
    }
    assert_eq!((load.polled(), load.readings), (polled, readings));
}

#[test]
fn offered_load_below_the_window_is_not_polled_for() {
    // 10,000 requests a second, evenly and at random.
    let mut load = Load::new();
    let start = load.now;
    for _ in 0..20_000 {
        load.request(93_000, false);
    }
    let share = |load: &Load| load.polled() as f64 / (load.now - start) as f64;
    assert!(share(&load) < 0.01, "{}", share(&load));
    let mut random = fastrand::Rng::with_seed(7);
    let mut load = Load::new();
    for _ in 0..20_000 {
        load.request((-random.f64().ln() * 98_000.0) as u64, false);
    }
    assert!(share(&load) < 0.1, "{}", share(&load));
}

/// Idle times beyond the windows use up the budget. Polling finds later ones within the windows again.
#[test]
fn polling_resumes_after_its_budget_was_used_up() {
    for of_disk in [false, true] {
        let mut load = Load::new();
        load.request(30_000, of_disk);
        load.polling.budget.wasted(u64::MAX);
        for _ in 0..1_000 {
            load.request(30_000, of_disk);
        }
        assert!((0..100).all(|_| load.request(30_000, of_disk)), "{of_disk}");
    }
    // Short polls for a disk that does not limit the clients waste more than the part of the time.
    let mut load = Load::new();
    load.polling.budget.wasted(u64::MAX);
    let mut found = || {
        load.request(60_000, true);
        load.request(40_000, false)
    };
    for _ in 0..1_000 {
        found();
    }
    assert!((0..100).all(|_| found()));
}

/// A thread that shares the CPU makes the worker wait for half of the time. The worker then polls at most during the
/// intervals between two readings, once per pause.
#[test]
fn another_thread_on_the_cpu_stops_polling() {
    let mut load = Load::new();
    for _ in 0..1_000 {
        load.request(20_000, false);
    }
    let start = load.now;
    let before = load.polled();
    while load.now < start + 20_000_000_000 {
        let found = load.request(20_000, false);
        if found {
            load.delay.waited_ns += 20_000;
            load.now += 20_000;
        }
    }
    let share = (load.polled() - before) as f64 / (load.now - start) as f64;
    assert!(share < 0.01, "{share}");
    // The thread ends: the worker polls again after at most one pause.
    let end = load.now;
    while load.now < end + 2_100_000_000 {
        load.request(20_000, false);
    }
    assert!((0..1_000).all(|_| load.request(20_000, false)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Polling finds a client with idle times within the maximum window after some requests, for any earlier idle times.
    #[test]
    fn windows_converge(
        before in proptest::collection::vec(0..400_000u64, 0..300),
        gap in 500..49_000u64,
    ) {
        let mut load = Load::new();
        for gap in before {
            load.request(gap, false);
        }
        // Sleeps of less than 50 us open the window within six requests. Longer ones, which end after a wake-up, lead to a
        // trial, after at most 256 near misses. The budget suffices again after 6.4 ms.
        for _ in 0..1_000 {
            load.request(gap, false);
        }
        prop_assert!((0..100).all(|_| load.request(gap, false)));
    }

    #[test]
    fn polling_without_a_result_is_bounded(
        requests in proptest::collection::vec((0..300_000u64, any::<bool>()), 1..2_000),
    ) {
        let mut load = Load::new();
        let start = load.now;
        for (gap, of_disk) in requests {
            load.request(gap, of_disk);
            prop_assert!(load.wasted <= load.bound(start), "{} wasted", load.wasted);
        }
    }

    #[test]
    fn readings_are_rare(gaps in proptest::collection::vec(0..60_000u64, 1..2_000)) {
        let mut load = Load::new();
        let start = load.now;
        for gap in gaps {
            load.request(gap, false);
        }
        prop_assert!(load.readings <= 1 + (load.now - start) / 5_000_000);
    }
}
