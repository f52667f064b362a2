//! `lunette doctor`: findings of recorded hosts, profiles, and exit codes for scripts. Needs: nothing. Takes: 2 s.
#![forbid(unsafe_code)]

use end_to_end::{Context, Profile, Result, Scratch, ensure};
use serde_json::Value;
use std::process::{Command, Output};
use vm::workspace;

fn doctor(words: &[&str]) -> Result<Output> {
    let program = vm::lunette_program(Profile::Dev)?;
    let mut command = Command::new(program);
    command.arg("doctor").args(words);
    command.output().context("lunette doctor")
}

fn recorded(host: &str) -> String {
    let path = workspace().join(format!("crates/doctor/hosts/{host}.txt"));
    path.display().to_string()
}

fn json(words: &[&str]) -> Result<Vec<Value>> {
    let output = doctor(words)?;
    let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
    serde_json::from_slice(&output.stdout).with_context(|| format!("{words:?}: {error_text}"))
}

#[test]
fn findings_come_with_a_reason_and_a_command_and_exit_code_1() -> Result<()> {
    let laptop = recorded("laptop");
    let output = doctor(&["--from", &laptop])?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(
        output.status.code() == Some(1),
        "{:?}\n{text}",
        output.status
    );
    for line in [
        "Worth changing",
        "  storage: nvme0n1 has the I/O scheduler mq-deadline",
        "      $ echo none > /sys/block/nvme0n1/queue/scheduler",
        "7 things are worth changing.",
    ] {
        ensure!(
            text.lines().any(|one| one == line),
            "no {line:?} in:\n{text}"
        );
    }
    let findings = json(&["--from", &laptop, "--json"])?;
    let worth = findings
        .iter()
        .filter(|finding| finding["worth_changing"] == true);
    ensure!(worth.count() == 7, "{findings:?}");
    ensure!(findings.iter().all(|finding| {
        finding["why"]
            .as_str()
            .is_some_and(|why| why.ends_with('.'))
    }));
    Ok(())
}

#[test]
fn host_without_findings_exits_0_and_records_can_be_read() -> Result<()> {
    let scratch = Scratch::new()?;
    let fine = scratch.file("fine.txt");
    std::fs::write(&fine, "--- /dev/kvm\n--- /proc/cmdline\nquiet\n")?;
    let output = doctor(&["--from", &fine.display().to_string()])?;
    ensure!(output.status.success(), "{output:?}");
    ensure!(
        output.stdout == b"Nothing here is worth changing.\n",
        "{output:?}"
    );

    let record = scratch.file("this.txt").display().to_string();
    ensure!(doctor(&["--record", &record])?.status.success());
    let (here, there) = (json(&["--json"])?, json(&["--from", &record, "--json"])?);
    let checks = |findings: &[Value]| {
        findings
            .iter()
            .map(|f| f["check"].to_string())
            .collect::<Vec<_>>()
    };
    // Steal time and similar values change every second and are reported above a threshold only.
    ensure!(checks(&here) == checks(&there), "{here:?}\n{there:?}");
    Ok(())
}

#[test]
fn profile_is_shown_as_a_diff_and_applied_only_on_request() -> Result<()> {
    let output = doctor(&["--profile", "iscsi-10g", "--from", &recorded("xeon")])?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.code() == Some(1), "{text}");
    ensure!(
        text.contains("- net.core.rmem_max = 212992\n+ net.core.rmem_max = 16777216   #"),
        "{text}"
    );
    // A host may exceed a profile's values.
    let rows = json(&[
        "--profile",
        "iscsi-10g",
        "--from",
        &recorded("epyc"),
        "--json",
    ])?;
    let of = |name: &str| {
        rows.iter()
            .find(|row| row["name"] == name)
            .map(|row| row["differs"].clone())
    };
    ensure!(
        of("net.core.rmem_max") == Some(Value::Bool(false)),
        "{rows:?}"
    );
    let unknown = doctor(&["--profile", "fast"])?;
    let error_text = String::from_utf8_lossy(&unknown.stderr).into_owned();
    ensure!(
        unknown.status.code() == Some(2) && error_text.contains("hint: iscsi-10g"),
        "{error_text}"
    );
    Ok(())
}

#[test]
fn disks_that_are_named_are_looked_at() -> Result<()> {
    let scratch = Scratch::new()?;
    let file = scratch.file("d.raw");
    std::fs::File::create(&file)?.set_len(64 << 20)?;
    let findings = json(&[&file.display().to_string(), "--json"])?;
    let sparse = findings.iter().find(|finding| finding["check"] == "sparse");
    ensure!(
        sparse.is_some_and(|f| f["command"]
            .as_str()
            .is_some_and(|c| c.starts_with("fallocate -l 67108864"))),
        "{findings:?}"
    );
    let missing = doctor(&["/nowhere/d.raw"])?;
    let error_text = String::from_utf8_lossy(&missing.stderr).into_owned();
    ensure!(
        missing.status.code() == Some(1) && error_text.contains("/nowhere/d.raw: No such file"),
        "{error_text}"
    );
    Ok(())
}
