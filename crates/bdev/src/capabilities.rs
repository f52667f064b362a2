//! Capabilities: operations beyond I/O that some kinds of block devices have. Control plane only; no I/O uses them.
//!
//! ```text
//!                      medium   files   lockable   turns   image   remote   shared_state   removable
//!   null               -        -       -          -       -       -        -              -
//!   ram                kept     -       -          -       -       -        -              yes
//!   file               yes      yes     yes        turns   -       -        -              yes
//!   image              yes      yes     yes        turns   yes     -        -              -
//!   rbd                yes      -       -          turns   -       yes      shared         -
//!   iscsi              yes      -       -          -       -       yes      -              -
//!   nbd                yes      -       -          -       -       yes      -              -
//!   scsi_generic       yes      -       -          -       -       yes      -              -
//!   layer              below    below   below      below   -       below    -              below
//! ```
//!
//! `kept`: if the memory outlives the process. `turns`: with `lock = "while-active"`. `shared`: if several daemons write the image.
//! `below`: that of the device below. A layer over an image is not an image: its jobs would bypass the layer. It does not share state: it may change the visible content.
//!
//! A device over another one lists every field of [`Capabilities`]. A new capability therefore does not compile until each such device
//! has a decision. Test: below, one table.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use latency::Clock;

use crate::{BlockDevice, Committable, DiskState, Medium, OpenError, SharedState};

/// The capabilities of a device.
#[derive(Clone, Copy)]
pub struct Capabilities<'a> {
    /// Medium that stores the disk's identity; `None` if content and identity end with the process.
    pub medium: Option<&'a dyn Medium>,
    /// Files on this host that store the content.
    pub files: Option<&'a dyn LocalFiles>,
    /// Locks against other processes on this host.
    pub lockable: Option<&'a dyn Lockable>,
    /// Locks that follow the use of the disk: other processes use it in turns with this one.
    pub turns: Option<&'a dyn TurnDevice>,
    /// Image that may have a backing image.
    pub image: Option<&'a dyn ImageDevice>,
    /// Storage that may become unavailable and may change without a request.
    pub remote: Option<&'a dyn RemoteDevice>,
    /// State shared by all daemons that serve the content.
    pub shared_state: Option<&'a dyn SharedState>,
    /// Resources that outlive the device and can be removed.
    pub removable: Option<&'a dyn Removable>,
}

impl Capabilities<'_> {
    /// No capability.
    pub const NONE: Capabilities<'static> = Capabilities {
        medium: None,
        files: None,
        lockable: None,
        turns: None,
        image: None,
        remote: None,
        shared_state: None,
        removable: None,
    };
}

/// Device with its content in files or block devices of this host.
pub trait LocalFiles: Send + Sync {
    /// Returns the present size in bytes, which other programs may have changed. May block.
    ///
    /// # Errors
    /// The system fails.
    fn found_size(&self) -> io::Result<u64>;

    /// Returns the last size in bytes that the system has seen. Does not ask the storage, which may not answer.
    ///
    /// # Errors
    /// The system fails.
    fn known_size(&self) -> io::Result<u64>;

    /// Checks that no other program has truncated, removed or replaced the files. May block.
    ///
    /// # Errors
    /// The change, with path and size of the file; or the system's error.
    fn check_file(&self) -> io::Result<()>;

    /// Returns the space that the files occupy; `None` for block devices. May block.
    ///
    /// # Errors
    /// The system fails.
    fn space(&self) -> io::Result<Option<Space>>;
}

/// Space of the files of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes that the files occupy, without backing images.
    pub allocated: u64,
    /// Free bytes of the file system, for a process without privileges. The smallest number if the files are in several file systems.
    pub free: u64,
}

impl Space {
    /// Returns the space of the files of both.
    pub(crate) fn with(self, other: Space) -> Space {
        Space {
            allocated: self.allocated.saturating_add(other.allocated),
            free: self.free.min(other.free),
        }
    }
}

/// Change of a turn on a device that several processes use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The locks were taken. Another process may have changed the content and the size; [`BlockDevice::capacity`] is the present size.
    Begun,
    /// The locks will be released. Another process may change the content and the size from now on.
    Ending,
}

/// Callback of [`TurnDevice::on_turn`].
pub type OnTurn = Box<dyn Fn(Turn) + Send + Sync>;

/// Device that is locked against other processes.
pub trait Lockable: Send + Sync {
    /// Converts the device to a read-only backing device, readable by other processes. No write is in flight.
    ///
    /// # Errors
    /// The system refuses. The device is read-only, but still locked.
    fn become_read_only(&self) -> io::Result<()>;

    /// Releases the locks, because this process will open the object again. Nothing is written until the locks are taken again.
    ///
    /// # Errors
    /// The system refuses.
    fn release_locks(&self) -> io::Result<()>;

    /// Takes the locks again after [`Lockable::release_locks`].
    ///
    /// # Errors
    /// The system refuses, or another process has the lock.
    fn take_locks(&self) -> io::Result<()>;
}

/// Longest wait of a queue's stop for the release of locks. The front end blocks meanwhile, with its guest paused. Then the release continues
/// on its thread, and other daemons wait for the locks.
pub(crate) const RELEASE_WAIT: Duration = Duration::from_secs(10);

/// Returns the end of a wait for the release of locks that begins now, as a time of [`Clock::shared`].
#[must_use]
pub fn release_deadline() -> Duration {
    Clock::shared().elapsed() + RELEASE_WAIT
}

/// Device that other processes use in turns with this one: its locks follow the use of the disk.
pub trait TurnDevice: Send + Sync {
    /// Waits until the locks are released or the release has failed, if no use is left, but not after `until`, a time of
    /// [`Clock::shared`].
    fn wait_for_release(&self, until: Duration);

    /// Registers `on_turn`, called when a turn has begun and before it ends. Must be quick.
    fn on_turn(&self, on_turn: OnTurn);

    /// Returns the error of the last release of the locks of a disk without uses, also if a wait for it has timed out. A failed release is
    /// tried again until it succeeds or the disk is used again.
    fn release_error(&self) -> Option<String>;
}

/// Progress of [`ImageDevice::copy_up`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedUp {
    /// Offset to continue at. `u64::MAX`: the device below has no more data.
    pub end: u64,
    /// Number of bytes copied.
    pub bytes: u64,
}

/// Image that stores only differences while it has a backing image.
pub trait ImageDevice: Send + Sync {
    /// Returns the backing image, until [`ImageDevice::detach_backing`].
    fn backing(&self) -> Option<Arc<dyn BlockDevice>>;

    /// Returns the damage that was found in the image, with the path and a hint.
    fn damage(&self) -> Option<String>;

    /// Lists the pieces of a range: the end of each, and whether this image stores it.
    ///
    /// # Errors
    /// The system fails.
    fn own_pieces(&self, offset: u64, length: u64) -> io::Result<Vec<(u64, bool)>>;

    /// Copies data from the backing image. Skips own data and holes from `offset` on, then copies about `length` bytes. Work per call is
    /// bounded. May block.
    ///
    /// # Errors
    /// The system fails; a part may be copied.
    fn copy_up(&self, offset: u64, length: u64) -> io::Result<CopiedUp>;

    /// Removes the reference to the backing image, after all its data was copied.
    ///
    /// # Errors
    /// The system fails; the reference remains.
    fn detach_backing(&self) -> io::Result<()>;

    /// Closes the former backing image after [`ImageDevice::detach_backing`]. Returns false if a worker still has a channel to it. May
    /// block.
    ///
    /// # Errors
    /// Error of the system.
    fn close_backing(&self) -> io::Result<bool>;

    /// Opens the image again over a writable backing image, to commit its data there. No I/O is in flight, and this device gets no more
    /// unless the call fails.
    ///
    /// # Errors
    /// The reason; the device is unchanged.
    fn reopen_to_commit(&self) -> Result<Committable, OpenError>;
}

/// Device that reconnects automatically. Others may change its size.
pub trait RemoteDevice: Send + Sync {
    /// Returns the availability.
    fn state(&self) -> DiskState;

    /// Registers `changed`, called after others have changed the size and [`BlockDevice::capacity`] was updated, and after an unavailable
    /// device is ready again. Not called on workers; must be quick.
    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>);

    /// Reads and adopts the present size, if the device does not notice changes by itself. May block.
    ///
    /// # Errors
    /// The size cannot be read, or the device cannot adopt it.
    fn read_size(&self) -> io::Result<()> {
        Ok(())
    }

    /// Returns true if acknowledged writes need a flush before the device is closed, because no flush of the reopened device covers them.
    fn needs_flush_before_close(&self) -> bool {
        false
    }
}

/// Device with resources that outlive it.
pub trait Removable: Send + Sync {
    /// Removes files and memory that opening has created, if the disk was never used.
    fn remove_if_created(&self);

    /// Releases resources retained for reopening a removed disk. Returns true if the content is gone.
    fn forget(&self) -> bool;
}

/// Shortcuts that have a meaning for every device.
impl dyn BlockDevice + '_ {
    /// Returns the medium with the disk's identity; `None` if content and identity end with the process.
    pub fn medium(&self) -> Option<&dyn Medium> {
        self.capabilities().medium
    }

    /// Returns the availability.
    pub fn state(&self) -> DiskState {
        let remote = self.capabilities().remote;
        remote.map_or(DiskState::Ready, RemoteDevice::state)
    }

    /// Removes files and memory that opening has created, if the disk was never used.
    pub fn remove_if_created(&self) {
        if let Some(removable) = self.capabilities().removable {
            removable.remove_if_created();
        }
    }
}

/// Returns the names of the device's capabilities. A new capability does not compile until added here.
#[cfg(test)]
pub(crate) fn names(device: &dyn BlockDevice) -> String {
    let Capabilities {
        medium,
        files,
        lockable,
        turns,
        image,
        remote,
        shared_state,
        removable,
    } = device.capabilities();
    let all = [
        (medium.is_some(), "medium"),
        (files.is_some(), "files"),
        (lockable.is_some(), "lockable"),
        (turns.is_some(), "turns"),
        (image.is_some(), "image"),
        (remote.is_some(), "remote"),
        (shared_state.is_some(), "shared_state"),
        (removable.is_some(), "removable"),
    ];
    let found = all.into_iter().filter(|(is_there, _)| *is_there);
    found.map(|(_, name)| name).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::{
        CacheMode, Delay, DiscardMode, FaultPlan, Faulty, File, FileOptions, Image, ImageOptions,
        Layer, Mirror, Null, NullOptions, Ram, RamOptions,
    };

    const SIZE: u64 = 1 << 20;

    fn file(path: &Path) -> Arc<dyn BlockDevice> {
        let options = FileOptions {
            size: Some(SIZE),
            cache: CacheMode::Writeback,
            ..FileOptions::new(path)
        };
        Arc::new(File::open(options).unwrap())
    }

    fn image(path: &Path) -> Arc<dyn BlockDevice> {
        let options = ImageOptions {
            cache: CacheMode::Writeback,
            ..ImageOptions::new(path)
        };
        Arc::new(Image::create(&options, SIZE).unwrap())
    }

    fn ram() -> Arc<dyn BlockDevice> {
        let options = RamOptions {
            size: SIZE,
            ..RamOptions::default()
        };
        Arc::new(Ram::create(options).unwrap())
    }

    fn null() -> Arc<dyn BlockDevice> {
        let options = NullOptions {
            size: SIZE,
            block_size: 512,
            read_only: false,
        };
        Arc::new(Null::create(options).unwrap())
    }

    fn iscsi() -> Arc<dyn BlockDevice> {
        let opened = crate::scsi::tests::silent_disk(None, None);
        Arc::new(opened.unwrap_or_else(|error| panic!("{error}")))
    }

    /// The table at the head of this file: kind, its capabilities, and those of a layer over it. An RBD image needs a cluster, and an
    /// NBD export a server: `tests/nbd.rs`. The test of `retained_memory` has a RAM disk with a medium.
    #[test]
    fn devices_have_the_capabilities_of_the_table() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let rows: [(Arc<dyn BlockDevice>, &str, &str, &str); 5] = [
            (null(), "null", "", ""),
            (ram(), "ram", "removable", "removable"),
            (
                file(&path("file")),
                "file",
                "medium files lockable removable",
                "medium files lockable removable",
            ),
            (
                image(&path("image")),
                "image",
                "medium files lockable image",
                "medium files lockable",
            ),
            (iscsi(), "iscsi", "medium remote", "medium remote"),
        ];
        for (device, kind, own, of_layer) in rows {
            assert_eq!(device.kind(), kind);
            assert_eq!(names(&*device), own, "{kind}");
            let below = || Arc::clone(&device);
            let layers: [Arc<dyn BlockDevice>; 3] = [
                Arc::new(Delay::new(below(), Duration::ZERO)),
                Arc::new(Faulty::new(below(), FaultPlan::default())),
                Arc::new(Mirror::new(below(), ram())),
            ];
            for layer in layers {
                assert_eq!(names(&*layer), of_layer, "{} over {kind}", layer.kind());
            }
        }
        let ignoring = crate::with_discard(DiscardMode::Ignore, image(&path("another")));
        assert_eq!(ignoring.kind(), "discard");
        assert_eq!(names(&*ignoring), "medium files lockable");
    }

    /// A layer of another crate has the capabilities of all layers.
    #[test]
    fn layer_over_a_layer_passes_capabilities_on() {
        struct Plain(Arc<dyn BlockDevice>);

        impl Layer for Plain {
            fn inner(&self) -> &dyn BlockDevice {
                &*self.0
            }

            fn layer_kind(&self) -> &'static str {
                "plain"
            }

            fn attach_layer(
                &self,
                attach: &mut crate::Attach<'_>,
            ) -> io::Result<Box<dyn crate::IoChannel>> {
                self.0.attach(attach)
            }
        }

        let folder = tempfile::tempdir().unwrap();
        let delayed = Delay::new(file(&folder.path().join("file")), Duration::ZERO);
        let plain: Arc<dyn BlockDevice> = Arc::new(Plain(Arc::new(delayed)));
        assert_eq!(names(&*plain), "medium files lockable removable");
        let found = plain.capabilities().files.map(LocalFiles::found_size);
        assert_eq!(found.unwrap().unwrap(), SIZE);
        assert_eq!(plain.state(), DiskState::Ready);
    }
}
