//! `lunette vm copy`: copies files to and from a guest through its agent.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc::Receiver;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use cli_common::Outcome;
use vm::running::{AGENT_SOCKET, CommandEnd, ExecInput, Registry, exec};

use super::exec::quoted;
use super::failed;

/// `lunette vm copy`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct CopyArguments {
    /// Name of the guest
    name: String,
    /// Source file. A path in the guest begins with a colon
    source: String,
    /// Destination file or folder. A path in the guest begins with a colon. In a folder the copy gets the source's name
    destination: String,
}

const AFTER: &str = "\
The copy appears under its name when it is complete, with the mode of the source. To copy a folder, use tar:
`tar c FOLDER | lunette vm exec NAME tar x`, or in the other direction `lunette vm exec NAME tar c FOLDER | tar x`.

Examples:
    lunette vm copy guest1 job.fio :/tmp/job.fio
    lunette vm copy guest1 :/proc/config.gz .";

/// Copies one file.
///
/// # Errors
/// When a file cannot be read or written.
pub fn run(arguments: &CopyArguments) -> Outcome {
    let registry = Registry::open().map_err(failed)?;
    let (place, _) = registry.find(&arguments.name).map_err(failed)?;
    let socket = place.file(AGENT_SOCKET);
    let (source, destination) = (&arguments.source, &arguments.destination);
    let copied = match (source.strip_prefix(':'), destination.strip_prefix(':')) {
        (None, Some(inside)) => copy_in(&socket, Path::new(source), inside),
        (Some(inside), None) => copy_out(&socket, inside, Path::new(destination)),
        _ => {
            return Err(cli_common::Failure::mistake(format!(
                "copy {source} {destination}: exactly one path must be the guest's and begin with a colon; hint: lunette vm copy {} {source} :/tmp/",
                arguments.name
            )));
        }
    };
    copied.map_err(|error| {
        failed(error.context(format!(
            "guest {}: copy {source} {destination}",
            arguments.name
        )))
    })
}

pub(super) fn copy_in(socket: &Path, source: &Path, inside: &str) -> Result<()> {
    let file = File::open(source).with_context(|| format!("cannot open {}", source.display()))?;
    let metadata = file.metadata()?;
    ensure!(
        metadata.is_file(),
        "{} is not a file; hint: copy a folder with tar, see lunette vm copy --help",
        source.display()
    );
    let name = source.file_name().unwrap_or_default().to_string_lossy();
    // $1: destination; $2: the name in a folder; $3: the mode; $4: the length
    let script = "d=$1; [ ! -d \"$d\" ] || d=\"${d%/}/$2\"
        part=\"$d.part$$\"; trap 'rm -f \"$part\"' EXIT
        cat > \"$part\" || exit 1
        [ \"$(wc -c < \"$part\")\" -eq \"$4\" ] || { echo \"only $(wc -c < \"$part\") of $4 bytes have come\" >&2; exit 1; }
        chmod \"$3\" \"$part\" && mv -f \"$part\" \"$d\"";
    let mode = format!("{:o}", metadata.permissions().mode() & 0o777);
    let length = metadata.len().to_string();
    let words = [inside, name.as_ref(), mode.as_str(), length.as_str()];
    let input = ExecInput::Reader(Box::new(file));
    run_script(socket, script, &words, input, &mut std::io::sink())
}

pub(super) fn copy_out(socket: &Path, inside: &str, destination: &Path) -> Result<()> {
    let name = Path::new(inside)
        .file_name()
        .context("the source has no name")?;
    let destination = match destination.is_dir() {
        true => destination.join(name),
        false => destination.to_owned(),
    };
    let folder = destination
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let part = tempfile::Builder::new()
        .prefix(".copy-")
        .tempfile_in(folder.unwrap_or(Path::new(".")))
        .with_context(|| format!("cannot write {}", destination.display()))?;
    let (mut stream, part) = part.into_parts();
    let mut mode = Vec::new();
    let test = "[ ! -d \"$1\" ] || { echo \"$1 is a folder; hint: see lunette vm copy --help\" >&2; exit 1; }; stat -L -c %a \"$1\"";
    run_script(socket, test, &[inside], ExecInput::Nothing, &mut mode)?;
    let mut writer = BufWriter::new(&mut stream);
    run_script(
        socket,
        "cat \"$1\"",
        &[inside],
        ExecInput::Nothing,
        &mut writer,
    )?;
    writer
        .flush()
        .with_context(|| format!("cannot write {}", destination.display()))?;
    drop(writer);
    let mode = u32::from_str_radix(String::from_utf8_lossy(&mode).trim(), 8);
    let mode = mode.context("guest did not report the file mode")? & 0o777;
    stream.set_permissions(std::fs::Permissions::from_mode(mode))?;
    part.persist(&destination)
        .with_context(|| format!("cannot write {}", destination.display()))
}

/// Runs a script with positional parameters. Its stderr becomes the error.
pub(super) fn run_script(
    socket: &Path,
    script: &str,
    words: &[&str],
    input: ExecInput,
    output: &mut impl Write,
) -> Result<()> {
    run_signalled_script(socket, script, words, input, output, None)
}

/// Same as [`run_script`], with the signals that the script receives.
pub(super) fn run_signalled_script(
    socket: &Path,
    script: &str,
    words: &[&str],
    input: ExecInput,
    output: &mut impl Write,
    signals: Option<Receiver<u8>>,
) -> Result<()> {
    let mut line = b"set --".to_vec();
    for word in words {
        line.push(b' ');
        line.extend(quoted(word.as_bytes()));
    }
    line.push(b'\n');
    line.extend(script.as_bytes());
    let mut errors = Vec::new();
    match exec(socket, &line, input, output, &mut errors, signals)? {
        CommandEnd::Code(0) => Ok(()),
        CommandEnd::Code(code) => {
            let errors = String::from_utf8_lossy(&errors);
            bail!("{} (exit code {code} in the guest)", errors.trim())
        }
        CommandEnd::OutputClosed => bail!("the reader of the copied data has ended"),
    }
}
