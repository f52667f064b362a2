//! `image`: a disk in a qcow2 image, in a file or on a block device, with its backing images.
//!
//! Workers read the tables without a lock ([`qcow2::Map`]) and move data through the file like a raw disk (`channel`). The owner thread
//! changes the tables (`owner`). Released clusters become free after the I/O that may access them (`readers`). The crate `qcow2` orders
//! writes so that a crash leaves a consistent image. Tests: `tests/image.rs`, `tests/model.rs`.

mod backing_link;
mod channel;
mod commit;
mod data_file;
mod names;
mod open;
mod overlay;
mod owner;
mod readers;
mod remote_backing;
#[cfg(feature = "simulated")]
pub mod stepped;
mod turns;

use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use block::{Capacity, DiskInfo, IoFlags, IoRequest};
use latency::Clock;
use qcow2::Map;

use crate::turn_lock::log_late_release;
use crate::{
    Attach, BlockDevice, CacheMode, Capabilities, CopiedUp, File, FileLock, ImageDevice, IoChannel,
    LocalFiles, Lockable, OnTurn, OpenError, Space, Turn, TurnDevice,
};
use backing_link::BackingLink;
pub use commit::Committable;
pub use data_file::{backing_path_of, data_file_of, identity_of};
pub use names::{BackingFormat, BackingImage, CheckNamed, NamedFiles, backing_named, backing_of};
pub use open::{CHAIN_MAX, STACK_BYTES, open_tables};
pub use overlay::BackingName;
use owner::{Change, Request};
use readers::Readers;
pub use remote_backing::{is_remote, open_remote};

/// Options for opening an image.
#[derive(Clone, Debug)]
pub struct ImageOptions {
    /// Path of a file or block device.
    pub path: PathBuf,
    /// Cache mode of all files of the image.
    pub cache: CacheMode,
    /// Refuse writes, and permit other readers.
    pub read_only: bool,
    /// Bytes per logical block; 512 by default.
    pub block_size: Option<u32>,
    /// Path of the external data file, if any; overrides the name in the image.
    pub data_file: Option<PathBuf>,
    /// Permits writing to the data file that the image names, if it lies in the image's folder. For tools with a known image. Otherwise the
    /// name is accepted for reading only.
    pub trusts_name: bool,
    /// Policy for files named by the image and its backing images.
    pub named_files: NamedFiles,
    /// Duration of the locks of the image and its data file.
    pub lock: FileLock,
}

impl ImageOptions {
    /// Returns options for a writable image with direct I/O.
    pub fn new(path: &Path) -> ImageOptions {
        ImageOptions {
            path: path.to_owned(),
            cache: CacheMode::None,
            read_only: false,
            block_size: None,
            data_file: None,
            trusts_name: false,
            named_files: NamedFiles::Any,
            lock: FileLock::Always,
        }
    }
}

/// Tables that workers read. Each change of the owner that replaces them has a number.
struct PublishedMap {
    current: Mutex<Arc<Map>>,
    number: AtomicU64,
}

impl PublishedMap {
    fn new(map: Arc<Map>) -> PublishedMap {
        PublishedMap {
            current: Mutex::new(map),
            number: AtomicU64::new(0),
        }
    }

    #[inline]
    fn number(&self) -> u64 {
        self.number.load(Ordering::Acquire)
    }

    fn current(&self) -> (u64, Arc<Map>) {
        let map = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        (self.number(), Arc::clone(&map))
    }

    fn publish(&self, new: Arc<Map>) {
        let mut map = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        *map = new;
        self.number.fetch_add(1, Ordering::AcqRel);
    }
}

/// Damage of an image that was found since it was opened, or before.
struct Damage {
    is_reported: AtomicBool,
    /// The image is marked as corrupt: changes are refused.
    is_corrupt: AtomicBool,
}

impl Damage {
    fn new(is_corrupt: bool) -> Damage {
        Damage {
            is_reported: AtomicBool::new(false),
            is_corrupt: AtomicBool::new(is_corrupt),
        }
    }
}

/// State shared by the owner and all workers.
struct SharedImage {
    file: File,
    /// External data file, if any.
    data_file: Option<File>,
    info: DiskInfo,
    capacity: Arc<Capacity>,
    cache: CacheMode,
    /// See [`ImageOptions::named_files`].
    named_files: NamedFiles,
    backing: BackingLink,
    /// Clusters over the backing image can be zeroed in the tables.
    can_zero: bool,
    map: PublishedMap,
    readers: Readers,
    damage: Damage,
    /// The owner has not read the image since the locks were taken: the size may have changed. Only for images used in turns.
    is_unread: AtomicBool,
    /// See [`crate::TurnDevice::on_turn`].
    on_turn: OnceLock<OnTurn>,
}

impl SharedImage {
    /// Returns the file that stores the data.
    fn data(&self) -> &File {
        self.data_file.as_ref().unwrap_or(&self.file)
    }

    fn is_unread(&self) -> bool {
        self.is_unread.load(Ordering::Acquire)
    }

    fn turn(&self, turn: Turn) {
        self.is_unread
            .store(turn == Turn::Ending, Ordering::Release);
        if let Some(on_turn) = self.on_turn.get() {
            on_turn(turn);
        }
    }

    /// Returns the image file and the external data file.
    fn files(&self) -> impl Iterator<Item = &File> {
        std::iter::once(&self.file).chain(&self.data_file)
    }

    fn path(&self) -> std::path::Display<'_> {
        self.file.path().display()
    }

    fn is_durable(&self, io: &IoRequest) -> bool {
        io.modifies() && (io.flags.has(IoFlags::FUA) || self.cache == CacheMode::Writethrough)
    }

    #[cold]
    fn make_read_only(&self, why: &str, map: impl FnOnce() -> Arc<Map>) {
        if self.damage.is_corrupt.swap(true, Ordering::Relaxed) {
            return;
        }
        self.map.publish(map());
        let path = self.path();
        tracing::error!(
            %path,
            "image marked as corrupt, all writes fail: {why}; hint: remove the disk, then lunette image check --repair all {path}"
        );
    }

    #[cold]
    fn report_corruption(&self, reason: &str) {
        if !self.damage.is_reported.swap(true, Ordering::Relaxed) {
            let path = self.path();
            tracing::error!(
                %path,
                "image is damaged, I/O to the damaged part fails: {reason}; hint: remove the disk, then lunette image check {path}"
            );
        }
    }
}

thread_local! {
    /// Backing images that this thread still has to drop, during a drop.
    static DROPPED: RefCell<Option<Vec<Arc<dyn BlockDevice>>>> = const { RefCell::new(None) };
}

impl Drop for SharedImage {
    /// Drops a chain in a loop: recursion could overflow the stack.
    fn drop(&mut self) {
        let Some(backing) = self.backing.take() else {
            return;
        };
        let is_nested = DROPPED.with_borrow_mut(|dropped| match dropped {
            Some(dropped) => {
                dropped.push(Arc::clone(&backing));
                true
            }
            None => {
                *dropped = Some(Vec::new());
                false
            }
        });
        if is_nested {
            return;
        }
        let mut next = Some(backing);
        while let Some(device) = next {
            drop(device);
            next = DROPPED.with_borrow_mut(|dropped| dropped.as_mut().and_then(Vec::pop));
        }
        DROPPED.set(None);
    }
}

/// The block device `image`.
pub struct Image {
    shared: Arc<SharedImage>,
    requests: Option<Sender<Request>>,
    owner: Option<JoinHandle<()>>,
    /// Answer to [`Change::AwaitRelease`] that has not come in time.
    late: Mutex<Option<LateAnswer>>,
}

type LateAnswer = Receiver<io::Result<()>>;

impl Image {
    /// Opens an image and its backing images.
    ///
    /// # Errors
    /// A file cannot be opened or is not supported; with a hint.
    pub fn open(options: &ImageOptions) -> Result<Image, OpenError> {
        Image::serve(open::open(options)?)
    }

    /// Starts the owner thread of an open image.
    fn serve(opened: open::Opened) -> Result<Image, OpenError> {
        let path = opened.shared.file.path().to_owned();
        let (requests, waiting) = channel();
        let shared = Arc::clone(&opened.shared);
        #[cfg(feature = "simulated")]
        if uring::simulated::Files::are_simulated() {
            let started = opened.start();
            let failed = |error: io::Error| OpenError::File {
                path,
                reason: format!("cannot read its backing image: {error}"),
            };
            stepped::add(started.map_err(failed)?, waiting);
            return Ok(Image {
                shared,
                requests: Some(requests),
                owner: None,
                late: Mutex::default(),
            });
        }
        let thread = std::thread::Builder::new()
            .name("image-owner".to_owned())
            .stack_size(STACK_BYTES);
        let (started, has_started) = channel();
        let spawned = thread.spawn(move || match opened.start() {
            Ok(owner) => match sandbox::confine(sandbox::Thread::Device) {
                Ok(()) => {
                    started.send(Ok(())).ok();
                    owner.run(&waiting);
                }
                Err(error) => {
                    started.send(Err(error.into())).ok();
                }
            },
            Err(error) => {
                started.send(Err(error)).ok();
            }
        });
        let failed = |reason: String| OpenError::File {
            path: path.clone(),
            reason,
        };
        let owner = spawned.map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        match has_started.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                return Err(failed(format!("cannot read its backing image: {error}")));
            }
            Err(_) => return Err(failed("the image's thread has ended".to_owned())),
        }
        Ok(Image {
            shared,
            requests: Some(requests),
            owner: Some(owner),
            late: Mutex::default(),
        })
    }

    fn requests(&self) -> io::Result<&Sender<Request>> {
        let gone = || io::Error::other("the image is closed");
        self.requests.as_ref().ok_or_else(gone)
    }

    /// Sends a request to the owner and waits for the answer.
    fn ask<T>(&self, change: impl FnOnce(Sender<io::Result<T>>) -> Change) -> io::Result<T> {
        let (reply, answer) = channel();
        let gone = || io::Error::other("the image is closed");
        let change = Request::Control(change(reply));
        self.requests()?.send(change).map_err(|_| gone())?;
        #[cfg(feature = "simulated")]
        if uring::simulated::Files::are_simulated() {
            stepped::step_image_owners();
        }
        answer.recv().map_err(|_| gone())?
    }

    /// Waits until the owner has ended a turn without users, but not after `until`: it writes to the storage before. An image without an
    /// owner has no locks.
    fn wait_for_close(&self, until: Duration) {
        if self.late_close().is_some() || self.shared.readers.has_any() {
            return;
        }
        let (reply, answer) = channel();
        let wait = Request::Control(Change::AwaitRelease(reply));
        if !self.requests().is_ok_and(|to| to.send(wait).is_ok()) {
            return;
        }
        #[cfg(feature = "simulated")]
        if uring::simulated::Files::are_simulated() {
            stepped::step_image_owners();
        }
        let left = until.saturating_sub(Clock::shared().elapsed());
        if let Err(RecvTimeoutError::Timeout) = answer.recv_timeout(left) {
            *self.late() = Some(answer);
            log_late_release(&self.shared.path().to_string(), &late_close_error());
        }
    }

    fn late(&self) -> MutexGuard<'_, Option<LateAnswer>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the owner's missing answer after a wait that has timed out.
    fn late_close(&self) -> MutexGuard<'_, Option<LateAnswer>> {
        let mut late = self.late();
        let is_missing =
            |answer: &Receiver<_>| matches!(answer.try_recv(), Err(TryRecvError::Empty));
        if !late.as_ref().is_some_and(is_missing) {
            *late = None;
        }
        late
    }

    fn change(&self, change: impl FnOnce(Sender<io::Result<()>>) -> Change) -> io::Result<()> {
        self.ask(change)
    }

    /// Returns the path of the image file.
    pub fn path(&self) -> &Path {
        self.shared.file.path()
    }
}

fn late_close_error() -> String {
    "the image is not written and closed yet; hint: check its storage".to_owned()
}

impl Drop for Image {
    /// Waits for the owner to return reserved clusters before the locks are released. The owner ends with the last sender of commands. It
    /// is not joined while a channel exists: a worker that drops the image before its channel would wait forever.
    fn drop(&mut self) {
        self.requests = None;
        let has_channels = self.shared.readers.has_any();
        if let Some(owner) = self.owner.take().filter(|_| !has_channels)
            && owner.join().is_err()
        {
            tracing::error!(path = %self.shared.path(), "thread of the image panicked");
        }
    }
}

impl BlockDevice for Image {
    fn info(&self) -> DiskInfo {
        self.shared.info.resized(self.shared.capacity.bytes())
    }

    fn capacity(&self) -> &Arc<Capacity> {
        &self.shared.capacity
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        if self.shared.info.read_only {
            return Err(io::Error::other("the disk is read-only"));
        }
        self.change(|reply| Change::Resize(bytes, reply))
    }

    fn kind(&self) -> &'static str {
        "image"
    }

    /// Lists every field, because an image is a device over its files.
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            medium: self.shared.data().capabilities().medium,
            files: Some(self),
            lockable: Some(self),
            turns: self.shared.file.capabilities().turns.map(|_| self as _),
            image: Some(self),
            remote: None,
            shared_state: None,
            // The caller of `create` removes an unused image.
            removable: None,
        }
    }

    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let requests = self.requests()?.clone();
        channel::ImageChannel::attach(&self.shared, requests, attach)
    }
}

impl LocalFiles for Image {
    /// Another process can change the size of an open image only between two uses of it, which set the capacity.
    fn found_size(&self) -> io::Result<u64> {
        Ok(self.shared.capacity.bytes())
    }

    fn known_size(&self) -> io::Result<u64> {
        self.found_size()
    }

    fn check_file(&self) -> io::Result<()> {
        self.shared.files().try_for_each(File::check_file)
    }

    fn space(&self) -> io::Result<Option<Space>> {
        let mut spaces = self.shared.files().map(File::space);
        spaces.try_fold(None, |sum: Option<Space>, one| {
            Ok(match (sum, one?) {
                (Some(sum), Some(one)) => Some(sum.with(one)),
                (sum, one) => sum.or(one),
            })
        })
    }
}

impl Lockable for Image {
    /// The owner closes the image and only reads tables afterwards.
    fn become_read_only(&self) -> io::Result<()> {
        self.shared.files().try_for_each(File::check_stays_locked)?;
        self.change(Change::BecomeReadOnly)?;
        self.shared.files().try_for_each(File::become_read_only)
    }

    fn release_locks(&self) -> io::Result<()> {
        self.shared.files().try_for_each(File::release_locks)
    }

    /// Includes the backing images, where no other process may write.
    fn take_locks(&self) -> io::Result<()> {
        if let Some(below) = self.shared.backing.device()
            && let Some(lockable) = below.capabilities().lockable
        {
            lockable.take_locks()?;
        }
        self.shared.files().try_for_each(File::take_locks)
    }
}

impl TurnDevice for Image {
    fn wait_for_release(&self, until: Duration) {
        self.wait_for_close(until);
        let files = self.shared.files();
        files.for_each(|file| file.wait_for_release(until));
    }

    fn on_turn(&self, on_turn: OnTurn) {
        // Set only once, by the disk.
        self.shared.on_turn.set(on_turn).ok();
    }

    fn release_error(&self) -> Option<String> {
        let late = self.late_close().as_ref().map(|_| late_close_error());
        let late = late.filter(|_| !self.shared.readers.has_any());
        late.or_else(|| self.shared.files().find_map(File::release_error))
    }
}

impl ImageDevice for Image {
    fn backing(&self) -> Option<Arc<dyn BlockDevice>> {
        self.shared.backing.device()
    }

    fn damage(&self) -> Option<String> {
        let (path, damage) = (self.shared.path(), &self.shared.damage);
        let consequence = if damage.is_corrupt.load(Ordering::Relaxed) {
            "the image is marked as corrupt, and all writes fail"
        } else if damage.is_reported.load(Ordering::Relaxed) {
            "the image is damaged, and I/O to the damaged part fails"
        } else {
            return None;
        };
        Some(format!(
            "{path}: {consequence}; hint: remove the disk, then lunette image check --repair all {path}"
        ))
    }

    fn reopen_to_commit(&self) -> Result<Committable, OpenError> {
        commit::reopen(self)
    }

    fn own_pieces(&self, offset: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        self.ask(|reply| Change::OwnPieces {
            offset,
            length,
            reply,
        })
    }

    fn copy_up(&self, offset: u64, length: u64) -> io::Result<CopiedUp> {
        self.ask(|reply| Change::CopyUp {
            offset,
            length,
            reply,
        })
    }

    fn detach_backing(&self) -> io::Result<()> {
        self.change(Change::DetachBacking)
    }

    fn close_backing(&self) -> io::Result<bool> {
        // The device is dropped on this thread: closing its files may block, and the owner serves clients.
        self.ask(Change::CloseBacking)
            .map(|closed| closed.is_some())
    }
}
