//! Storage below disks: schedulers, queues, and layers that duplicate work.

use std::path::Path;

use crate::Question;
use crate::finding::{Area, Finding};
use crate::host::Host;
use crate::memory::chosen;

/// An existing or planned disk of Lunette.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskOf {
    /// Name, or the path if it has none.
    pub name: String,
    /// File or block device of the disk.
    pub path: String,
    /// I/O uses the page cache.
    pub is_cached: bool,
    /// Size of the file and its allocated size, in bytes.
    pub size: Option<(u64, u64)>,
}

const BLOCK: &str = "/sys/block";
/// Threshold for `nr_requests`. A lower value is less than one guest's queue size.
const NR_REQUESTS: i64 = 64;

pub(crate) fn examine(host: &Host, question: &Question, findings: &mut Vec<Finding>) {
    for device in devices(host, question) {
        findings.extend(scheduler(host, &device));
        findings.extend(queue_depth(host, &device));
        findings.extend(throttling(host, &device));
        findings.extend(single_queue(host, &device, question));
        findings.extend(loop_device(host, &device));
    }
    for disk in &question.disks {
        findings.extend(file_system(host, disk));
        findings.extend(two_caches(disk));
        findings.extend(sparse(disk));
    }
    findings.extend(tracing(host));
}

/// Returns the block devices to examine: those of the disks, or all except RAM disks and stacked devices.
fn devices(host: &Host, question: &Question) -> Vec<String> {
    let all: Vec<String> = host.names(BLOCK);
    let of_disks: Vec<String> = question
        .disks
        .iter()
        .filter_map(|disk| device_of(host, &disk.path))
        .collect();
    if !question.disks.is_empty() {
        return all
            .into_iter()
            .filter(|name| of_disks.contains(name))
            .collect();
    }
    let is_real = |name: &String| {
        let is_layer = ["loop", "ram", "zram", "dm-", "md", "sr", "fd"]
            .iter()
            .any(|prefix| name.starts_with(prefix));
        !is_layer
            && host
                .number(&format!("{BLOCK}/{name}/size"))
                .is_some_and(|sectors| sectors > 0)
    };
    all.into_iter().filter(is_real).collect()
}

/// Returns the mount of a path: device, folder, type.
fn mount_of(host: &Host, path: &str) -> Option<(String, String, String)> {
    let text = host.text("/proc/mounts")?;
    let mounts = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (device, folder, kind) = (words.next()?, words.next()?, words.next()?);
        // Blanks are escaped as octal numbers.
        let folder = folder.replace("\\040", " ");
        Path::new(path)
            .starts_with(&folder)
            .then(|| (device.to_owned(), folder, kind.to_owned()))
    });
    mounts.max_by_key(|(_, folder, _)| folder.len())
}

/// Returns the whole device of a path.
fn device_of(host: &Host, path: &str) -> Option<String> {
    let device = match path.strip_prefix("/dev/") {
        Some(name) => name.to_owned(),
        None => mount_of(host, path)?.0.strip_prefix("/dev/")?.to_owned(),
    };
    let names = host.names(BLOCK);
    // The name of a partition begins with its device's name.
    let whole = names
        .iter()
        .filter(|name| device.starts_with(name.as_str()));
    whole.max_by_key(|name| name.len()).cloned()
}

/// Returns true if a device has seek times. Linux reports each virtio-blk disk as rotating, so that its report proves nothing.
fn is_rotational(host: &Host, device: &str) -> bool {
    let is_virtio_blk = device.starts_with("vd");
    !is_virtio_blk && host.number(&format!("{BLOCK}/{device}/queue/rotational")) == Some(1)
}

fn scheduler(host: &Host, device: &str) -> Option<Finding> {
    let file = format!("{BLOCK}/{device}/queue/scheduler");
    let text = host.text(&file)?;
    let scheduler = chosen(&text)?;
    let found = format!("{device} has the I/O scheduler {scheduler}");
    let why = "A device without seek time gains nothing from a scheduler, but each request pays for it. The guest has its own scheduler.";
    let is_wrong = scheduler != "none"
        && !is_rotational(host, device)
        && text.split_whitespace().any(|one| one == "none");
    is_wrong.then(|| {
        Finding::worth("scheduler", Area::Storage, found, why)
            .by_writing(vec![file.clone()], "none")
    })
}

fn queue_depth(host: &Host, device: &str) -> Option<Finding> {
    let file = format!("{BLOCK}/{device}/queue/nr_requests");
    let number = host.number(&file).filter(|number| *number < NR_REQUESTS)?;
    let found = format!("{device} accepts {number} requests per queue");
    let why = "Further requests of guests wait in software.";
    let has_none = host
        .text(&format!("{BLOCK}/{device}/queue/scheduler"))
        .as_deref()
        .and_then(chosen)
        == Some("none");
    // Without a scheduler the device's own tags are the limit.
    (!has_none).then(|| {
        Finding::worth("nr_requests", Area::Storage, found, why)
            .by_writing(vec![file.clone()], "256")
    })
}

fn throttling(host: &Host, device: &str) -> Option<Finding> {
    let limit = host
        .number(&format!("{BLOCK}/{device}/queue/wbt_lat_usec"))
        .filter(|limit| *limit > 0)?;
    let found =
        format!("{device} throttles buffered writes while reads take longer than {limit} us");
    let why = "Useful on a desktop. A disk with cache=writeback then writes in bursts.";
    Some(Finding::note(
        "writeback_throttling",
        Area::Storage,
        found,
        why,
    ))
}

/// Checks in a guest for disks with fewer queues than CPUs.
fn single_queue(host: &Host, device: &str, question: &Question) -> Option<Finding> {
    let queues = host.names(&format!("{BLOCK}/{device}/mq")).len();
    let cpus = crate::host::cpus_of(&host.text("/sys/devices/system/cpu/online")?).len();
    let found = format!("{device} has {queues} queue(s) for {cpus} CPUs");
    let why = "CPUs that share a queue contend for its lock, and one of them gets its interrupts.";
    let finding = Finding::worth("queues", Area::Storage, found, why);
    let is_few = question.is_guest && queues > 0 && queues < cpus.min(8);
    is_few.then(|| {
        finding.by(format!(
            "num-queues={} of the device, and queues={} of the export",
            cpus, cpus
        ))
    })
}

fn loop_device(host: &Host, device: &str) -> Option<Finding> {
    let file = host.text(&format!("{BLOCK}/{device}/loop/backing_file"))?;
    let found = format!("{device} is a loop device over {file}");
    let why = "Each request passes two block layers and usually a page cache.";
    let finding = Finding::worth("loop", Area::Storage, found, why);
    Some(finding.by(format!("serve the file itself: --disk NAME=file:{file}")))
}

fn file_system(host: &Host, disk: &DiskOf) -> Option<Finding> {
    if disk.path.starts_with("/dev/") {
        return None;
    }
    let (_, folder, kind) = mount_of(host, &disk.path)?;
    let on = |advice: &str| format!("{} lies on {kind} ({folder}): {advice}", disk.name);
    let why = "Duplicate work: the guest's file system is stored on another file system of the same kind.";
    Some(match kind.as_str() {
        "btrfs" | "bcachefs" | "zfs" => {
            let found = on("it writes each block to a new location, with a checksum");
            let finding = Finding::worth("copy_on_write", Area::Storage, found, why);
            match kind.as_str() {
                "btrfs" => finding.by("chattr +C on the folder before the file is created"),
                _ => finding.by("use a volume (zvol) or another file system"),
            }
        }
        "overlay" | "aufs" => {
            let found = on("a layer of a container");
            Finding::worth("overlay", Area::Storage, found, why)
                .by("put the file on a volume of the host")
        }
        "nfs" | "nfs4" | "cifs" | "fuse.sshfs" | "9p" => {
            let why = "Each request crosses the network and stops while the server is unavailable.";
            Finding::note(
                "network_file_system",
                Area::Storage,
                on("a network file system"),
                why,
            )
        }
        kind if kind.starts_with("fuse") => {
            let why = "Each request passes through another process.";
            Finding::note("fuse", Area::Storage, on("a FUSE file system"), why)
        }
        _ => return None,
    })
}

fn two_caches(disk: &DiskOf) -> Option<Finding> {
    let found = format!("{} goes through the host's page cache", disk.name);
    let why = "Duplicate cache: the guest and the host cache the same data.";
    let finding = Finding::note("two_caches", Area::Storage, found, why);
    disk.is_cached.then(|| finding.by("cache = \"none\""))
}

fn sparse(disk: &DiskOf) -> Option<Finding> {
    let (size, taken) = disk.size?;
    let found = format!(
        "{} has space for {} % of its {} MiB",
        disk.name,
        taken * 100 / size.max(1),
        size >> 20
    );
    let why = "The first write to each hole allocates space, which is slower than later writes.";
    let finding = Finding::note("sparse", Area::Storage, found, why);
    (taken < size / 10 * 9).then(|| finding.by(format!("fallocate -l {size} {}", disk.path)))
}

fn tracing(host: &Host) -> Option<Finding> {
    let tracer = host
        .text("/sys/kernel/tracing/current_tracer")
        .filter(|tracer| tracer != "nop")?;
    let found = format!("the kernel's tracer {tracer} is on");
    let why = "Each traced function takes longer.";
    let finding = Finding::worth("tracer", Area::Storage, found, why);
    Some(finding.by_writing(vec!["/sys/kernel/tracing/current_tracer".to_owned()], "nop"))
}
