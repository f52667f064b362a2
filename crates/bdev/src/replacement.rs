//! Replaces the device under a disk, after a snapshot or a copy. Promises to clients still hold.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use block::DiskInfo;

use crate::BlockDevice;

/// Present device of a disk.
#[derive(Debug)]
pub(crate) struct DeviceCell(RwLock<(Arc<dyn BlockDevice>, u64)>);

impl DeviceCell {
    pub fn new(device: Arc<dyn BlockDevice>) -> DeviceCell {
        DeviceCell(RwLock::new((device, 0)))
    }

    /// Returns the device and the number of earlier ones.
    pub fn get(&self) -> (Arc<dyn BlockDevice>, u64) {
        let cell = self.0.read().unwrap_or_else(PoisonError::into_inner);
        cell.clone()
    }

    pub fn set(&self, device: Arc<dyn BlockDevice>) {
        let mut cell = self.0.write().unwrap_or_else(PoisonError::into_inner);
        *cell = (device, cell.1 + 1);
    }
}

/// A promise to clients that another device would not keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenPromise(String);

impl fmt::Display for BrokenPromise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BrokenPromise {}

/// Checks whether a device can hold a copy: block size and size are equal.
pub(crate) fn check_shape(presented: &DiskInfo, new: &DiskInfo) -> Result<(), BrokenPromise> {
    let broken = |reason: String| Err(BrokenPromise(reason));
    let (before, after) = (presented.geometry, new.geometry);
    if before.block_size() != after.block_size() {
        return broken(format!(
            "its block size is {} bytes, that of the disk {}; hint: block_size={}",
            after.block_size(),
            before.block_size(),
            before.block_size()
        ));
    }
    if before.capacity_bytes() != after.capacity_bytes() {
        return broken(format!(
            "it has {} bytes, the disk {}{}",
            after.capacity_bytes(),
            before.capacity_bytes(),
            match after.capacity_bytes() < before.capacity_bytes() {
                true => "; hint: give a target of at least that size",
                false => "",
            }
        ));
    }
    Ok(())
}

/// As [`check_shape`], for a copy that receives the changes of clients.
pub(crate) fn check_mirrored(presented: &DiskInfo, new: &DiskInfo) -> Result<(), BrokenPromise> {
    check_shape(presented, new)?;
    // A discard is mirrored as zeroes if clients rely on them.
    let writes_zeroes = presented.write_zeroes || presented.discard_zeroes;
    match writes_zeroes && !new.write_zeroes {
        true => Err(BrokenPromise(
            "it cannot write zeroes, but clients use write zeroes; hint: use a target that writes zeroes, or omit --at end if the disk has no lock while-active".to_owned(),
        )),
        false => Ok(()),
    }
}

/// Checks whether a device keeps the promises to clients. Features that they negotiated, or that written data relies on, cannot be
/// withdrawn. Atomic writes and anchored blocks can: such commands fail, without loss.
pub(crate) fn check(presented: &DiskInfo, new: &DiskInfo) -> Result<(), BrokenPromise> {
    let broken = |reason: String| Err(BrokenPromise(reason));
    check_shape(presented, new)?;
    let promises = [
        ("it is read-only", !presented.read_only && new.read_only),
        (
            "it has a volatile write cache, but the disk was presented to clients without one; hint: cache=writethrough",
            !presented.read_only && !presented.write_cache && new.write_cache,
        ),
        (
            "it cannot discard, but clients use discard",
            presented.discard_granularity.is_some() && new.discard_granularity.is_none(),
        ),
        (
            "its discarded blocks do not read as zeroes, but clients rely on zeroes",
            presented.discard_zeroes && !new.discard_zeroes,
        ),
        (
            "it cannot write zeroes, but clients use write zeroes",
            presented.write_zeroes && !new.write_zeroes,
        ),
        (
            "its sharing with other hosts differs from that of the disk",
            presented.shared != new.shared
                || presented.compare_and_write.is_some() && new.compare_and_write.is_none(),
        ),
        (
            "a SCSI device with passthrough cannot be replaced",
            presented.passthrough.is_some() || new.passthrough.is_some(),
        ),
    ];
    match promises.into_iter().find(|(_, is_broken)| *is_broken) {
        Some((reason, _)) => broken(reason.to_owned()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockDevice, Disk, Null, NullOptions};

    fn null(size: u64, block_size: u32) -> Arc<dyn BlockDevice> {
        let options = NullOptions {
            size,
            block_size,
            ..NullOptions::default()
        };
        Arc::new(Null::create(options).unwrap())
    }

    #[test]
    fn disk_keeps_name_identity_and_serial_on_another_device() {
        let disk = Disk::new("d0", Some("S-1"), null(1 << 20, 512)).unwrap();
        let before = disk.info();
        let other = null(1 << 20, 512);
        disk.replace_device(Arc::clone(&other)).unwrap();
        assert!(Arc::ptr_eq(&disk.device(), &other));
        assert_eq!(disk.device_and_generation().1, 1);
        assert_eq!(disk.info(), before);
        for (size, block_size, expected) in [(2 << 20, 512, "2097152"), (1 << 20, 4096, "4096")] {
            let refused = disk.replace_device(null(size, block_size)).unwrap_err();
            assert!(refused.to_string().contains(expected), "{refused}");
        }
        assert!(Arc::ptr_eq(&disk.device(), &other));
    }

    #[test]
    fn read_only_disk_stays_read_only_on_a_writable_device() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let read_only = crate::FileOptions {
            read_only: true,
            cache: crate::CacheMode::Writeback,
            ..crate::FileOptions::new(&path)
        };
        let file = crate::File::open(read_only).unwrap();
        let disk = Disk::new("d0", None, Arc::new(file)).unwrap();
        let copy = crate::FileOptions {
            size: Some(1 << 20),
            cache: crate::CacheMode::Writeback,
            ..crate::FileOptions::new(folder.path().join("copy"))
        };
        let copy = crate::File::open(copy).unwrap();
        disk.replace_device(Arc::new(copy)).unwrap();
        assert!(disk.info().read_only);
    }

    #[test]
    fn device_with_fewer_promises_is_refused() {
        let info = DiskInfo {
            write_cache: true,
            ..null(1 << 20, 512).info()
        };
        let presented = DiskInfo {
            discard_granularity: Some(512),
            discard_zeroes: true,
            write_zeroes: true,
            ..info.clone()
        };
        assert_eq!(check(&presented, &presented), Ok(()));
        let cases: [(&str, DiskInfo, DiskInfo); 5] = [
            (
                "read-only",
                presented.clone(),
                DiskInfo {
                    read_only: true,
                    ..presented.clone()
                },
            ),
            (
                "write cache",
                DiskInfo {
                    write_cache: false,
                    ..presented.clone()
                },
                presented.clone(),
            ),
            (
                "cannot discard",
                presented.clone(),
                DiskInfo {
                    discard_granularity: None,
                    ..presented.clone()
                },
            ),
            (
                "as zeroes",
                presented.clone(),
                DiskInfo {
                    discard_zeroes: false,
                    ..presented.clone()
                },
            ),
            (
                "write zeroes",
                presented.clone(),
                DiskInfo {
                    write_zeroes: false,
                    ..presented.clone()
                },
            ),
        ];
        for (expected, presented, new) in cases {
            let broken = check(&presented, &new).unwrap_err().to_string();
            assert!(broken.contains(expected), "{broken}");
            // The reverse replacement breaks no promise.
            assert_eq!(check(&new, &presented), Ok(()), "{expected}");
        }
        let plain = DiskInfo {
            discard_zeroes: false,
            write_zeroes: false,
            ..presented.clone()
        };
        assert_eq!(check_shape(&presented, &plain), Ok(()));
        let broken = check_mirrored(&presented, &plain).unwrap_err().to_string();
        assert!(broken.contains("cannot write zeroes"), "{broken}");
        assert_eq!(check_mirrored(&plain, &plain), Ok(()));
    }
}
