//! Multiple paths to one unit: other portals, or other targets that lead to it (SAM-5, 4.5). One is used at a time: the
//! first that leads to the unit, or one that its target reports as better (ALUA).
//!
//! Commands sent on another path may still be in progress at the target, and a login here does not end a session there. The
//! unit is therefore reset before use on a different path, so that none of these commands takes effect later.

use super::ReconnectSettings;
use crate::session::Session;
use crate::unit::{CommandError, answer};
use crate::{Evidence, Sameness, Unit, UnitAddress, UnitInfo};

/// Function complete (RFC 7143, 11.6.1).
const COMPLETE: u8 = 0;

impl ReconnectSettings {
    /// Returns the number of paths, including the address.
    pub(super) fn path_count(&self) -> usize {
        1 + self.paths.len()
    }

    pub(super) fn path_address(&self, number: usize) -> &UnitAddress {
        match number.checked_sub(1).and_then(|at| self.paths.get(at)) {
            Some(path) => path,
            None => &self.address,
        }
    }

    /// Returns true if the unit found by path `path` may replace `known`, which was found by path `known_path`. On a
    /// different path its identity must be proven.
    pub(super) fn is_usable(
        &self,
        (unit, path): (&UnitInfo, usize),
        (known, known_path): (&UnitInfo, usize),
    ) -> bool {
        let same_target = self
            .path_address(path)
            .has_same_target(self.path_address(known_path));
        match unit.compare(known, same_target) {
            Sameness::Proven => true,
            Sameness::Possible => path == known_path || self.trusts_paths,
            Sameness::Different => false,
        }
    }

    /// Refuses a unit that is not the one of earlier sessions.
    ///
    /// # Errors
    /// The path with the names of both units.
    fn check_known(&self, unit: &Unit, path: usize) -> Result<(), CommandError> {
        let (way, found) = (self.path_address(path), &unit.info().identity);
        match self.known.compare(&way.target, found) {
            Evidence::Same | Evidence::None => Ok(()),
            Evidence::Different => Err(CommandError::OtherUnit {
                message: format!(
                    "path {way} leads to another logical unit than before: found {found}, expected {}; hint: {}",
                    self.known, self.known.remedy
                ),
            }),
        }
    }

    /// Refuses a unit with several paths if its identity cannot be checked on all of them.
    ///
    /// # Errors
    /// The refused path, with a hint.
    fn check_identity(&self, unit: &UnitInfo, path: usize) -> Result<(), CommandError> {
        let is_unchecked = |other: &usize| !self.is_usable((unit, *other), (unit, path));
        let Some(other) = (0..self.path_count()).find(is_unchecked) else {
            return Ok(());
        };
        let why = match unit.identity.local_name() {
            Some(name) => {
                format!("{name} is locally assigned and may name another unit at another target")
            }
            None => "it reports no world wide name and no serial number".to_owned(),
        };
        Err(answer(
            "INQUIRY",
            format!(
                "the path {} is refused because the identity of the unit cannot be checked: {why}; hint: set an identifier or a serial number at the target, use one path, or set trust_paths = true if all paths lead to the same unit",
                // Names the other path, not the address itself.
                self.path_address(other.max(path))
            ),
        ))
    }
}

/// Opens the unit on this path.
///
/// # Errors
/// The reason for the missing session or the unusable unit.
pub(super) fn open(settings: &ReconnectSettings, path: usize) -> Result<Unit, CommandError> {
    let UnitAddress {
        portal,
        target,
        lun,
        ..
    } = settings.path_address(path);
    let unit = Unit::open(Session::login(portal, target, &settings.session)?, *lun)?;
    settings.check_known(&unit, path)?;
    Ok(unit)
}

/// Resets the unit, so that commands sent on other paths have no later effect.
///
/// # Errors
/// If the target does not support the reset, or the session has ended.
pub(super) fn fence(unit: &mut Unit) -> Result<(), CommandError> {
    let lun = unit.lun();
    match unit.session().reset_unit(lun)? {
        COMPLETE => Ok(()),
        response => Err(answer(
            "LOGICAL UNIT RESET",
            format!(
                "response {response}: commands sent through another path may still execute; hint: use one path"
            ),
        )),
    }
}

/// Opens the unit on a path, or on one that its target reports as better. Returns the path too.
///
/// # Errors
/// The reason why the path does not lead to the unit.
pub(super) fn open_better(
    settings: &ReconnectSettings,
    path: usize,
) -> Result<(Unit, usize), CommandError> {
    let mut unit = open(settings, path)?;
    if settings.path_count() == 1 || !unit.access()?.prefers_another_port() {
        return Ok((unit, path));
    }
    let others = (1..settings.path_count()).map(|step| (path + step) % settings.path_count());
    for other in others {
        if let Ok(mut better) = open(settings, other)
            && settings.is_usable((better.info(), other), (unit.info(), path))
            && better
                .access()
                .is_ok_and(|access| !access.prefers_another_port())
        {
            return Ok((better, other));
        }
    }
    Ok((unit, path))
}

/// Opens the unit on the first path that leads to it, or a better one. Resets it if there are several paths, because an
/// earlier user may have used any of them.
///
/// # Errors
/// A path that leads to another unit, or the error of the last path.
pub(super) fn open_any(settings: &ReconnectSettings) -> Result<(Unit, usize), CommandError> {
    let several = settings.path_count() > 1;
    let opened = |path| {
        let (mut unit, path) = open_better(settings, path)?;
        settings.check_identity(unit.info(), path)?;
        if several {
            fence(&mut unit)?;
        }
        Ok((unit, path))
    };
    let mut refused = None;
    let mut result = opened(0);
    for path in 1..settings.path_count() {
        if result.is_ok() {
            break;
        }
        if let Err(error @ CommandError::OtherUnit { .. }) = result {
            refused = Some(error);
        }
        result = opened(path);
    }
    match (refused, &result) {
        (Some(refused), Ok(_)) => tracing::warn!("path refused: {refused}"),
        (Some(refused), Err(_)) => return Err(refused),
        (None, _) => {}
    }
    result
}
