//! `lunette vm plan`: prints the programs to start and the guest's view of the disks, without
//! starting anything.

use std::io::Write;

use clap::{Args, ValueEnum};
use cli_common::Outcome;

use super::GuestArguments;

/// `lunette vm plan`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct PlanArguments {
    #[command(flatten)]
    guest: GuestArguments,
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
    lunette vm plan blk:4 --system disk.qcow2";

/// Prints a plan.
///
/// # Errors
/// Contradictory or invalid arguments.
pub fn run(arguments: &PlanArguments) -> Outcome {
    let plan = arguments.guest.plan()?;
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
