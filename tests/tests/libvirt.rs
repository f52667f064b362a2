//! libvirt reads and starts the domains that `lunette libvirt xml` prints. It runs inside a process without a service:
//! `qemu:///embed` in a folder of the test.
#![forbid(unsafe_code)]

use end_to_end::{Context, GuestBuilder, Profile, Result, Rig, Scratch, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use vm::libvirt::Domain;
use vm::topology::PlanOptions;
use vm::{lunette_program, tool, wait_until};

#[path = "libvirt/migration.rs"]
mod migration;

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

/// Domains that libvirt refuses in a session without privileges or with an old QEMU. The controller of `lsilogic.xml` is
/// unsupported.
const SKIPPED: [&str; 6] = [
    "desktop.xml",
    "hugepages-numa.xml",
    "lsilogic.xml",
    "multipath-2012.xml",
    "openstack-scsi.xml",
    "virt-manager-scsi.xml",
];

/// Devices that libvirt has and `from-xml` names as unsupported.
const UNSUPPORTED: [&str; 3] = ["ide-hd", "ide-cd", "scsi-cd"];

/// Returns the properties of an option in QEMU's short form or JSON, with numbers and switches in one form.
fn properties(option: &str) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let mut add = |key: &str, value: &str| {
        // Function 0 may be omitted.
        let value = value.strip_suffix(".0x0").unwrap_or(value);
        let number = value
            .strip_prefix("0x")
            .map(|hex| u64::from_str_radix(hex, 16));
        let value = match (value, number) {
            ("true", _) => "on".to_owned(),
            ("false", _) => "off".to_owned(),
            (_, Some(Ok(number))) => number.to_string(),
            _ => value.to_owned(),
        };
        found.insert(key.to_owned(), value);
    };
    if let Ok(json) = serde_json::from_str::<Value>(option) {
        for (key, value) in json.as_object().context("no object")? {
            let cache = value.as_object().filter(|_| key == "cache");
            for (inner, value) in cache.into_iter().flatten() {
                add(&format!("cache.{inner}"), &value.to_string());
            }
            let text = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            add(key, &text);
        }
        return Ok(found);
    }
    let option = option.replace(",,", "\0");
    let (driver, rest) = option.split_once(',').unwrap_or((&option, ""));
    add("driver", driver);
    for property in rest.split(',').filter(|property| !property.is_empty()) {
        let (key, value) = property.split_once('=').unwrap_or((property, "on"));
        add(key, &value.replace('\0', ","));
    }
    Ok(found)
}

/// Returns the content of a disk's block node: libvirt has a node for the format and one for the file.
fn node(nodes: &[BTreeMap<String, String>], name: &str) -> Result<String> {
    let find = |name: &str| {
        let mut nodes = nodes.iter();
        nodes.find(|node| node.get("node-name").is_some_and(|found| found == name))
    };
    let format = find(name).context("no block node")?;
    let file = format
        .get("file")
        .and_then(|name| find(name))
        .unwrap_or(format);
    let part = |key: &str, default: &str| {
        let inner = format!("file.{key}");
        let found = file.get(&inner).or(file.get(key));
        found.cloned().unwrap_or_else(|| default.to_owned())
    };
    let of_format = |key: &str, default: &str| {
        let found = format.get(key).cloned();
        found.unwrap_or_else(|| default.to_owned())
    };
    let kind = match format["driver"].as_str() {
        "qcow2" => "qcow2",
        _ => "raw",
    };
    Ok(format!(
        "{kind} {} {} direct={} no-flush={} aio={} read-only={} discard={} detect-zeroes={}",
        part("driver", ""),
        part("filename", ""),
        part("cache.direct", "off"),
        part("cache.no-flush", "off"),
        part("aio", "threads"),
        of_format("read-only", "off"),
        of_format("discard", "ignore"),
        of_format("detect-zeroes", "off"),
    ))
}

/// Returns the devices of a command line, and its options for CPUs, clock, boot order and power, sorted.
fn comparable(words: &[String]) -> Result<Vec<String>> {
    let values = |option: &'static str| {
        let pairs = words.windows(2);
        let pairs = pairs.filter(move |pair| pair[0] == option);
        pairs.map(|pair| pair[1].as_str())
    };
    let nodes: Vec<_> = values("-blockdev").map(properties).collect::<Result<_>>()?;
    let mut found = Vec::new();
    for option in values("-device") {
        let mut device = properties(option)?;
        if let Some(name) = device.remove("drive") {
            device.insert("node".to_owned(), node(&nodes, &name)?);
            // libvirt's defaults, which are also QEMU's.
            device.retain(|key, value| key != "write-cache" || value != "on");
            if device.get("device_id") == device.get("serial") {
                device.remove("device_id");
            }
        }
        // Names that only QEMU uses, and the port of a USB device, which QEMU numbers in the same way.
        let is_named = matches!(device["driver"].as_str(), "pcie-root-port" | "pci-bridge");
        device.retain(|key, _| {
            (key != "id" || is_named) && !matches!(key.as_str(), "shpc" | "chardev")
        });
        if device["driver"].starts_with("usb-") {
            device.remove("port");
        }
        found.push(format!("{device:?}"));
    }
    for option in ["-smp", "-rtc", "-boot", "-global", "-cpu"] {
        let values = values(option).map(|value| format!("{option} {value}"));
        found.extend(values);
    }
    let machine = values("-machine").next().unwrap_or_default();
    let has_hpet = !machine.contains("hpet=off") && !words.iter().any(|word| word == "-no-hpet");
    found.push(format!("hpet {has_hpet}"));
    found.push(format!("vmport {}", !machine.contains("vmport=off")));
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

/// Removes the elements that libvirt accepts only with privileges or on some hosts. Both programs read the same document.
fn portable(text: &str) -> String {
    let mut text = text
        .replace("type='kvm'", "type='qemu'")
        .replace("type=\"kvm\"", "type=\"qemu\"")
        .replace("\"host-passthrough\"", "\"maximum\"");
    for (start, end) in [("<interface", "</interface>"), ("<emulator", "</emulator>")] {
        while let Some((before, rest)) = text.split_once(start) {
            let after = rest.split_once(end).map_or("", |(_, after)| after);
            text = format!("{before}{after}");
        }
    }
    text
}

#[test]
fn every_domain_has_the_devices_of_libvirts_command_line() -> Result<()> {
    let scratch = Scratch::new()?;
    let libvirt = Libvirt::new(&scratch)?;
    let domain = scratch.file("domain.xml");
    let mut compared = 0;
    for entry in std::fs::read_dir(vm::workspace().join("crates/vm/tests/domains"))? {
        let file = entry?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        if !name.ends_with(".xml") || SKIPPED.contains(&&*name) {
            continue;
        }
        let text = portable(&std::fs::read_to_string(&file)?);
        std::fs::write(&domain, &text)?;
        open_to_all(&domain, 0o644)?;
        let native = libvirt.native(&domain).with_context(|| name.to_string())?;
        let read = Domain::read(&text, PlanOptions::default())?;
        let theirs = comparable(&words(native.trim())?)?;
        let ours = comparable(&words(&read.plan.qemu_text())?)?;
        let missing = theirs.iter().filter(|line| !ours.contains(line));
        let missing = missing.filter(|line| {
            let is_driver = |driver: &&str| line.contains(&format!("\"driver\": \"{driver}\""));
            !UNSUPPORTED.iter().any(is_driver)
        });
        let missing: Vec<_> = missing.collect();
        let others: Vec<_> = ours.iter().filter(|line| !theirs.contains(line)).collect();
        ensure!(
            missing.is_empty() && others.is_empty(),
            "{name}: missing {missing:#?}, not in libvirt's {others:#?}"
        );
        compared += 1;
    }
    ensure!(compared >= 26, "{compared} domains compared");
    Ok(())
}

#[test]
fn qemu_starts_the_line_of_a_domain_with_duplicate_names() -> Result<()> {
    let scratch = Scratch::new()?;
    let file = vm::workspace().join("crates/vm/tests/domains/multipath-2012.xml");
    let images = scratch.files().display().to_string();
    let text = portable(&std::fs::read_to_string(file)?).replace("/images", &images);
    for name in ["one", "two", "three", "five", "six", "seven"] {
        std::fs::File::create(scratch.file(&format!("{name}.img")))?.set_len(1 << 20)?;
    }
    let read = Domain::read(&text, PlanOptions::default())?;
    let mut qemu = Command::new(tool(vm::topology::QEMU)?)
        .args(read.plan.qemu_arguments())
        // QEMU creates all devices and quits.
        .args(["-S", "-monitor", "stdio"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    std::io::Write::write_all(&mut qemu.stdin.take().context("no stdin")?, b"quit\n")?;
    printed(qemu.wait_with_output()?)?;
    Ok(())
}
