//! I_T nexuses: the initiator, its target port, and its pending unit attentions (SAM-5, 5.14).
//!
//! A nexus is shared by the workers of its queues or connections. Its filter word is zero while no unit attention is pending, and is
//! written only when one is added or removed. The queues are behind a mutex.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::known::{Appearance, KnownUnits, Relation, Replaced};
use crate::logical_unit::{LogicalUnit, UnitId};
use crate::sense::SenseCode;
use crate::sync::lock;

/// Separator between an iSCSI initiator's name and its ISID in hexadecimal (SPC-4, 7.6.4.6).
const ISID_SEPARATOR: &str = ",i,0x";

/// Name of an initiator port as a TransportID (SPC-5, 7.6.4): the key of a registration.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransportId(Box<[u8]>);

impl TransportId {
    /// Creates the ID of an iSCSI initiator port: name and ISID (format 01b).
    pub fn iscsi_port(name: &str, isid: [u8; 6]) -> TransportId {
        let hex: String = isid.iter().map(|byte| format!("{byte:02x}")).collect();
        TransportId::iscsi(0x45, &format!("{name}{ISID_SEPARATOR}{hex}"))
    }

    /// Creates the ID of an iSCSI initiator device: a name only (format 00b). Transports without initiator names use a generated name.
    pub fn iscsi_device(name: &str) -> TransportId {
        TransportId::iscsi(0x05, name)
    }

    /// Maximum length of name and ISID, in bytes; longer text is cut. iSCSI names have at most 223 bytes (RFC 7143, 4.2.7.1).
    const TEXT_MAX: usize = 1024;

    /// Stores the normalised form only: names are compared normalised (RFC 7143, 4.2.7), digits of an ISID without regard to case.
    fn iscsi(first: u8, text: &str) -> TransportId {
        let (name, isid) = match text.rfind(ISID_SEPARATOR) {
            Some(at) => text.split_at(at),
            None => (text, ""),
        };
        let normalised = iscsi_name::normalised(name);
        let name = normalised.as_deref().unwrap_or(name);
        let text = format!("{name}{}", isid.to_ascii_lowercase());
        let mut bytes = vec![first, 0, 0, 0];
        // Cuts between characters: invalid UTF-8 could not be parsed again.
        let mut end = text.len().min(TransportId::TEXT_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        bytes.extend(text.bytes().take(end));
        bytes.push(0);
        while bytes.len() % 4 != 0 || bytes.len() < 24 {
            bytes.push(0);
        }
        let additional = (bytes.len() - 4) as u16;
        bytes[2..4].copy_from_slice(&additional.to_be_bytes());
        TransportId(bytes.into())
    }

    /// Parses the first TransportID of a list and returns it with the rest; `None` if it is malformed.
    pub fn parse(bytes: &[u8]) -> Option<(TransportId, &[u8])> {
        let first = *bytes.first()?;
        let length = match first {
            0x05 | 0x45 => {
                let additional = u16::from_be_bytes([*bytes.get(2)?, *bytes.get(3)?]) as usize;
                if additional < 20 || !additional.is_multiple_of(4) {
                    return None;
                }
                4 + additional
            }
            0x00..0x10 => 24,
            _ => return None,
        };
        let (id, rest) = bytes.split_at_checked(length)?;
        if first & 0x0f != 0x05 {
            return Some((TransportId(id.into()), rest));
        }
        let text = id.get(4..)?;
        let end = text.iter().position(|&byte| byte == 0)?;
        let text = std::str::from_utf8(text.get(..end)?).ok()?;
        if text.len() > TransportId::TEXT_MAX {
            return None;
        }
        Some((TransportId::iscsi(first, text), rest))
    }

    /// Returns true for the name of an iSCSI node, without a port (format 00b).
    pub(crate) fn is_node(&self) -> bool {
        self.0.first() == Some(&0x05)
    }

    /// Returns the iSCSI node of an initiator port. Other IDs are returned unchanged.
    pub(crate) fn node(&self) -> TransportId {
        match self.name().rsplit_once(ISID_SEPARATOR) {
            Some((name, _)) if self.0.first() == Some(&0x45) => TransportId::iscsi_device(name),
            _ => self.clone(),
        }
    }

    /// Returns the initiator's name; hexadecimal bytes if it has no name.
    pub fn name(&self) -> String {
        match self.0.first() {
            Some(0x05 | 0x45) => {
                let text = String::from_utf8_lossy(self.0.get(4..).unwrap_or_default());
                text.trim_end_matches('\0').to_owned()
            }
            _ => self.0.iter().map(|byte| format!("{byte:02x}")).collect(),
        }
    }

    /// Returns the wire format.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for TransportId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.first() {
            Some(0x05 | 0x45) => {
                let text = String::from_utf8_lossy(self.0.get(4..).unwrap_or_default());
                write!(f, "TransportId({})", text.trim_end_matches('\0'))
            }
            _ => write!(f, "TransportId({:02x?})", self.0),
        }
    }
}

/// A target port: the SCSI view of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPort {
    /// Relative target port identifier, unique among all ports of the daemon, from 1.
    pub relative_id: u16,
    /// Target port group of the port. The transports use `relative_id`, so that each port has its own state.
    pub group: u16,
    /// SCSI name string of the port, such as `iqn.2026-11.org.example:t0,t,0x0001`.
    pub name: Option<String>,
    /// SCSI name string of the device behind the port, such as `iqn.2026-11.org.example:t0`.
    pub device_name: Option<String>,
    /// Initiators that may set the access state of the port's group.
    pub state_setters: StateSetters,
}

/// Initiators that may set the access state of a target port group with SET TARGET PORT GROUPS. The administrator may always set it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateSetters {
    /// All initiators. TPGS of the standard INQUIRY data is 11b, implicit and explicit.
    #[default]
    Initiators,
    /// No initiator. TPGS is 01b, implicit only.
    AdministratorOnly,
}

/// Identifier of an I_T nexus, unique within the process and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NexusId(u64);

/// An I_T nexus.
#[derive(Debug)]
pub struct Nexus {
    id: NexusId,
    initiator: TransportId,
    port: Arc<TargetPort>,
    filter: AtomicU64,
    /// Units with reservations that do not restrict the nexus: unit and epoch of its word.
    privileges: [AtomicU64; 64],
    attentions: Mutex<Attentions>,
}

#[derive(Debug, Default)]
struct Attentions {
    queues: HashMap<UnitId, Vec<SenseCode>>,
    known: KnownUnits,
    /// Number of users of each filter bit: units with a queue, and LUNs with a unit that replaced another.
    sharing: Vec<u32>,
}

impl Nexus {
    /// Creates a nexus. `known`: units that the initiator port has seen through an earlier nexus.
    pub(crate) fn new(initiator: TransportId, port: Arc<TargetPort>, known: KnownUnits) -> Nexus {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NexusId(NEXT.fetch_add(1, Ordering::Relaxed));
        let attentions = Attentions {
            queues: HashMap::new(),
            known,
            sharing: vec![0; 64],
        };
        Nexus {
            id,
            initiator,
            port,
            filter: AtomicU64::new(0),
            privileges: [const { AtomicU64::new(0) }; 64],
            attentions: Mutex::new(attentions),
        }
    }

    /// Returns the identifier within the process.
    pub fn id(&self) -> NexusId {
        self.id
    }

    /// Returns the initiator port.
    pub fn initiator(&self) -> &TransportId {
        &self.initiator
    }

    /// Returns the target port.
    pub fn port(&self) -> &Arc<TargetPort> {
        &self.port
    }

    /// Returns false only if no unit attention for this unit is pending.
    #[inline]
    pub(crate) fn may_have_attention(&self, unit: UnitId) -> bool {
        self.has_in_filter(unit.filter_bit())
    }

    /// Like [`Nexus::may_have_attention`], for all units with this bit.
    #[inline]
    pub(crate) fn has_in_filter(&self, bit: u64) -> bool {
        self.filter.load(Ordering::Acquire) & bit != 0
    }

    /// Returns true if the unit's reservation at this epoch does not restrict the nexus.
    #[inline]
    pub(crate) fn is_privileged(&self, unit: UnitId, epoch: u32) -> bool {
        let known = self.privileges.get(unit.filter_index());
        known.is_some_and(|known| known.load(Ordering::Acquire) == privilege(unit, epoch))
    }

    /// Records that the unit's reservation does not restrict the nexus until the unit changes.
    pub(crate) fn remember_privilege(&self, unit: UnitId, epoch: u32) {
        if let Some(known) = self.privileges.get(unit.filter_index()) {
            known.store(privilege(unit, epoch), Ordering::Release);
        }
    }

    /// Adds a unit attention, unless the same one is pending.
    pub(crate) fn push_attention(&self, unit: UnitId, code: SenseCode) {
        let mut attentions = lock(&self.attentions);
        let queue = attentions.queues.entry(unit).or_default();
        let first = queue.is_empty();
        if is_reset(code) {
            // A reset is reported before, and instead of, the attentions that it supersedes (SAM-5, 5.14.5).
            queue.retain(|&waiting| !is_reset(waiting));
            queue.insert(0, code);
        } else if !queue.contains(&code) {
            queue.push(code);
        }
        if first {
            self.share(&mut attentions, unit);
        }
    }

    /// Records that a unit has this LUN now. If the initiator has seen another unit there, it gets unit attentions, and [`Nexus::replaced`]
    /// restricts its commands. Called before commands can reach the unit.
    pub(crate) fn meet(&self, lun: u16, unit: &LogicalUnit) {
        let id = unit.id();
        let mut attentions = lock(&self.attentions);
        if let Some(before) = attentions.known.remove_unit(lun) {
            self.unshare(&mut attentions, before);
        }
        let relation = attentions.known.meet(lun, id, Appearance::of(unit));
        if relation == Relation::Other {
            self.share(&mut attentions, id);
        }
        drop(attentions);
        // CAPACITY DATA HAS CHANGED would imply that this is the old unit.
        let codes: &[SenseCode] = match relation {
            Relation::Same => &[],
            Relation::OtherCapacity => &[SenseCode::CAPACITY_CHANGED],
            Relation::Other => &[SenseCode::LUNS_CHANGED, SenseCode::INQUIRY_DATA_CHANGED],
        };
        for code in codes {
            self.push_attention(id, *code);
        }
    }

    /// Records that the LUN has no unit any more.
    pub(crate) fn remove_unit(&self, lun: u16) {
        let mut attentions = lock(&self.attentions);
        if let Some(unit) = attentions.known.remove_unit(lun) {
            self.unshare(&mut attentions, unit);
        }
    }

    /// Records that the initiator has read the capacity of the unit with this LUN.
    pub(crate) fn read_capacity(&self, lun: u16, unit: &LogicalUnit) {
        let mut attentions = lock(&self.attentions);
        if let Some(unit) = attentions.known.read_capacity(lun, Appearance::of(unit)) {
            self.unshare(&mut attentions, unit);
        }
    }

    /// Returns the restriction if the unit with this LUN has replaced one that the initiator has seen. Called if
    /// [`Nexus::may_have_attention`] returns true.
    pub(crate) fn replaced(&self, lun: u16) -> Option<Replaced> {
        lock(&self.attentions).known.replaced(lun)
    }

    /// Returns the initial state for another nexus of the initiator port.
    pub(crate) fn known_units(&self) -> KnownUnits {
        lock(&self.attentions).known.for_another_nexus()
    }

    /// Removes and returns the first pending unit attention for this unit.
    pub(crate) fn pop_attention(&self, unit: UnitId) -> Option<SenseCode> {
        let mut attentions = lock(&self.attentions);
        let queue = attentions.queues.get_mut(&unit)?;
        let code = (!queue.is_empty()).then(|| queue.remove(0));
        if queue.is_empty() {
            self.forget(&mut attentions, unit);
        }
        code
    }

    /// Returns the first pending unit attention for this unit.
    pub(crate) fn peek_attention(&self, unit: UnitId) -> Option<SenseCode> {
        lock(&self.attentions).queues.get(&unit)?.first().copied()
    }

    /// Removes pending unit attentions with this code for all units.
    pub(crate) fn clear_attention_everywhere(&self, code: SenseCode) {
        let mut attentions = lock(&self.attentions);
        let mut emptied = Vec::new();
        for (&unit, queue) in &mut attentions.queues {
            queue.retain(|&waiting| waiting != code);
            if queue.is_empty() {
                emptied.push(unit);
            }
        }
        for unit in emptied {
            self.forget(&mut attentions, unit);
        }
    }

    /// Removes the unit attentions of a unit that is no longer mapped.
    pub(crate) fn drop_attentions(&self, unit: UnitId) {
        let mut attentions = lock(&self.attentions);
        if attentions.queues.contains_key(&unit) {
            self.forget(&mut attentions, unit);
        }
    }

    fn forget(&self, attentions: &mut Attentions, unit: UnitId) {
        if attentions.queues.remove(&unit).is_some() {
            self.unshare(attentions, unit);
        }
    }

    fn share(&self, attentions: &mut Attentions, unit: UnitId) {
        if let Some(count) = attentions.sharing.get_mut(unit.filter_index()) {
            *count += 1;
        }
        self.filter.fetch_or(unit.filter_bit(), Ordering::Release);
    }

    fn unshare(&self, attentions: &mut Attentions, unit: UnitId) {
        if let Some(count) = attentions.sharing.get_mut(unit.filter_index()) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.filter.fetch_and(!unit.filter_bit(), Ordering::Release);
            }
        }
    }
}

/// Never zero, because no unit has the number 0.
const fn privilege(unit: UnitId, epoch: u32) -> u64 {
    (unit.number() as u64) << 32 | epoch as u64
}

const fn is_reset(code: SenseCode) -> bool {
    code.0 >> 8 == 0x29
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nexus() -> Nexus {
        let port = TargetPort {
            relative_id: 1,
            group: 1,
            name: None,
            device_name: None,
            state_setters: StateSetters::default(),
        };
        Nexus::new(
            TransportId::iscsi_device("iqn.2026-11.org.example:i"),
            Arc::new(port),
            KnownUnits::default(),
        )
    }

    #[test]
    fn attentions_are_reported_once_with_resets_first() {
        let (nexus, unit) = (nexus(), UnitId::new(7));
        assert!(!nexus.may_have_attention(unit));
        nexus.push_attention(unit, SenseCode::LUNS_CHANGED);
        nexus.push_attention(unit, SenseCode::CAPACITY_CHANGED);
        nexus.push_attention(unit, SenseCode::LUNS_CHANGED);
        nexus.push_attention(unit, SenseCode::POWER_ON);
        assert!(nexus.may_have_attention(unit));
        let codes: Vec<_> = std::iter::from_fn(|| nexus.pop_attention(unit)).collect();
        assert_eq!(
            codes,
            [
                SenseCode::POWER_ON,
                SenseCode::LUNS_CHANGED,
                SenseCode::CAPACITY_CHANGED
            ]
        );
        assert!(!nexus.may_have_attention(unit));
    }

    #[test]
    fn units_that_share_a_filter_bit_do_not_hide_each_other() {
        let (nexus, a, b) = (nexus(), UnitId::new(1), UnitId::new(65));
        nexus.push_attention(a, SenseCode::POWER_ON);
        nexus.push_attention(b, SenseCode::POWER_ON);
        assert_eq!(nexus.pop_attention(a), Some(SenseCode::POWER_ON));
        assert!(nexus.may_have_attention(b));
        nexus.clear_attention_everywhere(SenseCode::POWER_ON);
        assert!(!nexus.may_have_attention(b));
    }

    #[test]
    fn transport_ids_are_padded_and_parse_back() {
        let id = TransportId::iscsi_port("iqn.2026-11.org.example:i", [0x40, 0, 1, 2, 3, 4]);
        assert_eq!(id.as_bytes()[..4], [0x45, 0, 0, 44]);
        assert_eq!(
            &id.as_bytes()[4..47],
            b"iqn.2026-11.org.example:i,i,0x400001020304\0"
        );
        let mut list = id.as_bytes().to_vec();
        list.extend([1, 2, 3]);
        assert_eq!(TransportId::parse(&list), Some((id, &[1, 2, 3][..])));
        for bad in [
            &[0x45, 0, 0, 44][..],
            &[0x45, 0, 0, 3, 0, 0, 0],
            &[0x85; 24],
            &[],
        ] {
            assert_eq!(TransportId::parse(bad), None, "{bad:02x?}");
        }
    }

    #[test]
    fn digits_of_an_isid_mean_the_same_in_either_case() {
        let id =
            TransportId::iscsi_port("iqn.2026-11.org.example:I", [0x40, 0, 0xab, 0xcd, 0, 0xef]);
        let mut wire = id.as_bytes().to_vec();
        let at = wire.windows(4).position(|four| four == b"abcd").unwrap();
        wire[at..at + 8].make_ascii_uppercase();
        assert_eq!(TransportId::parse(&wire), Some((id, &[][..])));
    }

    #[test]
    fn spellings_of_an_initiators_name_are_one_transport_id() {
        let id = TransportId::iscsi_port("IQN.2026-11.org.Example:H1", [0x40, 0, 0xab, 0, 0, 1]);
        assert_eq!(
            &id.as_bytes()[4..48],
            b"iqn.2026-11.org.example:h1,i,0x4000ab000001\0"
        );
        // As sent by an initiator in the parameter list of REGISTER AND MOVE.
        let mut wire = b"\x45\0\0\x2ciqn.2026-11.org.example:H1,i,0x4000AB000001\0".to_vec();
        assert_eq!(wire.len(), 48);
        assert_eq!(TransportId::parse(&wire), Some((id.clone(), &[][..])));
        wire[28] = b'z';
        assert_ne!(TransportId::parse(&wire), Some((id, &[][..])));
        let node = TransportId::iscsi_device("iqn.2026-11.org.example:\u{ff28}1");
        assert_eq!(
            node,
            TransportId::iscsi_device("iqn.2026-11.org.example:h1")
        );
    }

    /// A name that cannot be parsed again would invalidate all registrations saved with it.
    #[test]
    fn every_accepted_name_round_trips() {
        let long = "a".repeat(1023) + "\u{e9}";
        let cut = TransportId::iscsi_device(&long);
        let (again, rest) = TransportId::parse(cut.as_bytes()).unwrap();
        assert_eq!((&again, rest), (&cut, &[][..]));
        let mut wire = vec![0x05, 0, 0x04, 0x04];
        wire.extend(long.bytes());
        wire.resize(4 + 1028, 0);
        assert!(TransportId::parse(&wire).is_none(), "too long a name");
    }
}
