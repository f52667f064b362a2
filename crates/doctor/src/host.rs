//! Files of a host: of this machine, or from a record.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Files that checks read; `*` matches any part of one component.
pub const FILES: &[&str] = &[
    "/proc/cmdline",
    "/proc/cpuinfo",
    "/proc/interrupts",
    "/proc/irq/*/effective_affinity_list",
    "/proc/meminfo",
    "/proc/mounts",
    "/proc/self/limits",
    "/proc/stat",
    "/proc/swaps",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/net/core/netdev_max_backlog",
    "/proc/sys/net/core/rmem_max",
    "/proc/sys/net/core/wmem_max",
    "/proc/sys/net/ipv4/tcp_congestion_control",
    "/proc/sys/net/ipv4/tcp_no_metrics_save",
    "/proc/sys/net/ipv4/tcp_rmem",
    "/proc/sys/net/ipv4/tcp_sack",
    "/proc/sys/net/ipv4/tcp_timestamps",
    "/proc/sys/net/ipv4/tcp_window_scaling",
    "/proc/sys/net/ipv4/tcp_wmem",
    "/proc/sys/vm/dirty_bytes",
    "/proc/sys/vm/dirty_ratio",
    "/proc/sys/vm/swappiness",
    "/proc/sys/vm/zone_reclaim_mode",
    "/sys/block/*/device/numa_node",
    "/sys/block/*/loop/backing_file",
    "/sys/block/*/queue/nr_requests",
    "/sys/block/*/queue/read_ahead_kb",
    "/sys/block/*/queue/rotational",
    "/sys/block/*/queue/scheduler",
    "/sys/block/*/queue/wbt_lat_usec",
    "/sys/block/*/queue/write_cache",
    "/sys/block/*/size",
    "/sys/block/*/dm/name",
    "/sys/block/*/mq/*/nr_tags",
    "/sys/class/net/*/mtu",
    "/sys/class/net/*/operstate",
    "/sys/class/net/*/speed",
    "/sys/class/net/*/device/vendor",
    "/sys/class/net/*/queues/*/rps_cpus",
    "/sys/devices/system/clocksource/clocksource0/available_clocksource",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    "/sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference",
    "/sys/devices/system/cpu/cpu*/cpufreq/scaling_driver",
    "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    "/sys/devices/system/cpu/cpu*/cpuidle/state*/disable",
    "/sys/devices/system/cpu/cpu*/cpuidle/state*/latency",
    "/sys/devices/system/cpu/cpu*/cpuidle/state*/name",
    "/sys/devices/system/cpu/cpuidle/current_driver",
    "/sys/devices/system/cpu/cpuidle/current_governor",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/cpu/smt/active",
    "/sys/devices/system/cpu/vulnerabilities/*",
    "/sys/devices/system/node/node*/cpulist",
    "/sys/fs/cgroup/cpu.max",
    "/sys/hypervisor/type",
    "/sys/kernel/debug/tracing/tracing_on",
    "/sys/kernel/mm/ksm/run",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "/sys/kernel/tracing/current_tracer",
    "/sys/module/kvm/parameters/halt_poll_ns",
    "/sys/module/kvm_amd/parameters/avic",
    "/sys/module/kvm_amd/parameters/nested",
    "/sys/module/kvm_intel/parameters/enable_apicv",
    "/sys/module/kvm_intel/parameters/nested",
    "/dev/kvm",
    "/dev/vhost-net",
    "/.dockerenv",
    "/run/.containerenv",
];

/// Prefix of a file name in a record.
const MARK: &str = "--- ";

/// A host.
#[derive(Clone, Debug)]
pub struct Host(Source);

#[derive(Clone, Debug)]
enum Source {
    Root(PathBuf),
    Record(BTreeMap<String, String>),
}

impl Host {
    /// Uses this machine, or a file system mounted at another root.
    pub fn at(root: impl Into<PathBuf>) -> Host {
        Host(Source::Root(root.into()))
    }

    /// Parses a record from [`Host::record`]. Devices have no content.
    ///
    /// # Errors
    /// The text does not begin with a file name.
    pub fn recorded(text: &str) -> Result<Host, String> {
        let mut files = BTreeMap::new();
        let mut current: Option<(String, String)> = None;
        for line in text.lines().filter(|line| !line.starts_with("# ")) {
            if let Some(name) = line.strip_prefix(MARK) {
                files.extend(current.replace((name.trim().to_owned(), String::new())));
                continue;
            }
            match &mut current {
                Some((_, content)) => {
                    content.push_str(line);
                    content.push('\n');
                }
                None if line.trim().is_empty() => {}
                None => {
                    return Err(format!(
                        "not a record of a host: it begins with {line:?}, not with `{MARK}/path`"
                    ));
                }
            }
        }
        files.extend(current);
        Ok(Host(Source::Record(files)))
    }

    /// Returns all files as text for [`Host::recorded`].
    pub fn record(&self) -> String {
        let paths: BTreeSet<String> = FILES
            .iter()
            .flat_map(|pattern| self.find(pattern))
            .collect();
        let mut text = String::new();
        for path in paths {
            text.push_str(&format!("{MARK}{path}\n"));
            for line in self.text(&path).unwrap_or_default().lines() {
                // Lines that look like a file name or a comment are indented.
                let clash = line.starts_with(MARK) || line.starts_with("# ");
                text.push_str(if clash { " " } else { "" });
                text.push_str(line);
                text.push('\n');
            }
        }
        text
    }

    /// Returns the trimmed content of a file; `None` if it does not exist or cannot be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        let text = match &self.0 {
            Source::Root(root) => {
                let path = inside(root, path);
                if !path.is_file() {
                    return None;
                }
                String::from_utf8_lossy(&std::fs::read(path).ok()?).into_owned()
            }
            Source::Record(files) => files.get(path)?.clone(),
        };
        Some(text.trim().to_owned())
    }

    pub(crate) fn number(&self, path: &str) -> Option<i64> {
        self.text(path)?.parse().ok()
    }

    /// Returns true if the file, device or folder exists.
    pub(crate) fn has(&self, path: &str) -> bool {
        match &self.0 {
            Source::Root(root) => inside(root, path).exists(),
            Source::Record(files) => {
                let below = format!("{path}/");
                files
                    .keys()
                    .any(|file| file == path || file.starts_with(&below))
            }
        }
    }

    /// Returns the names in a folder, sorted; numbers are sorted by value.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let mut names: Vec<String> = match &self.0 {
            Source::Root(root) => {
                let entries = std::fs::read_dir(inside(root, folder));
                let entries = entries.into_iter().flatten().flatten();
                entries
                    .map(|entry| entry.file_name().to_string_lossy().into_owned())
                    .collect()
            }
            Source::Record(files) => {
                let below = format!("{}/", folder.trim_end_matches('/'));
                let inside = files.keys().filter_map(|file| file.strip_prefix(&below));
                let names: BTreeSet<&str> =
                    inside.filter_map(|rest| rest.split('/').next()).collect();
                names.into_iter().map(str::to_owned).collect()
            }
        };
        names.sort_by_key(|name| {
            let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
            let stem = name.len() - digits.len();
            (
                name[..stem].to_owned(),
                digits.parse::<u64>().unwrap_or(0),
                name.clone(),
            )
        });
        names
    }

    /// Returns the files that match a pattern of [`FILES`].
    pub(crate) fn find(&self, pattern: &str) -> Vec<String> {
        let mut found = vec![String::new()];
        for part in pattern.split('/').skip(1) {
            let mut next = Vec::new();
            for folder in &found {
                if !part.contains('*') {
                    next.push(format!("{folder}/{part}"));
                    continue;
                }
                let (before, after) = part.split_once('*').unwrap_or((part, ""));
                let names = self.names(if folder.is_empty() { "/" } else { folder });
                let fits = |name: &String| {
                    name.len() >= before.len() + after.len()
                        && name.starts_with(before)
                        && name.ends_with(after)
                };
                next.extend(
                    names
                        .into_iter()
                        .filter(fits)
                        .map(|name| format!("{folder}/{name}")),
                );
            }
            found = next;
        }
        found.retain(|path| self.has(path));
        found
    }
}

fn inside(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

/// Parses a CPU list such as `0-3,8`.
pub(crate) fn cpus_of(list: &str) -> Vec<u32> {
    let mut cpus = Vec::new();
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        if let (Ok(from), Ok(to)) = (from.parse::<u32>(), to.parse::<u32>()) {
            cpus.extend(from..=to.min(from.saturating_add(4096)));
        }
    }
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: &str = "# a host\n--- /proc/cmdline\nquiet idle=poll\n--- /sys/block/nvme0n1/size\n8\n\
                          --- /sys/block/nvme10n1/size\n9\n--- /dev/kvm\n";

    #[test]
    fn a_record_is_read_and_written() {
        let host = Host::recorded(RECORD).unwrap();
        assert_eq!(
            host.text("/proc/cmdline").as_deref(),
            Some("quiet idle=poll")
        );
        assert_eq!(host.number("/sys/block/nvme10n1/size"), Some(9));
        assert_eq!(host.names("/sys/block"), ["nvme0n1", "nvme10n1"]);
        assert!(host.has("/dev/kvm") && host.has("/sys/block") && !host.has("/sys/blo"));
        let again = Host::recorded(&host.record()).unwrap();
        assert_eq!(again.record(), host.record());
        assert!(
            Host::recorded("x\n")
                .unwrap_err()
                .contains("begins with \"x\"")
        );
    }

    #[test]
    fn patterns_stand_for_one_component() {
        let host = Host::recorded(RECORD).unwrap();
        assert_eq!(host.find("/sys/block/*/size").len(), 2);
        assert_eq!(
            host.find("/sys/block/nvme1*/size"),
            ["/sys/block/nvme10n1/size"]
        );
        assert!(host.find("/sys/*/size").is_empty());
    }

    #[test]
    fn lists_of_cpus_are_ranges() {
        assert_eq!(cpus_of("0-2,5"), [0, 1, 2, 5]);
        assert!(cpus_of("").is_empty() && cpus_of("x").is_empty());
    }
}
