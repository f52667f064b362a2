//! Errors as problem details (RFC 9457).

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::objects::{Fault, Refusal};

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

impl Problem {
    /// There is no such thing.
    pub fn not_found(detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::NOT_FOUND, detail)
    }

    /// The request does not make sense.
    pub fn bad_request(detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::BAD_REQUEST, detail)
    }

    /// The daemon could not answer.
    pub fn internal(detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
    }

    /// A problem of any status.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Problem {
        Problem {
            status: status.as_u16(),
            title: status.canonical_reason().unwrap_or("error").to_owned(),
            detail: detail.into(),
            errors: Vec::new(),
        }
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Problem {
        let status = match &refusal {
            Refusal::NotFound(_) => StatusCode::NOT_FOUND,
            Refusal::Invalid(_) | Refusal::Failed(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Refusal::Conflict(_) => StatusCode::CONFLICT,
            Refusal::NotKept(_) => StatusCode::INSUFFICIENT_STORAGE,
            Refusal::Ending => StatusCode::SERVICE_UNAVAILABLE,
        };
        let field = |fault: Fault| FieldProblem {
            pointer: fault.pointer,
            detail: fault.detail,
            allowed: fault.allowed,
            help: fault.help,
        };
        Problem {
            errors: refusal.faults().into_iter().map(field).collect(),
            ..Problem::new(status, refusal.to_string())
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let kind = [(header::CONTENT_TYPE, "application/problem+json")];
        let body = serde_json::to_string(&self).unwrap_or_default();
        (status, kind, body).into_response()
    }
}
