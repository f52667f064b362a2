//! Files that a release and its contributors need: hosted workflows call existing make targets, the minimum Rust version is that of all
//! dependencies, the compiler is that of the profile, reviewers are assigned to existing paths, each licence has its text, and samples of
//! releases stay unchanged. `scripts/release` checks a release. Needs only the source tree and git. Takes: 10 s.
#![forbid(unsafe_code)]

use end_to_end::packages::succeeds;
use end_to_end::{Context, Result, Scratch, bail, ensure};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
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

/// Returns the compiler that `rust-toolchain.toml` selects.
fn selected_compiler() -> Result<String> {
    let file = read("rust-toolchain.toml")?;
    let mut channels = file
        .lines()
        .filter_map(|line| line.strip_prefix("channel = "));
    let channel = channels.next().context("rust-toolchain.toml: no channel")?;
    Ok(channel.trim_matches('"').to_owned())
}

#[test]
fn selected_compiler_is_that_of_the_profile() -> Result<()> {
    let compiler = selected_compiler()?;
    let start = format!("rustc-{compiler}-llvm-");
    let mut profiles = 0;
    for entry in std::fs::read_dir(workspace().join("profile"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        ensure!(name.starts_with(&start), "profile/{name}: not {compiler}");
        profiles += 1;
    }
    ensure!(profiles == 1, "{profiles} profiles");
    Ok(())
}

/// Runs `scripts/toolchain` with stubs: rustup prints the list `installed`, and compilers of other names have `version`.
fn toolchain_of(installed: &str, version: &str) -> Result<String> {
    let scratch = Scratch::new()?;
    let programs = scratch.file("programs");
    std::fs::create_dir(&programs)?;
    let rustup = format!("#!/bin/sh\n[ \"$*\" = 'toolchain list' ] && printf '{installed}'\n");
    let rustc = format!("#!/bin/sh\n[ $# = 2 ] && echo 'rustc {version} (0123 2026-04-14)'\n");
    for (name, text) in [("rustup", rustup), ("rustc", rustc)] {
        let path = programs.join(name);
        std::fs::write(&path, text)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    }
    let mut script = Command::new(workspace().join("scripts/toolchain"));
    script.env("PATH", format!("{}:/usr/bin:/bin", programs.display()));
    let printed = succeeds(script.env_remove("RUSTUP_TOOLCHAIN"))?;
    Ok(printed.trim().to_owned())
}

#[test]
fn compiler_of_another_name_serves_if_its_version_is_selected() -> Result<()> {
    let compiler = selected_compiler()?;
    let (own, stable) = (
        format!("{compiler}-x86_64\\n"),
        "stable-x86_64 (default)\\n",
    );
    let both = format!("{stable}{own}");
    let short = compiler.rsplit_once('.').context("no patch version")?.0;
    let minor = format!("{stable}{short}-x86_64\\n");
    for (installed, version, expected) in [
        (stable, &*compiler, "stable"),
        (stable, "1.0.0", ""),
        (&own, &compiler, ""),
        (&both, &compiler, ""),
        (&minor, &compiler, short),
        (&minor, "1.0.0", ""),
        ("", &compiler, ""),
    ] {
        let found = toolchain_of(installed, version)?;
        ensure!(found == expected, "{installed}, {version}: {found:?}");
    }
    Ok(())
}

/// Returns true if all names and properties of `then` (`NAME: PROPERTY PROPERTY`) are in `now`.
fn grows(then: &str, now: &str) -> bool {
    let parse = |line| str::rsplit_once(line, ": ").unwrap_or((line, ""));
    then.lines().map(parse).all(|(name, properties)| {
        let mut now = now.lines().map(parse);
        now.any(|(other, known)| {
            let mut words = properties.split_whitespace();
            name == other && words.all(|word| known.split_whitespace().any(|known| known == word))
        })
    })
}

/// Returns the samples of a release that were changed since its tag. If the release is `version`, which is in preparation,
/// lists may grow, and JSON may have other values.
fn changed_samples(repository: &Path, tag: &str, version: &str) -> Result<Vec<String>> {
    let git = |words: &[&str]| {
        let mut git = Command::new("git");
        succeeds(git.arg("-C").arg(repository).args(words))
    };
    let release = tag.trim_start_matches('v');
    let minor = release.rsplit_once('.').context("no version")?.0;
    let folder = format!("tests/compat/{minor}");
    let no_additions = ["diff", "--name-status", "--no-renames", "--diff-filter=a"];
    let changes = git(&[&no_additions[..], &[tag, "--", &folder]].concat())?;
    let mut changed = Vec::new();
    for line in changes.lines() {
        let (status, file) = line.split_once('\t').context("git diff")?;
        let has_grown = |file: &str| -> Result<bool> {
            let now = std::fs::read_to_string(repository.join(file))?;
            Ok(grows(&git(&["show", &format!("{tag}:{file}")])?, &now))
        };
        let is_in_preparation = release == version && status == "M";
        let extension = file.rsplit_once('.').map(|(_, extension)| extension);
        let is_permitted = is_in_preparation
            && match extension {
                Some("txt") => has_grown(file)?,
                // Recorded again with other values. Tests of compatibility read them.
                Some("json") => true,
                _ => false,
            };
        if !is_permitted {
            changed.push(file.to_owned());
        }
    }
    Ok(changed)
}

#[test]
fn samples_of_releases_are_those_of_their_tags() -> Result<()> {
    let mut git = Command::new("git");
    git.arg("-C").arg(workspace());
    let tags = succeeds(git.args(["tag", "--merged", "HEAD", "--list", "v[0-9]*.0"]))?;
    for tag in tags.lines() {
        let changed = changed_samples(&workspace(), tag, VERSION)?;
        ensure!(changed.is_empty(), "changed since {tag}: {changed:?}");
    }
    ensure!(grows("a: x y\nb\n", "b: v\na: x z y\n"));
    ensure!(!grows("a: x y\n", "a: x z\n"), "a lost property");
    ensure!(!grows("a: x\nb: y\n", "a: x\n"), "a lost name");
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

/// A clone of this repository with the present `scripts/release`, also before that is committed.
struct Repository {
    scratch: Scratch,
    folder: PathBuf,
    tag: String,
}

impl Repository {
    fn new() -> Result<Repository> {
        let scratch = Scratch::new()?;
        let folder = scratch.file("clone");
        let origin = workspace().display().to_string();
        let target = folder.display().to_string();
        let mut clone = Command::new("git");
        succeeds(clone.args(["clone", "--quiet", "--no-tags", &origin, &target]))?;
        let script = "scripts/release";
        std::fs::copy(workspace().join(script), folder.join(script))?;
        let repository = Repository {
            scratch,
            folder,
            tag: format!("v{VERSION}"),
        };
        repository.add_profile()?;
        Ok(repository)
    }

    /// Adds a profile for the compiler of this machine, which may be another one than that of the release.
    fn add_profile(&self) -> Result<()> {
        let version = succeeds(Command::new("rustc").arg("-vV"))?;
        let field = |name: &str| version.lines().find_map(|line| line.strip_prefix(name));
        let release = field("release: ").context("no release")?;
        let llvm = field("LLVM version: ").context("no LLVM version")?;
        self.write(&format!("profile/rustc-{release}-llvm-{llvm}.profdata"), "")
    }

    fn git(&self, words: &[&str]) -> Result<String> {
        let mut git = Command::new("git");
        git.args(["-c", "user.name=Test", "-c", "user.email=test@example.org"]);
        succeeds(git.arg("-C").arg(&self.folder).args(words))
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.folder.join(file);
        std::fs::create_dir_all(path.parent().context("no folder")?)?;
        Ok(std::fs::write(path, text)?)
    }

    fn commit(&self) -> Result<()> {
        self.git(&["add", "--all"])?;
        let message = ["--allow-empty", "--message", "release"];
        self.git(&[&["commit", "--quiet"], &message[..]].concat())
            .map(drop)
    }

    /// Runs `scripts/release`. Returns its success and its error messages.
    fn release(&self, words: &[&str]) -> Result<(bool, String)> {
        let mut release = Command::new(self.folder.join("scripts/release"));
        release.args(words).env_remove("CARGO_TARGET_DIR");
        let ran = release.output().context("scripts/release")?;
        let reported = String::from_utf8_lossy(&ran.stderr).into_owned();
        Ok((ran.status.success(), reported))
    }

    fn is_refused(&self, faults: &[&str]) -> Result<()> {
        let (success, reported) = self.release(&["check"])?;
        ensure!(!success, "{faults:?} were not found");
        for fault in faults {
            ensure!(reported.contains(fault), "{fault}: {reported}");
        }
        let count = format!(", {} faults", faults.len());
        ensure!(reported.contains(&count), "{count}: {reported}");
        Ok(())
    }
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The changelog of a release, with an older one.
const CHANGELOG: &str = "## [Unreleased]\n\n## [VERSION] - 2026-12-01\n\n- One change.\n\n## [0.0.1] - 2026-01-01\n\n- Old.\n";

#[test]
fn release_is_refused_until_changelog_samples_and_tag_fit() -> Result<()> {
    let repository = Repository::new()?;
    let minor = VERSION.rsplit_once('.').context("no version")?.0;
    let samples = format!("tests/compat/{minor}");
    std::fs::remove_dir_all(repository.folder.join(&samples)).ok();
    repository.write("CHANGELOG.md", "## [Unreleased]\n\n- One change.\n")?;
    repository.commit()?;
    let tag = repository.tag.as_str();
    let no_tag = format!("there is no tag {tag}");
    repository.is_refused(&[
        "no heading with version",
        "entries under Unreleased",
        "no entries for",
        "the samples of this release are missing",
        &no_tag,
    ])?;
    repository.write(&format!("{samples}/keys.txt"), "")?;
    let stored = format!("{samples}/state/unit.saved");
    repository.write(&stored, "1")?;
    let changelog = CHANGELOG.replace("VERSION", VERSION);
    repository.write("CHANGELOG.md", &changelog)?;
    repository.is_refused(&["the work tree has changes", &no_tag])?;
    repository.commit()?;
    repository.git(&["tag", tag])?;
    repository.is_refused(&["is not annotated"])?;
    let annotated = ["tag", "--annotate", "--force", "--message", "x", tag];
    repository.git(&annotated)?;
    let (success, reported) = repository.release(&["check"])?;
    ensure!(success, "{reported}");
    sources_and_notes_are_reproducible(&repository)?;
    let mark = |mark: &str| repository.git(&["update-index", mark, "CHANGELOG.md"]);
    mark("--assume-unchanged")?;
    repository.write("CHANGELOG.md", &changelog.replace("One change", "Another"))?;
    repository.is_refused(&["git status does not show changes of CHANGELOG.md"])?;
    mark("--no-assume-unchanged")?;
    repository.write("CHANGELOG.md", &changelog)?;
    let changed = |version| changed_samples(&repository.folder, tag, version);
    let keys = format!("{samples}/keys.txt");
    repository.write(&keys, "a: x\n")?;
    ensure!(changed(VERSION)?.is_empty(), "{:?}", changed(VERSION)?);
    ensure!(changed("99.0.0")? == [keys], "a released sample may change");
    repository.write(&stored, "2")?;
    ensure!(changed(VERSION)? == [stored], "a stored file may change");
    repository.commit()?;
    repository.is_refused(&["is another commit than HEAD"])
}

fn sources_and_notes_are_reproducible(repository: &Repository) -> Result<()> {
    let folders = ["one", "two"].map(|name| repository.scratch.file(name));
    for folder in &folders {
        let (success, reported) = repository.release(&["files", &folder.display().to_string()])?;
        ensure!(success, "{reported}");
    }
    succeeds(Command::new("diff").arg("-r").args(&folders))?;
    let [folder, _] = &folders;
    let (success, reported) = repository.release(&["files", &folder.display().to_string()])?;
    ensure!(!success && reported.contains("is not empty"), "{reported}");
    let mut sums = Command::new("sha256sum");
    succeeds(sums.args(["--check", "SHA256SUMS"]).current_dir(folder))?;
    let notes = std::fs::read_to_string(folder.join("NOTES.md"))?;
    ensure!(
        notes.contains("- One change.") && !notes.contains("Old"),
        "{notes}"
    );
    let archive = folder.join(format!("lunette-{VERSION}.tar.gz"));
    let listed = succeeds(Command::new("tar").arg("--list").arg("--file").arg(archive))?;
    let manifest = format!("lunette-{VERSION}/Cargo.toml");
    ensure!(listed.contains(&manifest), "{listed}");
    Ok(())
}
