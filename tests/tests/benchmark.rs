//! The program `lunette bench`: Ctrl-C, tables from published to seen, comparisons, resuming a study, split and packed rings.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use end_to_end::{Context, Profile, Result, Rig, Scratch, bail, ensure};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;
use std::os::unix::process::CommandExt;
use vm::lunette_program;

const PATIENCE: Duration = Duration::from_secs(120);

fn bench() -> Result<Command> {
    let mut command = Command::new(lunette_program(Profile::Dev)?);
    command.arg("bench");
    Ok(command)
}

fn output_text(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    format!(
        "{}\n{text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    )
}

fn document(output: &Output) -> Result<Value> {
    serde_json::from_slice(&output.stdout).with_context(|| output_text(output))
}

fn rig() -> Result<Rig> {
    Rig::new(|daemon| {
        daemon
            .disk("d0=ram:64M")
            .vhost_blk("d0")
            .disk("d1=ram:64M")
            .vhost_scsi("c0")
            .lun("c0/0:0=d0")
            .lun("c0/3:7=d1")
    })
}

fn interrupt(child: &Child) -> Result<()> {
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::INT).context("it is gone")
}

#[test]
fn ctrl_c_prints_partial_results_with_its_own_exit_code() -> Result<()> {
    let rig = rig()?;
    let subject = format!("vhost-user-blk:{}", rig.socket("d0").display());
    for (format, repetitions) in [("json", "1"), ("normal", "50")] {
        let child = bench()?
            .args([
                &subject,
                "--rw",
                "randread",
                "--runtime",
                "1h",
                "--interrupts",
            ])
            .args(["--repetitions", repetitions, "--output-format", format])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        // The benchmark is running when the daemon has counted its requests.
        let begun = Instant::now();
        while !rig.daemon.latency(&["d0"])?.contains("read") {
            ensure!(begun.elapsed() < PATIENCE, "nothing was read");
            std::thread::sleep(Duration::from_millis(50));
        }
        std::thread::sleep(Duration::from_millis(300));
        interrupt(&child)?;
        let output = child.wait_with_output()?;
        ensure!(
            output.status.code() == Some(130),
            "{}",
            output_text(&output)
        );
        if format == "json" {
            let document = document(&output)?;
            ensure!(document["lunette"]["outcome"]["interrupted"] == true);
            let ios = document["jobs"][0]["read"]["total_ios"].as_u64();
            ensure!(ios.is_some_and(|ios| ios > 0), "{document}");
        } else {
            let text = String::from_utf8_lossy(&output.stdout);
            ensure!(text.contains("interrupted: partial results"), "{text}");
            ensure!(text.contains("IOPS"), "{text}");
        }
    }
    Ok(())
}

/// A run without an end of its own must not wait forever for the responses of a removed device.
#[test]
fn a_device_that_goes_away_ends_the_run_with_the_reason() -> Result<()> {
    for waits in [&[][..], &["--interrupts"]] {
        let mut rig = rig()?;
        let child = bench()?
            .arg(format!("vhost-user-blk:{}", rig.socket("d0").display()))
            .args(["--rw", "randread", "--runtime", "1h"])
            .args(waits)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let begun = Instant::now();
        while !rig.daemon.latency(&["d0"])?.contains("read") {
            ensure!(begun.elapsed() < PATIENCE, "nothing was read");
            std::thread::sleep(Duration::from_millis(50));
        }
        rig.daemon.kill()?;
        let output = child.wait_with_output()?;
        ensure!(output.status.code() == Some(1), "{}", output_text(&output));
        let text = output_text(&output);
        ensure!(
            text.contains("d0.sock: the device has ended the session"),
            "{text}"
        );
    }
    Ok(())
}

#[test]
fn the_table_goes_from_published_to_seen() -> Result<()> {
    let rig = rig()?;
    let control = rig.scratch.socket("control.sock");
    for (subject, read_write) in [
        (
            format!("vhost-user-blk:{}", rig.socket("d0").display()),
            "randrw",
        ),
        (
            format!("vhost-user-scsi:{}:3:7", rig.socket("c0").display()),
            "randread",
        ),
    ] {
        let named = format!("{subject},control={}", control.display());
        let trial = ["--rw", read_write, "--set", "io_size=16m", "--warm-up-ms=0"];
        let output = bench()?
            .arg(&named)
            .args(trial)
            .args(["--interrupts"])
            .output()?;
        ensure!(output.status.success(), "{}", output_text(&output));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines: Vec<&str> = text
            .lines()
            .skip_while(|line| !line.contains("stages of"))
            .collect();
        let at = |word: &str| {
            let row = |line: &&str| line.split_whitespace().next() == Some(word);
            lines
                .iter()
                .position(row)
                .with_context(|| format!("no row {word}:\n{text}"))
        };
        let order = [
            "noticed",
            "popped",
            "parsed",
            "submitted",
            "reaped",
            "answered",
            "notified",
            "seen",
        ];
        let mut last = 0;
        for word in order {
            let here = at(word)?;
            ensure!(here > last, "{word} comes too early:\n{text}");
            last = here;
        }

        let output = bench()?
            .arg(&named)
            .args(trial)
            .arg("--interrupts")
            .arg("--json")
            .output()?;
        let document = document(&output)?;
        let one = &document["lunette"]["outcome"]["subjects"][0]["repetitions"][0];
        let ends = &one["ends"][0];
        let reads = document["jobs"][0]["read"]["total_ios"].as_u64();
        ensure!(reads.is_some() && ends["count"].as_u64() == reads, "{ends}");
        // All stamps use one clock: a request is noticed after it was published, and seen after it was reaped. A driver that polls
        // the ring can see a response before the device has finished the notification.
        ensure!(
            ends["noticed_ns"].as_f64().is_some_and(|ns| ns > 0.0),
            "{ends}"
        );
        let read = &one["stages"]["operations"]["read"];
        let mean = |span: &str| Some(read[span]["sum_ns"].as_f64()? / reads? as f64);
        let since_reaped = ends["seen_ns"]
            .as_f64()
            .zip(mean("answered"))
            .zip(mean("notified"));
        ensure!(
            since_reaped
                .is_some_and(|((seen, answered), notified)| seen + answered + notified >= 0.0),
            "{ends}, {read}"
        );
        let stages = &read["total"]["count"];
        ensure!(stages.as_u64() == reads, "{stages}");
    }
    Ok(())
}

#[test]
fn two_result_files_are_compared() -> Result<()> {
    let rig = rig()?;
    let folder = Scratch::new()?;
    let subject = format!("vhost-user-blk:{}", rig.socket("d0").display());
    let file = |name: &str| folder.files().join(name);
    for name in ["a.json", "b.json"] {
        let output = bench()?
            .args([
                &subject,
                "--rw",
                "randread",
                "--runtime",
                "50ms",
                "--interrupts",
            ])
            .args(["--repetitions=4", "--warm-up-ms=0", "--json", "--output"])
            .arg(file(name))
            .output()?;
        ensure!(output.status.success(), "{}", output_text(&output));
        ensure!(output.stdout.is_empty(), "it printed beside the file");
    }
    let compare = |a: &Path, b: &Path| {
        bench()?
            .arg("compare")
            .args([a, b])
            .output()
            .context("no program")
    };
    let output = compare(&file("a.json"), &file("b.json"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{}", output_text(&output));
    for word in [
        subject.as_str(),
        "ratio (95 %)",
        "verdict",
        "a.json",
        "b.json",
    ] {
        ensure!(text.contains(word), "{word}:\n{text}");
    }
    std::fs::write(file("c.json"), "{\"jobs\": []}")?;
    for other in ["c.json", "none.json"] {
        let output = compare(&file("a.json"), &file(other))?;
        ensure!(output.status.code() == Some(1), "{}", output_text(&output));
        ensure!(
            output_text(&output).contains(other),
            "{}",
            output_text(&output)
        );
    }
    Ok(())
}

/// Returns the runs in the result file. Each line must be a different run.
fn runs(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut keys = Vec::new();
    for line in text.lines().skip(1) {
        let Ok(record) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let part = |key: &str| record[key].to_string();
        if record["configuration"].is_object() {
            let parts = ["configuration", "mixture", "depth", "turn"].map(part);
            keys.push(parts.join(" "));
        }
    }
    Ok(keys)
}

/// Returns the runs of the polling comparison, without and with polling. Each run must be different.
fn polling_runs(path: &Path) -> Result<[HashSet<String>; 2]> {
    let mut runs = [HashSet::new(), HashSet::new()];
    for line in std::fs::read_to_string(path)?.lines().skip(1) {
        let record: Value = serde_json::from_str(line)?;
        let one = &record["polling_comparison"];
        if let Some(polls) = one["polls"].as_bool() {
            let key = ["disks", "mixture", "depth", "pair"].map(|key| one[key].to_string());
            let new = runs[usize::from(polls)].insert(key.join(" "));
            ensure!(new, "{line} was made twice");
        }
    }
    Ok(runs)
}

#[test]
fn interrupted_study_continues() -> Result<()> {
    let folder = Scratch::new()?;
    let place = folder.files().join("study");
    let results = place.join("results.jsonl");
    let study = || -> Result<Command> {
        let mut command = bench()?;
        command.args([
            "matrix",
            "--disks=2",
            "--workers=0",
            "--queues=1",
            "--repetitions=1",
        ]);
        command.arg("--turn-ms=10").arg("--place").arg(&place);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        // The child has its own process group. A terminal's Ctrl-C reaches the whole group, including the daemons that the study
        // started.
        command.process_group(0);
        Ok(command)
    };
    let interrupt = |child: &Child| kill_process_group(Pid::from_child(child), Signal::INT);
    let child = study()?.spawn()?;
    let begun = Instant::now();
    while runs(&results)?.len() < 4 {
        ensure!(begun.elapsed() < PATIENCE, "it makes no progress");
        std::thread::sleep(Duration::from_millis(20));
    }
    interrupt(&child)?;
    let output = child.wait_with_output()?;
    ensure!(
        output.status.code() == Some(130),
        "{}",
        output_text(&output)
    );
    let before = runs(&results)?;
    ensure!((4..30).contains(&before.len()), "{} runs", before.len());
    // The page shows the partial results and states that the study ended early.
    let page = || std::fs::read_to_string(place.join("index.html"));
    let early = page()?;
    ensure!(early.contains(&format!("interrupted after {} of 30 runs", before.len())));
    ensure!(early.contains("Polling or not: not compared"), "{early}");
    // Simulates a crash in the middle of a line.
    let mut text = std::fs::read_to_string(&results)?;
    text.push_str("{\"configuration\":{\"transport\":\"bl");
    std::fs::write(&results, &text)?;

    // Interrupts the study again in its last part, the polling comparison.
    let child = study()?.spawn()?;
    let begun = Instant::now();
    while !std::fs::read_to_string(&results)?.contains("polling_comparison") {
        ensure!(begun.elapsed() < PATIENCE, "it makes no progress");
        std::thread::sleep(Duration::from_millis(20));
    }
    interrupt(&child)?;
    let output = child.wait_with_output()?;
    ensure!(
        output.status.code() == Some(130),
        "{}",
        output_text(&output)
    );
    let output = study()?.output()?;
    ensure!(output.status.success(), "{}", output_text(&output));
    let [without, with] = polling_runs(&results)?;
    // Four cases, six pairs of turns.
    ensure!(with.len() == 24 && with == without, "{with:?} {without:?}");
    let whole = page()?;
    ensure!(whole.contains("6 pairs of turns") && !whole.contains("interrupted after"));
    ensure!(whole.contains("us of CPU per I/O"), "{whole}");
    let after = runs(&results)?;
    let different: HashSet<&String> = after.iter().collect();
    ensure!(
        after.len() == 30,
        "{} runs, not 2 transports times 15 cases",
        after.len()
    );
    ensure!(different.len() == 30, "a run was made twice");
    ensure!(
        after[..before.len()] == before[..],
        "the previous content is lost"
    );
    ensure!(
        output_text(&output).contains("continuing after"),
        "{}",
        output_text(&output)
    );

    // A study with other parameters is refused in the same folder.
    let output = study()?.arg("--polling").output()?;
    ensure!(!output.status.success() && output_text(&output).contains("another study"));
    Ok(())
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn packed_rings_are_driven_where_there_are_some_and_refused_elsewhere() -> Result<()> {
    let rig = rig()?;
    for subject in [
        format!("vhost-user-blk:{}", rig.socket("d0").display()),
        format!("vhost-user-scsi:{}:3:7", rig.socket("c0").display()),
    ] {
        for more in [
            &["--interrupts"][..],
            &["--direct-descriptors"],
            &["--no-event-idx"],
        ] {
            let output = bench()?
                .args([
                    &subject,
                    "--ring=packed",
                    "--rw",
                    "randwrite",
                    "--iodepth=16",
                ])
                .args([
                    "--set",
                    "io_size=4m",
                    "--size=4m",
                    "--verify=crc32c",
                    "--json",
                ])
                .args(more)
                .output()?;
            ensure!(
                output.status.success(),
                "{subject} {more:?}: {}",
                output_text(&output)
            );
            let document = document(&output)?;
            let job = &document["lunette"]["outcome"]["subjects"][0]["repetitions"][0]["jobs"][0];
            ensure!(job["verified_bytes"].as_u64() == Some(4 << 20), "{job}");
        }
    }

    let folder = Scratch::new()?;
    let socket = folder.socket("qemu");
    let mut qemu = Command::new("qemu-storage-daemon")
        .args([
            "--blockdev",
            "driver=null-co,node-name=n,size=16777216",
            "--export",
        ])
        .arg(format!(
            "type=vhost-user-blk,id=e,node-name=n,writable=on,addr.type=unix,addr.path={}",
            socket.display()
        ))
        .stdin(Stdio::null())
        .spawn()
        .context("cannot run qemu-storage-daemon; hint: apt-get install qemu-system-common")?;
    let begun = Instant::now();
    while !socket.exists() && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
    }
    let run = |ring: &str| {
        bench()?
            .arg(format!("vhost-user-blk:{}", socket.display()))
            .args([
                "--ring",
                ring,
                "--rw",
                "randread",
                "--set",
                "io_size=1m",
                "--interrupts",
            ])
            .output()
            .context("no program")
    };
    let (split, packed) = (run("split"), run("packed"));
    qemu.kill()?;
    qemu.wait()?;
    let (split, packed) = (split?, packed?);
    ensure!(split.status.success(), "{}", output_text(&split));
    // The back end may have no packed rings. Then the message must name the missing feature.
    if !packed.status.success() {
        let text = output_text(&packed);
        ensure!(
            text.contains("does not offer VIRTIO_F_RING_PACKED"),
            "{text}"
        );
    }
    Ok(())
}

/// Renders the page in a browser: all charts are drawn and no resource is fetched.
#[test]
fn the_page_of_a_study_is_drawn_without_anything_from_outside() -> Result<()> {
    let folder = Scratch::new()?;
    let place = folder.files().join("study");
    let output = bench()?
        .args(["matrix", "--disks=2", "--workers=0", "--queues=1"])
        .args(["--repetitions=1", "--turn-ms=10", "--place"])
        .arg(&place)
        .output()?;
    ensure!(output.status.success(), "{}", output_text(&output));
    let net_log = folder.files().join("net.json");
    let mut log_net = std::ffi::OsString::from("--log-net-log=");
    log_net.push(&net_log);
    let mut profile = std::ffi::OsString::from("--user-data-dir=");
    profile.push(folder.files().join("profile"));
    let mut page = std::ffi::OsString::from("file://");
    page.push(place.join("index.html"));
    let output = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .args([log_net, profile, page])
        .output()
        .context("cannot run chromium; hint: apt-get install chromium")?;
    let dom = String::from_utf8_lossy(&output.stdout);
    ensure!(dom.matches("<svg").count() == 6, "{}", output_text(&output));
    ensure!(dom.matches("<table").count() == 6 && dom.contains("<h2>Advice</h2>"));
    // The browser contacts its vendor's hosts by itself. Any other host would come from the page.
    let fetched = std::fs::read_to_string(&net_log)?;
    let urls = fetched.split("\"url\":\"").skip(1);
    for url in urls.filter_map(|rest| rest.split('"').next()) {
        let own = ["google.com/", "googleapis.com/", "gvt1.com/"];
        ensure!(own.iter().any(|host| url.contains(host)), "{url}");
    }
    Ok(())
}

/// Needs a dozen huge pages. Without them the error must name the command that reserves them.
#[test]
fn huge_pages_are_used_or_asked_for() -> Result<()> {
    let rig = rig()?;
    let trial = || {
        bench()?
            .arg(format!("vhost-user-blk:{}", rig.socket("d0").display()))
            .args([
                "--huge-pages",
                "--rw",
                "randwrite",
                "--size=1m",
                "--verify=crc32c",
            ])
            .output()
            .context("no program")
    };
    let output = trial()?;
    if output.status.success() {
        return Ok(());
    }
    let text = output_text(&output);
    let Some((_, hint)) = text.split_once("hint, as root: ") else {
        bail!("no hint: {text}");
    };
    ensure!(hint.contains("/proc/sys/vm/nr_hugepages"), "{text}");
    ensure!(text.contains("huge pages of 2 MiB"), "{text}");
    Ok(())
}

/// Two disks behind one controller share its queues. A slow request must name its disk.
#[test]
fn slow_requests_of_a_controller_have_their_disk() -> Result<()> {
    let rig = rig()?;
    for (unit, offset) in [("0:0", "1m"), ("3:7", "2m")] {
        let output = bench()?
            .arg(format!(
                "vhost-user-scsi:{}:{unit}",
                rig.socket("c0").display()
            ))
            .args([
                "--rw",
                "write",
                "--interrupts",
                "--retries=0",
                "--set",
                "size=32k",
                "--set",
            ])
            .arg(format!("offset={offset}"))
            .output()?;
        ensure!(output.status.success(), "{}", output_text(&output));
    }
    let slowest = |selector: &[&str]| -> Result<Vec<Value>> {
        let arguments = [&["--slowest=100", "--json"], selector].concat();
        let document: Value = serde_json::from_str(&rig.daemon.latency(&arguments)?)?;
        Ok(document["slowest"].as_array().context("no list")?.clone())
    };
    let writes = |list: &[Value]| -> Vec<(String, u64, u64, u64)> {
        let writes = list.iter().filter(|one| one["operation"] == "write");
        let one = |one: &Value| {
            let number = |value: &Value| value.as_u64().unwrap_or(u64::MAX);
            let unit = (number(&one["unit"]["target"]), number(&one["unit"]["lun"]));
            let disk = one["disk"].as_str().unwrap_or_default().to_owned();
            (disk, unit.0, unit.1, number(&one["offset"]) >> 20)
        };
        writes.map(one).collect()
    };
    let of_all = writes(&slowest(&[])?);
    let count = |wanted: (&str, u64, u64, u64)| {
        let same = |one: &&(String, u64, u64, u64)| (one.0.as_str(), one.1, one.2, one.3) == wanted;
        of_all.iter().filter(same).count()
    };
    ensure!(
        count(("d0", 0, 0, 1)) == 8 && count(("d1", 3, 7, 2)) == 8,
        "{of_all:?}"
    );
    let of_one = writes(&slowest(&["d1"])?);
    ensure!(
        of_one.len() == 8 && of_one.iter().all(|one| one.0 == "d1"),
        "{of_one:?}"
    );
    let text = rig.daemon.latency(&["--slowest", "d1"])?;
    ensure!(
        text.contains("disk d1 ") && text.contains(" unit 3:7"),
        "{text}"
    );
    // Each disk has its own tables.
    for disk in ["d0", "d1"] {
        let text = rig.daemon.latency(&["--json", disk])?;
        let document: Value = serde_json::from_str(&text)?;
        let writes = &document["reports"][0]["counters"]["operations"][1];
        ensure!(writes["requests"].as_u64() == Some(8), "{disk}: {text}");
    }
    Ok(())
}

/// With a round trip of 40 ms, one request at a time completes at most 25 times per second. Packet loss is covered by the link's own
/// tests.
#[test]
fn a_line_with_a_delay_is_between_driver_and_target() -> Result<()> {
    let folder = Scratch::new()?;
    let place = folder.file("bench");
    let place = place.display().to_string();
    let words = [
        "mcs",
        "--link",
        "delay=20ms,rate=1g",
        "--connections",
        "1",
        "--bs",
        "4k",
        "--iodepth",
        "1",
        "--only",
        "read",
        "--repetitions",
        "1",
        "--turn-ms",
        "1000",
        "--json",
        "--place",
        &place,
    ];
    let output = bench()?.args(words).output()?;
    ensure!(output.status.success(), "{}", output_text(&output));
    let rows = document(&output)?;
    let iops = rows[0]["iops"][0].as_f64().context("no IOPS")?;
    ensure!(iops > 0.0 && iops <= 26.0, "{rows}");
    Ok(())
}

/// Scripts parse these lines. Each begins with time, kind, process, version and target, and the totals must be consistent.
#[test]
fn disktest_prints_its_lines_for_a_file() -> Result<()> {
    let folder = Scratch::new()?;
    let file = folder.file("disk");
    std::fs::write(&file, vec![7; 8 << 20])?;
    let target = file.display().to_string();
    let words = [
        "disktest", "-K4", "-IB", "-PTX", "-h1", "-T3", "-r", "-B65536", &target,
    ];
    let output = bench()?.args(words).output()?;
    ensure!(output.status.success(), "{}", output_text(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split('|').map(str::trim).collect())
        .collect();
    for line in &lines {
        ensure!(
            line.len() == 7 && line[5] == target && line[4].starts_with('v'),
            "{text}"
        );
    }
    let of = |kind: &str| -> Vec<&str> {
        let lines = lines.iter().filter(|line| line[2] == kind);
        lines.map(|line| line[6]).collect()
    };
    ensure!(
        of("START") == ["Start args: ".to_owned() + &words[1..].join(" ")],
        "{text}"
    );
    ensure!(of("END") == ["Test Done (Passed)"], "{text}");
    let heartbeats = of("STAT")
        .into_iter()
        .filter(|text| text.starts_with("Heartbeat read throughput: "));
    ensure!((1..=3).contains(&heartbeats.count()), "{text}");
    let total = of("STAT")
        .into_iter()
        .find_map(|text| text.strip_prefix("Total bytes read in "));
    let (transfers, bytes) = total
        .and_then(|text| text.split_once(" transfers: "))
        .context(text.clone())?;
    ensure!(
        transfers.parse::<u64>()? * 65536 == bytes.parse::<u64>()?,
        "{text}"
    );
    ensure!(
        of("STAT")
            .iter()
            .any(|text| text.starts_with("Total read throughput: ")),
        "{text}"
    );
    Ok(())
}
