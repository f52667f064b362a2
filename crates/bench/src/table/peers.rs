//! The measured daemons and their disks.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};

use crate::children::{Daemon, Scratch, Start};
use crate::driver::{block_size, prepare_file};

/// Size of each RAM disk and file in bytes.
const SIZE: u64 = 512 << 20;
/// Size of the null disk, which uses no memory.
const NULL_SIZE: u64 = 64 << 30;

/// Temporary folders for sockets and files.
pub struct WorkFolders {
    folder: Scratch,
    /// Folder on tmpfs for the file of the peer's RAM disk.
    memory: Scratch,
    sockets: Scratch,
    /// Block size of the file's disk.
    block_size: u32,
}

impl WorkFolders {
    /// Creates the folders; files are placed below `files`.
    pub fn new(files: &Path, interrupted: &AtomicBool) -> Result<WorkFolders> {
        std::fs::create_dir_all(files)
            .with_context(|| format!("cannot create {}", files.display()))?;
        let memory = Path::new("/dev/shm");
        ensure!(memory.is_dir(), "/dev/shm is not a tmpfs");
        let mut place = WorkFolders {
            folder: Scratch::new("lunette-bench", files)?,
            memory: Scratch::new("lunette-bench", memory)?,
            sockets: Scratch::for_sockets("lb")?,
            block_size: 512,
        };
        prepare_file(&place.file(), SIZE, interrupted)?;
        place.block_size = block_size(&File::open(place.file())?, true)?;
        Ok(place)
    }

    /// Returns the path of the file that all daemons serve read-only. Two files would be at different locations of the device.
    pub fn file(&self) -> PathBuf {
        self.folder.path().join("file.raw")
    }

    /// Returns the path of a socket.
    pub fn socket(&self, owner: &str, medium: &str, transport: &str) -> PathBuf {
        self.sockets
            .path()
            .join(format!("{owner}-{medium}-{transport}"))
    }
}

/// Names of the disks of our daemon.
pub const MEDIA: [&str; 3] = ["null", "ram", "file"];

/// Starts our daemon with the named disks, each on both transports.
pub fn lunette(
    program: &Path,
    place: &WorkFolders,
    cpu: usize,
    owner: &str,
    media: &[&str],
    options: &[&str],
) -> Result<Daemon> {
    let mut command = Start::new(program, Some(cpu));
    command
        .args(["--log", "warn", "serve", "--cpus"])
        .arg(cpu.to_string());
    command.args(options);
    let control = place.socket(owner, "all", "control");
    command.arg("--control").arg(&control);
    let file = place.file();
    let mut sockets = vec![control];
    for medium in media {
        let engine = match *medium {
            "null" => format!("null:{NULL_SIZE}"),
            "ram" => format!("ram:{SIZE}"),
            _ => format!(
                "file:{},cache=none,read_only=true,block_size={}",
                file.display(),
                place.block_size
            ),
        };
        command.arg("--disk").arg(format!("{medium}={engine}"));
        let blk = place.socket(owner, medium, "blk");
        let scsi = place.socket(owner, medium, "scsi");
        command
            .arg("--vhost-blk")
            .arg(format!("{medium}:{}", blk.display()));
        command
            .arg("--vhost-scsi")
            .arg(format!("c-{medium}:{}", scsi.display()));
        command.arg("--lun").arg(format!("c-{medium}/0:0={medium}"));
        sockets.extend([blk, scsi]);
    }
    Daemon::start(command, &place.socket(owner, "all", "log"), &sockets)
}

/// Starts Debian's qemu-storage-daemon with the same disks.
pub fn qemu(place: &WorkFolders, cpu: usize) -> Result<Daemon> {
    let memory = place.memory.path().join("ram.raw");
    File::create(&memory)?.set_len(SIZE)?;
    let mut command = Start::new(Path::new("qemu-storage-daemon"), Some(cpu));
    let nodes = [
        format!("driver=null-co,node-name=null,size={NULL_SIZE}"),
        format!(
            "driver=file,node-name=ram,filename={},cache.direct=off,aio=threads",
            memory.display()
        ),
        format!(
            "driver=file,node-name=file,filename={},cache.direct=on,aio=io_uring,read-only=on",
            place.file().display()
        ),
    ];
    let mut sockets = Vec::new();
    for (medium, node) in MEDIA.iter().zip(nodes) {
        let socket = place.socket("qemu", medium, "blk");
        let (writable, block_size) = match *medium {
            "file" => ("off", place.block_size),
            _ => ("on", 512),
        };
        command.arg("--blockdev").arg(node);
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=e-{medium},node-name={medium},addr.type=unix,addr.path={},writable={writable},logical-block-size={block_size}",
            socket.display()
        ));
        sockets.push(socket);
    }
    Daemon::start(command, &place.sockets.path().join("qemu.log"), &sockets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let made = WorkFolders::new(Path::new("/proc/no-place"), &AtomicBool::new(false));
        let error = format!("{:#}", made.err().unwrap());
        assert!(error.contains("/proc/no-place"), "{error}");
    }
}
