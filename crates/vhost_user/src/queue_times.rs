//! Durations of the starts and stops of an export's queues, over all its sessions. A stop is a part of the downtime of a live migration.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use latency::{Clock, Histogram, SparseHistogram};

/// A duration of a queue's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueTime {
    /// From `SET_VRING_KICK` until the worker polls the queue.
    Start,
    /// From the worker's first step of a stop until the last request in flight was answered.
    Drain,
    /// From `GET_VRING_BASE`, or the end of the session, until the position of the queue is known. Includes the drain.
    Stop,
    /// A stop without its drain.
    Rest,
}

const COUNT: usize = 4;

/// Histograms of the durations of an export. Control plane only.
#[derive(Default)]
pub(crate) struct QueueTimes {
    /// Allocated with the first queue.
    histograms: Mutex<Option<Box<[Histogram; COUNT]>>>,
}

/// Durations of the starts and stops of an export's queues.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueueTimeHistograms {
    /// From the kick descriptor until the worker polls the queue.
    pub start: SparseHistogram,
    /// Wait for requests in flight during a stop.
    pub drain: SparseHistogram,
    /// Stops, with their drains.
    pub stop: SparseHistogram,
    /// Stops without their drains.
    pub rest: SparseHistogram,
}

impl QueueTimes {
    pub fn record(&self, what: QueueTime, time: Duration) {
        let mut histograms = self.lock();
        let histograms =
            histograms.get_or_insert_with(|| Box::new([const { Histogram::new() }; COUNT]));
        histograms[what as usize].record(Clock::shared().ticks(time), 1);
    }

    /// Returns the histograms in nanoseconds.
    pub fn histograms(&self) -> QueueTimeHistograms {
        let histograms = self.lock();
        let of = |what: QueueTime| {
            let histogram = histograms.as_ref().map(|all| &all[what as usize]);
            let sparse = |one| SparseHistogram::from_ticks(one, Clock::shared());
            histogram.map(sparse).unwrap_or_default()
        };
        QueueTimeHistograms {
            start: of(QueueTime::Start),
            drain: of(QueueTime::Drain),
            stop: of(QueueTime::Stop),
            rest: of(QueueTime::Rest),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Box<[Histogram; COUNT]>>> {
        self.histograms
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
