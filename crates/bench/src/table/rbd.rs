//! `make bench-rbd`: Lunette's transports beside qemu-storage-daemon, each on an image of one Ceph cluster, in turns, one table.
//!
//! The cluster is there already; both images are overwritten. Both daemons run on one CPU, with librbd's threads, and have
//! no cache. The driver waits for interrupts, so that the cluster has a CPU where it runs on the same machine.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use latency::Clock;

use super::{BLK, Line, PEER, SCSI, TableOptions, chosen, idle_cpu, render};
use crate::children::{Daemon, Scratch, Start};
use crate::driver::{DriverOptions, Subject};
use crate::job::{Job, apply};
use crate::run::{Plan, Progress, run_without_errors};

/// The cluster and its images.
#[derive(Clone, Debug)]
pub struct RbdPlace {
    /// Ceph's configuration file, which also says where the user's keyring is.
    pub conf: PathBuf,
    /// The user, without `client.`.
    pub id: String,
    /// `POOL/IMAGE` that Lunette serves.
    pub image: String,
    /// `POOL/IMAGE` that qemu-storage-daemon serves.
    pub peer_image: String,
}

pub(super) type Case = (&'static str, &'static [(&'static str, &'static str)]);

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

/// A daemon that serves, and its sockets by the subjects' names.
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

/// Makes the table; gives it as text for a terminal and for a file of notes.
pub fn rbd_table(
    options: &TableOptions,
    rbd: &RbdPlace,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<String> {
    chosen(options, CASES.iter().map(|(name, _)| *name))?;
    ensure!(
        rbd.image != rbd.peer_image,
        "both daemons would write the image {}",
        rbd.image
    );
    let clock = Clock::new();
    let folder = Scratch::for_sockets("lr")?;
    progress.say("starting the daemons and filling their images");
    let mut daemons = vec![lunette(options, rbd, folder.path())?];
    match qemu(options, rbd, folder.path()) {
        Ok(peer) => daemons.push(peer),
        Err(error) => progress.say(&format!(
            "without qemu-storage-daemon (Debian: apt-get install qemu-system-common qemu-block-extra): {error:#}"
        )),
    }
    fill_all(&daemons, &clock, interrupted)?;
    measure(&daemons, options, interrupted, progress)
}

/// Fills the disks. The last transport of a daemon that has several serves a disk that another one does.
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

/// Runs the chosen cases on all subjects in turns.
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

fn lunette(options: &TableOptions, rbd: &RbdPlace, folder: &Path) -> Result<Served> {
    let socket = |name: &str| folder.join(name);
    let (blk, scsi, control) = (socket("blk"), socket("scsi"), socket("control"));
    let mut command = Start::new(&options.program, Some(options.device_cpu));
    command.args(["--log", "warn", "serve", "--cpus"]);
    command.arg(options.device_cpu.to_string());
    command.arg("--control").arg(&control);
    command.args([
        "--disk",
        &format!(
            "d0=rbd:{},conf={},id={},require",
            rbd.image,
            rbd.conf.display(),
            rbd.id
        ),
    ]);
    command.args(["--vhost-blk", &format!("d0:{}", blk.display())]);
    command.args(["--vhost-scsi", &format!("c0:{}", scsi.display())]);
    command.args(["--lun", "c0/0:0=d0"]);
    let sockets = [control, blk.clone(), scsi.clone()];
    Ok(Served {
        name: "lunette",
        daemon: Daemon::start(command, &folder.join("lunette.log"), &sockets)?,
        sockets: vec![(BLK, blk), (SCSI, scsi)],
    })
}

/// Debian's qemu-storage-daemon with its rbd driver, its cache off as ours is.
fn qemu(options: &TableOptions, rbd: &RbdPlace, folder: &Path) -> Result<Served> {
    let socket = folder.join("qemu");
    let (pool, image) = rbd
        .peer_image
        .split_once('/')
        .context("an image is named POOL/IMAGE")?;
    let mut command = Start::new(Path::new("qemu-storage-daemon"), Some(options.device_cpu));
    command.arg("--blockdev").arg(format!(
        "driver=rbd,node-name=d0,pool={pool},image={image},conf={},user={},cache.direct=on",
        rbd.conf.display(),
        rbd.id
    ));
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={},writable=on",
        socket.display()
    ));
    let sockets = std::slice::from_ref(&socket);
    Ok(Served {
        name: PEER,
        daemon: Daemon::start(command, &folder.join("qemu.log"), sockets)?,
        sockets: vec![(PEER, socket)],
    })
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

/// What was never written is read without asking an OSD for data.
fn fill(subjects: Vec<Subject>, clock: &Clock, interrupted: &Arc<AtomicBool>) -> Result<()> {
    let plan = Plan {
        subjects,
        jobs: vec![job("fill", &[("rw", "write"), ("bs", "256k"), DEPTH_8])?],
        driver: driver(),
        ..Plan::default()
    };
    run_without_errors(&plan, clock, interrupted, &Progress::silent())
        .context("filling the images")?;
    Ok(())
}
