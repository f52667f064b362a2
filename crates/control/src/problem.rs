//! Errors as problem details (RFC 9457).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Reason why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// HTTP status, repeated for readers of the body alone.
    pub status: u16,
    /// General description.
    pub title: String,
    /// Description of this error, with its values.
    pub detail: String,
    /// All errors, each with its field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldProblem>,
}

/// One error of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FieldProblem {
    /// JSON pointer (RFC 6901) to the field in the request's body; empty for the whole body.
    pub pointer: String,
    /// Description of the error.
    pub detail: String,
    /// Allowed values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<String>,
    /// Hint for the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}
