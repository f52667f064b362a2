//! Changes that wait for clients. Removed exports and logical units and shrinking disks are drained first: new requests are refused and
//! requests in flight end. Clients and block devices determine the time, so each change drains on a thread of its own, and the owner makes
//! other changes meanwhile. A draining object has the state `removing`.
//!
//! ```text
//!   begin_change ──▶ objects to drain ──none───────────────────────▶ finish ──▶ reply
//!                          └──▶ thread: drain ──▶ message to the owner ─┘
//! ```

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ::control::{EventKind, counted};
use bdev::{Disk, ResizeError, Shrinking};
use reactor::Pool;
use scsi_exec::Holding;

use super::Message;
use super::changes::Change;
use super::opening::removed_by;
use super::owner::{ChangeOptions, ChangeResult, Owner, refused};
use super::plan::{ExportLuns, Plan, Resize};
use super::refusal::{Fault, Refusal};
use super::state_store::Resizing;
use crate::exports::{self, ChapUsers, ExportDevice};
use config::{Config, ExportConfig, LunConfig};

/// Longest wait of a removal for requests in flight before it aborts them.
const DRAIN_PATIENCE: Duration = Duration::from_secs(5);

/// Shortest drain that is logged and announced.
const ANNOUNCED: Duration = Duration::from_millis(200);

/// Hint for conflicts with a draining object.
pub(super) const HELP: &str = "wait until its requests have completed, see its status";

/// A change that may wait for clients.
pub enum Work {
    /// Change of some objects.
    Change(Box<Change>),
    /// New contents of the configuration file and flags.
    Reload(Box<Config>),
}

impl Work {
    /// Returns true if the work replaces the whole configuration.
    pub(super) fn is_whole(&self) -> bool {
        match self {
            Work::Reload(_) => true,
            Work::Change(change) => matches!(**change, Change::Replace(_)),
        }
    }
}

/// Receives the result of a change.
pub type Reply = Box<dyn FnOnce(Result<ChangeResult, Refusal>) + Send>;

/// Objects that drain for one change.
#[derive(Clone, Debug)]
pub struct Draining {
    number: u64,
    since: Instant,
    /// The change replaces the whole configuration.
    is_whole: bool,
    is_announced: bool,
    exports: Vec<String>,
    luns: Vec<ExportLuns>,
    shrinking: Vec<String>,
    growing: Vec<String>,
    /// Disks that are being given an identity.
    renewing: Vec<String>,
    /// Disks to be removed once no export presents them.
    disks: Vec<String>,
}

impl Draining {
    /// Returns the time since an export or a logical unit of it began to drain.
    pub fn export(&self, name: &str) -> Option<Duration> {
        let is_meant = self.exports.iter().any(|export| export == name)
            || self.luns.iter().any(|(export, _)| export == name);
        is_meant.then(|| self.since.elapsed())
    }

    /// Returns the time since a disk began to be removed or shrunk.
    pub fn disk(&self, name: &str) -> Option<Duration> {
        let mut disks = self.disks.iter().chain(&self.shrinking);
        disks.any(|disk| disk == name).then(|| self.since.elapsed())
    }

    fn resizes(&self, name: &str) -> bool {
        let mut disks = self.shrinking.iter().chain(&self.growing);
        disks.any(|disk| disk == name)
    }

    fn renews(&self, name: &str) -> bool {
        self.renewing.iter().any(|disk| disk == name)
    }

    /// Returns one line per draining object. `requests` returns an export's number of requests in flight.
    pub fn lines(&self, requests: &dyn Fn(&str) -> u64) -> Vec<String> {
        let exports = self.exports.iter();
        let exports = exports.map(|name| {
            format!(
                "export {name} is being removed: {}",
                counted(requests(name), "request in flight")
            )
        });
        let luns = self.luns.iter().map(|(export, luns)| {
            let at = luns.iter().map(|lun| format!("{}:{}", lun.target, lun.lun));
            let at = at.collect::<Vec<_>>().join(", ");
            let requests = counted(requests(export), "request");
            format!("LUNs {at} of {export} are being removed: {requests} of the export in flight")
        });
        let shrinking = self.shrinking.iter();
        let shrinking = shrinking.map(|disk| {
            format!(
                "disk {disk} is being shrunk: waiting for I/Os beyond its new end and for its storage"
            )
        });
        let growing = self.growing.iter();
        let growing =
            growing.map(|disk| format!("disk {disk} is being grown: waiting for its storage"));
        let renewing = self.renewing.iter();
        let renewing =
            renewing.map(|disk| format!("disk {disk} gets an identity: waiting for its storage"));
        exports
            .chain(luns)
            .chain(shrinking)
            .chain(growing)
            .chain(renewing)
            .collect()
    }

    /// Returns the conflicts of a plan with these draining objects.
    fn bars(&self, plan: &Plan) -> Vec<Fault> {
        let of_luns = |luns: &[ExportLuns]| -> Vec<String> {
            luns.iter().map(|(export, _)| export.clone()).collect()
        };
        let coming = plan.add_exports.iter().chain(&plan.replace_exports);
        let coming: Vec<&ExportConfig> = coming.collect();
        let mut exports: Vec<String> = plan.remove_exports.clone();
        exports.extend(coming.iter().map(|export| export.name().to_owned()));
        exports.extend(
            plan.place_exports
                .iter()
                .map(|placing| placing.export.clone()),
        );
        exports.extend(plan.socket_rights.iter().map(|(export, _)| export.clone()));
        exports.extend(of_luns(&plan.add_luns));
        exports.extend(of_luns(&plan.remove_luns));
        let mut disks: Vec<String> = plan.remove_disks.clone();
        disks.extend(plan.resize.iter().map(|resize| resize.disk.clone()));
        disks.extend(
            coming
                .iter()
                .flat_map(|export| export.disks())
                .map(str::to_owned),
        );
        let added = plan.add_luns.iter().flat_map(|(_, luns)| luns);
        disks.extend(added.map(|lun| lun.disk.clone()));
        let exports = exports.iter().filter(|name| self.export(name).is_some());
        let exports =
            exports.map(|name| format!("export {name} or some of its LUNs are being removed"));
        let disks = disks.iter().filter_map(|name| {
            let is_resized = self.disk(name).is_some() || self.resizes(name);
            match (is_resized, self.renews(name)) {
                (true, _) => Some(format!("disk {name} is being removed or resized")),
                (false, true) => Some(format!("disk {name} is being given an identity")),
                (false, false) => None,
            }
        });
        let mut faults: Vec<Fault> = exports
            .chain(disks)
            .map(|detail| Fault::new(detail).help(HELP))
            .collect();
        faults.dedup();
        faults
    }
}

/// Objects that a change removes or resizes, before their requests have ended.
#[derive(Default)]
struct ToDrain {
    exports: Vec<(ExportConfig, Arc<dyn ExportDevice>)>,
    luns: Vec<(ExportLuns, Arc<dyn ExportDevice>)>,
    shrink: Vec<(Arc<Disk>, u64)>,
    grow: Vec<(Arc<Disk>, u64)>,
    disks: Vec<String>,
}

/// A disk that was grown for a change that is not complete.
pub(super) struct Grown {
    pub disk: Arc<Disk>,
    pub before: u64,
    pub size: u64,
}

/// Objects that no client uses any more.
#[derive(Default)]
pub(super) struct Drained {
    pub exports: Vec<ExportConfig>,
    /// CHAP users in force when these exports were closed.
    pub chap_users: HashMap<String, Arc<ChapUsers>>,
    pub luns: Vec<ExportLuns>,
    pub shrinking: Vec<(Arc<Disk>, Shrinking)>,
    grown: Vec<Grown>,
    not_resized: Vec<(String, ResizeError)>,
}

impl Drained {
    fn has_export(&self, name: &str) -> bool {
        let mut exports = self.exports.iter();
        exports.any(|export| export.name() == name)
    }

    /// Returns true if this logical unit of an export is detached.
    pub fn has_lun(&self, export: &str, lun: &LunConfig) -> bool {
        let mut of_export = self.luns.iter().filter(|(name, _)| name == export);
        of_export.any(|(_, luns)| luns.contains(lun))
    }

    /// Returns the present size of a disk that is prepared to shrink.
    pub fn size_before(&self, disk: &Arc<Disk>) -> Option<u64> {
        let mut shrinking = self.shrinking.iter();
        let found = shrinking.find(|(known, _)| Arc::ptr_eq(known, disk));
        found.map(|(_, shrinking)| shrinking.size_before())
    }

    /// Removes and returns the previous size of a disk that was grown to `size`.
    pub fn take_grown(&mut self, disk: &Arc<Disk>, size: u64) -> Option<u64> {
        let is_meant = |grown: &Grown| Arc::ptr_eq(&grown.disk, disk) && grown.size == size;
        let at = self.grown.iter().position(is_meant)?;
        Some(self.grown.swap_remove(at).before)
    }

    /// Removes and returns a disk that is prepared to shrink to `size`.
    pub fn take_shrinking(&mut self, disk: &Arc<Disk>, size: u64) -> Option<Shrinking> {
        let mut shrinking = self.shrinking.iter();
        let at = shrinking
            .position(|(known, shrinking)| Arc::ptr_eq(known, disk) && shrinking.size() == size)?;
        Some(self.shrinking.swap_remove(at).1)
    }
}

impl ToDrain {
    fn is_empty(&self) -> bool {
        self.exports.is_empty()
            && self.luns.is_empty()
            && self.shrink.is_empty()
            && self.grow.is_empty()
    }

    fn view(&self, number: u64, is_whole: bool) -> Draining {
        let name = |(export, _): &(ExportConfig, _)| export.name().to_owned();
        let disk = |(disk, _): &(Arc<Disk>, u64)| disk.name().to_owned();
        Draining {
            number,
            since: Instant::now(),
            is_whole,
            is_announced: false,
            exports: self.exports.iter().map(name).collect(),
            luns: self.luns.iter().map(|(luns, _)| luns.clone()).collect(),
            shrinking: self.shrink.iter().map(disk).collect(),
            growing: self.grow.iter().map(disk).collect(),
            renewing: Vec::new(),
            disks: self.disks.clone(),
        }
    }

    /// Drains all objects. Blocks until their clients have finished.
    fn run(self, force: bool, pool: &Pool, drained: &mut Drained) {
        for ((export, luns), device) in self.luns {
            detach_luns(&export, &luns, force, &*device);
            drained.luns.push((export, luns));
        }
        for (export, device) in self.exports {
            let name = export.name();
            if let Some(users) = device.chap_users() {
                drained.chap_users.insert(name.to_owned(), users);
            }
            exports::close(name, &*device, pool);
            drained.exports.push(export);
        }
        for (disk, size) in self.shrink {
            match disk.begin_shrink(size) {
                Ok(shrinking) => drained.shrinking.push((disk, shrinking)),
                Err(error) => drained.not_resized.push((disk.name().to_owned(), error)),
            }
        }
        for (disk, size) in self.grow {
            let before = disk.info().geometry.capacity_bytes();
            match disk.resize(size) {
                Ok(()) => drained.grown.push(Grown { disk, before, size }),
                Err(error) => drained.not_resized.push((disk.name().to_owned(), error)),
            }
        }
    }
}

/// Refuses new commands to logical units and waits for those in flight. Aborts them with `force` or after a timeout.
fn detach_luns(export: &str, luns: &[LunConfig], force: bool, device: &dyn ExportDevice) {
    device.detach_luns(luns);
    let (hold, holding) = Holding::new();
    device.end_tasks(luns, force, &hold);
    drop(hold);
    if !holding.wait(DRAIN_PATIENCE) {
        tracing::warn!(
            export,
            "requests to LUNs did not complete in time, aborting them"
        );
        let (hold, aborted) = Holding::new();
        device.end_tasks(luns, true, &hold);
        drop(hold);
        aborted.wait(DRAIN_PATIENCE);
    }
}

#[derive(Default)]
pub(super) struct Drains {
    draining: Vec<Draining>,
    threads: Vec<JoinHandle<()>>,
    last: u64,
}

impl Drains {
    /// Begins to show a disk that is being shrunk on a helper thread. Returns the number for [`Drains::end`].
    pub fn begin_shrink(&mut self, disk: &str) -> u64 {
        self.begin(vec![disk.to_owned()], Vec::new())
    }

    /// Begins to show a disk that is being given an identity. Returns the number for [`Drains::end`].
    pub fn begin_renewal(&mut self, disk: &str) -> u64 {
        self.begin(Vec::new(), vec![disk.to_owned()])
    }

    fn begin(&mut self, shrinking: Vec<String>, renewing: Vec<String>) -> u64 {
        self.last += 1;
        self.draining.push(Draining {
            number: self.last,
            since: Instant::now(),
            is_whole: false,
            is_announced: false,
            exports: Vec::new(),
            luns: Vec::new(),
            shrinking,
            growing: Vec::new(),
            renewing,
            disks: Vec::new(),
        });
        self.last
    }

    pub fn end(&mut self, number: u64) {
        self.draining.retain(|one| one.number != number);
    }

    pub fn view(&self) -> Vec<Draining> {
        self.draining.clone()
    }

    pub fn bar(&self, plan: &Plan) -> Vec<Fault> {
        self.draining
            .iter()
            .flat_map(|one| one.bars(plan))
            .collect()
    }

    /// Returns true if a disk is being grown or prepared to shrink.
    pub fn resizes(&self, disk: &str) -> bool {
        self.draining.iter().any(|one| one.resizes(disk))
    }

    /// Returns true if a disk is being removed, resized or given a new identity.
    pub fn is_busy(&self, disk: &str) -> bool {
        let mut draining = self.draining.iter();
        draining.any(|one| one.disk(disk).is_some() || one.resizes(disk) || one.renews(disk))
    }

    /// Returns true if a disk is being given an identity.
    pub fn renews(&self, disk: &str) -> bool {
        self.draining.iter().any(|one| one.renews(disk))
    }

    /// Returns the time of the next announcement of a draining object.
    pub fn next_announcement(&self) -> Option<Instant> {
        let silent = self.draining.iter().filter(|one| !one.is_announced);
        silent.map(|one| one.since + ANNOUNCED).min()
    }

    /// Waits for all threads, at the end of the daemon.
    pub fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // A panic was logged already.
            thread.join().ok();
        }
    }
}

impl Owner {
    /// Makes a change and passes the result to `reply`, at once or after the requests to removed objects.
    pub fn begin_change(&mut self, mut work: Work, options: ChangeOptions, reply: Reply) {
        // The later one of two whole configurations would undo the other.
        if work.is_whole() && self.openings.has_whole() {
            let detail = "another replacement of the configuration waits for its disks to open";
            return reply(Err(Refusal::conflict(
                detail.to_owned(),
                "wait until it has ended",
            )));
        }
        if work.is_whole()
            && let Some(first) = self.drains.draining.iter().find(|one| one.is_whole)
        {
            let seconds = first.since.elapsed().as_secs();
            let detail = format!(
                "another replacement of the configuration has been waiting for clients for {seconds} s"
            );
            return reply(Err(Refusal::Conflict(vec![Fault::new(detail).help(HELP)])));
        }
        if let Some(name) = removed_by(&work)
            && self.configs.wanted.disk(name).is_none()
            && self.cancel_opening(name)
        {
            return reply(Ok(ChangeResult::default()));
        }
        if let Work::Change(change) = &mut work
            && let Change::Replace(replacement) = &mut **change
        {
            replacement.begin(&self.configs.wanted);
        }
        self.advance(work, options, Drained::default(), reply);
    }

    /// Runs the next step of a change: opens disks, drains, or finishes.
    pub(super) fn advance(
        &mut self,
        work: Work,
        options: ChangeOptions,
        mut drained: Drained,
        reply: Reply,
    ) {
        if let Some((disk, error)) = drained.not_resized.pop() {
            let reason = format!("disk {disk}: {error}");
            self.restore(drained);
            return reply(Err(refused(vec![reason])));
        }
        let to_open = self.to_open(&work, &options);
        if !to_open.is_empty() {
            return self.open_for_change(to_open, work, options, drained, reply);
        }
        match self.to_drain(&work, options.force, &drained) {
            Some(to_drain) => self.drain(to_drain, work, options, drained, reply),
            None => {
                let is_reload = matches!(work, Work::Reload(_));
                let result = self.finish(work, options, drained);
                let reply = match is_reload && result.is_ok() {
                    true => self.after_sizes(reply),
                    false => reply,
                };
                self.reply_when_done(result, reply);
            }
        }
    }

    /// Returns the objects still to drain. Returns `None` also for a change that [`Owner::finish`] will refuse.
    fn to_drain(&self, work: &Work, force: bool, drained: &Drained) -> Option<ToDrain> {
        let transports = self.servers.transports()?;
        let next = self.configs.next_of(work, force).ok()?;
        let plan = self.plan(&next).ok()?;
        if !force && !self.busy(&plan, &transports).is_empty() {
            return None;
        }
        let mut to_drain = ToDrain::default();
        let replaced = plan.replace_exports.iter();
        let replaced = replaced.map(|export| export.name());
        for name in plan
            .remove_exports
            .iter()
            .map(String::as_str)
            .chain(replaced)
        {
            let export = self.configs.present.export(name).cloned();
            let export = export.filter(|_| !drained.has_export(name));
            let open = export.zip(self.exports.open.get(name).cloned());
            to_drain.exports.extend(open);
        }
        for (export, luns) in &plan.remove_luns {
            let luns = luns.iter().filter(|lun| !drained.has_lun(export, lun));
            let luns: Vec<LunConfig> = luns.cloned().collect();
            if let (Some(device), false) = (self.exports.open.get(export), luns.is_empty()) {
                let luns = (export.clone(), luns);
                to_drain.luns.push((luns, Arc::clone(device)));
            }
        }
        for Resize { disk, size } in &plan.resize {
            let known = self.disks.open.get(disk);
            let grows = known.filter(|known| {
                // A RAM disk grows without blocking.
                self.configs.may_block(disk) && *size > known.info().geometry.capacity_bytes()
            });
            to_drain
                .grow
                .extend(grows.map(|known| (known.clone(), *size)));
            let known = known.filter(|known| *size < known.info().geometry.capacity_bytes());
            let known = known.filter(|known| drained.size_before(known).is_none());
            to_drain
                .shrink
                .extend(known.map(|known| (known.clone(), *size)));
        }
        to_drain.disks = plan.remove_disks;
        (!to_drain.is_empty()).then_some(to_drain)
    }

    fn drain(
        &mut self,
        to_drain: ToDrain,
        work: Work,
        options: ChangeOptions,
        drained: Drained,
        reply: Reply,
    ) {
        let growing = to_drain.grow.iter().map(|(disk, size)| Resizing {
            disk: disk.name().to_owned(),
            from: disk.info().geometry.capacity_bytes(),
            to: *size,
        });
        if let Err(reason) = self.resizes.begin(growing.collect()) {
            self.restore(drained);
            return reply(Err(Refusal::NotPersisted(reason)));
        }
        let drains = &mut self.drains;
        drains.threads.retain(|thread| !thread.is_finished());
        drains.last += 1;
        let number = drains.last;
        drains.draining.push(to_drain.view(number, work.is_whole()));
        let (pool, messages) = (Arc::clone(&self.servers.pool), self.messages.clone());
        // Shared with the thread, so that the parts remain if the thread cannot start.
        let parts = Arc::new(std::sync::Mutex::new(Some((
            to_drain, work, options, drained, reply,
        ))));
        let of_thread = Arc::clone(&parts);
        let take = move |parts: &std::sync::Mutex<Option<_>>| {
            let mut parts = parts
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            parts.take()
        };
        let started = std::thread::Builder::new()
            .name("draining".to_owned())
            .spawn(move || {
                let Some((to_drain, work, options, mut drained, reply)) = take(&of_thread) else {
                    return;
                };
                to_drain.run(options.force, &pool, &mut drained);
                let message: Message = Box::new(move |owner| {
                    owner.drains.draining.retain(|one| one.number != number);
                    let failed = drained.not_resized.iter();
                    owner.resizes.end(failed.map(|(disk, _)| disk.as_str()));
                    owner.advance(work, options, drained, reply);
                });
                // Without an owner the daemon ends, and no caller waits for the reply.
                messages.send(message).ok();
            });
        match started {
            Ok(thread) => {
                self.drains.threads.push(thread);
                self.publish();
            }
            Err(error) => {
                self.drains.draining.retain(|one| one.number != number);
                if let Some((to_drain, _, _, drained, reply)) = take(&parts) {
                    self.resizes
                        .end(to_drain.grow.iter().map(|(disk, _)| disk.name()));
                    self.restore(drained);
                    reply(Err(refused(vec![format!(
                        "cannot start a thread to drain requests: {error}"
                    )])));
                }
            }
        }
    }

    fn finish(
        &mut self,
        work: Work,
        options: ChangeOptions,
        drained: Drained,
    ) -> Result<ChangeResult, Refusal> {
        self.current.drained = drained;
        let result = match work {
            Work::Change(change) => self.change(*change, options),
            Work::Reload(base) => self.reload(*base, options),
        };
        let left = std::mem::take(&mut self.current.drained);
        self.restore(left);
        result
    }

    /// Restores drained objects after a refused change.
    pub(super) fn restore(&mut self, drained: Drained) {
        for (disk, shrinking) in drained.shrinking {
            disk.stay_large(shrinking);
        }
        for grown in drained.grown {
            self.shrink_back(grown);
        }
        let Some(transports) = self.servers.transports() else {
            return;
        };
        for export in &drained.exports {
            let name = export.name();
            let is_wanted = self.configs.present.export(name).is_some();
            if is_wanted && !exports::is_served(name, &transports) {
                let users = drained.chap_users.get(name).map(|users| &**users);
                let disks = &self.disks.open;
                self.exports.reopen(export, users, disks, &transports);
            }
        }
        for (export, luns) in &drained.luns {
            let present = self
                .configs
                .present
                .export(export)
                .and_then(|export| export.luns());
            let present = present.unwrap_or_default();
            let wanted = luns.iter().filter(|lun| present.contains(lun));
            let wanted: Vec<LunConfig> = wanted.cloned().collect();
            self.exports.add_luns(export, &wanted, &self.disks.open);
        }
        self.publish();
    }

    /// Restores the previous size of a disk after a refused change.
    pub(super) fn shrink_back(&mut self, Grown { disk, before, .. }: Grown) {
        let messages = self.messages.clone();
        let name = disk.name().to_owned();
        let place = name.clone();
        let work = move || {
            if let Err(error) = disk.roll_back_growth(before) {
                tracing::error!(
                    disk = name,
                    size = before,
                    "cannot roll back the size: {error}"
                );
            }
            let message: Message =
                Box::new(move |owner| owner.resizes.end(std::iter::once(name.as_str())));
            messages.send(message).ok();
        };
        if let Err(error) = self.helpers.run(&place, work) {
            tracing::error!(
                disk = place,
                size = before,
                "cannot roll back the size: {error}"
            );
        }
    }

    /// Logs and announces objects that have been draining for [`ANNOUNCED`].
    pub(super) fn announce_draining(&mut self) {
        let now = Instant::now();
        let late = self.drains.draining.iter_mut();
        let late = late.filter(|one| !one.is_announced && one.since + ANNOUNCED <= now);
        for one in late {
            one.is_announced = true;
            for name in &one.exports {
                tracing::info!(export = name, "removal waits for requests in flight");
                self.event_bus.publish(EventKind::ExportRemoving, name);
            }
            for (export, luns) in &one.luns {
                tracing::info!(export, "removal of LUNs waits for requests in flight");
                for lun in luns {
                    self.event_bus
                        .publish_lun(EventKind::LunRemoving, export, lun);
                }
            }
            for disk in &one.shrinking {
                tracing::info!(disk, "shrinking waits for requests in flight");
                self.event_bus.publish(EventKind::DiskShrinking, disk);
            }
            for disk in &one.growing {
                tracing::info!(disk, "growing waits for its storage");
            }
        }
    }
}
