//! Renders a configuration as TOML text that parses to the same configuration.

use std::fmt::Write;

use super::export_kinds::EXPORT_KINDS;
use super::key::{KeyValue, Kind};
use super::model::{Config, IscsiLimits};

/// Returns the text of `config`, with the value of every key that has one.
pub fn render(config: &Config) -> String {
    let mut text = String::new();
    write_config(&mut text, config).expect("a String takes all that is written to it");
    text
}

fn write_config(text: &mut String, config: &Config) -> std::fmt::Result {
    let mut values = config.daemon_values();
    values.retain(|one| !matches!(one.kind, Kind::Sections(..)));
    write_values(text, &values)?;
    for disk in &config.disks {
        writeln!(text, "\n[[disk]]")?;
        write_values(text, &disk.file_values())?;
    }
    for kind in EXPORT_KINDS {
        for export in config.exports().filter(|export| export.kind() == kind.word) {
            writeln!(text, "\n[[{}]]", kind.table)?;
            write_values(text, &export.file_values())?;
        }
    }
    if config.iscsi_limits != IscsiLimits::default() {
        writeln!(text, "\n[iscsi_limits]")?;
        write_values(text, &config.iscsi_limits.values())?;
    }
    Ok(())
}

fn write_values(text: &mut String, values: &[KeyValue]) -> std::fmt::Result {
    let mut values = values.iter();
    values.try_for_each(|one| writeln!(text, "{} = {}", one.name, one.kind.toml(&one.value)))
}
