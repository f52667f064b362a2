//! Feeds arbitrary bytes to both sides of the NBD protocol: options and requests to a server, option replies and replies to a client.
//!
//! Bits 0 and 1 of the first byte select the client's style, bit 7 the side. Rules: no side uses more bytes than it has, an accepted request
//! lies in the export, the output of a server is bounded by its input, and a client accepts each byte of a read once.

use nbd::client::{Event, Transmission, Wanted};
use nbd::handshake::{Exports, Handshake, Session, Step, Tls, greeting};
use nbd::request::{Action, Request, Rules};
use nbd::wire::{BASE_ALLOCATION, PAYLOAD_MAX, command, transmission};
use nbd::{BlockSizes, ExportInfo, Style, client};

const SIZE: u64 = 1 << 20;
/// Length of the client's read.
const READ_BYTES: u64 = 64;
/// Longest output for one option of one byte: a list of the exports, or the information about one.
const OUTPUT_MAX: usize = 512;

struct One;

impl Exports for One {
    type Export = ();

    fn find(&self, name: &str) -> Option<((), ExportInfo)> {
        let found = name.is_empty() || name == "d0";
        found.then(|| {
            let info = ExportInfo {
                name: "d0".to_owned(),
                description: "root".to_owned(),
                size: SIZE,
                flags: transmission::SEND_TRIM | transmission::SEND_WRITE_ZEROES,
                block_sizes: BlockSizes {
                    minimum: 512,
                    preferred: 4096,
                    maximum_payload: PAYLOAD_MAX,
                },
                contexts: vec![BASE_ALLOCATION.to_owned()],
            };
            ((), info)
        })
    }

    fn list(&self, visit: &mut dyn FnMut(&str, &str)) {
        visit("d0", "root");
    }
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let Some((&choice, bytes)) = data.split_first() else {
        return;
    };
    let style = match choice & 3 {
        0 => Style::Simple,
        1 => Style::Structured,
        _ => Style::Extended,
    };
    match choice & 0x80 {
        0 if choice & 0x40 != 0 => serve(Tls::Required, bytes),
        0 => serve(Tls::Refused, bytes),
        _ => connect(style, bytes),
    }
}

fn serve(tls: Tls, mut bytes: &[u8]) {
    let mut handshake = Handshake::new(tls);
    let mut output = Vec::new();
    loop {
        let before = output.len();
        let (used, step) = handshake.receive(bytes, &One, &mut output);
        assert!(output.len() - before <= OUTPUT_MAX, "output is bounded");
        bytes = &bytes[used..];
        match step {
            Step::More => return assert!(bytes.is_empty(), "all bytes are used"),
            Step::Answered => assert!(used > 0, "an option has bytes"),
            Step::Transmission(session) => return transmit(&session, bytes),
            // The rest would arrive through TLS.
            Step::StartTls => return assert!(bytes.is_empty(), "no plain byte follows"),
            Step::Aborted | Step::Violated(_) => return,
        }
    }
}

fn transmit(session: &Session<()>, mut bytes: &[u8]) {
    let style = session.style;
    let rules = Rules {
        style,
        flags: session.info.flags,
        minimum_block: session.info.block_sizes.minimum,
        has_contexts: !session.contexts.is_empty(),
    };
    while let Ok(Some(request)) = Request::decode(bytes, style) {
        bytes = &bytes[Request::header_length(style)..];
        let Ok(payload) = request.payload(style) else {
            return;
        };
        bytes = bytes.get(payload as usize..).unwrap_or_default();
        match request.check(&rules, SIZE) {
            Err(_) | Ok(Action::Flush) => {}
            Ok(Action::Disconnect) => return,
            Ok(action) => {
                assert!(request.length <= SIZE && request.offset <= SIZE - request.length);
                assert_eq!((request.offset | request.length) % 512, 0);
                if let Action::Write { .. } = action {
                    assert_eq!(u64::from(payload), request.length);
                }
            }
        }
    }
}

fn connect(style: Style, bytes: &[u8]) {
    let mut handshake = client::Handshake::new(Wanted {
        export: "d0".to_owned(),
        style,
        contexts: vec![BASE_ALLOCATION.to_owned()],
    });
    let mut input = greeting();
    input.extend_from_slice(bytes);
    let Ok((used, client::Step::Open(session))) = handshake.receive(&input, &mut Vec::new()) else {
        return;
    };
    receive(&session, &input[used..]);
}

/// Passes replies to a client with a read, a request for extents and a flush in flight.
fn receive(session: &client::Session, mut bytes: &[u8]) {
    let context = session.contexts.first().map(|(id, _)| *id);
    let mut transmission = Transmission::new(session.style, context);
    let mut output = Vec::new();
    for (slot, command) in [command::READ, command::BLOCK_STATUS, command::FLUSH]
        .into_iter()
        .enumerate()
    {
        let request = Request {
            flags: 0,
            command,
            cookie: 0,
            offset: 4096,
            length: READ_BYTES,
        };
        transmission.begin(slot as u32, request, &mut output);
    }
    let mut data = 0;
    while let Ok(event) = transmission.next(&mut bytes) {
        match event {
            Event::More => return assert!(bytes.is_empty(), "all bytes are used"),
            Event::Data { slot, at, length } => {
                bytes = &bytes[length..];
                data += length as u64;
                assert!(slot == 0 && at <= READ_BYTES && length as u64 <= READ_BYTES - at);
            }
            Event::Zeroes { slot, at, length } => {
                data += length;
                assert!(slot == 0 && at <= READ_BYTES && length <= READ_BYTES - at);
            }
            Event::Status { slot, descriptors } => {
                assert!(slot == 1 && descriptors.iter().all(|one| one.length > 0));
            }
            Event::Done { slot, result } => {
                assert!(slot < 3);
                assert!(slot > 0 || result.is_err() || data == READ_BYTES);
            }
        }
        assert!(data <= READ_BYTES, "no byte arrives twice");
    }
}
