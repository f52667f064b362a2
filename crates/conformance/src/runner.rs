//! Runs tests and checks after each that the back end still serves.

use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::target::{Device, Target};
use crate::{
    Devices, Flaw, Test, config, control, dirty_log, hostile, inflight, memory, requests, rings,
    scsi, session,
};

/// Time for a service manager to start a back end that has ended.
const RESTART: Duration = Duration::from_secs(5);

/// Result of one test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The back end behaves as the clause requires.
    Passed,
    /// The back end violates the clause.
    Failed(String),
    /// The test does not apply.
    Skipped(String),
    /// The back end serves no front end after the test.
    Died(String),
}

impl Outcome {
    /// Returns the word for tables and JSON.
    pub fn word(&self) -> &'static str {
        match self {
            Outcome::Passed => "passed",
            Outcome::Failed(_) => "failed",
            Outcome::Skipped(_) => "skipped",
            Outcome::Died(_) => "died",
        }
    }

    /// Returns the reason.
    pub fn reason(&self) -> &str {
        match self {
            Outcome::Passed => "",
            Outcome::Failed(reason) | Outcome::Skipped(reason) | Outcome::Died(reason) => reason,
        }
    }
}

/// Result of one test, with its test.
pub struct TestReport {
    /// Test.
    pub test: &'static Test,
    /// Result.
    pub outcome: Outcome,
    /// Duration, without the check afterwards.
    pub duration: Duration,
    /// False if the back end had died in an earlier test and was not started again.
    pub is_reached: bool,
}

/// Results of a run.
#[derive(Default)]
pub struct Report {
    /// Results in the order of the run.
    pub tests: Vec<TestReport>,
}

impl Report {
    /// Returns the number of tests with a result.
    pub fn count(&self, word: &str) -> usize {
        let tests = self.tests.iter();
        tests.filter(|test| test.outcome.word() == word).count()
    }

    /// Returns the tests that were skipped because the back end had died.
    pub fn unreached(&self) -> impl Iterator<Item = &TestReport> {
        self.tests.iter().filter(|test| !test.is_reached)
    }

    /// Returns true if no test failed and the back end did not die.
    pub fn is_good(&self) -> bool {
        self.count("failed") + self.count("died") == 0
    }
}

/// Tests to run.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Names, or beginnings of names such as a group. Empty: all tests.
    pub names: Vec<String>,
}

impl Selection {
    /// Returns true if the test is selected.
    pub fn has(&self, test: &Test) -> bool {
        let name = test.name();
        self.names.is_empty() || self.names.iter().any(|prefix| name.starts_with(prefix))
    }
}

/// Returns all tests for a device type.
pub fn tests(device: Device) -> impl Iterator<Item = &'static Test> {
    let groups = [
        session::TESTS,
        config::TESTS,
        rings::TESTS,
        requests::TESTS,
        scsi::TESTS,
        control::TESTS,
        memory::TESTS,
        inflight::TESTS,
        dirty_log::TESTS,
    ];
    let all = groups.into_iter().flatten().chain(hostile::cases());
    all.filter(move |test| match test.devices {
        Devices::Any => true,
        Devices::Blk => device == Device::Blk,
        Devices::Scsi => device != Device::Blk,
    })
}

/// Runs the selected tests. Calls `progress` after each.
pub fn run(target: &Target, selection: &Selection, progress: impl FnMut(&TestReport)) -> Report {
    let selected = tests(target.device).filter(|test| selection.has(test));
    let serves = || target.serves().ok();
    let run = |test: &Test, process| run_one(test, target, process);
    run_all(selected, serves, run, RESTART, progress)
}

/// Runs `tests` with `run`. `serves` returns the process of the back end if it serves. After the death of the back end, tests continue if it
/// serves again within the time `restart`.
fn run_all(
    tests: impl Iterator<Item = &'static Test>,
    serves: impl Fn() -> Option<Pid>,
    run: impl Fn(&Test, Option<Pid>) -> Outcome,
    restart: Duration,
    mut progress: impl FnMut(&TestReport),
) -> Report {
    let mut report = Report::default();
    let mut process = serves();
    let mut died: Option<String> = None;
    for test in tests {
        let begun = Instant::now();
        let outcome = match &died {
            Some(name) => Outcome::Skipped(format!("the back end died in {name}")),
            None => run(test, process),
        };
        let test_report = TestReport {
            test,
            outcome,
            duration: begun.elapsed(),
            is_reached: died.is_none(),
        };
        progress(&test_report);
        if matches!(test_report.outcome, Outcome::Died(_)) {
            process = restarted(&serves, restart);
            died = process.is_none().then(|| test.name());
        }
        report.tests.push(test_report);
    }
    report
}

fn run_one(test: &Test, target: &Target, process: Option<Pid>) -> Outcome {
    if test.writes && !target.is_destructive {
        return Outcome::Skipped("writes to the disk; needs --destructive".into());
    }
    let verdict = test.run(target);
    match target.serves() {
        Ok(now) if process.is_some_and(|before| before != now) => {
            return Outcome::Died("the process ended, and another one serves".into());
        }
        Err(Flaw::Failed(reason) | Flaw::Skipped(reason)) => {
            return Outcome::Died(format!("the next front end is not served: {reason}"));
        }
        Ok(_) => {}
    }
    match verdict {
        Ok(()) => Outcome::Passed,
        Err(Flaw::Failed(reason)) => Outcome::Failed(reason),
        Err(Flaw::Skipped(reason)) => Outcome::Skipped(reason),
    }
}

/// Waits for a restarted back end. Returns its process. The last attempt begins after the time limit, because an attempt at a back end that
/// does not respond can take longer than the limit.
fn restarted(serves: impl Fn() -> Option<Pid>, limit: Duration) -> Option<Pid> {
    let until = Instant::now() + limit;
    loop {
        let is_last = Instant::now() >= until;
        let process = serves();
        if process.is_some() || is_last {
            return process;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Runs four tests. The back end dies in the second one, and serves again after `absences` attempts. Returns the names and the results.
    fn run_with_death(absences: u32, limit: Duration) -> (Vec<String>, Report) {
        let four = || super::tests(Device::Blk).take(4);
        let names: Vec<String> = four().map(Test::name).collect();
        let (attempts, pid) = (Cell::new(0), Cell::new(7));
        let serves = || {
            // The first attempt is that before the tests.
            let attempt = attempts.replace(attempts.get() + 1);
            let is_absent = attempt > 0 && attempt <= absences;
            (!is_absent).then(|| Pid::from_raw(pid.get())).flatten()
        };
        let run = |test: &Test, process: Option<Pid>| {
            assert_eq!(process, Pid::from_raw(pid.get()), "{}", test.name());
            match test.name() == names[1] {
                true => {
                    pid.set(8);
                    Outcome::Died("the process ended".into())
                }
                false => Outcome::Passed,
            }
        };
        let report = run_all(four(), serves, run, limit, |_| {});
        (names, report)
    }

    #[test]
    fn tests_continue_with_a_back_end_that_was_started_again() {
        let (_, report) = run_with_death(1, Duration::from_secs(60));
        assert_eq!((report.count("passed"), report.count("died")), (3, 1));
        assert!(report.unreached().next().is_none() && !report.is_good());
    }

    #[test]
    fn tests_after_the_death_of_a_back_end_have_its_reason() {
        let (names, report) = run_with_death(u32::MAX, Duration::ZERO);
        let unreached: Vec<String> = report.unreached().map(|one| one.test.name()).collect();
        assert_eq!(unreached, names[2..]);
        let reason = format!("the back end died in {}", names[1]);
        assert_eq!(report.tests[3].outcome, Outcome::Skipped(reason));
        assert!(!report.is_good());
        // One attempt after the time limit.
        let (_, report) = run_with_death(0, Duration::ZERO);
        assert!(report.unreached().next().is_none());
    }
}
