//! Common parts of all resources: shared state, request bodies and options, the router, and the OpenAPI document generated from the
//! handlers.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ::control::{Accepted, Event, HistoryInterval, Problem};
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, FromRequestParts, Query};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, middleware};
use config::{DISK_SET, DiskKey, EXPORT_KINDS, Key, disk_keys, pointer_token};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use serde_path_to_error::Segment;
use tokio::sync::broadcast;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{IntoParams, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::body_time::{BODY_TIME, is_timeout};
use super::error_responses::problem;
use super::health::check_of;
use super::strict_objects::StrictObjects;
use super::{ErrorResponse, View, backups};
use super::{
    clients, configuration, disks, events, exports, health, history, jobs, latency, log, luns,
    metrics, page, parameters, saved_state, status, upgrade, version,
};
use crate::handover::Ending;
use crate::jobs::Context;
use crate::objects::{Change, ChangeOptions, ChangeResult, Fault, Manager, Refusal, Work};
use crate::overview::Overview;
use crate::running::Reload;

/// Largest request body in bytes. 16,384 disks and as many logical units take three megabytes.
const BODY_MAX: usize = 16 << 20;

/// Shared state of all request handlers.
#[derive(Clone)]
pub struct Api {
    /// Status and measurements.
    pub view: Arc<dyn View>,
    /// Handle of the owner, which makes changes.
    pub manager: Manager,
    pub(crate) overview: Option<Arc<Overview>>,
    /// Channel for event subscribers.
    pub events: broadcast::Sender<Event>,
    pub(crate) jobs: Option<Context>,
    /// Ends the daemon in favour of another one.
    pub(crate) ending: Option<Ending>,
    /// Reads the configuration file again.
    pub reload: Option<Reload>,
}

impl Api {
    /// Makes a change. Returns `None` if it still waits for clients or storage after the requested time.
    pub(super) async fn change(
        &self,
        change: Change,
        options: Force,
    ) -> Result<Option<ChangeResult>, ErrorResponse> {
        self.work(Work::Change(Box::new(change)), options).await
    }

    /// Makes a change or adopts the configuration file. Returns `None` as [`Api::change`] does.
    pub(super) async fn work(
        &self,
        work: Work,
        Force { force, wait }: Force,
    ) -> Result<Option<ChangeResult>, ErrorResponse> {
        let options = ChangeOptions {
            force,
            ..ChangeOptions::default()
        };
        let wait = Duration::from_secs(wait.map_or(WAIT, u64::from));
        // Draining objects are visible from here on, even if the caller does not wait.
        let result = self.manager.begin(work, options).await?;
        match tokio::time::timeout(wait, result).await {
            Ok(result) => Ok(Some(result?)),
            Err(_) => Ok(None),
        }
    }

    /// Returns the response to a continuing change: the clients and disks that it waits for.
    pub(super) fn accepted(&self) -> Result<Response, ErrorResponse> {
        let overview = self.overview()?;
        let live = overview.live();
        let requests = exports::requests(overview);
        let count = |export: &str| requests.get(export).copied().unwrap_or(0);
        let opening = live.opening.iter();
        let opening = opening.map(|disk| format!("disk {disk} is being opened"));
        let waits = live.draining.iter().flat_map(|one| one.lines(&count));
        let waits = waits.chain(opening);
        let accepted = Accepted {
            waits: waits.collect(),
        };
        Ok((StatusCode::ACCEPTED, Json(accepted)).into_response())
    }

    pub(super) fn overview(&self) -> Result<&Arc<Overview>, ErrorResponse> {
        let ending = || ErrorResponse::from(crate::objects::Refusal::Ending);
        self.overview.as_ref().ok_or_else(ending)
    }
}

/// Options of a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Force {
    /// Override conflicts: disconnect clients, abort requests, drop data beyond a new end.
    #[serde(default)]
    #[param(required = false)]
    pub force: bool,
    /// Seconds to wait for clients of removed objects (default 50). After that the response is 202, and the change continues.
    #[param(required = false, maximum = 3600)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<u16>,
}

/// Default of `wait` in seconds.
const WAIT: u64 = 50;

/// Largest value of `wait` in seconds.
const WAIT_MAX: u16 = 3600;

pub(super) type ForceQuery = Result<Query<Force>, QueryRejection>;

pub(super) fn force(query: ForceQuery) -> Result<Force, ErrorResponse> {
    let Query(force) = query.map_err(|error| ErrorResponse::bad_request(error.body_text()))?;
    match force.wait {
        Some(wait) if wait > WAIT_MAX => Err(ErrorResponse::bad_request(format!(
            "wait={wait}: the maximum is {WAIT_MAX} seconds"
        ))),
        _ => Ok(force),
    }
}

/// Names in the path of a resource.
pub(super) struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ErrorResponse> {
        let names = axum::extract::Path::<T>::from_request_parts(parts, state).await;
        let axum::extract::Path(names) =
            names.map_err(|error| ErrorResponse::new(error.status(), error.body_text()))?;
        Ok(Path(names))
    }
}

pub(super) fn json(body: Result<Bytes, BytesRejection>) -> Result<Value, ErrorResponse> {
    let body = body.map_err(|error| {
        if is_timeout(&error) {
            let detail = format!("the body was not complete after {} s", BODY_TIME.as_secs());
            return ErrorResponse::new(StatusCode::REQUEST_TIMEOUT, detail);
        }
        let detail = match error.status() {
            StatusCode::PAYLOAD_TOO_LARGE => format!("the body has more than {BODY_MAX} bytes"),
            _ => error.body_text(),
        };
        ErrorResponse::new(error.status(), detail)
    })?;
    serde_json::from_slice(&body)
        .map_err(|error| ErrorResponse::bad_request(format!("the body is not JSON: {error}")))
}

/// Reads a body of the type of a request. The error names the field.
pub(super) fn read<T: DeserializeOwned>(
    body: Result<Bytes, BytesRejection>,
) -> Result<T, ErrorResponse> {
    serde_path_to_error::deserialize(StrictObjects(json(body)?)).map_err(|error| {
        let mut pointer = String::new();
        for segment in error.path() {
            match segment {
                Segment::Seq { index } => pointer.push_str(&format!("/{index}")),
                Segment::Map { key } => pointer.push_str(&format!("/{}", pointer_token(key))),
                Segment::Enum { .. } | Segment::Unknown => {}
            }
        }
        let fault = Fault::at(pointer, error.into_inner().to_string());
        Refusal::Invalid(vec![fault]).into()
    })
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Lunette",
        description = "Disks, exports and logical units of a running daemon. Keys have the names of the configuration file."
    ),
    components(schemas(Problem, Accepted, HistoryInterval))
)]
struct Document;

/// Adds the authentication and authorization errors common to all operations.
fn guard(document: &mut utoipa::openapi::OpenApi) {
    let unknown = problem("Missing or wrong token, over TCP");
    let looks = problem("The client may only read");
    let parameter = problem("A query parameter");
    for (name, path) in &mut document.paths.paths {
        let changes = [&mut path.put, &mut path.post, &mut path.delete];
        for operation in changes.into_iter().flatten() {
            let responses = &mut operation.responses.responses;
            responses.insert("403".to_owned(), RefOr::T(looks.clone()));
        }
        let all = [
            &mut path.get,
            &mut path.put,
            &mut path.post,
            &mut path.delete,
        ];
        for operation in all.into_iter().flatten() {
            let refuses = parameters::refuses_all(name, operation);
            let responses = &mut operation.responses.responses;
            if check_of(name).is_some() {
                responses.insert("503".to_owned(), RefOr::T(problem("Not ok")));
                operation.security = Some(Vec::new());
            }
            responses.insert("401".to_owned(), RefOr::T(unknown.clone()));
            if refuses {
                let bad = responses.entry("400".to_owned());
                bad.or_insert_with(|| RefOr::T(parameter.clone()));
            }
        }
    }
    let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    let components = document.components.get_or_insert_default();
    components.add_security_scheme("token", bearer);
    // A token over TCP, nothing on the control socket.
    let either = [
        SecurityRequirement::new("token", Vec::<String>::new()),
        SecurityRequirement::default(),
    ];
    document.security = Some(either.to_vec());
}

/// Adds the keys of the configuration to the schema of an object.
fn add_keys<D: 'static, T: 'static>(
    document: &mut utoipa::openapi::OpenApi,
    object: &str,
    keys: impl Iterator<Item = &'static Key<D, T>>,
    has: fn(&Key<D, T>) -> bool,
) {
    let components = document.components.get_or_insert_default();
    let Some(RefOr::T(Schema::Object(object))) = components.schemas.get_mut(object) else {
        return;
    };
    for key in keys.filter(|key| has(key)) {
        let schema = serde_json::from_value::<RefOr<Schema>>(key.schema());
        let schema = schema.expect("a key's schema is one");
        object.properties.insert(key.name.to_owned(), schema);
        // The path has the name already.
        if key.is_required() && key.name != "name" {
            object.required.push(key.name.to_owned());
        }
    }
}

/// Adds a schema for each kind of export. An export is one of them.
fn add_exports(document: &mut utoipa::openapi::OpenApi) {
    let components = document.components.get_or_insert_default();
    let mut kinds = Vec::new();
    for kind in EXPORT_KINDS {
        let mut schema = kind.properties();
        schema["description"] = json!(kind.summary);
        schema["properties"]["kind"] = json!({"type": "string", "enum": [kind.word]});
        schema["properties"]["status"] = json!({"$ref": "#/components/schemas/ExportState"});
        if let Some(required) = schema["required"].as_array_mut() {
            required.retain(|key| key != "name");
            required.push(json!("kind"));
        }
        let schema = serde_json::from_value::<RefOr<Schema>>(schema);
        let schema = schema.expect("a kind's schema is one");
        components.schemas.insert(kind.schema.to_owned(), schema);
        kinds.push(json!({"$ref": format!("#/components/schemas/{}", kind.schema)}));
    }
    let export = json!({"description": "An export of the kind `kind`.", "oneOf": kinds});
    let export = serde_json::from_value::<RefOr<Schema>>(export);
    let export = export.expect("one of several schemas is a schema");
    components.schemas.insert("Export".to_owned(), export);
}

fn described() -> OpenApiRouter<Api> {
    let mut described = routes();
    guard(described.get_openapi_mut());
    add_keys(described.get_openapi_mut(), "Disk", disk_keys(), |_| true);
    let is_set = |key: &DiskKey| key.run_time == DISK_SET;
    add_keys(
        described.get_openapi_mut(),
        "ErrorPolicy",
        disk_keys(),
        is_set,
    );
    add_exports(described.get_openapi_mut());
    described
}

fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(latency::get))
        .routes(routes!(history::get))
        .routes(routes!(log::show, log::change))
        .routes(routes!(metrics::metrics))
        .routes(routes!(metrics::statistics))
        .routes(routes!(status::get))
        .routes(routes!(version::get))
        .routes(routes!(upgrade::begin))
        .routes(routes!(upgrade::check))
        .routes(routes!(disks::list))
        .routes(routes!(disks::show, disks::put, disks::remove))
        .routes(routes!(disks::resize))
        .routes(routes!(disks::limit))
        .routes(routes!(disks::set_error_policy))
        .routes(routes!(disks::resume))
        .routes(routes!(disks::renew_identity))
        .routes(routes!(jobs::list))
        .routes(routes!(jobs::show, jobs::start, jobs::set, jobs::cancel))
        .routes(routes!(jobs::switch))
        .routes(routes!(jobs::bitmaps))
        .routes(routes!(jobs::remove_bitmap))
        .routes(routes!(jobs::snapshot))
        .routes(routes!(backups::list, backups::start))
        .routes(routes!(backups::end))
        .routes(routes!(backups::cancel))
        .routes(routes!(exports::list))
        .routes(routes!(exports::show, exports::put, exports::remove))
        .routes(routes!(exports::set_access_state))
        .routes(routes!(luns::list, luns::replace))
        .routes(routes!(luns::show, luns::put, luns::remove))
        .routes(routes!(clients::workers))
        .routes(routes!(clients::sessions))
        .routes(routes!(clients::end_session))
        .routes(routes!(clients::reservations))
        .routes(routes!(configuration::show, configuration::replace))
        .routes(routes!(configuration::text))
        .routes(routes!(configuration::changes))
        .routes(routes!(configuration::reload))
        .routes(routes!(saved_state::list_state))
        .routes(routes!(saved_state::reset_state))
        .routes(routes!(events::listen))
        .routes(routes!(events::live))
        .routes(routes!(page::get))
        .routes(routes!(health::health))
        .routes(routes!(health::readiness))
        .routes(routes!(describe))
}

/// The OpenAPI document of all resources.
pub fn openapi() -> utoipa::openapi::OpenApi {
    described().into_openapi()
}

static DOCUMENT: LazyLock<String> = LazyLock::new(|| openapi().to_json().unwrap_or_default());

/// Show this description.
#[utoipa::path(get, path = "/v1/openapi.json", operation_id = "get_description", responses(
    (status = 200, description = "OpenAPI description of all requests and responses", body = Object),
))]
async fn describe() -> impl IntoResponse {
    (
        [(header::CONTENT_TYPE, "application/json")],
        DOCUMENT.as_str(),
    )
}

/// Returns the router of all described handlers.
pub(super) fn router(api: Api) -> Router {
    let (router, document) = described().split_for_parts();
    let plain = parameters::plain(&document);
    router
        .route_layer(middleware::from_fn_with_state(plain, parameters::refuse))
        .fallback(unknown)
        .method_not_allowed_fallback(not_allowed)
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(api)
}

async fn unknown(uri: Uri) -> ErrorResponse {
    ErrorResponse::not_found(format!("there is no resource {}", uri.path()))
}

async fn not_allowed(method: Method, uri: Uri) -> ErrorResponse {
    let detail = format!("{} does not support {method}", uri.path());
    ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, detail)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ::control::Status;
    use ::control::statistics::Statistics;
    use axum::body::Body;
    use axum::extract::Request;
    use http_body_util::BodyExt;
    use hyper::service::Service;
    use hyper_util::service::TowerToHyperService;

    use super::*;

    const METHODS: [&str; 6] = ["GET", "PUT", "POST", "DELETE", "PATCH", "TRACE"];
    const TABLE: &str = include_str!("../../../../docs/api.md");

    struct Nothing;

    impl View for Nothing {
        fn snapshot(&self) -> ::latency::Snapshot {
            ::latency::Snapshot::default()
        }

        fn status(&self) -> Status {
            Status::default()
        }

        fn statistics(&self) -> Statistics {
            Statistics::default()
        }
    }

    fn api() -> Api {
        Api {
            view: Arc::new(Nothing),
            manager: Manager::idle(),
            overview: None,
            events: crate::objects::EventBus::default().sender(),
            jobs: None,
            ending: None,
            reload: None,
        }
    }

    fn documented() -> BTreeSet<(String, String)> {
        let document = serde_json::to_value(openapi()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let operations = paths.iter().flat_map(|(path, operations)| {
            let methods = operations.as_object().unwrap().keys();
            methods.map(|method| (path.clone(), method.to_uppercase()))
        });
        operations.collect()
    }

    /// Returns a path with values in place of its parameters.
    fn filled(path: &str) -> String {
        path.replace("{address}", "0:0")
            .split('/')
            .map(|part| if part.starts_with('{') { "x" } else { part })
            .collect::<Vec<_>>()
            .join("/")
    }

    #[tokio::test]
    async fn served_methods_match_the_api_document() {
        let documented = documented();
        let router = TowerToHyperService::new(router(api()));
        let paths: BTreeSet<&String> = documented.iter().map(|(path, _)| path).collect();
        assert!(paths.len() > 20, "{paths:?}");
        for path in paths {
            for method in METHODS {
                let request = Request::builder().method(method).uri(filled(path));
                let request = request.body(Body::empty()).unwrap();
                let response = router.call(request).await.unwrap();
                let is_documented = documented.contains(&(path.clone(), method.to_owned()));
                let status = response.status();
                let is_served = status != StatusCode::METHOD_NOT_ALLOWED;
                assert_eq!(is_served, is_documented, "{method} {path}: {status}");
                if !is_served {
                    let allowed = response.headers().get(header::ALLOW).cloned();
                    let allowed = allowed.unwrap_or_else(|| panic!("{method} {path}: no Allow"));
                    assert!(!allowed.to_str().unwrap().contains(method), "{allowed:?}");
                }
                if status == StatusCode::NOT_FOUND {
                    let body = response.into_body().collect().await.unwrap().to_bytes();
                    let text = String::from_utf8_lossy(&body);
                    assert!(!text.contains("no resource"), "{method} {path}: {text}");
                }
            }
        }
    }

    /// Covers requests that are refused before a handler runs.
    #[tokio::test]
    async fn addresses_that_are_no_text_and_long_bodies_are_problems_too() {
        let router = TowerToHyperService::new(router(api()));
        let long = vec![b' '; BODY_MAX + 1];
        for (method, path, body, code, word) in [
            ("GET", "/v1/disks/%ff", vec![], 400, "disk"),
            ("GET", "/v1/exports/c/luns/%ff", vec![], 400, "address"),
            ("DELETE", "/v1/sessions/%ff", vec![], 400, "session"),
            ("PUT", "/v1/disks/d", long, 413, "16777216"),
        ] {
            let request = Request::builder().method(method).uri(path);
            let response = router.call(request.body(Body::from(body)).unwrap());
            let response = response.await.unwrap();
            assert_eq!(response.status().as_u16(), code, "{method} {path}");
            let kind = response.headers()[header::CONTENT_TYPE].clone();
            assert_eq!(kind, "application/problem+json", "{method} {path}");
            let problem = response.into_body().collect().await.unwrap().to_bytes();
            let problem: Problem = serde_json::from_slice(&problem).unwrap();
            assert!(
                problem.status == code && problem.detail.contains(word),
                "{problem:?}"
            );
        }
    }

    #[test]
    fn wrong_type_in_a_body_names_its_field() {
        fn faults<T: DeserializeOwned>(body: &Value) -> Problem {
            let read = read::<T>(Ok(Bytes::from(body.to_string())));
            read.map(drop).expect_err("another type").0
        }
        use ::control::objects::{NewJob, NewSnapshot};
        let speed = json!({"kind": "mirror", "speed": "fast"});
        let switch = json!({"kind": "mirror", "switch": 1});
        let unknown = json!({"kind": "mirror", "a/b~": 1});
        for (problem, pointer) in [
            (faults::<NewJob>(&speed), "/speed"),
            (faults::<NewJob>(&switch), "/switch"),
            (faults::<NewJob>(&unknown), "/a~1b~0"),
            (faults::<NewSnapshot>(&json!([])), ""),
            (faults::<NewSnapshot>(&json!({"disks": [7]})), "/disks/0"),
            // The values of the fields without their names.
            (faults::<NewJob>(&json!(["mirror"])), ""),
            (
                faults::<NewSnapshot>(&json!({"disks": [["d0", "/a"]]})),
                "/disks/0",
            ),
        ] {
            assert_eq!(
                (problem.status, &*problem.errors[0].pointer),
                (422, pointer),
                "{problem:?}"
            );
            assert!(problem.errors[0].detail.contains("expected"), "{problem:?}");
        }
    }

    #[tokio::test]
    async fn operations_without_query_parameters_refuse_them() {
        let router = TowerToHyperService::new(router(api()));
        for (path, is_refused) in [
            ("/v1/status?nonsense=1", true),
            ("/v1/disks/d0?force=true", true),
            ("/v1/history?nonsense=1", true),
            ("/v1/status?", false),
            ("/v1/upgrade/check?force=true", false),
            ("/healthz?x=1", false),
        ] {
            let request = Request::builder().uri(path).body(Body::empty()).unwrap();
            let status = router.call(request).await.unwrap().status();
            assert_eq!(
                status == StatusCode::BAD_REQUEST,
                is_refused,
                "{path}: {status}"
            );
        }
    }

    /// All routes are made by `routes!()`, so a handler missing in the document is not mounted.
    #[test]
    fn mounted_handlers_match_the_description() {
        let mut written = BTreeSet::new();
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/control");
        for file in std::fs::read_dir(folder).unwrap() {
            let source = std::fs::read_to_string(file.unwrap().path()).unwrap();
            let source = source.split("#[cfg(test)]").next().unwrap();
            for way in [".route(", ".nest(", ".merge(", ".route_service("] {
                assert!(!source.contains(way), "routes are made by routes!() alone");
            }
            for described in source.split("#[utoipa::path(").skip(1) {
                let (method, rest) = described.split_once(',').unwrap();
                let path = rest.split('"').nth(1).unwrap();
                written.insert((path.to_owned(), method.trim().to_uppercase()));
            }
        }
        assert_eq!(written, documented());
    }

    #[test]
    fn documented_table_lists_every_handler() {
        let mut listed = BTreeSet::new();
        for line in TABLE.lines().filter(|line| line.starts_with("| `/")) {
            let mut cells = line.split('|').map(str::trim).skip(1);
            let (path, methods) = (cells.next().unwrap(), cells.next().unwrap());
            for method in methods.split(", ") {
                listed.insert((path.trim_matches('`').to_owned(), method.to_owned()));
            }
        }
        assert_eq!(listed, documented());
    }

    #[test]
    fn operation_ids_are_unique_and_begin_with_a_verb() {
        let document = serde_json::to_value(openapi()).unwrap();
        let mut ids = BTreeSet::new();
        for (path, operations) in document["paths"].as_object().unwrap() {
            for operation in operations.as_object().unwrap().values() {
                let id = operation["operationId"].as_str().unwrap();
                assert!(id.contains('_'), "{path}: {id} has no verb and object");
                assert!(ids.insert(id.to_owned()), "{path}: second operation {id}");
            }
        }
        assert_eq!(ids.len(), documented().len());
    }

    #[test]
    fn every_reference_has_its_schema() {
        let document = serde_json::to_value(openapi()).unwrap();
        let text = document.to_string();
        let references = text.split("\"$ref\":\"#").skip(1);
        let references: BTreeSet<&str> = references
            .filter_map(|rest| rest.split('"').next())
            .collect();
        assert!(references.len() > 20, "{references:?}");
        for reference in references {
            assert!(document.pointer(reference).is_some(), "{reference}");
        }
    }

    #[test]
    fn every_failure_response_is_a_problem() {
        let document = serde_json::to_value(openapi()).unwrap();
        let schema = document.pointer("/components/schemas/Problem/properties/detail");
        assert!(schema.is_some());
        for (path, operations) in document["paths"].as_object().unwrap() {
            for (method, operation) in operations.as_object().unwrap() {
                let responses = operation["responses"].as_object().unwrap();
                assert!(responses.contains_key("401"), "{method} {path}");
                let needs_no_token = operation["security"] == json!([]);
                assert_eq!(needs_no_token, check_of(path).is_some(), "{path}");
                // The check of an upgrade reads files again.
                let changes = method != "get" || path == "/v1/upgrade/check";
                assert_eq!(responses.contains_key("403"), changes, "{method} {path}");
                for (status, response) in responses.iter().filter(|(s, _)| !s.starts_with('2')) {
                    let place = "/content/application~1problem+json/schema/$ref";
                    let schema = response.pointer(place).and_then(Value::as_str);
                    let schema = schema.unwrap_or_else(|| panic!("{method} {path}: {status}"));
                    assert_eq!(schema, "#/components/schemas/Problem");
                }
            }
        }
    }
}
