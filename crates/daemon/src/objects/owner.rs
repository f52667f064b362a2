//! The owner of all objects: the wanted configuration, what runs, and how the one becomes the other. Lives on the manager's
//! thread, so that changes run one after the other. A change is checked as a whole; fallible steps run first, then the state is
//! persisted, then the rest runs, which cannot fail. Readers see the last complete state ([`Live`]).

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, mpsc};

use bdev::{Disk, Shrinking};
use virtio_blk::BlkDevice;
use virtio_scsi::ScsiDevice;

use super::changes::Change;
use super::draining::{Drained, Draining, Drains};
use super::events::EventBus;
use super::plan::{Limit, Placing, Plan, Resize};
use super::refusal::{Fault, Refusal};
use super::relations;
use super::servers::{Servers, Transports};
use super::state_store::{Resizing, StateStore};
use super::waiting::WaitingDisks;
use super::{Inbox, Message};
use crate::disks::{self, Devices, Disks};
use crate::exports::{self, ChapUsers, OpenExport, ReadyExport};
use crate::identities::Identities;
use crate::running::Inherited;
use config::{Config, ExportConfig, ExportRef, LunConfig};

/// The objects as they are, for whoever looks on.
#[derive(Clone)]
pub struct Live {
    /// The configuration that is in effect.
    pub config: Arc<Config>,
    /// What the file and the flags say.
    pub base: Arc<Config>,
    /// The disks that are open.
    pub disks: Arc<Disks>,
    /// The disks that cannot be opened yet.
    pub waiting: Arc<WaitingDisks>,
    /// What is being removed, and waits for clients.
    pub draining: Arc<Vec<Draining>>,
}

/// How a change is to be made.
#[derive(Default)]
pub struct How {
    /// Clients that are in the way are thrown out, tasks aborted, data beyond a new end dropped.
    pub force: bool,
    /// A socket that was handed over, for an export that comes.
    pub inherited: Vec<Inherited>,
    /// At the start: nothing is told or written down.
    pub first: bool,
    /// Disks that are open already.
    pub opened: Disks,
    /// Devices that are open already, of disks that come.
    pub devices: Devices,
}

/// What became of a change.
#[derive(Debug, Default)]
pub struct Made {
    /// What was done.
    pub plan: Plan,
    /// Exports that can be connected to now.
    pub ready: Vec<ReadyExport>,
}

/// Owns the objects.
pub struct Owner {
    /// What is wanted.
    pub(super) config: Config,
    /// What of it runs: all but what needs a disk that waits.
    pub(super) present: Config,
    pub(super) waiting: WaitingDisks,
    pub(super) base: Config,
    pub(super) disks: Disks,
    pub(super) blk: HashMap<String, Arc<BlkDevice>>,
    pub(super) scsi: HashMap<String, Arc<ScsiDevice>>,
    pub(super) servers: Arc<Servers>,
    live: Arc<RwLock<Live>>,
    state_store: Option<StateStore>,
    pub(super) identities: Identities,
    /// Listening sockets that were handed over, by the path that they listen at: whoever did keeps them there, so that nobody
    /// could listen anew.
    handed: HashMap<PathBuf, OwnedFd>,
    /// Tells what has changed.
    pub(super) event_bus: EventBus,
    /// For what comes to this owner by itself.
    pub(super) messages: mpsc::Sender<Message>,
    /// While it starts: devices that were opened on threads of their own.
    pub(super) starting: Option<Devices>,
    /// The changes that wait for clients.
    pub(super) drains: Drains,
    /// Of the change that is being made: what has drained for it.
    pub(super) drained: Drained,
    /// Nothing more is done after this.
    pub(super) ending: bool,
}

impl Owner {
    /// An owner of nothing yet; `base` is what the file and the flags say.
    pub fn new(
        base: Config,
        servers: Arc<Servers>,
        state_store: Option<StateStore>,
    ) -> (Owner, Inbox) {
        let (messages, inbox) = mpsc::channel();
        let config = base.without_objects();
        let live = Live {
            config: Arc::new(config.clone()),
            base: Arc::new(base.clone()),
            disks: Arc::default(),
            waiting: Arc::default(),
            draining: Arc::default(),
        };
        let event_bus = EventBus::default();
        servers.tell_sessions(&event_bus);
        let owner = Owner {
            present: config.clone(),
            config,
            waiting: WaitingDisks::default(),
            base,
            disks: Disks::new(),
            blk: HashMap::new(),
            scsi: HashMap::new(),
            servers,
            live: Arc::new(RwLock::new(live)),
            identities: Identities::load(state_store.as_ref().map(StateStore::folder)),
            state_store,
            handed: HashMap::new(),
            event_bus,
            messages,
            starting: None,
            drains: Drains::default(),
            drained: Drained::default(),
            ending: false,
        };
        (owner, inbox)
    }

    /// What others see of it.
    pub fn live(&self) -> Arc<RwLock<Live>> {
        Arc::clone(&self.live)
    }

    /// Where listeners subscribe to events.
    pub fn events(&self) -> tokio::sync::broadcast::Sender<control::Event> {
        self.event_bus.sender()
    }

    /// Starts with what is configured, and what was changed at run time before.
    ///
    /// # Errors
    /// All reasons why it cannot be.
    pub fn begin(&mut self, inherited: Vec<Inherited>, inbox: &Inbox) -> Result<Made, Refusal> {
        let failed = |reason| Refusal::Failed(vec![Fault::new(reason)]);
        // Before anybody can come to a portal.
        let finders = exports::discovery_users(&self.base).map_err(failed)?;
        if let Some(transports) = self.servers.transports() {
            transports.iscsi.set_discovery_users(finders);
        }
        let mut next = self.base.clone();
        let mut changed = Vec::new();
        if let Some(state_store) = &self.state_store {
            let kept = state_store.kept().map_err(failed)?;
            changed = kept.names();
            next = kept.over(&self.base);
            let faults = relations::check(&next);
            if !faults.is_empty() && relations::check(&self.base).is_empty() {
                let help = state_store.help();
                let faults = faults.into_iter().map(|fault| fault.help(&help));
                return Err(Refusal::Invalid(faults.collect()));
            }
            state_store.finish_resize(&next);
        }
        let inherited = self.keep_what_moved(inherited, &next);
        let opened = self.open_first(&next.disks, inbox);
        let inherited = self.keep_what_waits(inherited, &next);
        let how = How {
            inherited,
            first: true,
            opened,
            ..How::default()
        };
        let made = self.become_(next, how);
        match (made, &self.state_store) {
            (Err(Refusal::Failed(mut faults)), Some(state_store)) => {
                // Whoever looks for it in the file may find nothing, or something else.
                for fault in &mut faults {
                    let is_of = |name: &String| fault.detail.starts_with(&format!("{name}: "));
                    if changed.iter().any(is_of) {
                        fault
                            .help
                            .get_or_insert_with(|| state_store.help_with_one());
                    }
                }
                Err(Refusal::Failed(faults))
            }
            (made, _) => made,
        }
    }

    /// Makes a change, or refuses it with all reasons.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub(super) fn change(&mut self, change: Change, how: How) -> Result<Made, Refusal> {
        let next = change.next(&self.config, how.force)?;
        self.become_(next, how)
    }

    /// The file or the flags say something else: what was changed at run time stays on top of it.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub(super) fn reload(&mut self, base: Config, how: How) -> Result<Made, Refusal> {
        let overlay = super::overlay::Overlay::between(&self.base, &self.config);
        let next = overlay.over(&base);
        let faults = relations::check(&next);
        if !faults.is_empty() && relations::check(&base).is_empty() {
            let help = "the file is valid, but conflicts with changes made at run time, which lunette config diff shows; \
                        undo these, or correct the file";
            let faults = faults.into_iter().map(|fault| fault.help(help));
            return Err(Refusal::Invalid(faults.collect()));
        }
        let users = chap_users(&next)?;
        let finders = exports::discovery_users(&next).map_err(|reason| refused(vec![reason]))?;
        let before = std::mem::replace(&mut self.base, base);
        let mut made = self.become_(next, how);
        match &mut made {
            Ok(made) => {
                self.set_chap_users(users, &mut made.plan);
                let changed = self
                    .servers
                    .transports()
                    .map(|d| d.iscsi.set_discovery_users(finders));
                made.plan.discovery_users = changed == Some(true);
                self.take_sizes_over();
            }
            Err(_) => self.base = before,
        }
        self.publish();
        made
    }

    /// Targets that stay have the users that are in their files now.
    fn set_chap_users(&self, users: Vec<(String, ChapUsers)>, plan: &mut Plan) {
        let Some(transports) = self.servers.transports() else {
            return;
        };
        for (name, users) in users {
            // Those that came have read them by themselves, and know of nothing else.
            if let Ok(true) = transports.iscsi.set_chap_users(&name, users) {
                plan.chap_users.push(name);
            }
        }
    }

    /// Makes `next` of what is there and of what waits, or refuses with all reasons.
    pub(super) fn become_with(&mut self, mut next: Config, how: How) -> Result<Made, Refusal> {
        let plan = self.plan(&next)?;
        self.waiting.keep_wanted(&next);
        let transports = self.servers.transports().ok_or(Refusal::Ending)?;
        if !how.force {
            let busy = self.busy(&plan, &transports);
            if !busy.is_empty() {
                return Err(Refusal::Conflict(busy));
            }
        }
        if plan.is_empty() {
            self.keep(&next, how.first)?;
            self.set_config(next);
            self.publish();
            return Ok(Made::default());
        }
        plan.let_devices_be(&mut next, &self.base, is_block_device);
        let ready = self.carry_out(&plan, &next, how, &transports)?;
        self.set_config(next);
        self.publish();
        Ok(Made { plan, ready })
    }

    /// What makes `next` of what is there and of what waits.
    pub(super) fn plan(&self, next: &Config) -> Result<Plan, Refusal> {
        let faults = relations::check(next);
        if !faults.is_empty() {
            return Err(Refusal::Invalid(faults));
        }
        let mut waiting = self.waiting.clone();
        waiting.keep_wanted(next);
        let plan = Plan::between(&self.present, &waiting.without(next));
        if !plan.refused.is_empty() {
            return Err(Refusal::Conflict(plan.refused));
        }
        let barred = self.drains.bar(&plan);
        if !barred.is_empty() {
            return Err(Refusal::Conflict(barred));
        }
        Ok(plan)
    }

    /// What is in use and would go.
    pub(super) fn busy(&self, plan: &Plan, transports: &Transports) -> Vec<Fault> {
        let mut faults = Vec::new();
        let leaving = plan.remove_exports.iter().map(String::as_str);
        let replaced = plan.replace_exports.iter().map(|e| e.as_ref().name());
        let connected = exports::connected(transports);
        for name in leaving.chain(replaced).filter(|n| connected.contains(*n)) {
            let fault = Fault::new(format!("export {name} has a client"));
            faults.push(fault.help("disconnect it first, or use force"));
        }
        for (export, luns) in &plan.remove_luns {
            for LunConfig { target, lun, disk } in luns {
                let disk = self.disks.get(disk);
                let unit = disk.and_then(|disk| self.servers.units.known(disk));
                if unit.is_some_and(|unit| unit.reservations().is_held()) {
                    let detail = format!("LUN {export}/{target}:{lun} is reserved by an initiator");
                    faults.push(Fault::new(detail).help("release the reservation, or use force"));
                }
            }
        }
        for Resize { disk, size } in &plan.resize {
            let Some(known) = self.disks.get(disk) else {
                continue;
            };
            let now = known.info().geometry.capacity_bytes();
            if *size < now {
                let detail =
                    format!("shrinking disk {disk} from {now} to {size} bytes would lose data");
                let help = "use force to drop the data beyond the new end";
                faults.push(Fault::at("/size", detail).help(help));
            }
        }
        faults
    }

    /// What may fail comes first, then the change is written down, then what cannot fail.
    fn carry_out(
        &mut self,
        plan: &Plan,
        next: &Config,
        how: How,
        transports: &Transports,
    ) -> Result<Vec<ReadyExport>, Refusal> {
        let How {
            force: _,
            inherited,
            first,
            mut opened,
            devices,
        } = how;
        let store = self.servers.units.store();
        let mut known = self.disks.clone();
        known.extend(
            opened
                .iter()
                .map(|(name, disk)| (name.clone(), disk.clone())),
        );
        let unopened = plan.add_disks.iter();
        let unopened = unopened.filter(|disk| !opened.contains_key(&disk.name));
        let opening = disks::open_all(unopened, devices, &known, &self.identities, store);
        let reasons = opening.reasons();
        if reasons.is_empty() {
            opening.persist(store);
        }
        opened.extend(opening.disks());
        let made_for_nothing = || {
            opened
                .values()
                .for_each(|disk| disk.device().remove_if_created())
        };
        failed(&reasons).inspect_err(|_| made_for_nothing())?;
        let mut all = self.disks.clone();
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
            // An export that was opened has made it a unit, which would keep its file open.
            opened.values().for_each(|disk| self.let_go(disk));
            made_for_nothing();
            return Err(refusal);
        }
        self.finish_parts(plan, &mut undo, &opened, all, first, transports);
        self.identities.keep_volatile(next, &self.disks);
        if !first {
            self.tell(plan);
        }
        Ok(undo.exports.into_iter().map(|e| e.ready).collect())
    }

    /// What cannot fail, after everything that may has been done and the configuration persisted.
    fn finish_parts(
        &mut self,
        plan: &Plan,
        undo: &mut Undo,
        opened: &Disks,
        all: Disks,
        first: bool,
        transports: &Transports,
    ) {
        let shrunk = self.shrink(std::mem::take(&mut undo.shrinking));
        if !first {
            self.remove_parts(plan, &undo.replaced, transports);
        }
        if let (Some(state_store), true) = (&self.state_store, shrunk && !plan.resize.is_empty()) {
            state_store.end_resize();
        }
        for OpenExport { name, device, .. } in &undo.exports {
            self.enter(name, device);
        }
        for (name, disk) in opened {
            self.follow_size(name, disk);
            self.follow_waiting(disk);
        }
        self.disks = all;
        for (export, luns) in &plan.add_luns {
            self.add_luns(export, luns, transports);
        }
        for name in &plan.remove_disks {
            self.forget_disk(name);
        }
        for Limit { disk, limits } in &plan.limit {
            if let Some(disk) = self.disks.get(disk) {
                disk.set_limits(disks::limits(limits));
            }
        }
        for (name, policy) in &plan.errors {
            if let Some(disk) = self.disks.get(name) {
                disk.set_error_policy(*policy);
                self.resume(disk);
            }
        }
    }

    /// What may fail, and can be taken back.
    fn try_parts(
        &mut self,
        plan: &Plan,
        disks: &Disks,
        inherited: Vec<Inherited>,
        transports: &Transports,
        undo: &mut Undo,
    ) -> Result<(), Refusal> {
        let mut reasons = Vec::new();
        let mut inherited = inherited;
        // Before anything goes: what cannot be read now could not be had back either.
        for export in plan.add_exports.iter().chain(&plan.replace_exports) {
            if let Err(reason) = exports::chap_users(export.as_ref()) {
                let export = export.as_ref();
                reasons.push(format!("{} {}: {reason}", export.kind(), export.name()));
            }
        }
        failed(&reasons)?;
        undo.chap_users
            .extend(std::mem::take(&mut self.drained.chap_users));
        for before in plan.makes_room(&self.present) {
            let name = before.as_ref().name();
            if let Some(users) = transports.iscsi.chap_users(name) {
                undo.chap_users.insert(name.to_owned(), users);
            }
            self.remove_export(&before, transports);
            undo.replaced.push(before);
        }
        for export in plan.add_exports.iter().chain(&plan.replace_exports) {
            let export = export.as_ref();
            let handed = inherited.iter().position(|one| one.export == export.name());
            let handed = match handed {
                Some(index) => Some(self.keep_listening(export, inherited.swap_remove(index))),
                None => self.handed(export),
            };
            match exports::open(export, disks, &self.servers, transports, handed, None) {
                Ok(open) => undo.exports.push(open),
                Err(reason) => {
                    reasons.push(format!("{} {}: {reason}", export.kind(), export.name()));
                }
            }
        }
        failed(&reasons)?;
        self.place_exports(plan, &mut undo.placed)?;
        let size_of = |disk: &Disk| disk.info().geometry.capacity_bytes();
        let known = plan.resize.iter();
        let known =
            known.filter_map(|resize| Some((resize, self.disks.get(&resize.disk)?.clone())));
        let known: Vec<_> = known.collect();
        if let (Some(state_store), false) = (&self.state_store, known.is_empty()) {
            let resizing = known.iter().map(|(Resize { disk, size }, known)| Resizing {
                disk: disk.clone(),
                from: self.drained.size_before(known).unwrap_or(size_of(known)),
                to: *size,
            });
            let told = state_store.begin_resize(&resizing.collect::<Vec<_>>());
            told.map_err(Refusal::NotKept)?;
        }
        for (Resize { disk, size }, known) in known {
            let before = size_of(&known);
            // What a smaller disk loses is lost when nothing else can fail any more.
            let done = if let Some(shrinking) = self.drained.take_shrinking(&known, *size) {
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

    /// Disks get smaller, which is written down. False: one has not, and will when the daemon starts again.
    fn shrink(&self, shrinking: Vec<(Arc<Disk>, Shrinking)>) -> bool {
        let mut done = true;
        for (disk, shrinking) in shrinking {
            if let Err(error) = disk.shrink(shrinking) {
                let name = disk.name();
                tracing::error!("disk {name}: cannot resize now, only at the next start: {error}");
                done = false;
            }
        }
        done
    }

    /// Nothing of a change that failed stays.
    fn roll_back(&mut self, undo: Undo, transports: &Transports) {
        for open in &undo.exports {
            exports::close(&open.name, &self.servers.pool, transports);
        }
        self.replace_as_before(&undo.placed);
        for (disk, shrinking) in undo.shrinking {
            disk.stay_large(shrinking);
        }
        for (name, size) in &undo.resized {
            if let Some(disk) = self.disks.get(name)
                && let Err(error) = disk.roll_back_growth(*size)
            {
                tracing::error!("disk {name}: cannot roll back its size to {size} bytes: {error}");
            }
        }
        if let Some(state_store) = &self.state_store {
            state_store.end_resize();
        }
        for export in &undo.replaced {
            let export = export.as_ref();
            let users = undo.chap_users.get(export.name()).map(|users| &**users);
            self.reopen(export, users, transports);
        }
    }

    /// Opens an export again that was closed for a change that failed.
    pub(super) fn reopen(
        &mut self,
        export: ExportRef<'_>,
        users: Option<&ChapUsers>,
        transports: &Transports,
    ) {
        let handed = self.handed(export);
        let servers = &self.servers;
        match exports::open(export, &self.disks, servers, transports, handed, users) {
            Ok(open) => self.enter(&open.name, &open.device),
            Err(error) => {
                let name = export.name();
                tracing::error!("export {name}: rollback failed: {error}");
            }
        }
    }

    /// What goes, and who is told of another size.
    fn remove_parts(&mut self, plan: &Plan, gone: &[ExportConfig], transports: &Transports) {
        for (export, luns) in &plan.remove_luns {
            self.tell_removed(export, luns);
        }
        let is_gone = |name: &str| gone.iter().any(|export| export.as_ref().name() == name);
        for name in plan.remove_exports.iter().filter(|name| !is_gone(name)) {
            if let Some(export) = self.present.export(name).map(ExportRef::to_owned) {
                self.remove_export(&export, transports);
            }
        }
        for Resize { disk, .. } in &plan.resize {
            self.resized(disk, transports);
        }
    }

    /// Sockets were handed over for the exports of the file and the flags. Where these were changed at run time, a socket is
    /// for whichever export has its path, now or later.
    fn keep_what_moved(&mut self, inherited: Vec<Inherited>, next: &Config) -> Vec<Inherited> {
        let path = |config: &Config, name: &str| {
            let socket = config.export(name).and_then(ExportRef::socket);
            socket.map(|path| relations::absolute(path))
        };
        let stays = |one: &Inherited| path(next, &one.export) == path(&self.base, &one.export);
        let (staying, moved): (Vec<_>, Vec<_>) = inherited.into_iter().partition(stays);
        for one in moved {
            let base = self.base.export(&one.export).map(ExportRef::to_owned);
            if let Some(export) = base {
                self.keep_listening(export.as_ref(), one);
            }
        }
        staying
    }

    /// Remembers a socket that was handed over for an export, if it is one that listens.
    pub(super) fn keep_listening(
        &mut self,
        export: ExportRef<'_>,
        inherited: Inherited,
    ) -> Inherited {
        let listens = rustix::net::sockopt::socket_acceptconn(&inherited.socket) == Ok(true);
        if let (Some(path), true) = (export.socket(), listens)
            && let Ok(socket) = inherited.socket.try_clone()
        {
            self.handed.insert(relations::absolute(path), socket);
        }
        inherited
    }

    /// The socket that was handed over for the path of an export, for the next one there.
    fn handed(&self, export: ExportRef<'_>) -> Option<Inherited> {
        let socket = self.handed.get(&relations::absolute(export.socket()?))?;
        Some(Inherited {
            export: export.name().to_owned(),
            socket: socket.try_clone().ok()?,
        })
    }

    fn enter(&mut self, name: &str, device: &exports::Device) {
        match device {
            exports::Device::Blk(device) => {
                self.blk.insert(name.to_owned(), device.clone());
            }
            exports::Device::Scsi(device) => {
                self.scsi.insert(name.to_owned(), device.clone());
            }
            exports::Device::Iscsi => {}
        }
    }

    fn remove_export(&mut self, export: &ExportConfig, transports: &Transports) {
        let name = export.as_ref().name();
        exports::close(name, &self.servers.pool, transports);
        self.blk.remove(name);
        self.scsi.remove(name);
        self.servers.pool.forget(name);
    }

    fn forget_disk(&mut self, name: &str) {
        if let Some(disk) = self.disks.remove(name) {
            self.let_go(&disk);
            if disk.device().medium().is_none() {
                // Nobody sees a disk of this identity ever again.
                scsi::forget(self.servers.units.store(), &disk.info());
            }
        }
    }

    pub(super) fn let_go(&self, disk: &Arc<Disk>) {
        self.servers.units.remove(disk);
        for worker in self.servers.pool.workers() {
            let disk = disk.clone();
            // Waited for, so that a file is free when the call is over.
            worker.call(move |w| w.let_go(&disk)).ok();
        }
    }

    /// Writes down what was changed at run time.
    pub(super) fn keep(&self, next: &Config, first: bool) -> Result<(), Refusal> {
        match &self.state_store {
            Some(state_store) if !first => {
                let kept = state_store.keep(&self.base, next);
                kept.map_err(Refusal::NotKept)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn publish(&self) {
        let live = Live {
            config: Arc::new(self.config.clone()),
            base: Arc::new(self.base.clone()),
            disks: Arc::new(self.disks.clone()),
            waiting: Arc::new(self.waiting.clone()),
            draining: Arc::new(self.drains.view()),
        };
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = live;
    }
}

/// What was done and can be taken back.
#[derive(Default)]
struct Undo {
    exports: Vec<OpenExport>,
    /// Exports that made room for them.
    replaced: Vec<ExportConfig>,
    /// Exports that other workers serve by now, with their placement before.
    placed: Vec<Placing>,
    /// The CHAP users of these, whatever their files say now.
    chap_users: HashMap<String, Arc<ChapUsers>>,
    /// Disks with the size that they had.
    resized: Vec<(String, u64)>,
    /// Disks that are to be smaller, with nothing lost yet.
    shrinking: Vec<(Arc<Disk>, Shrinking)>,
}

pub(super) fn refused(reasons: Vec<String>) -> Refusal {
    Refusal::Failed(reasons.into_iter().map(Fault::new).collect())
}

pub(super) fn is_block_device(path: &Path) -> bool {
    let metadata = std::fs::metadata(path);
    metadata.is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// What the files of CHAP users say now, target by target.
fn chap_users(config: &Config) -> Result<Vec<(String, ChapUsers)>, Refusal> {
    let (mut reasons, mut read) = (Vec::new(), Vec::new());
    for target in config.iscsi.iter().filter(|one| one.chap_users.is_some()) {
        let name = target.name.clone();
        match exports::chap_users(ExportRef::Iscsi(target)) {
            Ok(users) => read.push((name, users)),
            Err(reason) => reasons.push(format!("iscsi {name}: {reason}")),
        }
    }
    failed(&reasons)?;
    Ok(read)
}

fn failed(reasons: &[String]) -> Result<(), Refusal> {
    match reasons {
        [] => Ok(()),
        reasons => Err(refused(reasons.to_vec())),
    }
}

/// The file of a disk that lies in one.
pub(super) fn file_of<'a>(config: &'a Config, disk: &str) -> Option<&'a std::path::Path> {
    config.disk(disk)?.backend.file()
}
