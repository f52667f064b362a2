//! Logical units of a scripted target: LUN formats, several units in one session, and the identity check of another path.
#![forbid(unsafe_code)]

use std::io::{Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use iscsi_initiator::{
    CommandSink, Ended, KnownUnits, Lun, ReconnectSettings, ReconnectingUnit, Session,
    SessionOptions, Unit, UnitAddress, UnitCommand, luns,
};

const TARGET: &str = "iqn.2026-11.org.example:t0";
const OTHER_TARGET: &str = "iqn.2026-11.org.example:t1";
const LUN_0: [u8; 8] = [0; 8];
/// LUN 300 of Linux' LIO, which uses no flat space addressing.
const LUN_300: [u8; 8] = [0x01, 0x2c, 0, 0, 0, 0, 0, 0];
const WRITE_16: u8 = 0x8a;
/// Function code (RFC 7143, 11.5.1).
const ABORT_TASK: u8 = 1;

/// A target with identical units.
#[derive(Clone, Default)]
struct Script {
    /// LUN fields in REPORT LUNS; other units do not exist.
    luns: Vec<[u8; 8]>,
    /// Page 83h without its header.
    designators: Vec<u8>,
    /// Page 80h without its header.
    serial: Vec<u8>,
    /// Operation code that ends its connection.
    fatal: Option<u8>,
    /// Operation code of the command that another initiator's reset ends without a response, the first time.
    reset_during: Option<u8>,
    /// Each login reaches another portal group.
    has_groups: bool,
    seen: Arc<Mutex<Seen>>,
}

/// Requests received by a target.
#[derive(Default)]
struct Seen {
    logins: u32,
    /// LUN field and operation code of each command.
    commands: Vec<([u8; 8], u8)>,
    /// Task management functions.
    functions: Vec<u8>,
    connections: Vec<TcpStream>,
    was_reset: bool,
    /// A unit attention is pending.
    has_attention: bool,
}

impl Script {
    fn with_naa(naa: [u8; 8]) -> Script {
        Script {
            designators: [&[1, 3, 0, 8][..], &naa].concat(),
            ..Script::default()
        }
    }

    /// Serves until the process ends; returns the address of its LUN 0.
    fn serve(&self, target: &str) -> UnitAddress {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let portal = listener.local_addr().expect("its address");
        let script = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let script = script.clone();
                let kept = stream.try_clone().expect("a descriptor");
                script.seen.lock().expect("the log").connections.push(kept);
                // The thread ends when the initiator closes the connection.
                std::thread::spawn(move || script.session(stream).ok());
            }
        });
        let address = format!("iscsi://{portal}/{target}/0");
        address.parse().expect("an address")
    }

    fn session(&self, mut stream: TcpStream) -> Result<()> {
        let mut stat_sn = 1u32;
        loop {
            let mut header = [0; 48];
            stream.read_exact(&mut header)?;
            let length = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
            let mut data = vec![0; length.next_multiple_of(4)];
            stream.read_exact(&mut data)?;
            let mut answer = [0u8; 48];
            answer[16..20].copy_from_slice(&header[16..20]);
            let mut out = Vec::new();
            // The CmdSN of immediate requests is not counted.
            let cmd_sn = u32::from_be_bytes(header[24..28].try_into().expect("four bytes"));
            let expected = cmd_sn + u32::from(header[0] & 0x40 == 0);
            match header[0] & 0x3f {
                // Login Request, Task Management Function Request, Logout Request (RFC 7143, 11).
                0x03 => {
                    answer[..2].copy_from_slice(&[0x23, header[1]]);
                    answer[8..14].copy_from_slice(&header[8..14]);
                    let is_last = header[1] & 0x83 == 0x83;
                    answer[15] = u8::from(is_last);
                    let mut seen = self.seen.lock().expect("the log");
                    let group = 1 + u32::from(self.has_groups) * seen.logins;
                    out = login_keys(header[1], &data, group);
                    seen.logins += u32::from(is_last);
                }
                0x02 => {
                    let function = header[1] & 0x7f;
                    self.seen.lock().expect("the log").functions.push(function);
                    // ABORT TASK: the task does not exist.
                    answer[..3].copy_from_slice(&[0x22, 0x80, u8::from(function == ABORT_TASK)]);
                }
                0x06 => answer[..2].copy_from_slice(&[0x26, 0x80]),
                0x01 => {
                    let lun: [u8; 8] = header[8..16].try_into().expect("eight bytes");
                    let is_ended = self.record(lun, header[32]);
                    if self.fatal == Some(header[32]) {
                        return stream.shutdown(std::net::Shutdown::Both);
                    }
                    if is_ended {
                        continue;
                    }
                    match self.command(lun, &header[32..48]) {
                        Some(data) => {
                            // Data-In with status.
                            out = data;
                            answer[..2].copy_from_slice(&[0x25, 0x81]);
                            answer[20..24].fill(0xff);
                            let asked =
                                u32::from_be_bytes(header[20..24].try_into().expect("four"));
                            let is_read = header[1] & 0x40 != 0;
                            if !is_read {
                                answer[0] = 0x21;
                                answer[1] = 0x80;
                                answer[20..24].fill(0);
                                out.clear();
                            } else if asked as usize > out.len() {
                                answer[1] |= 0x02;
                                let short = asked - out.len() as u32;
                                answer[44..48].copy_from_slice(&short.to_be_bytes());
                            }
                        }
                        None => {
                            answer[..4].copy_from_slice(&[0x21, 0x80, 0, 2]);
                            out = self.sense();
                        }
                    }
                }
                _ => continue,
            }
            answer[24..28].copy_from_slice(&stat_sn.to_be_bytes());
            answer[28..32].copy_from_slice(&expected.to_be_bytes());
            answer[32..36].copy_from_slice(&(expected + 32).to_be_bytes());
            stat_sn += 1;
            answer[5..8].copy_from_slice(&(out.len() as u32).to_be_bytes()[1..]);
            out.resize(out.len().next_multiple_of(4), 0);
            stream.write_all(&[&answer[..], &out].concat())?;
        }
    }

    /// Records a command. Returns true if a reset ends it.
    fn record(&self, lun: [u8; 8], operation: u8) -> bool {
        let mut seen = self.seen.lock().expect("the log");
        seen.commands.push((lun, operation));
        let is_it = self.reset_during == Some(operation) && !seen.was_reset;
        seen.was_reset |= is_it;
        seen.has_attention |= is_it;
        is_it
    }

    /// Returns the sense data of CHECK CONDITION: BUS DEVICE RESET FUNCTION OCCURRED, or LOGICAL UNIT NOT SUPPORTED.
    fn sense(&self) -> Vec<u8> {
        let mut seen = self.seen.lock().expect("the log");
        let [key, code, qualifier] = match std::mem::take(&mut seen.has_attention) {
            true => [6, 0x29, 0x03],
            false => [5, 0x25, 0],
        };
        let mut data = vec![0, 18, 0x70, 0, key, 0, 0, 0, 0, 10];
        data.extend([0, 0, 0, 0, code, qualifier, 0, 0, 0, 0]);
        data
    }

    /// Returns the data of a command with status GOOD; `None` for CHECK CONDITION.
    fn command(&self, lun: [u8; 8], cdb: &[u8]) -> Option<Vec<u8>> {
        if self.seen.lock().expect("the log").has_attention {
            return None;
        }
        if cdb[0] == 0xa0 {
            let length = 8 * self.luns.len() as u32;
            return Some([&length.to_be_bytes()[..], &[0; 4], self.luns.as_flattened()].concat());
        }
        if lun != LUN_0 && !self.luns.contains(&lun) {
            return None;
        }
        let page = |code: u8, data: &[u8]| [&[0, code, 0, data.len() as u8][..], data].concat();
        Some(match (cdb[0], cdb[1], cdb[2]) {
            (0x12, 0, _) => [
                &[0, 0, 6, 2, 31, 0, 0, 2][..],
                b"EXAMPLE Unit            1   ",
            ]
            .concat(),
            (0x12, 1, 0) => page(0, &[0, 0x80, 0x83]),
            (0x12, 1, 0x80) => page(0x80, &self.serial),
            (0x12, 1, 0x83) => page(0x83, &self.designators),
            // 2,048 blocks of 512 bytes.
            (0x9e, 0x10, _) => {
                let mut data = vec![0, 0, 0, 0, 0, 0, 7, 255, 0, 0, 2, 0];
                data.resize(32, 0);
                data
            }
            (0x1a, ..) => vec![3, 0, 0, 0],
            _ => Vec::new(),
        })
    }

    fn has_received(&self, operation: u8) -> bool {
        let seen = self.seen.lock().expect("the log");
        seen.commands.iter().any(|(_, code)| *code == operation)
    }
}

/// Returns the response to the keys of a Login Request.
fn login_keys(flags: u8, data: &[u8], group: u32) -> Vec<u8> {
    if flags >> 2 & 3 == 0 {
        return format!("AuthMethod=None\0TargetPortalGroupTag={group}\0").into_bytes();
    }
    let mut answer = b"MaxRecvDataSegmentLength=262144\0".to_vec();
    for pair in data.split(|byte| *byte == 0) {
        let pair = String::from_utf8_lossy(pair);
        let (key, value) = pair.split_once('=').unwrap_or_default();
        let value = match key {
            "HeaderDigest" | "DataDigest" => "None",
            "InitialR2T" | "DataPDUInOrder" | "DataSequenceInOrder" => "Yes",
            "DefaultTime2Wait" | "DefaultTime2Retain" | "ErrorRecoveryLevel" => "0",
            "MaxConnections" => "1",
            "ImmediateData" | "MaxBurstLength" | "FirstBurstLength" | "MaxOutstandingR2T" => value,
            _ => continue,
        };
        answer.extend(format!("{key}={value}\0").bytes());
    }
    answer
}

fn options() -> SessionOptions {
    SessionOptions {
        timeout: Duration::from_secs(10),
        ..SessionOptions::default()
    }
}

fn log_in(address: &UnitAddress) -> Session {
    Session::login(&address.portal, &address.target, &options()).expect("a session")
}

#[test]
fn units_are_listed_in_one_session_and_reached_in_their_own_format() {
    let script = Script {
        luns: vec![LUN_0, LUN_300],
        ..Script::default()
    };
    let address = script.serve(TARGET);
    let mut session = log_in(&address);
    let list = luns(&mut session).expect("a list");
    let named: Vec<Lun> = list.luns.iter().map(|one| one.lun).collect();
    assert_eq!(named, [Lun::Number(0), Lun::Number(300)]);
    for one in &list.luns {
        let info = Unit::inspect(&mut session, one.field).expect("a unit");
        assert_eq!(info.bytes(), 1 << 20);
    }
    assert_eq!(script.seen.lock().expect("the log").logins, 1);
    let unit = Unit::open(log_in(&address), Lun::Number(300)).expect("LUN 300");
    assert_eq!(unit.info().product, "Unit");
    for missing in [Lun::Number(301), Lun::Field(0x412c << 48)] {
        let opened = Unit::open(log_in(&address), missing);
        let error = opened.err().expect("no such unit").to_string();
        assert!(error.contains("25h/00h"), "{missing}: {error}");
    }
}

/// Opens a unit by two paths: the first leads to `one`, the second to `other`.
fn open(
    one: &UnitAddress,
    other: &UnitAddress,
    trusts_paths: bool,
) -> std::result::Result<ReconnectingUnit, String> {
    open_known(one, other, trusts_paths, KnownUnits::default())
}

/// Opens a disk that has used the known units.
fn open_known(
    one: &UnitAddress,
    other: &UnitAddress,
    trusts_paths: bool,
    known: KnownUnits,
) -> std::result::Result<ReconnectingUnit, String> {
    let settings = ReconnectSettings {
        address: one.clone(),
        paths: vec![other.clone()],
        trusts_paths,
        known,
        session: options(),
        queue_depth: 4,
        replacement_timeout: Duration::from_millis(1500),
    };
    let opened = ReconnectingUnit::open(settings, Box::new(|_| ()));
    opened
        .map(|(unit, _)| unit)
        .map_err(|error| error.to_string())
}

#[test]
fn a_second_path_is_refused_without_an_identity_to_check() {
    let local = [0x30, 0, 0, 1, 0, 0, 0, 1];
    let serial = Script {
        serial: b"S1".to_vec(),
        ..Script::default()
    };
    for (script, other_target, is_refused) in [
        (Script::default(), TARGET, true),
        (Script::default(), OTHER_TARGET, true),
        (Script::with_naa(local), OTHER_TARGET, true),
        (Script::with_naa(local), TARGET, false),
        (
            Script::with_naa([0x50, 1, 0x40, 0x5a, 0, 0, 0, 1]),
            OTHER_TARGET,
            false,
        ),
        (serial, OTHER_TARGET, false),
    ] {
        let (one, other) = (script.serve(TARGET), script.serve(other_target));
        match open(&one, &other, false) {
            Ok(_) => assert!(!is_refused, "{other_target} {:x?}", script.designators),
            Err(error) => {
                assert!(is_refused, "{error}");
                assert!(
                    error.contains(&format!("the path {other} is refused")),
                    "{error}"
                );
                assert!(error.contains("trust_paths = true"), "{error}");
            }
        }
        assert!(open(&one, &other, true).is_ok());
    }
}

struct Sink(mpsc::Sender<Ended>);

impl CommandSink for Sink {
    fn ended(&self, _token: u64, ended: Ended) {
        self.0.send(ended).ok();
    }
}

fn write_block(unit: &ReconnectingUnit) -> mpsc::Receiver<Ended> {
    let (sender, receiver) = mpsc::channel();
    let mut command = UnitCommand {
        out: vec![7; 512],
        repeatable: true,
        ..UnitCommand::default()
    };
    (command.cdb[0], command.cdb[13]) = (WRITE_16, 1);
    unit.submit(command, Arc::new(Sink(sender)), 0);
    receiver
}

#[test]
fn logins_of_a_target_that_ends_each_session_extend_no_timeout() {
    let script = Script {
        fatal: Some(WRITE_16),
        ..Script::with_naa([0x50, 1, 0x40, 0x5a, 0, 0, 0, 1])
    };
    let address = script.serve(TARGET);
    let unit = open(&address, &address, true).expect("a unit");
    let ended = write_block(&unit).recv_timeout(Duration::from_secs(10));
    assert!(matches!(ended, Ok(Ended::Lost)), "{ended:?}");
    assert!(script.seen.lock().expect("the log").logins > 2);
}

/// A session through another portal group does not replace the lost one, whose writes may still be executed.
#[test]
fn unit_is_reset_if_the_portal_group_is_another_one() {
    const LOGICAL_UNIT_RESET: u8 = 5;
    for has_groups in [false, true] {
        let script = Script {
            has_groups,
            ..Script::with_naa([0x50, 1, 0x40, 0x5a, 0, 0, 0, 1])
        };
        let settings = ReconnectSettings {
            address: script.serve(TARGET),
            paths: Vec::new(),
            trusts_paths: false,
            known: KnownUnits::default(),
            session: options(),
            queue_depth: 4,
            replacement_timeout: Duration::from_secs(10),
        };
        let (unit, _) = ReconnectingUnit::open(settings, Box::new(|_| ())).expect("a unit");
        let connections = std::mem::take(&mut script.seen.lock().expect("the log").connections);
        for connection in connections {
            connection.shutdown(std::net::Shutdown::Both).ok();
        }
        let ended = write_block(&unit).recv_timeout(Duration::from_secs(10));
        assert!(matches!(ended, Ok(Ended::Done(_))), "{ended:?}");
        let seen = script.seen.lock().expect("the log");
        assert_eq!(seen.logins, 2);
        assert_eq!(seen.functions.contains(&LOGICAL_UNIT_RESET), has_groups);
    }
}

/// Without TAS in its Control mode page, a unit sends no response to the tasks that another initiator's reset ends.
#[test]
fn a_write_ended_by_a_reset_of_another_initiator_is_sent_again() {
    let script = Script {
        reset_during: Some(WRITE_16),
        ..Script::with_naa([0x50, 1, 0x40, 0x5a, 0, 0, 0, 1])
    };
    let address = script.serve(TARGET);
    let unit = open(&address, &address, true).expect("a unit");
    let write = write_block(&unit);
    // This command reports the reset.
    let (sender, ready) = mpsc::channel();
    let test_unit_ready = UnitCommand {
        repeatable: true,
        ..UnitCommand::default()
    };
    unit.submit(test_unit_ready, Arc::new(Sink(sender)), 1);
    for ended in [write, ready] {
        let ended = ended.recv_timeout(Duration::from_secs(10));
        assert!(matches!(ended, Ok(Ended::Done(_))), "{ended:?}");
    }
    let seen = script.seen.lock().expect("the log");
    let writes = seen.commands.iter().filter(|(_, code)| *code == WRITE_16);
    assert_eq!(writes.count(), 2);
    assert!(seen.functions.contains(&ABORT_TASK));
    assert_eq!(seen.logins, 1, "the session stays");
}

/// A user aborts a command that the target no longer has.
#[test]
fn an_abort_of_a_task_that_does_not_exist_ends_the_command() {
    let script = Script {
        reset_during: Some(WRITE_16),
        ..Script::with_naa([0x50, 1, 0x40, 0x5a, 0, 0, 0, 1])
    };
    let address = script.serve(TARGET);
    let unit = open(&address, &address, true).expect("a unit");
    let (sender, ended) = mpsc::channel();
    let sink: Arc<dyn CommandSink> = Arc::new(Sink(sender));
    let mut command = UnitCommand {
        out: vec![7; 512],
        repeatable: true,
        ..UnitCommand::default()
    };
    (command.cdb[0], command.cdb[13]) = (WRITE_16, 1);
    unit.submit(command, Arc::clone(&sink), 0);
    while !script.has_received(WRITE_16) {
        std::thread::sleep(Duration::from_millis(1));
    }
    unit.abort(&sink, 0);
    let ended = ended.recv_timeout(Duration::from_secs(10));
    assert!(matches!(ended, Ok(Ended::Cancelled)), "{ended:?}");
}

/// Loses the first path, then writes a block. Returns true if the write was answered.
fn writes_by_second_path(first: &Script, second: &Script, trusts_paths: bool) -> bool {
    let one = first.serve(TARGET);
    let unit = open(&one, &second.serve(OTHER_TARGET), trusts_paths).expect("a unit");
    // The first target has no units from now on.
    let connections = std::mem::take(&mut first.seen.lock().expect("the log").connections);
    for connection in connections {
        connection.shutdown(std::net::Shutdown::Both).ok();
    }
    let ended = write_block(&unit).recv_timeout(Duration::from_secs(10));
    matches!(ended, Ok(Ended::Done(_)))
}

#[test]
fn a_write_does_not_reach_another_unit_by_a_second_path() {
    let unit = |last: u8| Script::with_naa([0x50, 1, 0x40, 0x5a, 0, 0, 0, last]);
    let (one, same, other) = (unit(1), unit(1), unit(2));
    assert!(writes_by_second_path(&one, &same, false));
    assert!(same.has_received(WRITE_16));
    for trusts_paths in [false, true] {
        // The first path is used again.
        assert!(writes_by_second_path(&one, &other, trusts_paths));
        assert!(!other.has_received(WRITE_16));
    }
}

/// Returns the address of a target that does not answer.
fn nowhere() -> UnitAddress {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let portal = listener.local_addr().expect("its address");
    let address = format!("iscsi://{portal}/{TARGET}/0");
    address.parse().expect("an address")
}

#[test]
fn first_session_of_a_process_accepts_only_the_earlier_unit() {
    // Function code of LOGICAL UNIT RESET (RFC 7143, 11.5.1).
    const LOGICAL_UNIT_RESET: u8 = 5;
    let unit = |last: u8| Script::with_naa([0x50, 1, 0x40, 0x5a, 0, 0, 0, last]);
    let (right, wrong) = (unit(1), unit(2));
    let (address, other, down) = (right.serve(TARGET), wrong.serve(OTHER_TARGET), nowhere());
    let first = open(&address, &down, false).expect("a unit");
    let known = KnownUnits::decode(&first.known().encode()).expect("a record");
    drop(first);
    let opened = |one: &UnitAddress, other: &UnitAddress| {
        let mut known = known.clone();
        known.remedy = "lunette state reset FILE".to_owned();
        open_known(one, other, true, known)
    };
    for (one, two) in [(&down, &other), (&other, &down), (&other, &other)] {
        let error = opened(one, two).err().expect("another unit");
        for part in [
            other.to_string().as_str(),
            "naa.5001405a00000002",
            "expected naa.5001405a00000001",
            "hint: lunette state reset FILE",
        ] {
            assert!(error.contains(part), "no {part} in: {error}");
        }
    }
    // The wrong path is skipped if another one leads to the unit.
    let unit = opened(&other, &address).expect("a unit");
    assert_eq!(unit.known().encode(), known.encode());
    let seen = wrong.seen.lock().expect("the log");
    assert!(!seen.functions.contains(&LOGICAL_UNIT_RESET));
    assert!(seen.commands.iter().all(|(_, code)| *code != WRITE_16));
}
