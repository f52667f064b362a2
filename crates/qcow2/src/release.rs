//! Clusters that no table refers to any more. They become free when that is durable and all users have finished.

use crate::entry::L2Entry;
use crate::{Image, Result, Storage, io};

/// Flag of a cluster of the data file, identified by its index in the disk.
const IN_DATA_FILE: u64 = 1 << 63;

/// Released clusters, one element per lost use.
#[derive(Debug, Default)]
pub(crate) struct Released(Vec<u64>);

impl Released {
    pub fn add(&mut self, cluster: u64) {
        self.0.push(cluster);
    }
}

impl<S: Storage> Image<S> {
    /// Returns true if there are released clusters that [`Image::take_released`] has not returned yet.
    pub fn has_released(&self) -> bool {
        !self.released.0.is_empty()
    }

    /// Returns the released clusters. The caller passes them to [`Image::free`] when all readers that may have found them in the map have
    /// finished.
    pub fn take_released(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.released.0)
    }

    /// Frees the released clusters. No reader of the map may still use them.
    ///
    /// # Errors
    /// The storage failed: some clusters are then leaked.
    pub fn release(&mut self) -> Result<()> {
        let released = self.take_released();
        self.free(released)
    }

    /// Frees clusters returned by [`Image::take_released`].
    ///
    /// # Errors
    /// As [`Image::release`].
    pub fn free(&mut self, released: Vec<u64>) -> Result<()> {
        // Clusters of a corrupt image stay counted, because the entry that referred to them may be wrong.
        if released.is_empty() || !self.access.permits_writes() {
            return Ok(());
        }
        let freed = self.free_all(released);
        self.after_change(freed)
    }

    fn free_all(&mut self, mut released: Vec<u64>) -> Result<()> {
        // The removal of all references must be durable before the clusters are reused.
        self.storage.sync().map_err(io("cannot sync"))?;
        released.sort_unstable();
        let bits = self.header.cluster_bits;
        // The flag sorts clusters of the data file to the end.
        let in_data_file = released.partition_point(|cluster| cluster & IN_DATA_FILE == 0);
        let in_data_file = released.split_off(in_data_file);
        let numbers = in_data_file.iter().map(|cluster| cluster & !IN_DATA_FILE);
        self.free_in_data_file(numbers.map(|number| number << bits));
        let mut free: Vec<(u64, u64)> = Vec::new();
        for cluster in released {
            if !self.refcounts.lower(&self.storage, cluster)? {
                continue;
            }
            match free.last_mut() {
                Some((first, count)) if *first + *count == cluster => *count += 1,
                _ => free.push((cluster, 1)),
            }
        }
        for (first, count) in free {
            // Returns the space to the file system. Errors are ignored: clusters are zeroed again before reuse.
            self.storage.zero(first << bits, count << bits).ok();
        }
        Ok(())
    }

    pub(crate) fn release_entry(&mut self, offset: u64, entry: L2Entry) {
        let bits = self.header.cluster_bits;
        if let Some(data_file) = &mut self.data_file {
            if !matches!(
                entry,
                L2Entry::Unallocated | L2Entry::Zero { kept: None, .. }
            ) {
                data_file.give_up(offset);
                self.released.add(IN_DATA_FILE | offset >> bits);
            }
            return;
        }
        match entry {
            L2Entry::Data { host, .. }
            | L2Entry::Zero {
                kept: Some(host), ..
            } => self.released.add(host >> bits),
            L2Entry::Compressed { host, bytes } => {
                let last = (host + bytes - 1) >> bits;
                for cluster in host >> bits..=last {
                    self.released.add(cluster);
                }
            }
            L2Entry::Unallocated | L2Entry::Zero { kept: None, .. } | L2Entry::Bad => {}
        }
    }
}
