//! Client of a daemon, over its control socket or over TCP with a token. Used by the command line, so all calls block.

use std::error::Error;
use std::fmt;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tls::ClientFiles;
use tls::rustls::pki_types::ServerName;
use tls::rustls::{self, ClientConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use crate::{Problem, Token};

/// Default longest wait for a response.
const PATIENCE: Duration = Duration::from_secs(10);
/// Shortest timeout of a change. A change is durable before the response: a busy disk takes seconds for each of the two syncs. A removal
/// also drains requests and sessions.
const CHANGE_PATIENCE: Duration = Duration::from_secs(60);
/// Largest response in bytes, more than a snapshot of thousands of queues.
const ANSWER_MAX: usize = 256 << 20;

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket does not exist.
    #[error(
        "no daemon at {}: no such socket; hint: {}",
        socket.display(),
        start_hint(socket, Path::new(SYSTEM_CONFIG).exists())
    )]
    NoSocket {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// No process listens on the socket.
    #[error(
        "no daemon at {}: no process listens on this socket; hint: start one with `lunette serve`",
        socket.display()
    )]
    Stale {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// The path is no socket.
    #[error(
        "no daemon at {}: the path is not a socket; hint: name the daemon's control socket with --socket",
        socket.display()
    )]
    NoSocketFile {
        /// The path.
        socket: PathBuf,
    },
    /// The socket may not be opened.
    #[error(
        "user {} has no permission to open {}; hint: run this command as the user of the daemon or as root, or set control_group in the configuration file to a group of this user",
        sandbox::user_name(rustix::process::geteuid().as_raw()),
        socket.display()
    )]
    NotAllowed {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// The daemon reports a problem.
    #[error("{}", problem.detail)]
    Problem {
        /// Problem details.
        problem: Problem,
    },
    /// The address cannot be reached.
    #[error(
        "no daemon at {address}: {reason}; hint: start one with `lunette serve --api-listen ADDRESS:PORT --token-file FILE`"
    )]
    Unreachable {
        /// Address of the daemon.
        address: String,
        /// The system's error.
        reason: String,
    },
    /// The TLS handshake failed.
    #[error("TLS with {address} failed: {reason}; hint: {hint}")]
    Tls {
        /// Address of the daemon.
        address: String,
        /// Reason.
        reason: String,
        /// Action that helps.
        hint: &'static str,
    },
    /// The daemon closed the connection without a response.
    #[error(
        "the daemon at {} closed the connection without a response: it does not admit user {user}, or it is ending; hint: become a member of the group of control_group or control_readers, or run this command as root or as the daemon's user",
        socket.display()
    )]
    Refused {
        /// Path of the socket.
        socket: PathBuf,
        /// Name of this process's user, or its number.
        user: String,
    },
    /// The daemon did not respond in time.
    #[error(
        "request to {endpoint} failed: no response within {seconds} s; hint: the daemon may be stuck, for example on hung storage: see its log, such as journalctl -u lunette"
    )]
    Late {
        /// Path of the socket, or the address.
        endpoint: String,
        /// Time limit in seconds.
        seconds: u64,
    },
    /// The peer closed the connection, or its response is no HTTP.
    #[error(
        "no response of a daemon at {endpoint}: the process that listens there is ending, or does not speak the control protocol ({reason}); hint: name the path of `lunette serve --control`, not the socket of an export"
    )]
    Foreign {
        /// Path of the socket, or the address.
        endpoint: String,
        /// Reason.
        reason: String,
    },
    /// The exchange failed.
    #[error("request to {endpoint} failed: {reason}")]
    Conversation {
        /// Path of the socket, or the address.
        endpoint: String,
        /// Reason.
        reason: String,
    },
}

/// Configuration of the system service, which does not start without it.
const SYSTEM_CONFIG: &str = "/etc/lunette/lunette.toml";

/// Returns the way to start a daemon. The system service does not start without its configuration.
fn start_hint(socket: &Path, has_config: bool) -> String {
    if socket != Path::new(crate::SYSTEM_SOCKET) {
        return "start one with `lunette serve`, or name its control socket with --socket"
            .to_owned();
    }
    match has_config {
        true => {
            "systemctl start lunette, or name the control socket of another daemon with --socket"
                .to_owned()
        }
        false => format!(
            "the service has no configuration yet and does not start without it: write {SYSTEM_CONFIG} (see lunette.toml(5)), then systemctl \
             start lunette; or name the control socket of another daemon with --socket"
        ),
    }
}

/// Method of a request.
pub use hyper::Method;

/// Endpoint of a daemon.
#[derive(Clone, Debug)]
enum Endpoint {
    Socket(PathBuf),
    /// `HOST:PORT` and the token, over TLS if there is a configuration.
    Tcp(String, Token, Option<ServerCheck>),
}

/// Configuration of TLS, and the name that the daemon's certificate must contain.
type ServerCheck = (Arc<ClientConfig>, ServerName<'static>);

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Socket(path) => path.display().fmt(f),
            Endpoint::Tcp(authority, _, None) => write!(f, "http://{authority}"),
            Endpoint::Tcp(authority, _, Some(_)) => write!(f, "https://{authority}"),
        }
    }
}

/// Client of one daemon.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: Endpoint,
    patience: Duration,
}

/// Returns the response to `GET path` on `socket`.
///
/// # Errors
/// See [`ClientError`].
pub fn get<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T, ClientError> {
    Client::new(socket).get(path)
}

/// Escapes a name as a segment of a path.
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

/// Returns path and query for the latencies of one export, disk or queue, or of all, with the `slowest` slowest requests.
pub fn latency_path(selector: Option<&str>, slowest: usize) -> String {
    let mut path = format!("/v1/latency?slowest={slowest}");
    let Some(selector) = selector else {
        return path;
    };
    path.push_str("&select=");
    for byte in selector.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                path.push(char::from(byte));
            }
            _ => path.push_str(&format!("%{byte:02X}")),
        }
    }
    path
}

impl Client {
    /// Creates a client of the daemon with this control socket.
    pub fn new(socket: &Path) -> Client {
        Client {
            endpoint: Endpoint::Socket(socket.to_owned()),
            patience: PATIENCE,
        }
    }

    /// Creates a client of the daemon that serves its API at `http://HOST:PORT`, or at `https://HOST:PORT` with TLS.
    ///
    /// # Errors
    /// If the address is malformed, or a file is unusable.
    pub fn over_tcp(url: &str, token: Token, files: &ClientFiles) -> Result<Client, String> {
        let wrong = || {
            format!(
                "{url:?} is neither http://ADDRESS:PORT nor https://ADDRESS:PORT, such as https://127.0.0.1:9753"
            )
        };
        let (authority, is_encrypted) = match url.strip_prefix("https://") {
            Some(authority) => (authority, true),
            None => (url.strip_prefix("http://").ok_or_else(wrong)?, false),
        };
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let parsed: Option<hyper::http::uri::Authority> = authority.parse().ok();
        let fits = |a: &hyper::http::uri::Authority| a.port().is_some() && !authority.contains('@');
        let parsed = parsed.filter(fits).ok_or_else(wrong)?;
        let check = match is_encrypted {
            true => Some((files.read()?, tls::server_name(parsed.host())?)),
            false if *files != ClientFiles::default() => {
                return Err(format!(
                    "{url:?} is without TLS; hint: use https:// with certificates"
                ));
            }
            false => None,
        };
        Ok(Client {
            endpoint: Endpoint::Tcp(authority.to_owned(), token, check),
            patience: PATIENCE,
        })
    }

    /// Sets the longest wait for responses. Changes wait at least one minute.
    #[must_use]
    pub fn patient(self, patience: Duration) -> Client {
        Client { patience, ..self }
    }

    /// Returns the control socket, unless the daemon is accessed over TCP.
    pub fn socket(&self) -> Option<&Path> {
        match &self.endpoint {
            Endpoint::Socket(path) => Some(path),
            Endpoint::Tcp(..) => None,
        }
    }

    /// Returns the response to `GET path`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let (_, body) = self.ask(Method::GET, path, None, self.patience)?;
        self.understood(&body)
    }

    /// Returns the response to `GET path` as text.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn text(&self, path: &str) -> Result<String, ClientError> {
        let (_, body) = self.ask(Method::GET, path, None, self.patience)?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Makes a change. Returns the status and the body of the response, null for an empty body.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn change(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Value), ClientError> {
        let patience = self.patience.max(CHANGE_PATIENCE);
        let (status, body) = self.ask(method, path, body, patience)?;
        if body.is_empty() {
            return Ok((status.as_u16(), Value::Null));
        }
        Ok((status.as_u16(), self.understood(&body)?))
    }

    fn failed(&self, reason: String) -> ClientError {
        ClientError::Conversation {
            endpoint: self.endpoint.to_string(),
            reason,
        }
    }

    /// Returns the error of a connection with TLS. A daemon that refuses the client's certificate sends its alert after the handshake.
    fn tls_failed(&self, error: &(dyn Error + 'static), config: &ClientConfig) -> ClientError {
        let sources = std::iter::successors(Some(error), |error| (*error).source());
        let mut sources = sources.chain(io_source(error));
        let of_tls = sources.find_map(|source| source.downcast_ref::<rustls::Error>());
        let has_certificate = config.client_auth_cert_resolver.has_certs();
        let hyper = error.downcast_ref::<hyper::Error>();
        let (reason, hint) = match of_tls {
            Some(error) => (error.to_string(), tls_hint(error)),
            None if hyper.is_some_and(is_closed_at_once) && !has_certificate => (
                "the daemon closed the connection after the handshake".to_owned(),
                CERTIFICATE_HINT,
            ),
            None if hyper.is_some() => return self.failed(with_sources(error)),
            None => (error.to_string(), SERVER_HINT),
        };
        ClientError::Tls {
            address: self.endpoint.to_string(),
            reason,
            hint,
        }
    }

    fn understood<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(body)
            .map_err(|error| self.failed(format!("malformed response: {error}")))
    }

    fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        patience: Duration,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| self.failed(error.to_string()))?;
        let asked = async {
            let conversation = self.converse(method, (path, body));
            match tokio::time::timeout(patience, conversation).await {
                Ok(answer) => answer,
                Err(_) => Err(ClientError::Late {
                    endpoint: self.endpoint.to_string(),
                    seconds: patience.as_secs(),
                }),
            }
        };
        let (status, body) = runtime.block_on(asked)?;
        if status.is_success() {
            return Ok((status, body));
        }
        match serde_json::from_slice(&body) {
            Ok(problem) => Err(ClientError::Problem { problem }),
            Err(_) => Err(self.failed(format!("status {status}"))),
        }
    }

    async fn converse(
        &self,
        method: Method,
        path_and_body: (&str, Option<&Value>),
    ) -> Result<(StatusCode, Bytes), ClientError> {
        match &self.endpoint {
            Endpoint::Socket(path) => {
                let stream = connect(path).await.map_err(|error| match error {
                    Ok(known) => known,
                    Err(other) => self.failed(other.to_string()),
                })?;
                self.converse_over(stream, method, path_and_body).await
            }
            Endpoint::Tcp(authority, _, check) => {
                let unreachable = |error: io::Error| ClientError::Unreachable {
                    address: self.endpoint.to_string(),
                    reason: error.to_string(),
                };
                let stream = TcpStream::connect(authority).await.map_err(unreachable)?;
                let Some((config, name)) = check else {
                    return self.converse_over(stream, method, path_and_body).await;
                };
                let connector = TlsConnector::from(Arc::clone(config));
                let stream = connector.connect(name.clone(), stream).await;
                let stream = stream.map_err(|error| self.tls_failed(&error, config))?;
                self.converse_over(stream, method, path_and_body).await
            }
        }
    }

    async fn converse_over(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        method: Method,
        (path, body): (&str, Option<&Value>),
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let failed = |reason: &dyn std::fmt::Display| self.failed(reason.to_string());
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| failed(&error))?;
        // Ends with the runtime. An error in it also fails the request.
        let _connection = tokio::spawn(connection);
        let body = body.map(Value::to_string).unwrap_or_default();
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(hyper::header::CONTENT_TYPE, "application/json");
        request = match &self.endpoint {
            Endpoint::Socket(_) => request.header(hyper::header::HOST, "lunette"),
            Endpoint::Tcp(authority, token, _) => {
                let shown = format!("Bearer {}", token.expose());
                request
                    .header(hyper::header::HOST, authority)
                    .header(hyper::header::AUTHORIZATION, shown)
            }
        };
        let request = request
            .body(Full::<Bytes>::from(body))
            .map_err(|error| failed(&error))?;
        let response = sender.send_request(request).await;
        let user = rustix::process::geteuid();
        let response = response.map_err(|error| match &self.endpoint {
            // Every daemon admits root.
            Endpoint::Socket(path) if is_closed_at_once(&error) && !user.is_root() => {
                ClientError::Refused {
                    socket: path.clone(),
                    user: sandbox::user_name(user.as_raw()),
                }
            }
            Endpoint::Tcp(_, _, Some((config, _))) => self.tls_failed(&error, config),
            _ if error.is_parse() || is_closed_at_once(&error) => ClientError::Foreign {
                endpoint: self.endpoint.to_string(),
                reason: error.to_string(),
            },
            _ => failed(&error),
        })?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_MAX)
            .collect()
            .await
            .map_err(|error| failed(&error))?;
        Ok((status, body.to_bytes()))
    }
}

const CERTIFICATE_HINT: &str = "the daemon may demand a certificate of its clients (api_client_ca): name one with --client-certificate and --client-key";
const SERVER_HINT: &str = "name the authority of the daemon's certificate with --ca, and use a host name or address that the certificate contains";

/// Returns the action that helps against a TLS error.
fn tls_hint(error: &rustls::Error) -> &'static str {
    use rustls::{AlertDescription as Alert, CertificateError as Certificate, Error};
    match error {
        Error::InvalidCertificate(Certificate::UnknownIssuer) => {
            "name the authority of the daemon's certificate with --ca"
        }
        Error::InvalidCertificate(
            Certificate::Expired
            | Certificate::ExpiredContext { .. }
            | Certificate::NotValidYet
            | Certificate::NotValidYetContext { .. },
        ) => {
            "renew the daemon's certificate and run lunette reload on its host, or correct the clock"
        }
        Error::InvalidCertificate(
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. },
        ) => "use a host name or address that the daemon's certificate contains",
        Error::AlertReceived(Alert::CertificateRequired) => CERTIFICATE_HINT,
        Error::AlertReceived(
            Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::AccessDenied
            | Alert::DecryptError,
        ) => {
            "the daemon does not accept the certificate of --client-certificate: use a valid one of an authority in api_client_ca"
        }
        Error::InvalidMessage(_) => "the address may be without TLS: use http://",
        _ => SERVER_HINT,
    }
}

/// Returns the error in an I/O error, which is not its source.
fn io_source<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    let mut sources = std::iter::successors(Some(error), |error| (*error).source());
    let io = sources.find_map(|source| source.downcast_ref::<io::Error>())?;
    let inner = io.get_ref()?;
    Some(inner)
}

fn with_sources(error: &(dyn Error + 'static)) -> String {
    let sources = std::iter::successors(Some(error), |error| (*error).source());
    let sources: Vec<String> = sources.map(ToString::to_string).collect();
    sources.join(": ")
}

/// Returns true if the peer closed the connection before a response. A write may have failed first.
fn is_closed_at_once(error: &hyper::Error) -> bool {
    let source = error.source();
    let io = source.and_then(|source| source.downcast_ref::<io::Error>());
    let kinds = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
    error.is_canceled()
        || error.is_closed()
        || error.is_incomplete_message()
        || io.is_some_and(|error| kinds.contains(&error.kind()))
}

fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Connects to a socket. Maps the usual errors to [`ClientError`].
async fn connect(socket: &Path) -> Result<UnixStream, Result<ClientError, io::Error>> {
    UnixStream::connect(socket).await.map_err(|error| {
        let socket = socket.to_owned();
        match error.kind() {
            io::ErrorKind::NotFound => Ok(ClientError::NoSocket { socket }),
            io::ErrorKind::ConnectionRefused if !is_socket(&socket) => {
                Ok(ClientError::NoSocketFile { socket })
            }
            io::ErrorKind::ConnectionRefused => Ok(ClientError::Stale { socket }),
            io::ErrorKind::PermissionDenied => Ok(ClientError::NotAllowed { socket }),
            _ => Err(error),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_selector_is_escaped_in_the_query() {
        assert_eq!(latency_path(None, 0), "/v1/latency?slowest=0");
        let one = latency_path(Some("c0/1"), 5);
        assert_eq!(one, "/v1/latency?slowest=5&select=c0/1");
        assert!(latency_path(Some("a b&ü"), 0).ends_with("&select=a%20b%26%C3%BC"));
    }

    #[test]
    fn service_without_a_configuration_has_a_hint_of_its_own() {
        let system = Path::new(crate::SYSTEM_SOCKET);
        let first = start_hint(system, false);
        let started = "no configuration yet and does not start without it: write /etc/lunette/lunette.toml (see lunette.toml(5)), then systemctl start";
        assert!(first.contains(started), "{first}");
        assert!(start_hint(system, true).starts_with("systemctl start lunette"));
        let own = start_hint(Path::new("/run/own.sock"), false);
        assert!(own.contains("`lunette serve`"), "{own}");
    }

    #[test]
    fn a_path_without_a_daemon_is_described_by_its_kind() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), "").unwrap();
        drop(std::os::unix::net::UnixListener::bind(at("stale")).unwrap());
        let foreign = std::os::unix::net::UnixListener::bind(at("foreign")).unwrap();
        let served = std::thread::spawn(move || {
            let (mut peer, _) = foreign.accept().unwrap();
            assert!(io::Read::read(&mut peer, &mut [0; 4096]).unwrap() > 0);
            io::Write::write_all(&mut peer, b"220 mail.example ESMTP\r\n").unwrap();
        });
        for (name, expected) in [
            ("absent", "no such socket; hint: "),
            ("file", "the path is not a socket; hint: "),
            ("stale", "no process listens on this socket; hint: "),
            ("foreign", "does not speak the control protocol"),
        ] {
            let client = Client::new(&at(name));
            let error = client.text("/v1/status").unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
        served.join().unwrap();
    }

    #[test]
    fn only_plain_addresses_with_a_port_are_contacted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "0123456789abcdef").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let token = Token::read(&path).unwrap();
        for url in ["http://127.0.0.1:1", "http://[::1]:1/", "http://storage:1"] {
            let client = Client::over_tcp(url, token.clone(), &ClientFiles::default()).unwrap();
            assert!(!format!("{client:?}").contains("0123456789abcdef"));
        }
        for (url, expected) in [
            ("127.0.0.1:1", "is neither http"),
            ("http://127.0.0.1", "is neither http"),
            ("http://user@storage:1", "is neither http"),
            ("https://storage:1/v1", "is neither http"),
            ("https://storage:1", "cannot read certificates"),
            ("http://storage:1", "use https"),
        ] {
            let files = ClientFiles {
                ca: Some("/nonexistent".into()),
                certificate: None,
            };
            let error = Client::over_tcp(url, token.clone(), &files).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
