//! `GET /v1/status`: what is served, and to whom.

use std::sync::Arc;

use ::control::Status;
use axum::Json;
use axum::extract::{ConnectInfo, State};

use super::ErrorResponse;
use super::access::{Peer, Right};
use super::api::Api;
use super::error_responses::ReadErrors;
use super::server::blocking;

/// Show what is served, and to whom. Disks first follow files whose size has changed.
#[utoipa::path(get, path = "/v1/status", responses(
    (status = 200, description = "What is served", body = Status),
    ReadErrors,
))]
pub(super) async fn get(
    State(api): State<Api>,
    ConnectInfo(peer): ConnectInfo<Peer>,
) -> Result<Json<Status>, ErrorResponse> {
    status_for(&api, &peer).await.map(Json)
}

pub(super) async fn status_for(api: &Api, peer: &Peer) -> Result<Status, ErrorResponse> {
    if let Ok(overview) = api.overview() {
        api.manager.follow_sizes(overview.live()).await;
    }
    let view = Arc::clone(&api.view);
    let status = blocking(move || view.status()).await?;
    Ok(Status {
        may_change: peer.right != Right::Read,
        ..status
    })
}
