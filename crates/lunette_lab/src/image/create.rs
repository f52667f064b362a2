//! `lunette image create`.

use std::io::Write;
use std::path::Path;

use bdev::qcow2::{self, CreateOptions, DataFileOptions};
use bdev::{CacheMode, Image, ImageOptions};
use cli_common::{Failure, Outcome};

use super::arguments::{CreateArguments, Format, parse_bytes};
use super::disks::{backing_image, open_disk};
use super::{cluster_bits, new_container, new_file, of};

pub fn create(arguments: &CreateArguments) -> Outcome {
    let path = arguments.path.as_path();
    if arguments.format == Format::Raw {
        return create_raw(arguments);
    }
    let mut options = CreateOptions {
        cluster_bits: cluster_bits(&arguments.cluster_size)?,
        extended_l2: arguments.extended_l2,
        data_file: arguments.data_file.clone().map(|name| DataFileOptions {
            name,
            is_raw: arguments.data_file_raw,
        }),
        ..CreateOptions::new(0)
    };
    let size = given_size(arguments)?;
    if let Some(name) = &arguments.data_file
        && (name.starts_with("json:") || name.starts_with("file:"))
    {
        return Err(Failure::mistake(format!(
            "--data-file {name}: QEMU would read this name as a protocol; hint: --data-file ./{name}"
        )));
    }
    let mut below = None;
    if let Some(name) = &arguments.backing {
        let named = backing_image(path, name, arguments.backing_format)?;
        let format = Format::from(named.format);
        below = Some(open_disk(&named.path, Some(format), arguments.named.files)?.bytes());
        options.backing = Some((name.clone(), format.word().to_owned()));
    }
    options.size = match size.or(below) {
        Some(size) => size,
        None => return Err(no_size()),
    };
    let container = new_container(path)?;
    let made = qcow2::create(&container, &options).map_err(|error| of(path)(&error));
    drop(container);
    let made = made.and_then(|()| match &arguments.data_file {
        Some(name) => {
            let folder = path.parent().unwrap_or(Path::new(""));
            data_file(path, &folder.join(name), arguments.data_file_raw)
        }
        None => Ok(()),
    });
    if let Err(failure) = made.and_then(|()| check_openable(path)) {
        std::fs::remove_file(path).ok();
        return Err(failure);
    }
    print_created(arguments, options.size)
}

fn given_size(arguments: &CreateArguments) -> Result<Option<u64>, Failure> {
    let size = arguments.size.as_deref().map(parse_bytes).transpose();
    size.map_err(Failure::mistake)
}

fn no_size() -> Failure {
    Failure::mistake("a size is needed; hint: lunette image create vm.qcow2 20G")
}

fn print_created(arguments: &CreateArguments, bytes: u64) -> Outcome {
    if arguments.quiet {
        return Ok(());
    }
    let (path, format) = (arguments.path.display(), arguments.format.word());
    Ok(writeln!(
        cli_common::stdout(),
        "{path}: {format}, {bytes} bytes"
    )?)
}

/// Creates a raw disk, which is one hole.
fn create_raw(arguments: &CreateArguments) -> Outcome {
    let path = arguments.path.as_path();
    if arguments.backing.is_some() || arguments.data_file.is_some() || arguments.extended_l2 {
        return Err(Failure::mistake(
            "a raw disk has no backing image, no data file and no L2 entries; hint: --format qcow2",
        ));
    }
    let bytes = given_size(arguments)?.ok_or_else(no_size)?;
    if bytes == 0 || !bytes.is_multiple_of(512) {
        return Err(Failure::mistake(format!(
            "{bytes} bytes: the size of a disk must be a multiple of 512"
        )));
    }
    new_file(path, bytes, "remove it first, or give another path")?;
    print_created(arguments, bytes)
}

/// Opens a new image and its backing chain as the daemon does.
fn check_openable(path: &Path) -> Result<(), Failure> {
    let opened = Image::open(&ImageOptions {
        read_only: true,
        cache: CacheMode::Writeback,
        ..ImageOptions::new(path)
    });
    opened
        .map(drop)
        .map_err(|error| Failure::because(error.to_string()))
}

/// Creates the data file of a new image. A block device is used as is.
fn data_file(path: &Path, data: &Path, is_raw: bool) -> Result<(), Failure> {
    let is_file = !data.exists() || data.is_file();
    if is_file {
        new_container(data)?;
    }
    let filled = match is_raw {
        true => fill_tables(path, data),
        false => Ok(()),
    };
    if filled.is_err() && is_file {
        std::fs::remove_file(data).ok();
    }
    filled
}

/// Allocates all clusters in the tables, so that the image shows data that other programs write to
/// the raw data file.
fn fill_tables(path: &Path, data: &Path) -> Result<(), Failure> {
    let failed = of(path);
    let image = bdev::open_tables(&ImageOptions {
        cache: CacheMode::Writeback,
        data_file: Some(data.to_owned()),
        ..ImageOptions::new(path)
    });
    let mut image = image.map_err(|error| Failure::because(error.to_string()))?;
    let filled = image.create_raw_data_file();
    filled.map_err(|error| failed(&error))?;
    image.close().map_err(|error| failed(&error))
}
