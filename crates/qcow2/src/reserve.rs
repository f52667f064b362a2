//! Reserve of clusters that are counted but unused. One run costs two writes and one sync. The clusters read as zeroes, on stable
//! storage. A killed process leaks at most one run.

use crate::{Error, Image, Result, Storage, io};

/// Sizes of the first run and of the longest run, in bytes.
const RUN_BYTES_MIN: u64 = 1 << 20;
const RUN_BYTES_MAX: u64 = 64 << 20;

/// Run of reserved clusters.
#[derive(Debug, Default)]
pub(crate) struct Reserve {
    next: u64,
    end: u64,
    /// Length of the last run in clusters; 0 before the first one.
    run: u64,
}

impl<S: Storage> Image<S> {
    /// Allocates a cluster that reads as zeroes and has a reference count of 1.
    pub(crate) fn take_cluster(&mut self) -> Result<u64> {
        if self.reserve.next == self.reserve.end {
            self.refill()?;
        }
        let cluster = self.reserve.next;
        self.reserve.next += 1;
        self.refcounts.in_use.add_mapped(cluster);
        Ok(cluster << self.header.cluster_bits)
    }

    fn refill(&mut self) -> Result<()> {
        let bits = self.header.cluster_bits;
        let longest = (RUN_BYTES_MAX >> bits).max(1);
        let run = match self.reserve.run {
            0 => (RUN_BYTES_MIN >> bits).max(1),
            run => (run * 2).min(longest),
        };
        // If there is no space for a run, there may be space for a single cluster.
        let (first, count) = match self.reserve_run(run) {
            Err(Error::Io { .. }) if run > 1 => {
                self.reserve.run = 0;
                self.reserve_run(1)?
            }
            reserved => {
                let reserved = reserved?;
                self.reserve.run = run;
                reserved
            }
        };
        (self.reserve.next, self.reserve.end) = (first, first + count);
        Ok(())
    }

    fn reserve_run(&mut self, run: u64) -> Result<(u64, u64)> {
        let bits = self.header.cluster_bits;
        let (first, count) = self.refcounts.take(&self.storage, run)?;
        let made = self
            .storage
            .zero(first << bits, count << bits)
            .and_then(|()| self.storage.sync());
        if made.is_err() {
            // Otherwise the clusters would leak.
            self.refcounts.set(&self.storage, first, count, 0).ok();
        }
        made.map_err(io("cannot grow the image file"))?;
        Ok((first, count))
    }

    /// Allocates contiguous clusters for a table, with undefined content.
    pub(crate) fn take_together(&mut self, count: u64) -> Result<u64> {
        if count >= self.refcounts.per_block() {
            return Err(Error::Unsupported(format!(
                "a table of {count} clusters is not supported; hint: use qemu-img resize"
            )));
        }
        let mut passed_over = Vec::new();
        let found = loop {
            let (first, found) = self.refcounts.take(&self.storage, count)?;
            if found == count {
                break first;
            }
            passed_over.push((first, found));
        };
        for (first, count) in passed_over {
            self.refcounts.set(&self.storage, first, count, 0)?;
        }
        Ok(found)
    }

    /// Frees the unused clusters of the reserve.
    pub(crate) fn return_reserve(&mut self) -> Result<()> {
        let (next, end) = (self.reserve.next, self.reserve.end);
        self.reserve = Reserve::default();
        if next < end {
            self.refcounts.set(&self.storage, next, end - next, 0)?;
        }
        Ok(())
    }
}
