//! `lunette bench disktest`: compatible with the disktest of the Linux Test Project, for scripts that use its flags and parse its output.
//!
//! The flags become a job: N threads with one request each are N requests in flight, with offsets from one shared sequence as in disktest.
//! Verification and data patterns are not supported; `--verify` of `lunette bench` replaces them.

use std::io::Write;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use bench::driver::Subject;
use bench::job::Job;
use bench::report::{clock_time, date};
use bench::run::{JobResult, Plan, Progress, run as run_plan};
use clap::{ArgAction, Args};
use cli_common::{Failure, Outcome};
use latency::Clock;

use super::{failed, flag, interrupted, to_its_end, unless_interrupted};
use crate::image::parse_bytes;

/// `lunette bench disktest`
#[derive(Clone, Debug, Args)]
#[command(disable_help_flag = true, after_help = AFTER)]
pub struct DisktestArguments {
    /// Number of threads, each with one transfer in flight: 1 to 1024
    #[arg(short = 'K', value_name = "THREADS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Kind of I/O. D bypasses the page cache. R (raw), B (block) and F (file) are accepted without effect, because the kind is detected
    #[arg(short = 'I', value_name = "TYPE", default_value = "B")]
    kind: String,
    /// Output, one or more letters: T, P or C for throughput, X for transfers, R for the run time, A for all
    #[arg(short = 'P', value_name = "TXPRCA", default_value = "T")]
    print: String,
    /// Interval of heartbeat lines in seconds, 1 to 3600 [default: no heartbeat lines]
    #[arg(short = 'h', value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    heartbeat: Option<u64>,
    /// Duration of the test in seconds, 1 to 604800
    #[arg(short = 'T', value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    seconds: u64,
    /// Read
    #[arg(short = 'r')]
    read: bool,
    /// Write; existing data is lost
    #[arg(short = 'w')]
    write: bool,
    /// Percentages of reads and writes, if both -r and -w are given
    #[arg(
        short = 'D',
        value_name = "READ%:WRITE%",
        default_value = "50:50",
        value_parser = mixture
    )]
    mixture: u8,
    /// Bytes per transfer. k and m are factors of 1024 and 1048576
    #[arg(short = 'B', value_name = "SIZE", default_value = "4k")]
    size: String,
    /// Pattern: r or R random, l or L sequential
    #[arg(short = 'p', value_name = "PATTERN", default_value = "l")]
    pattern: String,
    /// Number of 512-byte blocks to use, from the start of the device [default: all]
    #[arg(short = 'N', value_name = "BLOCKS", value_parser = clap::value_parser!(u64).range(1..=1 << 50))]
    blocks: Option<u64>,
    /// File or block device to test, or iscsi://HOST/TARGET/LUN, vhost-user-blk:SOCKET or vhost-user-scsi:SOCKET
    target: String,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

const AFTER: &str = "\
Examples:
    lunette bench disktest -K64 -ID -PTX -h3 -T60 -r -B262144 /dev/sdb
    lunette bench disktest -K64 -ID -PTX -h3 -T60 -r -w -B256k iscsi://192.0.2.1/iqn.2026-11.org.example:t0/0,connections=4";

/// Parses a mixture such as `75:25` and returns the percentage of reads.
fn mixture(text: &str) -> Result<u8, String> {
    let part = |text: &str| text.trim_end_matches('%').parse::<u8>().ok();
    let parts = text.split_once(':');
    let parts = parts.and_then(|(reads, writes)| Some((part(reads)?, part(writes)?)));
    match parts {
        Some((reads, writes)) if u32::from(reads) + u32::from(writes) == 100 => Ok(reads),
        _ => Err("two parts with the sum 100, such as 75:25".to_owned()),
    }
}

/// Selected output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Printed {
    throughput: bool,
    transfers: bool,
    time: bool,
}

impl DisktestArguments {
    fn printed(&self) -> Result<Printed, Failure> {
        let has = |letters: &str| {
            let mut wanted = self.print.chars().map(|c| c.to_ascii_uppercase());
            wanted.any(|letter| letter == 'A' || letters.contains(letter))
        };
        let unknown = self
            .print
            .chars()
            .find(|c| !"TXPRCA".contains(c.to_ascii_uppercase()));
        if let Some(letter) = unknown {
            return Err(Failure::mistake(format!(
                "-P{}: {letter} is not one of T, X, P, R, C and A",
                self.print
            )));
        }
        Ok(Printed {
            throughput: has("TPC"),
            transfers: has("X"),
            time: has("R"),
        })
    }

    fn subject(&self) -> Result<Subject, Failure> {
        let unknown = self
            .kind
            .chars()
            .find(|c| !"DRBF".contains(c.to_ascii_uppercase()));
        if let Some(letter) = unknown {
            return Err(Failure::mistake(format!(
                "-I{}: {letter} is not one of D, R, B and F",
                self.kind
            )));
        }
        let direct = self.kind.to_ascii_uppercase().contains('D');
        let target = match Subject::looks_like_one(&self.target) {
            true => self.target.clone(),
            false => format!("file:{},direct={}", self.target, u8::from(direct)),
        };
        Subject::parse(&target).map_err(Failure::mistake)
    }

    fn job(&self) -> Result<Job, Failure> {
        let is_random = match self.pattern.as_str() {
            "r" | "R" => true,
            "l" | "L" | "lu" | "Lu" => false,
            _ => {
                return Err(Failure::mistake(format!(
                    "-p{}: give r or R for random, l or L for linear",
                    self.pattern
                )));
            }
        };
        let pattern = match (is_random, self.read, self.write) {
            (false, _, false) => "read",
            (true, _, false) => "randread",
            (false, false, true) => "write",
            (true, false, true) => "randwrite",
            (false, true, true) => "rw",
            (true, true, true) => "randrw",
        };
        let bytes =
            parse_bytes(&self.size).map_err(|why| Failure::mistake(format!("-B: {why}")))?;
        let mut job = Job::default();
        let mut options = vec![
            ("rw", pattern.to_owned()),
            ("bs", bytes.to_string()),
            ("iodepth", self.threads.to_string()),
            ("runtime", format!("{}s", self.seconds)),
            ("time_based", "1".to_owned()),
            ("norandommap", "1".to_owned()),
        ];
        if self.read && self.write {
            options.push(("rwmixread", self.mixture.to_string()));
        }
        options.extend(
            self.blocks
                .map(|blocks| ("size", (blocks * 512).to_string())),
        );
        for (option, value) in options {
            flag(&mut job, option, Some(&value))?;
        }
        "disktest".clone_into(&mut job.name);
        Ok(job)
    }

    /// The arguments on the command line.
    fn said(&self) -> String {
        let words: Vec<String> = std::env::args()
            .skip_while(|word| word != "disktest")
            .collect();
        words.get(1..).unwrap_or_default().join(" ")
    }
}

/// Output lines: `| time | kind | process | version | target | text`.
struct Lines {
    target: String,
    stdout: Mutex<std::io::Stdout>,
}

impl Lines {
    fn print(&self, kind: &str, text: &str) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |time| time.as_secs());
        let line = format!(
            "| {}-{} | {kind:5} | {} | v{} | {} | {text}\n",
            date(now).replace('-', "/"),
            clock_time(now),
            std::process::id(),
            env!("CARGO_PKG_VERSION"),
            self.target
        );
        if let Ok(mut stdout) = self.stdout.lock() {
            // A closed stdout is not an error.
            stdout
                .write_all(line.as_bytes())
                .and_then(|()| stdout.flush())
                .ok();
        }
    }
}

/// Formats bytes and transfers per second.
fn throughput(bytes: f64, transfers: f64) -> String {
    format!(
        "{bytes:.1}B/s ({:.2}MB/s), IOPS {transfers:.1}/s.",
        bytes / (1 << 20) as f64
    )
}

pub fn run(arguments: &DisktestArguments) -> Outcome {
    let printed = arguments.printed()?;
    let plan = Plan {
        subjects: vec![arguments.subject()?],
        jobs: vec![arguments.job()?],
        repetitions: 1,
        warm_up: Duration::ZERO,
        retries: 0,
        ..Plan::default()
    };
    let lines = std::sync::Arc::new(Lines {
        target: arguments.target.clone(),
        stdout: Mutex::new(std::io::stdout()),
    });
    lines.print("START", &format!("Start args: {}", arguments.said()));
    let interrupted = interrupted()?;
    let progress = match arguments.heartbeat {
        None => Progress::silent(),
        Some(seconds) => {
            let lines = std::sync::Arc::clone(&lines);
            let what = match (arguments.read, arguments.write) {
                (_, false) => "read",
                (false, true) => "write",
                (true, true) => "read and write",
            };
            Progress::heartbeats(Duration::from_secs(seconds), move |transfers, bytes| {
                let text = throughput(bytes, transfers);
                lines.print("STAT", &format!("Heartbeat {what} throughput: {text}"));
            })
        }
    };
    let outcome = run_plan(&plan, &Clock::new(), &interrupted, &progress);
    let outcome = outcome.inspect_err(|error| {
        lines.print("ERROR", &format!("{error:#}"));
        lines.print("END", "Test Done (Failed)");
    });
    let outcome = unless_interrupted(outcome, &interrupted)?;
    let turns = outcome.subjects.iter().flat_map(|one| &one.repetitions);
    let jobs: Vec<&JobResult> = turns.flat_map(|turn| &turn.jobs).collect();
    for job in &jobs {
        totals(&lines, job, printed);
    }
    let errors: u64 = jobs.iter().map(|job| job.errors).sum();
    let complaint = jobs.iter().flat_map(|job| &job.complaints).next();
    if let Some(complaint) = complaint {
        lines.print("ERROR", complaint);
    }
    let verdict = if errors == 0 { "Passed" } else { "Failed" };
    lines.print("END", &format!("Test Done ({verdict})"));
    match errors {
        0 => to_its_end(&interrupted),
        count => Err(failed(anyhow::anyhow!("{count} transfers failed"))),
    }
}

fn totals(lines: &Lines, job: &JobResult, printed: Printed) {
    let seconds = job.elapsed_ns as f64 / 1e9;
    for (name, done, tally) in [
        ("read", "read", &job.tallies[0]),
        ("write", "written", &job.tallies[1]),
    ] {
        if tally.ios == 0 {
            continue;
        }
        if printed.transfers {
            let (ios, bytes) = (tally.ios, tally.bytes);
            let text = format!("Total bytes {done} in {ios} transfers: {bytes}");
            lines.print("STAT", &text);
        }
        if printed.throughput {
            let text = throughput(tally.bytes as f64 / seconds, tally.ios as f64 / seconds);
            lines.print("STAT", &format!("Total {name} throughput: {text}"));
        }
    }
    if printed.time {
        lines.print("STAT", &format!("Total test time: {seconds:.1} s"));
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: DisktestArguments,
    }

    fn parsed(words: &str) -> DisktestArguments {
        let words = std::iter::once("disktest").chain(words.split_whitespace());
        Line::try_parse_from(words)
            .unwrap_or_else(|error| panic!("{error}"))
            .arguments
    }

    #[test]
    fn flags_are_a_job() {
        let arguments = parsed("-K64 -ID -PTX -h3 -T60 -r -B262144 /dev/sdb");
        let job = arguments.job().unwrap_or_else(|_| panic!("no job"));
        assert_eq!(job.pattern.word(), "read");
        assert_eq!(
            (job.iodepth, job.runtime),
            (64, Some(Duration::from_secs(60)))
        );
        assert_eq!(arguments.heartbeat, Some(3));
        let printed = arguments.printed().unwrap_or_else(|_| panic!("-P"));
        assert!(printed.throughput && printed.transfers && !printed.time);
        let both = parsed("-r -w -D 75:25 -pR -PA f");
        let job = both.job().unwrap_or_else(|_| panic!("no job"));
        assert_eq!(job.pattern.word(), "randrw");
        assert!(both.printed().is_ok_and(|printed| printed.time));
        assert!(parsed("-PZ f").printed().is_err() && parsed("-pld f").job().is_err());
        assert!(parsed("-IS f").subject().is_err() && parsed("-IBD f").subject().is_ok());
        assert!(mixture("75:20").is_err());
    }

    #[test]
    fn rates_are_in_binary_megabytes_as_that_program_has_them() {
        assert_eq!(
            throughput(79_691_776.0, 304.0),
            "79691776.0B/s (76.00MB/s), IOPS 304.0/s."
        );
    }
}
