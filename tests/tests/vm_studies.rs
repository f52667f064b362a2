//! `lunette vm compare` and `lunette vm matrix`: a disk that is slow is told from bare metal, a study that was interrupted goes on, and
//! its pictures are drawn. Needs: guests. Takes: 60 s.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, Rig, UserGuests, ensure};
use serde_json::Value;
use std::collections::HashSet;
use std::process::Stdio;
use std::time::Duration;
use vm::wait_until;

const SOON: Duration = Duration::from_secs(240);

/// A disk of 20 ms, beside files of this machine.
#[test]
fn a_slow_disk_is_far_below_bare_metal() -> Result<()> {
    let rig = Rig::new(|daemon| daemon.disk("slow=delay:20ms,size=16M"))?;
    let guests = UserGuests::new()?.with_bench()?;
    let folder = vm::workspace().join("target/vm-studies-compare");
    std::fs::remove_dir_all(&folder).ok();
    let place = folder.display().to_string();
    let control = rig.daemon.control().display().to_string();
    let words = [
        "compare",
        "--folder",
        &place,
        "--control",
        &control,
        "--disk",
        "slow",
        "--ways",
        "Lunette",
        "--smp",
        "1",
    ];
    let times = [
        "--turns",
        "2",
        "--turn-time",
        "0.4",
        "--size",
        "8M",
        "--json",
    ];
    let printed = guests.ok(&[&words[..], &times].concat())?;
    let document: Value = serde_json::from_str(&printed)?;
    let cells = document["cells"].as_array().context("no cells")?;
    ensure!(cells.len() == 2 && cells[1]["turns"] == 2, "{document}");
    let class = cells[1]["class"].as_str().unwrap_or_default();
    ensure!(class.starts_with("below 40 %"), "{document}");
    // No answer comes before its time, whatever the machine does.
    ensure!(
        cells[1]["mean_ns"].as_f64().unwrap_or(0.0) >= 20e6,
        "{document}"
    );
    ensure!(std::fs::read_to_string(folder.join("compare.svg"))?.contains("<svg"));
    std::fs::remove_dir_all(&folder)?;
    guests.nothing_is_left()
}

#[test]
fn a_matrix_that_was_interrupted_goes_on_and_draws_its_pictures() -> Result<()> {
    let guests = UserGuests::new()?.with_bench()?;
    let folder = vm::workspace().join("target/vm-studies-matrix");
    std::fs::remove_dir_all(&folder).ok();
    let place = folder.display().to_string();
    let words = [
        "matrix",
        "--quick",
        "--memory",
        "--folder",
        &place,
        "--disks",
        "2",
        "--threads",
        "0,1",
    ];
    let times = [
        "--turns",
        "1",
        "--turn-time",
        "0.2",
        "--size",
        "8M",
        "--smp",
        "1",
    ];
    let words = [&words[..], &times].concat();
    let mut first = guests
        .command(&words)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let runs = || std::fs::read_to_string(folder.join("runs.jsonl")).unwrap_or_default();
    let measured = wait_until(SOON, || match first.try_wait() {
        Ok(None) => (runs().lines().count() > 2).then_some(Ok(())),
        Ok(Some(status)) => Some(Err(status)),
        Err(_) => None,
    });
    let measured = measured.context("nothing is measured")?;
    ensure!(measured.is_ok(), "it ended by itself: {measured:?}");
    let pid = rustix::process::Pid::from_child(&first);
    rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
    let ended = first.wait()?;
    ensure!(ended.code() == Some(130), "{ended}");
    let before = runs().lines().count();

    let printed = guests.ok(&words)?;
    let text = runs();
    let mut cells = HashSet::new();
    for line in text.lines().skip(1) {
        let run: Value = serde_json::from_str(line)?;
        ensure!(
            run["read_iops"].as_f64().unwrap_or(0.0) + run["write_iops"].as_f64().unwrap_or(0.0)
                > 0.0,
            "{line}"
        );
        let cell = format!("{} {} {}", run["way"], run["case"], run["turn"]);
        ensure!(cells.insert(cell), "measured twice: {line}");
    }
    // Four ways for each number of threads, reads and writes.
    ensure!(
        cells.len() == 16 && before < 17,
        "{} cells, {before} before: {text}",
        cells.len()
    );
    ensure!(
        printed.contains("most IOPS") && printed.contains("too few to tell ways apart"),
        "{printed}"
    );
    for picture in ["combined-read", "combined-write", "combined-iops"] {
        let png = std::fs::read(folder.join(format!("{picture}.png")))?;
        ensure!(png.starts_with(b"\x89PNG\r\n\x1a\n"), "{picture}");
        ensure!(folder.join(format!("{picture}.svg")).exists());
    }
    let other = guests
        .command(&[&words[..], &["--series", "Lunette"]].concat())
        .output()?;
    let refused = String::from_utf8_lossy(&other.stderr).into_owned();
    ensure!(refused.contains("runs of another study"), "{refused}");
    std::fs::remove_dir_all(&folder)?;
    guests.nothing_is_left()
}
