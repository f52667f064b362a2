//! `GET /v1/version`: which daemon this is.

use ::control::Version;
use axum::Json;

/// Which daemon this is.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, description = "Name and version", body = Version)))]
pub(super) async fn get() -> Json<Version> {
    Json(Version::this())
}
