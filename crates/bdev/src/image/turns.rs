//! Images that several daemons use in turns (`lock = "while-active"`).
//!
//! A turn begins when a worker has attached, or with a request of the control plane: the owner takes the locks, too, and reads the header
//! and the tables. It ends when no worker has a channel: the owner writes the tables, publishes a map without tables, and releases the locks. Between turns
//! another daemon may change the image. A worker has the locks while it has a channel. A map that it read before the owner ended a turn
//! stays valid for its I/O, because no other daemon can begin a turn.

use std::io;

use qcow2::{Error, Header, Image};

use super::open::open_for_service;
use super::owner::Owner;
use crate::file::Container;
use crate::turn_lock::InUse;
use crate::{File, Turn};

/// Use of an image in turns with other daemons.
pub(super) struct Turns {
    container: Container,
    /// Container of the external data file, if any.
    data: Option<Container>,
    /// Uses of all files during a turn.
    current: Option<Vec<InUse>>,
    /// The failure to begin a turn is logged.
    is_failure_logged: bool,
}

impl Turns {
    pub fn new(container: Container, data: Option<Container>) -> Turns {
        Turns {
            container,
            data,
            current: None,
            is_failure_logged: false,
        }
    }

    fn containers(&self) -> impl Iterator<Item = &Container> {
        std::iter::once(&self.container).chain(&self.data)
    }
}

impl Owner {
    /// Begins a turn, unless one is in progress or the image is not used in turns.
    ///
    /// # Errors
    /// Another process has the lock, or the image cannot be read or is not the same any more. No turn is in progress.
    pub(super) fn begin_turn(&mut self) -> qcow2::Result<()> {
        let is_open = |turns: &Turns| turns.current.is_some();
        if self.turns.as_ref().is_none_or(is_open) {
            return Ok(());
        }
        let begun = self.read_again();
        if let Some(turns) = &mut self.turns {
            let is_logged = std::mem::replace(&mut turns.is_failure_logged, begun.is_err());
            if let (Err(error), false) = (&begun, is_logged) {
                let path = self.shared.path();
                tracing::error!(%path, "cannot open the image again, I/O fails: {error}");
            }
        }
        begun
    }

    fn read_again(&mut self) -> qcow2::Result<()> {
        let Some(turns) = &mut self.turns else {
            return Ok(());
        };
        let used = self.shared.files().map(File::begin_use);
        let used = used.collect::<io::Result<Vec<_>>>();
        let used = used.map_err(failed("cannot lock the image"))?;
        let cached = turns.containers().try_for_each(Container::drop_cache);
        cached.map_err(failed("cannot read the image again"))?;
        check_same(self.image.header(), &Header::read(&turns.container)?)?;
        self.image = open_for_service(
            turns.container.clone(),
            turns.data.clone(),
            self.shared.info.read_only,
        )?;
        turns.current = Some(used);
        self.shared.map.publish(self.image.map());
        self.follow_corruption();
        self.follow_header();
        self.shared.turn(Turn::Begun);
        Ok(())
    }

    /// Adopts a size that another daemon has set, and leaves a backing image that it has removed.
    fn follow_header(&mut self) {
        let header = self.image.header();
        self.shared.capacity.set(header.size);
        if header.backing_file.is_none()
            && let Some(device) = self.shared.backing.leave()
        {
            self.left = Some(device);
        }
    }

    /// Ends a turn when no worker has a channel.
    pub(super) fn end_turn_if_unused(&mut self) {
        if self
            .turns
            .as_ref()
            .is_some_and(|turns| turns.current.is_some())
            && !self.shared.readers.has_any()
        {
            self.close_at_last();
            self.drop_tables();
        }
        for reply in self.release_waiters.drain(..) {
            // The requester may be gone.
            reply.send(Ok(())).ok();
        }
    }

    fn drop_tables(&mut self) {
        let Some(turns) = &mut self.turns else {
            return;
        };
        let header = self.image.header().clone();
        self.image = Image::unread(turns.container.clone(), header);
        self.shared.map.publish(self.image.map());
        self.shared.turn(Turn::Ending);
        // Dropping it releases the locks.
        turns.current = None;
    }
}

/// Checks that another daemon has not replaced the image.
fn check_same(before: &Header, now: &Header) -> qcow2::Result<()> {
    let is_same = before.cluster_bits == now.cluster_bits
        && before.version == now.version
        && before.has_data_file() == now.has_data_file()
        && before.has_subclusters() == now.has_subclusters()
        && (now.backing_file.is_none() || before.backing_file == now.backing_file);
    match is_same {
        true => Ok(()),
        false => Err(Error::Unsupported(
            "another daemon has replaced the image or its backing image; hint: remove the disk and add it again"
                .to_owned(),
        )),
    }
}

fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { operation, source }
}
