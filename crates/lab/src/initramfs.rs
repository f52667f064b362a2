//! The guest's whole user space: busybox, `guest-io`, a few tools with the libraries they need, the virtio modules.
//!
//! Built once and kept beside the kernel under a name made from its ingredients' sizes and times.

use crate::build::guest_program;
use crate::cpio::Archive;
use crate::places::{Kernel, guest_directory, tool};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Loaded in the order in which `modules.dep` wants them.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_blk", "sd_mod", "virtio_scsi", "sg"];

/// Taken from the host, with their libraries. Scripts call them by their path, `/tools/NAME`: busybox prefers its own
/// programs to others of the same name, whatever the PATH says.
const TOOLS: [&str; 9] = [
    "mke2fs",
    "e2fsck",
    "blkdiscard",
    "sg_raw",
    "sg_inq",
    "sg_vpd",
    "sg_luns",
    "sg_readcap",
    "sg_modes",
];

/// The agent is process 1: when it ends, the kernel panics, which the host sees. Without [`AGENT`] on the kernel's
/// command line there is a shell on the console instead, for people.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/tools:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
while read -r module; do insmod /modules/$module || echo \"init: insmod $module failed\"; done < /modules/order
if grep -q lunette.agent /proc/cmdline; then exec /bin/guest-io agent --file /dev/ttyS1; fi
echo; echo 'A shell in the guest. Its tools are busybox, guest-io and what is in /tools; \"poweroff -f\" ends it.'
setsid cttyhack sh
poweroff -f
";

/// The word on the kernel's command line that starts the agent.
pub const AGENT: &str = "lunette.agent";

/// The path of the archive to boot from, made when there is none that is up to date.
pub fn archive(kernel: &Kernel) -> Result<PathBuf> {
    let files = ingredients(kernel)?;
    let mut hasher = DefaultHasher::new();
    INIT.hash(&mut hasher);
    for (inside, outside) in &files {
        let metadata = std::fs::metadata(outside)
            .with_context(|| format!("cannot look at {}", outside.display()))?;
        (
            inside,
            metadata.len(),
            metadata.mtime(),
            metadata.mtime_nsec(),
        )
            .hash(&mut hasher);
    }
    let directory = guest_directory();
    let path = directory.join(format!("initramfs-{:016x}.cpio", hasher.finish()));
    if path.exists() {
        return Ok(path);
    }
    let bytes = pack(&files)?;
    for stale in std::fs::read_dir(&directory)?.flatten() {
        if stale
            .file_name()
            .to_string_lossy()
            .starts_with("initramfs-")
        {
            std::fs::remove_file(stale.path()).or_else(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
        }
    }
    let mut part = tempfile::NamedTempFile::new_in(&directory)?;
    std::io::Write::write_all(&mut part, &bytes)?;
    part.persist(&path).context("cannot keep the initramfs")?;
    // A name that does not change, for people who start QEMU themselves.
    let link = directory.join("initramfs.cpio");
    if link.is_symlink() {
        std::fs::remove_file(&link)?;
    }
    std::os::unix::fs::symlink(path.file_name().unwrap_or_default(), &link)?;
    Ok(path)
}

/// Path in the guest, path on the host; modules first, in load order.
fn ingredients(kernel: &Kernel) -> Result<Vec<(String, PathBuf)>> {
    let mut files: Vec<_> = module_order(kernel)?
        .into_iter()
        .map(|module| (format!("modules/{}", base_name(&module)), module))
        .collect();
    files.push(("bin/busybox".into(), tool("busybox")?));
    files.push(("bin/guest-io".into(), guest_program()?));
    let mut libraries = BTreeSet::new();
    for name in TOOLS {
        let path = tool(name)?;
        libraries.extend(needed_libraries(&path)?);
        files.push((format!("tools/{name}"), path));
    }
    for library in libraries {
        // The loader keeps its fixed place; the others go where it looks first.
        let inside = if base_name(&library).starts_with("ld-linux") {
            "lib64"
        } else {
            "lib"
        };
        files.push((format!("{inside}/{}", base_name(&library)), library));
    }
    Ok(files)
}

fn pack(files: &[(String, PathBuf)]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in [
        "bin", "tools", "lib", "lib64", "modules", "proc", "sys", "dev", "tmp", "mnt", "run", "etc",
    ] {
        archive.directory(directory);
    }
    let mut order = String::new();
    for (inside, outside) in files {
        archive.file(
            inside,
            &std::fs::read(outside)
                .with_context(|| format!("cannot read {}", outside.display()))?,
        );
        if let Some(module) = inside.strip_prefix("modules/") {
            order.push_str(module);
            order.push('\n');
        }
    }
    archive.file("modules/order", order.as_bytes());
    // mke2fs warns without it; e2fsck looks for mounts there.
    archive.symlink("etc/mtab", "/proc/mounts");
    archive.file("init", INIT.as_bytes());
    Ok(archive.finish())
}

/// The modules and all that they depend on, dependencies first.
fn module_order(kernel: &Kernel) -> Result<Vec<PathBuf>> {
    let listing = kernel.modules.join("modules.dep");
    let text = std::fs::read_to_string(&listing)
        .with_context(|| format!("cannot read {}", listing.display()))?;
    let mut order: Vec<PathBuf> = Vec::new();
    for module in MODULES {
        let suffix = format!("/{module}.ko");
        let Some((own, needs)) = text
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(own, _)| own.ends_with(&suffix))
        else {
            bail!("{} has no module {module}", listing.display());
        };
        // modules.dep lists what is needed last first.
        for path in needs.split_whitespace().rev().chain([own]) {
            let path = kernel.modules.join(path);
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    Ok(order)
}

/// The shared libraries of a program and its loader, as `ldd` finds them.
fn needed_libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .output()
        .context("cannot run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .filter(|path| path.is_file())
        .collect())
}

fn base_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}
