//! A bearer token (RFC 6750) in a file that only its owner may read. It is never printed.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use sandbox::user_name;
use subtle::ConstantTimeEq;

/// Permitted token lengths in characters. 16 characters of a random base-64 token have 96 bits.
const LENGTHS: std::ops::RangeInclusive<usize> = 16..=512;
/// Bytes to read at most: more than a token, its line end and a mistake.
const FILE_MAX: u64 = 4096;

/// A token. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// Reads the token of a file: one line, for its owner only.
    ///
    /// # Errors
    /// The reason why the file is unusable and a hint, without the contents of the file.
    pub fn read(path: &Path) -> Result<Token, String> {
        let shown = path.display();
        let failed = |error: io::Error| format!("cannot read the token {shown}: {error}");
        let metadata = std::fs::metadata(path).map_err(failed)?;
        if metadata.is_dir() || metadata.file_type().is_fifo() {
            return Err(format!("{shown} is not a token file"));
        }
        let file = std::fs::File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if metadata.mode() & 0o077 != 0 {
            return Err(format!(
                "token file {shown} has mode {:o}, so others may read or change it; hint: chmod 600 {shown}",
                metadata.mode() & 0o777
            ));
        }
        let own = rustix::process::geteuid().as_raw();
        if ![0, own].contains(&metadata.uid()) {
            return Err(format!(
                "token file {shown} belongs to another user, {}; hint: chown {} {shown}",
                user_name(metadata.uid()),
                user_name(own)
            ));
        }
        let mut text = String::new();
        let read = file.take(FILE_MAX).read_to_string(&mut text);
        read.map_err(failed)?;
        let token = text.trim();
        let is_fine = |c: char| c.is_ascii_alphanumeric() || "-._~+/=".contains(c);
        if !LENGTHS.contains(&token.len()) || !token.chars().all(is_fine) {
            return Err(format!(
                "token file {shown} has no token: one line of {} to {} letters, digits and -._~+/=; hint: (umask 077; openssl rand -hex 32 > {shown})",
                LENGTHS.start(),
                LENGTHS.end()
            ));
        }
        Ok(Token(token.to_owned()))
    }

    /// Returns the text, for the header of a request only.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Returns true if `shown` is the token. Compares in constant time.
    pub fn is(&self, shown: &str) -> bool {
        self.0.as_bytes().ct_eq(shown.as_bytes()).into()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn write(path: &Path, text: &str, mode: u32) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn token_is_one_private_line_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        write(&path, "abcdefghijklmnop\n", 0o600);
        let token = Token::read(&path).unwrap();
        assert!(token.is("abcdefghijklmnop") && !token.is("abcdefghijklmnoq"));
        assert!(!token.is("abcdefghijklmno") && !token.is(""));
        assert_eq!(format!("{token:?}"), "Token(..)");
        for (text, mode, expected) in [
            ("abcdefghijklmnop", 0o640, "chmod 600"),
            ("abcdefghijklmnop", 0o604, "chmod 600"),
            ("abcdefghijklmno", 0o600, "no token"),
            ("abcdefgh ijklmnop", 0o600, "no token"),
            ("abcdefghijklmnop\nabcdefghijklmnop", 0o600, "no token"),
            ("", 0o600, "no token"),
        ] {
            write(&path, text, mode);
            let error = Token::read(&path).unwrap_err();
            assert!(error.contains(expected), "{error}");
            assert!(!error.contains("abcdefgh"), "{error}");
        }
        let error = Token::read(folder.path()).unwrap_err();
        assert!(error.contains("is not a token file"), "{error}");
    }
}
