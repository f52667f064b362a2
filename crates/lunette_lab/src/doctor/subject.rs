//! Subjects of the checks: given disks, the disks of a daemon, or a guest.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use cli_common::Failure;
use doctor::{DiskOf, FILES, Host, Question};
use serde_json::Value;
use vm::running::{AGENT_SOCKET, CommandEnd, ExecInput, Registry, exec};

use super::DoctorArguments;

/// Returns the disks to check.
pub fn question(arguments: &DoctorArguments) -> Result<Question, Failure> {
    let mut question = Question {
        disks: Vec::new(),
        is_guest: arguments.guest.is_some(),
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
        let disks: Value = control::get(control, "/v1/disks")?;
        for one in disks.as_array().into_iter().flatten() {
            let Some(path) = one["path"].as_str() else {
                continue;
            };
            let whole = Path::new(path)
                .canonicalize()
                .unwrap_or_else(|_| path.into());
            let name = one["name"].as_str().unwrap_or(path);
            let is_cached = one["cache"].as_str().is_some_and(|cache| cache != "none");
            question.disks.push(disk(name, &whole, is_cached));
        }
    }
    Ok(question)
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
