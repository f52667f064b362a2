//! `lunette vm plug` and `unplug`: adds disks to a running guest and removes them.
//!
//! A SCSI disk of the daemon becomes a logical unit of an existing controller. A virtio-blk disk needs an export in the daemon,
//! then a chardev and a device in QEMU on a free root port; they are removed in reverse order. Disks served by QEMU have a block
//! device of QEMU instead of export and chardev.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use cli_common::Outcome;
use control::objects::Export;
use control::{Client, Method, escape};
use serde_json::{Value, json};
use vm::Qmp;
use vm::running::{Plugged, QMP_SOCKET, Registry, RuntimeFolder, SECONDS_MAX, State};

use super::failed;
use super::running_daemon::ask;

/// Kind of the disk in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A virtio-blk device
    Blk,
    /// A logical unit of a virtio-scsi controller
    Scsi,
}

/// `lunette vm plug`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct PlugArguments {
    /// Name of the guest
    name: String,
    /// Kind of the disk in the guest
    #[arg(value_enum)]
    kind: Kind,
    /// Disk to plug: the name of a disk of the guest's daemon, or a new disk NAME=ram:SIZE or NAME=file:PATH. With --via-qemu: a raw file
    /// or a block device
    disk: String,
    /// Serve the disk with QEMU instead of the guest's daemon
    #[arg(long)]
    via_qemu: bool,
    /// Number of request queues of a virtio-blk device [default: one per virtual CPU]
    #[arg(long, value_name = "N")]
    queues: Option<u16>,
    /// Address of a SCSI disk: CONTROLLER/TARGET:LUN [default: a free target of the first controller]
    #[arg(long, value_name = "ADDRESS")]
    at: Option<String>,
}

const AFTER: &str = "\
A virtio-blk device needs a free root port of the q35 machine; `vm run` reserves --spare-ports.

Examples:
    lunette vm plug guest1 blk fast=ram:1G
    lunette vm plug guest1 scsi data=file:data.raw,size=10G --at c0/5:0
    lunette vm plug guest1 scsi --via-qemu data.raw
    lunette vm unplug guest1 fast";

/// `lunette vm unplug`
#[derive(Debug, Args)]
#[command(after_help = AFTER_UNPLUG)]
pub struct UnplugArguments {
    /// Name of the guest
    name: String,
    /// Name of the disk, as given to `lunette vm plug`
    disk: String,
    /// Time limit in seconds for the guest to release the disk
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=SECONDS_MAX))]
    within: u64,
}

const AFTER_UNPLUG: &str = "\
Requests the guest to release the device. Without a response of the guest, the device stays. Disks and exports that `lunette vm plug` created are
removed, including the content of a RAM disk.

Example:
    lunette vm unplug guest1 fast";

/// A guest, its monitor, and its daemon, if it has one.
struct Guest {
    name: String,
    place: RuntimeFolder,
    state: State,
    qmp: Qmp,
}

/// Plugs a disk in.
///
/// # Errors
/// The cause; all changes have been undone.
pub fn plug(arguments: &PlugArguments) -> Outcome {
    let plugged = Guest::find(&arguments.name).and_then(|mut guest| guest.plug(arguments));
    let plugged = plugged.map_err(|error| {
        let what = format!("guest {}: plug {}", arguments.name, arguments.disk);
        failed(error.context(what))
    })?;
    writeln!(
        cli_common::stdout(),
        "{} {} at {}",
        plugged.kind,
        plugged.disk,
        plugged.at
    )?;
    Ok(())
}

/// Unplugs a disk.
///
/// # Errors
/// When the guest does not release the disk.
pub fn unplug(arguments: &UnplugArguments) -> Outcome {
    let unplugged = Guest::find(&arguments.name).and_then(|mut guest| guest.unplug(arguments));
    unplugged.map_err(|error| {
        let what = format!("guest {}: unplug {}", arguments.name, arguments.disk);
        failed(error.context(what))
    })
}

impl Guest {
    fn find(name: &str) -> Result<Guest> {
        let (place, state) = Registry::open()?.find(name)?;
        let qmp = Qmp::connect(&place.file(QMP_SOCKET))?;
        Ok(Guest {
            name: name.to_owned(),
            place,
            state,
            qmp,
        })
    }

    fn plug(&mut self, arguments: &PlugArguments) -> Result<Plugged> {
        let (disk, is_new) = match arguments.disk.split_once('=') {
            Some((name, _)) if !arguments.via_qemu => (name.to_owned(), true),
            _ => (arguments.disk.clone(), false),
        };
        let mut plugged = Plugged {
            kind: match arguments.kind {
                Kind::Blk => "blk".to_owned(),
                Kind::Scsi => "scsi".to_owned(),
            },
            disk,
            at: String::new(),
            export: String::new(),
            is_new,
            via_qemu: arguments.via_qemu,
        };
        plugged.at = match (arguments.kind, &arguments.at) {
            (Kind::Scsi, Some(at)) => at.clone(),
            (Kind::Scsi, None) => self.free_address(arguments.via_qemu)?,
            (Kind::Blk, Some(_)) => {
                bail!("--at is only for SCSI disks; hint: omit it for a virtio-blk disk")
            }
            (Kind::Blk, None) => String::new(),
        };
        self.note(&mut plugged)?;
        let done = self.attach(arguments, &plugged);
        if done.is_err() {
            // The first error is the one to report.
            self.forget(&plugged).unwrap_or(());
        }
        done.map(|()| plugged)
    }

    /// Records the disk and its port before anything is created.
    fn note(&mut self, plugged: &mut Plugged) -> Result<()> {
        let ports = match plugged.kind.as_str() {
            "blk" => self.spare_ports()?,
            _ => Vec::new(),
        };
        let (name, machine) = (self.name.clone(), self.state.machine.clone());
        let mut problem = None;
        self.place.change(|state| {
            // Each plug uses new names of export and socket, because a daemon remembers the disk of a socket's last driver.
            state.plugs += 1;
            plugged.export = format!("plug{}", state.plugs);
            let is_taken = |at: &str| state.plugged.iter().any(|other| other.at == at);
            if state.plugged.iter().any(|other| other.disk == plugged.disk) {
                problem = Some(format!(
                    "{} is already plugged in; hint: lunette vm list",
                    plugged.disk
                ));
            } else if plugged.kind == "scsi" && is_taken(&plugged.at) {
                problem = Some(format!("{} is in use", plugged.at));
            } else if plugged.kind == "scsi" {
                state.plugged.push(plugged.clone());
            } else if let Some(port) = ports.iter().find(|port| !is_taken(port)) {
                plugged.at.clone_from(port);
                state.plugged.push(plugged.clone());
            } else {
                problem = Some(format!(
                    "guest {name} ({machine}) has no free port, {} are in use; hint: lunette vm run --spare-ports N",
                    ports.len()
                ));
            }
        })?;
        match problem {
            Some(problem) => bail!("{problem}"),
            None => Ok(()),
        }
    }

    fn forget(&self, plugged: &Plugged) -> Result<()> {
        self.place
            .change(|state| state.plugged.retain(|other| other.disk != plugged.disk))
    }

    fn attach(&mut self, arguments: &PlugArguments, plugged: &Plugged) -> Result<()> {
        if plugged.via_qemu {
            return self.attach_qemus(arguments, plugged);
        }
        let control = self.control()?;
        if plugged.is_new {
            ask(&control, &["disk", "add", &arguments.disk])?;
        }
        let done = match arguments.kind {
            Kind::Scsi => change(
                &control,
                Method::PUT,
                &lun_path(&plugged.at)?,
                Some(&json!({ "disk": plugged.disk })),
            ),
            Kind::Blk => self.attach_export(&control, arguments, plugged),
        };
        if done.is_err() && plugged.is_new {
            remove_disk(&control, &plugged.disk).unwrap_or(());
        }
        done
    }

    fn attach_export(
        &mut self,
        control: &Path,
        arguments: &PlugArguments,
        plugged: &Plugged,
    ) -> Result<()> {
        let socket = self.place.file(&format!("{}.sock", plugged.export));
        let queues = arguments
            .queues
            .unwrap_or(self.state.cpus.clamp(1, 256) as u16);
        let export = json!({
            "kind": "vhost-blk",
            "disk": plugged.disk,
            "socket": socket.display().to_string(),
            "queues": queues,
        });
        let path = format!("/v1/exports/{}", escape(&plugged.export));
        change(control, Method::PUT, &path, Some(&export))?;
        let done = self.add_vhost_device(&socket, queues, &plugged.at);
        if done.is_err() {
            change(control, Method::DELETE, &path, None).unwrap_or(());
        }
        done
    }

    fn add_vhost_device(&mut self, socket: &Path, queues: u16, port: &str) -> Result<()> {
        let ids = Ids::new(port);
        let address = json!({ "type": "unix", "data": { "path": socket.display().to_string() } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false, "reconnect": 1 } });
        let chardev = json!({ "id": ids.chardev, "backend": backend });
        self.qmp.command("chardev-add", chardev)?;
        let device = json!({
            "driver": "vhost-user-blk-pci",
            "id": ids.device,
            "chardev": ids.chardev,
            "num-queues": queues,
        });
        let added = self.add_on_port(device, port);
        if added.is_err() {
            // The first error is the one to report.
            let _undone = self
                .qmp
                .command("chardev-remove", json!({ "id": ids.chardev }));
        }
        added
    }

    /// On the i440FX machine every slot of the bus is a port, and QEMU selects a free one.
    fn add_on_port(&mut self, mut device: Value, port: &str) -> Result<()> {
        if self.state.machine == "q35" {
            device["bus"] = json!(port);
        }
        self.qmp.command("device_add", device).map(drop)
    }

    fn attach_qemus(&mut self, arguments: &PlugArguments, plugged: &Plugged) -> Result<()> {
        let ids = Ids::new(&plugged.at);
        let path = std::path::absolute(&plugged.disk)?;
        let is_device = {
            use std::os::unix::fs::FileTypeExt;
            let metadata = std::fs::metadata(&path);
            let metadata = metadata.with_context(|| format!("cannot open {}", path.display()))?;
            metadata.file_type().is_block_device()
        };
        let driver = if is_device { "host_device" } else { "file" };
        let file =
            json!({ "driver": driver, "filename": path.display().to_string(), "discard": "unmap" });
        let node =
            json!({ "driver": "raw", "node-name": ids.node, "discard": "unmap", "file": file });
        self.qmp.command("blockdev-add", node)?;
        let added = match arguments.kind {
            Kind::Blk => {
                let device =
                    json!({ "driver": "virtio-blk-pci", "id": ids.device, "drive": ids.node });
                self.add_on_port(device, &plugged.at)
            }
            Kind::Scsi => address(&plugged.at).and_then(|(controller, target, lun)| {
                let device = json!({
                    "driver": "scsi-hd", "id": ids.device, "drive": ids.node,
                    "bus": format!("{controller}.0"), "scsi-id": target, "lun": lun,
                });
                self.qmp.command("device_add", device).map(drop)
            }),
        };
        if added.is_err() {
            // The first error is the one to report.
            let _undone = self
                .qmp
                .command("blockdev-del", json!({ "node-name": ids.node }));
        }
        added
    }

    fn unplug(&mut self, arguments: &UnplugArguments) -> Result<()> {
        let mut plugged = self.state.plugged.iter();
        let plugged = plugged
            .find(|plugged| plugged.disk == arguments.disk)
            .cloned();
        let plugged = plugged.with_context(|| {
            format!(
                "{} was not plugged in; hint: lunette vm list",
                arguments.disk
            )
        })?;
        let limit = Duration::from_secs(arguments.within);
        let ids = Ids::new(&plugged.at);
        if plugged.via_qemu {
            self.delete_device(&ids.device, limit)?;
            self.qmp
                .command("blockdev-del", json!({ "node-name": ids.node }))?;
            return self.forget(&plugged);
        }
        let control = self.control()?;
        if plugged.kind == "scsi" {
            change(&control, Method::DELETE, &lun_path(&plugged.at)?, None)?;
        } else {
            self.delete_device(&ids.device, limit)?;
            self.qmp
                .command("chardev-remove", json!({ "id": ids.chardev }))?;
            let path = format!("/v1/exports/{}?force=true", escape(&plugged.export));
            change(&control, Method::DELETE, &path, None)?;
        }
        if plugged.is_new {
            remove_disk(&control, &plugged.disk)?;
        }
        self.forget(&plugged)
    }

    /// Requests the removal of a device, repeatedly while it is busy, and waits for it.
    fn delete_device(&mut self, id: &str, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        let mut asked = self.qmp.command("device_del", json!({ "id": id }));
        loop {
            if let Err(error) = &asked
                && format!("{error:#}").contains("DeviceNotFound")
            {
                // Already removed.
                return Ok(());
            }
            let moment = end
                .saturating_duration_since(Instant::now())
                .min(Duration::from_secs(5));
            if self.qmp.wait_for_deletion(id, moment)? {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "the guest did not release it within {} s; hint: unmount its file systems, or see lunette vm console {}",
                limit.as_secs(),
                self.name
            );
            asked = self.qmp.command("device_del", json!({ "id": id }));
        }
    }

    fn control(&self) -> Result<PathBuf> {
        self.state.control.clone().with_context(|| {
            format!(
                "guest {} has no daemon; hint: --via-qemu with a file or a block device",
                self.name
            )
        })
    }

    /// Names of the reserved ports.
    fn spare_ports(&mut self) -> Result<Vec<String>> {
        if self.state.machine != "q35" {
            return Ok((1..=8).map(|number| format!("slot{number}")).collect());
        }
        let mut ports = self.peripherals(|_, name| name.starts_with("spare"))?;
        ports.sort();
        Ok(ports)
    }

    /// Names of QEMU's devices, selected by type and name.
    fn peripherals(&mut self, wanted: impl Fn(&str, &str) -> bool) -> Result<Vec<String>> {
        let list = self
            .qmp
            .command("qom-list", json!({ "path": "/machine/peripheral" }))?;
        let list = list.as_array().context("unexpected response to qom-list")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let named = list
            .iter()
            .map(|item| (text(&item["type"]), text(&item["name"])));
        Ok(named
            .filter(|(kind, name)| wanted(kind, name))
            .map(|(_, name)| name)
            .collect())
    }

    /// Returns a free target of the first controller.
    fn free_address(&mut self, via_qemu: bool) -> Result<String> {
        let plugged: Vec<String> = self
            .state
            .plugged
            .iter()
            .map(|disk| disk.at.clone())
            .collect();
        if via_qemu {
            let controllers = self.peripherals(|kind, _| kind == "child<virtio-scsi-pci>")?;
            let controller = controllers.first().context("the guest has no virtio-scsi controller of QEMU's; hint: lunette vm run scsi:1x1,via=qemu")?;
            // Initial disks have the lowest numbers.
            let mut addresses = (0..256)
                .rev()
                .map(|target| format!("{controller}/{target}:0"));
            return addresses
                .find(|at| !plugged.contains(at))
                .context("all targets of the controller are in use; hint: lunette vm unplug, or --at with another LUN");
        }
        let exports: Vec<Export> = Client::new(&self.control()?).get("/v1/exports")?;
        for export in exports {
            let (Some(_), Some(luns)) = (export.socket(), export.luns()) else {
                continue;
            };
            let is_free = |target: u8| {
                let at = format!("{}/{target}:0", export.name);
                let taken = luns.iter().any(|lun| lun.target == target);
                (!taken && !plugged.contains(&at)).then_some(at)
            };
            return (0..=255).find_map(is_free).context("all targets of the controller are in use; hint: lunette vm unplug, or --at with another LUN");
        }
        bail!(
            "the guest has no virtio-scsi controller; hint: lunette vm run scsi:1x1, or plug it as blk"
        )
    }
}

/// Names in QEMU, derived from an address.
struct Ids {
    chardev: String,
    device: String,
    node: String,
}

impl Ids {
    fn new(at: &str) -> Ids {
        let at = at.replace(['/', ':'], "-");
        Ids {
            chardev: format!("plug-{at}-socket"),
            device: format!("plug-{at}"),
            node: format!("plug-{at}-disk"),
        }
    }
}

/// Parses CONTROLLER/TARGET:LUN.
fn address(at: &str) -> Result<(&str, u8, u16)> {
    let parts = || {
        let (controller, rest) = at.split_once('/')?;
        let (target, lun) = rest.split_once(':')?;
        Some((controller, target.parse().ok()?, lun.parse().ok()?))
    };
    parts().with_context(|| {
        format!("{at:?} is not an address; hint: give CONTROLLER/TARGET:LUN, such as c0/5:0")
    })
}

fn lun_path(at: &str) -> Result<String> {
    let (controller, target, lun) = address(at)?;
    Ok(format!(
        "/v1/exports/{}/luns/{target}:{lun}",
        escape(controller)
    ))
}

fn change(control: &Path, method: Method, path: &str, body: Option<&Value>) -> Result<()> {
    Client::new(control).change(method, path, body)?;
    Ok(())
}

fn remove_disk(control: &Path, disk: &str) -> Result<()> {
    change(
        control,
        Method::DELETE,
        &format!("/v1/disks/{}", escape(disk)),
        None,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_three_parts() {
        assert_eq!(address("c0/5:300").unwrap(), ("c0", 5, 300));
        for wrong in ["c0", "c0/5", "5:0", "c0/256:0", "c0/1:x"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }
}
