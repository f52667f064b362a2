//! Creates the guest's files in a user's folder. Debian's cloud kernel and a static busybox are downloaded and unpacked, not installed;
//! the agent is part of Lunette.

use crate::build::{GuestProgram, guest_program};
use crate::initramfs::{self, Equipment};
use crate::interrupt::interrupted;
use crate::places::{guest_directory, is_installed, kernel, tool};
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";
const BUSYBOX_PACKAGE: &str = "busybox-static";
/// Prefix of incomplete folders.
const PARTIAL_PREFIX: &str = "part-";
/// Folder of programs for guests, relative to the program's folder (`make install`).
const PROGRAM_FOLDER: &str = "../libexec/lunette";

/// Files that a guest boots.
#[derive(Clone, Debug)]
pub struct UserSystem {
    /// Kernel.
    pub kernel: PathBuf,
    /// Initramfs.
    pub initramfs: PathBuf,
}

/// Returns the small system of users' guests; the initramfs is created if it is outdated.
pub fn user_system() -> Result<UserSystem> {
    let kernel = kernel()?;
    let initramfs = initramfs::archive(&kernel, Equipment::User)?;
    Ok(UserSystem {
        kernel: kernel.image,
        initramfs,
    })
}

/// Finds a statically linked program for guests: next to this program, in `../libexec/lunette`, or in a source tree. There it is the one of
/// `make build` for a program of `make build`; otherwise cargo builds it.
pub fn program_for_guests(program: GuestProgram) -> Result<PathBuf> {
    if !is_installed() {
        let this_program = std::env::current_exe().context("cannot find this program")?;
        let built = built_beside(&this_program, program);
        return built.map_or_else(|| guest_program(program), Ok);
    }
    let this_program = std::env::current_exe().context("cannot find this program")?;
    let folder = this_program.parent().unwrap_or(Path::new("/"));
    let name = program.name();
    let candidates = [folder.join(name), folder.join(PROGRAM_FOLDER).join(name)];
    let found = candidates.iter().find(|path| is_static(path));
    found.cloned().with_context(|| {
        format!(
            "no statically linked {name} at {} or {}; hint: install it with `make install`",
            candidates[0].display(),
            candidates[1].display()
        )
    })
}

/// Returns the program for guests that `make build` put beside a release build: `guest-agent` in the target folder.
fn built_beside(this_program: &Path, program: GuestProgram) -> Option<PathBuf> {
    let folder = this_program.parent()?;
    let built = folder
        .parent()?
        .join("guest-agent/x86_64-unknown-linux-gnu/release")
        .join(program.name());
    (folder.ends_with("release") && is_static(&built)).then_some(built)
}

/// Returns the host's busybox if it is static, otherwise the one from [`Setup::run`].
pub fn busybox() -> Result<PathBuf> {
    let unpacked = ["busybox/usr/bin/busybox", "busybox/bin/busybox"];
    let unpacked = unpacked.map(|path| guest_directory().join(path));
    let host = tool("busybox");
    let candidates = host.as_ref().ok().into_iter().chain(&unpacked);
    match candidates.into_iter().find(|path| is_static(path)) {
        Some(path) => Ok(path.clone()),
        None => bail!(
            "no statically linked busybox; hint: lunette vm setup, or apt-get install --no-install-recommends {BUSYBOX_PACKAGE}"
        ),
    }
}

/// Returns true if the program needs no loader: it has no PT_INTERP segment (ELF-64, chapter "Program Loading").
fn is_static(path: &Path) -> bool {
    const INTERPRETER: u32 = 3;
    let mut bytes = Vec::new();
    // The program headers follow the ELF header.
    let read = File::open(path).and_then(|file| file.take(4096).read_to_end(&mut bytes));
    let word = |at: usize, length: usize| -> Option<u64> {
        let mut value = [0; 8];
        value[..length].copy_from_slice(bytes.get(at..at + length)?);
        Some(u64::from_le_bytes(value))
    };
    let has_interpreter = || -> Option<bool> {
        let (start, size, count) = (word(32, 8)?, word(54, 2)?, word(56, 2)?);
        let mut kinds = (0..count).map(|index| word((start + index * size) as usize, 4));
        Some(kinds.any(|kind| kind == Some(u64::from(INTERPRETER))))
    };
    read.is_ok() && bytes.starts_with(b"\x7fELF\x02\x01") && has_interpreter() == Some(false)
}

/// Creates missing files.
pub struct Setup<'a> {
    /// Callback that announces each step.
    pub report: &'a mut dyn FnMut(&str),
    /// Replace existing files too.
    pub again: bool,
}

impl Setup<'_> {
    /// Runs the setup. Returns the files that guests boot.
    pub fn run(&mut self) -> Result<UserSystem> {
        let folder = guest_directory();
        std::fs::create_dir_all(&folder).with_context(|| {
            format!(
                "cannot create {}; hint: set LUNETTE_GUEST_DIR to a writable folder",
                folder.display()
            )
        })?;
        let lock = File::create(folder.join("setup.lock"))?;
        ensure!(
            flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok(),
            "another setup runs in {}; hint: wait until it has ended",
            folder.display()
        );
        remove_parts(&folder)?;
        if self.again || kernel().is_err() {
            self.install_kernel(&folder)?;
        }
        if busybox().is_err() {
            let unpacked = self.download(&folder, BUSYBOX_PACKAGE)?;
            install(&unpacked, &folder.join("busybox"))?;
        }
        user_system()
    }

    fn install_kernel(&mut self, folder: &Path) -> Result<()> {
        let depmod = tool("depmod")?;
        let package = self.kernel_package()?;
        let unpacked = self.download(folder, &package)?;
        let modules = unpacked.join("lib/modules");
        if !modules.is_dir() {
            std::fs::create_dir_all(unpacked.join("lib"))?;
            symlink("../usr/lib/modules", &modules)?;
        }
        decompress(&modules)?;
        let mut versions = std::fs::read_dir(&modules)?.flatten();
        let version = versions
            .next()
            .with_context(|| format!("{package} has no modules"))?;
        run(Command::new(depmod)
            .arg("-b")
            .arg(&unpacked)
            .arg(version.file_name()))?;
        install(&unpacked, &folder.join("kernel"))?;
        let link = folder.join("vmlinuz");
        if link.is_symlink() {
            std::fs::remove_file(&link)?;
        }
        let image = kernel()?.image;
        symlink(image.strip_prefix(folder).unwrap_or(&image), &link)?;
        Ok(())
    }

    /// Returns the package on which Debian's cloud kernel metapackage currently depends.
    fn kernel_package(&mut self) -> Result<String> {
        for is_last in [false, true] {
            let listing = output(Command::new(apt("apt-cache")?).args(["depends", KERNEL_PACKAGE]));
            let listing = listing.unwrap_or_default();
            let mut words = listing.split_whitespace();
            if let Some(name) =
                words.find(|word| word.starts_with("linux-image-") && *word != KERNEL_PACKAGE)
            {
                return Ok(name.to_owned());
            }
            if is_last || !rustix::process::getuid().is_root() {
                break;
            }
            (self.report)("will refresh apt's package lists, which lack Debian's cloud kernel");
            run(Command::new(apt("apt-get")?).args(["update", "-qq"]))?;
        }
        bail!(
            "apt has no package {KERNEL_PACKAGE}; hint: as root, apt-get update, with Debian's main archive in /etc/apt/sources.list"
        )
    }

    /// Downloads a package with apt, which verifies its signature, and unpacks it into a separate folder.
    fn download(&mut self, folder: &Path, package: &str) -> Result<PathBuf> {
        let apt_get = apt("apt-get")?;
        let dpkg = tool("dpkg-deb")?;
        let shown =
            output(Command::new(apt("apt-cache")?).args(["show", "--no-all-versions", package]))?;
        let size = shown
            .lines()
            .find_map(|line| line.strip_prefix("Size: ")?.parse::<u64>().ok());
        let size = size.map_or(String::new(), |bytes| {
            format!(" ({:.1} MB)", bytes as f64 / 1e6)
        });
        (self.report)(&format!(
            "will download Debian's package {package}{size} and unpack it below {}; it is not installed",
            folder.display()
        ));
        let part = tempfile::Builder::new()
            .prefix(PARTIAL_PREFIX)
            .tempdir_in(folder)?;
        let mut download = Command::new(apt_get);
        if rustix::process::getuid().is_root() {
            // apt's own user may not have write permission here.
            download.args(["-o", "APT::Sandbox::User=root"]);
        }
        run(download
            .args(["download", "-qq", package])
            .current_dir(part.path()))
        .context("hint: run apt-get update, and check that Debian's mirror can be reached")?;
        let mut files = std::fs::read_dir(part.path())?.flatten();
        let file = files
            .next()
            .context("apt-get downloaded no package")?
            .path();
        let unpacked = part.path().join("root");
        run(Command::new(dpkg).arg("-x").arg(&file).arg(&unpacked)).with_context(|| {
            format!("hint: check with df that {} is not full", folder.display())
        })?;
        ensure!(!interrupted(), "interrupted");
        let target = tempfile::Builder::new()
            .prefix(PARTIAL_PREFIX)
            .tempdir_in(folder)?
            .keep();
        std::fs::rename(&unpacked, &target)?;
        Ok(target)
    }
}

/// Removes the incomplete folders of a killed setup.
fn remove_parts(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)?.flatten() {
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with(PARTIAL_PREFIX)
        {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Moves a finished folder to its final path and replaces an old one.
fn install(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        std::fs::remove_dir_all(to)?;
    }
    std::fs::rename(from, to).with_context(|| format!("cannot create {}", to.display()))
}

fn apt(name: &str) -> Result<PathBuf> {
    tool(name).map_err(|_| {
        anyhow::anyhow!(
            "cannot download Debian's cloud kernel without {name}; hint: create {} with `lunette vm setup` on a Debian system and copy it to this machine, or start `lunette vm run` with --kernel and --initrd, or with --system",
            guest_directory().display()
        )
    })
}

/// Decompresses the modules of newer kernels, because busybox's insmod needs uncompressed ones.
fn decompress(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)?.flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            decompress(&path)?;
        } else if path.extension().is_some_and(|extension| extension == "xz") {
            run(Command::new(tool("xz")?).arg("-d").arg(&path))?;
        }
    }
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    ensure!(
        output.status.success(),
        "{} failed, {}: {}",
        command.get_program().display(),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_with_a_loader_and_other_files_are_not_static() {
        // This test is linked dynamically.
        assert!(!is_static(&std::env::current_exe().unwrap()));
        assert!(!is_static(Path::new("/etc/passwd")));
        assert!(!is_static(Path::new("/nowhere")));
    }

    #[test]
    fn a_release_build_uses_the_guest_programs_of_make_build() {
        let folder = tempfile::tempdir().unwrap();
        let [release, debug] =
            ["release", "debug"].map(|name| folder.path().join(name).join("lunette-lab"));
        let beside = |program: &Path| built_beside(program, GuestProgram::Bench);
        assert_eq!(beside(&release), None);
        let programs = folder
            .path()
            .join("guest-agent/x86_64-unknown-linux-gnu/release");
        std::fs::create_dir_all(&programs).unwrap();
        // An ELF file without program headers has no interpreter.
        let mut bytes = vec![0; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let built = programs.join("guest-bench");
        std::fs::write(&built, bytes).unwrap();
        assert_eq!(beside(&release), Some(built));
        assert_eq!(beside(&debug), None);
    }

    #[test]
    fn unfinished_folders_go_and_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["part-x", "kernel"] {
            std::fs::create_dir_all(folder.path().join(name).join("deep")).unwrap();
        }
        remove_parts(folder.path()).unwrap();
        assert!(!folder.path().join("part-x").exists() && folder.path().join("kernel").exists());
    }

    #[test]
    fn a_header_without_an_interpreter_is_static() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut bytes = vec![0; 64 + 2 * 56];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (bytes[32], bytes[54], bytes[56]) = (64, 56, 2);
        bytes[64] = 1;
        std::fs::write(file.path(), &bytes).unwrap();
        assert!(is_static(file.path()));
        bytes[64 + 56] = 3;
        std::fs::write(file.path(), &bytes).unwrap();
        assert!(!is_static(file.path()));
    }
}
