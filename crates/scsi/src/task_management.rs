//! Task management: the core's part of each function, and the tasks that its caller has to abort (SAM-5, 7).
//!
//! Tasks belong to the transports; a [`TaskTag`] identifies each running task. The caller sends an [`AbortScope`] to every worker. A
//! matching task must not access the disk from then on. The response may leave only after all workers have confirmed this.

use std::sync::Arc;

use crate::logical_unit::UnitId;
use crate::lun::Lun;
use crate::nexus::{Nexus, NexusId};
use crate::sense::SenseCode;
use crate::target::TargetView;

/// Identity of a running task, besides its transport's own tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TaskTag {
    /// Nexus that sent it.
    pub nexus: NexusId,
    /// Logical unit that it was sent to.
    pub unit: UnitId,
}

/// Set of tasks to abort.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbortScope {
    units: Option<Vec<UnitId>>,
    nexuses: Option<Vec<NexusId>>,
    /// The nexuses may no longer write to the units: PREEMPT AND ABORT.
    fences: bool,
}

impl AbortScope {
    pub(crate) fn of_nexuses(unit: UnitId, nexuses: Vec<NexusId>) -> AbortScope {
        AbortScope {
            units: Some(vec![unit]),
            nexuses: Some(nexuses),
            fences: false,
        }
    }

    /// Returns the scope of PREEMPT AND ABORT.
    pub(crate) fn fencing(unit: UnitId, nexuses: Vec<NexusId>) -> AbortScope {
        AbortScope {
            fences: true,
            ..AbortScope::of_nexuses(unit, nexuses)
        }
    }

    /// Returns all tasks of a nexus: the I_T nexus was lost.
    pub fn of_nexus(nexus: &Nexus) -> AbortScope {
        AbortScope {
            units: None,
            nexuses: Some(vec![nexus.id()]),
            fences: false,
        }
    }

    /// Returns the tasks that one nexus sent to one unit.
    pub fn of_nexus_and_unit(nexus: NexusId, unit: UnitId) -> AbortScope {
        AbortScope::of_nexuses(unit, vec![nexus])
    }

    /// Returns true if the caller must wait for a copy: a task that was sent to another unit and writes to these units. It checks its
    /// permission before each I/O, so it ends with the I/O in flight.
    pub fn ends(&self, nexus: NexusId, writes_to: impl Fn(UnitId) -> bool) -> bool {
        let (Some(units), Some(nexuses)) = (&self.units, &self.nexuses) else {
            return false;
        };
        self.fences && nexuses.contains(&nexus) && units.iter().any(|unit| writes_to(*unit))
    }

    /// Returns true if this task is to be aborted.
    pub fn matches(&self, task: TaskTag) -> bool {
        self.units
            .as_ref()
            .is_none_or(|units| units.contains(&task.unit))
            && self
                .nexuses
                .as_ref()
                .is_none_or(|nexuses| nexuses.contains(&task.nexus))
    }
}

/// Task management functions on more than a single task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TaskManagementFunction {
    AbortTaskSet,
    ClearTaskSet,
    LogicalUnitReset,
    /// Warm or cold reset of every logical unit of the target.
    TargetReset,
    NexusReset,
}

/// Result of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Managed {
    /// Abort these tasks, then respond FUNCTION COMPLETE.
    Abort(AbortScope),
    /// Respond INCORRECT LOGICAL UNIT NUMBER.
    IncorrectLun,
}

impl TargetView {
    /// Performs the core's part of a task management function.
    pub fn manage(
        &self,
        nexus: &Arc<Nexus>,
        lun: Lun,
        function: TaskManagementFunction,
    ) -> Managed {
        use TaskManagementFunction::*;
        match function {
            TargetReset => {
                let units: Vec<UnitId> = self.map().iter().map(|(_, unit)| unit.id()).collect();
                for (_, unit) in self.map().iter() {
                    unit.reset();
                }
                return Managed::Abort(AbortScope {
                    units: Some(units),
                    nexuses: None,
                    fences: false,
                });
            }
            NexusReset => {
                for (_, unit) in self.map().iter() {
                    unit.nexus_lost(nexus);
                    // SAM-5, 6.3.4.
                    nexus.push_attention(unit.id(), SenseCode::I_T_NEXUS_LOSS);
                }
                return Managed::Abort(AbortScope::of_nexus(nexus));
            }
            AbortTaskSet | ClearTaskSet | LogicalUnitReset => {}
        }
        let Some(unit) = self.unit(lun) else {
            return Managed::IncorrectLun;
        };
        let scope = match function {
            LogicalUnitReset => {
                unit.reset();
                AbortScope {
                    units: Some(vec![unit.id()]),
                    nexuses: None,
                    fences: false,
                }
            }
            // Each nexus has its own task set (Control mode page, TST 001b). CLEAR TASK SET does not affect other nexuses, and establishes
            // no unit attention (SAM-5, 7.4).
            _ => AbortScope::of_nexuses(unit.id(), vec![nexus.id()]),
        };
        Managed::Abort(scope)
    }

    /// QUERY ASYNCHRONOUS EVENT: returns the first pending unit attention without removing it.
    pub fn query_asynchronous_event(&self, nexus: &Nexus, lun: Lun) -> Option<SenseCode> {
        nexus.peek_attention(self.unit(lun)?.id())
    }
}
