//! Lines of a job file: sections, options, comments, included files, variables.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::{JobContext, Mistake};

/// `option=value`, or `option` alone.
pub struct Line {
    pub file: Rc<str>,
    pub number: usize,
    pub option: String,
    pub value: Option<String>,
}

/// `[name]` with its lines.
pub struct Section {
    pub file: Rc<str>,
    pub number: usize,
    pub name: String,
    pub lines: Vec<Line>,
}

/// Limit for nested includes, which ends cycles.
const INCLUDES_MAX: usize = 16;

/// Removes a comment. Both signs start one at any position.
fn without_comment(line: &str) -> &str {
    let end = line.find(['#', ';']).unwrap_or(line.len());
    line[..end].trim()
}

struct Reader<'a> {
    surroundings: &'a JobContext<'a>,
    sections: Vec<Section>,
    mistakes: Vec<Mistake>,
}

/// Parses the sections in order and collects mistakes.
pub fn sections(
    file: &str,
    text: &str,
    surroundings: &JobContext<'_>,
) -> (Vec<Section>, Vec<Mistake>) {
    let mut reader = Reader {
        surroundings,
        sections: Vec::new(),
        mistakes: Vec::new(),
    };
    reader.read(&file.into(), text, 0);
    (reader.sections, reader.mistakes)
}

impl Reader<'_> {
    fn mistake(&mut self, file: &str, line: usize, option: &str, message: impl Into<String>) {
        self.mistakes.push(Mistake {
            file: file.to_owned(),
            line,
            option: option.to_owned(),
            message: message.into(),
        });
    }

    fn read(&mut self, file: &Rc<str>, text: &str, depth: usize) {
        for (line, number) in text.lines().zip(1..) {
            let line = without_comment(line);
            if line.is_empty() {
                continue;
            }
            if let Some(name) = line.strip_prefix('[') {
                self.section(file, number, name);
                continue;
            }
            let words = line.split_once(char::is_whitespace);
            if let Some(("include", path)) = words.filter(|(_, path)| !path.contains('=')) {
                self.include(file, number, path.trim(), depth);
                continue;
            }
            self.option(file, number, line);
        }
    }

    fn section(&mut self, file: &Rc<str>, number: usize, name: &str) {
        match name.strip_suffix(']').map(str::trim) {
            None => self.mistake(file, number, "", "a section's name ends with `]`"),
            Some("") => self.mistake(file, number, "", "a section needs a name"),
            Some(name) => self.sections.push(Section {
                file: file.clone(),
                number,
                name: name.to_owned(),
                lines: Vec::new(),
            }),
        }
    }

    fn option(&mut self, file: &Rc<str>, number: usize, line: &str) {
        let (option, value) = match line.split_once('=') {
            Some((option, value)) => (option.trim(), Some(value.trim())),
            None => (line, None),
        };
        let value = match value.map(|text| self.expand(text)).transpose() {
            Ok(value) => value,
            Err(message) => return self.mistake(file, number, option, message),
        };
        match self.sections.last_mut() {
            None => self.mistake(file, number, option, "found before the first section"),
            Some(section) => section.lines.push(Line {
                file: file.clone(),
                number,
                option: option.to_owned(),
                value,
            }),
        }
    }

    /// Inserts the lines of `include FILE`. A relative path is resolved in the current directory first, then in the directory of the
    /// including file.
    fn include(&mut self, file: &Rc<str>, number: usize, path: &str, depth: usize) {
        if depth == INCLUDES_MAX {
            let message = format!("more than {INCLUDES_MAX} files include each other");
            return self.mistake(file, number, "include", message);
        }
        let beside = Path::new(&**file)
            .parent()
            .map_or_else(|| PathBuf::from(path), |folder| folder.join(path));
        let read = self.surroundings.read;
        match read(Path::new(path)).or_else(|error| read(&beside).map_err(|_| error)) {
            Ok(text) => self.read(&path.into(), &text, depth + 1),
            Err(error) => {
                let message = format!("cannot read {path}: {error}");
                self.mistake(file, number, "include", message);
            }
        }
    }

    /// Replaces `${NAME}` by the environment variable, and fio's words for the machine by their values.
    fn expand(&self, text: &str) -> Result<String, String> {
        let mut expanded = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            expanded.push_str(before);
            let Some((name, after)) = after.split_once('}') else {
                return Err(format!("`${{{after}` has no end"));
            };
            match (self.surroundings.variable)(name) {
                Some(value) => expanded.push_str(&value),
                None => return Err(format!("the environment has no variable {name}")),
            }
            rest = after;
        }
        expanded.push_str(rest);
        for (word, number) in self.surroundings.words {
            expanded = expanded.replace(word, &number.to_string());
        }
        match expanded.find('$') {
            Some(at) => Err(format!(
                "`{}` is not supported; use ${{NAME}}, $ncpus, $pagesize or $mb_memory",
                &expanded[at..]
            )),
            None => Ok(expanded),
        }
    }
}
