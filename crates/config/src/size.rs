//! Sizes as text: `512M`, `10GiB`, `4096`. Units are powers of 1024, because disks consist of blocks.

/// Units in ascending order.
const UNITS: [char; 6] = ['K', 'M', 'G', 'T', 'P', 'E'];

/// Maximum size: the maximum file offset.
pub const SIZE_MAX: u64 = i64::MAX as u64;

/// Syntax of a size, for messages.
pub const SIZE_ALLOWED: &str = "bytes, or a number with K, M, G, T, P or E (KiB, MiB, ...: powers of 1024), such as \"512M\" or \"10GiB\"";

/// Reason why a text is not a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeError {
    /// Not a number with a unit.
    Malformed,
    /// `MB` and similar units, which may mean powers of 1000 or of 1024.
    Ambiguous,
    /// More than [`SIZE_MAX`] bytes.
    TooLarge,
}

/// Parses a size such as `512M`, `10GiB` or `4096`, in bytes.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    let digits_end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    if digits.is_empty() {
        return Err(SizeError::Malformed);
    }
    let unit = unit.trim_start().to_ascii_lowercase();
    let mut letters = unit.chars();
    let power = match letters.next() {
        None => 0,
        Some('b') if unit == "b" => 0,
        Some(letter) => {
            let unit_index = UNITS
                .iter()
                .position(|u| u.to_ascii_lowercase() == letter)
                .ok_or(SizeError::Malformed)?;
            match letters.as_str() {
                "" | "ib" => unit_index + 1,
                "b" => return Err(SizeError::Ambiguous),
                _ => return Err(SizeError::Malformed),
            }
        }
    };
    let number: u64 = digits.parse().map_err(|_| SizeError::TooLarge)?;
    number
        .checked_mul(1 << (10 * power))
        .filter(|bytes| *bytes <= SIZE_MAX)
        .ok_or(SizeError::TooLarge)
}

/// Returns the shortest text that [`parse_size`] converts back to `bytes`.
pub fn render_size(bytes: u64) -> String {
    let mut number = bytes;
    let mut unit = None;
    for candidate in UNITS {
        if number == 0 || !number.is_multiple_of(1024) {
            break;
        }
        number /= 1024;
        unit = Some(candidate);
    }
    match unit {
        Some(unit) => format!("{number}{unit}"),
        None => number.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn units_are_powers_of_1024_in_any_spelling() {
        for (text, bytes) in [
            ("4096", 4096),
            ("1B", 1),
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("512 MiB", 512 << 20),
            ("10G", 10 << 30),
            ("10gib", 10 << 30),
            ("1T", 1 << 40),
            ("7E", 7 << 60),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_have_distinct_errors() {
        for (text, error) in [
            ("", SizeError::Malformed),
            ("M", SizeError::Malformed),
            ("-1", SizeError::Malformed),
            ("1.5G", SizeError::Malformed),
            ("10X", SizeError::Malformed),
            ("10GiBB", SizeError::Malformed),
            ("10GB", SizeError::Ambiguous),
            ("8E", SizeError::TooLarge),
            ("99999999999999999999", SizeError::TooLarge),
            ("9223372036854775808", SizeError::TooLarge),
        ] {
            assert_eq!(parse_size(text), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_rendered_size_reads_back(bytes in 0..=SIZE_MAX, shift in 0..60u32) {
            let bytes = bytes >> shift << shift;
            prop_assert_eq!(parse_size(&render_size(bytes)), Ok(bytes));
        }

        #[test]
        fn any_text_is_read_without_panic(text in ".{0,12}") {
            let _size = parse_size(&text);
        }
    }
}
