//! Sources and destinations of transfers: files, block devices, pipes, logical units.
//!
//! A [`Source`] returns pieces in order, with several requests in flight. A [`Destination`] accepts pieces in order and makes them
//! durable at the end.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use bdev::{ImageFormat, LockedUse, open_locked};
use cli_common::Failure;
use iscsi_initiator::{CommandError, Extent, Unit, UnitAddress, UnitInfo};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use super::arguments::{CopyArguments, Transfer};
use super::whole_blocks::WholeBlocks;
use super::{because, open};

/// Maximum blocks per WRITE SAME on units without a reported limit.
const ZEROES_MAX: u32 = 1 << 15;
/// Maximum bytes per WRITE SAME: with deallocation, and as writes by the unit.
const UNMAPPED_BYTES_MAX: u64 = 1 << 30;
const WRITTEN_BYTES_MAX: u64 = 32 << 20;

/// A piece of a transfer.
pub enum Piece {
    Data(Vec<u8>),
    /// Number of zero bytes that need no space.
    Hole(u64),
}

impl Piece {
    pub fn len(&self) -> u64 {
        match self {
            Piece::Data(data) => data.len() as u64,
            Piece::Hole(bytes) => *bytes,
        }
    }
}

/// Returns true for a pipe, a socket or a character device, which has neither a size nor locks.
fn is_stream(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| {
        let kind = found.file_type();
        !kind.is_file() && !kind.is_dir() && !kind.is_block_device()
    })
}

pub enum Source {
    /// A file or a block device.
    File(FileSource),
    /// Standard input, or a pipe.
    Stream {
        name: String,
        stream: Box<dyn Read>,
        block: usize,
    },
    Unit(Box<UnitSource>),
}

impl Source {
    /// Opens `text` for reading from `transfer.from` on.
    pub fn open(text: &str, transfer: &Transfer) -> Result<Source, Failure> {
        if UnitAddress::looks_like_one(text) {
            let address: UnitAddress = text.parse().map_err(Failure::mistake)?;
            let unit = open(&address, &transfer.login.options(address.user.as_deref())?)?;
            return Ok(Source::Unit(Box::new(UnitSource::new(
                unit, text, transfer,
            )?)));
        }
        let block = transfer.block as usize;
        let stream = |name: &str, stream| {
            let name = name.to_owned();
            Ok(Source::Stream {
                name,
                stream,
                block,
            })
        };
        if text == "-" {
            return stream("standard input", Box::new(std::io::stdin()));
        }
        let failed = |error| Failure::because(format!("cannot read {text}: {error}"));
        if is_stream(Path::new(text)) {
            return stream(text, Box::new(File::open(text).map_err(failed)?));
        }
        let file = open_locked(Path::new(text), LockedUse::Read).map_err(because)?;
        // For a block device, the end is its size.
        let size = seek(&file, SeekFrom::End(0)).map_err(|errno| failed(errno.into()))?;
        Ok(Source::File(FileSource {
            name: text.to_owned(),
            file,
            size,
            at: transfer.from,
            block,
        }))
    }

    /// Size in bytes, if known.
    pub fn size(&self) -> Option<u64> {
        match self {
            Source::File(file) => Some(file.size),
            Source::Stream { .. } => None,
            Source::Unit(unit) => Some(unit.unit.info().bytes()),
        }
    }

    /// Returns the properties of the logical unit; `None` for a file, a device or a pipe.
    pub fn unit(&self) -> Option<&UnitInfo> {
        match self {
            Source::Unit(unit) => Some(unit.unit.info()),
            Source::File(_) | Source::Stream { .. } => None,
        }
    }

    /// Required alignment of `--from`, in bytes.
    pub fn granularity(&self) -> u64 {
        match self {
            Source::File(_) | Source::Stream { .. } => 1,
            Source::Unit(unit) => unit.unit.info().block_size.into(),
        }
    }

    /// Returns the next piece; `None` at the end.
    pub fn next(&mut self) -> Result<Option<Piece>, Failure> {
        match self {
            Source::File(file) => file.next(),
            Source::Stream {
                name,
                stream,
                block,
            } => {
                let mut data = Vec::new();
                let read = stream.take(*block as u64).read_to_end(&mut data);
                read.map_err(|error| Failure::because(format!("cannot read {name}: {error}")))?;
                Ok((!data.is_empty()).then_some(Piece::Data(data)))
            }
            Source::Unit(unit) => unit.next(),
        }
    }

    /// Ends the session, if there is one.
    pub fn close(self) -> Result<(), Failure> {
        match self {
            Source::Unit(unit) => unit.unit.close().map_err(because),
            Source::File(_) | Source::Stream { .. } => Ok(()),
        }
    }
}

/// A file, read sequentially without its holes.
pub struct FileSource {
    name: String,
    file: File,
    size: u64,
    at: u64,
    block: usize,
}

impl FileSource {
    fn next(&mut self) -> Result<Option<Piece>, Failure> {
        if self.at >= self.size {
            return Ok(None);
        }
        // File systems without holes report everything as data.
        let data = match seek(&self.file, SeekFrom::Data(self.at)) {
            Ok(data) => data.min(self.size),
            // No data up to the end of the file, which may have been truncated. Reads of the missing part fail.
            Err(rustix::io::Errno::NXIO) => {
                let now = self.file.metadata().map_or(0, |metadata| metadata.len());
                now.min(self.size).max(self.at)
            }
            Err(_) => self.at,
        };
        if data > self.at {
            let hole = data - self.at;
            self.at = data;
            return Ok(Some(Piece::Hole(hole)));
        }
        let left = (self.size - self.at).min(self.block as u64) as usize;
        let mut bytes = vec![0; left];
        let read = self.file.read_exact_at(&mut bytes, self.at);
        read.map_err(|error| Failure::because(format!("cannot read {}: {error}", self.name)))?;
        self.at += left as u64;
        Ok(Some(Piece::Data(bytes)))
    }
}

/// A logical unit, read sequentially with several requests in flight.
pub struct UnitSource {
    name: String,
    unit: Unit,
    depth: usize,
    /// Blocks per request.
    blocks: u32,
    /// Next block to request.
    at: u64,
    /// Known data and holes from `at` on.
    extents: VecDeque<Extent>,
    /// Requests in order: tag and data, or a hole.
    ahead: VecDeque<(u32, Option<Piece>)>,
}

impl UnitSource {
    fn new(unit: Unit, name: &str, transfer: &Transfer) -> Result<UnitSource, Failure> {
        let name = name.to_owned();
        let blocks = request_blocks(&unit, transfer)?;
        let block_size = u64::from(unit.info().block_size);
        if !transfer.from.is_multiple_of(block_size) {
            return Err(Failure::mistake(format!(
                "--from {}: not a multiple of the block size, {block_size}",
                transfer.from
            )));
        }
        Ok(UnitSource {
            name,
            depth: transfer.depth.into(),
            blocks,
            at: transfer.from / block_size,
            extents: VecDeque::new(),
            ahead: VecDeque::new(),
            unit,
        })
    }

    fn ask(&mut self) -> Result<(), CommandError> {
        while self.ahead.len() < self.depth && self.at < self.unit.info().blocks {
            if self.extents.is_empty() {
                // Read completions that arrive before this response are kept.
                self.extents = self.unit.extents(self.at)?.into();
            }
            let Some(extent) = self.extents.front_mut() else {
                return Ok(());
            };
            let block_size = u64::from(self.unit.info().block_size);
            if self.unit.info().zeroes && !extent.mapped {
                let hole = Piece::Hole(extent.blocks * block_size);
                self.at += extent.blocks;
                self.extents.pop_front();
                self.ahead.push_back((0, Some(hole)));
                continue;
            }
            let blocks = extent.blocks.min(self.blocks.into());
            extent.block += blocks;
            extent.blocks -= blocks;
            if extent.blocks == 0 {
                self.extents.pop_front();
            }
            let tag = self.unit.start_read(self.at, blocks as u32)?;
            self.ahead.push_back((tag, None));
            self.at += blocks;
        }
        Ok(())
    }

    fn next(&mut self) -> Result<Option<Piece>, Failure> {
        loop {
            self.ask().map_err(|error| at_unit(&self.name, &error))?;
            match self.ahead.front() {
                None => return Ok(None),
                Some((_, Some(_))) => {
                    return Ok(self.ahead.pop_front().and_then(|(_, piece)| piece));
                }
                Some((_, None)) => {}
            }
            let (tag, data) = self
                .unit
                .finish()
                .map_err(|error| at_unit(&self.name, &error))?;
            let waiting = |(of, piece): &&mut (u32, Option<Piece>)| *of == tag && piece.is_none();
            if let Some((_, piece)) = self.ahead.iter_mut().find(waiting) {
                *piece = Some(Piece::Data(data));
            }
        }
    }
}

/// Adds the address of the unit to an error.
fn at_unit(name: &str, error: &CommandError) -> Failure {
    Failure::because(format!("{name}: {error}"))
}

/// Blocks per request: the requested number, limited by the unit.
fn request_blocks(unit: &Unit, transfer: &Transfer) -> Result<u32, Failure> {
    let info = unit.info();
    if info.device_type != 0 {
        return Err(Failure::because(format!(
            "the logical unit is not a disk (device type {:#04x})",
            info.device_type
        )));
    }
    let blocks = (transfer.block / info.block_size).max(1);
    Ok(blocks.min(info.transfer_max.unwrap_or(u32::MAX)))
}

/// Maximum blocks per WRITE SAME.
fn zeroes_max(info: &UnitInfo) -> u32 {
    let limit = info.properties.write_same_max;
    let bytes_max = match info.thin && info.zeroes {
        true => UNMAPPED_BYTES_MAX,
        false => WRITTEN_BYTES_MAX,
    };
    let blocks = bytes_max / u64::from(info.block_size.max(1));
    let blocks = blocks.min(limit.unwrap_or(ZEROES_MAX.into()));
    u32::try_from(blocks).unwrap_or(ZEROES_MAX).max(1)
}

pub enum Destination {
    /// A file or a block device.
    File(FileDestination),
    /// Standard output.
    Stream(std::io::Stdout),
    Unit(Box<UnitDestination>),
}

impl Destination {
    /// Opens the destination for writing from `--from` on. `size` is the source's size in bytes.
    pub fn open(arguments: &CopyArguments, size: Option<u64>) -> Result<Destination, Failure> {
        let transfer = &arguments.transfer;
        let text = transfer.destination.as_str();
        if UnitAddress::looks_like_one(text) {
            let address: UnitAddress = text.parse().map_err(Failure::mistake)?;
            let unit = open(&address, &transfer.login.options(address.user.as_deref())?)?;
            let unit = UnitDestination::new(unit, size, transfer)?;
            return Ok(Destination::Unit(Box::new(unit)));
        }
        if text == "-" {
            return Ok(Destination::Stream(std::io::stdout()));
        }
        FileDestination::open(arguments, size).map(Destination::File)
    }

    /// Returns the properties of the logical unit; `None` for a file, a device or a pipe.
    pub fn unit(&self) -> Option<&UnitInfo> {
        match self {
            Destination::Unit(unit) => Some(unit.unit.info()),
            Destination::File(_) | Destination::Stream(_) => None,
        }
    }

    /// Required alignment of `--from`, in bytes.
    pub fn granularity(&self) -> u64 {
        match self {
            Destination::File(_) | Destination::Stream(_) => 1,
            Destination::Unit(unit) => unit.unit.info().block_size.into(),
        }
    }

    pub fn put(&mut self, piece: Piece) -> Result<(), Failure> {
        match self {
            Destination::File(file) => file.put(piece),
            Destination::Stream(stdout) => {
                let mut zeroes = std::io::repeat(0);
                match piece {
                    Piece::Data(data) => stdout.write_all(&data)?,
                    Piece::Hole(bytes) => {
                        std::io::copy(&mut zeroes.by_ref().take(bytes), stdout)?;
                    }
                }
                Ok(())
            }
            Destination::Unit(unit) => unit.put(piece),
        }
    }

    /// Waits for requests in flight and makes all data durable.
    pub fn finish(self) -> Result<(), Failure> {
        match self {
            Destination::File(file) => file.finish(),
            Destination::Stream(mut stdout) => Ok(stdout.flush()?),
            Destination::Unit(unit) => unit.finish(),
        }
    }
}

/// A file or device, written sequentially. Holes of the source stay holes in a regular file.
pub struct FileDestination {
    name: String,
    file: File,
    at: u64,
    /// Length of a regular file; ranges beyond it read as zeroes after an extension.
    end: Option<u64>,
}

impl FileDestination {
    fn open(arguments: &CopyArguments, size: Option<u64>) -> Result<Self, Failure> {
        let text = arguments.transfer.destination.as_str();
        let from = arguments.transfer.from;
        let path = Path::new(text);
        let failed = |error| Failure::because(format!("cannot write {text}: {error}"));
        let (file, end) = if is_stream(path) {
            let file = File::options().write(true).open(path);
            (file.map_err(failed)?, None)
        } else if !path.exists() {
            let file = create(arguments)?;
            file.set_len(from).map_err(failed)?;
            (file, Some(from))
        } else {
            let file = open_locked(path, LockedUse::Write).map_err(because)?;
            let kind = file.metadata().map_err(failed)?.file_type();
            let length = seek(&file, SeekFrom::End(0)).map_err(|errno| failed(errno.into()))?;
            match kind.is_file() {
                true => check_existing(arguments, size, length)?,
                false => check_room(text, size, length)?,
            }
            (file, kind.is_file().then_some(length))
        };
        Ok(FileDestination {
            name: text.to_owned(),
            file,
            at: from,
            end,
        })
    }

    fn put(&mut self, piece: Piece) -> Result<(), Failure> {
        let behind = self.at + piece.len();
        let written = match &piece {
            Piece::Data(data) => self.file.write_all_at(data, self.at),
            Piece::Hole(_) => self.put_hole(behind),
        };
        written
            .map_err(|error| Failure::because(format!("cannot write {}: {error}", self.name)))?;
        self.at = behind;
        self.end = self.end.map(|end| end.max(behind));
        Ok(())
    }

    /// Zeroes the range up to `behind`. A regular file is extended.
    fn put_hole(&self, behind: u64) -> std::io::Result<()> {
        let present = self.end.unwrap_or(behind).min(behind);
        if present > self.at {
            zero(&self.file, self.at, present - self.at)?;
        }
        match present < behind {
            true => self.file.set_len(behind),
            false => Ok(()),
        }
    }

    fn finish(self) -> Result<(), Failure> {
        let synced = self.file.sync_all();
        let ignored = |error: &std::io::Error| error.kind() == std::io::ErrorKind::InvalidInput;
        match synced {
            // Devices such as /dev/null have nothing to sync.
            Err(error) if !ignored(&error) => Err(Failure::because(format!(
                "cannot sync {}: {error}",
                self.name
            ))),
            _ => Ok(()),
        }
    }
}

/// Creates the file of the destination.
fn create(arguments: &CopyArguments) -> Result<File, Failure> {
    let text = &arguments.transfer.destination;
    if arguments.existing {
        return Err(Failure::because(format!(
            "{text}: does not exist; hint: omit -n to create it"
        )));
    }
    open_locked(Path::new(text), LockedUse::Create).map_err(because)
}

/// Checks that an existing file of `length` bytes is the intended destination.
fn check_existing(
    arguments: &CopyArguments,
    size: Option<u64>,
    length: u64,
) -> Result<(), Failure> {
    let text = arguments.transfer.destination.as_str();
    let from = arguments.transfer.from;
    let refused = |reason: &str| Err(Failure::because(format!("{text}: {reason}")));
    if !arguments.existing && from == 0 {
        return refused(
            "already exists; hint: -n writes into it and keeps its size; else remove it first, or give another path",
        );
    }
    if let Some(format) = ImageFormat::of_path(Path::new(text))
        && arguments.format.is_none()
    {
        return refused(&format!(
            "it has the signature of a disk image in the format {format}, which raw bytes would destroy; hint: lunette image convert -n writes into an image; --format raw overwrites it"
        ));
    }
    if arguments.existing {
        return check_room(text, size, length);
    }
    if length < from {
        return refused(&format!(
            "it has {length} bytes, fewer than the {from} bytes of --from; hint: give the value that the interrupted copy printed"
        ));
    }
    match size {
        Some(size) if length > size => refused(&format!(
            "it has {length} bytes, more than the {size} bytes of the source, so it is no part of a copy; hint: -n writes into it and keeps its size"
        )),
        _ => Ok(()),
    }
}

/// Checks that the source fits.
fn check_room(text: &str, size: Option<u64>, room: u64) -> Result<(), Failure> {
    match size {
        Some(size) if room < size => Err(Failure::because(format!(
            "{text} has {room} bytes, fewer than the source, {size} bytes"
        ))),
        _ => Ok(()),
    }
}

/// Zeroes a range of a file or device by deallocation or by the device's own command if possible, otherwise by writes.
fn zero(file: &File, at: u64, bytes: u64) -> std::io::Result<()> {
    let keep = FallocateFlags::KEEP_SIZE;
    for flags in [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE] {
        if fallocate(file, flags | keep, at, bytes).is_ok() {
            return Ok(());
        }
    }
    let zeroes = vec![0; 1 << 20];
    let mut done = 0;
    while done < bytes {
        let take = (bytes - done).min(zeroes.len() as u64);
        file.write_all_at(&zeroes[..take as usize], at + done)?;
        done += take;
    }
    Ok(())
}

/// A logical unit, written sequentially with several requests in flight.
pub struct UnitDestination {
    name: String,
    unit: Unit,
    depth: usize,
    blocks: u32,
    at: u64,
    in_flight: usize,
    /// The unit has refused WRITE SAME.
    writes_zeroes: bool,
    /// WRITE SAME deallocates, and the blocks read as zeroes.
    unmaps: bool,
    /// Maximum blocks per WRITE SAME.
    zeroes_max: u32,
    whole: WholeBlocks,
}

impl UnitDestination {
    fn new(unit: Unit, size: Option<u64>, transfer: &Transfer) -> Result<Self, Failure> {
        let blocks = request_blocks(&unit, transfer)?;
        let info = unit.info();
        let block_size = u64::from(info.block_size);
        if info.read_only {
            return Err(Failure::because("the destination is write-protected"));
        }
        if let Some(size) = size
            && size > info.bytes()
        {
            return Err(Failure::because(format!(
                "the destination has {} bytes, less than the source, {size} bytes",
                info.bytes()
            )));
        }
        if !transfer.from.is_multiple_of(block_size) {
            return Err(Failure::mistake(format!(
                "--from {}: not a multiple of the block size, {block_size}",
                transfer.from
            )));
        }
        Ok(UnitDestination {
            name: transfer.destination.clone(),
            depth: transfer.depth.into(),
            blocks,
            at: transfer.from / block_size,
            in_flight: 0,
            writes_zeroes: false,
            unmaps: info.thin && info.zeroes,
            zeroes_max: zeroes_max(info),
            whole: WholeBlocks::new(info.block_size),
            unit,
        })
    }

    fn put(&mut self, piece: Piece) -> Result<(), Failure> {
        let pieces = self.whole.push(piece);
        pieces
            .into_iter()
            .try_for_each(|piece| self.put_blocks(piece))
    }

    fn put_blocks(&mut self, piece: Piece) -> Result<(), Failure> {
        match piece {
            Piece::Data(data) => {
                let block_size = self.unit.info().block_size as usize;
                let mut requests = data.chunks(self.blocks as usize * block_size);
                requests.try_for_each(|chunk| self.write(chunk.to_vec()))
            }
            Piece::Hole(bytes) => self.zero(bytes),
        }
    }

    fn write(&mut self, data: Vec<u8>) -> Result<(), Failure> {
        let blocks = data.len() as u64 / u64::from(self.unit.info().block_size);
        if self.at + blocks > self.unit.info().blocks {
            let all = self.unit.info().bytes();
            return Err(Failure::because(format!(
                "the destination is full: it has {all} bytes"
            )));
        }
        while self.in_flight >= self.depth {
            self.wait()?;
        }
        let started = self.unit.start_write(self.at, data);
        started.map_err(|error| at_unit(&self.name, &error))?;
        self.in_flight += 1;
        self.at += blocks;
        Ok(())
    }

    fn wait(&mut self) -> Result<(), Failure> {
        let finished = self.unit.finish();
        finished.map_err(|error| at_unit(&self.name, &error))?;
        self.in_flight -= 1;
        Ok(())
    }

    fn zero(&mut self, bytes: u64) -> Result<(), Failure> {
        let block_size = u64::from(self.unit.info().block_size);
        let mut left = bytes / block_size;
        while left > 0 && !self.writes_zeroes {
            let blocks = left.min(self.zeroes_max.into()) as u32;
            // One at a time, because the response determines the next request.
            while self.in_flight > 0 {
                self.wait()?;
            }
            match self.unit.write_zeroes(self.at, blocks, self.unmaps) {
                Ok(()) => {
                    self.at += u64::from(blocks);
                    left -= u64::from(blocks);
                }
                Err(CommandError::Refused { .. }) => self.writes_zeroes = true,
                Err(error) => return Err(at_unit(&self.name, &error)),
            }
        }
        while left > 0 {
            let blocks = left.min(self.blocks.into());
            self.write(vec![0; (blocks * block_size) as usize])?;
            left -= blocks;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(), Failure> {
        if let Some(last) = self.whole.end() {
            self.put_blocks(last)?;
        }
        while self.in_flight > 0 {
            self.wait()?;
        }
        let flushed = self.unit.flush();
        flushed.map_err(|error| at_unit(&self.name, &error))?;
        self.unit.close().map_err(because)
    }
}
