//! `GET /v1/latency[?select=EXPORT|DISK|EXPORT/QUEUE][&slowest=N]`: the measurements of every queue, and on request the N slowest requests
//! of the last minute.
//!
//! The response is a [`latency::Snapshot`]; the client merges, subtracts and prints it. `select=DISK` returns the part of a shared queue
//! that concerns the disk.

use std::time::{Duration, SystemTime};

use ::control::Status;
use ::control::statistics::LatencySnapshot;
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use config::nearest;
use latency::Snapshot;
use serde::Deserialize;
use utoipa::IntoParams;

use super::api::Api;
use super::error_responses::{NameErrors, ReadErrors};
use super::server::blocking;
use super::{ErrorResponse, View};

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Selection {
    /// EXPORT, DISK or EXPORT/QUEUE
    select: Option<String>,
    /// Also list this many of the slowest requests of the last minute.
    slowest: Option<usize>,
}

/// Show the histograms of every queue since the daemon started, by operation and stage.
#[utoipa::path(get, path = "/v1/latency", operation_id = "get_latency", params(Selection), responses(
    (status = 200, description = "A snapshot of all queues", body = LatencySnapshot),
    NameErrors, ReadErrors,
))]
pub(super) async fn get(
    State(api): State<Api>,
    query: Result<Query<Selection>, QueryRejection>,
) -> Result<Json<Snapshot>, ErrorResponse> {
    let Query(selection) = query.map_err(|error| ErrorResponse::bad_request(error.body_text()))?;
    let chosen = move || {
        let slowest = selection.slowest.unwrap_or(0);
        let mut snapshot = select(&*api.view, selection.select.as_deref(), slowest > 0)?;
        keep_slowest(&mut snapshot, slowest);
        Ok(snapshot)
    };
    let snapshot = blocking(chosen).await?;
    snapshot.map(Json)
}

fn keep_slowest(snapshot: &mut Snapshot, count: usize) {
    let mut least = 0;
    if let Some((_, last)) = snapshot.slowest(count).last() {
        least = last.total_ns;
    }
    let mut left = count;
    for queue in &mut snapshot.queues {
        queue.slow.retain(|slow| {
            let kept = left > 0 && slow.total_ns >= least;
            left -= usize::from(kept);
            kept
        });
    }
}

fn select(
    view: &dyn View,
    selector: Option<&str>,
    with_slowest: bool,
) -> Result<Snapshot, ErrorResponse> {
    let mut snapshot = view.snapshot();
    if with_slowest {
        name_disks(&mut snapshot, &view.status());
        set_ends(&mut snapshot);
    }
    let Some(selector) = selector else {
        for queue in &mut snapshot.queues {
            queue.forget_disks();
        }
        return Ok(snapshot);
    };
    let selected = snapshot.select(selector);
    if selected.queues.is_empty() {
        explain_nothing(&view.status(), selector)?;
    }
    Ok(selected)
}

/// Sets the disk of each slow request for a logical unit.
fn name_disks(snapshot: &mut Snapshot, status: &Status) {
    for queue in &mut snapshot.queues {
        let export = status
            .exports
            .iter()
            .find(|e| e.name == queue.labels.export);
        let Some(export) = export else { continue };
        for slow in &mut queue.slow {
            let unit = slow.unit.map(|unit| (unit.target, unit.lun));
            let there = export.luns.iter().find(|l| Some((l.target, l.lun)) == unit);
            slow.disk = there.map_or_else(String::new, |there| there.disk.clone());
        }
    }
}

/// Sets the time of day at which each slow request ended.
fn set_ends(snapshot: &mut Snapshot) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = now.unwrap_or_default();
    for slow in snapshot.queues.iter_mut().flat_map(|one| &mut one.slow) {
        let ended = now.saturating_sub(Duration::from_nanos(slow.age_ns));
        slow.ended_ms = u64::try_from(ended.as_millis()).ok();
    }
}

/// Refuses an unknown selector. An export or disk without clients is not an error.
fn explain_nothing(status: &Status, selector: &str) -> Result<(), ErrorResponse> {
    let name = selector.split_once('/').map_or(selector, |(name, _)| name);
    let mut exports = status.exports.iter();
    let known = exports.any(|export| export.name == name)
        || status.disks.iter().any(|disk| disk.name == selector);
    if known {
        return Ok(());
    }
    let exports = status.exports.iter().map(|export| export.name.as_str());
    let disks = status.disks.iter().map(|disk| disk.name.as_str());
    let hint = match nearest(name, exports.chain(disks)) {
        Some(guess) => format!("did you mean `{guess}`?"),
        None => "lunette export list, lunette disk list".to_owned(),
    };
    Err(ErrorResponse::not_found(format!(
        "there is no export, disk or queue `{selector}`; hint: {hint}"
    )))
}

#[cfg(test)]
mod tests {
    use ::control::{DiskStatus, ExportStatus, LunStatus};

    use super::*;

    #[test]
    fn latency_without_a_queue_has_a_reason() {
        let disk = |name: &str| DiskStatus {
            name: name.to_owned(),
            backend: "ram".to_owned(),
            path: None,
            size: 4096,
            allocated: None,
            free: None,
            block_size: 512,
            read_only: false,
            serial: String::new(),
            state: "ready".to_owned(),
            reason: None,
            waiting: 0,
            waiting_reason: None,
            next_try_seconds: None,
            reservations_unknown: None,
            warning: None,
            slow_ns: None,
            damage: None,
            failures: Vec::new(),
        };
        let export = |name: &str, disks: &[&str]| ExportStatus {
            queue_stops: None,
            name: name.to_owned(),
            kind: String::new(),
            socket: None,
            addresses: Vec::new(),
            queues: 1,
            connected: false,
            served: Vec::new(),
            waiting_portals: Vec::new(),
            port_groups: Vec::new(),
            warning: None,
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
            damaged_state: Vec::new(),
            ..Status::default()
        };
        for known in ["blk", "blk/3", "a", "c", "c0", "d"] {
            assert_eq!(explain_nothing(&status, known), Ok(()), "{known}");
        }
        assert!(explain_nothing(&status, "e").is_err());
    }

    #[test]
    fn slow_requests_are_limited_to_the_requested_number() {
        let slow = |total_ns| latency::SlowRequestSnapshot {
            operation: latency::Operation::Read,
            tag: 0,
            unit: None,
            disk: String::new(),
            offset: 0,
            length: 512,
            age_ns: 1,
            ended_ms: None,
            total_ns,
            stages_ns: [0; latency::Stage::COUNT],
        };
        let queue = |totals: &[u64]| latency::QueueSnapshot {
            slow: totals.iter().copied().map(slow).collect(),
            ..::latency::QueueSnapshot::default()
        };
        for (count, left) in [(0, vec![]), (2, vec![9, 8]), (9, vec![9, 8, 7, 7])] {
            let mut snapshot = Snapshot {
                queues: vec![queue(&[9, 7]), queue(&[8, 7])],
            };
            keep_slowest(&mut snapshot, count);
            let totals = snapshot
                .slowest(9)
                .iter()
                .map(|(_, slow)| slow.total_ns)
                .collect::<Vec<_>>();
            assert_eq!(totals, left);
        }
    }
}
