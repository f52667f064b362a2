//! What a request queue remembers of a request, in its slot, until it is answered; task management looks at it, too.

use latency::DiskNumber;
use reactor::Tag;
use scsi::PlainEnd;
use scsi_exec::{Hold, Task};

use crate::request::{self, Address, REQUEST_SIZE};

/// What a request remembers until it is answered. What a plain one needs lies together, and what only others need apart: slots
/// are so small that those of a batch lie in few pages.
#[repr(C)]
pub(crate) struct Pending {
    /// It is a plain command, or none yet: nothing of `slow_path` holds for it.
    pub plain: bool,
    pub data_in: u32,
    /// Its disk, for its measurements.
    pub disk: DiskNumber,
    /// Its LUN field and its ID say which task it is, for task management.
    pub field: [u8; 8],
    pub id: u64,
    pub task: Task,
    pub slow_path: Box<SlowPath>,
}

// With it a slot takes four cache lines, as one of virtio-blk does.
const _: () = assert!(size_of::<Pending>() <= 64);

/// What a command that is not plain remembers besides.
#[derive(Default)]
pub(crate) struct SlowPath {
    /// Where it is, so that it can be resumed.
    pub tag: Option<Tag>,
    pub data_in_room: u32,
    /// The response code, when the command did not get as far as the core.
    pub code: u8,
    /// Set by task management: [`request::S_ABORTED`] or [`request::S_RESET`].
    pub aborted: Option<u8>,
    /// Which of its queue's waits is, or was, its last: what ends one that was ended before means nobody.
    pub wait: u64,
    /// It has not begun, for others come before it: its header, which the driver may have changed since.
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
    /// Target and number of the unit that it is for; `None`: no form of LUN that we know.
    pub fn key(&self) -> Option<(u8, u16)> {
        Address::parse(&self.field).map(|address| address.key())
    }

    /// Marks the task as aborted; `hold` is kept until the driver has been shown its answer. What `waits` is answered now, not
    /// when its wait is over, for that may be for whoever aborts it: gives whether it does.
    pub fn abort(&mut self, code: u8, hold: &Hold, waits: bool) -> bool {
        self.slow_path.aborted = Some(code);
        self.keep(hold);
        if waits {
            self.task.abandon();
        }
        waits
    }

    /// Keeps `hold` until the driver has been shown the task's answer.
    pub fn keep(&mut self, hold: &Hold) {
        self.plain = false;
        self.task.watch();
        self.task.hold(hold);
    }

    /// It is a plain command, and begins.
    #[inline(always)]
    pub fn begin_plain(&mut self, disk: DiskNumber, end: PlainEnd, data_in: u32) {
        (self.disk, self.data_in) = (disk, data_in);
        self.task.start_plain(end);
    }

    /// It has been answered: the next request of its slot may be a plain one, if this one does not go on. What waits for it is
    /// put into `until_shown`, for the driver does not see the answer yet.
    pub fn answered(&mut self, until_shown: &mut Vec<Hold>) {
        until_shown.append(&mut self.task.end().1);
        let slow_path = &mut *self.slow_path;
        (slow_path.code, slow_path.aborted, slow_path.parked) = (request::S_OK, None, None);
        self.plain = self.task.is_idle();
    }
}
