//! `lunette vm study`: replays a published study with the commands of `lunette vm`, and prints its findings beside those of this machine.
//!
//! A study is data ([`published`]). Each of its parts is a command that runs in a process of its own and leaves its results in a folder.
//! A part with results is not measured again, so an interrupted replay continues.

mod measured;
mod published;

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bench::study::{METHOD, Page, write_file};
use clap::{Args, Parser};
use cli_common::{Failure, Outcome, print_line};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vm::Accelerator;

use self::published::{Finding, JOBS, Part, PublishedStudy, STUDIES};
use super::study::report::{PARTIAL, RESULT, caution};
use super::study::{Effort, study_failed};
use super::{Action, VmCommand, failed};

/// `lunette vm study`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct StudyArguments {
    /// Study to replay [default: print the list of studies]
    #[arg(value_name = "NAME", value_parser = STUDIES.map(|study| study.name))]
    name: Option<String>,
    /// Replay in ten minutes, with small disks and short measurements
    #[arg(long)]
    quick: bool,
    /// Print the plan and the estimated duration, and measure nothing
    #[arg(long)]
    plan: bool,
    /// Folder for disk files, results, pictures and the page
    #[arg(long, default_value = "lunette-study", value_name = "FOLDER")]
    folder: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const AFTER: &str = "\
Replays a published study: the same topology, preparation and workload. Prints the tables, and the published findings beside those of this
machine. Begins with an estimate of the duration. An interruption prints and saves the results so far; the same command then continues the
study. Without KVM the guests are emulated, and the results are labelled so.

Examples:
    lunette vm study
    lunette vm study four-disks --plan
    lunette vm study latency --quick
    lunette vm study fifteen-cases --folder /srv/study --json";

/// Parser of the commands of a study.
#[derive(Parser)]
struct Words {
    #[command(flatten)]
    command: VmCommand,
}

impl Part {
    /// Returns the words of the command; empty if the part is omitted.
    fn words(&self, quick: bool, folder: &Path) -> Vec<String> {
        let jobs = folder.display().to_string();
        let words = if quick { self.quick } else { self.words };
        let words = words.split_whitespace();
        words.map(|word| word.replace("{jobs}", &jobs)).collect()
    }

    /// Returns the work of the command.
    fn effort(&self, words: &[String]) -> Result<Effort, Failure> {
        let all = std::iter::once("vm").chain(words.iter().map(String::as_str));
        let parsed = Words::try_parse_from(all).map_err(Failure::mistake)?;
        match &parsed.command.action {
            Action::Compare(arguments) => arguments.effort(),
            Action::Latency(arguments) => arguments.effort(),
            Action::Matrix(arguments) => arguments.effort(),
            Action::Mcs(arguments) => Ok(arguments.effort()),
            _ => Err(Failure::mistake(format!("{} has no estimate", self.folder))),
        }
    }
}

/// A study with the commands of this replay.
struct Replay<'a> {
    study: &'a PublishedStudy,
    quick: bool,
    /// Folder of the results.
    folder: PathBuf,
    accelerator: Accelerator,
    parts: Vec<(&'a Part, Vec<String>)>,
    /// Estimated duration in seconds.
    estimate: f64,
}

/// Returns the estimated duration of a command in seconds, on a machine without other load.
fn seconds(effort: &Effort, accelerator: Accelerator) -> f64 {
    // Time of a start and an end of a guest, and of a measurement in addition to its load.
    let (boot, around) = match accelerator {
        Accelerator::Kvm => (4.0, 0.3),
        Accelerator::Tcg => (14.0, 1.2),
    };
    const WRITTEN_PER_SECOND: f64 = 200e6;
    f64::from(effort.boots) * boot
        + f64::from(effort.runs) * (effort.seconds + around)
        + effort.written as f64 / WRITTEN_PER_SECOND
}

impl<'a> Replay<'a> {
    fn new(
        study: &'a PublishedStudy,
        quick: bool,
        folder: &Path,
        accelerator: Accelerator,
    ) -> Result<Replay<'a>, Failure> {
        let folder = folder
            .join(study.name)
            .join(if quick { "quick" } else { "full" });
        let mut parts = Vec::new();
        let mut estimate = 0.0;
        for part in study.parts {
            let words = part.words(quick, &folder);
            if words.is_empty() {
                continue;
            }
            estimate += seconds(&part.effort(&words)?, accelerator);
            parts.push((part, words));
        }
        Ok(Replay {
            study,
            quick,
            folder,
            accelerator,
            parts,
            estimate,
        })
    }

    /// Creates the folder, with the job files of the commands.
    fn write_jobs(&self) -> Result<()> {
        let folder = &self.folder;
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(folder)?;
            JOBS.iter()
                .try_for_each(|(name, text)| std::fs::write(folder.join(name), text))
        };
        write().with_context(|| format!("cannot write to {}", folder.display()))
    }

    /// Describes the study, the commands and the estimated duration.
    fn plan(&self) -> Vec<String> {
        let study = self.study;
        let mut lines = vec![
            format!("{}: {}", study.title, study.source),
            format!("topology: {}", study.topology),
            format!("preparation: {}", study.preparation),
            format!("workload: {}", study.workload),
            format!("differences: {}", study.differences),
        ];
        for (part, words) in &self.parts {
            lines.push(format!(
                "lunette vm {} --folder {}",
                words.join(" "),
                self.folder.join(part.folder).display()
            ));
        }
        let minutes = (self.estimate / 60.0).max(0.1);
        lines.push(format!(
            "estimated duration: {minutes:.1} min; up to three times as long beside other load, because disturbed measurements are repeated"
        ));
        lines
    }

    /// Runs the parts that have no results yet. Returns early after an interruption.
    fn measure(&self, has_output: bool) -> Result<()> {
        self.write_jobs()?;
        for (part, words) in &self.parts {
            let folder = self.folder.join(part.folder);
            if folder.join(RESULT).exists() {
                print_line(&format_args!("{}: already measured", part.folder));
                continue;
            }
            print_line(&format_args!("lunette vm {}", words.join(" ")));
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("vm").args(words).arg("--folder").arg(&folder);
            if !has_output {
                command.stdout(Stdio::null());
            }
            let status = wait(command.spawn().context("cannot start the command")?)?;
            if vm::interrupted() {
                return Ok(());
            }
            if !status.success() {
                bail!("lunette vm {}: {status}", words.join(" "));
            }
        }
        Ok(())
    }

    /// Returns the result of a part, or the partial result of an interrupted one; null if there is none.
    fn result(&self, part: &str) -> Result<Value> {
        for name in [RESULT, PARTIAL] {
            let path = self.folder.join(part).join(name);
            match std::fs::read(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot read {}", path.display()));
                }
                Ok(text) => {
                    return serde_json::from_slice(&text)
                        .with_context(|| format!("{} is no JSON", path.display()));
                }
            }
        }
        Ok(Value::Null)
    }

    /// Returns the findings with the values of this replay, as lines of a table.
    fn findings(&self, label: &str) -> Result<Vec<Vec<String>>> {
        let mut lines = vec![vec!["published".to_owned(), format!("here{label}")]];
        // The ratios of all findings share the probability of an error.
        let mut number = 0;
        for finding in self.study.findings {
            number += finding
                .measure
                .comparisons(&self.folder.join(finding.part))?;
        }
        for Finding {
            published,
            part,
            measure,
        } in self.study.findings
        {
            let found = match self.parts.iter().any(|(one, _)| one.folder == *part) {
                true => measure.describe(&self.folder.join(part), &self.result(part)?, number)?,
                false => Err("not part of --quick".to_owned()),
            };
            let found = found.unwrap_or_else(|why| format!("- ({why})"));
            lines.push(vec![(*published).to_owned(), found]);
        }
        Ok(lines)
    }

    /// Combines the results, writes page and JSON, and prints the findings.
    fn report(&self, is_json: bool) -> Result<()> {
        let mut results = Vec::new();
        for (part, words) in &self.parts {
            results.push(
                json!({"part": part.folder, "command": words, "result": self.result(part.folder)?}),
            );
        }
        let first = results.first().map_or(&Value::Null, |one| &one["result"]);
        let accelerator = first["accelerator"].as_str();
        let accelerator = accelerator.unwrap_or(self.accelerator.word());
        let caution = caution(accelerator);
        let label = caution.map_or("", |_| ", emulated");
        let findings = self.findings(label)?;
        let study = self.study;
        let rows = findings.iter().skip(1);
        let rows = rows.map(|row| json!({"published": row[0], "here": row[1]}));
        let document = json!({"study": study.name, "title": study.title, "source": study.source, "quick": self.quick, "interrupted": vm::interrupted(),
            "accelerator": accelerator, "emulated": caution.is_some(), "topology": study.topology, "preparation": study.preparation,
            "workload": study.workload, "differences": study.differences, "findings": rows.collect::<Vec<_>>(), "parts": results});
        write_file(
            &self.folder,
            "study.json",
            format!("{document:#}\n").as_bytes(),
        )?;
        let page = self.page(&findings, first, caution)?;
        let mut stdout = cli_common::stdout();
        if is_json {
            writeln!(stdout, "{document:#}")?;
            return Ok(());
        }
        writeln!(stdout, "\n{}{label}\n", study.title)?;
        for row in findings.iter().skip(1) {
            writeln!(
                stdout,
                "published: {}\n     here{label}: {}",
                row[0], row[1]
            )?;
        }
        writeln!(stdout)?;
        writeln!(stdout, "source: {}\n{}", study.source, study.differences)?;
        writeln!(stdout, "ratios: {METHOD}")?;
        if let Some(line) = caution {
            writeln!(stdout, "{line}")?;
        }
        writeln!(stdout, "page: {}", page.display())?;
        Ok(())
    }

    /// Writes the page, with all pictures of the parts.
    fn page(
        &self,
        findings: &[Vec<String>],
        first: &Value,
        caution: Option<&str>,
    ) -> Result<PathBuf> {
        let study = self.study;
        let mut about = vec![
            format!("Source: {}", study.source),
            format!("Topology: {}", study.topology),
            format!("Preparation: {}", study.preparation),
            format!("Workload: {}", study.workload),
            study.differences.to_owned(),
            format!("Ratios: {METHOD}."),
        ];
        let notes = first["conditions"].as_array().into_iter().flatten();
        about.extend(notes.filter_map(|note| Some(note.as_str()?.to_owned())));
        let mut page = Page {
            title: match caution {
                Some(_) => format!("{} (emulated)", study.title),
                None => study.title.to_owned(),
            },
            about,
            cautions: caution.map(str::to_owned).into_iter().collect(),
            tables: vec![("Findings".to_owned(), findings.to_vec())],
            ..Page::default()
        };
        for (part, _) in &self.parts {
            for picture in PICTURES {
                let path = self.folder.join(part.folder).join(picture);
                let Ok(svg) = std::fs::read_to_string(&path) else {
                    continue;
                };
                let name = picture.trim_end_matches(".svg");
                // Identifiers must be unique within the page.
                let svg = svg.replace("hatch", &format!("{}-{name}-hatch", part.folder));
                page.pictures
                    .push((format!("{}: {name}", part.folder), svg));
            }
        }
        write_file(&self.folder, "report.html", page.html().as_bytes())
    }
}

/// Polling interval of a command.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Pictures of the commands.
const PICTURES: [&str; 6] = [
    "latency.svg",
    "compare.svg",
    "combined-read.svg",
    "combined-write.svg",
    "combined-iops.svg",
    "mcs.svg",
];

/// Replays a study.
///
/// # Errors
/// A failure of one of its commands.
pub fn run(arguments: &StudyArguments) -> Outcome {
    let named = STUDIES
        .iter()
        .find(|study| Some(study.name) == arguments.name.as_deref());
    let accelerator = Accelerator::detect().map_err(failed)?;
    let Some(study) = named else {
        return list(accelerator, &arguments.folder);
    };
    vm::watch().map_err(failed)?;
    let replay = Replay::new(study, arguments.quick, &arguments.folder, accelerator)?;
    if arguments.plan {
        let mut stdout = cli_common::stdout();
        for line in replay.plan() {
            writeln!(stdout, "{line}")?;
        }
        return Ok(());
    }
    for line in replay.plan() {
        print_line(&line);
    }
    replay.measure(!arguments.json).map_err(study_failed)?;
    replay.report(arguments.json).map_err(failed)?;
    match vm::interrupted() {
        true => Err(Failure::Interrupted),
        false => Ok(()),
    }
}

/// Prints the studies with their estimated durations on this machine.
fn list(accelerator: Accelerator, folder: &Path) -> Outcome {
    let mut stdout = cli_common::stdout();
    for study in &STUDIES {
        let minutes = |quick| {
            let replay = Replay::new(study, quick, folder, accelerator)?;
            Ok::<f64, Failure>((replay.estimate / 60.0).max(0.1))
        };
        let (quick, whole) = (minutes(true)?, minutes(false)?);
        writeln!(stdout, "{:<14} {}", study.name, study.title)?;
        writeln!(stdout, "{:<14} {}", "", study.source)?;
        writeln!(
            stdout,
            "{:<14} about {whole:.0} min, with --quick {quick:.1} min",
            ""
        )?;
    }
    Ok(())
}

/// Waits for the end of a command. Forwards the signal of an interruption, after which the command saves its results and ends.
fn wait(mut command: Child) -> Result<ExitStatus> {
    let mut is_forwarded = false;
    loop {
        if let Some(status) = command.try_wait()? {
            return Ok(status);
        }
        if let Some(signal) = vm::signal().filter(|_| !is_forwarded) {
            is_forwarded = true;
            let signal = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
            kill_process(Pid::from_child(&command), signal)?;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

#[cfg(test)]
mod tests {
    use super::published::Measure;
    use super::*;

    /// Parses all commands, so that a changed option fails here.
    #[test]
    fn quick_replays_take_ten_minutes_also_when_emulated() {
        let folder = tempfile::tempdir().unwrap();
        let estimate = |study, quick, accelerator| {
            let replay = Replay::new(study, quick, folder.path(), accelerator);
            replay
                .map(|replay| replay.estimate)
                .unwrap_or_else(|why| panic!("{why:?}"))
        };
        for study in &STUDIES {
            let quick = estimate(study, true, Accelerator::Tcg);
            assert!((30.0..=600.0).contains(&quick), "{}: {quick}", study.name);
            let whole = estimate(study, false, Accelerator::Kvm);
            assert!(
                whole > estimate(study, true, Accelerator::Kvm),
                "{}",
                study.name
            );
        }
    }

    #[test]
    fn an_interrupted_part_has_the_result_so_far() {
        let folder = tempfile::tempdir().unwrap();
        let replay = Replay::new(&STUDIES[0], true, folder.path(), Accelerator::Tcg).unwrap();
        assert_eq!(replay.result("part").unwrap(), Value::Null);
        let part = replay.folder.join("part");
        std::fs::create_dir_all(&part).unwrap();
        for (name, result) in [(PARTIAL, "1"), (RESULT, "2")] {
            write_file(&part, name, result.as_bytes()).unwrap();
            assert_eq!(replay.result("part").unwrap().to_string(), result);
        }
    }

    #[test]
    fn findings_refer_to_parts_and_ways_of_their_study() {
        for study in &STUDIES {
            assert!(!study.findings.is_empty());
            for finding in study.findings {
                let part = study.parts.iter().find(|part| part.folder == finding.part);
                let part = part.unwrap_or_else(|| panic!("{}", finding.part));
                let command = part.words.split_whitespace().next();
                let wanted: &[&str] = match finding.measure {
                    Measure::Ratio { .. } => &["matrix", "compare"],
                    Measure::Layer(_) => &["latency"],
                    Measure::Connections(_) => &["mcs"],
                };
                assert!(command.is_some_and(|command| wanted.contains(&command)));
            }
        }
    }
}
