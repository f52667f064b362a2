//! Checks the documents: the README is short, its figures and its chart match `docs/lab/vhost-user.md`, links lead to existing
//! headings, and private terms do not appear. Needs only the source tree. `LUNETTE_DRAW=1 cargo test --workspace --exclude
//! lunette-fuzz --test documents` redraws the chart.
#![forbid(unsafe_code)]

use end_to_end::prose::{Kind, marks, pieces};
use end_to_end::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use vm::workspace;

/// Cases in the table of `make bench` and their labels in the README.
const CASES: [(&str, &str); 9] = [
    ("null QD32", "null, depth 32"),
    ("null QD1", "null, depth 1"),
    ("null QD32 irq", "null, depth 32, driver sleeps"),
    ("RAM QD32", "RAM, depth 32"),
    ("RAM QD1", "RAM, depth 1"),
    ("RAM 64k QD8", "RAM, 64 KiB, depth 8"),
    ("RAM write 64k QD8", "RAM, 64 KiB writes, depth 8"),
    ("file QD32", "file on ext4, O_DIRECT, depth 32"),
    ("file QD1", "file on ext4, O_DIRECT, depth 1"),
];

const TABLE: &str = "docs/lab/vhost-user.md";
const PICTURE: &str = "docs/pictures/speed.svg";

/// One row, joined from both tables of the page.
struct Case {
    label: &'static str,
    /// I/Os per second of virtio-blk, virtio-scsi and the peer, as printed.
    rates: [String; 3],
    /// Ratios of virtio-blk and virtio-scsi to the peer.
    ratios: [f64; 2],
}

fn cases(page: &str) -> Result<Vec<Case>> {
    let rows_below = |heading: &str| {
        let rest = page.split_once(heading).map(|(_, rest)| rest);
        rest.with_context(|| format!("{TABLE} has no {heading:?}"))
    };
    let cells = |line: &str| -> Vec<String> {
        let cells = line.split("  ").map(str::trim);
        cells
            .filter(|cell| !cell.is_empty())
            .map(str::to_owned)
            .collect()
    };
    let row = |table: &str, case: &str| -> Result<Vec<String>> {
        let mut rows = table.lines().map(cells);
        let row = rows.find(|row| row.first().is_some_and(|name| name == case));
        row.with_context(|| format!("{TABLE} has no row {case:?}"))
    };
    let rates = rows_below("I/Os per second")?;
    let ratios = rows_below("Ratios of medians")?;
    CASES
        .iter()
        .map(|(case, label)| {
            let rate = row(rates, case)?;
            let rate = |index: usize| -> Result<String> {
                let cell = rate.get(index).context("a row without its rates")?;
                let rate = cell.split(" +-").next().unwrap_or_default();
                Ok(rate.to_owned())
            };
            let ratio = row(ratios, case)?;
            let ratio = |index: usize| -> Result<f64> {
                let cell = ratio.get(index).context("a row without its ratios")?;
                let number = cell.trim_start_matches('x').split(' ').next();
                Ok(number.unwrap_or_default().parse()?)
            };
            Ok(Case {
                label,
                rates: [rate(1)?, rate(2)?, rate(3)?],
                ratios: [ratio(1)?, ratio(2)?],
            })
        })
        .collect()
}

/// Draws the ratios to the peer as bars with their rates.
fn picture(cases: &[Case]) -> Result<String> {
    const LEFT: f64 = 318.0;
    const UNIT: f64 = 46.0;
    const TOP: usize = 84;
    const ROW: usize = 44;
    let bottom = TOP + ROW * cases.len();
    let height = bottom + 34;
    let one = LEFT + UNIT;
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" width="960" height="{height}" role="img" font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif" font-size="13.5">
<title>Rates beside qemu-storage-daemon 7.2, device alone</title>
<style>
.back {{ fill: #ffffff; stroke: #d0d7de; }} text {{ fill: #1f2328; }} .faint {{ fill: #57606a; }} .head {{ font-weight: 600; }} .end {{ text-anchor: end; }}
.blk {{ fill: #0969da; }} .scsi {{ fill: #bf8700; }} .grid {{ stroke: #d0d7de; }} .peer {{ stroke: #57606a; stroke-dasharray: 4 3; }}
@media (prefers-color-scheme: dark) {{ .back {{ fill: #0d1117; stroke: #30363d; }} text {{ fill: #e6edf3; }} .faint {{ fill: #9198a1; }}
.blk {{ fill: #4493f8; }} .scsi {{ fill: #d29922; }} .grid {{ stroke: #30363d; }} .peer {{ stroke: #9198a1; }} }}
</style>
<rect class="back" x="0.5" y="0.5" width="959" height="{}" rx="8"/>
<text class="head" x="24" y="32">Times the rate of qemu-storage-daemon 7.2: device alone, driver on another core</text>
<rect class="blk" x="24" y="46" width="12" height="12"/><text x="42" y="57">virtio-blk</text>
<rect class="scsi" x="130" y="46" width="12" height="12"/><text x="148" y="57">virtio-scsi</text>
<text class="faint" x="244" y="57">I/Os per second beside the bars; 4 KiB random reads unless the row says otherwise</text>
"#,
        height - 1
    );
    for times in (2..=10).step_by(2) {
        let x = LEFT + UNIT * f64::from(times);
        writeln!(
            svg,
            r#"<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}"/><text class="faint" x="{x}" y="{}" text-anchor="middle">{times}×</text>"#,
            bottom + 18
        )?;
    }
    writeln!(
        svg,
        r#"<line class="peer" x1="{one}" y1="{TOP}" x2="{one}" y2="{bottom}"/><text class="faint" x="{one}" y="{}" text-anchor="middle">peer</text>"#,
        bottom + 18
    )?;
    for (index, case) in cases.iter().enumerate() {
        let y = TOP + ROW * index;
        writeln!(
            svg,
            r#"<text class="end" x="{}" y="{}">{}</text>"#,
            LEFT - 10.0,
            y + 26,
            case.label
        )?;
        for (bar, (class, ratio)) in ["blk", "scsi"].iter().zip(case.ratios).enumerate() {
            let (bar_y, width) = (y + 5 + 17 * bar, UNIT * ratio);
            writeln!(
                svg,
                r#"<rect class="{class}" x="{LEFT}" y="{bar_y}" width="{width:.1}" height="15"/><text class="faint" x="{:.1}" y="{}">{ratio:.2}× · {}</text>"#,
                LEFT + width + 6.0,
                bar_y + 12,
                case.rates[bar]
            )?;
        }
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

#[test]
fn the_readme_shows_the_figures_of_the_latest_table() -> Result<()> {
    let page = std::fs::read_to_string(workspace().join(TABLE))?;
    let readme = std::fs::read_to_string(workspace().join("README.md"))?;
    let cases = cases(&page)?;
    for case in &cases {
        let [blk, scsi, peer] = &case.rates;
        let row = format!("| {} | {blk} | {scsi} | {peer} |", case.label);
        ensure!(
            readme.contains(&row),
            "README.md has no row {row}: take it from {TABLE}"
        );
    }
    let drawn = picture(&cases)?;
    let path = workspace().join(PICTURE);
    if std::env::var_os("LUNETTE_DRAW").is_some() {
        std::fs::write(&path, &drawn)?;
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    ensure!(
        kept == drawn,
        "{PICTURE} does not show {TABLE}; hint: LUNETTE_DRAW=1 cargo test --workspace --exclude lunette-fuzz --test documents"
    );
    Ok(())
}

/// Maximum README lines before the figures: two screens.
const README_LINES_MAX: usize = 80;

/// Terms with a private meaning in this project, and the standard term for each.
const PRIVATE_WORDS: [(&str, &str); 14] = [
    ("door", "transport, or export"),
    ("doors", "transports, or exports"),
    ("keeper", "state store"),
    ("teller", "event bus"),
    ("passage", "range lock, barrier"),
    ("settling", "drain"),
    ("spared", "drain"),
    ("curious", "wants a prefetch hint"),
    ("lend", "borrow"),
    ("lent", "borrowed"),
    ("mend", "hint, fix"),
    ("mends", "fixes"),
    ("unlogged", "suppressed"),
    ("asked-for", "requested"),
];

/// Returns every document by its path from the root of the tree.
fn documents() -> Result<BTreeMap<PathBuf, String>> {
    let root = workspace();
    let mut paths = Vec::new();
    let mut folders: Vec<PathBuf> = ["docs", "scripts", "contrib", ".github", "tests/compat"]
        .map(|folder| root.join(folder))
        .into_iter()
        .filter(|folder| folder.exists())
        .collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            match path.is_dir() {
                true => folders.push(path),
                false => paths.push(path),
            }
        }
    }
    paths.extend(
        std::fs::read_dir(&root)?
            .flatten()
            .map(|entry| entry.path()),
    );
    let is_document = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "md");
    let mut documents = BTreeMap::new();
    for path in paths.into_iter().filter(is_document) {
        let text = std::fs::read_to_string(&path)?;
        documents.insert(path.strip_prefix(&root)?.to_owned(), text);
    }
    Ok(documents)
}

/// Returns the lines outside of code blocks.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_block = false;
    text.lines().enumerate().filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        in_block ^= fence;
        !in_block && !fence
    })
}

/// Returns the anchor that GitHub generates for a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|c| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || "-_".contains(c) => Some(c.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}

/// Normalizes a path: `docs/../README.md` becomes `README.md`.
fn plain_path(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

#[test]
fn the_readme_is_two_screens_long_before_its_figures() -> Result<()> {
    let text = std::fs::read_to_string(workspace().join("README.md"))?;
    let before = text.lines().position(|line| line == "## How fast");
    let lines = before.context("README.md has no heading \"How fast\"")?;
    ensure!(
        lines <= README_LINES_MAX,
        "README.md has {lines} lines before its figures, {README_LINES_MAX} are the most: move details to docs/getting-started.md"
    );
    Ok(())
}

#[test]
fn links_lead_to_headings_that_exist() -> Result<()> {
    let documents = documents()?;
    let anchors: BTreeMap<&Path, BTreeSet<String>> = documents
        .iter()
        .map(|(path, text)| {
            let headings = prose(text).filter(|(_, line)| line.starts_with('#'));
            let anchors = headings.map(|(_, line)| anchor(line.trim_start_matches('#')));
            (path.as_path(), anchors.collect())
        })
        .collect();
    let mut findings = Vec::new();
    for (path, text) in &documents {
        let beside = path.parent().unwrap_or(Path::new(""));
        let links = text.split("](").skip(1);
        let links = links.filter_map(|rest| rest.split_once(')'));
        for (link, _) in links {
            let Some((file, heading)) = link.split_once('#') else {
                continue;
            };
            if link.starts_with("http") {
                continue;
            }
            let target = match file {
                "" => path.clone(),
                file => plain_path(&beside.join(file)),
            };
            let exists = anchors
                .get(target.as_path())
                .is_some_and(|anchors| anchors.contains(heading));
            if !exists {
                findings.push(format!("{}: {link}", path.display()));
            }
        }
    }
    ensure!(
        findings.is_empty(),
        "links to headings that do not exist:\n  {}",
        findings.join("\n  ")
    );
    Ok(())
}

#[test]
fn index_of_the_documents_lists_every_page() -> Result<()> {
    let index = std::fs::read_to_string(workspace().join("docs/README.md"))?;
    let pages = documents()?.into_keys().filter(|path| {
        path.parent() == Some(Path::new("docs")) && path != Path::new("docs/README.md")
    });
    let missing: Vec<String> = pages
        .filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()))
        .filter(|name| !index.contains(&format!("]({name}")))
        .collect();
    ensure!(
        missing.is_empty(),
        "docs/README.md does not list {}: add each to the table of its readers",
        missing.join(", ")
    );
    Ok(())
}

#[test]
fn documents_use_the_words_of_the_field() -> Result<()> {
    let mut findings = Vec::new();
    for (path, text) in documents()? {
        for (number, line) in prose(&text) {
            let words = line.split(|c: char| !c.is_alphanumeric() && c != '-');
            let words: BTreeSet<String> = words.map(str::to_lowercase).collect();
            for (word, instead) in PRIVATE_WORDS {
                if words.contains(word) {
                    findings.push(format!(
                        "{}:{}: {word}: use {instead}",
                        path.display(),
                        number + 1
                    ));
                }
            }
        }
    }
    ensure!(
        findings.is_empty(),
        "private words:\n  {}",
        findings.join("\n  ")
    );
    Ok(())
}

/// Further private terms that may not appear in names in the code.
const PRIVATE_NAMES: [(&str, &str); 4] = [
    ("whom", "the address of the daemon"),
    ("glass", "a verb for its effect"),
    ("lookers", "a noun for them"),
    ("asking", "interrupt moderation"),
];

/// Returns the parts of a `snake_case` or `CamelCase` name in lower case.
fn parts_of(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    for letter in name.chars() {
        if letter == '_' || letter.is_uppercase() {
            parts.push(String::new());
        }
        if let (Some(part), true) = (parts.last_mut(), letter != '_') {
            part.extend(letter.to_lowercase());
        }
    }
    parts
}

/// Returns the names that a line of Rust defines: identifiers after `fn`, `struct` and similar keywords, and fields.
fn names_of(line: &str) -> Vec<&str> {
    let line = line.split("//").next().unwrap_or_default();
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let words: Vec<&str> = line.split(|c: char| !is_name(c)).collect();
    let keywords = [
        "fn", "struct", "enum", "trait", "mod", "const", "static", "type",
    ];
    let pairs = words.windows(2);
    let mut names: Vec<&str> = pairs
        .filter(|pair| keywords.contains(&pair[0]))
        .map(|pair| pair[1])
        .collect();
    let field = line.trim_start().trim_start_matches("pub ");
    if let Some((field, _)) = field.split_once(':')
        && field.chars().all(is_name)
    {
        names.push(field);
    }
    names
}

#[test]
fn names_in_code_use_the_words_of_the_field() -> Result<()> {
    let root = workspace();
    let mut folders = vec![root.join("crates"), root.join("tests"), root.join("fuzz")];
    let mut findings = Vec::new();
    let mut checked = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "target") {
                    folders.push(path);
                }
                continue;
            }
            let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) else {
                continue;
            };
            if path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let text = std::fs::read_to_string(&path)?;
            let shown = path.strip_prefix(&root)?.display();
            for name in text.lines().flat_map(names_of).chain([stem]) {
                checked += 1;
                let parts = parts_of(name);
                let private = PRIVATE_WORDS.iter().chain(&PRIVATE_NAMES);
                for (word, instead) in private {
                    if parts.iter().any(|part| part == word) {
                        findings.push(format!("{shown}: {name}: use {instead}"));
                    }
                }
            }
        }
    }
    ensure!(checked > 10_000, "only {checked} names were found");
    ensure!(
        findings.is_empty(),
        "private words in names:\n  {}",
        findings.join("\n  ")
    );
    Ok(())
}

/// Words that do not name anything, as types, fields, variables or placeholders of messages.
const EMPTY_NAMES: [&str; 12] = [
    "Around",
    "Else",
    "How",
    "Kept",
    "Made",
    "Place",
    "Told",
    "going_on",
    "kept_memory",
    "said",
    "stood",
    "told",
];

/// Placeholders whose name does not state their content.
const EMPTY_PLACEHOLDERS: [&str; 5] = ["what", "who", "whose", "said", "told"];

#[test]
fn names_and_placeholders_are_nouns_of_their_content() -> Result<()> {
    let root = workspace();
    let mut folders = vec![root.join("crates"), root.join("tests")];
    let mut findings = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let name = name.unwrap_or_default();
            if path.is_dir() {
                if name != "target" {
                    folders.push(path);
                }
                continue;
            }
            if !name.ends_with(".rs") || matches!(name, "documents.rs" | "prose.rs") {
                continue;
            }
            let text = std::fs::read_to_string(&path)?;
            let shown = path.strip_prefix(&root)?.display();
            for line in text.lines() {
                let code = line.split("//").next().unwrap_or_default();
                // Every second piece is inside of a string literal.
                let code: String = code.split('"').step_by(2).collect::<Vec<_>>().join(" ");
                let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
                let words = words.filter(|word| EMPTY_NAMES.contains(word));
                findings.extend(words.map(|word| format!("{shown}: {word}")));
                for placeholder in EMPTY_PLACEHOLDERS {
                    let (plain, formatted) =
                        (format!("{{{placeholder}}}"), format!("{{{placeholder}:"));
                    if line.contains(&plain) || line.contains(&formatted) {
                        findings.push(format!("{shown}: {plain}"));
                    }
                }
            }
        }
    }
    ensure!(
        findings.is_empty(),
        "use a noun for the content:\n  {}",
        findings.join("\n  ")
    );
    Ok(())
}

/// Crates on the path of a request.
const REQUEST_PATH: [&str; 15] = [
    "bdev",
    "iscsi",
    "iscsi_initiator",
    "iscsi_target",
    "nbd_server",
    "reactor",
    "request_engine",
    "scsi",
    "scsi_exec",
    "uring",
    "vhost_user",
    "virtio_blk",
    "virtio_device",
    "virtio_scsi",
    "virtqueue",
];
/// Maximum number of fields of a structure on the path of a request.
const FIELDS_MAX: usize = 15;
/// Maximum number of booleans of a slot. More of them describe a state, which is an enum.
const SLOT_BOOLEANS_MAX: usize = 2;

#[test]
fn structures_of_the_request_path_have_few_fields() -> Result<()> {
    let mut long = Vec::new();
    for name in REQUEST_PATH {
        let listing = std::process::Command::new("find")
            .args([format!("crates/{name}/src").as_str(), "-name", "*.rs"])
            .current_dir(workspace())
            .output()?;
        for path in String::from_utf8(listing.stdout)?.lines() {
            let text = std::fs::read_to_string(workspace().join(path))?;
            let definitions = text.split("struct ").skip(1);
            for (head, body) in definitions.filter_map(|part| part.split_once(" {\n")) {
                let body = body.lines().map(str::trim).take_while(|line| *line != "}");
                let is_field = |line: &&str| line.ends_with(',') && line.contains(": ");
                let fields: Vec<&str> = body
                    .filter(|line| !line.starts_with("//"))
                    .filter(is_field)
                    .collect();
                let is_boolean = |line: &&&str| line.ends_with(": bool,");
                let booleans = fields.iter().filter(is_boolean).count();
                if head.contains('\n') {
                    continue;
                }
                if fields.len() > FIELDS_MAX {
                    long.push(format!("{path}: {head} has {} fields", fields.len()));
                }
                if head.ends_with("Slot") && booleans > SLOT_BOOLEANS_MAX {
                    long.push(format!("{path}: {head} has {booleans} booleans"));
                }
            }
        }
    }
    ensure!(long.is_empty(), "split by job: {}", long.join(", "));
    Ok(())
}

/// A row of docs/choosing.md ends with `FILE`: `TEST`, `TEST`; `FILE`: ...
#[test]
fn every_claim_about_the_transports_names_a_test() -> Result<()> {
    let page = std::fs::read_to_string(workspace().join("docs/choosing.md"))?;
    let mut named = 0;
    for row in page.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [label, .., shown] = cells[..] else {
            bail!("docs/choosing.md: a row without cells: {row}");
        };
        if label.is_empty() || label.starts_with("---") {
            continue;
        }
        ensure!(
            shown.contains('`'),
            "docs/choosing.md: `{label}` names no test"
        );
        for of_one_file in shown.split("; ") {
            let words: Vec<&str> = of_one_file.split('`').skip(1).step_by(2).collect();
            let [file, tests @ ..] = &words[..] else {
                bail!("docs/choosing.md: `{label}`: no file in {of_one_file:?}");
            };
            let text = workspace().join(format!("tests/tests/{file}.rs"));
            let text =
                std::fs::read_to_string(&text).with_context(|| text.display().to_string())?;
            ensure!(
                !tests.is_empty(),
                "docs/choosing.md: `{label}`: no test of {file}"
            );
            for test in tests {
                ensure!(
                    text.contains(&format!("fn {test}(")),
                    "docs/choosing.md: `{label}`: tests/tests/{file}.rs has no test {test}"
                );
                named += 1;
            }
        }
    }
    ensure!(named > 20, "only {named} tests are named");
    Ok(())
}

#[test]
fn contributing_answers_ten_questions_with_files() -> Result<()> {
    let text = std::fs::read_to_string(workspace().join("CONTRIBUTING.md"))?;
    let (_, questions) = text
        .split_once("\n## Ten questions\n")
        .context("CONTRIBUTING.md has no heading \"Ten questions\"")?;
    let table = questions.lines().skip_while(|line| !line.starts_with('|'));
    let rows: Vec<&str> = table
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .collect();
    ensure!(rows.len() == 10, "{} questions", rows.len());
    for row in rows {
        // tests/tests/tidy.rs checks that the files exist.
        ensure!(
            row.contains("`crates/")
                && (row.contains("ARCHITECTURE.md#") || row.contains("SECURITY.md#")),
            "no file, or no way to it: {row}"
        );
    }
    Ok(())
}

/// Each promise in SECURITY.md names tests or is marked as not tested.
#[test]
fn every_promise_about_security_names_a_test() -> Result<()> {
    let page = std::fs::read_to_string(workspace().join("SECURITY.md"))?;
    let table = page.split("## Promises").nth(1).context("no promises")?;
    let table = table.split("\n## ").next().unwrap_or_default();
    let output = std::process::Command::new("git")
        .args(["grep", "-hE", r"^\s*(async )?fn [a-z0-9_]+\(", "--", "*.rs"])
        .current_dir(workspace())
        .output()
        .context("git grep")?;
    let code = String::from_utf8(output.stdout)?;
    let mut named = 0;
    for row in table.lines().filter(|line| line.starts_with("| ")).skip(1) {
        let cells = row.trim_matches('|').rsplit_once('|');
        let (promise, tests) = cells.with_context(|| format!("a row without cells: {row}"))?;
        let names: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        ensure!(
            !names.is_empty() || tests.trim().starts_with("not tested"),
            "SECURITY.md: `{promise}` names no test"
        );
        for name in names {
            ensure!(
                code.contains(&format!("fn {name}(")),
                "SECURITY.md: there is no test {name}"
            );
            named += 1;
        }
    }
    ensure!(named > 40, "only {named} tests are named");
    Ok(())
}

#[test]
fn marked_phrases_are_found_in_prose_only() {
    let text = "//! Whoever asks.\nfn a() {\n    // Uses `what` and {x}.\n    \
                let b = format!(\"cannot open {what}: nobody\\n goes on\", 'x', '\\'');\n    \
                let c = r#\"So many words\"#;\n    let d = \"/what/ever it is\";\n}\n";
    let found: Vec<(Kind, usize, Vec<&str>)> = pieces("a.rs", text)
        .into_iter()
        .map(|(kind, line, prose)| {
            let phrases = marks(&prose).into_iter().map(|(phrase, _)| phrase);
            (kind, line, phrases.collect())
        })
        .collect();
    assert_eq!(
        found,
        [
            (Kind::Comment, 1, vec!["whoever"]),
            (Kind::Comment, 3, vec![]),
            (Kind::Message, 4, vec!["nobody", "goes on"]),
            (Kind::Message, 5, vec!["so many", "so"]),
        ]
    );
    let text = "Of a disk. `what`\n```\nwhat\n```\nSee [it](who).";
    let found: Vec<(usize, usize)> = pieces("a.md", text)
        .into_iter()
        .map(|(_, line, prose)| (line, marks(&prose).len()))
        .collect();
    assert_eq!(found, [(1, 1), (5, 0)]);
}

/// Each alert fires for its problem, and none fires for a daemon without problems.
#[test]
fn alerts_fire_for_their_problems() -> Result<()> {
    let output = Command::new("promtool")
        .args(["test", "rules", "lunette.rules.test.yml"])
        .current_dir(workspace().join("contrib/prometheus"))
        .output()
        .context("cannot run promtool; hint: apt-get install prometheus")?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{text}");
    let file =
        |name: &str| std::fs::read_to_string(workspace().join("contrib/prometheus").join(name));
    let tested = file("lunette.rules.test.yml")?;
    for line in file("lunette.rules.yml")?.lines() {
        if let Some(alert) = line.trim().strip_prefix("- alert: ") {
            let name = format!("alertname=\"{alert}\"");
            ensure!(tested.contains(&name), "{alert} has no test");
        }
    }
    Ok(())
}
