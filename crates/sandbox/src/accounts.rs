//! Names of users, from `/etc/passwd`.

/// Returns the fields of the first line of `/etc/passwd` or `/etc/group` with this value in field number `at`.
pub fn account<'a>(text: &'a str, at: usize, wanted: &str) -> Option<Vec<&'a str>> {
    let lines = text.lines().map(|line| line.split(':').collect::<Vec<_>>());
    lines
        .filter(|fields| fields.len() > 3)
        .find(|fields| fields.get(at) == Some(&wanted))
}

/// Returns the name of a user, or the number if it has none.
pub fn user_name(id: u32) -> String {
    let text = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let number = id.to_string();
    let name = account(&text, 2, &number).and_then(|fields| fields.first().copied());
    name.map_or(number.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_without_a_name_is_a_number() {
        assert_eq!(user_name(0), "root");
        assert_eq!(user_name(4_294_967_294), "4294967294");
    }
}
