//! Restarts of the daemon: stop, kill or power cut, followed by checks of the files.

use qcow2::Repair;
use uring::simulated::Files;
use virtqueue::simulated::crash_after;

use super::{SimClient, Snapshot, World};
use crate::clients::{Kind, Outcome, Request};
use crate::files;
use crate::life::{BLK_QUEUES, DiskPlan, Lies};
use crate::model::{BLOCK, value_of};

impl World {
    pub(super) fn restart(&mut self) {
        self.settle();
        log_step!(self, "the daemon is stopped");
        self.stop();
        self.check_images(true);
        for path in self.plans.iter().flat_map(DiskPlan::files) {
            Files::add_file(&files::open(path)).expect("a file of the simulation");
        }
        self.models[0].lose();
        let now = self.tick();
        self.clients.clear();
        self.lose_reservations();
        for model in &mut self.models[1..] {
            model.crashed(now, false, &[]);
        }
        self.update_sizes();
        self.check_raw_data_files();
        self.take_snapshots();
        self.begin_life();
        self.verify();
    }

    /// Updates the model with new sizes that clients were not notified about.
    fn update_sizes(&mut self) {
        for (index, plan) in self.plans.iter().enumerate() {
            if plan.lies == Lies::Image {
                let (blocks, before) = (files::blocks(&plan.path), self.models[index].len());
                assert!(blocks >= before, "d{index} has shrunk");
                self.models[index].resize(blocks);
            }
        }
    }

    fn take_snapshots(&mut self) {
        for (disk, plan) in self.plans.iter().enumerate() {
            let has_lower = !plan.lower.is_empty();
            if plan.lies != Lies::Image
                || has_lower
                || self.random.one_in(2)
                || self.snapshots.len() > 5
            {
                continue;
            }
            if plan.data_file.is_some() {
                let refused = files::snapshot(&plan.path, "none").is_err();
                assert!(
                    refused,
                    "a snapshot of d{disk}, although it has a data file"
                );
                continue;
            }
            let name = format!("s{}", self.snapshots.len());
            let made = files::snapshot(&plan.path, &name);
            made.unwrap_or_else(|error| panic!("no snapshot of d{disk}: {error}"));
            Files::add_file(&files::open(&plan.path)).expect("a file of the simulation");
            self.snapshots.push(Snapshot {
                path: plan.path.clone(),
                below: plan.below.clone(),
                name,
                model: self.models[disk].clone(),
            });
        }
    }

    /// Checks that snapshots contain the disk as of their creation.
    pub(super) fn check_snapshots(&self) {
        for Snapshot {
            path,
            below,
            name,
            model,
        } in &self.snapshots
        {
            let of = path.display();
            let content = files::read_snapshot(path, name, below);
            let content =
                content.unwrap_or_else(|error| panic!("snapshot {name} of {of}: {error}"));
            for (lba, block) in content.chunks_exact(BLOCK).enumerate() {
                let lba = lba as u64;
                let found =
                    value_of(block, lba).and_then(|value| model.check(lba, value, u64::MAX));
                if let Err(reason) = found {
                    panic!("block {lba} of snapshot {name} of {of}: {reason}");
                }
            }
        }
    }

    /// Checks that a raw data file is identical to the disk.
    fn check_raw_data_files(&self) {
        for (disk, plan) in self.plans.iter().enumerate() {
            let Some(data_file) = plan.data_file.as_ref().filter(|file| file.is_raw) else {
                continue;
            };
            let content = std::fs::read(&data_file.path).expect("a file of the simulation");
            let model = &self.models[disk];
            for lba in 0..model.len() {
                let block = content.get(lba as usize * BLOCK..).unwrap_or_default();
                let mut whole = [0; BLOCK];
                let known = block.len().min(BLOCK);
                whole[..known].copy_from_slice(&block[..known]);
                let found =
                    value_of(&whole, lba).and_then(|value| model.check(lba, value, u64::MAX));
                if let Err(reason) = found {
                    panic!("block {lba} of the data file of d{disk}: {reason}");
                }
            }
        }
    }

    pub(super) fn stop(&mut self) {
        for one in &mut self.clients {
            one.client().detach();
        }
        let life = self.life.take().expect("the daemon lives");
        let time = &self.time;
        life.stop(|nanoseconds| time.advance(nanoseconds));
    }

    /// Checks all images. `closed`: they were closed in order.
    pub(super) fn check_images(&mut self, closed: bool) {
        for (index, plan) in self.plans.iter().enumerate() {
            let lower = plan.lower.iter().filter(|lower| lower.is_image);
            let own = (plan.lies == Lies::Image).then_some(&plan.path);
            for path in lower.map(|lower| &lower.path).chain(own) {
                let name = path.file_name().unwrap_or_default().display();
                let subject = format!("{name} of d{index}");
                let report = files::check(path, Repair::Nothing);
                let report =
                    report.unwrap_or_else(|error| panic!("{subject} cannot be checked: {error}"));
                let findings = report.findings.join("; ");
                assert_eq!(report.corruptions, 0, "{subject} is damaged: {findings}");
                assert!(
                    !closed || self.is_troubled || report.leaks == 0,
                    "{subject} was closed and has leaks: {findings}"
                );
                if report.leaks > 0 {
                    let repaired = files::check(path, Repair::Leaks);
                    let repaired = repaired.is_ok_and(|report| report.is_clean());
                    assert!(repaired, "leaks of {subject} are not repaired: {findings}");
                }
            }
        }
    }

    pub(super) fn crash(&mut self, power: bool) {
        log_step!(
            self,
            "{}",
            if power {
                "the power is cut"
            } else {
                "the daemon is killed"
            }
        );
        for one in &mut self.clients {
            one.client().detach();
        }
        let life = self.life.take().expect("the daemon lives");
        life.kill();
        self.check_faults();
        Files::set_faults(self.corruption);
        Files::cut_after(None);
        crash_after(None);
        let now = self.tick();
        let mut survive: Vec<u64> = Vec::new();
        for (token, pending) in &mut self.pending {
            if !power && self.clients[pending.client].client().survives() {
                pending.survived = true;
                survive.push(*token);
            }
        }
        self.pending.retain(|token, _| survive.contains(token));
        self.lose_reservations();
        for model in &mut self.models {
            model.crashed(now, power, &survive);
        }
        self.models[0].lose();
        if power {
            // The bits are in memory.
            self.checkpoints.clear();
        }
        for path in self.plans.iter().flat_map(DiskPlan::files) {
            let file = files::open(path);
            let done = match (power, self.has_lost_pages) {
                (true, _) => Files::cut_power(&file),
                // The next daemon cannot detect the failure, because the kernel reports it once. No guarantee applies to the lost data.
                (false, true) => Files::add_file(&file),
                (false, false) => Ok(()),
            };
            done.expect("a file of the simulation");
        }
        self.check_images(false);
        self.update_sizes();
        self.check_raw_data_files();
        // Only clients that continue remember their requests in flight.
        self.renew_clients(power);
        self.begin_life();
        self.verify();
    }

    /// Restarts guests without an in-flight region, and all guests after a power cut.
    fn renew_clients(&mut self, power: bool) {
        let mut clients = std::mem::take(&mut self.clients);
        if power {
            return;
        }
        for one in &mut clients {
            if one.client().survives() {
                continue;
            }
            let packed = self.random.one_in(2);
            match one {
                SimClient::Blk(blk) => blk.renew(packed && !blk.is_hostile),
                SimClient::Scsi(scsi) => scsi.renew(packed),
                SimClient::Iscsi(iscsi) => iscsi.forget(),
            }
        }
        self.clients = clients;
    }

    /// Reads all disks, checks the values and fixes them in the model.
    pub(super) fn verify(&mut self) {
        self.settle();
        for disk in 0..self.plans.len() {
            let index = disk * usize::from(BLK_QUEUES);
            for lba in (0..self.models[disk].len()).step_by(8) {
                let blocks = (self.models[disk].len() - lba).min(8);
                let data = self.run_now(index, disk, Kind::Read, lba, blocks);
                for at in 0..blocks {
                    let block = &data[at as usize * BLOCK..][..BLOCK];
                    let lba = lba + at;
                    let begun = self.now;
                    let found = value_of(block, lba).and_then(|value| {
                        self.models[disk].check(lba, value, begun)?;
                        Ok(value)
                    });
                    match found {
                        Ok(value) => self.models[disk].found(lba, value),
                        Err(reason) => panic!("block {lba} of d{disk} after a start: {reason}"),
                    }
                }
            }
            // The value read may have been in the page cache only.
            self.run_now(index, disk, Kind::Flush, 0, 0);
        }
    }

    fn run_now(&mut self, index: usize, disk: usize, kind: Kind, lba: u64, blocks: u64) -> Vec<u8> {
        let request = Request {
            token: self.tick(),
            disk,
            kind,
            lba,
            blocks,
            data: Vec::new(),
        };
        assert!(
            self.clients[index].client().submit(&request),
            "a request has room"
        );
        let mut done = Vec::new();
        for _ in 0..5_000 {
            self.round(100_000);
            self.clients[index].client().poll(&mut done);
            if let Some(one) = done.pop() {
                assert_eq!(one.token, request.token, "another request is answered");
                assert_eq!(
                    one.outcome,
                    Outcome::Good,
                    "{kind:?} of d{disk} at {lba} fails after a start"
                );
                return one.data;
            }
        }
        panic!("{kind:?} of d{disk} at {lba} does not complete");
    }
}
