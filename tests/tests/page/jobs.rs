//! Snapshots, jobs, bitmaps and the check of an upgrade, started from the page.

use super::*;

const CLOSED: &str = "return !document.getElementById('ask').open";

/// Starts a daemon with two disks that may be replaced and handed over.
fn serve_files() -> Result<Shown> {
    let address = free_portal()?.to_string();
    let rig = Rig::prepared(|scratch, daemon| {
        let token = token_file(scratch, TOKEN)?;
        let daemon = daemon.disk("alpha=file:alpha.raw,size=1M,cache=writeback");
        let daemon = daemon.disk("beta=file:beta.raw,size=1M,cache=writeback");
        Ok(daemon.arguments(["--api-listen", &address, "--token-file", &token]))
    })?;
    Ok(Shown { rig, address })
}

/// Waits for the storage of a disk in the page.
fn is_at(browser: &Browser, disk: &str, path: &str) -> Result<()> {
    let storage = cell("disks", disk, "storage");
    browser.until(&format!("return {storage}.includes('{path}')"))
}

/// Waits for the end of a job in the page.
fn is_done(browser: &Browser, disk: &str, kind: &str) -> Result<()> {
    let (job, state) = (cell("jobs", disk, "job"), cell("jobs", disk, "state"));
    browser.until(&format!("return {job} === '{kind}' && {state} === 'done'"))
}

#[test]
fn jobs_and_snapshots_are_started_and_followed_in_the_page() -> Result<()> {
    let shown = serve_files()?;
    let scratch = Scratch::new()?;
    let browser = Browser::open(&scratch, (1280, 900))?;
    browser.go(&format!("http://{}/#token={TOKEN}", shown.address))?;
    let path = |name: &str| shown.rig.scratch.file(name).display().to_string();
    let fill = |button: &str, fields: &[(&str, &str)]| -> Result<()> {
        answer(&browser, button, fields)?;
        browser.until(CLOSED).context(button.to_owned())
    };

    choose(&browser, "beta")?;
    let moved = path("moved.raw");
    fill(
        "#mirror",
        &[("location", &moved), ("switch", "switch at once")],
    )?;
    is_done(&browser, "beta", "mirror")?;
    is_at(&browser, "beta", "moved.raw")?;

    choose(&browser, "alpha")?;
    let copy = path("copy.raw");
    fill("#backup", &[("location", &copy), ("incremental", "daily")])?;
    browser.until(&format!(
        "return {} === 'daily'",
        cell("bitmaps", "alpha", "bitmap")
    ))?;
    fill("#bitmaps button", &[])?;
    browser.until("return document.getElementById('recorded').hidden")?;

    fill("#snapshot", &[("path", &path("first.qcow2"))])?;
    is_at(&browser, "alpha", "first.qcow2")?;
    fill("#stream", &[])?;
    is_done(&browser, "alpha", "stream")?;

    browser.click(&browser.find("#snapshot-several")?)?;
    browser.script("for (const one of document.querySelector('#ask [name=disks]').options) one.selected = true")?;
    let folder = shown.rig.scratch.files().display().to_string();
    browser.type_into(&browser.find("#ask [name=folder]")?, &folder)?;
    browser.click(&browser.find("#ask-do")?)?;
    browser.until(CLOSED)?;
    is_at(&browser, "alpha", "/alpha-20")?;
    is_at(&browser, "beta", "/beta-20")?;
    choose(&browser, "beta")?;
    fill("#commit", &[])?;
    is_done(&browser, "beta", "commit")?;
    is_at(&browser, "beta", "moved.raw")?;
    check_upgrade(&browser)?;
    browser.expect_no_exceptions()
}

/// The check of an upgrade shows the command. If the browser refuses to copy it, it is selected.
fn check_upgrade(browser: &Browser) -> Result<()> {
    answer(browser, "#upgrade", &[])?;
    browser.until(CLOSED)?;
    let command = "document.getElementById('upgrade-command').innerText";
    browser.until(&format!(
        "return /^(lunette upgrade|systemctl restart) /.test({command})"
    ))?;
    browser.until("return document.getElementById('upgrade-state').innerText.startsWith('All clients can stay.')")?;
    browser.script("navigator.clipboard.writeText = () => Promise.reject(new Error('refused'))")?;
    browser.click(&browser.find("#upgrade-copy")?)?;
    browser.until(&format!("return getSelection().toString() === {command}"))
}
