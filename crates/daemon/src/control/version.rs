//! `GET /v1/version`: which daemon this is.

use axum::Json;
use serde::{Deserialize, Serialize};

/// Which daemon answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

pub(super) async fn get() -> Json<Version> {
    Json(Version::this())
}
