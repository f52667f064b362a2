//! Pages of `lunette help`: the keys of one kind of object, generated from their declarations.

use super::access_list::ACL_KEYS;
use super::daemon_keys::DAEMON_KEYS;
use super::diagnostics::nearest;
use super::disk::DISK_KEYS;
use super::iscsi::ISCSI_KEYS;
use super::iscsi_limits::ISCSI_LIMIT_KEYS;
use super::key::{Key, KeyLine};
use super::lun::{LUN_KEYS, TARGET_LUN_KEYS};
use super::nbd::NBD_KEYS;
use super::target_keys::TARGET_KEYS;
use super::vhost_blk::VHOST_BLK_KEYS;
use super::vhost_scsi::VHOST_SCSI_KEYS;

/// Least width of the column of keys.
const KEY_WIDTH_MIN: usize = 12;

/// A kind of object with a page of its keys.
pub struct HelpTopic {
    /// Name in `lunette help NAME`.
    pub name: &'static str,
    /// First line of the page.
    title: &'static str,
    /// Syntax in flags and in a configuration file.
    syntax: &'static [&'static str],
    sections: fn() -> Vec<Section>,
}

struct Section {
    heading: String,
    lines: Vec<KeyLine>,
}

fn section<D, T>(heading: &str, keys: &'static [Key<D, T>]) -> Section {
    Section {
        heading: heading.to_owned(),
        lines: keys.iter().map(Key::help_line).collect(),
    }
}

/// Returns the keys of disks, grouped by the back ends that have them.
fn disk_sections() -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for key in DISK_KEYS {
        let heading = match key.of {
            [] => "Every disk".to_owned(),
            of => format!("Back ends {}", of.join(", ")),
        };
        match sections.iter_mut().find(|known| known.heading == heading) {
            Some(known) => known.lines.push(key.help_line()),
            None => sections.push(Section {
                heading,
                lines: vec![key.help_line()],
            }),
        }
    }
    sections
}

fn vhost_blk_sections() -> Vec<Section> {
    vec![section("virtio-blk exports", VHOST_BLK_KEYS)]
}

fn vhost_scsi_sections() -> Vec<Section> {
    vec![
        section("virtio-scsi exports", VHOST_SCSI_KEYS),
        section("Each lun of a virtio-scsi export", LUN_KEYS),
    ]
}

fn iscsi_sections() -> Vec<Section> {
    vec![
        section("iSCSI targets", ISCSI_KEYS),
        section("Limits of an iSCSI target at a login", TARGET_KEYS),
        section("Each lun of an iSCSI target", TARGET_LUN_KEYS),
        section("Each entry of acl", ACL_KEYS),
    ]
}

fn nbd_sections() -> Vec<Section> {
    vec![section("NBD exports", NBD_KEYS)]
}

fn daemon_sections() -> Vec<Section> {
    vec![Section {
        heading: "The daemon".to_owned(),
        lines: DAEMON_KEYS.iter().map(|key| key.help_line()).collect(),
    }]
}

const DISK_SYNTAX: &[&str] = &[
    "Flag:  --disk NAME=BACKEND:SIZE|PATH|IMAGE|ADDRESS,KEY=VALUE,...",
    "File:  [[disk]], one line KEY = VALUE for each key",
];
const VHOST_BLK_SYNTAX: &[&str] = &[
    "Flag:  --vhost-blk DISK:SOCKET,KEY=VALUE,...",
    "File:  [[vhost_blk]], one line KEY = VALUE for each key",
];
const VHOST_SCSI_SYNTAX: &[&str] = &[
    "Flag:  --vhost-scsi NAME:SOCKET,KEY=VALUE,...",
    "File:  [[vhost_scsi]], one line KEY = VALUE for each key",
];
const ISCSI_SYNTAX: &[&str] = &[
    "Flags: --iscsi IQN=DISK,DISK,KEY=VALUE,... with --portal, --announce, --demo-mode and --chap-user",
    "File:  [[iscsi]], one line KEY = VALUE for each key",
];
const NBD_SYNTAX: &[&str] = &[
    "Flag:  --nbd DISK:SOCKET,KEY=VALUE,... or --nbd DISK:ADDRESS:PORT,KEY=VALUE,...",
    "File:  [[nbd]], one line KEY = VALUE for each key",
];

/// All topics.
pub static HELP_TOPICS: &[HelpTopic] = &[
    HelpTopic {
        name: "disk",
        title: "Keys of disks",
        syntax: DISK_SYNTAX,
        sections: disk_sections,
    },
    HelpTopic {
        name: "export",
        title: "Keys of exports, by kind: vhost-blk, vhost-scsi, iscsi, nbd",
        syntax: &["Each kind has its own page, which shows the flag: lunette help vhost-blk"],
        sections: || {
            let mut sections = vhost_blk_sections();
            sections.extend(vhost_scsi_sections());
            sections.extend(iscsi_sections());
            sections.extend(nbd_sections());
            sections
        },
    },
    HelpTopic {
        name: "vhost-blk",
        title: "Keys of virtio-blk exports",
        syntax: VHOST_BLK_SYNTAX,
        sections: vhost_blk_sections,
    },
    HelpTopic {
        name: "vhost-scsi",
        title: "Keys of virtio-scsi exports",
        syntax: VHOST_SCSI_SYNTAX,
        sections: vhost_scsi_sections,
    },
    HelpTopic {
        name: "iscsi",
        title: "Keys of iSCSI targets",
        syntax: ISCSI_SYNTAX,
        sections: iscsi_sections,
    },
    HelpTopic {
        name: "nbd",
        title: "Keys of NBD exports",
        syntax: NBD_SYNTAX,
        sections: nbd_sections,
    },
    HelpTopic {
        name: "lun",
        title: "Keys of logical units",
        syntax: &[
            "Flag:  --lun CONTROLLER/TARGET:LUN=DISK",
            "File:  [[vhost_scsi.lun]] or [[iscsi.lun]], one line KEY = VALUE for each key",
        ],
        sections: || {
            vec![
                section("On a virtio-scsi export", LUN_KEYS),
                section("On an iSCSI target", TARGET_LUN_KEYS),
            ]
        },
    },
    HelpTopic {
        name: "acl",
        title: "Keys of the access list of an iSCSI target",
        syntax: &["File:  [[iscsi.acl]], one line KEY = VALUE for each key"],
        sections: || vec![section("Each entry of acl", ACL_KEYS)],
    },
    HelpTopic {
        name: "iscsi-limits",
        title: "Limits of iSCSI initiators",
        syntax: &[
            "Flag:  --iscsi-limits KEY=VALUE,...",
            "File:  [iscsi_limits], one line KEY = VALUE for each key",
        ],
        sections: || vec![section("Limits of all targets together", ISCSI_LIMIT_KEYS)],
    },
    HelpTopic {
        name: "daemon",
        title: "Keys of the daemon",
        syntax: &[
            "Flag:  the flag at the end of the line, if there is one",
            "File:  top of the file, one line KEY = VALUE for each key",
        ],
        sections: daemon_sections,
    },
];

impl HelpTopic {
    /// Finds a topic by name; `-` and `_` are equivalent.
    pub fn find(name: &str) -> Option<&'static HelpTopic> {
        let name = name.replace('_', "-");
        HELP_TOPICS.iter().find(|topic| topic.name == name)
    }

    /// Returns the closest name among the topics and `others`, for a name that is neither.
    pub fn nearest<'a>(name: &str, others: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
        let topics = HELP_TOPICS.iter().map(|topic| topic.name);
        nearest(name, topics.chain(others))
    }

    /// Returns the page in lines of at most `width` columns: for each key its values and its default, and below its meaning.
    pub fn page(&self, width: usize) -> String {
        let sections = (self.sections)();
        let lines = || sections.iter().flat_map(|section| &section.lines);
        let keys = lines().map(|line| line[0].chars().count());
        let indent = keys.max().unwrap_or(0).max(KEY_WIDTH_MIN) + 4;
        let mut page = format!("{}\n\n", self.title);
        for line in self.syntax {
            push_wrapped(&mut page, "  ", line, 9, width);
        }
        for section in &sections {
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

    fn page_of(topic: &str) -> String {
        HelpTopic::find(topic).expect("a topic").page(100)
    }

    fn has_lines<D, T>(topic: &str, keys: &[Key<D, T>]) {
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
        for topic in HELP_TOPICS {
            for width in [80, 100, 132] {
                for line in topic.page(width).lines() {
                    assert!(line.chars().count() <= width, "{}: {line}", topic.name);
                }
            }
        }
    }

    #[test]
    fn each_page_has_a_line_for_every_declared_key() {
        has_lines("disk", DISK_KEYS);
        for topic in ["vhost-blk", "export"] {
            has_lines(topic, VHOST_BLK_KEYS);
        }
        for topic in ["vhost-scsi", "export"] {
            has_lines(topic, VHOST_SCSI_KEYS);
            has_lines(topic, LUN_KEYS);
        }
        for topic in ["iscsi", "export"] {
            has_lines(topic, ISCSI_KEYS);
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
