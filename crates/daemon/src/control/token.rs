//! Bearer tokens (RFC 6750) for clients over TCP, with the rights of the control socket's groups.
//!
//! The file is read for each request, so a new token is valid at once.

use std::path::PathBuf;

use ::control::Token;
use axum::http::{HeaderMap, header};

use super::access::Right;
use crate::start_checks::token_files;
use config::AccessConfig;

/// Reason why a request is not authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// The request has no token.
    Nobody,
    /// The token is wrong.
    Stranger,
}

impl Unknown {
    /// Returns the value of the field WWW-Authenticate (RFC 6750, 3).
    pub fn challenge(self) -> &'static str {
        match self {
            Unknown::Nobody => "Bearer realm=\"lunette\"",
            Unknown::Stranger => "Bearer realm=\"lunette\", error=\"invalid_token\"",
        }
    }

    /// Returns the detail of the response's body.
    pub fn detail(self) -> &'static str {
        match self {
            Unknown::Nobody => "a request over TCP needs a header `Authorization: Bearer TOKEN`",
            Unknown::Stranger => "wrong token",
        }
    }
}

/// Files with the tokens of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    control: Option<PathBuf>,
    readers: Option<PathBuf>,
}

impl Tokens {
    /// Returns the configured token files after a first read; `None` if there are none.
    ///
    /// # Errors
    /// The reason why a file cannot be used.
    pub fn of(access: &AccessConfig) -> Result<Option<Tokens>, String> {
        let tokens = Tokens {
            control: access.token_file.clone(),
            readers: access.readers_token_file.clone(),
        };
        for path in token_files(access) {
            Token::read(path)?;
        }
        Ok((tokens != Tokens::default()).then_some(tokens))
    }

    /// Returns the rights of the sender of these headers.
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
                    tracing::error!(
                        path = %path.display(),
                        "cannot read the token file, clients with this token are refused: {error}"
                    );
                    false
                }
            }
        };
        // Compares both in any case, so that the time does not depend on the match.
        match (is(&self.control), is(&self.readers)) {
            (true, _) => Ok(Right::Control),
            (false, true) => Ok(Right::Read),
            (false, false) => Err(Unknown::Stranger),
        }
    }

    /// Checks that the sender of these headers may read.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn may_look(&self, headers: &HeaderMap) -> Result<(), Unknown> {
        self.right(headers).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;

    fn write(path: &Path, text: &str, mode: u32) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn token_sets_the_rights_and_a_new_one_applies_immediately() {
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
