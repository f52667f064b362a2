//! CPUs: clocks, sleep states, disk interrupts, stolen time.

use crate::Question;
use crate::finding::{Area, Finding};
use crate::host::{Host, cpus_of};

const CPUS: &str = "/sys/devices/system/cpu";

/// Maximum exit latency of a sleep state in microseconds: the duration of an I/O on a fast disk.
const DEEP_US: i64 = 20;
/// Limit of steal time in percent.
const STEAL_PERCENT: f64 = 1.0;

pub(crate) fn examine(host: &Host, question: &Question, findings: &mut Vec<Finding>) {
    findings.extend(governor(host));
    findings.extend(sleep_states(host));
    findings.extend(idle_poll(host));
    findings.extend(halt_poll(host));
    findings.extend(clock_source(host));
    findings.extend(mitigations(host));
    findings.extend(smt(host, question));
    findings.extend(steal(host));
    findings.extend(nodes(host));
    findings.extend(interrupts(host));
    findings.extend(quota(host));
}

fn has_word(host: &Host, word: &str) -> bool {
    let line = host.text("/proc/cmdline").unwrap_or_default();
    line.split_whitespace().any(|one| one == word)
}

/// Returns true if the host runs under a hypervisor.
pub(crate) fn is_virtual(host: &Host) -> bool {
    has_flag(host, "hypervisor")
}

pub(crate) fn has_flag(host: &Host, flag: &str) -> bool {
    let text = host.text("/proc/cpuinfo").unwrap_or_default();
    let flags = text
        .lines()
        .find(|line| line.starts_with("flags") || line.starts_with("Features"));
    flags.is_some_and(|line| line.split_whitespace().any(|one| one == flag))
}

fn governor(host: &Host) -> Option<Finding> {
    let files = host.find("/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor");
    let slow: Vec<String> = files
        .iter()
        .filter(|file| {
            let governor = host.text(file).unwrap_or_default();
            let folder = file.trim_end_matches("scaling_governor");
            let preference = host.text(&format!("{folder}energy_performance_preference"));
            // With these drivers the firmware selects the clock by this preference.
            let prefers_speed = preference.as_deref() == Some("performance");
            !(governor == "performance" || prefers_speed)
        })
        .cloned()
        .collect();
    let first = host.text(slow.first()?)?;
    let found = format!(
        "CPU frequency governor {first} on {} of {} CPUs",
        slow.len(),
        files.len()
    );
    let why = "A CPU that lowers its clock between requests serves the next one slowly.";
    Some(Finding::worth("governor", Area::Cpu, found, why).by_writing(slow, "performance"))
}

fn sleep_states(host: &Host) -> Option<Finding> {
    let mut deep: Option<(i64, String)> = None;
    for state in host.names(&format!("{CPUS}/cpu0/cpuidle")) {
        let of = |file: &str| host.text(&format!("{CPUS}/cpu0/cpuidle/{state}/{file}"));
        let latency: i64 = of("latency")
            .and_then(|text| text.parse().ok())
            .unwrap_or(0);
        let is_off = of("disable").as_deref() == Some("1");
        if !is_off && latency >= DEEP_US && deep.as_ref().is_none_or(|(most, _)| latency > *most) {
            deep = Some((latency, of("name").unwrap_or(state)));
        }
    }
    let (latency, name) = deep?;
    let found = format!("CPUs use the idle state {name}, with a wake-up latency of {latency} us");
    let why = "At low queue depth each request waits until a CPU has woken up.";
    let command = format!("cpupower idle-set --disable-by-latency {DEEP_US}");
    Some(Finding::worth("sleep_states", Area::Cpu, found, why).by(command))
}

fn idle_poll(host: &Host) -> Option<Finding> {
    let why = "CPUs that never sleep respond at once, but use more power and slow their SMT siblings down.";
    has_word(host, "idle=poll")
        .then(|| Finding::note("idle_poll", Area::Cpu, "booted with idle=poll", why))
}

/// Checks the haltpoll driver: polling before a halt saves an exit per request in a guest.
fn halt_poll(host: &Host) -> Option<Finding> {
    let driver = host.text(&format!("{CPUS}/cpuidle/current_driver"))?;
    if !is_virtual(host) || driver == "haltpoll" {
        return None;
    }
    let found = format!("this is a virtual machine with the idle driver {driver}");
    let why = "A virtual CPU that polls for some microseconds before it halts avoids an exit per request.";
    Some(Finding::worth("halt_poll", Area::Cpu, found, why).by("modprobe cpuidle_haltpoll force=1"))
}

/// Checks for a clock that is read by a trap or a slow bus access: the block layer reads it twice per request.
fn clock_source(host: &Host) -> Option<Finding> {
    const FOLDER: &str = "/sys/devices/system/clocksource/clocksource0";
    const SLOW: [&str; 4] = ["hpet", "acpi_pm", "jiffies", "refined-jiffies"];
    let current = host.text(&format!("{FOLDER}/current_clocksource"))?;
    if !SLOW.contains(&current.as_str()) {
        return None;
    }
    let found = format!("the clock source is {current}");
    let why = "The kernel reads the clock for each request. This one takes a microsecond or more per read, and an exit in a guest.";
    let finding = Finding::worth("clock_source", Area::Cpu, found, why);
    let available = host
        .text(&format!("{FOLDER}/available_clocksource"))
        .unwrap_or_default();
    // The first is better.
    let fast = ["kvm-clock", "tsc"]
        .into_iter()
        .find(|fast| available.split_whitespace().any(|one| one == *fast));
    Some(match fast {
        Some(fast) => finding.by_writing(vec![format!("{FOLDER}/current_clocksource")], fast),
        None => finding.by("for a guest: offer kvm-clock (QEMU with KVM: -cpu host)"),
    })
}

fn mitigations(host: &Host) -> Option<Finding> {
    let folder = format!("{CPUS}/vulnerabilities");
    let names = host.names(&folder);
    let on = names.iter().filter(|name| {
        host.text(&format!("{folder}/{name}"))
            .is_some_and(|text| text.contains("Mitigation"))
    });
    let count = on.count();
    let found = format!("{count} mitigations of CPU vulnerabilities are on");
    let why =
        "They slow down system calls and guest exits. Leave them on if guests are not trusted.";
    (count > 0).then(|| Finding::note("mitigations", Area::Cpu, found, why))
}

fn smt(host: &Host, question: &Question) -> Option<Finding> {
    let is_on = host.number(&format!("{CPUS}/smt/active")) == Some(1) && !question.is_guest;
    let why = "A worker gets about half of a core that it shares with a busy virtual CPU. Pin them to different cores (`workers`, virsh vcpupin).";
    is_on.then(|| Finding::note("smt", Area::Cpu, "SMT is on", why))
}

fn steal(host: &Host) -> Option<Finding> {
    let text = host.text("/proc/stat")?;
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    // user nice system idle iowait irq softirq steal; user already includes guest time.
    let times: Vec<f64> = line
        .split_whitespace()
        .take(8)
        .filter_map(|word| word.parse().ok())
        .collect();
    let all: f64 = times.iter().sum();
    let percent = 100.0 * times.get(7)? / all.max(1.0);
    let found = format!(
        "{percent:.1} % of the CPUs' time since boot was taken by other virtual machines (steal)"
    );
    let why = "Requests wait while their worker or virtual CPU waits for a physical CPU. Only the owner of the host can change that.";
    (percent >= STEAL_PERCENT).then(|| Finding::note("steal", Area::Cpu, found, why))
}

fn nodes(host: &Host) -> Option<Finding> {
    let files = host.find("/sys/devices/system/node/node*/cpulist");
    let cpus: Vec<String> = files.iter().filter_map(|file| host.text(file)).collect();
    let nodes = cpus.iter().filter(|list| !list.is_empty()).count();
    let found = format!("{nodes} NUMA nodes with CPUs {}", cpus.join(" and "));
    let why = "A worker is slower on another node than its guest's memory or its disk. Put them on one node (`workers`, numactl).";
    (nodes > 1).then(|| Finding::note("numa", Area::Cpu, found, why))
}

/// Checks for disk interrupts that all go to one CPU.
fn interrupts(host: &Host) -> Option<Finding> {
    let text = host.text("/proc/interrupts")?;
    let is_disk = |name: &str| {
        name.starts_with("nvme")
            || (name.starts_with("virtio") && name.contains("req"))
            || name.contains("mpt")
            || name.contains("megasas")
    };
    let mut targets = Vec::new();
    for line in text.lines() {
        let Some((number, rest)) = line.trim().split_once(':') else {
            continue;
        };
        let name = rest.split_whitespace().last().unwrap_or_default();
        let list = host.text(&format!("/proc/irq/{number}/effective_affinity_list"));
        if let (true, Some(list)) = (is_disk(name), list) {
            targets.push(list);
        }
    }
    let cpus = cpus_of(&host.text(&format!("{CPUS}/online"))?).len();
    let is_one = targets.len() > 1 && targets.iter().all(|list| *list == targets[0]);
    let found = format!(
        "all {} interrupts of disks go to CPU {}",
        targets.len(),
        targets.first()?
    );
    let why = "One CPU handles the completions of all queues, and the others wait for it.";
    (is_one && cpus > 1).then(|| {
        Finding::worth("interrupts", Area::Cpu, found, why).by("systemctl enable --now irqbalance")
    })
}

/// Checks for a CPU quota of the control group.
fn quota(host: &Host) -> Option<Finding> {
    let text = host.text("/sys/fs/cgroup/cpu.max")?;
    let (quota, period) = text.split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.trim().parse().ok()?);
    let found = format!(
        "this control group is limited to {:.1} CPUs",
        quota / period.max(1.0)
    );
    let why = "A polling daemon exhausts its quota and is then throttled until the next period.";
    Some(Finding::note("quota", Area::Cpu, found, why))
}
