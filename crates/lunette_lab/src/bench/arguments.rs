//! Command line of `lunette bench`.

use std::path::PathBuf;

use bench::link::LinkOptions;
use bench::study::TURNS_UNTIL_SURE;
use bench::table::Beside;
use clap::{Args, Subcommand, ValueEnum};

use cli_common::Failure;

use super::disktest::DisktestArguments;
use crate::idle_poll::IdlePoll;

/// `lunette bench`
#[derive(Debug, Args)]
#[command(after_help = AFTER, args_conflicts_with_subcommands = true)]
pub struct BenchArguments {
    /// Subcommands other than one trial
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// A trial
    #[command(flatten)]
    pub trial: Trial,
    /// Sleep states of CPUs
    #[command(flatten)]
    pub idle: IdlePoll,
}

const AFTER: &str = "\
A subject is a device: vhost-user-blk:SOCKET, vhost-user-scsi:SOCKET[:TARGET:LUN], file:PATH,
iscsi://HOST[:PORT]/TARGET/LUN, nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH.
Options after it:
  ,name=NAME        name in the output
  ,pid=N            process that serves the device, for its CPU time
  ,control=SOCKET   control socket of the Lunette daemon that serves the device, for the latencies of its stages
  ,direct=0|1       for a file: bypass the page cache
  ,dirty_log=0|1    for vhost-user: the device logs the pages that it writes, as during a live migration
  ,digests=0|1      for iSCSI: CRC32C of headers and data
  ,connections=N    for iSCSI: connections of the session (MC/S)

A turn is one measurement of one subject. With several subjects, turns alternate between them.

Examples:
  Random reads at depth 32, five seconds, with a driver that polls on CPU 0
    lunette bench vhost-user-blk:/tmp/d0.sock --rw randread --bs 4k --iodepth 32 --cpus 0

  Two devices in turns, with interrupts as in a guest
    lunette bench vhost-user-blk:/tmp/a.sock --vs vhost-user-blk:/tmp/b.sock \\
      --interrupts --rw randread --runtime 2s

  A job file of fio; its filename is the subject if none is given
    lunette bench vhost-user-scsi:/tmp/c0.sock study.fio --output-format=json

  64 threads, a line every second
    lunette bench file:/dev/loop0 --threads 64 --bs 256k --mix=70

  Comparison of two result files
    lunette bench compare before.json after.json";

/// Maximum time of a turn in milliseconds: one day.
const LONGEST_MS: u64 = 86_400_000;
/// Upper limit of counts.
const MANY: i64 = 1_000_000;

fn cpus_worth(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(cpus) if cpus >= 0.0 => Ok(cpus),
        _ => Err("a number of CPUs, such as 0.1, or inf to accept all runs".to_owned()),
    }
}

/// Subcommands of `lunette bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Measure with the flags and output lines of the Linux Test Project's disktest
    Disktest(DisktestArguments),
    /// Compare two result files of --output-format=json
    Compare {
        /// First result file
        first: PathBuf,
        /// Second result file
        second: PathBuf,
    },
    /// Compare both transports with qemu-storage-daemon, in under five minutes
    Table(TableArguments),
    /// Compare the iSCSI transport with tgt, in under five minutes
    IscsiTable(TableArguments),
    /// Compare a qcow2 image with a raw file and qemu-storage-daemon, in under three minutes
    ImageTable(TableArguments),
    /// Compare images of a Ceph cluster with qemu-storage-daemon's rbd driver; both images are overwritten
    RbdTable(RbdTableArguments),
    /// Measure one iSCSI session with one to several connections (MC/S)
    Mcs(McsArguments),
    /// Measure the cost of time stamps, with daemons that record them and daemons that do not, in turns
    StampCost(StampArguments),
    /// Check the measurements of this program against known service times, exact percentiles, and fio on the same device
    SelfCheck(SelfCheckArguments),
    /// Measure both transports with several numbers of workers and queues, in fifteen cases: five mixtures of reads and writes at three
    /// depths
    Matrix(MatrixArguments),
}

/// Output formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A human-readable table
    Normal,
    /// fio's JSON
    Json,
    /// fio's JSON with the histograms
    #[value(name = "json+")]
    JsonPlus,
}

/// Virtqueue formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RingKind {
    /// Split virtqueue: descriptor table, available ring and used ring
    Split,
    /// Packed virtqueue: one descriptor ring (VIRTIO_F_RING_PACKED), if the device offers it
    Packed,
}

/// One trial.
#[derive(Debug, Args)]
pub struct Trial {
    /// Devices to measure, and fio job files
    #[arg(value_name = "SUBJECT|JOBFILE")]
    pub what: Vec<String>,
    /// Another device to measure, in turns with the first; may be given several times
    #[arg(long, value_name = "SUBJECT")]
    pub vs: Vec<String>,
    /// Flags for a job
    #[command(flatten)]
    pub quick: JobFlags,
    /// The driver
    #[command(flatten)]
    pub driver: Driver,
    /// Number of measurements (turns) of each subject, 1 to 1000 [default: 5 with --vs, otherwise 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repetitions: Option<u32>,
    /// Milliseconds of load before each measurement
    #[arg(long, value_name = "MS", default_value_t = 200, value_parser = clap::value_parser!(u64).range(..=LONGEST_MS))]
    pub warm_up_ms: u64,
    /// Maximum number of repetitions of a disturbed turn
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(..=MANY))]
    pub retries: u32,
    /// Maximum CPU time that other processes and the hypervisor take, in CPUs. Above it, a turn counts as disturbed. inf accepts all
    /// turns
    #[arg(long, value_name = "CPUS", default_value_t = 0.1, value_parser = cpus_worth)]
    pub disturbance: f64,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Normal)]
    pub output_format: Format,
    /// Print fio's JSON: the same as --output-format=json
    #[arg(long)]
    pub json: bool,
    /// Write to this file instead of stdout
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// fio's options as flags. Options in job files override them.
#[derive(Debug, Args)]
#[command(next_help_heading = "Jobs")]
pub struct JobFlags {
    /// Pattern: read, write, randread, randwrite, rw or randrw [default: read]
    #[arg(long, value_name = "PATTERN")]
    pub rw: Option<String>,
    /// Bytes per request, with k, m or g (powers of 1024) [default: 4k]
    #[arg(long, value_name = "SIZE")]
    pub bs: Option<String>,
    /// Requests in flight per clone of the job [default: 1]
    #[arg(long, value_name = "N")]
    pub iodepth: Option<String>,
    /// Number of clones of the job, which run at the same time [default: 1]
    #[arg(long, value_name = "N")]
    pub numjobs: Option<String>,
    /// Bytes of the device to use [default: all]
    #[arg(long, value_name = "SIZE")]
    pub size: Option<String>,
    /// Duration, such as 500ms, 5s or 1m [default: 5s, unless --size or --verify is given]
    #[arg(long, value_name = "TIME")]
    pub runtime: Option<String>,
    /// Verify written data with this checksum: crc32c, crc32, crc16 or crc64
    #[arg(long, value_name = "SUM")]
    pub verify: Option<String>,
    /// Another option of fio's job files; may be given several times
    #[arg(long, value_name = "OPTION=VALUE")]
    pub set: Vec<String>,
    /// Number of clones, as --numjobs. Also prints a line every second
    #[arg(long, value_name = "N", conflicts_with = "numjobs")]
    pub threads: Option<String>,
    /// Read at random: the same as --rw randread
    #[arg(long, conflicts_with_all = ["rw", "write", "mix"])]
    pub read: bool,
    /// Write at random: the same as --rw randwrite
    #[arg(long, conflicts_with_all = ["rw", "mix"])]
    pub write: bool,
    /// Read and write at random (--rw randrw) with this percentage of reads [default: 50]
    #[arg(long, value_name = "PERCENT", num_args = 0..=1, require_equals = true, default_missing_value = "50", conflicts_with = "rw")]
    pub mix: Option<String>,
}

impl JobFlags {
    /// Converts the flags to options of a job.
    pub fn options(&self) -> Result<Vec<(String, Option<String>)>, Failure> {
        let mut options = Vec::new();
        let mut set = |option: &str, value: Option<&String>| {
            if let Some(value) = value {
                options.push((option.to_owned(), Some(value.clone())));
            }
        };
        set("rwmixread", self.mix.as_ref());
        let words = [
            (self.read, "randread"),
            (self.write, "randwrite"),
            (self.mix.is_some(), "randrw"),
        ];
        for (given, word) in words {
            set("rw", given.then(|| word.to_owned()).as_ref());
        }
        for (option, value) in [
            ("rw", &self.rw),
            ("bs", &self.bs),
            ("iodepth", &self.iodepth),
            ("numjobs", &self.numjobs),
            ("numjobs", &self.threads),
            ("size", &self.size),
            ("runtime", &self.runtime),
            ("verify", &self.verify),
        ] {
            set(option, value.as_ref());
        }
        if self.runtime.is_some() {
            options.push((
                "time_based".to_owned(),
                Some((self.verify.is_none() as u8).to_string()),
            ));
        }
        for text in &self.set {
            let (option, value) = match text.split_once('=') {
                Some((option, value)) => (option, Some(value.to_owned())),
                None => (text.as_str(), None),
            };
            options.push((option.to_owned(), value));
        }
        Ok(options)
    }
}

/// Behaviour of the driver.
#[derive(Debug, Args)]
#[command(next_help_heading = "Driver")]
pub struct Driver {
    /// Wait for interrupts instead of polling
    #[arg(long)]
    pub interrupts: bool,
    /// Also poll for completions of file: subjects
    #[arg(long)]
    pub poll_files: bool,
    /// Maximum number of queues, each with one thread [default: all queues of the device]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub queues: Option<u16>,
    /// CPUs for the driver's threads, such as 0,2. Threads are pinned to them in turn
    #[arg(long, value_name = "N,N,...")]
    pub cpus: Option<String>,
    /// Place descriptor chains in the ring itself, without indirect descriptors
    #[arg(long)]
    pub direct_descriptors: bool,
    /// Do not accept VIRTIO_F_EVENT_IDX
    #[arg(long)]
    pub no_event_idx: bool,
    /// Virtqueue format
    #[arg(long, value_enum, default_value_t = RingKind::Split)]
    pub ring: RingKind,
    /// Use reserved huge pages of 2 MiB as guest memory
    #[arg(long)]
    pub huge_pages: bool,
}

/// `lunette bench table`
#[derive(Debug, Args)]
pub struct TableArguments {
    /// Folder for the files under test, on the file system of a disk and not on tmpfs
    #[arg(long, value_name = "FOLDER", default_value = "target/bench")]
    pub place: PathBuf,
    /// Append the table to FOLDER/YYYY-MM-DD.md
    #[arg(long, value_name = "FOLDER")]
    pub notes: Option<PathBuf>,
    /// CPU of the driver
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub driver_cpu: usize,
    /// CPU of the devices
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub device_cpu: usize,
    /// Number of measurements (turns) of each subject and case. Many short turns average out changes of the machine's speed
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=MANY))]
    pub repetitions: u32,
    /// Duration of one turn in milliseconds, 10 to 86400000
    #[arg(long, value_name = "MS", default_value_t = 80, value_parser = clap::value_parser!(u64).range(10..=LONGEST_MS))]
    pub turn_ms: u64,
    /// Measure only cases with this text in their name
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
}

/// `lunette bench mcs`
#[derive(Debug, Args)]
pub struct McsArguments {
    /// Logical unit, overwritten by the test [default: a RAM disk of a daemon that the test starts]
    #[arg(value_name = "iscsi://HOST[:PORT]/TARGET/LUN")]
    pub target: Option<String>,
    /// Maximum number of connections, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub connections: u16,
    /// Bytes per request
    #[arg(long, value_name = "SIZE", default_value = "256k")]
    pub bs: String,
    /// Number of requests in flight, 1 to 1024
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub iodepth: u32,
    /// Simulated line between driver and target with a one-way delay, a rate in bits per second and a packet loss, such as
    /// delay=5ms,rate=4g,loss=0.05%: uses network namespaces, which need root or a kernel that permits user namespaces
    #[arg(
        long,
        value_name = "delay=TIME,rate=BITS,loss=PERCENT",
        conflicts_with = "target"
    )]
    pub link: Option<LinkOptions>,
    /// Block device to measure in turns with the session, overwritten by the test, such as the same unit through the kernel's initiator. May
    /// be repeated
    #[arg(long, value_name = "NAME=DEVICE")]
    pub beside: Vec<Beside>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Common arguments of all tables
    #[command(flatten)]
    pub table: TableArguments,
}

/// `lunette bench rbd-table`
#[derive(Debug, Args)]
pub struct RbdTableArguments {
    /// Common arguments of all tables
    #[command(flatten)]
    pub table: TableArguments,
    /// Ceph's configuration file, which also names the user's keyring
    #[arg(long, value_name = "FILE", default_value = "/etc/ceph/ceph.conf")]
    pub conf: PathBuf,
    /// Ceph user, without `client.`
    #[arg(long, value_name = "USER", default_value = "admin")]
    pub id: String,
    /// Image that Lunette serves; its content is lost
    #[arg(long, value_name = "POOL/IMAGE")]
    pub image: String,
    /// Image of the same size that qemu-storage-daemon serves; its content is lost
    #[arg(long, value_name = "POOL/IMAGE")]
    pub peer_image: String,
}

/// `lunette bench stamp-cost`
#[derive(Debug, Args)]
pub struct StampArguments {
    /// CPU of the driver
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub driver_cpu: usize,
    /// CPU of the daemons
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub device_cpu: usize,
    /// Number of starts of both daemons; more starts narrow the confidence interval
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=MANY))]
    pub rounds: u32,
    /// Number of turns of each daemon per round, an even number from 2 on
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=MANY))]
    pub repetitions: u32,
    /// Duration of one turn in milliseconds, 10 to 86400000
    #[arg(long, value_name = "MS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(10..=LONGEST_MS))]
    pub turn_ms: u64,
    /// Measure only cases with this text in their name
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `lunette bench self-check`
#[derive(Debug, Args)]
pub struct SelfCheckArguments {
    /// Folder for the file that fio and lunette bench measure, on the file system of a disk and not on tmpfs
    #[arg(long, value_name = "FOLDER", default_value = "target/bench")]
    pub place: PathBuf,
    /// Print the results of checks that depend on the machine's speed, but do not fail because of them
    #[arg(long)]
    pub without_timing: bool,
}

/// `lunette bench matrix`
#[derive(Debug, Args)]
pub struct MatrixArguments {
    /// Folder for the result file, the page and the charts; an interrupted study in it is resumed
    #[arg(long, value_name = "FOLDER", default_value = "target/bench/matrix")]
    pub place: PathBuf,
    /// Number of disks in use at the same time, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub disks: u16,
    /// Numbers of workers; 0 is one shared worker [default: 0,1,2,4,8, up to the machine's CPUs]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    pub workers: Vec<usize>,
    /// Numbers of queues per disk
    #[arg(
        long,
        value_name = "N,N,...",
        value_delimiter = ',',
        default_value = "1,2",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    pub queues: Vec<u16>,
    /// Number of repetitions of each run
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=MANY))]
    pub repetitions: u32,
    /// Measure further turns until every conclusion is certain, but at most N in all
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = TURNS_UNTIL_SURE, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub until_sure: Option<u32>,
    /// Duration of one run in milliseconds, 10 to 86400000
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(10..=LONGEST_MS))]
    pub turn_ms: u64,
    /// Poll instead of waiting for interrupts
    #[arg(long)]
    pub polling: bool,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        arguments: BenchArguments,
    }

    fn options(words: &[&str]) -> Vec<String> {
        let words = ["bench"].iter().chain(words);
        let arguments = Program::parse_from(words).arguments;
        let options = arguments.trial.quick.options();
        let options = options.unwrap_or_else(|failure| panic!("{failure:?}"));
        let word = |(option, value): (String, Option<String>)| match value {
            Some(value) => format!("{option}={value}"),
            None => option,
        };
        options.into_iter().map(word).collect()
    }

    #[test]
    fn flags_become_options_of_a_job() {
        assert_eq!(
            options(&["file:/f", "--threads", "64", "--bs", "256k", "--mix=70"]),
            ["rwmixread=70", "rw=randrw", "bs=256k", "numjobs=64"]
        );
        assert_eq!(options(&["file:/f", "--read"]), ["rw=randread"]);
        assert_eq!(
            options(&[
                "file:/f",
                "--rw",
                "write",
                "--runtime",
                "2s",
                "--set",
                "norandommap"
            ]),
            ["rw=write", "runtime=2s", "time_based=1", "norandommap"]
        );
    }

    #[test]
    fn other_things_than_a_trial_are_subcommands() {
        let parse = |words: &[&str]| Program::try_parse_from(words).map(|p| p.arguments.command);
        let compare = parse(&["bench", "compare", "a.json", "b.json"]);
        assert!(matches!(compare, Ok(Some(BenchCommand::Compare { .. }))));
        assert!(matches!(
            parse(&["bench", "table"]),
            Ok(Some(BenchCommand::Table(_)))
        ));
        assert!(matches!(
            parse(&["bench", "matrix"]),
            Ok(Some(BenchCommand::Matrix(_)))
        ));
        assert!(parse(&["bench", "file:/f", "--read", "--write"]).is_err());
    }
}
