//! Thousands of mostly idle initiators, and initiators that violate the protocol. A working session continues, new logins succeed,
//! and idle sessions cost no CPU time.
#![forbid(unsafe_code)]

#[path = "../../crates/iscsi_target/tests/common/hostile.rs"]
mod hostile;

use control::Client;
use end_to_end::{Daemon, IscsiSession, Result, Rig, bail, ensure, ensure_idle};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const TARGET: &str = "iqn.2026-11.org.example:t0";
/// Time limit, far above the usual time of a few commands.
const SOON: Duration = Duration::from_secs(60);
const IDLE_SESSIONS: u16 = 1000;
const HALF_OPEN_MAX: usize = 100;

/// A session that writes and reads back continuously.
struct Load {
    rounds: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl Load {
    fn start(portal: &str) -> Result<Load> {
        let mut session = IscsiSession::login(portal, TARGET, 60_000)?;
        let (rounds, ends) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (counted, ending) = (Arc::clone(&rounds), Arc::clone(&ends));
        let thread = std::thread::spawn(move || {
            while !ending.load(Ordering::SeqCst) {
                let round = counted.load(Ordering::SeqCst);
                // 8 blocks of 512 bytes, somewhere in the first 2048
                let lba = (round % 256) as u8;
                let data = [(round % 251) as u8; 4096];
                let cdb = |opcode| [opcode, 0, 0, 0, lba, 0, 0, 0, 8, 0];
                let written = session.command(&cdb(0x2a), Some(&data), 0)?;
                let read = session.command(&cdb(0x28), None, 4096)?;
                ensure!((written.status, read.status) == (0, 0), "round {round}");
                ensure!(read.data == data, "round {round} reads something else");
                counted.store(round + 1, Ordering::SeqCst);
            }
            Ok(())
        });
        Ok(Load {
            rounds,
            ends,
            thread,
        })
    }

    fn expect_progress(&self, meanwhile: &str) -> Result<()> {
        let before = self.rounds.load(Ordering::SeqCst);
        let begun = Instant::now();
        while self.rounds.load(Ordering::SeqCst) < before + 20 {
            ensure!(
                !self.thread.is_finished() && begun.elapsed() < SOON,
                "the other session stands still: {meanwhile}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        self.ends.store(true, Ordering::SeqCst);
        match self.thread.join() {
            Ok(outcome) => outcome,
            Err(_) => bail!("the other session failed"),
        }
    }
}

fn allow_descriptors(needed: u64) -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let enough = |most: Option<u64>| most.is_none_or(|most| most >= needed);
    ensure!(
        enough(limit.maximum),
        "{needed} descriptors are needed; hint: ulimit -Hn {needed}"
    );
    if !enough(limit.current) {
        setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(needed),
                maximum: limit.maximum,
            },
        )?;
    }
    Ok(())
}

/// Waits until the daemon reports `count` sessions.
fn sessions_are(daemon: &Daemon, count: usize) -> Result<()> {
    let client = Client::new(&daemon.control()).patient(SOON);
    let begun = Instant::now();
    loop {
        let listed: Vec<Value> = client.get("/v1/sessions")?;
        if listed.len() == count {
            return Ok(());
        }
        let found = listed.len();
        ensure!(
            begun.elapsed() < SOON,
            "{found} sessions instead of {count}"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Returns true if the target has closed the connection. Discards received data.
fn is_closed(stream: &mut TcpStream) -> Result<bool> {
    stream.set_nonblocking(true)?;
    loop {
        match stream.read(&mut [0; 64]) {
            Ok(0) => return Ok(true),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(_) => return Ok(true),
        }
    }
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn idle_sessions_and_half_logins_delay_no_client() -> Result<()> {
    allow_descriptors(4096)?;
    let limits = format!("connections=1400,sessions=1100,half_open={HALF_OPEN_MAX},login_s=3600");
    let mut rig = Rig::new(|daemon| {
        // One worker serves all sessions, so a blocked worker is detected.
        daemon
            .disk("d0=ram:64M")
            .arguments([
                "--iscsi",
                &format!("{TARGET}=d0"),
                "--portal",
                "127.0.0.1:0",
            ])
            .arguments([
                "--demo-mode",
                "rw",
                "--workers",
                "1",
                "--iscsi-limits",
                &limits,
            ])
    })?;
    let portal = rig.iscsi_portal(TARGET)?;
    let mut idle = Vec::new();
    for number in 0..IDLE_SESSIONS {
        idle.push(IscsiSession::login(&portal, TARGET, number)?);
    }
    let load = Load::start(&portal)?;
    load.expect_progress("a thousand idle sessions")?;

    // Each connection sends a part of a Login Request and then stops. More of them connect than the limit permits.
    let mut half_open = Vec::new();
    for _ in 0..3 * HALF_OPEN_MAX {
        let mut stream = TcpStream::connect(&portal)?;
        stream.write_all(&[0x43, 0x87, 0, 0, 0, 0, 1, 0, 0x80, 0, 0, 0])?;
        half_open.push(stream);
    }
    load.expect_progress("half-open logins")?;
    let begun = Instant::now();
    loop {
        let mut closed = 0;
        for stream in &mut half_open {
            closed += usize::from(is_closed(stream)?);
        }
        // The oldest connections are closed first. The target still waits for the newest.
        ensure!(
            closed <= 2 * HALF_OPEN_MAX,
            "{closed} half-open logins were closed"
        );
        if closed == 2 * HALF_OPEN_MAX {
            break;
        }
        ensure!(
            begun.elapsed() < SOON,
            "only {closed} half-open logins were closed"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    ensure!(!is_closed(&mut half_open[3 * HALF_OPEN_MAX - 1])?);

    // The limit is 1100 sessions, and 1001 are open.
    let mut more = Vec::new();
    for number in 2000..2099 {
        more.push(IscsiSession::login(&portal, TARGET, number)?);
    }
    ensure!(
        IscsiSession::login(&portal, TARGET, 3000).is_err(),
        "one too many"
    );
    drop(more.pop());
    let begun = Instant::now();
    while IscsiSession::login(&portal, TARGET, 3000).is_err() {
        ensure!(
            begun.elapsed() < SOON,
            "the next session does not get the remains of this one"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    load.expect_progress("sessions up to the limit")?;
    // All sessions are served, from the first to the last.
    for session in [0, 499, 999] {
        let done = idle[session].command(&[0; 6], None, 0)?;
        ensure!(
            done.status == 0,
            "session {session}: status {}",
            done.status
        );
    }
    drop((half_open, more));
    load.finish()?;

    // Closed sessions are gone, and all others are idle.
    sessions_are(&rig.daemon, idle.len())?;
    let description = format!("{} idle sessions", idle.len());
    ensure_idle(&mut rig.daemon, &description, || {
        // The sessions also answer pings.
        idle.iter_mut()
            .try_for_each(|session| session.command(&[0; 6], None, 0).map(drop))
    })?;
    drop(idle);
    ensure!(rig.daemon.stop(SOON)?.success());
    Ok(())
}

#[test]
fn protocol_violations_end_only_their_own_session() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        // One worker serves all sessions, so a blocked worker is detected.
        daemon
            .disk("d0=ram:64M")
            .arguments([
                "--iscsi",
                &format!("{TARGET}=d0"),
                "--portal",
                "127.0.0.1:0",
            ])
            .arguments(["--demo-mode", "rw", "--workers", "1"])
    })?;
    let portal = rig.iscsi_portal(TARGET)?;
    let address = portal.parse()?;
    let load = Load::start(&portal)?;
    load.expect_progress("nothing")?;
    for (name, case) in hostile::cases() {
        let ended = std::panic::catch_unwind(|| case(address));
        ensure!(ended.is_ok(), "{name}");
        load.expect_progress(name)?;
        rig.daemon.process().check_running()?;
    }
    load.finish()?;
    ensure!(rig.daemon.stop(SOON)?.success());
    Ok(())
}
