//! `GET` and `PUT /v1/log`: the log filter.

use ::control::Log;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;

use super::ErrorResponse;
use super::api::{self, Api};
use super::error_responses::{BodyErrors, ChangeErrors, NameErrors, ReadErrors};
use crate::objects::{Fault, Refusal};

fn handle(api: &Api) -> Result<crate::LogHandle, ErrorResponse> {
    let missing = || ErrorResponse::not_found("this daemon's log filter cannot be changed");
    api.view.log().ok_or_else(missing)
}

/// Show the log filter.
#[utoipa::path(get, path = "/v1/log", operation_id = "get_log_filter", responses(
    (status = 200, description = "The filter in force", body = Log),
    NameErrors, ReadErrors,
))]
pub(super) async fn show(State(api): State<Api>) -> Result<Json<Log>, ErrorResponse> {
    let filter = handle(&api)?.0.filter();
    Ok(Json(Log { filter }))
}

/// Set the log filter until the daemon ends.
#[utoipa::path(put, path = "/v1/log", operation_id = "set_log_filter", request_body = Log, responses(
    (status = 200, description = "The filter in force", body = Log),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn change(
    State(api): State<Api>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Log>, ErrorResponse> {
    let log: Log = api::read(body)?;
    let handle = handle(&api)?;
    handle
        .0
        .set_filter(&log.filter)
        .map_err(|why| Refusal::Invalid(vec![Fault::at("/filter", why.to_string())]))?;
    Ok(Json(log))
}
