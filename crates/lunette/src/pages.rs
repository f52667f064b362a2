//! `lunette completion` and `lunette man`: shell completions and man pages, from the definitions of `--help` and of the configuration's keys.

use clap::CommandFactory;
use cli_common::Pages;

use crate::cli::Cli;
use crate::lab;

pub fn pages() -> Pages {
    Pages {
        command: Cli::command(),
        program: "lunette",
        typed: "lunette",
        elsewhere: &lab::COMMANDS,
        others: vec![("lunette.toml.5".to_owned(), config::man_page())],
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use clap_complete::Shell;

    use super::*;

    #[test]
    fn every_subcommand_has_a_page_with_its_examples() {
        let pages = pages().all();
        for wanted in ["lunette.1", "lunette-serve.1", "lunette-vhost-user-blk.1"] {
            let found = pages.iter().find(|(name, _)| name == wanted);
            let (_, page) = found.unwrap_or_else(|| panic!("{wanted} is missing"));
            assert!(
                page.contains(".SH NAME") && page.contains(".SH NOTES"),
                "{page}"
            );
        }
        let (_, serve) = &pages
            .iter()
            .find(|(name, _)| name == "lunette-serve.1")
            .unwrap();
        assert!(
            serve.contains("\\-\\-disk d0=ram:512M \\-\\-disk d1"),
            "{serve}"
        );
        let (_, main) = &pages[0];
        assert!(main.contains("lunette\\-latency(1)"), "{main}");
        let text = |wanted: &str| {
            let found = pages.iter().find(|(name, _)| name == wanted);
            let (_, page) = found.unwrap_or_else(|| panic!("{wanted} is missing"));
            page.clone()
        };
        assert!(text("lunette-disk.1").contains("lunette\\-disk\\-limit(1)"));
        assert!(text("lunette-disk-limit.1").contains("lunette\\-disk(1)"));
        assert!(text("lunette-export-add-iscsi.1").contains("demo"));
        assert!(text("lunette.toml.5").contains("\n\\fBsandbox\\fR: "));
        // Each leaf of the tree has a page, and there are no others besides that of the configuration.
        fn count(command: &clap::Command) -> usize {
            let shown = command.get_subcommands().filter(|c| !c.is_hide_set());
            1 + shown.map(count).sum::<usize>()
        }
        let commands = count(&Cli::command()) - lab::COMMANDS.len();
        assert_eq!(pages.len(), commands + 1);
        assert!(
            main.contains("lunette\\-bench(1)"),
            "that page belongs to the other program"
        );
    }

    #[test]
    fn man_renders_every_page_without_warnings() {
        let folder = tempfile::tempdir().unwrap();
        for (name, page) in pages().all() {
            let path = folder.path().join(&name);
            std::fs::write(&path, page).unwrap();
            let output = Command::new("man")
                .args(["--warnings", "-l"])
                .arg(&path)
                .env("MANWIDTH", "80")
                .env("LC_ALL", "C.UTF-8")
                .stdin(Stdio::null())
                .output();
            let output = match output {
                Ok(output) => output,
                // The program man is not installed.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
                Err(error) => panic!("{error}"),
            };
            let complaint = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success() && complaint.is_empty(),
                "{name}: {complaint}"
            );
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.contains("SYNOPSIS"), "{name}: {text}");
        }
    }

    #[test]
    fn shells_get_scripts_that_name_subcommands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "lunette", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(
                script.contains("latency") && script.contains("vhost-blk"),
                "{shell}"
            );
        }
    }
}
