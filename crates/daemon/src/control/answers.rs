//! The problems that requests are answered with, by what a request is about: the one list of them, for all handlers'
//! descriptions.

use std::collections::BTreeMap;

use utoipa::IntoResponses;
use utoipa::openapi::{Content, Ref, RefOr, Response};

/// Looks on.
pub(super) struct Looks;

/// Names something, in its address or its query.
pub(super) struct Names;

/// Makes a change.
pub(super) struct Alters;

/// Has a body.
pub(super) struct Takes;

type Answers = BTreeMap<String, RefOr<Response>>;

/// A problem as an answer.
pub(super) fn problem(description: &str) -> Response {
    let content = Content::new(Some(Ref::from_schema_name("Problem")));
    Response::builder()
        .description(description)
        .content("application/problem+json", content)
        .build()
}

fn problems<const N: usize>(told: [(u16, &str); N]) -> Answers {
    let told = told.into_iter();
    told.map(|(status, description)| (status.to_string(), RefOr::T(problem(description))))
        .collect()
}

const SENSELESS: (u16, &str) = (400, "The request makes no sense");
const DEFECT: (u16, &str) = (500, "A defect of the daemon, which its log tells of");
const ENDING: (u16, &str) = (503, "The daemon ends");

impl IntoResponses for Looks {
    fn responses() -> Answers {
        problems([DEFECT, ENDING])
    }
}

impl IntoResponses for Names {
    fn responses() -> Answers {
        problems([SENSELESS, (404, "There is nothing of this name")])
    }
}

impl IntoResponses for Alters {
    fn responses() -> Answers {
        let mut answers = problems([
            SENSELESS,
            (409, "Something is in the way: it is in use, or taken"),
            (422, "It cannot be so"),
            DEFECT,
            ENDING,
            (507, "It could not be kept, so it was taken back"),
        ]);
        let content = Content::new(Some(Ref::from_schema_name("Accepted")));
        let accepted = Response::builder()
            .description("The change goes on by itself, and waits for clients of what it removes")
            .content("application/json", content)
            .build();
        answers.insert("202".to_owned(), RefOr::T(accepted));
        answers
    }
}

impl IntoResponses for Takes {
    fn responses() -> Answers {
        problems([SENSELESS, (413, "The body is too large")])
    }
}
