//! `lunette vm mcs`: measures one session with several connections between two guests, a target and an initiator.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bench::table::{McsRow, mcs_rows};
use clap::Args;
use cli_common::{Outcome, print_line};
use serde_json::{Value, json};
use vm::{Accelerator, Guest, GuestBuilder, use_lunette};

use super::failed;
use crate::bench::note;

const TARGET: &str = "iqn.2026-11.org.example:guest";
const TARGET_ADDRESS: &str = "10.9.0.1";
const INITIATOR_ADDRESS: &str = "10.9.0.2";
/// Cases of the table.
const CASES: u32 = 3;

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
    /// Size of the RAM disk in MiB, 4 to 4096. It is written once before the measurement
    #[arg(long, value_name = "MIB", default_value_t = 128, value_parser = clap::value_parser!(u32).range(4..=4096))]
    size_mib: u32,
    /// Number of measurements of each case and number of connections, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Duration of each measurement in milliseconds, 10 to 600000
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..=600_000))]
    turn_ms: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Append the table to FOLDER/YYYY-MM-DD.md
    #[arg(long, value_name = "FOLDER")]
    notes: Option<PathBuf>,
}

const AFTER: &str = "\
Starts two guests with a network cable between them. One guest runs Lunette's target with a RAM disk, the other its initiator. The command measures
reads, writes and both, with one to several connections in one session. The login requests the parameters of a well-known study of MC/S:
MaxRecvDataSegmentLength=131072, MaxBurstLength=262144, FirstBurstLength=65536, ImmediateData=Yes, InitialR2T=Yes. The cable is a socket between
the two QEMU processes. Without KVM the guests are emulated, and only ratios between the rows are meaningful.

Examples:
    lunette vm mcs
    lunette vm mcs --connections 8 --mtu 1500 --json";

/// Two guests, and the parameters negotiated between them.
struct Rig {
    target: Guest,
    initiator: Guest,
    agreed: Value,
}

/// Measures.
///
/// # Errors
/// A failure to start, or during the measurement.
pub fn run(arguments: &McsArguments) -> Outcome {
    vm::watch().map_err(failed)?;
    use_lunette(cli_common::find_sibling("lunette")?);
    let made = measure(arguments).map_err(failed)?;
    let text = match arguments.json {
        true => format!("{}\n", made.0),
        false => made.1,
    };
    write!(cli_common::stdout(), "{text}")?;
    if let Some(folder) = &arguments.notes {
        note(folder, "vm mcs", &text)?;
    }
    Ok(())
}

/// Login keys in the syntax of a subject of `bench`.
const KEYS: &str =
    ",max_segment=131072,max_burst=262144,first_burst=65536,immediate_data=1,initial_r2t=1";
/// Login keys in the syntax of `lunette iscsi parameters`.
const FLAGS: &str = "--max-recv-data-segment-length 131072 --max-burst-length 262144 --first-burst-length 65536 --immediate-data yes --initial-r2t yes";

impl Rig {
    fn start(arguments: &McsArguments) -> Result<Rig> {
        let cable = tempfile::Builder::new()
            .prefix("lunette-cable-")
            .tempdir()?;
        let cable = cable.path().join("cable");
        let guest = |name: &str, waits: bool, last: u8| {
            print_line(&format!("starting the guest of the {name}"));
            GuestBuilder::new(name)
                .cpus(arguments.cpus)
                .memory_mib(512 + 2 * arguments.size_mib)
                .lunette_on_cable(&cable, waits, arguments.mtu, last)
                .boot()
        };
        let size = arguments.size_mib;
        let mut target = guest("target", true, 1)?;
        let mut initiator = guest("initiator", false, 2)?;
        target.join_network(&format!("{TARGET_ADDRESS}/24"), arguments.mtu)?;
        initiator.join_network(&format!("{INITIATOR_ADDRESS}/24"), arguments.mtu)?;
        target.serve_lunette(&format!(
            "--disk d0=ram:{size}M --iscsi {TARGET}=d0 --portal {TARGET_ADDRESS}:3260 --demo-mode rw"
        ))?;
        let unit = format!("iscsi://{TARGET_ADDRESS}/{TARGET}");
        let agreed = initiator.ok(&format!(
            "lunette-lab iscsi parameters {unit} {FLAGS} --json"
        ))?;
        print_line(&"filling the disk");
        initiator.ok(&format!(
            "set -e
            yes lunette | head -c {} >/tmp/content
            lunette-lab iscsi copy /tmp/content {unit}/0 --quiet >/dev/null
            rm /tmp/content",
            u64::from(size) << 20
        ))?;
        Ok(Rig {
            target,
            initiator,
            agreed: serde_json::from_str(&agreed).context("the parameters are not JSON")?,
        })
    }

    fn rows(&mut self, arguments: &McsArguments) -> Result<Vec<McsRow>> {
        let McsArguments {
            connections,
            bs,
            iodepth,
            repetitions,
            turn_ms,
            ..
        } = arguments;
        let turns = u64::from(CASES * u32::from(*connections) * repetitions);
        // Includes warm-up, logins, and repeated turns.
        let limit = Duration::from_secs(120) + Duration::from_millis(turns * (turn_ms + 1000) * 3);
        let script = format!(
            "cd /tmp && lunette-lab bench mcs iscsi://{TARGET_ADDRESS}/{TARGET}/0{KEYS} --connections {connections} --bs {bs} \
             --iodepth {iodepth} --repetitions {repetitions} --turn-ms {turn_ms} --place /tmp --json"
        );
        print_line(&format!(
            "measuring: {turns} turns of {:.1} s",
            *turn_ms as f64 / 1e3
        ));
        let running = self.initiator.start(&script)?;
        let began = Instant::now();
        let output = loop {
            if let Some(output) = self.initiator.poll(running)? {
                break output;
            }
            if vm::interrupted() {
                bail!("interrupted");
            }
            if began.elapsed() > limit {
                bail!("nothing was measured within {} s", limit.as_secs());
            }
            std::thread::sleep(Duration::from_millis(200));
        };
        if output.code != 0 {
            bail!("bench mcs in the guest: {}", output.stderr.trim());
        }
        serde_json::from_str(&output.stdout).context("the guest's response is not JSON")
    }

    /// CPU seconds of the target's daemon, as counted in its guest.
    fn target_cpu(&mut self) -> Result<f64> {
        let text = self
            .target
            .ok("cut -d ' ' -f 14,15 /proc/$(pidof lunette)/stat")?;
        let ticks = text
            .split_whitespace()
            .filter_map(|word| word.parse::<f64>().ok());
        Ok(ticks.sum::<f64>() / 100.0)
    }
}

/// Measures and returns the result as JSON and as text.
fn measure(arguments: &McsArguments) -> Result<(Value, String)> {
    let mut rig = Rig::start(arguments)?;
    let before = rig.target_cpu()?;
    let rows = rig.rows(arguments)?;
    let target_cpu = rig.target_cpu()? - before;
    let kernel = rig.initiator.ok("uname -r")?.trim().to_owned();
    let accelerator = Accelerator::detect()?;
    let machine = bench::run::environment();
    let labelled = match accelerator {
        Accelerator::Kvm => String::new(),
        Accelerator::Tcg => {
            ": emulated, so compare numbers of connections and ignore absolute figures".to_owned()
        }
    };
    let value = |key: &str| match &rig.agreed[key] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    const NEGOTIATED_KEYS: [&str; 4] = [
        "MaxBurstLength",
        "FirstBurstLength",
        "ImmediateData",
        "InitialR2T",
    ];
    let agreed = NEGOTIATED_KEYS
        .map(|key| format!("{key}={}", value(key)))
        .join(", ");
    let text = format!(
        "{}, {} CPUs {}; two guests with Linux {kernel}, {} CPUs each, by QEMU with {}{labelled}; {} turns of {} ms each; lunette {}\n\n\
         A cable between the guests, packets of {} bytes; MaxRecvDataSegmentLength=131072 (declared), {agreed}\n\n\
         One session, {} a request, {} in flight; MB/s and I/Os per second: median, half the spread; against one connection: ratio of medians \
         with its 95 % interval; CPU seconds per million requests. The target used {target_cpu:.1} s of its guest's CPUs in all\n\n{}",
        machine.kernel,
        machine.cpus,
        machine.cpu,
        arguments.cpus,
        accelerator.word(),
        arguments.repetitions,
        arguments.turn_ms,
        machine.build(),
        arguments.mtu,
        arguments.bs,
        arguments.iodepth,
        mcs_rows(&rows),
    );
    let json = json!({
        "accelerator": accelerator.word(),
        "mtu": arguments.mtu,
        "agreed": rig.agreed,
        "target_cpu_seconds": target_cpu,
        "rows": rows,
    });
    rig.initiator.kill()?;
    rig.target.kill()?;
    Ok((json, text))
}
