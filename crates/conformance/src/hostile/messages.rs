//! Violations on the target.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use vhost_frontend::{Error, request};
use vhost_user_wire::{REPLY, VERSION};

use super::{accept_refusal, closed, connect, ends, refused, state};
use crate::{Target, Test, Verdict};

const fn case(title: &'static str, run: fn(&Target) -> Verdict) -> Test {
    super::case(title, "vhost-user: Message Specification", run)
}

pub const CASES: &[Test] = &[
    case("random bytes", random_bytes),
    case("a payload of 4 GiB is announced", |target| {
        header(target, [request::SET_FEATURES, VERSION, u32::MAX])
    }),
    case("a payload of 4096 bytes where 8 belong", |target| {
        let channel = target.channel()?;
        channel.send(request::SET_FEATURES, 0, &[0; 4000], &[])?;
        closed(target, &channel)
    }),
    case("no payload where 8 bytes belong", |target| {
        header(target, [request::SET_FEATURES, VERSION, 0])
    }),
    case("version 2 of the protocol", |target| {
        header(target, [request::GET_FEATURES, 2, 0])
    }),
    case("an answer where a request belongs", |target| {
        header(target, [request::GET_FEATURES, VERSION | REPLY, 0])
    }),
    case("request 0", |target| header(target, [0, VERSION, 0])),
    case("request 4711", |target| header(target, [4711, VERSION, 0])),
    case("request 4711 that wants an answer", |target| {
        let front_end = connect(target)?;
        let sent = front_end.acknowledged(4711, &[1; 40], &[]);
        refused(target, &front_end, sent)
    }),
    case("hang-up amid a header", |target| {
        Ok(target.channel()?.send_bytes(&[1, 0, 0], &[])?)
    }),
    case("hang-up amid a payload", |target| {
        let front_end = connect(target)?;
        let words = [request::SET_FEATURES, VERSION, 8];
        let mut bytes = words.map(u32::to_ne_bytes).concat();
        bytes.extend([0; 3]);
        Ok(front_end.channel().send_bytes(&bytes, &[])?)
    }),
    Test {
        is_slow: true,
        ..case("silence amid a header", |target| {
            let front_end = connect(target)?;
            front_end.channel().send_bytes(&[1, 0, 0], &[])?;
            ends(target, &front_end)
        })
    },
    Test {
        is_slow: true,
        ..case("silence amid a payload", |target| {
            let front_end = connect(target)?;
            let words = [request::SET_FEATURES, VERSION, 8];
            let bytes = words.map(u32::to_ne_bytes).concat();
            front_end.channel().send_bytes(&bytes, &[])?;
            ends(target, &front_end)
        })
    },
    case("a memory region without its descriptor", |target| {
        memory_table(target, 1, 0)
    }),
    case("a memory region with three descriptors", |target| {
        memory_table(target, 1, 3)
    }),
    case("a hundred memory regions in one table", |target| {
        memory_table(target, 100, 8)
    }),
    case("a memory table of no regions", |target| {
        memory_table(target, 0, 0)
    }),
    case(
        "a memory table with a too large count of regions",
        |target| {
            let front_end = connect(target)?;
            let (request, mut payload, fds) = front_end.memory().message().into_parts();
            payload[0] = 2;
            let sent = front_end.acknowledged(request, &payload, &fds);
            refused(target, &front_end, sent)
        },
    ),
    case("a kick with two descriptors", |target| {
        with_descriptors(target, request::SET_VRING_KICK, &0u64.to_ne_bytes(), 2)
    }),
    case(
        "a kick that announces a descriptor and has none",
        |target| with_descriptors(target, request::SET_VRING_KICK, &0u64.to_ne_bytes(), 0),
    ),
    case("a descriptor where none belongs", |target| {
        with_descriptors(target, request::SET_VRING_NUM, &state(0, 128), 1)
    }),
    case("twenty descriptors where none belongs", |target| {
        with_descriptors(target, request::SET_VRING_NUM, &state(0, 128), 20)
    }),
    case("two hundred descriptors where none belongs", |target| {
        with_descriptors(target, request::SET_VRING_NUM, &state(0, 128), 200)
    }),
    case(
        "descriptors with the payload and not the header",
        |target| {
            let front_end = connect(target)?;
            let file = File::open("/dev/null")?;
            let words = [request::SET_FEATURES, VERSION, 8];
            let channel = front_end.channel();
            channel.send_bytes(&words.map(u32::to_ne_bytes).concat(), &[])?;
            channel.send_bytes(&[0; 8], &[file.as_fd()])?;
            accept_refusal(target, &front_end, Ok(()))
        },
    ),
    case("a memory region added without its descriptor", |target| {
        with_descriptors(target, request::ADD_MEM_REG, &[0; 40], 0)
    }),
    case("feature bits that were never offered", |target| {
        number(target, request::SET_FEATURES, u64::MAX)
    }),
    case("protocol feature bits that were never offered", |target| {
        number(target, request::SET_PROTOCOL_FEATURES, u64::MAX)
    }),
    case("in-flight tracking that was never offered", |target| {
        number(target, 31, 0)
    }),
    case("a configuration field that cannot be written", |target| {
        config(target, 0, 0, &[1; 8])
    }),
    case("a write mode and the fields behind it", |target| {
        config(target, 32, 2, &[1, 0])
    }),
    case("a configuration write beyond the end", |target| {
        config(target, 250, 16, &[0; 16])
    }),
    case("a configuration write far beyond the end", |target| {
        config(target, u32::MAX, 1, &[0])
    }),
    case(
        "a configuration write shorter than its size field",
        |target| config(target, 32, 200, &[0]),
    ),
    case("a configuration write of nothing", |target| {
        config(target, 32, 0, &[])
    }),
    case("a configuration read beyond the end", |target| {
        // This reply reports an error by an empty payload.
        let front_end = connect(target)?;
        match front_end.config(200, 100) {
            Ok(_) => target.tolerated("it was answered"),
            Err(refused @ Error::Answer { .. }) => {
                accept_refusal(target, &front_end, Ok(())).map_err(|_| refused.into())
            }
            Err(Error::Closed) => Ok(()),
            Err(other) => Err(other.into()),
        }
    }),
];

fn random_bytes(target: &Target) -> Verdict {
    let mut random = fastrand::Rng::with_seed(0x1234_5678_9abc_def1);
    for round in 0..20 {
        let channel = target.channel()?;
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
            Err(other) => return Err(other.into()),
        }
        closed(target, &channel)?;
    }
    Ok(())
}

fn header(target: &Target, words: [u32; 3]) -> Verdict {
    let channel = target.channel()?;
    channel.send_bytes(&words.map(u32::to_ne_bytes).concat(), &[])?;
    closed(target, &channel)
}

fn memory_table(target: &Target, regions: usize, descriptors: usize) -> Verdict {
    let front_end = connect(target)?;
    let (request, first, fds) = front_end.memory().message().into_parts();
    let mut payload = (regions as u32).to_ne_bytes().to_vec();
    payload.extend([0; 4]);
    for _ in 0..regions {
        payload.extend(&first[8..]);
    }
    let fds = vec![fds[0]; descriptors];
    let sent = front_end.acknowledged(request, &payload, &fds);
    match regions {
        0 => accept_refusal(target, &front_end, sent),
        _ => refused(target, &front_end, sent),
    }
}

fn with_descriptors(target: &Target, request: u32, payload: &[u8], count: usize) -> Verdict {
    let front_end = connect(target)?;
    let file = File::open("/dev/null")?;
    let fds: Vec<BorrowedFd<'_>> = vec![file.as_fd(); count];
    let sent = front_end.acknowledged(request, payload, &fds);
    match request {
        // The descriptors are ignored and closed, unless there are more than any message may have.
        request::SET_VRING_NUM => accept_refusal(target, &front_end, sent),
        _ => refused(target, &front_end, sent),
    }
}

fn number(target: &Target, request: u32, number: u64) -> Verdict {
    let front_end = connect(target)?;
    let sent = front_end.acknowledged(request, &number.to_ne_bytes(), &[]);
    refused(target, &front_end, sent)
}

fn config(target: &Target, offset: u32, size: u32, bytes: &[u8]) -> Verdict {
    let front_end = connect(target)?;
    let mut payload = [offset, size, 0].map(u32::to_ne_bytes).concat();
    payload.extend(bytes);
    let sent = front_end.acknowledged(request::SET_CONFIG, &payload, &[]);
    refused(target, &front_end, sent)
}
