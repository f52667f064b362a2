//! Reservations as displayed to the administrator.

use super::{DaemonId, Kind, Reservations};

/// Registrations and reservations of a logical unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationStatus {
    /// PRGENERATION.
    pub generation: u32,
    /// Registrations and reservation survive a power loss (APTPL).
    pub persists: bool,
    /// Name of the persistent reservation's type in SPC-4, table 61.
    pub kind: Option<&'static str>,
    /// The unit is reserved by RESERVE.
    pub reserved: bool,
    /// All registrations.
    pub registrations: Vec<RegistrationStatus>,
}

/// A registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistrationStatus {
    /// Name of the initiator port.
    pub initiator: String,
    /// Daemon that has the target port, as 32 hexadecimal digits; `None`: this one.
    pub daemon: Option<String>,
    /// Relative target port identifier.
    pub port: u16,
    /// Reservation key.
    pub key: u64,
    /// The registrant holds the reservation.
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

    /// Returns true if there is a reservation by either method.
    pub fn is_held(&self) -> bool {
        self.kind.is_some() || self.reserved
    }

    /// Returns true if there is neither a registration nor a reservation.
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
