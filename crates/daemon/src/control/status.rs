//! `GET /v1/status`: served objects and their clients.

use std::sync::Arc;

use ::control::statistics::Statistics;
use ::control::{Status, status_problems};
use axum::Json;
use axum::extract::{ConnectInfo, State};

use super::ErrorResponse;
use super::access::{Peer, Right};
use super::api::Api;
use super::error_responses::ReadErrors;
use super::server::blocking;

/// Show the served objects and their clients. Disks first adopt changed sizes of their files.
#[utoipa::path(get, path = "/v1/status", operation_id = "get_status", responses(
    (status = 200, description = "Disks, exports and workers", body = Status),
    ReadErrors,
))]
pub(super) async fn get(
    State(api): State<Api>,
    ConnectInfo(peer): ConnectInfo<Peer>,
) -> Result<Json<Status>, ErrorResponse> {
    let (status, _) = status_for(&api, &peer).await?;
    Ok(Json(status))
}

/// Returns the status, and the counters that its problems derive from.
pub(super) async fn status_for(
    api: &Api,
    peer: &Peer,
) -> Result<(Status, Statistics), ErrorResponse> {
    if let Ok(overview) = api.overview() {
        api.manager.follow_sizes(overview.live()).await;
    }
    let view = Arc::clone(&api.view);
    let (status, statistics) = blocking(move || (view.status(), view.statistics())).await?;
    let status = Status {
        may_change: peer.right != Right::Read,
        problems: status_problems(&status, &statistics),
        ..status
    };
    Ok((status, statistics))
}
