//! `POST /v1/upgrade` ends this daemon and hands its clients to the next one. `POST /v1/upgrade/check` first checks the next configuration
//! file, and that no disk or front end would delay the handover.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use ::control::{HANDOVER_VERSION, Upgrade, Version};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;

use super::ErrorResponse;
use super::allowed_paths::Caller;
use super::api::{Api, read};
use super::error_responses::{BodyErrors, ChangeErrors};
use super::server::blocking;
use crate::handover::delays;
use crate::objects::{Fault, Refusal};

/// End, and hand over connected front ends to another daemon. It receives their descriptors at its socket before this daemon has ended.
#[utoipa::path(post, path = "/v1/upgrade", operation_id = "begin_upgrade", request_body = Upgrade, responses(
    (status = 200, description = "Version of this daemon, which is about to end", body = Version),
    ChangeErrors, BodyErrors,
))]
pub(super) async fn begin(
    State(api): State<Api>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Version>, ErrorResponse> {
    // The socket receives the memory of guests.
    caller.must_be_administrator()?;
    let wanted: Upgrade = read(body)?;
    if wanted.handover != HANDOVER_VERSION {
        let detail = format!(
            "cannot hand over: this daemon uses handover version {HANDOVER_VERSION}, the new one {}",
            wanted.handover
        );
        let fault = Fault::at("/handover", detail).help("restart the daemon");
        return Err(Refusal::Conflict(vec![fault]).into());
    }
    let socket = PathBuf::from(&wanted.socket);
    check_owner(&socket)?;
    let Some(ending) = &api.ending else {
        let detail = "an upgrade is possible only over the control socket, on the daemon's machine";
        return Err(Refusal::Conflict(vec![Fault::new(detail)]).into());
    };
    if !ending.begin(socket) {
        return Err(Refusal::Ending.into());
    }
    Ok(Json(Version::this()))
}

/// Check whether the next daemon could serve the clients of this one. Refuses a configuration file that a reload would refuse, except
/// for keys that need a new process. Also refuses if a disk or a front end would delay the handover. Changes nothing.
#[utoipa::path(post, path = "/v1/upgrade/check", operation_id = "check_upgrade", responses(
    (status = 204, description = "Clients can stay"),
    ChangeErrors,
))]
pub(super) async fn check(State(api): State<Api>) -> Result<StatusCode, ErrorResponse> {
    if let Some(reload) = api.reload.clone()
        // A file that only the next program can read is checked by that program.
        && let Ok(config) = blocking(move || reload()).await?
    {
        let checked = api.manager.ask(move |owner| owner.check_upgrade(&config));
        checked.await?;
    }
    if let Some(overview) = api.overview.clone() {
        let helpers = api.manager.ask(|owner| Ok(owner.helper_threads())).await?;
        let find = move || {
            let transports = overview.servers.transports()?;
            Some(delays::find(&overview.live(), &transports, &helpers))
        };
        let delays = blocking(find).await?.ok_or(Refusal::Ending)?;
        if !delays.is_empty() {
            return Err(Refusal::Conflict(delays).into());
        }
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Checks that the socket, which receives the memory of guests, belongs to root or the daemon's user.
fn check_owner(socket: &std::path::Path) -> Result<(), Refusal> {
    let refused = |reason: String| Refusal::Invalid(vec![Fault::at("/socket", reason)]);
    let shown = socket.display();
    let found = std::fs::symlink_metadata(socket)
        .map_err(|error| refused(format!("cannot stat {shown}: {error}")))?;
    let own = rustix::process::geteuid().as_raw();
    if !found.file_type().is_socket() || ![0, own].contains(&found.uid()) {
        return Err(refused(format!(
            "{shown} is not a socket of root or of this daemon's user"
        )));
    }
    // Checks that a process listens before this daemon ends anything.
    let listens = UnixDatagram::unbound().and_then(|own| own.connect(socket));
    listens.map_err(|error| refused(format!("cannot connect to {shown}: {error}")))
}
