//! I_T nexuses: who speaks, through which port, and which unit attentions wait for it (SAM-5, 5.14).
//!
//! A nexus is shared by the workers that carry its queues or connections. Its filter word is zero while no
//! unit attention waits, and is only written when one comes or goes; the queues are behind a mutex.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::known::{Appearance, KnownUnits, Relation, Replaced};
use crate::logical_unit::{LogicalUnit, UnitId};
use crate::sense::SenseCode;
use crate::sync::lock;

/// Between an iSCSI initiator's name and its ISID in hexadecimal (SPC-4, 7.6.4.6).
const ISID_SEPARATOR: &str = ",i,0x";

/// An initiator port's name as a TransportID (SPC-5, 7.6.4): the key of a registration.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransportId(Box<[u8]>);

impl TransportId {
    /// An iSCSI initiator port: name and ISID (format 01b).
    pub fn iscsi_port(name: &str, isid: [u8; 6]) -> TransportId {
        let hex: String = isid.iter().map(|byte| format!("{byte:02x}")).collect();
        TransportId::iscsi(0x45, &format!("{name}{ISID_SEPARATOR}{hex}"))
    }

    /// An iSCSI initiator device: a name only (format 00b). Transports whose initiators have no name of their
    /// own make one up.
    pub fn iscsi_device(name: &str) -> TransportId {
        TransportId::iscsi(0x05, name)
    }

    /// Bytes of a name, and of what follows it, that are taken: iSCSI's names have 223 at most (RFC 7143, 4.2.7.1).
    const TEXT_MAX: usize = 1024;

    /// Names are compared normalised (RFC 7143, 4.2.7), digits of an ISID without regard to case: only that form is kept.
    fn iscsi(first: u8, text: &str) -> TransportId {
        let (name, isid) = match text.rfind(ISID_SEPARATOR) {
            Some(at) => text.split_at(at),
            None => (text, ""),
        };
        let normalised = iscsi_name::normalised(name);
        let name = normalised.as_deref().unwrap_or(name);
        let text = format!("{name}{}", isid.to_ascii_lowercase());
        let mut bytes = vec![first, 0, 0, 0];
        // Whole characters: what is not text would not be read back.
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

    /// The first TransportID of a list, and what follows it; `None` when it is malformed.
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

    /// Is it an iSCSI node's name, without a port (format 00b)?
    pub(crate) fn is_node(&self) -> bool {
        self.0.first() == Some(&0x05)
    }

    /// The iSCSI node of an initiator port; what else there is stands for itself.
    pub(crate) fn node(&self) -> TransportId {
        match self.name().rsplit_once(ISID_SEPARATOR) {
            Some((name, _)) if self.0.first() == Some(&0x45) => TransportId::iscsi_device(name),
            _ => self.clone(),
        }
    }

    /// The initiator's name, where it has one.
    pub fn name(&self) -> String {
        match self.0.first() {
            Some(0x05 | 0x45) => {
                let text = String::from_utf8_lossy(self.0.get(4..).unwrap_or_default());
                text.trim_end_matches('\0').to_owned()
            }
            _ => self.0.iter().map(|byte| format!("{byte:02x}")).collect(),
        }
    }

    /// As on the wire.
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

/// A target port: an export, as SCSI sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPort {
    /// Relative target port identifier, unique among all ports of the daemon, from 1.
    pub relative_id: u16,
    /// Target port group that the port belongs to. The transports use `relative_id`, so that each port has a state of its own.
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

/// Names an I_T nexus within the process; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NexusId(u64);

/// An I_T nexus.
#[derive(Debug)]
pub struct Nexus {
    id: NexusId,
    initiator: TransportId,
    port: Arc<TargetPort>,
    filter: AtomicU64,
    /// Where reservations are known not to be in the way: unit and epoch of its word.
    privileges: [AtomicU64; 64],
    attentions: Mutex<Attentions>,
}

#[derive(Debug, Default)]
struct Attentions {
    queues: HashMap<UnitId, Vec<SenseCode>>,
    known: KnownUnits,
    /// How many units with a queue, and LUNs with another unit than the known one, share each bit of the filter.
    sharing: Vec<u32>,
}

impl Nexus {
    /// `known`: the units that the initiator port knows from an earlier nexus.
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

    /// Names the nexus within the process.
    pub fn id(&self) -> NexusId {
        self.id
    }

    /// The initiator port.
    pub fn initiator(&self) -> &TransportId {
        &self.initiator
    }

    /// The target port.
    pub fn port(&self) -> &Arc<TargetPort> {
        &self.port
    }

    /// May a unit attention for this unit wait? Never a wrong no.
    #[inline]
    pub(crate) fn may_have_attention(&self, unit: UnitId) -> bool {
        self.has_in_filter(unit.filter_bit())
    }

    /// As [`Nexus::may_have_attention`], for the units that have this bit.
    #[inline]
    pub(crate) fn has_in_filter(&self, bit: u64) -> bool {
        self.filter.load(Ordering::Acquire) & bit != 0
    }

    /// Is the unit's reservation, as it was at this epoch, known to be no obstacle for this nexus?
    #[inline]
    pub(crate) fn is_privileged(&self, unit: UnitId, epoch: u32) -> bool {
        let known = self.privileges.get(unit.filter_index());
        known.is_some_and(|known| known.load(Ordering::Acquire) == privilege(unit, epoch))
    }

    /// Remembers that the unit's reservation is no obstacle until the unit changes.
    pub(crate) fn remember_privilege(&self, unit: UnitId, epoch: u32) {
        if let Some(known) = self.privileges.get(unit.filter_index()) {
            known.store(privilege(unit, epoch), Ordering::Release);
        }
    }

    /// Queues a unit attention, unless the same one waits already.
    pub(crate) fn push_attention(&self, unit: UnitId, code: SenseCode) {
        let mut attentions = lock(&self.attentions);
        let queue = attentions.queues.entry(unit).or_default();
        let first = queue.is_empty();
        if is_reset(code) {
            // a reset is reported before, and instead of, whatever it wiped out (SAM-5, 5.14.5)
            queue.retain(|&waiting| !is_reset(waiting));
            queue.insert(0, code);
        } else if !queue.contains(&code) {
            queue.push(code);
        }
        if first {
            self.share(&mut attentions, unit);
        }
    }

    /// A unit has this LUN now. If the initiator knows another one there it is told so, and that holds for commands which
    /// [`Nexus::replaced`] says. Called before commands can reach the unit.
    pub(crate) fn meet(&self, lun: u16, unit: &LogicalUnit) {
        let id = unit.id();
        let mut attentions = lock(&self.attentions);
        if let Some(before) = attentions.known.leave(lun) {
            self.unshare(&mut attentions, before);
        }
        let relation = attentions.known.meet(lun, id, Appearance::of(unit));
        if relation == Relation::Other {
            self.share(&mut attentions, id);
        }
        drop(attentions);
        // CAPACITY DATA HAS CHANGED would have the initiator take the other unit for the one that it knows.
        let codes: &[SenseCode] = match relation {
            Relation::Same => &[],
            Relation::OtherCapacity => &[SenseCode::CAPACITY_CHANGED],
            Relation::Other => &[SenseCode::LUNS_CHANGED, SenseCode::INQUIRY_DATA_CHANGED],
        };
        for code in codes {
            self.push_attention(id, *code);
        }
    }

    /// No unit has this LUN any more.
    pub(crate) fn leave(&self, lun: u16) {
        let mut attentions = lock(&self.attentions);
        if let Some(unit) = attentions.known.leave(lun) {
            self.unshare(&mut attentions, unit);
        }
    }

    /// The initiator has read the capacity of the unit with this LUN.
    pub(crate) fn read_capacity(&self, lun: u16, unit: &LogicalUnit) {
        let mut attentions = lock(&self.attentions);
        if let Some(unit) = attentions.known.read_capacity(lun, Appearance::of(unit)) {
            self.unshare(&mut attentions, unit);
        }
    }

    /// Has the unit with this LUN replaced another one, which the initiator knows? Asked when
    /// [`Nexus::may_have_attention`] says yes.
    pub(crate) fn replaced(&self, lun: u16) -> Option<Replaced> {
        lock(&self.attentions).known.replaced(lun)
    }

    /// What another nexus of the initiator port starts with.
    pub(crate) fn known_units(&self) -> KnownUnits {
        lock(&self.attentions).known.for_another_nexus()
    }

    /// Takes the first unit attention that waits for this unit.
    pub(crate) fn pop_attention(&self, unit: UnitId) -> Option<SenseCode> {
        let mut attentions = lock(&self.attentions);
        let queue = attentions.queues.get_mut(&unit)?;
        let code = (!queue.is_empty()).then(|| queue.remove(0));
        if queue.is_empty() {
            self.forget(&mut attentions, unit);
        }
        code
    }

    /// The first unit attention that waits for this unit.
    pub(crate) fn peek_attention(&self, unit: UnitId) -> Option<SenseCode> {
        lock(&self.attentions).queues.get(&unit)?.first().copied()
    }

    /// Takes one kind of unit attention back on every unit.
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

    /// Forgets a unit that is no longer mapped.
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

/// Never zero, for no unit has the number 0.
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
    fn attentions_come_back_in_order_resets_first_and_once() {
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
        // as an initiator writes it into the parameter list of REGISTER AND MOVE
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

    /// One that is not read back takes all registrations with it that are kept beside it.
    #[test]
    fn every_name_that_is_taken_is_read_back() {
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
