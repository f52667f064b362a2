//! `GET /v1/version`: name and version of the daemon.

use ::control::Version;
use axum::Json;

/// Show the version of the daemon.
#[utoipa::path(get, path = "/v1/version", operation_id = "get_version", responses((status = 200, description = "Name and version", body = Version)))]
pub(super) async fn get() -> Json<Version> {
    Json(Version::this())
}
