//! Client and server of this crate against each other, and both against random input.

mod common;

use common::{SIZE, Two, open, serve};
use nbd::client::{self, Content, Failure, Reply, Wanted, content, decode};
use nbd::handshake::{Handshake, Step, Tls};
use nbd::reply::{self, ReplyTo};
use nbd::request::{Action, Request, Rules};
use nbd::wire::{command, transmission};
use nbd::{ErrorCode, Style};
use proptest::prelude::*;

fn wanted(style: Style, export: &str, contexts: &[&str]) -> client::Handshake {
    client::Handshake::new(Wanted {
        export: export.to_owned(),
        style,
        contexts: contexts.iter().map(|name| (*name).to_owned()).collect(),
    })
}

#[test]
fn handshake_negotiates_each_style() {
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let names = ["base:allocation", "x-other:thing", "qemu:dirty-bitmap:mon"];
        let (server, client) = open(wanted(style, "d1", &names)).unwrap();
        assert_eq!(
            (server.export, server.style, client.style),
            (1, style, style)
        );
        assert!(server.knows_block_sizes);
        assert_eq!(client.size, SIZE);
        assert_eq!(client.block_sizes, server.info.block_sizes);
        assert_eq!(client.name.as_deref(), Some("d1"));
        assert_eq!(client.flags, server.info.flags);
        let has_df = client.flags & transmission::SEND_DF != 0;
        assert_eq!(has_df, style > Style::Simple);
        let expected: &[u32] = if style > Style::Simple { &[0, 1] } else { &[] };
        assert_eq!(server.contexts, expected);
        let selected: Vec<u32> = client.contexts.iter().map(|(id, _)| *id).collect();
        assert_eq!(selected, expected);
    }
}

#[test]
fn unknown_export_is_reported() {
    let failure = open(wanted(Style::Structured, "d9", &[])).unwrap_err();
    assert!(
        matches!(failure, Failure::Refused(0x8000_0006, _)),
        "{failure}"
    );
}

#[test]
fn other_servers_are_not_mistaken_for_newstyle() {
    let mut client = wanted(Style::Simple, "", &[]);
    let oldstyle = b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53\x00\x00";
    let refused = client.receive(oldstyle, &mut Vec::new());
    assert_eq!(refused, Err(Failure::NotNewstyle));
}

fn style() -> impl Strategy<Value = Style> {
    prop_oneof![
        Just(Style::Simple),
        Just(Style::Structured),
        Just(Style::Extended)
    ]
}

fn request() -> impl Strategy<Value = Request> {
    let edge = prop_oneof![0..SIZE, SIZE - 4096..SIZE + 4096, any::<u64>()];
    let length = prop_oneof![0..8192u64, 0..=SIZE, any::<u32>().prop_map(u64::from)];
    (0..64u16, 0..9u16, any::<u64>(), edge, length, any::<bool>()).prop_map(
        |(flags, command, cookie, offset, length, aligned)| {
            let mask = if aligned { !511 } else { !0 };
            Request {
                flags,
                command,
                cookie,
                offset: offset & mask,
                length: length & mask,
            }
        },
    )
}

proptest! {
    #[test]
    fn requests_survive_the_wire(request in request(), style in style()) {
        let mut bytes = Vec::new();
        request.encode(style, &mut bytes);
        prop_assert_eq!(bytes.len(), Request::header_length(style));
        prop_assert_eq!(Request::decode(&bytes, style), Ok(Some(request)));
        prop_assert_eq!(Request::decode(&bytes[..bytes.len() - 1], style), Ok(None));
    }

    #[test]
    fn accepted_requests_lie_in_the_export(
        request in request(),
        style in style(),
        flags in any::<u16>(),
        has_contexts in any::<bool>(),
    ) {
        let rules = Rules { style, flags, minimum_block: 512, has_contexts };
        let Ok(action) = request.check(&rules, SIZE) else { return Ok(()) };
        if matches!(action, Action::Flush | Action::Disconnect) {
            return Ok(());
        }
        prop_assert!(request.length <= SIZE && request.offset <= SIZE - request.length);
        prop_assert_eq!((request.offset | request.length) % 512, 0);
        let changes = [command::WRITE, command::TRIM, command::WRITE_ZEROES];
        if changes.contains(&request.command) {
            prop_assert_eq!(flags & transmission::READ_ONLY, 0);
        }
        if matches!(action, Action::BlockStatus { .. }) {
            prop_assert!(has_contexts && request.length > 0);
        }
    }

    #[test]
    fn client_reads_all_replies(
        style in style(),
        cookie in any::<u64>(),
        offset in 0..SIZE,
        code in prop::sample::select(&ErrorCode::ALL[..]),
        message in ".{0,40}",
        data in prop::collection::vec(any::<u8>(), 1..600),
    ) {
        let to = ReplyTo { cookie, offset };
        let mut bytes = Vec::new();
        reply::error(&mut bytes, style, to, code, &message);
        reply::done(&mut bytes, style, to);
        reply::data_header(&mut bytes, style, to, data.len() as u32);
        bytes.extend_from_slice(&data);
        let mut rest = bytes.as_slice();
        for number in 0..3 {
            let (header, used) = decode(rest, style).unwrap().unwrap();
            rest = &rest[used..];
            match header {
                Reply::Simple { cookie: seen, error } => {
                    prop_assert_eq!((seen, style), (cookie, Style::Simple));
                    prop_assert_eq!(error, (number == 0).then_some(code));
                }
                Reply::Chunk(chunk) => {
                    prop_assert_eq!((chunk.cookie, chunk.is_last), (cookie, true));
                    let (payload, after) = rest.split_at(chunk.length as usize);
                    rest = after;
                    let expected = match number {
                        0 => Content::Error { code, message: &message },
                        1 => Content::None,
                        _ => Content::Data { offset, data: &data },
                    };
                    prop_assert_eq!(content(chunk.kind, payload), Ok(expected));
                }
            }
        }
        let tail: &[u8] = if style == Style::Simple { &data } else { &[] };
        prop_assert_eq!(rest, tail);
    }

    #[test]
    fn server_survives_random_options(
        options in prop::collection::vec((0..14u32, prop::collection::vec(any::<u8>(), 0..60)), 0..8),
        piece in 1..64usize,
    ) {
        let mut input = vec![0, 0, 0, 3];
        for (option, data) in &options {
            input.extend_from_slice(b"IHAVEOPT");
            input.extend_from_slice(&option.to_be_bytes());
            input.extend_from_slice(&(data.len() as u32).to_be_bytes());
            input.extend_from_slice(data);
        }
        let (in_pieces, step) = serve(&input, piece);
        let (at_once, same) = serve(&input, input.len());
        prop_assert_eq!(in_pieces, at_once);
        prop_assert_eq!(step, same);
    }

    #[test]
    fn nothing_panics_on_random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300), style in style()) {
        let mut server = Handshake::new(Tls::Refused);
        let (used, _) = server.receive(&bytes, &Two, &mut Vec::new());
        prop_assert!(used <= bytes.len());
        let mut client = wanted(style, "d0", &["base:allocation"]);
        let mut greeted = nbd::handshake::greeting();
        greeted.extend_from_slice(&bytes);
        client.receive(&greeted, &mut Vec::new()).ok();
        decode(&bytes, style).ok();
        for kind in [0, 1, 2, 5, 6, 0x8001, 0x8002, 77] {
            content(kind, &bytes).ok();
        }
    }
}

#[test]
fn handshake_step_says_when_more_bytes_are_needed() {
    assert_eq!(serve(&[0, 0, 0], 1).1, Step::More);
}

#[test]
fn client_with_tls_sends_only_starttls_before() {
    let wanted = Wanted {
        export: "d0".to_owned(),
        style: Style::Extended,
        contexts: Vec::new(),
    };
    let start = || {
        let mut client = client::Handshake::new(wanted.clone()).with_tls();
        let mut output = Vec::new();
        let greeting = nbd::handshake::greeting();
        let step = client.receive(&greeting, &mut output).unwrap();
        assert_eq!(step, (greeting.len(), client::Step::More));
        assert_eq!(output, b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0");
        client
    };
    let ack = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x05\0\0\0\x01\0\0\0\0";
    let mut output = Vec::new();
    let mut client = start();
    let step = client.receive(ack, &mut output).unwrap();
    assert_eq!(step, (ack.len(), client::Step::StartTls));
    assert!(output.is_empty());
    client.continue_with_tls(&mut output);
    assert_eq!(output, b"IHAVEOPT\0\0\0\x0b\0\0\0\0");

    // Bytes of a third party behind the reply.
    let injected = [&ack[..], b"x"].concat();
    let refused = start().receive(&injected, &mut output).unwrap_err();
    let expected = client::Failure::Violation(nbd::Violation::BytesBeforeTls);
    assert_eq!(refused, expected);
    let policy = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x05\x80\0\0\x02\0\0\0\0";
    let refused = start().receive(policy, &mut output).unwrap_err();
    assert_eq!(refused, client::Failure::NoTls(0x8000_0002, String::new()));
    // A server without the fixed newstyle handshake has no TLS.
    let mut client = client::Handshake::new(wanted.clone()).with_tls();
    let refused = client.receive(b"NBDMAGICIHAVEOPT\0\0", &mut output);
    assert_eq!(refused, Err(client::Failure::NotNewstyle));
}
