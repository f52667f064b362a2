//! Properties of the machine, and CPU time of other processes during a measurement.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::report::{clock_time, date};

/// Pins the calling thread to a CPU.
pub fn pin(cpu: usize) -> Result<()> {
    let nowhere = || format!("threads are not allowed to run on CPU {cpu}");
    ensure!(cpu < CpuSet::MAX_CPU, nowhere());
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(nowhere)
}

/// Environment of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Kernel name and release.
    pub kernel: String,
    /// CPU model.
    pub cpu: String,
    /// Number of CPUs.
    pub cpus: usize,
    /// Frequency governor of CPU 0, if there is one.
    pub governor: Option<String>,
    /// Findings of `lunette doctor`, by name of the check.
    #[serde(default)]
    pub findings: BTreeMap<String, String>,
    /// Number of mitigations of CPU vulnerabilities that are on; `None`: unknown.
    #[serde(default)]
    pub mitigations: Option<usize>,
    /// Version of this program.
    pub version: String,
    /// Commit, from LUNETTE_COMMIT in the environment at run time or at build time (set by `make`).
    pub commit: Option<String>,
    /// Profile used for the build, if `make` had one for its compiler.
    #[serde(default)]
    pub profile: Option<String>,
    /// Command line.
    pub command: Vec<String>,
    /// Seconds since 1970.
    pub time: u64,
}

impl Environment {
    /// Describes machine and program.
    pub fn describe(&self) -> String {
        format!(
            "{}, {} CPUs {}, lunette {}",
            self.kernel,
            self.cpus,
            self.cpu,
            self.build()
        )
    }

    /// Describes machine, program, mitigations and time: a result's origin.
    pub fn provenance(&self) -> String {
        let mitigations = match (self.mitigations, self.findings.get("mitigations")) {
            (Some(0), _) => "no mitigations of CPU vulnerabilities are on".to_owned(),
            (Some(count), _) => format!("{count} mitigations of CPU vulnerabilities are on"),
            // Results of earlier versions have the finding only.
            (None, Some(found)) => found.clone(),
            (None, None) => "mitigations of CPU vulnerabilities are unknown".to_owned(),
        };
        let time = self.time;
        format!(
            "{}; {mitigations}; {} {} UTC",
            self.describe(),
            date(time),
            clock_time(time)
        )
    }

    /// Describes the build of this program.
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

/// Collects the properties of this machine and build.
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
        #[cfg(feature = "host")]
        findings: findings(),
        #[cfg(not(feature = "host"))]
        findings: BTreeMap::new(),
        mitigations: mitigations(Path::new("/sys/devices/system/cpu/vulnerabilities")),
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

#[cfg(feature = "host")]
fn findings() -> BTreeMap<String, String> {
    let found = doctor::examine(&doctor::Host::at("/"), &doctor::Question::default());
    let named = found.into_iter();
    named.map(|one| (one.check.to_owned(), one.found)).collect()
}

/// Returns the number of mitigations that are on; `None` if the state of a vulnerability cannot be read.
fn mitigations(folder: &Path) -> Option<usize> {
    let (mut known, mut on) = (0, 0);
    for file in fs::read_dir(folder).ok()? {
        let state = fs::read_to_string(file.ok()?.path()).ok()?;
        known += 1;
        on += usize::from(state.contains("Mitigation"));
    }
    (known > 0).then_some(on)
}

/// Returns the CPU time of a process in nanoseconds, including ended threads; `None` if there is no such process.
pub fn cpu_of(pid: u32) -> Option<u64> {
    // 0 would mean the calling process.
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0)?;
    let clock = clock_getcpuclockid(Pid::from_raw(pid)).ok()?;
    let time = Duration::from(clock.now().ok()?);
    u64::try_from(time.as_nanos()).ok()
}

/// Unit of CPU times in /proc, in nanoseconds.
const TICK_NS: u64 = 10_000_000;

/// CPU times at one moment.
#[derive(Clone, Copy, Debug)]
pub struct CpuSnapshot {
    at: Instant,
    all_ns: u64,
    stolen_ns: u64,
    own_ns: u64,
    device_ns: Option<u64>,
}

/// CPU times of an interval.
#[derive(Clone, Copy, Debug)]
pub struct CpuUsage {
    /// CPU time of the device; `None` if its process is unknown or has ended.
    pub device_ns: Option<u64>,
    /// CPU time of all other processes, without the device and this process.
    pub foreign_ns: u64,
    /// Time taken by the hypervisor.
    pub stolen_ns: u64,
    /// Length of the interval.
    pub elapsed: Duration,
}

impl CpuSnapshot {
    /// Reads the current CPU times; `devices` are processes that do not count as foreign.
    pub fn now(devices: &[u32]) -> CpuSnapshot {
        let text = fs::read_to_string("/proc/stat").unwrap_or_default();
        let first = text.lines().next().unwrap_or_default();
        // user nice system idle iowait irq softirq steal
        let words: Vec<u64> = first
            .split_whitespace()
            .skip(1)
            .filter_map(|word| word.parse().ok())
            .collect();
        let word = |index: usize| words.get(index).copied().unwrap_or(0) * TICK_NS;
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let each = devices.iter().map(|pid| cpu_of(*pid));
        CpuSnapshot {
            at: Instant::now(),
            all_ns: word(0) + word(1) + word(2) + word(5) + word(6),
            stolen_ns: word(7),
            own_ns: time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64,
            device_ns: each.sum::<Option<u64>>().filter(|_| !devices.is_empty()),
        }
    }

    /// Returns the difference to an earlier moment.
    pub fn since(&self, earlier: &CpuSnapshot) -> CpuUsage {
        let elapsed = self.at.duration_since(earlier.at);
        let device_ns = self.device_ns.zip(earlier.device_ns);
        let device_ns = device_ns.map(|(now, before)| now.saturating_sub(before));
        let ours = self.own_ns.saturating_sub(earlier.own_ns) + device_ns.unwrap_or(0);
        let all = self.all_ns.saturating_sub(earlier.all_ns);
        let most = elapsed.as_nanos() as u64 * 4096;
        CpuUsage {
            device_ns,
            // The ticks are coarse, so the difference may be slightly negative.
            foreign_ns: all.saturating_sub(ours).min(most),
            stolen_ns: self.stolen_ns.saturating_sub(earlier.stolen_ns),
            elapsed,
        }
    }
}

/// Load of other processes and of the hypervisor during a measurement, in CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disturbance {
    /// CPU time of other processes.
    pub foreign_cpus: f64,
    /// Time taken by the hypervisor.
    pub stolen_cpus: f64,
}

impl Disturbance {
    /// Default limit of a quiet measurement, in CPUs.
    pub const LIMIT: f64 = 0.1;

    /// Returns the sum of both.
    pub fn sum(&self) -> f64 {
        self.foreign_cpus + self.stolen_cpus
    }

    /// Returns true above the limit.
    pub fn is_disturbed(&self) -> bool {
        self.sum() > Disturbance::LIMIT
    }

    /// Describes the load.
    pub fn describe(&self) -> String {
        format!(
            "disturbed: others used {:.2} CPUs, the hypervisor took {:.2}",
            self.foreign_cpus, self.stolen_cpus
        )
    }
}

/// Environment variable with an upper limit for the repetitions of disturbed measurements. Tests that run beside others set it.
const RETRIES_MAX: &str = "LUNETTE_BENCH_RETRIES";

/// Returns the number of repetitions, limited by `RETRIES_MAX`.
pub fn allowed_retries(wanted: u32) -> u32 {
    let limit = std::env::var(RETRIES_MAX).ok();
    let limit = limit.and_then(|text| text.parse().ok());
    limit.map_or(wanted, |limit| wanted.min(limit))
}

/// Measures with `measure`, and repeats a disturbed measurement up to `retries` times. Returns the least disturbed one. The CPU time of
/// `devices`, of this process and of its ended children is no disturbance. After an interruption nothing is repeated, and an interrupted
/// repetition does not count, because its result is incomplete.
///
/// # Errors
/// The first error of a measurement, except that of an interrupted repetition.
pub fn least_disturbed<T>(
    devices: &[u32],
    retries: u32,
    note: impl Fn(&Disturbance),
    is_interrupted: impl Fn() -> bool,
    mut measure: impl FnMut() -> Result<T>,
) -> Result<(T, Disturbance)> {
    let watched = || -> Result<(T, Disturbance)> {
        let (before, children) = (CpuSnapshot::now(devices), children_ns());
        let measured = measure()?;
        let spent = CpuSnapshot::now(devices).since(&before);
        let own = children_ns()
            .zip(children)
            .map_or(0, |(after, before)| after.saturating_sub(before));
        let seconds = spent.elapsed.as_secs_f64().max(1e-3) * 1e9;
        Ok((
            measured,
            Disturbance {
                foreign_cpus: spent.foreign_ns.saturating_sub(own) as f64 / seconds,
                stolen_cpus: spent.stolen_ns as f64 / seconds,
            },
        ))
    };
    quietest(allowed_retries(retries), note, is_interrupted, watched)
}

fn quietest<T>(
    retries: u32,
    note: impl Fn(&Disturbance),
    is_interrupted: impl Fn() -> bool,
    mut measure: impl FnMut() -> Result<(T, Disturbance)>,
) -> Result<(T, Disturbance)> {
    let mut best = measure()?;
    for _ in 0..retries {
        if !best.1.is_disturbed() || is_interrupted() {
            break;
        }
        note(&best.1);
        let again = measure();
        if is_interrupted() {
            break;
        }
        let again = again?;
        if again.1.sum() < best.1.sum() {
            best = again;
        }
    }
    Ok(best)
}

/// Returns the CPU time of ended children in nanoseconds: cutime and cstime of proc(5), counted from the field after the name.
pub fn children_ns() -> Option<u64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some((ticks(13)? + ticks(14)?) * TICK_NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreadable_mitigations_are_unknown_and_not_off() {
        let folder = tempfile::tempdir().unwrap();
        let found = || mitigations(folder.path());
        assert_eq!(mitigations(&folder.path().join("missing")), None);
        assert_eq!(found(), None);
        let put = |name: &str, state: &str| std::fs::write(folder.path().join(name), state);
        put("meltdown", "Not affected\n").unwrap();
        put("mds", "Vulnerable\n").unwrap();
        assert_eq!(found(), Some(0));
        put("retbleed", "Mitigation: untrained return thunk\n").unwrap();
        assert_eq!(found(), Some(1));
        // A file without text that can be read, for every user.
        std::fs::create_dir(folder.path().join("srso")).unwrap();
        assert_eq!(found(), None);

        let origin = |mitigations, finding: Option<&str>| {
            let finding = finding.map(|text| ("mitigations".to_owned(), text.to_owned()));
            let environment = Environment {
                mitigations,
                findings: finding.into_iter().collect(),
                ..Environment::default()
            };
            environment.provenance()
        };
        assert!(origin(None, None).contains("mitigations of CPU vulnerabilities are unknown"));
        assert!(origin(Some(0), None).contains("no mitigations"));
        assert!(origin(Some(7), None).contains("; 7 mitigations"));
        assert!(origin(None, Some("5 mitigations are on")).contains("; 5 mitigations are on;"));
    }

    #[test]
    fn a_disturbed_measurement_is_repeated_and_the_quietest_counts() {
        let measured = |loads: &[f64], retries| {
            let mut number = 0;
            let measure = || {
                let foreign_cpus = loads[number];
                number += 1;
                let stolen_cpus = 0.0;
                Ok((
                    number,
                    Disturbance {
                        foreign_cpus,
                        stolen_cpus,
                    },
                ))
            };
            let (number, load) = quietest(retries, |_| {}, || false, measure).unwrap();
            (number, load.is_disturbed())
        };
        assert_eq!(measured(&[0.05], 2), (1, false));
        assert_eq!(measured(&[1.0, 0.02], 2), (2, false));
        assert_eq!(measured(&[1.0, 0.4, 0.9], 2), (2, true));
        assert_eq!(measured(&[1.0], 0), (1, true));
    }

    #[test]
    fn an_interrupted_repetition_does_not_replace_the_measurement() {
        let measured = |interrupted_at: u32, has_failed: bool| {
            let number = std::cell::Cell::new(0);
            let is_interrupted = || number.get() >= interrupted_at;
            let measure = || {
                number.set(number.get() + 1);
                anyhow::ensure!(!has_failed || !is_interrupted(), "interrupted");
                let load = Disturbance {
                    foreign_cpus: 1.0 / f64::from(number.get()),
                    stolen_cpus: 0.0,
                };
                Ok((number.get(), load))
            };
            let found = quietest(2, |_| {}, is_interrupted, measure);
            (found.ok().map(|(found, _)| found), number.get())
        };
        for has_failed in [false, true] {
            assert_eq!(measured(9, has_failed), (Some(3), 3));
            assert_eq!(measured(3, has_failed), (Some(2), 3));
            assert_eq!(measured(2, has_failed), (Some(1), 2));
        }
        assert_eq!(measured(1, false), (Some(1), 1));
        assert_eq!(measured(1, true), (None, 1));
    }

    #[test]
    fn foreign_time_excludes_this_process_and_the_device() {
        let before = CpuSnapshot {
            at: Instant::now(),
            all_ns: 10_000,
            stolen_ns: 50,
            own_ns: 100,
            device_ns: Some(200),
        };
        let after = CpuSnapshot {
            at: before.at + Duration::from_secs(1),
            all_ns: 16_000,
            stolen_ns: 75,
            own_ns: 2100,
            device_ns: Some(1200),
        };
        let spent = after.since(&before);
        assert_eq!(
            (spent.device_ns, spent.foreign_ns, spent.stolen_ns),
            (Some(1000), 3000, 25)
        );
        assert_eq!(spent.elapsed, Duration::from_secs(1));
        // The usage of an ended device is unknown, and ticks may lag.
        let gone = CpuSnapshot {
            device_ns: None,
            all_ns: 10_000,
            ..after
        };
        let spent = gone.since(&before);
        assert_eq!((spent.device_ns, spent.foreign_ns), (None, 0));
    }

    /// Work of another process is foreign, unless that process is the device.
    #[test]
    fn time_of_a_busy_process_is_foreign() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let pid = child.id();
        while cpu_of(pid).unwrap() < 100_000_000 {
            std::thread::sleep(Duration::from_millis(10));
        }
        let device = CpuSnapshot::now(&[pid]);
        child.kill().ok();
        child.wait().ok();
        assert!(device.device_ns.unwrap() >= 100_000_000);
        assert!(device.all_ns >= device.device_ns.unwrap() / 2);
        // The process ID is free now: the time is unknown, not 0.
        assert_eq!(CpuSnapshot::now(&[pid]).device_ns, None);
        assert_eq!(CpuSnapshot::now(&[]).device_ns, None);
    }

    #[test]
    fn threads_that_have_ended_count() {
        let pid = std::process::id();
        let before = cpu_of(pid).unwrap();
        let burnt = std::thread::spawn(|| {
            let used = || clock_gettime(ClockId::ThreadCPUTime);
            while used().tv_nsec < 50_000_000 && used().tv_sec == 0 {
                std::hint::spin_loop();
            }
        });
        burnt.join().unwrap();
        assert!(cpu_of(pid).unwrap() >= before + 50_000_000);
    }
}
