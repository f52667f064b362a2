//! Drives [`jobs::points`] and [`jobs::pull`] by the seed: points in time of several disks at one moment, which a backup program reads
//! while clients write. All disks have the content of the same moment. After a failure or a cancellation at any step, no disk has a layer,
//! and no export, scratch file or checkpoint is left.

use std::sync::Arc;

use bdev::{BlockDevice, PointInTime};
use block::IoRequest;
use jobs::exchange::ExchangeAction;
use jobs::points::{self, Begin};
use jobs::pull::{self, Pull};
use jobs::{Early, Event, Now, Orders, Outcome};
use uring::simulated::Files;

use super::World;
use super::exchange::Change;
use super::moves::DeviceChannel;
use crate::model::{BLOCK, Model, value_of};
use crate::random::Random;

/// Maximum number of blocks of one read.
const READ_MAX: u64 = 24;

/// A disk of a backup.
struct PulledDisk {
    disk: usize,
    source: Arc<dyn BlockDevice>,
    point: PointInTime,
    /// Switch of the disk to its layer.
    change: Change,
    /// Expected content.
    model: Option<Model>,
    /// Channel of a client, while the disk is exported.
    channel: Option<DeviceChannel>,
    has_checkpoint: bool,
}

/// A backup of several disks in progress.
struct Backup {
    disks: Vec<PulledDisk>,
    /// Scratch files and bitmaps are removed.
    is_discarded: bool,
    /// A disk had lost its point in time at the end.
    is_lost: bool,
    /// A failure was injected.
    has_failed: bool,
    orders: Orders,
    /// Number of steps before a user cancels the backup.
    cancelled_after: Option<u64>,
}

fn failed(reason: &str) -> Event {
    Event::Failed(reason.to_owned())
}

impl World {
    /// Serves one or several disks as they are now.
    pub(super) fn pull(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        Files::set_faults(self.corruption);
        let mut disks: Vec<usize> = (1..self.plans.len()).collect();
        while disks.len() > 1 && random.one_in(3) {
            disks.remove(random.below(disks.len() as u64) as usize);
        }
        log_step!(self, "pull of disks {disks:?}");
        let limit = match random.one_in(4) {
            true => 64 << 10,
            false => u64::MAX,
        };
        let disks = disks.into_iter();
        let disks = disks.map(|disk| self.pulled_disk(disk, limit, &mut random));
        let Some(disks) = disks.collect() else {
            return;
        };
        let mut backup = Backup {
            disks,
            is_discarded: false,
            is_lost: false,
            has_failed: false,
            orders: Orders::default(),
            cancelled_after: random.one_in(3).then(|| random.below(30)),
        };
        let Some(outcome) = self.begin_points(&mut backup, &mut random) else {
            return;
        };
        let outcome = match outcome {
            Ok(()) => self.serve_points(&mut backup, &mut random),
            Err(early) => Some(Err(early)),
        };
        if let Some(outcome) = outcome {
            self.check_pull(&backup, &outcome);
        }
    }

    /// Returns `None` if the daemon has ended.
    fn pulled_disk(&mut self, disk: usize, limit: u64, random: &mut Random) -> Option<PulledDisk> {
        let of = self.life().disks[disk].clone();
        let source = of.device();
        let scratch = self.scratch(source.capacity().bytes(), random)?;
        let point = PointInTime::new(Arc::clone(&source), scratch, limit);
        Some(PulledDisk {
            disk,
            source,
            change: Change::new(&of, &point.layer()),
            point,
            model: None,
            channel: None,
            has_checkpoint: false,
        })
    }

    /// Returns `None` if the daemon has ended.
    fn begin_points(&mut self, backup: &mut Backup, random: &mut Random) -> Option<Outcome> {
        let mut job = Begin::default();
        let mut event = Event::Done;
        loop {
            backup.order();
            event = match job.step(event) {
                points::Action::End(outcome) => return Some(outcome),
                action => self.points_step(backup, &action, random),
            };
            if random.one_in(2) {
                self.run_clients(random);
            }
            if self.is_over() {
                return None;
            }
        }
    }

    fn points_step(
        &mut self,
        backup: &mut Backup,
        action: &points::Action,
        random: &mut Random,
    ) -> Event {
        match action {
            points::Action::Exchange(action) => return self.cut(backup, *action, random),
            points::Action::CheckLayers => {
                let mut disks = backup.disks.iter();
                let has_layers = disks.all(|one| one.change.is_done());
                assert!(has_layers, "a disk of a backup has no layer");
            }
            points::Action::Export => {
                for index in 0..backup.disks.len() {
                    if random.one_in(30) {
                        return backup.fail("cannot listen");
                    }
                    let reader = backup.disks[index].point.reader();
                    backup.disks[index].channel = Some(self.channel_of(&reader));
                }
            }
            points::Action::Enter if backup.orders.is_cancelled => {
                return failed("the backup was cancelled");
            }
            points::Action::Enter | points::Action::End(_) => {}
            points::Action::Unexport => self.unexport(backup),
            points::Action::EndPoints => self.end_points(backup, random),
            points::Action::Discard => backup.is_discarded = true,
        }
        Event::Done
    }

    /// Executes a step of the switch of all disks to their layers.
    fn cut(
        &mut self,
        backup: &mut Backup,
        action: ExchangeAction<points::Layers>,
        random: &mut Random,
    ) -> Event {
        if matches!(action, ExchangeAction::Record) && random.one_in(40) {
            return backup.fail("cannot use the checkpoint");
        }
        for index in 0..backup.disks.len() {
            let is_hold = matches!(action, ExchangeAction::Hold);
            if is_hold && random.one_in(40) {
                let held = &mut backup.disks[..index];
                held.iter_mut().for_each(|one| one.change.release());
                return backup.fail("I/Os in flight did not complete in time");
            }
            let one = &mut backup.disks[index];
            if let ExchangeAction::Record = action {
                one.model = Some(self.models[one.disk].clone());
            }
            self.change(&mut one.change, action);
            if is_hold && random.one_in(2) {
                self.run_clients(random);
            }
        }
        Event::Done
    }

    /// Returns `None` if the daemon has ended.
    fn serve_points(&mut self, backup: &mut Backup, random: &mut Random) -> Option<Outcome> {
        if random.one_in(4) {
            self.set_faults(random.next());
        }
        let mut job = Pull::new(backup.disks.len());
        let mut event = Event::Done;
        let mut lost = vec![None; backup.disks.len()];
        let ended_after = random.below(20);
        for number in 0_u64.. {
            backup.order();
            backup.orders.switches |= number >= ended_after;
            for (one, lost) in backup.disks.iter().zip(&mut lost) {
                if lost.is_none() {
                    *lost = one.point.error().map(|error| error.to_string());
                    backup.has_failed |= lost.is_some();
                }
            }
            let now = Now {
                time: self.clock.elapsed(),
                orders: backup.orders,
                ..Now::default()
            };
            event = match job.step(&now, &lost, event) {
                pull::Action::End(outcome) => {
                    Files::set_faults(self.corruption);
                    return Some(outcome);
                }
                action => self.pull_step(backup, action, random),
            };
            if random.one_in(3) {
                self.run_clients(random);
            }
            if self.is_over() {
                return None;
            }
        }
        None
    }

    fn pull_step(
        &mut self,
        backup: &mut Backup,
        action: pull::Action,
        random: &mut Random,
    ) -> Event {
        match action {
            pull::Action::Wait(_) => {
                self.read_points(backup, random);
                self.run_clients(random);
            }
            pull::Action::Lose(disk, _) => {
                self.close_export(&mut backup.disks[disk]);
                self.end_point(&backup.disks[disk], random);
            }
            pull::Action::Finish | pull::Action::End(_) => {}
            pull::Action::Unexport => {
                self.read_points(backup, random);
                self.unexport(backup);
            }
            pull::Action::EndPoints => {
                backup.is_lost = backup.disks.iter().any(|one| is_lost(&one.point));
                self.end_points(backup, random);
            }
            pull::Action::Complete(_) if backup.is_lost => {
                panic!("a pull that has lost a point in time completes a checkpoint");
            }
            pull::Action::Complete(_) if random.one_in(8) => {
                return backup.fail("cannot persist its dirty bitmap");
            }
            pull::Action::Complete(disk) => backup.disks[disk].has_checkpoint = true,
            pull::Action::Revoke(disk) => backup.disks[disk].has_checkpoint = false,
            pull::Action::Discard => backup.is_discarded = true,
        }
        Event::Done
    }

    /// A backup program reads a part of a disk.
    fn read_points(&mut self, backup: &mut Backup, random: &mut Random) {
        let index = random.below(backup.disks.len() as u64) as usize;
        let one = &mut backup.disks[index];
        let Some(channel) = one.channel.as_mut() else {
            return;
        };
        let model = one.model.as_ref().expect("the backup has a moment");
        let blocks = one.source.capacity().bytes() / BLOCK as u64;
        let from = random.below(blocks);
        let count = (1 + random.below(READ_MAX)).min(blocks - from);
        let (offset, bytes) = (from * BLOCK as u64, count * BLOCK as u64);
        let read = self.run(channel, &IoRequest::read(offset, bytes), bytes as usize);
        let content = match read {
            None => return,
            Some(Ok(content)) => content,
            Some(Err(error)) => {
                assert!(
                    self.is_troubled || is_lost(&one.point),
                    "a client of the backup of d{} cannot read: {error}",
                    one.disk
                );
                return;
            }
        };
        let mut block = vec![0; BLOCK];
        for lba in from..from + count {
            content.read_at((lba - from) as usize * BLOCK, &mut block);
            let found = value_of(&block, lba).and_then(|value| model.check(lba, value, u64::MAX));
            if let Err(reason) = found {
                panic!("block {lba} of the pull of d{}: {reason}", one.disk);
            }
        }
    }

    fn unexport(&mut self, backup: &mut Backup) {
        for one in &mut backup.disks {
            self.close_export(one);
        }
    }

    fn close_export(&mut self, one: &mut PulledDisk) {
        if let Some(mut channel) = one.channel.take() {
            channel.channel.close(&mut channel.ring);
            self.rounds_until(|_| {
                channel.step();
                channel.channel.is_closed()
            });
        }
    }

    fn end_points(&mut self, backup: &Backup, random: &mut Random) {
        for one in &backup.disks {
            self.end_point(one, random);
        }
    }

    fn end_point(&mut self, one: &PulledDisk, random: &mut Random) {
        assert!(
            one.channel.is_none() || self.is_over(),
            "the point in time of d{} ends while it is exported",
            one.disk
        );
        self.restore(&one.change.of, &one.source, &one.point, random);
    }

    fn check_pull(&mut self, backup: &Backup, outcome: &Outcome) {
        if self.is_over() {
            return;
        }
        log_step!(self, "the pull ends: {outcome:?}");
        assert!(
            backup.disks.iter().all(|one| one.change.is_free()),
            "a pull leaves a lock, or workers attached to layers"
        );
        for one in &backup.disks {
            let disk = one.disk;
            assert!(
                Arc::ptr_eq(&one.change.of.device(), &one.source),
                "d{disk} has a layer after a pull"
            );
            assert!(one.channel.is_none(), "d{disk} is exported after a pull");
            assert_eq!(
                one.has_checkpoint,
                outcome.is_ok(),
                "the pull ends with {outcome:?}: checkpoint of d{disk}"
            );
        }
        assert!(
            outcome.is_ok() || backup.is_discarded,
            "a failed pull leaves its scratch files"
        );
        match outcome {
            Ok(()) => {}
            Err(Early::Cancelled) => assert!(backup.orders.is_cancelled),
            Err(Early::Failed(reason)) => assert!(
                backup.has_failed || backup.orders.is_cancelled || self.is_troubled,
                "a pull fails without an injected fault: {reason}"
            ),
        }
    }
}

/// Returns true if the point in time has failed and was not ended.
fn is_lost(point: &PointInTime) -> bool {
    point
        .error()
        .is_some_and(|error| error != bdev::PointInTimeError::Ended)
}

impl Backup {
    /// A user may cancel the backup.
    fn order(&mut self) {
        match &mut self.cancelled_after {
            Some(0) => self.orders.is_cancelled = true,
            Some(left) => *left -= 1,
            None => {}
        }
    }

    fn fail(&mut self, reason: &str) -> Event {
        self.has_failed = true;
        failed(reason)
    }
}
