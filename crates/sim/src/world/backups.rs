//! Backups of disks in use, as of their end (`copying`) and as of their start: drives [`jobs::push`] by the seed. A complete backup has the
//! content of the disk at that moment, also after a power cut. Later backups copy the changes only.

use std::sync::Arc;

use bdev::{BlockDevice, DirtyBitmap, Disk, FrozenBitmap, PointInTime, Ram, RamOptions};
use jobs::exchange::ExchangeAction;
use jobs::points::{self, Begin};
use jobs::push::{Action, Push};
use jobs::{Early, Event, Now, Outcome, Piece, Span};
use uring::simulated::Files;

use super::copying::{Backup, Copying, SimGoal};
use super::exchange::{Change, injected};
use super::{Pending, World};
use crate::files;
use crate::model::{BLOCK, Model, value_of};
use crate::random::Random;
use crate::schedule::Action as Step;

/// Content of a disk at the start of a backup, with the old device of the disk.
struct Point {
    source: Arc<dyn BlockDevice>,
    point: PointInTime,
    /// Changes since the last backup.
    changed: Option<FrozenBitmap>,
}

/// A running copy of a point in time.
struct RunningPush {
    copying: Copying,
    point: Point,
    job: Push,
    /// Result of the last action.
    event: Event,
}

impl World {
    /// Copies disks to raw files. The next backup of a disk continues this one, also after a kill.
    pub(super) fn back_up(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        let disk = 1 + random.below(self.plans.len() as u64 - 1) as usize;
        Files::set_faults(self.corruption);
        if random.one_in(2) {
            self.back_up_at_end(disk, &mut random);
            return;
        }
        let mut disks: Vec<usize> = (1..self.plans.len()).collect();
        disks.retain(|other| *other == disk || random.one_in(3));
        self.push(&disks, &mut random);
    }

    /// Copies the content at the end of the copy.
    fn back_up_at_end(&mut self, disk: usize, random: &mut Random) {
        let Some((target, backup)) = self.backup_target(disk) else {
            return;
        };
        let of = self.life().disks[disk].clone();
        let goal = SimGoal::Backup(backup);
        let mut copying = Copying::new((disk, &of), goal, of.device(), target, random);
        let is_complete = self.copy(&mut copying, random);
        if !self.is_over() {
            self.end_backup(copying, is_complete);
        }
    }

    /// Checks a complete backup. Without one, the changes since the last backup are still recorded.
    fn end_backup(&mut self, copying: Copying, is_complete: bool) {
        let Copying { disk, of, goal, .. } = copying;
        let SimGoal::Backup(Backup { path, model, .. }) = goal else {
            return;
        };
        let last = self.checkpoints.get(&disk);
        let changed = last.map(|last| Arc::clone(&last.changed));
        of.recorder().record_in(changed.into_iter().collect());
        self.recorded[disk] = self.now;
        if is_complete {
            let model = model.expect("a backup has a moment");
            self.check_backup(disk, &path, &model);
        }
    }

    fn backup_target(&mut self, disk: usize) -> Option<(Arc<dyn BlockDevice>, Backup)> {
        let number = self.tick();
        let bytes = self.life().disks[disk].device().capacity().bytes();
        // A disk that has grown needs a new target.
        let last = self.checkpoints.get(&disk);
        let last = last.filter(|last| {
            files::open(&last.path)
                .metadata()
                .is_ok_and(|found| found.len() == bytes)
        });
        let changed = last.map(|last| Arc::clone(&last.changed));
        let kind = match changed {
            Some(_) => "incremental",
            None => "full",
        };
        log_step!(self, "d{disk}: {kind} backup");
        let path = match last {
            Some(last) => last.path.clone(),
            None => {
                let path = self.plans[disk]
                    .path
                    .with_file_name(format!("backup{number}"));
                files::create_raw(&path, bytes / BLOCK as u64, 0);
                Files::add_file(&files::open(&path)).expect("a file of the simulation");
                path
            }
        };
        let opened = bdev::File::open(bdev::FileOptions::new(&path));
        self.check_faults();
        // Workers may still close the target of the last backup.
        let target = opened.ok().filter(|_| !self.is_over())?;
        let bitmap = tempfile::tempfile_in(self.folder.path()).expect("a file");
        bitmap
            .set_len(DirtyBitmap::file_bytes(bytes))
            .expect("space for a bitmap");
        let next = DirtyBitmap::map(&bitmap, bytes).expect("memory for a bitmap");
        let backup = Backup {
            path,
            changed,
            next: Arc::new(next),
            model: None,
        };
        Some((Arc::new(target), backup))
    }

    /// Checks that a backup is complete and durable.
    fn check_backup(&mut self, disk: usize, path: &std::path::Path, model: &Model) {
        Files::cut_power(&files::open(path)).expect("a file of the simulation");
        let content = std::fs::read(path).expect("a file of the simulation");
        for (lba, block) in content.chunks_exact(BLOCK).enumerate() {
            let lba = lba as u64;
            let found = value_of(block, lba).and_then(|value| model.check(lba, value, u64::MAX));
            if let Err(reason) = found {
                panic!("block {lba} of the backup of d{disk}: {reason}");
            }
        }
        log_step!(self, "d{disk}: backup checked");
    }

    /// Copies disks as they are now. Each copy completes on its own. The daemon may be killed between two of them.
    fn push(&mut self, disks: &[usize], random: &mut Random) {
        let mut running = Vec::new();
        for disk in disks {
            running.extend(self.begin_push(*disk, random));
            if self.is_over() {
                return;
            }
        }
        if self.cut.is_none() && random.one_in(8) {
            self.cut = Some(Step::Kill);
            Files::cut_after(Some(random.below(400)));
        }
        if random.one_in(4) {
            self.set_faults(random.next());
        }
        while !running.is_empty() {
            let index = random.below(running.len() as u64) as usize;
            let outcome = self.run_push(&mut running[index], random);
            if let Some(outcome) = outcome {
                self.end_push(running.swap_remove(index), &outcome);
            } else if random.one_in(3) {
                self.run_clients(random);
            }
            if self.is_over() {
                return;
            }
        }
        Files::set_faults(self.corruption);
    }

    /// Begins the point in time of a disk. Returns `None` if there is no target, or if the daemon has ended.
    fn begin_push(&mut self, disk: usize, random: &mut Random) -> Option<RunningPush> {
        let (target, backup) = self.backup_target(disk)?;
        let of = self.life().disks[disk].clone();
        let source = of.device();
        let bytes = source.capacity().bytes();
        let scratch = self.scratch(bytes, random)?;
        let mut point = Point {
            point: PointInTime::new(Arc::clone(&source), scratch, u64::MAX),
            source,
            changed: None,
        };
        let reader = point.point.reader();
        let goal = SimGoal::Backup(backup);
        let mut copying = Copying::new((disk, &of), goal, reader, target, random);
        match self.begin_point(&mut copying, &mut point, random)? {
            Ok(()) => Some(RunningPush {
                copying,
                point,
                job: Push::new(bytes),
                event: Event::Done,
            }),
            Err(_) => {
                log_step!(self, "d{disk}: the backup does not begin");
                self.end_backup(copying, false);
                None
            }
        }
    }

    /// Drives [`Begin`]. Returns `None` if the daemon has ended.
    fn begin_point(
        &mut self,
        copying: &mut Copying,
        point: &mut Point,
        random: &mut Random,
    ) -> Option<Outcome> {
        let of = Arc::clone(&copying.of);
        let mut change = Change::new(&of, &point.point.layer());
        let mut job = Begin::default();
        let mut event = Event::Done;
        loop {
            event = match job.step(event) {
                points::Action::End(outcome) => {
                    assert!(change.is_free(), "{} is locked after a start", of.name());
                    return Some(outcome);
                }
                points::Action::Exchange(ExchangeAction::Hold | ExchangeAction::Replace(_))
                    if random.one_in(40) =>
                {
                    injected()
                }
                points::Action::Exchange(action) => {
                    if let (ExchangeAction::Record, SimGoal::Backup(backup)) =
                        (action, &mut copying.goal)
                    {
                        let bytes = point.source.capacity().bytes();
                        let changed = backup.changed.as_ref();
                        point.changed =
                            changed.and_then(|bits| FrozenBitmap::copy(bits, bytes).ok());
                        self.record(&of, backup, copying.disk);
                    }
                    self.change(&mut change, action)
                }
                points::Action::CheckLayers => {
                    assert!(change.is_done(), "{} has no layer", of.name());
                    Event::Done
                }
                points::Action::EndPoints => {
                    self.restore(&of, &point.source, &point.point, random);
                    Event::Done
                }
                // A copy has no export, and its scratch device ends with its point in time.
                points::Action::Export
                | points::Action::Enter
                | points::Action::Unexport
                | points::Action::Discard => Event::Done,
            };
            if self.is_over() {
                return None;
            }
        }
    }

    /// Executes the next action of a copy. Returns the result of a copy that has ended.
    fn run_push(&mut self, push: &mut RunningPush, random: &mut Random) -> Option<Outcome> {
        let RunningPush {
            copying,
            point,
            job,
            event,
        } = push;
        copying.order(random);
        let now = Now {
            time: self.clock.elapsed(),
            orders: copying.orders,
            lost: point.point.error().map(|error| error.to_string()),
        };
        match job.step(&now, std::mem::replace(event, Event::Done)) {
            Action::End(outcome) => return Some(outcome),
            action => *event = self.push_step(copying, point, action, random),
        }
        None
    }

    fn end_push(&mut self, push: RunningPush, outcome: &Outcome) {
        let RunningPush {
            mut copying, point, ..
        } = push;
        self.close_channels(&mut copying);
        if self.is_over() {
            return;
        }
        let disk = copying.disk;
        assert!(
            Arc::ptr_eq(&copying.of.device(), &point.source),
            "d{disk} has the wrong device after a backup"
        );
        log_step!(self, "d{disk}: the backup ends: {outcome:?}");
        match outcome {
            Ok(()) => {}
            Err(Early::Cancelled) => assert!(copying.orders.is_cancelled),
            Err(Early::Failed(reason)) => assert!(
                self.is_troubled,
                "a backup of d{disk} fails without an injected fault: {reason}"
            ),
        }
        self.end_backup(copying, outcome.is_ok());
    }

    fn push_step(
        &mut self,
        copying: &mut Copying,
        point: &mut Point,
        action: Action,
        random: &mut Random,
    ) -> Event {
        match action {
            Action::Open => self.open_channels(copying),
            Action::Changed(Span { from, end }) => {
                let end = end.min(from + (1 + random.below(24)) * BLOCK as u64);
                let changed = point.changed.as_ref();
                let (end, is_data) = changed.map_or((end, true), |bits| bits.piece(from, end));
                Event::Piece(Piece { end, is_data })
            }
            Action::Range(action) => self.copy_range(copying, action),
            Action::Advance { end, .. } => {
                point.point.release(end);
                Event::Done
            }
            Action::EndPoint => {
                self.restore(&copying.of, &point.source, &point.point, random);
                Event::Done
            }
            Action::Flush => self.flush_target(copying),
            Action::Publish => self.publish(copying),
            Action::Complete => self.complete(copying),
            Action::Wait(_) => {
                self.run_clients(random);
                Event::Done
            }
            Action::Check
            | Action::Finish
            | Action::OpenFlush
            | Action::Remove(_)
            | Action::End(_) => Event::Done,
        }
    }

    /// Separates the changes before and after a backup. The disk is held.
    pub(super) fn record(&mut self, of: &Arc<Disk>, backup: &mut Backup, disk: usize) {
        let changed = backup.changed.iter().chain([&backup.next]);
        of.recorder().record_in(changed.cloned().collect());
        self.recorded[disk] = self.now;
        backup.model = Some(self.models[disk].clone());
    }

    /// Checks that the dirty bitmaps contain a change that began after they were set.
    pub(super) fn check_recorded(&mut self, pending: &Pending) {
        let request = &pending.request;
        let disk = request.disk;
        if pending.begin <= self.recorded[disk] {
            return;
        }
        let from = request.lba * BLOCK as u64;
        let end = from + request.blocks * BLOCK as u64;
        for bitmap in self.life().disks[disk].recorder().bitmaps() {
            assert!(
                bitmap.piece(from, end) == (end, true),
                "a dirty bitmap of d{disk} lacks {} blocks at {}",
                request.blocks,
                request.lba
            );
        }
    }

    /// Creates a scratch device of a point in time: in memory, where I/O completes at once, or a file, where it may be late and fail.
    /// Returns `None` if the daemon has ended.
    pub(super) fn scratch(
        &mut self,
        bytes: u64,
        random: &mut Random,
    ) -> Option<Arc<dyn BlockDevice>> {
        if random.one_in(2) {
            let scratch = Ram::create(RamOptions {
                size: bytes.next_multiple_of(1 << 20),
                ..RamOptions::default()
            });
            return Some(Arc::new(scratch.expect("memory for a scratch device")));
        }
        let number = self.tick();
        let path = self.folder.path().join(format!("scratch{number}"));
        files::create_raw(&path, bytes / BLOCK as u64, 0);
        Files::add_file(&files::open(&path)).expect("a file of the simulation");
        let opened = bdev::File::open(bdev::FileOptions::new(&path));
        self.check_faults();
        let scratch = opened.ok().filter(|_| !self.is_over())?;
        Some(Arc::new(scratch))
    }
}
