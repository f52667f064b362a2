//! Rates between two samples of a daemon, as rows of numbers. Pure: no terminal, no socket.

use block::IoKind;
use control::Status;
use control::statistics::Statistics;
use latency::{Counters, Labels, Latencies, Operation, OperationLatencies, Span, SparseHistogram};

/// One sample of a daemon.
#[derive(Clone, Debug, Default)]
pub struct DaemonSample {
    pub status: Status,
    pub statistics: Statistics,
}

/// Kind of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    Exports,
    /// Virtqueues; an iSCSI target's connections on one worker.
    Queues,
    Disks,
    Workers,
}

impl View {
    /// All views in the order of their keys 1 to 4.
    pub const ALL: [View; 4] = [View::Exports, View::Queues, View::Disks, View::Workers];

    pub fn name(self) -> &'static str {
        match self {
            View::Exports => "exports",
            View::Queues => "queues",
            View::Disks => "disks",
            View::Workers => "workers",
        }
    }

    /// Titles and widths of the columns. The first is the name and takes the remaining width.
    pub fn columns(self) -> &'static [(&'static str, u16)] {
        match self {
            View::Exports | View::Queues => &[
                ("", 0),
                ("req/s", 7),
                ("B/s", 7),
                ("mean", 7),
                ("p99", 7),
                ("depth", 5),
                ("err/s", 5),
                ("kick/s", 6),
                ("intr/s", 6),
            ],
            View::Disks => &[
                ("", 0),
                ("read/s", 7),
                ("write/s", 7),
                ("other/s", 7),
                ("read B", 7),
                ("write B", 7),
                ("depth", 5),
                ("held/s", 6),
                ("err/s", 6),
            ],
            View::Workers => &[
                ("", 0),
                ("req/s", 7),
                ("B/s", 7),
                ("iter/s", 7),
                ("work", 5),
                ("found", 5),
                ("empty", 5),
                ("sleep", 5),
                ("sleep/s", 7),
                ("mesg/s", 6),
                ("queues", 6),
            ],
        }
    }
}

/// A number and its format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cell {
    /// A count, or a count per second.
    Count(f64),
    /// Bytes per second.
    Bytes(f64),
    /// Time in nanoseconds; NaN without events.
    Time(f64),
    /// Fraction of a whole; NaN without a whole.
    Share(f64),
}

impl Cell {
    /// Sort key.
    pub fn number(self) -> f64 {
        let (Cell::Count(number) | Cell::Bytes(number) | Cell::Time(number) | Cell::Share(number)) =
            self;
        if number.is_nan() { -1.0 } else { number }
    }
}

/// One export, queue, disk or worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub name: String,
    /// Further text for filters: disk of a queue, kind of an export.
    pub also: String,
    /// Columns after the name.
    pub cells: Vec<Cell>,
    /// Latencies of its requests; `None` for a disk without its own queues.
    pub latencies: Option<Latencies>,
}

/// Changes between two samples.
#[derive(Clone, Debug)]
pub struct Interval {
    seconds: f64,
    status: Status,
    now: Statistics,
    grown: Statistics,
}

impl Interval {
    /// Compares two samples. `None` if the daemon was restarted between them.
    pub fn between(before: &DaemonSample, now: &DaemonSample) -> Option<Interval> {
        let nanos = now
            .statistics
            .at_ns
            .checked_sub(before.statistics.at_ns)
            .filter(|nanos| *nanos > 0)?;
        if before.status.pid != now.status.pid {
            return None;
        }
        Some(Interval {
            seconds: nanos as f64 / 1e9,
            status: now.status.clone(),
            now: now.statistics.clone(),
            grown: grown(&before.statistics, &now.statistics),
        })
    }

    pub fn status(&self) -> &Status {
        &self.status
    }

    /// Requests, bytes and errors per second of all queues.
    pub fn totals(&self) -> (f64, f64, f64) {
        let counters = self.grown.latency.merged().counters;
        (
            self.rate(counters.requests()),
            self.rate(counters.bytes()),
            self.rate(errors(&counters)),
        )
    }

    fn rate(&self, count: u64) -> f64 {
        count as f64 / self.seconds
    }

    /// Rows of a view in the daemon's order.
    pub fn rows(&self, view: View) -> Vec<Row> {
        match view {
            View::Exports => self.exports(),
            View::Queues => self.queues(),
            View::Disks => self.disks(),
            View::Workers => self.workers(),
        }
    }

    fn exports(&self) -> Vec<Row> {
        let row = |export: &control::ExportStatus| {
            let mine = |labels: &Labels| labels.export == export.name;
            let kind = if export.connected { "" } else { " (no client)" };
            self.of_queues(format!("{}{kind}", export.name), export.kind.clone(), &mine)
        };
        self.status.exports.iter().map(row).collect()
    }

    fn queues(&self) -> Vec<Row> {
        let row = |queue: &latency::QueueSnapshot| {
            let labels = &queue.labels;
            let name = format!("{}/{}", labels.export, labels.queue);
            let also = format!("{} worker {}", labels.disk, labels.worker);
            self.of_queues(name, also, &|other| other == labels)
        };
        self.now.latency.queues.iter().map(row).collect()
    }

    fn of_queues(&self, name: String, also: String, mine: &dyn Fn(&Labels) -> bool) -> Row {
        let latencies = self.grown.latency.merged_by(mine);
        let counters = &latencies.counters;
        let total = merged(&latencies, None).spans.remove(&Span::Total);
        let total = total.filter(|histogram| !histogram.is_empty());
        let queues = self.now.latency.queues.iter();
        let in_flight: u64 = queues
            .filter(|queue| mine(&queue.labels))
            .map(|queue| queue.in_flight)
            .sum();
        let time =
            |of: &dyn Fn(&SparseHistogram) -> f64| Cell::Time(total.as_ref().map_or(f64::NAN, of));
        let cells = vec![
            Cell::Count(self.rate(counters.requests())),
            Cell::Bytes(self.rate(counters.bytes())),
            time(&SparseHistogram::mean_ns),
            time(&|histogram| histogram.quantile_ns(0.99) as f64),
            Cell::Count(in_flight as f64),
            Cell::Count(self.rate(errors(counters))),
            Cell::Count(self.rate(counters.kicks)),
            Cell::Count(self.rate(counters.notifications)),
        ];
        Row {
            name,
            also,
            cells,
            latencies: Some(latencies),
        }
    }

    fn disks(&self) -> Vec<Row> {
        let row = |disk: &control::statistics::DiskStatistics| {
            let status = self.status.disks.iter().find(|s| s.name == disk.name);
            let (read, write) = (disk.of(IoKind::Read), disk.of(IoKind::Write));
            let others = [
                IoKind::Flush,
                IoKind::Discard,
                IoKind::WriteZeroes,
                IoKind::CompareAndWrite,
                IoKind::BlockStatus,
                IoKind::ReplaceState,
                IoKind::ScsiCommand,
            ];
            let others = others.map(|kind| disk.of(kind).requests).iter().sum();
            let now = self.now.disks.iter().find(|now| now.name == disk.name);
            let latencies = self.grown.latency.merged_by(|l| l.disk == disk.name);
            Row {
                name: disk.name.clone(),
                also: status.map_or(String::new(), |status| status.backend.clone()),
                cells: vec![
                    Cell::Count(self.rate(read.requests)),
                    Cell::Count(self.rate(write.requests)),
                    Cell::Count(self.rate(others)),
                    Cell::Bytes(self.rate(read.bytes)),
                    Cell::Bytes(self.rate(write.bytes)),
                    Cell::Count(now.map_or(0, |now| now.in_flight) as f64),
                    Cell::Count(self.rate(disk.limited.requests)),
                    Cell::Count(self.rate(disk.errors())),
                ],
                latencies: Some(latencies).filter(|l| l.counters.requests() > 0),
            }
        };
        self.grown.disks.iter().map(row).collect()
    }

    fn workers(&self) -> Vec<Row> {
        let row = |worker: &control::statistics::WorkerStatistics| {
            let mine = |labels: &Labels| labels.worker == worker.worker;
            let latencies = self.grown.latency.merged_by(mine);
            let queues = self.now.latency.queues.iter().filter(|q| mine(&q.labels));
            let iterations = worker.busy_iterations + worker.empty_iterations;
            let polls = worker.poll_found_ns + worker.poll_empty_ns;
            let total = (worker.work_ns + polls + worker.sleep_ns) as f64;
            let share = |ns: u64| Cell::Share(ns as f64 / total);
            Row {
                name: format!("worker {}", worker.worker),
                also: String::new(),
                cells: vec![
                    Cell::Count(self.rate(latencies.counters.requests())),
                    Cell::Bytes(self.rate(latencies.counters.bytes())),
                    Cell::Count(self.rate(iterations)),
                    share(worker.work_ns),
                    share(worker.poll_found_ns),
                    share(worker.poll_empty_ns),
                    share(worker.sleep_ns),
                    Cell::Count(self.rate(worker.sleeps)),
                    Cell::Count(self.rate(worker.messages)),
                    Cell::Count(queues.count() as f64),
                ],
                latencies: Some(latencies),
            }
        };
        self.grown.workers.iter().map(row).collect()
    }
}

fn errors(counters: &Counters) -> u64 {
    counters.errors() + counters.malformed
}

/// Latencies of one operation, or of all operations.
pub fn merged(latencies: &Latencies, operation: Option<Operation>) -> OperationLatencies {
    let mut all = OperationLatencies::default();
    for (one, spans) in &latencies.operations {
        if operation.is_none_or(|wanted| wanted == *one) {
            all.merge(spans);
        }
    }
    all
}

fn grown(before: &Statistics, now: &Statistics) -> Statistics {
    let mut grown = Statistics {
        latency: now.latency.since(&before.latency),
        ..now.clone()
    };
    for (worker, old) in grown.workers.iter_mut().zip(&before.workers) {
        worker.busy_iterations = worker.busy_iterations.saturating_sub(old.busy_iterations);
        worker.empty_iterations = worker.empty_iterations.saturating_sub(old.empty_iterations);
        worker.sleeps = worker.sleeps.saturating_sub(old.sleeps);
        worker.work_ns = worker.work_ns.saturating_sub(old.work_ns);
        worker.poll_found_ns = worker.poll_found_ns.saturating_sub(old.poll_found_ns);
        worker.poll_empty_ns = worker.poll_empty_ns.saturating_sub(old.poll_empty_ns);
        worker.sleep_ns = worker.sleep_ns.saturating_sub(old.sleep_ns);
        worker.messages = worker.messages.saturating_sub(old.messages);
    }
    for disk in &mut grown.disks {
        // The counters of a recreated disk began at zero.
        let Some(old) = before.disks.iter().find(|old| old.name == disk.name) else {
            continue;
        };
        for (name, io) in &mut disk.operations {
            let before = old.operations.get(name).copied().unwrap_or_default();
            io.requests = io.requests.saturating_sub(before.requests);
            io.bytes = io.bytes.saturating_sub(before.bytes);
        }
        for (class, count) in &mut disk.errors {
            let before = old.errors.get(class).copied().unwrap_or(0);
            *count = count.saturating_sub(before);
        }
        disk.limited = disk.limited.since(old.limited);
    }
    grown
}
