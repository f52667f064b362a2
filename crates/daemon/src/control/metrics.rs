//! `GET /metrics` for Prometheus, and `GET /v1/statistics`: the same counters as JSON.

use ::control::statistics::Statistics;
use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use super::ErrorResponse;
use super::api::Api;
use super::error_responses::ReadErrors;
use super::server::blocking;

/// Show all counters for Prometheus.
#[utoipa::path(get, path = "/metrics", operation_id = "get_metrics", responses(
    (status = 200, description = "The page", body = String, content_type = "text/plain"),
    ReadErrors,
))]
pub(super) async fn metrics(State(api): State<Api>) -> Result<Response, ErrorResponse> {
    let page = blocking(move || api.view.metrics()).await?;
    let headers = [(CONTENT_TYPE, crate::metrics::CONTENT_TYPE)];
    Ok((headers, page).into_response())
}

/// Show the counters of workers, disks and queues since the daemon started.
#[utoipa::path(get, path = "/v1/statistics", operation_id = "get_statistics", responses(
    (status = 200, description = "All counters", body = Statistics),
    ReadErrors,
))]
pub(super) async fn statistics(State(api): State<Api>) -> Result<Json<Statistics>, ErrorResponse> {
    blocking(move || api.view.statistics()).await.map(Json)
}
