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
    /// Interval of heartbeat lines, 1 second to 1 hour; m is a factor of 60 [default: no heartbeat lines]
    #[arg(short = 'h', value_name = "SECONDS", value_parser = |text: &str| seconds(text, 3600))]
    heartbeat: Option<u64>,
    /// Duration of the test, 1 second to 7 days; m, h and d are factors of 60, 3600 and 86400 [default: until the transfers of -L are done]
    #[arg(short = 'T', value_name = "SECONDS", value_parser = |text: &str| seconds(text, 604_800))]
    seconds: Option<u64>,
    /// Number of transfers, with a suffix as for -N [default without -T: the number that fits into the blocks of -N]
    #[arg(short = 'L', value_name = "TRANSFERS", value_parser = count)]
    transfers: Option<u64>,
    /// Read; the default without -w
    #[arg(short = 'r')]
    read: bool,
    /// Write; existing data is lost
    #[arg(short = 'w')]
    write: bool,
    /// Percentages of reads and writes, if both -r and -w are given. If their sum is not 100, each gets half of the rest
    #[arg(
        short = 'D',
        value_name = "READ%:WRITE%",
        default_value = "50:50",
        value_parser = mixture
    )]
    mixture: u8,
    /// Size of a transfer, or LOW:HIGH for random sizes: up to 256 in blocks of 512 bytes, above in bytes, or with a suffix as for -N in
    /// bytes
    #[arg(short = 'B', value_name = "SIZE", default_value = "1", value_parser = sizes)]
    sizes: (u64, u64),
    /// Pattern: r or R random, l or L sequential
    #[arg(short = 'p', value_name = "PATTERN", default_value = "R")]
    pattern: String,
    /// Number of 512-byte blocks to use, from the start of the device [default: all]. k, m and g are powers of 1024, K, M and G powers of
    /// 1000
    #[arg(short = 'N', value_name = "BLOCKS", value_parser = count)]
    blocks: Option<u64>,
    /// File or block device to test, or iscsi://HOST/TARGET/LUN, vhost-user-blk:SOCKET or vhost-user-scsi:SOCKET
    #[arg(value_name = "TARGET")]
    target: Option<String>,
    #[command(flatten)]
    refused: Refused,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

/// Flags of disktest that are not supported, and letters that are easily mistaken. Each may have a value.
#[derive(Clone, Debug, Args)]
struct Refused {
    #[arg(short = 'E', short_aliases = ['a', 'c', 'f', 'm', 'M', 'n', 'z'], hide = true, num_args = 0..=1)]
    verification: Option<Vec<String>>,
    #[arg(short = 's', short_aliases = ['S', 'o'], hide = true, num_args = 0..=1)]
    range: Option<Vec<String>>,
    #[arg(short = 'C', short_aliases = ['t', 'l'], hide = true, num_args = 0..=1)]
    cycles: Option<Vec<String>>,
    #[arg(short = 'k', hide = true, num_args = 0..=1)]
    wrong_threads: Option<Vec<String>>,
    #[arg(short = 'i', hide = true, num_args = 0..=1)]
    wrong_kind: Option<Vec<String>>,
    #[arg(short = 'b', hide = true, num_args = 0..=1)]
    wrong_size: Option<Vec<String>>,
    #[arg(short = 'A', short_aliases = ['d', 'F', 'q', 'Q', 'R', 'v', 'V', 'W', 'H'], hide = true, num_args = 0..=1)]
    other_flags: Option<Vec<String>>,
}

impl Refused {
    /// Returns a message if one of them is given.
    fn message(&self) -> Option<String> {
        let hints = [
            (
                &self.verification,
                "-E, -a, -c, -f, -m, -M, -n and -z",
                "verify data with lunette bench --verify",
            ),
            (
                &self.range,
                "-s, -S and -o",
                "-N limits the blocks, from the start of the device",
            ),
            (
                &self.cycles,
                "-C, -t and -l",
                "-T sets the duration, -L the number of transfers",
            ),
            (&self.wrong_threads, "-k", "-K sets the number of threads"),
            (&self.wrong_kind, "-i", "-I sets the kind of I/O"),
            (&self.wrong_size, "-b", "-B sets the size of a transfer"),
            (
                &self.other_flags,
                "-A, -d, -F, -q, -Q, -R, -v, -V, -W and -H",
                "lunette bench disktest --help lists the flags",
            ),
        ];
        let (_, flags, hint) = hints.into_iter().find(|(given, ..)| given.is_some())?;
        Some(format!("{flags}: not supported; hint: {hint}"))
    }
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
        Some((reads, writes)) if u32::from(reads) + u32::from(writes) <= 100 => {
            Ok(reads + (100 - reads - writes) / 2)
        }
        _ => Err("two percentages with a sum of at most 100, such as 75:25".to_owned()),
    }
}

/// Parses a number with a suffix of disktest: k, m and g are powers of 1024, K, M and G powers of 1000. Returns it with true if it has one.
fn suffixed(text: &str) -> Result<(u64, bool), String> {
    let factor = match text.as_bytes().last() {
        Some(b'k') => 1 << 10,
        Some(b'm') => 1 << 20,
        Some(b'g') => 1 << 30,
        Some(b'K') => 1_000,
        Some(b'M') => 1_000_000,
        Some(b'G') => 1_000_000_000,
        _ => 1,
    };
    let has_suffix = factor > 1;
    let digits = &text[..text.len() - usize::from(has_suffix)];
    let number = digits.parse::<u64>().ok();
    let product = number.and_then(|number| number.checked_mul(factor));
    let product = product.filter(|product| (1..=1 << 50).contains(product));
    let product = product.filter(|_| !digits.starts_with('+'));
    let error = "a number of at least 1, with k, m, g (powers of 1024) or K, M, G (powers of 1000)";
    Ok((product.ok_or(error)?, has_suffix))
}

fn count(text: &str) -> Result<u64, String> {
    suffixed(text).map(|(number, _)| number)
}

/// Parses the size of a transfer, or the smallest and the largest one, in bytes.
fn sizes(text: &str) -> Result<(u64, u64), String> {
    let bytes = |text: &str| match suffixed(text)? {
        (blocks, false) if blocks <= 256 => Ok(blocks * 512),
        // disktest rounds down, too.
        (bytes, false) => Ok(bytes / 512 * 512),
        (bytes, true) if bytes % 512 == 0 => Ok(bytes),
        (bytes, true) => Err(format!(
            "{bytes} bytes are not a multiple of 512; k, m and g are powers of 1024"
        )),
    };
    let (low, high) = text.split_once(':').unwrap_or((text, text));
    let (low, high) = (bytes(low)?, bytes(high)?);
    match low <= high {
        true => Ok((low, high)),
        false => Err("LOW is above HIGH".to_owned()),
    }
}

/// Parses a time in seconds, or with m, h or d.
fn seconds(text: &str, most: u64) -> Result<u64, String> {
    let (digits, factor) = match text.as_bytes().last() {
        Some(b'm') => (&text[..text.len() - 1], 60),
        Some(b'h') => (&text[..text.len() - 1], 3600),
        Some(b'd') => (&text[..text.len() - 1], 86_400),
        _ => (text, 1),
    };
    let number = digits.parse::<u64>().ok();
    let seconds = number.and_then(|number| number.checked_mul(factor));
    let seconds = seconds.filter(|seconds| (1..=most).contains(seconds));
    seconds.ok_or_else(|| {
        format!("a number of seconds from 1 to {most}, or with m (minutes), h (hours) or d (days)")
    })
}

/// Selected output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OutputSections {
    throughput: bool,
    transfers: bool,
    time: bool,
}

impl DisktestArguments {
    fn printed(&self) -> Result<OutputSections, Failure> {
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
        Ok(OutputSections {
            throughput: has("TPC"),
            transfers: has("X"),
            time: has("R"),
        })
    }

    fn target(&self) -> Result<&str, Failure> {
        if let Some(message) = self.refused.message() {
            return Err(Failure::mistake(message));
        }
        let missing =
            || Failure::mistake("the target is missing; hint: give a file or block device");
        self.target.as_deref().ok_or_else(missing)
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
        let target = self.target()?;
        let target = match Subject::looks_like_one(target) {
            true => target.to_owned(),
            false => format!("file:{target},direct={}", u8::from(direct)),
        };
        Subject::parse(&target).map_err(Failure::mistake)
    }

    fn job(&self) -> Result<Job, Failure> {
        let is_random = match self.pattern.as_str() {
            "r" | "R" => true,
            "l" | "L" | "lu" | "Lu" => false,
            "ld" | "Ld" => {
                return Err(Failure::mistake(format!(
                    "-p{}: descending order is not supported; hint: -pl",
                    self.pattern
                )));
            }
            _ => {
                return Err(Failure::mistake(format!(
                    "-p{}: give r or R for random, l or L for sequential",
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
        let (low, high) = self.sizes;
        let mut job = Job::default();
        let mut options = vec![
            ("rw", pattern.to_owned()),
            ("bsrange", format!("{low}-{high}")),
            ("iodepth", self.threads.to_string()),
            ("norandommap", "1".to_owned()),
        ];
        if let Some(seconds) = self.seconds {
            options.push(("runtime", format!("{seconds}s")));
            options.push(("time_based", "1".to_owned()));
        }
        if let Some(transfers) = self.transfers {
            options.push(("number_ios", transfers.to_string()));
        }
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

    /// Returns the arguments of the command line.
    fn describe(&self) -> String {
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
        target: arguments.target()?.to_owned(),
        stdout: Mutex::new(std::io::stdout()),
    });
    lines.print("START", &format!("Start args: {}", arguments.describe()));
    let interrupted = interrupted()?;
    let progress = match arguments.heartbeat {
        None => Progress::silent(),
        Some(seconds) => {
            let lines = std::sync::Arc::clone(&lines);
            let direction = match (arguments.read, arguments.write) {
                (_, false) => "read",
                (false, true) => "write",
                (true, true) => "read and write",
            };
            Progress::heartbeats(Duration::from_secs(seconds), move |beat| {
                let text = throughput(beat.bandwidth, beat.iops);
                lines.print("STAT", &format!("Heartbeat {direction} throughput: {text}"));
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

fn totals(lines: &Lines, job: &JobResult, printed: OutputSections) {
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
        assert_eq!(job.pattern.word(), "randread");
        assert_eq!(
            (job.iodepth, job.runtime),
            (64, Some(Duration::from_secs(60)))
        );
        assert_eq!(arguments.heartbeat, Some(3));
        let printed = arguments.printed().unwrap_or_else(|_| panic!("-P"));
        assert!(printed.throughput && printed.transfers && !printed.time);
        let both = parsed("-r -w -D 75:25 -pL -PA f");
        let job = both.job().unwrap_or_else(|_| panic!("no job"));
        assert_eq!(job.pattern.word(), "rw");
        assert!(both.printed().is_ok_and(|printed| printed.time));
        assert!(parsed("-PZ f").printed().is_err() && parsed("-pld f").job().is_err());
        assert!(parsed("-IS f").subject().is_err() && parsed("-IBD f").subject().is_ok());
        assert!(parsed("-pLd f").job().is_err() && parsed("-r").subject().is_err());
    }

    #[test]
    fn values_are_as_in_disktest() {
        // man 1 disktest: up to 256 in sectors, above in bytes; K is 10^3; the rest of a mixture is split.
        for (text, bytes) in [
            ("8", (4096, 4096)),
            ("256", (131_072, 131_072)),
            ("257", (0, 0)),
            ("262144", (262_144, 262_144)),
            ("4k:64k", (4096, 65_536)),
            ("8:16", (4096, 8192)),
            ("1m", (1 << 20, 1 << 20)),
            ("512K", (512_000, 512_000)),
        ] {
            assert_eq!(sizes(text), Ok(bytes), "{text}");
        }
        for text in ["", "0", "4K", "64k:4k", "4k:", "+4k", "4x"] {
            assert!(sizes(text).is_err(), "{text}");
        }
        assert_eq!(parsed("f").sizes, (512, 512));
        assert_eq!(count("1m"), Ok(1 << 20));
        assert_eq!(count("1M"), Ok(1_000_000));
        assert_eq!(seconds("1m", 604_800), Ok(60));
        assert_eq!(seconds("7d", 604_800), Ok(604_800));
        assert!(seconds("8d", 604_800).is_err() && seconds("1m", 59).is_err());
        assert_eq!(mixture("20:70"), Ok(25));
        assert_eq!(mixture("75%:25%"), Ok(75));
        assert!(mixture("75:30").is_err());
    }

    #[test]
    fn refused_flags_name_the_nearest_one() {
        for (words, hint) in [
            ("-k 4 f", "-K sets"),
            ("-c f", "--verify"),
            ("-E 512 f", "--verify"),
            ("-s0:10 f", "-N limits"),
            ("-r -R3 f", "--help"),
        ] {
            let message = parsed(words).refused.message();
            assert!(message.is_some_and(|one| one.contains(hint)), "{words}");
            assert!(parsed(words).subject().is_err(), "{words}");
        }
    }

    #[test]
    fn run_ends_by_time_or_by_number() {
        let job = |words: &str| parsed(words).job().unwrap_or_else(|_| panic!("{words}"));
        assert_eq!((job("f").runtime, job("f").ios_max), (None, None));
        assert_eq!(job("-L 2k f").ios_max, Some(2048));
        assert_eq!(job("-T1m f").runtime, Some(Duration::from_secs(60)));
    }

    #[test]
    fn rates_are_in_binary_megabytes_as_that_program_has_them() {
        assert_eq!(
            throughput(79_691_776.0, 304.0),
            "79691776.0B/s (76.00MB/s), IOPS 304.0/s."
        );
    }
}
