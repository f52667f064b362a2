//! Definition of the command line. Values are text here; `config` parses and checks them, so that mistakes in flags and files are reported
//! alike.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use cli_common::{CompletionArguments, DaemonAddress, LogOptions, ManArguments};
use config::Flags;

use crate::daemon_flags::DaemonFlags;
use crate::lab::LabArguments;
use crate::objects::arguments::{
    ConfigCommand, DiskCommand, ExportCommand, JobCommand, LookArguments, LunCommand,
    ReloadArguments, ReservationCommand, SessionCommand, StateCommand,
};
use crate::objects::backup::BackupCommand;
use crate::rbd::RbdCommand;

/// Serves disks to virtual machines and measures the latency of every request, stage by stage.
#[derive(Debug, Parser)]
#[command(
    name = "lunette",
    version,
    arg_required_else_help = true,
    disable_help_subcommand = true,
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
Quick start: one RAM disk as virtio-blk, and QEMU's options to use it

  lunette serve --disk d0=ram:512M --vhost-blk d0:/tmp/d0.sock

  qemu-system-x86_64 ... -machine q35,memory-backend=mem -m 1G \\
    -object memory-backend-memfd,id=mem,size=1G,share=on \\
    -chardev socket,id=c0,path=/tmp/d0.sock,reconnect=1 \\
    -device vhost-user-blk-pci,chardev=c0

  lunette latency";

/// Subcommands of `lunette`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve disks until SIGTERM or SIGINT
    Serve(ServeArguments),
    /// Check a configuration without starting anything
    Check(CheckArguments),
    /// Replace the program of a running daemon while guests stay connected
    Upgrade(UpgradeArguments),
    /// Show the state of the daemon, its exports and its clients
    Status(LookArguments),
    /// List and change the disks of a running daemon
    Disk(DiskCommand),
    /// Show and control jobs on disks: mirrors, backups, streams
    Job(JobCommand),
    /// Back up disks at one moment: copy them, or serve them to a backup program over NBD
    Backup(BackupCommand),
    /// List and change the exports of a running daemon
    Export(ExportCommand),
    /// List and change logical units of controllers and targets
    Lun(LunCommand),
    /// List the clients of a running daemon, and end iSCSI and NBD sessions
    Session(SessionCommand),
    /// List registrations and reservations of initiators
    Reservation(ReservationCommand),
    /// List the files of the state folder, and reset damaged ones
    State(StateCommand),
    /// Show the configuration that is in effect, and changes made at run time
    Config(ConfigCommand),
    /// Reload the configuration file of a running daemon
    Reload(ReloadArguments),
    /// List images of a Ceph cluster
    Rbd(RbdCommand),
    /// Show the latency of requests, stage by stage
    Latency(LatencyArguments),
    /// Write a report about a running daemon to one file, for a browser or a support request
    Report(ReportArguments),
    /// Show rates and latencies on the whole screen, updated every second
    #[command(disable_help_flag = true, after_help = AFTER_TOP)]
    Top(LabArguments),
    /// Show or set the log filter of a running daemon
    Log(LogArguments),
    /// Measure vhost-user devices, files, iSCSI logical units and NBD exports with a built-in driver (implemented in lunette-lab)
    #[command(disable_help_flag = true, after_help = AFTER_BENCH)]
    Bench(LabArguments),
    /// Test any vhost-user back end against virtio 1.3 and the vhost-user specification
    #[command(disable_help_flag = true, after_help = AFTER_CONFORMANCE)]
    Conformance(LabArguments),
    /// Find host settings that slow down virtual machine disks, and print commands that change them
    #[command(disable_help_flag = true, after_help = AFTER_DOCTOR)]
    Doctor(LabArguments),
    /// Create, check and convert qcow2 images that are not in use
    #[command(disable_help_flag = true, after_help = AFTER_IMAGE)]
    Image(LabArguments),
    /// Inspect iSCSI targets and copy their disks, without a kernel driver
    #[command(disable_help_flag = true, after_help = AFTER_ISCSI)]
    Iscsi(LabArguments),
    /// Create and read libvirt domains (implemented in lunette-lab)
    #[command(disable_help_flag = true, after_help = AFTER_LIBVIRT)]
    Libvirt(LabArguments),
    /// Plan and run guests with disks of Lunette, or of QEMU for comparison (implemented in lunette-lab)
    #[command(disable_help_flag = true, after_help = AFTER_VM)]
    Vm(LabArguments),
    /// Serve one file as virtio-blk, with the options of QEMU's back-end programs
    VhostUserBlk(BlkProgram),
    /// Serve files as a virtio-scsi controller, with the options of QEMU's back-end programs
    VhostUserScsi(ScsiProgram),
    /// Print the completion script for a shell
    #[command(after_help = AFTER_COMPLETION)]
    Completion(CompletionArguments),
    /// List the keys of disks, exports and the daemon, or show the help of a command
    #[command(after_help = AFTER_HELP)]
    Help(HelpArguments),
    /// Write man pages into a folder
    #[command(hide = true, after_help = AFTER_MAN)]
    Man(ManArguments),
}

/// Objects to serve. Flags add objects to those of the file and override its single values.
#[derive(Clone, Debug, Default, Args)]
pub struct Configuration {
    /// Read the configuration from this TOML file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Add a disk, then ,KEY=VALUE as needed; may be given several times (keys: lunette help disk)
    #[arg(long, value_name = "NAME=BACKEND:...")]
    pub disk: Vec<String>,
    /// Export a disk as virtio-blk on a vhost-user socket, then ,KEY=VALUE as needed (keys: lunette help vhost-blk)
    #[arg(long, value_name = "DISK:SOCKET")]
    pub vhost_blk: Vec<String>,
    /// Export a virtio-scsi controller on a vhost-user socket, then ,KEY=VALUE as needed (keys: lunette help vhost-scsi)
    #[arg(long, value_name = "NAME:SOCKET")]
    pub vhost_scsi: Vec<String>,
    /// Add a disk to a virtio-scsi controller: target 0 to 255, LUN 0 to 16383; may be given several times
    #[arg(long, value_name = "CONTROLLER/TARGET:LUN=DISK")]
    pub lun: Vec<String>,
    /// Export an iSCSI target with these disks as LUNs from 0, then ,KEY=VALUE as needed (keys: lunette help iscsi)
    #[arg(long, value_name = "IQN=DISK,...")]
    pub iscsi: Vec<String>,
    /// Export a disk over NBD on a Unix socket or a TCP address, then ,KEY=VALUE as needed (keys: lunette help nbd)
    #[arg(long, value_name = "DISK:SOCKET|DISK:ADDRESS:PORT")]
    pub nbd: Vec<String>,
    /// Portal of the targets of --iscsi, with a port [default: 3260] and a portal group [default: 1]; may be given several times
    #[arg(long, value_name = "ADDRESS:PORT,GROUP")]
    pub portal: Vec<String>,
    /// Address in discovery responses for the targets of --iscsi, instead of the portals of the same group, such as a public address
    #[arg(long, value_name = "ADDRESS:PORT,GROUP")]
    pub announce: Vec<String>,
    /// Access of initiators without a CHAP user to the targets of --iscsi: none, ro or rw [default: none]
    #[arg(long, value_name = "MODE")]
    pub demo_mode: Option<String>,
    /// File with the CHAP users of the targets of --iscsi: mode 600, one line NAME SECRET [TARGET_NAME TARGET_SECRET] per user
    #[arg(long, value_name = "FILE")]
    pub chap_user: Option<String>,
    /// Flags of the daemon itself
    #[command(flatten)]
    pub daemon: DaemonFlags,
}

impl Configuration {
    /// Returns the flags for the parser of the configuration.
    pub fn flags(&self) -> Flags {
        Flags {
            disk: self.disk.clone(),
            vhost_blk: self.vhost_blk.clone(),
            vhost_scsi: self.vhost_scsi.clone(),
            iscsi: self.iscsi.clone(),
            nbd: self.nbd.clone(),
            portal: self.portal.clone(),
            announce: self.announce.clone(),
            demo_mode: self.demo_mode.clone(),
            chap_user: self.chap_user.clone(),
            lun: self.lun.clone(),
            daemon: self.daemon.0.clone(),
        }
    }
}

/// `lunette serve`
#[derive(Debug, Args)]
#[command(after_help = AFTER_SERVE)]
pub struct ServeArguments {
    /// Objects to serve
    #[command(flatten)]
    pub configuration: Configuration,
    /// Do not record the time stamps of the stages; for measurements of their cost (lunette bench stamp-cost)
    #[arg(long)]
    pub without_stamps: bool,
    /// Take over the vhost-user sessions of the daemon at the control socket, which then exits; used by lunette upgrade
    #[arg(long)]
    pub take_over: bool,
}

/// `lunette upgrade`
#[derive(Debug, Args)]
#[command(after_help = AFTER_UPGRADE)]
pub struct UpgradeArguments {
    /// Address of the daemon
    #[command(flatten)]
    pub daemon: DaemonAddress,
    /// Program to start [default: the program of this command]
    #[arg(long, value_name = "PROGRAM")]
    pub to: Option<PathBuf>,
    /// Upgrade even if RAM disks without persist=memfd lose their content
    #[arg(long)]
    pub lose_ram_disks: bool,
    /// Upgrade even if jobs are running; they end, and their disks stay unchanged
    #[arg(long)]
    pub end_jobs: bool,
    /// Upgrade even if lunette reload would refuse the configuration file, or if a disk or front end does not respond; affected clients may lose their sessions
    #[arg(long)]
    pub force: bool,
    /// Print the version of the handover protocol
    #[arg(long, hide = true)]
    pub handover_version: bool,
}

/// `lunette report`
#[derive(Debug, Args)]
#[command(after_help = AFTER_REPORT)]
pub struct ReportArguments {
    /// Address of the daemon
    #[command(flatten)]
    pub daemon: DaemonAddress,
    /// Duration of the measurement in seconds: 1 to 240
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub seconds: u64,
    /// Output file; - is the standard output
    #[arg(long, value_name = "FILE", default_value = "lunette-report.html")]
    pub out: PathBuf,
    /// Replace names of disks, exports and initiators, serial numbers and paths by placeholders
    #[arg(long)]
    pub redact: bool,
}

/// `lunette help`
#[derive(Debug, Args)]
pub struct HelpArguments {
    /// disk, export, vhost-blk, vhost-scsi, iscsi, nbd, lun, acl, iscsi-limits or daemon for a list of keys; or a command
    #[arg(value_name = "TOPIC|COMMAND")]
    pub words: Vec<String>,
}

const AFTER_HELP: &str = "\
Examples:
    lunette help disk                         lists the keys of --disk and [[disk]]
    lunette help export                       lists the keys of all kinds of exports
    lunette help serve                        shows the options of a command
    lunette help disk add

Each line has a key, its unit or values, its default and its meaning.";

const AFTER_REPORT: &str = "\
Examples:
    lunette report
    lunette report --seconds 60 --redact --out slow-writes.html

The file is the daemon's web page with recorded data: disks, stages of requests, a heat map of latencies, the slowest
requests, exports, jobs, workers and sessions. It needs no network. It contains no disk contents.";

const AFTER_UPGRADE: &str = "\
Examples:
    lunette upgrade                           starts the program of this command
    lunette upgrade --to /opt/lunette-1.3/bin/lunette

Guests with vhost-user disks stay connected; their I/O pauses for some milliseconds. iSCSI initiators log in again.
The new daemon has the arguments, the working directory and the output of the old one. For a daemon that systemd runs,
use systemctl restart lunette instead.
Exit code 0: the new daemon serves. 1: the old daemon serves, possibly after a restart, or the message states that no
daemon serves.";

const AFTER_SERVE: &str = "\
Examples:

  Two disks as virtio-blk, and one of them also on a SCSI controller
    lunette serve --disk d0=ram:512M --disk d1=file:vm.raw,size=10G,cache=none \\
      --vhost-blk d0:d0.sock --vhost-blk d1:d1.sock \\
      --vhost-scsi c0:c0.sock --lun c0/0:0=d1

  A RAM disk for any iSCSI initiator
    lunette serve --disk d0=ram:1G --iscsi iqn.2026-11.org.example:t0=d0 --portal 127.0.0.1:3260 \\
      --demo-mode rw

  An image of a Ceph cluster
    lunette serve --disk d0=rbd:rbd/vm1,id=lunette --vhost-blk d0:d0.sock

  A configuration file, on CPUs 2 and 3
    lunette serve --config /etc/lunette/lunette.toml --cpus 2,3

Prints a line `ready KIND NAME SOCKET` for each export as soon as clients can connect.
Sizes are in bytes, or with K, M, G, T, P or E (powers of 1024). A comma in a path is written twice.
SIGTERM and SIGINT stop the daemon. SIGHUP reloads the file. SIGUSR1 prints the latency tables to stderr.";

/// `lunette check`
#[derive(Debug, Args)]
#[command(after_help = AFTER_CHECK)]
pub struct CheckArguments {
    /// Configuration to check
    #[command(flatten)]
    pub configuration: Configuration,
    /// Print {"valid": ..., "mistakes": [{file, line, column, message, allowed, help}], "warnings": [...]} to stdout
    #[arg(long)]
    pub json: bool,
}

const AFTER_CHECK: &str = "\
Examples:
    lunette check --config lunette.toml
    lunette check --config lunette.toml --lun vm0/4:0=scratch --json

Prints all mistakes at once. Exit code 0: no mistakes, possibly warnings. 2: mistakes in the configuration. 1: a start would fail for another reason. `lunette serve` has the same codes.";

/// `lunette latency`
#[derive(Debug, Args)]
#[command(after_help = AFTER_LATENCY)]
pub struct LatencyArguments {
    /// Show only this export, disk or queue (EXPORT/NUMBER) [default: all exports]. The tables of a disk cover the requests to it through
    /// all exports
    #[arg(value_name = "EXPORT|DISK|QUEUE")]
    pub selector: Option<String>,
    /// Address of the daemon
    #[command(flatten)]
    pub daemon: DaemonAddress,
    /// Print JSON; with --watch one object per line
    #[arg(long)]
    pub json: bool,
    /// Print the N slowest requests of the last minute, stage by stage [default: 10]
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "10",
        conflicts_with = "watch")]
    pub slowest: Option<usize>,
    /// Print changes and rates repeatedly, at this interval in seconds: 0.1 to 86400 [default: 1]
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1")]
    pub watch: Option<f64>,
}

const AFTER_LATENCY: &str = "\
Examples:
    lunette latency                 all exports
    lunette latency d0              the disk or the export d0
    lunette latency c0/3            queue 3 of the export c0
    lunette latency --watch=5       changes and rates every 5 seconds
    lunette latency --slowest=3     the three slowest requests of the last minute
    lunette latency --json | jq .

The stages of a request, each measured from the one before:
    noticed    the worker notices the request
    popped     the request is taken from the ring
    parsed     its header is parsed and its range checked
    awaited    the first of the requested data has arrived            (iSCSI: R2T)
    received   all requested data have arrived                        (iSCSI)
    submitted  the block device gets the I/O
    reaped     the block device has completed it                      (service time; the other stages are queueing)
    answered   the status is written, the buffer is returned
    notified   the client is notified";

/// `lunette log`
#[derive(Debug, Args)]
#[command(after_help = AFTER_LOG)]
pub struct LogArguments {
    /// New filter: a level (off, error, warn, info, debug, trace), or PART=LEVEL,... Without it, the present filter is printed
    #[arg(value_name = "FILTER")]
    pub filter: Option<String>,
    /// Address of the daemon
    #[command(flatten)]
    pub daemon: DaemonAddress,
}

const AFTER_LOG: &str = "\
Examples:
    lunette log                           print the filter
    lunette log debug                     debug messages of all parts
    lunette log info,vhost_user=debug     debug messages of one part
    lunette log warn                      warnings and errors only

The filter applies until the daemon ends. `lunette serve --log FILTER` sets the initial filter.
Parts are the names in front of log lines: vhost_user, virtio_scsi, iscsi_target, daemon, ...";

const AFTER_LIBVIRT: &str = "\
Example:
    lunette libvirt from-xml domain.xml --to toml";

const AFTER_TOP: &str = "\
Options: lunette top --help. Needs the program lunette-lab in the folder of lunette or in PATH.

Example:
    lunette top disks";

const AFTER_VM: &str = "\
Examples:
    lunette vm plan scsi:4x1,queues=2 blk:1
    lunette vm run --detach --name guest1 blk:2 backing=ram:256M
    lunette vm exec guest1 'cat /proc/partitions'";

const AFTER_BENCH: &str = "\
Options: lunette bench --help. Needs the program lunette-lab in the folder of lunette or in PATH.

Example:
    lunette bench vhost-user-blk:/tmp/d0.sock --rw randread --bs 4k --iodepth 32";

const AFTER_CONFORMANCE: &str = "\
Options: lunette conformance --help. Needs the program lunette-lab in the folder of lunette or in PATH.

Example:
    lunette conformance vhost-user-blk:/tmp/d0.sock";

const AFTER_DOCTOR: &str = "\
Options: lunette doctor --help. Needs the program lunette-lab in the folder of lunette or in PATH.

Example:
    lunette doctor /srv/vm1.raw";

const AFTER_IMAGE: &str = "\
Commands: lunette image --help. Needs the program lunette-lab in the folder of lunette or in PATH.

Example:
    lunette image create vm.qcow2 20G";

const AFTER_ISCSI: &str = "\
Commands: lunette iscsi --help. Needs the program lunette-lab in the folder of lunette or in PATH.

Example:
    lunette iscsi discover 192.0.2.1";

const AFTER_COMPLETION: &str = "\
Examples:
    lunette completion bash > ~/.local/share/bash-completion/completions/lunette
    lunette completion fish > ~/.config/fish/completions/lunette.fish
    lunette completion zsh > ~/.zfunc/_lunette";

const AFTER_MAN: &str = "\
Example:
    lunette man /usr/local/share/man";

/// Common arguments of both back-end programs.
#[derive(Clone, Debug, Args)]
pub struct ProgramArguments {
    /// Listen on this path; a stale socket is replaced
    #[arg(
        long,
        value_name = "PATH",
        required_unless_present = "fd",
        conflicts_with = "fd"
    )]
    pub socket_path: Option<PathBuf>,
    /// Use this inherited file descriptor: a listening socket, or a connection. The program exits when the connection ends
    #[arg(long, value_name = "FDNUM")]
    pub fd: Option<i32>,
    /// Print the capabilities as JSON and exit; other options are ignored
    #[arg(long)]
    pub print_capabilities: bool,
    /// Serve read-only: writes fail
    #[arg(long, alias = "readonly")]
    pub read_only: bool,
    /// Cache mode: none (O_DIRECT), writeback (writes are durable after a flush) or writethrough (each write is durable when it
    /// completes)
    #[arg(long, value_name = "MODE", default_value = "none")]
    pub cache: String,
    /// Maximum number of request queues: 1 to 256 for vhost-user-blk, 1 to 254 for vhost-user-scsi [default: the maximum]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub num_queues: Option<u16>,
}

/// `lunette vhost-user-blk`
#[derive(Clone, Debug, Args)]
#[command(after_help = AFTER_BLK)]
pub struct BlkProgram {
    /// File or block device to serve
    #[arg(long, value_name = "PATH", required = true)]
    pub blk_file: PathBuf,
    /// Common arguments
    #[command(flatten)]
    pub common: ProgramArguments,
}

const AFTER_BLK: &str = "\
Follows the conventions of vhost-user back-end programs (QEMU, docs/interop/vhost-user).

Examples:
    lunette vhost-user-blk --socket-path /tmp/d0.sock --blk-file vm.raw
    lunette vhost-user-blk --print-capabilities";

/// `lunette vhost-user-scsi`
#[derive(Clone, Debug, Args)]
#[command(after_help = AFTER_SCSI)]
pub struct ScsiProgram {
    /// File or block device to serve; may be given several times. The files become LUN 0, 1, 2, ... of target 0 in this order
    #[arg(long, value_name = "PATH", required = true)]
    pub blk_file: Vec<PathBuf>,
    /// Common arguments
    #[command(flatten)]
    pub common: ProgramArguments,
}

const AFTER_SCSI: &str = "\
Follows the conventions of vhost-user back-end programs (QEMU, docs/interop/vhost-user).

Examples:
    lunette vhost-user-scsi --socket-path /tmp/c0.sock --blk-file a.raw --blk-file b.raw
    lunette vhost-user-scsi --print-capabilities";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_makes_sense() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_subcommand_teaches_by_example() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string);
            let example = format!("lunette {}", command.get_name());
            assert!(
                help.is_some_and(|help| help.contains(&example)),
                "{example}"
            );
        }
    }

    #[test]
    fn watch_has_an_optional_interval_and_does_not_eat_the_selector() {
        let parse = |words: &[&str]| match Cli::parse_from(words).command {
            Command::Latency(arguments) => (arguments.watch, arguments.selector),
            other => panic!("{other:?}"),
        };
        let watch = parse(&["lunette", "latency", "--watch", "d0"]);
        assert_eq!(watch, (Some(1.0), Some("d0".to_owned())));
        assert_eq!(
            parse(&["lunette", "latency", "--watch=2.5"]),
            (Some(2.5), None)
        );
    }
}
