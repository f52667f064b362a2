//! `GET /v1/history?disk=DISK[&interval=minute]`: counters of a disk over the last hour or day.

use ::control::{DiskHistory, HistoryInterval};
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::Deserialize;
use utoipa::IntoParams;

use super::ErrorResponse;
use super::api::Api;
use super::error_responses::{NameErrors, ReadErrors};

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Selection {
    /// Name of the disk.
    disk: String,
    /// `second`: the last hour. `minute`: the last day.
    #[serde(default)]
    #[param(required = false)]
    interval: HistoryInterval,
}

/// Show the counters of a disk by second over the last hour, or by minute over the last day, since the start of the daemon.
#[utoipa::path(get, path = "/v1/history", operation_id = "get_history", params(Selection), responses(
    (status = 200, description = "Intervals with activity, oldest first", body = DiskHistory),
    NameErrors, ReadErrors,
))]
pub(super) async fn get(
    State(api): State<Api>,
    query: Result<Query<Selection>, QueryRejection>,
) -> Result<Json<DiskHistory>, ErrorResponse> {
    let Query(selection) = query.map_err(|error| ErrorResponse::bad_request(error.body_text()))?;
    let overview = api.overview()?;
    let disk = &selection.disk;
    if overview.live().config.disk(disk).is_none() {
        return Err(ErrorResponse::not_found(format!(
            "there is no disk `{disk}`"
        )));
    }
    Ok(Json(overview.history.of(disk, selection.interval)))
}
