//! `lunette image info`.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use bdev::qcow2::{self, Bitmap, Compression, Header, Snapshot};
use bdev::{ImageFormat, NamedFiles};
use cli_common::{Failure, Outcome, printable};
use serde_json::{Value, json};

use super::arguments::{Format, InfoArguments};
use super::chain::below;
use super::disks::{determine_format, open_disk, remote, signature};
use super::{of, open_container};

/// Flags of a bitmap.
const IN_USE: &str = "in-use";
const AUTO: &str = "auto";

pub fn info(arguments: &InfoArguments) -> Outcome {
    let (chain, as_json) = (arguments.chain, arguments.output.is_json());
    let format = match (arguments.format, chain) {
        (Some(format), _) => format,
        // Other files are opened only if name and content agree that this is an image.
        (None, true) => determine_format(&arguments.path)?,
        (None, false) => content_format(&arguments.path)?,
    };
    let mut shown = Vec::new();
    let mut seen = ChainFiles::default();
    let mut next = Some((arguments.path.clone(), format));
    while let Some((path, format)) = next.take() {
        seen.add(&path)?;
        let (value, header) = describe(&path, format)?;
        shown.push(value);
        if let Some(header) = header.filter(|_| chain) {
            next = below(&path, &header, arguments.named.files)?;
        }
    }
    let mut stdout = cli_common::stdout();
    if as_json {
        let text = match chain {
            true => Value::from(shown),
            false => shown.remove(0),
        };
        return Ok(writeln!(stdout, "{text:#}")?);
    }
    for value in shown {
        let text = |key: &str| printable(value[key].as_str().unwrap_or_default()).into_owned();
        writeln!(stdout, "image: {}", text("filename"))?;
        writeln!(stdout, "format: {}", text("format"))?;
        writeln!(stdout, "disk: {} bytes", value["virtual-size"])?;
        if let Some(used) = value.get("actual-size") {
            writeln!(stdout, "file: {used} bytes")?;
        }
        if let Some(cluster) = value.get("cluster-size") {
            writeln!(stdout, "clusters: {cluster} bytes")?;
        }
        if value.get("backing-filename").is_some() {
            let (name, format) = (text("backing-filename"), text("backing-filename-format"));
            let format = if format.is_empty() {
                "no format"
            } else {
                &format
            };
            writeln!(stdout, "backing image: {name} ({format})")?;
        }
        let data = &value["format-specific"]["data"];
        if let Some(name) = data.get("data-file") {
            let name = printable(name.as_str().unwrap_or("not named"));
            match data["data-file-raw"] == true {
                true => writeln!(stdout, "data file: {name}, with raw data")?,
                false => writeln!(stdout, "data file: {name}")?,
            }
        }
        if value["dirty-flag"] == true {
            writeln!(
                stdout,
                "not closed cleanly: its reference counts are repaired at the next start"
            )?;
        }
        if value["format-specific"]["data"]["corrupt"] == true {
            writeln!(
                stdout,
                "marked as damaged; hint: lunette image check --repair all"
            )?;
        }
        for bitmap in data["bitmaps"].as_array().into_iter().flatten() {
            write_bitmap(&mut stdout, bitmap)?;
        }
        for snapshot in value["snapshots"].as_array().into_iter().flatten() {
            let word = |key: &str| printable(snapshot[key].as_str().unwrap_or_default());
            writeln!(stdout, "snapshot {}: {}", word("id"), word("name"))?;
        }
    }
    Ok(())
}

fn write_bitmap(out: &mut impl Write, bitmap: &Value) -> std::io::Result<()> {
    let name = printable(bitmap["name"].as_str().unwrap_or_default());
    let flags = bitmap["flags"].as_array().into_iter().flatten();
    let flags: Vec<&str> = flags.filter_map(Value::as_str).collect();
    let state = match () {
        () if flags.contains(&IN_USE) => ", not saved and invalid",
        () if flags.contains(&AUTO) => "",
        () => ", disabled",
    };
    let granularity = &bitmap["granularity"];
    writeln!(out, "bitmap {name}: {granularity} bytes per bit{state}")
}

/// Files of a chain, identified by device and inode.
#[derive(Default)]
pub struct ChainFiles(Vec<(u64, u64)>);

impl ChainFiles {
    /// Adds a file. Fails if it was added before, because the chain is then a loop.
    pub fn add(&mut self, path: &Path) -> Result<(), Failure> {
        let Ok(found) = std::fs::metadata(path) else {
            // Not a file, or a file that cannot be opened.
            return Ok(());
        };
        let file = (found.dev(), found.ino());
        if self.0.contains(&file) {
            return Err(of(path)(
                &"its backing images form a cycle; hint: lunette image rebase --unsafe --backing PATH",
            ));
        }
        self.0.push(file);
        Ok(())
    }
}

/// Returns the format indicated by the content, for a report that opens no other file.
fn content_format(path: &Path) -> Result<Format, Failure> {
    match signature(path)? {
        Some(ImageFormat::Qcow2) if remote(path).is_none() => Ok(Format::Qcow2),
        None => Ok(Format::Raw),
        Some(_) => determine_format(path),
    }
}

/// Describes one image. Returns the header of a qcow2 image.
fn describe(path: &Path, format: Format) -> Result<(Value, Option<Header>), Failure> {
    let raw_bytes = || -> Result<u64, Failure> {
        Ok(open_disk(path, Some(Format::Raw), NamedFiles::None)?.bytes())
    };
    if remote(path).is_some() {
        let bytes = raw_bytes()?;
        let value = json!({
            "filename": path, "format": "raw", "virtual-size": bytes, "dirty-flag": false,
        });
        return Ok((value, None));
    }
    let used = std::fs::metadata(path)
        .map_err(|error| of(path)(&error))?
        .blocks()
        * 512;
    if format == Format::Raw {
        let bytes = raw_bytes()?;
        let value = json!({
            "filename": path, "format": "raw", "virtual-size": bytes, "actual-size": used,
            "dirty-flag": false,
        });
        return Ok((value, None));
    }
    let container = open_container(path, true)?;
    let header = Header::read(&container).map_err(|error| of(path)(&error))?;
    let has = |bit: u32| header.incompatible >> bit & 1 == 1;
    let mut value = json!({
        "filename": path, "format": "qcow2", "virtual-size": header.size, "actual-size": used,
        "cluster-size": header.cluster_bytes(), "dirty-flag": has(0),
        "format-specific": {"type": "qcow2", "data": {
            "compat": if header.version == 2 { "0.10" } else { "1.1" },
            "compression-type": match header.compression { Compression::Zlib => "zlib", Compression::Zstd => "zstd" },
            "lazy-refcounts": header.compatible & 1 == 1,
            "refcount-bits": 1_u64 << header.refcount_order,
            "corrupt": has(1), "extended-l2": header.has_subclusters(),
        }},
    });
    if header.version == 2
        && let Some(data) = value["format-specific"]["data"].as_object_mut()
    {
        data.retain(|key, _| !matches!(key.as_str(), "lazy-refcounts" | "corrupt" | "extended-l2"));
    }
    if header.has_data_file() {
        let data = &mut value["format-specific"]["data"];
        data["data-file"] = json!(header.data_file);
        data["data-file-raw"] = json!(header.is_data_file_raw());
    }
    if let Some(bitmaps) = header.bitmaps {
        let listed = bitmaps.list(&container, &header);
        let listed = listed.map_err(|error| of(path)(&error))?;
        let listed: Vec<Value> = listed.iter().map(bitmap).collect();
        value["format-specific"]["data"]["bitmaps"] = Value::from(listed);
    }
    if let Some(name) = &header.backing_file {
        value["backing-filename"] = json!(name);
        // A name that is not supported is shown unchanged.
        value["full-backing-filename"] = match bdev::backing_of(path, &header) {
            Ok(Some(named)) => json!(named.path),
            _ => json!(name),
        };
        if let Some(format) = &header.backing_format {
            value["backing-filename-format"] = json!(format);
        }
    }
    // An image with a data file has no snapshots, and its data file is not opened.
    if !header.has_data_file() {
        let read_only = qcow2::OpenOptions::READ_ONLY;
        let image = qcow2::Image::open(container, read_only).map_err(|error| of(path)(&error))?;
        let snapshots = snapshots(image.snapshots());
        if !snapshots.is_empty() {
            value["snapshots"] = Value::from(snapshots);
        }
    }
    Ok((value, Some(header)))
}

/// A persistent bitmap, with the fields of `qemu-img info`.
fn bitmap(bitmap: &Bitmap) -> Value {
    let flags = [(bitmap.is_in_use, IN_USE), (bitmap.is_enabled, AUTO)];
    let flags = flags.into_iter().filter(|(is_set, _)| *is_set);
    let flags: Vec<&str> = flags.map(|(_, name)| name).collect();
    json!({"name": bitmap.name, "granularity": bitmap.granularity, "flags": flags})
}

/// Snapshots, with the fields of `qemu-img info`.
pub fn snapshots(snapshots: &[Snapshot]) -> Vec<Value> {
    let snapshots = snapshots.iter().map(|snapshot| {
        let mut value = json!({
            "id": snapshot.id, "name": snapshot.name,
            "date-sec": snapshot.seconds, "date-nsec": snapshot.nanoseconds,
            "vm-clock-sec": snapshot.clock_nanoseconds / 1_000_000_000,
            "vm-clock-nsec": snapshot.clock_nanoseconds % 1_000_000_000,
            "vm-state-size": snapshot.state_bytes, "disk-size": snapshot.size,
        });
        if let Some(count) = snapshot.instructions {
            value["icount"] = json!(count);
        }
        value
    });
    snapshots.collect()
}
