//! Objects before interpretation: keys and values, each with its location.
//!
//! [`Reader`] reads an object key by key and reports all mistakes; a key that no code has read is unknown. Files and flags differ only in
//! [`Raw::Word`], a value without a type.

use std::ops::RangeInclusive;

use super::diagnostics::{Diagnostics, Mistake, MistakeKind, one_of};
use super::location::{Located, Location};
use super::size::{SIZE_ALLOWED, SizeError, parse_size};

/// A value before interpretation.
#[derive(Clone, Debug, PartialEq)]
pub enum Raw {
    /// Value of a flag, which has no type.
    Word(String),
    /// A string.
    Text(String),
    /// An integer.
    Integer(i128),
    /// A boolean.
    Boolean(bool),
    /// An array.
    List(Vec<Located<Raw>>),
    /// A table.
    Table(Fields),
    /// A type that no key accepts: its name and text.
    Other(&'static str, String),
}

impl Raw {
    /// Returns the text, if it is one.
    pub fn text(&self) -> Option<&str> {
        match self {
            Raw::Word(text) | Raw::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the table, if it is one.
    pub fn table(&self) -> Option<&Fields> {
        match self {
            Raw::Table(fields) => Some(fields),
            _ => None,
        }
    }

    /// Returns the value for messages.
    fn found(&self) -> String {
        match self {
            Raw::Word(text) | Raw::Text(text) => format!("{text:?}"),
            Raw::Integer(number) => number.to_string(),
            Raw::Boolean(value) => value.to_string(),
            Raw::List(items) if items.is_empty() => "an empty array".to_owned(),
            Raw::List(_) => "an array".to_owned(),
            Raw::Table(_) => "a table".to_owned(),
            Raw::Other(kind, text) => format!("the {kind} {text}"),
        }
    }
}

/// A key with its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// Key and its location.
    pub key: Located<String>,
    /// Value and its location.
    pub value: Located<Raw>,
}

impl Field {
    /// Creates a field with a key at the location of its value.
    pub fn new(key: &str, value: Located<Raw>) -> Field {
        Field {
            key: Located::new(key.to_owned(), value.location.clone()),
            value,
        }
    }
}

/// An object before interpretation.
#[derive(Clone, Debug, PartialEq)]
pub struct Fields {
    /// Start of the object: the location of mistakes about missing keys.
    pub location: Location,
    /// Keys in the order of the text.
    pub entries: Vec<Field>,
}

impl Fields {
    /// Returns the value of `key`.
    pub fn get(&self, key: &str) -> Option<&Located<Raw>> {
        let field = self.entries.iter().find(|field| field.key.value == key)?;
        Some(&field.value)
    }

    /// Returns the location of the value of `key`.
    pub fn at(&self, key: &str) -> Option<&Location> {
        Some(&self.get(key)?.location)
    }

    /// Returns the value of `key`, if it is a text.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.get(key)?.value.text()
    }

    /// Returns the items of the list `key`.
    pub fn items(&self, key: &str) -> &[Located<Raw>] {
        match self.get(key).map(|value| &value.value) {
            Some(Raw::List(items)) => items,
            _ => &[],
        }
    }

    /// Appends an item to the list `key`.
    pub fn append(&mut self, key: &str, item: Located<Raw>) {
        let mut entries = self.entries.iter_mut();
        match entries
            .find(|field| field.key.value == key)
            .map(|field| &mut field.value.value)
        {
            Some(Raw::List(items)) => items.push(item),
            _ => {
                let location = item.location.clone();
                let list = Located::new(Raw::List(vec![item]), location);
                self.entries.push(Field::new(key, list));
            }
        }
    }
}

/// An object with the text that it was read from, for the locations of mistakes that are found later.
pub struct Draft<T> {
    pub config: T,
    pub fields: Fields,
}

/// Reads an object and reports mistakes.
pub struct Reader<'f, 'd> {
    /// The object.
    pub fields: &'f Fields,
    /// Collected mistakes.
    pub diagnostics: &'d mut Diagnostics,
    /// Name of the object in messages: `disk`.
    object: &'static str,
    known: Vec<&'static str>,
}

impl<'f, 'd> Reader<'f, 'd> {
    /// Creates a reader for `fields`; `object` names the object in messages.
    pub fn new(
        fields: &'f Fields,
        object: &'static str,
        diagnostics: &'d mut Diagnostics,
    ) -> Reader<'f, 'd> {
        Reader {
            fields,
            diagnostics,
            object,
            known: Vec::new(),
        }
    }

    /// Returns the uninterpreted value of `key`.
    pub fn raw(&mut self, key: &'static str) -> Option<&'f Located<Raw>> {
        self.known.push(key);
        let mut found = None;
        for field in &self.fields.entries {
            if field.key.value != key {
                continue;
            }
            if found.is_some() {
                self.diagnostics.push(Mistake::new(
                    MistakeKind::Key,
                    &field.key.location,
                    format!("`{key}` is given twice"),
                ));
            } else {
                found = Some(&field.value);
            }
        }
        found
    }

    /// Returns the location of the value of `key`, if it is present.
    pub fn location(&self, key: &str) -> Option<&'f Location> {
        self.fields.at(key)
    }

    /// Returns the location of the value of `key`, if it is present and no mistake was reported about it.
    pub fn valid(&self, key: &str) -> Option<&'f Location> {
        self.location(key).filter(|at| !self.diagnostics.has(at))
    }

    /// Reports that `key` is missing, unless it is present.
    pub fn require(&mut self, key: &'static str, allowed: &str) {
        if self.location(key).is_none() {
            let message = format!("{}: `{key}` is missing", self.object);
            let mistake = Mistake::new(MistakeKind::Missing, &self.fields.location, message);
            self.diagnostics.push(mistake.allowed(allowed));
        }
    }

    /// Reports that the value of `key` is not allowed.
    pub fn refuse(&mut self, key: &str, value: &Located<Raw>, allowed: &str) {
        self.diagnostics.push(wrong(key, value).allowed(allowed));
    }

    /// Reads the text of `key`.
    pub fn text(&mut self, key: &'static str, allowed: &str) -> Option<Located<String>> {
        let value = self.raw(key)?;
        let text = text_of(key, value, allowed, self.diagnostics)?;
        if text.value.is_empty() {
            self.refuse(key, value, allowed);
            return None;
        }
        Some(text)
    }

    /// Reads a boolean.
    pub fn boolean(&mut self, key: &'static str) -> Option<Located<bool>> {
        let value = self.raw(key)?;
        let read = match &value.value {
            Raw::Boolean(read) => Some(*read),
            Raw::Word(word) => match word.as_str() {
                "on" | "true" | "yes" => Some(true),
                "off" | "false" | "no" => Some(false),
                _ => None,
            },
            _ => None,
        };
        if read.is_none() {
            let allowed = match value.value {
                Raw::Word(_) => "`on` or `off`",
                _ => "`true` or `false`, without quotes",
            };
            self.refuse(key, value, allowed);
        }
        read.map(|read| Located::new(read, value.location.clone()))
    }

    /// Reads an integer within `range`.
    pub fn number(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
    ) -> Option<Located<u64>> {
        let value = self.raw(key)?;
        number_of(key, value, range, self.diagnostics)
    }

    /// Reads a size in bytes.
    pub fn size(&mut self, key: &'static str) -> Option<Located<u64>> {
        let value = self.raw(key)?;
        let (text, bare) = match &value.value {
            Raw::Word(text) | Raw::Text(text) => (text.clone(), false),
            Raw::Integer(number) => (number.to_string(), true),
            _ => {
                self.refuse(key, value, SIZE_ALLOWED);
                return None;
            }
        };
        let at = &value.location;
        match parse_size(&text) {
            Ok(bytes) => return Some(Located::new(bytes, at.clone())),
            Err(SizeError::Ambiguous) => {
                let message = format!("`{key}`: {text:?} may mean powers of 1000 or of 1024");
                let binary = text.trim_end_matches(['b', 'B']);
                let help = format!("write {binary}iB for powers of 1024");
                self.diagnostics
                    .remedy(MistakeKind::Value, at, message, help);
            }
            Err(SizeError::TooLarge) => {
                let message = format!("`{key}`: {text} is too large");
                let allowed = "less than 8E (2^63 bytes)";
                self.diagnostics.refuse(at, message, allowed);
            }
            Err(SizeError::Malformed) if bare => self.refuse(key, value, SIZE_ALLOWED),
            Err(SizeError::Malformed) => {
                let message = format!("`{key}`: {text:?} is not a size");
                self.diagnostics.refuse(at, message, SIZE_ALLOWED);
            }
        }
        None
    }

    /// Reads one of several words.
    pub fn choice<T: Copy>(
        &mut self,
        key: &'static str,
        choices: &[(&str, T)],
    ) -> Option<Located<T>> {
        let value = self.raw(key)?;
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        let text = text_of(key, value, &one_of(&words), self.diagnostics)?;
        match choices.iter().find(|(word, _)| *word == text.value) {
            Some((_, choice)) => Some(Located::new(*choice, text.location)),
            None => {
                let mistake = wrong(key, value)
                    .allowed(one_of(&words))
                    .did_you_mean(&text.value, words);
                self.diagnostics.push(mistake);
                None
            }
        }
    }

    /// Reads the items of a list that `read` accepts, and reports the others. A flag has one of them.
    pub fn list<T>(
        &mut self,
        key: &'static str,
        allowed: &str,
        read: impl Fn(&'f Raw) -> Option<T>,
    ) -> Vec<Located<T>> {
        let mut accepted = Vec::new();
        let Some(value) = self.raw(key) else {
            return accepted;
        };
        let items = match &value.value {
            Raw::List(items) => items.as_slice(),
            Raw::Word(_) => std::slice::from_ref(value),
            _ => {
                self.refuse(key, value, allowed);
                return accepted;
            }
        };
        for item in items {
            match read(&item.value) {
                Some(value) => accepted.push(Located::new(value, item.location.clone())),
                None => self.refuse(key, item, allowed),
            }
        }
        accepted
    }

    /// Reads the objects of `key`: an array of tables.
    pub fn objects(&mut self, key: &'static str, example: &str) -> Vec<&'f Fields> {
        let tables = self.list(key, example, Raw::table);
        tables.into_iter().map(|at| at.value).collect()
    }

    /// Reads the table of `key`.
    pub fn table(&mut self, key: &'static str, example: &str) -> Option<&'f Fields> {
        let value = self.raw(key)?;
        let table = value.value.table();
        if table.is_none() {
            self.refuse(key, value, example);
        }
        table
    }

    /// Reports all keys that were not read. `elsewhere` returns a hint for keys of other objects.
    pub fn finish(self, elsewhere: impl Fn(&str) -> Option<String>) {
        for field in &self.fields.entries {
            let key = field.key.value.as_str();
            if self.known.contains(&key) {
                continue;
            }
            let location = &field.key.location;
            let mistake = match elsewhere(key) {
                Some(reason) => Mistake::new(MistakeKind::Key, location, reason),
                None => {
                    let message = format!("{}: no key `{key}`", self.object);
                    Mistake::new(MistakeKind::Key, location, message)
                        .did_you_mean(key, self.known.iter().copied())
                }
            };
            self.diagnostics.push(mistake.allowed(one_of(&self.known)));
        }
    }
}

/// Returns the items of a list. In a flag they are separated by `+`.
pub fn items_of(value: &Located<Raw>) -> Option<Vec<Located<Raw>>> {
    let word = |word: &str| Located::new(Raw::Word(word.to_owned()), value.location.clone());
    match &value.value {
        Raw::List(items) => Some(items.clone()),
        Raw::Word(words) => Some(words.split('+').map(word).collect()),
        _ => None,
    }
}

/// Creates the mistake that `value` is invalid for `key`.
pub fn wrong(key: &str, value: &Located<Raw>) -> Mistake {
    let message = format!("`{key}`: found {}", value.value.found());
    Mistake::new(MistakeKind::Value, &value.location, message)
}

/// Reads a text, or reports a mistake.
pub fn text_of(
    key: &str,
    value: &Located<Raw>,
    allowed: &str,
    diagnostics: &mut Diagnostics,
) -> Option<Located<String>> {
    let text = value.value.text();
    if text.is_none() {
        diagnostics.push(wrong(key, value).allowed(allowed));
    }
    Some(Located::new(text?.to_owned(), value.location.clone()))
}

/// Reads an integer within `range`, or reports a mistake.
pub fn number_of(
    key: &str,
    value: &Located<Raw>,
    range: RangeInclusive<u64>,
    diagnostics: &mut Diagnostics,
) -> Option<Located<u64>> {
    let read = match &value.value {
        Raw::Integer(number) => u64::try_from(*number).ok(),
        Raw::Word(word) => word.parse::<u64>().ok(),
        _ => None,
    };
    match read.filter(|number| range.contains(number)) {
        Some(number) => Some(Located::new(number, value.location.clone())),
        None => {
            let mut mistake = wrong(key, value).allowed(format!(
                "a whole number from {} to {}",
                range.start(),
                range.end()
            ));
            if let Raw::Text(text) = &value.value
                && text.parse::<u64>().is_ok()
            {
                mistake = mistake.help("write the number without quotes");
            }
            diagnostics.push(mistake);
            None
        }
    }
}
