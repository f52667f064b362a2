//! Server-sent events: every change is reported in order, and a slow client delays neither the daemon nor other clients.
#![forbid(unsafe_code)]

use control::{Client, Method};
use end_to_end::http::Events;
use end_to_end::{Context, Daemon, IscsiSession, Result, Rig, bail, client, ensure};
use serde_json::{Value, json};
use std::time::Duration;

const TARGET: &str = "iqn.2026-11.org.example:t0";

fn api(daemon: &Daemon) -> Client {
    Client::new(&daemon.control()).patient(Duration::from_secs(120))
}

/// Waits for the next event, checks its name and fields, and returns its data.
fn expect(events: &mut Events, event: &str, fields: &Value) -> Result<Value> {
    let (heard, data) = events.hear()?;
    let data: Value = serde_json::from_str(&data)?;
    ensure!(heard == event, "{heard} instead of {event}: {data}");
    ensure!(data["event"] == event, "{data}");
    for (key, value) in fields.as_object().into_iter().flatten() {
        ensure!(data[key] == *value, "{event}: {key} of {data}");
    }
    Ok(data)
}

#[test]
fn every_change_is_reported_in_order() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("d=ram:1M")
            .vhost_blk("d")
            .vhost_scsi("c")
            .arguments(["--iscsi", &format!("{TARGET}=d")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
    })?;
    let mut events = Events::listen(&rig.daemon.control())?;
    let run = |words: &[&str]| rig.daemon.lunette(words);
    run(&["disk", "add", "e=ram:1M"])?;
    run(&["disk", "resize", "e", "2M"])?;
    run(&["disk", "limit", "e", "iops=100"])?;
    run(&["lun", "add", "c", "4:7", "e"])?;
    run(&["lun", "remove", "c", "4:7"])?;
    let socket = rig.scratch.socket("e.sock").display().to_string();
    run(&["export", "add", "vhost-blk", &format!("e:{socket}")])?;
    run(&["export", "remove", "e"])?;
    run(&["disk", "remove", "e"])?;
    let mut last = 0;
    for (event, fields) in [
        ("disk.added", json!({"name": "e"})),
        ("disk.resized", json!({"name": "e", "size": 2 << 20})),
        ("disk.limited", json!({"name": "e"})),
        (
            "lun.added",
            json!({"name": "c", "target": 4, "lun": 7, "disk": "e"}),
        ),
        (
            "lun.removed",
            json!({"name": "c", "target": 4, "lun": 7, "disk": "e"}),
        ),
        ("export.added", json!({"name": "e"})),
        ("export.removed", json!({"name": "e"})),
        ("disk.removed", json!({"name": "e"})),
    ] {
        let data = expect(&mut events, event, &fields)?;
        let id = data["id"].as_u64().unwrap_or(0);
        ensure!(id == last + 1, "{event} has number {id} after {last}");
        last = id;
    }

    // Sessions of both transports open and close without a change by the API.
    let front_end = json!({"name": "d", "session": "vhost-d"});
    let mut session = client::Client::connect(&rig.socket("d"))?;
    session.features()?;
    expect(&mut events, "session.opened", &front_end)?;
    let listed: Vec<Value> = api(&rig.daemon).get("/v1/sessions")?;
    ensure!(
        listed[0]["front_end"]["pid"] == std::process::id(),
        "{listed:?}"
    );
    let shown = rig.daemon.lunette(&["session", "list"])?;
    let process = format!("pid {}, user ", std::process::id());
    ensure!(shown.contains(&process), "{shown}");
    drop(session);
    expect(&mut events, "session.closed", &front_end)?;

    let portal = rig.iscsi_portal(TARGET)?;
    let session = IscsiSession::login(&portal, TARGET, 7)?;
    let initiator = json!({"name": TARGET, "initiator": "iqn.2026-11.org.example:i7"});
    let opened = expect(&mut events, "session.opened", &initiator)?;
    let listed: Vec<Value> = api(&rig.daemon).get("/v1/sessions")?;
    let id = opened["session"].clone();
    ensure!(listed.iter().any(|one| one["id"] == id), "{listed:?}");
    let shown = rig.daemon.lunette(&["session", "list"])?;
    let client = " iqn.2026-11.org.example:i7 at 127.0.0.1 ";
    ensure!(shown.contains(client), "{shown}");
    drop(session);
    let closed = expect(&mut events, "session.closed", &initiator)?;
    ensure!(closed["session"] == id, "{closed}");

    // A session that the API removes.
    let _session = IscsiSession::login(&portal, TARGET, 8)?;
    let opened = expect(&mut events, "session.opened", &json!({}))?;
    let id = opened["session"].as_str().unwrap_or_default();
    rig.daemon.lunette(&["session", "remove", id])?;
    expect(&mut events, "session.closed", &json!({"session": id}))?;
    Ok(())
}

#[test]
fn slow_listener_is_told_the_number_of_missed_events() -> Result<()> {
    const UNITS: u16 = 4000;
    const ROUNDS: usize = 4;
    let mut rig = Rig::new(|daemon| daemon.disk("d=null:1M").vhost_scsi("c"))?;
    let mut slow = Events::listen(&rig.daemon.control())?;
    let api = api(&rig.daemon);
    let luns: Vec<Value> = (0..UNITS)
        .map(|lun| json!({"target": 0, "lun": lun, "disk": "d"}))
        .collect();
    let resident = |rig: &mut Rig| -> Result<u64> {
        let id = rig.daemon.process().id();
        let status = std::fs::read_to_string(format!("/proc/{id}/status"))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let word = line.and_then(|line| line.split_whitespace().nth(1));
        Ok(word.unwrap_or("0").parse::<u64>()? * 1024)
    };
    let mut after_first = 0;
    for round in 0..ROUNDS {
        // Each of these changes causes four thousand events.
        for luns in [&luns[..], &[]] {
            let path = "/v1/exports/c/luns";
            api.change(Method::PUT, path, Some(&json!(luns)))?;
            // On a busy machine a removal may take longer than its call waits.
            let is_made = || {
                let now: Vec<Value> = api.get(path).ok()?;
                (now.len() == luns.len()).then_some(())
            };
            let made = vm::wait_until(Duration::from_secs(60), is_made);
            made.context("the change is not made")?;
        }
        if round == 0 {
            after_first = resident(&mut rig)?;
        }
    }
    let grown = resident(&mut rig)?.saturating_sub(after_first);
    ensure!(grown < 32 << 20, "it grew by {grown} bytes");
    // The events in the socket and the bounded backlog arrive in order, and a `missed` event reports the gap.
    let all = u64::from(UNITS) * 2 * ROUNDS as u64;
    let (mut next, mut missed) = (1, 0);
    while next <= all {
        let (event, data) = slow.hear()?;
        if event == "missed" {
            let count: u64 = data.parse()?;
            missed += count;
            next += count;
            continue;
        }
        let data: Value = serde_json::from_str(&data)?;
        let id = data["id"].as_u64().unwrap_or(0);
        if id != next {
            bail!("event {id} after {} without a report of a gap", next - 1);
        }
        next += 1;
    }
    ensure!(missed > 0, "all {all} events were kept for it");
    Ok(())
}

/// The stream delivers status and counters periodically, and changes in between.
#[test]
fn live_stream_has_continuous_moments_and_events() -> Result<()> {
    let rig = Rig::new(|daemon| daemon.disk("d=ram:1M").vhost_blk("d"))?;
    let mut live = Events::listen_at(&rig.daemon.control(), "/v1/live")?;
    let mut moment = || -> Result<Value> {
        let (heard, data) = live.hear()?;
        ensure!(heard == "moment", "{heard}: {data}");
        Ok(serde_json::from_str(&data)?)
    };
    let (first, second) = (moment()?, moment()?);
    for moment in [&first, &second] {
        ensure!(moment["status"]["disks"][0]["name"] == "d", "{moment}");
        ensure!(moment["status"]["may_change"] == true, "{moment}");
    }
    let at = |moment: &Value| moment["statistics"]["at_ns"].as_u64();
    ensure!(at(&first) < at(&second), "{first} then {second}");
    rig.daemon.lunette(&["disk", "add", "e=ram:1M"])?;
    let mut heard = Vec::new();
    while heard.last().is_none_or(|event| event == "moment") {
        heard.push(live.hear()?.0);
    }
    ensure!(heard.last().is_some_and(|event| event == "disk.added"));
    let (_, after) = live.hear()?;
    let after: Value = serde_json::from_str(&after)?;
    ensure!(after["status"]["disks"][1]["name"] == "e", "{after}");
    Ok(())
}

/// Returns how often a thread of the daemon has gone to sleep.
fn sleeps(pid: u32, thread: &str) -> Result<u64> {
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let folder = task?.path();
        if std::fs::read_to_string(folder.join("comm"))?.trim() != thread {
            continue;
        }
        let status = std::fs::read_to_string(folder.join("status"))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        return Ok(line.context("no line")?.trim().parse()?);
    }
    bail!("no thread {thread}")
}

/// A load that begins after a pause is recorded from its first second on, and an idle daemon does not wake up for its history.
#[test]
fn history_records_activity_and_costs_nothing_without() -> Result<()> {
    let rig = Rig::new(|daemon| daemon.disk("d=ram:1M").vhost_blk("d"))?;
    let history = || -> Result<Value> {
        let path = "/v1/history?disk=d&interval=second";
        Ok(control::get(&rig.daemon.control(), path)?)
    };
    let status: control::Status = control::get(&rig.daemon.control(), "/v1/status")?;
    let pid = status.pid;
    let is_asleep = || {
        let before = sleeps(pid, "history").ok()?;
        std::thread::sleep(Duration::from_secs(3));
        (sleeps(pid, "history").ok()? == before).then_some(())
    };
    for round in 1..3 {
        vm::wait_until(Duration::from_secs(60), is_asleep).context("it does not sleep")?;
        let load = vhost_frontend::VerifiedLoad::start(&rig.socket("d"))?;
        load.expect_progress(Duration::from_secs(60))?;
        let seconds = |found: &Value| found["at"].as_array().map_or(0, Vec::len);
        let found = vm::wait_until(Duration::from_secs(60), || {
            history().ok().filter(|found| seconds(found) >= 3 * round)
        });
        let found = found.with_context(|| format!("{:?}", history()))?;
        ensure!(load.finish()? > 0);
        let sum = |name: &str| -> u64 {
            let values = found[name].as_array().into_iter().flatten();
            values.filter_map(Value::as_u64).sum()
        };
        ensure!(sum("writes") > 0 && sum("p99_ns") > 0, "{found}");
    }
    let unknown = control::get::<Value>(&rig.daemon.control(), "/v1/history?disk=x");
    ensure!(unknown.is_err());
    Ok(())
}
