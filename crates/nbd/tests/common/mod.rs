//! A listener with two exports.
#![allow(dead_code, reason = "each test uses a part")]

use nbd::handshake::{Exports, Handshake, Session, Step, Tls, greeting};
use nbd::wire::transmission;
use nbd::{BlockSizes, ExportInfo};

pub struct Two;

pub const SIZE: u64 = 1 << 20;

impl Exports for Two {
    type Export = usize;

    fn find(&self, name: &str) -> Option<(usize, ExportInfo)> {
        let number = ["d0", "d1"].iter().position(|known| *known == name)?;
        Some((
            number,
            ExportInfo {
                name: name.to_owned(),
                description: "root".to_owned(),
                size: SIZE,
                flags: transmission::SEND_FLUSH | transmission::SEND_FUA,
                block_sizes: BlockSizes {
                    minimum: 512,
                    preferred: 4096,
                    maximum_payload: 1 << 25,
                },
                contexts: vec![
                    "base:allocation".to_owned(),
                    "qemu:dirty-bitmap:mon".to_owned(),
                ],
            },
        ))
    }

    fn list(&self, visit: &mut dyn FnMut(&str, &str)) {
        visit("d0", "root");
        visit("d1", "");
    }
}

/// Passes these bytes in pieces to a server. Returns its output without the greeting, and the last step other than [`Step::More`].
pub fn serve(input: &[u8], piece: usize) -> (Vec<u8>, Step<usize>) {
    serve_with(&mut Handshake::new(Tls::Refused), input, piece)
}

/// Passes these bytes in pieces to a handshake, as [`serve`].
pub fn serve_with(handshake: &mut Handshake, input: &[u8], piece: usize) -> (Vec<u8>, Step<usize>) {
    let mut output = Vec::new();
    let mut last = Step::More;
    for piece in input.chunks(piece) {
        let mut rest = piece;
        loop {
            let (used, step) = handshake.receive(rest, &Two, &mut output);
            rest = &rest[used..];
            if step == Step::More {
                break;
            }
            last = step;
            if last != Step::Answered {
                return (output, last);
            }
        }
    }
    (output, last)
}

/// The client side of a handshake with [`Two`], until the export is open on both sides.
pub fn open(
    mut client: nbd::client::Handshake,
) -> Result<(Session<usize>, nbd::client::Session), nbd::client::Failure> {
    let mut server = Handshake::new(Tls::Refused);
    let mut to_client = greeting();
    let mut session = None;
    for _ in 0..64 {
        let mut to_server = Vec::new();
        let (used, step) = client.receive(&to_client, &mut to_server)?;
        to_client.drain(..used);
        if let nbd::client::Step::Open(opened) = step {
            assert!(to_client.is_empty());
            return Ok((session.expect("the server was first"), *opened));
        }
        let mut rest = to_server.as_slice();
        while !rest.is_empty() {
            let (used, step) = server.receive(rest, &Two, &mut to_client);
            rest = &rest[used..];
            match step {
                Step::Transmission(opened) => session = Some(*opened),
                Step::Violated(violation) => return Err(violation.into()),
                Step::More | Step::Answered | Step::StartTls | Step::Aborted => {}
            }
        }
    }
    panic!("the handshake does not end");
}
