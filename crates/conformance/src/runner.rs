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
pub fn run(
    target: &Target,
    selection: &Selection,
    mut progress: impl FnMut(&TestReport),
) -> Report {
    let mut report = Report::default();
    let mut process = target.serves().ok();
    let mut died: Option<String> = None;
    for test in tests(target.device).filter(|test| selection.has(test)) {
        let begun = Instant::now();
        let outcome = match &died {
            Some(name) => Outcome::Skipped(format!("the back end died in {name}")),
            None => run_one(test, target, process),
        };
        let test_report = TestReport {
            test,
            outcome,
            duration: begun.elapsed(),
        };
        progress(&test_report);
        if matches!(test_report.outcome, Outcome::Died(_)) {
            process = restarted(target);
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

/// Waits for a restarted back end. Returns its process.
fn restarted(target: &Target) -> Option<Pid> {
    let until = Instant::now() + RESTART;
    while Instant::now() < until {
        if let Ok(process) = target.serves() {
            return Some(process);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    None
}
