//! Connections against a RAM disk: data, rules of requests, limits against hostile clients, and removal.

mod common;

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::{DirtyBitmap, FrozenBitmap};
use common::{Client, Rig};
use nbd::client::{Content, content};
use nbd::request::Request;
use nbd::wire::{ALLOCATION_DEPTH, BASE_ALLOCATION, PAYLOAD_MAX, command, command_flag};
use nbd::{ErrorCode, Style};
use nbd_server::{DirtyContext, ServerLimits};

const SIZE: u64 = 1 << 20;
const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

fn rig() -> Rig {
    Rig::new(SIZE, ServerLimits::default())
}

fn payload_flag(style: Style) -> u16 {
    match style {
        Style::Extended => command_flag::PAYLOAD_LEN,
        Style::Simple | Style::Structured => 0,
    }
}

#[test]
fn random_requests_match_a_model() {
    let rig = rig();
    let mut model = vec![0; SIZE as usize];
    for style in STYLES {
        let mut client = rig.open("d0", style);
        let mut random = fastrand::Rng::with_seed(0x9e37_79b9_7f4a_7c15);
        for step in 0..600u64 {
            let length = (1 + random.u64(..160)) * 512;
            let offset = random.u64(..(SIZE - length) / 512) * 512;
            let range = offset as usize..(offset + length) as usize;
            match random.u64(..5) {
                0 | 1 => {
                    let data: Vec<u8> = (0..length).map(|at| (at ^ step) as u8).collect();
                    let fua = (step % 2) as u16;
                    let flags = payload_flag(style) | fua;
                    let done = client.ask(command::WRITE, flags, (offset, length), &data);
                    assert_eq!(done, Ok(Vec::new()));
                    model[range].copy_from_slice(&data);
                }
                2 => {
                    let flags = [0, command_flag::NO_HOLE, command_flag::FUA][step as usize % 3];
                    let done = client.ask(command::WRITE_ZEROES, flags, (offset, length), &[]);
                    assert!(done.is_ok());
                    model[range].fill(0);
                }
                _ => {
                    let read = client.ask(command::READ, 0, (offset, length), &[]);
                    assert!(read.unwrap() == model[range], "{style:?} {offset} {length}");
                }
            }
        }
        assert!(client.ask(command::FLUSH, 0, (0, 0), &[]).is_ok());
    }
}

#[test]
fn pipelined_requests_are_all_answered() {
    let rig = rig();
    let mut client = rig.open("d0", Style::Structured);
    let requests: u64 = 2000;
    let mut bytes = Vec::new();
    for cookie in 0..requests {
        let request = Request {
            flags: 0,
            command: command::READ,
            cookie,
            offset: cookie % 256 * 4096,
            length: 4096,
        };
        request.encode(Style::Structured, &mut bytes);
    }
    let mut writer = client.stream.try_clone().unwrap();
    let sending = std::thread::spawn(move || writer.write_all(&bytes).unwrap());
    let mut answered = vec![false; requests as usize];
    let mut reply = vec![0; 20 + 8 + 4096];
    for _ in 0..requests {
        client.stream.read_exact(&mut reply).unwrap();
        let cookie = u64::from_be_bytes(reply[8..16].try_into().unwrap());
        assert!(!std::mem::replace(&mut answered[cookie as usize], true));
    }
    sending.join().unwrap();
}

/// Each block status may examine many extents, so one of them is executed per iteration.
#[test]
fn many_block_statuses_yield_to_other_requests() {
    const STATUSES: u64 = 100;
    let rig = rig();
    let mut client = rig.open("d0", Style::Structured);
    let mut bytes = Vec::new();
    for cookie in 0..=STATUSES {
        let request = Request {
            flags: 0,
            command: match cookie {
                STATUSES => command::FLUSH,
                _ => command::BLOCK_STATUS,
            },
            cookie,
            offset: 0,
            length: if cookie == STATUSES { 0 } else { SIZE },
        };
        request.encode(Style::Structured, &mut bytes);
    }
    client.stream.write_all(&bytes).unwrap();
    let mut order = Vec::new();
    for _ in 0..=STATUSES {
        let mut header = [0; 20];
        client.stream.read_exact(&mut header).unwrap();
        order.push(u64::from_be_bytes(header[8..16].try_into().unwrap()));
        let length = u32::from_be_bytes(header[16..].try_into().unwrap());
        let mut payload = vec![0; length as usize];
        client.stream.read_exact(&mut payload).unwrap();
    }
    let flush = order.iter().position(|cookie| *cookie == STATUSES);
    assert!(flush.is_some_and(|at| at < 50), "{order:?}");
}

#[test]
fn requests_that_break_a_rule_fail_alone() {
    let rig = rig();
    rig.add("ro", true);
    for style in STYLES {
        let mut client = rig.open("d0", style);
        let too_long = match style {
            Style::Simple => ErrorCode::Invalid,
            Style::Structured | Style::Extended => ErrorCode::Overflow,
        };
        let data = vec![1; 1024];
        let write = payload_flag(style);
        let mut fails = |command, flags, range, payload: &[u8], code| {
            let result = client.ask(command, flags, range, payload);
            assert_eq!(result, Err(code), "{style:?} {command} {range:?}");
        };
        fails(command::READ, 0, (1, 512), &[], ErrorCode::Invalid);
        fails(command::READ, 0, (SIZE, 512), &[], ErrorCode::Invalid);
        fails(
            command::WRITE,
            write,
            (SIZE - 512, 1024),
            &data,
            ErrorCode::NoSpace,
        );
        fails(
            command::WRITE,
            write,
            (100, 1024),
            &data,
            ErrorCode::Invalid,
        );
        fails(
            command::WRITE,
            write | 0x40,
            (0, 1024),
            &data,
            ErrorCode::Invalid,
        );
        fails(command::TRIM, 0, (0, SIZE + 512), &[], ErrorCode::Invalid);
        fails(
            command::WRITE_ZEROES,
            0,
            (0, SIZE + 512),
            &[],
            ErrorCode::NoSpace,
        );
        fails(99, 0, (0, 0), &[], ErrorCode::Invalid);
        let fast = command_flag::FAST_ZERO | command_flag::NO_HOLE;
        fails(
            command::WRITE_ZEROES,
            fast,
            (0, 512),
            &[],
            ErrorCode::NotSupported,
        );
        if style == Style::Extended {
            let flag = command_flag::PAYLOAD_LEN;
            fails(command::READ, flag, (0, 512), &[0; 512], ErrorCode::Invalid);
        }
        // Only a large disk can be asked for more than the maximum payload.
        let large = Rig::new(2 * u64::from(PAYLOAD_MAX), ServerLimits::default());
        let mut other = large.open("d0", style);
        let range = (0, u64::from(PAYLOAD_MAX) + 512);
        assert_eq!(other.ask(command::READ, 0, range, &[]), Err(too_long));
        let whole = (0, u64::from(PAYLOAD_MAX));
        assert!(other.ask(command::READ, 0, whole, &[]).is_ok());
        // The connection still works, also for empty requests and hints.
        for command in [command::READ, command::TRIM, command::CACHE] {
            assert!(client.ask(command, 0, (0, 0), &[]).is_ok());
        }
        assert_eq!(
            client.ask(command::READ, 0, (0, 512), &[]).unwrap().len(),
            512
        );
        let mut reader = rig.open("ro", style);
        let refused = reader.ask(command::WRITE, write, (0, 1024), &data);
        assert_eq!(refused, Err(ErrorCode::Perm));
        assert!(reader.ask(command::READ, 0, (0, 512), &[]).is_ok());
    }
}

#[test]
fn block_status_shows_holes() {
    let rig = rig();
    for style in [Style::Structured, Style::Extended] {
        let mut client = rig.open("d0", style);
        let write = payload_flag(style);
        assert!(client.ask(command::TRIM, 0, (0, SIZE), &[]).is_ok());
        let range = (64 << 10, 4096);
        assert!(client.ask(command::WRITE, write, range, &[1; 4096]).is_ok());
        let mut status = |flags, range| {
            let payload = client
                .ask(command::BLOCK_STATUS, flags, range, &[])
                .unwrap();
            let kind = if style == Style::Extended { 6 } else { 5 };
            let Ok(Content::BlockStatus { descriptors, .. }) = content(kind, &payload) else {
                panic!("{payload:x?}");
            };
            let pairs = descriptors.iter();
            pairs.map(|one| (one.length, one.flags)).collect::<Vec<_>>()
        };
        let rest = SIZE - (64 << 10) - 4096;
        let all = [(64 << 10, 3), (4096, 0), (rest, 3)];
        assert_eq!(status(0, (0, SIZE)), all);
        let one = command_flag::REQ_ONE;
        assert_eq!(status(one, (0, 1024)), [(1024, 3)]);
    }
}

/// Writes every second page of the first `pages`, in extents of one page.
fn fragment(client: &mut Client, pages: u64) {
    let flags = payload_flag(client.session.style);
    for page in (0..pages).step_by(2) {
        let range = (page * 4096, 4096);
        let written = client.ask(command::WRITE, flags, range, &[1; 4096]);
        assert!(written.is_ok());
    }
}

/// One I/O on the disk finds 256 extents. Some clients expect the status of their whole range in one reply.
#[test]
fn a_status_continues_beyond_the_extents_of_one_io() {
    let rig = Rig::new(64 << 20, ServerLimits::default());
    for style in [Style::Structured, Style::Extended] {
        let mut client = rig.open("d0", style);
        fragment(&mut client, 600);
        let found = &client.status(0, (0, 64 << 20))[0];
        let lengths = found.iter().map(|(length, _)| length);
        assert_eq!((found.len(), lengths.sum()), (600, 64u64 << 20));
        assert_eq!(found[..2], [(4096, 0), (4096, 3)]);
    }
}

/// Some clients advance by the length of the last context, and would miss data of the others.
#[test]
fn all_contexts_of_a_status_cover_the_same_range() {
    const MIB: u64 = 1 << 20;
    const BYTES: u64 = 2 * MIB;
    let rig = Rig::new(BYTES, ServerLimits::default());
    let file = tempfile::tempfile().unwrap();
    file.set_len(DirtyBitmap::file_bytes(BYTES)).unwrap();
    let bitmap = DirtyBitmap::map(&file, BYTES).unwrap();
    bitmap.mark(MIB, 1);
    let bits = Arc::new(FrozenBitmap::copy(&bitmap, BYTES).unwrap());
    let name = "mon".to_owned();
    rig.add_dirty("dirty", DirtyContext { name, bits });
    let contexts = [BASE_ALLOCATION, ALLOCATION_DEPTH, "qemu:dirty-bitmap:mon"];
    for style in [Style::Structured, Style::Extended] {
        let mut client = Client::open_with(rig.stream(), "dirty", style, &contexts).unwrap();
        fragment(&mut client, BYTES / 4096);
        let status = client.status(0, (0, BYTES));
        let lengths = status.iter();
        let lengths = lengths.map(|one| one.iter().map(|(length, _)| length).sum());
        assert_eq!(lengths.collect::<Vec<u64>>(), [BYTES; 3]);
        assert_eq!(status[1][..2], [(4096, 1), (4096, 0)]);
        assert_eq!(status[2], [(MIB, 0), (65536, 1), (MIB - 65536, 0)]);
        // The first extent of the bitmap is longer than the others.
        let first = client.status(command_flag::REQ_ONE, (0, BYTES));
        assert_eq!(first, [[(4096, 0)], [(4096, 1)], [(4096, 0)]]);
    }
}

#[test]
fn removed_export_leaves_the_listeners_of_new_exports() {
    const TURNS: usize = 100;
    let rig = rig();
    std::thread::scope(|scope| {
        for name in ["a", "b"] {
            let rig = &rig;
            scope.spawn(move || (0..TURNS).for_each(|_| rig.add_and_remove(name)));
        }
    });
}

#[test]
fn sessions_begin_and_end() {
    let rig = rig();
    let mut client = rig.open("d0", Style::Simple);
    client.ask(command::READ, 0, (0, 512), &[]).unwrap();
    let sessions = rig.server.sessions();
    assert_eq!((sessions.len(), &*sessions[0].export), (1, "d0"));
    assert_eq!(sessions[0].counters.requests(), 1);
    // A client that leaves gets the replies of its requests first.
    let request = |command, length| Request {
        flags: 0,
        command,
        cookie: 9,
        offset: 0,
        length,
    };
    client.send(request(command::READ, 1 << 19), &[]);
    client.send(request(command::DISC, 0), &[]);
    assert_eq!(client.reply(9, 1 << 19).unwrap().1.len(), 1 << 19);
    assert!(client.is_closed());
    wait(|| rig.server.sessions().is_empty());
    // The server can end a session, and a removed export ends all of its own.
    let mut first = rig.open("d0", Style::Simple);
    let mut second = rig.open("d0", Style::Simple);
    let number = rig.server.sessions()[0].number;
    assert!(rig.server.end_session(number) && !rig.server.end_session(number + 100));
    assert!(first.is_closed());
    assert!(rig.server.remove_export("d0"));
    assert!(second.is_closed() && !rig.socket.exists());
}

#[track_caller]
fn wait(mut is_done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !is_done() {
        assert!(Instant::now() < until, "not in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn silent_clients_are_dropped() {
    let rig = Rig::new(
        64 << 20,
        ServerLimits {
            handshake_time: Duration::from_millis(200),
            silent_time: Duration::from_millis(300),
            ..ServerLimits::default()
        },
    );
    let mut silent = rig.stream();
    let mut greeting = Vec::new();
    silent.read_to_end(&mut greeting).unwrap();
    assert_eq!(greeting.len(), 18);
    // A client that sends part of a write, one that reads none of its replies, and one without requests.
    let mut within = rig.open("d0", Style::Simple);
    let mut unread = rig.open("d0", Style::Simple);
    let mut idle = rig.open("d0", Style::Simple);
    let request = |command, length| Request {
        flags: 0,
        command,
        cookie: 1,
        offset: 0,
        length,
    };
    within.send(request(command::WRITE, 1 << 20), &[0; 5000]);
    for _ in 0..4 {
        unread.send(request(command::READ, 16 << 20), &[]);
    }
    // One that sends a byte at a time.
    let mut dripping = rig.open("d0", Style::Simple);
    dripping.send(request(command::WRITE, 1 << 20), &[]);
    while dripping.stream.write_all(&[1]).is_ok() {
        std::thread::sleep(Duration::from_millis(5));
    }
    wait(|| rig.server.sessions().len() == 1);
    assert!(within.is_closed());
    assert!(idle.ask(command::READ, 0, (0, 512), &[]).is_ok());
}

#[test]
fn memory_of_a_connection_is_limited() {
    let limits = ServerLimits {
        data_bytes: 1 << 20,
        requests: 4,
        ..ServerLimits::default()
    };
    let rig = Rig::new(16 << 20, limits);
    let mut client = rig.open("d0", Style::Simple);
    let mut writer = client.stream.try_clone().unwrap();
    let sending = std::thread::spawn(move || {
        for cookie in 0..32 {
            let mut bytes = Vec::new();
            let request = Request {
                flags: 0,
                command: command::WRITE,
                cookie,
                offset: 0,
                length: 3 << 20,
            };
            request.encode(Style::Simple, &mut bytes);
            bytes.resize(bytes.len() + (3 << 20), cookie as u8);
            writer.write_all(&bytes).unwrap();
        }
    });
    let mut replies = [0; 32 * 16];
    client.stream.read_exact(&mut replies).unwrap();
    sending.join().unwrap();
}

fn write_of(cookie: u64, length: u64) -> Request {
    Request {
        flags: 0,
        command: command::WRITE,
        cookie,
        offset: 0,
        length,
    }
}

/// 2 MiB for 16 connections, besides 64 KiB for each. One export gets 1.5 MiB of them.
fn little_memory() -> ServerLimits {
    ServerLimits {
        connections: 16,
        total_bytes: 3 << 20,
        floor_bytes: 64 << 10,
        ..ServerLimits::default()
    }
}

#[test]
fn a_client_waits_for_memory_and_others_go_on() {
    let rig = Rig::new(16 << 20, little_memory());
    let mut holders: Vec<Client> = (0..2).map(|_| rig.open("d0", Style::Simple)).collect();
    for holder in &mut holders {
        holder.send(write_of(1, 1 << 20), &[]);
        // The server has read the request.
        holder.stream.write_all(&[2; 4096]).unwrap();
    }
    let mut waiting = rig.open("d0", Style::Simple);
    let mut writer = waiting.stream.try_clone().unwrap();
    let sending = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        write_of(1, 8 << 20).encode(Style::Simple, &mut bytes);
        bytes.resize(bytes.len() + (8 << 20), 3);
        writer.write_all(&bytes).unwrap();
    });
    let mut small = rig.open("d0", Style::Simple);
    for _ in 0..100 {
        assert!(small.ask(command::READ, 0, (0, 64 << 10), &[]).is_ok());
    }
    assert!(!sending.is_finished(), "the server reads without memory");
    for holder in &mut holders {
        holder.stream.write_all(&[2; (1 << 20) - 4096]).unwrap();
        assert!(holder.reply(1, 0).is_ok());
    }
    assert!(waiting.reply(1, 0).is_ok());
    sending.join().unwrap();
}

/// A disk that does not answer keeps the memory of its requests. Clients that never send their data stand for it.
#[test]
fn a_hung_export_leaves_memory_to_others() {
    let rig = Rig::new(16 << 20, little_memory());
    rig.add("d1", false);
    let mut hung: Vec<Client> = (0..6).map(|_| rig.open("d0", Style::Simple)).collect();
    for client in &mut hung {
        client.send(write_of(1, 1 << 20), &[]);
        client.stream.write_all(&[2; 4096]).unwrap();
    }
    // The daemon has read as much as it has memory for.
    let mut small = rig.open("d0", Style::Simple);
    assert!(small.ask(command::READ, 0, (0, 512), &[]).is_ok());
    let mut healthy: Vec<Client> = (0..4).map(|_| rig.open("d1", Style::Simple)).collect();
    for round in 0..8 {
        for client in &mut healthy {
            let data = vec![round; 4 << 20];
            let done = client.ask(command::WRITE, 0, (0, 4 << 20), &data);
            assert!(done.is_ok());
        }
    }
    assert_eq!(rig.server.sessions().len(), 11);
}

#[test]
fn clients_that_send_no_data_cannot_keep_memory_from_others() {
    let limits = ServerLimits {
        shortage_time: Duration::from_millis(100),
        ..little_memory()
    };
    let rig = Rig::new(16 << 20, limits);
    let mut hostile: Vec<Client> = (0..10).map(|_| rig.open("d0", Style::Simple)).collect();
    for client in &mut hostile {
        client.send(write_of(1, 8 << 20), &[]);
    }
    let mut good = rig.open("d0", Style::Simple);
    let data = vec![1; 4 << 20];
    let written = good.ask(command::WRITE, 0, (0, 4 << 20), &data);
    assert!(written.is_ok());
    assert!(rig.server.sessions().len() < 11);
    let sessions = rig.server.sessions();
    let good = sessions.iter().map(|session| session.counters.requests());
    assert_eq!(good.sum::<u64>(), 1);
}

#[test]
fn idle_clients_keep_no_memory_that_others_need() {
    let rig = Rig::new(16 << 20, little_memory());
    let mut clients: Vec<Client> = (0..4).map(|_| rig.open("d0", Style::Simple)).collect();
    for _ in 0..2 {
        for client in &mut clients {
            let data = vec![1; 1 << 20];
            let done = client.ask(command::WRITE, 0, (0, 1 << 20), &data);
            assert!(done.is_ok());
        }
    }
}

#[test]
fn hostile_bytes_end_their_own_connection() {
    let rig = rig();
    let mut good = rig.open("d0", Style::Structured);
    let mut random = fastrand::Rng::with_seed(88_172_645_463_325_252);
    for round in 0..50 {
        let mut stream = rig.stream();
        let mut bytes = vec![0, 0, 0, 3];
        bytes.extend((0..random.u64(..3000)).map(|_| round));
        stream.write_all(&bytes).ok();
        drop(stream);
        let mut client = rig.open("d0", Style::Simple);
        let junk: Vec<u8> = (0..64).map(|_| random.u64(..256) as u8).collect();
        client.stream.write_all(&junk).unwrap();
        assert!(client.is_closed());
    }
    let mut client = rig.open("d0", Style::Simple);
    let request = Request {
        flags: 0,
        command: command::WRITE,
        cookie: 1,
        offset: 0,
        length: u64::from(PAYLOAD_MAX) + 512,
    };
    client.send(request, &[]);
    assert!(client.is_closed());
    assert!(rig.server.violations() >= 50);
    assert!(good.ask(command::READ, 0, (0, 512), &[]).is_ok());
    wait(|| rig.server.sessions().len() == 1);
}

#[test]
fn connections_are_limited() {
    let limits = ServerLimits {
        connections: 2,
        ..ServerLimits::default()
    };
    let rig = Rig::new(SIZE, limits);
    let mut open: Vec<Client> = (0..2).map(|_| rig.open("d0", Style::Simple)).collect();
    assert!(Client::open(rig.stream(), "d0", Style::Simple).is_none());
    for client in &mut open {
        assert!(client.ask(command::READ, 0, (0, 512), &[]).is_ok());
    }
    drop(open);
    wait(|| Client::open(rig.stream(), "d0", Style::Simple).is_some());
}

#[test]
fn tcp_clients_leave_connections_to_unix_sockets() {
    let limits = ServerLimits {
        connections: 2,
        unix_connections: 1,
        ..ServerLimits::default()
    };
    let rig = Rig::new(SIZE, limits);
    let address = rig.add_tcp("d1");
    let mut first = std::net::TcpStream::connect(address).unwrap();
    let mut greeting = [0; 18];
    first.read_exact(&mut greeting).unwrap();
    let mut second = std::net::TcpStream::connect(address).unwrap();
    assert_eq!(second.read(&mut greeting).unwrap_or(0), 0, "refused");
    assert!(Client::open(rig.stream(), "d0", Style::Simple).is_some());
}

#[test]
fn a_further_handshake_ends_the_oldest() {
    let limits = ServerLimits {
        half_open: 2,
        ..ServerLimits::default()
    };
    let rig = Rig::new(SIZE, limits);
    let since = Instant::now();
    let mut half_open: Vec<_> = (0..3).map(|_| rig.stream()).collect();
    let mut greeting = Vec::new();
    half_open[0].read_to_end(&mut greeting).ok();
    assert!(since.elapsed() < Duration::from_secs(10));
}
