//! Backups of disks in use, as of their end (`copying`) and as of their start: drives [`jobs::push`] by the seed. A complete backup has the
//! content of the disk at that moment, also after a power cut. Later backups copy the changes only.

use std::sync::Arc;

use bdev::{BlockDevice, DirtyBitmap, Disk, FrozenBitmap, PointInTime, Ram, RamOptions};
use jobs::push::{Action, Push};
use jobs::{Early, Event, Now, Piece, Span};
use uring::simulated::Files;

use super::World;
use super::copying::{Backup, Copying, SimGoal};
use crate::files;
use crate::model::{BLOCK, Model, value_of};
use crate::random::Random;

/// Content of a disk at the start of a backup, with the old device of the disk.
struct Point {
    source: Arc<dyn BlockDevice>,
    point: PointInTime,
    /// Changes since the last backup.
    changed: Option<FrozenBitmap>,
}

impl World {
    /// Copies a disk to a raw file. The next backup of the disk continues this one.
    pub(super) fn back_up(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        let disk = 1 + random.below(self.plans.len() as u64 - 1) as usize;
        Files::set_faults(self.corruption);
        let of = self.life().disks[disk].clone();
        let bytes = of.device().capacity().bytes();
        let Some((target, backup)) = self.backup_target(disk, bytes) else {
            return;
        };
        let kind = match backup.changed {
            Some(_) => "incremental",
            None => "full",
        };
        log_step!(self, "d{disk}: {kind} backup");
        let source = of.device();
        let goal = SimGoal::Backup(backup);
        let (copying, is_complete) = match random.one_in(2) {
            true => {
                let of_disk = (disk, &of);
                let mut copying = Copying::new(of_disk, goal, source, target, &mut random);
                let is_complete = self.copy(&mut copying, &mut random);
                (copying, is_complete)
            }
            false => self.push(&of, disk, goal, target, &mut random),
        };
        if self.is_over() {
            return;
        }
        let SimGoal::Backup(Backup { path, model, .. }) = copying.goal else {
            return;
        };
        let changed = self
            .checkpoints
            .get(&disk)
            .map(|last| Arc::clone(&last.changed));
        of.recorder().record_in(changed.into_iter().collect());
        if is_complete {
            let model = model.expect("a backup has a moment");
            self.check_backup(disk, &path, &model);
        }
    }

    fn backup_target(&mut self, disk: usize, bytes: u64) -> Option<(Arc<dyn BlockDevice>, Backup)> {
        let number = self.tick();
        // A disk that has grown needs a new target.
        let last = self.checkpoints.get(&disk);
        let last = last.filter(|last| {
            files::open(&last.path)
                .metadata()
                .is_ok_and(|found| found.len() == bytes)
        });
        let changed = last.map(|last| Arc::clone(&last.changed));
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

    /// Copies the content at this moment. Returns the job, and whether it is complete.
    fn push(
        &mut self,
        of: &Arc<Disk>,
        disk: usize,
        goal: SimGoal,
        target: Arc<dyn BlockDevice>,
        random: &mut Random,
    ) -> (Copying, bool) {
        let source = of.device();
        let bytes = source.capacity().bytes();
        let scratch = Ram::create(RamOptions {
            size: bytes.next_multiple_of(1 << 20),
            ..RamOptions::default()
        });
        let scratch = Arc::new(scratch.expect("memory for a scratch device"));
        let mut point = Point {
            point: PointInTime::new(Arc::clone(&source), scratch, u64::MAX),
            source,
            changed: None,
        };
        let reader = point.point.reader();
        let mut copying = Copying::new((disk, of), goal, reader, target, random);
        let is_cut = self.change_over(of, &point.point.layer(), |world| {
            if let SimGoal::Backup(backup) = &mut copying.goal {
                let changed = backup.changed.as_ref();
                point.changed = changed.and_then(|bits| FrozenBitmap::copy(bits, bytes).ok());
                world.record(of, backup, disk);
            }
            true
        });
        let is_complete = is_cut && self.push_all(&mut copying, &mut point, random);
        (copying, is_complete)
    }

    fn push_all(&mut self, copying: &mut Copying, point: &mut Point, random: &mut Random) -> bool {
        let mut job = Push::new(point.source.capacity().bytes());
        if random.one_in(4) {
            self.set_faults(random.next());
        }
        let mut event = Event::Done;
        let outcome = loop {
            copying.order(random);
            let now = Now {
                time: self.clock.elapsed(),
                orders: copying.orders,
                lost: point.point.error().map(|error| error.to_string()),
            };
            event = match job.step(&now, event) {
                Action::End(outcome) => break outcome,
                action => self.push_step(copying, point, action, random),
            };
            if random.one_in(3) {
                self.run_clients(random);
            }
            if self.is_over() {
                return false;
            }
        };
        self.close_channels(copying);
        Files::set_faults(self.corruption);
        if self.is_over() {
            return false;
        }
        let disk = copying.disk;
        assert!(
            Arc::ptr_eq(&copying.of.device(), &point.source),
            "d{disk} has the wrong device after a backup"
        );
        log_step!(self, "d{disk}: the backup ends: {outcome:?}");
        match &outcome {
            Ok(()) => {}
            Err(Early::Cancelled) => assert!(copying.orders.is_cancelled),
            Err(Early::Failed(reason)) => assert!(
                self.is_troubled,
                "a backup of d{disk} fails without an injected fault: {reason}"
            ),
        }
        outcome.is_ok()
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
                point.point.end();
                let of = Arc::clone(&copying.of);
                while !self.is_over() && !self.change_over(&of, &point.source, |_| true) {}
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
    pub(super) fn record(&self, of: &Arc<Disk>, backup: &mut Backup, disk: usize) {
        let changed = backup.changed.iter().chain([&backup.next]);
        of.recorder().record_in(changed.cloned().collect());
        backup.model = Some(self.models[disk].clone());
    }
}
