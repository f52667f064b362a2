//! `GET /metrics` for Prometheus, and `GET /v1/statistics`: the same counters as JSON.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};

use super::server::blocking;
use super::{Problem, View};
use crate::statistics::Statistics;

/// Both resources.
pub(super) fn routes() -> Router<Arc<dyn View>> {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/v1/statistics", get(statistics))
}

async fn metrics(State(view): State<Arc<dyn View>>) -> Result<Response, Problem> {
    let page = blocking(move || view.metrics()).await?;
    let headers = [(CONTENT_TYPE, crate::metrics::CONTENT_TYPE)];
    Ok((headers, page).into_response())
}

async fn statistics(State(view): State<Arc<dyn View>>) -> Result<Json<Statistics>, Problem> {
    blocking(move || view.statistics()).await.map(Json)
}
