//! Several ways to one unit: other portals, or other targets that lead to it (SAM-5, 4.5). One is used at a time, the first that leads to
//! the unit, or one that its target says is better (ALUA).
//!
//! What was sent by another path may still be under way at the target, and a session there does not end by a login here. So the unit is
//! reset before it is used by another path than before: then none of that is done later.

use super::ReconnectSettings;
use crate::session::Session;
use crate::unit::{CommandError, answer};
use crate::{Unit, UnitAddress};

/// Function complete (RFC 7143, 11.6.1).
const COMPLETE: u8 = 0;

impl ReconnectSettings {
    /// Ways to the unit, the address first.
    pub(super) fn ways(&self) -> usize {
        1 + self.paths.len()
    }

    pub(super) fn way(&self, number: usize) -> &UnitAddress {
        match number.checked_sub(1).and_then(|at| self.paths.get(at)) {
            Some(path) => path,
            None => &self.address,
        }
    }
}

/// Opens the unit by this path.
///
/// # Errors
/// Why there is no session, or the unit is of no use there.
pub(super) fn open(settings: &ReconnectSettings, path: usize) -> Result<Unit, CommandError> {
    let UnitAddress {
        portal,
        target,
        lun,
        ..
    } = settings.way(path);
    Unit::open(Session::login(portal, target, &settings.session)?, *lun)
}

/// Nothing that was sent by other paths is done from here on.
///
/// # Errors
/// When the target does not reset units, or the session is over.
pub(super) fn fence(unit: &mut Unit) -> Result<(), CommandError> {
    let lun = unit.lun();
    match unit.session().reset_unit(lun)? {
        COMPLETE => Ok(()),
        response => Err(answer(
            "LOGICAL UNIT RESET",
            format!(
                "response {response}: what was sent by another path could be done later; hint: use one path"
            ),
        )),
    }
}

/// Opens the unit by a path, or by one that its target says is better; the path beside it.
///
/// # Errors
/// Why the path does not lead to it.
pub(super) fn open_better(
    settings: &ReconnectSettings,
    path: usize,
) -> Result<(Unit, usize), CommandError> {
    let mut unit = open(settings, path)?;
    if settings.ways() == 1 || !unit.access()?.is_better_elsewhere() {
        return Ok((unit, path));
    }
    let others = (1..settings.ways()).map(|step| (path + step) % settings.ways());
    for other in others {
        if let Ok(mut better) = open(settings, other)
            && better.info().is_same_unit(unit.info())
            && better
                .access()
                .is_ok_and(|access| !access.is_better_elsewhere())
        {
            return Ok((better, other));
        }
    }
    Ok((unit, path))
}

/// Opens the unit by the first path that leads to it, or a better one. Who had it before may have used any of them.
///
/// # Errors
/// Why the last one does not.
pub(super) fn open_any(settings: &ReconnectSettings) -> Result<(Unit, usize), CommandError> {
    let several = settings.ways() > 1;
    let opened = |path| {
        let (mut unit, path) = open_better(settings, path)?;
        if several {
            fence(&mut unit)?;
        }
        Ok((unit, path))
    };
    let mut result = opened(0);
    for path in 1..settings.ways() {
        if result.is_ok() {
            break;
        }
        result = opened(path);
    }
    result
}
