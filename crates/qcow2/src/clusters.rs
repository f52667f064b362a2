//! Sets and counts of clusters. Memory depends on the clusters in them, not on the file size: at most 72 bytes per cluster of a set and
//! 170 per counted cluster; 0.2 and 1.5 bytes for adjacent clusters.

use std::collections::HashMap;
use std::ops::Range;

/// log2 of the number of clusters in one chunk of a set.
const SET_CHUNK_BITS: u32 = 9;
/// Number of clusters in one chunk of counts.
const COUNT_CHUNK: u64 = 128;

/// Set of cluster indexes.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClusterSet {
    /// Bitmaps of 512 adjacent clusters.
    chunks: HashMap<u64, [u64; 8]>,
}

impl ClusterSet {
    fn place(cluster: u64) -> (u64, usize, u64) {
        let bit = cluster & ((1 << SET_CHUNK_BITS) - 1);
        let word = (bit / 64) as usize;
        (cluster >> SET_CHUNK_BITS, word, 1 << (bit % 64))
    }

    /// Adds a cluster. Returns false if the set already contains it.
    pub fn insert(&mut self, cluster: u64) -> bool {
        let (chunk, word, bit) = ClusterSet::place(cluster);
        let word = &mut self.chunks.entry(chunk).or_default()[word];
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    pub fn insert_all(&mut self, clusters: Range<u64>) {
        for cluster in clusters {
            self.insert(cluster);
        }
    }

    pub fn remove(&mut self, cluster: u64) {
        let (chunk, word, bit) = ClusterSet::place(cluster);
        if let Some(words) = self.chunks.get_mut(&chunk) {
            words[word] &= !bit;
            if *words == [0; 8] {
                self.chunks.remove(&chunk);
            }
        }
    }

    pub fn contains(&self, cluster: u64) -> bool {
        let (chunk, word, bit) = ClusterSet::place(cluster);
        let words = self.chunks.get(&chunk);
        words.is_some_and(|words| words[word] & bit != 0)
    }
}

type Chunk = Box<[u8; COUNT_CHUNK as usize]>;

/// Use count of each cluster.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    /// Counts of 128 adjacent clusters. 255 means that the count is in `large`.
    chunks: HashMap<u64, Chunk>,
    large: HashMap<u64, u64>,
}

impl Uses {
    /// Adds `times` uses to a cluster.
    pub fn add(&mut self, cluster: u64, times: u64) {
        if times == 0 {
            return;
        }
        let count = self.count_mut(cluster);
        match u64::from(*count).saturating_add(times) {
            // The sum is below the mark for large counts, and so was the count.
            sum if sum < u8::MAX.into() => *count = sum as u8,
            _ => self.set(cluster, self.get(cluster).saturating_add(times)),
        }
    }

    fn count_mut(&mut self, cluster: u64) -> &mut u8 {
        let chunk = self.chunks.entry(cluster / COUNT_CHUNK);
        let chunk = chunk.or_insert_with(|| Box::new([0; COUNT_CHUNK as usize]));
        &mut chunk[(cluster % COUNT_CHUNK) as usize]
    }

    /// Subtracts one use from a cluster.
    pub fn lower(&mut self, cluster: u64) {
        self.set(cluster, self.get(cluster).saturating_sub(1));
    }

    fn set(&mut self, cluster: u64, uses: u64) {
        let count = self.count_mut(cluster);
        *count = u8::try_from(uses).unwrap_or(u8::MAX);
        if *count == u8::MAX {
            self.large.insert(cluster, uses);
        }
    }

    pub fn get(&self, cluster: u64) -> u64 {
        self.count_in(self.chunks.get(&(cluster / COUNT_CHUNK)), cluster)
    }

    fn count_in(&self, chunk: Option<&Chunk>, cluster: u64) -> u64 {
        match chunk.map_or(0, |chunk| chunk[(cluster % COUNT_CHUNK) as usize]) {
            u8::MAX => self.large.get(&cluster).copied().unwrap_or(0),
            count => count.into(),
        }
    }

    /// Returns the counts of a range of clusters.
    pub fn range(&self, clusters: Range<u64>) -> Vec<u64> {
        let mut counts = Vec::new();
        let mut at = clusters.start;
        while at < clusters.end {
            let chunk = self.chunks.get(&(at / COUNT_CHUNK));
            let end = (at / COUNT_CHUNK + 1) * COUNT_CHUNK;
            let here = at..end.min(clusters.end);
            at = here.end;
            counts.extend(here.map(|cluster| self.count_in(chunk, cluster)));
        }
        counts
    }

    /// Returns the sorted indexes of the groups of `clusters` adjacent clusters that may have uses.
    pub fn groups(&self, clusters: u64) -> Vec<u64> {
        let mut groups: Vec<u64> = self
            .chunks
            .keys()
            .map(|chunk| chunk * COUNT_CHUNK)
            .flat_map(|first| first / clusters..=(first + COUNT_CHUNK - 1) / clusters)
            .collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// Returns the index after the last cluster in use.
    pub fn end(&self) -> u64 {
        let ends = self.chunks.iter().filter_map(|(number, chunk)| {
            let last = chunk.iter().rposition(|uses| *uses > 0)?;
            Some(number * COUNT_CHUNK + last as u64 + 1)
        });
        ends.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_has_inserted_and_not_removed_clusters() {
        let mut set = ClusterSet::default();
        for cluster in [0, 63, 64, 511, 512, 1 << 53] {
            assert!(set.insert(cluster) && !set.insert(cluster));
            assert!(set.contains(cluster));
        }
        set.insert_all(1000..1003);
        set.remove(1001);
        let found: Vec<u64> = (0..2000).filter(|cluster| set.contains(*cluster)).collect();
        assert_eq!(found, [0, 63, 64, 511, 512, 1000, 1002]);
        for cluster in found {
            set.remove(cluster);
        }
        set.remove(1 << 53);
        assert!(set.chunks.is_empty());
    }

    #[test]
    fn uses_of_all_sizes_are_counted() {
        let mut uses = Uses::default();
        for (cluster, times) in [(5, 1), (127, 254), (128, 255), (129, 1 << 40), (1 << 53, 3)] {
            uses.add(cluster, times);
            uses.add(cluster, 1);
            assert_eq!(uses.get(cluster), times + 1);
        }
        assert_eq!(uses.range(126..130), [0, 255, 256, (1 << 40) + 1]);
        assert_eq!(uses.range(4..6), [0, 2]);
        uses.add(6, 0);
        uses.add(1 << 54, 1);
        uses.lower(1 << 54);
        assert_eq!(
            (uses.get(6), uses.get(7), uses.end()),
            (0, 0, (1 << 53) + 1)
        );
        assert_eq!(uses.groups(128), [0, 1, 1 << 46, 1 << 47]);
        assert_eq!(
            uses.groups(64),
            [0, 1, 2, 3, 1 << 47, (1 << 47) + 1, 1 << 48, (1 << 48) + 1]
        );
    }
}
