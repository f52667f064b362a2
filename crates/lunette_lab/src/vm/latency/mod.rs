//! `lunette vm latency`: where the time goes between an application in a guest and the disk, layer by layer.
//!
//! One virtual CPU, one request in flight. For each layer there is a run with only its instrument on (`instruments`), whose own figure
//! of the application is its control. What a trace says of requests is pure (`trace`). A last run has all instruments of the guest at once,
//! and matches them request by request.

mod instruments;
mod picture;
mod report;
mod slow;
mod trace;

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use cli_common::{Failure, Outcome, say};
use latency::Snapshot;
use serde_json::{Value, json};

use self::instruments::{BLOCK, DRIVER, Instrument, SCSI, VIRTIO_PCI, all_of};
use self::slow::SlowDaemon;
use self::trace::{mean, parts, spans};
use super::failed;
use super::study::engine::{fill, on_host, remove_host_files, study_folder};
use super::study::guest::{Planned, StudyGuest};
use super::study::report::caution;
use super::study::{Case, Setup, Way};
use crate::idle_poll::IdlePoll;
use crate::image::parse_bytes;

/// `lunette vm latency`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct LatencyArguments {
    /// Transports that are studied
    #[arg(long, value_enum, default_value = "both")]
    transport: Transports,
    /// Who emulates the device
    #[arg(long, value_enum, default_value = "lunette")]
    device: Device,
    /// Patterns
    #[arg(
        long,
        value_name = "PATTERN,PATTERN",
        default_value = "randread,randwrite",
        value_delimiter = ','
    )]
    rw: Vec<String>,
    /// Seconds of each run
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    time: f64,
    /// Bytes of each disk
    #[arg(long, default_value = "64M", value_name = "SIZE")]
    size: String,
    /// Where disks' files and pictures go
    #[arg(long, default_value = "lunette-latency", value_name = "FOLDER")]
    folder: PathBuf,
    /// A disk that takes so long for each I/O, such as 200us, instead of a file: shows which layers see it
    #[arg(long, value_name = "TIME")]
    delay: Option<String>,
    /// Let the daemon poll as it does by default: it suppresses notifications then, and that layer has no figure
    #[arg(long)]
    polling: bool,
    /// Whether CPUs of the host sleep
    #[command(flatten)]
    idle: IdlePoll,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transports {
    /// virtio-blk
    Blk,
    /// virtio-scsi
    Scsi,
    /// Both, one after the other
    Both,
}

/// Who emulates a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Device {
    /// Lunette
    Lunette,
    /// QEMU, in its main loop
    Qemu,
    /// QEMU, in a thread for I/O
    QemuIothread,
}

const AFTER: &str = "\
The guest has one CPU, and the job one request of 4 KiB in flight, past the page cache. Each layer is measured in a run of its own with only its
instrument on; the control beside it is the application's figure in that run, so that an instrument that disturbs is seen.

Examples:
    lunette vm latency
    lunette vm latency --transport scsi --rw randread
    lunette vm latency --device qemu-iothread
    lunette vm latency --delay 200us";

/// One layer's figures.
#[derive(Clone, Debug)]
pub struct Layer {
    pub name: String,
    /// Mean, and requests that it is of. `Err`: why there is none.
    pub found: Result<(f64, usize), String>,
    /// The application's mean in the same run.
    pub control_ns: Option<f64>,
    /// It is a part of the layer above it.
    pub is_part: bool,
}

/// All layers of one transport and pattern.
pub struct Study {
    pub title: String,
    pub layers: Vec<Layer>,
    pub matched: Matched,
}

/// Requests that passed all instruments of the guest.
#[derive(Default)]
pub struct Matched {
    /// Between neighbouring instruments: name and mean.
    pub parts: Vec<(String, f64)>,
    /// How many there were.
    pub requests: usize,
    /// The application's mean in that run.
    pub control_ns: f64,
}

fn case(pattern: &str) -> Case {
    Case {
        name: pattern.to_owned(),
        pattern: pattern.to_owned(),
        reads: 100,
        depth: 1,
        block_size: "4k".to_owned(),
        files: None,
    }
}

fn ways(arguments: &LatencyArguments, folder: &str) -> Vec<Way> {
    let via = match arguments.device {
        Device::Lunette => "",
        Device::Qemu => ",via=qemu",
        Device::QemuIothread => ",via=qemu-iothread",
    };
    let backing = format!("backing=file:{folder},size={}", arguments.size);
    let way = |name: &str, words: &str| Way {
        name: name.to_owned(),
        words: Some(format!("{words}{via},queues=1,{backing}")),
        disks: 1,
        choices: Vec::new(),
    };
    let (blk, scsi) = (way("virtio-blk", "blk:1"), way("virtio-scsi", "scsi:1x1"));
    match arguments.transport {
        Transports::Blk => vec![blk],
        Transports::Scsi => vec![scsi],
        Transports::Both => vec![blk, scsi],
    }
}

/// Measures and prints.
pub fn run(arguments: &LatencyArguments) -> Outcome {
    vm::watch().map_err(failed)?;
    let _awake = arguments.idle.hold()?;
    if !(0.05..=600.0).contains(&arguments.time) {
        return Err(Failure::mistake("--time: must be 0.05 to 600 seconds"));
    }
    if arguments.delay.is_some() && arguments.device != Device::Lunette {
        return Err(Failure::mistake(
            "--delay is a disk of Lunette's; leave --device away",
        ));
    }
    let size =
        parse_bytes(&arguments.size).map_err(|why| Failure::mistake(format!("--size: {why}")))?;
    let folder = study_folder(&arguments.folder, Some("--folder on another one"))?;
    let (studies, accelerator) = studies(arguments, &folder, size).map_err(failed)?;
    let mut stdout = std::io::stdout().lock();
    if arguments.json {
        let all: Vec<Value> = studies.iter().map(Study::json).collect();
        return Ok(writeln!(
            stdout,
            "{:#}",
            json!({"accelerator": accelerator, "studies": all})
        )?);
    }
    for study in &studies {
        writeln!(stdout, "{}\n", study.text())?;
    }
    let picture = folder.join("latency.svg");
    let svg = picture::svg(&studies);
    std::fs::write(&picture, svg)
        .map_err(|error| Failure::because(format!("{}: {error}", picture.display())))?;
    if let Some(caution) = caution(&accelerator) {
        writeln!(stdout, "{caution}")?;
    }
    Ok(writeln!(stdout, "picture: {}", picture.display())?)
}

fn studies(
    arguments: &LatencyArguments,
    folder: &std::path::Path,
    size: u64,
) -> Result<(Vec<Study>, String)> {
    let name = format!("latency-{}", std::process::id());
    let mut options = Vec::new();
    if !arguments.polling && arguments.device == Device::Lunette {
        options.push("--daemon-arg=--poll-us=0".to_owned());
    }
    let mut setup = Setup {
        name: "guest".to_owned(),
        options,
        ways: ways(arguments, &folder.display().to_string()),
    };
    let mut more = vec!["--smp".to_owned(), "1".to_owned()];
    let slow = match &arguments.delay {
        Some(delay) => Some(SlowDaemon::start(
            delay,
            &arguments.size,
            !arguments.polling,
            folder,
        )?),
        None => None,
    };
    if let Some(slow) = &slow {
        more.extend(["--control".to_owned(), slow.control.display().to_string()]);
        setup.options.clear();
        for (way, disk) in setup.ways.iter_mut().zip(["d0", "d1"]) {
            let kind = if way.name == "virtio-blk" {
                "blk:1"
            } else {
                "scsi:1x1"
            };
            way.words = Some(format!("{kind},queues=1,backing=daemon:{disk}"));
        }
    }
    let planned = Planned::new(&setup, &name, &more)?;
    let files = planned.files();
    for (file, size) in &files {
        fill(file, *size)?;
    }
    let guest = planned.start(&setup, &name, &folder.join("guest.log"))?;
    let accelerator = guest.accelerator().to_owned();
    let measured = all_studies(arguments, &setup, &guest, folder, size);
    let ended = guest.end();
    for (file, _) in &files {
        std::fs::remove_file(file).ok();
    }
    remove_host_files(folder);
    let measured = measured?;
    ended?;
    Ok((measured, accelerator))
}

fn all_studies(
    arguments: &LatencyArguments,
    setup: &Setup,
    guest: &StudyGuest,
    folder: &std::path::Path,
    size: u64,
) -> Result<Vec<Study>> {
    let mut studies = Vec::new();
    for pattern in &arguments.rw {
        for (way, disks) in setup.ways.iter().zip(guest.disks()) {
            say(&format_args!("{}, {pattern}", way.name));
            let disk = disks.first().context("the guest has no disk")?;
            let mut study = Measuring {
                arguments,
                guest,
                disk,
                case: case(pattern),
            }
            .study(way)?;
            study.layers.push(host(arguments, pattern, folder, size)?);
            studies.push(study);
        }
    }
    Ok(studies)
}

/// The same job on a file of the same folder, without a guest.
fn host(
    arguments: &LatencyArguments,
    pattern: &str,
    folder: &std::path::Path,
    size: u64,
) -> Result<Layer> {
    let found = match arguments.delay {
        Some(_) => Err("a delayed disk is Lunette's own".to_owned()),
        None => {
            let document = on_host(folder, 1, size, &|files| {
                case(pattern).job(files, (arguments.time * 1e3) as u64, true)
            })?;
            application(&document, pattern)
        }
    };
    Ok(Layer {
        name: "Host, no guest".to_owned(),
        found,
        control_ns: None,
        is_part: false,
    })
}

/// The generator's mean of all requests.
fn application(document: &Value, pattern: &str) -> Result<(f64, usize), String> {
    let side = if pattern.ends_with("write") {
        "write"
    } else {
        "read"
    };
    let job = &document["jobs"][0][side];
    match (job["lat_ns"]["mean"].as_f64(), job["total_ios"].as_u64()) {
        (Some(mean), Some(ios)) if ios > 0 => Ok((mean, ios as usize)),
        _ => Err("the job did nothing".to_owned()),
    }
}

struct Measuring<'a> {
    arguments: &'a LatencyArguments,
    guest: &'a StudyGuest,
    disk: &'a str,
    case: Case,
}

impl Measuring<'_> {
    fn run(&self) -> Result<(f64, usize)> {
        let milliseconds = (self.arguments.time * 1e3) as u64;
        let job = self.case.job(&[self.disk.to_owned()], milliseconds, true);
        let document = self.guest.run(&job)?;
        application(&document, &self.case.pattern).map_err(anyhow::Error::msg)
    }

    fn study(&self, way: &Way) -> Result<Study> {
        let is_scsi = way.name == "virtio-scsi";
        // The first run warms up.
        self.run()?;
        let before = self.device()?;
        let (whole, ios) = self.run()?;
        let after = self.device()?;
        let mut layers = vec![Layer {
            name: "Guest application".to_owned(),
            found: Ok((whole, ios)),
            control_ns: None,
            is_part: false,
        }];
        let instruments: &[Instrument] = match is_scsi {
            true => &[BLOCK, DRIVER, SCSI, VIRTIO_PCI],
            false => &[BLOCK, DRIVER, VIRTIO_PCI],
        };
        for instrument in instruments {
            layers.push(self.layer(instrument)?);
        }
        layers.push(Layer {
            name: "Host kvm".to_owned(),
            found: Err(match self.guest.accelerator() {
                "KVM" => "exits and injections are not traced yet".to_owned(),
                other => format!("no KVM: the guest runs under {other}"),
            }),
            control_ns: None,
            is_part: false,
        });
        layers.extend(self.of_device(before, after, whole));
        let (instrument, points) = all_of(is_scsi);
        Ok(Study {
            title: format!("{}, {}, 4 KiB, one in flight", way.name, self.case.pattern),
            layers,
            matched: self.matched(&instrument, &points)?,
        })
    }

    fn layer(&self, instrument: &Instrument) -> Result<Layer> {
        let mut layer = Layer {
            name: instrument.name.to_owned(),
            found: Err(String::new()),
            control_ns: None,
            is_part: false,
        };
        if let Err(error) = instrument.start(self.guest) {
            layer.found = Err(format!("{error:#}"));
            return Ok(layer);
        }
        let control = self.run();
        let events = instrument.stop(self.guest, self.disk)?;
        let (control, ios) = control?;
        let found = spans(&events, instrument.from, instrument.to);
        layer.control_ns = Some(control);
        layer.found = match mean(&found) {
            // A device that polls is not notified of every request.
            Some(mean) if found.len() * 10 >= ios * 9 => Ok((mean, found.len())),
            _ => Err(format!("seen of {} of {ios} requests", found.len())),
        };
        Ok(layer)
    }

    fn matched(&self, instrument: &Instrument, points: &[trace::Point]) -> Result<Matched> {
        if instrument.start(self.guest).is_err() {
            return Ok(Matched::default());
        }
        let control = self.run();
        let events = instrument.stop(self.guest, self.disk)?;
        let requests = parts(&events, points);
        let names = points
            .windows(2)
            .map(|pair| format!("{:?} to {:?}", pair[0], pair[1]).to_lowercase());
        let of = |at: usize| {
            let each: Vec<u64> = requests.iter().map(|parts| parts[at]).collect();
            let sum: u64 = each.iter().sum();
            sum as f64 / each.len().max(1) as f64
        };
        let parts = names.enumerate().map(|(at, name)| (name, of(at))).collect();
        Ok(Matched {
            parts,
            requests: requests.len(),
            control_ns: control?.0,
        })
    }

    /// What the daemon measured so far; `None`: QEMU emulates the device.
    fn device(&self) -> Result<Option<Snapshot>> {
        match self.guest.control() {
            None => Ok(None),
            Some(control) => {
                let path = control::latency_path(None, 0);
                let snapshot = control::Client::new(control).get(&path);
                snapshot
                    .map(Some)
                    .context("the daemon does not say what it measured")
            }
        }
    }

    /// The device as a whole and its stages, and the block device below it.
    fn of_device(
        &self,
        before: Option<Snapshot>,
        after: Option<Snapshot>,
        control: f64,
    ) -> Vec<Layer> {
        let layer = |name: String, found, is_part| Layer {
            name,
            found,
            control_ns: Some(control),
            is_part,
        };
        let (Some(before), Some(after)) = (before, after) else {
            let why = "QEMU does not measure its devices".to_owned();
            return vec![layer("Device (QEMU)".to_owned(), Err(why), false)];
        };
        let since = after.since(&before);
        let spans = device_spans(&since);
        let mut layers = Vec::new();
        let missing = || Err("no request passed it".to_owned());
        for (name, title) in [
            ("whole", "Device (noticed to notified)"),
            ("reaped", "Block device (submitted to reaped)"),
        ] {
            let found = spans.iter().find(|(span, ..)| span == name);
            let found = found.map_or_else(missing, |(_, mean, count)| Ok((*mean, *count)));
            layers.push(layer(title.to_owned(), found, false));
        }
        let stages = spans.into_iter().filter(|(span, ..)| span != "whole");
        let stages =
            stages.map(|(span, mean, count)| layer(format!("  {span}"), Ok((mean, count)), true));
        layers.splice(1..1, stages.collect::<Vec<_>>());
        layers
    }
}

/// Means of a daemon's spans over all operations, the whole first: name, nanoseconds, requests.
fn device_spans(snapshot: &Snapshot) -> Vec<(String, f64, usize)> {
    let merged = snapshot.merged();
    let mut all = latency::OperationLatencies::default();
    for operation in merged.operations.values() {
        all.merge(operation);
    }
    let order = [latency::Span::Total]
        .into_iter()
        .chain(latency::Span::STEPS);
    let spans = order.filter_map(|span| {
        let histogram = all.spans.get(&span)?;
        let name = match span {
            latency::Span::Total => "whole",
            step => step.name(),
        };
        let count = histogram.count as usize;
        (count > 0).then(|| (name.to_owned(), histogram.mean_ns(), count))
    });
    spans.collect()
}
