//! Response of `GET /v1/version`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Incremented with each change of the handover that older versions cannot read.
pub const HANDOVER_VERSION: u32 = 1;

/// Name and version of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// `lunette`.
    pub name: String,
    /// Version of the daemon.
    pub version: String,
    /// Version of its handover to another daemon (`lunette upgrade`).
    #[serde(default)]
    pub handover: u32,
    /// Process ID.
    #[serde(default)]
    pub pid: u32,
}

/// A daemon that takes over from this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Upgrade {
    /// Handover version that it understands, as in [`Version`].
    pub handover: u32,
    /// Datagram socket for the descriptors, with the protocol of a service manager (`FDSTORE=1`).
    pub socket: String,
}

impl Version {
    /// Returns the version of this daemon.
    pub fn this() -> Version {
        Version {
            name: "lunette".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            handover: HANDOVER_VERSION,
            pid: std::process::id(),
        }
    }
}
