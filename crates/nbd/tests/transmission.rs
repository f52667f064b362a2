//! Replies to a client in flight: wire bytes from the protocol document, rules that a server may break, and random fragments.

use nbd::client::{Event, Transmission};
use nbd::reply::Descriptor;
use nbd::request::Request;
use nbd::wire::{command, command_flag};
use nbd::{ErrorCode, Style, Violation};
use proptest::prelude::*;

/// Range of the read in slot 0.
const OFFSET: u64 = 0x1000;
const LENGTH: u64 = 16;

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex
        .bytes()
        .filter(|byte| !byte.is_ascii_whitespace())
        .collect();
    let pairs = digits.chunks(2).map(|pair| str::from_utf8(pair).unwrap());
    pairs
        .map(|pair| u8::from_str_radix(pair, 16).unwrap())
        .collect()
}

fn request(command: u16, length: u64) -> Request {
    Request {
        flags: 0,
        command,
        cookie: 0,
        offset: OFFSET,
        length,
    }
}

/// A read in slot 0, a flush in slot 1 and a request for extents in slot 2.
fn three(style: Style) -> Transmission {
    let mut transmission = Transmission::new(style, Some(7));
    let mut output = Vec::new();
    transmission.begin(0, request(command::READ, LENGTH), &mut output);
    transmission.begin(1, request(command::FLUSH, 0), &mut output);
    transmission.begin(2, request(command::BLOCK_STATUS, 0x3000), &mut output);
    transmission
}

/// Passes a reply in pieces of this length. Returns the events, without data, and the data of the read.
fn receive(
    transmission: &mut Transmission,
    bytes: &[u8],
    piece: usize,
) -> Result<(Vec<Event>, Vec<Option<u8>>), Violation> {
    let (mut events, mut data) = (Vec::new(), vec![None; LENGTH as usize]);
    for piece in bytes.chunks(piece) {
        let mut rest = piece;
        loop {
            match transmission.next(&mut rest)? {
                Event::More => break,
                Event::Data { at, length, .. } => {
                    for (to, from) in data[at as usize..].iter_mut().zip(&rest[..length]) {
                        *to = Some(*from);
                    }
                    rest = &rest[length..];
                }
                Event::Zeroes { at, length, .. } => {
                    data[at as usize..][..length as usize].fill(Some(0));
                }
                event => events.push(event),
            }
        }
        assert!(rest.is_empty());
    }
    Ok((events, data))
}

fn done(slot: u32) -> Event {
    let result = Ok(());
    Event::Done { slot, result }
}

#[test]
fn headers_of_requests_are_those_of_the_document() {
    let mut output = Vec::new();
    let mut transmission = Transmission::new(Style::Structured, None);
    transmission.begin(3, request(command::WRITE, 512), &mut output);
    let expected = "25609513 0000 0001 00000001 00000003 0000000000001000 00000200";
    assert_eq!(output, bytes(expected));
    output.clear();
    let mut transmission = Transmission::new(Style::Extended, None);
    transmission.begin(3, request(command::WRITE, 512), &mut output);
    // PAYLOAD_LEN is bit 5.
    let expected = "21e41c71 0020 0001 00000001 00000003 0000000000001000 0000000000000200";
    assert_eq!(output, bytes(expected));
    assert_eq!(command_flag::PAYLOAD_LEN, 0x20);
}

#[test]
fn replies_of_each_style_complete_their_requests() {
    let simple = "67446698 00000000 00000001 00000001 \
        67446698 00000000 00000001 00000000 000102030405060708090a0b0c0d0e0f";
    let structured = "668e33ef 0001 0000 00000001 00000001 00000000 \
        668e33ef 0000 0001 00000001 00000000 00000010 0000000000001000 0001020304050607 \
        668e33ef 0001 0001 00000001 00000000 00000010 0000000000001008 08090a0b0c0d0e0f";
    let extended = "6e8a278c 0001 0000 00000001 00000001 0000000000001000 0000000000000000 \
        6e8a278c 0001 0001 00000001 00000000 0000000000001000 0000000000000018 \
        0000000000001000 000102030405060708090a0b0c0d0e0f";
    let expected: Vec<Option<u8>> = (0..16).map(Some).collect();
    for (style, reply) in [
        (Style::Simple, simple),
        (Style::Structured, structured),
        (Style::Extended, extended),
    ] {
        for piece in [1, 3, 16, 1000] {
            let mut transmission = three(style);
            let (events, data) = receive(&mut transmission, &bytes(reply), piece).unwrap();
            assert_eq!(events, [done(1), done(0)], "{style:?}");
            assert_eq!(data, expected);
            assert_eq!(transmission.in_flight(), 1);
        }
    }
}

#[test]
fn hole_chunk_is_zeroes_and_error_ends_the_read() {
    let hole = "668e33ef 0000 0002 00000001 00000000 0000000c 0000000000001004 0000000c \
        668e33ef 0001 0001 00000001 00000000 0000000c 0000000000001000 01020304";
    let (events, data) = receive(&mut three(Style::Structured), &bytes(hole), 5).unwrap();
    assert_eq!(events, [done(0)]);
    let first = [1, 2, 3, 4].into_iter().chain([0; 12]);
    assert_eq!(data, first.map(Some).collect::<Vec<_>>());
    // ERROR_OFFSET with EIO, the message "bad", and the offset.
    let error =
        "668e33ef 0001 8002 00000001 00000000 00000011 00000005 0003 626164 0000000000001000";
    let (events, _) = receive(&mut three(Style::Structured), &bytes(error), 7).unwrap();
    let result = Err(ErrorCode::Io);
    assert_eq!(events, [Event::Done { slot: 0, result }]);
    let simple = "67446698 0000001c 00000001 00000000";
    let (events, _) = receive(&mut three(Style::Simple), &bytes(simple), 7).unwrap();
    let result = Err(ErrorCode::NoSpace);
    assert_eq!(events, [Event::Done { slot: 0, result }]);
}

#[test]
fn extents_have_32_or_64_bits() {
    let structured = "668e33ef 0001 0005 00000001 00000002 00000014 00000007 \
        00001000 00000003 00002000 00000000";
    let extended = "6e8a278c 0001 0006 00000001 00000002 0000000000001000 0000000000000028 \
        00000007 00000002 0000000000001000 0000000000000003 0000000000002000 0000000000000000";
    let extent = |length, flags| Descriptor { length, flags };
    let expected = Event::Status {
        slot: 2,
        descriptors: vec![extent(0x1000, 3), extent(0x2000, 0)],
    };
    for (style, reply) in [(Style::Structured, structured), (Style::Extended, extended)] {
        let (events, _) = receive(&mut three(style), &bytes(reply), 9).unwrap();
        assert_eq!(events, [expected.clone(), done(2)]);
    }
}

/// Returns a status of 5000 extents of one byte, without the last `missing` bytes.
fn long_status(style: Style, missing: usize) -> Vec<u8> {
    const COUNT: u32 = 5000;
    let (mut reply, mut payload, one) = match style {
        Style::Extended => (
            bytes("6e8a278c 0001 0006 00000001 00000002 0000000000001000"),
            [7, COUNT].map(u32::to_be_bytes).concat(),
            [1, 0].map(u64::to_be_bytes).concat(),
        ),
        _ => (
            bytes("668e33ef 0001 0005 00000001 00000002"),
            7u32.to_be_bytes().to_vec(),
            [1, 0].map(u32::to_be_bytes).concat(),
        ),
    };
    (0..COUNT).for_each(|_| payload.extend(&one));
    payload.truncate(payload.len() - missing);
    match style {
        Style::Extended => reply.extend((payload.len() as u64).to_be_bytes()),
        _ => reply.extend((payload.len() as u32).to_be_bytes()),
    }
    reply.extend(payload);
    reply
}

/// The time of one step does not grow with a reply: further extents are not parsed, but must be whole.
#[test]
fn extents_after_the_first_4096_are_skipped() {
    for style in [Style::Structured, Style::Extended] {
        let (events, _) = receive(&mut three(style), &long_status(style, 0), 4096).unwrap();
        let [Event::Status { descriptors, .. }, end] = &events[..] else {
            panic!("{} events", events.len());
        };
        assert_eq!((descriptors.len(), end), (4096, &done(2)));
        assert!(receive(&mut three(style), &long_status(style, 1), 4096).is_err());
    }
}

/// Rules of structured replies, and replies that break them.
const BROKEN: [(&str, &str); 25] = [
    (
        "no such request",
        "668e33ef 0001 0000 00000001 00000003 00000000",
    ),
    (
        "another generation",
        "668e33ef 0001 0000 00000002 00000001 00000000",
    ),
    (
        "wrong magic",
        "668e33ee 0001 0000 00000001 00000001 00000000",
    ),
    (
        "simple reply to a read",
        "67446698 00000000 00000001 00000000",
    ),
    (
        "simple error of a read",
        "67446698 00000005 00000001 00000000",
    ),
    ("no data", "668e33ef 0001 0000 00000001 00000000 00000000"),
    (
        "no extents",
        "668e33ef 0001 0000 00000001 00000002 00000000",
    ),
    (
        "empty chunk in between",
        "668e33ef 0000 0000 00000001 00000000 00000000",
    ),
    (
        "data below",
        "668e33ef 0001 0001 00000001 00000000 0000000c 0000000000000ffc 01020304",
    ),
    (
        "data beyond",
        "668e33ef 0001 0001 00000001 00000000 0000000c 000000000000100d 01020304",
    ),
    (
        "offset at the end of 64 bits",
        "668e33ef 0001 0001 00000001 00000000 0000000c fffffffffffffffe 01020304",
    ),
    (
        "chunk without data",
        "668e33ef 0001 0001 00000001 00000000 00000008 0000000000001000",
    ),
    (
        "chunk above the maximum",
        "668e33ef 0001 0001 00000001 00000000 02000009 0000000000001000",
    ),
    (
        "data for a flush",
        "668e33ef 0001 0001 00000001 00000001 0000000c 0000000000001000 01020304",
    ),
    (
        "data twice",
        "668e33ef 0000 0001 00000001 00000000 0000000c 0000000000001000 01020304 \
        668e33ef 0000 0001 00000001 00000000 0000000c 0000000000001002 01020304",
    ),
    (
        "data twice, the first one later",
        "668e33ef 0000 0001 00000001 00000000 0000000c 0000000000001004 01020304 \
        668e33ef 0000 0001 00000001 00000000 0000000d 0000000000001000 0102030405",
    ),
    (
        "hole of no bytes",
        "668e33ef 0000 0002 00000001 00000000 0000000c 0000000000001004 00000000",
    ),
    (
        "extents for a read",
        "668e33ef 0001 0005 00000001 00000000 0000000c 00000007 00001000 00000003",
    ),
    (
        "another context",
        "668e33ef 0001 0005 00000001 00000002 0000000c 00000008 00001000 00000003",
    ),
    (
        "empty extent",
        "668e33ef 0001 0005 00000001 00000002 0000000c 00000007 00000000 00000003",
    ),
    (
        "extents twice",
        "668e33ef 0000 0005 00000001 00000002 0000000c 00000007 00001000 00000003 \
        668e33ef 0000 0005 00000001 00000002 0000000c 00000007 00001000 00000003",
    ),
    (
        "extents of 64 bits",
        "668e33ef 0001 0006 00000001 00000002 00000018 00000007 00000001 \
        0000000000001000 0000000000000003",
    ),
    (
        "error without a code",
        "668e33ef 0001 8001 00000001 00000000 00000006 00000000 0000",
    ),
    (
        "error with a long message",
        "668e33ef 0001 8001 00000001 00000000 00000006 00000005 0001",
    ),
    (
        "unknown chunk",
        "668e33ef 0001 0063 00000001 00000000 00000000",
    ),
];

#[test]
fn broken_rules_are_violations() {
    for (rule, reply) in BROKEN {
        for piece in [1, 1000] {
            let mut transmission = three(Style::Structured);
            let ended = receive(&mut transmission, &bytes(reply), piece);
            assert!(ended.is_err(), "{rule}: {ended:?}");
            assert!(
                transmission.next(&mut &[0; 64][..]).is_err(),
                "{rule}: it has ended"
            );
        }
    }
    for (style, reply) in [
        (
            Style::Simple,
            "668e33ef 0001 0000 00000001 00000001 00000000 00000000",
        ),
        (
            Style::Extended,
            "668e33ef 0001 0000 00000001 00000001 00000000 00000000 00000000 00000000",
        ),
        (Style::Extended, "67446698 00000000 00000001 00000001"),
    ] {
        let ended = receive(&mut three(style), &bytes(reply), 1000);
        assert_eq!(ended, Err(Violation::Magic), "{style:?}");
    }
}

/// Encodes chunks with these parts of the read, in this order.
fn chunks(parts: &[(u64, u64, bool)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, (at, length, is_hole)) in parts.iter().enumerate() {
        let is_last = number + 1 == parts.len();
        bytes.extend_from_slice(&[0x66, 0x8e, 0x33, 0xef, 0, u8::from(is_last), 0]);
        bytes.push(if *is_hole { 2 } else { 1 });
        bytes.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 0]);
        let payload = if *is_hole { 12 } else { 8 + length };
        bytes.extend_from_slice(&(payload as u32).to_be_bytes());
        bytes.extend_from_slice(&(OFFSET + at).to_be_bytes());
        match is_hole {
            true => bytes.extend_from_slice(&(*length as u32).to_be_bytes()),
            false => bytes.extend((*at..at + length).map(|at| at as u8 + 1)),
        }
    }
    bytes
}

proptest! {
    /// A read succeeds if and only if each of its bytes arrives once.
    #[test]
    fn each_byte_of_a_read_arrives_once(
        parts in prop::collection::vec((0..LENGTH, 1..=LENGTH, any::<bool>()), 1..6),
        piece in 1..40usize,
    ) {
        let mut counts = [0; LENGTH as usize];
        let mut is_inside = true;
        for (at, length, _) in &parts {
            is_inside &= at + length <= LENGTH;
            for at in *at..(at + length).min(LENGTH) {
                counts[at as usize] += 1;
            }
        }
        let received = receive(&mut three(Style::Structured), &chunks(&parts), piece);
        prop_assert_eq!(received.is_ok(), is_inside && counts == [1; LENGTH as usize]);
    }

    #[test]
    fn parts_of_a_read_arrive_in_any_order(
        cuts in prop::collection::btree_set(1..LENGTH, 0..8),
        holes in any::<u16>(),
        seed in any::<u64>(),
        piece in 1..40usize,
    ) {
        let ends: Vec<u64> = cuts.into_iter().chain([LENGTH]).collect();
        let starts = [0].into_iter().chain(ends.iter().copied());
        let parts = starts.zip(&ends).enumerate();
        let mut parts: Vec<_> = parts
            .map(|(number, (start, end))| (start, end - start, holes >> number & 1 == 1))
            .collect();
        parts.sort_by_key(|part| (part.0 + 1).wrapping_mul(seed | 1).rotate_left(17));
        let mut expected = vec![None; LENGTH as usize];
        for (at, length, is_hole) in &parts {
            for at in *at..at + length {
                expected[at as usize] = Some(if *is_hole { 0 } else { at as u8 + 1 });
            }
        }
        let (events, data) = receive(&mut three(Style::Structured), &chunks(&parts), piece).unwrap();
        prop_assert_eq!(events, vec![done(0)]);
        prop_assert_eq!(data, expected);
    }

    #[test]
    fn random_bytes_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        style in prop::sample::select(&[Style::Simple, Style::Structured, Style::Extended][..]),
        piece in 1..64usize,
    ) {
        receive(&mut three(style), &bytes, piece).ok();
    }
}
