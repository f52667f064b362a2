//! Snapshots that are taken, gone back to and removed, in an image that nobody serves.
//!
//! Each change writes new tables beside the old ones, changes over with one write into the header, and then counts all clusters anew. The
//! image is marked as not closed cleanly from before that write until the counts are right, so that whoever opens it after a crash counts
//! them.

use crate::check::Repair;
use crate::entry::COPIED;
use crate::header::{DIRTY, L1_BYTES_MAX, SIZE_FIELD, SNAPSHOTS_FIELD, SNAPSHOTS_MAX};
use crate::image::read_table;
use crate::snapshots::{self, ENTRY_BYTES, L1_ENTRIES_MAX, Snapshot};
use crate::{Error, Header, Image, Result, Storage, corrupt, io};

/// As long as QEMU reads it.
const NAME_MAX: usize = 255;
/// Counts of fewer bits have no room for what snapshots share.
const REFCOUNT_ORDER_MIN: u32 = 4;
/// The fixed part's length of the state of a machine and the disk's size, behind it.
const EXTRA_BYTES: u32 = 16;

impl<S: Storage> Image<S> {
    /// Takes a snapshot of the disk as it is; gives its number. `seconds`: since 1970.
    ///
    /// # Errors
    /// The storage's; the image has faults, or cannot have one more; or the name is taken. Nothing has changed then, or the next who opens
    /// the image for writing puts its counts right.
    pub fn create_snapshot(mut self, name: &str, seconds: u32) -> Result<String> {
        if name.is_empty() || name.len() > NAME_MAX {
            let length = name.len();
            return refused(format!(
                "a snapshot's name has 1 to {NAME_MAX} bytes, this one {length}"
            ));
        }
        if self.header.has_data_file() {
            return refused("a disk with a data file has no snapshots in its image; hint: a new image over it, lunette image create --backing".to_owned());
        }
        if self.snapshots.iter().any(|known| known.name == name) {
            return refused(format!("it has a snapshot of the name {name} already"));
        }
        let l1_entries = self.snapshots.iter().map(|known| known.l1_entries);
        let l1_entries = l1_entries.chain([self.header.l1_entries]).map(u64::from);
        if self.snapshots.len() >= SNAPSHOTS_MAX as usize
            || l1_entries.sum::<u64>() > L1_ENTRIES_MAX
        {
            return refused(format!(
                "it has {} snapshots, and with one more it could not be opened; hint: lunette image snapshot --delete removes one",
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

    /// The disk is as it was when a snapshot was taken, found by its name or its number; what it was last is lost.
    ///
    /// # Errors
    /// As [`Image::create_snapshot`]; or there is no such snapshot.
    pub fn apply_snapshot(mut self, which: &str) -> Result<()> {
        let (_, snapshot) = self.snapshot(which)?;
        if self.header.bitmaps.is_some() {
            return refused(
                "its persistent bitmaps would not match the disk afterwards; hint: remove them first, qemu-img bitmap --remove"
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
        // Size, no encryption, and the table: next to each other, and in one sector.
        let mut fields = size.to_be_bytes().to_vec();
        fields.extend(0_u32.to_be_bytes());
        fields.extend(entries.to_be_bytes());
        fields.extend(offset.to_be_bytes());
        self.change_over(SIZE_FIELD, &fields)?;
        self.end_change()
    }

    /// Removes a snapshot, found by its name or its number; clusters that it alone had are free.
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

    /// The first snapshot of a name; a number is meant where no snapshot has such a name.
    fn snapshot(&self, which: &str) -> Result<(usize, Snapshot)> {
        let mut all = self.snapshots.iter();
        let found = all.position(|known| known.name == which);
        let found = found.or_else(|| self.snapshots.iter().position(|known| known.id == which));
        match found {
            Some(index) => Ok((index, self.snapshots[index].clone())),
            None => refused(format!(
                "it has no snapshot {which}; hint: lunette image snapshot PATH lists them"
            )),
        }
    }

    /// Refuses what cannot be changed safely, and says in the header that the counts may be old.
    fn begin_change(&mut self) -> Result<()> {
        if self.header.version < 3 {
            return refused(
                "version 2 of the format has no mark for counts that may be old; hint: qemu-img amend -o compat=1.1".to_owned(),
            );
        }
        if self.header.refcount_order < REFCOUNT_ORDER_MIN {
            let bits = 1 << self.header.refcount_order;
            return refused(format!(
                "reference counts of {bits} bits have no room for snapshots; hint: lunette image convert makes an image with 16"
            ));
        }
        let report = self.examine(Repair::Nothing)?;
        if report.corruptions > 0 {
            let faults = report.findings.join("; ");
            return corrupt(format!(
                "it has faults: {faults}; hint: lunette image check --repair all"
            ));
        }
        self.set_incompatible(self.header.incompatible | DIRTY)
    }

    /// Counts all clusters anew, by the new tables.
    fn end_change(self) -> Result<()> {
        let header = Header::read(&self.storage)?;
        let mut image = Image::read(self.storage, header, false)?;
        image.repair_after_crash()
    }

    /// A copy of an L1 table with so many entries, none of which says that it alone has its table.
    fn copy_l1(&mut self, (offset, entries): (u64, u32), as_many: u32) -> Result<u64> {
        let mut table = read_table(&self.storage, offset, entries)?;
        table.resize(as_many as usize, 0);
        let table: Vec<u8> = table
            .into_iter()
            .flat_map(|entry| (entry & !COPIED).to_be_bytes())
            .collect();
        self.put(&table)
    }

    /// Puts a table into clusters of its own, durably; gives its offset.
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

    /// One write, within a sector: it happens or it does not.
    fn change_over(&mut self, field: u64, bytes: &[u8]) -> Result<()> {
        self.storage
            .write_at(field, bytes)
            .and_then(|()| self.storage.sync())
            .map_err(io("cannot write the header"))
    }
}

fn refused<T>(what: String) -> Result<T> {
    Err(Error::Unsupported(what))
}

/// An entry of the snapshot table.
fn entry(l1: (u64, u32), (id, name): (&str, &str), seconds: u32, size: u64) -> Vec<u8> {
    let mut entry = l1.0.to_be_bytes().to_vec();
    entry.extend(l1.1.to_be_bytes());
    entry.extend((id.len() as u16).to_be_bytes());
    entry.extend((name.len() as u16).to_be_bytes());
    entry.extend(seconds.to_be_bytes());
    // nanoseconds of the date; the machine's clock; 32 bits of its state's length
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
