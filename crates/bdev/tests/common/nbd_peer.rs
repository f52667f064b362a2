//! An NBD server for tests: one export in memory, and faults on demand.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use nbd::handshake::{Exports, Handshake, Step, Tls, greeting};
use nbd::reply::{self, ContextStatus, Descriptor, ReplyTo};
use nbd::request::{Action, Request, Rules};
use nbd::wire::{PAYLOAD_MAX, allocation, transmission};
use nbd::{BlockSizes, ErrorCode, ExportInfo};

pub const ALL_FLAGS: u16 = transmission::HAS_FLAGS
    | transmission::SEND_FLUSH
    | transmission::SEND_FUA
    | transmission::SEND_TRIM
    | transmission::SEND_WRITE_ZEROES
    | transmission::CAN_MULTI_CONN;

/// Behaviour after the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Executes each request, and ends the connection instead of the reply to this many.
    EndAfter(u32),
    /// Executes requests and replies to none.
    Silent,
    /// Replies with one byte every 50 ms.
    Dripping,
    Fail(ErrorCode),
    /// Sends bytes that are no reply.
    Garbage,
}

#[derive(Clone, Debug)]
pub struct PeerOptions {
    pub size: usize,
    pub flags: u16,
    pub minimum: u32,
    pub payload_max: u32,
    pub name: &'static str,
    pub has_allocation: bool,
    pub fault: Fault,
}

impl Default for PeerOptions {
    fn default() -> Self {
        PeerOptions {
            size: 1 << 20,
            flags: ALL_FLAGS,
            minimum: 1,
            payload_max: PAYLOAD_MAX,
            name: "d0",
            has_allocation: true,
            fault: Fault::None,
        }
    }
}

struct State {
    options: PeerOptions,
    content: Vec<u8>,
    /// Received requests, without payloads.
    requests: Vec<Request>,
    connections: Vec<UnixStream>,
    /// Number of all connections so far.
    accepted: usize,
    is_stopped: bool,
}

/// The server. It ends when this is dropped.
pub struct Peer {
    pub socket: PathBuf,
    state: Arc<Mutex<State>>,
    _folder: tempfile::TempDir,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Peer {
    pub fn start(options: PeerOptions) -> Peer {
        let folder = tempfile::tempdir().unwrap();
        let state = State {
            content: vec![0; options.size],
            options,
            requests: Vec::new(),
            connections: Vec::new(),
            accepted: 0,
            is_stopped: true,
        };
        let peer = Peer {
            socket: folder.path().join("n"),
            state: Arc::new(Mutex::new(state)),
            _folder: folder,
        };
        peer.listen();
        peer
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///d0?socket={}", self.socket.display())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Changes the export or its faults for later connections.
    pub fn change(&self, change: impl FnOnce(&mut PeerOptions)) {
        let mut state = self.state();
        change(&mut state.options);
        let size = state.options.size;
        state.content.resize(size, 0);
    }

    pub fn requests(&self) -> Vec<Request> {
        self.state().requests.clone()
    }

    pub fn accepted(&self) -> usize {
        self.state().accepted
    }

    /// Ends all connections.
    pub fn disconnect(&self) {
        for connection in self.state().connections.drain(..) {
            connection.shutdown(std::net::Shutdown::Both).ok();
        }
    }

    /// Ends all connections and refuses further ones.
    pub fn stop(&self) {
        self.state().is_stopped = true;
        std::fs::remove_file(&self.socket).ok();
        self.disconnect();
    }

    /// Accepts connections.
    pub fn listen(&self) {
        self.state().is_stopped = false;
        let listener = UnixListener::bind(&self.socket).unwrap();
        let state = Arc::clone(&self.state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), shared) = (stream, Arc::clone(&state)) else {
                    return;
                };
                let options = {
                    let mut state = state.lock().unwrap();
                    if state.is_stopped {
                        return;
                    }
                    state.accepted += 1;
                    state.connections.push(stream.try_clone().unwrap());
                    state.options.clone()
                };
                std::thread::spawn(move || drop(serve(stream, &options, &shared)));
            }
        });
    }
}

struct One<'a>(&'a PeerOptions);

impl Exports for One<'_> {
    type Export = ();

    fn find(&self, _name: &str) -> Option<((), ExportInfo)> {
        let contexts = match self.0.has_allocation {
            true => vec!["base:allocation".to_owned()],
            false => Vec::new(),
        };
        let info = ExportInfo {
            name: self.0.name.to_owned(),
            description: String::new(),
            size: self.0.size as u64,
            flags: self.0.flags,
            block_sizes: BlockSizes {
                minimum: self.0.minimum,
                preferred: self.0.minimum.max(4096),
                maximum_payload: self.0.payload_max,
            },
            contexts,
        };
        Some(((), info))
    }

    fn list(&self, _visit: &mut dyn FnMut(&str, &str)) {}
}

fn serve(
    mut stream: UnixStream,
    options: &PeerOptions,
    state: &Mutex<State>,
) -> std::io::Result<()> {
    let mut handshake = Handshake::new(Tls::Refused);
    let (mut output, mut input) = (greeting(), Vec::new());
    let session = loop {
        stream.write_all(&output)?;
        output.clear();
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        input.extend_from_slice(&byte);
        let (used, step) = handshake.receive(&input, &One(options), &mut output);
        input.drain(..used);
        match step {
            Step::Transmission(session) => break session,
            Step::Aborted | Step::StartTls | Step::Violated(_) => return Ok(()),
            Step::More | Step::Answered => {}
        }
    };
    stream.write_all(&output)?;
    let rules = Rules {
        style: session.style,
        flags: session.info.flags,
        minimum_block: session.info.block_sizes.minimum,
        has_contexts: !session.contexts.is_empty(),
    };
    let mut header = vec![0; Request::header_length(session.style)];
    let mut count = 0;
    loop {
        stream.read_exact(&mut header)?;
        let request = Request::decode(&header, session.style).unwrap().unwrap();
        let length = request.payload(session.style).unwrap();
        assert!(length <= options.payload_max, "the payload is too long");
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload)?;
        let mut output = Vec::new();
        let is_over = {
            let mut state = state.lock().unwrap();
            state.requests.push(request);
            // Like other servers, this one keeps the size of the handshake.
            let content = &mut state.content[..options.size];
            execute(&request, &payload, &rules, content, &mut output)
        };
        count += 1;
        match options.fault {
            _ if is_over => return Ok(()),
            Fault::None => stream.write_all(&output)?,
            Fault::EndAfter(limit) if count >= limit => {
                return stream.shutdown(std::net::Shutdown::Both);
            }
            Fault::EndAfter(_) => stream.write_all(&output)?,
            Fault::Silent => {}
            Fault::Dripping => {
                for byte in output {
                    stream.write_all(&[byte])?;
                    std::thread::sleep(std::time::Duration::from_millis(50));
                }
            }
            Fault::Fail(code) => {
                output.clear();
                let to = ReplyTo {
                    cookie: request.cookie,
                    offset: request.offset,
                };
                reply::error(&mut output, session.style, to, code, "on demand");
                stream.write_all(&output)?;
            }
            Fault::Garbage => stream.write_all(&[0x55; 64])?,
        }
    }
}

/// Returns true at the end of the connection.
fn execute(
    request: &Request,
    payload: &[u8],
    rules: &Rules,
    content: &mut [u8],
    output: &mut Vec<u8>,
) -> bool {
    let to = ReplyTo {
        cookie: request.cookie,
        offset: request.offset,
    };
    let checked = request.check(rules, content.len() as u64);
    let action = checked.unwrap_or_else(|error| panic!("{request:?}: {error}"));
    let (at, length) = (request.offset as usize, request.length as usize);
    match action {
        Action::Disconnect => return true,
        Action::Read { .. } => {
            reply::data_header(output, rules.style, to, length as u32);
            output.extend_from_slice(&content[at..at + length]);
            return false;
        }
        Action::Write { .. } => content[at..at + length].copy_from_slice(payload),
        Action::Trim { .. } | Action::WriteZeroes { .. } => content[at..at + length].fill(0),
        Action::BlockStatus { .. } => {
            let blocks = content[at..at + length].chunks(512);
            let extents: Vec<Descriptor> = blocks
                .map(|block| Descriptor {
                    length: block.len() as u64,
                    flags: match block.iter().all(|byte| *byte == 0) {
                        true => allocation::HOLE | allocation::ZERO,
                        // The content of a hole is not zeroes.
                        false => allocation::HOLE,
                    },
                })
                .collect();
            let status = ContextStatus {
                context: 0,
                descriptors: extents,
            };
            reply::block_status(output, rules.style, to, &[status], 1);
            return false;
        }
        Action::Flush | Action::Cache => {}
    }
    reply::done(output, rules.style, to);
    false
}
