//! The moment at which a disk changes over to another device, while clients are at work: what the daemon does with a disk held.

use std::sync::{Arc, mpsc};

use bdev::{BlockDevice, Disk, RangeLock};
use uring::simulated::Files;

use super::World;
use crate::life::WORKERS;

impl World {
    /// The daemon has been killed, or the power cut, in the middle of something.
    pub(super) fn is_over(&self) -> bool {
        self.has_ended || Files::is_cut()
    }

    /// Nothing is in flight, `last` has gone well, and the next request goes to the device; or all is as it was.
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

    /// Workers attach to a device that is not in use yet.
    pub(super) fn prepare(&mut self, of: &Arc<Disk>, device: &Arc<dyn BlockDevice>) {
        for worker in &mut self.life().workers {
            let attached = worker.io().prepare_device(of, device);
            attached.expect("a worker attaches to a device");
        }
    }

    /// The disk, which is held, goes on in a device that workers are attached to.
    pub(super) fn replace(&mut self, of: &Arc<Disk>, device: &Arc<dyn BlockDevice>) {
        let replaced = of.replace_device(Arc::clone(device));
        replaced.expect("what was checked before");
        for worker in &mut self.life().workers {
            worker.io().change_device(of);
        }
    }

    /// Nothing that changes the range is in flight until this is dropped. `None`: the daemon has ended.
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

    /// Everybody goes on until then, or until the daemon has ended.
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
        panic!("a disk that changes over waits for ever, with {WORKERS} workers");
    }
}
