//! Task sets and guest memory of virtio-scsi: task attributes apply to all queues, and requests in flight keep memory that the front end
//! replaces.

mod support;

use std::sync::mpsc;
use std::time::Duration;

use scsi_exec::Hold;
use support::{IoEvent, Rig, Watched, eventually};
use vhost_frontend::{
    Area, FrontEnd, Layout, Options, Queue, QueueOptions, ScsiQueue, ScsiRequest, attribute,
};

const REQUESTS: u16 = 2;
const BLOCK: u64 = 512;
const LIMIT: Duration = Duration::from_secs(30);

fn write_10(block: u8) -> [u8; 10] {
    [0x2a, 0, 0, 0, 0, block, 0, 0, 1, 0]
}

fn start(front_end: &mut FrontEnd, index: u16) -> ScsiQueue {
    let options = QueueOptions::default();
    ScsiQueue::start(front_end, index, &options, 8, 4096, Layout::Separate).unwrap()
}

fn unit<'a>(cdb: &'a [u8]) -> ScsiRequest<'a> {
    ScsiRequest {
        target: 0,
        lun: 0,
        tag: 7,
        cdb,
    }
}

/// Consumes the unit attention of a new nexus.
fn settle(queue: &mut ScsiQueue) {
    for _ in 0..4 {
        if queue.run(&unit(&[0; 6]), &[], &mut []).unwrap().status == 0 {
            return;
        }
    }
    panic!("the unit never gets ready");
}

/// Adds a write of one block with this attribute, without publishing it.
fn submit(queue: &mut ScsiQueue, attribute: u8, block: u8) {
    let slot = queue.take().unwrap();
    queue.data_out(slot).write(0, &[block; BLOCK as usize]);
    queue.set_attribute(attribute);
    let cdb = write_10(block);
    assert!(queue.submit(slot, &unit(&cdb), BLOCK as usize, 0));
}

fn reap(queue: &mut ScsiQueue, count: usize) {
    for _ in 0..count {
        let done = queue.wait().unwrap();
        assert_eq!((done.response, done.status), (0, 0));
        queue.release(done.slot);
    }
}

/// Returns the positions of a write's start and end in the device's story.
fn times(device: &Watched, block: u64) -> (usize, usize) {
    let io_events = device.io_events();
    let find = |moment| io_events.iter().position(|seen| *seen == moment).unwrap();
    let offset = block * BLOCK;
    (find(IoEvent::Start(offset)), find(IoEvent::End(offset)))
}

#[test]
fn ordered_waits_and_head_of_queue_does_not_across_queues() {
    let rig = Rig::new(2);
    let (socket, device, _) = rig.serve_watched_controller(Duration::from_millis(50));
    for packed in [false, true] {
        let options = Options {
            packed,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
        let mut first = start(&mut front_end, REQUESTS);
        let mut second = start(&mut front_end, REQUESTS + 1);
        settle(&mut first);
        device.forget();

        submit(&mut first, attribute::SIMPLE, 0);
        submit(&mut first, attribute::SIMPLE, 1);
        first.publish();
        eventually("both are under way", || device.seen().len() == 2);
        // From another worker: the older commands run on the first.
        submit(&mut second, attribute::ORDERED, 2);
        submit(&mut second, attribute::SIMPLE, 3);
        submit(&mut second, attribute::HEAD_OF_QUEUE, 4);
        second.publish();
        reap(&mut first, 2);
        reap(&mut second, 3);
        let at = |block| times(&device, block);
        let ((_, end_0), (_, end_1)) = (at(0), at(1));
        let (ordered, head) = (at(2), at(4));
        assert!(ordered.0 > end_0 && ordered.0 > end_1, "ORDERED overtook");
        assert!(head.0 < ordered.0, "HEAD OF QUEUE waited for ORDERED");
        assert!(
            at(3).0 > ordered.1,
            "SIMPLE overtook the ORDERED one before it"
        );
        assert!(
            at(0).0 < end_1 && at(1).0 < end_0,
            "SIMPLE ones held each other up"
        );
    }
}

#[test]
fn waiting_tasks_are_aborted_with_their_session() {
    let rig = Rig::new(2);
    let (socket, device, _) = rig.serve_watched_controller(Duration::from_millis(200));
    for _ in 0..3 {
        let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
        let mut queue = start(&mut front_end, REQUESTS);
        settle(&mut queue);
        device.forget();
        submit(&mut queue, attribute::SIMPLE, 0);
        submit(&mut queue, attribute::ORDERED, 1);
        submit(&mut queue, attribute::SIMPLE, 2);
        queue.publish();
        eventually("the first is under way", || !device.seen().is_empty());
    }
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let mut queue = start(&mut front_end, REQUESTS);
    settle(&mut queue);
    for attribute in [
        attribute::ORDERED,
        attribute::HEAD_OF_QUEUE,
        attribute::SIMPLE,
    ] {
        submit(&mut queue, attribute, 9);
        queue.publish();
        reap(&mut queue, 1);
    }
}

#[test]
fn no_aborted_command_touches_the_disk_after_the_functions_answer() {
    // VIRTIO_SCSI_S_FUNCTION_COMPLETE is 0; VIRTIO_SCSI_S_ABORTED, VIRTIO_SCSI_S_RESET.
    const ABORTED: u8 = 2;
    const RESET: u8 = 4;
    let rig = Rig::new(2);
    let (socket, device, _) = rig.serve_watched_controller(Duration::from_millis(60));
    // ABORT TASK, ABORT TASK SET, CLEAR TASK SET, I_T NEXUS RESET, LOGICAL UNIT RESET.
    for (function, response) in [
        (0, ABORTED),
        (1, ABORTED),
        (3, ABORTED),
        (4, RESET),
        (5, RESET),
    ] {
        let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
        let options = QueueOptions::default();
        let mut control = front_end.start_queue(0, &options).unwrap();
        let mut first = start(&mut front_end, REQUESTS);
        let mut second = start(&mut front_end, REQUESTS + 1);
        settle(&mut first);
        device.forget();
        submit(&mut first, attribute::SIMPLE, 0);
        first.publish();
        eventually("one is under way", || device.seen().len() == 1);
        // This command waits for the first one, on another worker.
        submit(&mut second, attribute::ORDERED, 1);
        second.publish();
        let at = front_end.allocate(4096, 4096).unwrap();
        let mut request = [0; 24];
        request[4] = function;
        request[8..12].copy_from_slice(&[1, 0, 0x40, 0]);
        request[16] = 7;
        at.write(0, &request);
        at.write(64, &[0xee]);
        assert!(control.add(&[at.part(0, 24).element()], &[at.part(64, 1).element()], 0));
        control.publish();
        while control.pop_used().is_none() {
            control.wait(LIMIT).unwrap();
        }
        let history = device.io_events();
        let mut answer = [0];
        at.read(64, &mut answer);
        assert_eq!(answer, [0], "function {function}");
        let count = |which: fn(&IoEvent) -> bool| history.iter().filter(|m| which(m)).count();
        let begun = count(|moment| matches!(moment, IoEvent::Start(_)));
        let ended = count(|moment| matches!(moment, IoEvent::End(_)));
        assert_eq!(begun, ended, "function {function} did not wait");
        for queue in [&mut first, &mut second] {
            let done = queue.wait().unwrap();
            // A command that had ended before the function succeeds.
            assert!(
                matches!(done.response, 0) || done.response == response,
                "{done:?}"
            );
            queue.release(done.slot);
        }
        first.set_attribute(attribute::SIMPLE);
        settle(&mut first);
        let later = &device.io_events()[history.len()..];
        assert!(later.is_empty(), "function {function}, then {later:?}");
    }
}

/// A guest that changes the unit in the header of a waiting command gains nothing. Otherwise the command would run on a unit without being
/// in its task set, and no function for that unit would find it.
#[test]
fn command_that_waits_for_its_turn_stays_what_it_was_when_it_came() {
    let rig = Rig::new(1);
    let (socket, device, _) = rig.serve_watched_controller(Duration::from_millis(300));
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let mut queue = start(&mut front_end, REQUESTS);
    settle(&mut queue);
    device.forget();
    submit(&mut queue, attribute::SIMPLE, 1);
    let waits = queue.take().unwrap();
    queue.set_attribute(attribute::ORDERED);
    let cdb = write_10(2);
    assert!(queue.submit(waits, &unit(&cdb), BLOCK as usize, 0));
    // Follows the waiting command, and its header is not changed: when it was popped, so was the waiting command.
    submit(&mut queue, attribute::HEAD_OF_QUEUE, 3);
    queue.publish();
    eventually("both are under way", || device.seen().len() == 2);
    // Target 5, LUN 300, and a write of block 4.
    let header = queue.header(waits);
    header.write(0, &[1, 5, 0x41, 0x2c]);
    header.write(19, &write_10(4));
    reap(&mut queue, 3);
    let io_events = device.io_events();
    let begun = |block: u64| io_events.contains(&IoEvent::Start(block * BLOCK));
    assert!(begun(2) && !begun(4), "{io_events:?}");
}

/// Operations that wait for a task's end continue after the driver has seen its response. Otherwise the driver could see the function's
/// answer first.
#[test]
fn task_is_seen_to_be_answered_before_what_waits_for_it_goes_on() {
    let rig = Rig::new(1);
    let (socket, device, controller) = rig.serve_watched_controller(Duration::from_millis(100));
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let mut queue = start(&mut front_end, REQUESTS);
    settle(&mut queue);
    for abort in [true, false] {
        device.forget();
        submit(&mut queue, attribute::SIMPLE, 0);
        queue.publish();
        eventually("it is under way", || device.seen().len() == 1);
        let (sender, result) = mpsc::channel();
        let (resume_sender, resume_receiver) = mpsc::channel::<()>();
        // The worker stops when it drops the hold.
        let hold = Hold::new(move || {
            sender.send(()).unwrap();
            resume_receiver.recv_timeout(LIMIT).ok();
        });
        controller.end_tasks(&[(0, 0)], abort, &hold);
        drop(hold);
        result.recv_timeout(LIMIT).unwrap();
        let done = queue.reap();
        resume_sender.send(()).unwrap();
        queue.release(done.expect("it was let go first").slot);
    }
}

/// Registers a reservation key: REGISTER AND IGNORE EXISTING KEY.
fn register(queue: &mut ScsiQueue) {
    let mut list = [0; 24];
    list[15] = 5;
    let cdb = [0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0];
    let done = queue.run(&unit(&cdb), &list, &mut []).unwrap();
    assert_eq!((done.response, done.status), (0, 0));
}

/// Submits a PREEMPT AND ABORT of the front end's own key: its own tasks are aborted.
fn submit_preempt_and_abort(queue: &mut ScsiQueue, tag: u64) -> u16 {
    let mut list = [0; 24];
    (list[7], list[15]) = (5, 5);
    let slot = queue.take().unwrap();
    queue.data_out(slot).write(0, &list);
    queue.set_attribute(attribute::SIMPLE);
    let cdb = [0x5f, 5, 1, 0, 0, 0, 0, 0, 24, 0];
    let request = ScsiRequest { tag, ..unit(&cdb) };
    assert!(queue.submit(slot, &request, list.len(), 0));
    slot
}

/// Runs a task management function for unit 0. Returns its answer.
fn manage(front_end: &mut FrontEnd, control: &mut Queue, function: u8, tag: u8) -> u8 {
    let at = front_end.allocate(4096, 4096).unwrap();
    let mut request = [0; 24];
    request[4] = function;
    request[8..12].copy_from_slice(&[1, 0, 0x40, 0]);
    request[16] = tag;
    at.write(0, &request);
    at.write(64, &[0xee]);
    assert!(control.add(&[at.part(0, 24).element()], &[at.part(64, 1).element()], 0));
    control.publish();
    while control.pop_used().is_none() {
        control.wait(LIMIT).unwrap();
    }
    let mut answer = [0];
    at.read(64, &mut answer);
    answer[0]
}

/// A command waits for a PREEMPT AND ABORT to end, which waits for the commands that it aborts, including that command.
#[test]
fn command_that_waits_for_its_abort_is_answered() {
    const ABORTED: u8 = 2;
    let rig = Rig::new(1);
    let (socket, device, _) = rig.serve_watched_controller(Duration::from_millis(100));
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let mut control = front_end.start_queue(0, &QueueOptions::default()).unwrap();
    let mut queue = start(&mut front_end, REQUESTS);
    settle(&mut queue);
    for round in 0..3 {
        register(&mut queue);
        device.forget();
        submit(&mut queue, attribute::SIMPLE, 0);
        queue.publish();
        eventually("the write is under way", || device.seen().len() == 1);
        // In one iteration, so that there is a command to abort: a batch contains at least this many.
        let preempts = submit_preempt_and_abort(&mut queue, 9);
        submit(&mut queue, attribute::ORDERED, 1);
        queue.publish();
        for _ in 0..3 {
            let done = queue.wait().unwrap();
            let response = if done.slot == preempts { 0 } else { ABORTED };
            assert_eq!(done.response, response, "{done:?} in round {round}");
            queue.release(done.slot);
        }
        assert!(
            !device.io_events().contains(&IoEvent::Start(BLOCK)),
            "it ran"
        );
        const UNIT_RESET: u8 = 5;
        assert_eq!(manage(&mut front_end, &mut control, UNIT_RESET, 0), 0);
        settle(&mut queue);
        submit(&mut queue, attribute::ORDERED, 2);
        queue.publish();
        reap(&mut queue, 1);
    }
}

#[test]
fn command_that_waits_for_those_it_aborts_can_be_aborted() {
    const ABORTED: u8 = 2;
    let rig = Rig::new(1);
    let (socket, device, _) = rig.serve_watched_controller(Duration::from_millis(300));
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let mut control = front_end.start_queue(0, &QueueOptions::default()).unwrap();
    let mut queue = start(&mut front_end, REQUESTS);
    settle(&mut queue);
    register(&mut queue);
    device.forget();
    submit(&mut queue, attribute::SIMPLE, 0);
    queue.publish();
    eventually("the write is under way", || device.seen().len() == 1);
    let preempts = submit_preempt_and_abort(&mut queue, 9);
    queue.publish();
    const ABORT_TASK: u8 = 0;
    assert_eq!(manage(&mut front_end, &mut control, ABORT_TASK, 9), 0);
    let done = queue.reap().expect("its task is not answered");
    assert_eq!((done.slot, done.response), (preempts, ABORTED));
    // Another command uses its slot when the tasks that it waited for have ended.
    queue.release(preempts);
    submit(&mut queue, attribute::ORDERED, 1);
    queue.publish();
    let write = queue.wait().unwrap();
    assert_eq!(write.response, ABORTED);
    queue.release(write.slot);
    reap(&mut queue, 1);
    let (_, end) = times(&device, 0);
    assert!(times(&device, 1).0 > end, "it did not wait for its turn");
}

/// Submits a request with data in these areas.
fn submit_at(queue: &mut Queue, at: &Area, cdb: &[u8], out: Option<&Area>, into: Option<&Area>) {
    let mut request = [0; 51];
    request[..4].copy_from_slice(&[1, 0, 0x40, 0]);
    request[19..19 + cdb.len()].copy_from_slice(cdb);
    at.write(0, &request);
    at.write(64, &[0xff; 108]);
    let readable: Vec<_> = [Some(at.part(0, 51)), out.cloned()]
        .iter()
        .flatten()
        .map(Area::element)
        .collect();
    let writable: Vec<_> = [Some(at.part(64, 108)), into.cloned()]
        .iter()
        .flatten()
        .map(Area::element)
        .collect();
    assert!(queue.add(&readable, &writable, 0));
    queue.publish();
}

fn ended_well(queue: &mut Queue, at: &Area) {
    loop {
        if queue.pop_used().is_some() {
            break;
        }
        queue.wait(LIMIT).unwrap();
    }
    let mut response = [0; 108];
    at.read(64, &mut response);
    assert_eq!((response[10], response[11]), (0, 0), "status and response");
}

#[test]
fn memory_that_is_replaced_under_requests_stays_theirs() {
    const BYTES: usize = 64 << 10;
    let rig = Rig::new(1);
    let (socket, device, _) = rig.serve_watched_controller(Duration::from_millis(40));
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let mut settling = start(&mut front_end, REQUESTS + 1);
    settle(&mut settling);
    let mut queue = front_end
        .start_queue(REQUESTS, &QueueOptions::default())
        .unwrap();
    let header = front_end.allocate(4096, 4096).unwrap();
    let mut data = front_end.add_region(BYTES).unwrap();
    let (write, read) = (
        [0x2a, 0, 0, 0, 0, 0, 0, 0, 128, 0],
        [0x28, 0, 0, 0, 0, 0, 0, 0, 128, 0],
    );
    // Replaces the file at the guest-physical address with one SET_MEM_TABLE.
    let swap = |front_end: &mut FrontEnd, old: &Area, fill: u8| {
        let memory = front_end.memory_mut();
        let gone = memory.take(old.address).unwrap();
        let fresh = memory.add(BYTES).unwrap().spec.guest_address;
        let mut fresh = memory.take(fresh).unwrap();
        fresh.spec = gone.spec;
        fresh.area().write(0, &[fill; BYTES]);
        let area = fresh.area();
        memory.put(fresh);
        front_end.send_memory().unwrap();
        area
    };
    for round in 1u8..6 {
        device.forget();
        data.write(0, &[round; BYTES]);
        submit_at(&mut queue, &header, &write, Some(&data), None);
        eventually("the write is under way", || device.seen().len() == 1);
        let fresh = swap(&mut front_end, &data, 0xee);
        ended_well(&mut queue, &header);
        data = fresh;

        device.forget();
        submit_at(&mut queue, &header, &read, None, Some(&data));
        eventually("the read is under way", || device.seen().len() == 1);
        let fresh = swap(&mut front_end, &data, 0xdd);
        ended_well(&mut queue, &header);
        let mut bytes = vec![0; BYTES];
        data.read(0, &mut bytes);
        let whole = bytes.iter().all(|byte| *byte == round);
        assert!(whole, "the read's own memory has the written data");
        fresh.read(0, &mut bytes);
        let untouched = bytes.iter().all(|byte| *byte == 0xdd);
        assert!(untouched, "memory that came later was written to");
        data = fresh;
    }
}
