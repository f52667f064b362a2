//! `lunette check`: all mistakes of a configuration, without starting anything.

use std::io::Write;

use daemon::config::{self, Config, Surroundings};
use serde_json::json;

use crate::cli::CheckArguments;
use crate::failure::{Failure, Outcome};

/// Reads and checks; prints what was found.
pub fn run(arguments: &CheckArguments) -> Outcome {
    let configuration = &arguments.configuration;
    let read = config::load(
        configuration.config.as_deref(),
        &configuration.flags(),
        &Surroundings::of_this_process(),
    );
    let mut stdout = std::io::stdout().lock();
    match read {
        Ok(_) if arguments.json => {
            writeln!(stdout, "{}", json!({"valid": true, "mistakes": []}))?;
            Ok(())
        }
        Ok(config) => {
            writeln!(stdout, "valid: {}", summary(&config))?;
            Ok(())
        }
        Err(mistakes) if arguments.json => {
            writeln!(stdout, "{}", json!({"valid": false, "mistakes": mistakes}))?;
            Err(Failure::Told)
        }
        Err(mistakes) => {
            crate::failure::say(&mistakes);
            Err(Failure::Told)
        }
    }
}

fn summary(config: &Config) -> String {
    let luns: usize = config.vhost_scsi.iter().map(|c| c.luns.len()).sum();
    let parts = [
        (config.disks.len(), "disk"),
        (config.vhost_blk.len(), "vhost-blk export"),
        (config.vhost_scsi.len(), "vhost-scsi controller"),
        (config.iscsi.len(), "iSCSI target"),
        (luns, "LUN"),
        (config.workers.placement.count(), "worker"),
    ];
    let counted = parts.map(|(count, what)| match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    });
    counted.join(", ")
}
