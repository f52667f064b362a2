//! `GET /v1/version`: which daemon this is.

use axum::Json;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Which daemon answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// `lunette`.
    pub name: String,
    /// The daemon's version.
    pub version: String,
}

impl Version {
    /// This one.
    pub fn this() -> Version {
        Version {
            name: "lunette".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Which daemon this is.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, description = "Name and version", body = Version)))]
pub(super) async fn get() -> Json<Version> {
    Json(Version::this())
}
