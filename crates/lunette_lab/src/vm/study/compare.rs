//! `lunette vm compare`: per cent of bare metal.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use cli_common::{Failure, Outcome, say};

use super::engine::{Study, study_folder, turn_time};
use super::report::{Class, Report, caution, draw, percent, too_few};
use super::{Case, Run, Setup, Way};
use crate::image::parse_bytes;
use crate::vm::failed;

/// `lunette vm compare`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct CompareArguments {
    /// Pattern: randread, randwrite, randrw, read or write
    #[arg(long, default_value = "randread", value_name = "PATTERN")]
    rw: String,
    /// Reads of 100, for randrw
    #[arg(long, default_value_t = 75, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    rwmixread: u8,
    /// Bytes of a request
    #[arg(long, default_value = "4k", value_name = "SIZE")]
    bs: String,
    /// Requests in flight
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    iodepth: u32,
    /// Turns of each way; with fewer than four the interval says little
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Seconds of each turn
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    turn_time: f64,
    /// Bytes of each disk
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    size: String,
    /// Where disks' files, the result and the picture go; on the file system that is asked about
    #[arg(long, default_value = "lunette-compare", value_name = "FOLDER")]
    folder: PathBuf,
    /// Virtual CPUs of the guest
    #[arg(long, default_value_t = 2, value_name = "N")]
    smp: u32,
    /// Compare these disks of a running daemon, by virtio-blk, instead of Lunette's files
    #[arg(
        long,
        value_name = "DISK,DISK",
        requires = "control",
        value_delimiter = ','
    )]
    disk: Vec<String>,
    /// That daemon's control socket
    #[arg(long, value_name = "SOCKET", requires = "disk")]
    control: Option<PathBuf>,
    /// Only ways whose name has one of these words in it, beside the host
    #[arg(long, value_name = "WORD,WORD", value_delimiter = ',')]
    ways: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const AFTER: &str = "\
The same job runs on files of one folder: on the host, and in one guest through Lunette and through QEMU's own devices, in turns.
Interrupted, the command goes on where it was when it is given again.

Examples:
    lunette vm compare --folder /srv/compare
    lunette vm compare --rw randwrite --iodepth 32 --turns 8
    lunette vm compare --control /run/lunette/lunette.sock --disk d0 --ways Lunette";

const HOST: &str = "host, no guest";

fn ways(arguments: &CompareArguments, folder: &str) -> Vec<Way> {
    let backing = format!("backing=file:{folder},size={}", arguments.size);
    let way = |name: &str, words: Option<String>| Way {
        name: name.to_owned(),
        words,
        disks: 1,
    };
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
    let is_wanted = |way: &Way| {
        let mut words = arguments.ways.iter();
        arguments.ways.is_empty()
            || way.words.is_none()
            || words.any(|word| way.name.contains(word))
    };
    ways.retain(is_wanted);
    ways
}

fn study(arguments: &CompareArguments) -> Result<Study, Failure> {
    let turn = turn_time("--turn-time", arguments.turn_time)?;
    let folder = study_folder(&arguments.folder, Some("--folder on another one"))?;
    let size =
        parse_bytes(&arguments.size).map_err(|why| Failure::mistake(format!("--size: {why}")))?;
    let mut guest = vec!["--smp".to_owned(), arguments.smp.to_string()];
    if let Some(control) = &arguments.control {
        guest.extend(["--control".to_owned(), control.display().to_string()]);
    }
    let setup = Setup {
        name: "guest".to_owned(),
        options: Vec::new(),
        ways: ways(arguments, &folder.display().to_string()),
    };
    if setup.ways.len() < 2 {
        return Err(Failure::mistake("--ways: no way has such a name"));
    }
    Ok(Study {
        setups: vec![setup],
        cases: vec![Case {
            name: format!(
                "{}, {}, depth {}",
                arguments.rw, arguments.bs, arguments.iodepth
            ),
            pattern: arguments.rw.clone(),
            reads: arguments.rwmixread,
            depth: arguments.iodepth,
            block_size: arguments.bs.clone(),
        }],
        turns: arguments.turns,
        turn,
        folder,
        guest,
        direct: true,
        size,
    })
}

/// Measures and compares.
pub fn run(arguments: &CompareArguments) -> Outcome {
    vm::watch().map_err(failed)?;
    let study = study(arguments)?;
    let results = study.run().map_err(failed)?;
    if vm::interrupted() {
        say(&"interrupted; the same command goes on from here");
        return Err(Failure::Interrupted);
    }
    let report = Report {
        runs: &results.runs,
        ways: study.setups[0].ways.iter().collect(),
        cases: &study.cases,
    };
    let chart = report.chart("IOPS: bare metal, QEMU and Lunette", Run::iops);
    let picture = draw(&chart, &study.folder, "compare").map_err(failed)?;
    let mut stdout = std::io::stdout().lock();
    if arguments.json {
        let mut document = report.json(&results.accelerator, Some(HOST));
        for cell in document["cells"].as_array_mut().into_iter().flatten() {
            if let Some(value) = cell["of_first"]["value"].as_f64() {
                cell["class"] = Class::of(value).words().into();
            }
        }
        return Ok(writeln!(stdout, "{document:#}")?);
    }
    let case = &study.cases[0].name;
    writeln!(stdout, "{case}, {} turns\n", study.turns)?;
    writeln!(stdout, "{}", report.table(case, Some(HOST)))?;
    let mut has_mistake = false;
    for way in &report.ways {
        let ratio = report.ratio(&way.name, HOST, case);
        if let Some(ratio) = ratio.filter(|_| way.words.is_some()) {
            let class = Class::of(ratio.value);
            has_mistake |= class == Class::Mistake;
            writeln!(
                stdout,
                "{}: {} of bare metal, {}",
                way.name,
                percent(ratio),
                class.words()
            )?;
        }
    }
    if let Some(too_few) = too_few(study.turns) {
        writeln!(stdout, "{too_few}")?;
    }
    match caution(&results.accelerator) {
        Some(caution) => writeln!(stdout, "{caution}")?,
        None if has_mistake => writeln!(
            stdout,
            "hint: lunette doctor says what of this host's set-up costs speed"
        )?,
        None => {}
    }
    Ok(writeln!(stdout, "picture: {}", picture.display())?)
}
