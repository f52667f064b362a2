//! Value types (RFC 7143, 6.1): booleans, numbers, ranges, lists, binary values in hex or base64.

use smallvec::SmallVec;

/// A decoded binary value; every CHAP value of this crate fits inline.
pub type Binary = SmallVec<[u8; 64]>;

/// An inclusive range, written `low~high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumericRange {
    /// Smallest value.
    pub low: u64,
    /// Largest value.
    pub high: u64,
}

/// Parses `Yes` or `No`.
pub fn parse_boolean(value: &str) -> Option<bool> {
    match value {
        "Yes" => Some(true),
        "No" => Some(false),
        _ => None,
    }
}

/// Parses a decimal or hexadecimal number of up to 64 bits.
pub fn parse_number(value: &str) -> Option<u64> {
    let (digits, radix) = match value
        .strip_prefix("0x")
        .or_else(|| value.strip_prefix("0X"))
    {
        Some(hex) => (hex, 16),
        None => (value, 10),
    };
    // `from_str_radix` would accept a sign.
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

/// Parses `low~high`, where low must not exceed high.
pub fn parse_range(value: &str) -> Option<NumericRange> {
    let (low, high) = value.split_once('~')?;
    let range = NumericRange {
        low: parse_number(low)?,
        high: parse_number(high)?,
    };
    (range.low <= range.high).then_some(range)
}

/// Parses a comma-separated list of non-empty names.
pub fn parse_list(value: &str) -> Option<SmallVec<[&str; 8]>> {
    let names: SmallVec<[&str; 8]> = value.split(',').collect();
    names.iter().all(|name| !name.is_empty()).then_some(names)
}

/// Parses a binary value of at most `limit` bytes: `0x` and hex digits, or `0b` and base64.
pub fn parse_binary(value: &str, limit: usize) -> Option<Binary> {
    let bytes = value.as_bytes();
    let decoded = match bytes.split_first_chunk::<2>()? {
        (b"0x" | b"0X", digits) => parse_hex(digits, limit)?,
        (b"0b" | b"0B", digits) => parse_base64(digits, limit)?,
        _ => return None,
    };
    (!decoded.is_empty() && decoded.len() <= limit).then_some(decoded)
}

fn parse_hex(digits: &[u8], limit: usize) -> Option<Binary> {
    if digits.len() > limit.saturating_mul(2) {
        return None;
    }
    let nibble = |digit: u8| (digit as char).to_digit(16).map(|n| n as u8);
    let mut out = Binary::new();
    // An odd number of digits implies a leading zero.
    let (first, rest) = digits.split_at(digits.len() % 2);
    if let Some(&digit) = first.first() {
        out.push(nibble(digit)?);
    }
    for pair in rest.chunks_exact(2) {
        out.push(nibble(pair[0])? << 4 | nibble(pair[1])?);
    }
    Some(out)
}

fn parse_base64(digits: &[u8], limit: usize) -> Option<Binary> {
    if !digits.len().is_multiple_of(4) || digits.len() / 4 > limit.div_ceil(3) {
        return None;
    }
    let sextet = |digit: u8| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut out = Binary::new();
    let groups = digits.len() / 4;
    for (index, group) in digits.chunks_exact(4).enumerate() {
        let fill = group
            .iter()
            .rev()
            .take_while(|digit| **digit == b'=')
            .count();
        if fill > 2 || (fill > 0 && index + 1 != groups) {
            return None;
        }
        let mut bits = 0u32;
        for digit in &group[..4 - fill] {
            bits = bits << 6 | u32::from(sextet(*digit)?);
        }
        bits <<= 6 * fill;
        let [_, bytes @ ..] = bits.to_be_bytes();
        // Unused bits must be zero, so that each value has one encoding.
        if bytes[3 - fill..].iter().any(|b| *b != 0) {
            return None;
        }
        out.extend_from_slice(&bytes[..3 - fill]);
    }
    Some(out)
}

/// Formats as `0x` and hex digits.
pub fn to_hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 + 2 * bytes.len());
    text.push_str("0x");
    for byte in bytes {
        for nibble in [byte >> 4, byte & 15] {
            text.push(char::from_digit(u32::from(nibble), 16).unwrap_or('0'));
        }
    }
    text
}

/// Formats as `0b` and base64.
pub fn to_base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::from("0b");
    for chunk in bytes.chunks(3) {
        let mut group = [0; 4];
        group[1..1 + chunk.len()].copy_from_slice(chunk);
        let bits = u32::from_be_bytes(group);
        for place in 0..4 {
            if place <= chunk.len() {
                text.push(char::from(DIGITS[(bits >> (18 - 6 * place)) as usize & 63]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decimal_or_hexadecimal() {
        assert_eq!(parse_number("262144"), Some(262144));
        assert_eq!(parse_number("0x40000"), Some(262144));
        assert_eq!(parse_number("0XfF"), Some(255));
        for bad in [
            "",
            "0x",
            "-1",
            "+1",
            " 1",
            "1 ",
            "ff",
            "1~2",
            "99999999999999999999",
        ] {
            assert_eq!(parse_number(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn ranges_go_upwards() {
        assert_eq!(
            parse_range("16~0x20"),
            Some(NumericRange { low: 16, high: 32 })
        );
        assert_eq!(parse_range("32~16"), None);
        assert_eq!(parse_range("32"), None);
    }

    #[test]
    fn lists_have_no_empty_members() {
        assert_eq!(
            parse_list("CRC32C,None").unwrap().as_slice(),
            ["CRC32C", "None"]
        );
        assert_eq!(parse_list(""), None);
        assert_eq!(parse_list("None,,CRC32C"), None);
    }

    /// Test vectors of RFC 4648, section 10.
    #[test]
    fn base64_gives_the_vectors_of_rfc_4648() {
        for (plain, text) in [
            ("f", "0bZg=="),
            ("fo", "0bZm8="),
            ("foo", "0bZm9v"),
            ("foob", "0bZm9vYg=="),
            ("fooba", "0bZm9vYmE="),
            ("foobar", "0bZm9vYmFy"),
        ] {
            assert_eq!(to_base64(plain.as_bytes()), text);
            assert_eq!(parse_binary(text, 64).unwrap().as_slice(), plain.as_bytes());
        }
    }

    #[test]
    fn malformed_binary_is_refused() {
        for bad in [
            "",
            "0",
            "0x",
            "0xzz",
            "Zg==",
            "0bZg=",
            "0bZ===",
            "0b====",
            "0bZg==Zg==",
            "0bZh==",
            "0b Zg=",
        ] {
            assert_eq!(parse_binary(bad, 64), None, "{bad:?}");
        }
        assert_eq!(parse_binary("0x123", 64).unwrap().as_slice(), [0x01, 0x23]);
        assert_eq!(parse_binary("0x112233", 2), None, "longer than the limit");
        assert_eq!(parse_binary("0bZm9v", 2), None, "longer than the limit");
    }
}
