//! Disks that are configured but cannot be opened yet: what runs without them, and when they are tried again.
//!
//! The owner makes what is wanted, less what needs a disk that waits: the disk itself, virtio-blk exports of it, and its logical
//! units. A disk that can be opened again comes in by the same path as one that is added at run time.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use bdev::DiskState;

use super::following::sized_files;
use super::owner::{How, Made, Owner};
use super::refusal::{Fault, Refusal};
use super::{Inbox, Message};
use crate::disks::{self, Attempt, Devices, Disks};
use crate::running::Inherited;
use config::{Config, DiskConfig, ExportRef};

/// The first wait; each later one is twice as long, up to the longest.
const WAIT_FIRST: Duration = Duration::from_secs(1);
const WAIT_LONGEST: Duration = Duration::from_secs(30);
/// How long the start waits for disks that may take long, so that whoever connects right after it finds them.
const START_PATIENCE: Duration = Duration::from_secs(5);

/// A disk that waits.
#[derive(Clone, Debug)]
struct Wait {
    /// As it was when it was tried: a disk that is configured otherwise is another one.
    disk: DiskConfig,
    /// Why it could not be opened; `None`: it is being opened for the first time.
    reason: Option<String>,
    /// It was open and its exports could not be made. It is brought in without others, which it would hold up.
    was_refused: bool,
    wait: Duration,
    /// `None`: it is being opened, on a helper thread.
    next_try: Option<Instant>,
}

/// All disks that wait, by name.
#[derive(Clone, Debug, Default)]
pub struct WaitingDisks(BTreeMap<String, Wait>);

impl WaitingDisks {
    /// Is there none?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A disk could not be opened: for the first time, or once more.
    pub fn failed(&mut self, disk: &DiskConfig, reason: String, now: Instant) {
        let before = self.0.get(&disk.name).filter(|known| known.disk == *disk);
        let before = before.map_or(Duration::ZERO, |known| known.wait);
        let wait = (before * 2).clamp(WAIT_FIRST, WAIT_LONGEST);
        let waits = Wait {
            disk: disk.clone(),
            reason: Some(reason),
            was_refused: false,
            wait,
            next_try: Some(now + wait),
        };
        self.0.insert(disk.name.clone(), waits);
    }

    /// Forgets disks that are not wanted any more, or are wanted otherwise.
    pub fn keep_wanted(&mut self, wanted: &Config) {
        if self.0.is_empty() {
            return;
        }
        let wanted = wanted.disks.iter();
        let wanted: HashMap<&str, &DiskConfig> =
            wanted.map(|disk| (disk.name.as_str(), disk)).collect();
        self.0
            .retain(|name, known| wanted.get(name.as_str()) == Some(&&known.disk));
    }

    /// Has disks that could not be opened tried again at once.
    pub fn retry_now(&mut self) {
        for next_try in self
            .0
            .values_mut()
            .filter_map(|known| known.next_try.as_mut())
        {
            *next_try = Instant::now();
        }
    }

    /// A disk has been opened.
    pub fn opened(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// When a disk is to be tried next.
    pub fn next_try(&self) -> Option<Instant> {
        self.0.values().filter_map(|known| known.next_try).min()
    }

    /// The disks whose time has come.
    pub fn due(&self, now: Instant) -> Vec<DiskConfig> {
        let due = self
            .0
            .values()
            .filter(|known| known.next_try.is_some_and(|at| at <= now));
        due.map(|known| known.disk.clone()).collect()
    }

    /// A disk is being opened: it is not tried until that has failed.
    pub fn opening(&mut self, disk: &DiskConfig) {
        let known = self.0.remove(&disk.name);
        let known = known.filter(|known| known.disk == *disk);
        let waits = Wait {
            disk: disk.clone(),
            reason: known.as_ref().and_then(|known| known.reason.clone()),
            was_refused: known.as_ref().is_some_and(|known| known.was_refused),
            wait: known.map_or(Duration::ZERO, |known| known.wait),
            next_try: None,
        };
        self.0.insert(disk.name.clone(), waits);
    }

    /// An open disk could not be served with its exports.
    fn refused(&mut self, disk: &DiskConfig, reason: String, now: Instant) {
        self.failed(disk, reason, now);
        if let Some(known) = self.0.get_mut(&disk.name) {
            known.was_refused = true;
        }
    }

    fn was_refused(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|known| known.was_refused)
    }

    /// Could this disk not be opened the last time?
    fn has_failed(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|known| known.reason.is_some())
    }

    /// Is this disk being opened, configured as it is here?
    fn is_opening(&self, disk: &DiskConfig) -> bool {
        let known = self.0.get(&disk.name);
        known.is_some_and(|known| known.next_try.is_none() && known.disk == *disk)
    }

    /// The state of a disk, if it waits.
    pub fn state(&self, name: &str) -> Option<DiskState> {
        let known = self.0.get(name)?;
        Some(match known.next_try {
            None => DiskState::Opening,
            Some(next_try) => DiskState::Unavailable {
                reason: known.reason.clone().unwrap_or_default(),
                next_try: next_try.saturating_duration_since(Instant::now()),
            },
        })
    }

    /// What of `wanted` can run.
    pub fn without(&self, wanted: &Config) -> Config {
        let mut present = wanted.clone();
        if self.0.is_empty() {
            return present;
        }
        let is_there = |disk: &str| !self.0.contains_key(disk);
        present.disks.retain(|disk| is_there(&disk.name));
        present.vhost_blk.retain(|export| is_there(&export.disk));
        for controller in &mut present.vhost_scsi {
            controller.luns.retain(|lun| is_there(&lun.disk));
        }
        for target in &mut present.iscsi {
            target.luns.retain(|lun| is_there(&lun.disk));
        }
        present
    }
}

/// Returns true if the daemon starts without waiting for the disk for longer than [`START_PATIENCE`].
fn may_come_later(disk: &DiskConfig) -> bool {
    !disk.require && disk.backend.blocking_place().is_some()
}

impl Owner {
    /// This is wanted from now on, and runs but for what needs a disk that waits.
    pub(super) fn set_config(&mut self, wanted: Config) {
        self.present = self.waiting.without(&wanted);
        self.sized_files = sized_files(&wanted);
        self.config = wanted;
    }

    /// Opens disks; those that cannot be opened, and are not required, wait.
    pub(super) fn open_or_wait(&mut self, configs: &[DiskConfig], devices: Devices) -> Disks {
        let store = self.servers.units.store();
        let opening = disks::open_all(configs, devices, &self.disks, &self.identities, store);
        opening.persist(store);
        let by_name = configs.iter().map(|config| (config.name.as_str(), config));
        let by_name: HashMap<&str, &DiskConfig> = match opening.failed.is_empty() {
            true => HashMap::new(),
            false => by_name.collect(),
        };
        for (disk, reason) in &opening.failed {
            let config = by_name.get(disk.as_str()).copied();
            // One that is required is tried once more below, where the start fails by it.
            let Some(config) = config.filter(|config| !config.require) else {
                continue;
            };
            let first = !self.waiting.has_failed(disk);
            self.waiting.failed(config, reason.clone(), Instant::now());
            if first {
                tracing::error!(disk, "disk unavailable, its exports wait for it: {reason}");
            }
        }
        let opened = opening.disks();
        self.bitmaps.attach(&opened);
        for disk in opened.keys() {
            self.waiting.opened(disk);
        }
        opened
    }

    /// Makes `next` of what is there, or refuses with all reasons.
    pub(super) fn become_(&mut self, next: Config, how: How) -> Result<Made, Refusal> {
        let waiting = self.waiting.clone();
        let slow = self.slow_disks_to_come(&next, &how);
        slow.iter().for_each(|disk| self.waiting.opening(disk));
        let made = self.become_with(next, how);
        match &made {
            Ok(_) => slow.iter().for_each(|disk| self.open_for_later(disk)),
            Err(_) => self.waiting = waiting,
        }
        self.report_listeners();
        made
    }

    /// A socket that was handed over for an export that waits for its disk is for that export when it comes.
    pub(super) fn keep_what_waits(
        &mut self,
        inherited: Vec<Inherited>,
        next: &Config,
    ) -> Vec<Inherited> {
        let present = self.waiting.without(next);
        let (now, later): (Vec<_>, Vec<_>) = inherited
            .into_iter()
            .partition(|one| present.export(&one.export).is_some());
        for one in later {
            if let Some(export) = next.export(&one.export).map(ExportRef::to_owned) {
                self.keep_listening(export.as_ref(), one);
            }
        }
        now
    }

    /// Time of the next attempt to open a waiting disk or listener.
    pub(super) fn next_try(&self) -> Option<Instant> {
        let listener = self.servers.next_listener_try();
        self.waiting.next_try().into_iter().chain(listener).min()
    }

    /// Tries disks that are due. Disks that are not in memory are opened on helper threads.
    pub(super) fn try_waiting_disks(&mut self) {
        let due = self.waiting.due(Instant::now());
        let (blocking, quick): (Vec<_>, Vec<_>) = due
            .into_iter()
            .partition(|disk| disk.backend.blocking_place().is_some());
        for disk in blocking {
            self.open_for_later(&disk);
        }
        if !quick.is_empty() {
            self.bring_in(&quick, Devices::new());
        }
    }

    /// Opens the disks of the start on helper threads. Disks that are not open in time become available later: the others do not
    /// wait for them.
    pub(super) fn open_first(&mut self, configs: &[DiskConfig], inbox: &Inbox) -> Disks {
        let blocking = configs.iter().filter(|disk| may_come_later(disk));
        let blocking: Vec<&DiskConfig> = blocking.collect();
        self.starting = Some(Devices::new());
        for disk in &blocking {
            self.open_for_later(disk);
        }
        let end = Instant::now() + START_PATIENCE;
        let opened = |owner: &Owner| owner.starting.as_ref().map_or(0, Devices::len);
        while opened(self) < blocking.len()
            && let Ok(message) = inbox.recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            message(self);
        }
        let devices = self.starting.take().unwrap_or_default();
        let configs = configs.iter();
        let configs = configs.filter(|disk| !self.waiting.is_opening(disk));
        let configs: Vec<DiskConfig> = configs.cloned().collect();
        self.open_or_wait(&configs, devices)
    }

    /// Disks of a change that become available after it: opening them usually takes long.
    fn slow_disks_to_come(&self, next: &Config, how: &How) -> Vec<DiskConfig> {
        let is_there = |name: &str| {
            self.disks.contains_key(name)
                || how.opened.contains_key(name)
                || how.devices.contains_key(name)
        };
        let is_waiting = |disk: &DiskConfig| {
            let known = self.waiting.0.get(&disk.name);
            known.is_some_and(|known| known.disk == *disk)
        };
        let is_slow = |disk: &&DiskConfig| !disk.require && disk.backend.takes_long();
        let slow = next.disks.iter().filter(is_slow);
        let slow = slow.filter(|disk| !is_there(&disk.name) && !is_waiting(disk));
        slow.cloned().collect()
    }

    /// Opens a disk on a helper thread. The disk becomes available when it is open.
    fn open_for_later(&mut self, disk: &DiskConfig) {
        self.waiting.opening(disk);
        let started = self.open_on_helper(disk, Owner::opened_for_later);
        if let Err(error) = started {
            let reason = format!("no thread to open it: {error}");
            self.waiting.failed(disk, reason, Instant::now());
        }
    }

    fn opened_for_later(&mut self, attempt: Attempt) {
        let (disk, _) = &attempt;
        // Meanwhile it may have been removed, or configured otherwise.
        if !self.waiting.is_opening(disk) {
            return self.discard(attempt);
        }
        if let Some(starting) = &mut self.starting {
            self.waiting.opened(&disk.name);
            starting.insert(disk.name.clone(), attempt);
            return;
        }
        if self.arrived.is_empty() {
            // One change serves all attempts with messages in the inbox.
            let message: Message = Box::new(Owner::bring_in_arrived);
            self.messages.send(message).ok();
        }
        self.arrived.push(attempt);
    }

    fn bring_in_arrived(&mut self) {
        let arrived = std::mem::take(&mut self.arrived);
        let (wanted, unwanted): (Vec<_>, Vec<_>) = arrived
            .into_iter()
            .partition(|(disk, _)| self.waiting.is_opening(disk));
        for attempt in unwanted {
            self.discard(attempt);
        }
        let (alone, together): (Vec<_>, Vec<_>) = wanted
            .into_iter()
            .partition(|(disk, _)| self.waiting.was_refused(&disk.name));
        let groups = alone.into_iter().map(|attempt| vec![attempt]);
        for group in groups.chain([together]).filter(|group| !group.is_empty()) {
            let disks: Vec<DiskConfig> = group.iter().map(|(disk, _)| disk.clone()).collect();
            let devices = group.into_iter();
            let devices = devices.map(|attempt| (attempt.0.name.clone(), attempt));
            self.bring_in(&disks, devices.collect());
        }
    }

    /// Disks that can be opened come in, with what they serve.
    fn bring_in(&mut self, due: &[DiskConfig], devices: Devices) {
        let opened = self.open_or_wait(due, devices);
        if opened.is_empty() {
            return self.publish();
        }
        let came: Vec<String> = opened.keys().cloned().collect();
        let how = How {
            opened,
            ..How::default()
        };
        match self.become_(self.config.clone(), how) {
            Ok(_) => {
                for disk in came {
                    tracing::info!(disk, "disk available");
                }
            }
            Err(refusal) => {
                // Its exports cannot be opened: it waits on, and they with it.
                let reasons: Vec<String> = refusal.faults().iter().map(Fault::to_string).collect();
                let reason = reasons.join("; ");
                for config in due.iter().filter(|config| came.contains(&config.name)) {
                    tracing::error!(disk = config.name, "the disk cannot be served: {reason}");
                    self.waiting.refused(config, reason.clone(), Instant::now());
                }
                self.publish();
            }
        }
        self.reply_when_closed(Ok(Made::default()), Box::new(drop));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::{Flags, Surroundings, parse};

    fn config(text: &str) -> Config {
        let file = Some(("lunette.toml", text));
        let surroundings = Surroundings::of_this_process();
        parse(file, &Flags::default(), &surroundings).unwrap_or_else(|error| panic!("{error}"))
    }

    const TEXT: &str = r#"
        workers = 1
        [[disk]]
        name = "a"
        backend = "ram"
        size = "1M"
        [[disk]]
        name = "b"
        backend = "file"
        path = "/nonexistent/b"
        [[vhost_blk]]
        disk = "a"
        socket = "/tmp/a.sock"
        [[vhost_blk]]
        disk = "b"
        socket = "/tmp/b.sock"
        [[vhost_scsi]]
        name = "c"
        socket = "/tmp/c.sock"
        lun = [{ target = 0, lun = 0, disk = "a" }, { target = 1, lun = 0, disk = "b" }]
        [[iscsi]]
        name = "iqn.2026-11.org.example:t"
        portals = ["127.0.0.1:3260"]
        demo_mode = "rw"
        disks = ["b", "a"]
    "#;

    #[test]
    fn what_needs_a_disk_that_waits_is_left_out_and_all_else_stays() {
        let wanted = config(TEXT);
        let mut waiting = WaitingDisks::default();
        assert_eq!(waiting.without(&wanted), wanted);
        let disk = wanted.disk("b").unwrap();
        waiting.failed(disk, "is not there".to_owned(), Instant::now());
        let present = waiting.without(&wanted);
        let names = |config: &Config| -> Vec<String> {
            config.disks.iter().map(|disk| disk.name.clone()).collect()
        };
        assert_eq!(names(&present), ["a"]);
        assert_eq!(present.vhost_blk.len(), 1);
        assert_eq!(present.vhost_scsi[0].luns.len(), 1);
        // The numbers of the others do not change.
        let luns = &present.iscsi[0].luns;
        assert_eq!((luns.len(), luns[0].lun), (1, 1));
        waiting.opened("b");
        assert_eq!(waiting.without(&wanted), wanted);
    }

    #[test]
    fn waits_double_up_to_half_a_minute_and_begin_anew_for_another_disk() {
        let wanted = config(TEXT);
        let mut waiting = WaitingDisks::default();
        let begun = Instant::now();
        let mut now = begun;
        let mut waits = Vec::new();
        for _ in 0..8 {
            let disk = wanted.disk("b").unwrap();
            waiting.failed(disk, "is not there".to_owned(), now);
            assert!(waiting.due(now).is_empty());
            let next = waiting.next_try().unwrap();
            waits.push((next - now).as_secs());
            now = next;
            assert_eq!(waiting.due(now).len(), 1);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30, 30]);
        // While it is being opened nobody tries it again.
        let disk = wanted.disk("b").unwrap();
        waiting.opening(disk);
        assert!(waiting.is_opening(disk) && waiting.next_try().is_none());
        assert_eq!(waiting.state("b"), Some(DiskState::Opening));
        assert!(waiting.due(now + Duration::from_secs(60)).is_empty());
        waiting.failed(disk, "is not there".to_owned(), now);
        assert!(!waiting.is_opening(disk) && waiting.next_try().is_some());
        let other = config(&TEXT.replace("/nonexistent/b", "/nonexistent/c"));
        waiting.keep_wanted(&other);
        assert!(waiting.is_empty());
    }
}
