//! Each hostile front end ends its own session, or is borne; a second front end's verified I/O goes on.

mod support;

use std::time::Duration;

use front_end::{Case, VerifiedLoad, Verifier, hostile};
use reactor::PollLimit;
use support::{Rig, connect, start_blk};

/// Far above what a batch takes, far below "it stands still".
const SOON: Duration = Duration::from_secs(20);

fn suffer(cases: impl Iterator<Item = &'static Case>) {
    // One worker, so that whoever blocks or spins it harms the other.
    let rig = Rig::polling(1, PollLimit::Never);
    let (bad, good) = (rig.serve_ram("bad", 2), rig.serve_ram("good", 1));
    let bystander = VerifiedLoad::start(&good).unwrap();
    let mut failures = Vec::new();
    for case in cases {
        if let Err(error) = case.run(&bad) {
            failures.push(format!("{}: {error}", case.name));
        }
        bystander.goes_on(SOON).expect(case.name);
        let mut next = connect(&bad);
        let mut queue = start_blk(&mut next, 0);
        if let Err(error) = Verifier::new(0, 8, 5).round(&mut queue, 4) {
            failures.push(format!("{}, then the next: {error}", case.name));
        }
    }
    bystander.finish().unwrap();
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
