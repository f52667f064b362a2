//! Counters per initiator and target, summed over all sessions and connections.
//!
//! Nothing here is on the request path. Each connection has its own counters, which are added up here when it ends. The number of
//! remembered initiators without sessions is limited.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use latency::{Counters, QueueRecord};

/// Maximum number of remembered initiator-target pairs without a session.
const REMEMBERED_MAX: usize = 256;

/// An initiator and a target.
type Pair = (String, String);

/// Counters of an initiator at a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitiatorStatus {
    /// Target name.
    pub target: String,
    /// Initiator name.
    pub initiator: String,
    /// Number of current sessions.
    pub sessions: usize,
    /// Sum over all sessions, including ended ones.
    pub counters: Counters,
}

struct Live {
    pair: Pair,
    /// Connections by number.
    connections: Vec<(u64, Arc<QueueRecord>)>,
    /// Sum of ended connections.
    ended: Counters,
}

impl Live {
    fn counters(&self) -> Counters {
        let mut sum = self.ended;
        for (_, record) in &self.connections {
            sum.merge(&record.counters());
        }
        sum
    }
}

#[derive(Default)]
struct Inner {
    /// Sessions by TSIH.
    live: HashMap<u16, Live>,
    /// Sums of ended sessions.
    ended: BTreeMap<Pair, Counters>,
    /// Pairs without a session, ordered by the end of their last session.
    left: VecDeque<Pair>,
}

/// Counters of all initiators of a server.
#[derive(Default)]
pub(crate) struct InitiatorCounters(Mutex<Inner>);

impl InitiatorCounters {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a session.
    pub fn opened(&self, tsih: u16, target: &str, initiator: &str) {
        let live = Live {
            pair: (target.to_owned(), initiator.to_owned()),
            connections: Vec::new(),
            ended: Counters::default(),
        };
        let mut inner = self.lock();
        inner.left.retain(|pair| *pair != live.pair);
        inner.live.insert(tsih, live);
    }

    /// Adds a connection to a session.
    pub fn connected(&self, tsih: u16, number: u64, record: Arc<QueueRecord>) {
        if let Some(live) = self.lock().live.get_mut(&tsih) {
            live.connections.push((number, record));
        }
    }

    /// Removes a connection from a session and keeps its sum.
    pub fn disconnected(&self, tsih: u16, number: u64) {
        if let Some(live) = self.lock().live.get_mut(&tsih)
            && let Some(at) = live.connections.iter().position(|one| one.0 == number)
        {
            let (_, record) = live.connections.swap_remove(at);
            live.ended.merge(&record.counters());
        }
    }

    /// Removes a session and keeps its sum.
    pub fn closed(&self, tsih: u16) {
        let mut inner = self.lock();
        let Some(live) = inner.live.remove(&tsih) else {
            return;
        };
        let counters = live.counters();
        inner
            .ended
            .entry(live.pair.clone())
            .or_default()
            .merge(&counters);
        if inner.live.values().all(|other| other.pair != live.pair) {
            inner.left.push_back(live.pair);
        }
        if inner.left.len() > REMEMBERED_MAX
            && let Some(pair) = inner.left.pop_front()
        {
            inner.ended.remove(&pair);
        }
    }

    /// Returns the counters of a session.
    pub fn of_session(&self, tsih: u16) -> Counters {
        let inner = self.lock();
        inner
            .live
            .get(&tsih)
            .map(Live::counters)
            .unwrap_or_default()
    }

    /// Returns all initiators with sessions, and the most recent ones without.
    pub fn all(&self) -> Vec<InitiatorStatus> {
        let inner = self.lock();
        let mut sums: BTreeMap<&Pair, (usize, Counters)> = BTreeMap::new();
        for (pair, counters) in &inner.ended {
            sums.insert(pair, (0, *counters));
        }
        for live in inner.live.values() {
            let (sessions, counters) = sums.entry(&live.pair).or_default();
            *sessions += 1;
            counters.merge(&live.counters());
        }
        let status = |(pair, (sessions, counters)): (&Pair, (usize, Counters))| InitiatorStatus {
            target: pair.0.clone(),
            initiator: pair.1.clone(),
            sessions,
            counters,
        };
        sums.into_iter().map(status).collect()
    }
}

#[cfg(test)]
mod tests {
    use latency::{Labels, Operation, QueueTimeline};

    use super::*;

    fn connection(reads: u64) -> QueueTimeline {
        let timeline = QueueTimeline::new(Labels::default(), 1);
        for _ in 0..reads {
            timeline.counters().count(Operation::Read, 512, true);
        }
        timeline
    }

    fn reads(tallies: &InitiatorCounters, initiator: &str) -> Option<(usize, u64, u64)> {
        let all = tallies.all();
        let found = all.iter().find(|one| one.initiator == initiator)?;
        let read = found.counters.of(Operation::Read);
        Some((found.sessions, read.requests, read.bytes))
    }

    #[test]
    fn counters_survive_their_connections_and_sessions() {
        let tallies = InitiatorCounters::default();
        let (first, second) = (connection(3), connection(4));
        tallies.opened(1, "t", "i");
        tallies.connected(1, 10, first.record().clone());
        tallies.connected(1, 11, second.record().clone());
        assert_eq!(reads(&tallies, "i"), Some((1, 7, 7 * 512)));
        tallies.disconnected(1, 10);
        second.counters().count(Operation::Read, 512, true);
        assert_eq!(reads(&tallies, "i"), Some((1, 8, 8 * 512)));
        assert_eq!(tallies.of_session(1).of(Operation::Read).requests, 8);
        tallies.closed(1);
        tallies.closed(1);
        assert_eq!(reads(&tallies, "i"), Some((0, 8, 8 * 512)));
        tallies.opened(2, "t", "i");
        tallies.connected(2, 12, connection(1).record().clone());
        assert_eq!(reads(&tallies, "i"), Some((1, 9, 9 * 512)));
        assert_eq!(tallies.of_session(2).of(Operation::Read).requests, 1);
    }

    #[test]
    fn former_initiators_are_remembered_up_to_a_limit() {
        let tallies = InitiatorCounters::default();
        tallies.opened(9, "t", "stays");
        for number in 0..1000 {
            tallies.opened(1, "t", &format!("i{number}"));
            tallies.closed(1);
        }
        assert_eq!(tallies.all().len(), REMEMBERED_MAX + 1);
        assert!(reads(&tallies, "stays").is_some());
        assert!(reads(&tallies, "i999").is_some() && reads(&tallies, "i0").is_none());
    }
}
