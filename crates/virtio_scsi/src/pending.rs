//! What a request queue remembers of a request, in its slot, until it is answered; task management looks at it, too.

use std::sync::Arc;

use latency::DiskNumber;
use reactor::Tag;
use scsi::{AbortScope, PlainEnd};
use scsi_exec::{Held, Hold, Task, Ticket};

use crate::request::{self, Address, REQUEST_SIZE};

/// What a request remembers until it is answered. What a plain one needs lies together, and what only others need apart: slots
/// are so small that those of a batch lie in few pages.
#[repr(C)]
pub(crate) struct Pending {
    /// It is a plain command, or none yet: what is said of unusual ones is not so, but for its task.
    pub plain: bool,
    pub data_in: u32,
    /// Its disk, for its measurements.
    pub disk: DiskNumber,
    /// Its LUN field and its ID say which task it is, for task management.
    pub field: [u8; 8],
    pub id: u64,
    pub task: Task,
    pub unusual: Box<Unusual>,
}

// With it a slot takes four cache lines, as one of virtio-blk does.
const _: () = assert!(size_of::<Pending>() <= 64);

/// What a command that is not plain remembers besides.
#[derive(Default)]
pub(crate) struct Unusual {
    /// Task management functions that wait for this task to end.
    pub waits: Vec<Hold>,
    /// Its place among the others, if it is not SIMPLE.
    pub ticket: Option<Ticket>,
    /// Where it is, so that it can be resumed.
    pub tag: Option<Tag>,
    pub data_in_room: u32,
    /// The response code, when the command did not get as far as the core.
    pub code: u8,
    /// Set by task management: [`request::S_ABORTED`] or [`request::S_RESET`].
    pub aborted: Option<u8>,
    /// Which of its queue's waits is, or was, its last: what ends one that was ended before means nobody.
    pub wait: u64,
    /// It waits until the tasks of this scope have ended, which it aborts; that does not mean itself.
    pub aborting: Option<Arc<AbortScope>>,
    /// It has not begun, for others come before it: its header, which the driver may have changed since.
    pub parked: Option<Box<[u8; REQUEST_SIZE]>>,
    /// What it holds of its controller's memory.
    pub held: Held,
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
            unusual: Box::default(),
        }
    }
}

impl Pending {
    /// Target and number of the unit that it is for; `None`: no form of LUN that we know.
    pub fn key(&self) -> Option<(u8, u16)> {
        Address::parse(&self.field).map(|address| address.key())
    }

    /// What the task itself aborts does not mean it.
    pub fn is_what_it_aborts(&self, scope: &Arc<AbortScope>) -> bool {
        self.unusual
            .aborting
            .as_ref()
            .is_some_and(|own| Arc::ptr_eq(own, scope))
    }

    /// Marks the task as aborted; `hold` is kept until the driver has been shown its answer. What `waits` is answered now, not
    /// when its wait is over, for that may be for whoever aborts it: gives whether it does.
    pub fn abort(&mut self, code: u8, hold: &Hold, waits: bool) -> bool {
        self.unusual.aborted = Some(code);
        self.keep(hold);
        if waits {
            self.task.abandon();
        }
        waits
    }

    /// Keeps `hold` until the driver has been shown the task's answer, if it has begun.
    pub fn wait_for(&mut self, hold: &Hold) {
        if self.unusual.parked.is_none() {
            self.keep(hold);
        }
    }

    /// Keeps `hold` until the driver has been shown the task's answer.
    pub fn keep(&mut self, hold: &Hold) {
        self.plain = false;
        self.task.watch();
        self.unusual.waits.push(hold.clone());
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
        until_shown.append(&mut self.unusual.waits);
        self.unusual.ticket = None;
        (self.unusual.code, self.unusual.aborted) = (request::S_OK, None);
        (self.unusual.aborting, self.unusual.parked) = (None, None);
        self.unusual.held.give_back();
        self.plain = self.task.is_idle();
    }
}
