//! Plan of a guest with its devices. `lunette vm run` starts it, and `lunette vm plan` prints it.

use std::path::PathBuf;

use clap::Args;
use cli_common::Failure;
use vm::initramfs::{ATA, user_command_line};
use vm::running::{RuntimeFolder, Tap, ports};
use vm::topology::{GuestKernel, MachineType, Plan, Topology, Via};
use vm::{Accelerator, setup};

use super::net::Net;
use super::{GuestArguments, failed, mistake, net, running_daemon, share};

/// Devices of a guest other than its disks.
#[derive(Debug, Args)]
pub struct DeviceArguments {
    /// Network of the guest: none; user, QEMU's user-mode network, which needs no privileges (the guest has the address 10.0.2.15 and
    /// reaches this machine as 10.0.2.2); or tap, a network interface of this machine, with
    /// ,bridge=NAME,vhost=on,queues=N,mac=ADDRESS,address=ADDRESS/LENGTH as needed
    #[arg(
        long,
        value_name = "NETWORK",
        default_value = "none",
        help_heading = "Devices"
    )]
    pub net: Net,
    /// MAC address of the guest's network card
    #[arg(long, value_name = "ADDRESS", value_parser = net::hardware_address, help_heading = "Devices")]
    pub mac: Option<String>,
    /// Folder of this machine that the guest may read and write through virtiofs. The system of `lunette vm setup` mounts it at /share.
    /// Other systems must mount the virtiofs tag `share`
    #[arg(long, value_name = "FOLDER", value_parser = share::folder, help_heading = "Devices")]
    pub share: Option<PathBuf>,
    /// Add a memory balloon, which the monitor's `balloon MIB` controls
    #[arg(long, help_heading = "Devices")]
    pub balloon: bool,
    /// Number of free root ports of the q35 machine for `lunette vm plug`, 0 to 16 [default: 4 with `vm run`]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16), help_heading = "Devices")]
    pub spare_ports: Option<u32>,
}

/// Default of [`DeviceArguments::spare_ports`] for guests of `vm run`.
const SPARE_PORTS: u32 = 4;

/// Connections of a guest's console and agent.
#[derive(Clone, Copy)]
pub enum Ports<'a> {
    /// The console is the terminal that starts QEMU. There is no agent.
    Terminal,
    /// Sockets of a supervisor in this folder. Without a system of its own, the guest boots that of `lunette vm setup`.
    Supervisor {
        folder: &'a RuntimeFolder,
        tap: Option<&'a Tap>,
        accelerator: Accelerator,
    },
}

/// Checks that the kernel of the small system has the module that a word of the user needs.
pub fn check_module(word: &str, module: &str, hint: &str) -> Result<(), Failure> {
    match vm::kernel().map_err(failed)?.has_module(module) {
        true => Ok(()),
        false => Err(Failure::because(format!(
            "{word}: the kernel of the small guest system has no module {module}; hint: {hint}"
        ))),
    }
}

/// Checks that the kernel of the small system has the modules for ATA disks. Returns true if the guest has such disks.
fn has_ata(topology: &Topology) -> Result<bool, Failure> {
    let mut has_ata = false;
    for group in &topology.groups {
        let module = match group.via {
            Via::Ide => "ata_piix",
            Via::Ahci => "ahci",
            _ => continue,
        };
        has_ata = true;
        let hint = "via=ide, or --system FILE with another kernel";
        check_module(&group.word, module, hint)?;
    }
    Ok(has_ata)
}

/// The kernel's command line in the small system.
fn command_line(guest: &GuestArguments, devices: &DeviceArguments, has_ata: bool) -> String {
    let share = devices.share.as_ref();
    let share = share.map(|_| share::KERNEL_WORD.to_owned());
    let words = [
        Some(user_command_line(&guest.name)),
        devices.net.kernel_word(),
        share,
        has_ata.then(|| ATA.to_owned()),
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// Plans a guest.
///
/// # Errors
/// Contradictory or invalid arguments.
pub fn plan(
    guest: &GuestArguments,
    devices: &DeviceArguments,
    connections: Ports<'_>,
) -> Result<Plan, Failure> {
    let topology = Topology::parse(&guest.topology).map_err(mistake)?;
    let mut options = guest.options()?;
    options.known = running_daemon::known(guest.control.as_deref(), &topology)?;
    let mut spare = devices.spare_ports.unwrap_or(0);
    if let Ports::Supervisor {
        folder,
        accelerator,
        ..
    } = connections
    {
        spare = devices.spare_ports.unwrap_or(SPARE_PORTS);
        options.sockets = folder.folder().to_owned();
        if accelerator == Accelerator::Tcg && !options.qemu.is_at_least(9, 0) {
            options.more_memory_kib = vm::MIGRATING_KIB;
        }
        if guest.accel.is_empty() {
            options.accelerators = vec![accelerator.qemu_option().to_owned()];
        }
        if guest.system.is_none() && guest.initrd.is_none() {
            let system = setup::user_system().map_err(failed)?;
            options.kernel = Some(GuestKernel {
                image: guest.kernel.clone().unwrap_or(system.kernel),
                initrd: Some(system.initramfs),
                append: command_line(guest, devices, has_ata(&topology)?),
            });
        }
        options.reserved.push("agent-bus".to_owned());
    }
    let is_wanted = [
        ("balloon", devices.balloon),
        ("share", devices.share.is_some()),
        ("net", devices.net != Net::None),
    ];
    let wanted = is_wanted.iter().filter(|(_, is_wanted)| *is_wanted);
    options
        .reserved
        .extend(wanted.map(|(name, _)| (*name).to_owned()));
    options.is_memory_shared |= devices.share.is_some();
    if options.machine == MachineType::Q35 {
        let spare = (1..=spare).map(|number| format!("spare{number}"));
        options.reserved.extend(spare);
    }
    let mut plan = Plan::new(&topology, options).map_err(mistake)?;
    add_devices(&mut plan, devices, connections);
    Ok(plan)
}

/// Adds the devices that have a reserved address, and the console.
fn add_devices(plan: &mut Plan, devices: &DeviceArguments, connections: Ports<'_>) {
    let (mut console, tap) = match connections {
        Ports::Terminal => (std::mem::take(&mut plan.options.console), None),
        Ports::Supervisor { tap, .. } => (Vec::new(), tap),
    };
    let share_socket = plan.options.sockets.join(share::SOCKET);
    let mut chassis = 100;
    for (name, address) in &plan.reserved {
        let properties = address.properties();
        let properties = properties
            .iter()
            .map(|(key, value)| format!(",{key}={value}"));
        let properties: String = properties.collect();
        match (name.as_str(), connections) {
            ("agent-bus", Ports::Supervisor { folder, .. }) => {
                console.extend(ports(folder, &properties));
            }
            ("share", _) => console.extend(share::device(&share_socket, &properties)),
            ("balloon", _) => {
                console.push("-device".to_owned());
                console.push(format!("virtio-balloon-pci,id=balloon{properties}"));
            }
            ("net", _) => {
                let usual = net::usual_address(&plan.options.seed, &plan.options.name);
                let mac = devices.mac.as_deref();
                console.extend(devices.net.card(tap, mac, &usual, &properties));
            }
            (port, _) => {
                // Chassis numbers of ports in the plan start at 1.
                chassis += 1;
                console.push("-device".to_owned());
                console.push(format!(
                    "pcie-root-port,id={port},chassis={chassis}{properties}"
                ));
            }
        }
    }
    plan.options.console = console;
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use vm::running::Registry;

    use super::super::plan::PlanArguments;
    use super::super::run::RunArguments;
    use super::*;

    #[derive(Parser)]
    struct Run {
        #[command(flatten)]
        arguments: RunArguments,
    }

    #[derive(Parser)]
    struct Planned {
        #[command(flatten)]
        arguments: PlanArguments,
    }

    const SYSTEM: [&str; 5] = ["vm", "--kernel", "/kernel", "--initrd", "/initrd"];
    /// Guests with different devices.
    const GUESTS: [&str; 6] = [
        "blk:4,via=qemu,scsi=off backing=tmpfs:/dev/shm --machine pc-i440fx-7.2 --smp 4,sockets=4,cores=1,threads=1",
        "scsi:4x1,queues=2 --net user --mac 52:54:00:aa:bb:cc --balloon",
        "scsi:1x4,via=qemu-iothread,backing=file:/tmp blk:1 --net tap,bridge=br0,vhost=on,queues=2",
        "blk:1,packed --share /proc --spare-ports 2 --uuid c31a9f3e-4161-c53a-339c-5dc36d0497cb",
        "scsi:1x2,queues=2,via=vhost-scsi,wwpn=naa.5001405bf0e7a2c4 blk:1",
        "blk:40 --memory 2G --cpu qemu64 --qemu-arg=-no-shutdown",
    ];

    #[test]
    fn vm_plan_has_the_words_of_vm_run() {
        let root = tempfile::tempdir().unwrap();
        let folder = Registry::at(root.path()).unwrap();
        let folder = folder.runtime_folder("lunette-guest").unwrap();
        let ports = Ports::Supervisor {
            folder: &folder,
            tap: None,
            accelerator: Accelerator::Tcg,
        };
        for guest in GUESTS {
            let words = SYSTEM.into_iter().chain(guest.split_whitespace());
            let words: Vec<&str> = words.chain(["--qemu-version", "7.2"]).collect();
            let run = Run::parse_from(&words).arguments;
            let planned = Planned::parse_from(&words).arguments;
            let of_run = plan(&run.guest, &run.devices, ports)
                .map_err(|_| ())
                .unwrap();
            let of_plan = plan(&planned.guest, &planned.devices, ports)
                .map_err(|_| ())
                .unwrap();
            let wanted = of_run.qemu_arguments();
            assert_eq!(of_plan.qemu_arguments(), wanted, "{guest}");
            assert_eq!(of_plan.daemon_flags(), of_run.daemon_flags(), "{guest}");
            let by_hand = plan(&planned.guest, &planned.devices, Ports::Terminal);
            let by_hand = by_hand.map_err(|_| ()).unwrap().qemu_arguments();
            // The same guest with other ports: each disk, card and machine property is in both.
            let is_device = |word: &&String| {
                ["virtio-", "vhost-", "scsi-hd", "pc-i440fx", "q35"]
                    .iter()
                    .any(|prefix| word.starts_with(prefix))
                    && !word.contains("agent")
            };
            let kinds = |words: &[String]| {
                let words = words.iter().filter(is_device);
                let kinds =
                    words.map(|word| word.split([',', '.']).next().unwrap_or("").to_owned());
                kinds.collect::<Vec<_>>()
            };
            assert_eq!(kinds(&by_hand), kinds(&wanted), "{guest}");
            let text = wanted.join(" ");
            for (option, word) in [
                ("--balloon", "virtio-balloon-pci"),
                ("--net user", "netdev=net,"),
                ("queues=2 --net", "num_queues=2"),
                (
                    "vhost=on",
                    "tap,id=net,ifname=tap0,script=no,downscript=no,queues=2,vhost=on",
                ),
                ("--machine pc-i440fx-7.2", "-machine pc-i440fx-7.2"),
                ("--smp 4,", "-smp 4,sockets=4,cores=1,threads=1"),
                ("scsi=off", ",scsi=off"),
                ("--share", "vhost-user-fs-pci"),
                ("wwpn=", "vhost-scsi-pci,id=c0,wwpn=naa.5001405bf0e7a2c4,"),
            ] {
                assert!(
                    !guest.contains(option) || text.contains(word),
                    "{word}: {text}"
                );
            }
            assert!(text.contains("-kernel /kernel"), "{text}");
        }
    }
}
