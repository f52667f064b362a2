//! The demonstration: one daemon, one guest, the same two disks through both doors, measured inside the guest and by
//! the daemon. Everything is started here and stopped here, on errors and on Ctrl-C too.

use crate::{Accelerator, DaemonBuilder, Guest, GuestBuilder, Scratch, interrupted};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// The doors take turns, so that what else happens on the machine hits both; the median of the rounds is shown.
const ROUNDS: usize = 3;
const SECONDS_PER_ROUND: u32 = 1;
/// Every block is written before anything is measured: the first write of a block costs more than the next one.
const MEASURED_MIB: u32 = 128;
const DEPTH: u32 = 4;
const CPUS: u32 = 2;

/// A disk and how the guest calls it behind each door.
struct Disk {
    title: &'static str,
    doors: [&'static str; 2],
}

const DISKS: [Disk; 2] = [
    Disk {
        title: "RAM",
        doors: ["vda", "sda"],
    },
    Disk {
        title: "file",
        doors: ["vdb", "sdb"],
    },
];
const DOORS: [&str; 2] = ["virtio-blk", "virtio-scsi"];
const LOADS: [(&str, &str); 2] = [("randread", "read"), ("randwrite", "write")];

/// One round's figures.
struct Figures {
    iops: f64,
    mean_us: f64,
    p99_us: f64,
}

/// Runs it all and prints as it goes.
pub fn run() -> Result<()> {
    let outcome = show();
    if interrupted() {
        println!("\nstopped; the daemon and the guest are gone");
        std::process::exit(130);
    }
    outcome
}

fn show() -> Result<()> {
    let ink = Ink::new();
    let scratch = Scratch::new()?;
    let builder = DaemonBuilder::new(&scratch)
        .release()
        .disk("ram=ram:256M")
        .disk("file=file:vm.raw,size=1G,cache=none")
        .vhost_blk("ram")
        .vhost_blk("file")
        .vhost_scsi("scsi")
        .lun("scsi/0:0=ram")
        .lun("scsi/0:1=file");
    println!(
        "{}",
        ink.heading("One daemon, one guest, two doors to the same disks")
    );
    println!("  {}", ink.faint(&builder.command_line()));
    let mut daemon = builder.start()?;
    println!("  daemon up, process {}", daemon.process().id());

    let accelerator = Accelerator::detect()?;
    let how = match accelerator {
        Accelerator::Kvm => "under KVM",
        Accelerator::Tcg => {
            "emulated, for KVM does not work here: compare the columns, not the machine"
        }
    };
    let started = Instant::now();
    let mut guest = GuestBuilder::new("demo")
        .cpus(CPUS)
        .vhost_user_blk(&scratch.socket("ram.sock"), CPUS)
        .vhost_user_blk(&scratch.socket("file.sock"), CPUS)
        .vhost_user_scsi(&scratch.socket("scsi.sock"), CPUS)
        .boot()?;
    guest.wait_for_disks(&["vda", "vdb", "sda", "sdb"])?;
    let kernel = guest.ok("uname -r")?;
    println!(
        "  guest up in {:.1} s: Linux {}, {CPUS} CPUs, {how}",
        started.elapsed().as_secs_f64(),
        kernel.trim()
    );

    compare(&mut guest, &ink)?;

    println!(
        "\n{}",
        ink.heading("Seen by the daemon: where each request's time went (lunette latency)")
    );
    for line in daemon.latency(&[])?.lines() {
        println!("  {line}");
    }

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
        ink.heading("The guest and the daemon are stopped, their files removed.")
    );
    Ok(())
}

/// Measures both disks through both doors and prints a row for each load.
fn compare(guest: &mut Guest, ink: &Ink) -> Result<()> {
    for disk in &DISKS {
        let device = disk.doors[0];
        guest.ok(&format!(
            "dd if=/dev/zero of=/dev/{device} bs=1M count={MEASURED_MIB} oflag=direct"
        ))?;
    }
    let heading = format!(
        "Seen by the guest: 4 KiB, {DEPTH} at a time; median of {ROUNDS} rounds of {SECONDS_PER_ROUND} s, the doors taking turns"
    );
    println!("\n{}", ink.heading(&heading));
    println!("{:20}{}", "", DOORS.map(|door| ink.door(door)).join("    "));
    let columns = format!("{:>9}  {:>10}  {:>10}", "IOPS", "mean µs", "p99 µs");
    println!("  {:18}{}", "", [columns.as_str(); 2].join("    "));
    for disk in &DISKS {
        for (load, direction) in LOADS {
            let mut rounds: [Vec<Figures>; 2] = [Vec::new(), Vec::new()];
            for _ in 0..ROUNDS {
                for (device, figures) in disk.doors.iter().zip(&mut rounds) {
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
        value.with_context(|| format!("guest-io reported no {name}: {report}"))
    };
    Ok(Figures {
        iops: figure("iops")?,
        mean_us: figure("mean_us")?,
        p99_us: figure("p99_us")?,
    })
}

/// Colours where a terminal shows them.
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

    /// Over the right end of its columns; the padding comes before the colour, for colours have no width.
    fn door(&self, text: &str) -> String {
        self.paint("36", &format!("{text:>33}"))
    }
}
