//! The thread that owns an image. It allocates, zeroes, loads tables and decompresses, one operation at a time, and answers the worker that
//! sent the command. Other workers never wait for it.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use block::{Extent, IoError, IoErrorKind};
use qcow2::{Backing, Error, Image};

use super::SharedImage;
use super::turns::Turns;
use crate::file::Container;
use crate::inbox::Inbox;
use crate::{BlockDevice, BlockingIo, CopiedUp};

/// Interval of the checks whether released clusters can be freed.
const RELEASE_PAUSE: Duration = Duration::from_millis(20);
const BATCH_MAX: usize = 256;

/// Operations that a worker cannot do by itself.
#[derive(Clone, Debug)]
pub(super) enum Command {
    /// Loads the table of an offset into the map.
    Load(u64),
    /// Makes the clusters at these offsets writable in place.
    PrepareWrite(Vec<u64>),
    /// Makes whole clusters read as zeroes.
    Zero { offset: u64, length: u64 },
    /// Returns the content of the compressed cluster at an offset.
    ReadCompressed(u64),
    /// Begins a turn: reads the header.
    BeginTurn,
}

/// Requests of the control plane.
pub(super) enum Change {
    /// Changes the size, in bytes.
    Resize(u64, Sender<io::Result<()>>),
    /// Ends writing and returns reserved clusters.
    BecomeReadOnly(Sender<io::Result<()>>),
    /// Copies data of the backing image into the image.
    CopyUp {
        offset: u64,
        length: u64,
        reply: Sender<io::Result<CopiedUp>>,
    },
    /// Lists the pieces of a range that the image stores.
    OwnPieces {
        offset: u64,
        length: u64,
        reply: Sender<io::Result<Vec<(u64, bool)>>>,
    },
    /// Removes the reference to the backing image.
    DetachBacking(Sender<io::Result<()>>),
    /// Answers when a turn without users has ended.
    AwaitRelease(Sender<io::Result<()>>),
    /// Closes the backing image that it has left, if no worker has a channel to it.
    CloseBacking(Sender<io::Result<Option<Arc<dyn BlockDevice>>>>),
}

impl Change {
    /// Answers the requester with an error.
    fn refuse(self, error: io::Error) {
        // The requester may be gone.
        match self {
            Change::Resize(_, reply)
            | Change::BecomeReadOnly(reply)
            | Change::AwaitRelease(reply)
            | Change::DetachBacking(reply) => drop(reply.send(Err(error))),
            Change::CopyUp { reply, .. } => drop(reply.send(Err(error))),
            Change::OwnPieces { reply, .. } => drop(reply.send(Err(error))),
            Change::CloseBacking(reply) => drop(reply.send(Err(error))),
        }
    }
}

pub(super) enum Request {
    Worker {
        command: Command,
        token: u64,
        inbox: Arc<Inbox<Answer>>,
    },
    Control(Change),
    /// A worker has opened a channel to an image that is used in turns.
    Opened,
    /// A worker has closed its channel.
    Closed,
}

/// Result of a command; bytes only for `ReadCompressed`.
pub(super) type Answer = Result<Vec<u8>, IoError>;

/// A `PrepareWrite`: offsets, token, and inbox for the answer.
type Writes = (Vec<u64>, u64, Arc<Inbox<Answer>>);

pub(super) struct Owner {
    pub image: Image<Container>,
    pub backing: Option<BlockingIo>,
    pub shared: Arc<SharedImage>,
    /// Released clusters, free once all I/O from before this generation has ended.
    pub freeing: Option<(u64, Vec<u64>)>,
    /// Backing image that the image has left. Workers may have channels to it.
    pub left: Option<Arc<dyn BlockDevice>>,
    /// Set if several daemons use the image in turns.
    pub turns: Option<Turns>,
    /// Requesters of [`Change::AwaitRelease`].
    pub release_waiters: Vec<Sender<io::Result<()>>>,
}

impl Owner {
    /// Serves requests until the last sender is dropped.
    pub fn run(mut self, requests: &Receiver<Request>) {
        loop {
            let first = match self.freeing {
                None => requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(_) => requests.recv_timeout(RELEASE_PAUSE),
            };
            match first {
                Ok(first) => {
                    let others = requests.try_iter().take(BATCH_MAX - 1);
                    let batch = std::iter::once(first).chain(others).collect();
                    self.serve(batch);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.free();
            self.end_turn_if_unused();
        }
        self.close_at_last();
    }

    /// Serves queued requests. Returns false when all senders are gone and the image is closed.
    #[cfg(feature = "simulated")]
    pub fn step(&mut self, requests: &Receiver<Request>) -> bool {
        use std::sync::mpsc::TryRecvError;
        match requests.try_recv() {
            Ok(first) => {
                let others = requests.try_iter().take(BATCH_MAX - 1);
                let batch = std::iter::once(first).chain(others).collect();
                self.serve(batch);
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => {
                self.close_at_last();
                return false;
            }
        }
        self.free();
        self.end_turn_if_unused();
        true
    }

    /// Closes the image without a requester: errors are only logged.
    pub(super) fn close_at_last(&mut self) {
        if let Err(error) = self.close() {
            let path = self.shared.path();
            tracing::error!(%path, "cannot close the image cleanly: {error}");
        }
    }

    fn close(&mut self) -> qcow2::Result<()> {
        if let Some((_, clusters)) = self.freeing.take() {
            self.image.free(clusters)?;
        }
        self.image.close()
    }

    /// Begins or completes freeing of released clusters.
    fn free(&mut self) {
        if let Some((generation, _)) = &self.freeing
            && self.shared.readers.are_past(*generation)
            && let Some((_, clusters)) = self.freeing.take()
            && let Err(error) = self.image.free(clusters)
        {
            let path = self.shared.path();
            tracing::warn!(
                %path,
                "leaked clusters remain in the image: {error}; hint: remove the disk, then lunette image check --repair leaks {path}"
            );
            self.follow_corruption();
        }
        if self.freeing.is_none() && self.image.has_released() {
            let generation = self.shared.readers.begin_generation();
            self.freeing = Some((generation, self.image.take_released()));
        }
    }

    fn serve(&mut self, batch: Vec<Request>) {
        let (mut writes, mut others) = (Vec::new(), Vec::new());
        for request in batch {
            match request {
                Request::Worker {
                    command: Command::PrepareWrite(offsets),
                    token,
                    inbox,
                } => writes.push((offsets, token, inbox)),
                other => others.push(other),
            }
        }
        self.prepare(writes);
        for request in others {
            match request {
                Request::Worker {
                    command,
                    token,
                    inbox,
                } => {
                    let answer = self
                        .begin_turn()
                        .and_then(|()| self.answer(&command))
                        .map_err(|error| self.failed(&command, &error));
                    self.follow_corruption();
                    inbox.put(token, answer);
                }
                Request::Control(Change::AwaitRelease(reply)) => self.release_waiters.push(reply),
                Request::Control(change) => self.change(change),
                // Logged. The worker's I/O gets the error.
                Request::Opened => drop(self.begin_turn()),
                Request::Closed => {}
            }
        }
    }

    /// Publishes a map without writable clusters for a corrupt image.
    pub(super) fn follow_corruption(&self) {
        if let Some(why) = self.image.corruption() {
            self.shared.make_read_only(why, || self.image.map());
        }
    }

    fn change(&mut self, change: Change) {
        if let Err(error) = self.begin_turn().map_err(system) {
            return change.refuse(error);
        }
        let (changed, reply) = match change {
            Change::Resize(size, reply) => (self.resize(size), reply),
            Change::BecomeReadOnly(reply) => (self.become_read_only(), reply),
            Change::CopyUp {
                offset,
                length,
                reply,
            } => {
                let copied = self.copy_up(offset, length).map_err(system);
                self.follow_corruption();
                reply.send(copied).ok();
                return;
            }
            Change::OwnPieces {
                offset,
                length,
                reply,
            } => {
                let pieces = self.own_pieces(offset, length).map_err(system);
                reply.send(pieces).ok();
                return;
            }
            Change::CloseBacking(reply) => {
                reply.send(self.close_backing()).ok();
                return;
            }
            Change::DetachBacking(reply) => (self.detach_backing().map_err(system), reply),
            // Answered at the end of the iteration.
            Change::AwaitRelease(reply) => return self.release_waiters.push(reply),
        };
        self.follow_corruption();
        // The requester may be gone.
        reply.send(changed).ok();
    }

    /// Allocates for a whole batch, with one intermediate sync.
    fn prepare(&mut self, writes: Vec<Writes>) {
        if writes.is_empty() {
            return;
        }
        let offsets: Vec<u64> = writes
            .iter()
            .flat_map(|(offsets, ..)| offsets)
            .copied()
            .collect();
        let begun = self.begin_turn();
        let backing = self
            .backing
            .as_mut()
            .map(|backing| backing as &mut dyn Backing);
        let failed = match begun {
            Ok(()) => self.image.prepare_write(&offsets, backing),
            Err(error) => return self.refuse(writes, &error),
        };
        self.follow_corruption();
        let mask = !(self.image.header().cluster_bytes() - 1);
        for (offsets, token, inbox) in writes {
            let its =
                |(failed, _): &&(u64, Error)| offsets.iter().any(|offset| offset & mask == *failed);
            let answer = match failed.iter().find(its) {
                None => Ok(Vec::new()),
                Some((_, error)) => Err(self.failed(&Command::PrepareWrite(Vec::new()), error)),
            };
            inbox.put(token, answer);
        }
    }

    fn refuse(&self, writes: Vec<Writes>, error: &Error) {
        for (_, token, inbox) in writes {
            let failed = self.failed(&Command::PrepareWrite(Vec::new()), error);
            inbox.put(token, Err(failed));
        }
    }

    fn answer(&mut self, command: &Command) -> qcow2::Result<Vec<u8>> {
        match command {
            Command::Load(offset) => self.image.load(*offset)?,
            // Handled by `prepare`, and by `begin_turn` before each command.
            Command::PrepareWrite(_) | Command::BeginTurn => {}
            Command::Zero { offset, length } => {
                let backing = self.covered();
                self.image.zero_clusters(*offset, *length, backing)?;
            }
            Command::ReadCompressed(offset) => {
                let mut content = vec![0; self.image.header().cluster_bytes() as usize];
                self.image.read_compressed(*offset, &mut content)?;
                return Ok(content);
            }
        }
        Ok(Vec::new())
    }

    /// Bytes that the backing image covers; 0 once no worker reads it.
    fn covered(&self) -> u64 {
        match self.left.is_none() && self.shared.backing.is_left() {
            true => 0,
            false => self.shared.backing.bytes(),
        }
    }

    /// Closes the image, and the descriptors that only allocations need.
    fn become_read_only(&mut self) -> io::Result<()> {
        self.close().map_err(system)?;
        match &mut self.backing {
            Some(backing) => backing.detach(),
            None => Ok(()),
        }
    }

    /// Returns the extent of the backing image at `at`; data if unknown.
    pub(super) fn below(&mut self, at: u64, end: u64) -> Extent {
        let unknown = Extent::data(end);
        let Some(backing) = &mut self.backing else {
            return unknown;
        };
        let found = backing.block_status(at, end - at);
        let first = found.ok().and_then(|extents| extents.into_iter().next());
        first.filter(|extent| extent.end <= end).unwrap_or(unknown)
    }

    fn resize(&mut self, size: u64) -> io::Result<()> {
        let backing = self
            .backing
            .as_mut()
            .map(|backing| backing as &mut dyn Backing);
        let resized = self.image.resize(size, backing);
        self.shared.map.publish(self.image.map());
        resized.map_err(system)
    }

    fn failed(&self, command: &Command, error: &Error) -> IoError {
        let path = self.shared.path();
        tracing::debug!(%path, ?command, "command of the image failed: {error}");
        if let Error::Corrupt(reason) | Error::Overlap(reason) = error
            && self.image.corruption().is_none()
        {
            self.shared.report_corruption(reason);
        }
        let errno = error.errno();
        let kind = match command {
            Command::Load(_) | Command::ReadCompressed(_) | Command::BeginTurn => {
                IoErrorKind::ReadMedium
            }
            Command::PrepareWrite(_) | Command::Zero { .. } => match errno {
                libc::ENOSPC | libc::EDQUOT => IoErrorKind::NoSpace,
                _ => IoErrorKind::WriteMedium,
            },
        };
        IoError::with_errno(kind, errno)
    }
}

fn system(error: Error) -> io::Error {
    match error {
        Error::Io { source, .. } => source,
        other => io::Error::other(other.to_string()),
    }
}
