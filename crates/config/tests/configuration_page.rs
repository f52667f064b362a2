//! Compares `docs/configuration.md` with the parser: keys of each table, ranges and words of their values, and defaults. A key in only one
//! of them fails here. Rows are generated from the declarations of keys: `LUNETTE_WRITE_DOCS=1 cargo test --workspace --exclude
//! lunette-fuzz --test configuration_page` writes them.

use std::collections::{BTreeMap, BTreeSet};

use config::{
    ACL_KEYS, Config, DAEMON_KEYS, Diagnostics, Flags, ISCSI_KEYS, ISCSI_LIMIT_KEYS, Key,
    LOGIN_KEYS, LUN_KEYS, NBD_KEYS, Surroundings, TARGET_KEYS, TARGET_LUN_KEYS, VHOST_BLK_KEYS,
    VHOST_SCSI_KEYS, disk_keys, parse,
};

const DISK: &str = "[[disk]]\nname = \"d0\"\nbackend = \"ram\"\nsize = \"1M\"\n";
const FILE: &str =
    "[[disk]]\nname = \"d0\"\nbackend = \"file\"\npath = \"d0.raw\"\nsize = \"1M\"\n";
const IMAGE: &str = "[[disk]]\nname = \"d0\"\nbackend = \"image\"\npath = \"d0.qcow2\"\n";
const RBD: &str = "[[disk]]\nname = \"d0\"\nbackend = \"rbd\"\nimage = \"rbd/vm\"\n";
const REMOTE: &str = "[[disk]]\nname = \"d0\"\nbackend = \"iscsi\"\nunit = \"iscsi://h/iqn.2026-11.org.example:t0/0\"\n";
const EXPORT: &str = "[[disk]]\nname = \"d0\"\nbackend = \"nbd\"\nuri = \"nbd://h/d0\"\n";
const SCSI_DEVICE: &str =
    "[[disk]]\nname = \"d0\"\nbackend = \"scsi_generic\"\npath = \"/dev/sg0\"\n";
const DELAY: &str = "[[disk]]\nname = \"d0\"\nbackend = \"delay\"\ntime = \"1ms\"\nsize = \"1M\"\n";
const BLK: &str = "[[vhost_blk]]\ndisk = \"d0\"\nsocket = \"/run/d0.sock\"\n";
const SCSI: &str = "[[vhost_scsi]]\nname = \"c0\"\nsocket = \"/run/c0.sock\"\n";
const NBD: &str = "[[nbd]]\ndisk = \"d0\"\nsocket = \"/run/nbd.sock\"\n";
const ISCSI: &str = "[[iscsi]]\nname = \"iqn.2026-11.org.example:t0\"\nportals = [\"127.0.0.1\"]\n";

/// A table of the page.
struct Section {
    /// Heading or line above the table.
    heading: &'static str,
    /// Text before the table's keys in a file.
    before: String,
    /// Keys of the table in the smallest valid file.
    smallest: &'static str,
    /// Name of the object, if another table has its other keys.
    is_part_of: Option<&'static str>,
}

fn sections() -> Vec<Section> {
    let section = |heading, before: &[&str], smallest, is_part_of| Section {
        heading,
        before: before.concat(),
        smallest,
        is_part_of,
    };
    vec![
        section("## The daemon", &[], "", None),
        section("## Disks", &[], DISK, Some("disk")),
        section("### Files and block devices", &[], FILE, Some("disk")),
        section("### Images", &[], IMAGE, Some("disk")),
        section("### Ceph RBD images", &[], RBD, Some("disk")),
        section(
            "### Logical units of iSCSI targets",
            &[],
            REMOTE,
            Some("disk"),
        ),
        section("### Exports of NBD servers", &[], EXPORT, Some("disk")),
        section(
            "### SCSI devices of this machine",
            &[],
            SCSI_DEVICE,
            Some("disk"),
        ),
        section("### RAM disks", &[], DISK, Some("disk")),
        section("### Delays", &[], DELAY, Some("disk")),
        section("## virtio-blk exports", &[DISK], BLK, None),
        section("## virtio-scsi exports", &[DISK], SCSI, None),
        section(
            "Each `lun` has",
            &[DISK, SCSI],
            "[[vhost_scsi.lun]]\ntarget = 0\nlun = 0\ndisk = \"d0\"\n",
            None,
        ),
        section("## NBD exports", &[DISK], NBD, None),
        section("## iSCSI targets", &[DISK], ISCSI, Some("iscsi")),
        section(
            "Each `lun` of a target has",
            &[DISK, ISCSI],
            "[[iscsi.lun]]\nlun = 0\ndisk = \"d0\"\n",
            None,
        ),
        section(
            "Each entry of `acl` has",
            &[DISK, ISCSI],
            "[[iscsi.acl]]\n",
            None,
        ),
        section("### Logins", &[DISK], ISCSI, Some("iscsi")),
        section(
            "## Limits of iSCSI initiators",
            &[],
            "[iscsi_limits]\n",
            None,
        ),
    ]
}

/// A row of the page: key, value, default.
struct Row {
    key: String,
    value: String,
    default: String,
}

impl Row {
    /// Returns the range of a number or size.
    fn range(&self) -> Option<(u64, u64)> {
        let words: Vec<&str> = self.value.split([' ', ',']).collect();
        words.windows(3).find_map(|three| match three {
            [from, "to", to] => Some((from.parse().ok()?, to.parse().ok()?)),
            _ => None,
        })
    }

    /// Returns the default in the syntax of a file, if it is a single value.
    fn default_literal(&self) -> Option<String> {
        let default = self.default.trim_matches('`');
        let is_value = self.default.starts_with('`') && !default.contains('`');
        is_value.then(|| match default {
            "true" | "false" => default.to_owned(),
            quoted if quoted.starts_with('"') => quoted.to_owned(),
            word => literal(word),
        })
    }

    /// Returns the words of a choice in the syntax of a file.
    fn words(&self) -> Vec<String> {
        let words = self.value.split('`').skip(1).step_by(2);
        words.map(literal).collect()
    }
}

/// Returns a number unchanged, and another word in quotes.
fn literal(word: &str) -> String {
    match word.parse::<u64>() {
        Ok(_) => word.to_owned(),
        Err(_) => format!("{word:?}"),
    }
}

fn rows(page: &str, heading: &str) -> Vec<Row> {
    let below = page
        .split_once(&format!("\n{heading}\n"))
        .map(|(_, rest)| rest);
    let below = below.unwrap_or_else(|| panic!("docs/configuration.md has no line {heading:?}"));
    let table = below.lines().skip_while(|line| !line.starts_with('|'));
    let rows = table.skip(2).take_while(|line| line.starts_with('|'));
    let cell = |line: &str, index: usize| {
        let cell = line.split('|').nth(index).unwrap_or_default();
        cell.trim().to_owned()
    };
    rows.map(|line| Row {
        key: cell(line, 1).trim_matches('`').to_owned(),
        value: cell(line, 2),
        default: cell(line, 3),
    })
    .collect()
}

fn read(text: &str) -> Result<Config, Diagnostics> {
    let surroundings = Surroundings {
        cpus: (0..256).collect(),
        files_are_here: false,
        sandbox: sandbox::Mode::Threads,
        sandbox_paths: Vec::new(),
    };
    parse(Some(("page.toml", text)), &Flags::default(), &surroundings)
}

/// Returns the keys that the parser lists for an unknown key.
fn keys_of_the_parser(section: &Section) -> BTreeSet<String> {
    // A disk without a kind has the keys of all kinds.
    let keys = match section.is_part_of {
        Some("disk") => "[[disk]]\n",
        _ => section.smallest,
    };
    let text = format!("{}{keys}no_such_key = 1\n", section.before);
    let mistakes = read(&text)
        .expect_err("a key that does not exist")
        .to_string();
    let (_, after) = mistakes
        .split_once("no key `no_such_key`")
        .unwrap_or_else(|| panic!("{mistakes}"));
    let allowed = after
        .lines()
        .find(|line| line.trim_start().starts_with("allowed:"));
    let words = allowed.expect("the allowed values").split('`');
    words.skip(1).step_by(2).map(str::to_owned).collect()
}

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");

fn page() -> String {
    std::fs::read_to_string(PAGE).expect("the page")
}

/// Replaces the rows of the table below `heading`.
fn with_rows(page: &str, heading: &str, rows: &[String]) -> String {
    let start = page.find(&format!("\n{heading}\n")).expect("the heading");
    let rule = "|---|---|---|---|---|\n";
    let start = start + page[start..].find(rule).expect("a table") + rule.len();
    let old = page[start..].split_inclusive('\n');
    let length: usize = old
        .take_while(|line| line.starts_with('|'))
        .map(str::len)
        .sum();
    format!(
        "{}{}\n{}",
        &page[..start],
        rows.join("\n"),
        &page[start + length..]
    )
}

fn rows_of<D, T>(keys: &'static [Key<D, T>]) -> Vec<String> {
    keys.iter().map(Key::row).collect()
}

#[test]
fn rows_of_the_page_match_the_declared_keys() {
    let mut expected = page();
    for (heading, device) in [
        ("## Disks", None),
        ("### Files and block devices", Some("file")),
        ("### Images", Some("image")),
        ("### Ceph RBD images", Some("rbd")),
        ("### Logical units of iSCSI targets", Some("iscsi")),
        ("### Exports of NBD servers", Some("nbd")),
        ("### SCSI devices of this machine", Some("scsi_generic")),
        ("### RAM disks", Some("ram")),
        ("### Delays", Some("delay")),
    ] {
        let keys = disk_keys().filter(|key| match device {
            None => key.of.is_empty(),
            Some(device) => key.of.contains(&device),
        });
        let rows: Vec<String> = keys.map(|key| key.row()).collect();
        expected = with_rows(&expected, heading, &rows);
    }
    let daemon: Vec<String> = DAEMON_KEYS.iter().map(|key| key.row()).collect();
    for (heading, rows) in [
        ("## The daemon", daemon),
        ("## virtio-blk exports", rows_of(VHOST_BLK_KEYS)),
        ("## virtio-scsi exports", rows_of(VHOST_SCSI_KEYS)),
        ("Each `lun` has", rows_of(LUN_KEYS)),
        ("## NBD exports", rows_of(NBD_KEYS)),
        ("## iSCSI targets", rows_of(ISCSI_KEYS)),
        ("Each `lun` of a target has", rows_of(TARGET_LUN_KEYS)),
        ("Each entry of `acl` has", rows_of(ACL_KEYS)),
        (
            "### Logins",
            [rows_of(LOGIN_KEYS), rows_of(TARGET_KEYS)].concat(),
        ),
        ("## Limits of iSCSI initiators", rows_of(ISCSI_LIMIT_KEYS)),
    ] {
        expected = with_rows(&expected, heading, &rows);
    }
    if std::env::var_os("LUNETTE_WRITE_DOCS").is_some() {
        std::fs::write(PAGE, &expected).expect("the page can be written");
    }
    for (line, expected) in page().lines().zip(expected.lines()) {
        assert_eq!(
            line, expected,
            "hint: LUNETTE_WRITE_DOCS=1 cargo test --workspace --exclude lunette-fuzz --test configuration_page"
        );
    }
    assert_eq!(page(), expected);
}

#[test]
fn the_page_has_exactly_the_keys_of_the_parser() {
    let page = page();
    let mut objects: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for section in sections() {
        let keys: BTreeSet<String> = rows(&page, section.heading)
            .into_iter()
            .map(|row| row.key)
            .collect();
        match section.is_part_of {
            Some(object) => objects.entry(object).or_default().extend(keys),
            None => assert_eq!(keys, keys_of_the_parser(&section), "{}", section.heading),
        }
    }
    for section in sections() {
        if let Some(keys) = section.is_part_of.and_then(|object| objects.remove(object)) {
            assert_eq!(keys, keys_of_the_parser(&section), "{}", section.heading);
        }
    }
}

/// Returns the other keys that a key needs.
fn needed(section: &Section, key: &str) -> &'static str {
    match key {
        "iops_burst" => "iops = 1000\n",
        "bandwidth_burst" => "bandwidth = 1000000\n",
        "pr" if section.smallest.contains("iscsi://") => "passthrough = true\n",
        _ => "",
    }
}

/// Returns the section's smallest file with `key` set to `value`.
fn with(section: &Section, key: &str, value: &str) -> String {
    let replaced = format!("{key} = ");
    let keys = section
        .smallest
        .lines()
        .filter(|line| !line.starts_with(&replaced));
    let needed = needed(section, key);
    let keys: Vec<&str> = keys.collect();
    format!(
        "{}{}\n{needed}{key} = {value}\n",
        section.before,
        keys.join("\n")
    )
}

#[test]
fn ranges_words_and_defaults_of_the_page_are_those_of_the_parser() {
    let page = page();
    let mut checked = 0;
    for section in sections() {
        for row in rows(&page, section.heading) {
            let try_value = |value: &str| read(&with(&section, &row.key, value));
            let name = format!("{} `{}`", section.heading, row.key);
            let accepts = |value: &str| {
                if let Err(error) = try_value(value) {
                    panic!("{name}: {value} is on the page and refused: {error}");
                }
            };
            let refuses = |value: &str| {
                assert!(
                    try_value(value).is_err(),
                    "{name}: {value} is not on the page and accepted"
                );
            };
            let is_choice = row.value.starts_with("word");
            if let Some((least, most)) = row.range() {
                accepts(&least.to_string());
                accepts(&most.to_string());
                refuses(&(most + 1).to_string());
                if least > 0 {
                    refuses(&(least - 1).to_string());
                }
                checked += 1;
            }
            // The kind of a disk determines its other keys; the test of the keys covers all kinds.
            if is_choice && row.key != "backend" {
                row.words().iter().for_each(|word| accepts(word));
                refuses("\"neither\"");
                checked += 1;
            }
            if row.value.starts_with("boolean") {
                accepts("true");
                accepts("false");
                refuses("1");
                checked += 1;
            }
            if row.value.starts_with("string:") && !row.value.contains("list") {
                refuses("true");
            }
            if row.value.starts_with("integer") {
                refuses("\"x\"");
            }
            if row.value.starts_with("size") {
                accepts(
                    "\"1M\""
                        .replace(
                            "1M",
                            if row.range().is_some_and(|(_, most)| most < 1 << 20) {
                                "4K"
                            } else {
                                "1M"
                            },
                        )
                        .as_str(),
                );
                refuses("\"1 MB\"");
            }
            if let Some(value) = row.default_literal() {
                let without = needed(&section, &row.key);
                let without = read(&format!(
                    "{}{}\n{without}",
                    section.before, section.smallest
                ));
                match try_value(&value) {
                    Ok(config) => {
                        assert!(Ok(config) == without, "{name}: {value} is not the default")
                    }
                    Err(error) => panic!("{name}: the default {value} is refused: {error}"),
                }
                checked += 1;
            }
        }
    }
    assert!(checked > 50, "{checked} rows were checked");
}
