//! The answer of `GET /v1/version`.

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
