//! The open exports: opens and closes them, changes their logical units, and notifies their clients.

use std::collections::HashMap;
use std::sync::Arc;

use super::inherited_sockets::InheritedSockets;
use super::owner::refused;
use super::plan::{Placing, Plan};
use super::refusal::Refusal;
use super::servers::{Servers, Transports};
use crate::disks::Disks;
use crate::exports::{self, ChapUsers, ExportDevice, OpenExport};
use config::{AccessStates, Config, ExportConfig, LunConfig};

/// The open exports.
pub(super) struct OpenExports {
    pub open: HashMap<String, Arc<dyn ExportDevice>>,
    pub inherited: InheritedSockets,
    servers: Arc<Servers>,
}

impl OpenExports {
    pub fn new(servers: Arc<Servers>) -> OpenExports {
        OpenExports {
            open: HashMap::new(),
            inherited: InheritedSockets::default(),
            servers,
        }
    }

    /// Adds an export that was opened.
    pub fn enter(&mut self, open: &OpenExport) {
        let device = Arc::clone(&open.device);
        self.open.insert(open.name.clone(), device);
    }

    /// Closes and removes an export.
    pub fn remove(&mut self, name: &str) {
        if let Some(device) = self.open.remove(name) {
            exports::close(name, &*device, &self.servers.pool);
        }
        self.servers.pool.forget(name);
    }

    /// Reopens an export that was closed for a failed change.
    pub fn reopen(
        &mut self,
        export: &ExportConfig,
        users: Option<&ChapUsers>,
        disks: &Disks,
        transports: &Transports,
    ) {
        let socket = self.inherited.of(export);
        match exports::open(export, disks, &self.servers, transports, socket, users) {
            Ok(open) => self.enter(&open),
            Err(error) => {
                tracing::error!(
                    export = export.name(),
                    "cannot roll back the export: {error}"
                );
            }
        }
    }

    /// Returns the CHAP users in force in an export, which may differ from its CHAP file.
    pub fn chap_users(&self, name: &str) -> Option<Arc<ChapUsers>> {
        self.open.get(name)?.chap_users()
    }

    /// Sets the CHAP users of remaining targets from their files.
    pub fn set_chap_users(&self, users: Vec<(String, ChapUsers)>, plan: &mut Plan) {
        for (name, users) in users {
            // Exports opened by this change have read the file already.
            let device = self.open.get(&name);
            if device.is_some_and(|device| device.set_chap_users(users)) {
                plan.chap_users.push(name);
            }
        }
    }

    /// Sets access states of an export, unless it is not served at present.
    pub fn set_access_states(&self, export: &str, states: &AccessStates) {
        if let Some(device) = self.open.get(export) {
            device.set_access_states(states);
        }
    }

    /// Adds logical units to an export.
    pub fn add_luns(&self, export: &str, luns: &[LunConfig], disks: &Disks) {
        let found = luns.iter();
        let found = found.filter_map(|lun| Some((lun.clone(), disks.get(&lun.disk)?.clone())));
        let Some(device) = self.open.get(export) else {
            return;
        };
        if let Err(error) = device.add_luns(&found.collect::<Vec<_>>()) {
            // The configuration was checked, so this is a defect of the daemon.
            tracing::error!(export, "cannot attach LUNs: {error}");
        }
    }

    /// Notifies the clients of an export that logical units were removed.
    pub fn notify_removed(&self, export: &str, luns: &[LunConfig]) {
        if let Some(device) = self.open.get(export) {
            device.notify_removed(luns);
        }
    }

    /// Notifies the clients of all exports that a disk was resized.
    pub fn notify_resized(&self, name: &str, disks: &Disks, present: &Config) {
        let Some(disk) = disks.get(name) else {
            return;
        };
        if let Some(unit) = self.servers.units.known(disk) {
            unit.update((*disk.info()).clone());
        }
        let shows = |export: &&ExportConfig| export.disks().any(|disk| disk == name);
        for export in present.exports().filter(shows) {
            let luns = export.luns().unwrap_or_default().iter();
            let luns: Vec<LunConfig> = luns.filter(|lun| lun.disk == name).cloned().collect();
            if let Some(device) = self.open.get(export.name()) {
                device.notify_resized(&luns);
            }
        }
    }

    /// Assigns remaining exports to workers. `undone` receives the previous placements.
    pub fn place(
        &self,
        plan: &Plan,
        present: &Config,
        undone: &mut Vec<Placing>,
    ) -> Result<(), Refusal> {
        for Placing { export, placement } in &plan.place_exports {
            let assigned = self.servers.pool.assign(export, placement);
            assigned.map_err(|error| refused(vec![format!("export {export}: {error}")]))?;
            let before = present.export(export).map(|export| export.placement());
            undone.push(Placing {
                export: export.clone(),
                placement: before.cloned().unwrap_or_default(),
            });
        }
        Ok(())
    }

    /// Restores the placements recorded by [`OpenExports::place`].
    pub fn place_as_before(&self, undone: &[Placing]) {
        for Placing { export, placement } in undone {
            if let Err(error) = self.servers.pool.assign(export, placement) {
                tracing::error!(export, "cannot roll back the placement: {error}");
            }
        }
    }
}
