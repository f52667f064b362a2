//! Man pages and completions of a program, from the definitions of `--help`.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::{Failure, Outcome};

/// `lunette completion`
#[derive(Debug, Args)]
pub struct CompletionArguments {
    /// Shell
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: clap_complete::Shell,
}

/// `lunette man`
#[derive(Debug, Args)]
pub struct ManArguments {
    /// Output folder
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// Generator of a program's man pages and completions.
#[derive(Debug)]
pub struct Pages {
    /// Definition of the command line.
    pub command: clap::Command,
    /// Name of the program.
    pub program: &'static str,
    /// Program that users type before its subcommands: `lunette`, even if `lunette-lab` runs them.
    pub typed: &'static str,
    /// Subcommands that the other program implements and documents.
    pub elsewhere: &'static [&'static str],
    /// Pages that do not describe a command, with their file names.
    pub others: Vec<(String, String)>,
}

impl Pages {
    /// Prints a shell's completion script.
    ///
    /// # Errors
    /// The script cannot be printed.
    pub fn completion(mut self, arguments: &CompletionArguments) -> Outcome {
        let mut script = Vec::new();
        clap_complete::generate(
            arguments.shell,
            &mut self.command,
            self.program,
            &mut script,
        );
        std::io::stdout().write_all(&script)?;
        Ok(())
    }

    /// Writes man pages for the command, for all nested subcommands, and the others, below the folder: `man1/lunette.1`.
    ///
    /// # Errors
    /// A page cannot be written.
    pub fn man(self, arguments: &ManArguments) -> Outcome {
        let folder = &arguments.folder;
        let failed = |path: &Path, error: std::io::Error| {
            Failure::because(format!("cannot write {}: {error}", path.display()))
        };
        for (name, page) in self.all() {
            let (_, section) = name.rsplit_once('.').unwrap_or_default();
            let folder = folder.join(format!("man{section}"));
            std::fs::create_dir_all(&folder).map_err(|error| failed(&folder, error))?;
            let path = folder.join(name);
            std::fs::write(&path, page).map_err(|error| failed(&path, error))?;
        }
        Ok(())
    }

    /// Returns every page with its file name.
    pub fn all(self) -> Vec<(String, String)> {
        let mut command = self.command.disable_help_subcommand(true);
        command.build();
        let mut pages = Vec::new();
        let names = (self.program, self.typed);
        add_pages(&command, names, None, &mut pages);
        let elsewhere = self.elsewhere.iter();
        let elsewhere: Vec<String> = elsewhere
            .map(|name| format!("{}-{name}.1", self.typed))
            .collect();
        pages.retain(|(name, _)| !elsewhere.contains(name));
        pages.extend(self.others);
        pages
    }
}

/// Adds the pages of a command and its subcommands. The command's page is called `name`; names of subcommands' pages begin with `prefix`.
fn add_pages(
    command: &clap::Command,
    (name, prefix): (&str, &str),
    parent: Option<&str>,
    pages: &mut Vec<(String, String)>,
) {
    pages.push((format!("{name}.1"), page(command, (name, prefix), parent)));
    let shown = command.get_subcommands().filter(|c| !c.is_hide_set());
    // `lunette help` is a command with a page; the help subcommands of nested commands are clap's.
    for subcommand in shown.filter(|c| parent.is_none() || c.get_name() != "help") {
        let own = format!("{prefix}-{}", subcommand.get_name());
        add_pages(subcommand, (&own, &own), Some(name), pages);
    }
}

fn page(command: &clap::Command, (name, prefix): (&str, &str), parent: Option<&str>) -> String {
    let title = name.to_uppercase();
    // Examples and tables are preformatted, so they get a verbatim section.
    let after = command.get_after_help().map(ToString::to_string);
    let has_subcommands = command.has_subcommands();
    let command = command.clone().after_help("");
    let man = |display: &str| {
        clap_mangen::Man::new(command.clone().display_name(display.to_owned()))
            .title(title.clone())
            .date("")
            .manual("Lunette")
            .source(concat!("Lunette ", env!("CARGO_PKG_VERSION")))
    };
    // Pages of subcommands use this name: lunette-disk(1) lists lunette-disk-add(1).
    let (man, subcommands) = (man(name), man(prefix));
    let mut page = Vec::new();
    let written = man
        .render_title(&mut page)
        .and_then(|()| man.render_name_section(&mut page))
        .and_then(|()| man.render_synopsis_section(&mut page))
        .and_then(|()| man.render_description_section(&mut page))
        .and_then(|()| man.render_options_section(&mut page))
        .and_then(|()| match has_subcommands {
            true => subcommands.render_subcommands_section(&mut page),
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

/// Returns a section with preformatted text.
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
    use super::*;

    #[test]
    fn verbatim_text_cannot_be_taken_for_requests() {
        assert_eq!(
            verbatim("X", ".a \\\n'b\nc-d"),
            ".SH X\n.nf\n\\&.a \\e\n\\&'b\nc\\-d\n.fi\n"
        );
    }

    #[test]
    fn man_pages_have_the_typed_names_of_their_own_program_only() {
        let sub = |name: &'static str| clap::Command::new(name).about("Does it");
        let bench = sub("bench").subcommand(sub("table"));
        let pages = Pages {
            command: clap::Command::new("lunette-lab")
                .subcommand(bench)
                .subcommand(sub("serve")),
            program: "lunette-lab",
            typed: "lunette",
            elsewhere: &["serve"],
            others: Vec::new(),
        };
        let pages = pages.all();
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            ["lunette-lab.1", "lunette-bench.1", "lunette-bench-table.1"]
        );
        let (_, first) = &pages[0];
        assert!(
            first.contains("lunette\\-bench(1)") && first.contains("lunette\\-serve(1)"),
            "{first}"
        );
        let (_, bench) = &pages[1];
        assert!(bench.contains("lunette\\-bench\\-table(1)"), "{bench}");
        assert!(bench.ends_with("lunette\\-lab(1)\n"), "{bench}");
    }
}
