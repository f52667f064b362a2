//! Reads and writes an image as a worker does, on a storage that records every write.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod hostile;

use std::cell::RefCell;
use std::io;

use fastrand::Rng;
use qcow2::{Backing, Image, Mapping, Storage};

/// Unit of torn writes, in bytes.
pub const SECTOR: usize = 512;

/// A change of the storage.
#[derive(Clone, Debug)]
pub enum Event {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    Sync,
}

/// Storage in memory that records all events.
#[derive(Default)]
pub struct Recorded {
    bytes: RefCell<Vec<u8>>,
    events: RefCell<Vec<Event>>,
    /// Number of reads.
    pub reads: std::cell::Cell<u64>,
    /// Writes beyond this offset fail: the file system is full.
    pub limit: RefCell<Option<u64>>,
    /// One operation fails after this number of others.
    pub fails_after: std::cell::Cell<Option<usize>>,
}

pub fn apply(bytes: &mut Vec<u8>, event: &Event) {
    let mut put = |offset: u64, length: usize, from: Option<&[u8]>| {
        let (from_at, end) = (offset as usize, offset as usize + length);
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        match from {
            Some(from) => bytes[from_at..end].copy_from_slice(from),
            None => bytes[from_at..end].fill(0),
        }
    };
    match event {
        Event::Write(offset, bytes) => put(*offset, bytes.len(), Some(bytes)),
        Event::Zero(offset, length) => put(*offset, *length as usize, None),
        Event::Sync => {}
    }
}

/// Applies random sectors of a write.
pub fn tear(event: &Event, chance: u64, random: &mut Rng, left: &mut Vec<u8>) {
    match event {
        Event::Write(offset, bytes) => {
            let mut at = 0;
            while at < bytes.len() {
                let start = *offset as usize + at;
                let length = (SECTOR - start % SECTOR).min(bytes.len() - at);
                if random.u64(..4) < chance {
                    let part = bytes[at..at + length].to_vec();
                    apply(left, &Event::Write(start as u64, part));
                }
                at += length;
            }
        }
        Event::Zero(offset, length) => {
            for sector in (*offset..offset + length).step_by(SECTOR) {
                if random.u64(..4) < chance {
                    apply(left, &Event::Zero(sector, SECTOR as u64));
                }
            }
        }
        Event::Sync => {}
    }
}

impl Recorded {
    pub fn of(bytes: Vec<u8>) -> Recorded {
        Recorded {
            bytes: RefCell::new(bytes),
            ..Recorded::default()
        }
    }

    pub fn events(&self) -> usize {
        self.events.borrow().len()
    }

    pub fn history(&self) -> Vec<Event> {
        self.events.borrow().clone()
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.bytes.borrow().clone()
    }

    fn happen(&self, event: Event) -> io::Result<()> {
        if self.fails_after.get() == Some(self.events()) {
            self.fails_after.set(None);
            return Err(io::Error::from_raw_os_error(5));
        }
        let end = match &event {
            Event::Write(offset, bytes) => offset + bytes.len() as u64,
            Event::Zero(offset, length) => offset + length,
            Event::Sync => 0,
        };
        if self.limit.borrow().is_some_and(|limit| end > limit) {
            return Err(io::Error::from_raw_os_error(28));
        }
        apply(&mut self.bytes.borrow_mut(), &event);
        self.events.borrow_mut().push(event);
        Ok(())
    }
}

impl Storage for &Recorded {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.reads.set(self.reads.get() + 1);
        let bytes = self.bytes.borrow();
        let known = bytes.get(offset as usize..).unwrap_or_default();
        let known = &known[..known.len().min(into.len())];
        into[..known.len()].copy_from_slice(known);
        into[known.len()..].fill(0);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.happen(Event::Write(offset, bytes.to_vec()))
    }

    fn zero(&self, offset: u64, length: u64) -> io::Result<()> {
        self.happen(Event::Zero(offset, length))
    }

    fn sync(&self) -> io::Result<()> {
        self.happen(Event::Sync)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes.borrow().len() as u64)
    }
}

/// A backing image in memory.
pub struct Bytes(pub Vec<u8>);

impl Backing for Bytes {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.0[offset as usize..][..bytes.len()]);
        Ok(())
    }
}

/// Reads a range as a worker does.
pub fn read<S: Storage>(
    image: &mut Image<S>,
    backing: &mut Option<Bytes>,
    offset: u64,
    into: &mut [u8],
) {
    let map = image.map();
    let mut done = 0;
    while done < into.len() {
        let at = offset + done as u64;
        let segment = map.segment(at, (into.len() - done) as u64);
        let part = &mut into[done..done + segment.length as usize];
        match segment.mapping {
            Mapping::NotLoaded => {
                image.load(at).unwrap();
                continue;
            }
            Mapping::Unallocated => {
                part.fill(0);
                if let Some(backing) = backing {
                    let known = backing.size().saturating_sub(at).min(part.len() as u64);
                    if known > 0 {
                        backing.read_at(at, &mut part[..known as usize]).unwrap();
                    }
                }
            }
            Mapping::Zero => part.fill(0),
            Mapping::Data { host, .. } => image.storage().read_at(host, part).unwrap(),
            Mapping::Compressed => {
                let cluster = map.cluster_bytes();
                let mut content = vec![0; cluster as usize];
                image.read_compressed(at, &mut content).unwrap();
                part.copy_from_slice(&content[(at % cluster) as usize..][..part.len()]);
            }
            Mapping::Bad => panic!("bad entry at {at}"),
        }
        done += segment.length as usize;
    }
}

/// Writes a range as a worker does; returns the first error of the clusters.
pub fn write<S: Storage>(
    image: &mut Image<S>,
    backing: &mut Option<Bytes>,
    offset: u64,
    from: &[u8],
) -> Result<(), qcow2::Error> {
    let map = image.map();
    let mut done = 0;
    while done < from.len() {
        let at = offset + done as u64;
        let segment = map.segment(at, (from.len() - done) as u64);
        match segment.mapping {
            Mapping::Data {
                host,
                writable: true,
            } => {
                let part = &from[done..done + segment.length as usize];
                image
                    .storage()
                    .write_at(host, part)
                    .map_err(|source| qcow2::Error::Io {
                        operation: "data",
                        source,
                    })?;
                done += part.len();
            }
            _ => {
                let last = at + segment.length - 1;
                let cluster = map.cluster_bytes();
                let offsets: Vec<u64> = (at / cluster..=last / cluster)
                    .map(|n| n * cluster)
                    .collect();
                let backing = backing.as_mut().map(|backing| backing as &mut dyn Backing);
                if let Some((_, error)) = image.prepare_write(&offsets, backing).into_iter().next()
                {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}
