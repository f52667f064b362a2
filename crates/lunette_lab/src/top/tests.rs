//! Rendered frames of 80 by 24 characters.

use control::statistics::{
    DiskStatistics, IoStatistics, LimitedStatistics, Statistics, WorkerStatistics,
};
use control::{DiskStatus, ExportStatus, Status};
use latency::{Clock, Labels, Operation, QueueTimeline, Snapshot, Stamp, Stamps};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::termion::event::Key;

use super::rates::DaemonSample;
use super::screen::{KeyAction, Screen};
use super::{draw, plain};

fn export(name: &str, kind: &str, connected: bool) -> ExportStatus {
    ExportStatus {
        queue_stops: None,
        name: name.to_owned(),
        kind: kind.to_owned(),
        socket: None,
        addresses: Vec::new(),
        queues: 2,
        connected,
        served: Vec::new(),
        waiting_portals: Vec::new(),
        port_groups: Vec::new(),
        luns: Vec::new(),
        warning: None,
    }
}

/// Sample of a daemon after `seconds`. Its queues completed `requests` per second: 1 us before the disk, 3 us in
/// it.
fn sample(seconds: u64) -> DaemonSample {
    let queue = |export: &str, disk: &str, queue: u32, requests: u64| {
        let labels = Labels {
            export: export.to_owned(),
            disk: disk.to_owned(),
            queue,
            worker: queue % 2,
        };
        let mut timeline = QueueTimeline::new(labels, 8);
        for _ in 0..requests * seconds {
            let stamps = [0, 500, 750, 750, 750, 1000, 4000, 4000, 4000].map(Stamp);
            timeline.record_request(Operation::Read, &Stamps::from_array(stamps));
            timeline.counters().count(Operation::Read, 4096, true);
        }
        timeline.counters().kicks.add(2 * seconds);
        timeline.counters().in_flight.set(u64::from(queue));
        timeline.snapshot(&Clock::simulated().0)
    };
    let disk = |name: &str, reads: u64| {
        let io = IoStatistics {
            requests: reads * seconds,
            bytes: reads * seconds * 4096,
        };
        DiskStatistics {
            operations: [("read".to_owned(), io)].into(),
            errors: [("offline".to_owned(), 3 * seconds)].into(),
            limited: LimitedStatistics {
                requests: 20 * seconds,
                wait_ns: 1_000_000 * seconds,
            },
            name: name.to_owned(),
            ..DiskStatistics::default()
        }
    };
    DaemonSample {
        status: Status {
            may_change: true,
            version: "0.9.0".to_owned(),
            pid: 4711,
            uptime_seconds: seconds,
            sandbox: "log".to_owned(),
            workers: 2,
            disks: Vec::<DiskStatus>::new(),
            exports: vec![
                export("idle", "vhost-scsi", false),
                export("d0", "vhost-blk", true),
            ],
            ..Status::default()
        },
        statistics: Statistics {
            jobs: Vec::new(),
            bitmaps: Vec::new(),
            at_ns: seconds * 1_000_000_000,
            workers: (0..2)
                .map(|worker| WorkerStatistics {
                    worker,
                    busy_iterations: 30 * seconds,
                    empty_iterations: 10 * seconds,
                    sleeps: seconds,
                    work_ns: 300_000_000 * seconds,
                    poll_found_ns: 150_000_000 * seconds,
                    poll_empty_ns: 50_000_000 * seconds,
                    sleep_ns: 500_000_000 * seconds,
                    ..WorkerStatistics::default()
                })
                .collect(),
            disks: vec![disk("d0", 1500), disk("shared", 10)],
            initiators: Vec::new(),
            queue_times: Vec::new(),
            latency: Snapshot {
                queues: vec![queue("d0", "d0", 0, 100), queue("d0", "d0", 1, 1400)],
            },
        },
    }
}

fn screen() -> Screen {
    let mut screen = Screen::default();
    screen.add_sample(Ok(sample(1)));
    screen.add_sample(Ok(sample(2)));
    screen
}

fn press(screen: &mut Screen, keys: &[Key]) -> KeyAction {
    let mut action = KeyAction::Stay;
    for key in keys {
        action = screen.key(*key);
    }
    action
}

/// Lines of a terminal of this size, without trailing space.
fn frame(screen: &Screen, columns: u16, lines: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
    terminal
        .draw(|frame| draw::draw(screen, frame.area(), frame.buffer_mut()))
        .unwrap();
    let text = terminal.backend().to_string();
    let line = |line: &str| line.trim_matches('"').trim_end().to_owned();
    text.lines().map(line).collect()
}

#[test]
fn exports_look_like_this() {
    let expected = "\
lunette 0.9.0  pid 4711  up 0:00:02             1.50 k req/s  6.14 MB/s  0 err/s
 1:exports  2:queues  3:disks  4:workers
export                   req/s     B/s    mean     p99 depth err/s kick/s intr/s
d0                      1.50 k  6.14 M 4.00 us 4.00 us     1     0      4      0
idle (no client)             0       0       -       -     0     0      0      0









d0, all: time by stage
stage         mean share      p99
popped      500 ns  12 %   500 ns  █████▊
parsed      250 ns   6 %   250 ns  ██▉
submitted   250 ns   6 %   250 ns  ██▉
reaped     3.00 us  75 %  2.98 us  ██████████████████████████████████▌
answered      0 ns   0 %     0 ns
notified      0 ns   0 %     0 ns
total      4.00 us        4.00 us
? help  Tab view  up/down select  s sort  r reverse  / filter  space freeze  q";
    assert_eq!(frame(&screen(), 80, 24).join("\n"), expected);
}

#[test]
fn queues_are_sorted_filtered_and_selected() {
    let mut screen = screen();
    press(&mut screen, &[Key::Char('2')]);
    let names = |screen: &Screen| -> Vec<String> {
        screen.rows().into_iter().map(|row| row.name).collect()
    };
    assert_eq!(names(&screen), ["d0/1", "d0/0"], "by requests");
    press(&mut screen, &[Key::Char('r')]);
    assert_eq!(names(&screen), ["d0/0", "d0/1"]);
    press(&mut screen, &[Key::Char('r'), Key::Char('S')]);
    assert_eq!(
        (screen.sort, names(&screen)),
        (0, vec!["d0/0".to_owned(), "d0/1".to_owned()])
    );
    press(&mut screen, &[Key::Down, Key::Down]);
    assert_eq!(screen.selected.as_deref(), Some("d0/1"));
    let filter: Vec<Key> = "/worker 0".chars().map(Key::Char).collect();
    press(&mut screen, &filter);
    assert_eq!(names(&screen), ["d0/0"]);
    assert!(frame(&screen, 80, 24)[1].ends_with("filter: worker 0_"));
    press(&mut screen, &[Key::Char('\n'), Key::Esc]);
    assert_eq!(names(&screen).len(), 2);
    assert_eq!(press(&mut screen, &[Key::Esc]), KeyAction::Leave);
}

#[test]
fn disks_and_workers_have_rates_of_their_own() {
    let mut screen = screen();
    press(&mut screen, &[Key::Char('3')]);
    let text = frame(&screen, 80, 24);
    assert_eq!(
        text[3],
        "d0                    1.50 k       0       0  6.14 M       0     0     20      3"
    );
    press(&mut screen, &[Key::Down]);
    assert!(frame(&screen, 80, 24)[14].contains("no queue of its own"));
    press(&mut screen, &[Key::Char('\t')]);
    let text = frame(&screen, 80, 24);
    assert_eq!(
        text[3],
        "worker 1    1.40 k  5.73 M      40  30 %  15 %   5 %  50 %       1      0      1"
    );
}

#[test]
fn frozen_numbers_stand_still_and_trouble_is_told() {
    let mut screen = screen();
    press(&mut screen, &[Key::Char(' ')]);
    let before = frame(&screen, 80, 24);
    assert!(before[1].ends_with("frozen"));
    screen.add_sample(Ok(sample(7)));
    assert_eq!(frame(&screen, 80, 24), before);
    screen.add_sample(Err("no process listens".to_owned()));
    assert_eq!(frame(&screen, 80, 24)[23], "no process listens");
    press(&mut screen, &[Key::Char(' ')]);
    screen.add_sample(Ok(sample(9)));
    assert!(frame(&screen, 80, 24)[0].contains("up 0:00:09"));
}

#[test]
fn a_daemon_that_was_started_anew_gives_no_absurd_rates() {
    let mut screen = screen();
    screen.add_sample(Ok(sample(1)));
    assert!(
        frame(&screen, 80, 24)[0].contains("1.50 k req/s"),
        "the last ones stay"
    );
    screen.add_sample(Ok(sample(3)));
    assert!(frame(&screen, 80, 24)[0].contains("1.50 k req/s"));
}

#[test]
fn help_fits_and_any_key_ends_it() {
    let mut screen = screen();
    press(&mut screen, &[Key::Char('?')]);
    let text = frame(&screen, 80, 24).join("\n");
    for line in draw::HELP.lines().filter(|line| !line.is_empty()) {
        assert!(text.contains(line.trim_end()), "{line}");
    }
    assert_eq!(press(&mut screen, &[Key::Char('q')]), KeyAction::Stay);
    assert!(!screen.helping);
}

#[test]
fn any_size_is_drawn_without_panic_and_one_frame_is_plain_text() {
    let mut screen = screen();
    for (columns, lines) in [(1, 1), (20, 5), (79, 18), (81, 19), (300, 100)] {
        for keys in [Key::Char('\t'), Key::Char('o'), Key::Char('?')] {
            press(&mut screen, &[keys]);
            frame(&screen, columns, lines);
        }
    }
    let mut screen = self::screen();
    assert!(
        plain(&screen, 80, 24)
            .lines()
            .all(|line| line.chars().count() <= 80)
    );
    assert!(!plain(&screen, 80, 24).contains("? help"));
    let documented = include_str!("../../../../docs/operations.md");
    let screen_text = plain(&screen, 80, 24);
    let tabs = screen_text.lines().nth(1).expect("the line of views");
    assert!(
        tabs.starts_with(" 1:exports ") && documented.contains(tabs),
        "{tabs}"
    );
    screen.filter = "nothing like it".to_owned();
    assert!(plain(&screen, 80, 24).contains("no row contains this text"));
}
