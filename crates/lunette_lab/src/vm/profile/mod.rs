//! `lunette vm profile`: profiles the CPUs of a guest and of its host during a job, with one queue and with several, to find contention on
//! locks of shared queues in current kernels.
//!
//! The kernel samples (`guest-bench profile`) all CPUs of the guest, and QEMU and the daemon on the host. `figures` is pure and computes
//! shares of stacks and rates of counters.

mod figures;
mod report;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bench::run::{Disturbance, Environment, environment};
use bench::study::Progress;
use clap::{Args, ValueEnum};
use cli_common::{Failure, Outcome, print_line};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use signal_hook::consts::SIGINT;
use vm::GuestProgram;
use vm::setup::program_for_guests;

use self::figures::{GuestCounters, Profile};
use super::bench::LoadEvent;
use super::failed;
use super::study::content::Content;
use super::study::engine::{DiskFiles, study_folder, turn_time};
use super::study::guest::{Planned, StudyGuest};
use super::study::report::{caution, write_partial};
use super::study::{DiskRoute, Setup, quietly};
use crate::idle_poll::IdlePoll;
use crate::image::parse_bytes;

/// `lunette vm profile`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct ProfileArguments {
    /// Transport of the disks
    #[arg(long, value_enum, default_value = "scsi")]
    transport: Transport,
    /// Emulator of the devices
    #[arg(long, default_value = "lunette", value_name = "WHO", value_parser = ["lunette", "qemu", "qemu-iothread"])]
    via: String,
    /// Numbers of request queues, each in a separate guest [default: 1 and one per virtual CPU]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    queues: Vec<u32>,
    /// Number of concurrent disks, 1 to 64: targets of one controller, or virtio-blk devices
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    disks: u32,
    /// Number of virtual CPUs of each guest, 1 to 64
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    smp: u32,
    /// Pattern: randread, randwrite, randrw, read or write
    #[arg(long, default_value = "randread", value_name = "PATTERN")]
    rw: String,
    /// Bytes per request
    #[arg(long, default_value = "4k", value_name = "SIZE")]
    bs: String,
    /// Number of requests in flight per disk, 1 to 1024
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    iodepth: u32,
    /// Duration of each run in seconds, 0.05 to 3600
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS")]
    time: f64,
    /// Samples per second and CPU, 10 to 10000
    #[arg(long, default_value_t = 997, value_name = "N", value_parser = clap::value_parser!(u32).range(10..=10_000))]
    hertz: u32,
    /// Size of each disk in bytes, or with K, M, G (powers of 1024)
    #[arg(long, default_value = "64M", value_name = "SIZE")]
    size: String,
    /// Folder for disk files, profiles and flame graphs
    #[arg(long, default_value = "lunette-profile", value_name = "FOLDER")]
    folder: PathBuf,
    /// Number of functions in the table
    #[arg(long, default_value_t = 15, value_name = "N")]
    top: usize,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transport {
    /// virtio-blk
    Blk,
    /// virtio-scsi
    Scsi,
}

const AFTER: &str = "\
A guest boots for each number of queues and runs the same job. Meanwhile the kernels of the guest and of the host sample the current function of each
CPU. The table shows the share of each function in the busy CPU time of the guest, and the total share of waits for locks. The flame graphs in the
folder are SVG files for a browser.
Sampling of the host's kernel needs root or the sysctl kernel.perf_event_paranoid=1.

Examples:
    lunette vm profile
    lunette vm profile --transport blk --queues 1,2,4 --smp 4
    lunette vm profile --via qemu-iothread --rw randwrite --time 10";

/// Duration of the job beyond that of the samples. The samplers start within it after the first completed request.
const START: Duration = Duration::from_millis(1400);
/// Time after which samplers end by themselves, beyond the duration of the job.
const SURPLUS: Duration = Duration::from_secs(10);

/// Results for one number of queues.
pub struct Measured {
    pub queues: u32,
    pub guest: Profile,
    /// `Err`: reason for a missing profile.
    pub host: Result<Profile, String>,
    pub around: GuestCounters,
    pub accelerator: String,
    /// Accelerator, QEMU's version and kernel.
    pub described: String,
    /// Other load on the machine.
    pub load: Disturbance,
}

/// Measured numbers of queues, with the conditions of the measurement.
pub struct Profiles {
    pub all: Vec<Measured>,
    /// Guests and load, then the host.
    pub notes: [String; 2],
    pub environment: Environment,
}

impl Profiles {
    fn new(arguments: &ProfileArguments, all: Vec<Measured>) -> Profiles {
        let environment = environment();
        let transport = match arguments.transport {
            Transport::Blk => "virtio-blk",
            Transport::Scsi => "virtio-scsi",
        };
        let load = format!(
            "{}; {} {transport} disks of {} in files, {}, via {}; {}, {} a request, {} in flight of each disk, {} virtual CPUs; runs of {} s, {} \
             samples per second and CPU.",
            all.first().map_or("", |one| &one.described),
            arguments.disks,
            arguments.size,
            arguments.content.describe(),
            arguments.via,
            arguments.rw,
            arguments.bs,
            arguments.iodepth,
            arguments.smp,
            arguments.time,
            arguments.hertz
        );
        Profiles {
            notes: [load, format!("Host: {}.", environment.provenance())],
            all,
            environment,
        }
    }

    /// Reasons against the results.
    pub fn cautions(&self) -> Vec<String> {
        let disturbed = self.all.iter().filter(|one| one.load.is_disturbed());
        let disturbed = disturbed.map(|one| {
            let (name, load) = (counted(one.queues), one.load.describe());
            format!("{name}: {load}: differences are less reliable.")
        });
        let accelerator = self.all.first().map_or("", |one| &one.accelerator);
        let emulated = caution(accelerator).filter(|_| !self.all.is_empty());
        disturbed.chain(emulated.map(str::to_owned)).collect()
    }
}

pub fn run(arguments: &ProfileArguments) -> Outcome {
    vm::watch().map_err(failed)?;
    let _awake = arguments.idle.hold()?;
    let time = turn_time("--time", arguments.time)?;
    parse_bytes(&arguments.size).map_err(|why| Failure::mistake(format!("--size: {why}")))?;
    let folder = study_folder(
        &arguments.folder,
        Some("choose a --folder on another file system"),
    )?;
    let queues = match arguments.queues.as_slice() {
        [] if arguments.smp == 1 => vec![1],
        [] => vec![1, arguments.smp],
        given => given.to_vec(),
    };
    let mut all = Vec::new();
    let mut progress = Progress::new(queues.len());
    for count in queues {
        let measured = measure(arguments, count, time, &folder);
        if vm::interrupted() {
            return interrupted(&Profiles::new(arguments, all), arguments, &folder);
        }
        all.push(measured.map_err(failed)?);
        let left = progress.advance(1);
        print_line(&format_args!("{}: {left}", counted(count)));
    }
    let profiles = Profiles::new(arguments, all);
    let page = report::write(&profiles, arguments.top, &folder).map_err(failed)?;
    let mut stdout = cli_common::stdout();
    if arguments.json {
        return Ok(writeln!(stdout, "{:#}", report::json(&profiles))?);
    }
    write!(stdout, "{}", report::text(&profiles, arguments.top))?;
    Ok(writeln!(
        stdout,
        "page: {}\nflame graphs: {}/{{guest,host}}-N-queues.svg",
        page.display(),
        folder.display()
    )?)
}

/// Prints and saves the profiles that an interrupted run has measured.
fn interrupted(profiles: &Profiles, arguments: &ProfileArguments, folder: &Path) -> Outcome {
    if !profiles.all.is_empty() {
        let text = report::text(profiles, arguments.top);
        write!(cli_common::stdout(), "{text}")?;
        write_partial(folder, &report::json(profiles)).map_err(failed)?;
    }
    Err(Failure::Interrupted)
}

fn measure(
    arguments: &ProfileArguments,
    queues: u32,
    time: Duration,
    folder: &Path,
) -> Result<Measured> {
    let disks = arguments.disks;
    let shape = match arguments.transport {
        Transport::Blk => format!("blk:{disks}"),
        Transport::Scsi => format!("scsi:{disks}x1"),
    };
    let words = format!(
        "{shape},queues={queues},via={},backing=file:{},size={}",
        arguments.via,
        folder.display(),
        arguments.size
    );
    let name = format!("profile-{}", std::process::id());
    let setup = Setup {
        name: counted(queues),
        options: Vec::new(),
        ways: vec![DiskRoute::new(counted(queues), Some(words), disks)],
    };
    let more = ["--smp".to_owned(), arguments.smp.to_string()];
    let planned = Planned::new(&setup, &name, &more)?;
    let files = DiskFiles::create(&planned, arguments.content)?;
    print_line(&format_args!("{}: booting the guest", counted(queues)));
    let log = folder.join("guest.log");
    let guest = planned.start(&setup, &name, &log)?;
    let measure = || in_guest(arguments, queues, time, &guest);
    let measured = quietly(&counted(queues), &guest, measure);
    let ended = guest.end();
    drop(files);
    std::fs::remove_file(log).ok();
    let (measured, load) = measured.with_context(|| counted(queues))?;
    ended.and(Ok(Measured { load, ..measured }))
}

fn job(arguments: &ProfileArguments, disks: &[String], time: Duration) -> String {
    let mut text = format!(
        "[global]\nioengine=io_uring\ndirect=1\nrw={}\nbs={}\niodepth={}\ntime_based=1\nruntime={}ms\n",
        arguments.rw,
        arguments.bs,
        arguments.iodepth,
        time.as_millis()
    );
    for (number, disk) in disks.iter().enumerate() {
        text.push_str(&format!("[disk{number}]\nfilename={disk}\n"));
    }
    text
}

fn in_guest(
    arguments: &ProfileArguments,
    queues: u32,
    time: Duration,
    guest: &StudyGuest,
) -> Result<Measured> {
    let disks = guest.disks().first().context("the guest has no disks")?;
    // Copies the generator and caches the files that it reads.
    guest.run(&job(arguments, disks, Duration::from_millis(200)))?;
    let program = guest.generator()?;
    let (name, seconds) = (counted(queues), time.as_secs_f64());
    print_line(&format_args!("{name}: about {seconds} s of samples"));
    let duration = time + START;
    let most = duration + SURPLUS;
    let words = [most.as_millis().to_string(), arguments.hertz.to_string()];
    let before = GuestCounters::read(guest)?;
    let whole = job(arguments, disks, duration);
    // A SIGINT before the sampler has a handler is ignored.
    let sampler = format!("trap '' INT; exec {program} profile {}", words.join(" "));
    let ((for_guest, of_guest), (for_host, of_host)) = (channel(), channel());
    let (result, in_guest, on_host) = std::thread::scope(|scope| -> Result<_> {
        let sample_guest = |end: LoadEnd| {
            let signals = Some(end.into_signal());
            guest.signalled_script(&sampler, signals)
        };
        let sampled = scope.spawn(move || during_load(of_guest, sample_guest));
        let sample_host = |end: LoadEnd| on_host(&words, guest.processes(), end);
        let host = scope.spawn(move || during_load(of_host, sample_host));
        let result = guest.run_announced(&whole, vec![for_guest, for_host]);
        let joined = |_| anyhow::anyhow!("a sampling thread panicked");
        let sampled = sampled.join().map_err(joined)?;
        let host = host.join().map_err(joined)?;
        // An error of the job is the cause of those of the samplers.
        Ok((result?, sampled?, host))
    })?;
    let guest_profile: Value =
        serde_json::from_str(&in_guest).context("the guest's profile is not JSON")?;
    let guest_profile = Profile::of(&guest_profile)?;
    ensure!(
        guest_profile.total() > 0,
        "no CPU of the guest was busy; hint: set a longer --time"
    );
    let after = GuestCounters::read(guest)?;
    Ok(Measured {
        queues,
        guest: guest_profile,
        host: on_host.map_err(|error| format!("{error:#}")),
        around: after.since(&before, &result),
        accelerator: guest.accelerator().to_owned(),
        described: guest.describe()?,
        load: Disturbance::default(),
    })
}

/// The event of the load's end.
struct LoadEnd(Receiver<LoadEvent>);

impl LoadEnd {
    /// Waits for the end. The load has failed if its sender has ended.
    fn wait(&self) {
        while let Ok(event) = self.0.recv() {
            if event == LoadEvent::Ended {
                return;
            }
        }
    }

    /// Converts the event to the signal that ends a sampler.
    fn into_signal(self) -> Receiver<u8> {
        let (sender, signals) = channel();
        std::thread::spawn(move || {
            self.wait();
            // A sampler that has failed needs no signal.
            sender.send(SIGINT as u8).unwrap_or(());
        });
        signals
    }
}

/// Starts samples after the load has started. They end with the load.
fn during_load<T>(
    events: Receiver<LoadEvent>,
    sample: impl FnOnce(LoadEnd) -> Result<T>,
) -> Result<T> {
    let first = events.recv();
    ensure!(
        first == Ok(LoadEvent::Started),
        "the load has ended before its first request completed"
    );
    sample(LoadEnd(events))
}

/// Samples QEMU and the daemon.
fn on_host(words: &[String], processes: Vec<u32>, end: LoadEnd) -> Result<Profile> {
    let program = program_for_guests(GuestProgram::Bench)?;
    let sampler = Command::new(program)
        .arg("profile")
        .args(words)
        .args(processes.iter().map(u32::to_string))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot sample the host")?;
    end.wait();
    // Fails after the end of the sampler, which has not been reaped.
    kill_process(Pid::from_child(&sampler), Signal::INT).unwrap_or(());
    let sampled = sampler
        .wait_with_output()
        .context("cannot sample the host")?;
    let wrong = String::from_utf8_lossy(&sampled.stderr);
    ensure!(sampled.status.success(), "{}", wrong.trim());
    let document: Value = serde_json::from_slice(&sampled.stdout)?;
    Profile::of(&document)
}

/// `1 queue`, `2 queues`.
fn counted(queues: u32) -> String {
    match queues {
        1 => "1 queue".to_owned(),
        n => format!("{n} queues"),
    }
}

/// Contents of a profile's file.
fn document(measured: &Measured) -> Value {
    json!({
        "queues": measured.queues, "accelerator": measured.accelerator,
        "guest": measured.guest.json(),
        "host": match &measured.host {
            Ok(profile) => profile.json(),
            Err(reason) => json!({"reason": reason}),
        },
        "around": measured.around.json(), "load": measured.load,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::TryRecvError;

    use super::figures::Exits;
    use super::*;

    fn measured(foreign_cpus: f64) -> Measured {
        let document =
            json!({"stacks": {"bench;submit": 9}, "idle": 1, "lost": 0, "has_kernel": true});
        Measured {
            queues: 1,
            guest: Profile::of(&document).unwrap(),
            host: Err("no permission".to_owned()),
            around: GuestCounters {
                interrupts: 1,
                exits: Exits(Err("no KVM".to_owned())),
                cpu: 10,
                steal: 0,
                requests: 2.0,
                iops: 3.0,
            },
            accelerator: "TCG".to_owned(),
            described: "TCG (emulated), QEMU 7.2, guest Linux 6.1".to_owned(),
            load: Disturbance {
                foreign_cpus,
                stolen_cpus: 0.0,
            },
        }
    }

    #[test]
    fn samples_begin_after_the_start_of_the_load_and_end_with_it() {
        let (sender, events) = channel();
        sender.send(LoadEvent::Started).unwrap();
        let signals = during_load(events, |end| Ok(end.into_signal())).unwrap();
        assert_eq!(signals.try_recv(), Err(TryRecvError::Empty));
        sender.send(LoadEvent::Ended).unwrap();
        assert_eq!(signals.recv(), Ok(SIGINT as u8));

        // A failed load ends the samples, too.
        let (sender, events) = channel();
        sender.send(LoadEvent::Started).unwrap();
        drop(sender);
        let wait = |end: LoadEnd| {
            end.wait();
            Ok(())
        };
        during_load(events, wait).unwrap();

        let (sender, events) = channel();
        sender.send(LoadEvent::Ended).unwrap();
        let error = during_load(events, |_| Ok(7)).unwrap_err().to_string();
        assert!(error.contains("before its first request"), "{error}");
    }

    #[derive(clap::Parser)]
    struct Words {
        #[command(flatten)]
        arguments: ProfileArguments,
    }

    #[test]
    fn each_table_page_and_picture_has_the_conditions() {
        let arguments = <Words as clap::Parser>::parse_from(["profile", "--bs", "8k"]).arguments;
        let profiles = Profiles::new(&arguments, vec![measured(0.7)]);
        let folder = tempfile::tempdir().unwrap();
        let page = report::write(&profiles, 3, folder.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let page = std::fs::read_to_string(page).unwrap();
        let text = report::text(&profiles, 3);
        for (name, document) in [
            ("page", &page),
            ("text", &text),
            ("picture", &read("guest-1-queues.svg")),
            ("JSON", &read("profile.json")),
        ] {
            for wanted in ["QEMU 7.2", "8k a request", "written before the measurement"] {
                assert!(document.contains(wanted), "{name}: {wanted}: {document}");
            }
        }
        for document in [&page, &text, &read("profile.json")] {
            assert!(document.contains("mitigations"), "{document}");
            assert!(document.contains("1 queue: disturbed: others used 0.70 CPUs"));
            assert!(document.contains("emulated"));
        }
    }
}
