//! `lunette vm profile` and `lunette vm compare --preset`: finds the functions of a guest's kernel that serve requests, with one queue
//! and with two, and compares programs on a file system with bare metal. Needs: guests. Takes: 90 s.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, UserGuests, ensure};
use serde_json::Value;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

#[test]
fn functions_of_guests_with_one_queue_and_with_two_are_found() -> Result<()> {
    let guests = UserGuests::new()?.with_bench()?;
    let folder = vm::workspace().join("target/vm-profile");
    std::fs::remove_dir_all(&folder).ok();
    let place = folder.display().to_string();
    let words = [
        "profile",
        "--transport",
        "blk",
        "--queues",
        "1,2",
        "--smp",
        "2",
        "--disks",
        "2",
        "--time",
        "2",
        "--size",
        "16M",
        "--json",
        "--folder",
        &place,
    ];
    let printed = guests.ok(&words)?;
    let document: Value = serde_json::from_str(&printed)?;
    let runs = document["runs"].as_array().context("no runs")?;
    ensure!(runs.len() == 2, "{document}");
    for run in runs {
        let functions = run["guest"]["functions"].as_array();
        let functions = functions.context("no functions")?;
        let shares: f64 = functions.iter().map(|one| number(&one["share"])).sum();
        ensure!((shares - 1.0).abs() < 1e-6, "{run}");
        // Every request passes the driver's function, independent of other kernel activity.
        let stacks = run["guest"]["stacks"].as_object().context("no stacks")?;
        let queues_requests = stacks.keys().any(|stack| stack.contains("virtio_queue_rq"));
        ensure!(queues_requests, "{run}");
        ensure!(number(&run["guest"]["samples"]) >= 100.0, "{run}");
        let around = &run["around"];
        ensure!(number(&around["iops"]) > 0.0, "{run}");
        let interrupts = number(&around["interrupts_per_io"]);
        ensure!(interrupts > 0.0 && interrupts < 3.0, "{run}");
        let reason = around["exits_reason"].as_str().unwrap_or_default();
        ensure!(
            around["exits_per_io"].is_number() || !reason.is_empty(),
            "{run}"
        );
        // The host profile has the permitted samples or a reason.
        let host = &run["host"];
        ensure!(
            number(&host["samples"]) > 0.0 || host["reason"].is_string(),
            "{run}"
        );
    }
    for name in ["guest-1-queues.svg", "guest-2-queues.svg"] {
        let svg = std::fs::read_to_string(folder.join(name))?;
        ensure!(
            svg.contains("<svg") && svg.contains("virtio_queue_rq"),
            "{name}"
        );
    }
    std::fs::remove_dir_all(&folder)?;
    guests.nothing_is_left()
}

#[test]
fn programs_on_a_file_system_are_compared_with_bare_metal() -> Result<()> {
    let guests = UserGuests::new()?.with_bench()?;
    let folder = vm::workspace().join("target/vm-presets");
    std::fs::remove_dir_all(&folder).ok();
    let place = folder.display().to_string();
    let words = [
        "compare",
        "--preset",
        "mail",
        "--threads",
        "1,2",
        "--turns",
        "1",
        "--turn-time",
        "0.5",
        "--size",
        "48M",
        "--smp",
        "1",
        "--ways",
        "Lunette virtio-blk",
        "--json",
        "--folder",
        &place,
    ];
    let printed = guests.ok(&words)?;
    let document: Value = serde_json::from_str(&printed)?;
    let cells = document["cells"].as_array().context("no cells")?;
    // The host and one way, one and two threads, with and without barriers.
    ensure!(cells.len() == 8, "{document}");
    for cell in cells {
        ensure!(number(&cell["iops"]["median"]) > 0.0, "{cell}");
        ensure!(number(&cell["p99_ns"]) >= number(&cell["p50_ns"]), "{cell}");
    }
    let case = |name: &str| cells.iter().any(|cell| cell["case"] == name);
    ensure!(
        case("mail, 2 threads") && case("mail, 1 thread, no barriers"),
        "{document}"
    );
    let page = std::fs::read_to_string(folder.join("report.html"))?;
    ensure!(
        page.contains("mail, 2 threads, no barriers"),
        "the page lacks a table"
    );
    std::fs::remove_dir_all(&folder)?;
    guests.nothing_is_left()
}
