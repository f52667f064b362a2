//! `lunette image snapshot`.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use bdev::NamedFiles;
use cli_common::{Outcome, printable};
use serde_json::Value;

use super::arguments::SnapshotArguments;
use super::{describe, of, open_tables, require_qcow2};

/// Lists or changes the snapshots inside an image.
pub fn run(arguments: &SnapshotArguments) -> Outcome {
    let path = arguments.path.as_path();
    let failed = of(path);
    if arguments.format.is_some() {
        require_qcow2(path, arguments.format)?;
    }
    let changes = [&arguments.create, &arguments.apply, &arguments.delete];
    let read_only = changes.iter().all(|change| change.is_none());
    let image = open_tables(path, read_only, NamedFiles::None)?;
    let mut stdout = cli_common::stdout();
    let shown = path.display();
    if let Some(name) = &arguments.create {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let seconds = now.map_or(0, |now| now.as_secs() as u32);
        let id = image.create_snapshot(name, seconds);
        let id = id.map_err(|error| failed(&error))?;
        if !arguments.quiet {
            writeln!(stdout, "{shown}: snapshot {id}, {name}")?;
        }
    } else if let Some(which) = &arguments.apply {
        let applied = image.apply_snapshot(which);
        applied.map_err(|error| failed(&error))?;
        if !arguments.quiet {
            writeln!(stdout, "{shown}: reverted to snapshot {which}")?;
        }
    } else if let Some(which) = &arguments.delete {
        let deleted = image.delete_snapshot(which);
        deleted.map_err(|error| failed(&error))?;
        if !arguments.quiet {
            writeln!(stdout, "{shown}: snapshot {which} removed")?;
        }
    } else if arguments.output.is_json() {
        let list = Value::from(describe::snapshots(image.snapshots()));
        writeln!(stdout, "{list:#}")?;
    } else {
        writeln!(
            stdout,
            "{:<6} {:<32} {:>16}",
            "number", "name", "disk, bytes"
        )?;
        for one in image.snapshots() {
            let size = one.size.map_or("-".to_owned(), |size| size.to_string());
            let (id, name) = (printable(&one.id), printable(&one.name));
            writeln!(stdout, "{id:<6} {name:<32} {size:>16}")?;
        }
    }
    Ok(())
}
