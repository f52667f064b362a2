//! Violations on the socket.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use vhost_user_wire::{REPLY, VERSION};

use super::{Case, LIMIT, accept_refusal, case, connect, ends, refused, state};
use crate::{Channel, Error, Result, request};

pub const CASES: &[Case] = &[
    case("random bytes", random_bytes),
    case("a payload of 4 GiB is announced", |socket| {
        header(socket, [request::SET_FEATURES, VERSION, u32::MAX])
    }),
    case("a payload of 4096 bytes where 8 belong", |socket| {
        let channel = Channel::connect(socket)?;
        channel.send(request::SET_FEATURES, 0, &[0; 4000], &[])?;
        channel.wait_closed(LIMIT)
    }),
    case("no payload where 8 bytes belong", |socket| {
        header(socket, [request::SET_FEATURES, VERSION, 0])
    }),
    case("version 2 of the protocol", |socket| {
        header(socket, [request::GET_FEATURES, 2, 0])
    }),
    case("an answer where a request belongs", |socket| {
        header(socket, [request::GET_FEATURES, VERSION | REPLY, 0])
    }),
    case("request 0", |socket| header(socket, [0, VERSION, 0])),
    case("request 4711", |socket| header(socket, [4711, VERSION, 0])),
    case("request 4711 that wants an answer", |socket| {
        let front_end = connect(socket)?;
        let sent = front_end.acknowledged(4711, &[1; 40], &[]);
        refused(&front_end, sent)
    }),
    case("hang-up amid a header", |socket| {
        Channel::connect(socket)?.send_bytes(&[1, 0, 0], &[])
    }),
    case("hang-up amid a payload", |socket| {
        let front_end = connect(socket)?;
        let words = [request::SET_FEATURES, VERSION, 8];
        let mut bytes = words.map(u32::to_ne_bytes).concat();
        bytes.extend([0; 3]);
        front_end.channel().send_bytes(&bytes, &[])
    }),
    Case {
        name: "silence amid a header",
        slow: true,
        run: |socket| {
            let front_end = connect(socket)?;
            front_end.channel().send_bytes(&[1, 0, 0], &[])?;
            ends(&front_end)
        },
    },
    Case {
        name: "silence amid a payload",
        slow: true,
        run: |socket| {
            let front_end = connect(socket)?;
            let words = [request::SET_FEATURES, VERSION, 8];
            let bytes = words.map(u32::to_ne_bytes).concat();
            front_end.channel().send_bytes(&bytes, &[])?;
            ends(&front_end)
        },
    },
    case("a memory region without its descriptor", |socket| {
        memory_table(socket, 1, 0)
    }),
    case("a memory region with three descriptors", |socket| {
        memory_table(socket, 1, 3)
    }),
    case("a hundred memory regions in one table", |socket| {
        memory_table(socket, 100, 8)
    }),
    case("a memory table of no regions", |socket| {
        memory_table(socket, 0, 0)
    }),
    case(
        "a memory table with a too large count of regions",
        |socket| {
            let front_end = connect(socket)?;
            let message = front_end.memory().message();
            let (request, mut payload, fds) = message.parts();
            payload[0] = 2;
            let sent = front_end.acknowledged(request, &payload, &fds);
            refused(&front_end, sent)
        },
    ),
    case("a kick with two descriptors", |socket| {
        with_descriptors(socket, request::SET_VRING_KICK, &0u64.to_ne_bytes(), 2)
    }),
    case(
        "a kick that announces a descriptor and has none",
        |socket| with_descriptors(socket, request::SET_VRING_KICK, &0u64.to_ne_bytes(), 0),
    ),
    case("a descriptor where none belongs", |socket| {
        with_descriptors(socket, request::SET_VRING_NUM, &state(0, 128), 1)
    }),
    case("twenty descriptors where none belongs", |socket| {
        with_descriptors(socket, request::SET_VRING_NUM, &state(0, 128), 20)
    }),
    case("two hundred descriptors where none belongs", |socket| {
        with_descriptors(socket, request::SET_VRING_NUM, &state(0, 128), 200)
    }),
    case(
        "descriptors with the payload and not the header",
        |socket| {
            let front_end = connect(socket)?;
            let file = File::open("/dev/null")?;
            let words = [request::SET_FEATURES, VERSION, 8];
            let channel = front_end.channel();
            channel.send_bytes(&words.map(u32::to_ne_bytes).concat(), &[])?;
            channel.send_bytes(&[0; 8], &[file.as_fd()])?;
            accept_refusal(&front_end, Ok(()))
        },
    ),
    case("a memory region added without its descriptor", |socket| {
        with_descriptors(socket, request::ADD_MEM_REG, &[0; 40], 0)
    }),
    case("feature bits that were never offered", |socket| {
        number(socket, request::SET_FEATURES, u64::MAX)
    }),
    case("protocol feature bits that were never offered", |socket| {
        number(socket, request::SET_PROTOCOL_FEATURES, u64::MAX)
    }),
    case("in-flight tracking that was never offered", |socket| {
        number(socket, 31, 0)
    }),
    case("a configuration field that cannot be written", |socket| {
        config(socket, 0, 0, &[1; 8])
    }),
    case("a write mode and the fields behind it", |socket| {
        config(socket, 32, 2, &[1, 0])
    }),
    case("a configuration write beyond the end", |socket| {
        config(socket, 250, 16, &[0; 16])
    }),
    case("a configuration write far beyond the end", |socket| {
        config(socket, u32::MAX, 1, &[0])
    }),
    case(
        "a configuration write shorter than its size field",
        |socket| config(socket, 32, 200, &[0]),
    ),
    case("a configuration write of nothing", |socket| {
        config(socket, 32, 0, &[])
    }),
    case("a configuration read beyond the end", |socket| {
        // This reply reports an error by an empty payload.
        let front_end = connect(socket)?;
        match front_end.config(200, 100) {
            Ok(_) => Err(Error::Wrong("it was answered".into())),
            Err(refused @ Error::Answer { .. }) => {
                accept_refusal(&front_end, Ok(())).map_err(|_| refused)
            }
            Err(Error::Closed) => Ok(()),
            Err(other) => Err(other),
        }
    }),
];

fn random_bytes(socket: &Path) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(0x1234_5678_9abc_def1);
    for round in 0..20 {
        let channel = Channel::connect(socket)?;
        let mut bytes = [0; 4096];
        random.fill(&mut bytes);
        if round % 2 == 1 {
            // A plausible header, so that the back end reads further.
            bytes[0] %= 43;
            bytes[1..4].fill(0);
            bytes[4..8].copy_from_slice(&VERSION.to_ne_bytes());
            bytes[8] %= 64;
            bytes[9..12].fill(0);
        }
        match channel.send_bytes(&bytes, &[]) {
            Ok(()) | Err(Error::Closed) => {}
            Err(other) => return Err(other),
        }
        channel.wait_closed(LIMIT)?;
    }
    Ok(())
}

fn header(socket: &Path, words: [u32; 3]) -> Result<()> {
    let channel = Channel::connect(socket)?;
    channel.send_bytes(&words.map(u32::to_ne_bytes).concat(), &[])?;
    channel.wait_closed(LIMIT)
}

fn memory_table(socket: &Path, regions: usize, descriptors: usize) -> Result<()> {
    let front_end = connect(socket)?;
    let message = front_end.memory().message();
    let (request, first, fds) = message.parts();
    let mut payload = (regions as u32).to_ne_bytes().to_vec();
    payload.extend([0; 4]);
    for _ in 0..regions {
        payload.extend(&first[8..]);
    }
    let fds = vec![fds[0]; descriptors];
    let sent = front_end.acknowledged(request, &payload, &fds);
    match regions {
        0 => accept_refusal(&front_end, sent),
        _ => refused(&front_end, sent),
    }
}

fn with_descriptors(socket: &Path, request: u32, payload: &[u8], count: usize) -> Result<()> {
    let front_end = connect(socket)?;
    let file = File::open("/dev/null")?;
    let fds: Vec<BorrowedFd<'_>> = vec![file.as_fd(); count];
    let sent = front_end.acknowledged(request, payload, &fds);
    match request {
        // The descriptors are ignored and closed, unless there are more than any message may have.
        request::SET_VRING_NUM => accept_refusal(&front_end, sent),
        _ => refused(&front_end, sent),
    }
}

fn number(socket: &Path, request: u32, number: u64) -> Result<()> {
    let front_end = connect(socket)?;
    let sent = front_end.acknowledged(request, &number.to_ne_bytes(), &[]);
    refused(&front_end, sent)
}

fn config(socket: &Path, offset: u32, size: u32, bytes: &[u8]) -> Result<()> {
    let front_end = connect(socket)?;
    let mut payload = [offset, size, 0].map(u32::to_ne_bytes).concat();
    payload.extend(bytes);
    let sent = front_end.acknowledged(request::SET_CONFIG, &payload, &[]);
    refused(&front_end, sent)
}
