//! Handover to the next daemon, as named descriptors. The sender hands over; the receiver takes over. The receiver speaks the protocol of
//! systemd's descriptor store (sd_notify(3), `FDSTORE=1`): systemd itself at a restart, or the next daemon (`lunette upgrade`).
//!
//! ```text
//!   Running::hand_over ─▶ Handover: a list of (Item, descriptor) ─▶ Notifier::store ─▶ systemd, or the next daemon's socket
//!                                                                                          │ names and descriptors
//!   StartOptions::handover ◀─ Handover::add ◀──────────────────────────────────────────────┘
//!      │
//!      ├─ take_sessions ─▶ vhost_user::Server::resume      (`sessions`)
//!      ├─ take          ─▶ portals, exports, control socket, API, metrics
//!      └─ take_memory   ─▶ DiskMemory: RAM disks           (`memory`)
//! ```
//!
//! Sockets from the parent process (socket units, `--fd`) are not part of a handover. They are called inherited.

pub(crate) mod delays;
mod ending;
mod memory;
mod sessions;

use std::io;
use std::os::fd::{AsFd, OwnedFd};

pub use ending::Ending;
pub use memory::DiskMemory;

use crate::control::ControlSocket;
use crate::notify::Notifier;

/// Prefix of all names except that of memory.
const PREFIX: &str = "handover.";
/// Prefix of the names of memory, followed by the disk's name.
const MEMORY_PREFIX: &str = "ram.";

/// Kind of a descriptor in a handover. The names are a protocol between versions of the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// `handover`: a memfd with the version, and the messages of each session with the numbers of their descriptors.
    Sessions,
    /// `handover.N`: descriptor N of the sessions: connections, channels, memory, eventfds of rings.
    SessionDescriptor(usize),
    /// `handover.portal`: listening socket of an iSCSI portal.
    Portal,
    /// `handover.export`: listening socket of a vhost-user export.
    Export,
    /// `handover.nbd`: listening socket of NBD exports.
    Nbd,
    /// `handover.control`: the control socket; `handover.control-passed` if a service manager listens there.
    Control {
        /// The socket came from the parent process, and its path stays.
        is_inherited: bool,
    },
    /// `handover.api`: socket of the API over TCP.
    Api,
    /// `handover.metrics`: socket of metrics.
    Metrics,
    /// `ram.DISK`: memory of a RAM disk.
    Memory {
        /// Name of the disk.
        disk: String,
    },
    /// Item of a later version, which is closed.
    Unknown(String),
}

impl Item {
    /// Returns the item with this descriptor name; `None` for a descriptor that is not part of a handover.
    pub fn parse(name: &str) -> Option<Item> {
        if let Some(disk) = name.strip_prefix(MEMORY_PREFIX) {
            let disk = disk.to_owned();
            return Some(Item::Memory { disk });
        }
        Some(match name {
            "handover" => Item::Sessions,
            "handover.portal" => Item::Portal,
            "handover.export" => Item::Export,
            "handover.nbd" => Item::Nbd,
            "handover.control" => Item::Control {
                is_inherited: false,
            },
            "handover.control-passed" => Item::Control { is_inherited: true },
            "handover.api" => Item::Api,
            "handover.metrics" => Item::Metrics,
            other => match other.strip_prefix(PREFIX)?.parse() {
                Ok(number) => Item::SessionDescriptor(number),
                Err(_) => Item::Unknown(other.to_owned()),
            },
        })
    }

    /// Returns the descriptor name.
    pub fn name(&self) -> String {
        let fixed = match self {
            Item::Sessions => "handover",
            Item::Portal => "handover.portal",
            Item::Export => "handover.export",
            Item::Nbd => "handover.nbd",
            Item::Control {
                is_inherited: false,
            } => "handover.control",
            Item::Control { is_inherited: true } => "handover.control-passed",
            Item::Api => "handover.api",
            Item::Metrics => "handover.metrics",
            Item::SessionDescriptor(number) => return format!("{PREFIX}{number}"),
            Item::Memory { disk } => return format!("{MEMORY_PREFIX}{disk}"),
            Item::Unknown(name) => return name.clone(),
        };
        fixed.to_owned()
    }
}

/// Descriptors that are handed over, in the order of their transfer.
#[derive(Debug, Default)]
pub struct Handover(Vec<(Item, OwnedFd)>);

impl Handover {
    /// Adds a received descriptor.
    ///
    /// # Errors
    /// The descriptor, if its name is not that of a handover.
    pub fn add(&mut self, name: &str, descriptor: OwnedFd) -> Result<(), OwnedFd> {
        match Item::parse(name) {
            Some(item) => {
                self.0.push((item, descriptor));
                Ok(())
            }
            None => Err(descriptor),
        }
    }

    pub(crate) fn push(&mut self, item: Item, descriptor: impl Into<OwnedFd>) {
        self.0.push((item, descriptor.into()));
    }

    pub(crate) fn push_all(&mut self, item: &Item, descriptors: impl IntoIterator<Item = OwnedFd>) {
        let named = descriptors.into_iter();
        self.0.extend(named.map(|one| (item.clone(), one)));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if front ends are connected to the previous daemon.
    pub(crate) fn has_sessions(&self) -> bool {
        self.0.iter().any(|(item, _)| *item == Item::Sessions)
    }

    /// Returns the names of all items except memory, which stays with the service manager.
    pub fn names(&self) -> Vec<String> {
        let items = self.0.iter().map(|(item, _)| item);
        let items = items.filter(|item| !matches!(item, Item::Memory { .. }));
        items.map(Item::name).collect()
    }

    /// Returns the names of the disks with memory.
    pub fn disks_with_memory(&self) -> Vec<String> {
        let disks = self.0.iter().filter_map(|(item, _)| match item {
            Item::Memory { disk } => Some(disk.clone()),
            _ => None,
        });
        disks.collect()
    }

    /// Removes and returns the descriptors of an item.
    pub(crate) fn take_all(&mut self, item: &Item) -> Vec<OwnedFd> {
        let found = self.0.extract_if(.., |(other, _)| other == item);
        found.map(|(_, descriptor)| descriptor).collect()
    }

    /// Removes the descriptors of an item and returns the last one.
    pub(crate) fn take(&mut self, item: &Item) -> Option<OwnedFd> {
        self.take_all(item).pop()
    }

    /// Removes and returns the control socket.
    pub(crate) fn take_control(&mut self) -> Option<ControlSocket> {
        let mut take = |is_inherited| {
            let socket = self.take(&Item::Control { is_inherited })?;
            Some(ControlSocket {
                socket,
                is_inherited,
            })
        };
        take(false).or_else(|| take(true))
    }

    pub(crate) fn push_control(&mut self, control: ControlSocket) {
        let ControlSocket {
            socket,
            is_inherited,
        } = control;
        self.push(Item::Control { is_inherited }, socket);
    }

    /// Removes and returns the memory of RAM disks, by the names of the disks.
    pub(crate) fn take_memory(&mut self) -> Vec<(String, OwnedFd)> {
        let is_memory = |one: &mut (Item, OwnedFd)| matches!(one.0, Item::Memory { .. });
        let memory = self.0.extract_if(.., is_memory);
        let memory = memory.filter_map(|(item, descriptor)| match item {
            Item::Memory { disk } => Some((disk, descriptor)),
            _ => None,
        });
        memory.collect()
    }

    /// Sends all descriptors to the receiver.
    pub(crate) fn store(&self, to: &Notifier) -> io::Result<()> {
        let mut items = self.0.iter();
        items.try_for_each(|(item, descriptor)| to.store(&item.name(), descriptor.as_fd()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn fd() -> OwnedFd {
        UnixStream::pair().unwrap().0.into()
    }

    /// The names are those of all released versions.
    #[test]
    fn names_of_items_are_those_of_the_protocol() {
        let items = [
            ("handover", Item::Sessions),
            ("handover.17", Item::SessionDescriptor(17)),
            ("handover.portal", Item::Portal),
            ("handover.export", Item::Export),
            ("handover.nbd", Item::Nbd),
            (
                "handover.control",
                Item::Control {
                    is_inherited: false,
                },
            ),
            (
                "handover.control-passed",
                Item::Control { is_inherited: true },
            ),
            ("handover.api", Item::Api),
            ("handover.metrics", Item::Metrics),
            (
                "ram.handover",
                Item::Memory {
                    disk: "handover".to_owned(),
                },
            ),
            (
                "handover.of-a-later-version",
                Item::Unknown("handover.of-a-later-version".to_owned()),
            ),
        ];
        for (name, item) in items {
            assert_eq!(item.name(), name);
            assert_eq!(Item::parse(name), Some(item));
        }
        for name in ["handovers", "stored", "", "control"] {
            assert_eq!(Item::parse(name), None, "{name:?}");
        }
    }

    #[test]
    fn items_are_taken_once_and_other_descriptors_are_returned() {
        let mut handover = Handover::default();
        for name in [
            "handover.export",
            "handover.control-passed",
            "handover.export",
            "ram.d0",
            "handover.later",
        ] {
            handover.add(name, fd()).unwrap();
        }
        handover.add("socket of a unit", fd()).unwrap_err();
        assert_eq!(handover.disks_with_memory(), ["d0"]);
        assert_eq!(
            handover.names(),
            [
                "handover.export",
                "handover.control-passed",
                "handover.export",
                "handover.later"
            ]
        );
        let control = handover.take_control();
        assert!(control.is_some_and(|control| control.is_inherited));
        assert!(handover.take_control().is_none());
        assert_eq!(handover.take_all(&Item::Export).len(), 2);
        assert!(handover.take(&Item::Metrics).is_none());
        let memory = handover.take_memory();
        assert_eq!(memory[0].0, "d0");
        assert!(!handover.is_empty(), "the unknown item remains");
    }
}
