//! `lunette image convert`.

use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use bdev::qcow2::{self, CreateOptions};
use bdev::{
    BlockDevice, BlockingIo, CacheMode, Container, File, FileOptions, Image, ImageOptions,
    NamedFiles,
};
use block::{IoFlags, IoRequest};
use cli_common::{Failure, Outcome};

use super::arguments::{ConvertArguments, Format};
use super::disks::{open_disk, open_writable, remote};
use super::pieces::{Lane, PIECE_BYTES, PiecePlan, Stop, failure, is_zero};
use super::{FIRST_BYTES, cluster_bits, new_file, of};
use crate::meter::Meter;
use crate::same_file::is_same_file;

/// Granularity of omitted zeroes, in bytes.
const GRAIN_BYTES: usize = 4096;

/// Copies a disk into a new file or over an existing disk.
pub fn convert(arguments: &ConvertArguments) -> Outcome {
    let (from, to) = (arguments.source.as_path(), arguments.destination.as_path());
    if let Some(stream) = [from, to].into_iter().find(|path| *path == Path::new("-")) {
        return Err(Failure::mistake(format!(
            "{}: standard input and output are not supported; hint: lunette iscsi copy copies raw bytes from and to a pipe, ./- names a file",
            stream.display()
        )));
    }
    if is_same_file(from, to) {
        return Err(Failure::because(format!(
            "{}: source and destination are the same file",
            from.display()
        )));
    }
    let source = open_disk(from, arguments.from, arguments.named.files)?;
    let size = source.bytes();
    let source = source.device().clone();
    if arguments.existing || remote(to).is_some() || is_block_device(to) {
        let destination = existing(arguments, size)?;
        return overwrite(source, destination, size, arguments);
    }
    let made = make(arguments, size)?;
    let copied = copy(source, made, size, arguments);
    if copied.is_err() {
        std::fs::remove_file(to).ok();
    }
    copied
}

fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

/// Opens an existing destination with any content.
fn existing(arguments: &ConvertArguments, size: u64) -> Result<Arc<dyn BlockDevice>, Failure> {
    let path = arguments.destination.as_path();
    if remote(path).is_none() && !path.exists() {
        return Err(of(path)(&"does not exist; hint: omit -n to create it"));
    }
    let device = open_writable(path, arguments.to, NamedFiles::None)?;
    let bytes = device.capacity().bytes();
    if bytes < size {
        return Err(of(path)(&format!(
            "it has {bytes} bytes, less than the {size} bytes of the source; hint: resize one of them"
        )));
    }
    Ok(device)
}

fn make(arguments: &ConvertArguments, size: u64) -> Result<Arc<dyn BlockDevice>, Failure> {
    let path = arguments.destination.as_path();
    let bits = cluster_bits(&arguments.cluster_size)?;
    let container = new_file(
        path,
        FIRST_BYTES,
        "-n writes into it; else remove it first, or give another path",
    )?;
    let opened = open_new(arguments, size, bits, container);
    opened.inspect_err(|_| drop(std::fs::remove_file(path)))
}

/// Gives a new file its size and format.
fn open_new(
    arguments: &ConvertArguments,
    size: u64,
    cluster_bits: u32,
    container: Container,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    let path = arguments.destination.as_path();
    let because = |error: &dyn std::fmt::Display| Failure::because(error.to_string());
    Ok(match arguments.to {
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
                cluster_bits,
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
    })
}

/// Copies the data of the source to a destination that reads as zeroes.
fn copy(
    source: Arc<dyn BlockDevice>,
    destination: Arc<dyn BlockDevice>,
    size: u64,
    arguments: &ConvertArguments,
) -> Outcome {
    let mut meter = Meter::new(Some(size), arguments.quiet);
    let mut cut = PiecePlan::of(std::slice::from_ref(&source), size);
    cut.lanes.push(destination.clone());
    let done = cut.process(&mut meter, |lane, piece| {
        lane.read(0, piece)?;
        let [bytes, _] = lane.bytes(piece.length())?;
        let runs = data_runs(bytes);
        runs.into_iter()
            .try_for_each(|run| write(lane, piece.start, run))
    });
    finish(done, &destination, &meter, arguments)
}

/// Copies the source over a destination with any content. Ranges that read as zeroes in both, by their block status, are skipped.
fn overwrite(
    source: Arc<dyn BlockDevice>,
    destination: Arc<dyn BlockDevice>,
    size: u64,
    arguments: &ConvertArguments,
) -> Outcome {
    let mut meter = Meter::new(Some(size), arguments.quiet);
    let mut cut = PiecePlan::of(&[source, destination.clone()], size);
    cut.is_read = [true, false];
    let done = cut.process(&mut meter, |lane, piece| {
        let is_zero = match piece.has_data {
            [false, _] => true,
            [true, _] => {
                lane.read(0, piece)?;
                is_zero(lane.bytes(piece.length())?[0])
            }
        };
        match is_zero {
            true if !piece.has_data[1] => Ok(()),
            true => {
                let zeroed = zero(&mut lane.disks[1], piece.start, piece.end);
                zeroed.map_err(|error| Stop::Failed(1, error))
            }
            false => write(lane, piece.start, 0..piece.length()),
        }
    });
    finish(done, &destination, &meter, arguments)
}

/// Makes the copy durable and prints its length.
fn finish(
    done: Result<(), Stop>,
    destination: &Arc<dyn BlockDevice>,
    meter: &Meter,
    arguments: &ConvertArguments,
) -> Outcome {
    let (from, to) = (arguments.source.as_path(), arguments.destination.as_path());
    done.map_err(|stop| failure(stop, [from, to]))?;
    let flushed = BlockingIo::new(destination.clone())
        .and_then(|mut disk| disk.run_plain(&IoRequest::flush()));
    flushed.map_err(|error| of(to)(&error))?;
    let done = meter.end();
    if arguments.quiet {
        return Ok(());
    }
    Ok(writeln!(cli_common::stdout(), "{done}")?)
}

/// Zeroes a range. Writes zeroes as data if the disk does not support write zeroes.
fn zero(disk: &mut BlockingIo, from: u64, end: u64) -> std::io::Result<()> {
    let zeroes = IoRequest::write_zeroes(from, end - from).flagged(IoFlags::UNMAP);
    if disk.run_plain(&zeroes).is_ok() {
        return Ok(());
    }
    let zeroes = vec![0; PIECE_BYTES.min(end - from) as usize];
    let mut at = from;
    while at < end {
        let length = PIECE_BYTES.min(end - at);
        disk.write_at(at, &zeroes[..length as usize])?;
        at += length;
    }
    Ok(())
}

/// Returns the ranges that are not zeroes.
fn data_runs(piece: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (index, grain) in piece.chunks(GRAIN_BYTES).enumerate() {
        if is_zero(grain) {
            continue;
        }
        let start = index * GRAIN_BYTES;
        let end = start + grain.len();
        match runs.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

/// Writes a range of the piece that was read from `start`.
fn write(lane: &mut Lane, start: u64, run: Range<usize>) -> Result<(), Stop> {
    let data = lane.buffers[0].slice(run.start, run.len());
    let written = lane.disks[1].write_buffer(start + run.start as u64, data);
    written.map_err(|error| Stop::Failed(1, error))
}
