//! Switch of a held disk to another device while clients send requests.

use std::sync::{Arc, mpsc};

use bdev::{BlockDevice, Disk, RangeLock};
use uring::simulated::Files;

use super::World;
use crate::life::WORKERS;

impl World {
    /// Returns true if the daemon was killed or the power was cut.
    pub(super) fn is_over(&self) -> bool {
        self.has_ended || Files::is_cut()
    }

    /// Holds the disk, runs `last`, and switches to the new device. If a step fails, the disk keeps its device.
    pub(super) fn change_over(
        &mut self,
        of: &Arc<Disk>,
        device: &Arc<dyn BlockDevice>,
        last: impl FnOnce(&mut World) -> bool,
    ) -> bool {
        self.prepare(of, device);
        let held = self.hold(of, 0, u64::MAX);
        let is_ready = held.is_some() && last(self);
        if is_ready {
            self.replace(of, device);
        } else if !self.is_over() {
            for worker in &mut self.life().workers {
                worker.io().drop_prepared(of);
            }
        }
        is_ready
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
