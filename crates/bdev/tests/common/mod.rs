//! A minimal worker: one ring, one handle on a disk.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use bdev::CacheMode;
use bdev::{Attach, BlockDevice, File, FileOptions, Finished, IoChannel, Submission, Tag};
use block::{IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use uring::{Owner, Ring, Wait};

/// Longest wait for an I/O.
const LONG: Duration = Duration::from_secs(30);
/// Owner of the first layer; those of the layers below follow.
const FIRST_OWNER: u32 = 3;

pub struct Worker {
    pub ring: Ring,
    pub backend: Box<dyn IoChannel>,
    next: u64,
    over: BTreeMap<u64, (IoOutcome, IoBuffer)>,
    pub order: Vec<u64>,
}

impl Worker {
    pub fn new(device: &dyn BlockDevice) -> Worker {
        let mut ring = Ring::new(8).unwrap();
        let mut owners = (FIRST_OWNER..).map(Owner);
        let mut next_owner = || owners.next().unwrap();
        let backend = device.attach(&mut Attach::new(&mut ring, &mut next_owner));
        let backend = backend.unwrap();
        Worker {
            ring,
            backend,
            next: 1,
            over: BTreeMap::new(),
            order: Vec::new(),
        }
    }

    pub fn submit(&mut self, io: IoRequest, mut buffer: IoBuffer) -> u64 {
        let tag = self.next;
        self.next += 1;
        let length = buffer.len();
        match self
            .backend
            .submit(&mut self.ring, &io, &mut buffer, Tag(tag))
        {
            Submission::Done(outcome) => {
                assert_eq!(buffer.len(), length, "a buffer stays when an I/O is done");
                self.order.push(tag);
                self.over.insert(tag, (outcome, buffer));
            }
            Submission::Pending => assert_eq!(buffer.len(), 0, "a pending I/O takes its buffer"),
        }
        tag
    }

    /// Runs one iteration; false if no completion came in time.
    pub fn iterate(&mut self) -> bool {
        self.turn(LONG)
    }

    /// As [`Worker::iterate`], with this limit.
    pub fn turn(&mut self, limit: Duration) -> bool {
        let mut completions = Vec::new();
        let wait = Wait::Until(Some(limit));
        self.ring.enter(wait, &mut completions).unwrap();
        let came = !completions.is_empty();
        let mut finished: Vec<Finished> = Vec::new();
        for completion in completions {
            assert!(completion.owner.0 >= FIRST_OWNER);
            self.backend
                .complete(&mut self.ring, completion, &mut finished);
        }
        for one in finished {
            self.order.push(one.tag.0);
            let before = self.over.insert(one.tag.0, (one.outcome, one.buffer));
            assert!(before.is_none(), "an I/O is answered once");
        }
        came
    }

    pub fn wait(&mut self, tag: u64) -> (IoOutcome, IoBuffer) {
        let begun = Instant::now();
        loop {
            if let Some(over) = self.over.remove(&tag) {
                return over;
            }
            // The end of a watch wakes the ring without a completion.
            let has_time = begun.elapsed() < LONG;
            assert!(self.iterate() || has_time, "I/O {tag} never came back");
        }
    }

    pub fn run(&mut self, io: IoRequest, buffer: IoBuffer) -> IoOutcome {
        let tag = self.submit(io, buffer);
        self.wait(tag).0
    }

    pub fn do_plain(&mut self, io: IoRequest) -> IoOutcome {
        self.run(io, IoBuffer::default())
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> IoOutcome {
        let io = IoRequest::write(offset, data.len() as u64);
        self.run(io, filled(data))
    }

    pub fn read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>, block::IoError> {
        let io = IoRequest::read(offset, length as u64);
        let tag = self.submit(io, IoBuffer::owned(length));
        let (outcome, buffer) = self.wait(tag);
        outcome.map(|()| bytes(&buffer))
    }
}

pub fn bytes(buffer: &IoBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read_at(0, &mut bytes);
    bytes
}

pub fn filled(data: &[u8]) -> IoBuffer {
    let buffer = IoBuffer::owned(data.len());
    buffer.write_at(0, data);
    buffer
}

/// Returns a buffer of `length` bytes; its window starts `skip` bytes into a page and is cut at the given offsets.
pub fn cut(length: usize, skip: usize, cuts: &[usize]) -> IoBuffer {
    let mut buffer = IoBuffer::owned(skip + length);
    for &cut in cuts {
        buffer.set_window(skip + cut % length, 0);
        buffer.set_window(skip + cut % length, length - cut % length);
    }
    buffer.set_window(skip, length);
    buffer
}

pub fn options(path: &Path, size: u64, cache: CacheMode) -> FileOptions {
    FileOptions {
        size: Some(size),
        cache,
        ..FileOptions::new(path)
    }
}

pub fn open(options: FileOptions) -> Arc<File> {
    Arc::new(File::open(options).unwrap_or_else(|e| panic!("{e}")))
}

/// Makes a device a read-only backing device.
pub fn become_read_only(device: &dyn BlockDevice) {
    let lockable = device.capabilities().lockable.unwrap();
    lockable.become_read_only().unwrap();
}

pub fn make_image(path: &Path, options: &bdev::qcow2::CreateOptions) {
    let file = open(FileOptions {
        size: Some(4096),
        is_container: true,
        ..FileOptions::new(path)
    });
    bdev::qcow2::create(&file.container().unwrap(), options).unwrap();
}

pub fn open_image(path: &Path, cache: CacheMode) -> Result<bdev::Image, bdev::OpenError> {
    bdev::Image::open(&bdev::ImageOptions {
        path: path.to_owned(),
        cache,
        read_only: false,
        block_size: None,
        data_file: None,
        trusts_name: true,
        named_files: bdev::NamedFiles::Any,
        lock: bdev::FileLock::Always,
    })
}
