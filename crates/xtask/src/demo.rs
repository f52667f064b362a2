//! Demonstration: one daemon and one guest with the same two disks on both transports, measured in the guest and by the daemon, and the
//! web page. All processes are stopped at the end, also after errors and Ctrl-C.

mod page;

use anyhow::{Context, Result, bail};
use end_to_end::{Daemon, DaemonBuilder, Guest, GuestBuilder, Scratch};
use page::{Page, Stay};
use serde_json::Value;
use std::io::{IsTerminal, Read};
use std::time::{Duration, Instant};
use vm::{Accelerator, interrupted};

/// Number of rounds. The transports alternate, so that other load affects both; the median is shown.
const ROUNDS: usize = 3;
const SECONDS_PER_ROUND: u32 = 1;
const MEASURED_MIB: u32 = 128;
const DEPTH: u32 = 4;
const CPUS: u32 = 2;

/// Requests in flight during the report, one value after the other.
const SHOWN_DEPTHS: [u32; 3] = [1, DEPTH, 4 * DEPTH];

/// Commands for the first steps after the demonstration, with their purpose. `make demo` has built `lunette` only.
const NEXT: [(&str, &str); 3] = [
    (
        "target/release/lunette serve --disk d0=ram:512M --vhost-blk d0:/tmp/d0.sock",
        "serve a disk to a guest of yours; docs/getting-started.md has QEMU's options",
    ),
    (
        "make build && target/release/lunette vm plan scsi:4x1 blk:2",
        "print the commands for a guest with these disks on both transports",
    ),
    (
        "make build && target/release/lunette doctor",
        "find settings of this host that make disks slow",
    ),
];

/// A disk and its export on each transport.
struct Disk {
    title: &'static str,
    exports: [&'static str; 2],
}

const DISKS: [Disk; 2] = [
    Disk {
        title: "RAM",
        exports: ["ram", "ram-scsi"],
    },
    Disk {
        title: "file",
        exports: ["file", "file-scsi"],
    },
];
/// Device names in the guest, in the same order.
type Devices = [[String; 2]; 2];

const TRANSPORTS: [&str; 2] = ["virtio-blk", "virtio-scsi"];
const LOADS: [(&str, &str); 2] = [("randread", "read"), ("randwrite", "write")];

/// Results of one round.
struct Figures {
    iops: f64,
    mean_us: f64,
    p99_us: f64,
}

/// Runs the demonstration and prints the results.
pub fn run() -> Result<()> {
    let outcome = show();
    if interrupted() {
        println!("\nstopped; the daemon and the guest have ended");
        std::process::exit(130);
    }
    outcome
}

fn show() -> Result<()> {
    let ink = Ink::new();
    let scratch = Scratch::new()?;
    let stay = Stay::of_this_process()?;
    let page = Page::new(&scratch)?;
    let builder = DaemonBuilder::new(&scratch)
        .release()
        .disk("ram=ram:256M")
        .disk("file=file:vm.raw,cache=none")
        .vhost_blk("ram")
        .vhost_blk("file")
        .vhost_scsi("ram-scsi")
        .vhost_scsi("file-scsi")
        .lun("ram-scsi/0:0=ram")
        .lun("file-scsi/0:0=file");
    // The file is written once, like the RAM disk below, because the first write of a block is slower.
    let file = std::fs::File::create(scratch.file("vm.raw"))?;
    std::io::copy(
        &mut std::io::repeat(0x55).take(u64::from(MEASURED_MIB) << 20),
        &mut &file,
    )?;
    file.set_len(1 << 30)?;
    file.sync_all()?;
    println!(
        "{}",
        ink.heading("One daemon, one guest, two transports to the same disks")
    );
    println!("  {}", ink.faint(&builder.command_line()));
    let mut daemon = page.serve(builder).start()?;
    println!("  daemon up, process {}", daemon.process().id());

    println!("  preparing the guest: workload program, initramfs, check of KVM");
    let accelerator = Accelerator::detect()?;
    let how = match accelerator {
        Accelerator::Kvm => "under KVM",
        Accelerator::Tcg => {
            "emulated, because KVM does not work here: compare the columns, not the machine"
        }
    };
    let started = Instant::now();
    let mut builder = GuestBuilder::new("demo").cpus(CPUS);
    for disk in &DISKS {
        let [blk, scsi] = disk
            .exports
            .map(|export| scratch.socket(&format!("{export}.sock")));
        builder = builder
            .vhost_user_blk(&blk, CPUS)
            .vhost_user_scsi(&scsi, CPUS);
    }
    let mut guest = builder.boot()?;
    let devices = devices(&mut guest)?;
    let kernel = guest.ok("uname -r")?;
    println!(
        "  guest up in {:.1} s: Linux {}, {CPUS} CPUs, booted with mitigations=off, {how}",
        started.elapsed().as_secs_f64(),
        kernel.trim()
    );

    compare(&mut guest, &devices, &ink)?;
    stages(&daemon.latency(&["--json"])?, &ink)?;
    show_page(&page, &daemon, &scratch, &mut guest, &devices, &ink)?;
    page.linger(stay)?;

    guest.power_off()?;
    let status = daemon.stop(Duration::from_secs(10))?;
    if !status.success() {
        bail!(
            "the daemon ended with {status}\n{}",
            daemon.process().log_tail()
        );
    }
    println!(
        "\n{}",
        ink.heading("The guest and the daemon have ended, and their files are removed.")
    );
    println!("\n{}", ink.heading("Try next"));
    for (command, purpose) in NEXT {
        println!("  {command}\n      {}", ink.faint(purpose));
    }
    Ok(())
}

/// Creates a report and a screenshot of the daemon's page under load.
fn show_page(
    page: &Page,
    daemon: &Daemon,
    scratch: &Scratch,
    guest: &mut Guest,
    [[ram, _], _]: &Devices,
    ink: &Ink,
) -> Result<()> {
    println!("\n{}", ink.heading("In a browser"));
    let report = page.begin_report(daemon, scratch)?;
    for depth in SHOWN_DEPTHS {
        let seconds = page::SECONDS / SHOWN_DEPTHS.len() as u32;
        guest.io_ok(&format!(
            "load --file /dev/{ram} --rw randrw --bs 4096 --depth {depth} --runtime {seconds} --size {MEASURED_MIB}M"
        ))?;
    }
    let report = report.finish()?;
    println!("  report of this load: {}", report.display());
    match page::picture(&report, scratch)? {
        Some(picture) => println!("  picture of the page: {}", picture.display()),
        None => println!(
            "  no picture of the page, because Chromium is not installed; hint: apt-get install chromium"
        ),
    }
    Ok(())
}

/// Returns the device names. The kernel names virtio-blk disks in order, but SCSI disks as they are found.
fn devices(guest: &mut Guest) -> Result<Devices> {
    guest.wait_for_disks(&["vda", "vdb"])?;
    Ok([
        ["vda".into(), guest.scsi_disk(0, 0, 0)?],
        ["vdb".into(), guest.scsi_disk(1, 0, 0)?],
    ])
}

/// Measures both disks on both transports and prints a row per load.
fn compare(guest: &mut Guest, devices: &Devices, ink: &Ink) -> Result<()> {
    let [[ram, _], _] = devices;
    guest.ok(&format!(
        "dd if=/dev/zero of=/dev/{ram} bs=1M count={MEASURED_MIB} oflag=direct"
    ))?;
    let heading = format!(
        "Measured in the guest: 4 KiB, depth {DEPTH}; median of {ROUNDS} rounds of {SECONDS_PER_ROUND} s, with the transports in turns"
    );
    println!("\n{}", ink.heading(&heading));
    println!(
        "{:20}{}",
        "",
        TRANSPORTS
            .map(|transport| ink.transport(transport))
            .join("    ")
    );
    let columns = format!("{:>9}  {:>10}  {:>10}", "IOPS", "mean µs", "p99 µs");
    println!("  {:18}{}", "", [columns.as_str(); 2].join("    "));
    for (disk, transports) in DISKS.iter().zip(devices) {
        for (load, direction) in LOADS {
            let mut rounds: [Vec<Figures>; 2] = [Vec::new(), Vec::new()];
            for _ in 0..ROUNDS {
                for (device, figures) in transports.iter().zip(&mut rounds) {
                    figures.push(measure(guest, device, load, direction)?);
                }
            }
            let cells = rounds.map(|figures| {
                let iops = median(&figures, |round| round.iops);
                let (mean, p99) = (
                    median(&figures, |round| round.mean_us),
                    median(&figures, |round| round.p99_us),
                );
                format!("{iops:>9.0}  {mean:>10.0}  {p99:>10.0}")
            });
            println!(
                "  {:18}{}",
                format!("{:4}  random {direction}", disk.title),
                cells.join("    ")
            );
        }
    }
    Ok(())
}

fn median(rounds: &[Figures], figure: impl Fn(&Figures) -> f64) -> f64 {
    let mut values: Vec<f64> = rounds.iter().map(figure).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn measure(guest: &mut Guest, device: &str, load: &str, direction: &str) -> Result<Figures> {
    let report = guest.io_ok(&format!(
        "load --file /dev/{device} --rw {load} --bs 4096 --depth {DEPTH} --runtime {SECONDS_PER_ROUND} --size {MEASURED_MIB}M"
    ))?;
    let figure = |name: &str| {
        let value = report[direction].get(name).and_then(Value::as_f64);
        value.with_context(|| format!("guest-agent reported no {name}: {report}"))
    };
    Ok(Figures {
        iops: figure("iops")?,
        mean_us: figure("mean_us")?,
        p99_us: figure("p99_us")?,
    })
}

/// Prints the daemon's measurements in one table; all transports have the same hops.
fn stages(latency: &str, ink: &Ink) -> Result<()> {
    let latency: Value = serde_json::from_str(latency).context("lunette latency --json")?;
    println!(
        "\n{}",
        ink.heading(
            "Measured by the daemon: median time of each hop, µs (details: lunette latency)"
        )
    );
    let titles = DISKS.map(|disk| format!("{:>30}", disk.title));
    println!("{:20}{}", "", titles.join("    "));
    let transports = TRANSPORTS
        .map(|transport| format!("{transport:>14}"))
        .join("  ");
    for (_, direction) in LOADS {
        println!(
            "  {:18}{}",
            format!("random {direction}"),
            ink.faint(&[transports.as_str(); 2].join("    "))
        );
        let columns =
            DISKS.map(|disk| disk.exports.map(|export| rows(&latency, export, direction)));
        let first = columns[0][0]
            .clone()
            .context("the daemon has no measurements")?;
        for (index, (name, _)) in first.iter().enumerate() {
            let cell = |column: &Option<Vec<(String, f64)>>| {
                let value = column.as_ref().and_then(|rows| rows.get(index));
                value.map_or(format!("{:>14}", "-"), |(_, us)| format!("{us:>14.1}"))
            };
            let cells = columns
                .each_ref()
                .map(|disk| disk.each_ref().map(cell).join("  "));
            println!("    {name:16}{}", cells.join("    "));
        }
    }
    Ok(())
}

/// Returns each hop with its median in microseconds, and the total median and 99th percentile.
fn rows(latency: &Value, export: &str, direction: &str) -> Option<Vec<(String, f64)>> {
    let report = latency["reports"].as_array()?.iter().find(|report| {
        let title = report["title"].as_str().unwrap_or_default();
        title.split(' ').next() == Some(export)
    })?;
    let operation = report["operations"]
        .as_array()?
        .iter()
        .find(|found| found["operation"] == direction)?;
    let microseconds = |row: &Value, name: &str| Some(row[name].as_f64()? / 1e3);
    let mut rows = Vec::new();
    for row in operation["rows"]
        .as_array()?
        .iter()
        .chain(operation.get("total"))
    {
        let name = row["name"].as_str().unwrap_or("total").to_owned();
        let median = microseconds(row, "p50_ns")?;
        match name.as_str() {
            "total" => {
                rows.push(("total".to_owned(), median));
                rows.push(("  p99".to_owned(), microseconds(row, "p99_ns")?));
            }
            _ => rows.push((name, median)),
        }
    }
    Some(rows)
}

/// Colours for terminals that support them.
struct Ink {
    colours: bool,
}

impl Ink {
    fn new() -> Ink {
        Ink {
            colours: std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
        }
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colours {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    fn heading(&self, text: &str) -> String {
        self.paint("1", text)
    }

    fn faint(&self, text: &str) -> String {
        self.paint("2", text)
    }

    /// Formats a heading aligned to its columns. The padding is added first, because colour codes have no width.
    fn transport(&self, text: &str) -> String {
        self.paint("36", &format!("{text:>33}"))
    }
}
