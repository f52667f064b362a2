//! Messages of a front end that are in effect. With their descriptors they rebuild the session in another process. Their bytes are those of
//! the vhost-user protocol, versioned by feature bits: a newer process understands them, or refuses the session as it would refuse the
//! front end.

use std::collections::BTreeMap;
use std::io;
use std::mem::discriminant;
use std::os::fd::OwnedFd;

use vhost_user_wire::{MemoryRegion, Message, VringState, parse};

/// Positions of messages about a ring in the replay, which has all of them: a ring starts with its kick.
const NUM: usize = 0;
const ADDR: usize = 1;
const BASE: usize = 2;
const CALL: usize = 3;
const ERR: usize = 4;
const ENABLE: usize = 5;
const KICK: usize = 6;

/// The messages of a session.
#[derive(Default)]
pub(crate) struct Record {
    /// Features, protocol features, dirty log and in-flight region.
    single: Vec<Message>,
    memory: Vec<Message>,
    /// By ring and position.
    rings: BTreeMap<(u32, usize), Message>,
}

impl Record {
    /// Records a message that was executed.
    pub fn insert(&mut self, message: Message) {
        match &message {
            Message::SetFeatures(_)
            | Message::SetLogBase(..)
            | Message::SetLogFd(_)
            | Message::SetProtocolFeatures(_)
            | Message::SetInflightFd(..) => {
                let kind = discriminant(&message);
                self.single.retain(|one| discriminant(one) != kind);
                self.single.push(message);
            }
            Message::SetMemTable(_) => self.memory = vec![message],
            Message::AddMemReg(..) => self.memory.push(message),
            Message::RemMemReg(region) => {
                // The message of an added region is dropped. The removal of a region of the table is recorded.
                let is_added = |one: &Message| matches!(one, Message::AddMemReg(added, _) if is_same(added, region));
                match self.memory.iter().position(is_added) {
                    Some(at) => drop(self.memory.remove(at)),
                    None => self.memory.push(message),
                }
            }
            // The ring has stopped. The front end sends its position when it starts the ring again.
            Message::GetVringBase(state) => {
                self.rings.remove(&(state.index, KICK));
            }
            Message::ResetDevice => {
                self.rings
                    .retain(|(_, position), _| matches!(*position, CALL | ERR));
            }
            Message::SetVringNum(state) => self.insert_ring(state.index, NUM, message),
            Message::SetVringAddr(addresses) => self.insert_ring(addresses.index, ADDR, message),
            Message::SetVringBase(state) => self.insert_ring(state.index, BASE, message),
            Message::SetVringCall(index, _) => self.insert_ring((*index).into(), CALL, message),
            Message::SetVringErr(index, _) => self.insert_ring((*index).into(), ERR, message),
            Message::SetVringEnable(state) => self.insert_ring(state.index, ENABLE, message),
            Message::SetVringKick(index, _) => self.insert_ring((*index).into(), KICK, message),
            _ => {}
        }
    }

    fn insert_ring(&mut self, ring: u32, position: usize, message: Message) {
        self.rings.insert((ring, position), message);
    }

    /// Returns the messages, with each ring at its stop position: `bases` by ring.
    pub fn messages(mut self, bases: &BTreeMap<u32, u32>) -> Vec<Message> {
        for (&index, &num) in bases {
            let message = Message::SetVringBase(VringState { index, num });
            self.insert_ring(index, BASE, message);
        }
        // The region is mapped after the memory.
        let is_inflight = |one: &Message| matches!(one, Message::SetInflightFd(..));
        let (inflight, mut messages): (Vec<_>, Vec<_>) =
            self.single.into_iter().partition(is_inflight);
        messages.extend(self.memory);
        messages.extend(inflight);
        messages.extend(self.rings.into_values());
        messages
    }
}

/// Compares the addresses and sizes of two regions.
fn is_same(one: &MemoryRegion, other: &MemoryRegion) -> bool {
    let key = |region: &MemoryRegion| (region.guest_address, region.size, region.user_address);
    key(one) == key(other)
}

/// A session that continues in another process.
pub struct SessionHandover {
    /// Export name.
    pub export: String,
    /// The connection.
    pub stream: OwnedFd,
    /// Channel for back-end requests, if the front end has sent one.
    pub channel: Option<OwnedFd>,
    /// Messages of the front end: bytes of the protocol, each with its descriptors.
    pub messages: Vec<(Vec<u8>, Vec<OwnedFd>)>,
}

impl SessionHandover {
    pub(crate) fn new(
        export: &str,
        stream: OwnedFd,
        channel: Option<OwnedFd>,
        messages: Vec<Message>,
    ) -> SessionHandover {
        SessionHandover {
            export: export.to_owned(),
            stream,
            channel,
            messages: messages.into_iter().map(|one| one.encode(0)).collect(),
        }
    }

    /// Returns the messages, checked like those of a front end.
    pub(crate) fn take_messages(&mut self) -> io::Result<Vec<Message>> {
        let messages = std::mem::take(&mut self.messages).into_iter();
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        messages
            .map(|(bytes, fds)| parse(&bytes, fds).map_err(invalid))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use vhost_user_wire::VringAddr;

    use super::*;

    fn fd() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn state(index: u32, num: u32) -> VringState {
        VringState { index, num }
    }

    fn region(guest_address: u64) -> MemoryRegion {
        MemoryRegion {
            guest_address,
            size: 4096,
            user_address: guest_address,
            mmap_offset: 0,
        }
    }

    /// Returns all messages about ring 0, in replay order.
    fn ring() -> [Message; 7] {
        let addresses = VringAddr {
            index: 0,
            flags: 0,
            descriptor: 0,
            used: 0,
            available: 0,
            log: 0,
        };
        [
            Message::SetVringNum(state(0, 1)),
            Message::SetVringAddr(addresses),
            Message::SetVringBase(state(0, 1)),
            Message::SetVringCall(0, Some(fd())),
            Message::SetVringErr(0, Some(fd())),
            Message::SetVringEnable(state(0, 1)),
            Message::SetVringKick(0, Some(fd())),
        ]
    }

    fn record_of(messages: impl IntoIterator<Item = Message>) -> Record {
        let mut record = Record::default();
        messages.into_iter().for_each(|one| record.insert(one));
        record
    }

    /// Returns the request numbers of the messages in effect.
    fn requests(record: Record, bases: &[(u32, u32)]) -> Vec<u32> {
        let messages = record.messages(&bases.iter().copied().collect());
        messages.into_iter().map(|one| one.into_parts().0).collect()
    }

    #[test]
    fn what_is_said_again_is_what_is_in_effect_in_an_order_that_can_be() {
        let record = record_of([
            Message::SetVringKick(1, Some(fd())),
            Message::SetVringNum(state(1, 128)),
            Message::SetVringNum(state(1, 256)),
            Message::SetVringEnable(state(1, 1)),
            Message::SetMemTable(vec![(region(1), fd())]),
            Message::SetMemTable(vec![(region(2), fd())]),
            Message::SetFeatures(3),
            Message::SetInflightFd(vhost_user_wire::Inflight::default(), fd()),
            Message::GetFeatures,
        ]);
        assert_eq!(requests(record, &[(1, 77)]), [2, 5, 32, 8, 10, 18, 12]);
    }

    #[test]
    fn stopped_ring_is_not_started_and_reset_device_has_no_rings() {
        let stop = Message::GetVringBase(state(0, 0));
        let record = record_of(ring().into_iter().chain([stop]));
        assert_eq!(requests(record, &[]), [8, 9, 10, 13, 14, 18]);
        let record = record_of(ring().into_iter().chain([Message::ResetDevice]));
        assert_eq!(requests(record, &[]), [13, 14]);
    }

    #[test]
    fn region_that_was_added_and_removed_is_not_said() {
        let record = record_of([
            Message::AddMemReg(region(1), fd()),
            Message::AddMemReg(region(2), fd()),
            Message::RemMemReg(region(1)),
        ]);
        let left = record.messages(&BTreeMap::new());
        assert!(matches!(&left[..], [Message::AddMemReg(left, _)] if *left == region(2)));
        // The removal from a table is replayed.
        let table = Message::SetMemTable(vec![(region(1), fd()), (region(2), fd())]);
        let record = record_of([table, Message::RemMemReg(region(1))]);
        assert_eq!(requests(record, &[]), [5, 38]);
    }

    #[test]
    fn ring_without_a_descriptor_replaces_the_message_with_one() {
        let record = record_of([
            Message::SetVringCall(3, None),
            Message::SetVringCall(3, Some(fd())),
        ]);
        assert_eq!(requests(record, &[]).len(), 1);
    }
}
