//! Declarations of configuration keys. Each key is declared once: the reader, the text of a file, bodies and schema of the API, commands
//! and documentation are derived from it.

use std::ops::RangeInclusive;

use iscsi::address::{SECRET_REFUSED, has_secret};
use serde_json::{Value, json};

use super::diagnostics::{Mistake, MistakeKind, one_of};
use super::location::Located;
use super::model::POLL_MICROS_MAX;
use super::size::{SIZE_ALLOWED, parse_size, render_size};
use super::value::{Raw, Reader};

/// A key of an object `T`, read into a draft `D`.
pub struct Key<D: 'static, T: 'static = D> {
    /// Name in files, flags and bodies.
    pub name: &'static str,
    /// Kind of its values.
    pub kind: Kind,
    /// Default in the documentation; `REQUIRED` or `NONE`.
    pub default: &'static str,
    /// Way to change its value while the daemon runs.
    pub run_time: RunTime,
    /// Block devices that have it; empty: all.
    pub of: &'static [&'static str],
    /// Description in the documentation.
    pub help: &'static str,
    /// Reads its value.
    pub read: fn(&Key<D, T>, &mut Reader<'_, '_>, &mut D),
    /// Returns its value; `None` if it is not set.
    pub get: fn(&T) -> Option<Value>,
}

/// Default of a required key.
pub const REQUIRED: &str = "-";
/// Default of a key without effect if absent.
pub const NONE: &str = "none";

/// Line of a help page: key, values, default and meaning.
pub(super) type KeyLine = [String; 4];

/// Kind of a key's values.
pub enum Kind {
    /// Boolean.
    Boolean,
    /// An integer, with its unit and range.
    Number(&'static str, RangeInclusive<u64>),
    /// One of a few numbers.
    Numbers(&'static [u64]),
    /// A size in bytes: description in the documentation, range.
    Size(&'static str, RangeInclusive<u64>),
    /// One of a few words.
    Word(&'static [&'static str]),
    /// A text: description in the documentation, and allowed values in messages.
    Text(&'static str, &'static str),
    /// A text with a condition: description in the documentation, allowed values in messages, and the condition.
    Checked(&'static str, &'static str, Check),
    /// A text with a maximum number of bytes: description in the documentation, allowed values in messages, maximum, allowed characters.
    ShortText(&'static str, &'static str, usize, fn(char) -> bool),
    /// A table of texts.
    Table(&'static str),
    /// A list: description in the documentation, allowed values in messages, and type of its items.
    List(&'static str, &'static str, Item),
    /// Tables with separate headings: description in the documentation, and allowed values in messages.
    Sections(&'static str, &'static str),
    /// A polling limit.
    Poll,
}

/// Checks a text.
///
/// # Errors
/// The reason of a refusal. If it is empty, the message shows the text.
pub type Check = fn(&str) -> Result<(), String>;

/// Allowed values of a polling limit.
pub const POLL_ALLOWED: &str = "0 (never poll), microseconds up to 1000000, or \"always\"";

/// Returns an error without a reason, unless a text `is_allowed`.
pub fn allow(is_allowed: bool) -> Result<(), String> {
    match is_allowed {
        true => Ok(()),
        false => Err(String::new()),
    }
}

/// Type of a list's items.
pub enum Item {
    /// Texts.
    Text,
    /// Integers.
    Number,
    /// Tables.
    Table {
        /// Fields in a file, in this order.
        fields: &'static [&'static str],
        /// Returns the schema of a table.
        schema: fn() -> Value,
    },
}

/// Way to change a value while the daemon runs, as the documentation names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunTime(pub &'static str);

impl RunTime {
    /// The value cannot change.
    pub const NEVER: RunTime = RunTime("-");
    /// Changed by a restart of the daemon.
    pub const RESTART: RunTime = RunTime("restart");
    /// Changed by a restart of the daemon. The content of the named file is read again when it changes.
    pub const RESTART_REREAD: RunTime = RunTime("restart (the content: immediately)");
    /// Changed by a reload only.
    pub const ONLY_RELOAD: RunTime = RunTime("reload");
    /// Changed by a reload only, like the content of the named file.
    pub const ONLY_RELOAD_REREAD: RunTime = RunTime("reload (also its content)");
    /// Changed by the API or a reload. The change ends the session of the export's client.
    pub const ENDS_SESSION: RunTime = RunTime("API, reload; ends the session");
    /// Changed by the API or a reload, like the content of the named file.
    pub const RELOAD_REREAD: RunTime = RunTime("API, reload (also its content)");
    /// Changed by removing the object and adding it again.
    pub const ADD_AGAIN: RunTime = RunTime("add again");
    /// Changed by the API or a reload.
    pub const RELOAD: RunTime = RunTime("API, reload");
    /// Changed by a reload, with effect from the next start.
    pub const NEXT_START: RunTime = RunTime("reload (for the next start)");
}

impl Kind {
    /// Returns the allowed values for messages.
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
            Kind::Text(_, allowed)
            | Kind::Checked(_, allowed, _)
            | Kind::ShortText(_, allowed, ..)
            | Kind::Table(allowed)
            | Kind::List(_, allowed, _)
            | Kind::Sections(_, allowed) => (*allowed).to_owned(),
            Kind::Poll => POLL_ALLOWED.to_owned(),
        }
    }

    /// Returns the description of its values in the documentation.
    pub fn documented(&self) -> String {
        match self {
            Kind::Boolean => "boolean".to_owned(),
            Kind::Number("", range) => format!("integer, {} to {}", range.start(), range.end()),
            Kind::Number(unit, range) => {
                format!("integer, {unit}, {} to {}", range.start(), range.end())
            }
            Kind::Numbers(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(|n| format!("`{n}`")).collect();
                format!("integer: {}", numbers.join(" or "))
            }
            Kind::Size(form, _) => format!("size{form}"),
            Kind::Word(words) => format!("word: {}", one_of(words)),
            Kind::Text(form, _) | Kind::Checked(form, ..) | Kind::ShortText(form, ..) => {
                format!("string: {form}")
            }
            Kind::Table(_) => "table of strings".to_owned(),
            Kind::List(documented, ..) | Kind::Sections(documented, _) => (*documented).to_owned(),
            Kind::Poll => format!("integer, µs, 0 to {POLL_MICROS_MAX}, or `always`"),
        }
    }

    /// Returns a JSON schema.
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
            Kind::Text(..) | Kind::Checked(..) => json!({"type": "string"}),
            Kind::ShortText(_, _, most, _) => json!({"type": "string", "maxLength": most}),
            Kind::Table(_) => json!({"type": "object", "additionalProperties": {"type": "string"}}),
            Kind::List(_, _, item) => {
                let items = match item {
                    Item::Text => json!({"type": "string"}),
                    Item::Number => json!({"type": "integer", "format": "int32", "minimum": 0}),
                    Item::Table { schema, .. } => schema(),
                };
                json!({"type": "array", "items": items})
            }
            // The API has lists and resources for these.
            Kind::Sections(..) | Kind::Poll => json!({}),
        }
    }

    /// Returns `value` in the form of a file.
    pub fn toml(&self, value: &Value) -> String {
        match (self, value) {
            (Kind::Size(..), Value::Number(bytes)) => {
                format!("\"{}\"", render_size(bytes.as_u64().unwrap_or(0)))
            }
            (Kind::List(_, _, Item::Table { fields, .. }), Value::Array(items)) => {
                let lines = items.iter().map(|item| {
                    let fields = fields.iter();
                    let present = fields.filter_map(|field| Some((*field, item.get(*field)?)));
                    format!("  {},\n", inline_table(present))
                });
                format!("[\n{}]", lines.collect::<String>())
            }
            (_, value) => toml(value),
        }
    }
}

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
            inline_table(fields.iter().map(|(key, value)| (key.as_str(), value)))
        }
        other => other.to_string(),
    }
}

fn inline_table<'a>(fields: impl Iterator<Item = (&'a str, &'a Value)>) -> String {
    let is_bare = |key: &str| {
        let bare = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
        !key.is_empty() && key.chars().all(bare)
    };
    let fields = fields.map(|(key, value)| match is_bare(key) {
        true => format!("{key} = {}", toml(value)),
        false => format!("{} = {}", quoted(key), toml(value)),
    });
    format!("{{ {} }}", fields.collect::<Vec<_>>().join(", "))
}

/// Returns a TOML basic string.
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

/// Returns the words of a choice.
pub const fn words<T, const N: usize>(choices: &[(&'static str, T); N]) -> [&'static str; N] {
    let mut words = [""; N];
    let mut at = 0;
    while at < N {
        words[at] = choices[at].0;
        at += 1;
    }
    words
}

/// Reads all keys of an object, and reports missing ones.
pub fn read_all<D, T>(keys: &'static [Key<D, T>], reader: &mut Reader<'_, '_>, draft: &mut D) {
    for key in keys.iter().filter(|key| key.is_required()) {
        reader.require(key.name, &key.kind.allowed());
    }
    for key in keys {
        (key.read)(key, reader, draft);
    }
}

/// A key of an object with its value.
pub struct KeyValue {
    /// The key.
    pub name: &'static str,
    /// Kind of its values.
    pub kind: &'static Kind,
    /// The value.
    pub value: Value,
}

/// Returns the values of an object, in the order of its keys.
pub fn key_values<D: 'static, T: 'static>(
    keys: impl IntoIterator<Item = &'static Key<D, T>>,
    object: &T,
) -> Vec<KeyValue> {
    let key_value = |key: &'static Key<D, T>| {
        Some(KeyValue {
            name: key.name,
            kind: &key.kind,
            value: (key.get)(object)?,
        })
    };
    keys.into_iter().filter_map(key_value).collect()
}

/// Returns the keys with different values in two objects.
pub fn differing<'k, D: 'static, T: 'static>(
    keys: impl Iterator<Item = &'k Key<D, T>>,
    one: &T,
    other: &T,
) -> impl Iterator<Item = &'k Key<D, T>> {
    keys.filter(move |key| (key.get)(one) != (key.get)(other))
}

/// Returns values as a JSON object.
pub fn json_of(values: Vec<KeyValue>) -> Value {
    let fields = values
        .into_iter()
        .map(|one| (one.name.to_owned(), one.value));
    Value::Object(fields.collect())
}

/// Returns the schema of an object with these keys.
pub fn schema_of<D: 'static, T: 'static>(
    keys: impl IntoIterator<Item = &'static Key<D, T>>,
) -> Value {
    let keys: Vec<_> = keys.into_iter().collect();
    let properties = keys.iter().map(|key| (key.name.to_owned(), key.schema()));
    let properties: serde_json::Map<String, Value> = properties.collect();
    let required = keys.iter().filter(|key| key.is_required());
    let required: Vec<&str> = required.map(|key| key.name).collect();
    let mut schema = json!({"type": "object", "properties": properties});
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

impl<D, T> Key<D, T> {
    /// Returns true if the block device `device` has this key. An unknown device may have every key.
    pub fn is_of(&self, device: Option<&str>) -> bool {
        self.of.is_empty() || device.is_none_or(|device| self.of.contains(&device))
    }

    /// Returns true if every object needs it.
    pub fn is_required(&self) -> bool {
        self.default == REQUIRED && self.of.is_empty()
    }

    /// Reads a text. A text that its kind does not allow is reported and returned, so that references to it are not reported too.
    pub fn text(&self, reader: &mut Reader<'_, '_>) -> Option<Located<String>> {
        let text = reader.text(self.name, &self.kind.allowed())?;
        let checked = match &self.kind {
            Kind::Checked(_, _, check) => check(&text.value),
            Kind::ShortText(_, _, most, is_allowed) => {
                allow(text.value.len() <= *most && text.value.chars().all(is_allowed))
            }
            _ => Ok(()),
        };
        if let Err(reason) = checked {
            self.refuse(reader, &text, &reason);
        }
        Some(text)
    }

    /// Reads a text and parses it.
    pub fn parsed<V>(
        &self,
        reader: &mut Reader<'_, '_>,
        parse: impl FnOnce(&str) -> Result<V, String>,
    ) -> Option<Located<V>> {
        let text = self.text(reader)?;
        match parse(&text.value) {
            Ok(value) => Some(Located::new(value, text.location)),
            Err(reason) => {
                self.refuse(reader, &text, &reason);
                None
            }
        }
    }

    /// Reads a number or a size, if the key is one.
    pub fn number(&self, reader: &mut Reader<'_, '_>) -> Option<Located<u64>> {
        match &self.kind {
            Kind::Number(_, range) => reader.number(self.name, range.clone()),
            Kind::Numbers(numbers) => {
                let value = reader.raw(self.name)?;
                let number = match &value.value {
                    Raw::Integer(number) => u64::try_from(*number).ok(),
                    Raw::Word(word) => parse_size(word).ok(),
                    _ => None,
                };
                let number = number.filter(|number| numbers.contains(number));
                if number.is_none() {
                    reader.refuse(self.name, value, &self.kind.allowed());
                }
                Some(Located::new(number?, value.location.clone()))
            }
            Kind::Size(_, range) => {
                let size = reader.size(self.name)?;
                if range.contains(&size.value) {
                    return Some(size);
                }
                let message = format!("`{}`: found {} bytes", self.name, size.value);
                let [least, most] = [range.start(), range.end()].map(|size| render_size(*size));
                let mistake = Mistake::new(MistakeKind::Value, &size.location, message);
                let mistake = mistake.allowed(format!("{least} to {most}"));
                reader.diagnostics.push(match (size.value, self.default) {
                    (0, NONE) => mistake.help("to remove the limit, remove the key"),
                    _ => mistake,
                });
                None
            }
            _ => None,
        }
    }

    /// Reports that a text is invalid for the key. Without a reason the message shows the text.
    fn refuse(&self, reader: &mut Reader<'_, '_>, text: &Located<String>, reason: &str) {
        // In a flag the prefix may be cut off.
        let is_secret = has_secret(&format!("iscsi:{}", text.value)) || has_secret(&text.value);
        let message = match reason {
            "" if is_secret => format!("`{}`: {SECRET_REFUSED}", self.name),
            "" => format!("`{}`: found {:?}", self.name, text.value),
            reason => format!("`{}`: {reason}", self.name),
        };
        let allowed = self.kind.allowed();
        reader.diagnostics.refuse(&text.location, message, allowed);
    }

    /// Returns its row in the documentation.
    pub fn row(&self) -> String {
        let (name, value, default) = (self.name, self.kind.documented(), self.default);
        let (RunTime(run_time), help) = (self.run_time, self.help);
        format!("| `{name}` | {value} | {default} | {run_time} | {help} |")
    }

    /// Returns its line in a page of `lunette help`.
    pub(super) fn help_line(&self) -> KeyLine {
        let default = match self.default {
            REQUIRED => "required".to_owned(),
            default => plain(default),
        };
        let value = plain(&self.kind.documented());
        [self.name.to_owned(), value, default, plain(self.help)]
    }

    /// Returns its schema in the description of the API.
    pub fn schema(&self) -> Value {
        let mut schema = self.kind.schema();
        let of = match self.of {
            [] => String::new(),
            of => format!("For the back end `{}`: ", of.join("`, `")),
        };
        let form = match &self.kind {
            Kind::Text(form, _)
            | Kind::Checked(form, ..)
            | Kind::ShortText(form, ..)
            | Kind::List(form, ..) => format!("{form}; "),
            _ => String::new(),
        };
        let help = without_links(self.help);
        schema["description"] = Value::from(format!("{of}{form}{help}"));
        schema
    }
}

/// Removes the markup from a text of the documentation.
fn plain(text: &str) -> String {
    without_links(text).replace('`', "")
}

/// Removes the addresses of links from a text of the documentation.
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
