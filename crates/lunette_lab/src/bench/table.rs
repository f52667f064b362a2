//! `lunette bench table`, `iscsi-table`, `image-table` and `rbd-table`: run by `make bench`, `make bench-iscsi`, `make bench-images`
//! and `make bench-rbd`.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;
use bench::run::Progress;
use bench::table::{
    McsOptions, RbdPlace, TableOptions, image_table, iscsi_table, mcs_table, rbd_table, table,
};

use super::arguments::{McsArguments, RbdTableArguments, TableArguments};
use super::{interrupted, to_its_end, unless_interrupted};
use cli_common::{Failure, Outcome};

/// Makes the table of the vhost-user transports.
pub fn vhost(arguments: TableArguments) -> Outcome {
    run(arguments, "bench", table)
}

/// Makes the table of the iSCSI transport.
pub fn iscsi(arguments: TableArguments) -> Outcome {
    run(arguments, "bench-iscsi", iscsi_table)
}

/// Makes the table of qcow2 images.
pub fn images(arguments: TableArguments) -> Outcome {
    run(arguments, "bench-images", image_table)
}

/// Makes the table of images of a Ceph cluster.
pub fn rbd(arguments: RbdTableArguments) -> Outcome {
    let place = RbdPlace {
        conf: arguments.conf,
        id: arguments.id,
        image: arguments.image,
        peer_image: arguments.peer_image,
    };
    run(
        arguments.table,
        "bench-rbd",
        |options, interrupted, progress| rbd_table(options, &place, interrupted, progress),
    )
}

/// Makes the table of one session with several connections.
pub fn mcs(arguments: McsArguments) -> Outcome {
    let is_json = arguments.json;
    if arguments.link.is_some() {
        bench::link::enter_namespace().map_err(super::failed)?;
    }
    run(
        arguments.table,
        "bench mcs",
        |table, interrupted, progress| {
            let options = McsOptions {
                table: table.clone(),
                target: arguments.target,
                connections: arguments.connections,
                size: arguments.bs,
                depth: arguments.iodepth,
                link: arguments.link,
                devices: arguments.beside,
            };
            let made = mcs_table(&options, interrupted, progress)?;
            Ok(match is_json {
                true => format!("{}\n", made.json),
                false => made.text,
            })
        },
    )
}

/// Makes and prints a table, and appends it to the notes if requested, under this goal of `make`.
fn run(
    arguments: TableArguments,
    goal: &str,
    make: impl FnOnce(&TableOptions, &Arc<AtomicBool>, &Progress) -> Result<String>,
) -> Outcome {
    let options = TableOptions {
        program: cli_common::find_sibling("lunette")?,
        place: arguments.place,
        driver_cpu: arguments.driver_cpu,
        device_cpu: arguments.device_cpu,
        repetitions: arguments.repetitions,
        turn: Duration::from_millis(arguments.turn_ms),
        only: arguments.only,
    };
    let progress = Progress::new(None);
    let interrupted = interrupted()?;
    let made = make(&options, &interrupted, &progress);
    let text = unless_interrupted(made, &interrupted)?;
    drop(progress);
    write!(cli_common::stdout(), "{text}")?;
    to_its_end(&interrupted)?;
    if let Some(folder) = arguments.notes {
        note(&folder, goal, &text)?;
    }
    Ok(())
}

pub fn note(folder: &Path, goal: &str, text: &str) -> Outcome {
    let now = std::time::SystemTime::now();
    let seconds = now
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    let path = folder.join(format!("{}.md", bench::report::date(seconds)));
    let failed = |error: std::io::Error| {
        Failure::because(format!("cannot write to {}: {error}", path.display()))
    };
    std::fs::create_dir_all(folder).map_err(failed)?;
    let mut options = OpenOptions::new();
    let mut file = options
        .create(true)
        .append(true)
        .open(&path)
        .map_err(failed)?;
    let clock = (seconds % 86_400 / 3600, seconds % 3600 / 60);
    write!(
        file,
        "## make {goal}, {:02}:{:02} UTC\n\n```\n{text}```\n\n",
        clock.0, clock.1
    )
    .map_err(failed)?;
    cli_common::print_line(&format_args!("lunette: noted in {}", path.display()));
    Ok(())
}
