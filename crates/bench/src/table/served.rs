//! Daemons with writable disks on several transports, measured in turns: common part of the image tables. The driver waits for
//! interrupts.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use latency::Clock;

use super::{Line, SCSI, TableOptions, idle_cpu, render};
use crate::children::Daemon;
use crate::driver::{DriverOptions, Subject};
use crate::job::{Job, apply};
use crate::run::{Plan, Progress, run_without_errors};

type Case = (&'static str, &'static [(&'static str, &'static str)]);

const READ: (&str, &str) = ("rw", "randread");
const WRITE: (&str, &str) = ("rw", "randwrite");
const DEPTH_32: (&str, &str) = ("iodepth", "32");
const DEPTH_8: (&str, &str) = ("iodepth", "8");
const LARGE: (&str, &str) = ("bs", "64k");

pub(super) const CASES: &[Case] = &[
    ("4k read QD1", &[READ]),
    ("4k read QD32", &[READ, DEPTH_32]),
    ("4k write QD1", &[WRITE]),
    ("4k write QD32", &[WRITE, DEPTH_32]),
    ("64k read QD8", &[READ, DEPTH_8, LARGE]),
    ("64k write QD8", &[WRITE, DEPTH_8, LARGE]),
];

fn driver() -> DriverOptions {
    DriverOptions {
        polling: false,
        ..DriverOptions::default()
    }
}

/// A running daemon, and its sockets by subject name.
pub(super) struct Served {
    pub name: &'static str,
    pub daemon: Daemon,
    pub sockets: Vec<(&'static str, PathBuf)>,
}

impl Served {
    fn subjects(&self) -> impl Iterator<Item = Result<Subject>> {
        self.sockets.iter().map(|(name, socket)| {
            let kind = if *name == SCSI { "scsi" } else { "blk" };
            Subject::parse(&format!(
                "vhost-user-{kind}:{},name={name}",
                socket.display()
            ))
        })
    }
}

/// Fills the disks. The last transport of a daemon with several serves a disk of another transport.
pub(super) fn fill_all(
    daemons: &[Served],
    clock: &Clock,
    interrupted: &Arc<AtomicBool>,
) -> Result<()> {
    let disks = |daemon: &Served| daemon.sockets.len().max(2) - 1;
    let subjects = daemons
        .iter()
        .flat_map(|one| one.subjects().take(disks(one)));
    fill(subjects.collect::<Result<_>>()?, clock, interrupted)
}

/// Runs the selected cases on all subjects in turns.
pub(super) fn measure(
    daemons: &[Served],
    options: &TableOptions,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<String> {
    let clock = Clock::new();
    let mut lines = Vec::new();
    for (name, case) in CASES {
        let wanted = options.only.as_ref();
        if !wanted.is_none_or(|only| name.contains(only.as_str()))
            || interrupted.load(Ordering::Relaxed)
        {
            continue;
        }
        let subjects: Result<Vec<Subject>> = daemons.iter().flat_map(Served::subjects).collect();
        let plan = Plan {
            subjects: subjects?,
            jobs: vec![Job {
                no_random_map: true,
                time_based: true,
                runtime: Some(options.turn),
                ..job(name, case)?
            }],
            driver: driver(),
            repetitions: options.repetitions,
            warm_up: Duration::from_millis(50),
            cpus: vec![options.driver_cpu],
            device_cpu: Some(options.device_cpu),
            ..Plan::default()
        };
        let outcome = run_without_errors(&plan, &clock, interrupted, progress)
            .with_context(|| format!("case {name}"))?;
        lines.push(Line { name, outcome });
    }
    let mut idle = Vec::new();
    for Served {
        name,
        daemon,
        sockets,
    } in daemons
    {
        idle.push((*name, idle_cpu(daemon, &sockets[0].1)?));
    }
    Ok(render(&lines, &idle, None, options))
}

fn job(name: &str, options: &[(&str, &str)]) -> Result<Job> {
    let mut job = Job {
        name: name.to_owned(),
        ..Job::default()
    };
    for (option, value) in options {
        apply(&mut job, option, Some(value)).map_err(anyhow::Error::msg)?;
    }
    Ok(job)
}

/// Writes all blocks once, because reads of unwritten blocks do not reach an OSD's data.
fn fill(subjects: Vec<Subject>, clock: &Clock, interrupted: &Arc<AtomicBool>) -> Result<()> {
    let plan = Plan {
        subjects,
        jobs: vec![job("fill", &[("rw", "write"), ("bs", "256k"), DEPTH_8])?],
        driver: driver(),
        ..Plan::default()
    };
    run_without_errors(&plan, clock, interrupted, &Progress::silent())
        .context("cannot fill the images")?;
    Ok(())
}
