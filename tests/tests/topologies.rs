//! Guests see any number of disks with the configured addresses and properties.
#![forbid(unsafe_code)]

use end_to_end::rig::{attribute, kernel_is_content, number};
use end_to_end::{GuestBuilder, Result, Rig, ensure, ensure_idle};
use std::collections::BTreeSet;
use std::time::Duration;

/// Returns Linux's number for a LUN. From 256 on it includes the bits of the flat space addressing method (SAM-5, 4.7.7.3).
fn kernel_lun(lun: u32) -> u32 {
    if lun < 256 { lun } else { lun | 0x4000 }
}

const MIB: u64 = 1 << 20;

#[test]
fn four_virtio_blk_disks_with_two_queues_each() -> Result<()> {
    let rig = Rig::new(|daemon| {
        daemon
            .disk("a=ram:64M,serial=alpha")
            .disk("b=file:b.raw,size=96M,cache=none")
            .disk("c=file:c.raw,size=128M,cache=writeback,block_size=4096")
            .disk("d=null:1G")
            .vhost_blk("a")
            .vhost_blk("b")
            .vhost_blk("c")
            .vhost_blk("d")
            .arguments(["--workers", "2"])
    })?;
    let mut builder = GuestBuilder::new("four-blk").cpus(2);
    for name in ["a", "b", "c", "d"] {
        let properties = if name == "b" {
            "packed=on"
        } else {
            "packed=off"
        };
        builder = builder.vhost_user_blk_with(&rig.socket(name), 2, properties);
    }
    let mut guest = builder.boot()?;
    guest.wait_for_disks(&["vda", "vdb", "vdc", "vdd"])?;

    for (disk, mib, block_size) in [
        ("vda", 64, 512),
        ("vdb", 96, 512),
        ("vdc", 128, 4096),
        ("vdd", 1024, 512),
    ] {
        // The kernel counts in units of 512 bytes, independent of the block size.
        ensure!(
            number(&mut guest, disk, "size")? == mib * MIB / 512,
            "size of {disk}"
        );
        ensure!(
            number(&mut guest, disk, "queue/logical_block_size")? == block_size,
            "block size of {disk}"
        );
        let queues = guest.ok(&format!("ls /sys/block/{disk}/mq | wc -l"))?;
        ensure!(queues.trim() == "2", "{disk} has {queues} queues");
    }
    ensure!(
        attribute(&mut guest, "vda", "serial")? == "alpha",
        "GET_ID gives the serial number"
    );

    for (disk, packed) in [("vda", "0"), ("vdb", "1")] {
        // One digit per feature bit, starting at bit 0. VIRTIO_F_RING_PACKED is bit 34.
        let features = attribute(&mut guest, disk, "device/features")?;
        ensure!(features.get(34..35) == Some(packed), "{disk}: {features}");
    }

    // The guest turns the write cache off and on (VIRTIO_BLK_F_CONFIG_WCE).
    for mode in ["write through", "write back"] {
        guest.ok(&format!("echo '{mode}' > /sys/block/vdb/cache_type"))?;
        ensure!(
            attribute(&mut guest, "vdb", "cache_type")? == mode,
            "the cache stays as it was"
        );
        guest.io_ok("soak --file /dev/vdb --runtime 1")?;
    }

    // Verified load on all disks at once. The null disk stores nothing and is only read.
    let soaks = ["vda", "vdb", "vdc"]
        .map(|disk| format!("guest-agent soak --file /dev/{disk} --bs 4096 --depth 4 --runtime 4 & soaks=\"$soaks $!\"; "));
    guest.ok(&format!(
        "{}guest-agent load --file /dev/vdd --rw randread --depth 4 --runtime 4 || exit 1; for soak in $soaks; do wait $soak || exit 1; done",
        soaks.concat()
    ))?;
    kernel_is_content(&mut guest)?;

    let table = rig.daemon.latency(&[])?;
    for stage in [
        "noticed",
        "popped",
        "parsed",
        "submitted",
        "reaped",
        "answered",
        "notified",
    ] {
        ensure!(
            table.contains(stage),
            "lunette latency shows no stage {stage}:\n{table}"
        );
    }
    Ok(())
}

#[test]
fn scsi_disks_have_their_addresses_and_idle_costs_nothing() -> Result<()> {
    // Host 0: 4 targets with 1 LUN; host 1: 1 target with 4 LUNs; host 2: 64 LUNs; host 3: the lowest and highest address.
    let mut addresses: Vec<(&str, u32, u32)> = Vec::new();
    addresses.extend((0..4).map(|target| ("wide", target, 0)));
    addresses.extend((0..4).map(|lun| ("deep", 0, lun)));
    addresses.extend((0..64).map(|index| ("many", index / 8, index % 8)));
    addresses.extend([("far", 0, 0), ("far", 255, 16383)]);
    let hosts = ["wide", "deep", "many", "far"];

    let mut rig = Rig::new(|mut daemon| {
        for host in hosts {
            daemon = daemon.vhost_scsi(host);
        }
        for (index, (host, target, lun)) in addresses.iter().enumerate() {
            // Each disk has a unique size, which identifies it in the guest.
            daemon = daemon
                .disk(&format!("d{index}=ram:{}K", 16384 + 4 * index))
                .lun(&format!("{host}/{target}:{lun}=d{index}"));
        }
        daemon.arguments(["--workers", "2"])
    })?;
    let mut builder = GuestBuilder::new("scsi").cpus(2);
    for host in hosts {
        builder = builder.vhost_user_scsi(&rig.socket(host), 2);
    }
    let mut guest = builder.boot()?;

    let expected: BTreeSet<String> = addresses
        .iter()
        .map(|(host, target, lun)| {
            let host = hosts
                .iter()
                .position(|name| name == host)
                .unwrap_or_default();
            format!("{host}:0:{target}:{}", kernel_lun(*lun))
        })
        .collect();
    let count = addresses.len();
    guest.run(&format!(
        "n=0; until [ $(ls -d /sys/block/sd* | wc -l) -ge {count} ] || [ $n -gt 300 ]; do n=$((n+1)); sleep 0.1; done"
    ))?;
    let found: BTreeSet<String> = guest
        .ok("ls /sys/class/scsi_device")?
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    let missing: Vec<_> = expected.difference(&found).collect();
    let surplus: Vec<_> = found.difference(&expected).collect();
    ensure!(
        missing.is_empty() && surplus.is_empty(),
        "missing: {missing:?}, surplus: {surplus:?}\n{}",
        guest.console_tail()
    );

    // One script for all disks, because starting a script takes longer than this work.
    let sizes = guest.ok(
        "for d in /sys/class/scsi_device/*; do echo ${d##*/} $(cat $d/device/block/*/size); done",
    )?;
    for (index, (host, target, lun)) in addresses.iter().enumerate() {
        let host = hosts
            .iter()
            .position(|name| name == host)
            .unwrap_or_default();
        let line = format!(
            "{host}:0:{target}:{} {}",
            kernel_lun(*lun),
            (16384 + 4 * index) * 2
        );
        ensure!(
            sizes.lines().any(|found| found == line),
            "no line {line:?} in\n{sizes}"
        );
    }

    // Each disk gets different content, checked after all writes. This detects an address that reaches another disk.
    for pass in ["fill", "check"] {
        guest.run_within_limit(
            Duration::from_secs(360),
            &format!(
                "seed=0; for d in /sys/block/sd*; do seed=$((seed+1)); \
                 guest-agent {pass} --file /dev/${{d##*/}} --seed $seed --writes 8 --depth 2 >/tmp/out || {{ echo $d; cat /tmp/out; exit 1; }}; done"
            ),
        )?;
    }
    let (first, second) = (guest.scsi_disk(0, 3, 0)?, guest.scsi_disk(3, 255, 16383)?);
    guest.ok(&format!(
        "guest-agent soak --file /dev/{first} --runtime 3 & guest-agent soak --file /dev/{second} --runtime 3 && wait $!"
    ))?;
    kernel_is_content(&mut guest)?;

    ensure_idle(&mut rig.daemon, &format!("{count} idle disks"), || Ok(()))
}
