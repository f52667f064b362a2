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
    if !snapshot.queues.is_empty() || is_known(&view.status(), selector) {
        return Ok(snapshot);
    }
    Err(Problem::not_found(format!(
        "there is no export, disk or queue `{selector}`"
    )))
}

/// An export or a disk that no client has used yet is there all the same.
fn is_known(status: &super::Status, selector: &str) -> bool {
    status.disks.iter().any(|disk| disk.name == selector)
        || status.exports.iter().any(|export| export.name == selector)
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
    use super::*;

    #[test]
    fn a_selector_is_escaped_in_the_query() {
        assert_eq!(path_of(None), "/v1/latency");
        assert_eq!(path_of(Some("c0/1")), "/v1/latency?select=c0/1");
        assert_eq!(path_of(Some("a b&ü")), "/v1/latency?select=a%20b%26%C3%BC");
    }
}
