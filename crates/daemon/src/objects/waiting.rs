//! Configured disks that cannot be opened yet, and the time of their next attempt.
//!
//! The owner runs the wanted configuration without the waiting disks, their virtio-blk exports and their logical units. A disk that becomes
//! available is added as at run time.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use bdev::DiskState;

use super::owner::{ChangeOptions, ChangeResult, Owner};
use super::refusal::{Fault, Refusal};
use super::{Inbox, Message};
use crate::disks::{self, Attempt, Devices, Disks};
use crate::running::Inherited;
use crate::unit_records;
use config::{Config, DiskConfig};

/// First delay between attempts. Each later one is twice as long, up to [`WAIT_LONGEST`].
const WAIT_FIRST: Duration = Duration::from_secs(1);
const WAIT_LONGEST: Duration = Duration::from_secs(30);
/// Longest wait of the start for slow disks, so that early clients find them.
pub(crate) const START_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
struct Wait {
    /// Configuration of the attempt. With another configuration it is another disk.
    disk: DiskConfig,
    /// Error of the last attempt; `None` during the first one.
    reason: Option<String>,
    /// The disk was open but its exports failed. It is added alone, because it would fail other disks.
    was_refused: bool,
    wait: Duration,
    /// `None` while a helper thread opens the disk.
    next_try: Option<Instant>,
}

/// All waiting disks by name.
#[derive(Clone, Debug, Default)]
pub struct WaitingDisks(BTreeMap<String, Wait>);

impl WaitingDisks {
    /// Returns true if no disk waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records a failed attempt to open a disk.
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

    /// Drops disks that are no longer wanted or are configured differently.
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

    /// Makes all failed disks due at once.
    pub fn retry_now(&mut self) {
        for next_try in self
            .0
            .values_mut()
            .filter_map(|known| known.next_try.as_mut())
        {
            *next_try = Instant::now();
        }
    }

    /// Removes a disk that was opened.
    pub fn opened(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Returns the time of the next attempt.
    pub fn next_try(&self) -> Option<Instant> {
        self.0.values().filter_map(|known| known.next_try).min()
    }

    /// Returns the disks that are due.
    pub fn due(&self, now: Instant) -> Vec<DiskConfig> {
        let due = self
            .0
            .values()
            .filter(|known| known.next_try.is_some_and(|at| at <= now));
        due.map(|known| known.disk.clone()).collect()
    }

    /// Records that a disk is being opened. It is not due until the attempt has failed.
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

    /// Records that an open disk could not be served with its exports.
    fn refused(&mut self, disk: &DiskConfig, reason: String, now: Instant) {
        self.failed(disk, reason, now);
        if let Some(known) = self.0.get_mut(&disk.name) {
            known.was_refused = true;
        }
    }

    fn was_refused(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|known| known.was_refused)
    }

    /// Returns the error of the last attempt to open a disk.
    fn reason(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.reason.as_deref()
    }

    fn is_opening(&self, disk: &DiskConfig) -> bool {
        let known = self.0.get(&disk.name);
        known.is_some_and(|known| known.next_try.is_none() && known.disk == *disk)
    }

    /// Returns the state of a waiting disk.
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

    /// Returns the part of `wanted` that does not need a waiting disk.
    pub fn without(&self, wanted: &Config) -> Config {
        let mut present = wanted.clone();
        if self.0.is_empty() {
            return present;
        }
        let is_there = |disk: &str| !self.0.contains_key(disk);
        present.disks.retain(|disk| is_there(&disk.name));
        present.retain_exports(|export| export.disk().is_none_or(is_there));
        for luns in present.all_luns_mut() {
            luns.retain(|lun| is_there(&lun.disk));
        }
        present
    }
}

/// Returns true if the start waits for the disk no longer than [`START_PATIENCE`].
fn may_come_later(disk: &DiskConfig) -> bool {
    !disk.require && disk.backend.blocking_storage().is_some()
}

impl Owner {
    /// Sets the wanted configuration and forgets the units of disks that it no longer has.
    pub(super) fn set_config(&mut self, wanted: Config) {
        unit_records::forget(&self.configs.wanted, &wanted, self.servers.units.store());
        self.configs.set(wanted, &self.waiting);
    }

    /// Opens disks. Disks that cannot be opened and are not required wait.
    pub(super) fn open_or_wait(&mut self, configs: &[DiskConfig], devices: Devices) -> Disks {
        let store = self.servers.units.store();
        let opening = disks::open_all(
            configs,
            devices,
            &self.disks.open,
            &self.disks.identities,
            store,
        );
        self.write_identities(opening.unwritten());
        let by_name = configs.iter().map(|config| (config.name.as_str(), config));
        let by_name: HashMap<&str, &DiskConfig> = match opening.failed.is_empty() {
            true => HashMap::new(),
            false => by_name.collect(),
        };
        for (disk, reason) in &opening.failed {
            let config = by_name.get(disk.as_str()).copied();
            // A required disk is tried again below, and the start fails with its error.
            let Some(config) = config.filter(|config| !config.require) else {
                continue;
            };
            let is_new = self.waiting.reason(disk) != Some(reason.as_str());
            self.waiting.failed(config, reason.clone(), Instant::now());
            if is_new {
                tracing::error!(disk, "disk unavailable, its exports wait: {reason}");
                self.event_bus.publish_unavailable(disk, reason);
            }
        }
        let opened = opening.disks();
        self.disks.bitmaps.attach(opening.stamped());
        self.current.closing.extend(opening.discarded);
        for disk in opened.keys() {
            self.waiting.opened(disk);
        }
        opened
    }

    /// Turns the present objects into `next`, or refuses with all reasons.
    pub(super) fn become_(
        &mut self,
        next: Config,
        options: ChangeOptions,
    ) -> Result<ChangeResult, Refusal> {
        let waiting = self.waiting.clone();
        let slow = self.slow_disks(&next, &options);
        slow.iter().for_each(|disk| self.waiting.opening(disk));
        let result = self.become_with(next, options);
        let open = &self.disks.open;
        let bitmaps = &self.disks.bitmaps;
        bitmaps.close_unserved(|disk| open.contains_key(disk));
        match &result {
            Ok(_) => slow.iter().for_each(|disk| self.open_for_later(disk)),
            Err(_) => self.waiting = waiting,
        }
        self.listeners.report();
        result
    }

    /// Stores the inherited sockets of exports that wait for their disks and returns the others.
    pub(super) fn store_sockets_of_waiting(
        &mut self,
        inherited: Vec<Inherited>,
        next: &Config,
    ) -> Vec<Inherited> {
        let present = self.waiting.without(next);
        let (now, later): (Vec<_>, Vec<_>) = inherited
            .into_iter()
            .partition(|one| present.export(&one.export).is_some());
        for one in later {
            if let Some(export) = next.export(&one.export) {
                self.exports.inherited.store(export, one);
            }
        }
        now
    }

    /// Returns the time of the next attempt to open a waiting disk or listener.
    pub(super) fn next_try(&self) -> Option<Instant> {
        let listener = self.servers.next_listener_try();
        self.waiting.next_try().into_iter().chain(listener).min()
    }

    /// Tries disks that are due. Disks that may block are opened on helper threads.
    pub(super) fn try_waiting_disks(&mut self) {
        let due = self.waiting.due(Instant::now());
        let (blocking, quick): (Vec<_>, Vec<_>) = due
            .into_iter()
            .partition(|disk| disk.backend.blocking_storage().is_some());
        for disk in blocking {
            self.open_for_later(&disk);
        }
        if !quick.is_empty() {
            self.bring_in(&quick, Devices::new());
        }
    }

    /// Opens the disks of the start on helper threads. Later disks than [`START_PATIENCE`] are added when they open.
    pub(super) fn open_first(&mut self, configs: &[DiskConfig], inbox: &Inbox) -> Disks {
        let blocking = configs.iter().filter(|disk| may_come_later(disk));
        let blocking: Vec<&DiskConfig> = blocking.collect();
        self.openings.at_start = Some(Devices::new());
        for disk in &blocking {
            self.open_for_later(disk);
        }
        let end = Instant::now() + START_PATIENCE;
        let opened = |owner: &Owner| owner.openings.at_start.as_ref().map_or(0, Devices::len);
        while opened(self) < blocking.len()
            && let Ok(message) = inbox.recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            message(self);
        }
        let devices = self.openings.at_start.take().unwrap_or_default();
        let configs = configs.iter();
        let configs = configs.filter(|disk| !self.waiting.is_opening(disk));
        let configs: Vec<DiskConfig> = configs.cloned().collect();
        let opened = self.open_or_wait(&configs, devices);
        // A required disk that was refused is opened again by the start, which needs its locks.
        self.current.close_here();
        opened
    }

    /// Returns the slow disks of a change, which become available after it.
    fn slow_disks(&self, next: &Config, options: &ChangeOptions) -> Vec<DiskConfig> {
        let is_there = |name: &str| {
            self.disks.open.contains_key(name)
                || options.opened.contains_key(name)
                || options.devices.contains_key(name)
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
            let reason = format!("cannot start a thread to open it: {error}");
            self.waiting.failed(disk, reason, Instant::now());
        }
    }

    fn opened_for_later(&mut self, attempt: Attempt) {
        let (disk, _) = &attempt;
        // The disk may have been removed or reconfigured meanwhile.
        if !self.waiting.is_opening(disk) {
            return self.discard(attempt);
        }
        if let Some(starting) = &mut self.openings.at_start {
            self.waiting.opened(&disk.name);
            starting.insert(disk.name.clone(), attempt);
            return;
        }
        if self.openings.arrived.is_empty() {
            // One change serves all attempts with messages in the inbox.
            let message: Message = Box::new(Owner::bring_in_arrived);
            self.messages.send(message).ok();
        }
        self.openings.arrived.push(attempt);
    }

    fn bring_in_arrived(&mut self) {
        let arrived = std::mem::take(&mut self.openings.arrived);
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

    /// Adds open disks with their exports and logical units.
    fn bring_in(&mut self, due: &[DiskConfig], devices: Devices) {
        let opened = self.open_or_wait(due, devices);
        if opened.is_empty() {
            self.publish();
            return self.reply_when_done(Ok(ChangeResult::default()), Box::new(drop));
        }
        let came: Vec<String> = opened.keys().cloned().collect();
        let options = ChangeOptions {
            opened,
            ..ChangeOptions::default()
        };
        match self.become_(self.configs.wanted.clone(), options) {
            Ok(_) => {
                for disk in came {
                    tracing::info!(disk, "disk available");
                }
            }
            Err(refusal) => {
                // The exports of the disk cannot be opened. The disk and its exports wait.
                let reasons: Vec<String> = refusal.faults().iter().map(Fault::to_string).collect();
                let reason = reasons.join("; ");
                for config in due.iter().filter(|config| came.contains(&config.name)) {
                    tracing::error!(disk = config.name, "cannot serve the disk: {reason}");
                    self.waiting.refused(config, reason.clone(), Instant::now());
                }
                self.publish();
            }
        }
        self.reply_when_done(Ok(ChangeResult::default()), Box::new(drop));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::{Flags, Surroundings, Transport, parse};

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
    fn objects_of_a_waiting_disk_are_left_out() {
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
        let first = |transport| present.exports_over(transport).next().unwrap();
        assert_eq!(present.exports_over(Transport::VhostBlk).count(), 1);
        assert_eq!(first(Transport::VhostScsi).luns.len(), 1);
        // The LUNs of other units do not change.
        let luns = &first(Transport::Iscsi).luns;
        assert_eq!((luns.len(), luns[0].lun), (1, 1));
        waiting.opened("b");
        assert_eq!(waiting.without(&wanted), wanted);
    }

    #[test]
    fn retry_delay_doubles_to_30_s_for_each_disk() {
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
        // A disk that is being opened is not due.
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
