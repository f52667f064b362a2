//! Polling of a daemon's workers, judged by the use of their time.

use crate::Question;
use crate::finding::{Area, Finding};

/// Part of a worker's time that polling without a result may take with `poll = "auto"`, besides half of the polling with a result.
const EMPTY_PART: f64 = 1.0 / 16.0;
/// Tolerance for short examinations, as a part of the time.
const TOLERANCE: f64 = 1.0 / 16.0;
/// More sleeps per second than this limit the rate of requests.
const SLEEPS_PER_SECOND: f64 = 2_000.0;
/// Mean sleep in microseconds up to which polling can replace it. A longer sleep costs little in comparison.
const SHORT_SLEEP_US: f64 = 200.0;
/// Suggested polling limits are multiples of this, in microseconds.
const STEP_US: f64 = 50.0;

/// Use of a worker's time during the examination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerUse {
    /// Number of the worker.
    pub worker: usize,
    /// Time in iterations with work, in nanoseconds.
    pub work_ns: u64,
    /// Time of polling that found work, in nanoseconds.
    pub poll_found_ns: u64,
    /// Time of polling that found no work, in nanoseconds.
    pub poll_empty_ns: u64,
    /// Time asleep, in nanoseconds.
    pub sleep_ns: u64,
    /// Number of sleeps.
    pub sleeps: u64,
    /// Number of times that polling was suspended because another thread wanted the CPU.
    pub poll_suspensions: u64,
}

impl WorkerUse {
    fn total(&self) -> f64 {
        let polls = self.poll_found_ns + self.poll_empty_ns;
        (self.work_ns + polls + self.sleep_ns) as f64
    }

    fn part(&self, nanos: u64) -> f64 {
        nanos as f64 / self.total().max(1.0)
    }

    /// Polls more without a result than `poll = "auto"` permits.
    fn polls_always(&self) -> bool {
        let permitted = EMPTY_PART + TOLERANCE + self.part(self.poll_found_ns) / 2.0;
        self.part(self.poll_empty_ns) > permitted
    }

    fn sleeps_per_second(&self) -> f64 {
        self.sleeps as f64 * 1e9 / self.total().max(1.0)
    }

    fn mean_sleep_us(&self) -> f64 {
        self.sleep_ns as f64 / 1e3 / self.sleeps.max(1) as f64
    }

    fn sleeps_shortly(&self) -> bool {
        self.sleeps_per_second() >= SLEEPS_PER_SECOND && self.mean_sleep_us() <= SHORT_SLEEP_US
    }

    fn never_polls(&self) -> bool {
        self.poll_found_ns + self.poll_empty_ns == 0
    }
}

pub(crate) fn examine(question: &Question, findings: &mut Vec<Finding>) {
    let workers = &question.workers;
    findings.extend(useless_polling(workers));
    findings.extend(short_sleeps(workers));
    findings.extend(suspensions(workers));
}

/// Returns the worker with the largest value among those that match. Daemons of earlier versions count sleeps, but no times.
fn worst(
    workers: &[WorkerUse],
    matches: impl Fn(&WorkerUse) -> bool,
    value: impl Fn(&WorkerUse) -> f64,
) -> Option<&WorkerUse> {
    let some = workers
        .iter()
        .filter(|one| one.total() > 0.0 && matches(one));
    some.max_by(|a, b| value(a).total_cmp(&value(b)))
}

fn useless_polling(workers: &[WorkerUse]) -> Option<Finding> {
    let share = |one: &WorkerUse| one.part(one.poll_empty_ns);
    let one = worst(workers, WorkerUse::polls_always, share)?;
    let found = format!(
        "worker {} polls without a result for {:.0} % of its time, and works for {:.0} %",
        one.worker,
        100.0 * share(one),
        100.0 * one.part(one.work_ns)
    );
    let why = "Polling takes CPU time from virtual CPUs and other programs. With `auto`, workers poll only while that finds work.";
    Some(
        Finding::worth("useless_polling", Area::Workers, found, why).by(
            "set poll = \"auto\" in the configuration file, then restart or upgrade the daemon",
        ),
    )
}

fn short_sleeps(workers: &[WorkerUse]) -> Option<Finding> {
    let one = worst(
        workers,
        WorkerUse::sleeps_shortly,
        WorkerUse::sleeps_per_second,
    )?;
    let found = format!(
        "worker {} sleeps {:.0} times a second, for {:.0} us on average",
        one.worker,
        one.sleeps_per_second(),
        one.mean_sleep_us()
    );
    if one.never_polls() {
        let why = "Each request waits until the worker has woken up. Polling for this time avoids the sleep, at the cost of CPU time.";
        return Some(
            Finding::worth("short_sleeps", Area::Workers, found, why).by(
                "set poll = \"auto\" in the configuration file, then restart or upgrade the daemon",
            ),
        );
    }
    let limit = (2.0 * one.mean_sleep_us() / STEP_US).ceil() * STEP_US;
    let why = "Requests arrive just after the worker has stopped polling. A longer polling time increases their rate and uses more CPU time.";
    Some(Finding::note("short_sleeps", Area::Workers, found, why).by(format!(
        "try poll_us = {limit:.0} (guests), network_poll_us (iSCSI and NBD) or disk_poll_us (waits for disks), and measure"
    )))
}

fn suspensions(workers: &[WorkerUse]) -> Option<Finding> {
    let count = |one: &WorkerUse| one.poll_suspensions as f64;
    let one = worst(workers, |one| one.poll_suspensions > 0, count)?;
    let found = format!(
        "worker {} has stopped polling {} times because another thread wanted its CPU",
        one.worker, one.poll_suspensions
    );
    let why = "A worker that shares its CPU sleeps between requests, and its requests wait for the other thread.";
    Some(
        Finding::note("shared_cpu", Area::Workers, found, why)
            .by("pin workers to CPUs without virtual CPUs: workers = [CPU, ...]"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn checks(worker: WorkerUse) -> Vec<(&'static str, bool)> {
        let question = Question {
            workers: vec![WorkerUse::default(), worker],
            ..Question::default()
        };
        let mut findings = Vec::new();
        examine(&question, &mut findings);
        findings
            .iter()
            .map(|one| (one.check, one.is_worth_changing))
            .collect()
    }

    #[test]
    fn workers_that_poll_without_a_result_get_the_advice_to_sleep() {
        let idle = WorkerUse {
            work_ns: SECOND / 50,
            poll_empty_ns: SECOND - SECOND / 50,
            ..WorkerUse::default()
        };
        assert_eq!(checks(idle), [("useless_polling", true)]);
        // `auto` polls for half of the time of polling with a result.
        let busy = WorkerUse {
            work_ns: SECOND / 2,
            poll_found_ns: SECOND / 4,
            poll_empty_ns: SECOND / 8,
            sleep_ns: SECOND / 8,
            sleeps: 100,
            ..WorkerUse::default()
        };
        assert_eq!(checks(busy), []);
    }

    #[test]
    fn workers_with_short_sleeps_get_the_advice_to_poll() {
        let sleeper = WorkerUse {
            work_ns: SECOND / 5,
            sleep_ns: SECOND * 4 / 5,
            sleeps: 20_000,
            ..WorkerUse::default()
        };
        assert_eq!(checks(sleeper), [("short_sleeps", true)]);
        let early = WorkerUse {
            poll_empty_ns: SECOND / 20,
            ..sleeper
        };
        assert_eq!(checks(early), [("short_sleeps", false)]);
        let idle = WorkerUse {
            sleeps: 50,
            ..sleeper
        };
        assert_eq!(checks(idle), []);
        let disturbed = WorkerUse {
            poll_suspensions: 3,
            ..idle
        };
        assert_eq!(checks(disturbed), [("shared_cpu", false)]);
    }

    #[test]
    fn workers_without_times_get_no_advice() {
        let earlier = WorkerUse {
            sleeps: 5,
            ..WorkerUse::default()
        };
        assert_eq!(checks(earlier), []);
    }

    #[test]
    fn suggested_polling_time_covers_twice_the_mean_sleep() {
        let workers = [WorkerUse {
            work_ns: SECOND / 5,
            poll_empty_ns: SECOND / 50,
            sleep_ns: SECOND * 4 / 5,
            sleeps: 10_000,
            ..WorkerUse::default()
        }];
        let command = short_sleeps(&workers).unwrap().command.unwrap();
        assert!(command.contains("poll_us = 200 "), "{command}");
    }
}
