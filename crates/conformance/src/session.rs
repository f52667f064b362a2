//! Sessions: negotiation, resets, stop and start of rings, reconnects.

use std::os::fd::AsFd;
use std::time::Duration;

use vhost_frontend::{Error, Layout, Options, QueueOptions, feature, protocol_feature, request};

use crate::io::{BLOCK, Io, LIMIT};
use crate::{Devices, Target, Test, Verdict, equal, failed, needs};

const fn test(title: &'static str, clause: &'static str, run: fn(&Target) -> Verdict) -> Test {
    Test::new("session", Devices::Any, title, clause, run)
}

pub(crate) const TESTS: &[Test] = &[
    test(
        "VERSION_1 is offered",
        "virtio 1.3, 6.2: VIRTIO_F_VERSION_1",
        |target| {
            let front_end = target.connect(&Options::default())?;
            let offered = front_end.offered() & feature::VERSION_1 != 0;
            equal("VIRTIO_F_VERSION_1 is offered", offered, true)
        },
    ),
    test(
        "offered features are the same in each session",
        "vhost-user: VHOST_USER_GET_FEATURES",
        |target| {
            let first = target.connect(&Options::default())?.offered();
            let second = target.connect(&Options::default())?.offered();
            equal("features of the second session", second, first)
        },
    ),
    test(
        "a driver may accept few features",
        "virtio 1.3, 2.2.2",
        |target| {
            let options = Options {
                device_features: 0,
                event_idx: false,
                ..Options::default()
            };
            serves_with(target, &options)
        },
    ),
    test(
        "all offered features are accepted",
        "virtio 1.3, 2.2.2",
        |target| {
            let front_end = target.connect(&Options::default())?;
            // Without LOG_ALL, which needs a log.
            let features = front_end.offered() & !feature::LOG_ALL;
            front_end.acknowledged(request::SET_FEATURES, &features.to_ne_bytes(), &[])?;
            Ok(())
        },
    ),
    test(
        "a success is acknowledged with 0",
        "vhost-user: VHOST_USER_PROTOCOL_F_REPLY_ACK",
        |target| {
            let front_end = target.connect(&Options::default())?;
            let offered = front_end.has_protocol(protocol_feature::REPLY_ACK);
            needs(offered, "VHOST_USER_PROTOCOL_F_REPLY_ACK")?;
            front_end.send_memory()?;
            Ok(())
        },
    ),
    test(
        "messages without an acknowledgement are executed",
        "vhost-user: VHOST_USER_PROTOCOL_F_REPLY_ACK",
        |target| {
            let defaults = Options::default();
            let protocol_features = defaults.protocol_features & !protocol_feature::REPLY_ACK;
            let options = Options {
                protocol_features,
                ..defaults
            };
            serves_with(target, &options)
        },
    ),
    test(
        "rings start enabled without protocol features",
        "vhost-user: Ring states",
        enabled_at_start,
    ),
    test(
        "the number of queues is at least 1",
        "vhost-user: VHOST_USER_GET_QUEUE_NUM",
        |target| {
            let front_end = target.connect(&Options::default())?;
            let offered = front_end.has_protocol(protocol_feature::MQ);
            needs(offered, "VHOST_USER_PROTOCOL_F_MQ")?;
            let count = front_end.queue_count();
            equal(
                "at least one request queue",
                count > target.first_queue(),
                true,
            )
        },
    ),
    test(
        "repeated messages change nothing",
        "vhost-user: Communication",
        repeated_messages,
    ),
    test(
        "RESET_OWNER does not end the session",
        "vhost-user: VHOST_USER_RESET_OWNER",
        |target| {
            let mut front_end = target.connect(&Options::default())?;
            front_end.acknowledged(request::RESET_OWNER, &[], &[])?;
            let features = front_end.features().to_ne_bytes();
            front_end.acknowledged(request::SET_FEATURES, &features, &[])?;
            front_end.send_memory()?;
            start(target, &mut front_end)?.ping()
        },
    ),
    test(
        "RESET_DEVICE ends rings, and they can start again",
        "vhost-user: VHOST_USER_RESET_DEVICE",
        |target| {
            let mut front_end = target.connect(&Options::default())?;
            let offered = front_end.has_protocol(protocol_feature::RESET_DEVICE);
            needs(offered, "VHOST_USER_PROTOCOL_F_RESET_DEVICE")?;
            for _ in 0..3 {
                start(target, &mut front_end)?.ping()?;
                front_end.reset_device()?;
                let features = front_end.features().to_ne_bytes();
                front_end.acknowledged(request::SET_FEATURES, &features, &[])?;
            }
            start(target, &mut front_end)?.ping()
        },
    ),
    test(
        "a split ring continues at its base",
        "vhost-user: VHOST_USER_GET_VRING_BASE",
        |target| continues(target, false),
    ),
    test(
        "a packed ring continues at its base",
        "vhost-user: VHOST_USER_GET_VRING_BASE",
        |target| continues(target, true),
    ),
    test(
        "a stopped ring accepts another layout",
        "vhost-user: Ring states",
        |target| {
            let mut front_end = target.connect(&Options::default())?;
            for size in [128, 16, 256] {
                let options = QueueOptions {
                    size,
                    ..QueueOptions::default()
                };
                let io = Io::start(target, &mut front_end, 0, &options, Layout::Separate);
                io?.ping()?;
                front_end.stop_queue(target.first_queue())?;
            }
            Ok(())
        },
    ),
    test(
        "a disabled ring is processed when it is enabled",
        "vhost-user: VHOST_USER_SET_VRING_ENABLE",
        disabled_ring,
    ),
    test(
        "a request before the start of its ring is served",
        "vhost-user: Ring states",
        |target| {
            let mut front_end = target.connect(&Options::default())?;
            let mut io = start(target, &mut front_end)?;
            let index = target.first_queue();
            let base = front_end.stop_queue(index)?;
            io.submit_ping()?;
            front_end.begin_queue(io.queue(), base)?;
            io.queue().kick();
            io.reap_ping()
        },
    ),
    test(
        "a ring without a kick descriptor is polled",
        "vhost-user: VHOST_USER_SET_VRING_KICK",
        |target| {
            let mut front_end = target.connect(&Options::default())?;
            let mut io = start(target, &mut front_end)?;
            let index = target.first_queue();
            let base = front_end.stop_queue(index)?;
            front_end.describe_queue(io.queue(), base)?;
            let call = io.queue().call().try_clone()?;
            front_end.set_call(index, Some(call.as_fd()))?;
            front_end.set_kick(index, None)?;
            front_end.enable(index, true)?;
            for _ in 0..3 {
                io.submit_ping()?;
                io.reap_ping()?;
            }
            Ok(())
        },
    ),
    test(
        "the interrupt descriptor may change",
        "vhost-user: VHOST_USER_SET_VRING_CALL",
        |target| {
            let mut front_end = target.connect(&Options::default())?;
            let mut io = start(target, &mut front_end)?;
            for _ in 0..5 {
                io.queue().replace_call()?;
                let call = io.queue().call().try_clone()?;
                front_end.set_call(target.first_queue(), Some(call.as_fd()))?;
                io.ping()?;
            }
            Ok(())
        },
    ),
    test(
        "a driver that polls needs no interrupt",
        "virtio 1.3, 2.7.7",
        |target| {
            let mut front_end = target.connect(&Options::default())?;
            let options = QueueOptions {
                polled: true,
                ..QueueOptions::default()
            };
            let mut io = Io::start(target, &mut front_end, 0, &options, Layout::Separate)?;
            (0..100).try_for_each(|_| io.ping())
        },
    ),
    test(
        "every queue serves",
        "vhost-user: Multiple queue support",
        |target| {
            let mut front_end = target.connect(&Options::default())?;
            let queues = front_end.queue_count().saturating_sub(target.first_queue());
            let mut all = Vec::new();
            for nth in 0..queues.clamp(1, 16) {
                let options = QueueOptions::default();
                all.push(Io::start(
                    target,
                    &mut front_end,
                    nth,
                    &options,
                    Layout::Separate,
                )?);
            }
            for round in 0..3 {
                for io in &mut all {
                    io.read(round * BLOCK as u64, &mut [0; BLOCK])?;
                }
            }
            Ok(())
        },
    ),
    test(
        "a front end may reconnect often",
        "vhost-user: Communication",
        |target| {
            for round in 0..30 {
                let mut front_end = target.connect(&Options::default())?;
                start(target, &mut front_end)?.ping()?;
                if round % 2 == 0 {
                    front_end.stop_queue(target.first_queue())?;
                }
            }
            Ok(())
        },
    ),
    test(
        "a front end may leave amid its requests",
        "vhost-user: Communication",
        |target| {
            for _ in 0..5 {
                let mut front_end = target.connect(&Options::default())?;
                let mut io = start(target, &mut front_end)?;
                io.submit_ping()?;
            }
            Ok(())
        },
    ),
];

/// Starts the first request queue.
fn start(target: &Target, front_end: &mut vhost_frontend::FrontEnd) -> Verdict<Io> {
    let options = QueueOptions::default();
    Io::start(target, front_end, 0, &options, Layout::Separate)
}

/// Reads a block in a session with these options.
fn serves_with(target: &Target, options: &Options) -> Verdict {
    let mut front_end = target.connect(options)?;
    start(target, &mut front_end)?.read(0, &mut [0; BLOCK])
}

fn enabled_at_start(target: &Target) -> Verdict {
    let mut front_end = target.connect(&Options::default())?;
    let features = front_end.features() & !feature::PROTOCOL_FEATURES;
    front_end.acknowledged(request::SET_FEATURES, &features.to_ne_bytes(), &[])?;
    let mut queue = front_end.place_queue(target.first_queue(), &QueueOptions::default())?;
    front_end.describe_queue(&queue, 0)?;
    let index = queue.index();
    front_end.set_call(index, Some(queue.call().as_fd()))?;
    front_end.set_kick(index, Some(queue.kick_fd().as_fd()))?;
    // A chain without data: a flush, or a request to a target that need not exist.
    let at = front_end.allocate(BLOCK, BLOCK as u64)?;
    let (request, response) = match target.device {
        crate::Device::Blk => (16, 1),
        crate::Device::Scsi(..) => (51, 108),
    };
    at.write(0, &[0; 51]);
    at.write(0, &[if request == 16 { 4 } else { 1 }]);
    let chain = [at.part(0, request).element()];
    if !queue.add(&chain, &[at.part(512, response).element()], 0) {
        return failed("the test's chain does not fit in the ring");
    }
    queue.publish();
    Ok(queue.wait(LIMIT)?)
}

/// Sends each message of a start twice, in the usual order.
fn repeated_messages(target: &Target) -> Verdict {
    let mut front_end = target.connect(&Options::default())?;
    let mut io = start(target, &mut front_end)?;
    io.ping()?;
    let base = front_end.stop_queue(target.first_queue())?;
    for _ in 0..2 {
        front_end.channel().send(request::SET_OWNER, 0, &[], &[])?;
        let features = front_end.features().to_ne_bytes();
        front_end.acknowledged(request::SET_FEATURES, &features, &[])?;
        front_end.send_memory()?;
        front_end.begin_queue(io.queue(), base)?;
    }
    io.ping()
}

fn continues(target: &Target, packed: bool) -> Verdict {
    let mut front_end = target.connect_ring(packed, &Options::default())?;
    let mut io = start(target, &mut front_end)?;
    let index = target.first_queue();
    // Enough for several rounds in a ring of 128.
    for round in 0..100u32 {
        let begin = io.chains();
        for _ in 0..1 + round % 3 {
            io.read(0, &mut [0; BLOCK])?;
        }
        let base = front_end.stop_queue(index)?;
        if !packed {
            let expected = begin + 1 + round % 3;
            equal("base of the ring", base, expected & 0xffff)?;
        }
        front_end.begin_queue(io.queue(), base)?;
    }
    io.ping()
}

/// A request is completed at the latest when its ring is enabled.
fn disabled_ring(target: &Target) -> Verdict {
    let mut front_end = target.connect(&Options::default())?;
    let mut io = start(target, &mut front_end)?;
    let index = target.first_queue();
    front_end.enable(index, false)?;
    io.submit_ping()?;
    match io.queue().wait(Duration::from_millis(50)) {
        Err(Error::Timeout(_)) => {}
        Err(other) => return Err(other.into()),
        Ok(()) => return failed("a disabled ring was processed"),
    }
    front_end.enable(index, true)?;
    io.reap_ping()
}
