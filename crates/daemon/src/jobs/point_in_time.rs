//! Points in time of disks in use ([`bdev::PointInTime`]): the scratch file, the layer, and the end.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

use bdev::{BlockDevice, Disk, PointInTime, create_scratch};
use config::DiskConfig;
use jobs::Event;
use jobs::exchange::ExchangeAction;
use jobs::points::{Restore, RestoreAction, Source};

use super::Context;
use super::copy_range::result;
use super::exchange::{Change, failed};
use crate::objects::{NewDevice, Refusal};

/// Location and size of scratch files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScratchOptions {
    /// Folder; `None`: that of the disk's file, the state folder, or `/var/tmp`.
    pub folder: Option<PathBuf>,
    /// Most bytes per disk; `None`: together half of the free space of the folder.
    pub limit: Option<u64>,
}

/// A disk with its point in time.
pub(super) struct PointOfDisk {
    context: Context,
    disk: Arc<Disk>,
    source: Arc<dyn BlockDevice>,
    layer: Arc<dyn BlockDevice>,
    pub point: PointInTime,
}

impl PointOfDisk {
    /// Creates the scratch file of one of `disks` disks. The point in time begins when the disk gets its layer.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn prepare(
        context: &Context,
        disk: &Arc<Disk>,
        config: &DiskConfig,
        options: &ScratchOptions,
        disks: u64,
    ) -> Result<Arc<PointOfDisk>, Refusal> {
        let source = disk.device();
        let bytes = source.capacity().bytes();
        let folders = match &options.folder {
            Some(folder) => vec![folder.clone()],
            None => default_folders(context, config),
        };
        let mut opened: Result<_, String> = Err("there is no folder for it".to_owned());
        for folder in folders {
            let found = create_scratch(&folder, bytes).map(|file| {
                (
                    file,
                    options
                        .limit
                        .unwrap_or_else(|| half_of_free(&folder) / disks.max(1)),
                )
            });
            opened = found.map_err(|error| error.to_string());
            if opened.is_ok() {
                break;
            }
        }
        let (scratch, limit) = opened.map_err(|error| {
            let hint = "hint: name another folder with --scratch";
            failed(
                disk.name(),
                &format!("cannot create its scratch file: {error}; {hint}"),
            )
        })?;
        let point = PointInTime::new(Arc::clone(&source), scratch, limit);
        Ok(Arc::new(PointOfDisk {
            context: context.clone(),
            disk: Arc::clone(disk),
            source,
            layer: point.layer(),
            point,
        }))
    }

    /// Returns the switch of the disk to its layer.
    pub fn change(&self) -> NewDevice {
        NewDevice {
            disk: Arc::clone(&self.disk),
            device: Arc::clone(&self.layer),
            config: None,
        }
    }

    /// Checks that the disk uses its layer.
    ///
    /// # Errors
    /// The disk still uses its device without the layer.
    pub fn check_layer(&self) -> Result<(), Refusal> {
        match Arc::ptr_eq(&self.disk.device(), &self.layer) {
            true => Ok(()),
            false => Err(failed(self.disk.name(), &"its device was not replaced")),
        }
    }

    /// Ends the point in time. Clients use the source alone afterwards.
    pub fn end(&self) {
        let mut restoring = Restoring {
            point: self,
            change: None,
            is_over: false,
        };
        restoring.run();
    }
}

/// Drives [`jobs::points::Restore`].
struct Restoring<'a> {
    point: &'a PointOfDisk,
    change: Option<Change>,
    /// All clients are gone or about to be disconnected.
    is_over: bool,
}

impl Restoring<'_> {
    fn run(&mut self) {
        let mut machine = Restore::default();
        let mut event = Event::Done;
        loop {
            event = match machine.step(event) {
                RestoreAction::End => return,
                RestoreAction::EndPoint => {
                    self.point.point.end();
                    Event::Done
                }
                RestoreAction::Exchange(action) => self.exchange(action),
                RestoreAction::RetryLater(reason) => self.retry_later(&reason),
            };
        }
    }

    fn exchange(&mut self, action: ExchangeAction<Source>) -> Event {
        let PointOfDisk {
            context,
            disk,
            source,
            ..
        } = self.point;
        let done = match action {
            ExchangeAction::Prepare(Source) => {
                if self.is_over || Arc::ptr_eq(&disk.device(), source) {
                    return Event::Unneeded;
                }
                let change = NewDevice {
                    disk: Arc::clone(disk),
                    device: Arc::clone(source),
                    config: None,
                };
                let prepared = Change::prepare(&context.servers.pool, &[change]);
                prepared.map(|change| self.change = Some(change))
            }
            ExchangeAction::Detach => {
                self.change = None;
                Ok(())
            }
            action => match &mut self.change {
                Some(change) => change.execute(context, action),
                None => Ok(()),
            },
        };
        self.is_over |= matches!(done, Err(Refusal::Ending | Refusal::NotFound(_)));
        result(done)
    }

    fn retry_later(&mut self, reason: &str) -> Event {
        self.is_over |= self.point.context.jobs.is_ending();
        if !self.is_over {
            tracing::warn!(
                disk = self.point.disk.name(),
                "cannot remove the job's layer from the disk yet: {reason}"
            );
            std::thread::sleep(jobs::PAUSE);
        }
        Event::Done
    }
}

/// Ends points in time. A thread for each switches its disk back to the source, because the disk's I/O may hang. The receiver gets the
/// number of each disk that uses its source alone again.
pub(super) fn end_all(
    context: &Context,
    points: impl Iterator<Item = (usize, Arc<PointOfDisk>)>,
) -> Receiver<usize> {
    let mut points: Vec<(usize, Arc<PointOfDisk>)> = points.collect();
    for (_, one) in &points {
        one.point.end();
    }
    let (sender, receiver) = mpsc::channel();
    points.retain(|(disk, one)| {
        let (disk, one, sender) = (*disk, Arc::clone(one), sender.clone());
        let end = move || {
            one.end();
            drop(one);
            sender.send(disk).ok();
        };
        context.jobs.run(end).is_err()
    });
    // Their threads did not start.
    for (disk, one) in points {
        one.end();
        sender.send(disk).ok();
    }
    receiver
}

/// Returns folders of the scratch file in the order of preference.
fn default_folders(context: &Context, config: &DiskConfig) -> Vec<PathBuf> {
    let of_disk = config.backend.file().and_then(Path::parent);
    let of_disk = of_disk.filter(|folder| !folder.starts_with("/dev") && folder.is_absolute());
    let state = context.bitmaps.state_folder().map(Path::to_owned);
    let state = state.or_else(crate::state::default_folder);
    let all = of_disk.map(Path::to_owned).into_iter().chain(state);
    all.chain([PathBuf::from("/var/tmp")]).collect()
}

/// Returns half of the free space in bytes: the daemon and others also need space.
fn half_of_free(folder: &Path) -> u64 {
    let free = rustix::fs::statvfs(folder).map(|found| found.f_bavail * found.f_frsize);
    free.unwrap_or(0) / 2
}
