//! `lunette vm matrix`: the fifteen cases in guests, by transport and number of threads.

use std::io::Write;
use std::path::{Path, PathBuf};

use bench::chart::Chart;
use bench::job::{Job, JobContext, Sizes, parse};
use bench::matrix::{DEPTHS, MIXTURES, case_name};
use bench::picture::Painter;
use bench::study::{
    METHOD, Page, Report, Run as _, TURNS_UNTIL_SURE, advice, draw, findings, missing_turns,
    write_file,
};
use clap::Args;
use cli_common::{Failure, Outcome, print_line};

use super::content::Content;
use super::engine::{Study, accelerator, on_file_system, study_folder, turn_time};
use super::kernel_target::{VHOST_SCSI, leave_out};
use super::report::{
    caution, fill_page, interrupted, json, notes, run_cautions, text, too_few, write_json,
};
use super::series::setups;
use super::{Case, Effort, Run, study_failed};
use crate::idle_poll::IdlePoll;
use crate::image::parse_bytes;
use crate::vm::bench::{for_disks, with_overrides};
use crate::vm::failed;
use crate::vm::planned::check_module;

/// `lunette vm matrix`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct MatrixArguments {
    /// Number of concurrent disks of each variant, 1 to 64
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) disks: u32,
    /// Numbers of workers (Lunette) or iothreads (QEMU); each number is a separate variant. 0: the shared workers, or QEMU's main loop
    #[arg(
        long,
        default_value = "0,1,2,4,8",
        value_name = "N,N",
        value_delimiter = ','
    )]
    pub(super) threads: Vec<u32>,
    /// Attachments of the disks; each is a separate variant: blk, a virtio-blk device for each disk; scsi, a virtio-scsi controller with a
    /// target for each disk; luns, a virtio-scsi controller with one target that has all disks as LUNs
    #[arg(long, value_name = "NAME,NAME", default_value = "blk,scsi", value_delimiter = ',', value_parser = ["blk", "scsi", "luns"])]
    pub(super) layouts: Vec<String>,
    /// fio job file to measure instead of the fifteen cases, for --turn-time and with --size as `size`. Its devices are replaced by the
    /// disks, in the order of their first use
    #[arg(long, value_name = "FILE", conflicts_with_all = ["depths", "quick"])]
    job: Option<PathBuf>,
    /// Measure only variants with one of these words in their name
    #[arg(long, value_name = "WORD,WORD", value_delimiter = ',')]
    pub(super) series: Vec<String>,
    /// Also measure disks without virtio, by QEMU in its main loop: ide (at most 4 disks) or ahci; and vhost-scsi, a target in the host's
    /// kernel (LIO), for root. vhost-scsi is left out, with the reason, if the host lacks its module or the right. Needs 0 in --threads
    #[arg(long, value_name = "DEVICE,DEVICE", value_delimiter = ',', value_parser = ["ide", "ahci", VHOST_SCSI])]
    pub(super) baseline: Vec<String>,
    /// Numbers of request queues of each device; each number is a separate variant [default: one per virtual CPU]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub(super) queues: Vec<u32>,
    /// Also measure variants without indirect descriptors. A request then uses one ring descriptor per segment
    #[arg(long)]
    pub(super) chained: bool,
    /// Polling of Lunette's workers: off, auto or always; each value is a separate variant [default: the daemon's default]
    #[arg(long = "poll", value_name = "MODE,MODE", value_delimiter = ',', value_parser = ["off", "auto", "always"])]
    pub(super) polls: Vec<String>,
    /// Number of virtual CPUs of each guest
    #[arg(long, default_value_t = 2, value_name = "N")]
    smp: u32,
    /// Numbers of requests in flight per disk; each number is a separate case [default: 1,4,8; 4 with --quick]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    depths: Vec<u32>,
    /// Number of measurements of each variant and case, 1 to 1000. Fewer than four give no useful confidence interval
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Measure further turns until every conclusion is certain, but at most N in all
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = TURNS_UNTIL_SURE, value_parser = clap::value_parser!(u32).range(1..=1000))]
    until_sure: Option<u32>,
    /// Duration of each measurement in seconds, 0.05 to 3600
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    turn_time: f64,
    /// Size of each disk in bytes, or with K, M, G (powers of 1024)
    #[arg(long, default_value = "64M", value_name = "SIZE")]
    pub(super) size: String,
    /// Folder for disk files, results and charts. It may be on a network file system
    #[arg(long, default_value = "lunette-matrix", value_name = "FOLDER")]
    folder: PathBuf,
    /// Block devices to use as disks, one per disk. The study overwrites them. Each variant then runs in a separate guest
    #[arg(
        long,
        value_name = "DEVICE,DEVICE",
        value_delimiter = ',',
        conflicts_with = "memory"
    )]
    pub(super) block: Vec<PathBuf>,
    /// Use disks in memory: RAM disks for Lunette, and files in /dev/shm for QEMU
    #[arg(long)]
    pub(super) memory: bool,
    /// Shorten the study: only randread and randwrite, depth 4, thread counts 0 and 1, and at most one second per measurement
    #[arg(long)]
    quick: bool,
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

const AFTER: &str = "\
The requests have 4 KiB. The cases are randread, mixtures of 75, 50 and 25 % reads, and randwrite, each with 1, 4 and 8 requests in flight per disk.
The variants with the same number of threads run in one guest in turns. A guest boots for each number of threads and each turn. After an
interruption, the same command continues the study. More threads than CPUs are also measured, with a note in the output.

Examples:
    lunette vm matrix --quick
    lunette vm matrix --folder /srv/matrix --smp 4 --turns 6
    lunette vm matrix --disks 4 --smp 4 --queues 1,4 --threads 1,4
    lunette vm matrix --disks 4 --threads 0,1 --baseline ide
    lunette vm matrix --chained --threads 1 --series Lunette
    lunette vm matrix --job contrib/jobs/four-disks.fio --disks 4 --layouts blk,scsi,luns --memory
    lunette vm matrix --threads 1 --poll off,auto --series Lunette
    lunette vm matrix --threads 1,2 --series Lunette --memory";

/// Reads and checks the job file of `--job`.
fn case_of_file(arguments: &MatrixArguments, path: &Path) -> Result<Case, Failure> {
    let name = path.display().to_string();
    let wrong = |why: String| Failure::mistake(format!("{name}: {why}"));
    let text =
        std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot read it: {error}")))?;
    let size = [("size".to_owned(), arguments.size.clone())];
    let text = with_overrides(&text, &size).map_err(wrong)?;
    let disks: Vec<String> = (0..arguments.disks).map(|n| format!("/dev/d{n}")).collect();
    for_disks(&text, &disks).map_err(wrong)?;
    let case = Case {
        name: path.file_stem().unwrap_or_default().display().to_string(),
        job_file: Some(text),
        ..Case::default()
    };
    let job = case.job(&disks, 1000, true);
    let parsed = JobContext::here(|here| parse(&name, &job, &Job::default(), here));
    match parsed {
        Ok(_) => Ok(case),
        Err(mistakes) => {
            let reasons: Vec<String> = mistakes.0.iter().map(ToString::to_string).collect();
            Err(Failure::mistake(reasons.join("; ")))
        }
    }
}

fn cases(arguments: &MatrixArguments) -> Result<Vec<Case>, Failure> {
    if let Some(path) = &arguments.job {
        return Ok(vec![case_of_file(arguments, path)?]);
    }
    let depths: Vec<u32> = match (arguments.depths.as_slice(), arguments.quick) {
        ([], true) => vec![4],
        ([], false) => DEPTHS.iter().map(|depth| u32::from(*depth)).collect(),
        (given, _) => given.to_vec(),
    };
    let mixtures = MIXTURES
        .iter()
        .filter(|(_, pattern, _)| !arguments.quick || *pattern != "randrw");
    let cases = mixtures.flat_map(|(name, pattern, reads)| {
        depths.iter().map(move |depth| Case {
            name: case_name(name, depth),
            pattern: (*pattern).to_owned(),
            reads: *reads,
            depth: *depth,
            block_size: "4k".to_owned(),
            files: None,
            job_file: None,
        })
    });
    Ok(cases.collect())
}

/// Checks that the guests of a study have drivers for the disks of `--baseline`.
pub(super) fn check_drivers(words: &[String]) -> Result<(), Failure> {
    match words.iter().any(|word| word == "ahci") {
        true => check_module("--baseline ahci", "ahci", "--baseline ide"),
        false => Ok(()),
    }
}

fn check_baselines(arguments: &MatrixArguments) -> Result<(), Failure> {
    let (words, disks) = (&arguments.baseline, arguments.disks);
    if !words.is_empty() && !arguments.threads.contains(&0) {
        return Err(Failure::mistake(
            "--baseline: these disks have neither workers nor iothreads, and are measured with 0 threads; hint: --threads 0,1",
        ));
    }
    match words.iter().any(|word| word == "ide") && disks > 4 {
        true => Err(Failure::mistake(format!(
            "--baseline ide: an IDE controller has at most 4 disks, not {disks}; hint: --disks 4"
        ))),
        false => check_drivers(words),
    }
}

/// Numbers of workers or iothreads.
fn threads(arguments: &MatrixArguments) -> Vec<u32> {
    let threads = arguments.threads.iter().copied();
    threads.filter(|n| !arguments.quick || *n <= 1).collect()
}

/// Duration of a measurement in seconds.
fn turn_seconds(arguments: &MatrixArguments) -> f64 {
    match arguments.quick {
        true => arguments.turn_time.min(1.0),
        false => arguments.turn_time,
    }
}

impl MatrixArguments {
    /// Returns the work of the study.
    pub fn effort(&self) -> Result<Effort, Failure> {
        let setups = setups(self, &threads(self), "/");
        let ways: usize = setups.iter().map(|setup| setup.ways.len()).sum();
        let size = parse_bytes(&self.size).map_err(Failure::mistake)?;
        let cases = match self.job {
            Some(_) => 1,
            None => cases(self)?.len(),
        };
        Ok(Effort {
            boots: setups.len() as u32 * self.turns,
            runs: (ways * cases) as u32 * self.turns,
            seconds: turn_seconds(self),
            written: size * u64::from(self.disks) * ways as u64 * u64::from(self.turns),
        })
    }
}

fn study(arguments: &MatrixArguments) -> Result<Study, Failure> {
    let turn = turn_time("--turn-time", turn_seconds(arguments))?;
    let count = arguments.block.len();
    if count > 0 && count != arguments.disks as usize {
        return Err(Failure::mistake(format!(
            "--block names {count} devices for {} disks; hint: --disks {count}",
            arguments.disks
        )));
    }
    check_baselines(arguments)?;
    let elsewhere = (!arguments.memory && count == 0)
        .then_some("choose a --folder on another file system, or --memory");
    let folder = study_folder(&arguments.folder, elsewhere)?;
    let size =
        parse_bytes(&arguments.size).map_err(|why| Failure::mistake(format!("--size: {why}")))?;
    let threads = threads(arguments);
    let mut setups = setups(arguments, &threads, &folder.display().to_string());
    let left_out = leave_out(&mut setups, vm::vhost_scsi::check_host);
    if setups.is_empty() {
        if let Some(left_out) = left_out {
            return Err(Failure::because(left_out));
        }
        return Err(Failure::mistake(
            "--series: no variant has one of these words in its name; hint: --series Lunette",
        ));
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    for many in threads.iter().filter(|n| **n as usize > cpus) {
        print_line(&format_args!(
            "note: {many} threads on a host of {cpus} CPUs"
        ));
    }
    Ok(Study {
        setups,
        cases: cases(arguments)?,
        turns: arguments.turns,
        until_sure: arguments.until_sure,
        turn,
        folder,
        guest: vec![
            "--smp".to_owned(),
            arguments.smp.to_string(),
            "--memory".to_owned(),
            "2G".to_owned(),
        ],
        direct: !arguments.memory,
        size,
        content: arguments.content,
        devices: arguments.block.clone(),
        left_out,
    })
}

/// Name, title, unit and value of a picture.
type Picture = (&'static str, &'static str, &'static str, fn(&Run) -> f64);

const PICTURES: [Picture; 3] = [
    (
        "combined-read",
        "Combined read bandwidth in guests",
        "MB/s",
        |run| run.read_bytes / 1e6,
    ),
    (
        "combined-write",
        "Combined write bandwidth in guests",
        "MB/s",
        |run| run.write_bytes / 1e6,
    ),
    (
        "combined-iops",
        "Combined reads and writes in guests",
        "IOPS",
        Run::iops,
    ),
];

/// Draws the pictures, and returns their charts.
fn draw_pictures(
    report: &Report<'_, Run>,
    folder: &Path,
) -> Result<Vec<(&'static str, Chart)>, Failure> {
    let painter = Painter::new();
    let mut charts = Vec::new();
    for (name, title, unit, value) in PICTURES {
        let chart = report.chart(title, unit, value);
        draw(&chart, folder, name, &painter).map_err(failed)?;
        charts.push((name, chart));
    }
    Ok(charts)
}

const CASES: &str = "75/25: 75 % reads, 25 % writes; depth: requests in flight of each disk.";

/// Returns the name of a job file without its folders, for pages and pictures that leave this machine.
fn name_of(file: &Path) -> impl std::fmt::Display + '_ {
    file.file_name().unwrap_or(file.as_os_str()).display()
}

/// Describes block sizes and depths of job files, such as `: 1 job, requests of 4 to 64 KiB, 4 in flight of each job`.
fn requests(cases: &[Case]) -> Option<String> {
    let text = cases.iter().find_map(|case| case.job_file.as_deref())?;
    let jobs = JobContext::here(|here| parse("job", text, &Job::default(), here)).ok()?;
    let sizes = || jobs.iter().flat_map(|job| &job.sizes[..2]);
    let range = |least: u32, most: u32| match least == most {
        true => format!("{least}"),
        false => format!("{least} to {most}"),
    };
    let (least, most) = (
        sizes().map(Sizes::min).min()?,
        sizes().map(Sizes::max).max()?,
    );
    let bytes = match (least % 1024, most % 1024) {
        (0, 0) => format!("{} KiB", range(least / 1024, most / 1024)),
        _ => format!("{} bytes", range(least, most)),
    };
    let depths = || jobs.iter().map(|job| u32::from(job.iodepth));
    let depth = range(depths().min()?, depths().max()?);
    let count = match jobs.len() {
        1 => "1 job".to_owned(),
        count => format!("{count} jobs"),
    };
    Some(format!(
        ": {count}, requests of {bytes}, {depth} in flight of each job"
    ))
}

/// Describes disks and requests.
fn load(arguments: &MatrixArguments) -> String {
    let disks = match (arguments.block.is_empty(), arguments.memory) {
        (false, _) => "block devices".to_owned(),
        (true, true) => format!("disks of {} in memory", arguments.size),
        (true, false) => format!(
            "disks of {} in files{}",
            arguments.size,
            on_file_system(&arguments.folder)
        ),
    };
    let requests = match &arguments.job {
        Some(file) => {
            let requests = cases(arguments).ok().and_then(|cases| requests(&cases));
            let requests = requests.unwrap_or_default();
            format!("the job file {}{requests}", name_of(file))
        }
        None => "requests of 4 KiB".to_owned(),
    };
    format!(
        "{} {disks} at once, {}, {requests}, {} virtual CPUs",
        arguments.disks,
        arguments.content.describe(),
        arguments.smp
    )
}

/// Measures and prints the advice.
pub fn run(arguments: &MatrixArguments) -> Outcome {
    vm::watch().map_err(failed)?;
    let _awake = arguments.idle.hold()?;
    let study = study(arguments)?;
    let results = study.run(missing_turns).map_err(study_failed)?;
    if vm::interrupted() {
        return interrupted(&study.report(&results.runs), None);
    }
    let accelerator = accelerator(&results);
    let mut report = study.report(&results.runs);
    report.notes = notes(&results, &load(arguments), study.turn);
    let charts = draw_pictures(&report, &study.folder)?;
    let too_few = too_few(&report);
    // With few turns no conclusions are possible.
    let (findings, advice) = match too_few {
        Some(_) => (Vec::new(), Vec::new()),
        None => (findings(&report), advice(&report)),
    };
    let mut cautions = run_cautions(&report);
    cautions.extend(study.left_out.clone());
    cautions.extend(caution(accelerator).map(str::to_owned));
    let mut page = Page {
        title: match &arguments.job {
            Some(file) => format!("{} in guests", name_of(file)),
            None => "The fifteen cases in guests".to_owned(),
        },
        about: report
            .notes
            .iter()
            .cloned()
            .chain(arguments.job.is_none().then(|| CASES.to_owned()))
            .chain([format!("Conclusions: {METHOD}.")])
            .collect(),
        advice: advice.clone(),
        findings: findings.clone(),
        cautions: too_few.iter().chain(&cautions).cloned().collect(),
        ..Page::default()
    };
    fill_page(&mut page, &report, None, &charts);
    let page = write_file(&study.folder, "report.html", page.html().as_bytes()).map_err(failed)?;
    let mut document = json(&report, &results.header, None);
    document["advice"] = advice.clone().into();
    if let Some(left_out) = &study.left_out {
        document["left_out"] = left_out.clone().into();
    }
    write_json(&study.folder, &document).map_err(failed)?;
    let mut stdout = cli_common::stdout();
    if arguments.json {
        return Ok(writeln!(stdout, "{document:#}")?);
    }
    for case in &study.cases {
        writeln!(stdout, "{}\n{}", case.name, text(&report, &case.name, None))?;
    }
    match too_few {
        Some(too_few) => writeln!(stdout, "{too_few}")?,
        None => {
            for line in findings {
                writeln!(stdout, "{line}")?;
            }
            writeln!(stdout)?;
            for case in &study.cases {
                writeln!(stdout, "{}", report.best(&case.name).unwrap_or_default())?;
            }
            writeln!(stdout, "\nAdvice, over all cases ({METHOD})")?;
            for line in advice {
                writeln!(stdout, "  {line}")?;
            }
        }
    }
    for caution in &cautions {
        writeln!(stdout, "{caution}")?;
    }
    for note in &report.notes {
        writeln!(stdout, "{note}")?;
    }
    Ok(writeln!(
        stdout,
        "page: {}\npictures: {}/combined-{{read,write,iops}}.svg and .png",
        page.display(),
        study.folder.display()
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Words {
        #[command(flatten)]
        arguments: MatrixArguments,
    }

    /// The conditions are the subtitle of each picture.
    #[test]
    fn conditions_have_block_size_and_depth_of_the_job_file() {
        let jobs = vm::workspace().join("contrib/jobs");
        for (name, disks, wanted) in [
            (
                "four-disks.fio",
                "4",
                ": 1 job, requests of 4 to 64 KiB, 4 in flight of each job",
            ),
            (
                "eight-disks.fio",
                "8",
                ": 8 jobs, requests of 4 KiB, 1 in flight of each job",
            ),
        ] {
            let job = jobs.join(name).display().to_string();
            let words = ["matrix", "--disks", disks, "--job", &job];
            let arguments = <Words as clap::Parser>::parse_from(words).arguments;
            let text = load(&arguments);
            assert!(text.contains(wanted), "{text}");
            assert!(text.contains("written before the measurement"), "{text}");
        }
        let fixed = Case {
            job_file: Some("[a]\nrw=read\nbs=512\niodepth=7\n".to_owned()),
            ..Case::default()
        };
        let wanted = ": 1 job, requests of 512 bytes, 7 in flight of each job";
        assert_eq!(requests(&[fixed]).as_deref(), Some(wanted));
    }
}
