//! Files of the disks, and their changes between the end of a daemon and the start of the next.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use qcow2::{CheckReport, CreateOptions, Image, Mapping, OpenOptions, Repair, Storage};

use crate::model::{BLOCK, Value, fill};

/// Storage of an image for tools.
pub struct Tool(pub File);

impl Storage for Tool {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match self.0.read_at(&mut bytes[done..], offset + done as u64)? {
                0 => {
                    bytes[done..].fill(0);
                    break;
                }
                read => done += read,
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn zero(&self, offset: u64, length: u64) -> io::Result<()> {
        self.0.write_all_at(&vec![0; length as usize], offset)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
}

pub fn open(path: &Path) -> File {
    let options = File::options().read(true).write(true).open(path);
    options.expect("a file of the simulation")
}

pub fn create_raw(path: &Path, blocks: u64, first_value: u64) {
    let file = File::create_new(path).expect("a file of the simulation");
    let mut content = vec![0; blocks as usize * BLOCK];
    if first_value > 0 {
        for (lba, block) in content.chunks_exact_mut(BLOCK).enumerate() {
            fill(block, first_value + lba as u64, lba as u64);
        }
    }
    file.write_all_at(&content, 0).expect("space for a file");
}

pub fn create_image(path: &Path, options: &CreateOptions) {
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path);
    let file = file.expect("a file of the simulation");
    qcow2::create(&Tool(file), options).expect("an image of the simulation");
}

/// Backing image for tools.
struct Below<'a>(&'a [u8]);

impl qcow2::Backing for Below<'_> {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.0[offset as usize..][..bytes.len()]);
        Ok(())
    }
}

/// Creates an image over a raw file, with `own` values in some blocks. `content`: the content of the raw file; on return, of the image.
pub fn create_between(
    path: &Path,
    options: &CreateOptions,
    own: &[(u64, Value)],
    content: &mut Vec<u8>,
) {
    create_image(path, options);
    let made = Image::open(Tool(open(path)), OpenOptions::READ_WRITE);
    let mut image = made.expect("an image of the simulation");
    let below = content.clone();
    content.resize(options.size as usize, 0);
    for (lba, value) in own {
        let at = lba * BLOCK as u64;
        let failed = image.prepare_write(&[at], Some(&mut Below(&below)));
        assert!(failed.is_empty(), "{failed:?}");
        let segment = image.map().segment(at, BLOCK as u64);
        let Mapping::Data { host, .. } = segment.mapping else {
            panic!("{segment:?} is not data");
        };
        let block = &mut content[at as usize..][..BLOCK];
        fill(block, *value, *lba);
        let written = image.data().write_at(host, block);
        written.expect("space for a file");
    }
    image.close().expect("an image of the simulation");
}

/// Creates a data file and allocates all its clusters in the image.
pub fn fill_tables(path: &Path, data: &Path) {
    create_raw(data, 0, 0);
    let storage = (Tool(open(path)), Some(Tool(open(data))));
    let options = OpenOptions::READ_WRITE;
    let image = Image::open_with(storage.0, storage.1, options);
    let mut image = image.expect("an image of the simulation");
    let made = image.create_raw_data_file().and_then(|()| image.close());
    made.expect("an image of the simulation");
}

pub fn check(path: &Path, repair: Repair) -> Result<CheckReport, String> {
    Image::check(Tool(open(path)), repair).map_err(|error| error.to_string())
}

/// Creates an internal snapshot, which shares every cluster.
pub fn snapshot(path: &Path, name: &str) -> Result<(), String> {
    let options = OpenOptions::READ_WRITE;
    let data = path.with_extension("data");
    let data = data.exists().then(|| Tool(open(&data)));
    let image = Image::open_with(Tool(open(path)), data, options);
    let image = image.map_err(|error| error.to_string())?;
    let made = image.create_snapshot(name, 0);
    made.map(drop).map_err(|error| error.to_string())
}

/// Returns the number of blocks of an image's disk.
pub fn blocks(path: &Path) -> u64 {
    let header = qcow2::Header::read(&Tool(open(path))).expect("an image of the simulation");
    header.size / BLOCK as u64
}

/// Reads the content of a snapshot. Unallocated clusters read as `below`.
pub fn read_snapshot(path: &Path, name: &str, below: &[u8]) -> Result<Vec<u8>, String> {
    let text = |error: qcow2::Error| error.to_string();
    let copy = path.with_extension("copy");
    std::fs::copy(path, &copy).map_err(|error| error.to_string())?;
    let options = || OpenOptions::READ_WRITE;
    let image = Image::open(Tool(open(&copy)), options()).map_err(text)?;
    image.apply_snapshot(name).map_err(text)?;
    let mut image = Image::open(Tool(open(&copy)), options()).map_err(text)?;
    let mut content = vec![0; image.header().size as usize];
    let mut at = 0;
    while at < content.len() {
        image.load(at as u64).map_err(text)?;
        let left = (content.len() - at) as u64;
        let segment = image.map().segment(at as u64, left);
        let part = &mut content[at..at + segment.length as usize];
        match segment.mapping {
            Mapping::Data { host, .. } => {
                let read = image.data().read_at(host, part);
                read.map_err(|error| error.to_string())?;
            }
            Mapping::Zero => {}
            Mapping::Unallocated => {
                let known = below.get(at..).unwrap_or_default();
                let known = &known[..known.len().min(part.len())];
                part[..known.len()].copy_from_slice(known);
            }
            other => return Err(format!("{other:?} at {at}")),
        }
        at += segment.length as usize;
    }
    std::fs::remove_file(&copy).map_err(|error| error.to_string())?;
    Ok(content)
}
