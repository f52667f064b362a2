//! Services of systemd.

/// systemd sets at least one of these variables for a service.
const VARIABLES: [&str; 2] = ["NOTIFY_SOCKET", "INVOCATION_ID"];

/// Returns the command that restarts a process as a service of systemd, if it is one. `has_variable` looks up a variable in the
/// environment of the process.
pub fn restart_command(pid: u32, has_variable: impl Fn(&str) -> bool) -> Option<String> {
    if !VARIABLES.into_iter().any(has_variable) {
        return None;
    }
    let group = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    of_control_group(&group)
}

fn of_control_group(group: &str) -> Option<String> {
    let (above, unit) = group.trim().rsplit_once('/')?;
    if !unit.ends_with(".service") {
        return None;
    }
    Some(match above.contains("/user@") {
        true => format!("systemctl --user restart {unit}"),
        false => format!("systemctl restart {unit}"),
    })
}

/// Quotes a word for a shell if necessary.
pub fn shell_word(word: &str) -> String {
    let is_plain = |one: char| one.is_ascii_alphanumeric() || "/._-+@:".contains(one);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_of_the_system_and_of_users_are_restarted_by_systemctl() {
        for (group, expected) in [
            (
                "0::/system.slice/lunette.service\n",
                Some("systemctl restart lunette.service"),
            ),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/lunette.service\n",
                Some("systemctl --user restart lunette.service"),
            ),
            ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
            ("0::/\n", None),
        ] {
            assert_eq!(of_control_group(group).as_deref(), expected, "{group}");
        }
        assert_eq!(restart_command(std::process::id(), |_| false), None);
    }

    #[test]
    fn words_keep_their_text_in_a_shell() {
        for (word, quoted) in [
            ("/run/lunette-1.sock", "/run/lunette-1.sock"),
            ("", "''"),
            ("a b", "'a b'"),
            ("it's", "'it'\\''s'"),
        ] {
            assert_eq!(shell_word(word), quoted);
        }
    }
}
