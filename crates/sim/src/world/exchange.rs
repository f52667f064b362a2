//! Drives [`jobs::exchange`]: switches of held disks to other devices while clients send requests.

use std::sync::{Arc, mpsc};

use bdev::{BlockDevice, Disk, PointInTime, RangeLock};
use jobs::Event;
use jobs::exchange::ExchangeAction;
use jobs::points::{Restore, RestoreAction};
use uring::simulated::Files;

use super::World;
use crate::life::WORKERS;
use crate::random::Random;

/// A disk that is being switched to another device.
pub(super) struct Change {
    pub of: Arc<Disk>,
    pub device: Arc<dyn BlockDevice>,
    held: Option<RangeLock>,
    /// Workers are attached to a device that the disk does not use.
    is_prepared: bool,
}

impl Change {
    pub fn new(of: &Arc<Disk>, device: &Arc<dyn BlockDevice>) -> Change {
        Change {
            of: Arc::clone(of),
            device: Arc::clone(device),
            held: None,
            is_prepared: false,
        }
    }

    /// Returns true if the disk uses the device.
    pub fn is_done(&self) -> bool {
        Arc::ptr_eq(&self.of.device(), &self.device)
    }

    /// Unlocks the disk.
    pub fn release(&mut self) {
        self.held = None;
    }

    /// Returns true if the disk is not locked, and no worker is attached to a device that the disk does not use.
    pub fn is_free(&self) -> bool {
        self.held.is_none() && !self.is_prepared
    }
}

/// Returns an injected failure.
pub(super) fn injected() -> Event {
    Event::Failed("injected".to_owned())
}

impl World {
    /// Returns true if the daemon was killed or the power was cut.
    pub(super) fn is_over(&self) -> bool {
        self.has_ended || Files::is_cut()
    }

    /// Executes a step of an exchange that does not depend on the job.
    pub(super) fn change<D>(&mut self, change: &mut Change, action: ExchangeAction<D>) -> Event {
        let of = Arc::clone(&change.of);
        match action {
            ExchangeAction::Prepare(_) if change.is_done() => return Event::Unneeded,
            ExchangeAction::Prepare(_) => {
                self.prepare(&of, &change.device);
                change.is_prepared = true;
            }
            ExchangeAction::Hold => change.held = self.hold(&of, 0, u64::MAX),
            ExchangeAction::Replace(_) => {
                assert!(
                    change.held.is_some() || self.is_over(),
                    "{} is not held when its device is replaced",
                    of.name()
                );
                self.replace(&of, &change.device);
                change.is_prepared = false;
            }
            ExchangeAction::Release => change.held = None,
            ExchangeAction::Detach => {
                self.detach(&of);
                change.is_prepared = false;
            }
            ExchangeAction::Check
            | ExchangeAction::Flush
            | ExchangeAction::Record
            | ExchangeAction::Persist => {}
        }
        Event::Done
    }

    /// Attaches workers to a device that is not in use yet.
    pub(super) fn prepare(&mut self, of: &Arc<Disk>, device: &Arc<dyn BlockDevice>) {
        for worker in &mut self.life().workers {
            let attached = worker.io().prepare_device(of, device);
            attached.expect("a worker attaches to a device");
        }
    }

    /// Switches a held disk to a device that workers are attached to.
    pub(super) fn replace(&mut self, of: &Arc<Disk>, device: &Arc<dyn BlockDevice>) {
        let replaced = of.replace_device(Arc::clone(device));
        replaced.expect("checked before");
        for worker in &mut self.life().workers {
            worker.io().change_device(of);
        }
    }

    /// Detaches workers from a device that is not used.
    pub(super) fn detach(&mut self, of: &Arc<Disk>) {
        for worker in &mut self.life().workers {
            worker.io().drop_prepared(of);
        }
    }

    /// Drives [`Restore`]: the disk uses its source alone, unless the daemon has ended.
    pub(super) fn restore(
        &mut self,
        of: &Arc<Disk>,
        source: &Arc<dyn BlockDevice>,
        point: &PointInTime,
        random: &mut Random,
    ) {
        let mut change = Change::new(of, source);
        let mut job = Restore::default();
        let mut event = Event::Done;
        loop {
            event = match job.step(event) {
                RestoreAction::End => break,
                RestoreAction::EndPoint => {
                    point.end();
                    Event::Done
                }
                RestoreAction::Exchange(ExchangeAction::Hold | ExchangeAction::Replace(_))
                    if random.one_in(20) =>
                {
                    injected()
                }
                RestoreAction::Exchange(action) => {
                    let may_copy = action == ExchangeAction::Hold && point.error().is_none();
                    assert!(
                        !may_copy,
                        "{} is held while writes may wait for copies",
                        of.name()
                    );
                    self.change(&mut change, action)
                }
                RestoreAction::RetryLater(_) => {
                    self.run_clients(random);
                    Event::Done
                }
            };
            if self.is_over() {
                return;
            }
        }
        let name = of.name();
        assert!(
            change.is_done(),
            "{name} has a layer after its point in time"
        );
        assert!(change.is_free(), "{name} is locked after its point in time");
    }

    /// Locks a range against changes until the lock is dropped. `None`: the daemon has ended.
    pub(super) fn hold(&mut self, of: &Arc<Disk>, offset: u64, length: u64) -> Option<RangeLock> {
        let (grant, granted) = mpsc::channel();
        let locks = of.range_locks();
        locks.acquire(offset, length, move |lease| drop(grant.send(lease)));
        let mut held = None;
        self.rounds_until(|_| {
            held = granted.try_recv().ok();
            held.is_some()
        });
        held
    }

    /// Runs rounds until `done` returns true or the daemon has ended.
    pub(super) fn rounds_until(&mut self, mut done: impl FnMut(&mut World) -> bool) {
        for round in 0..20_000 {
            if self.is_over() || done(self) {
                return;
            }
            self.round_of_wait(round);
            for index in 0..self.clients.len() {
                if !self.is_over() {
                    self.poll(index);
                }
            }
        }
        panic!("a device replacement does not complete, with {WORKERS} workers");
    }
}
