//! `/v1/jobs`, `/v1/disks/{disk}/job`, `/v1/bitmaps` and `/v1/snapshot`: jobs, dirty bitmaps and snapshots. Backups of several disks are in
//! `backups`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ::control::objects::{Bitmap, Disk, Job, JobSettings, NewJob, NewSnapshot};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::Value;
use utoipa::IntoParams;

use super::ErrorResponse;
use super::allowed_paths::Caller;
use super::api::{Api, Path, read};
use super::disks::{check_exists, shown};
use super::error_responses::{BodyErrors, ChangeErrors, NameErrors, ReadErrors};
use super::server::blocking;
use crate::jobs::{
    self, CheckpointNames, Context, Copy, Destination, JobKind, NewBackup, Overlay,
    remove_bitmap as remove, snapshot as take, start_backup, start_commit, start_copy,
    start_stream,
};
use crate::objects::{Fault, Refusal};
use config::{DiskConfig, disk_json};

/// Longest wait of a cancellation for the end of the job.
const CANCEL_PATIENCE: Duration = Duration::from_secs(5);

/// List jobs.
#[utoipa::path(get, path = "/v1/jobs", operation_id = "list_jobs", responses(
    (status = 200, description = "The last job of each disk", body = Vec<Job>),
    ReadErrors,
))]
pub(super) async fn list(State(api): State<Api>) -> Result<Json<Vec<Job>>, ErrorResponse> {
    let jobs = api.context()?.jobs.all();
    Ok(Json(jobs.iter().map(|job| job.body()).collect()))
}

/// Returns the job of a disk. The error differs for an unknown disk.
fn job_of(api: &Api, name: &str) -> Result<Arc<jobs::Job>, ErrorResponse> {
    let found = api.context()?.jobs.of(name);
    found.or_else(|refusal| check_exists(api.overview()?, name).and(Err(refusal.into())))
}

/// Show the job of a disk.
#[utoipa::path(get, path = "/v1/disks/{disk}/job", operation_id = "get_job", params(("disk" = String, Path, description = "Name")), responses(
    (status = 200, description = "The job", body = Job),
    NameErrors, ReadErrors,
))]
pub(super) async fn show(
    State(api): State<Api>,
    Path(name): Path<String>,
) -> Result<Json<Job>, ErrorResponse> {
    Ok(Json(job_of(&api, &name)?.body()))
}

/// Start a job of a disk: a mirror, a backup, a stream or a commit.
#[utoipa::path(post, path = "/v1/disks/{disk}/job", operation_id = "start_job", params(("disk" = String, Path, description = "Name")),
    request_body = NewJob, responses(
    (status = 201, description = "The job, which continues in the background", body = Job),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn start(
    State(api): State<Api>,
    Path(name): Path<String>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let wanted: NewJob = read(body)?;
    let context = api.context()?.clone();
    let speed = wanted.speed.unwrap_or(0);
    let kind = match wanted.kind.as_str() {
        "mirror" => JobKind::Mirror,
        "backup" => JobKind::Backup,
        "commit" => {
            caller.check_commit(&api, &name).await?;
            let job = elsewhere(move || start_commit(&context, &name, speed)).await?;
            return Ok((StatusCode::CREATED, Json(job.body())).into_response());
        }
        "stream" => {
            let job = elsewhere(move || start_stream(&context, &name, speed)).await?;
            return Ok((StatusCode::CREATED, Json(job.body())).into_response());
        }
        other => {
            let mut fault = Fault::at("/kind", format!("there is no job kind {other:?}"));
            fault.allowed = Some("mirror, backup, stream, commit".to_owned());
            return Err(Refusal::Invalid(vec![fault]).into());
        }
    };
    let Some(target) = &wanted.target else {
        let fault = Fault::at("/target", format!("a {} needs a target", wanted.kind));
        return Err(Refusal::Invalid(vec![fault]).into());
    };
    if wanted.incremental.is_some() && kind != JobKind::Backup {
        let fault = Fault::at("/incremental", "only a backup can be incremental");
        return Err(Refusal::Invalid(vec![fault]).into());
    }
    let mut target = target_json(&name, target, "/target")?;
    // Examines the file, which may block.
    let target = blocking(move || {
        target.backend = target.backend.requested(None, true);
        target
    });
    let target = caller.check_target(&api, target.await?).await?;
    if kind == JobKind::Backup && !is_at_end(wanted.at.as_deref())? {
        let backup = NewBackup {
            name: None,
            disks: vec![(name.clone(), Destination::Push(Box::new(target)))],
            checkpoints: wanted
                .incremental
                .as_deref()
                .map_or_else(CheckpointNames::default, CheckpointNames::latest),
            scratch: caller
                .check_scratch(&api, wanted.scratch, wanted.scratch_limit)
                .await?,
            speed,
        };
        let jobs = context.jobs.clone();
        elsewhere(move || start_backup(&context, &backup)).await?;
        let job = jobs.of(&name)?;
        return Ok((StatusCode::CREATED, Json(job.body())).into_response());
    }
    let copy = Copy {
        target,
        disk: name,
        kind,
        speed,
        switches: wanted.switch,
        incremental: wanted.incremental,
    };
    let job = elsewhere(move || start_copy(&context, &copy)).await?;
    Ok((StatusCode::CREATED, Json(job.body())).into_response())
}

/// Reads the target of a copy of a disk, in the field at a pointer.
pub(super) fn target_json(disk: &str, target: &Value, at: &str) -> Result<DiskConfig, Refusal> {
    let found = match target {
        Value::Object(_) => {
            let read = disk_json(disk, target);
            return read.map_err(|mistakes| Refusal::from(mistakes).within(at));
        }
        Value::Array(_) => "an array",
        Value::String(_) => "a string",
        Value::Number(_) => "a number",
        Value::Bool(_) => "a boolean",
        Value::Null => "null",
    };
    let fault = Fault::at(at, format!("expected a JSON object, not {found}"));
    Err(Refusal::Invalid(vec![fault]))
}

/// Returns true if a backup contains the state at its end.
fn is_at_end(at: Option<&str>) -> Result<bool, Refusal> {
    match at {
        None | Some("start") => Ok(false),
        Some("end") => Ok(true),
        Some(other) => {
            let mut fault = Fault::at("/at", format!("there is no point in time {other:?}"));
            fault.allowed = Some("start, end".to_owned());
            Err(Refusal::Invalid(vec![fault]))
        }
    }
}

/// Pause or resume a job, or limit its speed.
#[utoipa::path(put, path = "/v1/disks/{disk}/job", operation_id = "set_job", params(("disk" = String, Path, description = "Name")),
    request_body = JobSettings, responses(
    (status = 200, description = "The job", body = Job),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn set(
    State(api): State<Api>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Job>, ErrorResponse> {
    let settings: JobSettings = read(body)?;
    let job = job_of(&api, &name)?;
    job.change(settings.paused, settings.speed)?;
    Ok(Json(job.body()))
}

/// Options of a switch.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct SwitchOptions {
    /// Switches although the disk cannot be flushed: acknowledged writes may be missing in the copy.
    #[param(required = false)]
    force: bool,
}

/// Switch to a mirror: the disk then uses its target. A mirror that is not complete yet is switched later. If the disk cannot be flushed,
/// the job stays ready, with the reason.
#[utoipa::path(post, path = "/v1/disks/{disk}/job/switch", operation_id = "switch_to_mirror", params(("disk" = String, Path, description = "Name"), SwitchOptions),
    responses(
    (status = 200, description = "The job, which ends in the background", body = Job),
    NameErrors, ChangeErrors,
))]
pub(super) async fn switch(
    State(api): State<Api>,
    Path(name): Path<String>,
    query: Result<Query<SwitchOptions>, QueryRejection>,
) -> Result<Json<Job>, ErrorResponse> {
    let Query(options) = query.map_err(|error| ErrorResponse::bad_request(error.body_text()))?;
    let job = job_of(&api, &name)?;
    job.switch(options.force)?;
    Ok(Json(job.body()))
}

/// Cancel the job of a disk. The disk is unchanged. A job that has ended is removed from the list.
#[utoipa::path(delete, path = "/v1/disks/{disk}/job", operation_id = "cancel_job", params(("disk" = String, Path, description = "Name")),
    responses(
    (status = 200, description = "The job, which has ended or is about to end", body = Job),
    NameErrors, ChangeErrors,
))]
pub(super) async fn cancel(
    State(api): State<Api>,
    Path(name): Path<String>,
) -> Result<Json<Job>, ErrorResponse> {
    let job = job_of(&api, &name)?;
    if job.has_ended() {
        api.context()?.jobs.forget(&name);
        return Ok(Json(job.body()));
    }
    job.cancel_alone()?;
    let ended = elsewhere(move || {
        job.wait(CANCEL_PATIENCE);
        Ok(job.body())
    });
    Ok(Json(ended.await?))
}

/// Take a snapshot of disks atomically: each disk continues in a new image over its old contents.
#[utoipa::path(post, path = "/v1/snapshot", operation_id = "take_snapshot", request_body = NewSnapshot, responses(
    (status = 200, description = "The disks with their new configuration", body = Vec<Disk>),
    NameErrors, ChangeErrors, BodyErrors,
))]
pub(super) async fn snapshot(
    State(api): State<Api>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Vec<Disk>>, ErrorResponse> {
    let wanted: NewSnapshot = read(body)?;
    let overlays = wanted.disks.iter().map(|one| Overlay {
        disk: one.disk.clone(),
        path: PathBuf::from(&one.path),
    });
    let overlays: Vec<Overlay> = overlays.collect();
    if overlays.is_empty() {
        let fault = Fault::at("/disks", "a snapshot needs at least one disk");
        return Err(Refusal::Invalid(vec![fault]).into());
    }
    let overlays = caller.check_overlays(&api, overlays).await?;
    let context = api.context()?.clone();
    elsewhere(move || take(&context, &overlays)).await?;
    let mut disks = Vec::with_capacity(wanted.disks.len());
    for disk in &wanted.disks {
        let Json(disk) = shown(&api, &disk.disk).await?;
        disks.push(disk);
    }
    Ok(Json(disks))
}

/// Runs blocking work on a thread of its own.
pub(super) async fn elsewhere<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let (reply, done) = tokio::sync::oneshot::channel();
    let thread = std::thread::Builder::new()
        .name("begin-job".to_owned())
        .stack_size(bdev::STACK_BYTES);
    let spawned = thread.spawn(move || {
        // The caller may be gone.
        reply.send(work()).ok();
    });
    spawned.map_err(|error| {
        Refusal::Failed(vec![Fault::new(format!("cannot start a thread: {error}"))])
    })?;
    done.await.map_err(|_| Refusal::Ending)?
}

/// List dirty bitmaps.
#[utoipa::path(get, path = "/v1/bitmaps", operation_id = "list_bitmaps", responses(
    (status = 200, description = "The bitmaps of all disks, by disk and name", body = Vec<Bitmap>),
    ReadErrors,
))]
pub(super) async fn bitmaps(State(api): State<Api>) -> Result<Json<Vec<Bitmap>>, ErrorResponse> {
    Ok(Json(api.context()?.bitmaps.all()))
}

/// Remove a dirty bitmap: the next backup of that name copies everything.
#[utoipa::path(delete, path = "/v1/disks/{disk}/bitmaps/{bitmap}", operation_id = "remove_bitmap",
    params(("disk" = String, Path, description = "Name"), ("bitmap" = String, Path, description = "Name of the bitmap")),
    responses((status = 204, description = "Bitmap removed"), NameErrors, ChangeErrors))]
pub(super) async fn remove_bitmap(
    State(api): State<Api>,
    Path((disk, bitmap)): Path<(String, String)>,
) -> Result<StatusCode, ErrorResponse> {
    let context = api.context()?.clone();
    elsewhere(move || remove(&context, &disk, &bitmap)).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl Api {
    pub(super) fn context(&self) -> Result<&Context, ErrorResponse> {
        let ending = || ErrorResponse::from(Refusal::Ending);
        self.jobs.as_ref().ok_or_else(ending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn another_type_than_an_object_is_no_target() {
        for (target, word) in [
            (json!(5), "a number"),
            (json!("/a"), "a string"),
            (json!([]), "an array"),
        ] {
            let refusal = target_json("d0", &target, "/target").unwrap_err();
            let [fault] = &refusal.faults()[..] else {
                panic!("{refusal:?}")
            };
            assert_eq!(fault.pointer, "/target");
            assert!(fault.detail.ends_with(&format!("not {word}")), "{fault:?}");
        }
    }
}
