//! A daemon with the disks of one configuration.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use latency::{Clock, Operation, Span};

use super::study::{Case, Configuration, StudyOptions};
use crate::children::{Daemon, Scratch, Start};
use crate::driver::DriverOptions;
use crate::job::{Job, apply};
use crate::run::{Plan, Progress, run as run_plan};

/// Size of each disk in bytes.
const DISK: u64 = 64 << 20;

/// A daemon with the disks of one configuration, filled.
pub(super) struct Rig {
    // Dropped in this order: the daemon's sockets are in the folder.
    _daemon: Daemon,
    folder: Scratch,
    subjects: Vec<String>,
}

impl Rig {
    /// Starts the daemon; `more`: further arguments of `serve`.
    pub fn start(
        options: &StudyOptions,
        configuration: &Configuration,
        more: &[&str],
    ) -> Result<Rig> {
        let folder = Scratch::for_sockets("lm")?;
        let at = |name: &str| folder.path().join(name);
        let control = at("control");
        let mut command = Start::new(&options.program, None);
        command
            .args(["--log", "warn", "serve", "--control"])
            .arg(&control)
            .args(more);
        if configuration.workers == 0 {
            command.args(["--workers", "1"]);
        } else {
            let cpus: Vec<String> = (0..configuration.workers).map(|n| n.to_string()).collect();
            command.arg("--cpus").arg(cpus.join(","));
        }
        let mut sockets = vec![control];
        let mut subjects = Vec::new();
        let queues = configuration.queues;
        for disk in 0..options.disks {
            let socket = at(&format!("s{disk}"));
            let place = socket.display();
            command.arg("--disk").arg(format!("d{disk}=ram:{DISK}"));
            if configuration.transport == "blk" {
                command
                    .arg("--vhost-blk")
                    .arg(format!("d{disk}:{place},queues={queues}"));
            } else {
                command
                    .arg("--vhost-scsi")
                    .arg(format!("c{disk}:{place},queues={queues}"));
                command.arg("--lun").arg(format!("c{disk}/0:0=d{disk}"));
            }
            subjects.push(format!("vhost-user-{}:{place}", configuration.transport));
            sockets.push(socket);
        }
        let daemon = Daemon::start(command, &at("log"), &sockets)?;
        let rig = Rig {
            _daemon: daemon,
            folder,
            subjects,
        };
        rig.fill()?;
        Ok(rig)
    }

    fn jobs(&self, options: &[(&str, &str)]) -> Result<Vec<Job>> {
        let jobs = self.subjects.iter().map(|subject| {
            let mut job = Job {
                name: subject.clone(),
                filenames: vec![subject.clone()],
                ..Job::default()
            };
            for (option, value) in options {
                apply(&mut job, option, Some(value)).map_err(anyhow::Error::msg)?;
            }
            Ok(job)
        });
        jobs.collect()
    }

    fn fill(&self) -> Result<()> {
        let jobs = self.jobs(&[("rw", "write"), ("bs", "256k"), ("iodepth", "4")])?;
        let plan = plan_of(jobs, false);
        let never = Arc::new(AtomicBool::new(false));
        run_plan(&plan, &Clock::new(), &never, &Progress::silent())
            .context("cannot fill the disks")?;
        Ok(())
    }

    /// Returns the plan of a case.
    pub fn plan(
        &self,
        options: &StudyOptions,
        configuration: &Configuration,
        case: &Case,
    ) -> Result<Plan> {
        let (mixture, rw, reads) = case.mixture;
        let mut jobs = self.jobs(&[
            ("rwmixread", &reads.to_string()),
            ("rw", rw),
            ("iodepth", &case.depth.to_string()),
            ("numjobs", &configuration.queues.to_string()),
            ("norandommap", "1"),
            ("runtime", &format!("{}ms", options.turn.as_millis())),
            ("time_based", "1"),
        ])?;
        jobs.truncate(usize::from(case.disks));
        for job in &mut jobs {
            job.description = mixture.to_owned();
        }
        Ok(Plan {
            warm_up: Duration::from_millis(100),
            retries: 1,
            disturbance_max: 0.1,
            ..plan_of(jobs, options.polling)
        })
    }

    /// Returns the latency histograms of the daemon.
    pub fn snapshot(&self) -> Option<latency::Snapshot> {
        control::get(&self.folder.path().join("control"), "/v1/latency").ok()
    }

    /// Returns the mean time of each step since `before`, for reads and writes together.
    pub fn steps_since(&self, before: Option<latency::Snapshot>) -> Option<Vec<(String, f64)>> {
        let merged = self.snapshot()?.since(&before?).merged();
        let steps = Span::STEPS.into_iter().filter(|span| !span.is_optional());
        let steps = steps.map(|span| {
            let (mut count, mut sum) = (0u64, 0.0);
            for operation in [Operation::Read, Operation::Write] {
                let spans = merged.operations.get(&operation);
                if let Some(histogram) = spans.and_then(|spans| spans.spans.get(&span)) {
                    count += histogram.count;
                    sum += histogram.sum_ns;
                }
            }
            (span.name().to_owned(), sum / count.max(1) as f64)
        });
        Some(steps.collect())
    }
}

fn plan_of(jobs: Vec<Job>, polling: bool) -> Plan {
    Plan {
        jobs,
        driver: DriverOptions {
            polling,
            ..DriverOptions::default()
        },
        ..Plan::default()
    }
}
