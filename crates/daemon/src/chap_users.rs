//! Files of CHAP users, one user per line, which must be private.

use std::collections::HashMap;
use std::path::Path;

use bdev::iscsi_initiator::{equal_secrets, read_private};
use iscsi_target::ChapUser;

/// Reads the CHAP users of a file, one per line: `NAME SECRET`, then, for initiators that authenticate the target, `TARGET_NAME
/// TARGET_SECRET`. Lines that begin with `#` are ignored. Others must not be able to read the file.
///
/// # Errors
/// The defect of the file, without any of its content.
pub fn read_chap_users(path: &Path) -> Result<HashMap<String, ChapUser>, String> {
    let shown = path.display();
    let text = read_private(path, "CHAP users")?;
    let mut users = HashMap::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |reason: &str| format!("{shown}:{}: {reason}", number + 1);
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, secret, mutual) = match words[..] {
            [name, secret] => (name, secret, None),
            [name, secret, own, proof] => (name, secret, Some((own, proof))),
            _ => return Err(wrong("not NAME SECRET [TARGET_NAME TARGET_SECRET]")),
        };
        let secrets = mutual.iter().map(|(_, proof)| *proof).chain([secret]);
        for secret in secrets {
            if iscsi_target::Secret::new(secret).is_short() {
                return Err(wrong(
                    "a secret has at least 12 characters (RFC 7143, 9.2.1)",
                ));
            }
        }
        let user = ChapUser {
            secret: iscsi_target::Secret::new(secret),
            mutual: mutual.map(|(own, proof)| (own.to_owned(), iscsi_target::Secret::new(proof))),
        };
        if users.insert(name.to_owned(), user).is_some() {
            return Err(wrong("this user already has a line"));
        }
    }
    if let Some(mistake) = equal_secrets(&text) {
        return Err(format!("{shown}:{mistake}"));
    }
    if users.is_empty() {
        return Err(format!("{shown} has no line with a CHAP user"));
    }
    Ok(users)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn chap_users_come_from_a_file_that_only_its_owner_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chap");
        let write = |text: &str, mode| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            read_chap_users(&path)
        };
        let users = write(
            "# us\nann secretsecret\nbob secretsecret t0 othersecret12\n",
            0o600,
        );
        let users = users.unwrap();
        assert!(users["ann"].mutual.is_none() && users["bob"].mutual.is_some());
        for (text, mode, expected) in [
            ("ann secretsecret", 0o640, "chmod 600"),
            ("ann short", 0o600, "at least 12"),
            ("ann", 0o600, ":1: not NAME SECRET"),
            ("ann secretsecret t0 secretsecret", 0o600, "different"),
            (
                "ann secretsecret t0 othersecret12\nbob othersecret12",
                0o600,
                ":1: the target's secret equals the initiator's secret in line 2",
            ),
            ("", 0o600, "no line with a CHAP user"),
        ] {
            let error = write(text, mode).unwrap_err();
            assert!(error.contains(expected), "{error}");
            assert!(!error.contains("secretsecret"), "{error}");
        }
    }
}
