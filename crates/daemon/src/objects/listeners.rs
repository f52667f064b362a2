//! Configured listeners that cannot be opened yet: iSCSI portals, vhost-user sockets, addresses of NBD exports, and those of the API and of metrics. The owner
//! retries them and reports each one that begins to wait or opens.

use std::sync::Arc;
use std::time::Instant;

use control::OpenListener;
use control::objects::WaitingListener;

use super::events::EventBus;
use super::servers::{Servers, Transports};
use crate::tcp_service::TcpEntrance;

/// Values of `kind` for listeners in the API and in metrics.
pub const LISTENER_KINDS: [&str; 5] = ["vhost-user", "iscsi", "nbd", "api", "metrics"];

impl Transports {
    /// Sets whether new listeners may wait. Otherwise their exports fail.
    pub(super) fn set_may_wait(&self, may_wait: bool) {
        self.vhost.set_may_wait(may_wait);
        self.iscsi.set_may_wait(may_wait);
        self.nbd.set_may_wait(may_wait);
    }
}

impl Servers {
    /// Registers a listener of the API or of metrics for retries and reports.
    pub(crate) fn add_entrance(&self, entrance: Arc<TcpEntrance>) {
        self.lock_entrances().push(entrance);
    }

    /// Returns all waiting listeners.
    pub fn waiting_listeners(&self) -> Vec<WaitingListener> {
        let seconds =
            |next_try: Instant| next_try.saturating_duration_since(Instant::now()).as_secs();
        let mut waiting = Vec::new();
        if let Some(transports) = self.transports() {
            let sockets = transports.vhost.waiting_sockets().into_iter();
            waiting.extend(sockets.map(|socket| WaitingListener {
                kind: "vhost-user".to_owned(),
                export: Some(socket.export),
                address: socket.path.display().to_string(),
                reason: socket.reason,
                next_try_seconds: seconds(socket.next_try),
            }));
            let portals = transports.iscsi.waiting_portals().into_iter();
            waiting.extend(portals.map(|(target, portal)| WaitingListener {
                kind: "iscsi".to_owned(),
                export: Some(target),
                address: portal.address.to_string(),
                reason: portal.reason,
                next_try_seconds: seconds(portal.next_try),
            }));
            let addresses = transports.nbd.waiting_listeners().into_iter();
            waiting.extend(addresses.map(|(export, waiting)| WaitingListener {
                kind: "nbd".to_owned(),
                export: Some(export),
                address: waiting.address.to_string(),
                reason: waiting.reason,
                next_try_seconds: seconds(waiting.next_try),
            }));
        }
        for entrance in self.lock_entrances().iter() {
            if let Some(retry) = entrance.retry_state() {
                waiting.push(WaitingListener {
                    kind: entrance.name.to_owned(),
                    export: None,
                    address: entrance.address.to_string(),
                    reason: retry.reason,
                    next_try_seconds: seconds(retry.next_try),
                });
            }
        }
        waiting
    }

    /// Returns all open listeners with an address or a path.
    pub fn open_listeners(&self) -> Vec<OpenListener> {
        let mut open = Vec::new();
        let mut add = |kind: &str, export: Option<String>, address: String| {
            open.push(OpenListener {
                kind: kind.to_owned(),
                export,
                address,
            });
        };
        if let Some(transports) = self.transports() {
            for export in transports.vhost.status() {
                if let Some(path) = export.path {
                    add("vhost-user", Some(export.name), path.display().to_string());
                }
            }
            for target in transports.iscsi.status() {
                for portal in target.portals {
                    add("iscsi", Some(target.name.clone()), portal.to_string());
                }
            }
            for export in transports.nbd.status() {
                for address in export.addresses {
                    add("nbd", Some(export.name.clone()), address.to_string());
                }
            }
        }
        for entrance in self.lock_entrances().iter() {
            if let Some(address) = entrance.open_address() {
                add(entrance.name, None, address.to_string());
            }
        }
        // The transports list waiting addresses, too.
        let waiting = self.waiting_listeners();
        open.retain(|one| {
            let is_same = |other: &WaitingListener| {
                (&other.kind, &other.export, &other.address)
                    == (&one.kind, &one.export, &one.address)
            };
            !waiting.iter().any(is_same)
        });
        open
    }

    pub(super) fn next_listener_try(&self) -> Option<Instant> {
        let transports = self.transports();
        let of_exports = transports.iter().flat_map(|transports| {
            let portal = transports.iscsi.next_portal_try();
            let sockets = transports.vhost.next_socket_try();
            [portal, sockets, transports.nbd.next_listener_try()]
        });
        let entrances = self.lock_entrances();
        let retries = entrances.iter().filter_map(|one| one.retry_state());
        let of_entrances = retries.map(|retry| retry.next_try);
        of_exports.flatten().chain(of_entrances).min()
    }

    /// Calls `watcher` on the owner's thread when the set of waiting listeners changes. Only the first watcher is used.
    pub fn watch_listeners(&self, watcher: impl Fn() + Send + Sync + 'static) {
        self.listener_watcher.set(Box::new(watcher)).ok();
    }

    fn listeners_changed(&self) {
        if let Some(watcher) = self.listener_watcher.get() {
            watcher();
        }
    }
}

/// Waiting listeners of the daemon.
pub(crate) struct Listeners {
    servers: Arc<Servers>,
    event_bus: EventBus,
    /// Listeners reported as waiting.
    reported: Vec<WaitingListener>,
}

impl Listeners {
    pub(super) fn new(servers: Arc<Servers>, event_bus: EventBus) -> Listeners {
        Listeners {
            servers,
            event_bus,
            reported: Vec::new(),
        }
    }

    /// Retries listeners that are due. Logs and announces each one that opened.
    pub(super) fn retry(&mut self) {
        let now = Instant::now();
        let (sockets, portals, addresses) = match self.servers.transports() {
            Some(transports) => (
                transports.vhost.retry_sockets(now),
                transports.iscsi.retry_portals(now),
                transports.nbd.retry_listeners(now),
            ),
            None => Default::default(),
        };
        let entrances = self.servers.lock_entrances().clone().into_iter();
        let entrances: Vec<_> = entrances.filter(|entrance| entrance.retry(now)).collect();
        let has_opened = |one: &WaitingListener| match (one.kind.as_str(), &one.export) {
            ("vhost-user", Some(export)) => sockets.contains(export),
            ("iscsi", Some(export)) => portals
                .iter()
                .any(|(target, portal)| target == export && portal.to_string() == one.address),
            ("nbd", Some(_)) => addresses
                .iter()
                .any(|address| address.to_string() == one.address),
            (kind, _) => entrances.iter().any(|entrance| entrance.name == kind),
        };
        let opened: Vec<_> = self
            .reported
            .extract_if(.., |one| has_opened(one))
            .collect();
        for one in &opened {
            let (kind, export, address) = (&one.kind, one.export.as_deref(), &one.address);
            tracing::info!(kind, export, address, "listener opened");
            self.event_bus.publish_listener(one, true);
        }
        if !opened.is_empty() {
            self.servers.listeners_changed();
        }
    }

    /// Logs and announces each listener that began to wait since the last call.
    pub(crate) fn report(&mut self) {
        let now = self.servers.waiting_listeners();
        let before = std::mem::replace(&mut self.reported, now);
        let waiting = self.reported.iter();
        let is_new = |one: &&WaitingListener| !before.iter().any(|old| old.is_same_listener(one));
        for one in waiting.filter(is_new) {
            let (kind, export, address) = (&one.kind, one.export.as_deref(), &one.address);
            let reason = &one.reason;
            let hint = (!reason.contains("hint: ")).then(|| one.hint());
            tracing::warn!(
                kind,
                export,
                address,
                reason,
                hint,
                "cannot open listener, retrying"
            );
            self.event_bus.publish_listener(one, false);
        }
        let is_same =
            before.len() == self.reported.len() && self.reported.iter().all(|one| !is_new(&one));
        if !is_same {
            self.servers.listeners_changed();
        }
    }
}
