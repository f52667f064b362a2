//! `lunette iscsi`: discovery, copies in both directions over several connections, and reservations. Needs: nothing but the daemon.
//! Takes: 10 s.
#![forbid(unsafe_code)]

use control::{Client, Method};
use end_to_end::rig::free_portal;
use end_to_end::{Context, IscsiSession, Result, Rig, Scratch, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};

const TARGET: &str = "iqn.2026-11.org.example:t0";
const OTHER: &str = "iqn.2026-11.org.example:t1";
const MIB: u64 = 1 << 20;

/// A daemon with two targets: a file of 32 MiB with 4 KiB blocks, and 32 MiB of memory. The second target requires CHAP.
struct Bed {
    _rig: Rig,
    scratch: Scratch,
    portal: String,
}

fn bed() -> Result<Bed> {
    let portal = free_portal()?.to_string();
    let scratch = Scratch::new()?;
    let users = scratch.file("users");
    std::fs::write(&users, "ann secretsecret t1 othersecret12\n")?;
    private(&users)?;
    let text = format!(
        "[[disk]]\nname = \"f\"\nbackend = \"file\"\npath = \"{}\"\nsize = \"32M\"\nblock_size = 4096\nserial = \"FILE0\"\n\
         [[disk]]\nname = \"m\"\nbackend = \"ram\"\nsize = \"32M\"\n\
         [[iscsi]]\nname = \"{TARGET}\"\nportals = [\"{portal}\"]\ndemo_mode = \"rw\"\n\
         lun = [{{ lun = 0, disk = \"f\" }}, {{ lun = 300, disk = \"m\" }}]\n\
         [[iscsi]]\nname = \"{OTHER}\"\nportals = [\"{portal}\"]\nchap_users = \"{}\"\nacl = [{{}}]\ndisks = [\"m\"]\n",
        scratch.file("disk.raw").display(),
        users.display()
    );
    let file = scratch.file("lunette.toml");
    std::fs::write(&file, text)?;
    let config = file.display().to_string();
    let rig = Rig::new(|daemon| daemon.arguments(["--config", &config]))?;
    Ok(Bed {
        _rig: rig,
        scratch,
        portal,
    })
}

fn private(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(std::fs::set_permissions(
        path,
        std::fs::Permissions::from_mode(0o600),
    )?)
}

impl Bed {
    fn unit(&self, lun: u16) -> String {
        format!("iscsi://{}/{TARGET}/{lun}", self.portal)
    }

    fn run(&self, words: &[&str]) -> Result<Output> {
        let program = vm::lunette_program(end_to_end::Profile::Dev)?;
        let mut command = Command::new(program);
        command.arg("iscsi").args(words);
        command.output().context("lunette iscsi")
    }

    fn ok(&self, words: &[&str]) -> Result<String> {
        let output = self.run(words)?;
        let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.success(),
            "{words:?}: {} {error_text}",
            output.status
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    fn json(&self, words: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&self.ok(words)?)?)
    }

    /// Runs a command that must fail and returns its standard error.
    fn refused(&self, words: &[&str]) -> Result<String> {
        let output = self.run(words)?;
        ensure!(output.status.code() == Some(1), "{words:?}: {output:?}");
        Ok(String::from_utf8(output.stderr)?)
    }
}

#[test]
fn discovery_finds_targets_and_login_has_the_requested_keys() -> Result<()> {
    let bed = bed()?;
    let found = bed.json(&["discover", &bed.portal, "--json"])?;
    ensure!(found[0]["name"] == TARGET, "{found}");
    let address = found[0]["addresses"][0].as_str().unwrap_or_default();
    ensure!(address == format!("{},1", bed.portal), "{found}");

    let target = format!("iscsi://{}/{TARGET}", bed.portal);
    let units = bed.json(&["luns", &target, "--json"])?;
    let numbers: Vec<u64> = units
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|u| u["lun"].as_u64())
        .collect();
    ensure!(numbers == [0, 300], "{units}");
    ensure!(
        units[0]["info"]["serial"] == "FILE0" && units[0]["info"]["block_size"] == 4096,
        "{units}"
    );
    ensure!(units[1]["info"]["bytes"] == 32 * MIB, "{units}");
    let inquiry = bed.ok(&["inquiry", &bed.unit(0)])?;
    ensure!(
        inquiry.contains("FILE0") && inquiry.contains("33554432 bytes"),
        "{inquiry}"
    );
    let refusal = bed.refused(&["inquiry", &bed.unit(7)])?;
    ensure!(refusal.contains("logical unit not supported"), "{refusal}");

    let keys = [
        "--max-recv-data-segment-length",
        "131072",
        "--max-burst-length",
        "262144",
        "--first-burst-length",
        "65536",
        "--immediate-data",
        "yes",
        "--initial-r2t",
        "yes",
        "--connections",
        "4",
        "--json",
    ];
    let settled = bed.json(&[&["parameters", &target][..], &keys].concat())?;
    for (key, value) in [
        ("MaxBurstLength", Value::from(262_144)),
        ("FirstBurstLength", Value::from(65_536)),
        ("ImmediateData", "Yes".into()),
        ("InitialR2T", "Yes".into()),
        ("MaxConnections", 4.into()),
        ("connections", 4.into()),
    ] {
        ensure!(settled[key] == value, "{key}: {settled}");
    }
    let pings = bed.ok(&[
        "ping",
        &target,
        "--count",
        "2",
        "--interval",
        "0",
        "--connections",
        "3",
    ])?;
    ensure!(
        pings.lines().count() == 7 && pings.contains("6 responses"),
        "{pings}"
    );
    Ok(())
}

#[test]
fn copies_over_four_connections_keep_holes_both_ways() -> Result<()> {
    let bed = bed()?;
    // 20 MiB with data at both ends and a hole between. The end is not block-aligned.
    let original = bed.scratch.file("original");
    let file = std::fs::File::create(&original)?;
    let noise: Vec<u8> = (0..3 * MIB as u32)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    file.write_all_at(&noise, 0)?;
    file.write_all_at(&noise, 17 * MIB)?;
    file.set_len(20 * MIB + 123)?;
    drop(file);
    let original = original.display().to_string();
    let unit = bed.unit(300);
    let first = bed.ok(&[
        "copy",
        &original,
        &unit,
        "--connections",
        "4",
        "--digests",
        "crc32c",
    ])?;
    ensure!(first.contains("20971643 bytes"), "{first}");
    bed.ok(&["verify", &original, &unit, "--connections", "4"])?;
    // Copies to a unit with another block size, and back to a file.
    bed.ok(&[
        "copy",
        &unit,
        &bed.unit(0),
        "--connections",
        "2",
        "--depth",
        "3",
        "--block",
        "65536",
    ])?;
    let back = bed.scratch.file("back").display().to_string();
    let second = bed.ok(&["copy", &bed.unit(0), &back])?;
    bed.ok(&["verify", &original, &back])?;
    let metadata = std::fs::metadata(&back)?;
    ensure!(
        metadata.len() == 32 * MIB && metadata.blocks() * 512 < 16 * MIB,
        "{} blocks",
        metadata.blocks()
    );
    let sum = |text: &str| {
        text.split("SHA-256 ")
            .nth(1)
            .map(str::trim)
            .map(str::to_owned)
    };
    let piped = bed.run(&["copy", &bed.unit(0), "-"])?;
    ensure!(
        piped.status.success() && piped.stdout == std::fs::read(&back)?,
        "the pipe has other bytes"
    );
    ensure!(
        sum(&second) == sum(&String::from_utf8(piped.stderr)?),
        "{second}"
    );

    // Verification finds a byte that differs. A copy from that offset on repairs the unit.
    let changed = std::fs::File::options().write(true).open(&back)?;
    changed.write_all_at(&[noise[5].wrapping_add(1)], 17 * MIB + 5)?;
    let refusal = bed.refused(&["verify", &back, &bed.unit(0)])?;
    ensure!(
        refusal.contains(&format!("differ at byte {}", 17 * MIB + 5)),
        "{refusal}"
    );
    bed.ok(&["copy", &bed.unit(0), &back, "--from", "16777216"])?;
    bed.ok(&["verify", &back, &bed.unit(0)])?;
    let refusal = bed.refused(&[
        "copy",
        &bed.unit(0),
        &bed.unit(300),
        "--from",
        "16777216",
        "--timeout",
        "0",
    ]);
    ensure!(refusal.is_err(), "a timeout of nothing is taken");
    Ok(())
}

#[test]
fn interrupted_copy_prints_its_resume_offset() -> Result<()> {
    const BLOCK: usize = 256 << 10;
    let bed = bed()?;
    let data: Vec<u8> = (0..6 * BLOCK).map(|at| (at / 7) as u8).collect();
    let original = bed.scratch.file("original");
    std::fs::write(&original, &data)?;
    let original = original.display().to_string();
    let unit = bed.unit(0);
    let mut child = Command::new(vm::lunette_program(end_to_end::Profile::Dev)?)
        .args(["iscsi", "copy", "-", &unit])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().context("its input")?;
    // A pipe holds 64 KiB. When this write returns, the copy is in progress.
    stdin.write_all(&data[..2 * BLOCK])?;
    kill_process(Pid::from_child(&child), Signal::INT)?;
    // The copy ends after the block that it is reading, so the rest may stay unread.
    stdin.write_all(&data[2 * BLOCK..5 * BLOCK]).ok();
    drop(stdin);
    let output = child.wait_with_output()?;
    let error_text = String::from_utf8(output.stderr)?;
    ensure!(
        output.status.code() == Some(130),
        "{}: {error_text}",
        output.status
    );
    let from = error_text
        .split("--from ")
        .nth(1)
        .map(str::trim)
        .unwrap_or_default()
        .to_owned();
    let bytes: usize = from.parse()?;
    ensure!(
        (BLOCK..=5 * BLOCK).contains(&bytes) && bytes.is_multiple_of(4096),
        "{error_text}"
    );
    bed.ok(&["copy", &original, &unit, "--from", &from])?;
    bed.ok(&["verify", &original, &unit])?;
    Ok(())
}

#[test]
fn reservation_conflict_is_reported_with_the_reason() -> Result<()> {
    let bed = bed()?;
    let unit = bed.unit(300);
    let ours = ["--initiator-name", "iqn.2026-11.org.example:a"];
    let persist = |action: &[&str]| -> Result<String> {
        bed.ok(&[&["persist", &unit][..], action, &ours].concat())
    };
    persist(&["register", "0xa1"])?;
    persist(&["reserve", "a1", "write-exclusive"])?;
    let shown = persist(&["show"])?;
    ensure!(
        shown.contains("registered   0xa1") && shown.contains("write-exclusive by 0xa1"),
        "{shown}"
    );
    let source = bed.scratch.file("source");
    std::fs::write(&source, vec![7; 1 << 16])?;
    let source = source.display().to_string();
    let error = bed.refused(&[
        "copy",
        &source,
        &unit,
        "--initiator-name",
        "iqn.2026-11.org.example:b",
    ])?;
    ensure!(
        error.contains("RESERVATION CONFLICT") && error.contains("persist"),
        "{error}"
    );
    persist(&["release", "a1", "write-exclusive"])?;
    bed.ok(&[
        "copy",
        &source,
        &unit,
        "--initiator-name",
        "iqn.2026-11.org.example:b",
    ])?;
    persist(&["clear", "a1"])?;
    let shown = persist(&["show", "--json"])?;
    let shown: Value = serde_json::from_str(&shown)?;
    ensure!(
        shown["keys"] == Value::Array(Vec::new()) && shown["reservation"].is_null(),
        "{shown}"
    );
    Ok(())
}

#[test]
fn mutual_chap_works_and_a_wrong_secret_is_reported() -> Result<()> {
    let bed = bed()?;
    let unit = format!("iscsi://ann@{}/{OTHER}/0", bed.portal);
    let secrets = bed.scratch.file("secrets");
    let with = |text: &str| -> Result<String> {
        std::fs::write(&secrets, text)?;
        private(&secrets)?;
        Ok(secrets.display().to_string())
    };
    let file = with("ann secretsecret t1 othersecret12\n")?;
    bed.ok(&["inquiry", &unit, "--chap-file", &file])?;
    let file = with("ann wrongwrongwrong\n")?;
    let error = bed.refused(&["inquiry", &unit, "--chap-file", &file])?;
    ensure!(
        error.contains("uthentication") && !error.contains("wrongwrong"),
        "{error}"
    );
    let file = with("ann secretsecret t1 wrongwrongwrong\n")?;
    let error = bed.refused(&["inquiry", &unit, "--chap-file", &file])?;
    ensure!(
        error.contains("target failed to authenticate itself"),
        "{error}"
    );
    let output = bed.run(&["inquiry", &unit])?;
    ensure!(output.status.code() == Some(2), "{output:?}");
    Ok(())
}

/// Values from a published study and a few more. The initiator offers more for every key.
#[test]
fn target_keys_limit_negotiated_values() -> Result<()> {
    let keys = "max_burst_length=262144,first_burst_length=65536,initial_r2t=true,max_outstanding_r2t=2,max_connections=3,\
                default_time2wait=5,default_time2retain=60,queue_depth=64";
    let portal = free_portal()?.to_string();
    let rig = Rig::new(|daemon| {
        let target = format!("{TARGET}=m,{keys}");
        daemon
            .disk("m=ram:32M")
            .arguments(["--iscsi", &target])
            .arguments(["--portal", &portal, "--demo-mode", "rw"])
    })?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    let client = Client::new(&rig.daemon.control());
    let sessions: Value = client.get("/v1/sessions")?;
    let agreed = &sessions[0]["negotiated"];
    for (key, value) in [
        ("MaxBurstLength", "262144"),
        ("FirstBurstLength", "65536"),
        ("InitialR2T", "Yes"),
        ("DefaultTime2Wait", "5"),
        ("ErrorRecoveryLevel", "0"),
        ("command window", "64"),
    ] {
        ensure!(agreed[key] == value, "{key}: {sessions}");
    }
    let connection = &sessions[0]["each_connection"][0];
    let address = connection["client"].as_str().unwrap_or_default();
    ensure!(address.starts_with("127.0.0.1:"), "{sessions}");
    for (key, value) in [
        ("HeaderDigest", "None"),
        ("DataDigest", "None"),
        ("MaxRecvDataSegmentLength of the target", "262144"),
    ] {
        ensure!(connection["negotiated"][key] == value, "{key}: {sessions}");
    }
    // READ (10) beyond the end is an error, and an unknown operation code is none.
    let read = [0x28, 0, 0xff, 0xff, 0xff, 0, 0, 0, 1, 0];
    ensure!(session.command(&read, None, 512)?.status == 2);
    ensure!(session.command(&[0xff; 16], None, 0)?.status == 2);
    let sessions: Value = client.get("/v1/sessions")?;
    ensure!(sessions[0]["errors"] == 1, "{sessions}");
    let shown = rig.daemon.lunette(&["session", "show", "iscsi-1"])?;
    ensure!(shown.contains("connection 0: HeaderDigest"), "{shown}");
    ensure!(
        shown.contains("MaxBurstLength") && shown.contains("262144"),
        "{shown}"
    );
    // READ (10) of one block.
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    ensure!(session.command(&read, None, 512)?.status == 0);
    drop(session);

    // The same keys in the configuration file and in the API.
    let text = rig.daemon.lunette(&["config", "show"])?;
    ensure!(
        text.contains("max_burst_length = 262144") && text.contains("queue_depth = 64"),
        "{text}"
    );
    let path = format!("/v1/exports/{TARGET}");
    let mut export: Value = client.get(&path)?;
    ensure!(
        export["queue_depth"] == 64 && export["header_digest"].is_null(),
        "{export}"
    );
    export["queue_depth"] = 16.into();
    export["header_digest"] = "crc32c".into();
    client.change(Method::PUT, &path, Some(&export))?;
    let changed: Value = client.get(&path)?;
    ensure!(
        changed["queue_depth"] == 16 && changed["header_digest"] == "crc32c",
        "{changed}"
    );
    let mut session = IscsiSession::login(&portal, TARGET, 2)?;
    ensure!(session.command(&read, None, 512)?.status == 0);
    export["max_burst_length"] = 100.into();
    let refused = client.change(Method::PUT, &path, Some(&export));
    let refusal = refused
        .map_err(|error| error.to_string())
        .err()
        .unwrap_or_default();
    ensure!(
        refusal.contains("max_burst_length") && refusal.contains("512"),
        "{refusal}"
    );
    Ok(())
}
