//! `/v1/log`: the filter of a daemon's log.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What is logged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// A level (`error`, `warn`, `info`, `debug`, `trace`, `off`), or `PART=LEVEL,...`.
    pub filter: String,
}
