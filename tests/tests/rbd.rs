//! Ceph RBD against a real cluster: a monitor and an OSD from Debian's packages on this machine.
#![forbid(unsafe_code)]

use end_to_end::ceph::{CEPH_USER, Ceph};
use end_to_end::rig::{kernel_is_content, number};
use end_to_end::{
    Context, DaemonBuilder, GuestBuilder, IscsiSession, Result, Rig, Scratch, Soak, bail, ensure,
};
use guest_memory::IoBuffer;
use librbd::{Channel, Cluster, ClusterConfig, Finished, Image, ImageName, LockMode, Pool};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vhost_frontend::{
    BlkQueue, FrontEnd, Layout, Options, QueueOptions, Range, VerifiedLoad, status,
};
use vm::wait_until;

const LIMIT: Duration = Duration::from_secs(60);
/// Time limit for a daemon to stop, also while its cluster is unreachable.
const STOP_LIMIT: Duration = Duration::from_secs(40);

fn config(ceph: &Ceph) -> ClusterConfig {
    ClusterConfig {
        conf: Some(ceph.conf()),
        id: Some(CEPH_USER.to_owned()),
        keyring: Some(ceph.keyring()),
        ..ClusterConfig::default()
    }
}

fn open(ceph: &Ceph, name: &str) -> Result<Arc<Image>> {
    let cluster = Cluster::connect(&config(ceph))?;
    let name = ImageName::parse(name).context("no name of an image")?;
    Ok(Image::open(&cluster, &name, false)?)
}

/// A channel and the eventfd that it signals.
struct Driver {
    channel: Channel,
    wake: OwnedFd,
}

impl Driver {
    fn new(image: &Arc<Image>) -> Result<Driver> {
        let channel = Channel::new(image)?;
        let wake = channel.wake_fd()?;
        Ok(Driver { channel, wake })
    }

    /// Waits for the eventfd only, until `count` I/Os have completed.
    fn wait(&mut self, count: usize) -> Result<Vec<Finished>> {
        let mut over = Vec::new();
        let end = Instant::now() + LIMIT;
        while over.len() < count {
            ensure!(Instant::now() < end, "{} of {count} I/Os ended", over.len());
            let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
            let second = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            if poll(&mut fds, Some(&second))? > 0 {
                rustix::io::read(&self.wake, &mut [0_u8; 8])?;
                self.channel.reap(|finished| over.push(finished));
            }
        }
        Ok(over)
    }

    fn one(&mut self) -> Result<Finished> {
        self.wait(1)?.pop().context("nothing ended")
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<Result<u64, i32>> {
        let mut buffer = IoBuffer::owned(bytes.len());
        buffer.write_at(0, bytes);
        let submitted = self.channel.write(offset, &mut buffer, 1);
        ensure!(submitted.is_ok(), "write not submitted: {submitted:?}");
        Ok(self.one()?.result)
    }

    fn read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>> {
        let mut buffer = IoBuffer::owned(length);
        let submitted = self.channel.read(offset, &mut buffer, 2);
        ensure!(submitted.is_ok(), "read not submitted: {submitted:?}");
        let over = self.one()?;
        ensure!(
            over.token == 2 && over.result == Ok(length as u64),
            "{over:?}"
        );
        let mut bytes = vec![0; length];
        over.buffer.read_at(0, &mut bytes);
        Ok(bytes)
    }
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn the_library_reads_writes_zeroes_compares_resizes_and_lists() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/a", "--size", "64M"])?;
    let image = open(&ceph, "rbd/a")?;
    let shape = image.shape()?;
    ensure!(shape.size == 64 << 20 && shape.object_size == 4 << 20);
    let cluster = Cluster::connect(&config(&ceph))?;
    ensure!(
        Arc::ptr_eq(&cluster, image.cluster()),
        "one cluster and user: one connection"
    );
    ensure!(cluster.option("rbd_cache").as_deref() == Some("false"));
    ensure!(image.option("rbd_cache")? == Some(("false".to_owned(), false)));

    // 64 concurrent writes, and a read across two of them.
    let mut driver = Driver::new(&image)?;
    for number in 0..64_u64 {
        let mut buffer = IoBuffer::owned(4096);
        buffer.fill(0, 4096, number as u8 + 1);
        let submitted = driver.channel.write(number * 4096, &mut buffer, number);
        ensure!(submitted.is_ok() && driver.channel.in_flight() == number as usize + 1);
    }
    let mut tokens: Vec<u64> = driver.wait(64)?.iter().map(|over| over.token).collect();
    tokens.sort_unstable();
    ensure!(tokens == (0..64).collect::<Vec<u64>>() && driver.channel.in_flight() == 0);
    let bytes = driver.read(4096 * 3, 8192)?;
    ensure!(bytes[..4096].iter().all(|b| *b == 4) && bytes[4096..].iter().all(|b| *b == 5));

    // Zeroed and discarded ranges read as zeroes with byte granularity, and whole objects are removed.
    let mut nothing = IoBuffer::default();
    ensure!(driver.channel.discard(512, 512, &mut nothing, 7).is_ok());
    ensure!(driver.one()?.result == Ok(0));
    let bytes = driver.read(0, 1536)?;
    ensure!(bytes[..512].iter().all(|b| *b == 1), "beside the discarded");
    ensure!(bytes[512..1024].iter().all(|b| *b == 0), "discarded");
    ensure!(
        bytes[1024..].iter().all(|b| *b == 1),
        "beside the discarded"
    );
    for (allocate, offset) in [(false, 4096_u64), (true, 8192)] {
        let zeroed = driver
            .channel
            .write_zeroes(offset, 4096, allocate, &mut nothing, 8);
        ensure!(zeroed.is_ok() && driver.one()?.result == Ok(0));
        ensure!(driver.read(offset, 4096)?.iter().all(|b| *b == 0));
    }
    ensure!(
        driver
            .channel
            .write_zeroes(8 << 20, 4096, true, &mut nothing, 8)
            .is_ok()
    );
    ensure!(driver.one()?.result == Ok(0));
    let pieces = image.allocated(0, 64 << 20)?;
    ensure!(
        pieces.iter().any(|piece| piece.exists && piece.offset == 0)
            && pieces
                .iter()
                .any(|piece| piece.exists && piece.offset == 8 << 20),
        "thick zeroes take space: {pieces:?}"
    );
    ensure!(driver.channel.discard(0, 4 << 20, &mut nothing, 7).is_ok());
    ensure!(driver.one()?.result == Ok(0));
    let pieces = image.allocated(0, 4 << 20)?;
    ensure!(pieces.iter().all(|piece| !piece.exists), "{pieces:?}");
    ensure!(driver.channel.flush(&mut nothing, 9).is_ok());
    ensure!(driver.one()?.result == Ok(0));

    // Compare and write.
    ensure!(driver.write(4096, &[7; 512])? == Ok(0));
    for (expected, outcome) in [(8, Err(libc_eilseq())), (7, Ok(0))] {
        let mut both = IoBuffer::owned(1024);
        both.fill(0, 512, expected);
        both.fill(512, 512, 9);
        ensure!(driver.channel.compare_and_write(4096, &mut both, 3).is_ok());
        let over = driver.one()?;
        ensure!(over.result == outcome, "{over:?}");
    }
    ensure!(driver.read(4096, 512)? == [9; 512]);

    // The watcher sees both resizes. A read beyond the end fails.
    let seen = Arc::new(AtomicU64::new(0));
    let watched_size = Arc::clone(&seen);
    image.watch_size(move |size| watched_size.store(size.unwrap_or(0), Ordering::SeqCst))?;
    image.resize(32 << 20)?;
    ceph.rbd(&["resize", "rbd/a", "--size", "128M", "--no-progress"])?;
    let grown = wait_until(LIMIT, || {
        (seen.load(Ordering::SeqCst) == 128 << 20).then_some(())
    });
    ensure!(grown.is_some(), "seen: {}", seen.load(Ordering::SeqCst));
    let mut buffer = IoBuffer::owned(512);
    let beyond = driver.channel.read(128 << 20, &mut buffer, 4);
    ensure!(beyond.is_ok() && driver.one()?.result == Err(22), "EINVAL");

    // The other control operations.
    ensure!(image.metadata("key")?.is_none());
    image.set_metadata("key", Some("value"))?;
    ensure!(image.metadata("key")?.as_deref() == Some("value"));
    image.set_metadata("key", None)?;
    ensure!(image.metadata("key")?.is_none() && !image.id()?.is_empty());
    image.acquire_lock(LockMode::Exclusive)?;
    ensure!(image.holds_lock()? && image.lock_owners()?.len() == 1);
    image.release_lock()?;
    ensure!(!image.holds_lock()? && image.lock_owners()?.is_empty());
    ceph.rbd(&["namespace", "create", "rbd/tenant"])?;
    ceph.rbd(&["create", "rbd/tenant/c", "--size", "1M"])?;
    ceph.rbd(&["create", "rbd/b", "--size", "1M"])?;
    ensure!(Arc::new(Pool::of(&cluster, "rbd", None)?).images()? == ["a", "b"]);
    ensure!(Arc::new(Pool::of(&cluster, "rbd", Some("tenant"))?).images()? == ["c"]);
    Ok(())
}

/// `EILSEQ`, the error of librbd for a failed comparison.
fn libc_eilseq() -> i32 {
    rustix::io::Errno::ILSEQ.raw_os_error()
}

#[test]
fn open_errors_have_a_reason_and_submission_never_blocks() -> Result<()> {
    let mut ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/a", "--size", "64M"])?;
    let good = config(&ceph);
    let error_of = |config: &ClusterConfig, name: &str| -> Result<String> {
        let name = ImageName::parse(name).context("no name of an image")?;
        let opened = Cluster::connect(config).and_then(|c| Image::open(&c, &name, false));
        Ok(opened.err().context("opened")?.to_string())
    };
    let wrong_key = ClusterConfig {
        keyring: Some(ceph.wrong_keyring()?),
        ..good.clone()
    };
    let no_key = ClusterConfig {
        keyring: Some("/nonexistent/keyring".into()),
        ..good.clone()
    };
    let no_monitor = ClusterConfig {
        mon_host: Some("127.0.0.1:1".to_owned()),
        options: [("client_mount_timeout".to_owned(), "1".to_owned())].into(),
        ..good.clone()
    };
    let no_option = ClusterConfig {
        options: [("rbd_no_such_option".to_owned(), "1".to_owned())].into(),
        ..good.clone()
    };
    let no_file = ClusterConfig {
        conf: Some("/nonexistent/ceph.conf".into()),
        ..good.clone()
    };
    for (config, name, expected) in [
        (&good, "rbd/missing", "lunette rbd list rbd"),
        (&good, "rbd/a@missing", "rbd snap ls rbd/a"),
        (&good, "missing/a", "ceph osd pool ls"),
        (&wrong_key, "rbd/a", "the monitors reject the key"),
        (
            &no_key,
            "rbd/a",
            "cannot read the keyring /nonexistent/keyring",
        ),
        (&no_monitor, "rbd/a", "check that the monitors run"),
        (&no_option, "rbd/a", "option rbd_no_such_option"),
        (&no_file, "rbd/a", "/nonexistent/ceph.conf"),
    ] {
        let begun = Instant::now();
        let error = error_of(config, name)?;
        ensure!(error.contains(expected), "{name}: {error}");
        let took = begun.elapsed();
        ensure!(took < Duration::from_secs(12), "{name} took {took:?}");
    }

    // Without an OSD, more I/O than librados' budget is accepted without blocking. It completes when the OSD is back.
    let image = open(&ceph, "rbd/a")?;
    let mut driver = Driver::new(&image)?;
    ensure!(driver.write(0, &[1; 4096])? == Ok(0));
    ceph.kill_osd();
    let begun = Instant::now();
    for number in 0..2000_u64 {
        let mut buffer = IoBuffer::owned(65536);
        buffer.fill(0, 65536, 2);
        ensure!(
            driver
                .channel
                .write((number % 64) << 20, &mut buffer, number)
                .is_ok()
        );
    }
    let took = begun.elapsed();
    ensure!(took < Duration::from_secs(20), "submitting took {took:?}");
    ensure!(driver.channel.in_flight() == 2000);
    // A blocking operation does not hang either: it times out.
    let error = image.resize(32 << 20).err().context("resized")?;
    ensure!(error.to_string().contains("no response"), "{error}");
    ceph.start_osd()?;
    let over = driver.wait(2000)?;
    ensure!(over.iter().all(|over| over.result == Ok(0)));
    // This range exists whether or not the abandoned resize was executed later.
    ensure!(driver.read(31 << 20, 4096)? == [2; 4096]);
    Ok(())
}

/// Time limit for requests to continue after the return of an OSD.
const RETURN_LIMIT: Duration = Duration::from_secs(50);

fn lunette(words: &[&str]) -> Result<std::process::Output> {
    let program = vm::lunette_program(end_to_end::Profile::Dev)?;
    Ok(std::process::Command::new(program).args(words).output()?)
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn rbd_disk_waits_for_its_osd_and_follows_sizes() -> Result<()> {
    let mut ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/a", "--size", "64M"])?;
    ceph.rbd(&["create", "rbd/s", "--size", "8M"])?;
    ceph.rbd(&["snap", "create", "rbd/s@monday", "--no-progress"])?;
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk(&format!("a={}", ceph.disk("rbd/a")))
            .disk(&format!("s={}", ceph.disk("rbd/s@monday")))
            .vhost_blk("a")
            .vhost_blk("s")
    })?;

    // Under verified load, the OSD is killed and restarted. Requests wait, and none fails.
    let load = VerifiedLoad::start(&rig.socket("a"))?;
    load.expect_progress(LIMIT)?;
    ceph.kill_osd();
    // Completed requests are still counted.
    let waits = wait_until(LIMIT, || load.expect_progress(Duration::from_secs(2)).err())
        .context("requests end without an OSD")?;
    ensure!(
        matches!(waits, vhost_frontend::Error::Timeout(_)),
        "{waits}"
    );
    let begun = Instant::now();
    rig.daemon.lunette(&["status", "--json"])?;
    ensure!(begun.elapsed() < Duration::from_secs(5), "the API waits");
    ceph.start_osd()?;
    load.expect_progress(RETURN_LIMIT)?;
    load.finish()?;

    // The disk is resized in both directions, and the image by another client.
    let size = |rig: &mut Rig| -> Result<u64> {
        let disk = rig.daemon.lunette(&["disk", "show", "a", "--json"])?;
        let disk: serde_json::Value = serde_json::from_str(&disk)?;
        let status = disk.get(0).unwrap_or(&disk);
        status["status"]["size"]
            .as_u64()
            .context("a disk without a size")
    };
    rig.daemon.lunette(&["disk", "resize", "a", "96M"])?;
    let info = ceph.rbd(&["info", "rbd/a", "--format", "json"])?;
    ensure!(info.contains("100663296"), "{info}");
    rig.daemon
        .lunette(&["disk", "resize", "a", "48M", "--force"])?;
    ensure!(size(&mut rig)? == 48 << 20);
    ceph.rbd(&["resize", "rbd/a", "--size", "128M", "--no-progress"])?;
    let followed = wait_until(LIMIT, || (size(&mut rig).ok()? == 128 << 20).then_some(()));
    ensure!(followed.is_some(), "{}", rig.daemon.process().log_tail());

    // Data is intact across the disk, a discard frees the object, and a snapshot is read-only.
    let mut front_end = FrontEnd::connect(&rig.socket("a"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 65536, Layout::Separate)?;
    ensure!(queue.write(100 << 20, &[7; 65536])? == status::OK && queue.flush()? == status::OK);
    let mut bytes = vec![0; 65536];
    ensure!(queue.read(100 << 20, &mut bytes)? == status::OK && bytes == [7; 65536]);
    let image = open(&ceph, "rbd/a")?;
    let has_data = |image: &Arc<Image>| -> Result<bool> {
        Ok(image
            .allocated(100 << 20, 4 << 20)?
            .iter()
            .any(|piece| piece.exists))
    };
    ensure!(has_data(&image)?, "written");
    let whole = Range {
        sector: 100 << 11,
        sectors: 4 << 11,
        flags: 0,
    };
    ensure!(queue.discard(&[whole])? == status::OK);
    ensure!(!has_data(&image)?, "a discarded object takes space");
    ensure!(queue.read(100 << 20, &mut bytes)? == status::OK && bytes == [0; 65536]);
    let mut snapshot = FrontEnd::connect(&rig.socket("s"), &Options::default())?;
    let mut past = BlkQueue::start(&mut snapshot, 0, &options, 4, 4096, Layout::Separate)?;
    ensure!(past.read(0, &mut [1; 512])? == status::OK);
    ensure!(
        past.write(0, &[1; 512])? == status::IOERR,
        "a snapshot was written"
    );

    // The daemon is killed. Completed writes are visible to the next daemon.
    ensure!(queue.write(1 << 20, &[9; 65536])? == status::OK);
    rig.daemon.process().kill()?;
    rig.daemon.start_again()?;
    let mut front_end = FrontEnd::connect(&rig.socket("a"), &Options::default())?;
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 65536, Layout::Separate)?;
    ensure!(queue.read(1 << 20, &mut bytes)? == status::OK && bytes == [9; 65536]);

    // The image list, and a daemon's stop while its cluster is unreachable.
    let (conf, keyring) = (ceph.conf(), ceph.keyring());
    let (conf, keyring) = (conf.to_string_lossy(), keyring.to_string_lossy());
    let connection = ["--conf", &conf, "--id", CEPH_USER, "--keyring", &keyring];
    let words: Vec<&str> = ["rbd", "list", "rbd", "--json"]
        .into_iter()
        .chain(connection)
        .collect();
    let listed = lunette(&words)?;
    let images: serde_json::Value = serde_json::from_slice(&listed.stdout)?;
    ensure!(
        images[0]["name"] == "a" && images[1]["size"] == 8 << 20,
        "{images}"
    );
    drop(image);
    ceph.kill_osd();
    drop(queue);
    let begun = Instant::now();
    rig.daemon.stop(STOP_LIMIT)?;
    ensure!(
        begun.elapsed() < Duration::from_secs(30),
        "the end took {:?}",
        begun.elapsed()
    );
    Ok(())
}

#[test]
fn guest_survives_a_kill_of_the_osd() -> Result<()> {
    let mut ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/a", "--size", "64M"])?;
    let disk = format!("a={}", ceph.disk("rbd/a"));
    let rig = Rig::new(|daemon| {
        let daemon = daemon.disk(&disk).vhost_scsi("c").lun("c/0:0=a");
        daemon.vhost_blk("a")
    })?;
    let mut guest = GuestBuilder::new("rbd")
        .vhost_user_scsi(&rig.socket("c"), 1)
        .vhost_user_blk(&rig.socket("a"), 1)
        .boot()?;
    guest.wait_for_disks(&["sda", "vda"])?;
    let granularity = number(&mut guest, "sda", "queue/discard_granularity")?;
    ensure!(granularity == 4096, "discard granularity {granularity}");
    ensure!(number(&mut guest, "sda", "queue/optimal_io_size")? == 4 << 20);
    let soak = Soak::start(&mut guest, "--file /dev/sda --seed 5")?;
    rig.daemon.wait_for_requests("a", 100)?;
    ceph.kill_osd();
    std::thread::sleep(Duration::from_secs(2));
    ceph.start_osd()?;
    rig.daemon.wait_for_requests("a", 100)?;
    soak.finish(&mut guest)?;
    kernel_is_content(&mut guest)?;

    // Another client resizes the image. The guest's kernel has the new size on both transports without a rescan.
    ceph.rbd(&["resize", "rbd/a", "--size", "96M", "--no-progress"])?;
    for device in ["sda", "vda"] {
        let grown = wait_until(LIMIT, || {
            (number(&mut guest, device, "size").ok()? == 96 << 11).then_some(())
        });
        ensure!(grown.is_some(), "{device} has its old size");
    }
    guest.kill()?;

    // A second disk on the same image would take the lock from the first.
    let again = rig
        .daemon
        .ask(&["disk", "add", &disk.replacen("a=", "b=", 1)])?;
    let error_text = String::from_utf8_lossy(&again.stderr).into_owned();
    ensure!(
        !again.status.success() && error_text.contains("is already used by disk a"),
        "{error_text}"
    );
    // A disk that cannot be opened is refused with the reason. Other disks are not affected.
    let missing = format!("m={}", ceph.disk("rbd/missing"));
    let refused = rig.daemon.ask(&["disk", "add", &missing])?;
    let error_text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(
        !refused.status.success() && error_text.contains("lunette rbd list rbd"),
        "{error_text}"
    );
    Ok(())
}

#[test]
fn fenced_daemon_fails_io_until_its_entry_is_gone() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/a", "--size", "64M"])?;
    let disk = format!("a={}", ceph.disk("rbd/a"));
    let mut rig = Rig::new(|daemon| daemon.disk(&disk).vhost_blk("a"))?;
    let watchers = ceph.rbd(&["status", "rbd/a", "--format", "json"])?;
    let watchers: serde_json::Value = serde_json::from_str(&watchers)?;
    let address = watchers["watchers"][0]["address"]
        .as_str()
        .context("the image has no watcher")?;
    let mut front_end = FrontEnd::connect(&rig.socket("a"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Layout::Separate)?;
    ensure!(queue.write(0, &[1; 512])? == status::OK);
    ceph.ceph(&["osd", "blocklist", "add", address])?;
    let begun = Instant::now();
    while queue.write(0, &[1; 512])? == status::OK {
        ensure!(begun.elapsed() < LIMIT, "a fenced daemon writes");
    }
    let shown = |rig: &Rig| rig.daemon.lunette(&["disk", "show", "a"]);
    let seen = wait_until(LIMIT, || {
        let shown = shown(&rig).ok()?;
        (shown.contains("unavailable") && shown.contains("blocklisted")).then_some(())
    });
    ensure!(seen.is_some(), "{}", shown(&rig)?);
    ensure!(
        queue.write(0, &[2; 512])? != status::OK,
        "it recovers without help"
    );

    // After removal from the blocklist the disk recovers with its data unchanged.
    ceph.ceph(&["osd", "blocklist", "rm", address])?;
    let begun = Instant::now();
    let mut bytes = [0; 512];
    while queue.read(0, &mut bytes)? != status::OK || queue.write(512, &[4; 512])? != status::OK {
        ensure!(
            begun.elapsed() < LOCK_LIMIT,
            "{}",
            rig.daemon.process().log_tail()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    ensure!(bytes == [1; 512]);
    ensure!(!shown(&rig)?.contains("unavailable"), "{}", shown(&rig)?);
    drop(queue);
    rig.daemon.stop(STOP_LIMIT)?;
    Ok(())
}

fn identity(rig: &mut Rig, disk: &str) -> Result<String> {
    let shown = rig.daemon.lunette(&["disk", "identity", disk])?;
    let identity = shown.split_whitespace().find(|word| word.len() == 36);
    Ok(identity.with_context(|| shown.clone())?.to_owned())
}

#[test]
fn identity_follows_the_image_not_its_name() -> Result<()> {
    let ceph = Ceph::start()?;
    for image in ["rbd/a", "rbd/b"] {
        ceph.rbd(&["create", image, "--size", "8M"])?;
    }
    let mut rig = Rig::new(|daemon| daemon.disk(&format!("a={}", ceph.disk("rbd/a"))))?;
    let mut other = rig.beside(|daemon| daemon.disk(&format!("x={}", ceph.disk("rbd/a"))))?;
    let before = identity(&mut rig, "a")?;
    ensure!(identity(&mut other, "x")? == before, "in another daemon");
    drop(other);
    rig.daemon.lunette(&["disk", "remove", "a"])?;
    ceph.rbd(&["rename", "rbd/a", "rbd/c"])?;
    ceph.rbd(&["create", "rbd/a", "--size", "8M"])?;
    for (disk, image) in [("n", "rbd/c"), ("a", "rbd/a"), ("b", "rbd/b")] {
        let flag = format!("{disk}={}", ceph.disk(image));
        rig.daemon.lunette(&["disk", "add", &flag])?;
    }
    ensure!(identity(&mut rig, "n")? == before, "after a rename");
    ensure!(
        identity(&mut rig, "a")? != before,
        "another image of the name"
    );
    ensure!(identity(&mut rig, "b")? != before, "another image");
    Ok(())
}

/// Time limit for a daemon to get an image that another client has released.
const LOCK_LIMIT: Duration = Duration::from_secs(90);

fn wait_for_state(rig: &Rig, state: &str, reason: &str) -> Result<()> {
    let show = || rig.daemon.lunette(&["disk", "show", "d"]);
    let shown = wait_until(LIMIT, || {
        let shown = show().ok()?;
        (shown.contains(state) && shown.contains(reason)).then_some(())
    });
    ensure!(shown.is_some(), "not {state}: {}", show()?);
    Ok(())
}

#[test]
fn exclusive_disk_refuses_others_and_shared_disks_do_not() -> Result<()> {
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/x", "--size", "8M"])?;
    ceph.rbd(&["create", "rbd/s", "--size", "8M", "--image-shared"])?;
    let options = QueueOptions::default();
    let disk = |image: &str, lock: &str| format!("d={},lock={lock}", ceph.disk(image));
    // Exclusive lock: other clients can read but not write, and another daemon names the holder.
    let mut rig = Rig::new(|daemon| daemon.disk(&disk("rbd/x", "exclusive")).vhost_blk("d"))?;
    let mut front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Layout::Separate)?;
    ensure!(queue.write(0, &[1; 512])? == status::OK);
    let image = open(&ceph, "rbd/x")?;
    let mut other = Driver::new(&image)?;
    let refused = other.write(0, &[2; 512])?;
    ensure!(refused.is_err(), "{refused:?}");
    ensure!(other.read(0, 512)? == [1; 512]);
    ensure!(queue.write(512, &[3; 512])? == status::OK);
    let mut late = rig.beside(|daemon| daemon.disk(&disk("rbd/x", "exclusive")))?;
    wait_for_state(&late, "unavailable", "rbd lock ls rbd/x")?;
    drop((queue, front_end, other, image));
    rig.daemon.stop(STOP_LIMIT)?;
    let came = wait_until(LOCK_LIMIT, || {
        let shown = late.daemon.lunette(&["disk", "show", "d"]).ok()?;
        shown.contains("ready").then_some(())
    });
    ensure!(came.is_some(), "{}", late.daemon.process().log_tail());
    drop((late, rig));

    // Shared: each daemon sees the other's writes at once. The image must not have the exclusive-lock feature.
    let first = Rig::new(|daemon| daemon.disk(&disk("rbd/s", "shared")).vhost_blk("d"))?;
    let second = first.beside(|daemon| daemon.disk(&disk("rbd/s", "shared")).vhost_blk("d"))?;
    let mut ends = Vec::new();
    for rig in [&first, &second] {
        ends.push(FrontEnd::connect(&rig.socket("d"), &Options::default())?);
    }
    let queues = ends.iter_mut();
    let queues: std::result::Result<Vec<BlkQueue>, _> = queues
        .map(|end| BlkQueue::start(end, 0, &options, 4, 4096, Layout::Separate))
        .collect();
    let mut queues = queues?;
    for round in 0..32_u8 {
        let (writer, reader) = (usize::from(round % 2), usize::from(1 - round % 2));
        let at = u64::from(round % 4) * 512;
        ensure!(queues[writer].write(at, &[round; 512])? == status::OK);
        let mut bytes = [0xff; 512];
        ensure!(queues[reader].read(at, &mut bytes)? == status::OK && bytes == [round; 512]);
    }
    let wrong = first.beside(|daemon| daemon.disk(&disk("rbd/x", "shared")))?;
    wait_for_state(&wrong, "unavailable", "hint: rbd feature disable rbd/x ")
}

/// Returns a disk in a cluster whose monitors do not answer, with a time-out in seconds.
fn unreachable(name: &str, seconds: u32) -> String {
    format!(
        "{name}=rbd:rbd/a,mon_host=127.0.0.1:1,option.client_mount_timeout={seconds},\
         option.auth_client_required=none"
    )
}

#[test]
fn start_and_reload_do_not_wait_for_a_cluster_that_does_not_answer() -> Result<()> {
    let rig = Rig::prepared(|scratch, daemon| {
        std::fs::write(scratch.file("lunette.toml"), "")?;
        let config = scratch.file("lunette.toml");
        Ok(daemon
            .arguments(["--config", &config.to_string_lossy()])
            .disk("r=ram:1M")
            .disk(&unreachable("d", 20)))
    })?;
    let state = |disk: &str| rig.daemon.lunette(&["disk", "show", disk]);
    ensure!(state("r")?.contains("ready"), "{}", state("r")?);
    ensure!(state("d")?.contains("opening"), "{}", state("d")?);
    let text = "[[disk]]\nname = \"n\"\nbackend = \"rbd\"\nimage = \"rbd/a\"\nmon_host = \"127.0.0.1:2\"\n\
                option = { client_mount_timeout = \"20\", auth_client_required = \"none\" }\n";
    std::fs::write(rig.scratch.file("lunette.toml"), text)?;
    rig.daemon.lunette(&["reload"])?;
    ensure!(state("n")?.contains("opening"), "{}", state("n")?);
    wait_for_state(&rig, "unavailable", "check that the monitors run")?;
    // Removes the disk while it is reopened or waits for that.
    rig.daemon.lunette(&["disk", "remove", "d"])?;
    ensure!(state("d").is_err(), "a removed disk");

    let required = format!("{},require", unreachable("d", 1));
    let scratch = Scratch::new()?;
    let refusing = DaemonBuilder::new(&scratch).disk(&required);
    let (status, log) = refusing.start_refused()?;
    ensure!(
        !status.success() && log.contains("check that the monitors run"),
        "{status}: {log}"
    );
    Ok(())
}

#[test]
fn changes_of_other_disks_are_made_while_an_image_is_being_opened() -> Result<()> {
    let rig = Rig::new(|daemon| daemon.disk("r=ram:1M"))?;
    let unreachable = unreachable("m", 10);
    let program = vm::lunette_program(end_to_end::Profile::Dev)?;
    let mut adding = std::process::Command::new(program)
        .args(["disk", "add", &unreachable, "--socket"])
        .arg(rig.daemon.control())
        .stderr(std::process::Stdio::piped())
        .spawn()?;
    let mut changes = 0;
    let begun = Instant::now();
    while adding.try_wait()?.is_none() {
        ensure!(begun.elapsed() < LIMIT, "an image is still being opened");
        rig.daemon.lunette(&["disk", "add", "n=ram:1M"])?;
        rig.daemon.lunette(&["disk", "remove", "n"])?;
        changes += 2;
    }
    let added = adding.wait_with_output()?;
    let error_text = String::from_utf8_lossy(&added.stderr).into_owned();
    ensure!(
        !added.status.success() && error_text.contains("check that the monitors run"),
        "{error_text}"
    );
    // Few changes happen before the open begins.
    ensure!(changes >= 10, "{changes} changes in ten seconds");
    Ok(())
}

const TARGET: &str = "iqn.2026-11.org.example:rbd";

/// COMPARE AND WRITE(16), each half filled with one byte. Returns status and sense key.
fn compare_and_write(session: &mut IscsiSession, lba: u16, bytes: [u8; 2]) -> Result<(u8, u8)> {
    compare_and_write_blocks(session, lba, 1, bytes)
}

fn compare_and_write_blocks(
    session: &mut IscsiSession,
    lba: u16,
    blocks: u8,
    [expected, new]: [u8; 2],
) -> Result<(u8, u8)> {
    let [high, low] = lba.to_be_bytes();
    let cdb = [0x89, 0, 0, 0, 0, 0, 0, 0, high, low, 0, 0, 0, blocks, 0, 0];
    let half = 512 * usize::from(blocks);
    let data = [vec![expected; half], vec![new; half]].concat();
    let done = session.command(&cdb, Some(&data), 0)?;
    let key = done.sense.get(2).map_or(0, |byte| byte & 0xf);
    Ok((done.status, key))
}

#[test]
fn compare_and_write_is_one_operation_for_all_daemons_of_an_image() -> Result<()> {
    const MISCOMPARE: (u8, u8) = (2, 0x0e);
    const GOOD: (u8, u8) = (0, 0);
    let ceph = Ceph::start()?;
    ceph.rbd(&["create", "rbd/a", "--size", "64M"])?;
    let serve = |daemon: DaemonBuilder| {
        daemon
            .disk(&format!("a={}", ceph.disk("rbd/a")))
            .arguments(["--iscsi", &format!("{TARGET}=a")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
    };
    let mut first = Rig::new(serve)?;
    let mut second = first.beside(serve)?;
    let mut sessions = Vec::new();
    for rig in [&mut first, &mut second] {
        let portal = rig.iscsi_portal(TARGET)?;
        sessions.push(IscsiSession::login(&portal, TARGET, 1)?);
    }
    let [one, other] = &mut sessions[..] else {
        bail!("two sessions");
    };
    ensure!(compare_and_write(one, 9, [0, 1])? == GOOD);
    ensure!(compare_and_write(other, 9, [0, 2])? == MISCOMPARE);
    ensure!(compare_and_write(other, 9, [1, 2])? == GOOD);
    ensure!(compare_and_write(one, 9, [1, 3])? == MISCOMPARE);

    // Exactly one daemon wins each block, even if both try at the same time.
    for round in 0..50 {
        let lba = 100 + round;
        let winner = std::thread::scope(|scope| -> Result<[(u8, u8); 2]> {
            let first = scope.spawn(|| compare_and_write(one, lba, [0, 1]));
            let second = compare_and_write(other, lba, [0, 2])?;
            let first = first.join().ok().context("a thread panicked")??;
            Ok([first, second])
        })?;
        ensure!(
            winner == [GOOD, MISCOMPARE] || winner == [MISCOMPARE, GOOD],
            "round {round}: {winner:?}"
        );
    }

    // librbd 16 accepts one sector at most.
    ensure!(compare_and_write_blocks(one, 8190, 2, [0, 4])? == (2, 0x05));
    Ok(())
}
