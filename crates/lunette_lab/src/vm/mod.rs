//! `lunette vm`: guests with disks of Lunette, or of QEMU for comparison. One file per subcommand or group of subcommands.

mod bench;
mod console;
mod copy;
mod exec;
mod guest;
mod latency;
mod list;
mod mcs;
mod migrate;
mod net;
mod plan;
mod planned;
mod plug;
mod profile;
mod replay;
mod run;
pub mod running_daemon;
mod setup;
mod share;
mod stop;
mod study;
mod watch;

use clap::{Args, Subcommand};
use cli_common::{Failure, Outcome};

pub use guest::{GuestArguments, mistake};

/// `lunette vm`
#[derive(Debug, Args)]
#[command(arg_required_else_help = true, after_help = AFTER)]
pub struct VmCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print the commands that serve disks and start a guest with them, and the names of the disks in the guest
    Plan(Box<plan::PlanArguments>),
    /// Download the small system that guests boot
    Setup(setup::SetupArguments),
    /// Run a guest, and a daemon that serves its disks
    Run(Box<run::RunArguments>),
    /// List the guests of this user
    List(list::ListArguments),
    /// Run a command in a guest
    Exec(exec::ExecArguments),
    /// Run a fio job file in a guest, and print the results and the CPU time
    Bench(Box<bench::BenchArguments>),
    /// Compare disks in a guest with bare metal: measure the host, Lunette and QEMU in turns
    Compare(Box<study::compare::CompareArguments>),
    /// Measure both transports in guests with several numbers of threads, in fifteen cases: five mixtures of reads and writes at three
    /// depths
    Matrix(Box<study::matrix::MatrixArguments>),
    /// Measure the latency of each layer between an application in a guest and the disk
    Latency(Box<latency::LatencyArguments>),
    /// Profile the CPUs of a guest and of its host, with one queue and with several
    Profile(Box<profile::ProfileArguments>),
    /// Replay a published study, and print its findings beside those of this machine
    Study(replay::StudyArguments),
    /// Measure one iSCSI session with several connections (MC/S) between two guests
    Mcs(mcs::McsArguments),
    /// Move a running guest to a second QEMU (live migration), and print the downtime
    Migrate(migrate::MigrateArguments),
    /// Copy a file into a guest, or out of it
    Copy(copy::CopyArguments),
    /// Connect the terminal to a guest's console
    Console(console::ConsoleArguments),
    /// Send a command to QEMU's monitor
    Monitor(console::MonitorArguments),
    /// Plug a disk into a running guest
    Plug(plug::PlugArguments),
    /// Remove a plugged disk
    Unplug(plug::UnplugArguments),
    /// Power a guest off
    Stop(stop::StopArguments),
    /// Reboot a guest
    Reboot(stop::StopArguments),
    /// Power a guest off without its cooperation
    Kill(stop::KillArguments),
    /// Clean up after a guest
    #[command(hide = true)]
    Watch(watch::WatchArguments),
}

const AFTER: &str = "\
Examples:
    lunette vm plan scsi:4x1,queues=2 blk:1
    lunette vm setup
    lunette vm run --detach --name guest1 scsi:4x1,queues=2 backing=ram:256M
    lunette vm exec guest1 'cat /proc/partitions'
    lunette vm stop guest1";

/// Runs a subcommand.
///
/// # Errors
/// The failure of the subcommand.
pub fn run(command: VmCommand) -> Outcome {
    vm::use_data_folder().map_err(failed)?;
    act(command).map_err(|failure| match (failure, vm::signal()) {
        // `vm::signal` has the number, such as 15 for exit code 143.
        (Failure::Interrupted, Some(number)) => Failure::Signal(number as u8),
        (failure, _) => failure,
    })
}

fn act(command: VmCommand) -> Outcome {
    match command.action {
        Action::Plan(arguments) => plan::run(&arguments),
        Action::Setup(arguments) => setup::run(&arguments),
        Action::Run(arguments) => run::run(&arguments),
        Action::List(arguments) => list::run(&arguments),
        Action::Exec(arguments) => exec::run(arguments),
        Action::Bench(arguments) => bench::run(&arguments),
        Action::Compare(arguments) => study::compare::run(&arguments),
        Action::Latency(arguments) => latency::run(&arguments),
        Action::Matrix(arguments) => study::matrix::run(&arguments),
        Action::Profile(arguments) => profile::run(&arguments),
        Action::Study(arguments) => replay::run(&arguments),
        Action::Mcs(arguments) => mcs::run(&arguments),
        Action::Migrate(arguments) => migrate::run(&arguments),
        Action::Copy(arguments) => copy::run(&arguments),
        Action::Console(arguments) => console::console(&arguments),
        Action::Monitor(arguments) => console::monitor(&arguments),
        Action::Plug(arguments) => plug::plug(&arguments),
        Action::Unplug(arguments) => plug::unplug(&arguments),
        Action::Stop(arguments) => stop::stop(&arguments),
        Action::Reboot(arguments) => stop::reboot(&arguments),
        Action::Kill(arguments) => stop::kill(&arguments),
        Action::Watch(arguments) => watch::run(&arguments),
    }
}

/// Converts an error with all its causes.
fn failed(error: anyhow::Error) -> Failure {
    Failure::because(format!("{error:#}"))
}
