//! Users and groups of the system, by name or number. Names are those of `/etc/passwd` and `/etc/group`.

pub use sandbox::{account, user_name};

/// Returns the number of a user, given by name or number.
pub fn user_id(user: &str) -> Option<u32> {
    id_in("/etc/passwd", user)
}

/// Returns the number of a group, given by name or number.
pub fn group_id(group: &str) -> Option<u32> {
    id_in("/etc/group", group)
}

fn id_in(file: &str, name: &str) -> Option<u32> {
    let number = |text: &str| text.parse().ok().filter(|id| *id != u32::MAX);
    if name.bytes().all(|byte| byte.is_ascii_digit()) {
        return number(name);
    }
    let text = std::fs::read_to_string(file).ok()?;
    number(account(&text, 0, name)?.get(2)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_names_or_numbers() {
        assert_eq!((user_id("root"), group_id("root")), (Some(0), Some(0)));
        assert_eq!(
            (user_id("4711"), group_id("4711")),
            (Some(4711), Some(4711))
        );
        for wrong in ["", "no-such-account", "4294967295", "-1", "+1"] {
            assert_eq!((user_id(wrong), group_id(wrong)), (None, None), "{wrong}");
        }
    }
}
