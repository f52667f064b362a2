//! Access to a running daemon: its disks and exports, and `lunette vm run --control`, which adds the objects of a guest while it runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use cli_common::{Failure, find_sibling};
use control::objects::{Disk, Export};
use control::{Client, ClientError, escape};
use serde_json::Value;
use vm::running::Supervisor;
use vm::topology::{Backing, ExportContent, KnownDisk, KnownExport, KnownUnit, Topology};

/// Creates the objects of a daemon's flags in the daemon at `control`. Each object is recorded before its creation, so that the guest's
/// watcher removes it, however the guest ends.
pub fn add(supervisor: &mut Supervisor, control: &Path, flags: &[String]) -> Result<()> {
    for pair in flags.chunks(2) {
        let [flag, value] = pair else {
            bail!("flag without a value: {pair:?}");
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
                let (controller, rest) = value.split_once('/').context("malformed LUN")?;
                let (address, disk) = rest.split_once('=').context("malformed LUN")?;
                // Removed together with its controller.
                ask(control, &["lun", "add", controller, address, disk])?;
                continue;
            }
            other => bail!("{other} is not a flag of a guest's daemon"),
        };
        ensure!(
            !exists(control, &path)?,
            "the daemon at {} already has {name}; hint: choose another --name, or use its disks with backing=daemon:DISK+DISK",
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

/// Runs `lunette WORDS`, which parses descriptions of disks and exports.
pub fn ask(control: &Path, words: &[&str]) -> Result<()> {
    let program = find_sibling("lunette").map_err(|_| {
        anyhow::anyhow!("cannot find lunette in the folder of this program or in PATH")
    })?;
    let output = Command::new(program)
        .args(words)
        .arg("--socket")
        .arg(control)
        .output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}",
        stderr.trim().trim_start_matches("lunette: ")
    );
    Ok(())
}

/// Queries the disks that a topology refers to from the daemon at `control`, by default the system's daemon, if it runs. Without a
/// daemon the result is empty, and the plan contains commands to find them.
pub fn known(
    control: Option<&Path>,
    topology: &Topology,
) -> Result<BTreeMap<String, KnownDisk>, Failure> {
    let groups = topology.groups.iter();
    let named = groups.filter_map(|group| match &group.backing {
        Backing::Daemon(disks) => Some((&group.word, disks)),
        _ => None,
    });
    let named: Vec<_> = named.collect();
    let socket = match control {
        Some(control) => Some(control.to_owned()),
        None => control::default_socket().filter(|socket| socket.exists()),
    };
    let (Some(socket), false) = (socket, named.is_empty()) else {
        return Ok(BTreeMap::new());
    };
    let disks = match Client::new(&socket).get::<Vec<Disk>>("/v1/disks") {
        Ok(disks) => disks,
        // The default socket has no daemon.
        Err(_) if control.is_none() => return Ok(BTreeMap::new()),
        Err(error) => return Err(unanswered(&socket, &error)),
    };
    let known = all_known(&disks);
    for (word, names) in named {
        if let Some(name) = names.iter().find(|name| !known.contains_key(*name)) {
            return Err(Failure::mistake(format!(
                "{word}: the daemon at {} has no disk {name}; its disks: {}; hint: lunette disk list --socket {}",
                socket.display(),
                listed(known.keys()),
                socket.display()
            )));
        }
    }
    Ok(known)
}

/// Returns these exports of the daemon at `control`, and all its disks.
pub fn exports(
    control: Option<&Path>,
    names: &[String],
) -> Result<(Vec<KnownExport>, BTreeMap<String, KnownDisk>), Failure> {
    let socket = match control {
        Some(control) => control.to_owned(),
        None => control::default_socket()
            .ok_or_else(|| Failure::mistake("--export needs a daemon; hint: --control SOCKET"))?,
    };
    let client = Client::new(&socket);
    let lacks = |error| unanswered(&socket, &error);
    let disks: Vec<Disk> = client.get("/v1/disks").map_err(lacks)?;
    let exports: Vec<Export> = client.get("/v1/exports").map_err(lacks)?;
    let found = names.iter().map(|name| {
        let export = exports.iter().find(|export| export.name == *name);
        let export = export.ok_or_else(|| {
            Failure::mistake(format!(
                "the daemon at {} has no export {name}; its exports: {}; hint: lunette export list --socket {}",
                socket.display(),
                listed(exports.iter().map(|export| export.name.as_str())),
                socket.display()
            ))
        })?;
        known_export(export)
    });
    Ok((found.collect::<Result<_, _>>()?, all_known(&disks)))
}

fn known_export(export: &Export) -> Result<KnownExport, Failure> {
    let Some(socket) = export.socket() else {
        return Err(Failure::mistake(format!(
            "{} is an iSCSI target, which a guest uses through its network; hint: export the same disk through a socket with lunette export add vhost-blk DISK:SOCKET",
            export.name
        )));
    };
    let shows = match export.disk() {
        Some(disk) => ExportContent::Disk(disk.to_owned()),
        None => {
            let units = export.luns().unwrap_or_default().into_iter();
            let units = units.map(|unit| KnownUnit {
                target: u32::from(unit.target),
                lun: u32::from(unit.lun),
                disk: unit.disk,
            });
            ExportContent::Units(units.collect())
        }
    };
    Ok(KnownExport {
        name: export.name.clone(),
        socket: PathBuf::from(socket),
        queues: export.queues(),
        shows,
    })
}

fn all_known(disks: &[Disk]) -> BTreeMap<String, KnownDisk> {
    let known = disks.iter().map(|disk| {
        // A disk that is not open has no identity.
        let status = disk.status.as_ref();
        let known = status.map_or_else(KnownDisk::default, |status| KnownDisk {
            size: (status.size > 0).then_some(status.size),
            serial: Some(status.serial.clone()).filter(|serial| !serial.is_empty()),
            wwn: u64::from_str_radix(&status.wwn, 16).ok(),
        });
        (disk.name.clone(), known)
    });
    known.collect()
}

fn listed<T: AsRef<str>>(names: impl Iterator<Item = T>) -> String {
    let names: Vec<String> = names.map(|name| name.as_ref().to_owned()).collect();
    match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    }
}

fn unanswered(socket: &Path, error: &ClientError) -> Failure {
    Failure::because(format!("the daemon at {}: {error}", socket.display()))
}
