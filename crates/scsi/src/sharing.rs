//! A logical unit that several daemons serve. They share its reservations; this daemon has a copy.
//!
//! The copy is replaced after each change of the shared state, by any daemon. Local initiators then get unit attentions for the effects of
//! the change. While the copy may be out of date, commands affected by reservations are answered BUSY. This begins when the daemon notices
//! it, and at the latest when the copy's validity ends. The time limit covers a process that was stopped: it finds commands before it
//! notices anything. Tests: `tests/shared_reservations.rs`.

use std::time::Duration;

use crate::logical_unit::LogicalUnit;
use crate::reservations::{DaemonId, Notice, Registrant, Reservations, SharedReservations};
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::task_management::AbortScope;
use crate::unit_state::UnitState;

/// A unit's copy of its shared state.
#[derive(Debug)]
pub(crate) struct Sharing {
    /// Identifier of this daemon among the others.
    daemon: DaemonId,
    /// Version of the state adopted last.
    version: Option<u64>,
    complete_from: u64,
    notices: Vec<Notice>,
    is_current: bool,
    /// End of the copy's validity, by the clock `now`.
    valid_until: Duration,
    now: fn() -> Duration,
}

impl Sharing {
    /// Returns the version that a change replaces, and the encoded state after the change.
    pub fn changed(
        &self,
        reservations: Reservations,
        effects: &crate::reservations::Effects,
        by: &Registrant,
    ) -> Result<(u64, Vec<u8>), Sense> {
        let busy = Sense::new(SenseKey::NotReady, SenseCode::BECOMING_READY);
        let version = self.version.ok_or(busy)?;
        let mut shared = SharedReservations {
            reservations: Reservations::default(),
            complete_from: self.complete_from,
            notices: self.notices.clone(),
        };
        shared.change(reservations, effects, version.wrapping_add(1), by);
        let bytes = shared.encode(self.daemon).ok_or_else(|| {
            Sense::illegal_request(SenseCode::INSUFFICIENT_REGISTRATION_RESOURCES)
        })?;
        Ok((version, bytes))
    }
}

impl UnitState {
    /// Returns true if the reservations are not known: other daemons may have changed them, or the saved state cannot be used.
    pub fn is_out_of_date(&self) -> bool {
        let is_old = |it: &Sharing| !it.is_current || (it.now)() >= it.valid_until;
        !self.unknown.is_empty() || self.sharing.as_ref().is_some_and(is_old)
    }
}

impl LogicalUnit {
    /// Shares the unit's reservations with other daemons that serve its medium. `daemon` is the permanent identifier of this daemon. The
    /// state is unknown until [`LogicalUnit::set_reservations_current`], and after the time, by `now`, of
    /// [`LogicalUnit::set_reservations_valid_until`].
    pub fn share_reservations(&self, daemon: u128, now: fn() -> Duration) {
        let mut state = self.state();
        state.reservations = Reservations::default();
        state.sharing = Some(Sharing {
            daemon: DaemonId(daemon),
            version: None,
            complete_from: 0,
            notices: Vec::new(),
            is_current: false,
            valid_until: Duration::ZERO,
            now,
        });
        self.refresh_word(&state);
    }

    /// Sets if the copy of the reservations is current.
    pub fn set_reservations_current(&self, current: bool) {
        let mut state = self.state();
        if let Some(sharing) = &mut state.sharing {
            sharing.is_current = current;
        }
        self.refresh_word(&state);
    }

    /// Sets the end of the copy's validity, in the absence of other information.
    pub fn set_reservations_valid_until(&self, until: Duration) {
        if let Some(sharing) = &mut self.state().sharing {
            sharing.valid_until = until;
        }
    }

    /// Adopts a new version of the shared state. Returns the tasks to abort because of the change.
    ///
    /// # Errors
    /// The bytes are malformed.
    pub fn adopt_reservations(
        &self,
        version: u64,
        bytes: &[u8],
    ) -> Result<Option<AbortScope>, String> {
        let mut state = self.state();
        let Some(sharing) = &mut state.sharing else {
            return Ok(None);
        };
        let shared = SharedReservations::decode(bytes, sharing.daemon)
            .ok_or_else(|| format!("reservation state of version {version} is malformed"))?;
        let before = sharing.version.replace(version);
        sharing.complete_from = shared.complete_from;
        sharing.notices.clone_from(&shared.notices);
        let old = std::mem::replace(&mut state.reservations, shared.reservations);
        let due: Vec<Notice> = match before {
            // The initiators get POWER ON attentions.
            None => Vec::new(),
            Some(before) if before == version => Vec::new(),
            Some(before) if before < version && before >= shared.complete_from => {
                let due = shared.notices.into_iter();
                due.filter(|notice| notice.version > before).collect()
            }
            Some(_) => missed(&old, &state.reservations),
        };
        let mut aborted = Vec::new();
        for notice in due
            .iter()
            .filter(|notice| notice.who.daemon == DaemonId::THIS)
        {
            if let Some(code) = notice.code {
                for nexus in state.nexuses_of(&notice.who) {
                    nexus.push_attention(self.id(), code);
                }
            }
            if notice.abort {
                let nexuses = state.nexuses_to_abort(&notice.who);
                aborted.extend(nexuses.map(|nexus| nexus.id()));
            }
        }
        state.allow_removal_by_lost(&old);
        self.refresh_word(&state);
        Ok((!aborted.is_empty()).then(|| AbortScope::fencing(self.id(), aborted)))
    }

    /// Returns the shared state after a power on of the unit, when its first daemon joins; `None` if it does not change.
    pub fn reservations_after_power_on(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let state = self.state();
        let daemon = state.sharing.as_ref()?.daemon;
        let mut shared = SharedReservations::decode(bytes, daemon)?;
        if shared.reservations.persist || shared.reservations.registrations.is_empty() {
            return None;
        }
        // PRGENERATION is zero after a power on (SPC-4, 6.15.2).
        shared.reservations = Reservations::default();
        shared.encode(daemon)
    }
}

/// Returns notices for local initiators if those of some changes were dropped: the most severe effects that the states before and after
/// allow.
fn missed(old: &Reservations, new: &Reservations) -> Vec<Notice> {
    let is_here = |who: &Registrant| who.daemon == DaemonId::THIS;
    let notice = |who: &Registrant, code, abort| Notice {
        version: 0,
        who: who.clone(),
        code: Some(code),
        abort,
    };
    let stays = |who: &Registrant| new.registrations.iter().any(|one| one.who == *who);
    let local = old.registrations.iter().filter(|one| is_here(&one.who));
    let (remaining, lost): (Vec<_>, Vec<_>) = local.partition(|one| stays(&one.who));
    let lost = lost
        .iter()
        .map(|one| notice(&one.who, SenseCode::REGISTRATIONS_PREEMPTED, true));
    let released = old.reservation.is_some() && old.reservation != new.reservation;
    let remaining = remaining
        .iter()
        .filter(|_| released)
        .map(|one| notice(&one.who, SenseCode::RESERVATIONS_RELEASED, false));
    lost.chain(remaining).collect()
}
