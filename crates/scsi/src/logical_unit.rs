//! A logical unit: the SCSI view of one disk, shared by all its targets and workers.
//!
//! The request path reads two atomics that rarely change: the capacity and the word. The lower half of the word is zero in the normal
//! state; its slow bits send commands to the path that takes the mutex.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use block::{DiskInfo, Geometry, Passthrough};

use crate::directory::Directory;
use crate::nexus::{Nexus, TargetPort};
use crate::plan::Run;
use crate::reservations::ReservationStatus;
use crate::sense::SenseCode;
use crate::sync::lock;
use crate::unit_state::{AccessState, INITIATOR_STATE, Progress, StateReason, UnitState};

/// Key for a disk and its backend, assigned by the caller and not interpreted here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskId(pub u32);

/// Identifier of a logical unit, unique within the process and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnitId(u32);

impl UnitId {
    #[cfg(test)]
    pub(crate) const fn new(id: u32) -> UnitId {
        UnitId(id)
    }

    /// Returns true if unit attentions of the other unit can send commands for this one to the slow path.
    pub const fn shares_filter_bit_with(self, other: UnitId) -> bool {
        self.filter_index() == other.filter_index()
    }

    pub(crate) const fn number(self) -> u32 {
        self.0
    }

    pub(crate) const fn filter_index(self) -> usize {
        (self.0 & 63) as usize
    }

    pub(crate) const fn filter_bit(self) -> u64 {
        1 << self.filter_index()
    }
}

/// Summary of the unit's state for every command. The upper half counts its changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word(pub u64);

impl Word {
    /// A reservation is held.
    pub const RESERVED: u64 = 1;
    /// Ejected, being sanitized, or being formatted.
    pub const NOT_READY: u64 = 1 << 1;
    /// Other daemons may change the reservations: the local copy is valid for a limited time only.
    pub const SHARED: u64 = 1 << 2;
    /// The access state of some port group limits commands.
    pub const PORTS_LIMITED: u64 = 1 << 3;
    const SLOW: u64 = 0xffff;
    /// Writes are refused. This bit and the following ones are read where they matter, without a lock.
    pub const WRITE_PROTECTED: u64 = 1 << 16;
    /// The volatile cache is disabled: every write is FUA.
    pub const WRITE_THROUGH: u64 = 1 << 17;
    /// Sense data is in descriptor format.
    pub const DESCRIPTOR_SENSE: u64 = 1 << 18;
    /// First bit of the kinds of state that initiators have set.
    const INITIATOR_STATE_SHIFT: u32 = 19;
    const EPOCH_SHIFT: u32 = 32;

    #[inline]
    pub const fn is_slow(self) -> bool {
        self.0 & Word::SLOW != 0
    }

    /// Returns true if the only special state is a reservation or the access state of a port: a nexus that neither of them restricts takes
    /// the fast path ([`Nexus::is_privileged`]).
    #[inline]
    pub const fn depends_on_nexus(self) -> bool {
        let slow = self.0 & Word::SLOW;
        slow != 0 && slow & !(Word::RESERVED | Word::PORTS_LIMITED) == 0
    }

    /// Returns the epoch, which changes whenever state behind the unit's mutex may have changed.
    #[inline]
    pub const fn epoch(self) -> u32 {
        (self.0 >> Word::EPOCH_SHIFT) as u32
    }

    #[inline]
    pub const fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }
}

/// Operations of a unit on its disk, besides I/O.
pub trait Medium: Send + Sync + std::fmt::Debug {
    /// Closes the disk to all I/O except that of [`block::IoFlags::CLOSER`], or opens it again. This includes transports that do not use
    /// this unit. Called with the unit locked; must be quick.
    fn set_closed(&self, closed: bool) {
        let _ = closed;
    }

    /// Returns false if another daemon may have changed the size of the disk: only the device can then check ranges.
    fn is_size_known(&self) -> bool {
        true
    }
}

/// Parameters of a new logical unit.
#[derive(Clone, Debug)]
pub struct UnitConfig {
    /// The unit's disk.
    pub disk: DiskId,
    /// Capabilities of the disk.
    pub info: DiskInfo,
    /// The medium can be ejected and loaded (START STOP UNIT).
    pub removable: bool,
    /// Operations on the disk besides I/O.
    pub medium: Option<Arc<dyn Medium>>,
}

/// A logical unit.
#[derive(Debug)]
pub struct LogicalUnit {
    id: UnitId,
    disk: DiskId,
    /// Permanent block parameters, with the initial capacity.
    first_geometry: Geometry,
    capacity_bytes: AtomicU64,
    word: AtomicU64,
    naa: u64,
    removable: bool,
    passthrough: Option<Passthrough>,
    medium: Option<Arc<dyn Medium>>,
    copies_from_anywhere: AtomicBool,
    directory: Arc<Directory>,
    state: Mutex<UnitState>,
}

impl LogicalUnit {
    /// Creates a logical unit on a disk and adds it to the directory.
    pub fn new(directory: &Arc<Directory>, config: UnitConfig) -> Arc<LogicalUnit> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let UnitConfig {
            disk,
            info,
            removable,
            medium,
        } = config;
        let unit = Arc::new(LogicalUnit {
            id: UnitId(NEXT.fetch_add(1, Ordering::Relaxed)),
            disk,
            first_geometry: info.geometry,
            capacity_bytes: AtomicU64::new(info.geometry.capacity_bytes()),
            word: AtomicU64::new(0),
            naa: info.naa,
            removable,
            passthrough: info.passthrough,
            medium,
            copies_from_anywhere: AtomicBool::new(false),
            directory: Arc::clone(directory),
            state: Mutex::new(UnitState::new(directory.store(), info)),
        });
        unit.tell_progress(&unit.state());
        unit.refresh_word(&unit.state());
        directory.add(&unit);
        unit
    }

    /// Returns the unit's identifier within the process.
    pub fn id(&self) -> UnitId {
        self.id
    }

    /// Returns the unit's disk.
    pub fn disk(&self) -> DiskId {
        self.disk
    }

    /// Returns the NAA identifier, which is the same on all transports.
    pub fn naa(&self) -> u64 {
        self.naa
    }

    /// Allows EXTENDED COPY commands of all targets to reach the unit, not only of targets that have it. Off by default: otherwise any
    /// initiator with the unit's name could read and write the disk.
    pub fn allow_copies_from_anywhere(&self, allow: bool) {
        self.copies_from_anywhere.store(allow, Ordering::Release);
    }

    pub(crate) fn copies_from_anywhere(&self) -> bool {
        self.copies_from_anywhere.load(Ordering::Acquire)
    }

    /// Returns the access state of a target port group.
    pub fn access_state(&self, group: u16) -> AccessState {
        self.state().access_state(group)
    }

    /// Sets the access state of a target port group on behalf of the administrator: an implicit change (SPC-4, 5.15.2.5).
    /// Establishes a unit attention condition for every nexus.
    pub fn set_access_state(&self, group: u16, access: AccessState) {
        let mut state = self.state();
        if !state.set_group(group, access, StateReason::Implicit) {
            return;
        }
        state.attention_all(self.id, SenseCode::ASYMMETRIC_STATE_CHANGED, None);
        self.refresh_word(&state);
    }

    /// Prevents ejection of the medium until the hold is dropped, and loads it if it was ejected: for transports without removable media.
    /// Initiators are informed that removal is prevented.
    pub fn hold_medium(self: &Arc<Self>) -> MediumHold {
        let mut state = self.state();
        state.medium.holds += 1;
        self.set_loaded(&mut state, true, None);
        MediumHold(Arc::clone(self))
    }

    /// Ejects or loads the medium. After a load, all nexuses except one get a unit attention, because the medium may have changed.
    pub(crate) fn set_loaded(&self, state: &mut UnitState, load: bool, but: Option<&Nexus>) {
        if load && !state.medium.loaded {
            state.attention_all(self.id, SenseCode::MEDIUM_MAY_HAVE_CHANGED, but);
        }
        state.medium.loaded = load;
        self.refresh_word(state);
    }

    /// Returns a sanitize or format operation that a restart interrupted, to be run to its end on any worker. Until then the unit is not
    /// ready. If the run is dropped, the operation has failed.
    pub fn resume_operation(self: &Arc<Self>) -> Option<Box<Run>> {
        let saved_operation = self.state().unfinished.take()?;
        Some(crate::commands::resume_operation(
            Arc::clone(self),
            saved_operation,
        ))
    }

    /// Returns block size and current capacity.
    #[inline]
    pub fn geometry(&self) -> Geometry {
        self.first_geometry
            .resized(self.capacity_bytes.load(Ordering::Acquire))
    }

    /// Returns the geometry for ranges that [`LogicalUnit::geometry`] refuses: without an end if another daemon may have enlarged the disk.
    #[cold]
    pub(crate) fn geometry_of_refused(&self) -> Geometry {
        match &self.medium {
            Some(medium) if !medium.is_size_known() => self.geometry().unbounded(),
            _ => self.geometry(),
        }
    }

    /// Takes over changed properties of the disk: a resize or other features. A new capacity establishes a unit attention for every nexus.
    /// The block size does not change.
    pub fn update(&self, info: DiskInfo) {
        let mut state = self.state();
        let bytes = info.geometry.capacity_bytes();
        let resized = self.capacity_bytes.swap(bytes, Ordering::AcqRel) != bytes;
        let geometry = self.first_geometry.resized(bytes);
        state.info = DiskInfo { geometry, ..info };
        if resized {
            state.attention_all(self.id, SenseCode::CAPACITY_CHANGED, None);
        }
        self.refresh_word(&state);
    }

    /// Returns registrations and reservations.
    pub fn reservations(&self) -> ReservationStatus {
        ReservationStatus::of(&self.state().reservations)
    }

    /// Returns the kinds of state that initiators have set, without the unit's mutex: `reservations`, `mode-pages` with other values than
    /// the defaults, `sanitize` for an unfinished SANITIZE or FORMAT UNIT, and `ejected`.
    pub fn initiator_state(&self) -> impl Iterator<Item = &'static str> + use<> {
        let word = self.word().0;
        let names = (Word::INITIATOR_STATE_SHIFT..).zip(INITIATOR_STATE);
        names.filter_map(move |(bit, name)| (word >> bit & 1 != 0).then_some(name))
    }

    #[inline]
    pub(crate) fn word(&self) -> Word {
        Word(self.word.load(Ordering::Acquire))
    }

    /// Returns the properties of the device's pass-through, if the device executes commands itself.
    pub(crate) fn passthrough(&self) -> Option<Passthrough> {
        self.passthrough
    }

    pub(crate) fn removable(&self) -> bool {
        self.removable
    }

    /// Sets the progress of an operation on the whole medium, and closes or opens the disk accordingly.
    pub(crate) fn set_progress(&self, state: &mut UnitState, progress: Progress) {
        let closed = |progress: &Progress| *progress != Progress::Idle;
        let before = std::mem::replace(&mut state.progress, progress);
        if closed(&before) != closed(&state.progress) {
            self.tell_progress(state);
        }
        self.refresh_word(state);
    }

    fn tell_progress(&self, state: &UnitState) {
        if let Some(medium) = &self.medium {
            medium.set_closed(state.progress != Progress::Idle);
        }
    }

    pub(crate) fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, UnitState> {
        lock(&self.state)
    }

    /// Updates the word from the state. Called before the lock on a changed state is released.
    pub(crate) fn refresh_word(&self, state: &UnitState) {
        let epoch = self.word().epoch().wrapping_add(1);
        let mut word = u64::from(epoch) << Word::EPOCH_SHIFT;
        if state.info.read_only || state.modes.software_write_protect() {
            word |= Word::WRITE_PROTECTED;
        }
        if state.info.write_cache && !state.modes.write_cache() {
            word |= Word::WRITE_THROUGH;
        }
        if state.modes.descriptor_sense() {
            word |= Word::DESCRIPTOR_SENSE;
        }
        if state.reservations.held() {
            word |= Word::RESERVED;
        }
        if !state.ready() {
            word |= Word::NOT_READY;
        }
        if state.sharing.is_some() {
            word |= Word::SHARED;
        }
        if state.limits_ports() {
            word |= Word::PORTS_LIMITED;
        }
        for (bit, is_set) in (Word::INITIATOR_STATE_SHIFT..).zip(state.initiator_state()) {
            word |= u64::from(is_set) << bit;
        }
        self.word.store(word, Ordering::Release);
    }

    /// Returns the reason why the unit's saved state cannot be used, if it cannot. Commands affected by reservations are then answered
    /// BUSY.
    pub fn unknown_state(&self) -> Option<String> {
        let state = self.state();
        state.unknown.first().map(|(_, reason)| reason.clone())
    }

    /// Reloads saved state that was unusable, after it was reset on purpose. Returns true if all state is known now.
    pub fn reload_unknown_state(&self) -> bool {
        let mut state = self.state();
        state.reload_unknown(self.directory.store());
        self.tell_progress(&state);
        self.refresh_word(&state);
        state.unknown.is_empty()
    }

    /// Saves the state under this key again, after its file was reset. Does nothing if the unit does not have that state.
    ///
    /// # Errors
    /// The store cannot save it.
    pub fn save_again(&self, key: &str) -> std::io::Result<()> {
        self.state().save_again(self.directory.store(), key)
    }

    pub(crate) fn attach_nexus(&self, nexus: &Arc<Nexus>) {
        let mut state = self.state();
        state.nexuses.retain(|known| known.strong_count() > 0);
        if state
            .nexuses
            .iter()
            .any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(nexus)))
        {
            return;
        }
        state.nexuses.push(Arc::downgrade(nexus));
        nexus.push_attention(self.id, SenseCode::POWER_ON);
    }

    pub(crate) fn detach_nexus(&self, nexus: &Arc<Nexus>) {
        let mut state = self.state();
        let is_gone = |known: &Weak<Nexus>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(nexus));
        state.nexuses.retain(|known| !is_gone(known));
        state
            .lost_nexuses
            .retain(|known| known.strong_count() > 0 && !is_gone(known));
        state.lost_nexuses.push(Arc::downgrade(nexus));
        state.nexus_lost(nexus);
        self.refresh_word(&state);
        nexus.drop_attentions(self.id);
    }

    /// Performs a logical unit reset (SAM-5, 6.3.3), also as part of a target reset.
    pub(crate) fn reset(&self) {
        let mut state = self.state();
        state.reset();
        state.attention_all(self.id, SenseCode::BUS_DEVICE_RESET, None);
        self.refresh_word(&state);
    }

    /// Releases non-persistent state of a lost nexus.
    pub(crate) fn nexus_lost(&self, nexus: &Nexus) {
        let mut state = self.state();
        state.nexus_lost(nexus);
        self.refresh_word(&state);
    }

    /// Adds a port of a target that has the unit. Targets of the same name, such as the two controllers of a guest that migrates, have
    /// ports with the same number. The latest of them is the first in the list.
    pub(crate) fn attach_port(&self, port: &Arc<TargetPort>) {
        let mut state = self.state();
        state
            .attached_ports
            .retain(|known| !Arc::ptr_eq(known, port));
        let before = |known: &Arc<TargetPort>| known.relative_id < port.relative_id;
        let at = state.attached_ports.partition_point(before);
        state.attached_ports.insert(at, Arc::clone(port));
    }

    /// Removes the ports of a target that no longer has the unit, and the access state of each group that has no other port.
    pub(crate) fn detach_ports(&self, ports: &[Arc<TargetPort>]) {
        let mut state = self.state();
        let UnitState {
            attached_ports: known,
            groups,
            ..
        } = &mut *state;
        known.retain(|one| ports.iter().all(|port| !Arc::ptr_eq(one, port)));
        groups.retain(|group, _| known.iter().any(|port| port.group == *group));
        self.refresh_word(&state);
    }
}

/// Prevents ejection of the unit's medium while it exists: [`LogicalUnit::hold_medium`].
#[derive(Debug)]
pub struct MediumHold(Arc<LogicalUnit>);

impl Drop for MediumHold {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.medium.holds = state.medium.holds.saturating_sub(1);
    }
}
