//! `lunette vm stop`, `reboot` and `kill`.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use cli_common::{Outcome, print_line};
use serde_json::json;
use vm::Qmp;
use vm::running::{
    AGENT_SOCKET, ExecInput, IS_MIGRATING, Registry, RuntimeFolder, SECONDS_MAX, State,
    command_socket, exec, terminate,
};

use super::failed;

/// `lunette vm stop`, `lunette vm reboot`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct StopArguments {
    /// Name of the guest
    name: String,
    /// Time limit in seconds for the guest to power off or reboot
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(..=SECONDS_MAX))]
    within: u64,
}

const AFTER: &str = "\
Uses the guest's agent or, in a system without the agent, the power or reset button. `lunette vm kill` ends a guest that
does not react.

Examples:
    lunette vm stop guest1
    lunette vm reboot guest1 --within 30";

/// `lunette vm kill`
#[derive(Debug, Args)]
#[command(after_help = AFTER_KILL)]
pub struct KillArguments {
    /// Name of the guest
    name: String,
}

const AFTER_KILL: &str = "\
The guest stops at once and loses data that it has not flushed. Its daemon flushes its disks and exits normally. For a guest
in the state dead, the command removes its files.

Example:
    lunette vm kill guest1";

/// Time for the supervisor to end QEMU and then the daemon, which flushes.
const KILL_LIMIT: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Powers a guest off.
///
/// # Errors
/// When the guest does not react.
pub fn stop(arguments: &StopArguments) -> Outcome {
    let limit = Duration::from_secs(arguments.within);
    let stopped = find(&arguments.name).and_then(|(place, state)| {
        match has_agent(&state) {
            true => ask_agent(&place, "sync; poweroff -f")?,
            false => ask_qemu(&place, "system_powerdown")?,
        }
        wait(limit, || (!place.is_held()).then_some(())).with_context(|| {
            format!(
                "guest {0} did not power off within {1} s; hint: lunette vm kill {0}",
                arguments.name, arguments.within
            )
        })
    });
    stopped.map_err(failed)
}

/// Reboots a guest. With an agent, waits until it is up again.
///
/// # Errors
/// When the guest does not react.
pub fn reboot(arguments: &StopArguments) -> Outcome {
    let limit = Duration::from_secs(arguments.within);
    let rebooted = find(&arguments.name).and_then(|(place, state)| {
        if !has_agent(&state) {
            return ask_qemu(&place, "system_reset");
        }
        ask_agent(&place, "sync; reboot -f")?;
        let again = || {
            let now = place.state().ok();
            now.is_none_or(|now| now.boots > state.boots).then_some(())
        };
        wait(limit, again).with_context(|| {
            format!(
                "guest {0} did not boot again within {1} s; hint: lunette vm console {0}",
                arguments.name, arguments.within
            )
        })?;
        match place.is_held() {
            true => Ok(()),
            false => bail!("guest {} has ended", arguments.name),
        }
    });
    rebooted.map_err(failed)
}

/// Kills a guest, or removes the remains of a dead one.
///
/// # Errors
/// When there is no guest with this name.
pub fn kill(arguments: &KillArguments) -> Outcome {
    let registry = Registry::open().map_err(failed)?;
    let place = registry.runtime_folder(&arguments.name).map_err(failed)?;
    if place.folder().exists() && place.remove_left_over().map_err(failed)? {
        print_line(&format_args!(
            "guest {} was dead; its files are removed",
            arguments.name
        ));
        return Ok(());
    }
    let killed = find(&arguments.name).and_then(|(place, state)| {
        let gone = || (!place.is_held()).then_some(());
        terminate(state.supervisor, false);
        if wait(KILL_LIMIT, gone).is_none() {
            // The watcher cleans up.
            terminate(state.supervisor, true);
            wait(KILL_LIMIT, || (!place.folder().exists()).then_some(()))
                .with_context(|| format!("cannot end process {}", state.supervisor))?;
        }
        Ok(())
    });
    killed.map_err(failed)
}

fn find(name: &str) -> Result<(RuntimeFolder, State)> {
    Registry::open()?.find(name)
}

fn has_agent(state: &State) -> bool {
    state.boots > 0
}

/// Runs a script that ends the guest. Its result is ignored, because the agent ends with the system; the caller
/// waits for the guest. Fails during a migration.
fn ask_agent(place: &RuntimeFolder, script: &str) -> Result<()> {
    let socket = place.file(AGENT_SOCKET);
    let (mut output, mut errors) = (std::io::sink(), std::io::sink());
    let script = script.as_bytes();
    let ended = exec(
        &socket,
        script,
        ExecInput::Nothing,
        &mut output,
        &mut errors,
        None,
    );
    match ended {
        Err(error) if error.to_string() == IS_MIGRATING => Err(error),
        _ => Ok(()),
    }
}

fn ask_qemu(place: &RuntimeFolder, command: &str) -> Result<()> {
    let mut qmp = Qmp::connect(&command_socket(place))?;
    qmp.command(command, json!({})).map(drop)
}

fn wait<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    loop {
        match condition() {
            Some(value) => return Some(value),
            None if Instant::now() >= end => return None,
            None => std::thread::sleep(LOOK_AGAIN),
        }
    }
}
