//! `lunette image map`.

use std::io::{self, Write};
use std::path::Path;

use bdev::qcow2::Mapping;
use bdev::{BlockingIo, NamedFiles};
use block::Allocation;
use cli_common::{Failure, Outcome};

use super::arguments::Format;
use super::chain::below;
use super::describe::ChainFiles;
use super::disks::{determine_format, open_disk};
use super::{Tables, of, open_tables};

/// Maximum bytes of an extent before extents are joined.
const STEP_BYTES: u64 = 1 << 40;

/// One image or raw disk of a chain.
enum Layer {
    Image(Box<Tables>),
    Raw(Box<BlockingIo>),
}

impl Layer {
    fn size(&self) -> u64 {
        match self {
            Layer::Image(image) => image.header().size,
            Layer::Raw(disk) => disk.bytes(),
        }
    }
}

/// The layers of a chain, the active one first.
struct Chain(Vec<(std::path::PathBuf, Layer)>);

impl Chain {
    fn open(path: &Path, format: Format, named_files: NamedFiles) -> Result<Chain, Failure> {
        let mut layers = Vec::new();
        let mut seen = ChainFiles::default();
        let mut next = Some((path.to_owned(), format));
        while let Some((path, format)) = next.take() {
            seen.add(&path)?;
            let layer = match format {
                Format::Raw => {
                    Layer::Raw(Box::new(open_disk(&path, Some(Format::Raw), named_files)?))
                }
                Format::Qcow2 => {
                    let image = open_tables(&path, true, named_files)?;
                    next = below(&path, image.header(), named_files)?;
                    Layer::Image(Box::new(image))
                }
            };
            layers.push((path, layer));
        }
        Ok(Chain(layers))
    }

    fn extent(&mut self, at: u64, end: u64) -> Result<Extent, Failure> {
        let mut end = end.min(at.saturating_add(STEP_BYTES));
        let sizes: Vec<u64> = self.0.iter().map(|(_, layer)| layer.size()).collect();
        for (depth, (path, layer)) in self.0.iter_mut().enumerate() {
            let (content, stop) = match layer {
                Layer::Raw(disk) => raw(disk, at, end).map_err(|error| of(path)(&error))?,
                Layer::Image(image) => {
                    image.load(at).map_err(|error| of(path)(&error))?;
                    let segment = image.map().segment(at, end - at);
                    let content = match segment.mapping {
                        Mapping::Unallocated => Content::Absent,
                        Mapping::Zero => Content::Zero(None),
                        Mapping::Data { host, .. } => Content::Data(Some(host)),
                        Mapping::Compressed => Content::Data(None),
                        Mapping::NotLoaded | Mapping::Bad => {
                            return Err(of(path)(&format!("the entry of offset {at} is damaged")));
                        }
                    };
                    (content, at + segment.length)
                }
            };
            end = end.min(stop);
            let size_below = sizes.get(depth + 1).copied().unwrap_or(0);
            let is_last = size_below <= at;
            if content != Content::Absent || is_last {
                return Ok(Extent {
                    start: at,
                    end,
                    depth,
                    content,
                });
            }
            end = end.min(size_below);
        }
        Err(Failure::because("a chain without images"))
    }
}

/// Returns the content of a raw disk at an offset, and its end.
fn raw(disk: &mut BlockingIo, at: u64, end: u64) -> io::Result<(Content, u64)> {
    let found = disk.block_status(at, end - at)?;
    let first = found.into_iter().find(|extent| extent.end > at);
    Ok(match first {
        Some(extent) if extent.allocation != Allocation::Data => {
            (Content::Zero(Some(at)), extent.end)
        }
        Some(extent) => (Content::Data(Some(at)), extent.end),
        None => (Content::Data(Some(at)), end),
    })
}

/// Content of a range, with its offset in the file of its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Not present in any layer; reads as zeroes.
    Absent,
    Zero(Option<u64>),
    Data(Option<u64>),
}

/// A range with one content.
#[derive(Clone, Copy, Debug)]
struct Extent {
    start: u64,
    end: u64,
    /// Number of layers above its layer.
    depth: usize,
    content: Content,
}

impl Extent {
    /// Appends an extent that continues this one. Returns false if the content differs.
    fn append(&mut self, next: &Extent) -> bool {
        let length = self.end - self.start;
        let follows = |one: Option<u64>| one.map(|offset| offset + length);
        let expected = match self.content {
            Content::Absent => Content::Absent,
            Content::Zero(offset) => Content::Zero(follows(offset)),
            Content::Data(offset) => Content::Data(follows(offset)),
        };
        let continues = self.depth == next.depth && expected == next.content;
        if continues {
            self.end = next.end;
        }
        continues
    }

    /// Writes the extent in the format of qemu-img.
    fn write_json(&self, out: &mut impl Write) -> io::Result<()> {
        let (present, zero, offset) = match self.content {
            Content::Absent => (false, true, None),
            Content::Zero(offset) => (true, true, offset),
            Content::Data(offset) => (true, false, offset),
        };
        let (start, length, depth) = (self.start, self.end - self.start, self.depth);
        write!(
            out,
            r#"{{ "start": {start}, "length": {length}, "depth": {depth}, "present": {present}, "zero": {zero}, "data": {}"#,
            !zero
        )?;
        match offset {
            Some(offset) => write!(out, r#", "offset": {offset}}}"#),
            None => write!(out, "}}"),
        }
    }

    fn has_data(&self) -> bool {
        matches!(self.content, Content::Data(_))
    }
}

/// Prints the extents of a disk and their layers in its chain.
pub fn map(path: &Path, format: Option<Format>, named_files: NamedFiles, as_json: bool) -> Outcome {
    let format = match format {
        Some(format) => format,
        None => determine_format(path)?,
    };
    let mut chain = Chain::open(path, format, named_files)?;
    let mut stdout = io::BufWriter::new(cli_common::stdout());
    if as_json {
        write!(stdout, "[")?;
        let mut separator = "";
        for_each(&mut chain, Extent::append, |extent| {
            write!(stdout, "{separator}")?;
            separator = ",\n";
            extent.write_json(&mut stdout)
        })?;
        writeln!(stdout, "]")?;
        return Ok(stdout.flush()?);
    }
    writeln!(stdout, "{:>16}  {:>16}  content", "from", "bytes")?;
    let append = |one: &mut Extent, next: &Extent| {
        let continues = one.has_data() == next.has_data();
        if continues {
            one.end = next.end;
        }
        continues
    };
    for_each(&mut chain, append, |extent| {
        let content = if extent.has_data() { "data" } else { "zeroes" };
        let (from, bytes) = (extent.start, extent.end - extent.start);
        writeln!(stdout, "{from:>16}  {bytes:>16}  {content}")
    })?;
    Ok(stdout.flush()?)
}

/// Calls `print` for each extent, joined by `append` with the extents that continue it.
fn for_each(
    chain: &mut Chain,
    append: impl Fn(&mut Extent, &Extent) -> bool,
    mut print: impl FnMut(&Extent) -> io::Result<()>,
) -> Outcome {
    let end = chain.0.first().map_or(0, |(_, layer)| layer.size());
    let mut pending: Option<Extent> = None;
    let mut at = 0;
    while at < end {
        let extent = chain.extent(at, end)?;
        at = extent.end;
        let continues = pending.as_mut().is_some_and(|one| append(one, &extent));
        if !continues && let Some(whole) = pending.replace(extent) {
            print(&whole)?;
        }
    }
    match pending {
        Some(last) => Ok(print(&last)?),
        None => Ok(()),
    }
}
