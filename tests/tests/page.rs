//! The web page: its view of a daemon under load in headless Chromium, from phone width on; its requests; no references to other hosts;
//! changes by mouse and keyboard, and by role; accessibility by axe-core. No test leaves an uncaught exception. Needs: chromium,
//! chromium-driver, npm. Takes: 55 s.
#![forbid(unsafe_code)]

use end_to_end::browser::Browser;
use end_to_end::dashboard::firing_alerts;
use end_to_end::http::ask;
use end_to_end::rig::free_portal;
use end_to_end::{Context, IscsiSession, Result, Rig, Scratch, SmallFileSystem, ensure};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, VerifiedLoad, kind};

#[path = "page/jobs.rs"]
mod jobs;
#[path = "page/many_disks.rs"]
mod many_disks;
#[path = "page/views.rs"]
mod views;

const TOKEN: &str = "control-control-1";
const READERS_TOKEN: &str = "readers-readers-1";

struct Shown {
    rig: Rig,
    address: String,
}

/// Writes a token to a file that others may not read. Returns its path.
fn token_file(scratch: &Scratch, token: &str) -> Result<String> {
    let file = scratch.file(token);
    std::fs::write(&file, token)?;
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600))?;
    Ok(file.display().to_string())
}

/// Starts a daemon with a disk in memory and one without its file.
fn serve() -> Result<Shown> {
    serve_disks("d7", "odd", &[])
}

fn serve_disks(good: &str, bad: &str, more: &[&str]) -> Result<Shown> {
    let address = free_portal()?.to_string();
    let rig = Rig::prepared(|scratch, daemon| {
        let token = token_file(scratch, TOKEN)?;
        let readers = token_file(scratch, READERS_TOKEN)?;
        let daemon = daemon.disk(&format!("{good}=ram:32M")).vhost_blk(good);
        let daemon = daemon.disk(&format!("{bad}=file:absent.raw"));
        let daemon = daemon.arguments(["--api-listen", &address, "--token-file", &token]);
        let daemon = daemon.arguments(["--readers-token-file", &readers]);
        Ok(daemon.arguments(more.iter().copied()))
    })?;
    Ok(Shown { rig, address })
}

#[test]
fn the_page_shows_disks_and_stages_of_a_daemon_under_load() -> Result<()> {
    let shown = serve()?;
    let load = VerifiedLoad::start(&shown.rig.socket("d7"))?;
    load.expect_progress(Duration::from_secs(60))?;
    let scratch = Scratch::new()?;
    let copy = shown.rig.scratch.file("copy.raw").display().to_string();
    let target = format!("file:{copy},cache=writethrough");
    let mirror = ["disk", "mirror", "d7", &target, "--speed", "100K"];
    shown.rig.daemon.lunette(&mirror)?;
    let browser = Browser::open(&scratch, (1280, 900))?;
    browser.go(&format!("http://{}/#token={TOKEN}", shown.address))?;
    let loaded = "return performance.getEntriesByType('navigation')[0].loadEventEnd";
    println!("the page was loaded after {} ms", browser.script(loaded)?);
    // The page selects the first disk that needs attention.
    browser.until("return document.getElementById('one-name').innerText === 'odd'")?;
    choose(&browser, "d7")?;
    check_names(&browser)?;
    for size in [(1280, 900), (360, 740)] {
        browser.resize(size)?;
        browser.until("return document.querySelectorAll('#stages .bar').length > 5")?;
        // A curve has one value per second.
        browser.until("return document.getElementById('rates').ariaLabel.includes('writes ')")?;
        browser.until("return !document.getElementById('quantiles').ariaLabel.includes('none')")?;
        browser.until(&format!(
            "return /[0-9]/.test({})",
            cell("exports", "d7", "p99")
        ))?;
        // Events of the daemon appear at once.
        let limit = format!("iops={}00", size.0);
        let limit = ["disk", "limit", "d7", &limit];
        shown.rig.daemon.lunette(&limit)?;
        browser.until(
            "return document.getElementById('events').innerText.includes('disk.limited d7')",
        )?;
        let document = browser.script("return document.documentElement.outerHTML")?;
        let document = document.as_str().context("no document")?;
        for word in [
            "1 of 2 disks needs attention",
            "disk odd is unavailable: ",
            "absent.raw: does not exist",
            "Hint: ",
            ">d7<",
            ">odd<",
            ">popped<",
            ">reaped<",
            "vhost-blk",
            "32.0 MiB",
            ">mirror<",
            ">running<",
            ">cancel<",
        ] {
            ensure!(document.contains(word), "no {word} in {document}");
        }
        ensure!(
            document.contains("id=\"login\" class=\"note\" hidden"),
            "it asks for a token that it has"
        );
        let picture = scratch.file(&format!("{}.png", size.0));
        browser.picture(&picture)?;
        looks_like_a_picture(&picture)?;
    }
    check_ranges(&browser)?;
    ensure!(load.finish()? > 0);
    browser.expect_no_exceptions()
}

/// Title and header name the host. The session of a front end names its process.
fn check_names(browser: &Browser) -> Result<()> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    let host = host.trim();
    for found in [
        "document.title",
        "document.getElementById('about').innerText",
    ] {
        browser.until(&format!("return {found}.startsWith('{host}')"))?;
    }
    let process = format!("pid {}, user ", std::process::id());
    browser.until(&format!(
        "return document.getElementById('sessions').innerText.includes('{process}')"
    ))
}

/// The curves show the recorded hour and day, with times of day, and the last minutes again.
fn check_ranges(browser: &Browser) -> Result<()> {
    for (range, mark) in [
        ("hour", "[0-9]{2}:[0-9]{2}"),
        ("day", "[0-9]{2}:[0-9]{2}"),
        ("live", "now"),
    ] {
        browser.click(&browser.find(&format!("#range-{range}"))?)?;
        browser.until(&format!(
            "return /^{mark}$/.test(document.querySelector('#rates .u-legend .u-value').innerText)
                && document.getElementById('range-{range}').ariaPressed === 'true'"
        ))?;
        browser
            .until("return document.getElementById('rates').ariaLabel.startsWith('now: reads ')")?;
    }
    Ok(())
}

/// Selects a disk.
fn choose(browser: &Browser, disk: &str) -> Result<()> {
    let button = format!(
        "Array.from(document.querySelectorAll('#disks button')).find(one => one.innerText === '{disk}')"
    );
    browser.until(&format!("return {button} !== undefined"))?;
    browser.script(&format!("{button}.click()"))?;
    browser.until(&format!(
        "return document.getElementById('one-name').innerText === '{disk}'"
    ))
}

/// Returns a script for the text of a cell, in the row that begins with `name` and the column `head`.
fn cell(table: &str, name: &str, head: &str) -> String {
    let texts = "row => [...row.cells].map(one => one.innerText)";
    format!(
        "(([heads, ...rows]) => rows.find(row => row[0] === '{name}')?.[heads.indexOf('{head}')])([...document.querySelectorAll('#{table} tr')].map({texts}))"
    )
}

#[test]
fn a_report_shows_the_same_without_the_daemon_and_without_names() -> Result<()> {
    let shown = serve()?;
    let load = VerifiedLoad::start(&shown.rig.socket("d7"))?;
    load.expect_progress(Duration::from_secs(60))?;
    let scratch = Scratch::new()?;
    let path = |name: &str| scratch.file(name).display().to_string();
    let report = |name: &str| {
        let words = ["report", "--seconds", "3", "--redact", "--out", &path(name)];
        shown.rig.daemon.lunette(&words).map(drop)
    };
    report("two.html")?;
    // The page selects a disk that needs attention. Without it, the disk under load is selected.
    shown.rig.daemon.lunette(&["disk", "remove", "odd"])?;
    report("one.html")?;
    ensure!(load.finish()? > 0);
    drop(shown);
    let browser = Browser::open(&scratch, (1280, 900))?;
    let reports: [(&str, &[&str]); 2] = [
        (
            "two.html",
            &["unavailable: ", "1 of 2 disks needs attention"],
        ),
        ("one.html", &[">popped<", ">notified<", "all is well"]),
    ];
    for (name, words) in reports {
        let text = std::fs::read_to_string(scratch.file(name))?;
        ensure!(
            !text.contains("\"d7\"") && !text.contains("d7.sock"),
            "a name is left"
        );
        browser.go(&format!("file://{}", path(name)))?;
        let document = browser.script("return document.documentElement.outerHTML")?;
        let document = document.as_str().context("no document")?;
        let always = ["report of 20", ">disk-1<", "class=\"report looks\""];
        for word in always.iter().chain(words) {
            ensure!(document.contains(word), "{name}: no {word} in {document}");
        }
    }
    let picture = scratch.file("report.png");
    browser.picture(&picture)?;
    looks_like_a_picture(&picture)?;
    browser.expect_no_exceptions()
}

fn looks_like_a_picture(path: &Path) -> Result<()> {
    let bytes = std::fs::read(path).context("no screenshot")?;
    ensure!(
        bytes.starts_with(b"\x89PNG") && bytes.len() > 5000,
        "{} bytes",
        bytes.len()
    );
    if let Some(folder) = std::env::var_os("LUNETTE_SCREENSHOTS") {
        let name = path.file_name().context("no name")?;
        std::fs::copy(path, Path::new(&folder).join(name))?;
    }
    Ok(())
}

#[test]
fn page_is_public_and_its_data_need_a_token() -> Result<()> {
    let shown = serve()?;
    let ask = |path: &str, token: Option<&str>| -> Result<(String, String)> {
        let mut command = Command::new("curl");
        command.args(["-s", "-i", "--path-as-is"]);
        if let Some(token) = token {
            command.args(["-H", &format!("Authorization: Bearer {token}")]);
        }
        let output = command
            .arg(format!("http://{}{path}", shown.address))
            .output();
        let output = output.context("cannot run curl; hint: apt-get install curl")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (head, body) = text.split_once("\r\n\r\n").context("no answer")?;
        Ok((head.to_lowercase(), body.to_owned()))
    };
    let (head, body) = ask("/", None)?;
    ensure!(
        head.starts_with("http/1.1 200") && head.contains("content-type: text/html"),
        "{head}"
    );
    ensure!(
        head.contains("content-security-policy: default-src 'none'"),
        "{head}"
    );
    // A client without a token cannot keep its connection open.
    ensure!(head.contains("connection: close"), "{head}");
    ensure!(body.contains("<title>Lunette</title>") && !body.contains("d7"));
    for path in ["/v1/status", "/v1/statistics", "//", "/?x", "/v1/../"] {
        let (head, body) = ask(path, None)?;
        let is_page = path == "/?x";
        ensure!(
            head.starts_with("http/1.1 401") != is_page,
            "{path}: {head}"
        );
        ensure!(!body.contains("d7"), "{path}: {body}");
    }
    let scratch = Scratch::new()?;
    let browser = Browser::open(&scratch, (1280, 900))?;
    let shows = |state: &str| {
        browser.until(&format!(
            "return document.getElementById('state').innerText === '{state}'"
        ))
    };
    browser.go(&format!("http://{}/", shown.address))?;
    shows("token required")?;
    browser.go("about:blank")?;
    // A `%` that encodes nothing.
    browser.go(&format!("http://{}/#token=100%wrong", shown.address))?;
    shows("wrong token")?;
    let text = browser.script("return document.body.innerText")?;
    ensure!(!text.to_string().contains("d7"), "{text}");
    // Two quick submissions start one event stream.
    browser.script(&format!(
        "window.streams = 0;
        const real = fetch;
        window.fetch = (path, options) => {{ streams += path.startsWith('/v1/live'); return real(path, options); }};
        document.getElementById('token').value = '{TOKEN}';
        for (let time = 0; time < 2; time += 1) document.getElementById('login').requestSubmit();"
    ))?;
    browser.until("return !document.getElementById('main').hidden")?;
    ensure!(browser.script("return streams")? == 1);
    browser.expect_no_exceptions()
}

/// A hidden page closes its event stream. A visible page reconnects, also to another daemon.
#[test]
fn page_continues_after_a_restart_of_the_daemon() -> Result<()> {
    let mut shown = serve()?;
    let scratch = Scratch::new()?;
    let browser = Browser::open(&scratch, (1280, 900))?;
    browser.go(&format!("http://{}/#token={TOKEN}", shown.address))?;
    browser.until("return document.getElementById('state').innerText.includes('attention')")?;
    shown.rig.daemon.kill()?;
    browser.until(
        "return document.getElementById('state').innerText === 'no response from the daemon'",
    )?;
    // The rows turn grey, with the time of the last answer.
    browser.until(
        "return /the page shows its state of [0-9]{2}:[0-9]{2}:[0-9]{2}$/.test(document.getElementById('problem').innerText)",
    )?;
    let filter = "return getComputedStyle(document.getElementById('main')).filter";
    ensure!(browser.script(filter)? == "grayscale(1)");
    shown.rig.daemon.start_again()?;
    browser.until("return document.getElementById('state').innerText.includes('attention')")?;
    browser.until("return document.getElementById('problem').hidden")?;
    ensure!(browser.script(filter)? == "none");
    browser.expect_no_exceptions()
}

/// Requests through a tunnel to the control socket carry no token, so only our own page may use it.
#[test]
fn pages_of_other_sites_do_not_reach_the_control_socket() -> Result<()> {
    let shown = serve()?;
    let control = shown.rig.daemon.control();
    let ask = |more: &[&str]| -> Result<String> {
        let mut command = Command::new("curl");
        command.args([
            "-s",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            "--unix-socket",
        ]);
        let output = command.arg(&control).args(more).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let reload = "http://localhost:9751/v1/config/reload";
    for (expected, more) in [
        ("200", &["http://localhost:9751/"][..]),
        (
            "200",
            &[
                "-H",
                "Origin: http://localhost:9751",
                "http://localhost:9751/v1/status",
            ],
        ),
        (
            "403",
            &["-X", "POST", "-H", "Origin: https://evil.example", reload],
        ),
        ("403", &["http://evil.example:9751/v1/status"]),
    ] {
        let found = ask(more)?;
        ensure!(found == expected, "{more:?}: {found}");
    }
    Ok(())
}

/// Returns a script for the text of a disk's table row.
fn row(name: &str) -> String {
    format!(
        "[...document.querySelectorAll('#disks tr')].map(row => row.innerText).find(text => text.startsWith('{name}'))"
    )
}

/// Fills the fields of a question that a button asks, and submits it.
fn answer(browser: &Browser, button: &str, fields: &[(&str, &str)]) -> Result<()> {
    browser.click(&browser.find(button)?)?;
    browser.until("return document.getElementById('ask').open")?;
    for (field, text) in fields {
        let field = browser.find(&format!("#ask [name={field}]"))?;
        browser.script_of(&field, "arguments[0].value = ''")?;
        browser.type_into(&field, text)?;
    }
    browser.click(&browser.find("#ask-do")?)
}

/// Changes by mouse and keyboard, each after a question that shows a refusal.
#[test]
fn disks_are_added_changed_and_removed_in_the_page() -> Result<()> {
    let shown = serve()?;
    let scratch = Scratch::new()?;
    let browser = Browser::open(&scratch, (1280, 900))?;
    browser.go(&format!("http://{}/", shown.address))?;
    browser.until("return document.getElementById('state').innerText === 'token required'")?;
    browser.type_into(&browser.find("#token")?, TOKEN)?;
    browser.click(&browser.find("#login button")?)?;
    browser.until("return !document.getElementById('main').hidden")?;
    // By keyboard: the first tab stop is the first disk, and the one after the last disk opens the form.
    browser.script("document.activeElement.blur()")?;
    browser.script("document.querySelector('#adding summary').focus()")?;
    browser.press(&["\u{e007}"])?;
    browser.until("return document.getElementById('adding').open")?;
    let socket = shown.rig.scratch.socket("new.sock").display().to_string();
    browser.press(&["\u{e004}"])?;
    browser.until("return document.activeElement.name === 'name'")?;
    let kind = "const kind = document.querySelector('#add [name=backend]'); kind.value = 'ram'; kind.onchange()";
    browser.script(kind)?;
    for (field, text) in [("name", "new"), ("size", "8M"), ("socket", socket.as_str())] {
        browser.type_into(&browser.find(&format!("#add [name={field}]"))?, text)?;
    }
    browser.press(&["\u{e007}"])?;
    browser.until(&format!("return Boolean({})", row("new")))?;
    browser.until("return document.getElementById('one-name').innerText === 'new'")?;
    let load = VerifiedLoad::start(&shown.rig.socket("new"))?;
    load.expect_progress(Duration::from_secs(60))?;
    browser.until(&format!("return !({}).includes('\\t-\\t')", row("new")))?;
    ensure!(load.finish()? > 0);

    let closed = "return !document.getElementById('ask').open";
    answer(&browser, "#resize", &[("size", "16M")])?;
    browser.until(&format!("return ({}).includes('16.0 MiB')", row("new")))?;
    browser.until(closed)?;
    answer(&browser, "#limit", &[("iops", "77"), ("bandwidth", "300M")])?;
    let limits = || {
        let disk = control::get::<serde_json::Value>(&shown.rig.daemon.control(), "/v1/disks/new");
        let disk = disk.ok()?;
        (disk["iops"] == 77 && disk["bandwidth"] == 300 << 20).then_some(())
    };
    vm::wait_until(Duration::from_secs(30), limits).context("no limit comes")?;
    browser.until(closed)?;
    // A wrong size and a refusal of the daemon appear beside the button, and the input stays.
    let refused = |text: &str| {
        let problem = "document.getElementById('ask-problem').innerText";
        browser.until(&format!("return {problem}.includes('{text}')"))
    };
    answer(&browser, "#resize", &[("size", "large")])?;
    refused("large: give a number")?;
    browser.click(&browser.find("#ask-cancel")?)?;
    let nowhere = "/no/such/folder/new.qcow2";
    answer(&browser, "#snapshot", &[("path", nowhere)])?;
    refused("/no/such/folder")?;
    let input = "return document.querySelector('#ask [name=path]').value";
    ensure!(browser.script(input)? == nowhere);
    browser.click(&browser.find("#ask-cancel")?)?;
    // A backup starts and is listed.
    let copy = shown.rig.scratch.file("copy.raw").display().to_string();
    answer(&browser, "#backup", &[("location", &copy)])?;
    browser.until(closed)?;
    browser.until("return document.getElementById('jobs').innerText.includes('backup')")?;
    browser.until("return document.getElementById('jobs').innerText.includes('done')")?;
    // A backup that is served appears with its name and its end.
    let address = format!("unix:{}", shown.rig.scratch.socket("pull.sock").display());
    let fields = [
        ("how", "serve"),
        ("place", address.as_str()),
        ("name", "night"),
    ];
    answer(&browser, "#backup-several", &fields)?;
    browser.until(closed)?;
    let backups = "document.getElementById('backups').innerText";
    browser.until(&format!(
        "return {backups}.includes('night') && {backups}.includes('ready')"
    ))?;
    answer(&browser, "#backups button", &[])?;
    browser.until(closed)?;
    browser.until(&format!("return {backups}.includes('done')"))?;
    choose(&browser, "odd")?;
    answer(&browser, "#remove", &[])?;
    browser.until(&format!("return !({})", row("odd")))?;
    browser.until("return document.getElementById('state').innerText === 'all is well'")?;
    browser.expect_no_exceptions()
}

const TARGET: &str = "iqn.2026-11.org.example:t0";

/// Starts a daemon with a missing file, a disk on a small file system, a slow disk, a target without initiators, and a portal at an address
/// of no interface.
fn serve_with_problems(small: &SmallFileSystem, folder: &Scratch, address: &str) -> Result<Rig> {
    let wrapper = small.wrapper(folder);
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    let full = SmallFileSystem::folder(folder).join("full");
    Rig::prepared(|scratch, daemon| {
        let token = token_file(scratch, TOKEN)?;
        let full = full.display();
        let daemon = daemon.under(&wrapper);
        let daemon = daemon.disk("gone=file:gone.raw").disk("t=ram:1M");
        let daemon = daemon
            .disk(&format!(
                "full=file:{full},size=32M,cache=writeback,on_error=stop"
            ))
            .disk("slow=delay:600ms,size=1M,storage=ram");
        let daemon = daemon.vhost_blk("full").vhost_blk("slow");
        let iscsi = ["--iscsi", &format!("{TARGET}=t")];
        let portals = ["--portal", "127.0.0.1:0", "--portal", "192.0.2.7:3260"];
        let daemon = daemon.arguments(iscsi).arguments(portals);
        Ok(daemon.arguments(["--api-listen", address, "--token-file", &token]))
    })
}

/// Checks that an alert fires for each problem, over the metrics of the daemon under load.
fn check_alerts(rig: &Rig, load: &VerifiedLoad, scratch: &Scratch) -> Result<()> {
    let metrics = || -> Result<String> {
        let stream = UnixStream::connect(rig.daemon.control())?;
        Ok(ask(stream, "GET", "/metrics", &[], "")?.body)
    };
    let first = metrics()?;
    // The times of a request are recorded soon after it, at the latest when the next one ends.
    for _ in 0..2 {
        load.expect_progress(Duration::from_secs(60))?;
    }
    let firing = firing_alerts(scratch, [&first, &metrics()?])?;
    for (alert, label) in [
        ("DiskUnavailable", r#"disk="gone""#),
        ("IoWaiting", r#"disk="full""#),
        ("DiskSlow", r#"disk="slow""#),
        ("LoginRefused", r#"export="iqn.2026-11.org.example:t0""#),
        ("ListenerWaiting", r#"kind="iscsi""#),
    ] {
        let name = format!("alertname=\"Lunette{alert}\"");
        let mut alerts = firing.split("__name__");
        let fires = alerts.any(|one| one.contains(&name) && one.contains(label));
        ensure!(fires, "no {alert} in {firing}");
    }
    Ok(())
}

/// The page, `lunette status` and an alert name each problem.
#[test]
fn page_status_and_alerts_name_five_injected_problems() -> Result<()> {
    let address = free_portal()?.to_string();
    let scratch = Scratch::new()?;
    let small = SmallFileSystem::mount(&scratch)?;
    let mut rig = serve_with_problems(&small, &scratch, &address)?;
    let load = VerifiedLoad::start(&rig.socket("slow"))?;
    let portal = rig.iscsi_portal(TARGET)?;
    let login = IscsiSession::login(&portal, TARGET, 1);
    ensure!(login.is_err(), "the initiator is admitted");
    let filler = small.folder_from_outside(&scratch).join("filler");
    let filled = std::fs::write(&filler, vec![1; 32 << 20]);
    ensure!(filled.is_err(), "the file system has space left");
    let mut front_end = FrontEnd::connect(&rig.socket("full"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 1, 4096, Layout::Separate)?;
    let slot = queue.take().context("the request is in flight")?;
    ensure!(queue.submit(slot, kind::OUT, 0, 4096, 0));
    queue.publish();

    let browser = Browser::open(&scratch, (1280, 900))?;
    browser.go(&format!("http://{address}/#token={TOKEN}"))?;
    let problems = "document.getElementById('problems').innerText";
    let named = [
        "disk gone is unavailable: ",
        "full): 1 failed I/O waits for a resume: ",
        "disk slow is slow: 1 % of its requests take longer than 0.5 s",
        " refused ",
        "192.0.2.7:3260 is not open: ",
    ];
    for words in named {
        let is_named = format!("return {problems}.includes({words:?})");
        browser.until(&is_named).context(words)?;
    }
    let status = rig.daemon.ask(&["status"])?;
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    for words in named {
        ensure!(status.contains(words), "no {words:?} in {status}");
    }
    check_alerts(&rig, &load, &scratch)?;
    load.finish()?;
    // The problem stays after the client with the waiting request has left.
    drop((queue, front_end));
    let stays = "full): 1 I/O failed in the last hour, last ";
    let stays = format!("return {problems}.includes('{stays}') && /: 1 no_space/.test({problems})");
    browser.until(&stays)?;
    browser.expect_no_exceptions()
}

/// Disks of the measurement, and those under load.
const MANY: usize = 500;
const LOADED: usize = 50;
/// Seconds of the measurement.
const MEASURED: u64 = 20;

/// Prints the longest tasks of the page's main thread while it shows many disks.
#[test]
#[ignore = "a measurement, which needs an otherwise idle machine"]
fn longest_tasks_of_the_page_with_500_disks() -> Result<()> {
    let address = free_portal()?.to_string();
    let rig = Rig::prepared(|scratch, mut daemon| {
        let token = token_file(scratch, TOKEN)?;
        for at in 0..MANY {
            daemon = daemon
                .disk(&format!("d{at}=ram:1M,iops=20"))
                .vhost_blk(&format!("d{at}"));
        }
        Ok(daemon.arguments(["--api-listen", &address, "--token-file", &token]))
    })?;
    let start = |at: usize| VerifiedLoad::start(&rig.socket(&format!("d{}", at * MANY / LOADED)));
    let loads = (0..LOADED).map(start).collect::<Result<Vec<_>, _>>()?;
    let scratch = Scratch::new()?;
    let browser = Browser::traced(&scratch, (1280, 900))?;
    browser.go(&format!("http://{address}/#token={TOKEN}"))?;
    browser.until("return document.querySelectorAll('#stages .bar').length > 5")?;
    std::thread::sleep(Duration::from_secs(MEASURED));
    let tasks = browser.tasks(MEASURED)?;
    let longest = tasks.iter().take(10).collect::<Vec<_>>();
    println!(
        "CPU time of the longest of {} tasks in {MEASURED} s: {longest:?}",
        tasks.len()
    );
    for load in loads {
        load.finish()?;
    }
    Ok(())
}
