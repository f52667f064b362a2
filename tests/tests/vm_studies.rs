//! `lunette vm compare` and `lunette vm matrix`: a slow disk differs from bare metal, an interrupted study resumes, and its charts are
//! drawn. Needs: guests. Takes: 60 s.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, Rig, UserGuests, bail, ensure};
use serde_json::Value;
use std::collections::HashSet;
use std::process::Stdio;
use std::time::Duration;
use vm::wait_until;

const SOON: Duration = Duration::from_secs(240);

/// A disk with a delay of 20 ms, a memory disk, and files of this machine. An emulated guest is slow, so the effect of the delay is
/// compared with the memory disk.
#[test]
fn a_slow_disk_is_far_below_bare_metal_and_below_a_fast_one() -> Result<()> {
    let guests = UserGuests::new()?.with_bench()?;
    let sockets = guests.sandbox_path();
    let rig = Rig::new(|daemon| {
        let daemon = daemon.disk("slow=delay:20ms,size=16M");
        daemon.disk("fast=ram:16M").arguments([sockets.as_str()])
    })?;
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
        "slow,fast",
    ];
    let more = [
        "--ways",
        "Lunette",
        "--smp",
        "1",
        "--turns",
        "2",
        "--turn-time",
        "0.4",
        "--size",
        "8M",
        "--json",
    ];
    let printed = guests.ok(&[&words[..], &more].concat())?;
    let document: Value = serde_json::from_str(&printed)?;
    let cells = document["cells"].as_array().context("no cells")?;
    let [host, slow, fast] = &cells[..] else {
        bail!("{document}");
    };
    let number =
        |cell: &Value, path: &str| cell.pointer(path).and_then(Value::as_f64).unwrap_or(0.0);
    ensure!(cells.iter().all(|cell| cell["turns"] == 2), "{document}");
    // An emulated guest is slow by itself, so it has no class.
    let is_kvm = document["accelerator"] == "KVM";
    ensure!(is_kvm || slow["class"].is_null(), "{document}");
    // No request completes before the delay, on any machine, and the memory disk completes many more requests.
    for field in ["/mean_ns", "/p50_ns", "/p99_ns"] {
        ensure!(number(slow, field) >= 20e6, "{field} of {slow}");
    }
    ensure!(number(fast, "/mean_ns") < 20e6, "{fast}");
    ensure!(
        number(fast, "/iops/median") > 5.0 * number(slow, "/iops/median"),
        "{document}"
    );
    ensure!(
        number(fast, "/of_first/value") > 5.0 * number(slow, "/of_first/value"),
        "{document}"
    );
    // The daemon ran before, so its CPU time includes more than this guest's requests.
    ensure!(
        slow["host_cpu_ns_per_io"].is_null() && number(host, "/host_cpu_ns_per_io") > 0.0,
        "{document}"
    );
    let mut left: Vec<String> = Vec::new();
    for entry in std::fs::read_dir(&folder)? {
        left.push(entry?.file_name().to_string_lossy().into_owned());
    }
    left.sort();
    ensure!(
        left == [
            "compare.png",
            "compare.svg",
            "report.html",
            "result.json",
            "runs.jsonl"
        ],
        "{left:?}"
    );
    std::fs::remove_dir_all(&folder)?;
    guests.nothing_is_left()
}

#[test]
fn interrupted_matrix_continues_and_draws_its_plots() -> Result<()> {
    let guests = UserGuests::new()?.with_bench()?;
    let folder = vm::workspace().join("target/vm-studies-matrix");
    std::fs::remove_dir_all(&folder).ok();
    let place = folder.display().to_string();
    let disks = "matrix --quick --memory --disks 2 --threads 0,1 --baseline=ide";
    let times = "--turns 1 --turn-time 0.2 --size 8M --smp 1 --folder";
    let words = disks.split(' ').chain(times.split(' ')).chain([&*place]);
    let words: Vec<&str> = words.collect();
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
    guests.nothing_is_left()?;
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
    // Four ways for each number of threads and one of IDE disks, reads and writes.
    ensure!(
        cells.len() == 18 && before < 19,
        "{} cells, {before} before: {text}",
        cells.len()
    );
    ensure!(printed.contains("too few for a comparison"), "{printed}");
    ensure!(
        !printed.contains("of the IOPS of") && !printed.contains("most IOPS"),
        "one turn proves nothing: {printed}"
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

/// SIGTERM of `vm study` ends the command that it runs, with its guest and daemon. The results so far are printed and saved.
#[test]
fn terminated_replay_ends_its_command_and_saves_its_findings() -> Result<()> {
    let guests = UserGuests::new()?.with_bench()?;
    let folder = guests.file("study");
    let place = folder.display().to_string();
    let words = ["study", "four-disks", "--quick", "--folder", &place];
    let plan = guests.ok(&[&words[..], &["--plan"]].concat())?;
    ensure!(plan.contains("estimated duration"), "{plan}");
    ensure!(!folder.exists(), "--plan creates files");
    let study = guests
        .command(&words)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let has_guest = || (!guests.folders().is_empty()).then_some(());
    let guest = wait_until(SOON, has_guest);
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&study),
        rustix::process::Signal::TERM,
    )?;
    let ended = study.wait_with_output()?;
    guest.context("no guest was started")?;
    ensure!(ended.status.code() == Some(143), "{ended:?}");
    let printed = String::from_utf8_lossy(&ended.stdout);
    ensure!(printed.contains("(not measured)"), "{printed}");
    let saved = std::fs::read(folder.join("four-disks/quick/study.json"))?;
    let saved: Value = serde_json::from_slice(&saved)?;
    ensure!(saved["interrupted"] == true, "{saved}");
    guests.nothing_is_left()
}
