//! The daemons that are measured: started, waited for, and ended with their owner.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::driver::{block_size, prepare_file};

/// Bytes of each RAM disk and file.
const SIZE: u64 = 512 << 20;
/// A null disk takes no memory.
const NULL_SIZE: u64 = 64 << 30;
/// A daemon that has not opened its sockets by then will not.
const PATIENCE: Duration = Duration::from_secs(20);

/// Folders for sockets and files, gone at the end.
pub struct Place {
    folder: tempfile::TempDir,
    /// On tmpfs, for the peer's RAM disk.
    memory: tempfile::TempDir,
    sockets: tempfile::TempDir,
    /// Of the file's disk.
    block_size: u32,
}

impl Place {
    /// Makes them; the files go below `files`.
    pub fn new(files: &Path) -> Result<Place> {
        let builder = || tempfile::Builder::new();
        std::fs::create_dir_all(files)?;
        let memory = Path::new("/dev/shm");
        ensure!(memory.is_dir(), "there is no tmpfs at /dev/shm");
        let mut place = Place {
            folder: builder().prefix("lunette-bench").tempdir_in(files)?,
            memory: builder().prefix("lunette-bench").tempdir_in(memory)?,
            // A socket's path is at most 107 bytes long.
            sockets: builder().prefix("lb").tempdir_in("/tmp")?,
            block_size: 512,
        };
        prepare_file(&place.file(), SIZE)?;
        place.block_size = block_size(&File::open(place.file())?, true)?;
        Ok(place)
    }

    /// The file that all daemons serve, read-only: two files would lie at different places of the device.
    pub fn file(&self) -> PathBuf {
        self.folder.path().join("file.raw")
    }

    /// A socket.
    pub fn socket(&self, owner: &str, medium: &str, door: &str) -> PathBuf {
        self.sockets.path().join(format!("{owner}-{medium}-{door}"))
    }
}

/// A process that is ended with its owner.
pub struct Daemon {
    child: Child,
}

impl Daemon {
    /// Starts it and waits for its sockets.
    pub fn start(mut command: Command, log: &Path, sockets: &[PathBuf]) -> Result<Daemon> {
        let name = command.get_program().to_string_lossy().into_owned();
        let out = File::create(log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            // A terminal's Ctrl-C is for whoever measures, and ends these in their turn.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let mut daemon = Daemon { child };
        let until = Instant::now() + PATIENCE;
        while !sockets.iter().all(|socket| socket.exists()) {
            let ended = daemon.child.try_wait()?;
            if ended.is_some() || Instant::now() > until {
                let mut text = String::new();
                File::open(log)?.read_to_string(&mut text)?;
                bail!("{name} does not serve: {}", text.trim());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    /// Is it gone?
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Nothing of it is needed any more; both calls fail only when it is gone.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// A program on a CPU.
pub fn pinned(program: &Path, cpu: usize) -> Command {
    let mut command = Command::new("taskset");
    command.arg("-c").arg(cpu.to_string()).arg(program);
    command
}

/// The disks of a daemon of ours.
pub const MEDIA: [&str; 3] = ["null", "ram", "file"];

/// One of ours: the disks of these names, each behind both doors.
pub fn lunette(
    program: &Path,
    place: &Place,
    cpu: usize,
    owner: &str,
    media: &[&str],
    options: &[&str],
) -> Result<Daemon> {
    let mut command = pinned(program, cpu);
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

/// Debian's qemu-storage-daemon, with the same disks.
pub fn qemu(place: &Place, cpu: usize) -> Result<Daemon> {
    let memory = place.memory.path().join("ram.raw");
    File::create(&memory)?.set_len(SIZE)?;
    let mut command = pinned(Path::new("qemu-storage-daemon"), cpu);
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
