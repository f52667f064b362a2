//! The other end: asks a daemon over its control socket. For the command line, so it simply blocks.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use super::Problem;

/// A daemon that has not answered by then does not answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// More than a snapshot of thousands of queues takes.
const ANSWER_MAX: usize = 256 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no socket.
    #[error(
        "no daemon at {}: there is no such socket; start one with `lunette serve`, or name its control socket with --socket",
        socket.display()
    )]
    NoSocket {
        /// The socket's path.
        socket: PathBuf,
    },
    /// There is a socket without a daemon.
    #[error(
        "nobody listens on {}: its daemon has ended; start it again with `lunette serve`",
        socket.display()
    )]
    Stale {
        /// The socket's path.
        socket: PathBuf,
    },
    /// The socket may not be opened.
    #[error(
        "may not open {}: ask as the user that the daemon runs as",
        socket.display()
    )]
    NotAllowed {
        /// The socket's path.
        socket: PathBuf,
    },
    /// The daemon answers that it cannot.
    #[error("{}", problem.detail)]
    Problem {
        /// What it says.
        problem: Problem,
    },
    /// The conversation failed.
    #[error("cannot ask {}: {what}", socket.display())]
    Conversation {
        /// The socket's path.
        socket: PathBuf,
        /// How.
        what: String,
    },
}

/// The answer to `GET path` on `socket`.
pub fn get<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T, ClientError> {
    let failed = |what: String| ClientError::Conversation {
        socket: socket.to_owned(),
        what,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| failed(error.to_string()))?;
    let asked = async {
        match tokio::time::timeout(PATIENCE, ask(socket, path)).await {
            Ok(answer) => answer,
            Err(_) => Err(failed(format!("no answer within {} s", PATIENCE.as_secs()))),
        }
    };
    let (status, body) = runtime.block_on(asked)?;
    if status.is_success() {
        return serde_json::from_slice(&body)
            .map_err(|error| failed(format!("the answer makes no sense: {error}")));
    }
    match serde_json::from_slice(&body) {
        Ok(problem) => Err(ClientError::Problem { problem }),
        Err(_) => Err(failed(format!("it answers {status}"))),
    }
}

async fn ask(socket: &Path, path: &str) -> Result<(StatusCode, Bytes), ClientError> {
    let socket_path = || socket.to_owned();
    let failed = |what: &dyn std::fmt::Display| ClientError::Conversation {
        socket: socket_path(),
        what: what.to_string(),
    };
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ClientError::NoSocket {
                socket: socket_path(),
            },
            io::ErrorKind::ConnectionRefused => ClientError::Stale {
                socket: socket_path(),
            },
            io::ErrorKind::PermissionDenied => ClientError::NotAllowed {
                socket: socket_path(),
            },
            _ => failed(&error),
        })?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| failed(&error))?;
    // Ends with the runtime; what fails in it fails the request too.
    let _connection = tokio::spawn(connection);
    let request = Request::get(path)
        .header(hyper::header::HOST, "lunette")
        .body(Empty::<Bytes>::new())
        .map_err(|error| failed(&error))?;
    let response = sender
        .send_request(request)
        .await
        .map_err(|error| failed(&error))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_MAX)
        .collect()
        .await
        .map_err(|error| failed(&error))?;
    Ok((status, body.to_bytes()))
}
