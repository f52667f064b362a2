//! Unusual but harmless messages: executed, or refused alone. Bytes are those of the vhost-user specification.

mod support;

use std::os::fd::AsFd;
use std::time::Duration;

use reactor::PollLimit;
use rustix::event::{EventfdFlags, eventfd};
use support::{Rig, Watched, connect, eventually, ram, start_blk};
use vhost_frontend::{BlkQueue, Channel, Layout, QueueOptions, kind, status};

const SHORT: Duration = Duration::from_secs(10);

/// VHOST_USER_GET_INFLIGHT_FD for one queue of 128: size and offset of the region, then queues and entries.
const INFLIGHT: [u8; 24] = [
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 128, 0, 0, 0, 0, 0,
];

fn rig() -> (Rig, std::path::PathBuf) {
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_ram("d", 1);
    (rig, socket)
}

/// QEMU, if its back end restarts while the firmware's driver starts the device, uses a connection without negotiation. All messages that
/// depend on a protocol feature must then be answered.
#[test]
fn messages_need_no_set_protocol_features_before_them() {
    let (_rig, socket) = rig();
    let answers = |request: u32, payload: &[u8]| {
        let channel = Channel::connect(&socket).unwrap();
        let answer = channel.call(request, payload, &[]);
        answer.unwrap_or_else(|error| panic!("request {request}: {error}"))
    };
    // GET_QUEUE_NUM, GET_MAX_MEM_SLOTS
    assert_eq!(answers(17, &[]), 1u64.to_ne_bytes());
    assert_eq!(answers(36, &[]), 512u64.to_ne_bytes());
    // GET_CONFIG: capacity in sectors at 0
    let config = answers(
        24,
        &[0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    );
    assert_eq!(config[12..], (64u64 << 11).to_ne_bytes());
    let region = answers(31, &INFLIGHT);
    assert_eq!(region[16..], INFLIGHT[16..]);
    assert_ne!(region[..8], [0; 8]);
    // RESET_DEVICE (a protocol feature) with NEED_REPLY.
    let channel = Channel::connect(&socket).unwrap();
    channel.acknowledged(34, &[], &[]).unwrap();
    let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    channel.acknowledged(21, &[], &[one.as_fd()]).unwrap();
    // SET_VRING_ENABLE, before SET_FEATURES has accepted the protocol features; any number but 0 enables.
    channel
        .acknowledged(18, &[0, 0, 0, 0, 2, 0, 0, 0], &[])
        .unwrap();
    // SET_PROTOCOL_FEATURES without features changes nothing.
    channel.send(16, 0, &[0; 8], &[]).unwrap();
    channel.acknowledged(34, &[], &[]).unwrap();
}

#[test]
fn refused_message_is_answered_and_the_session_goes_on() {
    let (rig, socket) = rig();
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    let ring = |index: u8, number: u8| [index, 0, 0, 0, number, 0, 0, 0].to_vec();
    for (request, payload) in [
        // SET_FEATURES, SET_PROTOCOL_FEATURES: never offered
        (2, vec![0xff; 8]),
        (16, vec![0xff; 8]),
        // SET_MEM_TABLE with a region and without its descriptor
        (5, [vec![1, 0, 0, 0, 0, 0, 0, 0], vec![1; 32]].concat()),
        // SET_LOG_BASE, SET_LOG_FD without a descriptor
        (6, vec![0; 16]),
        (7, vec![]),
        // SET_VRING_NUM of 0, SET_VRING_NUM and SET_VRING_BASE of a queue that does not exist
        (8, ring(0, 0)),
        (8, ring(9, 128)),
        (10, ring(9, 0)),
        // SET_VRING_ADDR that is not aligned
        (9, vec![1; 40]),
        // SET_VRING_KICK and SET_VRING_CALL without the announced descriptor
        (12, vec![0; 8]),
        (13, vec![0; 8]),
        (18, ring(9, 1)),
        (18, vec![0; 4]),
        // NET_SET_MTU, IOTLB_MSG, SET_VRING_ENDIAN, CREATE_CRYPTO_SESSION
        (20, vec![0; 8]),
        (22, vec![0; 32]),
        (23, ring(0, 1)),
        (26, vec![0; 100]),
        // SET_CONFIG of capacity
        (
            25,
            [vec![0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0], vec![1; 8]].concat(),
        ),
        // SET_INFLIGHT_FD and ADD_MEM_REG without a descriptor, REM_MEM_REG of a missing region
        (32, INFLIGHT.to_vec()),
        (37, vec![0; 40]),
        (38, vec![1; 40]),
        // a request of a later version
        (99, vec![7; 100]),
    ] {
        let sent = front_end.acknowledged(request, &payload, &[]);
        assert!(
            matches!(sent, Err(vhost_frontend::Error::Refused(_))),
            "request {request}: {sent:?}"
        );
        assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
    }
    // GET_CONFIG beyond the end: no bytes. GET_INFLIGHT_FD for 9 queues: an empty region.
    let config = [
        [200, 0, 0, 0, 100, 0, 0, 0, 0, 0, 0, 0].to_vec(),
        vec![0; 100],
    ]
    .concat();
    let answer = front_end.channel().call(24, &config, &[]).unwrap();
    assert_eq!(answer, [200, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let mut nine = INFLIGHT;
    nine[16] = 9;
    let answer = front_end.channel().call(31, &nine, &[]).unwrap();
    assert_eq!(answer, nine);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
    assert!(rig.is_connected("d"));
}

/// A virtio-scsi controller leaves its configuration space to the front end.
#[test]
fn device_without_a_configuration_space_refuses_to_read_it() {
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_controller(Duration::ZERO);
    let front_end = connect(&socket);
    let config = [&[0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0][..], &[0; 8]].concat();
    let answer = front_end.channel().call(24, &config, &[]).unwrap();
    assert_eq!(answer, [0; 12]);
    let written = front_end.acknowledged(25, &config, &[]);
    assert!(matches!(written, Err(vhost_frontend::Error::Refused(25))));
}

/// Otherwise the front end would continue as if the message had been executed.
#[test]
fn refused_message_without_reply_ends_the_session_if_it_must() {
    let (_rig, socket) = rig();
    for (request, payload, ends) in [
        (2, [0xff; 8], true),
        (8, [9, 0, 0, 0, 128, 0, 0, 0], true),
        (99, [0; 8], true),
        // SEND_RARP, NET_SET_MTU, SET_BACKEND_REQ_FD without a descriptor, SET_CONFIG that is too short
        (19, [0; 8], false),
        (20, [0; 8], false),
        (21, [0; 8], false),
        (25, [0; 8], false),
    ] {
        let front_end = connect(&socket);
        front_end.channel().send(request, 0, &payload, &[]).unwrap();
        if ends {
            front_end.channel().wait_closed(SHORT).unwrap();
        } else {
            let answer = front_end.channel().call(17, &[], &[]);
            assert_eq!(answer.unwrap(), 1u64.to_ne_bytes(), "request {request}");
        }
    }
}

#[test]
fn stray_descriptors_and_an_empty_memory_table_are_taken() {
    let (_rig, socket) = rig();
    let mut front_end = connect(&socket);
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    // SET_VRING_NUM with two descriptors; SET_VRING_CALL with the flag for no descriptor and one descriptor.
    let fds = [event.as_fd(), event.as_fd()];
    front_end
        .acknowledged(8, &[0, 0, 0, 0, 128, 0, 0, 0], &fds)
        .unwrap();
    front_end
        .acknowledged(13, &[0, 1, 0, 0, 0, 0, 0, 0], &fds[..1])
        .unwrap();
    front_end.acknowledged(5, &[0; 8], &[]).unwrap();
    front_end.send_memory().unwrap();
    let mut queue = start_blk(&mut front_end, 0);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
}

/// For example after RESET_OWNER: requests in flight are answered, and the new ring starts with its kick.
#[test]
fn ring_is_set_up_anew_without_get_vring_base() {
    let rig = Rig::polling(1, PollLimit::Never);
    let device = Watched::new(ram(1 << 20), Duration::from_millis(50));
    let socket = rig.serve("d", device.clone(), 1);
    let mut front_end = connect(&socket);
    let mut old = start_blk(&mut front_end, 0);
    let slot = old.take().unwrap();
    assert!(old.submit(slot, kind::OUT, 0, 512, 0));
    old.publish();
    eventually("it is in flight", || device.seen().len() == 1);
    let options = QueueOptions::default();
    let mut new = BlkQueue::start(&mut front_end, 0, &options, 8, 4096, Layout::Separate).unwrap();
    assert_eq!(old.reap().unwrap().status, status::OK);
    assert_eq!(new.write(0, &[1; 512]).unwrap(), status::OK);
    assert_eq!(rig.queues_running(), 1);
}
