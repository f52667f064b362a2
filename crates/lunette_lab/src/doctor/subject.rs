//! Subjects of the checks: given disks, the disks of a daemon, or a guest.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use cli_common::Failure;
use control::objects::{Disk, Worker};
use doctor::{DiskOf, FILES, Host, Question, WorkerUse};
use vm::running::{AGENT_SOCKET, CommandEnd, ExecInput, Registry, exec};

use super::DoctorArguments;

/// Duration of the observation of a daemon's workers.
const OBSERVED: Duration = Duration::from_secs(1);

/// Returns the disks and workers to check.
pub fn question(arguments: &DoctorArguments) -> Result<Question, Failure> {
    let mut question = Question {
        is_guest: arguments.guest.is_some(),
        ..Question::default()
    };
    for path in &arguments.paths {
        let whole = path.canonicalize().map_err(|error| {
            Failure::because(format!("cannot stat {}: {error}", path.display()))
        })?;
        question
            .disks
            .push(disk(&path.display().to_string(), &whole, false));
    }
    if let Some(control) = &arguments.control {
        let disks: Vec<Disk> = control::get(control, "/v1/disks")?;
        for one in &disks {
            let Some(path) = one.keys.text("path") else {
                continue;
            };
            let whole = Path::new(path)
                .canonicalize()
                .unwrap_or_else(|_| path.into());
            let cache = one.keys.text("cache");
            let is_cached = cache.is_some_and(|cache| cache != "none");
            question.disks.push(disk(&one.name, &whole, is_cached));
        }
        question.workers = workers(control)?;
    }
    Ok(question)
}

/// Observes the workers of a daemon for [`OBSERVED`].
fn workers(control: &Path) -> Result<Vec<WorkerUse>, Failure> {
    let look = || control::get::<Vec<Worker>>(control, "/v1/workers");
    let before = look()?;
    std::thread::sleep(OBSERVED);
    let pairs = before.into_iter().zip(look()?);
    let used = pairs.map(|(before, now)| WorkerUse {
        worker: now.index,
        work_ns: now.work_ns.saturating_sub(before.work_ns),
        poll_found_ns: now.poll_found_ns.saturating_sub(before.poll_found_ns),
        poll_empty_ns: now.poll_empty_ns.saturating_sub(before.poll_empty_ns),
        sleep_ns: now.sleep_ns.saturating_sub(before.sleep_ns),
        sleeps: now.sleeps.saturating_sub(before.sleeps),
        // Suspensions are rare, so all since the start of the daemon count.
        poll_suspensions: now.poll_suspensions,
    });
    Ok(used.collect())
}

fn disk(name: &str, path: &Path, is_cached: bool) -> DiskOf {
    let metadata = path.metadata().ok().filter(std::fs::Metadata::is_file);
    DiskOf {
        name: name.to_owned(),
        path: path.display().to_string(),
        is_cached,
        // st_blocks counts units of 512 bytes (stat(3type)).
        size: metadata.map(|metadata| (metadata.len(), metadata.blocks() * 512)),
    }
}

/// Returns a guest's files, sent by its agent.
pub fn guest(name: &str) -> Result<Host, Failure> {
    let failed = |error: anyhow::Error| Failure::because(format!("guest {name}: {error:#}"));
    let (place, _) = Registry::open()
        .and_then(|registry| registry.find(name))
        .map_err(failed)?;
    let patterns = FILES.join(" ");
    let script = format!(
        "for f in {patterns}; do [ -e \"$f\" ] && echo \"--- $f\" && [ -f \"$f\" ] && cat \"$f\" 2>/dev/null && echo; done; true"
    );
    let (mut text, mut errors) = (Vec::new(), Vec::new());
    let socket = place.file(AGENT_SOCKET);
    let ended = exec(
        &socket,
        script.as_bytes(),
        ExecInput::Nothing,
        &mut text,
        &mut errors,
        None,
    );
    match ended.map_err(failed)? {
        CommandEnd::Code(0) => {}
        CommandEnd::Code(code) => {
            let error = String::from_utf8_lossy(&errors).into_owned();
            return Err(failed(anyhow::anyhow!(
                "cannot read the files of the guest, exit code {code}: {error}"
            )));
        }
        CommandEnd::OutputClosed => return Err(Failure::OutputClosed),
    }
    Host::recorded(&String::from_utf8_lossy(&text)).map_err(|error| failed(anyhow::anyhow!(error)))
}
