//! Errors of clusters: operation, object, cause and hint.

use std::time::Duration;

/// A failed call of librados or librbd.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The libraries are not installed, or too old.
    #[error("cannot load librbd: {reason}; hint: apt-get install {package}")]
    Library {
        /// Package that contains them.
        package: &'static str,
        /// Error of the loader.
        reason: String,
    },
    /// A file may not be read.
    #[error("cannot {operation}: {reason}")]
    Denied {
        /// Failed operation.
        operation: String,
        /// The sandbox or permissions, with a hint.
        reason: String,
    },
    /// A text with a NUL byte, which C functions do not accept.
    #[error("{field} {text:?} has a NUL byte")]
    Text {
        /// Field that has the text.
        field: &'static str,
        /// The text.
        text: String,
    },
    /// The cluster did not answer in time.
    #[error("cannot {operation}: no response after {seconds} s; hint: see `ceph -s`")]
    TimedOut {
        /// Failed operation.
        operation: String,
        /// Timeout in seconds.
        seconds: u64,
    },
    /// Ceph returned an error.
    #[error("cannot {operation}: {}{}", describe(*.errno), advice(.hint))]
    Failed {
        /// Failed operation.
        operation: String,
        /// Cause.
        errno: i32,
        /// Suggested remedy; may be empty.
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

/// Text of an errno. Ceph uses some numbers with other meanings.
fn describe(errno: i32) -> String {
    match errno {
        // Ceph's EBLOCKLISTED.
        libc::ESHUTDOWN => "this client is blocklisted".to_owned(),
        _ => std::io::Error::from_raw_os_error(errno).to_string(),
    }
}

impl Error {
    pub(crate) fn failed(
        operation: impl Into<String>,
        errno: i32,
        hint: impl Into<String>,
    ) -> Error {
        Error::Failed {
            operation: operation.into(),
            errno,
            hint: hint.into(),
        }
    }

    pub(crate) fn timed_out(operation: impl Into<String>, limit: Duration) -> Error {
        Error::TimedOut {
            operation: operation.into(),
            seconds: limit.as_secs(),
        }
    }

    /// Cause as an errno.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Failed { errno, .. } => *errno,
            Error::TimedOut { .. } => libc::ETIMEDOUT,
            Error::Library { .. } => libc::ELIBACC,
            Error::Denied { .. } => libc::EACCES,
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

/// Converts a negative result of a library function to an error.
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
    fn error_text_has_operation_reason_and_hint() {
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
