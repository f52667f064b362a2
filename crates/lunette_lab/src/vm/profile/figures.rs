//! Shares of stacks, and rates of counters around a run.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::vm::study::guest::StudyGuest;

/// Samples of several CPUs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    /// Counts by stack: program, outermost function, ..., innermost.
    pub stacks: BTreeMap<String, u64>,
    /// Samples of idle CPUs.
    pub idle: u64,
    /// Samples lost for lack of space.
    pub lost: u64,
    /// Samples include the kernel.
    pub has_kernel: bool,
}

/// Functions that wait for a lock held by another CPU.
const SPINNING: [&str; 7] = [
    "queued_spin_lock_slowpath",
    "_raw_spin_lock",
    "queued_write_lock_slowpath",
    "queued_read_lock_slowpath",
    "spin_on_owner",
    "osq_lock",
    "rwsem_down_",
];

impl Profile {
    /// Parses the output of `guest-bench profile`. A guest is not trusted: names are sanitised for a terminal, and counts may have
    /// any value.
    pub fn of(document: &Value) -> Result<Profile> {
        let stacks = document["stacks"]
            .as_object()
            .context("the profile has no stacks")?;
        let stacks = stacks.iter().map(|(stack, count)| {
            let stack = stack.replace(|c: char| !c.is_ascii_graphic(), "_");
            (stack, count.as_u64().unwrap_or(0))
        });
        Ok(Profile {
            stacks: stacks.collect(),
            idle: document["idle"].as_u64().unwrap_or(0),
            lost: document["lost"].as_u64().unwrap_or(0),
            has_kernel: document["has_kernel"] == true,
        })
    }

    /// Samples of busy CPUs.
    pub fn total(&self) -> u64 {
        sum(self.stacks.values().copied())
    }

    /// Innermost functions with their shares of all samples, the largest first.
    pub fn functions(&self) -> Vec<(String, f64)> {
        let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
        for (stack, count) in &self.stacks {
            let innermost = stack.rsplit(';').next().unwrap_or(stack);
            let sum = counts.entry(innermost).or_insert(0);
            *sum = sum.saturating_add(*count);
        }
        let total = self.total().max(1) as f64;
        let mut shares: Vec<(String, f64)> = counts
            .into_iter()
            .map(|(name, count)| (name.to_owned(), count as f64 / total))
            .collect();
        shares.sort_by(|one, other| other.1.total_cmp(&one.1));
        shares
    }

    /// Share of one innermost function.
    pub fn share(&self, function: &str) -> f64 {
        let all = self.functions();
        all.iter()
            .find(|(name, _)| name == function)
            .map_or(0.0, |(_, share)| *share)
    }

    /// Share of time spent waiting for locks.
    pub fn spinning(&self) -> f64 {
        let is_spinning = |name: &str| {
            SPINNING.iter().any(|part| name.contains(part)) && !name.contains("unlock")
        };
        let functions = self.functions();
        let spinning = functions.iter().filter(|(name, _)| is_spinning(name));
        // Adding 0.0 avoids -0, the sum of an empty iterator.
        spinning.map(|(_, share)| *share).sum::<f64>() + 0.0
    }

    /// Share of idle CPU time.
    pub fn idle_share(&self) -> f64 {
        self.idle as f64 / sum([self.idle, self.total()]).max(1) as f64
    }

    /// Input lines of a flame graph.
    pub fn folded(&self) -> Vec<String> {
        let lines = self.stacks.iter();
        lines
            .map(|(stack, count)| format!("{stack} {count}"))
            .collect()
    }

    pub fn json(&self) -> Value {
        let functions = self.functions();
        let functions: Vec<Value> = functions
            .iter()
            .map(|(name, share)| json!({"function": name, "share": share}))
            .collect();
        json!({"samples": self.total(), "lost": self.lost, "idle_share": self.idle_share(), "has_kernel": self.has_kernel,
            "spinning_share": self.spinning(), "functions": functions, "stacks": self.stacks})
    }
}

/// Exits of virtual machines from KVM, if the host counts them and they can be read.
#[derive(Clone, Debug, PartialEq)]
pub struct Exits(pub Result<u64, String>);

impl Exits {
    /// Reads the host's current count; `accelerator` is that of the guest.
    fn read(accelerator: &str) -> Exits {
        match accelerator {
            "KVM" => Exits(Exits::of(Path::new("/sys/kernel/debug/kvm"))),
            other => Exits(Err(format!("the guest runs under {other}"))),
        }
    }

    fn of(folder: &Path) -> Result<u64, String> {
        let text = std::fs::read_to_string(folder.join("exits"));
        let text = text.map_err(|error| format!("{}: {error}", folder.display()))?;
        text.trim()
            .parse()
            .map_err(|_| format!("{}: not a number", folder.display()))
    }
}

/// Counters before a run, or their changes during it.
#[derive(Clone, Debug, PartialEq)]
pub struct GuestCounters {
    /// Interrupts of virtio devices.
    pub interrupts: u64,
    pub exits: Exits,
    /// CPU time in the guest, in ticks of the kernel: all of it, and the part taken by the host.
    pub cpu: u64,
    pub steal: u64,
    /// Requests; 0 before a run.
    pub requests: f64,
    pub iops: f64,
}

impl GuestCounters {
    /// Reads the current counters.
    pub fn read(guest: &StudyGuest) -> Result<GuestCounters> {
        let exits = Exits::read(guest.accelerator());
        let text = guest.script("cat /proc/interrupts; head -1 /proc/stat")?;
        let (cpu, steal) = times(&text).context("the guest's /proc/stat has no first line")?;
        Ok(GuestCounters {
            interrupts: interrupts(&text),
            exits,
            cpu,
            steal,
            requests: 0.0,
            iops: 0.0,
        })
    }

    /// Changes since `before` in a run with this result.
    pub fn since(&self, before: &GuestCounters, result: &Value) -> GuestCounters {
        let jobs = result["jobs"].as_array().map_or(&[][..], Vec::as_slice);
        let of_all = |field: &str| -> f64 {
            let sides = jobs.iter().flat_map(|job| [&job["read"], &job["write"]]);
            sides
                .map(|side| side[field].as_f64().unwrap_or(0.0))
                .sum::<f64>()
        };
        let exits = match (&self.exits.0, &before.exits.0) {
            (Ok(after), Ok(before)) => Ok(after.saturating_sub(*before)),
            (Err(reason), _) | (_, Err(reason)) => Err(reason.clone()),
        };
        GuestCounters {
            interrupts: self.interrupts.saturating_sub(before.interrupts),
            exits: Exits(exits),
            cpu: self.cpu.saturating_sub(before.cpu),
            steal: self.steal.saturating_sub(before.steal),
            requests: of_all("total_ios"),
            iops: of_all("iops"),
        }
    }

    pub fn interrupts_per_io(&self) -> f64 {
        self.interrupts as f64 / self.requests.max(1.0)
    }

    /// Exits per request, or the reason why they are unknown.
    pub fn exits_per_io(&self) -> Result<f64, &str> {
        match &self.exits.0 {
            Ok(exits) => Ok(*exits as f64 / self.requests.max(1.0)),
            Err(reason) => Err(reason),
        }
    }

    /// Share of CPU time that the host took.
    pub fn steal_share(&self) -> f64 {
        self.steal as f64 / self.cpu.max(1) as f64
    }

    pub fn json(&self) -> Value {
        json!({"iops": self.iops, "requests": self.requests, "interrupts_per_io": self.interrupts_per_io(),
            "exits_per_io": self.exits_per_io().ok(), "exits_reason": self.exits_per_io().err(),
            "steal_share": self.steal_share()})
    }
}

/// Saturating sum of numbers from a guest.
fn sum(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().fold(0, u64::saturating_add)
}

/// Interrupts of virtio devices on all CPUs.
fn interrupts(text: &str) -> u64 {
    let lines = text.lines().filter(|line| line.contains("virtio"));
    let of_line = |line: &str| -> u64 {
        let words = line.split_whitespace().skip(1);
        sum(words.map_while(|word| word.parse().ok()))
    };
    sum(lines.map(of_line))
}

/// CPU time, and the part taken by the host: `cpu user nice system idle iowait irq softirq steal`.
fn times(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find(|line| line.starts_with("cpu "))?;
    let times: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .map_while(|word| word.parse().ok())
        .collect();
    Some((sum(times.iter().take(8).copied()), *times.get(7)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(stacks: &[(&str, u64)]) -> Profile {
        let stacks: serde_json::Map<String, Value> = stacks
            .iter()
            .map(|(stack, count)| ((*stack).to_owned(), json!(count)))
            .collect();
        let document = json!({"stacks": stacks, "idle": 100, "lost": 0, "has_kernel": true});
        Profile::of(&document).unwrap()
    }

    #[test]
    fn shares_are_of_the_innermost_functions_and_locks_are_summed() {
        let profile = profile(&[
            ("bench;entry;submit;native_queued_spin_lock_slowpath", 50),
            ("kworker;entry;_raw_spin_lock_irqsave", 2),
            ("kworker;entry;_raw_spin_unlock_irqrestore", 8),
            ("bench;entry;submit", 20),
            ("other;entry;submit", 20),
        ]);
        assert_eq!(profile.total(), 100);
        let functions = profile.functions();
        assert_eq!(functions[0].0, "native_queued_spin_lock_slowpath");
        assert_eq!(functions[1], ("submit".to_owned(), 0.4));
        assert!((profile.spinning() - 0.52).abs() < 1e-9);
        assert!((profile.idle_share() - 0.5).abs() < 1e-9);
        assert_eq!(profile.share("nothing"), 0.0);
        assert!(
            profile
                .folded()
                .contains(&"bench;entry;submit 20".to_owned())
        );
    }

    #[test]
    fn names_and_counts_of_a_hostile_guest_are_harmless() {
        let profile = profile(&[("a;\u{1b}[2Jb", u64::MAX), ("a;c", u64::MAX)]);
        assert_eq!(profile.total(), u64::MAX);
        let functions = profile.functions();
        assert!(
            functions.iter().any(|(name, _)| name == "_[2Jb"),
            "{functions:?}"
        );
        assert!(profile.idle_share() < 1.0);
        let text = "24: 18446744073709551615 1 virtio1\ncpu 18446744073709551615 1 1 1 1 1 1 1\n";
        assert_eq!(interrupts(text), u64::MAX);
        assert_eq!(times(text), Some((u64::MAX, 1)));
    }

    #[test]
    fn counters_of_a_guest_are_read() {
        let text = "           CPU0       CPU1\n  1:  9  0  IO-APIC  1-edge  i8042\n 24:  10  5  PCI-MSI 1-edge  virtio1-req.0\n\
                    25:  1  0  PCI-MSI 2-edge  virtio1-req.1\ncpu  10 0 20 50 0 5 5 10 0 0\n";
        assert_eq!(interrupts(text), 16);
        assert_eq!(times(text), Some((100, 10)));
    }

    #[test]
    fn rates_are_for_each_request() {
        let around = |interrupts, exits, steal| GuestCounters {
            interrupts,
            exits: Exits(exits),
            cpu: interrupts,
            steal,
            requests: 0.0,
            iops: 0.0,
        };
        let before = around(100, Ok(5), 0);
        let result = json!({"jobs": [{"read": {"total_ios": 40, "iops": 20.0}, "write": {"total_ios": 10, "iops": 5.0}}]});
        let run = around(200, Ok(105), 10).since(&before, &result);
        assert_eq!(run.interrupts_per_io(), 2.0);
        assert_eq!(run.exits_per_io(), Ok(2.0));
        assert_eq!((run.steal_share(), run.iops), (0.1, 25.0));
        let none = around(200, Err("no KVM".to_owned()), 0).since(&before, &result);
        assert_eq!(none.exits_per_io(), Err("no KVM"));
    }
}
