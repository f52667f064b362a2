//! Results of runs, and the file of a study with one run per line.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bench::run::environment;
use serde_json::{Value, json};

use super::{Case, Run, Way};

/// Runs of a study, in memory and in their file. The first line of the file identifies the study; another study is refused.
#[derive(Debug)]
pub struct Results {
    pub runs: Vec<Run>,
    /// `KVM` or `TCG`; empty before the first run.
    pub accelerator: String,
    file: PathBuf,
    study: Value,
}

impl Results {
    /// Reads earlier results of the same study. Removes an incomplete last line, left by a kill.
    pub fn read(folder: &Path, study: Value) -> Result<Results> {
        let mut results = Results {
            runs: Vec::new(),
            accelerator: String::new(),
            file: folder.join("runs.jsonl"),
            study,
        };
        let path = results.file.clone();
        let shown = path.display();
        let Ok(text) = std::fs::read(&path) else {
            return Ok(results);
        };
        let whole = text
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |at| at + 1);
        if whole < text.len() {
            let cut = File::options().write(true).open(&path);
            cut.and_then(|file| file.set_len(whole as u64))
                .with_context(|| format!("cannot write {shown}"))?;
        }
        let text = std::str::from_utf8(&text[..whole]);
        let mut lines = text
            .with_context(|| format!("{shown} is not text"))?
            .lines();
        let Some(header) = lines.next() else {
            return Ok(results);
        };
        let header: Value = serde_json::from_str(header).unwrap_or_default();
        ensure!(
            header["study"] == results.study,
            "{shown} contains the runs of another study; hint: give another --folder, or remove it"
        );
        let accelerator = header["accelerator"].as_str().unwrap_or_default();
        accelerator.clone_into(&mut results.accelerator);
        for (number, line) in lines.enumerate() {
            let run = serde_json::from_str(line);
            let wrong = || {
                format!(
                    "line {} of {shown} is malformed; hint: remove it",
                    number + 2
                )
            };
            results.runs.push(run.with_context(wrong)?);
        }
        Ok(results)
    }

    /// Records the accelerator before the first run of a guest.
    pub fn begin(&mut self, accelerator: &str) -> Result<()> {
        if self.accelerator.is_empty() {
            accelerator.clone_into(&mut self.accelerator);
            // Results are comparable only on comparable hosts.
            let line = json!({"study": self.study, "accelerator": accelerator, "environment": environment()});
            std::fs::write(&self.file, format!("{line}\n"))
                .with_context(|| format!("cannot write {}", self.file.display()))?;
        }
        ensure!(
            self.accelerator == accelerator,
            "earlier runs used a guest under {}, this one runs under {accelerator}; hint: give another --folder",
            self.accelerator
        );
        Ok(())
    }

    /// Appends a run to the file, then to the runs in memory.
    pub fn add(&mut self, run: Run) -> Result<()> {
        let line = serde_json::to_string(&run)? + "\n";
        let mut file = File::options().append(true).open(&self.file)?;
        file.write_all(line.as_bytes())
            .with_context(|| format!("cannot write {}", self.file.display()))?;
        self.runs.push(run);
        Ok(())
    }
}

impl Run {
    /// Combines all jobs of a load generator's result.
    pub fn of(document: &Value, way: &Way, case: &Case, turn: u32) -> Run {
        let jobs = document["jobs"].as_array().map_or(&[][..], Vec::as_slice);
        let sides = || jobs.iter().flat_map(|job| [&job["read"], &job["write"]]);
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let ios: f64 = sides().map(|side| number(&side["total_ios"])).sum();
        let per_io = |sum: f64| if ios > 0.0 { sum / ios } else { 0.0 };
        let total_ns =
            sides().map(|side| number(&side["lat_ns"]["mean"]) * number(&side["total_ios"]));
        let iops = |side: &str| jobs.iter().map(|job| number(&job[side]["iops"])).sum();
        let mut latencies = BTreeMap::new();
        for side in sides() {
            for (nanos, count) in side["clat_ns"]["bins"].as_object().into_iter().flatten() {
                let nanos: u64 = nanos.parse().unwrap_or(0);
                *latencies.entry(nanos).or_insert(0) += count.as_u64().unwrap_or(0);
            }
        }
        let guest = &document["vm"]["guest_cpu_ns"];
        let guest = |words: &[&str]| per_io(words.iter().map(|word| number(&guest[*word])).sum());
        Run {
            way: way.name.clone(),
            case: case.name.clone(),
            turn,
            read_iops: iops("read"),
            write_iops: iops("write"),
            mean_ns: per_io(total_ns.sum()),
            p50_ns: quantile(&latencies, 0.50),
            p99_ns: quantile(&latencies, 0.99),
            guest_user_ns: guest(&["user"]),
            guest_system_ns: guest(&["system"]),
            guest_irq_ns: guest(&["irq", "softirq"]),
            host_ns: host_ns(&document["vm"]["host_cpu_ns"], way).map(per_io),
        }
    }
}

/// CPU time of the host's processes for a way; `None` if that of one process is unknown.
fn host_ns(host: &Value, way: &Way) -> Option<f64> {
    match &way.words {
        None => host["generator"].as_f64(),
        Some(words) if words.contains("via=qemu") => host["qemu"].as_f64(),
        Some(_) => Some(host["qemu"].as_f64()? + host["daemon"].as_f64()?),
    }
}

fn quantile(latencies: &BTreeMap<u64, u64>, part: f64) -> f64 {
    let total: u64 = latencies.values().sum();
    let wanted = (part * total as f64).ceil() as u64;
    let mut seen = 0;
    let found = latencies.iter().find(|(_, count)| {
        seen += **count;
        seen >= wanted
    });
    found.map_or(0.0, |(nanos, _)| *nanos as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(words: Option<&str>) -> Way {
        Way {
            name: "w".to_owned(),
            words: words.map(str::to_owned),
            disks: 2,
            choices: Vec::new(),
        }
    }

    fn case() -> Case {
        Case {
            name: "c".to_owned(),
            pattern: "randread".to_owned(),
            reads: 100,
            depth: 1,
            block_size: "4k".to_owned(),
            files: None,
        }
    }

    /// A fast disk with 990 requests and a slow one with 10: the slow requests are the last hundredth. The disks are not
    /// averaged.
    fn two_disks() -> Value {
        let side = |ios: u64, nanos: u64| {
            json!({"total_ios": ios, "iops": ios, "lat_ns": {"mean": nanos},
                "clat_ns": {"bins": {nanos.to_string(): ios}}})
        };
        let nothing = json!({"total_ios": 0, "iops": 0.0, "lat_ns": {"mean": 0.0}, "clat_ns": {}});
        json!({"jobs": [{"read": side(990, 1000), "write": nothing}, {"read": side(10, 1_000_000), "write": nothing}],
            "vm": {"guest_cpu_ns": {"user": 5_000}, "host_cpu_ns": {"qemu": 2_000_000, "daemon": null}}})
    }

    #[test]
    fn percentiles_are_of_all_requests_of_all_disks() {
        let run = Run::of(&two_disks(), &way(Some("blk:2,via=qemu")), &case(), 0);
        assert_eq!((run.p50_ns, run.p99_ns), (1000.0, 1000.0));
        assert!((run.mean_ns - 10_990.0).abs() < 1e-6, "{}", run.mean_ns);
        assert_eq!(
            quantile(&BTreeMap::from([(1000, 990), (1_000_000, 10)]), 0.995),
            1_000_000.0
        );
        assert_eq!(quantile(&BTreeMap::new(), 0.5), 0.0);
    }

    #[test]
    fn cpu_time_that_is_not_known_is_not_nothing() {
        let of = |words| Run::of(&two_disks(), &way(words), &case(), 0).host_ns;
        assert_eq!(of(Some("blk:2,via=qemu")), Some(2000.0));
        assert_eq!(of(Some("blk:2")), None, "unknown for the daemon");
        assert_eq!(of(None), None, "unknown for the generator");
    }

    #[test]
    fn a_line_that_a_kill_has_cut_costs_its_run_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let study = json!({"turn_ms": 5});
        let read = || Results::read(folder.path(), study.clone()).unwrap();
        let run = |turn| Run::of(&two_disks(), &way(None), &case(), turn);
        let mut results = read();
        results.begin("TCG").unwrap();
        results.add(run(0)).unwrap();
        let file = folder.path().join("runs.jsonl");
        let mut text = std::fs::read_to_string(&file).unwrap();
        text.push_str("{\"way\":\"w\",\"ca");
        std::fs::write(&file, &text).unwrap();
        let mut results = read();
        assert_eq!(results.runs.len(), 1);
        results.begin("TCG").unwrap();
        results.add(run(1)).unwrap();
        let turns: Vec<u32> = read().runs.iter().map(|run| run.turn).collect();
        assert_eq!(turns, [0, 1]);
        assert!(read().begin("KVM").is_err());
        assert!(Results::read(folder.path(), json!({})).is_err());
        std::fs::write(&file, text.replace("{\"way\"", "x")).unwrap();
        let damaged = Results::read(folder.path(), study).unwrap_err();
        assert!(damaged.to_string().contains("line 2"), "{damaged}");
    }
}
