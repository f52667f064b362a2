//! Errors as responses: problem details (RFC 9457) with their status and media type.

use ::control::{FieldProblem, Problem};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::objects::{Fault, Refusal};
use config::nearest;

/// A problem as an HTTP response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorResponse(pub Problem);

impl ErrorResponse {
    /// Creates a problem with status 404 for an object of this kind and name. Suggests a similar one of `names`.
    pub fn no_such<'a>(
        kind: &str,
        name: &str,
        names: impl IntoIterator<Item = &'a str>,
    ) -> ErrorResponse {
        let hint = match nearest(name, names) {
            Some(guess) => format!("; hint: did you mean `{guess}`?"),
            None => format!("; hint: lunette {kind} list"),
        };
        ErrorResponse::not_found(format!("there is no {kind} `{name}`{hint}"))
    }

    /// Creates a problem with status 404.
    pub fn not_found(detail: impl Into<String>) -> ErrorResponse {
        ErrorResponse::new(StatusCode::NOT_FOUND, detail)
    }

    /// Creates a problem with status 400.
    pub fn bad_request(detail: impl Into<String>) -> ErrorResponse {
        ErrorResponse::new(StatusCode::BAD_REQUEST, detail)
    }

    /// Creates a problem with status 500.
    pub fn internal(detail: impl Into<String>) -> ErrorResponse {
        ErrorResponse::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
    }

    /// Creates a problem with any status.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> ErrorResponse {
        ErrorResponse(Problem {
            status: status.as_u16(),
            title: status.canonical_reason().unwrap_or("error").to_owned(),
            detail: detail.into(),
            errors: Vec::new(),
        })
    }
}

impl From<Refusal> for ErrorResponse {
    fn from(refusal: Refusal) -> ErrorResponse {
        let status = match &refusal {
            Refusal::NotFound(_) => StatusCode::NOT_FOUND,
            Refusal::Invalid(_) | Refusal::Failed(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Refusal::Forbidden(_) => StatusCode::FORBIDDEN,
            Refusal::Conflict(_) => StatusCode::CONFLICT,
            Refusal::NotPersisted(_) => StatusCode::INSUFFICIENT_STORAGE,
            Refusal::Ending => StatusCode::SERVICE_UNAVAILABLE,
        };
        let field = |fault: Fault| FieldProblem {
            pointer: fault.pointer,
            detail: fault.detail,
            allowed: fault.allowed,
            help: fault.help,
        };
        let mut response = ErrorResponse::new(status, refusal.to_string());
        response.0.errors = refusal.faults().into_iter().map(field).collect();
        response
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let ErrorResponse(problem) = self;
        let status =
            StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let kind = [(header::CONTENT_TYPE, "application/problem+json")];
        let body = serde_json::to_string(&problem).unwrap_or_default();
        (status, kind, body).into_response()
    }
}
