//! Parses TOML text into keys and values with their locations. Reports all syntax errors, not only the first.

use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::location::{Located, Location, Source};
use super::value::{Field, Fields, Raw};

/// Reads the top-level table of `source`.
pub fn read_toml(source: &Arc<Source>, diagnostics: &mut Diagnostics) -> Fields {
    let (table, errors) = DeTable::parse_recoverable(&source.text);
    for error in errors {
        let location = Location::new(source, error.span().unwrap_or(0..0));
        let message = format!("not TOML: {}", error.message());
        let mut mistake = Mistake::new(MistakeKind::Syntax, &location, message);
        if let Some(help) = unquoted(location.excerpt().0) {
            mistake = mistake.help(help);
        }
        diagnostics.push(mistake);
    }
    fields(source, table.get_ref(), Location::new(source, 0..0))
}

/// Returns a suggestion for the most common error: an unquoted string.
fn unquoted(line: &str) -> Option<String> {
    let (key, value) = line.split_once('=')?;
    let value = value.split('#').next()?.trim();
    let is_word = |c: char| c.is_ascii_alphanumeric() || "./-_:".contains(c);
    let is_value = || DeTable::parse(&format!("key = {value}")).is_ok();
    (!value.is_empty() && value.chars().all(is_word) && !is_value())
        .then(|| format!("a string needs quotes: {} = \"{value}\"", key.trim()))
}

fn fields(source: &Arc<Source>, table: &DeTable<'_>, location: Location) -> Fields {
    let mut entries: Vec<Field> = table
        .iter()
        .map(|(key, value)| Field {
            key: Located::new(key.get_ref().to_string(), Location::new(source, key.span())),
            value: raw(source, value),
        })
        .collect();
    entries.sort_by_key(|field| field.key.location.span.start);
    Fields { location, entries }
}

fn raw(source: &Arc<Source>, value: &Spanned<DeValue<'_>>) -> Located<Raw> {
    let location = Location::new(source, value.span());
    let raw = match value.get_ref() {
        DeValue::String(text) => Raw::Text(text.to_string()),
        DeValue::Integer(integer) => {
            let digits = integer.as_str();
            match i128::from_str_radix(digits, integer.radix()) {
                Ok(number) => Raw::Integer(number),
                Err(_) => Raw::Other("integer", digits.to_owned()),
            }
        }
        DeValue::Boolean(value) => Raw::Boolean(*value),
        DeValue::Float(float) => Raw::Other("decimal number", float.as_str().to_owned()),
        DeValue::Datetime(date) => Raw::Other("date", date.to_string()),
        DeValue::Array(items) => Raw::List(items.iter().map(|item| raw(source, item)).collect()),
        DeValue::Table(table) => Raw::Table(fields(source, table, location.clone())),
    };
    Located::new(raw, location)
}
