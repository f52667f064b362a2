//! Reservations of one logical unit: RESERVE/RELEASE and persistent reservations (SPC-4, 5.12 and 5.13).
//!
//! Pure state behind the unit's mutex. A registrant is an initiator port at a target port, so it outlives its nexus and, with APTPL, the
//! daemon. Each service returns its effects on other registrants. [`Reservations::conflicts`] decides from the command table if a
//! reservation blocks a command.

mod persist;
mod services;
mod shared;
mod status;

pub use shared::SHARED_STATE_MAX;
pub(crate) use shared::{Notice, SharedReservations};
pub use status::{RegistrationStatus, ReservationStatus};

use crate::nexus::{Nexus, NexusId, TransportId};
use crate::response::Response;
use crate::sense::{Sense, SenseCode};
use crate::table::Access;

/// Identifier of a daemon that serves a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DaemonId(pub u128);

impl DaemonId {
    /// This daemon, regardless of its number for other daemons.
    pub const THIS: DaemonId = DaemonId(0);
}

/// Identity of a registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registrant {
    /// Daemon that has the target port: ports of two daemons may have the same identifier.
    pub daemon: DaemonId,
    pub initiator: TransportId,
    /// Relative target port identifier.
    pub port: u16,
}

impl Registrant {
    pub fn of(nexus: &Nexus) -> Registrant {
        Registrant {
            daemon: DaemonId::THIS,
            initiator: nexus.initiator().clone(),
            port: nexus.port().relative_id,
        }
    }

    pub fn is(&self, nexus: &Nexus) -> bool {
        self.daemon == DaemonId::THIS
            && self.port == nexus.port().relative_id
            && self.initiator == *nexus.initiator()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registration {
    pub who: Registrant,
    pub key: u64,
}

/// Persistent reservation type (SPC-4, table 61).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    WriteExclusive = 1,
    ExclusiveAccess = 3,
    WriteExclusiveRegistrantsOnly = 5,
    ExclusiveAccessRegistrantsOnly = 6,
    WriteExclusiveAllRegistrants = 7,
    ExclusiveAccessAllRegistrants = 8,
}

impl Kind {
    pub fn from_code(code: u8) -> Option<Kind> {
        Some(match code {
            1 => Kind::WriteExclusive,
            3 => Kind::ExclusiveAccess,
            5 => Kind::WriteExclusiveRegistrantsOnly,
            6 => Kind::ExclusiveAccessRegistrantsOnly,
            7 => Kind::WriteExclusiveAllRegistrants,
            8 => Kind::ExclusiveAccessAllRegistrants,
            _ => return None,
        })
    }

    /// Returns true if reads of other nexuses conflict.
    pub fn excludes_reads(self) -> bool {
        use Kind::*;
        matches!(
            self,
            ExclusiveAccess | ExclusiveAccessRegistrantsOnly | ExclusiveAccessAllRegistrants
        )
    }

    /// Returns true if every registrant is a holder.
    pub fn all_registrants(self) -> bool {
        matches!(
            self,
            Kind::WriteExclusiveAllRegistrants | Kind::ExclusiveAccessAllRegistrants
        )
    }

    /// Returns true if every registrant has the holder's rights.
    pub fn for_registrants(self) -> bool {
        !matches!(self, Kind::WriteExclusive | Kind::ExclusiveAccess)
    }
}

/// A persistent reservation. Without a `holder`, all registrants hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reservation {
    pub kind: Kind,
    pub holder: Option<Registrant>,
}

/// Registrations and reservation of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reservations {
    /// PRGENERATION.
    pub generation: u32,
    pub registrations: Vec<Registration>,
    pub reservation: Option<Reservation>,
    /// Registrations and reservation survive a power loss (APTPL).
    pub persist: bool,
    /// Holder of a RESERVE.
    pub reserved_by: Option<NexusId>,
}

/// Effects of a successful service on other registrants.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    pub attentions: Vec<(Registrant, SenseCode)>,
    /// Registrants that lose their tasks.
    pub aborts: Vec<Registrant>,
}

/// Reason for the refusal of a service.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Conflict,
    Check(Sense),
}

impl From<Sense> for Refusal {
    fn from(sense: Sense) -> Refusal {
        Refusal::Check(sense)
    }
}

impl From<Refusal> for Response {
    fn from(refusal: Refusal) -> Response {
        match refusal {
            Refusal::Conflict => Response::status(crate::response::Status::ReservationConflict),
            Refusal::Check(sense) => Response::check(sense),
        }
    }
}

impl Reservations {
    /// Returns true if any reservation is held.
    pub fn held(&self) -> bool {
        self.reservation.is_some() || self.reserved_by.is_some()
    }

    pub fn registration(&self, nexus: &Nexus) -> Option<&Registration> {
        self.registrations.iter().find(|known| known.who.is(nexus))
    }

    /// Returns true if this registrant holds the reservation.
    pub fn holds(&self, who: &Registrant) -> bool {
        self.reservation
            .as_ref()
            .is_some_and(|reservation| match &reservation.holder {
                Some(holder) => holder == who,
                None => self.registrations.iter().any(|known| known.who == *who),
            })
    }

    /// Returns true if a command of this class from this nexus conflicts with the reservation:
    ///
    /// | reservation            | holder | registrant | other, reading | other, writing |
    /// |------------------------|--------|------------|----------------|----------------|
    /// | WE                     | may    | as other   | may            | conflict       |
    /// | EA                     | may    | as other   | conflict       | conflict       |
    /// | WE-RO, WE-AR           | may    | may        | may            | conflict       |
    /// | EA-RO, EA-AR           | may    | may        | conflict       | conflict       |
    /// | RESERVE                | may    | conflict   | conflict       | conflict       |
    pub fn conflicts(&self, nexus: &Nexus, access: Access, always_under_reserve: bool) -> bool {
        if !self.held() || self.privileges(nexus) {
            return false;
        }
        match (&self.reservation, access) {
            (None, _) => !always_under_reserve,
            (Some(_), Access::Always) => false,
            (Some(reservation), Access::Read) => reservation.kind.excludes_reads(),
            (Some(_), Access::Write) => true,
        }
    }

    /// Returns true if the reservation does not restrict this nexus.
    pub fn privileges(&self, nexus: &Nexus) -> bool {
        if let Some(holder) = self.reserved_by {
            return holder == nexus.id();
        }
        let Some(reservation) = &self.reservation else {
            return true;
        };
        let is_holder = reservation
            .holder
            .as_ref()
            .is_some_and(|holder| holder.is(nexus));
        is_holder || (reservation.kind.for_registrants() && self.registration(nexus).is_some())
    }

    /// RESERVE (SPC-2, 7.21). A repetition by the holder succeeds.
    pub fn reserve_unit(&mut self, nexus: &Nexus) -> Result<(), Refusal> {
        match self.reserved_by {
            _ if !self.registrations.is_empty() => Err(Refusal::Conflict),
            Some(holder) if holder != nexus.id() => Err(Refusal::Conflict),
            _ => {
                self.reserved_by = Some(nexus.id());
                Ok(())
            }
        }
    }

    /// RELEASE (SPC-2, 7.19). Has no effect if the nexus is not the holder.
    pub fn release_unit(&mut self, nexus: &Nexus) -> Result<(), Refusal> {
        if !self.registrations.is_empty() {
            return Err(Refusal::Conflict);
        }
        self.reserved_by.take_if(|holder| *holder == nexus.id());
        Ok(())
    }
}
