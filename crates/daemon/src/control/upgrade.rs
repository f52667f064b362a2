//! `POST /v1/upgrade`: another daemon goes on with what this one serves.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use ::control::{HANDOVER_VERSION, Upgrade, Version};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;

use super::ErrorResponse;
use super::api::{Api, json};
use super::error_responses::{BodyErrors, ChangeErrors};
use crate::objects::{Fault, Refusal};

/// End, and leave connected front ends to another daemon. It gets their descriptors at its socket, before this daemon has ended.
#[utoipa::path(post, path = "/v1/upgrade", request_body = Upgrade, responses(
    (status = 200, description = "This daemon, which is about to end", body = Version),
    ChangeErrors, BodyErrors,
))]
pub(super) async fn begin(
    State(api): State<Api>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Version>, ErrorResponse> {
    let wanted: Upgrade = serde_json::from_value(json(body)?).map_err(|error| {
        let fault = Fault::new(format!("the body is not what is expected: {error}"));
        Refusal::Invalid(vec![fault])
    })?;
    if wanted.handover != HANDOVER_VERSION {
        let detail = format!(
            "this daemon hands over version {HANDOVER_VERSION}, and the other one understands {}",
            wanted.handover
        );
        let fault = Fault::at("/handover", detail).help("restart the daemon");
        return Err(Refusal::Conflict(vec![fault]).into());
    }
    let socket = PathBuf::from(&wanted.socket);
    check_owner(&socket)?;
    let Some(ending) = &api.ending else {
        let detail = "a daemon is upgraded by its control socket, on its own machine";
        return Err(Refusal::Conflict(vec![Fault::new(detail)]).into());
    };
    if !ending.begin(socket) {
        return Err(Refusal::Ending.into());
    }
    Ok(Json(Version::this()))
}

/// Memory of guests goes there: to nobody but root and whom this daemon runs as.
fn check_owner(socket: &std::path::Path) -> Result<(), Refusal> {
    let refused = |what: String| Refusal::Invalid(vec![Fault::at("/socket", what)]);
    let shown = socket.display();
    let found = std::fs::symlink_metadata(socket)
        .map_err(|error| refused(format!("cannot look at {shown}: {error}")))?;
    let own = rustix::process::geteuid().as_raw();
    if !found.file_type().is_socket() || ![0, own].contains(&found.uid()) {
        return Err(refused(format!(
            "{shown} is no socket of root or of this daemon's user"
        )));
    }
    // Before anything ends: is there anybody?
    let listens = UnixDatagram::unbound().and_then(|own| own.connect(socket));
    listens.map_err(|error| refused(format!("nobody listens at {shown}: {error}")))
}
