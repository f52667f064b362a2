//! `lunette vm compare`: guests' performance in per cent of bare metal.

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use bench::picture::Painter;
use bench::run::Interval;
use bench::study::{
    Comparison, METHOD, Page, Report, Run as _, TURNS_UNTIL_SURE, draw, not_enough, percent,
    write_file,
};
use clap::{Args, ValueEnum};
use cli_common::{Failure, Outcome, print_line};
use serde_json::Value;
use vm::Accelerator;

use super::content::Content;
use super::engine::{Study, accelerator, on_file_system, study_folder, turn_time};
use super::kernel_target::{VHOST_SCSI, leave_out};
use super::matrix::check_drivers;
use super::report::{
    Class, caution, fill_page, interrupted, json, notes, run_cautions, text, too_few, turns,
    write_json,
};
use super::{Case, DiskRoute, Effort, Files, Run, Setup, study_failed};
use crate::idle_poll::IdlePoll;
use crate::image::parse_bytes;
use crate::vm::failed;

/// `lunette vm compare`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct CompareArguments {
    /// Pattern: randread, randwrite, randrw, read or write
    #[arg(long, default_value = "randread", value_name = "PATTERN")]
    rw: String,
    /// Percentage of reads for --rw randrw, 0 to 100
    #[arg(long, default_value_t = 75, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    rwmixread: u8,
    /// Bytes per request
    #[arg(long, default_value = "4k", value_name = "SIZE")]
    bs: String,
    /// Number of requests in flight, 1 to 1024
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    iodepth: u32,
    /// Measure a file system workload on an ext4 file system of the disk instead of block requests: creation of files, reads or writes of
    /// files, or a mail server. The content of the disk is lost
    #[arg(long, value_name = "PRESET", value_parser = ["create", "seqread", "randread", "randwrite", "mail"], conflicts_with_all = ["rw", "rwmixread", "bs", "iodepth"], help_heading = "File systems")]
    preset: Option<String>,
    /// Numbers of threads of the file system workload; each number is a separate case
    #[arg(
        long,
        value_name = "N,N",
        default_value = "1,8,16",
        value_delimiter = ',',
        requires = "preset",
        help_heading = "File systems"
    )]
    threads: Vec<u32>,
    /// Mount the file system with barriers (it flushes the disk's cache to order writes), without, or both
    #[arg(
        long,
        value_enum,
        default_value = "both",
        requires = "preset",
        help_heading = "File systems"
    )]
    barriers: Barriers,
    /// Number of measurements of each variant, 1 to 1000. Fewer than four give no useful confidence interval
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Measure further turns until every conclusion is certain, but at most N in all
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = TURNS_UNTIL_SURE, value_parser = clap::value_parser!(u32).range(1..=1000))]
    until_sure: Option<u32>,
    /// Duration of each measurement in seconds, 0.05 to 3600
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    turn_time: f64,
    /// Size of each disk in bytes, or with K, M, G (powers of 1024)
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    size: String,
    /// Folder for the disk files, the result and the chart. It must be on the file system to measure
    #[arg(long, default_value = "lunette-compare", value_name = "FOLDER")]
    folder: PathBuf,
    /// Number of virtual CPUs of the guest
    #[arg(long, default_value_t = 2, value_name = "N")]
    smp: u32,
    /// Disks of a running daemon to compare through virtio-blk, instead of files that Lunette serves
    #[arg(
        long,
        value_name = "DISK,DISK",
        requires = "control",
        value_delimiter = ','
    )]
    disk: Vec<String>,
    /// Control socket of that daemon
    #[arg(long, value_name = "SOCKET", requires = "disk")]
    control: Option<PathBuf>,
    /// Measure only the host and variants with one of these words in their name
    #[arg(long, value_name = "WORD,WORD", value_delimiter = ',')]
    ways: Vec<String>,
    /// Also measure disks without virtio, by QEMU: ide or ahci; and vhost-scsi, a target in the host's kernel (LIO), for root. vhost-scsi is
    /// left out, with the reason, if the host lacks its module or the right
    #[arg(long, value_name = "DEVICE,DEVICE", value_delimiter = ',', value_parser = ["ide", "ahci", VHOST_SCSI])]
    baseline: Vec<String>,
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

/// Mount options for barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Barriers {
    /// Mount option barrier=1
    On,
    /// Mount option barrier=0
    Off,
    /// Both, one after the other
    Both,
}

const AFTER: &str = "\
Runs the same job on files of one folder in turns: on the host, and in one guest through Lunette and through QEMU's own devices.
After an interruption, the same command continues the study.

Examples:
    lunette vm compare --folder /srv/compare
    lunette vm compare --rw randwrite --iodepth 32 --turns 8
    lunette vm compare --preset mail --threads 1,8,16
    lunette vm compare --preset create --barriers off --turns 8
    lunette vm compare --control /run/lunette/lunette.sock --disk d0 --ways Lunette";

const HOST: &str = "host, no guest";
/// A study does not mount file systems on the host.
const HOST_FILES: &str = "On the host the programs use the file system of the folder with its mount options, with and without barriers.";

fn ways(arguments: &CompareArguments, folder: &str) -> Vec<DiskRoute> {
    let backing = format!("backing=file:{folder},size={}", arguments.size);
    let way = |name: &str, words| DiskRoute::new(name.to_owned(), words, 1);
    let mut ways = vec![way(HOST, None)];
    for disk in &arguments.disk {
        let words = format!("blk:1,backing=daemon:{disk}");
        ways.push(way(&format!("Lunette virtio-blk, {disk}"), Some(words)));
    }
    if arguments.disk.is_empty() {
        ways.push(way("Lunette virtio-blk", Some(format!("blk:1,{backing}"))));
        ways.push(way(
            "Lunette virtio-scsi",
            Some(format!("scsi:1x1,{backing}")),
        ));
    }
    let qemu = [
        ("QEMU virtio-blk", "blk:1,via=qemu"),
        (
            "QEMU virtio-blk, ioeventfd=off",
            "blk:1,via=qemu,ioeventfd=off",
        ),
        ("QEMU virtio-blk, iothread", "blk:1,via=qemu-iothread"),
        ("QEMU virtio-scsi, iothread", "scsi:1x1,via=qemu-iothread"),
    ];
    ways.extend(qemu.map(|(name, words)| way(name, Some(format!("{words},{backing}")))));
    let baselines = arguments.baseline.iter();
    ways.extend(baselines.map(|via| match via.as_str() {
        VHOST_SCSI => {
            let variant = way("LIO vhost-scsi", None).variant;
            DiskRoute::of_kernel(variant, folder, 1, "")
        }
        via => {
            let words = format!("blk:1,via={via},{backing}");
            way(&format!("QEMU {via}"), Some(words))
        }
    }));
    let is_wanted = |way: &DiskRoute| {
        let mut words = arguments.ways.iter();
        arguments.ways.is_empty()
            || way.words.is_none()
            || words.any(|word| way.variant.name.contains(word))
    };
    ways.retain(is_wanted);
    ways
}

/// Returns the job, or the file system preset with each number of threads and each barrier setting.
fn cases(arguments: &CompareArguments) -> Vec<Case> {
    let Some(preset) = &arguments.preset else {
        return vec![Case {
            name: format!(
                "{}, {}, depth {}",
                arguments.rw, arguments.bs, arguments.iodepth
            ),
            pattern: arguments.rw.clone(),
            reads: arguments.rwmixread,
            depth: arguments.iodepth,
            block_size: arguments.bs.clone(),
            files: None,
            job_file: None,
        }];
    };
    let barriers: &[bool] = match arguments.barriers {
        Barriers::On => &[true],
        Barriers::Off => &[false],
        Barriers::Both => &[true, false],
    };
    let pairs = barriers
        .iter()
        .flat_map(|barriers| arguments.threads.iter().map(move |n| (*barriers, *n)));
    let case = |(barriers, threads): (bool, u32)| {
        let plural = if threads == 1 { "" } else { "s" };
        let with = if barriers { "" } else { ", no barriers" };
        Case {
            name: format!("{preset}, {threads} thread{plural}{with}"),
            files: Some(Files {
                preset: preset.clone(),
                threads,
                barriers,
            }),
            ..Case::default()
        }
    };
    pairs.map(case).collect()
}

fn study(arguments: &CompareArguments) -> Result<Study, Failure> {
    let turn = turn_time("--turn-time", arguments.turn_time)?;
    check_drivers(&arguments.baseline)?;
    let folder = study_folder(
        &arguments.folder,
        Some("choose a --folder on another file system"),
    )?;
    let size =
        parse_bytes(&arguments.size).map_err(|why| Failure::mistake(format!("--size: {why}")))?;
    let mut guest = vec!["--smp".to_owned(), arguments.smp.to_string()];
    if let Some(control) = &arguments.control {
        guest.extend(["--control".to_owned(), control.display().to_string()]);
    }
    let mut setups = vec![Setup {
        name: "guest".to_owned(),
        options: Vec::new(),
        ways: ways(arguments, &folder.display().to_string()),
    }];
    let left_out = leave_out(&mut setups, vm::vhost_scsi::check_host);
    if setups.iter().all(|setup| setup.ways.len() < 2) {
        if let Some(left_out) = left_out {
            return Err(Failure::because(left_out));
        }
        return Err(Failure::mistake(
            "--ways: no variant has one of these words in its name; hint: --ways Lunette",
        ));
    }
    Ok(Study {
        setups,
        cases: cases(arguments),
        turns: arguments.turns,
        until_sure: arguments.until_sure,
        turn,
        folder,
        guest,
        direct: true,
        size,
        content: arguments.content,
        devices: Vec::new(),
        left_out,
    })
}

/// Describes disks and requests.
fn load(arguments: &CompareArguments) -> String {
    let disk = match arguments.disk.as_slice() {
        [] => format!(
            "a disk of {} in a file{}, {}",
            arguments.size,
            on_file_system(&arguments.folder),
            arguments.content.describe()
        ),
        disks => format!(
            "disks {} of the daemon with their content",
            disks.join(", ")
        ),
    };
    format!(
        "the same job on the host and in a guest of {} virtual CPUs, on {disk}; per cent: share of the host's IOPS",
        arguments.smp
    )
}

pub fn run(arguments: &CompareArguments) -> Outcome {
    vm::watch().map_err(failed)?;
    let _awake = arguments.idle.hold()?;
    let study = study(arguments)?;
    let is_kvm = Accelerator::detect().map_err(failed)? == Accelerator::Kvm;
    if study.until_sure.is_some() && !is_kvm {
        print_line(
            &"--until-sure: no further turns, because emulated guests have no class of bare metal",
        );
    }
    let missing = |report: &Report<'_, Run>| missing_turns(report, is_kvm);
    let results = study.run(missing).map_err(study_failed)?;
    if vm::interrupted() {
        return interrupted(&study.report(&results.runs), Some(HOST));
    }
    let accelerator = accelerator(&results);
    let mut report = study.report(&results.runs);
    report.notes = notes(&results, &load(arguments), study.turn);
    let what = match &arguments.preset {
        None => "IOPS: bare metal, QEMU and Lunette".to_owned(),
        Some(preset) => format!("Operations on files in a second: {preset}"),
    };
    let mut chart = report.chart(&what, "per second", Run::iops);
    report.add_ratios(&mut chart, HOST);
    let [picture, _] = draw(&chart, &study.folder, "compare", &Painter::new()).map_err(failed)?;
    let (classes, of_each): (Vec<String>, Vec<Option<Class>>) =
        classes(&report, is_kvm).into_iter().unzip();
    let has_mistake = of_each.contains(&Some(Class::Mistake));
    let mut cautions: Vec<String> = too_few(&report).into_iter().collect();
    cautions.extend(run_cautions(&report));
    cautions.extend(study.left_out.clone());
    cautions.extend(caution(accelerator).map(str::to_owned));
    if arguments.preset.is_some() {
        cautions.push(HOST_FILES.to_owned());
    }
    let mut page = Page {
        title: "Per cent of bare metal".to_owned(),
        about: report.notes.iter().cloned().chain([method()]).collect(),
        findings: classes.clone(),
        cautions: cautions.clone(),
        ..Page::default()
    };
    fill_page(&mut page, &report, Some(HOST), &[("compare", chart)]);
    let page = write_file(&study.folder, "report.html", page.html().as_bytes()).map_err(failed)?;
    let mut stdout = cli_common::stdout();
    let mut document = json(&report, &results.header, Some(HOST));
    add_classes(&mut document, is_kvm);
    if let Some(left_out) = &study.left_out {
        document["left_out"] = left_out.clone().into();
    }
    write_json(&study.folder, &document).map_err(failed)?;
    if arguments.json {
        return Ok(writeln!(stdout, "{document:#}")?);
    }
    for case in &study.cases {
        let turns = turns(&results.runs);
        writeln!(stdout, "{}, {turns} turns\n", case.name)?;
        writeln!(stdout, "{}", text(&report, &case.name, Some(HOST)))?;
    }
    for line in classes.iter().chain(&cautions).chain([&method()]) {
        writeln!(stdout, "{line}")?;
    }
    if has_mistake {
        writeln!(stdout, "\nFindings of lunette doctor on this host:\n")?;
        stdout.flush()?;
        // The result of the check is printed but does not change this command's exit code.
        Command::new(std::env::current_exe()?)
            .arg("doctor")
            .status()?;
    }
    for note in &report.notes {
        writeln!(stdout, "{note}")?;
    }
    Ok(writeln!(
        stdout,
        "page: {}\npicture: {}",
        page.display(),
        picture.display()
    )?)
}

/// Describes the method of the shares.
fn method() -> String {
    format!("Shares of bare metal: {METHOD}.")
}

/// Adds the class of each variant to a document.
fn add_classes(document: &mut Value, is_kvm: bool) {
    for cell in document["cells"].as_array_mut().into_iter().flatten() {
        let part = |end: &str| cell["of_first"][end].as_f64();
        let (Some(value), Some(low), Some(high)) = (part("value"), part("low"), part("high"))
        else {
            continue;
        };
        let class = Class::of(Interval { value, low, high }).filter(|_| is_kvm);
        cell["class"] = class.map(Class::words).into();
    }
}

impl CompareArguments {
    /// Returns the work of the study.
    pub fn effort(&self) -> Result<Effort, Failure> {
        let (ways, cases) = (ways(self, "/").len(), cases(self).len());
        let size = parse_bytes(&self.size).map_err(Failure::mistake)?;
        Ok(Effort {
            boots: self.turns,
            runs: (ways * cases) as u32 * self.turns,
            seconds: self.turn_time,
            written: size * ways as u64 * u64::from(self.turns),
        })
    }
}

/// Comparisons of each variant in a guest with the host, in each case.
fn comparisons<'a>(report: &Report<'a, Run>) -> Vec<(String, &'a str, Comparison)> {
    let variants = report
        .variants
        .iter()
        .filter(|variant| variant.name != HOST);
    let cells = variants.flat_map(|variant| report.cases.iter().map(move |case| (case, *variant)));
    let found = cells.filter_map(|(case, variant)| {
        let comparison =
            report.comparison(&variant.name, HOST, case, report.comparisons_with_one())?;
        Some((case.clone(), variant.name.as_str(), comparison))
    });
    found.collect()
}

fn has_class(low: f64, high: f64) -> bool {
    let value = f64::midpoint(low, high);
    Class::of(Interval { value, low, high }).is_some()
}

/// Returns the estimated number of turns until each variant has a class; `None` if all have one, or without KVM, where none can have one.
fn missing_turns(report: &Report<'_, Run>, is_kvm: bool) -> Option<u32> {
    let undecided = comparisons(report).into_iter().filter(|_| is_kvm);
    let undecided = undecided.filter(|(.., found)| !has_class(found.ratio.low, found.ratio.high));
    let more = undecided.map(|(.., found)| found.more_turns(has_class).unwrap_or(u32::MAX));
    more.max()
}

/// Returns the share of bare metal for each variant in a guest and each case. Under emulation, which is slow by itself, there are no classes.
fn classes(report: &Report<'_, Run>, is_kvm: bool) -> Vec<(String, Option<Class>)> {
    let lines = comparisons(report).into_iter().map(|(case, name, found)| {
        let of_case = match report.cases.len() {
            1 => String::new(),
            _ => format!("{case}: "),
        };
        let class = Class::of(found.ratio).filter(|_| is_kvm);
        let conclusion = match class {
            Some(class) => format!(", {}", class.words()),
            None if !is_kvm => String::new(),
            None => format!(", {}", not_enough(found.more_turns(has_class))),
        };
        let share = percent(&found);
        (
            format!("{of_case}{name}: {share} of bare metal{conclusion}"),
            class,
        )
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use bench::study::Variant;

    use super::*;

    fn variant(name: &str) -> Variant {
        Variant {
            name: name.to_owned(),
            settings: Vec::new(),
        }
    }

    /// The share of bare metal is near the border of two classes.
    #[test]
    fn emulated_guests_need_no_further_turns_for_their_class() {
        let variants = [variant(HOST), variant("blk")];
        let mut runs = Vec::new();
        for turn in 0..4_u32 {
            for (name, iops) in [(HOST, 1000.0), ("blk", 700.0 + f64::from(turn) * 50.0)] {
                runs.push(Run {
                    way: name.to_owned(),
                    case: "c".to_owned(),
                    turn,
                    read_iops: iops,
                    ..Run::default()
                });
            }
        }
        let report = Report {
            runs: &runs,
            variants: variants.iter().collect(),
            cases: vec!["c".to_owned()],
            notes: Vec::new(),
        };
        assert!(missing_turns(&report, true).is_some());
        assert_eq!(missing_turns(&report, false), None);
    }

    /// Each further variant makes the intervals wider, because the classes of all variants are stated together.
    #[test]
    fn shares_of_all_variants_share_the_error() {
        let names = [HOST, "a", "b", "c", "d"];
        let variants = names.map(variant);
        let mut runs = Vec::new();
        for turn in 0..5_u32 {
            for name in names {
                let noise = 1.0 + f64::from((turn * 7) % 5) * 0.02;
                let factor = if name == HOST { 1.0 } else { 0.5 * noise };
                runs.push(Run {
                    way: name.to_owned(),
                    case: "c".to_owned(),
                    turn,
                    read_iops: 1000.0 * factor,
                    ..Run::default()
                });
            }
        }
        let width = |count: usize| {
            let report = Report {
                runs: &runs,
                variants: variants.iter().take(count).collect(),
                cases: vec!["c".to_owned()],
                notes: Vec::new(),
            };
            let ratio = comparisons(&report)[0].2.ratio;
            ratio.high - ratio.low
        };
        assert!(width(5) > width(2) * 1.2, "{} {}", width(5), width(2));
    }
}
