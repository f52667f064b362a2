//! CHAP credentials of an initiator, from a file in the target's format: one line each, `NAME SECRET [TARGET_NAME
//! TARGET_SECRET]`.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use iscsi::chap::{Algorithm, Secret};
use iscsi::login::Credentials;

/// Reads the line of `user` from the file at `path`. A target name and secret in the line require the target to
/// authenticate too.
///
/// # Errors
/// The problem with the file, without secrets.
pub fn read_credentials(path: &Path, user: &str) -> Result<Credentials, String> {
    let shown = path.display();
    let text = read_private(path, "CHAP credentials")?;
    if let Some(mistake) = equal_secrets(&text) {
        return Err(format!("{shown}:{mistake}"));
    }
    for (number, line) in text.lines().enumerate() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (secret, mutual) = match words[..] {
            [name, secret] if name == user => (secret, None),
            [name, secret, target, proof] if name == user => (secret, Some((target, proof))),
            [name, ..] if name == user => {
                let line = number + 1;
                return Err(format!(
                    "{shown}:{line}: not NAME SECRET [TARGET_NAME TARGET_SECRET]"
                ));
            }
            _ => continue,
        };
        return Ok(Credentials {
            name: user.to_owned(),
            secret: Secret::new(secret),
            mutual: mutual.map(|(name, proof)| (name.to_owned(), Secret::new(proof))),
            algorithms: Algorithm::strongest_first(),
        });
    }
    Err(format!("{shown} has no line for the CHAP user {user}"))
}

/// The secrets of a line, each used in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineSecrets<'a> {
    /// Number of the line, from 1.
    pub line: usize,
    /// The initiator's secret.
    pub initiator: &'a str,
    /// The target's secret.
    pub target: Option<&'a str>,
}

/// Returns the secrets of all lines `NAME SECRET [TARGET_NAME TARGET_SECRET]`; other lines are skipped.
pub fn secrets_of(text: &str) -> Vec<LineSecrets<'_>> {
    let lines = text.lines().enumerate();
    let secrets = lines.filter_map(|(at, line)| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (initiator, target) = match words[..] {
            [name, ..] if name.starts_with('#') => return None,
            [_, secret] => (secret, None),
            [_, secret, _, proof] => (secret, Some(proof)),
            _ => return None,
        };
        Some(LineSecrets {
            line: at + 1,
            initiator,
            target,
        })
    });
    secrets.collect()
}

/// Returns line number and error message if a target's secret in the file is also an initiator's secret. With the same
/// secret in both directions each side could use the responses of the other (RFC 7143, 9.2.1).
pub fn equal_secrets(text: &str) -> Option<String> {
    let lines = secrets_of(text);
    lines.iter().find_map(|one| {
        let proof = one.target?;
        let other = lines.iter().find(|other| other.initiator == proof)?;
        Some(format!(
            "{}: the target's secret equals the initiator's secret in line {} (RFC 7143, 9.2.1); \
             hint: give target and initiators different secrets",
            one.line, other.line
        ))
    })
}

/// Reads a file with secrets, described by `kind`. Other users must have no access to it.
///
/// # Errors
/// If the file cannot be read, or other users have access.
pub fn read_private(path: &Path, kind: &str) -> Result<String, String> {
    let shown = path.display();
    let failed = |error| {
        let reason = sandbox::unreadable(path, &error);
        format!("cannot read {kind} from {shown}: {reason}")
    };
    let mut file = std::fs::File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.mode();
    if mode & 0o077 != 0 {
        return Err(format!(
            "{shown} has mode {:o}, so others may read or change the secrets in it; hint: chmod 600 {shown}",
            mode & 0o777
        ));
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn errors_of_a_user_line_contain_no_secret() {
        let path = std::env::temp_dir().join(format!("credentials-{}", std::process::id()));
        let read = |text: &str, mode, user: &str| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            read_credentials(&path, user)
        };
        let text = "# ours\nann secretsecret\nbob secretsecret t0 othersecret12\ncarl\n";
        assert!(read(text, 0o600, "ann").unwrap().mutual.is_none());
        let bob = read(text, 0o600, "bob").unwrap();
        assert_eq!(bob.mutual.unwrap().0, "t0");
        for (mode, user, expected) in [
            (0o644, "ann", "chmod 600"),
            (0o600, "carl", ":4: not NAME SECRET"),
            (0o600, "dora", "no line for the CHAP user dora"),
        ] {
            let error = read(text, mode, user).unwrap_err();
            assert!(
                error.contains(expected) && !error.contains("secretsecret"),
                "{error}"
            );
        }
        for (text, expected) in [
            (
                "ann secretsecret t0 secretsecret\n",
                ":1: the target's secret equals the initiator's secret in line 1",
            ),
            (
                "ann othersecret12 t0 secretsecret\n# b\nbob secretsecret\n",
                ":1: the target's secret equals the initiator's secret in line 3",
            ),
        ] {
            let error = read(text, 0o600, "ann").unwrap_err();
            assert!(
                error.contains(expected) && !error.contains("secretsecret"),
                "{error}"
            );
        }
        std::fs::remove_file(&path).unwrap();
    }
}
