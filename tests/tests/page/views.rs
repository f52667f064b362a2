//! Each view of the page at three widths in both colour schemes, with long names; accessibility by axe-core. With `LUNETTE_SCREENSHOTS=FOLDER`
//! each view is stored as a picture.

use super::*;
use serde_json::{Value, json};
use vm::wait_until;

/// Names of the longest permitted length, without a place to break lines.
fn long(name: &str) -> String {
    format!("{name:x<64}")
}

/// Returns the program of axe-core, which checks pages for WCAG. The page's lock file pins its version.
fn axe_program() -> Result<String> {
    let file = vm::workspace().join("crates/page/web/node_modules/axe-core/axe.min.js");
    std::fs::read_to_string(&file).with_context(|| {
        let file = file.display();
        format!("cannot read {file}; hint: scripts/setup test, which installs it with npm")
    })
}

/// Checks the elements below a selector with axe-core, which is loaded in the page.
fn check_accessibility(browser: &Browser, below: &str) -> Result<()> {
    browser.script(&format!(
        "window.found = null;
        axe.run('{below}', {{resultTypes: ['violations']}}).then(done => {{
            const serious = done.violations.filter(one => ['serious', 'critical'].includes(one.impact));
            window.found = serious.map(one => `${{one.id}}: ${{one.nodes.map(node => node.target.join(' ')).join(', ')}}`);
        }}).catch(error => {{ window.found = [String(error)]; }})"
    ))?;
    browser.until("return window.found !== null")?;
    let found = browser.script("return window.found")?;
    ensure!(found == serde_json::json!([]), "{below}: {found}");
    Ok(())
}

/// Buttons that open a dialog: those of the selected disk, of several disks, of the upgrade, of a running mirror and of a bitmap.
const DIALOGS: [&str; 16] = [
    "#resize",
    "#limit",
    "#snapshot",
    "#backup",
    "#mirror",
    "#stream",
    "#commit",
    "#resume",
    "#remove",
    "#backup-several",
    "#snapshot-several",
    "#upgrade",
    "#jobs button",
    "#jobs button:nth-child(2)",
    "#jobs button:nth-child(3)",
    "#bitmaps button",
];

/// Opens each dialog. Buttons that do not apply to the selected disk are hidden, and open their dialog all the same.
fn check_dialogs(browser: &Browser) -> Result<()> {
    browser.until("return document.querySelectorAll('#jobs button').length === 3")?;
    for button in DIALOGS {
        browser.script(&format!("document.querySelector('{button}').click()"))?;
        browser.until("return document.getElementById('ask').open")?;
        let fits =
            "const ask = document.getElementById('ask'); return ask.scrollWidth <= ask.clientWidth";
        ensure!(browser.script(fits)? == true, "the dialog of {button}");
        check_accessibility(browser, "#ask").context(button)?;
        browser.click(&browser.find("#ask-cancel")?)?;
    }
    Ok(())
}

/// Returns the parts of the page that do not fit: of tables, the names and states, unless a smaller screen hides their column.
const CUT: &str = "
    const shown = ['disk', 'state', 'export', 'connected', 'job', 'backup', 'bitmap', 'client', 'worker'];
    const cells = [...document.querySelectorAll('main table[id]')].flatMap(table => {
        const [heads, ...rows] = [...table.rows].map(row => [...row.cells]);
        return rows.flatMap(row => row.filter((_, at) => shown.includes(heads[at]?.innerText)));
    });
    const parts = [...cells, ...document.querySelectorAll('header *, h2, p, li, main button, dialog')];
    const isCut = one => one.checkVisibility() && (one.getBoundingClientRect().right > innerWidth + 0.5
        || one.getBoundingClientRect().left < -0.5 || one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline');
    const cut = parts.filter(isCut).map(one => `${one.tagName} ${one.id} ${one.innerText}`);
    if (document.documentElement.scrollWidth > innerWidth) cut.push('the page is wider than the screen');
    return cut;";

/// Checks that a view fits at each width in both colour schemes.
fn check_looks(browser: &Browser, view: &str) -> Result<()> {
    for (width, height) in [(1280, 900), (768, 1024), (390, 844)] {
        browser.resize((width, height))?;
        for scheme in ["light", "dark"] {
            browser.set_scheme(scheme)?;
            let mut cut = Value::Null;
            // The charts change their size after the page.
            let fits = wait_until(Duration::from_secs(10), || {
                cut = browser.script(CUT).ok()?;
                (cut == json!([])).then_some(())
            });
            ensure!(fits.is_some(), "{view} at {width}, {scheme}: {cut}");
            if let Some(folder) = std::env::var_os("LUNETTE_SCREENSHOTS") {
                let name = format!("{view}-{width}-{scheme}.png");
                browser.picture(&Path::new(&folder).join(name))?;
            }
        }
    }
    Ok(())
}

/// Checks that each control that is shown has a name.
fn check_labels(browser: &Browser) -> Result<()> {
    let controls = "button, input, select, summary, canvas:not([aria-hidden] *), [role=img]";
    for control in browser.all(controls)? {
        // A table row may be rebuilt every second.
        let Ok(label) = browser.label(&control) else {
            continue;
        };
        let shown = "return arguments[0].checkVisibility() && arguments[0].outerHTML";
        let shown = browser.script_of(&control, shown).unwrap_or_default();
        ensure!(
            !label.is_empty() || !shown.is_string(),
            "it has no name: {shown}"
        );
    }
    Ok(())
}

#[test]
fn each_view_of_the_page_fits_and_is_accessible() -> Result<()> {
    let (good, bad) = (long("good-"), long("odd-"));
    let target = format!("{}={good}", long("iqn.2026-11.org.example:"));
    let portal = ["--iscsi", &target, "--portal", "127.0.0.1:0"];
    let mut shown = serve_disks(&good, &bad, &portal)?;
    let load = VerifiedLoad::start(&shown.rig.socket(&good))?;
    load.expect_progress(Duration::from_secs(60))?;
    let file = |name: &str| {
        let path = shown.rig.scratch.file(name).display().to_string();
        format!("file:{path},cache=writethrough")
    };
    let (copy, bitmap) = (file("copy.raw"), long("daily-"));
    let backup = [
        "disk",
        "backup",
        &good,
        &copy,
        "--incremental",
        &bitmap,
        "--wait",
    ];
    shown.rig.daemon.lunette(&backup)?;
    // The job runs until the end of the test, and keeps its three buttons.
    let mirror = [
        "disk",
        "mirror",
        &good,
        &file("mirror.raw"),
        "--speed",
        "8K",
    ];
    shown.rig.daemon.lunette(&mirror)?;
    let scratch = Scratch::new()?;
    let axe = axe_program()?;
    let browser = Browser::open(&scratch, (1280, 900))?;
    browser.go(&format!("http://{}/", shown.address))?;
    browser.until("return !document.getElementById('login').hidden")?;
    check_looks(&browser, "login")?;
    browser.script(&axe)?;
    check_accessibility(&browser, "body")?;
    browser.go(&format!("http://{}/#token={TOKEN}", shown.address))?;
    browser.script("location.reload()")?;
    choose(&browser, &bad)?;
    check_looks(&browser, "problem")?;
    choose(&browser, &good)?;
    browser.until("return document.querySelectorAll('#stages .bar').length > 5")?;
    browser.until("return !document.getElementById('recorded').hidden")?;
    browser.click(&browser.find("#adding summary")?)?;
    check_looks(&browser, "page")?;
    check_labels(&browser)?;
    browser.script(&axe)?;
    for (size, scheme) in [((1280, 900), "light"), ((390, 844), "dark")] {
        browser.resize(size)?;
        browser.set_scheme(scheme)?;
        check_accessibility(&browser, "body")?;
        check_dialogs(&browser)?;
        let picture = scratch.file(&format!("page-{scheme}.png"));
        browser.picture(&picture)?;
        looks_like_a_picture(&picture)?;
    }
    browser.script("document.getElementById('backup').click()")?;
    check_looks(&browser, "dialog")?;
    browser.click(&browser.find("#ask-cancel")?)?;
    // A read-only user sees no controls for changes.
    browser.script(&format!(
        "sessionStorage.setItem('token', '{READERS_TOKEN}'); location.reload()"
    ))?;
    browser.until("return document.querySelectorAll('#disks td button').length === 2")?;
    let offered = "return [...document.querySelectorAll('.actions, .actions button')].filter(one => one.checkVisibility()).length";
    ensure!(browser.script(offered)? == 0, "a reader is offered changes");
    check_looks(&browser, "reader")?;
    ensure!(load.finish()? > 0);
    shown.rig.daemon.kill()?;
    browser.until("return document.body.classList.contains('gone')")?;
    check_looks(&browser, "gone")?;
    browser.expect_no_exceptions()
}
