//! Operations without query parameters refuse every parameter. The others check their own.

use std::collections::HashSet;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use utoipa::openapi::path::{Operation, Parameter, ParameterIn};
use utoipa::openapi::{OpenApi, RefOr};

use super::ErrorResponse;

/// Methods and paths of operations.
pub(super) type Plain = Arc<HashSet<(Method, String)>>;

/// Returns true for operations below `/v1` without query parameters. The page, the probes and `/metrics` accept any.
pub(super) fn refuses_all(path: &str, operation: &Operation) -> bool {
    let is_query = |parameter: &RefOr<Parameter>| match parameter {
        RefOr::T(parameter) => parameter.parameter_in == ParameterIn::Query,
        RefOr::Ref(_) => false,
    };
    path.starts_with("/v1/") && !operation.parameters.iter().flatten().any(is_query)
}

/// Returns the operations of a document that refuse all query parameters.
pub(super) fn plain(document: &OpenApi) -> Plain {
    let mut plain = HashSet::new();
    for (path, item) in &document.paths.paths {
        let operations = [
            (Method::GET, &item.get),
            (Method::PUT, &item.put),
            (Method::POST, &item.post),
            (Method::DELETE, &item.delete),
        ];
        for (method, operation) in operations {
            if operation
                .as_ref()
                .is_some_and(|operation| refuses_all(path, operation))
            {
                plain.insert((method, path.clone()));
            }
        }
    }
    Arc::new(plain)
}

/// Refuses query parameters of operations that have none.
pub(super) async fn refuse(
    State(plain): State<Plain>,
    path: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    let query = request.uri().query().filter(|query| !query.is_empty());
    if let (Some(query), Some(path)) = (query, path) {
        let operation = (request.method().clone(), path.as_str().to_owned());
        if plain.contains(&operation) {
            let path = request.uri().path();
            let detail = format!("{path} has no query parameters: {query:?}");
            return ErrorResponse::bad_request(detail).into_response();
        }
    }
    next.run(request).await
}
