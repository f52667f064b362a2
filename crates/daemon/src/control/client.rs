//! The other end: asks a daemon over its control socket. For the command line, so it simply blocks.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
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

/// What is to be done with a resource.
pub use hyper::Method;

/// Asks one daemon.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
}

/// The answer to `GET path` on `socket`.
///
/// # Errors
/// See [`ClientError`].
pub fn get<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T, ClientError> {
    Client::new(socket).get(path)
}

/// A name as a part of a resource's address.
pub fn escape(name: &str) -> String {
    let mut escaped = String::new();
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' => {
                escaped.push(char::from(byte));
            }
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

impl Client {
    /// A client of the daemon whose control socket this is.
    pub fn new(socket: &Path) -> Client {
        Client {
            socket: socket.to_owned(),
            patience: PATIENCE,
        }
    }

    /// The same, waiting for answers as long as this.
    #[must_use]
    pub fn patient(self, patience: Duration) -> Client {
        Client { patience, ..self }
    }

    /// The answer to `GET path`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let (_, body) = self.ask(Method::GET, path, None)?;
        self.understood(&body)
    }

    /// The answer to `GET path`, as text.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn text(&self, path: &str) -> Result<String, ClientError> {
        let (_, body) = self.ask(Method::GET, path, None)?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Has a change made; gives the status and what is said of it, null when nothing is.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn change(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Value), ClientError> {
        let (status, body) = self.ask(method, path, body)?;
        if body.is_empty() {
            return Ok((status.as_u16(), Value::Null));
        }
        Ok((status.as_u16(), self.understood(&body)?))
    }

    fn failed(&self, what: String) -> ClientError {
        ClientError::Conversation {
            socket: self.socket.clone(),
            what,
        }
    }

    fn understood<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(body)
            .map_err(|error| self.failed(format!("the answer makes no sense: {error}")))
    }

    fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| self.failed(error.to_string()))?;
        let asked = async {
            let conversation = self.converse(method, path, body);
            match tokio::time::timeout(self.patience, conversation).await {
                Ok(answer) => answer,
                Err(_) => {
                    let seconds = self.patience.as_secs();
                    Err(self.failed(format!("no answer within {seconds} s")))
                }
            }
        };
        let (status, body) = runtime.block_on(asked)?;
        if status.is_success() {
            return Ok((status, body));
        }
        match serde_json::from_slice(&body) {
            Ok(problem) => Err(ClientError::Problem { problem }),
            Err(_) => Err(self.failed(format!("it answers {status}"))),
        }
    }

    async fn converse(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let failed = |what: &dyn std::fmt::Display| self.failed(what.to_string());
        let stream = self.connect().await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| failed(&error))?;
        // Ends with the runtime; what fails in it fails the request too.
        let _connection = tokio::spawn(connection);
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(hyper::header::HOST, "lunette")
            .header(hyper::header::CONTENT_TYPE, "application/json")
            .body(Full::<Bytes>::from(body))
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

    async fn connect(&self) -> Result<UnixStream, ClientError> {
        let socket = || self.socket.clone();
        let connected = UnixStream::connect(&self.socket).await;
        connected.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ClientError::NoSocket { socket: socket() },
            io::ErrorKind::ConnectionRefused => ClientError::Stale { socket: socket() },
            io::ErrorKind::PermissionDenied => ClientError::NotAllowed { socket: socket() },
            _ => self.failed(error.to_string()),
        })
    }
}
