//! Memory of guests, and limits of processes.

use crate::Question;
use crate::finding::{Area, Finding};
use crate::host::Host;

const MIB: u64 = 1 << 20;
/// Descriptors for the sockets, kicks and interrupts of some dozens of guests.
const NOFILE: u64 = 4096;
/// Bytes for buffers registered with io_uring.
const MEMLOCK: u64 = 64 * MIB;
const THP: &str = "/sys/kernel/mm/transparent_hugepage";

pub(crate) fn examine(host: &Host, question: &Question, findings: &mut Vec<Finding>) {
    findings.extend(huge_pages(host));
    if !question.is_guest {
        findings.extend(shared_huge_pages(host));
        findings.extend(same_page_merging(host));
        findings.extend(limits(host));
    }
    findings.extend(swap(host));
    findings.extend(dirty(host));
    findings.extend(zone_reclaim(host));
}

/// Returns the value in brackets of `always [madvise] never`.
pub(crate) fn chosen(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    rest.split(']').next()
}

fn huge_pages(host: &Host) -> Option<Finding> {
    let file = format!("{THP}/enabled");
    let text = host.text(&file)?;
    let why =
        "Small pages cause more TLB misses, and each costs about twice as much under a hypervisor.";
    let finding = Finding::worth(
        "huge_pages",
        Area::Memory,
        "transparent huge pages are off",
        why,
    );
    (chosen(&text) == Some("never")).then(|| finding.by_writing(vec![file], "madvise"))
}

fn shared_huge_pages(host: &Host) -> Option<Finding> {
    let file = format!("{THP}/shmem_enabled");
    let text = host.text(&file)?;
    let why = "Guest memory that a daemon shares (memfd) then consists of small pages.";
    let finding = Finding::worth(
        "shared_huge_pages",
        Area::Memory,
        "shared memory gets no transparent huge pages",
        why,
    );
    (chosen(&text) == Some("never")).then(|| finding.by_writing(vec![file], "advise"))
}

fn same_page_merging(host: &Host) -> Option<Finding> {
    const FILE: &str = "/sys/kernel/mm/ksm/run";
    let why =
        "It scans all memory repeatedly, and a write to a merged page must copy the page first.";
    let finding = Finding::worth("ksm", Area::Memory, "kernel same-page merging runs", why);
    (host.number(FILE) == Some(1)).then(|| finding.by_writing(vec![FILE.to_owned()], "2"))
}

fn swap(host: &Host) -> Option<Finding> {
    let text = host.text("/proc/swaps")?;
    let devices: Vec<&str> = text
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    // Compressed memory does not use a disk.
    let on_disk = devices
        .iter()
        .any(|device| !device.starts_with("/dev/zram"));
    let swappiness = host.number("/proc/sys/vm/swappiness")?;
    let found = format!(
        "swappiness {swappiness}, with swap on {}",
        devices.join(" and ")
    );
    let why = "The kernel swaps out guest memory in favour of the page cache. Each access to a swapped page is a slow request.";
    let finding = Finding::worth("swappiness", Area::Memory, found, why);
    (on_disk && swappiness >= 60).then(|| finding.by("sysctl -w vm.swappiness=10"))
}

fn dirty(host: &Host) -> Option<Finding> {
    let text = host.text("/proc/meminfo")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let total = line.trim().split(' ').next()?.parse::<u64>().ok()? * 1024;
    let bytes = host.number("/proc/sys/vm/dirty_bytes").unwrap_or(0);
    let ratio = host.number("/proc/sys/vm/dirty_ratio")? as u64;
    let most = total / 100 * ratio;
    let found = format!(
        "{} GiB of written data may wait in the page cache (dirty_ratio {ratio})",
        most >> 30
    );
    let why =
        "With cache=writeback a flush may have to write all of it first, and all clients wait.";
    let finding = Finding::note("dirty", Area::Memory, found, why);
    (bytes == 0 && most >= 8 << 30).then(|| {
        finding.by("sysctl -w vm.dirty_bytes=1073741824 vm.dirty_background_bytes=268435456")
    })
}

fn zone_reclaim(host: &Host) -> Option<Finding> {
    let mode = host.number("/proc/sys/vm/zone_reclaim_mode")?;
    let why = "A full node reclaims its own memory instead of using another node's, and requests wait for that.";
    let finding = Finding::worth(
        "zone_reclaim",
        Area::Memory,
        format!("zone_reclaim_mode is {mode}"),
        why,
    );
    (mode != 0).then(|| finding.by("sysctl -w vm.zone_reclaim_mode=0"))
}

fn limits(host: &Host) -> Vec<Finding> {
    let text = host.text("/proc/self/limits").unwrap_or_default();
    let soft = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        match line.split_whitespace().next()? {
            "unlimited" => Some(u64::MAX),
            number => number.parse::<u64>().ok(),
        }
    };
    let mut findings = Vec::new();
    if let Some(files) = soft("Max open files").filter(|files| *files < NOFILE) {
        let found = format!("a process may have {files} open files");
        let why = "Each queue of each guest needs some. With many disks, new guests are refused.";
        let finding = Finding::worth("nofile", Area::Memory, found, why);
        findings.push(finding.by("ulimit -n 65536, or LimitNOFILE=65536 in the unit"));
    }
    if let Some(bytes) = soft("Max locked memory").filter(|bytes| *bytes < MEMLOCK) {
        let found = format!("a process may lock {} KiB of memory", bytes / 1024);
        let why = "Kernels before 5.12 count io_uring's rings and buffers against this limit.";
        let finding = Finding::note("memlock", Area::Memory, found, why);
        findings.push(finding.by("ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit"));
    }
    findings
}
