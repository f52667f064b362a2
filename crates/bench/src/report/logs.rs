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
