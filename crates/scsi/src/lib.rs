//! SCSI target core: CDB in, plan out.
//!
//! Pure: no I/O, no threads, no sockets, and independent of the transport. A transport builds a [`Command`], passes it to its worker's
//! [`TargetView`], and executes the returned [`Plan`]. Workers share targets and logical units through `Arc`. The request path (READ,
//! WRITE, SYNCHRONIZE CACHE, TEST UNIT READY) does not lock, allocate, or write shared memory. Input from the peer is validated here, once.
//! Standards: SAM-5, SPC-4/5, SBC-3/4. Tests: in each module, and `tests/` for whole commands.

#![forbid(unsafe_code)]

pub mod cdb;
mod command;
mod commands;
mod copy_results;
mod directory;
mod known;
mod logical_unit;
mod lun;
mod mode;
mod nexus;
mod plan;
mod reservations;
mod response;
mod sanitizing;
mod sense;
mod sharing;
mod sync;
mod table;
mod target;
mod task_management;
#[cfg(test)]
mod testing;
mod unit_state;

pub use command::{Cdb, Command, TaskAttribute, opcode};
pub use commands::{PASSED_MAX, PlainParameters, TRANSFER_MAX};
pub use directory::{Directory, MemoryStore, Store, Unusable};
pub use logical_unit::{DiskId, LogicalUnit, Medium, MediumHold, UnitConfig, UnitId};
pub use lun::{Lun, LunAddress, MAX_UNITS};
pub use nexus::{Nexus, NexusId, StateSetters, TargetPort, TransportId};
pub use plan::{
    DATA_OUT_MAX, DirectIo, Exclusive, Pending, PlainEnd, PlainIo, Plan, PlanStep, Run, SCRATCH_MAX,
};
pub use reservations::{RegistrationStatus, ReservationStatus, SHARED_STATE_MAX};
pub use response::{Residual, Response, SenseData, Status};
pub use sense::{SENSE_LENGTH_MAX, Sense, SenseBytes, SenseCode, SenseKey, SenseSpecific};
pub use target::{AttachError, LunMap, PlainUnit, Target, TargetView};
pub use task_management::{AbortScope, Managed, TaskManagementFunction, TaskTag};
pub use unit_state::{AccessState, AccessStates, forget, saved_initiator_state};
