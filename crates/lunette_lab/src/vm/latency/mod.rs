//! `lunette vm latency`: time per layer between an application in a guest and the disk.
//!
//! One virtual CPU, one request in flight. Each layer is measured in a separate run with only its instrument enabled (`instruments`); the
//! application's latency in that run is the control. The analysis of traces is pure (`trace`). A last run enables all instruments of the
//! guest and matches their events per request.

mod host_kvm;
mod instruments;
mod measuring;
mod picture;
mod qemu_trace;
mod report;
mod results;
mod slow;
mod trace;

use std::cell::RefCell;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use bench::run::{Disturbance, Environment, environment};
use bench::study::{Page, Progress, write_file};
use clap::{Args, ValueEnum};
use cli_common::{Failure, Outcome, print_line};
use serde_json::{Value, json};

use self::measuring::Measuring;
use self::qemu_trace::QemuTrace;
pub use self::results::{Layer, Measured, Study};
use self::slow::SlowDaemon;
use self::trace::mean;
use super::failed;
use super::study::content::Content;
use super::study::engine::{DiskFiles, job_on_host, on_host, remove_host_files, study_folder};
use super::study::guest::{Planned, StudyGuest};
use super::study::report::{caution, write_json, write_partial};
use super::study::{Case, DiskRoute, Effort, Setup, quietly, study_failed};
use crate::idle_poll::IdlePoll;
use crate::image::parse_bytes;

/// `lunette vm latency`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct LatencyArguments {
    /// Transports to measure
    #[arg(long, value_enum, default_value = "both")]
    transport: Transports,
    /// Emulator of the device
    #[arg(long, value_enum, default_value = "lunette")]
    device: Device,
    /// Patterns to measure, such as randread or write
    #[arg(
        long,
        value_name = "PATTERN,PATTERN",
        default_value = "randread,randwrite",
        value_delimiter = ','
    )]
    rw: Vec<String>,
    /// Duration of each run in seconds, 0.05 to 600
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    time: f64,
    /// Size of each disk in bytes, or with K, M, G (powers of 1024)
    #[arg(long, default_value = "64M", value_name = "SIZE")]
    size: String,
    /// Folder for disk files and charts
    #[arg(long, default_value = "lunette-latency", value_name = "FOLDER")]
    folder: PathBuf,
    /// Block device to use as the disk, instead of a file. The study overwrites it. Each transport then has a separate guest
    #[arg(long, value_name = "DEVICE", conflicts_with_all = ["size", "delay"])]
    block: Option<PathBuf>,
    /// Use a disk that delays each I/O by this time, such as 200us, instead of a file. The table then shows which layers include the
    /// delay
    #[arg(long, value_name = "TIME")]
    delay: Option<String>,
    /// Polling of the daemon's workers. Polling workers suppress most notifications, so few requests then have a notification. `both`
    /// prints a second table, measured with polling. Without a value: only
    #[arg(long, value_enum, default_value = "both", value_name = "WHEN", num_args = 0..=1, default_missing_value = "only")]
    polling: Polling,
    /// Content of the disks
    #[command(flatten)]
    content: Content,
    /// Sleep states of the host's CPUs
    #[command(flatten)]
    idle: IdlePoll,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Polling of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Polling {
    /// Workers sleep immediately
    No,
    /// Workers poll
    Only,
    /// Two tables: without polling, and with polling
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transports {
    /// virtio-blk
    Blk,
    /// virtio-scsi
    Scsi,
    /// Both, one after the other
    Both,
}

/// Device emulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Device {
    /// Lunette
    Lunette,
    /// QEMU, in its main loop
    Qemu,
    /// QEMU, in an I/O thread
    QemuIothread,
}

const AFTER: &str = "\
The guest has one CPU. The job has one request of 4 KiB in flight and bypasses the page cache. Each layer is measured in a separate run, with only
its instrument enabled. The control column has the latency that the application measured in that run. It shows whether the instrument disturbs the
measurement.

Examples:
    lunette vm latency
    lunette vm latency --transport scsi --rw randread
    lunette vm latency --device qemu-iothread
    lunette vm latency --block /dev/nvme1n1
    lunette vm latency --delay 200us";

fn case(pattern: &str) -> Case {
    Case {
        name: pattern.to_owned(),
        pattern: pattern.to_owned(),
        reads: 100,
        depth: 1,
        block_size: "4k".to_owned(),
        files: None,
        job_file: None,
    }
}

fn ways(arguments: &LatencyArguments, transport: Transports, folder: &str) -> Vec<DiskRoute> {
    let via = match arguments.device {
        Device::Lunette => "",
        Device::Qemu => ",via=qemu",
        Device::QemuIothread => ",via=qemu-iothread",
    };
    let backing = match &arguments.block {
        Some(device) => format!("backing=block:{}", device.display()),
        None => format!("backing=file:{folder},size={}", arguments.size),
    };
    let way = |name: &str, words: &str| {
        let words = format!("{words}{via},queues=1,{backing}");
        DiskRoute::new(name.to_owned(), Some(words), 1)
    };
    let (blk, scsi) = (way("virtio-blk", "blk:1"), way("virtio-scsi", "scsi:1x1"));
    match transport {
        Transports::Blk => vec![blk],
        Transports::Scsi => vec![scsi],
        Transports::Both => vec![blk, scsi],
    }
}

impl LatencyArguments {
    /// Returns the work of the study.
    pub fn effort(&self) -> Result<Effort, Failure> {
        let is_both = self.polling == Polling::Both && self.device == Device::Lunette;
        let guests = if is_both { 2 } else { 1 };
        let ways = ways(self, self.transport, "/");
        let runs = Measuring::runs_of(self, &ways);
        let size = parse_bytes(&self.size).map_err(Failure::mistake)?;
        Ok(Effort {
            boots: guests,
            runs: guests * runs,
            seconds: self.time,
            written: u64::from(guests) * (ways.len() + 1) as u64 * size,
        })
    }
}

pub fn run(arguments: &LatencyArguments) -> Outcome {
    vm::watch().map_err(failed)?;
    let _awake = arguments.idle.hold()?;
    if !(0.05..=600.0).contains(&arguments.time) {
        return Err(Failure::mistake("--time: must be 0.05 to 600 seconds"));
    }
    if arguments.delay.is_some() && arguments.device != Device::Lunette {
        return Err(Failure::mistake(
            "--delay needs a disk of Lunette; hint: omit --device",
        ));
    }
    if arguments.polling == Polling::Only && arguments.device != Device::Lunette {
        return Err(Failure::mistake(
            "--polling only is for Lunette's workers; hint: omit --device",
        ));
    }
    let size =
        parse_bytes(&arguments.size).map_err(|why| Failure::mistake(format!("--size: {why}")))?;
    let folder = study_folder(
        &arguments.folder,
        Some("choose a --folder on another file system"),
    )?;
    let (studies, guests) = all_studies(arguments, &folder, size)?;
    if vm::interrupted() {
        return interrupted(&studies, &folder);
    }
    let accelerator = guests.accelerator.as_str();
    let environment = environment();
    let notes = conditions(arguments, &guests, &environment);
    let svg = picture::svg(&studies, &notes);
    let picture = write_file(&folder, "latency.svg", svg.as_bytes()).map_err(failed)?;
    let about = "Each layer has a separate run with its instrument alone; the control is the application's figure in that run.";
    let page = Page {
        title: "Latency by layer in a guest".to_owned(),
        about: notes.iter().cloned().chain([about.to_owned()]).collect(),
        cautions: caution(accelerator)
            .map(str::to_owned)
            .into_iter()
            .collect(),
        pictures: vec![("Mean time of a request in each layer".to_owned(), svg)],
        texts: studies.iter().map(Study::text).collect(),
        ..Page::default()
    };
    let at = write_file(&folder, "report.html", page.html().as_bytes()).map_err(failed)?;
    let all: Vec<Value> = studies.iter().map(Study::json).collect();
    let document = json!({"accelerator": accelerator, "guest": guests.description, "conditions": notes,
        "environment": environment, "studies": all});
    write_json(&folder, &document).map_err(failed)?;
    let mut stdout = cli_common::stdout();
    if arguments.json {
        return Ok(writeln!(stdout, "{document:#}")?);
    }
    for text in &page.texts {
        writeln!(stdout, "{text}\n")?;
    }
    for note in caution(accelerator)
        .into_iter()
        .chain(notes.iter().map(String::as_str))
    {
        writeln!(stdout, "{note}")?;
    }
    Ok(writeln!(
        stdout,
        "page: {}\npicture: {}",
        at.display(),
        picture.display()
    )?)
}

/// Measures all transports, without and with polling. Returns the studies until an interruption.
fn all_studies(
    arguments: &LatencyArguments,
    folder: &std::path::Path,
    size: u64,
) -> Result<(Vec<Study>, Guests), Failure> {
    let is_ours = arguments.device == Device::Lunette;
    let polls: &[bool] = match arguments.polling {
        Polling::Both if is_ours => &[false, true],
        Polling::Only if is_ours => &[true],
        _ => &[false],
    };
    let (mut studies, mut guests) = (Vec::new(), Guests::default());
    // Two devices of one guest cannot have the same block device.
    let transports = match (arguments.transport, &arguments.block) {
        (Transports::Both, Some(_)) => vec![Transports::Blk, Transports::Scsi],
        (transport, _) => vec![transport],
    };
    if let Some(device) = &arguments.block {
        arguments.content.device(device).map_err(study_failed)?;
    }
    let runs = Measuring::runs_of(arguments, &ways(arguments, arguments.transport, "/"));
    let progress = RefCell::new(Progress::new(polls.len() * runs as usize));
    for polls in polls {
        for transport in &transports {
            let found = self::studies(arguments, *transport, *polls, folder, size, &progress);
            let (more, guest) = match found {
                Err(_) if vm::interrupted() => break,
                found => found.map_err(failed)?,
            };
            studies.extend(more);
            guests = guest;
        }
        if vm::interrupted() {
            break;
        }
    }
    Ok((studies, guests))
}

/// Describes guests, disk and runs, and then the host.
fn conditions(
    arguments: &LatencyArguments,
    guests: &Guests,
    environment: &Environment,
) -> [String; 2] {
    let disk = match (&arguments.block, &arguments.delay) {
        (Some(device), _) => device.display().to_string(),
        (None, Some(delay)) => format!(
            "a disk of {} in memory that delays each I/O by {delay}",
            arguments.size
        ),
        (None, None) => format!("a disk of {} in a file", arguments.size),
    };
    [
        format!(
            "{}; one virtual CPU, one request of 4 KiB in flight, {disk}, {}; runs of {} s. Bars are means of all requests that the instrument saw.",
            guests.description,
            arguments.content.describe(),
            arguments.time
        ),
        format!("Host: {}.", environment.provenance()),
    ]
}

/// Prints and saves the layers that an interrupted run has measured.
fn interrupted(studies: &[Study], folder: &std::path::Path) -> Outcome {
    for study in studies {
        writeln!(cli_common::stdout(), "{}\n", study.text())?;
    }
    if !studies.is_empty() {
        let all: Vec<Value> = studies.iter().map(Study::json).collect();
        write_partial(folder, &json!({"studies": all})).map_err(failed)?;
    }
    Err(Failure::Interrupted)
}

/// Guests of the studies.
#[derive(Default)]
struct Guests {
    /// `KVM` or `TCG`.
    accelerator: String,
    /// Accelerator, QEMU's version and kernel.
    description: String,
}

fn studies(
    arguments: &LatencyArguments,
    transport: Transports,
    polls: bool,
    folder: &std::path::Path,
    size: u64,
    progress: &RefCell<Progress>,
) -> Result<(Vec<Study>, Guests)> {
    let name = format!("latency-{}", std::process::id());
    let mut options = Vec::new();
    if !polls && arguments.device == Device::Lunette {
        options.push("--daemon-arg=--poll=off".to_owned());
    }
    let mut setup = Setup {
        name: "guest".to_owned(),
        options,
        ways: ways(arguments, transport, &folder.display().to_string()),
    };
    let mut more = vec!["--smp".to_owned(), "1".to_owned()];
    let slow = match &arguments.delay {
        Some(delay) => Some(SlowDaemon::start(delay, &arguments.size, !polls, folder)?),
        None => None,
    };
    if let Some(slow) = &slow {
        more.extend(["--control".to_owned(), slow.control.display().to_string()]);
        setup.options.clear();
        for (way, disk) in setup.ways.iter_mut().zip(["d0", "d1"]) {
            let kind = if way.variant.name == "virtio-blk" {
                "blk:1"
            } else {
                "scsi:1x1"
            };
            way.words = Some(format!("{kind},queues=1,backing=daemon:{disk}"));
        }
    }
    let planned = Planned::new(&setup, &name, &more)?;
    let files = DiskFiles::create(&planned, arguments.content)?;
    let qemu = (arguments.device != Device::Lunette).then(|| QemuTrace::new(folder));
    setup
        .options
        .extend(qemu.iter().flat_map(QemuTrace::options));
    let guest = planned.start(&setup, &name, &folder.join("guest.log"))?;
    let guests = Guests {
        accelerator: guest.accelerator().to_owned(),
        description: guest.describe()?,
    };
    let all = AllStudies {
        arguments,
        polls,
        qemu: qemu.as_ref(),
        folder,
        size,
        progress,
    };
    let measured = fill(arguments, &guest).and_then(|()| all.run(&setup, &guest));
    let ended = guest.end();
    if let Some(qemu) = &qemu {
        qemu.remove();
    }
    drop(files);
    remove_host_files(folder);
    let measured = measured?;
    // Partial results are better than an error of a guest that the same signal ended.
    if !vm::interrupted() {
        ended?;
    }
    Ok((measured, guests))
}

/// Writes the delayed disks, which are in the memory of their daemon.
fn fill(arguments: &LatencyArguments, guest: &StudyGuest) -> Result<()> {
    let mut disks = guest.disks().iter().filter(|_| arguments.delay.is_some());
    disks.try_for_each(|disks| arguments.content.in_guest(guest, disks))
}

/// Common data of all studies of a guest.
struct AllStudies<'a> {
    arguments: &'a LatencyArguments,
    polls: bool,
    qemu: Option<&'a QemuTrace>,
    folder: &'a std::path::Path,
    size: u64,
    progress: &'a RefCell<Progress>,
}

impl AllStudies<'_> {
    fn run(&self, setup: &Setup, guest: &StudyGuest) -> Result<Vec<Study>> {
        let mut studies = Vec::new();
        for pattern in &self.arguments.rw {
            for (number, (way, disks)) in setup.ways.iter().zip(guest.disks()).enumerate() {
                print_line(&format_args!("{}, {pattern}", way.variant.name));
                let disk = disks.first().context("the guest has no disk")?;
                let measuring = Measuring {
                    arguments: self.arguments,
                    qemu: self.qemu,
                    guest,
                    disk,
                    // The daemon's disks are in the order of the ways.
                    served: format!("d{number}"),
                    case: case(pattern),
                    progress: self.progress,
                };
                let mut study = measuring.empty_study(way);
                if self.polls {
                    study.title.push_str(", workers poll");
                }
                let measured = measuring.measure(&mut study, way);
                if vm::interrupted() {
                    studies.extend(Some(study).filter(|study| !study.layers.is_empty()));
                    return Ok(studies);
                }
                measured?;
                let host = || host(self.arguments, pattern, self.folder, self.size);
                let host = quietly("Host, no guest", guest, host);
                let host = host.map(|(layer, load)| study.layers.push(Layer { load, ..layer }));
                if self.arguments.delay.is_none() {
                    measuring.count("Host, no guest", 1);
                }
                studies.push(study);
                if vm::interrupted() {
                    return Ok(studies);
                }
                host?;
            }
        }
        Ok(studies)
    }
}

/// Runs the same job on a file of the same folder or on the block device, without a guest.
fn host(
    arguments: &LatencyArguments,
    pattern: &str,
    folder: &std::path::Path,
    size: u64,
) -> Result<Layer> {
    let found = match arguments.delay {
        Some(_) => Err("not measured, because only Lunette serves a disk with --delay".to_owned()),
        None => {
            let job =
                |files: &[String]| case(pattern).job(files, (arguments.time * 1e3) as u64, true);
            let document = match &arguments.block {
                Some(device) => job_on_host(folder, std::slice::from_ref(device), &job)?,
                None => on_host(folder, arguments.content, 1, size, &job)?,
            };
            application(&document, pattern).map(|(mean, ios)| all_seen(mean, ios))
        }
    };
    Ok(Layer {
        name: "Host, no guest".to_owned(),
        found,
        control_ns: None,
        is_part: false,
        load: Disturbance::default(),
    })
}

/// The generator's mean over all requests, and their number.
fn application(document: &Value, pattern: &str) -> Result<(f64, usize), String> {
    let side = if pattern.ends_with("write") {
        "write"
    } else {
        "read"
    };
    let job = &document["jobs"][0][side];
    match (job["lat_ns"]["mean"].as_f64(), job["total_ios"].as_u64()) {
        (Some(mean), Some(ios)) if ios > 0 => Ok((mean, ios as usize)),
        _ => Err("the job made no requests".to_owned()),
    }
}

/// Returns the mean of the requests that an instrument saw, of `ios` requests.
fn seen(found: &[u64], ios: usize) -> Result<Measured, String> {
    let mean_ns = mean(found).ok_or_else(|| format!("seen of 0 of {ios} requests"))?;
    Ok(Measured {
        mean_ns,
        requests: found.len(),
        // The instrument also sees a request at the edge of the measured time, which the job does not count.
        of_requests: ios.max(found.len()),
    })
}

/// Returns the result of an instrument that sees all requests.
fn all_seen(mean_ns: f64, requests: usize) -> Measured {
    Measured {
        mean_ns,
        requests,
        of_requests: requests,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Words {
        #[command(flatten)]
        arguments: LatencyArguments,
    }

    fn parsed(words: &[&str]) -> LatencyArguments {
        let words = [&["latency"], words].concat();
        <Words as clap::Parser>::parse_from(words).arguments
    }

    fn disk(words: &[&str]) -> String {
        let guests = Guests::default();
        let [load, _] = conditions(&parsed(words), &guests, &Environment::default());
        load
    }

    #[test]
    fn a_block_device_is_the_disk_of_each_transport() {
        let arguments = parsed(&["--block", "/dev/nvme1n1", "--device", "qemu"]);
        let ways = ways(&arguments, Transports::Both, "/folder");
        let words = ways.iter().filter_map(|way| way.words.as_deref());
        assert_eq!(
            words.collect::<Vec<_>>(),
            [
                "blk:1,via=qemu,queues=1,backing=block:/dev/nvme1n1",
                "scsi:1x1,via=qemu,queues=1,backing=block:/dev/nvme1n1"
            ]
        );
        let wanted = "/dev/nvme1n1, written before the measurement";
        assert!(disk(&["--block", "/dev/nvme1n1"]).contains(wanted));
    }

    #[test]
    fn conditions_name_the_disk_and_its_content() {
        let delayed = "a disk of 64M in memory that delays each I/O by 200us, written before";
        assert!(disk(&["--delay", "200us"]).contains(delayed));
        assert!(disk(&[]).contains("a disk of 64M in a file, written before"));
        assert!(disk(&["--unwritten"]).contains("a disk of 64M in a file, never written"));
    }

    /// The plan of runs is that of the progress and of the estimate.
    #[test]
    fn runs_are_counted_for_each_transport_and_pattern() {
        let runs = |words: &[&str]| parsed(words).effort().unwrap().runs;
        // Warm-up, three of the application, three layers, KVM, matched requests and the host.
        let blk = ["--transport", "blk", "--rw", "randread", "--polling", "no"];
        assert_eq!(runs(&blk), 10);
        assert_eq!(runs(&[&blk[..], &["--delay", "1ms"]].concat()), 9);
        assert_eq!(runs(&[&blk[..], &["--device", "qemu"]].concat()), 11);
        assert_eq!(runs(&["--rw", "randread,randwrite"]), 2 * 2 * (10 + 11));
    }
}
