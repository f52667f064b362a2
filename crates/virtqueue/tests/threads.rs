//! Driver and device on two threads that sleep whenever they may: no notification, chain or byte is lost.
//!
//! Channels replace the eventfds. A lost notification causes an endless wait, which a time-out reports.

mod common;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use common::{DATA, Pair};
use guest_memory::{GuestView, MemoryTable};
use virtqueue::driver::DriverQueue;
use virtqueue::{Chain, DeviceQueue};

const CHAINS: u64 = 3000;

fn wait_for_notification(notified: &Receiver<()>, side: &str) {
    let waited = notified.recv_timeout(Duration::from_secs(60));
    waited.unwrap_or_else(|e| panic!("{side} waits for a lost notification: {e}"));
    while notified.try_recv().is_ok() {}
}

/// Time of the check of the driver's event suppression.
#[derive(Clone, Copy, Debug)]
enum CheckTime {
    Immediate,
    /// When required, and before sleeping.
    Deferred,
}

/// Answers each request with its number plus one, until all are done.
fn device(
    mut queue: DeviceQueue,
    table: MemoryTable,
    kicks: &Receiver<()>,
    call: &Sender<()>,
    check_time: CheckTime,
) {
    let view = GuestView::new(Arc::new(table));
    let mut chain = Chain::default();
    let mut answered = 0;
    while answered < CHAINS {
        queue.disable_notifications();
        let mut batch = 0;
        while batch < 7 && queue.pop(&view, &mut chain).unwrap() {
            assert_eq!((chain.readable, chain.writable), (8, 8));
            let mut number = [0; 8];
            chain.buffer.read_whole(0, &mut number);
            let answer = u64::from_le_bytes(number) + 1;
            chain.buffer.write_whole(8, &answer.to_le_bytes());
            queue.push(chain.id, chain.descriptors, 8);
            batch += 1;
        }
        answered += batch;
        let wanted = match check_time {
            CheckTime::Immediate => queue.publish(),
            CheckTime::Deferred => {
                let wanted =
                    (batch == 0 || queue.must_check_suppression()) && queue.check_suppression();
                queue.publish_unchecked();
                wanted
            }
        };
        if wanted {
            // A receiver that is gone has all answers.
            call.send(()).ok();
        }
        if batch == 0 && !queue.enable_notifications() {
            wait_for_notification(kicks, "device");
        }
    }
    if queue.check_suppression() {
        call.send(()).ok();
    }
}

fn driver(
    mut queue: DriverQueue,
    memory: &guest_memory::Mapping,
    calls: &Receiver<()>,
    kick: &Sender<()>,
) {
    let (mut added, mut answered) = (0, 0);
    while answered < CHAINS {
        queue.disable_interrupts();
        let mut progress = false;
        while let Some(used) = queue.pop_used() {
            let mut answer = [0; 8];
            memory.read((DATA + used.token % 64 * 16 + 8) as usize, &mut answer);
            assert_eq!(u64::from_le_bytes(answer), used.token + 1);
            assert_eq!(used.written, 8);
            (answered, progress) = (answered + 1, true);
        }
        let chains = 1 + added % 5;
        for _ in 0..chains {
            // At most as many in flight as there are places for their data.
            if added == CHAINS || added - answered >= 32 {
                break;
            }
            let at = DATA + added % 64 * 16;
            let chain = ([(at, 8)], [(at + 8, 8)]);
            memory.write(at as usize, &added.to_le_bytes());
            let id = if added % 3 == 0 {
                queue.add_indirect(&chain.0, &chain.1, added)
            } else {
                queue.add(&chain.0, &chain.1, added)
            };
            if id.is_none() {
                break;
            }
            (added, progress) = (added + 1, true);
        }
        if queue.publish() {
            kick.send(()).ok();
        }
        if !progress && !queue.enable_interrupts() {
            wait_for_notification(calls, "driver");
        }
    }
}

#[test]
fn no_notification_is_lost() {
    for (packed, check_time) in [
        (false, CheckTime::Immediate),
        (true, CheckTime::Immediate),
        (false, CheckTime::Deferred),
        (true, CheckTime::Deferred),
    ] {
        for event_idx in [false, true] {
            let Pair {
                memory,
                driver: driver_queue,
                device: device_queue,
                ..
            } = Pair::new(16, packed, event_idx, 0);
            let (kick, kicks) = channel();
            let (call, calls) = channel();
            let table = memory.table.clone();
            std::thread::scope(|scope| {
                // The queue may contain chains before the device starts: it checks before sleeping.
                scope.spawn(move || device(device_queue, table, &kicks, &call, check_time));
                driver(driver_queue, &memory.mapping, &calls, &kick);
            });
        }
    }
}
