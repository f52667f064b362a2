//! `lunette disk`.

use config::{
    self as configuration, DISK_SET, DiskKey, Flags, Kind, Surroundings, disk_keys, parse_size,
};
use control::objects::{Disk, DiskStatus, Limits};
use control::{Client, Method, Status, escape};
use serde_json::{Value, json};

use super::arguments::{Ask, DiskAction, DiskCommand};
use super::table::Table;
use super::{bitmap, force, job, read_flags, size_text, yes};
use crate::failure::{Failure, Outcome};

pub fn run(command: DiskCommand) -> Outcome {
    let ask = &command.ask;
    match command.action {
        DiskAction::List => {
            let disks: Vec<Disk> = ask.daemon.client()?.get("/v1/disks")?;
            ask.print(&disks, table)
        }
        DiskAction::Show { disk } => {
            let client = ask.daemon.client()?;
            let disk: Disk = client.get(&path(&disk))?;
            let space = space_of(&disk.name, &client);
            ask.print(&[disk], |disks| match disks.first() {
                Some(disk) => details(disk, &space),
                None => table(&[]),
            })
        }
        DiskAction::Add { disk } => add(ask, disk),
        DiskAction::Resize {
            disk,
            size,
            force: forced,
        } => {
            let body = match size {
                Some(size) => {
                    let bytes = parse_size(&size).map_err(|_| {
                        Failure::mistake(format!("{size:?} is not a size, such as 10G or 512M"))
                    })?;
                    json!({ "size": bytes })
                }
                None => json!({}),
            };
            let path = format!("{}/size{}", path(&disk), force(forced));
            ask.change(Method::PUT, &path, Some(&body))
        }
        DiskAction::Limit { disk, limits } => {
            let limits = limits_of(&limits).map_err(Failure::mistake)?;
            let path = format!("{}/limits", path(&disk));
            ask.change(Method::PUT, &path, Some(&json!(limits)))
        }
        DiskAction::Set { disk, setting } => {
            let body = settings(&setting).map_err(Failure::mistake)?;
            let path = format!("{}/on_error", path(&disk));
            ask.change(Method::PUT, &path, Some(&body))
        }
        DiskAction::Resume { disk } => {
            let path = format!("{}/resume", path(&disk));
            ask.change(Method::POST, &path, None)
        }
        DiskAction::Snapshot { disk, to } => job::snapshot(ask, &disk, &to),
        DiskAction::Mirror {
            disk,
            target,
            switch,
            how,
        } => job::mirror(ask, &disk, &target, &how, switch),
        DiskAction::Backup(backup) => job::backup(ask, &backup),
        DiskAction::Bitmap { action } => bitmap::run(ask, &action),
        DiskAction::Stream { disk, how } => job::within(ask, "stream", &disk, &how),
        DiskAction::Commit { disk, how } => job::within(ask, "commit", &disk, &how),
        DiskAction::Identity { disk, new } => {
            let client = ask.daemon.client()?;
            let path = path(&disk);
            if new {
                client.change(Method::POST, &format!("{path}/identity"), None)?;
            }
            let disk: Disk = client.get(&path)?;
            ask.print(&[disk], identities)
        }
        DiskAction::Remove {
            disk,
            force: forced,
        } => {
            let path = format!("{}{}", path(&disk), force(forced));
            ask.change(Method::DELETE, &path, None)
        }
    }
}

fn path(disk: &str) -> String {
    format!("/v1/disks/{}", escape(disk))
}

/// Parses limits in the syntax of `serve --disk`.
fn limits_of(text: &str) -> Result<Limits, String> {
    if text == "none" {
        return Ok(Limits::default());
    }
    let known = ["iops=", "iops_burst=", "bandwidth=", "bandwidth_burst="];
    let is_known = |part: &str| {
        let part = part.replace('-', "_");
        known.iter().any(|key| part.starts_with(key))
    };
    if let Some(other) = text.split(',').find(|part| !is_known(part)) {
        return Err(format!(
            "{other:?} is not a limit: iops=N, iops_burst=N, bandwidth=SIZE, bandwidth_burst=SIZE, or none"
        ));
    }
    let flags = Flags {
        disk: vec![format!("limited=null:1M,{text}")],
        ..Flags::default()
    };
    let read = configuration::parse(None, &flags, &Surroundings::of_this_process());
    let read = read.map_err(|mistakes| {
        let each = mistakes.iter().map(|mistake| {
            let message = format!("{text}: {}", mistake.message);
            match &mistake.allowed {
                Some(allowed) => format!("{message}; allowed: {allowed}"),
                None => message,
            }
        });
        each.collect::<Vec<_>>().join("\nlunette: ")
    })?;
    let limits = read.disks.first().map(|disk| disk.limits);
    let limits = limits.unwrap_or_default();
    Ok(Limits {
        iops: limits.iops,
        iops_burst: limits.iops_burst,
        bandwidth: limits.bandwidth,
        bandwidth_burst: limits.bandwidth_burst,
    })
}

fn add(ask: &Ask, flag: String) -> Outcome {
    let flags = Flags {
        disk: vec![flag],
        ..Flags::default()
    };
    let client = ask.daemon.client()?;
    for disk in read_flags(&flags, &[])?.disks {
        let path = path(&disk.name);
        if client.get::<Disk>(&path).is_ok() {
            let reason = format!(
                "disk {} already exists; hint: lunette disk show {0}, or give another name",
                disk.name
            );
            return Err(Failure::because(reason));
        }
        let body = job::body(disk);
        ask.change(Method::PUT, &path, Some(&json!(body)))?;
    }
    Ok(())
}

fn table(disks: &[Disk]) -> Table {
    let head = Table::new(&[
        "NAME", "BACKEND", "STATE", "SIZE", "BLOCK", "RO", "LIMITS", "SERIAL", "USED BY",
    ]);
    disks.iter().fold(head, |table, disk| {
        let status = disk.status.as_ref();
        table.row([
            disk.name.clone(),
            match storage(disk) {
                // An iSCSI address already begins with the name of its back end.
                Some((_, storage)) if storage.starts_with(&disk.backend) => storage.to_owned(),
                Some((_, storage)) => format!("{}:{storage}", disk.backend),
                None => disk.backend.clone(),
            },
            status.map_or_else(String::new, |status| status.state.clone()),
            size_text(status.map_or(disk.keys.number("size").unwrap_or(0), |status| status.size)),
            status.map_or_else(String::new, |status| status.block_size.to_string()),
            yes(is_read_only(disk)),
            limits(disk),
            status.map_or_else(String::new, |status| status.serial.clone()),
            status.map_or_else(String::new, |status| status.used_by.join(" ")),
        ])
    })
}

/// Returns true if the disk or its storage is read-only.
fn is_read_only(disk: &Disk) -> bool {
    let status = disk.status.as_ref();
    disk.keys.is_on("read_only") || status.is_some_and(|status| status.read_only)
}

/// Returns the key that names the storage of a disk, and its value: a path, an RBD image, a logical unit or an NBD export.
fn storage(disk: &Disk) -> Option<(&'static str, &str)> {
    let keys = ["path", "image", "unit", "uri"].into_iter();
    keys.filter_map(|key| Some((key, disk.keys.text(key)?)))
        .next()
}

/// Returns lines about the space of the storage; none if it is unknown.
fn space_of(disk: &str, client: &Client) -> Vec<(&'static str, String)> {
    let status = client.get::<Status>("/v1/status").ok();
    let found = status.and_then(|status| status.disks.into_iter().find(|one| one.name == disk));
    let spaces = found.map(|disk| [("allocated", disk.allocated), ("free", disk.free)]);
    let lines = spaces.into_iter().flatten();
    lines
        .filter_map(|(property, bytes)| Some((property, rounded(bytes?))))
        .collect()
}

/// Returns a number of bytes with one decimal, in the units of [`size_text`].
fn rounded(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut units = ["", "K", "M", "G", "T", "P"].into_iter();
    let mut unit = units.next();
    while value >= 1024.0
        && let Some(larger) = units.next()
    {
        value /= 1024.0;
        unit = Some(larger);
    }
    let value = format!("{value:.1}");
    format!(
        "{}{}",
        value.trim_end_matches(".0"),
        unit.unwrap_or_default()
    )
}

/// Table of one disk with a line per property.
fn details(disk: &Disk, space: &[(&'static str, String)]) -> Table {
    let mut lines = vec![("name", disk.name.clone())];
    if let Some(status) = &disk.status {
        lines.push(("state", state_text(status)));
        if let Some(reason) = &status.waiting_reason {
            let name = &disk.name;
            let waiting = format!(
                "{}: {reason}; hint: lunette disk resume {name}",
                control::counted(status.waiting, "I/O")
            );
            lines.push(("waiting", waiting));
        }
        if let Some(damage) = &status.damage {
            lines.push(("damage", damage.clone()));
        }
        if let Some(reason) = &status.reservations_unknown {
            let unknown = format!("unknown: {reason}; SCSI reads and writes are answered BUSY");
            lines.push(("reservations", unknown));
        }
        lines.push(("stack", status.stack.join(" > ")));
    }
    if let Some((key, storage)) = storage(disk) {
        lines.push((key, storage.to_owned()));
    }
    if let Some(status) = &disk.status {
        lines.push(("size", size_text(status.size)));
        lines.extend_from_slice(space);
        lines.push(("block size", status.block_size.to_string()));
        lines.push(("serial", status.serial.clone()));
        lines.push(("used by", status.used_by.join(" ")));
    }
    lines.push(("read-only", yes(is_read_only(disk))));
    let on_error = disk.keys.text("on_error").unwrap_or_default();
    lines.push(("on error", on_error.to_owned()));
    if let Some(seconds) = disk.keys.number("io_timeout") {
        lines.push(("I/O timeout", format!("{seconds} s")));
    }
    lines.push(("limits", limits(disk)));
    let head = Table::new(&["PROPERTY", "VALUE"]);
    lines.into_iter().fold(head, |table, (property, value)| {
        table.row([property.to_owned(), value])
    })
}

/// Request body for run-time settings, from text such as `on_error=stop,io_timeout=30`.
fn settings(text: &str) -> Result<Value, String> {
    let known = || disk_keys().filter(|key| key.run_time == DISK_SET);
    let mut body = serde_json::Map::new();
    for one in text.split(',') {
        let parts = one.split_once('=');
        let found =
            parts.and_then(|(name, value)| Some((known().find(|k| k.name == name)?, value)));
        let Some((key, value)) = found else {
            let allowed: Vec<String> = known().map(form).collect();
            let allowed = allowed.join(", ");
            return Err(format!("{one:?} is not a setting: {allowed}"));
        };
        body.insert(key.name.to_owned(), setting(key, value)?);
    }
    Ok(Value::Object(body))
}

/// Value of a key. `none` is accepted for numbers that may be 0.
fn setting(key: &DiskKey, value: &str) -> Result<Value, String> {
    match &key.kind {
        Kind::Number(unit, range) => match (value, value.parse::<u64>()) {
            ("none", _) if range.contains(&0) => Ok(Value::from(0)),
            (_, Ok(number)) => Ok(Value::from(number)),
            _ => {
                let (name, least, most) = (key.name, range.start().max(&1), range.end());
                Err(format!(
                    "{name}={value:?}: expected {unit} from {least} to {most}, or none"
                ))
            }
        },
        Kind::Boolean => Ok(Value::from(matches!(value, "on" | "true" | "yes"))),
        _ => Ok(Value::from(value)),
    }
}

/// Syntax of a key, such as `io_timeout=SECONDS|none`.
fn form(key: &DiskKey) -> String {
    let name = key.name;
    match &key.kind {
        Kind::Word(words) => format!("{name}={}", words.join("|")),
        Kind::Number(unit, range) if range.contains(&0) => {
            format!("{name}={}|none", unit.to_uppercase())
        }
        Kind::Number(unit, _) => format!("{name}={}", unit.to_uppercase()),
        _ => format!("{name}=VALUE"),
    }
}

/// `ready`, or `unavailable: REASON, next try in 4 s`.
fn state_text(status: &DiskStatus) -> String {
    let mut text = status.state.clone();
    if let Some(reason) = &status.reason {
        text.push_str(&format!(": {reason}"));
    }
    if let Some(seconds) = status.next_try_seconds {
        text.push_str(&format!(", next try in {seconds} s"));
    }
    text
}

fn identities(disks: &[Disk]) -> Table {
    let head = Table::new(&["NAME", "IDENTITY", "SERIAL", "WWN"]);
    disks.iter().fold(head, |table, disk| {
        let status = disk.status.as_ref();
        let shown =
            |of: fn(&DiskStatus) -> &String| status.map_or_else(String::new, |s| of(s).clone());
        table.row([
            disk.name.clone(),
            shown(|status| &status.identity),
            shown(|status| &status.serial),
            shown(|status| &status.wwn),
        ])
    })
}

fn limits(disk: &Disk) -> String {
    limits_text(disk.keys.number("iops"), disk.keys.number("bandwidth"))
}

/// Limits per second. Bursts are only in `--json`.
fn limits_text(iops: Option<u64>, bandwidth: Option<u64>) -> String {
    let iops = iops.map(|iops| format!("{iops} IOPS"));
    let bandwidth = bandwidth.map(|bytes| format!("{}/s", size_text(bytes)));
    match (iops, bandwidth) {
        (Some(iops), Some(bandwidth)) => format!("{iops}, {bandwidth}"),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => "none".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_limit_names_the_allowed_values() {
        let error_of = |text: &str| limits_of(text).err().unwrap_or_default();
        assert_eq!(
            error_of("iops=0"),
            "iops=0: `iops`: found \"0\"; allowed: a whole number from 1 to 1000000000"
        );
        assert_eq!(
            error_of("iops_burst=5"),
            "iops_burst=5: `iops_burst` needs `iops`"
        );
        assert!(limits_of("iops=5,iops_burst=5").is_ok());
    }

    #[test]
    fn settings_are_the_keys_that_may_change_at_any_time() {
        let body = settings("on_error=stop,io_timeout=30");
        assert_eq!(body, Ok(json!({"on_error": "stop", "io_timeout": 30})));
        assert_eq!(settings("io_timeout=none"), Ok(json!({"io_timeout": 0})));
        assert_eq!(
            settings("io_timeout=soon").unwrap_err(),
            "io_timeout=\"soon\": expected seconds from 1 to 86400, or none"
        );
        assert_eq!(
            settings("serial=S").unwrap_err(),
            "\"serial=S\" is not a setting: on_error=report|stop|enospc, io_timeout=SECONDS|none"
        );
    }

    #[test]
    fn existing_limits_are_shown() {
        assert_eq!(limits_text(None, None), "none");
        assert_eq!(limits_text(Some(500), None), "500 IOPS");
        assert_eq!(limits_text(None, Some(100 << 20)), "100M/s");
        assert_eq!(limits_text(Some(500), Some(1 << 30)), "500 IOPS, 1G/s");
    }
}
