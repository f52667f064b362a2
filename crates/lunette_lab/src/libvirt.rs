//! `lunette libvirt`: domains of libvirt, made of a topology and read back.

use std::io::{Read, Write};
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use cli_common::{Failure, Outcome, say};
use vm::libvirt::Domain;
use vm::topology::PlanOptions;

use crate::vm::GuestArguments;

/// `lunette libvirt`
#[derive(Debug, Args)]
#[command(arg_required_else_help = true, after_help = AFTER)]
pub struct LibvirtCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print the domain of a guest with these disks, as `lunette vm plan --format xml`
    Xml(Box<GuestArguments>),
    /// Read a domain, and print QEMU's command line for it, or how Lunette would serve its disks
    #[command(after_help = AFTER_FROM)]
    FromXml(FromArguments),
}

#[derive(Debug, Args)]
struct FromArguments {
    /// The domain, as virsh dumpxml prints it; - reads stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// What to print
    #[arg(long, value_enum, default_value = "qemu")]
    to: Form,
    /// Folder of the exports' sockets
    #[arg(long, value_name = "FOLDER", default_value = "/tmp")]
    sockets: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// QEMU's command line
    Qemu,
    /// A daemon's configuration file that serves the domain's virtio disks
    Toml,
}

const AFTER: &str = "\
Example:
    lunette libvirt xml scsi:4x1 > domain.xml
    lunette libvirt from-xml domain.xml --to toml";

const AFTER_FROM: &str = "\
What is not understood is named on stderr, with its path in the document; nothing is left out silently.

Example:
    virsh dumpxml --inactive guest1 | lunette libvirt from-xml -";

/// Runs a subcommand.
///
/// # Errors
/// Why it failed.
pub fn run(command: LibvirtCommand) -> Outcome {
    let text = match command.action {
        Action::Xml(arguments) => arguments.plan()?.libvirt_xml(),
        Action::FromXml(arguments) => from_xml(&arguments)?,
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

fn from_xml(arguments: &FromArguments) -> Result<String, Failure> {
    let file = arguments.file.display();
    let text = match arguments.file.to_str() {
        Some("-") => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map(|_| text)
        }
        _ => std::fs::read_to_string(&arguments.file),
    };
    let text = text.map_err(|error| Failure::because(format!("cannot read {file}: {error}")))?;
    let domain = Domain::read(&text, PlanOptions::default())
        .map_err(|error| Failure::because(format!("{file}: {error}")))?;
    for what in &domain.unread {
        say(&format_args!("lunette: {file}: not understood: {what}"));
    }
    match arguments.to {
        Form::Qemu => Ok(domain.plan.qemu_text()),
        Form::Toml => {
            let plan = domain.served(&arguments.sockets);
            let plan = plan.map_err(|error| Failure::because(format!("{file}: {error}")))?;
            Ok(plan.toml())
        }
    }
}
