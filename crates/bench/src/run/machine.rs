//! The machine: what it is, and who else used its CPUs meanwhile.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// The calling thread runs on this CPU from now on.
pub fn pin(cpu: usize) -> Result<()> {
    let nowhere = || format!("no thread may run on CPU {cpu}");
    ensure!(cpu < CpuSet::MAX_CPU, nowhere());
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(nowhere)
}

/// Where and how something was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Kernel's name and release.
    pub kernel: String,
    /// The CPU's name.
    pub cpu: String,
    /// CPUs.
    pub cpus: usize,
    /// Frequency governor of CPU 0, where there is one.
    pub governor: Option<String>,
    /// Version of this program.
    pub version: String,
    /// Commit, where LUNETTE_COMMIT says it in the environment, or said it when this was built, as `make` does.
    pub commit: Option<String>,
    /// The profile that this was built with, where `make` had one for its compiler.
    #[serde(default)]
    pub profile: Option<String>,
    /// The command line.
    pub command: Vec<String>,
    /// Seconds since 1970.
    pub time: u64,
}

impl Environment {
    /// Which build of this program it was.
    pub fn build(&self) -> String {
        let mut text = self.version.clone();
        if let Some(commit) = &self.commit {
            text.push_str(&format!(", commit {commit}"));
        }
        if let Some(profile) = &self.profile {
            text.push_str(&format!(", profile {profile}"));
        }
        text
    }
}

/// What there is to know here and now.
pub fn environment() -> Environment {
    let name = rustix::system::uname();
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
    let governor = fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Environment {
        kernel: format!(
            "{} {}",
            name.sysname().to_string_lossy(),
            name.release().to_string_lossy()
        ),
        cpu: model
            .and_then(|line| line.split_once(':'))
            .map_or_else(String::new, |(_, name)| name.trim().to_owned()),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        governor: governor.ok().map(|text| text.trim().to_owned()),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: std::env::var("LUNETTE_COMMIT")
            .ok()
            .or(option_env!("LUNETTE_COMMIT").map(str::to_owned))
            .filter(|text| !text.is_empty()),
        profile: option_env!("LUNETTE_PROFILE")
            .filter(|text| !text.is_empty())
            .map(str::to_owned),
        command: std::env::args().collect(),
        time: now.map_or(0, |time| time.as_secs()),
    }
}

/// CPU time of a process in nanoseconds, its threads' added up; 0 when it is gone.
pub fn cpu_of(pid: u32) -> u64 {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return 0;
    };
    let mut sum = 0u64;
    for task in tasks.flatten() {
        // schedstat counts nanoseconds, stat only ticks.
        let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        let first = text
            .split_whitespace()
            .next()
            .and_then(|word| word.parse::<u64>().ok());
        sum = sum.saturating_add(first.unwrap_or(0));
    }
    if sum > 0 { sum } else { ticks_of(pid) }
}

/// The kernel's unit in /proc.
const TICK_NS: u64 = 10_000_000;

fn ticks_of(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may hold anything.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let times = rest.split_whitespace().skip(11).take(2);
    times
        .filter_map(|word| word.parse::<u64>().ok())
        .sum::<u64>()
        * TICK_NS
}

/// CPU time used so far, by whom.
#[derive(Clone, Copy, Debug)]
pub struct Busy {
    all_ns: u64,
    stolen_ns: u64,
    own_ns: u64,
    device_ns: u64,
}

/// CPU time used meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Spent {
    /// By the device.
    pub device_ns: u64,
    /// By neither the device nor this process.
    pub foreign_ns: u64,
    /// By the hypervisor.
    pub stolen_ns: u64,
}

impl Busy {
    /// So far; `devices` are processes that do not count as foreign.
    pub fn now(devices: &[u32]) -> Busy {
        let text = fs::read_to_string("/proc/stat").unwrap_or_default();
        let first = text.lines().next().unwrap_or_default();
        // user nice system idle iowait irq softirq steal
        let words: Vec<u64> = first
            .split_whitespace()
            .skip(1)
            .filter_map(|word| word.parse().ok())
            .collect();
        let at = |index: usize| words.get(index).copied().unwrap_or(0) * TICK_NS;
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Busy {
            all_ns: at(0) + at(1) + at(2) + at(5) + at(6),
            stolen_ns: at(7),
            own_ns: time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64,
            device_ns: devices.iter().map(|pid| cpu_of(*pid)).sum(),
        }
    }

    /// Since an earlier moment.
    pub fn since(&self, earlier: &Busy, elapsed: Duration) -> Spent {
        let device_ns = self.device_ns.saturating_sub(earlier.device_ns);
        let ours = self.own_ns.saturating_sub(earlier.own_ns) + device_ns;
        let all = self.all_ns.saturating_sub(earlier.all_ns);
        let most = elapsed.as_nanos() as u64 * 4096;
        Spent {
            device_ns,
            // Ticks are coarse: a little less than nothing is nothing.
            foreign_ns: all.saturating_sub(ours).min(most),
            stolen_ns: self.stolen_ns.saturating_sub(earlier.stolen_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_is_what_neither_this_process_nor_the_device_used() {
        let before = Busy {
            all_ns: 10_000,
            stolen_ns: 50,
            own_ns: 100,
            device_ns: 200,
        };
        let after = Busy {
            all_ns: 16_000,
            stolen_ns: 75,
            own_ns: 2100,
            device_ns: 1200,
        };
        let spent = after.since(&before, Duration::from_secs(1));
        assert_eq!(
            (spent.device_ns, spent.foreign_ns, spent.stolen_ns),
            (1000, 3000, 25)
        );
        // A device that is gone has used nothing, and ticks may lag behind.
        let gone = Busy {
            device_ns: 0,
            all_ns: 10_000,
            ..after
        };
        let spent = gone.since(&before, Duration::from_secs(1));
        assert_eq!((spent.device_ns, spent.foreign_ns), (0, 0));
    }

    /// Work of another process is foreign, unless that process is the device.
    #[test]
    fn a_busy_process_is_seen() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let pid = child.id();
        while cpu_of(pid) < 100_000_000 {
            std::thread::sleep(Duration::from_millis(10));
        }
        let device = Busy::now(&[pid]);
        child.kill().ok();
        child.wait().ok();
        assert!(device.device_ns >= 100_000_000);
        assert!(device.all_ns >= device.device_ns / 2);
    }
}
