//! What there is to know of a key of a configuration, declared once: the reader, the text of a file, bodies and schema of
//! the API, commands and documents follow from it.

use std::fmt;
use std::ops::RangeInclusive;

use serde_json::{Value, json};

use super::diagnostics::{Mistake, MistakeKind, one_of};
use super::place::At;
use super::size::{SIZE_ALLOWED, render_size};
use super::value::Reader;

/// A key of an object `T`, which is read into a draft `D`.
pub struct Key<D: 'static, T: 'static> {
    /// As it stands in a file, a flag or a body.
    pub name: &'static str,
    /// What its values are.
    pub kind: Kind,
    /// What applies without it, in the words of the documents; [`REQUIRED`] or [`NONE`].
    pub default: &'static str,
    /// How its value changes while the daemon runs.
    pub run_time: RunTime,
    /// The block devices that have it; empty: all.
    pub of: &'static [&'static str],
    /// What it means, in the words of the documents.
    pub help: &'static str,
    /// Reads it.
    pub read: fn(&Key<D, T>, &mut Reader<'_, '_>, &mut D),
    /// Its value; `None`: not said.
    pub get: fn(&T) -> Option<Value>,
}

/// The default of a key that has to be given.
pub const REQUIRED: &str = "-";
/// The default of a key without which nothing applies.
pub const NONE: &str = "none";

/// What the values of a key are.
pub enum Kind {
    /// Yes or no.
    Boolean,
    /// A whole number of some unit.
    Number(&'static str, RangeInclusive<u64>),
    /// One of a few numbers.
    Numbers(&'static [u64]),
    /// Bytes: what the documents say of them, and how many there may be.
    Size(&'static str, RangeInclusive<u64>),
    /// One of a few words.
    Word(&'static [&'static str]),
    /// A text: what the documents say of it, and what a mistake says is allowed.
    Text(&'static str, &'static str),
    /// Text with a limit on its characters.
    ShortText(&'static str, &'static str, usize),
    /// A table of texts.
    Table(&'static str),
}

/// How a value changes while the daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunTime {
    /// By removing the object and adding it again.
    AddAnew,
    /// By a reload, and then only for the next start.
    NextStart,
    /// By the API, or a reload.
    Reload,
    /// By this command, or a reload.
    Command(&'static str),
}

impl fmt::Display for RunTime {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunTime::AddAnew => to.write_str("add anew"),
            RunTime::Reload => to.write_str("API, reload"),
            RunTime::NextStart => to.write_str("reload (for the next start)"),
            RunTime::Command(command) => write!(to, "`{command}`, reload"),
        }
    }
}

impl Kind {
    /// What a mistake says is allowed.
    pub fn allowed(&self) -> String {
        match self {
            Kind::Boolean => "`true` or `false`".to_owned(),
            Kind::Number(_, range) => {
                format!("a whole number from {} to {}", range.start(), range.end())
            }
            Kind::Numbers(numbers) => numbers
                .iter()
                .map(u64::to_string)
                .collect::<Vec<_>>()
                .join(" or "),
            Kind::Size(..) => SIZE_ALLOWED.to_owned(),
            Kind::Word(words) => one_of(words),
            Kind::Text(_, allowed) | Kind::ShortText(_, allowed, _) | Kind::Table(allowed) => {
                (*allowed).to_owned()
            }
        }
    }

    /// What its values are, in the words of the documents.
    pub fn documented(&self) -> String {
        match self {
            Kind::Boolean => "boolean".to_owned(),
            Kind::Number(unit, range) => {
                format!("integer, {unit}, {} to {}", range.start(), range.end())
            }
            Kind::Numbers(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(|n| format!("`{n}`")).collect();
                format!("word: {}", numbers.join(" or "))
            }
            Kind::Size(form, _) => format!("size{form}"),
            Kind::Word(words) => format!("word: {}", one_of(words)),
            Kind::Text(form, _) | Kind::ShortText(form, ..) => format!("string: {form}"),
            Kind::Table(_) => "table of strings".to_owned(),
        }
    }

    /// As a JSON schema.
    fn schema(&self) -> Value {
        match self {
            Kind::Boolean => json!({"type": "boolean"}),
            Kind::Number(_, range) | Kind::Size(_, range) => json!({"type": "integer",
                "format": "int64", "minimum": range.start(), "maximum": range.end()}),
            Kind::Numbers(numbers) => json!({"type": "integer", "format": "int32",
                "minimum": numbers.iter().min(), "maximum": numbers.iter().max()}),
            Kind::Word(words) => {
                json!({"type": "string", "pattern": format!("^({})$", words.join("|"))})
            }
            Kind::Text(..) => json!({"type": "string"}),
            Kind::ShortText(_, _, most) => json!({"type": "string", "maxLength": most}),
            Kind::Table(_) => json!({"type": "object", "additionalProperties": {"type": "string"}}),
        }
    }

    /// `value` as a file has it.
    pub fn toml(&self, value: &Value) -> String {
        match (self, value) {
            (Kind::Size(..), Value::Number(bytes)) => {
                format!("\"{}\"", render_size(bytes.as_u64().unwrap_or(0)))
            }
            (_, value) => toml(value),
        }
    }
}

/// A value in TOML.
fn toml(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Array(items) => {
            format!(
                "[{}]",
                items.iter().map(toml).collect::<Vec<_>>().join(", ")
            )
        }
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(key, value)| format!("{} = {}", quoted(key), toml(value)));
            format!("{{ {} }}", fields.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// A TOML basic string.
pub fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// The words of a choice.
pub const fn words<T, const N: usize>(choices: &[(&'static str, T); N]) -> [&'static str; N] {
    let mut words = [""; N];
    let mut at = 0;
    while at < N {
        words[at] = choices[at].0;
        at += 1;
    }
    words
}

impl<D, T> Key<D, T> {
    /// Has the block device `device` this key? Where that is not known it may have every key.
    pub fn is_of(&self, device: Option<&str>) -> bool {
        self.of.is_empty() || device.is_none_or(|device| self.of.contains(&device))
    }

    /// Has every object to say it?
    pub fn is_required(&self) -> bool {
        self.default == REQUIRED && self.of.is_empty()
    }

    /// A text, where the key is one.
    pub fn text(&self, reader: &mut Reader<'_, '_>) -> Option<At<String>> {
        reader.text(self.name, &self.kind.allowed())
    }

    /// A number, where the key is one.
    pub fn number(&self, reader: &mut Reader<'_, '_>) -> Option<At<u64>> {
        match &self.kind {
            Kind::Number(_, range) => reader.number(self.name, range.clone()),
            _ => None,
        }
    }

    /// Yes, where the key is a boolean and that was said.
    pub fn is_on(&self, reader: &mut Reader<'_, '_>) -> bool {
        reader.boolean(self.name).is_some_and(|at| at.value)
    }

    /// Notes that a text is none that the key can be.
    pub fn refuse(&self, reader: &mut Reader<'_, '_>, text: &At<String>) {
        let message = format!("`{}`: found {:?}", self.name, text.value);
        let mistake = Mistake::new(MistakeKind::Value, &text.place, message);
        reader
            .diagnostics()
            .push(mistake.allowed(self.kind.allowed()));
    }

    /// Its row in the documents.
    pub fn row(&self) -> String {
        let Key {
            name,
            default,
            run_time,
            help,
            ..
        } = self;
        let value = self.kind.documented();
        format!("| `{name}` | {value} | {default} | {run_time} | {help} |")
    }

    /// Its schema in the description of the API.
    pub fn schema(&self) -> Value {
        let mut schema = self.kind.schema();
        let of = match self.of {
            [] => String::new(),
            of => format!("Of the back end `{}`: ", of.join("`, `")),
        };
        let form = match &self.kind {
            Kind::Text(form, _) | Kind::ShortText(form, ..) => format!("{form}; "),
            _ => String::new(),
        };
        let help = without_links(self.help);
        schema["description"] = Value::from(format!("{of}{form}{help}"));
        schema
    }
}

/// A text of the documents without the addresses of its links.
fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once('[') {
        plain.push_str(before);
        match link
            .split_once("](")
            .and_then(|(words, after)| Some((words, after.split_once(')')?.1)))
        {
            Some((words, after)) => {
                plain.push_str(words);
                rest = after;
            }
            None => {
                plain.push('[');
                rest = link;
            }
        }
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_have_the_words_of_links_without_their_addresses() {
        assert_eq!(
            without_links("it [waits](a.md#b) [here](c), [no] (x)"),
            "it waits here, [no] (x)"
        );
    }

    #[test]
    fn values_are_written_as_a_file_has_them() {
        let size = Kind::Size("", 1..=1 << 40);
        assert_eq!(size.toml(&json!(10_u64 << 30)), "\"10G\"");
        assert_eq!(Kind::Boolean.toml(&json!(true)), "true");
        let table = json!({"a b": "c\"d"});
        assert_eq!(Kind::Table("").toml(&table), "{ \"a b\" = \"c\\\"d\" }");
    }
}
