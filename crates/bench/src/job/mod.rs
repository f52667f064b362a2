//! fio's job-file language, as far as block tests use it.
//!
//! [`parse`] reads a file into sections (`syntax`), applies each option to a [`Job`] (`options`, with values in `value`), and reports all
//! mistakes at once, each with file, line and option. An unsupported option is refused by name, never ignored. Defaults are fio's unless
//! documented otherwise. Pure except for [`JobContext`], the source of included files and variables. The text is untrusted. Tests:
//! here, a property test in `tests/`, and comparisons with fio in the workspace's `tests/`.

mod model;
mod options;
mod refused;
mod syntax;
mod value;

pub use model::{
    Amount, Checksum, Distribution, Job, LogKind, Logs, Pattern, Rate, Sizes, Trims, Verify, Zone,
};
pub use options::{HONOURED, apply, check};
pub use refused::REFUSED;
pub use value::{amount, bytes, duration};

use std::path::Path;
use std::{fmt, io};

/// A mistake in a job file or in a command-line option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The file, or `command line`.
    pub file: String,
    /// Line from 1; 0 if there is none.
    pub line: usize,
    /// The option, or empty.
    pub option: String,
    /// Description of the mistake.
    pub message: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        f.write_str(": ")?;
        if !self.option.is_empty() {
            write!(f, "{}: ", self.option)?;
        }
        f.write_str(&self.message)
    }
}

/// All mistakes of a file, in the order of its lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mistakes(pub Vec<Mistake>);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, mistake) in self.0.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{mistake}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Mistakes {}

/// Environment of a job file.
pub struct JobContext<'a> {
    /// Reads an included file.
    pub read: &'a dyn Fn(&Path) -> io::Result<String>,
    /// Returns an environment variable.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// fio's words for properties of the machine, with their values.
    pub words: &'a [(&'static str, u64)],
}

impl JobContext<'_> {
    /// Calls `use_them` with this machine's files, environment and properties.
    pub fn here<T>(use_them: impl FnOnce(&JobContext<'_>) -> T) -> T {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let page = rustix::param::page_size() as u64;
        let system = rustix::system::sysinfo();
        let memory = (system.totalram as u64).saturating_mul(system.mem_unit.into()) >> 20;
        use_them(&JobContext {
            read: &|path| std::fs::read_to_string(path),
            variable: &|name| std::env::var(name).ok(),
            words: &[
                ("$ncpus", cpus),
                ("$pagesize", page),
                ("$mb_memory", memory),
            ],
        })
    }

    /// Calls `use_them` with an empty environment.
    pub fn none<T>(use_them: impl FnOnce(&JobContext<'_>) -> T) -> T {
        use_them(&JobContext {
            read: &|_| Err(io::ErrorKind::NotFound.into()),
            variable: &|_| None,
            words: &[],
        })
    }
}

/// Parses jobs in the order of the file. `base` contains the command-line options; options of the file override them.
pub fn parse(
    file: &str,
    text: &str,
    base: &Job,
    surroundings: &JobContext<'_>,
) -> Result<Vec<Job>, Mistakes> {
    let (sections, mut mistakes) = syntax::sections(file, text, surroundings);
    let mut global = base.clone();
    let mut jobs = Vec::new();
    for section in sections {
        let is_global = section.name == "global";
        let mut job = if is_global {
            std::mem::take(&mut global)
        } else {
            global.clone()
        };
        for line in &section.lines {
            if let Err(message) = apply(&mut job, &line.option, line.value.as_deref()) {
                mistakes.push(Mistake {
                    file: line.file.to_string(),
                    line: line.number,
                    option: line.option.clone(),
                    message,
                });
            }
        }
        if is_global {
            global = job;
            continue;
        }
        job.name = section.name;
        if let Err((option, message)) = check(&job) {
            let at = section.lines.iter().rev().find(|l| l.option == option);
            mistakes.push(Mistake {
                file: at.map_or(&section.file, |line| &line.file).to_string(),
                line: at.map_or(section.number, |line| line.number),
                option: option.to_owned(),
                message,
            });
        }
        jobs.push(job);
    }
    if jobs.is_empty() && mistakes.is_empty() {
        mistakes.push(Mistake {
            file: file.to_owned(),
            line: 0,
            option: String::new(),
            message: "no job found: a job is a section such as [read] that is not [global]"
                .to_owned(),
        });
    }
    if mistakes.is_empty() {
        Ok(jobs)
    } else {
        // The file itself first; mistakes of each file in the order of its lines.
        mistakes.sort_by_key(|mistake| (mistake.file != file, mistake.file.clone(), mistake.line));
        mistakes.dedup();
        Err(Mistakes(mistakes))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn jobs(text: &str) -> Vec<Job> {
        let jobs = JobContext::none(|none| parse("j.fio", text, &Job::default(), none));
        jobs.unwrap_or_else(|mistakes| panic!("{mistakes}"))
    }

    fn mistakes(text: &str) -> Vec<String> {
        match JobContext::none(|none| parse("j.fio", text, &Job::default(), none)) {
            Ok(jobs) => panic!("{jobs:?}"),
            Err(mistakes) => mistakes.0.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn an_ordinary_file_is_read_whole() {
        let text = "\
; a study
[global]
ioengine=libaio
direct=1
bs=4k
time_based
runtime=30s
ramp_time=500ms

[a] # reads
rw=randread
iodepth=32
numjobs=4

[global]
bs=64k

[b]
stonewall
rw=randrw
rwmixwrite=25
filename=/a\\:b:/c
";
        let jobs = jobs(text);
        assert_eq!(jobs.len(), 2);
        let (a, b) = (&jobs[0], &jobs[1]);
        assert_eq!((a.name.as_str(), a.iodepth, a.numjobs), ("a", 32, 4));
        assert_eq!(a.runtime, Some(Duration::from_secs(30)));
        assert_eq!(a.ramp_time, Duration::from_millis(500));
        assert_eq!(a.sizes[0], Sizes::Fixed(4096));
        assert_eq!(a.pattern, Pattern::new(true, 100));
        assert!(a.time_based && a.direct == Some(true) && !a.stonewall);
        assert_eq!(b.pattern, Pattern::new(true, 75));
        assert_eq!(b.sizes[1], Sizes::Fixed(65536));
        assert_eq!(b.filenames, ["/a:b", "/c"]);
        assert!(b.stonewall);
    }

    #[test]
    fn every_mistake_has_file_line_and_option() {
        let text = "\
[global]
bs=4q
[a]
rw=sideways
iodpth=4
hipri=1
numjobs=0
runtime=5 parsecs
";
        assert_eq!(
            mistakes(text),
            [
                "j.fio:2: bs: `4q` is not a size: a number, then k, m, g, t or p",
                "j.fio:4: rw: `sideways` is not one of read, write, randread, randwrite, rw, readwrite, randrw, trim, randtrim, trimwrite, randtrimwrite",
                "j.fio:5: iodpth: unknown option; did you mean iodepth?",
                "j.fio:6: hipri: an unsupported option of fio",
                "j.fio:7: numjobs: `0` is not a number from 1 to 4096",
                "j.fio:8: runtime: `5 parsecs` is not a time: a number, then us, ms, s, m, h or d",
            ]
        );
    }

    #[test]
    fn options_that_contradict_each_other_are_told_at_the_later_one() {
        assert_eq!(
            mistakes("[a]\nrw=randrw\nrwmixread=10\nrwmixwrite=10\n"),
            ["j.fio:4: rwmixwrite: 10 and rwmixread=10 do not add up to 100"]
        );
        assert_eq!(
            mistakes("[a]\ntime_based\n"),
            ["j.fio:2: time_based: needs a runtime"]
        );
        assert_eq!(
            mistakes("[a]\nbs=1000\n"),
            ["j.fio:2: bs: 1000 bytes are not a multiple of 512"]
        );
        assert_eq!(
            mistakes("[a]\nrw=write\nverify=crc32c\nnumjobs=2\n"),
            [
                "j.fio:4: numjobs: clones that write the same blocks cannot be verified; give them an offset_increment"
            ]
        );
    }

    #[test]
    fn what_is_no_job_file_is_told() {
        assert_eq!(
            mistakes("")[0],
            "j.fio: no job found: a job is a section such as [read] that is not [global]"
        );
        assert_eq!(
            mistakes("bs=4k\n")[0],
            "j.fio:1: bs: found before the first section"
        );
        assert_eq!(
            mistakes("[a\n")[0],
            "j.fio:1: a section's name ends with `]`"
        );
        assert_eq!(
            mistakes("[a]\nfilename=$HOME/x\n")[0],
            "j.fio:2: filename: `$HOME/x` is not supported; use ${NAME}, $ncpus, $pagesize or $mb_memory"
        );
        assert_eq!(
            mistakes("[a]\nfilename=${HOME}/x\nname=${A\n"),
            [
                "j.fio:2: filename: the environment has no variable HOME",
                "j.fio:3: name: `${A` has no end"
            ]
        );
        assert_eq!(
            mistakes("[a]\nrw=trimread\n")[0],
            "j.fio:2: rw: `trimread` is not one of read, write, randread, randwrite, rw, readwrite, randrw, trim, randtrim, trimwrite, randtrimwrite"
        );
    }

    #[test]
    fn reads_and_writes_may_have_sizes_of_their_own() {
        for (value, read, write, trim) in [
            ("4k", 4096, 4096, 4096),
            ("8k,32k", 8192, 32768, 32768),
            ("8k,", 8192, 4096, 4096),
            (",8k", 4096, 8192, 8192),
            ("8k,32k,", 8192, 32768, 4096),
            ("8k,32k,64k", 8192, 32768, 65536),
        ] {
            let job = &jobs(&format!("[a]\nbs={value}\n"))[0];
            assert_eq!(job.sizes, [read, write, trim].map(Sizes::Fixed), "{value}");
        }
        let job = &jobs("[a]\nbsrange=4k-16k,512-1k\n")[0];
        assert_eq!(job.sizes[0], Sizes::Range(4096, 16384));
        assert_eq!(job.sizes[1], Sizes::Range(512, 1024));
        let job = &jobs("[a]\nbssplit=4k/10:64k/50:32k/\n")[0];
        assert_eq!(
            job.sizes[1],
            Sizes::Split(vec![(4096, 10), (65536, 50), (32768, 40)])
        );
    }

    #[test]
    fn split_percentages_must_fit() {
        assert_eq!(
            mistakes("[a]\nbssplit=4k/60:8k/60\n"),
            ["j.fio:2: bssplit: the sum of the percentages is 120, more than 100"]
        );
    }

    #[test]
    fn discards_have_fio_s_words_and_sizes() {
        for (word, random, trims) in [
            ("trim", false, Trims::Only),
            ("randtrim", true, Trims::Only),
            ("trimwrite", false, Trims::ThenWrite),
            ("randtrimwrite", true, Trims::ThenWrite),
        ] {
            let job = &jobs(&format!("[a]\nrw={word}\nbs=4k,8k\n"))[0];
            assert_eq!(job.pattern, Pattern::trimming(random, trims));
            assert_eq!(job.pattern.word(), word);
            assert_eq!(job.sizes[2], Sizes::Fixed(8192));
            assert_eq!((job.smallest(), job.longest()), (8192, 8192));
        }
        let job = &jobs("[a]\nrw=trimwrite\nbs=4k,,64k\n")[0];
        assert_eq!(job.sizes[1], Sizes::Fixed(4096));
        assert_eq!((job.longest(), job.largest()), (65536, 65536));
        let wrong = mistakes("[a]\nrw=trim\nverify=crc32c\n").join("; ");
        assert!(wrong.contains("discards cannot be verified"), "{wrong}");
    }

    #[test]
    fn distributions_logs_and_verify() {
        let job = &jobs(
            "[a]\nrandom_distribution=zipf:1.1\nverify=crc32c\nwrite_lat_log=l\nlog_avg_msec=100\nrate_iops=500,100\n",
        )[0];
        assert_eq!(job.distribution, Distribution::Zipf(1.1));
        assert_eq!(job.verify.map(|v| v.checksum), Some(Checksum::Crc32c));
        assert_eq!(job.logs.latency.as_deref(), Some("l"));
        assert_eq!(
            job.rate,
            Some(Rate {
                read: 500,
                write: 100,
                trim: 100,
            })
        );
        assert_eq!(
            jobs("[a]\nrandom_distribution=normal:20\n")[0].distribution,
            Distribution::Normal(20.0)
        );
    }
}
