//! Runs a study: turn by turn, guest by guest, case by case, way by way.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cli_common::say;
use serde_json::{Value, json};
use vm::GuestProgram;
use vm::setup::program_for_guests;

use super::guest::{Planned, StudyGuest};
use super::{Case, Run, Setup, Way};

/// What a study is to do.
pub struct Study {
    pub setups: Vec<Setup>,
    pub cases: Vec<Case>,
    pub turns: u32,
    pub turn: Duration,
    /// Where files of disks, the result and pictures lie.
    pub folder: PathBuf,
    /// More words of every guest's plan.
    pub guest: Vec<String>,
    pub direct: bool,
    /// Bytes of each disk.
    pub size: u64,
}

/// The first line of a result file says what was measured: another study does not go on with it.
#[derive(Debug)]
pub struct Results {
    pub runs: Vec<Run>,
    pub accelerator: String,
}

impl Study {
    fn header(&self) -> Value {
        let ways = self.setups.iter().flat_map(|setup| &setup.ways);
        let ways: Vec<_> = ways.map(|way| json!([way.name, way.words])).collect();
        let cases: Vec<_> = self
            .cases
            .iter()
            .map(|case| json!([case.name, case.job(&[], 0, self.direct)]))
            .collect();
        json!({"ways": ways, "cases": cases, "turn_ms": self.turn.as_millis() as u64, "size": self.size,
            "guest": self.guest})
    }

    fn runs_file(&self) -> PathBuf {
        self.folder.join("runs.jsonl")
    }

    /// What was measured before, if it was of this study.
    fn measured_before(&self) -> Result<Results> {
        let mut results = Results {
            runs: Vec::new(),
            accelerator: String::new(),
        };
        let path = self.runs_file();
        let Ok(file) = File::open(&path) else {
            return Ok(results);
        };
        let mut lines = BufReader::new(file).lines();
        let header: Value = match lines.next() {
            Some(line) => serde_json::from_str(&line?).unwrap_or_default(),
            None => return Ok(results),
        };
        ensure!(
            header["study"] == self.header(),
            "{} holds the runs of another study; hint: give another --folder, or remove it",
            path.display()
        );
        header["accelerator"]
            .as_str()
            .unwrap_or_default()
            .clone_into(&mut results.accelerator);
        // The last line of a study that was killed may be cut.
        let runs = lines.map_while(Result::ok);
        results.runs = runs
            .map_while(|line| serde_json::from_str(&line).ok())
            .collect();
        Ok(results)
    }

    /// Measures what is missing; what there is in the end, also where it was interrupted.
    pub fn run(&self) -> Result<Results> {
        std::fs::create_dir_all(&self.folder)
            .with_context(|| format!("cannot make {}", self.folder.display()))?;
        let mut results = self.measured_before()?;
        let key = |run: &Run| (run.way.clone(), run.case.clone(), run.turn);
        let done: HashSet<_> = results.runs.iter().map(key).collect();
        let is_missing = |way: &Way, case: &Case, turn| {
            !done.contains(&(way.name.clone(), case.name.clone(), turn))
        };
        if !done.is_empty() {
            say(&format_args!("{} runs were measured before", done.len()));
        }
        for turn in 0..self.turns {
            for setup in &self.setups {
                let mut pairs = self
                    .cases
                    .iter()
                    .flat_map(|case| setup.ways.iter().map(move |way| (case, way)));
                if !pairs.any(|(case, way)| is_missing(way, case, turn)) {
                    continue;
                }
                let measured = self.run_setup(setup, turn, &mut results, &is_missing);
                if vm::interrupted() {
                    return Ok(results);
                }
                measured.with_context(|| format!("{}, turn {}", setup.name, turn + 1))?;
            }
        }
        Ok(results)
    }

    fn run_setup(
        &self,
        setup: &Setup,
        turn: u32,
        results: &mut Results,
        is_missing: &dyn Fn(&Way, &Case, u32) -> bool,
    ) -> Result<()> {
        let name = format!("study-{}", std::process::id());
        let planned = Planned::new(setup, &name, &self.guest)?;
        let files = planned.files();
        for (file, size) in &files {
            fill(file, *size)?;
        }
        let guest = planned.start(setup, &name, &self.folder.join("guest.log"))?;
        self.begin_file(guest.accelerator(), results)?;
        let measured = self.run_cases(setup, turn, &guest, results, is_missing);
        let ended = guest.end();
        for (file, _) in &files {
            std::fs::remove_file(file).ok();
        }
        measured.and(ended)
    }

    fn run_cases(
        &self,
        setup: &Setup,
        turn: u32,
        guest: &StudyGuest,
        results: &mut Results,
        is_missing: &dyn Fn(&Way, &Case, u32) -> bool,
    ) -> Result<()> {
        for case in &self.cases {
            let mut of_guest = guest.disks().iter();
            for way in &setup.ways {
                let disks = way.words.as_ref().and_then(|_| of_guest.next());
                if !is_missing(way, case, turn) {
                    continue;
                }
                let milliseconds = self.turn.as_millis() as u64;
                let document = match disks {
                    Some(disks) => guest.run(&case.job(disks, milliseconds, true)),
                    None => self.on_host(way, case, milliseconds),
                };
                let document = document.with_context(|| format!("{}, {}", way.name, case.name))?;
                let run = run_of(&document, way, case, turn);
                say(&format_args!(
                    "turn {} of {}: {}, {}: {:.0} IOPS",
                    turn + 1,
                    self.turns,
                    way.name,
                    case.name,
                    run.iops()
                ));
                self.add(&run)?;
                results.runs.push(run);
                if vm::interrupted() {
                    bail!("interrupted");
                }
            }
        }
        Ok(())
    }

    fn on_host(&self, way: &Way, case: &Case, milliseconds: u64) -> Result<Value> {
        on_host(&self.folder, way.disks, self.size, &|files| {
            case.job(files, milliseconds, self.direct)
        })
    }

    fn begin_file(&self, accelerator: &str, results: &mut Results) -> Result<()> {
        let path = self.runs_file();
        if results.accelerator.is_empty() {
            accelerator.clone_into(&mut results.accelerator);
            let line = json!({"study": self.header(), "accelerator": accelerator});
            std::fs::write(&path, format!("{line}\n"))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        ensure!(
            results.accelerator == accelerator,
            "the runs before are of a guest under {}, this one is under {accelerator}; hint: give another --folder",
            results.accelerator
        );
        Ok(())
    }

    fn add(&self, run: &Run) -> Result<()> {
        let mut file = File::options().append(true).open(self.runs_file())?;
        Ok(writeln!(file, "{}", serde_json::to_string(run)?)?)
    }
}

/// The generator on files of a folder, without a guest: its result, with the CPU time of its process.
pub fn on_host(
    folder: &Path,
    disks: u32,
    size: u64,
    job: &dyn Fn(&[String]) -> String,
) -> Result<Value> {
    let files = (0..disks).map(|number| folder.join(format!("host-{number}.raw")));
    let files: Vec<PathBuf> = files.collect();
    for file in &files {
        fill(file, size)?;
    }
    let names: Vec<String> = files
        .iter()
        .map(|file| file.display().to_string())
        .collect();
    let text = folder.join("host.fio");
    std::fs::write(&text, job(&names))?;
    let program = program_for_guests(GuestProgram::Bench)?;
    let before = children_ns();
    let ran = Command::new(program)
        .arg(&text)
        .output()
        .context("cannot run the generator")?;
    let spent = children_ns()
        .zip(before)
        .map(|(after, before)| after - before);
    let wrong = String::from_utf8_lossy(&ran.stderr);
    ensure!(ran.status.success(), "{}", wrong.trim());
    let mut document: Value = serde_json::from_slice(&ran.stdout)?;
    document["vm"] = json!({"guest_cpu_ns": {}, "host_cpu_ns": {"qemu": spent}});
    Ok(document)
}

/// CPU time of children that have ended, in nanoseconds: cutime and cstime of proc(5), which count from behind the name.
fn children_ns() -> Option<u64> {
    const TICK_NS: u64 = 10_000_000;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some((ticks(13)? + ticks(14)?) * TICK_NS)
}

/// Sees to it that a file has data everywhere: holes are read faster than any disk.
pub fn fill(path: &Path, size: u64) -> Result<()> {
    const PIECE: usize = 1 << 20;
    let is_there = std::fs::metadata(path).is_ok_and(|metadata| metadata.len() == size);
    if is_there {
        return Ok(());
    }
    let write = || -> std::io::Result<()> {
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)?;
        let piece: Vec<u8> = (0..PIECE).map(|at| (at % 251) as u8).collect();
        let mut at = 0;
        while at < size {
            let length = (size - at).min(PIECE as u64);
            file.write_all_at(&piece[..length as usize], at)?;
            at += length;
        }
        file.sync_all()
    };
    write().with_context(|| format!("cannot write {} of {size} bytes", path.display()))
}

/// Can files of a folder be read past the page cache?
pub fn has_direct_io(folder: &Path) -> bool {
    const O_DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits() as i32;
    let probe = folder.join("direct");
    let made = std::fs::write(&probe, [0; 4096]);
    let opened = File::options()
        .read(true)
        .custom_flags(O_DIRECT)
        .open(&probe);
    std::fs::remove_file(&probe).ok();
    made.is_ok() && opened.is_ok()
}

/// All jobs of a result together.
fn run_of(document: &Value, way: &Way, case: &Case, turn: u32) -> Run {
    let jobs = document["jobs"].as_array().map_or(&[][..], Vec::as_slice);
    let sides = || jobs.iter().flat_map(|job| [&job["read"], &job["write"]]);
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let ios: f64 = sides().map(|side| number(&side["total_ios"])).sum();
    let weighted = |field: &dyn Fn(&Value) -> f64| {
        let sum: f64 = sides()
            .map(|side| field(side) * number(&side["total_ios"]))
            .sum();
        if ios > 0.0 { sum / ios } else { 0.0 }
    };
    let of = |side: &str| jobs.iter().map(|job| number(&job[side]["iops"])).sum();
    let percentile = |which: &'static str| {
        weighted(&move |side: &Value| number(&side["clat_ns"]["percentile"][which]))
    };
    let per_io = |nanos: f64| if ios > 0.0 { nanos / ios } else { 0.0 };
    let guest = &document["vm"]["guest_cpu_ns"];
    let guest = |words: &[&str]| per_io(words.iter().map(|word| number(&guest[*word])).sum());
    let host = &document["vm"]["host_cpu_ns"];
    let qemu = host["qemu"].as_f64();
    let host = qemu.map(|qemu| per_io(qemu + number(&host["daemon"])));
    Run {
        way: way.name.clone(),
        case: case.name.clone(),
        turn,
        read_iops: of("read"),
        write_iops: of("write"),
        mean_ns: weighted(&|side: &Value| number(&side["lat_ns"]["mean"])),
        p50_ns: percentile("50.000000"),
        p99_ns: percentile("99.000000"),
        guest_user_ns: guest(&["user"]),
        guest_system_ns: guest(&["system"]),
        guest_irq_ns: guest(&["irq", "softirq"]),
        host_ns: host,
    }
}
