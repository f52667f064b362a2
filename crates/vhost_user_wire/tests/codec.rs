//! Properties of encoder and parser, and limits of messages.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use proptest::prelude::*;
use vhost_user_wire::{
    Config, Header, Inflight, Log, MemoryRegion, Message, NEED_REPLY, REPLY, VringAddr, VringState,
    WireError, encode, parse, parse_reply, request,
};

fn null() -> File {
    File::open("/dev/null").unwrap()
}

fn fds(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| null().into()).collect()
}

/// Returns the valid message `kind` with fields made of `numbers` and `bytes`.
fn message<'a>(
    kind: usize,
    numbers: [u64; 5],
    bytes: &[u8],
    fd: BorrowedFd<'a>,
) -> Message<BorrowedFd<'a>> {
    let [a, b, c, d, e] = numbers;
    let state = VringState {
        index: a as u32,
        num: b as u32,
    };
    let region = MemoryRegion {
        guest_address: a,
        size: b,
        user_address: c,
        mmap_offset: d,
    };
    let inflight = Inflight {
        mmap_size: a,
        mmap_offset: b,
        num_queues: c as u16 | 1,
        queue_size: d as u16 | 1,
        padding: e as u32,
    };
    let log = Log {
        mmap_size: a | 1,
        mmap_offset: b >> 1,
    };
    let log = Log {
        mmap_size: log.mmap_size >> 1 | 1,
        ..log
    };
    let config = Config {
        offset: a as u32 % 2048,
        flags: b as u32 & 3,
        region: bytes.to_vec(),
    };
    let optional = (b % 2 == 0).then_some(fd);
    match kind {
        0 => Message::GetFeatures,
        1 => Message::SetFeatures(a),
        2 => Message::SetOwner,
        3 => Message::ResetOwner,
        4 => Message::SetMemTable(vec![(region, fd); e as usize % 33]),
        5 => Message::SetLogBase(log, fd),
        6 => Message::SetLogFd(fd),
        7 => Message::SetVringNum(state),
        8 => Message::SetVringAddr(VringAddr {
            index: a as u32,
            flags: b as u32 & 1,
            descriptor: b & !15,
            used: c & !3,
            available: d & !1,
            log: e,
        }),
        9 => Message::SetVringBase(state),
        10 => Message::GetVringBase(state),
        11 => Message::SetVringKick(a as u8, optional),
        12 => Message::SetVringCall(a as u8, optional),
        13 => Message::SetVringErr(a as u8, optional),
        14 => Message::GetProtocolFeatures,
        15 => Message::SetProtocolFeatures(a),
        16 => Message::GetQueueNum,
        17 => Message::SetVringEnable(state),
        18 => Message::SetBackendReqFd(fd),
        19 => Message::GetConfig(config),
        20 => Message::SetConfig(config),
        21 => Message::GetInflightFd(inflight),
        22 => Message::SetInflightFd(inflight, fd),
        23 => Message::ResetDevice,
        24 => Message::GetMaxMemSlots,
        25 => Message::AddMemReg(region, fd),
        _ => Message::RemMemReg(region),
    }
}

proptest! {
    #[test]
    fn encoded_message_is_parsed_to_itself(
        kind in 0..27usize,
        numbers: [u64; 5],
        bytes in prop::collection::vec(any::<u8>(), 1..2048),
    ) {
        let file = null();
        let sent = message(kind, numbers, &bytes, file.as_fd());
        let (encoded, borrowed) = sent.encode(NEED_REPLY);
        let received = parse(&encoded, fds(borrowed.len())).unwrap();
        let (again, borrowed_again) = received.encode(NEED_REPLY);
        prop_assert_eq!(encoded, again);
        prop_assert_eq!(borrowed.len(), borrowed_again.len());
    }

    #[test]
    fn random_bytes_never_panic(
        request in 0..50u32,
        flags in prop::sample::select(vec![0, NEED_REPLY, REPLY]),
        payload in prop::collection::vec(any::<u8>(), 0..100),
        count in 0..3usize,
    ) {
        let bytes = encode(request, flags, &payload);
        parse(&bytes, fds(count)).ok();
        parse_reply(request, &bytes, fds(count)).ok();
        parse(&payload, fds(count)).ok();
        parse_reply(request, &payload, fds(count)).ok();
    }
}

#[test]
fn header_limits_version_and_payload() {
    let header = |words: [u32; 3]| {
        let bytes = words.map(u32::to_ne_bytes).concat();
        Header::parse(&bytes).map(|(header, _)| header.size)
    };
    assert_eq!(header([1, 1, 4096]), Ok(4096));
    assert_eq!(header([1, 1, 4097]), Err(WireError::TooLong(4097)));
    assert_eq!(header([1, 2, 0]), Err(WireError::Version(2)));
    assert_eq!(Header::parse(&[1; 11]).unwrap_err(), WireError::Incomplete);
}

#[test]
fn invalid_messages_are_refused() {
    let refused = |number, flags, payload: &[u8], count| {
        parse(&encode(number, flags, payload), fds(count)).unwrap_err()
    };
    assert_eq!(refused(0, 0, &[], 0), WireError::Request);
    assert_eq!(refused(99, 0, &[1], 0), WireError::Request);
    assert_eq!(refused(1, REPLY, &[], 0), WireError::Flags(5));
    assert_eq!(refused(1, 16, &[], 0), WireError::Flags(17));
    assert_eq!(refused(1, 0, &[0], 0), WireError::Size(1));
    assert_eq!(refused(2, 0, &[0; 9], 0), WireError::Size(9));
    for number in [
        request::SET_LOG_FD,
        request::SET_BACKEND_REQ_FD,
        request::SET_VRING_KICK,
        request::SET_VRING_CALL,
        request::SET_VRING_ERR,
    ] {
        for count in [0, 2] {
            let error = refused(number, 0, &[0; 8], count);
            assert_eq!(error, WireError::Descriptors(count), "request {number}");
        }
    }
    let table = |regions: u8, bytes| [vec![regions, 0, 0, 0, 0, 0, 0, 0], vec![1; bytes]].concat();
    let number = request::SET_MEM_TABLE;
    assert_eq!(refused(number, 0, &table(1, 31), 1), WireError::Size(39));
    for (regions, count) in [(1, 0), (1, 3), (2, 1), (33, 33)] {
        let payload = table(regions, 32 * usize::from(regions));
        let error = refused(number, 0, &payload, count);
        assert_eq!(error, WireError::Descriptors(count), "{regions} regions");
    }
    let config = |offset, size, flags| [offset, size, flags].map(u32::to_ne_bytes).concat();
    let field = WireError::Field("range or flags of a configuration access");
    let with = |fields: Vec<u8>, bytes| [fields, vec![0; bytes]].concat();
    assert_eq!(refused(25, 0, &config(0, 0, 0), 0), field);
    assert_eq!(refused(25, 0, &with(config(4095, 2, 0), 2), 0), field);
    assert_eq!(refused(25, 0, &with(config(0, 2, 4), 2), 0), field);
    assert_eq!(
        refused(25, 0, &with(config(0, 3, 0), 2), 0),
        WireError::Size(14)
    );
    let addresses = |at: usize, low: u8| {
        let mut payload = [0; 40];
        payload[at] = low;
        refused(request::SET_VRING_ADDR, 0, &payload, 0)
    };
    assert_eq!(addresses(4, 2), WireError::Field("vring flags"));
    for (at, low) in [(8, 8), (16, 2), (24, 1)] {
        assert_eq!(addresses(at, low), WireError::Field("alignment of a vring"));
    }
}

#[test]
fn descriptors_of_a_message_without_any_are_closed() {
    let message = parse(&encode(request::SET_OWNER, 0, &[]), fds(2)).unwrap();
    assert_eq!(message.into_parts().2.len(), 0);
    let no_fd = 0x103u64.to_ne_bytes();
    let message = parse(&encode(request::SET_VRING_CALL, 0, &no_fd), fds(1)).unwrap();
    assert!(matches!(message, Message::SetVringCall(3, None)));
}
