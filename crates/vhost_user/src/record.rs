//! Messages of a front end that are in effect. With their descriptors they rebuild the session in another process. Their bytes are those of
//! the vhost-user protocol, versioned by feature bits: a newer process understands them, or refuses the session as it would refuse the
//! front end.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use crate::relay::Message;

const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_LOG_BASE: u32 = 6;
const SET_LOG_FD: u32 = 7;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_INFLIGHT_FD: u32 = 32;
const RESET_DEVICE: u32 = 34;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;

/// Messages about a ring in replay order: a ring starts with its kick.
const RING_MESSAGES: [u32; 7] = [
    SET_VRING_NUM,
    SET_VRING_ADDR,
    SET_VRING_BASE,
    SET_VRING_CALL,
    SET_VRING_ERR,
    SET_VRING_ENABLE,
    SET_VRING_KICK,
];

/// Guest address, size and user address of a region, after eight bytes of padding.
const REGION: std::ops::Range<usize> = 8..32;

/// The messages of a session.
#[derive(Default)]
pub(crate) struct Record {
    /// Features, protocol features, dirty log and in-flight region, by request.
    single: BTreeMap<u32, Message>,
    memory: Vec<Message>,
    /// By ring and position in [`RING_MESSAGES`].
    rings: BTreeMap<(u32, usize), Message>,
}

impl Record {
    /// Records a message that was executed.
    pub fn insert(&mut self, message: Message) {
        match message.request {
            SET_FEATURES | SET_LOG_BASE | SET_LOG_FD | SET_PROTOCOL_FEATURES | SET_INFLIGHT_FD => {
                self.single.insert(message.request, message);
            }
            SET_MEM_TABLE => self.memory = vec![message],
            ADD_MEM_REG => self.memory.push(message),
            REM_MEM_REG => self.remove_region(message),
            GET_VRING_BASE => {
                // The ring has stopped. The front end sends its position when it starts the ring again.
                if let Some(ring) = message.word(0) {
                    self.drop_ring_messages(ring, &[SET_VRING_KICK]);
                }
            }
            RESET_DEVICE => {
                let stale = [
                    SET_VRING_NUM,
                    SET_VRING_ADDR,
                    SET_VRING_BASE,
                    SET_VRING_ENABLE,
                    SET_VRING_KICK,
                ];
                let rings: Vec<u32> = self.rings.keys().map(|(ring, _)| *ring).collect();
                rings
                    .into_iter()
                    .for_each(|ring| self.drop_ring_messages(ring, &stale));
            }
            request => {
                let position = RING_MESSAGES.iter().position(|of_ring| *of_ring == request);
                if let (Some(position), Some(word)) = (position, message.word(0)) {
                    // In messages with descriptors, the ring is one byte, followed by flags.
                    let ring = match request {
                        SET_VRING_KICK..=SET_VRING_ERR => word & 0xff,
                        _ => word,
                    };
                    self.rings.insert((ring, position), message);
                }
            }
        }
    }

    fn drop_ring_messages(&mut self, ring: u32, requests: &[u32]) {
        self.rings.retain(|(owner, position), _| {
            let matches = requests.contains(&RING_MESSAGES[*position]);
            *owner != ring || !matches
        });
    }

    /// Drops the message of an added region. Records the removal of a region of the table.
    fn remove_region(&mut self, message: Message) {
        let region = message.payload.get(REGION);
        let added = self
            .memory
            .iter()
            .position(|known| known.request == ADD_MEM_REG && known.payload.get(REGION) == region);
        match added {
            Some(at) => drop(self.memory.remove(at)),
            None => self.memory.push(message),
        }
    }

    /// Returns the messages, with each ring at its stop position: `bases` by ring.
    pub fn messages(mut self, bases: &BTreeMap<u32, u32>) -> Vec<Message> {
        let base = RING_MESSAGES
            .iter()
            .position(|owner| *owner == SET_VRING_BASE);
        for (&ring, &stopped) in bases {
            let payload = [ring, stopped].map(u32::to_ne_bytes).concat();
            let message = Message::new(SET_VRING_BASE, Message::PLAIN, payload);
            self.rings.insert((ring, base.unwrap_or(0)), message);
        }
        let mut messages: Vec<Message> = Vec::new();
        let mut single = self.single;
        let inflight = single.remove(&SET_INFLIGHT_FD);
        messages.extend(single.into_values());
        messages.extend(self.memory);
        messages.extend(inflight);
        messages.extend(self.rings.into_values());
        messages
    }
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
            messages: messages.into_iter().map(Message::into_bytes).collect(),
        }
    }

    /// Returns the messages, checked like those of a front end.
    pub(crate) fn take_messages(&mut self) -> io::Result<Vec<Message>> {
        let messages = std::mem::take(&mut self.messages).into_iter();
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not a vhost-user message");
        messages
            .map(|(bytes, fds)| Message::of_bytes(&bytes, fds).ok_or_else(invalid))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(request: u32, words: &[u32]) -> Message {
        let payload = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Message::new(request, Message::PLAIN, payload)
    }

    fn messages_of(record: Record, bases: &[(u32, u32)]) -> Vec<(u32, Vec<u8>)> {
        let messages = record.messages(&bases.iter().copied().collect());
        let messages_of = messages.into_iter().map(|one| (one.request, one.payload));
        messages_of.collect()
    }

    #[test]
    fn what_is_said_again_is_what_is_in_effect_in_an_order_that_can_be() {
        let mut record = Record::default();
        for (request, words) in [
            (SET_VRING_KICK, &[1, 0][..]),
            (SET_VRING_NUM, &[1, 128]),
            (SET_VRING_NUM, &[1, 256]),
            (SET_VRING_ENABLE, &[1, 1]),
            (SET_MEM_TABLE, &[1]),
            (SET_MEM_TABLE, &[2]),
            (SET_FEATURES, &[3, 0]),
            (SET_INFLIGHT_FD, &[9]),
            (1, &[]),
        ] {
            record.insert(message(request, words));
        }
        let requests: Vec<u32> = messages_of(record, &[(1, 77)])
            .iter()
            .map(|one| one.0)
            .collect();
        assert_eq!(
            requests,
            [
                SET_FEATURES,
                SET_MEM_TABLE,
                SET_INFLIGHT_FD,
                SET_VRING_NUM,
                SET_VRING_BASE,
                SET_VRING_ENABLE,
                SET_VRING_KICK
            ]
        );
    }

    #[test]
    fn stopped_ring_is_not_started_and_reset_device_has_no_rings() {
        let ring = |record: &mut Record| {
            for request in RING_MESSAGES {
                record.insert(message(request, &[0, 1]));
            }
        };
        let mut record = Record::default();
        ring(&mut record);
        record.insert(message(GET_VRING_BASE, &[0, 0]));
        let requests: Vec<u32> = messages_of(record, &[]).iter().map(|one| one.0).collect();
        assert_eq!(requests, RING_MESSAGES[..6]);
        let mut record = Record::default();
        ring(&mut record);
        record.insert(message(RESET_DEVICE, &[]));
        let requests: Vec<u32> = messages_of(record, &[]).iter().map(|one| one.0).collect();
        assert_eq!(requests, [SET_VRING_CALL, SET_VRING_ERR]);
    }

    #[test]
    fn region_that_was_added_and_removed_is_not_said() {
        let region = |at: u32| [0, 0, at, 0, 4096, 0, at, 0, 0, 0];
        let mut record = Record::default();
        record.insert(message(ADD_MEM_REG, &region(1)));
        record.insert(message(ADD_MEM_REG, &region(2)));
        record.insert(message(REM_MEM_REG, &region(1)));
        let left = messages_of(record, &[]);
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].1, message(ADD_MEM_REG, &region(2)).payload);
        // The removal from a table is replayed.
        let mut record = Record::default();
        record.insert(message(SET_MEM_TABLE, &[2, 0]));
        record.insert(message(REM_MEM_REG, &region(1)));
        assert_eq!(messages_of(record, &[]).len(), 2);
    }

    #[test]
    fn ring_of_a_descriptor_is_its_lowest_byte() {
        let mut record = Record::default();
        // Ring 3 without a descriptor (bit 8).
        record.insert(message(SET_VRING_CALL, &[0x103, 0]));
        record.insert(message(SET_VRING_CALL, &[3, 0]));
        assert_eq!(messages_of(record, &[]).len(), 1);
    }
}
