//! Output to a terminal. Text from images, targets, initiators, guests and other daemons may contain control characters that change the
//! display. [`stdout`] and [`stderr`] escape them in all output. [`printable`] escapes also line breaks, for single fields.
//!
//! The escape is `\u001b`, which JSON and TOML read as the same character, so documents stay valid.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, StderrLock, StdoutLock, Write};

/// Returns true for characters that control a terminal: C0, DEL, C1, and those that change the direction of text.
const fn is_control(c: char) -> bool {
    matches!(
        c,
        '\0'..='\x1f' | '\x7f'..='\u{9f}' | '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    )
}

/// Escapes the control characters of `text`, except for those in `keep`.
fn escape<'a>(text: &'a str, keep: &[char]) -> Cow<'a, str> {
    let is_escaped = |c: char| is_control(c) && !keep.contains(&c);
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match is_escaped(c) {
            // Writing to a String cannot fail.
            true => write!(escaped, "\\u{:04x}", u32::from(c)).unwrap_or_default(),
            false => escaped.push(c),
        }
    }
    Cow::Owned(escaped)
}

/// Escapes all control characters of a field, line breaks and tabs included.
pub fn printable(text: &str) -> Cow<'_, str> {
    escape(text, &[])
}

/// A writer to a terminal that escapes control characters, except for line breaks and tabs. Each write is whole text.
#[derive(Debug)]
pub struct Terminal<W>(W);

impl<W: Write> Terminal<W> {
    /// Writes a control sequence of this program, which moves the cursor or clears a line.
    ///
    /// # Errors
    /// If the write fails.
    pub fn control(&mut self, sequence: &'static str) -> io::Result<()> {
        self.0.write_all(sequence.as_bytes())
    }
}

impl<W: Write> Write for Terminal<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        self.0.write_all(escape(&text, &['\n', '\t']).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Standard output for text.
pub fn stdout() -> Terminal<StdoutLock<'static>> {
    Terminal(io::stdout().lock())
}

/// Standard error for text.
pub fn stderr() -> Terminal<StderrLock<'static>> {
    Terminal(io::stderr().lock())
}

/// A writer of log lines. Each write is one event without colors and with one line break, at its end.
#[derive(Debug)]
pub(crate) struct LogLines<W> {
    to: W,
    /// Colors times and levels. The formatter's own colors would require passing escape sequences, which values may contain too.
    has_colors: bool,
}

/// SGR parameters of each level.
const LEVEL_COLORS: [(&str, u8); 5] = [
    ("ERROR", 31),
    ("WARN", 33),
    ("INFO", 32),
    ("DEBUG", 34),
    ("TRACE", 35),
];

impl<W> LogLines<W> {
    pub fn new(to: W, has_colors: bool) -> LogLines<W> {
        LogLines { to, has_colors }
    }
}

/// Colors the time and the level at the beginning of an escaped line.
fn colored(line: &str) -> Option<String> {
    let (time, rest) = line.split_once(' ')?;
    let rest = rest.trim_start();
    let found = LEVEL_COLORS
        .iter()
        .find(|(level, _)| rest.starts_with(level));
    let (level, color) = found?;
    let rest = rest.strip_prefix(level)?;
    Some(format!(
        "\x1b[2m{time}\x1b[0m \x1b[{color}m{level:>5}\x1b[0m{rest}"
    ))
}

impl<W: Write> Write for LogLines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let (line, end) = match text.strip_suffix('\n') {
            Some(line) => (line, "\n"),
            None => (&*text, ""),
        };
        let line = printable(line);
        let with_colors = self.has_colors.then(|| colored(&line)).flatten();
        let line = with_colors.as_deref().unwrap_or(&line);
        self.to.write_all(format!("{line}{end}").as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Hostile text: a new title, a cleared screen by ESC and by C1, a forged line, text that reads backwards.
    pub const HOSTILE: &str =
        "a\x1b]0;x\x07\u{9b}2J\x7f\rb\nlunette: done\u{202e}c\u{2066}d\te\u{200e}\u{200f}\u{61c}";

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(
            printable(HOSTILE),
            "a\\u001b]0;x\\u0007\\u009b2J\\u007f\\u000db\\u000alunette: done\\u202ec\\u2066d\\u0009e\\u200e\\u200f\\u061c"
        );
        // Other text stays as it is, without a copy.
        for text in ["iqn.2026-11.org.example:t0", "Gerät 日本", "\u{a0}", ""] {
            assert!(matches!(printable(text), Cow::Borrowed(same) if same == text));
        }
    }

    #[test]
    fn output_retains_only_line_breaks() {
        let mut terminal = Terminal(Vec::new());
        write!(terminal, "{HOSTILE}\n\u{1f600}").unwrap();
        terminal.write_all(&[0x9b, b'm']).unwrap();
        let text = String::from_utf8(terminal.0).unwrap();
        assert_eq!(
            text,
            "a\\u001b]0;x\\u0007\\u009b2J\\u007f\\u000db\nlunette: done\\u202ec\\u2066d\te\\u200e\\u200f\\u061c\n\u{1f600}\u{fffd}m"
        );
    }

    #[test]
    fn json_and_toml_are_unchanged() {
        let hostile = serde_json::json!({ "name": HOSTILE });
        let mut terminal = Terminal(Vec::new());
        write!(terminal, "{hostile:#}").unwrap();
        let text = String::from_utf8(terminal.0).unwrap();
        let shown = text.chars().filter(|c| *c != '\n');
        assert!(!shown.into_iter().any(is_control), "{text}");
        let read: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(read, hostile);
    }
}
