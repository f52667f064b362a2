//! Common code of the tests in this folder: workers and a server in this process, disks, and a block device that records and delays I/O.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bdev::{
    Attach, BlockDevice, Disk, Finished, IoChannel, Layer, Ram, RamOptions, Submission, Tag,
};
use block::{DiskInfo, IoRequest};
use guest_memory::IoBuffer;
use reactor::{PollLimit, Pool, WorkerOptions};
use scsi::MemoryStore;
use scsi_exec::Units;
use uring::{Completion, Owner, Ring};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions};
use vhost_user::Server;
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_scsi::{ScsiDevice, ScsiOptions};

/// A server with its workers and a folder for its sockets.
pub struct Rig {
    // Dropped in this order: sessions end before their workers.
    pub server: Server,
    pub pool: Arc<Pool>,
    pub directory: tempfile::TempDir,
}

impl Rig {
    pub fn new(workers: u32) -> Rig {
        Rig::polling(workers, PollLimit::Micros(20))
    }

    pub fn polling(workers: u32, poll: PollLimit) -> Rig {
        let options = WorkerOptions {
            count: workers,
            cpus: Vec::new(),
            poll: poll.into(),
        };
        let pool = Arc::new(Pool::start(&options).unwrap());
        Rig {
            server: Server::start(pool.clone()).unwrap(),
            pool,
            directory: tempfile::tempdir().unwrap(),
        }
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Serves a block device. Returns the socket.
    pub fn serve(&self, name: &str, device: Arc<dyn BlockDevice>, queues: u16) -> PathBuf {
        let disk = Arc::new(Disk::new(name, None, device).unwrap());
        let options = BlkOptions {
            name: name.to_owned(),
            queues,
        };
        let socket = self.socket(name);
        self.server
            .listen(&socket, Arc::new(BlkDevice::new(disk, options)))
            .unwrap();
        socket
    }

    /// Serves a RAM disk of 64 MiB.
    pub fn serve_ram(&self, name: &str, queues: u16) -> PathBuf {
        self.serve(name, ram(64 << 20), queues)
    }

    /// Serves controller "c", with a disk of 1 MiB at target 0, LUN 0 and another at target 5, LUN 300.
    pub fn serve_controller(&self, delay: Duration) -> PathBuf {
        self.serve_watched_controller(delay).0
    }

    /// Like [`Rig::serve_controller`]; also returns the first disk's block device and the controller.
    pub fn serve_watched_controller(
        &self,
        delay: Duration,
    ) -> (PathBuf, Arc<Watched>, Arc<ScsiDevice>) {
        self.serve_delayed_controller([delay; 2])
    }

    /// Like [`Rig::serve_watched_controller`], with a delay for each disk.
    pub fn serve_delayed_controller(
        &self,
        delays: [Duration; 2],
    ) -> (PathBuf, Arc<Watched>, Arc<ScsiDevice>) {
        let units = Units::new(Box::<MemoryStore>::default());
        let options = ScsiOptions {
            name: "c".into(),
            queues: 2,
        };
        let controller = Arc::new(ScsiDevice::new(units, options));
        let [first, second] = delays.map(|delay| Watched::new(ram(1 << 20), delay));
        for (name, target, lun, device) in [("a", 0, 0, first.clone()), ("b", 5, 300, second)] {
            let disk = Arc::new(Disk::new(name, None, device).unwrap());
            controller.add_lun(target, lun, &disk).unwrap();
        }
        let socket = self.socket("c");
        self.server.listen(&socket, controller.clone()).unwrap();
        (socket, first, controller)
    }

    pub fn queues_running(&self) -> usize {
        let workers = self.pool.workers();
        let counts = workers
            .iter()
            .map(|worker| worker.call(|w| w.source_count()).unwrap());
        counts.sum()
    }

    pub fn is_connected(&self, name: &str) -> bool {
        let status = self.server.status();
        status.iter().any(|s| s.name == name && s.connected)
    }
}

pub fn ram(size: u64) -> Arc<dyn BlockDevice> {
    let options = RamOptions {
        size,
        huge_pages: false,
        ..RamOptions::default()
    };
    Arc::new(Ram::create(options).unwrap())
}

/// Starts one queue with requests of up to 64 KiB.
pub fn start_blk(front_end: &mut FrontEnd, index: u16) -> BlkQueue {
    let options = QueueOptions::default();
    BlkQueue::start(front_end, index, &options, 32, 64 << 10, Layout::Separate).unwrap()
}

pub fn connect(socket: &std::path::Path) -> FrontEnd {
    FrontEnd::connect(socket, &Options::default()).unwrap()
}

/// Waits until `holds` returns true. Fails with `event` after a time-out.
pub fn eventually(event: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < until, "never came: {event}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns a socket and its peer. The last close of the socket blocks (SO_LINGER) until the peer is closed, or for a minute.
pub fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    let limit = Some(Duration::from_secs(60));
    rustix::net::sockopt::set_socket_linger(&socket, limit).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket, peer)
}

/// A block device that records every I/O of another one, and delays its end if `delay` is not zero.
pub struct Watched {
    inner: Arc<dyn BlockDevice>,
    seen: Arc<Mutex<Vec<IoRequest>>>,
    io_events: Arc<Mutex<Vec<IoEvent>>>,
    /// Microseconds, or [`HELD`]; shared with the handles.
    delay: Arc<AtomicU64>,
}

/// Delay of I/O that waits for another delay.
const HELD: u64 = u64::MAX;

/// Start or end of the I/O at an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoEvent {
    Start(u64),
    End(u64),
}

impl Watched {
    pub fn new(inner: Arc<dyn BlockDevice>, delay: Duration) -> Arc<Watched> {
        Arc::new(Watched {
            inner,
            seen: Arc::default(),
            io_events: Arc::default(),
            delay: Arc::new(AtomicU64::new(delay.as_micros() as u64)),
        })
    }

    pub fn seen(&self) -> Vec<IoRequest> {
        self.seen.lock().unwrap().clone()
    }

    /// Returns all starts and ends in order.
    pub fn io_events(&self) -> Vec<IoEvent> {
        self.io_events.lock().unwrap().clone()
    }

    pub fn forget(&self) {
        self.seen.lock().unwrap().clear();
        self.io_events.lock().unwrap().clear();
    }

    /// Delays all I/O until another delay is set.
    pub fn hold(&self) {
        self.delay.store(HELD, Ordering::Relaxed);
    }

    pub fn set_delay(&self, delay: Duration) {
        self.delay
            .store(delay.as_micros() as u64, Ordering::Relaxed);
    }
}

impl Layer for Watched {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn layer_kind(&self) -> &'static str {
        "watched"
    }

    fn layer_info(&self, inner: DiskInfo) -> DiskInfo {
        DiskInfo {
            write_cache: true,
            ..inner
        }
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        Ok(Box::new(WatchedChannel {
            owner: attach.owner(),
            inner: self.inner.attach(attach)?,
            seen: self.seen.clone(),
            io_events: self.io_events.clone(),
            delay: self.delay.clone(),
            waiting: Vec::new(),
        }))
    }
}

struct WatchedChannel {
    inner: Box<dyn IoChannel>,
    owner: Owner,
    seen: Arc<Mutex<Vec<IoRequest>>>,
    io_events: Arc<Mutex<Vec<IoEvent>>>,
    delay: Arc<AtomicU64>,
    /// Delayed requests; the index is the timer's token.
    waiting: Vec<Option<(IoRequest, IoBuffer, Tag)>>,
}

impl WatchedChannel {
    fn start_timer(&self, ring: &mut Ring, token: u64, delay: u64) {
        let micros = if delay == HELD { 10_000 } else { delay };
        ring.timer(self.owner, token, Duration::from_micros(micros));
    }
}

impl IoChannel for WatchedChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        self.seen.lock().unwrap().push(*io);
        self.io_events
            .lock()
            .unwrap()
            .push(IoEvent::Start(io.offset));
        let delay = self.delay.load(Ordering::Relaxed);
        if delay == 0 {
            return self.inner.submit(ring, io, buffer, tag);
        }
        let free = self.waiting.iter().position(Option::is_none);
        let token = free.unwrap_or(self.waiting.len());
        if free.is_none() {
            self.waiting.push(None);
        }
        self.waiting[token] = Some((*io, std::mem::take(buffer), tag));
        self.start_timer(ring, token as u64, delay);
        Submission::Pending
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        let delay = self.delay.load(Ordering::Relaxed);
        if delay == HELD {
            return self.start_timer(ring, completion.token, delay);
        }
        let waiting = self.waiting.get_mut(completion.token as usize);
        let Some((io, mut buffer, tag)) = waiting.and_then(Option::take) else {
            // Without a delay, I/Os may be pending in the inner device.
            return self.inner.complete(ring, completion, finished);
        };
        match self.inner.submit(ring, &io, &mut buffer, tag) {
            Submission::Done(outcome) => {
                self.io_events.lock().unwrap().push(IoEvent::End(io.offset));
                finished.push(Finished {
                    tag,
                    buffer,
                    outcome,
                });
            }
            Submission::Pending => panic!("only over devices that end at once"),
        }
    }

    fn in_flight(&self) -> usize {
        self.waiting.iter().flatten().count() + self.inner.in_flight()
    }
}
