//! Studies in guests: the same jobs through several ways to a disk, in turns, with the host's own I/O beside them.
//!
//! A [`Setup`] is a guest with the ways that it has; all of them are in it at once, and take turns (`engine`). Every run is a line of the
//! result file as soon as it is over, so that a study that was ended goes on where it stopped. `compare` and `matrix` are the two
//! commands; `report` makes tables, pictures and sentences of the lines, `advice` says what follows, `page` is all of it as one page.

mod advice;
pub mod compare;
pub mod engine;
pub mod guest;
pub mod matrix;
pub mod page;
pub mod report;
mod results;
mod series;

use serde::{Deserialize, Serialize};

/// A way to disks.
#[derive(Clone, Debug)]
pub struct Way {
    /// What it is called in tables and pictures.
    pub name: String,
    /// Its words of the topology; `None`: the host, without a guest.
    pub words: Option<String>,
    /// Disks that it has.
    pub disks: u32,
    /// What was chosen for it: choices and their values.
    pub choices: Vec<(&'static str, String)>,
}

impl Way {
    /// The value of a choice.
    pub fn choice(&self, choice: &str) -> Option<&str> {
        let mut choices = self.choices.iter();
        let (_, value) = choices.find(|(known, _)| *known == choice)?;
        Some(value)
    }

    /// Does it differ from another one in nothing but a choice? What only one of them has is no difference: QEMU's devices have no
    /// polling to choose.
    pub fn is_but_for(&self, other: &Way, choice: &str) -> bool {
        let mut choices = self.choices.iter().filter(|(known, _)| *known != choice);
        self.choice(choice) != other.choice(choice)
            && choices.all(|(known, value)| other.choice(known).is_none_or(|other| other == value))
    }
}

/// A guest and its ways.
#[derive(Clone, Debug)]
pub struct Setup {
    /// What it is called in messages.
    pub name: String,
    /// More options of `lunette vm run`.
    pub options: Vec<String>,
    /// What is measured in it.
    pub ways: Vec<Way>,
}

/// What is done on the disks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Case {
    /// What it is called.
    pub name: String,
    /// Pattern, as job files name it.
    pub pattern: String,
    /// Reads of 100, for mixed patterns.
    pub reads: u8,
    /// Requests in flight, for each disk.
    pub depth: u32,
    /// Bytes of a request, as job files have it.
    pub block_size: String,
    /// Instead of these: files of a file system.
    pub files: Option<Files>,
}

/// What is done with the files of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// `create`, `seqread`, `randread`, `randwrite` or `mail`: see `guest-bench files`.
    pub preset: String,
    /// Threads that do it.
    pub threads: u32,
    /// Does the file system flush the disk's cache before and after what has to be in order?
    pub barriers: bool,
}

impl Files {
    /// The part of a file system that is used: what is full is slow.
    const USED: (u64, u64) = (6, 10);

    /// The words of `guest-bench files`, on a disk of `size` bytes.
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
    /// A job file on these disks.
    pub fn job(&self, disks: &[String], milliseconds: u64, direct: bool) -> String {
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

/// A run: one way, one case, one turn.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    pub way: String,
    pub case: String,
    pub turn: u32,
    pub read_iops: f64,
    pub write_iops: f64,
    /// Of all requests.
    pub mean_ns: f64,
    pub p50_ns: f64,
    pub p99_ns: f64,
    /// CPU time for each request: of the guest's user, system and interrupts, and of the host's processes.
    pub guest_user_ns: f64,
    pub guest_system_ns: f64,
    pub guest_irq_ns: f64,
    /// `None`: it could not be told apart.
    pub host_ns: Option<f64>,
}

impl Run {
    /// Reads and writes together.
    pub fn iops(&self) -> f64 {
        self.read_iops + self.write_iops
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bench::job::{Job, Surroundings, parse};

    #[test]
    fn jobs_of_cases_are_job_files() {
        let case = |pattern: &str, reads| Case {
            name: pattern.to_owned(),
            pattern: pattern.to_owned(),
            reads,
            depth: 4,
            block_size: "4k".to_owned(),
            files: None,
        };
        for (case, mix) in [(case("randread", 100), false), (case("randrw", 75), true)] {
            let text = case.job(&["/dev/vda".to_owned(), "/dev/vdb".to_owned()], 500, true);
            assert_eq!(text.contains("rwmixread=75"), mix, "{text}");
            let jobs = Surroundings::here(|here| parse("case", &text, &Job::default(), here));
            assert_eq!(jobs.unwrap().len(), 2);
        }
    }
}
