//! `lunette backup`: backups of several disks at one moment.

use std::io::Write;
use std::path::Path;

use clap::{Args, Subcommand};
use config::parse_size;
use control::objects::{Backup, BackupDisk, JobState, NewBackup};
use control::{Method, escape};
use serde_json::json;

use super::arguments::{Ask, Scratch, Speed};
use super::table::Table;
use super::{job, print_json};
use crate::failure::{Failure, Outcome};

/// `lunette backup`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct BackupCommand {
    /// Address of the daemon
    #[command(flatten)]
    pub ask: Ask,
    /// Subcommand
    #[command(subcommand)]
    pub action: BackupAction,
}

const AFTER: &str = "\
Examples:
    lunette backup begin d0 d1 --to /backup --checkpoint mon --wait
    lunette backup begin d0 d1 --to /backup --since mon --checkpoint tue --wait
    lunette backup begin d0 d1 --pull unix:/run/lunette/backup.sock --since tue --checkpoint wed --name wed
    lunette backup list
    lunette backup end wed

A backup contains all disks as they were at one moment, its start. Clients write meanwhile; the data that they overwrite go to a scratch file
per disk. Checkpoints are the dirty bitmaps of lunette disk bitmap list. A backup that is cancelled or fails creates no checkpoint.
Exit code 0: done or started. 1: failed.";

/// Actions of `lunette backup`.
#[derive(Debug, Subcommand)]
pub enum BackupAction {
    /// Start a backup of disks as they are now
    Begin {
        /// Names of the disks
        #[arg(required = true)]
        disk: Vec<String>,
        /// Existing folder, which gets a qcow2 image DISK-CHECKPOINT.qcow2 or DISK.qcow2 per disk; or the target of a single disk as for
        /// lunette disk backup
        #[arg(
            long,
            value_name = "DIR|TARGET",
            required_unless_present = "pull",
            conflicts_with = "pull"
        )]
        to: Option<String>,
        /// Serve the disks read-only over NBD at this address until lunette backup end: unix:PATH or tcp:IP:PORT. Each disk is an export
        /// of its name, or DISK@BACKUP if the address has an export of that name. TCP is not encrypted, and every client may read
        #[arg(long, value_name = "ADDRESS")]
        pull: Option<String>,
        /// Name of the backup [default: backup-NUMBER]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// Create or replace this checkpoint of each disk, which later backups can name with --since
        #[arg(long, value_name = "NAME")]
        checkpoint: Option<String>,
        /// Back up the changes since this checkpoint. A pulled disk has them as the metadata context qemu:dirty-bitmap:NAME. A copy is an
        /// image over the copy of that checkpoint
        #[arg(long, value_name = "NAME")]
        since: Option<String>,
        /// Scratch files
        #[command(flatten)]
        scratch: Scratch,
        /// Speed and wait options
        #[command(flatten)]
        how: Speed,
    },
    /// List running backups, and the last ones of disks
    List,
    /// End a backup that is served over NBD. Its checkpoints are complete
    End {
        /// Name of the backup
        name: String,
    },
    /// Cancel a backup. Its checkpoints are not created
    Cancel {
        /// Name of the backup
        name: String,
    },
}

pub fn run(command: BackupCommand) -> Outcome {
    let ask = &command.ask;
    match command.action {
        BackupAction::Begin {
            disk,
            to,
            pull,
            name,
            checkpoint,
            since,
            scratch,
            how,
        } => {
            if let Some(to) = &to {
                check_folder(to, disk.len() > 1).map_err(Failure::mistake)?;
            }
            let disks = disk.iter().map(|disk| {
                let target = to.as_deref();
                let target = target.map(|to| target_of(to, disk, checkpoint.as_deref()));
                let target = target.transpose()?;
                let target = target.map(|target| job::copy("backup", disk, &target, &how));
                Ok(BackupDisk {
                    disk: disk.clone(),
                    target: target.transpose()?.and_then(|job| job.target),
                })
            });
            let disks = disks.collect::<Result<Vec<_>, Failure>>()?;
            let backup = NewBackup {
                name,
                disks,
                pull: pull.map(|address| absolute_address(&address)),
                checkpoint,
                since,
                scratch: scratch.folder(),
                scratch_limit: scratch.limit()?,
                speed: how.bytes()?,
            };
            begin(ask, &backup, how.wait)
        }
        BackupAction::List => {
            let backups: Vec<Backup> = ask.daemon.client()?.get("/v1/backups")?;
            ask.print(&backups, table)
        }
        BackupAction::End { name } => {
            let (_, ended) =
                ask.daemon
                    .client()?
                    .change(Method::POST, &format!("{}/end", path(&name)), None)?;
            ended_well(ask, &ended)
        }
        BackupAction::Cancel { name } => ask.change(Method::DELETE, &path(&name), None),
    }
}

fn path(name: &str) -> String {
    format!("/v1/backups/{}", escape(name))
}

/// Refuses a folder that does not exist, and the target of a single disk for several disks.
fn check_folder(to: &str, has_several: bool) -> Result<(), String> {
    let path = Path::new(to);
    // The target of a single disk has the form KIND:PLACE.
    let is_path = path.is_absolute() || to.contains('/') && !to.contains(':');
    match (path.is_dir(), path.exists(), has_several) {
        (true, ..) => Ok(()),
        (_, false, _) if is_path => Err(format!(
            "--to {to}: the folder does not exist; hint: create it, or name a target such as image:PATH"
        )),
        (.., true) => Err(format!(
            "--to {to} is not a folder; hint: several disks need an existing folder"
        )),
        _ => Ok(()),
    }
}

/// Returns the target of a disk. An image in a folder is new: later images may depend on an existing one.
fn target_of(to: &str, disk: &str, checkpoint: Option<&str>) -> Result<String, Failure> {
    if !Path::new(to).is_dir() {
        return Ok(to.to_owned());
    }
    let name = match checkpoint {
        Some(checkpoint) => format!("{disk}-{checkpoint}.qcow2"),
        None => format!("{disk}.qcow2"),
    };
    let path = Path::new(to).join(name);
    match path.exists() {
        false => Ok(format!("image:{}", path.display())),
        true => Err(Failure::mistake(format!(
            "{} exists already; hint: name another checkpoint or folder, or remove the image if no other depends on it",
            path.display()
        ))),
    }
}

/// Makes the path of a socket absolute, because the daemon may run in another folder.
fn absolute_address(address: &str) -> String {
    match address.strip_prefix("unix:") {
        Some(path) if !path.is_empty() => match std::path::absolute(path) {
            Ok(path) => format!("unix:{}", path.display()),
            Err(_) => address.to_owned(),
        },
        _ => address.to_owned(),
    }
}

fn begin(ask: &Ask, backup: &NewBackup, waits: bool) -> Outcome {
    let client = ask.daemon.client()?;
    let (_, begun) = client.change(Method::POST, "/v1/backups", Some(&json!(backup)))?;
    if waits {
        let results: Vec<Outcome> = backup
            .disks
            .iter()
            .map(|one| job::wait(ask, &one.disk, job::Until::EndedOrReady))
            .collect();
        return results.into_iter().collect();
    }
    if ask.json {
        return print_json(&begun);
    }
    let begun: Backup = read(begun)?;
    let name = &begun.name;
    let mut stderr = cli_common::stderr();
    match &begun.pull {
        None => writeln!(stderr, "backup {name} started; hint: lunette backup list")?,
        Some(_) => {
            for job in &begun.jobs {
                let url = job.target.as_deref().unwrap_or_default();
                writeln!(stderr, "disk {} is served at {url}", job.disk)?;
            }
            writeln!(
                stderr,
                "backup {name} started; hint: lunette backup end {name}"
            )?;
        }
    }
    Ok(())
}

fn read(body: serde_json::Value) -> Result<Backup, Failure> {
    serde_json::from_value(body)
        .map_err(|error| Failure::because(format!("cannot read the daemon's response: {error}")))
}

/// Reports a job that has not ended well.
fn ended_well(ask: &Ask, ended: &serde_json::Value) -> Outcome {
    if ask.json {
        print_json(ended)?;
    }
    let ended: Backup = read(ended.clone())?;
    let failed = ended.jobs.iter().find(|job| job.state == JobState::Failed);
    match failed {
        None => Ok(()),
        Some(job) => Err(Failure::because(format!(
            "backup of disk {} failed: {}",
            job.disk,
            job.reason.as_deref().unwrap_or("unknown reason")
        ))),
    }
}

fn table(backups: &[Backup]) -> Table {
    let head = Table::new(&[
        "BACKUP",
        "DISK",
        "STATE",
        "CHECKPOINT",
        "SINCE",
        "TARGET",
        "REASON",
    ]);
    let rows = backups
        .iter()
        .flat_map(|backup| backup.jobs.iter().map(move |job| (backup, job)));
    rows.fold(head, |table, (backup, job)| {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        table.row([
            backup.name.clone(),
            job.disk.clone(),
            job.state.word().to_owned(),
            text(&backup.checkpoint),
            text(&backup.since),
            text(&job.target),
            text(&job.reason),
        ])
    })
}

impl Scratch {
    /// Returns the absolute folder.
    pub(super) fn folder(&self) -> Option<String> {
        let folder = self.scratch.as_ref()?;
        let folder = std::path::absolute(folder).unwrap_or(folder.clone());
        Some(folder.display().to_string())
    }

    /// Returns the limit in bytes.
    pub(super) fn limit(&self) -> Result<Option<u64>, Failure> {
        let parsed = self.scratch_limit.as_deref().map(|text| {
            parse_size(text).map_err(|_| {
                Failure::mistake(format!("--scratch-limit {text}: not a size such as 10G"))
            })
        });
        parsed.transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_folder_and_target_of_several_disks_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let refused = |to: &str, has_several| check_folder(to, has_several).unwrap_err();
        assert!(check_folder(&at(""), true).is_ok());
        let missing = at("missing/folder");
        assert!(refused(&missing, false).contains("the folder does not exist"));
        assert!(refused(&missing, true).contains("the folder does not exist"));
        assert!(refused("file:/a", true).contains("several disks"));
        assert!(check_folder("file:/a", false).is_ok());
        assert!(check_folder("nbd://h/e", false).is_ok());
    }
}
