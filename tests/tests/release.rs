//! Files that a release and its contributors need: hosted workflows call existing make targets, the minimum Rust version is that of all
//! dependencies, reviewers are assigned to existing paths, and each licence has its text. `scripts/release` checks a release. Needs only the
//! source tree and git. Takes: 10 s.
#![forbid(unsafe_code)]

use end_to_end::packages::succeeds;
use end_to_end::{Context, Result, Scratch, bail, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use vm::workspace;

fn read(path: &str) -> Result<String> {
    let text = std::fs::read_to_string(workspace().join(path));
    text.with_context(|| format!("cannot read {path}"))
}

/// Returns the files of a folder with their text.
fn files(folder: &str) -> Result<Vec<(PathBuf, String)>> {
    let entries = std::fs::read_dir(workspace().join(folder)).with_context(|| folder.to_owned())?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    paths
        .map(|path: Result<PathBuf>| {
            let path = path?;
            let text = std::fs::read_to_string(&path)?;
            Ok((path, text))
        })
        .collect()
}

#[test]
fn workflows_call_existing_make_targets_and_goals() -> Result<()> {
    let makefile = read("Makefile")?;
    let setup = read("scripts/setup")?;
    let goals = setup.lines().find(|line| line.starts_with("build | "));
    let goals = goals.context("scripts/setup lists no goals")?;
    let mut called = 0;
    for (path, text) in files(".github/workflows")? {
        for line in text.lines() {
            let Some((_, command)) = line.split_once("run: ") else {
                continue;
            };
            let path = path.display();
            let mut words = command.split_whitespace();
            match (words.next(), words.next(), words.next()) {
                (Some("make"), Some(target), None) => ensure!(
                    makefile.contains(&format!("\n{target}: ")),
                    "{path}: the Makefile has no target {target}"
                ),
                (Some("scripts/setup"), Some(goal), None) => ensure!(
                    goals.split([' ', ')']).any(|known| known == goal),
                    "{path}: scripts/setup has no goal {goal}"
                ),
                _ => bail!("{path}: {command}: call a make target, which contributors can run too"),
            }
            called += 1;
        }
    }
    ensure!(called >= 5, "only {called} commands were found");
    Ok(())
}

/// Parses `1.89` or `1.89.0`.
fn version(text: &str) -> Option<[u32; 2]> {
    let mut parts = text.split('.').map(|part| part.parse().ok());
    Some([parts.next()??, parts.next()??])
}

#[test]
fn minimum_rust_version_suffices_for_all_dependencies() -> Result<()> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--offline"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(workspace())
        .output()?;
    ensure!(output.status.success(), "cargo metadata failed");
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let manifest = read("Cargo.toml")?;
    let ours = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = "));
    let ours = ours
        .context("Cargo.toml has no rust-version")?
        .trim_matches('"');
    let minimum = version(ours).context("rust-version is no version")?;
    let mut newer = Vec::new();
    for package in metadata["packages"].as_array().context("no packages")? {
        let Some(needed) = package["rust_version"].as_str() else {
            continue;
        };
        if version(needed).is_some_and(|needed| needed > minimum) {
            newer.push(format!("{} needs {needed}", package["name"]));
        }
    }
    ensure!(
        newer.is_empty(),
        "rust-version is {ours}: {}",
        newer.join(", ")
    );
    for page in ["README.md", "docs/getting-started.md"] {
        ensure!(
            read(page)?.contains(&format!("{ours} or later")),
            "{page} names another version of Rust than {ours}"
        );
    }
    Ok(())
}

#[test]
fn owned_paths_exist() -> Result<()> {
    let owners = read(".github/CODEOWNERS")?;
    for line in owners.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let path = words.next().context("an empty line")?;
        ensure!(words.next().is_some(), "{path} has no owner");
        ensure!(
            path == "*" || workspace().join(path.trim_start_matches('/')).exists(),
            "CODEOWNERS names {path}, which does not exist"
        );
    }
    Ok(())
}

#[test]
fn each_licence_has_its_text() -> Result<()> {
    let reuse = read("REUSE.toml")?;
    let expressions = reuse
        .lines()
        .filter_map(|line| line.strip_prefix("SPDX-License-Identifier = "));
    let mut named = 0;
    for expression in expressions {
        let words = expression.split(|c: char| !(c.is_alphanumeric() || "-.".contains(c)));
        for licence in words.filter(|word| !matches!(*word, "" | "OR" | "AND")) {
            let text = read(&format!("LICENSES/{licence}.txt"))?;
            ensure!(text.len() > 500, "LICENSES/{licence}.txt is too short");
            named += 1;
        }
    }
    ensure!(named >= 4, "REUSE.toml names {named} licences");
    Ok(())
}

/// Runs git in a clone. Returns its output.
fn git(clone: &Path, words: &[&str]) -> Result<String> {
    let mut git = Command::new("git");
    git.args(["-c", "user.name=Test", "-c", "user.email=test@example.org"]);
    succeeds(git.arg("-C").arg(clone).args(words))
}

#[test]
fn release_is_checked_and_its_source_and_notes_are_reproducible() -> Result<()> {
    let scratch = Scratch::new()?;
    let clone = scratch.file("clone");
    let origin = workspace().display().to_string();
    let words = ["clone", "--quiet", &origin, &clone.display().to_string()];
    git(scratch.files(), &words)?;
    // The clone has the present script and checks, also before they are committed.
    std::fs::copy(
        workspace().join("scripts/release"),
        clone.join("scripts/release"),
    )?;
    let release = |words: &[&str]| {
        let mut release = Command::new(clone.join("scripts/release"));
        release.args(words).env_remove("CARGO_TARGET_DIR");
        release.output().context("scripts/release")
    };
    let refused = release(&["check"])?;
    let reported = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success(), "{reported}");
    let version = env!("CARGO_PKG_VERSION");
    for fault in [
        "the work tree has changes".to_owned(),
        format!("no heading with version {version} and a date"),
        "entries under Unreleased".to_owned(),
        format!("no tag v{version}"),
    ] {
        let is_expected = !fault.contains("changes") || clone_differs(&clone)?;
        ensure!(
            reported.contains(&fault) == is_expected,
            "{fault}: {reported}"
        );
    }

    let changelog = "# Changelog\n\n## [Unreleased]\n\n## [VERSION] - 2026-12-01\n\n- One change.\n\n## [0.0.1] - 2026-01-01\n\n- Old.\n";
    std::fs::write(
        clone.join("CHANGELOG.md"),
        changelog.replace("VERSION", version),
    )?;
    let samples = version.rsplit_once('.').context("no version")?.0;
    let samples = clone.join("tests/compat").join(samples);
    std::fs::create_dir_all(&samples)?;
    std::fs::write(samples.join("keys.txt"), "")?;
    git(&clone, &["add", "--all"])?;
    git(&clone, &["commit", "--quiet", "--message", "release"])?;
    git(&clone, &["tag", &format!("v{version}")])?;
    let light = release(&["check"])?;
    let reported = String::from_utf8_lossy(&light.stderr).into_owned();
    ensure!(reported.contains("is not annotated"), "{reported}");
    git(
        &clone,
        &[
            "tag",
            "--annotate",
            "--force",
            "--message",
            "x",
            &format!("v{version}"),
        ],
    )?;

    let (one, two) = (scratch.file("one"), scratch.file("two"));
    for folder in [&one, &two] {
        let written = release(&["files", &folder.display().to_string()])?;
        ensure!(
            written.status.success(),
            "{}",
            String::from_utf8_lossy(&written.stderr)
        );
    }
    succeeds(Command::new("diff").arg("-r").args([&one, &two]))?;
    succeeds(
        Command::new("sha256sum")
            .args(["--check", "SHA256SUMS"])
            .current_dir(&one),
    )?;
    let notes = std::fs::read_to_string(one.join("NOTES.md"))?;
    ensure!(
        notes.contains("- One change.") && !notes.contains("Old"),
        "{notes}"
    );
    let archive = one.join(format!("lunette-{version}.tar.gz"));
    let listed = succeeds(Command::new("tar").arg("--list").arg("--file").arg(archive))?;
    ensure!(
        listed.contains(&format!("lunette-{version}/Cargo.toml")),
        "{listed}"
    );

    git(
        &clone,
        &["commit", "--quiet", "--allow-empty", "--message", "later"],
    )?;
    let later = release(&["check"])?;
    let reported = String::from_utf8_lossy(&later.stderr).into_owned();
    ensure!(
        reported.contains("is another commit than HEAD"),
        "{reported}"
    );
    Ok(())
}

/// Returns true if the copied script differs from the committed one.
fn clone_differs(clone: &Path) -> Result<bool> {
    Ok(!git(clone, &["status", "--porcelain"])?.is_empty())
}
