//! `lunette help`: the keys of one kind of object, or the help of a command.

use std::ffi::OsString;
use std::io::Write;

use clap::CommandFactory;
use cli_common::{Failure, Outcome};
use config::HelpTopic;

use crate::cli::{Cli, HelpArguments};
use crate::lab;

/// Columns of a page without a terminal.
const COLUMNS: usize = 100;
/// Least columns of a page. A narrower terminal wraps its lines.
const COLUMNS_MIN: usize = 60;

/// Prints the page.
pub fn run(arguments: &HelpArguments) -> Outcome {
    let words: Vec<&str> = arguments.words.iter().map(String::as_str).collect();
    if let [command, _, ..] = &*words
        && lab::COMMANDS.contains(command)
    {
        return lab::run_with([&words[..], &["--help"]].concat());
    }
    let page = page(&words).map_err(Failure::mistake)?;
    write!(cli_common::stdout(), "{page}")?;
    Ok(())
}

/// Returns the number of columns of the terminal, or [`COLUMNS`] without one.
fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    let columns = size.map_or(0, |size| usize::from(size.ws_col));
    match columns {
        0 => COLUMNS,
        columns => columns.max(COLUMNS_MIN),
    }
}

/// Replaces the word `help` after a command by `--help`: `lunette disk help add` becomes `lunette disk add --help`.
pub fn with_help_flag(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let program = Cli::command();
    let mut command = &program;
    for at in 1..arguments.len() {
        if at > 1 && arguments[at] == "help" && command.has_subcommands() {
            arguments.remove(at);
            arguments.push("--help".into());
            break;
        }
        match command.find_subcommand(&arguments[at]) {
            Some(subcommand) => command = subcommand,
            None => break,
        }
    }
    arguments
}

/// Returns the page of a topic, or else of a command. A topic takes precedence over the command of the same name.
///
/// # Errors
/// The message for unknown words, with the near match.
fn page(words: &[&str]) -> Result<String, String> {
    let mut command = Cli::command();
    command.build();
    if let [word] = words
        && let Some(topic) = HelpTopic::find(word)
    {
        let page = topic.page(columns());
        return Ok(match command.find_subcommand(topic.name) {
            Some(_) => format!("{page}\nOptions of the command: lunette {word} --help\n"),
            None => page,
        });
    }
    let mut found = &mut command;
    for (at, word) in words.iter().enumerate() {
        let names = found.get_subcommands().map(clap::Command::get_name);
        let names: Vec<String> = names.map(str::to_owned).collect();
        found = match found.find_subcommand_mut(word) {
            Some(subcommand) => subcommand,
            None => return Err(unknown(&words[..=at], &names)),
        };
    }
    Ok(found.render_long_help().to_string())
}

/// Returns the message for words that are neither a topic nor a command.
fn unknown(words: &[&str], names: &[String]) -> String {
    let (last, before) = words.split_last().unwrap_or((&"", &[]));
    let names = names.iter().map(String::as_str);
    let near = match before {
        [] => HelpTopic::nearest(last, names),
        _ => config::nearest(last, names),
    };
    let hint = match near {
        Some(near) => [&["lunette", "help"], before, &[near]].concat().join(" "),
        None => "lunette help".to_owned(),
    };
    format!(
        "help {}: no such topic or command; hint: {hint}",
        words.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_list_keys_and_other_words_show_commands() {
        let disk = page(&["disk"]).unwrap();
        assert!(disk.starts_with("Keys of disks\n"), "{disk}");
        assert!(disk.contains("lunette disk --help"), "{disk}");
        let export = page(&["export"]).unwrap();
        assert!(export.contains("\n  socket ") && export.contains("\n  portals "));
        assert!(page(&["serve"]).unwrap().contains("--vhost-blk"));
        assert!(
            page(&["disk", "add"])
                .unwrap()
                .contains("Usage: lunette disk add")
        );
        assert!(page(&[]).unwrap().contains("Usage: lunette"));
    }

    #[test]
    fn word_help_after_a_command_is_its_help_flag() {
        for (words, expected) in [
            ("lunette disk help add", "lunette disk add --help"),
            ("lunette disk help", "lunette disk --help"),
            ("lunette help disk add", "lunette help disk add"),
            ("lunette disk show help", "lunette disk show help"),
            ("lunette image help check", "lunette image help check"),
            ("lunette --log info help", "lunette --log info help"),
            ("lunette", "lunette"),
        ] {
            let words = words.split(' ').map(OsString::from).collect();
            assert_eq!(with_help_flag(words).join(" ".as_ref()), expected);
        }
    }

    #[test]
    fn unknown_topic_names_the_near_match() {
        let hint = |words: &[&str]| page(words).unwrap_err();
        assert_eq!(
            hint(&["dsk"]),
            "help dsk: no such topic or command; hint: lunette help disk"
        );
        assert!(hint(&["serv"]).ends_with("hint: lunette help serve"));
        assert!(hint(&["disk", "ad"]).ends_with("hint: lunette help disk add"));
        assert!(hint(&["qwertyuiop"]).ends_with("hint: lunette help"));
    }

    #[test]
    fn every_key_value_flag_of_serve_has_one_line_and_names_its_page() {
        let mut command = Cli::command();
        let serve = command.find_subcommand_mut("serve").unwrap();
        for (flag, topic) in [
            ("disk", "disk"),
            ("vhost_blk", "vhost-blk"),
            ("vhost_scsi", "vhost-scsi"),
            ("iscsi", "iscsi"),
            ("nbd", "nbd"),
        ] {
            let argument = serve.get_arguments().find(|one| one.get_id() == flag);
            let argument = argument.unwrap_or_else(|| panic!("no flag {flag}"));
            let help = argument.get_help().unwrap().to_string();
            assert!(
                help.contains(&format!("(keys: lunette help {topic})")),
                "{help}"
            );
            assert!(argument.get_long_help().is_none(), "{flag}");
        }
    }
}
