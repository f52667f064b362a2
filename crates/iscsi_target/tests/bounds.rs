//! Memory limits of a session, and task order while its data is still unsent.

mod common;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use common::{BLOCK, Client, Rig, ram, settings, target};
use iscsi::initiator::{Event, Initiator, Request};
use iscsi::negotiation::{Offer, SessionParameters};
use iscsi_target::{ServerLimits, TargetOptions};
use scsi::cdb::cdb10;

/// Far above the duration of any test.
const LIMIT: Duration = Duration::from_secs(60);
const LARGE: u32 = 256 << 10;

fn client(rig: &Rig, offer: Offer) -> Client {
    client_of(rig, offer, 1)
}

fn client_of(rig: &Rig, mut offer: Offer, connections: u16) -> Client {
    offer.session.max_connections = connections;
    let mut client = Client::login(rig.portal, settings(1, offer), connections.into());
    client.settle();
    client
}

/// Sends queued output and receives nothing.
fn push(client: &mut Client, until: impl Fn() -> bool) {
    let started = Instant::now();
    while !until() {
        client.push();
        std::thread::sleep(Duration::from_millis(1));
        assert!(started.elapsed() < LIMIT, "the rig does not get so far");
    }
}

fn read(lba: u32) -> Request {
    Initiator::read(0, &cdb10(0x28, lba, (LARGE as usize / BLOCK) as u16), LARGE)
}

/// Receives `count` responses.
fn answers(client: &mut Client, count: usize) -> Vec<iscsi::initiator::CommandDone> {
    let mut done = Vec::new();
    client.until(|client| {
        for (_, event) in std::mem::take(&mut client.events) {
            if let Event::Command(one) = event {
                done.push(one);
            }
        }
        done.len() == count
    });
    done
}

#[test]
fn ordered_write_waits_for_data_of_earlier_reads() {
    let rig = Rig::ram();
    let mut client = client(&rig, Offer::default());
    // 8 MiB: more than the socket buffers hold.
    for lba in 0..32u32 {
        let blocks = LARGE as usize / BLOCK;
        let data = vec![0xa5; LARGE as usize];
        assert_eq!(client.write(0, lba * blocks as u32, data).status, 0);
    }
    let blocks = LARGE / BLOCK as u32;
    let reads: Vec<u32> = (0..32)
        .map(|lba| client.initiator.command(0, read(lba * blocks)).unwrap())
        .collect();
    let cdb = cdb10(0x2a, 31 * blocks, 8);
    let ordered = Request {
        attribute: 2,
        ..Initiator::write(0, &cdb, vec![0x5a; 8 * BLOCK])
    };
    client.initiator.command(0, ordered).unwrap();
    let pause = Instant::now();
    // Long enough for the write to overtake, if it could.
    push(&mut client, || pause.elapsed() > Duration::from_millis(200));
    for done in answers(&mut client, 33) {
        assert_eq!(done.status, 0);
        if reads.contains(&done.itt) {
            assert!(done.data.iter().all(|byte| *byte == 0xa5), "changed");
        }
    }
    let now = client.read(0, 31 * blocks, 8);
    assert!(now.data.iter().all(|byte| *byte == 0x5a));
}

#[test]
fn unreceived_reads_have_bounded_memory() {
    let allowed = 1 << 20;
    let limits = ServerLimits {
        data_bytes: allowed,
        ..ServerLimits::default()
    };
    // A delayed disk does not expose its memory, so data is read into buffers.
    let delay = bdev::Delay::new(ram(64), Duration::ZERO);
    let rig = Rig::open(std::sync::Arc::new(delay), target(), limits);
    let mut client = client(&rig, Offer::default());
    for lba in 0..100 {
        client.initiator.command(0, read(lba * 512)).unwrap();
    }
    let pause = Instant::now();
    push(&mut client, || pause.elapsed() > Duration::from_millis(200));
    let held = rig.server.memory_in_use();
    // One buffer beyond the limit, and headers.
    let most = allowed as u64 + 2 * u64::from(LARGE);
    assert!(
        held > 0 && held <= most,
        "{held} bytes held, {most} allowed"
    );
    assert!(
        answers(&mut client, 100)
            .iter()
            .all(|done| done.status == 0)
    );
}

#[test]
fn write_atomic_continues_when_memory_is_available() {
    let limits = ServerLimits {
        data_bytes: 1 << 20,
        ..ServerLimits::default()
    };
    let delay = bdev::Delay::new(ram(64), Duration::ZERO);
    let rig = Rig::open(std::sync::Arc::new(delay), target(), limits);
    let mut offer = Offer::default();
    (offer.session.initial_r2t, offer.session.immediate_data) = (true, false);
    let mut client = client(&rig, offer);
    for lba in 0..60 {
        client.initiator.command(0, read(lba * 512)).unwrap();
    }
    let pause = Instant::now();
    push(&mut client, || pause.elapsed() > Duration::from_millis(200));
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x9c, 8);
    let atomic = Initiator::write(0, &cdb, vec![1; 8 * BLOCK]);
    client.initiator.command(0, atomic).unwrap();
    push(&mut client, || pause.elapsed() > Duration::from_millis(400));
    let all = answers(&mut client, 61);
    assert!(all.iter().all(|done| done.status == 0));
    assert_eq!(client.read(0, 0, 8).data, [1; 8 * BLOCK]);
}

#[test]
fn writes_without_data_have_bounded_memory() {
    let allowed = 1 << 20;
    let limits = ServerLimits {
        data_bytes: allowed,
        ..ServerLimits::default()
    };
    let rig = Rig::open(ram(64), target(), limits);
    let solicited = Offer {
        session: SessionParameters {
            initial_r2t: true,
            immediate_data: false,
            ..Offer::default().session
        },
        ..Offer::default()
    };
    let mut client = client(&rig, solicited);
    for lba in 0..100 {
        let cdb = cdb10(0x2a, lba * 512, (LARGE as usize / BLOCK) as u16);
        let write = Initiator::write(0, &cdb, vec![1; LARGE as usize]);
        client.initiator.command(0, write).unwrap();
    }
    // Sends commands but no Data-Out for R2Ts, because nothing is received.
    let pause = Instant::now();
    push(&mut client, || pause.elapsed() > Duration::from_millis(200));
    let held = rig.server.memory_in_use();
    let most = allowed as u64 + 2 * u64::from(LARGE);
    assert!(held <= most, "{held} bytes held, {most} allowed");
    assert!(
        answers(&mut client, 100)
            .iter()
            .all(|done| done.status == 0)
    );
}

/// The working memory of commands is not proportional to their transfer length: VERIFY transfers nothing.
#[test]
fn commands_that_work_in_memory_work_in_no_more_than_is_allowed() {
    const TASK_SET_FULL: u8 = 0x28;
    let limits = ServerLimits {
        data_bytes: 4 << 20,
        ..ServerLimits::default()
    };
    let delay = bdev::Delay::new(ram(64), Duration::from_millis(300));
    let rig = Rig::open(std::sync::Arc::new(delay), target(), limits);
    let mut client = client(&rig, Offer::default());
    let verify = |blocks| Initiator::read(0, &cdb10(0x2f, 0, blocks), 0);
    let mebibyte = ((1 << 20) / BLOCK) as u16;
    for _ in 0..40 {
        client.initiator.command(0, verify(mebibyte)).unwrap();
    }
    let all = answers(&mut client, 40);
    let count = |status| all.iter().filter(|done| done.status == status).count();
    let (good, full) = (count(0), count(TASK_SET_FULL));
    assert_eq!(good + full, 40);
    // The memory of one command, and as much again in flight from the disk.
    assert!((1..=2).contains(&good), "{good} at a time");
    // The memory was returned. A command larger than the limit runs alone.
    for blocks in [mebibyte, 8 * mebibyte] {
        assert_eq!(client.run(0, verify(blocks)).status, 0);
    }
}

/// Data uses the session's memory, and the comparison uses as much working memory.
#[test]
fn comparing_command_follows_block_limits() {
    let rig = Rig::open(ram(64), target(), ServerLimits::default());
    let mut client = client(&rig, Offer::default());
    let blocks = (32 << 20) / BLOCK as u32;
    let data: Vec<u8> = (0..32 << 20).map(|at| (at / 700) as u8).collect();
    let [a, b, c, d] = blocks.to_be_bytes();
    // WRITE AND VERIFY(16), VERIFY(16) with BYTCHK, ORWRITE(16); each twice, to check that the memory is returned.
    for (opcode, byte1) in [(0x8e, 0x02), (0x8f, 0x02), (0x8b, 0)] {
        let cdb = [opcode, byte1, 0, 0, 0, 0, 0, 0, 0, 8, a, b, c, d, 0, 0];
        for _ in 0..2 {
            let done = client.run(0, Initiator::write(0, &cdb, data.clone()));
            assert_eq!(done.status, 0, "{opcode:x}h: {:x?}", done.sense);
        }
    }
}

const CONNECTIONS: u16 = 16;

/// Creates a server with this memory limit, and 16 connections of one session on two workers.
fn session_of_sixteen(allowed: usize, offer: Offer) -> (Rig, Client) {
    let limits = ServerLimits {
        data_bytes: allowed,
        ..ServerLimits::default()
    };
    let delay = bdev::Delay::new(ram(64), Duration::ZERO);
    let rig = Rig::open(std::sync::Arc::new(delay), target(), limits);
    let client = client_of(&rig, offer, CONNECTIONS);
    (rig, client)
}

#[test]
fn connections_share_the_memory_of_their_session() {
    let allowed = 4 << 20;
    let (rig, mut client) = session_of_sixteen(allowed, Offer::default());
    // For each connection, far more than its socket buffers hold.
    let length = 2u32 << 20;
    let cdb = cdb10(0x28, 0, (length as usize / BLOCK) as u16);
    for number in 0..112 {
        let request = Initiator::read(0, &cdb, length);
        client
            .initiator
            .command(number % CONNECTIONS, request)
            .unwrap();
    }
    let pause = Instant::now();
    push(&mut client, || pause.elapsed() > Duration::from_millis(300));
    let held = rig.server.memory_in_use();
    // One command beyond the limit, and a header for each connection.
    let most = allowed as u64 + u64::from(length) + u64::from(CONNECTIONS) * 4096;
    assert!(
        held >= allowed as u64 / 2 && held <= most,
        "{held} bytes held, {allowed} allowed"
    );
    // Waiting commands continue when others are done.
    let done = answers(&mut client, 112);
    assert!(done.iter().all(|done| done.status == 0));
    assert!(done.iter().all(|done| done.data.len() == length as usize));
}

#[test]
fn idle_connections_keep_no_memory_of_their_session() {
    const DELAY: Duration = Duration::from_millis(300);
    let limits = ServerLimits {
        data_bytes: 4 << 20,
        ..ServerLimits::default()
    };
    let delay = bdev::Delay::new(ram(64), DELAY);
    let rig = Rig::open(std::sync::Arc::new(delay), target(), limits);
    let mut client = client_of(&rig, Offer::default(), 2);
    let mut reads_at_once = |connection| {
        let length = 1u32 << 20;
        let cdb = cdb10(0x28, 0, (length as usize / BLOCK) as u16);
        let since = Instant::now();
        for _ in 0..4 {
            let request = Initiator::read(0, &cdb, length);
            client.initiator.command(connection, request).unwrap();
        }
        assert!(answers(&mut client, 4).iter().all(|done| done.status == 0));
        since.elapsed()
    };
    let usual = reads_at_once(0);
    let elapsed = reads_at_once(1);
    assert!(
        elapsed < usual + 2 * DELAY,
        "one after the other: {elapsed:?}"
    );
}

#[test]
fn sessions_share_the_memory_of_the_server() {
    let allowed = 4 << 20;
    let limits = ServerLimits {
        data_bytes: allowed,
        total_bytes: allowed,
        ..ServerLimits::default()
    };
    let delay = bdev::Delay::new(ram(64), Duration::ZERO);
    let rig = Rig::open(std::sync::Arc::new(delay), target(), limits);
    let login = |isid| Client::login(rig.portal, settings(isid, Offer::default()), 1);
    let mut clients: Vec<Client> = (1..6).map(login).collect();
    for client in &mut clients {
        client.settle();
        for lba in 0..40 {
            client.initiator.command(0, read(lba * 512)).unwrap();
        }
        let pause = Instant::now();
        push(client, || pause.elapsed() > Duration::from_millis(50));
    }
    let held = rig.server.memory_in_use();
    let most = allowed as u64 + 6 * u64::from(LARGE);
    assert!(held <= most, "{held} bytes held, {most} allowed");
    std::thread::scope(|scope| {
        for client in &mut clients {
            scope.spawn(|| {
                let done = answers(client, 40);
                assert!(done.iter().all(|done| done.status == 0));
            });
        }
    });
}

#[test]
fn started_writes_stay_within_session_memory_and_end() {
    let allowed = 2 << 20;
    let (rig, mut client) = session_of_sixteen(allowed, Offer::default());
    // Twice FirstBurstLength: half of each write is unsolicited. The memory suffices for the solicited half of only some writes.
    let (length, first) = (512 << 10, 256 << 10);
    assert_eq!(Offer::default().session.first_burst_length, first);
    let blocks = (length / BLOCK) as u16;
    let writes = 48;
    for number in 0..writes {
        let cid = (number % u32::from(CONNECTIONS)) as u16;
        let cdb = cdb10(0x2a, number * u32::from(blocks), blocks);
        let write = Initiator::write(0, &cdb, vec![number as u8; length]);
        client.initiator.command(cid, write).unwrap();
    }
    let pause = Instant::now();
    push(&mut client, || pause.elapsed() > Duration::from_millis(300));
    let held = rig.server.memory_in_use();
    let unasked = u64::from(writes) * u64::from(first);
    let most = allowed as u64 + unasked + length as u64 + u64::from(CONNECTIONS) * 4096;
    assert!(
        held >= u64::from(first) && held <= most,
        "{held} bytes held, {most} allowed"
    );
    let done = answers(&mut client, writes as usize);
    assert!(done.iter().all(|done| done.status == 0));
    for number in 0..writes {
        let read = client.read(0, number * u32::from(blocks), 1);
        assert!(read.data.iter().all(|byte| *byte == number as u8));
    }
    assert_eq!(rig.server.memory_in_use(), 0, "all is given back");
}

/// Applies to one command and to a full window.
#[test]
fn long_commands_share_the_budget_of_a_turn() {
    const COMMANDS: u32 = 32;
    const BLOCKS: u32 = 8 << 11;
    let rig = Rig::ram();
    let mut client = client(&rig, Offer::default());
    let iterations = || -> u64 {
        rig.pool
            .counters()
            .iter()
            .map(|(_, iterations)| iterations.busy_iterations)
            .sum()
    };
    let before = iterations();
    for _ in 0..COMMANDS {
        // WRITE SAME(16) of 8 MiB, all of it a pattern
        let mut cdb = [0; 16];
        cdb[0] = 0x93;
        cdb[10..14].copy_from_slice(&BLOCKS.to_be_bytes());
        let write_same = Initiator::write(0, &cdb, vec![7; BLOCK]);
        client.initiator.command(0, write_same).unwrap();
    }
    let all = answers(&mut client, COMMANDS as usize);
    assert!(all.iter().all(|done| done.status == 0));
    // about 4 MiB per iteration
    let iterations = iterations() - before;
    assert!(iterations >= u64::from(COMMANDS), "{iterations} iterations");
}

/// Builds a PDU: opcode, flags, ITT, the word at byte 20 (such as the TTT), and CmdSN.
fn pdu(opcode: u8, flags: u8, itt: u32, word: u32, cmd_sn: u32, text: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 48];
    (bytes[0], bytes[1]) = (opcode, flags);
    bytes[5..8].copy_from_slice(&(text.len() as u32).to_be_bytes()[1..]);
    for (at, word) in [(16, itt), (20, word), (24, cmd_sn)] {
        bytes[at..at + 4].copy_from_slice(&word.to_be_bytes());
    }
    bytes.extend_from_slice(text);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// One receive may contain a thousand text requests of 64 bytes, each answered with a list of all targets.
#[test]
fn unreceived_answers_have_bounded_memory() {
    const TARGETS: usize = 100;
    const REQUESTS: u32 = 900;
    let allowed = 64 << 10;
    let limits = ServerLimits {
        output_bytes: allowed,
        ..ServerLimits::default()
    };
    let rig = Rig::open(ram(16), target(), limits);
    for number in 1..TARGETS {
        let options = TargetOptions {
            name: format!("iqn.2026-11.org.example:t{number}"),
            ..target()
        };
        rig.server.add_target(options, &[]).unwrap();
    }
    let mut stream = rig.connect();
    let keys = b"InitiatorName=iqn.2026-11.org.example:i1\0SessionType=Discovery\0MaxRecvDataSegmentLength=65536\0";
    stream.write_all(&pdu(0x43, 0x87, 1, 0, 1, keys)).unwrap();
    let receive = |stream: &mut std::net::TcpStream| {
        let mut header = [0; 48];
        stream.read_exact(&mut header).unwrap();
        let length = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
        let mut data = vec![0; length.next_multiple_of(4)];
        stream.read_exact(&mut data).unwrap();
        data.truncate(length);
        (header, data)
    };
    let (login, _) = receive(&mut stream);
    assert_eq!((login[0], login[36]), (0x23, 0));
    let asked = |itt| pdu(0x44, 0x80, itt, u32::MAX, 1, b"SendTargets=All\0");
    let all: Vec<u8> = (0..REQUESTS).flat_map(asked).collect();
    stream.write_all(&all).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let held = rig.server.memory_in_use();
    let (_, list) = receive(&mut stream);
    // Requests that were parsed together are answered together.
    let most = allowed + 40 * list.len() as u64;
    assert!(held <= most, "{held} bytes held, {most} allowed");
    for itt in 1..REQUESTS {
        let (header, again) = receive(&mut stream);
        assert_eq!((header[0], &header[16..20]), (0x24, &itt.to_be_bytes()[..]));
        assert!(again == list);
    }
}
