//! Resources of a daemon, which migrations must not use up.

use super::LIMIT;
use end_to_end::{Context, Result, Rig, ensure};

/// Growth of the heap that is no leak: caches of the allocator, which depend on the order of requests.
const HEAP_KIB: u64 = 4 << 10;

/// Resources of a daemon.
#[derive(Clone, Copy, Debug)]
pub struct Resources {
    pub descriptors: usize,
    /// Anonymous resident memory.
    pub heap_kib: u64,
    /// Mapped memory of guests, with logs and records of requests in flight.
    pub mapped: u64,
}

impl Resources {
    /// Reads the resources of a daemon.
    pub fn of(rig: &mut Rig) -> Result<Resources> {
        let process = rig.daemon.process().id();
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{process}/{name}"));
        let status = read("status")?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let heap = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        let maps = read("maps")?;
        let mapped = maps.lines().filter(|line| line.contains("/memfd:"));
        let mapped = mapped.filter_map(|line| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16));
            end.ok()?.checked_sub(start.ok()?)
        });
        Ok(Resources {
            descriptors: std::fs::read_dir(format!("/proc/{process}/fd"))?.count(),
            heap_kib: heap.context("no RssAnon")?,
            mapped: mapped.sum(),
        })
    }

    /// Fails if a daemon has more resources than at this time. Sessions of earlier front ends may still end. Returns the resources.
    pub fn ensure_no_growth(self, rig: &mut Rig) -> Result<Resources> {
        let mut now = Resources::of(rig)?;
        vm::wait_until(LIMIT, || {
            now = Resources::of(rig).ok()?;
            let has_ended = now.descriptors <= self.descriptors && now.mapped <= self.mapped;
            has_ended.then_some(())
        })
        .with_context(|| format!("descriptors or mappings: {self:?}, {now:?}"))?;
        let limit = self.heap_kib + HEAP_KIB;
        ensure!(now.heap_kib <= limit, "heap: {self:?}, {now:?}");
        Ok(now)
    }
}
