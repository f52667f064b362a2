//! `lunette vm mcs`: two directly connected guests, one session with one and with two connections.
//!
//! Needs: guests. Takes: 40 s.
#![forbid(unsafe_code)]

use end_to_end::{Profile, Result, ensure};
use serde_json::{Value, json};
use std::process::Command;

#[test]
fn a_session_between_two_guests_is_measured_with_each_number() -> Result<()> {
    let program = vm::lunette_program(Profile::Dev)?;
    let output = Command::new(program)
        .args(["vm", "mcs", "--json", "--connections", "2"])
        .args([
            "--size-mib",
            "4",
            "--bs",
            "64k",
            "--iodepth",
            "2",
            "--repetitions",
            "1",
            "--turn-ms",
            "700",
        ])
        .output()?;
    let error_text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{error_text}");
    let made: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(made["mtu"] == 9000, "{made}");
    for (key, value) in [
        ("MaxBurstLength", json!(262_144)),
        ("FirstBurstLength", json!(65_536)),
        ("ImmediateData", json!("Yes")),
        ("InitialR2T", json!("Yes")),
    ] {
        ensure!(made["agreed"][key] == value, "{key}: {made}");
    }
    let rows = made["rows"].as_array().map_or(&[][..], Vec::as_slice);
    let measured: Vec<_> = rows
        .iter()
        .map(|row| (row["case"].as_str(), row["connections"].as_u64()))
        .collect();
    let cases = ["read", "write", "both"].map(Some);
    let all = cases
        .iter()
        .flat_map(|case| [(*case, Some(1)), (*case, Some(2))]);
    ensure!(measured == all.collect::<Vec<_>>(), "{made}");
    for row in rows {
        let moved = row["bytes_per_second"][0].as_f64();
        ensure!(moved.is_some_and(|bytes| bytes > 0.0), "{row}");
    }
    ensure!(made["target_cpu_seconds"].as_f64() > Some(0.0), "{made}");
    Ok(())
}
