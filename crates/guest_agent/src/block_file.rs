//! A block device or file, opened for direct I/O, and buffers that satisfy it.

use crate::args::Args;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

/// O_DIRECT wants memory aligned to the disk's logical block; no disk here has larger ones.
const ALIGNMENT: usize = 4096;

/// Opens `--file`, with O_DIRECT unless `--buffered` was given.
pub fn open(args: &Args, write: bool) -> Result<File, String> {
    let path = args.text("file")?;
    let flags = if args.switch("buffered") {
        OFlags::empty()
    } else {
        OFlags::DIRECT
    };
    OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(flags.bits() as i32)
        .open(path)
        .map_err(|error| format!("cannot open {path}: {error}"))
}

/// `--size`, or else the whole file or device.
pub fn size(args: &Args, file: &File) -> Result<u64, String> {
    let mut file = file;
    let end = file
        .seek(SeekFrom::End(0))
        .map_err(|error| format!("cannot find the end: {error}"))?;
    let size = args.number("size", end)?;
    if size > end {
        Err(format!("--size {size} is beyond the end, {end}"))
    } else {
        Ok(size)
    }
}

/// Memory that starts at a multiple of 4096.
pub struct Buffer {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Buffer {
    /// `length` bytes of zeroes.
    pub fn new(length: usize) -> Self {
        let memory = vec![0; length + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        Buffer {
            memory,
            start,
            length,
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }

    /// The bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}
