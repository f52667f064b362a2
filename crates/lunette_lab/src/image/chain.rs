//! `lunette image commit` and `lunette image rebase`: write an overlay's data into its backing image, or give it another one.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bdev::qcow2::{self, Backing, Header, Mapping};
use bdev::{BlockingIo, CHAIN_MAX, CheckNamed, File, FileOptions, NamedFiles, OpenError};
use block::{Allocation, IoRequest};
use cli_common::{Failure, Outcome};

use super::arguments::{Format, RebaseArguments};
use super::disks::{backing_image, open_disk, open_writable, remote};
use super::{Tables as Overlay, has_bitmaps, of, open_tables, require_qcow2, warn_of_bitmaps};
use crate::meter::Meter;

/// Bytes per read and write. A rebase reads whole clusters, which may be larger.
const PIECE_BYTES: u64 = 1 << 20;
/// Clusters per change of the tables.
const BATCH: usize = 256;

/// Returns the backing image of a header, after checking that it may name that file.
pub fn below(
    path: &Path,
    header: &Header,
    named_files: NamedFiles,
) -> Result<Option<(PathBuf, Format)>, Failure> {
    let because = |error: OpenError| Failure::because(error.to_string());
    let Some(named) = bdev::backing_of(path, header).map_err(because)? else {
        return Ok(None);
    };
    named_files
        .check(path, "backing image", &named.path)
        .map_err(because)?;
    Ok(Some((named.path, named.format.into())))
}

/// Returns the overlay's mapping at an offset, and its length. Data are limited to one piece.
fn own(overlay: &mut Overlay, at: u64, end: u64) -> qcow2::Result<(Mapping, u64)> {
    overlay.load(at)?;
    let mut segment = overlay.map().segment(at, end - at);
    if matches!(segment.mapping, Mapping::Data { .. }) {
        segment.length = segment.length.min(PIECE_BYTES);
    }
    if segment.mapping == Mapping::Bad {
        return Err(qcow2::Error::Corrupt(format!(
            "the entry of offset {at} is damaged"
        )));
    }
    Ok((segment.mapping, segment.length))
}

/// Writes all data of an overlay into its backing image. The overlay is unchanged and reads as before.
pub fn commit(
    path: &Path,
    format: Option<Format>,
    named_files: NamedFiles,
    quiet: bool,
) -> Outcome {
    let failed = of(path);
    require_qcow2(path, format)?;
    let mut overlay = open_tables(path, true, named_files)?;
    let Some((place, format)) = below(path, overlay.header(), named_files)? else {
        return Err(failed(&"it has no backing image to commit to"));
    };
    if !overlay.snapshots().is_empty() {
        return Err(failed(
            &"a commit would change the content of its internal snapshots; hint: remove them, or use lunette image convert",
        ));
    }
    let to = of(&place);
    let has_bitmaps = format == Format::Qcow2 && has_bitmaps(&place)?;
    let device = open_writable(&place, format, named_files)?;
    let end = overlay.header().size;
    if device.capacity().bytes() < end {
        device.set_size(end).map_err(|error| to(&error))?;
        device.capacity().set(end);
    }
    let mut base = BlockingIo::new(device).map_err(|error| to(&error))?;
    let mut meter = Meter::new(Some(end), quiet);
    let mut piece = Vec::new();
    let mut at = 0;
    while at < end {
        let (mapping, length) = own(&mut overlay, at, end).map_err(|error| failed(&error))?;
        match mapping {
            Mapping::Unallocated => {}
            Mapping::Zero => write_zeroes(&mut base, at, length).map_err(|error| to(&error))?,
            _ => {
                piece.clear();
                piece.resize(length as usize, 0);
                let read = read_own(&overlay, mapping, at, &mut piece);
                read.map_err(|error| failed(&error))?;
                write_changed(&mut base, at, &piece).map_err(|error| to(&error))?;
            }
        }
        meter.add(length);
        at += length;
    }
    let flushed = base.run_plain(&IoRequest::flush());
    flushed.map_err(|error| to(&error))?;
    let done = meter.end();
    if has_bitmaps {
        warn_of_bitmaps(&place);
    }
    if quiet {
        return Ok(());
    }
    let (path, place) = (path.display(), place.display());
    Ok(writeln!(
        cli_common::stdout(),
        "committed {path} to {place}: {done}"
    )?)
}

/// Reads data of an overlay, which may be compressed.
fn read_own(overlay: &Overlay, mapping: Mapping, at: u64, piece: &mut [u8]) -> qcow2::Result<()> {
    use qcow2::Storage;
    match mapping {
        Mapping::Data { host, .. } => {
            let read = overlay.data().read_at(host, piece);
            read.map_err(|source| qcow2::Error::Io {
                operation: "cannot read data",
                source,
            })?;
        }
        Mapping::Compressed => {
            let cluster = overlay.header().cluster_bytes();
            let mut content = vec![0; cluster as usize];
            overlay.read_compressed(at, &mut content)?;
            let from = (at & (cluster - 1)) as usize;
            piece.copy_from_slice(&content[from..from + piece.len()]);
        }
        Mapping::Zero | Mapping::Unallocated | Mapping::NotLoaded | Mapping::Bad => {}
    }
    Ok(())
}

/// Returns the end of a range that reads as zeroes without I/O: a hole of the disk, or space beyond its end.
fn end_of_hole(disk: &mut BlockingIo, at: u64, end: u64) -> Option<u64> {
    if at >= disk.bytes() {
        return Some(end);
    }
    let known = end.min(disk.bytes());
    let first = disk.block_status(at, known - at).ok()?.into_iter().next()?;
    let is_hole = first.allocation == Allocation::Hole && first.end > at;
    is_hole.then_some(first.end.min(known))
}

/// Zeroes a range of the base, except for its holes.
fn write_zeroes(base: &mut BlockingIo, at: u64, length: u64) -> std::io::Result<()> {
    let end = at + length;
    let mut from = at;
    while from < end {
        let next = match end_of_hole(base, from, end) {
            Some(next) => next,
            None => {
                let piece = vec![0; PIECE_BYTES.min(end - from) as usize];
                write_changed(base, from, &piece)?;
                from + piece.len() as u64
            }
        };
        from = next;
    }
    Ok(())
}

/// Writes a range unless the base has the same content already, so that holes stay holes.
fn write_changed(base: &mut BlockingIo, at: u64, piece: &[u8]) -> std::io::Result<()> {
    let mut there = vec![0; piece.len()];
    base.read_at(at, &mut there)?;
    match there == piece {
        true => Ok(()),
        false => base.write_at(at, piece),
    }
}

/// Gives the image another backing image. Its content stays the same, unless only the name is to change.
pub fn rebase(arguments: &RebaseArguments) -> Outcome {
    let path = arguments.path.as_path();
    let failed = of(path);
    let named_files = arguments.named.files;
    require_qcow2(path, arguments.format)?;
    let backing = match &arguments.backing {
        None => None,
        Some(name) if name.is_empty() => {
            return Err(failed(
                &"the name of the backing image is empty; hint: --no-backing removes the backing image",
            ));
        }
        Some(name) => {
            let named = backing_image(path, name, arguments.backing_format)?;
            Some((name.as_str(), named.path, Format::from(named.format)))
        }
    };
    if let Some((_, place, format)) = &backing {
        check_chain(path, place, *format)?;
    }
    let mut copied = String::new();
    // Opened before the image is locked. If the image is in this chain, locking it fails.
    let mut new = match &backing {
        Some((_, place, format)) if !arguments.name_only => {
            if !place.exists() && remote(place).is_none() {
                let place = place.display();
                return Err(failed(&format!(
                    "the backing image {place} does not exist; hint: correct the path, or change only the name with --unsafe"
                )));
            }
            Some(open_disk(place, Some(*format), named_files)?)
        }
        _ => None,
    };
    let mut image = open_tables(path, false, named_files)?;
    if !arguments.name_only {
        if !image.snapshots().is_empty() {
            return Err(failed(
                &"another backing image would change the content of its internal snapshots; hint: remove them, or use lunette image convert",
            ));
        }
        let mut old = match below(path, image.header(), named_files)? {
            Some((place, format)) => Some(open_disk(&place, Some(format), named_files)?),
            None => None,
        };
        let meter = Meter::new(Some(image.header().size), arguments.quiet);
        let kept = keep_content(&mut image, old.as_mut(), new.as_mut(), meter);
        copied = kept.map_err(|error| {
            // Frees reserved space as far as possible.
            image.close().ok();
            failed(&error)
        })?;
    }
    let named = backing.as_ref();
    let named = named.map(|(name, _, format)| (*name, format.word()));
    let changed = image.set_backing(named).and_then(|()| image.close());
    changed.map_err(|error| failed(&error))?;
    let shown = path.display();
    let stands = match named {
        Some((name, format)) => format!("has the backing image {name} ({format})"),
        None => "has no backing image".to_owned(),
    };
    if arguments.quiet {
        return Ok(());
    }
    match copied.is_empty() {
        true => writeln!(cli_common::stdout(), "{shown} {stands}")?,
        false => writeln!(cli_common::stdout(), "{shown} {stands}: {copied}")?,
    }
    Ok(())
}

/// Refuses a backing image that would make the image unusable: the chain is too long or contains an image twice. Also reads images that are
/// in use. Does not check a missing backing image.
fn check_chain(path: &Path, place: &Path, format: Format) -> Result<(), Failure> {
    let failed = of(path);
    let identity = |path: &Path| {
        let found = std::fs::metadata(path).ok()?;
        Some((found.dev(), found.ino()))
    };
    let mut seen: Vec<(u64, u64)> = identity(path).into_iter().collect();
    let mut next = Some((place.to_owned(), format));
    while let Some((place, format)) = next {
        let Some(found) = identity(&place) else {
            return Ok(());
        };
        if seen.contains(&found) {
            return Err(failed(&format!(
                "{} has it as backing image, which would form a cycle; hint: give another backing image",
                place.display()
            )));
        }
        if format == Format::Raw {
            return Ok(());
        }
        seen.push(found);
        if seen.len() > CHAIN_MAX {
            return Err(failed(&format!(
                "its chain would exceed {CHAIN_MAX} images, the maximum for opening; hint: shorten it with lunette image commit"
            )));
        }
        let file = File::open(FileOptions {
            read_only: true,
            lock: bdev::FileLock::Never,
            is_container: true,
            ..FileOptions::new(&place)
        });
        let file = file.map_err(|error| Failure::because(error.to_string()))?;
        let container = file.container().map_err(|error| of(&place)(&error))?;
        let header = Header::read(&container).map_err(|error| of(&place)(&error))?;
        next = below(&place, &header, NamedFiles::Any)?;
    }
    Ok(())
}

/// Copies data of the old backing image into the image where the new one differs.
fn keep_content(
    image: &mut Overlay,
    mut old: Option<&mut BlockingIo>,
    mut new: Option<&mut BlockingIo>,
    mut meter: Meter,
) -> qcow2::Result<String> {
    let end = image.header().size;
    let cluster = image.header().cluster_bytes();
    let piece = PIECE_BYTES.max(cluster);
    let (mut before, mut after) = (Vec::new(), Vec::new());
    let (mut differing, mut clusters) = (Vec::new(), 0_u64);
    let mut at = 0;
    while at < end {
        let (mapping, mut length) = own(image, at, end)?;
        if mapping == Mapping::Unallocated {
            // A run may begin within a cluster (subclusters); whole clusters are compared and copied.
            if !at.is_multiple_of(cluster) {
                length = length.min(cluster - at % cluster);
            }
            length = piece_to_compare(&mut old, &mut new, at, length, piece);
        }
        if mapping == Mapping::Unallocated && length <= piece {
            read_padded(&mut old, at, length, &mut before)?;
            read_padded(&mut new, at, length, &mut after)?;
            let pairs = before
                .chunks(cluster as usize)
                .zip(after.chunks(cluster as usize));
            for (index, _) in pairs.enumerate().filter(|(_, (one, other))| one != other) {
                let offset = (at + index as u64 * cluster) / cluster * cluster;
                // Two runs of subclusters may lie in one cluster.
                if differing.last() != Some(&offset) {
                    differing.push(offset);
                }
            }
        }
        meter.add(length);
        at += length;
        if differing.len() >= BATCH || at >= end {
            clusters += differing.len() as u64;
            copy_clusters(image, &mut differing, &mut old)?;
        }
    }
    meter.end();
    Ok(format!("{clusters} clusters copied"))
}

/// Returns the length of the next part to compare, at most `piece` bytes. For a longer hole in both disks, returns its length in whole
/// pieces.
fn piece_to_compare(
    old: &mut Option<&mut BlockingIo>,
    new: &mut Option<&mut BlockingIo>,
    at: u64,
    length: u64,
    piece: u64,
) -> u64 {
    let mut common = at + length;
    for disk in [old.as_deref_mut(), new.as_deref_mut()]
        .into_iter()
        .flatten()
    {
        common = end_of_hole(disk, at, common).unwrap_or(at);
    }
    match common - at {
        hole if hole > piece => hole / piece * piece,
        _ => length.min(piece),
    }
}

fn copy_clusters(
    image: &mut Overlay,
    offsets: &mut Vec<u64>,
    old: &mut Option<&mut BlockingIo>,
) -> qcow2::Result<()> {
    let old = old.as_mut().map(|old| &mut **old as &mut dyn Backing);
    let mut failed = image.prepare_write(offsets, old);
    offsets.clear();
    match failed.pop() {
        None => Ok(()),
        Some((_, error)) => Err(error),
    }
}

/// Reads a backing image. Beyond its end, or without one, returns zeroes.
fn read_padded(
    disk: &mut Option<&mut BlockingIo>,
    at: u64,
    length: u64,
    bytes: &mut Vec<u8>,
) -> qcow2::Result<()> {
    bytes.clear();
    bytes.resize(length as usize, 0);
    let Some(disk) = disk else {
        return Ok(());
    };
    let there = disk.bytes().saturating_sub(at).min(length) as usize;
    if there == 0 {
        return Ok(());
    }
    let read = disk.read_at(at, &mut bytes[..there]);
    read.map_err(|source| qcow2::Error::Io {
        operation: "cannot read a backing image",
        source,
    })
}
