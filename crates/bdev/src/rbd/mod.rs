//! A disk on a Ceph RBD image: one open image for all workers, one channel per worker.
//!
//! The control plane connects, opens and resizes; this may block for seconds and has time-outs. Workers only submit, and receive
//! completions through an eventfd on their ring. While the cluster is away I/O waits; librbd resends it later. Size and discards are those
//! of the image. Tests: `tests/tests/rbd.rs` against a real cluster.

mod cached_changes;
mod channel;
mod errno;
mod lock;
mod medium;
mod peers;
mod presence;
mod record;
mod reopening;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use block::{Capacity, CompareAndWrite, DiskInfo, Geometry};
use librbd::{Cluster, ClusterConfig, Image, ImageName};

use self::cached_changes::CachedChanges;
pub use self::lock::RbdLock;
use self::medium::ImageMedium;
use self::peers::Peers;
use self::presence::Presence;
pub use self::record::{Member, SharedRecord};
use self::reopening::{Availability, LossReason};
use crate::blocking::BlockingCalls;
use crate::error::{check_block_size, check_size};
use crate::turn_lock::{InUse, Users};
use crate::{
    Attach, BlockDevice, Capabilities, DiskState, IoChannel, OpenError, RemoteDevice, SharedState,
    StateMembership, StateObserver,
};

/// Options for opening an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdOptions {
    /// Cluster and user.
    pub cluster: ClusterConfig,
    /// Image or snapshot.
    pub image: ImageName,
    /// Write access of other clients.
    pub lock: RbdLock,
    /// Refuse writes; implied for a snapshot.
    pub read_only: bool,
    /// Logical block size in bytes.
    pub block_size: u32,
}

/// A disk on a Ceph RBD image.
pub struct Rbd {
    shared: Arc<SharedRbd>,
}

/// State shared by the disk and its channels.
pub(super) struct SharedRbd {
    options: RbdOptions,
    /// Open image. Replaced when the image is opened again.
    image: Mutex<Arc<Image>>,
    /// Counts losses and reopenings of the image.
    generation: AtomicU64,
    /// The image is lost and receives no I/O.
    is_closed: AtomicBool,
    availability: Availability,
    presence: Mutex<Option<Presence>>,
    medium: ImageMedium,
    info: DiskInfo,
    size: Size,
    settings: Settings,
    cached: CachedChanges,
    calls: BlockingCalls,
    /// State that daemons share, once an observer has joined.
    peers: Mutex<Option<Arc<Peers>>>,
    users: Users,
    /// This disk holds the lock of its image for a turn. Locked while the lock is taken or released, or the image is replaced.
    is_turn: Mutex<bool>,
}

impl SharedRbd {
    fn image(&self) -> Arc<Image> {
        Arc::clone(&self.image.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn peers(&self) -> Option<Arc<Peers>> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.clone()
    }

    /// Adopts the size of the image, and reports it.
    fn resized(&self, size: u64) {
        self.size.changed(size);
        self.availability.state.notify_change();
    }

    fn set_peers(&self, peers: Option<Arc<Peers>>) {
        *self.peers.lock().unwrap_or_else(PoisonError::into_inner) = peers;
    }

    /// Makes channels refuse I/O from now on.
    fn close_image(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Records an acknowledged change that the cache of the image of this generation may have.
    fn acknowledge(&self, generation: u64) {
        self.cached.acknowledge();
        if generation != self.generation() {
            self.lose_cache();
        }
    }

    /// Fails all flushes from now on if the cache of the lost image may have had changes.
    fn lose_cache(&self) {
        let is_lost = self.settings.write_cache && self.cached.has_unflushed();
        if is_lost && self.cached.durability.lose(libc::EIO) {
            tracing::error!(
                image = %self.options.image,
                "writes in the cache (rbd_cache) may be lost with the image, all flushes fail from now on; hint: check the data, then remove the disk and add it again"
            );
        }
    }

    /// Replaces the image. Channels without I/O in flight switch to it.
    fn replace_image(&self, image: Arc<Image>) {
        *self.image.lock().unwrap_or_else(PoisonError::into_inner) = image;
        // The generation changes before the image opens, so that a channel that finds the image open switches once.
        self.generation.fetch_add(1, Ordering::Release);
        self.is_closed.store(false, Ordering::Release);
    }

    /// Watches size and existence of an image that has this generation or will get it. A snapshot's size does not change.
    fn follow(self: &Arc<SharedRbd>, image: &Arc<Image>, generation: u64) -> Result<(), OpenError> {
        if image.name().snapshot.is_some() {
            return Ok(());
        }
        let shared = Arc::downgrade(self);
        image.watch_size(move |size| {
            let Some(shared) = shared.upgrade() else {
                return;
            };
            match size {
                Ok(size) => shared.resized(size),
                Err(error) => {
                    tracing::warn!("{error}");
                    if let Some(lost) = LossReason::of_errno(error.errno()) {
                        shared.lose(generation, lost);
                    }
                }
            }
        })?;
        let presence = presence::follow(Arc::downgrade(self), image, self.medium.id(), generation)?;
        let mut followed = self.presence.lock().unwrap_or_else(PoisonError::into_inner);
        *followed = Some(presence);
        Ok(())
    }
}

/// Image settings that determine the properties reported to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    /// Writes complete before they are on stable storage.
    write_cache: bool,
    /// Discards smaller than the granularity have no effect.
    skips_discards: bool,
}

impl Settings {
    fn of(image: &Arc<Image>) -> Result<Settings, OpenError> {
        let is_on = |key| {
            let option = image.option(key)?;
            Ok::<_, OpenError>(option.is_some_and(|(value, _)| value == "true"))
        };
        Ok(Settings {
            write_cache: is_on("rbd_cache")?,
            skips_discards: is_on("rbd_skip_partial_discard")?,
        })
    }

    /// Returns true if promises under the settings `before` still hold.
    fn keep(&self, before: &Settings) -> bool {
        self.write_cache <= before.write_cache && self.skips_discards <= before.skips_discards
    }
}

/// Size of the disk.
struct Size {
    geometry: Geometry,
    capacity: Arc<Capacity>,
}

impl Size {
    fn changed(&self, size: u64) {
        let size = self.geometry.resized(size).capacity_bytes();
        let before = self.capacity.bytes();
        if size != before {
            tracing::info!(before, size, "size of RBD image changed");
            self.capacity.set(size);
        }
    }
}

/// Size and alignment in bytes that avoid read-modify-write: BlueStore's default allocation unit.
const PHYSICAL_BLOCK_SIZE: u32 = 4096;

impl Rbd {
    /// Opens the image; connects unless a disk with the same cluster, user and options has. May take some seconds.
    ///
    /// # Errors
    /// The cluster cannot be reached, or the image cannot be opened; with a hint.
    pub fn open(options: &RbdOptions) -> Result<Rbd, OpenError> {
        let block_size = check_block_size(options.block_size)?;
        let cluster = Cluster::connect(&options.cluster)?;
        let image = Image::open(&cluster, &options.image, options.read_only)?;
        let shape = image.shape()?;
        let geometry = Geometry::new(block_size, shape.size);
        check_size(geometry.capacity_bytes(), block_size)?;
        let settings = Settings::of(&image)?;
        lock::take(&image, options.lock, &shape, settings.write_cache, false)?;
        let granularity = image.option("rbd_discard_granularity_bytes")?;
        let granularity = match granularity.and_then(|(value, _)| value.parse().ok()) {
            Some(bytes) if settings.skips_discards => bytes,
            _ => PHYSICAL_BLOCK_SIZE,
        };
        let info = DiskInfo {
            geometry,
            physical_block_size: PHYSICAL_BLOCK_SIZE,
            io_alignment: block::SECTOR_BYTES,
            optimal_io_size: u32::try_from(shape.stripe_unit).unwrap_or(0),
            read_only: image.is_read_only(),
            write_cache: settings.write_cache,
            discard_granularity: Some(granularity.max(block_size)),
            discard_zeroes: !settings.skips_discards,
            write_zeroes: image.can_write_zeroes(),
            anchors: false,
            atomic_writes: None,
            compare_and_write: compare_and_write(block_size),
            shared: options.lock == RbdLock::Shared,
            rotational: false,
            passthrough: None,
            identity: block::Identity::UNSET,
            serial: String::new(),
            naa: 0,
        };
        let size = Size {
            geometry,
            capacity: Arc::new(Capacity::new(geometry.capacity_bytes())),
        };
        let shared = Arc::new(SharedRbd {
            options: options.clone(),
            medium: ImageMedium::of(&image)?,
            image: Mutex::new(Arc::clone(&image)),
            generation: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            availability: Availability::default(),
            presence: Mutex::default(),
            info,
            size,
            settings,
            cached: CachedChanges::default(),
            calls: BlockingCalls::default(),
            peers: Mutex::default(),
            users: Users::new(options.lock == RbdLock::WhileActive),
            is_turn: Mutex::default(),
        });
        shared.start_reopening().map_err(|error| OpenError::Image {
            image: options.image.to_string(),
            reason: format!("cannot start a thread: {error}"),
        })?;
        shared.follow(&image, 0)?;
        Ok(Rbd { shared })
    }
}

/// Bytes that every librbd release compares and writes: one sector. Newer ones take up to a stripe unit but do not report it.
const SECTOR: u32 = 512;

/// Returns the compare-and-write of an image with this block size. One OSD operation compares and writes, so it is atomic for all
/// clients.
fn compare_and_write(block_size: u32) -> Option<CompareAndWrite> {
    let boundary = u64::from(SECTOR);
    (block_size == SECTOR).then_some(CompareAndWrite::Device { boundary })
}

impl BlockDevice for Rbd {
    fn info(&self) -> DiskInfo {
        let size = self.shared.size.capacity.bytes();
        self.shared.info.resized(size)
    }

    fn capacity(&self) -> &Arc<Capacity> {
        &self.shared.size.capacity
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        if self.shared.info.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        // Without a turn, librbd would acquire the lock and keep it.
        let _in_use = InUse::begin(self.shared.clone())?;
        let image = self.shared.image();
        let is = image.shape()?.size;
        // Another client may have resized the image already.
        if is != bytes {
            image.resize(bytes)?;
        }
        Ok(())
    }

    fn kind(&self) -> &'static str {
        "rbd"
    }

    fn capabilities(&self) -> Capabilities<'_> {
        let info = &self.shared.info;
        let is_shared = info.shared && !info.read_only;
        Capabilities {
            medium: Some(self.shared.medium.medium()),
            turns: self.shared.users.decide().then_some(self as _),
            remote: Some(self),
            shared_state: is_shared.then_some(self as &dyn SharedState),
            ..Capabilities::NONE
        }
    }

    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let channel = channel::RbdChannel::new(Arc::clone(&self.shared), attach)?;
        Ok(Box::new(channel))
    }
}

impl RemoteDevice for Rbd {
    fn state(&self) -> DiskState {
        self.shared.availability.state.get()
    }

    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        self.shared.availability.state.on_change(changed);
    }
}

impl SharedState for Rbd {
    fn join(&self, observer: Arc<dyn StateObserver>) -> StateMembership {
        peers::join(&self.shared, observer)
    }

    fn unknown(&self) -> Option<String> {
        self.shared.peers()?.unknown()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compare_and_write_is_of_one_sector() {
        let device = Some(CompareAndWrite::Device { boundary: 512 });
        assert_eq!(compare_and_write(512), device);
        assert_eq!(compare_and_write(4096), None);
    }
}
