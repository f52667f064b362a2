//! `/v1/exports`: exports and their state.

use std::collections::HashMap;

use ::control::objects::{Export, ExportState, NewAccessState, WaitingListener};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::ErrorResponse;
use super::allowed_paths::Caller;
use super::api::{Api, Force, ForceQuery, Path, force, json};
use super::error_responses::{BodyErrors, ChangeErrors, NameErrors, ReadErrors};
use crate::objects::{Change, Refusal, bodies, served};
use crate::overview::Overview;
use config::{Config, ExportConfig, access_state_json, export_json};

/// List exports.
#[utoipa::path(get, path = "/v1/exports", operation_id = "list_exports", responses(
    (status = 200, description = "All exports", body = Vec<Export>),
    ReadErrors,
))]
pub(super) async fn list(State(api): State<Api>) -> Result<Json<Vec<Export>>, ErrorResponse> {
    let overview = api.overview()?;
    let mut states = states(overview);
    let live = overview.live();
    let exports = live.config.exports().map(|export| {
        let state = states.remove(export.name()).unwrap_or_default();
        bodies::export(export).with(state)
    });
    Ok(Json(exports.collect()))
}

/// Show an export.
#[utoipa::path(get, path = "/v1/exports/{export}", operation_id = "get_export", params(("export" = String, Path, description = "Name")),
    responses(
    (status = 200, description = "The export", body = Export),
    NameErrors, ReadErrors,
))]
pub(super) async fn show(
    State(api): State<Api>,
    Path(name): Path<String>,
) -> Result<Json<Export>, ErrorResponse> {
    one(api.overview()?, &name).map(Json)
}

/// Create or update an export with its logical units. While a client is connected, only logical units and workers change without
/// `force`.
#[utoipa::path(put, path = "/v1/exports/{export}", operation_id = "put_export",
    params(("export" = String, Path, description = "Name; for an iSCSI target its iSCSI name"), Force),
    request_body = Export, responses(
    (status = 200, description = "Export updated", body = Export),
    (status = 201, description = "Export created", body = Export),
    ChangeErrors, BodyErrors,
))]
pub(super) async fn put(
    State(api): State<Api>,
    Path(name): Path<String>,
    caller: Caller,
    query: ForceQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let force = force(query)?;
    let export = export_json(&name, &json(body)?).map_err(Refusal::from)?;
    let export = caller.check_export(&api, export).await?;
    let Some(made) = api
        .change(Change::PutExport(Box::new(export)), force)
        .await?
    else {
        return api.accepted();
    };
    let status = match made.plan.add_exports.is_empty() {
        true => StatusCode::OK,
        false => StatusCode::CREATED,
    };
    Ok((status, Json(one(api.overview()?, &name)?)).into_response())
}

/// Remove an export.
#[utoipa::path(delete, path = "/v1/exports/{export}", operation_id = "remove_export",
    params(("export" = String, Path, description = "Name"), Force), responses(
    (status = 204, description = "Removed"),
    NameErrors, ChangeErrors,
))]
pub(super) async fn remove(
    State(api): State<Api>,
    Path(name): Path<String>,
    query: ForceQuery,
) -> Result<Response, ErrorResponse> {
    let change = Change::RemoveExport(name);
    match api.change(change, force(query)?).await? {
        Some(_) => Ok(StatusCode::NO_CONTENT.into_response()),
        None => api.accepted(),
    }
}

fn states(overview: &Overview) -> HashMap<String, ExportState> {
    let Some(transports) = overview.servers.transports() else {
        return HashMap::new();
    };
    let mut served = served(&overview.servers, &transports);
    let listeners = overview.servers.waiting_listeners();
    let vhost = transports.vhost.status().into_iter().map(|export| {
        let is_its = |one: &&WaitingListener| one.export.as_ref() == Some(&export.name);
        let state = ExportState {
            waiting_socket: listeners.iter().find(is_its).cloned(),
            connected: export.connected,
            sessions: usize::from(export.connected),
            ..ExportState::default()
        };
        (export.name, state)
    });
    let mut waiting = crate::exports::waiting_portals(&transports);
    let iscsi = transports.iscsi.status().into_iter().map(|target| {
        let state = ExportState {
            connected: target.sessions > 0,
            sessions: target.sessions,
            portals: target.portals.iter().map(ToString::to_string).collect(),
            waiting_portals: waiting.remove(&target.name).unwrap_or_default(),
            port_groups: crate::exports::port_groups(&target.name, &transports),
            ..ExportState::default()
        };
        (target.name, state)
    });
    let nbd = transports.nbd.status().into_iter().map(|export| {
        let is_its = |one: &&WaitingListener| one.export.as_ref() == Some(&export.name);
        let state = ExportState {
            waiting_socket: listeners.iter().find(is_its).cloned(),
            connected: export.connections > 0,
            sessions: export.connections,
            addresses: crate::exports::tcp_addresses(&export),
            ..ExportState::default()
        };
        (export.name, state)
    });
    let mut states: HashMap<String, ExportState> = vhost.chain(iscsi).chain(nbd).collect();
    let live = overview.live();
    let mut requests = requests(overview);
    for export in live.config.exports() {
        let name = export.name();
        let removing = live.draining.iter().find_map(|one| one.export(name));
        // An export that is being removed is no longer served and has a default state.
        let state = states.entry(name.to_owned()).or_default();
        state.served = served.remove(name).unwrap_or_default();
        state.requests = requests.remove(name).unwrap_or(0);
        state.removing_seconds = removing.map(|time| time.as_secs());
    }
    states
}

pub(super) fn requests(overview: &Overview) -> HashMap<String, u64> {
    let mut requests = HashMap::new();
    for queue in overview.servers.pool.queues() {
        *requests.entry(queue.export).or_default() += queue.in_flight;
    }
    requests
}

/// Set the access state (ALUA) of a portal group of a target for all logical units. Initiators are notified.
#[utoipa::path(put, path = "/v1/exports/{export}/access-states/{group}", operation_id = "set_access_state", params(
    ("export" = String, Path, description = "Name of the target"),
    ("group" = u16, Path, description = "Portal group tag"),
), request_body = NewAccessState, responses(
    (status = 200, description = "Access state set", body = Export),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn set_access_state(
    State(api): State<Api>,
    Path((name, group)): Path<(String, u16)>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let state = access_state_json(&json(body)?).map_err(Refusal::from)?;
    let change = Change::SetAccessState(name.clone(), group, state);
    match api.change(change, Force::default()).await? {
        Some(_) => Ok(Json(one(api.overview()?, &name)?).into_response()),
        None => api.accepted(),
    }
}

fn one(overview: &Overview, name: &str) -> Result<Export, ErrorResponse> {
    let live = overview.live();
    let found: Option<&ExportConfig> = live.config.export(name);
    let found = found.ok_or_else(|| missing(name, &live.config))?;
    let state = states(overview).remove(name).unwrap_or_default();
    Ok(bodies::export(found).with(state))
}

pub(super) fn missing(name: &str, config: &Config) -> ErrorResponse {
    let names = config.exports().map(|export| export.name.as_str());
    ErrorResponse::no_such("export", name, names)
}
