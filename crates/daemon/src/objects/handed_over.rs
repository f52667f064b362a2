//! Listening sockets inherited from the parent process, which keeps them bound: the daemon could not bind to their paths again.

use super::owner::Owner;
use super::relations;
use crate::running::Inherited;
use config::{Config, ExportRef};

impl Owner {
    /// Keeps sockets handed over for exports that were changed at run time. Such a socket is for the export with its path, now or later.
    pub(super) fn keep_what_moved(
        &mut self,
        inherited: Vec<Inherited>,
        next: &Config,
    ) -> Vec<Inherited> {
        let path = |config: &Config, name: &str| {
            let socket = config.export(name).and_then(ExportRef::socket);
            socket.map(|path| relations::absolute(path))
        };
        let stays = |one: &Inherited| path(next, &one.export) == path(&self.base, &one.export);
        let (staying, moved): (Vec<_>, Vec<_>) = inherited.into_iter().partition(stays);
        for one in moved {
            let base = self.base.export(&one.export).map(ExportRef::to_owned);
            if let Some(export) = base {
                self.keep_listening(export.as_ref(), one);
            }
        }
        staying
    }

    /// Stores a duplicate of an export's inherited socket if it is a listening socket.
    pub(super) fn keep_listening(
        &mut self,
        export: ExportRef<'_>,
        inherited: Inherited,
    ) -> Inherited {
        let listens = rustix::net::sockopt::socket_acceptconn(&inherited.socket) == Ok(true);
        if let (Some(path), true) = (export.socket(), listens)
            && let Ok(socket) = inherited.socket.try_clone()
        {
            self.handed.insert(relations::absolute(path), socket);
        }
        inherited
    }

    /// Returns the inherited socket at the path of an export.
    pub(super) fn handed(&self, export: ExportRef<'_>) -> Option<Inherited> {
        let socket = self.handed.get(&relations::absolute(export.socket()?))?;
        Some(Inherited {
            export: export.name().to_owned(),
            socket: socket.try_clone().ok()?,
        })
    }
}
