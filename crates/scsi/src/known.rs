//! Which logical unit an initiator port knows under each LUN, and what it may do to another one that has come in its place.
//!
//! An initiator that misses a unit attention goes on with the block size and the content that it knows. So a unit that
//! replaces another one accepts no command that reads or changes the medium until the initiator has read the capacity. With
//! another block size, a command that was built before that may still be under way: its transfer is of another length than
//! its CDB says, and it is refused. Kept by the nexus, and by the target from one nexus of an initiator port to the next.

use std::collections::BTreeMap;

use crate::logical_unit::{LogicalUnit, UnitId};

/// What tells one unit from another, as initiators see them.
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

/// How a unit relates to the one that the initiator knows under its LUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relation {
    /// It is the same, or the first.
    Same,
    /// It is the same with another capacity.
    OtherCapacity,
    /// It is another one.
    Other,
}

/// What holds for commands to a unit that has replaced another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replaced {
    /// The initiator has not read the capacity yet.
    Unread,
    /// The initiator has read it; commands with another block size may be under way.
    OtherBlockSize,
}

/// What an initiator port knows, LUN by LUN.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownUnits {
    known: BTreeMap<u16, Appearance>,
    replaced: BTreeMap<u16, (UnitId, Replaced)>,
}

impl KnownUnits {
    /// What another nexus of the same initiator port starts with.
    pub(crate) fn for_another_nexus(&self) -> KnownUnits {
        KnownUnits {
            known: self.known.clone(),
            replaced: BTreeMap::new(),
        }
    }

    /// A unit has this LUN now.
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

    /// No unit has this LUN any more. Names the one that had replaced another.
    pub(crate) fn leave(&mut self, lun: u16) -> Option<UnitId> {
        self.replaced.remove(&lun).map(|(id, _)| id)
    }

    /// The initiator has read the capacity of the unit. Names the unit if nothing special holds for it any more.
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
