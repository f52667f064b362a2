//! Counts phrases that make prose hard to read, in comments, documents and messages of this source tree.
//!
//! A phrase is a sequence of words. Code, paths and placeholders are not prose: spans in backquotes, fenced blocks and `{...}` in
//! messages are ignored. The budgets are in `tests/tests/tidy.rs`; a test in `tests/tests/documents.rs` shows which text counts.

/// Text that is read by different readers and has separate budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Comments of Rust and TypeScript files.
    Comment,
    /// Markdown outside of code.
    Document,
    /// String literals with at least two words: errors, log lines, help texts, messages of tests.
    Message,
}

impl Kind {
    /// Plural, for failure messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Comment => "comments",
            Kind::Document => "documents",
            Kind::Message => "messages",
        }
    }
}

/// Phrases with a common remedy.
struct Pattern {
    /// Sequences of lower-case words.
    phrases: &'static [&'static str],
    /// Only at the beginning of a sentence.
    opens_sentence: bool,
    /// Remedy for the author.
    advice: &'static str,
}

const PATTERNS: [Pattern; 8] = [
    Pattern {
        phrases: &["what"],
        opens_sentence: false,
        advice: "use a noun: \"the size of the disk\", \"the reason\", \"the previous owner\"",
    },
    Pattern {
        phrases: &[
            "who",
            "whom",
            "whose",
            "whoever",
            "nobody",
            "somebody",
            "everybody",
            "anybody",
        ],
        opens_sentence: false,
        advice: "name the component: the client, the driver, the daemon, the administrator",
    },
    Pattern {
        phrases: &["say", "says", "said", "tell", "tells", "told"],
        opens_sentence: false,
        advice: "name the operation: reports, returns, logs, requests, contains",
    },
    Pattern {
        phrases: &["know", "knows", "knew"],
        opens_sentence: false,
        advice: "state the fact: \"the size is cached\", \"unknown type\"",
    },
    Pattern {
        phrases: &[
            "go on",
            "goes on",
            "going on",
            "went on",
            "gone on",
            "come back",
            "comes back",
        ],
        opens_sentence: false,
        advice: "use continues, proceeds, remains or returns",
    },
    Pattern {
        phrases: &[
            "of which",
            "in which",
            "for which",
            "by which",
            "from which",
            "with which",
        ],
        opens_sentence: false,
        advice: "write two sentences",
    },
    Pattern {
        phrases: &[
            "anew",
            "so many",
            "so much",
            "so long",
            "as many as",
            "that which",
            "else whose",
            "in vain",
            "for ever",
            "thereby",
            "whatever",
        ],
        opens_sentence: false,
        advice: "use again, the number of, without a result, without a limit",
    },
    Pattern {
        phrases: &[
            "of",
            "so",
            "else",
            "whether",
            "there is nothing",
            "there is none",
            "there are none",
            "it is said",
        ],
        opens_sentence: true,
        advice: "begin with the subject or the verb",
    },
];

/// A piece of prose: kind, line number from 1, text.
pub type Piece = (Kind, usize, String);

/// Returns the prose of a file; nothing for other types than Markdown, Rust and TypeScript.
pub fn pieces(path: &str, text: &str) -> Vec<Piece> {
    match path.rsplit('.').next() {
        Some("md") => document(text),
        Some("rs" | "ts") => source(text),
        _ => Vec::new(),
    }
}

/// Returns the number of words.
pub fn word_count(prose: &str) -> usize {
    prose.split_whitespace().count()
}

/// Returns each phrase found, with its remedy.
pub fn marks(prose: &str) -> Vec<(&'static str, &'static str)> {
    let mut found = Vec::new();
    let words = words(prose);
    for at in 0..words.len() {
        for pattern in &PATTERNS {
            let allowed = !pattern.opens_sentence || words[at].opens_sentence;
            for phrase in pattern.phrases.iter().filter(|_| allowed) {
                let mut here = words[at..].iter().map(|word| word.text.as_str());
                if phrase.split(' ').all(|wanted| here.next() == Some(wanted)) {
                    found.push((*phrase, pattern.advice));
                }
            }
        }
    }
    found
}

struct Word {
    text: String,
    opens_sentence: bool,
}

fn words(prose: &str) -> Vec<Word> {
    let mut words: Vec<Word> = Vec::new();
    let mut ended = true;
    for part in prose.split_whitespace() {
        let bare = part.trim_matches(|c: char| !c.is_alphanumeric());
        if !bare.is_empty() {
            let is_capital = bare.chars().next().is_some_and(char::is_uppercase);
            words.push(Word {
                text: bare.to_lowercase(),
                opens_sentence: ended && is_capital,
            });
        }
        ended = part.ends_with(['.', ':', ';']);
    }
    words
}

/// Replaces text between two delimiters by a blank.
fn without(text: &str, open: char, close: char) -> String {
    let mut kept = String::new();
    let mut is_inside = false;
    for c in text.chars() {
        match is_inside {
            true => is_inside = c != close,
            false if c == open => {
                kept.push(' ');
                is_inside = true;
            }
            false => kept.push(c),
        }
    }
    kept
}

fn document(text: &str) -> Vec<Piece> {
    let mut is_fenced = false;
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
        } else if !is_fenced {
            let mut prose = without(line, '`', '`');
            // Targets of links are paths.
            while let Some(at) = prose.find("](") {
                let end = prose[at..].find(')').map_or(prose.len(), |end| at + end);
                prose.replace_range(at..end, " ");
            }
            found.push((Kind::Document, number + 1, prose));
        }
    }
    found
}

fn source(text: &str) -> Vec<Piece> {
    let mut found = Vec::new();
    let (mut line, mut rest) = (1, text);
    while let Some(c) = rest.chars().next() {
        let (taken, piece) = if rest.starts_with("//") {
            let end = rest.find('\n').unwrap_or(rest.len());
            let comment = rest[..end].trim_start_matches(['/', '!']);
            (end, Some((Kind::Comment, without(comment, '`', '`'))))
        } else if let Some(end) = raw_string_end(rest) {
            let text = rest[..end].split_once('"').map_or("", |(_, text)| text);
            (end, Some((Kind::Message, text.to_owned())))
        } else if c == '"' {
            let end = string_end(rest);
            (end, Some((Kind::Message, plain(&rest[1..end.max(2) - 1]))))
        } else if c == '\'' {
            (char_end(rest), None)
        } else if c.is_alphanumeric() || c == '_' {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
            (end.unwrap_or(rest.len()), None)
        } else {
            (c.len_utf8(), None)
        };
        if let Some((kind, prose)) = piece
            && (kind == Kind::Comment || is_message(&prose))
        {
            found.push((kind, line, without(&prose, '{', '}')));
        }
        line += rest[..taken].matches('\n').count();
        rest = &rest[taken..];
    }
    found
}

/// Paths and single words are not messages.
fn is_message(prose: &str) -> bool {
    !prose.starts_with('/') && prose.trim().contains(char::is_whitespace)
}

/// Removes escapes and the line breaks of continued literals.
fn plain(literal: &str) -> String {
    literal
        .replace("\\n", " ")
        .replace("\\\n", " ")
        .replace(['\\', '"'], "")
}

fn string_end(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

fn raw_string_end(text: &str) -> Option<usize> {
    let hashes = text.strip_prefix('r')?;
    let count = hashes.bytes().take_while(|byte| *byte == b'#').count();
    let body = hashes[count..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(count));
    let end = body
        .find(&close)
        .map_or(body.len(), |end| end + close.len());
    Some(2 + count + end)
}

/// Returns the end of a character literal, or of the quote of a lifetime.
fn char_end(text: &str) -> usize {
    let mut inner = text.chars().skip(1);
    let first = inner.next();
    match (first, inner.next()) {
        (Some('\\'), Some(_)) => text[3..].find('\'').map_or(1, |end| 3 + end + 1),
        (Some(c), Some('\'')) => 2 + c.len_utf8(),
        _ => 1,
    }
}
