//! `lunette bench stamp-cost` and `lunette bench self-check`: measurements of the tool itself.

use std::io::Write;
use std::time::Duration;

use bench::run::Progress;
use bench::selfcheck::{CheckOptions, Verdict, self_check as check};
use bench::stamps::{StampOptions, render, stamp_cost as measure};
use serde_json::json;

use super::arguments::{SelfCheckArguments, StampArguments};
use super::{interrupted, to_its_end, unless_interrupted};
use cli_common::{Failure, Outcome};

/// Measures and prints the cost of stamps.
pub fn stamp_cost(arguments: &StampArguments) -> Outcome {
    let options = StampOptions {
        program: cli_common::find_sibling("lunette")?,
        driver_cpu: arguments.driver_cpu,
        device_cpu: arguments.device_cpu,
        rounds: arguments.rounds,
        repetitions: arguments.repetitions,
        only: arguments.only.clone(),
        turn: Duration::from_millis(arguments.turn_ms),
    };
    let progress = Progress::new(None);
    let interrupted = interrupted()?;
    let costs = unless_interrupted(measure(&options, &interrupted, &progress), &interrupted)?;
    drop(progress);
    let mut stdout = cli_common::stdout();
    if arguments.json {
        let each: Vec<_> = costs
            .iter()
            .map(|cost| json!({"turns": cost, "cost": cost.cost()}))
            .collect();
        writeln!(stdout, "{:#}", json!({"stamp_cost": each}))?;
    } else {
        write!(stdout, "{}", render(&costs))?;
    }
    to_its_end(&interrupted)
}

/// Checks the tool and prints a line for each claim. Fails if a claim does not hold.
pub fn self_check(arguments: &SelfCheckArguments) -> Outcome {
    let options = CheckOptions {
        program: cli_common::find_sibling("lunette")?,
        place: arguments.place.clone(),
        timing: !arguments.without_timing,
    };
    let progress = Progress::new(None);
    let interrupted = interrupted()?;
    let findings = unless_interrupted(check(&options, &interrupted, &progress), &interrupted)?;
    drop(progress);
    let text: String = findings.iter().map(|one| format!("{one}\n")).collect();
    let printed = write!(cli_common::stdout(), "{text}");
    let wrong = findings
        .iter()
        .filter(|finding| finding.verdict == Verdict::Wrong)
        .count();
    if wrong > 0 {
        return Err(Failure::because(format!("{wrong} checks failed")));
    }
    Ok(printed?)
}
