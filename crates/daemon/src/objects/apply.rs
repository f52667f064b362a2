//! Applies a plan. Fallible steps run first and are rolled back on failure. Then the state is persisted. The remaining steps cannot fail.

use std::collections::HashMap;
use std::sync::Arc;

use bdev::{Disk, Shrinking};

use super::closing::ToClose;
use super::draining::Grown;
use super::open_disks::follow_waiting;
use super::owner::{ChangeOptions, Owner, failed, refused};
use super::plan::{Limit, Placing, Plan, Resize};
use super::refusal::Refusal;
use super::servers::Transports;
use super::state_store::Resizing;
use crate::disks::{self, Disks};
use crate::exports::{self, ChapUsers, OpenExport, ReadyExport};
use crate::running::Inherited;
use config::{Config, ExportConfig};

/// Steps done so far, for a rollback.
#[derive(Default)]
struct Undo {
    exports: Vec<OpenExport>,
    /// Exports closed to make room for `exports`.
    replaced: Vec<ExportConfig>,
    /// Exports moved to other workers, with their previous placement.
    placed: Vec<Placing>,
    /// Exports with changed socket rights, and the previous rights.
    rights: Vec<(String, reactor::Rights)>,
    /// CHAP users in force in closed exports.
    chap_users: HashMap<String, Arc<ChapUsers>>,
    /// Grown disks and their previous sizes.
    resized: Vec<(String, u64)>,
    /// Disks prepared to shrink, with no data lost yet.
    shrinking: Vec<(Arc<Disk>, Shrinking)>,
}

impl Owner {
    /// Runs the fallible steps, persists the change, then runs the steps that cannot fail.
    pub(super) fn carry_out(
        &mut self,
        plan: &Plan,
        next: &Config,
        options: ChangeOptions,
        transports: &Transports,
    ) -> Result<Vec<ReadyExport>, Refusal> {
        let ChangeOptions {
            force: _,
            inherited,
            first,
            mut opened,
            devices,
        } = options;
        let store = self.servers.units.store();
        let mut known = self.disks.open.clone();
        known.extend(
            opened
                .iter()
                .map(|(name, disk)| (name.clone(), disk.clone())),
        );
        let unopened = plan.add_disks.iter();
        let unopened = unopened.filter(|disk| !opened.contains_key(&disk.name));
        let opening = disks::open_all(unopened, devices, &known, &self.disks.identities, store);
        let reasons = opening.reasons();
        if reasons.is_empty() {
            self.write_identities(opening.unwritten());
        }
        self.disks.bitmaps.attach(opening.stamped());
        opened.extend(opening.disks());
        self.current.closing.extend(opening.discarded);
        if let Err(refusal) = failed(&reasons) {
            self.current
                .closing
                .extend(opened.into_values().map(ToClose::Abandoned));
            return Err(refusal);
        }
        let mut all = self.disks.open.clone();
        all.extend(
            opened
                .iter()
                .map(|(name, disk)| (name.clone(), disk.clone())),
        );

        let mut undo = Undo::default();
        let tried = self.try_parts(plan, &all, inherited, transports, &mut undo);
        let tried = tried.and_then(|()| self.keep(next, first));
        if let Err(refusal) = tried {
            self.roll_back(undo, transports);
            // The opened exports have made it a logical unit, which would keep its file open.
            opened
                .values()
                .for_each(|disk| self.servers.detach_disk(disk));
            self.current
                .closing
                .extend(opened.into_values().map(ToClose::Abandoned));
            return Err(refusal);
        }
        self.finish_parts(plan, &mut undo, &opened, all, first);
        disks::warn_of_memory(next, &plan.add_disks);
        self.disks.keep_volatile_identities(next);
        if !first {
            self.publish_events(plan);
        }
        Ok(undo.exports.into_iter().map(|e| e.ready).collect())
    }

    /// Runs the steps that cannot fail, after the configuration is persisted.
    fn finish_parts(
        &mut self,
        plan: &Plan,
        undo: &mut Undo,
        opened: &Disks,
        all: Disks,
        first: bool,
    ) {
        let shrinking = std::mem::take(&mut undo.shrinking);
        let (later, now): (Vec<_>, Vec<_>) = shrinking
            .into_iter()
            .partition(|(disk, _)| self.configs.may_block(disk.name()));
        let shrunk = shrink(now);
        self.shrink_later(later);
        let grown = undo.resized.iter().map(|(disk, _)| disk.as_str());
        self.resizes.remove(grown);
        if !first {
            self.remove_parts(plan, &undo.replaced);
        }
        if shrunk && !plan.resize.is_empty() {
            self.resizes.write();
        }
        for open in &undo.exports {
            self.exports.enter(open);
        }
        for (name, disk) in opened {
            self.disks.record_unit(disk);
            self.follow_size(name, disk);
            follow_waiting(disk, &self.event_bus);
        }
        self.disks.open = all;
        for (export, luns) in &plan.add_luns {
            self.exports.add_luns(export, luns, &self.disks.open);
        }
        for (export, states) in &plan.access_states {
            self.exports.set_access_states(export, states);
        }
        for name in &plan.remove_disks {
            let removed = self.disks.remove(name);
            self.current.closing.extend(removed.map(ToClose::Removed));
        }
        for Limit { disk, limits } in &plan.limit {
            if let Some(disk) = self.disks.open.get(disk) {
                disk.set_limits(disks::limits(limits));
            }
        }
        for (name, policy) in &plan.errors {
            if let Some(disk) = self.disks.open.get(name) {
                disk.set_error_policy(*policy);
                self.disks.resume(disk);
            }
        }
    }

    /// Runs the fallible steps and records them in `undo`.
    fn try_parts(
        &mut self,
        plan: &Plan,
        disks: &Disks,
        mut inherited: Vec<Inherited>,
        transports: &Transports,
        undo: &mut Undo,
    ) -> Result<(), Refusal> {
        let mut reasons = Vec::new();
        // A rollback could not reopen an export with an unreadable CHAP file.
        for export in plan.add_exports.iter().chain(&plan.replace_exports) {
            if let Err(reason) = exports::chap_users(export.chap_users()) {
                reasons.push(format!("{} {}: {reason}", export.kind(), export.name()));
            }
        }
        failed(&reasons)?;
        undo.chap_users
            .extend(std::mem::take(&mut self.current.drained.chap_users));
        for before in plan.makes_room(&self.configs.present) {
            let name = before.name();
            if let Some(users) = self.exports.chap_users(name) {
                undo.chap_users.insert(name.to_owned(), users);
            }
            self.exports.remove(name);
            undo.replaced.push(before);
        }
        for export in plan.add_exports.iter().chain(&plan.replace_exports) {
            let new = inherited.iter().position(|one| one.export == export.name());
            let socket = match new {
                Some(index) => {
                    let socket = inherited.swap_remove(index);
                    Some(self.exports.inherited.store(export, socket))
                }
                None => self.exports.inherited.of(export),
            };
            match exports::open(export, disks, &self.servers, transports, socket, None) {
                Ok(open) => undo.exports.push(open),
                Err(reason) => {
                    reasons.push(format!("{} {}: {reason}", export.kind(), export.name()));
                }
            }
        }
        failed(&reasons)?;
        let present = &self.configs.present;
        self.exports.place(plan, present, &mut undo.placed)?;
        for (export, rights) in &plan.socket_rights {
            let set = exports::set_socket_rights(export, rights, transports);
            let before = set.map_err(|reason| refused(vec![format!("export {export}: {reason}")]));
            undo.rights.push((export.clone(), before?));
        }
        let size_of = |disk: &Disk| disk.info().geometry.capacity_bytes();
        let known = plan.resize.iter();
        let known =
            known.filter_map(|resize| Some((resize, self.disks.open.get(&resize.disk)?.clone())));
        let known: Vec<_> = known.collect();
        if !known.is_empty() {
            let drained = &self.current.drained;
            let resizing = known.iter();
            let resizing = resizing.map(|(Resize { disk, size }, known)| Resizing {
                disk: disk.clone(),
                from: drained.size_before(known).unwrap_or(size_of(known)),
                to: *size,
            });
            let recorded = self.resizes.begin_change(resizing);
            recorded.map_err(Refusal::NotPersisted)?;
        }
        for (Resize { disk, size }, known) in known {
            let before = size_of(&known);
            // Data beyond a new end is dropped only after all fallible steps.
            let done = if let Some(before) = self.current.drained.take_grown(&known, *size) {
                undo.resized.push((disk.clone(), before));
                Ok(())
            } else if let Some(shrinking) = self.current.drained.take_shrinking(&known, *size) {
                undo.shrinking.push((known, shrinking));
                Ok(())
            } else if *size < before {
                let begun = known.begin_shrink(*size);
                begun.map(|shrinking| undo.shrinking.push((known, shrinking)))
            } else {
                let resized = known.resize(*size);
                resized.map(|()| undo.resized.push((disk.clone(), before)))
            };
            done.map_err(|error| refused(vec![format!("disk {disk}: {error}")]))?;
        }
        Ok(())
    }

    fn roll_back(&mut self, undo: Undo, transports: &Transports) {
        let resized = undo.resized.into_iter();
        let (on_helper, here): (Vec<_>, Vec<_>) =
            resized.partition(|(name, _)| self.configs.may_block(name));
        self.resizes
            .remove(here.iter().map(|(disk, _)| disk.as_str()));
        // If another program has taken a socket, the restored export waits for the socket.
        transports.set_may_wait(true);
        for open in &undo.exports {
            exports::close(&open.name, &*open.device, &self.servers.pool);
        }
        self.exports.place_as_before(&undo.placed);
        for (export, rights) in &undo.rights {
            if let Err(error) = transports.vhost.set_rights(export, *rights) {
                tracing::error!(export, "cannot roll back the rights of the socket: {error}");
            }
        }
        for (disk, shrinking) in undo.shrinking {
            disk.stay_large(shrinking);
        }
        for (name, before) in on_helper {
            if let Some(disk) = self.disks.open.get(&name).cloned() {
                let size = disk.info().geometry.capacity_bytes();
                self.shrink_back(Grown { disk, before, size });
            }
        }
        for (name, size) in &here {
            if let Some(disk) = self.disks.open.get(name)
                && let Err(error) = disk.roll_back_growth(*size)
            {
                tracing::error!(disk = name, size, "cannot roll back the size: {error}");
            }
        }
        self.resizes.write();
        for export in &undo.replaced {
            let users = undo.chap_users.get(export.name()).map(|users| &**users);
            let disks = &self.disks.open;
            self.exports.reopen(export, users, disks, transports);
        }
    }

    /// Removes logical units and exports, and notifies clients of resized disks.
    fn remove_parts(&mut self, plan: &Plan, gone: &[ExportConfig]) {
        for (export, luns) in &plan.remove_luns {
            self.exports.notify_removed(export, luns);
        }
        let is_gone = |name: &str| gone.iter().any(|export| export.name() == name);
        for name in plan.remove_exports.iter().filter(|name| !is_gone(name)) {
            self.exports.remove(name);
        }
        let resized = plan.resize.iter();
        for Resize { disk, .. } in resized.filter(|one| !self.current.shrinks_later(&one.disk)) {
            self.notify_resized(disk);
        }
    }
}

/// Shrinks the disks and persists the result. Returns false if a disk must be retried at the next start.
fn shrink(shrinking: Vec<(Arc<Disk>, Shrinking)>) -> bool {
    let mut done = true;
    for (disk, shrinking) in shrinking {
        if let Err(error) = disk.shrink(shrinking) {
            tracing::error!(
                disk = disk.name(),
                "cannot resize the disk before the next start: {error}"
            );
            done = false;
        }
    }
    done
}
