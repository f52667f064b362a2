//! iSCSI target for any number of initiators, which learn of changed logical units from UNIT ATTENTION conditions.

use std::sync::Arc;
use std::time::Duration;

use bdev::Disk;
use iscsi_target::{Server, TargetOptions};
use scsi_exec::{Hold, Holding};

use super::{ChapUsers, Endpoint, ExportDevice, Opening};
use config::{AccessStates, ExportConfig, IscsiLimits, LunConfig};

/// Longest wait for commands in flight when an export is closed.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Opens a target.
pub(super) fn open(
    export: &ExportConfig,
    opening: Opening<'_>,
) -> Result<(Arc<dyn ExportDevice>, Endpoint), String> {
    let luns = by_number(&opening.luns(&export.luns)?);
    let chap_users = match opening.users {
        Some(users) => users.clone(),
        None => super::chap_users(export.chap_users())?,
    };
    let target = &export.iscsi;
    let options = TargetOptions {
        name: export.name.clone(),
        alias: target.alias.clone(),
        portals: target.portals.clone(),
        announce: target.announce.clone(),
        demo_mode: target.demo_mode,
        acl: target.acl.clone(),
        chap_users,
        bounds: target.bounds.clone(),
        access_states: target.access_states.clone(),
        state_setters: target.state_setters,
    };
    let server = Arc::clone(&opening.transports.iscsi);
    let portals = server.add_target(options, &luns);
    let portals = portals.map_err(|error| error.to_string())?;
    let name = export.name.clone();
    let endpoint = match portals.is_empty() && !target.portals.is_empty() {
        true => Endpoint::Waiting,
        false => Endpoint::Portals(portals),
    };
    Ok((Arc::new(OpenTarget { name, server }), endpoint))
}

/// Returns the limits of the iSCSI server.
pub(crate) fn server_limits(limits: &IscsiLimits) -> iscsi_target::ServerLimits {
    let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let usual = iscsi_target::ServerLimits::default();
    iscsi_target::ServerLimits {
        connections: count(limits.connections),
        half_open: count(limits.half_open),
        sessions: count(limits.sessions),
        connections_per_session: limits
            .connections_per_session
            .try_into()
            .unwrap_or(u16::MAX),
        login_time: Duration::from_secs(limits.login_s),
        data_bytes: count(limits.memory),
        // At most half is guaranteed to connections, and one target gets at most three quarters of the rest: more than `memory`.
        total_bytes: usual.total_bytes.max(3 * count(limits.memory)),
        protocol: iscsi_target::ProtocolLimits {
            commands_per_session: limits.commands_per_session.try_into().unwrap_or(u32::MAX),
            ..usual.protocol.clone()
        },
        ..usual
    }
}

fn by_number(luns: &[(LunConfig, Arc<Disk>)]) -> Vec<(u16, Arc<Disk>)> {
    let luns = luns.iter();
    luns.map(|(lun, disk)| (lun.lun, Arc::clone(disk)))
        .collect()
}

struct OpenTarget {
    name: String,
    server: Arc<Server>,
}

impl ExportDevice for OpenTarget {
    fn close(&self) {
        let (hold, ended) = Holding::new();
        self.server.remove_target(&self.name, &hold);
        drop(hold);
        if !ended.wait(END_PATIENCE) {
            tracing::warn!(
                export = self.name,
                "sessions did not end in time, removing the export anyway"
            );
        }
    }

    fn add_luns(&self, luns: &[(LunConfig, Arc<Disk>)]) -> Result<(), String> {
        let added = self.server.add_luns(&self.name, &by_number(luns));
        added.map_err(|error| error.to_string())
    }

    fn detach_luns(&self, luns: &[LunConfig]) {
        for lun in luns {
            // The logical unit existed when the change was planned.
            self.server.detach_lun(&self.name, lun.lun).ok();
        }
    }

    fn end_tasks(&self, luns: &[LunConfig], abort: bool, hold: &Hold) {
        let at: Vec<u16> = luns.iter().map(|lun| lun.lun).collect();
        self.server.end_tasks(&self.name, &at, abort, hold);
    }

    fn notify_removed(&self, _luns: &[LunConfig]) {}

    fn notify_resized(&self, _luns: &[LunConfig]) {}

    fn chap_users(&self) -> Option<Arc<ChapUsers>> {
        self.server.chap_users(&self.name)
    }

    fn set_access_states(&self, states: &AccessStates) {
        // The target existed when the change was planned.
        self.server.set_access_states(&self.name, states).ok();
    }

    fn set_chap_users(&self, users: ChapUsers) -> bool {
        matches!(self.server.set_chap_users(&self.name, users), Ok(true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_limits_are_those_of_the_server() {
        let (ours, theirs) = (
            server_limits(&IscsiLimits::default()),
            iscsi_target::ServerLimits::default(),
        );
        assert_eq!(format!("{ours:?}"), format!("{theirs:?}"));
    }
}
