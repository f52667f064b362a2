//! Parser for `--name value` options, with sizes such as `64M`. Kept small, because every guest contains this program.

use std::collections::BTreeMap;

/// Options of one call.
pub struct Args(BTreeMap<String, String>);

const SWITCHES: [&str; 1] = ["buffered"];

impl Args {
    /// Parses `--name value` pairs and switches.
    pub fn parse(words: impl Iterator<Item = String>) -> Result<Args, String> {
        let mut options = BTreeMap::new();
        let mut words = words.peekable();
        while let Some(word) = words.next() {
            let name = word
                .strip_prefix("--")
                .ok_or_else(|| format!("expected an option, found {word:?}"))?;
            let value = if SWITCHES.contains(&name) {
                String::from("yes")
            } else {
                words
                    .next()
                    .ok_or_else(|| format!("--{name} needs a value"))?
            };
            options.insert(name.to_owned(), value);
        }
        Ok(Args(options))
    }

    /// Returns a required option.
    pub fn text(&self, name: &str) -> Result<&str, String> {
        self.0
            .get(name)
            .map(String::as_str)
            .ok_or_else(|| format!("--{name} is missing"))
    }

    /// Returns a number; K, M and G are powers of 1024.
    pub fn number(&self, name: &str, default: u64) -> Result<u64, String> {
        self.0.get(name).map_or(Ok(default), |text| {
            parse_size(text).ok_or_else(|| {
                format!("--{name} needs a number such as 4096 or 64M, found {text:?}")
            })
        })
    }

    /// Returns true if the switch is present.
    pub fn switch(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

fn parse_size(text: &str) -> Option<u64> {
    let (digits, shift) = match text.char_indices().last()? {
        (end, 'K' | 'k') => (&text[..end], 10),
        (end, 'M' | 'm') => (&text[..end], 20),
        (end, 'G' | 'g') => (&text[..end], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Result<Args, String> {
        Args::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn sizes_have_units() {
        let args = args("--size 64M --bs 4k --depth 3 --buffered").unwrap();
        assert_eq!(args.number("size", 0), Ok(64 << 20));
        assert_eq!(args.number("bs", 0), Ok(4096));
        assert_eq!(args.number("depth", 0), Ok(3));
        assert_eq!(args.number("absent", 7), Ok(7));
        assert!(args.switch("buffered"));
    }

    #[test]
    fn mistakes_are_named() {
        assert!(args("size 4").is_err());
        assert!(args("--size").is_err());
        assert!(args("--size 4X").unwrap().number("size", 0).is_err());
        assert!(
            args("--size 99999999999G")
                .unwrap()
                .number("size", 0)
                .is_err()
        );
    }
}
