//! Runs tests and checks after each that the back end still serves.

use std::time::{Duration, Instant};

use crate::target::{Device, Target};
use crate::{Devices, Flaw, Test, config, hostile, requests, rings, session};

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
    let groups = [session::TESTS, config::TESTS, rings::TESTS, requests::TESTS];
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
    let mut died: Option<String> = None;
    for test in tests(target.device).filter(|test| selection.has(test)) {
        let begun = Instant::now();
        let outcome = match &died {
            Some(name) => Outcome::Skipped(format!("the back end died in {name}")),
            None => run_one(test, target),
        };
        let test_report = TestReport {
            test,
            outcome,
            duration: begun.elapsed(),
        };
        progress(&test_report);
        if matches!(test_report.outcome, Outcome::Died(_)) && !is_restarted(target) {
            died = Some(test.name());
        }
        report.tests.push(test_report);
    }
    report
}

fn run_one(test: &Test, target: &Target) -> Outcome {
    if test.writes && !target.is_destructive {
        return Outcome::Skipped("writes to the disk; needs --destructive".into());
    }
    let verdict = test.run(target);
    match (verdict, target.serves()) {
        (_, Err(Flaw::Failed(reason))) => {
            Outcome::Died(format!("the next front end is not served: {reason}"))
        }
        (Ok(()), _) => Outcome::Passed,
        (Err(Flaw::Failed(reason)), _) => Outcome::Failed(reason),
        (Err(Flaw::Skipped(reason)), _) => Outcome::Skipped(reason),
    }
}

/// Waits for a restarted back end.
fn is_restarted(target: &Target) -> bool {
    let until = Instant::now() + RESTART;
    while Instant::now() < until {
        if target.serves().is_ok() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    false
}
