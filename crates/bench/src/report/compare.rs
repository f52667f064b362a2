//! Comparison of two result files.

use super::text::{columns, rate, ratio};
use crate::run::{Outcome, bootstrap_ratio_apart, spread};

/// Returns a line per subject: both medians, and the ratio of the second to the first.
pub fn compare(a: (&str, &Outcome), b: (&str, &Outcome)) -> String {
    let mut text = String::new();
    if a.1.environment.cpu != b.1.environment.cpu
        || a.1.environment.kernel != b.1.environment.kernel
    {
        text.push_str(&format!(
            "warning: different machines: {} on {}, {} on {}\n",
            a.1.environment.kernel,
            a.1.environment.cpu,
            b.1.environment.kernel,
            b.1.environment.cpu
        ));
    }
    for (one, other) in [(a, b), (b, a)] {
        let known = &other.1.environment.findings;
        for (check, found) in &one.1.environment.findings {
            if !known.contains_key(check) {
                text.push_str(&format!("note: {} only: {found}\n", one.0));
            }
        }
    }
    let mut lines = vec![vec![
        "subject".to_owned(),
        a.0.to_owned(),
        b.0.to_owned(),
        "ratio (95 %)".to_owned(),
        "verdict".to_owned(),
    ]];
    for (index, first) in a.1.subjects.iter().enumerate() {
        let same =
            b.1.subjects
                .iter()
                .find(|subject| subject.name == first.name);
        // If each file has a single subject, they are compared regardless of their names.
        let single = a.1.subjects.len() == 1 && b.1.subjects.len() == 1;
        let second = same.or(b.1.subjects.get(index).filter(|_| single));
        let Some(second) = second else {
            text.push_str(&format!("{} is only in {}\n", first.name, a.0));
            continue;
        };
        let (of_a, of_b) = (first.each(|one| one.iops()), second.each(|one| one.iops()));
        let interval = bootstrap_ratio_apart(&of_b, &of_a);
        let verdict = match interval {
            _ if of_a.len() < 3 || of_b.len() < 3 => "too few repetitions",
            Some(i) if i.low > 1.0 => "more",
            Some(i) if i.high < 1.0 => "less",
            Some(_) => "no significant difference",
            None => "nothing to compare",
        };
        lines.push(vec![
            first.name.clone(),
            rate(spread(&of_a).median),
            rate(spread(&of_b).median),
            ratio(interval),
            verdict.to_owned(),
        ]);
    }
    text.push_str(&columns(&lines));
    text.push_str("The files were not measured in turns: the ratio includes changes of the machine's speed.\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::Tally;
    use crate::run::{JobResult, Repetition, SubjectResult};

    fn outcome(name: &str, rates: &[u64]) -> Outcome {
        let repetition = |ios: &u64| {
            let tally = Tally {
                ios: *ios,
                ..Tally::default()
            };
            let job = JobResult {
                tallies: [tally, Tally::default(), Tally::default(), Tally::default()],
                elapsed_ns: 1_000_000_000,
                ..JobResult::default()
            };
            Repetition {
                jobs: vec![job],
                ..Repetition::default()
            }
        };
        Outcome {
            subjects: vec![SubjectResult {
                name: name.to_owned(),
                repetitions: rates.iter().map(repetition).collect(),
            }],
            ..Outcome::default()
        }
    }

    #[test]
    fn the_verdict_follows_from_the_interval() {
        let base = outcome("a", &[1000, 1010, 990, 1005]);
        for (rates, verdict) in [
            (&[2000, 2020, 1980, 2010][..], "more"),
            (&[500, 505, 495, 502][..], "less"),
            (&[1001, 990, 1010, 1000][..], "no significant difference"),
            (&[2000, 2000][..], "too few"),
        ] {
            // Single subjects are compared regardless of their names.
            let text = compare(("x.json", &base), ("y.json", &outcome("b", rates)));
            assert!(text.contains(verdict), "{text}");
            assert!(!text.contains("warning"));
        }
        let mut slower = base.clone();
        let found = "CPU frequency governor powersave on 8 of 8 CPUs".to_owned();
        slower
            .environment
            .findings
            .insert("governor".to_owned(), found);
        let text = compare(("x.json", &base), ("y.json", &slower));
        let note = "note: y.json only: CPU frequency governor powersave on 8 of 8 CPUs\n";
        assert!(text.starts_with(note), "{text}");
        let mut elsewhere = base.clone();
        elsewhere.environment.cpu = "another".to_owned();
        let text = compare(("x.json", &base), ("y.json", &elsewhere));
        assert!(text.starts_with("warning: different machines"), "{text}");
    }
}
