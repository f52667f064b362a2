//! fio's log files: `NAME_bw.JOB.log` and its like, a line `milliseconds, value, direction, size, offset` each.

use std::fs::File;
use std::io::{BufWriter, Write};

use anyhow::{Context, Result};

use crate::drive::LogEntry;
use crate::job::{Job, LogKind};
use crate::run::JobResult;

/// Writes the files of one job, the job's number (from 1) in their names; gives their names.
pub fn write_logs(job: &Job, number: usize, result: &JobResult) -> Result<Vec<String>> {
    let kinds = [
        (&job.logs.bandwidth, LogKind::Bandwidth, "bw"),
        (&job.logs.latency, LogKind::Latency, "lat"),
        (&job.logs.iops, LogKind::Iops, "iops"),
    ];
    let mut names = Vec::new();
    for (prefix, kind, word) in kinds {
        let Some(prefix) = prefix else { continue };
        let name = format!("{prefix}_{word}.{number}.log");
        let write = || -> std::io::Result<()> {
            let mut file = BufWriter::new(File::create(&name)?);
            for entry in result.log.iter().filter(|entry| entry.direction < 2) {
                line(&mut file, kind, entry)?;
            }
            file.flush()
        };
        write().with_context(|| format!("cannot write {name}"))?;
        names.push(name);
    }
    Ok(names)
}

fn line(file: &mut impl Write, kind: LogKind, entry: &LogEntry) -> std::io::Result<()> {
    let span = entry.span_ns.max(1) as f64;
    let value = match kind {
        LogKind::Bandwidth => (entry.bytes as f64 * 1e9 / span / 1024.0) as u64,
        LogKind::Latency => entry.latency_ns,
        LogKind::Iops => (entry.ios as f64 * 1e9 / span) as u64,
    };
    let size = entry.bytes / entry.ios.max(1);
    writeln!(
        file,
        "{}, {value}, {}, {size}, {}",
        entry.millis, entry.direction, entry.offset
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_fio_s_file_and_fio_s_columns() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = |name: &str| Some(folder.path().join(name).to_string_lossy().into_owned());
        let mut job = Job::default();
        job.logs.bandwidth = prefix("a");
        job.logs.latency = prefix("b");
        job.logs.iops = prefix("c");
        let entry = |direction, span_ns| LogEntry {
            millis: 7,
            direction,
            ios: 2,
            bytes: 8192,
            latency_ns: 900,
            offset: 4096,
            span_ns,
        };
        let result = JobResult {
            // Flushes have no line of their own in fio's files.
            log: vec![entry(0, 1_000_000), entry(1, 2_000_000), entry(2, 1)],
            ..JobResult::default()
        };
        let names = write_logs(&job, 3, &result).unwrap();
        let texts: Vec<String> = names
            .iter()
            .map(|name| std::fs::read_to_string(name).unwrap())
            .collect();
        assert!(names[0].ends_with("a_bw.3.log") && names[1].ends_with("b_lat.3.log"));
        assert_eq!(texts[0], "7, 8000, 0, 4096, 4096\n7, 4000, 1, 4096, 4096\n");
        assert_eq!(texts[1], "7, 900, 0, 4096, 4096\n7, 900, 1, 4096, 4096\n");
        assert_eq!(texts[2], "7, 2000, 0, 4096, 4096\n7, 1000, 1, 4096, 4096\n");
    }
}
