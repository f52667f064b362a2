//! Configurations of the owner: the wanted one, and those that it follows from.

use std::collections::HashSet;
use std::path::PathBuf;

use super::changes::Change;
use super::draining::Work;
use super::overlay::Overlay;
use super::refusal::Refusal;
use super::waiting::WaitingDisks;
use crate::state;
use config::{BlockDeviceConfig, Config, DiskConfig};

/// Configurations of the owner.
pub(crate) struct Configs {
    /// Wanted configuration: the file and flags with the changes made at run time.
    pub(super) wanted: Config,
    /// Part of `wanted` without objects that need a waiting disk.
    pub(super) present: Config,
    /// Configuration of the file and flags.
    pub(super) base: Config,
    /// File disks with a configured size. They may be parts of their block devices and do not follow their sizes.
    sized_files: HashSet<String>,
}

impl Configs {
    /// Returns the configurations before the start, without objects.
    pub fn new(base: Config) -> Configs {
        let wanted = base.without_objects();
        Configs {
            present: wanted.clone(),
            wanted,
            base,
            sized_files: HashSet::new(),
        }
    }

    /// Sets the wanted configuration and derives the present one.
    pub fn set(&mut self, wanted: Config, waiting: &WaitingDisks) {
        self.present = waiting.without(&wanted);
        self.sized_files = sized_files(&wanted);
        self.wanted = wanted;
    }

    /// Returns the changes made at run time.
    pub fn overlay(&self) -> Overlay {
        Overlay::between(&self.base, &self.wanted)
    }

    /// Returns the wanted configuration.
    pub fn wanted(&self) -> &Config {
        &self.wanted
    }

    /// Returns the configuration that work leads to.
    pub fn next_of(&self, work: &Work, force: bool) -> Result<Config, Refusal> {
        match work {
            Work::Change(change) => Change::clone(change).next(&self.wanted, force),
            Work::Reload(base) => Ok(self.overlay().over(base)),
        }
    }

    /// Returns true for a file disk with a configured size.
    pub fn has_sized_file(&self, disk: &str) -> bool {
        self.sized_files.contains(disk)
    }

    /// Returns the place of a disk's storage for [`crate::helper_threads::HelperThreads`].
    pub fn blocking_storage(&self, disk: &str) -> String {
        let place = self.wanted.disk(disk);
        let place = place.and_then(|disk| disk.backend.blocking_storage());
        place.unwrap_or_else(|| disk.to_owned())
    }

    /// Returns true if a change of the disk's size may block.
    pub fn may_block(&self, disk: &str) -> bool {
        let config = self.wanted.disk(disk);
        config.is_some_and(|disk| disk.backend.blocking_storage().is_some())
    }

    /// Returns true if a SCSI export has the disk as a logical unit.
    pub fn is_shown_by_scsi(&self, disk: &str) -> bool {
        let mut luns = self
            .wanted
            .exports()
            .filter_map(|export| export.luns())
            .flatten();
        luns.any(|lun| lun.disk == disk)
    }

    /// Returns the state folder; `None` if the daemon saves no state.
    pub fn state_folder(&self) -> Option<PathBuf> {
        self.base.state.clone().or_else(state::default_folder)
    }
}

fn sized_files(config: &Config) -> HashSet<String> {
    let is_sized =
        |disk: &&DiskConfig| matches!(disk.backend, BlockDeviceConfig::File { size: Some(_), .. });
    let sized = config.disks.iter().filter(is_sized);
    sized.map(|disk| disk.name.clone()).collect()
}
