//! Results of third-party copies, kept for RECEIVE COPY RESULTS until they are read or displaced.

use crate::nexus::NexusId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyStatus {
    Running,
    Done,
    Failed,
}

/// Result of one copy of one nexus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyResult {
    pub nexus: NexusId,
    pub list: u32,
    pub status: CopyStatus,
    pub segments: u16,
    pub bytes: u64,
    /// Sense data of a failed copy.
    pub sense: Vec<u8>,
}

/// The latest copies of a unit.
#[derive(Clone, Debug, Default)]
pub(crate) struct CopyResults(Vec<CopyResult>);

const KEPT: usize = 64;

impl CopyResults {
    /// Adds a copy, or updates its result.
    pub fn put(&mut self, result: CopyResult) {
        self.0
            .retain(|known| (known.nexus, known.list) != (result.nexus, result.list));
        if self.0.len() >= KEPT {
            self.0.remove(0);
        }
        self.0.push(result);
    }

    pub fn get(&self, nexus: NexusId, list: u32) -> Option<&CopyResult> {
        self.0
            .iter()
            .find(|known| known.nexus == nexus && known.list == list)
    }

    pub fn running(&self, nexus: NexusId, list: u32) -> bool {
        self.get(nexus, list)
            .is_some_and(|known| known.status == CopyStatus::Running)
    }

    pub fn forget(&mut self, nexus: NexusId) {
        self.0.retain(|known| known.nexus != nexus);
    }
}
