//! Access control of the API: users and groups at the control socket, tokens over TCP.
#![forbid(unsafe_code)]

use end_to_end::{Context, DaemonBuilder, Profile, Result, Rig, Scratch, bail, ensure, http};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use vm::{lunette_program, wait_until};

const CONTROL: &str = "Qm9fTm90X1RlbGxfVGhpcw==";
const READERS: &str = "only-to-look-on-0123456789";

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    std::fs::write(path, text)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    Ok(())
}

/// Returns the TCP address from the log line that contains `prefix`.
fn address(rig: &mut Rig, prefix: &str) -> Result<String> {
    let log = rig.daemon.process().log();
    let line = log.lines().find(|line| line.contains(prefix));
    let line = line.with_context(|| format!("{prefix}:\n{log}"))?;
    let word = line.rsplit("address=").next().unwrap_or_default();
    Ok(word.trim().to_owned())
}

/// Starts a daemon that also serves the API over TCP, and returns the address.
fn over_tcp() -> Result<(Rig, String)> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        let (control, readers) = (scratch.file("token"), scratch.file("readers"));
        write(&control, &format!("{CONTROL}\n"), 0o600)?;
        write(&readers, &format!("{READERS}\n"), 0o400)?;
        let (control, readers) = (control.display(), readers.display());
        Ok(daemon.disk("d=ram:1M").arguments([
            "--log",
            "trace",
            "--api-listen",
            "127.0.0.1:0",
            "--token-file",
            &control.to_string(),
            "--readers-token-file",
            &readers.to_string(),
        ]))
    })?;
    let address = address(&mut rig, "API served over TCP")?;
    Ok((rig, address))
}

/// Returns the status of the response to a request with these header lines and no other ones.
fn status(mut stream: impl Read + Write, request: &str, fields: &str) -> Result<u16> {
    write!(
        stream,
        "{request} HTTP/1.1\r\n{fields}Connection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let word = answer.split(' ').nth(1).context("no status")?;
    Ok(word.parse()?)
}

/// The page and the checks of health need no token, but a valid Host.
fn requests_without_a_token_are_checked(address: &str) -> Result<()> {
    for path in ["/", "/healthz", "/v1/disks"] {
        for method in ["GET", "HEAD"] {
            for (fields, expected) in [
                ("Host: localhost\r\n", 200),
                ("", 400),
                ("Host: localhost\r\nHost: localhost\r\n", 400),
                ("Host: evil\r\nSec-Fetch-Site: none\r\n", 403),
                ("Host: localhost\r\nOrigin: http://evil\r\n", 403),
            ] {
                let expected = if path == "/v1/disks" { 401 } else { expected };
                let request = format!("{method} {path}");
                let got = status(TcpStream::connect(address)?, &request, fields)?;
                ensure!(
                    got == expected,
                    "{request}, {fields:?}: {got} instead of {expected}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn tcp_api_needs_a_token_that_is_never_shown() -> Result<()> {
    let (mut rig, address) = over_tcp()?;
    let ask = |method: &str, path: &str, token: Option<&str>, body: &str| {
        let header = token.map(|token| format!("Authorization: {token}"));
        let headers: Vec<&str> = header.iter().map(String::as_str).collect();
        http::ask(TcpStream::connect(&address)?, method, path, &headers, body)
    };
    let control = format!("Bearer {CONTROL}");
    let readers = format!("Bearer {READERS}");
    // Unauthenticated clients learn nothing, not even which resources exist.
    for (token, challenge) in [
        (None, "Bearer realm=\"lunette\""),
        (Some("Basic Ym9iOmJvYg=="), "Bearer realm=\"lunette\""),
        (
            Some("Bearer Qm9fTm90X1RlbGxfVGhpcw=x"),
            "Bearer realm=\"lunette\", error=\"invalid_token\"",
        ),
        (Some("Bearer"), "Bearer realm=\"lunette\""),
    ] {
        for path in ["/v1/disks", "/v1/nothing", "/metrics", "/v1/openapi.json"] {
            let answer = ask("GET", path, token, "")?;
            ensure!(answer.status == 401, "{path}, {token:?}: {answer:?}");
            let authenticate = answer.header("www-authenticate");
            ensure!(
                authenticate == Some(challenge),
                "{path}, {token:?}: {answer:?}"
            );
            let kind = answer.header("content-type");
            ensure!(kind == Some("application/problem+json"), "{answer:?}");
            let problem: Value = serde_json::from_str(&answer.body)?;
            ensure!(problem["status"] == 401, "{problem}");
        }
    }
    // Probes of orchestrators have no token.
    for path in ["/healthz", "/readyz"] {
        let answer = ask("GET", path, None, "")?;
        ensure!(answer.status == 200 && answer.body == "ok\n", "{answer:?}");
    }
    requests_without_a_token_are_checked(&address)?;
    let body = "{\"backend\": \"ram\", \"size\": \"1M\"}";
    ensure!(ask("GET", "/v1/disks/d", Some(&readers), "")?.status == 200);
    ensure!(ask("GET", "/metrics", Some(&readers), "")?.status == 200);
    let refused = ask("PUT", "/v1/disks/e", Some(&readers), body)?;
    ensure!(refused.status == 403, "{refused:?}");
    ensure!(ask("PUT", "/v1/disks/e", None, body)?.status == 401);
    ensure!(ask("PUT", "/v1/disks/e", Some(&control), body)?.status == 201);
    ensure!(ask("DELETE", "/v1/disks/e", Some(&control), "")?.status == 204);

    // A new token takes effect at once and the old one is revoked.
    let other = "another-token-that-is-long";
    write(&rig.scratch.file("token"), other, 0o600)?;
    ensure!(ask("GET", "/v1/disks", Some(&control), "")?.status == 401);
    let answer = ask("GET", "/v1/disks", Some(&format!("Bearer {other}")), "")?;
    ensure!(answer.status == 200, "{answer:?}");
    // A token file that others may read grants no access.
    write(&rig.scratch.file("token"), other, 0o644)?;
    let answer = ask("GET", "/v1/disks", Some(&format!("Bearer {other}")), "")?;
    ensure!(answer.status == 401, "{answer:?}");

    let log = rig.daemon.process().log();
    ensure!(log.contains("chmod 600"), "the log has no reason:\n{log}");
    for secret in [CONTROL, READERS, other] {
        ensure!(!log.contains(secret), "the log contains the token {secret}");
    }
    Ok(())
}

#[test]
fn administrators_are_served_beside_silent_clients_and_readers() -> Result<()> {
    let (_rig, address) = over_tcp()?;
    let open = |words: &str| -> Result<TcpStream> {
        let mut stream = TcpStream::connect(&address)?;
        stream.write_all(words.as_bytes())?;
        Ok(stream)
    };
    let request = |path: &str, token: &str| {
        format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n")
    };
    let _silent = (0..400).map(|_| open("G")).collect::<Result<Vec<_>>>()?;
    let mut statuses = Vec::new();
    let mut streams = Vec::new();
    for _ in 0..130 {
        let mut stream = open(&request("/v1/events", READERS))?;
        let mut head = [0; 12];
        stream.read_exact(&mut head)?;
        statuses.push(String::from_utf8_lossy(&head).into_owned());
        streams.push(stream);
    }
    ensure!(statuses[0] == "HTTP/1.1 200", "{statuses:?}");
    ensure!(statuses[129] == "HTTP/1.1 429", "{statuses:?}");

    let begun = Instant::now();
    let mut administrator = open(&request("/v1/version", CONTROL))?;
    administrator.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut head = [0; 12];
    administrator.read_exact(&mut head)?;
    ensure!(
        &head == b"HTTP/1.1 200",
        "{}",
        String::from_utf8_lossy(&head)
    );
    ensure!(begun.elapsed() < Duration::from_secs(10));

    // A reader is admitted after another has disconnected.
    drop(streams);
    let admitted = wait_until(Duration::from_secs(20), || {
        let mut reader = open(&request("/v1/version", READERS)).ok()?;
        reader.read_exact(&mut head).ok()?;
        (&head == b"HTTP/1.1 200").then_some(())
    });
    admitted.context("no place for a reader")
}

/// Half of a body occupies a connection for 30 s at most.
#[test]
fn connections_with_unfinished_bodies_are_closed() -> Result<()> {
    const LIMIT: Duration = Duration::from_secs(120);
    let (rig, address) = over_tcp()?;
    let half = format!(
        "PUT /v1/disks/e HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {CONTROL}\r\nContent-Length: 9\r\n\r\n{{"
    );
    let header = format!("Authorization: Bearer {CONTROL}");
    let status = || -> Result<u16> {
        let stream = TcpStream::connect(&address)?;
        Ok(http::ask(stream, "GET", "/v1/version", &[&header], "")?.status)
    };
    let mut streams = Vec::new();
    for _ in 0..64 {
        let mut stream = TcpStream::connect(&address)?;
        stream.write_all(half.as_bytes())?;
        stream.set_read_timeout(Some(LIMIT))?;
        streams.push(stream);
    }
    let mut local = UnixStream::connect(rig.daemon.control())?;
    local.write_all(half.as_bytes())?;
    local.set_read_timeout(Some(LIMIT))?;
    wait_until(LIMIT, || {
        status().is_ok_and(|status| status == 429).then_some(())
    })
    .context("all connections are not in use")?;
    wait_until(LIMIT, || {
        status().is_ok_and(|status| status == 200).then_some(())
    })
    .context("unfinished bodies stay")?;
    let mut answer = String::new();
    streams[0].read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    answer.clear();
    local.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    Ok(())
}

#[test]
fn browsers_use_local_names_addresses_and_configured_names() -> Result<()> {
    let rig = Rig::new(|daemon| {
        daemon
            .disk("d=ram:1M")
            .arguments(["--api-name", "disks.example"])
    })?;
    for (fields, expected) in [
        ("Host: anything\r\n", 200),
        ("", 400),
        ("Host: localhost\r\nHost: localhost\r\n", 400),
        ("Host: evil.example\r\n", 403),
        ("Host: localhost:80\r\nSec-Fetch-Site: none\r\n", 200),
        ("Host: [::1]:80\r\nOrigin: http://[::1]:80\r\n", 200),
        ("Host: disks.example\r\nSec-Fetch-Site: none\r\n", 200),
        ("Host: evil\r\nSec-Fetch-Site: none\r\n", 403),
        ("Host: evil\r\nOrigin: http://evil\r\n", 403),
    ] {
        let stream = UnixStream::connect(rig.daemon.control())?;
        let got = status(stream, "GET /v1/version", fields)?;
        ensure!(got == expected, "{fields:?}: {got} instead of {expected}");
    }
    Ok(())
}

#[test]
fn commands_ask_over_tcp_with_a_token() -> Result<()> {
    let (rig, address) = over_tcp()?;
    let lunette = |words: &[&str], token: &str| -> Result<Output> {
        let output = Command::new(lunette_program(Profile::Dev)?)
            .args(words)
            .args(["--api", &format!("http://{address}"), "--token-file"])
            .arg(rig.scratch.file(token))
            .output()?;
        Ok(output)
    };
    for words in [
        &["disk", "add", "e=ram:1M"][..],
        &["disk", "limit", "e", "iops=10"],
        &["disk", "list"],
        &["status"],
        &["latency"],
        &["log", "debug"],
        &["top", "--once", "--interval", "0.1"],
        &["disk", "remove", "e"],
    ] {
        let output = lunette(words, "token")?;
        ensure!(output.status.success(), "{words:?}: {output:?}");
        let shown = String::from_utf8_lossy(&output.stdout);
        let has_frame = shown.starts_with("lunette ") && shown.contains("\nexport ");
        ensure!(words[0] != "top" || has_frame, "{shown}");
    }
    let output = lunette(&["disk", "add", "e=ram:1M"], "readers")?;
    let error_text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1) && error_text.contains("may only read"));
    write(&rig.scratch.file("wrong"), "0123456789abcdef", 0o600)?;
    let output = lunette(&["status"], "wrong")?;
    let error_text = String::from_utf8_lossy(&output.stderr);
    ensure!(error_text.contains("wrong token"), "{error_text}");
    write(&rig.scratch.file("open"), CONTROL, 0o640)?;
    let output = lunette(&["status"], "open")?;
    let error_text = String::from_utf8_lossy(&output.stderr);
    ensure!(
        error_text.contains("chmod 600") && !error_text.contains(CONTROL),
        "{error_text}"
    );
    for (words, expected) in [
        (
            &["status", "--api", "http://127.0.0.1:1"][..],
            "--token-file",
        ),
        (&["status", "--token-file", "x"], "--api"),
        (
            &["status", "--api", "http://127.0.0.1:1", "--socket", "x"],
            "exclude each other",
        ),
    ] {
        let output = Command::new(lunette_program(Profile::Dev)?)
            .args(words)
            .output()?;
        let error_text = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && error_text.contains(expected),
            "{error_text}"
        );
    }
    Ok(())
}

#[test]
fn without_a_safe_token_nothing_is_served_over_tcp() -> Result<()> {
    let scratch = Scratch::new()?;
    let file = |name: &str, text: &str, mode| -> Result<String> {
        write(&scratch.file(name), text, mode)?;
        Ok(scratch.file(name).display().to_string())
    };
    for (token, expected) in [
        (None, "`api_listen` needs `token_file`"),
        (Some(file("open", CONTROL, 0o644)?), "chmod 600"),
        (Some(file("short", "short", 0o600)?), "has no token"),
        (
            Some("/nonexistent/token".to_owned()),
            "cannot read the token",
        ),
    ] {
        let mut daemon = DaemonBuilder::new(&scratch).arguments(["--api-listen", "127.0.0.1:0"]);
        if let Some(token) = &token {
            daemon = daemon.arguments(["--token-file", token]);
        }
        let (status, log) = daemon.start_refused()?;
        ensure!(
            !status.success() && log.contains(expected),
            "{status}: {log}"
        );
        ensure!(!log.contains(CONTROL), "{log}");
    }
    Ok(())
}

/// Runs a program as another user and group. The error explains how to permit this.
fn as_user(user: u32, group: u32, program: &Path, words: &[&str]) -> Result<Output> {
    let mut words_before = vec!["setpriv"];
    if !rustix::process::geteuid().is_root() {
        words_before.splice(0..0, ["sudo", "-n"]);
        let may = Command::new("sudo").args(["-n", "true"]).output();
        if !may.is_ok_and(|output| output.status.success()) {
            bail!(
                "only root can become another user; hint: run the tests as root, or `sudo -v` before them"
            );
        }
    }
    let mut command = Command::new(words_before[0]);
    command
        .args(&words_before[1..])
        .arg(format!("--reuid={user}"))
        .arg(format!("--regid={group}"))
        .arg("--clear-groups")
        .arg(program)
        .args(words);
    command
        .output()
        .context("cannot run setpriv; hint: apt-get install util-linux")
}

/// Copies the program to a path that every user can run and opens the folders of the control socket, so that only the daemon's own
/// access rules apply.
fn opened(rig: &Rig) -> Result<PathBuf> {
    let program = rig.scratch.file("lunette");
    std::fs::copy(lunette_program(Profile::Dev)?, &program)?;
    for path in [program.clone(), rig.daemon.control()] {
        let mut folder = path.parent();
        while let Some(open) = folder.filter(|folder| folder.starts_with(std::env::temp_dir())) {
            if open != std::env::temp_dir() {
                std::fs::set_permissions(open, std::fs::Permissions::from_mode(0o755))?;
            }
            folder = open.parent();
        }
    }
    Ok(program)
}

const NOBODY: u32 = 65534;

#[test]
fn socket_refuses_another_user() -> Result<()> {
    let rig = Rig::new(|daemon| daemon.disk("d=ram:1M"))?;
    let program = opened(&rig)?;
    let control = rig.daemon.control().display().to_string();
    let words = ["disk", "list", "--socket", &control];
    let own = rustix::process::geteuid().as_raw();
    let output = as_user(own, own, &program, &words)?;
    ensure!(output.status.success(), "the daemon's own user: {output:?}");
    for (user, group) in [(NOBODY, NOBODY), (NOBODY, 0)] {
        let output = as_user(user, group, &program, &words)?;
        let error_text = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() == Some(1),
            "{user}:{group}: {output:?}"
        );
        ensure!(
            error_text.contains("user nobody has no permission to open"),
            "{user}:{group}: {error_text}"
        );
        ensure!(output.stdout.is_empty(), "{user}:{group}: {output:?}");
    }
    Ok(())
}

fn group(name: &str) -> Result<u32> {
    let groups = std::fs::read_to_string("/etc/group")?;
    let line = groups
        .lines()
        .find(|line| line.starts_with(&format!("{name}:")));
    let number = line.and_then(|line| line.split(':').nth(2));
    let number = number.with_context(|| format!("this machine has no group {name}"))?;
    Ok(number.parse()?)
}

#[test]
fn groups_read_or_change_and_others_are_hung_up_on() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        let file = scratch.file("lunette.toml");
        write(
            &file,
            "control_group = \"games\"\ncontrol_readers = \"users\"\n",
            0o644,
        )?;
        let file = file.display().to_string();
        Ok(daemon.disk("d=ram:1M").arguments(["--config", &file]))
    })?;
    let program = opened(&rig)?;
    let control = rig.daemon.control().display().to_string();
    let run = |gid: u32, words: &[&str]| {
        let words = [words, &["--socket", &control]].concat();
        as_user(NOBODY, gid, &program, &words)
    };
    let (games, users) = (group("games")?, group("users")?);

    let output = run(users, &["disk", "list"])?;
    ensure!(output.status.success(), "readers: {output:?}");
    for words in [
        &["disk", "add", "e=ram:1M"][..],
        &["disk", "remove", "d"],
        &["log", "debug"],
        &["reload"],
    ] {
        let output = run(users, words)?;
        let error_text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1), "readers: {output:?}");
        ensure!(error_text.contains("may only read"), "{error_text}");
    }
    let output = run(games, &["disk", "add", "e=ram:1M"])?;
    ensure!(output.status.success(), "control group: {output:?}");

    let output = run(NOBODY, &["disk", "list"])?;
    ensure!(output.status.code() == Some(1), "others: {output:?}");
    ensure!(output.stdout.is_empty(), "others: {output:?}");
    let error_text = String::from_utf8_lossy(&output.stderr);
    let refused = "it does not admit user nobody, or it is ending; hint: ";
    ensure!(error_text.contains(refused), "{error_text}");
    rig.daemon.logs("user not admitted; hint: control_group and control_readers name the groups with access user=nobody ")?;
    let known = rig.daemon.lunette(&["disk", "list"])?;
    ensure!(known.contains('e') && known.contains('d'), "{known}");
    Ok(())
}

#[test]
fn unknown_group_is_reported_at_start() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        let file = scratch.file("lunette.toml");
        let groups = "control_group = \"users\"\ncontrol_readers = \"no-such-group\"\n";
        write(&file, groups, 0o644)?;
        let file = file.display().to_string();
        Ok(daemon.disk("d=ram:1M").arguments(["--config", &file]))
    })?;
    // The serving thread logs the error, possibly after the daemon reported that it is ready.
    let process = rig.daemon.process();
    let log = wait_until(Duration::from_secs(30), || {
        let log = process.log();
        log.contains("control_readers").then_some(log)
    });
    let log = log.with_context(|| process.log_tail())?;
    ensure!(log.contains("`no-such-group`"), "{log}");
    ensure!(!log.contains("control_group"), "{log}");
    Ok(())
}

/// Starts a daemon whose restricted clients may use the folders `disks` and `open`, but not `private`.
fn with_allowed_folders() -> Result<Rig> {
    Rig::prepared(|scratch, daemon| {
        for (folder, mode) in [("disks", 0o755), ("open", 0o777), ("private", 0o700)] {
            let folder = scratch.file(folder);
            std::fs::create_dir(&folder)?;
            std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(mode))?;
        }
        write(&scratch.file("private/secret"), &"s".repeat(4096), 0o600)?;
        write(&scratch.file("token"), CONTROL, 0o600)?;
        let shown = |name: &str| scratch.file(name).display().to_string();
        let text = format!(
            "control_group = \"games\"\ntoken_file = \"{}\"\napi_listen = \"127.0.0.1:0\"\nallow_paths = [\"{}\", \"{}\"]\n",
            shown("token"),
            shown("disks"),
            shown("open"),
        );
        write(&scratch.file("lunette.toml"), &text, 0o644)?;
        let file = shown("lunette.toml");
        Ok(daemon.disk("d=ram:1M").arguments(["--config", &file]))
    })
}

/// Members of the control group are refused outside of the allowed folders. Root is not.
#[test]
fn control_group_names_files_in_allowed_folders_only() -> Result<()> {
    let rig = with_allowed_folders()?;
    let program = opened(&rig)?;
    let control = rig.daemon.control().display().to_string();
    let path = |name: &str| rig.scratch.file(name).display().to_string();
    let games = group("games")?;
    let member = |words: &[&str]| {
        let words = [words, &["--socket", &control]].concat();
        as_user(NOBODY, games, &program, &words)
    };
    let disk = |name: &str, rest: &str| format!("s=file:{}{rest}", path(name));
    let (secret, new, open, above, socket) = (
        disk("private/secret", ""),
        disk("private/new", ",size=1M"),
        disk("open/new", ",size=1M"),
        disk("disks/../private/secret", ""),
        format!("d:{}", path("private/b.sock")),
    );
    let target = format!("file:{}", path("private/target"));
    let snapshot = path("private/overlay");
    for (words, reason) in [
        (&["disk", "add", &secret][..], "may not use the file"),
        (&["disk", "add", &new], "may not use the file"),
        (&["disk", "add", &above], "`..`"),
        (&["disk", "add", &open], "users other than root"),
        (
            &["disk", "backup", "d", &target, "--wait"],
            "may not use the file",
        ),
        (&["disk", "mirror", "d", &target], "may not use the file"),
        (
            &["disk", "snapshot", "d", "--to", &snapshot],
            "may not use the file",
        ),
        (
            &["export", "add", "vhost-blk", &socket],
            "may not use the file",
        ),
    ] {
        let output = member(words)?;
        let message = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1), "{words:?}: {output:?}");
        ensure!(message.contains(reason), "{words:?}: {message}");
    }
    let names = std::fs::read_dir(rig.scratch.file("private"))?;
    ensure!(names.count() == 1, "a file was made");

    let output = member(&["disk", "add", &disk("disks/s.raw", ",size=1M")])?;
    ensure!(output.status.success(), "in an allowed folder: {output:?}");
    // Repeating the request changes nothing and is permitted.
    let output = member(&["disk", "add", &disk("disks/s.raw", ",size=1M")])?;
    ensure!(
        !String::from_utf8_lossy(&output.stderr).contains("may not"),
        "{output:?}"
    );
    rig.daemon.lunette(&["disk", "remove", "s"])?;
    rig.daemon.lunette(&["disk", "add", &secret])?;
    Ok(())
}

#[test]
fn token_names_files_in_allowed_folders_only() -> Result<()> {
    let mut rig = with_allowed_folders()?;
    let address = address(&mut rig, "API served over TCP")?;
    let path = |name: &str| rig.scratch.file(name).display().to_string();
    let header = format!("Authorization: Bearer {CONTROL}");
    let stream = TcpStream::connect(&address)?;
    let refused = http::ask(stream, "POST", "/v1/upgrade", &[&header], "{}")?;
    ensure!(refused.status == 403, "{refused:?}");
    let ask = |disk: &str, file: &str| {
        let body = format!("{{\"backend\": \"file\", \"path\": \"{file}\", \"size\": \"1M\"}}");
        let stream = TcpStream::connect(&address)?;
        http::ask(
            stream,
            "PUT",
            &format!("/v1/disks/{disk}"),
            &[&header],
            &body,
        )
    };
    let refused = ask("t", &path("private/secret"))?;
    ensure!(refused.status == 403, "{refused:?}");
    let problem: Value = serde_json::from_str(&refused.body)?;
    ensure!(problem["errors"][0]["pointer"] == "/path", "{problem}");
    ensure!(ask("t", &path("disks/t.raw"))?.status == 201);
    Ok(())
}

fn qemu_img(words: &[&str]) -> Result<()> {
    let output = Command::new("qemu-img")
        .args(words)
        .output()
        .context("cannot run qemu-img; hint: apt-get install qemu-utils")?;
    ensure!(output.status.success(), "qemu-img {words:?}: {output:?}");
    Ok(())
}

/// A commit writes the backing image. A backup reads the files that the last backup names.
#[test]
fn jobs_of_a_token_reach_allowed_folders_only() -> Result<()> {
    let mut rig = with_allowed_folders()?;
    let address = address(&mut rig, "API served over TCP")?;
    let path = |name: &str| rig.scratch.file(name).display().to_string();
    let header = format!("Authorization: Bearer {CONTROL}");
    let job = |disk: &str, body: &str| {
        let stream = TcpStream::connect(&address)?;
        let at = format!("/v1/disks/{disk}/job");
        http::ask(stream, "POST", &at, &[&header], body)
    };
    let (base, image, secret) = (
        path("private/base.raw"),
        path("disks/x.qcow2"),
        path("private/secret"),
    );
    write(
        &rig.scratch.file("private/base.raw"),
        &"b".repeat(1 << 20),
        0o600,
    )?;
    qemu_img(&[
        "create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image,
    ])?;
    rig.daemon
        .lunette(&["disk", "add", &format!("x=image:{image},named_files=any")])?;
    let refused = job("x", "{\"kind\": \"commit\"}")?;
    ensure!(
        refused.status == 403 && refused.body.contains(&base),
        "{refused:?}"
    );

    // Each path of a backup is checked: the target, the scratch folder and the socket.
    let target = format!(
        "{{\"disk\": \"d\", \"target\": {{\"backend\": \"image\", \"path\": \"{}\"}}}}",
        path("private/new.qcow2")
    );
    let served = format!(
        "[{{\"disk\": \"d\"}}], \"pull\": \"unix:{}\"",
        path("disks/b.sock")
    );
    let elsewhere = format!(
        "[{{\"disk\": \"d\"}}], \"pull\": \"unix:{}\"",
        path("private/b.sock")
    );
    let scratch = format!("{served}, \"scratch\": \"{}\"", path("private"));
    for disks in [format!("[{target}]"), elsewhere, scratch] {
        let stream = TcpStream::connect(&address)?;
        let body = format!("{{\"disks\": {disks}}}");
        let refused = http::ask(stream, "POST", "/v1/backups", &[&header], &body)?;
        ensure!(
            refused.status == 403 && refused.body.contains("/private"),
            "{body}: {refused:?}"
        );
    }

    let backup = |name: &str| {
        let target = format!("{{\"backend\": \"image\", \"path\": \"{}\"}}", path(name));
        job(
            "d",
            &format!("{{\"kind\": \"backup\", \"target\": {target}, \"incremental\": \"n\"}}"),
        )
    };
    let first = backup("disks/first.qcow2")?;
    ensure!(first.status == 201, "{first:?}");
    rig.daemon.lunette(&["job", "wait", "d"])?;
    let last = path("disks/first.qcow2");
    qemu_img(&["rebase", "-u", "-b", &secret, "-F", "raw", &last])?;
    let second = backup("disks/second.qcow2")?;
    ensure!(
        second.status != 201 && second.body.contains("is not in the folder of the image"),
        "{second:?}"
    );
    ensure!(!rig.scratch.file("disks/second.qcow2").exists());
    Ok(())
}
