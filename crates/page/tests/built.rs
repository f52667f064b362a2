//! `page.html` matches its sources: they pass the type check, and building them gives the same bytes. Needs npm and its
//! registry.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::Command;

fn run(folder: &Path, words: &[&str]) {
    let mut command = Command::new(words[0]);
    let ran = command.args(&words[1..]).current_dir(folder).output();
    let ran = ran.unwrap_or_else(|error| {
        panic!(
            "cannot run {}: {error}; hint: apt-get install nodejs npm",
            words[0]
        )
    });
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        ran.status.success(),
        "{words:?}: {}{}",
        text(&ran.stdout),
        text(&ran.stderr)
    );
}

#[test]
fn page_matches_its_sources() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = tempfile::tempdir().unwrap();
    let web = scratch.path().join("web");
    let copied = format!("{}", web.display());
    run(&here.join("web"), &["cp", "-r", ".", &copied]);
    run(&web, &["npm", "ci", "--ignore-scripts", "--no-audit"]);
    run(&web, &["npm", "run", "check"]);
    run(&web, &["node", "build.mjs", "built.html"]);
    let built = std::fs::read_to_string(web.join("built.html")).unwrap();
    assert!(
        built == page::PAGE,
        "src/page.html does not match web/; hint: make page"
    );
}
