//! Each hostile front end ends its own session, or is borne; a second front end's verified I/O goes on.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use front_end::{Case, Verifier, hostile};
use reactor::PollLimit;
use support::{Rig, connect, eventually, start_blk};

/// A well-behaved front end on a thread of its own.
struct Bystander {
    stop: Arc<AtomicBool>,
    verified: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Bystander {
    fn start(socket: &std::path::Path) -> Bystander {
        let (stop, verified) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (ending, counter) = (stop.clone(), verified.clone());
        let mut front_end = connect(socket);
        let thread = std::thread::spawn(move || {
            let mut queue = start_blk(&mut front_end, 0);
            let mut verifier = Verifier::new(0, 256, 99);
            while !ending.load(Ordering::Relaxed) {
                verifier.round(&mut queue, 4).unwrap();
                counter.store(verifier.requests(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(500));
            }
            verifier.check_all(&mut queue).unwrap();
        });
        Bystander {
            stop,
            verified,
            thread: Some(thread),
        }
    }

    fn goes_on(&self, case: &str) {
        let before = self.verified.load(Ordering::Relaxed);
        eventually(&format!("the other's I/O goes on after: {case}"), || {
            let thread = self.thread.as_ref().unwrap();
            assert!(!thread.is_finished(), "the other suffered from: {case}");
            self.verified.load(Ordering::Relaxed) > before
        });
    }

    fn finish(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn suffer(cases: impl Iterator<Item = &'static Case>) {
    // One worker, so that whoever blocks or spins it harms the other.
    let rig = Rig::polling(1, PollLimit::Never);
    let (bad, good) = (rig.serve_ram("bad", 2), rig.serve_ram("good", 1));
    let bystander = Bystander::start(&good);
    let mut failures = Vec::new();
    for case in cases {
        if let Err(error) = case.run(&bad) {
            failures.push(format!("{}: {error}", case.name));
        }
        bystander.goes_on(case.name);
        let mut next = connect(&bad);
        let mut queue = start_blk(&mut next, 0);
        if let Err(error) = Verifier::new(0, 8, 5).round(&mut queue, 4) {
            failures.push(format!("{}, then the next: {error}", case.name));
        }
    }
    bystander.finish();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn hostile_front_end_ends_its_own_session_and_no_other() {
    suffer(hostile::cases().filter(|case| !case.slow));
}

#[test]
fn front_end_that_stops_amid_a_message_is_given_up() {
    suffer(hostile::cases().filter(|case| case.slow));
}
