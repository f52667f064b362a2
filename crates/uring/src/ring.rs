//! The ring: operations in, completions out.
//!
//! Owned by one worker thread. Queueing an operation never blocks, but a full submission queue is submitted immediately; entries
//! that the kernel does not accept wait in a backlog. An operation's buffer, segment array, time and descriptor stay in its slot
//! (`slab`) until its last completion was read.

mod operations;
mod sockets;

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use guest_memory::IoBuffer;
use io_uring::squeue::Entry;
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode};

use crate::fd::{Registry, RingFd};
use crate::kernel::Kernel;
use crate::memory::Memory;
use crate::ramp::Ramp;
use crate::slab::{Slab, Use};
use crate::{Completion, Owner, setup};

pub use sockets::Receive;

/// Wait mode of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Submits queued operations and collects completions without waiting.
    No,
    /// Waits for a completion for at most this long. `None`: without limit.
    Until(Option<Duration>),
}

/// Identifies a watch for [`Ring::unwatch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchId {
    slot: u32,
    generation: u32,
}

/// One worker's io_uring.
pub struct Ring {
    pub(crate) io: Kernel,
    pub(crate) slab: Slab,
    /// Entries without space in the submission queue.
    backlog: VecDeque<Entry>,
    /// Watches to arm again or to end after reading the completion queue.
    again: Vec<(u32, Again)>,
    /// Slots and generations of sends that complete silently when all bytes are sent at once.
    quiet: Vec<(u32, u32)>,
    can_be_quiet: bool,
    knows_poll_first: bool,
    /// Flags of enter calls that wait.
    waiting: u32,
    pub(crate) watches: usize,
    ramp: Ramp,
    registry: Registry,
    memory: Memory,
    closing: bool,
    iterations: u64,
}

/// Action for a watch after an event.
enum Again {
    /// The kernel has ended the watch, which must be armed again.
    Arm,
    /// No further events are expected, but the kernel's poll is still active.
    End,
}

/// `user_data` of operations with an ignored completion.
const NOBODY: u64 = u64::MAX;

/// Maximum bytes per read or write (Linux: `MAX_RW_COUNT`).
const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;

/// Time that a dropped ring waits for operations that cannot be cancelled, in seconds, before it leaks their buffers.
const CLOSE_SECONDS_MAX: u64 = 10;

impl Ring {
    /// Creates a ring that submits up to `entries` operations per system call. More can be in flight. Call on the thread that uses
    /// the ring.
    ///
    /// # Errors
    /// When io_uring is missing, forbidden or too old; the message contains a hint.
    pub fn new(entries: u32) -> io::Result<Ring> {
        Ok(Ring::from_io_uring(setup::build(entries)?))
    }

    /// Creates a ring without a kernel. Time is `now`; the order of completions follows from the seed. Supports operations on files
    /// and sockets, timers, [events](Ring::event) and cancelling; other operations panic.
    #[cfg(feature = "simulated")]
    pub fn simulated(seed: u64, now: impl Fn() -> Duration + 'static) -> Ring {
        let simulated = crate::simulated::Simulated::new(seed, now);
        Ring::with(Kernel::Simulated(simulated), false, false, 0)
    }

    fn from_io_uring(io: IoUring) -> Ring {
        let can_be_quiet = io.params().is_feature_skip_cqe_on_success();
        // Linux 6.0, which includes poll first.
        let knows_poll_first = io.params().is_setup_single_issuer();
        let waiting = setup::flags_of_waiting(&io);
        Ring::with(Kernel::Real(io), can_be_quiet, knows_poll_first, waiting)
    }

    fn with(io: Kernel, can_be_quiet: bool, knows_poll_first: bool, waiting: u32) -> Ring {
        Ring {
            can_be_quiet,
            knows_poll_first,
            waiting,
            io,
            slab: Slab::default(),
            backlog: VecDeque::new(),
            again: Vec::new(),
            quiet: Vec::new(),
            watches: 0,
            ramp: Ramp::default(),
            registry: Registry::default(),
            memory: Memory::default(),
            closing: false,
            iterations: 0,
        }
    }

    /// Number of iterations with work. A blocking operation continues in a later iteration.
    pub fn iterations(&self) -> u64 {
        self.iterations
    }

    /// Operations without a completion so far, excluding watches.
    pub fn in_flight(&self) -> usize {
        self.slab.used() - self.watches
    }

    /// Number of watches, including ended ones that the kernel has not released.
    pub fn watches(&self) -> usize {
        self.watches
    }

    /// Registers the descriptor with this ring, if the table has space, to make its operations cheaper. A registered descriptor
    /// panics on another ring.
    #[must_use]
    pub fn register(&mut self, fd: impl Into<RingFd>) -> RingFd {
        #[cfg(feature = "simulated")]
        if matches!(self.io, Kernel::Simulated(_)) {
            return fd.into();
        }
        self.registry.register(&self.io.submitter(), fd.into())
    }

    /// Registers the buffer's memory if it is owned and used often. Call before direct I/O, which then costs less. Success or
    /// failure has no other effect.
    #[inline]
    pub fn adopt(&mut self, buffer: &IoBuffer) {
        #[cfg(feature = "simulated")]
        if matches!(self.io, Kernel::Simulated(_)) {
            return;
        }
        self.memory.adopt(&self.io.submitter(), buffer);
    }

    /// Number of buffers with registered memory.
    pub fn adopted(&self) -> usize {
        self.memory.count()
    }

    /// Watches a descriptor for input until [`Ring::unwatch`]. A completion follows each time that input arrives, and at once if
    /// input is available. An eventfd need not be read between notifications; writes in quick succession may share a completion. A
    /// watch that the kernel ends is armed again. A completion without `more` is an error or a hang-up, and the last.
    pub fn watch(&mut self, owner: Owner, token: u64, fd: impl Into<RingFd>) -> WatchId {
        let fd = fd.into();
        let slot = self.occupy(owner, token, Use::Watch, Some(&fd), IoBuffer::default());
        self.watches += 1;
        self.arm(slot);
        self.watch_id(slot)
    }

    pub(crate) fn watch_id(&mut self, slot: u32) -> WatchId {
        WatchId {
            slot,
            generation: self.slab.slot(slot).generation,
        }
    }

    fn arm(&mut self, slot: u32) {
        let Some(fd) = self.slab.slot(slot).fd.clone() else {
            return;
        };
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            return kernel.begin(slot, crate::simulated::Work::Readable);
        }
        let entry = opcode::PollAdd::new(fd.number(), libc::POLLIN as u32)
            .multi(true)
            .build();
        self.push_for(&fd, slot, entry);
    }

    /// Ends a watch. No completion follows. Has no effect on a watch that has already ended.
    pub fn unwatch(&mut self, id: WatchId) {
        let slot = self.slab.slot(id.slot);
        if slot.generation == id.generation && slot.used == Use::Watch {
            self.silence(id.slot);
        }
    }

    fn silence(&mut self, slot: u32) {
        let used = &mut self.slab.slot(slot).used;
        if *used == Use::Watch {
            *used = Use::Silenced;
            self.cancel_slot(slot);
        }
    }

    /// Entries stay in order, so this one cannot cancel a later user of the slot.
    fn cancel_slot(&mut self, slot: u32) {
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            return kernel.cancel(slot);
        }
        // Not PollRemove, which fails while an event of the poll is being processed.
        let entry = opcode::AsyncCancel::new(slot.into()).build();
        self.push(entry.user_data(NOBODY));
    }

    /// Cancels operations with this owner and token. They complete with `ECANCELED`, or normally if it is too late. Scans all
    /// operations in flight: not for the request path.
    pub fn cancel(&mut self, owner: Owner, token: u64) {
        let named: Vec<u32> = self.slab.in_use_by(owner, Some(token)).collect();
        for slot in named {
            self.cancel_slot(slot);
        }
    }

    /// Returns true if no operation of an owner will deliver a completion. Scans all operations in flight.
    pub fn is_done_with(&self, owner: Owner) -> bool {
        self.slab.in_use_by(owner, None).next().is_none()
    }

    /// Submits all queued operations and appends completions to `out`. Uses at most one system call in the common case, a few for
    /// many reads or writes on an idle device, and none if there is nothing to submit, wait for or process. May return early
    /// without completions after a signal or when the kernel is short of memory.
    ///
    /// # Errors
    /// When the kernel refuses all work on the ring; the ring is then unusable.
    #[inline]
    pub fn enter(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            self.watches -= kernel.run(&mut self.slab, self.closing, out);
            return Ok(());
        }
        if matches!(wait, Wait::No) && self.has_nothing() {
            return Ok(());
        }
        self.work(wait, out)
    }

    /// Returns true if neither side has work: the common case in polling iterations.
    #[inline]
    fn has_nothing(&mut self) -> bool {
        let swept = !self.registry.has_dropped() && !self.memory.has_vacated();
        if !swept || !self.backlog.is_empty() || !self.io.completion().is_empty() {
            return false;
        }
        let queue = self.io.submission();
        queue.is_empty() && !queue.taskrun() && !queue.cq_overflow()
    }

    fn work(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        self.iterations += 1;
        let before = out.len();
        if self.registry.has_dropped() {
            self.registry.sweep(&self.io.submitter());
        }
        if self.memory.has_vacated() {
            self.memory.sweep(&self.io.submitter());
        }
        self.reap(out);
        let mut queued = self.queue_backlog();
        // An awaited operation may be in the backlog, so the backlog is submitted first as far as possible.
        while !self.backlog.is_empty() {
            self.enter_kernel(queued, None)?;
            self.reap(out);
            let left = self.queue_backlog();
            if left >= queued {
                return Ok(());
            }
            queued = left;
        }
        let want = match wait {
            Wait::Until(timeout) if out.len() == before => Some(timeout),
            _ => None,
        };
        while let Some(part) = self.ramp.part() {
            self.hand_over(part)?;
            let left = self.queued();
            let taken = left < queued;
            queued = left;
            // Operations that complete without a wait use no device that must be kept busy.
            if !taken || !self.io.completion().is_empty() {
                break;
            }
        }
        if queued > 0 || want.is_some() || self.kernel_has_work() {
            self.enter_kernel(queued, want)?;
            let all_told = !self.io.submission().cq_overflow();
            self.reap(out);
            if all_told {
                self.end_quiet(out);
            }
        }
        Ok(())
    }

    fn queued(&mut self) -> usize {
        self.io.submission().len()
    }

    /// Deferred completions, or completions that did not fit into the completion queue.
    fn kernel_has_work(&mut self) -> bool {
        let queue = self.io.submission();
        queue.taskrun() || queue.cq_overflow()
    }

    fn enter_kernel(&mut self, submit: usize, wait: Option<Option<Duration>>) -> io::Result<()> {
        let submitter = self.io.submitter();
        let submit = submit as u32;
        let get = EnterFlags::GETEVENTS.bits();
        let entered = match wait {
            // SAFETY: no argument is passed; entries' memory lives in their slots.
            None => unsafe { submitter.enter::<libc::sigset_t>(submit, 0, get, None) },
            // SAFETY: as above.
            Some(None) => unsafe {
                submitter.enter::<libc::sigset_t>(submit, 1, get | self.waiting, None)
            },
            Some(Some(timeout)) => {
                let time = Timespec::from(timeout);
                let args = SubmitArgs::new().timespec(&time);
                let flags = get | self.waiting | EnterFlags::EXT_ARG.bits();
                // SAFETY: EXT_ARG announces exactly this type, and the time outlives the call.
                unsafe { submitter.enter(submit, 1, flags, Some(&args)) }
            }
        };
        self.entered(entered)
    }

    /// Submits the first entries without processing completions.
    fn hand_over(&mut self, entries: usize) -> io::Result<()> {
        let submitter = self.io.submitter();
        // SAFETY: no argument is passed; entries' memory lives in their slots.
        let entered = unsafe { submitter.enter::<libc::sigset_t>(entries as u32, 0, 0, None) };
        self.entered(entered)
    }

    fn entered(&mut self, entered: io::Result<usize>) -> io::Result<()> {
        let left = self.queued();
        self.ramp.entered(left);
        match entered.map_err(|e| (e.raw_os_error().unwrap_or(0), e)) {
            Ok(_) => Ok(()),
            // Timeout; signal; completions must be read first; no memory at present.
            Err((libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN, _)) => Ok(()),
            Err((_, error)) => Err(error),
        }
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        for event in self.io.completion() {
            if event.user_data() == NOBODY {
                continue;
            }
            let index = event.user_data() as u32;
            let slot = self.slab.slot(index);
            let more = cqueue::more(event.flags());
            let mut completion = Completion {
                owner: slot.owner,
                token: slot.token,
                result: match event.result() {
                    errno if errno < 0 => Err(-errno),
                    value => Ok(value as u32),
                },
                buffer: None,
                message: None,
                more: false,
            };
            let used = slot.used;
            if used == Use::Free {
                // A slot that is freed twice would be given to two operations.
                tracing::error!("io_uring completed an unknown operation, slot={index}");
                continue;
            }
            match used {
                Use::Watch => {
                    completion.more = !self.closing && must_rearm(completion.result);
                    match (more, completion.more) {
                        (false, true) => self.again.push((index, Again::Arm)),
                        (true, false) => self.again.push((index, Again::End)),
                        (true, true) | (false, false) => {}
                    }
                }
                Use::Buffered => completion.buffer = Some(std::mem::take(&mut slot.buffer)),
                Use::Transfer => {
                    self.ramp.reap();
                    completion.buffer = Some(std::mem::take(&mut slot.buffer));
                }
                Use::Message | Use::Quiet => completion.message = slot.message.take(),
                Use::Plain | Use::Silenced | Use::Free => {}
            }
            if !more && !completion.more {
                self.watches -= usize::from(matches!(used, Use::Watch | Use::Silenced));
                self.slab.release(index);
            }
            if used != Use::Silenced {
                out.push(completion);
            }
        }
        while let Some((index, again)) = self.again.pop() {
            match again {
                Again::Arm => self.arm(index),
                Again::End => self.silence(index),
            }
        }
    }

    pub(crate) fn occupy(
        &mut self,
        owner: Owner,
        token: u64,
        used: Use,
        fd: Option<&RingFd>,
        buffer: IoBuffer,
    ) -> u32 {
        assert!(
            fd.is_none_or(|fd| !fd.is_foreign(&self.registry)),
            "descriptor is registered with another ring"
        );
        let index = self.slab.take();
        let slot = self.slab.slot(index);
        slot.used = used;
        slot.owner = owner;
        slot.token = token;
        slot.fd = fd.cloned();
        slot.buffer = buffer;
        index
    }

    fn push_for(&mut self, fd: &RingFd, slot: u32, entry: Entry) {
        self.push(fd.mark(entry).user_data(slot.into()));
    }

    fn push(&mut self, entry: Entry) {
        if !self.backlog.is_empty() || !self.try_push(&entry) {
            self.backlog.push_back(entry);
            self.make_room();
        }
    }

    fn try_push(&mut self, entry: &Entry) -> bool {
        // SAFETY: the data that the entry points to (segments, message, their memory, the time) and its descriptor are in the slot
        // that its `user_data` identifies; the slot neither moves nor is reused before the last completion of this entry, and on
        // drop it is leaked if that completion has not arrived.
        unsafe { self.io.submission().push(entry).is_ok() }
    }

    #[cold]
    fn make_room(&mut self) {
        let queued = self.queued();
        // A permanent error occurs again in the next iteration, which reports it; the entries stay queued.
        if self.enter_kernel(queued, None).is_ok() {
            self.queue_backlog();
        }
    }

    /// Moves the backlog into the submission queue as far as possible. Returns the number of queued entries.
    fn queue_backlog(&mut self) -> usize {
        while let Some(entry) = self.backlog.pop_front() {
            if !self.try_push(&entry) {
                self.backlog.push_front(entry);
                break;
            }
        }
        self.queued()
    }
}

/// Returns true if a watch that the kernel ended must be armed again: it has no error or hang-up.
fn must_rearm(result: Result<u32, i32>) -> bool {
    let over = (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) as u32;
    result.is_ok_and(|events| events & over == 0)
}

fn transfer_length(length: usize) -> u32 {
    length.min(TRANSFER_BYTES_MAX) as u32
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.closing = true;
        let in_use: Vec<u32> = self.slab.in_use().collect();
        for slot in in_use {
            self.cancel_slot(slot);
        }
        let deadline = Instant::now() + Duration::from_secs(CLOSE_SECONDS_MAX);
        let mut completed = Vec::new();
        while self.slab.used() > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            let entered = self.enter(Wait::Until(Some(left)), &mut completed);
            completed.clear();
            if entered.is_err() || left.is_zero() {
                // The kernel may still write to these buffers, so they are leaked.
                std::mem::forget(std::mem::take(&mut self.slab));
            }
        }
        #[cfg(feature = "simulated")]
        if matches!(self.io, Kernel::Simulated(_)) {
            return;
        }
        self.registry.close(&self.io.submitter());
        self.memory.close(&self.io.submitter());
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("in_flight", &self.in_flight())
            .field("watches", &self.watches)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completion_for_a_free_slot_frees_nothing() {
        let mut ring = Ring::new(4).unwrap();
        let slot = ring.slab.take();
        ring.slab.release(slot);
        ring.push(opcode::Nop::new().build().user_data(slot.into()));
        let mut out = Vec::new();
        ring.enter(Wait::Until(Some(Duration::from_secs(20))), &mut out)
            .unwrap();
        assert!(out.is_empty(), "{out:?}");
        assert_eq!(ring.slab.used(), 0);
        assert_ne!(ring.slab.take(), ring.slab.take());
        // These two slots have no operation in flight. Dropping the ring would wait for their completions, so the slab is replaced.
        ring.slab = Slab::default();
    }

    /// Tests the flags of older kernels, which newer kernels do not use otherwise.
    #[test]
    fn every_level_of_flags_moves_data_watches_and_closes() {
        for level in 0..setup::LEVELS {
            let mut ring = Ring::from_io_uring(setup::build_level(4, level).unwrap());
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            let (reader, writer) = (RingFd::from(reader), RingFd::from(writer));
            ring.watch(Owner(1), 1, &reader);
            let buffer = IoBuffer::owned(4);
            buffer.write_at(0, b"moon");
            ring.write(Owner(2), 2, &writer, 0, buffer, false);
            let mut out = Vec::new();
            while out.len() < 2 {
                let wait = Wait::Until(Some(Duration::from_secs(20)));
                ring.enter(wait, &mut out).unwrap();
            }
            assert!(out.iter().any(|c| c.owner == Owner(1) && c.more));
            assert!(out.iter().any(|c| c.owner == Owner(2) && c.result == Ok(4)));
            for token in 0..10 {
                ring.read(Owner(3), token, &writer, 0, IoBuffer::owned(4));
                ring.read(Owner(3), token, &reader, 0, IoBuffer::owned(1));
            }
            ring.enter(Wait::No, &mut out).unwrap();
        }
    }
}
