//! Third-party code: npm packages of the web page, and the check for known defects of crates.
//!
//! `make check` tests licences and sources of crates (`deny.toml`), and the test `tidy` limits the daemon's dependencies.
#![forbid(unsafe_code)]

use end_to_end::Scratch;
use end_to_end::{Context, Result, ensure};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;
use vm::workspace;

/// Permitted licences of npm packages. Only code of `uplot` is in the page. The others are tools that build and test it.
const NPM_LICENCES: [&str; 3] = ["Apache-2.0", "MIT", "MPL-2.0"];

/// Packages with an install script. `make page` does not run it (`npm ci --ignore-scripts`).
const WITH_INSTALL_SCRIPT: [&str; 1] = ["node_modules/esbuild"];

/// Maximum number of packages in the lock file. esbuild has one per platform.
const NPM_PACKAGES_MAX: usize = 30;

/// Returns the faults of a package's entry in `package-lock.json`.
fn faults(name: &str, package: &Value) -> Vec<String> {
    let text = |key: &str| package[key].as_str().unwrap_or_default();
    let mut faults = Vec::new();
    if !text("integrity").starts_with("sha512-") {
        faults.push(format!("{name} has no SHA-512 hash: run npm install"));
    }
    if !text("resolved").starts_with("https://registry.npmjs.org/") {
        faults.push(format!("{name} is not from registry.npmjs.org"));
    }
    if !NPM_LICENCES.contains(&text("license")) {
        let licence = text("license");
        faults.push(format!(
            "{name} has the licence {licence:?}: {NPM_LICENCES:?} are allowed"
        ));
    }
    if package["hasInstallScript"] == true && !WITH_INSTALL_SCRIPT.contains(&name) {
        faults.push(format!(
            "{name} has an install script: find out whether it works without"
        ));
    }
    faults
}

#[test]
fn packages_of_the_page_have_hashes_and_allowed_licences() -> Result<()> {
    let folder = workspace().join("crates/page/web");
    let lock = std::fs::read_to_string(folder.join("package-lock.json"))?;
    let lock: Value = serde_json::from_str(&lock)?;
    let packages = lock["packages"].as_object().context("no packages")?;
    // The entry without a name is the page itself.
    let others = || packages.iter().filter(|(name, _)| !name.is_empty());
    let found: Vec<String> = others()
        .flat_map(|(name, package)| faults(name, package))
        .collect();
    ensure!(found.is_empty(), "package-lock.json:\n{}", found.join("\n"));
    let count = others().count();
    ensure!(
        count <= NPM_PACKAGES_MAX,
        "{count} npm packages, {NPM_PACKAGES_MAX} are the most: do without the new one, or raise the limit"
    );
    Ok(())
}

#[test]
fn faults_of_an_npm_package_are_found() {
    let good = serde_json::json!({
        "resolved": "https://registry.npmjs.org/uplot/-/uplot-1.6.32.tgz",
        "integrity": "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        "license": "MIT"
    });
    assert_eq!(faults("uplot", &good), Vec::<String>::new());
    let changes = [
        ("integrity", Value::Null),
        ("resolved", "git+ssh://git@example.org/uplot.git".into()),
        ("license", "GPL-3.0".into()),
        ("hasInstallScript", true.into()),
    ];
    for (key, value) in changes {
        let mut bad = good.clone();
        bad[key] = value;
        assert_eq!(faults("uplot", &bad).len(), 1, "{key}");
    }
}

#[test]
fn install_scripts_of_npm_packages_are_not_run() -> Result<()> {
    let makefile = std::fs::read_to_string(workspace().join("Makefile"))?;
    let commands = makefile.lines().filter(|line| line.starts_with('\t'));
    let installs: Vec<&str> = commands
        .filter(|line| line.contains("npm ci") || line.contains("npm install"))
        .collect();
    ensure!(!installs.is_empty(), "the Makefile does not call npm");
    for line in installs {
        ensure!(line.contains("--ignore-scripts"), "{line}");
    }
    Ok(())
}

/// Runs the check for known defects without access to the database and returns its standard error.
fn without_database(database: Option<PathBuf>, scratch: &Scratch) -> Result<String> {
    let mut command = Command::new(workspace().join("scripts/advisories"));
    command
        .env("CARGO_HOME", scratch.file("cargo"))
        .env_remove("ADVISORY_DB")
        .env("GIT_CONFIG_COUNT", "1")
        .env("GIT_CONFIG_KEY_0", "url.file:///nowhere.insteadOf")
        .env(
            "GIT_CONFIG_VALUE_0",
            "https://github.com/RustSec/advisory-db",
        );
    if let Some(database) = database {
        command.env("ADVISORY_DB", database);
    }
    let output = command.output()?;
    ensure!(!output.status.success(), "it succeeded without a database");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn check_without_a_database_names_the_reason_and_the_way() -> Result<()> {
    let scratch = Scratch::new()?;
    let cases = [
        (
            None,
            "cannot fetch https://github.com/RustSec/advisory-db: fatal: ",
        ),
        (
            Some(scratch.file("none")),
            "is no clone of RustSec's database",
        ),
    ];
    for (database, reason) in cases {
        let text = without_database(database, &scratch)?;
        ensure!(
            text.contains(reason) && text.contains("hint: ") && text.contains("ADVISORY_DB=DIR"),
            "{text}"
        );
    }
    Ok(())
}
