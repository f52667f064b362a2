//! iSCSI as others speak it: libiscsi's conformance suite and tools, qemu-img; and one disk behind two doors.
#![forbid(unsafe_code)]

use end_to_end::{Context, IscsiSession, Result, Rig, ensure};
use front_end::{Cuts, FrontEnd, Options, QueueOptions, ScsiQueue, ScsiRequest};
use std::process::{Command, Stdio};

const TARGET: &str = "iqn.2026-11.org.example:t0";

/// A command of one test, with an end of its own.
fn run(words: &[&str]) -> Result<(Option<i32>, String)> {
    let (program, arguments) = words.split_first().context("no program")?;
    let output = Command::new("timeout")
        .args(["--kill-after=2", "60", program])
        .args(arguments)
        .stdin(Stdio::null())
        .output()?;
    let text = [output.stdout, output.stderr].concat();
    Ok((
        output.status.code(),
        String::from_utf8_lossy(&text).into_owned(),
    ))
}

fn run_ok(words: &[&str]) -> Result<String> {
    let (code, text) = run(words)?;
    ensure!(
        code == Some(0),
        "{words:?}: {code:?}; mend if it is missing: apt-get install libiscsi-bin qemu-utils qemu-block-extra\n{text}"
    );
    Ok(text)
}

fn rig(disk: &str, more: &[&str]) -> Result<(Rig, String)> {
    let mut rig = Rig::new(|daemon| {
        let name = disk.split('=').next().unwrap_or(disk);
        let target = format!("{TARGET}={name}");
        let common = ["--iscsi", &target, "--portal", "127.0.0.1:0"];
        daemon
            .disk(disk)
            .arguments(common)
            .arguments(more.iter().copied())
    })?;
    let portal = rig.iscsi_portal(TARGET)?;
    Ok((rig, portal))
}

/// Tests that a plain disk cannot pass, and why.
const OTHER_SETUP: [(&str, &str); 7] = [
    ("ALL.NoMedia.", "needs a removable disk"),
    ("ALL.PreventAllow.", "needs a removable disk"),
    ("ALL.StartStopUnit.", "needs a removable disk"),
    (
        "ALL.ReadOnly.",
        "needs a read-only disk: it has a test here",
    ),
    (
        "ALL.GetLBAStatus.UnmapSingle",
        "needs physical blocks of 512 bytes",
    ),
    (
        "ALL.Sanitize.Reset",
        "needs a disk that is overwritten in six seconds or more",
    ),
    (
        "ALL.iSCSITMF.LUNResetSimpleAsync",
        "reconnects before the reset is told, and takes the unit attention for a failure",
    ),
];

/// One of libiscsi's tests: `[SKIPPED]` is not passed, and its exit code says nothing.
fn is_passed(test: &str, urls: &[&str]) -> Result<Option<String>> {
    let words = ["iscsi-test-cu", "-d", "-S", "-n", "-V", "-t", test];
    let (_, text) = run(&[&words, urls].concat())?;
    let summary = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("tests "));
    let counts: Vec<&str> = summary.unwrap_or("").split_whitespace().collect();
    // total, ran, passed, failed
    let passed = matches!(counts[..], ["1", "1", "1", "0", ..]) && !text.contains("[SKIPPED]");
    Ok((!passed).then_some(text))
}

#[test]
fn libiscsi_suite_passes() -> Result<()> {
    let (mut rig, portal) = rig("d0=ram:2G", &["--demo-mode", "rw"])?;
    let url = format!("iscsi://{portal}/{TARGET}/0");
    let list = run_ok(&["iscsi-test-cu", "-l"])?;
    let tests = list
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("ALL.") && line.matches('.').count() == 2);
    let (mut ran, mut failures) = (0, Vec::new());
    for test in tests {
        if OTHER_SETUP.iter().any(|(name, _)| test.starts_with(name)) {
            continue;
        }
        ran += 1;
        // Twice the same: the tests of several paths want two.
        if let Some(text) = is_passed(test, &[&url, &url])? {
            let said: Vec<&str> = text
                .lines()
                .filter(|line| line.contains("[FAILED]") || line.contains("[SKIPPED]"))
                .take(3)
                .collect();
            failures.push(format!("{test}: {said:?}"));
        }
        rig.daemon.process().check_running()?;
    }
    ensure!(ran > 200, "only {ran} tests were run");
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

#[test]
fn libiscsi_finds_a_read_only_disk_protected() -> Result<()> {
    let (_rig, portal) = rig("d0=ram:64M,ro", &["--demo-mode", "rw"])?;
    let url = format!("iscsi://{portal}/{TARGET}/0");
    let failed = is_passed("ALL.ReadOnly.ReadOnlySBC", &[&url])?;
    ensure!(failed.is_none(), "{}", failed.unwrap_or_default());
    Ok(())
}

#[test]
fn libiscsi_tools_find_target_and_unit() -> Result<()> {
    let (_rig, portal) = rig("d0=ram:64M", &["--demo-mode", "rw"])?;
    let listed = run_ok(&["iscsi-ls", "-s", &format!("iscsi://{portal}")])?;
    ensure!(
        listed.contains(&format!("Target:{TARGET} Portal:{portal},1")),
        "{listed}"
    );
    let url = format!("iscsi://{portal}/{TARGET}/0");
    let capacity = run_ok(&["iscsi-readcapacity16", &url])?;
    ensure!(capacity.contains("Total size:67108864"), "{capacity}");
    run_ok(&["iscsi-inq", &url])?;
    Ok(())
}

#[test]
fn images_go_in_and_out_with_qemu_img() -> Result<()> {
    let (rig, portal) = rig(
        "d0=file:d0.raw,size=96M,cache=none",
        &["--demo-mode", "rw", "--workers", "2"],
    )?;
    let url = format!("iscsi://{portal}/{TARGET}/0");
    let (image, back) = (rig.scratch.file("in.raw"), rig.scratch.file("out.raw"));
    let mut bytes = vec![0u8; 96 << 20];
    let mut state = 1u64;
    for word in bytes[..64 << 20].chunks_exact_mut(8) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        word.copy_from_slice(&state.to_le_bytes());
    }
    std::fs::write(&image, &bytes)?;
    let (image, back) = (image.to_string_lossy(), back.to_string_lossy());
    run_ok(&[
        "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", &image, &url,
    ])?;
    run_ok(&["qemu-img", "convert", "-f", "raw", "-O", "raw", &url, &back])?;
    ensure!(std::fs::read(&*back)? == bytes, "what came back differs");
    ensure!(
        std::fs::read(rig.scratch.file("d0.raw"))? == bytes,
        "the file differs"
    );
    Ok(())
}

#[test]
fn chap_admits_users_and_nobody_else() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let folder = end_to_end::Scratch::new()?;
    let users = folder.file("users");
    std::fs::write(&users, "ann secretsecret\n")?;
    std::fs::set_permissions(&users, std::fs::Permissions::from_mode(0o600))?;
    let users = users.to_string_lossy().into_owned();
    let (mut rig, portal) = rig("d0=ram:64M", &["--chap-user", &users])?;
    run_ok(&[
        "iscsi-inq",
        &format!("iscsi://ann%secretsecret@{portal}/{TARGET}/0"),
    ])?;
    for login in ["", "ann%wrongsecret12@", "bob%secretsecret@"] {
        let (code, text) = run(&["iscsi-inq", &format!("iscsi://{login}{portal}/{TARGET}/0")])?;
        ensure!(code != Some(0), "{login:?} was admitted: {text}");
    }
    let log = rig.daemon.process().log();
    ensure!(!log.contains("secretsecret"), "a secret is in the log");
    Ok(())
}

/// PERSISTENT RESERVE OUT: service action, and the two keys.
fn reserve(action: u8, own: u64, new: u64) -> ([u8; 10], [u8; 24]) {
    let mut data = [0; 24];
    data[..8].copy_from_slice(&own.to_be_bytes());
    data[8..16].copy_from_slice(&new.to_be_bytes());
    // type 1: write exclusive
    ([0x5f, action, 1, 0, 0, 0, 0, 0, 24, 0], data)
}

const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0];
const CONFLICT: u8 = 0x18;

#[test]
fn reservation_through_one_door_stops_writes_through_the_other() -> Result<()> {
    let (rig, portal) = {
        let mut rig = Rig::new(|daemon| {
            daemon
                .disk("d0=ram:64M")
                .vhost_scsi("c0")
                .lun("c0/0:0=d0")
                .arguments([
                    "--iscsi",
                    &format!("{TARGET}=d0"),
                    "--portal",
                    "127.0.0.1:0",
                ])
                .arguments(["--demo-mode", "rw", "--workers", "2"])
        })?;
        let portal = rig.iscsi_portal(TARGET)?;
        (rig, portal)
    };
    let mut front_end = FrontEnd::connect(&rig.socket("c0"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(&mut front_end, 2, &options, 1, 4096, Cuts::Usual)?;
    let mut guest = |cdb: &[u8], out: &[u8]| -> Result<u8> {
        let what = ScsiRequest {
            target: 0,
            lun: 0,
            tag: 1,
            cdb,
        };
        let done = queue.run(&what, out, &mut [])?;
        ensure!(done.response == 0, "response {}", done.response);
        Ok(done.status)
    };
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    // The guest's unit attention.
    guest(&[0; 6], &[])?;
    ensure!(guest(&WRITE, &[1; 4096])? == 0);
    for (action, own, new) in [(0, 0, 7), (1, 7, 0)] {
        let (cdb, data) = reserve(action, own, new);
        ensure!(session.command(&cdb, Some(&data), 0)?.status == 0);
    }
    ensure!(guest(&WRITE, &[2; 4096])? == CONFLICT, "the guest wrote");
    ensure!(session.command(&WRITE, Some(&[3; 4096]), 0)?.status == 0);
    let (cdb, data) = reserve(3, 7, 0);
    ensure!(session.command(&cdb, Some(&data), 0)?.status == 0, "CLEAR");

    // The other way round.
    for (action, own, new) in [(0, 0, 9), (1, 9, 0)] {
        let (cdb, data) = reserve(action, own, new);
        let mut status = guest(&cdb, &data)?;
        if status == 2 {
            // the unit attention of the cleared reservation
            status = guest(&cdb, &data)?;
        }
        ensure!(status == 0, "status {status}");
    }
    let refused = session.command(&WRITE, Some(&[4; 4096]), 0)?.status;
    ensure!(
        refused == CONFLICT,
        "the initiator's write: status {refused}"
    );
    let read = session.command(&[0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0], None, 4096)?;
    ensure!(
        read.data == [3; 4096],
        "what the reservation's holder wrote"
    );
    Ok(())
}
