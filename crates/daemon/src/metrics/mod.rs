//! `GET /metrics`: all counters in Prometheus' text format, with its conventions for names and units.
//!
//! This code is not on the request path: a page is built from words that the workers write. Latencies are per export, operation and stage,
//! counters per queue, which bounds the number of time series with thousands of queues.

mod listener;
mod process;
mod text;

use std::collections::BTreeMap;
use std::time::Duration;

use control::statistics::{QueueTimeStatistics, RequestStatistics, Statistics};
use control::{DISK_STATES, Status};
use latency::{Latencies, Operation, OperationCounters, Snapshot, Span, SparseHistogram};

use process::Process;
use text::{Family, Kind, Page};

use crate::objects::LISTENER_KINDS;

pub use listener::Listener;
pub use text::CONTENT_TYPE;

/// Upper bounds of histogram buckets in nanoseconds: from one step in the process to a hung disk.
pub const BOUNDS_NS: [u64; 25] = [
    100,
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// Renders the page.
pub fn render(status: &Status, statistics: &Statistics) -> String {
    let mut page = Page::default();
    write_daemon(&mut page, status, statistics);
    write_process(&mut page, &Process::this());
    write_workers(&mut page, statistics);
    write_disks(&mut page, status, statistics);
    write_listeners(&mut page, status);
    write_refused_logins(&mut page, status);
    write_certificates(&mut page, status);
    write_jobs(&mut page, statistics);
    write_bitmaps(&mut page, statistics);
    write_exports(&mut page, status);
    write_initiators(&mut page, statistics);
    write_queue_times(&mut page, statistics);
    write_queues(&mut page, &statistics.latency);
    write_latencies(&mut page, &statistics.latency);
    page.into_text()
}

fn write_daemon(page: &mut Page, status: &Status, statistics: &Statistics) {
    let help = "Version of the daemon; always 1.";
    let mut info = page.family("lunette_build_info", Kind::Gauge, help);
    info.sample(&[("version", &status.version)], 1);
    let started = process::unix_seconds() - statistics.at_ns as f64 / 1e9;
    let help = "Start time of the daemon, in seconds since 1970.";
    page.family("process_start_time_seconds", Kind::Gauge, help)
        .sample(&[], format_args!("{started:.1}"));
}

fn write_process(page: &mut Page, process: &Process) {
    if let Some(seconds) = process.cpu_seconds {
        let help = "CPU time of all threads of the daemon.";
        page.family("process_cpu_seconds_total", Kind::Counter, help)
            .sample(&[], seconds);
    }
    let gauges = [
        (
            "process_resident_memory_bytes",
            "Resident memory of the daemon, with RAM disks and the guests' memory that it has touched.",
            process.resident_bytes,
        ),
        (
            "process_open_fds",
            "Open descriptors of the daemon.",
            process.open_fds.map(|fds| fds as u64),
        ),
        (
            "process_max_fds",
            "Limit of open descriptors of the daemon.",
            process.max_fds,
        ),
    ];
    for (name, help, value) in gauges {
        if let Some(value) = value {
            page.family(name, Kind::Gauge, help).sample(&[], value);
        }
    }
}

fn write_workers(page: &mut Page, statistics: &Statistics) {
    let workers = &statistics.workers;
    let help = "Iterations of a worker: busy with work, or empty after polling without a result.";
    let mut iterations = page.family("lunette_worker_iterations_total", Kind::Counter, help);
    for one in workers {
        let worker = one.worker.to_string();
        iterations.sample(
            &[("worker", &worker), ("iteration", "busy")],
            one.busy_iterations,
        );
        iterations.sample(
            &[("worker", &worker), ("iteration", "empty")],
            one.empty_iterations,
        );
    }
    let help = "Times that a worker slept until a client or a disk woke it.";
    let mut sleeps = page.family("lunette_worker_sleeps_total", Kind::Counter, help);
    for one in workers {
        sleeps.sample(&[("worker", &one.worker.to_string())], one.sleeps);
    }
    let help = "Time of a worker, by activity.";
    let mut times = page.family("lunette_worker_seconds_total", Kind::Counter, help);
    for one in workers {
        let worker = one.worker.to_string();
        for (activity, nanos) in [
            ("work", one.work_ns),
            ("poll_found", one.poll_found_ns),
            ("poll_empty", one.poll_empty_ns),
            ("sleep", one.sleep_ns),
        ] {
            let seconds = Duration::from_nanos(nanos).as_secs_f64();
            times.sample(&[("worker", &worker), ("activity", activity)], seconds);
        }
    }
    let help = "Messages from the control plane that a worker ran between iterations.";
    let mut messages = page.family("lunette_worker_messages_total", Kind::Counter, help);
    for one in workers {
        messages.sample(&[("worker", &one.worker.to_string())], one.messages);
    }
}

fn write_space(page: &mut Page, status: &Status) {
    let help = "Bytes that the files of a disk occupy, without backing images.";
    let mut allocated = page.family("lunette_disk_allocated_bytes", Kind::Gauge, help);
    for disk in &status.disks {
        if let Some(bytes) = disk.allocated {
            allocated.sample(&[("disk", &disk.name)], bytes);
        }
    }
    let help = "Free bytes of the file system that holds the files of a disk.";
    let mut free = page.family("lunette_disk_storage_free_bytes", Kind::Gauge, help);
    for disk in &status.disks {
        if let Some(bytes) = disk.free {
            free.sample(&[("disk", &disk.name)], bytes);
        }
    }
}

fn write_disks(page: &mut Page, status: &Status, statistics: &Statistics) {
    let help = "Properties of a disk; always 1.";
    let mut info = page.family("lunette_disk_info", Kind::Gauge, help);
    for disk in &status.disks {
        let read_only = if disk.read_only { "true" } else { "false" };
        let labels = [
            ("disk", disk.name.as_str()),
            ("backend", &disk.backend),
            ("serial", &disk.serial),
            ("read_only", read_only),
        ];
        info.sample(&labels, 1);
    }
    let help = "State of a disk: 1 for its present state, 0 for the other states.";
    let mut states = page.family("lunette_disk_state", Kind::Gauge, help);
    for disk in &status.disks {
        for state in DISK_STATES {
            let labels = [("disk", disk.name.as_str()), ("state", state)];
            states.sample(&labels, u8::from(disk.state == state));
        }
    }
    let help = "Capacity of a disk.";
    let mut size = page.family("lunette_disk_size_bytes", Kind::Gauge, help);
    for disk in &status.disks {
        size.sample(&[("disk", &disk.name)], disk.size);
    }
    write_space(page, status);
    let help = "I/Os submitted to a disk's block device, through all exports.";
    let mut requests = page.family("lunette_disk_io_total", Kind::Counter, help);
    for disk in &statistics.disks {
        for (operation, io) in &disk.operations {
            let labels = [("disk", disk.name.as_str()), ("operation", operation)];
            requests.sample(&labels, io.requests);
        }
    }
    let help = "Bytes of the I/Os submitted to a disk's block device.";
    let mut bytes = page.family("lunette_disk_io_bytes_total", Kind::Counter, help);
    for disk in &statistics.disks {
        for (operation, io) in &disk.operations {
            let labels = [("disk", disk.name.as_str()), ("operation", operation)];
            bytes.sample(&labels, io.bytes);
        }
    }
    let help = "I/Os that failed in a disk's block device, by class.";
    let mut errors = page.family("lunette_disk_io_errors_total", Kind::Counter, help);
    for disk in &statistics.disks {
        for class in block::IoErrorKind::ALL {
            let count = disk.errors.get(class.word()).copied().unwrap_or(0);
            let labels = [("disk", disk.name.as_str()), ("class", class.word())];
            errors.sample(&labels, count);
        }
    }
    let help = "I/Os delayed by a disk's limits.";
    let mut limited = page.family("lunette_disk_io_limited_total", Kind::Counter, help);
    for disk in &statistics.disks {
        limited.sample(&[("disk", &disk.name)], disk.limited.requests);
    }
    let help = "Total delay of I/Os by a disk's limits.";
    let name = "lunette_disk_io_limited_seconds_total";
    let mut limited = page.family(name, Kind::Counter, help);
    for disk in &statistics.disks {
        let seconds = Duration::from_nanos(disk.limited.wait_ns).as_secs_f64();
        limited.sample(&[("disk", &disk.name)], seconds);
    }
    let help = "Failed I/Os that wait until their disk is resumed.";
    let mut waiting = page.family("lunette_disk_io_waiting", Kind::Gauge, help);
    for disk in &statistics.disks {
        waiting.sample(&[("disk", &disk.name)], disk.waiting);
    }
    let help = "I/Os of a disk that are in flight or wait.";
    let mut in_flight = page.family("lunette_disk_io_in_flight", Kind::Gauge, help);
    for disk in &statistics.disks {
        in_flight.sample(&[("disk", &disk.name)], disk.in_flight);
    }
}

fn write_listeners(page: &mut Page, status: &Status) {
    let help = "Listeners that are not open yet and are retried.";
    let mut waiting = page.family("lunette_listeners_waiting", Kind::Gauge, help);
    for kind in LISTENER_KINDS {
        let listeners = status.waiting_listeners.iter();
        let count = listeners.filter(|one| one.kind == kind).count();
        waiting.sample(&[("kind", kind)], count);
    }
    let open = status.open_listeners.iter();
    let open = open.map(|one| (&one.kind, &one.export, &one.address, 1));
    let closed = status.waiting_listeners.iter();
    let closed = closed.map(|one| (&one.kind, &one.export, &one.address, 0));
    let help = "1 if a listener accepts clients, 0 if it waits for its address or folder.";
    let mut states = page.family("lunette_listener_open", Kind::Gauge, help);
    for (kind, export, address, value) in open.chain(closed) {
        let export = export.as_deref().unwrap_or_default();
        let labels = [
            ("kind", kind.as_str()),
            ("export", export),
            ("address", address),
        ];
        states.sample(&labels, value);
    }
}

fn write_refused_logins(page: &mut Page, status: &Status) {
    let help = "Refused logins of iSCSI initiators that have tried within the last hour and have had no session since.";
    let mut refused = page.family("lunette_logins_refused", Kind::Gauge, help);
    let mut counts = BTreeMap::new();
    for login in &status.refused_logins {
        let export = login.export.as_deref().unwrap_or("discovery");
        // A target that is not configured could be any name.
        if login.export.is_none() || status.exports.iter().any(|one| one.name == export) {
            *counts.entry(export).or_insert(0) += login.count;
        }
    }
    for (export, count) in counts {
        refused.sample(&[("export", export)], count);
    }
}

fn write_certificates(page: &mut Page, status: &Status) {
    let help = "End of the validity of a TLS certificate, in seconds since 1970.";
    let name = "lunette_tls_certificate_expiry_timestamp_seconds";
    let mut expiry = page.family(name, Kind::Gauge, help);
    for certificate in &status.certificates {
        expiry.sample(&[("file", &certificate.file)], certificate.not_after);
    }
}

fn write_jobs(page: &mut Page, statistics: &Statistics) {
    let help = "State of a disk's last job; always 1.";
    let mut info = page.family("lunette_job_info", Kind::Gauge, help);
    for job in &statistics.jobs {
        let state = job.state.word();
        let labels = [
            ("disk", job.disk.as_str()),
            ("kind", &job.kind),
            ("state", state),
        ];
        info.sample(&labels, 1);
    }
    let help = "Bytes processed by a disk's last job.";
    let mut done = page.family("lunette_job_done_bytes", Kind::Gauge, help);
    for job in &statistics.jobs {
        done.sample(
            &[("disk", job.disk.as_str()), ("kind", &job.kind)],
            job.done,
        );
    }
    let help = "Total bytes to process for a disk's last job.";
    let mut total = page.family("lunette_job_total_bytes", Kind::Gauge, help);
    for job in &statistics.jobs {
        total.sample(
            &[("disk", job.disk.as_str()), ("kind", &job.kind)],
            job.total,
        );
    }
}

fn write_bitmaps(page: &mut Page, statistics: &Statistics) {
    let help = "Bytes of a disk to copy in the next incremental backup of a bitmap.";
    let mut dirty = page.family("lunette_bitmap_dirty_bytes", Kind::Gauge, help);
    for bitmap in &statistics.bitmaps {
        dirty.sample(
            &[("disk", bitmap.disk.as_str()), ("bitmap", &bitmap.name)],
            bitmap.dirty,
        );
    }
    let help = "Completion time of the last backup of a bitmap, in seconds since 1970.";
    let mut at = page.family("lunette_bitmap_last_backup_seconds", Kind::Gauge, help);
    for bitmap in &statistics.bitmaps {
        at.sample(
            &[("disk", bitmap.disk.as_str()), ("bitmap", &bitmap.name)],
            bitmap.at,
        );
    }
    let help = "1 if a dirty bitmap is invalid and the next backup copies everything.";
    let mut broken = page.family("lunette_bitmap_broken", Kind::Gauge, help);
    for bitmap in &statistics.bitmaps {
        broken.sample(
            &[("disk", bitmap.disk.as_str()), ("bitmap", &bitmap.name)],
            u64::from(bitmap.reason.is_some()),
        );
    }
}

fn write_exports(page: &mut Page, status: &Status) {
    let help = "1 if a client is connected to an export.";
    let mut connected = page.family("lunette_export_connected", Kind::Gauge, help);
    for export in &status.exports {
        let labels = [("export", export.name.as_str()), ("kind", &export.kind)];
        connected.sample(&labels, u8::from(export.connected));
    }
    let help = "Logical units of an export.";
    let mut luns = page.family("lunette_export_luns", Kind::Gauge, help);
    for export in &status.exports {
        luns.sample(&[("export", &export.name)], export.luns.len());
    }
}

fn write_queue_times(page: &mut Page, statistics: &Statistics) {
    type Times = fn(&QueueTimeStatistics) -> &SparseHistogram;
    let families: [(&'static str, &str, Times); 4] = [
        (
            "lunette_queue_start_duration_seconds",
            "Time from the kick descriptor of a virtqueue until a worker polls the queue.",
            |one| &one.start,
        ),
        (
            "lunette_queue_stop_duration_seconds",
            "Time that a virtqueue took to stop, for example at the end of a live migration.",
            |one| &one.stop,
        ),
        (
            "lunette_queue_drain_duration_seconds",
            "Part of the time to stop that requests in flight took.",
            |one| &one.drain,
        ),
        (
            "lunette_queue_stop_rest_duration_seconds",
            "Time that a virtqueue took to stop, without the part that requests in flight took.",
            |one| &one.rest,
        ),
    ];
    for (name, help, times) in families {
        let mut family = page.family(name, Kind::Histogram, help);
        for one in &statistics.queue_times {
            family.histogram(&[("export", &one.export)], &BOUNDS_NS, times(one));
        }
    }
}

fn write_initiators(page: &mut Page, statistics: &Statistics) {
    let help = "Sessions of an iSCSI initiator with a target.";
    let mut sessions = page.family("lunette_initiator_sessions", Kind::Gauge, help);
    for one in &statistics.initiators {
        let labels = [
            ("export", one.export.as_str()),
            ("initiator", &one.initiator),
        ];
        sessions.sample(&labels, one.sessions);
    }
    type Number = fn(&RequestStatistics) -> u64;
    let families: [(&'static str, &str, Number); 3] = [
        (
            "lunette_initiator_requests_total",
            "Completed commands of an iSCSI initiator, in all its sessions with a target.",
            |one| one.requests,
        ),
        (
            "lunette_initiator_bytes_total",
            "Bytes transferred by an iSCSI initiator's commands.",
            |one| one.bytes,
        ),
        (
            "lunette_initiator_errors_total",
            "Commands of an iSCSI initiator that completed with an error.",
            |one| one.errors,
        ),
    ];
    for (name, help, number) in families {
        let mut family = page.family(name, Kind::Counter, help);
        for one in &statistics.initiators {
            for (operation, counted) in &one.operations {
                let labels = [
                    ("export", one.export.as_str()),
                    ("initiator", &one.initiator),
                    ("operation", operation),
                ];
                family.sample(&labels, number(counted));
            }
        }
    }
}

fn write_queues(page: &mut Page, snapshot: &Snapshot) {
    type Number = fn(&OperationCounters) -> u64;
    let by_operation: [(&'static str, &str, Number); 3] = [
        (
            "lunette_queue_requests_total",
            "Completed requests, successful or failed.",
            |o| o.requests,
        ),
        (
            "lunette_queue_bytes_total",
            "Bytes transferred by requests.",
            |o| o.bytes,
        ),
        (
            "lunette_queue_errors_total",
            "Requests that completed with an error.",
            |o| o.errors,
        ),
    ];
    for (name, help, number) in by_operation {
        let mut family = page.family(name, Kind::Counter, help);
        each_queue(snapshot, |queue, labels| {
            for operation in Operation::ALL {
                let counters = queue.latencies.counters.of(operation);
                // Operations without requests would be most of the page.
                if counters.requests > 0 {
                    let mut labels = labels.to_vec();
                    labels.push(("operation", operation.name()));
                    family.sample(&labels, number(counters));
                }
            }
        });
    }
    type Count = fn(&latency::Counters) -> u64;
    let counters: [(&'static str, &str, Count); 5] = [
        (
            "lunette_queue_malformed_total",
            "Protocol violations by the client that ended in a refused request or in the end of its queue or session.",
            |c| c.malformed,
        ),
        (
            "lunette_queue_kicks_total",
            "Kicks received from the client.",
            |c| c.kicks,
        ),
        (
            "lunette_queue_interrupts_total",
            "Interrupts sent to the client.",
            |c| c.notifications,
        ),
        (
            "lunette_queue_polls_total",
            "Polls of a queue that found nothing.",
            |c| c.polls,
        ),
        (
            "lunette_queue_sleeps_total",
            "Times that a queue's notifications were enabled before its worker slept.",
            |c| c.sleeps,
        ),
    ];
    for (name, help, count) in counters {
        let mut family = page.family(name, Kind::Counter, help);
        each_queue(snapshot, |queue, labels| {
            family.sample(labels, count(&queue.latencies.counters));
        });
    }
    let help = "Requests of a queue that are in flight.";
    let mut in_flight = page.family("lunette_queue_in_flight", Kind::Gauge, help);
    each_queue(snapshot, |queue, labels| {
        in_flight.sample(labels, queue.in_flight);
    });
}

fn each_queue(
    snapshot: &Snapshot,
    mut write: impl FnMut(&latency::QueueSnapshot, &[(&str, &str)]),
) {
    for queue in &snapshot.queues {
        let (number, worker) = (
            queue.labels.queue.to_string(),
            queue.labels.worker.to_string(),
        );
        let labels = [
            ("export", queue.labels.export.as_str()),
            ("disk", &queue.labels.disk),
            ("queue", &number),
            ("worker", &worker),
        ];
        write(queue, &labels);
    }
}

/// Histograms of all queues of an export, or of all requests to a disk, by its name.
type ByOperation = BTreeMap<(String, Operation), BTreeMap<Span, SparseHistogram>>;

fn add_latencies(sums: &mut ByOperation, name: &str, latencies: &Latencies) {
    for (operation, latencies) in &latencies.operations {
        let sums = sums.entry((name.to_owned(), *operation)).or_default();
        for (span, histogram) in &latencies.spans {
            sums.entry(*span).or_default().merge(histogram);
        }
    }
}

fn write_latencies(page: &mut Page, snapshot: &Snapshot) {
    let (mut exports, mut disks) = (ByOperation::new(), ByOperation::new());
    for queue in &snapshot.queues {
        add_latencies(&mut exports, &queue.labels.export, &queue.latencies);
        for (disk, latencies) in &queue.disks {
            add_latencies(&mut disks, disk, latencies);
        }
        if queue.disks.is_empty() && !queue.labels.disk.is_empty() {
            add_latencies(&mut disks, &queue.labels.disk, &queue.latencies);
        }
    }
    let help = "Time of a request to a disk from noticed to notified, through all exports.";
    let name = "lunette_disk_request_duration_seconds";
    let mut whole = page.family(name, Kind::Histogram, help);
    write_spans(&mut whole, "disk", &disks, &[Span::Total]);
    let help = "Time of a request from noticed to notified.";
    let mut whole = page.family("lunette_request_duration_seconds", Kind::Histogram, help);
    write_spans(&mut whole, "export", &exports, &[Span::Total]);
    let help = "Time of each stage of a request, from the stage before; `reaped` is the disk's service time.";
    let mut stages = page.family(
        "lunette_request_stage_duration_seconds",
        Kind::Histogram,
        help,
    );
    write_spans(&mut stages, "export", &exports, &Span::STEPS);
}

fn write_spans(family: &mut Family<'_>, label: &str, objects: &ByOperation, spans: &[Span]) {
    for ((name, operation), histograms) in objects {
        for span in spans {
            let Some(histogram) = histograms.get(span) else {
                continue;
            };
            let mut labels = vec![(label, name.as_str()), ("operation", operation.name())];
            if *span != Span::Total {
                labels.push(("stage", span.name()));
            }
            family.histogram(&labels, &BOUNDS_NS, histogram);
        }
    }
}

#[cfg(test)]
mod tests;
