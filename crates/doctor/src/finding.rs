//! What a check has found.

use serde_json::{Value, json};

/// What a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// CPUs: their clocks, sleep and interrupts.
    Cpu,
    /// KVM.
    Virtualization,
    /// Block devices and files below disks.
    Storage,
    /// Memory and limits.
    Memory,
    /// Network, for iSCSI.
    Network,
}

impl Area {
    /// One word.
    pub const fn word(self) -> &'static str {
        match self {
            Area::Cpu => "cpu",
            Area::Virtualization => "kvm",
            Area::Storage => "storage",
            Area::Memory => "memory",
            Area::Network => "network",
        }
    }
}

/// Files of `/proc` or `/sys` and the value that each should get. The first has what is there now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Their paths.
    pub files: Vec<String>,
    /// What to write.
    pub value: String,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the check.
    pub check: &'static str,
    /// What it is about.
    pub area: Area,
    /// It costs speed, and can be changed here; else it is only good to know.
    pub is_worth_changing: bool,
    /// What was found.
    pub found: String,
    /// Why it matters.
    pub why: &'static str,
    /// What changes it.
    pub command: Option<String>,
    /// The same as values of files, where that is all.
    pub change: Option<Change>,
}

impl Finding {
    /// Something to know.
    pub(crate) fn note(
        check: &'static str,
        area: Area,
        found: impl Into<String>,
        why: &'static str,
    ) -> Finding {
        Finding {
            check,
            area,
            is_worth_changing: false,
            found: found.into(),
            why,
            command: None,
            change: None,
        }
    }

    /// Something to change.
    pub(crate) fn worth(
        check: &'static str,
        area: Area,
        found: impl Into<String>,
        why: &'static str,
    ) -> Finding {
        Finding {
            is_worth_changing: true,
            ..Finding::note(check, area, found, why)
        }
    }

    pub(crate) fn by(self, command: impl Into<String>) -> Finding {
        Finding {
            command: Some(command.into()),
            ..self
        }
    }

    /// The command follows from the change.
    pub(crate) fn by_writing(self, files: Vec<String>, value: &str) -> Finding {
        let command = match files.as_slice() {
            [one] => format!("echo {value} > {one}"),
            [first, ..] => format!("for f in {}; do echo {value} > $f; done", pattern_of(first)),
            [] => return self,
        };
        Finding {
            command: Some(command),
            change: Some(Change {
                files,
                value: value.to_owned(),
            }),
            ..self
        }
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        json!({
            "check": self.check,
            "area": self.area.word(),
            "worth_changing": self.is_worth_changing,
            "found": self.found,
            "why": self.why,
            "command": self.command,
        })
    }
}

/// A shell's pattern for files of all CPUs.
fn pattern_of(path: &str) -> String {
    path.replacen("/cpu0/", "/cpu[0-9]*/", 1)
}
