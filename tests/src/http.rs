//! Bare HTTP: what is sent is what is written here, and what comes back is looked at as it came.

use anyhow::{Context, Result};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Far above what an answer takes.
const LIMIT: Duration = Duration::from_secs(60);

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: u16,
    /// Its lines before the body, as they came.
    pub head: String,
    /// Its body.
    pub body: String,
}

impl Answer {
    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(':'));
        let found = lines.find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.trim())
    }
}

/// Asks over a connection, which ends with the answer. `headers` are whole lines.
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

/// Listens to server-sent events: each has a name and its data.
pub struct Events(BufReader<UnixStream>);

impl Events {
    /// Begins to listen; every event from now on is heard.
    pub fn listen(control: &Path) -> Result<Events> {
        Events::listen_at(control, "/v1/events")
    }

    /// Begins to listen at a path.
    pub fn listen_at(control: &Path, path: &str) -> Result<Events> {
        let mut stream = UnixStream::connect(control)?;
        stream.set_read_timeout(Some(LIMIT))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: lunette\r\n\r\n")?;
        let mut events = Events(BufReader::new(stream));
        let mut line = String::new();
        // The head of the answer comes when the daemon has subscribed.
        while line != "\r\n" {
            line.clear();
            events.0.read_line(&mut line).context("no answer")?;
        }
        Ok(events)
    }

    /// The next event.
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
