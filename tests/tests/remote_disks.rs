//! Disks that are logical units of another daemon's iSCSI target: data, features, sizes and errors pass through, and a restart of
//! the target causes no error. Needs: a guest, tgt. Takes: 50 s.
#![forbid(unsafe_code)]

use control::{Client, Method};
use end_to_end::proxy::{Harm, Proxy};
use end_to_end::rig::{free_portal, kernel_is_content};
use end_to_end::{Context, GuestBuilder, Result, Rig, Scratch, Soak, ensure};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use vhost_frontend::{
    BlkQueue, FrontEnd, Layout, Options, QueueOptions, Range, VerifiedLoad, Verifier, status,
};
use vm::{Process, wait_until};

const TARGET: &str = "iqn.2026-11.org.example:far";
const MIB: u64 = 1 << 20;
const SOON: Duration = Duration::from_secs(60);
const USER: &str = "ann";

/// A far daemon with a target, and a near daemon with a disk on its unit, exported as virtio-blk `r`.
struct Pair {
    near: Rig,
    far: Rig,
}

impl Pair {
    /// Starts both daemons. `backing` configures the far disk, and `keys` are further keys of the near disk.
    fn start(backing: &str, keys: &str) -> Result<Pair> {
        Pair::prepared(backing, keys, |_| Ok(()))
    }

    /// Like [`Pair::start`], with a prepared file as the far disk.
    fn prepared(backing: &str, keys: &str, file: impl FnOnce(&Path) -> Result<()>) -> Result<Pair> {
        let portal = free_portal()?.to_string();
        let far = Rig::prepared(|scratch, daemon| {
            let (users, config) = (scratch.file("users"), scratch.file("far.toml"));
            std::fs::write(&users, format!("{USER} secretsecret far othersecret12\n"))?;
            std::fs::set_permissions(&users, std::fs::Permissions::from_mode(0o600))?;
            let text = format!(
                "[[iscsi]]\nname = \"{TARGET}\"\nportals = [\"{portal}\"]\nchap_users = \"{}\"\nacl = [{{}}]\n\
                 lun = [{{ lun = 5, disk = \"d\" }}]\n{backing}",
                users.display()
            );
            std::fs::write(&config, text)?;
            file(&scratch.file("far.raw"))?;
            Ok(daemon.arguments(["--config", &config.display().to_string(), "--workers", "2"]))
        })?;
        let users = far.scratch.file("users").display().to_string();
        let disk = format!("r=iscsi://{USER}@{portal}/{TARGET}/5,chap_file={users}{keys}");
        let near = far.beside(|daemon| daemon.disk(&disk).vhost_blk("r"))?;
        Ok(Pair { near, far })
    }

    fn connect(&self) -> Result<(FrontEnd, BlkQueue)> {
        let socket = self.near.socket("r");
        let mut front_end = FrontEnd::connect(&socket, &Options::default())?;
        let queue = QueueOptions::default();
        let queue = BlkQueue::start(&mut front_end, 0, &queue, 16, 1 << 20, Layout::Separate)?;
        Ok((front_end, queue))
    }

    fn status(&self) -> Result<Value> {
        let disk: Value = control::get(&self.near.daemon.control(), "/v1/disks/r")?;
        Ok(disk["status"].clone())
    }

    fn wait_for_state(&self, state: &str) -> Result<Value> {
        let reached = wait_until(SOON, || {
            let status = self.status().ok()?;
            (status["state"] == state).then_some(status)
        });
        reached.with_context(|| format!("not {state}: {:?}", self.status()))
    }
}

/// Debian's tgtd with a file of 32 MiB as LUN 1. Its LUN 0 is a controller.
struct Tgt {
    scratch: Scratch,
    portal: String,
    control: String,
    target: &'static str,
    daemon: Process,
}

impl Tgt {
    fn start() -> Result<Tgt> {
        Tgt::named(TARGET)
    }

    fn named(target: &'static str) -> Result<Tgt> {
        let (scratch, address) = (Scratch::new()?, free_portal()?);
        let disk = std::fs::File::create(scratch.file("tgt.raw"))?;
        disk.set_len(32 * MIB)?;
        // A control port of its own, because another tgtd may run on this machine.
        let control = (u32::from(address.port()) % 9000 + 1).to_string();
        let portal = address.to_string();
        let daemon = Tgt::run(&scratch, &portal, &control, target)?;
        Ok(Tgt {
            target,
            scratch,
            portal,
            control,
            daemon,
        })
    }

    fn run(scratch: &Scratch, portal: &str, control: &str, target: &str) -> Result<Process> {
        let mut command = Command::new("tgtd");
        command
            .args(["-f", "-C", control, "--iscsi"])
            .arg(format!("portal={portal}"));
        let daemon = Process::start("tgtd", &command, &scratch.file("tgtd.log"));
        let daemon = daemon.context("hint: apt-get install tgt")?;
        let disk = scratch.file("tgt.raw").display().to_string();
        let steps: [&[&str]; 3] = [
            &[
                "--op", "new", "--mode", "target", "--tid", "1", "-T", target,
            ],
            &[
                "--op",
                "new",
                "--mode",
                "logicalunit",
                "--tid",
                "1",
                "--lun",
                "1",
                "-b",
                &disk,
            ],
            &[
                "--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL",
            ],
        ];
        for words in steps {
            let done = wait_until(SOON, || {
                let mut command = Command::new("tgtadm");
                command.args(["-C", control, "--lld", "iscsi"]).args(words);
                command.output().ok()?.status.success().then_some(())
            });
            done.with_context(|| format!("tgtadm {words:?}: {}", daemon.log_tail()))?;
        }
        Ok(daemon)
    }

    fn restart(&mut self) -> Result<()> {
        self.daemon.kill()?;
        self.daemon = Tgt::run(&self.scratch, &self.portal, &self.control, self.target)?;
        Ok(())
    }
}

#[test]
fn a_unit_of_tgt_keeps_verified_io_through_kills_of_tgt() -> Result<()> {
    let mut tgt = Tgt::start()?;
    let disk = format!("r=iscsi://{}/{TARGET}/1,connections=4", tgt.portal);
    let near = Rig::new(|daemon| daemon.disk(&disk).vhost_blk("r"))?;
    let load = VerifiedLoad::start(&near.socket("r"))?;
    for _ in 0..2 {
        load.expect_progress(SOON)?;
        tgt.restart()?;
        load.expect_progress(SOON)?;
    }
    ensure!(load.finish()? > 0);
    Ok(())
}

fn file_of(size: &str) -> String {
    format!("[[disk]]\nname = \"d\"\nbackend = \"file\"\npath = \"far.raw\"\nsize = \"{size}\"\n")
}

#[test]
fn unit_with_blocks_of_4096_bytes_serves_blocks_of_512() -> Result<()> {
    let far_disk = "[[disk]]\nname = \"d\"\nbackend = \"ram\"\nsize = \"16M\"\nblock_size = 4096\n";
    let pair = Pair::start(far_disk, ",block_size=512")?;
    for words in [&["disk", "list"][..], &["disk", "show", "r"]] {
        let printed = pair.near.daemon.lunette(words)?;
        ensure!(
            printed.contains(&format!(" iscsi://{USER}@")) && printed.contains(TARGET),
            "{printed}"
        );
    }
    let (front_end, mut queue) = pair.connect()?;
    let config = front_end.config(0, 60)?;
    // virtio 1.3, 5.2.4: capacity, blk_size, physical_block_exp
    ensure!(
        config[..8] == (16u64 * 2048).to_le_bytes() && config[20..25] == [0, 2, 0, 0, 3],
        "{config:?}"
    );
    for sector in 0..16u8 {
        ensure!(queue.write(u64::from(sector) * 512, &[sector + 1; 512])? == status::OK);
    }
    let mut bytes = vec![0; 8192];
    ensure!(queue.read(0, &mut bytes)? == status::OK);
    ensure!(
        bytes
            .chunks(512)
            .zip(1u8..)
            .all(|(sector, byte)| sector == [byte; 512]),
        "a write of a sector has changed another one"
    );
    Ok(())
}

#[test]
fn data_discards_and_block_size_pass_over_four_connections() -> Result<()> {
    let far_disk = "[[disk]]\nname = \"d\"\nbackend = \"ram\"\nsize = \"64M\"\nblock_size = 4096\n";
    let pair = Pair::start(
        far_disk,
        ",connections=4,header_digest=crc32c,data_digest=crc32c",
    )?;
    let (front_end, mut queue) = pair.connect()?;
    let config = front_end.config(0, 60)?;
    let word = |at: usize| {
        u32::from_le_bytes([config[at], config[at + 1], config[at + 2], config[at + 3]])
    };
    ensure!(
        (word(0), word(4), word(20)) == (64 * 2048, 0, 4096),
        "capacity and block size: {config:?}"
    );
    ensure!(word(36) > 0, "no discards: {config:?}");

    // A second disk on the same unit would have separate reservations and locks.
    let disks: Vec<Value> = control::get(&pair.near.daemon.control(), "/v1/disks")?;
    let unit = disks[0]["unit"].as_str().context("no unit")?;
    let users = disks[0]["chap_file"].as_str().context("no file")?;
    let again = format!("again={unit},chap_file={users},require");
    let added = pair.near.daemon.ask(&["disk", "add", &again])?;
    let errors = String::from_utf8_lossy(&added.stderr).into_owned();
    let shown = |name: &str| pair.near.daemon.ask(&["disk", "show", name]);
    let state = String::from_utf8_lossy(&shown("again")?.stdout).into_owned();
    ensure!(
        errors.contains("the same identity as disk r")
            || state.contains("the same identity as disk r"),
        "{errors}\n{state}"
    );

    let mut verifier = Verifier::new(0, 2048, 7);
    for _ in 0..200 {
        verifier.round(&mut queue, 16)?;
    }
    ensure!(queue.flush()? == status::OK);
    verifier.check_all(&mut queue)?;

    let mebibyte = vec![0xa5; MIB as usize];
    ensure!(queue.write(32 * MIB, &mebibyte)? == status::OK);
    let range = |sector, sectors, flags| Range {
        sector,
        sectors,
        flags,
    };
    let first = 32 * MIB / 512;
    ensure!(queue.discard(&[range(first, 512, 0)])? == status::OK);
    ensure!(queue.write_zeroes(&[range(first + 1024, 512, 0)])? == status::OK);
    let mut read = vec![1; MIB as usize];
    ensure!(queue.read(32 * MIB, &mut read)? == status::OK);
    let quarter = MIB as usize / 4;
    for (number, piece) in read.chunks(quarter).enumerate() {
        let expected = if number % 2 == 0 { 0 } else { 0xa5 };
        ensure!(
            piece.iter().all(|byte| *byte == expected),
            "quarter {number}"
        );
    }
    let sessions: Value = control::get(&pair.far.daemon.control(), "/v1/sessions")?;
    ensure!(
        sessions[0]["connections"] == 4 && sessions[1].is_null(),
        "{sessions}"
    );
    // Two connections on each of two workers.
    let exports: Value = control::get(&pair.far.daemon.control(), "/v1/exports")?;
    let served = exports[0]["status"]["served"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let on_first = served.iter().filter(|one| one["worker"] == 0).count();
    ensure!((served.len(), on_first) == (4, 2), "{exports}");
    Ok(())
}

#[test]
fn killed_and_restarted_target_loses_no_write() -> Result<()> {
    let mut pair = Pair::start(&file_of("32M"), ",connections=2")?;
    let load = VerifiedLoad::start(&pair.near.socket("r"))?;
    for _ in 0..3 {
        load.expect_progress(SOON)?;
        pair.far.daemon.kill()?;
        pair.wait_for_state("unavailable")?;
        pair.far.daemon.start_again()?;
        pair.wait_for_state("ready")?;
        load.expect_progress(SOON)?;
    }
    ensure!(load.finish()? > 0);
    Ok(())
}

/// A near daemon connected to a far daemon through a proxy, under a load that verifies every block.
struct Broken {
    load: VerifiedLoad,
    near: Rig,
    proxy: Proxy,
    far: Rig,
}

impl Broken {
    fn start(level: u8, connections: u8) -> Result<Broken> {
        let address = free_portal()?;
        let portal = address.to_string();
        let far = Rig::new(|daemon| {
            let target = format!("{TARGET}=d,error_recovery_level={level}");
            let arguments = ["--iscsi", &target, "--portal", &portal, "--demo-mode", "rw"];
            daemon.disk("d=ram:32M").arguments(arguments)
        })?;
        let proxy = Proxy::start(address)?;
        let disk = format!(
            "r=iscsi://{}/{TARGET}/0,connections={connections},header_digest=crc32c,data_digest=crc32c,\
         error_recovery_level={level}",
            proxy.address()
        );
        let near = far.beside(|daemon| daemon.disk(&disk).vhost_blk("r"))?;
        let load = VerifiedLoad::start(&near.socket("r"))?;
        Ok(Broken {
            load,
            near,
            proxy,
            far,
        })
    }
}

/// Resets, truncates or corrupts connections every 100 ms. Returns the initiator's log and the far sessions.
fn break_connections(level: u8, connections: u8) -> Result<(String, Value)> {
    // Dropped in reverse order.
    let Broken {
        far,
        proxy,
        mut near,
        load,
    } = Broken::start(level, connections)?;
    for round in 0..60 {
        let harm = [Harm::Reset, Harm::Flip, Harm::Half][round % 3];
        proxy.harm(harm);
        std::thread::sleep(Duration::from_millis(100));
        if round % 20 == 19 && load.expect_progress(SOON).is_err() {
            break;
        }
    }
    let verified = load.finish();
    verified.with_context(|| near.daemon.process().log_tail())?;
    let sessions: Value = control::get(&far.daemon.control(), "/v1/sessions")?;
    Ok((near.daemon.process().log(), sessions))
}

#[test]
fn breaking_connections_lose_no_write() -> Result<()> {
    let (log, _) = break_connections(0, 3)?;
    // The log is rate-limited and has less than one line per loss.
    let losses = log.matches("session lost").count();
    ensure!(
        (2..30).contains(&losses),
        "{losses} lines of losses:\n{log}"
    );
    Ok(())
}

#[test]
fn level_1_loses_no_write() -> Result<()> {
    let (log, sessions) = break_connections(1, 3)?;
    ensure!(
        sessions[0]["negotiated"]["ErrorRecoveryLevel"] == "1",
        "{sessions}"
    );
    ensure!(
        log.contains("session lost"),
        "resets are not recovered:\n{log}"
    );
    Ok(())
}

/// Checks that the first session survives, and that only connections logged in again.
fn level_2_outlives(connections: u8) -> Result<()> {
    let (log, sessions) = break_connections(2, connections)?;
    ensure!(!log.contains("session lost"), "{log}");
    let losses = log
        .matches("connection lost, its commands continue")
        .count();
    ensure!(
        (2..30).contains(&losses),
        "{losses} lines of losses:\n{log}"
    );
    ensure!(
        sessions[0]["id"] == "iscsi-1" && sessions[1].is_null(),
        "{sessions}"
    );
    Ok(())
}

/// A target that goes silent without closing a connection. The initiator sends a ping after five seconds and gives up after five more.
#[test]
fn silent_connections_are_detected_and_lose_no_write() -> Result<()> {
    for level in [0, 2] {
        let Broken {
            far: _far,
            proxy,
            mut near,
            load,
        } = Broken::start(level, 2)?;
        load.expect_progress(SOON)?;
        proxy.harm(Harm::Silence);
        std::thread::sleep(Duration::from_secs(1));
        let progress = load
            .expect_progress(SOON)
            .and_then(|()| load.expect_progress(SOON));
        let verified = load.finish();
        let log = || format!("level {level}: {}", near.daemon.process().log_tail());
        verified.and(progress).with_context(log)?;
    }
    Ok(())
}

#[test]
fn level_2_keeps_a_session_through_lost_connections() -> Result<()> {
    level_2_outlives(3)
}

#[test]
fn level_2_keeps_a_session_whose_only_connection_is_lost() -> Result<()> {
    level_2_outlives(1)
}

/// Two targets of the far daemon lead to one disk, each behind its own proxy.
#[test]
fn another_path_takes_over_and_a_restart_finds_it() -> Result<()> {
    let other = "iqn.2026-11.org.example:other";
    let address = free_portal()?;
    let portal = address.to_string();
    let far = Rig::new(|daemon| {
        let first = format!("{TARGET}=d");
        let second = format!("{other}=d");
        daemon
            .disk("d=ram:32M")
            .arguments(["--iscsi", &first, "--iscsi", &second])
            .arguments(["--portal", &portal, "--demo-mode", "rw"])
    })?;
    let (first, second) = (Proxy::start(address)?, Proxy::start(address)?);
    let disk = format!(
        "r=iscsi://{}/{TARGET}/0,connections=2,paths=iscsi://{}/{other}/0",
        first.address(),
        second.address()
    );
    let mut near = far.beside(|daemon| daemon.disk(&disk).vhost_blk("r"))?;
    let load = VerifiedLoad::start(&near.socket("r"))?;
    load.expect_progress(SOON)?;
    let at = || -> Result<String> {
        let sessions: Value = control::get(&far.daemon.control(), "/v1/sessions")?;
        ensure!(sessions[1].is_null(), "{sessions}");
        Ok(sessions[0]["export"].to_string())
    };
    ensure!(at()?.contains("far"), "{}", at()?);
    // Both paths are lost and return repeatedly. The disk uses one after the other.
    let broken = (|| -> Result<()> {
        for _ in 0..4 {
            first.harm(Harm::Reset);
            second.harm(Harm::Reset);
            load.expect_progress(SOON)?;
        }
        drop(first);
        load.expect_progress(SOON)?;
        ensure!(at()?.contains("other"), "{}", at()?);
        Ok(())
    })();
    let verified = load.finish().map_err(Into::into).and(broken);
    verified.with_context(|| near.daemon.process().log_tail())?;
    near.daemon.kill()?;
    near.daemon.start_again()?;
    let load = VerifiedLoad::start(&near.socket("r"))?;
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);
    Ok(())
}

#[test]
fn growth_is_followed_and_a_lost_unit_fails_io_in_time() -> Result<()> {
    let mut pair = Pair::start(&file_of("8M"), ",replacement_timeout=2")?;
    let (front_end, mut queue) = pair.connect()?;
    let client = Client::new(&pair.far.daemon.control()).patient(SOON);
    let body = json!({"size": 16 * MIB});
    client.change(Method::PUT, "/v1/disks/d/size", Some(&body))?;
    let grown = wait_until(SOON, || {
        let config = front_end.config(0, 8).ok()?;
        (config == (16 * MIB / 512).to_le_bytes()).then_some(())
    });
    grown.with_context(|| format!("not followed: {:?}", pair.status()))?;
    ensure!(queue.write(12 * MIB, &[3; 4096])? == status::OK);

    pair.far.daemon.kill()?;
    // The request waits two seconds for another session.
    ensure!(queue.write(0, &[4; 4096])? == status::IOERR);
    let away = pair.wait_for_state("unavailable")?;
    ensure!(away.to_string().contains("cannot connect"), "{away}");
    // Later requests fail at once.
    ensure!(queue.read(0, &mut [0; 4096])? == status::IOERR);
    pair.far.daemon.start_again()?;
    pair.wait_for_state("ready")?;
    let mut read = [0; 4096];
    ensure!(queue.read(12 * MIB, &mut read)? == status::OK && read == [3; 4096]);
    Ok(())
}

#[test]
fn on_error_stop_makes_io_wait_for_the_target() -> Result<()> {
    let mut pair = Pair::start(&file_of("8M"), ",replacement_timeout=1,on_error=stop")?;
    let load = VerifiedLoad::start(&pair.near.socket("r"))?;
    load.expect_progress(SOON)?;
    pair.far.daemon.kill()?;
    let waits = wait_until(SOON, || {
        pair.status().ok()?["waiting"].as_u64().filter(|n| *n > 0)
    });
    waits.with_context(|| format!("nothing waits: {:?}", pair.status()))?;
    pair.far.daemon.start_again()?;
    pair.wait_for_state("ready")?;
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);
    Ok(())
}

#[test]
fn daemon_starts_without_its_target_with_a_hint() -> Result<()> {
    let portal = free_portal()?.to_string();
    let unit = format!("iscsi://{portal}/{TARGET}/0");
    let mut near = Rig::new(|daemon| daemon.disk(&format!("r={unit}")))?;
    let shown = wait_until(SOON, || {
        let disk: Value = control::get(&near.daemon.control(), "/v1/disks/r").ok()?;
        let text = disk.to_string();
        text.contains("cannot connect").then_some(text)
    });
    let shown = shown.with_context(|| near.daemon.process().log_tail())?;
    ensure!(
        shown.contains(&unit) && shown.contains("unavailable"),
        "{shown}"
    );
    let added = near.daemon.ask(&["disk", "add", "s=iscsi:nowhere"])?;
    let error_text = String::from_utf8_lossy(&added.stderr).into_owned();
    ensure!(
        !added.status.success() && error_text.contains("iscsi://[USER@]HOST[:PORT]/TARGET/LUN"),
        "{error_text}"
    );
    Ok(())
}

#[test]
fn guest_boots_from_a_remote_disk_through_a_target_restart() -> Result<()> {
    let file = "[[disk]]\nname = \"d\"\nbackend = \"file\"\npath = \"far.raw\"\n";
    let mut pair = Pair::prepared(file, "", end_to_end::firmware::bios_image)?;
    let guest = GuestBuilder::new("remote-boot").vhost_user_blk(&pair.near.socket("r"), 1);
    pair.far.daemon.kill()?;
    let guest = guest.boots_from_disk().power_on()?;
    std::thread::sleep(Duration::from_millis(1500));
    let console = || {
        String::from_utf8_lossy(&std::fs::read(guest.console()).unwrap_or_default()).into_owned()
    };
    ensure!(
        !console().contains(end_to_end::firmware::READ_WHOLE),
        "booted from nowhere"
    );
    pair.far.daemon.start_again()?;
    let booted = wait_until(SOON, || {
        console()
            .contains(end_to_end::firmware::READ_WHOLE)
            .then_some(())
    });
    booted.with_context(|| format!("{}\n{}", console(), pair.near.daemon.process().log_tail()))?;
    guest.kill()
}

/// Guest, near daemon, far daemon: each daemon is killed under verified I/O.
#[test]
fn chain_of_two_daemons_survives_kills_of_either() -> Result<()> {
    let mut pair = Pair::start(&file_of("64M"), ",connections=2")?;
    let mut guest = GuestBuilder::new("chain")
        .cpus(2)
        .vhost_user_blk(&pair.near.socket("r"), 2)
        .boot()?;
    guest.wait_for_disks(&["vda"])?;
    let soak = Soak::start(&mut guest, "--file /dev/vda --seed 41 --depth 8")?;
    for round in 0..4 {
        pair.near.daemon.wait_for_requests("r", 200)?;
        let daemon = match round % 2 {
            0 => &mut pair.far.daemon,
            _ => &mut pair.near.daemon,
        };
        daemon.kill()?;
        daemon.start_again()?;
    }
    pair.near.daemon.wait_for_requests("r", 200)?;
    soak.finish(&mut guest)
        .with_context(|| pair.near.daemon.process().log_tail())?;
    // The restarted near daemon has reinstated its predecessor's session, so pending commands of the old session cannot be executed
    // later.
    let sessions: Value = control::get(&pair.far.daemon.control(), "/v1/sessions")?;
    ensure!(sessions.as_array().map(Vec::len) == Some(1), "{sessions}");
    kernel_is_content(&mut guest)
}

/// The first LUNs of all tgt hosts have equal identifiers, because tgt derives them from target and LUN number.
#[test]
fn units_of_two_tgt_hosts_are_two_disks() -> Result<()> {
    let (one, other) = (Tgt::start()?, Tgt::named("iqn.2026-11.org.example:tgt2")?);
    let disk = |name: &str, tgt: &Tgt, more: &str| {
        format!("{name}=iscsi://{}/{}/1{more}", tgt.portal, tgt.target)
    };
    let more = format!(",paths=iscsi://{}/{}/1", other.portal, other.target);
    let rig = Rig::new(|daemon| {
        daemon
            .disk(&disk("d0", &one, ""))
            .disk(&disk("d1", &other, ""))
    })?;
    let disks: Value = control::get(&rig.daemon.control(), "/v1/disks")?;
    let shown = |key: &str| [0, 1].map(|at| disks[at]["status"][key].to_string());
    ensure!(shown("state") == ["\"ready\"", "\"ready\""], "{disks}");
    for key in ["identity", "serial", "wwn"] {
        let [a, b] = shown(key);
        ensure!(a != b && a != "null", "{key}: {disks}");
    }
    drop(rig);
    // A path to the other host does not lead to the same unit.
    let rig = Rig::new(|daemon| daemon.disk(&disk("d0", &one, &more)))?;
    let disks: Value = control::get(&rig.daemon.control(), "/v1/disks")?;
    let reason = disks[0].to_string();
    ensure!(reason.contains("trust_paths = true"), "{disks}");
    Ok(())
}

#[test]
fn a_disk_is_not_mirrored_onto_its_own_unit() -> Result<()> {
    let other = "iqn.2026-11.org.example:other";
    let portal = free_portal()?.to_string();
    let far = Rig::new(|daemon| {
        let (first, second) = (format!("{TARGET}=d"), format!("{other}=d"));
        daemon
            .disk("d=ram:1M")
            .arguments(["--iscsi", &first, "--iscsi", &second])
            .arguments(["--portal", &portal, "--demo-mode", "rw"])
    })?;
    let unit = |target: &str| format!("iscsi://{portal}/{target}/0");
    let near = far.beside(|daemon| daemon.disk(&format!("r={}", unit(TARGET))))?;
    for target in [TARGET, other] {
        let answer = near.daemon.ask(&["disk", "mirror", "r", &unit(target)])?;
        let error_text = String::from_utf8_lossy(&answer.stderr).into_owned();
        ensure!(
            !answer.status.success() && error_text.contains("the target is the medium of disk r"),
            "{target}: {error_text}"
        );
    }
    Ok(())
}

/// A daemon with two RAM disks `a` and `b`, and a near daemon whose disk `r` is LUN 0, at first `a`.
struct Remapped {
    far: Rig,
    near: Rig,
}

impl Remapped {
    fn start() -> Result<Remapped> {
        let portal = free_portal()?.to_string();
        let far = Rig::new(|daemon| {
            daemon
                .disk("a=ram:16M")
                .disk("b=ram:16M")
                .arguments(["--iscsi", &format!("{TARGET}=a"), "--portal", &portal])
                .arguments(["--demo-mode", "rw"])
        })?;
        let disk = format!("r=iscsi://{portal}/{TARGET}/0");
        let near = far.beside(|daemon| daemon.disk(&disk))?;
        Ok(Remapped { far, near })
    }

    /// Maps another disk to LUN 0 while the near daemon does not run.
    fn map(&mut self, disk: &str) -> Result<()> {
        self.near.daemon.stop(SOON)?;
        let far = &self.far.daemon;
        far.lunette(&["lun", "remove", TARGET, "0:0"])?;
        far.lunette(&["lun", "add", TARGET, "0:0", disk])?;
        self.near.daemon.start_again()
    }

    fn waits_for_state(&self, expected: &str) -> Result<Value> {
        let status = || -> Result<Value> {
            let disk: Value = control::get(&self.near.daemon.control(), "/v1/disks/r")?;
            Ok(disk["status"].clone())
        };
        let reached = wait_until(SOON, || {
            status().ok().filter(|status| status["state"] == expected)
        });
        reached.with_context(|| format!("not {expected}: {:?}", status()))
    }

    fn record(&self) -> std::path::PathBuf {
        self.near.scratch.socket("state").join("unit-r.saved")
    }
}

/// A target maps another unit to the LUN of a disk while the daemon does not run. Writes must not reach that unit.
#[test]
fn disk_does_not_use_another_unit_after_a_restart() -> Result<()> {
    let mut pair = Remapped::start()?;
    pair.waits_for_state("ready")?;
    let record = std::fs::read(pair.record())?;
    pair.map("b")?;
    let status = pair.waits_for_state("unavailable")?;
    let reason = status["reason"].as_str().unwrap_or_default();
    for part in [
        "leads to another logical unit than before: found t10.LUNETTE ",
        ", expected t10.LUNETTE ",
        "hint: ",
        "lunette state reset unit-r.saved",
    ] {
        ensure!(reason.contains(part), "no {part} in {reason}");
    }
    pair.near.daemon.logs(reason)?;
    ensure!(std::fs::read(pair.record())? == record);
    // The old unit is accepted again, also after a kill.
    pair.map("a")?;
    pair.waits_for_state("ready")?;
    pair.near.daemon.kill()?;
    pair.near.daemon.start_again()?;
    pair.waits_for_state("ready")?;

    pair.map("b")?;
    pair.waits_for_state("unavailable")?;
    let reset = ["state", "reset", "unit-r.saved", "--yes"];
    pair.near.daemon.lunette(&reset)?;
    pair.waits_for_state("ready")?;
    ensure!(std::fs::read(pair.record())? != record);
    pair.near.daemon.stop(SOON)?;
    pair.near.daemon.start_again()?;
    pair.waits_for_state("ready")?;

    // The record is removed with the disk.
    let unit = format!("iscsi://{}/{TARGET}/0", pair.far.iscsi_portal(TARGET)?);
    pair.near.daemon.lunette(&["disk", "remove", "r"])?;
    ensure!(!pair.record().exists());
    let far = &pair.far.daemon;
    far.lunette(&["lun", "remove", TARGET, "0:0"])?;
    far.lunette(&["lun", "add", TARGET, "0:0", "a"])?;
    pair.near
        .daemon
        .lunette(&["disk", "add", &format!("r={unit}")])?;
    pair.waits_for_state("ready")?;
    ensure!(std::fs::read(pair.record())? == record);
    Ok(())
}
