//! RESERVE and RELEASE (SPC-2, 7.19 to 7.22): reserve the whole logical unit for one nexus. Third-party and extent reservations are
//! obsolete.

use super::{Context, Planned};
use crate::plan::Plan;
use crate::reservations::{Refusal, Reservations};
use crate::response::Response;

pub(super) fn reserve(c: &Context<'_>) -> Planned {
    serve(c, |reservations| reservations.reserve_unit(c.nexus))
}

pub(super) fn release(c: &Context<'_>) -> Planned {
    serve(c, |reservations| reservations.release_unit(c.nexus))
}

fn serve(
    c: &Context<'_>,
    service: impl FnOnce(&mut Reservations) -> Result<(), Refusal>,
) -> Planned {
    let mut state = c.unit.state();
    let served = service(&mut state.reservations);
    c.unit.refresh_word(&state);
    Ok(Plan::Done(match served {
        Ok(()) => Response::good(),
        Err(refusal) => refusal.into(),
    }))
}
