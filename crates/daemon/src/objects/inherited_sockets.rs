//! Listening sockets inherited from the parent process, which keeps them bound: the daemon could not bind to their paths again.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use super::relations;
use crate::running::Inherited;
use config::{Config, ExportConfig};

/// Inherited listening sockets by path.
#[derive(Default)]
pub(super) struct InheritedSockets(HashMap<PathBuf, OwnedFd>);

impl InheritedSockets {
    /// Stores the sockets of exports that were changed at run time and returns the others. A stored socket is for the export with its path,
    /// now or later.
    pub fn store_moved(
        &mut self,
        inherited: Vec<Inherited>,
        base: &Config,
        next: &Config,
    ) -> Vec<Inherited> {
        let path = |config: &Config, name: &str| {
            let socket = config.export(name).and_then(|export| export.socket());
            socket.map(|path| relations::absolute(path))
        };
        let stays = |one: &Inherited| path(next, &one.export) == path(base, &one.export);
        let (staying, moved): (Vec<_>, Vec<_>) = inherited.into_iter().partition(stays);
        for one in moved {
            if let Some(export) = base.export(&one.export) {
                self.store(export, one);
            }
        }
        staying
    }

    /// Stores a duplicate of an export's inherited socket if it is a listening socket.
    pub fn store(&mut self, export: &ExportConfig, inherited: Inherited) -> Inherited {
        let listens = rustix::net::sockopt::socket_acceptconn(&inherited.socket) == Ok(true);
        if let (Some(path), true) = (export.socket(), listens)
            && let Ok(socket) = inherited.socket.try_clone()
        {
            self.0.insert(relations::absolute(path), socket);
        }
        inherited
    }

    /// Returns a duplicate of the socket at the path of an export.
    pub fn of(&self, export: &ExportConfig) -> Option<Inherited> {
        let socket = self.0.get(&relations::absolute(export.socket()?))?;
        Some(Inherited {
            export: export.name().to_owned(),
            socket: socket.try_clone().ok()?,
        })
    }
}
