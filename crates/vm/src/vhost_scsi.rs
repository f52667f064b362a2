//! Targets in this host's kernel for `via=vhost-scsi`: checks of a plan, because QEMU reports only that it cannot start, and targets of a study.

use crate::topology::{PORTAL_GROUP, Plan};
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Access, access};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Device of the kernel's module.
const DEVICE: &str = "/dev/vhost-scsi";
/// Folder of the kernel's targets in configfs.
const CONFIGFS: &str = "/sys/kernel/config/target";
/// Targets of vhost-scsi in configfs.
const TARGETS: &str = "/sys/kernel/config/target/vhost";
/// Size of the kernel's buffer for the path of a file.
const PATH_SIZE: usize = 256;
/// Number of attempts to remove a folder that QEMU still uses, and the time between them.
const ATTEMPTS: (u32, Duration) = (50, Duration::from_millis(100));

/// Storage of a logical unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Size in bytes.
        size: u64,
        /// Bypass the page cache. The file system must support direct I/O.
        is_direct: bool,
    },
    /// A block device.
    Block(PathBuf),
}

/// Entry of configfs that a target needs.
#[derive(Debug, PartialEq, Eq)]
enum Entry {
    Folder(PathBuf),
    Attribute(PathBuf, String),
    Link { from: PathBuf, to: PathBuf },
}

impl Entry {
    fn create(&self) -> Result<()> {
        let (path, made) = match self {
            Entry::Folder(path) => (path, fs::create_dir_all(path)),
            Entry::Attribute(path, text) => (path, fs::write(path, text)),
            Entry::Link { from, to } => (from, symlink(to, from)),
        };
        made.with_context(|| format!("cannot write {}; hint: dmesg", path.display()))
    }

    fn remove(&self) -> io::Result<()> {
        match self {
            Entry::Folder(path) => fs::remove_dir(path),
            // The kernel removes attributes with their folder.
            Entry::Attribute(..) => Ok(()),
            Entry::Link { from, .. } => fs::remove_file(from),
        }
    }
}

/// A target with one portal group in this host's kernel. It is removed on drop.
#[derive(Debug)]
pub struct Target {
    entries: Vec<Entry>,
}

impl Target {
    /// Creates a target with the storages as its LUNs, from LUN 0 on. Replaces an unused target of the same name.
    ///
    /// # Errors
    /// The kernel refuses an entry, or a path is too long for it.
    pub fn create(wwpn: &str, storages: &[Storage]) -> Result<Target> {
        let entries = entries(Path::new(CONFIGFS), wwpn, storages)?;
        // A killed process leaves its target.
        for entry in entries.iter().rev() {
            entry.remove().ok();
        }
        let target = Target { entries };
        target.entries.iter().try_for_each(Entry::create)?;
        Ok(target)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let (mut attempts, pause) = ATTEMPTS;
        for entry in self.entries.iter().rev() {
            let is_busy = |error: io::Error| error.kind() == ErrorKind::ResourceBusy;
            // QEMU uses the portal group until its process has ended.
            while attempts > 0 && entry.remove().is_err_and(is_busy) {
                attempts -= 1;
                std::thread::sleep(pause);
            }
        }
    }
}

/// Returns the WWPN of a target, always the same for a name.
pub fn wwpn(name: &str) -> String {
    let digest = Sha256::digest(name);
    let digits: String = digest[..5]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    // NAA 5 with the company ID of LIO.
    format!("naa.5001405{}", &digits[..9])
}

/// Returns the entries of a target, in the order of their creation.
fn entries(root: &Path, wwpn: &str, storages: &[Storage]) -> Result<Vec<Entry>> {
    let digest = Sha256::digest(wwpn);
    let number = u32::from_be_bytes([digest[0] >> 1, digest[1], digest[2], digest[3]]);
    let group = root.join(format!("vhost/{wwpn}/tpgt_{PORTAL_GROUP}"));
    let mut entries = Vec::new();
    let mut units = Vec::new();
    for (lun, storage) in storages.iter().enumerate() {
        let (kind, path) = match storage {
            Storage::File { path, .. } => ("fileio", path),
            Storage::Block(path) => ("iblock", path),
        };
        let shown = path.display();
        let text = path
            .to_str()
            .filter(|text| text.len() < PATH_SIZE && !text.contains([',', '\n']));
        let text = text.with_context(|| {
            format!("{shown}: a target of the kernel needs a path of less than {PATH_SIZE} bytes without commas")
        })?;
        let control = match storage {
            // Without fd_buffered_io each write would be flushed, and the unit would have no write cache.
            Storage::File {
                size, is_direct, ..
            } => {
                // The kernel refuses fd_async_io=0.
                let direct = if *is_direct { ",fd_async_io=1" } else { "" };
                format!("fd_dev_name={text},fd_dev_size={size},fd_buffered_io=1{direct}")
            }
            Storage::Block(_) => format!("udev_path={text}"),
        };
        let adapter = root.join(format!("core/{kind}_{number}"));
        let store = adapter.join(format!("d{lun}"));
        if lun == 0 {
            entries.push(Entry::Folder(adapter));
        }
        entries.push(Entry::Folder(store.clone()));
        entries.push(Entry::Attribute(store.join("control"), control));
        entries.push(Entry::Attribute(store.join("enable"), "1".to_owned()));
        let unit = group.join(format!("lun/lun_{lun}"));
        units.push(Entry::Folder(unit.clone()));
        units.push(Entry::Link {
            from: unit.join(format!("d{lun}")),
            to: store,
        });
    }
    entries.push(Entry::Folder(root.join(format!("vhost/{wwpn}"))));
    entries.push(Entry::Folder(group.clone()));
    let nexus = wwpn.replace("naa.5001405", "naa.5001406");
    entries.push(Entry::Attribute(group.join("nexus"), nexus));
    entries.extend(units);
    Ok(entries)
}

/// Checks that this user may create targets of vhost-scsi in this host's kernel.
///
/// # Errors
/// The first missing module or right, with a hint.
pub fn check_host() -> Result<()> {
    check_device(Path::new(DEVICE))?;
    check_configfs(Path::new(CONFIGFS))
}

fn check_configfs(root: &Path) -> Result<()> {
    const HINT: &str = "hint: run as root, with configfs mounted at /sys/kernel/config";
    let targets = root.join("vhost");
    let made = match fs::create_dir(&targets) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made,
    };
    made.with_context(|| format!("cannot create {}; {HINT}", targets.display()))?;
    for folder in [targets, root.join("core")] {
        access(&folder, Access::WRITE_OK)
            .with_context(|| format!("cannot write {}; {HINT}", folder.display()))?;
    }
    Ok(())
}

/// Checks that this host's kernel has the targets and LUNs of a plan, and that this user may use them.
///
/// # Errors
/// The first missing object, with the command that creates it.
pub fn check(plan: &Plan) -> Result<()> {
    for (index, device) in plan.devices.iter().enumerate() {
        if let Some(wwpn) = &device.wwpn {
            let luns = plan.disks_of(index).count();
            check_device(Path::new(DEVICE))
                .and_then(|()| check_target(Path::new(TARGETS), wwpn, luns))
                .with_context(|| format!("controller {} with via=vhost-scsi", device.id))?;
        }
    }
    Ok(())
}

fn check_device(device: &Path) -> Result<()> {
    let opened = fs::File::options().read(true).write(true).open(device);
    let Err(error) = opened else {
        return Ok(());
    };
    let path = device.display();
    let hint = match error.kind() {
        ErrorKind::NotFound => "modprobe vhost_scsi, on a kernel with CONFIG_VHOST_SCSI".to_owned(),
        ErrorKind::PermissionDenied => format!("run as root, or setfacl -m u:USER:rw {path}"),
        _ => "see the kernel's log: dmesg".to_owned(),
    };
    bail!("cannot open {path}: {error}; hint: {hint}")
}

fn check_target(targets: &Path, wwpn: &str, luns: usize) -> Result<()> {
    let group = targets.join(format!("{wwpn}/tpgt_{PORTAL_GROUP}"));
    let path = group.display();
    if let Err(error) = fs::metadata(&group) {
        let entries = fs::read_dir(targets).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let others: Vec<String> = names.filter(|name| name.starts_with("naa.")).collect();
        let others = match others.as_slice() {
            [] => "no targets".to_owned(),
            others => format!("the targets {}", others.join(", ")),
        };
        bail!(
            "no portal group {PORTAL_GROUP} of target {wwpn}: {path}: {error}; {} has {others}; hint: targetcli /vhost create {wwpn}",
            targets.display()
        );
    }
    // Without a nexus the kernel ignores the portal group.
    let nexus = group.join("nexus");
    fs::read_to_string(&nexus).with_context(|| {
        let nexus = nexus.display();
        format!("portal group {PORTAL_GROUP} of target {wwpn} has no nexus: cannot read {nexus}; hint: echo naa.5001405000000001 >{nexus}")
    })?;
    for lun in 0..luns {
        let unit = group.join(format!("lun/lun_{lun}"));
        ensure!(
            unit.is_dir(),
            "target {wwpn} has no LUN {lun}, but the topology has {luns}: {} is missing; hint: targetcli /vhost/{wwpn}/tpg{PORTAL_GROUP}/luns create \
             /backstores/block/NAME",
            unit.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const WWPN: &str = "naa.5001405bf0e7a2c4";

    #[test]
    fn a_missing_module_is_named_with_its_command() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("vhost-scsi");
        let error = check_device(&device).unwrap_err().to_string();
        assert!(
            error.contains("vhost-scsi: No such file")
                && error.contains("hint: modprobe vhost_scsi"),
            "{error}"
        );
        fs::write(&device, "").unwrap();
        check_device(&device).unwrap();
    }

    #[test]
    fn each_missing_part_of_a_target_has_its_command() {
        let folder = tempfile::tempdir().unwrap();
        let targets = folder.path();
        let make = |path: &str| fs::create_dir_all(targets.join(path)).unwrap();
        let refused = |missing: &str, hint: &str| {
            let error = format!("{:#}", check_target(targets, WWPN, 2).unwrap_err());
            assert!(error.contains(missing) && error.contains(hint), "{error}");
        };
        let create = "hint: targetcli /vhost create naa.5001405bf0e7a2c4";
        refused("has no targets", create);
        make("naa.5001405aaaaaaaaa");
        refused("has the targets naa.5001405aaaaaaaaa;", create);
        make("naa.5001405bf0e7a2c4/tpgt_1/lun/lun_0");
        refused("has no nexus", "hint: echo naa.5001405000000001 >");
        let nexus = targets.join("naa.5001405bf0e7a2c4/tpgt_1/nexus");
        fs::write(nexus, "naa.5001405000000001").unwrap();
        refused(
            "has no LUN 1, but the topology has 2",
            "/tpg1/luns create /backstores/block/NAME",
        );
        make("naa.5001405bf0e7a2c4/tpgt_1/lun/lun_1");
        check_target(targets, WWPN, 2).unwrap();
    }

    /// The order matters: the kernel links only enabled storages, and accepts LUNs only in a portal group.
    #[test]
    fn a_target_of_a_study_has_its_storages_as_luns() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        check_configfs(root).unwrap_err();
        fs::create_dir(root.join("core")).unwrap();
        check_configfs(root).unwrap();
        let storages = [false, true].map(|is_direct| Storage::File {
            path: format!("/srv/{is_direct}.raw").into(),
            size: 4096,
            is_direct,
        });
        for entry in entries(root, WWPN, &storages).unwrap() {
            entry.create().unwrap();
        }
        check_target(&root.join("vhost"), WWPN, 2).unwrap();
        for (lun, control) in [
            "fd_dev_name=/srv/false.raw,fd_dev_size=4096,fd_buffered_io=1",
            "fd_dev_name=/srv/true.raw,fd_dev_size=4096,fd_buffered_io=1,fd_async_io=1",
        ]
        .into_iter()
        .enumerate()
        {
            let link = format!("vhost/{WWPN}/tpgt_1/lun/lun_{lun}/d{lun}");
            let store = root.join(link);
            let attribute = |name: &str| fs::read_to_string(store.join(name)).unwrap();
            assert_eq!(attribute("control"), control);
            assert_eq!(attribute("enable"), "1");
        }
        let device = |path: &str| entries(root, WWPN, &[Storage::Block(path.into())]);
        let found = format!("{:?}", device("/dev/vg0/d0").unwrap());
        assert!(found.contains("udev_path=/dev/vg0/d0") && found.contains("core/iblock_"));
        device("/dev/a,b").unwrap_err();
    }

    #[test]
    fn the_wwpn_of_a_name_is_stable_and_valid() {
        let name = wwpn("/srv/matrix");
        assert_eq!(name, wwpn("/srv/matrix"));
        assert_ne!(name, wwpn("/srv/compare"));
        let word = format!("scsi:1x1,via=vhost-scsi,wwpn={name}");
        crate::topology::Topology::parse(&[word]).unwrap();
    }
}
