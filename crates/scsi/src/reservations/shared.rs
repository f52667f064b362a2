//! Registrations and reservation of a unit that several daemons serve: the shared byte format, with the notices that each daemon must pass
//! to its initiators after recent changes.
//!
//! | bytes | content |
//! |---|---|
//! | 1 | format, 1 |
//! | 1 | 1: the state survives a loss of power (APTPL) |
//! | 1 | type of the reservation, 0: none |
//! | 4 | PRGENERATION |
//! | 2 | number of registrations; for each: 1: it holds the reservation, 8 key, registrant |
//! | 8 | version after which notices are complete: those of all later versions are present |
//! | 2 | number of notices; for each: 8 version, 2 additional sense code or 0, 1: its tasks are aborted, registrant |
//!
//! A registrant is 16 bytes of a daemon, 2 of its relative target port identifier, 2 of a length, and a TransportID. Empty bytes are an
//! empty state. The bytes are not trusted: another daemon, or any client that may write the pool, has written them. Every length is
//! checked.

use super::services::REGISTRATIONS_MAX;
use super::{DaemonId, Effects, Kind, Registrant, Registration, Reservation, Reservations};
use crate::nexus::TransportId;
use crate::sense::SenseCode;

const FORMAT: u8 = 1;

/// Maximum length of the shared state, in bytes.
pub const SHARED_STATE_MAX: usize = 128 << 10;

/// Number of old notices kept at a change, for daemons that missed changes.
const NOTICES_KEPT: usize = 64;

/// Maximum number of notices.
const NOTICES_MAX: usize = 2 * REGISTRATIONS_MAX;

/// Effect of a change on one registrant, to be applied by its daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    /// Version created by the change.
    pub version: u64,
    pub who: Registrant,
    pub code: Option<SenseCode>,
    pub abort: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SharedReservations {
    pub reservations: Reservations,
    /// Notices of all later versions are present.
    pub complete_from: u64,
    pub notices: Vec<Notice>,
}

impl SharedReservations {
    /// Applies a change by `by`, which creates `version`.
    pub fn change(
        &mut self,
        reservations: Reservations,
        effects: &Effects,
        version: u64,
        by: &Registrant,
    ) {
        self.reservations = reservations;
        let excess = self.notices.len().saturating_sub(NOTICES_KEPT);
        self.forget(excess);
        let aborts = |who: &Registrant| who != by && effects.aborts.contains(who);
        let established = effects.attentions.iter().map(|(who, code)| Notice {
            version,
            who: who.clone(),
            code: Some(*code),
            abort: aborts(who),
        });
        let is_notified = |who: &&Registrant| {
            effects
                .attentions
                .iter()
                .any(|(established, _)| established == *who)
        };
        let others = effects
            .aborts
            .iter()
            .filter(|who| !is_notified(who) && aborts(who));
        let others = others.map(|who| Notice {
            version,
            who: who.clone(),
            code: None,
            abort: true,
        });
        self.notices.extend(established.chain(others));
        if self.notices.len() > NOTICES_MAX {
            self.forget(self.notices.len());
        }
    }

    /// Drops the first `count` notices, and all others of their versions.
    fn forget(&mut self, count: usize) {
        let Some(last) = count.checked_sub(1).and_then(|at| self.notices.get(at)) else {
            return;
        };
        self.complete_from = last.version;
        self.notices.retain(|one| one.version > self.complete_from);
    }

    /// Encodes the state; `own` is this daemon's identifier in the bytes. Drops old notices if needed; `None` if the registrations alone
    /// are too long.
    pub fn encode(&mut self, own: DaemonId) -> Option<Vec<u8>> {
        loop {
            let bytes = self.encode_all(own);
            if bytes.len() <= SHARED_STATE_MAX {
                return Some(bytes);
            }
            if self.notices.is_empty() {
                return None;
            }
            self.forget(self.notices.len().div_ceil(2));
        }
    }

    fn encode_all(&self, own: DaemonId) -> Vec<u8> {
        let Reservations {
            generation,
            registrations,
            reservation,
            persist,
            reserved_by: _,
        } = &self.reservations;
        let kind = reservation.as_ref().map_or(0, |one| one.kind as u8);
        let mut bytes = vec![FORMAT, u8::from(*persist), kind];
        bytes.extend(generation.to_be_bytes());
        bytes.extend((registrations.len() as u16).to_be_bytes());
        for registration in registrations {
            let holder = reservation.as_ref().and_then(|one| one.holder.as_ref());
            bytes.push((holder == Some(&registration.who)).into());
            bytes.extend(registration.key.to_be_bytes());
            encode_registrant(&mut bytes, &registration.who, own);
        }
        bytes.extend(self.complete_from.to_be_bytes());
        bytes.extend((self.notices.len() as u16).to_be_bytes());
        for notice in &self.notices {
            bytes.extend(notice.version.to_be_bytes());
            bytes.extend(notice.code.map_or(0, |code| code.0).to_be_bytes());
            bytes.push(notice.abort.into());
            encode_registrant(&mut bytes, &notice.who, own);
        }
        bytes
    }

    /// Decodes the result of [`SharedReservations::encode`] from any daemon; `None` if the bytes are malformed.
    pub fn decode(bytes: &[u8], own: DaemonId) -> Option<SharedReservations> {
        if bytes.is_empty() {
            return Some(SharedReservations::default());
        }
        if bytes.len() > SHARED_STATE_MAX {
            return None;
        }
        let mut rest = bytes;
        let [format, persist, kind] = take(&mut rest)?;
        if format != FORMAT {
            return None;
        }
        let generation = u32::from_be_bytes(take(&mut rest)?);
        let count = usize::from(u16::from_be_bytes(take(&mut rest)?));
        let mut registrations: Vec<Registration> = Vec::new();
        let mut holder = None;
        if count > REGISTRATIONS_MAX {
            return None;
        }
        for _ in 0..count {
            let holds = flag(&mut rest)?;
            let key = u64::from_be_bytes(take(&mut rest)?);
            let who = decode_registrant(&mut rest, own)?;
            if key == 0 || registrations.iter().any(|one| one.who == who) {
                return None;
            }
            if holds && holder.replace(who.clone()).is_some() {
                return None;
            }
            registrations.push(Registration { who, key });
        }
        let reservation = match (kind, Kind::from_code(kind)) {
            (0, _) if holder.is_none() => None,
            (_, Some(kind))
                if kind.all_registrants() == holder.is_none() && !registrations.is_empty() =>
            {
                Some(Reservation { kind, holder })
            }
            _ => return None,
        };
        let complete_from = u64::from_be_bytes(take(&mut rest)?);
        let count = usize::from(u16::from_be_bytes(take(&mut rest)?));
        let mut notices = Vec::new();
        for _ in 0..count {
            let version = u64::from_be_bytes(take(&mut rest)?);
            let code = u16::from_be_bytes(take(&mut rest)?);
            let abort = flag(&mut rest)?;
            notices.push(Notice {
                version,
                who: decode_registrant(&mut rest, own)?,
                code: (code != 0).then_some(SenseCode(code)),
                abort,
            });
        }
        let persist = match persist {
            0 => false,
            1 => true,
            _ => return None,
        };
        rest.is_empty().then_some(SharedReservations {
            reservations: Reservations {
                generation,
                registrations,
                reservation,
                persist,
                reserved_by: None,
            },
            complete_from,
            notices,
        })
    }
}

fn encode_registrant(bytes: &mut Vec<u8>, who: &Registrant, own: DaemonId) {
    let daemon = match who.daemon {
        DaemonId::THIS => own,
        other => other,
    };
    let id = who.initiator.as_bytes();
    bytes.extend(daemon.0.to_be_bytes());
    bytes.extend(who.port.to_be_bytes());
    bytes.extend((id.len() as u16).to_be_bytes());
    bytes.extend(id);
}

fn decode_registrant(rest: &mut &[u8], own: DaemonId) -> Option<Registrant> {
    let daemon = DaemonId(u128::from_be_bytes(take(rest)?));
    let port = u16::from_be_bytes(take(rest)?);
    let length = usize::from(u16::from_be_bytes(take(rest)?));
    let (id, more) = rest.split_at_checked(length)?;
    *rest = more;
    let (initiator, extra) = TransportId::parse(id)?;
    // Only normalised names are accepted: otherwise one initiator could be registered twice.
    if !extra.is_empty() || initiator.as_bytes() != id || daemon == DaemonId::THIS {
        return None;
    }
    Some(Registrant {
        daemon: if daemon == own {
            DaemonId::THIS
        } else {
            daemon
        },
        initiator,
        port,
    })
}

fn flag(rest: &mut &[u8]) -> Option<bool> {
    match take(rest)? {
        [0] => Some(false),
        [1] => Some(true),
        _ => None,
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, more) = rest.split_first_chunk::<N>()?;
    *rest = more;
    Some(*taken)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const OWN: DaemonId = DaemonId(0x0102_0304);

    fn registrant() -> impl Strategy<Value = Registrant> {
        let fields = (0..3_u128, 0..4_u16, any::<[u8; 6]>());
        fields.prop_map(|(daemon, port, isid)| Registrant {
            daemon: DaemonId(daemon),
            initiator: TransportId::iscsi_port("iqn.2026-11.org.example:i", isid),
            port,
        })
    }

    fn shared() -> impl Strategy<Value = SharedReservations> {
        let registration = (registrant(), 1..u64::MAX);
        let notice = (any::<u64>(), registrant(), any::<u16>(), any::<bool>());
        let notice = notice.prop_map(|(version, who, code, abort)| Notice {
            version,
            who,
            code: (code != 0).then_some(SenseCode(code)),
            abort,
        });
        let fields = (
            (any::<u32>(), any::<bool>(), any::<u64>()),
            vec(registration, 0..6),
            any::<prop::sample::Index>(),
            0..9_u8,
            vec(notice, 0..6),
        );
        fields.prop_map(
            |((generation, persist, complete_from), named, holder, kind, notices)| {
                let mut registrations: Vec<Registration> = Vec::new();
                for (who, key) in named {
                    if registrations.iter().all(|one| one.who != who) {
                        registrations.push(Registration { who, key });
                    }
                }
                let kind = Kind::from_code(kind).filter(|_| !registrations.is_empty());
                let reservation = kind.map(|kind| {
                    let holder = registrations[holder.index(registrations.len())].who.clone();
                    Reservation {
                        kind,
                        holder: (!kind.all_registrants()).then_some(holder),
                    }
                });
                SharedReservations {
                    reservations: Reservations {
                        generation,
                        registrations,
                        reservation,
                        persist,
                        reserved_by: None,
                    },
                    complete_from,
                    notices,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn whole_state_is_decoded_and_a_truncated_one_refused(mut shared in shared()) {
            let bytes = shared.encode(OWN).unwrap();
            let decoded = SharedReservations::decode(&bytes, OWN);
            prop_assert_eq!(decoded.as_ref(), Some(&shared));
            for length in 1..bytes.len() {
                prop_assert_eq!(SharedReservations::decode(&bytes[..length], OWN), None);
            }
            prop_assert_eq!(SharedReservations::decode(&[&bytes[..], &[0]].concat(), OWN), None);
        }

        #[test]
        fn a_state_with_any_byte_changed_reads_the_same_again_or_is_none(
            mut shared in shared(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut bytes = shared.encode(OWN).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Some(mut decoded) = SharedReservations::decode(&bytes, OWN) {
                prop_assert_eq!(decoded.encode(OWN), Some(bytes));
            }
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in vec(any::<u8>(), 0..300)) {
            SharedReservations::decode(&bytes, OWN);
            SharedReservations::decode(&[&[1, 0, 0][..], &bytes].concat(), OWN);
        }
    }

    fn who(daemon: u128, number: u8) -> Registrant {
        Registrant {
            daemon: DaemonId(daemon),
            initiator: TransportId::iscsi_port("iqn.2026-11.org.example:i", [number; 6]),
            port: 1,
        }
    }

    #[test]
    fn another_daemon_reads_the_number_of_this_one_as_foreign() {
        let mut reservations = Reservations::default();
        let registered = reservations.register(&who(0, 1), &[], 0, 7, false, false);
        assert!(registered.is_ok());
        let mut shared = SharedReservations {
            reservations,
            ..SharedReservations::default()
        };
        let bytes = shared.encode(OWN).unwrap();
        let id = who(0, 1).initiator;
        let mut expected = vec![1, 0, 0, 0, 0, 0, 1, 0, 1];
        expected.extend([0, 0, 0, 0, 0, 0, 0, 0, 7]);
        expected.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 0, 1, 0]);
        expected.push(id.as_bytes().len() as u8);
        expected.extend(id.as_bytes());
        expected.extend([0; 10]);
        assert_eq!(bytes, expected);
        let elsewhere = SharedReservations::decode(&bytes, DaemonId(9)).unwrap();
        assert_eq!(elsewhere.reservations.registrations[0].who, who(OWN.0, 1));
        // Another daemon encodes the same bytes.
        assert_eq!(elsewhere.clone().encode(DaemonId(9)), Some(bytes));
    }

    #[test]
    fn impossible_states_are_refused() {
        let registration = |holds: u8, key: u64| {
            let mut bytes = vec![holds];
            bytes.extend(key.to_be_bytes());
            encode_registrant(&mut bytes, &who(5, 1), OWN);
            bytes
        };
        let state = |kind: u8, registrations: &[Vec<u8>]| {
            let mut bytes = vec![1, 0, kind, 0, 0, 0, 1, 0, registrations.len() as u8];
            bytes.extend(registrations.concat());
            bytes.extend([0; 10]);
            SharedReservations::decode(&bytes, OWN)
        };
        assert!(state(1, &[registration(1, 7)]).is_some());
        assert!(state(7, &[registration(0, 7)]).is_some());
        for (kind, registrations, why) in [
            (1, vec![registration(0, 7)], "no holder"),
            (7, vec![registration(1, 7)], "all hold it"),
            (0, vec![registration(1, 7)], "nothing to hold"),
            (2, vec![registration(1, 7)], "no such type"),
            (1, vec![registration(1, 0)], "a key of zero"),
            (7, vec![], "no registrant"),
            (1, vec![registration(1, 7); 2], "registered twice"),
        ] {
            assert_eq!(state(kind, &registrations), None, "{why}");
        }
        assert!(SharedReservations::decode(&[], OWN).is_some());
    }

    #[test]
    fn old_notices_are_dropped_by_version_and_counted() {
        let mut shared = SharedReservations::default();
        let change = |shared: &mut SharedReservations, version, count: u8| {
            let established = (0..count).map(|n| (who(5, n), SenseCode::RESERVATIONS_RELEASED));
            let effects = Effects {
                attentions: established.collect(),
                aborts: Vec::new(),
            };
            shared.change(Reservations::default(), &effects, version, &who(0, 1));
        };
        for version in 1..=3 {
            change(&mut shared, version, 30);
        }
        assert_eq!((shared.complete_from, shared.notices.len()), (0, 90));
        change(&mut shared, 4, 1);
        assert_eq!((shared.complete_from, shared.notices.len()), (1, 61));
        // Many long names: notices are dropped until the state fits.
        let long = |n: u16| Registrant {
            initiator: TransportId::iscsi_device(&format!("{}{n}", "a".repeat(900))),
            ..who(5, 0)
        };
        let effects = Effects {
            attentions: (0..200)
                .map(|n| (long(n), SenseCode::REGISTRATIONS_PREEMPTED))
                .collect(),
            aborts: vec![long(3), who(0, 1)],
        };
        shared.change(Reservations::default(), &effects, 5, &who(0, 1));
        assert!(
            shared.notices.iter().filter(|one| one.abort).count() == 1,
            "not by itself"
        );
        let bytes = shared.encode(OWN).unwrap();
        assert!(bytes.len() <= SHARED_STATE_MAX);
        assert_eq!((shared.complete_from, shared.notices.len()), (5, 0));
    }
}
