//! `lunette vm bench` runs the studies' job files unchanged in a guest, over both transports.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, UserGuests, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use vm::wait_until;

fn study(name: &str) -> String {
    let place = vm::workspace().join("contrib/jobs").join(name);
    place.display().to_string()
}

/// Returns a number of a document. Fails if it is missing.
fn number(document: &Value, path: &str) -> Result<u64> {
    let value = document.pointer(path).and_then(Value::as_u64);
    value.with_context(|| format!("no {path} in {document:#}"))
}

#[test]
fn job_files_of_the_studies_run_unchanged_in_a_guest() -> Result<()> {
    let guests = UserGuests::new()?.with_bench()?;
    guests.ok(&[
        "run",
        "--detach",
        "--name",
        "one",
        "--smp",
        "1",
        "--memory",
        "256M",
        "scsi:9x1,queues=1",
        "blk:1,queues=1",
        "backing=ram:16M",
    ])?;
    four_disks(&guests)?;
    eight_disks(&guests)?;
    discards(&guests)?;
    interruption(&guests)?;
    refusals(&guests)?;
    let left = guests.ok(&["exec", "one", "ls -d /tmp/bench.* 2>/dev/null | wc -l"])?;
    ensure!(left.trim() == "0", "{left}");
    guests.ok(&["kill", "one"])?;
    guests.nothing_is_left()
}

/// Bandwidth logs have one line per request, the result has CPU times, and fio's tools read both.
fn four_disks(guests: &UserGuests) -> Result<()> {
    let logs = guests.file("logs").display().to_string();
    let output = guests.file("four.json");
    let file = output.display().to_string();
    let study = study("four-disks.fio");
    let words = ["bench", "one", &study, "--size", "4m", "--loops", "1"];
    let more = [
        "--logs",
        &logs,
        "--output-format",
        "json",
        "--output",
        &file,
    ];
    guests.ok(&[&words[..], &more].concat())?;
    let text = std::fs::read_to_string(&output)?;
    let document: Value = serde_json::from_str(&text)?;
    let at = |key: &str| -> Result<u64> {
        let of = |direction: &str| number(&document, &format!("/jobs/0/{direction}/{key}"));
        Ok(of("read")? + of("write")?)
    };
    // Four disks share 4 MiB. A request of up to 64 KiB that does not fit at the end of a disk's share is omitted.
    let bytes = at("io_bytes")?;
    ensure!(
        bytes <= 4 << 20 && bytes > (4 << 20) - 4 * (64 << 10),
        "{bytes}"
    );
    let name = format!("{logs}/virtio-scsi_1.log_bw.1.log");
    let log = std::fs::read_to_string(&name).with_context(|| name.clone())?;
    ensure!(
        log.lines().count() == at("total_ios")? as usize,
        "{name}: {log}"
    );
    for time in [
        "guest_cpu_ns/user",
        "guest_cpu_ns/irq",
        "host_cpu_ns/daemon",
    ] {
        number(&document, &format!("/vm/{time}"))?;
    }
    ensure!(number(&document, "/vm/host_cpu_ns/qemu")? > 0);
    fio_s_tools_read(&output, Path::new(&logs))
}

fn fio_s_tools_read(result: &Path, logs: &Path) -> Result<()> {
    let run = |command: &mut Command| -> Result<String> {
        let output = command.output().with_context(|| format!("{command:?}"))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{command:?}: {errors}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let csv = logs.join("result.csv");
    let tool = vm::tool("fio_jsonplus_clat2csv");
    let tool = tool.context("hint: apt-get install --no-install-recommends fio")?;
    run(Command::new(tool).args([result, &csv]))?;
    let tables: Vec<PathBuf> = std::fs::read_dir(logs)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "csv"))
        .collect();
    ensure!(!tables.is_empty(), "no table in {}", logs.display());
    for table in tables {
        let text = std::fs::read_to_string(&table)?;
        ensure!(text.lines().count() > 1, "{}: {text}", table.display());
    }
    Ok(())
}

fn eight_disks(guests: &UserGuests) -> Result<()> {
    let study = study("eight-disks.fio");
    let words = [
        "bench",
        "one",
        &study,
        "--runtime",
        "1s",
        "--size",
        "8m",
        "--set",
        "time_based=1",
        "--set",
        "rw=randrw",
    ];
    let table = guests.ok(&words)?;
    let names = (1..9).map(|disk| format!("drive{disk} "));
    for name in names.chain(["total ".to_owned()]) {
        let lines = table.lines().filter(|line| line.starts_with(&name));
        ensure!(lines.count() == 2, "{name} reads and writes: {table}");
    }
    ensure!(
        table.contains("guest CPU: user") && table.contains("host CPU: QEMU"),
        "{table}"
    );
    ensure!(
        table.contains("guest Linux") && table.contains("Host: Linux"),
        "{table}"
    );
    Ok(())
}

/// Uses BLKDISCARD on a kernel without io_uring discards, over both transports. Discarded ranges read as zeroes.
fn discards(guests: &UserGuests) -> Result<()> {
    let job = guests.file("trim.fio");
    std::fs::write(
        &job,
        "[trim]\ndirect=1\nrw=randtrim\nbs=64k\nsize=2m\niodepth=4\n",
    )?;
    let job = job.display().to_string();
    for disk in ["vda", "sda"] {
        let fill = format!("yes | dd of=/dev/{disk} bs=64k count=64 iflag=fullblock conv=fsync");
        guests.ok(&["exec", "one", &fill])?;
        let words = ["bench", "one", &job, "--disks", disk];
        let text = guests.ok(&[&words[..], &["--output-format", "json"]].concat())?;
        let document: Value = serde_json::from_str(&text)?;
        ensure!(number(&document, "/jobs/0/trim/total_ios")? == 32, "{text}");
        let zeroes = |offset: &str| -> Result<bool> {
            let check =
                format!("guest-agent zeroes --file /dev/{disk} --offset {offset} --length 2M");
            Ok(guests.vm(&["exec", "one", &check])?.status.success())
        };
        ensure!(zeroes("0")? && !zeroes("2M")?, "{disk}");
    }
    Ok(())
}

/// The first SIGINT ends the load. The results so far are printed, with exit code 130.
fn interruption(guests: &UserGuests) -> Result<()> {
    let job = guests.file("long.fio");
    std::fs::write(&job, "[a]\nrw=randread\nruntime=600\ntime_based\nsize=2m\n")?;
    let job = job.display().to_string();
    let child = guests
        .command(&["bench", "one", &job, "--disks", "vda"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let is_running = || {
        let script = "test -s /tmp/bench.*/before";
        let found = guests.vm(&["exec", "one", script]);
        found
            .is_ok_and(|output| output.status.success())
            .then_some(())
    };
    let running = wait_until(Duration::from_secs(120), is_running);
    std::thread::sleep(Duration::from_secs(1));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
    running.context("the load does not run")?;
    let ended = child.wait_with_output()?;
    let printed = String::from_utf8_lossy(&ended.stdout);
    ensure!(ended.status.code() == Some(130), "{ended:?}");
    ensure!(
        printed.contains("read") && printed.contains("interrupted: partial results"),
        "{printed}"
    );
    Ok(())
}

/// Checks that each error names a fix.
fn refusals(guests: &UserGuests) -> Result<()> {
    let job = guests.file("wrong.fio");
    let path = job.display().to_string();
    let refused = |text: &str, more: &[&str], parts: &[&str]| -> Result<()> {
        std::fs::write(&job, text)?;
        let words = ["bench", "one", &path];
        let error = guests.refused(&[&words[..], more].concat())?;
        let all = parts.iter().all(|part| error.contains(part));
        ensure!(all, "{text:?} {more:?}: {error}");
        Ok(())
    };
    let read = "[a]\nrw=read\nfilename=/dev/vda\n";
    refused("[a]\nrw=sideways\n", &[], &["wrong.fio:2: rw: `sideways`"])?;
    refused(
        "include b.fio\n",
        &[],
        &["line 1", "hint: insert the text of that file"],
    )?;
    refused(
        read,
        &["--disks", "vdzz"],
        &["/dev/vdzz is not a block device", "hint:"],
    )?;
    refused(read, &["--disks", "null"], &["/dev/null is not a block"])?;
    refused(
        "[a]\nrw=read\nfilename=/dev/vdzz\n",
        &[],
        &["/dev/vdzz is not"],
    )?;
    guests.ok(&["exec", "one", "test ! -e /dev/vdzz"])?;
    refused(read, &["--with", "fio"], &["the guest has no fio", "hint:"])
}
