//! Drives [`jobs::copy`] by the seed: mirrors, commits and backups of disks in use. Clients do I/O between any two actions, users pause,
//! resume, cancel and switch at any time, and the power may be cut near a switch.
//!
//! Checked at the end of a job: the disk has the right device, no lock is left, and a failure has a fault as its cause. `backups`
//! checks the content of backups.

use std::path::PathBuf;
use std::sync::Arc;

use bdev::{BlockDevice, DirtyBitmap, Disk, Lockable, Mirror, RangeLock};
use block::{Allocation, IoError, IoFlags, IoRequest, STATUS_BYTES, decode_extents};
use guest_memory::IoBuffer;
use jobs::copy::{Action, Announcement, Device, Goal, Lacking, Plan};
use jobs::exchange::ExchangeAction;
use jobs::range::RangeAction;
use jobs::{Early, Event, Now, Orders, Outcome, Piece, Span};
use uring::simulated::Files;

use super::World;
use super::exchange::Change;
use super::moves::DeviceChannel;
use crate::life::{Lies, Lower};
use crate::model::{BLOCK, Model};
use crate::random::Random;
use crate::schedule::Action as Step;

/// Maximum number of blocks of a copied part.
const PART_MAX: u64 = 24;

/// Purpose of a copy, with the configuration of the disk afterwards.
pub(super) enum SimGoal {
    Mirror { path: PathBuf, lies: Lies },
    Commit,
    Backup(Backup),
}

/// A backup as of its end.
pub(super) struct Backup {
    pub path: PathBuf,
    /// Changes since the last backup on this target; `None` copies everything.
    pub changed: Option<Arc<DirtyBitmap>>,
    /// Changes since this backup.
    pub next: Arc<DirtyBitmap>,
    /// Expected content.
    pub model: Option<Model>,
}

/// A complete backup of a disk, which the next backup continues.
pub(super) struct Checkpoint {
    pub path: PathBuf,
    pub changed: Arc<DirtyBitmap>,
}

/// A copy job in progress.
pub(super) struct Copying {
    pub disk: usize,
    pub of: Arc<Disk>,
    pub mirror: Arc<Mirror>,
    source: Arc<dyn BlockDevice>,
    target: Arc<dyn BlockDevice>,
    pub goal: SimGoal,
    channels: Option<(DeviceChannel, DeviceChannel)>,
    pub orders: Orders,
    /// Number of actions before a user cancels the job.
    cancelled_after: Option<u64>,
    /// Lock of the part.
    held: Option<RangeLock>,
    /// Switch to the last device that was prepared.
    change: Change,
    buffer: IoBuffer,
    /// The target has the identity of the disk.
    is_identified: bool,
    /// The target was flushed after the last write.
    is_flushed: bool,
    /// The target of a backup has its name.
    is_published: bool,
    /// The target supports writing zeroes without data.
    can_zero: bool,
    /// A failure was injected.
    pub has_failed: bool,
    /// The target is locked against other writers, and is unlocked after a failure.
    is_locked: bool,
}

fn result(done: Result<IoBuffer, IoError>) -> Event {
    match done {
        Ok(_) => Event::Done,
        Err(error) => Event::Failed(error.to_string()),
    }
}

impl Copying {
    pub fn new(
        (disk, of): (usize, &Arc<Disk>),
        goal: SimGoal,
        source: Arc<dyn BlockDevice>,
        target: Arc<dyn BlockDevice>,
        random: &mut Random,
    ) -> Copying {
        let is_locked = matches!(goal, SimGoal::Commit);
        let switches = is_locked || random.one_in(2);
        Copying {
            disk,
            of: Arc::clone(of),
            mirror: Arc::new(Mirror::new(Arc::clone(&source), Arc::clone(&target))),
            change: Change::new(of, &source),
            source,
            target,
            goal,
            channels: None,
            orders: Orders {
                switches,
                ..Orders::default()
            },
            cancelled_after: random.one_in(6).then(|| random.below(150)),
            held: None,
            buffer: IoBuffer::default(),
            is_identified: false,
            is_flushed: false,
            is_published: false,
            can_zero: !random.one_in(4),
            has_failed: false,
            is_locked,
        }
    }

    fn plan(&self) -> Plan {
        let (goal, lacking) = match &self.goal {
            SimGoal::Mirror { .. } => (Goal::Mirror, Lacking::All),
            SimGoal::Commit => (Goal::Commit, Lacking::Pieces),
            SimGoal::Backup(backup) => match backup.changed {
                Some(_) => (Goal::Backup, Lacking::Pieces),
                None => (Goal::Backup, Lacking::All),
            },
        };
        Plan {
            goal,
            lacking,
            total: self.mirror.capacity().bytes(),
        }
    }

    /// Users change their orders.
    pub(super) fn order(&mut self, random: &mut Random) {
        self.orders.is_paused = random.one_in(match self.orders.is_paused {
            true => 2,
            false => 60,
        });
        self.orders.switches |= random.one_in(10);
        match &mut self.cancelled_after {
            Some(0) => {
                self.orders.is_cancelled = true;
                self.mirror.progress().abandon();
            }
            Some(left) => *left -= 1,
            None => {}
        }
    }

    /// Injects a failure of a step.
    fn fail(&mut self, step: &str) -> Event {
        self.has_failed = true;
        Event::Failed(format!("injected: {step}"))
    }

    fn device(&self, device: Device) -> Arc<dyn BlockDevice> {
        match device {
            Device::Source => Arc::clone(&self.source),
            Device::Mirror => self.mirror.clone(),
            Device::Target => Arc::clone(&self.target),
        }
    }
}

impl World {
    /// Runs the job to its end, or until the daemon ends. Returns true if the job has reached its goal.
    pub(super) fn copy(&mut self, copying: &mut Copying, random: &mut Random) -> bool {
        if random.one_in(4) {
            self.set_faults(random.next());
        }
        let mut job = jobs::copy::Copy::new(copying.plan());
        let mut event = Event::Done;
        let outcome = loop {
            copying.order(random);
            let now = Now {
                time: self.clock.elapsed(),
                orders: copying.orders,
                lost: copying.mirror.progress().error().map(|e| e.to_string()),
            };
            let action = match job.step(&now, event) {
                Action::End(outcome) => break outcome,
                action => action,
            };
            let switches = match &action {
                Action::Exchange(ExchangeAction::Prepare(Device::Target)) => Some(false),
                Action::Exchange(ExchangeAction::Replace(Device::Target)) => Some(true),
                _ => None,
            };
            event = self.execute(copying, action, random);
            match switches {
                // The target is flushed again after these writes.
                Some(false) => (0..6).for_each(|_| self.run_clients(random)),
                Some(true) if self.cut.is_none() && random.one_in(3) => {
                    self.cut = Some(Step::CutPower);
                    Files::cut_after(Some(random.below(12)));
                }
                _ => {}
            }
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
        self.check_end(copying, &outcome);
        outcome.is_ok()
    }

    fn check_end(&mut self, copying: &Copying, outcome: &Outcome) {
        let disk = copying.disk;
        log_step!(self, "d{disk}: the job ends: {outcome:?}");
        assert!(copying.held.is_none(), "a job of d{disk} leaves a lock");
        assert!(
            copying.change.is_free(),
            "a job of d{disk} leaves the disk locked, or workers attached to a device"
        );
        assert!(
            outcome.is_ok() || !copying.is_locked,
            "a failed job of d{disk} leaves its target locked"
        );
        let expected = match (outcome, &copying.goal) {
            (Ok(()), SimGoal::Mirror { .. } | SimGoal::Commit) => &copying.target,
            (Ok(()), SimGoal::Backup(_)) | (Err(_), _) => &copying.source,
        };
        assert!(
            Arc::ptr_eq(&copying.of.device(), expected),
            "d{disk} has the wrong device after a job"
        );
        match outcome {
            Ok(()) => {}
            Err(Early::Cancelled) => assert!(
                copying.orders.is_cancelled,
                "a job of d{disk} ends without a cancellation"
            ),
            Err(Early::Failed(reason)) => assert!(
                self.is_troubled || copying.has_failed,
                "a job of d{disk} fails without an injected fault: {reason}"
            ),
        }
    }

    fn execute(&mut self, copying: &mut Copying, action: Action, random: &mut Random) -> Event {
        match action {
            Action::Exchange(
                ExchangeAction::Hold
                | ExchangeAction::Check
                | ExchangeAction::Persist
                | ExchangeAction::Replace(_),
            ) if random.one_in(20) => copying.fail("a step of the exchange"),
            Action::Exchange(ExchangeAction::Flush) if random.one_in(20) => {
                copying.is_flushed = false;
                copying.fail("the flush takes too long")
            }
            Action::Check if random.one_in(400) => copying.fail("the check of the target"),
            Action::Exchange(action) => self.exchange(copying, action),
            Action::Open => self.open_channels(copying),
            Action::Survey(span) => self.survey(copying, span, random),
            // A slow I/O of a client overlaps the range.
            Action::Hold(_) if random.one_in(20) => Event::Busy,
            Action::Hold(Span { from, end }) => {
                copying.held = self.hold(&copying.of.clone(), from, end - from);
                Event::Done
            }
            Action::Range(action) => self.copy_range(copying, action),
            Action::Advance { end, .. } => {
                assert!(
                    copying.held.is_some(),
                    "a part of d{} is not held when it is mirrored",
                    copying.disk
                );
                copying.mirror.progress().advance(end);
                Event::Done
            }
            Action::Release => {
                copying.held = None;
                Event::Done
            }
            Action::Announce(Announcement::Ready(Some(_))) => {
                copying.orders.switches = false;
                // A flush may fail repeatedly. A user cancels the job.
                let patience = random.below(100);
                copying.cancelled_after.get_or_insert(patience);
                Event::Done
            }
            Action::Announce(_) | Action::Check | Action::OpenFlush => Event::Done,
            Action::Publish => self.publish(copying),
            Action::FlushSource => {
                let flushed = self.run_on(copying, Device::Source, &IoRequest::flush(), 0);
                flushed.map_or(Event::Done, result)
            }
            Action::Flush => self.flush_target(copying),
            Action::Complete => self.complete(copying),
            Action::Abandon => {
                Files::set_faults(self.corruption);
                copying.mirror.progress().abandon();
                Event::Done
            }
            Action::Wait(_) | Action::RetryLater(_) => {
                self.run_clients(random);
                Event::Done
            }
            Action::Drain => {
                self.close_channels(copying);
                let mirror = copying.mirror.clone();
                self.rounds_until(|_| mirror.progress().detached() == 0);
                Event::Done
            }
            Action::Unlock => self.unlock(copying),
            Action::End(_) => Event::Done,
        }
    }

    /// Gives the target of a backup its name. It must be durable.
    pub(super) fn publish(&mut self, copying: &mut Copying) -> Event {
        assert!(
            copying.is_flushed,
            "the target of a backup of d{} gets its name before it is durable",
            copying.disk
        );
        copying.is_published = true;
        Event::Done
    }

    /// Completes the checkpoint of a backup.
    pub(super) fn complete(&mut self, copying: &Copying) -> Event {
        if let SimGoal::Backup(backup) = &copying.goal {
            assert!(
                copying.is_published,
                "the checkpoint of d{} is complete before its target has a name",
                copying.disk
            );
            let checkpoint = Checkpoint {
                path: backup.path.clone(),
                changed: Arc::clone(&backup.next),
            };
            self.checkpoints.insert(copying.disk, checkpoint);
        }
        Event::Done
    }

    fn exchange(&mut self, copying: &mut Copying, action: ExchangeAction<Device>) -> Event {
        match action {
            ExchangeAction::Prepare(device) => copying.change.device = copying.device(device),
            ExchangeAction::Flush => return self.flush_target(copying),
            ExchangeAction::Record => {
                if let SimGoal::Backup(backup) = &mut copying.goal {
                    self.record(&copying.of, backup, copying.disk);
                }
            }
            ExchangeAction::Persist => copying.is_identified = true,
            ExchangeAction::Replace(device) => {
                if device == Device::Target {
                    self.moved(copying);
                }
                // Clients may have written to the target up to now.
                copying.is_flushed = false;
            }
            _ => {}
        }
        self.change(&mut copying.change, action)
    }

    /// Persists the configuration of the disk on its target.
    fn moved(&mut self, copying: &Copying) {
        let disk = copying.disk;
        assert!(
            copying.is_identified,
            "d{disk} switches to a target without its identity"
        );
        assert!(
            copying.is_flushed,
            "d{disk} switches to a target that is not durable"
        );
        // A cancellation during the last steps comes too late.
        assert!(
            copying.orders.switches,
            "d{disk} switches without a command"
        );
        let plan = &mut self.plans[disk];
        match &copying.goal {
            SimGoal::Mirror { path, lies } => {
                plan.path.clone_from(path);
                plan.lies = *lies;
                plan.data_file = None;
                plan.below.clear();
                plan.lower.clear();
            }
            SimGoal::Commit => {
                let lower = plan.lower.pop();
                let Lower {
                    path,
                    data_file,
                    is_image,
                } = lower.expect("a commit has a backing image");
                plan.path = path;
                plan.data_file = data_file;
                plan.lies = match is_image {
                    true => Lies::Image,
                    false => Lies::File,
                };
            }
            SimGoal::Backup(_) => panic!("a backup of d{disk} switches the disk"),
        }
        log_step!(self, "d{disk}: switched to its target");
    }

    fn unlock(&mut self, copying: &mut Copying) -> Event {
        let disk = copying.disk;
        copying.is_locked = false;
        let lockable = copying.target.capabilities().lockable;
        let given_up = lockable.map_or(Ok(()), Lockable::become_read_only);
        self.check_faults();
        assert!(
            given_up.is_ok() || self.is_over() || self.is_troubled,
            "the backing image of d{disk} is not closed: {given_up:?}"
        );
        Event::Done
    }

    pub(super) fn open_channels(&mut self, copying: &mut Copying) -> Event {
        let from = self.channel_of(&copying.source);
        let to = self.channel_of(&copying.target);
        copying.channels = Some((from, to));
        Event::Done
    }

    pub(super) fn close_channels(&mut self, copying: &mut Copying) {
        let Some((from, to)) = copying.channels.take() else {
            return;
        };
        for mut device in [from, to] {
            device.channel.close(&mut device.ring);
            self.rounds_until(|_| {
                device.step();
                device.channel.is_closed()
            });
        }
    }

    pub(super) fn flush_target(&mut self, copying: &mut Copying) -> Event {
        let flushed = self.run_on(copying, Device::Target, &IoRequest::flush(), 0);
        copying.is_flushed = flushed.as_ref().is_some_and(Result::is_ok);
        flushed.map_or(Event::Done, result)
    }

    /// Runs one I/O of the copier. Returns `None` if the daemon has ended.
    fn run_on(
        &mut self,
        copying: &mut Copying,
        device: Device,
        io: &IoRequest,
        bytes: usize,
    ) -> Option<Result<IoBuffer, IoError>> {
        let (from, to) = copying.channels.as_mut().expect("the copier is attached");
        match device {
            Device::Target => self.run(to, io, bytes),
            Device::Source | Device::Mirror => self.run(from, io, bytes),
        }
    }

    fn survey(&mut self, copying: &mut Copying, span: Span, random: &mut Random) -> Event {
        let part = (1 + random.below(PART_MAX)) * BLOCK as u64;
        let end = span.end.min(span.from + part);
        match random.one_in(3) {
            true => self.status(copying, Span { end, ..span }),
            false => Event::Piece(Piece { end, is_data: true }),
        }
    }

    fn status(&mut self, copying: &mut Copying, Span { from, end }: Span) -> Event {
        let io = IoRequest::block_status(from, end - from);
        let status = self.run_on(copying, Device::Source, &io, STATUS_BYTES);
        let Some(Ok(status)) = status else {
            return Event::Piece(Piece { end, is_data: true });
        };
        let mut bytes = vec![0; STATUS_BYTES];
        status.read_at(0, &mut bytes);
        let first = decode_extents(&bytes).next();
        let first = first.filter(|first| first.end > from);
        Event::Piece(Piece {
            end: first.as_ref().map_or(end, |first| first.end.min(end)),
            is_data: first.is_none_or(|first| first.allocation != Allocation::Hole),
        })
    }

    pub(super) fn copy_range(&mut self, copying: &mut Copying, action: RangeAction) -> Event {
        copying.is_flushed = false;
        let done = match action {
            RangeAction::Pieces(span) => return self.pieces(copying, span),
            RangeAction::Status(span) => return self.status(copying, span),
            RangeAction::Zero(_) if !copying.can_zero => {
                return Event::Failed("injected: operation not supported".to_owned());
            }
            RangeAction::Zero(Span { from, end }) => {
                let zeroes = IoRequest::write_zeroes(from, end - from).flagged(IoFlags::UNMAP);
                self.run_on(copying, Device::Target, &zeroes, 0)
            }
            RangeAction::Read(Span { from, end }) => {
                let read = IoRequest::read(from, end - from);
                let done = self.run_on(copying, Device::Source, &read, (end - from) as usize);
                done.map(|done| done.inspect(|buffer| copying.buffer = buffer.clone()))
            }
            RangeAction::Write(Span { from, end }) => {
                let content = std::mem::take(&mut copying.buffer);
                let write = IoRequest::write(from, end - from);
                let (_, to) = copying.channels.as_mut().expect("the copier is attached");
                self.run_with(to, &write, content)
            }
        };
        done.map_or(Event::Done, result)
    }

    fn pieces(&mut self, copying: &Copying, Span { from, end }: Span) -> Event {
        let piece = |(end, is_data)| Piece { end, is_data };
        if let SimGoal::Backup(backup) = &copying.goal {
            let Some(changed) = &backup.changed else {
                return Event::Pieces(vec![piece((end, true))]);
            };
            let mut at = from;
            let pieces = std::iter::from_fn(|| {
                let next = (at < end).then(|| changed.piece(at, end))?;
                at = next.0;
                Some(piece(next))
            });
            return Event::Pieces(pieces.collect());
        }
        let pieces = match copying.source.capabilities().image {
            Some(image) => image.own_pieces(from, end - from),
            None => Ok(vec![(end, true)]),
        };
        self.check_faults();
        match pieces {
            Ok(pieces) => Event::Pieces(pieces.into_iter().map(piece).collect()),
            Err(error) => Event::Failed(error.to_string()),
        }
    }
}
