//! A file or block device as the medium of a disk's identity. Tests: the identities of the daemon.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use iscsi_initiator::KnownUnits;
use rustix::fs::{AtFlags, CWD, OFlags, StatxFlags, XattrFlags, statx};
use rustix::io::Errno;

use super::SharedFile;
use crate::medium::{IdentityRecord, Medium, Stamp, path_of};

/// Attribute in the user namespace, which tools copy on request.
const ATTRIBUTE: &str = "user.lunette.identity";
/// Size of the read buffer in bytes, above any record.
const ATTRIBUTE_BYTES_MAX: usize = 8192;
/// Time limit for examining another file, on a dead network file system for example. After it the file counts as absent.
const LOOK_PATIENCE: Duration = Duration::from_secs(2);

impl Medium for SharedFile {
    fn key(&self) -> String {
        if !self.block_device {
            return format!("file {}", self.place().display());
        }
        let device = self.device_number().and_then(|(major, minor)| {
            device_key(&PathBuf::from(format!("/sys/dev/block/{major}:{minor}")))
        });
        // The configured path: its target may change with every boot.
        let path = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        let path = path.display();
        match device {
            Some(device) if is_local(&device) => format!("{device} at path {path}"),
            Some(device) => device,
            None => format!("path {path}"),
        }
    }

    fn device_number(&self) -> Option<(u32, u32)> {
        if !self.block_device {
            return None;
        }
        let known = super::properties::known(&self.control).ok()?;
        Some((known.stx_rdev_major, known.stx_rdev_minor))
    }

    fn known_units(&self) -> Option<&KnownUnits> {
        self.known.as_ref()
    }

    fn stamp(&self) -> Option<Stamp> {
        if self.block_device {
            return None;
        }
        let (stamp, _) = stamp_at(&self.control, Path::new(""), AtFlags::EMPTY_PATH).ok()?;
        Some(Stamp {
            path: Some(self.place()),
            ..stamp
        })
    }

    fn attribute(&self) -> io::Result<Option<Vec<u8>>> {
        if self.block_device {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut value = vec![0; ATTRIBUTE_BYTES_MAX];
        value_of(
            rustix::fs::fgetxattr(&self.control, ATTRIBUTE, &mut value[..]),
            value,
        )
    }

    fn set_attribute(&self, bytes: &[u8]) -> io::Result<()> {
        if self.block_device {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if self.info.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        Ok(rustix::fs::fsetxattr(
            &self.control,
            ATTRIBUTE,
            bytes,
            XattrFlags::empty(),
        )?)
    }

    fn is_copy_of(&self, record: &IdentityRecord) -> bool {
        let own = stamp_at(&self.control, Path::new(""), AtFlags::EMPTY_PATH);
        let (Ok((own, own_device)), Some(written_for)) = (own, &record.stamp) else {
            return false;
        };
        let Some(path) = written_for.path.clone() else {
            return false;
        };
        let (written_for, identity) = (written_for.clone(), record.identity);
        let look = move || {
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
            let Ok((there, device)) = stamp_at(CWD, &path, flags) else {
                return false;
            };
            let is_this_one = (device, there.inode) == (own_device, own.inode);
            if is_this_one || !there.is_same_file(&written_for) {
                return false;
            }
            let mut value = vec![0; ATTRIBUTE_BYTES_MAX];
            let got = rustix::fs::lgetxattr(&path, ATTRIBUTE, &mut value[..]);
            let value = value_of(got, value).ok().flatten();
            let found = value.and_then(|value| IdentityRecord::from_attribute(&value));
            found.is_some_and(|found| found.identity == identity)
        };
        let (sender, receiver) = mpsc::sync_channel(1);
        let spawned = std::thread::Builder::new()
            .name("identity".to_owned())
            .spawn(move || sender.send(look()).ok());
        spawned.is_ok() && receiver.recv_timeout(LOOK_PATIENCE).unwrap_or(false)
    }

    fn reopen(&self) -> io::Result<OwnedFd> {
        super::reopen(self.control.as_fd(), OFlags::RDONLY | OFlags::NONBLOCK)
    }
}

impl SharedFile {
    /// Returns the path of the file with all links resolved.
    fn place(&self) -> PathBuf {
        let link = format!("/proc/self/fd/{}", self.control.as_raw_fd());
        match rustix::fs::readlink(link, Vec::new()) {
            Ok(path) => path_of(path.into_bytes()),
            Err(_) => std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone()),
        }
    }
}

/// Returns a file's stamp, without path, and its device.
fn stamp_at(
    folder: impl std::os::fd::AsFd,
    path: &Path,
    flags: AtFlags,
) -> rustix::io::Result<(Stamp, (u32, u32))> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = statx(folder, path, flags, wanted)?;
    let has_birth = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    let birth = (stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec);
    let stamp = Stamp {
        inode: stat.stx_ino,
        birth: has_birth.then_some(birth),
        path: None,
    };
    Ok((stamp, (stat.stx_dev_major, stat.stx_dev_minor)))
}

fn value_of(got: rustix::io::Result<usize>, mut value: Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    match got {
        Ok(length) => {
            value.truncate(length);
            Ok(Some(value))
        }
        Err(Errno::NODATA) => Ok(None),
        // Longer than any record: not a record.
        Err(Errno::RANGE) => Ok(Some(Vec::new())),
        Err(error) => Err(error.into()),
    }
}

/// Returns the identifier of a block device in its sysfs folder, if any.
fn device_key(folder: &Path) -> Option<String> {
    device_names(folder).into_iter().next()
}

/// Returns the names of the device with a path that the kernel assigns, such as `/dev/sdb`. The path may lead to another device after a
/// restart of the machine. `None`: the path is not one of these.
pub(super) fn names_at(path: &Path, device: Option<(u32, u32)>) -> Option<Vec<String>> {
    let (major, minor) = device?;
    if path.parent() != Some(Path::new("/dev")) {
        return None;
    }
    let mut names = device_names(&PathBuf::from(format!("/sys/dev/block/{major}:{minor}")));
    // The administrator chooses the file of a loop device.
    names.retain(|name| !name.starts_with("loop ") && !name.contains(" of loop "));
    Some(names)
}

/// Returns all identifiers of a block device in its sysfs folder, the best first.
fn device_names(folder: &Path) -> Vec<String> {
    let read = |name: &str| -> Option<String> {
        let text = std::fs::read(folder.join(name)).ok()?;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        (!text.is_empty()).then_some(text)
    };
    if let Some(partition) = read("partition") {
        // The folder of a partition lies in the folder of the whole device.
        let (Ok(folder), Some(start)) = (std::fs::canonicalize(folder), read("start")) else {
            return Vec::new();
        };
        let whole = device_names(&folder.join("..")).into_iter();
        let part = |whole| format!("partition {partition} at {start} of {whole}");
        return whole.map(part).collect();
    }
    let attributes = [
        ("dm", "dm/uuid"),
        ("md", "md/uuid"),
        ("wwid", "wwid"),
        ("wwid", "device/wwid"),
        ("loop", "loop/backing_file"),
        ("cid", "device/cid"),
        ("serial", "serial"),
        ("serial", "device/serial"),
    ];
    let names = attributes.iter();
    names
        .filter_map(|(kind, name)| Some(format!("{kind} {}", read(name)?)))
        .collect()
}

/// Returns true if devices of several targets may share a key's identifier: NAA of type 3 or without company ID, or the T10 designator of
/// tgt and the iSCSI Enterprise Target, derived from target and LUN.
fn is_local(key: &str) -> bool {
    const LOCAL: [&str; 4] = [
        "wwid naa.3",
        "wwid naa.5000000",
        "wwid naa.6000000",
        "wwid t10.IET ",
    ];
    LOCAL.iter().any(|local| key.contains(local))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_that_the_kernel_assigns_need_a_record() {
        let none = Some((4095, 1_048_575));
        assert_eq!(names_at(Path::new("/dev/sdb"), none), Some(Vec::new()));
        for path in ["/dev/disk/by-id/a", "/dev/vg0/a", "/srv/sdb", "sdb"] {
            assert_eq!(names_at(Path::new(path), none), None, "{path}");
        }
        assert_eq!(names_at(Path::new("/dev/sdb"), None), None);
    }

    #[test]
    fn identifiers_assigned_by_targets_are_local() {
        for local in [
            "wwid naa.3000000100000001",
            "wwid naa.60000000000000000e00000000010001",
            "wwid t10.IET     00010001",
            "partition 1 at 2048 of wwid t10.IET     00010001",
        ] {
            assert!(is_local(local), "{local}");
        }
        for unique in [
            "wwid naa.5000c500a1b2c3d4",
            "wwid naa.6001405a3000000000000000000000001",
            "wwid t10.ATA     Example 860 EVO S3Z2NB0K",
            "serial naa.3",
        ] {
            assert!(!is_local(unique), "{unique}");
        }
    }

    #[test]
    fn device_key_has_its_names_and_partition_key_its_start() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("vda");
        std::fs::create_dir_all(disk.join("device")).unwrap();
        assert_eq!(device_key(&disk), None);
        std::fs::write(disk.join("serial"), "S-1\n").unwrap();
        assert_eq!(device_key(&disk).as_deref(), Some("serial S-1"));
        std::fs::write(disk.join("device/wwid"), "naa.5000c500a1b2c3d4\n").unwrap();
        let whole = "wwid naa.5000c500a1b2c3d4";
        assert_eq!(device_key(&disk).as_deref(), Some(whole));
        let partition = disk.join("vda1");
        std::fs::create_dir(&partition).unwrap();
        std::fs::write(partition.join("partition"), "1\n").unwrap();
        std::fs::write(partition.join("start"), "2048\n").unwrap();
        let key = device_key(&partition).unwrap();
        assert_eq!(key, format!("partition 1 at 2048 of {whole}"));
        std::fs::create_dir(disk.join("dm")).unwrap();
        std::fs::write(disk.join("dm/uuid"), "LVM-abc\n").unwrap();
        assert_eq!(device_key(&disk).as_deref(), Some("dm LVM-abc"));
    }
}
