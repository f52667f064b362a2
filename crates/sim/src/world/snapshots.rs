//! Drives [`jobs::snapshot`] by the seed: external snapshots of disks in use.

use std::sync::Arc;

use bdev::stepped::shape_new_images;
use bdev::{BackingName, BlockDevice, Disk, Image, ImageOptions, Lockable};
use jobs::Event;
use jobs::exchange::ExchangeAction;
use jobs::snapshot::{Action, Overlays, Snapshot};
use uring::simulated::Files;

use super::exchange::Change;
use super::{World, disks};
use crate::clients::{Kind, Request};
use crate::files;
use crate::life::{BLK_QUEUES, Lies, Lower};
use crate::random::Random;

/// Maximum length of the chain below a disk.
const LOWER_MAX: usize = 2;

/// A disk and its new image.
struct NewOverlay {
    disk: usize,
    before: Arc<dyn BlockDevice>,
    path: std::path::PathBuf,
    /// Switch of the disk to its new image.
    change: Change,
}

impl World {
    /// Switches a disk to a new image over its current one.
    pub(super) fn snapshot(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        let disk = 1 + random.below(self.plans.len() as u64 - 1) as usize;
        if self.plans[disk].lower.len() >= LOWER_MAX {
            return;
        }
        Files::set_faults(self.corruption);
        let of = self.life().disks[disk].clone();
        shape_new_images(disks::shape(0, &mut random));
        let Some((image, path)) = self.create_over(disk, &of) else {
            return;
        };
        // The folder name differs between runs.
        let file = path.file_name().unwrap_or_default().display();
        log_step!(self, "d{disk}: snapshot to {file}");
        let mut overlay = NewOverlay {
            disk,
            before: of.device(),
            path,
            change: Change::new(&of, &image),
        };
        let mut job = Snapshot::default();
        let mut event = Event::Done;
        let outcome = loop {
            event = match job.step(event) {
                Action::End(outcome) => break outcome,
                action => self.snapshot_step(&mut overlay, action, &mut random),
            };
            if self.is_over() {
                return;
            }
            if random.one_in(2) {
                self.run_clients(&mut random);
            }
        };
        if self.is_over() {
            return;
        }
        assert!(
            overlay.change.is_free(),
            "a snapshot leaves d{disk} locked or its image attached"
        );
        let expected = match &outcome {
            Ok(()) => &overlay.change.device,
            Err(_) => &overlay.before,
        };
        assert!(
            Arc::ptr_eq(&of.device(), expected),
            "d{disk} has the wrong device after a snapshot"
        );
        log_step!(self, "d{disk}: the snapshot ends: {outcome:?}");
    }

    fn snapshot_step(
        &mut self,
        overlay: &mut NewOverlay,
        action: Action,
        random: &mut Random,
    ) -> Event {
        let disk = overlay.disk;
        match action {
            Action::Exchange(ExchangeAction::Hold) if random.one_in(20) => {
                Event::Failed("I/Os in flight did not complete in time".to_owned())
            }
            Action::Exchange(action) => self.snapshot_exchange(overlay, action),
            Action::Flush => self.flush_old(disk),
            Action::Unlock => {
                let lockable = overlay.before.capabilities().lockable;
                let closed = lockable.map_or(Ok(()), Lockable::become_read_only);
                assert!(
                    closed.is_ok() || Files::is_cut() || self.is_troubled,
                    "d{disk} still writes to its backing image: {closed:?}"
                );
                Event::Done
            }
            Action::OpenFlush | Action::Remove | Action::End(_) => Event::Done,
        }
    }

    fn flush_old(&mut self, disk: usize) -> Event {
        match self.flushes(disk) {
            true => Event::Done,
            false => Event::Failed("cannot flush".to_owned()),
        }
    }

    fn snapshot_exchange(
        &mut self,
        overlay: &mut NewOverlay,
        action: ExchangeAction<Overlays>,
    ) -> Event {
        match action {
            ExchangeAction::Flush => return self.flush_old(overlay.disk),
            ExchangeAction::Replace(Overlays) => {
                let plan = &mut self.plans[overlay.disk];
                let lower = Lower {
                    path: std::mem::replace(&mut plan.path, overlay.path.clone()),
                    data_file: plan.data_file.take(),
                    is_image: plan.lies == Lies::Image,
                };
                plan.lies = Lies::Image;
                plan.lower.push(lower);
            }
            _ => {}
        }
        self.change(&mut overlay.change, action)
    }

    fn create_over(
        &mut self,
        disk: usize,
        of: &Arc<Disk>,
    ) -> Option<(Arc<dyn BlockDevice>, std::path::PathBuf)> {
        let number = self.tick();
        let plan = &self.plans[disk];
        let path = plan.path.with_file_name(format!("over{number}.qcow2"));
        let options = ImageOptions {
            cache: plan.cache,
            ..ImageOptions::new(&path)
        };
        let name = BackingName {
            name: plan.path.display().to_string(),
            format: match plan.lies {
                Lies::Image => "qcow2",
                _ => "raw",
            },
        };
        let before = of.device();
        let bytes = before.capacity().bytes();
        let made = Image::create_over(&options, &name, before, bytes);
        self.check_faults();
        match made {
            Ok(image) if !self.is_over() => {
                Files::add_file(&files::open(&path)).expect("a file of the simulation");
                let image: Arc<dyn BlockDevice> = Arc::new(image);
                let compatible = of.check_device(&*image);
                compatible.unwrap_or_else(|broken| {
                    panic!("cannot replace the device of d{disk} by an image: {broken}")
                });
                Some((image, path))
            }
            Ok(_) => None,
            Err(error) => {
                assert!(
                    self.is_over(),
                    "cannot create an overlay of d{disk}: {error}"
                );
                None
            }
        }
    }

    /// Sends a flush from a client with a free slot. It reaches the old device although the disk is held. Returns true if it succeeds.
    fn flushes(&mut self, disk: usize) -> bool {
        let request = Request {
            token: self.tick(),
            disk,
            kind: Kind::Flush,
            lba: 0,
            blocks: 0,
            data: Vec::new(),
        };
        let token = request.token;
        // The last queue of a device has a hostile driver. SCSI queues reach all disks.
        let of_blk = disk * usize::from(BLK_QUEUES);
        let of_scsi = self.plans.len() * usize::from(BLK_QUEUES)..self.clients.len();
        let mut may = (of_blk..of_blk + usize::from(BLK_QUEUES) - 1).chain(of_scsi);
        let has_room = may.find(|index| self.clients[*index].client().submit(&request));
        let Some(index) = has_room else {
            return false;
        };
        self.watched = Some((token, false));
        self.submitted(index, request, 0, 0);
        self.rounds_until(|world| !world.pending.contains_key(&token));
        !self.is_over() && self.watched == Some((token, true))
    }
}
