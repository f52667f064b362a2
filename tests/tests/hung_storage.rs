//! Storage that stops answering delays only operations on its own disks. Needs: root, FUSE, mount(8); `make unit` runs them. Takes: 110 s.
#![forbid(unsafe_code)]

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control::{Client, ClientError, Method};
use end_to_end::hung_mount::{HungMount, kind};
use end_to_end::loop_device::Loop;
use end_to_end::{Context, Result, Rig, Successor, ensure};
use serde_json::{Value, json};
use vhost_frontend::kind as request;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, VerifiedLoad, status};

const MIB: usize = 1 << 20;
/// SET_VRING_CALL of the vhost-user protocol.
const SET_VRING_CALL: u32 = 13;
/// Time limit for calls that must not wait for storage. The machine may be busy.
const SOON: Duration = Duration::from_secs(10);

struct Bed {
    /// Resumes answering before the daemon ends.
    mount: HungMount,
    rig: Rig,
}

const H: &str = "h=file:@h.raw,cache=writeback";
const JOB: &str = "/v1/disks/h/job";

type Answer = Result<(u16, Value), ClientError>;
/// Mounts a file system with files of these names and sizes.
type NewMount = fn(&Path, &[(&str, usize)]) -> Result<HungMount>;

impl Bed {
    /// Starts a daemon with the RAM disk `ram` and further disks on a mount. `@` in their options is the mount, which has the files
    /// `h.raw` and `t.raw`; `%` is a folder beside it. Requests of the kinds in `hung` are not answered.
    fn new(disks: &[&str], hung: &[u32], exports: &[&str]) -> Result<Bed> {
        Bed::on(HungMount::new, disks, hung, exports)
    }

    fn on(new_mount: NewMount, disks: &[&str], hung: &[u32], exports: &[&str]) -> Result<Bed> {
        let mut mount = None;
        let rig = Rig::prepared(|scratch, daemon| {
            let folder = scratch.file("mnt");
            let new = new_mount(&folder, &[("h.raw", 4 * MIB), ("t.raw", 4 * MIB)])?;
            new.hang(hung);
            mount = Some(new);
            let own = scratch.file("").display().to_string();
            let at = |disk: &&str| {
                let disk = disk.replace('@', &format!("{}/", folder.display()));
                disk.replace('%', &own)
            };
            let daemon = daemon.disk("ram=ram:4M");
            let disks = disks.iter().map(at);
            let daemon = disks.fold(daemon, |daemon, disk| daemon.disk(&disk));
            let exports = exports.iter();
            Ok(exports.fold(daemon, |daemon, export| daemon.vhost_blk(export)))
        })?;
        let mount = mount.context("no mount")?;
        Ok(Bed { mount, rig })
    }

    fn file(&self, name: &str) -> Value {
        let path = self.mount.path(name);
        json!({ "backend": "file", "path": path, "cache": "writeback" })
    }

    fn client(&self) -> Client {
        Client::new(&self.rig.daemon.control()).patient(6 * SOON)
    }

    /// Makes a call that must not wait for storage.
    fn soon(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Answer> {
        let begun = Instant::now();
        let answer = self.client().change(method.clone(), path, body);
        let took = begun.elapsed();
        ensure!(took < SOON, "{method} {path} took {took:?}");
        Ok(answer)
    }

    fn succeeds_soon(&self, method: Method, path: &str, body: Option<&Value>) -> Result<()> {
        let answer = self.soon(method, path, body)?;
        answer.map(drop).with_context(|| path.to_owned())
    }

    fn refused_soon(&self, method: Method, path: &str, body: &Value, reason: &str) -> Result<()> {
        let answer = self.soon(method, path, Some(body))?;
        is_refused(answer, reason)
    }

    /// Makes a call on its own thread and waits until its file system request hangs.
    fn hangs(&self, method: Method, path: &str, body: &Value) -> Result<JoinHandle<Answer>> {
        let held = self.mount.held();
        let (client, path, body) = (self.client(), path.to_owned(), body.clone());
        let running = std::thread::spawn(move || client.change(method, &path, Some(&body)));
        waits_until(|| Ok(self.mount.held() > held))?;
        Ok(running)
    }

    /// Starts a daemon that exports `h`.
    fn with_client() -> Result<Bed> {
        Bed::new(&[H], &[], &["h"])
    }

    fn job(&self, kind: &str) -> Value {
        json!({ "kind": kind, "target": self.file("t.raw") })
    }

    fn job_state(&self) -> Result<String> {
        let shown: Value = self.client().get(JOB)?;
        Ok(shown["state"].as_str().unwrap_or_default().to_owned())
    }

    fn job_becomes(&self, state: &str) -> Result<()> {
        let is_so = || Ok(self.job_state()? == state);
        waits_until(is_so).with_context(|| format!("job is not {state}: {:?}", self.job_state()))
    }

    /// Runs this command. Returns the process that serves then.
    fn upgrade(&self, command: &[&str]) -> Result<Successor> {
        Successor::of(&self.rig.daemon, command)
    }

    fn writes(&self, offset: u64) -> JoinHandle<Result<()>> {
        let socket = self.rig.socket("h");
        std::thread::spawn(move || {
            let mut front_end = FrontEnd::connect(&socket, &Options::default())?;
            let options = QueueOptions::default();
            let mut queue =
                BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, Layout::Separate)?;
            let written = queue.write(offset, &[7; 4096])?;
            ensure!(written == status::OK, "write at {offset}: status {written}");
            Ok(())
        })
    }

    /// Cancels the job, which ends when its storage answers. Until then the disk is served and the target is in use.
    fn cancels(&self) -> Result<()> {
        self.succeeds_soon(Method::DELETE, JOB, None)?;
        let state = self.job_state()?;
        ensure!(state == "cancelling", "the job is {state}");
        let target = self.file("t.raw");
        self.refused_soon(Method::PUT, "/v1/disks/t", &target, "is in use")?;
        written_soon(self.writes(0))?;
        self.mount.release();
        self.job_becomes("cancelled")?;
        self.succeeds_soon(Method::PUT, "/v1/disks/t", Some(&target))?;
        self.succeeds_soon(Method::DELETE, "/v1/disks/t", None)
    }

    fn written_after_20_s(&self, writing: JoinHandle<Result<()>>, begun: Instant) -> Result<()> {
        while !writing.is_finished() {
            ensure!(begun.elapsed() < Duration::from_secs(60), "the write waits");
            std::thread::sleep(Duration::from_millis(100));
        }
        ensure!(begun.elapsed() >= Duration::from_secs(15), "too soon");
        written_soon(writing)
    }

    /// Checks that the job has failed and that the disk is on its source, while the target hangs.
    fn fails_without_its_target(&self) -> Result<()> {
        self.job_becomes("failed")?;
        let shown: Value = self.client().get(JOB)?;
        let reason = shown["reason"].as_str().unwrap_or_default();
        ensure!(reason.contains("cannot write to the target"), "{reason}");
        let switch = format!("{JOB}/switch");
        self.refused_soon(Method::POST, &switch, &Value::Null, "the mirror has failed")?;
        written_soon(self.writes(0))?;
        written_soon(self.writes(2 << 20))
    }

    /// Makes calls about a disk with a job and checks that none waits for the storage.
    fn steers(&self) -> Result<()> {
        for paused in [true, false] {
            let paused = json!({ "paused": paused });
            self.succeeds_soon(Method::PUT, JOB, Some(&paused))?;
        }
        let size = json!({ "size": "8M" });
        self.refused_soon(Method::PUT, "/v1/disks/h/size", &size, "running")?;
        let removed = self.soon(Method::DELETE, "/v1/disks/h?force=true", None)?;
        is_refused(removed, "running")
    }

    /// Returns the free space behind the first disk, from a call that must not wait for storage.
    fn free_space(&self) -> Result<Option<u64>> {
        let (_, status) = self.soon(Method::GET, "/v1/status", None)??;
        Ok(status["disks"][1]["free"].as_u64())
    }

    fn state(&self, disk: &str) -> Result<String> {
        let shown: Value = self.client().get(&format!("/v1/disks/{disk}"))?;
        let state = shown["status"]["state"].as_str();
        Ok(state.unwrap_or_default().to_owned())
    }
}

fn waits_until(is_so: impl Fn() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !is_so()? {
        ensure!(begun.elapsed() < 3 * SOON, "not in time");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn written_soon(running: JoinHandle<Result<()>>) -> Result<()> {
    waits_until(|| Ok(running.is_finished()))?;
    running.join().ok().context("the thread panicked")?
}

fn ended(running: JoinHandle<Answer>) -> Result<Answer> {
    waits_until(|| Ok(running.is_finished()))?;
    running.join().ok().context("the thread panicked")
}

fn is_refused(answer: Answer, reason: &str) -> Result<()> {
    let error = answer.err().context("not refused")?.to_string();
    ensure!(error.contains(reason), "{error}");
    Ok(())
}

#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn disk_that_hangs_while_it_is_opened_holds_up_no_other_change() -> Result<()> {
    let bed = Bed::new(&[], &[], &[])?;
    let (put, h, file) = (Method::PUT, "/v1/disks/h", bed.file("h.raw"));
    let ram = json!({ "backend": "ram", "size": "1M" });
    bed.mount.hang(&[kind::LOOKUP]);
    let adding = bed.hangs(Method::PUT, h, &file)?;
    bed.succeeds_soon(put.clone(), "/v1/disks/other", Some(&ram))?;
    bed.state("other")?;
    let size = json!({ "size": "8M" });
    bed.succeeds_soon(put.clone(), "/v1/disks/ram/size", Some(&size))?;
    bed.refused_soon(put.clone(), h, &file, "disk h is being opened")?;
    bed.refused_soon(put.clone(), h, &ram, "disk h is being opened")?;
    bed.succeeds_soon(Method::DELETE, h, None)?;
    is_refused(ended(adding)?, "was removed while it was being opened")?;
    // The late result is closed, so its lock does not prevent another open.
    bed.mount.release();
    waits_until(|| Ok(bed.soon(Method::PUT, h, Some(&file))?.is_ok()))?;
    ensure!(bed.state("h")? == "ready");
    // The response to a removal means that the file is closed.
    for _ in 0..10 {
        bed.succeeds_soon(Method::DELETE, h, None)?;
        bed.succeeds_soon(Method::PUT, h, Some(&file))?;
    }
    bed.mount.hang(&[kind::SETATTR]);
    let resizing = bed.hangs(Method::PUT, "/v1/disks/h/size", &size)?;
    let other = json!({ "size": "16M" });
    bed.succeeds_soon(put.clone(), "/v1/disks/ram/size", Some(&other))?;
    bed.refused_soon(put, "/v1/disks/h/size", &other, "removed or resized")?;
    bed.mount.release();
    ended(resizing)??;
    let content = bed.mount.content("h.raw").context("no file")?;
    ensure!(content.len() == 8 * MIB, "{} bytes", content.len());
    Ok(())
}

/// The storage hangs while a disk is shrunk, while its identity is written, and while a new file is removed after a failed change.
#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn end_of_a_change_that_hangs_holds_up_no_other_change() -> Result<()> {
    let bed = Bed::new(&[H], &[], &[])?;
    let put = Method::PUT;
    let others = |size: &str| -> Result<()> {
        bed.succeeds_soon(
            put.clone(),
            "/v1/disks/ram/size",
            Some(&json!({ "size": size })),
        )?;
        let ram = json!({ "backend": "ram", "size": "1M" });
        bed.succeeds_soon(put.clone(), "/v1/disks/other", Some(&ram))?;
        bed.succeeds_soon(Method::DELETE, "/v1/disks/other", None)
    };
    bed.mount.hang(&[kind::SETATTR]);
    let (path, size) = ("/v1/disks/h/size?force=true", json!({ "size": "2M" }));
    let shrinking = bed.hangs(put.clone(), path, &size)?;
    others("8M")?;
    let third = json!({ "size": "3M" });
    bed.refused_soon(put.clone(), path, &third, "removed or resized")?;
    bed.refused_soon(Method::POST, JOB, &bed.job("mirror"), "resized")?;
    bed.mount.release();
    ended(shrinking)??;
    let content = bed.mount.content("h.raw").context("no file")?;
    ensure!(content.len() == 2 * MIB, "{} bytes", content.len());
    let shown: Value = bed.client().get("/v1/disks/h")?;
    ensure!(shown["status"]["size"] == 2 * MIB, "{shown}");
    bed.succeeds_soon(put.clone(), path, Some(&json!({ "size": "1M" })))?;

    bed.mount.hang(&[kind::SETXATTR]);
    bed.succeeds_soon(put.clone(), "/v1/disks/t", Some(&bed.file("t.raw")))?;
    ensure!(bed.mount.held() > 0, "no attribute was set");
    others("16M")?;
    ensure!(bed.state("t")? == "ready");
    bed.mount.release();

    // The socket of the export cannot be made, so the file of its disk is removed.
    let mut all: Value = bed.client().get("/v1/config")?;
    let mut new = bed.file("new.raw");
    new["name"] = "new".into();
    new["size"] = "1M".into();
    let socket = bed.rig.scratch.file("missing/new.sock");
    let export = json!({ "kind": "vhost-blk", "name": "new", "disk": "new", "socket": socket });
    all["disks"].as_array_mut().context("no disks")?.push(new);
    all["exports"]
        .as_array_mut()
        .context("no exports")?
        .push(export);
    bed.mount.hang(&[kind::UNLINK]);
    let failing = bed.hangs(put.clone(), "/v1/config", &all)?;
    others("32M")?;
    bed.mount.release();
    is_refused(ended(failing)?, "missing/new.sock")?;
    ensure!(bed.mount.content("new.raw").is_none(), "the file is left");
    Ok(())
}

/// The storage hangs while its sizes are read, and while a new identity is written.
#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn size_and_identity_that_hang_hold_up_no_other_change() -> Result<()> {
    let bed = Bed::new(&[H], &[], &[])?;
    let others = || -> Result<()> {
        let ram = json!({ "backend": "ram", "size": "1M" });
        bed.succeeds_soon(Method::PUT, "/v1/disks/other", Some(&ram))?;
        bed.succeeds_soon(Method::DELETE, "/v1/disks/other", None)
    };
    let (path, grown) = ("/v1/disks/h/size", json!({ "size": "8M" }));
    // A resize uses the open file, not its path.
    bed.mount.hang(&[kind::LOOKUP]);
    bed.succeeds_soon(Method::PUT, path, Some(&grown))?;
    bed.mount.release();
    waits_until(|| Ok(bed.free_space()? == Some(4 << 30)))?;

    bed.mount.hang(&[kind::GETATTR]);
    let following = bed.hangs(Method::PUT, path, &json!({}))?;
    others()?;
    // Values that were read before the hang are shown until they are too old.
    waits_until(|| Ok(bed.free_space()?.is_none()))?;
    // The kernel reports a change of a block device to the daemon.
    let backing = bed.rig.scratch.file("loop.raw");
    std::fs::write(&backing, vec![0; MIB])?;
    let device = Loop::over(&backing)?;
    std::fs::File::options()
        .write(true)
        .open(&backing)?
        .set_len(2 << 20)?;
    device.take_size()?;
    std::thread::sleep(Duration::from_millis(200));
    others()?;
    bed.mount.release();
    ended(following)??;
    waits_until(|| Ok(bed.free_space()?.is_some()))?;
    let shown: Value = bed.client().get("/v1/disks/h")?;
    ensure!(shown["status"]["size"] == 8 * MIB, "{shown}");

    let identity = || -> Result<Value> {
        let shown: Value = bed.client().get("/v1/disks/h")?;
        Ok(shown["status"]["identity"].clone())
    };
    let before = identity()?;
    bed.mount.hang(&[kind::SETXATTR]);
    let renewing = bed.hangs(Method::POST, "/v1/disks/h/identity", &json!({}))?;
    others()?;
    let removed = bed.soon(Method::DELETE, "/v1/disks/h", None)?;
    is_refused(removed, "disk h is being given an identity")?;
    let again = bed.soon(Method::POST, "/v1/disks/h/identity", None)?;
    is_refused(again, "given an identity")?;
    ensure!(identity()? == before, "the identity is not written yet");
    bed.mount.release();
    ended(renewing)??;
    ensure!(identity()? != before, "the identity is as before");
    bed.succeeds_soon(Method::DELETE, "/v1/disks/h", None)
}

/// A new file of a mirror is durable with its name: the folder is synced after the file is created, and a failure refuses the job.
#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn new_file_of_a_mirror_is_durable_with_its_folder() -> Result<()> {
    let bed = Bed::with_client()?;
    for backend in ["file", "image"] {
        let name = format!("new-{backend}");
        let mut target = bed.file(&name);
        target["backend"] = backend.into();
        let job = json!({ "kind": "mirror", "target": target, "switch": true });
        bed.mount.fail(&[kind::FSYNCDIR]);
        let refused = bed.soon(Method::POST, JOB, Some(&job))?;
        is_refused(refused, &name)?;
        ensure!(bed.mount.content(&name).is_none(), "{name} is left");
        bed.mount.fail(&[]);
        let before = bed.mount.answered().len();
        bed.succeeds_soon(Method::POST, JOB, Some(&job))?;
        bed.job_becomes("done")?;
        let requests = bed.mount.answered().split_off(before);
        let at = |kind| requests.iter().position(|answered| *answered == kind);
        let (created, synced) = (at(kind::CREATE), at(kind::FSYNCDIR));
        let written = at(kind::WRITE);
        ensure!(
            created.is_some() && created < synced && synced < written.or(Some(usize::MAX)),
            "{name}: created {created:?}, folder synced {synced:?}, written {written:?}"
        );
    }
    Ok(())
}

#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn mirror_switches_after_a_failed_fsync_only_by_force() -> Result<()> {
    let bed = Bed::with_client()?;
    bed.succeeds_soon(Method::POST, JOB, Some(&bed.job("mirror")))?;
    bed.job_becomes("ready")?;
    bed.mount.fail(&[kind::FSYNC]);
    bed.succeeds_soon(Method::POST, &format!("{JOB}/switch"), None)?;
    waits_until(|| {
        let shown: Value = bed.client().get(JOB)?;
        Ok(shown.to_string().contains("job switch h --force"))
    })?;
    bed.mount.fail(&[]);
    bed.succeeds_soon(Method::POST, &format!("{JOB}/switch?force=true"), None)?;
    bed.job_becomes("done")
}

#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn daemon_starts_while_a_lookup_hangs() -> Result<()> {
    let bed = Bed::new(&[H], &[kind::LOOKUP], &[])?;
    ensure!(bed.mount.held() > 0, "no lookup");
    ensure!(bed.state("h")? == "opening", "{}", bed.state("h")?);
    let ram = json!({ "backend": "ram", "size": "1M" });
    bed.succeeds_soon(Method::PUT, "/v1/disks/other", Some(&ram))?;
    bed.mount.release();
    Ok(())
}

#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn disk_that_hangs_at_the_start_becomes_available_later() -> Result<()> {
    let bed = Bed::new(&[H], &[kind::OPEN], &[])?;
    ensure!(bed.state("h")? == "opening", "{}", bed.state("h")?);
    ensure!(bed.state("ram")? == "ready");
    let ram = json!({ "backend": "ram", "size": "1M" });
    bed.succeeds_soon(Method::PUT, "/v1/disks/other", Some(&ram))?;
    bed.mount.release();
    waits_until(|| Ok(bed.state("h")? == "ready"))
}

#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn job_is_cancelled_while_its_own_write_hangs() -> Result<()> {
    let bed = Bed::with_client()?;
    for kind in ["backup", "mirror"] {
        bed.mount.hang_file("t.raw", &[kind::WRITE]);
        bed.succeeds_soon(Method::POST, JOB, Some(&bed.job(kind)))?;
        waits_until(|| Ok(bed.mount.held() > 0))?;
        bed.steers()?;
        written_soon(bed.writes(2 << 20))?;
        bed.cancels()?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn job_is_cancelled_while_its_last_flush_hangs() -> Result<()> {
    let bed = Bed::with_client()?;
    bed.mount.hang_file("t.raw", &[kind::FSYNC]);
    bed.succeeds_soon(Method::POST, JOB, Some(&bed.job("backup")))?;
    waits_until(|| Ok(bed.mount.held() > 0))?;
    bed.steers()?;
    bed.cancels()?;
    bed.succeeds_soon(Method::POST, JOB, Some(&bed.job("mirror")))?;
    bed.job_becomes("ready")?;
    bed.mount.hang_file("t.raw", &[kind::FSYNC]);
    bed.succeeds_soon(Method::POST, &format!("{JOB}/switch"), None)?;
    waits_until(|| Ok(bed.mount.held() > 0))?;
    bed.steers()?;
    bed.cancels()
}

#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn job_is_cancelled_while_its_target_is_opened() -> Result<()> {
    let bed = Bed::with_client()?;
    bed.mount.hang_file("t.raw", &[kind::OPEN]);
    let starting = bed.hangs(Method::POST, JOB, &bed.job("mirror"))?;
    bed.steers()?;
    bed.succeeds_soon(Method::DELETE, JOB, None)?;
    is_refused(ended(starting)?, "was cancelled")?;
    bed.job_becomes("cancelling")?;
    written_soon(bed.writes(0))?;
    bed.mount.release();
    bed.job_becomes("cancelled")
}

#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn clients_wait_20_s_for_a_target_unless_the_mirror_is_cancelled() -> Result<()> {
    let bed = Bed::with_client()?;
    for is_cancelled in [true, false] {
        bed.succeeds_soon(Method::POST, JOB, Some(&bed.job("mirror")))?;
        bed.job_becomes("ready")?;
        bed.mount.hang_file("t.raw", &[kind::WRITE]);
        let begun = Instant::now();
        let writing = bed.writes(0);
        waits_until(|| Ok(bed.mount.held() > 0))?;
        ensure!(!writing.is_finished(), "the write is not mirrored");
        if is_cancelled {
            bed.succeeds_soon(Method::DELETE, JOB, None)?;
            written_soon(writing)?;
            bed.cancels()?;
            continue;
        }
        bed.written_after_20_s(writing, begun)?;
        // The target still hangs.
        bed.fails_without_its_target()?;
        bed.mount.release();
    }
    Ok(())
}

/// An upgrade would stop all clients until the storage answers. It is refused, and they continue.
#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn clients_wait_20_s_for_a_range_that_is_copied_to_a_hung_target() -> Result<()> {
    let bed = Bed::with_client()?;
    bed.mount.hang_file("t.raw", &[kind::WRITE]);
    let begun = Instant::now();
    bed.succeeds_soon(Method::POST, JOB, Some(&bed.job("mirror")))?;
    waits_until(|| Ok(bed.mount.held() > 0))?;
    let writing = bed.writes(0);
    let delay = || {
        let shown: Value = bed.client().get(JOB)?;
        let reason = shown["reason"].as_str().unwrap_or_default();
        Ok(reason.contains("t.raw has not responded for "))
    };
    waits_until(delay)?;
    ensure!(!writing.is_finished(), "the range is not held");
    bed.written_after_20_s(writing, begun)?;
    bed.fails_without_its_target()
}

#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn upgrade_is_refused_while_a_disk_or_a_front_end_hangs() -> Result<()> {
    let bed = Bed::new(&[H], &[], &["h", "ram"])?;
    let other = VerifiedLoad::start(&bed.rig.socket("ram"))?;
    let is_refused = |reason: &str| -> Result<()> {
        let upgrade = ["upgrade", "--lose-ram-disks"];
        let error = bed.rig.daemon.lunette(&upgrade).err();
        let error = error.context("not refused")?.to_string();
        let names_the_cause = error.contains(reason) && error.contains("--force");
        ensure!(names_the_cause, "{error}");
        other.expect_progress(SOON)?;
        Ok(())
    };
    bed.mount.hang(&[kind::WRITE]);
    let writing = bed.writes(0);
    waits_until(|| Ok(bed.mount.held() > 0))?;
    is_refused("an I/O of disk h ")?;
    bed.mount.release();
    written_soon(writing)?;

    // The session's thread waits for the close of a descriptor.
    let file = File::open(bed.mount.path("t.raw"))?;
    let front_end = FrontEnd::connect(&bed.rig.socket("h"), &Options::default())?;
    bed.mount.hang(&[kind::FLUSH]);
    let (channel, no_ring) = (front_end.channel(), 0u64.to_ne_bytes());
    channel.send(SET_VRING_CALL, 0, &no_ring, &[file.as_fd()])?;
    let closing = std::thread::spawn(move || drop(file));
    waits_until(|| Ok(bed.mount.held() == 2))?;
    is_refused("the front end of export h ")?;
    bed.mount.release();
    closing.join().ok().context("the thread panicked")?;
    other.finish()?;
    Ok(())
}

/// Locks that follow the queues of a disk are taken and released beside the worker, which serves another disk meanwhile. A queue waits for its
/// locks, and its front end waits for their release.
#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn hung_lock_service_delays_only_its_own_disk() -> Result<()> {
    // Requests of a disk that reports errors wait for the locks, too.
    let disk = "h=file:@h.raw,cache=writeback,lock=while-active,on_error=report";
    let bed = Bed::on(HungMount::with_locks, &[disk], &[], &["h", "ram"])?;
    let other = VerifiedLoad::start(&bed.rig.socket("ram"))?;
    bed.mount.hang(&[kind::SETLK]);
    let writing = bed.writes(0);
    waits_until(|| Ok(bed.mount.held() > 0))?;
    other.expect_progress(SOON)?;
    waits_until(|| Ok(bed.state("h")? == "unavailable"))?;
    ensure!(!writing.is_finished(), "the write did not wait");
    bed.mount.release();
    written_soon(writing)?;

    let mut front_end = FrontEnd::connect(&bed.rig.socket("h"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 1, 4096, Layout::Separate)?;
    ensure!(queue.write(0, &[8; 4096])? == status::OK);
    bed.mount.hang(&[kind::SETLK]);
    let stopping = std::thread::spawn(move || front_end.stop_queue(0));
    waits_until(|| Ok(bed.mount.held() > 0))?;
    other.expect_progress(SOON)?;
    ensure!(!stopping.is_finished(), "the locks are not released");
    bed.mount.release();
    waits_until(|| Ok(stopping.is_finished()))?;
    stopping.join().ok().context("the thread panicked")??;
    written_soon(bed.writes(0))?;
    other.finish()?;
    Ok(())
}

/// The old process cannot end while its write hangs. The new one serves all other disks.
#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn forced_upgrade_serves_all_disks_but_the_one_that_hangs() -> Result<()> {
    let disks = [H, "k=file:%k.raw,size=4M,cache=writeback"];
    let bed = Bed::new(&disks, &[], &["h", "k"])?;
    let other = VerifiedLoad::start(&bed.rig.socket("k"))?;
    bed.mount.hang(&[kind::WRITE]);
    let writing = bed.writes(0);
    waits_until(|| Ok(bed.mount.held() > 0))?;
    let _successor = bed.upgrade(&["upgrade", "--lose-ram-disks", "--force"])?;
    ensure!(bed.mount.held() > 0, "the write has ended");
    other.expect_progress(SOON)?;
    ensure!(bed.state("k")? == "ready", "{}", bed.state("k")?);
    ensure!(bed.state("h")? != "ready", "the disk is open twice");
    bed.mount.release();
    waits_until(|| Ok(bed.state("h")? == "ready"))?;
    // The front end of the disk that hung must reconnect.
    waits_until(|| Ok(writing.is_finished()))?;
    other.finish()?;
    Ok(())
}

/// Time that the close of a disk takes.
const SLOW_CLOSE: Duration = Duration::from_secs(7);

/// The new process starts when the old one has closed all disks. Otherwise clients of the disk would get errors.
#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn upgrade_waits_for_a_disk_that_closes_slowly() -> Result<()> {
    let disks = [H, "t=file:@t.raw,cache=writeback"];
    let bed = Bed::new(&disks, &[], &["h"])?;
    let load = VerifiedLoad::start(&bed.rig.socket("h"))?;
    load.expect_progress(SOON)?;
    bed.mount.hang_file("t.raw", &[kind::FLUSH]);
    let _successor = std::thread::scope(|scope| {
        let releasing = scope.spawn(|| {
            waits_until(|| Ok(bed.mount.held() > 0))?;
            std::thread::sleep(SLOW_CLOSE);
            bed.mount.release();
            anyhow::Ok(())
        });
        let successor = bed.upgrade(&["upgrade", "--lose-ram-disks"]);
        let released = releasing.join();
        released.ok().context("the thread panicked")??;
        successor
    })?;
    ensure!(bed.state("t")? == "ready", "{}", bed.state("t")?);
    load.expect_progress(SOON)?;
    load.finish()?;
    Ok(())
}

/// Writes a block of this number with this byte, without waiting for it.
fn submit_write(queue: &mut BlkQueue, block: u64, byte: u8) -> Result<()> {
    let slot = queue.take().context("all requests are in flight")?;
    queue.data(slot).write(0, &[byte; 4096]);
    ensure!(queue.submit(slot, request::OUT, 8 * block, 4096, 0));
    queue.publish();
    Ok(())
}

/// The session ends when its requests have ended, and its front end reconnects with its in-flight region.
#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn queue_that_drains_for_7_s_in_an_upgrade_loses_no_write() -> Result<()> {
    let bed = Bed::with_client()?;
    let mut front_end = FrontEnd::connect(&bed.rig.socket("h"), &Options::default())?;
    let options = QueueOptions::default();
    let region = front_end.new_inflight(1, options.size)?;
    front_end.give_inflight(&region)?;
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Layout::Separate)?;
    ensure!(queue.write(0, &[1; 4096])? == status::OK);
    bed.mount.hang(&[kind::WRITE]);
    submit_write(&mut queue, 0, 2)?;
    submit_write(&mut queue, 1, 2)?;
    waits_until(|| Ok(bed.mount.held() > 0))?;
    let successor = std::thread::scope(|scope| {
        let upgrading = scope.spawn(|| bed.upgrade(&["upgrade", "--lose-ram-disks", "--force"]));
        std::thread::sleep(SLOW_CLOSE);
        // Queues have stopped. The next process executes the request.
        let submitted = submit_write(&mut queue, 2, 3);
        bed.mount.release();
        submitted?;
        upgrading.join().ok().context("the thread panicked")?
    });
    let _successor = successor?;
    let mut done = 0;
    let begun = Instant::now();
    while done < 3 {
        if let Ok(one) = queue.wait_for(Duration::from_millis(20)) {
            ensure!(one.status == status::OK, "{one:?}");
            queue.release(one.slot);
            done += 1;
        }
        ensure!(begun.elapsed() < 3 * SOON, "{done} of 3 writes completed");
        // The export has no socket until its disk is open.
        if front_end.channel().is_closed()
            && let Ok(mut again) = FrontEnd::connect(&bed.rig.socket("h"), &Options::default())
        {
            std::mem::swap(again.memory_mut(), front_end.memory_mut());
            front_end = again;
            front_end.send_memory()?;
            front_end.give_inflight(&region)?;
            front_end.begin_queue(queue.queue(), 1 + done)?;
        }
    }
    ensure!(queue.write(0, &[4; 4096])? == status::OK);
    let content = bed.mount.content("h.raw").context("no file")?;
    let expected = [4, 2, 3].map(|byte| [byte; 4096]).concat();
    ensure!(content.starts_with(&expected), "a write is lost");
    Ok(())
}

/// The exit of the old process hangs in the close of a disk. The new one serves all other disks.
#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn close_that_hangs_makes_only_its_own_disk_unavailable() -> Result<()> {
    let disks = [H, "k=file:%k.raw,size=4M,cache=writeback"];
    let bed = Bed::new(&disks, &[], &["h", "k"])?;
    let other = VerifiedLoad::start(&bed.rig.socket("k"))?;
    bed.mount.hang(&[kind::FLUSH]);
    let _successor = bed.upgrade(&["upgrade", "--lose-ram-disks"])?;
    ensure!(bed.mount.held() > 0, "the close has ended");
    other.expect_progress(SOON)?;
    ensure!(bed.state("h")? != "ready", "the disk is open twice");
    bed.mount.release();
    waits_until(|| Ok(bed.state("h")? == "ready"))?;
    other.finish()?;
    Ok(())
}

/// Writes until a request fails. Returns the status of that request.
fn failed_write(socket: PathBuf, began: mpsc::Sender<()>) -> Result<u8> {
    let mut front_end = FrontEnd::connect(&socket, &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, Layout::Separate)?;
    loop {
        for offset in (0..MIB as u64).step_by(4096) {
            let status = queue.write(offset, &[7; 4096])?;
            if status != status::OK {
                return Ok(status);
            }
            began.send(()).ok();
        }
    }
}

/// A file, and a loop device over a file, whose file system goes away while a client writes.
#[test]
#[ignore = "needs root and FUSE; make unit runs it as root"]
fn device_that_goes_away_under_load_fails_its_own_requests_alone() -> Result<()> {
    for is_block_device in [false, true] {
        let bed = Bed::new(&[], &[], &["ram"])?;
        let path = bed.mount.path("h.raw");
        let device = is_block_device.then(|| Loop::over(&path)).transpose()?;
        let path = device
            .as_ref()
            .map_or(path, |device| device.0.clone().into());
        let disk = json!({ "backend": "file", "path": path });
        bed.succeeds_soon(Method::PUT, "/v1/disks/h", Some(&disk))?;
        let export = format!("h:{}", bed.rig.socket("h").display());
        let daemon = &bed.rig.daemon;
        daemon.lunette(&["export", "add", "vhost-blk", &export])?;
        let other = VerifiedLoad::start(&bed.rig.socket("ram"))?;
        let (socket, (began, begun)) = (bed.rig.socket("h"), mpsc::channel());
        let writing = std::thread::spawn(move || failed_write(socket, began));
        for _ in 0..100 {
            begun.recv_timeout(SOON).context("no write succeeds")?;
        }
        bed.mount.go_away()?;
        waits_until(|| Ok(writing.is_finished()))?;
        let status = writing.join().ok().context("the thread panicked")??;
        ensure!(status == status::IOERR, "status {status}");
        other.expect_progress(SOON)?;
        ensure!(bed.state("ram")? == "ready");
        bed.state("h")?;
        bed.succeeds_soon(Method::DELETE, "/v1/exports/h?force=true", None)?;
        bed.succeeds_soon(Method::DELETE, "/v1/disks/h", None)?;
        other.finish()?;
    }
    Ok(())
}
