//! Reference counts of clusters: a table of blocks that are read on demand and written through.

use std::collections::{HashMap, HashSet};

use crate::clusters::{ClusterSet, Uses};
use crate::header::{REFCOUNT_TABLE_BYTES_MAX, REFCOUNT_TABLE_FIELD};
use crate::overlap::InUse;
use crate::{Header, Result, Storage, corrupt, io};

/// Limit of the memory for cached blocks, in bytes.
const BLOCKS_BYTES: usize = 4 << 20;

/// Limit for the file size, with a margin for a table.
const CLUSTERS_END: u64 = 1 << 62;

pub(crate) struct Refcounts {
    cluster_bits: u32,
    order: u32,
    /// Offsets of blocks; 0 for a missing block.
    pub table: Vec<u64>,
    table_offset: u64,
    /// Invalid block offsets. They are 0 in `table`.
    pub bad_blocks: Vec<u64>,
    /// A header write failed, so the header may refer to another table.
    is_table_unsure: bool,
    blocks: HashMap<usize, Vec<u8>>,
    /// Clusters that are never allocated, even with a count of 0.
    pub in_use: InUse,
    /// All clusters below this one are in use.
    hint: u64,
}

impl Refcounts {
    pub fn read(storage: &impl Storage, header: &Header) -> Result<Refcounts> {
        let cluster = header.cluster_bytes();
        let bytes = u64::from(header.refcount_table_clusters) * cluster;
        let mut table = vec![0; bytes as usize];
        storage
            .read_at(header.refcount_table_offset, &mut table)
            .map_err(io("cannot read the refcount table"))?;
        let mut table: Vec<u64> = entries(&table).collect();
        let size = storage
            .size()
            .map_err(io("cannot read the size of the file"))?;
        let (mut seen, mut bad_blocks) = (HashSet::new(), Vec::new());
        for offset in table.iter_mut().filter(|offset| **offset != 0) {
            if !offset.is_multiple_of(cluster) || *offset >= size || !seen.insert(*offset) {
                bad_blocks.push(std::mem::take(offset));
            }
        }
        Ok(Refcounts {
            table,
            bad_blocks,
            ..Refcounts::unread(header)
        })
    }

    /// Returns the counts of an image with tables that are not read.
    pub fn unread(header: &Header) -> Refcounts {
        Refcounts {
            cluster_bits: header.cluster_bits,
            order: header.refcount_order,
            table: Vec::new(),
            table_offset: header.refcount_table_offset,
            bad_blocks: Vec::new(),
            is_table_unsure: false,
            blocks: HashMap::new(),
            in_use: InUse::default(),
            hint: 0,
        }
    }

    /// Returns an error if the table has invalid block offsets.
    pub fn check_table(&self) -> Result<()> {
        match self.bad_blocks.first() {
            None => Ok(()),
            Some(offset) => corrupt(format!(
                "the refcount table has an invalid refcount block offset {offset:#x}; hint: lunette image check --repair all"
            )),
        }
    }

    /// Returns the clusters of the table and of all blocks.
    pub fn clusters(&self) -> Vec<u64> {
        let first = self.table_offset >> self.cluster_bits;
        let table = first..first + ((self.table.len() as u64 * 8) >> self.cluster_bits);
        let blocks = self.table.iter().filter(|block| **block != 0);
        let blocks = blocks.map(|block| block >> self.cluster_bits);
        table.chain(blocks).collect()
    }

    /// Returns the indexes of the existing blocks.
    pub fn block_numbers(&self) -> impl Iterator<Item = u64> + '_ {
        let blocks = (0..).zip(&self.table);
        blocks.filter_map(|(number, block)| (*block != 0).then_some(number))
    }

    fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns the number of reference counts per block.
    pub fn per_block(&self) -> u64 {
        (self.cluster_bytes() * 8) >> self.order
    }

    /// Returns the largest representable count.
    pub fn max(&self) -> u64 {
        u64::MAX >> (64 - (1_u32 << self.order))
    }

    /// Rewrites the header field after a failed write, because its state is then undefined. Must run before the table changes.
    fn make_table_sure(&mut self, storage: &impl Storage) -> Result<()> {
        if self.is_table_unsure {
            let clusters = (self.table.len() as u64 * 8) >> self.cluster_bits;
            let mut field = self.table_offset.to_be_bytes().to_vec();
            field.extend((clusters as u32).to_be_bytes());
            let named = storage.write_at(REFCOUNT_TABLE_FIELD, &field);
            let named = named.and_then(|()| storage.sync());
            named.map_err(io("cannot write the header"))?;
            self.is_table_unsure = false;
        }
        Ok(())
    }

    fn block(&mut self, storage: &impl Storage, index: usize) -> Result<Option<&mut Vec<u8>>> {
        let offset = self.table.get(index).copied().unwrap_or(0);
        if offset == 0 {
            return Ok(None);
        }
        if !self.blocks.contains_key(&index) {
            let blocks_max = (BLOCKS_BYTES >> self.cluster_bits).max(2);
            if self.blocks.len() >= blocks_max {
                self.blocks.clear();
            }
            let mut block = vec![0; 1 << self.cluster_bits];
            storage
                .read_at(offset, &mut block)
                .map_err(io("cannot read reference counts"))?;
            self.blocks.insert(index, block);
        }
        Ok(self.blocks.get_mut(&index))
    }

    fn split(&self, cluster: u64) -> (usize, u64) {
        let per_block = self.per_block();
        ((cluster / per_block) as usize, cluster % per_block)
    }

    /// Returns the reference count of a cluster.
    pub fn get(&mut self, storage: &impl Storage, cluster: u64) -> Result<u64> {
        let (index, at) = self.split(cluster);
        let order = self.order;
        let block = self.block(storage, index)?;
        Ok(block.map_or(0, |block| get(block, order, at)))
    }

    /// Returns a copy of the counts of a block.
    pub fn counts(&mut self, storage: &impl Storage, block: u64) -> Result<Counts> {
        let order = self.order;
        let block = self.block(storage, block as usize)?.cloned();
        Ok(Counts { block, order })
    }

    /// Sets the count of contiguous clusters within one existing block. Returns the number of clusters set.
    fn set_in_block(
        &mut self,
        storage: &impl Storage,
        first: u64,
        count: u64,
        to: u64,
    ) -> Result<u64> {
        let (index, at) = self.split(first);
        let (order, count) = (self.order, count.min(self.per_block() - at));
        let offset = self.table.get(index).copied().unwrap_or(0);
        let Some(block) = self.block(storage, index)? else {
            return corrupt(format!(
                "cluster {first} is in use without a refcount block"
            ));
        };
        let mut changed = block.clone();
        for at in at..at + count {
            set(&mut changed, order, at, to);
        }
        let bits = 1 << order;
        let (from, to) = (at * bits / 8, ((at + count) * bits).div_ceil(8));
        let bytes = &changed[from as usize..to as usize];
        let written = storage.write_at(offset + from, bytes);
        match written {
            Ok(()) => *block = changed,
            // The content on storage is undefined and must be read again.
            Err(_) => {
                self.blocks.remove(&index);
            }
        }
        written.map_err(io("cannot write reference counts"))?;
        Ok(count)
    }

    /// Sets the count of contiguous clusters.
    pub fn set(&mut self, storage: &impl Storage, first: u64, count: u64, to: u64) -> Result<()> {
        let mut done = 0;
        while done < count {
            done += self.set_in_block(storage, first + done, count - done, to)?;
        }
        if to == 0 {
            self.hint = self.hint.min(first);
            self.in_use.remove(first..first + count);
        }
        Ok(())
    }

    /// Decrements the count of a cluster. Returns true if it is now free.
    pub fn lower(&mut self, storage: &impl Storage, cluster: u64) -> Result<bool> {
        match self.get(storage, cluster)? {
            0 => corrupt(format!(
                "cluster {cluster} is in use with a reference count of 0"
            )),
            count => {
                self.set(storage, cluster, 1, count - 1)?;
                Ok(count == 1)
            }
        }
    }

    /// Allocates up to `count` contiguous free clusters with a count of 1, and creates missing blocks. Returns the first cluster and the
    /// number of clusters. The counts are durable only after the next sync.
    pub fn take(&mut self, storage: &impl Storage, count: u64) -> Result<(u64, u64)> {
        loop {
            let first = self.find_free(storage)?;
            if first >= CLUSTERS_END >> self.cluster_bits {
                return corrupt("no free cluster is left within the maximum image size");
            }
            let (index, at) = self.split(first);
            if index >= self.table.len() {
                self.grow_table(storage)?;
                continue;
            }
            if self.table[index] == 0 {
                self.add_block(storage, index, first)?;
                continue;
            }
            let (order, end) = (self.order, (at + count).min(self.per_block()));
            let block = self.block(storage, index)?.map_or(&[][..], |block| block);
            let is_free = |at: &u64| get(block, order, *at) == 0;
            let found = (at..end).take_while(is_free).count() as u64;
            self.in_use.check_free(first..first + found)?;
            self.set_in_block(storage, first, found, 1)?;
            self.hint = first + found;
            return Ok((first, found));
        }
    }

    /// Writes a new table and new blocks for `uses` into free clusters, and adds the uses of the new table and blocks. The clusters of
    /// the old ones are free afterwards; `uses` does not contain them.
    pub fn rebuild(&mut self, storage: &impl Storage, uses: &mut Uses) -> Result<()> {
        let (cluster, per_block) = (self.cluster_bytes(), self.per_block());
        let mut old = ClusterSet::default();
        old.insert_all(0..1);
        for cluster in self.clusters() {
            old.insert(cluster);
        }
        let (mut table_clusters, mut blocks) = (1, 0);
        let (first, numbers) = loop {
            let count = table_clusters + blocks;
            let is_free = |cluster: u64| uses.get(cluster) == 0 && !old.contains(cluster);
            let mut first = 0;
            while let Some(used) = (first..first + count).rev().find(|at| !is_free(*at)) {
                first = used + 1;
            }
            let mut numbers = uses.groups(per_block);
            numbers.extend(first / per_block..=(first + count - 1) / per_block);
            numbers.sort_unstable();
            numbers.dedup();
            let last = numbers.last().copied().unwrap_or(0);
            let needed = ((last + 1) * 8).div_ceil(cluster);
            if needed <= table_clusters && numbers.len() as u64 <= blocks {
                break (first, numbers);
            }
            table_clusters = table_clusters.max(needed);
            blocks = blocks.max(numbers.len() as u64);
            if table_clusters * cluster > REFCOUNT_TABLE_BYTES_MAX {
                return corrupt(
                    "no room for a new refcount table: used clusters are too far apart",
                );
            }
        };
        let end = first + table_clusters + numbers.len() as u64;
        (first..end).for_each(|cluster| uses.add(cluster, 1));
        let mut table = vec![0; (table_clusters * cluster / 8) as usize];
        let mut offset = (first + table_clusters) << self.cluster_bits;
        for number in numbers {
            let mut block = vec![0; cluster as usize];
            for at in 0..per_block {
                let count = uses.get(number * per_block + at).min(self.max());
                set(&mut block, self.order, at, count);
            }
            let written = storage.write_at(offset, &block);
            written.map_err(io("cannot write a refcount block"))?;
            table[number as usize] = offset;
            offset += cluster;
        }
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let table_offset = first << self.cluster_bits;
        let mut field = table_offset.to_be_bytes().to_vec();
        field.extend((table_clusters as u32).to_be_bytes());
        storage
            .write_at(table_offset, &bytes)
            .and_then(|()| storage.sync())
            .and_then(|()| storage.write_at(REFCOUNT_TABLE_FIELD, &field))
            .and_then(|()| storage.sync())
            .map_err(io("cannot write a new refcount table"))?;
        (self.table, self.table_offset) = (table, table_offset);
        self.bad_blocks.clear();
        self.blocks.clear();
        self.hint = 0;
        Ok(())
    }

    fn find_free(&mut self, storage: &impl Storage) -> Result<u64> {
        let per_block = self.per_block();
        let mut cluster = self.hint;
        loop {
            let (index, at) = self.split(cluster);
            let order = self.order;
            let Some(block) = self.block(storage, index)? else {
                break;
            };
            let free = (at..per_block).find(|at| get(block, order, *at) == 0);
            if let Some(at) = free {
                cluster = index as u64 * per_block + at;
                break;
            }
            cluster = (index as u64 + 1) * per_block;
        }
        self.hint = cluster;
        Ok(cluster)
    }

    /// Creates the missing block for the clusters from `first` on, in cluster `first` itself.
    fn add_block(&mut self, storage: &impl Storage, index: usize, first: u64) -> Result<()> {
        self.make_table_sure(storage)?;
        self.in_use.check_free(first..first + 1)?;
        let mut block = vec![0; 1 << self.cluster_bits];
        let (_, at) = self.split(first);
        set(&mut block, self.order, at, 1);
        let offset = first << self.cluster_bits;
        storage
            .write_at(offset, &block)
            .and_then(|()| storage.sync())
            .map_err(io("cannot write a refcount block"))?;
        let entry = self.table_offset + index as u64 * 8;
        storage
            .write_at(entry, &offset.to_be_bytes())
            .map_err(io("cannot write the refcount table"))?;
        self.table[index] = offset;
        self.in_use.add_structures(first..first + 1);
        self.hint = first + 1;
        Ok(())
    }

    /// Creates a table with 50 % more entries, in clusters that the old one does not cover. The clusters of the old table stay counted
    /// until the new table and its name in the header are on stable storage.
    fn grow_table(&mut self, storage: &impl Storage) -> Result<()> {
        self.make_table_sure(storage)?;
        let cluster = self.cluster_bytes();
        let per_block = self.per_block();
        let old_entries = self.table.len() as u64;
        let start = old_entries * per_block;
        let table_bytes = ((old_entries + old_entries.div_ceil(2)) * 8).next_multiple_of(cluster);
        let table_clusters = table_bytes / cluster;
        // Number of blocks that cover the new table and the blocks themselves.
        let mut blocks = 1;
        while blocks * per_block < table_clusters + blocks {
            blocks += 1;
        }
        let used = table_clusters + blocks;
        self.in_use.check_free(start..start + used)?;
        let mut table = self.table.clone();
        table.resize((table_bytes / 8) as usize, 0);
        for number in 0..blocks {
            let mut block = vec![0; cluster as usize];
            for at in 0..used.saturating_sub(number * per_block).min(per_block) {
                set(&mut block, self.order, at, 1);
            }
            let offset = (start + table_clusters + number) << self.cluster_bits;
            storage
                .write_at(offset, &block)
                .map_err(io("cannot write a refcount block"))?;
            table[(old_entries + number) as usize] = offset;
        }
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let offset = start << self.cluster_bits;
        let mut field = offset.to_be_bytes().to_vec();
        field.extend((table_clusters as u32).to_be_bytes());
        storage
            .write_at(offset, &bytes)
            .and_then(|()| storage.sync())
            .map_err(io("cannot write a larger refcount table"))?;
        let old = (
            self.table_offset >> self.cluster_bits,
            old_entries * 8 / cluster,
        );
        let named = storage.write_at(REFCOUNT_TABLE_FIELD, &field);
        if let Err(error) = named.and_then(|()| storage.sync()) {
            self.is_table_unsure = true;
            // If this fails too, it is retried before the next change.
            self.make_table_sure(storage).ok();
            return Err(io("cannot write the header")(error));
        }
        (self.table, self.table_offset) = (table, offset);
        self.in_use.add_structures(start..start + used);
        self.set(storage, old.0, old.1, 0)
    }
}

/// Decodes the big-endian entries of a table.
pub(crate) fn entries(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let (entries, _) = bytes.as_chunks::<8>();
    entries.iter().map(|entry| u64::from_be_bytes(*entry))
}

/// Reference counts of one block.
pub struct Counts {
    /// `None` if the block does not exist; all counts are then 0.
    block: Option<Vec<u8>>,
    order: u32,
}

impl Counts {
    /// Returns whether the block exists.
    pub fn has_block(&self) -> bool {
        self.block.is_some()
    }

    /// Returns the count of the cluster with this index in the block.
    pub fn get(&self, at: u64) -> u64 {
        let block = self.block.as_deref();
        block.map_or(0, |block| get(block, self.order, at))
    }
}

/// Reads one count of a block. Counts of less than a byte start at the least significant bit.
pub(crate) fn get(block: &[u8], order: u32, at: u64) -> u64 {
    if order < 3 {
        let (bits, bit) = (1_u32 << order, at << order);
        let byte = block.get((bit / 8) as usize).copied().unwrap_or(0);
        return u64::from(byte >> (bit % 8)) & ((1 << bits) - 1);
    }
    let bytes = 1_usize << (order - 3);
    let from = at as usize * bytes;
    let field = block.get(from..from + bytes).unwrap_or(&[]);
    field
        .iter()
        .fold(0, |count, byte| count << 8 | u64::from(*byte))
}

pub(crate) fn set(block: &mut [u8], order: u32, at: u64, to: u64) {
    if order < 3 {
        let (bits, bit) = (1_u32 << order, at << order);
        let mask = ((1_u32 << bits) - 1) as u8;
        let byte = &mut block[(bit / 8) as usize];
        *byte = *byte & !(mask << (bit % 8)) | (to as u8 & mask) << (bit % 8);
        return;
    }
    let bytes = 1_usize << (order - 3);
    let from = at as usize * bytes;
    block[from..from + bytes].copy_from_slice(&to.to_be_bytes()[8 - bytes..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_all_widths_do_not_overlap() {
        for order in 0..=6 {
            let mut block = vec![0; 512];
            let max = u64::MAX >> (64 - (1_u32 << order));
            for at in 0..20 {
                set(&mut block, order, at, at % 3 * (max / 2));
            }
            for at in 0..20 {
                assert_eq!(get(&block, order, at), at % 3 * (max / 2), "{order} {at}");
            }
        }
        let mut block = vec![0; 512];
        set(&mut block, 4, 1, 0x0102);
        set(&mut block, 1, 0, 3);
        assert_eq!(block[..4], [3, 0, 1, 2]);
    }
}
