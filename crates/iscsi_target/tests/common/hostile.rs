//! Initiators that violate the protocol, byte by byte. Used against a server in the same process and against a running daemon, so the
//! cases need only an address.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use scsi::cdb::cdb10;

const TARGET: &str = "iqn.2026-11.org.example:t0";
const NOP_IN: u8 = 0x20;
const RESPONSE: u8 = 0x21;
const DATA_IN: u8 = 0x25;
const R2T: u8 = 0x31;
const REJECT: u8 = 0x3f;

/// Builds a header: opcode, flags, data segment length, ITT, and words from byte 20 on.
fn header(opcode: u8, flags: u8, length: u32, itt: u32, words: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; 48];
    (bytes[0], bytes[1]) = (opcode, flags);
    bytes[5..8].copy_from_slice(&length.to_be_bytes()[1..]);
    bytes[16..20].copy_from_slice(&itt.to_be_bytes());
    for (at, word) in words.iter().enumerate() {
        bytes[20 + 4 * at..24 + 4 * at].copy_from_slice(&word.to_be_bytes());
    }
    bytes
}

fn login_request(flags: u8, text: &str) -> Vec<u8> {
    let mut bytes = header(0x43, flags, text.len() as u32, 1, &[0, 1, 0]);
    bytes[8..14].copy_from_slice(&[0x80, 0, 0, 0, 9, 9]);
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn raw(portal: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(portal).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    stream
}

/// Logs in with the defaults of the standard; the next CmdSN is 1.
fn logged_in(portal: SocketAddr) -> TcpStream {
    logged_in_with(portal, "")
}

/// Logs in with additional keys; the next CmdSN is 1.
fn logged_in_with(portal: SocketAddr, keys: &str) -> TcpStream {
    let mut stream = raw(portal);
    let text = format!(
        "InitiatorName=iqn.2026-11.org.example:bad\0TargetName={TARGET}\0SessionType=Normal\0{keys}"
    );
    stream.write_all(&login_request(0x87, &text)).unwrap();
    let answer = receive(&mut stream).unwrap();
    assert_eq!((answer[0], answer[36]), (0x23, 0), "login");
    stream
}

/// Returns the header of the next PDU and skips its data. `None`: closed.
fn receive(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 48];
    match stream.read_exact(&mut bytes) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("no answer"),
        Err(_) => return None,
    }
    let length = u32::from_be_bytes([0, bytes[5], bytes[6], bytes[7]]);
    let mut data = vec![0; (length as usize).next_multiple_of(4)];
    stream.read_exact(&mut data).ok()?;
    Some(bytes)
}

/// Reads until a PDU with this opcode.
fn expect(stream: &mut TcpStream, opcode: u8) -> Vec<u8> {
    loop {
        let pdu = receive(stream).unwrap_or_else(|| panic!("closed instead of {opcode:#x}"));
        if pdu[0] == opcode {
            return pdu;
        }
    }
}

fn expect_close(stream: &mut TcpStream) {
    while receive(stream).is_some() {}
}

/// Builds a SCSI command: flags 0xa0 for a write without unsolicited data, 0xc0 for a read.
fn command(flags: u8, itt: u32, cmd_sn: u32, expected: u32, cdb: &[u8]) -> Vec<u8> {
    let mut bytes = header(0x01, flags, 0, itt, &[expected, cmd_sn, 0]);
    bytes[32..32 + cdb.len()].copy_from_slice(cdb);
    bytes
}

/// Outside of the region that the other session verifies.
const ELSEWHERE: u32 = 32_760;

fn write10(itt: u32, cmd_sn: u32) -> Vec<u8> {
    command(0xa0, itt, cmd_sn, 4096, &cdb10(0x2a, ELSEWHERE, 8))
}

fn data_out(itt: u32, ttt: u32, data_sn: u32, offset: u32, length: u32, last: bool) -> Vec<u8> {
    let flags = if last { 0x80 } else { 0 };
    let mut bytes = header(0x05, flags, length, itt, &[ttt, 0, 0, 0, data_sn, offset]);
    bytes.resize(48 + length as usize, 0xee);
    bytes
}

/// Logs in and consumes the unit attention; the next CmdSN is 2.
fn settled(portal: SocketAddr) -> TcpStream {
    let mut stream = logged_in(portal);
    stream.write_all(&command(0x80, 1, 1, 0, &[0; 6])).unwrap();
    expect(&mut stream, RESPONSE);
    stream
}

fn with_ahs(length: u8, ahs: &[u8]) -> Vec<u8> {
    let mut bytes = write10(5, 2);
    bytes[4] = length;
    bytes.extend_from_slice(ahs);
    bytes
}

fn nop(itt: u32, cmd_sn: u32) -> Vec<u8> {
    header(0x40, 0x80, 0, itt, &[0xffff_ffff, cmd_sn, 0])
}

/// Name and function of a case.
pub type Case = (&'static str, fn(SocketAddr));

/// Returns all cases.
#[allow(clippy::too_many_lines, reason = "a table of cases")]
pub fn cases() -> Vec<Case> {
    vec![
        ("half a header", |portal| {
            raw(portal).write_all(&[0x43, 0x87, 0, 0, 0]).unwrap();
        }),
        ("half a header after login", |portal| {
            let mut stream = settled(portal);
            stream.write_all(&write10(5, 2)[..31]).unwrap();
        }),
        ("another PDU before login", |portal| {
            let mut stream = raw(portal);
            stream.write_all(&write10(1, 1)).unwrap();
            expect_close(&mut stream);
        }),
        ("login with the longest data segment", |portal| {
            let mut stream = raw(portal);
            let mut bytes = login_request(0x87, "");
            bytes[5..8].copy_from_slice(&[0xff; 3]);
            stream.write_all(&bytes).unwrap();
            expect_close(&mut stream);
        }),
        ("login that never ends its text", |portal| {
            let mut stream = raw(portal);
            let part = login_request(0x44, &"x".repeat(8000));
            for _ in 0..1000 {
                if stream.write_all(&part).is_err() {
                    return;
                }
            }
            expect_close(&mut stream);
        }),
        ("AHS of length zero, and the largest", |portal| {
            let mut stream = settled(portal);
            // AHSLength 0 is too short for any type; 255 words of one
            stream.write_all(&with_ahs(1, &[0, 0, 1, 0])).unwrap();
            expect(&mut stream, REJECT);
            let mut stream = settled(portal);
            stream.write_all(&with_ahs(255, &[0xff; 1020])).unwrap();
            expect(&mut stream, REJECT);
        }),
        ("data segment longer than was declared", |portal| {
            let mut stream = settled(portal);
            // the target declares 256 KiB
            stream
                .write_all(&data_out(5, 0, 0, 0, (256 << 10) + 4, true))
                .ok();
            expect_close(&mut stream);
        }),
        ("header digest that does not match", |portal| {
            let mut stream = logged_in_with(portal, "HeaderDigest=CRC32C\0DataDigest=None\0");
            stream.write_all(&nop(6, 1)).unwrap();
            stream.write_all(&[0xba, 0xad, 0xba, 0xad]).unwrap();
            expect_close(&mut stream);
        }),
        ("data digest that does not match", |portal| {
            let mut stream = logged_in_with(portal, "HeaderDigest=None\0DataDigest=CRC32C\0");
            let mut ping = nop(6, 1);
            ping[7] = 4;
            ping.extend_from_slice(b"ping");
            ping.extend_from_slice(&[0xba, 0xad, 0xba, 0xad]);
            stream.write_all(&ping).unwrap();
            // Reject, "data (payload) digest error" (11.17.1)
            assert_eq!(expect(&mut stream, REJECT)[2], 0x02);
        }),
        ("Data-Out longer than its R2T", |portal| {
            let mut stream = settled(portal);
            stream.write_all(&write10(5, 2)).unwrap();
            let r2t = expect(&mut stream, R2T);
            let ttt = u32::from_be_bytes([r2t[20], r2t[21], r2t[22], r2t[23]]);
            stream
                .write_all(&data_out(5, ttt, 0, 0, 8192, true))
                .unwrap();
            assert_eq!(expect(&mut stream, RESPONSE)[3], 2, "CHECK CONDITION");
        }),
        ("Data-Out out of order", |portal| {
            let mut stream = settled(portal);
            stream.write_all(&write10(5, 2)).unwrap();
            let r2t = expect(&mut stream, R2T);
            let ttt = u32::from_be_bytes([r2t[20], r2t[21], r2t[22], r2t[23]]);
            stream
                .write_all(&data_out(5, ttt, 0, 2048, 2048, false))
                .unwrap();
            stream
                .write_all(&data_out(5, ttt, 1, 0, 2048, true))
                .unwrap();
            assert_eq!(expect(&mut stream, RESPONSE)[3], 2, "CHECK CONDITION");
        }),
        ("Data-Out for an unknown tag", |portal| {
            let mut stream = settled(portal);
            stream
                .write_all(&data_out(77, 99, 0, 0, 512, true))
                .unwrap();
            expect(&mut stream, REJECT);
        }),
        ("tag that is in use", |portal| {
            let mut stream = settled(portal);
            stream.write_all(&write10(5, 2)).unwrap();
            stream.write_all(&write10(5, 3)).unwrap();
            expect(&mut stream, REJECT);
        }),
        ("CmdSN far outside of the window", |portal| {
            let mut stream = settled(portal);
            stream.write_all(&write10(5, 0x7000_0000)).unwrap();
            stream.write_all(&nop(6, 2)).unwrap();
            let answer = expect(&mut stream, NOP_IN);
            assert_eq!(answer[16..20], 6u32.to_be_bytes(), "the command is ignored");
        }),
        ("task that is left with half of its data", |portal| {
            let mut stream = settled(portal);
            stream.write_all(&write10(5, 2)).unwrap();
            let r2t = expect(&mut stream, R2T);
            let ttt = u32::from_be_bytes([r2t[20], r2t[21], r2t[22], r2t[23]]);
            let data = data_out(5, ttt, 0, 0, 4096, true);
            stream.write_all(&data[..3000]).unwrap();
        }),
        ("peer that never reads", |portal| {
            let mut stream = settled(portal);
            stream.set_nonblocking(true).unwrap();
            'sending: for number in 0..100_000u32 {
                let read = command(0xc0, 10 + number, 2 + number, 1 << 17, &cdb10(0x28, 0, 256));
                let mut sent = 0;
                let started = Instant::now();
                while sent < read.len() {
                    match stream.write(&read[sent..]) {
                        Ok(length) => sent += length,
                        // The target has stopped receiving.
                        Err(_) if started.elapsed() > Duration::from_millis(200) => break 'sending,
                        Err(_) => std::thread::yield_now(),
                    }
                }
                // Commands beyond the window are ignored, so the loop needs a limit.
                if number == 20_000 {
                    break;
                }
            }
            stream.set_nonblocking(false).unwrap();
            expect(&mut stream, DATA_IN);
        }),
        ("noise", |portal| {
            let mut random = fastrand::Rng::with_seed(11);
            for round in 0..40 {
                let mut stream = if round % 2 == 0 {
                    raw(portal)
                } else {
                    settled(portal)
                };
                let mut noise = vec![0; random.usize(..5000)];
                random.fill(&mut noise);
                stream.write_all(&noise).ok();
            }
        }),
        ("many silent connections", |portal| {
            let idle: Vec<TcpStream> = (0..300)
                .map(|_| TcpStream::connect(portal).unwrap())
                .collect();
            let mut stream = settled(portal);
            stream.write_all(&nop(6, 2)).unwrap();
            expect(&mut stream, NOP_IN);
            drop(idle);
        }),
    ]
}
