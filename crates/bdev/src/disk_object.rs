//! A named disk: a block device and the identity that every export of it shows.
//!
//! Serial number and NAA identifier derive from the identity, which the disk's creator stores with it (see [`crate::Medium`]), unless they
//! are given. Created by the control plane; shared by all workers.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, mpsc};
use std::time::Duration;

use block::{DiskInfo, Geometry, Identity, SizeKnowledge};

use crate::error::{check_naa, check_physical_block_size, check_size};
use crate::layer::visit_stack;
use crate::on_error::ErrorPolicyCell;
use crate::replacement::{self, BrokenPromise, DeviceCell};
use crate::{
    BlockDevice, Conditions, ErrorPolicy, LocalFiles, OnError, OpenError, RangeLock, RangeLocks,
    RateLimits, Recorder, ResizeError, StateCell, Throttle, Turn,
};

/// Size in bytes of virtio-blk's `GET_ID` (virtio 1.3, 5.2.6).
const SERIAL_BYTES_MAX: usize = 20;

/// Time limit for I/O in flight; a working device answers within it.
const RESIZE_PATIENCE: Duration = Duration::from_secs(10);

/// Interval at which a waiting hold checks whether it is wanted.
const HOLD_STEP: Duration = Duration::from_millis(50);
const HOLD_STEPS: u128 = RESIZE_PATIENCE.as_millis() / HOLD_STEP.as_millis();

/// Properties shown to clients besides those of the block device.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskOptions<'a> {
    /// Identity; `None`: a new one.
    pub identity: Option<Identity>,
    /// Serial number; `None`: that of the identity, or the digits of `wwn`.
    pub serial: Option<&'a str>,
    /// NAA identifier of 64 bits; `None`: that of the identity.
    pub wwn: Option<u64>,
    /// Physical block size in bytes; `None`: the block device's.
    pub physical_block_size: Option<u32>,
    /// SCSI initiators can eject and load the medium.
    pub removable: bool,
    /// Third-party copies through SCSI targets without the disk may access it.
    pub copy_across_targets: bool,
}

/// A disk that is about to shrink: see [`Disk::begin_shrink`].
#[must_use]
pub struct Shrinking {
    size: u64,
    before: u64,
    /// Lock of the range that is removed.
    _lease: RangeLock,
}

impl Shrinking {
    /// Returns the new size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the old size in bytes.
    pub fn size_before(&self) -> u64 {
        self.before
    }
}

/// Configured values that replace those derived from the identity.
#[derive(Debug)]
struct ConfiguredIdentity {
    serial: Option<String>,
    wwn: Option<u64>,
}

impl ConfiguredIdentity {
    fn serial(&self, identity: Identity) -> String {
        match (&self.serial, self.wwn) {
            (Some(serial), _) => serial.clone(),
            // Two daemons with one disk are given the same identifier; their serial numbers must not differ.
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
    configured: Arc<ConfiguredIdentity>,
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
    turns: Arc<Turns>,
}

/// Turns of a disk that other daemons use, too.
#[derive(Default)]
struct Turns {
    size: SizeKnowledge,
    on_begin: OnceLock<Box<dyn Fn(u64) + Send + Sync>>,
}

impl Turns {
    fn new(device: &dyn BlockDevice) -> Turns {
        match device.capabilities().turns.is_some() {
            true => Turns {
                size: SizeKnowledge::before_turns(),
                ..Turns::default()
            },
            false => Turns::default(),
        }
    }

    fn changed(&self, turn: Turn) {
        match (turn, self.on_begin.get()) {
            (Turn::Begun, Some(on_begin)) => on_begin(self.size.turn()),
            (Turn::Begun, None) => {}
            (Turn::Ending, _) => self.size.end_turn(),
        }
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Turns").field(&self.size).finish()
    }
}

impl Disk {
    /// Creates a disk with a name, a new identity and the block device's properties.
    ///
    /// # Errors
    /// The serial number does not fit into 20 printable ASCII characters.
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

    /// Creates a disk with a name, an identity and visible properties.
    ///
    /// # Errors
    /// An option is invalid, or does not suit the block device.
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
        let presented = device.info();
        let wwn = wwn.map(check_naa).transpose()?;
        let physical_block_size = match physical_block_size {
            Some(found) => check_physical_block_size(found, presented.geometry.block_size())?,
            None => presented.physical_block_size,
        };
        if let Some(found) = serial.filter(|serial| !is_serial(serial)) {
            return Err(OpenError::Serial {
                found: found.to_owned(),
            });
        }
        let configured = ConfiguredIdentity {
            serial: serial.map(str::to_owned),
            wwn,
        };
        let info = DiskInfo {
            physical_block_size,
            ..configured.show(identity.unwrap_or_else(Identity::random), presented)
        };
        let conditions = Arc::<Conditions>::default();
        let locks = RangeLocks::new(conditions.clone());
        locks.set_unit(info.io_alignment);
        let recorder = Arc::new(Recorder::new(conditions.clone()));
        let turns = Arc::new(Turns::new(&*device));
        if let Some(device) = device.capabilities().turns {
            let (recorder, turns) = (Arc::clone(&recorder), Arc::clone(&turns));
            device.on_turn(Box::new(move |turn| {
                // No bitmap records the changes of another process.
                recorder.mark(0, u64::MAX);
                turns.changed(turn);
            }));
        }
        Ok(Disk {
            name: name.into(),
            configured: Arc::new(configured),
            removable,
            copy_across_targets,
            device: Arc::new(DeviceCell::new(device)),
            info: Arc::new(RwLock::new(Arc::new(info))),
            locks: Arc::new(locks),
            throttle: Arc::new(Throttle::new(conditions.clone())),
            recorder,
            errors: Arc::new(ErrorPolicyCell::new(conditions.clone())),
            conditions,
            state: Arc::default(),
            turns,
        })
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns present geometry, abilities and identity. Takes a lock: not for every request.
    pub fn info(&self) -> Arc<DiskInfo> {
        let info = self.info.read().unwrap_or_else(PoisonError::into_inner);
        info.clone()
    }

    /// Changes the identity of a disk without clients; to them it would be another disk.
    pub fn set_identity(&self, identity: Identity) {
        let mut info = self.info.write().unwrap_or_else(PoisonError::into_inner);
        *info = Arc::new(self.configured.show(identity, DiskInfo::clone(&info)));
    }

    /// Grows or shrinks the disk; the caller then notifies transports. May wait for changes in flight beyond a new end.
    ///
    /// # Errors
    /// The size is unchanged.
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
        self.set_size(size);
        Ok(())
    }

    /// Prepares to shrink without data loss: new I/O beyond the new end is refused, and earlier I/O there has ended on return.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn begin_shrink(&self, size: u64) -> Result<Shrinking, ResizeError> {
        let info = self.info();
        check_size(size, size_unit(&info)).map_err(ResizeError::Size)?;
        if info.read_only {
            let source = io::ErrorKind::ReadOnlyFilesystem.into();
            return Err(ResizeError::System { size, source });
        }
        self.end_at(size)
    }

    /// Restores the size of a grown disk, even if read-only.
    ///
    /// # Errors
    /// The disk stays larger.
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

    /// Shrinks the disk and loses the content beyond the new end.
    ///
    /// # Errors
    /// The disk is unchanged.
    pub fn shrink(&self, shrinking: Shrinking) -> Result<(), ResizeError> {
        let size = shrinking.size;
        // Marked before the change of the size, because the content beyond the old end changes with the next growth.
        self.recorder.mark(size, u64::MAX);
        if let Err(source) = self.device().set_size(size) {
            self.stay_large(shrinking);
            return Err(ResizeError::System { size, source });
        }
        self.set_size(size);
        Ok(())
    }

    /// Cancels the shrinking.
    pub fn stay_large(&self, shrinking: Shrinking) {
        self.device().capacity().set(shrinking.before);
    }

    /// Reads the object's present size, so that [`Disk::known_size`] and [`Disk::follow_size`] have it. May block.
    ///
    /// # Errors
    /// The size is invalid for a disk, or unknown.
    pub fn found_size(&self) -> Result<u64, ResizeError> {
        if let Some(remote) = self.device().capabilities().remote {
            remote.read_size().map_err(ResizeError::Unread)?;
        }
        self.size_of_disk(size_of(&*self.device(), |files| files.found_size()))
    }

    /// Returns the object's size as the system last read it. Does not block.
    ///
    /// # Errors
    /// The size is invalid for a disk, or unknown.
    pub fn known_size(&self) -> Result<u64, ResizeError> {
        self.size_of_disk(size_of(&*self.device(), |files| files.known_size()))
    }

    fn size_of_disk(&self, found: io::Result<Option<u64>>) -> Result<u64, ResizeError> {
        let found = self
            .bytes_of(found)?
            .unwrap_or(self.device().capacity().bytes());
        check_size(found, size_unit(&self.info())).map_err(ResizeError::Size)
    }

    /// Reads the object's present size and returns true if it differs from the size shown to clients; false if it is unknown. May block.
    pub fn has_other_size(&self) -> bool {
        let info = self.info();
        let found = size_of(&*self.device(), |files| files.found_size());
        let found = found.ok().flatten();
        let found = found.unwrap_or(self.device().capacity().bytes());
        let found = whole_units(found, &info);
        found != 0 && found != info.geometry.capacity_bytes()
    }

    /// Adopts a size set by others, in whole blocks; `Some` if it has changed. Does not block: see [`Disk::found_size`]. After a reduction
    /// the content beyond the new end is already lost, and I/O there is not waited for. The caller then notifies clients.
    ///
    /// # Errors
    /// No block is left, or the size is unknown. The size is unchanged, and I/O reports the error.
    pub fn follow_size(&self) -> Result<Option<u64>, ResizeError> {
        let before = self.info();
        let device = self.device();
        let capacity = device.capacity();
        let found = self.bytes_of(size_of(&*device, |files| files.known_size()))?;
        let size = whole_units(found.unwrap_or(capacity.bytes()), &before);
        let size = check_size(size, size_unit(&before)).map_err(ResizeError::Size)?;
        if size == before.geometry.capacity_bytes() {
            return Ok(None);
        }
        // A device that tracks its size has set it already, possibly to a newer one.
        if found.is_some() {
            capacity.set(size);
        }
        self.set_size(size);
        Ok(Some(size))
    }

    fn bytes_of(&self, found: io::Result<Option<u64>>) -> Result<Option<u64>, ResizeError> {
        let size = self.info().geometry.capacity_bytes();
        found.map_err(|source| ResizeError::System { size, source })
    }

    fn set_size(&self, size: u64) {
        let before = self.info().geometry.capacity_bytes();
        if size != before {
            // The last bit of the smaller disk also covers bytes beyond its end.
            self.recorder.mark(size.min(before), u64::MAX);
        }
        let mut info = self.info.write().unwrap_or_else(PoisonError::into_inner);
        *info = Arc::new(DiskInfo {
            geometry: Geometry::new(info.geometry.block_size(), size),
            ..DiskInfo::clone(&info)
        });
    }

    /// Holds a range against all reads and changes of clients, after those in flight have ended. Blocks.
    ///
    /// # Errors
    /// I/Os in flight do not end in time.
    pub fn hold(&self, offset: u64, length: u64) -> Result<RangeLock, ResizeError> {
        self.hold_while(offset, length, || true)
    }

    /// As [`Disk::hold`], but gives up soon after `is_wanted` returns false.
    ///
    /// # Errors
    /// I/Os in flight do not end in time, or the range is no longer wanted.
    pub fn hold_while(
        &self,
        offset: u64,
        length: u64,
        is_wanted: impl Fn() -> bool,
    ) -> Result<RangeLock, ResizeError> {
        let (grant, granted) = mpsc::channel();
        let acquisition = self.locks.acquire(offset, length, move |lease| {
            // Without a receiver the lock is dropped, which releases it.
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
        self.locks.withdraw(acquisition);
        Err(ResizeError::Busy { seconds })
    }

    /// Returns true if clients see the present size. Otherwise another daemon may have changed it, and only the device can check ranges.
    pub fn is_size_known(&self) -> bool {
        self.turns.size.is_known()
    }

    /// Registers `on_begin`, called with the number of the turn when the locks were taken on a disk that other daemons use in turns.
    /// [`Disk::size_adopted`] follows. Once per disk; must be quick.
    pub fn on_turn_begin(&self, on_begin: impl Fn(u64) + Send + Sync + 'static) {
        self.turns.on_begin.set(Box::new(on_begin)).ok();
    }

    /// Waits until locks that end with the last use of the disk are released, but not after `until`: [`crate::release_deadline`] at the stop
    /// of a queue. Returns at once if the disk is in use, or is locked always.
    pub fn wait_for_release(&self, until: Duration) {
        if let Some(device) = self.device().capabilities().turns {
            device.wait_for_release(until);
        }
    }

    /// Records that clients see the size of a turn.
    pub fn size_adopted(&self, turn: u64) {
        self.turns.size.adopt(turn);
    }

    /// Returns true if SCSI initiators can eject and load the medium.
    pub fn is_removable(&self) -> bool {
        self.removable
    }

    /// Returns true if third-party copies through SCSI targets without the disk may access it.
    pub fn may_be_copied_across_targets(&self) -> bool {
        self.copy_across_targets
    }

    /// Returns the range locks.
    pub fn range_locks(&self) -> &Arc<RangeLocks> {
        &self.locks
    }

    /// Closes the disk: from now on I/O without [`block::IoFlags::CLOSER`] fails on every transport. I/O with it waits for changes in
    /// flight and is limited in rate, see `closed_pace`. Quick; may be called twice.
    pub fn close(&self) {
        let capacity = self.info().geometry.capacity_bytes();
        self.throttle.set_pace(Some(closed_pace(capacity)));
        self.locks.close();
    }

    /// Reopens the disk.
    pub fn reopen(&self) {
        self.locks.reopen();
        self.throttle.set_pace(None);
    }

    /// Returns the conditions that prevent I/Os from starting at once.
    pub fn conditions(&self) -> &Arc<Conditions> {
        &self.conditions
    }

    /// Sets the rate limits of all exports together, at any time.
    pub fn set_limits(&self, limits: RateLimits) {
        self.throttle.set(limits);
    }

    /// Sets error handling and time limit for I/Os submitted from now on. The caller then resumes the disk on all workers: waiting I/Os
    /// follow the new policy.
    pub fn set_error_policy(&self, policy: ErrorPolicy) {
        self.errors.set(policy);
    }

    /// Returns the handling of failed I/Os.
    pub fn on_error(&self) -> OnError {
        self.errors.on_error()
    }

    /// Returns the time limit of an I/O.
    pub fn io_timeout(&self) -> Option<Duration> {
        self.errors.io_timeout()
    }

    /// Returns the time after which I/O no longer waits for locks that another process has.
    pub fn lock_timeout(&self) -> Option<Duration> {
        self.errors.lock_timeout()
    }

    /// Returns the rate limits that workers enforce.
    pub fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    /// Returns the recorder of changes.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Returns the state of the disk.
    pub fn state(&self) -> &Arc<StateCell> {
        &self.state
    }

    /// Returns the kinds of its layers, from the top down.
    pub fn stack(&self) -> Vec<&'static str> {
        let mut kinds = Vec::new();
        visit_stack(&*self.device(), |device| kinds.push(device.kind()));
        kinds
    }

    /// Returns the present device. Takes a lock: not for every request.
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        self.device.get().0
    }

    /// Returns the present device and the number of earlier ones.
    pub fn device_and_generation(&self) -> (Arc<dyn BlockDevice>, u64) {
        self.device.get()
    }

    /// Checks whether the disk may change to this device ([`Disk::replace_device`]).
    ///
    /// # Errors
    /// A promise to clients that the device does not keep.
    pub fn check_device(&self, device: &dyn BlockDevice) -> Result<(), BrokenPromise> {
        replacement::check(&self.info(), &device.info())
    }

    /// Checks whether a device can hold an unused copy of the disk.
    ///
    /// # Errors
    /// The property that prevents it.
    pub fn check_copy(&self, device: &dyn BlockDevice) -> Result<(), BrokenPromise> {
        let (presented, new) = (self.info(), device.info());
        replacement::check_shape(&presented, &new)
    }

    /// As [`Disk::check_copy`], for a copy that receives the changes of clients.
    ///
    /// # Errors
    /// The property that prevents it.
    pub fn check_mirrored_copy(&self, device: &dyn BlockDevice) -> Result<(), BrokenPromise> {
        replacement::check_mirrored(&self.info(), &device.info())
    }

    /// Withdraws the promise that discarded blocks read as zeroes, which no client has seen.
    pub fn withdraw_discard_zeroes(&self) {
        let mut info = self.info.write().unwrap_or_else(PoisonError::into_inner);
        if info.discard_zeroes {
            *info = Arc::new(DiskInfo {
                discard_zeroes: false,
                ..DiskInfo::clone(&info)
            });
        }
    }

    /// Replaces the device by one with the same content; name and identity stay. The caller holds the whole disk ([`Disk::hold`]) until all
    /// workers have changed.
    ///
    /// # Errors
    /// A promise to clients that the device does not keep. Nothing has changed.
    pub fn replace_device(&self, device: Arc<dyn BlockDevice>) -> Result<(), BrokenPromise> {
        let new = device.info();
        let mut info = self.info.write().unwrap_or_else(PoisonError::into_inner);
        replacement::check(&info, &new)?;
        *info = Arc::new(DiskInfo {
            physical_block_size: info.physical_block_size,
            identity: info.identity,
            serial: info.serial.clone(),
            naa: info.naa,
            // The target of a mirror of a read-only disk is writable.
            read_only: info.read_only,
            // If one device lacked the property, clients do not rely on it, and the next device may lack it too.
            discard_zeroes: info.discard_zeroes && new.discard_zeroes,
            ..new
        });
        self.locks.set_unit(info.io_alignment);
        self.device.set(device);
        Ok(())
    }
}

/// Unit of a disk's size: its logical block, or a larger [`DiskInfo::io_alignment`].
fn size_unit(info: &DiskInfo) -> u32 {
    info.geometry.block_size().max(info.io_alignment)
}

/// Returns the largest valid size of the disk within `bytes`.
fn whole_units(bytes: u64, info: &DiskInfo) -> u64 {
    bytes - bytes % u64::from(size_unit(info))
}

fn is_serial(text: &str) -> bool {
    (1..=SERIAL_BYTES_MAX).contains(&text.len()) && text.bytes().all(|b| matches!(b, b' '..=b'~'))
}

/// Returns the write rate of a closed disk in bytes per second, for its sanitize or format operation.
///
/// A pass over 512 MiB or more takes at least 8 seconds, over less proportionally less. Memory could be overwritten in an instant: too fast
/// for initiators that poll the progress (SBC-4), and the worker would serve no other client. No disk of 1 TiB reaches its 128 GiB/s.
fn closed_pace(capacity: u64) -> u64 {
    const PACE_MIN: u64 = 64 << 20;
    const PASS_SECONDS: u64 = 8;
    (capacity / PASS_SECONDS).max(PACE_MIN)
}

/// Returns the size of a device in files of this host; `None` for other devices.
fn size_of(
    device: &dyn BlockDevice,
    ask: impl Fn(&dyn LocalFiles) -> io::Result<u64>,
) -> io::Result<Option<u64>> {
    device.capabilities().files.map(ask).transpose()
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

    /// 64 MiB/s, or the rate for a pass of 8 seconds.
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
        for (serial, configured, shown, naa) in [
            (None, None, "6f9619ff8b864011b42d", 0x342d_00c0_4fc9_64ff),
            (Some("S"), None, "S", 0x342d_00c0_4fc9_64ff),
            (None, Some(wwn), "5000000000000001", wwn),
            (Some("S"), Some(wwn), "S", wwn),
        ] {
            let disk = with(serial, configured);
            let info = disk.info();
            assert_eq!(
                (info.identity, info.serial.as_str(), info.naa),
                (identity, shown, naa)
            );
            // Configured values stay when the identity changes; the others derive from it.
            disk.resize(2 << 20).unwrap();
            disk.set_identity(b.info().identity);
            let info = disk.info();
            assert_eq!(info.identity, b.info().identity);
            assert_eq!(
                info.serial == shown,
                serial.is_some() || configured.is_some()
            );
            assert_eq!(info.naa == naa, configured.is_some());
            assert_eq!(info.geometry.capacity_bytes(), 2 << 20);
        }
    }

    #[test]
    fn size_change_is_visible_to_all_handles() {
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
