//! Creates, applies and deletes snapshots in an image that is not in use.
//!
//! Each change writes new tables beside the old ones, switches to them with one header write, and then recounts all clusters. The dirty
//! bit is set from before that write until the counts are right, so that the next opener after a crash recounts them.

use crate::check::Repair;
use crate::entry::COPIED;
use crate::header::{DIRTY, L1_BYTES_MAX, SIZE_FIELD, SNAPSHOTS_FIELD, SNAPSHOTS_MAX};
use crate::image::read_table;
use crate::snapshots::{self, ENTRY_BYTES, L1_ENTRIES_MAX, Snapshot};
use crate::{Error, Header, Image, Result, Storage, corrupt, io};

/// Maximum length of a name, as in QEMU.
const NAME_MAX: usize = 255;
/// Narrower counts cannot hold the references of shared clusters.
const REFCOUNT_ORDER_MIN: u32 = 4;
/// Length of the extra data: size of the machine state and size of the disk.
const EXTRA_BYTES: u32 = 16;

impl<S: Storage> Image<S> {
    /// Creates a snapshot of the current disk and returns its ID. `seconds`: since 1970.
    ///
    /// # Errors
    /// The storage failed, the image has faults or reached the snapshot limit, or the name is taken. Either nothing has changed, or the
    /// next open for writing repairs the counts.
    pub fn create_snapshot(mut self, name: &str, seconds: u32) -> Result<String> {
        if name.is_empty() || name.len() > NAME_MAX {
            let length = name.len();
            return refused(format!(
                "the snapshot's name has {length} bytes, allowed are 1 to {NAME_MAX}"
            ));
        }
        if self.header.has_data_file() {
            return refused("an image with an external data file cannot have internal snapshots; hint: create an overlay with lunette image create --backing".to_owned());
        }
        if self.snapshots.iter().any(|known| known.name == name) {
            return refused(format!(
                "the image already has a snapshot named {name}; hint: use another name, or remove that snapshot with lunette image snapshot --delete"
            ));
        }
        let l1_entries = self.snapshots.iter().map(|known| known.l1_entries);
        let l1_entries = l1_entries.chain([self.header.l1_entries]).map(u64::from);
        if self.snapshots.len() >= SNAPSHOTS_MAX as usize
            || l1_entries.sum::<u64>() > L1_ENTRIES_MAX
        {
            return refused(format!(
                "the image already has {} snapshots, the maximum; hint: remove one with lunette image snapshot --delete",
                self.snapshots.len()
            ));
        }
        self.begin_change()?;
        let numbers = self.snapshots.iter();
        let numbers = numbers.filter_map(|known| known.id.parse::<u64>().ok());
        let id = (numbers.max().unwrap_or(0) + 1).to_string();
        let l1 = (self.header.l1_offset, self.header.l1_entries);
        let l1_offset = self.copy_l1(l1, l1.1)?;
        let mut entries = snapshots::raw_entries(&self.storage, &self.header)?;
        let size = self.header.size;
        entries.push(entry((l1_offset, l1.1), (&id, name), seconds, size));
        self.set_snapshots(&entries)?;
        self.end_change()?;
        Ok(id)
    }

    /// Restores the disk to a snapshot, found by name or ID. The current content is lost.
    ///
    /// # Errors
    /// As [`Image::create_snapshot`]; or the snapshot does not exist.
    pub fn apply_snapshot(mut self, which: &str) -> Result<()> {
        let (_, snapshot) = self.snapshot(which)?;
        if self.header.bitmaps.is_some() {
            return refused(
                "the persistent bitmaps of the image would no longer match the disk; hint: remove them first with qemu-img bitmap --remove"
                    .to_owned(),
            );
        }
        let size = snapshot.size.unwrap_or(self.header.size);
        let l1 = (snapshot.l1_offset, snapshot.l1_entries);
        let needed = size.div_ceil(self.header.l2_span());
        if size > i64::MAX as u64 || !size.is_multiple_of(512) || needed > L1_BYTES_MAX / 8 {
            return corrupt(format!("the snapshot's disk has {size} bytes"));
        }
        self.begin_change()?;
        let entries = l1.1.max(needed as u32);
        let offset = self.copy_l1(l1, entries)?;
        // Size, encryption method (none) and L1 table fields are adjacent and in one sector.
        let mut fields = size.to_be_bytes().to_vec();
        fields.extend(0_u32.to_be_bytes());
        fields.extend(entries.to_be_bytes());
        fields.extend(offset.to_be_bytes());
        self.change_over(SIZE_FIELD, &fields)?;
        self.end_change()
    }

    /// Deletes a snapshot, found by name or ID, and frees its exclusive clusters.
    ///
    /// # Errors
    /// As [`Image::apply_snapshot`].
    pub fn delete_snapshot(mut self, which: &str) -> Result<()> {
        let (index, _) = self.snapshot(which)?;
        self.begin_change()?;
        let mut entries = snapshots::raw_entries(&self.storage, &self.header)?;
        entries.remove(index);
        self.set_snapshots(&entries)?;
        self.end_change()
    }

    /// Finds the first snapshot with this name, or else the first with this ID.
    fn snapshot(&self, which: &str) -> Result<(usize, Snapshot)> {
        let mut all = self.snapshots.iter();
        let found = all.position(|known| known.name == which);
        let found = found.or_else(|| self.snapshots.iter().position(|known| known.id == which));
        match found {
            Some(index) => Ok((index, self.snapshots[index].clone())),
            None => refused(format!(
                "the image has no snapshot {which}; hint: list them with lunette image snapshot PATH"
            )),
        }
    }

    /// Rejects unsupported or damaged images and sets the dirty bit in the header.
    fn begin_change(&mut self) -> Result<()> {
        if self.header.version < 3 {
            return refused(
                "version 2 of the format has no dirty bit for reference counts; hint: qemu-img amend -o compat=1.1".to_owned(),
            );
        }
        if self.header.refcount_order < REFCOUNT_ORDER_MIN {
            let bits = 1 << self.header.refcount_order;
            return refused(format!(
                "reference counts of {bits} bits are too small for snapshots; hint: create an image with 16 bits with lunette image convert"
            ));
        }
        let report = self.examine(Repair::Nothing)?;
        if report.corruptions > 0 {
            let faults = report.findings.join("; ");
            return corrupt(format!(
                "the image has faults: {faults}; hint: lunette image check --repair all"
            ));
        }
        self.set_incompatible(self.header.incompatible | DIRTY)
    }

    /// Recounts all clusters from the new tables.
    fn end_change(self) -> Result<()> {
        let header = Header::read(&self.storage)?;
        let mut image = Image::read(self.storage, header, false)?;
        image.repair_after_crash()
    }

    /// Writes a copy of an L1 table, extended to `as_many` entries, with the COPIED flags cleared.
    fn copy_l1(&mut self, (offset, entries): (u64, u32), as_many: u32) -> Result<u64> {
        let mut table = read_table(&self.storage, offset, entries)?;
        table.resize(as_many as usize, 0);
        let table: Vec<u8> = table
            .into_iter()
            .flat_map(|entry| (entry & !COPIED).to_be_bytes())
            .collect();
        self.put(&table)
    }

    /// Writes a table into new clusters and syncs. Returns its offset.
    fn put(&mut self, table: &[u8]) -> Result<u64> {
        let clusters = (table.len() as u64).div_ceil(self.header.cluster_bytes());
        let first = self.take_together(clusters.max(1))?;
        let offset = first << self.header.cluster_bits;
        let mut padded = table.to_vec();
        padded.resize((clusters.max(1) << self.header.cluster_bits) as usize, 0);
        self.storage
            .write_at(offset, &padded)
            .and_then(|()| self.storage.sync())
            .map_err(io("cannot write a table"))?;
        Ok(offset)
    }

    fn set_snapshots(&mut self, entries: &[Vec<u8>]) -> Result<()> {
        let offset = match entries {
            [] => 0,
            entries => self.put(&entries.concat())?,
        };
        let mut fields = (entries.len() as u32).to_be_bytes().to_vec();
        fields.extend(offset.to_be_bytes());
        self.change_over(SNAPSHOTS_FIELD, &fields)
    }

    /// Writes within one sector, so that the change is atomic.
    fn change_over(&mut self, field: u64, bytes: &[u8]) -> Result<()> {
        self.storage
            .write_at(field, bytes)
            .and_then(|()| self.storage.sync())
            .map_err(io("cannot write the header"))
    }
}

fn refused<T>(reason: String) -> Result<T> {
    Err(Error::Unsupported(reason))
}

/// Builds an entry of the snapshot table.
fn entry(l1: (u64, u32), (id, name): (&str, &str), seconds: u32, size: u64) -> Vec<u8> {
    let mut entry = l1.0.to_be_bytes().to_vec();
    entry.extend(l1.1.to_be_bytes());
    entry.extend((id.len() as u16).to_be_bytes());
    entry.extend((name.len() as u16).to_be_bytes());
    entry.extend(seconds.to_be_bytes());
    // nanoseconds; VM clock; 32-bit VM state size
    entry.extend([0; 4 + 8 + 4]);
    entry.extend(EXTRA_BYTES.to_be_bytes());
    debug_assert_eq!(entry.len(), ENTRY_BYTES);
    entry.extend(0_u64.to_be_bytes());
    entry.extend(size.to_be_bytes());
    entry.extend(id.as_bytes());
    entry.extend(name.as_bytes());
    entry.resize(entry.len().next_multiple_of(8), 0);
    entry
}
