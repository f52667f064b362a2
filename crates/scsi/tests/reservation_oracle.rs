//! Compares the reservation table with an independent oracle: random services of three nexuses, and after each one the permissions of every
//! nexus.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::*;
use proptest::prelude::*;
use scsi::*;

const NEXUSES: usize = 3;

#[derive(Clone, Debug)]
struct Service {
    nexus: usize,
    action: u8,
    kind: u8,
    key: u64,
    new_key: u64,
}

fn services() -> impl Strategy<Value = Vec<Service>> {
    let kind = prop::sample::select(vec![1u8, 3, 5, 6, 7, 8]);
    let one = (0..NEXUSES, 0u8..7, kind, 0u64..4, 0u64..4).prop_map(
        |(nexus, action, kind, key, new_key)| Service {
            nexus,
            action,
            kind,
            key,
            new_key,
        },
    );
    prop::collection::vec(one, 1..40)
}

/// Keys of registrants, and the reservation with its holder. Types 7 and 8 have no single holder.
#[derive(Default, Debug)]
struct Oracle {
    keys: BTreeMap<usize, u64>,
    held: Option<(u8, usize)>,
}

#[derive(Debug, PartialEq)]
enum Verdict {
    Good,
    Conflict,
    Check,
}

impl Oracle {
    fn is_holder(&self, nexus: usize) -> bool {
        match self.held {
            Some((7 | 8, _)) => self.keys.contains_key(&nexus),
            Some((_, holder)) => holder == nexus,
            None => false,
        }
    }

    fn after_leaving(&mut self) {
        match self.held {
            Some((7 | 8, _)) if self.keys.is_empty() => self.held = None,
            Some((1..=6, holder)) if !self.keys.contains_key(&holder) => self.held = None,
            _ => {}
        }
    }

    fn serve(&mut self, s: &Service) -> Verdict {
        let own = self.keys.get(&s.nexus).copied();
        let ignore = s.action == 6;
        if s.action == 0 || ignore {
            if !ignore && own.unwrap_or(0) != s.key {
                return Verdict::Conflict;
            }
            if s.new_key == 0 {
                self.keys.remove(&s.nexus);
                self.after_leaving();
            } else {
                self.keys.insert(s.nexus, s.new_key);
            }
            return Verdict::Good;
        }
        if own != Some(s.key) {
            return Verdict::Conflict;
        }
        match s.action {
            1 => match self.held {
                None => self.held = Some((s.kind, s.nexus)),
                Some((kind, _)) if self.is_holder(s.nexus) && kind == s.kind => {}
                Some(_) => return Verdict::Conflict,
            },
            2 => match self.held {
                Some((kind, _)) if self.is_holder(s.nexus) => {
                    if kind != s.kind {
                        return Verdict::Check;
                    }
                    self.held = None;
                }
                _ => {}
            },
            3 => *self = Oracle::default(),
            _ => return self.preempt(s),
        }
        Verdict::Good
    }

    fn preempt(&mut self, s: &Service) -> Verdict {
        let takes_over = match self.held {
            None => false,
            Some((7 | 8, _)) => s.new_key == 0,
            Some((_, holder)) => self.keys.get(&holder) == Some(&s.new_key),
        };
        if takes_over {
            let all = s.new_key == 0;
            self.keys
                .retain(|nexus, key| *nexus == s.nexus || !(all || *key == s.new_key));
            self.held = Some((s.kind, s.nexus));
            return Verdict::Good;
        }
        if s.new_key == 0 {
            return Verdict::Check;
        }
        if !self.keys.values().any(|key| *key == s.new_key) {
            return Verdict::Conflict;
        }
        self.keys.retain(|_, key| *key != s.new_key);
        self.after_leaving();
        Verdict::Good
    }

    fn may(&self, nexus: usize, write: bool) -> bool {
        let Some((kind, holder)) = self.held else {
            return true;
        };
        let registered = self.keys.contains_key(&nexus);
        let privileged = match kind {
            1 | 3 => holder == nexus,
            5 | 6 => holder == nexus || registered,
            _ => registered,
        };
        let reads_are_free = matches!(kind, 1 | 5 | 7);
        privileged || (reads_are_free && !write)
    }
}

/// Repeats a command until no unit attention is reported.
fn settled(bed: &mut Bed, nexus: &Arc<Nexus>, cdb: &[u8], data_out: &[u8]) -> Answer {
    loop {
        let answer = bed.run_as(nexus, 0, cdb, data_out, 512);
        if answer.code().0 != 0x06 {
            return answer;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reservations_agree_with_the_oracle(services in services()) {
        let mut bed = Bed::new(512, 64);
        let nexuses: Vec<_> = (0..NEXUSES).map(|number| bed.other_nexus(10 + number as u8)).collect();
        hold(&mut [bed], &nexuses, |_| 0, &services)?;
    }

    /// The first two nexuses differ only in their daemons.
    #[test]
    fn reservations_of_two_daemons_agree_with_the_oracle(services in services()) {
        let shared = Arc::new(SharedState::default());
        let mut beds = [1, 2].map(|daemon| {
            let mut bed = Bed::with(block::DiskInfo { shared: true, ..info(512, 64, 0) }, false);
            shared.join(&mut bed, daemon);
            bed
        });
        let nexuses = [(0, 10), (1, 10), (0, 12)].map(|(bed, number)| beds[bed].other_nexus(number));
        hold(&mut beds, &nexuses, |nexus| [0, 1, 0][nexus], &services)?;
    }
}

/// Compares the beds with the oracle. `bed_of` maps a nexus to its bed.
fn hold(
    beds: &mut [Bed],
    nexuses: &[Arc<Nexus>],
    bed_of: impl Fn(usize) -> usize,
    services: &[Service],
) -> Result<(), TestCaseError> {
    let mut oracle = Oracle::default();
    for service in services {
        let bed = &mut beds[bed_of(service.nexus)];
        let cdb = [0x5f, service.action, service.kind, 0, 0, 0, 0, 0, 24, 0];
        let mut list = service.key.to_be_bytes().to_vec();
        list.extend(service.new_key.to_be_bytes());
        list.extend([0; 8]);
        let answer = settled(bed, &nexuses[service.nexus], &cdb, &list);
        let verdict = match answer.status {
            Status::Good => Verdict::Good,
            Status::ReservationConflict => Verdict::Conflict,
            _ => Verdict::Check,
        };
        prop_assert_eq!(
            verdict,
            oracle.serve(service),
            "{:?} of {:?}",
            service,
            services
        );
        for (number, nexus) in nexuses.iter().enumerate() {
            let bed = &mut beds[bed_of(number)];
            let read = settled(bed, nexus, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[]);
            let write = settled(bed, nexus, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512]);
            prop_assert_eq!(read.status == Status::Good, oracle.may(number, false));
            prop_assert_eq!(write.status == Status::Good, oracle.may(number, true));
        }
        for bed in &mut *beds {
            let keys = bed
                .run(0, &[0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0], &[], 256)
                .data;
            prop_assert_eq!(usize::from(keys[7]) / 8, oracle.keys.len());
        }
    }
    Ok(())
}
