//! Events about changes, broadcast to subscribers.

use std::sync::{Arc, Mutex, PoisonError};

use control::objects::WaitingListener;
use control::{Event, EventKind};
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
    pub fn publish(&self, kind: EventKind, name: &str) {
        self.send(event(kind, name));
    }

    /// Sends an event about a logical unit.
    pub fn publish_lun(&self, kind: EventKind, export: &str, lun: &config::LunConfig) {
        self.send(Event {
            target: Some(lun.target),
            lun: Some(lun.lun),
            disk: Some(lun.disk.clone()),
            ..event(kind, export)
        });
    }

    /// Sends the event that a listener begins to wait or has opened.
    pub fn publish_listener(&self, listener: &WaitingListener, is_open: bool) {
        let is_portal = listener.kind == "iscsi";
        let name = listener.export.as_ref().unwrap_or(&listener.kind);
        let kind = match (is_portal, is_open) {
            (true, false) => EventKind::PortalWaiting,
            (true, true) => EventKind::PortalOpened,
            (false, false) => EventKind::ListenerWaiting,
            (false, true) => EventKind::ListenerOpened,
        };
        let address = Some(listener.address.clone());
        self.send(Event {
            portal: address.clone().filter(|_| is_portal),
            listener: address.filter(|_| !is_portal),
            reason: Some(listener.reason.clone()).filter(|_| !is_open),
            ..event(kind, name)
        });
    }

    /// Sends the event that a configured disk cannot be opened.
    pub fn publish_unavailable(&self, disk: &str, reason: &str) {
        self.send(Event {
            reason: Some(reason.to_owned()),
            ..event(EventKind::DiskUnavailable, disk)
        });
    }

    /// Sends the event that a disk was resized.
    pub fn publish_size(&self, disk: &str, size: u64) {
        self.send(Event {
            size: Some(size),
            ..event(EventKind::DiskResized, disk)
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
        let kind = match opened {
            true => EventKind::SessionOpened,
            false => EventKind::SessionClosed,
        };
        self.send(Event {
            session: Some(session),
            initiator,
            ..event(kind, export)
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

fn event(kind: EventKind, name: &str) -> Event {
    Event {
        event: kind.word().to_owned(),
        name: name.to_owned(),
        ..Event::default()
    }
}

impl Owner {
    /// Sends the events of an applied plan.
    pub(super) fn publish_events(&mut self, plan: &Plan) {
        for (export, luns) in &plan.remove_luns {
            for lun in luns {
                self.event_bus
                    .publish_lun(EventKind::LunRemoved, export, lun);
            }
        }
        let replaced = plan.replace_exports.iter().map(|e| e.name());
        let gone = plan.remove_exports.iter().map(String::as_str);
        for name in gone.chain(replaced) {
            self.event_bus.publish(EventKind::ExportRemoved, name);
        }
        for name in &plan.remove_disks {
            self.event_bus.publish(EventKind::DiskRemoved, name);
        }
        for disk in &plan.add_disks {
            self.event_bus.publish(EventKind::DiskAdded, &disk.name);
        }
        let resized = plan.resize.iter();
        let resized: Vec<_> = resized
            .filter(|one| !self.current.shrinks_later(&one.disk))
            .collect();
        for Resize { disk, size } in resized {
            self.event_bus.publish_size(disk, *size);
        }
        for Limit { disk, .. } in &plan.limit {
            self.event_bus.publish(EventKind::DiskLimited, disk);
        }
        for (disk, _) in &plan.errors {
            self.event_bus.publish(EventKind::DiskOnError, disk);
        }
        for export in plan.add_exports.iter().chain(&plan.replace_exports) {
            self.event_bus
                .publish(EventKind::ExportAdded, export.name());
        }
        for Placing { export, .. } in &plan.place_exports {
            self.event_bus.publish(EventKind::ExportPlaced, export);
        }
        for (export, _) in &plan.access_states {
            self.event_bus.publish(EventKind::ExportAccessState, export);
        }
        for (export, luns) in &plan.add_luns {
            for lun in luns {
                self.event_bus.publish_lun(EventKind::LunAdded, export, lun);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{Names, check};

    fn published(kind: EventKind) -> Event {
        let bus = EventBus::default();
        let mut events = bus.sender().subscribe();
        let listener = |kind: &str| WaitingListener {
            kind: kind.to_owned(),
            export: Some("e".to_owned()),
            address: "192.0.2.77:3260".to_owned(),
            reason: "in use".to_owned(),
            next_try_seconds: 1,
        };
        match kind {
            EventKind::DiskResized => bus.publish_size("d0", 4096),
            EventKind::DiskUnavailable => bus.publish_unavailable("d0", "in use"),
            EventKind::LunAdded | EventKind::LunRemoved | EventKind::LunRemoving => {
                let lun = config::LunConfig {
                    target: 0,
                    lun: 1,
                    disk: "d0".to_owned(),
                };
                bus.publish_lun(kind, "e", &lun);
            }
            EventKind::SessionOpened | EventKind::SessionClosed => {
                let initiator = Some("iqn.2026-11.org.example:i".to_owned());
                let is_open = kind == EventKind::SessionOpened;
                bus.publish_session(is_open, "e", "1".to_owned(), initiator);
            }
            EventKind::PortalWaiting => bus.publish_listener(&listener("iscsi"), false),
            EventKind::PortalOpened => bus.publish_listener(&listener("iscsi"), true),
            EventKind::ListenerWaiting => bus.publish_listener(&listener("api"), false),
            EventKind::ListenerOpened => bus.publish_listener(&listener("api"), true),
            _ => bus.publish(kind, "d0"),
        }
        events.try_recv().unwrap()
    }

    #[test]
    fn events_of_releases_have_their_names_and_fields() {
        let mut names = Names::new();
        for kind in EventKind::ALL {
            let event = serde_json::to_value(published(*kind)).unwrap();
            assert_eq!(event["event"], kind.word());
            let fields = event.as_object().unwrap().keys().cloned().collect();
            names.insert(kind.word().to_owned(), fields);
        }
        check("all-events.txt", &names);
    }

    #[test]
    fn documents_name_all_events() {
        let page = include_str!("../../../../docs/api.md");
        let schema = include_str!("../../../control/src/event.rs");
        for kind in EventKind::ALL {
            let word = format!("`{}`", kind.word());
            assert!(page.contains(&word), "docs/api.md: {word} is missing");
            assert!(schema.contains(&word), "Event: {word} is missing");
        }
    }
}
