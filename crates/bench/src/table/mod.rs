//! `make bench`: our transports compared with qemu-storage-daemon, in turns, as one table.
//!
//! Starts both daemons (`peers`), fills their disks, runs each case on all subjects in turns, and prints rates, ratios with their
//! intervals, CPU time per request and idle CPU load. The driver and the devices have a CPU each. All published performance claims come
//! from this table.

mod empty;
mod images;
mod iscsi;
mod mcs;
mod peers;
mod rbd;
mod served;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use latency::Clock;

pub use images::image_table;
pub use iscsi::iscsi_table;
pub use mcs::{Beside, McsOptions, McsRow, McsTable, mcs_columns, mcs_ratios, mcs_rows, mcs_table};
pub use peers::WorkFolders;
pub use rbd::{RbdPlace, rbd_table};

use crate::children::Daemon;
use crate::driver::{Demand, DriverOptions, Session, Subject};
use crate::job::{Job, apply};
use crate::report::{columns, rate, ratio};
use crate::run::{
    Outcome, Plan, Progress, SubjectResult, bootstrap_ratio, cpu_of, environment,
    run_without_errors, spread,
};
use crate::stamps::{self, StampOptions, stamp_cost};

/// Options of a table.
#[derive(Clone, Debug)]
pub struct TableOptions {
    /// Program of the daemon: this one.
    pub program: PathBuf,
    /// Folder for disks, sockets and the tested file, on a file system that supports O_DIRECT.
    pub place: PathBuf,
    /// CPU of the driver.
    pub driver_cpu: usize,
    /// CPU of the devices.
    pub device_cpu: usize,
    /// Turns of each subject and case.
    pub repetitions: u32,
    /// Measured time of one turn.
    pub turn: Duration,
    /// Only cases with this text in their names.
    pub only: Option<String>,
}

/// Kind of disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Medium {
    Null,
    Ram,
    File,
    /// The file of `File`, with a worker that does not poll.
    FileSlept,
}

impl Medium {
    /// Returns the name of the medium in socket names, and the owner of our sockets.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Medium::Null => ("null", OURS),
            Medium::Ram => ("ram", OURS),
            Medium::File => ("file", OURS),
            Medium::FileSlept => ("file", SLEEPING),
        }
    }
}

const OURS: &str = "lunette";
const SLEEPING: &str = "sleeping";
const SLEEPING_OPTIONS: [&str; 2] = ["--poll", "off"];

/// One column of the table.
struct Case {
    name: &'static str,
    medium: Medium,
    options: &'static [(&'static str, &'static str)],
    polling: bool,
}

/// Enough for an interval of about two percentage points; `bench stamp-cost` runs more.
const STAMP_ROUNDS: u32 = 12;

const READ: (&str, &str) = ("rw", "randread");
const WRITE: (&str, &str) = ("rw", "randwrite");
const DEPTH_32: (&str, &str) = ("iodepth", "32");
const DEPTH_8: (&str, &str) = ("iodepth", "8");
const LARGE: (&str, &str) = ("bs", "64k");

const fn case(
    name: &'static str,
    medium: Medium,
    options: &'static [(&'static str, &'static str)],
    polling: bool,
) -> Case {
    Case {
        name,
        medium,
        options,
        polling,
    }
}

const CASES: &[Case] = &[
    case("null QD32", Medium::Null, &[READ, DEPTH_32], true),
    case("null QD1", Medium::Null, &[READ], true),
    case("null QD32 irq", Medium::Null, &[READ, DEPTH_32], false),
    case("null QD1 irq", Medium::Null, &[READ], false),
    case("RAM QD32", Medium::Ram, &[READ, DEPTH_32], true),
    case("RAM QD1", Medium::Ram, &[READ], true),
    case("RAM 64k QD8", Medium::Ram, &[READ, DEPTH_8, LARGE], true),
    case("RAM write QD32", Medium::Ram, &[WRITE, DEPTH_32], true),
    case("RAM write QD1", Medium::Ram, &[WRITE], true),
    case(
        "RAM write 64k QD8",
        Medium::Ram,
        &[WRITE, DEPTH_8, LARGE],
        true,
    ),
    case("file QD32", Medium::File, &[READ, DEPTH_32], true),
    case("file QD1", Medium::File, &[READ], true),
    case("file QD1, --poll off", Medium::FileSlept, &[READ], true),
    case("file 64k QD8", Medium::File, &[READ, DEPTH_8, LARGE], true),
];

/// Result of one case.
struct Line {
    name: &'static str,
    outcome: Outcome,
}

/// Runs the cases. Returns the table as text for a terminal and for a file of notes.
pub fn table(
    options: &TableOptions,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<String> {
    chosen(options, CASES.iter().map(|case| case.name))?;
    let clock = Clock::new();
    let place = WorkFolders::new(&options.place, interrupted)?;
    progress.print("starting the daemons and filling their disks");
    let ours = |owner, media: &[&str], more: &[&str]| {
        peers::lunette(
            &options.program,
            &place,
            options.device_cpu,
            owner,
            media,
            more,
        )
    };
    let _sleeping = ours(SLEEPING, &["file"], &SLEEPING_OPTIONS)?;
    let ours = ours(OURS, &peers::MEDIA, &[])?;
    let peer = match peers::qemu(&place, options.device_cpu) {
        Ok(peer) => Some(peer),
        Err(error) => {
            progress.print(&format!(
                "without qemu-storage-daemon (Debian: apt-get install qemu-system-common): {error:#}"
            ));
            None
        }
    };
    fill(&place, peer.is_some(), &clock, interrupted)?;
    let lines = measure_cases(
        &place,
        peer.is_some(),
        options,
        &clock,
        interrupted,
        progress,
    )?;
    let mut idle = Vec::new();
    for (name, daemon, socket) in [
        ("lunette", Some(&ours), place.socket(OURS, "null", "blk")),
        (
            "qemu-storage-daemon",
            peer.as_ref(),
            place.socket("qemu", "null", "blk"),
        ),
    ] {
        if let Some(daemon) = daemon {
            idle.push((name, idle_cpu(daemon, &socket)?));
        }
    }
    let cpus = (options.driver_cpu, options.device_cpu);
    let interrupts = lines.iter().any(|line| line.name.ends_with("irq"));
    let empty = match interrupts && !interrupted.load(Ordering::Relaxed) {
        true => Some(empty::exchanges(cpus, options.repetitions, options.turn)?),
        false => None,
    };
    let mut text = render(&lines, &idle, empty.as_ref(), options);
    if options.only.is_none() {
        let stamps = StampOptions {
            program: options.program.clone(),
            driver_cpu: options.driver_cpu,
            device_cpu: options.device_cpu,
            rounds: STAMP_ROUNDS,
            repetitions: 4,
            only: None,
            turn: options.turn,
        };
        let costs = stamp_cost(&stamps, interrupted, progress)?;
        text.push_str(&format!("\n{}", stamps::render(&costs)));
    }
    Ok(text)
}

/// Runs the selected cases, one after the other.
fn measure_cases(
    place: &WorkFolders,
    has_peer: bool,
    options: &TableOptions,
    clock: &Clock,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    for case in CASES {
        let wanted = options
            .only
            .as_ref()
            .is_none_or(|only| case.name.contains(only.as_str()));
        if !wanted || interrupted.load(Ordering::Relaxed) {
            continue;
        }
        let plan = plan(case, place, has_peer, options)?;
        let outcome = run_without_errors(&plan, clock, interrupted, progress)
            .with_context(|| format!("case {}", case.name))?;
        lines.push(Line {
            name: case.name,
            outcome,
        });
    }
    Ok(lines)
}

/// Returns an error if no case is selected.
fn chosen<'a>(options: &TableOptions, names: impl Iterator<Item = &'a str> + Clone) -> Result<()> {
    if let Some(only) = &options.only {
        let names: Vec<&str> = names.collect();
        ensure!(
            names.iter().any(|name| name.contains(only.as_str())),
            "no case's name contains `{only}`; the cases: {}",
            names.join(", ")
        );
    }
    Ok(())
}

fn subjects(medium: Medium, place: &WorkFolders, with_peer: bool) -> Result<Vec<Subject>> {
    let (word, owner) = medium.words();
    let mut list = vec![
        format!(
            "vhost-user-blk:{},name=lunette blk",
            place.socket(owner, word, "blk").display()
        ),
        format!(
            "vhost-user-scsi:{},name=lunette scsi",
            place.socket(owner, word, "scsi").display()
        ),
    ];
    if with_peer {
        let socket = place.socket("qemu", word, "blk");
        list.push(format!(
            "vhost-user-blk:{},name=qemu-storage-daemon",
            socket.display()
        ));
    }
    if word == "file" {
        let file = place.file();
        list.push(format!("file:{},name=no device (io_uring)", file.display()));
    }
    list.iter().map(|text| Subject::parse(text)).collect()
}

fn plan(case: &Case, place: &WorkFolders, with_peer: bool, options: &TableOptions) -> Result<Plan> {
    let mut job = Job {
        name: case.name.to_owned(),
        no_random_map: true,
        time_based: true,
        runtime: Some(options.turn),
        ..Job::default()
    };
    for (option, value) in case.options {
        apply(&mut job, option, Some(value)).map_err(anyhow::Error::msg)?;
    }
    Ok(Plan {
        subjects: subjects(case.medium, place, with_peer)?,
        jobs: vec![job],
        driver: DriverOptions {
            polling: case.polling,
            ..DriverOptions::default()
        },
        repetitions: options.repetitions,
        warm_up: Duration::from_millis(20),
        cpus: vec![options.driver_cpu],
        device_cpu: Some(options.device_cpu),
        retries: 1,
        disturbance_max: 0.1,
    })
}

/// Writes all blocks once, because reads of unwritten memory are cheaper.
fn fill(
    place: &WorkFolders,
    with_peer: bool,
    clock: &Clock,
    interrupted: &Arc<AtomicBool>,
) -> Result<()> {
    let mut job = Job {
        name: "fill".to_owned(),
        ..Job::default()
    };
    for (option, value) in [("rw", "write"), ("bs", "256k"), ("iodepth", "8")] {
        apply(&mut job, option, Some(value)).map_err(anyhow::Error::msg)?;
    }
    let mut targets = subjects(Medium::Ram, place, with_peer)?;
    // The second transport serves the same disk.
    targets.remove(1);
    let plan = Plan {
        subjects: targets,
        jobs: vec![job],
        ..Plan::default()
    };
    run_without_errors(&plan, clock, interrupted, &Progress::silent())
        .context("cannot fill the RAM disks")?;
    Ok(())
}

/// Returns the CPU fraction of a daemon with an attached idle driver.
fn idle_cpu(daemon: &Daemon, socket: &Path) -> Result<f64> {
    let subject = Subject::parse(&format!("vhost-user-blk:{}", socket.display()))?;
    let options = DriverOptions {
        polling: false,
        ..DriverOptions::default()
    };
    let demand = Demand {
        slots: 32,
        largest: 4096,
        zeroes: true,
    };
    let mut session = Session::open(&subject, &options, demand, 1, None)?;
    let _queue = session.queue(&options, demand)?;
    std::thread::sleep(Duration::from_millis(300));
    share_of_cpu(daemon.pid(), Duration::from_secs(1))
}

/// Returns the CPU fraction of a process during `time`.
fn share_of_cpu(pid: u32, time: Duration) -> Result<f64> {
    let cpu = || cpu_of(pid).context("the daemon has ended");
    let (before, begin) = (cpu()?, Instant::now());
    std::thread::sleep(time);
    let used = cpu()?.saturating_sub(before);
    Ok(used as f64 / begin.elapsed().as_nanos() as f64)
}

fn iops(subject: &SubjectResult) -> Vec<f64> {
    subject.each(|one| one.iops())
}

fn find<'a>(line: &'a Line, name: &str) -> Option<&'a SubjectResult> {
    let subjects = &line.outcome.subjects;
    subjects
        .iter()
        .find(|s| s.name == name && !s.repetitions.is_empty())
}

const BLK: &str = "lunette blk";
const SCSI: &str = "lunette scsi";
const PEER: &str = "qemu-storage-daemon";
const RAW: &str = "lunette raw file";
const BARE: &str = "no device (io_uring)";

/// Describes environment and options.
fn introduction(options: &TableOptions) -> String {
    let environment = environment();
    format!(
        "{}, {} CPUs {}; driver on CPU {}, device on CPU {}; {} turns of {} ms each; lunette {}\n\n",
        environment.kernel,
        environment.cpus,
        environment.cpu,
        options.driver_cpu,
        options.device_cpu,
        options.repetitions,
        options.turn.as_millis(),
        environment.build(),
    )
}

/// Describes the disturbed turns.
fn disturbances<'a>(subjects: impl Iterator<Item = &'a SubjectResult>) -> String {
    let turns: Vec<bool> = subjects
        .flat_map(|s| &s.repetitions)
        .map(|one| one.disturbed)
        .collect();
    let disturbed = turns.iter().filter(|disturbed| **disturbed).count();
    if disturbed == 0 {
        return String::new();
    }
    format!(
        "\n{disturbed} of {} turns were disturbed by other work on the machine.\n",
        turns.len()
    )
}

fn render(
    lines: &[Line],
    idle: &[(&str, f64)],
    empty: Option<&empty::Exchange>,
    options: &TableOptions,
) -> String {
    let mut text = introduction(options);
    text.push_str("I/Os per second: median, half the spread; line: round trip between two CPUs, median (minimum to maximum)\n\n");
    text.push_str(&rates(lines));
    text.push_str("\nRatios of medians, with their 95 % intervals\n\n");
    text.push_str(&ratios(lines));
    text.push_str("\nTime of one request, and CPU seconds of the device per million of them\n\n");
    text.push_str(&costs(lines));
    if let Some(one) = empty {
        let time = latency::table::time(one.time * 1e9);
        text.push_str(&format!(
            "\nKick and interrupt alone, with an otherwise idle device that sleeps: {time}, {:.2} s\n",
            one.cpu * 1e6,
        ));
    }
    text.push_str("\nIdle CPU, one driver attached:");
    for (name, share) in idle {
        text.push_str(&format!(" {name} {:.2} %", share * 100.0));
    }
    text.push('\n');
    text.push_str(&disturbances(
        lines.iter().flat_map(|line| &line.outcome.subjects),
    ));
    text
}

/// Removes columns that have only a heading.
fn filled(mut rows: Vec<Vec<String>>) -> Vec<Vec<String>> {
    let width = rows.first().map_or(0, Vec::len);
    let is_filled = |at: usize| rows.iter().skip(1).any(|row| !row[at].is_empty());
    let kept: Vec<bool> = (0..width).map(is_filled).collect();
    for row in &mut rows {
        let mut kept = kept.iter();
        row.retain(|_| kept.next() == Some(&true));
    }
    rows
}

fn head(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn rates(lines: &[Line]) -> String {
    let mut rows = vec![head(&["case", BLK, SCSI, PEER, RAW, BARE, "line"])];
    for line in lines {
        let mut row = vec![line.name.to_owned()];
        for name in [BLK, SCSI, PEER, RAW, BARE] {
            row.push(find(line, name).map_or_else(String::new, |subject| {
                let values = spread(&iops(subject));
                format!(
                    "{} +-{:.0} %",
                    rate(values.median),
                    values.relative() * 100.0
                )
            }));
        }
        row.push(way(line));
        rows.push(row);
    }
    columns(&filled(rows))
}

/// Formats the cache line round trip between driver and device: median, minimum and maximum.
fn way(line: &Line) -> String {
    let turns = line.outcome.subjects.iter().flat_map(|s| &s.repetitions);
    let times: Vec<f64> = turns.filter_map(|one| one.line_ns).collect();
    let (Some(shortest), Some(longest)) = (
        times.iter().copied().reduce(f64::min),
        times.iter().copied().reduce(f64::max),
    ) else {
        return String::new();
    };
    let median = spread(&times).median;
    format!("{median:.0} ns ({shortest:.0} to {longest:.0})")
}

fn ratios(lines: &[Line]) -> String {
    let mut rows = vec![head(&[
        "case",
        "blk / peer",
        "scsi / peer",
        "scsi / blk",
        "blk / raw file",
        "blk / no device",
    ])];
    for line in lines {
        let between = |a: &str, b: &str| match (find(line, a), find(line, b)) {
            (Some(a), Some(b)) => ratio(bootstrap_ratio(&iops(a), &iops(b))),
            _ => String::new(),
        };
        rows.push(vec![
            line.name.to_owned(),
            between(BLK, PEER),
            between(SCSI, PEER),
            between(SCSI, BLK),
            between(BLK, RAW),
            between(BLK, BARE),
        ]);
    }
    columns(&filled(rows))
}

fn costs(lines: &[Line]) -> String {
    let mut rows = vec![head(&["case", BLK, SCSI, PEER, RAW, BARE])];
    for line in lines {
        let mut row = vec![line.name.to_owned()];
        for name in [BLK, SCSI, PEER, RAW, BARE] {
            let middle = find(line, name).and_then(SubjectResult::median_repetition);
            row.push(middle.map_or_else(String::new, |one| {
                let p50 = latency::table::time(one.latency().quantile_ns(0.5) as f64);
                let cpu = one.device_cpu_per_million;
                cpu.map_or(p50.clone(), |cpu| format!("{p50}, {cpu:.2} s"))
            }));
        }
        rows.push(row);
    }
    columns(&filled(rows))
}
