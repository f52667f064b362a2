//! Changes that wait for disks to be opened. Opening a disk may block, so a change first opens its new disks on helper threads, and the
//! owner makes other changes meanwhile.
//!
//! ```text
//!   begin_change ──▶ disks to open ──none──────────────────────────────▶ drain, finish ──▶ reply
//!                          │                                                ▲
//!                          └──▶ helper threads: open ──▶ message to owner ──┘
//!                                     └── disk removed meanwhile: refused; the device is closed when it is open
//! ```
//!
//! A disk that may become available later (`waiting`) is opened on the same threads, without a change that waits for it.

use std::sync::Arc;

use super::draining::{Drained, Reply, Work};
use super::owner::{ChangeOptions, Owner, refused};
use super::plan::Plan;
use super::refusal::{Fault, Refusal};
use super::{Change, Message, relations};
use crate::disks::{Attempt, Devices, OpenDevice};
use config::DiskConfig;

const HELP: &str = "wait until it is open, or remove it";

/// A change that waits for disks to be opened.
struct Opening {
    number: u64,
    disks: Vec<DiskConfig>,
    opened: Devices,
    work: Work,
    options: ChangeOptions,
    drained: Drained,
    reply: Reply,
}

/// Disks that are being opened, and open disks that are not served yet.
#[derive(Default)]
pub(super) struct Openings {
    all: Vec<Opening>,
    last: u64,
    /// Devices opened during the start; `None` afterwards.
    pub at_start: Option<Devices>,
    /// Disks opened in the background for the next change.
    pub arrived: Vec<Attempt>,
}

impl Openings {
    fn disks(&self) -> impl Iterator<Item = &DiskConfig> {
        self.all.iter().flat_map(|one| &one.disks)
    }

    pub fn names(&self) -> Vec<String> {
        self.disks().map(|disk| disk.name.clone()).collect()
    }

    /// Returns the conflicts of a plan with disks that another change opens.
    pub fn bar(&self, plan: &Plan) -> Vec<Fault> {
        let is_added = |name: &str| plan.add_disks.iter().any(|disk| disk.name == name);
        let barred = self.disks().filter(|disk| is_added(&disk.name));
        let barred = barred.map(|disk| Fault::new(format!("disk {} is being opened", disk.name)));
        barred.map(|fault| fault.help(HELP)).collect()
    }

    /// Returns true if a whole configuration waits for its disks.
    pub fn has_whole(&self) -> bool {
        self.all.iter().any(|one| one.work.is_whole())
    }

    fn take(&mut self, is_meant: impl Fn(&Opening) -> bool) -> Option<Opening> {
        let at = self.all.iter().position(is_meant)?;
        Some(self.all.remove(at))
    }
}

impl Owner {
    /// Returns the added disks that are not open yet. Empty also for a change that [`Owner::change`] will refuse.
    pub(super) fn to_open(&self, work: &Work, options: &ChangeOptions) -> Vec<DiskConfig> {
        let Ok(next) = self.configs.next_of(work, options.force) else {
            return Vec::new();
        };
        let Ok(plan) = self.plan(&next) else {
            return Vec::new();
        };
        let is_busy = || {
            let transports = self.servers.transports();
            transports.is_some_and(|transports| !self.busy(&plan, &transports).is_empty())
        };
        let adds_disks = !plan.add_disks.is_empty();
        if !adds_disks
            || !options.force && is_busy()
            || !relations::check_change(&self.configs.wanted, &next).is_empty()
        {
            return Vec::new();
        }
        let is_open = |disk: &DiskConfig| {
            let opened = options.devices.get(&disk.name);
            opened.is_some_and(|(opened_with, _)| opened_with == disk)
        };
        // A reload does not wait for a disk that usually takes long.
        let comes_later =
            |disk: &DiskConfig| work.is_whole() && !disk.require && disk.backend.takes_long();
        let mut disks = plan.add_disks;
        disks.retain(|disk| {
            disk.backend.blocking_storage().is_some() && !is_open(disk) && !comes_later(disk)
        });
        disks
    }

    /// Opens the disks of a change and continues the change when all attempts have ended.
    pub(super) fn open_for_change(
        &mut self,
        disks: Vec<DiskConfig>,
        work: Work,
        options: ChangeOptions,
        drained: Drained,
        reply: Reply,
    ) {
        self.openings.last += 1;
        let number = self.openings.last;
        for disk in &disks {
            let started = self.open_on_helper(disk, move |owner, attempt| {
                owner.opened_for_change(number, attempt);
            });
            if let Err(error) = started {
                // Attempts that have begun are discarded.
                self.restore(drained);
                let reason = format!(
                    "disk {}: cannot start a thread to open it: {error}",
                    disk.name
                );
                return reply(Err(refused(vec![reason])));
            }
        }
        self.openings.all.push(Opening {
            number,
            disks,
            opened: Devices::new(),
            work,
            options,
            drained,
            reply,
        });
        self.publish();
    }

    fn opened_for_change(&mut self, number: u64, attempt: Attempt) {
        let mut all = self.openings.all.iter_mut();
        let Some(opening) = all.find(|one| one.number == number) else {
            return self.discard(attempt);
        };
        opening.opened.insert(attempt.0.name.clone(), attempt);
        if opening.opened.len() < opening.disks.len() {
            return;
        }
        let Some(opening) = self.openings.take(|one| one.number == number) else {
            return;
        };
        let mut options = opening.options;
        options.devices.extend(opening.opened);
        self.advance(opening.work, options, opening.drained, opening.reply);
    }

    /// Refuses the change that is opening a disk of this name. The device is closed once it is open. Returns false without such a change.
    pub(super) fn cancel_opening(&mut self, name: &str) -> bool {
        let is_meant = |one: &Opening| one.disks.iter().any(|disk| disk.name == name);
        let Some(opening) = self.openings.take(is_meant) else {
            return false;
        };
        for (_, attempt) in opening.opened.into_iter().chain(opening.options.devices) {
            self.discard(attempt);
        }
        self.restore(opening.drained);
        let fault = Fault::new(format!("disk {name} was removed while it was being opened"));
        (opening.reply)(Err(Refusal::Conflict(vec![fault])));
        self.publish();
        true
    }

    /// Opens the device of a disk on a helper thread and passes it to the owner.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn open_on_helper(
        &self,
        disk: &DiskConfig,
        opened: impl FnOnce(&mut Owner, Attempt) + Send + 'static,
    ) -> std::io::Result<()> {
        let messages = self.messages.clone();
        // A hung call must not keep the servers alive.
        let servers = Arc::downgrade(&self.servers);
        let config = disk.clone();
        let open = move || {
            let Some(units) = servers.upgrade().map(|servers| Arc::clone(&servers.units)) else {
                return;
            };
            let device = OpenDevice::open(&config, units.store());
            let message: Message = Box::new(move |owner| opened(owner, (config, device)));
            // Without an owner the device is closed here.
            messages.send(message).ok();
        };
        let place = disk.backend.blocking_storage().unwrap_or_default();
        self.helpers.run(&place, open)
    }

    /// Closes the device of an unneeded attempt on a helper thread.
    pub(super) fn discard(&self, (config, opened): Attempt) {
        let Ok(device) = opened else { return };
        let place = config.backend.blocking_storage().unwrap_or_default();
        let closed = self.helpers.run(&place, move || drop(device));
        if let Err(error) = closed {
            tracing::warn!(disk = config.name, "device closed by the owner: {error}");
        }
    }
}

pub(super) fn removed_by(work: &Work) -> Option<&str> {
    match work {
        Work::Change(change) => match &**change {
            Change::RemoveDisk(name) => Some(name),
            _ => None,
        },
        Work::Reload(_) => None,
    }
}
