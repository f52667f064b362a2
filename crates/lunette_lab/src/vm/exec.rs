//! `lunette vm exec`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::sync::mpsc::{Receiver, channel};

use clap::Args;
use cli_common::{Failure, Outcome};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use vm::running::{AGENT_SOCKET, CommandEnd, ExecInput, Registry, exec};

use super::failed;

/// `lunette vm exec`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct ExecArguments {
    /// Name of the guest
    name: String,
    /// Run the command with an empty standard input
    #[arg(long, short = 'n')]
    no_stdin: bool,
    /// Shell script as one argument, or a program and its arguments
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
}

const AFTER: &str = "\
Copies stdin to the command, and the command's stdout and stderr to stdout and stderr as they arrive. Forwards SIGINT and SIGTERM. The exit
code is that of the command, or 128 + N after signal N. If this program is killed, the command is killed too.

Examples:
    lunette vm exec guest1 'cat /proc/partitions | tail -n +3'
    lunette vm exec guest1 dd if=/dev/vda bs=1M count=100 > first.img
    tar c folder | lunette vm exec guest1 tar x -C /tmp";

/// Runs a command in a guest and exits with its exit code.
///
/// # Errors
/// When the command cannot be run, or its result is unknown.
pub fn run(arguments: ExecArguments) -> Outcome {
    let registry = Registry::open().map_err(failed)?;
    let (place, _) = registry.find(&arguments.name).map_err(failed)?;
    let script = script(&arguments.command);
    let signals = caught_signals()?;
    let input = match arguments.no_stdin {
        true => ExecInput::Nothing,
        false => ExecInput::Reader(Box::new(std::io::stdin())),
    };
    let (mut stdout, mut stderr) = (std::io::stdout().lock(), std::io::stderr().lock());
    let socket = place.file(AGENT_SOCKET);
    let ended = exec(
        &socket,
        &script,
        input,
        &mut stdout,
        &mut stderr,
        Some(signals),
    );
    drop((stdout, stderr));
    match ended.map_err(|error| failed(error.context(format!("guest {}", arguments.name))))? {
        CommandEnd::Code(code) => std::process::exit(code as i32),
        CommandEnd::OutputClosed => Err(Failure::OutputClosed),
    }
}

/// Catches signals that request the end of this process, to forward them to the guest's command.
pub fn caught_signals() -> std::io::Result<Receiver<u8>> {
    let (sender, signals) = channel();
    let mut caught = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::spawn(move || {
        for (index, signal) in caught.forever().enumerate() {
            // The second signal ends this process without waiting for the guest.
            if index > 0 || sender.send(signal as u8).is_err() {
                std::process::exit(128 + signal);
            }
        }
    });
    Ok(signals)
}

/// One argument is a script; several are words, which are quoted for the shell.
fn script(command: &[OsString]) -> Vec<u8> {
    match command {
        [script] => script.as_bytes().to_vec(),
        words => words
            .iter()
            .map(|word| quoted(word.as_bytes()))
            .collect::<Vec<_>>()
            .join(&b' '),
    }
}

pub fn quoted(word: &[u8]) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for byte in word {
        match byte {
            b'\'' => quoted.extend(br"'\''"),
            byte => quoted.push(*byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> String {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        String::from_utf8(script(&words)).unwrap()
    }

    #[test]
    fn one_word_is_a_script_and_several_stay_what_they_are() {
        assert_eq!(words(&["ls | wc -l"]), "ls | wc -l");
        assert_eq!(
            words(&["echo", "a  b", "$HOME", "it's"]),
            r"'echo' 'a  b' '$HOME' 'it'\''s'"
        );
    }
}
