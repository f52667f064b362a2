//! Values of options: sizes, times, ranges, lists.

use std::time::Duration;

use super::{Amount, Sizes};

fn split_unit(text: &str) -> (&str, String) {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    (&text[..end], text[end..].to_ascii_lowercase())
}

/// Parses a size in bytes. As with fio's default, k is 1024 and ki is 1000.
pub fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a size: a number, then k, m, g, t or p");
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).map_err(|_| wrong());
    }
    let (number, unit) = split_unit(text);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let (letter, base) = match unit.strip_suffix('i') {
        Some(letter) => (letter, 1000u64),
        None => (unit, 1024),
    };
    let power = match letter {
        "" if base == 1024 => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        "p" => 5,
        _ => return Err(wrong()),
    };
    base.pow(power).checked_mul(number).ok_or_else(wrong)
}

/// Parses a size, or a percentage of the disk.
pub fn amount(text: &str) -> Result<Amount, String> {
    match text.strip_suffix('%') {
        Some(percent) => match percent.parse() {
            Ok(percent @ 0..=100) => Ok(Amount::Percent(percent)),
            _ => Err(format!("`{text}` is not a percentage from 0% to 100%")),
        },
        None => bytes(text).map(Amount::Bytes),
    }
}

/// Parses a time; `default` is the unit of a plain number.
pub fn duration(text: &str, default: Duration) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time: a number, then us, ms, s, m, h or d");
    let (number, unit) = split_unit(text);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let seconds = match unit.as_str() {
        "" => default.as_secs_f64(),
        "us" | "usec" => 1e-6,
        "ms" | "msec" => 1e-3,
        "s" | "sec" => 1.0,
        "m" | "min" => 60.0,
        "h" | "hour" => 3600.0,
        "d" | "day" => 86_400.0,
        _ => return Err(wrong()),
    };
    // The limit of a year prevents overflow in sums of times.
    let seconds = number * seconds;
    if !(0.0..=365.0 * 86_400.0).contains(&seconds) {
        return Err(wrong());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Parses a number within bounds.
pub fn number<T>(text: &str, min: T, max: T) -> Result<T, String>
where
    T: std::str::FromStr + PartialOrd + std::fmt::Display,
{
    match text.parse::<T>() {
        Ok(value) if value >= min && value <= max => Ok(value),
        _ => Err(format!("`{text}` is not a number from {min} to {max}")),
    }
}

/// Parses a flag; the option without a value means on.
pub fn switch(value: Option<&str>) -> Result<bool, String> {
    match value {
        None | Some("1" | "true") => Ok(true),
        Some("0" | "false") => Ok(false),
        Some(other) => Err(format!("`{other}` is neither 0 nor 1")),
    }
}

/// Parses the size of a request.
pub fn block_size(text: &str) -> Result<u32, String> {
    const LARGEST: u64 = 64 << 20;
    let size = bytes(text)?;
    match u32::try_from(size) {
        Ok(small) if size > 0 && size <= LARGEST => Ok(small),
        _ => Err(format!("`{text}` is not a size from 512 to 64m")),
    }
}

/// Parses values for reads, writes and discards; discards default to the value for writes: `8k,32k`, `,8k`, `8k`.
fn by_direction<T: Clone>(
    text: &str,
    sizes: &mut [T; 3],
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<(), String> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    if parts.len() > 3 {
        return Err(format!("`{text}` has more than three parts"));
    }
    if let [only] = parts[..] {
        let value = parse(only)?;
        *sizes = std::array::from_fn(|_| value.clone());
        return Ok(());
    }
    for (part, size) in parts.iter().zip(sizes.iter_mut()) {
        if !part.is_empty() {
            *size = parse(part)?;
        }
    }
    if let [_, write] = parts[..]
        && !write.is_empty()
    {
        sizes[2] = sizes[1].clone();
    }
    Ok(())
}

/// Parses `bs`.
pub fn fixed_sizes(text: &str, sizes: &mut [Sizes; 3]) -> Result<(), String> {
    by_direction(text, sizes, |part| block_size(part).map(Sizes::Fixed))
}

/// Parses `bsrange`.
pub fn size_ranges(text: &str, sizes: &mut [Sizes; 3]) -> Result<(), String> {
    by_direction(text, sizes, |part| {
        let (low, high) = part
            .split_once('-')
            .ok_or_else(|| format!("`{part}` is not a range such as 4k-64k"))?;
        let (low, high) = (block_size(low.trim())?, block_size(high.trim())?);
        if low > high {
            return Err(format!("`{part}` ends before it begins"));
        }
        Ok(Sizes::Range(low, high))
    })
}

/// Parses `bssplit`.
pub fn size_splits(text: &str, sizes: &mut [Sizes; 3]) -> Result<(), String> {
    by_direction(text, sizes, split)
}

fn split(text: &str) -> Result<Sizes, String> {
    let mut parts: Vec<(u32, Option<u8>)> = Vec::new();
    for part in text.split(':') {
        let (size, percent) = match part.split_once('/') {
            None | Some((_, "")) => (part.trim_end_matches('/'), None),
            Some((size, percent)) => (size, Some(number(percent, 0u8, 100)?)),
        };
        parts.push((block_size(size)?, percent));
    }
    let given: u32 = parts.iter().filter_map(|(_, p)| p.map(u32::from)).sum();
    let open = parts.iter().filter(|(_, p)| p.is_none()).count() as u32;
    if given > 100 {
        return Err(format!(
            "the sum of the percentages is {given}, more than 100"
        ));
    }
    // Entries without a percentage share the remainder equally; the rest of the division goes to the last one.
    let share = (100 - given).checked_div(open).unwrap_or(0);
    let parts = parts
        .into_iter()
        .map(|(size, percent)| (size, percent.unwrap_or(share as u8)));
    let mut parts: Vec<(u32, u8)> = parts.filter(|(_, percent)| *percent > 0).collect();
    let sum: u8 = parts.iter().map(|(_, percent)| *percent).sum();
    match parts.last_mut() {
        Some((_, percent)) => *percent += 100 - sum,
        None => return Err(format!("`{text}` has no values")),
    }
    Ok(Sizes::Split(parts))
}

/// Parses `filename`: names are separated by colons; `\:` is a colon in a name.
pub fn filenames(text: &str) -> Vec<String> {
    let mut names = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\\' if characters.peek() == Some(&':') => {
                characters.next();
                if let Some(name) = names.last_mut() {
                    name.push(':');
                }
            }
            ':' => names.push(String::new()),
            other => {
                if let Some(name) = names.last_mut() {
                    name.push(other);
                }
            }
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// Parses a list of CPUs: `0,2-4`.
pub fn cpus(text: &str) -> Result<Vec<usize>, String> {
    const LAST: usize = 4095;
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        let (low, high) = (number(low.trim(), 0, LAST)?, number(high.trim(), 0, LAST)?);
        if low > high {
            return Err(format!("`{part}` ends before it begins"));
        }
        cpus.extend(low..=high);
    }
    Ok(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_sizes_are_fio_s() {
        for (text, value) in [
            ("512", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4kb", 4096),
            ("4ki", 4000),
            ("4kib", 4000),
            ("2m", 2 << 20),
            ("0x1000", 4096),
            ("1g", 1 << 30),
        ] {
            assert_eq!(bytes(text), Ok(value), "{text}");
        }
        for text in ["", "k", "-4k", "4.5k", "99999999p", "4ib", "1e3", "0x"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_have_units() {
        let seconds = Duration::from_secs(1);
        assert_eq!(duration("90", seconds), Ok(Duration::from_secs(90)));
        assert_eq!(duration("2m", seconds), Ok(Duration::from_secs(120)));
        assert_eq!(duration("250us", seconds), Ok(Duration::from_micros(250)));
        assert!(duration("1e300", seconds).is_err());
        assert!(duration("999999d", seconds).is_err());
    }
}
