//! `lunette vm migrate`.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use cli_common::Outcome;
use serde_json::json;
use vm::running::{Migrated, MigrationOptions, MigrationProgress, Registry, SECONDS_MAX, migrate};

use super::failed;

const MIB: u64 = 1 << 20;

/// `lunette vm migrate`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct MigrateArguments {
    /// Name of the guest
    name: String,
    /// Downtime in milliseconds that QEMU may plan. QEMU copies changed memory in further rounds until the rest takes less time
    #[arg(long, value_name = "MS", default_value_t = 300)]
    downtime_limit: u64,
    /// Maximum number of MiB per second that QEMU sends [default: no limit]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    bandwidth: Option<u32>,
    /// Time limit in seconds. The migration is then cancelled and the guest continues
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(..=SECONDS_MAX))]
    within: u64,
    /// Control socket of another daemon on this machine, which serves the same disks. It serves the guest afterwards
    #[arg(long, value_name = "SOCKET")]
    to_daemon: Option<PathBuf>,
    /// Print the result as JSON, and no progress
    #[arg(long)]
    json: bool,
}

const AFTER: &str = "\
Moves a running guest to a second QEMU on this machine (live migration). The daemon serves each disk through a second export, NAME.2, during
the migration. The first QEMU and its exports are then removed. The next migration uses the first names again. Commands and the console
of the guest continue. Ctrl-C cancels the migration, and the guest continues.

The result has two kinds of times:
  downtime      time without a running guest
  queue stops   duration of the stop of each virtqueue by Lunette, with the wait for requests in flight

With --to-daemon, the second exports are created in another daemon. It must have the disks of the guest with the same names, serial and wwn.
Files and images need lock=while-active in both daemons. Jobs and other clients of these disks must have ended. A daemon that was started
for the guest is ended after the migration.

Disks of QEMU, plugged disks, --share and --net tap are not supported.

Examples:
    lunette vm run --detach --name guest1 blk:1 scsi:1x1
    lunette vm migrate guest1
    lunette vm migrate guest1 --downtime-limit 50 --json
    lunette vm migrate guest1 --to-daemon /run/lunette-b/control.sock";

/// Migrates a guest.
///
/// # Errors
/// When the guest cannot migrate. It continues.
pub fn run(arguments: &MigrateArguments) -> Outcome {
    let to_daemon = arguments.to_daemon.as_ref();
    let options = MigrationOptions {
        downtime_ms: arguments.downtime_limit,
        bandwidth_mib: arguments.bandwidth,
        seconds: arguments.within,
        to_daemon: to_daemon.map(std::path::absolute).transpose()?,
    };
    let registry = Registry::open().map_err(failed)?;
    let (folder, _) = registry.find(&arguments.name).map_err(failed)?;
    let mut printed = None;
    let progress = |now: MigrationProgress| {
        let line = format!(
            "{} MiB sent, {} MiB remaining",
            now.transferred / MIB,
            now.remaining / MIB
        );
        if !arguments.json && printed.as_ref() != Some(&line) {
            // A closed stderr is not an error.
            writeln!(cli_common::stderr(), "{line}").unwrap_or(());
            printed = Some(line);
        }
    };
    let migrated = migrate(&folder, &options, progress).map_err(failed)?;
    let mut stdout = cli_common::stdout();
    match arguments.json {
        true => writeln!(stdout, "{}", json!(migrated))?,
        false => write!(stdout, "{}", described(&arguments.name, &migrated))?,
    }
    Ok(())
}

fn described(name: &str, migrated: &Migrated) -> String {
    let mut text = format!(
        "guest {name} migrated in {:.1} s, {} MiB sent\ndowntime: {} ms\n",
        migrated.total_ms as f64 / 1e3,
        migrated.transferred / MIB,
        migrated.downtime_ms
    );
    for export in &migrated.queues {
        let stops = export.stops_ns.iter();
        let stops: Vec<String> = stops.map(|ns| format!("{:.2}", *ns as f64 / 1e6)).collect();
        let stops = match stops.is_empty() {
            true => "none".to_owned(),
            false => format!("{} ms", stops.join(", ")),
        };
        text.push_str(&format!("queue stops of {}: {stops}\n", export.export));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Command;
    use vm::running::ExportStops;

    use crate::vm::plug::UnplugArguments;
    use crate::vm::stop::StopArguments;

    #[test]
    fn time_limits_are_at_most_a_day() {
        let command = Command::new("vm");
        for (command, words) in [
            (
                MigrateArguments::augment_args(command.clone()),
                &["guest1"][..],
            ),
            (StopArguments::augment_args(command.clone()), &["guest1"]),
            (UnplugArguments::augment_args(command), &["guest1", "d"]),
        ] {
            let parse = |limit: &str| {
                let words = [&["vm"][..], words, &["--within", limit]].concat();
                command.clone().try_get_matches_from(words)
            };
            for (limit, is_valid) in [("0", true), ("86400", true), ("86401", false)] {
                assert_eq!(parse(limit).is_ok(), is_valid, "{words:?} {limit}");
            }
            let refused = parse("18446744073709551615").unwrap_err().to_string();
            assert!(refused.contains("0..=86400"), "{refused}");
        }
    }

    #[test]
    fn result_shows_both_kinds_of_times() {
        let export = |name: &str, stops: &[u64]| ExportStops {
            export: name.to_owned(),
            stops_ns: stops.to_vec(),
        };
        let migrated = Migrated {
            downtime_ms: 12,
            total_ms: 3456,
            transferred: 100 * MIB,
            queues: vec![export("b0", &[120_000, 3_400_000]), export("c0", &[])],
        };
        assert_eq!(
            described("guest1", &migrated),
            "guest guest1 migrated in 3.5 s, 100 MiB sent\ndowntime: 12 ms\n\
             queue stops of b0: 0.12, 3.40 ms\nqueue stops of c0: none\n"
        );
    }
}
