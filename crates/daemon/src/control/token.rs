//! Bearer tokens (RFC 6750): who shows one over TCP may ask, as the control socket's groups may over it.
//!
//! A token lies in a file that nobody else may read, and is read anew with every request: a new one counts at once.
//! It is compared in constant time, and never printed.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use axum::http::{HeaderMap, header};
use subtle::ConstantTimeEq;

use super::access::Right;
use crate::config::AccessConfig;

/// Shortest and longest token, in characters: 16 of a random 64 are 96 bits.
const LENGTHS: std::ops::RangeInclusive<usize> = 16..=512;
/// More than a token, its line end and a mistake.
const FILE_MAX: u64 = 4096;

/// A token, which is not to be printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// The token of a file: one line, for its owner only.
    ///
    /// # Errors
    /// What is wrong with the file and what mends it, without a word of what it holds.
    pub fn read(path: &Path) -> Result<Token, String> {
        let shown = path.display();
        let failed = |error: io::Error| format!("cannot read the token {shown}: {error}");
        let metadata = std::fs::metadata(path).map_err(failed)?;
        if metadata.is_dir() || metadata.file_type().is_fifo() {
            return Err(format!("{shown} is no file with a token"));
        }
        let file = std::fs::File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if metadata.mode() & 0o077 != 0 {
            return Err(format!(
                "{shown} holds a token, and its mode {:o} lets others read or change it; hint: chmod 600 {shown}",
                metadata.mode() & 0o777
            ));
        }
        let own = rustix::process::geteuid().as_raw();
        if ![0, own].contains(&metadata.uid()) {
            return Err(format!(
                "{shown} holds a token, and belongs to user {} who may change it; hint: chown {own} {shown}",
                metadata.uid()
            ));
        }
        let mut text = String::new();
        let read = file.take(FILE_MAX).read_to_string(&mut text);
        read.map_err(failed)?;
        let token = text.trim();
        let is_fine = |c: char| c.is_ascii_alphanumeric() || "-._~+/=".contains(c);
        if !LENGTHS.contains(&token.len()) || !token.chars().all(is_fine) {
            return Err(format!(
                "{shown} holds no token: one line of {} to {} letters, digits and -._~+/=; hint: (umask 077; openssl rand -hex 32 > {shown})",
                LENGTHS.start(),
                LENGTHS.end()
            ));
        }
        Ok(Token(token.to_owned()))
    }

    /// The text, for a request's header only.
    pub(super) fn expose(&self) -> &str {
        &self.0
    }

    fn is(&self, shown: &str) -> bool {
        self.0.as_bytes().ct_eq(shown.as_bytes()).into()
    }
}

/// Why a request is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// It shows no token.
    Nobody,
    /// It shows one that is not ours.
    Stranger,
}

impl Unknown {
    /// What the answer's WWW-Authenticate says (RFC 6750, 3).
    pub fn challenge(self) -> &'static str {
        match self {
            Unknown::Nobody => "Bearer realm=\"lunette\"",
            Unknown::Stranger => "Bearer realm=\"lunette\", error=\"invalid_token\"",
        }
    }

    /// What the answer's body says.
    pub fn detail(self) -> &'static str {
        match self {
            Unknown::Nobody => "over TCP a request needs a header `Authorization: Bearer TOKEN`",
            Unknown::Stranger => "this is not the daemon's token",
        }
    }
}

/// The files with the tokens of one daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    control: Option<PathBuf>,
    readers: Option<PathBuf>,
}

impl Tokens {
    /// Those of the configuration, each of which can be read; `None` when it names none.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn of(access: &AccessConfig) -> Result<Option<Tokens>, String> {
        let tokens = Tokens {
            control: access.token_file.clone(),
            readers: access.readers_token_file.clone(),
        };
        for path in tokens.control.iter().chain(&tokens.readers) {
            Token::read(path)?;
        }
        Ok((tokens != Tokens::default()).then_some(tokens))
    }

    /// What whoever sends these headers may do.
    pub(super) fn right(&self, headers: &HeaderMap) -> Result<Right, Unknown> {
        let shown = headers.get(header::AUTHORIZATION).ok_or(Unknown::Nobody)?;
        let shown = shown.to_str().map_err(|_| Unknown::Stranger)?;
        let (scheme, shown) = shown.split_once(' ').ok_or(Unknown::Nobody)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(Unknown::Nobody);
        }
        let is = |path: &Option<PathBuf>| {
            let Some(path) = path else { return false };
            match Token::read(path) {
                Ok(token) => token.is(shown.trim()),
                Err(error) => {
                    tracing::error!("nobody is let in by this token: {error}");
                    false
                }
            }
        };
        // Both, whichever it is.
        match (is(&self.control), is(&self.readers)) {
            (true, _) => Ok(Right::Control),
            (false, true) => Ok(Right::Read),
            (false, false) => Err(Unknown::Stranger),
        }
    }

    /// May whoever sends these headers look on?
    ///
    /// # Errors
    /// Why not.
    pub fn may_look(&self, headers: &HeaderMap) -> Result<(), Unknown> {
        self.right(headers).map(|_| ())
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
    fn a_token_is_one_line_for_its_owner_only_and_is_never_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        write(&path, "abcdefghijklmnop\n", 0o600);
        let token = Token::read(&path).unwrap();
        assert!(token.is("abcdefghijklmnop") && !token.is("abcdefghijklmnoq"));
        assert!(!token.is("abcdefghijklmno") && !token.is(""));
        assert_eq!(format!("{token:?}"), "Token(..)");
        for (text, mode, told) in [
            ("abcdefghijklmnop", 0o640, "chmod 600"),
            ("abcdefghijklmnop", 0o604, "chmod 600"),
            ("abcdefghijklmno", 0o600, "no token"),
            ("abcdefgh ijklmnop", 0o600, "no token"),
            ("abcdefghijklmnop\nabcdefghijklmnop", 0o600, "no token"),
            ("", 0o600, "no token"),
        ] {
            write(&path, text, mode);
            let error = Token::read(&path).unwrap_err();
            assert!(error.contains(told), "{error}");
            assert!(!error.contains("abcdefgh"), "{error}");
        }
        let error = Token::read(folder.path()).unwrap_err();
        assert!(error.contains("no file"), "{error}");
    }

    #[test]
    fn rights_follow_the_token_that_is_shown_and_a_new_one_counts_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (control, readers) = (folder.path().join("c"), folder.path().join("r"));
        write(&control, "control-control-1", 0o600);
        write(&readers, "readers-readers-1", 0o600);
        let access = AccessConfig {
            token_file: Some(control.clone()),
            readers_token_file: Some(readers),
            ..AccessConfig::default()
        };
        let tokens = Tokens::of(&access).unwrap().unwrap();
        let right = |value: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(value) = value {
                headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            }
            tokens.right(&headers)
        };
        assert_eq!(right(None), Err(Unknown::Nobody));
        assert_eq!(right(Some("Basic YTpi")), Err(Unknown::Nobody));
        assert_eq!(right(Some("Bearer nothing")), Err(Unknown::Stranger));
        assert_eq!(right(Some("Bearer control-control-1")), Ok(Right::Control));
        assert_eq!(right(Some("bearer readers-readers-1")), Ok(Right::Read));
        write(&control, "control-control-2", 0o600);
        assert_eq!(
            right(Some("Bearer control-control-1")),
            Err(Unknown::Stranger)
        );
        assert_eq!(right(Some("Bearer control-control-2")), Ok(Right::Control));
        write(&control, "control-control-2", 0o644);
        assert_eq!(
            right(Some("Bearer control-control-2")),
            Err(Unknown::Stranger)
        );
        assert!(Tokens::of(&access).unwrap_err().contains("chmod 600"));
        assert_eq!(Tokens::of(&AccessConfig::default()), Ok(None));
    }
}
