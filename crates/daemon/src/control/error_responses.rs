//! Error responses by type of request, for the descriptions of all handlers.

use std::collections::BTreeMap;

use utoipa::IntoResponses;
use utoipa::openapi::{Content, Ref, RefOr, Response};

/// Errors of a request that only reads.
pub(super) struct ReadErrors;

/// Errors of a request that names an object in its path or query.
pub(super) struct NameErrors;

/// Errors of a request that makes a change.
pub(super) struct ChangeErrors;

/// Errors of a request with a body.
pub(super) struct BodyErrors;

type Answers = BTreeMap<String, RefOr<Response>>;

pub(super) fn problem(description: &str) -> Response {
    let content = Content::new(Some(Ref::from_schema_name("Problem")));
    Response::builder()
        .description(description)
        .content("application/problem+json", content)
        .build()
}

fn problems<const N: usize>(statuses: [(u16, &str); N]) -> Answers {
    let statuses = statuses.into_iter();
    statuses
        .map(|(status, description)| (status.to_string(), RefOr::T(problem(description))))
        .collect()
}

const SENSELESS: (u16, &str) = (400, "Malformed request");
const DEFECT: (u16, &str) = (500, "Internal error; the daemon's log has details");
const ENDING: (u16, &str) = (503, "The daemon is shutting down");

impl IntoResponses for ReadErrors {
    fn responses() -> Answers {
        problems([DEFECT, ENDING])
    }
}

impl IntoResponses for NameErrors {
    fn responses() -> Answers {
        problems([SENSELESS, (404, "Not found")])
    }
}

impl IntoResponses for ChangeErrors {
    fn responses() -> Answers {
        let mut answers = problems([
            SENSELESS,
            (
                403,
                "Forbidden: the client may only read, or may not use this file",
            ),
            (409, "Conflict: in use, or already taken"),
            (422, "Invalid request content"),
            DEFECT,
            ENDING,
            (507, "The change could not be persisted and was rolled back"),
        ]);
        let content = Content::new(Some(Ref::from_schema_name("Accepted")));
        let accepted = Response::builder()
            .description("The change continues in the background and waits for clients of the removed objects")
            .content("application/json", content)
            .build();
        answers.insert("202".to_owned(), RefOr::T(accepted));
        answers
    }
}

impl IntoResponses for BodyErrors {
    fn responses() -> Answers {
        problems([
            SENSELESS,
            (408, "The body was not complete in time"),
            (413, "The body is too large"),
        ])
    }
}
