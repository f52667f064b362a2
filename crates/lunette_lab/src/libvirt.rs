//! `lunette libvirt`: converts topologies to libvirt domains and reads domains.

use std::io::{Read, Write};
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use cli_common::{Failure, Outcome, print_line};
use vm::libvirt::Domain;
use vm::topology::{Plan, PlanOptions};

use crate::vm::{GuestArguments, mistake, running_daemon};

/// `lunette libvirt`
#[derive(Debug, Args)]
#[command(arg_required_else_help = true, after_help = AFTER)]
pub struct LibvirtCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print the domain XML of a guest, with planned disks (as `lunette vm plan --format xml`) or with exports of a running daemon
    #[command(after_help = AFTER_XML)]
    Xml(Box<XmlArguments>),
    /// Read domain XML, and print QEMU's command line for the domain or a Lunette configuration for its disks
    #[command(after_help = AFTER_FROM)]
    FromXml(FromArguments),
}

#[derive(Debug, Args)]
#[command(mut_arg("topology", |topology| topology.required(false).required_unless_present("export")))]
struct XmlArguments {
    #[command(flatten)]
    guest: GuestArguments,
    /// Export of a running daemon, instead of planned disks; may be given several times
    #[arg(long, value_name = "NAME", conflicts_with = "topology")]
    export: Vec<String>,
}

#[derive(Debug, Args)]
struct FromArguments {
    /// Domain XML in the format of virsh dumpxml; - reads stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Output: QEMU's command line or a configuration file
    #[arg(long, value_enum, default_value = "qemu")]
    to: Form,
    /// Folder for the sockets of the exports, and of channels without a path
    #[arg(long, value_name = "FOLDER", default_value = "/tmp")]
    sockets: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// Command line of QEMU
    Qemu,
    /// Configuration file of a daemon that serves the domain's virtio disks
    Toml,
}

const AFTER: &str = "\
Example:
    lunette libvirt xml scsi:4x1 > domain.xml
    lunette libvirt from-xml domain.xml --to toml";

const AFTER_XML: &str = "\
With --export, the names, sockets, queues and logical units are read from the daemon. The daemon is not changed.

Example:
    lunette libvirt xml scsi:4x1 --name guest1 > guest1.xml
    lunette libvirt xml --export d0 --export c0 --control /run/lunette/lunette.sock --name guest1 > guest1.xml";

const AFTER_FROM: &str = "\
Unsupported elements are listed on stderr with their path in the document.

Example:
    virsh dumpxml --inactive guest1 | lunette libvirt from-xml -";

/// Runs a subcommand.
///
/// # Errors
/// The failure of the subcommand.
pub fn run(command: LibvirtCommand) -> Outcome {
    let text = match command.action {
        Action::Xml(arguments) => to_xml(&arguments)?,
        Action::FromXml(arguments) => from_xml(&arguments)?,
    };
    cli_common::stdout().write_all(text.as_bytes())?;
    Ok(())
}

fn to_xml(arguments: &XmlArguments) -> Result<String, Failure> {
    let guest = &arguments.guest;
    if arguments.export.is_empty() {
        return Ok(guest.plan()?.libvirt_xml());
    }
    let (exports, known) = running_daemon::exports(guest.control.as_deref(), &arguments.export)?;
    let options = PlanOptions {
        known,
        ..guest.options()?
    };
    let plan = Plan::of_exports(&exports, options).map_err(mistake)?;
    Ok(plan.libvirt_xml())
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
    let options = PlanOptions {
        sockets: arguments.sockets.clone(),
        ..PlanOptions::default()
    };
    let domain = Domain::read(&text, options)
        .map_err(|error| Failure::because(format!("{file}: {error}")))?;
    for element in &domain.unread {
        print_line(&format_args!("lunette: {file}: unsupported: {element}"));
    }
    match arguments.to {
        Form::Qemu => Ok(domain.plan.qemu_text()),
        Form::Toml => Ok(domain.served(&arguments.sockets).toml()),
    }
}
