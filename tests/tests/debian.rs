//! The Debian packages under systemd, on clean Debian 12 and 13: installed with apt, started, reloaded, restarted and killed under load,
//! upgraded, removed. Needs: root, systemd, dpkg-dev, mmdebstrap. Takes: 100 s.
//!
//! `LUNETTE_PACKAGES=FOLDER` tests the packages in a folder, such as those of a release.
#![forbid(unsafe_code)]

use end_to_end::packages::{built, packages};
use end_to_end::systemd::{SystemdHost, debian};
use end_to_end::{Context, Result, Scratch, ensure};
use std::path::PathBuf;
use std::time::Duration;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, VerifiedLoad, status};
use vm::wait_until;

/// Time limit, far above the usual time of any step.
const SOON: Duration = Duration::from_secs(60);

const UNIT: &str = "lunette.service";

const CONFIGURATION: &str = r#"
[[disk]]
name = "ram"
backend = "ram"
size = "16M"
persist = "memfd"

[[disk]]
name = "file"
backend = "file"
path = "/var/lib/lunette/file.raw"
size = "16M"
cache = "writeback"

[[vhost_blk]]
disk = "ram"
socket = "/run/lunette/ram.sock"

[[vhost_blk]]
disk = "file"
socket = "/run/lunette/file.sock"
"#;

/// Installs packages, also over the same version.
fn install(host: &SystemdHost, packages: &[PathBuf]) -> Result<()> {
    let mut install = "env DEBIAN_FRONTEND=noninteractive apt-get install -y".to_owned();
    install += " --no-install-recommends --reinstall";
    for package in packages {
        let name = package.file_name().context("a file")?.to_string_lossy();
        let there = format!("/srv/{name}");
        std::fs::copy(package, host.path(&there))?;
        install += &format!(" {there}");
    }
    let words: Vec<&str> = install.split(' ').collect();
    host.succeeds(&words).map(drop)
}

/// Waits until the service runs in a process other than `before` and returns its process ID.
fn other_process(host: &SystemdHost, before: &str) -> Result<String> {
    let found = wait_until(SOON, || {
        let is_active = host.property(UNIT, "ActiveState").ok()? == "active";
        let process = host.property(UNIT, "MainPID").ok()?;
        (is_active && process != "0" && process != before).then_some(process)
    });
    found.with_context(|| {
        let journal = host.journal(UNIT).unwrap_or_default();
        format!("no other daemon comes: {journal}")
    })
}

fn with_ram_disk<T>(
    host: &SystemdHost,
    use_it: impl FnOnce(&mut BlkQueue) -> Result<T>,
) -> Result<T> {
    let mut front_end =
        FrontEnd::connect(&host.path("/run/lunette/ram.sock"), &Options::default())?;
    let queue = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &queue, 16, 1 << 20, Layout::Separate)?;
    use_it(&mut queue)
}

/// Checks that the RAM disk survives the end of the daemon, because the service manager holds its memory.
fn ram_disk_survives(host: &SystemdHost, end: impl FnOnce() -> Result<()>) -> Result<()> {
    with_ram_disk(host, |queue| {
        ensure!(queue.write(1 << 20, &[7; 4096])? == status::OK);
        Ok(())
    })?;
    let before = host.property(UNIT, "MainPID")?;
    end()?;
    other_process(host, &before)?;
    with_ram_disk(host, |queue| {
        let mut bytes = [0; 4096];
        ensure!(queue.read(1 << 20, &mut bytes)? == status::OK);
        ensure!(bytes == [7; 4096], "the RAM disk has lost its content");
        Ok(())
    })
}

#[test]
fn packages_serve_on_debian_12_and_13_from_installation_to_removal() -> Result<()> {
    let scratch = Scratch::new()?;
    let target = built(&scratch)?;
    let first = packages(&target, &scratch.file("one"), "1")?;
    let second = packages(&target, &scratch.file("two"), "2")?;
    for (release, number) in [("bookworm", "12."), ("trixie", "13.")] {
        serve_on(release, number, &first, &second).with_context(|| format!("on {release}"))?;
    }
    Ok(())
}

fn serve_on(release: &str, number: &str, first: &[PathBuf], second: &[PathBuf]) -> Result<()> {
    let scratch = Scratch::new()?;
    let root = debian(release, &scratch)?;
    let host = SystemdHost::boot(&root, &scratch)?;
    let version = host.succeeds(&["cat", "/etc/debian_version"])?;
    ensure!(version.starts_with(number), "{version}");
    serve(&host, first, second)
}

fn serve(host: &SystemdHost, first: &[PathBuf], second: &[PathBuf]) -> Result<()> {
    install(host, &first[..1])?;
    // Without a configuration the service is inactive, not failed.
    ensure!(host.property(UNIT, "ActiveState")? == "inactive");
    std::fs::write(host.path("/etc/lunette/lunette.toml"), CONFIGURATION)?;
    let started = host.succeeds(&["systemctl", "start", UNIT]);
    started.with_context(|| host.journal(UNIT).unwrap_or_default())?;
    is_confined(host)?;
    reloads(host)?;

    // The connected front end continues through a restart and a package upgrade.
    let load = VerifiedLoad::start(&host.path("/run/lunette/file.sock"))?;
    load.expect_progress(SOON)?;
    let mut process = host.property(UNIT, "MainPID")?;
    host.succeeds(&["systemctl", "restart", UNIT])?;
    process = other_process(host, &process)?;
    load.expect_progress(SOON)?;
    install(host, second)?;
    other_process(host, &process)?;
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);

    let kill = |signal: &str| {
        let words = ["systemctl", "kill", "--kill-whom=main", "-s", signal, UNIT];
        host.succeeds(&words).map(drop)
    };
    ram_disk_survives(host, || kill("KILL"))?;
    let patience = "/etc/systemd/system/lunette.service.d";
    std::fs::create_dir_all(host.path(patience))?;
    let patience = host.path(&format!("{patience}/watchdog.conf"));
    std::fs::write(patience, "[Service]\nWatchdogSec=2\nWatchdogSignal=KILL\n")?;
    host.succeeds(&["systemctl", "daemon-reload"])?;
    host.succeeds(&["systemctl", "restart", UNIT])?;
    // The stopped process no longer answers its watchdog.
    ram_disk_survives(host, || kill("STOP"))?;
    leaves_nothing(host)
}

/// Checks the confinement by the unit and by the daemon's own seccomp filters.
fn is_confined(host: &SystemdHost) -> Result<()> {
    let rated = host.succeeds(&["systemd-analyze", "security", "--no-pager", UNIT])?;
    let exposure = rated
        .lines()
        .find_map(|line| line.split("exposure level for lunette.service: ").nth(1))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
    let exposure = exposure.with_context(|| rated.clone())?;
    ensure!(exposure <= 1.5, "{rated}");
    let process = host.property(UNIT, "MainPID")?;
    let own = std::fs::read_to_string(host.path(&format!("/proc/{process}/status")))?;
    ensure!(own.contains("NoNewPrivs:\t1") && own.contains("CapEff:\t0000000000000000"));
    Ok(())
}

fn reloads(host: &SystemdHost) -> Result<()> {
    let file = host.path("/etc/lunette/lunette.toml");
    let more = "\n[[disk]]\nname = \"more\"\nbackend = \"ram\"\nsize = \"1M\"\n";
    std::fs::write(&file, format!("{CONFIGURATION}{more}"))?;
    host.succeeds(&["systemctl", "reload", UNIT])?;
    std::fs::write(&file, format!("{CONFIGURATION}[[disk]]\nname = 1\n"))?;
    let refused = host.run(&["systemctl", "reload", UNIT])?;
    ensure!(!refused.status.success(), "mistakes are taken for changes");
    let journal = host.journal(UNIT)?;
    ensure!(journal.contains("mistake"), "{journal}");
    std::fs::write(&file, CONFIGURATION)?;
    host.succeeds(&["systemctl", "reload", UNIT])?;
    Ok(())
}

/// Returns the files in the folder of the daemon's state.
fn state_files(host: &SystemdHost) -> Result<Vec<String>> {
    let listed = host.succeeds(&["find", "/var/lib/lunette", "-type", "f"])?;
    Ok(listed.lines().map(str::to_owned).collect())
}

fn leaves_nothing(host: &SystemdHost) -> Result<()> {
    let version = host.succeeds(&["lunette-lab", "--version"])?;
    ensure!(version.contains(env!("CARGO_PKG_VERSION")), "{version}");
    host.succeeds(&["apt-get", "purge", "-y", "lunette-lab"])?;
    ensure!(!host.path("/usr/bin/lunette-lab").exists());
    ensure!(!host.path("/usr/libexec/lunette/guest-bench").exists());
    ensure!(host.property(UNIT, "ActiveState")? == "active");
    host.succeeds(&["apt-get", "remove", "-y", "lunette"])?;
    ensure!(host.property(UNIT, "ActiveState")? != "active");
    ensure!(!host.path("/usr/bin/lunette").exists());
    let disk = host.path("/var/lib/lunette/file.raw");
    ensure!(disk.exists(), "a disk was removed with the package");
    let before = state_files(host)?;
    ensure!(before.len() > 1, "{before:?}");
    host.succeeds(&["apt-get", "purge", "-y", "lunette"])?;
    let left = state_files(host)?;
    ensure!(left == ["/var/lib/lunette/file.raw"], "purge: {left:?}");
    ensure!(!host.path("/run/lunette").exists());
    let failed = host.succeeds(&["systemctl", "list-units", "--failed", "lunette*", "--plain"])?;
    ensure!(!failed.contains("lunette.service"), "{failed}");
    Ok(())
}
