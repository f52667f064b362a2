//! Locations of configuration values: spans of a file or of one flag's text.
//!
//! Each flag's value is a separate source, so that the same code reads and reports files and flags.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A text with configuration: a file, or the value of one flag.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// Path of the file as given, or the flag (`--disk`).
    pub label: String,
    /// Whole text.
    pub text: String,
    /// The source is a flag's value.
    pub is_flag: bool,
    /// Rank among all sources, which determines the order of mistakes.
    pub order: usize,
    /// Start offset of each line: a large file may have as many mistakes as lines.
    line_starts: Vec<usize>,
}

impl Source {
    /// Creates the source of a configuration file.
    pub fn file(label: &str, text: &str, order: usize) -> Arc<Source> {
        Source::new(label, text, false, order)
    }

    /// Creates the source of one flag's value.
    pub fn flag(flag: &str, text: &str, order: usize) -> Arc<Source> {
        Source::new(flag, text, true, order)
    }

    fn new(label: &str, text: &str, is_flag: bool, order: usize) -> Arc<Source> {
        let after_newlines = text.match_indices('\n').map(|(at, _)| at + 1);
        Arc::new(Source {
            label: label.to_owned(),
            text: text.to_owned(),
            is_flag,
            order,
            line_starts: std::iter::once(0).chain(after_newlines).collect(),
        })
    }

    /// Returns index and start offset of the line that contains byte `at`.
    fn line_of(&self, at: usize) -> (usize, usize) {
        let after = self.line_starts.partition_point(|start| *start <= at);
        let index = after.saturating_sub(1);
        (index, self.line_starts.get(index).copied().unwrap_or(0))
    }
}

/// A span of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Source of the span.
    pub source: Arc<Source>,
    /// Byte range.
    pub span: Range<usize>,
}

impl Location {
    /// Creates a location for the bytes `span` of `source`, cut to the length of the text.
    pub fn new(source: &Arc<Source>, span: Range<usize>) -> Location {
        let end = span.end.min(source.text.len());
        Location {
            source: Arc::clone(source),
            span: span.start.min(end)..end,
        }
    }

    /// Returns the location of a source's whole text.
    pub fn whole(source: &Arc<Source>) -> Location {
        Location::new(source, 0..source.text.len())
    }

    /// Returns the nearest start of a character at or before the span.
    fn start(&self) -> usize {
        let mut start = self.span.start.min(self.source.text.len());
        while !self.source.text.is_char_boundary(start) {
            start -= 1;
        }
        start
    }

    /// Returns line and column, both from 1; the column counts characters.
    pub fn line_column(&self) -> (usize, usize) {
        let start = self.start();
        let (line, line_start) = self.source.line_of(start);
        let before = self.source.text.get(line_start..start).unwrap_or("");
        (line + 1, before.chars().count() + 1)
    }

    /// Returns the line that the span starts on, and the number of its characters in the span (at least 1).
    pub fn excerpt(&self) -> (&str, usize) {
        let start = self.start();
        let (_, after) = self.source.text.split_at(start);
        let (_, line_start) = self.source.line_of(start);
        let line_end = after
            .find('\n')
            .map_or(self.source.text.len(), |at| start + at);
        let line = self.source.text.get(line_start..line_end).unwrap_or("");
        let meant = after
            .char_indices()
            .take_while(|&(at, c)| start + at < self.span.end && c != '\n')
            .count();
        (line.trim_end_matches('\r'), meant.max(1))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.source.is_flag {
            return write!(f, "{} {}", self.source.label, self.source.text);
        }
        let (line, column) = self.line_column();
        write!(f, "{}:{line}:{column}", self.source.label)
    }
}

/// A value with its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located<T> {
    /// The value.
    pub value: T,
    /// Location of the value.
    pub location: Location,
}

impl<T> Located<T> {
    /// Creates a `value` at `location`.
    pub fn new(value: T, location: Location) -> Located<T> {
        Located { value, location }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_and_column_count_from_one_and_in_characters() {
        let source = Source::file("a.toml", "x = 1\n# ä\nname = 'ü' # z\n", 0);
        let at = source.text.find("# z").unwrap();
        assert_eq!(Location::new(&source, at..at + 3).line_column(), (3, 12));
        assert_eq!(Location::new(&source, 0..1).to_string(), "a.toml:1:1");
    }

    #[test]
    fn excerpt_is_the_line_of_the_start_and_ends_with_it() {
        let source = Source::file("a.toml", "one\r\ntwo three\r\nfour", 0);
        assert_eq!(Location::new(&source, 9..17).excerpt().0, "two three");
        assert_eq!(Location::new(&source, 5..8).excerpt(), ("two three", 3));
        assert_eq!(Location::new(&source, 99..200).excerpt(), ("four", 1));
    }

    #[test]
    fn a_span_inside_a_character_points_at_the_character() {
        let source = Source::file("a.toml", "ä", 0);
        assert_eq!(Location::new(&source, 1..2).line_column(), (1, 1));
        assert_eq!(Location::new(&source, 1..2).excerpt(), ("ä", 1));
    }
}
