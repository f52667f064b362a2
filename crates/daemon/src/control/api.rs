//! What all resources share: the state that they are asked of, bodies and options of requests, the router with its
//! OpenAPI document, which is made of the handlers' own descriptions.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Query};
use axum::http::{Method, StatusCode, Uri};
use axum::response::IntoResponse;
use axum::routing::get;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::broadcast;
use utoipa::openapi::{Content, Ref, RefOr, Response};
use utoipa::{IntoParams, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Problem, View};
use super::{
    configuration, disks, events, exports, latency, log, lookers, luns, metrics, status, version,
};
use crate::objects::{Change, Event, How, Made, Manager};
use crate::running::{Overview, Reload};

/// A request's body: 16,384 disks and as many logical units take three megabytes.
const BODY_MAX: usize = 16 << 20;

/// All that requests are answered from.
#[derive(Clone)]
pub struct Api {
    /// What is served and measured.
    pub view: Arc<dyn View>,
    /// Who makes changes.
    pub manager: Manager,
    pub(crate) overview: Option<Arc<Overview>>,
    /// Where listeners subscribe.
    pub events: broadcast::Sender<Event>,
    /// How the configuration is read anew.
    pub reload: Option<Reload>,
}

impl Api {
    /// Makes a change.
    pub(super) async fn change(&self, change: Change, force: bool) -> Result<Made, Problem> {
        let how = How {
            force,
            ..How::default()
        };
        let made = self.manager.ask(move |owner| owner.change(change, how));
        Ok(made.await?)
    }

    /// The objects as they are.
    pub(super) fn overview(&self) -> Result<&Arc<Overview>, Problem> {
        let ending = || Problem::from(crate::objects::Refusal::Ending);
        self.overview.as_ref().ok_or_else(ending)
    }
}

/// How a change is to be made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Force {
    /// What is in the way goes too: clients are disconnected, requests aborted, data beyond a new end dropped.
    #[serde(default)]
    #[param(required = false)]
    pub force: bool,
}

pub(super) type ForceQuery = Result<Query<Force>, QueryRejection>;

pub(super) fn force(query: ForceQuery) -> Result<bool, Problem> {
    let Query(Force { force }) = query.map_err(|error| Problem::bad_request(error.body_text()))?;
    Ok(force)
}

/// A body that is JSON.
pub(super) fn json(body: Result<Bytes, BytesRejection>) -> Result<Value, Problem> {
    let body = body.map_err(|error| {
        let status = error.status();
        Problem::new(status, error.body_text())
    })?;
    serde_json::from_slice(&body)
        .map_err(|error| Problem::bad_request(format!("the body is no JSON: {error}")))
}

#[derive(OpenApi)]
#[openapi(info(
    title = "Lunette",
    description = "Disks, exports and logical units of a running daemon. The names are those of its configuration file."
))]
struct Document;

/// Changes may be refused to those who may only look on: said of all of them here.
fn forbid(document: &mut utoipa::openapi::OpenApi) {
    let told = Response::builder()
        .description("Who asks may look on, and change nothing")
        .content(
            "application/problem+json",
            Content::new(Some(Ref::from_schema_name("Problem"))),
        )
        .build();
    for path in document.paths.paths.values_mut() {
        let changes = [&mut path.put, &mut path.post, &mut path.delete];
        for operation in changes.into_iter().flatten() {
            let responses = &mut operation.responses.responses;
            responses.insert("403".to_owned(), RefOr::T(told.clone()));
        }
    }
}

fn described() -> OpenApiRouter<Api> {
    let mut described = routes();
    forbid(described.get_openapi_mut());
    described
}

fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(latency::get))
        .routes(routes!(log::show, log::change))
        .routes(routes!(metrics::metrics))
        .routes(routes!(metrics::statistics))
        .routes(routes!(status::get))
        .routes(routes!(version::get))
        .routes(routes!(disks::list))
        .routes(routes!(disks::show, disks::put, disks::remove))
        .routes(routes!(disks::resize))
        .routes(routes!(exports::list))
        .routes(routes!(exports::show, exports::put, exports::remove))
        .routes(routes!(luns::list, luns::replace))
        .routes(routes!(luns::show, luns::put, luns::remove))
        .routes(routes!(lookers::workers))
        .routes(routes!(lookers::sessions))
        .routes(routes!(lookers::end_session))
        .routes(routes!(lookers::reservations))
        .routes(routes!(configuration::show, configuration::replace))
        .routes(routes!(configuration::text))
        .routes(routes!(configuration::changes))
        .routes(routes!(configuration::reload))
        .routes(routes!(events::listen))
}

/// The OpenAPI document of all resources.
pub fn openapi() -> utoipa::openapi::OpenApi {
    described().into_openapi()
}

pub(super) fn router(api: Api) -> Router {
    let (router, document) = described().split_for_parts();
    // It does not change: made once.
    let document = document.to_json().unwrap_or_default();
    let document: Arc<str> = document.into();
    let serve = move || {
        let document = document.clone();
        async move {
            let kind = [(axum::http::header::CONTENT_TYPE, "application/json")];
            (kind, document.to_string()).into_response()
        }
    };
    router
        .route("/v1/openapi.json", get(serve))
        .fallback(unknown)
        .method_not_allowed_fallback(not_allowed)
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(api)
}

async fn unknown(uri: Uri) -> Problem {
    Problem::not_found(format!("there is no resource {}", uri.path()))
}

async fn not_allowed(method: Method, uri: Uri) -> Problem {
    let detail = format!("{method} is not for {}", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail)
}
