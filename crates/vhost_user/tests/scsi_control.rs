//! Unusual use of a virtio-scsi controller's control and event queues.

mod support;

use std::time::Duration;

use reactor::PollLimit;
use support::Rig;
use vhost_frontend::{
    Area, FrontEnd, Layout, Options, Queue, QueueOptions, ScsiQueue, ScsiRequest, VerifiedLoad,
};
use virtio_scsi::Event;

const CONTROL: u16 = 0;
const EVENTS: u16 = 1;
const REQUESTS: u16 = 2;
const LIMIT: Duration = Duration::from_secs(30);
/// VIRTIO_SCSI_S_ABORTED, VIRTIO_SCSI_S_RESET.
const ABORTED: u8 = 2;
const RESET: u8 = 4;

/// Returns the token of a used chain, and the bytes written as reported by the device.
fn wait(queue: &mut Queue) -> (u64, u32) {
    loop {
        if let Some(used) = queue.pop_used() {
            return (used.token, used.written);
        }
        queue.wait(LIMIT).unwrap();
    }
}

/// Builds a VIRTIO_SCSI_T_TMF for target 0, LUN 0.
fn function(subtype: u8, tag: u8) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[4] = subtype;
    bytes[8..12].copy_from_slice(&[1, 0, 0x40, 0]);
    bytes[16] = tag;
    bytes
}

/// Sends a request to the control queue. Returns the written part of `room` bytes.
fn ask(queue: &mut Queue, at: &Area, request: &[u8], room: usize) -> Vec<u8> {
    at.write(0, request);
    at.write(64, &[0xee; 64]);
    let (request, response) = (at.part(0, request.len()), at.part(64, room));
    assert!(queue.add(&[request.element()], &[response.element()], 0));
    queue.publish();
    let (_, written) = wait(queue);
    let mut bytes = vec![0; room];
    response.read(0, &mut bytes);
    let left = bytes.split_off(written as usize);
    assert!(left.iter().all(|byte| *byte == 0xee), "more was written");
    bytes
}

#[test]
fn functions_without_end_hold_nobody_up() {
    const ROUNDS: usize = 3000;
    // One worker, so that a queue that keeps it busy harms the other.
    let rig = Rig::polling(1, PollLimit::Never);
    let (socket, good) = (
        rig.serve_controller(Duration::from_millis(1)),
        rig.serve_ram("good", 1),
    );
    let bystander = VerifiedLoad::start(&good).unwrap();
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let options = QueueOptions::default();
    let mut requests = ScsiQueue::start(
        &mut front_end,
        REQUESTS,
        &options,
        8,
        4096,
        Layout::Separate,
    )
    .unwrap();
    let mut control = front_end.start_queue(CONTROL, &options).unwrap();
    let chains = u64::from(options.size / 2);
    let at = front_end.allocate(64 * chains as usize, 64).unwrap();
    let write = ScsiRequest {
        target: 0,
        lun: 0,
        tag: 1,
        cdb: &[0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0],
    };
    let (mut asked, mut answered, mut free) = (0, 0, (0..chains).collect::<Vec<_>>());
    while answered < ROUNDS {
        // Always a full ring, and commands to abort.
        while let (Some(place), true) = (free.pop(), asked < ROUNDS) {
            let area = at.part(64 * place as usize, 64);
            area.write(0, &function((asked % 10) as u8, 1));
            area.write(32, &[0xee]);
            let (request, response) = (area.part(0, 24), area.part(32, 1));
            assert!(control.add(&[request.element()], &[response.element()], place));
            asked += 1;
        }
        control.publish();
        while let Some(slot) = requests.take() {
            assert!(requests.submit(slot, &write, 4096, 0));
        }
        requests.publish();
        let (place, written) = wait(&mut control);
        let mut response = [0];
        at.part(64 * place as usize, 64).read(32, &mut response);
        assert_eq!(written, 1);
        assert!(matches!(response[0], 0 | 10 | 11), "response {response:?}");
        free.push(place);
        answered += 1;
        while let Some(done) = requests.reap() {
            assert!(matches!(done.response, 0 | ABORTED | RESET), "{done:?}");
            requests.release(done.slot);
        }
    }
    bystander.expect_progress(LIMIT).unwrap();
    bystander.finish().unwrap();
}

#[test]
fn control_chain_without_room_or_cut_short_is_refused_alone() {
    let rig = Rig::new(1);
    let socket = rig.serve_controller(Duration::ZERO);
    let (tmf, query) = (function(0, 1), [1, 0, 0, 0, 1, 0, 0x40, 0]);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let mut queue = front_end
        .start_queue(CONTROL, &QueueOptions::default())
        .unwrap();
    let at = front_end.allocate(4096, 4096).unwrap();
    // VIRTIO_SCSI_S_FAILURE is 9: in the first byte for a function, in the fifth for a query.
    for (request, room, written) in [
        (&tmf[..], 0, &[][..]),
        (&tmf[..23], 1, &[9]),
        (&tmf[..3], 1, &[9]),
        (&[][..], 1, &[9]),
        (&query[..], 5, &[9, 0, 0, 0, 9]),
        (&[&query[..], &[0; 12]].concat()[..], 4, &[9, 0, 0, 0]),
    ] {
        at.write(0, request);
        at.write(64, &[0xee; 5]);
        let readable: Vec<_> = (!request.is_empty())
            .then(|| at.part(0, request.len()).element())
            .into_iter()
            .collect();
        let writable: Vec<_> = (room > 0)
            .then(|| at.part(64, room).element())
            .into_iter()
            .collect();
        assert!(queue.add(&readable, &writable, 0));
        queue.publish();
        queue.wait(LIMIT).unwrap();
        let used = queue.pop_used().unwrap();
        assert_eq!(used.written as usize, written.len());
        let mut got = vec![0; written.len()];
        at.read(64, &mut got);
        assert_eq!(got, written);
    }
    assert_eq!(ask(&mut queue, &at, &tmf, 1), [0]);
}

/// Adds a buffer of `room` bytes to the event queue. Returns its written part.
fn event(queue: &mut Queue, at: &Area, room: usize) -> Vec<u8> {
    at.write(0, &[0xee; 64]);
    assert!(queue.add(&[], &[at.part(0, room).element()], 0));
    queue.publish();
    let (_, written) = wait(queue);
    let mut bytes = vec![0; 64];
    at.read(0, &mut bytes);
    assert!(bytes[written as usize..].iter().all(|byte| *byte == 0xee));
    bytes.truncate(written as usize);
    bytes
}

#[test]
fn events_without_buffers_are_reported_as_missed() {
    const MISSED: u8 = 0x80;
    let rig = Rig::new(1);
    let (socket, _, controller) = rig.serve_watched_controller(Duration::ZERO);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let options = QueueOptions::default();
    let mut queue = front_end.start_queue(EVENTS, &options).unwrap();
    let at = front_end.allocate(4096, 4096).unwrap();
    // The driver provides no buffers for a long time.
    for lun in 0..5000 {
        controller.post(Event::Added, 0, lun);
    }
    // All events have arrived: later ones do not take a free place.
    let worker = rig.pool.workers()[0].clone();
    worker.call(|_| ()).unwrap();
    let mut got = 0;
    loop {
        let bytes = event(&mut queue, &at, 16);
        // VIRTIO_SCSI_T_TRANSPORT_RESET, reason VIRTIO_SCSI_EVT_RESET_RESCAN, in the order of the events.
        assert_eq!((bytes[0], bytes[12]), (1, 1));
        assert_eq!(bytes[4..8], [1, 0, 0, got]);
        got += 1;
        if bytes[3] == MISSED {
            break;
        }
        assert_eq!(bytes[3], 0);
        assert!(got < 200, "missed events are not reported");
    }
    // Later events are not missed.
    controller.post(Event::Removed, 0, 7);
    let bytes = event(&mut queue, &at, 64);
    assert_eq!((bytes[0], bytes[3], bytes[12]), (1, 0, 2));

    // Short buffers: as much as fits of VIRTIO_SCSI_T_NO_EVENT with VIRTIO_SCSI_T_EVENTS_MISSED.
    controller.post(Event::Removed, 0, 8);
    for room in [1, 3, 4, 15] {
        let bytes = event(&mut queue, &at, room);
        let whole = [0, 0, 0, MISSED, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(bytes, whole[..room]);
    }
    let bytes = event(&mut queue, &at, 16);
    assert_eq!((bytes[0], bytes[3], bytes[7], bytes[12]), (1, 0, 8, 2));
}

/// 5.6.3, 5.6.6.3: VIRTIO_SCSI_F_HOTPLUG for added and removed units, VIRTIO_SCSI_F_CHANGE for changed ones.
#[test]
fn driver_is_told_of_no_event_that_it_has_not_negotiated() {
    const HOTPLUG: u64 = 1 << 1;
    const CHANGE: u64 = 1 << 2;
    let rig = Rig::new(1);
    let (socket, _, controller) = rig.serve_watched_controller(Duration::ZERO);
    let (code, qualifier) = (0x2a, 9);
    let events = [
        Event::Added,
        Event::Changed { code, qualifier },
        Event::Removed,
    ];
    // VIRTIO_SCSI_T_TRANSPORT_RESET and _PARAM_CHANGE, with the units' numbers.
    let all = [(1, 0), (3, 1), (1, 2)];
    for (refused, expected_events) in [
        (0, &all[..]),
        (HOTPLUG, &all[1..2]),
        (CHANGE, &[all[0], all[2]]),
        (HOTPLUG | CHANGE, &[]),
    ] {
        let mut options = Options::default();
        options.device_features &= !refused;
        let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
        let mut queue = front_end
            .start_queue(EVENTS, &QueueOptions::default())
            .unwrap();
        let at = front_end.allocate(4096, 4096).unwrap();
        for (lun, event) in (0..).zip(events) {
            controller.post(event, 0, lun);
        }
        for expected in expected_events {
            let bytes = event(&mut queue, &at, 16);
            assert_eq!((bytes[0], bytes[7]), *expected, "without {refused}");
            assert_eq!(bytes[3], 0, "nothing was missed");
        }
        assert!(queue.add(&[], &[at.element()], 0));
        queue.publish();
        if expected_events.is_empty() {
            // The driver has not missed an event while its queue was stopped, either.
            let base = front_end.stop_queue(EVENTS).unwrap();
            controller.post(Event::Added, 0, 1);
            front_end.begin_queue(&queue, base).unwrap();
        }
        // A driver that has left does not continue, so the next one has missed nothing.
        front_end.stop_queue(EVENTS).unwrap();
        assert!(queue.pop_used().is_none(), "without {refused}");
        drop(front_end);
        while rig.is_connected("c") {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A guest rescans after its controller was disconnected, if there was an event. A new guest has missed nothing.
#[test]
fn events_while_nobody_listened_are_said_to_be_missed() {
    let missed = [0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let rig = Rig::new(1);
    let (socket, _, controller) = rig.serve_watched_controller(Duration::ZERO);
    let options = QueueOptions::default();
    // There is no driver that could miss it.
    controller.post(Event::Added, 0, 1);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let mut queue = front_end.start_queue(EVENTS, &options).unwrap();
    let at = front_end.allocate(4096, 4096).unwrap();
    controller.post(Event::Added, 0, 2);
    let bytes = event(&mut queue, &at, 16);
    assert_eq!((bytes[0], bytes[3], bytes[7]), (1, 0, 2));

    // Stopped and started again: an event while stopped, and one that waited for a buffer.
    for waits in [false, true] {
        if waits {
            controller.post(Event::Added, 0, 3);
            rig.pool.workers()[0].clone().call(|_| ()).unwrap();
        }
        let base = front_end.stop_queue(EVENTS).unwrap();
        if !waits {
            controller.post(Event::Added, 0, 4);
        }
        front_end.begin_queue(&queue, base).unwrap();
        assert_eq!(event(&mut queue, &at, 16), missed);
    }

    // The connection ends, and the guest continues on another.
    drop(front_end);
    let free = || rig.server.status().iter().all(|export| !export.connected);
    while !free() {
        std::thread::sleep(Duration::from_millis(1));
    }
    controller.post(Event::Removed, 0, 2);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let mut queue = front_end.start_queue(EVENTS, &options).unwrap();
    let at = front_end.allocate(4096, 4096).unwrap();
    assert_eq!(event(&mut queue, &at, 16), missed);
    // The guest has stopped the queue and disconnected: the next one has missed nothing.
    front_end.stop_queue(EVENTS).unwrap();
    drop(front_end);
    while !free() {
        std::thread::sleep(Duration::from_millis(1));
    }
    controller.post(Event::Added, 0, 5);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let mut queue = front_end.start_queue(EVENTS, &options).unwrap();
    let at = front_end.allocate(4096, 4096).unwrap();
    controller.post(Event::Added, 0, 6);
    let bytes = event(&mut queue, &at, 16);
    assert_eq!((bytes[0], bytes[3], bytes[7]), (1, 0, 6));
}
