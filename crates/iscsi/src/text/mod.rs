//! Text keys (RFC 7143, 6.1): `key=value` pairs terminated by NUL, spread over several PDUs with the C bit.
//!
//! Parsing borrows from the collected bytes. The [`Collector`] bounds the memory.

mod values;

pub use values::{
    Binary, NumericRange, parse_binary, parse_boolean, parse_list, parse_number, parse_range,
    to_base64, to_hex,
};

/// Maximum length of a key name in bytes (6.1).
pub const KEY_MAX: usize = 63;

/// A violation of the text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// A pair without an equals sign.
    #[error("text pair without an equals sign")]
    NoEquals,
    /// A key that is empty, too long or has invalid characters.
    #[error("malformed key name of {0} bytes")]
    BadKey(usize),
    /// A value with invalid characters.
    #[error("value with a byte that is not text")]
    BadValue,
    /// The sequence exceeds the limit.
    #[error("negotiation sequence of more than {0} bytes")]
    TooLong(usize),
}

/// One key=value pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair<'a> {
    /// Key name, case-sensitive.
    pub key: &'a str,
    /// Value, possibly empty.
    pub value: &'a str,
}

fn is_key(name: &[u8]) -> bool {
    let allowed = |b: &u8| b.is_ascii_alphanumeric() || b".-+@_#:/".contains(b);
    (1..=KEY_MAX).contains(&name.len()) && name[0].is_ascii_alphabetic() && name.iter().all(allowed)
}

/// Parses text. Skips empty pairs (stray NULs) and accepts a last pair without NUL.
pub fn parse(bytes: &[u8]) -> Result<Vec<Pair<'_>>, TextError> {
    let mut pairs = Vec::new();
    for entry in bytes.split(|b| *b == 0).filter(|entry| !entry.is_empty()) {
        let equals = entry
            .iter()
            .position(|b| *b == b'=')
            .ok_or(TextError::NoEquals)?;
        let (key, value) = (&entry[..equals], &entry[equals + 1..]);
        if !is_key(key) {
            return Err(TextError::BadKey(key.len()));
        }
        let key = str::from_utf8(key).map_err(|_| TextError::BadKey(key.len()))?;
        let value = str::from_utf8(value).map_err(|_| TextError::BadValue)?;
        if value.chars().any(|c| c.is_control()) {
            return Err(TextError::BadValue);
        }
        pairs.push(Pair { key, value });
    }
    Ok(pairs)
}

/// Appends a pair.
///
/// # Panics
/// If key or value contain a NUL. Only local text is sent.
pub fn push_pair(out: &mut Vec<u8>, key: &str, value: &str) {
    assert!(
        !key.contains('\0') && !value.contains('\0'),
        "NUL inside a text pair"
    );
    out.extend_from_slice(key.as_bytes());
    out.push(b'=');
    out.extend_from_slice(value.as_bytes());
    out.push(0);
}

/// Collects the data segments of a sequence until one has no C bit.
#[derive(Clone)]
pub struct Collector {
    bytes: Vec<u8>,
    limit: usize,
}

impl Collector {
    /// Creates an empty collector; `limit` is the maximum length of one sequence in bytes.
    pub fn new(limit: usize) -> Self {
        Collector {
            bytes: Vec::new(),
            limit,
        }
    }

    /// Adds a data segment.
    pub fn push(&mut self, segment: &[u8]) -> Result<(), TextError> {
        if segment.len() > self.limit - self.bytes.len() {
            return Err(TextError::TooLong(self.limit));
        }
        self.bytes.extend_from_slice(segment);
        Ok(())
    }

    /// Returns true if no data was collected.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the whole text and empties the collector.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

// The content is not printed, because it may hold CHAP responses.
impl std::fmt::Debug for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Collector({} bytes of {})", self.bytes.len(), self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_split_at_nul_and_at_the_first_equals_sign() {
        let pairs =
            parse(b"InitiatorName=iqn.1998-03.org.example:a\0X-org.example.k=a=b\0Empty=\0")
                .unwrap();
        assert_eq!(
            pairs[0],
            Pair {
                key: "InitiatorName",
                value: "iqn.1998-03.org.example:a"
            }
        );
        assert_eq!(
            pairs[1],
            Pair {
                key: "X-org.example.k",
                value: "a=b"
            }
        );
        assert_eq!(
            pairs[2],
            Pair {
                key: "Empty",
                value: ""
            }
        );
    }

    #[test]
    fn key_of_63_bytes_is_taken_and_one_of_64_is_refused() {
        let pair = |n: usize| format!("{}=x\0", "k".repeat(n));
        assert!(parse(pair(63).as_bytes()).is_ok());
        assert_eq!(parse(pair(64).as_bytes()), Err(TextError::BadKey(64)));
    }

    #[test]
    fn text_without_equals_sign_or_key_is_refused() {
        assert_eq!(parse(b"HeaderDigest\0"), Err(TextError::NoEquals));
        assert_eq!(parse(b"=None\0"), Err(TextError::BadKey(0)));
        assert_eq!(parse(b"a=\xff\0"), Err(TextError::BadValue));
    }

    #[test]
    fn collector_joins_pairs_cut_anywhere_and_stops_at_its_limit() {
        let mut collector = Collector::new(16);
        collector.push(b"Header").unwrap();
        collector.push(b"Digest=No").unwrap();
        assert_eq!(collector.push(b"ne"), Err(TextError::TooLong(16)));
        collector.push(b"x").unwrap();
        assert_eq!(collector.take(), b"HeaderDigest=Nox");
        assert!(collector.is_empty());
    }
}
