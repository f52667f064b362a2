//! Runs the same job file with fio and with this driver on one device, in turns.
//!
//! The device is a loop device with direct I/O if available, otherwise the file below it. Both programs use io_uring.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{CheckOptions, Finding, Runner, Verdict, folder_in, judged};
use crate::driver::prepare_file;
use crate::job::{Job, JobContext, parse};
use crate::run::bootstrap_ratio;

/// Size of the device in bytes: quick to write, larger than a device's cache.
const SIZE: u64 = 256 << 20;
/// Turns of each program, long enough for a few thousand requests.
const TURNS: usize = 5;
const RUNTIME_MS: u32 = 1000;
/// Tolerance for fio's own overhead, around the ratio 1.
const NOISE: f64 = 0.05;

/// A loop device, detached on drop.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path) -> Option<Loop> {
        let mut command = Command::new("losetup");
        command
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file);
        let output = command
            .output()
            .ok()
            .filter(|output| output.status.success())?;
        let name = String::from_utf8(output.stdout).ok()?;
        Some(Loop(PathBuf::from(name.trim())))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // Failures cannot be handled here.
        Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status()
            .ok();
    }
}

fn job_file(device: &Path) -> String {
    format!(
        "[global]\nioengine=io_uring\ndirect=1\nfilename={}\nbs=4k\nruntime={RUNTIME_MS}ms\ntime_based\n\
         norandommap\n\n[read]\nrw=randread\niodepth=4\n",
        device.display()
    )
}

/// Rate and median latency of one turn.
struct Turn {
    iops: f64,
    p50_ns: f64,
}

fn by_fio(file: &Path) -> Result<Turn> {
    let output = Command::new("fio")
        .args(["--output-format=json", "--percentile_list=50"])
        .arg(file)
        .output()
        .context("cannot run fio")?;
    ensure!(
        output.status.success(),
        "fio: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8_lossy(&output.stdout);
    let document = text.find('{').map_or("", |start| &text[start..]);
    turn_of(&serde_json::from_str(document).context("fio's JSON")?)
}

/// Parses a result; both programs write the same JSON.
fn turn_of(document: &Value) -> Result<Turn> {
    let read = &document["jobs"][0]["read"];
    let iops = read["iops"].as_f64().context("no iops")?;
    // fio measures from submission, this driver from the creation of the request. io_uring submits it at once.
    let p50 = read["clat_ns"]["percentile"]["50.000000"].as_f64();
    Ok(Turn {
        iops,
        p50_ns: p50.context("no median")?,
    })
}

fn by_us(runner: &Runner<'_>, file: &Path, text: &str) -> Result<Turn> {
    let name = file.display().to_string();
    let jobs = JobContext::none(|none| parse(&name, text, &Job::default(), none));
    let jobs = jobs.map_err(|mistakes| anyhow::anyhow!("{mistakes:?}"))?;
    let [job] = &jobs[..] else { bail!("one job") };
    let one = runner.run(Vec::new(), job.clone(), false)?;
    let outcome = crate::run::Outcome {
        subjects: vec![crate::run::SubjectResult {
            name: "file".to_owned(),
            repetitions: vec![one],
        }],
        ..crate::run::Outcome::default()
    };
    turn_of(&crate::report::to_json(&outcome, &jobs, false))
}

/// Compares the results of fio and this driver on the same device.
pub fn same_as_fio(runner: &Runner<'_>, options: &CheckOptions) -> Result<Vec<Finding>> {
    let finding = |found: String, verdict| Finding {
        claim: "a job file has the same result with fio and with lunette bench on one device"
            .to_owned(),
        found,
        verdict,
    };
    if Command::new("fio").arg("--version").output().is_err() {
        let found = "fio is missing (Debian: apt-get install fio)".to_owned();
        return Ok(vec![finding(found, Verdict::NotChecked)]);
    }
    let folder = folder_in(&options.place)?;
    let file = folder.path().join("device");
    prepare_file(&file, SIZE, runner.interrupted)?;
    File::open(&file)?.sync_all()?;
    let loop_device = Loop::over(&file);
    let device = loop_device.as_ref().map_or(&file, |found| &found.0);
    let text = job_file(device);
    let path = folder.path().join("check.fio");
    std::fs::write(&path, &text)?;
    let (mut fio, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        fio.push(by_fio(&path)?);
        ours.push(by_us(runner, &path, &text)?);
    }
    let each = |turns: &[Turn], of: fn(&Turn) -> f64| turns.iter().map(of).collect::<Vec<_>>();
    let mut description = Vec::new();
    let mut right = true;
    for (name, of) in [
        ("IOPS", (|turn: &Turn| turn.iops) as fn(&Turn) -> f64),
        ("median latency", |turn: &Turn| turn.p50_ns),
    ] {
        let ratio = bootstrap_ratio(&each(&ours, of), &each(&fio, of)).context("no ratio")?;
        right &= ratio.low <= 1.0 + NOISE && ratio.high >= 1.0 - NOISE;
        description.push(format!(
            "{name} ours/fio {:.3} ({:.3} to {:.3})",
            ratio.value, ratio.low, ratio.high
        ));
    }
    let verdict = match options.timing {
        true => judged(right),
        false => Verdict::NotJudged,
    };
    let description = format!("{} on {}", description.join(", "), device.display());
    Ok(vec![finding(description, verdict)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_file_is_one_that_we_run_too() {
        let text = job_file(Path::new("/dev/loop9"));
        let jobs = JobContext::none(|none| parse("check.fio", &text, &Job::default(), none));
        let jobs = jobs.unwrap();
        assert_eq!(jobs.len(), 1);
        assert_eq!(jobs[0].filenames, ["/dev/loop9"]);
        assert_eq!(jobs[0].iodepth, 4);
    }

    #[test]
    fn fio_s_numbers_are_found_where_ours_are() {
        let document = serde_json::json!({"jobs": [{"read": {
            "iops": 12.5, "clat_ns": {"percentile": {"50.000000": 9000}}}}]});
        let turn = turn_of(&document).unwrap();
        assert_eq!((turn.iops, turn.p50_ns), (12.5, 9000.0));
        assert!(turn_of(&serde_json::json!({})).is_err());
    }
}
