//! `lunette vm latency` reports every layer of a guest. A disk's delay appears exactly in the layers that wait for it, and the parts of
//! requests sum to the application's latency. Trace events measure QEMU's devices. Needs: guests. Takes: 110 s.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, UserGuests, ensure};
use serde_json::Value;

/// Delay of the disk, far above the latency that a guest adds, even emulated on a busy machine.
const DELAY_NS: f64 = 60e6;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

#[test]
fn delay_is_measured_only_by_the_waiting_layers() -> Result<()> {
    let guests = UserGuests::new()?.with_bench()?;
    let folder = vm::workspace().join("target/vm-latency");
    std::fs::remove_dir_all(&folder).ok();
    let place = folder.display().to_string();
    let words = [
        "latency",
        "--polling=no",
        "--delay",
        "60ms",
        "--rw",
        "randread",
        "--time",
        "2.5",
        "--size",
        "16M",
    ];
    let printed = guests.ok(&[&words[..], &["--folder", &place, "--json"]].concat())?;
    let document: Value = serde_json::from_str(&printed)?;
    let studies = document["studies"].as_array().context("no studies")?;
    ensure!(studies.len() == 2, "{document}");
    let conditions = document["conditions"][0].as_str().unwrap_or_default();
    let disk =
        "a disk of 16M in memory that delays each I/O by 60ms, written before the measurement";
    ensure!(conditions.contains(disk), "{conditions}");
    for (study, guest_layers) in studies.iter().zip([3, 4]) {
        layers(study, guest_layers).with_context(|| study.to_string())?;
        parts(study).with_context(|| study.to_string())?;
    }
    std::fs::remove_dir_all(&folder)?;
    guests.nothing_is_left()
}

fn layers(study: &Value, guest_layers: usize) -> Result<()> {
    let layers = study["layers"].as_array().context("no layers")?;
    let waits = |layer: &Value| {
        let name = layer["layer"].as_str().unwrap_or_default();
        let is_whole = name.starts_with("Guest")
            || name.starts_with("Device")
            || name.starts_with("Block device");
        is_whole || name == "reaped"
    };
    let (mut of_guest, mut waiting) = (0, 0);
    for layer in layers {
        let (name, mean) = (&layer["layer"], number(&layer["mean_ns"]));
        if layer["why_not"].is_string() {
            ensure!(name == "Host kvm" || name == "Host, no guest", "{layer}");
            continue;
        }
        let (seen, all) = (number(&layer["requests"]), number(&layer["of_requests"]));
        // A device that is not asleep yet, on a busy machine, needs no notification.
        let is_seen = seen >= 0.9 * all || (name == "Guest virtio-pci" && seen >= 1.0);
        ensure!(all >= 10.0 && is_seen, "{layer}");
        of_guest += usize::from(name.as_str().is_some_and(|name| name.starts_with("Guest ")));
        match waits(layer) {
            true => {
                waiting += 1;
                ensure!((DELAY_NS..2.0 * DELAY_NS).contains(&mean), "{layer}");
            }
            false => ensure!(mean < DELAY_NS / 2.0, "{layer}"),
        }
    }
    // The guest has the application and the layers below. Also waiting: device, reaped and block device.
    ensure!(
        of_guest == guest_layers + 1 && waiting == of_guest + 3,
        "{of_guest} and {waiting} layers"
    );
    Ok(())
}

fn parts(study: &Value) -> Result<()> {
    let parts = study["parts"].as_array().context("no parts")?;
    let control = number(&study["matched_control_ns"]);
    // Only requests with a notification match: see above.
    ensure!(number(&study["matched"]) >= 3.0);
    let mut sum = 0.0;
    for part in parts {
        let mean = number(&part["mean_ns"]);
        sum += mean;
        let is_device = part["part"] == "kicked to interrupted";
        ensure!((mean >= DELAY_NS) == is_device, "{part}");
    }
    ensure!(
        sum > control * 0.95 && sum < control * 1.05,
        "{sum} of {control}"
    );
    Ok(())
}

/// Trace events measure QEMU's device: its I/O takes less than the device's total, and that takes less than the application waits.
#[test]
fn a_device_of_qemu_has_its_layers_too() -> Result<()> {
    let guests = UserGuests::new()?.with_bench()?;
    let folder = vm::workspace().join("target/vm-latency-qemu");
    std::fs::remove_dir_all(&folder).ok();
    let place = folder.display().to_string();
    for transport in ["blk", "scsi"] {
        let words = [
            "latency",
            "--device",
            "qemu",
            "--transport",
            transport,
            "--rw",
            "randread",
            "--time",
            "1",
            "--size",
            "16M",
            "--json",
            "--folder",
            &place,
        ];
        let printed = guests.ok(&words)?;
        let document: Value = serde_json::from_str(&printed)?;
        let layers = document["studies"][0]["layers"].as_array();
        let layers = layers.context("no layers")?;
        let mean = |name: &str| {
            let mut named = layers.iter();
            let found = named.find(|layer| {
                layer["layer"]
                    .as_str()
                    .is_some_and(|layer| layer.starts_with(name))
            });
            found.map_or(0.0, |layer| number(&layer["mean_ns"]))
        };
        let (application, device, io) = (
            mean("Guest application"),
            mean("Device (received"),
            mean("Block device (I/O"),
        );
        ensure!(
            0.0 < io && io < device && device < application,
            "{document}"
        );
    }
    let page = std::fs::read_to_string(folder.join("report.html"))?;
    ensure!(
        page.contains("<svg") && page.contains("Device (received"),
        "the page lacks the device"
    );
    let mut left: Vec<String> = Vec::new();
    for entry in std::fs::read_dir(&folder)? {
        left.push(entry?.file_name().to_string_lossy().into_owned());
    }
    left.sort();
    ensure!(!left.contains(&"qemu-trace.log".to_owned()), "{left:?}");
    std::fs::remove_dir_all(&folder)?;
    guests.nothing_is_left()
}
