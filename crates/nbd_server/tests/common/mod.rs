//! A server in this process, and a blocking client.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bdev::{BlockDevice, Disk, Ram, RamOptions};
use nbd::client::{Content, Handshake, Reply, Session, Step, Wanted, content, decode};
use nbd::request::Request;
use nbd::{ErrorCode, Style};
use nbd_server::{Address, DirtyContext, ExportOptions, Server, ServerLimits};
use reactor::{PollLimit, Pool, Rights, WorkerOptions};
use tls::ServerTls;

/// Far above the duration of any test.
const LIMIT: Duration = Duration::from_secs(60);

pub struct Rig {
    pub server: Server,
    pub disk: Arc<Disk>,
    pub socket: PathBuf,
    _folder: tempfile::TempDir,
}

pub fn ram(bytes: u64) -> Arc<dyn BlockDevice> {
    let options = RamOptions {
        size: bytes,
        huge_pages: false,
        ..RamOptions::default()
    };
    Arc::new(Ram::create(options).unwrap())
}

impl Rig {
    /// Serves a RAM disk of `bytes` as `d0`.
    pub fn new(bytes: u64, limits: ServerLimits) -> Rig {
        let workers = WorkerOptions {
            count: 2,
            cpus: Vec::new(),
            poll: PollLimit::Never.into(),
        };
        let pool = Arc::new(Pool::start(&workers).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nbd.sock");
        let server = Server::start(pool, limits, ServerTls::default()).unwrap();
        let disk = Arc::new(Disk::new("d0", None, ram(bytes)).unwrap());
        let rig = Rig {
            server,
            disk,
            socket,
            _folder: folder,
        };
        rig.add("d0", false);
        rig
    }

    pub fn add(&self, name: &str, read_only: bool) {
        let address = Address::Unix(self.socket.clone());
        let added = self.add_at(options(name, read_only, address.clone()));
        assert_eq!(added, [address]);
    }

    /// Adds an export with a dirty bitmap.
    pub fn add_dirty(&self, name: &str, dirty: DirtyContext) {
        let address = Address::Unix(self.socket.clone());
        let dirty = Some(dirty);
        self.add_at(ExportOptions {
            dirty,
            ..options(name, false, address)
        });
    }

    /// Adds an export on a Unix socket of its own, opens it and removes it.
    pub fn add_and_remove(&self, name: &str) {
        let path = self.socket.with_file_name(name);
        self.add_at(options(name, false, Address::Unix(path.clone())));
        let stream = UnixStream::connect(path).expect("the export has a listener");
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Client::open(stream, name, Style::Structured).expect("the export is open");
        self.server.remove_export(name);
    }

    /// Adds an export on a free TCP port. Returns its address.
    pub fn add_tcp(&self, name: &str) -> std::net::SocketAddr {
        let any = Address::Tcp("127.0.0.1:0".parse().unwrap());
        match self.add_at(options(name, false, any)).as_slice() {
            [Address::Tcp(address)] => *address,
            other => panic!("{other:?}"),
        }
    }

    fn add_at(&self, options: ExportOptions) -> Vec<Address> {
        let added = self
            .server
            .add_export(options, Rights::default(), self.disk.clone());
        added.unwrap()
    }

    pub fn stream(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    pub fn open(&self, export: &str, style: Style) -> Client {
        Client::open(self.stream(), export, style).expect("the export is open")
    }
}

fn options(name: &str, read_only: bool, address: Address) -> ExportOptions {
    ExportOptions {
        dirty: None,
        name: name.to_owned(),
        export_name: name.to_owned(),
        description: String::new(),
        read_only,
        tls: false,
        addresses: vec![address],
    }
}

/// A client in the transmission phase.
pub struct Client {
    pub stream: UnixStream,
    pub session: Session,
}

impl Client {
    pub fn open(stream: UnixStream, export: &str, style: Style) -> Option<Client> {
        Client::open_with(stream, export, style, &[nbd::wire::BASE_ALLOCATION])
    }

    /// Opens an export with these metadata contexts.
    pub fn open_with(
        mut stream: UnixStream,
        export: &str,
        style: Style,
        contexts: &[&str],
    ) -> Option<Client> {
        let mut handshake = Handshake::new(Wanted {
            export: export.to_owned(),
            style,
            contexts: contexts.iter().map(|name| (*name).to_owned()).collect(),
        });
        let mut input = Vec::new();
        loop {
            let mut output = Vec::new();
            let (used, step) = handshake.receive(&input, &mut output).ok()?;
            input.drain(..used);
            if let Step::Open(session) = step {
                let session = *session;
                return Some(Client { stream, session });
            }
            stream.write_all(&output).ok()?;
            let mut bytes = [0; 512];
            let length = stream.read(&mut bytes).ok().filter(|length| *length > 0)?;
            input.extend_from_slice(&bytes[..length]);
        }
    }

    pub fn send(&mut self, request: Request, payload: &[u8]) {
        let mut bytes = Vec::new();
        request.encode(self.session.style, &mut bytes);
        bytes.extend_from_slice(payload);
        self.stream.write_all(&bytes).unwrap();
    }

    fn read(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Returns the reply of the only request in flight, which reads `length` bytes: its payload with the type of the chunk, or its error.
    pub fn reply(&mut self, cookie: u64, length: usize) -> Result<(u16, Vec<u8>), ErrorCode> {
        let style = self.session.style;
        let header = match style {
            Style::Simple => 16,
            Style::Structured => 20,
            Style::Extended => 32,
        };
        let bytes = self.read(header);
        let (reply, _) = decode(&bytes, style).unwrap().expect("a whole header");
        match reply {
            Reply::Simple {
                cookie: seen,
                error,
            } => {
                assert_eq!(seen, cookie);
                match error {
                    Some(error) => Err(error),
                    None => Ok((1, self.read(length))),
                }
            }
            Reply::Chunk(chunk) => {
                assert!(chunk.is_last && chunk.cookie == cookie, "{chunk:?}");
                let payload = self.read(chunk.length as usize);
                match content(chunk.kind, &payload).unwrap() {
                    Content::Error { code, .. } => Err(code),
                    Content::Data { data, .. } => Ok((chunk.kind, data.to_vec())),
                    _ => Ok((chunk.kind, payload)),
                }
            }
        }
    }

    /// Returns the lengths and flags of the extents of a range, for each context.
    pub fn status(&mut self, flags: u16, (offset, length): (u64, u64)) -> Vec<Vec<(u64, u32)>> {
        let request = Request {
            flags,
            command: nbd::wire::command::BLOCK_STATUS,
            cookie: 8,
            offset,
            length,
        };
        self.send(request, &[]);
        let style = self.session.style;
        let mut all = Vec::new();
        loop {
            let bytes = self.read(if style == Style::Extended { 32 } else { 20 });
            let Some((Reply::Chunk(chunk), _)) = decode(&bytes, style).unwrap() else {
                panic!("{bytes:x?}");
            };
            let payload = self.read(chunk.length as usize);
            let Ok(Content::BlockStatus { descriptors, .. }) = content(chunk.kind, &payload) else {
                panic!("{payload:x?}");
            };
            let pairs = descriptors.iter();
            all.push(pairs.map(|one| (one.length, one.flags)).collect());
            if chunk.is_last {
                return all;
            }
        }
    }

    /// Sends a request with a payload and returns the data of its reply.
    pub fn ask(
        &mut self,
        command: u16,
        flags: u16,
        (offset, length): (u64, u64),
        payload: &[u8],
    ) -> Result<Vec<u8>, ErrorCode> {
        let request = Request {
            flags,
            command,
            cookie: 7,
            offset,
            length,
        };
        self.send(request, payload);
        let expected = match command {
            nbd::wire::command::READ => length as usize,
            _ => 0,
        };
        self.reply(7, expected).map(|(_, data)| data)
    }

    /// Returns true if the server has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        matches!(self.stream.read(&mut byte), Ok(0)) || self.stream.peer_addr().is_err()
    }
}
