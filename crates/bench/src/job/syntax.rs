//! A job file's lines: sections, options, comments.

use super::Mistake;

/// `option=value`, or `option` alone.
pub struct Line {
    pub number: usize,
    pub option: String,
    pub value: Option<String>,
}

/// `[name]` and what follows it.
pub struct Section {
    pub number: usize,
    pub name: String,
    pub lines: Vec<Line>,
}

/// A comment starts the line, or follows a blank.
fn without_comment(line: &str) -> &str {
    let mut before_is_blank = true;
    for (at, character) in line.char_indices() {
        if before_is_blank && matches!(character, '#' | ';') {
            return line[..at].trim();
        }
        before_is_blank = character.is_whitespace();
    }
    line.trim()
}

/// Sections in order, and what could not be read.
pub fn sections(file: &str, text: &str) -> (Vec<Section>, Vec<Mistake>) {
    let mut sections: Vec<Section> = Vec::new();
    let mut mistakes = Vec::new();
    let mut mistake = |line: usize, option: &str, message: &str| {
        mistakes.push(Mistake {
            file: file.to_owned(),
            line,
            option: option.to_owned(),
            message: message.to_owned(),
        });
    };
    for (line, number) in text.lines().zip(1..) {
        let line = without_comment(line);
        if line.is_empty() {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            match name.strip_suffix(']').map(str::trim) {
                None => mistake(number, "", "a section's name ends with `]`"),
                Some("") => mistake(number, "", "a section needs a name"),
                Some(name) => sections.push(Section {
                    number,
                    name: name.to_owned(),
                    lines: Vec::new(),
                }),
            }
            continue;
        }
        let (option, value) = match line.split_once('=') {
            Some((option, value)) => (option.trim(), Some(value.trim().to_owned())),
            None => (line, None),
        };
        match sections.last_mut() {
            None => mistake(number, option, "stands before the first section"),
            Some(section) => section.lines.push(Line {
                number,
                option: option.to_owned(),
                value,
            }),
        }
    }
    (sections, mistakes)
}
