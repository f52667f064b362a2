//! `POST /v1/upgrade` ends this daemon and hands its clients to the next one. `GET /v1/upgrade/check` first makes all checks: content of RAM
//! disks, running jobs, the next configuration file, and disks or front ends that would delay the handover.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::control::{
    HANDOVER_VERSION, Problem, SYSTEM_SOCKET, Upgrade, Version, restart_command, shell_word,
};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Query, State};
use axum::http::StatusCode;
use config::{Diagnostics, MistakeKind};
use serde::Deserialize;
use utoipa::IntoParams;

use super::ErrorResponse;
use super::allowed_paths::Caller;
use super::api::{Api, read};
use super::error_responses::{BodyErrors, ChangeErrors, ReadErrors};
use super::server::blocking;
use crate::handover::delays;
use crate::jobs::Job;
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

/// Checks of an upgrade that the caller overrides.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Overrides {
    /// RAM disks without `persist=memfd` may lose their content.
    #[param(required = false)]
    lose_ram_disks: bool,
    /// Running jobs may end.
    #[param(required = false)]
    end_jobs: bool,
    /// Does not check the configuration file, and disks and front ends that would delay the handover.
    #[param(required = false)]
    force: bool,
}

/// Check whether the next daemon could serve the clients of this one. Refuses to lose the content of RAM disks and to end jobs. Refuses a
/// configuration file that a reload would refuse, except for keys that need a new process. Also refuses if a disk or a front end would
/// delay the handover. The response lists all reasons. Changes nothing.
#[utoipa::path(get, path = "/v1/upgrade/check", operation_id = "check_upgrade", params(Overrides), responses(
    (status = 204, description = "Clients can stay"),
    (status = 400, description = "Malformed request", body = Problem, content_type = "application/problem+json"),
    (status = 403, description = "The client may only read", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The upgrade would lose data, jobs or clients", body = Problem, content_type = "application/problem+json"),
    ReadErrors,
))]
pub(super) async fn check(
    State(api): State<Api>,
    caller: Caller,
    query: Result<Query<Overrides>, QueryRejection>,
) -> Result<StatusCode, ErrorResponse> {
    // The check reads files again and can block a thread for seconds.
    caller.must_change()?;
    let Query(overrides) = query.map_err(|error| ErrorResponse::bad_request(error.body_text()))?;
    let mut faults = Vec::new();
    if !overrides.lose_ram_disks {
        faults.extend(api.manager.ask(|owner| Ok(owner.lost_ram_disks())).await?);
    }
    if !overrides.end_jobs
        && let Some(context) = &api.jobs
    {
        faults.extend(running_jobs(&context.jobs.all()));
    }
    if !overrides.force {
        faults.extend(clients_at_risk(&api).await?);
    }
    match faults.is_empty() {
        true => Ok(StatusCode::NO_CONTENT),
        false => Err(Refusal::Conflict(faults).into()),
    }
}

/// Returns the jobs that an upgrade would end.
fn running_jobs(jobs: &[Arc<Job>]) -> Option<Fault> {
    let running = jobs.iter().filter(|job| !job.has_ended());
    let running: Vec<String> = running
        .map(|job| {
            let job = job.body();
            let percent = job.done.saturating_mul(100) / job.total.max(1);
            let (kind, disk, state) = (&job.kind, &job.disk, job.state.word());
            format!("{kind} of {disk} ({state}, {percent} %)")
        })
        .collect();
    let detail = format!("jobs would end and be rolled back: {}", running.join(", "));
    let fault = Fault::new(detail).help("lunette job wait, or --end-jobs");
    (!running.is_empty()).then_some(fault)
}

/// Returns the reasons to refuse: clients would lose disks or sessions, or wait for the handover.
async fn clients_at_risk(api: &Api) -> Result<Vec<Fault>, ErrorResponse> {
    let mut faults = Vec::new();
    if let Some(reload) = api.reload.clone() {
        match blocking(move || reload()).await? {
            Err(mistakes) => faults.extend(invalid_file(&mistakes)),
            Ok(config) => {
                let checked = api.manager.ask(move |owner| owner.check_upgrade(&config));
                match checked.await {
                    Err(Refusal::Ending) => return Err(Refusal::Ending.into()),
                    Err(refusal) => faults.extend(refusal.faults()),
                    Ok(()) => {}
                }
            }
        }
    }
    if let Some(overview) = api.overview.clone() {
        let helpers = api.manager.ask(|owner| Ok(owner.helper_threads())).await?;
        let find = move || {
            let transports = overview.servers.transports()?;
            Some(delays::find(&overview.live(), &transports, &helpers))
        };
        faults.extend(blocking(find).await?.ok_or(Refusal::Ending)?);
    }
    Ok(faults)
}

/// Returns the reason to refuse a configuration file with mistakes. Keys that do not exist may be keys of the next program, which checks them.
fn invalid_file(mistakes: &Diagnostics) -> Option<Fault> {
    let is_invalid = mistakes.iter().any(|one| one.kind != MistakeKind::Key);
    is_invalid.then(|| Fault::new(mistakes.to_string()).help("correct the file, or --force"))
}

/// Returns the command that replaces the program of this daemon. The daemon itself cannot start a program: its sandbox has no `execve`, and
/// a token of the API must not select the program that receives the memory of guests.
pub fn upgrade_command(control: &Path) -> Option<String> {
    let has = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if let Some(command) = restart_command(std::process::id(), has) {
        return Some(command);
    }
    let control = std::path::absolute(control).ok()?;
    let path = control.to_str()?;
    Some(match path {
        SYSTEM_SOCKET => "lunette upgrade".to_owned(),
        _ => format!("lunette upgrade --socket {}", shell_word(path)),
    })
}

/// Checks that the socket, which receives the memory of guests, belongs to root or the daemon's user.
fn check_owner(socket: &Path) -> Result<(), Refusal> {
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

#[cfg(test)]
mod tests {
    use config::{Flags, Surroundings, parse};

    use super::*;

    #[test]
    fn file_that_a_reload_refuses_is_refused_except_unknown_keys() {
        let disk = "[[disk]]\nname = \"d0\"\nbackend = \"null\"\nsize = \"1M\"\n";
        let is_refused = |text: &str| {
            let mistakes = parse(
                Some(("file", text)),
                &Flags::default(),
                &Surroundings::of_this_process(),
            );
            invalid_file(&mistakes.unwrap_err()).is_some()
        };
        for text in [
            "garbage".to_owned(),
            "\0\x01".to_owned(),
            format!("workers = 3000000\n{disk}"),
            "[[disk]]\nname = \"d0\"\n".to_owned(),
            format!("later_key = 1\nworkers = 3000000\n{disk}"),
        ] {
            assert!(is_refused(&text), "{text}");
        }
        assert!(!is_refused(&format!("later_key = 1\n{disk}")));
    }

    #[test]
    fn upgrade_command_names_a_socket_that_is_not_the_default() {
        let of = |path: &str| upgrade_command(Path::new(path));
        // The test may run below a service.
        if of(SYSTEM_SOCKET).is_some_and(|command| command.starts_with("systemctl")) {
            return;
        }
        assert_eq!(of(SYSTEM_SOCKET).as_deref(), Some("lunette upgrade"));
        let named = of("/run/a b/it's.sock");
        assert_eq!(
            named.as_deref(),
            Some(r"lunette upgrade --socket '/run/a b/it'\''s.sock'")
        );
    }
}
