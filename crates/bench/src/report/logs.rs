//! fio's log files: `NAME_bw.N.log` and similar. Each line is `milliseconds, value, direction, size, priority`, with the disk offset
//! before the priority if `log_offset` is set.
//!
//! A driver does not distinguish submission and completion: `clat` files equal `lat` files, and `slat` files are empty, as with fio on
//! such block devices.

use std::fs::File;
use std::io::{BufWriter, Write};

use anyhow::{Context, Result};

use crate::drive::LogEntry;
use crate::job::{Job, LogKind};
use crate::run::JobResult;

const FLUSH: u8 = 2;
const TRIM: u8 = 3;

/// Writes the files of one job, one per clone and quantity; `first` is the number of its first clone, counted from 1 over all jobs.
/// Returns the file names.
pub fn write_logs(job: &Job, first: u32, result: &JobResult) -> Result<Vec<String>> {
    let kinds = [
        (&job.logs.bandwidth, Some(LogKind::Bandwidth), "bw"),
        (&job.logs.latency, Some(LogKind::Latency), "lat"),
        (&job.logs.latency, Some(LogKind::Latency), "clat"),
        (&job.logs.latency, None, "slat"),
        (&job.logs.iops, Some(LogKind::Iops), "iops"),
    ];
    let mut names = Vec::new();
    for (clone, entries) in &result.logs {
        for (prefix, kind, word) in kinds {
            let Some(prefix) = prefix else { continue };
            let prefix = if prefix.is_empty() { &job.name } else { prefix };
            let name = format!("{prefix}_{word}.{}.log", first + clone);
            let write = || -> std::io::Result<()> {
                let mut file = BufWriter::new(File::create(&name)?);
                let lines = entries.iter().filter(|entry| entry.direction != FLUSH);
                for (kind, entry) in kind
                    .into_iter()
                    .flat_map(|k| lines.clone().map(move |e| (k, e)))
                {
                    line(&mut file, job, kind, entry)?;
                }
                file.flush()
            };
            write().with_context(|| format!("cannot write {name}"))?;
            names.push(name);
        }
    }
    Ok(names)
}

fn line(file: &mut impl Write, job: &Job, kind: LogKind, entry: &LogEntry) -> std::io::Result<()> {
    let span = entry.span_ns.max(1) as f64;
    let averaged = job.logs.average.is_some();
    let value = match kind {
        LogKind::Bandwidth => (entry.bytes as f64 * 1e9 / span / 1024.0) as u64,
        LogKind::Latency => entry.latency_ns,
        LogKind::Iops if averaged => (entry.ios as f64 * 1e9 / span) as u64,
        // A line per request counts 1.
        LogKind::Iops => entry.ios,
    };
    // Sizes and offsets exist only for single requests.
    let (size, offset) = if averaged {
        (0, 0)
    } else {
        (entry.bytes, entry.offset)
    };
    // fio has no flushes here and counts discards as 2.
    let direction = if entry.direction == TRIM {
        2
    } else {
        entry.direction
    };
    write!(file, "{}, {value}, {direction}, {size}", entry.millis)?;
    if job.logs.offset {
        write!(file, ", {offset}")?;
    }
    writeln!(file, ", 0")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn texts(change: impl Fn(&mut Job), entries: Vec<LogEntry>) -> Vec<(String, String)> {
        let folder = tempfile::tempdir().unwrap();
        let prefix = |name: &str| Some(folder.path().join(name).to_string_lossy().into_owned());
        let mut job = Job::default();
        job.logs.bandwidth = prefix("a");
        job.logs.latency = prefix("b");
        job.logs.iops = prefix("c");
        change(&mut job);
        let result = JobResult {
            logs: vec![(1, entries)],
            ..JobResult::default()
        };
        let names = write_logs(&job, 3, &result).unwrap();
        let read = |name: &String| {
            let text = std::fs::read_to_string(name).unwrap();
            (name.rsplit('/').next().unwrap().to_owned(), text)
        };
        names.iter().map(read).collect()
    }

    const ENTRY: LogEntry = LogEntry {
        millis: 7,
        direction: 0,
        ios: 1,
        bytes: 8192,
        latency_ns: 1_000_000,
        offset: 4096,
        span_ns: 1_000_000,
    };

    #[test]
    fn each_kind_has_fio_s_file_and_fio_s_columns() {
        let of = |direction| LogEntry { direction, ..ENTRY };
        // Flushes have no lines in fio's files.
        let entries = vec![of(0), of(1), of(2)];
        let files = texts(|_| (), entries.clone());
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        let expected = [
            "a_bw.4.log",
            "b_lat.4.log",
            "b_clat.4.log",
            "b_slat.4.log",
            "c_iops.4.log",
        ];
        assert_eq!(names, expected);
        assert_eq!(files[0].1, "7, 8000, 0, 8192, 0\n7, 8000, 1, 8192, 0\n");
        let latency = "7, 1000000, 0, 8192, 0\n7, 1000000, 1, 8192, 0\n";
        assert_eq!((&*files[1].1, &*files[2].1), (latency, latency));
        assert_eq!(files[3].1, "");
        assert_eq!(files[4].1, "7, 1, 0, 8192, 0\n7, 1, 1, 8192, 0\n");
        let files = texts(|job| job.logs.offset = true, entries);
        assert_eq!(
            files[4].1,
            "7, 1, 0, 8192, 4096, 0\n7, 1, 1, 8192, 4096, 0\n"
        );
    }

    #[test]
    fn a_line_for_a_span_of_time_has_rates_and_no_sizes() {
        let change = |job: &mut Job| job.logs.average = Some(Duration::from_millis(2));
        let entry = LogEntry {
            ios: 4,
            span_ns: 2_000_000,
            ..ENTRY
        };
        let files = texts(change, vec![entry]);
        assert_eq!(files[0].1, "7, 4000, 0, 0, 0\n");
        assert_eq!(files[1].1, "7, 1000000, 0, 0, 0\n");
        assert_eq!(files[4].1, "7, 2000, 0, 0, 0\n");
    }
}
