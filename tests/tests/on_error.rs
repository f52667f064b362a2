//! A full device with `on_error`: I/O waits instead of failing, also through a restart, and continues when there is space.
#![forbid(unsafe_code)]

use end_to_end::rig::kernel_is_content;
use end_to_end::{
    Context, GuestBuilder, IscsiSession, Result, Rig, Scratch, SmallFileSystem, ensure,
};
use iscsi::initiator::CommandDone;
use serde_json::Value;
use std::time::Duration;
use vm::wait_until;

const TARGET: &str = "iqn.2026-11.org.example:t0";

fn disk(rig: &Rig, name: &str) -> Result<Value> {
    Ok(control::get(
        &rig.daemon.control(),
        &format!("/v1/disks/{name}"),
    )?)
}

fn waiting(rig: &Rig, name: &str) -> Option<u64> {
    disk(rig, name).ok()?["status"]["waiting"].as_u64()
}

fn wait_for_waiting(rig: &mut Rig, name: &str) -> Result<()> {
    let waits = wait_until(Duration::from_secs(60), || {
        waiting(rig, name).filter(|count| *count > 0)
    });
    waits.with_context(|| {
        let shown = disk(rig, name);
        let log = rig.daemon.process().log_tail();
        format!("no I/O of {name} waits: {shown:?}\n{log}")
    })?;
    Ok(())
}

#[test]
fn full_device_under_verified_load_costs_no_error_or_write() -> Result<()> {
    let scratch = Scratch::new()?;
    let small = SmallFileSystem::mount(&scratch)?;
    let wrapper = small.wrapper(&scratch);
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    let folder = SmallFileSystem::folder(&scratch);
    let file = |name: &str, size: &str, more: &str| {
        let path = folder.join(name);
        format!(
            "{name}=file:{},size={size},cache=writeback{more}",
            path.display()
        )
    };
    let mut rig = Rig::new(|daemon| {
        daemon
            .under(&wrapper)
            .disk(&file("pad", "20M", ""))
            .disk(&file("b", "8M", ",on_error=stop"))
            .disk(&file("s", "8M", ",on_error=enospc"))
            .vhost_blk("pad")
            .vhost_blk("b")
            .vhost_scsi("c")
            .lun("c/0:0=s")
    })?;
    let mut guest = GuestBuilder::new("full")
        .cpus(2)
        .vhost_user_blk(&rig.socket("pad"), 1)
        .vhost_user_blk(&rig.socket("b"), 1)
        .vhost_user_scsi(&rig.socket("c"), 1)
        .boot()?;
    guest.wait_for_disks(&["vda", "vdb", "sda"])?;
    guest.ok("dd if=/dev/zero bs=1M count=20 2>/dev/null | tr '\\0' x | dd of=/dev/vda bs=1M iflag=fullblock oflag=direct 2>&1")?;
    let load = "--writes 2000 --bs 8192 --depth 8";
    let fill =
        |disk: &str, seed: u32| format!("guest-agent fill --file /dev/{disk} --seed {seed} {load}");
    let patience = Duration::from_secs(120);
    let check = |disk: &str, seed: u32| format!("check --file /dev/{disk} --seed {seed} {load}");

    let scsi = guest.start(&fill("sda", 62))?;
    wait_for_waiting(&mut rig, "s")?;
    let shown = rig.daemon.lunette(&["disk", "show", "s"])?;
    ensure!(
        shown.contains("hint: lunette disk resume s") && shown.contains("no space left"),
        "{shown}"
    );
    let status = rig.daemon.ask(&["status"])?;
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(
        !status.status.success() && text.contains("lunette disk resume s"),
        "{text}"
    );
    // Without free space the write continues to wait.
    rig.daemon.lunette(&["disk", "resume", "s"])?;
    wait_for_waiting(&mut rig, "s")?;
    guest.ok("/tools/blkdiscard --length 8388608 /dev/vda")?;
    rig.daemon.lunette(&["disk", "resume", "s"])?;
    guest
        .wait_ok(scsi, patience)
        .with_context(|| rig.daemon.process().log_tail())?;
    guest.io_ok(&check("sda", 62))?;

    // Now half of the other disk's data fits. A daemon that stops leaves waiting requests to its successor, and the guest sees no
    // error.
    let blk = guest.start(&fill("vdb", 61))?;
    wait_for_waiting(&mut rig, "b")?;
    let ended = rig.daemon.stop(Duration::from_secs(30))?;
    ensure!(
        ended.success(),
        "{ended}: {}",
        rig.daemon.process().log_tail()
    );
    rig.daemon.start_again()?;
    wait_for_waiting(&mut rig, "b")?;
    guest.ok("/tools/blkdiscard /dev/vda")?;
    rig.daemon.lunette(&["disk", "resume", "b"])?;
    guest
        .wait_ok(blk, patience)
        .with_context(|| rig.daemon.process().log_tail())?;
    guest.io_ok(&check("vdb", 61))?;
    ensure!((waiting(&rig, "b"), waiting(&rig, "s")) == (Some(0), Some(0)));
    kernel_is_content(&mut guest)
}

#[test]
fn iscsi_write_to_a_full_device_waits_and_is_resumed() -> Result<()> {
    let scratch = Scratch::new()?;
    let small = SmallFileSystem::mount(&scratch)?;
    let wrapper = small.wrapper(&scratch);
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    let folder = SmallFileSystem::folder(&scratch).display().to_string();
    let mut rig = Rig::new(|daemon| {
        daemon
            .under(&wrapper)
            .disk(&format!(
                "d=file:{folder}/d,size=32M,cache=writeback,on_error=stop"
            ))
            .arguments(["--iscsi", &format!("{TARGET}=d")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
    })?;
    let portal = rig.iscsi_portal(TARGET)?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    // 23 MiB fit.
    for block in (0..92).map(|number| number * 512) {
        let done = write(&mut session, block)?;
        ensure!(done.status == 0, "block {block}: {done:?}");
    }
    let writer = std::thread::spawn(move || {
        let last = (92..112).map(|number| number * 512);
        last.map(|block| Ok(write(&mut session, block)?.status))
            .collect::<Result<Vec<u8>>>()
    });
    wait_for_waiting(&mut rig, "d")?;
    // Another session frees 8 MiB: UNMAP of one range.
    let mut other = IscsiSession::login(&portal, TARGET, 2)?;
    let mut list = vec![0; 24];
    list[1] = 22;
    list[3] = 16;
    list[16..20].copy_from_slice(&16384_u32.to_be_bytes());
    let unmap = [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0];
    let done = other.command(&unmap, Some(&list), 0)?;
    ensure!(done.status == 0, "{done:?}");
    rig.daemon.lunette(&["disk", "resume", "d"])?;
    let statuses = writer.join().map_err(panicked)??;
    ensure!(statuses.iter().all(|status| *status == 0), "{statuses:?}");
    ensure!(waiting(&rig, "d") == Some(0));

    // Half of the freed space is left. The daemon stops while the next write waits, and the session ends with it.
    let writer = std::thread::spawn(move || {
        (0..32).try_for_each(|number| write(&mut other, number * 512).map(drop))
    });
    wait_for_waiting(&mut rig, "d")?;
    let ended = rig.daemon.stop(Duration::from_secs(30))?;
    ensure!(
        ended.success(),
        "{ended}: {}",
        rig.daemon.process().log_tail()
    );
    let written = writer.join().map_err(panicked)?;
    ensure!(written.is_err(), "all was written");
    Ok(())
}

/// WRITE(10) of 256 KiB.
fn write(session: &mut IscsiSession, block: u32) -> Result<CommandDone> {
    let mut cdb = [0x2a, 0, 0, 0, 0, 0, 0, 2, 0, 0];
    cdb[2..6].copy_from_slice(&block.to_be_bytes());
    session.command(&cdb, Some(&vec![3; 256 << 10]), 0)
}

fn panicked<T>(_: T) -> std::io::Error {
    std::io::Error::other("the writer panicked")
}
