//! Owner of all objects: holds the wanted configuration and the running objects, and turns one configuration into the next. Lives on the
//! manager's thread, so changes run one after the other. A change is checked as a whole; fallible steps run first, then the state is
//! persisted, then the steps that cannot fail. Readers see the last complete state ([`Live`]).
//!
//! ```text
//!   Owner ─┬─ configs     wanted, present and base configuration
//!          ├─ waiting     disks that cannot be opened yet
//!          ├─ openings    changes that wait for their disks to be opened
//!          ├─ drains      changes that wait for clients
//!          ├─ current     the change in progress: drained objects, devices to close, disks to shrink
//!          ├─ resizes     record of disks that are being resized, for a crash
//!          ├─ disks       open disks, identities, dirty bitmaps
//!          ├─ exports     open exports, inherited sockets
//!          ├─ listeners   listeners that wait for their addresses
//!          └─ jobs        copies, commits, snapshots
//! ```

use std::sync::{Arc, PoisonError, RwLock, mpsc};
use std::time::Instant;

use bdev::Disk;

use super::changes::Change;
use super::closing::CurrentChange;
use super::configs::Configs;
use super::draining::{Draining, Drains};
use super::events::EventBus;
use super::listeners::Listeners;
use super::open_disks::OpenDisks;
use super::open_exports::OpenExports;
use super::opening::Openings;
use super::plan::{Plan, Resize};
use super::refusal::{Fault, Refusal};
use super::relations;
use super::resizes::Resizes;
use super::servers::{Servers, Transports};
use super::sizes::is_on_device;
use super::state_store::StateStore;
use super::waiting::WaitingDisks;
use super::{Inbox, Message};
use crate::bitmaps::Bitmaps;
use crate::certificates;
use crate::disks::{Devices, Disks};
use crate::exports::{self, ChapUsers, ReadyExport};
use crate::helper_threads::HelperThreads;
use crate::identities::Identities;
use crate::jobs::Jobs;
use crate::running::Inherited;
use crate::state_files::DamagedFiles;
use config::{AccessStates, Config, ExportConfig, LunConfig};

/// Snapshot of the objects for readers.
#[derive(Clone)]
pub struct Live {
    /// Configuration in effect.
    pub config: Arc<Config>,
    /// Configuration of the file and the flags.
    pub base: Arc<Config>,
    /// Open disks.
    pub disks: Arc<Disks>,
    /// Disks that cannot be opened yet.
    pub waiting: Arc<WaitingDisks>,
    /// Objects that are being removed and wait for clients.
    pub draining: Arc<Vec<Draining>>,
    /// Names of disks that a change is opening. They are not configured yet.
    pub opening: Arc<Vec<String>>,
}

impl Live {
    /// Removes and returns the disks, at the end of the daemon.
    pub fn take_disks(&mut self) -> Arc<Disks> {
        self.waiting = Arc::default();
        std::mem::take(&mut self.disks)
    }
}

/// Options of a change.
#[derive(Default)]
pub struct ChangeOptions {
    /// Disconnects clients in the way, aborts tasks, and drops data beyond a new end.
    pub force: bool,
    /// Inherited sockets for new exports.
    pub inherited: Vec<Inherited>,
    /// Set during the start: no events are sent and nothing is persisted.
    pub first: bool,
    /// Disks that are open already.
    pub opened: Disks,
    /// Open devices of new disks.
    pub devices: Devices,
}

/// Result of a change.
#[derive(Debug, Default)]
pub struct ChangeResult {
    /// Steps that were done.
    pub plan: Plan,
    /// After a start or a reload: values of the file that a change at run time replaces, one line each.
    pub shadowed: Vec<String>,
    /// Exports that accept clients now.
    pub ready: Vec<ReadyExport>,
}

/// Owns the objects. Each part has its own file and methods; methods of the owner combine parts.
pub struct Owner {
    pub(crate) configs: Configs,
    /// Configured disks that cannot be opened yet.
    pub(super) waiting: WaitingDisks,
    pub(crate) disks: OpenDisks,
    pub(super) exports: OpenExports,
    pub(crate) listeners: Listeners,
    pub(super) openings: Openings,
    pub(super) drains: Drains,
    pub(super) resizes: Resizes,
    pub(super) current: CurrentChange,
    pub(crate) jobs: Jobs,
    pub(super) servers: Arc<Servers>,
    pub(super) live: Arc<RwLock<Live>>,
    pub(super) state_store: Option<Arc<StateStore>>,
    /// Unusable state files.
    pub(super) damaged: DamagedFiles,
    pub(crate) event_bus: EventBus,
    pub(super) messages: mpsc::Sender<Message>,
    /// Threads for calls that may block.
    pub(super) helpers: HelperThreads,
    /// Set at the end: no further message is handled.
    pub(super) ending: bool,
}

impl Owner {
    /// Creates an owner without objects. `base` is the configuration of the file and the flags.
    pub fn new(
        base: Config,
        servers: Arc<Servers>,
        state_store: Option<StateStore>,
        damaged: DamagedFiles,
    ) -> (Owner, Inbox) {
        let (messages, inbox) = mpsc::channel();
        let configs = Configs::new(base);
        let live = Live {
            config: Arc::new(configs.wanted.clone()),
            base: Arc::new(configs.base.clone()),
            disks: Arc::default(),
            waiting: Arc::default(),
            draining: Arc::default(),
            opening: Arc::default(),
        };
        let event_bus = EventBus::default();
        servers.publish_sessions(&event_bus);
        let state_store = state_store.map(Arc::new);
        let folder = state_store.as_ref().map(|store| store.folder());
        let disks = OpenDisks {
            open: Disks::new(),
            identities: Identities::load(folder, &damaged),
            bitmaps: Arc::new(Bitmaps::load(folder, &damaged)),
            servers: Arc::clone(&servers),
            last_record: Instant::now(),
        };
        let owner = Owner {
            configs,
            waiting: WaitingDisks::default(),
            disks,
            exports: OpenExports::new(Arc::clone(&servers)),
            listeners: Listeners::new(Arc::clone(&servers), event_bus.clone()),
            openings: Openings::default(),
            drains: Drains::default(),
            resizes: Resizes::new(state_store.clone()),
            current: CurrentChange::default(),
            jobs: Jobs::default(),
            servers,
            live: Arc::new(RwLock::new(live)),
            state_store,
            damaged,
            event_bus,
            messages,
            helpers: HelperThreads::default(),
            ending: false,
        };
        (owner, inbox)
    }

    /// Returns the shared snapshot for readers.
    pub fn live(&self) -> Arc<RwLock<Live>> {
        Arc::clone(&self.live)
    }

    /// Returns the channel to subscribe to events.
    pub fn events(&self) -> tokio::sync::broadcast::Sender<control::Event> {
        self.event_bus.sender()
    }

    /// Starts with the configuration and the persisted changes.
    ///
    /// # Errors
    /// All reasons for the failure.
    pub fn begin(
        &mut self,
        inherited: Vec<Inherited>,
        inbox: &Inbox,
    ) -> Result<ChangeResult, Refusal> {
        let failed = |reason| Refusal::Failed(vec![Fault::new(reason)]);
        // CHAP users must be set before a portal opens.
        let finders = exports::discovery_users(&self.configs.base).map_err(failed)?;
        let identities = certificates::read(&self.configs.base).map_err(failed)?;
        identities.warn(&self.configs.base);
        self.servers.set_identities(identities);
        if let Some(transports) = self.servers.transports() {
            transports.iscsi.set_discovery_users(finders);
            transports.set_may_wait(true);
        }
        let mut next = self.configs.base.clone();
        let mut changed = Vec::new();
        let mut shadowed = Vec::new();
        if let Some(state_store) = &self.state_store {
            let kept = state_store.kept().map_err(failed)?;
            changed = kept.names();
            shadowed = kept.shadowing_lines(&self.configs.base);
            next = kept.over(&self.configs.base);
        }
        let mut faults = relations::check(&next);
        if !faults.is_empty() {
            if let Some(state_store) = &self.state_store
                && relations::check(&self.configs.base).is_empty()
            {
                let help = state_store.help();
                faults = faults.into_iter().map(|fault| fault.help(&help)).collect();
            }
            return Err(Refusal::Invalid(faults));
        }
        if let Some(state_store) = &self.state_store {
            state_store.finish_resize(&next).map_err(failed)?;
        }
        let sockets = &mut self.exports.inherited;
        let inherited = sockets.store_moved(inherited, &self.configs.base, &next);
        let opened = self.open_first(&next.disks, inbox);
        let inherited = self.store_sockets_of_waiting(inherited, &next);
        let options = ChangeOptions {
            inherited,
            first: true,
            opened,
            ..ChangeOptions::default()
        };
        let result = self.become_(next, options);
        match &result {
            Ok(_) => {
                self.reply_when_done(Ok(ChangeResult::default()), Box::new(drop));
            }
            Err(_) => self.current.close_here(),
        }
        match (result, &self.state_store) {
            (Err(Refusal::Failed(mut faults)), Some(state_store)) => {
                // The file may lack the object, so the hint names the state file.
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
            (result, _) => result.map(|result| ChangeResult { shadowed, ..result }),
        }
    }

    /// Makes a change, or refuses it with all reasons. A new listener must open: the client gets the error. Listeners of the file may wait.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub(super) fn change(
        &mut self,
        change: Change,
        options: ChangeOptions,
    ) -> Result<ChangeResult, Refusal> {
        let access_state = match &change {
            Change::SetAccessState(export, group, state) => Some((export.clone(), *group, *state)),
            _ => None,
        };
        let next = change.next(&self.configs.wanted, options.force)?;
        let faults = relations::check_change(&self.configs.wanted, &next);
        if !faults.is_empty() {
            return Err(Refusal::Invalid(faults));
        }
        let transports = self.servers.transports().ok_or(Refusal::Ending)?;
        transports.set_may_wait(false);
        let result = self.become_(next, options);
        transports.set_may_wait(true);
        let result = result?;
        // The configuration may have the state already, while an initiator has set another one.
        if let Some((export, group, state)) = access_state
            && result.plan.access_states.is_empty()
        {
            self.exports
                .set_access_states(&export, &AccessStates::from([(group, state)]));
        }
        Ok(result)
    }

    /// Adopts a changed file and flags. Changes made at run time stay on top of it.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub(super) fn reload(
        &mut self,
        base: Config,
        options: ChangeOptions,
    ) -> Result<ChangeResult, Refusal> {
        let next = self.configs.overlay().over(&base);
        let mut faults = relations::check(&next);
        if !faults.is_empty() {
            if relations::check(&base).is_empty() {
                let help = "the file is valid, but conflicts with changes made at run time; show them with lunette config diff, then undo them or correct the file";
                faults = faults.into_iter().map(|fault| fault.help(help)).collect();
            }
            return Err(Refusal::Invalid(faults));
        }
        let users = chap_users(&next)?;
        let finders = exports::discovery_users(&next).map_err(|reason| refused(vec![reason]))?;
        let identities = certificates::read(&next).map_err(|reason| refused(vec![reason]))?;
        identities.warn(&next);
        let before = std::mem::replace(&mut self.configs.base, base);
        let mut result = self.become_(next, options);
        match &mut result {
            Ok(result) => {
                self.exports.set_chap_users(users, &mut result.plan);
                let changed = self
                    .servers
                    .transports()
                    .map(|d| d.iscsi.set_discovery_users(finders));
                result.plan.discovery_users = changed == Some(true);
                result.plan.certificates = self.servers.set_identities(identities);
                if result.plan.certificates {
                    self.warn_of_exports();
                }
                result.shadowed = self.configs.overlay().shadowing_lines(&self.configs.base);
            }
            Err(_) => self.configs.base = before,
        }
        self.publish();
        result
    }

    /// Logs the warnings of all exports after a change of certificates.
    fn warn_of_exports(&self) {
        let checks_clients = self.servers.nbd_tls.checks_clients();
        for export in self.configs.wanted.exports() {
            if let Some(warning) = export.warning(checks_clients) {
                tracing::warn!(export = export.name(), "{warning}");
            }
        }
    }

    /// Checks whether a daemon with another configuration file could serve the present clients.
    ///
    /// # Errors
    /// The reasons to refuse a reload of that file, except keys that need a new process.
    pub(crate) fn check_upgrade(&self, base: &Config) -> Result<(), Refusal> {
        let next = self.configs.overlay().over(base);
        let faults = relations::check(&next);
        if !faults.is_empty() {
            return Err(Refusal::Invalid(faults));
        }
        let present = next.with_objects_of(&self.configs.present);
        let plan = self.plan_from(&present, &next)?;
        let transports = self.servers.transports().ok_or(Refusal::Ending)?;
        match self.busy(&plan, &transports) {
            busy if busy.is_empty() => Ok(()),
            busy => Err(Refusal::Conflict(busy)),
        }
    }

    /// Returns the reason to refuse an upgrade if RAM disks lose their content with this process.
    pub(crate) fn lost_ram_disks(&self) -> Option<Fault> {
        let disks = self.configs.present.disks.iter();
        let lost = disks.filter(|disk| disk.backend.is_lost_at_exit());
        let lost: Vec<&str> = lost.map(|disk| disk.name.as_str()).collect();
        let detail = format!("RAM disks would lose their content: {}", lost.join(", "));
        let fault = Fault::new(detail).help("add them with persist=memfd, or --lose-ram-disks");
        (!lost.is_empty()).then_some(fault)
    }

    /// Returns the threads of calls that may block.
    pub(crate) fn helper_threads(&self) -> HelperThreads {
        self.helpers.clone()
    }

    /// Turns the present objects into `next`, or refuses with all reasons.
    pub(super) fn become_with(
        &mut self,
        mut next: Config,
        options: ChangeOptions,
    ) -> Result<ChangeResult, Refusal> {
        let plan = self.plan(&next)?;
        self.waiting.keep_wanted(&next);
        let transports = self.servers.transports().ok_or(Refusal::Ending)?;
        if !options.force {
            let busy = self.busy(&plan, &transports);
            if !busy.is_empty() {
                return Err(Refusal::Conflict(busy));
            }
        }
        if plan.is_empty() {
            self.keep(&next, options.first)?;
            self.set_config(next);
            self.publish();
            return Ok(ChangeResult::default());
        }
        let is_device = |name: &str| {
            self.disks
                .open
                .get(name)
                .is_some_and(|disk| is_on_device(disk))
        };
        plan.drop_followed_sizes(
            &mut next,
            &self.configs.wanted,
            &self.configs.base,
            is_device,
        );
        let ready = self.carry_out(&plan, &next, options, &transports)?;
        self.set_config(next);
        self.publish();
        Ok(ChangeResult {
            plan,
            ready,
            ..ChangeResult::default()
        })
    }

    /// Returns the plan that turns the present objects into `next`.
    pub(super) fn plan(&self, next: &Config) -> Result<Plan, Refusal> {
        self.plan_from(&self.configs.present, next)
    }

    fn plan_from(&self, present: &Config, next: &Config) -> Result<Plan, Refusal> {
        let faults = relations::check_objects(next);
        if !faults.is_empty() {
            return Err(Refusal::Invalid(faults));
        }
        let mut waiting = self.waiting.clone();
        waiting.keep_wanted(next);
        let plan = Plan::between(present, &waiting.without(next));
        if !plan.refused.is_empty() {
            return Err(Refusal::Conflict(plan.refused));
        }
        let mut barred = self.drains.bar(&plan);
        barred.extend(self.openings.bar(&plan));
        barred.extend(self.at_work(&plan));
        if !barred.is_empty() {
            return Err(Refusal::Conflict(barred));
        }
        Ok(plan)
    }

    /// Returns the conflicts with jobs, which forbid to resize or remove their disks.
    fn at_work(&self, plan: &Plan) -> Vec<Fault> {
        let resized = plan.resize.iter().map(|resize| &resize.disk);
        let disks = plan.remove_disks.iter().chain(resized);
        disks.filter_map(|disk| self.jobs.at_work(disk)).collect()
    }

    /// Returns a served disk.
    ///
    /// # Errors
    /// If there is no disk of this name or it is unavailable.
    pub(crate) fn disk(&self, name: &str) -> Result<Arc<Disk>, Refusal> {
        let no_disk = || match self.configs.wanted.disk(name) {
            None => Refusal::NotFound(Fault::new(format!("there is no disk `{name}`"))),
            Some(_) => Refusal::conflict(
                format!("disk {name} is unavailable"),
                "see the reason with lunette disk show",
            ),
        };
        self.disks.open.get(name).cloned().ok_or_else(no_disk)
    }

    /// Returns the conflicts of a plan with clients, reservations and data.
    pub(super) fn busy(&self, plan: &Plan, transports: &Transports) -> Vec<Fault> {
        let mut faults = Vec::new();
        let leaving = plan.remove_exports.iter().map(String::as_str);
        let replaced = plan.replace_exports.iter().map(|e| e.name());
        let connected = exports::connected(transports);
        for name in leaving.chain(replaced).filter(|n| connected.contains(*n)) {
            let fault = Fault::new(format!("export {name} has a client"));
            faults.push(fault.help("disconnect it first, or use --force"));
        }
        for (export, luns) in &plan.remove_luns {
            for LunConfig { target, lun, disk } in luns {
                let disk = self.disks.open.get(disk);
                let unit = disk.and_then(|disk| self.servers.units.known(disk));
                if unit.is_some_and(|unit| unit.reservations().is_held()) {
                    let detail = format!("LUN {export}/{target}:{lun} is reserved by an initiator");
                    faults.push(Fault::new(detail).help("release the reservation, or use --force"));
                }
            }
        }
        for Resize { disk, size } in &plan.resize {
            let Some(known) = self.disks.open.get(disk) else {
                continue;
            };
            let now = known.info().geometry.capacity_bytes();
            if *size < now {
                let detail =
                    format!("shrinking disk {disk} from {now} to {size} bytes would lose data");
                let help = "use --force to drop the data beyond the new end";
                faults.push(Fault::at("/size", detail).help(help));
            }
        }
        faults
    }

    /// Notifies the clients of all exports that a disk was resized.
    pub(super) fn notify_resized(&self, disk: &str) {
        let (disks, present) = (&self.disks.open, &self.configs.present);
        self.exports.notify_resized(disk, disks, present);
    }

    /// Persists the changes made at run time.
    pub(super) fn keep(&self, next: &Config, first: bool) -> Result<(), Refusal> {
        match &self.state_store {
            Some(state_store) if !first => {
                let kept = state_store.keep(&self.configs.base, next);
                kept.map_err(Refusal::NotPersisted)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn publish(&self) {
        let live = Live {
            config: Arc::new(self.configs.wanted.clone()),
            base: Arc::new(self.configs.base.clone()),
            disks: Arc::new(self.disks.open.clone()),
            waiting: Arc::new(self.waiting.clone()),
            draining: Arc::new(self.drains.view()),
            opening: Arc::new(self.openings.names()),
        };
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = live;
    }
}

pub(super) fn refused(reasons: Vec<String>) -> Refusal {
    Refusal::Failed(reasons.into_iter().map(Fault::new).collect())
}

fn chap_users(config: &Config) -> Result<Vec<(String, ChapUsers)>, Refusal> {
    let (mut reasons, mut read) = (Vec::new(), Vec::new());
    let has_users = |export: &&ExportConfig| export.chap_users().is_some();
    for export in config.exports().filter(has_users) {
        let (kind, name) = (export.kind(), export.name());
        match exports::chap_users(export.chap_users()) {
            Ok(users) => read.push((name.to_owned(), users)),
            Err(reason) => reasons.push(format!("{kind} {name}: {reason}")),
        }
    }
    failed(&reasons)?;
    Ok(read)
}

pub(super) fn failed(reasons: &[String]) -> Result<(), Refusal> {
    match reasons {
        [] => Ok(()),
        reasons => Err(refused(reasons.to_vec())),
    }
}
