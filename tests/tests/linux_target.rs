//! Lunette's initiator against Linux's own target (LIO) in a guest: negotiated keys, several connections per session, error recovery.
//!
//! Needs: a guest. Takes: 60 s.
#![forbid(unsafe_code)]

use end_to_end::lio;
use end_to_end::proxy::{Harm, Proxy};
use end_to_end::rig::free_portal;
use end_to_end::{Context, GuestBuilder, Result, Rig, ensure};
use serde_json::Value;
use std::process::Command;
use std::time::Duration;
use vhost_frontend::VerifiedLoad;
use vm::{Guest, wait_until};

const TARGET: &str = "iqn.2026-11.org.example:lio";
const SOON: Duration = Duration::from_secs(120);

fn start(level: u8) -> Result<(Guest, std::net::SocketAddr)> {
    let portal = free_portal()?;
    let mut guest = GuestBuilder::new("target").cpus(2).target(portal).boot()?;
    lio::start_target(&mut guest, TARGET, 64, level, &[("MaxConnections", "4")])?;
    Ok((guest, portal))
}

fn iscsi(words: &[&str]) -> Result<Value> {
    let program = vm::lunette_program(end_to_end::Profile::Dev)?;
    let output = Command::new(program)
        .arg("iscsi")
        .args(words)
        .arg("--json")
        .output()?;
    let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "iscsi {words:?}: {error_text}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

#[test]
fn four_connections_agree_on_the_keys_and_keep_verified_data() -> Result<()> {
    let (guest, portal) = start(0)?;
    let unit = format!("iscsi://{portal}/{TARGET}/0");
    // Values from a published study.
    let keys = [
        "--connections",
        "4",
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
    ];
    let target = unit.trim_end_matches("/0");
    let mut words = vec!["parameters", target];
    words.extend(keys);
    // The guest's network may need a moment.
    let agreed = wait_until(SOON, || iscsi(&words).ok()).context("no login")?;
    for (key, value) in [
        ("MaxBurstLength", Value::from(262_144)),
        ("FirstBurstLength", Value::from(65_536)),
        ("ImmediateData", Value::from("Yes")),
        ("InitialR2T", Value::from("Yes")),
        ("MaxConnections", Value::from(4)),
    ] {
        ensure!(agreed[key] == value, "{key}: {agreed}");
    }
    let disk = format!("r={unit},connections=4");
    let rig = Rig::new(|daemon| daemon.disk(&disk).vhost_blk("r"))?;
    let load = VerifiedLoad::start(&rig.socket("r"))?;
    for _ in 0..3 {
        load.expect_progress(SOON)?;
    }
    ensure!(load.finish()? > 0);
    guest.kill()
}

fn disk(portal: std::net::SocketAddr, level: u8) -> String {
    format!(
        "r=iscsi://{portal}/{TARGET}/0,connections=1,header_digest=crc32c,data_digest=crc32c,error_recovery_level={level}"
    )
}

/// Levels 0 and 1 only. At level 2 the target's kernel (6.1) crashes in a third of such runs, when it frees the commands of a lost
/// connection.
#[test]
fn connections_to_it_break_and_no_write_is_lost() -> Result<()> {
    for level in 0..2 {
        let (mut guest, portal) = start(level)?;
        let proxy = Proxy::start(portal)?;
        let disk = disk(proxy.address(), level);
        let mut rig = Rig::new(|daemon| daemon.disk(&disk).vhost_blk("r"))?;
        let load = VerifiedLoad::start(&rig.socket("r"))?;
        let broken = || -> Result<()> {
            for harm in [Harm::Reset, Harm::Flip, Harm::Half, Harm::Reset] {
                load.expect_progress(SOON)?;
                proxy.harm(harm);
                // The target requests two seconds (DefaultTime2Wait) after each loss.
                std::thread::sleep(Duration::from_millis(2500));
            }
            Ok(load.expect_progress(SOON)?)
        };
        let broken = broken();
        // The load's own error has more details and takes precedence.
        let verified = load.finish().map_err(Into::into).and(broken);
        verified.with_context(|| {
            let log = rig.daemon.process().log_tail();
            let errors = guest.ok("dmesg | tail -30").unwrap_or_default();
            format!("level {level}:\n{log}\n{errors}")
        })?;
        guest.kill()?;
    }
    Ok(())
}

#[test]
fn verified_data_survives_at_level_2() -> Result<()> {
    let (guest, portal) = start(2)?;
    let target = format!("iscsi://{portal}/{TARGET}");
    let words = ["parameters", &target, "--error-recovery-level", "2"];
    let agreed = wait_until(SOON, || iscsi(&words).ok()).context("no login")?;
    ensure!(agreed["ErrorRecoveryLevel"] == 2, "{agreed}");
    let rig = Rig::new(|daemon| daemon.disk(&disk(portal, 2)).vhost_blk("r"))?;
    let load = VerifiedLoad::start(&rig.socket("r"))?;
    for _ in 0..3 {
        load.expect_progress(SOON)?;
    }
    ensure!(load.finish()? > 0);
    guest.kill()
}

/// Two ports of the target lead to one unit, and the target reports the preferred one (ALUA). The initiator uses it in either order
/// of portals.
#[test]
fn path_that_the_target_prefers_is_used_and_followed() -> Result<()> {
    const OPTIMIZED: u8 = 0;
    const NON_OPTIMIZED: u8 = 1;
    const STANDBY: u8 = 2;
    let portals = [free_portal()?, free_portal()?];
    let mut guest = GuestBuilder::new("paths")
        .cpus(2)
        .target_with_paths(&portals)
        .boot()?;
    lio::start_target(&mut guest, TARGET, 64, 0, &[])?;
    lio::add_target_path(&mut guest, TARGET)?;
    lio::set_access_state(&mut guest, 1, NON_OPTIMIZED)?;
    let target = format!("iscsi://{}/{TARGET}", portals[1]);
    wait_until(SOON, || iscsi(&["parameters", &target]).ok()).context("no login")?;
    let disk = format!("r=iscsi://{}/{TARGET}/0,paths={}", portals[0], portals[1]);
    let mut rig = Rig::new(|daemon| daemon.disk(&disk).vhost_blk("r"))?;
    let load = VerifiedLoad::start(&rig.socket("r"))?;
    let mut goes_by = |guest: &mut Guest, path: u8| -> Result<()> {
        load.expect_progress(SOON)?;
        let by = wait_until(SOON, || {
            let by = [1, 2].map(|path| lio::path_has_session(guest, TARGET, path).ok());
            (by == [Some(path == 1), Some(path == 2)]).then_some(())
        });
        by.with_context(|| format!("not by path {path}: {}", rig.daemon.process().log_tail()))
    };
    let followed = (|| -> Result<()> {
        goes_by(&mut guest, 2)?;
        lio::set_access_state(&mut guest, 1, OPTIMIZED)?;
        lio::set_access_state(&mut guest, 2, NON_OPTIMIZED)?;
        goes_by(&mut guest, 1)?;
        lio::set_access_state(&mut guest, 2, OPTIMIZED)?;
        lio::set_access_state(&mut guest, 1, STANDBY)?;
        goes_by(&mut guest, 2)
    })();
    load.finish().map_err(Into::into).and(followed)?;
    guest.kill()
}
