//! `lunette image`: creates, checks and changes images that are not in use.

mod arguments;
mod chain;
mod compare;
mod convert;
mod create;
mod describe;
mod disks;
mod map;
mod pieces;
mod snapshot;

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

use bdev::qcow2::{self, Repair};
use bdev::{CacheMode, Container, File, FileOptions, ImageFormat, ImageOptions, NamedFiles};
use cli_common::{Failure, Outcome, print_line};
use serde_json::json;

pub use arguments::ImageArguments;
pub use arguments::parse_bytes;
use arguments::{Action, Format, RepairWhat, ResizeArguments};
use disks::{determine_format, open_writable};

/// Exit codes of a check, as in qemu-img.
const DAMAGED: u8 = 2;
const LEAKING: u8 = 3;
const NO_CHECK: u8 = 63;

/// Length of a new file before its image is created, in bytes.
const FIRST_BYTES: u64 = 512;

pub fn run(arguments: &ImageArguments) -> Outcome {
    match &arguments.action {
        Action::Create(arguments) => create::create(arguments),
        Action::Info(info) => describe::info(info),
        Action::Check {
            path,
            format,
            repair,
            quiet,
            output,
        } => {
            let printed = (!quiet).then(|| output.is_json());
            check(path, *format, *repair, printed)
        }
        Action::Resize(resize) => self::resize(resize),
        Action::Map {
            path,
            format,
            named,
            output,
        } => map::map(path, *format, named.files, output.is_json()),
        Action::Convert(convert) => convert::convert(convert),
        Action::Commit {
            path,
            format,
            named,
            quiet,
        } => chain::commit(path, *format, named.files, *quiet),
        Action::Snapshot(snapshot) => snapshot::run(snapshot),
        Action::Rebase(rebase) => chain::rebase(rebase),
        Action::Compare(compare) => compare::compare(compare),
    }
}

/// Creates failures with the name of a file.
fn of(path: &Path) -> impl Fn(&dyn std::fmt::Display) -> Failure {
    let path = path.display().to_string();
    move |error| Failure::because(format!("{path}: {error}"))
}

/// Opens and locks the file of an image.
fn open_container(path: &Path, read_only: bool) -> Result<Container, Failure> {
    let file = File::open(FileOptions {
        read_only,
        cache: CacheMode::Writeback,
        is_container: true,
        ..FileOptions::new(path)
    });
    let file = file.map_err(|error| Failure::because(error.to_string()))?;
    file.container().map_err(|error| of(path)(&error))
}

/// A locked image for access to its tables.
type Tables = qcow2::Image<Container>;

fn open_tables(path: &Path, read_only: bool, named_files: NamedFiles) -> Result<Tables, Failure> {
    let image = bdev::open_tables(&ImageOptions {
        read_only,
        cache: CacheMode::Writeback,
        trusts_name: true,
        named_files,
        ..ImageOptions::new(path)
    });
    image.map_err(|error| Failure::because(error.to_string()))
}

/// Refuses a disk that is not a qcow2 image by its stated format or by name and content. A file without an extension counts as qcow2,
/// because the command is only for images.
fn require_qcow2(path: &Path, format: Option<Format>) -> Result<(), Failure> {
    let format = match format {
        Some(format) => format,
        None if path.extension().is_none() && path.is_file() => Format::Qcow2,
        None => determine_format(path)?,
    };
    match format {
        Format::Qcow2 => Ok(()),
        Format::Raw => Err(of(path)(
            &"it is a raw disk, but this command needs a qcow2 image",
        )),
    }
}

/// Creates a file for an image. Fails if the path exists.
fn new_container(path: &Path) -> Result<Container, Failure> {
    new_file(path, FIRST_BYTES, "remove it first, or give another path")
}

/// Creates a file of `bytes` bytes. Fails with `hint` if the path exists.
fn new_file(path: &Path, bytes: u64, hint: &str) -> Result<Container, Failure> {
    if path.exists() {
        return Err(of(path)(&format!("already exists; hint: {hint}")));
    }
    let file = File::open(FileOptions {
        size: Some(bytes),
        cache: CacheMode::Writeback,
        is_container: true,
        ..FileOptions::new(path)
    });
    let file = file.map_err(|error| Failure::because(error.to_string()))?;
    file.container().map_err(|error| of(path)(&error))
}

/// Returns the exit code for an invalid command line. For a check it is not 2, which means a damaged image.
pub fn usage_exit_code(arguments: &[OsString]) -> u8 {
    let is_check = arguments.windows(2).any(|two| two == ["image", "check"]);
    if is_check { 1 } else { 2 }
}

/// Returns a hint for an option of commands about a running daemon.
pub fn usage_hint(arguments: &[OsString]) -> Option<&'static str> {
    let is_image = arguments.get(1).is_some_and(|word| word == "image");
    let names_daemon = arguments.iter().any(|word| {
        let word = word.to_string_lossy();
        ["--socket", "--url", "--control"]
            .iter()
            .any(|option| word.split('=').next() == Some(option))
    });
    (is_image && names_daemon).then_some(
        "the commands of lunette image open files themselves and need no daemon; hint: omit the option, or use lunette disk for disks of a running daemon",
    )
}

fn cluster_bits(text: &str) -> Result<u32, Failure> {
    let bytes =
        parse_bytes(text).map_err(|why| Failure::mistake(format!("--cluster-size: {why}")))?;
    if !bytes.is_power_of_two() || !(512..=2 << 20).contains(&bytes) {
        return Err(Failure::mistake(format!(
            "--cluster-size {text}: must be a power of two from 512 to 2M"
        )));
    }
    Ok(bytes.trailing_zeros())
}

/// Checks an image. `printed` selects JSON or text for the report; `None` prints errors only.
fn check(
    path: &Path,
    format: Option<Format>,
    repair: Option<RepairWhat>,
    printed: Option<bool>,
) -> Outcome {
    if path.is_dir() {
        return Err(of(path)(&"is a directory"));
    }
    // No other file is opened, so content is sufficient without a stated format.
    let found = disks::signature(path)?;
    if format == Some(Format::Raw) || found != Some(ImageFormat::Qcow2) {
        let shown = path.display();
        print_line(&format_args!(
            "lunette: {shown}: cannot check it: it is not a qcow2 image"
        ));
        return Err(Failure::Found(NO_CHECK));
    }
    let repair = match repair {
        None => Repair::Nothing,
        Some(RepairWhat::Leaks) => Repair::Leaks,
        Some(RepairWhat::All) => Repair::All,
    };
    let container = open_container(path, repair == Repair::Nothing)?;
    let report = qcow2::Image::check(container, repair).map_err(|error| of(path)(&error))?;
    if let Some(as_json) = printed {
        print_report(path, &report, as_json)?;
    }
    match () {
        () if report.is_clean() => Ok(()),
        () if report.corruptions > report.corruptions_fixed => Err(Failure::Found(DAMAGED)),
        () => Err(Failure::Found(LEAKING)),
    }
}

fn print_report(path: &Path, report: &qcow2::CheckReport, as_json: bool) -> std::io::Result<()> {
    let mut stdout = cli_common::stdout();
    if as_json {
        let text = json!({
            "filename": path, "format": "qcow2", "check-errors": 0,
            "image-end-offset": report.end, "total-clusters": report.clusters,
            "allocated-clusters": report.allocated, "compressed-clusters": report.compressed,
            "fragmented-clusters": report.fragmented,
            "leaks": report.leaks, "leaks-fixed": report.leaks_fixed,
            "corruptions": report.corruptions, "corruptions-fixed": report.corruptions_fixed,
        });
        writeln!(stdout, "{text:#}")?;
    } else {
        for finding in &report.findings {
            writeln!(stdout, "{finding}")?;
        }
        let rest = (report.leaks + report.corruptions).saturating_sub(report.findings.len() as u64);
        if rest > 0 {
            writeln!(stdout, "and {rest} more")?;
        }
        writeln!(
            stdout,
            "{} of {} clusters have data, {} of them compressed; {} faults, {} of them repaired; {} leaked clusters, {} of them freed",
            report.allocated,
            report.clusters,
            report.compressed,
            report.corruptions,
            report.corruptions_fixed,
            report.leaks,
            report.leaks_fixed
        )?;
    }
    Ok(())
}

/// Returns true if an image has valid persistent bitmaps.
fn has_bitmaps(path: &Path) -> Result<bool, Failure> {
    let header = qcow2::Header::read(&open_container(path, true)?);
    Ok(header.is_ok_and(|header| header.bitmaps.is_some()))
}

/// Warns that a change of the disk made the bitmaps of its image invalid.
fn warn_of_bitmaps(path: &Path) {
    let path = path.display();
    cli_common::print_line(&format_args!(
        "{path}: warning: its persistent bitmaps are now invalid, because they do not record this change; hint: make a full backup and new bitmaps"
    ));
}

fn resize(arguments: &ResizeArguments) -> Outcome {
    let (path, text) = (arguments.path.as_path(), arguments.size.as_str());
    let format = match arguments.format {
        Some(format) => format,
        None => determine_format(path)?,
    };
    let has_bitmaps = format == Format::Qcow2 && has_bitmaps(path)?;
    let disk = open_writable(path, format, arguments.named.files)?;
    let before = disk.capacity().bytes();
    let wrong = |why: String| Failure::mistake(why);
    let size = match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(by), _) => before.checked_add(parse_bytes(by).map_err(wrong)?),
        (_, Some(by)) => before.checked_sub(parse_bytes(by).map_err(wrong)?),
        _ => Some(parse_bytes(text).map_err(wrong)?),
    };
    let size = size.filter(|size| *size > 0 && size.is_multiple_of(512));
    let Some(size) = size else {
        return Err(Failure::mistake(format!(
            "{text}: the disk has {before} bytes, and its new size must be a multiple of 512"
        )));
    };
    if size < before && !arguments.shrink {
        return Err(Failure::mistake(format!(
            "cannot shrink the disk from {before} to {size} bytes without data loss; hint: allow it with --shrink"
        )));
    }
    disk.set_size(size).map_err(|error| of(path)(&error))?;
    if has_bitmaps {
        warn_of_bitmaps(path);
    }
    if arguments.quiet {
        return Ok(());
    }
    Ok(writeln!(
        cli_common::stdout(),
        "{}: resized from {before} to {size} bytes",
        path.display()
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_daemon_get_a_hint() {
        let hint = |words: &str| {
            let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
            usage_hint(&words).is_some()
        };
        assert!(hint("lunette image info --socket /run/l.sock a.qcow2"));
        assert!(hint("lunette image check a.qcow2 --socket=/run/l.sock"));
        assert!(!hint("lunette image info --sockets a.qcow2"));
        assert!(!hint("lunette top --socket /run/l.sock"));
    }
}
