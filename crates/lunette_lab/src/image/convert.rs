//! `lunette image convert` and `lunette image compare`.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use bdev::qcow2::{self, CreateOptions};
use bdev::{BlockDevice, BlockingIo, CacheMode, File, FileOptions, Image, ImageOptions};
use block::{Allocation, Extent, IoRequest};
use cli_common::{Failure, Outcome, say};

use super::arguments::{ConvertArguments, Format};
use super::{cluster_bits, new_container, of, open_disk};
use crate::meter::Meter;

/// Bytes that are copied with one read.
const PIECE_BYTES: u64 = 1 << 20;
/// Zeroes among data that are left out.
const GRAIN_BYTES: usize = 4096;

/// Copies a disk into a new file.
pub fn convert(arguments: &ConvertArguments) -> Outcome {
    let (from, to) = (arguments.source.as_path(), arguments.destination.as_path());
    let mut source = open_disk(from, arguments.from)?;
    let mut made = make(arguments, source.bytes())?;
    let copied = copy(&mut source, &mut made, arguments);
    if let Err(failure) = copied {
        drop(made);
        std::fs::remove_file(to).ok();
        return Err(failure);
    }
    Ok(())
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
                ..ImageOptions::new(path)
            });
            Arc::new(image.map_err(|error| because(&error))?)
        }
    };
    BlockingIo::new(device).map_err(|error| of(path)(&error))
}

fn copy(source: &mut BlockingIo, made: &mut BlockingIo, arguments: &ConvertArguments) -> Outcome {
    let (from, to) = (of(&arguments.source), of(&arguments.destination));
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
                write(made, at, &piece).map_err(|error| to(&error))?;
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

/// Writes what is not zero: the new file is zeroes.
fn write(made: &mut BlockingIo, offset: u64, piece: &[u8]) -> std::io::Result<()> {
    let is_zero = |grain: &[u8]| grain.iter().all(|byte| *byte == 0);
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
pub fn compare(one: &Path, other: &Path, quiet: bool) -> Outcome {
    let (mut a, mut b) = (open_disk(one, None)?, open_disk(other, None)?);
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
