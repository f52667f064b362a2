//! An accepted TCP connection: plain, or with TLS after a handshake of bounded time.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use reactor::{PeerRateLimit, RateLimit};
use tls::rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Longest time of a handshake, as of the head of a request.
const HANDSHAKE_TIME: Duration = Duration::from_secs(15);
/// First byte of a TLS connection: the content type handshake (RFC 8446, 5.1).
const HANDSHAKE: u8 = 22;
/// Response to a client without TLS.
const PLAIN_CLIENT: &str = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: application/problem+json\r\n\r\n\
    {\"title\":\"Bad Request\",\"status\":400,\"detail\":\"this address needs TLS; hint: use https:// instead of http://\"}\n";

/// Limit of log lines: one every 10 s about each client, 5 per second about all.
static HANDSHAKE_LOG: PeerRateLimit = PeerRateLimit::new(
    Duration::from_secs(10),
    1,
    RateLimit::with_burst(Duration::from_millis(200), 5),
);

/// An accepted connection, before its handshake.
pub(crate) struct IncomingStream {
    /// Name of the service: `api` or `metrics`.
    pub service: &'static str,
    pub stream: TcpStream,
    pub address: SocketAddr,
    /// Configuration of the handshake; `None`: no TLS.
    pub tls: Option<Arc<ServerConfig>>,
}

/// A connection that carries HTTP.
pub(crate) enum HttpStream {
    Plain(TcpStream),
    Encrypted(Box<TlsStream<TcpStream>>),
}

impl IncomingStream {
    /// Performs the handshake. Returns `None` if it fails, which affects only this client.
    pub async fn ready(self) -> Option<HttpStream> {
        let service = self.service;
        let Some(config) = self.tls else {
            return Some(HttpStream::Plain(self.stream));
        };
        let handshake = encrypted(self.stream, config);
        let result = match tokio::time::timeout(HANDSHAKE_TIME, handshake).await {
            Ok(result) => result,
            Err(_) => Err(ErrorKind::TimedOut.into()),
        };
        let log = |error: &io::Error| {
            // A client that only connects, such as a load balancer, is no fault.
            let is_fault = matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::Other);
            if is_fault && let Some(suppressed) = HANDSHAKE_LOG.pass(&self.address.to_string()) {
                tracing::warn!(service, peer = %self.address, suppressed, "TLS handshake failed: {error}");
            }
        };
        result.inspect_err(log).ok()
    }
}

async fn encrypted(stream: TcpStream, config: Arc<ServerConfig>) -> io::Result<HttpStream> {
    let mut first = [HANDSHAKE];
    stream.peek(&mut first).await?;
    if first != [HANDSHAKE] {
        // Unread bytes would reset the connection before the client reads the response.
        stream.try_read(&mut [0; 4096])?;
        stream.try_write(PLAIN_CLIENT.as_bytes())?;
        return Err(io::Error::other("the client does not use TLS"));
    }
    let stream = TlsAcceptor::from(config).accept(stream).await?;
    Ok(HttpStream::Encrypted(Box::new(stream)))
}

impl AsyncRead for HttpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HttpStream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            HttpStream::Encrypted(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for HttpStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            HttpStream::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            HttpStream::Encrypted(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HttpStream::Plain(stream) => Pin::new(stream).poll_flush(context),
            HttpStream::Encrypted(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HttpStream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            HttpStream::Encrypted(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
