//! Copies a disk to a target while clients use it. Writes to the copied part go to source and target ([`bdev::Mirror`]). A mirror then
//! switches the disk to the target. A backup with `at = "end"` leaves the target with the disk's contents at the end of the job. Other
//! backups are in `backup`. Here: the target and the start; `copying` drives the job.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex};

use bdev::{BlockDevice, DiscardMode, Disk};
use control::EventKind;

use super::backup::take;
use super::copying::Copying;
use super::exchange::failed;
use super::incremental::{CheckpointNames, Incremental, image_over};
use super::own_target::file_below;
use super::partial::PartialFile;
use super::{Context, Job, JobKind};
use crate::objects::Refusal;
use config::{BlockDeviceConfig, DiskConfig};

#[derive(Clone, Debug)]
pub struct Copy {
    pub disk: String,
    /// Mirror or backup.
    pub kind: JobKind,
    /// Device and discard mode of the target. All other settings of the disk stay.
    pub target: DiskConfig,
    /// Speed limit in bytes per second; 0 for none.
    pub speed: u64,
    /// The mirror switches to its target as soon as it is complete.
    pub switches: bool,
    /// Name of a bitmap: copies the changes since the last backup of this name.
    pub incremental: Option<String>,
}

/// Starts to copy a disk. Returns when the job's thread runs. Blocks.
///
/// # Errors
/// Nothing has changed then.
pub fn start_copy(context: &Context, copy: &Copy) -> Result<Arc<Job>, Refusal> {
    let (disk, now) = context.disk(&copy.disk, copy.kind)?;
    let mut target = copy.target.clone();
    if copy.kind == JobKind::Mirror {
        super::check_served_alone(&now)?;
        target.backend = target.backend.at_absolute_paths();
        target.backend = target.backend.with_named_files_of(&now.backend);
    }
    let shown = shown(&target.backend.clone().at_absolute_paths());
    let target = move |disk: &Disk| prepare_target(&now, &target, disk);
    let mut job = Job::new(&disk, copy.kind, Some(shown));
    job.incremental.clone_from(&copy.incremental);
    job.set(None, Some(copy.speed));
    job.control().orders.switches = copy.switches;
    let job = context.jobs.begin(job)?;
    let (of_thread, its_job) = (context.clone(), Arc::clone(&job));
    let names = copy.incremental.as_deref().map(CheckpointNames::latest);
    let begin = move || {
        let config = target(&disk)?;
        begin(&of_thread, &its_job, &disk, config, names.as_ref())
    };
    let copying = job.begin_while_wanted(&context.jobs, begin, Copying::remove_target)?;
    run_copying(copying)?;
    Ok(job)
}

/// Checks the target of a job before it is opened. Returns the configuration of the disk on the target.
pub(super) fn prepare_target(
    now: &DiskConfig,
    target: &DiskConfig,
    disk: &Disk,
) -> Result<DiskConfig, Refusal> {
    let name = disk.name();
    if target.backend.takes_turns() {
        return Err(Refusal::conflict(
            format!("disk {name}: the target of a job cannot have lock=while-active"),
            "omit lock; to serve the copy from several daemons, add it as another disk when the job has ended",
        ));
    }
    if loses_data(&now.backend, &target.backend) {
        let word = target.backend.word();
        return Err(Refusal::conflict(
            format!("disk {name}: the target, a {word} disk, loses its data when the daemon ends"),
            "use a file, a block device, an image, an RBD image, an iSCSI unit or an NBD export",
        ));
    }
    // A second session for the same unit has the same ISID and would end the disk's session.
    if let (BlockDeviceConfig::Iscsi(one), BlockDeviceConfig::Iscsi(other)) =
        (&now.backend, &target.backend)
        && one.unit == other.unit
    {
        return Err(super::same_medium(name, name));
    }
    let mut target = target.clone();
    target.backend = target.backend.at_absolute_paths();
    let config = place(now, &target, disk);
    match is_same_file(now.backend.file(), config.backend.file()) {
        true => Err(super::same_medium(name, name)),
        false => Ok(config),
    }
}

pub(super) fn run_copying(copying: Copying) -> Result<(), Refusal> {
    let (context, job) = (copying.context.clone(), Arc::clone(&copying.job));
    context.event_bus.publish(EventKind::JobStarted, &job.disk);
    // Stays here if the thread cannot start.
    let copying = Arc::new(Mutex::new(Some(copying)));
    let of_thread = Arc::clone(&copying);
    let started = context.jobs.run(move || {
        if let Some(copying) = take(&of_thread) {
            copying.run();
        }
    });
    started.map_err(|error| {
        let refusal = failed(&job.disk, &format!("cannot start a thread: {error}"));
        match take(&copying) {
            // Switches the disk from the layer of the commit to its image.
            Some(commit) if commit.begun.is_some() => {
                job.cancel();
                commit.run();
            }
            Some(copying) => copying.remove_target(),
            None => {}
        }
        job.give_up(&context.jobs, &refusal);
        refusal
    })
}

/// Returns the configuration of the disk on the target.
fn place(now: &DiskConfig, target: &DiskConfig, disk: &Disk) -> DiskConfig {
    let info = disk.info();
    let bytes = info.geometry.capacity_bytes();
    let backend = match &target.backend {
        // A file that does not exist is created with the size of the disk.
        BlockDeviceConfig::File {
            path, size: None, ..
        } if !path.exists() || is_larger_device(path, bytes) => {
            target.backend.with_size(Some(bytes))
        }
        other => other.clone(),
    };
    let block_size = match info.geometry.block_size() {
        512 if !has_own_block_size(&backend) => now.block_size,
        of_disk => Some(of_disk),
    };
    DiskConfig {
        backend: backend.at_absolute_paths(),
        discard: target.discard,
        block_size,
        ..now.clone()
    }
}

/// Returns true if both paths lead to the same file or device, also through a loop device. Without this check, opening the target would fail
/// with a lock error that blames another process.
pub(super) fn is_same_file(one: Option<&Path>, other: Option<&Path>) -> bool {
    let file = |path: &Path| {
        let found = std::fs::metadata(file_below(path)).ok()?;
        let is_device = found.file_type().is_block_device();
        Some(match is_device {
            true => (0, 0, found.rdev()),
            false => (found.dev(), found.ino(), 0),
        })
    };
    let one = one.and_then(file);
    one.is_some() && one == other.and_then(file)
}

/// Returns true if `block_size` defaults to that of the device.
fn has_own_block_size(backend: &BlockDeviceConfig) -> bool {
    match backend {
        BlockDeviceConfig::Iscsi(_) | BlockDeviceConfig::ScsiGeneric { .. } => true,
        BlockDeviceConfig::File { path, .. } => {
            let found = std::fs::metadata(path);
            found.is_ok_and(|found| found.file_type().is_block_device())
        }
        _ => false,
    }
}

/// Returns true if `path` is a block device of more than `bytes`. Volume sizes are often rounded up; the disk keeps its size.
fn is_larger_device(path: &Path, bytes: u64) -> bool {
    let larger = || -> io::Result<bool> {
        let is_device = std::fs::metadata(path)?.file_type().is_block_device();
        Ok(is_device && File::open(path)?.seek(SeekFrom::End(0))? > bytes)
    };
    // Errors are reported when the target is opened.
    larger().unwrap_or(false)
}

pub(crate) fn shown(backend: &BlockDeviceConfig) -> String {
    match backend {
        BlockDeviceConfig::Rbd(rbd) => format!("rbd:{}", rbd.image),
        BlockDeviceConfig::Nbd(nbd) => nbd.address.to_string(),
        BlockDeviceConfig::Iscsi(remote) => match &remote.unit {
            Some(unit) => unit.to_string(),
            None => backend.word().to_owned(),
        },
        other => match other.file() {
            Some(path) => format!("{}:{}", other.word(), path.display()),
            None => other.word().to_owned(),
        },
    }
}

/// Returns true if the target, unlike the disk, loses its data at a restart of the daemon.
fn loses_data(disk: &BlockDeviceConfig, target: &BlockDeviceConfig) -> bool {
    match target {
        BlockDeviceConfig::Null { .. } | BlockDeviceConfig::Delay { .. } => true,
        BlockDeviceConfig::Ram { .. } => !matches!(disk, BlockDeviceConfig::Ram { .. }),
        BlockDeviceConfig::File { .. }
        | BlockDeviceConfig::Image { .. }
        | BlockDeviceConfig::Rbd(_)
        | BlockDeviceConfig::Iscsi(_)
        | BlockDeviceConfig::Nbd(_)
        | BlockDeviceConfig::ScsiGeneric { .. } => false,
    }
}

impl Context {
    /// Checks that a disk was neither resized nor removed until its job began, which prevents both.
    pub(crate) fn check_unchanged(&self, disk: &Arc<Disk>, job: &Job) -> Result<(), Refusal> {
        let (disk, total) = (Arc::clone(disk), job.total);
        self.manager.call(move |owner| {
            owner.is_there(&disk)?;
            match disk.info().geometry.capacity_bytes() == total {
                true => Ok(()),
                false => Err(Refusal::conflict(
                    format!("disk {} was resized while its job began", disk.name()),
                    "start the job again",
                )),
            }
        })
    }
}

/// Checks that a job may copy its disk: no other host writes to it, and it is as it was when the job was created.
pub(super) fn check_source(context: &Context, disk: &Arc<Disk>, job: &Job) -> Result<(), Refusal> {
    context.check_unchanged(disk, job)?;
    match disk.info().shared {
        false => Ok(()),
        true => Err(Refusal::conflict(
            format!(
                "disk {}: other hosts write to it, and a copy would miss their writes",
                disk.name()
            ),
            "copy it with the tools of its storage, or serve it with another lock mode",
        )),
    }
}

/// Opens or creates the target and checks it.
pub(super) fn begin(
    context: &Context,
    job: &Arc<Job>,
    disk: &Arc<Disk>,
    mut config: DiskConfig,
    incremental: Option<&CheckpointNames>,
) -> Result<Copying, Refusal> {
    check_source(context, disk, job)?;
    let bytes = disk.info().geometry.capacity_bytes();
    let new_file = match &config.backend {
        BlockDeviceConfig::File { path, .. }
        | BlockDeviceConfig::Image {
            path,
            data_file: None,
            ..
        } => {
            // A symbolic link is not new, also without its file.
            Some(path).filter(|path| path.symlink_metadata().is_err())
        }
        _ => None,
    };
    let partial = new_file.filter(|_| job.kind == JobKind::Backup);
    let partial = partial.map(|path| PartialFile::begin(path)).transpose();
    let partial = partial.map_err(|error| failed(disk.name(), &error))?;
    let is_image = matches!(config.backend, BlockDeviceConfig::Image { .. });
    let new_image = new_file.filter(|_| is_image && partial.is_none()).cloned();
    let incremental = incremental
        .map(|names| Incremental::prepare(context, disk, names, Some(&config)))
        .transpose()?;
    let (incremental, over) = incremental.unzip();
    let mut opened_as = config.clone();
    if let Some(partial) = &partial {
        opened_as.backend = opened_as.backend.at_path(partial.temporary());
    }
    let target = open_target(&opened_as, bytes, over.flatten().as_ref());
    let mut target = target.map_err(|error| failed(disk.name(), &error))?;
    let opened = Arc::clone(&target);
    // Removes the target if this job created it.
    let remove = || {
        opened.remove_if_created();
        if let Some(path) = &new_image {
            std::fs::remove_file(path).ok();
        }
    };
    context
        .check_medium(disk.name(), &*target)
        .and_then(|()| context.check_own_target(disk.name(), &config.backend))
        .inspect_err(|_| remove())?;
    let checked = match job.kind {
        // No client uses the target of a backup.
        JobKind::Backup if job.backup.is_some() => disk.check_copy(&*target),
        // It receives the changes of clients until the end of the job.
        JobKind::Backup => disk.check_mirrored_copy(&*target),
        _ => {
            (target, config.discard) = keep_discards(disk, target, config.discard);
            disk.check_device(&*target)
        }
    };
    if let Err(broken) = checked {
        remove();
        return Err(failed(
            disk.name(),
            &format!("cannot use the target: {broken}"),
        ));
    }
    let copying = Copying {
        context: context.clone(),
        job: Arc::clone(job),
        disk: Arc::clone(disk),
        source: disk.device(),
        target,
        config,
        begun: None,
        incremental,
        new_image,
        partial,
    };
    Ok(copying)
}

/// Puts a layer over a device with discards that would break a property that clients have read. Also returns the discard mode.
pub(super) fn keep_discards(
    disk: &Disk,
    device: Arc<dyn BlockDevice>,
    configured: DiscardMode,
) -> (Arc<dyn BlockDevice>, DiscardMode) {
    match configured {
        DiscardMode::Unmap => {
            let needed = DiscardMode::needed(&disk.info(), &device.info());
            (bdev::with_discard(needed, device), needed)
        }
        // Mode that the user chose. The device was opened with it.
        mode => (device, mode),
    }
}

fn open_target(
    config: &DiskConfig,
    bytes: u64,
    over: Option<&DiskConfig>,
) -> Result<Arc<dyn BlockDevice>, String> {
    let in_words = |error: bdev::OpenError| error.to_string();
    if let BlockDeviceConfig::Image {
        path,
        cache,
        data_file: None,
        named_files,
        lock,
        ..
    } = &config.backend
        && !path.exists()
    {
        let options = bdev::ImageOptions {
            cache: *cache,
            block_size: config.block_size,
            named_files: named_files.unwrap_or_default(),
            lock: *lock,
            ..bdev::ImageOptions::new(path)
        };
        if let Some(last) = over {
            // A restricted client has a policy for named files in the target. It applies to the last backup, too.
            let last = DiskConfig {
                backend: last.backend.clone().with_named_files_of(&config.backend),
                ..last.clone()
            };
            return image_over(&options, &last, bytes);
        }
        let image = bdev::Image::create(&options, bytes).map_err(in_words)?;
        return Ok(Arc::new(image));
    }
    // The job writes to the target, also if the disk is read-only.
    let writable = DiskConfig {
        read_only: false,
        ..config.clone()
    };
    crate::block_devices::open(&writable).map_err(in_words)
}
