//! Carries out SCSI plans on disks: what virtio-scsi and iSCSI share between the pure core and the backends.
//!
//! [`Units`] knows which disk a logical unit stands on; a [`Task`] takes one command's [`scsi::Plan`] through its I/Os;
//! [`execute`] does what all transports do between these; [`Runners`] carries aborts to whoever runs tasks; [`TaskOrder`] keeps the order of tasks that several queues carry.
//! Which worker, which ring and which transport is the caller's business. Owned by the request's slot; a task
//! of one I/O allocates nothing.

#![forbid(unsafe_code)]

mod background;
mod execute;
mod handles;
mod memory;
mod operation;
mod order;
mod ports;
mod runners;
mod task;
mod units;

pub use background::go_on_in_background;
pub use execute::{DataIn, DataOut, Granted, Next, Parts, Transport, Waiter, execute, take_turn};
pub use handles::DiskHandles;
pub use memory::{Held, WorkMemory, end_for_want_of_memory};
pub use operation::operation_of;
pub use order::{Admission, StartTask, TaskOrder, Ticket};
pub use runners::{Call, Hold, Holding, Registration, Runner, Runners, Spared, Want};
pub use task::{Task, TaskStep};
pub use units::Units;
