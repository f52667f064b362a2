//! Initiators that break the rules, each while another session runs verified I/O. The daemon, the other session and the data are
//! unaffected, and the responses conform to RFC 7143.

mod common;
#[path = "common/hostile.rs"]
mod hostile;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Client, Rig, image, settings, verify_image};
use iscsi::negotiation::Offer;

/// A session that runs meanwhile.
struct Load {
    rounds: Arc<AtomicU64>,
    end: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Load {
    fn start(rig: &Rig) -> Load {
        let (rounds, end) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (counted, ends) = (rounds.clone(), end.clone());
        let mut client = Client::login(rig.portal, settings(200, Offer::default()), 2);
        client.settle();
        let thread = std::thread::spawn(move || {
            let mut image = image();
            while !ends.load(Ordering::SeqCst) {
                let round = counted.load(Ordering::SeqCst);
                verify_image(&mut client, 2, 1, 1000 + round, &mut image);
                counted.store(round + 1, Ordering::SeqCst);
            }
        });
        Load {
            rounds,
            end,
            thread: Some(thread),
        }
    }

    fn expect_progress(&self, after: &str) {
        let now = self.rounds.load(Ordering::SeqCst);
        let started = Instant::now();
        while self.rounds.load(Ordering::SeqCst) < now + 2 {
            assert!(
                started.elapsed() < Duration::from_secs(30),
                "stands still after {after}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(
                std::thread::panicking() || ended.is_ok(),
                "the other session failed"
            );
        }
    }
}

#[test]
fn hostile_initiators_end_only_their_own_sessions() {
    let rig = Rig::ram();
    let load = Load::start(&rig);
    load.expect_progress("nothing");
    for (name, case) in hostile::cases() {
        let ended = std::panic::catch_unwind(|| case(rig.portal));
        assert!(ended.is_ok(), "{name}");
        load.expect_progress(name);
    }
    drop(load);
    rig.wait_for_connections(0);
    assert_eq!(rig.server.status()[0].sessions, 0);
}
