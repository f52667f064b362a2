//! The control socket: state after a crash, object limits, many concurrent clients, and conformance to the OpenAPI document.
#![forbid(unsafe_code)]

use control::{Client, ClientError, Method};
use end_to_end::packages::succeeds;
use end_to_end::{Daemon, DaemonBuilder, Profile, Result, Rig, Scratch, bail, ensure};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use vhost_frontend::VerifiedLoad;
use vm::{lunette_program, workspace};

fn client(daemon: &Daemon) -> Client {
    Client::new(&daemon.control()).patient(Duration::from_secs(120))
}

fn status_of(answer: std::result::Result<(u16, Value), ClientError>) -> Result<u16> {
    match answer {
        Ok((status, _)) => Ok(status),
        Err(ClientError::Problem { problem }) => Ok(problem.status),
        Err(error) => bail!("no answer: {error}"),
    }
}

/// Returns the daemon's configuration in a comparable form.
fn objects(client: &Client) -> Result<Value> {
    let mut objects: Value = client.get("/v1/config")?;
    // The API returns objects in no fixed order.
    for kind in ["disks", "exports"] {
        if let Some(all) = objects[kind].as_array_mut() {
            all.sort_by_key(|one| one["name"].to_string());
        }
    }
    Ok(objects)
}

/// Steps at which a change can be interrupted: those of writing the state file and those of a resize.
const STEPS: [&str; 12] = [
    "before-keep",
    "created",
    "written",
    "synchronised",
    "renamed",
    "after-keep",
    "after-begin-resize",
    "created:2",
    "written:2",
    "synchronised:2",
    "renamed:2",
    "after-end-resize",
];

#[test]
fn after_a_crash_at_any_step_there_is_the_state_of_before_or_of_after() -> Result<()> {
    let changes: [(Method, &str, Value); 4] = [
        (
            Method::PUT,
            "/v1/disks/new",
            json!({"backend": "ram", "size": "1M"}),
        ),
        (Method::PUT, "/v1/exports/c/luns/4:0", json!({"disk": "b"})),
        (
            Method::PUT,
            "/v1/disks/a/size?force=true",
            json!({"size": 3 << 20}),
        ),
        (Method::DELETE, "/v1/exports/c/luns/0:0", Value::Null),
    ];
    let mut killed = 0;
    for step in STEPS {
        for (method, path, body) in &changes {
            let scratch = Scratch::new()?;
            let plain = DaemonBuilder::new(&scratch)
                .disk("a=file:a.raw,size=2M")
                .disk("b=ram:1M")
                .vhost_scsi("c")
                .lun("c/0:0=a");
            // The identities of new disks are persisted at the first start.
            plain.start()?.stop(Duration::from_secs(20))?;
            let wanted = format!("LUNETTE_FAULT={step}");
            let mut daemon = plain.clone().under(&["env", &wanted]).start()?;
            let before = match first_answer(&daemon) {
                Ok(before) => before,
                Err(error) => bail!("{step}: {error:#}\n{}", daemon.process().log_tail()),
            };
            let body = (!body.is_null()).then_some(body);
            let answer = client(&daemon).change(method.clone(), path, body);
            let after = match answer {
                // The change does not pass this step.
                Ok(_) => continue,
                Err(_) => {
                    let status = daemon.process().wait(Duration::from_secs(20))?;
                    ensure!(!status.success(), "it ended by itself: {status}");
                    killed += 1;
                    // Applies the same change to another daemon without a fault.
                    let other = Scratch::new()?;
                    let undisturbed = DaemonBuilder::new(&other)
                        .disk("a=file:a.raw,size=2M")
                        .disk("b=ram:1M")
                        .vhost_scsi("c")
                        .lun("c/0:0=a")
                        .start()?;
                    client(&undisturbed).change(method.clone(), path, body)?;
                    objects(&client(&undisturbed))?
                }
            };
            let again = match plain.start() {
                Ok(daemon) => daemon,
                Err(error) => bail!("{step}, {path}: does not start again: {error:#}"),
            };
            let now = strip_paths(first_answer(&again)?);
            let (before, after) = (strip_paths(before), strip_paths(after));
            ensure!(
                now == before || now == after,
                "{step}, {path}: {now}\nbefore {before}\nafter {after}"
            );
            let size = std::fs::metadata(scratch.file("a.raw"))?.len();
            let reported = now.pointer("/disks/0/size").and_then(Value::as_u64);
            ensure!(
                Some(size) == reported,
                "{step}, {path}: the file has {size} bytes, not {reported:?}"
            );
        }
    }
    ensure!(killed >= 24, "only {killed} crashes");
    Ok(())
}

/// Polls the API until the daemon answers. The log cannot show readiness, because it still has the lines of the previous daemon.
fn first_answer(daemon: &Daemon) -> Result<Value> {
    let begun = Instant::now();
    loop {
        match objects(&client(daemon)) {
            Ok(objects) => return Ok(objects),
            Err(error) if begun.elapsed() > Duration::from_secs(20) => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Removes socket paths, which differ between daemons.
fn strip_paths(mut objects: Value) -> Value {
    let exports = objects
        .pointer_mut("/exports")
        .and_then(Value::as_array_mut);
    for export in exports.into_iter().flatten() {
        if let Some(export) = export.as_object_mut() {
            export.remove("socket");
        }
    }
    objects
}

#[test]
fn sixteen_thousand_luns_come_in_one_call_and_survive_restart() -> Result<()> {
    const TARGETS: usize = 256;
    const LUNS: usize = 64;
    let mut rig = Rig::new(|daemon| daemon.vhost_scsi("c"))?;
    let resident = |rig: &mut Rig| -> Result<u64> {
        let id = rig.daemon.process().id();
        let status = std::fs::read_to_string(format!("/proc/{id}/status"))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let word = line.and_then(|line| line.split_whitespace().nth(1));
        Ok(word.unwrap_or("0").parse::<u64>()? * 1024)
    };
    let bare = resident(&mut rig)?;
    let name = |target: usize, lun: usize| format!("d{target}-{lun}");
    let all = || (0..TARGETS).flat_map(|target| (0..LUNS).map(move |lun| (target, lun)));
    let disks: Vec<Value> = all()
        .map(|(t, l)| json!({"name": name(t, l), "backend": "null", "size": "1M"}))
        .collect();
    let luns: Vec<Value> = all()
        .map(|(t, l)| json!({"target": t, "lun": l, "disk": name(t, l)}))
        .collect();
    let export = json!({"kind": "vhost-scsi", "name": "c", "socket": rig.socket("c"), "queues": 254, "lun": luns});
    let begun = Instant::now();
    let body = json!({"disks": disks, "exports": [export]});
    let (status, summary) = client(&rig.daemon).change(Method::PUT, "/v1/config", Some(&body))?;
    println!("one call: {:?}", begun.elapsed());
    ensure!(
        status == 200 && summary["luns_added"] == json!(TARGETS * LUNS),
        "{summary}"
    );
    let used = resident(&mut rig)?.saturating_sub(bare);
    println!(
        "resident memory: {} bytes a unit",
        used / (TARGETS * LUNS) as u64
    );
    rig.daemon.stop(Duration::from_secs(20))?;
    let begun = Instant::now();
    rig.daemon.start_again()?;
    println!("start with all of them: {:?}", begun.elapsed());
    let found: Vec<Value> = client(&rig.daemon).get("/v1/exports/c/luns")?;
    ensure!(
        found.len() == TARGETS * LUNS,
        "{} units came back",
        found.len()
    );
    // The history records two more seconds after a worker was awake.
    std::thread::sleep(Duration::from_secs(4));
    end_to_end::ensure_idle(
        &mut rig.daemon,
        &format!("{} idle units", TARGETS * LUNS),
        || Ok(()),
    )?;
    let alone = client(&rig.daemon).change(Method::DELETE, "/v1/disks/d0-0?force=true", None);
    ensure!(status_of(alone)? == 204);
    Ok(())
}

fn any_call(random: &mut fastrand::Rng) -> (Method, String, Option<Value>) {
    let disk = format!("x{}", random.u64(..8));
    let forced = ["", "?force=true", "?force=maybe"][random.u64(..3) as usize];
    match random.u64(..12) {
        0 => (Method::GET, "/v1/config".to_owned(), None),
        1 => (Method::GET, "/v1/status".to_owned(), None),
        2 => {
            let size = [1 << 20, 2 << 20, 7, -1][random.u64(..4) as usize];
            let body = json!({"backend": "ram", "size": size});
            (Method::PUT, format!("/v1/disks/{disk}{forced}"), Some(body))
        }
        3 => (Method::DELETE, format!("/v1/disks/{disk}{forced}"), None),
        4 => {
            let at = format!("{}:{}", random.u64(..300), random.u64(..4));
            let path = format!("/v1/exports/c/luns/{at}{forced}");
            (Method::PUT, path, Some(json!({ "disk": disk })))
        }
        5 => {
            let path = format!("/v1/exports/c/luns/{}:1{forced}", random.u64(..3));
            (Method::DELETE, path, None)
        }
        6 => {
            let size = (1 + random.u64(..4)) << 20;
            let path = format!("/v1/disks/{disk}/size{forced}");
            (Method::PUT, path, Some(json!({ "size": size })))
        }
        7 => (
            Method::PUT,
            format!("/v1/exports/{disk}"),
            Some(json!([disk, {"kind": 7}])),
        ),
        8 => (Method::GET, "/v1/nothing/here".to_owned(), None),
        9 => (Method::GET, "/v1/reservations".to_owned(), None),
        10 => (Method::POST, format!("/v1/config/reload{forced}"), None),
        _ => (Method::GET, format!("/v1/disks/{disk}"), None),
    }
}

#[test]
fn two_hundred_clients_at_once_disturb_neither_data_nor_each_other() -> Result<()> {
    const CLIENTS: u64 = 200;
    const CALLS: u64 = 20;
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("data=ram:32M")
            .vhost_blk("data")
            .vhost_scsi("c")
            .arguments(["--workers", "2"])
    })?;
    let (socket, control) = (rig.socket("data"), rig.daemon.control());
    let verified = std::thread::scope(|scope| -> Result<()> {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|seed| {
                let client = Client::new(&control).patient(Duration::from_secs(300));
                scope.spawn(move || -> Result<()> {
                    let mut random = fastrand::Rng::with_seed(seed);
                    for _ in 0..CALLS {
                        let (method, path, body) = any_call(&mut random);
                        let answer = client.change(method.clone(), &path, body.as_ref());
                        let status = status_of(answer)?;
                        ensure!(status < 500, "{method} {path} is answered {status}");
                    }
                    Ok(())
                })
            })
            .collect();
        // A data path client writes, reads back and compares at the same time.
        let load = VerifiedLoad::start(&socket)?;
        for client in clients {
            match client.join() {
                Ok(result) => result?,
                Err(_) => bail!("a client panicked"),
            }
        }
        let verified = load.finish()?;
        ensure!(verified > 0, "nothing was verified");
        println!("{verified} requests verified meanwhile");
        Ok(())
    });
    verified?;
    let before = objects(&client(&rig.daemon))?;
    rig.daemon.stop(Duration::from_secs(20))?;
    rig.daemon.start_again()?;
    let after = objects(&client(&rig.daemon))?;
    ensure!(before == after, "torn state: {before}\n{after}");
    Ok(())
}

/// Returns a Python program that scripts/setup installs.
fn python_program(name: &str) -> Result<std::path::PathBuf> {
    let program = workspace().join("build/python/bin").join(name);
    if !program.exists() {
        bail!(
            "there is no {}; hint: scripts/setup test",
            program.display()
        );
    }
    Ok(program)
}

#[test]
fn api_answers_match_the_documented_schema() -> Result<()> {
    const TOKEN: &str = "schemathesis-0123456789";
    let schemathesis = python_program("schemathesis")?;
    let own = rustix::process::geteuid().as_raw();
    let mut rig = Rig::prepared(|scratch, daemon| {
        use std::os::unix::fs::{PermissionsExt, chown};
        let token = scratch.file("token");
        std::fs::write(&token, TOKEN)?;
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600))?;
        let mut daemon = daemon
            .disk("d=ram:1M")
            .disk("e=ram:1M")
            .vhost_blk("d")
            .vhost_scsi("c")
            .lun("c/0:0=d")
            .arguments(["--api-listen", "127.0.0.1:0", "--token-file"])
            .arguments([token.to_string_lossy().as_ref()]);
        if own == 0 {
            // The fuzzer requests files and sockets at arbitrary paths, so the daemon runs as a user without rights elsewhere.
            for path in [scratch.files(), scratch.sockets(), &token] {
                chown(path, Some(NOBODY), Some(NOBODY))?;
            }
            open_the_way(scratch.sockets())?;
            let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
            let program = scratch.file("lunette");
            std::fs::copy(lunette_program(Profile::Dev)?, &program)?;
            open_the_way(&program)?;
            let wrapper = [&["setpriv"][..], &nobody].concat();
            daemon = daemon.program(&program).under(&wrapper);
        }
        Ok(daemon)
    })?;
    let log = rig.daemon.process().log();
    let address = log.lines().find_map(|line| line.split_once("address="));
    let Some((_, address)) = address else {
        bail!("nothing is served over TCP:\n{log}");
    };
    let report = rig.scratch.file("schemathesis.log");
    let mut command = std::process::Command::new(schemathesis);
    command
        .arg("run")
        .arg(format!("http://{}/v1/openapi.json", address.trim()))
        .args(["--header", &format!("Authorization: Bearer {TOKEN}")])
        // These event streams never end.
        .args(["--exclude-path", "/v1/events"])
        .args(["--exclude-path", "/v1/live"])
        // A schema cannot express every rule (for example, that a disk must exist), so valid documents may be refused.
        .args(["--checks", "all"])
        .args(["--exclude-checks", "positive_data_acceptance"])
        .args(["--max-time", "25", "--request-timeout", "60"])
        .args(["--continue-on-failure", "--no-shrink", "--no-color"])
        .args(["--generation-database", "none"])
        .current_dir(rig.scratch.files());
    let mut running = vm::Process::start("schemathesis", &command, &report)?;
    let status = running.wait(Duration::from_secs(500))?;
    let log = running.log();
    rig.daemon.process().check_running()?;
    ensure!(status.success(), "{status}:\n{log}");
    let tested = log.lines().filter(|line| line.contains("Tested:"));
    println!("{}", tested.collect::<Vec<_>>().join("\n"));
    Ok(())
}

/// Lists, adds and removes disks with a generated client, over the control socket `sys.argv[1]`.
const GENERATED_CLIENT: &str = r#"
import sys
import httpx
from lunette_client import Client
from lunette_client.api.default import list_disks, put_disk, remove_disk
from lunette_client.models import Disk, Problem

client = Client("http://lunette", httpx_args={"transport": httpx.HTTPTransport(uds=sys.argv[1])})
names = lambda: [disk.name for disk in list_disks.sync(client=client)]
assert names() == ["d"], names()
added = put_disk.sync("e", client=client, body=Disk.from_dict({"backend": "ram", "size": 1 << 20}))
assert isinstance(added, Disk) and added.size == 1 << 20, added
assert sorted(names()) == ["d", "e"], names()
refused = put_disk.sync("f", client=client, body=Disk.from_dict({"backend": "ram", "size": 7}))
assert isinstance(refused, Problem) and refused.errors[0].pointer == "/size", refused
assert remove_disk.sync_detailed("e", client=client).status_code == 204
assert names() == ["d"], names()
"#;

#[test]
fn generated_client_of_the_description_uses_the_api() -> Result<()> {
    let rig = Rig::new(|daemon| daemon.disk("d=ram:1M"))?;
    let description: Value = client(&rig.daemon).get("/v1/openapi.json")?;
    let (file, settings) = (
        rig.scratch.file("openapi.json"),
        rig.scratch.file("settings"),
    );
    std::fs::write(&file, description.to_string())?;
    // The generated files are not formatted.
    std::fs::write(&settings, "post_hooks: []\n")?;
    let mut validate = std::process::Command::new(python_program("openapi-spec-validator")?);
    succeeds(validate.arg(&file))?;
    let mut generate = std::process::Command::new(python_program("openapi-python-client")?);
    generate.args(["generate", "--fail-on-warning", "--meta", "none", "--path"]);
    generate.arg(&file).arg("--config").arg(&settings);
    let folder = rig.scratch.file("lunette_client");
    succeeds(generate.arg("--output-path").arg(folder))?;
    let mut uses = std::process::Command::new(python_program("python3")?);
    uses.args(["-c", GENERATED_CLIENT])
        .arg(rig.daemon.control());
    succeeds(uses.current_dir(rig.scratch.files()))?;
    Ok(())
}

const NOBODY: u32 = 65534;

/// Permits every user to reach a path below the folder for temporary files.
fn open_the_way(path: &std::path::Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let temporary = std::env::temp_dir();
    let mut next = Some(path);
    while let Some(open) = next.filter(|open| open.starts_with(&temporary) && *open != temporary) {
        std::fs::set_permissions(open, std::fs::Permissions::from_mode(0o755))?;
        next = open.parent();
    }
    Ok(())
}
