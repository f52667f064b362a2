//! Tables of many disks: filter, order, objects with problems first, and the latency of disks that share a queue.

use super::*;
use end_to_end::http::Events;
use serde_json::Value;
use vhost_frontend::{ScsiQueue, ScsiRequest, status};
use vm::wait_until;

const SOON: Duration = Duration::from_secs(30);
/// READ(10) of one block: the first one, and one beyond the end.
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const READ_BEYOND: [u8; 10] = [0x28, 0, 0xff, 0, 0, 0, 0, 0, 1, 0];
/// Exports with two disks each.
const SHARED: [(&str, [&str; 2]); 2] = [(TARGET, ["d3", "slow"]), ("c", ["d2", "slow"])];

/// Starts a daemon with nine disks and a socket in a missing folder. The file of the disk `odd` is missing.
fn serve_nine() -> Result<Shown> {
    let address = free_portal()?.to_string();
    let rig = Rig::prepared(|scratch, mut daemon| {
        let token = token_file(scratch, TOKEN)?;
        daemon = daemon.disk("d0=file:d0.raw,size=1M,cache=writeback");
        for at in 1..7 {
            daemon = daemon.disk(&format!("d{at}=ram:{}M", at + 1));
        }
        let daemon = daemon.disk("slow=delay:20ms,size=1M,storage=ram");
        let daemon = daemon.disk("odd=file:absent.raw").vhost_blk("d0");
        let daemon = daemon.arguments(["--vhost-blk", "d1:/no/such/folder/d1.sock"]);
        let daemon = daemon.vhost_scsi("c").lun("c/0:0=d2").lun("c/0:1=slow");
        let daemon = daemon.arguments(["--iscsi", &format!("{TARGET}=d3,slow")]);
        let daemon = daemon.arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"]);
        Ok(daemon.arguments(["--api-listen", &address, "--token-file", &token]))
    })?;
    Ok(Shown { rig, address })
}

/// Leaves a completed backup and a failed mirror.
fn end_two_jobs(rig: &Rig) -> Result<()> {
    let target = |name: &str| {
        format!(
            "file:{},cache=writethrough",
            rig.scratch.file(name).display()
        )
    };
    let run = |words: &[&str]| rig.daemon.lunette(words).map(drop);
    run(&["disk", "backup", "d0", &target("copy.raw"), "--wait"])?;
    run(&["disk", "mirror", "d4", &target("mirror.raw")])?;
    run(&["job", "wait", "d4"])?;
    // The target of a complete mirror is truncated.
    std::fs::write(rig.scratch.file("mirror.raw"), [0; 512])?;
    rig.daemon.ask(&["job", "switch", "d4"])?;
    let outcome = rig.daemon.ask(&["job", "wait", "d4"])?;
    ensure!(!outcome.status.success(), "{outcome:?}");
    Ok(())
}

/// Front ends with a queue for two disks each: an iSCSI session, and a queue of a virtio-scsi controller.
struct Readers {
    session: IscsiSession,
    queue: ScsiQueue,
    _front_end: FrontEnd,
}

impl Readers {
    fn start(rig: &mut Rig) -> Result<Readers> {
        let mut front_end = FrontEnd::connect(&rig.socket("c"), &Options::default())?;
        let options = QueueOptions::default();
        let queue = ScsiQueue::start(&mut front_end, 2, &options, 1, 4096, Layout::Separate)?;
        let portal = rig.iscsi_portal(TARGET)?;
        Ok(Readers {
            session: IscsiSession::login(&portal, TARGET, 1)?,
            queue,
            _front_end: front_end,
        })
    }

    /// Executes a command on the queue of the controller.
    fn run(&mut self, lun: u16, cdb: &[u8]) -> Result<u8> {
        let (target, tag) = (0, 1);
        let request = ScsiRequest {
            target,
            lun,
            tag,
            cdb,
        };
        Ok(self.queue.run(&request, &[], &mut [0; 4096])?.status)
    }

    /// Reads from each disk.
    fn read(&mut self) -> Result<()> {
        for lun in [0, 1] {
            self.session.command_on(lun, &READ, None, 4096)?;
            self.run(lun.into(), &READ)?;
        }
        Ok(())
    }
}

/// Checks that the queue of each export has the latency of each of its disks.
fn check_queues(statistics: &Value) -> Result<()> {
    for (export, disks) in SHARED {
        let queues = statistics["queues"].as_array().context("no queues")?.iter();
        let of_export: Vec<_> = queues
            .filter(|one| one["labels"]["export"] == export)
            .collect();
        for disk in disks {
            let counts = of_export
                .iter()
                .map(|one| &one["disks"][disk]["operations"]["read"]["total"]["count"]);
            let count: u64 = counts.filter_map(Value::as_u64).sum();
            ensure!(count > 0, "{export} has no read of {disk}: {of_export:?}");
        }
    }
    Ok(())
}

fn check_interfaces(rig: &Rig) -> Result<()> {
    let control = rig.daemon.control();
    check_queues(&control::get(&control, "/v1/statistics")?)?;
    let mut events = Events::listen_at(&control, "/v1/live?brief=true")?;
    let moment = loop {
        let (event, data) = events.hear()?;
        if event == "moment" {
            break serde_json::from_str::<Value>(&data)?;
        }
    };
    check_queues(&moment["statistics"])?;
    let metrics = ask(UnixStream::connect(&control)?, "GET", "/metrics", &[], "")?.body;
    for disk in ["d2", "d3", "slow"] {
        let name = format!(
            "lunette_disk_request_duration_seconds_count{{disk=\"{disk}\",operation=\"read\"}} "
        );
        let mut counts = metrics.lines().filter_map(|line| line.strip_prefix(&name));
        ensure!(counts.any(|count| count != "0"), "no {name} in {metrics}");
    }
    Ok(())
}

#[test]
fn many_disks_are_filtered_sorted_and_measured_one_by_one() -> Result<()> {
    let mut shown = serve_nine()?;
    let mut readers = Readers::start(&mut shown.rig)?;
    let rig = &shown.rig;
    end_two_jobs(rig)?;
    let scratch = Scratch::new()?;
    let browser = Browser::open(&scratch, (1280, 600))?;
    browser.go(&format!("http://{}/#token={TOKEN}", shown.address))?;
    browser.until("return !document.getElementById('main').hidden")?;

    // The unit attentions of a new session are left.
    let are_left = wait_until(SOON, || {
        let succeed = readers.run(0, &READ).ok()? == 0 && readers.run(1, &READ).ok()? == 0;
        succeed.then_some(())
    });
    are_left.context("unit attentions stay")?;
    let measured = ["d2", "d3", "slow"].map(|disk| cell("disks", disk, "p99"));
    let exports = [TARGET, "c"].map(|export| cell("exports", export, "p99"));
    let all = [&measured[..], &exports[..]].concat().join(", ");
    let measured = format!(
        "return [{all}].every(text => /[0-9]/.test(text)) && / m?s$/.test({})",
        measured[2]
    );
    let is_measured = wait_until(SOON, || {
        readers.read().ok()?;
        (browser.script(&measured).ok()? == true).then_some(())
    });
    is_measured.with_context(|| format!("never: {measured}"))?;
    check_interfaces(rig)?;

    // Objects with problems come first: a closed socket, a failed job, a session with a failed request.
    let refused = readers.session.command_on(0, &READ_BEYOND, None, 4096)?;
    ensure!(refused.status != 0);
    let mut front_end = FrontEnd::connect(&rig.socket("d0"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 1, 4096, Layout::Separate)?;
    std::fs::File::create(rig.scratch.file("d0.raw"))?;
    ensure!(queue.read(0, &mut [0; 512])? == status::IOERR);
    for (table, name) in [("exports", "d1"), ("jobs", "d4"), ("sessions", TARGET)] {
        let first = format!("document.querySelectorAll('#{table} tr')[1].cells[0].innerText");
        browser.until(&format!("return {first} === '{name}'"))?;
    }
    let problem = "disk d0 (d0.raw): 1 I/O failed in the last hour, last ";
    let problems = "document.getElementById('problems').innerText";
    browser.until(&format!(
        "return {problems}.includes('{problem}') && /: 1 read_medium/.test({problems}) && /Show d0/.test({problems})"
    ))?;
    let exports = "document.getElementById('exports').innerText";
    browser.until(&format!("return {exports}.includes('127.0.0.1:')"))?;
    let output = rig.daemon.ask(&["status"])?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(text.contains(&format!("! {problem}")), "{text}");

    check_order(&browser)?;
    browser.expect_no_exceptions()
}

/// Filters and sorts the disks, and selects one.
fn check_order(browser: &Browser) -> Result<()> {
    let names = "[...document.querySelectorAll('#disks td:first-child')].map(one => one.innerText)";
    browser.until(&format!(
        "return {names}.slice(0, 2).join() === 'd0,odd' && {names}.length === 9"
    ))?;
    let filter = browser.find("#filter")?;
    browser.type_into(&filter, "SLO")?;
    browser.until(&format!("return {names}.join() === 'slow'"))?;
    browser.script_of(&filter, "arguments[0].value = ''; arguments[0].oninput()")?;
    for (head, order, first) in [("size", "descending", "d6"), ("disk", "ascending", "d0")] {
        let button = format!(
            "[...document.querySelectorAll('#disks th button')].find(one => one.innerText === '{head}')"
        );
        browser.script(&format!("{button}.click()"))?;
        browser.until(&format!(
            "return {names}[0] === '{first}' && {button}.parentNode.ariaSort === '{order}'"
        ))?;
    }
    browser.script("document.querySelector('#disks th button').click()")?;
    browser.until(&format!("return {names}[0] === 'd0'"))?;
    browser.script("scrollTo(0, 0)")?;
    choose(browser, "d5")?;
    // The page scrolls to the disk.
    browser
        .until("return Math.abs(document.getElementById('one').getBoundingClientRect().top) < 50")
}
