//! Guest side of the lab's command port, over a serial port.
//!
//! Host to guest: `RUN id length\n` and a shell script of that length. Guest to host: `READY\n` once, and at the end of each script
//! `END id code stdout-length stderr-length\n` and both outputs. Scripts run in parallel. The port is trusted: only the lab writes to it.

use crate::args::Args;
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::{Arc, Mutex};

/// Serves until the port closes, which does not happen while the guest runs.
pub fn serve(args: &Args) -> Result<bool, String> {
    let path = args.text("file")?;
    let port = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|error| format!("cannot open {path}: {error}"))?;
    make_raw(&port).map_err(|error| format!("cannot set {path} to raw mode: {error}"))?;
    let sender = Arc::new(Mutex::new(
        port.try_clone()
            .map_err(|error| format!("cannot duplicate {path}: {error}"))?,
    ));
    send(&sender, b"READY\n");
    let mut receiver = BufReader::new(port);
    while let Some((id, script)) =
        receive(&mut receiver).map_err(|error| format!("{path}: {error}"))?
    {
        let sender = Arc::clone(&sender);
        std::thread::spawn(move || send(&sender, &run(&id, &script)));
    }
    Ok(true)
}

/// Disables echo, line editing and signal characters.
fn make_raw(port: &File) -> rustix::io::Result<()> {
    let mut attributes = tcgetattr(port)?;
    attributes.make_raw();
    attributes.set_speed(115_200)?;
    tcsetattr(port, OptionalActions::Flush, &attributes)
}

/// Receives the next script with its ID. Returns `None` at the end of the port.
fn receive(port: &mut impl BufRead) -> std::io::Result<Option<(String, String)>> {
    let mut line = String::new();
    if port.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let (Some("RUN"), Some(id), Some(Ok(length))) = (
        words.next(),
        words.next(),
        words.next().map(str::parse::<usize>),
    ) else {
        return Err(std::io::Error::other(format!(
            "not a command line: {line:?}"
        )));
    };
    let mut script = vec![0; length];
    port.read_exact(&mut script)?;
    Ok(Some((
        id.to_owned(),
        String::from_utf8_lossy(&script).into_owned(),
    )))
}

/// Runs one script to its end. Returns the message about it.
fn run(id: &str, script: &str) -> Vec<u8> {
    let (code, stdout, stderr) = match Command::new("/bin/sh").arg("-c").arg(script).output() {
        Ok(output) => {
            let code = output
                .status
                .code()
                .unwrap_or_else(|| 128 + output.status.signal().unwrap_or(0));
            (code, output.stdout, output.stderr)
        }
        Err(error) => (
            127,
            Vec::new(),
            format!("cannot start a shell: {error}\n").into_bytes(),
        ),
    };
    let mut message = format!("END {id} {code} {} {}\n", stdout.len(), stderr.len()).into_bytes();
    message.extend(stdout);
    message.extend(stderr);
    message
}

/// Sends one message at a time. A failure of the port cannot be reported; the host then times out.
fn send(port: &Mutex<File>, message: &[u8]) {
    if let Ok(mut port) = port.lock() {
        port.write_all(message)
            .and_then(|()| port.flush())
            .unwrap_or(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_may_hold_any_lines() {
        let mut port = &b"RUN 7 9\necho\nhi 1RUN 8 0\n"[..];
        assert_eq!(
            receive(&mut port).unwrap(),
            Some(("7".into(), "echo\nhi 1".into()))
        );
        assert_eq!(
            receive(&mut port).unwrap(),
            Some(("8".into(), String::new()))
        );
        assert_eq!(receive(&mut port).unwrap(), None);
    }

    #[test]
    fn both_outputs_and_the_code_are_reported() {
        assert_eq!(
            run("3", "echo out; echo err >&2; exit 4"),
            b"END 3 4 4 4\nout\nerr\n"
        );
        assert!(run("4", "kill -9 $$").starts_with(b"END 4 137 0 0\n"));
    }
}
