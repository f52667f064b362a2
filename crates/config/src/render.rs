//! A configuration as TOML text that reads back as the same configuration.

use std::fmt::Write;
use std::path::Path;

use reactor::ExportPlacement;

use super::iscsi::{Announced, IscsiConfig, Portal};
use super::iscsi_limits::IscsiLimits;
use super::key::quoted;
use super::model::{Config, LunConfig, Placement, PollLimit};
use super::objects::{DISK_POLL_KEY, NETWORK_POLL_KEY, POLL_KEY};
use super::size::render_size;

/// The text of `config`, with every value said.
pub fn render(config: &Config) -> String {
    let mut text = String::new();
    write_config(&mut text, config).expect("a String takes all that is written to it");
    text
}

/// The keys at the top of the file.
fn write_daemon(text: &mut String, config: &Config) -> std::fmt::Result {
    if let Some(control) = &config.control {
        writeln!(text, "control = {}", quoted_path(control))?;
    }
    if let Some(group) = &config.access.control_group {
        writeln!(text, "control_group = {}", quoted(group))?;
    }
    if let Some(group) = &config.access.control_readers {
        writeln!(text, "control_readers = {}", quoted(group))?;
    }
    if let Some(address) = &config.access.api_listen {
        writeln!(text, "api_listen = \"{address}\"")?;
    }
    if let Some(path) = &config.access.token_file {
        writeln!(text, "token_file = {}", quoted_path(path))?;
    }
    if let Some(path) = &config.access.readers_token_file {
        writeln!(text, "readers_token_file = {}", quoted_path(path))?;
    }
    if let Some(state) = &config.state {
        writeln!(text, "state = {}", quoted_path(state))?;
    }
    if let Some(address) = &config.metrics_listen {
        writeln!(text, "metrics_listen = \"{address}\"")?;
    }
    writeln!(text, "sandbox = \"{}\"", config.sandbox)?;
    if !config.sandbox_paths.is_empty() {
        let paths: Vec<String> = config
            .sandbox_paths
            .iter()
            .map(|path| quoted_path(path))
            .collect();
        writeln!(text, "sandbox_paths = [{}]", paths.join(", "))?;
    }
    if let Some(path) = &config.discovery_auth {
        writeln!(text, "discovery_auth = {}", quoted_path(path))?;
    }
    match &config.workers.placement {
        Placement::Count(count) => writeln!(text, "workers = {count}")?,
        Placement::Cpus(cpus) => writeln!(text, "cpus = {cpus:?}")?,
    }
    let bounds = [
        (POLL_KEY, config.workers.poll),
        (NETWORK_POLL_KEY, config.workers.network_poll),
        (DISK_POLL_KEY, config.workers.disk_poll),
    ];
    for (key, bound) in bounds {
        match bound {
            PollLimit::Never => writeln!(text, "{key} = 0")?,
            PollLimit::Micros(micros) => writeln!(text, "{key} = {micros}")?,
            PollLimit::Always => writeln!(text, "{key} = \"always\"")?,
        }
    }
    Ok(())
}

fn write_config(text: &mut String, config: &Config) -> std::fmt::Result {
    write_daemon(text, config)?;
    for disk in &config.disks {
        writeln!(text, "\n[[disk]]")?;
        for (key, value) in disk.file_values() {
            writeln!(text, "{} = {}", key.name, key.kind.toml(&value))?;
        }
    }
    for export in &config.vhost_blk {
        writeln!(text, "\n[[vhost_blk]]\nname = {}", quoted(&export.name))?;
        writeln!(text, "disk = {}", quoted(&export.disk))?;
        writeln!(text, "socket = {}", quoted_path(&export.socket))?;
        writeln!(text, "queues = {}", export.queues)?;
        write_placement(text, &export.placement)?;
    }
    for controller in &config.vhost_scsi {
        let name = quoted(&controller.name);
        writeln!(text, "\n[[vhost_scsi]]\nname = {name}")?;
        writeln!(text, "socket = {}", quoted_path(&controller.socket))?;
        writeln!(text, "queues = {}", controller.queues)?;
        write_placement(text, &controller.placement)?;
        writeln!(text, "lun = [")?;
        for lun in &controller.luns {
            let disk = quoted(&lun.disk);
            let (target, number) = (lun.target, lun.lun);
            writeln!(
                text,
                "  {{ target = {target}, lun = {number}, disk = {disk} }},"
            )?;
        }
        writeln!(text, "]")?;
    }
    for target in &config.iscsi {
        write_iscsi(text, target)?;
    }
    let limits = &config.iscsi_limits;
    if *limits != IscsiLimits::default() {
        writeln!(text, "\n[iscsi_limits]")?;
        for (key, value) in [
            ("connections", limits.connections),
            ("half_open", limits.half_open),
            ("sessions", limits.sessions),
            ("connections_per_session", limits.connections_per_session),
            ("commands_per_session", limits.commands_per_session),
            ("login_s", limits.login_s),
        ] {
            writeln!(text, "{key} = {value}")?;
        }
        writeln!(text, "memory = \"{}\"", render_size(limits.memory))?;
    }
    Ok(())
}

fn write_placement(text: &mut String, placement: &ExportPlacement) -> std::fmt::Result {
    match placement {
        ExportPlacement::Shared => Ok(()),
        ExportPlacement::Workers(workers) => writeln!(text, "workers = {workers:?}"),
        ExportPlacement::Dedicated => writeln!(text, "dedicated = true"),
    }
}

fn write_iscsi(text: &mut String, target: &IscsiConfig) -> std::fmt::Result {
    let list = |words: &mut dyn Iterator<Item = String>| {
        let words: Vec<String> = words.map(|word| quoted(&word)).collect();
        words.join(", ")
    };
    writeln!(text, "\n[[iscsi]]\nname = {}", quoted(&target.name))?;
    if let Some(alias) = &target.alias {
        writeln!(text, "alias = {}", quoted(alias))?;
    }
    if target.luns.iter().zip(0..).all(|(lun, at)| lun.lun == at) {
        let disks = list(&mut target.luns.iter().map(|lun| lun.disk.clone()));
        writeln!(text, "disks = [{disks}]")?;
    } else {
        writeln!(text, "lun = [")?;
        for LunConfig { lun, disk, .. } in &target.luns {
            writeln!(text, "  {{ lun = {lun}, disk = {} }},", quoted(disk))?;
        }
        writeln!(text, "]")?;
    }
    let portals = list(&mut target.portals.iter().map(Portal::to_string));
    writeln!(text, "portals = [{portals}]")?;
    if !target.announce.is_empty() {
        let announce = list(&mut target.announce.iter().map(Announced::to_string));
        writeln!(text, "announce = [{announce}]")?;
    }
    writeln!(text, "demo_mode = \"{}\"", target.demo_mode)?;
    for (key, value) in target.bounds_said() {
        writeln!(text, "{} = {}", key.name, key.kind.toml(&value))?;
    }
    write_placement(text, &target.placement)?;
    if let Some(path) = &target.chap_users {
        writeln!(text, "chap_users = {}", quoted_path(path))?;
    }
    if target.acl.is_empty() {
        return Ok(());
    }
    writeln!(text, "acl = [")?;
    for entry in &target.acl {
        write!(text, "  {{ ")?;
        if let Some(initiator) = &entry.initiator {
            write!(text, "initiator = {}, ", quoted(initiator))?;
        }
        if let Some(network) = &entry.network {
            write!(text, "network = {}, ", quoted(&network.to_string()))?;
        }
        writeln!(text, "read_only = {} }},", entry.read_only)?;
    }
    writeln!(text, "]")
}

/// A path as a TOML string.
fn quoted_path(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}
