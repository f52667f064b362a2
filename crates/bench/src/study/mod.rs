//! Studies: the same cases through several variants, alternately. `lunette bench matrix`, `lunette vm matrix` and `lunette vm compare` use
//! this engine.
//!
//! A [`Subject`] starts variants in groups and measures them ([`run_missing`]). Each run is appended to the result file when it ends, so an
//! interrupted study continues where it stopped ([`Results`]). [`Report`] compares the runs, [`advice()`] draws conclusions, and [`Page`]
//! combines all on one page.

mod advice;
mod page;
mod report;
mod results;
#[cfg(test)]
mod simulated;
mod verdict;

use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::Range;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use advice::{advice, findings, missing_turns};
pub use page::{Page, Table, draw, write_file};
pub use report::{Report, percent};
pub use results::Results;
pub use verdict::{Comparison, MATTERS, METHOD, Verdict, next_value, not_enough};

/// A compared variant, such as a transport with a number of workers.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Name in tables and pictures.
    pub name: String,
    /// Settings and their values.
    pub settings: Vec<(&'static str, String)>,
}

impl Variant {
    /// Returns the value of a setting.
    pub fn setting(&self, setting: &str) -> Option<&str> {
        let mut settings = self.settings.iter();
        let (_, value) = settings.find(|(known, _)| *known == setting)?;
        Some(value)
    }

    /// Returns true if it differs from `other` only in `setting`. Settings that one of them lacks are ignored: QEMU's devices have no
    /// polling.
    pub fn differs_only_in(&self, setting: &str, other: &Variant) -> bool {
        let mut settings = self.settings.iter().filter(|(known, _)| *known != setting);
        self.setting(setting) != other.setting(setting)
            && settings
                .all(|(known, value)| other.setting(known).is_none_or(|other| other == value))
    }
}

/// Result of one variant in one case and turn.
pub trait Run {
    /// Name of the variant.
    fn variant(&self) -> Cow<'_, str>;
    /// Name of the case.
    fn case(&self) -> Cow<'_, str>;
    /// Number of the turn.
    fn turn(&self) -> u32;
    /// Reads and writes per second.
    fn iops(&self) -> f64;
    /// Returns true if other load was present, also when the run was repeated.
    fn is_disturbed(&self) -> bool {
        false
    }
}

/// Describes the disturbed runs and those without a result.
pub fn cautions<'a>(runs: impl Iterator<Item = &'a dyn Run>) -> Vec<String> {
    let runs: Vec<&dyn Run> = runs.collect();
    let mut cautions = Vec::new();
    let disturbed = runs.iter().filter(|run| run.is_disturbed()).count();
    if disturbed > 0 {
        cautions.push(format!(
            "{disturbed} of {} runs were disturbed by other work on the machine: differences are less reliable.",
            runs.len()
        ));
    }
    let empty = runs.iter().filter(|run| run.iops() <= 0.0);
    let empty = empty.map(|run| format!("{}, {}, turn {}", run.variant(), run.case(), run.turn()));
    let empty: Vec<String> = empty.collect();
    if !empty.is_empty() {
        cautions.push(format!(
            "no result (0 IOPS) in {} of {} runs, which the comparisons leave out: {}.",
            empty.len(),
            runs.len(),
            empty.join("; ")
        ));
    }
    cautions
}

/// Index of a run: its group, its variant in the group, and its case.
#[derive(Clone, Copy, Debug)]
pub struct Position {
    /// Index of the group.
    pub group: usize,
    /// Index in the group.
    pub variant: usize,
    /// Index of the case.
    pub case: usize,
    /// Number of the turn.
    pub turn: u32,
}

/// Variants and cases of a study, and their measurement.
pub trait Subject {
    /// Result of a run.
    type Run: Run + Serialize + DeserializeOwned;
    /// Started variants of a group.
    type Rig;

    /// Returns the names of the variants, by group. The variants of a group run at the same time, in a guest for example.
    fn groups(&self) -> Vec<Vec<String>>;

    /// Returns the names of the cases.
    fn cases(&self) -> Vec<String>;

    /// Starts a group.
    fn start(&self, group: usize, results: &mut Results<Self::Run>) -> Result<Self::Rig>;

    /// Measures one variant of a group in one case.
    fn measure(&self, rig: &Self::Rig, position: Position) -> Result<Self::Run>;

    /// Stops a group.
    fn end(&self, rig: Self::Rig) -> Result<()>;

    /// Returns true after an interruption by the user.
    fn is_interrupted(&self) -> bool;

    /// Prints the progress.
    fn print(&self, line: &str);
}

/// Key of a run: variant, case, turn.
type Key = (String, String, u32);

/// Progress of the missing runs.
#[derive(Debug)]
pub struct Progress {
    begin: Instant,
    measured: usize,
    missing: usize,
}

impl Progress {
    /// Starts the measurement of `missing` runs.
    pub fn new(missing: usize) -> Progress {
        Progress {
            begin: Instant::now(),
            measured: 0,
            missing,
        }
    }

    /// Counts runs, and describes their number and the estimated time that remains.
    pub fn advance(&mut self, runs: usize) -> String {
        self.measured += runs;
        let left = self.missing.saturating_sub(self.measured);
        let each = self.begin.elapsed().as_secs_f64() / self.measured.max(1) as f64;
        let minutes = each * left as f64 / 60.0;
        format!(
            "{} of {}, about {minutes:.1} min left",
            self.measured, self.missing
        )
    }
}

fn missing_runs(
    groups: &[Vec<String>],
    cases: &[String],
    turns: &Range<u32>,
    done: &HashSet<Key>,
) -> usize {
    let mut count = 0;
    for turn in turns.clone() {
        for variant in groups.iter().flatten() {
            for case in cases {
                let key = (variant.clone(), case.clone(), turn);
                count += usize::from(!done.contains(&key));
            }
        }
    }
    count
}

/// Runs the missing measurements of a study. Returns early after an interruption.
///
/// Turns are the outermost loop, so that drift of the machine affects all variants equally.
pub fn run_missing<S: Subject>(
    subject: &S,
    turns: Range<u32>,
    results: &mut Results<S::Run>,
) -> Result<()> {
    let (groups, cases) = (subject.groups(), subject.cases());
    let key = |run: &S::Run| {
        let (variant, case) = (run.variant(), run.case());
        (variant.into_owned(), case.into_owned(), run.turn())
    };
    let done: HashSet<_> = results.runs.iter().map(key).collect();
    let mut progress = Progress::new(missing_runs(&groups, &cases, &turns, &done));
    for turn in turns {
        for (group, variants) in groups.iter().enumerate() {
            // Rotates the order each turn, because the first run after a pause may differ.
            let mut order: Vec<usize> = (0..variants.len()).collect();
            order.rotate_left(turn as usize % variants.len().max(1));
            let mut missing = Vec::new();
            for (case, name) in cases.iter().enumerate() {
                for variant in &order {
                    if !done.contains(&(variants[*variant].clone(), name.clone(), turn)) {
                        missing.push(Position {
                            group,
                            variant: *variant,
                            case,
                            turn,
                        });
                    }
                }
            }
            let Some(first) = missing.first() else {
                continue;
            };
            let measured = run_group(subject, group, &missing, results, &mut progress);
            if subject.is_interrupted() {
                return Ok(());
            }
            let name = &variants[first.variant];
            measured.with_context(|| format!("cannot measure {name} in turn {turn}"))?;
        }
    }
    Ok(())
}

/// Default limit of [`run_until_sure`] in turns.
pub const TURNS_UNTIL_SURE: &str = "40";

/// Runs the missing measurements of a study, then further turns while `missing` estimates some, but not beyond turn `limit`.
///
/// The estimate is imprecise after few turns, so the number of turns doubles at most.
pub fn run_until_sure<S: Subject>(
    subject: &S,
    turns: Range<u32>,
    limit: u32,
    results: &mut Results<S::Run>,
    missing: impl Fn(&[S::Run]) -> Option<u32>,
) -> Result<()> {
    let Range { start, mut end } = turns;
    run_missing(subject, start..end, results)?;
    while end < limit && !subject.is_interrupted() {
        let Some(more) = missing(&results.runs) else {
            break;
        };
        let more = more.clamp(1, (end - start).max(1)).min(limit - end);
        subject.print(&format!(
            "not enough turns for all conclusions: {more} more"
        ));
        end += more;
        run_missing(subject, start..end, results)?;
    }
    Ok(())
}

fn run_group<S: Subject>(
    subject: &S,
    group: usize,
    missing: &[Position],
    results: &mut Results<S::Run>,
    progress: &mut Progress,
) -> Result<()> {
    let rig = subject.start(group, results)?;
    let mut measure = || -> Result<()> {
        for position in missing {
            if subject.is_interrupted() {
                return Ok(());
            }
            let run = subject.measure(&rig, *position)?;
            subject.print(&format!(
                "turn {}: {}, {}: {:.0} IOPS; {}",
                run.turn(),
                run.variant(),
                run.case(),
                run.iops(),
                progress.advance(1)
            ));
            results.add(run)?;
        }
        Ok(())
    };
    let measured = measure();
    measured.and(subject.end(rig))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::{Cell, RefCell};
    use std::time::Duration;

    use serde::Deserialize;

    use super::*;

    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub(crate) struct Plain {
        pub variant: String,
        pub case: String,
        pub turn: u32,
        pub iops: f64,
    }

    impl Run for Plain {
        fn variant(&self) -> Cow<'_, str> {
            self.variant.as_str().into()
        }

        fn case(&self) -> Cow<'_, str> {
            self.case.as_str().into()
        }

        fn turn(&self) -> u32 {
            self.turn
        }

        fn iops(&self) -> f64 {
            self.iops
        }
    }

    pub(crate) fn run(variant: &str, case: &str, turn: u32, iops: f64) -> Plain {
        Plain {
            variant: variant.to_owned(),
            case: case.to_owned(),
            turn,
            iops,
        }
    }

    /// A group with one variant and a group with two. Interrupted after `left` runs.
    struct Recorded {
        left: Cell<u32>,
        running: RefCell<Vec<usize>>,
    }

    impl Subject for Recorded {
        type Run = Plain;
        type Rig = usize;

        fn groups(&self) -> Vec<Vec<String>> {
            vec![vec!["a".into()], vec!["b".into(), "c".into()]]
        }

        fn cases(&self) -> Vec<String> {
            vec!["x".into(), "y".into()]
        }

        fn start(&self, group: usize, results: &mut Results<Plain>) -> Result<usize> {
            results.begin(&serde_json::json!({}))?;
            self.running.borrow_mut().push(group);
            Ok(group)
        }

        fn measure(&self, rig: &usize, position: Position) -> Result<Plain> {
            assert_eq!(*rig, position.group);
            self.left.set(self.left.get() - 1);
            let variant = &self.groups()[position.group][position.variant];
            Ok(run(
                variant,
                &self.cases()[position.case],
                position.turn,
                1.0,
            ))
        }

        fn end(&self, rig: usize) -> Result<()> {
            assert_eq!(self.running.borrow_mut().pop(), Some(rig));
            Ok(())
        }

        fn is_interrupted(&self) -> bool {
            self.left.get() == 0
        }

        fn print(&self, _line: &str) {}
    }

    #[test]
    fn progress_counts_runs_and_estimates_the_rest() {
        let mut progress = Progress::new(4);
        progress.begin = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        assert_eq!(progress.advance(1), "1 of 4, about 3.0 min left");
        assert_eq!(progress.advance(3), "4 of 4, about 0.0 min left");
        // A repetition beyond the plan.
        assert_eq!(progress.advance(1), "5 of 4, about 0.0 min left");
    }

    #[test]
    fn a_study_runs_until_it_is_sure_or_at_its_limit() {
        let turns_of = |limit, enough: u32| {
            let folder = tempfile::tempdir().unwrap();
            let subject = Recorded {
                left: Cell::new(1000),
                running: RefCell::default(),
            };
            let mut results = Results::read(&folder.path().join("runs.jsonl")).unwrap();
            let turns = |runs: &[Plain]| runs.iter().map(|run| run.turn + 1).max().unwrap();
            let missing = |runs: &[Plain]| enough.checked_sub(turns(runs)).filter(|more| *more > 0);
            run_until_sure(&subject, 0..2, limit, &mut results, missing).unwrap();
            turns(&results.runs)
        };
        assert_eq!(turns_of(2, 9), 2);
        assert_eq!(turns_of(40, 1), 2);
        assert_eq!(turns_of(40, 3), 3);
        assert_eq!(turns_of(40, 9), 9);
        assert_eq!(turns_of(10, u32::MAX), 10);
    }

    #[test]
    fn an_interrupted_study_continues_with_the_missing_runs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs.jsonl");
        let measure = |left| {
            let subject = Recorded {
                left: Cell::new(left),
                running: RefCell::default(),
            };
            let mut results = Results::read(&path).unwrap();
            run_missing(&subject, 0..2, &mut results).unwrap();
            assert!(subject.running.borrow().is_empty());
            let runs = results.runs.iter();
            let names = runs.map(|run| format!("{}{}{}", run.variant, run.case, run.turn));
            names.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(measure(3), "ax0 ay0 bx0");
        let all = "ax0 ay0 bx0 cx0 by0 cy0 ax1 ay1 cx1 bx1 cy1 by1";
        assert_eq!(measure(100), all);
        assert_eq!(measure(100), all);
    }
}
