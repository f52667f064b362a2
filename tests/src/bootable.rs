//! Bootable disk image for a PC: an MBR, a FAT partition with SYSLINUX, kernel and initramfs, and a root partition with an agent. Created
//! without privileges.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use vm::initramfs::{self, Equipment};
use vm::{kernel, tool};

use crate::{Context, Result, ensure};

const MIB: u64 = 1 << 20;
/// Offsets of the partitions. The first one has room for kernel and initramfs.
const BOOT_AT: u64 = MIB;
const ROOT_AT: u64 = 96 * MIB;
/// Name of the root partition in the guest; the image is its first virtio-blk disk.
const ROOT: &str = "/dev/vda2";
/// Code of the MBR, which starts the active partition. The partition table follows it.
const BOOT_CODE: &str = "/usr/lib/syslinux/mbr/mbr.bin";
const TABLE_AT: u64 = 446;

/// System in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootableSystem {
    /// The agent of the tests' guests, on the second serial port.
    Agent,
    /// The system of `lunette vm run`: a shell on the console, and an agent for `lunette vm exec`.
    User,
}

impl BootableSystem {
    fn equipment(self) -> Equipment {
        match self {
            BootableSystem::Agent => Equipment::Usual,
            BootableSystem::User => Equipment::User,
        }
    }

    fn command_line(self) -> String {
        match self {
            BootableSystem::Agent => initramfs::command_line(),
            BootableSystem::User => initramfs::user_command_line("booted"),
        }
    }
}

/// Creates an image of `mib` MiB at `path`.
pub fn bootable_image(path: &Path, mib: u64, system: BootableSystem) -> Result<()> {
    let size = mib * MIB;
    let file = File::create(path)?;
    file.set_len(size)?;
    let code = std::fs::read(BOOT_CODE).with_context(|| {
        format!(
            "cannot read {BOOT_CODE}\nhint: apt-get install --no-install-recommends syslinux-common"
        )
    })?;
    ensure!(code.len() as u64 <= TABLE_AT, "{BOOT_CODE} is too long");
    file.write_all_at(&code, 0)?;
    // active, FAT32 with LBA; Linux
    let entries = [
        entry(0x80, 0x0c, BOOT_AT, ROOT_AT - BOOT_AT),
        entry(0, 0x83, ROOT_AT, size - ROOT_AT),
    ];
    file.write_all_at(&entries.concat(), TABLE_AT)?;
    file.write_all_at(&[0x55, 0xaa], 510)?;
    boot_partition(path, system)?;
    root_partition(path, size - ROOT_AT, system)
}

/// Builds a partition table entry by block address; the cylinder fields have their out-of-range value.
fn entry(status: u8, kind: u8, start: u64, length: u64) -> [u8; 16] {
    let mut bytes = [0xff; 16];
    bytes[0] = status;
    bytes[4] = kind;
    bytes[8..12].copy_from_slice(&((start / 512) as u32).to_le_bytes());
    bytes[12..].copy_from_slice(&((length / 512) as u32).to_le_bytes());
    bytes
}

fn boot_partition(image: &Path, system: BootableSystem) -> Result<()> {
    let at = format!("{}@@{BOOT_AT}", image.display());
    let sectors = ((ROOT_AT - BOOT_AT) / 512).to_string();
    let hidden = (BOOT_AT / 512).to_string();
    run(Command::new(tool("mformat")?)
        .args(["-i", &at, "-F", "-h", "255", "-s", "63"])
        .args(["-T", &sectors, "-H", &hidden, "::"]))?;
    let kernel = kernel()?;
    let initramfs = initramfs::archive(&kernel, system.equipment())?;
    let mut configuration = tempfile::NamedTempFile::new()?;
    write!(
        configuration,
        "DEFAULT linux\nLABEL linux\nLINUX /vmlinuz\nINITRD /initrd\nAPPEND {} {}={ROOT}\n",
        system.command_line(),
        initramfs::ROOT
    )?;
    for (from, to) in [
        (kernel.image.as_path(), "::/vmlinuz"),
        (&initramfs, "::/initrd"),
        (configuration.path(), "::/syslinux.cfg"),
    ] {
        run(Command::new(tool("mcopy")?)
            .args(["-i", &at])
            .arg(from)
            .arg(to))?;
    }
    run(Command::new(tool("syslinux")?)
        .args(["--install", "--offset", &BOOT_AT.to_string()])
        .arg(image))
}

/// Creates the root partition with the files of the initramfs, except modules, which are already loaded.
fn root_partition(image: &Path, size: u64, system: BootableSystem) -> Result<()> {
    let tree = tempfile::tempdir()?;
    let initramfs = initramfs::archive(&kernel()?, system.equipment())?;
    run(Command::new(tool("busybox")?)
        .args(["cpio", "-i", "-d"])
        .current_dir(tree.path())
        .stdin(File::open(initramfs)?))?;
    std::fs::remove_dir_all(tree.path().join("modules"))?;
    std::fs::create_dir(tree.path().join("modules"))?;
    File::create(tree.path().join("modules/order"))?;
    run(Command::new(tool("mke2fs")?)
        .args(["-q", "-F", "-t", "ext4", "-d"])
        .arg(tree.path())
        .args(["-E", &format!("offset={ROOT_AT}")])
        .arg(image)
        .arg(format!("{}k", size / 1024)))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
