//! `/v1/log`: the log filter of a daemon.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Log filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// A level (`error`, `warn`, `info`, `debug`, `trace`, `off`), or `PART=LEVEL,...`.
    pub filter: String,
}
