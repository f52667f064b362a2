//! Listeners that cannot be opened at the start, because a port is in use or a folder is missing, wait and open later. Configuration
//! errors refuse the start. Mode, owner and group of vhost-user sockets.
#![forbid(unsafe_code)]

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use control::{Client, Status};
use end_to_end::http::{self, Events};
use end_to_end::{Context, IscsiSession, Result, Rig, Scratch, client, ensure};
use serde_json::Value;

const TARGET: &str = "iqn.2026-11.org.example:later";

/// Reads events until all of `wanted` have arrived.
fn hear_all(events: &mut Events, wanted: &[(&str, &str)]) -> Result<()> {
    let mut missing = wanted.to_vec();
    while !missing.is_empty() {
        let (event, data) = events.hear()?;
        let data: Value = serde_json::from_str(&data)?;
        missing.retain(|(name, of)| *name != event || data["name"] != *of);
    }
    Ok(())
}

/// Checks that `lunette status` fails and lists these listeners.
fn check_status(rig: &Rig, listeners: &[String]) -> Result<()> {
    let shown = rig.daemon.ask(&["status"])?;
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    ensure!(!shown.status.success(), "all is well: {text}");
    for listener in listeners {
        let line = format!("{listener} is not open: ");
        ensure!(text.contains(&line), "no line {line:?} in {text}");
    }
    Ok(())
}

/// Checks the answer of the readiness probe, which has no other data. The workers make progress.
fn check_probes(rig: &Rig, is_ready: bool) -> Result<()> {
    let probe = |path| {
        let stream = UnixStream::connect(rig.daemon.control())?;
        http::ask(stream, "GET", path, &[], "")
    };
    let readiness = probe("/readyz")?;
    let expected = match is_ready {
        true => readiness.status == 200 && readiness.body == "ok\n",
        false => readiness.status == 503 && readiness.body.contains("\"not ok\""),
    };
    ensure!(expected, "{readiness:?}");
    ensure!(probe("/healthz")?.status == 200);
    Ok(())
}

/// Checks that a change leaves waiting listeners waiting, and that a new listener that cannot be opened fails.
fn refuse_new_socket(rig: &Rig) -> Result<()> {
    rig.daemon.lunette(&["disk", "add", "f=ram:1M"])?;
    let missing = rig.scratch.file("missing/f.sock").display().to_string();
    let added = format!("f:{missing}");
    let refused = rig.daemon.ask(&["export", "add", "vhost-blk", &added])?;
    let error_text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(
        !refused.status.success() && error_text.contains(&missing),
        "{error_text}"
    );
    Ok(())
}

/// Checks that the commands for exports name the waiting listeners, with the next attempt and a hint.
fn check_exports(rig: &Rig, socket: &Path, portal_at: SocketAddr) -> Result<()> {
    for (export, line) in [
        (
            "d",
            format!("! export d: socket {} is not open: ", socket.display()),
        ),
        (
            TARGET,
            format!("! export {TARGET}: portal {portal_at} is not open: "),
        ),
    ] {
        for command in [&["export", "list"][..], &["export", "show", export]] {
            let text = rig.daemon.lunette(command)?;
            let found = text.lines().find(|one| one.starts_with(&line));
            let found = found.with_context(|| format!("{command:?}: {text}"))?;
            ensure!(
                found.contains(", next try in ") && found.contains("; hint: "),
                "{found}"
            );
        }
    }
    let page = rig.daemon.lunette(&["export", "show", "d", "--json"])?;
    let shown: Value = serde_json::from_str(&page)?;
    ensure!(
        shown[0]["status"]["waiting_socket"]["kind"] == "vhost-user",
        "{shown}"
    );
    Ok(())
}

#[test]
fn listeners_of_every_kind_wait_at_the_start_and_open_later() -> Result<()> {
    let busy = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0"));
    let [portal, api, metrics] = busy;
    let (portal, api, metrics) = (portal?, api?, metrics?);
    let at = [&portal, &api, &metrics].map(|listener| listener.local_addr());
    let [portal_at, api_at, metrics_at] = at;
    let (portal_at, api_at, metrics_at) = (portal_at?, api_at?, metrics_at?);
    let mut socket = None;
    let rig = Rig::prepared(|scratch, daemon| {
        let token = scratch.file("token");
        std::fs::write(&token, "a-token-of-more-than-16-bytes")?;
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600))?;
        let path = scratch.socket("later").join("d.sock");
        let daemon = daemon
            .disk("d=ram:1M")
            .disk("e=ram:1M")
            .vhost_blk("e")
            .arguments(["--vhost-blk", &format!("d:{}", path.display())])
            .arguments(["--iscsi", &format!("{TARGET}=d"), "--demo-mode", "rw"])
            .arguments(["--portal", &portal_at.to_string()])
            .arguments(["--api-listen", &api_at.to_string()])
            .arguments(["--token-file", &token.display().to_string()])
            .arguments(["--metrics-listen", &metrics_at.to_string()]);
        socket = Some(path);
        Ok(daemon)
    })?;
    let socket = socket.unwrap_or_default();

    // Other exports are served, and the status lists the waiting listeners.
    client::Client::connect(&rig.socket("e"))?;
    let api_client = Client::new(&rig.daemon.control());
    let status: Status = api_client.get("/v1/status")?;
    let mut kinds: Vec<&str> = status
        .waiting_listeners
        .iter()
        .map(|one| one.kind.as_str())
        .collect();
    kinds.sort_unstable();
    ensure!(
        kinds == ["api", "iscsi", "metrics", "vhost-user"],
        "{kinds:?}"
    );
    check_status(
        &rig,
        &[
            format!("export d: socket {}", socket.display()),
            format!("export {TARGET}: portal {portal_at}"),
            format!("api listener {api_at}"),
            format!("metrics listener {metrics_at}"),
        ],
    )?;
    check_exports(&rig, &socket, portal_at)?;
    check_probes(&rig, false)?;

    let mut events = Events::listen(&rig.daemon.control())?;
    refuse_new_socket(&rig)?;

    drop((portal, api, metrics));
    std::fs::create_dir(rig.scratch.socket("later"))?;
    hear_all(
        &mut events,
        &[
            ("listener.opened", "d"),
            ("portal.opened", TARGET),
            ("listener.opened", "api"),
            ("listener.opened", "metrics"),
        ],
    )?;
    let status: Status = api_client.get("/v1/status")?;
    ensure!(status.waiting_listeners.is_empty(), "{status:?}");
    check_probes(&rig, true)?;
    client::Client::connect(&socket)?.features()?;
    IscsiSession::login(&portal_at.to_string(), TARGET, 0)?;
    TcpStream::connect(api_at)?;
    TcpStream::connect(metrics_at)?;
    rig.daemon.lunette(&["status"])?;
    Ok(())
}

#[test]
fn mistakes_that_cannot_heal_refuse_the_start_with_all_reasons() -> Result<()> {
    let scratch = Scratch::new()?;
    let file = scratch.file("file");
    std::fs::write(&file, "data")?;
    let below = file.join("e.sock");
    let daemon = end_to_end::DaemonBuilder::new(&scratch)
        .disk("d=ram:1M")
        .disk("e=ram:1M")
        .arguments(["--vhost-blk", &format!("d:{}", file.display())])
        .arguments(["--vhost-blk", &format!("e:{}", below.display())]);
    let (_, log) = daemon.start_refused()?;
    for path in [&file, &below] {
        ensure!(log.contains(&*path.to_string_lossy()), "{log}");
    }
    ensure!(std::fs::read(&file)? == b"data");
    Ok(())
}

#[test]
fn a_reload_lets_new_sockets_wait_and_leaves_waiting_ones() -> Result<()> {
    let write = |scratch: &Scratch, disks: &[&str]| {
        let folder = scratch.socket("later");
        let sections = disks.iter().map(|disk| {
            let socket = folder.join(format!("{disk}.sock"));
            let socket = socket.display();
            format!(
                "[[disk]]\nname = \"{disk}\"\nbackend = \"ram\"\nsize = \"1M\"\n\
                 [[vhost_blk]]\ndisk = \"{disk}\"\nsocket = \"{socket}\"\n"
            )
        });
        let text = format!("workers = 1\n{}", sections.collect::<String>());
        std::fs::write(scratch.file("lunette.toml"), text)
    };
    let mut rig = Rig::prepared(|scratch, daemon| {
        write(scratch, &["a"])?;
        let file = scratch.file("lunette.toml").display().to_string();
        Ok(daemon.arguments(["--config", &file]))
    })?;
    let waiting = |rig: &Rig| -> Result<Vec<String>> {
        let status: Status = control::get(&rig.daemon.control(), "/v1/status")?;
        let waiting = status.waiting_listeners.into_iter();
        Ok(waiting.filter_map(|one| one.export).collect())
    };
    rig.daemon.lunette(&["reload"])?;
    ensure!(waiting(&rig)? == ["a"]);
    write(&rig.scratch, &["a", "b"])?;
    rig.daemon.lunette(&["reload"])?;
    ensure!(waiting(&rig)? == ["a", "b"]);
    write(&rig.scratch, &["b"])?;
    rig.daemon.lunette(&["reload"])?;
    ensure!(waiting(&rig)? == ["b"]);
    // With the folder in place, a start opens the socket at once.
    rig.daemon.stop(Duration::from_secs(60))?;
    let folder = rig.scratch.socket("later");
    std::fs::create_dir(&folder)?;
    rig.daemon.start_again()?;
    client::Client::connect(&folder.join("b.sock"))?.features()?;
    Ok(())
}

#[test]
fn a_reload_changes_mode_and_group_of_a_socket_under_a_client() -> Result<()> {
    let write = |scratch: &Scratch, rights: &str| {
        let socket = scratch.socket("d.sock").display().to_string();
        let text = format!(
            "workers = 1\nsandbox = \"enforce\"\nsandbox_paths = [\"{}\"]\n\
             [[disk]]\nname = \"d\"\nbackend = \"ram\"\nsize = \"1M\"\n\
             [[vhost_blk]]\ndisk = \"d\"\nsocket = \"{socket}\"\n{rights}",
            scratch.files().display()
        );
        std::fs::write(scratch.file("lunette.toml"), text)
    };
    let own = rustix::process::getegid().as_raw();
    let rights = |mode: &str| format!("socket_mode = \"{mode}\"\nsocket_group = \"{own}\"\n");
    let rig = Rig::prepared(|scratch, daemon| {
        write(scratch, &rights("0620"))?;
        let file = scratch.file("lunette.toml").display().to_string();
        Ok(daemon.arguments(["--config", &file]))
    })?;
    let socket = rig.socket("d");
    let found = || -> Result<(u32, u32)> {
        let found = std::fs::symlink_metadata(&socket)?;
        Ok((found.permissions().mode() & 0o777, found.gid()))
    };
    ensure!(found()? == (0o620, own), "{:?}", found()?);
    let mut front_end = client::Client::connect(&socket)?;
    front_end.features()?;

    write(&rig.scratch, &rights("0660"))?;
    let report = rig.daemon.lunette(&["reload"])?;
    ensure!(report.contains("1 socket with changed rights"), "{report}");
    ensure!(found()? == (0o660, own), "{:?}", found()?);
    front_end.features()?;

    // Removing a key needs a new socket, and the client would lose its disk.
    write(&rig.scratch, "")?;
    let refused = rig.daemon.lunette(&["reload"]).err();
    let refusal = refused.map(|error| error.to_string()).unwrap_or_default();
    ensure!(refusal.contains("has a client"), "{refusal}");

    // Errors name the key. Exports added at run time accept the same keys.
    write(&rig.scratch, "socket_group = \"no-such-group\"\n")?;
    let refused = rig.daemon.lunette(&["reload"]).err();
    let refusal = refused.map(|error| error.to_string()).unwrap_or_default();
    ensure!(
        refusal.contains("socket_group") && refusal.contains("no-such-group"),
        "{refusal}"
    );
    rig.daemon.lunette(&["disk", "add", "e=ram:1M"])?;
    let other = rig.socket("e");
    let added = format!("e:{},socket_mode=0606", other.display());
    rig.daemon
        .lunette(&["export", "add", "vhost-blk", &added])?;
    let mode = std::fs::symlink_metadata(&other)?.permissions().mode();
    ensure!(mode & 0o777 == 0o606, "{mode:o}");
    Ok(())
}
