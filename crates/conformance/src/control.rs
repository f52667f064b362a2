//! Control and event queues of virtio-scsi (virtio 1.3, 5.6.6.2 and 5.6.6.3).

use std::time::Duration;

use vhost_frontend::{Area, Error, FrontEnd, Options, Queue, QueueOptions};

use crate::io::LIMIT;
use crate::scsi::{ABSENT_LUN, ABSENT_TARGET};
use crate::{Device, Devices, Target, Test, Verdict, equal, failed};

const CONTROL: u16 = 0;
const EVENTS: u16 = 1;
/// VIRTIO_SCSI_S_BAD_TARGET, _FUNCTION_SUCCEEDED, _FUNCTION_REJECTED, _INCORRECT_LUN.
const BAD_TARGET: u8 = 3;
const SUCCEEDED: u8 = 10;
const REJECTED: u8 = 11;
const INCORRECT_LUN: u8 = 12;
/// Bytes of an event, and VIRTIO_SCSI_T_EVENTS_MISSED with VIRTIO_SCSI_T_NO_EVENT.
const EVENT_SIZE: usize = 16;
const EVENTS_MISSED: u32 = 0x8000_0000;

const fn test(title: &'static str, clause: &'static str, run: fn(&Target) -> Verdict) -> Test {
    Test::new("control", Devices::Scsi, title, clause, run)
}

const FUNCTIONS: &str = "virtio 1.3, 5.6.6.2: VIRTIO_SCSI_T_TMF";

pub(crate) const TESTS: &[Test] = &[
    test(
        "each task management function is answered",
        FUNCTIONS,
        |target| {
            let mut control = Control::open(target)?;
            for subtype in 0..8 {
                let response = control.ask(&control.function(subtype), 1)?[0];
                let is_defined = matches!(response, 0 | SUCCEEDED | REJECTED);
                let object = format!("response {response} of function {subtype} is defined");
                equal(&object, is_defined, true)?;
                if target.is_strict {
                    // CLEAR ACA is rejected.
                    let expected = if subtype == 2 { REJECTED } else { 0 };
                    equal(
                        &format!("response of function {subtype}"),
                        response,
                        expected,
                    )?;
                }
            }
            Ok(())
        },
    ),
    test(
        "unknown functions and types are rejected",
        FUNCTIONS,
        |target| {
            let mut control = Control::open(target)?;
            let unknown = control.function(8);
            equal(
                "response of function 8",
                control.ask(&unknown, 1)?,
                vec![REJECTED],
            )?;
            if target.is_strict {
                let response = control.ask(&[0xff; 24], 1)?;
                equal("response of type ffffffffh", response, vec![REJECTED])?;
                equal(
                    "response of type 3",
                    control.ask(&[3, 0, 0, 0], 64)?,
                    vec![REJECTED],
                )?;
            }
            Ok(())
        },
    ),
    test(
        "a function of an absent target or LUN is refused",
        FUNCTIONS,
        |target| {
            let mut control = Control::open(target)?;
            // LOGICAL UNIT RESET, ABORT TASK.
            let mut function = control.function(5);
            function[9] = ABSENT_TARGET;
            equal(
                "response of the target",
                control.ask(&function, 1)?,
                vec![BAD_TARGET],
            )?;
            let mut function = control.function(0);
            let [high, low] = ABSENT_LUN.to_be_bytes();
            function[10..12].copy_from_slice(&[0x40 | high, low]);
            let response = control.ask(&function, 1)?;
            equal("response of the LUN", response, vec![INCORRECT_LUN])
        },
    ),
    test(
        "a LUN of an unknown format is refused",
        FUNCTIONS,
        |target| {
            let mut control = Control::open(target)?;
            let mut function = control.function(5);
            function[8] = 9;
            let response = control.ask(&function, 1)?[0];
            let is_refused = matches!(response, BAD_TARGET | INCORRECT_LUN | REJECTED);
            equal(&format!("response {response} refuses"), is_refused, true)
        },
    ),
    test(
        "asynchronous notifications are answered",
        "virtio 1.3, 5.6.6.2: VIRTIO_SCSI_T_AN_QUERY, VIRTIO_SCSI_T_AN_SUBSCRIBE",
        |target| {
            let mut control = Control::open(target)?;
            for kind in [1, 2] {
                let mut query = control.function(0)[..20].to_vec();
                query[..8].fill(0);
                query[0] = kind;
                query[16] = 0xff;
                let length = control.ask(&query, 5)?.len();
                equal(&format!("bytes of the response to type {kind}"), length, 5)?;
            }
            Ok(())
        },
    ),
    test(
        "an event queue keeps its buffers until an event",
        "virtio 1.3, 5.6.6.3; vhost-user: VHOST_USER_GET_VRING_BASE",
        event_buffers,
    ),
];

/// Checks that buffers remain available without an event, also when the queue is stopped and started again. One may report that the driver
/// has missed events of an earlier front end.
fn event_buffers(target: &Target) -> Verdict {
    let mut front_end = target.connect(&Options::default())?;
    let mut queue = front_end.start_queue(EVENTS, &QueueOptions::default())?;
    let at = front_end.allocate(4096, 4096)?;
    let buffer = |nth: u64| at.part(64 * nth as usize, EVENT_SIZE);
    for nth in 0..4 {
        buffer(nth).write(0, &[0xee; EVENT_SIZE]);
        queue.add(&[], &[buffer(nth).element()], nth);
    }
    queue.publish();
    let mut returned = 0;
    for _ in 0..2 {
        match queue.wait(Duration::from_millis(15)) {
            Ok(()) | Err(Error::Timeout(_)) => {}
            Err(other) => return Err(other.into()),
        }
        // An event may arrive until the queue is stopped.
        let base = front_end.stop_queue(EVENTS)?;
        while let Some(used) = queue.pop_used() {
            returned += 1;
            equal("used length of an event", used.written as usize, EVENT_SIZE)?;
            let mut event = [0; 4];
            buffer(used.token).read(0, &mut event);
            let event = u32::from_le_bytes(event);
            equal("event without a change", event, EVENTS_MISSED)?;
        }
        equal("at most one event", returned <= 1, true)?;
        equal("available index of the stopped queue", base, returned)?;
        front_end.begin_queue(&queue, base)?;
    }
    Ok(())
}

/// A control queue.
struct Control {
    // Keeps the session open.
    _front_end: FrontEnd,
    queue: Queue,
    at: Area,
    lun: [u8; 4],
}

impl Control {
    fn open(target: &Target) -> Verdict<Control> {
        let mut front_end = target.connect(&Options::default())?;
        let queue = front_end.start_queue(CONTROL, &QueueOptions::default())?;
        let at = front_end.allocate(4096, 4096)?;
        let lun = match target.device {
            Device::Blk => return failed("the device is no controller"),
            Device::Scsi(number, lun) => {
                let [high, low] = lun.to_be_bytes();
                [1, number, 0x40 | high, low]
            }
        };
        Ok(Control {
            _front_end: front_end,
            queue,
            at,
            lun,
        })
    }

    /// Builds a VIRTIO_SCSI_T_TMF for the unit.
    fn function(&self, subtype: u8) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[4] = subtype;
        bytes[8..12].copy_from_slice(&self.lun);
        bytes[16] = 1;
        bytes
    }

    /// Sends a request. Returns the written part of `room` bytes.
    fn ask(&mut self, request: &[u8], room: usize) -> Verdict<Vec<u8>> {
        self.at.write(0, request);
        self.at.write(64, &[0xee; 64]);
        let (request, response) = (self.at.part(0, request.len()), self.at.part(64, room));
        if !self
            .queue
            .add(&[request.element()], &[response.element()], 0)
        {
            return failed("the test's chain does not fit in the ring");
        }
        self.queue.publish();
        self.queue.wait(LIMIT)?;
        let Some(used) = self.queue.pop_used() else {
            return failed("the interrupt has no completed request");
        };
        let mut bytes = vec![0; room];
        response.read(0, &mut bytes);
        let left = bytes.split_off(room.min(used.written as usize));
        let is_kept = left.iter().all(|byte| *byte == 0xee);
        equal("unchanged bytes behind the used length", is_kept, true)?;
        match bytes.is_empty() {
            true => failed("the response has no bytes"),
            false => Ok(bytes),
        }
    }
}
