//! `lunette vm mcs`: measures one session with several connections between two guests, a target and an initiator.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bench::chart::{Chart, Point, Series};
use bench::picture::Painter;
use bench::run::{Disturbance, spread};
use bench::study::{Page, Progress, draw, write_file};
use bench::table::{McsRow, mcs_columns, mcs_ratios, mcs_rows};
use clap::{Args, ValueEnum};
use cli_common::{Failure, Outcome, print_line};
use serde_json::{Value, json};
use vm::initramfs::INITIATOR_NAME;
use vm::{Accelerator, Guest, GuestBuilder, TwoPaths, use_lunette};

use super::failed;
use super::study::content::Content;
use super::study::report::{caution, write_json, write_partial};
use super::study::{Effort, qemu_version, quietly_beside, study_failed};
use crate::bench::note;

const TARGET: &str = "iqn.2026-11.org.example:guest";
const TARGET_ADDRESS: &str = "10.9.0.1";
const INITIATOR_ADDRESS: &str = "10.9.0.2";
/// Time limit for the partial results of an interrupted measurement.
const PARTIAL_LIMIT: Duration = Duration::from_secs(20);
/// Cases of the table.
const CASES: [&str; 3] = ["read", "write", "both"];

/// `lunette vm mcs`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct McsArguments {
    /// Maximum number of connections, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    connections: u16,
    /// Bytes per request
    #[arg(long, value_name = "SIZE", default_value = "256k")]
    bs: String,
    /// Number of requests in flight, 1 to 1024
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    iodepth: u32,
    /// MTU of the link between the guests in bytes, 1280 to 65535
    #[arg(long, value_name = "BYTES", default_value_t = 9000, value_parser = clap::value_parser!(u16).range(1280..=65535))]
    mtu: u16,
    /// Number of virtual CPUs of each guest, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,
    /// Size of the RAM disk in MiB, 4 to 4096
    #[arg(long, value_name = "MIB", default_value_t = 128, value_parser = clap::value_parser!(u32).range(4..=4096))]
    size_mib: u32,
    /// Number of measurements of each case and number of connections, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Duration of each measurement in milliseconds, 10 to 600000
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..=600_000))]
    turn_ms: u64,
    /// Target in the first guest
    #[arg(long, value_enum, default_value = "lunette")]
    target: TargetWord,
    /// Also measure Linux's initiator: one session, and two sessions under dm-multipath. Needs Lunette's target
    #[arg(long)]
    multipath: bool,
    /// Content of the disk
    #[command(flatten)]
    content: Content,
    /// Write the result as JSON, a picture and a page to this folder
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Append the table to FOLDER/YYYY-MM-DD.md
    #[arg(long, value_name = "FOLDER")]
    notes: Option<PathBuf>,
}

/// Targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TargetWord {
    /// Lunette
    Lunette,
    /// Linux's target (LIO)
    Lio,
    /// tgt of this machine, a target in user space
    Tgt,
}

impl TargetWord {
    fn describe(self) -> &'static str {
        match self {
            TargetWord::Lunette => "Lunette's target",
            TargetWord::Lio => "Linux's target (LIO)",
            TargetWord::Tgt => "tgt",
        }
    }

    /// Returns the LUN of the disk.
    fn lun(self) -> u32 {
        match self {
            TargetWord::Lunette | TargetWord::Lio => 0,
            // LUN 0 is tgt's controller.
            TargetWord::Tgt => 1,
        }
    }
}

const AFTER: &str = "\
Starts two guests with a network cable between them. One guest runs a target with a RAM disk, the other Lunette's initiator. The command measures
reads, writes and both, with one to several connections in one session. The login requests the parameters of a well-known study of MC/S:
MaxRecvDataSegmentLength=131072, MaxBurstLength=262144, FirstBurstLength=65536, ImmediateData=Yes, InitialR2T=Yes. The cable is a socket between
the two QEMU processes. Without KVM the guests are emulated, and only ratios between the rows are meaningful.

Examples:
    lunette vm mcs
    lunette vm mcs --connections 8 --mtu 1500 --json
    lunette vm mcs --connections 2 --multipath
    lunette vm mcs --target lio
    lunette vm mcs --target tgt";

impl McsArguments {
    /// Number of measured sessions and devices.
    fn ways(&self) -> u32 {
        u32::from(self.connections) + if self.multipath { 2 } else { 0 }
    }

    /// Number of measurements of a case.
    fn turns(&self) -> u32 {
        self.ways() * self.repetitions
    }

    /// Refuses options that exclude each other.
    fn check(&self) -> Outcome {
        match self.multipath && self.target != TargetWord::Lunette {
            true => Err(Failure::mistake(
                "--multipath needs Lunette's target; hint: omit --target",
            )),
            false => Ok(()),
        }
    }

    /// Returns the command in the initiator's guest that measures a case. `devices` are the arguments for the devices of Linux's initiator.
    fn command(&self, case: &str, devices: &str) -> String {
        let McsArguments {
            connections,
            bs,
            iodepth,
            repetitions,
            turn_ms,
            ..
        } = self;
        format!(
            "lunette-lab bench mcs iscsi://{TARGET_ADDRESS}/{TARGET}/{}{KEYS} --connections {connections} --bs {bs} --iodepth {iodepth} \
             --repetitions {repetitions} --turn-ms {turn_ms} --place /tmp --only {case} --json {devices}",
            self.target.lun()
        )
    }

    /// Returns the work of the study.
    pub fn effort(&self) -> Effort {
        Effort {
            boots: 2,
            runs: CASES.len() as u32 * self.turns(),
            seconds: self.turn_ms as f64 / 1e3,
            written: match self.content.unwritten {
                true => 0,
                false => u64::from(self.size_mib) << 20,
            },
        }
    }
}

/// Other load on the host, by case.
type Loads = Vec<(&'static str, Disturbance)>;

/// Rows of the table, with the conditions of the measurement.
struct Table {
    rows: Vec<McsRow>,
    /// Guests and load, then the host.
    notes: [String; 2],
    accelerator: Accelerator,
    /// Other load on the host, by case.
    loads: Loads,
    json: Value,
}

impl Table {
    /// Reasons against the results.
    fn cautions(&self) -> Vec<String> {
        let disturbed = self.loads.iter().filter(|(_, load)| load.is_disturbed());
        let disturbed = disturbed.map(|(case, load)| {
            let load = load.describe();
            format!("{case}: {load}: differences are less reliable.")
        });
        let emulated = caution(self.accelerator.word()).map(str::to_owned);
        disturbed.chain(emulated).collect()
    }

    fn text(&self) -> String {
        let [load, host] = &self.notes;
        let cautions = self.cautions().into_iter();
        let cautions: String = cautions.map(|line| format!("{line}\n\n")).collect();
        format!(
            "{load}\n\n{host}\n\n{cautions}{}\n\n{}",
            mcs_columns(),
            mcs_rows(&self.rows)
        )
    }

    /// Returns bars of the bandwidth, grouped by case.
    fn chart(&self) -> Chart {
        let (mut cases, mut names) = (Vec::new(), Vec::new());
        for row in &self.rows {
            let name = series_name(row);
            if !cases.contains(&row.case) {
                cases.push(row.case.clone());
            }
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let ratios = mcs_ratios(&self.rows);
        let point = |case: &str, name: &str| {
            let mut rows = self.rows.iter().zip(&ratios);
            let is_it = |row: &McsRow| row.case == case && series_name(row) == name;
            let (row, ratio) = rows.find(|(row, _)| is_it(row))?;
            let found = spread(&row.bytes_per_second);
            Some(Point {
                value: found.median / 1e6,
                low: found.min / 1e6,
                high: found.max / 1e6,
                ratio: ratio.map(|ratio| ratio.ratio.value),
            })
        };
        let series = names.iter().map(|name| Series {
            name: name.clone(),
            points: cases.iter().map(|case| point(case, name)).collect(),
        });
        Chart {
            title: "One session with several connections".to_owned(),
            unit: "MB/s".to_owned(),
            notes: self.notes.to_vec(),
            series: series.collect(),
            groups: cases.clone(),
            stacked: false,
            logarithmic: false,
        }
    }

    fn write(&self, folder: &Path) -> Result<()> {
        create_folder(folder)?;
        let chart = self.chart();
        draw(&chart, folder, "mcs", &Painter::new())?;
        let mut page = Page {
            title: chart.title.clone(),
            about: self.notes.iter().cloned().chain([mcs_columns()]).collect(),
            cautions: self.cautions(),
            texts: vec![mcs_rows(&self.rows)],
            ..Page::default()
        };
        page.add_chart("mcs", &chart);
        write_file(folder, "report.html", page.html().as_bytes())?;
        write_json(folder, &self.json)
    }
}

/// Name of a row in the picture.
fn series_name(row: &McsRow) -> String {
    match (&row.device, row.connections) {
        (Some(name), _) => name.clone(),
        (None, 1) => "1 connection".to_owned(),
        (None, n) => format!("{n} connections"),
    }
}

/// Two guests, and the parameters negotiated between them.
struct Rig {
    target: Guest,
    initiator: Guest,
    /// Arguments for the devices of Linux's initiator.
    devices: String,
    agreed: Value,
}

/// Measures.
///
/// # Errors
/// A failure to start, or during the measurement.
pub fn run(arguments: &McsArguments) -> Outcome {
    arguments.check()?;
    vm::watch().map_err(failed)?;
    use_lunette(cli_common::find_sibling("lunette")?);
    let measured = measure(arguments).map_err(study_failed)?;
    if vm::interrupted() {
        return interrupted(&measured, arguments);
    }
    if let Some(folder) = &arguments.folder {
        measured.write(folder).map_err(failed)?;
    }
    let text = match arguments.json {
        true => format!("{}\n", measured.json),
        false => measured.text(),
    };
    write!(cli_common::stdout(), "{text}")?;
    if let Some(folder) = &arguments.notes {
        note(folder, "vm mcs", &text)?;
    }
    Ok(())
}

/// Prints and saves the rows that an interrupted run has measured.
fn interrupted(measured: &Table, arguments: &McsArguments) -> Outcome {
    if !measured.rows.is_empty() {
        write!(cli_common::stdout(), "{}", measured.text())?;
        if let Some(folder) = &arguments.folder {
            create_folder(folder)
                .and_then(|()| write_partial(folder, &measured.json))
                .map_err(failed)?;
        }
    }
    Err(Failure::Interrupted)
}

/// Creates the folder of the results.
fn create_folder(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

/// Login keys in the syntax of a subject of `bench`.
const KEYS: &str =
    ",max_segment=131072,max_burst=262144,first_burst=65536,immediate_data=1,initial_r2t=1";
/// Login keys in the syntax of `lunette iscsi parameters`.
const FLAGS: &str = "--max-recv-data-segment-length 131072 --max-burst-length 262144 --first-burst-length 65536 --immediate-data yes --initial-r2t yes";

/// Returns the parameters of other targets that differ from their defaults, as Lunette's target declares them.
fn parameters(connections: &str) -> [(&'static str, &str); 2] {
    [
        ("MaxRecvDataSegmentLength", "262144"),
        ("MaxConnections", connections),
    ]
}

/// Parameters of [`KEYS`] in the syntax of open-iscsi.
const NODE_SETTINGS: [(&str, &str); 7] = [
    ("node.conn[0].iscsi.MaxRecvDataSegmentLength", "131072"),
    ("node.session.iscsi.MaxBurstLength", "262144"),
    ("node.session.iscsi.FirstBurstLength", "65536"),
    ("node.session.iscsi.ImmediateData", "Yes"),
    ("node.session.iscsi.InitialR2T", "Yes"),
    ("node.session.cmds_max", "256"),
    ("node.session.queue_depth", "128"),
];

/// Connects Linux's initiator. Returns the arguments of `bench mcs` for its devices.
fn devices(initiator: &mut Guest) -> Result<String> {
    print_line(&"connecting Linux's initiator with two sessions");
    let portals = [3260, 3261].map(|port| format!("{TARGET_ADDRESS}:{port}"));
    let portals = [portals[0].as_str(), portals[1].as_str()];
    let paths = initiator.two_paths(TARGET, portals, &NODE_SETTINGS)?;
    Ok(beside(&paths))
}

/// Returns the arguments of `bench mcs` for the devices of two sessions.
fn beside(paths: &TwoPaths) -> String {
    format!(
        "--beside '1 session of Linux={}' --beside '2 sessions of Linux={}'",
        paths.first, paths.map
    )
}

/// Writes the disk.
fn fill(
    target: &mut Guest,
    initiator: &mut Guest,
    unit: &str,
    arguments: &McsArguments,
) -> Result<()> {
    print_line(&"filling the disk");
    let filled = initiator.ok(&format!(
        "set -e
        yes lunette | head -c {} >/tmp/content
        lunette-lab iscsi copy /tmp/content {unit}/{} --quiet >/dev/null
        rm /tmp/content",
        u64::from(arguments.size_mib) << 20,
        arguments.target.lun()
    ));
    if let Err(error) = filled {
        let log = target.ok("dmesg | tail -n 10").unwrap_or_default();
        return Err(error.context(format!("cannot fill the disk; the target's kernel:\n{log}")));
    }
    Ok(())
}

impl Rig {
    fn start(arguments: &McsArguments) -> Result<Rig> {
        let cable = tempfile::Builder::new()
            .prefix("lunette-cable-")
            .tempdir()?;
        let cable = cable.path().join("cable");
        let guest = |name: &str, waits: bool, last: u8| {
            print_line(&format!("starting the guest of the {name}"));
            let guest = GuestBuilder::new(name)
                .cpus(arguments.cpus)
                .memory_mib(512 + 2 * arguments.size_mib);
            let mtu = arguments.mtu;
            let guest = match (waits, arguments.target) {
                (true, TargetWord::Lio) => guest.target_on_cable(&cable, waits, mtu, last),
                (true, TargetWord::Tgt) => guest.tgt_on_cable(&cable, waits, mtu, last),
                (false, _) if arguments.multipath => guest.paths_on_cable(&cable, waits, mtu, last),
                _ => guest.lunette_on_cable(&cable, waits, mtu, last),
            };
            guest.boot()
        };
        let size = arguments.size_mib;
        let connections = arguments.connections.to_string();
        let mut target = guest("target", true, 1)?;
        let mut initiator = guest("initiator", false, 2)?;
        target.join_network(&format!("{TARGET_ADDRESS}/24"), arguments.mtu)?;
        initiator.join_network(&format!("{INITIATOR_ADDRESS}/24"), arguments.mtu)?;
        match arguments.target {
            TargetWord::Lunette => target.serve_lunette(&format!(
                "--disk d0=ram:{size}M --iscsi {TARGET}=d0 --portal {TARGET_ADDRESS}:3260 --portal {TARGET_ADDRESS}:3261 --demo-mode rw"
            ))?,
            TargetWord::Lio => {
                let parameters = parameters(&connections);
                target.serve_kernel_target(TARGET, size, 0, &parameters)?;
                target.allow_slow_initiator(TARGET, INITIATOR_NAME)?;
            }
            TargetWord::Tgt => {
                target.serve_tgt(TARGET, size, &parameters(&connections))?;
            }
        }
        let unit = format!("iscsi://{TARGET_ADDRESS}/{TARGET}");
        let agreed = initiator.ok(&format!(
            "lunette-lab iscsi parameters {unit} {FLAGS} --json"
        ))?;
        if !arguments.content.unwritten {
            fill(&mut target, &mut initiator, &unit, arguments)?;
        }
        let devices = match arguments.multipath {
            true => devices(&mut initiator)?,
            false => String::new(),
        };
        Ok(Rig {
            target,
            initiator,
            devices,
            agreed: serde_json::from_str(&agreed).context("the parameters are not JSON")?,
        })
    }

    /// Measures a case with all numbers of connections, in turns.
    fn rows(&mut self, arguments: &McsArguments, case: &str) -> Result<Vec<McsRow>> {
        let turn_ms = arguments.turn_ms;
        let turns = u64::from(arguments.turns());
        // Includes warm-up, logins, and repeated turns.
        let limit = Duration::from_secs(120) + Duration::from_millis(turns * (turn_ms + 1000) * 3);
        let script = format!("cd /tmp && {}", arguments.command(case, &self.devices));
        print_line(&format!(
            "measuring {case}: {turns} turns of {:.1} s",
            turn_ms as f64 / 1e3
        ));
        let running = self.initiator.start(&script)?;
        let mut end = Instant::now() + limit;
        let mut is_interrupted = false;
        let output = loop {
            if let Some(output) = self.initiator.poll(running)? {
                break output;
            }
            if vm::interrupted() && !is_interrupted {
                is_interrupted = true;
                end = Instant::now() + PARTIAL_LIMIT;
                self.initiator.start("killall -INT lunette-lab")?;
            }
            if Instant::now() > end {
                bail!("nothing was measured within {} s", limit.as_secs());
            }
            std::thread::sleep(Duration::from_millis(200));
        };
        if output.code != 0 && !is_interrupted {
            bail!("bench mcs in the guest: {}", output.stderr.trim());
        }
        serde_json::from_str(&output.stdout).context("the guest's response is not JSON")
    }

    /// Measures all cases, and the other load on the host during each. Returns early after an interruption.
    fn all_rows(&mut self, arguments: &McsArguments) -> Result<(Vec<McsRow>, Loads)> {
        let processes = [self.target.process().id(), self.initiator.process().id()];
        let (mut rows, mut loads) = (Vec::new(), Vec::new());
        let mut progress = Progress::new(CASES.len() * arguments.turns() as usize);
        for case in CASES {
            let measured = quietly_beside(case, &processes, || self.rows(arguments, case));
            let (more, load) = match measured {
                // The cases before it are a partial result.
                Err(_) if vm::interrupted() => break,
                measured => measured?,
            };
            rows.extend(more);
            loads.push((case, load));
            if vm::interrupted() {
                break;
            }
            print_line(&format_args!(
                "{case}: {}",
                progress.advance(arguments.turns() as usize)
            ));
        }
        Ok((rows, loads))
    }

    /// CPU seconds of the target's guest: user, nice, system, interrupts and soft interrupts. The network and Linux's target are in the
    /// kernel.
    fn target_cpu(&mut self) -> Result<f64> {
        let text = self.target.ok("head -n 1 /proc/stat")?;
        let numbers: Vec<f64> = text
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        let busy = [0, 1, 2, 5, 6].map(|at| numbers.get(at).copied().unwrap_or(0.0));
        Ok(busy.iter().sum::<f64>() / 100.0)
    }
}

/// Measures, and describes the conditions.
fn measure(arguments: &McsArguments) -> Result<Table> {
    const NEGOTIATED_KEYS: [&str; 4] = [
        "MaxBurstLength",
        "FirstBurstLength",
        "ImmediateData",
        "InitialR2T",
    ];
    let mut rig = Rig::start(arguments)?;
    let kernel = rig.initiator.ok("uname -r")?.trim().to_owned();
    let before = rig.target_cpu()?;
    let (rows, loads) = rig.all_rows(arguments)?;
    let target_cpu = match vm::interrupted() {
        true => None,
        false => Some(rig.target_cpu()? - before),
    };
    let accelerator = Accelerator::detect()?;
    let value = |key: &str| match &rig.agreed[key] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let agreed = NEGOTIATED_KEYS.map(|key| format!("{key}={}", value(key)));
    let emulated = match accelerator {
        Accelerator::Kvm => "",
        Accelerator::Tcg => " (emulated)",
    };
    let load = format!(
        "{}{emulated}, {}, guest Linux {kernel}; {}{}; two guests of {} virtual CPUs, a cable with packets of {} bytes; one session with a RAM disk of {} MiB, \
         {}; {} a request, {} in flight; {} turns of {} ms. MaxRecvDataSegmentLength=131072 (declared), {}. \
         {}Bars are medians of the turns; lines extend from the minimum to the maximum.",
        accelerator.word(),
        qemu_version(),
        arguments.target.describe(),
        match arguments.multipath {
            true => ", beside Linux's initiator with one session and with two under dm-multipath",
            false => "",
        },
        arguments.cpus,
        arguments.mtu,
        arguments.size_mib,
        arguments.content.describe(),
        arguments.bs,
        arguments.iodepth,
        arguments.repetitions,
        arguments.turn_ms,
        agreed.join(", "),
        target_cpu.map_or_else(String::new, |seconds| format!(
            "The target's guest used {seconds:.1} s of its CPUs in all. "
        )),
    );
    let environment = bench::run::environment();
    let notes = [load, format!("Host: {}.", environment.provenance())];
    let json = json!({
        "accelerator": accelerator.word(),
        "target": arguments.target.describe(),
        "mtu": arguments.mtu,
        "agreed": rig.agreed,
        "target_cpu_seconds": target_cpu,
        "conditions": notes,
        "environment": environment,
        "load": loads.iter().map(|(_, load)| load).max_by(|one, other| one.sum().total_cmp(&other.sum())),
        "loads": loads.iter().map(|(case, load)| json!({"case": case, "load": load})).collect::<Vec<_>>(),
        "disturbed": loads.iter().any(|(_, load)| load.is_disturbed()),
        "rows": rows,
    });
    rig.initiator.kill()?;
    rig.target.kill()?;
    Ok(Table {
        rows,
        notes,
        accelerator,
        loads,
        json,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Words {
        #[command(flatten)]
        arguments: McsArguments,
    }

    /// `lunette bench`, which runs in the initiator's guest.
    #[derive(clap::Parser)]
    struct InGuest {
        #[command(flatten)]
        arguments: crate::bench::BenchArguments,
    }

    fn parsed(words: &str) -> McsArguments {
        let words = std::iter::once("mcs").chain(words.split_whitespace());
        <Words as clap::Parser>::parse_from(words).arguments
    }

    /// Splits a command line with single quotes around whole words.
    fn split(command: &str) -> Vec<String> {
        let parts = command.split('\'').zip([false, true].into_iter().cycle());
        let words = parts.flat_map(|(part, is_quoted)| match is_quoted {
            true => vec![part],
            false => part.split_whitespace().collect(),
        });
        words.map(str::to_owned).collect()
    }

    #[test]
    fn multipath_is_refused_for_targets_without_a_second_portal() {
        for (words, is_good) in [
            ("--multipath", true),
            ("--multipath --target lunette", true),
            ("--target lio", true),
            ("--target tgt", true),
            ("--target lio --multipath", false),
            ("--target tgt --multipath", false),
        ] {
            let checked = parsed(words).check();
            let is_mistake = matches!(checked, Err(Failure::Mistaken));
            assert_eq!(
                (checked.is_ok(), is_mistake),
                (is_good, !is_good),
                "{words}"
            );
        }
    }

    #[test]
    fn each_target_is_measured_by_a_command_that_bench_accepts() {
        let paths = TwoPaths {
            first: "/dev/sda".to_owned(),
            map: "/dev/dm-0".to_owned(),
        };
        for (words, devices, lun, runs) in [
            ("", String::new(), 0, 18),
            ("--target lio", String::new(), 0, 18),
            ("--target tgt", String::new(), 1, 18),
            ("--multipath", beside(&paths), 0, 36),
        ] {
            let arguments = parsed(&format!("--connections 2 --repetitions 3 {words}"));
            assert_eq!(arguments.effort().runs, runs, "{words}");
            let command = split(&arguments.command("read", &devices));
            let [program, tool, mcs, target, ..] = &command[..] else {
                panic!("{command:?}");
            };
            assert_eq!([program, tool, mcs], ["lunette-lab", "bench", "mcs"]);
            let unit = format!("{TARGET_ADDRESS}/{TARGET}/{lun},");
            assert!(target.contains(&unit), "{target}");
            let subject = format!("{target},name=2,connections=2");
            bench::driver::Subject::parse(&subject).unwrap();
            let inner = <InGuest as clap::Parser>::try_parse_from(&command[1..]);
            let inner = format!("{:?}", inner.unwrap().arguments);
            let is_beside = inner.contains("2 sessions of Linux") && inner.contains("/dev/dm-0");
            assert_eq!(is_beside, arguments.multipath, "{inner}");
        }
        let declared = ("MaxRecvDataSegmentLength", "262144");
        assert_eq!(parameters("8"), [declared, ("MaxConnections", "8")]);
    }

    #[test]
    fn the_picture_has_bars_by_connections_relative_to_one() {
        let row = |case: &str, connections, bytes: f64| McsRow {
            case: case.to_owned(),
            connections,
            device: None,
            bytes_per_second: vec![bytes, bytes],
            iops: vec![1.0, 1.0],
            target_cpu_seconds_per_million: None,
            driver_cpu_seconds_per_million: None,
        };
        let table = Table {
            rows: vec![
                row("read", 1, 1e6),
                row("read", 2, 2e6),
                row("write", 1, 3e6),
            ],
            notes: ["load".to_owned(), "host".to_owned()],
            accelerator: Accelerator::Tcg,
            loads: vec![
                ("read", Disturbance::default()),
                (
                    "write",
                    Disturbance {
                        foreign_cpus: 1.5,
                        stolen_cpus: 0.0,
                    },
                ),
            ],
            json: json!({}),
        };
        let chart = table.chart();
        assert_eq!(chart.groups, ["read", "write"]);
        let points = |at: usize| {
            let points = chart.series[at].points.iter();
            let points = points.map(|point| point.as_ref().map(|one| (one.value, one.ratio)));
            points.collect::<Vec<_>>()
        };
        assert_eq!(points(0), [Some((1.0, None)), Some((3.0, None))]);
        assert_eq!(points(1), [Some((2.0, Some(2.0))), None]);
        let text = table.text();
        let disturbed = "write: disturbed: others used 1.50 CPUs";
        assert!(
            text.contains("emulated") && text.contains(disturbed) && !text.contains("read: dist"),
            "{text}"
        );
    }
}
