//! Locations of the workspace, the guest's kernel and the host's tools. Errors for missing ones contain a hint.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Returns the root of the source tree that contains `path`.
fn source_tree(path: &Path) -> Option<&Path> {
    let mut folders = path.ancestors();
    folders.find(|folder| folder.join("crates/vm/Cargo.toml").is_file())
}

/// Returns the root of the source tree: that of this program, otherwise that of the current folder (the target folder may be elsewhere).
/// It is not a constant of the build, so that a release built in another folder has the same bytes.
pub fn workspace() -> PathBuf {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOUND.get_or_init(|| {
        let program = std::env::current_exe().unwrap_or_default();
        let current = std::env::current_dir().unwrap_or_default();
        let found = source_tree(&program).or_else(|| source_tree(&current));
        found.map_or(current.clone(), Path::to_path_buf)
    });
    folder.clone()
}

static DATA_FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Returns the folder of the guest's kernel, initramfs and programs: `$LUNETTE_GUEST_DIR`, otherwise `build/guest`, or the user's folder
/// after [`use_data_folder`].
pub fn guest_directory() -> PathBuf {
    match std::env::var_os("LUNETTE_GUEST_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => match DATA_FOLDER.get() {
            Some(folder) => folder.clone(),
            None => workspace().join("build/guest"),
        },
    }
}

/// Selects `$XDG_DATA_HOME/lunette/guest` (default `~/.local/share/lunette/guest`) for an installed program. A program in its source tree
/// keeps using `build/guest`.
pub fn use_data_folder() -> Result<()> {
    if is_in_source_tree() {
        return Ok(());
    }
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let data = match (variable("XDG_DATA_HOME"), variable("HOME")) {
        (Some(data), _) => PathBuf::from(data),
        (None, Some(home)) => PathBuf::from(home).join(".local/share"),
        (None, None) => variable("LUNETTE_GUEST_DIR").map(PathBuf::from).context(
            "neither HOME nor XDG_DATA_HOME is set; hint: set LUNETTE_GUEST_DIR to the folder of guests' files",
        )?,
    };
    DATA_FOLDER.get_or_init(|| data.join("lunette/guest"));
    Ok(())
}

/// Returns true if this program is in a source tree, where cargo has built it.
fn is_in_source_tree() -> bool {
    std::env::current_exe().is_ok_and(|program| source_tree(&program).is_some())
}

/// Returns true for an installed program, after [`use_data_folder`].
pub fn is_installed() -> bool {
    DATA_FOLDER.get().is_some()
}

/// Returns the command that creates the guest's files.
fn setup_hint() -> &'static str {
    match DATA_FOLDER.get() {
        Some(_) => "lunette vm setup",
        None => "scripts/setup test",
    }
}

/// An unpacked kernel package.
pub struct Kernel {
    /// Bootable image.
    pub image: PathBuf,
    /// Directory with `modules.dep` and `kernel/`.
    pub modules: PathBuf,
}

impl Kernel {
    /// Returns true if the kernel has this module as a file.
    pub fn has_module(&self, name: &str) -> bool {
        let list = std::fs::read_to_string(self.modules.join("modules.dep"));
        let file = format!("/{name}.ko:");
        list.is_ok_and(|list| list.contains(&file))
    }
}

/// Finds the guest's kernel, unpacked by `scripts/setup`.
pub fn kernel() -> Result<Kernel> {
    let root = guest_directory().join("kernel");
    let find = || -> Option<Kernel> {
        let image = std::fs::read_dir(root.join("boot"))
            .ok()?
            .flatten()
            .find(|entry| entry.file_name().to_string_lossy().starts_with("vmlinuz-"))?
            .path();
        let modules = std::fs::read_dir(root.join("lib/modules"))
            .ok()?
            .flatten()
            .next()?
            .path();
        modules
            .join("modules.dep")
            .exists()
            .then_some(Kernel { image, modules })
    };
    find().with_context(|| {
        format!(
            "no guest kernel in {}\nhint: {}",
            root.display(),
            setup_hint()
        )
    })
}

/// Finds a program of open-iscsi, unpacked by `scripts/setup`.
pub fn initiator_tool(name: &str) -> Result<PathBuf> {
    unpacked("initiator", name)
}

/// Finds a file of multipath-tools or of its libraries, unpacked by `scripts/setup`.
pub fn multipath_file(name: &str) -> Result<PathBuf> {
    unpacked("multipath", name)
}

/// Finds a program of nbd-client, unpacked by `scripts/setup`.
pub fn nbd_tool(name: &str) -> Result<PathBuf> {
    unpacked("nbd", name)
}

fn unpacked(folder: &str, name: &str) -> Result<PathBuf> {
    let root = guest_directory().join(folder);
    let found = ["usr/sbin", "sbin", "usr/lib/multipath", "lib/multipath"]
        .map(|place| root.join(place).join(name))
        .into_iter()
        .find(|path| path.is_file());
    found.with_context(|| format!("no {name} in {}\nhint: scripts/setup test", root.display()))
}

/// Returns the library search path for unpacked programs.
pub fn unpacked_libraries() -> String {
    let places = [
        "initiator/usr/lib/x86_64-linux-gnu",
        "multipath/usr/lib/x86_64-linux-gnu",
        "multipath/lib/x86_64-linux-gnu",
        "multipath/usr/lib",
        "multipath/lib",
        "nbd/usr/lib/x86_64-linux-gnu",
        "nbd/lib/x86_64-linux-gnu",
    ];
    let places = places.map(|place| guest_directory().join(place).display().to_string());
    places.join(":")
}

/// Finds the UEFI firmware for guests.
pub fn uefi() -> Result<&'static Path> {
    let path = Path::new("/usr/share/ovmf/OVMF.fd");
    let found = path.is_file().then_some(path);
    found.with_context(|| {
        let path = path.display();
        format!("no {path}\nhint: scripts/setup test\n  or: apt-get install --no-install-recommends ovmf")
    })
}

/// Debian packages of the required tools.
const PACKAGES: [(&str, &str); 26] = [
    ("xmllint", "libxml2-utils"),
    ("depmod", "kmod"),
    ("dpkg-deb", "dpkg"),
    ("xz", "xz-utils"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("mke2fs", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("sg_raw", "sg3-utils"),
    ("sg_inq", "sg3-utils"),
    ("sg_luns", "sg3-utils"),
    ("mformat", "mtools"),
    ("mcopy", "mtools"),
    ("mmd", "mtools"),
    ("syslinux", "syslinux"),
    ("blkdiscard", "util-linux"),
    ("setpriv", "util-linux"),
    ("unshare", "util-linux"),
    ("ceph", "ceph-common"),
    ("rbd", "ceph-common"),
    ("ceph-authtool", "ceph-common"),
    ("ceph-mon", "ceph-mon"),
    ("monmaptool", "ceph-base"),
    ("ceph-osd", "ceph-osd"),
    ("tgtd", "tgt"),
    ("tgtadm", "tgt"),
];

/// Finds a program in the PATH. The error names the package to install.
pub fn tool(name: &str) -> Result<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let found = path
        .split(':')
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"])
        .map(|directory| Path::new(directory).join(name))
        .find(|candidate| candidate.is_file());
    match found {
        Some(path) => Ok(path),
        None => {
            let package = PACKAGES
                .iter()
                .find(|(tool, _)| *tool == name)
                .map_or(name, |(_, package)| package);
            let install = format!("apt-get install --no-install-recommends {package}");
            match DATA_FOLDER.get() {
                Some(_) => bail!("{name} is missing; hint: {install}"),
                None => bail!("{name} is missing\nhint: scripts/setup test\n  or: {install}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_tree_is_found_from_any_path_in_it() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = root.canonicalize().unwrap();
        assert_eq!(workspace(), root);
        assert_eq!(source_tree(&root.join("target/a")), Some(&*root));
        assert_eq!(source_tree(Path::new("/usr/bin/lunette")), None);
    }
}
