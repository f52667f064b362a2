//! Assignment of exports to workers, for reports.

use std::collections::HashMap;

use control::objects::Served;

use super::servers::{Servers, Transports, iscsi_session, nbd_session};

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
        let placed = transports
            .iscsi
            .connection_workers(&target.name)
            .into_iter();
        let served = placed.map(|(tsih, connection, worker)| Served {
            queue: None,
            session: Some(iscsi_session(tsih)),
            connection: Some(connection),
            worker,
        });
        all.insert(target.name, served.collect());
    }
    for session in transports.nbd.sessions() {
        all.entry(session.export).or_default().push(Served {
            queue: None,
            session: Some(nbd_session(session.number)),
            connection: None,
            worker: session.worker,
        });
    }
    all
}
