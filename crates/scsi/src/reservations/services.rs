//! Services of PERSISTENT RESERVE OUT (SPC-4, 5.13.7 to 5.13.11).

use super::{Effects, Kind, Refusal, Registrant, Registration, Reservation, Reservations};
use crate::sense::{Sense, SenseCode};

type Served = Result<Effects, Refusal>;

/// Maximum number of registrations per unit.
pub(super) const REGISTRATIONS_MAX: usize = 1024;

/// Offset of the SERVICE ACTION RESERVATION KEY field in the parameter list.
const SERVICE_ACTION_KEY: u16 = 8;

impl Reservations {
    /// REGISTER, and REGISTER AND IGNORE EXISTING KEY if `ignore` is set. `others`: further registrants from SPEC_I_PT and ALL_TG_PT.
    pub fn register(
        &mut self,
        who: &Registrant,
        others: &[Registrant],
        key: u64,
        new_key: u64,
        ignore: bool,
        persist: bool,
    ) -> Served {
        let registered = self.find(who);
        if !ignore && registered.map_or(0, |known| known.key) != key {
            return Err(Refusal::Conflict);
        }
        let mut effects = Effects::default();
        match (registered.is_some(), new_key) {
            (false, 0) => return Ok(effects),
            (true, 0) => {
                self.unregister(who, &mut effects);
                for other in others {
                    self.unregister(other, &mut effects);
                }
                effects.attentions.retain(|(receiver, _)| receiver != who);
            }
            (_, new_key) => {
                if !self.has_room(who, others) {
                    return Err(no_room().into());
                }
                self.set_key(who, new_key);
                for other in others {
                    self.set_key(other, new_key);
                }
            }
        }
        self.persist = persist;
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    pub fn reserve(&mut self, who: &Registrant, key: u64, kind: Kind) -> Served {
        self.check_key(who, key)?;
        match &self.reservation {
            Some(reservation) if !self.holds(who) || reservation.kind != kind => {
                return Err(Refusal::Conflict);
            }
            Some(_) => {}
            None => self.reservation = Some(Reservation::by(who, kind)),
        }
        Ok(Effects::default())
    }

    pub fn release(&mut self, who: &Registrant, key: u64, kind: Option<Kind>) -> Served {
        self.check_key(who, key)?;
        if !self.holds(who) {
            return Ok(Effects::default());
        }
        if self
            .reservation
            .as_ref()
            .map(|reservation| reservation.kind)
            != kind
        {
            let code = SenseCode::INVALID_RELEASE_OF_RESERVATION;
            return Err(Sense::illegal_request(code).into());
        }
        let mut effects = Effects::default();
        self.drop_reservation(who, &mut effects);
        Ok(effects)
    }

    pub fn clear(&mut self, who: &Registrant, key: u64) -> Served {
        self.check_key(who, key)?;
        let mut effects = Effects::default();
        for registration in self.registrations.drain(..) {
            if registration.who != *who {
                effects
                    .attentions
                    .push((registration.who, SenseCode::RESERVATIONS_PREEMPTED));
            }
        }
        self.reservation = None;
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    /// PREEMPT, and PREEMPT AND ABORT if `abort` is set.
    pub fn preempt(
        &mut self,
        who: &Registrant,
        key: u64,
        victims: u64,
        kind: Option<Kind>,
        abort: bool,
    ) -> Served {
        self.check_key(who, key)?;
        let takes_over = match &self.reservation {
            None => false,
            Some(reservation) if reservation.kind.all_registrants() => victims == 0,
            Some(reservation) => {
                let holder = reservation
                    .holder
                    .as_ref()
                    .and_then(|holder| self.find(holder));
                holder.is_some_and(|holder| holder.key == victims)
            }
        };
        if victims == 0 && !takes_over {
            return Err(Sense::parameter_field(SERVICE_ACTION_KEY).into());
        }
        let kind = match (takes_over, kind) {
            (true, None) => return Err(Sense::cdb_bit(2, 3).into()),
            (true, Some(kind)) => Some(kind),
            (false, _) => None,
        };
        // The preempting registrant keeps its registration; key zero selects all other registrants.
        let is_victim = |known: &Registration| {
            (victims == 0 || known.key == victims) && !(takes_over && known.who == *who)
        };
        let gone: Vec<Registrant> = self
            .registrations
            .iter()
            .filter(|known| is_victim(known))
            .map(|known| known.who.clone())
            .collect();
        if gone.is_empty() && !takes_over {
            return Err(Refusal::Conflict);
        }
        self.registrations.retain(|known| !is_victim(known));
        let mut effects = Effects::default();
        for victim in &gone {
            if victim != who {
                effects
                    .attentions
                    .push((victim.clone(), SenseCode::REGISTRATIONS_PREEMPTED));
            }
        }
        if let Some(kind) = kind {
            let before = self.reservation.replace(Reservation::by(who, kind));
            if before.is_some_and(|before| before.kind != kind) {
                self.notify_registrants(who, SenseCode::RESERVATIONS_RELEASED, &mut effects);
            }
        } else if gone.iter().any(|victim| self.reserved_for(victim))
            || self.registrations.is_empty()
        {
            self.reservation = None;
        }
        if abort {
            effects.aborts = gone;
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    pub fn register_and_move(
        &mut self,
        who: &Registrant,
        key: u64,
        to: Registrant,
        new_key: u64,
        unregister: bool,
        persist: bool,
    ) -> Served {
        self.check_key(who, key)?;
        let kind = match &self.reservation {
            None => return Err(Sense::illegal_request(SenseCode::INVALID_FIELD_IN_CDB).into()),
            Some(reservation) if reservation.holder.as_ref() == Some(who) => reservation.kind,
            Some(_) => return Err(Refusal::Conflict),
        };
        if new_key == 0 {
            return Err(Sense::parameter_field(SERVICE_ACTION_KEY).into());
        }
        if to == *who {
            return Err(Sense::parameter_field(24).into());
        }
        // Unregistering frees a place.
        if !unregister && !self.has_room(&to, &[]) {
            return Err(no_room().into());
        }
        self.set_key(&to, new_key);
        self.reservation = Some(Reservation::by(&to, kind));
        if unregister {
            self.registrations.retain(|known| known.who != *who);
        }
        self.persist = persist;
        self.generation = self.generation.wrapping_add(1);
        Ok(Effects::default())
    }

    /// Returns true if all unregistered initiators in `who` and `others` can be registered.
    fn has_room(&self, who: &Registrant, others: &[Registrant]) -> bool {
        let is_new = |who: &&Registrant| self.find(who).is_none();
        // More than this never fit, and are not counted.
        others.len() < REGISTRATIONS_MAX && {
            let new = std::iter::once(who).chain(others).filter(is_new).count();
            self.registrations.len() + new <= REGISTRATIONS_MAX
        }
    }

    fn find(&self, who: &Registrant) -> Option<&Registration> {
        self.registrations.iter().find(|known| known.who == *who)
    }

    fn check_key(&self, who: &Registrant, key: u64) -> Result<(), Refusal> {
        match self.find(who) {
            Some(registration) if registration.key == key => Ok(()),
            _ => Err(Refusal::Conflict),
        }
    }

    fn set_key(&mut self, who: &Registrant, key: u64) {
        match self
            .registrations
            .iter_mut()
            .find(|known| known.who == *who)
        {
            Some(known) => known.key = key,
            None => self.registrations.push(Registration {
                who: who.clone(),
                key,
            }),
        }
    }

    /// Returns true if this registrant holds the reservation alone, not as one of all registrants.
    fn reserved_for(&self, who: &Registrant) -> bool {
        self.reservation
            .as_ref()
            .is_some_and(|reservation| reservation.holder.as_ref() == Some(who))
    }

    /// Removes a registration. The reservation ends with its holder's registration, or with the last one.
    fn unregister(&mut self, who: &Registrant, effects: &mut Effects) {
        self.registrations.retain(|known| known.who != *who);
        if self.reserved_for(who) || self.registrations.is_empty() {
            self.drop_reservation(who, effects);
        }
    }

    /// Ends the reservation. Registrants that had rights by it get a unit attention (SPC-4, 5.13.11.2.2).
    fn drop_reservation(&mut self, who: &Registrant, effects: &mut Effects) {
        if self
            .reservation
            .take()
            .is_some_and(|reservation| reservation.kind.for_registrants())
        {
            self.notify_registrants(who, SenseCode::RESERVATIONS_RELEASED, effects);
        }
    }

    fn notify_registrants(&self, but: &Registrant, code: SenseCode, effects: &mut Effects) {
        let others = self.registrations.iter().filter(|known| known.who != *but);
        effects
            .attentions
            .extend(others.map(|known| (known.who.clone(), code)));
    }
}

fn no_room() -> Sense {
    Sense::illegal_request(SenseCode::INSUFFICIENT_REGISTRATION_RESOURCES)
}

impl Reservation {
    fn by(who: &Registrant, kind: Kind) -> Reservation {
        let holder = (!kind.all_registrants()).then(|| who.clone());
        Reservation { kind, holder }
    }
}
