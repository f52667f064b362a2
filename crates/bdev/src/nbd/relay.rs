//! One connection for all workers: a thread executes their I/O with its own channel. Used if the server does not announce that several
//! connections see each other's writes and flushes.
//!
//! Data is copied once, to and from memory that travels between the threads.

use std::io;
use std::sync::{Arc, mpsc};

use block::{IoError, IoErrorKind, IoKind, IoOutcome, IoRequest};
use guest_memory::{IoBuffer, Mapping};
use uring::{Completion, Event, Owner, Ring, Wait};

use super::Export;
use super::channel::NbdChannel;
use crate::admit::Limits;
use crate::inbox::Inbox;
use crate::slots::Slots;
use crate::watched_inbox::WatchedInbox;
use crate::{Attach, Finished, IoChannel, Submission, Tag};

const RING_ENTRIES: u32 = 64;
/// Owner of the watch on commands; those of the channel follow.
const COMMANDS: Owner = Owner(0);
/// Minimum length of memory for data, in bytes.
const MEMORY_BYTES_MIN: usize = 16 << 10;
/// Memory that a channel retains for later I/O, in bytes.
const RETAINED_BYTES_MAX: usize = 16 << 20;

/// Ends of I/O, with the numbers of the worker's slots.
type Replies = Inbox<IoOutcome>;

/// Request of a worker. Its token is the number of the worker's slot.
enum Command {
    Submit {
        io: IoRequest,
        memory: Option<Arc<Mapping>>,
        replies: Arc<Replies>,
    },
    Abort(Arc<Replies>),
    /// Ends the thread.
    Stop,
}

/// The thread. It ends when this is dropped.
pub(super) struct Relay {
    export: Arc<Export>,
    commands: Arc<Inbox<Command>>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.commands.put(0, Command::Stop);
    }
}

impl Relay {
    pub fn start(export: Arc<Export>) -> io::Result<Arc<Relay>> {
        let commands = Arc::new(Inbox::new(Event::new()?));
        let relay = Arc::new(Relay {
            export: Arc::clone(&export),
            commands: Arc::clone(&commands),
        });
        let (started, has_started) = mpsc::channel();
        let thread = std::thread::Builder::new().name("nbd-relay".to_owned());
        thread.spawn(move || match Server::new(export, commands) {
            Ok(server) => {
                started.send(Ok(())).ok();
                server.run();
            }
            Err(error) => drop(started.send(Err(error))),
        })?;
        let ended = || io::Error::other("the thread has ended");
        has_started.recv().map_err(|_| ended())??;
        Ok(relay)
    }

    pub fn attach(self: &Arc<Relay>, attach: &mut Attach<'_>) -> io::Result<RelayChannel> {
        let owner = attach.owner();
        let replies = WatchedInbox::new(attach.ring(), owner, 0)?;
        let core = &self.export.core;
        Ok(RelayChannel {
            limits: Limits::of(&core.info, &core.capacity),
            relay: Arc::clone(self),
            replies,
            slots: Slots::default(),
            memory: Vec::new(),
            retained: 0,
        })
    }
}

/// An I/O of a worker in flight on the thread.
struct Pending {
    replies: Arc<Replies>,
    token: u64,
}

/// State of the thread.
struct Server {
    ring: Ring,
    channel: NbdChannel,
    commands: WatchedInbox<Command>,
    pending: Slots<Option<Pending>>,
}

impl Server {
    fn new(export: Arc<Export>, commands: Arc<Inbox<Command>>) -> io::Result<Server> {
        let mut ring = Ring::new(RING_ENTRIES)?;
        let commands = WatchedInbox::of(commands, &mut ring, COMMANDS, 0)?;
        let mut next = COMMANDS.0;
        let mut next_owner = || {
            next += 1;
            Owner(next)
        };
        let channel = NbdChannel::new(export, &mut Attach::new(&mut ring, &mut next_owner))?;
        sandbox::confine(sandbox::Thread::Device)?;
        Ok(Server {
            ring,
            channel,
            commands,
            pending: Slots::default(),
        })
    }

    fn run(mut self) {
        let (mut completions, mut finished) = (Vec::new(), Vec::new());
        let mut is_stopping = false;
        while !is_stopping || !self.channel.is_closed() {
            if let Err(error) = self.ring.enter(Wait::Until(None), &mut completions) {
                return tracing::error!("cannot wait for I/O of an NBD disk: {error}");
            }
            for completion in completions.drain(..) {
                if completion.owner != COMMANDS {
                    self.channel
                        .complete(&mut self.ring, completion, &mut finished);
                    continue;
                }
                let mut received = self.commands.take(&mut self.ring, completion.more);
                for (token, command) in received.drain(..) {
                    is_stopping |= self.execute(token, command);
                }
                self.commands.reuse(received);
            }
            for one in finished.drain(..) {
                self.reply(one.tag, one.outcome);
            }
        }
    }

    /// Executes a command. Returns true if the thread must end.
    fn execute(&mut self, token: u64, command: Command) -> bool {
        match command {
            Command::Submit {
                io,
                memory,
                replies,
            } => {
                let length = io.buffer_length() as usize;
                let mut buffer = match &memory {
                    Some(memory) => IoBuffer::of_mapping(memory, 0, length),
                    None => IoBuffer::default(),
                };
                let tag = Tag(self.pending.occupy(Some(Pending { replies, token })).into());
                let submitted = self.channel.submit(&mut self.ring, &io, &mut buffer, tag);
                if let Submission::Done(outcome) = submitted {
                    self.reply(tag, outcome);
                }
            }
            Command::Abort(replies) => {
                let is_it = |one: &Option<Pending>| {
                    let one = one.as_ref();
                    one.is_some_and(|one| one.token == token && Arc::ptr_eq(&one.replies, &replies))
                };
                if let Some(index) = self.pending.find(is_it) {
                    self.channel.abort(&mut self.ring, Tag(index.into()));
                }
            }
            Command::Stop => {
                self.channel.close(&mut self.ring);
                return true;
            }
        }
        false
    }

    fn reply(&mut self, tag: Tag, outcome: IoOutcome) {
        let index = tag.0 as u32;
        if let Some(pending) = self.pending[index].take() {
            self.pending.release(index);
            pending.replies.put(pending.token, outcome);
        }
    }
}

struct RelaySlot {
    tag: Tag,
    io: IoRequest,
    buffer: IoBuffer,
    memory: Option<Arc<Mapping>>,
}

/// A worker's handle on the thread.
pub(super) struct RelayChannel {
    relay: Arc<Relay>,
    limits: Limits,
    replies: WatchedInbox<IoOutcome>,
    slots: Slots<RelaySlot>,
    /// Reusable memory, and its length in bytes.
    memory: Vec<Arc<Mapping>>,
    retained: usize,
}

impl RelayChannel {
    /// Returns memory of at least this length.
    fn take_memory(&mut self, length: usize) -> io::Result<Arc<Mapping>> {
        match self.memory.iter().rposition(|one| one.len() >= length) {
            Some(at) => {
                let memory = self.memory.swap_remove(at);
                self.retained -= memory.len();
                Ok(memory)
            }
            None => Mapping::anonymous(length.next_power_of_two().max(MEMORY_BYTES_MIN)),
        }
    }

    fn retain_memory(&mut self, memory: Arc<Mapping>) {
        if self.retained + memory.len() <= RETAINED_BYTES_MAX {
            self.retained += memory.len();
            self.memory.push(memory);
        }
    }
}

impl IoChannel for RelayChannel {
    fn submit(
        &mut self,
        _ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if let Some(outcome) = self.limits.begin(io, buffer) {
            return Submission::Done(outcome);
        }
        let memory = match io.buffer_length() {
            0 => None,
            length => match self.take_memory(length as usize) {
                Ok(memory) => Some(memory),
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(libc::ENOMEM);
                    let class = match io.modifies() {
                        true => IoErrorKind::WriteMedium,
                        false => IoErrorKind::ReadMedium,
                    };
                    return Submission::Done(Err(IoError::with_errno(class, errno)));
                }
            },
        };
        if let (IoKind::Write, Some(memory)) = (io.kind, &memory) {
            buffer.drain_to(memory, 0);
        }
        let index = self.slots.occupy(RelaySlot {
            tag,
            io: *io,
            buffer: std::mem::take(buffer),
            memory: memory.clone(),
        });
        let replies = Arc::clone(self.replies.inbox());
        let command = Command::Submit {
            io: *io,
            memory,
            replies,
        };
        self.relay.commands.put(index.into(), command);
        Submission::Pending
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        let mut ended = self.replies.take(ring, completion.more);
        for (token, outcome) in ended.drain(..) {
            let index = token as u32;
            let slot = &mut self.slots[index];
            let memory = slot.memory.take();
            let has_data = matches!(slot.io.kind, IoKind::Read | IoKind::BlockStatus);
            if let (true, true, Some(memory)) = (has_data, outcome.is_ok(), &memory) {
                slot.buffer.fill_from(memory, 0);
            }
            finished.push(Finished {
                tag: slot.tag,
                buffer: std::mem::take(&mut slot.buffer),
                outcome,
            });
            self.slots.release(index);
            if let Some(memory) = memory {
                self.retain_memory(memory);
            }
        }
        self.replies.reuse(ended);
    }

    fn abort(&mut self, _ring: &mut Ring, tag: Tag) {
        if let Some(index) = self.slots.find(|slot| slot.tag == tag) {
            let abort = Command::Abort(Arc::clone(self.replies.inbox()));
            self.relay.commands.put(index.into(), abort);
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        self.replies.close(ring);
    }

    fn in_flight(&self) -> usize {
        self.slots.len()
    }
}
