//! `lunette bench` is interrupted, killed, loses its reader, or gets invalid arguments. No process or file remains, no result is
//! lost, and the exit code is correct.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use end_to_end::{Context, Profile, Result, Rig, Scratch, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vm::lunette_program;

const PATIENCE: Duration = Duration::from_secs(60);
const TARGET: &str = "iqn.2026-11.org.example:spoilt";

fn bench(words: &[&str]) -> Result<Command> {
    // The caller may have SIGHUP ignored.
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP");
    command.arg(lunette_program(Profile::Dev)?);
    command.arg("bench").args(words);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    // The process has its own group, so that a signal reaches only this process.
    command.process_group(0);
    Ok(command)
}

fn output_text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{}\n{out}{err}", output.status)
}

fn rig() -> Result<Rig> {
    Rig::new(|daemon| {
        let target = format!("{TARGET}=d0");
        daemon
            .disk("d0=ram:64M")
            .disk("null=null:64M")
            .vhost_blk("d0")
            .vhost_blk("null")
            .arguments(["--iscsi", &target, "--portal", "127.0.0.1:0"])
            .arguments(["--demo-mode", "rw"])
    })
}

fn until(condition: &str, mut there: impl FnMut() -> bool) -> Result<()> {
    let begun = Instant::now();
    while !there() {
        ensure!(begun.elapsed() < PATIENCE, "{condition}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn children(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let text = fs::read_to_string(path).unwrap_or_default();
    let words = text.split_whitespace();
    words.filter_map(|word| word.parse().ok()).collect()
}

/// Returns true if the process has ended, even if its parent has not yet waited for it.
fn is_gone(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_none_or(|state| state.starts_with(['Z', 'X']))
}

/// Returns the folder of a daemon's sockets.
fn folder_of(pid: u32) -> Option<PathBuf> {
    let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = line.split('\0');
    words.find(|word| *word == "--control")?;
    Path::new(words.next()?).parent().map(Path::to_owned)
}

fn send(child: &Child, signal: Signal) -> Result<()> {
    kill_process(Pid::from_child(child), signal).context("it is gone")
}

/// SIGKILL prevents a clean-up, and a daemon that polls would use a CPU forever.
#[test]
fn ended_study_leaves_no_daemon() -> Result<()> {
    for signals in [
        &[Signal::HUP][..],
        &[Signal::INT, Signal::TERM],
        &[Signal::KILL],
    ] {
        let scratch = Scratch::new()?;
        let child = bench(&["matrix", "--disks=2", "--workers=0", "--queues=1"])?
            .args(["--turn-ms=10000", "--place"])
            .arg(scratch.files())
            .spawn()?;
        let results = scratch.files().join("results.jsonl");
        let mut daemon = None;
        until("it starts no daemon", || {
            let served = children(child.id()).into_iter();
            daemon = served
                .filter_map(|pid| Some((pid, folder_of(pid)?)))
                .find(|(_, folder)| folder.join("control").exists());
            daemon.is_some() && results.exists()
        })?;
        let Some((daemon, folder)) = daemon else {
            bail!("no daemon");
        };
        for signal in signals {
            send(&child, *signal)?;
        }
        let output = child.wait_with_output()?;
        match signals {
            // The first signal ends the study in an orderly way, with a page of the partial results.
            [Signal::HUP] => ensure!(
                output.status.code() == Some(130),
                "{}",
                output_text(&output)
            ),
            _ => {
                let last = output.status.signal();
                let sent = signals.iter().map(|signal| signal.as_raw());
                ensure!(
                    sent.map(Some).any(|one| one == last),
                    "{}",
                    output_text(&output)
                );
            }
        }
        until("the daemon is still there", || is_gone(daemon))?;
        let killed = signals == [Signal::KILL];
        ensure!(
            folder.exists() == killed,
            "{signals:?}: {}",
            folder.display()
        );
        if killed {
            fs::remove_dir_all(folder)?;
        }
    }
    Ok(())
}

/// `nohup` ignores SIGHUP.
#[test]
fn run_continues_after_its_terminal_closes() -> Result<()> {
    let rig = rig()?;
    let subject = format!("vhost-user-blk:{}", rig.socket("d0").display());
    let child = Command::new("nohup")
        .arg(lunette_program(Profile::Dev)?)
        .args(["bench", &subject, "--rw", "randread", "--interrupts"])
        .args(["--runtime", "2s", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    until("nothing was read", || {
        rig.daemon
            .latency(&["d0"])
            .is_ok_and(|text| text.contains("read"))
    })?;
    send(&child, Signal::HUP)?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}", output_text(&output));
    let document: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(document["lunette"]["outcome"]["interrupted"] == false);
    Ok(())
}

#[test]
fn partially_filled_file_is_removed() -> Result<()> {
    let scratch = Scratch::new()?;
    let file = scratch.files().join("f.raw");
    let subject = format!("file:{}", file.display());
    let child = bench(&[&subject, "--rw=randread", "--size=1t"])?.spawn()?;
    let names = || fs::read_dir(scratch.files()).map_or(0, Iterator::count);
    until("it makes no file", || names() > 0)?;
    send(&child, Signal::INT)?;
    let output = child.wait_with_output()?;
    ensure!(
        output.status.code() == Some(130),
        "{}",
        output_text(&output)
    );
    ensure!(names() == 0, "{}", output_text(&output));
    Ok(())
}

/// Verification fails while the reader of standard output has closed its end, as `head` does.
#[test]
fn verdict_is_unchanged_by_a_closed_output() -> Result<()> {
    let rig = rig()?;
    let subject = format!("vhost-user-blk:{}", rig.socket("null").display());
    let mut child = bench(&[&subject, "--rw=write", "--size=1m", "--verify=crc32c"])?.spawn()?;
    drop(child.stdout.take());
    let output = child.wait_with_output()?;
    ensure!(output.status.code() == Some(1), "{}", output_text(&output));
    ensure!(
        output_text(&output).contains("failed or returned wrong data"),
        "{}",
        output_text(&output)
    );
    Ok(())
}

#[test]
fn unwritable_output_is_detected_early_or_printed() -> Result<()> {
    let rig = rig()?;
    let subject = format!("vhost-user-blk:{}", rig.socket("d0").display());
    let trial = [&subject, "--rw=randread", "--interrupts", "--json"];
    let nowhere = "/nonexistent-folder/result.json";
    let output = bench(&trial)?
        .args(["--runtime=1h", "--output", nowhere])
        .output()?;
    ensure!(output.status.code() == Some(1), "{}", output_text(&output));
    ensure!(
        output_text(&output).contains(nowhere),
        "{}",
        output_text(&output)
    );

    let output = bench(&trial)?
        .args(["--runtime=50ms", "--output", "/dev/full"])
        .output()?;
    ensure!(output.status.code() == Some(1), "{}", output_text(&output));
    ensure!(
        output_text(&output).contains("cannot write /dev/full"),
        "{}",
        output_text(&output)
    );
    let document: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(document["jobs"][0]["read"]["total_ios"] != 0);

    // The run replaces an existing file completely, and only at its end.
    let scratch = Scratch::new()?;
    let file = scratch.files().join("result.json");
    fs::write(&file, vec![b'x'; 1 << 20])?;
    let output = bench(&trial)?
        .arg("--runtime=50ms")
        .arg("--output")
        .arg(&file)
        .output()?;
    ensure!(output.status.success(), "{}", output_text(&output));
    serde_json::from_slice::<Value>(&fs::read(&file)?)?;
    Ok(())
}

#[test]
fn invalid_options_are_refused_before_the_start() -> Result<()> {
    let rig = rig()?;
    let socket = rig.socket("d0").display().to_string();
    let subject = format!("vhost-user-blk:{socket}");
    for (words, code, expected) in [
        (&[&subject, "--retries=4294967295"][..], 2, "4294967295"),
        (
            &[&subject, "--warm-up-ms=18446744073709551615"],
            2,
            "warm-up",
        ),
        (&[&subject, "--disturbance=nan"], 2, "nan"),
        (&[&subject, "--disturbance=-1"], 2, "-1"),
        (
            &[&format!("{subject},pid=999999999")],
            1,
            "no process 999999999",
        ),
        (&[&subject, "--rw=nosuch"], 2, "nosuch"),
        (&[&subject, "--bs=3"], 2, "multiple of 512"),
        (&[&format!("{subject},foo")], 2, "`foo`"),
        (&["nosuch.fio"], 2, "nosuch.fio"),
        (&["vhost-blk:/nosuch"], 2, "vhost-user-blk:SOCKET"),
        (&["file:/proc"], 1, "is a folder"),
        (&["file:/dev/null"], 1, ",direct=0"),
        (
            &[&format!("vhost-user-scsi:{socket}")],
            1,
            "vhost-user-blk:",
        ),
        (&["table", "--only=nosuch"], 1, "RAM QD32"),
        (&["iscsi-table", "--only=nosuch"], 1, "4k read QD32"),
        (&["image-table", "--only=nosuch"], 1, "4k read QD32"),
        (&["mcs", "--only=nosuch"], 1, "read, write, both"),
        (&["mcs", "--connections=17"], 2, "17"),
        (
            &[
                "rbd-table",
                "--image=p/a",
                "--peer-image=p/b",
                "--only=nosuch",
            ],
            1,
            "4k read QD32",
        ),
        (&["matrix", "--workers=4096"], 1, "4096"),
        (
            &["matrix", "--workers=0", "--queues=9"],
            1,
            "at most as many queues",
        ),
        (&["matrix", "--queues=0"], 2, "queues"),
    ] {
        let scratch = Scratch::new()?;
        let mut command = bench(words)?;
        if words[0] == "matrix" {
            command.arg("--place").arg(scratch.files());
        }
        let output = command.output()?;
        let text = output_text(&output);
        ensure!(output.status.code() == Some(code), "{words:?}: {text}");
        ensure!(text.contains(expected), "{words:?}: {text}");
        let made = fs::read_dir(scratch.files())?.count();
        ensure!(made == 0, "{words:?} made {made} files");
    }
    Ok(())
}

/// Runs a benchmark and returns the first repetition of its result.
fn measured(words: &[&str]) -> Result<Value> {
    let output = bench(words)?.arg("--json").output()?;
    let document: Value =
        serde_json::from_slice(&output.stdout).with_context(|| output_text(&output))?;
    ensure!(output.status.success(), "{}", output_text(&output));
    Ok(document["lunette"]["outcome"]["subjects"][0]["repetitions"][0].clone())
}

#[test]
fn flushes_are_among_the_requests_that_kicks_are_counted_for() -> Result<()> {
    let rig = rig()?;
    let subject = format!("vhost-user-blk:{}", rig.socket("d0").display());
    let one = measured(&[
        &subject,
        "--rw=randwrite",
        "--set=fsync=1",
        "--interrupts",
        "--runtime=100ms",
    ])?;
    let requests = |direction: usize| one["jobs"][0]["tallies"][direction]["ios"].as_f64();
    let writes = requests(1).context("no writes")?;
    let flushes = requests(2).context("no flushes")?;
    ensure!(flushes > 0.0, "{one}");
    // With one request at a time, each causes at most one kick and one interrupt. Two more may belong to requests at the edges of the
    // measured time.
    let most = 1.0 + 2.0 / (writes + flushes) + 1e-9;
    for condition in ["kicks_per_io", "interrupts_per_io"] {
        ensure!(
            one[condition].as_f64().is_some_and(|each| each <= most),
            "{one}"
        );
    }
    Ok(())
}

/// CPU time of an iSCSI target on this machine counts as the device's.
#[test]
fn the_cpu_time_of_a_target_on_this_machine_is_the_device_s() -> Result<()> {
    let mut rig = rig()?;
    let portal = rig.iscsi_portal(TARGET)?;
    let subject = format!("iscsi://{portal}/{TARGET}/0");
    let one = measured(&[&subject, "--rw=randread", "--runtime=300ms"])?;
    let cpu = one["device_cpu_per_million"].as_f64();
    ensure!(cpu.is_some_and(|seconds| seconds > 0.0), "{one}");
    Ok(())
}
