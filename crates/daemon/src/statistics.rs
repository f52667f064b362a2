//! Counters of workers, disks and initiators as API objects.

use block::{IoErrorKind, IoKind};
use control::QueueStops;
use control::statistics::{
    DiskStatistics, InitiatorStatistics, IoStatistics, LimitedStatistics, QueueTimeStatistics,
    RequestStatistics, WorkerStatistics,
};
use iscsi_target::InitiatorStatus;
use latency::Operation;
use reactor::{DiskCounters, WorkerCounters};
use vhost_user::QueueTimeHistograms;

/// Returns the counters of a worker.
pub fn worker(worker: u32, counters: WorkerCounters) -> WorkerStatistics {
    WorkerStatistics {
        worker,
        busy_iterations: counters.busy_iterations,
        empty_iterations: counters.empty_iterations,
        sleeps: counters.sleeps,
        messages: counters.messages,
        work_ns: counters.work_ns,
        poll_found_ns: counters.poll_found_ns,
        poll_empty_ns: counters.poll_empty_ns,
        sleep_ns: counters.sleep_ns,
    }
}

/// Returns the counters of an iSCSI initiator with a target.
pub fn initiator(status: InitiatorStatus) -> InitiatorStatistics {
    let operations = Operation::ALL.into_iter().filter_map(|operation| {
        let counted = status.counters.of(operation);
        let statistics = RequestStatistics {
            requests: counted.requests,
            bytes: counted.bytes,
            errors: counted.errors,
        };
        (counted.requests > 0).then(|| (operation.name().to_owned(), statistics))
    });
    InitiatorStatistics {
        operations: operations.collect(),
        export: status.target,
        initiator: status.initiator,
        sessions: status.sessions,
    }
}

/// Returns the durations of starts and stops of an export's virtqueues.
pub fn queue_times(export: String, times: QueueTimeHistograms) -> QueueTimeStatistics {
    let QueueTimeHistograms {
        start,
        drain,
        stop,
        rest,
    } = times;
    QueueTimeStatistics {
        export,
        start,
        drain,
        stop,
        rest,
    }
}

/// Returns a summary of the stops of an export's virtqueues; `None` before the first one.
pub fn queue_stops(times: &QueueTimeHistograms) -> Option<QueueStops> {
    let QueueTimeHistograms {
        drain, stop, rest, ..
    } = times;
    (!stop.is_empty()).then(|| QueueStops {
        count: stop.count,
        p50_ns: stop.quantile_ns(0.5),
        p99_ns: stop.quantile_ns(0.99),
        max_ns: stop.max_ns,
        drain_p99_ns: drain.quantile_ns(0.99),
        rest_p99_ns: rest.quantile_ns(0.99),
    })
}

/// Returns the counters of a disk; `None` for a disk without I/O.
pub fn disk(name: &str, counters: Option<&DiskCounters>) -> DiskStatistics {
    let counters = counters.copied().unwrap_or_default();
    let operations = IoKind::ALL.into_iter().map(|kind| {
        let counted = counters.of(kind);
        let statistics = IoStatistics {
            requests: counted.requests,
            bytes: counted.bytes,
        };
        (kind.word().to_owned(), statistics)
    });
    let errors = IoErrorKind::ALL.into_iter().zip(counters.errors);
    let errors = errors.filter(|(_, count)| *count > 0);
    DiskStatistics {
        name: name.to_owned(),
        operations: operations.collect(),
        in_flight: counters.in_flight,
        waiting: 0,
        errors: errors
            .map(|(kind, count)| (kind.word().to_owned(), count))
            .collect(),
        limited: LimitedStatistics {
            requests: counters.limited,
            wait_ns: counters.limited_ns,
        },
    }
}
