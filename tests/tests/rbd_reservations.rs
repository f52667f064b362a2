//! Persistent reservations of an RBD image that two daemons serve: a reservation through one daemon applies at the other, through
//! restarts, kills and stopped daemons.
#![forbid(unsafe_code)]

use end_to_end::ceph::{CEPH_USER, Ceph};
use end_to_end::{Context, DaemonBuilder, IscsiSession, Result, Rig, bail, ensure};
use librbd::{Cluster, ClusterConfig, Image, ImageName, Object};
use rustix::process::Signal;
use serde_json::Value;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, kind, status};
use vm::wait_until;

const TARGET: &str = "iqn.2026-11.org.example:rbd";
const LIMIT: Duration = Duration::from_secs(60);

/// Status, then ASC and ASCQ of a check condition.
type Ended = (u8, u16);

const GOOD: Ended = (0, 0);
const CONFLICT: Ended = (0x18, 0);
const RESERVATIONS_PREEMPTED: Ended = (2, 0x2a03);
const RESERVATIONS_RELEASED: Ended = (2, 0x2a04);
const REGISTRATIONS_PREEMPTED: Ended = (2, 0x2a05);
const BUSY: u8 = 8;

/// Offset of virtio-blk's writes in bytes, beyond the initiators' blocks.
const BESIDE: u64 = 1 << 20;

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;

/// Executes a command. Repeats it while the daemon returns BUSY because it does not have the current reservation.
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

/// PERSISTENT RESERVE OUT with both keys. Registrations have APTPL.
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

/// READ(10) of the same blocks. Returns their byte if all bytes are equal.
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

/// Returns the number of registrants in `lunette reservation`, and how many of them are at other daemons.
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
    serve_disk(format!("d={},lock=shared", ceph.disk("rbd/s")))
}

fn serve_disk(disk: String) -> impl Fn(DaemonBuilder) -> DaemonBuilder {
    move |daemon| {
        daemon
            .disk(&disk)
            .arguments(["--iscsi", &format!("{TARGET}=d")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
    }
}

/// Logs in with the same initiator name and port at every daemon, so that only the daemons differ.
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
fn reservations_hold_at_both_daemons_through_restarts() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/s", "--size", "8M", "--image-shared"])?;
    let mut first = Rig::new(serve(&ceph))?;
    let mut second = first.beside(serve(&ceph))?;
    let (mut a, mut b) = (login(&mut first)?, login(&mut second)?);

    // Both initiators register, one reserves, and the other gets a conflict.
    ensure!(reserve(&mut a, REGISTER, 0, [0, 1])? == GOOD);
    ensure!(reserve(&mut b, REGISTER, 0, [0, 2])? == GOOD);
    ensure!(keys(&mut a)? == [1, 2] && keys(&mut b)? == [1, 2]);
    ensure!(shown(&first)? == (2, 1) && shown(&second)? == (2, 1));
    ensure!(reserve(&mut a, RESERVE, 1, [1, 0])? == GOOD);
    ensure!(write(&mut a, 1)? == GOOD && write(&mut b, 2)? == CONFLICT);
    ensure!(read(&mut b)? == (GOOD, Some(1)));
    ensure!(reserve(&mut b, RESERVE, 1, [2, 0])? == CONFLICT);

    // Preempts the reservation. The change applies at the other daemon before the response.
    ensure!(reserve(&mut b, PREEMPT, 1, [2, 1])? == GOOD);
    ensure!(write(&mut a, 3)? == REGISTRATIONS_PREEMPTED && write(&mut a, 3)? == CONFLICT);
    ensure!(write(&mut b, 4)? == GOOD && read(&mut a)? == (GOOD, Some(4)));
    ensure!(reserve(&mut b, RELEASE, 1, [2, 0])? == GOOD && write(&mut a, 5)? == GOOD);

    // Registrants get unit attentions at their own daemon.
    ensure!(reserve(&mut a, REGISTER, 0, [0, 1])? == GOOD);
    ensure!(reserve(&mut b, RESERVE, 5, [2, 0])? == GOOD && write(&mut a, 6)? == GOOD);
    ensure!(reserve(&mut b, RELEASE, 5, [2, 0])? == GOOD);
    ensure!(write(&mut a, 6)? == RESERVATIONS_RELEASED);
    ensure!(reserve(&mut b, CLEAR, 0, [2, 0])? == GOOD);
    ensure!(write(&mut a, 6)? == RESERVATIONS_PREEMPTED && keys(&mut a)?.is_empty());

    // Concurrent changes at both daemons, many times. No change is lost.
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

    // The holder's daemon is killed and restarted, then both daemons.
    ensure!(reserve(&mut a, RESERVE, 1, [10, 0])? == GOOD);
    first.daemon.kill()?;
    ensure!(write(&mut b, 7)? == CONFLICT);
    a = restart(&mut first)?;
    ensure!(write(&mut a, 8)? == GOOD && write(&mut b, 9)? == CONFLICT);
    first.daemon.kill()?;
    second.daemon.kill()?;
    (a, b) = (restart(&mut first)?, restart(&mut second)?);
    ensure!(write(&mut b, 9)? == CONFLICT && write(&mut a, 10)? == GOOD);

    // The holder's daemon is killed for good. The other initiator preempts within the time limit.
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

/// Stops a daemon with SIGSTOP and waits until all threads have stopped. A thread on another CPU might still take a command.
fn stand_still(rig: &mut Rig) -> Result<()> {
    let process = rig.daemon.process();
    process.signal(Signal::STOP)?;
    let tasks = format!("/proc/{}/task", process.id());
    let is_still = || -> Option<()> {
        for task in std::fs::read_dir(&tasks).ok()? {
            let stat = std::fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
            // The state follows the name, which may contain any characters (proc(5)).
            let (_, state) = stat.rsplit_once(") ")?;
            state.starts_with('T').then_some(())?;
        }
        Some(())
    };
    wait_until(Duration::from_secs(20), is_still).context("it does not stop")
}

/// A stopped daemon misses the preemption and would continue as if it held the reservation.
#[test]
fn stopped_daemon_writes_nothing_after_a_preemption() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/s", "--size", "8M", "--image-shared"])?;
    // With the sandbox, a worker that detects the fault must leave the repair to another thread.
    let confined = ["--sandbox", "enforce"];
    let mut first = Rig::new(|daemon| serve(&ceph)(daemon).vhost_blk("d").arguments(confined))?;
    let mut second = first.beside(serve(&ceph))?;
    let (mut a, mut b) = (login(&mut first)?, login(&mut second)?);
    ensure!(reserve(&mut a, REGISTER, 0, [0, 1])? == GOOD);
    ensure!(reserve(&mut b, REGISTER, 0, [0, 2])? == GOOD);
    ensure!(reserve(&mut a, RESERVE, 1, [1, 0])? == GOOD && write(&mut a, 1)? == GOOD);
    // virtio-blk has no reservations. A daemon without SCSI exports takes no part in the protocol and is not waited for.
    let disk = format!("d={},lock=shared", ceph.disk("rbd/s"));
    let block_only = first.beside(|daemon| daemon.disk(&disk).vhost_blk("d"))?;
    let mut ends = Vec::new();
    for rig in [&first, &block_only] {
        ends.push(FrontEnd::connect(&rig.socket("d"), &Options::default())?);
    }
    let options = QueueOptions::default();
    let queues = ends.iter_mut();
    let queues = queues.map(|end| BlkQueue::start(end, 0, &options, 4, 4096, Layout::Separate));
    let mut queues = queues.collect::<std::result::Result<Vec<BlkQueue>, _>>()?;
    let [excluded, other] = &mut queues[..] else {
        bail!("two queues");
    };
    ensure!(excluded.write(BESIDE, &[1; 512])? == status::OK);

    stand_still(&mut first)?;
    let writer = std::thread::spawn(move || {
        let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0];
        let done = a.command(&cdb, Some(&[66; 4096]), 0);
        (a, done)
    });
    let slot = excluded.take().context("no slot")?;
    excluded.data(slot).write(0, &[66; 512]);
    ensure!(
        excluded.submit(slot, kind::OUT, BESIDE / 512, 512, 0),
        "no room"
    );
    excluded.publish();
    let begun = Instant::now();
    ensure!(reserve(&mut b, PREEMPT_AND_ABORT, 1, [2, 1])? == GOOD);
    let took = begun.elapsed();
    ensure!(took < Duration::from_secs(40), "preempted after {took:?}");
    ensure!(write(&mut b, 2)? == GOOD);
    ensure!(other.write(BESIDE + 512, &[2; 512])? == status::OK);
    let listed = ceph.ceph(&["osd", "blocklist", "ls"])?;
    ensure!(listed.contains("127.0.0.1"), "{listed}");

    // The daemon continues. From its outdated state, the pending write is the holder's.
    first.daemon.process().signal(Signal::CONT)?;
    let (session, done) = writer.join().ok().context("a thread panicked")?;
    let mut a = session;
    let ended = done?.status;
    ensure!(ended != 0, "a write of a preempted initiator");
    ensure!(read(&mut b)? == (GOOD, Some(2)));
    // All pending I/O of an excluded daemon fails, on any transport, and is not written.
    ensure!(excluded.wait()?.status == status::IOERR);
    excluded.release(slot);
    let mut bytes = [0; 512];
    ensure!(other.read(BESIDE, &mut bytes)? == status::OK && bytes == [1; 512]);

    // The daemon reconnects, gets the missed changes, and informs its initiator.
    let outcome = wait_until(LIMIT, || match write(&mut a, 67) {
        Ok(CONFLICT) => Some(()),
        _ => None,
    });
    ensure!(outcome.is_some(), "{}", first.daemon.process().log_tail());
    ensure!(read(&mut a)? == (GOOD, Some(2)) && read(&mut b)? == (GOOD, Some(2)));
    ensure!(keys(&mut a)? == [2]);
    let ready = wait_until(LIMIT, || {
        let shown = first.daemon.lunette(&["disk", "show", "d"]).ok()?;
        shown.contains("ready").then_some(())
    });
    ensure!(ready.is_some(), "{}", first.daemon.process().log_tail());
    ensure!(reserve(&mut a, REGISTER, 0, [0, 3])? == GOOD && keys(&mut b)? == [2, 3]);
    ensure!(excluded.write(BESIDE, &[3; 512])? == status::OK);
    ensure!(other.read(BESIDE, &mut bytes)? == status::OK && bytes == [3; 512]);
    Ok(())
}

/// Creates a user with access to images only. The cluster refuses its requests to blocklist other clients.
fn weak_user(ceph: &Ceph) -> Result<String> {
    let keyring = ceph.folder().join("weak.keyring");
    let path = keyring.to_string_lossy();
    let caps = ["mon", "allow r", "osd", "profile rbd"];
    let words = ["auth", "get-or-create", "client.weak"];
    let words: Vec<&str> = words.into_iter().chain(caps).chain(["-o", &path]).collect();
    ceph.ceph(&words)?;
    let conf = ceph.conf();
    Ok(format!(
        "d=rbd:rbd/s,conf={},id=weak,keyring={path},lock=shared",
        conf.display()
    ))
}

/// Without the permission to blocklist, the change completes when the stopped daemon's lease has certainly expired.
#[test]
fn three_daemons_agree_though_one_is_stopped() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/s", "--size", "8M", "--image-shared"])?;
    let weak = weak_user(&ceph)?;
    let mut first = Rig::new(serve(&ceph))?;
    let mut second = first.beside(serve(&ceph))?;
    let mut third = first.beside(serve_disk(weak))?;
    let (mut a, mut b, mut c) = (login(&mut first)?, login(&mut second)?, login(&mut third)?);
    for (session, key) in [(&mut a, 1), (&mut b, 2), (&mut c, 3)] {
        ensure!(reserve(session, REGISTER, 0, [0, key])? == GOOD);
    }
    ensure!(reserve(&mut a, RESERVE, 5, [1, 0])? == GOOD);
    for session in [&mut a, &mut b, &mut c] {
        ensure!(keys(session)? == [1, 2, 3] && write(session, 1)? == GOOD);
    }
    for rig in [&first, &second, &third] {
        ensure!(shown(rig)? == (3, 2));
    }
    ensure!(reserve(&mut b, PREEMPT, 5, [2, 1])? == GOOD);
    ensure!(write(&mut a, 2)? == REGISTRATIONS_PREEMPTED && write(&mut a, 2)? == CONFLICT);
    ensure!(write(&mut c, 3)? == GOOD && read(&mut a)? == (GOOD, Some(3)));

    stand_still(&mut second)?;
    let writer = std::thread::spawn(move || {
        let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0];
        let done = b.command(&cdb, Some(&[66; 4096]), 0);
        (b, done)
    });
    // The initiator's time limit is shorter. It repeats the command and finds the result of the first one.
    let preempted = wait_until(2 * LIMIT, || match reserve(&mut c, PREEMPT, 5, [3, 2]) {
        Ok(CONFLICT | GOOD) => keys(&mut c).ok().filter(|keys| *keys == [3]),
        _ => {
            c = login(&mut third).ok()?;
            None
        }
    });
    let log = third.daemon.process().log();
    ensure!(preempted.is_some(), "{log}");
    ensure!(
        log.contains("cannot blocklist a daemon, its writes in flight may still arrive"),
        "{log}"
    );
    let listed = ceph.ceph(&["osd", "blocklist", "ls"])?;
    ensure!(!listed.contains("127.0.0.1"), "{listed}");
    ensure!(write(&mut c, 4)? == GOOD);
    second.daemon.process().signal(Signal::CONT)?;
    let (session, done) = writer.join().ok().context("a thread panicked")?;
    b = session;
    let ended = done?.status;
    ensure!(ended != 0, "a write of a preempted initiator");
    let outcome = wait_until(LIMIT, || match write(&mut b, 67) {
        Ok(CONFLICT) => Some(()),
        _ => None,
    });
    ensure!(outcome.is_some(), "{}", second.daemon.process().log_tail());
    for session in [&mut a, &mut b, &mut c] {
        ensure!(read(session)? == (GOOD, Some(4)) && keys(session)? == [3]);
    }
    Ok(())
}

/// GET LBA STATUS(16). Returns status, ASC and ASCQ.
fn lba_status(session: &mut IscsiSession, lun: u8) -> Result<Ended> {
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0];
    let done = session.command_on(lun, &cdb, None, 64)?;
    let code = |at: usize| done.sense.get(at).copied().map_or(0, u16::from);
    Ok((done.status, code(12) << 8 | code(13)))
}

#[test]
fn without_osd_reservations_are_unknown_and_status_times_out() -> Result<()> {
    const COMMAND_TIMEOUT: Ended = (2, 0x2e02);
    let mut ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/s", "--size", "8M", "--image-shared"])?;
    ceph.rbd(&["create", "rbd/e", "--size", "8M"])?;
    let other = format!("e={},io_timeout=2", ceph.disk("rbd/e"));
    let shared = format!("d={},lock=shared", ceph.disk("rbd/s"));
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk(&shared)
            .disk(&other)
            .arguments(["--iscsi", &format!("{TARGET}=d,e")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
    })?;
    let mut a = login(&mut rig)?;
    ensure!(reserve(&mut a, REGISTER, 0, [0, 1])? == GOOD && write(&mut a, 1)? == GOOD);
    while lba_status(&mut a, 1)? != GOOD {}
    let shown = |rig: &Rig| rig.daemon.lunette(&["disk", "show", "d"]);
    ensure!(!shown(&rig)?.contains("reservations"), "{}", shown(&rig)?);

    ceph.kill_osd();
    ensure!(lba_status(&mut a, 1)? == COMMAND_TIMEOUT);
    let unknown = wait_until(LIMIT, || {
        let shown = shown(&rig).ok()?;
        (shown.contains("unknown: ") && shown.contains("are answered BUSY")).then_some(())
    });
    ensure!(unknown.is_some(), "{}", shown(&rig)?);
    let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    ensure!(a.command(&cdb, Some(&[2; 4096]), 0)?.status == BUSY);

    ceph.start_osd()?;
    ensure!(write(&mut a, 3)? == GOOD && read(&mut a)? == (GOOD, Some(3)));
    ensure!(keys(&mut a)? == [1] && lba_status(&mut a, 1)? == GOOD);
    ensure!(!shown(&rig)?.contains("unknown"), "{}", shown(&rig)?);
    Ok(())
}

/// Opens the object through a connection of its own.
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
fn object_is_compared_and_replaced_and_watchers_are_awaited() -> Result<()> {
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

    // Both watchers are notified. The notifier waits for a missing acknowledgement and then does not list that watcher.
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

    // A blocklisted client is refused and is notified that its watch is lost.
    let address = other.cluster().address()?;
    ensure!(address != one.cluster().address()?);
    one.cluster().blocklist(&address)?;
    one.cluster().wait_for_map()?;
    // An OSD that has served this read has the new map.
    one.read(64)?;
    let errno = other.read(64).err().map(|error| error.errno());
    ensure!(errno == Some(ESHUTDOWN), "{errno:?}");
    let outcome = wait_until(LIMIT, || {
        (lost.load(Ordering::SeqCst) != 0 && silent.age().is_err()).then_some(())
    });
    ensure!(
        outcome.is_some(),
        "the watch of a blocklisted client continues"
    );
    drop((first, silent));
    ensure!(one.notify(b"nobody", LIMIT)?.is_empty());
    Ok(())
}
