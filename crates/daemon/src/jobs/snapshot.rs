//! External snapshots. Switches each disk to a new image over its old device, for all disks atomically. The old devices are then read-only,
//! and other processes may read them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bdev::{
    BackingName, BlockDevice, CheckNamed, DiscardMode, Disk, FileLock, Image, ImageOptions,
    NamedFiles,
};
use control::EventKind;
use jobs::exchange::ExchangeAction;
use jobs::snapshot::{Action, Overlays, Snapshot};
use jobs::{Event, Outcome};

use super::backing_name::backing_name;
use super::exchange::{Change, Flush, check_files, failed};
use super::{Context, Job, JobKind, Unannounced};
use crate::objects::{Fault, NewDevice, Refusal};
use config::{BlockDeviceConfig, CacheMode, DiskConfig};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlay {
    pub disk: String,
    /// Path of the image to create.
    pub path: PathBuf,
}

struct CreatedOverlay {
    change: NewDevice,
    before: Arc<dyn BlockDevice>,
    path: PathBuf,
    _job: Unannounced,
}

/// Takes a snapshot of disks. Blocks.
///
/// # Errors
/// Nothing has changed then, and the new images are removed.
pub fn snapshot(context: &Context, overlays: &[Overlay]) -> Result<(), Refusal> {
    let mut created: Vec<CreatedOverlay> = Vec::new();
    let prepared = overlays.iter().try_for_each(|overlay| {
        created.push(create_overlay(context, overlay)?);
        Ok(())
    });
    let mut driver = Driver::new(context, created);
    let refusal = match prepared {
        Ok(()) => match driver.run() {
            Ok(()) => return Ok(()),
            Err(_) => driver.refusal.take(),
        },
        Err(refusal) => {
            driver.remove();
            Some(refusal)
        }
    };
    Err(refusal.unwrap_or(Refusal::Ending))
}

/// Executes the actions of a snapshot.
struct Driver<'a> {
    change: Option<Change>,
    context: &'a Context,
    flushes: Vec<Flush>,
    created: Vec<CreatedOverlay>,
    /// Reason of the failure. It has a kind and hints, unlike that of the job.
    refusal: Option<Refusal>,
}

impl Driver<'_> {
    fn new(context: &Context, created: Vec<CreatedOverlay>) -> Driver<'_> {
        Driver {
            change: None,
            context,
            flushes: Vec::new(),
            created,
            refusal: None,
        }
    }

    fn run(&mut self) -> Outcome {
        let mut job = Snapshot::default();
        let mut event = Event::Done;
        loop {
            let done = match job.step(event) {
                Action::OpenFlush => self.open_flush(),
                Action::Flush => self.flush(),
                Action::Exchange(action) => self.exchange(action),
                Action::Remove => {
                    self.remove();
                    Ok(())
                }
                Action::Unlock => {
                    self.unlock();
                    Ok(())
                }
                Action::End(outcome) => return outcome,
            };
            event = match done {
                Ok(()) => Event::Done,
                Err(refusal) => {
                    let reason = refusal.to_string();
                    self.refusal = Some(refusal);
                    Event::Failed(reason)
                }
            };
        }
    }

    fn open_flush(&mut self) -> Result<(), Refusal> {
        let flushes = self.created.iter().map(|one| {
            let name = one.change.disk.name();
            Flush::prepare(name, Arc::clone(&one.before), |io| io)
        });
        self.flushes = flushes.collect::<Result<Vec<_>, _>>()?;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Refusal> {
        self.flushes.iter_mut().try_for_each(Flush::run)
    }

    fn exchange(&mut self, action: ExchangeAction<Overlays>) -> Result<(), Refusal> {
        match action {
            ExchangeAction::Prepare(Overlays) => {
                let changes: Vec<_> = self.created.iter().map(|one| one.change.clone()).collect();
                let change = Change::prepare(&self.context.servers.pool, &changes)?;
                self.change = Some(change);
            }
            ExchangeAction::Check => {
                for CreatedOverlay { change, .. } in &self.created {
                    let checked = check_files(&*change.device);
                    checked.map_err(|error| failed(change.disk.name(), &error))?;
                }
            }
            ExchangeAction::Flush => self.flush()?,
            ExchangeAction::Detach => self.change = None,
            action => {
                if let Some(change) = &mut self.change {
                    change.execute(self.context, action)?;
                }
            }
        }
        Ok(())
    }

    /// Removes the new images, which no client has written.
    fn remove(&self) {
        for one in &self.created {
            std::fs::remove_file(&one.path).ok();
        }
    }

    fn unlock(&mut self) {
        self.flushes.clear();
        for one in &self.created {
            let name = one.change.disk.name();
            if let Some(lockable) = one.before.capabilities().lockable
                && let Err(error) = lockable.become_read_only()
            {
                tracing::warn!(
                    disk = name,
                    "cannot release the write lock of the backing image: {error}"
                );
            }
            tracing::info!(disk = name, path = %one.path.display(), "snapshot taken, the disk continues in this image");
            self.context
                .event_bus
                .publish(EventKind::DiskSnapshot, name);
        }
    }
}

fn create_overlay(context: &Context, overlay: &Overlay) -> Result<CreatedOverlay, Refusal> {
    let (disk, config) = context.disk(&overlay.disk, JobKind::Snapshot)?;
    let job = Job::new(&disk, JobKind::Snapshot, None);
    let at_work = Unannounced(context.jobs.clone(), context.jobs.begin(job)?);
    let path = std::path::absolute(&overlay.path).unwrap_or(overlay.path.clone());
    let (name, cache) = backing(&disk, &config)?;
    let named_files = named_files(&config, &path, &name)?;
    let info = disk.info();
    let block_size = match info.geometry.block_size() {
        512 => config.block_size,
        other => Some(other),
    };
    let config = DiskConfig {
        backend: BlockDeviceConfig::Image {
            path: path.clone(),
            size: None,
            data_file: None,
            named_files,
            cache,
            lock: FileLock::Always,
        },
        discard: DiscardMode::Unmap,
        block_size,
        ..config
    };
    let options = ImageOptions {
        cache,
        block_size,
        named_files: named_files.unwrap_or_default(),
        ..ImageOptions::new(&path)
    };
    let before = disk.device();
    let bytes = before.capacity().bytes();
    let image = Image::create_over(&options, &name, Arc::clone(&before), bytes);
    let image = image.map_err(|error| failed(disk.name(), &error))?;
    Ok(CreatedOverlay {
        change: NewDevice {
            disk,
            device: Arc::new(image),
            config: Some(config),
        },
        before,
        path,
        _job: at_work,
    })
}

/// Returns the disk's policy for files that images name. It applies to the new image after a restart, so a policy that forbids the backing
/// image refuses the snapshot.
fn named_files(
    config: &DiskConfig,
    path: &Path,
    backing: &BackingName,
) -> Result<Option<NamedFiles>, Refusal> {
    let BlockDeviceConfig::Image { named_files, .. } = &config.backend else {
        return Ok(None);
    };
    let policy = named_files.unwrap_or_default();
    let below = Path::new(&backing.name);
    if policy.check(path, "backing image", below).is_ok() {
        return Ok(*named_files);
    }
    let mut words = NamedFiles::WORDS.into_iter();
    let word = words.find(|(_, known)| *known == policy);
    let word = word.map_or("", |(word, _)| word);
    let folder = below.parent().unwrap_or(below).display();
    let help = match policy {
        NamedFiles::Folder => {
            format!("put the new image in {folder}, or add the disk again with named_files=any")
        }
        _ => "add the disk again with named_files=folder or named_files=any".to_owned(),
    };
    Err(Refusal::conflict(
        format!(
            "disk {}: named_files={word} would prevent {} from opening its backing image {} after a restart",
            config.name,
            path.display(),
            backing.name
        ),
        &help,
    ))
}

/// Returns the backing file name for the new image and its cache mode.
fn backing(disk: &Disk, config: &DiskConfig) -> Result<(BackingName, CacheMode), Refusal> {
    let name = config.name.as_str();
    let refused = |reason: &str, help: &str| {
        Refusal::Conflict(vec![
            Fault::new(format!("disk {name}: {reason}")).help(help),
        ])
    };
    if disk.info().read_only {
        return Err(refused(
            "it is read-only, so a snapshot is not necessary",
            "copy its file directly",
        ));
    }
    super::check_served_alone(config)?;
    let cache = match &config.backend {
        BlockDeviceConfig::File { cache, .. } | BlockDeviceConfig::Image { cache, .. } => *cache,
        _ if disk.info().write_cache => CacheMode::None,
        // Clients send no flushes.
        _ => CacheMode::Writethrough,
    };
    let found = backing_name(&config.backend);
    let found = found.map_err(|(reason, help)| refused(&reason, help))?;
    Ok((found, cache))
}
