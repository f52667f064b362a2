//! `GET` and `PUT /v1/log`: the log filter.

use ::control::Log;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;

use super::ErrorResponse;
use super::api::{self, Api};
use super::error_responses::{BodyErrors, NameErrors, ReadErrors};

fn handle(api: &Api) -> Result<crate::LogHandle, ErrorResponse> {
    let missing = || ErrorResponse::not_found("this daemon's log filter cannot be changed");
    api.view.log().ok_or_else(missing)
}

/// Show the log filter.
#[utoipa::path(get, path = "/v1/log", responses(
    (status = 200, description = "The filter in force", body = Log),
    NameErrors, ReadErrors,
))]
pub(super) async fn show(State(api): State<Api>) -> Result<Json<Log>, ErrorResponse> {
    let filter = handle(&api)?.0.filter();
    Ok(Json(Log { filter }))
}

/// Set the log filter until the daemon ends.
#[utoipa::path(put, path = "/v1/log", request_body = Log, responses(
    (status = 200, description = "The filter in force", body = Log),
    NameErrors, ReadErrors, BodyErrors,
))]
pub(super) async fn change(
    State(api): State<Api>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Log>, ErrorResponse> {
    let body = api::json(body)?;
    let log: Log = serde_json::from_value(body).map_err(|error| {
        ErrorResponse::bad_request(format!("the body is not a log filter: {error}"))
    })?;
    let handle = handle(&api)?;
    handle
        .0
        .set_filter(&log.filter)
        .map_err(|why| ErrorResponse::bad_request(format!("filter: {why}")))?;
    Ok(Json(log))
}
