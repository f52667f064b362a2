//! A virtio-blk export of one disk, as configured by a front end.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bdev::{Disk, release_deadline};
use reactor::{SourceId, WorkerHandle};
use virtio_device::{ConfigError, Queue, QueueMaker, QueueSetup, VirtioDevice};

use crate::config;
use crate::queue::BlkQueue;

/// Options of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlkOptions {
    /// The export's name, for logs and statistics.
    pub name: String,
    /// Number of offered queues, 1 to 256.
    pub queues: u16,
}

/// A disk exported as virtio-blk.
pub struct BlkDevice {
    name: String,
    queues: u16,
    disk: Arc<Disk>,
    /// The driver's value of the `writeback` field.
    writeback: AtomicBool,
    /// The driver did not accept VIRTIO_BLK_F_FLUSH.
    cannot_flush: AtomicBool,
    /// Effective mode of the queues: write-back is off, or the driver cannot flush.
    writethrough: Arc<AtomicBool>,
    /// Callback that stores a change of the driver's write-back setting.
    keep: Option<KeepChoice>,
    /// The disk of the last driver start.
    last_disk: Option<LastDisk>,
    _held: Option<Box<dyn Any + Send + Sync>>,
    /// Workers and sources of the queues.
    places: Mutex<Places>,
}

/// Identity of the disk last used by drivers of an export.
struct LastDisk {
    /// Identity at the time the export was opened.
    before: Option<String>,
    known: Mutex<Option<String>>,
    persist: Box<dyn Fn(&str) + Send + Sync>,
}

impl LastDisk {
    fn set(&self, identity: &str) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_deref() != Some(identity) {
            (self.persist)(identity);
            *known = Some(identity.to_owned());
        }
    }

    fn is_other_than(&self, identity: &str) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_deref().is_some_and(|known| known != identity)
    }
}

type KeepChoice = Box<dyn Fn(bool) + Send + Sync>;

type Places = BTreeMap<u16, (WorkerHandle, SourceId)>;

impl BlkDevice {
    /// Creates an export of `disk`.
    pub fn new(disk: Arc<Disk>, options: BlkOptions) -> BlkDevice {
        BlkDevice {
            name: options.name,
            queues: options.queues.clamp(1, config::QUEUES_MAX),
            disk,
            writeback: AtomicBool::new(true),
            cannot_flush: AtomicBool::new(false),
            keep: None,
            last_disk: None,
            writethrough: Arc::new(AtomicBool::new(false)),
            places: Mutex::default(),
            _held: None,
        }
    }

    /// Holds `held` for the lifetime of the device, for example a guard that locks a removable medium.
    #[must_use]
    pub fn holding(self, held: impl Any + Send + Sync) -> BlkDevice {
        BlkDevice {
            _held: Some(Box::new(held)),
            ..self
        }
    }

    /// Informs the queues of a new disk size. The owner of the configuration channel notifies the driver.
    pub fn resized(&self) {
        for (worker, source) in self.places().values() {
            self.notify(worker, *source);
        }
    }

    /// Restores a driver's choice from an earlier process: `writeback` as last stored by `keep`. `keep` is called for each
    /// change and may block.
    pub fn with_choice(
        mut self,
        writeback: bool,
        keep: impl Fn(bool) + Send + Sync + 'static,
    ) -> BlkDevice {
        self.writeback = AtomicBool::new(writeback);
        self.choose_mode();
        self.keep = Some(Box::new(keep));
        self
    }

    /// Restores the identity of the disk at the last driver start. `persist` is called for each
    /// change and may block.
    #[must_use]
    pub fn with_last_disk(
        self,
        last: Option<String>,
        persist: impl Fn(&str) + Send + Sync + 'static,
    ) -> BlkDevice {
        let last_disk = LastDisk {
            before: last.clone(),
            known: Mutex::new(last),
            persist: Box::new(persist),
        };
        BlkDevice {
            last_disk: Some(last_disk),
            ..self
        }
    }

    fn identity(&self) -> String {
        self.disk.info().identity.to_string()
    }

    fn set_writeback(&self, writeback: bool) {
        let before = self.writeback.swap(writeback, Ordering::Relaxed);
        if let Some(keep) = self.keep.as_ref().filter(|_| before != writeback) {
            keep(writeback);
        }
        self.choose_mode();
    }

    fn choose_mode(&self) {
        let writeback = self.writeback.load(Ordering::Relaxed);
        let durable = !writeback || self.cannot_flush.load(Ordering::Relaxed);
        self.writethrough.store(durable, Ordering::Relaxed);
    }

    fn notify(&self, worker: &WorkerHandle, source: SourceId) {
        let info = self.disk.info();
        worker.send(move |w| {
            if let Some((queue, _io)) = w.source(source)
                && let Some(queue) = (queue as &mut dyn Any).downcast_mut::<Queue<BlkQueue>>()
            {
                queue.protocol().set_info(info);
            }
        });
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the exported disk.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }
}

impl VirtioDevice for BlkDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn features(&self) -> u64 {
        config::features(&self.disk.info(), self.queues)
    }

    fn known_features(&self) -> u64 {
        config::KNOWN_FEATURES
    }

    fn queue_count(&self) -> u16 {
        self.queues
    }

    /// Returns the maximum number of queues. A driver that accepted VIRTIO_BLK_F_MQ has several queues, even if only one is
    /// offered now.
    fn queue_limit(&self, features: u64) -> u16 {
        let is_lost = self.queues == 1 && features & config::F_MQ != 0;
        if is_lost {
            config::QUEUES_MAX
        } else {
            self.queues
        }
    }

    fn config(&self) -> Vec<u8> {
        config::space(
            &self.disk.info(),
            self.queues,
            self.writeback.load(Ordering::Relaxed),
        )
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), ConfigError> {
        match (offset, data) {
            (config::WRITEBACK_OFFSET, [mode]) => {
                self.set_writeback(*mode != 0);
                Ok(())
            }
            _ => Err(ConfigError {
                offset,
                length: data.len(),
            }),
        }
    }

    fn packed(&self) -> bool {
        true
    }

    fn reset(&self) {
        self.cannot_flush.store(false, Ordering::Relaxed);
        self.choose_mode();
    }

    fn forget_config(&self) {
        self.set_writeback(true);
    }

    fn is_write_cache_disabled(&self) -> bool {
        !self.writeback.load(Ordering::Relaxed)
    }

    fn is_replaced(&self) -> bool {
        let last = self.last_disk.as_ref();
        last.is_some_and(|last| last.is_other_than(&self.identity()))
    }

    fn driver_started(&self) {
        if let Some(last) = &self.last_disk {
            last.set(&self.identity());
        }
    }

    fn driver_resumes(&self) {
        if let Some(last) = &self.last_disk
            && let Some(before) = &last.before
        {
            last.set(before);
        }
    }

    fn queue(&self, mut setup: QueueSetup, _worker: &WorkerHandle) -> QueueMaker {
        // 5.2.6.2: without VIRTIO_BLK_F_FLUSH a driver cannot request durability, so every write is durable.
        let cannot_flush = setup.features & config::F_FLUSH == 0;
        self.cannot_flush.store(cannot_flush, Ordering::Relaxed);
        self.choose_mode();
        setup.labels.disk = self.disk.name().to_owned();
        let disk = self.disk.clone();
        let writethrough = self.writethrough.clone();
        Box::new(move |io, id| {
            let handle = io.open(&disk);
            let protocol = BlkQueue::new(handle, disk, writethrough);
            match Queue::new(setup, id, io.clock(), protocol) {
                Ok(queue) => Ok(queue.built()),
                Err(error) => {
                    io.close(handle);
                    Err(error.to_string())
                }
            }
        })
    }

    fn queue_stopped(&self, index: u16) {
        self.places().remove(&index);
    }

    fn wait_for_release(&self) {
        self.disk.wait_for_release(release_deadline());
    }

    fn queue_placed(&self, index: u16, worker: &WorkerHandle, source: SourceId) {
        self.places().insert(index, (worker.clone(), source));
        // The disk may have been resized since the queue was created.
        self.notify(worker, source);
    }
}
