//! `lunette image convert` and `lunette image compare`.

use std::io::Write;
use std::sync::Arc;

use bdev::qcow2::{self, CreateOptions};
use bdev::{
    BlockDevice, BlockingIo, CacheMode, File, FileOptions, Image, ImageOptions, NamedFiles,
};
use block::{Allocation, Extent, IoFlags, IoRequest};
use cli_common::{Failure, Outcome, say};

use super::arguments::{CompareArguments, ConvertArguments, Format};
use super::disks::{open_disk, open_writable, remote};
use super::{cluster_bits, new_container, of};
use crate::meter::Meter;

/// Bytes that are copied with one read.
const PIECE_BYTES: u64 = 1 << 20;
/// Zeroes among data that are left out.
const GRAIN_BYTES: usize = 4096;

/// Copies a disk into a new file.
pub fn convert(arguments: &ConvertArguments) -> Outcome {
    let (from, to) = (arguments.source.as_path(), arguments.destination.as_path());
    let mut source = open_disk(from, arguments.from, arguments.named.files)?;
    if remote(to).is_some() {
        let mut there = existing(arguments, source.bytes())?;
        return copy(&mut source, &mut there, arguments);
    }
    let mut made = make(arguments, source.bytes())?;
    let copied = copy(&mut source, &mut made, arguments);
    if let Err(failure) = copied {
        drop(made);
        std::fs::remove_file(to).ok();
        return Err(failure);
    }
    Ok(())
}

/// A disk that is no file exists already, with anything in it.
fn existing(arguments: &ConvertArguments, size: u64) -> Result<BlockingIo, Failure> {
    let path = arguments.destination.as_path();
    let device = open_writable(path, arguments.to, NamedFiles::None)?;
    let (bytes, block) = (
        device.capacity().bytes(),
        device.info().geometry.block_size(),
    );
    if bytes < size || !size.is_multiple_of(block.into()) {
        return Err(of(path)(&format!(
            "it has {bytes} bytes in blocks of {block}, and cannot hold the {size} bytes of the source; hint: resize one of them"
        )));
    }
    BlockingIo::new(device).map_err(|error| of(path)(&error))
}

fn make(arguments: &ConvertArguments, size: u64) -> Result<BlockingIo, Failure> {
    let path = arguments.destination.as_path();
    let bits = cluster_bits(&arguments.cluster_size)?;
    let container = new_container(path)?;
    let because = |error: &dyn std::fmt::Display| Failure::because(error.to_string());
    let device: Arc<dyn BlockDevice> = match arguments.to {
        Format::Raw => {
            drop(container);
            let file = File::open(FileOptions {
                cache: CacheMode::Writeback,
                is_container: true,
                ..FileOptions::new(path)
            });
            let file = file.map_err(|error| because(&error))?;
            file.set_size(size).map_err(|error| of(path)(&error))?;
            file.capacity().set(size);
            Arc::new(file)
        }
        Format::Qcow2 => {
            let options = CreateOptions {
                cluster_bits: bits,
                ..CreateOptions::new(size)
            };
            let created = qcow2::create(&container, &options);
            drop(container);
            created.map_err(|error| of(path)(&error))?;
            let image = Image::open(&ImageOptions {
                cache: CacheMode::Writeback,
                trusts_name: true,
                ..ImageOptions::new(path)
            });
            Arc::new(image.map_err(|error| because(&error))?)
        }
    };
    BlockingIo::new(device).map_err(|error| of(path)(&error))
}

fn copy(source: &mut BlockingIo, made: &mut BlockingIo, arguments: &ConvertArguments) -> Outcome {
    let (from, to) = (of(&arguments.source), of(&arguments.destination));
    let is_new = remote(&arguments.destination).is_none();
    let end = source.bytes();
    let mut meter = Meter::new(Some(end), arguments.quiet);
    let mut at = 0;
    while at < end {
        let extents = source
            .block_status(at, end - at)
            .map_err(|error| from(&error))?;
        for extent in data_and_holes(&extents, at, end) {
            if extent.allocation == Allocation::Data {
                let mut piece = vec![0; (extent.end - at) as usize];
                source
                    .read_at(at, &mut piece)
                    .map_err(|error| from(&error))?;
                let written = match is_new {
                    true => write(made, at, &piece),
                    false => overwrite(made, at, &piece),
                };
                written.map_err(|error| to(&error))?;
            } else if !is_new {
                zero(made, at, extent.end).map_err(|error| to(&error))?;
            }
            meter.add(extent.end - at);
            at = extent.end;
        }
    }
    made.run_plain(&IoRequest::flush())
        .map_err(|error| to(&error))?;
    let done = meter.end();
    Ok(writeln!(std::io::stdout(), "{done}")?)
}

/// Extents from `at` on, data cut into pieces; what a device does not say is data.
fn data_and_holes(extents: &[Extent], at: u64, end: u64) -> Vec<Extent> {
    let mut cut = Vec::new();
    let mut from = at;
    for extent in extents {
        let stop = extent.end.min(end);
        while from < stop {
            let piece = match extent.allocation {
                Allocation::Data => Extent::data(stop.min(from + PIECE_BYTES)),
                _ => Extent::hole(stop),
            };
            from = piece.end;
            cut.push(piece);
        }
    }
    if cut.is_empty() {
        cut.push(Extent::data(end.min(at + PIECE_BYTES)));
    }
    cut
}

/// Zeroes of a disk that may have something else there; one that knows no zeroes gets them as data.
fn zero(disk: &mut BlockingIo, mut from: u64, end: u64) -> std::io::Result<()> {
    while from < end {
        let piece = (end - from).min(PIECE_BYTES);
        let zeroes = IoRequest::write_zeroes(from, piece).flagged(IoFlags::UNMAP);
        if disk.run_plain(&zeroes).is_err() {
            disk.write_at(from, &vec![0; piece as usize])?;
        }
        from += piece;
    }
    Ok(())
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// Writes a piece in the place of something else.
fn overwrite(there: &mut BlockingIo, offset: u64, piece: &[u8]) -> std::io::Result<()> {
    match is_zero(piece) {
        true => zero(there, offset, offset + piece.len() as u64),
        false => there.write_at(offset, piece),
    }
}

/// Writes what is not zero: the new file is zeroes.
fn write(made: &mut BlockingIo, offset: u64, piece: &[u8]) -> std::io::Result<()> {
    let grains: Vec<&[u8]> = piece.chunks(GRAIN_BYTES).collect();
    let mut at = 0;
    for run in grains.chunk_by(|one, other| is_zero(one) == is_zero(other)) {
        let bytes: usize = run.iter().map(|grain| grain.len()).sum();
        if !is_zero(run[0]) {
            made.write_at(offset + at as u64, &piece[at..at + bytes])?;
        }
        at += bytes;
    }
    Ok(())
}

/// Compares two disks; one that is longer has to be zeroes there.
pub fn compare(arguments: &CompareArguments) -> Outcome {
    let (one, other) = (arguments.one.as_path(), arguments.other.as_path());
    let (named_files, quiet) = (arguments.named.files, arguments.quiet);
    let mut a = open_disk(one, arguments.format, named_files)?;
    let mut b = open_disk(other, arguments.other_format, named_files)?;
    let end = a.bytes().max(b.bytes());
    let mut meter = Meter::new(Some(end), quiet);
    let (mut left, mut right) = (vec![0; PIECE_BYTES as usize], vec![0; PIECE_BYTES as usize]);
    let mut at = 0;
    while at < end {
        let length = (end - at).min(PIECE_BYTES) as usize;
        a.read_at(at, &mut left[..length])
            .map_err(|error| of(one)(&error))?;
        b.read_at(at, &mut right[..length])
            .map_err(|error| of(other)(&error))?;
        let mut pairs = left[..length].iter().zip(&right[..length]);
        if let Some(differs) = pairs.position(|(left, right)| left != right) {
            meter.end();
            say(&format_args!("they differ at byte {}", at + differs as u64));
            return Err(Failure::Told);
        }
        meter.add(length as u64);
        at += length as u64;
    }
    let done = meter.end();
    writeln!(std::io::stdout(), "they have the same content: {done}")?;
    if a.bytes() != b.bytes() {
        say(&format_args!(
            "one disk has {} bytes, the other {}: what is longer is zeroes",
            a.bytes(),
            b.bytes()
        ));
    }
    Ok(())
}
