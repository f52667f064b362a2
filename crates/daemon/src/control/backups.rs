//! `/v1/backups`: backups of several disks at one moment.

use std::sync::Arc;
use std::time::Duration;

use ::control::objects::{Backup, NewBackup as Wanted};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::ErrorResponse;
use super::allowed_paths::Caller;
use super::api::{Api, Path, read};
use super::error_responses::{BodyErrors, ChangeErrors, NameErrors, ReadErrors};
use super::jobs::{elsewhere, target_json};
use super::server::blocking;
use crate::jobs::{
    CheckpointNames, Destination, Job, Jobs, NewBackup, no_backup, pull_address, start_backup,
};
use crate::objects::{Fault, Refusal};

/// Longest wait for the end of the jobs of a backup.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// List backups.
#[utoipa::path(get, path = "/v1/backups", operation_id = "list_backups", responses(
    (status = 200, description = "The backups that the last jobs of the disks belong to", body = Vec<Backup>),
    ReadErrors,
))]
pub(super) async fn list(State(api): State<Api>) -> Result<Json<Vec<Backup>>, ErrorResponse> {
    Ok(Json(api.context()?.jobs.backups()))
}

/// Start a backup of disks: each disk as it is now, copied to a target or served over NBD. Clients continue to write.
#[utoipa::path(post, path = "/v1/backups", operation_id = "start_backup", request_body = Wanted, responses(
    (status = 201, description = "The backup, which continues in the background", body = Backup),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn start(
    State(api): State<Api>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let wanted: Wanted = read(body)?;
    check_disks(&wanted)?;
    let pull = match &wanted.pull {
        Some(text) => {
            let address = pull_address(text);
            let address = address.map_err(|fault| Refusal::Invalid(vec![fault]))?;
            Some(caller.check_pull(&api, address).await?)
        }
        None => None,
    };
    let mut disks = Vec::new();
    for (index, one) in wanted.disks.iter().enumerate() {
        let at = format!("/disks/{index}/target");
        let destination = match (&pull, &one.target) {
            (Some(address), None) => Destination::Pull(address.clone()),
            (None, Some(target)) => {
                let mut target = target_json(&one.disk, target, &at)?;
                // Examines the file, which may block.
                let target = blocking(move || {
                    target.backend = target.backend.requested(None, true);
                    target
                });
                let target = caller.check_target(&api, target.await?).await?;
                Destination::Push(Box::new(target))
            }
            (pull, _) => {
                let detail = match pull {
                    Some(_) => "a backup that is served has no target",
                    None => "a backup needs a target, or an address to serve it",
                };
                return Err(Refusal::Invalid(vec![Fault::at(at, detail)]).into());
            }
        };
        disks.push((one.disk.clone(), destination));
    }
    let scratch = caller
        .check_scratch(&api, wanted.scratch, wanted.scratch_limit)
        .await?;
    let backup = NewBackup {
        name: wanted.name,
        disks,
        checkpoints: CheckpointNames {
            since: wanted.since,
            checkpoint: wanted.checkpoint,
            may_be_full: false,
        },
        scratch,
        speed: wanted.speed.unwrap_or(0),
    };
    let context = api.context()?.clone();
    let jobs = context.jobs.clone();
    let name = elsewhere(move || start_backup(&context, &backup)).await?;
    Ok((StatusCode::CREATED, Json(body_of(&jobs, &name)?)).into_response())
}

fn check_disks(wanted: &Wanted) -> Result<(), Refusal> {
    let mut names: Vec<&str> = wanted.disks.iter().map(|one| one.disk.as_str()).collect();
    names.sort_unstable();
    let detail = match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => format!("disk {} is named twice", pair[0]),
        None if names.is_empty() => "a backup needs at least one disk".to_owned(),
        None => return Ok(()),
    };
    Err(Refusal::Invalid(vec![Fault::at("/disks", detail)]))
}

fn body_of(jobs: &Jobs, name: &str) -> Result<Backup, Refusal> {
    let mut all = jobs.backups().into_iter().rev();
    let found = all.find(|backup| backup.name == name);
    found.ok_or_else(|| no_backup(name))
}

/// End a backup that is served over NBD. Its checkpoints are complete: later backups can contain the changes since.
#[utoipa::path(post, path = "/v1/backups/{backup}/end", operation_id = "end_backup", params(("backup" = String, Path, description = "Name")),
    responses(
    (status = 200, description = "The backup, which has ended or is about to end", body = Backup),
    NameErrors, ChangeErrors,
))]
pub(super) async fn end(
    State(api): State<Api>,
    Path(name): Path<String>,
) -> Result<Json<Backup>, ErrorResponse> {
    let jobs = api.context()?.jobs.clone();
    let body = body_of(&jobs, &name)?;
    let ending = jobs.end_backup(&name)?;
    Ok(Json(wait_for_end(ending, body).await?))
}

/// Cancel a backup. Its checkpoints are not created.
#[utoipa::path(delete, path = "/v1/backups/{backup}", operation_id = "cancel_backup", params(("backup" = String, Path, description = "Name")),
    responses(
    (status = 200, description = "The backup, which has ended or is about to end", body = Backup),
    NameErrors, ChangeErrors,
))]
pub(super) async fn cancel(
    State(api): State<Api>,
    Path(name): Path<String>,
) -> Result<Json<Backup>, ErrorResponse> {
    let jobs = api.context()?.jobs.clone();
    let body = body_of(&jobs, &name)?;
    let ending = jobs.cancel_backup(&name)?;
    Ok(Json(wait_for_end(ending, body).await?))
}

/// Waits for the end of the jobs of a backup. Returns the backup with their present state.
async fn wait_for_end(jobs: Vec<Arc<Job>>, mut body: Backup) -> Result<Backup, Refusal> {
    elsewhere(move || {
        for job in &jobs {
            job.wait(END_PATIENCE);
        }
        body.jobs = jobs.iter().map(|job| job.body()).collect();
        Ok(body)
    })
    .await
}
