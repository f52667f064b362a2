//! Persistent reservations of a unit: PERSISTENT RESERVE IN and OUT (SPC-4, 6.13 and 6.14).

use std::fmt;

use scsi::cdb::persistent_reserve;
use scsi::opcode;

use crate::unit::{CommandError, Unit, answer};

type Result<T> = std::result::Result<T, CommandError>;

const IN: &str = "PERSISTENT RESERVE IN";
const OUT: &str = "PERSISTENT RESERVE OUT";
/// Allocation length for a thousand keys.
const LENGTH: u16 = 8 + 8 * 1024;

/// Type of a persistent reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationKind {
    /// Only the holder may write.
    WriteExclusive,
    /// Only the holder may read and write.
    ExclusiveAccess,
    /// Only registrants may write.
    WriteExclusiveRegistrants,
    /// Only registrants may read and write.
    ExclusiveAccessRegistrants,
    /// Only registrants may write; all of them are holders.
    WriteExclusiveAll,
    /// Only registrants may read and write; all of them are holders.
    ExclusiveAccessAll,
}

impl ReservationKind {
    /// All types, with their names and values (SPC-4, table 203).
    pub const WORDS: [(&'static str, ReservationKind, u8); 6] = [
        ("write-exclusive", ReservationKind::WriteExclusive, 1),
        ("exclusive-access", ReservationKind::ExclusiveAccess, 3),
        (
            "write-exclusive-registrants",
            ReservationKind::WriteExclusiveRegistrants,
            5,
        ),
        (
            "exclusive-access-registrants",
            ReservationKind::ExclusiveAccessRegistrants,
            6,
        ),
        ("write-exclusive-all", ReservationKind::WriteExclusiveAll, 7),
        (
            "exclusive-access-all",
            ReservationKind::ExclusiveAccessAll,
            8,
        ),
    ];

    fn wire(self) -> u8 {
        let mut words = ReservationKind::WORDS.iter();
        words
            .find(|(_, kind, _)| *kind == self)
            .map_or(0, |(.., wire)| *wire)
    }

    fn from_wire(wire: u8) -> Option<ReservationKind> {
        let mut words = ReservationKind::WORDS.iter();
        words
            .find(|(.., value)| *value == wire)
            .map(|(_, kind, _)| *kind)
    }
}

impl fmt::Display for ReservationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = ReservationKind::WORDS.iter();
        let word = words.find(|(_, kind, _)| kind == self);
        f.write_str(word.map_or("", |(word, ..)| word))
    }
}

/// Registrations and reservation of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationStatus {
    /// PRGENERATION.
    pub generation: u32,
    /// Reservation keys of all registrations.
    pub keys: Vec<u64>,
    /// Key and type of the reservation.
    pub reservation: Option<(u64, Option<ReservationKind>)>,
}

impl Unit {
    /// Runs READ KEYS and READ RESERVATION.
    ///
    /// # Errors
    /// If the unit refuses.
    pub fn reservations(&mut self) -> Result<ReservationStatus> {
        let (generation, list) = self.reserve_in(0)?;
        let keys = list.chunks_exact(8).filter_map(|key| key.try_into().ok());
        let keys = keys.map(u64::from_be_bytes).collect();
        let (_, held) = self.reserve_in(1)?;
        let key = held.first_chunk::<8>().map(|key| u64::from_be_bytes(*key));
        let kind = held
            .get(13)
            .and_then(|byte| ReservationKind::from_wire(byte & 0x0f));
        Ok(ReservationStatus {
            generation,
            keys,
            reservation: key.map(|key| (key, kind)),
        })
    }

    /// Returns PRGENERATION and the list.
    fn reserve_in(&mut self, action: u8) -> Result<(u32, Vec<u8>)> {
        let cdb = persistent_reserve(opcode::PERSISTENT_RESERVE_IN, action, 0, LENGTH);
        let data = self.command(IN, &cdb, LENGTH.into())?;
        let Some((head, list)) = data.split_first_chunk::<8>() else {
            return Err(answer(
                IN,
                format!("the response of the unit has only {} bytes", data.len()),
            ));
        };
        let number =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let length = (number(4) as usize).min(list.len());
        Ok((number(0), list[..length].to_vec()))
    }

    /// Runs REGISTER AND IGNORE EXISTING KEY; key 0 removes the registration. `persists` sets APTPL: the registration
    /// survives a power loss.
    ///
    /// # Errors
    /// If the unit refuses.
    pub fn register(&mut self, key: u64, persists: bool) -> Result<()> {
        self.reserve_out(6, 0, 0, key, persists)
    }

    /// Runs RESERVE with the key of this initiator's registration.
    ///
    /// # Errors
    /// If the unit refuses.
    pub fn reserve(&mut self, key: u64, kind: ReservationKind) -> Result<()> {
        self.reserve_out(1, kind.wire(), key, 0, false)
    }

    /// Runs RELEASE.
    ///
    /// # Errors
    /// If the unit refuses.
    pub fn release(&mut self, key: u64, kind: ReservationKind) -> Result<()> {
        self.reserve_out(2, kind.wire(), key, 0, false)
    }

    /// Runs CLEAR, which removes the reservation and all registrations.
    ///
    /// # Errors
    /// If the unit refuses.
    pub fn clear_reservations(&mut self, key: u64) -> Result<()> {
        self.reserve_out(3, 0, key, 0, false)
    }

    /// Runs PREEMPT or PREEMPT AND ABORT, which removes the registrations of `other` and its reservation.
    ///
    /// # Errors
    /// If the unit refuses.
    pub fn preempt(
        &mut self,
        key: u64,
        other: u64,
        kind: ReservationKind,
        aborts: bool,
    ) -> Result<()> {
        self.reserve_out(if aborts { 5 } else { 4 }, kind.wire(), key, other, false)
    }

    fn reserve_out(
        &mut self,
        action: u8,
        kind: u8,
        key: u64,
        service_key: u64,
        persists: bool,
    ) -> Result<()> {
        let cdb = persistent_reserve(opcode::PERSISTENT_RESERVE_OUT, action, kind, 24);
        self.command_out(OUT, &cdb, &parameters(key, service_key, persists))
    }
}

/// Returns the basic parameter list (SPC-4, table 215).
fn parameters(key: u64, service_key: u64, persists: bool) -> [u8; 24] {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&key.to_be_bytes());
    list[8..16].copy_from_slice(&service_key.to_be_bytes());
    list[20] = u8::from(persists);
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_laid_out_as_spc_has_them() {
        let list = parameters(0x0102_0304_0506_0708, 0x1112_1314_1516_1718, true);
        assert_eq!(
            list,
            [
                1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0, 0, 0, 0,
                1, 0, 0, 0
            ]
        );
    }

    #[test]
    fn each_kind_has_a_word_and_a_value() {
        for (word, kind, wire) in ReservationKind::WORDS {
            assert_eq!((kind.to_string().as_str(), kind.wire()), (word, wire));
            assert_eq!(ReservationKind::from_wire(wire), Some(kind));
        }
        assert_eq!(ReservationKind::from_wire(2), None);
    }
}
