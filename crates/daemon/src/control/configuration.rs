//! `/v1/config`: all objects, changes made at run time, and the reload of the file.

use ::control::{Changes, Objects, Summary};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::ErrorResponse;
use super::allowed_paths::Caller;
use super::api::{Api, Force, ForceQuery, force, json};
use super::error_responses::{BodyErrors, ChangeErrors, ReadErrors};
use super::server::blocking;
use crate::objects::{Change, ChangeResult, Overlay, Plan, Refusal, Work, bodies};
use crate::running::NO_FILE;
use config::{objects_json, render};

/// Returns the number of objects that a plan changed.
pub fn summary(plan: &Plan) -> Summary {
    Summary {
        disks_added: plan.add_disks.len(),
        disks_removed: plan.remove_disks.len(),
        disks_resized: plan.resize.len(),
        disks_limited: plan.limit.len(),
        exports_added: plan.add_exports.len(),
        exports_removed: plan.remove_exports.len(),
        exports_replaced: plan.replace_exports.len(),
        chap_users_changed: plan.chap_users.len(),
        discovery_users_changed: plan.discovery_users.into(),
        certificates_changed: plan.certificates.into(),
        exports_placed: plan.place_exports.len(),
        socket_rights_changed: plan.socket_rights.len(),
        access_states_changed: plan.access_states.iter().map(|(_, s)| s.len()).sum(),
        luns_added: plan.add_luns.iter().map(|(_, luns)| luns.len()).sum(),
        luns_removed: plan.remove_luns.iter().map(|(_, luns)| luns.len()).sum(),
        shadowed: Vec::new(),
    }
}

/// Returns the summary of a reload.
pub fn reload_summary(result: &ChangeResult) -> Summary {
    Summary {
        shadowed: result.shadowed.clone(),
        ..summary(&result.plan)
    }
}

/// Show all disks and exports in effect.
#[utoipa::path(get, path = "/v1/config", operation_id = "get_configuration", responses(
    (status = 200, description = "All disks and exports", body = Objects),
    ReadErrors,
))]
pub(super) async fn show(State(api): State<Api>) -> Result<Json<Objects>, ErrorResponse> {
    let live = api.overview()?.live();
    Ok(Json(Objects {
        disks: live.config.disks.iter().map(bodies::disk).collect(),
        exports: live.config.exports().map(bodies::export).collect(),
    }))
}

/// Replace all disks and exports, with the fewest changes, or none.
#[utoipa::path(put, path = "/v1/config", operation_id = "replace_configuration", params(Force), request_body = Objects, responses(
    (status = 200, description = "Configuration replaced", body = Summary),
    ChangeErrors, BodyErrors,
))]
pub(super) async fn replace(
    State(api): State<Api>,
    caller: Caller,
    query: ForceQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let force = force(query)?;
    let body = json(body)?;
    let base = api.overview()?.live().config.without_objects();
    let wanted = blocking(move || objects_json(&body, base)).await?;
    let wanted = wanted.map_err(Refusal::from)?;
    let wanted = caller.check_all(&api, wanted).await?;
    let change = Change::Replace(Box::new(wanted.into()));
    match api.change(change, force).await? {
        Some(result) => Ok(Json(summary(&result.plan)).into_response()),
        None => api.accepted(),
    }
}

/// Show the configuration in effect, as the text of a file.
#[utoipa::path(get, path = "/v1/config/file", operation_id = "get_configuration_file", responses(
    (status = 200, description = "TOML", body = String, content_type = "text/plain"),
    ReadErrors,
))]
pub(super) async fn text(State(api): State<Api>) -> Result<impl IntoResponse, ErrorResponse> {
    let text = render(&api.overview()?.live().config);
    Ok(([(header::CONTENT_TYPE, "text/plain")], text))
}

/// List changes made at run time, beside the file and the flags.
#[utoipa::path(get, path = "/v1/config/changes", operation_id = "list_configuration_changes", responses(
    (status = 200, description = "The changes", body = Changes),
    ReadErrors,
))]
pub(super) async fn changes(State(api): State<Api>) -> Result<Json<Changes>, ErrorResponse> {
    let overview = api.overview()?;
    let live = overview.live();
    let overlay = Overlay::between(&live.base, &live.config);
    Ok(Json(Changes {
        kept: overview.keeps,
        changes: overlay.lines(&live.base),
        shadowed: overlay.shadowing_lines(&live.base),
    }))
}

/// Reload the configuration file, with the fewest changes, or none. Changes made at run time stay.
#[utoipa::path(post, path = "/v1/config/reload", operation_id = "reload_configuration", params(Force), responses(
    (status = 200, description = "Reloaded", body = Summary),
    ChangeErrors,
))]
pub(super) async fn reload(
    State(api): State<Api>,
    query: ForceQuery,
) -> Result<Response, ErrorResponse> {
    let force = force(query)?;
    let Some(reload) = api.reload.clone() else {
        return Err(ErrorResponse::new(
            axum::http::StatusCode::CONFLICT,
            NO_FILE,
        ));
    };
    let read = blocking(move || reload()).await?;
    let config = read.map_err(|mistakes| {
        let text = mistakes.to_string();
        let mut response = ErrorResponse::from(Refusal::from(mistakes));
        // The text has positions in the file, which are no JSON pointers.
        response.0.detail = text;
        response
    })?;
    let work = Work::Reload(Box::new(config));
    match api.work(work, force).await? {
        Some(result) => Ok(Json(reload_summary(&result)).into_response()),
        None => api.accepted(),
    }
}
