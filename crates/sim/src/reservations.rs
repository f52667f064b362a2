//! Model of persistent reservations (SPC-4, 5.13 and tables 66 and 67). It is independent of the target's code, which is compared with
//! it.

use std::collections::BTreeMap;

use crate::clients::{Kind, ReserveOut};

/// Number of an I_T nexus.
pub type Nexus = usize;

/// Registrations and reservation of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservations {
    keys: BTreeMap<Nexus, u64>,
    /// Reservation type and holder. With the all-registrants types every registrant is a holder.
    held: Option<(u8, Nexus)>,
}

/// Expected result of PERSISTENT RESERVE OUT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// GOOD, with this new state.
    Good(Reservations),
    Conflict,
    /// CHECK CONDITION; nothing changes.
    Refused,
}

/// Reservation types: write exclusive and exclusive access, each plain, registrants only and all registrants.
pub const TYPES: [u8; 6] = [1, 3, 5, 6, 7, 8];

fn is_of_all(kind: u8) -> bool {
    kind >= 7
}

fn is_exclusive_access(kind: u8) -> bool {
    matches!(kind, 3 | 6 | 8)
}

impl Reservations {
    pub fn key(&self, nexus: Nexus) -> Option<u64> {
        self.keys.get(&nexus).copied()
    }

    /// Returns the keys of the other registrants.
    pub fn others(&self, nexus: Nexus) -> impl Iterator<Item = u64> {
        let others = self.keys.iter().filter(move |(known, _)| **known != nexus);
        others.map(|(_, key)| *key)
    }

    pub fn kind(&self) -> Option<u8> {
        self.held.map(|(kind, _)| kind)
    }

    fn holds(&self, nexus: Nexus) -> bool {
        match self.held {
            Some((kind, _)) if is_of_all(kind) => self.keys.contains_key(&nexus),
            Some((_, holder)) => holder == nexus,
            None => false,
        }
    }

    /// Returns true if a command of this nexus conflicts with the reservation.
    pub fn conflicts(&self, nexus: Nexus, kind: Kind) -> bool {
        let Some((reserved, _)) = self.held else {
            return false;
        };
        // Types 5 and above admit all registrants.
        let is_in = match reserved {
            1 | 3 => self.holds(nexus),
            _ => self.keys.contains_key(&nexus),
        };
        let only_reads = kind == Kind::Read;
        !is_in && (!only_reads || is_exclusive_access(reserved))
    }

    fn remove(&mut self, nexus: Nexus) {
        let held = self.holds(nexus);
        self.keys.remove(&nexus);
        match self.held {
            // An all-registrants reservation ends with its last registrant.
            Some((kind, _)) if is_of_all(kind) && !self.keys.is_empty() => {}
            Some(_) if held => self.held = None,
            _ => {}
        }
    }

    /// Returns the expected result of a command.
    pub fn expect(&self, nexus: Nexus, service_action: ReserveOut) -> Expected {
        let mut new = self.clone();
        if let ReserveOut::Register { key } = service_action {
            match key {
                0 => new.remove(nexus),
                key => drop(new.keys.insert(nexus, key)),
            }
            return Expected::Good(new);
        }
        let Some(own) = self.key(nexus) else {
            return Expected::Conflict;
        };
        match service_action {
            ReserveOut::Register { .. } => {}
            ReserveOut::Reserve { kind } => match self.held {
                None => new.held = Some((kind, nexus)),
                Some((held, _)) if held == kind && self.holds(nexus) => {}
                Some(_) => return Expected::Conflict,
            },
            ReserveOut::Release { kind } => match self.held {
                Some((held, _)) if self.holds(nexus) && held == kind => new.held = None,
                Some(_) if self.holds(nexus) => return Expected::Refused,
                _ => {}
            },
            ReserveOut::Clear => new = Reservations::default(),
            ReserveOut::Preempt { kind, key } => {
                let takes_over = match self.held {
                    Some((held, holder)) if !is_of_all(held) => self.key(holder) == Some(key),
                    _ => false,
                };
                let victims: Vec<Nexus> = self
                    .keys
                    .iter()
                    .filter(|(known, its)| **its == key && !(takes_over && **known == nexus))
                    .map(|(known, _)| *known)
                    .collect();
                if victims.is_empty() && !(takes_over && own == key) {
                    return Expected::Conflict;
                }
                victims.into_iter().for_each(|victim| new.remove(victim));
                if takes_over {
                    new.held = Some((kind, nexus));
                }
            }
        }
        Expected::Good(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(state: &Reservations, nexus: Nexus, service_action: ReserveOut) -> Reservations {
        match state.expect(nexus, service_action) {
            Expected::Good(new) => new,
            other => panic!("{service_action:?}: {other:?}"),
        }
    }

    #[test]
    fn reservations_are_those_of_the_standard() {
        let none = Reservations::default();
        let reserve = |kind| ReserveOut::Reserve { kind };
        assert_eq!(none.expect(0, reserve(1)), Expected::Conflict);
        let both = after(&none, 0, ReserveOut::Register { key: 10 });
        let both = after(&both, 1, ReserveOut::Register { key: 11 });
        let write = Kind::Write { durable: false };
        for (kind, other_reads, other_writes, registrant_writes) in [
            (1, true, false, false),
            (3, false, false, false),
            (5, true, false, true),
            (6, false, false, true),
            (7, true, false, true),
            (8, false, false, true),
        ] {
            let held = after(&both, 0, reserve(kind));
            assert!(!held.conflicts(0, write), "type {kind}");
            assert_eq!(!held.conflicts(2, Kind::Read), other_reads, "type {kind}");
            assert_eq!(!held.conflicts(2, write), other_writes, "type {kind}");
            assert_eq!(!held.conflicts(1, write), registrant_writes, "type {kind}");
            assert_eq!(after(&held, 0, ReserveOut::Release { kind }), both);
            let gone = after(&held, 0, ReserveOut::Register { key: 0 });
            assert_eq!(gone.kind().is_some(), kind >= 7, "type {kind}");
        }
        let held = after(&both, 0, reserve(1));
        assert_eq!(held.expect(1, reserve(1)), Expected::Conflict);
        let wrong = ReserveOut::Release { kind: 3 };
        assert_eq!(held.expect(0, wrong), Expected::Refused);
        assert_eq!(after(&held, 1, wrong), held, "it does not hold it");
        let taken = after(&held, 1, ReserveOut::Preempt { kind: 3, key: 10 });
        assert_eq!((taken.kind(), taken.key(0)), (Some(3), None));
        assert!(taken.conflicts(0, Kind::Read));
    }
}
