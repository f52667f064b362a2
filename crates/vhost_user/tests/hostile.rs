//! Each hostile front end ends its own session or is tolerated; a second front end's verified I/O continues.

mod support;

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use conformance::{Device, Target, Test, hostile};
use reactor::PollLimit;
use rustix::event::{EventfdFlags, eventfd};
use support::{Rig, connect, lingering, start_blk};
use vhost_frontend::{FrontEnd, Options, QueueOptions, VerifiedLoad, kind};

/// Time limit for a response: far above the time of a batch, far below a stall.
const SOON: Duration = Duration::from_secs(20);

/// Runs the tests against one export. After each, the next front end is served.
fn run_cases(
    cases: impl Iterator<Item = &'static Test>,
    device: Device,
    serve: impl FnOnce(&Rig) -> PathBuf,
) {
    // One worker, so that a front end that blocks or spins it harms the other.
    let rig = Rig::polling(1, PollLimit::Never);
    let (bad, good) = (serve(&rig), rig.serve_ram("good", 1));
    let bad = Target::strict(&bad, device);
    let bystander = VerifiedLoad::start(&good).unwrap();
    let mut failures = Vec::new();
    for case in cases {
        if let Err(flaw) = case.run(&bad) {
            failures.push(format!("{}: {flaw:?}", case.title));
        }
        bystander.expect_progress(SOON).expect(case.title);
        if let Err(flaw) = bad.serves() {
            failures.push(format!("{}, then the next: {flaw:?}", case.title));
        }
    }
    bystander.finish().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn hostile_front_end_of_a_disk_ends_its_own_session_and_no_other() {
    let cases = hostile::cases().filter(|case| !case.is_slow);
    run_cases(cases, Device::Blk, |rig| rig.serve_ram("bad", 2));
}

#[test]
fn hostile_controller_front_end_ends_its_own_session_only() {
    // Queue 0 is the control queue here, with other requests and as many checks.
    let cases = hostile::cases().filter(|case| !case.is_slow);
    let serve = |rig: &Rig| rig.serve_controller(Duration::ZERO);
    run_cases(cases, Device::Scsi(0, 0), serve);
}

#[test]
fn front_end_that_stops_amid_a_message_is_given_up() {
    let cases = hostile::cases().filter(|case| case.is_slow);
    run_cases(cases, Device::Blk, |rig| rig.serve_ram("bad", 2));
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
    let other = Target::strict(&rig.serve_ram("other", 1), Device::Blk);
    other.serves().unwrap();
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
