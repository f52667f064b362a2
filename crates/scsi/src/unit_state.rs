//! Mutable state of a logical unit, off the request path, behind the unit's mutex.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Weak};

use block::DiskInfo;

use crate::copy_results::CopyResults;
use crate::directory::{Store, Unusable};
use crate::logical_unit::UnitId;
use crate::mode::ModePages;
use crate::nexus::{Nexus, NexusId, TargetPort};
use crate::reservations::{DaemonId, Effects, Registrant, Reservations};
use crate::sanitizing::SavedOperation;
use crate::sense::{Sense, SenseCode, SenseKey, SenseSpecific};
use crate::sharing::Sharing;
use crate::table::Needs;

/// Access states (ALUA) that the administrator set, by portal group tag. Other groups are active/optimized.
pub type AccessStates = BTreeMap<u16, AccessState>;

/// Asymmetric access state of a target port group (SPC-5, table 309).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AccessState {
    #[default]
    ActiveOptimized = 0x0,
    ActiveNonOptimized = 0x1,
    Standby = 0x2,
    Unavailable = 0x3,
    Offline = 0xe,
    Transitioning = 0xf,
}

impl AccessState {
    /// States that an administrator or initiator can set.
    pub const SETTABLE: [AccessState; 4] = [
        AccessState::ActiveOptimized,
        AccessState::ActiveNonOptimized,
        AccessState::Standby,
        AccessState::Unavailable,
    ];

    /// Name of the state in SPC.
    pub const fn name(self) -> &'static str {
        match self {
            AccessState::ActiveOptimized => "active/optimized",
            AccessState::ActiveNonOptimized => "active/non-optimized",
            AccessState::Standby => "standby",
            AccessState::Unavailable => "unavailable",
            AccessState::Offline => "offline",
            AccessState::Transitioning => "transitioning",
        }
    }

    /// Returns true if a port in this state accepts all commands.
    pub fn is_active(self) -> bool {
        matches!(
            self,
            AccessState::ActiveOptimized | AccessState::ActiveNonOptimized
        )
    }
}

/// STATUS CODE of a target port group: the reason for its access state (SPC-5, 6.36).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StateReason {
    /// No status available: the state has never changed.
    #[default]
    Unchanged = 0x00,
    /// Altered by SET TARGET PORT GROUPS.
    Explicit = 0x01,
    /// Altered by implicit asymmetric logical unit access behavior.
    Implicit = 0x02,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupState {
    pub access: AccessState,
    pub reason: StateReason,
}

/// Operation on the whole medium, which excludes all other commands on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// SBC-4, 4.11.
    Sanitize,
    /// FORMAT UNIT with an initialization pattern (SBC-4, 5.4).
    Format,
}

/// Progress of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Idle,
    /// Progress in 65,536ths.
    Running(Operation, u16),
    /// The content of the medium is undefined.
    Failed(Operation),
}

impl Progress {
    /// Returns true if this is a failure that `operation` repairs: the same operation, or a sanitize operation after a failed format.
    pub fn is_repaired_by(self, operation: Operation) -> bool {
        matches!(self, Progress::Failed(failed) if operation == Operation::Sanitize || operation == failed)
    }
}

/// State of the medium and the reasons that keep it loaded.
#[derive(Debug)]
pub(crate) struct Medium {
    /// Only a removable medium can be ejected.
    pub loaded: bool,
    /// Nexuses that have prevented its removal.
    pub prevented_by: Vec<NexusId>,
    /// Number of holds by transports, not by initiators.
    pub holds: usize,
}

#[derive(Debug)]
pub(crate) struct UnitState {
    pub info: DiskInfo,
    pub modes: ModePages,
    pub nexuses: Vec<Weak<Nexus>>,
    /// Lost nexuses. Their tasks may still have I/O in flight until they are dropped.
    pub lost_nexuses: Vec<Weak<Nexus>>,
    /// Ports of all targets that have the unit, by number: [`UnitState::ports`].
    pub attached_ports: Vec<Arc<TargetPort>>,
    pub reservations: Reservations,
    pub medium: Medium,
    pub progress: Progress,
    /// AUSE: a failed sanitize operation may be left without a new one.
    pub sanitize_may_exit: bool,
    /// Operation that a restart interrupted.
    pub unfinished: Option<SavedOperation>,
    /// Saved form of the operation; empty without one.
    pub operation: Vec<u8>,
    /// Access states of target port groups that have changed at least once.
    pub groups: BTreeMap<u16, GroupState>,
    pub copies: CopyResults,
    /// State shared with other daemons that serve the medium.
    pub sharing: Option<Sharing>,
    /// Kinds of saved state that cannot be used, with the reason. Each has its default value here.
    pub unknown: Vec<(Saved, String)>,
}

/// Names of the kinds of state that initiators set: registrations and reservations, mode pages with other values than the defaults, an
/// unfinished SANITIZE or FORMAT UNIT, an ejected medium.
pub(crate) const INITIATOR_STATE: [&str; 4] = ["reservations", "mode-pages", "sanitize", "ejected"];

/// Kinds of state that a unit saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saved {
    /// Registrations and reservation with APTPL.
    Reservations,
    ModePages,
    /// A SANITIZE or FORMAT UNIT operation that has not succeeded.
    Operation,
}

impl Saved {
    const ALL: [Saved; 3] = [Saved::Reservations, Saved::ModePages, Saved::Operation];

    /// Returns the key in the store. It contains the identity: another disk of the same name has other keys.
    fn key(self, info: &DiskInfo) -> String {
        let kind = match self {
            Saved::Reservations => "reservations",
            Saved::ModePages => "mode-pages",
            Saved::Operation => "sanitize",
        };
        format!("{kind}-{}", info.identity)
    }
}

/// Removes the saved state of a disk that was deleted.
pub fn forget(store: &dyn Store, info: &DiskInfo) {
    for kind in Saved::ALL {
        store.remove(&kind.key(info));
    }
}

/// Returns the kinds of state that initiators have set and that is saved for a disk without a logical unit. May block.
pub fn saved_initiator_state(store: &dyn Store, info: DiskInfo) -> Vec<&'static str> {
    let state = UnitState::new(store, info).initiator_state();
    let names = INITIATOR_STATE.into_iter().zip(state);
    names
        .filter_map(|(name, is_set)| is_set.then_some(name))
        .collect()
}

impl UnitState {
    /// Creates the state after power on, including the saved state in the store.
    pub fn new(store: &dyn Store, info: DiskInfo) -> UnitState {
        let mut state = UnitState {
            progress: Progress::Idle,
            sanitize_may_exit: false,
            unfinished: None,
            operation: Vec::new(),
            modes: ModePages::new(&info),
            reservations: Reservations::default(),
            info,
            nexuses: Vec::new(),
            lost_nexuses: Vec::new(),
            attached_ports: Vec::new(),
            medium: Medium {
                loaded: true,
                prevented_by: Vec::new(),
                holds: 0,
            },
            groups: BTreeMap::new(),
            copies: CopyResults::default(),
            sharing: None,
            unknown: Vec::new(),
        };
        for kind in Saved::ALL {
            state.load(store, kind);
        }
        state
    }

    /// Loads saved state of one kind. State that cannot be used is recorded as unknown.
    fn load(&mut self, store: &dyn Store, kind: Saved) {
        let key = kind.key(&self.info);
        let loaded = store.load(&key).map(Option::unwrap_or_default);
        let restored = match loaded {
            Err(Unusable(reason)) => Err(reason),
            Ok(bytes) if self.restore(kind, &bytes) => Ok(()),
            Ok(_) => Err(format!("{key}: unknown format")),
        };
        let Err(reason) = restored else { return };
        if kind == Saved::Operation {
            // Closes the disk to transports that do not check for unknown state.
            self.progress = Progress::Failed(Operation::Sanitize);
        }
        self.unknown.push((kind, reason));
    }

    /// Restores saved state of one kind from its bytes. Returns false if they are malformed.
    fn restore(&mut self, kind: Saved, bytes: &[u8]) -> bool {
        match kind {
            Saved::Reservations => {
                let Some(reservations) = Reservations::decode(bytes) else {
                    return false;
                };
                self.reservations = reservations;
            }
            Saved::ModePages => return self.modes.restore(bytes),
            Saved::Operation => {
                let saved_operation =
                    SavedOperation::decode(bytes, self.info.geometry.block_size() as usize);
                self.progress = match &saved_operation {
                    None => Progress::Idle,
                    Some(saved_operation) if saved_operation.failed => {
                        Progress::Failed(saved_operation.operation)
                    }
                    Some(saved_operation) => Progress::Running(saved_operation.operation, 0),
                };
                self.sanitize_may_exit = saved_operation
                    .as_ref()
                    .is_some_and(|saved_operation| saved_operation.may_exit);
                self.unfinished = saved_operation.filter(|saved_operation| !saved_operation.failed);
                self.operation = bytes.to_vec();
            }
        }
        true
    }

    /// Reloads the kinds of saved state that are unknown.
    pub fn reload_unknown(&mut self, store: &dyn Store) {
        for (kind, _) in std::mem::take(&mut self.unknown) {
            self.load(store, kind);
        }
    }

    /// Saves registrations and reservation, if APTPL requests it.
    pub fn save_reservations(&self, store: &dyn Store) -> Result<(), Sense> {
        let saved = store.save(
            &Saved::Reservations.key(&self.info),
            &self.reservations.encode(),
        );
        saved.map_err(|_| store_failed())
    }

    /// Saves a sanitize or format operation; `None` if there is none any more.
    pub fn save_operation(
        &mut self,
        store: &dyn Store,
        saved_operation: Option<&SavedOperation>,
    ) -> Result<(), Sense> {
        let bytes = saved_operation
            .map(SavedOperation::encode)
            .unwrap_or_default();
        store
            .save(&Saved::Operation.key(&self.info), &bytes)
            .map_err(|_| store_failed())?;
        self.operation = bytes;
        Ok(())
    }

    /// Saves the state under this key again. Does nothing if the unit does not have that state, or it is unknown.
    pub fn save_again(&self, store: &dyn Store, key: &str) -> io::Result<()> {
        let is_unknown = |kind| self.unknown.iter().any(|(unknown, _)| *unknown == kind);
        let mut kinds = Saved::ALL.into_iter();
        let Some(kind) = kinds.find(|kind| kind.key(&self.info) == key && !is_unknown(*kind))
        else {
            return Ok(());
        };
        let bytes = match kind {
            // The image has them.
            Saved::Reservations if self.sharing.is_some() => return Ok(()),
            Saved::Reservations => self.reservations.encode(),
            Saved::ModePages => self.modes.encode_saved(),
            Saved::Operation => self.operation.clone(),
        };
        store.save(key, &bytes)
    }

    pub fn save_modes(&self, store: &dyn Store) -> Result<(), Sense> {
        store
            .save(
                &Saved::ModePages.key(&self.info),
                &self.modes.encode_saved(),
            )
            .map_err(|_| store_failed())
    }

    /// Returns the kinds of state that initiators have set, in the order of [`INITIATOR_STATE`].
    pub fn initiator_state(&self) -> [bool; INITIATOR_STATE.len()] {
        let is_unknown = |kind| self.unknown.iter().any(|(unknown, _)| *unknown == kind);
        // The shared state has the registrations of other daemons too. The holder of a persistent reservation is registered.
        let is_here = |who: &Registrant| self.sharing.is_none() || who.daemon == DaemonId::THIS;
        let mut registrations = self.reservations.registrations.iter();
        let is_registered = registrations.any(|one| is_here(&one.who));
        let is_reserved = self.reservations.reserved_by.is_some();
        [
            is_registered || is_reserved || is_unknown(Saved::Reservations),
            self.modes.is_changed() || is_unknown(Saved::ModePages),
            self.progress != Progress::Idle || is_unknown(Saved::Operation),
            !self.medium.loaded,
        ]
    }

    /// Adds a unit attention for every nexus except one.
    pub fn attention_all(&self, unit: UnitId, code: SenseCode, but: Option<&Nexus>) {
        for nexus in self.nexuses.iter().filter_map(Weak::upgrade) {
            if !but.is_some_and(|but| but.id() == nexus.id()) {
                nexus.push_attention(unit, code);
            }
        }
    }

    /// Returns the ports through which the unit is reached, ascending. Ports of several targets with the same number are one port.
    pub fn ports(&self) -> impl Iterator<Item = &Arc<TargetPort>> {
        let mut last = None;
        let is_new =
            move |port: &&Arc<TargetPort>| last.replace(port.relative_id) != Some(port.relative_id);
        self.attached_ports.iter().filter(is_new)
    }

    pub fn nexuses_of(&self, who: &Registrant) -> impl Iterator<Item = Arc<Nexus>> {
        self.nexuses
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|nexus| who.is(nexus))
    }

    /// Returns the nexuses whose tasks PREEMPT AND ABORT must end: also lost ones, whose I/O in flight could otherwise change
    /// the medium after the response.
    pub fn nexuses_to_abort(&self, who: &Registrant) -> impl Iterator<Item = Arc<Nexus>> {
        let all = self.nexuses.iter().chain(&self.lost_nexuses);
        all.filter_map(Weak::upgrade).filter(|nexus| who.is(nexus))
    }

    /// Adds the unit attentions of a reservation service.
    pub fn establish(&self, unit: UnitId, effects: &Effects) {
        for (who, code) in &effects.attentions {
            for nexus in self.nexuses_of(who) {
                nexus.push_attention(unit, *code);
            }
        }
    }

    /// Allows removal of the medium again for nexuses that prevented it and have lost their registration (SBC-4, 5.15).
    pub fn allow_removal_by_lost(&mut self, before: &Reservations) {
        let known = &self.reservations.registrations;
        let lost = before.registrations.iter().map(|one| &one.who);
        let lost = lost.filter(|who| known.iter().all(|one| one.who != **who));
        let gone: Vec<_> = lost.flat_map(|who| self.nexuses_of(who)).collect();
        self.medium
            .prevented_by
            .retain(|preventing| gone.iter().all(|nexus| nexus.id() != *preventing));
    }

    /// Returns true if the unit accepts every command, apart from the access states of its ports.
    pub fn ready(&self) -> bool {
        self.unknown.is_empty() && self.medium.loaded && self.progress == Progress::Idle
    }

    /// Returns true if the access state of some port group limits commands.
    pub fn limits_ports(&self) -> bool {
        self.groups.values().any(|group| !group.access.is_active())
    }

    /// Returns the sense data for a command that the unit's state does not allow.
    pub fn check_ready(&self, nexus: &Nexus, needs: Needs) -> Result<(), Sense> {
        if needs == Needs::Nothing {
            return Ok(());
        }
        let not_ready = |code| Err(Sense::new(SenseKey::NotReady, code));
        match self.access_state(nexus.port().group) {
            AccessState::ActiveOptimized | AccessState::ActiveNonOptimized => {}
            AccessState::Standby if needs.allows_standby() => {}
            AccessState::Standby => return not_ready(SenseCode::PORT_STANDBY),
            AccessState::Transitioning => return not_ready(SenseCode::ASYMMETRIC_TRANSITION),
            AccessState::Unavailable | AccessState::Offline => {
                return not_ready(SenseCode::PORT_UNAVAILABLE);
            }
        }
        if needs == Needs::Port {
            return Ok(());
        }
        if let Some(sense) = self.operation_sense() {
            return Err(sense);
        }
        if matches!(needs, Needs::Medium | Needs::Capacity) && !self.medium.loaded {
            return not_ready(SenseCode::MEDIUM_NOT_PRESENT);
        }
        Ok(())
    }

    /// Returns the sense data for commands during or after an operation on the whole medium.
    pub fn operation_sense(&self) -> Option<Sense> {
        match self.progress {
            Progress::Idle => None,
            Progress::Running(operation, done) => {
                let code = match operation {
                    Operation::Sanitize => SenseCode::SANITIZE_IN_PROGRESS,
                    Operation::Format => SenseCode::FORMAT_IN_PROGRESS,
                };
                let sense = Sense::new(SenseKey::NotReady, code);
                Some(sense.with_specific(SenseSpecific::Progress(done)))
            }
            Progress::Failed(operation) => {
                let code = match operation {
                    Operation::Sanitize => SenseCode::SANITIZE_FAILED,
                    Operation::Format => SenseCode::MEDIUM_FORMAT_CORRUPTED,
                };
                Some(Sense::new(SenseKey::MediumError, code))
            }
        }
    }

    /// Sets the access state of a port group. Returns false if the group is in that state already.
    pub fn set_group(&mut self, group: u16, access: AccessState, reason: StateReason) -> bool {
        let changed = self.access_state(group) != access;
        if changed {
            self.groups.insert(group, GroupState { access, reason });
        }
        changed
    }

    pub fn group_state(&self, group: u16) -> GroupState {
        self.groups.get(&group).copied().unwrap_or_default()
    }

    pub fn access_state(&self, group: u16) -> AccessState {
        self.group_state(group).access
    }

    /// Releases the RESERVE, the prevention of removal and the copy results of a lost nexus (SAM-5, 6.3.4).
    pub fn nexus_lost(&mut self, nexus: &Nexus) {
        self.reservations
            .reserved_by
            .take_if(|holder| *holder == nexus.id());
        self.medium
            .prevented_by
            .retain(|preventing| *preventing != nexus.id());
        self.copies.forget(nexus.id());
    }

    /// Resets the unit: RESERVE, prevention of removal and unsaved mode pages are dropped; persistent reservations stay.
    pub fn reset(&mut self) {
        self.reservations.reserved_by = None;
        self.medium.prevented_by.clear();
        self.modes.reset();
        self.copies = CopyResults::default();
    }
}

fn store_failed() -> Sense {
    Sense::new(SenseKey::HardwareError, SenseCode::INTERNAL_TARGET_FAILURE)
}
