//! Rules of this source tree that no compiler checks. Each failure names the file and the fix.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, bail, ensure, prose};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use vm::workspace;

/// Crates may depend only on crates of the same or a lower level in this list.
const LEVELS: [(&str, &[&str]); 5] = [
    (
        "words",
        &[
            "block",
            "latency",
            "guest_memory",
            "probes",
            "iscsi_name",
            "sandbox",
        ],
    ),
    (
        "protocols",
        &[
            "virtqueue",
            "scsi",
            "iscsi",
            "nbd",
            "vhost_user_wire",
            "qcow2",
            "guest_channel",
            "jobs",
        ],
    ),
    (
        "engines",
        &[
            "sys",
            "tls",
            "uring",
            "librbd",
            "iscsi_initiator",
            "bdev",
            "reactor",
            "request_engine",
        ],
    ),
    (
        "transports",
        &[
            "virtio_device",
            "virtio_blk",
            "virtio_scsi",
            "scsi_exec",
            "vhost_user",
            "iscsi_target",
            "nbd_server",
        ],
    ),
    (
        "programs",
        &[
            "control",
            "page",
            "config",
            "daemon",
            "bench",
            "cli_common",
            "doctor",
            "lunette_lab",
            "vm",
            "xtask",
            "sim",
            "vhost_frontend",
            "conformance",
            "lunette",
            "guest_agent",
            "guest_bench",
            "end_to_end",
            "fuzz_targets",
            "models",
            "lunette-fuzz",
        ],
    ),
];

/// Dependencies that the levels permit and the design forbids: crate, dependencies, reason.
const FORBIDDEN: [(&str, &[&str], &str); 8] = [
    (
        "control",
        &[
            "daemon",
            "config",
            "bdev",
            "reactor",
            "scsi",
            "iscsi",
            "vhost_user",
        ],
        "clients link it, and nothing of a server",
    ),
    (
        "config",
        &[
            "daemon",
            "control",
            "bdev",
            "reactor",
            "librbd",
            "iscsi_initiator",
            "iscsi_target",
            "vhost_user",
            "virtio_device",
        ],
        "it describes objects and opens nothing",
    ),
    (
        "scsi",
        &["iscsi", "virtio_device", "virtqueue", "guest_memory"],
        "it depends on no transport and no ring",
    ),
    (
        "iscsi",
        &["scsi", "virtio_device", "virtqueue", "guest_memory"],
        "it takes bytes and gives values",
    ),
    (
        "bdev",
        &["reactor"],
        "a back end does not depend on its clients",
    ),
    (
        "request_engine",
        &["virtqueue", "scsi", "iscsi", "scsi_exec", "virtio_device"],
        "all transports use it, and it depends on none of them",
    ),
    (
        "virtio_blk",
        &["vhost_user", "virtio_scsi", "scsi"],
        "a device depends on no socket and no other device",
    ),
    (
        "virtio_scsi",
        &["vhost_user", "virtio_blk", "iscsi"],
        "a device depends on no socket and no other device",
    ),
];

/// Crates that a program must not link, even indirectly: program, crates, reason.
const NOT_LINKED: [(&str, &[&str], &str); 2] = [
    (
        "lunette",
        &["bench", "vm", "vhost_frontend", "lunette_lab"],
        "a daemon needs no drivers, plots and guests: lunette-lab has them",
    ),
    (
        "lunette_lab",
        &["daemon", "config", "reactor", "vhost_user", "iscsi_target"],
        "it measures daemons of any version over their sockets",
    ),
];

/// Maximum lines of `cargo tree`: of the daemon, which auditors and packagers must review, and of the load generator for guests, which
/// every test run builds in release.
const DEPENDENCIES_MAX: [(&str, usize); 2] = [("lunette", 225), ("guest_bench", 120)];

/// Crates that may contain unsafe code.
const UNSAFE_CRATES: [&str; 5] = ["guest_memory", "uring", "probes", "librbd", "sys"];

/// Maximum lines of a file. A longer file has more than one purpose.
const LINES_MAX: usize = 800;

/// Crates of the data path. They use the clock of `latency` and the system calls of `uring`.
const DATA_PATH: [&str; 11] = [
    "block",
    "virtqueue",
    "bdev",
    "reactor",
    "request_engine",
    "scsi_exec",
    "virtio_device",
    "virtio_blk",
    "virtio_scsi",
    "iscsi_target",
    "nbd_server",
];

/// Names that data path code must not use, and the replacement.
const CLOCKS_AND_CALLS: [(&[&str], &str); 4] = [
    (
        &["Instant", "SystemTime", "clock_gettime", "quanta::"],
        "take the time from a `latency::Clock`, the worker's where there is one",
    ),
    (
        &["eventfd(", "EventfdFlags"],
        "use `uring::Event` or `uring::Signal`",
    ),
    (
        &[
            "rustix::io::read(",
            "rustix::io::write(",
            "rustix::io::pread(",
            "rustix::io::pwrite(",
            "rustix::io::{",
            "rustix::net::send",
            "rustix::net::recv",
            "libc::syscall(",
            "libc::read(",
            "libc::write(",
        ],
        "give it to the worker's `uring::Ring`, or add a safe function to `uring`",
    ),
    (
        &["thread::sleep("],
        "set a timer on the worker's `uring::Ring`",
    ),
];

/// Files of these crates that run on control plane threads.
const CONTROL_PLANE: [(&str, &str); 11] = [
    (
        "crates/reactor/src/accepting.rs",
        "an accepting thread waits for clients",
    ),
    (
        "crates/reactor/src/retry.rs",
        "times the retries of listeners, on the control thread",
    ),
    ("crates/reactor/src/socket_path.rs", "locks folders"),
    (
        "crates/iscsi_target/src/portals.rs",
        "opens and retries portals, on the control thread",
    ),
    (
        "crates/iscsi_target/src/server.rs",
        "an accepting thread takes connections",
    ),
    ("crates/nbd_server/src/listeners.rs", "opens sockets"),
    ("crates/nbd_server/src/server.rs", "accepts clients"),
    (
        "crates/bdev/src/file/format.rs",
        "a file is looked at when it is opened",
    ),
    (
        "crates/bdev/src/file/properties.rs",
        "a file is tried when it is opened",
    ),
    (
        "crates/bdev/src/rbd/reopening.rs",
        "a thread of its own waits until an image can be opened again",
    ),
    (
        "crates/bdev/src/rbd/peers.rs",
        "threads of its own wait for a cluster and other daemons",
    ),
];

fn output_of(program: &str, words: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(words)
        .current_dir(workspace())
        .output()
        .with_context(|| format!("cannot run {program}; hint: apt-get install {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {words:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns all tracked files and new files that are not ignored, so that a rule applies before the commit.
fn tracked_files() -> Result<Vec<PathBuf>> {
    let listing = output_of(
        "git",
        &["ls-files", "--cached", "--others", "--exclude-standard"],
    )?;
    Ok(listing
        .lines()
        .map(PathBuf::from)
        .filter(|path| workspace().join(path).is_file())
        .collect())
}

fn rust_files() -> Result<Vec<(PathBuf, String)>> {
    tracked_files()?
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| {
            let text = std::fs::read_to_string(workspace().join(&path))?;
            Ok((path, text))
        })
        .collect()
}

fn report(rule: &str, findings: Vec<String>) -> Result<()> {
    ensure!(findings.is_empty(), "{rule}:\n  {}", findings.join("\n  "));
    Ok(())
}

fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

/// Returns the packages of this workspace.
fn metadata() -> Result<Value> {
    let words = ["metadata", "--format-version=1", "--no-deps", "--offline"];
    Ok(serde_json::from_str(&output_of(&cargo(), &words)?)?)
}

#[test]
fn dependencies_run_one_way() -> Result<()> {
    let metadata = metadata()?;
    let levels: BTreeMap<&str, usize> = LEVELS
        .iter()
        .enumerate()
        .flat_map(|(level, (_, names))| names.iter().map(move |name| (*name, level)))
        .collect();
    let mut findings = Vec::new();
    for package in metadata["packages"].as_array().context("no packages")? {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(&level) = levels.get(name) else {
            findings.push(format!(
                "crate {name} has no place: add it to LEVELS in tests/tests/tidy.rs"
            ));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let other = dependency["name"].as_str().unwrap_or_default();
            // Tests may use any crate.
            let (Some(&below), false) = (levels.get(other), dependency["kind"] == "dev") else {
                continue;
            };
            if below > level {
                findings.push(format!(
                    "{name} ({}) depends on {other} ({}): move the needed items down, or turn the call into a trait that {other} implements",
                    LEVELS[level].0, LEVELS[below].0
                ));
            }
            for (who, whom, why) in FORBIDDEN {
                if who == name && whom.contains(&other) {
                    findings.push(format!("{name} depends on {other}, but {why}"));
                }
            }
        }
    }
    report("dependencies against the direction", findings)
}

/// Returns the workspace crates that `root` links, including itself. `direct` has the direct dependencies of each crate.
fn linked<'a>(root: &'a str, direct: &BTreeMap<&'a str, Vec<&'a str>>) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut open = vec![root];
    while let Some(name) = open.pop() {
        if found.insert(name) {
            open.extend(direct.get(name).into_iter().flatten());
        }
    }
    found
}

#[test]
fn programs_link_only_needed_crates() -> Result<()> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let text = |value: &'_ Value| value.as_str().unwrap_or_default().to_owned();
    let names: Vec<String> = packages
        .iter()
        .map(|package| text(&package["name"]))
        .collect();
    let mut direct: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (package, name) in packages.iter().zip(&names) {
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        let normal = dependencies.filter(|dependency| dependency["kind"].is_null());
        let ours = normal.filter_map(|dependency| {
            let name = dependency["name"].as_str()?;
            names
                .iter()
                .map(String::as_str)
                .find(|known| *known == name)
        });
        direct.insert(name, ours.collect());
    }
    let mut findings = Vec::new();
    for (program, others, why) in NOT_LINKED {
        ensure!(direct.contains_key(program), "there is no crate {program}");
        let linked = linked(program, &direct);
        for other in others.iter().filter(|other| linked.contains(**other)) {
            findings.push(format!("{program} links {other}, but {why}"));
        }
    }
    report("programs link too much", findings)
}

#[test]
fn programs_have_few_dependencies() -> Result<()> {
    for (package, most) in DEPENDENCIES_MAX {
        let words = ["tree", "-p", package, "-e", "normal", "--prefix", "none"];
        let tree = output_of(&cargo(), &[&words[..], &["--offline"]].concat())?;
        let count = tree.lines().collect::<BTreeSet<_>>().len();
        ensure!(
            count <= most,
            "{count} lines of `cargo {}`, {most} are the most: do without the new dependency, or turn off its features",
            words.join(" ")
        );
    }
    Ok(())
}

#[test]
fn paths_in_documents_exist() -> Result<()> {
    let root = workspace();
    let documents = tracked_files()?.into_iter().filter(|path| {
        let folder = path.iter().next().and_then(|folder| folder.to_str());
        let is_root = path.parent() == Some(Path::new(""));
        let is_read = is_root || matches!(folder, Some("docs" | "contrib" | ".github" | "tests"));
        is_read && path.extension().is_some_and(|extension| extension == "md")
    });
    let mut findings = Vec::new();
    for document in documents {
        let Ok(text) = std::fs::read_to_string(root.join(&document)) else {
            findings.push(format!("{} is missing", document.display()));
            continue;
        };
        let beside = document.parent().unwrap_or(Path::new(""));
        for quoted in quoted_paths(&text) {
            if !(path_exists(&root, &quoted) || root.join(beside).join(&quoted).exists()) {
                findings.push(format!(
                    "{} names {quoted}, which does not exist: correct or remove it",
                    document.display()
                ));
            }
        }
    }
    report("documents and the tree have grown apart", findings)
}

/// Returns quoted words and link targets that look like paths of this tree.
fn quoted_paths(text: &str) -> Vec<String> {
    const ROOTS: [&str; 6] = ["crates/", "tests/", "scripts/", "docs/", "fuzz/", ".ci/"];
    let quotes = text.split('`').skip(1).step_by(2);
    let links = text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target);
    let is_crate = |word: &str| {
        let first = word.split('/').next().unwrap_or_default();
        word.contains('/') && LEVELS.iter().any(|(_, names)| names.contains(&first))
    };
    let names_file = |word: &str| ROOTS.iter().any(|root| word.starts_with(root)) || is_crate(word);
    let plain = |word: &str| {
        !word.contains(char::is_whitespace) && !word.contains(['*', '<', '{', '$', '='])
    };
    let mut found: Vec<String> = quotes
        .filter(|word| names_file(word) && plain(word))
        .map(str::to_owned)
        .collect();
    found.extend(
        links
            .map(|target| target.split('#').next().unwrap_or_default())
            .filter(|target| !target.is_empty() && !target.contains("://") && plain(target))
            .map(str::to_owned),
    );
    found
}

/// Returns true for an existing path from the root, or for a hop such as `virtio_blk/queue`: a module or folder of that crate.
fn path_exists(root: &Path, quoted: &str) -> bool {
    let quoted = quoted.trim_end_matches('/');
    if root.join(quoted).exists() {
        return true;
    }
    match quoted.split_once('/') {
        Some((name, rest)) => {
            let source = root.join("crates").join(name).join("src");
            source.join(rest).exists() || source.join(format!("{rest}.rs")).exists()
        }
        None => false,
    }
}

#[test]
fn no_file_names_a_path_of_one_machine() -> Result<()> {
    // Split in two parts, so that this file does not match.
    let places = [
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
        concat!("/wo", "rk/"),
        concat!("../sh", "ared"),
    ];
    let mut findings = Vec::new();
    for path in tracked_files()? {
        // Binary files are skipped.
        let Ok(text) = std::fs::read_to_string(workspace().join(&path)) else {
            continue;
        };
        for (number, line) in text.lines().enumerate() {
            if let Some(place) = places.iter().find(|place| line.contains(*place)) {
                findings.push(format!(
                    "{}:{}: {place}: use a path from the root of the tree",
                    path.display(),
                    number + 1
                ));
            }
        }
    }
    report("paths that exist on one machine only", findings)
}

#[test]
fn unsafe_code_stays_in_the_crates_named_for_it() -> Result<()> {
    let mut findings = Vec::new();
    for (path, text) in rust_files()? {
        let words: Vec<&str> = path.iter().filter_map(|word| word.to_str()).collect();
        if let ["crates", name, ..] = words[..]
            && UNSAFE_CRATES.contains(&name)
        {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let markers = [
                concat!("unsafe", " {"),
                concat!("unsafe", " fn"),
                concat!("unsafe", " impl"),
                concat!("unsafe", " extern"),
            ];
            if markers.iter().any(|marker| code.contains(marker)) {
                findings.push(format!(
                    "{}:{}: put a safe function into one of {UNSAFE_CRATES:?}",
                    path.display(),
                    number + 1
                ));
            }
        }
        let is_root = matches!(
            words[..],
            ["crates", _, "src", "lib.rs" | "main.rs"]
                | ["tests", "tests", _]
                | ["tests", "src", "lib.rs"]
        );
        if is_root && !text.contains("#![forbid(unsafe_code)]") {
            findings.push(format!(
                "{}: add #![forbid(unsafe_code)] below the module head",
                path.display()
            ));
        }
    }
    report("unsafe code, or no promise against it", findings)
}

#[test]
fn every_file_has_a_head_and_one_job() -> Result<()> {
    let mut findings = Vec::new();
    for (path, text) in rust_files()? {
        if !text.starts_with("//!") {
            findings.push(format!(
                "{}: begin with //! and the purpose, the owner and the trusted input",
                path.display()
            ));
        }
        let lines = text.lines().count();
        if lines > LINES_MAX {
            findings.push(format!(
                "{}: {lines} lines, {LINES_MAX} are the most: split it by job",
                path.display()
            ));
        }
    }
    report("source files", findings)
}

/// Maximum length of a test's name: subject, condition, result.
const TEST_NAME_MAX: usize = 66;

#[test]
fn names_of_tests_are_short() -> Result<()> {
    let mut findings = Vec::new();
    for (path, text) in rust_files()? {
        let mut is_test = false;
        for line in text.lines().map(str::trim_start) {
            let name = line.trim_start_matches("async ").strip_prefix("fn ");
            let name = name.and_then(|rest| rest.split('(').next());
            if let Some(name) = name.filter(|name| is_test && name.len() > TEST_NAME_MAX) {
                let (path, length) = (path.display(), name.len());
                findings.push(format!("{path}: {name} has {length} characters, the maximum is {TEST_NAME_MAX}: give subject, condition, result"));
            }
            is_test = match line.strip_prefix("#[") {
                Some(attribute) => {
                    is_test || attribute.starts_with("test") || attribute.starts_with("tokio::test")
                }
                None => false,
            };
        }
    }
    report("names of tests", findings)
}

/// Maximum numbers of marked phrases (`end_to_end::prose`) per 10,000 words of comments, documents and messages. A budget only
/// falls: lower it when you reword a folder.
const PROSE_BUDGETS: [(&str, [usize; 3]); 3] = [
    ("crates/guest_memory", [20, 0, 10]),
    ("crates/uring", [30, 0, 10]),
    ("tests", [20, 0, 10]),
];

/// Budget of a folder that the table does not list.
const PROSE_BUDGET: usize = 10;

/// A folder with fewer words counts as one of this size, so that one phrase does not exceed its budget.
const PROSE_WORDS_MIN: usize = 1_000;

/// Lines per folder and kind in the failure message.
const PROSE_LINES_MAX: usize = 30;

/// Folder with its own budgets: a crate, a top-level folder, or `.`. `None` for recorded outputs and for text about phrases.
fn prose_folder(path: &Path) -> Option<String> {
    let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
    match parts[..] {
        ["docs", "lab", ..] | ["CHANGELOG.md"] | ["tests", "src", "prose.rs"] => None,
        ["crates", name, _, ..] => Some(format!("crates/{name}")),
        [folder, _, ..] => Some(folder.to_owned()),
        _ => Some(".".to_owned()),
    }
}

#[test]
fn prose_stays_within_its_budgets() -> Result<()> {
    let mut counts: BTreeMap<(String, prose::Kind), (usize, Vec<String>)> = BTreeMap::new();
    for path in tracked_files()? {
        let (Some(folder), Some(name)) = (prose_folder(&path), path.to_str()) else {
            continue;
        };
        let Ok(text) = std::fs::read_to_string(workspace().join(&path)) else {
            continue;
        };
        for (kind, line, text) in prose::pieces(name, &text) {
            let (words, found) = counts.entry((folder.clone(), kind)).or_default();
            *words += prose::word_count(&text);
            for (phrase, advice) in prose::marks(&text) {
                found.push(format!(
                    "{name}:{line}: {phrase}: {advice}: {}",
                    text.trim()
                ));
            }
        }
    }
    let mut findings = Vec::new();
    for ((folder, kind), (words, found)) in &counts {
        let budgets = PROSE_BUDGETS.iter().find(|(name, _)| name == folder);
        let budget = budgets.map_or(PROSE_BUDGET, |(_, budgets)| budgets[*kind as usize]);
        let rate = found.len() * 10_000 / words.max(&PROSE_WORDS_MIN);
        if rate > budget {
            let lines = found[..found.len().min(PROSE_LINES_MAX)].join("\n    ");
            findings.push(format!(
                "{folder}: {}: {rate} marked phrases per 10,000 words, the budget is {budget}:\n    {lines}",
                kind.name()
            ));
        }
    }
    report("prose that is hard to read", findings)
}

/// Returns the lines of code without comments and tests. Tests begin with the attribute and come last.
fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate();
    lines
        .take_while(|(_, line)| !line.starts_with("#[cfg(test)]"))
        .map(|(number, line)| (number + 1, line.split("//").next().unwrap_or_default()))
}

#[test]
fn the_data_path_has_one_clock_and_one_ring() -> Result<()> {
    let mut findings = Vec::new();
    for (path, text) in rust_files()? {
        let words: Vec<&str> = path.iter().filter_map(|word| word.to_str()).collect();
        let ["crates", name, "src", .., file] = words[..] else {
            continue;
        };
        let is_exempt = CONTROL_PLANE
            .iter()
            .any(|(exempt, _)| path == Path::new(exempt));
        if !DATA_PATH.contains(&name) || is_exempt || file == "tests.rs" {
            continue;
        }
        for (number, code) in code_lines(&text) {
            for (names, instead) in CLOCKS_AND_CALLS {
                if let Some(name) = names.iter().find(|name| code.contains(**name)) {
                    findings.push(format!("{}:{number}: {name}: {instead}", path.display()));
                }
            }
        }
    }
    for (exempt, why) in CONTROL_PLANE {
        ensure!(
            workspace().join(exempt).exists(),
            "{exempt} ({why}) is gone: take it off the list"
        );
    }
    report("clocks and system calls on the data path", findings)
}

/// Program files that write to the terminal without `cli_common::terminal`.
const RAW_OUTPUT: &[(&str, &str)] = &[
    (
        "crates/cli_common/src/terminal.rs",
        "it escapes all other output",
    ),
    (
        "crates/cli_common/src/logging.rs",
        "its writer escapes each line",
    ),
    ("crates/cli_common/src/pages.rs", "pages of man and shells"),
    (
        "crates/lunette/src/report/mod.rs",
        "a page for another program",
    ),
    ("crates/lunette_lab/src/top/mod.rs", "the screen of ratatui"),
    ("crates/lunette_lab/src/iscsi/ends.rs", "data of a disk"),
    (
        "crates/lunette_lab/src/vm/exec.rs",
        "output of a command in a guest",
    ),
    (
        "crates/lunette_lab/src/bench/disktest.rs",
        "its own numbers",
    ),
];

/// Text from images, targets, initiators and other daemons must reach a terminal without control characters.
#[test]
fn programs_escape_their_output() -> Result<()> {
    const PROGRAMS: [&str; 4] = ["bench", "cli_common", "lunette", "lunette_lab"];
    const RAW: [&str; 5] = [
        "io::stdout()",
        "io::stderr()",
        "println!",
        "eprintln!",
        "print!(",
    ];
    let mut findings = Vec::new();
    for (path, text) in rust_files()? {
        let words: Vec<&str> = path.iter().filter_map(|word| word.to_str()).collect();
        let is_exempt = RAW_OUTPUT
            .iter()
            .any(|(exempt, _)| path == Path::new(exempt));
        let ["crates", name, "src", ..] = words[..] else {
            continue;
        };
        if is_exempt || !PROGRAMS.contains(&name) {
            continue;
        }
        for (number, code) in code_lines(&text) {
            let is_question = code.contains("is_terminal()") || code.contains("tcgetwinsize");
            if !is_question && RAW.iter().any(|raw| code.contains(raw)) {
                let path = path.display();
                findings.push(format!(
                    "{path}:{number}: use cli_common::stdout, stderr or print_line"
                ));
            }
        }
    }
    report("output past cli_common::terminal", findings)
}

/// `scripts/mutations` applies each patch. A patch that no longer applies must be rewritten.
#[test]
fn seeded_defects_fit_the_code() -> Result<()> {
    for entry in std::fs::read_dir(workspace().join("crates/sim/mutations"))? {
        let patch = entry?.path().display().to_string();
        output_of("git", &["apply", "--check", &patch])?;
    }
    Ok(())
}

#[test]
fn the_quoting_rule_finds_paths_and_leaves_other_words_alone() -> Result<()> {
    let text = "See `crates/block/src/lib.rs`, `virtio_blk/queue`, [us](CONTRIBUTING.md#x), `make test`, `a/b`, \
                [them](https://example.org), `scripts/50-lunette-*.json`.";
    let found = quoted_paths(text);
    if found
        != [
            "crates/block/src/lib.rs",
            "virtio_blk/queue",
            "CONTRIBUTING.md",
        ]
    {
        bail!("found {found:?}");
    }
    ensure!(
        path_exists(&workspace(), "block/geometry") && !path_exists(&workspace(), "block/nothing")
    );
    Ok(())
}
