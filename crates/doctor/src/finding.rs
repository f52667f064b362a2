//! Results of checks.

use serde_json::{Value, json};

/// Subject of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// CPUs: clocks, sleep states and interrupts.
    Cpu,
    /// KVM.
    Virtualization,
    /// Block devices, and files of disks.
    Storage,
    /// Memory and limits.
    Memory,
    /// Network, for iSCSI.
    Network,
    /// Workers of a daemon.
    Workers,
}

impl Area {
    /// Returns the name.
    pub const fn word(self) -> &'static str {
        match self {
            Area::Cpu => "cpu",
            Area::Virtualization => "kvm",
            Area::Storage => "storage",
            Area::Memory => "memory",
            Area::Network => "network",
            Area::Workers => "workers",
        }
    }
}

/// Files of `/proc` or `/sys` with a recommended value. The first file has the current value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Paths.
    pub files: Vec<String>,
    /// Value to write.
    pub value: String,
}

/// A finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the check.
    pub check: &'static str,
    /// Subject.
    pub area: Area,
    /// The finding costs performance and can be fixed here; otherwise it is a note.
    pub is_worth_changing: bool,
    /// Description of the finding.
    pub found: String,
    /// Reason why it matters.
    pub why: &'static str,
    /// Command that fixes it.
    pub command: Option<String>,
    /// Values of files that have the effect of `command`, if no other step is needed.
    pub change: Option<Change>,
}

impl Finding {
    /// Creates a note.
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

    /// Creates a finding that is worth fixing.
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

    /// Adds a change, and the command that makes it.
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

    /// Returns the finding as JSON.
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

/// Returns a shell pattern for the files of all CPUs.
fn pattern_of(path: &str) -> String {
    path.replacen("/cpu0/", "/cpu[0-9]*/", 1)
}
