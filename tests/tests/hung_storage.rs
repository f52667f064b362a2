//! Storage that stops answering: it holds up what is done to its own disks, and nothing else. Needs: root, FUSE, mount(8); `make unit` runs
//! them. Takes: 20 s.
#![forbid(unsafe_code)]

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control::{Client, ClientError, Method};
use end_to_end::hung_mount::{HungMount, kind};
use end_to_end::{Context, Result, Rig, ensure};
use serde_json::{Value, json};

const MIB: usize = 1 << 20;
/// Longest time of a call that waits for nothing: the machine may be busy.
const SOON: Duration = Duration::from_secs(10);

struct Bed {
    /// Answers again before the daemon ends.
    mount: HungMount,
    rig: Rig,
}

type Answer = Result<(u16, Value), ClientError>;

impl Bed {
    /// A daemon with the RAM disk `ram` and others in a mount, `@` in their options, with the files `h.raw` and `t.raw`.
    fn new(disks: &[&str]) -> Result<Bed> {
        let mut mount = None;
        let rig = Rig::prepared(|scratch, daemon| {
            let folder = scratch.file("mnt");
            let new = HungMount::new(&folder, &[("h.raw", 4 * MIB), ("t.raw", 4 * MIB)])?;
            if !disks.is_empty() {
                new.hang(&[kind::OPEN]);
            }
            mount = Some(new);
            let at = |disk: &&str| disk.replace('@', &format!("{}/", folder.display()));
            let daemon = daemon.disk("ram=ram:4M").arguments(["--sandbox", "off"]);
            let disks = disks.iter().map(at);
            Ok(disks.fold(daemon, |daemon, disk| daemon.disk(&disk)))
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

    /// Makes a call that waits for nothing.
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

    /// Makes a call on a thread of its own, and returns when its request to the file system waits.
    fn hangs(&self, method: Method, path: &str, body: &Value) -> Result<JoinHandle<Answer>> {
        let held = self.mount.held();
        let (client, path, body) = (self.client(), path.to_owned(), body.clone());
        let running = std::thread::spawn(move || client.change(method, &path, Some(&body)));
        waits_until(|| Ok(self.mount.held() > held))?;
        Ok(running)
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
#[ignore = "as root: see the head of this file"]
fn disk_that_hangs_while_it_is_opened_holds_up_no_other_change() -> Result<()> {
    let bed = Bed::new(&[])?;
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
    // The late result is closed: its lock is not in the way.
    bed.mount.release();
    waits_until(|| Ok(bed.soon(Method::PUT, h, Some(&file))?.is_ok()))?;
    ensure!(bed.state("h")? == "ready");
    // The file is closed when the removal is answered.
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

#[test]
#[ignore = "as root: see the head of this file"]
fn disk_that_hangs_at_the_start_becomes_available_later() -> Result<()> {
    let bed = Bed::new(&["h=file:@h.raw,cache=writeback"])?;
    ensure!(bed.state("h")? == "opening", "{}", bed.state("h")?);
    ensure!(bed.state("ram")? == "ready");
    let ram = json!({ "backend": "ram", "size": "1M" });
    bed.succeeds_soon(Method::PUT, "/v1/disks/other", Some(&ram))?;
    bed.mount.release();
    waits_until(|| Ok(bed.state("h")? == "ready"))
}
