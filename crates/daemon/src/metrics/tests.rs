//! Parses pages with a strict reader of the format and compares the dashboard with them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use control::objects::{Bitmap, Job, JobState, WaitingListener};
use control::statistics::{
    DiskStatistics, InitiatorStatistics, IoStatistics, LimitedStatistics, QueueTimeStatistics,
    WorkerStatistics,
};
use control::{CertificateStatus, DiskStatus, ExportStatus, LunStatus, OpenListener, RefusedLogin};
use latency::{Clock, Labels, QueueTimeline, Stamp, Stamps};

use tls::ServerTls;

use super::*;
use crate::control::View;
use crate::samples::{Names, check};
use crate::tcp_service::{ListenAddress, TcpEntrance};

const ALERTS: &str = include_str!("../../../../contrib/prometheus/lunette.rules.yml");
const DASHBOARD: &str = include_str!("../../../../contrib/grafana/lunette.json");
const DOCUMENT: &str = include_str!("../../../../docs/operations.md");

fn queue(export: &str, number: u32, requests: u64) -> latency::QueueSnapshot {
    let labels = Labels {
        export: export.to_owned(),
        disk: "d\"0".to_owned(),
        queue: number,
        worker: number % 2,
    };
    let mut timeline = QueueTimeline::new(labels, 8);
    for n in 0..requests {
        let stamps = [0, 3, 5, 5, 5, 9, 1000 + n * 77, 30_000, 31_000].map(Stamp);
        timeline.record_request(Operation::Read, &Stamps::from_array(stamps));
        timeline
            .counters()
            .count(Operation::Read, 4096, !n.is_multiple_of(2));
    }
    timeline.counters().in_flight.set(3);
    timeline.counters().kicks.add(9);
    timeline.snapshot(&Clock::simulated().0)
}

fn status() -> Status {
    Status {
        version: "1.2.3".to_owned(),
        disks: vec![DiskStatus {
            name: "d\"0".to_owned(),
            backend: "ram".to_owned(),
            path: None,
            size: 1 << 20,
            allocated: Some(4096),
            free: Some(1 << 30),
            block_size: 512,
            read_only: true,
            serial: "back\\slash\nline".to_owned(),
            state: "ready".to_owned(),
            reason: None,
            waiting: 0,
            waiting_reason: None,
            next_try_seconds: None,
            reservations_unknown: None,
            warning: None,
            slow_ns: None,
            damage: None,
            failures: Vec::new(),
        }],
        exports: vec![ExportStatus {
            queue_stops: None,
            name: "e".to_owned(),
            kind: "vhost-blk".to_owned(),
            socket: None,
            addresses: Vec::new(),
            queues: 2,
            connected: true,
            served: Vec::new(),
            waiting_portals: Vec::new(),
            port_groups: Vec::new(),
            luns: vec![LunStatus {
                target: 0,
                lun: 0,
                disk: "d\"0".to_owned(),
            }],
            warning: None,
        }],
        open_listeners: vec![OpenListener {
            kind: "vhost-user".to_owned(),
            export: Some("e".to_owned()),
            address: "/run/lunette/e.sock".to_owned(),
        }],
        waiting_listeners: vec![WaitingListener {
            kind: "iscsi".to_owned(),
            export: Some("iqn.2026-11.org.example:t".to_owned()),
            address: "192.0.2.77:3260".to_owned(),
            reason: "Cannot assign requested address (os error 99)".to_owned(),
            next_try_seconds: 1,
        }],
        certificates: vec![CertificateStatus {
            file: "/etc/lunette/tls.pem".to_owned(),
            not_before: 1_700_000_000,
            not_after: 1_800_000_000,
            warning: None,
        }],
        refused_logins: ["e", "made-up"]
            .map(|export| RefusedLogin {
                export: Some(export.to_owned()),
                initiator: "iqn.2026-11.org.example:i".to_owned(),
                address: "192.0.2.1".to_owned(),
                reason: "not admitted".to_owned(),
                count: 3,
                seconds: 5,
            })
            .to_vec(),
        ..Status::default()
    }
}

fn statistics() -> Statistics {
    let io = IoStatistics {
        requests: 12,
        bytes: 4096,
    };
    Statistics {
        at_ns: 5,
        workers: vec![WorkerStatistics {
            worker: 0,
            busy_iterations: 1,
            empty_iterations: 2,
            sleeps: 3,
            messages: 4,
            work_ns: 1_500_000_000,
            poll_found_ns: 0,
            poll_empty_ns: 500_000_000,
            sleep_ns: 8_000_000_000,
        }],
        disks: vec![DiskStatistics {
            operations: [("read".to_owned(), io)].into(),
            errors: [("no_space".to_owned(), 2)].into(),
            in_flight: 6,
            limited: LimitedStatistics {
                requests: 7,
                wait_ns: 2_500_000_000,
            },
            ..crate::statistics::disk("d\"0", None)
        }],
        jobs: vec![Job {
            disk: "d\"0".to_owned(),
            kind: "mirror".to_owned(),
            target: None,
            incremental: None,
            backup: None,
            state: JobState::Ready,
            done: 512,
            copied: 512,
            total: 1024,
            speed: None,
            seconds: 1,
            reason: None,
        }],
        bitmaps: vec![Bitmap {
            disk: "d\"0".to_owned(),
            name: "daily".to_owned(),
            dirty: 65_536,
            target: "image:/b.qcow2".to_owned(),
            at: 1_700_000_000,
            reason: None,
        }],
        initiators: vec![InitiatorStatistics {
            export: "e".to_owned(),
            initiator: "iqn.2026-11.org.example:i".to_owned(),
            sessions: 2,
            operations: [(
                "read".to_owned(),
                RequestStatistics {
                    requests: 9,
                    bytes: 36_864,
                    errors: 1,
                },
            )]
            .into(),
        }],
        queue_times: vec![QueueTimeStatistics {
            export: "e".to_owned(),
            start: SparseHistogram::from_nanos([1000; 6]),
            drain: SparseHistogram::from_nanos([2000; 6]),
            stop: SparseHistogram::from_nanos([4000; 6]),
            rest: SparseHistogram::from_nanos([2000; 6]),
        }],
        latency: Snapshot {
            queues: vec![queue("e", 0, 4), queue("e", 1, 2), queue("f", 0, 0)],
        },
    }
}

struct Fixed;

impl View for Fixed {
    fn snapshot(&self) -> Snapshot {
        statistics().latency
    }
    fn status(&self) -> Status {
        status()
    }
    fn statistics(&self) -> Statistics {
        statistics()
    }
}

type Sample = (String, BTreeMap<String, String>, f64);

/// Parses a page and panics at violations of the format or its conventions.
fn read(page: &str) -> (BTreeMap<String, String>, Vec<Sample>) {
    let (mut types, mut samples) = (BTreeMap::new(), Vec::new());
    let mut helped = None;
    assert!(page.ends_with('\n'));
    for line in page.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ').unwrap();
            assert!(!text.is_empty() && helped.is_none(), "{line}");
            helped = Some(name.to_owned());
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert_eq!(helped.take().as_deref(), Some(name), "{line}");
            assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none());
        } else {
            let sample = read_sample(line);
            let family = |name: &str| types.get(name).map(String::as_str);
            let base = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|end| sample.0.strip_suffix(end));
            let histogram = base.is_some_and(|base| family(base) == Some("histogram"));
            assert!(histogram || family(&sample.0).is_some(), "{line}");
            samples.push(sample);
        }
    }
    let different: BTreeSet<String> = samples
        .iter()
        .map(|s| format!("{:?}", (&s.0, &s.1)))
        .collect();
    assert_eq!(different.len(), samples.len(), "a sample comes twice");
    (types, samples)
}

fn read_sample(line: &str) -> Sample {
    let name_end = line.find(['{', ' ']).unwrap();
    let name = &line[..name_end];
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
    assert!(!name.is_empty() && name.chars().all(is_name), "{line}");
    let mut labels = BTreeMap::new();
    let mut rest = &line[name_end..];
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, value) = rest.split_once("=\"").unwrap();
            let mut text = String::new();
            let mut chars = value.char_indices();
            let end = loop {
                match chars.next().unwrap() {
                    (at, '"') => break at,
                    (_, '\\') => text.push(match chars.next().unwrap().1 {
                        'n' => '\n',
                        same @ ('\\' | '"') => same,
                        other => panic!("\\{other} in {line}"),
                    }),
                    (_, c) => text.push(c),
                }
            };
            assert!(labels.insert(label.to_owned(), text).is_none(), "{line}");
            rest = &value[end + 1..];
            match rest.strip_prefix(',') {
                Some(more) => rest = more,
                None => break,
            }
        }
        rest = rest.strip_prefix('}').unwrap();
    }
    let value = rest.strip_prefix(' ').unwrap();
    (name.to_owned(), labels, value.parse().unwrap())
}

fn value_of(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let found: Vec<&Sample> = samples
        .iter()
        .filter(|(n, l, _)| {
            n == name
                && labels
                    .iter()
                    .all(|(key, value)| l.get(*key).is_some_and(|v| v == value))
        })
        .collect();
    assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?}");
    found[0].2
}

#[test]
fn a_strict_reader_finds_every_counter() {
    let (_, samples) = read(&render(&status(), &statistics()));
    let value = |name, labels: &[(&str, &str)]| value_of(&samples, name, labels);
    let serial = [("serial", "back\\slash\nline"), ("read_only", "true")];
    assert_eq!(value("lunette_disk_info", &serial), 1.0);
    assert_eq!(
        value("lunette_disk_size_bytes", &[("disk", "d\"0")]),
        1048576.0
    );
    let disk = [("disk", "d\"0")];
    assert_eq!(value("lunette_disk_allocated_bytes", &disk), 4096.0);
    let free = value("lunette_disk_storage_free_bytes", &disk);
    assert_eq!(free, 1073741824.0);
    let first = [("export", "e"), ("queue", "0"), ("operation", "read")];
    assert_eq!(value("lunette_queue_requests_total", &first), 4.0);
    assert_eq!(value("lunette_queue_bytes_total", &first), 16384.0);
    assert_eq!(value("lunette_queue_errors_total", &first), 2.0);
    let third = [("export", "f"), ("queue", "0")];
    assert_eq!(value("lunette_queue_kicks_total", &third), 9.0);
    assert_eq!(value("lunette_queue_in_flight", &third), 3.0);
    let full = [("class", "no_space")];
    assert_eq!(value("lunette_disk_io_errors_total", &full), 2.0);
    assert_eq!(value("lunette_disk_io_limited_total", &[]), 7.0);
    assert_eq!(value("lunette_disk_io_limited_seconds_total", &[]), 2.5);
    let busy = [("worker", "0"), ("iteration", "busy")];
    assert_eq!(value("lunette_worker_iterations_total", &busy), 1.0);
    assert_eq!(value("lunette_export_connected", &[("export", "e")]), 1.0);
    let socket = [("export", "e"), ("address", "/run/lunette/e.sock")];
    assert_eq!(value("lunette_listener_open", &socket), 1.0);
    let portal = [("kind", "iscsi"), ("address", "192.0.2.77:3260")];
    assert_eq!(value("lunette_listener_open", &portal), 0.0);
}

#[test]
fn histograms_are_cumulative_and_end_with_their_count() {
    let (types, samples) = read(&render(&status(), &statistics()));
    let mut seen = 0;
    for name in types
        .iter()
        .filter(|(_, k)| *k == "histogram")
        .map(|(n, _)| n)
    {
        let mut series: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for (_, labels, value) in samples.iter().filter(|s| s.0 == format!("{name}_bucket")) {
            let mut others = labels.clone();
            let bound: f64 = others.remove("le").unwrap().parse().unwrap();
            series
                .entry(format!("{others:?}"))
                .or_default()
                .push((bound, *value));
        }
        for buckets in series.values() {
            assert_eq!(buckets.len(), BOUNDS_NS.len() + 1);
            assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1));
            assert_eq!(buckets.last().unwrap(), &(f64::INFINITY, 6.0));
            seen += 1;
        }
    }
    assert_eq!(
        seen, 12,
        "total by export and by disk, six stages, and four times of queues"
    );
    let total = [("export", "e"), ("operation", "read")];
    let sum = value_of(&samples, "lunette_request_duration_seconds_sum", &total);
    assert!((sum - 6.0 * 31e-6).abs() < 1e-12, "{sum}");
    let bound = |le| [("export", "e"), ("operation", "read"), ("le", le)];
    let bucket = "lunette_request_duration_seconds_bucket";
    assert_eq!(value_of(&samples, bucket, &bound("0.000025")), 0.0);
    assert_eq!(value_of(&samples, bucket, &bound("0.00005")), 6.0);
}

/// Returns the words of a text that look like metrics of this daemon.
fn names_in(text: &str) -> BTreeSet<String> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("lunette_") || word.starts_with("process_"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn dashboard_shows_all_alerts_and_the_document_names_all() {
    let (types, samples) = read(&render(&status(), &statistics()));
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut expressions = Vec::new();
    collect(&dashboard, "expr", &mut expressions);
    collect(&dashboard, "query", &mut expressions);
    let named = names_in(&expressions.join(" "));
    assert!(named.len() >= 10, "{named:?}");
    for name in &named {
        let known = samples.iter().any(|sample| sample.0 == *name);
        assert!(
            known,
            "contrib/grafana/lunette.json: there is no metric {name}"
        );
    }
    for name in names_in(ALERTS) {
        assert!(
            named.contains(&name),
            "contrib/grafana/lunette.json does not show {name} of an alert"
        );
        let known = samples.iter().any(|sample| sample.0 == name);
        assert!(
            known,
            "contrib/prometheus/lunette.rules.yml: there is no metric {name}"
        );
    }
    let refused: Vec<_> = samples
        .iter()
        .filter(|sample| sample.0 == "lunette_logins_refused")
        .collect();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert_eq!(refused[0].2, 3.0);
    let documented = names_in(DOCUMENT);
    for name in types.keys() {
        assert!(
            documented.contains(name),
            "docs/operations.md: {name} is missing"
        );
    }
}

/// Metrics that need a certificate, a refused login or another rare state are in no page of `tests/tests/compat.rs`.
#[test]
fn metrics_of_releases_have_their_type_and_labels() {
    let (types, samples) = read(&render(&status(), &statistics()));
    let mut names = Names::new();
    for (name, labels, _) in samples {
        let family = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| types.get(name.strip_suffix(end)?));
        let kind = types.get(&name).or(family).unwrap().clone();
        let properties = names.entry(name).or_default();
        properties.extend(labels.into_keys().chain([kind]));
    }
    check("all-metrics.txt", &names);
}

fn collect(value: &serde_json::Value, key: &str, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(text) if name == key => found.push(text.to_owned()),
                    _ => collect(value, key, found),
                }
            }
        }
        serde_json::Value::Array(items) => {
            items.iter().for_each(|item| collect(item, key, found));
        }
        _ => {}
    }
}

fn ask(listener: &Listener, request: &str) -> String {
    let mut stream = TcpStream::connect(listener.address().unwrap()).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn listener(listen_address: ListenAddress, tokens: Option<crate::control::Tokens>) -> Listener {
    let entrance = TcpEntrance::open("metrics", listen_address).unwrap();
    Listener::start(entrance, Arc::new(Fixed), tokens, ServerTls::default()).unwrap()
}

fn any_port() -> ListenAddress {
    ListenAddress::from(SocketAddr::from(([127, 0, 0, 1], 0)))
}

#[test]
fn socket_that_is_handed_over_serves_the_next_listener() {
    let first = listener(any_port(), None);
    let address = first.address().unwrap();
    let handed_over = first.hand_over();
    // This connection waits in the listen queue until the next listener accepts it.
    let _in_line = TcpStream::connect(address).unwrap();
    let listen_address = ListenAddress {
        handed_over,
        ..any_port()
    };
    let next = listener(listen_address, None);
    assert_eq!(next.address(), Some(address));
    assert!(ask(&next, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").contains(" 200 "));
    // A listener for another address does not use the socket handed over.
    let listen_address = ListenAddress {
        address: SocketAddr::from(([127, 0, 0, 2], 0)),
        handed_over: next.hand_over(),
    };
    let other = listener(listen_address, None);
    assert_ne!(other.address(), Some(address));
    TcpStream::connect(address).unwrap_err();
}

#[test]
fn metrics_port_serves_only_the_page() {
    let listener = listener(any_port(), None);
    let page = ask(&listener, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = page.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    read(body);
    for (request, status) in [
        ("GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n", "404"),
        (
            "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
            "405",
        ),
        ("nonsense\r\n\r\n", "400"),
    ] {
        let answer = ask(&listener, request);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{answer}"
        );
    }
    let address = listener.address().unwrap();
    drop(listener);
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn silent_clients_do_not_block_others() {
    let listener = listener(any_port(), None);
    let silent: Vec<TcpStream> = (0..8)
        .map(|_| TcpStream::connect(listener.address().unwrap()).unwrap())
        .collect();
    let page = ask(&listener, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(page.starts_with("HTTP/1.1 200"));
    drop(silent);
}

#[test]
fn metrics_need_a_configured_token() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, "0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let access = config::AccessConfig {
        readers_token_file: Some(path),
        ..config::AccessConfig::default()
    };
    let tokens = crate::control::Tokens::of(&access).unwrap();
    let listener = listener(any_port(), tokens);
    for (token, expected) in [
        (None, "Bearer realm=\"lunette\"\r"),
        (Some("0123456789abcdeg"), "invalid_token"),
    ] {
        let header = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
        let header = header.unwrap_or_default();
        let request = format!("GET /metrics HTTP/1.1\r\nHost: x\r\n{header}\r\n");
        let answer = ask(&listener, &request);
        assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
        assert!(
            answer.contains(expected) && !answer.contains("lunette_"),
            "{answer}"
        );
    }
    // The probes need no token and show no data. A listener of `Fixed` waits.
    for (path, status, body) in [("healthz", "200 OK", "ok"), ("readyz", "503 ", "not ok")] {
        let answer = ask(
            &listener,
            &format!("GET /{path} HTTP/1.1\r\nHost: x\r\n\r\n"),
        );
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{answer}"
        );
        assert!(answer.ends_with(&format!("\r\n\r\n{body}\n")), "{answer}");
    }
    let header = "Authorization: Bearer 0123456789abcdef\r\n";
    let answer = ask(
        &listener,
        &format!("GET /metrics HTTP/1.1\r\nHost: x\r\n{header}\r\n"),
    );
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
