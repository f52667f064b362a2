//! `GET /v1/latency[?select=EXPORT|DISK|EXPORT/QUEUE]`: what every queue measured, queue by queue.
//!
//! The answer is a [`timeline::Snapshot`]; whoever asks merges, subtracts and prints it.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::Deserialize;
use timeline::Snapshot;

use super::server::blocking;
use super::{Problem, View};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Selection {
    select: Option<String>,
}

pub(super) async fn get(
    State(view): State<Arc<dyn View>>,
    query: Result<Query<Selection>, QueryRejection>,
) -> Result<Json<Snapshot>, Problem> {
    let Query(selection) = query.map_err(|error| Problem::bad_request(error.body_text()))?;
    let snapshot = blocking(move || select(&*view, selection.select.as_deref())).await??;
    Ok(Json(snapshot))
}

fn select(view: &dyn View, selector: Option<&str>) -> Result<Snapshot, Problem> {
    let mut snapshot = view.snapshot();
    let Some(selector) = selector else {
        return Ok(snapshot);
    };
    snapshot
        .queues
        .retain(|queue| queue.labels.matches(selector));
    if snapshot.queues.is_empty() {
        explain_nothing(&view.status(), selector)?;
    }
    Ok(snapshot)
}

/// Why no queue is meant: an export that no client uses is no mistake, everything else is.
fn explain_nothing(status: &super::Status, selector: &str) -> Result<(), Problem> {
    let name = selector.split_once('/').map_or(selector, |(name, _)| name);
    let serves = |export: &&super::ExportStatus| export.luns.iter().any(|l| l.disk == selector);
    let mut exports = status.exports.iter();
    if exports.any(|export| export.name == name || (serves(&export) && export.luns.len() == 1)) {
        return Ok(());
    }
    if let Some(controller) = status.exports.iter().find(serves) {
        return Err(Problem::not_found(format!(
            "disk {selector} shares the queues of controller {0} with other disks: ask for {0}",
            controller.name
        )));
    }
    if status.disks.iter().any(|disk| disk.name == selector) {
        return Ok(());
    }
    Err(Problem::not_found(format!(
        "there is no export, disk or queue `{selector}`"
    )))
}

/// The path and query that ask for one export, disk or queue, or for all.
pub fn path_of(selector: Option<&str>) -> String {
    let Some(selector) = selector else {
        return "/v1/latency".to_owned();
    };
    let mut path = "/v1/latency?select=".to_owned();
    for byte in selector.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                path.push(char::from(byte));
            }
            _ => path.push_str(&format!("%{byte:02X}")),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::super::{DiskStatus, ExportStatus, LunStatus, Status};
    use super::*;

    #[test]
    fn what_has_no_queue_is_explained() {
        let disk = |name: &str| DiskStatus {
            name: name.to_owned(),
            backend: "ram".to_owned(),
            size: 4096,
            block_size: 512,
            read_only: false,
            serial: String::new(),
        };
        let export = |name: &str, disks: &[&str]| ExportStatus {
            name: name.to_owned(),
            kind: String::new(),
            socket: None,
            queues: 1,
            connected: false,
            luns: (0..)
                .zip(disks)
                .map(|(lun, disk)| LunStatus {
                    target: 0,
                    lun,
                    disk: (*disk).to_owned(),
                })
                .collect(),
        };
        let status = Status {
            disks: ["a", "b", "c", "d"].map(disk).to_vec(),
            exports: vec![export("blk", &["a"]), export("c0", &["b", "c"])],
            ..Status::default()
        };
        for known in ["blk", "blk/3", "a", "c0", "d"] {
            assert_eq!(explain_nothing(&status, known), Ok(()), "{known}");
        }
        let problem = explain_nothing(&status, "c").unwrap_err();
        assert!(problem.detail.contains("ask for c0"), "{problem:?}");
        assert!(explain_nothing(&status, "e").is_err());
    }

    #[test]
    fn a_selector_is_escaped_in_the_query() {
        assert_eq!(path_of(None), "/v1/latency");
        assert_eq!(path_of(Some("c0/1")), "/v1/latency?select=c0/1");
        assert_eq!(path_of(Some("a b&ü")), "/v1/latency?select=a%20b%26%C3%BC");
    }
}
