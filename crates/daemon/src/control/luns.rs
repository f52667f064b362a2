//! `/v1/exports/{export}/luns`: logical units of controllers and targets, at `TARGET:LUN`.

use ::control::objects::{Lun, LunDisk};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::ErrorResponse;
use super::api::{Api, Force, ForceQuery, Path, force, json};
use super::error_responses::{BodyErrors, ChangeErrors, NameErrors, ReadErrors};
use crate::objects::{Change, Refusal, bodies, lun_bodies};
use crate::overview::Overview;
use config::{LUNS_MAX, LunConfig, lun_json, luns_json};

/// List the logical units of an export.
#[utoipa::path(get, path = "/v1/exports/{export}/luns", operation_id = "list_logical_units", params(("export" = String, Path, description = "Name")),
    responses(
    (status = 200, description = "Logical units", body = Vec<Lun>),
    NameErrors, ReadErrors,
))]
pub(super) async fn list(
    State(api): State<Api>,
    Path(export): Path<String>,
) -> Result<Json<Vec<Lun>>, ErrorResponse> {
    luns_of(api.overview()?, &export).map(Json)
}

/// Replace the logical units of an export.
#[utoipa::path(put, path = "/v1/exports/{export}/luns", operation_id = "replace_logical_units",
    params(("export" = String, Path, description = "Name"), Force), request_body = Vec<Lun>, responses(
    (status = 200, description = "Logical units replaced", body = Vec<Lun>),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn replace(
    State(api): State<Api>,
    Path(export): Path<String>,
    query: ForceQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let force = force(query)?;
    let luns = luns_json(&json(body)?).map_err(Refusal::from)?;
    let change = Change::PutLuns(export.clone(), luns);
    match api.change(change, force).await? {
        Some(_) => Ok(Json(luns_of(api.overview()?, &export)?).into_response()),
        None => api.accepted(),
    }
}

/// Show a logical unit.
#[utoipa::path(get, path = "/v1/exports/{export}/luns/{address}", operation_id = "get_logical_unit", params(
    ("export" = String, Path, description = "Name of the export"),
    ("address" = String, Path, description = "TARGET:LUN"),
), responses(
    (status = 200, description = "The logical unit", body = Lun),
    NameErrors, ReadErrors,
))]
pub(super) async fn show(
    State(api): State<Api>,
    Path((export, address)): Path<(String, String)>,
) -> Result<Json<Lun>, ErrorResponse> {
    one(api.overview()?, &export, parse(&address)?).map(Json)
}

/// Add a logical unit, or replace its disk. Connected clients are notified.
#[utoipa::path(put, path = "/v1/exports/{export}/luns/{address}", operation_id = "put_logical_unit", params(
    ("export" = String, Path, description = "Name of the export"),
    ("address" = String, Path, description = "TARGET:LUN"),
    Force,
), request_body = LunDisk, responses(
    (status = 200, description = "Logical unit updated", body = Lun),
    (status = 201, description = "Logical unit added", body = Lun),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn put(
    State(api): State<Api>,
    Path((export, address)): Path<(String, String)>,
    query: ForceQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let force = force(query)?;
    let (target, number) = parse(&address)?;
    let lun = lun_json(target, number, &json(body)?).map_err(Refusal::from)?;
    let change = Change::PutLun(export.clone(), lun);
    let Some(made) = api.change(change, force).await? else {
        return api.accepted();
    };
    let status = match made.plan.add_luns.is_empty() {
        true => StatusCode::OK,
        false => StatusCode::CREATED,
    };
    let lun = one(api.overview()?, &export, (target, number))?;
    Ok((status, Json(lun)).into_response())
}

/// Remove a logical unit. Its requests complete first, or are aborted with `force`; then clients are notified.
#[utoipa::path(delete, path = "/v1/exports/{export}/luns/{address}", operation_id = "remove_logical_unit", params(
    ("export" = String, Path, description = "Name of the export"),
    ("address" = String, Path, description = "TARGET:LUN"),
    Force,
), responses(
    (status = 204, description = "Removed"),
    NameErrors, ChangeErrors,
))]
pub(super) async fn remove(
    State(api): State<Api>,
    Path((export, address)): Path<(String, String)>,
    query: ForceQuery,
) -> Result<Response, ErrorResponse> {
    let (target, lun) = parse(&address)?;
    let change = Change::RemoveLun(export, target, lun);
    match api.change(change, force(query)?).await? {
        Some(_) => Ok(StatusCode::NO_CONTENT.into_response()),
        None => api.accepted(),
    }
}

fn parse(address: &str) -> Result<(u8, u16), ErrorResponse> {
    let parsed = address.split_once(':').and_then(|(target, lun)| {
        let lun: u16 = lun.parse().ok()?;
        let target: u8 = target.parse().ok()?;
        (lun < LUNS_MAX).then_some((target, lun))
    });
    parsed.ok_or_else(|| {
        ErrorResponse::bad_request(format!(
            "{address:?} is not TARGET:LUN, such as 4:0 (target 0 to 255, LUN 0 to 16383)"
        ))
    })
}

fn luns_of(overview: &Overview, export: &str) -> Result<Vec<Lun>, ErrorResponse> {
    let live = overview.live();
    let found = live.config.export(export);
    let found = found.ok_or_else(|| super::exports::missing(export, &live.config))?;
    Ok(lun_bodies(found.luns().unwrap_or_default()))
}

fn one(overview: &Overview, export: &str, address: (u8, u16)) -> Result<Lun, ErrorResponse> {
    let live = overview.live();
    let found = live.config.export(export);
    let found = found.ok_or_else(|| super::exports::missing(export, &live.config))?;
    let is_here = |lun: &&LunConfig| (lun.target, lun.lun) == address;
    let lun = found.luns().unwrap_or_default().iter().find(is_here);
    let (target, number) = address;
    lun.map(bodies::lun).ok_or_else(|| {
        ErrorResponse::not_found(format!("there is no LUN `{export}/{target}:{number}`"))
    })
}
