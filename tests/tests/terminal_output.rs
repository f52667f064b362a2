//! Text from hostile images, targets, initiators and daemons: commands never print its control characters. Needs: qemu-img. Takes:
//! 10 s.
#![forbid(unsafe_code)]

use end_to_end::rig::free_portal;
use end_to_end::{Context, DaemonBuilder, Result, Scratch, ensure};
use iscsi_initiator::{Portal, Session, SessionOptions};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

const TARGET: &str = "iqn.2026-11.org.example:t0";

/// Text that sets a title, clears the screen by ESC and by C1, overwrites the line, forges a line and reverses text.
const HOSTILE: &str =
    "x\x1b]0;y\x07\x1b[2J\u{9b}2J\x7f\rz\nlunette: done\u{202e}a\u{2066}b\u{200e}\u{61c}";

fn lunette(folder: &Path, words: &[&str]) -> Result<Output> {
    let program = vm::lunette_program(vm::Profile::Dev)?;
    let mut command = Command::new(program);
    Ok(command.args(words).current_dir(folder).output()?)
}

/// Fails if the text has characters that a terminal interprets, or a forged line.
fn is_harmless(source: &str, text: &[u8]) -> Result<()> {
    let text = std::str::from_utf8(text).with_context(|| format!("{source}: not UTF-8"))?;
    let is_bad = |c: char| {
        (c.is_control() && !"\n\t".contains(c))
            || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    ensure!(!text.contains(is_bad), "{source}: {text:?}");
    let forged = text.lines().any(|line| line.starts_with("lunette: done"));
    ensure!(!forged, "{source}: {text:?}");
    Ok(())
}

/// Runs a command and returns its output. If `shows` is set, the output must contain the escaped hostile text.
fn check(folder: &Path, words: &[&str], shows: bool) -> Result<Vec<u8>> {
    let output = lunette(folder, words)?;
    let source = format!("lunette {words:?}");
    is_harmless(&source, &output.stdout)?;
    is_harmless(&source, &output.stderr)?;
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&both);
    ensure!(!shows || text.contains("\\u001b"), "{source}: {text}");
    Ok(output.stdout)
}

fn qemu_img(folder: &Path, words: &[&str]) -> Result<()> {
    let mut command = Command::new("qemu-img");
    let ran = command.args(words).current_dir(folder).output();
    let ran = ran.context("cannot run qemu-img; hint: apt-get install qemu-utils")?;
    ensure!(ran.status.success(), "qemu-img {words:?}: {ran:?}");
    Ok(())
}

#[test]
fn hostile_image_is_shown_with_escapes() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.file("images");
    std::fs::create_dir(&folder)?;
    let overlay = [
        "create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", HOSTILE, "o.qcow2", "1M",
    ];
    qemu_img(&folder, &overlay)?;
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "s.qcow2", "1M"])?;
    qemu_img(&folder, &["snapshot", "-c", HOSTILE, "s.qcow2"])?;
    qemu_img(&folder, &["bitmap", "--add", "s.qcow2", HOSTILE])?;
    for (words, shows) in [
        (&["info", "o.qcow2"][..], true),
        (&["info", "--chain", "o.qcow2"], true),
        (&["check", "o.qcow2"], false),
        (&["map", "o.qcow2"], true),
        (&["compare", "o.qcow2", "s.qcow2"], true),
        (&["convert", "--to", "raw", "o.qcow2", "copy.raw"], true),
        (&["commit", "o.qcow2"], true),
        (
            &[
                "rebase",
                "--backing",
                "none.raw",
                "--backing-format",
                "raw",
                "o.qcow2",
            ],
            false,
        ),
        (&["create", "--backing", "o.qcow2", "n.qcow2"], false),
        (&["info", "s.qcow2"], true),
        (&["snapshot", "s.qcow2"], true),
        (&["check", "s.qcow2"], false),
        (&["resize", "s.qcow2", "512K"], false),
        (&["snapshot", "--apply", "none", "s.qcow2"], false),
        (&["snapshot", "--create", "t", "s.qcow2"], false),
    ] {
        check(&folder, &[&["image"], words].concat(), shows)?;
    }
    // JSON contains the same text with JSON's escapes.
    let info = check(&folder, &["image", "info", "--json", "o.qcow2"], true)?;
    let info: Value = serde_json::from_slice(&info)?;
    ensure!(info["backing-filename"] == HOSTILE, "{info}");
    let info = check(&folder, &["image", "snapshot", "--json", "s.qcow2"], true)?;
    let info: Value = serde_json::from_slice(&info)?;
    ensure!(info[0]["name"] == HOSTILE, "{info}");

    // The daemon refuses the backing file name, and the disk stays unavailable.
    let disk = format!("d=image:{}", folder.join("o.qcow2").display());
    let mut daemon = DaemonBuilder::new(&scratch).disk(&disk).start();
    let log = match &mut daemon {
        Ok(daemon) => {
            for words in [&["status"][..], &["disk", "list"], &["disk", "show", "d"]] {
                let output = daemon.ask(words)?;
                is_harmless("a command", &output.stdout)?;
                is_harmless("a command", &output.stderr)?;
            }
            daemon.process().log()
        }
        Err(error) => format!("{error:#}"),
    };
    is_harmless("the log", log.as_bytes())?;
    ensure!(log.contains("\\u202e"), "{log}");
    Ok(())
}

/// Starts a target for discovery sessions: a login without negotiation, then this text.
fn hostile_target(text: &'static str) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let portal = listener.local_addr()?.to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            answer(stream, text).ok();
        }
    });
    Ok(portal)
}

fn answer(mut stream: std::net::TcpStream, text: &str) -> Result<()> {
    for number in 0_u32.. {
        let mut request = [0; 48];
        stream.read_exact(&mut request)?;
        let length = u32::from_be_bytes([0, request[5], request[6], request[7]]);
        let mut data = vec![0; length.next_multiple_of(4) as usize];
        stream.read_exact(&mut data)?;
        let mut header = [0; 48];
        header[16..20].copy_from_slice(&request[16..20]);
        // StatSN, ExpCmdSN, MaxCmdSN.
        let command = u32::from_be_bytes([request[24], request[25], request[26], request[27]]);
        header[24..28].copy_from_slice(&number.to_be_bytes());
        header[28..32].copy_from_slice(&(command + 1).to_be_bytes());
        header[32..36].copy_from_slice(&(command + 8).to_be_bytes());
        let mut body = Vec::new();
        if request[0] & 0x3f == 0x03 {
            // Login Response: transit as requested.
            header[0] = 0x23;
            header[1] = request[1];
            header[8..14].copy_from_slice(&request[8..14]);
            header[15] = 1;
            header[28..32].copy_from_slice(&command.to_be_bytes());
        } else if request[0] & 0x3f == 0x06 {
            // Logout Response: closed.
            header[0] = 0x26;
            header[1] = 0x80;
        } else {
            // Text Response, final.
            header[0] = 0x24;
            header[1] = 0x80;
            header[20..24].fill(0xff);
            body = text.as_bytes().to_vec();
            let length = (body.len() as u32).to_be_bytes();
            header[5..8].copy_from_slice(&length[1..]);
            body.resize(body.len().next_multiple_of(4), 0);
        }
        stream.write_all(&header)?;
        stream.write_all(&body)?;
    }
    Ok(())
}

#[test]
fn hostile_target_is_shown_without_control_characters() -> Result<()> {
    let scratch = Scratch::new()?;
    let portal = hostile_target(
        "TargetName=iqn.2026-11.org.example:\x1b[2J\u{9b}2J\nlunette: done\u{202e}x\0TargetAddress=\x1b[2J\r192.0.2.1:3260,1\0",
    )?;
    let here = scratch.file("");
    for words in [
        &["iscsi", "discover", &portal][..],
        &["iscsi", "discover", &portal, "--json"],
    ] {
        let shown = check(&here, words, false)?;
        let shown = String::from_utf8_lossy(&shown);
        ensure!(
            shown.contains("iqn.2026-11.org.example:"),
            "{words:?}: {shown}"
        );
    }
    Ok(())
}

#[test]
fn hostile_initiator_name_is_logged_with_escapes() -> Result<()> {
    let scratch = Scratch::new()?;
    let portal = free_portal()?.to_string();
    let mut daemon = DaemonBuilder::new(&scratch)
        .disk("d=ram:1M")
        .arguments(["--iscsi", &format!("{TARGET}=d"), "--portal", &portal])
        .arguments(["--demo-mode", "rw"])
        .start()?;
    let portal: Portal = portal.parse().map_err(anyhow::Error::msg)?;
    let mut sessions = Vec::new();
    for name in [
        "iqn.2026-11.org.example:\u{2066}x\u{2069}",
        "iqn.2026-11.org.example:\u{202e}x",
        "iqn.2026-11.org.example:\u{9b}2J",
        "iqn.2026-11.org.example:\x1b[2J",
        "iqn.2026-11.org.example:x\nlunette: done",
    ] {
        let options = SessionOptions {
            initiator_name: Some(name.to_owned()),
            timeout: Duration::from_secs(10),
            ..SessionOptions::default()
        };
        sessions.push(Session::login(&portal, TARGET, &options));
    }
    for words in [
        &["session", "list"][..],
        &["session", "list", "--json"],
        &["status"],
    ] {
        let output = daemon.ask(words)?;
        is_harmless("a command", &output.stdout)?;
        is_harmless("a command", &output.stderr)?;
    }
    is_harmless("the log", daemon.process().log().as_bytes())
}

/// Serves responses with hostile text on a control socket.
fn hostile_daemon(socket: &Path) -> Result<()> {
    let listener = UnixListener::bind(socket)?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            respond(stream).ok();
        }
    });
    Ok(())
}

fn respond(stream: UnixStream) -> Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let path = first.split(' ').nth(1).unwrap_or_default();
    let (status, body) = match path {
        "/v1/exports" => (
            200,
            json!([{"kind": HOSTILE, "name": HOSTILE, "portals": [HOSTILE]}]),
        ),
        "/v1/sessions" => {
            let session = json!({"id": HOSTILE, "export": HOSTILE, "kind": HOSTILE,
                "initiator": HOSTILE, "connections": 1});
            (200, json!([session]))
        }
        "/v1/config/changes" => (200, json!({"kept": true, "changes": [HOSTILE]})),
        _ => (
            409,
            json!({"status": 409, "title": HOSTILE, "detail": HOSTILE}),
        ),
    };
    let body = body.to_string();
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    (&stream).write_all((head + &body).as_bytes())?;
    Ok(())
}

#[test]
fn hostile_daemon_is_shown_with_escapes() -> Result<()> {
    let scratch = Scratch::new()?;
    let socket = scratch.sockets().join("hostile.sock");
    hostile_daemon(&socket)?;
    let socket = socket.to_string_lossy();
    for words in [
        &["export", "list"][..],
        &["export", "list", "--json"],
        &["session", "list"],
        &["config", "diff"],
        &["disk", "list"],
        &["disk", "remove", "d"],
        &["reload"],
        &["status"],
    ] {
        let words = [words, &["--socket", &socket]].concat();
        check(&scratch.file(""), &words, true)?;
    }
    Ok(())
}
