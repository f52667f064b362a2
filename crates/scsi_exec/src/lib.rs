//! Executes SCSI plans on disks for virtio-scsi and iSCSI: the layer between the pure core and the block devices.
//!
//! [`Units`] maps logical units to disks. A [`Task`] takes one command's [`scsi::Plan`] through its I/Os. [`execute()`] serves the needs of a
//! task, and is the only function that a transport calls. [`Runners`] sends aborts to all queues and connections. [`TaskOrder`] keeps the
//! order of tasks across queues. The caller chooses worker, ring and transport. A task is owned by its request's slot; a task of one I/O
//! allocates nothing.

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

pub use background::continue_in_background;
pub use execute::{Data, Parts, Transport, Waiter, execute, may_start};
pub use handles::DiskHandles;
pub(crate) use memory::Held;
pub use memory::WorkMemory;
pub use operation::operation_of;
pub use order::{Admission, StartTask, TaskOrder, Ticket};
pub use runners::{
    Call, Effect, Exempt, Hold, Holding, Known, Registration, Runner, Runners, TaskOperation, Tasks,
};
pub use task::{Granted, Task};
pub use units::Units;
