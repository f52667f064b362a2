//! Saved form of registrations and reservation, for a restart with APTPL.
//!
//! Version 1, reservation type (0: none), then for each registration: holder flag, port, key, length of the TransportID, TransportID.

use super::{DaemonId, Kind, Registrant, Registration, Reservation, Reservations};
use crate::nexus::TransportId;

const VERSION: u8 = 1;

impl Reservations {
    /// Encodes the state to save: empty unless APTPL was requested.
    pub fn encode(&self) -> Vec<u8> {
        if !self.persist || self.registrations.is_empty() {
            return Vec::new();
        }
        let kind = self
            .reservation
            .as_ref()
            .map_or(0, |reservation| reservation.kind as u8);
        let mut bytes = vec![VERSION, kind];
        for registration in &self.registrations {
            let reservation = self.reservation.as_ref();
            let holds = reservation.and_then(|it| it.holder.as_ref()) == Some(&registration.who);
            let id = registration.who.initiator.as_bytes();
            bytes.push(holds.into());
            bytes.extend(registration.who.port.to_be_bytes());
            bytes.extend(registration.key.to_be_bytes());
            bytes.extend((id.len() as u16).to_be_bytes());
            bytes.extend(id);
        }
        bytes
    }

    /// Decodes saved bytes; `None` if they are malformed. Empty bytes mean no registrations.
    pub fn decode(bytes: &[u8]) -> Option<Reservations> {
        match bytes.is_empty() {
            true => Some(Reservations::default()),
            false => decode(bytes),
        }
    }
}

fn decode(bytes: &[u8]) -> Option<Reservations> {
    let [VERSION, kind, rest @ ..] = bytes else {
        return None;
    };
    let mut reservations = Reservations {
        persist: true,
        ..Reservations::default()
    };
    let mut holder = None;
    let mut rest = rest;
    while !rest.is_empty() {
        let (head, tail) = rest.split_first_chunk::<13>()?;
        let [holds, port @ .., _, _] = head;
        let length = u16::from_be_bytes([head[11], head[12]]);
        let (id, tail) = tail.split_at_checked(length.into())?;
        let (initiator, extra) = TransportId::parse(id)?;
        if !extra.is_empty() {
            return None;
        }
        let port_id = u16::from_be_bytes([port[0], port[1]]);
        let key = u64::from_be_bytes(*port.last_chunk::<8>()?);
        let who = Registrant {
            daemon: DaemonId::THIS,
            initiator,
            port: port_id,
        };
        if *holds != 0 {
            holder = Some(who.clone());
        }
        // State saved before names were normalised may contain one initiator in two spellings.
        if reservations.registrations.iter().any(|one| one.who == who) {
            rest = tail;
            continue;
        }
        reservations.registrations.push(Registration { who, key });
        rest = tail;
    }
    if let Some(kind) = Kind::from_code(*kind) {
        if kind.all_registrants() != holder.is_none() {
            return None;
        }
        reservations.reservation = Some(Reservation { kind, holder });
    }
    Some(reservations)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Reservations {
        let who = |number: u8| Registrant {
            daemon: DaemonId::THIS,
            initiator: TransportId::iscsi_port("iqn.2026-11.org.example:i", [number; 6]),
            port: number.into(),
        };
        let mut reservations = Reservations::default();
        for number in 1..4 {
            reservations
                .register(&who(number), &[], 0, 100 + u64::from(number), false, true)
                .unwrap();
        }
        reservations
            .reserve(&who(2), 102, Kind::ExclusiveAccessRegistrantsOnly)
            .unwrap();
        reservations
    }

    #[test]
    fn saved_state_round_trips() {
        let before = some();
        let after = Reservations::decode(&before.encode()).expect("the encoded value");
        assert_eq!(after.registrations, before.registrations);
        assert_eq!(after.reservation, before.reservation);
        assert!(after.persist);
    }

    #[test]
    fn without_aptpl_nothing_is_saved_and_damaged_bytes_are_ignored() {
        let mut reservations = some();
        let bytes = reservations.encode();
        reservations.persist = false;
        assert!(reservations.encode().is_empty());
        for length in 0..bytes.len() {
            // The format has no total length: the store's checksum detects a cut at the end of a registration.
            let decoded = Reservations::decode(&bytes[..length]).unwrap_or_default();
            assert!(decoded.registrations.len() < 3, "{length}");
        }
    }
}
