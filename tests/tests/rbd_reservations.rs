//! Persistent reservations of an RBD image that two daemons serve: what an initiator of one of them does holds at the other, through
//! restarts, kills and a daemon that stands still.
#![forbid(unsafe_code)]

use end_to_end::{Context, DaemonBuilder, IscsiSession, Result, Rig, ensure};
use librbd::{Cluster, ClusterConfig, Image, ImageName, Object};
use rustix::process::Signal;
use serde_json::Value;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use vm::{CEPH_USER, Ceph, wait_until};

const TARGET: &str = "iqn.2026-11.org.example:rbd";
const LIMIT: Duration = Duration::from_secs(60);

/// Status, then additional sense code and qualifier of a unit attention or another check condition.
type Ended = (u8, u16);

const GOOD: Ended = (0, 0);
const CONFLICT: Ended = (0x18, 0);
const RESERVATIONS_PREEMPTED: Ended = (2, 0x2a03);
const RESERVATIONS_RELEASED: Ended = (2, 0x2a04);
const REGISTRATIONS_PREEMPTED: Ended = (2, 0x2a05);
const BUSY: u8 = 8;

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;

/// A command, again while the daemon does not know yet what holds.
fn run(
    session: &mut IscsiSession,
    cdb: &[u8],
    out: Option<&[u8]>,
    into: u32,
) -> Result<(Ended, Vec<u8>)> {
    let end = Instant::now() + LIMIT;
    loop {
        let done = session.command(cdb, out, into)?;
        if done.status != BUSY {
            let code = |at: usize| done.sense.get(at).copied().map_or(0, u16::from);
            return Ok(((done.status, code(12) << 8 | code(13)), done.data));
        }
        ensure!(Instant::now() < end, "busy for {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// PERSISTENT RESERVE OUT with both keys; registrations survive the daemons.
fn reserve(session: &mut IscsiSession, action: u8, kind: u8, keys: [u64; 2]) -> Result<Ended> {
    let mut data = [0; 24];
    data[..8].copy_from_slice(&keys[0].to_be_bytes());
    data[8..16].copy_from_slice(&keys[1].to_be_bytes());
    data[20] = u8::from(action == REGISTER);
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    Ok(run(session, &cdb, Some(&data), 0)?.0)
}

/// WRITE(10) of 8 blocks at 0.
fn write(session: &mut IscsiSession, byte: u8) -> Result<Ended> {
    let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    Ok(run(session, &cdb, Some(&[byte; 4096]), 0)?.0)
}

/// READ(10) of the same; the byte of which all are.
fn read(session: &mut IscsiSession) -> Result<(Ended, Option<u8>)> {
    let (ended, data) = run(session, &[0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0], None, 4096)?;
    let first = data.first().copied();
    Ok((ended, first.filter(|byte| data == [*byte; 4096])))
}

/// READ KEYS.
fn keys(session: &mut IscsiSession) -> Result<Vec<u64>> {
    let (ended, data) = run(session, &[0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0], None, 256)?;
    ensure!(ended == GOOD, "READ KEYS: {ended:x?}");
    let list = data.get(8..).unwrap_or_default().chunks_exact(8);
    Ok(list
        .map(|key| key.iter().fold(0, |all, byte| all << 8 | u64::from(*byte)))
        .collect())
}

/// How many registrants `lunette reservation` shows, and how many of them are other daemons'.
fn shown(rig: &Rig) -> Result<(usize, usize)> {
    let text = rig
        .daemon
        .lunette(&["reservation", "show", "d", "--json"])?;
    let held: Vec<Value> = serde_json::from_str(&text)?;
    let list = held.first().and_then(|one| one["registrations"].as_array());
    let list = list.cloned().unwrap_or_default();
    let elsewhere = list.iter().filter(|one| one["daemon"].is_string()).count();
    Ok((list.len(), elsewhere))
}

fn serve(ceph: &Ceph) -> impl Fn(DaemonBuilder) -> DaemonBuilder {
    let disk = format!("d={},lock=shared", ceph.disk("rbd/s"));
    move |daemon| {
        daemon
            .disk(&disk)
            .arguments(["--iscsi", &format!("{TARGET}=d")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
    }
}

/// The same initiator name and port number at every daemon: what differs is the daemon.
fn login(rig: &mut Rig) -> Result<IscsiSession> {
    let portal = rig.iscsi_portal(TARGET)?;
    let session = || IscsiSession::login(&portal, TARGET, 1).ok();
    wait_until(LIMIT, session).context("no session")
}

fn restart(rig: &mut Rig) -> Result<IscsiSession> {
    rig.daemon.start_again()?;
    login(rig)
}

#[test]
fn reservations_hold_at_both_daemons_through_restarts_and_the_death_of_one() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/s", "--size", "8M", "--image-shared"])?;
    let mut first = Rig::new(serve(&ceph))?;
    let mut second = first.beside(serve(&ceph))?;
    let (mut a, mut b) = (login(&mut first)?, login(&mut second)?);

    // Both register, one reserves, the other one is kept out.
    ensure!(reserve(&mut a, REGISTER, 0, [0, 1])? == GOOD);
    ensure!(reserve(&mut b, REGISTER, 0, [0, 2])? == GOOD);
    ensure!(keys(&mut a)? == [1, 2] && keys(&mut b)? == [1, 2]);
    ensure!(shown(&first)? == (2, 1) && shown(&second)? == (2, 1));
    ensure!(reserve(&mut a, RESERVE, 1, [1, 0])? == GOOD);
    ensure!(write(&mut a, 1)? == GOOD && write(&mut b, 2)? == CONFLICT);
    ensure!(read(&mut b)? == (GOOD, Some(1)));
    ensure!(reserve(&mut b, RESERVE, 1, [2, 0])? == CONFLICT);

    // It takes the reservation over: that holds at the other daemon before it is answered.
    ensure!(reserve(&mut b, PREEMPT, 1, [2, 1])? == GOOD);
    ensure!(write(&mut a, 3)? == REGISTRATIONS_PREEMPTED && write(&mut a, 3)? == CONFLICT);
    ensure!(write(&mut b, 4)? == GOOD && read(&mut a)? == (GOOD, Some(4)));
    ensure!(reserve(&mut b, RELEASE, 1, [2, 0])? == GOOD && write(&mut a, 5)? == GOOD);

    // Registrants are told at their own daemon.
    ensure!(reserve(&mut a, REGISTER, 0, [0, 1])? == GOOD);
    ensure!(reserve(&mut b, RESERVE, 5, [2, 0])? == GOOD && write(&mut a, 6)? == GOOD);
    ensure!(reserve(&mut b, RELEASE, 5, [2, 0])? == GOOD);
    ensure!(write(&mut a, 6)? == RESERVATIONS_RELEASED);
    ensure!(reserve(&mut b, CLEAR, 0, [2, 0])? == GOOD);
    ensure!(write(&mut a, 6)? == RESERVATIONS_PREEMPTED && keys(&mut a)?.is_empty());

    // Both are changed at once, many times: nothing is lost.
    for round in 0..10 {
        let (old, new) = (round, round + 1);
        std::thread::scope(|scope| -> Result<()> {
            let other = scope.spawn(|| reserve(&mut a, REGISTER, 0, [old, new]));
            let own = reserve(&mut b, REGISTER, 0, [100 * old, 100 * new])?;
            let other = other.join().ok().context("a thread panicked")??;
            ensure!((own, other) == (GOOD, GOOD), "{round}: {own:x?} {other:x?}");
            Ok(())
        })?;
    }
    let mut both = keys(&mut a)?;
    both.sort_unstable();
    ensure!(both == [10, 1000], "{both:?}");

    // The holder's daemon is killed and comes back; then both.
    ensure!(reserve(&mut a, RESERVE, 1, [10, 0])? == GOOD);
    first.daemon.kill()?;
    ensure!(write(&mut b, 7)? == CONFLICT);
    a = restart(&mut first)?;
    ensure!(write(&mut a, 8)? == GOOD && write(&mut b, 9)? == CONFLICT);
    first.daemon.kill()?;
    second.daemon.kill()?;
    (a, b) = (restart(&mut first)?, restart(&mut second)?);
    ensure!(write(&mut b, 9)? == CONFLICT && write(&mut a, 10)? == GOOD);

    // It is killed and does not come back: the other one takes over, in time.
    first.daemon.kill()?;
    let begun = Instant::now();
    ensure!(reserve(&mut b, PREEMPT_AND_ABORT, 1, [1000, 10])? == GOOD);
    let took = begun.elapsed();
    ensure!(took < Duration::from_secs(40), "preempted after {took:?}");
    ensure!(write(&mut b, 11)? == GOOD);
    ensure!(keys(&mut b)? == [1000]);
    a = restart(&mut first)?;
    ensure!(write(&mut a, 12)? == CONFLICT && read(&mut a)? == (GOOD, Some(11)));
    Ok(())
}

/// A daemon that stands still has not heard of what another one does, and would go on as if it had the reservation.
#[test]
fn a_daemon_that_stands_still_writes_nothing_after_its_initiator_was_preempted() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/s", "--size", "8M", "--image-shared"])?;
    let mut first = Rig::new(serve(&ceph))?;
    let mut second = first.beside(serve(&ceph))?;
    let (mut a, mut b) = (login(&mut first)?, login(&mut second)?);
    ensure!(reserve(&mut a, REGISTER, 0, [0, 1])? == GOOD);
    ensure!(reserve(&mut b, REGISTER, 0, [0, 2])? == GOOD);
    ensure!(reserve(&mut a, RESERVE, 1, [1, 0])? == GOOD && write(&mut a, 1)? == GOOD);

    first.daemon.process().signal(Signal::STOP)?;
    let writer = std::thread::spawn(move || {
        let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0];
        let done = a.command(&cdb, Some(&[66; 4096]), 0);
        (a, done)
    });
    let begun = Instant::now();
    ensure!(reserve(&mut b, PREEMPT_AND_ABORT, 1, [2, 1])? == GOOD);
    let took = begun.elapsed();
    ensure!(took < Duration::from_secs(40), "preempted after {took:?}");
    ensure!(write(&mut b, 2)? == GOOD);
    let listed = ceph.ceph(&["osd", "blocklist", "ls"])?;
    ensure!(listed.contains("127.0.0.1"), "{listed}");

    // It goes on: the write that it finds then is of the holder, as far as it knows.
    first.daemon.process().signal(Signal::CONT)?;
    let (session, done) = writer.join().ok().context("a thread panicked")?;
    let mut a = session;
    let status = done?.status;
    ensure!(status != 0, "a write of a preempted initiator");
    ensure!(read(&mut b)? == (GOOD, Some(2)));

    // It comes back over a new connection, knows what it has missed, and tells its initiator.
    let told = wait_until(LIMIT, || match write(&mut a, 67) {
        Ok(CONFLICT) => Some(()),
        _ => None,
    });
    ensure!(told.is_some(), "{}", first.daemon.process().log_tail());
    ensure!(read(&mut a)? == (GOOD, Some(2)) && read(&mut b)? == (GOOD, Some(2)));
    ensure!(keys(&mut a)? == [2]);
    let ready = wait_until(LIMIT, || {
        let shown = first.daemon.lunette(&["disk", "show", "d"]).ok()?;
        shown.contains("ready").then_some(())
    });
    ensure!(ready.is_some(), "{}", first.daemon.process().log_tail());
    ensure!(reserve(&mut a, REGISTER, 0, [0, 3])? == GOOD && keys(&mut b)? == [2, 3]);
    Ok(())
}

/// The object through a connection that nobody shares.
fn object(ceph: &Ceph, connection: &str) -> Result<Arc<Object>> {
    let config = ClusterConfig {
        conf: Some(ceph.conf()),
        id: Some(CEPH_USER.to_owned()),
        keyring: Some(ceph.keyring()),
        options: [("client_mount_timeout".to_owned(), connection.to_owned())].into(),
        ..ClusterConfig::default()
    };
    let name = ImageName::parse("rbd/s").context("no name of an image")?;
    let image = Image::open(&Cluster::connect(&config)?, &name, false)?;
    Ok(Object::beside(&image, "lunette_test")?)
}

#[test]
fn an_object_is_replaced_by_comparison_and_its_watchers_are_waited_for() -> Result<()> {
    const ESHUTDOWN: i32 = 108;
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/s", "--size", "8M", "--image-shared"])?;
    let (one, other) = (object(&ceph, "10")?, object(&ceph, "11")?);
    ensure!(one.read(64)?.is_none() && !one.replace(b"a", b"b")?);
    ensure!(one.create(b"first".to_vec())? && !other.create(b"second".to_vec())?);
    ensure!(!other.replace(b"fiRst", b"x")? && !other.replace(b"first and more", b"x")?);
    ensure!(other.replace(b"fir", b"longer than before")?);
    ensure!(!one.replace(b"fir", b"x")? && one.replace(b"longer", b"short")?);
    ensure!(
        other.read(64)?.as_deref() == Some(b"short") && other.read(2)?.as_deref() == Some(b"sh")
    );

    // Each of two watchers is notified; who does not acknowledge is waited for, and is not among those who have.
    let (notified, seen) = mpsc::channel();
    let timeout = Duration::from_secs(15);
    let own = Arc::clone(&one);
    let answering = move |notification: librbd::Notification| {
        own.acknowledge(&notification, b"yes");
        notified.send(notification.bytes).ok();
    };
    let first = one.watch(timeout, answering, |_| {})?;
    ensure!(other.notify(b"hello", LIMIT)? == [b"yes"]);
    ensure!(seen.recv_timeout(LIMIT)? == b"hello" && first.age().is_ok());
    let lost = Arc::new(AtomicI32::new(0));
    let note = Arc::clone(&lost);
    let silent = other.watch(
        timeout,
        |_| {},
        move |errno| note.store(errno, Ordering::SeqCst),
    )?;
    let begun = Instant::now();
    ensure!(one.notify(b"again", Duration::from_secs(2))? == [b"yes"]);
    let took = begun.elapsed();
    ensure!(
        took > Duration::from_secs(1) && took < Duration::from_secs(10),
        "{took:?}"
    );

    // Who is blocklisted is served no more, and hears that its watch is lost.
    let address = other.cluster().address()?;
    ensure!(address != one.cluster().address()?);
    one.cluster().blocklist(&address)?;
    one.cluster().wait_for_map()?;
    // An OSD that has served this knows it.
    one.read(64)?;
    let errno = other.read(64).err().map(|error| error.errno());
    ensure!(errno == Some(ESHUTDOWN), "{errno:?}");
    let told = wait_until(LIMIT, || {
        (lost.load(Ordering::SeqCst) != 0 && silent.age().is_err()).then_some(())
    });
    ensure!(told.is_some(), "a watch of a blocklisted client goes on");
    drop((first, silent));
    ensure!(one.notify(b"nobody", LIMIT)?.is_empty());
    Ok(())
}
