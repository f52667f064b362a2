//! A Linux guest under QEMU: build, boot, scripts, reboot, kill.
//!
//! The first serial port is the kernel's console and is written to a log; the second one carries the agent's messages. Guest memory is a
//! shared memfd for vhost-user. All files are in a temporary folder, removed on drop.

use crate::accelerator::Accelerator;
use crate::agent::{Agent, Output, Running};
use crate::initramfs::{self, Equipment};
use crate::places::{kernel, tool, uefi};
use crate::process::{Process, tail, wait_until};
use crate::qmp::Qmp;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Timeout of a boot, which takes 3 s on an idle machine.
const BOOT_LIMIT: Duration = Duration::from_secs(240);

/// Additional memory of a guest that migrates without KVM, in KiB; see [`GuestBuilder::migrates`].
pub const MIGRATING_KIB: u32 = 64;

/// Default timeout of a script.
const SCRIPT_LIMIT: Duration = Duration::from_secs(180);

/// Options of a guest.
#[derive(Clone, Debug)]
pub struct GuestBuilder {
    name: String,
    cpus: u32,
    memory_mib: u32,
    pluggable_mib: u32,
    pub(crate) migrates: bool,
    arguments: Vec<String>,
    accelerator: Option<Accelerator>,
    boot_limit: Duration,
    devices: u32,
    equipment: Equipment,
    boots_from_disk: bool,
    uefi: bool,
    planned: Option<(Vec<String>, PathBuf)>,
}

impl GuestBuilder {
    /// Creates a guest with 1 CPU, 256 MiB and no disk.
    pub fn new(name: &str) -> GuestBuilder {
        GuestBuilder {
            name: name.to_owned(),
            cpus: 1,
            memory_mib: 256,
            pluggable_mib: 0,
            migrates: false,
            arguments: Vec::new(),
            accelerator: None,
            boot_limit: BOOT_LIMIT,
            devices: 0,
            equipment: Equipment::Usual,
            boots_from_disk: false,
            uefi: false,
            planned: None,
        }
    }

    /// Sets the number of virtual CPUs.
    #[must_use]
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Sets the memory size.
    #[must_use]
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Reserves address space for this amount of hot-plugged memory: see [`Guest::plug_memory`].
    #[must_use]
    pub fn pluggable_memory_mib(mut self, pluggable_mib: u32) -> Self {
        self.pluggable_mib = pluggable_mib;
        self
    }

    /// Allows [`Guest::migrate`], with 64 KiB more memory. QEMU before 9.0 without KVM loses writes of the guest during a migration if the
    /// memory size is a multiple of 256 KiB: `cpu_physical_memory_sync_dirty_bitmap` then leaves translations of clean pages writable.
    #[must_use]
    pub fn migrates(mut self) -> Self {
        self.migrates = true;
        self
    }

    /// Adds a virtio-blk disk at `socket`. QEMU reconnects when the back end restarts.
    #[must_use]
    pub fn vhost_user_blk(self, socket: &Path, queues: u32) -> Self {
        self.vhost_user_blk_with(socket, queues, "")
    }

    /// Adds a virtio-blk disk with more device properties, such as `packed=on`.
    #[must_use]
    pub fn vhost_user_blk_with(mut self, socket: &Path, queues: u32, properties: &str) -> Self {
        let id = self.chardev(socket, ",reconnect=1");
        self.device(
            format!("vhost-user-blk-pci,chardev={id},num-queues={queues}"),
            properties,
        )
    }

    /// Adds a virtio-scsi controller at `socket`. QEMU 7.2 cannot reconnect it.
    #[must_use]
    pub fn vhost_user_scsi(mut self, socket: &Path, queues: u32) -> Self {
        let id = self.chardev(socket, "");
        self.device(
            format!("vhost-user-scsi-pci,chardev={id},num_queues={queues}"),
            "",
        )
    }

    /// Selects another initramfs.
    #[must_use]
    pub(crate) fn equipment(mut self, equipment: Equipment) -> Self {
        self.equipment = equipment;
        self
    }

    /// Adds dm-multipath, `multipath` and `dmsetup`.
    #[must_use]
    pub fn multipath(mut self) -> Self {
        self.equipment = match self.equipment {
            Equipment::Initiator => Equipment::InitiatorMultipath,
            _ => Equipment::Multipath,
        };
        self
    }

    /// Adds Linux's iSCSI initiator, and a network with the host at 10.0.2.2.
    #[must_use]
    pub fn initiator(mut self) -> Self {
        self.equipment = Equipment::Initiator;
        self.arguments(["-netdev", "user,id=net"])
            .arguments(["-device", "virtio-net-pci,netdev=net,romfile="])
    }

    /// Adds Linux's iSCSI target; its portal is forwarded from this address of the host.
    #[must_use]
    pub fn target(self, portal: SocketAddr) -> Self {
        self.target_with_paths(&[portal])
    }

    /// As [`GuestBuilder::target`], with several portals at port 3260 and the following ports.
    #[must_use]
    pub fn target_with_paths(mut self, portals: &[SocketAddr]) -> Self {
        self.equipment = Equipment::Target;
        let forwarded = (3260..).zip(portals);
        let forwarded = forwarded.map(|(port, portal)| format!(",hostfwd=tcp:{portal}-:{port}"));
        let netdev = format!("user,id=net{}", forwarded.collect::<String>());
        self.arguments(["-netdev", &netdev])
            .arguments(["-device", "virtio-net-pci,netdev=net,romfile="])
    }

    /// Adds Lunette and a network; port 3260 is forwarded from this address of the host. See [`Guest::start_lunette`].
    #[must_use]
    pub fn lunette(self, portal: SocketAddr) -> Self {
        GuestBuilder {
            equipment: Equipment::Daemon,
            ..self.target(portal)
        }
    }

    /// Adds Lunette and a network cable to another guest. The end with `waits` listens, the other one connects. The cable is a socket
    /// between both QEMUs: it needs no root, and both QEMUs forward each packet. `last`: last byte of the hardware address.
    #[must_use]
    pub fn lunette_on_cable(self, cable: &Path, waits: bool, mtu: u16, last: u8) -> Self {
        self.on_cable(cable, waits, mtu, last)
            .equipment(Equipment::Daemon)
    }

    /// As [`GuestBuilder::lunette_on_cable`], with Linux's iSCSI target instead of Lunette.
    #[must_use]
    pub fn target_on_cable(self, cable: &Path, waits: bool, mtu: u16, last: u8) -> Self {
        self.on_cable(cable, waits, mtu, last)
            .equipment(Equipment::Target)
    }

    /// As [`GuestBuilder::lunette_on_cable`], with Linux's iSCSI initiator and dm-multipath in addition. See [`Guest::two_paths`].
    #[must_use]
    pub fn paths_on_cable(self, cable: &Path, waits: bool, mtu: u16, last: u8) -> Self {
        self.on_cable(cable, waits, mtu, last)
            .equipment(Equipment::DaemonMultipath)
    }

    /// As [`GuestBuilder::lunette_on_cable`], with tgt instead of Lunette.
    #[must_use]
    pub fn tgt_on_cable(self, cable: &Path, waits: bool, mtu: u16, last: u8) -> Self {
        self.on_cable(cable, waits, mtu, last)
            .equipment(Equipment::Tgt)
    }

    fn on_cable(self, cable: &Path, waits: bool, mtu: u16, last: u8) -> Self {
        let server = if waits { "on" } else { "off" };
        let netdev = format!(
            "stream,id=net,server={server},addr.type=unix,addr.path={}",
            cable.display()
        );
        let card = format!(
            "virtio-net-pci,netdev=net,romfile=,host_mtu={mtu},mac=52:54:00:00:00:{last:02x}"
        );
        self.arguments(["-netdev", &netdev, "-device", &card])
    }

    /// Boots with the boot loader on the first disk, like a PC.
    #[must_use]
    pub fn boots_from_disk(mut self) -> Self {
        self.boots_from_disk = true;
        self
    }

    /// Boots with UEFI firmware from a disk.
    #[must_use]
    pub fn uefi(mut self) -> Self {
        (self.uefi, self.boots_from_disk) = (true, true);
        self
    }

    /// Adds a memory module at the start, as [`Guest::plug_memory`] does in a running guest: for the destination of its migration.
    #[must_use]
    pub fn plugged_memory(self, id: &str, mib: u64) -> Self {
        let object = format!("memory-backend-memfd,id=backend-{id},size={mib}M,share=on");
        let device = format!("pc-dimm,id={id},memdev=backend-{id}");
        self.arguments(["-object", &object, "-device", &device])
    }

    /// Adds arguments for QEMU.
    #[must_use]
    pub fn arguments<'a>(mut self, arguments: impl IntoIterator<Item = &'a str>) -> Self {
        self.arguments
            .extend(arguments.into_iter().map(str::to_owned));
        self
    }

    /// Sets the accelerator instead of detecting it.
    #[must_use]
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = Some(accelerator);
        self
    }

    /// Passes only these arguments to QEMU. They must boot [`GuestBuilder::boot_files`] and connect the guest's second serial port to the
    /// socket `agent`.
    #[must_use]
    pub fn planned(mut self, arguments: Vec<String>, agent: &Path) -> Self {
        self.planned = Some((arguments, agent.to_owned()));
        self
    }

    /// Returns kernel, initramfs and kernel command line of a guest with the agent.
    pub fn boot_files() -> Result<(PathBuf, PathBuf, String)> {
        let kernel = kernel()?;
        let archive = initramfs::archive(&kernel, Equipment::Usual)?;
        Ok((kernel.image, archive, initramfs::command_line()))
    }

    /// Sets the boot timeout.
    #[must_use]
    pub fn boot_limit(mut self, limit: Duration) -> Self {
        self.boot_limit = limit;
        self
    }

    /// Starts QEMU and waits until the guest accepts scripts.
    pub fn boot(&self) -> Result<Guest> {
        let mut guest = self.power_on()?;
        guest
            .with_diagnostics(|guest| guest.agent()?.wait_for_boot(1, guest.builder.boot_limit))?;
        Ok(guest)
    }

    /// Starts QEMU without waiting for an agent: see [`Guest::wait_for_line`].
    pub fn power_on(&self) -> Result<Guest> {
        let directory = tempfile::Builder::new()
            .prefix("lunette-guest-")
            .tempdir()?;
        let (command, port) = match &self.planned {
            Some((arguments, port)) => {
                let mut command = Command::new(tool("qemu-system-x86_64")?);
                command.args(arguments);
                (command, port.clone())
            }
            None => {
                let accelerator = self.accelerator.map_or_else(Accelerator::detect, Ok)?;
                let command = self.command(accelerator, directory.path())?;
                (command, directory.path().join("agent.sock"))
            }
        };
        let listener = UnixListener::bind(&port)?;
        let process = Process::start(
            &format!("QEMU of guest {}", self.name),
            &command,
            &directory.path().join("qemu.log"),
        )?;
        let mut guest = Guest {
            builder: self.clone(),
            process,
            agent: None,
            directory,
        };
        let stream = guest.with_diagnostics(|guest| guest.accept(&listener))?;
        guest.agent = Some(Agent::new(stream)?);
        Ok(guest)
    }

    fn chardev(&mut self, socket: &Path, options: &str) -> String {
        self.devices += 1;
        let id = format!("c{}", self.devices);
        self.arguments.push("-chardev".into());
        self.arguments
            .push(format!("socket,id={id},path={}{options}", socket.display()));
        id
    }

    fn device(mut self, mut device: String, properties: &str) -> Self {
        if !properties.is_empty() {
            device = format!("{device},{properties}");
        }
        self.arguments.extend(["-device".into(), device]);
        self
    }

    fn command(&self, accelerator: Accelerator, directory: &Path) -> Result<Command> {
        let room = match self.pluggable_mib {
            0 => String::new(),
            more => format!(",slots=4,maxmem={}M", self.memory_mib + more),
        };
        let mut memory = 1024 * u64::from(self.memory_mib);
        if self.migrates {
            memory += u64::from(MIGRATING_KIB);
        }
        let mut command = Command::new(tool("qemu-system-x86_64")?);
        command
            .args([
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-cpu",
                "max",
            ])
            .args([
                "-machine",
                "q35,memory-backend=mem",
                "-accel",
                accelerator.qemu_option(),
            ])
            .args([
                "-smp",
                &self.cpus.to_string(),
                "-m",
                &format!("{memory}K{room}"),
            ])
            .args([
                "-object",
                &format!("memory-backend-memfd,id=mem,size={memory}K,share=on"),
            ])
            .args([
                "-serial",
                &format!("file:{}", directory.join("console.log").display()),
            ])
            .args([
                "-chardev",
                &format!(
                    "socket,id=agent,path={}",
                    directory.join("agent.sock").display()
                ),
            ])
            .args(["-serial", "chardev:agent"])
            .args([
                "-qmp",
                &format!(
                    "unix:{},server=on,wait=off",
                    directory.join("qmp.sock").display()
                ),
            ]);
        if !self.boots_from_disk {
            let kernel = kernel()?;
            command
                .args(["-bios", "qboot.rom", "-kernel"])
                .arg(&kernel.image)
                .arg("-initrd")
                .arg(initramfs::archive(&kernel, self.equipment)?)
                .args(["-append", &initramfs::command_line()]);
        }
        if self.uefi {
            command.arg("-bios").arg(uefi()?);
        }
        command.args(&self.arguments);
        Ok(command)
    }
}

/// A running guest.
pub struct Guest {
    builder: GuestBuilder,
    // Dropped before the directory that it writes to.
    process: Process,
    agent: Option<Agent>,
    directory: tempfile::TempDir,
}

impl Guest {
    /// Runs a shell script. Returns its exit code and output.
    pub fn run(&mut self, script: &str) -> Result<Output> {
        self.run_within(SCRIPT_LIMIT, script)
    }

    /// As [`Guest::run`], with a timeout.
    pub fn run_within(&mut self, limit: Duration, script: &str) -> Result<Output> {
        let running = self.start(script)?;
        self.wait(running, limit)
            .with_context(|| format!("script: {script}"))
    }

    /// Runs a script that must succeed. Returns its output.
    pub fn ok(&mut self, script: &str) -> Result<String> {
        self.run_within_limit(SCRIPT_LIMIT, script)
    }

    /// As [`Guest::ok`], with a timeout.
    pub fn run_within_limit(&mut self, limit: Duration, script: &str) -> Result<String> {
        let output = self.run_within(limit, script)?;
        if output.code != 0 {
            bail!(
                "guest {}: exit code {} from: {script}\nstdout: {}\nstderr: {}\n{}",
                self.builder.name,
                output.code,
                output.stdout,
                output.stderr,
                self.console_tail()
            );
        }
        Ok(output.stdout)
    }

    /// Runs `guest-agent` with these words. Returns its output regardless of its exit code.
    pub fn io(&mut self, words: &str) -> Result<serde_json::Value> {
        let output = self.run_within(SCRIPT_LIMIT, &format!("guest-agent {words}"))?;
        serde_json::from_str(&output.stdout).with_context(|| {
            format!(
                "guest-agent {words}: exit code {}, stdout {:?}, stderr {:?}",
                output.code, output.stdout, output.stderr
            )
        })
    }

    /// Runs `guest-agent` with these words; it must succeed.
    pub fn io_ok(&mut self, words: &str) -> Result<serde_json::Value> {
        let text = self.run_within_limit(SCRIPT_LIMIT, &format!("guest-agent {words}"))?;
        serde_json::from_str(&text).with_context(|| format!("guest-agent {words} printed {text:?}"))
    }

    /// Starts a script and returns immediately.
    pub fn start(&mut self, script: &str) -> Result<Running> {
        self.agent
            .as_mut()
            .context("the guest has not booted")?
            .start(script)
    }

    /// Waits for a started script.
    pub fn wait(&mut self, running: Running, limit: Duration) -> Result<Output> {
        self.with_diagnostics(|guest| guest.agent()?.wait(running, limit))
    }

    /// Waits for a started script that must succeed.
    pub fn wait_ok(&mut self, running: Running, limit: Duration) -> Result<String> {
        let output = self.wait(running, limit)?;
        if output.code != 0 {
            bail!(
                "exit code {}\nstdout: {}\nstderr: {}\n{}",
                output.code,
                output.stdout,
                output.stderr,
                self.console_tail()
            );
        }
        Ok(output.stdout)
    }

    /// Returns the result of a started script if it has ended.
    pub fn poll(&mut self, running: Running) -> Result<Option<Output>> {
        self.process.check_running()?;
        Ok(self.agent()?.poll(running))
    }

    /// Waits until the kernel has these block devices (names as in `/dev`).
    pub fn wait_for_disks(&mut self, names: &[&str]) -> Result<()> {
        let tests: Vec<_> = names
            .iter()
            .map(|name| format!("[ -b /dev/{name} ]"))
            .collect();
        let script = format!(
            "n=0; until {}; do n=$((n+1)); [ $n -lt 300 ] || {{ ls /sys/block >&2; dmesg | tail -20 >&2; exit 1; }}; sleep 0.1; done",
            tests.join(" && ")
        );
        self.ok(&script)
            .with_context(|| format!("waiting for the disks {names:?}"))?;
        Ok(())
    }

    /// Waits until the kernel has the SCSI disk at this address. Returns its name.
    ///
    /// Hosts are numbered in the order of the controllers on the command line, as are virtio-blk disks, because both are probed
    /// sequentially. Names of SCSI disks are not predictable: Linux's `sd` probes several at a time.
    pub fn scsi_disk(&mut self, host: u32, target: u32, lun: u32) -> Result<String> {
        // Linux includes the address method bits of flat space addressing (SAM-5, 4.7.7.3) in the number.
        let lun = if lun < 256 { lun } else { lun | 0x4000 };
        let place = format!("/sys/class/scsi_device/{host}:0:{target}:{lun}/device/block");
        let script = format!(
            "n=0; until name=$(ls {place} 2>/dev/null) && [ -b /dev/$name ]; do n=$((n+1)); [ $n -lt 300 ] || {{ ls /sys/class/scsi_device >&2; dmesg | tail -20 >&2; exit 1; }}; sleep 0.1; done; echo $name"
        );
        let name = self
            .ok(&script)
            .with_context(|| format!("waiting for the SCSI disk {host}:0:{target}:{lun}"))?;
        Ok(name.trim().to_owned())
    }

    /// Returns the kernel's disks: the names in `/sys/block` except RAM and loop devices.
    pub fn disks(&mut self) -> Result<Vec<String>> {
        let names = self.ok("ls /sys/block")?;
        Ok(names
            .split_whitespace()
            .filter(|name| name.starts_with("vd") || name.starts_with("sd"))
            .map(str::to_owned)
            .collect())
    }

    /// Reboots immediately, like the reset button, and waits until the guest is up again.
    pub fn reboot(&mut self) -> Result<()> {
        let boots = self.agent()?.boots();
        self.start("reboot -f")?;
        self.with_diagnostics(|guest| {
            guest
                .agent()?
                .wait_for_boot(boots + 1, guest.builder.boot_limit)
        })
    }

    /// Powers off and waits for the end of QEMU.
    pub fn power_off(mut self) -> Result<()> {
        self.start("sync; poweroff -f")?;
        self.with_diagnostics(|guest| guest.process.wait(SCRIPT_LIMIT))?;
        Ok(())
    }

    /// Kills QEMU with SIGKILL.
    pub fn kill(mut self) -> Result<()> {
        self.process.kill()
    }

    /// Plugs in a memory module, shared like the other memory. [`Guest::unplug_memory`] removes it.
    pub fn plug_memory(&mut self, id: &str, mib: u64) -> Result<()> {
        let mut qmp = self.qmp()?;
        let backend = format!("backend-{id}");
        qmp.command(
            "object-add",
            json!({"qom-type": "memory-backend-memfd", "id": backend, "size": mib << 20, "share": true}),
        )?;
        qmp.command(
            "device_add",
            json!({"driver": "pc-dimm", "id": id, "memdev": backend}),
        )?;
        Ok(())
    }

    /// Requests the removal of a memory module and waits for it.
    pub fn unplug_memory(&mut self, id: &str) -> Result<()> {
        let mut qmp = self.qmp()?;
        qmp.command("device_del", json!({"id": id}))?;
        qmp.wait_for_event("DEVICE_DELETED")?;
        Ok(())
    }

    /// Connects to QEMU's machine protocol.
    pub fn qmp(&mut self) -> Result<Qmp> {
        Qmp::connect(&self.directory.path().join("qmp.sock"))
    }

    /// Returns QEMU's process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Returns the path of the console log.
    pub fn console(&self) -> PathBuf {
        self.directory.path().join("console.log")
    }

    /// Waits for this line on the console.
    pub fn wait_for_line(&mut self, line: &str) -> Result<()> {
        let limit = self.builder.boot_limit;
        self.with_diagnostics(|guest| {
            let console = guest.console();
            let found = wait_until(limit, || {
                let output = std::fs::read(&console).unwrap_or_default();
                let has_line = String::from_utf8_lossy(&output).contains(line);
                match guest.process.check_running() {
                    Ok(()) => has_line.then_some(Ok(())),
                    Err(error) => Some(Err(error)),
                }
            });
            found.unwrap_or_else(|| bail!("no output {line:?} within {limit:?}"))
        })
    }

    /// Returns the end of the console log.
    pub fn console_tail(&self) -> String {
        tail(
            &format!("the console of guest {}", self.builder.name),
            &self.console(),
        )
    }

    /// Returns the path of a file of this guest.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Continues with the scripts of a guest that has migrated here.
    pub(crate) fn take_agent(&mut self, previous: &Guest) -> Result<()> {
        let previous = previous.agent()?;
        let agent = self.agent.as_mut().context("the guest has no agent")?;
        agent.continue_from(previous);
        Ok(())
    }

    fn agent(&self) -> Result<&Agent> {
        self.agent.as_ref().context("the guest has not booted")
    }

    /// Adds both logs to an error.
    fn with_diagnostics<T>(&mut self, work: impl FnOnce(&mut Guest) -> Result<T>) -> Result<T> {
        work(self).with_context(|| {
            let ended = match self.process.ended() {
                Ok(Some(status)) => format!("QEMU ended, {status}"),
                _ => "QEMU is running".to_owned(),
            };
            format!(
                "guest {}: {ended}\n{}\n{}",
                self.builder.name,
                self.process.log_tail(),
                self.console_tail()
            )
        })
    }

    /// Accepts QEMU's connection for the agent's port, which precedes the start of the machine.
    fn accept(&mut self, listener: &UnixListener) -> Result<UnixStream> {
        listener.set_nonblocking(true)?;
        let limit = self.builder.boot_limit;
        let accepted = wait_until(limit, || match listener.accept() {
            Ok((stream, _)) => Some(Ok(stream)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => self
                .process
                .check_running()
                .err()
                .map(|error| Err(error.context("QEMU did not start"))),
            Err(error) => Some(Err(error.into())),
        });
        let stream = accepted.unwrap_or_else(|| bail!("QEMU did not connect within {limit:?}"))?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    }
}
