//! `lunette vm console` and `lunette vm monitor`: the terminals of a guest and of QEMU.

use std::io::Write;

use clap::Args;
use cli_common::{Failure, Outcome, print_line};
use serde_json::{Value, json};
use vm::Qmp;
use vm::running::{CONSOLE_SOCKET, ConsoleEnd, MONITOR_SOCKET, Registry, attach, command_socket};

use super::failed;

/// `lunette vm console`
#[derive(Debug, Args)]
#[command(after_help = AFTER_CONSOLE)]
pub struct ConsoleArguments {
    /// Name of the guest
    name: String,
}

const AFTER_CONSOLE: &str = "\
Prints the last 64 KiB of the console first. Ctrl-] leaves the console, and the guest continues to run. Several terminals may share a console.

Example:
    lunette vm console guest1";

/// `lunette vm monitor`
#[derive(Debug, Args)]
#[command(after_help = AFTER_MONITOR)]
pub struct MonitorArguments {
    /// Name of the guest
    name: String,
    /// Command for QEMU's monitor. Without it, the terminal is connected to the monitor until Ctrl-]
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
}

const AFTER_MONITOR: &str = "\
Examples:
    lunette vm monitor guest1 'info block'
    lunette vm monitor guest1 info pci";

/// Connects the terminal to a guest's console.
///
/// # Errors
/// When the guest has no console.
pub fn console(arguments: &ConsoleArguments) -> Outcome {
    let registry = Registry::open().map_err(failed)?;
    let (place, _) = registry.find(&arguments.name).map_err(failed)?;
    print_line(&format_args!(
        "Ctrl-] leaves the console of {}",
        arguments.name
    ));
    match attach(&place.file(CONSOLE_SOCKET)).map_err(failed)? {
        ConsoleEnd::Detached => {
            print_line(&format_args!("\nguest {} continues to run", arguments.name))
        }
        ConsoleEnd::GuestEnded => print_line(&format_args!("\nguest {} has ended", arguments.name)),
    }
    Ok(())
}

/// Runs a command of QEMU's monitor, or connects the terminal to the monitor.
///
/// # Errors
/// When there is no such command, or no monitor.
pub fn monitor(arguments: &MonitorArguments) -> Outcome {
    let registry = Registry::open().map_err(failed)?;
    let (place, _) = registry.find(&arguments.name).map_err(failed)?;
    if arguments.command.is_empty() {
        print_line(&format_args!(
            "Ctrl-] leaves the monitor of {}",
            arguments.name
        ));
        attach(&place.file(MONITOR_SOCKET)).map_err(failed)?;
        print_line(&"");
        return Ok(());
    }
    let line = arguments.command.join(" ");
    let mut qmp = Qmp::connect(&command_socket(&place)).map_err(failed)?;
    let answer = qmp.command("human-monitor-command", json!({"command-line": line}));
    let answer = answer.map_err(failed)?;
    let text = answer
        .as_str()
        .map_or(Value::to_string(&answer), str::to_owned);
    cli_common::stdout().write_all(text.replace('\r', "").as_bytes())?;
    match text.starts_with("unknown command") {
        true => Err(Failure::because(format!(
            "QEMU has no monitor command {line:?}; hint: lunette vm monitor {} help",
            arguments.name
        ))),
        false => Ok(()),
    }
}
