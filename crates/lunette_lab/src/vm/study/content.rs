//! Content of the disks of a study. Ranges that were never written are read without any storage, so they are written first.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Args;
use cli_common::print_line;

use super::guest::StudyGuest;

/// Option of all studies.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Content {
    /// Do not write the disks before they are measured. Reads of ranges that were never written use no storage and are too fast
    #[arg(long)]
    pub unwritten: bool,
}

const PIECE: usize = 1 << 20;

/// Writes `size` bytes at the start of a file or device, and flushes them.
fn write_all(file: &File, size: u64) -> std::io::Result<()> {
    let piece: Vec<u8> = (0..PIECE).map(|at| (at % 251) as u8).collect();
    let mut at = 0;
    while at < size {
        if vm::interrupted() {
            return Err(std::io::Error::other("interrupted"));
        }
        let length = (size - at).min(PIECE as u64);
        file.write_all_at(&piece[..length as usize], at)?;
        at += length;
    }
    file.sync_all()
}

impl Content {
    /// Describes the content of the disks in the conditions of a study.
    pub fn describe(self) -> &'static str {
        match self.unwritten {
            true => "never written",
            false => "written before the measurement",
        }
    }

    /// Creates the file of a disk, unless it has this size already.
    pub fn file(self, path: &Path, size: u64) -> Result<()> {
        let is_there = std::fs::metadata(path).is_ok_and(|metadata| metadata.len() == size);
        if is_there {
            return Ok(());
        }
        let write = || -> std::io::Result<()> {
            let file = File::create(path)?;
            match self.unwritten {
                true => file.set_len(size),
                false => write_all(&file, size),
            }
        };
        write().with_context(|| format!("cannot write {} of {size} bytes", path.display()))
    }

    /// Writes a whole block device.
    pub fn device(self, path: &Path) -> Result<()> {
        if self.unwritten {
            return Ok(());
        }
        let shown = path.display();
        let write = || -> std::io::Result<()> {
            let mut file = File::options().write(true).open(path)?;
            let size = file.seek(SeekFrom::End(0))?;
            print_line(&format_args!(
                "writing {} MiB to {shown} before the measurement; --unwritten skips this",
                size >> 20
            ));
            write_all(&file, size)?;
            file.flush()
        };
        write().with_context(|| format!("cannot write {shown}"))
    }

    /// Writes disks of a guest that have no file.
    pub fn in_guest(self, guest: &StudyGuest, disks: &[String]) -> Result<()> {
        if self.unwritten {
            return Ok(());
        }
        let mut job =
            "[global]\nioengine=io_uring\ndirect=1\nrw=write\nbs=1m\niodepth=4\n".to_owned();
        for (number, disk) in disks.iter().enumerate() {
            job.push_str(&format!("[disk{number}]\nfilename={disk}\n"));
        }
        let written = guest.run(&job);
        written.context("cannot write the disks before the measurement; hint: --unwritten")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn files_have_data_unless_they_are_to_be_unwritten() {
        let folder = tempfile::tempdir().unwrap();
        for (unwritten, name) in [(false, "written"), (true, "unwritten")] {
            let path = folder.path().join(name);
            let content = Content { unwritten };
            content.file(&path, 3 << 20).unwrap();
            let metadata = std::fs::metadata(&path).unwrap();
            assert_eq!(metadata.len(), 3 << 20);
            assert_eq!(metadata.blocks() == 0, unwritten);
            content.device(&path).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().blocks() == 0, unwritten);
        }
    }
}
