//! The tests of the crate `conformance` against the server in this process. `hostile.rs` has those of hostile front ends.

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bdev::{File, FileOptions};
use conformance::{Device, Outcome, Selection, Target};
use support::{Rig, Watched, ram};

const DELAY: Duration = Duration::from_micros(300);

/// All groups but `hostile`.
const GROUPS: [&str; 9] = [
    "session",
    "config",
    "rings",
    "requests",
    "scsi",
    "control",
    "memory",
    "inflight",
    "dirty_log",
];

/// A test that does not apply, and the reason.
type Skipped = (&'static str, &'static str);

/// Skipped for a disk with one queue. Disks with several queues offer VIRTIO_BLK_F_MQ.
const DISK_SKIPS: [Skipped; 4] = [
    (
        "config.num_queues-is-the-number-of-queues",
        "VIRTIO_BLK_F_MQ is not offered",
    ),
    (
        "requests.a-write-to-a-read-only-disk-fails",
        "VIRTIO_BLK_F_RO is not offered",
    ),
    (
        "requests.write-zeroes-above-max_write_zeroes_sectors-fails",
        "a limit below the capacity is not offered",
    ),
    (
        "requests.discard-above-max_discard_sectors-fails",
        "a limit below the capacity is not offered",
    ),
];

/// QEMU provides the configuration space of virtio-scsi.
const CONTROLLER_SKIPS: [Skipped; 1] = [(
    "scsi.the-configuration-space-has-the-default-sizes",
    "VHOST_USER_PROTOCOL_F_CONFIG is not offered",
)];

/// Runs the tests of these groups. Exactly those of `skips` may be skipped.
fn expect_passed(socket: &Path, device: Device, groups: &[&str], skips: &[Skipped]) {
    let selection = Selection {
        names: groups.iter().map(|group| (*group).to_owned()).collect(),
    };
    let report = conformance::run(&Target::strict(socket, device), &selection, |_| {});
    let failures: Vec<_> = report
        .tests
        .iter()
        .filter(|one| matches!(one.outcome, Outcome::Failed(_) | Outcome::Died(_)))
        .map(conformance::table)
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let tests = report.tests.iter();
    let skipped: Vec<_> = tests
        .filter(|one| matches!(one.outcome, Outcome::Skipped(_)))
        .map(|one| (one.test.name(), one.outcome.reason()))
        .collect();
    let skips: Vec<_> = skips
        .iter()
        .map(|(name, why)| ((*name).to_owned(), *why))
        .collect();
    assert_eq!(skipped, skips);
    assert!(report.count("passed") >= 4);
}

#[test]
fn disk_passes() {
    let rig = Rig::new(1);
    expect_passed(
        &rig.serve_ram("d", 4),
        Device::Blk,
        &GROUPS,
        &DISK_SKIPS[1..],
    );
}

#[test]
fn disks_that_complete_later_pass() {
    let rig = Rig::new(2);
    let late = rig.serve("late", Watched::new(ram(1 << 20), DELAY), 1);
    expect_passed(&late, Device::Blk, &GROUPS, &DISK_SKIPS);
    let mut file = FileOptions::new(rig.directory.path().join("disk.raw"));
    file.size = Some(1 << 20);
    let file = rig.serve("file", Arc::new(File::open(file).unwrap()), 1);
    expect_passed(&file, Device::Blk, &["dirty_log"], &[]);
}

#[test]
fn units_of_a_controller_pass() {
    let rig = Rig::new(2);
    for (delay, unit) in [
        (Duration::ZERO, Device::Scsi(0, 0)),
        (DELAY, Device::Scsi(5, 300)),
    ] {
        let socket = rig.serve_controller(delay);
        expect_passed(&socket, unit, &GROUPS, &CONTROLLER_SKIPS);
        rig.server.remove("c");
    }
}
