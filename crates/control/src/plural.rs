//! Numbers with their nouns.

/// Returns a number with its noun, such as `1 request` or `2 requests in flight`. The first word of `noun` gets the plural.
pub fn counted(number: u64, noun: &str) -> String {
    if number == 1 {
        return format!("1 {noun}");
    }
    match noun.split_once(' ') {
        Some((first, rest)) => format!("{number} {first}s {rest}"),
        None => format!("{number} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn one_has_no_plural() {
        assert_eq!(counted(1, "request in flight"), "1 request in flight");
        assert_eq!(counted(0, "request in flight"), "0 requests in flight");
        assert_eq!(counted(3, "I/O"), "3 I/Os");
    }
}
