//! Renders a configuration as TOML text that parses to the same configuration.

use std::fmt::Write;

use super::export_kinds::EXPORT_KINDS;
use super::key::Kind;
use super::model::{Config, IscsiLimits};

/// Returns the text of `config`, with the value of every key that has one.
pub fn render(config: &Config) -> String {
    let mut text = String::new();
    write_config(&mut text, config).expect("a String takes all that is written to it");
    text
}

fn write_config(text: &mut String, config: &Config) -> std::fmt::Result {
    for (key, value) in config.daemon_values() {
        if !matches!(key.kind, Kind::Sections(..)) {
            writeln!(text, "{} = {}", key.name, key.kind.toml(&value))?;
        }
    }
    for disk in &config.disks {
        writeln!(text, "\n[[disk]]")?;
        for (key, value) in disk.file_values() {
            writeln!(text, "{} = {}", key.name, key.kind.toml(&value))?;
        }
    }
    for kind in EXPORT_KINDS {
        for export in config.exports().filter(|export| export.kind() == kind.word) {
            writeln!(text, "\n[[{}]]", kind.table)?;
            for key_value in export.object().file_values() {
                writeln!(
                    text,
                    "{} = {}",
                    key_value.name,
                    key_value.kind.toml(&key_value.value)
                )?;
            }
        }
    }
    if config.iscsi_limits != IscsiLimits::default() {
        writeln!(text, "\n[iscsi_limits]")?;
        for (key, value) in config.iscsi_limits.values() {
            writeln!(text, "{} = {}", key.name, key.kind.toml(&value))?;
        }
    }
    Ok(())
}
