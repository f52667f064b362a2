//! Tracks the logical unit that an initiator port has seen under each LUN, and restricts commands to a unit that replaces it.
//!
//! An initiator that misses a unit attention continues to use the old block size and content. A unit that replaces another one therefore
//! accepts no command that reads or changes the medium until the initiator has read the capacity. If the block size differs, an older
//! command may still be in flight: its transfer length differs from its CDB, and it is refused. Stored in the nexus, and in the target
//! between two nexuses of an initiator port.

use std::collections::BTreeMap;

use crate::logical_unit::{LogicalUnit, UnitId};

/// Properties that distinguish units for initiators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Appearance {
    naa: u64,
    block_size: u32,
    capacity_bytes: u64,
}

impl Appearance {
    pub(crate) fn of(unit: &LogicalUnit) -> Appearance {
        let geometry = unit.geometry();
        Appearance {
            naa: unit.naa(),
            block_size: geometry.block_size(),
            capacity_bytes: geometry.capacity_bytes(),
        }
    }
}

/// Relation of a unit to the one that the initiator has seen under its LUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relation {
    /// The unit is the one seen before, or the first one under the LUN.
    Same,
    /// The unit is the one seen before, with another capacity.
    OtherCapacity,
    /// Another unit.
    Other,
}

/// Restriction on commands to a unit that has replaced another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replaced {
    /// The initiator has not read the capacity yet.
    Unread,
    /// The initiator has read the capacity; commands with another block size may be in flight.
    OtherBlockSize,
}

/// Units that an initiator port has seen, by LUN.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownUnits {
    known: BTreeMap<u16, Appearance>,
    replaced: BTreeMap<u16, (UnitId, Replaced)>,
}

impl KnownUnits {
    /// Returns the initial state for another nexus of the same initiator port.
    pub(crate) fn for_another_nexus(&self) -> KnownUnits {
        KnownUnits {
            known: self.known.clone(),
            replaced: BTreeMap::new(),
        }
    }

    /// Records that a unit has this LUN now.
    pub(crate) fn meet(&mut self, lun: u16, id: UnitId, unit: Appearance) -> Relation {
        let known = *self.known.entry(lun).or_insert(unit);
        if (known.naa, known.block_size) != (unit.naa, unit.block_size) {
            self.replaced.insert(lun, (id, Replaced::Unread));
            return Relation::Other;
        }
        self.known.insert(lun, unit);
        match known.capacity_bytes == unit.capacity_bytes {
            true => Relation::Same,
            false => Relation::OtherCapacity,
        }
    }

    /// Records that the LUN has no unit any more. Returns the unit if it had replaced another one.
    pub(crate) fn remove_unit(&mut self, lun: u16) -> Option<UnitId> {
        self.replaced.remove(&lun).map(|(id, _)| id)
    }

    /// Records that the initiator has read the capacity of the unit. Returns the unit if this ends its restriction.
    pub(crate) fn read_capacity(&mut self, lun: u16, unit: Appearance) -> Option<UnitId> {
        let before = self.known.insert(lun, unit);
        let (id, replaced) = self.replaced.get_mut(&lun)?;
        match (*replaced, before) {
            (Replaced::Unread, Some(before)) if before.block_size != unit.block_size => {
                *replaced = Replaced::OtherBlockSize;
                None
            }
            (Replaced::Unread, _) => {
                let id = *id;
                self.replaced.remove(&lun);
                Some(id)
            }
            (Replaced::OtherBlockSize, _) => None,
        }
    }

    pub(crate) fn replaced(&self, lun: u16) -> Option<Replaced> {
        self.replaced.get(&lun).map(|(_, replaced)| *replaced)
    }
}
