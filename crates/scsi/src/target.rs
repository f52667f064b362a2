//! A target: the map from LUNs to logical units, and its nexuses.
//!
//! The map is an immutable snapshot. A worker holds one in its [`TargetView`] and checks a generation number once per event loop iteration,
//! so that a lookup takes no lock and counts no reference.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::command::{Cdb, Command};
use crate::commands::{self, PlainParameters};
use crate::known::KnownUnits;
use crate::logical_unit::LogicalUnit;
use crate::lun::{Lun, LunAddress, MAX_UNITS};
use crate::nexus::{Nexus, TargetPort, TransportId};
use crate::plan::{DirectIo, Plan};
use crate::sense::{Sense, SenseCode};
use crate::sync::lock;

/// Reason why a logical unit cannot be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachError {
    /// The number needs more than 14 bits.
    NumberTooLarge(u16),
    /// Another unit has this number.
    NumberTaken(u16),
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttachError::NumberTooLarge(lun) => write!(f, "lun {lun} is above {}", MAX_UNITS - 1),
            AttachError::NumberTaken(lun) => write!(f, "lun {lun} is taken"),
        }
    }
}

impl std::error::Error for AttachError {}

const CHUNK: usize = 256;

type Chunk = [Option<Arc<LogicalUnit>>; CHUNK];

/// Sparse map from LUNs to logical units, a snapshot.
#[derive(Clone, Debug, Default)]
pub struct LunMap {
    chunks: Vec<Option<Arc<Chunk>>>,
}

impl LunMap {
    /// Returns the unit with this number.
    #[inline]
    pub fn get(&self, number: u16) -> Option<&Arc<LogicalUnit>> {
        let (chunk, at) = (usize::from(number) / CHUNK, usize::from(number) % CHUNK);
        self.chunks.get(chunk)?.as_ref()?[at].as_ref()
    }

    /// Returns all units in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u16, &Arc<LogicalUnit>)> {
        let chunks = self.chunks.iter().enumerate();
        let chunks = chunks.filter_map(|(high, chunk)| Some((high, chunk.as_ref()?)));
        chunks.flat_map(|(high, chunk)| {
            let units = chunk.iter().enumerate();
            units.filter_map(move |(low, unit)| Some(((high * CHUNK + low) as u16, unit.as_ref()?)))
        })
    }

    fn put(&mut self, number: u16, unit: Option<Arc<LogicalUnit>>) -> Option<Arc<LogicalUnit>> {
        let (chunk, at) = (usize::from(number) / CHUNK, usize::from(number) % CHUNK);
        if self.chunks.len() <= chunk {
            self.chunks.resize_with(chunk + 1, || None);
        }
        let chunk = self.chunks[chunk].get_or_insert_with(|| Arc::new([const { None }; CHUNK]));
        std::mem::replace(&mut Arc::make_mut(chunk)[at], unit)
    }
}

/// A target.
#[derive(Debug)]
pub struct Target {
    generation: AtomicU64,
    state: Mutex<TargetState>,
}

#[derive(Debug, Default)]
struct TargetState {
    map: Arc<LunMap>,
    ports: Vec<Arc<TargetPort>>,
    nexuses: Vec<Weak<Nexus>>,
    /// Units seen by initiator ports without a nexus, latest last: a session that reconnects after a lost connection continues with them.
    gone: VecDeque<(TransportId, u16, KnownUnits)>,
}

/// Maximum number of such initiator ports: more than the nodes of a cluster with a few paths each.
const GONE_MAX: usize = 256;

impl TargetState {
    /// Returns the units that an initiator port has seen through its last nexus to a target port.
    fn known_to(&mut self, initiator: &TransportId, port: &TargetPort) -> KnownUnits {
        let is_it = |nexus: &Arc<Nexus>| {
            nexus.initiator() == initiator && nexus.port().relative_id == port.relative_id
        };
        let mut nexuses = self.nexuses.iter().rev().filter_map(Weak::upgrade);
        if let Some(nexus) = nexuses.find(is_it) {
            return nexus.known_units();
        }
        let is_it = |(who, at, _): &(TransportId, u16, KnownUnits)| {
            who == initiator && *at == port.relative_id
        };
        let found = self.gone.iter().position(is_it);
        let found = found.and_then(|index| self.gone.remove(index));
        found.map(|(_, _, known)| known).unwrap_or_default()
    }

    fn remember(&mut self, nexus: &Nexus) {
        let (who, at) = (nexus.initiator(), nexus.port().relative_id);
        self.gone.retain(|(w, a, _)| (w, *a) != (who, at));
        if self.gone.len() >= GONE_MAX {
            self.gone.pop_front();
        }
        self.gone.push_back((who.clone(), at, nexus.known_units()));
    }
}

impl Target {
    /// Creates a target without logical units, with these ports.
    pub fn new(ports: Vec<Arc<TargetPort>>) -> Arc<Target> {
        let state = TargetState {
            ports,
            ..TargetState::default()
        };
        Arc::new(Target {
            generation: AtomicU64::new(1),
            state: Mutex::new(state),
        })
    }

    /// Attaches a logical unit. Existing nexuses get a unit attention.
    ///
    /// # Errors
    /// See [`Target::attach_units`].
    pub fn attach_unit(&self, number: u16, unit: Arc<LogicalUnit>) -> Result<(), AttachError> {
        self.attach_units(vec![(number, unit)])
    }

    /// Attaches logical units, all of them or none. Existing nexuses get one unit attention.
    ///
    /// # Errors
    /// A number is taken or too large.
    pub fn attach_units(&self, units: Vec<(u16, Arc<LogicalUnit>)>) -> Result<(), AttachError> {
        let mut state = lock(&self.state);
        let mut map = LunMap::clone(&state.map);
        for (number, unit) in &units {
            if *number >= MAX_UNITS {
                return Err(AttachError::NumberTooLarge(*number));
            }
            if map.put(*number, Some(Arc::clone(unit))).is_some() {
                return Err(AttachError::NumberTaken(*number));
            }
        }
        self.luns_changed(&state);
        for (number, unit) in &units {
            for port in &state.ports {
                unit.attach_port(port);
            }
            for nexus in state.nexuses.iter().filter_map(Weak::upgrade) {
                unit.attach_nexus(&nexus);
                nexus.meet(*number, unit);
            }
        }
        state.map = Arc::new(map);
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Detaches a logical unit. Commands begun through an older view may still reach it until that view is refreshed.
    pub fn detach_unit(&self, number: u16) -> Option<Arc<LogicalUnit>> {
        let mut state = lock(&self.state);
        state.map.get(number)?;
        let unit = self.replace_map(&mut state, number, None)?;
        for nexus in state.nexuses.iter().filter_map(Weak::upgrade) {
            nexus.remove_unit(number);
        }
        if state.map.iter().any(|(_, other)| Arc::ptr_eq(other, &unit)) {
            // Still attached under another number.
            self.luns_changed(&state);
            return Some(unit);
        }
        for nexus in state.nexuses.iter().filter_map(Weak::upgrade) {
            unit.detach_nexus(&nexus);
        }
        unit.detach_ports(&state.ports);
        self.luns_changed(&state);
        Some(unit)
    }

    fn replace_map(
        &self,
        state: &mut TargetState,
        number: u16,
        unit: Option<Arc<LogicalUnit>>,
    ) -> Option<Arc<LogicalUnit>> {
        let mut map = LunMap::clone(&state.map);
        let old = map.put(number, unit);
        state.map = Arc::new(map);
        self.generation.fetch_add(1, Ordering::Release);
        old
    }

    fn luns_changed(&self, state: &TargetState) {
        for nexus in state.nexuses.iter().filter_map(Weak::upgrade) {
            for (_, unit) in state.map.iter() {
                nexus.push_attention(unit.id(), SenseCode::LUNS_CHANGED);
            }
        }
    }

    /// Returns `report` of the present map, and removes REPORTED LUNS DATA HAS CHANGED unless it fails. Both happen under the lock of the
    /// map, so that the unit attention of a change remains pending unless the report contains the change.
    pub(crate) fn report_luns<T>(
        &self,
        nexus: &Nexus,
        report: impl FnOnce(&LunMap) -> Result<T, Sense>,
    ) -> Result<T, Sense> {
        let state = lock(&self.state);
        let reported = report(&state.map)?;
        nexus.clear_attention_everywhere(SenseCode::LUNS_CHANGED);
        Ok(reported)
    }

    /// Creates an I_T nexus: a session or a controller's connection, possibly shared by several workers. Each logical unit gets a POWER ON
    /// unit attention for it.
    pub fn attach_nexus(&self, initiator: TransportId, port: Arc<TargetPort>) -> Arc<Nexus> {
        let mut state = lock(&self.state);
        let known = state.known_to(&initiator, &port);
        let nexus = Arc::new(Nexus::new(initiator, Arc::clone(&port), known));
        if !state
            .ports
            .iter()
            .any(|known| known.relative_id == port.relative_id)
        {
            for (_, unit) in state.map.iter() {
                unit.attach_port(&port);
            }
            state.ports.push(port);
        }
        state.nexuses.retain(|known| known.strong_count() > 0);
        state.nexuses.push(Arc::downgrade(&nexus));
        for (number, unit) in state.map.iter() {
            unit.attach_nexus(&nexus);
            nexus.meet(number, unit);
        }
        nexus
    }

    /// Removes a lost nexus and its non-persistent state.
    pub fn detach_nexus(&self, nexus: &Arc<Nexus>) {
        let mut state = lock(&self.state);
        state
            .nexuses
            .retain(|known| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(nexus)));
        state.remember(nexus);
        for (_, unit) in state.map.iter() {
            unit.detach_nexus(nexus);
        }
    }

    /// Returns a view that a worker uses to begin commands.
    pub fn view(self: &Arc<Target>) -> TargetView {
        let state = lock(&self.state);
        let generation = self.generation.load(Ordering::Acquire);
        TargetView {
            target: Arc::clone(self),
            map: Arc::clone(&state.map),
            generation,
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let state = lock(&self.state);
        for (_, unit) in state.map.iter() {
            unit.detach_ports(&state.ports);
        }
    }
}

/// One worker's view of a target.
#[derive(Clone, Debug)]
pub struct TargetView {
    target: Arc<Target>,
    map: Arc<LunMap>,
    generation: u64,
}

impl TargetView {
    /// Updates the view if there is a newer map; otherwise it costs one atomic load. Needed once per event loop iteration. Returns true if
    /// the view changed.
    #[inline]
    pub fn refresh(&mut self) -> bool {
        if self.target.generation.load(Ordering::Acquire) == self.generation {
            return false;
        }
        *self = self.target.view();
        true
    }

    /// Returns the target.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    /// Returns the map of this view.
    pub fn map(&self) -> &LunMap {
        &self.map
    }

    /// Returns the logical unit with this LUN; `None` if there is none or the LUN is well known.
    #[inline]
    pub fn unit(&self, lun: Lun) -> Option<&Arc<LogicalUnit>> {
        match lun.address() {
            LunAddress::Unit(number) => self.map.get(number),
            LunAddress::ReportLuns | LunAddress::Unknown => None,
        }
    }

    /// Returns the I/O of a plain READ or WRITE: a fast path of [`TargetView::begin`] with the same result.
    #[inline(always)]
    pub fn begin_direct(&self, command: &Command<'_>) -> Option<DirectIo> {
        let cdb = command.cdb.first_chunk::<16>()?;
        commands::begin_direct(self.unit(command.lun)?, command, cdb)
    }

    /// Looks up a unit for plain commands. The result is valid as long as [`PlainUnit::is_current`].
    pub fn plain_unit(&self, nexus: &Arc<Nexus>, lun: Lun) -> Option<PlainUnit> {
        let unit = Arc::clone(self.unit(lun)?);
        Some(PlainUnit {
            filter_bit: unit.id().filter_bit(),
            nexus: Arc::clone(nexus),
            unit,
            target: Arc::clone(&self.target),
            generation: self.generation,
        })
    }

    /// Returns the plan for a command.
    #[inline]
    pub fn begin(&self, command: &Command<'_>) -> Plan {
        let mut padded = [0; 16];
        let cdb = match command.cdb.first_chunk::<16>() {
            Some(cdb) => cdb,
            None => {
                padded[..command.cdb.len()].copy_from_slice(command.cdb);
                &padded
            }
        };
        match self.unit(command.lun) {
            Some(unit) => commands::begin(self, unit, command, cdb),
            None => commands::begin_without_unit(&self.target, command, cdb),
        }
    }

    /// Returns true if a command changes the medium's content or the access to it. For initiators with read-only access.
    #[cold]
    pub fn changes(&self, command: &Command<'_>) -> bool {
        let cdb = padded(command.cdb);
        self.unit(command.lun)
            .is_some_and(|unit| commands::changes(unit, &cdb))
    }

    /// Returns the response to a command that the transport refuses. If the LUN has no unit, the response reports that instead.
    #[cold]
    pub fn refuse(&self, command: &Command<'_>, sense: Sense) -> Plan {
        match self.unit(command.lun) {
            Some(unit) => commands::refuse(unit, command, sense),
            None => self.begin(command),
        }
    }
}

/// Returns the first bytes of a CDB, padded with zeroes.
fn padded(cdb: &[u8]) -> Cdb {
    let mut padded = [0; 16];
    let length = cdb.len().min(padded.len());
    padded[..length].copy_from_slice(&cdb[..length]);
    padded
}

/// A logical unit as seen by a nexus, returned by [`TargetView::plain_unit`].
#[derive(Clone, Debug)]
pub struct PlainUnit {
    unit: Arc<LogicalUnit>,
    nexus: Arc<Nexus>,
    filter_bit: u64,
    target: Arc<Target>,
    generation: u64,
}

impl PlainUnit {
    /// Returns the parameters for plain READs and WRITEs to the unit, if it is in the normal state: the fastest path of
    /// [`TargetView::begin`], with the same result. Valid for commands that had arrived before the call, up to the first one that is not
    /// plain.
    #[inline(always)]
    pub fn plain_parameters(&self) -> Option<PlainParameters> {
        if !self.is_current() {
            return None;
        }
        commands::plain_parameters(&self.unit, &self.nexus, self.filter_bit)
    }

    /// Returns true if [`PlainUnit::plain_parameters`] would return the same `plain_parameters` again.
    #[inline(always)]
    pub fn is_still(&self, parameters: &PlainParameters) -> bool {
        self.is_current()
            && !self.nexus.has_in_filter(self.filter_bit)
            && parameters.is_of(self.unit.geometry(), self.unit.word())
    }

    /// Returns true if the target's map has not changed since the lookup. Costs one load.
    #[inline(always)]
    pub fn is_current(&self) -> bool {
        self.target.generation.load(Ordering::Acquire) == self.generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, ram};

    #[test]
    fn a_view_sees_a_new_unit_after_refresh() {
        let target = Target::new(vec![testing::port()]);
        let mut view = target.view();
        assert!(!view.refresh());
        target.attach_unit(300, ram(512, 1 << 20)).unwrap();
        assert!(view.unit(Lun::unit(300)).is_none());
        assert!(view.refresh());
        assert!(view.unit(Lun::unit(300)).is_some());
        assert_eq!(
            view.map()
                .iter()
                .map(|(number, _)| number)
                .collect::<Vec<_>>(),
            [300]
        );
        assert!(target.detach_unit(300).is_some());
        assert!(view.refresh());
        assert!(view.unit(Lun::unit(300)).is_none());
    }

    #[test]
    fn numbers_are_unique_and_below_16384() {
        let target = Target::new(vec![testing::port()]);
        assert_eq!(target.attach_unit(16383, ram(512, 1 << 20)), Ok(()));
        assert_eq!(
            target.attach_unit(16383, ram(512, 1 << 20)),
            Err(AttachError::NumberTaken(16383))
        );
        assert_eq!(
            target.attach_unit(16384, ram(512, 1 << 20)),
            Err(AttachError::NumberTooLarge(16384))
        );
    }
}
