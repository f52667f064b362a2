//! Copies a disk to a target while clients use it. Writes to the copied part go to source and target ([`bdev::Mirror`]). A mirror then
//! switches the disk to the target. A backup with `at = "end"` leaves the target with the disk's contents at the end of the job. Other
//! backups are in `backup`.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::{BlockDevice, BlockingIo, DirtyBitmap, DiscardMode, Disk, Mirror, TARGET_PATIENCE};
use control::objects::JobState;

use super::copy_range::{CANNOT_WRITE, PART, copy_range, hole_at, on_target};
use super::exchange::{Flush, check_files, exchange, failed, restore_device};
use super::incremental::{CheckpointNames, Incremental, image_over};
use super::{Context, Job, JobKind};
use crate::objects::{NewDevice, Refusal};
use config::{BlockDeviceConfig, DiskConfig};

/// Bytes of the first step over a hole.
const HOLE_MIN: u64 = 16 << 20;
/// Most bytes of one step over a hole. An empty disk of 64 TiB takes 1024 steps.
const HOLE_MAX: u64 = 64 << 30;
/// Largest range of one query for an image's own pieces, in bytes: one L2 table with 64 KiB clusters.
const OWN_MAX: u64 = 512 << 20;
/// Target duration of a step over a hole, because clients wait for it. Shorter steps grow, longer ones shrink.
const HOLE_TIME: Duration = Duration::from_millis(10);
/// Poll interval for I/Os in flight on the target of an ended job.
const DETACHED_STEP: Duration = Duration::from_millis(20);
/// Most unchanged bytes that an incremental backup skips per step.
const UNCHANGED_MAX: u64 = 1 << 40;

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

/// A copy job and its devices.
pub(super) struct Copying {
    pub context: Context,
    pub job: Arc<Job>,
    pub disk: Arc<Disk>,
    pub source: Arc<dyn BlockDevice>,
    pub target: Arc<dyn BlockDevice>,
    /// Configuration of the disk after the switch.
    pub config: DiskConfig,
    /// Mirror that the disk uses already (commit).
    pub begun: Option<Arc<Mirror>>,
    /// Bitmap of an incremental backup.
    pub incremental: Option<Incremental>,
    /// Image that the job has created.
    pub new_image: Option<PathBuf>,
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
    job.control().switches = copy.switches;
    let job = context.jobs.begin(job)?;
    let (of_thread, its_job) = (context.clone(), Arc::clone(&job));
    let names = copy.incremental.as_deref().map(CheckpointNames::latest);
    let copying = job.begin_while_wanted(&context.jobs, move || {
        let config = target(&disk)?;
        begin(&of_thread, &its_job, &disk, config, names.as_ref())
    })?;
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
    context.event_bus.publish("job.started", &job.disk);
    let started = context.jobs.run(move || copying.run());
    started.map_err(|error| {
        let refusal = failed(&job.disk, &format!("cannot start a thread: {error}"));
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

/// Returns true if both paths lead to the same file or device. The lock of the disk would be reported as that of another process.
fn is_same_file(one: Option<&Path>, other: Option<&Path>) -> bool {
    let file = |path: &Path| {
        let found = std::fs::metadata(path).ok()?;
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

/// Checks that no other host writes to a disk.
pub(super) fn check_not_shared(disk: &Disk) -> Result<(), Refusal> {
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
    check_not_shared(disk)?;
    let bytes = disk.info().geometry.capacity_bytes();
    let new_image = match &config.backend {
        BlockDeviceConfig::Image { path, .. } if !path.exists() => Some(path.clone()),
        _ => None,
    };
    let incremental = incremental
        .map(|names| Incremental::prepare(context, disk, names, Some(&config)))
        .transpose()?;
    let (incremental, over) = incremental.unzip();
    let target = open_target(&config, bytes, over.flatten().as_ref());
    let mut target = target.map_err(|error| failed(disk.name(), &error))?;
    context.check_medium(disk.name(), &*target)?;
    let opened = Arc::clone(&target);
    let checked = match job.kind {
        // No client uses the target of a backup.
        JobKind::Backup => disk.check_copy(&*target),
        _ => {
            (target, config.discard) = keep_discards(disk, target, config.discard);
            disk.check_device(&*target)
        }
    };
    if let Err(broken) = checked {
        // Removes the target if this job created it.
        opened.remove_if_created();
        if let Some(path) = &new_image {
            std::fs::remove_file(path).ok();
        }
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

/// Devices of the job. They are closed last, because closing waits for abandoned I/Os that are still in flight.
type Hung = Vec<BlockingIo>;

pub(super) enum Early {
    Cancelled,
    Failed(String),
}

impl Copying {
    /// Runs the job to its end. The disk is then on the target after a switch, on the source otherwise.
    fn run(mut self) {
        let mirror = self.begun.clone().unwrap_or_else(|| {
            let (source, target) = (Arc::clone(&self.source), Arc::clone(&self.target));
            Arc::new(Mirror::new(source, target))
        });
        let disk = Arc::clone(&self.disk);
        let name = disk.name();
        self.job.register_mirror(&mirror);
        let mut hung = Hung::new();
        let ended = self.copy(&mirror, &mut hung);
        let (state, reason) = match ended {
            Ok(()) => (JobState::Done, None),
            Err(early) => {
                // Clients stop waiting for the target.
                mirror.progress().abandon();
                if let Early::Failed(reason) = &early {
                    self.report_failure(reason);
                }
                restore_device(&self.context, &self.disk, &self.source);
                self.wait_for_hung_io(&mirror, std::mem::take(&mut hung));
                if self.is_commit()
                    && let Some(lockable) = self.target.capabilities().lockable
                    && let Err(error) = lockable.become_read_only()
                {
                    tracing::warn!(
                        disk = name,
                        "cannot release the write lock of its backing image: {error}"
                    );
                }
                match early {
                    Early::Cancelled => (JobState::Cancelled, None),
                    Early::Failed(reason) => (JobState::Failed, Some(reason)),
                }
            }
        };
        let event = match state {
            JobState::Done => Some("job.done"),
            JobState::Cancelled => Some("job.cancelled"),
            // The failure is reported already.
            _ => None,
        };
        if let Some(event) = event {
            tracing::info!(disk = name, "{} ended: {event}", self.job.kind.word());
        }
        let (job, event_bus, name) = (
            Arc::clone(&self.job),
            self.context.event_bus.clone(),
            name.to_owned(),
        );
        // The devices are free before the end of the job is announced.
        drop((self, mirror, hung));
        job.set_state(state, reason);
        if let Some(event) = event {
            event_bus.publish(event, &name);
        }
    }

    /// Reports the failure at once. The job ends when no I/O uses its target.
    fn report_failure(&self, reason: &str) {
        let (disk, kind) = (self.disk.name(), self.job.kind.word());
        tracing::error!(disk, "{kind} failed: {reason}");
        self.job.fail(reason);
        self.context.event_bus.publish("job.failed", disk);
    }

    fn copy(&mut self, mirror: &Arc<Mirror>, hung: &mut Hung) -> Result<(), Early> {
        let refused = |refusal: Refusal| Early::Failed(refusal.to_string());
        if self.begun.is_none() {
            let mirror = Arc::clone(mirror) as Arc<dyn BlockDevice>;
            self.change_to(mirror, None).map_err(refused)?;
        }
        self.copy_parts(mirror, hung)?;
        if self.job.kind == JobKind::Backup {
            return self.end_backup(mirror, hung);
        }
        self.job.set_state(JobState::Ready, None);
        if !self.is_commit() {
            self.context
                .event_bus
                .publish("job.ready", self.disk.name());
        }
        loop {
            let is_well =
                || mirror.progress().error().is_none() && check_files(&*self.target).is_ok();
            if !self.job.waits_for_switch(is_well) {
                return Err(self.early(mirror));
            }
            self.job.set_state(JobState::Finishing, None);
            match self.switch(mirror, hung) {
                Ok(()) => {
                    // No device is opened as this disk again, so memory reserved for that is freed.
                    if let Some(removable) = self.source.capabilities().removable {
                        removable.forget();
                    }
                    return Ok(());
                }
                Err(refusal) => {
                    self.check_target()?;
                    // The mirror is still complete. The switch can be requested again.
                    self.job.control().switches = false;
                    self.job
                        .set_state(JobState::Ready, Some(refusal.to_string()));
                }
            }
        }
    }

    /// Fails if another program has truncated, removed or replaced the target.
    pub(super) fn check_target(&self) -> Result<(), Early> {
        let checked = check_files(&*self.target);
        checked.map_err(|error| Early::Failed(format!("cannot use the target: {error}")))
    }

    /// Removes the target if the job has created it and does not start.
    pub(super) fn remove_target(&self) {
        self.target.remove_if_created();
        if let Some(path) = &self.new_image {
            std::fs::remove_file(path).ok();
        }
    }

    /// Makes an I/O channel stop waiting when the job is cancelled or the mirror has failed.
    pub(super) fn patient(&self, io: BlockingIo, limit: Option<Duration>) -> BlockingIo {
        let job = Arc::clone(&self.job);
        io.while_wanted(move || !job.is_cancelled() && !job.has_lost_target(), limit)
    }

    /// Waits until no I/O of the job or of clients uses the target. Its file must not be reused earlier.
    fn wait_for_hung_io(&self, mirror: &Mirror, hung: Hung) {
        drop(hung);
        while mirror.progress().detached() > 0 && !self.context.jobs.is_ending() {
            std::thread::sleep(DETACHED_STEP);
        }
    }

    fn is_commit(&self) -> bool {
        self.job.kind == JobKind::Commit
    }

    /// Returns the end of a range at `from` without data to copy. Clients can write there until the caller holds it.
    fn passed_over(&self, source: &mut BlockingIo, from: u64, hole_max: u64) -> Option<u64> {
        let total = self.job.total;
        if self.is_commit() {
            let limit = total.min(from + hole_max);
            let mut at = from;
            while at < limit {
                let pieces = self.own_pieces(at, OWN_MAX.min(limit - at)).ok()?;
                let Some((end, false)) = pieces.first() else {
                    break;
                };
                at = *end;
                if pieces.len() > 1 {
                    break;
                }
            }
            if at > from {
                return Some(at);
            }
        }
        if let Some(changed) = self.changed() {
            let (end, is_dirty) = changed.piece(from, total.min(from + UNCHANGED_MAX));
            if !is_dirty {
                return Some(end);
            }
        }
        hole_at(source, from, total.min(from + hole_max))
    }

    /// Lists the pieces of a range of the source, as [`bdev::ImageDevice::own_pieces`].
    fn own_pieces(&self, offset: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        match self.source.capabilities().image {
            Some(image) => image.own_pieces(offset, length),
            None => Ok(vec![(offset + length, true)]),
        }
    }

    /// Returns the bitmap of ranges to copy, or `None` to copy everything.
    fn changed(&self) -> Option<&DirtyBitmap> {
        self.incremental.as_ref()?.changed()
    }

    /// Copies a range that the caller holds. A commit copies only the image's own pieces, and an incremental backup only changed ones; the
    /// target has the rest. Returns the number of bytes copied.
    fn copy_held(
        &self,
        source: &mut BlockingIo,
        target: &mut BlockingIo,
        from: u64,
        end: u64,
    ) -> io::Result<u64> {
        let (mut at, mut bytes) = (from, 0);
        let mut copy_range = |from, end| copy_range(&self.job, source, target, from, end);
        if let Some(changed) = self.changed() {
            while at < end {
                let (next, is_dirty) = changed.piece(at, end);
                if is_dirty {
                    bytes += copy_range(at, next)?;
                }
                at = next;
            }
            return Ok(bytes);
        }
        if !self.is_commit() {
            return copy_range(from, end);
        }
        for (piece_end, is_own) in self.own_pieces(from, end - from)? {
            if is_own {
                bytes += copy_range(at, piece_end)?;
            }
            at = piece_end;
        }
        Ok(bytes)
    }

    fn switch(&self, mirror: &Mirror, hung: &mut Hung) -> Result<(), Refusal> {
        let name = self.disk.name();
        let patient = |io| self.patient(io, None);
        let mut flush = Flush::prepare(name, Arc::clone(&self.target), patient)?;
        // Clients wait only for the second flush, while the disk is held.
        let mut switched = on_target(&self.job, || flush.run());
        if switched.is_ok() {
            flush = flush.limit(|io| self.patient(io, Some(TARGET_PATIENCE)));
            switched = self.switch_with(&mut flush, mirror);
        }
        hung.push(flush.into_io());
        switched
    }

    fn switch_with(&self, flush: &mut Flush, mirror: &Mirror) -> Result<(), Refusal> {
        let name = self.disk.name();
        if self.job.is_cancelled() {
            return Err(failed(name, &"cancelled"));
        }
        let target = Arc::clone(&self.target);
        self.change(target, Some(self.config.clone()), || {
            let checked = check_files(&*self.target);
            checked.map_err(|error| failed(name, &format!("cannot use the target: {error}")))?;
            match mirror.progress().error() {
                Some(error) => Err(failed(
                    name,
                    &format!("cannot write to the target: {error}"),
                )),
                None => flush.run(),
            }
        })
    }

    /// Adds the name of the target to an error.
    pub(super) fn name_target(&self, error: &str) -> String {
        let target = shown(&self.config.backend);
        error.replacen("the target", &format!("the target {target}"), 1)
    }

    fn early(&self, mirror: &Mirror) -> Early {
        match mirror.progress().error() {
            Some(error) if !self.job.is_cancelled() => {
                Early::Failed(self.name_target(&format!("{CANNOT_WRITE}: {error}")))
            }
            _ if !self.job.is_cancelled() => match self.check_target() {
                Err(early) => early,
                Ok(()) => Early::Cancelled,
            },
            _ => Early::Cancelled,
        }
    }

    fn copy_parts(&self, mirror: &Mirror, hung: &mut Hung) -> Result<(), Early> {
        let open = |device: &Arc<dyn BlockDevice>, limit| {
            let io = BlockingIo::new(Arc::clone(device));
            let io = io.map(|io| self.patient(io, limit));
            io.map_err(|error| {
                Early::Failed(format!(
                    "cannot attach the job to the device ({}): {error}",
                    device.kind()
                ))
            })
        };
        // Clients wait for the held range as long as the target's I/O takes.
        let mut source = open(&self.source, None)?;
        let mut target = open(&self.target, Some(TARGET_PATIENCE))?;
        let copied = self.copy_all(mirror, &mut source, &mut target);
        hung.extend([source, target]);
        copied
    }

    fn copy_all(
        &self,
        mirror: &Mirror,
        source: &mut BlockingIo,
        target: &mut BlockingIo,
    ) -> Result<(), Early> {
        let total = self.job.total;
        let (mut part, mut hole_max) = (None, HOLE_MIN);
        loop {
            if !self.job.may_continue(part) {
                return Err(Early::Cancelled);
            }
            if mirror.progress().error().is_some() {
                return Err(self.early(mirror));
            }
            // A later write would restore the length of a truncated file.
            self.check_target()?;
            let from = mirror.progress().copied();
            if from >= total {
                return Ok(());
            }
            let began = Instant::now();
            let hole = self.passed_over(source, from, hole_max);
            let end = hole.unwrap_or((from + PART).min(total));
            let is_wanted = || !self.job.is_cancelled();
            let Ok(_held) = self.disk.hold_while(from, end - from, is_wanted) else {
                // A slow client I/O overlaps the range.
                continue;
            };
            let copied = self.copy_held(source, target, from, end);
            let bytes = match copied {
                Ok(bytes) => bytes,
                Err(_) if self.job.is_cancelled() => return Err(Early::Cancelled),
                Err(_) if mirror.progress().error().is_some() => return Err(self.early(mirror)),
                Err(error) => return Err(Early::Failed(self.name_target(&error.to_string()))),
            };
            mirror.progress().advance(end);
            self.job.advance(end, bytes);
            if hole.is_some() {
                hole_max = match began.elapsed() < HOLE_TIME {
                    true => (hole_max * 2).min(HOLE_MAX),
                    false => (hole_max / 4).max(HOLE_MIN),
                };
            }
            part = (bytes > 0).then_some((began, bytes));
        }
    }

    /// Ends a backup. It contains all writes up to this point and none after it.
    fn end_backup(&mut self, mirror: &Mirror, hung: &mut Hung) -> Result<(), Early> {
        self.job.set_state(JobState::Finishing, None);
        let refused = |refusal: Refusal| Early::Failed(refusal.to_string());
        let source = Arc::clone(&self.source);
        let target = Arc::clone(&self.target);
        let patient = |io| self.patient(io, None);
        let mut flush = Flush::prepare(self.disk.name(), target, patient).map_err(refused)?;
        self.change(source, None, || {
            if let Some(incremental) = &self.incremental {
                incremental.record();
            }
            Ok(())
        })
        .map_err(refused)?;
        if mirror.progress().error().is_some() {
            return Err(self.early(mirror));
        }
        // No client writes to the target any more.
        let flushed = on_target(&self.job, || flush.run());
        hung.push(flush.into_io());
        if let Err(refusal) = flushed {
            return Err(match self.job.is_cancelled() {
                true => Early::Cancelled,
                false => refused(refusal),
            });
        }
        self.check_target()?;
        let Some(incremental) = &mut self.incremental else {
            return Ok(());
        };
        if let Some(changed) = incremental.changed()
            && changed.is_broken()
        {
            let reason = format!(
                "the bitmap {:?} was truncated during the backup",
                incremental.since()
            );
            return Err(Early::Failed(reason));
        }
        incremental.complete().map_err(refused)
    }

    fn change_to(
        &self,
        device: Arc<dyn BlockDevice>,
        config: Option<DiskConfig>,
    ) -> Result<(), Refusal> {
        self.change(device, config, || Ok(()))
    }

    fn change(
        &self,
        device: Arc<dyn BlockDevice>,
        config: Option<DiskConfig>,
        last: impl FnOnce() -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let changes = [NewDevice {
            disk: Arc::clone(&self.disk),
            device,
            config,
        }];
        let Context {
            manager, servers, ..
        } = &self.context;
        exchange(manager, servers, &changes, last)
    }
}
