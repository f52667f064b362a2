//! Mistakes in a configuration, collected so that all are reported at once.
//!
//! Each has the location, the value found, the allowed values and, if there is a good guess, a suggestion.

use std::collections::HashSet;
use std::fmt;

use serde::Serialize;
use serde_json::{Value, json};

use super::location::Location;

/// Above this number, lists of names and guesses are omitted: they would be useless or slow.
const NAMES_LISTED_MAX: usize = 16;
const NAMES_GUESSED_MAX: usize = 1024;

/// Kind of a mistake. A syntax error hides certain kinds on its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MistakeKind {
    /// The text is not TOML.
    Syntax,
    /// A key that does not exist, or not in this object.
    Key,
    /// A value that is not allowed.
    Value,
    /// A missing key or object.
    Missing,
    /// A conflict between two values, or a reference to an unknown name.
    Relation,
}

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Kind of mistake.
    pub kind: MistakeKind,
    /// Location of the mistake.
    pub location: Location,
    /// Description, with the value found.
    pub message: String,
    /// Allowed values.
    pub allowed: Option<String>,
    /// Suggestion or remedy.
    pub help: Option<String>,
}

impl Mistake {
    /// Creates a mistake of `kind` at `location`.
    pub fn new(kind: MistakeKind, location: &Location, message: impl Into<String>) -> Mistake {
        Mistake {
            kind,
            location: location.clone(),
            message: message.into(),
            allowed: None,
            help: None,
        }
    }

    /// Adds the allowed values.
    #[must_use]
    pub fn allowed(mut self, allowed: impl Into<String>) -> Mistake {
        self.allowed = Some(allowed.into());
        self
    }

    /// Adds a remedy.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Mistake {
        self.help = Some(help.into());
        self
    }

    /// Adds a suggestion, if one of `known` is similar enough.
    #[must_use]
    pub fn did_you_mean<'a>(
        self,
        found: &str,
        known: impl IntoIterator<Item = &'a str>,
    ) -> Mistake {
        match nearest(found, known) {
            Some(guess) => self.help(format!("did you mean `{guess}`?")),
            None => self,
        }
    }

    /// Adds the names of the objects of this kind, and a suggestion for the name that was found.
    #[must_use]
    pub(super) fn known(self, object: &str, found: &str, names: &[&str]) -> Mistake {
        let guessed = names.iter().take(NAMES_GUESSED_MAX).copied();
        self.did_you_mean(found, guessed)
            .allowed(match names.len() {
                0 => format!("none, because no {object} is configured"),
                1..=NAMES_LISTED_MAX => one_of(names),
                count => format!("one of the {count} configured names"),
            })
    }

    fn to_json(&self) -> Value {
        let (line, column) = self.location.line_column();
        let mut object = json!({
            "message": self.message,
            "allowed": self.allowed,
            "help": self.help,
        });
        let location = if self.location.source.is_flag {
            json!({"flag": self.location.source.label, "value": self.location.source.text, "column": column})
        } else {
            json!({"file": self.location.source.label, "line": line, "column": column})
        };
        if let (Some(object), Value::Object(location)) = (object.as_object_mut(), location) {
            object.extend(location);
        }
        object
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.location, self.message)?;
        let (line, _) = self.location.line_column();
        // A line with a secret is not shown.
        let (excerpt, meant) = self.location.excerpt();
        if !excerpt.trim().is_empty() && !iscsi::address::has_secret(excerpt) {
            let number = match self.location.source.is_flag {
                true => self.location.source.label.clone(),
                false => line.to_string(),
            };
            let gutter = number.chars().count();
            let (_, column) = self.location.line_column();
            // Tabs are kept, so that the marker is aligned with the text.
            let indent: String = excerpt
                .chars()
                .take(column - 1)
                .map(|c| if c == '\t' { '\t' } else { ' ' })
                .collect();
            write!(f, "\n  {number} | {excerpt}")?;
            write!(f, "\n  {:gutter$} | {indent}{}", "", "^".repeat(meant))?;
        }
        if let Some(allowed) = &self.allowed {
            write!(f, "\n  allowed: {allowed}")?;
        }
        if let Some(help) = &self.help {
            write!(f, "\n  help: {help}")?;
        }
        Ok(())
    }
}

impl Serialize for Mistake {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_json().serialize(serializer)
    }
}

/// All mistakes of a configuration, in the order of the text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Diagnostics {
    mistakes: Vec<Mistake>,
}

impl Diagnostics {
    /// Adds a mistake.
    pub fn push(&mut self, mistake: Mistake) {
        self.mistakes.push(mistake);
    }

    /// Adds all mistakes of another list.
    pub fn append(&mut self, mut other: Diagnostics) {
        self.mistakes.append(&mut other.mistakes);
    }

    /// Adds a value that is not allowed, with the allowed ones.
    pub fn refuse(
        &mut self,
        at: &Location,
        message: impl Into<String>,
        allowed: impl Into<String>,
    ) {
        self.push(Mistake::new(MistakeKind::Value, at, message).allowed(allowed));
    }

    /// Adds a conflict between values, with a remedy.
    pub fn conflict(&mut self, at: &Location, message: impl Into<String>, help: impl Into<String>) {
        self.remedy(MistakeKind::Relation, at, message, help);
    }

    /// Adds a mistake with a remedy.
    pub fn remedy(
        &mut self,
        kind: MistakeKind,
        at: &Location,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        self.push(Mistake::new(kind, at, message).help(help));
    }

    /// Returns true if there are no mistakes.
    pub fn is_empty(&self) -> bool {
        self.mistakes.is_empty()
    }

    /// Returns true if there is a mistake at this location.
    pub fn has(&self, at: &Location) -> bool {
        self.mistakes.iter().any(|mistake| mistake.location == *at)
    }

    /// Returns the mistakes, in the order of the text after [`Diagnostics::sort_and_prune`].
    pub fn iter(&self) -> impl Iterator<Item = &Mistake> {
        self.mistakes.iter()
    }

    /// Sorts by location and drops consequences of a syntax error: other mistakes on its line, and missing or unknown objects in that file,
    /// because they may be in the broken part.
    pub fn sort_and_prune(&mut self) {
        let line_of = |mistake: &Mistake| {
            let (line, _) = mistake.location.line_column();
            (mistake.location.source.order, line)
        };
        let mut broken: Vec<(usize, usize)> = Vec::new();
        self.mistakes
            .sort_by_key(|m| (m.location.source.order, m.location.span.start));
        self.mistakes.retain(|m| {
            if m.kind != MistakeKind::Syntax {
                return true;
            }
            let line = line_of(m);
            // Sorted by location: mistakes on one line are adjacent.
            let first = broken.last() != Some(&line);
            broken.push(line);
            first
        });
        if broken.is_empty() {
            return;
        }
        let broken: HashSet<(usize, usize)> = broken.into_iter().collect();
        let broken_sources: HashSet<usize> = broken.iter().map(|(order, _)| *order).collect();
        self.mistakes.retain(|m| {
            let file_is_broken = broken_sources.contains(&m.location.source.order);
            match m.kind {
                MistakeKind::Syntax => true,
                MistakeKind::Key | MistakeKind::Value => !broken.contains(&line_of(m)),
                MistakeKind::Missing | MistakeKind::Relation => !file_is_broken,
            }
        });
    }
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for mistake in &self.mistakes {
            writeln!(f, "{mistake}")?;
        }
        let count = self.mistakes.len();
        let plural = if count == 1 { "" } else { "s" };
        write!(f, "{count} mistake{plural} in the configuration")
    }
}

impl std::error::Error for Diagnostics {}

/// Returns the name in `known` that `found` probably misspells.
pub fn nearest<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |word: &str| word.to_lowercase().replace(['-', '_', ' '], "");
    let found = plain(found);
    known
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(&found, &plain(name)), name))
        // A known word is suggested only if at most a third of its letters differ.
        .filter(|(distance, name)| *distance <= name.len().max(found.len()).div_ceil(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// Formats a list: `a`, `b` or `c`.
pub fn one_of(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => "nothing".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::location::Source;
    use super::*;

    #[test]
    fn mistake_shows_location_excerpt_allowed_and_help() {
        let source = Source::file("lunette.toml", "[[disk]]\n\tsize = \"10X\"\n", 0);
        let location = Location::new(&source, 17..22);
        let mistake = Mistake::new(
            MistakeKind::Value,
            &location,
            "`size`: \"10X\" is not a size",
        )
        .allowed("bytes")
        .help("write \"10G\"");
        assert_eq!(
            mistake.to_string(),
            "lunette.toml:2:9: `size`: \"10X\" is not a size\n  2 | \tsize = \"10X\"\n    | \t       ^^^^^\n  \
             allowed: bytes\n  help: write \"10G\""
        );
    }

    #[test]
    fn flag_is_its_own_location() {
        let source = Source::flag("--disk", "d0=rma:1G", 1);
        let mistake = Mistake::new(
            MistakeKind::Value,
            &Location::new(&source, 3..6),
            "no back end `rma`",
        )
        .did_you_mean("rma", ["ram", "null", "file"]);
        assert_eq!(
            mistake.to_string(),
            "--disk d0=rma:1G: no back end `rma`\n  --disk | d0=rma:1G\n         |    ^^^\n  help: did you mean `ram`?"
        );
        assert_eq!(mistake.to_json()["flag"], "--disk");
        assert_eq!(mistake.to_json()["column"], 4);
    }

    #[test]
    fn suggestion_needs_a_near_match() {
        assert_eq!(
            nearest("readonly", ["read_only", "name"]),
            Some("read_only")
        );
        assert_eq!(nearest("sized", ["size", "serial"]), Some("size"));
        assert_eq!(nearest("colour", ["size", "serial"]), None);
        assert_eq!(nearest("", ["size"]), None);
    }

    #[test]
    fn syntax_error_hides_only_its_consequences() {
        let source = Source::file("a", "x = \ny = 1\nz = 2\n", 0);
        let mut all = Diagnostics::default();
        for (kind, at) in [
            (MistakeKind::Missing, 11),
            (MistakeKind::Value, 5),
            (MistakeKind::Value, 0),
            (MistakeKind::Syntax, 4),
            (MistakeKind::Syntax, 2),
        ] {
            all.push(Mistake::new(kind, &Location::new(&source, at..at + 1), "m"));
        }
        all.sort_and_prune();
        let left: Vec<_> = all
            .iter()
            .map(|m| (m.kind, m.location.span.start))
            .collect();
        assert_eq!(left, [(MistakeKind::Syntax, 2), (MistakeKind::Value, 5)]);
    }
}
