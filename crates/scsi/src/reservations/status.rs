//! Reservations as people are shown them.

use super::{DaemonId, Kind, Reservations};

/// What initiators hold of a logical unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationStatus {
    /// PRGENERATION.
    pub generation: u32,
    /// Registrations and reservation survive a loss of power.
    pub persists: bool,
    /// The persistent reservation, in the words of SPC-4, table 61.
    pub kind: Option<&'static str>,
    /// A RESERVE holds the unit.
    pub reserved: bool,
    /// Who has registered.
    pub registrations: Vec<RegistrationStatus>,
}

/// A registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistrationStatus {
    /// The initiator port's name.
    pub initiator: String,
    /// The daemon whose target port it is, as 32 hexadecimal digits; `None`: this one.
    pub daemon: Option<String>,
    /// Relative target port identifier.
    pub port: u16,
    /// The reservation key.
    pub key: u64,
    /// Does it hold the reservation?
    pub holder: bool,
}

impl ReservationStatus {
    pub(crate) fn of(reservations: &Reservations) -> ReservationStatus {
        let held = reservations.reservation.as_ref();
        let registrations = reservations.registrations.iter().map(|registration| {
            let holds = held.is_some_and(|held| match &held.holder {
                Some(holder) => *holder == registration.who,
                None => held.kind.all_registrants(),
            });
            RegistrationStatus {
                initiator: registration.who.initiator.name(),
                daemon: match registration.who.daemon {
                    DaemonId::THIS => None,
                    DaemonId(other) => Some(format!("{other:032x}")),
                },
                port: registration.who.port,
                key: registration.key,
                holder: holds,
            }
        });
        ReservationStatus {
            generation: reservations.generation,
            persists: reservations.persist,
            kind: held.map(|held| words(held.kind)),
            reserved: reservations.reserved_by.is_some(),
            registrations: registrations.collect(),
        }
    }

    /// Is there a reservation of either sort?
    pub fn is_held(&self) -> bool {
        self.kind.is_some() || self.reserved
    }

    /// Neither registration nor reservation?
    pub fn is_empty(&self) -> bool {
        !self.is_held() && self.registrations.is_empty()
    }
}

fn words(kind: Kind) -> &'static str {
    match kind {
        Kind::WriteExclusive => "write exclusive",
        Kind::ExclusiveAccess => "exclusive access",
        Kind::WriteExclusiveRegistrantsOnly => "write exclusive, registrants only",
        Kind::ExclusiveAccessRegistrantsOnly => "exclusive access, registrants only",
        Kind::WriteExclusiveAllRegistrants => "write exclusive, all registrants",
        Kind::ExclusiveAccessAllRegistrants => "exclusive access, all registrants",
    }
}
