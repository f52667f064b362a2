//! Pages of `lunette help`, the keys of one kind of object, and the man page lunette.toml(5), generated from the keys' declarations.

use super::access_list::ACL_KEYS;
use super::daemon_keys::{DAEMON_KEYS, DaemonKey};
use super::diagnostics::nearest;
use super::disk::disk_keys;
use super::export_keys::ExportKind;
use super::export_kinds::EXPORT_KINDS;
use super::iscsi_limits::ISCSI_LIMIT_KEYS;
use super::key::{Key, KeyLine};
use super::lun::{LUN_KEYS, TARGET_LUN_KEYS};
use super::model::Transport;

/// Least width of the column of keys.
const KEY_WIDTH_MIN: usize = 12;

/// A kind of object with a page of its keys.
pub struct HelpTopic {
    /// Name in `lunette help NAME`.
    pub name: &'static str,
    /// First line of the page.
    title: String,
    /// Syntax in flags.
    flag: String,
    /// Place in a configuration file.
    file: String,
    sections: Vec<Section>,
}

fn topic(
    name: &'static str,
    title: &str,
    flag: &str,
    file: &str,
    sections: Vec<Section>,
) -> HelpTopic {
    let [title, flag, file] = [title, flag, file].map(str::to_owned);
    HelpTopic {
        name,
        title,
        flag,
        file,
        sections,
    }
}

/// Returns the page of a kind of exports.
fn export_topic(kind: &ExportKind) -> HelpTopic {
    let title = format!("Keys of {}", kind.keys[0].0);
    let flag = format!("--{} {}", kind.word, kind.form);
    let file = format!("[[{}]]", kind.table);
    topic(kind.word, &title, &flag, &file, export_sections(kind))
}

struct Section {
    heading: String,
    lines: Vec<KeyLine>,
}

fn section<D, T>(heading: &str, keys: &[Key<D, T>]) -> Section {
    Section {
        heading: heading.to_owned(),
        lines: keys.iter().map(Key::help_line).collect(),
    }
}

/// Returns the keys of disks, grouped by the back ends that have them.
fn disk_sections() -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for key in disk_keys() {
        let heading = match key.of {
            [] => "Every disk".to_owned(),
            of => format!("Back ends {}", of.join(", ")),
        };
        match sections.iter_mut().find(|known| known.heading == heading) {
            Some(known) => known.lines.push(key.help_line()),
            None => sections.push(section(&heading, std::slice::from_ref(key))),
        }
    }
    sections
}

fn export_sections(kind: &ExportKind) -> Vec<Section> {
    let keys = kind.keys.iter();
    let mut sections: Vec<_> = keys.map(|(heading, keys)| section(heading, keys)).collect();
    match kind.transport {
        Transport::VhostScsi => {
            sections.push(section("Each lun of a virtio-scsi export", LUN_KEYS));
        }
        Transport::Iscsi => {
            sections.push(section("Each lun of an iSCSI target", TARGET_LUN_KEYS));
            sections.push(section("Each entry of acl", ACL_KEYS));
        }
        Transport::VhostBlk | Transport::Nbd => {}
    }
    sections
}

/// Returns all topics.
fn topics() -> Vec<HelpTopic> {
    let mut topics: Vec<HelpTopic> = EXPORT_KINDS.map(export_topic).into();
    topics.extend([
        topic(
            "disk",
            "Keys of disks",
            "--disk NAME=BACKEND:SIZE|PATH|IMAGE|ADDRESS,KEY=VALUE,...",
            "[[disk]]",
            disk_sections(),
        ),
        topic(
            "export",
            "Keys of exports, by kind: vhost-blk, vhost-scsi, iscsi, nbd",
            "each kind has its own page, which shows the flag: lunette help vhost-blk",
            "[[vhost_blk]], [[vhost_scsi]], [[iscsi]] or [[nbd]]",
            EXPORT_KINDS.into_iter().flat_map(export_sections).collect(),
        ),
        topic(
            "lun",
            "Keys of logical units",
            "--lun CONTROLLER/TARGET:LUN=DISK",
            "[[vhost_scsi.lun]] or [[iscsi.lun]]",
            vec![
                section("On a virtio-scsi export", LUN_KEYS),
                section("On an iSCSI target", TARGET_LUN_KEYS),
            ],
        ),
        topic(
            "acl",
            "Keys of the access list of an iSCSI target",
            "none",
            "[[iscsi.acl]]",
            vec![section("Each entry of acl", ACL_KEYS)],
        ),
        topic(
            "iscsi-limits",
            "Limits of iSCSI initiators",
            "--iscsi-limits KEY=VALUE,...",
            "[iscsi_limits]",
            vec![section("Limits of all targets together", ISCSI_LIMIT_KEYS)],
        ),
        topic(
            "daemon",
            "Keys of the daemon",
            "the flag at the end of the line, if there is one",
            "top of the file",
            vec![Section {
                heading: "The daemon".to_owned(),
                lines: DAEMON_KEYS.iter().map(DaemonKey::help_line).collect(),
            }],
        ),
    ]);
    topics
}

impl HelpTopic {
    /// Finds a topic by name; `-` and `_` are equivalent.
    pub fn find(name: &str) -> Option<HelpTopic> {
        let name = name.replace('_', "-");
        topics().into_iter().find(|topic| topic.name == name)
    }

    /// Returns the closest name among the topics and `others`, for a name that is neither.
    pub fn nearest<'a>(name: &str, others: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
        let topics = topics().into_iter().map(|topic| topic.name);
        nearest(name, topics.chain(others))
    }

    /// Returns the page in lines of at most `width` columns: for each key its values and its default, and below its meaning.
    pub fn page(&self, width: usize) -> String {
        let lines = || self.sections.iter().flat_map(|section| &section.lines);
        let keys = lines().map(|line| line[0].chars().count());
        let indent = keys.max().unwrap_or(0).max(KEY_WIDTH_MIN) + 4;
        let mut page = format!("{}\n\n", self.title);
        let file = format!("{}, one line KEY = VALUE for each key", self.file);
        for (place, syntax) in [("  Flag:  ", &self.flag), ("  File:  ", &file)] {
            push_wrapped(&mut page, place, syntax, 9, width);
        }
        for section in &self.sections {
            page.push_str(&format!("\n{}:\n", section.heading));
            for [key, value, default, meaning] in &section.lines {
                let default = match default.as_str() {
                    "required" => "required".to_owned(),
                    default => format!("default: {default}"),
                };
                let first = format!("  {key:<0$}  ", indent - 4);
                push_wrapped(
                    &mut page,
                    &first,
                    &format!("{value} ({default})"),
                    indent,
                    width,
                );
                let below = " ".repeat(indent);
                push_wrapped(&mut page, &below, meaning, indent, width);
            }
        }
        page
    }
}

/// Topics of lunette.toml(5), in the order of a file. The pages of exports include those of logical units and access lists.
const FILE_TOPICS: [&str; 7] = [
    "daemon",
    "iscsi-limits",
    "disk",
    "vhost-blk",
    "vhost-scsi",
    "iscsi",
    "nbd",
];

/// Parts of lunette.toml(5) before and after the keys.
const MAN_HEAD: &str = "\
.SH NAME
lunette.toml \\- configuration of the Lunette storage daemon
.SH SYNOPSIS
/etc/lunette/lunette.toml
.SH DESCRIPTION
The file in TOML lists disks and their exports. lunette.service reads /etc/lunette/lunette.toml, and each command with the option
\\-\\-config reads the named file. Flags of lunette\\-serve(1) override single values.
.PP
Sizes are bytes, or text with K, M, G, T, P or E, which are powers of 1024. Names have 1 to 64 letters, digits, '.', '_' and '\\-'.
Relative paths are relative to the folder in which the daemon is started.
.PP
lunette check \\-\\-config FILE reports all mistakes without starting anything. lunette\\-reload(1) applies a changed file.
.SH EXAMPLE
.nf
[[disk]]
name = \"d0\"
backend = \"file\"
path = \"/var/lib/lunette/d0.raw\"
size = \"10G\"

[[vhost_blk]]
disk = \"d0\"
socket = \"/run/lunette/d0.sock\"
.fi
";
const MAN_TAIL: &str = "\
.SH FILES
/usr/share/doc/lunette/examples/lunette.toml: an example with every key
.SH \"SEE ALSO\"
lunette\\-serve(1), lunette\\-check(1), lunette\\-help(1)
";

/// Returns the man page lunette.toml(5): all keys of a configuration file.
pub fn man_page() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut page = format!(".TH lunette.toml 5 \"\" \"Lunette {version}\" \"Lunette\"\n{MAN_HEAD}");
    for topic in FILE_TOPICS.iter().filter_map(|name| HelpTopic::find(name)) {
        page.push_str(&format!(".SH \"{}\"\n", topic.title.to_uppercase()));
        page.push_str(&format!("Place: {}\n", roff(&topic.file)));
        for section in &topic.sections {
            page.push_str(&format!(".SS \"{}\"\n", roff(&section.heading)));
            for [key, value, default, meaning] in &section.lines {
                let default = match default.as_str() {
                    "required" => "required".to_owned(),
                    default => format!("default: {default}"),
                };
                let [key, value, default, meaning] =
                    [key, value, &default, meaning].map(|text| roff(text));
                page.push_str(&format!(
                    ".TP\n\\fB{key}\\fR: {value} ({default})\n{meaning}\n"
                ));
            }
        }
    }
    page + MAN_TAIL
}

/// Returns a text without meaning to roff.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    match text.starts_with(['.', '\'']) {
        true => format!("\\&{text}"),
        false => text,
    }
}

/// Appends `first` and the words of a text in lines of at most `width` columns. Lines after the first one are indented.
fn push_wrapped(page: &mut String, first: &str, text: &str, indent: usize, width: usize) {
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        let columns = line.chars().count() + usize::from(!is_empty) + word.chars().count();
        if !is_empty && columns > width {
            page.push_str(line.trim_end());
            page.push('\n');
            line = " ".repeat(indent);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    page.push_str(line.trim_end());
    page.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ISCSI_KEYS, LOGIN_KEYS, TARGET_KEYS, VHOST_BLK_KEYS, VHOST_SCSI_KEYS};

    fn page_of(topic: &str) -> String {
        HelpTopic::find(topic).expect("a topic").page(100)
    }

    fn has_lines<D: 'static, T: 'static>(
        topic: &str,
        keys: impl IntoIterator<Item = &'static Key<D, T>>,
    ) {
        let page = page_of(topic);
        let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
        for key in keys {
            let [name, value, _, meaning] = key.help_line();
            assert!(page.contains(&format!("\n  {name} ")), "{topic}, {name}");
            for text in [format!("{name} {value} ("), meaning] {
                let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
                assert!(words.contains(&text), "{topic}, {name}: {text}");
            }
        }
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for topic in topics() {
            for width in [80, 100, 132] {
                for line in topic.page(width).lines() {
                    assert!(line.chars().count() <= width, "{}: {line}", topic.name);
                }
            }
        }
    }

    #[test]
    fn each_page_has_a_line_for_every_declared_key() {
        has_lines("disk", disk_keys());
        for topic in ["vhost-blk", "export"] {
            has_lines(topic, VHOST_BLK_KEYS);
        }
        for topic in ["vhost-scsi", "export"] {
            has_lines(topic, VHOST_SCSI_KEYS);
            has_lines(topic, LUN_KEYS);
        }
        for topic in ["iscsi", "export"] {
            has_lines(topic, ISCSI_KEYS);
            has_lines(topic, LOGIN_KEYS);
            has_lines(topic, TARGET_KEYS);
            has_lines(topic, TARGET_LUN_KEYS);
            has_lines(topic, ACL_KEYS);
        }
        has_lines("lun", LUN_KEYS);
        has_lines("lun", TARGET_LUN_KEYS);
        has_lines("acl", ACL_KEYS);
        has_lines("iscsi-limits", ISCSI_LIMIT_KEYS);
        let page = page_of("daemon");
        for key in DAEMON_KEYS {
            let name = format!("\n  {} ", key.key.name);
            assert_eq!(page.matches(&name).count(), 1, "{}", key.key.name);
        }
    }

    #[test]
    fn man_page_has_every_key_of_a_file_once_per_object() {
        let page = man_page();
        for line in include_str!("../../../tests/compat/0.9/keys.txt").lines() {
            // Lines have the form `OBJECTS, KEY: PROPERTY ...`.
            let (_, key) = line.split_once(", ").expect("a key");
            let (key, _) = key.split_once(':').expect("properties");
            assert!(page.contains(&format!("\n\\fB{key}\\fR: ")), "{key}");
        }
        assert!(page.contains("\n.SH \"KEYS OF DISKS\"\nPlace: [[disk]]\n"));
        assert!(page.contains(" (required)\n") && page.contains("(default: none)"));
        assert_eq!(roff(".a \\ b-c"), "\\&.a \\e b\\-c");
    }

    #[test]
    fn line_has_values_default_and_meaning() {
        // No line of values is wider.
        let page = HelpTopic::find("disk").expect("a topic").page(200);
        let line = |name: &str| {
            let found = page
                .lines()
                .find(|line| line.trim_start().starts_with(name));
            found
                .unwrap_or_else(|| panic!("no line of {name}"))
                .to_owned()
        };
        let backend = line("backend ");
        assert!(backend.contains("ram") && backend.contains("(required)"));
        assert!(!page.contains('`') && !page.contains("]("), "{page}");
        assert_eq!(page.matches("\n  path ").count(), 1);
    }

    #[test]
    fn unknown_topic_has_a_near_match_among_topics_and_commands() {
        assert!(HelpTopic::find("disks").is_none());
        assert_eq!(HelpTopic::nearest("disks", ["serve"]), Some("disk"));
        assert_eq!(
            HelpTopic::nearest("vhost_blck", ["serve"]),
            Some("vhost-blk")
        );
        assert_eq!(HelpTopic::nearest("srve", ["serve"]), Some("serve"));
        assert_eq!(HelpTopic::nearest("qwertyuiop", ["serve"]), None);
        assert!(HelpTopic::find("vhost_blk").is_some());
    }
}
