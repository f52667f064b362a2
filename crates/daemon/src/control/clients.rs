//! `/v1/workers`, `/v1/sessions`, `/v1/reservations`: objects without configuration.

use std::collections::BTreeMap;

use ::control::Problem;
use ::control::objects::{FrontEnd, Registration, Reservation, Session, SessionConnection, Worker};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::ErrorResponse;
use super::api::{Api, Path};
use super::error_responses::{NameErrors, ReadErrors};
use super::server::blocking;
use crate::objects::{bodies, iscsi_session, nbd_session, vhost_session};
use crate::overview::Overview;
use config::Placement;
use iscsi_target::{ConnectionStatus, SessionStatus};

/// List workers.
#[utoipa::path(get, path = "/v1/workers", operation_id = "list_workers", responses(
    (status = 200, description = "All workers", body = Vec<Worker>),
    ReadErrors,
))]
pub(super) async fn workers(State(api): State<Api>) -> Result<Json<Vec<Worker>>, ErrorResponse> {
    let overview = api.overview()?.clone();
    let cpus = match &overview.live().config.workers.placement {
        Placement::Count(_) => Vec::new(),
        Placement::Cpus(cpus) => cpus.clone(),
    };
    let read = move || {
        let pool = &overview.servers.pool;
        (pool.counters(), pool.dedicated())
    };
    let (counters, mut dedicated) = blocking(read).await?;
    let workers = counters.into_iter().map(|(index, counters)| Worker {
        index: index as usize,
        cpu: cpus.get(index as usize).copied(),
        export: dedicated.remove(&index),
        busy_iterations: counters.busy_iterations,
        empty_iterations: counters.empty_iterations,
        sleeps: counters.sleeps,
        messages: counters.messages,
        work_ns: counters.work_ns,
        poll_found_ns: counters.poll_found_ns,
        poll_empty_ns: counters.poll_empty_ns,
        sleep_ns: counters.sleep_ns,
        poll_suspensions: counters.poll_suspensions,
    });
    Ok(Json(workers.collect()))
}

/// List sessions: the clients of all exports.
#[utoipa::path(get, path = "/v1/sessions", operation_id = "list_sessions", responses(
    (status = 200, description = "All sessions", body = Vec<Session>),
    ReadErrors,
))]
pub(super) async fn sessions(State(api): State<Api>) -> Result<Json<Vec<Session>>, ErrorResponse> {
    let overview = api.overview()?.clone();
    Ok(Json(blocking(move || all_sessions(&overview)).await?))
}

/// May block: a front end can delay reads of its command line.
fn all_sessions(overview: &Overview) -> Vec<Session> {
    let Some(transports) = overview.servers.transports() else {
        return Vec::new();
    };
    let vhost = transports.vhost.status().into_iter();
    let vhost = vhost
        .filter(|export| export.connected)
        .map(|export| Session {
            id: vhost_session(&export.name),
            export: export.name,
            kind: "vhost-user".to_owned(),
            initiator: None,
            client: None,
            front_end: export.peer.map(front_end),
            portal_group: None,
            connections: 1,
            each_connection: Vec::new(),
            requests: None,
            bytes: None,
            errors: None,
            negotiated: BTreeMap::new(),
        });
    let iscsi = transports
        .iscsi
        .sessions()
        .into_iter()
        .map(|session| Session {
            negotiated: negotiated(&session),
            id: iscsi_session(session.tsih),
            export: session.target,
            kind: "iscsi".to_owned(),
            initiator: Some(session.initiator),
            client: None,
            front_end: None,
            portal_group: Some(session.portal_group),
            connections: session.connections.len(),
            each_connection: session.connections.into_iter().map(connection).collect(),
            requests: Some(session.counters.requests()),
            bytes: Some(session.counters.bytes()),
            errors: Some(session.counters.errors()),
        });
    let nbd = transports.nbd.sessions().into_iter();
    let nbd = nbd.map(|session| Session {
        id: nbd_session(session.number),
        export: session.export,
        kind: "nbd".to_owned(),
        initiator: None,
        client: Some(session.client),
        front_end: None,
        portal_group: None,
        connections: 1,
        each_connection: Vec::new(),
        requests: Some(session.counters.requests()),
        bytes: Some(session.counters.bytes()),
        errors: Some(session.counters.errors()),
        negotiated: BTreeMap::from([("replies".to_owned(), replies(session.style).to_owned())]),
    });
    vhost.chain(iscsi).chain(nbd).collect()
}

fn front_end(peer: sys::Peer) -> FrontEnd {
    FrontEnd {
        pid: peer.pid,
        user: config::user_name(peer.uid),
        guest: peer.pid.and_then(sys::guest_of),
    }
}

/// Returns a connection with its keys in the notation of RFC 7143 (13). Each side declares its own MaxRecvDataSegmentLength.
fn connection(status: ConnectionStatus) -> SessionConnection {
    let digest = |is_used: bool| if is_used { "CRC32C" } else { "None" }.to_owned();
    let length = "MaxRecvDataSegmentLength";
    SessionConnection {
        id: status.cid,
        client: status.address,
        negotiated: BTreeMap::from([
            ("HeaderDigest".to_owned(), digest(status.digests.header)),
            ("DataDigest".to_owned(), digest(status.digests.data)),
            (
                format!("{length} of the initiator"),
                status.initiator_max_recv.to_string(),
            ),
            (
                format!("{length} of the target"),
                status.target_max_recv.to_string(),
            ),
        ]),
    }
}

/// Returns the form of replies of an NBD session.
fn replies(style: nbd::Style) -> &'static str {
    match style {
        nbd::Style::Simple => "simple",
        nbd::Style::Structured => "structured",
        nbd::Style::Extended => "extended",
    }
}

/// Returns the negotiated parameters in the notation of RFC 7143 (13).
fn negotiated(session: &SessionStatus) -> BTreeMap<String, String> {
    let yes_or_no = |yes: bool| if yes { "Yes" } else { "No" }.to_owned();
    let of = &session.parameters;
    let keys = [
        ("MaxConnections", of.max_connections.to_string()),
        ("InitialR2T", yes_or_no(of.initial_r2t)),
        ("ImmediateData", yes_or_no(of.immediate_data)),
        ("MaxBurstLength", of.max_burst_length.to_string()),
        ("FirstBurstLength", of.first_burst_length.to_string()),
        ("DefaultTime2Wait", of.time_to_wait.to_string()),
        ("DefaultTime2Retain", of.time_to_retain.to_string()),
        ("MaxOutstandingR2T", of.max_outstanding_r2t.to_string()),
        ("DataPDUInOrder", yes_or_no(of.data_pdu_in_order)),
        ("DataSequenceInOrder", yes_or_no(of.data_sequence_in_order)),
        ("ErrorRecoveryLevel", of.error_recovery_level.to_string()),
        ("command window", session.window.to_string()),
    ];
    let keys = keys.into_iter();
    keys.map(|(key, value)| (key.to_owned(), value)).collect()
}

/// End an iSCSI or NBD session. An NBD client is dropped; it may connect again. An iSCSI initiator is asked to log out, and dropped after two seconds or at the second request. It may log in
/// again.
#[utoipa::path(delete, path = "/v1/sessions/{session}", operation_id = "end_session",
    params(("session" = String, Path, description = "ID of the session")), responses(
    (status = 204, description = "The session is ending"),
    (status = 409, description = "This request cannot end the session", body = Problem, content_type = "application/problem+json"),
    NameErrors, ReadErrors,
))]
pub(super) async fn end_session(
    State(api): State<Api>,
    Path(id): Path<String>,
) -> Result<StatusCode, ErrorResponse> {
    let overview = api.overview()?;
    let transports = overview.servers.transports();
    let number = id.strip_prefix("nbd-").and_then(|id| id.parse().ok());
    if let (Some(number), Some(transports)) = (number, &transports)
        && transports.nbd.end_session(number)
    {
        return Ok(StatusCode::NO_CONTENT);
    }
    let number = id.strip_prefix("iscsi-").and_then(|id| id.parse().ok());
    if let (Some(tsih), Some(transports)) = (number, transports)
        && transports.iscsi.end_session(tsih)
    {
        return Ok(StatusCode::NO_CONTENT);
    }
    let overview = overview.clone();
    let all = blocking(move || all_sessions(&overview)).await?;
    if all.iter().any(|session| session.id == id) {
        let detail =
            "a vhost-user session ends with its export; hint: lunette export remove NAME --force";
        return Err(ErrorResponse::new(StatusCode::CONFLICT, detail));
    }
    Err(ErrorResponse::not_found(format!(
        "there is no session `{id}`"
    )))
}

/// List registrations and reservations of all disks.
#[utoipa::path(get, path = "/v1/reservations", operation_id = "list_reservations", responses(
    (status = 200, description = "All registrations and reservations", body = Vec<Reservation>),
    ReadErrors,
))]
pub(super) async fn reservations(
    State(api): State<Api>,
) -> Result<Json<Vec<Reservation>>, ErrorResponse> {
    let overview = api.overview()?;
    let live = overview.live();
    let held = live.config.disks.iter().filter_map(|config| {
        let disk = live.disks.get(&config.name)?;
        if let Some(reason) = bodies::reservations_unknown(disk) {
            return Some(Reservation {
                disk: config.name.clone(),
                kind: None,
                persists: false,
                generation: 0,
                registrations: Vec::new(),
                unknown: Some(reason),
            });
        }
        let status = overview.servers.units.known(disk)?.reservations();
        let registrations = status
            .registrations
            .iter()
            .map(|registration| Registration {
                initiator: registration.initiator.clone(),
                daemon: registration.daemon.clone(),
                port: registration.port,
                key: format!("{:016x}", registration.key),
                holder: registration.holder,
            });
        let kind = status.kind.map(str::to_owned);
        let reserve = status.reserved.then(|| "RESERVE".to_owned());
        (!status.is_empty()).then(|| Reservation {
            disk: config.name.clone(),
            kind: kind.or(reserve),
            persists: status.persists,
            generation: status.generation,
            registrations: registrations.collect(),
            unknown: None,
        })
    });
    Ok(Json(held.collect()))
}
