//! Frames survive any split of the stream; arbitrary bytes produce frames or a violation, with bounded memory.
#![forbid(unsafe_code)]

use guest_channel::{
    Allowance, Budget, Decoder, Frame, HEADER, Hunter, PAYLOAD_MAX, Stream, Violation, WINDOW,
};
use proptest::prelude::*;

fn data() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 1..300),
        Just(vec![0xa7; PAYLOAD_MAX]),
    ]
}

fn stream() -> impl Strategy<Value = Stream> {
    prop_oneof![
        Just(Stream::Input),
        Just(Stream::Output),
        Just(Stream::Errors)
    ]
}

fn frame() -> impl Strategy<Value = Frame> {
    prop_oneof![
        any::<[u8; 16]>().prop_map(Frame::Hello),
        any::<[u8; 16]>().prop_map(Frame::Welcome),
        data().prop_map(Frame::Script),
        Just(Frame::Start),
        data().prop_map(Frame::Input),
        Just(Frame::InputEnd),
        data().prop_map(Frame::Output),
        data().prop_map(Frame::Errors),
        (stream(), 1..=u32::MAX).prop_map(|(stream, count)| Frame::Credit(stream, count)),
        any::<u32>().prop_map(Frame::Exit),
        ".{0,80}".prop_map(Frame::Failed),
        any::<u8>().prop_map(Frame::Signal),
    ]
}

/// Splits `bytes` into pieces with repeating sizes.
fn pieces<'a>(mut bytes: &'a [u8], sizes: &[usize]) -> Vec<&'a [u8]> {
    let mut cut = Vec::new();
    for size in sizes.iter().cycle() {
        if bytes.is_empty() {
            break;
        }
        let (piece, rest) = bytes.split_at((*size).min(bytes.len()));
        cut.push(piece);
        bytes = rest;
    }
    cut
}

proptest! {
    #[test]
    fn frames_survive_any_fragmentation(
        frames in proptest::collection::vec((any::<u32>(), frame()), 0..12),
        sizes in proptest::collection::vec(1usize..5000, 1..6),
    ) {
        let mut bytes = Vec::new();
        for (channel, frame) in &frames {
            frame.encode(*channel, &mut bytes);
        }
        let mut decoder = Decoder::default();
        let mut found = Vec::new();
        for piece in pieces(&bytes, &sizes) {
            decoder.feed(piece, |channel, frame| { found.push((channel, frame)); Ok(()) }).unwrap();
            prop_assert!(decoder.held() < HEADER + PAYLOAD_MAX);
        }
        prop_assert_eq!(found, frames);
        prop_assert_eq!(decoder.held(), 0);
    }

    #[test]
    fn damaged_frames_are_violations_and_hold_one_frame_at_most(
        frames in proptest::collection::vec((any::<u32>(), frame()), 1..6),
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        tail in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut bytes = Vec::new();
        for (channel, frame) in &frames {
            frame.encode(*channel, &mut bytes);
        }
        bytes.extend(tail);
        for (index, value) in damage {
            let at = index.index(bytes.len());
            bytes[at] = value;
        }
        let mut decoder = Decoder::default();
        for piece in pieces(&bytes, &[1, 7, 4096]) {
            let fed = decoder.feed(piece, |_, _| Ok(()));
            prop_assert!(decoder.held() <= HEADER + PAYLOAD_MAX);
            if fed.is_err() {
                break;
            }
        }
    }

    #[test]
    fn a_greeting_is_found_behind_anything(
        before in proptest::collection::vec(prop_oneof![Just(0xa7u8), Just(1), Just(0), any::<u8>()], 0..200),
        // A greeting cut after its version looks complete with the zeroes. The host's answer then matches no agent, and the zeroes end
        // that session.
        cut in 0usize..29,
        number in any::<[u8; 16]>(),
        sizes in proptest::collection::vec(1usize..60, 1..4),
    ) {
        let hello = Frame::Hello(number).bytes(0);
        // Arbitrary bytes, then a truncated greeting, then a complete one.
        let bytes = [&before[..], &hello[..cut], &[0; 40], &hello, b"after"].concat();
        let mut hunter = Hunter::for_hello();
        let mut found = None;
        let mut left = 0;
        for piece in pieces(&bytes, &sizes) {
            left += piece.len();
            if let Some((number, rest)) = hunter.feed(piece) {
                found = Some((number, left - rest.len()));
                break;
            }
        }
        prop_assert_eq!(found, Some((number, bytes.len() - 5)));
    }

    #[test]
    fn sender_and_receiver_never_disagree(steps in proptest::collection::vec((any::<bool>(), 1u32..70_000), 1..200)) {
        let (mut sender, mut receiver) = (Budget::default(), Allowance::default());
        let mut waiting = 0;
        for (send, count) in steps {
            if send {
                let count = count.min(sender.left());
                sender.spend(count);
                receiver.receive(count as usize).unwrap();
                waiting += count;
            } else {
                let count = count.min(waiting);
                waiting -= count;
                if let Some(more) = receiver.consume(count) {
                    sender.grant(more).unwrap();
                }
            }
            prop_assert!(waiting <= WINDOW);
            // A sender without window always gets credit after all bytes are consumed.
            prop_assert!(waiting > 0 || sender.left() > 0);
        }
    }
}

#[test]
fn more_than_the_window_is_a_violation() {
    let mut receiver = Allowance::default();
    receiver.receive(WINDOW as usize).unwrap();
    assert!(receiver.receive(1).is_err());
    let mut sender = Budget::default();
    assert!(sender.grant(1).is_err());
    sender.spend(10);
    assert!(sender.grant(11).is_err());
    sender.grant(10).unwrap();
}

#[test]
fn receiver_error_ends_the_stream() {
    let bytes = [Frame::Start.bytes(1), Frame::Start.bytes(2)].concat();
    let mut seen = Vec::new();
    let fed = Decoder::default().feed(&bytes, |channel, _| {
        seen.push(channel);
        Err(Violation("no such channel".into()))
    });
    assert_eq!((fed.is_err(), seen), (true, vec![1]));
}
