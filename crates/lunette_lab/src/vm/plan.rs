//! `lunette vm plan`: prints the programs to start and the guest's view of the disks, without
//! starting anything.

use std::io::Write;

use clap::{Args, ValueEnum};
use cli_common::Outcome;
use vm::Accelerator;
use vm::running::Registry;

use super::planned::{DeviceArguments, Ports, plan};
use super::{GuestArguments, failed};

/// `lunette vm plan`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct PlanArguments {
    #[command(flatten)]
    pub(super) guest: GuestArguments,
    #[command(flatten)]
    pub(super) devices: DeviceArguments,
    /// Print the guest that `lunette vm run` starts with the same words: its kernel, and its sockets in the folder of the guest. The numbers of
    /// descriptors of a tap differ. Without this option the console is the terminal, so that QEMU can be started by hand
    #[arg(long)]
    as_run: bool,
    /// Output format
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

/// Output formats of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Everything, human-readable
    Text,
    /// Flags of `lunette serve`
    Flags,
    /// Configuration file of `lunette serve`
    Toml,
    /// QEMU's command line
    Qemu,
    /// libvirt's domain XML
    Xml,
    /// Everything, machine-readable
    Json,
}

const AFTER: &str = "\
Examples:

  One virtio-scsi controller with four targets of one LUN, 2 queues
    lunette vm plan scsi:4x1,queues=2

  The same disks through QEMU's own device, with an I/O thread
    lunette vm plan scsi:4x1,queues=2 via=qemu-iothread

  Four virtio-blk devices and a system disk
    lunette vm plan blk:4 --system disk.qcow2

  QEMU's command of a guest of vm run, with a network card and a balloon
    lunette vm plan blk:4 --net user --balloon --as-run --format qemu";

/// Prints a plan.
///
/// # Errors
/// Contradictory or invalid arguments.
pub fn run(arguments: &PlanArguments) -> Outcome {
    let name = &arguments.guest.name;
    let place = match arguments.as_run {
        true => Some(Registry::open().and_then(|registry| registry.runtime_folder(name))),
        false => None,
    };
    let place = place.transpose().map_err(failed)?;
    let ports = match &place {
        Some(folder) => Ports::Supervisor {
            folder,
            tap: None,
            accelerator: Accelerator::detect().map_err(failed)?,
        },
        None => Ports::Terminal,
    };
    let plan = plan(&arguments.guest, &arguments.devices, ports)?;
    let text = match arguments.format {
        Format::Text => plan.text(),
        Format::Flags => plan.flags_text(),
        Format::Toml => plan.toml(),
        Format::Qemu => plan.qemu_text(),
        Format::Xml => plan.libvirt_xml(),
        Format::Json => format!("{:#}\n", plan.json()),
    };
    cli_common::stdout().write_all(text.as_bytes())?;
    Ok(())
}
