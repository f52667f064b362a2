//! `lunette export`.

use config::{ExportConfig, Flags};
use control::objects::{Export, PortGroup, WaitingListener};
use control::{Method, escape};
use serde_json::{Value, json};

use super::arguments::{Ask, ExportAction, ExportCommand, NewExport};
use super::table::Table;
use super::{force, read_flags, yes};
use crate::failure::{Failure, Outcome};

pub fn run(command: ExportCommand) -> Outcome {
    let ask = &command.ask;
    match command.action {
        ExportAction::List => {
            let exports: Vec<Export> = ask.daemon.client()?.get("/v1/exports")?;
            ask.print(&exports, table)
        }
        ExportAction::Show { export } => {
            let export: Export = ask.daemon.client()?.get(&path(&export))?;
            ask.print(&[export], table)
        }
        ExportAction::Add { export } => add(ask, export),
        ExportAction::SetWorkers { export, workers } => set_workers(ask, &export, &workers),
        ExportAction::AccessState {
            export,
            group: Some(group),
            state: Some(state),
        } => {
            let path = format!("{}/access-states/{group}", path(&export));
            ask.change(Method::PUT, &path, Some(&json!({ "state": state })))
        }
        ExportAction::AccessState { export, group, .. } => {
            let shown: Export = ask.daemon.client()?.get(&path(&export))?;
            let mut groups = shown.status.unwrap_or_default().port_groups;
            if groups.is_empty() {
                return Err(Failure::because(format!(
                    "export {export} is a {} export and has no portal groups; hint: iSCSI targets have access states",
                    shown.kind
                )));
            }
            groups.retain(|one| group.is_none_or(|group| one.group == group));
            if let (Some(group), true) = (group, groups.is_empty()) {
                let reason = format!(
                    "export {export} has no portal group {group}; hint: lunette export access-state {export}"
                );
                return Err(Failure::because(reason));
            }
            ask.print(&groups, port_groups)
        }
        ExportAction::Remove {
            export,
            force: forced,
        } => {
            let path = format!("{}{}", path(&export), force(forced));
            ask.change(Method::DELETE, &path, None)
        }
    }
}

fn set_workers(ask: &Ask, export: &str, words: &str) -> Outcome {
    let path = path(export);
    let client = ask.daemon.client()?;
    let mut body: Value = client.get(&path)?;
    let (workers, dedicated) = match words {
        "dedicated" => (Value::Null, true),
        "shared" => (Value::Null, false),
        numbers => {
            let numbers = numbers.split(',').map(str::parse::<u32>);
            let numbers: Result<Vec<u32>, _> = numbers.collect();
            let numbers = numbers.map_err(|_| {
                Failure::because(format!(
                    "{words:?}: expected worker numbers such as 1,3, dedicated or shared"
                ))
            })?;
            (json!(numbers), false)
        }
    };
    if let Some(fields) = body.as_object_mut() {
        fields.remove("workers");
        if !workers.is_null() {
            fields.insert("workers".to_owned(), workers);
        }
        fields.insert("dedicated".to_owned(), json!(dedicated));
    }
    ask.change(Method::PUT, &path, Some(&body))
}

fn path(export: &str) -> String {
    format!("/v1/exports/{}", escape(export))
}

/// Names of the disks in a flag; the daemon has these disks.
fn disks_of(export: &NewExport) -> Vec<&str> {
    match export {
        NewExport::VhostBlk { export } | NewExport::Nbd { export } => {
            export.split(':').take(1).collect()
        }
        NewExport::VhostScsi { .. } => Vec::new(),
        NewExport::Iscsi { export, .. } => {
            let list = export.split_once('=').map_or("", |(_, list)| list);
            let names = list.split(',').filter(|part| !part.contains('='));
            names.filter(|name| !name.is_empty()).collect()
        }
    }
}

fn add(ask: &Ask, export: NewExport) -> Outcome {
    let flags = match &export {
        NewExport::VhostBlk { export } => Flags {
            vhost_blk: vec![export.clone()],
            ..Flags::default()
        },
        NewExport::VhostScsi { export } => Flags {
            vhost_scsi: vec![export.clone()],
            ..Flags::default()
        },
        NewExport::Nbd { export } => Flags {
            nbd: vec![export.clone()],
            ..Flags::default()
        },
        NewExport::Iscsi {
            export,
            portal,
            announce,
            demo_mode,
            chap_user,
        } => Flags {
            iscsi: vec![export.clone()],
            portal: portal.clone(),
            announce: announce.clone(),
            demo_mode: demo_mode.clone(),
            chap_user: chap_user.clone(),
            ..Flags::default()
        },
    };
    let mut stand_ins = disks_of(&export);
    stand_ins.sort_unstable();
    stand_ins.dedup();
    let config = read_flags(&flags, &stand_ins)?;
    let client = ask.daemon.client()?;
    for export in config.exports() {
        let path = path(export.name());
        if client.get::<Export>(&path).is_ok() {
            let reason = format!(
                "export {} already exists; hint: lunette export show {0}",
                export.name()
            );
            return Err(Failure::because(reason));
        }
        let export = absolute(export.to_owned());
        let body = json!(Export::new(
            export.kind(),
            export.name(),
            export.body_values()
        ));
        ask.change(Method::PUT, &path, Some(&body))?;
    }
    Ok(())
}

/// Makes the socket path absolute, because the daemon may run in another folder.
fn absolute(mut export: ExportConfig) -> ExportConfig {
    if let Some(path) = export.path_mut()
        && let Ok(from_root) = std::path::absolute(&*path)
    {
        *path = from_root;
    }
    export
}

fn table(exports: &[Export]) -> Table {
    let head = Table::new(&["NAME", "KIND", "WHERE", "DISKS", "CLIENT", "WORKERS"]);
    let waiting: Vec<WaitingListener> = exports.iter().flat_map(waiting_listeners).collect();
    let table = exports.iter().fold(head, |table, export| {
        let bound = export.status.as_ref();
        let bound = bound.map_or(&[][..], |status| &status.addresses[..]);
        let listen = export.keys.text("listen").filter(|_| bound.is_empty());
        let places = export.socket().into_iter().chain(listen);
        let places = places.chain(bound.iter().map(String::as_str));
        let place = places.chain(export.portals()).collect::<Vec<_>>().join(" ");
        let disks = match export.disk() {
            Some(disk) => disk.to_owned(),
            None => count(export.luns().unwrap_or_default().len()),
        };
        let status = export.status.as_ref();
        let client = status.map_or_else(String::new, |status| {
            if status.removing_seconds.is_some() {
                return format!("removing: {}", control::counted(status.requests, "request"));
            }
            match (status.connected, status.sessions) {
                (true, 2..) => format!("{} sessions", status.sessions),
                (false, _) if status.is_waiting() => "not open".to_owned(),
                (connected, _) => yes(connected),
            }
        });
        table.row([
            export.name.clone(),
            export.kind.clone(),
            place,
            disks,
            client,
            serving(export).unwrap_or_default(),
        ])
    });
    let notes = waiting
        .iter()
        .map(|listener| listener.problem().to_string());
    notes.fold(table, |table, line| table.note(&format!("! {line}")))
}

/// Returns the listeners of an export that cannot be opened yet.
fn waiting_listeners(export: &Export) -> Vec<WaitingListener> {
    let Some(status) = &export.status else {
        return Vec::new();
    };
    let portals = status.waiting_portals.iter().cloned();
    let portals = portals.map(|portal| WaitingListener {
        kind: "iscsi".to_owned(),
        export: Some(export.name.clone()),
        address: portal.address,
        reason: portal.reason,
        next_try_seconds: portal.next_try_seconds,
    });
    portals.chain(status.waiting_socket.clone()).collect()
}

fn port_groups(groups: &[PortGroup]) -> Table {
    let head = Table::new(&["GROUP", "TARGET PORT GROUP", "STATE", "SET BY INITIATORS"]);
    groups.iter().fold(head, |table, group| {
        let units = group.changed_by_initiators.iter();
        let units = units.map(|unit| format!("LUN {} {}", unit.lun, unit.state));
        table.row([
            group.group.to_string(),
            group.target_port_group.to_string(),
            group.state.clone(),
            units.collect::<Vec<_>>().join(", "),
        ])
    })
}

/// Workers that serve an export, such as `1 3`; without a client, the workers of its placement.
pub fn serving(export: &Export) -> Option<String> {
    let served = export.status.as_ref().map(|status| &*status.served);
    let mut now: Vec<u32> = served
        .unwrap_or_default()
        .iter()
        .map(|s| s.worker)
        .collect();
    now.sort_unstable();
    now.dedup();
    let (chosen, dedicated) = export.placement();
    let numbers = match now.is_empty() {
        true => chosen.unwrap_or_default(),
        false => now,
    };
    let mut words: Vec<String> = numbers.iter().map(u32::to_string).collect();
    if dedicated {
        words.push("dedicated".to_owned());
    }
    (!words.is_empty()).then(|| words.join(" "))
}

fn count(luns: usize) -> String {
    match luns {
        1 => "1 LUN".to_owned(),
        luns => format!("{luns} LUNs"),
    }
}
