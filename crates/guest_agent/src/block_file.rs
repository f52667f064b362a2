//! Block devices and files for direct I/O, with aligned buffers.

use crate::args::Args;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

/// Alignment of buffers for O_DIRECT: at least the logical block size of every disk here.
const ALIGNMENT: usize = 4096;

/// Opens `--file` with O_DIRECT, unless `--buffered` is set.
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

/// Returns `--size`, or the size of the file or device.
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

/// Memory aligned to 4096 bytes.
pub struct Buffer {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Buffer {
    /// Creates a buffer of `length` zero bytes.
    pub fn new(length: usize) -> Self {
        let memory = vec![0; length + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        Buffer {
            memory,
            start,
            length,
        }
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }

    /// Returns the bytes as mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}
