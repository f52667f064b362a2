//! Definition of the command line. Usage and help show `lunette bench` and `lunette vm`, because users type these.

use clap::{Parser, Subcommand};
use cli_common::{CompletionArguments, LogOptions, ManArguments};

use crate::bench::BenchArguments;
use crate::conformance::ConformanceArguments;
use crate::doctor::DoctorArguments;
use crate::image::ImageArguments;
use crate::iscsi::IscsiArguments;
use crate::libvirt::LibvirtCommand;
use crate::top::TopArguments;
use crate::vm::VmCommand;

/// Measures block devices of virtual machines, and runs guests with such devices.
#[derive(Debug, Parser)]
#[command(
    name = "lunette-lab",
    bin_name = "lunette",
    override_usage = "lunette-lab [OPTIONS] <COMMAND>",
    version,
    arg_required_else_help = true,
    after_help = AFTER
)]
pub struct Cli {
    /// Log options
    #[command(flatten)]
    pub log: LogOptions,
    /// Subcommand
    #[command(subcommand)]
    pub command: Command,
}

const AFTER: &str = "\
Users run these commands through `lunette`: `lunette bench ...` runs `lunette-lab bench ...` from the folder of lunette or from PATH.

  lunette bench vhost-user-blk:/tmp/d0.sock --rw randread --bs 4k --iodepth 32 --cpus 0
  lunette vm plan scsi:4x1,queues=2
  lunette vm run scsi:4x1,queues=2 backing=ram:256M";

/// Subcommands of `lunette-lab`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure vhost-user devices, files, iSCSI logical units and NBD exports with a built-in driver
    Bench(Box<BenchArguments>),
    /// Test any vhost-user back end against virtio 1.3 and the vhost-user specification
    Conformance(ConformanceArguments),
    /// Find host settings that slow down virtual machine disks, and print commands that change them
    Doctor(Box<DoctorArguments>),
    /// Create, check and convert qcow2 images that are not in use
    Image(ImageArguments),
    /// Inspect iSCSI targets and copy their disks, without a kernel driver
    Iscsi(Box<IscsiArguments>),
    /// Create and read libvirt domains
    Libvirt(LibvirtCommand),
    /// Show a daemon's rates and latencies on the whole screen, updated every second
    Top(TopArguments),
    /// Plan and run guests with disks of Lunette, or of QEMU for comparison
    Vm(VmCommand),
    /// Print the completion script of lunette-lab for a shell
    #[command(after_help = AFTER_COMPLETION)]
    Completion(CompletionArguments),
    /// Write man pages into a folder
    #[command(hide = true, after_help = AFTER_MAN)]
    Man(ManArguments),
}

const AFTER_COMPLETION: &str = "\
Example:
    lunette-lab completion bash > ~/.local/share/bash-completion/completions/lunette-lab";

const AFTER_MAN: &str = "\
Example:
    lunette-lab man /usr/local/share/man";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_makes_sense() {
        Cli::command().debug_assert();
    }
}
