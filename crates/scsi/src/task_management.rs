//! Task management: what of a function the core does, and which tasks its caller has to abort (SAM-5, 7).
//!
//! Tasks belong to the transports. Each running task is known by a [`TaskTag`]. Whoever is handed an
//! [`AbortScope`] takes it to every worker; a task that matches must not touch the disk from then on, and
//! only when all workers have said so the answer may leave.

use std::sync::Arc;

use crate::logical_unit::UnitId;
use crate::lun::Lun;
use crate::nexus::{Nexus, NexusId};
use crate::sense::SenseCode;
use crate::target::TargetView;

/// By what a running task is known, beside its own tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TaskTag {
    /// Who sent it.
    pub nexus: NexusId,
    /// To which logical unit.
    pub unit: UnitId,
}

/// Which tasks have to be aborted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbortScope {
    units: Option<Vec<UnitId>>,
    nexuses: Option<Vec<NexusId>>,
    /// The nexuses may not write to the units any more: PREEMPT AND ABORT.
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

    /// What PREEMPT AND ABORT means.
    pub(crate) fn fencing(unit: UnitId, nexuses: Vec<NexusId>) -> AbortScope {
        AbortScope {
            fences: true,
            ..AbortScope::of_nexuses(unit, nexuses)
        }
    }

    /// Everything that one nexus sent: its I_T nexus was lost.
    pub fn of_nexus(nexus: &Nexus) -> AbortScope {
        AbortScope {
            units: None,
            nexuses: Some(vec![nexus.id()]),
            fences: false,
        }
    }

    /// What one nexus sent to one unit.
    pub fn of_nexus_and_unit(nexus: NexusId, unit: UnitId) -> AbortScope {
        AbortScope::of_nexuses(unit, vec![nexus])
    }

    /// Has the end of a task to be waited for that was sent to another unit and writes to these: a copy? It asks before each of
    /// its I/Os whether it still may, so that it ends with the one that is under way.
    pub fn ends(&self, nexus: NexusId, writes_to: impl Fn(UnitId) -> bool) -> bool {
        let (Some(units), Some(nexuses)) = (&self.units, &self.nexuses) else {
            return false;
        };
        self.fences && nexuses.contains(&nexus) && units.iter().any(|unit| writes_to(*unit))
    }

    /// Has this task to be aborted?
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

/// The functions that are not about a single task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TaskManagementFunction {
    AbortTaskSet,
    ClearTaskSet,
    LogicalUnitReset,
    /// Warm or cold: every logical unit of the target.
    TargetReset,
    NexusReset,
}

/// What became of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Managed {
    /// Abort these tasks, then answer FUNCTION COMPLETE.
    Abort(AbortScope),
    /// Answer INCORRECT LOGICAL UNIT NUMBER.
    IncorrectLun,
}

impl TargetView {
    /// Carries out the core's part of a task management function.
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
                    // SAM-5, 6.3.4
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
            // Each nexus has a task set of its own, as the Control mode page says (TST 001b): CLEAR TASK SET reaches no other
            // one's, and nobody has to be told of it (SAM-5, 7.4).
            _ => AbortScope::of_nexuses(unit.id(), vec![nexus.id()]),
        };
        Managed::Abort(scope)
    }

    /// QUERY ASYNCHRONOUS EVENT: the unit attention that waits first, without taking it.
    pub fn query_asynchronous_event(&self, nexus: &Nexus, lun: Lun) -> Option<SenseCode> {
        nexus.peek_attention(self.unit(lun)?.id())
    }
}
