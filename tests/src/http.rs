//! A minimal HTTP client. Tests control every byte of the request and see the response unchanged.

use anyhow::{Context, Result};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Time limit for a response, far above the usual time.
const LIMIT: Duration = Duration::from_secs(60);

/// An HTTP response.
#[derive(Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Status line and header lines, unchanged.
    pub head: String,
    /// Body.
    pub body: String,
}

impl Answer {
    /// Returns a header's value. The name is case-insensitive.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(':'));
        let found = lines.find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.trim())
    }
}

/// Sends one request and reads the response until the server closes the connection. `headers` are whole lines.
pub fn ask(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    headers: &[&str],
    body: &str,
) -> Result<Answer> {
    let mut request = format!("{method} {path} HTTP/1.1\r\nHost: lunette\r\nConnection: close\r\n");
    for header in headers {
        request.push_str(&format!("{header}\r\n"));
    }
    let length = body.len();
    request.push_str(&format!("Content-Length: {length}\r\n\r\n{body}"));
    stream.write_all(request.as_bytes())?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).context("no answer")?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").context("no answer")?;
    let status = head.split_whitespace().nth(1).context("no status")?;
    Ok(Answer {
        status: status.parse()?,
        head: head.to_owned(),
        body: body.to_owned(),
    })
}

/// A stream of server-sent events, each with a name and data.
pub struct Events(BufReader<UnixStream>);

impl Events {
    /// Subscribes at `/v1/events`. Every later event is received.
    pub fn listen(control: &Path) -> Result<Events> {
        Events::listen_at(control, "/v1/events")
    }

    /// Subscribes at `path`.
    pub fn listen_at(control: &Path, path: &str) -> Result<Events> {
        let mut stream = UnixStream::connect(control)?;
        stream.set_read_timeout(Some(LIMIT))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: lunette\r\n\r\n")?;
        let mut events = Events(BufReader::new(stream));
        let mut line = String::new();
        // The daemon sends the response head after it has subscribed the client.
        while line != "\r\n" {
            line.clear();
            events.0.read_line(&mut line).context("no answer")?;
        }
        Ok(events)
    }

    /// Waits for the next event and returns its name and data.
    pub fn hear(&mut self) -> Result<(String, String)> {
        let (mut event, mut data) = (String::new(), String::new());
        loop {
            let mut line = String::new();
            let length = self.0.read_line(&mut line).context("no event comes")?;
            anyhow::ensure!(length > 0, "the daemon ended the stream");
            let line = line.trim_end();
            if let Some(name) = line.strip_prefix("event: ") {
                name.clone_into(&mut event);
            } else if let Some(text) = line.strip_prefix("data: ") {
                text.clone_into(&mut data);
            } else if line.is_empty() && !event.is_empty() {
                return Ok((event, data));
            }
        }
    }
}
