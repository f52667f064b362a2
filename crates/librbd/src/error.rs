//! What went wrong at a cluster: what was tried, on what, why, and what to do about it.

use std::time::Duration;

/// A call to librados or librbd that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The libraries are not installed, or too old.
    #[error("cannot load librbd: {reason}; hint: apt-get install {package}")]
    Library {
        /// The package that has them.
        package: &'static str,
        /// What the loader said.
        reason: String,
    },
    /// A text with a NUL byte, which no C function takes.
    #[error("{what} {text:?} has a NUL byte")]
    Text {
        /// What it is.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// The cluster has not answered in time.
    #[error("cannot {what}: no answer after {seconds} s; hint: see `ceph -s`")]
    TimedOut {
        /// What was tried.
        what: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// Ceph refused.
    #[error("cannot {what}: {}{}", describe(*.errno), advice(.hint))]
    Failed {
        /// What was tried.
        what: String,
        /// Why.
        errno: i32,
        /// What to do about it; may be empty.
        hint: String,
    },
}

fn advice(hint: &str) -> String {
    if hint.is_empty() {
        String::new()
    } else {
        format!("; hint: {hint}")
    }
}

/// The system's text, but for numbers that Ceph gives a meaning of its own.
fn describe(errno: i32) -> String {
    match errno {
        // Ceph's EBLOCKLISTED.
        libc::ESHUTDOWN => "this client is blocklisted".to_owned(),
        _ => std::io::Error::from_raw_os_error(errno).to_string(),
    }
}

impl Error {
    /// A failure with what to do about it.
    pub(crate) fn failed(what: impl Into<String>, errno: i32, hint: impl Into<String>) -> Error {
        Error::Failed {
            what: what.into(),
            errno,
            hint: hint.into(),
        }
    }

    /// A call that was given up.
    pub(crate) fn timed_out(what: impl Into<String>, limit: Duration) -> Error {
        Error::TimedOut {
            what: what.into(),
            seconds: limit.as_secs(),
        }
    }

    /// Why, as a number; 0 when there is none.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Failed { errno, .. } => *errno,
            Error::TimedOut { .. } => libc::ETIMEDOUT,
            Error::Library { .. } => libc::ELIBACC,
            Error::Text { .. } => libc::EINVAL,
        }
    }
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        let kind = std::io::Error::from_raw_os_error(error.errno()).kind();
        std::io::Error::new(kind, error)
    }
}

/// What a function of the libraries gave: a negative errno, or else something of its own.
pub(crate) fn check<N: Into<i64> + Copy>(
    result: N,
    failed: impl FnOnce(i32) -> Error,
) -> Result<N, Error> {
    let number: i64 = result.into();
    if number < 0 {
        return Err(failed(i32::try_from(-number).unwrap_or(libc::EIO)));
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_says_what_why_and_what_to_do() {
        let error = check(-2, |errno| {
            Error::failed("open image rbd/a", errno, "rbd ls rbd")
        });
        assert_eq!(
            error.unwrap_err().to_string(),
            "cannot open image rbd/a: No such file or directory (os error 2); hint: rbd ls rbd"
        );
        let error = Error::failed("write", 108, "");
        assert_eq!(
            error.to_string(),
            "cannot write: this client is blocklisted"
        );
        let error = Error::timed_out("connect", Duration::from_secs(10));
        assert_eq!(
            std::io::Error::from(error).kind(),
            std::io::ErrorKind::TimedOut
        );
    }
}
