//! A logical unit that other daemons serve too: its reservations are those of all, and what is known of them here is a copy.
//!
//! The copy is adopted whenever the state that the daemons share has changed, wherever that was; then initiators here are told, by
//! unit attentions, what the change did to them. While the copy may be old, commands that reservations concern are answered BUSY: after
//! the daemon has noticed that, and in any case after the time up to which the copy is known to hold. A process that was stopped
//! finds commands before it notices anything; the time is over by then.
//! Tests: `tests/shared_reservations.rs`.

use std::time::Duration;

use crate::logical_unit::LogicalUnit;
use crate::reservations::{DaemonId, Notice, Registrant, Reservations, SharedReservations};
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::task_management::AbortScope;
use crate::unit_state::UnitState;

/// What a unit knows of the state that it shares.
#[derive(Debug)]
pub(crate) struct Sharing {
    /// This daemon, as others know it.
    daemon: DaemonId,
    /// Of the state that was adopted last.
    version: Option<u64>,
    complete_from: u64,
    notices: Vec<Notice>,
    is_current: bool,
    /// Up to when the copy holds, on the clock that is asked.
    valid_until: Duration,
    now: fn() -> Duration,
}

impl Sharing {
    /// The version that a change replaces, and the state as bytes after it.
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
    /// Other daemons serve the unit's medium too, and its reservations are theirs as well. `daemon` names this one among them, for
    /// good. Until [`LogicalUnit::set_reservations_current`] nothing is known, and nothing after the time, by `now`, of
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

    /// Is what is known of the reservations what holds?
    pub fn set_reservations_current(&self, current: bool) {
        let mut state = self.state();
        if let Some(sharing) = &mut state.sharing {
            sharing.is_current = current;
        }
        self.refresh_word(&state);
    }

    /// Up to when what is known holds, if nobody says that it does not.
    pub fn set_reservations_valid_until(&self, until: Duration) {
        if let Some(sharing) = &mut self.state().sharing {
            sharing.valid_until = until;
        }
    }

    /// The state that daemons share is this now. Returns which tasks have to be aborted by what has changed.
    ///
    /// # Errors
    /// The bytes are no such state.
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
            .ok_or_else(|| format!("version {version} is no state of reservations"))?;
        let before = sharing.version.replace(version);
        sharing.complete_from = shared.complete_from;
        sharing.notices.clone_from(&shared.notices);
        let old = std::mem::replace(&mut state.reservations, shared.reservations);
        let due: Vec<Notice> = match before {
            // Initiators that are here already are told of a power on.
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
            for nexus in state.nexuses_of(&notice.who) {
                if let Some(code) = notice.code {
                    nexus.push_attention(self.id(), code);
                }
                if notice.abort {
                    aborted.push(nexus.id());
                }
            }
        }
        state.allow_removal_by_lost(&old);
        self.refresh_word(&state);
        Ok((!aborted.is_empty()).then(|| AbortScope::fencing(self.id(), aborted)))
    }

    /// What the state that daemons share becomes when the unit is powered on, which is when the first of them comes; `None`: it stays
    /// as it is.
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

/// What initiators here are told when notices of some changes are there no more: the worst that the states before and after allow.
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
    let (kept, lost): (Vec<_>, Vec<_>) = local.partition(|one| stays(&one.who));
    let lost = lost
        .iter()
        .map(|one| notice(&one.who, SenseCode::REGISTRATIONS_PREEMPTED, true));
    let released = old.reservation.is_some() && old.reservation != new.reservation;
    let kept = kept
        .iter()
        .filter(|_| released)
        .map(|one| notice(&one.who, SenseCode::RESERVATIONS_RELEASED, false));
    lost.chain(kept).collect()
}
