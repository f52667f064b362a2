//! Copies of a disk to another place, under clients that go on: what is copied is written to both places from then on
//! ([`bdev::Mirror`]). A mirror ends with the disk in the other place, a backup with a copy of what the disk was when it was complete.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::{BlockDevice, BlockingIo, DirtyBitmap, DiscardMode, Disk, Mirror, TARGET_PATIENCE};
use block::{Allocation, Extent, IoFlags, IoRequest};
use control::objects::JobState;

use super::exchange::{Flush, exchange, failed};
use super::incremental::{Incremental, image_over};
use super::{Context, Job, JobKind};
use crate::objects::{NewDevice, Refusal};
use config::{BlockDeviceConfig, DiskConfig};

/// Bytes that are copied while clients wait for them.
const PART: u64 = 1 << 20;
/// Bytes of the first step over a hole.
const HOLE_MIN: u64 = 16 << 20;
/// Most bytes of one step over a hole: an empty disk of 64 TiB takes 1024 steps.
const HOLE_MAX: u64 = 64 << 30;
/// Bytes of which an image lists its own pieces at once: those of one L2 table with usual clusters.
const OWN_MAX: u64 = 512 << 20;
/// Steps over holes get longer while one takes less than this, and shorter otherwise: clients wait for them.
const HOLE_TIME: Duration = Duration::from_millis(10);
/// Interval at which a job that has ended looks whether I/Os on its target have.
const DETACHED_STEP: Duration = Duration::from_millis(20);
/// Bytes that have not changed since the last backup that are passed over at a time.
const UNCHANGED_MAX: u64 = 1 << 40;

/// A copy that is to be made.
#[derive(Clone, Debug)]
pub struct Copy {
    /// The disk's name.
    pub disk: String,
    /// Mirror or backup.
    pub kind: JobKind,
    /// Where to: all else that is said of the disk stays.
    pub target: DiskConfig,
    /// Bytes in a second; 0: no limit.
    pub speed: u64,
    /// A mirror changes over as soon as it is complete.
    pub switches: bool,
    /// A backup is of what has changed since the last one of this name.
    pub incremental: Option<String>,
}

/// A copy that is about to be made.
pub(super) struct Copying {
    pub context: Context,
    pub job: Arc<Job>,
    pub disk: Arc<Disk>,
    pub source: Arc<dyn BlockDevice>,
    pub target: Arc<dyn BlockDevice>,
    /// How the disk is configured when it goes on in the target.
    pub config: DiskConfig,
    /// The mirror that the disk has already.
    pub begun: Option<Arc<Mirror>>,
    /// Of a backup with a bitmap.
    pub incremental: Option<Incremental>,
}

/// Begins to copy a disk, and returns when that goes on by itself. Blocks.
///
/// # Errors
/// Nothing has changed then.
pub fn start_copy(context: &Context, copy: &Copy) -> Result<Arc<Job>, Refusal> {
    let (disk, now) = context.disk(&copy.disk)?;
    let mut target = copy.target.clone();
    target.backend = target.backend.at_absolute_paths();
    if copy.kind == JobKind::Mirror {
        target.backend = target.backend.with_named_files_of(&now.backend);
    }
    if loses_data(&now.backend, &target.backend) {
        let (disk, word) = (&copy.disk, target.backend.word());
        return Err(Refusal::conflict(
            format!(
                "disk {disk}: the target, a {word} disk, does not keep its data when the daemon ends"
            ),
            "use a file, a block device, an image, an RBD image or an iSCSI unit",
        ));
    }
    // A session for the same unit would end the one of the disk, which has the same ISID.
    if let (BlockDeviceConfig::Iscsi(one), BlockDeviceConfig::Iscsi(other)) =
        (&now.backend, &target.backend)
        && one.unit == other.unit
    {
        return Err(super::same_medium(&copy.disk, &copy.disk));
    }
    let shown = shown(&target.backend);
    let mut job = Job::new(&disk, copy.kind, Some(shown));
    job.incremental.clone_from(&copy.incremental);
    job.set(None, Some(copy.speed));
    job.control().switches = copy.switches;
    let job = context.jobs.begin(job)?;
    let (of_thread, its_job) = (context.clone(), Arc::clone(&job));
    let incremental = copy.incremental.clone();
    let copying = job.begin_while_wanted(&context.jobs, move || {
        let config = place(&now, &target, &disk);
        begin(&of_thread, &its_job, &disk, config, incremental.as_deref())
    })?;
    run_copying(copying)?;
    Ok(job)
}

/// Makes a copy on a thread of its own.
pub(super) fn run_copying(copying: Copying) -> Result<(), Refusal> {
    let (context, job) = (copying.context.clone(), Arc::clone(&copying.job));
    context.event_bus.tell("job.started", &job.disk);
    let started = context.jobs.run(move || copying.run());
    started.map_err(|error| {
        let refusal = failed(&job.disk, &format!("cannot start a thread: {error}"));
        job.give_up(&context.jobs, &refusal);
        refusal
    })
}

/// The disk as it is configured in the other place.
fn place(now: &DiskConfig, target: &DiskConfig, disk: &Disk) -> DiskConfig {
    let info = disk.info();
    let bytes = info.geometry.capacity_bytes();
    let backend = match &target.backend {
        // A file that is not there is made as large.
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

/// Returns true if the default of `block_size` is that of the device.
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

/// Returns whether a path is a block device of more than `bytes`. A volume is often rounded up: the disk keeps its size there.
fn is_larger_device(path: &Path, bytes: u64) -> bool {
    let larger = || -> io::Result<bool> {
        let is_device = std::fs::metadata(path)?.file_type().is_block_device();
        Ok(is_device && File::open(path)?.seek(SeekFrom::End(0))? > bytes)
    };
    // Opening it as a target reports what is wrong.
    larger().unwrap_or(false)
}

/// A disk's device, for people.
pub(crate) fn shown(backend: &BlockDeviceConfig) -> String {
    match backend {
        BlockDeviceConfig::Rbd(rbd) => format!("rbd:{}", rbd.image),
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

/// Returns true if data of the disk would not be there after a restart of the daemon, and are now.
fn loses_data(disk: &BlockDeviceConfig, target: &BlockDeviceConfig) -> bool {
    match target {
        BlockDeviceConfig::Null { .. } | BlockDeviceConfig::Delay { .. } => true,
        BlockDeviceConfig::Ram { .. } => !matches!(disk, BlockDeviceConfig::Ram { .. }),
        BlockDeviceConfig::File { .. }
        | BlockDeviceConfig::Image { .. }
        | BlockDeviceConfig::Rbd(_)
        | BlockDeviceConfig::Iscsi(_)
        | BlockDeviceConfig::ScsiGeneric { .. } => false,
    }
}

/// Opens the target, which is made if it is a file that is not there, and has all changes go through the mirror.
fn begin(
    context: &Context,
    job: &Arc<Job>,
    disk: &Arc<Disk>,
    mut config: DiskConfig,
    incremental: Option<&str>,
) -> Result<Copying, Refusal> {
    let info = disk.info();
    if info.shared {
        return Err(Refusal::conflict(
            format!(
                "disk {}: other hosts write it, too, and a copy would not have that",
                disk.name()
            ),
            "copy it with the tools of its storage, or serve it with another lock",
        ));
    }
    let bytes = info.geometry.capacity_bytes();
    let new_image = match &config.backend {
        BlockDeviceConfig::Image { path, .. } if !path.exists() => Some(path.clone()),
        _ => None,
    };
    let incremental = incremental
        .map(|name| Incremental::prepare(context, disk, name, &config))
        .transpose()?;
    let (incremental, over) = incremental.unzip();
    let target = open_target(&config, bytes, over.flatten().as_ref());
    let mut target = target.map_err(|error| failed(disk.name(), &error))?;
    context.check_medium(disk.name(), &*target)?;
    let opened = Arc::clone(&target);
    let checked = match job.kind {
        // No client uses it.
        JobKind::Backup => disk.check_copy(&*target),
        _ => {
            (target, config.discard) = keep_discards(disk, target, config.discard);
            disk.check_device(&*target)
        }
    };
    if let Err(broken) = checked {
        // No job uses what was created for it.
        opened.remove_if_created();
        if let Some(path) = new_image {
            std::fs::remove_file(path).ok();
        }
        return Err(failed(disk.name(), &format!("the target: {broken}")));
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
    };
    Ok(copying)
}

/// Puts a layer over a device where discards would break what clients of the disk were told. Also returns the mode to configure.
pub(super) fn keep_discards(
    disk: &Disk,
    device: Arc<dyn BlockDevice>,
    configured: DiscardMode,
) -> (Arc<dyn BlockDevice>, DiscardMode) {
    match configured {
        DiscardMode::Unmap => {
            let needed = DiscardMode::needed(&disk.info(), &device.info());
            (needed.over(device), needed)
        }
        // The user's choice, with which the device was opened.
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
        ..
    } = &config.backend
        && !path.exists()
    {
        let options = bdev::ImageOptions {
            cache: cache.of_device(),
            block_size: config.block_size,
            named_files: named_files.unwrap_or_default(),
            ..bdev::ImageOptions::new(path)
        };
        if let Some(last) = over {
            // Clients that may not let an image name any file have a policy in the target, which holds for the last backup, too.
            let last = DiskConfig {
                backend: last.backend.clone().with_named_files_of(&config.backend),
                ..last.clone()
            };
            return image_over(&options, &last, bytes);
        }
        let image = bdev::Image::create(&options, bytes).map_err(in_words)?;
        return Ok(Arc::new(image));
    }
    config.backend.open(config).map_err(in_words)
}

/// Devices of the job. An I/O on them may be in flight after it was given up, so they are closed last: closing waits for it.
type Hung = Vec<BlockingIo>;

/// Why a copy ends early.
enum Early {
    Cancelled,
    Failed(String),
}

impl Copying {
    /// To its end, whichever that is. The disk is on one device again then: the target after a switch, the source otherwise.
    fn run(mut self) {
        let mirror = self.begun.clone().unwrap_or_else(|| {
            let (source, target) = (Arc::clone(&self.source), Arc::clone(&self.target));
            Arc::new(Mirror::new(source, target))
        });
        let disk = Arc::clone(&self.disk);
        let name = disk.name();
        self.job.has_mirror(&mirror);
        let mut hung = Hung::new();
        let ended = self.copy(&mirror, &mut hung);
        let (state, reason) = match ended {
            Ok(()) => (JobState::Done, None),
            Err(early) => {
                // Clients do not wait for the target any more.
                mirror.progress().abandon();
                self.back_to_source();
                self.wait_for_hung_io(&mirror, hung, &early);
                if self.is_commit()
                    && let Err(error) = self.target.give_up_writing()
                {
                    tracing::warn!(disk = name, "others cannot read its backing image: {error}");
                }
                match early {
                    Early::Cancelled => (JobState::Cancelled, None),
                    Early::Failed(reason) => (JobState::Failed, Some(reason)),
                }
            }
        };
        let event = match state {
            JobState::Done => "job.done",
            JobState::Cancelled => "job.cancelled",
            _ => "job.failed",
        };
        match &reason {
            Some(reason) => {
                tracing::error!(disk = name, "{} failed: {reason}", self.job.kind.word())
            }
            None => tracing::info!(disk = name, "{} ended: {event}", self.job.kind.word()),
        }
        let (job, event_bus, name) = (
            Arc::clone(&self.job),
            self.context.event_bus.clone(),
            name.to_owned(),
        );
        // Whoever hears that it has ended finds its devices free.
        drop((self, mirror));
        job.set_state(state, reason);
        event_bus.tell(event, &name);
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
            self.context.event_bus.tell("job.ready", self.disk.name());
        }
        loop {
            let is_well =
                || mirror.progress().error().is_none() && self.target.check_file().is_ok();
            if !self.job.waits_for_switch(is_well) {
                return Err(self.early(mirror));
            }
            self.job.set_state(JobState::Finishing, None);
            match self.switch(mirror, hung) {
                Ok(()) => {
                    // Nobody opens it as this disk again: memory that was kept for that is given back.
                    self.source.forget();
                    return Ok(());
                }
                Err(refusal) => {
                    self.check_target()?;
                    // It is as complete as it was: whoever wanted it to be used may want it again.
                    self.job.control().switches = false;
                    self.job
                        .set_state(JobState::Ready, Some(refusal.to_string()));
                }
            }
        }
    }

    /// Fails if another program has truncated, removed or replaced the target.
    fn check_target(&self) -> Result<(), Early> {
        let checked = self.target.check_file();
        checked.map_err(|error| Early::Failed(format!("cannot use the target: {error}")))
    }

    /// A client that cancels the job does not wait for its I/O.
    fn patient(&self, io: BlockingIo, limit: Option<Duration>) -> BlockingIo {
        let job = Arc::clone(&self.job);
        io.while_wanted(move || !job.is_cancelled(), limit)
    }

    /// Waits until no I/O of the job and of clients uses the target: its file must not be used again before.
    fn wait_for_hung_io(&self, mirror: &Mirror, hung: Hung, early: &Early) {
        if let Early::Failed(reason) = early {
            self.job
                .set_state(JobState::Finishing, Some(reason.clone()));
        }
        drop(hung);
        while mirror.progress().detached() > 0 && !self.context.jobs.is_ending() {
            std::thread::sleep(DETACHED_STEP);
        }
    }

    fn is_commit(&self) -> bool {
        self.job.kind == JobKind::Commit
    }

    /// The end of what begins here and has no data to copy. A client may write there before it is held.
    fn passed_over(&self, source: &mut BlockingIo, from: u64, hole_max: u64) -> Option<u64> {
        let total = self.job.total;
        if self.is_commit() {
            let limit = total.min(from + hole_max);
            let mut at = from;
            while at < limit {
                let pieces = self.source.own_pieces(at, OWN_MAX.min(limit - at)).ok()?;
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

    /// What is to be copied, if that is not everything.
    fn changed(&self) -> Option<&DirtyBitmap> {
        self.incremental.as_ref()?.changed()
    }

    /// Copies a range that is held: of an image that is committed what is its own, and of an incremental backup what has changed, for the
    /// rest is in the target. Bytes that were moved.
    fn copy_held(
        &self,
        source: &mut BlockingIo,
        target: &mut BlockingIo,
        from: u64,
        end: u64,
    ) -> io::Result<u64> {
        let (mut at, mut bytes) = (from, 0);
        if let Some(changed) = self.changed() {
            while at < end {
                let (next, is_dirty) = changed.piece(at, end);
                if is_dirty {
                    bytes += copy_range(source, target, at, next)?;
                }
                at = next;
            }
            return Ok(bytes);
        }
        if !self.is_commit() {
            return copy_range(source, target, from, end);
        }
        for (piece_end, is_own) in self.source.own_pieces(from, end - from)? {
            if is_own {
                bytes += copy_range(source, target, at, piece_end)?;
            }
            at = piece_end;
        }
        Ok(bytes)
    }

    fn switch(&self, mirror: &Mirror, hung: &mut Hung) -> Result<(), Refusal> {
        let name = self.disk.name();
        let patient = |io| self.patient(io, None);
        let mut flush = Flush::prepare(name, Arc::clone(&self.target), patient)?;
        // Most of it is durable before the disk is held: clients wait for the second flush alone.
        let mut switched = flush.run();
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
            let checked = self.target.check_file();
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

    fn early(&self, mirror: &Mirror) -> Early {
        match mirror.progress().error() {
            Some(error) if !self.job.is_cancelled() => {
                Early::Failed(format!("cannot write to the target: {error}"))
            }
            _ if !self.job.is_cancelled() => match self.check_target() {
                Err(early) => early,
                Ok(()) => Early::Cancelled,
            },
            _ => Early::Cancelled,
        }
    }

    fn copy_parts(&self, mirror: &Mirror, hung: &mut Hung) -> Result<(), Early> {
        let open = |device: &Arc<dyn BlockDevice>| {
            let io = BlockingIo::new(Arc::clone(device));
            let io = io.map(|io| self.patient(io, None));
            io.map_err(|error| Early::Failed(format!("cannot attach: {error}")))
        };
        let (mut source, mut target) = (open(&self.source)?, open(&self.target)?);
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
            if !self.job.goes_on(part) {
                return Err(Early::Cancelled);
            }
            if mirror.progress().error().is_some() {
                return Err(self.early(mirror));
            }
            // A later write would make a truncated file as long as before.
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
                // Something of a client takes long there.
                continue;
            };
            let bytes = self.copy_held(source, target, from, end).map_err(|error| {
                match self.job.is_cancelled() {
                    true => Early::Cancelled,
                    false => Early::Failed(format!("at byte {from}: {error}")),
                }
            })?;
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

    /// What was written until now is in the backup, and nothing later.
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
        // Nobody writes to it any more.
        let flushed = flush.run();
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
                "the bitmap {:?} was truncated meanwhile",
                incremental.name()
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
        exchange(manager, &servers.pool, &changes, last)
    }

    /// However long that takes: a disk must not stay on a mirror that nobody looks after.
    fn back_to_source(&self) {
        if Arc::ptr_eq(&self.disk.device(), &self.source) {
            return;
        }
        loop {
            match self.change_to(Arc::clone(&self.source), None) {
                Ok(()) | Err(Refusal::Ending | Refusal::NotFound(_)) => return,
                // All clients are gone, or are about to be.
                Err(_) if self.context.jobs.is_ending() => return,
                Err(refusal) => {
                    let name = self.disk.name();
                    tracing::warn!(
                        disk = name,
                        "the disk cannot leave its mirror yet: {refusal}"
                    );
                    std::thread::sleep(super::PAUSE);
                }
            }
        }
    }
}

/// The end of the hole that begins here, if one does.
fn hole_at(source: &mut BlockingIo, from: u64, total: u64) -> Option<u64> {
    let extents = source.block_status(from, total - from).ok()?;
    let first: &Extent = extents.first()?;
    let is_hole = first.allocation != Allocation::Data;
    is_hole.then(|| first.end.min(total))
}

/// Copies a range that is held. Bytes that were moved: none, if it is a hole still.
fn copy_range(
    source: &mut BlockingIo,
    target: &mut BlockingIo,
    from: u64,
    end: u64,
) -> io::Result<u64> {
    if hole_at(source, from, end) == Some(end) {
        let zeroes = IoRequest::write_zeroes(from, end - from).flagged(IoFlags::UNMAP);
        if target.run_plain(&zeroes).is_ok() {
            return Ok(0);
        }
    }
    let mut at = from;
    let mut bytes = vec![0; PART.min(end - from) as usize];
    while at < end {
        let length = PART.min(end - at) as usize;
        source.read_at(at, &mut bytes[..length])?;
        target.write_at(at, &bytes[..length])?;
        at += length as u64;
    }
    Ok(end - from)
}
