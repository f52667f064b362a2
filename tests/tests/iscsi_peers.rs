//! iSCSI interoperability: libiscsi's conformance suite and tools, qemu-img, and one disk behind two transports.
#![forbid(unsafe_code)]

use end_to_end::{Context, IscsiSession, Result, Rig, bail, ensure};
use std::process::{Command, Stdio};
use vhost_frontend::{FrontEnd, Layout, Options, QueueOptions, ScsiQueue, ScsiRequest};

const TARGET: &str = "iqn.2026-11.org.example:t0";

/// Runs one test's command with a time limit. The suite's test of an interrupted SANITIZE polls once per minute.
fn run(words: &[&str]) -> Result<(Option<i32>, String)> {
    let (program, arguments) = words.split_first().context("no program")?;
    let output = Command::new("timeout")
        .args(["--kill-after=2", "150", program])
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
        "{words:?}: {code:?}; hint: apt-get install libiscsi-bin qemu-utils qemu-block-extra\n{text}"
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

/// A disk for the suite's tests with these name prefixes. The first match applies.
struct SetUp {
    tests: &'static [&'static str],
    disk: &'static str,
    /// Name and secret of a CHAP user.
    user: Option<(&'static str, &'static str)>,
}

const SET_UPS: [SetUp; 6] = [
    SetUp {
        tests: &["ALL.NoMedia.", "ALL.PreventAllow.", "ALL.StartStopUnit."],
        disk: "d0=ram:64M,removable",
        user: None,
    },
    SetUp {
        tests: &["ALL.ReadOnly."],
        disk: "d0=ram:64M,ro",
        user: None,
    },
    SetUp {
        // With several logical blocks per physical block (lbppb) the test asks for LBA i + 1, but expects a descriptor that begins at
        // LBA i + lbppb. The first descriptor begins at the LBA of the request (SBC-4, 5.6).
        tests: &["ALL.GetLBAStatus.UnmapSingle"],
        disk: "d0=ram:64M,physical_block_size=512",
        user: None,
    },
    SetUp {
        // The operation must last longer than the test's pauses of three seconds and one second. One overwrite pass takes at least eight
        // seconds.
        tests: &["ALL.Sanitize.Reset"],
        disk: "d0=ram:512M",
        user: None,
    },
    SetUp {
        tests: &["ALL.iSCSICHAP.", "ALL.CHAP"],
        disk: "d0=ram:64M",
        user: Some(("ann", "secretsecret")),
    },
    SetUp {
        tests: &["ALL."],
        disk: "d0=ram:2G",
        user: None,
    },
];

/// A test that no target passes: after its reset it logs in again and treats the unit attention for the new nexus (SAM-5, 5.14) as
/// a failure.
const PASSES_NOWHERE: &str = "ALL.iSCSITMF.LUNResetSimpleAsync";

/// Lines that the suite marks as skipped although they are valid results: atomic writes of a RAM disk may begin at any block.
const NO_RESTRICTIONS: [&str; 2] = [
    "[SKIPPED] No alignment restrictions on this LUN",
    "[SKIPPED] No granularity restrictions on this LUN",
];

fn is_skipped(line: &str) -> bool {
    line.contains("[SKIPPED]") && !NO_RESTRICTIONS.contains(&line.trim())
}

/// Runs one libiscsi test. Returns its output unless it passed. `[SKIPPED]` is no pass, and the exit code carries no information.
fn is_passed(test: &str, urls: &[&str]) -> Result<Option<String>> {
    let words = ["iscsi-test-cu", "-d", "-S", "-n", "-V", "-t", test];
    let (_, text) = run(&[&words, urls].concat())?;
    let summary = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("tests "));
    let counts: Vec<&str> = summary.unwrap_or("").split_whitespace().collect();
    // total, ran, passed, failed
    let passed = matches!(counts[..], ["1", "1", "1", "0", ..]) && !text.lines().any(is_skipped);
    Ok((!passed).then_some(text))
}

fn failed_lines(text: &str) -> Vec<&str> {
    text.lines()
        .filter(|line| line.contains("[FAILED]") || line.contains("[SKIPPED]"))
        .take(3)
        .collect()
}

/// Writes a CHAP users file that only its owner may read.
fn users_file(scratch: &end_to_end::Scratch, user: (&str, &str)) -> Result<String> {
    use std::os::unix::fs::PermissionsExt;
    let users = scratch.file("users");
    std::fs::write(&users, format!("{} {}\n", user.0, user.1))?;
    std::fs::set_permissions(&users, std::fs::Permissions::from_mode(0o600))?;
    Ok(users.to_string_lossy().into_owned())
}

/// Runs tests with a disk of this set-up and returns those that fail.
fn fails_with(set_up: &SetUp, tests: &[&str]) -> Result<Vec<String>> {
    let folder = end_to_end::Scratch::new()?;
    let (admit, user) = match set_up.user {
        Some(user) => (
            ["--chap-user".to_owned(), users_file(&folder, user)?],
            format!("{}%{}@", user.0, user.1),
        ),
        None => (["--demo-mode".to_owned(), "rw".to_owned()], String::new()),
    };
    let (mut rig, portal) = rig(set_up.disk, &[&admit[0], &admit[1]])?;
    let url = format!("iscsi://{user}{portal}/{TARGET}/0");
    let mut failures = Vec::new();
    for test in tests {
        // The tests of several paths need two URLs, so the same one is given twice.
        if let Some(text) = is_passed(test, &[&url, &url])? {
            failures.push(format!(
                "{test} with {}: {:?}",
                set_up.disk,
                failed_lines(&text)
            ));
        }
        rig.daemon.process().check_running()?;
    }
    Ok(failures)
}

#[test]
fn libiscsi_suite_passes() -> Result<()> {
    let list = run_ok(&["iscsi-test-cu", "-l"])?;
    let mut left: Vec<&str> = list
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("ALL.") && line.matches('.').count() == 2)
        .filter(|test| *test != PASSES_NOWHERE)
        .collect();
    ensure!(left.len() >= 229, "the suite has only {} tests", left.len());
    let mut shares = Vec::new();
    for set_up in &SET_UPS {
        let wanted = |test: &&str| set_up.tests.iter().any(|name| test.starts_with(name));
        let (tests, others): (Vec<&str>, Vec<&str>) = left.into_iter().partition(wanted);
        left = others;
        shares.push((set_up, tests));
    }
    // Each set-up has its own daemon. Most of the time is spent in the suite's own pauses.
    let failures = std::thread::scope(|scope| {
        let runs: Vec<_> = shares
            .iter()
            .map(|(set_up, tests)| scope.spawn(move || fails_with(set_up, tests)))
            .collect();
        let joined = runs.into_iter().map(|run| match run.join() {
            Ok(failures) => failures,
            Err(_) => bail!("a set-up failed"),
        });
        joined.collect::<Result<Vec<Vec<String>>>>()
    })?;
    let failures = failures.concat();
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

#[test]
fn libiscsi_sees_a_large_disk_erased_as_a_whole() -> Result<()> {
    let (_rig, portal) = rig("d0=ram:4G", &["--demo-mode", "rw"])?;
    let url = format!("iscsi://{portal}/{TARGET}/0");
    let failed = is_passed("ALL.Sanitize.BlockErase", &[&url])?;
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
fn ipv6_portal_is_announced_with_its_group() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        let target = format!("{TARGET}=d0");
        let daemon = daemon.disk("d0=ram:64M").arguments(["--iscsi", &target]);
        daemon.arguments(["--portal", "[::1]:0,7", "--demo-mode", "rw"])
    })?;
    let portal = rig.iscsi_portal(TARGET)?;
    ensure!(portal.starts_with("[::1]:"), "{portal}");
    let listed = run_ok(&["iscsi-ls", &format!("iscsi://{portal}")])?;
    ensure!(
        listed.contains(&format!("Target:{TARGET} Portal:{portal},7")),
        "{listed}"
    );
    run_ok(&["iscsi-inq", &format!("iscsi://{portal}/{TARGET}/0")])?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    ensure!(session.command(&WRITE, Some(&[7; 4096]), 0)?.status == 0);
    Ok(())
}

/// Returns EXTENDED COPY (LID1) of the first 8 blocks of one disk to block 8 of another. NAA identifiers name both disks.
fn copy(from: u64, to: u64) -> ([u8; 16], Vec<u8>) {
    let mut list = vec![0; 16 + 2 * 32 + 28];
    // target descriptor list length, segment descriptor list length
    list[3] = 64;
    list[11] = 28;
    for (at, naa) in [(16, from), (48, to)] {
        // identification descriptor: binary, NAA, 8 bytes; a disk with blocks of 512 bytes
        list[at] = 0xe4;
        list[at + 4..at + 8].copy_from_slice(&[1, 3, 0, 8]);
        list[at + 8..at + 16].copy_from_slice(&naa.to_be_bytes());
        list[at + 30] = 2;
    }
    // block to block, from the first descriptor to the second
    list[80..92].copy_from_slice(&[0x02, 0, 0, 0x18, 0, 0, 0, 1, 0, 0, 0, 8]);
    list[107] = 8;
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x83, list.len() as u8);
    (cdb, list)
}

#[test]
fn extended_copy_reaches_only_disks_that_allow_it() -> Result<()> {
    const OWN: u64 = 0x3a5b_0000_0000_0001;
    const OPEN: u64 = 0x3a5b_0000_0000_0002;
    const CLOSED: u64 = 0x3a5b_0000_0000_0003;
    let other = "iqn.2026-11.org.example:t1";
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk(&format!("own=ram:64M,wwn={OWN:016x}"))
            .disk(&format!("open=ram:64M,wwn={OPEN:016x},copy_across_targets"))
            .disk(&format!("closed=ram:64M,wwn={CLOSED:016x}"))
            .arguments(["--iscsi", &format!("{TARGET}=own")])
            .arguments(["--iscsi", &format!("{other}=open,closed")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
    })?;
    let mut session = IscsiSession::login(&rig.iscsi_portal(TARGET)?, TARGET, 1)?;
    let mut others = IscsiSession::login(&rig.iscsi_portal(other)?, other, 1)?;
    ensure!(session.command(&WRITE, Some(&[9; 4096]), 0)?.status == 0);
    let (cdb, list) = copy(OWN, OPEN);
    let done = session.command(&cdb, Some(&list), 0)?;
    ensure!(done.status == 0, "{done:?}");
    let read = [0x28, 0, 0, 0, 0, 8, 0, 0, 8, 0];
    ensure!(others.command(&read, None, 4096)?.data == [9; 4096]);
    for (from, to) in [(OWN, CLOSED), (CLOSED, OWN)] {
        let (cdb, list) = copy(from, to);
        let done = session.command(&cdb, Some(&list), 0)?;
        // COPY ABORTED, COPY TARGET DEVICE NOT REACHABLE
        let sense = (done.sense[2] & 0x0f, done.sense[12], done.sense[13]);
        ensure!(done.status == 2 && sense == (0x0a, 0x0d, 0x02), "{done:?}");
    }
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
    ensure!(std::fs::read(&*back)? == bytes, "the data read differ");
    ensure!(
        std::fs::read(rig.scratch.file("d0.raw"))? == bytes,
        "the file differs"
    );
    Ok(())
}

#[test]
fn chap_admits_only_its_users() -> Result<()> {
    let folder = end_to_end::Scratch::new()?;
    let users = users_file(&folder, ("ann", "secretsecret"))?;
    let (mut rig, portal) = rig("d0=ram:64M", &["--chap-user", &users])?;
    run_ok(&[
        "iscsi-inq",
        &format!("iscsi://ann%secretsecret@{portal}/{TARGET}/0"),
    ])?;
    for login in [
        "",
        "ann%wrongsecret12@",
        "bob%secretsecret@",
        "0xann%secretsecret@",
    ] {
        let (code, text) = run(&["iscsi-inq", &format!("iscsi://{login}{portal}/{TARGET}/0")])?;
        ensure!(code != Some(0), "{login:?} was admitted: {text}");
    }
    let log = rig.daemon.process().log();
    ensure!(!log.contains("secretsecret"), "a secret is in the log");
    // The log names the refused initiator and the reason. Only the first of many refusals in a row is logged.
    let refused = log.lines().find(|line| line.contains("login refused"));
    let refused = refused.with_context(|| format!("no refusal in the log:\n{log}"))?;
    for word in [
        "login refused: CHAP: no user: the initiator does not offer CHAP",
        "iscsi-inq",
        TARGET,
        "127.0.0.1",
    ] {
        ensure!(refused.contains(word), "{word}: {refused}");
    }
    // The admitted initiator has disconnected again.
    for event in ["logged in", "connection ended"] {
        let line = log.lines().find(|line| line.contains(event));
        let line = line.with_context(|| format!("no \"{event}\" in the log:\n{log}"))?;
        for word in ["INFO", "iscsi-inq", TARGET, "127.0.0.1"] {
            ensure!(line.contains(word), "{word}: {line}");
        }
    }
    Ok(())
}

#[test]
fn discovery_users_follow_the_reload() -> Result<()> {
    let folder = end_to_end::Scratch::new()?;
    let finders = users_file(&folder, ("cat", "secretsecret"))?;
    let file = folder.file("lunette.toml");
    let target = format!(
        "[[disk]]\nname = \"d0\"\nbackend = \"ram\"\nsize = \"1M\"\n[[iscsi]]\nname = \"{TARGET}\"\n\
         disks = [\"d0\"]\nportals = [\"127.0.0.1:0\"]\ndemo_mode = \"rw\"\n"
    );
    let with = |line: &str| std::fs::write(&file, format!("{line}\n{target}"));
    with(&format!("discovery_auth = \"{finders}\""))?;
    let path = file.to_string_lossy();
    let mut rig = Rig::new(|daemon| daemon.arguments(["--config", &path]))?;
    let portal = rig.iscsi_portal(TARGET)?;
    let finds = |user: &str| -> Result<bool> {
        let (code, text) = run(&["iscsi-ls", &format!("iscsi://{user}{portal}")])?;
        Ok(code == Some(0) && text.contains(&format!("Target:{TARGET} Portal:{portal},1")))
    };
    ensure!(finds("cat%secretsecret@")?);
    ensure!(!finds("")? && !finds("cat%othersecret1@")? && !finds("dog%secretsecret@")?);
    run_ok(&["iscsi-inq", &format!("iscsi://{portal}/{TARGET}/0")])?;
    users_file(&folder, ("dog", "othersecret1"))?;
    let report = rig.daemon.lunette(&["reload"])?;
    ensure!(
        report.trim() == "1 change of the CHAP users of discovery",
        "{report}"
    );
    ensure!(finds("dog%othersecret1@")? && !finds("cat%secretsecret@")?);
    with("")?;
    let report = rig.daemon.lunette(&["reload"])?;
    ensure!(
        report.trim() == "1 change of the CHAP users of discovery",
        "{report}"
    );
    ensure!(finds("")?);
    Ok(())
}

#[test]
fn announced_address_replaces_wildcard_portals() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        let target = format!("{TARGET}=d0");
        let daemon = daemon.disk("d0=ram:1M").arguments(["--iscsi", &target]);
        daemon.arguments(["--portal", "[::]:0", "--demo-mode", "rw"])
    })?;
    let port = rig.iscsi_portal(TARGET)?;
    let port = port.rsplit(':').next().context("no port")?;
    let (other, behind) = ("iqn.2026-11.org.example:t1", "iqn.2026-11.org.example:t2");
    let four = format!("0.0.0.0:{port}");
    let add = ["export", "add", "iscsi"];
    let more = ["--portal", &four, "--demo-mode", "rw"];
    for words in [
        &[&format!("{other}=d0")[..]][..],
        &[&format!("{behind}=d0"), "--announce", "203.0.113.7:13260"],
    ] {
        rig.daemon.lunette(&[&add[..], words, &more].concat())?;
    }
    let shown = rig.daemon.lunette(&["export", "show", behind, "--json"])?;
    ensure!(shown.contains("203.0.113.7:13260,1"), "{shown}");
    let behind = format!("Target:{behind} Portal:203.0.113.7:13260,1");
    for (host, is_four) in [("127.0.0.1", true), ("[::1]", false)] {
        let listed = run_ok(&["iscsi-ls", &format!("iscsi://{host}:{port}")])?;
        let has = |name: &str| listed.contains(&format!("Target:{name} Portal:{host}:{port},1"));
        ensure!(has(TARGET) && has(other) == is_four, "{host}: {listed}");
        ensure!(listed.contains(&behind), "{host}: {listed}");
    }
    run_ok(&["iscsi-inq", &format!("iscsi://127.0.0.1:{port}/{other}/0")])?;
    run_ok(&["iscsi-inq", &format!("iscsi://[::1]:{port}/{TARGET}/0")])?;
    Ok(())
}

/// A removed user is refused, and the target's other sessions continue.
#[test]
fn reload_rereads_chap_users() -> Result<()> {
    let folder = end_to_end::Scratch::new()?;
    let users = users_file(&folder, ("ann", "secretsecret"))?;
    let file = folder.file("lunette.toml");
    std::fs::write(
        &file,
        format!(
            "[[disk]]\nname = \"d0\"\nbackend = \"ram\"\nsize = \"1M\"\n[[iscsi]]\nname = \"{TARGET}\"\n\
             disks = [\"d0\"]\nportals = [\"127.0.0.1:0\"]\nchap_users = \"{users}\"\n"
        ),
    )?;
    let file = file.to_string_lossy();
    let mut rig = Rig::new(|daemon| daemon.arguments(["--config", &file]))?;
    let portal = rig.iscsi_portal(TARGET)?;
    let may = |user: &str| -> Result<bool> {
        let url = format!("iscsi://{user}@{portal}/{TARGET}/0");
        Ok(run(&["iscsi-inq", &url])?.0 == Some(0))
    };
    ensure!(may("ann%secretsecret")?);
    ensure!(rig.daemon.lunette(&["reload"])?.contains("no changes"));
    users_file(&folder, ("bob", "othersecret1"))?;
    ensure!(may("ann%secretsecret")? && !may("bob%othersecret1")?);
    let report = rig.daemon.lunette(&["reload"])?;
    ensure!(
        report.trim() == "1 target with changed CHAP users",
        "{report}"
    );
    ensure!(!may("ann%secretsecret")? && may("bob%othersecret1")?);

    std::fs::write(&users, "bob short")?;
    let refused = rig.daemon.ask(&["reload"])?;
    let error_text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(
        refused.status.code() == Some(1) && error_text.contains("at least 12"),
        "{error_text}"
    );
    ensure!(may("bob%othersecret1")?);
    Ok(())
}

/// PERSISTENT RESERVE OUT with a service action and the two keys.
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
fn reservation_through_one_transport_stops_writes_through_the_other() -> Result<()> {
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
    let mut queue = ScsiQueue::start(&mut front_end, 2, &options, 1, 4096, Layout::Separate)?;
    let mut guest = |cdb: &[u8], out: &[u8]| -> Result<u8> {
        let request = ScsiRequest {
            target: 0,
            lun: 0,
            tag: 1,
            cdb,
        };
        let done = queue.run(&request, out, &mut [])?;
        ensure!(done.response == 0, "response {}", done.response);
        Ok(done.status)
    };
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    // Consumes the guest's unit attention.
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

    // The reverse direction.
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
        "the data of the reservation's holder"
    );
    Ok(())
}
