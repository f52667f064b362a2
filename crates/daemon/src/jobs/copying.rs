//! Drives [`jobs::copy`]: executes the actions of a mirror, a commit or a backup as of its end, on the thread of the job. Clients use the
//! layer [`bdev::Mirror`] meanwhile.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bdev::{BlockDevice, BlockingIo, DirtyBitmap, Disk, Mirror, RangeLock, TARGET_PATIENCE};
use block::SECTOR_BYTES;
use control::EventKind;
use control::objects::JobState;
use jobs::copy::{Action, Announcement, Device, Goal, Lacking, Plan};
use jobs::exchange::ExchangeAction;
use jobs::range::RangeAction;
use jobs::{Early, Event, Now, Outcome, Piece, Span};

use super::copy::shown;
use super::copy_range::{CANNOT_WRITE, RangeIo, hole_at, on_target, result};
use super::exchange::{Change, Flush, check_files};
use super::incremental::Incremental;
use super::partial::PartialFile;
use super::{Context, Job, JobKind};
use crate::objects::{NewDevice, Refusal};
use config::DiskConfig;

/// Largest range of one query for an image's own pieces, in bytes: one L2 table with 64 KiB clusters.
const OWN_MAX: u64 = 512 << 20;
/// Poll interval for I/Os in flight on the target of an ended job.
const DETACHED_STEP: Duration = Duration::from_millis(20);
/// Most unchanged bytes that an incremental backup skips per step.
const UNCHANGED_MAX: u64 = 1 << 40;

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
    /// Image that the job has created under its final name.
    pub new_image: Option<PathBuf>,
    /// File that a backup has created under a temporary name. It is removed unless the backup is complete.
    pub partial: Option<PartialFile>,
}

/// Resources of a running job. Fields are dropped in this order: I/O that was abandoned ends last.
struct Driver {
    held: Option<RangeLock>,
    change: Option<Change>,
    /// The disk or the daemon is ending.
    is_over: bool,
    copying: Copying,
    mirror: Arc<Mirror>,
    flush: Option<Flush>,
    /// Flushes of earlier attempts to switch. Their I/O may still be in flight.
    hung: Vec<Flush>,
    range: Option<RangeIo>,
}

impl Copying {
    /// Runs the job to its end. The disk is then on the target after a switch, on the source otherwise.
    pub fn run(self) {
        let mirror = self.begun.clone().unwrap_or_else(|| {
            let (source, target) = (Arc::clone(&self.source), Arc::clone(&self.target));
            Arc::new(Mirror::new(source, target))
        });
        let job = Arc::clone(&self.job);
        let event_bus = self.context.event_bus.clone();
        job.register_mirror(&mirror);
        let mut driver = Driver {
            held: None,
            change: None,
            is_over: false,
            mirror,
            flush: None,
            hung: Vec::new(),
            range: None,
            copying: self,
        };
        let outcome = driver.run();
        let (state, event, reason) = match outcome {
            Ok(()) => (JobState::Done, Some(EventKind::JobDone), None),
            Err(Early::Cancelled) => (JobState::Cancelled, Some(EventKind::JobCancelled), None),
            // The failure is reported already.
            Err(Early::Failed(reason)) => (JobState::Failed, None, Some(reason)),
        };
        if let Some(event) = event {
            tracing::info!(
                disk = job.disk,
                "{} ended: {}",
                job.kind.word(),
                event.word()
            );
        }
        // The devices are free before the end of the job is announced.
        drop(driver);
        job.set_state(state, reason);
        if let Some(event) = event {
            event_bus.publish(event, &job.disk);
        }
    }

    /// Fails if another program has truncated, removed or replaced the target.
    pub(super) fn check_target(&self) -> Result<(), String> {
        let checked = check_files(&*self.target);
        checked.map_err(|error| format!("cannot use the target: {error}"))
    }

    /// Removes the target if the job has created it and does not start.
    pub(super) fn remove_target(&self) {
        if let Some(partial) = &self.partial {
            return partial.remove();
        }
        self.target.remove_if_created();
        if let Some(path) = &self.new_image {
            std::fs::remove_file(path).ok();
        }
    }

    /// Gives the target of a complete backup its final name.
    pub(super) fn publish(&mut self) -> Result<(), String> {
        let Some(partial) = &mut self.partial else {
            return Ok(());
        };
        let published = partial.publish();
        published.map_err(|error| {
            let target = shown(&self.config.backend);
            format!("cannot give the target its name {target}: {error}")
        })
    }

    /// Keeps the target: its backup is complete.
    pub(super) fn keep_target(&mut self) {
        self.partial.iter_mut().for_each(PartialFile::keep);
    }

    /// Makes an I/O channel stop waiting when the job is cancelled or the mirror has failed.
    pub(super) fn patient(&self, io: BlockingIo, limit: Option<Duration>) -> BlockingIo {
        let job = Arc::clone(&self.job);
        io.while_wanted(move || !job.is_cancelled() && !job.has_lost_target(), limit)
    }

    /// Attaches the job to a device.
    pub(super) fn open(
        &self,
        device: &Arc<dyn BlockDevice>,
        limit: Option<Duration>,
    ) -> Result<BlockingIo, String> {
        let io = BlockingIo::new(Arc::clone(device)).map(|io| self.patient(io, limit));
        let kind = device.kind();
        io.map_err(|error| format!("cannot attach the job to the device ({kind}): {error}"))
    }

    /// Attaches the job to the source. With `lock = "while-active"` this may begin a turn: another daemon may have changed the disk.
    fn open_source(&self) -> Result<BlockingIo, String> {
        let mut source = self.open(&self.source, None)?;
        if self.source.capabilities().turns.is_none() {
            return Ok(source);
        }
        // The owner of an image answers after it has begun the turn, which marks the dirty bitmaps.
        let read = source.read_at(0, &mut [0; SECTOR_BYTES as usize]);
        read.map_err(|error| format!("cannot read the disk: {error}"))?;
        let (before, now) = (self.job.total, source.bytes());
        match before == now {
            true => Ok(source),
            false => Err(format!(
                "another daemon has resized the disk from {before} to {now} bytes; hint: repeat the command"
            )),
        }
    }

    /// Adds the name of the target to an error.
    pub(super) fn name_target(&self, error: &str) -> String {
        let target = shown(&self.config.backend);
        error.replacen("the target", &format!("the target {target}"), 1)
    }

    fn goal(&self) -> Goal {
        match self.job.kind {
            JobKind::Commit => Goal::Commit,
            JobKind::Backup => Goal::Backup,
            _ => Goal::Mirror,
        }
    }

    /// Returns the bitmap of ranges to copy, or `None` to copy everything.
    fn changed(&self) -> Option<&DirtyBitmap> {
        self.incremental.as_ref()?.changed()
    }

    /// Lists the pieces of a range of the source, as [`bdev::ImageDevice::own_pieces`].
    fn own_pieces(&self, offset: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        match self.source.capabilities().image {
            Some(image) => image.own_pieces(offset, length),
            None => Ok(vec![(offset + length, true)]),
        }
    }

    /// Returns the end of a range at `from` without data to copy. Clients can write there until the caller holds it.
    fn passed_over(&self, source: &mut BlockingIo, Span { from, end: limit }: Span) -> Option<u64> {
        let total = self.job.total;
        if self.goal() == Goal::Commit {
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
        hole_at(source, from, limit)
    }

    /// Lists the pieces of a held range. A commit copies only the image's own pieces, and an incremental backup only changed ones; the
    /// target has the rest.
    fn pieces(&self, Span { from, end }: Span) -> Event {
        let piece = |(end, is_data)| Piece { end, is_data };
        if let Some(changed) = self.changed() {
            let mut at = from;
            let pieces = std::iter::from_fn(|| {
                let next = (at < end).then(|| changed.piece(at, end))?;
                at = next.0;
                Some(piece(next))
            });
            return Event::Pieces(pieces.collect());
        }
        match self.own_pieces(from, end - from) {
            Ok(pieces) => Event::Pieces(pieces.into_iter().map(piece).collect()),
            Err(error) => Event::Failed(self.name_target(&error.to_string())),
        }
    }
}

impl Driver {
    fn run(&mut self) -> Outcome {
        let goal = self.copying.goal();
        let mut job = jobs::copy::Copy::new(Plan {
            goal,
            lacking: match goal == Goal::Commit || self.copying.changed().is_some() {
                true => Lacking::Pieces,
                false => Lacking::All,
            },
            total: self.copying.job.total,
        });
        let mut event = Event::Done;
        loop {
            let now = self.now();
            event = match job.step(&now, event) {
                Action::End(outcome) => {
                    if outcome.is_ok() {
                        self.copying.keep_target();
                    }
                    return outcome;
                }
                Action::Wait(time) => self.copying.job.wait_for_orders(now.orders, time),
                action => self.execute(action),
            };
        }
    }

    fn now(&self) -> Now {
        let job = &self.copying.job;
        let error = self.mirror.progress().error();
        let lost = |error| {
            let error = format!("{CANNOT_WRITE}: {error}");
            self.copying.name_target(&error)
        };
        Now {
            time: job.started.elapsed(),
            orders: job.orders(),
            lost: error.map(lost),
        }
    }

    fn execute(&mut self, action: Action) -> Event {
        match action {
            Action::Exchange(action) => self.exchange(action),
            Action::Open => self.open(),
            Action::Check => result(self.copying.check_target()),
            Action::Survey(span) => self.survey(span),
            Action::Hold(span) => self.hold(span),
            Action::Range(action) => self.copy_range(action),
            Action::Advance { end, bytes } => {
                self.mirror.progress().advance(end);
                self.copying.job.advance(end, bytes);
                Event::Done
            }
            Action::Release => {
                self.held = None;
                Event::Done
            }
            Action::Announce(announcement) => self.announce(announcement),
            Action::FlushSource => self.flush_source(),
            Action::OpenFlush => self.open_flush(),
            Action::Flush => self.flush(),
            Action::Publish => result(self.copying.publish()),
            Action::Complete => self.complete(),
            Action::Abandon => {
                self.mirror.progress().abandon();
                Event::Done
            }
            Action::RetryLater(reason) => self.retry_later(&reason),
            Action::Drain => self.drain(),
            Action::Unlock => self.unlock(),
            Action::Wait(_) | Action::End(_) => Event::Done,
        }
    }

    fn open(&mut self) -> Event {
        let copying = &self.copying;
        let opened = copying.open_source().and_then(|source| {
            // Clients wait for the held range as long as the target's I/O takes.
            let target = copying.open(&copying.target, Some(TARGET_PATIENCE))?;
            Ok(RangeIo::new(source, target))
        });
        result(opened.map(|range| self.range = Some(range)))
    }

    fn survey(&mut self, span: Span) -> Event {
        let source = self.range.as_mut().map(RangeIo::source);
        let passed = source.and_then(|source| self.copying.passed_over(source, span));
        Event::Piece(Piece {
            end: passed.unwrap_or(span.end),
            is_data: passed.is_none(),
        })
    }

    fn hold(&mut self, Span { from, end }: Span) -> Event {
        let job = &self.copying.job;
        let disk = &self.copying.disk;
        match disk.hold_while(from, end - from, || !job.is_cancelled()) {
            Ok(held) => {
                self.held = Some(held);
                Event::Done
            }
            Err(_) => Event::Busy,
        }
    }

    fn copy_range(&mut self, action: RangeAction) -> Event {
        if let RangeAction::Pieces(span) = action {
            return self.copying.pieces(span);
        }
        let Some(range) = &mut self.range else {
            return Event::Failed("the copier is not attached".to_owned());
        };
        let name = |error: String| self.copying.name_target(&error);
        match range.execute(&self.copying.job, action) {
            Event::Failed(error) => Event::Failed(name(error)),
            Event::Abandoned(error) => Event::Abandoned(name(error)),
            event => event,
        }
    }

    fn announce(&self, announcement: Announcement) -> Event {
        let Copying { job, context, .. } = &self.copying;
        match announcement {
            Announcement::Ready(reason) => {
                let is_first = job.control().state == JobState::Running;
                // A commit switches by itself, unless there is a reason not to.
                let waits = self.copying.goal() != Goal::Commit || reason.is_some();
                if let Some(reason) = &reason {
                    let kind = job.kind.word();
                    tracing::warn!(disk = job.disk, "the {kind} has not switched: {reason}");
                    job.control().orders.switches = false;
                }
                job.set_state(JobState::Ready, reason);
                if is_first && waits {
                    context.event_bus.publish(EventKind::JobReady, &job.disk);
                }
            }
            Announcement::Finishing => job.set_state(JobState::Finishing, None),
            Announcement::Failed(reason) => {
                tracing::error!(disk = job.disk, "{} failed: {reason}", job.kind.word());
                job.fail(&reason);
                context.event_bus.publish(EventKind::JobFailed, &job.disk);
            }
        }
        Event::Done
    }

    /// Flushes the source. After a failed fsync, its data may be those before the lost writes, and the target would not know.
    fn flush_source(&mut self) -> Event {
        let disk = &self.copying.job.disk;
        let (job, source) = (
            Arc::clone(&self.copying.job),
            Arc::clone(&self.copying.source),
        );
        // Much data may be in a cache: only the user decides not to wait for it.
        let is_wanted = move || {
            let is_over = job.is_cancelled() || job.has_lost_target();
            !is_over && !job.orders().accepts_loss
        };
        let patient = |io: BlockingIo| io.while_wanted(is_wanted, None);
        let reason = match Flush::prepare(disk, source, patient) {
            Err(refusal) => refusal.to_string(),
            Ok(mut flush) => match flush.run() {
                Ok(()) => return Event::Done,
                Err(refusal) => {
                    // Its I/O may still be in flight.
                    self.hung.push(flush);
                    refusal.to_string()
                }
            },
        };
        Event::Failed(format!(
            "{reason}; acknowledged writes may be missing in the copy; hint: check the data, then lunette job switch {disk} --force"
        ))
    }

    fn open_flush(&mut self) -> Event {
        self.hung.extend(self.flush.take());
        let target = Arc::clone(&self.copying.target);
        let patient = |io| self.copying.patient(io, None);
        let flush = Flush::prepare(&self.copying.job.disk, target, patient);
        result(flush.map(|flush| self.flush = Some(flush)))
    }

    fn flush(&mut self) -> Event {
        let job = &self.copying.job;
        result(match &mut self.flush {
            Some(flush) => on_target(job, || flush.run()).map_err(|refusal| refusal.to_string()),
            None => Err("the flush is not attached".to_owned()),
        })
    }

    fn complete(&mut self) -> Event {
        let Some(incremental) = &mut self.copying.incremental else {
            return Event::Done;
        };
        if let Some(changed) = incremental.changed()
            && changed.is_broken()
        {
            let since = incremental.since();
            let reason = format!("the bitmap {since:?} was truncated during the backup");
            return Event::Failed(reason);
        }
        result(incremental.complete())
    }

    fn retry_later(&mut self, reason: &str) -> Event {
        // All clients are gone or about to be disconnected.
        self.is_over |= self.copying.context.jobs.is_ending();
        if !self.is_over {
            let disk = &self.copying.job.disk;
            tracing::warn!(
                disk,
                "cannot remove the job's layer from the disk yet: {reason}"
            );
            std::thread::sleep(jobs::PAUSE);
        }
        Event::Done
    }

    /// Waits until no I/O of the job or of clients uses the target. Its file must not be reused earlier.
    fn drain(&mut self) -> Event {
        (self.flush, self.range) = (None, None);
        self.hung.clear();
        let jobs = &self.copying.context.jobs;
        while self.mirror.progress().detached() > 0 && !jobs.is_ending() {
            std::thread::sleep(DETACHED_STEP);
        }
        Event::Done
    }

    fn unlock(&self) -> Event {
        if let Some(lockable) = self.copying.target.capabilities().lockable
            && let Err(error) = lockable.become_read_only()
        {
            tracing::warn!(
                disk = self.copying.job.disk,
                "cannot release the write lock of its backing image: {error}"
            );
        }
        Event::Done
    }

    fn exchange(&mut self, action: ExchangeAction<Device>) -> Event {
        let done = match action {
            ExchangeAction::Prepare(device) => return self.prepare(device),
            ExchangeAction::Check => return result(self.copying.check_target()),
            ExchangeAction::Flush => {
                // Clients wait.
                let limit = |io| self.copying.patient(io, Some(TARGET_PATIENCE));
                self.flush = self.flush.take().map(|flush| flush.limit(limit));
                return self.flush();
            }
            ExchangeAction::Record => {
                if let Some(incremental) = &self.copying.incremental {
                    incremental.record();
                }
                Ok(())
            }
            ExchangeAction::Detach => {
                self.change = None;
                Ok(())
            }
            action => match &mut self.change {
                Some(change) => change.execute(&self.copying.context, action),
                None => Ok(()),
            },
        };
        if let Err(Refusal::Ending | Refusal::NotFound(_)) = &done {
            self.is_over = true;
        }
        if let (ExchangeAction::Replace(Device::Target), Ok(())) = (action, &done)
            && let Some(removable) = self.copying.source.capabilities().removable
        {
            // No device is opened as this disk again, so memory reserved for that is freed.
            removable.forget();
        }
        result(done)
    }

    fn prepare(&mut self, device: Device) -> Event {
        let copying = &self.copying;
        let has_source = || Arc::ptr_eq(&copying.disk.device(), &copying.source);
        let (device, config) = match device {
            Device::Source if self.is_over || has_source() => return Event::Unneeded,
            Device::Mirror => (Arc::clone(&self.mirror) as Arc<dyn BlockDevice>, None),
            Device::Source => (Arc::clone(&copying.source), None),
            Device::Target => (Arc::clone(&copying.target), Some(copying.config.clone())),
        };
        let change = [NewDevice {
            disk: Arc::clone(&copying.disk),
            device,
            config,
        }];
        let prepared = Change::prepare(&copying.context.servers.pool, &change);
        result(prepared.map(|change| self.change = Some(change)))
    }
}
