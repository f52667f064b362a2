//! SANITIZE over iSCSI: it survives a kill, and all transports of the disk refuse I/O while it runs.
#![forbid(unsafe_code)]

use end_to_end::{IscsiSession, Result, Rig, bail, ensure};
use std::path::Path;
use std::time::{Duration, Instant};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, kind, status};
use vm::wait_until;

const TARGET: &str = "iqn.2026-11.org.example:t0";
const IDLE: (u8, u8, u8) = (0, 0, 0);
/// NOT READY, SANITIZE IN PROGRESS.
const UNDER_WAY: (u8, u8, u8) = (2, 0x04, 0x1b);

fn rig(disk: &str, blk: bool) -> Result<(Rig, String)> {
    let mut rig = Rig::new(|daemon| {
        let target = format!("{TARGET}=d0");
        let words = ["--portal", "127.0.0.1:0", "--demo-mode", "rw"];
        let daemon = daemon.disk(disk).arguments(["--iscsi", &target]);
        let daemon = daemon.arguments(words).arguments(["--workers", "2"]);
        if blk { daemon.vhost_blk("d0") } else { daemon }
    })?;
    let portal = rig.iscsi_portal(TARGET)?;
    Ok((rig, portal))
}

/// Returns sense key, ASC and ASCQ of TEST UNIT READY, without unit attentions.
fn ready(session: &mut IscsiSession) -> Result<(u8, u8, u8)> {
    for _ in 0..4 {
        let done = session.command(&[0; 6], None, 0)?;
        match (done.status, done.sense.as_slice()) {
            (0, _) => return Ok(IDLE),
            (2, sense) if sense.len() >= 14 && sense[2] & 0x0f != 6 => {
                return Ok((sense[2] & 0x0f, sense[12], sense[13]));
            }
            _ => {}
        }
    }
    bail!("unit attentions without end")
}

/// Starts SANITIZE with a pattern for every block. With IMMED the response comes at the start.
fn begin_overwriting(session: &mut IscsiSession, pattern: &[u8; 4]) -> Result<()> {
    let list = [&[0x01, 0, 0, 4][..], pattern].concat();
    let cdb = [0x48, 0x81, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
    ensure!(session.command(&cdb, Some(&list), 0)?.status == 0);
    Ok(())
}

fn wait_for_its_end(session: &mut IscsiSession) -> Result<()> {
    let begun = Instant::now();
    while ready(session)? != IDLE {
        ensure!(begun.elapsed() < Duration::from_secs(120), "it never ends");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

#[test]
fn sanitize_continues_after_a_kill() -> Result<()> {
    // The bandwidth limit makes the operation outlast a restart.
    let (mut rig, portal) = rig("d0=file:d0.raw,size=64M,bandwidth=1M", false)?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    begin_overwriting(&mut session, b"wipe")?;
    ensure!(ready(&mut session)? == UNDER_WAY);
    drop(session);
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    let portal = rig.iscsi_portal(TARGET)?;
    let mut session = IscsiSession::login_only(&portal, TARGET, 1)?;
    ensure!(ready(&mut session)? == UNDER_WAY, "it continues");
    rig.daemon.lunette(&["disk", "limit", "d0", "none"])?;
    wait_for_its_end(&mut session)?;
    let bytes = std::fs::read(rig.scratch.file("d0.raw"))?;
    ensure!(bytes.len() == 64 << 20 && bytes.chunks(4).all(|word| word == b"wipe"));
    Ok(())
}

#[test]
fn sanitize_pauses_while_its_disk_is_removed() -> Result<()> {
    let (mut rig, portal) = rig("d0=file:d0.raw,size=64M,bandwidth=1M", false)?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    begin_overwriting(&mut session, b"wipe")?;
    ensure!(ready(&mut session)? == UNDER_WAY);
    drop(session);
    rig.daemon.lunette(&["lun", "remove", TARGET, "0:0"])?;
    rig.daemon.lunette(&["disk", "remove", "d0"])?;
    let file = rig.scratch.file("d0.raw");
    let begun = Instant::now();
    // I/O in flight may complete first.
    while is_open(rig.daemon.process().id(), &file)? {
        ensure!(begun.elapsed() < Duration::from_secs(10), "it stays open");
        std::thread::sleep(Duration::from_millis(20));
    }
    let wiped =
        || Ok::<_, std::io::Error>(std::fs::read(&file)?.chunks(4).all(|word| word == b"wipe"));
    ensure!(!wiped()?, "it had ended before");
    let disk = format!("d0=file:{},size=64M", file.display());
    rig.daemon.lunette(&["disk", "add", &disk])?;
    rig.daemon.lunette(&["lun", "add", TARGET, "0:0", "d0"])?;
    let mut session = IscsiSession::login_only(&portal, TARGET, 1)?;
    wait_for_its_end(&mut session)?;
    ensure!(wiped()?, "it continued and did not end");
    Ok(())
}

/// Returns true if a process has a file open.
fn is_open(process: u32, file: &Path) -> Result<bool> {
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd"))?;
    let mut open = descriptors.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    Ok(open.any(|path| path == file))
}

/// Returns the virtio-blk status of each kind of request that reaches the disk.
fn statuses(queue: &mut BlkQueue) -> Result<[u8; 3]> {
    Ok([
        queue.write(1 << 20, &[0x55; 4096])?,
        queue.read(1 << 20, &mut [0; 4096])?,
        queue.flush()?,
    ])
}

#[test]
fn sanitize_stops_virtio_blk_and_leaves_nothing_written() -> Result<()> {
    let (rig, portal) = rig("d0=delay:300ms,size=4M,storage=ram", true)?;
    let mut front_end = FrontEnd::connect(&rig.socket("d0"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Layout::Separate)?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    ensure!(queue.write(0, &[0xaa; 4096])? == status::OK);

    // A request in flight at the start of the operation completes normally.
    let slot = queue.take().expect("a queue of four");
    queue.data(slot).write(0, &[0xbb; 4096]);
    ensure!(queue.submit(slot, kind::OUT, 8, 4096, 0));
    queue.publish();
    // The worker may take the request later than the command of the other client.
    let client = control::Client::new(&rig.daemon.control());
    let in_flight = || {
        let metrics = client.text("/metrics").ok()?;
        let is_taken = metrics.contains("lunette_disk_io_in_flight{disk=\"d0\"} 1");
        is_taken.then_some(())
    };
    let mut ended = None;
    let is_taken = wait_until(Duration::from_secs(60), || {
        in_flight().or_else(|| {
            ended = queue.wait_for(Duration::from_millis(1)).ok();
            ended.as_ref().map(|_| ())
        })
    });
    ensure!(is_taken.is_some(), "the request is not taken");
    begin_overwriting(&mut session, b"wipe")?;
    let done = ended.map_or_else(|| queue.wait(), Ok)?;
    queue.release(done.slot);
    ensure!(done.status == status::OK, "status {}", done.status);

    let refused = [status::IOERR; 3];
    let found = statuses(&mut queue)?;
    ensure!(found == refused, "{found:?} while it runs");
    ensure!(ready(&mut session)? == UNDER_WAY, "the test took too long");
    let metrics = client.text("/metrics")?;
    let counted = "lunette_disk_io_errors_total{disk=\"d0\",class=\"closed\"} 3";
    ensure!(metrics.contains(counted), "not counted:\n{metrics}");

    wait_for_its_end(&mut session)?;
    for offset in (0..4 << 20).step_by(1 << 20) {
        let mut bytes = [0; 4096];
        ensure!(queue.read(offset, &mut bytes)? == status::OK);
        ensure!(bytes.chunks(4).all(|word| word == b"wipe"), "at {offset}");
    }
    let found = statuses(&mut queue)?;
    ensure!(found == [status::OK; 3], "{found:?} afterwards");
    let mut bytes = [0; 4096];
    ensure!(queue.read(1 << 20, &mut bytes)? == status::OK && bytes == [0x55; 4096]);
    Ok(())
}
