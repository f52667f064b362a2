//! The answer of `GET /v1/version`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Changes with every change of what is handed over that an older version would not understand.
pub const HANDOVER_VERSION: u32 = 1;

/// Which daemon answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// `lunette`.
    pub name: String,
    /// The daemon's version.
    pub version: String,
    /// The version of what it hands over to another daemon (`lunette upgrade`).
    #[serde(default)]
    pub handover: u32,
    /// The process.
    #[serde(default)]
    pub pid: u32,
}

/// Another daemon that is to go on with what this one serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Upgrade {
    /// The version of what it understands: as in [`Version`].
    pub handover: u32,
    /// A datagram socket, where it takes descriptors as a service manager does (`FDSTORE=1`).
    pub socket: String,
}

impl Version {
    /// This one.
    pub fn this() -> Version {
        Version {
            name: "lunette".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            handover: HANDOVER_VERSION,
            pid: std::process::id(),
        }
    }
}
