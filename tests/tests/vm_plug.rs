//! `lunette vm plug` and `unplug`: whole devices are added and removed while a guest runs and writes to another one.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, UserGuests, ensure};
use std::process::Stdio;

const ROUNDS: u32 = 20;

/// Returns a script that waits until `test` holds.
fn until(test: &str) -> String {
    format!("i=0; until {test}; do i=$((i+1)); [ $i -lt 600 ] || exit 1; sleep 0.05; done")
}

#[test]
fn virtio_blk_device_comes_and_goes_20_times_under_io() -> Result<()> {
    let guests = UserGuests::new()?;
    let machine = ["--smp", "2", "--memory", "256M", "--spare-ports", "1"];
    let run = [
        "run",
        "--detach",
        "--name",
        "plug",
        "blk:1",
        "scsi:1x1,via=qemu",
    ];
    let folder = guests.file("disks");
    std::fs::create_dir(&folder)?;
    let backing = format!("backing=file:{},size=32M", folder.display());
    guests.ok(&[&run[..], &machine, &[&backing]].concat())?;
    let exec = |script: &str| guests.ok(&["exec", "plug", script]);
    let load = "n=1; until [ -e /tmp/stop ]; do guest-agent soak --file /dev/vda --seed $n --depth 2 --pause 5 --runtime 3 || exit 1; n=$((n+1)); done";
    let mut soak = guests.command(&["exec", "plug", load]);
    let soak = soak.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;

    for round in 0..ROUNDS {
        let plugged = guests.ok(&["plug", "plug", "blk", "hot=ram:16M"])?;
        ensure!(plugged == "blk hot at spare1\n", "{plugged}");
        exec(&until("[ -b /dev/vdb ]"))?;
        if round == 0 {
            let full = guests.refused(&["plug", "plug", "blk", "other=ram:16M"])?;
            ensure!(
                full.contains("guest plug (q35) has no free port, 1 are in use"),
                "{full}"
            );
            let twice = guests.refused(&["plug", "plug", "scsi", "--via-qemu", "hot"])?;
            ensure!(twice.contains("hot is already plugged in"), "{twice}");
            ensure!(guests.ok(&["list"])?.contains("+blk:hot"));
            exec("guest-agent soak --file /dev/vdb --seed 9 --runtime 1")?;
        }
        guests.ok(&["unplug", "plug", "hot"])?;
        exec(&until("! [ -e /sys/block/vdb ]"))?;
    }

    // A disk of QEMU on a controller of QEMU, besides the existing one.
    let file = guests.file("cold.raw");
    std::fs::File::create(&file)?.set_len(8 << 20)?;
    let file = file.display().to_string();
    guests.ok(&["plug", "plug", "scsi", "--via-qemu", &file])?;
    exec(&until(
        "[ -b /dev/sdb ] && [ $(cat /sys/block/sdb/size) = 16384 ]",
    ))?;
    guests.ok(&["unplug", "plug", &file])?;
    exec(&until("! [ -e /sys/block/sdb ]"))?;

    exec("touch /tmp/stop")?;
    let soaked = soak.wait_with_output()?;
    let report = String::from_utf8_lossy(&soaked.stdout);
    ensure!(
        soaked.status.success(),
        "{report}{}",
        String::from_utf8_lossy(&soaked.stderr)
    );
    let all = report.lines().count();
    let good = report
        .lines()
        .filter(|line| line.contains("\"mismatches\":0"))
        .count();
    ensure!(all > 0 && all == good, "{report}");
    let complaints = exec(
        "dmesg | grep -E 'I/O error|Call Trace|BUG:|blocked for more|timed out' | grep -v vdb; true",
    )?;
    ensure!(complaints.is_empty(), "{complaints}");
    // The daemon has no disks of the removed devices.
    let control = guests
        .state("plug")
        .context("it is gone")?
        .control
        .context("no daemon")?;
    let disks: Vec<serde_json::Value> = control::get(&control, "/v1/disks")?;
    ensure!(disks.len() == 1, "{disks:?}");
    guests.ok(&["stop", "plug"])?;
    guests.nothing_is_left()
}
