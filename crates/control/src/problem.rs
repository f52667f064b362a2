//! Errors as problem details (RFC 9457).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was not answered with what it asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The HTTP status again, for those who see only the body.
    pub status: u16,
    /// What is wrong in general.
    pub title: String,
    /// What is wrong here, with the values in question.
    pub detail: String,
    /// All reasons, each with its field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldProblem>,
}

/// One reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FieldProblem {
    /// JSON pointer (RFC 6901) of the field in the request's body; empty: all of it.
    pub pointer: String,
    /// What is wrong.
    pub detail: String,
    /// What is allowed there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<String>,
    /// What to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}
