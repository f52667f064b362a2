//! Output of `lunette latency` for a running daemon: all stages of the slowest requests, iSCSI's extra stages, rates in a pipe.
//! Also checks that the program contains the probes.
#![forbid(unsafe_code)]

use end_to_end::{Context, IscsiSession, Profile, Result, Rig, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use vm::lunette_program;

const TARGET: &str = "iqn.2026-11.org.example:t0";
const STAGES: [&str; 9] = [
    "noticed",
    "popped",
    "parsed",
    "awaited",
    "received",
    "submitted",
    "reaped",
    "answered",
    "notified",
];

fn rig() -> Result<Rig> {
    let target = format!("{TARGET}=d0");
    Rig::new(|daemon| {
        daemon
            .disk("d0=ram:64M")
            .vhost_blk("d0")
            .vhost_scsi("c0")
            .lun("c0/0:0=d0")
            .arguments(["--iscsi", &target, "--portal", "127.0.0.1:0"])
            .arguments(["--demo-mode", "rw"])
    })
}

fn portal(rig: &mut Rig) -> Result<String> {
    let begun = Instant::now();
    let announced = format!("ready iscsi {TARGET} ");
    while begun.elapsed() < Duration::from_secs(30) {
        let log = rig.daemon.process().log();
        if let Some(portal) = log.lines().find_map(|line| line.strip_prefix(&announced)) {
            return Ok(portal.trim().to_owned());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("no iSCSI portal:\n{}", rig.daemon.process().log_tail())
}

/// Writes 16 blocks of 4 KiB from 1 MiB on.
fn drive(subject: &str) -> Result<()> {
    let output = Command::new(lunette_program(Profile::Dev)?)
        .args(["bench", subject, "--rw", "write", "--bs", "4k"])
        .args(["--interrupts", "--set", "size=64k", "--set", "offset=1m"])
        // A retry on a busy machine would write the blocks more than once.
        .args(["--retries", "0"])
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {text}", output.status);
    Ok(())
}

fn slowest(rig: &Rig, selector: &str) -> Result<Vec<Value>> {
    let text = rig.daemon.latency(&["--slowest=5", "--json", selector])?;
    let document: Value = serde_json::from_str(&text)?;
    Ok(document["slowest"].as_array().context("no list")?.clone())
}

/// Truncates the disk's file. The log must name the disk and the failed I/Os, at most once per second.
#[test]
fn failed_ios_are_logged_with_their_disk() -> Result<()> {
    let mut rig = Rig::new(|daemon| daemon.disk("d0=file:d.raw,size=64M").vhost_blk("d0"))?;
    let subject = format!("vhost-user-blk:{}", rig.socket("d0").display());
    drive(&subject)?;
    let file = std::fs::File::options()
        .write(true)
        .open(rig.scratch.file("d.raw"))?;
    file.set_len(0)?;
    let begun = Instant::now();
    let output = Command::new(lunette_program(Profile::Dev)?)
        .args(["bench", &subject, "--rw", "randread", "--bs", "4k"])
        .args(["--interrupts", "--runtime", "300ms", "--retries", "0"])
        .output()?;
    ensure!(!output.status.success(), "reads beyond the end succeed");
    let took = begun.elapsed();
    let log = rig.daemon.process().log();
    let failures = log.lines().filter(|line| line.contains("I/O failed"));
    let failures: Vec<&str> = failures.collect();
    let wanted = ["WARN", "read failed", "disk=\"d0\""];
    for line in &failures {
        ensure!(wanted.iter().all(|word| line.contains(word)), "{line}");
    }
    let most = 1 + took.as_secs() as usize;
    ensure!(
        (1..=most).contains(&failures.len()),
        "{failures:#?} in {took:?}"
    );
    Ok(())
}

#[test]
fn slowest_requests_are_complete_on_every_transport() -> Result<()> {
    let mut rig = rig()?;
    drive(&format!("vhost-user-blk:{}", rig.socket("d0").display()))?;
    drive(&format!("vhost-user-scsi:{}", rig.socket("c0").display()))?;
    let portal = portal(&mut rig)?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    // WRITE(10) of eight blocks at LBA 2048: 1 MiB.
    let write = [0x2a, 0, 0, 0, 8, 0, 0, 0, 8, 0];
    for _ in 0..8 {
        let done = session.command(&write, Some(&[7; 4096]), 0)?;
        ensure!(done.status == 0);
    }
    let socket = rig.scratch.socket("nbd.sock").display().to_string();
    let export = format!("d0:{socket},name=n0");
    rig.daemon.lunette(&["export", "add", "nbd", &export])?;
    drive(&format!("nbd+unix:///n0?socket={socket}"))?;
    for selector in ["d0/0", "c0", TARGET, "n0"] {
        let slow = slowest(&rig, selector)?;
        ensure!(slow.len() == 5, "{selector}: {slow:?}");
        let mut before = u64::MAX;
        for one in &slow {
            let number = |key: &str| one[key].as_u64().with_context(|| format!("{key}: {one}"));
            ensure!(number("total_ns")? <= before, "{selector}: not in order");
            before = number("total_ns")?;
            let mut last = 0;
            for stage in STAGES {
                let at = one["stages_ns"][stage]
                    .as_u64()
                    .context("a stage is missing")?;
                ensure!(at >= last, "{selector}: {stage} comes too early: {one}");
                last = at;
            }
            ensure!(last == before, "{selector}: {one}");
            if one["operation"] == "write" {
                let offset = number("offset")?;
                ensure!((1 << 20..(1 << 20) + (64 << 10)).contains(&offset), "{one}");
                ensure!(number("length")? == 4096 && number("lba_512")? == offset / 512);
            }
        }
        ensure!(slow.iter().any(|one| one["operation"] == "write"));
    }
    let text = rig.daemon.latency(&["--slowest"])?;
    ensure!(
        text.contains(" tag ") && text.contains("reaped +"),
        "{text}"
    );
    let metrics = control::Client::new(&rig.daemon.control()).text("/metrics")?;
    for series in [
        r#"lunette_request_duration_seconds_count{export="n0",operation="write"} 16"#,
        r#"lunette_request_stage_duration_seconds_count{export="n0",operation="write",stage="reaped"} 16"#,
        r#"lunette_export_connected{export="n0",kind="nbd"} "#,
    ] {
        let has_series = metrics.lines().any(|line| line.starts_with(series));
        ensure!(has_series, "no {series}: {metrics}");
    }
    Ok(())
}

/// Two disks behind one controller and one target, one of them slow. Each has its own table through every transport, a transport's
/// table is the sum, and the report lists the exports whose queues a disk shares.
#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn disks_that_share_queues_have_tables_of_their_own() -> Result<()> {
    let target = format!("{TARGET}=fast,slow");
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("fast=null:1M")
            .disk("slow=delay:20ms,size=1M")
            .disk("unused=null:1M")
            .vhost_blk("slow")
            .vhost_scsi("c0")
            .lun("c0/0:0=fast")
            .lun("c0/0:1=slow")
            .lun("c0/3:7=unused")
            .arguments(["--iscsi", &target, "--portal", "127.0.0.1:0"])
            .arguments(["--demo-mode", "rw"])
    })?;
    let report = |rig: &Rig, selector: &str| -> Result<Value> {
        let document: Value = serde_json::from_str(&rig.daemon.latency(&["--json", selector])?)?;
        Ok(document["reports"][0].clone())
    };
    let reads = |report: &Value| report["counters"]["operations"][0]["requests"].as_u64();
    // Before the first request a table is empty, and no error is reported.
    ensure!(reads(&report(&rig, "slow")?) == Some(0));
    let read = |subject: &str, count: &str| -> Result<()> {
        let output = Command::new(lunette_program(Profile::Dev)?)
            .args([
                "bench",
                subject,
                "--rw",
                "read",
                "--bs",
                "4k",
                "--interrupts",
            ])
            .args(["--warm-up-ms=0", "--retries=0"])
            .args(["--set", &format!("number_ios={count}")])
            .output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{text}");
        Ok(())
    };
    let controller = rig.socket("c0").display().to_string();
    read(&format!("vhost-user-scsi:{controller}:0:0"), "50")?;
    // As long as a queue has served one disk only, all its counts belong to that disk.
    let alone = report(&rig, "fast")?;
    ensure!(alone["shares_queues_of"].is_null(), "{alone}");
    read(&format!("vhost-user-scsi:{controller}:0:1"), "10")?;
    read(
        &format!("vhost-user-blk:{}", rig.socket("slow").display()),
        "5",
    )?;
    let portal = portal(&mut rig)?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    // READ(10) of one block, alternating. The first command to a unit consumes its unit attention.
    let one = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    for lun in [0, 1] {
        session.command_on(lun, &[0; 6], None, 0)?;
    }
    for _ in 0..4 {
        for lun in [0, 1] {
            ensure!(session.command_on(lun, &one, None, 512)?.status == 0);
        }
    }

    let count = |selector: &str| -> Result<u64> {
        reads(&report(&rig, selector)?).with_context(|| format!("{selector} has no reads"))
    };
    // The benchmarks read 50, 10 and 5 times, and the session 4 times per disk. The drivers make no other reads.
    let counted = [
        ("fast", 54),
        ("slow", 19),
        ("c0", 60),
        (TARGET, 8),
        ("unused", 0),
    ];
    for (selector, reads) in counted {
        ensure!(
            count(selector)? == reads,
            "{selector}: {}",
            count(selector)?
        );
    }
    for (disk, least, most) in [("slow", 20e6, f64::MAX), ("fast", 0.0, 20e6)] {
        let report = report(&rig, disk)?;
        let tables = report["operations"].as_array().context("no tables")?;
        let read = tables.iter().find(|one| one["operation"] == "read");
        let rows = read.context("no reads")?["rows"]
            .as_array()
            .context("no rows")?;
        let reaped = rows.iter().find(|row| row["name"] == "reaped");
        let reaped = reaped.with_context(|| format!("{report}"))?;
        let p50 = reaped["p50_ns"].as_f64().context("no p50")?;
        ensure!((least * 0.98..most).contains(&p50), "{disk}: {p50} ns");
    }
    let shared = report(&rig, "slow")?["shares_queues_of"].clone();
    ensure!(shared == serde_json::json!(["c0", TARGET]), "{shared}");
    let text = rig.daemon.latency(&["fast"])?;
    ensure!(
        text.contains("see c0, iqn.2026-11.org.example:t0, which has the same queues"),
        "{text}"
    );
    ensure!(!text.contains("\nkicks"), "{text}");
    ensure!(rig.daemon.latency(&["c0"])?.contains("\nkicks "));
    let outcome = rig.daemon.ask(&["latency", "nothing"])?;
    ensure!(!outcome.status.success(), "{outcome:?}");
    Ok(())
}

/// Returns the rows of the first table of this operation.
fn rows(rig: &Rig, selector: &str, operation: &str) -> Result<Vec<(String, u64)>> {
    let document: Value = serde_json::from_str(&rig.daemon.latency(&["--json", selector])?)?;
    let tables = document["reports"][0]["operations"]
        .as_array()
        .context("no tables")?
        .clone();
    let table = tables.iter().find(|table| table["operation"] == operation);
    let rows = table.context("no such table")?["rows"]
        .as_array()
        .context("no rows")?;
    let row = |row: &Value| {
        let name = row["name"].as_str().unwrap_or_default().to_owned();
        (name, row["count"].as_u64().unwrap_or_default())
    };
    Ok(rows.iter().map(row).collect())
}

#[test]
fn data_that_iscsi_asks_for_has_stages_of_its_own() -> Result<()> {
    let mut rig = rig()?;
    let portal = portal(&mut rig)?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    // 1 MiB exceeds any first burst, so the target must solicit data.
    let large = [0x2a, 0, 0, 0, 0, 0, 0, 8, 0, 0];
    let data = vec![1; 1 << 20];
    for _ in 0..3 {
        let done = session.command(&large, Some(&data), 0)?;
        ensure!(done.status == 0);
    }
    let of_writes = rows(&rig, TARGET, "write")?;
    let count = |name: &str| of_writes.iter().find(|row| row.0 == name).map(|row| row.1);
    for name in ["awaited", "received", "submitted", "reaped", "notified"] {
        ensure!(count(name) == Some(3), "{name}: {of_writes:?}");
    }
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    ensure!(session.command(&read, None, 4096)?.status == 0);
    let of_reads = rows(&rig, TARGET, "read")?;
    ensure!(
        of_reads.iter().all(|row| row.0 != "awaited"),
        "{of_reads:?}"
    );
    Ok(())
}

#[test]
fn watching_works_in_a_pipe_and_ends_with_it() -> Result<()> {
    let rig = rig()?;
    let control = rig.scratch.socket("control.sock");
    let mut watching = Command::new(lunette_program(Profile::Dev)?)
        .args(["latency", "--watch=0.1", "--json", "--socket"])
        .arg(control)
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = watching.stdout.take().context("no pipe")?;
    let mut lines = BufReader::new(stdout).lines();
    // The output starts before the first write.
    lines.next().context("it printed nothing")??;
    drive(&format!("vhost-user-blk:{}", rig.socket("d0").display()))?;
    // The writes may be in two intervals.
    let mut writes = 0;
    let seen = lines.by_ref().take(200).find_map(|line| {
        let document: Value = serde_json::from_str(&line.ok()?).ok()?;
        let report = document["reports"].get(0)?.clone();
        writes += report["counters"]["operations"][1]["requests"].as_u64()?;
        (writes == 16).then_some(report)
    });
    let report = seen.with_context(|| format!("16 writes were made and {writes} printed"))?;
    ensure!(
        report["seconds"].as_f64().is_some_and(|s| s >= 0.1),
        "{report}"
    );
    drop(lines);
    let status = watching.wait()?;
    ensure!(status.success(), "{status}");
    Ok(())
}

/// Returns the probes in the program, each with its number of arguments.
fn probes() -> Result<BTreeMap<String, usize>> {
    let output = Command::new("readelf")
        .arg("--notes")
        .arg("--wide")
        .arg(lunette_program(Profile::Dev)?)
        .output()
        .context("cannot run readelf; hint: apt-get install binutils")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut probes = BTreeMap::new();
    for note in text.split("Provider: lunette").skip(1) {
        let field = |word: &str| {
            let mut lines = note.lines().map(str::trim);
            lines.find_map(|line| line.strip_prefix(word).map(str::to_owned))
        };
        let name = field("Name: ").context("a probe without a name")?;
        let arguments = field("Arguments:").unwrap_or_default();
        let count = arguments.split_whitespace().count();
        let before = probes.insert(name.clone(), count);
        ensure!(
            before.is_none_or(|before| before == count),
            "{name}: {text}"
        );
    }
    Ok(probes)
}

#[test]
fn every_stage_has_its_probe_in_the_program() -> Result<()> {
    let probes = probes()?;
    for stage in STAGES {
        ensure!(probes.contains_key(stage), "no probe {stage}: {probes:?}");
    }
    Ok(())
}

#[test]
fn stamp_cost_is_measured_and_verified() -> Result<()> {
    let folder = end_to_end::Scratch::new()?;
    let output = Command::new(lunette_program(Profile::Dev)?)
        .args(["bench", "self-check", "--without-timing", "--place"])
        .arg(folder.files())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{text}{complaints}");
    let lines = |word: &str| text.lines().filter(|line| line.starts_with(word)).count();
    // Counts and percentiles are correct on any machine. Other checks run without a verdict.
    ensure!(lines("ok ") == 2 && lines("not judged") >= 4, "{text}");
    ensure!(lines("not checked") == 0, "is fio installed?\n{text}");

    let output = Command::new(lunette_program(Profile::Dev)?)
        .args(["bench", "stamp-cost", "--rounds=1", "--repetitions=2"])
        .args(["--turn-ms=20", "--driver-cpu=0", "--device-cpu=0", "--json"])
        .output()?;
    let complaints = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{complaints}");
    let document: Value = serde_json::from_slice(&output.stdout)?;
    let cases = document["stamp_cost"].as_array().context("no list")?;
    ensure!(cases.len() == 6, "{document}");
    for case in cases {
        let rate = |turns: &str| case["turns"][turns][0].as_f64().unwrap_or(0.0);
        ensure!(rate("with") > 0.0 && rate("without") > 0.0, "{case}");
        ensure!(case["cost"]["value"].is_f64(), "{case}");
    }
    Ok(())
}

#[test]
fn trace_scripts_use_existing_probes_and_arguments() -> Result<()> {
    let folder = vm::workspace().join("scripts/trace");
    let readme = std::fs::read_to_string(folder.join("README.md"))?;
    let probes = probes()?;
    let mut scripts = 0;
    for entry in std::fs::read_dir(&folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "bt") {
            continue;
        }
        scripts += 1;
        let text = std::fs::read_to_string(&path)?;
        let name = path.file_name().context("no name")?.to_string_lossy();
        ensure!(readme.contains(&*name), "{name} is not in the README");
        // Several probes may share one body, which follows the last probe.
        let mut listed: Vec<usize> = Vec::new();
        for probe in text.split("usdt:*:lunette:").skip(1) {
            let end = probe.find(|c: char| !c.is_ascii_lowercase());
            let (word, body) = probe.split_at(end.unwrap_or(probe.len()));
            let count = probes.get(word);
            listed.push(*count.with_context(|| format!("{name}: no probe {word}"))?);
            if body.trim_start().starts_with(',') {
                continue;
            }
            let body = body.split("\ninterval:").next().unwrap_or(body);
            for argument in body.split("arg").skip(1) {
                let digits = argument.split(|c: char| !c.is_ascii_digit()).next();
                let Some(Ok(number)) = digits.map(str::parse::<usize>) else {
                    continue;
                };
                let there = listed.iter().all(|count| number < *count);
                ensure!(there, "{name}: {word} has no arg{number}");
            }
            listed.clear();
        }
    }
    ensure!(scripts >= 7, "{scripts} scripts");
    Ok(())
}

/// Compiles a script with bpftrace for a running daemon. bpftrace parses and types the script and resolves each probe and argument,
/// but does not load it into the kernel.
fn compiles(script: &Path, argument: Option<&str>, pid: u32) -> Result<bool> {
    let output = Command::new("bpftrace")
        .args(["-d", "-p", &pid.to_string()])
        .arg(script)
        .args(argument)
        .output()
        .context("cannot run bpftrace; hint: apt-get install bpftrace")?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(output.status.success() && text.contains("define i64 @\"usdt:"))
}

/// Compilers and kernels may refuse a script that looks correct. Each script is compiled for a running daemon, and attached where
/// the kernel permits.
#[test]
fn every_trace_script_compiles_and_reports_when_attached() -> Result<()> {
    let mut rig = rig()?;
    let folder = vm::workspace().join("scripts/trace");
    let scripts = [
        ("stages.bt", None, "submitted_us"),
        ("slow.bt", Some("0"), " us: queue "),
        ("follow.bt", Some("1048576"), " notified "),
        ("errors.bt", None, "Attaching"),
        ("sizes.bt", None, "[4K, 8K)"),
        ("batches.bt", None, "@"),
        ("r2t.bt", None, "@"),
    ];
    let pid = rig.daemon.process().id();
    for (script, argument, _) in scripts {
        let compiled = compiles(&folder.join(script), argument, pid)?;
        ensure!(compiled, "{script} does not compile for this program");
    }
    let wrong = rig.scratch.files().join("wrong.bt");
    for body in ["poped { print(arg0); }", "popped { print(arg0 }"] {
        std::fs::write(&wrong, format!("usdt:*:lunette:{body}\n"))?;
        ensure!(!compiles(&wrong, None, pid)?, "`{body}` compiles");
    }
    if !Path::new("/sys/kernel/tracing/uprobe_events").exists() {
        println!(
            "every script compiles; none was attached, for this kernel has no CONFIG_UPROBE_EVENTS"
        );
        return Ok(());
    }
    for (script, argument, word) in scripts {
        attach(&mut rig, &folder.join(script), argument, word)
            .with_context(|| format!("{script} attached"))?;
    }
    println!("every script compiles, was attached and printed the expected output");
    Ok(())
}

/// Attaches a script under load and checks that its output contains `word`.
fn attach(rig: &mut Rig, script: &Path, argument: Option<&str>, word: &str) -> Result<()> {
    let portal = portal(rig)?;
    let subject = format!("vhost-user-blk:{}", rig.socket("d0").display());
    let mut tracing = Command::new("bpftrace")
        .arg("-p")
        .arg(rig.daemon.process().id().to_string())
        .arg(script)
        .args(argument)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut printed = BufReader::new(tracing.stdout.take().context("no pipe")?);
    let mut text = String::new();
    while !text.contains("Attaching") {
        let more = printed.read_line(&mut text)?;
        ensure!(more > 0, "it ended");
    }
    // bpftrace reports the begin of the attachment but not its end.
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(300));
        drive(&subject)?;
        let mut session = IscsiSession::login(&portal, TARGET, 1)?;
        let large = [0x2a, 0, 0, 0, 0, 0, 0, 8, 0, 0];
        session.command(&large, Some(&vec![1; 1 << 20]), 0)?;
    }
    let pid = rustix::process::Pid::from_child(&tracing);
    rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
    printed.read_to_string(&mut text)?;
    let output = tracing.wait_with_output()?;
    let complaints = String::from_utf8_lossy(&output.stderr);
    // A limit on locked memory does not prevent tracing.
    let mut errors = complaints.lines().filter(|line| line.starts_with("ERROR"));
    let refused = errors.find(|line| !line.contains("RLIMIT_MEMLOCK"));
    ensure!(refused.is_none(), "{complaints}");
    ensure!(word == "Attaching" || text.contains(word), "{text}");
    Ok(())
}

#[test]
fn iscsi_run_has_stages_with_the_wait_for_data_apart() -> Result<()> {
    let mut rig = rig()?;
    let portal = portal(&mut rig)?;
    let control = rig.scratch.socket("control.sock");
    let subject = format!("iscsi://{portal}/{TARGET}/0,control={}", control.display());
    let run = |more: &[&str]| -> Result<String> {
        let output = Command::new(lunette_program(Profile::Dev)?)
            .args([
                "bench",
                &subject,
                "--rw",
                "write",
                "--bs",
                "1m",
                "--interrupts",
            ])
            .args(["--set", "io_size=16m", "--warm-up-ms=0"])
            .args(more)
            .output()?;
        let complaints = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{complaints}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let text = run(&[])?;
    let table = text.split_once("stages of").context("no table")?.1;
    let mut last = 0;
    for word in STAGES.into_iter().chain(["seen"]) {
        let row = |line: &str| line.split_whitespace().next() == Some(word);
        let at = table.lines().position(row);
        let at = at.with_context(|| format!("no row {word}:\n{text}"))?;
        ensure!(at > last, "{word} comes too early:\n{text}");
        last = at;
    }
    let document: Value = serde_json::from_str(&run(&["--json"])?)?;
    let one = &document["lunette"]["outcome"]["subjects"][0]["repetitions"][0];
    ensure!(
        one["ends"][1]["count"].as_u64() == Some(16),
        "{}",
        one["ends"]
    );
    let write = &one["stages"]["operations"]["write"];
    for stage in ["awaited", "received"] {
        ensure!(
            write[stage]["count"].as_u64() == Some(16),
            "{stage}: {write}"
        );
    }
    Ok(())
}

#[test]
fn session_counters_stay_when_the_initiator_leaves() -> Result<()> {
    let mut rig = rig()?;
    let metrics = |rig: &Rig| -> Result<String> {
        Ok(control::Client::new(&rig.daemon.control()).text("/metrics")?)
    };
    let portal = rig.iscsi_portal(TARGET)?;
    let mut session = IscsiSession::login(&portal, TARGET, 5)?;
    // READ(10) of 8 blocks at LBA 0, and beyond the end of the disk.
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    let beyond = [0x28, 0, 0xff, 0xff, 0xff, 0xf0, 0, 0, 8, 0];
    for _ in 0..5 {
        ensure!(session.command(&read, None, 4096)?.status == 0);
    }
    ensure!(session.command(&beyond, None, 4096)?.status == 2);
    let listed = rig.daemon.lunette(&["session", "list", "--json"])?;
    let listed: Vec<Value> = serde_json::from_str(&listed)?;
    let ours = listed
        .iter()
        .find(|one| one["initiator"] == "iqn.2026-11.org.example:i5")
        .context("it is not listed")?;
    ensure!(ours["requests"].as_u64() >= Some(6), "{ours}");
    ensure!(ours["errors"].as_u64() >= Some(1), "{ours}");
    let labels =
        format!("export=\"{TARGET}\",initiator=\"iqn.2026-11.org.example:i5\",operation=\"read\"");
    let counted =
        |name: &str, value: u64| format!("lunette_initiator_{name}_total{{{labels}}} {value}\n");
    let sessions = |count: usize| {
        let labels = format!("export=\"{TARGET}\",initiator=\"iqn.2026-11.org.example:i5\"");
        format!("lunette_initiator_sessions{{{labels}}} {count}\n")
    };
    let page = metrics(&rig)?;
    ensure!(page.contains(&counted("requests", 5)), "{page}");
    ensure!(page.contains(&counted("bytes", 5 * 4096)), "{page}");
    // A request that is refused before it becomes an I/O counts for the operation `other`.
    ensure!(page.contains(&counted("errors", 0)), "{page}");
    let refused = labels.replace("\"read\"", "\"other\"");
    let refused = format!("lunette_initiator_errors_total{{{refused}}} ");
    let refused = page.lines().find_map(|line| line.strip_prefix(&refused));
    ensure!(refused.is_some_and(|count| count != "0"), "{page}");
    ensure!(page.contains(&sessions(1)), "{page}");
    drop(session);
    let left = vm::wait_until(std::time::Duration::from_secs(20), || {
        let page = metrics(&rig).ok()?;
        page.contains(&sessions(0)).then_some(page)
    });
    let page = left.context("it is still there")?;
    ensure!(page.contains(&counted("requests", 5)), "{page}");
    let mut again = IscsiSession::login(&portal, TARGET, 5)?;
    ensure!(again.command(&read, None, 4096)?.status == 0);
    let page = metrics(&rig)?;
    ensure!(page.contains(&counted("requests", 6)), "{page}");
    ensure!(page.contains(&sessions(1)), "{page}");
    Ok(())
}
