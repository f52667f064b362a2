//! Files that a release and its contributors need: hosted workflows call existing make targets, the minimum Rust version is that of all
//! dependencies, reviewers are assigned to existing paths, and each licence has its text. Needs only the source tree. Takes: 1 s.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, bail, ensure};
use serde_json::Value;
use std::path::PathBuf;
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
