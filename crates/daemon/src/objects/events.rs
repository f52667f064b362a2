//! Events about changes, broadcast to subscribers.

use std::sync::{Arc, Mutex, PoisonError};

use control::Event;
use control::objects::WaitingListener;
use tokio::sync::broadcast;

use super::owner::Owner;
use super::plan::{Limit, Placing, Plan, Resize};

/// Backlog of a subscriber, in events. A slower one loses the oldest.
const BACKLOG: usize = 4096;

/// Sends events to all subscribers without waiting for slow ones.
#[derive(Clone, Debug)]
pub struct EventBus {
    sender: broadcast::Sender<Event>,
    /// Number of events. Locked during a send, so that events arrive in order.
    last_id: Arc<Mutex<u64>>,
}

impl Default for EventBus {
    fn default() -> EventBus {
        let (sender, _) = broadcast::channel(BACKLOG);
        EventBus {
            sender,
            last_id: Arc::default(),
        }
    }
}

impl EventBus {
    /// Returns the channel to subscribe to.
    pub fn sender(&self) -> broadcast::Sender<Event> {
        self.sender.clone()
    }

    /// Sends an event about an object.
    pub fn publish(&self, event: &str, name: &str) {
        self.send(Event {
            event: event.to_owned(),
            name: name.to_owned(),
            ..Event::default()
        });
    }

    /// Sends an event about a logical unit.
    pub fn publish_lun(&self, event: &str, export: &str, lun: &config::LunConfig) {
        self.send(Event {
            event: event.to_owned(),
            name: export.to_owned(),
            target: Some(lun.target),
            lun: Some(lun.lun),
            disk: Some(lun.disk.clone()),
            ..Event::default()
        });
    }

    /// Sends the event that a listener begins to wait or has opened.
    pub fn publish_listener(&self, listener: &WaitingListener, is_open: bool) {
        let is_portal = listener.kind == "iscsi";
        let event = match (is_portal, is_open) {
            (true, false) => "portal.waiting",
            (true, true) => "portal.opened",
            (false, false) => "listener.waiting",
            (false, true) => "listener.opened",
        };
        let address = Some(listener.address.clone());
        self.send(Event {
            event: event.to_owned(),
            name: listener
                .export
                .clone()
                .unwrap_or_else(|| listener.kind.clone()),
            portal: address.clone().filter(|_| is_portal),
            listener: address.filter(|_| !is_portal),
            reason: Some(listener.reason.clone()).filter(|_| !is_open),
            ..Event::default()
        });
    }

    /// Sends the event that a configured disk cannot be opened.
    pub fn publish_unavailable(&self, disk: &str, reason: &str) {
        self.send(Event {
            event: "disk.unavailable".to_owned(),
            name: disk.to_owned(),
            reason: Some(reason.to_owned()),
            ..Event::default()
        });
    }

    /// Sends the event that a disk was resized.
    pub fn publish_size(&self, disk: &str, size: u64) {
        self.send(Event {
            event: "disk.resized".to_owned(),
            name: disk.to_owned(),
            size: Some(size),
            ..Event::default()
        });
    }

    /// Sends the event that a session was opened or closed.
    pub fn publish_session(
        &self,
        opened: bool,
        export: &str,
        session: String,
        initiator: Option<String>,
    ) {
        let event = match opened {
            true => "session.opened",
            false => "session.closed",
        };
        self.send(Event {
            event: event.to_owned(),
            name: export.to_owned(),
            session: Some(session),
            initiator,
            ..Event::default()
        });
    }

    fn send(&self, event: Event) {
        let mut last_id = self.last_id.lock().unwrap_or_else(PoisonError::into_inner);
        *last_id += 1;
        // Fails without subscribers.
        self.sender
            .send(Event {
                id: *last_id,
                ..event
            })
            .ok();
    }
}

impl Owner {
    /// Sends the events of an applied plan.
    pub(super) fn publish_events(&mut self, plan: &Plan) {
        for (export, luns) in &plan.remove_luns {
            for lun in luns {
                self.event_bus.publish_lun("lun.removed", export, lun);
            }
        }
        let replaced = plan.replace_exports.iter().map(|e| e.name());
        let gone = plan.remove_exports.iter().map(String::as_str);
        for name in gone.chain(replaced) {
            self.event_bus.publish("export.removed", name);
        }
        for name in &plan.remove_disks {
            self.event_bus.publish("disk.removed", name);
        }
        for disk in &plan.add_disks {
            self.event_bus.publish("disk.added", &disk.name);
        }
        let resized = plan.resize.iter();
        let resized: Vec<_> = resized
            .filter(|one| !self.current.shrinks_later(&one.disk))
            .collect();
        for Resize { disk, size } in resized {
            self.event_bus.publish_size(disk, *size);
        }
        for Limit { disk, .. } in &plan.limit {
            self.event_bus.publish("disk.limited", disk);
        }
        for (disk, _) in &plan.errors {
            self.event_bus.publish("disk.on_error", disk);
        }
        for export in plan.add_exports.iter().chain(&plan.replace_exports) {
            self.event_bus.publish("export.added", export.name());
        }
        for Placing { export, .. } in &plan.place_exports {
            self.event_bus.publish("export.placed", export);
        }
        for (export, _) in &plan.access_states {
            self.event_bus.publish("export.access_state", export);
        }
        for (export, luns) in &plan.add_luns {
            for lun in luns {
                self.event_bus.publish_lun("lun.added", export, lun);
            }
        }
    }
}
