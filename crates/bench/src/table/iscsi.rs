//! `make bench-iscsi`: our iSCSI target compared with tgt, in turns, as one table.
//!
//! Each target serves a RAM disk (tgt: a file on tmpfs) on one CPU; one initiator, `driver::iscsi`, drives both on another CPU. The table
//! also shows CPU time per request of target and driver, because the driver must not be the bottleneck.

use std::fs::File;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use latency::Clock;

use super::{TableOptions, chosen, disturbances, head, introduction, share_of_cpu};
use crate::children::{Daemon, Scratch, Start};
use crate::driver::{Demand, DriverOptions, Session, Subject};
use crate::job::{Job, apply};
use crate::report::{columns, rate, ratio};
use crate::run::{
    Outcome, Plan, Progress, SubjectResult, bootstrap_ratio, run_without_errors, spread,
};

const TARGET: &str = "iqn.2026-11.org.example:bench";
/// Size of each disk in bytes.
const SIZE: u64 = 512 << 20;
/// Timeout for a target to open its port.
const PATIENCE: Duration = Duration::from_secs(20);

/// Limit of tgtd's control port numbers.
const CONTROL_PORTS: u32 = 32_000;

const OURS: &str = "lunette";
/// Our target with workers that do not poll.
const SLEEPING: &str = "lunette-sleeping";
/// Option of its daemon.
const SLEEPING_OPTION: [&str; 2] = ["--poll", "off"];
const PEER: &str = "tgt";

struct Case {
    name: &'static str,
    options: &'static [(&'static str, &'static str)],
    polling: bool,
    /// One request at a time: between requests a worker sleeps or polls.
    alone: bool,
    digests: bool,
}

const fn case(name: &'static str, options: &'static [(&'static str, &'static str)]) -> Case {
    Case {
        name,
        options,
        polling: false,
        alone: false,
        digests: false,
    }
}

const READ: (&str, &str) = ("rw", "randread");
const WRITE: (&str, &str) = ("rw", "randwrite");
const DEPTH_32: (&str, &str) = ("iodepth", "32");
const DEPTH_8: (&str, &str) = ("iodepth", "8");
const LARGE: (&str, &str) = ("bs", "256k");

const CASES: &[Case] = &[
    case("4k read QD32", &[READ, DEPTH_32]),
    Case {
        alone: true,
        ..case("4k read QD1", &[READ])
    },
    Case {
        polling: true,
        alone: true,
        ..case("4k read QD1, driver polls", &[READ])
    },
    case("256k read QD8", &[READ, LARGE, DEPTH_8]),
    case("4k write QD32", &[WRITE, DEPTH_32]),
    Case {
        alone: true,
        ..case("4k write QD1", &[WRITE])
    },
    case("256k write QD8", &[WRITE, LARGE, DEPTH_8]),
    case("4k read 4 x QD32", &[READ, DEPTH_32, ("numjobs", "4")]),
    Case {
        digests: true,
        ..case("4k read QD32, CRC32C", &[READ, DEPTH_32])
    },
    Case {
        digests: true,
        ..case("256k read QD8, CRC32C", &[READ, LARGE, DEPTH_8])
    },
];

/// A running target.
pub(super) struct Served {
    name: &'static str,
    daemon: Daemon,
    subject: String,
    /// Folder of its disk, if that is a file.
    _memory: Option<Scratch>,
}

impl Served {
    /// Returns the subject without further keys.
    pub(super) fn place(&self) -> &str {
        &self.subject
    }

    pub(super) fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    fn subject(&self, digests: bool) -> Result<Subject> {
        let digests = u8::from(digests);
        Subject::parse(&format!(
            "{},name={},pid={},digests={digests}",
            self.subject,
            self.name,
            self.daemon.pid()
        ))
    }
}

/// Result of one case.
struct Line {
    case: &'static Case,
    outcome: Outcome,
}

/// Runs the cases. Returns the table as text for a terminal and for a file of notes.
pub fn iscsi_table(
    options: &TableOptions,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<String> {
    chosen(options, CASES.iter().map(|case| case.name))?;
    let clock = Clock::new();
    let folder = Scratch::for_sockets("lt")?;
    progress.print("starting the targets and filling their disks");
    let mut targets = vec![
        lunette(options, folder.path(), OURS, &[])?,
        lunette(options, folder.path(), SLEEPING, &SLEEPING_OPTION)?,
    ];
    match tgt(options, folder.path()) {
        Ok(peer) => targets.push(peer),
        Err(error) => progress.print(&format!(
            "without tgt (Debian: apt-get install tgt; it needs root): {error:#}"
        )),
    }
    let all = |digests| {
        targets
            .iter()
            .map(|one| one.subject(digests))
            .collect::<Result<Vec<_>>>()
    };
    fill(all(false)?, &clock, interrupted)?;
    let mut lines = Vec::new();
    for case in CASES {
        let wanted = options.only.as_ref();
        if !wanted.is_none_or(|only| case.name.contains(only.as_str()))
            || interrupted.load(Ordering::Relaxed)
        {
            continue;
        }
        let mut subjects = all(case.digests)?;
        if !case.alone {
            subjects.retain(|subject| subject.name != SLEEPING);
        }
        if case.digests {
            // tgtd supports digests only if its configuration demands them of every initiator.
            subjects.truncate(1);
        }
        let plan = plan(case, subjects, options)?;
        let outcome = run_without_errors(&plan, &clock, interrupted, progress)
            .with_context(|| format!("case {}", case.name))?;
        lines.push(Line { case, outcome });
    }
    let mut idle = Vec::new();
    for target in &targets {
        idle.push((target.name, idle_cpu(target)?));
    }
    Ok(render(&lines, &idle, options))
}

fn free_port() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// Waits until the target accepts connections.
fn await_port(daemon: &mut Daemon, address: SocketAddr, log: &Path) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while TcpStream::connect(address).is_err() {
        if Instant::now() > until || daemon.has_ended()? {
            let text = std::fs::read_to_string(log).unwrap_or_default();
            bail!("cannot connect to {address}: {}", text.trim());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

pub(super) fn lunette(
    options: &TableOptions,
    folder: &Path,
    name: &'static str,
    flags: &[&str],
) -> Result<Served> {
    start_lunette(options, folder, name, flags, free_port()?, &[])
}

/// Starts our target at an address, with a command prefix.
pub(super) fn start_lunette(
    options: &TableOptions,
    folder: &Path,
    name: &'static str,
    flags: &[&str],
    address: SocketAddr,
    before: &[String],
) -> Result<Served> {
    let cpu = options.device_cpu.to_string();
    let mut command = match before.split_first() {
        None => Start::new(&options.program, Some(options.device_cpu)),
        Some((first, rest)) => {
            let mut command = Start::new(Path::new(first), Some(options.device_cpu));
            command.args(rest).arg(&options.program);
            command
        }
    };
    command.args(["--log", "warn", "serve", "--cpus", &cpu, "--control"]);
    command.arg(folder.join(name));
    command.args(["--disk", &format!("d0=ram:{SIZE}")]);
    command.args(["--iscsi", &format!("{TARGET}=d0")]);
    command.args(["--portal", &address.to_string(), "--demo-mode", "rw"]);
    command.args(flags);
    let log = folder.join(format!("{name}.log"));
    let mut daemon = Daemon::start(command, &log, &[])?;
    await_port(&mut daemon, address, &log)?;
    Ok(Served {
        name,
        daemon,
        subject: format!("iscsi://{address}/{TARGET}/0"),
        _memory: None,
    })
}

/// Starts Debian's tgtd with a file on tmpfs as LUN 1; its LUN 0 is a controller.
fn tgt(options: &TableOptions, folder: &Path) -> Result<Served> {
    let memory = Scratch::new("lunette-bench", Path::new("/dev/shm"))?;
    let disk = memory.path().join("ram.raw");
    File::create(&disk)?.set_len(SIZE)?;
    let address = free_port()?;
    // The control port selects a separate control socket, so that another tgtd may run.
    let control = (u32::from(address.port()) % CONTROL_PORTS + 1).to_string();
    let mut command = Start::new(Path::new("tgtd"), Some(options.device_cpu));
    command.args(["-f", "-C", &control, "--iscsi"]);
    command.arg(format!("portal={address}"));
    let log = folder.join("tgtd.log");
    let mut daemon = Daemon::start(command, &log, &[])?;
    await_port(&mut daemon, address, &log)?;
    let path = disk.to_string_lossy().into_owned();
    for words in [
        vec![
            "--op", "new", "--mode", "target", "--tid", "1", "-T", TARGET,
        ],
        vec![
            "--op",
            "new",
            "--mode",
            "logicalunit",
            "--tid",
            "1",
            "--lun",
            "1",
            "-b",
            &path,
        ],
        vec![
            "--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL",
        ],
    ] {
        let log = File::create(folder.join("tgtadm.log"))?;
        let status = Command::new("tgtadm")
            .args(["-C", &control, "--lld", "iscsi"])
            .args(words)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .status()
            .context("cannot run tgtadm")?;
        ensure!(status.success(), "tgtadm failed");
    }
    Ok(Served {
        name: PEER,
        daemon,
        subject: format!("iscsi://{address}/{TARGET}/1"),
        _memory: Some(memory),
    })
}

pub(super) fn job(name: &str, options: &[(&str, &str)]) -> Result<Job> {
    let mut job = Job {
        name: name.to_owned(),
        ..Job::default()
    };
    for (option, value) in options {
        apply(&mut job, option, Some(value)).map_err(anyhow::Error::msg)?;
    }
    Ok(job)
}

fn plan(case: &Case, subjects: Vec<Subject>, options: &TableOptions) -> Result<Plan> {
    let job = Job {
        no_random_map: true,
        time_based: true,
        runtime: Some(options.turn),
        ..job(case.name, case.options)?
    };
    Ok(Plan {
        subjects,
        jobs: vec![job],
        driver: DriverOptions {
            polling: case.polling,
            ..DriverOptions::default()
        },
        repetitions: options.repetitions,
        warm_up: Duration::from_millis(100),
        cpus: vec![options.driver_cpu],
        retries: 1,
        disturbance_max: 0.1,
        ..Plan::default()
    })
}

/// Writes all blocks once, because reads of unwritten memory are cheaper.
pub(super) fn fill(
    subjects: Vec<Subject>,
    clock: &Clock,
    interrupted: &Arc<AtomicBool>,
) -> Result<()> {
    let plan = Plan {
        subjects,
        jobs: vec![job("fill", &[("rw", "write"), LARGE, DEPTH_8])?],
        driver: DriverOptions {
            polling: false,
            ..DriverOptions::default()
        },
        ..Plan::default()
    };
    run_without_errors(&plan, clock, interrupted, &Progress::silent())
        .context("cannot fill the disks")?;
    Ok(())
}

/// Returns the CPU fraction of a target with an idle session.
fn idle_cpu(target: &Served) -> Result<f64> {
    let options = DriverOptions::default();
    let demand = Demand {
        slots: 1,
        largest: 4096,
        zeroes: true,
    };
    let mut session = Session::open(&target.subject(false)?, &options, demand, 1, None)?;
    let _queue = session.queue(&options, demand)?;
    std::thread::sleep(Duration::from_millis(300));
    share_of_cpu(target.daemon.pid(), Duration::from_secs(2))
}

fn find<'a>(line: &'a Line, name: &str) -> Option<&'a SubjectResult> {
    let mut subjects = line.outcome.subjects.iter();
    subjects.find(|s| s.name == name && !s.repetitions.is_empty())
}

/// Returns one row per line and target of ours.
fn rows_of(lines: &[Line]) -> impl Iterator<Item = (&Line, &'static str)> {
    lines.iter().flat_map(|line| {
        let ours = [OURS, SLEEPING].into_iter();
        ours.filter(|name| find(line, name).is_some())
            .map(move |name| (line, name))
    })
}

fn called(line: &Line, name: &str) -> String {
    match name {
        SLEEPING => format!("{}, {}", line.case.name, SLEEPING_OPTION.join(" ")),
        _ => line.case.name.to_owned(),
    }
}

fn render(lines: &[Line], idle: &[(&str, f64)], options: &TableOptions) -> String {
    let mut text = introduction(options);
    text.push_str(
        "I/Os per second: median, half the spread; ratio of medians with its 95 % interval\n\n",
    );
    let mut rows = vec![head(&["case", OURS, PEER, "lunette / tgt", "bandwidth"])];
    for (line, name) in rows_of(lines) {
        let (ours, peer) = (find(line, name), find(line, PEER));
        let iops = |subject: &SubjectResult| subject.each(crate::run::Repetition::iops);
        let cell = |subject: Option<&SubjectResult>| {
            subject.map_or_else(String::new, |subject| {
                let values = spread(&iops(subject));
                let half = values.relative() * 100.0;
                format!("{} +-{half:.0} %", rate(values.median))
            })
        };
        let between = match (ours, peer) {
            (Some(a), Some(b)) => ratio(bootstrap_ratio(&iops(a), &iops(b))),
            _ => String::new(),
        };
        let bytes = ours.map(|subject| spread(&subject.each(crate::run::Repetition::bandwidth)));
        let bytes = bytes.map_or_else(String::new, |b| format!("{:.2} GB/s", b.median / 1e9));
        rows.push(vec![
            called(line, name),
            cell(ours),
            cell(peer),
            between,
            bytes,
        ]);
    }
    text.push_str(&columns(&rows));
    text.push_str(
        "\nTime of one request; CPU seconds per million requests: of the target, and of the driver\n\n",
    );
    let mut rows = vec![head(&["case", OURS, PEER, "CPU of target, lunette / tgt"])];
    for (line, ours) in rows_of(lines) {
        let middle = |name| find(line, name).and_then(SubjectResult::median_repetition);
        let cell = |name| {
            middle(name).map_or_else(String::new, |one| {
                let p50 = latency::table::time(one.latency().quantile_ns(0.5) as f64);
                let target = one.device_cpu_per_million.unwrap_or(0.0);
                format!("{p50}; {target:.2} s, {:.2} s", one.driver_cpu_per_million)
            })
        };
        let cpu = |name| middle(name).and_then(|one| one.device_cpu_per_million);
        let between = match (cpu(ours), cpu(PEER)) {
            (Some(a), Some(b)) if b > 0.0 => format!("x{:.2}", a / b),
            _ => String::new(),
        };
        rows.push(vec![called(line, ours), cell(ours), cell(PEER), between]);
    }
    text.push_str(&columns(&rows));
    text.push_str("\nIdle CPU, one session logged in:");
    for (name, share) in idle {
        text.push_str(&format!(" {name} {:.2} %", share * 100.0));
    }
    text.push('\n');
    text.push_str(&disturbances(
        lines.iter().flat_map(|line| &line.outcome.subjects),
    ));
    text
}
