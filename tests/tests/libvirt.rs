//! libvirt reads and starts the domains that `lunette libvirt xml` prints. It runs inside a process without a service:
//! `qemu:///embed` in a folder of the test.
#![forbid(unsafe_code)]

use end_to_end::{Context, GuestBuilder, Profile, Result, Rig, Scratch, bail, ensure};
use serde_json::Value;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use vm::{lunette_program, tool, wait_until};

/// Time limit for a guest's boot. Usually a few seconds, but the machine may be busy.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// User that runs libvirt: `nobody`. As root, libvirt needs users that only the package of its service creates.
const USER: u32 = 65534;

/// User and folder of an embedded libvirt.
struct Libvirt<'a> {
    scratch: &'a Scratch,
}

impl Libvirt<'_> {
    fn new(scratch: &Scratch) -> Result<Libvirt<'_>> {
        let libvirt = Libvirt { scratch };
        for name in ["libvirt", "home"] {
            let folder = scratch.socket(name);
            std::fs::create_dir_all(&folder)?;
            if is_root() {
                chown(&folder, Some(USER), Some(USER))?;
            }
        }
        // QEMU's output goes to a file, because the daemon for this output belongs to the system-wide service.
        let settings = scratch.socket("libvirt").join("etc");
        std::fs::create_dir_all(&settings)?;
        std::fs::write(settings.join("qemu.conf"), "stdio_handler = \"file\"\n")?;
        if is_root() {
            chown(&settings, Some(USER), Some(USER))?;
        }
        open_to_all(scratch.sockets(), 0o755)?;
        open_to_all(scratch.files(), 0o755)?;
        Ok(libvirt)
    }

    fn root(&self) -> PathBuf {
        self.scratch.socket("libvirt")
    }

    /// Returns a command that runs as an ordinary user.
    fn command(&self, program: &str) -> Result<Command> {
        let program = tool(program)?;
        let mut command = match is_root() {
            true => {
                let mut command = Command::new(tool("setpriv")?);
                command
                    .args(["--reuid", &USER.to_string(), "--regid", &USER.to_string()])
                    .arg("--clear-groups")
                    .args(["--pdeathsig", "TERM", "--"])
                    .arg(program);
                command
            }
            false => Command::new(program),
        };
        let home = self.scratch.socket("home");
        command
            .env("HOME", &home)
            .env("XDG_RUNTIME_DIR", &home)
            .env("XDG_CACHE_HOME", &home)
            .env("XDG_CONFIG_HOME", &home);
        Ok(command)
    }

    /// Returns the QEMU arguments that libvirt generates for a domain.
    fn native(&self, domain: &Path) -> Result<String> {
        let output = self
            .command("virsh")?
            .args([
                "-c",
                &format!("qemu:///embed?root={}", self.root().display()),
            ])
            .args(["domxml-to-native", "qemu-argv"])
            .arg(domain)
            .output()?;
        printed(output)
    }

    fn run(&self, domain: &Path) -> Result<Running> {
        let log = std::fs::File::create(self.scratch.file("virt-qemu-run.log"))?;
        let child = self
            .command("virt-qemu-run")?
            .arg("--root")
            .arg(self.root())
            .arg(domain)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        Ok(Running(child))
    }
}

/// A running domain. It ends with libvirt's process.
struct Running(Child);

impl Running {
    /// Terminates libvirt's process, which stops QEMU first, and waits for it.
    fn stop(mut self) -> Result<()> {
        terminate(&self.0)?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already.
        terminate(&self.0).unwrap_or(());
        self.0.wait().map(drop).unwrap_or(());
    }
}

fn terminate(child: &Child) -> Result<()> {
    let pid = rustix::process::Pid::from_child(child);
    Ok(rustix::process::kill_process(
        pid,
        rustix::process::Signal::TERM,
    )?)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn open_to_all(path: &Path, mode: u32) -> Result<()> {
    let opened = std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
    opened.with_context(|| format!("cannot open {} to all", path.display()))
}

fn printed(output: Output) -> Result<String> {
    ensure!(
        output.status.success(),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

fn xml(words: &[&str]) -> Result<Output> {
    let output = Command::new(lunette_program(Profile::Dev)?)
        .args(["libvirt", "xml"])
        .args(words)
        // The user may have no access to /dev/kvm.
        .args(["--accel", "tcg"])
        .output()?;
    Ok(output)
}

fn rig() -> Result<Rig> {
    Rig::new(|daemon| {
        daemon
            .disk("d0=ram:64M,serial=from-daemon")
            .disk("d1=ram:32M")
            .vhost_blk("d0")
            .vhost_scsi("c0")
            .lun("c0/3:1=d1")
    })
}

#[test]
fn exports_of_a_running_daemon_are_in_a_domain_that_libvirt_starts() -> Result<()> {
    let rig = rig()?;
    let libvirt = Libvirt::new(&rig.scratch)?;
    let control = rig.daemon.control().display().to_string();
    for export in ["d0", "c0"] {
        open_to_all(&rig.socket(export), 0o666)?;
    }
    let (kernel, initramfs, _) = GuestBuilder::boot_files()?;
    let initrd = rig.scratch.file("initramfs.cpio");
    std::fs::copy(initramfs, &initrd)?;
    open_to_all(&initrd, 0o644)?;
    let words = [
        "--export",
        "d0",
        "--export",
        "c0",
        "--control",
        &control,
        "--memory",
        "256M",
        "--kernel",
        &kernel.display().to_string(),
        "--initrd",
        &initrd.display().to_string(),
    ];
    let domain = rig.scratch.file("domain.xml");
    let text = printed(xml(&words)?)?;
    std::fs::write(&domain, &text)?;
    let native = libvirt.native(&domain)?;
    ensure!(
        native.contains(&format!("path={}", rig.socket("d0").display()))
            && native.contains(&format!("path={}", rig.socket("c0").display()))
            && native.contains("vhost-user-blk-pci")
            && native.contains("vhost-user-scsi-pci,id=c0,chardev=c0-socket,num_queues=2")
            && !native.contains("-no-acpi"),
        "{native}\nof\n{text}"
    );
    let running = libvirt.run(&domain)?;
    // The guest's kernel reads the partition table of every disk.
    let reads = |disk: &str| -> Result<u64> {
        let statistics: Value = control::get(&rig.daemon.control(), "/v1/statistics")?;
        let disks = statistics["disks"].as_array().context("no disks")?;
        let disk = disks.iter().find(|found| found["name"] == disk);
        let requests = &disk.context("no such disk")?["operations"]["read"]["requests"];
        Ok(requests.as_u64().unwrap_or_default())
    };
    let found = wait_until(BOOT_LIMIT, || match (reads("d0"), reads("d1")) {
        (Err(error), _) | (_, Err(error)) => Some(Err(error)),
        (Ok(blk), Ok(scsi)) => (blk > 0 && scsi > 0).then_some(Ok(())),
    });
    let Some(found) = found else {
        let log = std::fs::read_to_string(rig.scratch.file("virt-qemu-run.log"))?;
        bail!("no disk was read within {BOOT_LIMIT:?}\n{log}");
    };
    found?;
    running.stop()
}

#[test]
fn a_plan_knows_the_disks_of_a_running_daemon() -> Result<()> {
    let rig = rig()?;
    let control = rig.daemon.control().display().to_string();
    let program = lunette_program(Profile::Dev)?;
    let plan = |words: &[&str]| {
        let mut command = Command::new(&program);
        command.args(["vm", "plan", "--format", "json"]).args(words);
        command.args(["--control", &control]).output()
    };
    let words = ["scsi:1x1,backing=daemon:d1", "blk:1,backing=daemon:d0"];
    let plan_of_both: Value = serde_json::from_str(&printed(plan(&words)?)?)?;
    let client = control::Client::new(&rig.daemon.control());
    let d1: Value = client.get("/v1/disks/d1")?;
    let wwn = d1["status"]["wwn"].as_str().context("no wwn")?;
    let [scsi, blk] = &plan_of_both["disks"].as_array().context("no disks")?[..] else {
        bail!("{plan_of_both:#}");
    };
    ensure!(
        scsi["size"] == 32 << 20
            && scsi["guest"]["by_id"][0] == format!("scsi-3{wwn}")
            && blk["size"] == 64 << 20
            && blk["guest"]["by_id"][0] == "virtio-from-daemon",
        "{plan_of_both:#}"
    );
    for (output, wanted) in [
        (
            plan(&["blk:1,backing=daemon:d7"])?,
            "has no disk d7; its disks: d0, d1; hint: lunette disk list",
        ),
        (
            xml(&["--export", "e9", "--control", &control])?,
            "has no export e9; its exports: d0, c0; hint: lunette export list",
        ),
        (
            xml(&["--export", "d0", "--control", "/nowhere/control.sock"])?,
            "the daemon at /nowhere/control.sock",
        ),
    ] {
        let error_text = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && error_text.contains(wanted),
            "{wanted}: {error_text}"
        );
    }
    Ok(())
}

/// Returns the devices of a command line as `DRIVER at ADDRESS`, sorted. Accepts QEMU's short form and its JSON.
fn devices(words: &[String]) -> Result<Vec<String>> {
    let pairs = words.windows(2).filter(|pair| pair[0] == "-device");
    let found = pairs.map(|pair| {
        let (driver, address) = match serde_json::from_str::<Value>(&pair[1]) {
            Ok(json) => (json["driver"].clone(), json["addr"].clone()),
            Err(_) => {
                let mut parts = pair[1].split(',');
                let driver = parts.next().unwrap_or_default();
                let address = parts.find_map(|part| part.strip_prefix("addr="));
                (driver.into(), address.map_or(Value::Null, Value::from))
            }
        };
        Ok(format!("{driver} at {address}"))
    });
    let mut found = found.collect::<Result<Vec<String>>>()?;
    found.sort();
    Ok(found)
}

/// Splits a command line like a shell.
fn words(text: &str) -> Result<Vec<String>> {
    let output = Command::new("sh")
        .args(["-c", &format!("printf '%s\\0' {text}")])
        .output()?;
    let text = printed(output)?;
    Ok(text.split('\0').map(str::to_owned).collect())
}

#[test]
fn a_domain_has_the_same_devices_on_our_command_line_as_on_libvirts() -> Result<()> {
    let scratch = Scratch::new()?;
    let libvirt = Libvirt::new(&scratch)?;
    let domain = scratch.file("domain.xml");
    let file = vm::workspace().join("crates/vm/tests/domains/compared.xml");
    std::fs::copy(file, &domain)?;
    open_to_all(&domain, 0o644)?;
    let native = libvirt.native(&domain)?;
    let output = Command::new(lunette_program(Profile::Dev)?)
        .args(["libvirt", "from-xml"])
        .arg(&domain)
        .output()?;
    let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(error_text.is_empty(), "{error_text}");
    let ours = printed(output)?;
    let (theirs, ours) = (devices(&words(native.trim())?)?, devices(&words(&ours)?)?);
    ensure!(
        ours == theirs && ours.len() > 10,
        "ours {ours:#?}, libvirt's {theirs:#?}"
    );
    Ok(())
}
