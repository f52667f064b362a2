//! `GET /v1/status`: what is served, and to whom.

use ::control::Status;
use axum::Json;
use axum::extract::State;

use super::ErrorResponse;
use super::answers::Looks;
use super::api::Api;
use super::server::blocking;

/// What is served, and to whom, in short. Sizes that were changed outside are followed first.
#[utoipa::path(get, path = "/v1/status", responses(
    (status = 200, description = "What is served", body = Status),
    Looks,
))]
pub(super) async fn get(State(api): State<Api>) -> Result<Json<Status>, ErrorResponse> {
    if let Ok(overview) = api.overview() {
        api.manager.follow_sizes(overview.live()).await;
    }
    blocking(move || api.view.status()).await.map(Json)
}
