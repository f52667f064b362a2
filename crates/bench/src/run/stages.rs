//! Latencies of stages, from the Lunette daemon that serves a subject.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use control::ExportStatus;
use latency::{Latencies, Snapshot};
use nbd::address::ServerAddress;

use crate::driver::{Kind, Subject, UnitAddress, parse_address};

/// Reads the latencies of the subject's Lunette daemon, if it is one.
pub(super) fn read(subject: Option<&Subject>) -> Option<Snapshot> {
    control::get(&control_of(subject?)?, "/v1/latency").ok()
}

/// Returns the control socket; by default the usual one, which may belong to another daemon.
fn control_of(subject: &Subject) -> Option<PathBuf> {
    if subject.kind == Kind::File {
        return None;
    }
    let usual = || control::default_socket().filter(|socket| socket.exists());
    subject.control.clone().or_else(usual)
}

/// Checks that the daemon of an explicit control socket runs and has the export.
pub(super) fn check_export(subject: &Subject) -> Result<()> {
    let Some(socket) = &subject.control else {
        return Ok(());
    };
    if subject.kind == Kind::File {
        return Ok(());
    }
    let named = || format!("{}: control={}", subject.name, socket.display());
    let status: control::Status = control::get(socket, "/v1/status").with_context(named)?;
    ensure!(
        export_of(subject, &status).is_some(),
        "{}: that daemon has no export {}",
        named(),
        subject.path.display()
    );
    Ok(())
}

fn export_of(subject: &Subject, status: &control::Status) -> Option<String> {
    if subject.kind == Kind::Iscsi {
        let place = UnitAddress::parse(&subject.path.to_string_lossy()).ok()?;
        let mut named = status.exports.iter().map(|export| &export.name);
        return named
            .find(|name| iscsi_name::is_same(name, &place.target))
            .cloned();
    }
    let socket = |export: &ExportStatus| export.socket.as_ref()?.canonicalize().ok();
    let mut exports = status.exports.iter();
    let export = if subject.kind == Kind::Nbd {
        let address = parse_address(&subject.path.to_string_lossy()).ok()?;
        let wanted = match &address.server {
            ServerAddress::Unix(path) => path.canonicalize().ok(),
            ServerAddress::Tcp { .. } => None,
        };
        // Clients may see the export by another name than the daemon's.
        let of_server: Vec<&ExportStatus> = exports
            .filter(|one| one.kind == "nbd" && socket(one) == wanted)
            .collect();
        let find = |matches: &dyn Fn(&ExportStatus) -> bool| {
            of_server.iter().copied().find(|one| matches(one))
        };
        let only = of_server.first().copied().filter(|_| of_server.len() == 1);
        find(&|one| one.name == address.export)
            .or_else(|| find(&|one| one.luns.iter().any(|lun| lun.disk == address.export)))
            .or(only)?
    } else {
        let wanted = subject.path.canonicalize().ok()?;
        exports.find(|one| socket(one).as_ref() == Some(&wanted))?
    };
    Some(export.name.clone())
}

/// Returns the latencies of the subject's export since `before`.
pub(super) fn since(subject: Option<&Subject>, before: Option<Snapshot>) -> Option<Latencies> {
    let after = read(subject)?;
    let subject = subject?;
    let socket = control_of(subject)?;
    let status: control::Status = control::get(&socket, "/v1/status").ok()?;
    let export = export_of(subject, &status)?;
    let grown = after.since(&before.unwrap_or_default());
    Some(grown.merged_by(|labels| labels.export == export))
}
