//! Quoting for shells and QEMU.

/// Quotes a word for a POSIX shell if necessary.
pub fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=+:,./@%^".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Formats a command over several lines, one option with its value per line.
pub fn shell_command(words: &[String]) -> String {
    let mut text = String::new();
    let mut open = false;
    for (index, word) in words.iter().enumerate() {
        let is_option = word.starts_with('-') && word.len() > 1;
        if index > 0 {
            text.push_str(match is_option || !open {
                true => " \\\n    ",
                false => " ",
            });
        }
        open = is_option || index == 0;
        text.push_str(&shell_word(word));
    }
    text.push('\n');
    text
}

/// Escapes a value in QEMU's `key=value,...`: a comma is doubled.
pub fn qemu_value(value: &str) -> String {
    value.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        assert_eq!(shell_word("a=b,c:/d"), "a=b,c:/d");
        assert_eq!(shell_word(""), "''");
        assert_eq!(shell_word("it's $HOME"), r"'it'\''s $HOME'");
    }

    #[test]
    fn an_option_and_its_value_share_a_line() {
        let words = ["qemu", "-m", "1G", "-nodefaults", "-device", "{\"a\": 1}"];
        assert_eq!(
            shell_command(&words.map(str::to_owned)),
            "qemu \\\n    -m 1G \\\n    -nodefaults \\\n    -device '{\"a\": 1}'\n"
        );
    }
}
