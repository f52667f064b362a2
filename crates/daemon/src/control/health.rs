//! `GET /healthz` and `/readyz` for orchestrators, without authentication. The responses contain no data of the daemon.

use axum::extract::State;
use axum::http::StatusCode;

use super::api::Api;
use super::error_responses::ReadErrors;
use super::server::blocking;
use super::{ErrorResponse, View};

pub(crate) const HEALTH: &str = "/healthz";
pub(crate) const READINESS: &str = "/readyz";
pub(crate) const OK: &str = "ok\n";

/// Returns the check of a path; `None` for other paths.
pub(crate) fn check_of(path: &str) -> Option<fn(&dyn View) -> bool> {
    match path {
        HEALTH => Some(is_healthy),
        READINESS => Some(is_ready),
        _ => None,
    }
}

fn is_healthy(view: &dyn View) -> bool {
    view.makes_progress()
}

fn is_ready(view: &dyn View) -> bool {
    if !view.makes_progress() {
        return false;
    }
    let status = view.status();
    status.waiting_listeners.is_empty() && status.disks.iter().all(|disk| disk.state == "ready")
}

async fn answer(api: Api, check: fn(&dyn View) -> bool) -> Result<&'static str, ErrorResponse> {
    match blocking(move || check(&*api.view)).await? {
        true => Ok(OK),
        false => Err(ErrorResponse::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "not ok",
        )),
    }
}

/// Check whether the workers make progress.
#[utoipa::path(get, path = "/healthz", operation_id = "check_health", responses(
    (status = 200, description = "`ok`: all workers make progress", body = String, content_type = "text/plain"),
    ReadErrors,
))]
pub(super) async fn health(State(api): State<Api>) -> Result<&'static str, ErrorResponse> {
    answer(api, is_healthy).await
}

/// Check whether the workers make progress, all disks are ready and all listeners are open.
#[utoipa::path(get, path = "/readyz", operation_id = "check_readiness", responses(
    (status = 200, description = "`ok`: all disks and listeners are ready", body = String, content_type = "text/plain"),
    ReadErrors,
))]
pub(super) async fn readiness(State(api): State<Api>) -> Result<&'static str, ErrorResponse> {
    answer(api, is_ready).await
}
