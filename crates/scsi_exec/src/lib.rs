//! Carries out SCSI plans on disks: the one executor of virtio-scsi and iSCSI, between the pure core and the block devices.
//!
//! [`Units`] knows which disk a logical unit stands on; a [`Task`] takes one command's [`scsi::Plan`] through its I/Os;
//! [`execute`] does what a task needs, and is all that a transport calls; [`Runners`] carries aborts to whoever runs tasks;
//! [`TaskOrder`] keeps the order of tasks that several queues carry. Which worker, which ring and which transport is the
//! caller's business. Owned by the request's slot; a task of one I/O allocates nothing.

#![forbid(unsafe_code)]

mod background;
mod execute;
mod handles;
mod memory;
mod operation;
mod order;
mod ports;
mod runners;
mod shared_units;
mod task;
mod units;

pub use background::go_on_in_background;
pub use execute::{Data, Parts, Transport, Waiter, execute, may_start};
pub use handles::DiskHandles;
pub(crate) use memory::Held;
pub use memory::WorkMemory;
pub use operation::operation_of;
pub use order::{Admission, StartTask, TaskOrder, Ticket};
pub use runners::{
    Call, Effect, Exempt, Hold, Holding, Known, Registration, Runner, Runners, Tasks, Want,
};
pub use task::{Granted, Task};
pub use units::Units;
