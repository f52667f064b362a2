//! `/v1/disks`: disks and their configuration.

use std::collections::HashSet;

use ::control::objects::{Disk, ErrorPolicy, Limits, Size};
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
use super::server::blocking;
use crate::exports::without_write_cache;
use crate::objects::{Change, Fault, Live, Refusal, bodies, users_of_all};
use crate::overview::Overview;
use config::{DiskConfig, disk_json, disk_settings_json, limits_json, size_json};

/// List disks.
#[utoipa::path(get, path = "/v1/disks", operation_id = "list_disks", responses(
    (status = 200, description = "All disks", body = Vec<Disk>),
    ReadErrors,
))]
pub(super) async fn list(State(api): State<Api>) -> Result<Json<Vec<Disk>>, ErrorResponse> {
    let overview = api.overview()?.clone();
    Ok(Json(blocking(move || all(&overview)).await?))
}

/// Show a disk.
#[utoipa::path(get, path = "/v1/disks/{disk}", operation_id = "get_disk", params(("disk" = String, Path, description = "Name")), responses(
    (status = 200, description = "The disk", body = Disk),
    NameErrors, ReadErrors,
))]
pub(super) async fn show(
    State(api): State<Api>,
    Path(name): Path<String>,
) -> Result<Json<Disk>, ErrorResponse> {
    shown(&api, &name).await
}

/// Create a disk, or update its size, limits and error policy.
#[utoipa::path(put, path = "/v1/disks/{disk}", operation_id = "put_disk", params(("disk" = String, Path, description = "Name"), Force),
    request_body = Disk, responses(
    (status = 200, description = "Disk updated", body = Disk),
    (status = 201, description = "Disk created", body = Disk),
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
    let mut disk = disk_json(&name, &json(body)?).map_err(Refusal::from)?;
    let live = api.overview()?.live();
    let existing = live.config.disk(&name).map(|disk| &disk.backend);
    disk.backend = disk.backend.requested(existing, false);
    drop(live);
    let disk = caller.check_disk(&api, disk).await?;
    let Some(made) = api.change(Change::PutDisk(disk), force).await? else {
        return api.accepted();
    };
    let status = match made.plan.add_disks.is_empty() {
        true => StatusCode::OK,
        false => StatusCode::CREATED,
    };
    Ok((status, shown(&api, &name).await?).into_response())
}

/// Resize a disk; without a size, to the present size of its file, block device, image or NBD export.
#[utoipa::path(put, path = "/v1/disks/{disk}/size", operation_id = "resize_disk", params(("disk" = String, Path, description = "Name"), Force),
    request_body = Size, responses(
    (status = 200, description = "Disk resized", body = Disk),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn resize(
    State(api): State<Api>,
    Path(name): Path<String>,
    query: ForceQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let force = force(query)?;
    let live = api.overview()?.live();
    let found = live.disks.get(&name).cloned();
    let disk = found.ok_or_else(|| missing(&name, &live))?;
    let block_size = disk.info().geometry.block_size();
    let size = size_json(&json(body)?, block_size).map_err(Refusal::from)?;
    match size {
        Some(size) => {
            let change = Change::ResizeDisk(name.clone(), size);
            if api.change(change, force).await?.is_none() {
                return api.accepted();
            }
        }
        None => {
            // The owner adopts the size that is read here. Storage that does not answer blocks only this request.
            let found = blocking(move || disk.found_size()).await?;
            let failed = |error| Fault::new(format!("disk {name}: {error}"));
            found.map_err(|error| Refusal::Failed(vec![failed(error)]))?;
            let disk = name.clone();
            let followed = api.manager.ask(move |owner| owner.follow_disk(&disk));
            followed.await?;
        }
    }
    Ok(shown(&api, &name).await?.into_response())
}

/// Set the limits of a disk. A key that is absent removes that limit.
#[utoipa::path(put, path = "/v1/disks/{disk}/limits", operation_id = "set_disk_limits", params(("disk" = String, Path, description = "Name")),
    request_body = Limits, responses(
    (status = 200, description = "Limits set", body = Disk),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn limit(
    State(api): State<Api>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Disk>, ErrorResponse> {
    let limits = limits_json(&json(body)?).map_err(Refusal::from)?;
    let change = Change::LimitDisk(name.clone(), limits);
    api.change(change, Force::default()).await?;
    shown(&api, &name).await
}

/// Set the error policy of a disk. Waiting I/Os are submitted again, and end by the new policy.
#[utoipa::path(put, path = "/v1/disks/{disk}/on_error", operation_id = "set_disk_error_policy", params(("disk" = String, Path, description = "Name")),
    request_body = ErrorPolicy, responses(
    (status = 200, description = "The disk with its policy", body = Disk),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn set_error_policy(
    State(api): State<Api>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Disk>, ErrorResponse> {
    let settings = disk_settings_json(&json(body)?).map_err(Refusal::from)?;
    let change = Change::SetDisk(name.clone(), settings);
    api.change(change, Force::default()).await?;
    shown(&api, &name).await
}

/// Resume a disk: submit its waiting I/Os again.
#[utoipa::path(post, path = "/v1/disks/{disk}/resume", operation_id = "resume_disk", params(("disk" = String, Path, description = "Name")),
    responses(
    (status = 200, description = "Disk resumed; its I/Os may still be in flight", body = Disk),
    NameErrors, ChangeErrors,
))]
pub(super) async fn resume(
    State(api): State<Api>,
    Path(name): Path<String>,
) -> Result<Json<Disk>, ErrorResponse> {
    let resumed = name.clone();
    api.manager
        .ask(move |owner| owner.disks.resume_named(&resumed))
        .await?;
    shown(&api, &name).await
}

/// Give a disk that no export serves a new identity. Its clients then find another disk, without reservations and saved mode pages.
#[utoipa::path(post, path = "/v1/disks/{disk}/identity", operation_id = "renew_disk_identity", params(("disk" = String, Path, description = "Name")),
    responses(
    (status = 200, description = "The disk with its new identity", body = Disk),
    NameErrors, ChangeErrors,
))]
pub(super) async fn renew_identity(
    State(api): State<Api>,
    Path(name): Path<String>,
) -> Result<Json<Disk>, ErrorResponse> {
    let disk = name.clone();
    let (reply, renewed) = tokio::sync::oneshot::channel();
    // The caller may be gone.
    let reply = Box::new(|result| drop(reply.send(result)));
    api.manager
        .ask(move |owner| owner.renew_identity(&disk, reply))
        .await?;
    renewed.await.map_err(|_| Refusal::Ending)??;
    shown(&api, &name).await
}

/// Remove a disk.
#[utoipa::path(delete, path = "/v1/disks/{disk}", operation_id = "remove_disk", params(("disk" = String, Path, description = "Name"), Force),
    responses(
    (status = 204, description = "Removed"),
    NameErrors, ChangeErrors,
))]
pub(super) async fn remove(
    State(api): State<Api>,
    Path(name): Path<String>,
    query: ForceQuery,
) -> Result<Response, ErrorResponse> {
    let change = Change::RemoveDisk(name);
    match api.change(change, force(query)?).await? {
        Some(_) => Ok(StatusCode::NO_CONTENT.into_response()),
        None => api.accepted(),
    }
}

fn missing(name: &str, live: &Live) -> ErrorResponse {
    let names = live.config.disks.iter().map(|disk| disk.name.as_str());
    ErrorResponse::no_such("disk", name, names)
}

fn all(overview: &Overview) -> Vec<Disk> {
    let live = overview.live();
    let mut users = users_of_all(&live.config);
    let uncached = uncached(overview);
    let disks = live.config.disks.iter().map(|config| {
        let used_by = users.remove(config.name.as_str()).unwrap_or_default();
        with_status(overview, &live, config, used_by, &uncached)
    });
    disks.collect()
}

/// Returns an error if there is no such disk.
pub(super) fn check_exists(overview: &Overview, name: &str) -> Result<(), ErrorResponse> {
    let live = overview.live();
    let config = live.config.disk(name);
    config.map(drop).ok_or_else(|| missing(name, &live))
}

/// Returns a disk as the response. A state directory that does not answer blocks only this request.
pub(super) async fn shown(api: &Api, name: &str) -> Result<Json<Disk>, ErrorResponse> {
    let (overview, name) = (api.overview()?.clone(), name.to_owned());
    blocking(move || one(&overview, &name)).await?.map(Json)
}

fn one(overview: &Overview, name: &str) -> Result<Disk, ErrorResponse> {
    let live = overview.live();
    let config = live.config.disk(name);
    let config = config.ok_or_else(|| missing(name, &live))?;
    let used_by = crate::objects::users(&live.config, name);
    let uncached = uncached(overview);
    Ok(with_status(overview, &live, config, used_by, &uncached))
}

/// Returns the exports with a write cache that the driver has disabled.
fn uncached(overview: &Overview) -> HashSet<String> {
    let transports = overview.servers.transports();
    let uncached = transports.as_ref().map(without_write_cache);
    uncached.unwrap_or_default()
}

fn with_status(
    overview: &Overview,
    live: &Live,
    config: &DiskConfig,
    used_by: Vec<String>,
    uncached: &HashSet<String>,
) -> Disk {
    let is_uncached = used_by.iter().any(|export| uncached.contains(export));
    let mut status = bodies::disk_status(live, config, used_by);
    if let Some(disk) = live.disks.get(&config.name) {
        let state = overview.servers.units.initiator_state(disk);
        let state = state
            .into_iter()
            .chain(is_uncached.then_some("writethrough"));
        status.initiator_state = state.map(str::to_owned).collect();
    }
    Disk {
        status: Some(status),
        ..bodies::disk(config)
    }
}
