//! Reservations while requests are in flight: changes them and checks every response against them.
//!
//! A request without a concurrent change of the reservations has one permitted result: a conflict or none. With a concurrent change both
//! are permitted. After a lost response the state is unknown until a client clears all reservations.

use uring::simulated::Files;

use super::{Pending, SimClient, World};
use crate::clients::{ABORTED, Kind, LOST, Outcome, Request, ReserveOut};
use crate::life::WORKERS;
use crate::random::Random;
use crate::reservations::{Expected, Nexus, Reservations, TYPES};

/// Usual maximum of rounds for a change.
const ROUNDS: usize = 40;

pub(super) struct Reserved {
    /// Expected reservations; `None` if unknown.
    state: Option<Reservations>,
    /// Number of starts and ends of changes.
    changes: u64,
    in_flight: usize,
    /// Registration since the state became unknown: nexus and key.
    registered: Option<(Nexus, u64)>,
}

impl Default for Reserved {
    fn default() -> Reserved {
        Reserved {
            state: Some(Reservations::default()),
            changes: 0,
            in_flight: 0,
            registered: None,
        }
    }
}

impl World {
    /// Returns the nexus of a client. All queues of a driver are one I_T nexus, as are all connections of a session. virtio-blk has none.
    fn nexus(&self, client: usize) -> Option<Nexus> {
        match &self.clients[client] {
            SimClient::Blk(_) => None,
            SimClient::Scsi(_) => Some(0),
            SimClient::Iscsi(one) => Some(usize::from(one.number())),
        }
    }

    pub(super) fn changes_of_reservations(&self, disk: usize) -> u64 {
        self.reservations[disk].changes
    }

    pub(super) fn reserve(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        let disk = random.below(self.plans.len() as u64) as usize;
        // Most commands depend on the command before.
        for _ in 0..1 + random.below(4) {
            self.reserve_on(disk, &mut random);
            if self.has_ended || Files::is_cut() {
                return;
            }
        }
    }

    fn reserve_on(&mut self, disk: usize, random: &mut Random) {
        let may: Vec<usize> = (0..self.clients.len())
            .filter(|index| self.nexus(*index).is_some())
            .collect();
        let client = may[random.below(may.len() as u64) as usize];
        let Some(nexus) = self.nexus(client) else {
            return;
        };
        if self.reservations[disk].in_flight > 0 {
            return;
        }
        let key = self.tick();
        let (service_action, own) = next(&self.reservations[disk], nexus, key, random);
        let request = Request {
            token: self.tick(),
            disk,
            kind: Kind::Reserve(service_action),
            lba: 0,
            blocks: 0,
            data: service_action.list(own),
        };
        let token = request.token;
        if !self.clients[client].client().submit(&request) {
            return;
        }
        let reserved = &mut self.reservations[disk];
        (reserved.changes, reserved.in_flight) = (reserved.changes + 1, reserved.in_flight + 1);
        self.submitted(client, request, 0, 0);
        for _ in 0..ROUNDS {
            for worker in 0..WORKERS {
                self.iterate(worker);
            }
            // The daemon ended, so no response will arrive.
            if self.has_ended || Files::is_cut() {
                return;
            }
            self.poll(client);
            if !self.pending.contains_key(&token) {
                return;
            }
        }
    }

    /// Records the end of a change.
    pub(super) fn reserved(
        &mut self,
        pending: &Pending,
        service_action: ReserveOut,
        outcome: &Outcome,
    ) {
        let disk = pending.request.disk;
        let nexus = self.nexus(pending.client).expect("a nexus");
        let reserved = &mut self.reservations[disk];
        reserved.changes += 1;
        reserved.in_flight = reserved.in_flight.saturating_sub(1);
        if matches!(outcome, Outcome::NotNow(_)) {
            return;
        }
        let is_only_change = reserved.changes == pending.reservations + 1;
        let Some(state) = reserved.state.take().filter(|_| is_only_change) else {
            match (service_action, outcome) {
                (ReserveOut::Register { key }, Outcome::Good) if key > 0 && is_only_change => {
                    reserved.registered = Some((nexus, key));
                }
                (ReserveOut::Clear, Outcome::Good) if is_only_change => {
                    reserved.state = Some(Reservations::default());
                }
                _ => reserved.registered = None,
            }
            return;
        };
        let expected = state.expect(nexus, service_action);
        let is_as_expected = match (outcome, &expected) {
            (Outcome::Good, Expected::Good(new)) => {
                reserved.state = Some(new.clone());
                true
            }
            (Outcome::Conflict, Expected::Conflict) | (Outcome::Failed(_), Expected::Refused) => {
                reserved.state = Some(state.clone());
                true
            }
            // The command may or may not have taken effect.
            (Outcome::Failed(why), _) => {
                reserved.registered = None;
                self.is_troubled || pending.survived || [LOST, ABORTED].contains(&why.as_str())
            }
            _ => false,
        };
        assert!(
            is_as_expected,
            "{service_action:?} of nexus {nexus} on d{disk} ends with {outcome:?}, expected {expected:?}; state before: {state:?}"
        );
    }

    /// Checks that a response is permitted by the reservations.
    pub(super) fn check_reservations(&self, pending: &Pending, outcome: &Outcome) {
        let Request {
            token, disk, kind, ..
        } = pending.request;
        let Some(nexus) = self.nexus(pending.client) else {
            assert_ne!(*outcome, Outcome::Conflict, "request {token}");
            return;
        };
        let reserved = &self.reservations[disk];
        let is_known = reserved.changes == pending.reservations && !pending.survived;
        let Some(state) = reserved.state.as_ref().filter(|_| is_known) else {
            return;
        };
        if matches!(kind, Kind::Reserve(_)) {
            return;
        }
        let conflicts = state.conflicts(nexus, kind);
        let wrong = match outcome {
            Outcome::Conflict => !conflicts,
            Outcome::Good | Outcome::Miscompare => conflicts,
            _ => false,
        };
        assert!(
            !wrong,
            "request {token}, {kind:?} of nexus {nexus} on d{disk}, ends with {outcome:?} under {state:?}"
        );
    }

    /// Discards the reservations of an ended daemon. Changes that continue in its next life may take effect at any time.
    pub(super) fn lose_reservations(&mut self) {
        for (disk, reserved) in self.reservations.iter_mut().enumerate() {
            let goes_on = |one: &&Pending| {
                one.request.disk == disk && matches!(one.request.kind, Kind::Reserve(_))
            };
            let in_flight = self.pending.values().filter(goes_on).count();
            reserved.changes += 1;
            reserved.in_flight = in_flight;
            reserved.registered = None;
            reserved.state = (in_flight == 0).then(Reservations::default);
        }
    }
}

/// Returns the next command of a nexus, and its current key.
fn next(reserved: &Reserved, nexus: Nexus, key: u64, random: &mut Random) -> (ReserveOut, u64) {
    let Some(state) = &reserved.state else {
        return match reserved.registered {
            Some((known, own)) if known == nexus => (ReserveOut::Clear, own),
            _ => (ReserveOut::Register { key }, 0),
        };
    };
    let kind = TYPES[random.below(TYPES.len() as u64) as usize];
    let own = state.key(nexus);
    let service_action = match (random.below(10), own) {
        (0..=4, None) | (0, Some(_)) => ReserveOut::Register { key },
        (1..=3, _) => ReserveOut::Reserve { kind },
        (5 | 4, _) => ReserveOut::Release {
            kind: match random.one_in(4) {
                true => kind,
                false => state.kind().unwrap_or(kind),
            },
        },
        (6..=7, _) => {
            let others: Vec<u64> = state.others(nexus).collect();
            let any = others.len() as u64 + u64::from(random.one_in(8));
            let chosen = others.get(random.below(any.max(1)) as usize);
            ReserveOut::Preempt {
                kind,
                key: chosen.copied().unwrap_or(u64::MAX),
            }
        }
        (8, _) => ReserveOut::Register { key: 0 },
        _ => ReserveOut::Clear,
    };
    (service_action, own.unwrap_or(u64::MAX - 1))
}
