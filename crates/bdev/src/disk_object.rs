//! A named disk: a block device and the identity that every export of it shows.
//!
//! Serial number and NAA identifier derive from the identity, which whoever makes the disk keeps with it (see
//! [`crate::Medium`]); either may be given instead. Made by the control plane; shared by all workers.

use std::io;
use std::sync::{Arc, PoisonError, RwLock, mpsc};
use std::time::Duration;

use block::{DiskInfo, Geometry, Identity};

use crate::error::{check_naa, check_physical_block_size, check_size};
use crate::on_error::ErrorPolicyCell;
use crate::replacement::{self, BrokenPromise, DeviceCell};
use crate::{
    BlockDevice, Conditions, ErrorPolicy, OnError, OpenError, RangeLock, RangeLocks, RateLimits,
    Recorder, ResizeError, StateCell, Throttle,
};

/// The most that virtio-blk's `GET_ID` holds (virtio 1.3, 5.2.6).
const SERIAL_BYTES_MAX: usize = 20;

/// A device that answers answers by then.
const RESIZE_PATIENCE: Duration = Duration::from_secs(10);

/// Interval at which a hold that waits checks whether it is still wanted.
const HOLD_STEP: Duration = Duration::from_millis(50);
const HOLD_STEPS: u128 = RESIZE_PATIENCE.as_millis() / HOLD_STEP.as_millis();

/// What a disk shows to its clients besides what its block device says.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskOptions<'a> {
    /// Which disk it is; `None`: one that nobody has seen before.
    pub identity: Option<Identity>,
    /// Serial number; `None`: that of the identity, or the digits of `wwn`.
    pub serial: Option<&'a str>,
    /// NAA identifier of 64 bits; `None`: that of the identity.
    pub wwn: Option<u64>,
    /// Physical block size in bytes; `None`: what the block device says.
    pub physical_block_size: Option<u32>,
    /// Its medium can be ejected and loaded by SCSI initiators.
    pub removable: bool,
    /// Third-party copies through SCSI targets that do not have the disk may read and write it.
    pub copy_across_targets: bool,
}

/// A disk that is about to be smaller: see [`Disk::begin_shrink`].
#[must_use]
pub struct Shrinking {
    size: u64,
    before: u64,
    /// Of the range that goes.
    _lease: RangeLock,
}

impl Shrinking {
    /// Bytes that the disk is to have.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that it has until then.
    pub fn size_before(&self) -> u64 {
        self.before
    }
}

/// What is configured to be shown in the place of what derives from the identity.
#[derive(Debug)]
struct Given {
    serial: Option<String>,
    wwn: Option<u64>,
}

impl Given {
    fn serial(&self, identity: Identity) -> String {
        match (&self.serial, self.wwn) {
            (Some(serial), _) => serial.clone(),
            // Two daemons that show one disk are given its identifier, and shall not differ in the serial number.
            (None, Some(wwn)) => format!("{wwn:016x}"),
            (None, None) => identity.serial(),
        }
    }

    fn show(&self, identity: Identity, info: DiskInfo) -> DiskInfo {
        DiskInfo {
            identity,
            serial: self.serial(identity),
            naa: self.wwn.unwrap_or(identity.naa()),
            ..info
        }
    }
}

/// A named disk.
#[derive(Clone, Debug)]
pub struct Disk {
    name: Arc<str>,
    given: Arc<Given>,
    removable: bool,
    copy_across_targets: bool,
    device: Arc<DeviceCell>,
    info: Arc<RwLock<Arc<DiskInfo>>>,
    conditions: Arc<Conditions>,
    locks: Arc<RangeLocks>,
    throttle: Arc<Throttle>,
    recorder: Arc<Recorder>,
    errors: Arc<ErrorPolicyCell>,
    state: Arc<StateCell>,
}

impl Disk {
    /// Gives a block device a name and a new identity, and leaves all else as the block device says.
    ///
    /// # Errors
    /// When the serial does not fit into 20 printable ASCII characters.
    pub fn new(
        name: &str,
        serial: Option<&str>,
        device: Arc<dyn BlockDevice>,
    ) -> Result<Disk, OpenError> {
        let options = DiskOptions {
            serial,
            ..DiskOptions::default()
        };
        Disk::with_options(name, options, device)
    }

    /// Gives a block device a name, an identity and what else clients see.
    ///
    /// # Errors
    /// When an option does not fit, or does not fit the block device.
    pub fn with_options(
        name: &str,
        options: DiskOptions<'_>,
        device: Arc<dyn BlockDevice>,
    ) -> Result<Disk, OpenError> {
        let DiskOptions {
            identity,
            serial,
            wwn,
            physical_block_size,
            removable,
            copy_across_targets,
        } = options;
        let told = device.info();
        let wwn = wwn.map(check_naa).transpose()?;
        let physical_block_size = match physical_block_size {
            Some(found) => check_physical_block_size(found, told.geometry.block_size())?,
            None => told.physical_block_size,
        };
        if let Some(found) = serial.filter(|serial| !is_serial(serial)) {
            return Err(OpenError::Serial {
                found: found.to_owned(),
            });
        }
        let given = Given {
            serial: serial.map(str::to_owned),
            wwn,
        };
        let info = DiskInfo {
            physical_block_size,
            ..given.show(identity.unwrap_or_else(Identity::random), told)
        };
        let conditions = Arc::<Conditions>::default();
        let locks = RangeLocks::new(conditions.clone());
        locks.set_unit(info.io_alignment);
        Ok(Disk {
            name: name.into(),
            given: Arc::new(given),
            removable,
            copy_across_targets,
            device: Arc::new(DeviceCell::new(device)),
            info: Arc::new(RwLock::new(Arc::new(info))),
            locks: Arc::new(locks),
            throttle: Arc::new(Throttle::new(conditions.clone())),
            recorder: Arc::new(Recorder::new(conditions.clone())),
            errors: Arc::new(ErrorPolicyCell::new(conditions.clone())),
            conditions,
            state: Arc::default(),
        })
    }

    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shape, abilities and identity, as they are now. Takes a lock: not for every request.
    pub fn info(&self) -> Arc<DiskInfo> {
        let info = self.info.read().unwrap_or_else(PoisonError::into_inner);
        info.clone()
    }

    /// Makes it another disk, as far as its clients can tell. It must have none.
    pub fn set_identity(&self, identity: Identity) {
        let mut info = self.info.write().unwrap_or_else(PoisonError::into_inner);
        *info = Arc::new(self.given.show(identity, DiskInfo::clone(&info)));
    }

    /// Grows or shrinks the disk. The caller tells the transports afterwards. May block until changes that are in flight
    /// beyond a new end have ended.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub fn resize(&self, size: u64) -> Result<(), ResizeError> {
        let device = self.device();
        let capacity = device.capacity();
        let before = capacity.bytes();
        check_size(size, size_unit(&self.info())).map_err(ResizeError::Size)?;
        let refused = |source| ResizeError::System { size, source };
        if size < before {
            let shrinking = self.begin_shrink(size)?;
            return self.shrink(shrinking);
        }
        self.device().set_size(size).map_err(refused)?;
        capacity.set(size);
        self.has_size(size);
        Ok(())
    }

    /// Prepares to make the disk smaller, with nothing lost yet: what comes from now on is refused beyond the new end, and what
    /// was begun there has ended when this returns.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub fn begin_shrink(&self, size: u64) -> Result<Shrinking, ResizeError> {
        let info = self.info();
        check_size(size, size_unit(&info)).map_err(ResizeError::Size)?;
        if info.read_only {
            let source = io::ErrorKind::ReadOnlyFilesystem.into();
            return Err(ResizeError::System { size, source });
        }
        self.end_at(size)
    }

    /// Gives a disk that was made larger the size back that it had, also one that is read-only.
    ///
    /// # Errors
    /// It stays larger then.
    pub fn roll_back_growth(&self, size: u64) -> Result<(), ResizeError> {
        let shrinking = self.end_at(size)?;
        self.shrink(shrinking)
    }

    fn end_at(&self, size: u64) -> Result<Shrinking, ResizeError> {
        let device = self.device();
        let capacity = device.capacity();
        let before = capacity.bytes();
        capacity.set(size);
        match self.hold(size, before.saturating_sub(size)) {
            Ok(lease) => Ok(Shrinking {
                size,
                before,
                _lease: lease,
            }),
            Err(error) => {
                capacity.set(before);
                Err(error)
            }
        }
    }

    /// Makes the disk smaller: what lies beyond the new end is lost.
    ///
    /// # Errors
    /// The disk is as it was then.
    pub fn shrink(&self, shrinking: Shrinking) -> Result<(), ResizeError> {
        let size = shrinking.size;
        // Before: it may become as large again, and what was there is gone.
        self.recorder.mark(size, u64::MAX);
        if let Err(source) = self.device().set_size(size) {
            self.stay_large(shrinking);
            return Err(ResizeError::System { size, source });
        }
        self.has_size(size);
        Ok(())
    }

    /// It is not made smaller after all.
    pub fn stay_large(&self, shrinking: Shrinking) {
        self.device().capacity().set(shrinking.before);
    }

    /// How large what it lies in is now, for [`Disk::follow_size`] to take over.
    ///
    /// # Errors
    /// When that is no size for a disk, or cannot be known.
    pub fn found_size(&self) -> Result<u64, ResizeError> {
        let found = self
            .bytes_found()?
            .unwrap_or(self.device().capacity().bytes());
        check_size(found, size_unit(&self.info())).map_err(ResizeError::Size)
    }

    /// Is what it lies in larger or smaller than its clients know? A disk that cannot be looked at says no.
    pub fn has_other_size(&self) -> bool {
        let info = self.info();
        let found = self.bytes_found().ok().flatten();
        let found = found.unwrap_or(self.device().capacity().bytes());
        let found = whole_units(found, &info);
        found != 0 && found != info.geometry.capacity_bytes()
    }

    /// Takes over the size that others have given it, in whole blocks. `Some`: it is another one than before. What shrank has
    /// lost what was beyond its new end, and nothing waits for I/Os there. The caller tells clients afterwards.
    ///
    /// # Errors
    /// When nothing is left, or that cannot be known: the disk keeps its size, and I/Os say what is wrong.
    pub fn follow_size(&self) -> Result<Option<u64>, ResizeError> {
        let before = self.info();
        let device = self.device();
        let capacity = device.capacity();
        let found = self.bytes_found()?;
        let size = whole_units(found.unwrap_or(capacity.bytes()), &before);
        let size = check_size(size, size_unit(&before)).map_err(ResizeError::Size)?;
        if size == before.geometry.capacity_bytes() {
            return Ok(None);
        }
        // A block device that follows by itself has said so, and may have a newer one by now.
        if found.is_some() {
            capacity.set(size);
        }
        self.has_size(size);
        Ok(Some(size))
    }

    fn bytes_found(&self) -> Result<Option<u64>, ResizeError> {
        let size = self.info().geometry.capacity_bytes();
        let found = self.device().found_size();
        found.map_err(|source| ResizeError::System { size, source })
    }

    fn has_size(&self, size: u64) {
        if size < self.info().geometry.capacity_bytes() {
            self.recorder.mark(size, u64::MAX);
        }
        let mut info = self.info.write().unwrap_or_else(PoisonError::into_inner);
        *info = Arc::new(DiskInfo {
            geometry: Geometry::new(info.geometry.block_size(), size),
            ..DiskInfo::clone(&info)
        });
    }

    /// Holds a range against all reads and changes of clients, once those that are in flight there have ended. Blocks.
    ///
    /// # Errors
    /// When they do not end in time.
    pub fn hold(&self, offset: u64, length: u64) -> Result<RangeLock, ResizeError> {
        self.hold_while(offset, length, || true)
    }

    /// As [`Disk::hold`], but gives up soon after `is_wanted` returns false.
    ///
    /// # Errors
    /// When they do not end in time, or the range is not wanted any more.
    pub fn hold_while(
        &self,
        offset: u64,
        length: u64,
        is_wanted: impl Fn() -> bool,
    ) -> Result<RangeLock, ResizeError> {
        let (grant, granted) = mpsc::channel();
        self.locks.acquire(offset, length, move |lease| {
            // When nobody waits any more it is dropped, and so given back.
            grant.send(lease).ok();
        });
        let seconds = RESIZE_PATIENCE.as_secs();
        for _ in 0..HOLD_STEPS {
            if !is_wanted() {
                break;
            }
            if let Ok(lease) = granted.recv_timeout(HOLD_STEP) {
                return Ok(lease);
            }
        }
        Err(ResizeError::Busy { seconds })
    }

    /// Can its medium be ejected and loaded?
    pub fn is_removable(&self) -> bool {
        self.removable
    }

    /// May third-party copies through SCSI targets that do not have it read and write it?
    pub fn may_be_copied_across_targets(&self) -> bool {
        self.copy_across_targets
    }

    /// Ranges that are held against all other reads and changes.
    pub fn range_locks(&self) -> &Arc<RangeLocks> {
        &self.locks
    }

    /// Closes the disk: from now on every I/O that is not [`block::IoFlags::CLOSER`] fails, on every transport, and those
    /// that are wait until the changes that are in flight have ended. These keep to a pace too, see [`closed_pace`].
    /// Quick; may be called twice.
    pub fn close(&self) {
        let capacity = self.info().geometry.capacity_bytes();
        self.throttle.set_pace(Some(closed_pace(capacity)));
        self.locks.close();
    }

    /// Opens the disk again.
    pub fn reopen(&self) {
        self.locks.reopen();
        self.throttle.set_pace(None);
    }

    /// What keeps its I/Os from starting at once.
    pub fn conditions(&self) -> &Arc<Conditions> {
        &self.conditions
    }

    /// Sets its limits anew, at any time: they hold for all exports together.
    pub fn set_limits(&self, limits: RateLimits) {
        self.throttle.set(limits);
    }

    /// Sets what becomes of I/Os that fail, and how long they may take, for those that are submitted from now on. Whoever sets it
    /// resumes the disk on all workers afterwards, so that what waits by the old policy ends by the new one.
    pub fn set_error_policy(&self, policy: ErrorPolicy) {
        self.errors.set(policy);
    }

    /// What becomes of I/Os that fail.
    pub fn on_error(&self) -> OnError {
        self.errors.on_error()
    }

    /// How long an I/O may take.
    pub fn io_timeout(&self) -> Option<Duration> {
        self.errors.io_timeout()
    }

    /// Its limits, as workers keep to them.
    pub fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    /// Where its changes are recorded.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Can it do I/O now?
    pub fn state(&self) -> &Arc<StateCell> {
        &self.state
    }

    /// The kinds of its layers, from the top down to the device.
    pub fn stack(&self) -> Vec<&'static str> {
        let device = self.device();
        let top: Option<&dyn BlockDevice> = Some(&*device);
        let layers = std::iter::successors(top, |layer| layer.below());
        layers.map(|layer| layer.kind()).collect()
    }

    /// What does its I/O now. Takes a lock: not for every request.
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        self.device.get().0
    }

    /// Its device, and how many it has had before.
    pub fn device_and_generation(&self) -> (Arc<dyn BlockDevice>, u64) {
        self.device.get()
    }

    /// May it have this device ([`Disk::replace_device`])?
    ///
    /// # Errors
    /// What clients were told of the disk that the device does not keep.
    pub fn check_device(&self, device: &dyn BlockDevice) -> Result<(), BrokenPromise> {
        replacement::check(&self.info(), &device.info())
    }

    /// Checks whether a device can hold a copy of the disk that no client uses.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_copy(&self, device: &dyn BlockDevice) -> Result<(), BrokenPromise> {
        let (told, new) = (self.info(), device.info());
        replacement::check_shape(&told, &new)
    }

    /// Withdraws the promise that discarded blocks read as zeroes. The caller ensures that no client has seen it.
    pub fn withdraw_discard_zeroes(&self) {
        let mut info = self.info.write().unwrap_or_else(PoisonError::into_inner);
        if info.discard_zeroes {
            *info = Arc::new(DiskInfo {
                discard_zeroes: false,
                ..DiskInfo::clone(&info)
            });
        }
    }

    /// Gives it another device with the same content, under the same name and identity. Whoever does it holds the whole disk
    /// ([`Disk::hold`]) until all workers have changed to it.
    ///
    /// # Errors
    /// What clients were told of the disk that the device does not keep. Nothing has changed then.
    pub fn replace_device(&self, device: Arc<dyn BlockDevice>) -> Result<(), BrokenPromise> {
        let new = device.info();
        let mut info = self.info.write().unwrap_or_else(PoisonError::into_inner);
        replacement::check(&info, &new)?;
        *info = Arc::new(DiskInfo {
            physical_block_size: info.physical_block_size,
            identity: info.identity,
            serial: info.serial.clone(),
            naa: info.naa,
            // No client relies on it, so the next device may lack it.
            discard_zeroes: info.discard_zeroes && new.discard_zeroes,
            ..new
        });
        self.locks.set_unit(info.io_alignment);
        self.device.set(device);
        Ok(())
    }
}

/// Unit of the size of a disk: its logical block, or a larger [`DiskInfo::io_alignment`].
fn size_unit(info: &DiskInfo) -> u32 {
    info.geometry.block_size().max(info.io_alignment)
}

/// The largest size of the disk within `bytes`.
fn whole_units(bytes: u64, info: &DiskInfo) -> u64 {
    bytes - bytes % u64::from(size_unit(info))
}

fn is_serial(text: &str) -> bool {
    (1..=SERIAL_BYTES_MAX).contains(&text.len()) && text.bytes().all(|b| matches!(b, b' '..=b'~'))
}

/// Bytes that may be written in a second to a disk that is closed: to its sanitize or format operation.
///
/// A pass over a disk of 512 MiB or more takes 8 seconds at least, that over a smaller one its share of them. Memory could be
/// overwritten in an instant: too soon for anybody to see the progress that SBC-4 lets initiators poll, and with a worker that
/// has time for nothing else. No disk of 1 TiB reaches the 128 GiB/s that it may.
fn closed_pace(capacity: u64) -> u64 {
    const PACE_MIN: u64 = 64 << 20;
    const PASS_SECONDS: u64 = 8;
    (capacity / PASS_SECONDS).max(PACE_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Null, NullOptions};

    fn disk(name: &str, serial: Option<&str>) -> Result<Disk, OpenError> {
        let device = Null::create(NullOptions {
            size: 1 << 20,
            ..NullOptions::default()
        })?;
        Disk::new(name, serial, Arc::new(device))
    }

    /// 64 MiB/s, or what lets a pass end within 8 seconds.
    #[test]
    fn pass_over_a_closed_disk_takes_eight_seconds_or_its_share() {
        assert_eq!(closed_pace(0), 67_108_864);
        assert_eq!(closed_pace(512 << 20), 67_108_864);
        assert_eq!(closed_pace(64 << 30), 8 << 30);
    }

    #[test]
    fn serial_and_naa_come_from_the_identity_and_not_from_the_name() {
        let (a, b) = (disk("d0", None).unwrap(), disk("d0", None).unwrap());
        assert_ne!(a.info().identity, b.info().identity);
        assert_ne!(a.info().serial, b.info().serial);
        assert_ne!(a.info().naa, b.info().naa);
        let identity = "6f9619ff-8b86-4011-b42d-00c04fc964ff".parse().unwrap();
        let with = |serial, wwn| {
            let device = Null::create(NullOptions {
                size: 1 << 20,
                ..NullOptions::default()
            });
            let options = DiskOptions {
                identity: Some(identity),
                serial,
                wwn,
                ..DiskOptions::default()
            };
            Disk::with_options("d0", options, Arc::new(device.unwrap())).unwrap()
        };
        let wwn = 0x5000_0000_0000_0001;
        for (serial, given, shown, naa) in [
            (None, None, "6f9619ff8b864011b42d", 0x342d_00c0_4fc9_64ff),
            (Some("S"), None, "S", 0x342d_00c0_4fc9_64ff),
            (None, Some(wwn), "5000000000000001", wwn),
            (Some("S"), Some(wwn), "S", wwn),
        ] {
            let disk = with(serial, given);
            let info = disk.info();
            assert_eq!(
                (info.identity, info.serial.as_str(), info.naa),
                (identity, shown, naa)
            );
            // What is given stays when the identity is another one; the rest goes with it.
            disk.resize(2 << 20).unwrap();
            disk.set_identity(b.info().identity);
            let info = disk.info();
            assert_eq!(info.identity, b.info().identity);
            assert_eq!(info.serial == shown, serial.is_some() || given.is_some());
            assert_eq!(info.naa == naa, given.is_some());
            assert_eq!(info.geometry.capacity_bytes(), 2 << 20);
        }
    }

    #[test]
    fn size_changes_for_all_who_look() {
        let disk = disk("d0", None).unwrap();
        let clone = disk.clone();
        disk.resize(2 << 20).unwrap();
        assert_eq!(clone.info().geometry.capacity_bytes(), 2 << 20);
        disk.resize(512).unwrap();
        assert_eq!(clone.device().info().geometry.capacity_bytes(), 512);
        assert!(disk.resize(100).is_err() && disk.resize(0).is_err());
        assert_eq!(clone.info().geometry.capacity_bytes(), 512);
    }

    #[test]
    fn serial_is_20_printable_characters_at_most() {
        assert_eq!(disk("d0", Some("S 1")).unwrap().info().serial, "S 1");
        assert!(disk("d0", Some("123456789012345678901")).is_err());
        assert!(disk("d0", Some("\u{fc}")).is_err());
        assert!(disk("d0", Some("")).is_err());
        let long = disk("a-name-of-more-than-twenty-bytes", None).unwrap();
        assert_eq!(long.info().serial.len(), 20);
    }

    #[test]
    fn options_are_shown_or_refused() {
        let with = |options| {
            let device = Null::create(NullOptions {
                size: 1 << 20,
                block_size: 4096,
                ..NullOptions::default()
            });
            Disk::with_options("d", options, Arc::new(device.unwrap()))
        };
        let plain = with(DiskOptions::default()).unwrap();
        assert!(!plain.is_removable() && !plain.may_be_copied_across_targets());
        assert_eq!(plain.info().physical_block_size, 4096);
        let all = DiskOptions {
            identity: None,
            serial: Some("S-1"),
            wwn: Some(0x5000_0000_0000_0001),
            physical_block_size: Some(16384),
            removable: true,
            copy_across_targets: true,
        };
        let disk = with(all).unwrap();
        assert!(disk.is_removable() && disk.may_be_copied_across_targets());
        assert_eq!(disk.info().serial, "S-1");
        assert_eq!(disk.info().naa, 0x5000_0000_0000_0001);
        assert_eq!(disk.info().physical_block_size, 16384);
        for found in [512, 4097, 131_072, 0] {
            let options = DiskOptions {
                physical_block_size: Some(found),
                ..all
            };
            let error = with(options).unwrap_err().to_string();
            assert!(error.contains(&format!("block size {found} ")), "{error}");
        }
        for wwn in [0, 1, 0x6000_0000_0000_0001, u64::MAX] {
            let options = DiskOptions {
                wwn: Some(wwn),
                ..all
            };
            assert!(matches!(with(options), Err(OpenError::Wwn { found }) if found == wwn));
        }
    }
}
