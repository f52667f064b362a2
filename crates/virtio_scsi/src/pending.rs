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
    /// Plain command or none: `slow_path` is unused.
    pub plain: bool,
    pub data_in: u32,
    /// Disk, for measurements.
    pub disk: DiskNumber,
    /// LUN field and ID identify the task for task management.
    pub field: [u8; 8],
    pub id: u64,
    pub task: Task,
    pub slow_path: Box<SlowPath>,
}

// The size makes a slot four cache lines long, as in virtio-blk.
const _: () = assert!(size_of::<Pending>() <= 64);

/// Additional state of a command that is not plain.
#[derive(Default)]
pub(crate) struct SlowPath {
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
            plain: true,
            data_in: 0,
            disk: DiskNumber::NONE,
            field: [0; 8],
            id: 0,
            task: Task::default(),
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
        self.slow_path.aborted = Some(code);
        self.keep(hold);
        if waits {
            self.task.abandon();
        }
        waits
    }

    /// Keeps `hold` until the driver has seen the task's response.
    pub fn keep(&mut self, hold: &Hold) {
        self.plain = false;
        self.task.watch();
        self.task.hold(hold);
    }

    #[inline(always)]
    pub fn start_plain(&mut self, disk: DiskNumber, end: PlainEnd, data_in: u32) {
        (self.disk, self.data_in) = (disk, data_in);
        self.task.start_plain(end);
    }

    /// Resets the slot after the answer. A plain command may follow unless the task continues. Moves holds to `held_until_published`, because the
    /// driver does not see the response yet.
    pub fn answered(&mut self, held_until_published: &mut Vec<Hold>) {
        held_until_published.append(&mut self.task.end().1);
        let slow_path = &mut *self.slow_path;
        (slow_path.code, slow_path.aborted, slow_path.parked) = (request::S_OK, None, None);
        self.plain = self.task.is_idle();
    }
}
