//! Assigns exports to workers and reports the assignment.

use std::collections::HashMap;

use control::objects::Served;

use super::owner::{Owner, refused};
use super::plan::{Placing, Plan};
use super::refusal::Refusal;
use super::servers::{Servers, Transports, iscsi_session};

/// Returns the queues and connections of each export with their workers.
pub fn served(servers: &Servers, transports: &Transports) -> HashMap<String, Vec<Served>> {
    let mut all: HashMap<String, Vec<Served>> = HashMap::new();
    for vhost in transports.vhost.status() {
        all.insert(vhost.name, Vec::new());
    }
    for owned in servers.pool.queues() {
        // All connections of a target on a worker are one queue.
        if let Some(served) = all.get_mut(&owned.export) {
            served.push(Served {
                queue: Some(owned.queue),
                worker: owned.worker,
                ..Served::default()
            });
        }
    }
    for served in all.values_mut() {
        served.sort_by_key(|one| one.queue);
    }
    for target in transports.iscsi.status() {
        let placed = transports.iscsi.placed(&target.name).into_iter();
        let served = placed.map(|(tsih, connection, worker)| Served {
            queue: None,
            session: Some(iscsi_session(tsih)),
            connection: Some(connection),
            worker,
        });
        all.insert(target.name, served.collect());
    }
    all
}

impl Owner {
    /// Assigns remaining exports to workers. `undone` receives the previous placements.
    pub(super) fn place_exports(
        &self,
        plan: &Plan,
        undone: &mut Vec<Placing>,
    ) -> Result<(), Refusal> {
        for Placing { export, placement } in &plan.place_exports {
            let assigned = self.servers.pool.assign(export, placement);
            assigned.map_err(|error| refused(vec![format!("export {export}: {error}")]))?;
            let before = self.present.export(export).map(|export| export.placement());
            undone.push(Placing {
                export: export.clone(),
                placement: before.cloned().unwrap_or_default(),
            });
        }
        Ok(())
    }

    /// Restores the placements recorded by [`Owner::place_exports`].
    pub(super) fn replace_as_before(&self, undone: &[Placing]) {
        for Placing { export, placement } in undone {
            if let Err(error) = self.servers.pool.assign(export, placement) {
                tracing::error!(export, "cannot roll back the placement: {error}");
            }
        }
    }
}
