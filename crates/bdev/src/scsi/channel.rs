//! I/O of one worker on a SCSI logical unit. The unit's thread executes commands; an event on the worker's ring signals their ends.
//!
//! An I/O above the unit's maximum transfer is executed in consecutive steps. Data is copied once, to and from memory that travels with the
//! command.

use std::io;
use std::sync::Arc;

use block::{IoError, IoErrorKind, IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use iscsi_initiator::{CommandSink, Ended};
use uring::{Completion, Ring};

use super::ServedUnit;
use super::commands::{self, answer_command, is_unknown_command, outcome};
use crate::admit::Limits;
use crate::inbox::Inbox;
use crate::slots::Slots;
use crate::watched_inbox::WatchedInbox;
use crate::{Attach, Finished, IoChannel, Submission, Tag};

struct UnitSlot {
    tag: Tag,
    io: IoRequest,
    buffer: IoBuffer,
    /// Bytes done, from the start of the I/O.
    done: u64,
    /// Bytes of the step in progress.
    step: u64,
    /// All commands of the I/O were sent with FUA.
    has_fua: bool,
    /// The final flush of a durable write is in progress.
    is_flushing: bool,
}

impl CommandSink for Inbox<Ended> {
    fn ended(&self, token: u64, ended: Ended) {
        self.put(token, ended);
    }
}

pub(super) struct ScsiChannel {
    shared: Arc<ServedUnit>,
    limits: Limits,
    inbox: WatchedInbox<Ended>,
    slots: Slots<UnitSlot>,
}

impl ScsiChannel {
    pub fn new(shared: Arc<ServedUnit>, attach: &mut Attach<'_>) -> io::Result<ScsiChannel> {
        let owner = attach.owner();
        let inbox = WatchedInbox::new(attach.ring(), owner, 0)?;
        Ok(ScsiChannel {
            limits: Limits::of(&shared.info, &shared.capacity),
            shared,
            inbox,
            slots: Slots::default(),
        })
    }

    fn sink(&self) -> Arc<dyn CommandSink> {
        Arc::clone(self.inbox.inbox()) as Arc<dyn CommandSink>
    }

    /// Submits the next step of an I/O to the unit.
    fn start(&mut self, index: u32) {
        let sink = self.sink();
        let slot = &mut self.slots[index];
        let step = match slot.io.kind {
            _ if slot.is_flushing => self.shared.profile.flush(),
            IoKind::ScsiCommand => commands::passed_through(&slot.io, &slot.buffer),
            _ => {
                let by_writing = self.shared.zeroes_by_writing();
                let buffer = &slot.buffer;
                let read_out = |offset: u64, bytes: u64| {
                    let mut out = vec![0; bytes as usize];
                    buffer.read_at(offset as usize, &mut out);
                    out
                };
                self.shared
                    .profile
                    .step(&slot.io, slot.done, by_writing, read_out)
            }
        };
        (slot.step, slot.has_fua) = (step.bytes, slot.has_fua && step.has_fua);
        self.shared
            .unit()
            .submit(step.command, sink, u64::from(index));
    }

    /// Handles the end of a step; `None` if the next one was started.
    fn step_ended(&mut self, index: u32, ended: Ended) -> Option<IoOutcome> {
        let slot = &mut self.slots[index];
        let io = slot.io;
        let done = match ended {
            Ended::Done(done) => done,
            Ended::Cancelled => return Some(Err(IoErrorKind::Cancelled.into())),
            Ended::Lost => return Some(Err(self.lost(&io))),
        };
        if io.kind == IoKind::ScsiCommand {
            return Some(answer_command(&slot.buffer, done));
        }
        if is_unknown_command(&done) {
            let flushes = slot.is_flushing || io.kind == IoKind::Flush;
            match io.kind {
                _ if flushes && self.shared.profile.is_flush_needless() => return Some(Ok(())),
                _ if flushes => return Some(Err(IoErrorKind::WriteMedium.into())),
                IoKind::WriteZeroes if !self.shared.zeroes_by_writing() => {
                    self.shared.write_zeroes_from_now_on();
                    self.start(index);
                    return None;
                }
                // The unit does not report holes.
                IoKind::BlockStatus => {
                    let status = self.shared.profile.block_status(&io, &[], 0);
                    slot.buffer.write_at(0, &status);
                    return Some(Ok(()));
                }
                _ => {}
            }
        }
        if let Err(error) = outcome(&io, slot.step, &done) {
            return Some(Err(error));
        }
        match io.kind {
            IoKind::Read => slot.buffer.write_at(slot.done as usize, &done.data),
            IoKind::BlockStatus => {
                let blocks = self.limits.units();
                let status = self.shared.profile.block_status(&io, &done.data, blocks);
                slot.buffer.write_at(0, &status);
            }
            _ => {}
        }
        if slot.is_flushing {
            return Some(Ok(()));
        }
        slot.done += slot.step;
        if slot.done >= io.length {
            if !self.shared.profile.flushes_after(&io, slot.has_fua) {
                return Some(Ok(()));
            }
            slot.is_flushing = true;
        }
        self.start(index);
        None
    }

    fn takes_command(&self, io: &IoRequest, buffer: &IoBuffer) -> bool {
        self.shared.info.passthrough.is_some()
            && buffer.len() as u64 == io.length
            && commands::command_in(io, buffer).is_some()
    }

    #[cold]
    fn lost(&self, io: &IoRequest) -> IoError {
        match io.kind {
            // It is unknown whether the unit has executed the command.
            IoKind::CompareAndWrite => IoErrorKind::WriteMedium.into(),
            // A SCSI command must not be repeated automatically, unlike other I/O that waits for a disk.
            IoKind::ScsiCommand => IoErrorKind::Cancelled.into(),
            _ => IoErrorKind::Offline.into(),
        }
    }
}

impl IoChannel for ScsiChannel {
    fn submit(
        &mut self,
        _ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if io.kind == IoKind::ScsiCommand {
            if !self.takes_command(io, buffer) {
                return Submission::Done(Err(IoErrorKind::Unsupported.into()));
            }
        } else if let Some(outcome) = self.limits.begin(io, buffer) {
            return Submission::Done(outcome);
        }
        let index = self.slots.occupy(UnitSlot {
            tag,
            io: *io,
            buffer: std::mem::take(buffer),
            done: 0,
            step: 0,
            has_fua: true,
            is_flushing: false,
        });
        self.start(index);
        Submission::Pending
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        let mut ended = self.inbox.take(ring, completion.more);
        for (token, how) in ended.drain(..) {
            let index = token as u32;
            if let Some(outcome) = self.step_ended(index, how) {
                let slot = &mut self.slots[index];
                finished.push(Finished {
                    tag: slot.tag,
                    buffer: std::mem::take(&mut slot.buffer),
                    outcome,
                });
                self.slots.release(index);
            }
        }
        self.inbox.reuse(ended);
    }

    fn abort(&mut self, _ring: &mut Ring, tag: Tag) {
        if let Some(index) = self.slots.find(|slot| slot.tag == tag) {
            self.shared.unit().abort(&self.sink(), index.into());
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        self.inbox.close(ring);
    }

    fn in_flight(&self) -> usize {
        self.slots.len()
    }
}
