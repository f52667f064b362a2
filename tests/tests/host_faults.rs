//! Faults of the host: refused threads, and jumps of the wall clock. Needs: cc, qemu-img. Takes: 20 s.
#![forbid(unsafe_code)]

use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use control::{Client, Method};
use end_to_end::http;
use end_to_end::preload::Preload;
use end_to_end::rig::free_portal;
use end_to_end::{Context, DaemonBuilder, IscsiSession, Result, Rig, Scratch, bail, ensure};
use serde_json::{Value, json};
use vhost_frontend::VerifiedLoad;

const TARGET: &str = "iqn.2026-11.org.example:faults";
/// Time limit of a request, far above the usual time on a loaded machine.
const SOON: Duration = Duration::from_secs(20);
/// Number of threads, above the number that a start needs.
const THREADS_MAX: i64 = 100;
/// READ (10) of one block (SBC-4, 5.13).
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// A daemon with one disk and export of each kind that has its own threads.
fn described(
    scratch: &Scratch,
    daemon: DaemonBuilder,
    preload: &Preload,
    portal: &str,
) -> Result<DaemonBuilder> {
    let image = scratch.file("image.qcow2").display().to_string();
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", &image, "16M"])
        .status()
        .context("cannot run qemu-img; hint: apt-get install qemu-utils")?;
    ensure!(made.success(), "qemu-img: {made}");
    let wrapper = preload.wrapper();
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    Ok(daemon
        .under(&wrapper)
        .disk(&format!(
            "file=file:{},size=16M",
            scratch.file("file.raw").display()
        ))
        .disk(&format!("image=image:{image}"))
        .disk("unit=ram:16M")
        .vhost_blk("file")
        .vhost_blk("image")
        .vhost_scsi("controller")
        .lun("controller/0:0=unit")
        .arguments(["--workers", "2", "--metrics-listen", "127.0.0.1:0"])
        .arguments(["--iscsi", &format!("{TARGET}=unit"), "--portal", portal])
        .arguments(["--demo-mode", "rw"]))
}

struct Bed {
    rig: Rig,
    preload: Preload,
    portal: String,
}

impl Bed {
    fn new() -> Result<Bed> {
        let portal = free_portal()?.to_string();
        let mut preload = None;
        let rig = Rig::prepared(|scratch, daemon| {
            let preload = preload.insert(Preload::new(scratch)?);
            described(scratch, daemon, preload, &portal)
        })?;
        Ok(Bed {
            rig,
            preload: preload.context("no preloaded library")?,
            portal,
        })
    }

    /// Checks that exports of these disks, the target and the API are served.
    fn serves(&self, disks: &[&str]) -> Result<()> {
        for export in disks {
            let load = VerifiedLoad::start(&self.rig.socket(export))?;
            load.expect_progress(SOON)?;
            load.finish()?;
        }
        let mut session = IscsiSession::login(&self.portal, TARGET, 1)?;
        ensure!(session.command(&READ, None, 512)?.status == 0);
        self.rig.daemon.lunette(&["status"])?;
        Ok(())
    }

    fn change(&self, method: Method, path: &str, body: &Value) -> Result<(u16, Value)> {
        let client = Client::new(&self.rig.daemon.control()).patient(SOON);
        Ok(client.change(method, path, Some(body))?)
    }

    /// Checks that a change is refused because it needs a thread.
    fn is_refused(&self, method: Method, path: &str, body: &Value) -> Result<()> {
        let Err(error) = self.change(method, path, body) else {
            bail!("{path} needs no thread");
        };
        let text = format!("{error:#}");
        ensure!(text.contains("thread"), "{path}: {text}");
        Ok(())
    }

    fn ends_well(mut self) -> Result<()> {
        let status = self.rig.daemon.stop(SOON)?;
        let log = self.rig.daemon.process().log();
        ensure!(
            status.success() && !log.contains("panicked"),
            "{status}\n{log}"
        );
        Ok(())
    }
}

/// Each thread of a start is refused once, and so are all later ones.
#[test]
fn daemon_without_threads_gives_the_reason_or_starts_whole() -> Result<()> {
    let mut refused = 0;
    let (scratch, portal) = (Scratch::new()?, free_portal()?.to_string());
    let preload = Preload::new(&scratch)?;
    let builder = described(&scratch, DaemonBuilder::new(&scratch), &preload, &portal)?;
    for threads in 0..THREADS_MAX {
        preload.allow_threads(threads)?;
        match builder.start() {
            Err(error) => {
                let text = format!("{error:#}");
                ensure!(
                    text.contains("Resource temporarily unavailable") && !text.contains("panicked"),
                    "with {threads} threads: {text}"
                );
                refused += 1;
            }
            Ok(mut daemon) => {
                let has_all = preload.threads_left()? >= 0;
                preload.allow_threads(i64::MAX)?;
                for export in ["file", "image"] {
                    let socket = scratch.socket(&format!("{export}.sock"));
                    let load = VerifiedLoad::start(&socket)?;
                    load.expect_progress(SOON)
                        .with_context(|| format!("{export} with {threads} threads"))?;
                    load.finish()?;
                }
                let mut session = IscsiSession::login(&portal, TARGET, 1)?;
                ensure!(session.command(&READ, None, 512)?.status == 0);
                daemon.lunette(&["status"])?;
                drop(session);
                let status = daemon.stop(SOON)?;
                ensure!(status.success(), "with {threads} threads: {status}");
                if has_all {
                    ensure!(refused > 5, "only {refused} threads were refused");
                    return Ok(());
                }
                // Its lines would make the next daemon look ready.
                std::fs::remove_file(scratch.file("lunette.log"))?;
            }
        }
    }
    bail!("{THREADS_MAX} threads are not enough")
}

#[test]
fn daemon_without_free_threads_refuses_dependent_changes() -> Result<()> {
    let bed = Bed::new()?;
    let load = VerifiedLoad::start(&bed.rig.socket("file"))?;
    let mut session = IscsiSession::login(&bed.portal, TARGET, 1)?;
    bed.preload.allow_threads(0)?;
    let ask = |words: &[&str]| bed.rig.daemon.ask(words);
    let status = ask(&["status"])?;
    let text = String::from_utf8_lossy(&status.stderr);
    ensure!(text.contains("cannot start a thread"), "{text}");
    let file = |name: &str| {
        let path = bed.rig.scratch.file(name);
        json!({ "backend": "file", "path": path, "size": "16M" })
    };
    bed.is_refused(Method::PUT, "/v1/disks/new", &file("new.raw"))?;
    let job = json!({ "kind": "mirror", "target": file("target.raw") });
    bed.is_refused(Method::POST, "/v1/disks/file/job", &job)?;
    ensure!(VerifiedLoad::start(&bed.rig.socket("image")).is_err());
    ensure!(!ask(&["upgrade"])?.status.success());
    // Served clients are not affected.
    load.expect_progress(SOON)?;
    ensure!(session.command(&READ, None, 512)?.status == 0);
    bed.preload.allow_threads(i64::MAX)?;
    load.expect_progress(SOON)?;
    load.finish()?;
    drop(session);
    bed.serves(&["file", "image"])?;
    bed.change(Method::PUT, "/v1/disks/new", &file("new.raw"))?;
    bed.change(Method::POST, "/v1/disks/file/job", &job)?;
    bed.preload.allow_threads(0)?;
    bed.ends_well()
}

#[test]
fn wall_clock_that_jumps_affects_no_client() -> Result<()> {
    const DAY: i64 = 86_400;
    let bed = Bed::new()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let now = i64::try_from(now)?;
    let load = VerifiedLoad::start(&bed.rig.socket("file"))?;
    let limited = json!({ "iops": 1000 });
    bed.change(Method::PUT, "/v1/disks/unit/limits", &limited)?;
    // The clock jumps by a day, by ten years, to 1970 (the earliest time in Linux), beyond 2038, and back.
    for offset in [1, DAY, -DAY, 3650 * DAY, 10 - now, 7300 * DAY, 0] {
        bed.preload.move_clock(offset)?;
        let begun = Instant::now();
        load.slowest_batch();
        for _ in 0..3 {
            load.expect_progress(SOON)?;
        }
        bed.serves(&["image"])
            .with_context(|| format!("offset {offset} s"))?;
        let (took, slowest) = (begun.elapsed(), load.slowest_batch());
        ensure!(
            took < SOON && slowest < SOON / 4,
            "offset {offset} s: {took:?}, slowest batch {slowest:?}"
        );
        if offset == 7300 * DAY {
            let stream = UnixStream::connect(bed.rig.daemon.control())?;
            let answer = http::ask(stream, "GET", "/v1/version", &[], "")?;
            let date = answer.header("date").context("no date")?;
            ensure!(
                date.contains(" 204"),
                "the daemon's clock did not jump: {date}"
            );
        }
    }
    load.finish()?;
    bed.ends_well()
}
