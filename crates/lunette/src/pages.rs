//! `lunette completion` and `lunette man`: what shells and man read, from the same definitions as `--help`.

use std::io::Write;
use std::path::Path;

use clap::CommandFactory;

use crate::cli::{Cli, CompletionArguments, ManArguments};
use crate::failure::{Failure, Outcome};

/// Prints a shell's completion script.
pub fn completion(arguments: &CompletionArguments) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Cli::command(), "lunette", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}

/// Writes a man page for the command and one for each subcommand, and for what these have in turn.
pub fn man(arguments: &ManArguments) -> Outcome {
    let folder = &arguments.folder;
    let failed = |path: &Path, error: std::io::Error| {
        Failure::because(format!("cannot write {}: {error}", path.display()))
    };
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
    for (name, page) in pages() {
        let path = folder.join(name);
        std::fs::write(&path, page).map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

/// Every page with its file's name.
fn pages() -> Vec<(String, String)> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    add_pages(&command, "lunette", None, &mut pages);
    pages
}

fn add_pages(
    command: &clap::Command,
    name: &str,
    parent: Option<&str>,
    pages: &mut Vec<(String, String)>,
) {
    pages.push((format!("{name}.1"), page(command, name, parent)));
    let shown = command.get_subcommands().filter(|c| !c.is_hide_set());
    for subcommand in shown.filter(|c| c.get_name() != "help") {
        let own = format!("{name}-{}", subcommand.get_name());
        add_pages(subcommand, &own, Some(name), pages);
    }
}

fn page(command: &clap::Command, name: &str, parent: Option<&str>) -> String {
    let title = name.to_uppercase();
    // Examples and tables are laid out already: they have a section of their own, as they are.
    let after = command.get_after_help().map(ToString::to_string);
    let has_subcommands = command.has_subcommands();
    // Its pages are found by this name: lunette-disk(1) lists lunette-disk-add(1).
    let command = command.clone().after_help("").display_name(name.to_owned());
    let man = clap_mangen::Man::new(command)
        .title(title)
        .date("")
        .manual("Lunette")
        .source(concat!("Lunette ", env!("CARGO_PKG_VERSION")));
    let mut page = Vec::new();
    let written = man
        .render_title(&mut page)
        .and_then(|()| man.render_name_section(&mut page))
        .and_then(|()| man.render_synopsis_section(&mut page))
        .and_then(|()| man.render_description_section(&mut page))
        .and_then(|()| man.render_options_section(&mut page))
        .and_then(|()| match has_subcommands {
            true => man.render_subcommands_section(&mut page),
            false => Ok(()),
        });
    written.expect("a Vec takes all that is written to it");
    let mut page = String::from_utf8_lossy(&page).into_owned();
    if let Some(after) = after {
        page.push_str(&verbatim("NOTES", &after));
    }
    if let Some(parent) = parent {
        let parent = parent.replace('-', "\\-");
        page.push_str(&format!(".SH \"SEE ALSO\"\n{parent}(1)\n"));
    }
    page
}

/// A section that is shown as it is written.
fn verbatim(title: &str, text: &str) -> String {
    let mut section = format!(".SH {title}\n.nf\n");
    for line in text.lines() {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        if line.starts_with(['.', '\'']) {
            section.push_str("\\&");
        }
        section.push_str(&line);
        section.push('\n');
    }
    section.push_str(".fi\n");
    section
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use clap_complete::Shell;

    use super::*;

    #[test]
    fn every_subcommand_has_a_page_with_its_examples() {
        let pages = pages();
        for wanted in [
            "lunette.1",
            "lunette-serve.1",
            "lunette-top.1",
            "lunette-vhost-user-blk.1",
        ] {
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
        // Each leaf of the tree has one, and nothing else does.
        fn count(command: &clap::Command) -> usize {
            let shown = command.get_subcommands().filter(|c| !c.is_hide_set());
            1 + shown.map(count).sum::<usize>()
        }
        assert_eq!(pages.len(), count(&Cli::command()));
    }

    #[test]
    fn verbatim_text_cannot_be_taken_for_requests() {
        assert_eq!(
            verbatim("X", ".a \\\n'b\nc-d"),
            ".SH X\n.nf\n\\&.a \\e\n\\&'b\nc\\-d\n.fi\n"
        );
    }

    #[test]
    fn man_renders_every_page_without_a_word_of_complaint() {
        let folder = tempfile::tempdir().unwrap();
        for (name, page) in pages() {
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
                // Machines without man have nothing to render with.
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
