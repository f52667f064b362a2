//! Bytes on the wire: literals from the protocol document.

mod common;

use common::{SIZE, serve, serve_with};
use nbd::client::{Content, Reply, content, decode};
use nbd::handshake::{Handshake, Step, Tls, greeting};
use nbd::reply::{self, ContextStatus, Descriptor, ReplyTo};
use nbd::request::{Action, Request, Rules};
use nbd::wire::{allocation, transmission};
use nbd::{ErrorCode, Style, Violation};

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex
        .bytes()
        .filter(|byte| !byte.is_ascii_whitespace())
        .map(|byte| (byte as char).to_digit(16).expect("hexadecimal") as u8)
        .collect();
    digits
        .chunks(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}

/// Client flags, then options.
fn input(options: &[&str]) -> Vec<u8> {
    let mut input = bytes("00000003");
    options.iter().for_each(|one| input.extend(bytes(one)));
    input
}

#[track_caller]
fn answers(options: &[&str], expected: &[&str]) {
    let expected: Vec<u8> = expected.iter().flat_map(|reply| bytes(reply)).collect();
    let input = input(options);
    for piece in [1, 7, input.len()] {
        let (output, _) = serve(&input, piece);
        assert_eq!(output, expected, "pieces of {piece} bytes");
    }
}

const GO_D0: &str = "49484156454f5054 00000007 00000008 00000002 6430 0000";
const GO_D0_REPLY: &str = "0003e889045565a9 00000007 00000003 0000000c 0000 0000000000100000 000d
     0003e889045565a9 00000007 00000001 00000000";

#[test]
fn greeting_is_fixed_newstyle_without_zeroes() {
    assert_eq!(greeting(), bytes("4e42444d41474943 49484156454f5054 0003"));
}

#[test]
fn go_opens_an_export() {
    answers(&[GO_D0], &[GO_D0_REPLY]);
    let (_, step) = serve(&input(&[GO_D0]), 5);
    let Step::Transmission(session) = step else {
        panic!("{step:?}");
    };
    assert_eq!((session.export, session.style), (0, Style::Simple));
    assert!(!session.knows_block_sizes);
}

#[test]
fn go_sends_requested_information() {
    let request = "49484156454f5054 00000007 0000000e 00000002 6430 0003 0001 0002 0003";
    let replies = "0003e889045565a9 00000007 00000003 00000004 0001 6430
         0003e889045565a9 00000007 00000003 00000006 0002 726f6f74
         0003e889045565a9 00000007 00000003 0000000e 0003 00000200 00001000 02000000";
    answers(&[request], &[replies, GO_D0_REPLY]);
}

#[test]
fn info_does_not_enter_the_transmission_phase() {
    let info = "49484156454f5054 00000006 00000008 00000002 6430 0000";
    let replies = "0003e889045565a9 00000006 00000003 0000000c 0000 0000000000100000 000d
         0003e889045565a9 00000006 00000001 00000000";
    answers(&[info, GO_D0], &[replies, GO_D0_REPLY]);
}

#[test]
fn unknown_export_is_refused_and_the_next_option_is_parsed() {
    let go = "49484156454f5054 00000007 00000008 00000002 6439 0000";
    let message = "6e6f206578706f7274206f662074686973206e616d65";
    let refused = format!("0003e889045565a9 00000007 80000006 00000016 {message}");
    answers(&[go, GO_D0], &[&refused, GO_D0_REPLY]);
}

#[test]
fn unknown_option_is_unsupported() {
    let option = "49484156454f5054 00000063 00000003 010203";
    let message = "756e6b6e6f776e206f7074696f6e";
    let refused = format!("0003e889045565a9 00000063 80000001 0000000e {message}");
    answers(&[option, GO_D0], &[&refused, GO_D0_REPLY]);
}

#[test]
fn starttls_is_forbidden_by_policy() {
    let option = "49484156454f5054 00000005 00000000";
    let message = "544c53206973206e6f7420636f6e66696775726564";
    let refused = format!("0003e889045565a9 00000005 80000002 00000015 {message}");
    answers(&[option, GO_D0], &[&refused, GO_D0_REPLY]);
}

const STARTTLS: &str = "49484156454f5054 00000005 00000000";
const STARTTLS_ACK: &str = "0003e889045565a9 00000005 00000001 00000000";

#[test]
fn before_tls_only_starttls_and_abort_are_executed() {
    let reason = "544c53206973207265717569726564";
    let list = "49484156454f5054 00000003 00000000";
    let structured = "49484156454f5054 00000008 00000000";
    let expected: Vec<u8> = ["00000003", "00000008", "00000007"]
        .iter()
        .flat_map(|option| {
            bytes(&format!(
                "0003e889045565a9 {option} 80000005 0000000f {reason}"
            ))
        })
        .chain(bytes(STARTTLS_ACK))
        .collect();
    let all = input(&[list, structured, GO_D0, STARTTLS]);
    for piece in [1, 7, all.len()] {
        let mut handshake = Handshake::new(Tls::Required);
        let (output, step) = serve_with(&mut handshake, &all, piece);
        assert_eq!((output, step), (expected.clone(), Step::StartTls));
        // No client flags follow. Structured replies must be negotiated again.
        let (output, step) = serve_with(&mut handshake, &bytes(GO_D0), piece);
        assert_eq!(output, bytes(GO_D0_REPLY));
        let Step::Transmission(session) = step else {
            panic!("{step:?}");
        };
        assert_eq!(session.style, Style::Simple);
    }
    let abort = input(&["49484156454f5054 00000002 00000000"]);
    let mut handshake = Handshake::new(Tls::Required);
    assert_eq!(serve_with(&mut handshake, &abort, 3).1, Step::Aborted);
    let by_name = input(&["49484156454f5054 00000001 00000002 6430"]);
    let mut handshake = Handshake::new(Tls::Required);
    let step = serve_with(&mut handshake, &by_name, 3).1;
    assert_eq!(step, Step::Violated(Violation::TlsRequired));
}

#[test]
fn bytes_after_starttls_end_the_connection() {
    for more in ["49", GO_D0] {
        let mut handshake = Handshake::new(Tls::Required);
        let all = input(&[STARTTLS, more]);
        let (_, step) = serve_with(&mut handshake, &all, all.len());
        assert_eq!(step, Step::Violated(Violation::BytesBeforeTls));
    }
}

#[test]
fn second_starttls_is_invalid() {
    let mut handshake = Handshake::new(Tls::Required);
    let started = serve_with(&mut handshake, &input(&[STARTTLS]), 4).1;
    assert_eq!(started, Step::StartTls);
    let (output, step) = serve_with(&mut handshake, &bytes(STARTTLS), 4);
    let message = "544c532069732061637469766520616c7265616479";
    let refused = format!("0003e889045565a9 00000005 80000003 00000015 {message}");
    assert_eq!((output, step), (bytes(&refused), Step::Answered));
}

#[test]
fn list_names_all_exports() {
    let list = "49484156454f5054 00000003 00000000";
    let replies = "0003e889045565a9 00000003 00000002 0000000a 00000002 6430 726f6f74
         0003e889045565a9 00000003 00000002 00000006 00000002 6431
         0003e889045565a9 00000003 00000001 00000000";
    answers(&[list], &[replies]);
}

#[test]
fn abort_is_acknowledged() {
    let abort = "49484156454f5054 00000002 00000000";
    answers(&[abort], &["0003e889045565a9 00000002 00000001 00000000"]);
    assert_eq!(serve(&input(&[abort]), 3).1, Step::Aborted);
}

#[test]
fn export_name_has_124_zeroes_unless_declined() {
    let by_name = "49484156454f5054 00000001 00000002 6430";
    answers(&[by_name], &["0000000000100000 000d"]);
    let mut input = bytes("00000001");
    input.extend(bytes(by_name));
    let (output, step) = serve(&input, 6);
    assert_eq!(output.len(), 10 + 124);
    assert!(output[10..].iter().all(|byte| *byte == 0));
    assert!(matches!(step, Step::Transmission(_)));
}

#[test]
fn violations_end_the_connection() {
    for (input, violation) in [
        ("00000004", Violation::ClientFlags(4)),
        (
            "00000003 49484156454f5055 00000003 00000000",
            Violation::Magic,
        ),
        (
            "00000003 49484156454f5054 00000003 00100001",
            Violation::OptionLength(0x0010_0001),
        ),
        (
            "00000003 49484156454f5054 00000001 00000002 6439",
            Violation::ExportName,
        ),
    ] {
        assert_eq!(serve(&bytes(input), 4).1, Step::Violated(violation));
    }
}

#[test]
fn long_option_is_skipped() {
    let mut long = input(&["49484156454f5054 00000007 00010000"]);
    long.extend(vec![7; 0x10000]);
    long.extend(bytes(GO_D0));
    for piece in [1000, long.len()] {
        let (output, step) = serve(&long, piece);
        assert!(output.starts_with(&bytes("0003e889045565a9 00000007 80000009")));
        assert!(output.ends_with(&bytes(GO_D0_REPLY)));
        assert!(matches!(step, Step::Transmission(_)));
    }
}

const STRUCTURED: &str = "49484156454f5054 00000008 00000000";
const STRUCTURED_ACK: &str = "0003e889045565a9 00000008 00000001 00000000";

#[test]
fn contexts_are_listed_and_selected() {
    // "d0", one query, "base:allocation".
    let query = "00000002 6430 00000001 0000000f 626173653a616c6c6f636174696f6e";
    let selected = format!("49484156454f5054 0000000a 0000001d {query}");
    let ack = "0003e889045565a9 0000000a 00000004 00000013 00000000 626173653a616c6c6f636174696f6e
         0003e889045565a9 0000000a 00000001 00000000";
    answers(&[STRUCTURED, &selected], &[STRUCTURED_ACK, ack]);
    // The wildcard "qemu:" lists, and selects nothing.
    let query = "00000002 6430 00000001 00000005 71656d753a";
    let listed = format!("49484156454f5054 00000009 00000013 {query}");
    let ack = "0003e889045565a9 00000009 00000004 00000019 00000000
         71656d753a64697274792d6269746d61703a6d6f6e
         0003e889045565a9 00000009 00000001 00000000";
    answers(&[STRUCTURED, &listed], &[STRUCTURED_ACK, ack]);
    let set = format!("49484156454f5054 0000000a 00000013 {query}");
    let ack = "0003e889045565a9 0000000a 00000001 00000000";
    answers(&[STRUCTURED, &set], &[STRUCTURED_ACK, ack]);
}

#[test]
fn contexts_need_structured_replies() {
    let query = "00000002 6430 00000000";
    let set = format!("49484156454f5054 0000000a 0000000a {query}");
    let (output, _) = serve(&input(&[&set]), 9);
    assert!(output.starts_with(&bytes("0003e889045565a9 0000000a 80000003")));
}

#[test]
fn structured_replies_follow_extended_headers_only_in_this_order() {
    let extended = "49484156454f5054 0000000b 00000000";
    let ack = "0003e889045565a9 0000000b 00000001 00000000";
    answers(&[STRUCTURED, extended], &[STRUCTURED_ACK, ack]);
    let (output, _) = serve(&input(&[extended, STRUCTURED]), 9);
    assert!(output[20..].starts_with(&bytes("0003e889045565a9 00000008 8000000a")));
}

const RULES: Rules = Rules {
    style: Style::Structured,
    flags: transmission::SEND_FLUSH
        | transmission::SEND_FUA
        | transmission::SEND_TRIM
        | transmission::SEND_WRITE_ZEROES
        | transmission::SEND_DF,
    minimum_block: 512,
    has_contexts: true,
};

#[track_caller]
fn checked(hex: &str) -> Result<Action, ErrorCode> {
    let request = Request::decode(&bytes(hex), Style::Structured);
    let request = request.unwrap().expect("a whole header");
    assert_eq!(request.cookie, 0x0102_0304_0506_0708);
    request.check(&RULES, SIZE)
}

#[test]
fn requests_are_decoded_and_checked() {
    // magic, flags, type, cookie, offset, length
    for (request, expected) in [
        (
            "25609513 0000 0000 0102030405060708 0000000000000200 00000400",
            Ok(Action::Read {
                unfragmented: false,
            }),
        ),
        (
            "25609513 0004 0000 0102030405060708 00000000000ffe00 00000200",
            Ok(Action::Read { unfragmented: true }),
        ),
        (
            "25609513 0001 0001 0102030405060708 0000000000000000 00000200",
            Ok(Action::Write { fua: true }),
        ),
        (
            "25609513 0000 0003 0102030405060708 0000000000000000 00000000",
            Ok(Action::Flush),
        ),
        (
            "25609513 0000 0004 0102030405060708 0000000000000000 00100000",
            Ok(Action::Trim { fua: false }),
        ),
        (
            "25609513 0002 0006 0102030405060708 0000000000000000 00100000",
            Ok(Action::WriteZeroes {
                fua: false,
                no_hole: true,
                fast: false,
            }),
        ),
        (
            "25609513 0008 0007 0102030405060708 0000000000000000 00100000",
            Ok(Action::BlockStatus { one: true }),
        ),
        (
            "25609513 0000 0002 0102030405060708 0000000000000000 00000000",
            Ok(Action::Disconnect),
        ),
        // A read and a write that end beyond the export.
        (
            "25609513 0000 0000 0102030405060708 00000000000ffe00 00000400",
            Err(ErrorCode::Invalid),
        ),
        (
            "25609513 0000 0001 0102030405060708 ffffffffffffe000 00002000",
            Err(ErrorCode::NoSpace),
        ),
        // Unaligned, an unknown command, a flag of another command, a fast zero that was not offered.
        (
            "25609513 0000 0000 0102030405060708 0000000000000001 00000200",
            Err(ErrorCode::Invalid),
        ),
        (
            "25609513 0000 0008 0102030405060708 0000000000000000 00000000",
            Err(ErrorCode::Invalid),
        ),
        (
            "25609513 0002 0001 0102030405060708 0000000000000000 00000200",
            Err(ErrorCode::Invalid),
        ),
        (
            "25609513 0010 0006 0102030405060708 0000000000000000 00000200",
            Err(ErrorCode::Invalid),
        ),
    ] {
        assert_eq!(checked(request), expected, "{request}");
    }
}

#[test]
fn read_only_export_permits_no_change() {
    let rules = Rules {
        flags: transmission::READ_ONLY | transmission::SEND_FLUSH,
        ..RULES
    };
    for command in [1, 4, 6] {
        let request = Request {
            flags: 0,
            command,
            cookie: 0,
            offset: 0,
            length: 512,
        };
        assert_eq!(request.check(&rules, SIZE), Err(ErrorCode::Perm));
    }
}

#[test]
fn wrong_magic_and_long_payloads_are_violations() {
    let request = bytes("25609514 0000 0000 0102030405060708 0000000000000200 00000400");
    assert_eq!(
        Request::decode(&request, Style::Simple),
        Err(Violation::Magic)
    );
    // 32 MiB is the longest write.
    let write = bytes("25609513 0000 0001 0102030405060708 0000000000000000 02000000");
    let write = Request::decode(&write, Style::Simple).unwrap().unwrap();
    assert_eq!(write.payload(Style::Simple), Ok(0x0200_0000));
    let longer = Request {
        length: 0x0200_0001,
        ..write
    };
    assert_eq!(
        longer.payload(Style::Simple),
        Err(Violation::PayloadLength(0x0200_0001))
    );
}

#[test]
fn extended_request_has_a_length_of_64_bits() {
    let header = "21e41c71 0020 0001 0102030405060708 0000000000000200 0000000000000400";
    let request = Request::decode(&bytes(header), Style::Extended)
        .unwrap()
        .unwrap();
    assert_eq!(request.payload(Style::Extended), Ok(1024));
    let rules = Rules {
        style: Style::Extended,
        ..RULES
    };
    let write = Ok(Action::Write { fua: false });
    assert_eq!(request.check(&rules, SIZE), write);
    // A payload of a command without one is skipped, and the command fails.
    let read = Request {
        command: 0,
        ..request
    };
    assert_eq!(read.payload(Style::Extended), Ok(1024));
    assert_eq!(read.check(&rules, SIZE), Err(ErrorCode::Invalid));
    let mut encoded = Vec::new();
    request.encode(Style::Extended, &mut encoded);
    assert_eq!(encoded, bytes(header));
}

const TO: ReplyTo = ReplyTo {
    cookie: 0x0102_0304_0506_0708,
    offset: 0x200,
};

#[track_caller]
fn written(expected: &str, write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut output = Vec::new();
    write(&mut output);
    assert_eq!(output, bytes(expected));
    output
}

#[test]
fn replies_have_the_form_of_their_style() {
    use Style::{Extended, Simple, Structured};
    written("67446698 00000000 0102030405060708", |output| {
        reply::done(output, Simple, TO);
    });
    written("67446698 00000016 0102030405060708", |output| {
        reply::error(output, Simple, TO, ErrorCode::Invalid, "bad");
    });
    written("668e33ef 0001 0000 0102030405060708 00000000", |output| {
        reply::done(output, Structured, TO);
    });
    written(
        "668e33ef 0001 8001 0102030405060708 00000009 00000016 0003 626164",
        |output| reply::error(output, Structured, TO, ErrorCode::Invalid, "bad"),
    );
    written("67446698 00000000 0102030405060708", |output| {
        reply::data_header(output, Simple, TO, 512);
    });
    written(
        "668e33ef 0001 0001 0102030405060708 00000208 0000000000000200",
        |output| reply::data_header(output, Structured, TO, 512),
    );
    written(
        "6e8a278c 0001 0001 0102030405060708 0000000000000200 0000000000000208 0000000000000200",
        |output| reply::data_header(output, Extended, TO, 512),
    );
}

fn of(context: u32, descriptors: &[Descriptor]) -> ContextStatus {
    ContextStatus {
        context,
        descriptors: descriptors.to_vec(),
    }
}

#[test]
fn block_status_has_32_or_64_bits() {
    let hole = Descriptor {
        length: 1 << 33,
        flags: allocation::HOLE | allocation::ZERO,
    };
    let data = Descriptor {
        length: 4096,
        flags: 0,
    };
    let structured = written(
        "668e33ef 0001 0005 0102030405060708 00000014 00000007 00001000 00000000 fffffe00 00000003",
        |output| {
            let status = [of(7, &[data, hole, data])];
            reply::block_status(output, Style::Structured, TO, &status, 512);
        },
    );
    let extended = written(
        "6e8a278c 0001 0006 0102030405060708 0000000000000200 0000000000000028
         00000007 00000002 0000000000001000 0000000000000000 0000000200000000 0000000000000003",
        |output| {
            let status = [of(7, &[data, hole])];
            reply::block_status(output, Style::Extended, TO, &status, 512);
        },
    );
    for (style, message, last) in [
        (Style::Structured, structured, 0xffff_fe00),
        (Style::Extended, extended, 1 << 33),
    ] {
        let (header, used) = decode(&message, style).unwrap().unwrap();
        let Reply::Chunk(chunk) = header else {
            panic!("{header:?}");
        };
        let status = content(chunk.kind, &message[used..]).unwrap();
        let Content::BlockStatus {
            context: 7,
            descriptors,
        } = status
        else {
            panic!("{status:?}");
        };
        assert_eq!(descriptors[1].length, last);
    }
}

#[test]
fn all_contexts_of_a_status_describe_the_same_range() {
    let piece = |length, flags| Descriptor { length, flags };
    let first = of(0, &[piece(4096, 0), piece(4096, 3)]);
    let second = of(2, &[piece(2048, 1), piece(1 << 33, 0), piece(512, 1)]);
    written(
        "668e33ef 0000 0005 0102030405060708 00000014 00000000 00001000 00000000 00001000 00000003
         668e33ef 0001 0005 0102030405060708 00000014 00000002 00000800 00000001 00001800 00000000",
        |output| {
            let contexts = [first.clone(), second.clone()];
            reply::block_status(output, Style::Structured, TO, &contexts, 512);
        },
    );
    // The reduction to 32 bits of one context shortens the others.
    let long = of(0, &[piece(1 << 33, 3), piece(512, 0)]);
    written(
        "668e33ef 0000 0005 0102030405060708 0000000c 00000000 fffffe00 00000003
         668e33ef 0001 0005 0102030405060708 00000014 00000002 00000800 00000001 fffff600 00000000",
        |output| reply::block_status(output, Style::Structured, TO, &[long, second], 512),
    );
}

#[test]
fn errors_have_the_values_of_the_document() {
    let values = ErrorCode::ALL.map(ErrorCode::value);
    assert_eq!(values, [1, 5, 12, 22, 28, 75, 95, 108]);
    assert_eq!(ErrorCode::from_value(28), ErrorCode::NoSpace);
    assert_eq!(ErrorCode::from_value(77), ErrorCode::Invalid);
}
