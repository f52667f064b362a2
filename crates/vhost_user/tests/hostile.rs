//! Each hostile front end ends its own session or is tolerated; a second front end's verified I/O continues.

mod support;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reactor::PollLimit;
use rustix::event::{EventfdFlags, eventfd};
use support::{Rig, connect, lingering, start_blk};
use vhost_frontend::{
    Case, FrontEnd, Layout, Options, QueueOptions, ScsiQueue, ScsiRequest, VerifiedLoad, Verifier,
    hostile, kind,
};

/// Time limit for a response: far above the time of a batch, far below a stall.
const SOON: Duration = Duration::from_secs(20);

/// Runs the cases against one export. After each, `next` checks that it serves.
fn run_cases(
    cases: impl Iterator<Item = &'static Case>,
    serve: impl FnOnce(&Rig) -> PathBuf,
    next: impl Fn(&Path) -> Result<(), vhost_frontend::Error>,
) {
    // One worker, so that a front end that blocks or spins it harms the other.
    let rig = Rig::polling(1, PollLimit::Never);
    let (bad, good) = (serve(&rig), rig.serve_ram("good", 1));
    let bystander = VerifiedLoad::start(&good).unwrap();
    let mut failures = Vec::new();
    for case in cases {
        if let Err(error) = case.run(&bad) {
            failures.push(format!("{}: {error}", case.name));
        }
        bystander.expect_progress(SOON).expect(case.name);
        if let Err(error) = next(&bad) {
            failures.push(format!("{}, then the next: {error}", case.name));
        }
    }
    bystander.finish().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn disk_serves(socket: &Path) -> Result<(), vhost_frontend::Error> {
    let mut front_end = connect(socket);
    let mut queue = start_blk(&mut front_end, 0);
    Verifier::new(0, 8, 5).round(&mut queue, 4)
}

fn controller_serves(socket: &Path) -> Result<(), vhost_frontend::Error> {
    let mut front_end = connect(socket);
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(&mut front_end, 2, &options, 1, 512, Layout::Separate)?;
    let inquiry = ScsiRequest {
        target: 0,
        lun: 0,
        tag: 1,
        cdb: &[0x12, 0, 0, 0, 36, 0],
    };
    let done = queue.run(&inquiry, &[], &mut [0; 36])?;
    assert_eq!((done.response, done.status), (0, 0));
    Ok(())
}

#[test]
fn hostile_front_end_of_a_disk_ends_its_own_session_and_no_other() {
    let cases = hostile::cases().filter(|case| !case.slow);
    run_cases(cases, |rig| rig.serve_ram("bad", 2), disk_serves);
}

#[test]
fn hostile_controller_front_end_ends_its_own_session_only() {
    // Queue 0 is the control queue here, with other requests and as many checks.
    let cases = hostile::cases().filter(|case| !case.slow);
    let serve = |rig: &Rig| rig.serve_controller(Duration::ZERO);
    run_cases(cases, serve, controller_serves);
}

#[test]
fn front_end_that_stops_amid_a_message_is_given_up() {
    let cases = hostile::cases().filter(|case| case.slow);
    run_cases(cases, |rig| rig.serve_ram("bad", 2), disk_serves);
}

/// `O_NONBLOCK` is a property of the shared eventfd: a front end can clear it between two requests.
#[test]
fn blocking_interrupt_descriptor_delays_nobody() {
    let rig = Rig::polling(1, PollLimit::Never);
    let (bad, good) = (rig.serve_ram("bad", 1), rig.serve_ram("good", 1));
    let bystander = VerifiedLoad::start(&good).unwrap();
    let mut front_end = connect(&bad);
    let mut queue = start_blk(&mut front_end, 0);
    let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    front_end.set_call(0, Some(call.as_fd())).unwrap();
    // Full first and blocking afterwards, so that an earlier check could not detect it.
    while rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).is_err() {
        rustix::io::read(&call, &mut [0; 8]).unwrap();
    }
    rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty()).unwrap();
    let slot = queue.take().unwrap();
    queue.submit(slot, kind::FLUSH, 0, 0, 0);
    queue.queue().driver().enable_interrupts();
    queue.publish();
    queue.queue().kick();
    front_end.channel().wait_closed(SOON).unwrap();
    bystander.expect_progress(SOON).unwrap();
    drop((queue, front_end));
    let again = FrontEnd::connect(&bad, &Options::default()).map(drop);
    assert!(again.is_err(), "it is served again at once");
    disk_serves(&rig.serve_ram("other", 1)).unwrap();
    bystander.finish().unwrap();
}

#[test]
fn front_end_whose_kick_takes_long_to_close_holds_nobody_up() {
    let rig = Rig::polling(1, PollLimit::Never);
    let (bad, good) = (rig.serve_ram("bad", 1), rig.serve_ram("good", 1));
    let bystander = VerifiedLoad::start(&good).unwrap();
    let (kick, peer) = lingering();
    let mut front_end = connect(&bad);
    let queue = front_end.place_queue(0, &QueueOptions::default()).unwrap();
    front_end.describe_queue(&queue, 0).unwrap();
    // Another test checks whether the descriptor is refused.
    front_end.set_kick(0, Some(kick.as_fd())).ok();
    std::thread::scope(|scope| {
        // This thread may be the last one to close the descriptor.
        scope.spawn(move || drop(kick));
        std::thread::sleep(Duration::from_millis(100));
        drop((queue, front_end));
        std::thread::sleep(Duration::from_millis(100));
        let progress = bystander.expect_progress(SOON);
        drop(peer);
        progress.unwrap();
    });
    bystander.finish().unwrap();
}
