//! `lunette vm run --control`: the guest's disks and exports in a daemon that runs already, for as long as the guest does.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use cli_common::find_sibling;
use control::{Client, ClientError, escape};
use serde_json::Value;
use vm::running::Supervisor;

/// Makes what a daemon's flags describe in the daemon at `control`. Each thing is noted before it is made, so that the guest's
/// watcher removes it, however the guest ends.
pub fn add(supervisor: &mut Supervisor, control: &Path, flags: &[String]) -> Result<()> {
    for pair in flags.chunks(2) {
        let [flag, value] = pair else {
            bail!("a flag without a value: {pair:?}");
        };
        let name = value.split([':', '=', '/']).next().unwrap_or_default();
        let (words, path): (Vec<&str>, _) = match flag.as_str() {
            "--disk" => (
                vec!["disk", "add", value],
                format!("/v1/disks/{}", escape(name)),
            ),
            "--vhost-blk" => (vec!["export", "add", "vhost-blk", value], export(name)),
            "--vhost-scsi" => (vec!["export", "add", "vhost-scsi", value], export(name)),
            "--lun" => {
                let (controller, rest) = value.split_once('/').context("a strange LUN")?;
                let (address, disk) = rest.split_once('=').context("a strange LUN")?;
                // It goes with its controller.
                ask(control, &["lun", "add", controller, address, disk])?;
                continue;
            }
            other => bail!("{other} is no flag of a guest's daemon"),
        };
        ensure!(
            !exists(control, &path)?,
            "the daemon at {} has {name} already; hint: choose another --name, or name its disks by backing=daemon:DISK+DISK",
            control.display()
        );
        supervisor.watcher()?.delete_at_end(control, &path)?;
        ask(control, &words)?;
    }
    Ok(())
}

fn export(name: &str) -> String {
    format!("/v1/exports/{}", escape(name))
}

fn exists(control: &Path, path: &str) -> Result<bool> {
    match Client::new(control).get::<Value>(path) {
        Ok(_) => Ok(true),
        Err(ClientError::Problem { problem }) if problem.status == 404 => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// `lunette WORDS`, which knows the words that describe disks and exports.
pub fn ask(control: &Path, words: &[&str]) -> Result<()> {
    let program = find_sibling("lunette")
        .map_err(|_| anyhow::anyhow!("there is no lunette beside this program or in PATH"))?;
    let output = Command::new(program)
        .args(words)
        .arg("--socket")
        .arg(control)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}",
        said.trim().trim_start_matches("lunette: ")
    );
    Ok(())
}
