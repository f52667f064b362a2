//! An open image, shared by all workers: two handles of one process would take the exclusive lock from each other.
//!
//! The control plane opens, queries, resizes and closes it, with timeouts. I/O uses a [`Channel`](crate::Channel) per worker.

use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use block::ImageName;

use crate::cluster::{CALL_LIMIT, Handle, c_text, owned_text};
use crate::deadline::within;
use crate::error::check;
use crate::raw::{self, Library, text_in};
use crate::{Cluster, Error, Pool};

/// Maximum time to wait for an image to close; after that it closes in the background.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);

/// Geometry and features of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageShape {
    /// Size in bytes.
    pub size: u64,
    /// Bytes per object.
    pub object_size: u64,
    /// Consecutive bytes in one object.
    pub stripe_unit: u64,
    /// `RBD_FEATURE_*`.
    pub features: u64,
    /// `RBD_FLAG_*`.
    pub flags: u64,
}

/// Mode of the exclusive lock: `rbd_lock_mode_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// A single holder.
    Exclusive,
    /// Several holders in this mode.
    Shared,
}

/// A range of an image that has data, or had data at the time of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// True for data, false for a hole that was data before.
    pub exists: bool,
}

/// An open image.
pub struct Image {
    pool: Arc<Pool>,
    handle: raw::Image,
    name: ImageName,
    read_only: bool,
    watch: Mutex<Option<Watch>>,
    /// Cloned by calls that list extents, including those that timed out and still run.
    listing: Arc<()>,
}

/// Maximum concurrent lists of extents, including those that timed out.
const LISTINGS_MAX: usize = 4;

// SAFETY: librbd locks the shared state of a handle; all its functions may be called on any thread.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

struct Watch {
    number: u64,
    /// Sender that librbd's callback has a pointer to.
    changed: Arc<SyncSender<()>>,
}

impl Image {
    /// Opens an image; a snapshot is read-only.
    ///
    /// # Errors
    /// Pool, image or snapshot missing, no permission, or a timeout.
    pub fn open(
        cluster: &Arc<Cluster>,
        name: &ImageName,
        read_only: bool,
    ) -> Result<Arc<Image>, Error> {
        let (cluster, wanted) = (Arc::clone(cluster), name.clone());
        within(CALL_LIMIT, &format!("open image {name}"), move || {
            Image::make(cluster, wanted, read_only).map(Arc::new)
        })
    }

    fn make(cluster: Arc<Cluster>, name: ImageName, read_only: bool) -> Result<Image, Error> {
        let library = cluster.library();
        let pool = Pool::make(cluster, &name.pool, name.namespace.as_deref())?;
        let image = c_text("image", &name.image)?;
        let snapshot = name.snapshot.as_deref();
        let snapshot = snapshot.map(|text| c_text("snapshot", text)).transpose()?;
        let snapshot = snapshot.as_ref().map_or(std::ptr::null(), |s| s.as_ptr());
        let read_only = read_only || name.snapshot.is_some();
        let open = if read_only {
            library.rbd_open_read_only
        } else {
            library.rbd_open
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: a context; texts that end with NUL (no snapshot: null) and a valid pointer for the result, which outlive the call.
        let opened = unsafe { open(pool.handle(), image.as_ptr(), &mut handle, snapshot) };
        check(opened, |errno| {
            Error::failed(format!("open image {name}"), errno, open_hint(errno, &name))
        })?;
        Ok(Image {
            pool: Arc::new(pool),
            handle,
            name,
            read_only,
            watch: Mutex::new(None),
            listing: Arc::new(()),
        })
    }

    /// Name of the image.
    pub fn name(&self) -> &ImageName {
        &self.name
    }

    /// Returns true if the image was opened read-only.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Connection that it was opened through.
    pub fn cluster(&self) -> &Arc<Cluster> {
        self.pool.cluster()
    }

    /// Number of its pool, which stays the same when the pool is renamed.
    pub fn pool_id(&self) -> i64 {
        // SAFETY: a context; the call does not contact the cluster.
        unsafe { (self.library().rados_ioctx_get_id)(self.pool.handle()) }
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.pool.cluster().library()
    }

    pub(crate) fn handle(&self) -> raw::Image {
        self.handle
    }

    /// Returns true if librbd supports writing zeroes without data.
    pub fn can_write_zeroes(&self) -> bool {
        self.library().rbd_aio_write_zeroes.is_some()
    }

    fn bounded<T: Send + 'static>(
        self: &Arc<Image>,
        verb: &str,
        work: impl FnOnce(&Image, &dyn Fn(i32) -> Error) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let image = Arc::clone(self);
        let operation = format!("{verb} image {}", self.name);
        let failed = operation.clone();
        within(CALL_LIMIT, &operation, move || {
            work(&image, &|errno| Error::failed(failed.clone(), errno, ""))
        })
    }

    /// Reads the current size, geometry and features.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn shape(self: &Arc<Image>) -> Result<ImageShape, Error> {
        self.bounded("read the header of", |image, failed| {
            let library = image.library();
            let mut info = raw::ImageInfo::EMPTY;
            let (mut stripe_unit, mut features, mut flags) = (0, 0, 0);
            // SAFETY: an open image, and valid pointers for the results; the structure's length is given.
            unsafe {
                check(
                    (library.rbd_stat)(image.handle, &mut info, size_of::<raw::ImageInfo>()),
                    failed,
                )?;
                check(
                    (library.rbd_get_stripe_unit)(image.handle, &mut stripe_unit),
                    failed,
                )?;
                check(
                    (library.rbd_get_features)(image.handle, &mut features),
                    failed,
                )?;
                check((library.rbd_get_flags)(image.handle, &mut flags), failed)?;
            }
            Ok(ImageShape {
                size: info.size,
                object_size: info.object_size,
                stripe_unit,
                features,
                flags,
            })
        })
    }

    /// Reads the current size in bytes. Blocks.
    fn size(&self) -> Result<u64, Error> {
        let mut size = 0;
        // SAFETY: an open image, and a valid pointer for the result.
        let result = unsafe { (self.library().rbd_get_size)(self.handle, &mut size) };
        check(result, |errno| {
            Error::failed(format!("read the size of image {}", self.name), errno, "")
        })?;
        Ok(size)
    }

    /// Reads the image's identifier within its pool, which stays the same when the image is renamed.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn id(self: &Arc<Image>) -> Result<String, Error> {
        self.bounded("read the id of", |image, failed| {
            let mut id = [0_u8; 128];
            // SAFETY: an open image, and a buffer with its length.
            let result = unsafe {
                (image.library().rbd_get_id)(image.handle, id.as_mut_ptr().cast(), id.len())
            };
            check(result, failed)?;
            Ok(text_in(&id))
        })
    }

    /// Reads the number of the snapshot that was opened; `None` if the image itself was opened. A removed snapshot and a new one with
    /// the same name have different numbers.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn snapshot_id(self: &Arc<Image>) -> Result<Option<u64>, Error> {
        let Some(snapshot) = &self.name.snapshot else {
            return Ok(None);
        };
        let snapshot = c_text("snapshot", snapshot)?;
        self.bounded("read the snapshot of", move |image, failed| {
            let mut id = 0;
            // SAFETY: an open image, a text that ends with NUL, and a valid pointer for the result.
            let result = unsafe {
                (image.library().rbd_snap_get_id)(image.handle, snapshot.as_ptr(), &mut id)
            };
            check(result, failed)?;
            Ok(Some(id))
        })
    }

    /// Grows or shrinks the image. Shrinking removes objects and may take long; after the timeout it continues in the background.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn resize(self: &Arc<Image>, size: u64) -> Result<(), Error> {
        self.bounded("resize", move |image, failed| {
            unsafe extern "C" fn ignore(_done: u64, _of: u64, _argument: *mut c_void) -> c_int {
                0
            }
            // SAFETY: an open image; the callback reads none of its arguments.
            let resized = unsafe {
                (image.library().rbd_resize2)(
                    image.handle,
                    size,
                    true,
                    ignore,
                    std::ptr::null_mut(),
                )
            };
            check(resized, failed).map(|_| ())
        })
    }

    /// Calls `changed` with the size whenever a client changed the image's header, and with an error when the size cannot be read; on a
    /// separate thread.
    ///
    /// # Errors
    /// Ceph's error, a timeout, or `EALREADY` for a second watch.
    pub fn watch_size(
        self: &Arc<Image>,
        changed: impl Fn(Result<u64, Error>) + Send + 'static,
    ) -> Result<(), Error> {
        unsafe extern "C" fn notified(argument: *mut c_void) {
            // SAFETY: the sender has a stable address, and is dropped only after the watch has ended.
            let sender = unsafe { &*argument.cast::<SyncSender<()>>() };
            // If the channel is full, a check is pending already. librbd must not be called from here.
            sender.try_send(()).ok();
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let watched = Arc::downgrade(self);
        let spawned = std::thread::Builder::new()
            .name("rbd-watch".to_owned())
            .spawn(move || {
                while receiver.recv().is_ok() {
                    let Some(image) = watched.upgrade() else {
                        return;
                    };
                    changed(image.size());
                }
            });
        spawned.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
            Error::failed(format!("watch image {}", self.name), errno, "")
        })?;
        self.bounded("watch", move |image, failed| {
            let mut watch = image.watch.lock().unwrap_or_else(PoisonError::into_inner);
            if watch.is_some() {
                return Err(failed(libc::EALREADY));
            }
            let sender = Arc::new(sender);
            let argument = Arc::as_ptr(&sender).cast_mut().cast();
            let mut number = 0;
            // SAFETY: an open image. The sender outlives the watch: `Drop` ends the watch before it drops the sender, or leaks
            // the sender.
            let watching = unsafe {
                (image.library().rbd_update_watch)(image.handle, &mut number, notified, argument)
            };
            check(watching, failed)?;
            *watch = Some(Watch {
                number,
                changed: sender,
            });
            Ok(())
        })
    }

    /// Reads one of librbd's options for this image. The flag is true if the pool or the image sets it.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn option(self: &Arc<Image>, key: &'static str) -> Result<Option<(String, bool)>, Error> {
        self.bounded("read the options of", move |image, failed| {
            let library = image.library();
            let empty = raw::ConfigOption {
                name: std::ptr::null_mut(),
                value: std::ptr::null_mut(),
                source: 0,
            };
            let mut options = vec![empty; 256];
            loop {
                let mut count = options.len() as c_int;
                // SAFETY: an open image, and space for `count` entries.
                let listed = unsafe {
                    (library.rbd_config_image_list)(image.handle, options.as_mut_ptr(), &mut count)
                };
                let filled = usize::try_from(count).unwrap_or(0);
                if listed == -libc::ERANGE && filled > options.len() {
                    options.resize(filled, empty);
                    continue;
                }
                check(listed, failed)?;
                let found = options.iter().take(filled).find_map(|option| {
                    // SAFETY: librbd has filled these entries with texts that end with NUL.
                    let (name, value) =
                        unsafe { (owned_text(option.name), owned_text(option.value)) };
                    (name == key).then_some((value, option.source != 0))
                });
                // SAFETY: exactly the entries that librbd has filled, once.
                unsafe { (library.rbd_config_image_list_cleanup)(options.as_mut_ptr(), count) };
                return Ok(found);
            }
        })
    }

    /// Returns the pieces of a range that have data, with the granularity of objects if the image has an object map, otherwise finer.
    /// The rest are holes.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn allocated(self: &Arc<Image>, offset: u64, length: u64) -> Result<Vec<Piece>, Error> {
        unsafe extern "C" fn note(
            offset: u64,
            length: usize,
            exists: c_int,
            argument: *mut c_void,
        ) -> c_int {
            // SAFETY: the list below, which outlives the call; librbd does not call back concurrently.
            let pieces = unsafe { &mut *argument.cast::<Vec<Piece>>() };
            pieces.push(Piece {
                offset,
                length: length as u64,
                exists: exists != 0,
            });
            0
        }
        let verb = "list the extents of";
        let listing = Arc::clone(&self.listing);
        if Arc::strong_count(&listing) > LISTINGS_MAX + 1 {
            return Err(Error::timed_out(
                format!("{verb} image {}", self.name),
                CALL_LIMIT,
            ));
        }
        self.bounded(verb, move |image, failed| {
            let _listing = listing;
            let mut pieces: Vec<Piece> = Vec::new();
            // SAFETY: an open image; null compares with its creation. The list outlives the call.
            let listed = unsafe {
                (image.library().rbd_diff_iterate2)(
                    image.handle,
                    std::ptr::null(),
                    offset,
                    length,
                    1,
                    0,
                    note,
                    std::ptr::from_mut(&mut pieces).cast(),
                )
            };
            check(listed, failed)?;
            pieces.sort_by_key(|piece| piece.offset);
            Ok(pieces)
        })
    }

    /// Returns true if this client holds the exclusive lock.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn holds_lock(self: &Arc<Image>) -> Result<bool, Error> {
        self.bounded("read the lock of", |image, failed| {
            let mut holds = 0;
            // SAFETY: an open image, and a valid pointer for the result.
            let result =
                unsafe { (image.library().rbd_is_exclusive_lock_owner)(image.handle, &mut holds) };
            check(result, failed)?;
            Ok(holds != 0)
        })
    }

    /// Acquires the exclusive lock permanently: librbd stops handing it over on request.
    ///
    /// # Errors
    /// Ceph's error (`EBUSY`, `EROFS`: held by another client), or a timeout.
    pub fn acquire_lock(self: &Arc<Image>, mode: LockMode) -> Result<(), Error> {
        self.bounded("lock", move |image, _| image.wait_for_lock(mode))
    }

    /// Acquires the lock like [`Image::acquire_lock`], without a timeout: after a timeout librbd could still acquire it.
    ///
    /// # Errors
    /// Ceph's error (`EBUSY`, `EROFS`: held by another client).
    pub fn wait_for_lock(&self, mode: LockMode) -> Result<(), Error> {
        let mode = match mode {
            LockMode::Exclusive => 0,
            LockMode::Shared => 1,
        };
        // SAFETY: an open image.
        let locked = unsafe { (self.library().rbd_lock_acquire)(self.handle, mode) };
        check(locked, |errno| match errno {
            libc::EBUSY | libc::EROFS => {
                let (operation, hint) = (
                    format!("lock image {}, which another client holds", self.name),
                    format!("see `rbd lock ls {}`", self.name),
                );
                Error::failed(operation, errno, hint)
            }
            _ => Error::failed(format!("lock image {}", self.name), errno, ""),
        })
        .map(|_| ())
    }

    /// Flushes librbd's cache and releases the lock. Later writes fail until the lock is acquired again.
    ///
    /// # Errors
    /// Ceph's error, `EINVAL` without the lock, or a timeout.
    pub fn release_lock(self: &Arc<Image>) -> Result<(), Error> {
        self.bounded("unlock", |image, _| image.wait_for_unlock())
    }

    /// Releases the lock like [`Image::release_lock`], without a timeout.
    ///
    /// # Errors
    /// Ceph's error, or `EINVAL` without the lock.
    pub fn wait_for_unlock(&self) -> Result<(), Error> {
        // SAFETY: an open image.
        let released = unsafe { (self.library().rbd_lock_release)(self.handle) };
        check(released, |errno| {
            Error::failed(format!("unlock image {}", self.name), errno, "")
        })
        .map(|_| ())
    }

    /// Returns the holders of the lock.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn lock_owners(self: &Arc<Image>) -> Result<Vec<String>, Error> {
        self.bounded("read the lock owners of", |image, failed| {
            let library = image.library();
            let mut owners = [std::ptr::null_mut::<c_char>(); 8];
            let (mut mode, mut count) = (0, owners.len());
            // SAFETY: an open image, and valid pointers for the results.
            let result = unsafe {
                (library.rbd_lock_get_owners)(
                    image.handle,
                    &mut mode,
                    owners.as_mut_ptr(),
                    &mut count,
                )
            };
            if result == -libc::ENOENT {
                return Ok(Vec::new());
            }
            check(result, failed)?;
            let filled = owners.get(..count).unwrap_or_default();
            // SAFETY: librbd has filled these entries with texts that end with NUL.
            let names = filled.iter().map(|owner| unsafe { owned_text(*owner) });
            let names = names.collect();
            // SAFETY: exactly the entries that librbd has filled, once.
            unsafe { (library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
            Ok(names)
        })
    }

    /// Reads a value of the image's metadata.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn metadata(self: &Arc<Image>, key: &str) -> Result<Option<String>, Error> {
        let key = c_text("key", key)?;
        self.bounded("read metadata of", move |image, failed| {
            let mut value = vec![0_u8; 4096];
            loop {
                let mut length = value.len();
                // SAFETY: an open image, a text that ends with NUL, and a buffer with its length.
                let result = unsafe {
                    (image.library().rbd_metadata_get)(
                        image.handle,
                        key.as_ptr(),
                        value.as_mut_ptr().cast(),
                        &mut length,
                    )
                };
                match result {
                    code if code == -libc::ENOENT => return Ok(None),
                    code if code == -libc::ERANGE && length >= value.len() => {
                        value.resize(length + 1, 0);
                    }
                    code => {
                        check(code, failed)?;
                        return Ok(Some(text_in(&value)));
                    }
                }
            }
        })
    }

    /// Sets a value of the image's metadata; `None` removes it.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn set_metadata(self: &Arc<Image>, key: &str, value: Option<&str>) -> Result<(), Error> {
        let key = c_text("key", key)?;
        let value = value.map(|text| c_text("value", text)).transpose()?;
        self.bounded("write metadata of", move |image, failed| {
            let library = image.library();
            let set = match &value {
                // SAFETY: an open image, and texts that end with NUL.
                Some(value) => unsafe {
                    (library.rbd_metadata_set)(image.handle, key.as_ptr(), value.as_ptr())
                },
                // SAFETY: as above.
                None => unsafe { (library.rbd_metadata_remove)(image.handle, key.as_ptr()) },
            };
            check(set, failed).map(|_| ())
        })
    }
}

fn open_hint(errno: i32, name: &ImageName) -> String {
    let mut place = name.pool.clone();
    if let Some(namespace) = &name.namespace {
        place = format!("{place}/{namespace}");
    }
    match errno {
        libc::ENOENT if name.snapshot.is_some() => {
            format!("see `rbd snap ls {place}/{}`", name.image)
        }
        libc::ENOENT => format!("see `lunette rbd list {place}`"),
        libc::EPERM | libc::EACCES => {
            "the user needs the capability `profile rbd` for mon and osd".to_owned()
        }
        libc::ESHUTDOWN => "see `ceph osd blocklist ls`".to_owned(),
        _ => String::new(),
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let watch = self.watch.get_mut();
        let watch = watch.unwrap_or_else(PoisonError::into_inner).take();
        let (library, handle) = (self.library(), Handle(self.handle));
        let name = self.name.clone();
        // If no thread can be started, the image stays open. Then librbd still uses the sender, the pool and the cluster, so they are
        // leaked with the closure.
        let used = ManuallyDrop::new((watch, Arc::clone(&self.pool)));
        let closed = within(
            CLOSE_LIMIT,
            &format!("close image {}", self.name),
            move || {
                let handle = handle;
                let (watch, pool) = ManuallyDrop::into_inner(used);
                if let Some(Watch { number, changed }) = watch {
                    // SAFETY: an open image. The callback does not run after this returns.
                    let ended = unsafe { (library.rbd_update_unwatch)(handle.0, number) };
                    if ended < 0 {
                        // librbd may still call back.
                        std::mem::forget(changed);
                    }
                }
                // SAFETY: opened once, closed once; I/O in flight holds the image.
                let closed = unsafe { (library.rbd_close)(handle.0) };
                drop(pool);
                check(closed, |errno| {
                    Error::failed(format!("close image {name}"), errno, "")
                })
            },
        );
        if let Err(error) = closed {
            tracing::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_is_missing_is_looked_for_with_a_command() {
        let name = ImageName::parse("p/n/i").unwrap();
        assert_eq!(open_hint(libc::ENOENT, &name), "see `lunette rbd list p/n`");
    }
}
