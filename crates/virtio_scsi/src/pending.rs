//! State of an unanswered request in its slot. Task management reads it, too.

use latency::DiskNumber;
use reactor::Tag;
use scsi::PlainEnd;
use scsi_exec::{Hold, Task};

use crate::request::{self, Address, REQUEST_SIZE};

/// State of an unanswered request. Fields for plain commands are adjacent, all others are separate: slots are small, so that those of a
/// batch fit in few pages.
#[repr(C)]
pub(crate) struct Pending {
    pub plain: Plain,
    pub data_in: u32,
    /// Disk, for measurements.
    pub disk: DiskNumber,
    /// LUN field and ID identify the task for task management.
    pub field: [u8; 8],
    pub id: u64,
    pub slow_path: Box<SlowPath>,
}

// A slot is four cache lines long, as in virtio-blk.
const _: () = assert!(size_of::<Pending>() <= 48);

/// Stage of a request on the fast path.
#[derive(Clone, Copy, Default)]
pub(crate) enum Plain {
    /// No request: a plain command may begin. The slow path is idle.
    #[default]
    Free,
    /// I/O of a plain command in flight, with the parameters of its response.
    Io(PlainEnd),
    /// The plain command has ended with GOOD.
    Good,
    /// The request is in [`Pending::slow_path`].
    No,
}

/// State of a request that is not plain.
#[derive(Default)]
pub(crate) struct SlowPath {
    pub task: Task,
    /// Slot, to resume the command.
    pub tag: Option<Tag>,
    pub data_in_room: u32,
    /// Response code, if the command does not reach the core.
    pub code: u8,
    /// Set by task management: [`request::S_ABORTED`] or [`request::S_RESET`].
    pub aborted: Option<u8>,
    /// Number of its current or last wait. Wake-ups of other waits are ignored.
    pub wait: u64,
    /// Header of a command that waits for its turn. The driver may have changed the original.
    pub parked: Option<Box<[u8; REQUEST_SIZE]>>,
}

impl Default for Pending {
    fn default() -> Pending {
        Pending {
            plain: Plain::Free,
            data_in: 0,
            disk: DiskNumber::NONE,
            field: [0; 8],
            id: 0,
            slow_path: Box::default(),
        }
    }
}

impl Pending {
    /// Returns target and unit number, or `None` for an unsupported LUN format.
    pub fn key(&self) -> Option<(u8, u16)> {
        Address::parse(&self.field).map(|address| address.key())
    }

    /// Marks the task as aborted and keeps `hold` until the driver has seen its response. A task that `waits` is answered immediately,
    /// because it may wait for the task that aborts it: returns `waits`.
    pub fn abort(&mut self, code: u8, hold: &Hold, waits: bool) -> bool {
        self.keep(hold);
        self.slow_path.aborted = Some(code);
        if waits {
            self.slow_path.task.abandon();
        }
        waits
    }

    /// Keeps `hold` until the driver has seen the task's response.
    pub fn keep(&mut self, hold: &Hold) {
        self.leave_fast_path();
        self.slow_path.task.hold(hold);
    }

    /// Moves a plain command to the slow path.
    pub fn leave_fast_path(&mut self) {
        match std::mem::replace(&mut self.plain, Plain::No) {
            Plain::Io(end) => self.slow_path.task.take_over_plain(end),
            Plain::Good => self.slow_path.task.take_over_good(),
            Plain::Free | Plain::No => {}
        }
    }

    #[inline(always)]
    pub fn start_plain(&mut self, disk: DiskNumber, end: PlainEnd, data_in: u32) {
        (self.disk, self.data_in) = (disk, data_in);
        self.plain = Plain::Io(end);
    }

    /// Ends a plain command after the success of its I/O. Returns false for another command.
    #[inline(always)]
    #[must_use]
    pub fn end_plain(&mut self) -> bool {
        let is_plain = matches!(self.plain, Plain::Io(_));
        if is_plain {
            self.plain = Plain::Good;
        }
        is_plain
    }

    /// Takes the response of a successful plain command: GOOD, without anything more. Returns false if there is none.
    #[inline(always)]
    pub fn take_good(&mut self) -> bool {
        let is_good = matches!(self.plain, Plain::Good);
        if is_good {
            self.plain = Plain::Free;
        }
        is_good
    }

    /// Resets the slot after the answer. A plain command may follow unless the task continues. Moves holds to `held_until_published`,
    /// because the driver does not see the response yet.
    pub fn answered(&mut self, held_until_published: &mut Vec<Hold>) {
        let slow_path = &mut *self.slow_path;
        held_until_published.append(&mut slow_path.task.end().1);
        (slow_path.code, slow_path.aborted, slow_path.parked) = (request::S_OK, None, None);
        self.plain = match slow_path.task.is_idle() {
            true => Plain::Free,
            false => Plain::No,
        };
    }
}
