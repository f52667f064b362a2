//! Studies in guests: the same jobs through several ways to a disk, alternately, with the host's own I/O for comparison.
//!
//! A [`Setup`] is a guest with all of its ways, which [`bench::study`] measures alternately (`engine`). `compare` and `matrix` are the two
//! commands; `report` makes tables and pictures of the runs.

pub mod compare;
pub mod content;
pub mod engine;
pub mod guest;
mod kernel_target;
pub mod matrix;
pub mod report;
mod results;
mod series;

use std::borrow::Cow;
use std::process::Command;

use bench::run::{Disturbance, least_disturbed};
use bench::study::Variant;
use cli_common::{Failure, print_line};
use serde::{Deserialize, Serialize};

use super::bench::{for_disks, with_overrides};
use super::failed;

/// A path from the jobs to the disks, such as the host, virtio-blk of Lunette, or a device of QEMU.
#[derive(Clone, Debug)]
pub struct DiskRoute {
    pub variant: Variant,
    /// Words of its topology; `None`: the host, without a guest.
    pub words: Option<String>,
    pub disks: u32,
    /// Target in the host's kernel that the study creates for it.
    pub wwpn: Option<String>,
}

impl DiskRoute {
    /// Creates a route without settings.
    pub fn new(name: String, words: Option<String>, disks: u32) -> DiskRoute {
        let settings = Vec::new();
        DiskRoute {
            variant: Variant { name, settings },
            words,
            disks,
            wwpn: None,
        }
    }
}

/// Converts an error of a study. After an interruption an error is a consequence of it.
pub fn study_failed(error: anyhow::Error) -> Failure {
    match vm::interrupted() {
        true => Failure::Interrupted,
        false => failed(error),
    }
}

/// Maximum number of repetitions of a disturbed measurement.
const RETRIES: u32 = 2;

/// Measures, and repeats the measurement while other load disturbs it. The processes of the guest are no disturbance.
pub fn quietly<T>(
    title: &str,
    guest: &guest::StudyGuest,
    measure: impl FnMut() -> anyhow::Result<T>,
) -> anyhow::Result<(T, Disturbance)> {
    quietly_beside(title, &guest.processes(), measure)
}

/// Same as [`quietly`], with the processes of several guests.
pub fn quietly_beside<T>(
    title: &str,
    processes: &[u32],
    measure: impl FnMut() -> anyhow::Result<T>,
) -> anyhow::Result<(T, Disturbance)> {
    let note = |load: &Disturbance| print_line(&format_args!("{title}: {}", load.describe()));
    least_disturbed(processes, RETRIES, note, vm::interrupted, measure)
}

/// Returns the name and version of the installed QEMU.
pub fn qemu_version() -> String {
    let output = Command::new(vm::topology::QEMU).arg("--version").output();
    let text = output.map_or_else(
        |_| String::new(),
        |output| String::from_utf8_lossy(&output.stdout).into_owned(),
    );
    let mut words = text
        .split_whitespace()
        .skip_while(|word| *word != "version");
    format!("QEMU {}", words.nth(1).unwrap_or("of unknown version"))
}

/// Work of a study.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Effort {
    /// Starts of guests.
    pub boots: u32,
    /// Measurements.
    pub runs: u32,
    /// Duration of a measurement.
    pub seconds: f64,
    /// Bytes that are written before the measurements.
    pub written: u64,
}

/// A guest and its routes.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Name in messages.
    pub name: String,
    /// Additional options of `lunette vm run`.
    pub options: Vec<String>,
    /// Ways in the guest.
    pub ways: Vec<DiskRoute>,
}

/// Load on the disks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Case {
    pub name: String,
    /// Pattern in the syntax of job files.
    pub pattern: String,
    /// Percentage of reads, for mixed patterns.
    pub reads: u8,
    /// Requests in flight per disk.
    pub depth: u32,
    /// Bytes per request in the syntax of job files.
    pub block_size: String,
    /// Load on files of a file system, instead of the fields above.
    pub files: Option<Files>,
    /// Text of a job file, instead of the fields above.
    pub job_file: Option<String>,
}

/// Load on the files of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// `create`, `seqread`, `randread`, `randwrite` or `mail`: see `guest-bench files`.
    pub preset: String,
    pub threads: u32,
    /// The file system flushes the disk's cache to order writes.
    pub barriers: bool,
}

impl Files {
    /// Used fraction of the file system; full file systems are slow.
    const USED: (u64, u64) = (6, 10);

    /// Arguments of `guest-bench files`, for a disk of `size` bytes.
    pub fn words(&self, folder: &str, milliseconds: u64, size: u64) -> [String; 5] {
        let (part, whole) = Files::USED;
        [
            self.preset.clone(),
            folder.to_owned(),
            self.threads.to_string(),
            milliseconds.to_string(),
            (size / whole * part).to_string(),
        ]
    }
}

impl Case {
    /// Text of a job file for these disks.
    pub fn job(&self, disks: &[String], milliseconds: u64, direct: bool) -> String {
        if let Some(text) = &self.job_file {
            // The number of disks and the syntax were checked before.
            let text = for_disks(text, disks).unwrap_or_else(|_| text.clone());
            let overrides = [
                ("direct", u8::from(direct).to_string()),
                ("time_based", "1".to_owned()),
                ("runtime", format!("{milliseconds}ms")),
            ];
            let overrides = overrides.map(|(option, value)| (option.to_owned(), value));
            return with_overrides(&text, &overrides).unwrap_or(text);
        }
        let mut text = format!(
            "[global]\nioengine=io_uring\ndirect={}\nrw={}\nbs={}\niodepth={}\ntime_based=1\nruntime={milliseconds}ms\n",
            u8::from(direct),
            self.pattern,
            self.block_size,
            self.depth
        );
        if self.pattern.ends_with("rw") {
            text.push_str(&format!("rwmixread={}\n", self.reads));
        }
        for (number, disk) in disks.iter().enumerate() {
            text.push_str(&format!("[disk{number}]\nfilename={disk}\n"));
        }
        text
    }
}

/// Result of one way in one case and turn.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    pub way: String,
    pub case: String,
    pub turn: u32,
    pub read_iops: f64,
    pub write_iops: f64,
    /// Bytes per second.
    #[serde(default)]
    pub read_bytes: f64,
    #[serde(default)]
    pub write_bytes: f64,
    /// Latency of all requests, in nanoseconds.
    pub mean_ns: f64,
    pub p50_ns: f64,
    pub p99_ns: f64,
    /// CPU time per request in nanoseconds: user, system and interrupts of the guest, and processes of the host.
    pub guest_user_ns: f64,
    pub guest_system_ns: f64,
    pub guest_irq_ns: f64,
    /// `None`: unknown for one of the processes.
    pub host_ns: Option<f64>,
    /// Other load on the machine.
    #[serde(default)]
    pub load: Disturbance,
}

impl Run {
    /// Returns the CPU time of the guest per request.
    pub fn guest_ns(&self) -> f64 {
        self.guest_user_ns + self.guest_system_ns + self.guest_irq_ns
    }
}

impl bench::study::Run for Run {
    fn variant(&self) -> Cow<'_, str> {
        self.way.as_str().into()
    }

    fn case(&self) -> Cow<'_, str> {
        self.case.as_str().into()
    }

    fn turn(&self) -> u32 {
        self.turn
    }

    fn iops(&self) -> f64 {
        self.read_iops + self.write_iops
    }

    fn is_disturbed(&self) -> bool {
        self.load.is_disturbed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bench::job::{Job, JobContext, parse};

    #[test]
    fn jobs_of_cases_are_job_files() {
        let case = |pattern: &str, reads| Case {
            name: pattern.to_owned(),
            pattern: pattern.to_owned(),
            reads,
            depth: 4,
            block_size: "4k".to_owned(),
            files: None,
            job_file: None,
        };
        for (case, mix) in [(case("randread", 100), false), (case("randrw", 75), true)] {
            let text = case.job(&["/dev/vda".to_owned(), "/dev/vdb".to_owned()], 500, true);
            assert_eq!(text.contains("rwmixread=75"), mix, "{text}");
            let jobs = JobContext::here(|here| parse("case", &text, &Job::default(), here));
            assert_eq!(jobs.unwrap().len(), 2);
        }
    }
}
